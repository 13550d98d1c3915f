"""Runs of the small problem as one of several ranks; one JSON object of arguments: {name of a scenario: folder}."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import problem
import pytest
import ranks
import torch
from run_state import number_seeds
from torch import Tensor

from lamina import LaminaError, StepPlan
from lamina.engine.distributed import is_sharded_model, weights_digest
from lamina.engine.rules.proxy import Proxy
from lamina.run.run_output import Progress

SEGMENT = 4
LOOSE = {"clinical": 9.0, "sensitive": 9.0}


class Withdraw(Progress):
    """Somebody withdraws after step 6."""

    corpus: Any = None

    def step(self, done: int, loss: float | None) -> None:
        if done == 6 and self.corpus is not None:
            self.corpus.withdraw("77")
            self.corpus = None


def failing(output: Tensor, y: Tensor) -> Tensor:
    """Fails at its seventh step on rank 1."""
    CALLS["grad"] += int(output.requires_grad)
    if torch.distributed.get_rank() == 1 and CALLS["grad"] == 7:
        raise ValueError("as the test wants it")
    return problem.loss(output, y)


CALLS = {"grad": 0}


def fit(folder: str, **options: Any) -> dict[str, Any]:
    if (plan := options.pop("plan", None)) is None:
        plan = StepPlan.from_cbor(Path(os.environ["RANKS_PLAN"]).read_bytes())  # calibrating takes longer than training
    trainer = problem.trainer(Path(folder), plan=plan, segment=SEGMENT, **options)
    if isinstance(options.get("progress"), Withdraw):
        options["progress"].corpus = trainer.corpus
    try:
        outcome = trainer.fit()
    except LaminaError as error:
        return {"refused": error.code}
    return {
        "weights": "" if is_sharded_model(trainer.model) else weights_digest(trainer.model).hex(),
        "epsilon": outcome.epsilon,
        "steps": outcome.steps,
        "notes": list(outcome.notes),
        "private": outcome.private,
    }


def die_at(step: int) -> None:
    """End this process when a batch of that step is drawn."""
    from lamina.run import sampler

    real = sampler.Sampler.draw

    def draw(self: Any, number: int) -> Any:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, number)

    sampler.Sampler.draw = draw  # type: ignore[method-assign]


def sharded() -> dict[str, Any]:
    """The model under fully_shard, with an optimiser that has state."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = problem.net()
    fully_shard(model[3])
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}


def scenario(name: str, folder: str, rank: int) -> dict[str, Any]:
    if name == "whole":
        return fit(folder, ema=0.9, max_occurrences={"clinical": 4}, microbatches=2)
    if name == "differs":
        return fit(folder, corpus=problem.corpus(**problem.data(seed=rank)))
    if name == "proxied":
        source = Path(os.environ["RANKS_PLAN"]).with_name("proxied.cbor")
        draw = torch.Generator().manual_seed(5)
        x, y = torch.randn(40, 6, generator=draw), torch.randint(0, 3, (40,), generator=draw)
        proxy = Proxy(source="simulated", x=x, y=y, loss_fn=problem.loss)
        return fit(folder, plan=StepPlan.from_cbor(source.read_bytes()), proxy=proxy)
    if name == "withdraw":
        return fit(folder, progress=Withdraw(), on_withdrawal="abandon", bounds=LOOSE)
    if name == "loose":
        return fit(folder, bounds=LOOSE)
    if name == "fails":
        return fit(folder, loss_fn=failing, probe=False)
    if name.startswith("killed") and rank == 1:
        die_at(6)
    if name.endswith("sharded"):
        return fit(folder, **sharded())
    if name == "adam":
        torch.manual_seed(0)
        model = problem.net()
        return fit(folder, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    return fit(folder)


def main(rank: int, size: int) -> None:
    number_seeds(pytest.MonkeyPatch())
    told: dict[str, str] = json.loads(sys.argv[1])
    found = {name: scenario(name, folder, rank) for name, folder in told.items()}
    if any(name.startswith("killed") for name in told):
        print(json.dumps(found), flush=True)  # nobody is left to say goodbye to
        return
    ranks.answer(found)


if __name__ == "__main__":
    ranks.spread(main)
