"""Sampler: batches as the plan prices them, caps, withdrawals, replay, secrecy; speed and memory at 10⁶."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from refusals import raises_code
from scipy import stats
from torch import nn

from lamina.account.accountants import cap_occurrences
from lamina.allocate.make_plan import make_plan
from lamina.engine.batch import Batch
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus
from lamina.run.sampler import Sampler

SEED = bytes(range(32))
OTHER = bytes(range(1, 33))


def plan_of(batch: int | dict[str, int], steps: int = 20, **classes: dict[str, Any]) -> StepPlan:
    policy = Policy.from_dict(
        {
            "corpus": {"origin": "test", "delta": 1e-6, "accountant": "rdp"},
            "class": {name: {"epsilon": 1.0, **entry} for name, entry in classes.items()},
        }
    )
    return make_plan(LayerStack.from_model(nn.Linear(2, 1)), policy, batch=batch, steps=steps, allocate="flat")


def two_classes() -> tuple[Corpus, StepPlan]:
    """40 of class a at q = 0.3, 60 of class b at q = 0.05; x is the number of the example."""
    cls = ["a" if i % 5 < 2 else "b" for i in range(100)]
    plan = plan_of({"b": 10, "a": 15}, b={"population": 200}, a={"population": 50})
    return Corpus(np.arange(100.0), cls=cls), plan


def numbers(batch: Batch) -> list[int]:
    return [int(v) for v in batch.x]


# ------------------------------------------------------------------------------------------ batches


def test_a_batch_has_examples_units_and_classes_of_the_plan() -> None:
    x = torch.arange(60.0).reshape(20, 3)
    y = torch.arange(20)
    unit = [i // 2 for i in range(20)]
    cls = {i: "a" if i < 5 else "b" for i in range(10)}
    plan = plan_of({"b": 30, "a": 40}, b={"population": 50}, a={"population": 50})
    assert [entry.name for entry in plan.classes] == ["b", "a"]
    sampler = Sampler(Corpus(x, y, unit=unit, cls=cls), plan, seed=SEED)
    seen = 0
    for step in range(20):
        batch = sampler.draw(step)
        assert batch.unit is not None and batch.cls is not None
        assert batch.x.dtype == torch.float32 and batch.y.dtype == torch.int64
        assert batch.unit.tolist() == sorted(batch.unit.tolist())
        assert torch.equal(batch.x, x[batch.y]) and len(batch.x) == 2 * len(batch)
        for u in range(len(batch)):
            own = batch.y[batch.unit == u].tolist()
            assert own == [own[0], own[0] + 1] and own[0] % 2 == 0  # both windows, in order
            assert plan.classes[int(batch.cls[u])].name == ("a" if own[0] < 10 else "b")
        seen += len(batch)
    assert 0 < seen < 200


def test_an_empty_batch_has_shapes_and_types() -> None:
    plan = plan_of(1, a={"population": 1_000_000_000})
    x = {"signal": torch.zeros(5, 3, 4, dtype=torch.float64), "ids": torch.zeros(5, 2, dtype=torch.int64)}
    batch = Sampler(Corpus(x, np.arange(5, dtype=np.uint8)), plan, seed=SEED).draw(0)
    assert len(batch) == 0 and batch.examples == 0
    assert batch.x["signal"].shape == (0, 3, 4) and batch.x["signal"].dtype == torch.float32
    assert batch.x["ids"].shape == (0, 2) and batch.x["ids"].dtype == torch.int64
    assert batch.y.shape == (0,) and batch.y.dtype == torch.int64
    assert Sampler(Corpus(x), plan, seed=SEED).draw(0).y is None


def test_rate_is_that_of_the_declared_population() -> None:
    """Ten members of a declared thousand: q is batch/1000, not batch/10."""
    plan = plan_of(100, a={"population": 1000})
    sampler = Sampler(Corpus(np.arange(10.0)), plan, seed=SEED)
    total = sum(len(sampler.draw(step)) for step in range(2000))
    assert stats.binomtest(total, 20_000, 0.1).pvalue > 1e-6
    assert total < 3000  # at batch/members it would be everyone, at every step


def test_frequencies_in_batches_are_the_plans() -> None:
    corpus, plan = two_classes()
    sampler = Sampler(corpus, plan, seed=SEED)
    steps = 1500
    table = np.zeros((steps, 100))
    for step in range(steps):
        table[step, numbers(sampler.draw(step))] = 1
    for name, rate in (("a", 0.3), ("b", 0.05)):
        own = table[:, corpus.members(name)]
        assert stats.binomtest(int(own.sum()), own.size, rate).pvalue > 1e-6
        scores = (own.sum(0) - steps * rate) / math.sqrt(steps * rate * (1 - rate))
        assert np.abs(scores).max() < 5
        assert own.sum(1).var() == pytest.approx(own.shape[1] * rate * (1 - rate), rel=0.15)
    a, b = table[:, corpus.members("a")] - 0.3, table[:, corpus.members("b")] - 0.05
    cross = a.T @ b / math.sqrt(steps * 0.3 * 0.7 * 0.05 * 0.95)
    assert np.abs(cross).max() < stats.norm.isf(1e-7 / cross.size)  # no coin is shared between classes


def test_everyone_at_rate_one() -> None:
    plan = plan_of(10, a={"population": 10})
    sampler = Sampler(Corpus(np.arange(7.0)), plan, seed=SEED)
    assert [numbers(sampler.draw(step)) for step in range(3)] == [list(range(7))] * 3


def test_a_class_without_members_is_noise_only() -> None:
    plan = plan_of({"a": 5, "b": 5}, a={"population": 10}, b={"population": 10})
    batches = [Sampler(Corpus(np.arange(8.0), cls="b"), plan, seed=SEED).draw(step) for step in range(10)]
    assert {int(k) for batch in batches if batch.cls is not None for k in batch.cls} == {1}


# ------------------------------------------------------------------------------------------ one object


def test_schedule_is_the_plans_and_batches_are_as_many_as_priced() -> None:
    corpus, plan = two_classes()
    sampler = Sampler(corpus, plan, seed=SEED)
    for k, entry in enumerate(plan.classes):
        assert sampler.schedule(k) == plan.schedule(k) == sampler.schedule(entry.name)
        assert sampler.schedule(k)[0].q == entry.sampling_rate
    assert sum(1 for _ in corpus.batches(plan)) == plan.steps == 20


def test_batches_use_fresh_coins() -> None:
    corpus, plan = two_classes()
    one, other = ([numbers(batch) for batch in corpus.batches(plan)] for _ in range(2))
    assert one != other


def test_batches_check_at_once() -> None:
    corpus, _ = two_classes()
    with raises_code("corpus.class-unknown"):
        corpus.batches(plan_of(5, b={"population": 100}))  # not only at the first batch


def test_a_batch_above_the_population_is_refused_by_the_plan() -> None:
    with raises_code("allocate.batch-above-population"):
        plan_of({"a": 51}, a={"population": 50})


# ------------------------------------------------------------------------------------------ replay


def test_a_draw_depends_on_seed_rank_and_step_only() -> None:
    corpus, plan = two_classes()
    sampler = Sampler(corpus, plan, seed=SEED)
    first = [numbers(sampler.draw(step)) for step in range(6)]
    backwards = [numbers(Sampler(corpus, plan, seed=SEED).draw(step)) for step in reversed(range(6))]
    assert first == backwards[::-1] and sampler.counts is None  # nothing is counted without caps
    assert numbers(sampler.draw(2)) == first[2]  # without caps a step may be drawn again
    assert [numbers(Sampler(corpus, plan, seed=OTHER).draw(step)) for step in range(6)] != first
    assert [numbers(Sampler(corpus, plan, seed=SEED, rank=1).draw(step)) for step in range(6)] != first


PROGRAM = """
import hashlib, sys
import numpy as np
from lamina.plan import StepPlan
from lamina.run import Corpus
from lamina.run.sampler import Sampler

