"""Corpus: contributions from examples, classes, ids, subjects, withdrawals, digests, and what a plan asks of it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from torch import nn

from lamina.admit.rows import PackedTexts
from lamina.allocate.make_plan import make_plan
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus
from lamina.run.example_sources import keyed_hasher
from lamina.run.table_files import hash_parts

X = np.arange(6.0)


def policy_of(**classes: dict[str, Any]) -> Policy:
    return Policy.from_dict(
        {
            "corpus": {"origin": "ward-7", "delta": 1e-6, "accountant": "rdp"},
            "class": {name: {"epsilon": 1.0, "population": 10, **entry} for name, entry in classes.items()},
        }
    )


def plan_of(**classes: dict[str, Any]) -> StepPlan:
    return make_plan(
        LayerStack.from_model(nn.Linear(1, 1)), policy_of(**classes), batch=len(classes), steps=2, allocate="flat"
    )


def examples_of(corpus: Corpus) -> list[list[int]]:
    """The examples of each contribution."""
    return [corpus.layout.rows_of(np.array([row])).tolist() for row in range(len(corpus.layout))]


# ------------------------------------------------------------------------------------------ units


def test_every_example_is_its_own_contribution() -> None:
    corpus = Corpus(X)
    assert len(corpus) == 6 and examples_of(corpus) == [[i] for i in range(6)]
    assert corpus.names == ("data",) and corpus.members("data").tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "unit",
    [
        np.array([7, 3, 7, 5, 3, 7]),
        torch.tensor([7, 3, 7, 5, 3, 7]),
        [7, 3, 7, 5, 3, 7],
        ["z", "a", "z", "m", "a", "z"],
        np.array(["z", "a", "z", "m", "a", "z"]),
        np.array(["z", "a", "z", "m", "a", "z"], dtype=object),
        [("z", 1), ("a", 1), ("z", 1), ("m", 2), ("a", 1), ("z", 1)],
        np.array([0.5, -1.0, 0.5, 2.0, -1.0, 0.5]),
        [datetime.date(2020, 1, d) for d in (7, 3, 7, 5, 3, 7)],
    ],
)
def test_units_in_order_of_first_appearance(unit: Any) -> None:
    corpus = Corpus(X, unit=unit)
    assert examples_of(corpus) == [[0, 2, 5], [1, 4], [3]]
    assert corpus.layout.rows_of(np.array([2, 0])).tolist() == [3, 0, 2, 5]
    assert corpus.layout.sizes(np.array([2, 0])).tolist() == [1, 3]
    corpus.withdraw(str(unit[1].item() if hasattr(unit[1], "item") else unit[1]))  # ids are the units' values as text
    assert corpus.members("data").tolist() == [0, 2]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.booleans())
def test_layout_against_a_dict(unit: list[int], text: bool) -> None:
    expected: dict[int, list[int]] = {}
    for row, value in enumerate(unit):
        expected.setdefault(value, []).append(row)
    corpus = Corpus(np.zeros(len(unit)), unit=[str(u) for u in unit] if text else np.array(unit))
    assert examples_of(corpus) == list(expected.values())
    assert list(corpus._index.ids) == [str(value) for value in expected]


# ------------------------------------------------------------------------------------------ classes, ids


@pytest.mark.parametrize(
    "cls",
    [
        ["b", "a", "b", "b", "a", "b"],  # by example
        np.array(["b", "a", "b", "b", "a", "b"]),
        {7: "b", 3: "a", 5: "b"},  # by unit
        {"7": "b", "3": "a", "5": "b"},  # by id
    ],
)
def test_classes_by_example_unit_or_id(cls: Any) -> None:
    corpus = Corpus(X, unit=[7, 3, 7, 5, 3, 7], cls=cls)
    assert corpus.names == ("b", "a")
    assert corpus.members("b").tolist() == [0, 2] and corpus.members("a").tolist() == [1]


def test_classes_by_contribution_where_the_order_is_clear() -> None:
    corpus = Corpus(X, unit=[1, 1, 2, 2, 3, 3], cls=["a", "b", "a"], ids=["u", "v", "w"], subject=["s", "t", "r"])
    assert corpus.members("a").tolist() == [0, 2]
    corpus.withdraw("v")
    assert corpus.members("b").tolist() == []


def test_ids_are_keys_for_classes() -> None:
    corpus = Corpus(X[:2], ids=["p", "q"], cls={"q": "a", "p": "b"})
    assert corpus.members("a").tolist() == [1]


def test_one_class_for_all_and_the_only_class_of_a_policy() -> None:
    assert Corpus(X, cls="a").names == ("a",)
    assert Corpus(X, policy=policy_of(a={})).names == ("a",)
    plan_of(z={}), Corpus(X).check(plan_of(z={}))  # an unnamed class is the only one, whatever its name


# ------------------------------------------------------------------------------------------ withdrawals


def test_withdrawing() -> None:
    corpus = Corpus(X, unit=["p", "p", "q", "r", "r", "s"])
    assert (len(corpus), corpus.revision) == (4, 0)
    before = corpus.membership(b"k")
    with raises_code("corpus.contribution-unknown"):
        corpus.withdraw("p", "x")
    assert (len(corpus), corpus.revision, corpus.membership(b"k")) == (4, 0, before)
    corpus.withdraw("p", "r")
    assert (len(corpus), corpus.revision) == (2, 2) and corpus.members("data").tolist() == [1, 3]
    after = corpus.membership(b"k")
    corpus.withdraw("p")  # again: nothing happens
    assert (len(corpus), corpus.revision, corpus.membership(b"k")) == (2, 2, after) and after != before
    corpus.withdraw()
    assert corpus.revision == 2


# ------------------------------------------------------------------------------------------ digests


def test_membership_sees_who_is_in_and_not_what_they_have() -> None:
    def make(x: Any = X, **changes: Any) -> bytes:
        given_: dict[str, Any] = {
            "unit": [7, 3, 7, 5, 3, 7],
            "cls": {7: "b", 3: "a", 5: "b"},
            "ids": {7: "p", 3: "q", 5: "r"},
            "subject": {7: "s", 3: "t", 5: "u"},
        }
        return Corpus(x, **{**given_, **changes}).membership(b"k")

    same = make()
    assert make() == same == make(np.zeros(6)) and len(same) == 32
    different = [
        make(unit=[7, 3, 7, 5, 3, 5]),
        make(unit=[7, 3, 7, 5, 7, 3]),
        make(cls={7: "b", 3: "a", 5: "a"}),
        make(cls={7: "b", 3: "c", 5: "b"}),
        make(ids={7: "p", 3: "qr", 5: "r"}),
        make(ids={7: "pq", 3: "q", 5: "r"}),
        make(subject=None),
        make(subject={7: "s", 3: "t", 5: "v"}),
        make(examples_per_unit=2),
        make(ids={7: "pq", 3: "r", 5: "s"}),
        make(ids={7: "p", 3: "qr", 5: "s"}),
        Corpus(X, unit=[7, 3, 7, 5, 3, 7]).membership(b"k"),
        Corpus(X, unit=[7, 3, 7, 5, 3, 7], cls="data").membership(b"l"),
    ]
    assert len({same, *different}) == 1 + len(different)


def test_digest_of_data_or_of_its_version() -> None:
    corpus = Corpus(X)
    assert corpus.digest(b"k") == Corpus(X.copy()).digest(b"k") == corpus.digest(b"k")
    assert corpus.digest(b"k") != Corpus(X + 1).digest(b"k") != corpus.digest(b"l")
    told = Corpus(X, version="2024-05")
    assert told.digest(b"k") == Corpus(X + 1, version="2024-05").digest(b"k")
    assert told.digest(b"k") not in (
        Corpus(X, version="2024-06").digest(b"k"),
        Corpus(X[:5], version="2024-05").digest(b"k"),
        told.digest(b"l"),
        corpus.digest(b"k"),
    )


def test_digest_is_worked_out_once_per_key() -> None:
    class Counting:
        asked = 0

        def __len__(self) -> int:
            return 3

        def fetch(self, rows: Any) -> Any:
            return torch.zeros(len(rows)), None

        def digest(self, key: bytes) -> bytes:
            self.asked += 1
            return bytes(32)

    source = Counting()
    corpus = Corpus(source)
    for key in (b"a", b"a", b"b", b"a"):
        corpus.digest(key)
    assert source.asked == 2


def test_origin() -> None:
    assert Corpus(X, policy=policy_of(a={})).origin == "ward-7"
    assert Corpus(X, origin="here").origin == "here"
    assert Corpus(X).origin is None
    assert Corpus(X, origin="here").origin_or_digest(b"k") == "here"
    unnamed = Corpus(X).origin_or_digest(b"key")
    assert re.fullmatch("data-[0-9a-f]{16}", unnamed)
    assert Corpus(X.copy()).origin_or_digest(b"key") == unnamed
    units = np.arange(len(X)) // 2
    for other in (
        Corpus(X + 1).origin_or_digest(b"key"),
        Corpus(X).origin_or_digest(b"other"),
        Corpus(X, unit=units).origin_or_digest(b"key"),
    ):
        assert other != unnamed


# ------------------------------------------------------------------------------------------ refusals


REFUSED: dict[str, list[Callable[[], Any]]] = {  # by code
    "corpus.no-examples": [lambda: Corpus(np.zeros((0, 3)))],
    "corpus.unit-wrong-length": [
        lambda: Corpus(X, unit=[1, 2, 3, 4]),
        lambda: Corpus(X, unit=["p", "q", "r"]),
        lambda: Corpus(X, unit=[1, 2, 3]),
    ],
    "corpus.column-not-flat": [lambda: Corpus(X, unit=np.zeros((6, 1)))],
    "corpus.column-not-a-sequence": [lambda: Corpus(X, unit="patient")],
    "corpus.value-missing": [
        lambda: Corpus(X, unit=[1.0, np.nan, 1, 1, 1, 1]),
        lambda: Corpus(X, unit=np.array([1, 1, 1, 1, 1, np.nan])),
        lambda: Corpus(X, unit=["a", "a", None, "a", "a", "a"]),
    ],
    "corpus.list-of-tensors": [lambda: Corpus(X, unit=list(torch.zeros(6)))],
    "corpus.unit-not-hashable": [lambda: Corpus(X, unit=[[1]] * 6)],
    "corpus.id-repeated": [lambda: Corpus(X[:2], unit=[1, "1"]), lambda: Corpus(X[:2], ids=["p", "p"])],
    "corpus.id-empty": [lambda: Corpus(X[:2], ids=["p", ""])],
    "corpus.column-wrong-length": [lambda: Corpus(X, ids=["p", "q"])],
    "corpus.subject-repeated": [lambda: Corpus(X[:3], ids=["p", "q", "r"], subject=["s", "t", "s"])],
    "corpus.subject-empty": [lambda: Corpus(X[:2], subject=["s", ""])],
    "corpus.column-contradicts-itself": [
        lambda: Corpus(X, unit=[7, 3, 7, 5, 3, 7], cls=["b", "a", "b", "b", "b", "b"]),
        lambda: Corpus(X, unit=["z", "z", "a", "a", "z", "z"], cls=np.array(["b", "b", "a", "a", "b", "c"])),
    ],
    "corpus.entry-missing": [lambda: Corpus(X[:2], cls={0: "a"})],
    "corpus.entry-without-examples": [lambda: Corpus(X[:1], cls={0: "a", 9: "a"})],
    "corpus.class-name-not-text": [lambda: Corpus(X[:2], cls=[0, 1]), lambda: Corpus(X, cls="")],
    "corpus.column-order-ambiguous": [lambda: Corpus(X, unit=[2, 2, 1, 1, 3, 3], cls=["a", "b", "a"])],
    "corpus.class-not-given": [
        lambda: Corpus(X, policy=policy_of(a={}, b={})),
        lambda: Corpus(X).check(plan_of(a={}, b={})),
    ],
    "corpus.class-unknown": [
        lambda: Corpus(X, cls="z", policy=policy_of(a={})),
        lambda: Corpus(X, cls="z").check(plan_of(a={})),
    ],
    "corpus.policy-not-a-policy": [lambda: Corpus(X, policy="policy.toml")],
    "corpus.origin-not-of-policy": [lambda: Corpus(X, origin="x", policy=policy_of(a={}))],
    "corpus.origin-empty": [lambda: Corpus(X, origin="")],
    "corpus.not-a-count": [
        lambda: Corpus(X, examples_per_unit=0),
        lambda: Corpus(X, examples_per_unit=0.5),
        lambda: Corpus(X, examples_per_unit=True),
    ],
    "corpus.class-not-in-corpus": [lambda: Corpus(X).members("z")],
    "corpus.population-too-small": [lambda: Corpus(np.zeros(11)).check(plan_of(a={}))],
    "corpus.plan-not-a-plan": [lambda: Corpus(X).check("plan")],
}


@pytest.mark.parametrize(("code", "attempt"), [(code, each) for code, every in REFUSED.items() for each in every])
def test_refusals_teach(code: str, attempt: Callable[[], Any]) -> None:
    with raises_code(code) as refusal:
        attempt()
    assert refusal.value.remedy


def test_what_is_not_refused() -> None:
    """A plan class without members; as many members as declared; too many of whom some withdrew."""
    Corpus(X, cls="b").check(plan_of(a={}, b={}))
    Corpus(np.zeros(10)).check(plan_of(a={}))
    corpus = Corpus(np.zeros(11))
    corpus.withdraw("4")
    corpus.check(plan_of(a={}))


def test_a_dataset_makes_a_corpus() -> None:
    items = torch.utils.data.TensorDataset(torch.arange(4.0), torch.arange(4))
    corpus = Corpus(items, unit=[0, 0, 1, 1], cls="a", examples_per_unit=1)
    assert (len(corpus), corpus.names, corpus.examples_per_unit) == (2, ("a",), 1)


def test_repr_tells_classes_and_no_numbers() -> None:
    corpus = Corpus(X, ids=list("uvwxyz"), cls="a")
    assert repr(corpus) == "Corpus(ArraySource(x), classes a)"


# ------------------------------------------------------------------------------------------ keyed digests


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_different_parts_are_different_digests(one: list[str], other: list[str]) -> None:
    def digest(parts: list[str], purpose: str = "a") -> bytes:
        hasher = keyed_hasher(b"k", purpose)
        hash_parts(hasher, parts)
        return hasher.digest()

    assert (digest(one) == digest(other)) == (one == other)
    assert digest(one, "b") != digest(one)


def test_where_one_part_ends_counts() -> None:
    digests = []
    for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""]):
        hasher = keyed_hasher(b"k", "a")
        hash_parts(hasher, parts)
        digests.append(hasher.digest())
    assert len(set(digests)) == 4


# ------------------------------------------------------------------------------------------ texts


@given(st.lists(st.text(st.characters(codec=None), max_size=4), max_size=30))
def test_texts_against_a_list(values: list[str]) -> None:
    texts = PackedTexts(values)
    assert list(texts) == values and len(texts) == len(values)
    assert [texts[i] for i in range(len(values))] == values
    twice = [v for i, v in enumerate(values) if v in values[:i]]
    pair = texts.repeat()
    assert (pair is not None) == bool(twice)
    if pair is not None:
        assert pair[0] < pair[1] and values[pair[0]] == values[pair[1]]
    assert texts.find([*values, "not there"]) == {v: values.index(v) for v in values}
    assert texts.empty() == (values.index("") if "" in values else None)


def test_texts_that_hash_alike_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.run.contribution_index.hash", lambda text: len(text), raising=False)
    assert PackedTexts(["aa", "bb", "cc"]).repeat() is None
    assert PackedTexts(["aa", "bb", "cc", "bb"]).repeat() == (1, 3)
