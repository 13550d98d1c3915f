"""A seed that somebody chose: the run can be repeated, says that it is not private, and gets no certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problem
import torch
from refusals import raises_code

from lamina import Callback, Engine, SeededNoise, Trainer


class StopAfterOne(Callback):
    """Fails when a segment is closed, as a crash would."""

    def on_segment(self, figures: Any) -> None:
        raise RuntimeError("crash")


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_a_seeded_run_can_be_repeated_and_is_not_private(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 42), ("b", 42), ("c", 43)):
        trainer = problem.trainer(tmp_path / name / "run", run_seed=seed)
        outcome = trainer.fit()
        assert not outcome.private and "NOT PRIVATE" in str(outcome)
        told = outcome.certificate
        assert not told.private and any("noise" in reason for reason in told.reasons)
        found.append(weights(trainer))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def test_a_run_that_was_seeded_once_stays_not_private(tmp_path: Path) -> None:
    with raises_code("train.user-code-failed"):
        problem.trainer(tmp_path / "run", run_seed=42, callbacks=[StopAfterOne()]).fit()
    outcome = problem.trainer(tmp_path / "run").fit()
    assert not outcome.private and not outcome.certificate.private


def test_seeded_batches_are_refused_by_a_private_engine() -> None:
    plan, corpus = problem.plan(problem.net()), problem.corpus()
    drawn = [[batch.unit.tolist() for batch in corpus.batches(plan, seed=seed, probe=False)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    for noise, refused in ((None, True), (SeededNoise(0), False)):
        model = problem.net()
        with Engine(model, plan, noise=noise) as engine:
            batch = next(each for each in corpus.batches(plan, seed=1, probe=False) if len(each))
            losses = problem.loss(model(batch.x), batch.y)
            if refused:
                with raises_code("engine.seeded-batch"):
                    engine.backward(losses, batch)
                assert engine.budget.taken == 0
            else:
                engine.backward(losses, batch)


def test_a_seed_is_a_whole_number(tmp_path: Path) -> None:
    with raises_code("train.not-a-count"):
        problem.trainer(tmp_path / "run", run_seed=-1)