def told(text):
    people = [f"p{i}" for i in range(30)]
    corpus = Corpus(
        np.arange(90.0),
        unit=people * 3,
        cls={p: "ab"[i % 2] for i, p in enumerate(people)},
        subject={p: f"s{p}" for p in people},
        examples_per_unit=2,
    )
    corpus.withdraw("p3")
    sampler = Sampler(corpus, StepPlan.from_json(text), seed=bytes(range(32)))
    drawn = [[int(v) for v in sampler.draw(step).x] for step in range(10)]
    return f"{drawn} {corpus.membership(b'k').hex()} {corpus.digest(b'k').hex()}"
"""


def test_the_same_in_every_process() -> None:
    plan = plan_of({"a": 20, "b": 20}, a={"population": 50}, b={"population": 50}).to_json()
    space: dict[str, Any] = {}
    exec(PROGRAM, space)
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM + "print(told(sys.stdin.read()))"],
        input=plan,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == space["told"](plan)


# ------------------------------------------------------------------------------------------ windows


def test_windows_are_chosen_afresh_and_the_same_in_a_replay() -> None:
    plan = plan_of(6, a={"population": 6})  # q = 1
    corpus = Corpus(np.arange(40.0), unit=[0] * 3 + [1] * 30 + [2] * 7, examples_per_unit=5)
    drawn = []
    for step in range(4):
        batch = Sampler(corpus, plan, seed=SEED).draw(step)
        assert batch.unit is not None
        assert torch.bincount(batch.unit).tolist() == [3, 5, 5]
        own = numbers(batch)
        assert own[:3] == [0, 1, 2] and own == sorted(own) and len(set(own)) == 13
        assert all(3 <= v < 33 for v in own[3:8]) and all(v >= 33 for v in own[8:])
        drawn.append(own)
    assert len({tuple(own) for own in drawn}) == 4
    assert numbers(Sampler(corpus, plan, seed=SEED).draw(2)) == drawn[2]


# ------------------------------------------------------------------------------------------ caps


def test_caps_are_reached_and_never_exceeded() -> None:
    corpus, plan = two_classes()
    sampler = Sampler(corpus, plan, seed=SEED, max_occurrences={"a": 3})
    seen = np.zeros(100, dtype=int)
    for step in range(200):
        np.add.at(seen, numbers(sampler.draw(step)), 1)
        assert sampler.counts is not None and sampler.counts.tolist() == seen.tolist()
    assert set(seen[corpus.members("a")]) == {3}
    assert seen[corpus.members("b")].max() > 5  # no cap there
    assert cap_occurrences(sampler.schedule("a"), 3)[0].steps == 3


def test_below_its_cap_a_contribution_is_drawn_as_without_caps() -> None:
    """The coins are the same: a cap only takes away, and only from those who have reached it."""
    corpus, plan = two_classes()
    free, bound = (Sampler(corpus, plan, seed=SEED), Sampler(corpus, plan, seed=SEED, max_occurrences={"a": 4, "b": 1}))
    caps = {**dict.fromkeys(corpus.members("a").tolist(), 4), **dict.fromkeys(corpus.members("b").tolist(), 1)}
    seen = dict.fromkeys(range(100), 0)
    for step in range(60):
        expected = [v for v in numbers(free.draw(step)) if seen[v] < caps[v]]
        assert numbers(bound.draw(step)) == expected
        for v in expected:
            seen[v] += 1


def test_counts_go_on_where_they_were() -> None:
    corpus, plan = two_classes()
    whole = Sampler(corpus, plan, seed=SEED, max_occurrences={"a": 2, "b": 2})
    first = [numbers(whole.draw(step)) for step in range(5)]
    saved = whole.counts
    rest = [numbers(whole.draw(step)) for step in range(5, 15)]
    again = Sampler(corpus, plan, seed=SEED, max_occurrences={"a": 2, "b": 2}, counts=saved)
    assert [numbers(again.draw(step)) for step in range(5, 15)] == rest
    assert saved is not None and saved.sum() == sum(map(len, first))  # a copy: later draws do not move it
    with raises_code("corpus.step-out-of-order"):
        again.draw(14)


def test_a_draw_that_failed_is_not_counted() -> None:
    class Broken:
        def __init__(self) -> None:
            self.fails = True

        def __len__(self) -> int:
            return 5

        def fetch(self, rows: Any) -> Any:
            if self.fails:
                raise OSError("the disk is gone")
            return torch.zeros(len(rows), 2), None

        def digest(self, key: bytes) -> bytes:
            return bytes(32)

    source = Broken()
    sampler = Sampler(Corpus(source), plan_of(10, a={"population": 10}), seed=SEED, max_occurrences={"a": 1})
    with pytest.raises(OSError, match="disk"):
        sampler.draw(0)
    source.fails = False
    assert len(sampler.draw(0)) == 5 and len(sampler.draw(1)) == 0


def test_a_public_class_may_be_capped() -> None:
    policy = Policy.from_dict(
        {"corpus": {"origin": "t", "delta": 1e-5}, "class": {"open": {"population": 10, "public": True}}}
    )
    plan = make_plan(LayerStack.from_model(nn.Linear(2, 1)), policy, batch=10, steps=3)
    sampler = Sampler(Corpus(np.arange(4.0)), plan, seed=SEED, max_occurrences={"open": 2})
    assert [len(sampler.draw(step)) for step in range(3)] == [4, 4, 0]
    assert sampler.schedule("open") == ()


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("noise.seed-length", {"seed": b""}),
        ("noise.seed-length", {"seed": bytes(31)}),
        ("corpus.class-not-in-plan", {"max_occurrences": {"c": 1}}),
        *(("corpus.max-occurrences-out-of-range", {"max_occurrences": {"a": n}}) for n in (0, True, 1.5, 2**32)),
        ("corpus.max-occurrences-not-by-class", {"max_occurrences": 5}),
        *(
            ("corpus.counts-of-other-corpus", {"max_occurrences": {"a": 1}, "counts": counts})
            for counts in (np.zeros(99, np.uint32), np.zeros(100, np.int64), [0] * 100)
        ),
        ("corpus.counts-without-caps", {"counts": np.zeros(100, np.uint32)}),
    ],
)
def test_what_is_refused_when_a_sampler_is_made(code: str, options: dict[str, Any]) -> None:
    corpus, plan = two_classes()
    with raises_code(code):
        Sampler(corpus, plan, **{"seed": SEED, **options})


# ------------------------------------------------------------------------------------------ withdrawals


def test_the_withdrawn_are_never_drawn_and_a_sampler_keeps_its_members() -> None:
    corpus, plan = two_classes()
    before = Sampler(corpus, plan, seed=SEED)
    expected = [numbers(Sampler(corpus, plan, seed=SEED).draw(step)) for step in range(100)]
    gone = {0, 1, 2, 50, 99}
    corpus.withdraw(*(str(v) for v in gone))
    assert [numbers(before.draw(step)) for step in range(100)] == expected  # frozen
    assert gone <= {v for own in expected for v in own}
    after = Sampler(corpus, plan, seed=SEED)
    drawn = {v for step in range(300) for v in numbers(after.draw(step))}
    assert drawn == set(range(100)) - gone


# ------------------------------------------------------------------------------------------ secrecy


def test_nothing_is_told() -> None:
    corpus, plan = two_classes()
    sampler = Sampler(corpus, plan, seed=SEED, max_occurrences={"a": 2})
    sampler.draw(0)
    told = repr(sampler) + str(sampler) + repr(corpus)
    assert SEED.hex() not in told and repr(SEED) not in told
    assert not any(letter.isdigit() for letter in told)


# ------------------------------------------------------------------------------------------ a million


MEASURE = """
import gc, json, os
import numpy as np
from lamina.run import Corpus
def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
count = 1_000_000
x = np.zeros((count, 1), dtype=np.float32)
ids = np.char.add("patient-", np.arange(count).astype("U7"))
tags = np.array([f"{i * 0x9E3779B97F4A7C15 % 2**128:032x}" for i in range(count)])
cls = np.where(np.arange(count) % 3 == 0, "a", "b")
Corpus(x[:10], ids=ids[:10], subject=tags[:10], cls=cls[:10]).members("a")
before = resident()
corpus = Corpus(x, ids=ids, subject=tags, cls=cls)
print(json.dumps({"bytes": resident() - before, "members": len(corpus)}))
"""


@pytest.mark.slow
def test_index_of_a_million_in_less_than_200_megabytes_resident() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["members"] == 1_000_000
    assert told["bytes"] < 200e6


@pytest.mark.parametrize("count", [30_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_index_in_less_than_200_bytes_a_contribution(count: int) -> None:
    """Ids and subject tags as text included; what was needed on the way is given back."""
    x = np.zeros((count, 1), dtype=np.float32)
    ids = np.char.add("patient-", np.arange(count).astype("U7"))
    tags = [f"{i * 0x9E3779B97F4A7C15 % 2**128:032x}" for i in range(count)]
    cls = np.where(np.arange(count) % 3 == 0, "a", "b")
    gc.collect()
    tracemalloc.start()
    corpus = Corpus(x, unit=np.arange(count)[::-1], ids=ids, subject=tags, cls=cls)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(corpus) == count
    assert 44 * count < held < 200 * count  # the letters alone are 44


def test_a_draw_from_a_million_takes_less_than_5_milliseconds() -> None:
    count = 1_000_000
    corpus = Corpus(np.zeros((count, 1), dtype=np.float32), cls=np.array(["a", "b"])[np.arange(count) % 2])
    plan = plan_of(1000, a={"population": count}, b={"population": count})
    for caps in (None, {"a": 100, "b": 100}):
        sampler = Sampler(corpus, plan, seed=SEED, max_occurrences=caps)
        best = math.inf
        for step in range(30):
            start = time.thread_time()
            sampler.draw(step)
            best = min(best, time.thread_time() - start)
        assert best < 5e-3  # the best of 30: other work on the machine is not the sampler's
