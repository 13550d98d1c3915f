"""Steps of an engine as one of several ranks: what it wrote, and what was refused.

Noise is seeded, so that the test can draw it again; batches and models are the same on every rank.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import ranks
import torch
from oracle import clip_by_hand, example_grads, losses_of, plan_of, unit_grads
from torch import Tensor, nn

from lamina import Batch, Engine, LaminaError, LayerStack, Policy, SeededNoise, make_plan
from lamina.allocate.ladp import LADP
from lamina.engine.batch import Draw
from lamina.engine.distributed import ALONE, Ranks
from lamina.engine.rules.proxy import Proxy
from lamina.plan.rules import FollowQuantile, Injection, NoiseKind
from lamina.plan.step_plan import StepPlan

SEED = 7


class Tied(nn.Module):
    """One matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batch_of(count: int, *, several: bool = False, classes: int = 1) -> Batch:
    unit = torch.arange(count).repeat_interleave(2) if several else torch.arange(count)
    cls = None if classes == 1 else torch.arange(count) % classes
    return Batch(torch.randn(len(unit), 5), unit=unit, cls=cls)


def case(name: str) -> tuple[nn.Module, StepPlan, Batch, dict[str, Any]]:
    """Model, plan, whole batch, and options of the step: the same in every process."""
    torch.manual_seed(3)
    kind, _, form = name.partition(" ")
    form, _, count = form.partition(" ")
    model = Tied() if kind == "tied" else dense()
    several, restricted = kind == "several", kind == "restricted"
    clip: Any = [[0.3, 0.4, 0.5], [0.0, 0.0, 0.6]] if restricted else 0.3
    if kind == "tied":
        clip = 0.4
    plan = plan_of(model, clip, 0.8, clipping=form or "box")
    if kind in ("discrete_gaussian", "skellam"):
        plan = dataclasses.replace(plan, noise_kind=NoiseKind(kind), accountant="rdp-integer")
    size = int(count) if count else 7
    options = {"parts": 3 if kind == "parts" else 1, "hardened": kind == "hardened"}
    return model, plan, batch_of(size, several=several, classes=2 if restricted else 1), options


CASES = [f"{kind} {form}" for kind in ("plain", "several", "tied", "restricted", "parts") for form in ("box", "joint")]
CASES += [
    "plain box 1",
    "plain joint 1",
    "plain box 0",
    "hardened box",
    "discrete_gaussian box",
    "skellam box",
    "bins box",
]


def noise_of(options: dict[str, Any], rank: int) -> SeededNoise:
    """Plain noise by name, so that it can be compared; hardened noise as it is by default."""
    return SeededNoise(SEED, rank=rank) if options["hardened"] else SeededNoise(SEED, rank=rank, hardened=False)


def step(name: str, rank: int, size: int) -> dict[str, Any]:
    """The gradient that one step writes, as lists."""
    model, plan, whole, options = case(name)
    if name.startswith("bins"):
        plan = dataclasses.replace(plan, injection=Injection(form="per_microbatch", parts=size))  # type: ignore[arg-type]
    with Engine(model, plan, noise=noise_of(options, rank)) as engine:
        for part in whole.shard(rank, size).split(options["parts"]):
            engine.backward(losses_of(model, part.x, None) if len(part) else None, part)
        return {each: p.grad.tolist() for each, p in model.named_parameters() if p.grad is not None}


SHARDED = ["plain box", "plain joint", "plain box 1", "plain joint 1", "tied box", "parts joint", "several box"]
SHARDED += ["restricted box", "plain box 0", "hardened box"]
FEW = ["plain box", "plain joint", "plain box 1", "plain joint 1", "several joint", "restricted box"]


def sharded_step(name: str, rank: int, size: int) -> dict[str, Any]:
    """As `step`, with the model under fully_shard: its parts first, then the rest of it."""
    from torch.distributed.fsdp import fully_shard

    model, plan, whole, options = case(name)
    if isinstance(model, nn.Sequential):
        fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    with Engine(model, plan, noise=noise_of(options, rank)) as engine:
        for part in whole.shard(rank, size).split(options["parts"]):
            engine.backward(losses_of(model, part.x, None) if len(part) else None, part)
        found = {each: p.grad.full_tensor().tolist() for each, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held < sum(p.numel() for p in model.parameters())  # between steps a rank has its part only
        optimizer.zero_grad()
        later = batch_of(3, classes=len(plan.classes)).shard(rank, size)
        engine.backward(losses_of(model, later.x, None) if len(later) else None, later)  # whole again
    return found


def compiled_steps(rank: int, size: int) -> float:
    """How far gradients of compiled steps are from those of the hook engine, where a rank may have too few examples for a graph."""
    import lamina.engine.execute.compiled

    lamina.engine.execute.compiled.BACKEND = "eager"
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(3)
        model = dense()
        found.append([])

        def losses(x: Tensor, y: Any, model: nn.Module = model) -> Tensor:
            return losses_of(model, x, y)

        with Engine(
            model, plan_of(model, 0.3, 0.8), noise=SeededNoise(SEED, rank=rank, hardened=False), compiled=compiled
        ) as engine:
            for count in (8, 8, 8, 8, 3, 8):  # of three, rank 1 of 2 has one
                engine.step(losses, batch_of(count).shard(rank, size))
                found[-1] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
            assert not compiled or (engine.compiled is not None and engine.compiled.steps > 0)
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def encoder() -> nn.Module:
    block = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Linear(5, 5), block, nn.Flatten(), nn.Linear(5, 3))


