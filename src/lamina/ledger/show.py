"""Records as people and machines read them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lamina.admit.times import shown
from lamina.ledger.amounts import NANO, UNBOUNDED
from lamina.ledger.errors import LedgerError
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import (
    WORDS,
    Admitted,
    Aggregate,
    Epoch,
    Header,
    KeyEvent,
    Outcome,
    PolicyChange,
    Record,
    Release,
    Withdrawal,
)
from lamina.ledger.view import View

_BOUNDS = 4  # signed bounds of an epoch that are told in its line
KINDS = {word: kind for kind, word in WORDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which records to show. None asks for nothing.

    A class fits contributions of it and whatever speaks of it; a run, by its first hex digits, its epochs, the
    withdrawals that name it and the releases that contain it.
    """

    kinds: tuple[str, ...] = ()
    cls: str | None = None
    run: str | None = None
    since: int | None = None
    until: int | None = None
    first: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise LedgerError(f"there is no kind {kind!r} of record", f"kinds are {', '.join(KINDS)}")

    def leaves(self, ledger: View) -> Iterator[Leaf]:
        """Those of a ledger, in order."""
        size = ledger.size
        stop = size if self.stop is None else min(self.stop, size)
        if len(self.kinds) == 1:
            found = ledger.of_kind(KINDS[self.kinds[0]], self.first, stop)
        else:
            found = ledger.leaves(self.first, stop)
        for leaf in found:
            if self.until is not None and leaf.time >= self.until:
                return  # time never falls
            if self._fits(leaf):
                yield leaf

    def _fits(self, leaf: Leaf) -> bool:
        return (
            (not self.kinds or WORDS[leaf.kind] in self.kinds)
            and (self.since is None or leaf.time >= self.since)
            and (self.cls is None or self.cls in _classes(leaf.record))
            and (
                self.run is None or any(run.hex().startswith(self.run.lower()) for run in _runs(leaf.record))
            )
        )


def _classes(record: Record) -> set[str]:
    match record:
        case Admitted(terms=terms):
            return {terms.cls}
        case Epoch(accounts=found) | Aggregate(classes=found):
            return {each.cls for each in found}
        case Header(presets=found) | PolicyChange(presets=found):
            return {each.cls for each in found}
    return set()


def _runs(record: Record) -> tuple[bytes, ...]:
    match record:
        case Epoch(run=run):
            return (run,)
        case Withdrawal(run=bytes(run)):
            return (run,)
        case Release(runs=runs):
            return runs
    return ()


# ----------------------------------------------------------------------------------- for machines


def as_object(leaf: Leaf) -> dict[str, Any]:
    """A leaf with all that its record says: bytes in hexadecimal, times as UTC, ε as plain numbers beside 1e-9."""
    body = _plain(leaf.record)
    assert isinstance(body, dict)
    return {
        "index": leaf.seq,
        "time": shown(leaf.time),
        "epoch": leaf.epoch,
        "kind": WORDS[leaf.kind],
        **{name: value for name, value in body.items() if name not in ("index", "time", "epoch", "kind")},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value):
        named = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value) if each.init)
        return {"class" if name == "cls" else name: _plain(one) for name, one in named}
    return value


# ----------------------------------------------------------------------------------- for people


def in_words(leaf: Leaf) -> str:
    """What a record says, in one line."""
    match leaf.record:
        case Header() as r:
            keys = f"{len(r.keys)} keys"
            return f"{r.origin}: {r.accountant} at δ = {r.delta:g}, kept {r.retention / 86400:g} days, {keys}"
        case Admitted(terms=t) as r:
            bound = f"c {t.clip_norm / 1e6:g}, z {t.noise_multiplier / 1e6:g}" if t.clip_norm else "public"
            return f"{r.descriptor.hex()[:16]}  {t.cls}, {bound}, {t.profile or 'any depth'}"
        case Epoch() as r:
            return f"run {r.run.hex()[:8]} {_segments(r)}: {_spends(r)}"
        case Withdrawal() as r:
            return f"of leaf {r.target}: {r.reason.name.lower()}, open segment: {r.effect.name.lower()}"
        case KeyEvent() as r:
            new = "" if r.key is None else f" {r.key.name} ({r.key.role.name.lower()}, {r.key.id.hex()[:16]})"
            old = (
                ""
                if r.target is None
                else f" {'for' if r.key else ''} {r.target.hex()[:16]}".replace("  ", " ")
            )
            return f"{r.change.name.lower()}{new}{old} from {shown(r.effective)}"
        case Aggregate() as r:
            totals = ", ".join(f"{each.count} {each.cls} (ε {epsilon(each.spend)})" for each in r.classes)
            return f"of {r.count} contributions until {shown(r.horizon)}: {totals}; {len(r.signatures)} countersigned"
        case PolicyChange() as r:
            floors = f"clip norm {r.floors.clip_norm / 1e6:g}, noise multiplier {r.floors.noise_multiplier / 1e6:g}"
            return f"floors: {floors}; {len(r.presets)} classes, signed by {len(r.signatures)}"
        case Release() as r:
            runs = ", ".join(run.hex()[:8] for run in r.runs) or "none"
            until = "" if r.not_after is None else f", until {shown(r.not_after)}"
            return f"{r.manifest.hex()[:16]} of runs {runs}{until}"


def _segments(record: Epoch) -> str:
    told = []
    for each in record.segments:
        again = f".{each.generation}" if each.generation else ""
        given_up = " given up" if each.outcome is Outcome.ABANDONED else ""
        told.append(f"{each.index}{again} [{each.first}, {each.last}){given_up}")
    return ", ".join(told)


def _spends(record: Epoch) -> str:
    """Classes as a whole, and of signed bounds those that lost most."""
    classes = [each for each in record.accounts if not each.noise_multiplier]
    signed = sorted((each for each in record.accounts if each.noise_multiplier), key=lambda each: -each.spend)
    told = [f"{bound_in_words(each.bound)} ε {epsilon(each.spend)}" for each in (*classes, *signed[:_BOUNDS])]
    if (more := len(signed) - _BOUNDS) > 0:
        told.append(f"and {more} more bound{'s' if more > 1 else ''}")
    return "; ".join(told) or "nobody was charged"


def bound_in_words(bound: tuple[str, int, int]) -> str:
    """A class, and what its contributions signed.

    >>> bound_in_words(("clinical", 500_000, 4_000_000)), bound_in_words(("clinical", 0, 0))
    ('clinical (c 0.5, z 4)', 'clinical')
    """
    cls, clip, noise = bound
    return f"{cls} (c {clip / 1e6:g}, z {noise / 1e6:g})" if noise else cls


def epsilon(spend: int, digits: int = 4) -> str:
    """A spend as ε, never printed smaller than it is."""
    if spend == UNBOUNDED:
        return "∞"
    unit = NANO // 10**digits
    return f"{-(-spend // unit) / 10**digits:.{digits}f}"
