"""What the trainer costs over a bare engine loop, and how large its checkpoints are.

    python benchmarks/trainer.py [--rounds 7] [--steps 200] [--processor-time] [--inside]

Both do the same private steps on the same corpus: `Corpus.batches` and `Engine.backward` in a loop, against
`Trainer.fit`, which also rehearses, books, checkpoints and publishes. Rounds are interleaved and the ratio is
taken within a round. `--inside` instead splits the time of one run with a ledger: a step lasts from the beginning of the
forward pass to the end of the optimiser's step, everything else (rehearsal, sampling, ledger, checkpoints) is
around it. No two runs are compared there, so that the machine's drift does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina import Corpus, Engine, LayerStack, Policy, StepPlan, Trainer, make_plan
from lamina.signals.autoencoders import ResidualAutoencoder

POLICY = """
[corpus]
origin = "benchmark"
delta = 1e-5
[class.clinical]
population = 2000
epsilon = 8.0
"""


CLOCK = time.perf_counter


def loss(output: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(output, x, reduction="none").flatten(1).mean(1)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ResidualAutoencoder()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def bare(corpus: Corpus, plan: StepPlan) -> float:
    model, optimizer = made()
    began = CLOCK()
    model.train()
    with Engine(model, plan) as engine:
        for batch in corpus.batches(plan):
            engine.backward(loss(model(batch.x), batch.x) if len(batch) else None, batch)
            optimizer.step()
            optimizer.zero_grad()
    return CLOCK() - began


def trained(corpus: Corpus, plan: StepPlan, folder: Path, segment: int | None) -> tuple[float, float]:
    """Seconds of the run, and the size of a checkpoint in units of model and optimiser."""
    model, optimizer = made()
    began = CLOCK()
    Trainer(model, optimizer, loss, corpus, plan, folder=folder / "run", segment=segment, progress=False).fit()
    seconds = CLOCK() - began
    state = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    held = sum(t.numel() * t.element_size() for t in state if isinstance(t, Tensor))
    newest = max((folder / "run" / "checkpoint").iterdir())
    return seconds, newest.stat().st_size / held


def measure(rounds: int, steps: int, batch: int, segment: int | None) -> dict[str, Any]:
    policy = Policy.parse(POLICY)
    corpus = Corpus(torch.randn(2000, 12, 256), policy=policy)
    plan = make_plan(LayerStack.from_model(made()[0]), policy, batch=batch, steps=steps)
    ratios, times, size = [], [], 0.0
    bare(corpus, plan)  # warm
    for _ in range(rounds):
        one = bare(corpus, plan)
        with tempfile.TemporaryDirectory() as folder:
            other, size = trained(corpus, plan, Path(folder), segment)
        ratios.append(other / one)
        times.append((one, other))
    return {
        "rounds": rounds,
        "steps": steps,
        "bare_seconds": statistics.median(t[0] for t in times),
        "trainer_seconds": statistics.median(t[1] for t in times),
        "overhead": statistics.median(ratios) - 1,
        "overhead_range": [min(ratios) - 1, max(ratios) - 1],
        "checkpoint_over_model_and_optimiser": size,
    }


def inside(rounds: int, steps: int, batch: int, segment: int | None) -> dict[str, Any]:
    """How much of a run with ledger and checkpoints is spent around its steps."""
    policy, shares, totals = Policy.parse(POLICY), [], []
    corpus = Corpus(torch.randn(2000, 12, 256), policy=policy)
    plan = make_plan(LayerStack.from_model(made()[0]), policy, batch=batch, steps=steps)
    for _ in range(rounds):
        model, optimizer = made()
        began, within = CLOCK(), [0.0, 0.0]  # of the last forward pass; of all steps

        def forward_begins(module: nn.Module, arguments: Any, within: list[float] = within) -> None:
            within[0] = CLOCK()

        def step_ends(optimizer: Any, *arguments: Any, within: list[float] = within) -> None:
            within[1] += CLOCK() - within[0]

        model.register_forward_pre_hook(forward_begins)
        optimizer.register_step_post_hook(step_ends)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            Trainer(model, optimizer, loss, corpus, plan, folder=run, segment=segment, progress=False).fit()
        total = CLOCK() - began
        shares.append(1 - within[1] / total)
        totals.append(total)
    return {"rounds": rounds, "steps": steps, "seconds": totals, "share_around_the_steps": shares}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--segment", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="for a machine that other work shares")
    parser.add_argument("--inside", action="store_true", help="one run, split into its steps and what is around them")
    chosen = parser.parse_args()
    CLOCK = time.process_time if chosen.processor_time else time.perf_counter
    torch.set_num_threads(chosen.threads)
    how = inside if chosen.inside else measure
    print(json.dumps(how(chosen.rounds, chosen.steps, chosen.batch, chosen.segment), indent=2))
