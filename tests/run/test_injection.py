"""Runs whose noise enters in parts: killed and resumed as any other; raw noise pays for every occurrence there was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_charges import CappedRun
from problem import NOISE, parts
from refusals import raises_code
from run_state import attempts
from stopping import copied, figures, killed, same, told, weights

from lamina.account.accountants import find_accountant
from lamina.account.charges import Charge
from lamina.account.schedule import Event
from lamina.ledger.occurrences import AttemptTree
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch, Segment, SegmentOutcome
from lamina.plan.charges import plan_charges
from lamina.plan.step_plan import StepPlan
from lamina.run.sampler import Sampler

pytestmark = pytest.mark.usefixtures("known_seeds")
LOOSE = {"clinical": 50.0, "sensitive": 50.0}


def events(made: StepPlan, count: int, name: str = "clinical") -> float:
    """ε of so many unsampled events of a class."""
    return find_accountant("pld").epsilon([Event(sigma=made.sigma(name), q=1.0, steps=count)], 1e-5)


# ---------------------------------------------------------------------------------------- the same run again


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 13])
@pytest.mark.parametrize("form", list(NOISE))
def test_a_killed_run_resumes_to_the_same_weights_at_the_same_cost(tmp_path: Path, form: str, step: int) -> None:
    whole = problem.trainer(tmp_path / "whole" / "a", **parts(form), microbatches=3)
    expected = whole.fit()
    assert expected.epsilon["clinical"] == pytest.approx(whole.plan.epsilon("clinical"), rel=1e-6)
    killed(tmp_path / "cut" / "a", step, **parts(form), microbatches=3)
    resumed = problem.trainer(tmp_path / "cut" / "a", seed=9, **parts(form), microbatches=3)
    outcome = resumed.fit()
    assert same(weights(whole), weights(resumed))
    assert outcome.epsilon == expected.epsilon and outcome.total == expected.total
    assert outcome.notes == ()


@pytest.mark.parametrize(
    "form", [*list(NOISE)[1:3], *(pytest.param(f, marks=pytest.mark.slow) for f in ("bins", "capped"))]
)
def test_microbatches_give_the_same_weights(tmp_path: Path, form: str) -> None:
    found = []
    for count in (1, 3):
        model = problem.net(dropout=0.0)  # whose masks would depend on how the batch is cut
        torch.manual_seed(3)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)
        run = problem.trainer(tmp_path / str(count) / "a", **parts(form), model=model, microbatches=count)
        run.fit()
        found.append(weights(run))
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name], rtol=1e-3, atol=1e-5)


def test_the_noise_of_a_form_is_another_noise(tmp_path: Path) -> None:
    runs = [problem.trainer(tmp_path / form / "a", **parts(form)) for form in ("bins", "slots", "raw")]
    for run in runs:
        run.fit()
    assert not same(weights(runs[0]), weights(runs[1])) and not same(weights(runs[0]), weights(runs[2]))


# ---------------------------------------------------------------------------------------- occurrences


def test_occurrences_are_capped_by_the_plan(tmp_path: Path) -> None:
    run = problem.trainer(tmp_path / "a", **parts("capped"))
    outcome = run.fit()
    assert run.max_occurrences == {"clinical": 2, "sensitive": 2}
    assert run.state.counts is not None
    counts, owners = run.state.counts, run.corpus.members_of(run.plan)
    by_class = {e.name: counts[rows] for e, rows in zip(run.plan.classes, owners, strict=True)}
    assert by_class["clinical"].max() == 2 == by_class["sensitive"].max()
    assert by_class["open"].max() > 2
    made = attempts(tmp_path / "a")
    assert [list(each.events.values()) for each in made] == [[2, 2], *[[0, 0]] * 4]
    with LedgerReader.read_only(tmp_path / "a" / "ledger.db") as ledger:
        accounts = [each for leaf in ledger.of_kind(Epoch) for each in leaf.record.accounts]  # type: ignore[union-attr]
    assert {event.q for each in accounts for event in each.charges} == {1.0}
    assert outcome.epsilon["clinical"] == pytest.approx(events(run.plan, 2))
    metrics = figures(tmp_path / "a")["classes"]["clinical"]
    assert metrics["adjacency"] == "zero-out, no amplification"
    assert metrics["rho"] == pytest.approx(run.plan.rho("clinical"))
    assert metrics["epsilon_replace_one"] == pytest.approx(run.plan.epsilon("clinical", "replace_one"), rel=1e-2)
    assert metrics["epsilon_unamplified"] == pytest.approx(run.plan.epsilon("clinical"), rel=1e-2)


def test_a_looser_cap_than_the_plan_is_priced_for_is_refused(tmp_path: Path) -> None:
    given = parts("capped")
    with raises_code("corpus.max-occurrences-above-plan"):
        problem.trainer(tmp_path / "a", **given, max_occurrences={"clinical": 3})
    with raises_code("corpus.max-occurrences-above-plan"):
        Sampler(given["corpus"], given["plan"], seed=bytes(32), max_occurrences={"sensitive": 9})
    strict = problem.trainer(tmp_path / "a", **given, max_occurrences={"clinical": 1, "open": 7})
    assert strict.max_occurrences == {"clinical": 1, "sensitive": 2, "open": 7}


def test_batches_of_a_corpus_keep_to_the_cap() -> None:
    """Also where nobody asks for one: a loop by hand draws what the plan is priced for."""
    given = parts("capped", steps=60, batch=240)
    ones = problem.corpus(policy=f"{problem.POLICY}\n[noise]\n{NOISE['capped']}\n", ids=None)
    total = sum(int((batch.cls == 1).sum()) for batch in ones.batches(given["plan"]))
    assert total == 2 * len(ones.members("clinical"))


def unpromised() -> dict[str, Any]:
    """With room for more than the plan: nothing but these bounds is promised."""
    return {**parts("capped"), "corpus": problem.unpromised(), "bounds": LOOSE}


# ---------------------------------------------------------------------------------------- what was tried beside


def test_what_is_redone_is_paid_again(tmp_path: Path) -> None:
    """The cap was reached long before, for the weights as they are. Who was not used by then may be used twice now."""
    run = killed(tmp_path / "a", 13, **unpromised())
    outcome = problem.trainer(tmp_path / "a", **unpromised(), augment=lambda x: x + 0.0).fit()
    assert told(outcome, "charged again")
    assert outcome.steps == 24
    assert [each.events.get("clinical", 0) for each in attempts(tmp_path / "a")] == [2, 0, 0, 2, 0, 0]
    assert outcome.epsilon["clinical"] == pytest.approx(events(run.plan, 4))
    assert outcome.total == outcome.epsilon


def test_where_the_bound_has_no_room_for_that_the_run_ends(tmp_path: Path) -> None:
    killed(tmp_path / "a", 13, **parts("capped"))
    outcome = problem.trainer(tmp_path / "a", **parts("capped"), augment=lambda x: x + 0.0).fit()
    assert outcome.steps == 10
    assert told(outcome, "10 of 24 steps")
    assert outcome.epsilon["clinical"] <= 4.0


def test_some_of_it_may_fit(tmp_path: Path) -> None:
    """Without a cap every step costs, so that a redo takes the end of the run away, as always."""
    killed(tmp_path / "a", 13, **parts("raw"))
    outcome = problem.trainer(tmp_path / "a", **parts("raw"), augment=lambda x: x + 0.0).fit()
    assert outcome.steps == 19 and outcome.epsilon["clinical"] <= 4.0


def test_a_lost_checkpoint_is_paid_again(tmp_path: Path) -> None:
    run = killed(tmp_path / "a", 16, **unpromised())
    newest = max((tmp_path / "a" / "checkpoint").iterdir())
    newest.unlink()
    outcome = problem.trainer(tmp_path / "a", **unpromised()).fit()
    assert outcome.steps == 24
    # two occurrences along the weights, and two in the segments whose weights are gone
    assert outcome.epsilon["clinical"] == pytest.approx(events(run.plan, 2 + 2))


def test_a_copy_that_takes_over_pays_for_what_it_uses(tmp_path: Path) -> None:
    book = tmp_path / "tests.ledger.db"
    run = killed(tmp_path / "a", 8, **unpromised(), ledger=book)
    copied(tmp_path / "a", "b")
    one = problem.trainer(tmp_path / "a", **unpromised(), ledger=book).fit()
    with raises_code("train.folder-behind-ledger"):
        problem.trainer(tmp_path / "b", **unpromised(), ledger=book).fit()
    other = problem.trainer(tmp_path / "b", **unpromised(), ledger=book, take_over=True).fit()
    assert one.epsilon["clinical"] == pytest.approx(events(run.plan, 2))
    # two occurrences along the weights of each
    assert other.total["clinical"] == pytest.approx(events(run.plan, 2 + 2))


# ---------------------------------------------------------------------------------------- any history at all

PLAN = parts("capped")["plan"]


class _Tree:
    """Attempts as they hang together: each begins with the occurrences of the checkpoint it starts from."""

    def __init__(self, cap: int) -> None:
        self.cap, self.children, self.length = cap, {0: []}, {0: 0}  # type: ignore[var-annotated]

    def add(self, parent: int, steps: int) -> int:
        node = len(self.length)
        self.children[parent].append(node)
        self.children[node], self.length[node] = [], steps
        return node

    def most(self, node: int = 0, left: int | None = None) -> int:
        """The most occurrences of one contribution over all attempts, none with more than the cap along its way."""
        left = self.cap if left is None else left
        return max(
            used + sum(self.most(child, left - used) for child in self.children[node])
            for used in range(min(left, self.length[node]) + 1)
        )


class _Line:
    """One folder of a run, and the checkpoints it could go back to."""

    def __init__(self, run: CappedRun, closed: list[tuple[int, int, int]]) -> None:
        self.run, self.closed = run, closed  # [(step, node, generation)]
        self.charged = 0

    def take(self, tree: _Tree, steps: int, fate: str, audited: AttemptTree | None = None) -> None:
        first, node, after = self.closed[-1]
        self.run.weights_from = (len(self.closed) - 2, after) if first else None
        due = self.run.due(first, first + steps)
        self.charged += due
        number = self.run.count  # no other attempt has it
        place = {"first": first, "last": first + steps, "after": after}
        made = self.run.open(len(self.closed) - 1, number, charges=_charges(self.run.plan, due), **place)
        here = tree.add(node, steps) if fate != "open" else node
        if fate == "open":
            return
        outcome = SegmentOutcome.ABANDONED if fate == "given up" else SegmentOutcome.CLOSED
        if outcome is SegmentOutcome.ABANDONED:
            self.run.abandon()
        else:
            self.run.close()
            self.closed.append((first + steps, here, number))
        if fate == "lost":
            self.closed.pop()
        if audited is not None:
            segment, generation, nonce = made
            audited.add(
                [
                    Segment(
                        index=segment, generation=generation, nonce=nonce, first=first, last=first + steps,
                        eligibility=1, after=after or None, outcome=outcome,
                    )
                ]
            )  # fmt: skip


def _charges(plan: StepPlan, due: int) -> tuple[Charge, ...]:
    return tuple(c.times(due) for c in plan_charges(plan, 0, 1)) if due else ()


STEPS = st.tuples(st.integers(1, 6), st.sampled_from(["closed", "closed", "given up", "lost"]))


@given(
    cap=st.integers(1, 5),
    before=st.lists(STEPS, max_size=4),
    after=st.tuples(st.lists(STEPS, max_size=3), st.lists(STEPS, max_size=3)),
    copied=st.booleans(),
    turns=st.lists(st.booleans(), min_size=6, max_size=6),
)
@settings(max_examples=150)
def test_whatever_happened_no_contribution_was_used_more_often_than_was_paid(
    cap: int,
    before: list[tuple[int, str]],
    after: tuple[list[tuple[int, str]], list[tuple[int, str]]],
    copied: bool,
    turns: list[bool],
) -> None:
    """An auditor, who sees the attempts of both in any order, asks for that, and never for more than was paid."""
    tree, audited = _Tree(cap), AttemptTree(cap)
    line = _Line(CappedRun(problem_plan(cap)), [(0, 0, 0)])
    for steps, fate in before:
        line.take(tree, steps, fate, audited)
        assert line.charged >= audited.most
    lines = [line]
    if copied:
        lines.append(_Line(line.run, list(line.closed)))  # two folders, which take the run over from each other
    waiting = [(each, list(more)) for each, more in zip(lines, after, strict=False)]
    for turn in (*turns, *([False] * 3), *([True] * 3)):
        each, more = waiting[turn and copied]
        if more:
            each.take(tree, *more.pop(0), audited)
            assert sum(each.charged for each in lines) >= audited.most
    assert audited.most == tree.most()
    assert sum(each.charged for each in lines) >= tree.most()
    if not copied and all(fate == "closed" for _, fate in (*before, *after[0])):
        assert line.charged == min(cap, line.closed[-1][0])


def problem_plan(cap: int) -> StepPlan:
    return replace(PLAN, steps=100, injection=replace(PLAN.injection, occurrences=cap))


def test_an_open_segment_counts_as_done_where_it_is_replayed() -> None:
    """Reserving the rest of a run while a segment waits for its replay: nothing is wasted by it."""
    line = _Line(CappedRun(problem_plan(3)), [(0, 0, 0)])
    line.take(_Tree(3), 2, "closed")
    line.take(_Tree(3), 2, "open")
    assert [line.run.due(4, last) for last in (4, 5, 50)] == [0, 0, 0]  # 2 and 1 were charged: that is the cap
    later = "clinical@c=1,z=9"
    assert [line.run.due(4, last, later) for last in (5, 50)] == [3, 3]  # an account that comes later is charged too
