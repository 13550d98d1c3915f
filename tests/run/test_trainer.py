"""The whole job: what it leaves, what it costs, and that a resumed run is the run."""

from __future__ import annotations

import hashlib
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import problem
import pytest
import torch
from open_charges import SECRET_FILE, folder_state, has_begun
from refusals import raises_code
from run_state import attempts, moments, open_attempt, run_id
from safetensors.torch import load_file
from stopping import LOOSE, During, Killed, complete, copied, die, figures, killed, same, told, weights
from torch import nn

import lamina
from lamina import Evaluation
from lamina.account.filters import GaussianFilter
from lamina.errors import BudgetExceeded, CorpusError, CouplingError, RunError, RunInUse, StorageError
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.verifier import verify
from lamina.plan.charges import plan_charges
from lamina.run.private import PlannedBefore
from lamina.run.run_files import Lease
from lamina.run.trainer import Trainer

pytestmark = pytest.mark.usefixtures("known_seeds")


# ---------------------------------------------------------------------------------------- a whole run


def test_a_run_spends_its_plan_exactly_and_leaves_its_files(tmp_path: Path) -> None:
    trainer = problem.trainer(tmp_path / "a", ema=0.9)
    before = weights(trainer)
    outcome = trainer.fit()
    plan = trainer.plan
    assert outcome.steps == outcome.planned == plan.steps == 24
    assert outcome.private and outcome.notes == () and outcome.certificate.private
    for name in ("clinical", "sensitive"):
        assert outcome.epsilon[name] == pytest.approx(plan.epsilon(name), rel=1e-12)
        assert outcome.total[name] == outcome.epsilon[name]
    assert outcome.epsilon["open"] == outcome.total["open"] == 0.0
    assert not same(before, weights(trainer))
    names = {p.name for p in (tmp_path / "a").iterdir()}
    assert names == {
        "plan.cbor", "run.cbor", "receipts", SECRET_FILE, "checkpoint", "lease", "metrics.json", "model.safetensors",
        "ema.safetensors", "ledger.db", "withdrawn",
    }  # fmt: skip
    assert same(load_file(tmp_path / "a" / "model.safetensors"), weights(trainer))
    assert not same(load_file(tmp_path / "a" / "ema.safetensors"), weights(trainer))
    assert lamina.StepPlan.from_cbor((tmp_path / "a" / "plan.cbor").read_bytes()) == plan
    for secret in (SECRET_FILE, "checkpoint/000005.safetensors"):
        assert stat.S_IMODE((tmp_path / "a" / secret).stat().st_mode) == 0o600


def test_metrics_are_the_accountants(tmp_path: Path) -> None:
    trainer = problem.trainer(tmp_path / "a", max_occurrences={"clinical": 3})
    trainer.fit()
    facts = figures(tmp_path / "a")
    clinical = facts["classes"]["clinical"]
    sigma = trainer.plan.sigma("clinical")
    assert clinical["rho"] == pytest.approx(3 / (2 * sigma**2))
    assert clinical["epsilon"] == pytest.approx(trainer.plan.epsilon("clinical"))
    assert clinical["epsilon_replace_one"] > clinical["epsilon"]
    assert facts["classes"]["sensitive"]["rho"] == pytest.approx(trainer.plan.rho("sensitive"))


def test_a_second_fit_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = problem.trainer(tmp_path / "a")
    outcome = first.fit()
    again = problem.trainer(tmp_path / "a", seed=7)
    assert again.fit() == outcome
    assert same(weights(first), weights(again))
    assert first.fit() == outcome


