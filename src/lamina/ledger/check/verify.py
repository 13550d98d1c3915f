"""`verify`: whether a ledger is what it claims to be. Needs its store, and neither payloads nor torch."""

from __future__ import annotations

import os
from collections.abc import Iterable

from lamina.ledger.check.audit import Audit, Progress
from lamina.ledger.check.problem import STORE, Bad, Problem
from lamina.ledger.check.report import Held, Verification
from lamina.ledger.check.trust import Seen, Trust, all_seen
from lamina.ledger.show import counted
from lamina.ledger.store import make_store
from lamina.ledger.store.base import Reader, Store
from lamina.ledger.store.errors import Damaged, StoreError

_RUNS = 5  # that are named in a note


def verify(
    where: str | os.PathLike[str] | Store,
    *,
    trust: Trust | None = None,
    seen: Iterable[str | bytes | Seen] = (),
    signatures: bool = True,
    now: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Replay a ledger from leaf 0, and name the first thing that is wrong.

    Checked are: the form, order, hashes and times of all leaves; every checkpoint, its root and its signature; the
    bounds of contributions against floors and classes, and (unless `signatures` is false) their attestations; key
    events, policy changes, withdrawals, aggregates and releases; and every spend, computed anew from the plans by the
    header's accountant. What was pruned is held to what was kept of it.

    Without `trust` and `seen` that shows a ledger that is consistent in itself, signed by keys that it names itself:
    whoever can write all of it can make such a one. With `trust` the signatures must be of keys that came from
    elsewhere; with `seen` it must go on from every checkpoint that was seen before.
    """
    found = all_seen(seen)
    if not isinstance(where, str | os.PathLike):
        return _opened(where, trust, found, signatures, now, progress)
    try:
        store = make_store(where, readonly=True)
    except Damaged as error:
        return _refused(Problem(None, STORE, "verify.verify", error.problem), 0)
    try:
        return _opened(store, trust, found, signatures, now, progress)
    finally:
        store.close()


def _opened(
    store: Store,
    trust: Trust | None,
    seen: list[Seen],
    signatures: bool,
    now: int | None,
    progress: Progress | None,
) -> Verification:
    try:
        with store.read() as rows:
            return _verified(rows, trust, seen, signatures, now, progress)
    except (Damaged, StoreError) as error:
        return _refused(Problem(None, STORE, "verify.opened", error.problem), 0)


def _verified(
    rows: Reader,
    trust: Trust | None,
    seen: list[Seen],
    signatures: bool,
    now: int | None,
    progress: Progress | None,
) -> Verification:
    audit: Audit | None = None
    problem: Problem | None = None
    try:
        audit = Audit(rows, trust=trust, seen=seen, signatures=signatures, now=now)
        audit.run(progress)
    except Bad as error:
        problem = error.problem
    except (TypeError, ValueError) as error:  # text or nothing where a store has bytes
        at = None if audit is None else audit.tree.size
        problem = Problem(
            at, STORE, "verify.row-holds-not", f"a row holds what does not belong there: {error}"
        )
    if audit is None:
        assert problem is not None
        head = rows.head()
        return _refused(problem, 0 if head is None else head.size)
    problem = _earliest(problem, audit.contributions.repeats.first(rows), _mispriced(audit, problem))
    return _told(audit, problem, trust)


def _mispriced(audit: Audit, problem: Problem | None) -> Problem | None:
    """The first spend that is not what the accountant finds; later ones than `problem` are not asked about."""
    for claim in audit.epochs.claims:
        if problem is not None and problem.index is not None and claim.seq >= problem.index:
            return None
        if (found := claim.problem(audit.header)) is not None:
            return found
    return None


def _earliest(*found: Problem | None) -> Problem | None:
    real = [each for each in found if each is not None]
    return min(real, key=lambda each: 1 << 63 if each.index is None else each.index, default=None)


def _told(audit: Audit, problem: Problem | None, trust: Trust | None) -> Verification:
    whole = audit.tree.size == audit.head.size
    checkpoints = audit.checkpoints
    return Verification(
        verified=problem is None,
        trusted=problem is None and trust is not None,
        origin=audit.header.origin,
        size=audit.head.size,
        root=audit.tree.root() if whole else None,
        signed=checkpoints.good,
        checkpoints=checkpoints.count,
        attestations=0 if audit.attestations is None else audit.attestations.checked,
        spends=len(audit.epochs.claims),
        problem=problem,
        counts=audit.counts,
        notes=tuple(_notes(audit, trust)) if problem is None else (),
        held=audit.held,
    )


def _notes(audit: Audit, trust: Trust | None) -> Iterable[str]:
    size, good = audit.head.size, audit.checkpoints.good
    if trust is None:
        yield "the keys are the ledger's own word: give --trust with keys from elsewhere"
    if good < size:
        yield f"leaves [{good}, {size}) are not signed yet"
    if audit.attestations is None:
        yield "attestations were not checked"
    if audit.pruned:
        pruned = counted(audit.pruned, "contribution is", "contributions are")
        yield f"{pruned} pruned: only hashes are left"
    if audit.aggregates.alone:
        yield f"{counted(audit.aggregates.alone, 'aggregate is', 'aggregates are')} countersigned by nobody"
    if audit.epochs.silent:
        yield (
            f"{counted(audit.epochs.silent, 'epoch has', 'epochs have')} no account for a bound that an eligible "
            "contribution signed: that it was left out there is the ledger's word"
        )
    if audit.policy.alone:
        where = ", ".join(map(str, audit.policy.alone[:5]))
        yield (
            f"a policy that protects less (leaf {where}) was signed by a party that the header does not name: that it "
            "is another one than the ledger's keeper is the ledger's word"
        )
    if audit.held:
        yield _held(audit.held)


def _held(held: tuple[Held, ...]) -> str:
    attempts, reserved = sum(each.attempts for each in held), sum(each.reserved for each in held)
    runs = ", ".join(map(str, held[:_RUNS]))
    more = f" and {len(held) - _RUNS} more" if len(held) > _RUNS else ""
    return (
        f"{counted(attempts, 'attempt is', 'attempts are')} held open and {counted(reserved, 'plan')} reserved, in no "
        f"leaf yet, and count against the bounds: of {'run' if len(held) == 1 else 'runs'} {runs}{more}"
    )


def _refused(problem: Problem, size: int) -> Verification:
    return Verification(
        verified=False,
        trusted=False,
        origin=None,
        size=size,
        root=None,
        signed=0,
        checkpoints=0,
        attestations=0,
        spends=0,
        problem=problem,
    )
