"""The paired-seed audit of a step that several ranks take together; sound, and with a fault planted in one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import ranks
import torch
from audit_steps import plan_for, target_of
from torch import nn

from lamina import Batch, Engine
from lamina.audit import audit_step
from lamina.engine.distributed import Ranks


class CountedTwice(Ranks):
    """Rank 1 adds its part twice."""

    def add_up(self, tensors: Any) -> None:
        if self.rank == 1:
            for each in tensors:
                each.mul_(2)
        super().add_up(tensors)


class WholeNoise(Ranks):
    """Every rank adds all of the noise."""

    noise_share = 1.0  # type: ignore[assignment]


class LittleNoise(Ranks):
    """Every rank adds S²/size² instead of S²/size."""

    @property
    def noise_share(self) -> float:
        return 1.0 / self.size


FAULTS = {kind.__name__: kind for kind in (CountedTwice, WholeNoise, LittleNoise)}


def audit(name: str, rank: int, size: int) -> dict[str, Any]:
    """The checks that failed, and the farthest that a canary moved, of its bound. `name`: KIND CLIPPING UNIT."""
    kind, clipping, unit = name.split()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    plan = plan_for(model, clipping, several=True)
    batch = Batch(torch.randn(5, 4), torch.rand(5) + 0.5, cls=torch.tensor([0, 1, 0, 2, 1]))
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[2])
        fully_shard(model)
    options: dict[str, Any] = {}
    if kind in FAULTS:
        made = FAULTS[kind](rank, size)
        options["make"] = lambda m, p, source: Engine(m, p, noise=source, ranks=made)
    checks = audit_step(target_of(model, plan, **options), batch, unit=int(unit), tries=1, quick=True)
    moved = {check.name: check.detail for check in checks if check.name.startswith("sensitivity")}
    return {"failed": [check.name for check in checks if not check.passed], "checks": len(checks), "moved": moved}


def main(rank: int, size: int) -> None:
    ranks.answer({name: audit(name, rank, size) for name in json.loads(sys.argv[1])})


if __name__ == "__main__":
    ranks.spread(main)