def compiled_by_inductor(rank: int, size: int) -> dict[str, Any]:
    """By model and form: how far gradients of compiled steps are from the oracle's clipped sums and the noise of all ranks."""
    found: dict[str, Any] = {}
    for kind, make in {"dense": dense, "encoder": encoder}.items():
        for form in ("box", "joint"):
            torch.manual_seed(3)
            model, twin, off, clipped = make(), make(), 0.0, 0
            plan = plan_of(model, 0.3, 0.8, clipping=form)
            layer_of = {each: i for i, layer in enumerate(plan.layers) for each in layer.parameters}

            def losses(x: Tensor, y: Any, model: nn.Module = model) -> Tensor:
                return losses_of(model, x, y)

            with Engine(
                model, plan, noise=SeededNoise(SEED, rank=rank, hardened=False), compiled=True
            ) as engine:  # fmt: skip
                for number, count in enumerate((8, 9, 12, 8, 3, 11, 1, 10)):
                    twin.load_state_dict(model.state_dict())
                    whole = batch_of(count)
                    engine.step(losses, whole.shard(rank, size))
                    ref = clip_by_hand(unit_grads(example_grads(twin, whole.x), whole), whole.cls.tolist(), plan)
                    clipped += sum(0 < factor < 1 for row in ref.factors for factor in row)
                    for other in range(size):
                        drawn = {name: torch.empty(t.shape, dtype=torch.float64) for name, t in ref.sums.items()}
                        stds = [plan.noise[layer_of[name]] / size**0.5 for name in drawn]
                        SeededNoise(SEED, rank=other, hardened=False).fill_many_(
                            list(drawn.values()), stds, step=number
                        )
                        for name, z in drawn.items():
                            ref.sums[name] = ref.sums[name] + z
                    for name, p in model.named_parameters():
                        off = max(off, float((p.grad * plan.batch - ref.sums[name]).abs().max()))
                        p.data.sub_(0.1 * p.grad)
                    model.zero_grad()
                assert engine.compiled is not None
                how = {"steps": engine.compiled.steps, "reason": engine.compiled.reason}
            found[f"{kind} {form}"] = {"off": off, "clipped": clipped, **how}
    return found


