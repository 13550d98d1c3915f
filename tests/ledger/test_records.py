"""Every record has one encoding, and nothing else is read. cbor2 is the second opinion about the bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import AUDITOR, LEDGER, ORIGIN, RUN, START, TERMS, admitted, digest, ended, epoch, header, segment
from refusals import raises_code

from lamina import cbor
from lamina.account.schedule import Event
from lamina.codec import exact_float, exact_text, schema_of
from lamina.errors import EncodingError, LedgerError
from lamina.ledger import records
from lamina.ledger.governance_records import (
    Aggregate,
    Authorization,
    ClassBounds,
    ClassTotal,
    Header,
    Key,
    KeyChange,
    KeyEvent,
    KeyEvents,
    LeafSpan,
    LedgerFloors,
    ParentLedger,
    PartySignature,
    PolicyChange,
    Release,
    Role,
    TermsChange,
    Withdrawal,
    WithdrawalEffect,
    WithdrawalReason,
    WithdrawalRule,
    governing_message,
    loosened,
)
from lamina.ledger.records import (
    KIND_NAMES,
    KIND_NUMBERS,
    RECORD_KINDS,
    ContributionBody,
    ContributionRecord,
    ContributionTerms,
    Epoch,
    EpochAccount,
    KeptContribution,
    NoiseChange,
    Record,
    Segment,
    SegmentOutcome,
)
from lamina.ledger.run_records import (
    FileDigest,
    OccurrenceCap,
    ProgramVersions,
    RunBegin,
    RunEnd,
    RunRecord,
    WeightsOrigin,
)
from lamina.ledger.schema import UNBOUNDED, nano_epsilon
from lamina.ledger.show import record_to_dict
from lamina.ledger.store.rows import StoredLeaf
from lamina.sign.keys import LAST_SECOND

AGGREGATE = Aggregate(
    spans=(LeafSpan(first=1, stop=5), LeafSpan(first=6, stop=7)),
    horizon=1_800_000_000,
    classes=(ClassTotal(cls="clinical", count=5, withdrawn=1, spend=7),),
    digest=digest("pruned"),
)
LEAVE = Authorization(header=digest("header"), previous=digest("old"), size=7, root=digest("root"), expires=START)
SIGNED = (PartySignature(key=AUDITOR.public.id, signature=bytes(64)),)
CHANGE = PolicyChange(
    floors=LedgerFloors(clip_norm=1), presets=header().presets, policy=digest("new"), authorization=LEAVE
)
OLD: dict[str, Any] = {"policy": digest("policy"), "version": "lamina 0.1.0; dp-accounting 0.6.0"}
PARENT = ParentLedger(origin="old.example/ledger", size=7, root=digest("root"))
SAMPLES: list[Record] = [
    header(**OLD),
    header(parent=PARENT, witnesses=1, cose_alg=-19, **OLD),
    admitted(1),
    admitted(2, anchor=digest("anchor")),
    admitted(3, subject=digest("subject")),
    admitted(4, anchor=digest("anchor"), subject=digest("subject")),
    admitted(5, not_before=3, expires=LAST_SECOND),
    epoch(),
    epoch(3, previous=digest("checkpoint"), accounts=()),
    Withdrawal(target=1, reason=WithdrawalReason.CONSENT),
    Withdrawal(
        target=2**40,
        reason=WithdrawalReason.KEY,
        effect=WithdrawalEffect.ABANDON,
        run=RUN,
        segment=4,
        request=digest("asked"),
    ),
    KeyEvents(
        events=(
            KeyEvent(
                change=KeyChange.ADD, key=Key(name="x.example", x=AUDITOR.public.x, role=Role.AUDITOR), effective=5
            ),
            KeyEvent(change=KeyChange.REVOKE, target=AUDITOR.public.id, effective=6),
        ),
        authorization=dataclasses.replace(LEAVE, signatures=SIGNED),
    ),
    KeyEvents(
        events=(
            KeyEvent(
                change=KeyChange.ROTATE,
                key=Key(name=ORIGIN, x=AUDITOR.public.x, role=Role.LEDGER, valid_from=1, valid_until=9),
                target=LEDGER.public.id,
                effective=7,
            ),
        )
    ),
    AGGREGATE,
    dataclasses.replace(AGGREGATE, signatures=SIGNED),
    CHANGE,
    TermsChange(witnesses=2),
    TermsChange(retention=86_400, authorization=LEAVE),
    Release(manifest=digest("manifest"), runs=(RUN,), not_after=1_900_000_000),
    Release(manifest=digest("manifest"), runs=()),
    RunBegin(run=RUN, weights=digest("start")),
    RunBegin(run=RUN, weights=digest("start"), origin=WeightsOrigin.RUN, parent=bytes(16)),
    ended(RUN),
    ended(RUN, caps=(OccurrenceCap(cls="a", most=1), OccurrenceCap(cls="b", most=2**53))),
]


YOUNGER: list[Record] = [  # fields that were added after the samples were frozen
    TermsChange(about=(("contact", "privacy@example.org"), ("title", ""))),
    RunBegin(run=RUN, weights=digest("start"), optimizer="Adam, rate 0.02, HoldThenFall(steps=9, falling=0.3)"),
    ended(RUN, programs=(ProgramVersions(lamina="0.1.0", sources=bytes(32), torch="2.13.0+cpu", python="3.11.9"),)),
]


@pytest.mark.parametrize("record", [*SAMPLES, *YOUNGER], ids=lambda record: type(record).__name__)
def test_a_leaf_reads_back_and_has_the_one_deterministic_encoding(record: Record) -> None:
    data = records.encode_leaf(record, 70_000, 1_800_000_000, 3)
    assert records.decode_leaf(data) == records.Leaf(type(record), 70_000, 1_800_000_000, 3, record)
    plain, body = cbor2.loads(data.leaf), cbor2.loads(data.body or b"")
    assert (plain[1], plain[2], plain[3], plain[4]) == (KIND_NUMBERS[type(record)], 70_000, 1_800_000_000, 3)
    assert plain[5] == hashlib.sha256(data.body or b"").digest()
    assert cbor2.dumps(plain, canonical=True) == data.leaf
    assert cbor2.dumps(body, canonical=True) == data.body
    assert "float" not in repr(list(_types([plain, body])))


def _types(plain: Any) -> Any:
    yield type(plain).__name__
    for each in plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ():
        yield from _types(each)


def test_every_kind_has_a_number_a_word_and_a_sample() -> None:
    assert {type(record) for record in SAMPLES} == set(RECORD_KINDS.values()) == set(KIND_NAMES)
    assert sorted(RECORD_KINDS) == list(range(1, 12))


def test_the_wire_format_is_frozen() -> None:
    """Leaves that exist must be readable for ever: a change here is a new schema version, not a new digest."""
    runs = [record for record in SAMPLES if isinstance(record, RunRecord)]  # younger than the other kinds
    for samples, frozen in ((SAMPLES[: -len(runs)], FROZEN), (runs, FROZEN_RUNS)):
        total = hashlib.sha256()
        for seq, record in enumerate(samples):
            data = records.encode_leaf(record, seq, 1_800_000_000 + seq, seq // 4)
            total.update(data.leaf + (data.body or b""))
        assert total.hexdigest() == frozen


FROZEN_RUNS = "a45e904fc9c3cedcacbc54381dfa5db99963257761e131d10defc47d9e68213a"
FROZEN = "69e962b2956c5aa89fe795cc3470a0e2f59022b910c438b57957b56731783fba"


numbers = st.integers(0, 2**32) | st.sampled_from([0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, LAST_SECOND])
digests = st.binary(min_size=32, max_size=32)


@st.composite
def contributions(draw: st.DrawFn) -> ContributionRecord:
    start, end = sorted(draw(st.lists(numbers.filter(lambda n: n <= LAST_SECOND), min_size=2, max_size=2, unique=True)))
    bound = draw(st.sampled_from([(0, 0), (1, 1), (10**15, 10**15), (1_000_000, 4_310_000)]))
    terms = ContributionTerms(
        draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)),
        draw(st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True)),
        *bound,
        draw(st.none() | st.text(min_size=1, max_size=40).filter(str.isprintable)),
    )
    return ContributionRecord(
        descriptor=draw(digests),
        attestation=draw(digests),
        key=draw(digests),
        not_before=start,
        expires=end,
        terms=terms,
        anchor=draw(st.none() | digests),
        subject=draw(st.none() | digests),
    )


@given(contributions(), numbers, numbers.filter(lambda n: n <= LAST_SECOND), numbers)
def test_the_fast_way_writes_and_reads_what_the_general_one_does(
    record: ContributionRecord, seq: int, time: int, number: int
) -> None:
    terms, data = record.terms, records.encode_leaf(record, seq, time, number)
    kept = KeptContribution(
        descriptor=record.descriptor, expires=record.expires, cls=terms.cls, clip_norm=terms.clip_norm,
        noise_multiplier=terms.noise_multiplier, subject=record.subject,
    )  # fmt: skip
    rest = ContributionBody(
        attestation=record.attestation, key=record.key, not_before=record.not_before, data_class=terms.data_class,
        profile=terms.profile, anchor=record.anchor,
    )  # fmt: skip
    body = cbor.encode(schema_of(ContributionBody).to_cbor(rest))
    place = {1: 2, 2: seq, 3: time, 4: number, 5: hashlib.sha256(body).digest()}
    assert data == (cbor.encode({**place, **schema_of(KeptContribution).to_cbor(kept)}), body)
    assert records.decode_leaf(data) == records.Leaf(ContributionRecord, seq, time, number, record)
    assert rest.joined(kept) == record
    pruned = records.decode_leaf(StoredLeaf(data.leaf, None))
    assert pruned == records.Leaf(ContributionRecord, seq, time, number, kept)
    assert kept.bound == record.bound


@given(st.sampled_from(SAMPLES), st.data())
def test_changed_bytes_are_refused_or_are_another_canonical_leaf(record: Record, data: st.DataObject) -> None:
    leaf, body = records.encode_leaf(record, 9, 1_800_000_000, 1)
    good = bytearray(leaf if (of_leaf := data.draw(st.booleans())) else body or b"")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] ^= data.draw(st.integers(1, 255))
    _reads_canonically(StoredLeaf(bytes(good), body) if of_leaf else rehashed(leaf, bytes(good)))


def rehashed(leaf: bytes, body: bytes) -> StoredLeaf:
    """The leaf with the hash of another body."""
    at = leaf.index(b"\x05\x58\x20") + 3
    return StoredLeaf(leaf[:at] + hashlib.sha256(body).digest() + leaf[at + 32 :], body)


@given(st.binary(max_size=300), st.none() | st.binary(max_size=300))
def test_bytes_that_are_no_leaf_are_refused(leaf: bytes, body: bytes | None) -> None:
    _reads_canonically(StoredLeaf(leaf, body))
    if body is not None:
        _reads_canonically(rehashed(records.encode_leaf(epoch(), 9, 1_800_000_000, 1).leaf, body))


def test_a_body_that_is_missing_or_another_is_refused() -> None:
    for record in SAMPLES:
        leaf, body = records.encode_leaf(record, 9, 1_800_000_000, 1)
        with raises_code("ledger.body-differs"):
            records.decode_leaf(StoredLeaf(leaf, (body or b"") + b"\x00"))
        if not isinstance(record, ContributionRecord):
            with raises_code("ledger.body-missing"):
                records.decode_leaf(StoredLeaf(leaf, None))


@given(contributions(), st.data())
def test_the_fast_way_never_reads_what_the_strict_one_refuses(record: ContributionRecord, data: st.DataObject) -> None:
    leaf, body = records.encode_leaf(record, 70_000, 1_800_000_000, 3)
    good = bytearray(leaf if (of_leaf := data.draw(st.booleans())) else body or b"")
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "swap"]))
    at = data.draw(st.integers(0, len(good) - 1))
    if kind == "flip":
        good[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del good[at]
    elif kind == "grow":
        good.insert(at, data.draw(st.integers(0, 255)))
    else:
        other = data.draw(st.integers(0, len(good) - 1))
        good[at], good[other] = good[other], good[at]
    changed = StoredLeaf(bytes(good), body) if of_leaf else rehashed(leaf, bytes(good))
    try:
        plain, rest = cbor.decode(changed.leaf), cbor.decode(changed.body or b"")
        kept = schema_of(KeptContribution).from_cbor({key: plain[key] for key in plain if key > 5})
        strict = schema_of(ContributionBody).from_cbor(rest).joined(kept)
        assert plain[1] == 2
        assert plain[5] == hashlib.sha256(changed.body or b"").digest()
    except (EncodingError, LedgerError, KeyError, TypeError, IndexError, AssertionError):
        with pytest.raises(EncodingError):
            records.decode_leaf(changed)
        return
    try:
        assert records.decode_leaf(changed).record == strict
    except EncodingError:  # the place of the leaf, which the strict reader above does not look at
        assert not plain.keys() >= {1, 2, 3, 4, 5} or not plain[3] <= LAST_SECOND or max(plain[2], plain[4]) >= 2**63


def _reads_canonically(data: StoredLeaf) -> None:
    try:
        found = records.decode_leaf(data)
    except EncodingError:
        return
    if isinstance(found.record, KeptContribution):
        assert cbor2.dumps(cbor2.loads(data.leaf), canonical=True) == data.leaf
    else:
        assert records.encode_leaf(found.record, found.seq, found.time, found.epoch) == data


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_unknown_missing_and_mistyped_fields_are_refused(record: Record) -> None:
    data = records.encode_leaf(record, 1, 1, 1)
    plain, body = cbor.decode(data.leaf), cbor.decode(data.body or b"", max_size=1 << 20)
    fields = [] if type(record) is ContributionRecord else schema_of(type(record)).fields
    first = {1, *(each.key for each in fields if each.optional)}
    for other in (
        {**plain, 6: 1},
        {**plain, 12: 1},
        {key: value for key, value in plain.items() if key != 4},
        {key: value for key, value in plain.items() if key != 5},
        {**plain, 1: 12},
        {**plain, 1: True},
        {**plain, 1: 3 if type(record) is ContributionRecord else 2},
        {**plain, 2: -1},
        {**plain, 3: LAST_SECOND + 1},
        {**plain, 5: []},
        {**plain, 5: bytes(31)},
    ):
        with pytest.raises(EncodingError):
            records.decode_leaf(StoredLeaf(cbor.encode(other), data.body))
    for rest in (
        {**body, 99: 1},
        {**body, "x": 1},
        {key: value for key, value in body.items() if key not in first},
        {**body, 1: True},
        [],
    ):
        with pytest.raises(EncodingError):
            records.decode_leaf(rehashed(data.leaf, cbor.encode(rest, max_size=1 << 20)))


def test_a_float_is_no_part_of_any_leaf() -> None:
    data = records.encode_leaf(epoch(), 1, 1, 1)
    body = cbor.decode(data.body or b"")
    with raises_code("cbor.not-deterministic"):
        records.decode_leaf(rehashed(data.leaf, cbor.encode({**body, 4: [0.1]}, floats=True)))
    with raises_code("ledger.record-malformed"):
        records.decode_leaf(rehashed(data.leaf, cbor.encode({**body, 4: ["0.10"]})))


def spans(*pairs: tuple[int, int]) -> tuple[LeafSpan, ...]:
    return tuple(LeafSpan(first=first, stop=stop) for first, stop in pairs)


def rotated(**changes: Any) -> KeyEvent:
    given = {"change": KeyChange.ROTATE, "key": header().keys[0], "target": bytes(32), "effective": 1}
    return KeyEvent(**{**given, **changes})


CHARGE = Event(sigma=1.0, q=0.5, steps=1)
GOOD_KEY = Key(name="x", x=LEDGER.public.x, role=Role.LEDGER)
BAD: dict[Any, dict[str, list[Any]]] = {  # by what is made: what its fields may not hold
    header: {
        "origin": ["has space", "has+plus", "x" * 256],
        "accountant": ["guess"],
        "delta": [0.0, 1, math.nan],
        "schema": [1, 3],
        "cose_alg": [-7],
        "epoch_clock": [0],
        "granularity": [0],
        "keys": [(), (*header().keys, header().keys[0]), header().keys[1:], header().keys[:3]],
        "witnesses": [2],
        "presets": [header().presets * 2],
    },
    partial(admitted, 1): {
        "descriptor": [bytes(31)],
        "attestation": ["x" * 32],
        "key": [bytearray(32)],
        "expires": [LAST_SECOND + 1, admitted(1).not_before],
        "not_before": [True],
        "anchor": [bytes(31)],
        "subject": [bytes(33)],
        "terms": [None],
    },
    epoch: {
        "run": [bytes(15)],
        "segments": [(), (segment(1), segment(0)), (segment(1), segment(1))],
        "variance": [(), (-1.0,), (math.inf,), (1,), (-0.0,)],
        "accounts": [epoch().accounts * 2],
        "state": [b""],
    },
    segment: {"last": [0], "eligibility": [-1], "outcome": [1], "nonce": [bytes(15)]},
    partial(dataclasses.replace, TERMS): {
        "cls": ["a b"],
        "data_class": ["ECG"],
        "clip_norm": [0],
        "noise_multiplier": [10**15 + 1],
        "profile": ["line\nbreak", "\udc80"],
    },
    partial(EpochAccount, cls="a", spend=0): {
        "charges": [
            (dataclasses.replace(CHARGE, **change),)
            for change in ({"sigma": math.inf}, {"q": -0.0}, {"steps": 2**53 + 1}, {"order": 0.5}, {"order": 16})
        ]
    },
    partial(EpochAccount, cls="a", charges=()): {"spend": [-1, UNBOUNDED + 1]},
    partial(EpochAccount, cls="a", charges=(), spend=0): {"scale": [1.5]},
    partial(Withdrawal, target=1, reason=WithdrawalReason.DATA): {"target": [-1], "reason": ["because"], "run": [RUN]},
    rotated: {"key": [None], "target": [None], "change": [KeyChange.ADD, KeyChange.REVOKE]},
    partial(dataclasses.replace, GOOD_KEY): {"x": [bytes(32)], "valid_until": [0]},
    partial(LeafSpan, first=3): {"stop": [3]},
    partial(dataclasses.replace, AGGREGATE): {
        "spans": [spans((1, 5), (5, 6)), spans((6, 7), (1, 5))],
        "classes": [(ClassTotal(cls="a", count=4, withdrawn=0, spend=0),)],
    },
    partial(ClassTotal, cls="a", count=1, spend=0): {"withdrawn": [2]},
    partial(Release, runs=()): {"manifest": [b""]},
    TermsChange: {
        "witnesses": [None, -1],
        "retention": [-1],
        "about": [
            (),
            (("colour", "red"),),  # no such name
            (("title", "two\nlines"),),
            (("title", None),),
            (("title", "x" * 2001),),
            (("title", "b"), ("contact", "a")),  # not in order: a second form of the same
            (("title", "a"), ("title", "a")),
            (("publication_date", "soon"),),
            "title",
        ],
    },
    partial(KeyEvents): {"events": [()]},
    partial(dataclasses.replace, CHANGE): {"presets": [CHANGE.presets * 2, ()]},
}


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(make, name, value) for make, fields in BAD.items() for name, values in fields.items() for value in values],
)
def test_a_record_that_makes_no_sense_is_not_made(make: Any, name: str, value: Any) -> None:
    with pytest.raises(LedgerError):
        make(**{name: value})


def test_what_is_no_record_is_not_written() -> None:
    with raises_code("ledger.not-a-record"):
        records.encode_leaf("text", 0, 0, 0)  # type: ignore[arg-type]
    with raises_code("ledger.leaf-malformed"):
        records.encode_leaf(admitted(1), -1, 0, 0)
    with raises_code("ledger.record-too-large"):
        records.encode_body(epoch(variance=(0.1234567890123456,) * 16_384, accounts=tuple(_accounts())))


def _accounts() -> Any:
    charge = Event(sigma=1.2345678901234567, q=0.12345678901234567, steps=2**50)
    for number in range(1024):
        yield EpochAccount(cls=f"c{number:06}", charges=(charge,) * 40, spend=1)


@given(st.floats(0, 1.8e10))
def test_a_spend_is_never_recorded_below_what_it_is(value: float) -> None:
    spend = nano_epsilon(value)
    assert Fraction(spend, 10**9) >= Fraction(value) > Fraction(spend - 1, 10**9)


def test_a_spend_without_a_figure_stays_without_one() -> None:
    assert nano_epsilon(math.inf) == nano_epsilon(1e11) == UNBOUNDED
    for wrong in (-1.0, math.nan, True, "1"):
        with pytest.raises(LedgerError):
            nano_epsilon(wrong)  # type: ignore[arg-type]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_survives_as_text(value: float) -> None:
    found = exact_float(exact_text(value))
    assert found is not None
    assert (found, math.copysign(1, found)) == (value, math.copysign(1, value))


@pytest.mark.parametrize("text", ["", "nan", "inf", "-inf", "1", "+1.0", "1.00", " 1.0", "1e5", "0x1p0", "1_0.0", 1.0])
def test_another_text_of_a_float_is_refused(text: object) -> None:
    assert exact_float(text) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"noise_multiplier": 2_000_000}, []),
        ({"clip_norm": 900_000}, []),
        ({"noise_multiplier": 999_999}, ["noise multiplier"]),
        ({"clip_norm": 1_000_001}, ["clip norm"]),
        ({"public": True}, ["public"]),
        ({"profile": "all layers"}, ["depth profile"]),
    ],
)
def test_a_policy_that_protects_less_is_noticed(change: dict[str, Any], told: list[str]) -> None:
    old = header()
    presets = (dataclasses.replace(old.presets[0], **change), *old.presets[1:])
    found = loosened(old.floors, old.presets, old.floors, presets)
    assert len(found) == len(told)
    assert all(word in text for word, text in zip(told, found, strict=True))
    assert len(loosened(old.floors, old.presets, LedgerFloors(), old.presets)) == 2


def test_signed_messages_are_of_one_ledger_and_one_content() -> None:
    signed = dataclasses.replace(AGGREGATE, signatures=SIGNED)
    assert signed.message("a") == AGGREGATE.message("a") != AGGREGATE.message("b")
    assert dataclasses.replace(AGGREGATE, horizon=1).message("a") != AGGREGATE.message("a")

    def message(change: Any = CHANGE, **changes: Any) -> bytes:
        return governing_message(dataclasses.replace(change, authorization=dataclasses.replace(LEAVE, **changes)))

    assert message(signatures=SIGNED) == message()
    for name, value in (
        ("header", b"h" * 32),
        ("previous", b"p" * 32),
        ("size", 8),
        ("root", b"r" * 32),
        ("expires", 1),
    ):
        assert message(**{name: value}) != message(), name
    assert message(dataclasses.replace(CHANGE, policy=bytes(32))) != message()
    kinds = (CHANGE, TermsChange(witnesses=1), KeyEvents(events=(rotated(),)))
    made = {message(each).partition(b"\n")[0] for each in kinds} | {header().message().partition(b"\n")[0]}
    assert made == {b"lamina/governing-record/1", b"lamina/header/1"}
    assert len({message(each) for each in kinds}) == 3
    assert header().message() == dataclasses.replace(header(), signatures=()).message()


def test_an_epoch_has_no_field_for_what_is_secret() -> None:
    """Who was sampled, batch sizes, seeds, drawn noise, norms, losses, durations: there is no place for them."""
    names = {
        kind: {each.name for each in schema_of(kind).fields}
        for kind in (Epoch, Segment, NoiseChange, EpochAccount, Event)
    }
    assert names == {
        Epoch: {"run", "segments", "plan", "variance", "accounts", "state", "previous", "changes"},
        Segment: {"index", "generation", "nonce", "first", "last", "eligibility", "outcome", "after", "unrecorded"},
        NoiseChange: {"step", "variance"},
        EpochAccount: {"cls", "clip_norm", "noise_multiplier", "scale", "charges", "spend", "exhausted"},
        Event: {"sigma", "q", "steps", "order"},
    }


CDDL = {
    "header": Header, "parent": ParentLedger, "floors": LedgerFloors, "preset": ClassBounds, "key": Key,
    "contribution": ContributionBody, "contribution-leaf": KeptContribution,
    "epoch": Epoch, "segment": Segment, "noise-change": NoiseChange, "account": EpochAccount, "charge": Event,
    "withdrawal": Withdrawal, "key-events": KeyEvents, "key-event": KeyEvent, "authorization": Authorization,
    "aggregate": Aggregate, "span": LeafSpan, "class-total": ClassTotal,
    "policy-change": PolicyChange, "signed": PartySignature, "release": Release, "terms-change": TermsChange,
    "run-begin": RunBegin, "run-end": RunEnd, "cap": OccurrenceCap, "run-file": FileDigest, "program": ProgramVersions,
}  # fmt: skip


def test_the_documented_schema_is_the_schema() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ledger-records.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```cddl\n(.*?)```", text, re.DOTALL)
    block = re.sub(r";.*", "", block)
    rules = dict(re.findall(r"^([a-z-]+) = \{(.*?)\}", block, re.DOTALL | re.MULTILINE))
    for name, kind in CDDL.items():
        keys = [(bool(mark), int(key)) for mark, key in re.findall(r"(\?)?\s*\b([0-9]+) =>", rules[name])]
        place = [(False, key) for key in range(1, 6)] if kind is KeptContribution else []
        assert keys == place + [(each.optional, each.key) for each in schema_of(kind).fields], name
    assert set(rules) == {*CDDL, "leaf", "about"}  # a map of texts


def test_terms_and_enumerations_have_their_documented_numbers() -> None:
    assert [each.value for each in (*SegmentOutcome, *WithdrawalEffect, *WithdrawalRule)] == [1, 2] * 3
    assert [each.name for each in Role] == [
        "LEDGER",
        "CONTRIBUTOR",
        "AUDITOR",
        "WITNESS",
        "RELEASE",
        "GOVERNING",
        "OPERATOR",
    ]
    assert [each.value for each in WithdrawalReason] == list(range(1, 8))
    assert TERMS.bound == ("clinical", 1_000_000, 4_000_000) == admitted(1).bound
    assert epoch().accounts[0].bound == TERMS.bound
    assert str(epoch().accounts[0].bound) == "clinical@c=1,z=4"


@pytest.mark.parametrize(
    ("key", "stored"),
    [
        (1, "0.0"),
        (1, "-1.0"),
        (1, "inf"),
        (2, "1.5"),
        (2, "-0.0"),
        (3, -1),
        (3, True),
        (3, 2**53 + 1),
        (4, "0.5"),
        (5, 1),
    ],
)
def test_a_stored_charge_out_of_its_bounds_is_not_read(key: int, stored: Any) -> None:
    schema = schema_of(EpochAccount)
    plain = schema.to_cbor(EpochAccount(cls="a", charges=(CHARGE,), spend=0))
    assert plain[5] == [{1: "1.0", 2: "0.5", 3: 1}] and schema.from_cbor(plain).charges == (CHARGE,)
    plain[5][0][key] = stored
    with pytest.raises(EncodingError):
        schema.from_cbor(plain)


def test_a_charge_is_shown_as_before() -> None:
    account = EpochAccount(cls="a", charges=(dataclasses.replace(CHARGE, order=16.0),), spend=0)
    assert record_to_dict(account)["charges"] == [{"sigma": 1.0, "rate": 0.5, "steps": 1, "order": 16.0}]
