"""Records as people and machines read them: one line, or JSON."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from lamina import validate
from lamina.codec import FieldType, schema_of
from lamina.errors import LedgerError
from lamina.ledger.governance_records import (
    ABOUT,
    ABOUT_CHANGE,
    About,
    Aggregate,
    GoverningRecord,
    Header,
    Key,
    KeyEvent,
    KeyEvents,
    PolicyChange,
    Release,
    TermsChange,
    Withdrawal,
    WithdrawalRule,
)
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import (
    KIND_NAMES,
    KINDS,
    KINDS_BY_NAME,
    ContributionRecord,
    ContributionTerms,
    Epoch,
    KeptContribution,
    Leaf,
    Record,
    SegmentOutcome,
)
from lamina.ledger.run_records import NoiseOrigin, RunBegin, RunEnd
from lamina.ledger.schema import MICRO, NANO, SPEND, TIME, UNBOUNDED, pluralize
from lamina.ledger.withdrawal_request import describe_signer
from lamina.sign.keys import format_utc

_MAX_BOUNDS_SHOWN = 4  # signed bounds of an epoch that are told in its line


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Which records to show. None selects all.

    A class selects its contributions and the other records that name it. A run, given by its first hex digits, selects
    its start, epochs and ends, the withdrawals that name it and the releases that contain it.
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
            validate.one_of(LedgerError, "ledger.kind-unknown", KINDS_BY_NAME, kind=kind)

    def leaves(self, ledger: LedgerReader) -> Iterator[Leaf]:
        """Those of a ledger, in order."""
        size = ledger.size
        stop = size if self.stop is None else min(self.stop, size)
        if len(self.kinds) == 1:
            found = ledger.unchecked(KINDS_BY_NAME[self.kinds[0]], self.first, stop)
        else:
            found = ledger.leaves(self.first, stop)
        for leaf in found:
            if self.until is not None and leaf.time >= self.until:
                return  # time never falls
            if self._fits(leaf):
                yield leaf

    def _fits(self, leaf: Leaf) -> bool:
        kind = KINDS[leaf.kind]
        return (
            (not self.kinds or kind.name in self.kinds)
            and (self.since is None or leaf.time >= self.since)
            and (self.cls is None or self.cls in kind.classes(leaf.record))
            and (self.run is None or any(run.hex().startswith(self.run.lower()) for run in kind.runs(leaf.record)))
        )


# ----------------------------------------------------------------------------------- for machines


def leaf_to_dict(leaf: Leaf) -> dict[str, Any]:
    """A leaf with all that its record says, in one form for every kind.

    Bytes are hexadecimal, times RFC 3339 in UTC, durations seconds; norms, multipliers and ε plain numbers, of which
    the decimal is exactly what the record holds; `spend` is `epsilon`, null where no finite figure is known. What the
    record leaves out is null, and what was in the body of a contribution that is `pruned`.
    """
    body = record_to_dict(leaf.record)
    if leaf.kind is ContributionRecord:
        body["pruned"] = isinstance(leaf.record, KeptContribution)
    if isinstance(leaf.record, Withdrawal):
        body["by"] = describe_signer(leaf.record)
    if isinstance(leaf.record, KeptContribution):  # in the form of the whole record
        names = ("class", "data_class", "clip_norm", "noise_multiplier", "profile")
        terms = {name: body.pop(name, None) for name in names}
        body = {**{each.name: None for each in schema_of(ContributionRecord).fields}, **body, "terms": terms}
    return {
        "index": leaf.seq,
        "time": format_utc(leaf.time),
        "epoch": leaf.epoch,
        "kind": KIND_NAMES[leaf.kind],
        **{name: value for name, value in body.items() if name not in ("index", "time", "epoch", "kind")},
    }


def leaf_excerpt(leaf: Leaf, *names: str) -> dict[str, Any]:
    """Index, time and some fields of a leaf."""
    told = leaf_to_dict(leaf)
    return {name: told[name] for name in ("index", "time", *names)}


def epsilon_or_none(spend: int) -> float | None:
    """ε of a spend as a number; JSON has no infinity."""
    return None if spend == UNBOUNDED else spend / NANO


_JSON_NAMES = {"cls": "class", "q": "rate", "spend": "epsilon"}


def record_to_dict(record: Any) -> dict[str, Any]:
    """A record or a part of one, field by field as its schema says."""
    found: dict[str, Any] = {"id": record.id.hex()} if isinstance(record, Key) else {}
    for each in schema_of(type(record)).fields:
        value = getattr(record, each.name)
        form = _FORMS.get(each.type, _value_to_json)
        found[_JSON_NAMES.get(each.name, each.name)] = None if value is None else form(value)
    return found


def _value_to_json(value: Any) -> Any:
    match value:
        case tuple():
            return [_value_to_json(one) for one in value]
        case bytes():
            return value.hex()
        case enum.Enum():
            return value.name.lower()
    return record_to_dict(value) if is_dataclass(value) else value


_FORMS: dict[FieldType, Any] = {
    TIME: format_utc, MICRO: lambda micro: micro / 1e6, SPEND: epsilon_or_none, ABOUT: dict, ABOUT_CHANGE: dict,
}  # fmt: skip


# ----------------------------------------------------------------------------------- for people


def describe_leaf(leaf: Leaf) -> str:
    """What a record says, in one line."""
    return KINDS[leaf.kind].show(leaf.record)


def _describe(record: Record | KeptContribution) -> str:
    match record:
        case Header() as r:
            kept = f"kept {r.retention / 86400:g} day{'' if r.retention == 86400 else 's'}"
            rule = "" if r.withdraw is None else f", {describe_rule(r.withdraw)}"
            if r.other_people is not None:
                rule += f", owner states other people than in ledgers beside it: {r.other_people}"
            rule += f", {_describe_names(r.about)}" if r.about else ""
            return f"{r.origin}: {r.accountant} at δ = {r.delta:g}, {kept}, {pluralize(len(r.keys), 'key')}{rule}"
        case ContributionRecord(terms=t) as r:
            return f"{r.descriptor.hex()[:16]}  {_describe_signed(t)}, {t.profile or 'any depth'}"
        case KeptContribution() as r:
            return f"{r.descriptor.hex()[:16]}  {_describe_signed(r)}, pruned"
        case Epoch() as r:
            word = "segment" if len(r.segments) == 1 else "segments"
            return f"run {r.run.hex()[:8]}, {word} {_describe_segments(r)}: {_describe_spends(r)}"
        case Withdrawal() as r:
            what = f"of leaf {r.target}: {r.reason.name.lower()}, open segment: {r.effect.name.lower()}"
            return f"{what}, {describe_by(r)}"
        case KeyEvents() as r:
            more = f", and {len(r.events) - 1} more" if len(r.events) > 1 else ""
            return f"{describe_event(r.events[0])}{more}{_describe_signers(r)}"
        case Aggregate() as r:
            totals = ", ".join(f"{each.count} {each.cls} (ε {format_epsilon(each.spend)})" for each in r.classes)
            old = f"{pluralize(r.count, 'contribution')}, admitted before {format_utc(r.horizon)}"
            return f"of {old}: {totals}; countersigned by {len(r.signatures)}"
        case PolicyChange() as r:
            floors = f"clip norm {format_micro(r.floors.clip_norm)}, noise multiplier {format_micro(r.floors.noise_multiplier)}"
            return f"floors: {floors}; {pluralize(len(r.presets), 'class', 'classes')}{_describe_signers(r)}"
        case TermsChange() as r:
            return f"{describe_terms(r)}{_describe_signers(r)}"
        case Release() as r:
            runs = ", ".join(run.hex()[:8] for run in r.runs) or "none"
            until = "" if r.not_after is None else f", until {format_utc(r.not_after)}"
            return f"{r.manifest.hex()[:16]} of {'run' if len(r.runs) == 1 else 'runs'} {runs}{until}"
        case RunBegin() as r:
            parent = "" if r.parent is None else f" {r.parent.hex()[:8]}"
            origin = "origin not declared" if r.origin is None else f"origin {r.origin.name.lower()}{parent}"
            with_what = "" if r.optimizer is None else f", with {r.optimizer}"
            return f"run {r.run.hex()[:8]} starts from weights {r.weights.hex()[:16]}, {origin}{with_what}"
        case RunEnd() as r:
            wrong = [
                *(["noise from a chosen seed"] * (r.noise is NoiseOrigin.SEEDED)), *(["not probed"] * (not r.probed)),
                *(["not covered"] * (not r.covered)), *(["raw figures handed out"] * r.raw_figures),
            ]  # fmt: skip
            stated = f"; the trainer states: {', '.join(wrong)}" if wrong else ""
            by = "".join(f", by lamina {each.lamina}, torch {each.torch}" for each in (r.programs or ())[-1:])
            return f"run {r.run.hex()[:8]} ended at step {r.steps} with weights {r.weights[:16]}{by}{stated}"


for _kind in KINDS.values():
    _kind.show = _describe


def _describe_signed(terms: ContributionTerms | KeptContribution) -> str:
    clip, noise = format_micro(terms.clip_norm), format_micro(terms.noise_multiplier)
    return f"{terms.cls}, c {clip}, z {noise}" if terms.clip_norm else f"{terms.cls}, public"


def describe_event(event: KeyEvent) -> str:
    """What happens to a key."""
    key = event.key
    new = "" if key is None else f" {key.name} ({key.role.name.lower()}, {key.id.hex()[:16]})"
    old = "" if event.target is None else f"{' for' if key else ''} {event.target.hex()[:16]}"
    return f"{event.change.name.lower()}{new}{old} from {format_utc(event.effective)}"


def describe_terms(record: TermsChange) -> str:
    """What a change of terms says."""
    parts = [] if record.witnesses is None else [f"{pluralize(record.witnesses, 'cosignature')} of witnesses"]
    parts += [] if record.retention is None else [f"kept {pluralize(record.retention // 86400, 'day')}"]
    parts += [] if record.withdraw is None else [describe_rule(record.withdraw)]
    parts += [_describe_names(record.about)] if record.about else []
    return ", ".join(parts)


def _describe_names(about: About) -> str:
    return f"owner states {', '.join(f'about.{name}' for name, _ in about)}"


def describe_about(about: About | None) -> list[str]:
    """Return the owner's statements, one per line."""
    return [f"about.{name}: {text or 'no longer stated'}" for name, text in about or ()]