def variance(steps: int, rank: int, size: int) -> list[float]:
    """Mean square of what noise-only steps release, of each of three tensors."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    plan = dataclasses.replace(plan_of(model, 1.0, [0.5, 2.0, 8.0]), steps=steps, batch=1.0)
    total = [0.0, 0.0, 0.0]
    with Engine(model, plan, noise=SeededNoise(11, rank=rank)) as engine:
        for _ in range(steps):
            engine.backward(None, Batch(torch.zeros(0, 8)).shard(rank, size))
            for i, p in enumerate(model.parameters()):
                total[i] += float(p.grad.double().square().mean()) / steps
                p.grad = None
    return total


def refused(act: Any) -> str:
    try:
        act()
    except LaminaError as error:
        return error.code
    return ""


def refusals(rank: int, size: int) -> dict[str, str]:
    torch.manual_seed(3)
    model = dense()
    plan = plan_of(model, 0.3, 0.8)
    found = {}
    wrapped = nn.parallel.DistributedDataParallel(dense())
    found["wrapped"] = refused(lambda: Engine(wrapped, plan_of(wrapped), noise=SeededNoise(1, rank=rank)))
    with Engine(model, plan, noise=SeededNoise(1, rank=rank)) as engine:
        whole = batch_of(4)
        found["whole batch"] = refused(lambda: engine.backward(losses_of(model, whole.x, None), whole))
        other = whole.shard((rank + 1) % size, size)
        found["part of another rank"] = refused(lambda: engine.backward(losses_of(model, other.x, None), other))
        mine = whole.shard(rank, size)
        again = whole.shard(rank, size)
        engine.backward(losses_of(model, mine.x, None), mine)
        found["same draw again"] = refused(lambda: engine.backward(losses_of(model, again.x, None), again))
        model.zero_grad()
        apart = dataclasses.replace(mine, draw=Draw(ranks=size, rank=rank, step=rank))
        found["another sample"] = refused(lambda: engine.backward(losses_of(model, apart.x, None), apart))
        torch.manual_seed(rank)
        own = batch_of(4).shard(rank, size)
        found["a batch of one's own"] = refused(lambda: engine.backward(losses_of(model, own.x, None), own))
        torch.manual_seed(4)
        if rank == 0:
            Ranks.current().agree(1, failed=True)
        else:
            later = batch_of(4).shard(rank, size)
            found["another rank failed"] = refused(lambda: engine.backward(losses_of(model, later.x, None), later))
        if rank == 0:
            engine.continue_at(5, SeededNoise(2, rank=rank))
        last = batch_of(4).shard(rank, size)
        found["out of step"] = refused(lambda: engine.backward(losses_of(model, last.x, None), last))
    found["noise of rank 7"] = refused(lambda: Engine(dense(), plan, noise=SeededNoise(1, rank=7)))
    torch.manual_seed(rank)
    found["other weights"] = refused(lambda: Engine(dense(), plan, noise=SeededNoise(1, rank=rank)))
    torch.manual_seed(3)
    other = plan_of(model, 0.3, 0.8 + rank)
    found["other plan"] = refused(lambda: Engine(dense(), other, noise=SeededNoise(1, rank=rank)))
    found["other noise"] = refused(lambda: Engine(dense(), plan, noise=SeededNoise(1, rank=rank, hardened=rank == 1)))
    slots = dataclasses.replace(plan, injection=Injection(form="per_sample", parts=5))  # type: ignore[arg-type]
    found["slots"] = refused(lambda: Engine(dense(), slots))
    return found


def quantile(rank: int, size: int) -> list[float]:
    """Clip norms after a few steps that follow a quantile: the counts of all ranks move them, on every rank alike."""
    torch.manual_seed(3)
    model = dense()
    plan = plan_of(model, 0.3, 0.8)
    plan = dataclasses.replace(plan, rules=(FollowQuantile(target=0.5, rate=0.3, noise=4.0),))
    with Engine(model, plan, noise=SeededNoise(5, rank=rank)) as engine:
        for _ in range(4):
            mine = batch_of(9).shard(rank, size)
            engine.backward(losses_of(model, mine.x, None), mine)
            model.zero_grad()
        return [c for row in engine.applied.clip for c in row]


def proxied(rank: int, size: int) -> dict[str, Any]:
    """S of each step of a plan that follows a proxy, what one process makes of the same weights, and how far sums are off."""
    torch.manual_seed(3)
    model = dense()
    draw = torch.Generator().manual_seed(5)
    proxy = Proxy(
        source="simulated", x=torch.randn(20, 5, generator=draw), y=torch.randint(0, 3, (20,), generator=draw),
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
    )  # fmt: skip
    rule = LADP(estimator="fisher", every=2, examples=16)
    plan = make_plan(LayerStack.from_model(model), Policy.parse(PROXY_POLICY), batch=8, steps=10, allocate=rule)
    followed, alone, off = [], [], 0.0
    layer_of = {each: i for i, layer in enumerate(plan.layers) for each in layer.parameters}
    with Engine(model, plan, noise=SeededNoise(5, rank=rank, hardened=False), proxy=proxy) as engine:
        for number in range(4):
            whole = batch_of(7)
            twin = dense()
            twin.load_state_dict(model.state_dict())
            part = whole.shard(rank, size)
            engine.backward(losses_of(model, part.x, None), part)
            followed.append(list(engine.applied.noise))
            if number % 2 == 0:
                with Engine(twin, plan, noise=SeededNoise(1), proxy=proxy, ranks=ALONE) as single:
                    single.budget.set_taken(number)
                    single.follow_proxy()
                    alone.append(list(single.applied.noise))
            sums = clip_by_hand(
                unit_grads(example_grads(twin, whole.x), whole), whole.cls.tolist(), engine.applied
            ).sums
            for other in range(size):
                drawn = [torch.empty(t.shape, dtype=torch.float64) for t in sums.values()]
                stds = [engine.applied.noise[layer_of[name]] / size**0.5 for name in sums]
                SeededNoise(5, rank=other, hardened=False).fill_many_(drawn, stds, step=number)
                sums = {name: t + z for (name, t), z in zip(sums.items(), drawn, strict=True)}
            for name, p in model.named_parameters():
                off = max(off, float((p.grad * plan.batch - sums[name]).abs().max()))
                p.data.sub_(p.grad)
            model.zero_grad()
    return {"followed": followed, "alone": alone, "off": off}


PROXY_POLICY = '[corpus]\norigin = "a"\ndelta = 1e-5\n[class.data]\npopulation = 300\nepsilon = 2.0\n'


def main(rank: int, size: int) -> None:
    what = sys.argv[1]
    if what == "inductor":
        found: dict[str, Any] = compiled_by_inductor(rank, size)
    elif what == "variance":
        found = {"variance": variance(int(sys.argv[2]), rank, size)}
    else:
        names = FEW if what == "few" else CASES
        found = {name: step(name, rank, size) for name in names}
        found["sharded"] = {name: sharded_step(name, rank, size) for name in names if name in SHARDED}
    if what == "cases":
        found["refusals"] = refusals(rank, size)
        found["quantile"] = quantile(rank, size)
        found["proxied"] = proxied(rank, size)
        found["compiled"] = compiled_steps(rank, size)
    if what in ("cases", "every"):
        found["variance"] = variance(300, rank, size)
    ranks.answer(found)


if __name__ == "__main__":
    ranks.spread(main)
