"""Models under fully_shard of every awkward kind: each takes the same steps with and without it, as one of several ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import ranks
import torch
from oracle import plan_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lamina import Batch, Engine, LaminaError, SeededNoise
from lamina.engine.distributed import Ranks, whole_tensor
from lamina.engine.execute.norms import _thread_buffers
from lamina.plan.rules import FollowEnergy, FollowQuantile, NoiseKind

WIDTH = 6


@dataclasses.dataclass
class Hidden:
    """An output in an object of the user's."""

    h: Tensor


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner, self.norm, self.outer = nn.Linear(WIDTH, 7), nn.LayerNorm(7), nn.Linear(7, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Any) -> Any:
        x = x.h if isinstance(x, Hidden) else x[0] + x[1].h if isinstance(x, tuple) else x
        out = x + self.outer(torch.tanh(self.norm(self.inner(x)))) + self.shift
        if self.way == "beside an object":
            return out / 2, Hidden(out / 2)
        return Hidden(out) if self.way == "in an object" else out


class Net(nn.Module):
    """Three blocks between two layers of its own; `way` says how they are used."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(3))
        self.last = nn.Linear(WIDTH, 2)
        if way == "tied":  # within what is sharded together; over two blocks FSDP itself unties it
            self.blocks[1].inner.weight = self.blocks[0].inner.weight
        frozen = {"frozen below": [self.first, self.blocks[0]], "frozen between": [self.blocks[1]]}
        for module in frozen.get(way, []):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h, (a, b, c) = self.first(x), self.blocks
        if self.way == "other order":
            h = a(c(b(h)))
        elif self.way == "left out" and float(x[0, 0]) > 0:
            h = c(a(h))
        elif self.way == "bypassed":
            h = c(a(b.outer(torch.tanh(b.inner(h)))))
        elif self.way in ("used twice", "twice over positions"):
            h = c(b(a(b(h))))
        elif self.way == "without gradient":
            with torch.no_grad():
                aside = b(h)
            h = c(b(a(h))) + aside
        elif self.way == "checkpointed":
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
        else:
            h = c(b(a(h)))
        return self.last(h.h if isinstance(h, Hidden) else h[0] + h[1].h if isinstance(h, tuple) else h)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    if getattr(model, "way", "") == "called twice":
        return torch.sin(model(x)).sum(1).float() + model(-x).square().sum(1).float()
    return torch.sin(model(x)).flatten(1).sum(1).float()


def made(way: str) -> tuple[nn.Module, Any, bool]:
    """Model, plan, and whether its noise is hardened."""
    torch.manual_seed(3)
    model = Net(way)
    if way == "bfloat16":
        model = model.to(torch.bfloat16)
    plan = plan_of(model, 0.3, 0.8, clipping="joint" if way in JOINT else "box")
    if way == "counts":
        plan = dataclasses.replace(plan, rules=(FollowQuantile(target=0.5, rate=0.3, noise=4.0),))
    if way == "energy":
        plan = dataclasses.replace(plan, rules=(FollowEnergy(every=1),))
    if way == "integers":
        plan = dataclasses.replace(plan, noise_kind=NoiseKind.SKELLAM, accountant="rdp-integer")
    return model, plan, way == "hardened"


def shard(model: nn.Module, way: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def columns(p: Tensor) -> Shard:
        return Shard(int(p.dim() == 2 and p.shape[1] == WIDTH))

    for i, block in enumerate(model.blocks):
        if not (way == "in parts" and i != 1) and not (way == "tied" and i != 2):
            fully_shard(block, shard_placement_fn=columns if way == "columns" else None)
    if way != "in parts":
        fully_shard(model)


JOINT = ("joint", "checkpointed", "left out", "twice over positions")
WAYS = [
    "plain",
    "joint",
    "other order",
    "left out",
    "used twice",
    "without gradient",
    "checkpointed",
    "tied",
    "called twice",
]
WAYS += [
    "frozen below",
    "frozen between",
    "bfloat16",
    "in parts",
    "columns",
    "counts",
    "energy",
    "integers",
    "hardened",
]
WAYS += ["once per contribution", "evaluated by one", "nobody", "not zeroed", "refused between"]
WAYS += ["twice over positions", "in an object", "looked at", "looked at with gradients", "beside an object"]


def batch_of(count: int, way: str) -> Batch:
    x = torch.randn(count, 3, 5) if way == "twice over positions" else torch.randn(count, 5)
    return Batch(x.to(torch.bfloat16) if way == "bfloat16" else x)


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except LaminaError as error:
        return error.code
    return ""


def trained(way: str, rank: int, size: int, *, sharded: bool) -> dict[str, Any]:
    """The weights after a few steps, of batches that leave ranks empty."""
    model, plan, hardened = made(way)
    if sharded:
        shard(model, way)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    options: dict[str, Any] = {"per_contribution": ["blocks.1"]} if way == "once per contribution" else {}
    whole, notes, kind = 0, [], {} if hardened else {"hardened": False}
    with Engine(model, plan, noise=SeededNoise(7, rank=rank, **kind), **options) as engine:
        for step, count in enumerate((7, 0, 1, 6, 5) if way != "nobody" else (0, 0)):
            part = batch_of(count, way).shard(rank, size)
            if way == "evaluated by one" and step == 2 and rank == 0:
                with torch.no_grad():
                    model(torch.zeros(2, 5))
            if way == "refused between" and step == 3:
                other = batch_of(4, way)
                notes.append(refused(lambda: engine.backward(losses_of(model, other.x), other)))  # noqa: B023
            engine.backward(losses_of(model, part.x) if len(part) else None, part)
            local = [
                p.grad.to_local() if sharded and hasattr(p.grad, "to_local") else p.grad for p in model.parameters()
            ]
            assert not any(grad is not None and grad.requires_grad for grad in local)  # a graph would hold activations
            assert not vars(_thread_buffers)  # in which kernels leave single contributions
            if way.startswith("looked at"):
                with torch.set_grad_enabled("with gradients" in way):
                    model(torch.zeros(2, 5))
            if way != "not zeroed" or step % 2:
                optimizer.step()
                optimizer.zero_grad()
            held = [p.to_local().numel() for p in model.parameters() if hasattr(p, "to_local")]
            whole += sharded and sum(held) >= sum(p.numel() for p in model.parameters() if hasattr(p, "to_local"))
        order = getattr(engine.placement, "_order", None)
        notes.append([round(c, 9) for row in engine.applied.clip for c in row])
        notes.append([round(s, 9) for s in engine.applied.noise])
    optimizer.zero_grad()
    found = {name: whole_tensor(p.detach()).float().tolist() for name, p in model.named_parameters()}
    return {"weights": found, "notes": notes, "order": order, "whole": whole}


class Fails(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ValueError("as the test wants it")


def attacks(rank: int, size: int) -> dict[str, str]:
    found = {}
    model, plan, _ = made("plain")
    shard(model, "plain")
    hook = model.blocks[1].register_forward_hook(lambda m, a, out: Fails.apply(out) if failing[0] else out)
    failing = [False]
    engine = Engine(model, plan, noise=SeededNoise(1, rank=rank))

    def step(count: int = 4) -> None:
        part = batch_of(count, "plain").shard(rank, size)
        engine.backward(losses_of(model, part.x) if len(part) else None, part)
        model.zero_grad()

    def failing_step() -> None:
        """As a trainer does: who fails tells the others."""
        failing[0] = rank == 1
        try:
            step()
        except ValueError:
            Ranks.current().agree(1, failed=True)
            raise LaminaError("test.itself", "it fails", "none") from None
        finally:
            failing[0] = False

    undivided = batch_of(0, "plain")
    found["not divided, before any forward pass"] = refused(lambda: engine.backward(None, undivided))
    step()
    found["an error in the backward pass"] = refused(failing_step)
    found["and then"] = refused(step)
    torch.manual_seed(4)
    one = batch_of(4, "plain").shard(rank, size)
    apart = batch_of(4, "plain").shard(rank, size)
    mine = one if rank == 0 else apart
    found["another sample"] = refused(lambda: engine.backward(losses_of(model, mine.x), mine))
    if rank == 0:
        engine.continue_at(5, SeededNoise(2, rank=rank))
    found["another step"] = refused(step)
    engine.continue_at(1, SeededNoise(3, rank=rank))
    hook.remove()
    part = batch_of(4, "plain").shard(rank, size)
    losses = losses_of(model, part.x)
    with torch.no_grad():  # a write to the part that rank 0 keeps, between forward pass and step
        engine.placement.held["blocks.1.inner.weight"].to_local().add_(0.0 if rank else 1.0)
    found["written to"] = refused(lambda: engine.backward(losses, part))
    if rank == 0:
        Ranks.current().agree(1, failed=True)
    engine._take_away()

    model, plan, _ = made("plain")
    shard(model, "plain")
    model.blocks[0].shift.fill_(0.1 + rank)
    found["another buffer"] = refused(lambda: Engine(model, plan, noise=SeededNoise(1, rank=rank)))
    torch.manual_seed(rank)
    model = Net("in parts")
    shard(model, "in parts")
    found["other weights that are not divided"] = refused(lambda: Engine(model, plan, noise=SeededNoise(1, rank=rank)))
    model, plan, _ = made("plain")
    shard(model, "plain")
    model.way = "bypassed"
    engine = Engine(model, plan, noise=SeededNoise(1, rank=rank))
    found["a part of a block"] = refused(step)
    engine._take_away()
    model, plan, _ = made("tied")
    shard(model, "plain")
    found["tied over two blocks"] = refused(lambda: Engine(model, plan, noise=SeededNoise(1, rank=rank)))
    model, plan, _ = made("plain")
    shard(model, "plain")
    found["compiled"] = refused(lambda: Engine(model, plan, noise=SeededNoise(1, rank=rank), compiled=True))
    model, plan, _ = made("plain")
    shard(model, "plain")
    with Engine(model, plan, noise=SeededNoise(1, rank=rank)) as engine:
        step()
    x = torch.full((2, 5), 1.0 + rank)
    losses_of(model, x).sum().backward()  # without an engine FSDP adds gradients up again
    found["detached"] = str(round(float(whole_tensor(model.last.bias.grad).sum()), 5))
    return found


def main(rank: int, size: int) -> None:
    ways = sys.argv[1].split(",") if len(sys.argv) > 1 else WAYS
    found: dict[str, Any] = {}
    for way in ways:
        if way != "attacks":
            found[way] = [trained(way, rank, size, sharded=sharded) for sharded in (False, True)]
    if "attacks" in ways:
        found["attacks"] = attacks(rank, size)
    ranks.answer(found)


if __name__ == "__main__":
    ranks.spread(main)