def describe_by(record: Withdrawal) -> str:
    """Who withdrew."""
    return "by the keeper alone" if record.signed is None else f"signed by the {describe_signer(record)}"


def describe_rule(rule: WithdrawalRule) -> str:
    """Who may withdraw."""
    return "withdrawn by signed requests alone" if rule is WithdrawalRule.SIGNED else "the keeper may withdraw"


def _describe_signers(record: GoverningRecord) -> str:
    signed = () if record.authorization is None else record.authorization.signatures
    return f", by {' and '.join(each.key.hex()[:16] for each in signed) or 'nobody'}"


def _describe_segments(record: Epoch) -> str:
    told = []
    for each in record.segments:
        again = f".{each.generation}" if each.generation else ""
        given_up = " given up" if each.outcome is SegmentOutcome.ABANDONED else ""
        told.append(f"{each.index}{again} [{each.first}, {each.last}){given_up}")
    return ", ".join(told)


def _describe_spends(record: Epoch) -> str:
    """Classes as a whole, and of signed bounds those that lost most."""
    classes = [each for each in record.accounts if not each.noise_multiplier]
    signed = sorted((each for each in record.accounts if each.noise_multiplier), key=lambda each: -each.spend)
    told = [
        f"{each.bound} ε {format_epsilon(each.spend)}{describe_factor(each.factor)}"
        for each in (*classes, *signed[:_MAX_BOUNDS_SHOWN])
    ]
    if (more := len(signed) - _MAX_BOUNDS_SHOWN) > 0:
        out = sum(not each.factor for each in signed[_MAX_BOUNDS_SHOWN:])
        told.append(f"and {pluralize(more, 'more bound')}{f', {out} left out' if out else ''}")
    return "; ".join(told) or "nobody was charged"


