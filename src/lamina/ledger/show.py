"""Records as people and machines read them."""

from __future__ import annotations

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
    Key,
    KeyEvent,
    Outcome,
    PolicyChange,
    Record,
    Release,
    Withdrawal,
)
from lamina.ledger.records.fields import MICRO, SPEND, TIME, Many, Octets, OneOf, Part, Shape, schema
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
                raise LedgerError(
                    "ledger.no-kind-record",
                    f"there is no kind {kind!r} of record",
                    f"kinds are {', '.join(KINDS)}",
                )

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
    """A leaf with all that its record says, in one form for every kind.

    Bytes are hexadecimal, times RFC 3339 in UTC, durations seconds; norms, multipliers and ε plain numbers, of which
    the decimal is exactly what the record holds; `spend` is `epsilon`, null where no finite figure is known. What the
    record leaves out is null.
    """
    body = _object(leaf.record)
    return {
        "index": leaf.seq,
        "time": shown(leaf.time),
        "epoch": leaf.epoch,
        "kind": WORDS[leaf.kind],
        **{name: value for name, value in body.items() if name not in ("index", "time", "epoch", "kind")},
    }


def plain(spend: int) -> float | None:
    """ε of a spend as a number; JSON has no infinity."""
    return None if spend == UNBOUNDED else spend / NANO


_CALLED = {"cls": "class", "spend": "epsilon"}


def _object(record: Any) -> dict[str, Any]:
    """A record or a part of one, field by field as its schema says."""
    found: dict[str, Any] = {"id": record.id.hex()} if isinstance(record, Key) else {}
    for each in schema(type(record)).fields:
        value = getattr(record, each.name)
        found[_CALLED.get(each.name, each.name)] = None if value is None else _plain(each.shape, value)
    return found


def _plain(shape: Shape, value: Any) -> Any:
    match shape:
        case Many(each=each):
            return [_plain(each, one) for one in value]
        case Part():
            return _object(value)
        case Octets():
            return value.hex()
        case OneOf():
            return value.name.lower()
    numbers = {TIME: shown, MICRO: _units, SPEND: plain}
    return numbers[shape](value) if shape in numbers else value


def _units(micro: int) -> float:
    return micro / 1e6


# ----------------------------------------------------------------------------------- for people


def in_words(leaf: Leaf) -> str:
    """What a record says, in one line."""
    match leaf.record:
        case Header() as r:
            kept = f"kept {r.retention / 86400:g} day{'' if r.retention == 86400 else 's'}"
            return f"{r.origin}: {r.accountant} at δ = {r.delta:g}, {kept}, {counted(len(r.keys), 'key')}"
        case Admitted(terms=t) as r:
            bound = f"c {number(t.clip_norm)}, z {number(t.noise_multiplier)}" if t.clip_norm else "public"
            return f"{r.descriptor.hex()[:16]}  {t.cls}, {bound}, {t.profile or 'any depth'}"
        case Epoch() as r:
            word = "segment" if len(r.segments) == 1 else "segments"
            return f"run {r.run.hex()[:8]}, {word} {_segments(r)}: {_spends(r)}"
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
            old = f"{counted(r.count, 'contribution')}, admitted before {shown(r.horizon)}"
            return f"of {old}: {totals}; countersigned by {len(r.signatures)}"
        case PolicyChange() as r:
            floors = f"clip norm {number(r.floors.clip_norm)}, noise multiplier {number(r.floors.noise_multiplier)}"
            parts = (
                f"{counted(len(r.presets), 'class', 'classes')}, {counted(len(r.signatures), 'signature')}"
            )
            return f"floors: {floors}; {parts}"
        case Release() as r:
            runs = ", ".join(run.hex()[:8] for run in r.runs) or "none"
            until = "" if r.not_after is None else f", until {shown(r.not_after)}"
            return f"{r.manifest.hex()[:16]} of {'run' if len(r.runs) == 1 else 'runs'} {runs}{until}"


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
        told.append(f"and {counted(more, 'more bound')}")
    return "; ".join(told) or "nobody was charged"


def bound_in_words(bound: tuple[str, int, int]) -> str:
    """A class, and what its contributions signed.

    >>> bound_in_words(("clinical", 500_000, 4_000_000)), bound_in_words(("clinical", 0, 0))
    ('clinical (c 0.5, z 4)', 'clinical')
    """
    cls, clip, noise = bound
    return f"{cls} (c {number(clip)}, z {number(noise)})" if noise else cls


def counted(count: int, one: str, many: str | None = None) -> str:
    """So many of them.

    >>> counted(1, "leaf", "leaves"), counted(1_200, "leaf", "leaves"), counted(0, "run")
    ('1 leaf', '1,200 leaves', '0 runs')
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def epsilon(spend: int, digits: int = 4) -> str:
    """A spend as ε, never printed smaller than it is."""
    if spend == UNBOUNDED:
        return "∞"
    unit = NANO // 10**digits
    return f"{-(-spend // unit) / 10**digits:.{digits}f}"


def remaining(spend: int, digits: int = 4) -> str:
    """What remains of a bound as ε, never printed larger than it is.

    >>> epsilon(123_450_001), remaining(123_459_999)
    ('0.1235', '0.1234')
    """
    return (
        "∞" if spend == UNBOUNDED else epsilon(max(0, spend) // (unit := NANO // 10**digits) * unit, digits)
    )


def number(micro: int) -> str:
    """A norm or multiplier, all of its digits.

    >>> number(1_390_594), number(4_000_000)
    ('1.390594', '4')
    """
    return f"{micro / 1e6:.15g}"
