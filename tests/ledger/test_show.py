"""Show: every kind of record in words and as an object, and filters that leave out what they say."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from decimal import Decimal

import pytest
from build import HOUR, RUNS, YEAR, Story, build
from making import GOVERNING, LEDGER, START, authorised, ended, epoch
from refusals import raises_code

from lamina.ledger.governance_records import TermsChange
from lamina.ledger.records import KIND_NAMES, ContributionRecord, Epoch, EpochAccount, Leaf
from lamina.ledger.run_records import RunBegin
from lamina.ledger.show import (
    KINDS_BY_NAME,
    RecordFilter,
    describe_leaf,
    format_epsilon,
    format_remaining,
    leaf_to_dict,
)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    made = build(str(tmp_path_factory.mktemp("show") / "a.db"))
    yield made
    made.ledger.close()


def seqs(story: Story, **given: object) -> list[int]:
    return [leaf.seq for leaf in RecordFilter(**given).leaves(story.ledger)]  # type: ignore[arg-type]


def test_every_record_in_words(story: Story) -> None:
    told = {KIND_NAMES[leaf.kind]: describe_leaf(leaf) for leaf in story.ledger.leaves()}
    terms = Leaf(TermsChange, 60, START, 3, authorised(story.ledger, TermsChange(witnesses=1, retention=400 * 86_400)))
    told["terms"] = describe_leaf(terms)
    begin, end = RunBegin(run=RUNS[0], weights=bytes(32)), ended(RUNS[0], steps=30, probed=False)
    for record in (begin, end):
        told[KIND_NAMES[type(record)]] = describe_leaf(Leaf(type(record), 60, START, 3, record))
    assert told["run-begin"].endswith("starts from weights 0000000000000000, origin not declared")
    assert told["run-end"].endswith("ended at step 30 with weights 0000000000000000; the trainer states: not probed")
    assert told.keys() == KINDS_BY_NAME.keys()
    owner = GOVERNING.public.name[:16]
    assert told["terms"] == f"1 cosignature of witnesses, kept 400 days, by {owner}"
    assert all("\n" not in line and 10 < len(line) < 250 for line in told.values())
    assert told["header"].startswith("clinic.example/ledger: rdp at δ = 1e-05")
    assert told["withdrawal"] == "of leaf 9: consent, open segment: abandon, by the keeper alone"
    assert told["policy"] == f"floors: clip norm 0.2, noise multiplier 0.5; 2 classes, by {owner}"
    assert told["key"].startswith("revoke ") and told["key"].endswith(f", by {owner}")
    lines = [describe_leaf(leaf) for leaf in story.ledger.of_kind(Epoch)]
    assert "1 [10, 20) given up, 1.1 [10, 20), 2 [20, 30)" in lines[1]
    assert "clinical@c=0.5,z=4 ε 0." in lines[1]
    assert lines[0].startswith(f"run {RUNS[0].hex()[:8]}, segment 0 [0, 10): ")
    assert told["aggregate"].startswith("of 37 contributions, admitted before 2028-01-15T12:00:00Z: 31 clinical (ε 0.")
    assert told["aggregate"].endswith("; countersigned by 1")


def test_every_record_as_an_object(story: Story) -> None:
    for leaf in story.ledger.leaves():
        found = leaf_to_dict(leaf)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert (found["index"], found["kind"], found["epoch"]) == (leaf.seq, KIND_NAMES[leaf.kind], leaf.epoch)
        assert found["time"].startswith("20")
        pruned = leaf.kind is ContributionRecord and 4 <= leaf.seq < 41
        assert found.get("pruned", False) == pruned
        for field in dataclasses.fields(leaf.kind):  # one form, also where the body is pruned
            assert field.name in found
    record = story.ledger.leaf(47).record
    assert isinstance(record, ContributionRecord)
    gone = leaf_to_dict(story.ledger.leaf(4))
    assert gone["terms"] == {
        "class": "clinical", "data_class": None, "clip_norm": 0.5, "noise_multiplier": 4.0, "profile": None
    }  # fmt: skip
    assert (gone["key"], gone["attestation"]) == (None, None)
    found = leaf_to_dict(story.ledger.leaf(47))
    assert found["descriptor"] == record.descriptor.hex()
    assert found["terms"] == {
        "class": "clinical", "data_class": "ecg", "clip_norm": 1.0, "noise_multiplier": 1.0, "profile": "top=0.5",
    }  # fmt: skip


def test_one_form_for_numbers_and_times(story: Story) -> None:
    """Natural units and UTC, wherever they stand in a record."""
    found = {each["index"]: each for each in map(leaf_to_dict, story.ledger.leaves())}
    assert (found[0]["delta"], found[0]["retention"], found[0]["epoch_clock"]) == (1e-5, YEAR, HOUR)
    assert found[0]["floors"] == {"clip_norm": 0.1, "noise_multiplier": 0.5}
    assert (found[47]["not_before"], found[47]["expires"]) == ("2027-01-15T11:00:00Z", "2030-01-14T12:00:00Z")
    (account,) = (each for each in found[41]["accounts"] if each["noise_multiplier"] == 4.0)
    assert (account["clip_norm"], account["scale"], account["charges"][0]["rate"]) == (0.5, 0.5, 0.02)
    record = story.ledger.leaf(41).record
    assert isinstance(record, Epoch)
    spends = [each.spend for each in record.accounts]
    assert [Decimal(str(each["epsilon"])) * 10**9 for each in found[41]["accounts"]] == spends
    assert found[46]["events"][0]["effective"] == "2027-01-15T11:00:00Z"
    assert found[53]["not_after"] == "2028-01-15T12:00:00Z"
    assert found[55]["horizon"] == "2028-01-15T12:00:00Z"
    assert [each["class"] for each in found[55]["classes"]] == ["clinical", "open"]
    assert 0 < found[55]["classes"][0]["epsilon"] < 1
    key = found[0]["keys"][0]
    assert (key["id"], key["valid_until"]) == (LEDGER.public.id.hex(), None)
    _check_forms(list(found.values()))


_TIMES = {"time", "not_before", "expires", "horizon", "effective", "not_after", "valid_from", "valid_until"}
_NUMBERS = {"clip_norm", "noise_multiplier", "epsilon", "sigma", "rate", "scale", "delta"}


def _check_forms(value: object) -> None:
    """Every time and every number in a JSON value, by the name of its field."""
    for name, each in value.items() if isinstance(value, dict) else ():
        if name in _TIMES and each is not None:
            assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z", each), (name, each)
        if name in _NUMBERS:
            assert type(each) is float, (name, each)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_forms(each)


def test_an_infinite_spend_is_null() -> None:
    account = EpochAccount(cls="clinical", charges=(), spend=2**64 - 1)
    found = leaf_to_dict(Leaf(Epoch, 1, 0, 0, epoch(0, accounts=(account,))))
    assert found["accounts"][0]["epsilon"] is None


def test_filters(story: Story) -> None:
    at = story.at
    assert seqs(story) == list(range(56))
    assert seqs(story, kinds=("epoch",)) == [at["epoch"], at["redone"], at["run two"]]
    assert seqs(story, kinds=("epoch", "withdrawal")) == [41, 42, 43, 52]
    assert seqs(story, cls="open") == [0, *range(34, 40), 44, 55]
    assert seqs(story, cls="clinical", kinds=("contribution",)) == [*range(4, 34), 40, 47, 48, 49, 50, 51, 54]
    assert seqs(story, run=RUNS[0].hex()[:6].upper()) == [41, 42, 43, 53]
    assert seqs(story, run=RUNS[1].hex()) == [52, 53]
    assert seqs(story, since=START + 3 * HOUR, until=START + 4 * HOUR) == [43, 44, 45, 46]
    assert seqs(story, first=50, stop=53) == [50, 51, 52]
    assert seqs(story, cls="nobody") == []
    with raises_code("ledger.kind-unknown"):
        RecordFilter(kinds=("epochs",))


def test_spend_is_rounded_up() -> None:
    assert [format_epsilon(1), format_epsilon(100_000), format_epsilon(100_001), format_epsilon(0)] == [
        "0.0001",
        "0.0001",
        "0.0002",
        "0.0000",
    ]
    assert format_epsilon(2**64 - 1) == "∞"
    assert format_epsilon(1_500_000_000, 2) == "1.50"


def test_what_remains_is_rounded_down() -> None:
    assert [
        format_remaining(99_999),
        format_remaining(100_000),
        format_remaining(1_234_999_999),
        format_remaining(0),
        format_remaining(-5),
    ] == ["0.0000", "0.0001", "1.2349", "0.0000", "0.0000"]
    assert format_remaining(2**64 - 1) == "∞"