def describe_factor(factor: float) -> str:
    """What an epoch did with a bound that was exhausted.

    >>> describe_factor(1.0), describe_factor(0.25), describe_factor(0.0)
    ('', ' (exhausted: scaled by 0.25)', ' (exhausted: left out)')
    """
    return "" if factor == 1 else f" (exhausted: {f'scaled by {factor:g}' if factor else 'left out'})"


def format_epsilon(spend: int, digits: int = 4) -> str:
    """A spend as ε, never printed smaller than it is."""
    if spend == UNBOUNDED:
        return "∞"
    unit = NANO // 10**digits
    return f"{-(-spend // unit) / 10**digits:.{digits}f}"


def format_remaining(spend: int, digits: int = 4) -> str:
    """What remains of a bound as ε, never printed larger than it is.

    >>> format_epsilon(123_450_001), format_remaining(123_459_999)
    ('0.1235', '0.1234')
    """
    return "∞" if spend == UNBOUNDED else format_epsilon(max(0, spend) // (unit := NANO // 10**digits) * unit, digits)


def format_micro(micro: int) -> str:
    """A norm or multiplier, all of its digits.

    >>> format_micro(1_390_594), format_micro(4_000_000)
    ('1.390594', '4')
    """
    return f"{micro / 1e6:.15g}"
