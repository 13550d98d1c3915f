"""Show: every kind of record in words and as an object, and filters that leave out what they say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
from build import HOUR, RUNS, Story, build
from making import START

from lamina.ledger.errors import LedgerError
from lamina.ledger.records import WORDS, Admitted, Epoch
from lamina.ledger.show import KINDS, Filter, as_object, epsilon, in_words


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    made = build(str(tmp_path_factory.mktemp("show") / "a.db"))
    yield made
    made.ledger.close()


def seqs(story: Story, **given: object) -> list[int]:
    return [leaf.seq for leaf in Filter(**given).leaves(story.ledger)]  # type: ignore[arg-type]


def test_every_record_in_words(story: Story) -> None:
    told = {WORDS[leaf.kind]: in_words(leaf) for leaf in story.ledger.leaves()}
    assert told.keys() == KINDS.keys()
    assert all("\n" not in line and 10 < len(line) < 250 for line in told.values())
    assert told["header"].startswith("clinic.example/ledger: rdp at δ = 1e-05")
    assert told["withdrawal"] == "of leaf 9: consent, open segment: abandon"
    assert told["policy"] == "floors: clip norm 0.2, noise multiplier 0.5; 2 classes, signed by 0"
    assert told["key"].startswith("revoke ")
    lines = [in_words(leaf) for leaf in story.ledger.of_kind(Epoch)]
    assert "1 [10, 20) given up, 1.1 [10, 20), 2 [20, 30)" in lines[1]
    assert "clinical (c 0.5, z 4) ε 0." in lines[1]
    assert "31 clinical (ε 0." in told["aggregate"]


def test_every_record_as_an_object(story: Story) -> None:
    for leaf in story.ledger.leaves():
        found = as_object(leaf)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert (found["index"], found["kind"], found["epoch"]) == (leaf.seq, WORDS[leaf.kind], leaf.epoch)
        assert found["time"].startswith("20")
        for field in dataclasses.fields(leaf.record):
            assert ("class" if field.name == "cls" else field.name) in found
    record = story.ledger.leaf(47).record
    assert isinstance(record, Admitted)
    found = as_object(story.ledger.leaf(47))
    assert found["descriptor"] == record.descriptor.hex()
    assert found["terms"] == {
        "class": "clinical", "data_class": "ecg", "clip_norm": 1_000_000, "noise_multiplier": 1_000_000,
        "profile": "top=0.5",
    }  # fmt: skip


def test_filters(story: Story) -> None:
    at = story.at
    assert seqs(story) == [0, 1, 2, 3, *range(41, 56)]
    assert seqs(story, kinds=("epoch",)) == [at["epoch"], at["redone"], at["run two"]]
    assert seqs(story, kinds=("epoch", "withdrawal")) == [41, 42, 43, 52]
    assert seqs(story, cls="open") == [0, 44, 55]
    assert seqs(story, cls="clinical", kinds=("contribution",)) == [47, 48, 49, 50, 51, 54]
    assert seqs(story, run=RUNS[0].hex()[:6].upper()) == [41, 42, 43, 53]
    assert seqs(story, run=RUNS[1].hex()) == [52, 53]
    assert seqs(story, since=START + 3 * HOUR, until=START + 4 * HOUR) == [43, 44, 45, 46]
    assert seqs(story, first=50, stop=53) == [50, 51, 52]
    assert seqs(story, cls="nobody") == []
    with pytest.raises(LedgerError, match="kinds are header, contribution"):
        Filter(kinds=("epochs",))


def test_spend_is_rounded_up() -> None:
    assert [epsilon(1), epsilon(100_000), epsilon(100_001), epsilon(0)] == [
        "0.0001",
        "0.0001",
        "0.0002",
        "0.0000",
    ]
    assert epsilon(2**64 - 1) == "∞"
    assert epsilon(1_500_000_000, 2) == "1.50"
