"""Withdrawals: how a contribution leaves. A record is appended; nothing is erased.

From the next segment on it is in no batch of any run. What it has lost stays lost, and is reconciled here: a withdrawal
stops further loss, it does not unlearn. Whoever serves a model asks the ledger, and the record is what counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lamina.admit.times import shown
from lamina.ledger.errors import LedgerError
from lamina.ledger.find import find
from lamina.ledger.leaf import Leaf
from lamina.ledger.ledger import Ledger
from lamina.ledger.records import Admitted, Effect, Reason, Withdrawal
from lamina.ledger.show import plain
from lamina.ledger.trace import Lost, lost

REASONS = {reason.name.lower(): reason for reason in Reason}
EFFECTS = {effect.name.lower(): effect for effect in Effect}


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A contribution that is out: the leaf that says so, the contribution, and what it had lost until then.

    `again` is whether it was out before, and nothing was appended.
    """

    leaf: Leaf
    target: Leaf
    lost: Lost
    again: bool

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        record, of, lost = self.leaf.record, self.target.record, self.lost
        assert isinstance(record, Withdrawal) and isinstance(of, Admitted)
        return {
            "index": self.leaf.seq,
            "target": self.target.seq,
            "descriptor": of.descriptor.hex(),
            "class": of.terms.cls,
            "reason": record.reason.name.lower(),
            "effect": record.effect.name.lower(),
            "time": shown(self.leaf.time),
            "again": self.again,
            "epsilon": plain(lost.spend),
            "epsilon_signed": None if lost.signed is None else plain(lost.signed),
            "epochs": lost.epochs,
            "releases": [each.seq for each in lost.releases],
        }


def withdraw(
    ledger: Ledger,
    name: str,
    reason: Reason,
    *,
    effect: Effect = Effect.FINISH,
    run: bytes | None = None,
    segment: int | None = None,
    request: bytes | None = None,
) -> list[Withdrawn]:
    """Withdraw the contributions of a descriptor digest or content anchor (64 hex digits), or of a leaf.

    All or none; whoever is out already stays out, for the reason that was given first. `request` is the digest of a
    signed request. With the ledger's key, a checkpoint covers it at once. `run` and `segment` say which segment is the
    first without it; one that is open already can only be given up.
    """
    if run is not None and segment is not None and effect is Effect.FINISH:
        with ledger.store.read() as rows:
            if rows.generations(run, segment):
                raise LedgerError(
                    "ledger.segment-run-opened",
                    f"segment {segment} of run {run.hex()[:8]} was opened before",
                    "name the segment after it, or let it be given up: effect abandon",
                )
    leaves = find(ledger, name)
    new = [leaf for leaf in leaves if ledger.withdrawn(leaf.seq) is None]
    records = [
        Withdrawal(target=leaf.seq, reason=reason, effect=effect, run=run, segment=segment, request=request)
        for leaf in new
    ]
    try:
        ledger.append(records)
    except LedgerError:
        if any(ledger.withdrawn(leaf.seq) is None for leaf in new):
            raise  # otherwise another process was quicker
    if ledger.signs:
        ledger.checkpoint()
    return [_withdrawn(ledger, leaf, new) for leaf in leaves]


def _withdrawn(ledger: Ledger, leaf: Leaf, new: Iterable[Leaf]) -> Withdrawn:
    seq = ledger.withdrawn(leaf.seq)
    assert seq is not None
    return Withdrawn(ledger.leaf(seq), leaf, lost(ledger, leaf), leaf not in new)


def reason_of(word: str) -> Reason:
    """A reason by its name."""
    if word not in REASONS:
        raise LedgerError(
            "ledger.no-reason-withdraw",
            f"{word!r} is no reason to withdraw",
            f"reasons are {', '.join(REASONS)}",
        )
    return REASONS[word]


def effect_of(word: str) -> Effect:
    """An effect by its name."""
    if word not in EFFECTS:
        raise LedgerError(
            "ledger.no-effect-withdrawal",
            f"{word!r} is no effect of a withdrawal",
            f"effects are {', '.join(EFFECTS)}",
        )
    return EFFECTS[word]