@pytest.mark.parametrize("segment", [1, 7, 24, 1000])
def test_the_length_of_a_segment_does_not_change_what_it_costs(tmp_path: Path, segment: int) -> None:
    outcome = problem.trainer(tmp_path / "a", segment=segment).fit()
    assert outcome.steps == 24
    assert outcome.epsilon["clinical"] <= 4.0
    assert len(attempts(tmp_path / "a")) == -(-24 // segment)


def test_microbatches_give_the_same_weights(tmp_path: Path) -> None:
    def run(name: str, parts: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        trainer = problem.trainer(tmp_path / name / "a", model=problem.net(dropout=0.0), microbatches=parts)
        trainer.fit()
        return weights(trainer)

    whole, parts = run("whole", 1), run("parts", 3)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-4, atol=1e-6)


def test_the_users_generators_are_left_alone(tmp_path: Path) -> None:
    trainer = problem.trainer(tmp_path / "a", steps=4)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    trainer.fit()
    drawn = torch.rand(3), np.random.rand(3)  # noqa: NPY002
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert torch.equal(drawn[0], torch.rand(3))
    assert (drawn[1] == np.random.rand(3)).all()  # noqa: NPY002


def test_augmentation_and_dropout_differ_between_steps_and_come_back_in_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def augment(x: torch.Tensor) -> torch.Tensor:
        print(float(torch.rand(())))  # not into a list, which would be part of what the run was told
        return x + 0.01 * torch.randn_like(x)

    killed(tmp_path / "a", 8, augment=augment, probe=False)
    steps = capsys.readouterr().out.split()[2:]  # after the rehearsal: one pass for the sizes of tables, one step
    assert len(set(steps)) == len(steps) == 8
    problem.trainer(tmp_path / "a", augment=augment, probe=False).fit()
    assert capsys.readouterr().out.split()[2:5] == steps[5:8]


# ---------------------------------------------------------------------------------------- killed and resumed


@pytest.mark.parametrize("options", [{}, {"ema": 0.8, "max_occurrences": {"clinical": 2}, "microbatches": 2}])
@pytest.mark.parametrize("step", [1, 5, 6, 12, 24])
def test_a_killed_run_resumes_to_the_same_weights_at_the_same_cost(
    tmp_path: Path, step: int, options: dict[str, Any]
) -> None:
    whole = problem.trainer(tmp_path / "whole" / "a", **options)
    expected = whole.fit()
    killed(tmp_path / "cut" / "a", step, **options)
    resumed = problem.trainer(tmp_path / "cut" / "a", seed=9, **options)
    outcome = resumed.fit()
    assert same(weights(whole), weights(resumed))
    assert outcome.epsilon == expected.epsilon
    assert outcome.total == expected.total
    assert outcome.notes == ()
    if whole.state.ema is not None and resumed.state.ema is not None:
        assert same(whole.state.ema.average, resumed.state.ema.average)
        assert whole.state.counts is not None and resumed.state.counts is not None
        assert (whole.state.counts == resumed.state.counts).all()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"corpus": problem.unpromised(**problem.data(shift=1e-6))}, "the data changed"),
        ({"loss_fn": lambda output, y: 2.0 * problem.loss(output, y)}, "loss"),
        ({"microbatches": 2}, "options"),
    ],
)
def test_a_changed_run_is_redone_and_charged_again(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    killed(tmp_path / "a", 8, bounds=LOOSE)
    trainer = problem.trainer(tmp_path / "a", bounds=LOOSE, **change)
    outcome = trainer.fit()
    assert any(word in note and "charged again" in note for note in outcome.notes)
    assert outcome.steps == 24
    charged = figures(tmp_path / "a")["classes"]["clinical"]["steps_charged"]
    assert charged == 24 + 5
    assert outcome.epsilon["clinical"] > trainer.plan.epsilon("clinical")
    assert outcome.total == outcome.epsilon


def test_a_changed_plan_is_charged_at_its_own_price(tmp_path: Path) -> None:
    old = killed(tmp_path / "a", 8, bounds=LOOSE).plan
    model = problem.net()
    new = problem.plan(model, steps=20, batch=40)
    outcome = problem.trainer(tmp_path / "a", model=model, plan=new, bounds=LOOSE).fit()
    assert told(outcome, "the plan changed")
    events = (*old.schedule("clinical"),)[0], (*new.schedule("clinical"),)[0]
    schedule = (
        lamina.account.Event(sigma=events[0].sigma, q=events[0].q, steps=10),
        lamina.account.Event(sigma=events[1].sigma, q=events[1].q, steps=15),
    )
    assert outcome.epsilon["clinical"] == pytest.approx(lamina.account.find_accountant("pld").epsilon(schedule, 1e-5))


@pytest.mark.parametrize("bounds", [None, {}])  # of the policy; without one, what the plan costs
def test_a_redo_that_the_bound_has_no_room_for_shortens_the_run(
    tmp_path: Path, bounds: dict[str, float] | None
) -> None:
    killed(tmp_path / "a", 8, bounds=bounds)
    outcome = problem.trainer(tmp_path / "a", microbatches=2, bounds=bounds).fit()
    assert outcome.steps == 24 - 5
    assert (
        outcome.epsilon["clinical"] <= problem.plan(problem.net()).epsilon("clinical") * (1 + 1e-6) <= 4.0 * (1 + 1e-6)
    )
    assert told(outcome, "19 of 24")


def test_a_withdrawal_between_two_processes_is_a_mismatch(tmp_path: Path) -> None:
    killed(tmp_path / "a", 8)
    corpus = problem.corpus()
    corpus.withdraw("60")
    outcome = problem.trainer(tmp_path / "a", corpus=corpus).fit()
    assert told(outcome, "withdrawn")


def test_who_withdrew_stays_out_after_a_restart(tmp_path: Path) -> None:
    corpus = problem.corpus()

    leave = During({7: lambda: corpus.withdraw("60", "61"), 8: die})
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", corpus=corpus, progress=leave).fit()
    again = problem.corpus()  # the script builds it anew, with everybody in it
    outcome = problem.trainer(tmp_path / "a", corpus=again).fit()
    assert told(outcome, "withdrawn")
    assert not {60, 61} & set(again.members("clinical").tolist())
    assert len(again) == 398
    (tmp_path / "a" / "withdrawn").write_bytes(b"nonsense")
    with raises_code("train.membership-file-unreadable"):
        problem.trainer(tmp_path / "a").fit()
    (tmp_path / "a" / "withdrawn").unlink()
    with raises_code("train.membership-file-missing"):
        problem.trainer(tmp_path / "a").fit()


def test_a_run_from_which_nobody_withdrew_says_so(tmp_path: Path) -> None:
    """Otherwise a file that was deleted would look the same."""
    killed(tmp_path / "a", 8)
    assert (tmp_path / "a" / "withdrawn").read_bytes() == bytes([0x80])  # an empty array in CBOR
    (tmp_path / "a" / "withdrawn").unlink()
    with raises_code("train.membership-file-missing"):
        problem.trainer(tmp_path / "a").fit()


def test_counters_do_not_pass_to_other_people(tmp_path: Path) -> None:
    caps = {"clinical": 2}
    killed(tmp_path / "a", 8, max_occurrences=caps)
    data = {name: values[3:] for name, values in problem.data().items()}  # the first patient is gone
    with raises_code("train.corpus-order-changed"):
        problem.trainer(tmp_path / "a", corpus=problem.corpus(**data), max_occurrences=caps).fit()


@pytest.mark.parametrize("rule", ["finish", "abandon"])
def test_a_withdrawal_inside_a_segment(tmp_path: Path, rule: str) -> None:
    corpus = problem.unpromised()
    drawn: list[int] = []

    class Withdraw(During):
        def step(self, done: int, loss: float | None) -> None:
            drawn.append(done)
            super().step(done, loss)

    leave = Withdraw({7: lambda: corpus.withdraw("60")})
    trainer = problem.trainer(tmp_path / "a", corpus=corpus, progress=leave, on_withdrawal=rule, bounds=LOOSE)
    outcome = trainer.fit()
    opens = attempts(tmp_path / "a")
    if rule == "finish":
        assert drawn == list(range(1, 25)) and outcome.notes == ()
        assert [o.generation for o in opens] == [0] * 5
    else:
        assert drawn == [*range(1, 8), *range(6, 25)]
        assert [(o.segment, o.generation) for o in opens[:3]] == [(0, 0), (1, 0), (1, 1)]
        assert outcome.epsilon["clinical"] > trainer.plan.epsilon("clinical")
    assert len(trainer.corpus) == len(problem.unpromised()) - 1


def test_two_copies_never_share_a_generation(tmp_path: Path) -> None:
    """The copy came first and replayed segment 1: the run is refused, or takes over and does all of it again."""
    killed(tmp_path / "a", 6, bounds=LOOSE)  # segment 1 is open after one step
    copied(tmp_path / "a", "b")
    problem.trainer(tmp_path / "b", bounds=LOOSE).fit()
    spent = figures(tmp_path / "b")["classes"]["clinical"]["total"]
    with raises_code("train.folder-behind-ledger"):
        problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
    outcome = problem.trainer(tmp_path / "a", bounds=LOOSE, take_over=True).fit()
    assert told(outcome, "took over") and outcome.steps == 24 and outcome.total["clinical"] > spent
    later = [each.key for each in attempts(tmp_path / "a") if each.segment]
    assert len(later) == len(set(later)) == 2 * 4  # each of the two did segments 1 to 4
    assert problem.trainer(tmp_path / "b", bounds=LOOSE).fit().steps == 24  # it has finished: it is only read
    assert len(attempts(tmp_path / "b")) == 1 + 2 * 4


def test_a_run_that_was_taken_for_lost(tmp_path: Path) -> None:
    trainer = killed(tmp_path / "a", 6)
    spent = trainer.spend.total("clinical", delta=1e-5)
    assert trainer.spend.abandon_run(*trainer.spend.labels()) == 1
    lost = trainer.spend.total("clinical", delta=1e-5)
    assert (lost.spent, lost.committed) == (spent.spent, spent.spent)
    outcome = problem.trainer(tmp_path / "a").fit()  # it was not
    assert told(outcome, "the ledger records them as abandoned")
    assert outcome.steps < 24 and outcome.total["clinical"] <= 4.0  # five steps more were charged than are in it


def test_a_segment_is_taken_for_lost_while_it_is_trained(tmp_path: Path) -> None:
    def lose() -> None:
        assert trainer.spend.abandon_run(*trainer.spend.labels()) == 1

    trainer = problem.trainer(tmp_path / "a", progress=During({7: lose}), bounds=LOOSE)
    with raises_code("spend.recorded-as-abandoned"):
        trainer.fit()
    outcome = problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
    assert told(outcome, "the ledger records them as abandoned")
    assert outcome.steps == 24


# ---------------------------------------------------------------------------------------- what must not be replayed


class Scaled:
    """A loss with a state of its own."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._factor * problem.loss(output, y)


def closing_over(factor: float) -> Any:
    return lambda output, y: factor * problem.loss(output, y)


def weighted(a: float) -> Any:
    return nn.CrossEntropyLoss(weight=torch.tensor([a, 1.0, 1.0]), reduction="none")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"loss_fn": closing_over(1.0)}, {"loss_fn": closing_over(2.0)}),
        ({"loss_fn": Scaled(1.0)}, {"loss_fn": Scaled(2.0)}),
        ({"loss_fn": Scaled(1.0).__call__}, {"loss_fn": Scaled(2.0).__call__}),
        ({"loss_fn": weighted(1.0)}, {"loss_fn": weighted(2.0)}),
        ({"model": problem.net(dropout=0.1)}, {"model": problem.net(dropout=0.5)}),
    ],
)
def test_what_decides_a_step_is_never_replayed_changed(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    killed(tmp_path / "a", 8, **before)
    outcome = problem.trainer(tmp_path / "a", **after).fit()
    assert told(outcome, "charged again")
    assert [o.generation for o in attempts(tmp_path / "a")][:3] == [0, 0, 1]


def test_data_changed_in_place_is_never_replayed(tmp_path: Path) -> None:
    data = problem.data()
    corpus = problem.corpus(**data)
    trainer = killed(tmp_path / "a", 8, corpus=corpus)
    data["x"] *= -1
    outcome = trainer.fit()
    assert told(outcome, "the data changed")


def everything_in(folder: Path) -> bytes:
    return b"\0".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_nothing_is_drawn_before_it_is_charged(tmp_path: Path) -> None:
    seen: list[tuple[int, int] | None] = []

    def look() -> None:
        found = open_attempt(tmp_path / "a")
        seen.append(None if found is None else found.key)

    with moments(look, "backward"):
        problem.trainer(tmp_path / "a", steps=12, segment=4).fit()
    assert seen == [(step // 4, 0) for step in range(12)]


def test_a_segment_that_was_given_up_is_never_taken_up_again(tmp_path: Path) -> None:
    first = killed(tmp_path / "a", 8)
    seed = hashlib.sha256(b"1").digest()  # of the second attempt, see number_seeds
    assert seed in everything_in(tmp_path)
    problem.trainer(tmp_path / "a", microbatches=2).fit()
    assert seed not in everything_in(tmp_path)
    outcome = problem.trainer(tmp_path / "a").fit()  # the change is undone
    assert outcome.steps == 19 and first.plan.steps == 24


def test_a_learning_rate_that_is_given_now_is_used(tmp_path: Path) -> None:
    def made(lr: float) -> dict[str, Any]:
        model = problem.net()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=lr), "scheduler": None}

    killed(tmp_path / "a", 8, **made(0.1))
    trainer = problem.trainer(tmp_path / "a", **made(0.2))
    outcome = trainer.fit()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.2
    assert told(outcome, "lr changes from 0.1 to 0.2")
    facts = figures(tmp_path / "a")
    assert facts["notes"] == list(outcome.notes)
    again = problem.trainer(tmp_path / "a", **made(0.2)).fit()
    assert set(outcome.notes) <= set(again.notes)  # notes outlive the process


def test_a_segment_that_the_book_refuses_is_never_trained(tmp_path: Path) -> None:
    bounds = {"clinical": 4.0, "sensitive": 2.0}
    trainer = killed(tmp_path / "a", 3, bounds=bounds)
    book = SpendLedger(trainer.ledger)
    run = run_id(tmp_path / "a")
    book.finish(run)  # somebody gives its reservation away
    with pytest.raises(BudgetExceeded):
        problem.trainer(tmp_path / "b", bounds=bounds).fit()
    smaller = problem.plan(problem.net(), steps=12)
    other = problem.trainer(tmp_path / "b", plan=problem.plan(problem.net(), steps=24), bounds={})
    other.fit()  # takes the room, without a bound
    assert smaller.steps < trainer.plan.steps
    outcome = problem.trainer(tmp_path / "a", bounds=bounds).fit()
    assert outcome.steps == 5  # the open segment was booked before; nothing after it
    assert [o.last for o in attempts(tmp_path / "a")] == [5]


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a").fit()
    for steps in (12, 30):
        with raises_code("train.plan-changed"):
            problem.trainer(tmp_path / "a", steps=steps).fit()


def test_a_cap_cannot_be_put_on_afterwards(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a").fit()
    with raises_code("train.max-occurrences-changed"):
        problem.trainer(tmp_path / "a", max_occurrences={"clinical": 1}).fit()


def test_checkpoint_and_run_belong_together(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    killed(mine / "a", 8, bounds={})
    shutil.copytree(mine, other, symlinks=True)  # with the ledger: each goes on by itself
    problem.trainer(other / "a", bounds={}).fit()
    shutil.rmtree(mine / "a" / "checkpoint")
    shutil.copytree(other / "a" / "checkpoint", mine / "a" / "checkpoint")
    with raises_code("train.checkpoint-not-of-run"):
        problem.trainer(mine / "a", bounds={}).fit()


def test_an_evaluation_neither_draws_from_the_run_nor_changes_it(tmp_path: Path) -> None:
    def drawn(model: nn.Module) -> dict[str, float]:
        return {"u": float(torch.rand(())) + float(np.random.rand())}  # noqa: NPY002

    rule = Evaluation(function=drawn, on="public")
    problem.trainer(tmp_path / "a", evaluate=rule).fit()
    facts = figures(tmp_path / "a")
    assert len({entry["figures"]["u"] for entry in facts["evaluations"]}) == 1

    def writes(model: nn.Module) -> dict[str, float]:
        next(model.parameters()).mul_(2.0)
        return {"u": 0.0}

    with raises_code("train.evaluation-changed-model"):
        problem.trainer(tmp_path / "b", evaluate=Evaluation(function=writes, on="public"), bounds={}).fit()


def test_one_account_for_a_run_whose_data_changes(tmp_path: Path) -> None:
    def unnamed(shift: float) -> Any:
        data = problem.data(shift=shift)
        data["cls"] = "clinical"
        return lamina.Corpus(**data)

    model = problem.net()
    policy = problem.POLICY.partition("[class.open]")[0] + "[class.clinical]\npopulation = 500\nepsilon = 4.0\n"
    plan = problem.plan(model, policy=policy)
    bound = {"clinical": plan.epsilon("clinical")}
    killed(tmp_path / "a", 18, model=model, plan=plan, corpus=unnamed(0.0), bounds=bound)
    outcome = problem.trainer(tmp_path / "a", model=problem.net(), plan=plan, corpus=unnamed(1e-3), bounds=bound).fit()
    assert outcome.epsilon["clinical"] <= bound["clinical"] * (1 + 1e-9)
    assert outcome.total["clinical"] == outcome.epsilon["clinical"]


# ---------------------------------------------------------------------------------------- faults


def test_two_at_once_is_refused(tmp_path: Path) -> None:
    trainer = problem.trainer(tmp_path / "a")
    trainer.folder.mkdir()
    with Lease.take(trainer.folder), pytest.raises(RunInUse):
        trainer.fit()
    assert not has_begun(tmp_path / "a")


def test_a_damaged_checkpoint_is_named_and_can_be_removed(tmp_path: Path) -> None:
    killed(tmp_path / "a", 13, bounds=LOOSE)
    path = tmp_path / "a" / "checkpoint" / "000002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    trainer = problem.trainer(tmp_path / "a", bounds=LOOSE)
    before = folder_state(tmp_path / "a")
    with raises_code("train.checkpoint-damaged"):
        trainer.fit()
    assert folder_state(tmp_path / "a") == before
    path.unlink()
    outcome = trainer.fit()
    assert outcome.steps == 24
    assert told(outcome, "charged again")
    facts = figures(tmp_path / "a")
    assert facts["classes"]["clinical"]["steps_charged"] == 24 + 5 + 5  # segments 1 and 2 twice


def test_checkpoints_without_the_record_of_their_run_are_refused(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a").fit()
    (tmp_path / "a" / "run.cbor").unlink()
    with raises_code("train.run-record-missing"):
        problem.trainer(tmp_path / "a").fit()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
    killed(tmp_path / "b", 8, bounds=LOOSE)
    source = tmp_path / "a" / "checkpoint" / "000005.safetensors"
    (tmp_path / "b" / "checkpoint" / "000005.safetensors").write_bytes(source.read_bytes())
    with raises_code("train.checkpoint-of-other-run"):
        problem.trainer(tmp_path / "b", bounds=LOOSE).fit()


def test_a_full_disk_at_a_checkpoint_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lamina.run.training_checkpoint import TrainingCheckpoints

    whole = problem.trainer(tmp_path / "whole" / "a")
    expected = whole.fit()
    save = TrainingCheckpoints.save

    def full(self: TrainingCheckpoints, index: int, snapshot: Any) -> bytes:
        if index == 2:
            raise StorageError("train.disk-full", "no space left", "free some")
        return save(self, index, snapshot)

    monkeypatch.setattr(TrainingCheckpoints, "save", full)
    trainer = problem.trainer(tmp_path / "cut" / "a")
    with pytest.raises(StorageError):
        trainer.fit()
    monkeypatch.setattr(TrainingCheckpoints, "save", save)
    outcome = trainer.fit()
    assert outcome.epsilon == expected.epsilon
    assert same(weights(whole), weights(trainer))


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    import time

    whole = problem.trainer(tmp_path / "whole" / "a")
    expected = whole.fit()
    killed(tmp_path / "cut" / "a", 8)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    resumed = problem.trainer(tmp_path / "cut" / "a")
    assert resumed.fit().epsilon == expected.epsilon
    assert same(weights(whole), weights(resumed))


def test_a_file_where_the_checkpoints_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoint").write_text("in the way")
    with raises_code("train.storage-failed"):
        problem.trainer(tmp_path / "a").fit()


def test_another_book_for_a_copied_run_is_refused(tmp_path: Path) -> None:
    killed(tmp_path / "a", 8, bounds={}, ledger=tmp_path / "one.db")
    copied(tmp_path / "a", "b")
    with raises_code("train.ledger-differs"):
        problem.trainer(tmp_path / "b", bounds={}, ledger=tmp_path / "two.db").fit()
    problem.trainer(tmp_path / "a", bounds={}, ledger=tmp_path / "one.db").fit()
    mine = attempts(tmp_path / "a")[-1]
    three = problem.trainer(tmp_path / "c", bounds={}, ledger=tmp_path / "three.db").ledger
    book = SpendLedger(three)
    run = run_id(tmp_path / "a")
    assert book.charge(
        run, segment=mine.segment, generation=mine.generation,
        nonce=b"somebody else's!", bounds={},
        charges=plan_charges(problem.plan(problem.net()), mine.first, mine.last),
    )  # fmt: skip
    with raises_code("train.ledger-differs"):
        problem.trainer(tmp_path / "a", bounds={}, ledger=three).fit()
    with raises_code("train.ledger-disagrees"):
        complete(tmp_path / "three.db", tmp_path / "a")


def test_filters_stay_as_they_were(tmp_path: Path) -> None:
    event = problem.plan(problem.net()).schedule("clinical")[0]

    def room(steps: int) -> dict[str, Any]:
        schedule = (lamina.account.Event(sigma=event.sigma, q=event.q, steps=steps),)
        return {"clinical": GaussianFilter.for_schedule(schedule)}

    killed(tmp_path / "a", 8, filters=room(1000))
    for other in (room(3), {}):
        with raises_code("train.filters-changed"):
            problem.trainer(tmp_path / "a", filters=other).fit()


def test_a_given_engine_keeps_its_options(tmp_path: Path) -> None:
    model = problem.net()
    plan = problem.plan(model)
    engine = lamina.Engine(model, plan, constant_time=True)
    trainer = problem.trainer(tmp_path / "a", model=model, plan=plan, engine=engine)
    trainer.fit()
    trainer.fit()
    assert trainer._engine is not engine and trainer._engine.eager.constant_time


# ---------------------------------------------------------------------------------------- the book


def test_a_second_run_that_exceeds_the_bound_is_refused_before_it_begins(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a").fit()
    with raises_code("spend.budget-exceeded"):
        problem.trainer(tmp_path / "b").fit()
    assert not has_begun(tmp_path / "b")
    assert not (tmp_path / "b" / "model.safetensors").exists()
    with pytest.raises(BudgetExceeded):  # what was promised holds, whatever a trainer is told
        problem.trainer(tmp_path / "b", corpus=problem.corpus(), bounds={}).fit()
    assert verify(tmp_path / "tests.ledger.db").spends > 0


def test_without_a_bound_what_runs_spend_is_told_and_not_refused(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", bounds={}).fit()
    second = problem.trainer(tmp_path / "b", bounds={}).fit()
    assert second.total["clinical"] > second.epsilon["clinical"]


def test_filters_are_asked_for_whole_segments(tmp_path: Path) -> None:
    plan = problem.plan(problem.net())
    event = plan.schedule("clinical")[0]
    room = (lamina.account.Event(sigma=event.sigma, q=event.q, steps=12),)
    filter_ = GaussianFilter.for_schedule(room)
    killed(tmp_path / "a", 8, filters={"clinical": filter_})
    again = GaussianFilter.for_schedule(room)
    outcome = problem.trainer(tmp_path / "a", filters={"clinical": again}).fit()
    assert outcome.steps == 10
    assert told(outcome, "filter")


# ---------------------------------------------------------------------------------------- evaluation


def test_evaluation_best_and_patience(tmp_path: Path) -> None:
    values = iter([0.0, 0.1, 0.5, 0.4, 0.3, 0.2, 0.1])  # the first is the rehearsal's
    seen: list[bool] = []

    def auc(model: nn.Module) -> dict[str, float]:
        seen.append(model.training)
        return {"auc": next(values)}

    rule = Evaluation(function=auc, on="public", best="auc", patience=2)
    trainer = problem.trainer(tmp_path / "a", evaluate=rule)
    outcome = trainer.fit()
    assert outcome.steps == 15 and seen == [False] * 5
    assert outcome.metrics == {"auc": 0.3}
    assert outcome.epsilon["clinical"] < trainer.plan.epsilon("clinical")
    assert not same(load_file(tmp_path / "a" / "best.safetensors"), weights(trainer))
    facts = figures(tmp_path / "a")
    assert [entry["step"] for entry in facts["evaluations"]] == [0, 5, 10, 15]
    other = problem.trainer(tmp_path / "b").spend
    assert other.total("clinical", delta=1e-5).committed == outcome.total["clinical"]


def test_evaluations_are_the_same_after_a_resume(tmp_path: Path) -> None:
    x = torch.randn(50, 6)
    rule = Evaluation(function=lambda model: {"mean": float(model(x).mean())}, on="simulated", every=2)
    whole = problem.trainer(tmp_path / "whole" / "a", evaluate=rule)
    whole.fit()
    killed(tmp_path / "cut" / "a", 13, evaluate=rule)
    problem.trainer(tmp_path / "cut" / "a", evaluate=rule).fit()
    facts = [figures(tmp_path / n / "a") for n in ("whole", "cut")]
    assert facts[0]["evaluations"] == facts[1]["evaluations"]
    assert [entry["step"] for entry in facts[0]["evaluations"]] == [0, 10, 20, 24]


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        ({"on": "private"}, "train.evaluation-on-private-data"),
        ({"on": "public", "every": 0}, "train.not-a-count"),
        ({"on": "public", "patience": 2}, "train.patience-without-best"),
    ],
)
def test_bad_evaluations_are_refused(rule: dict[str, Any], word: str) -> None:
    with raises_code(word):
        Evaluation(function=lambda model: {}, **rule)


@pytest.mark.parametrize("figures", [{}, 0.3, {"auc": float("nan")}, {"loss": 1.0}])
def test_bad_figures_are_refused(tmp_path: Path, figures: Any) -> None:
    rule = Evaluation(function=lambda model: figures, on="public", best="auc")
    with raises_code("train.evaluation-not-finite", "train.evaluation-without-best", "train.evaluation-not-figures"):
        problem.trainer(tmp_path / "a", evaluate=rule).fit()


# ---------------------------------------------------------------------------------------- mistakes of newcomers


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"loss_fn": nn.CrossEntropyLoss()}, RunError, "reduction='none'"),
        ({"loss_fn": lambda o, y: problem.loss(o, y).mean()}, CouplingError, "one loss per example"),
        ({"loss_fn": lambda o, y: o}, lamina.LaminaError, "one loss per example"),
        ({"loss_fn": lambda o, y: problem.loss(o, y.float())}, RunError, "int64"),
        ({"loss_fn": 3}, RunError, "function"),
        ({"corpus": torch.utils.data.DataLoader([1, 2], collate_fn=list)}, CorpusError, "Poisson"),
        ({"corpus": [1, 2]}, RunError, "lamina.Corpus"),
        ({"optimizer": torch.optim.SGD(problem.net().parameters(), lr=1.0)}, RunError, "none of the model's"),
        ({"microbatches": 0}, RunError, "microbatches"),
        ({"segment": -1}, RunError, "segment"),
        ({"ema": 1.5}, RunError, "ema"),
        ({"on_withdrawal": "ignore"}, RunError, "finish"),
        ({"inside": True}, RunError, "terminal"),
        ({"max_occurrences": {"nobody": 3}}, lamina.LaminaError, "nobody"),
        ({"max_occurrences": 3}, RunError, "by class"),
        ({"evaluate": lambda model: {"auc": 1.0}}, RunError, "lamina.Evaluation"),
        ({"bounds": {"clincal": 1.0}}, RunError, "clincal"),
        ({"segment": 0}, RunError, "segment"),
        ({"corpus": problem.corpus(unit=None)}, lamina.LaminaError, "unit"),
    ],
)
def test_mistakes_are_refused_before_anything_is_spent(
    tmp_path: Path, change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        problem.trainer(tmp_path / "a", **change).fit()
    assert not has_begun(tmp_path / "a")


def test_labels_out_of_range_are_found_before_anything_is_spent(tmp_path: Path) -> None:
    data = problem.data()
    data["y"] = data["y"] + 1
    with raises_code("train.labels-out-of-range"):
        problem.trainer(
            tmp_path / "a", corpus=problem.corpus(**data), loss_fn=nn.CrossEntropyLoss(reduction="none")
        ).fit()
    assert not has_begun(tmp_path / "a")


def test_batchnorm_is_refused_with_its_remedy(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with raises_code("plan.module-unsafe"):
        problem.trainer(tmp_path / "a", model=model)


def test_plateau_and_lbfgs_are_refused(tmp_path: Path) -> None:
    model = problem.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with raises_code("train.scheduler-follows-loss"):
        problem.trainer(tmp_path / "a", model=model, optimizer=optimizer, scheduler=plateau)
    with raises_code("train.optimizer-several-gradients"):
        problem.trainer(tmp_path / "a", model=model, optimizer=torch.optim.LBFGS(model.parameters()), scheduler=None)


def test_more_contributions_than_declared_are_refused(tmp_path: Path) -> None:
    policy = problem.POLICY.replace("population = 300", "population = 200")
    model = problem.net()
    with raises_code("corpus.population-too-small"):
        problem.trainer(tmp_path / "a", model=model, plan=problem.plan(model, policy=policy))


@pytest.mark.parametrize(("name", "value"), [("epsilon", 0), ("epsilon", -1.0), ("delta", 0), ("delta", 1.0)])
def test_make_private_teaches(name: str, value: float) -> None:
    x, y = torch.randn(40, 6), torch.zeros(40, dtype=torch.long)
    with raises_code(f"train.{name}-out-of-range"):
        lamina.make_private(problem.net(), (x, y), batch=8, epochs=1, **{"epsilon": 1.0, name: value})
    with raises_code("train.batch-above-corpus"):
        lamina.make_private(problem.net(), (x, y), epsilon=1.0, batch=50, epochs=1)
    with raises_code("corpus.dataloader-not-poisson"):
        lamina.make_private(problem.net(), torch.utils.data.DataLoader([1], collate_fn=list), batch=50, epochs=1)


def test_make_private_gives_a_loop(tmp_path: Path) -> None:
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
    model = problem.net()
    engine, corpus, plan = lamina.make_private(model, (x, y), epsilon=2.0, batch=8, epochs=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in corpus.batches(plan):
        engine.backward(problem.loss(model(batch.x), batch.y) if len(batch) else None, batch)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.probed and engine.budget.taken == plan.steps == 10
    assert 0 < engine.epsilon(0) <= 2.0
    with pytest.warns(PlannedBefore):  # on the same data
        engine2, corpus, plan = lamina.make_private(problem.net(), (x, y), epsilon=1.0, batch=8, epochs=2)
    trainer = Trainer(
        engine2.model, torch.optim.SGD(engine2.model.parameters(), lr=0.1), problem.loss, corpus, plan,
        engine=engine2, folder=tmp_path / "a", progress=False,
    )  # fmt: skip
    outcome = trainer.fit()
    assert outcome.steps == 10 and outcome.epsilon["data"] <= 1.0
