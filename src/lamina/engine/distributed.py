"""Several processes, one step: what each rank takes of a batch, and how sums and noise of all ranks are added up.

    batch      every rank draws the same sample, and takes the contributions rank, rank + size, … of it, each of them whole
    noise      every rank adds N(0, S²/size) from a stream of its own: together N(0, S²)
    sum        clipped sums, which hold that noise already, are added up over all ranks; each then has the same gradient

Formal guarantee. What the ranks have after `add_up` has the law of one process's step (docs/distributed.md): the clipped
sum over the whole sample, plus noise of the planned variance. A rank that reveals its own share of the noise takes that
share away: what is left is N(0, S²·(1 - 1/size)). So all ranks belong to whoever is trusted with the data.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: its defaults would keep the group, and the threads of it, to the end
from torch import Tensor, nn

from lamina.errors import EngineError, RankLost, StepsAbandoned
from lamina.plan.rules import Choose, InjectionForm
from lamina.plan.step_plan import Clipping, StepPlan

_ADDED_ALONE = 1 << 18  # elements: a larger tensor is added up where it lies, smaller ones together in one message
_MAX_BYTES = 1 << 31


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The processes of torch.distributed's default group, as one of them sees it. A process by itself is rank 0 of 1.

    `device` is where messages have to lie for the group's backend.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @classmethod
    def current(cls) -> Ranks:
        """Those of the default group if there is one, else this process alone."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return ALONE
        on_gpu = "nccl" in dist.get_backend()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else _CPU
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes checkpoints and ledger."""
        return self.rank == 0

    @property
    def noise_share(self) -> float:
        """What the standard deviation of a rank's own noise is multiplied by: shares of S²/size add up to S²."""
        return 1.0 / math.sqrt(self.size)

    def agree(
        self, step: int, *, drawn: int = -1, failed: bool = False, abandoned: bool = False, place: int = 0,
        asked: Sequence[int] = (0, 0, 0, 0), may_gather: bool = False,
    ) -> list[int]:  # fmt: skip
        """Wait for all ranks before their sums are added up; refused on all of them if one failed or is at another step.

        `drawn`: the number of the sample; of two samples, a contribution could count on two ranks. A rank that cannot take the
        step, or gives it up, says so here, and is then not refused itself. Returns the largest of each number that is `asked`.
        If a rank asks for the whole model (the first of them), the others may be at another `place` in the step.
        """
        if self.alone:
            return list(asked)
        numbers = [failed, abandoned, step, -step, drawn, -drawn, place, -place, *asked]
        told = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        with rank_lost():
            dist.all_reduce(told, dist.ReduceOp.MAX)
        any_failed, any_abandoned, most, least, newest, oldest, last, first, *answered = told.tolist()
        if failed or (abandoned and not any_failed):
            return answered
        if any_abandoned and not any_failed:
            problem = f"rank 0 gives up the steps from {step} on"
            raise StepsAbandoned("engine.steps-abandoned", problem, "take them again")
        if any_failed:
            problem = f"another rank could not take step {step}, so rank {self.rank} does not take it either"
            raise EngineError("engine.rank-failed", problem, "its own message says why")
        elsewhere = (newest != -oldest or last != -first) and not (may_gather and answered[0])
        if most != -least or elsewhere:
            problem = f"rank {self.rank} is at step {step} with sample {drawn}, other ranks at steps {-least} to {most}"
            problem += f" with samples {-oldest} to {newest}"
            problem += f", at places {-first} to {last} in it" if last != -first else ""
            remedy = (
                "call engine.backward as often on every rank, with losses=None where its part of the batch is empty"
            )
            raise EngineError("engine.ranks-out-of-step", problem, remedy)
        return answered

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """tensors[i] <- its sum over all ranks, in place. Every rank gives tensors of the same shapes and dtypes."""
        if self.alone:
            return
        small: dict[torch.dtype, list[Tensor]] = {}
        for each in tensors:
            if each.numel() >= _ADDED_ALONE:
                with rank_lost():
                    dist.all_reduce(each)
            else:
                small.setdefault(each.dtype, []).append(each)
        for group in small.values():
            flat = torch.cat([each.reshape(-1) for each in group])
            with rank_lost():
                dist.all_reduce(flat)
            for each, total in zip(group, flat.split([each.numel() for each in group]), strict=True):
                each.copy_(total.view_as(each))

    def add_up_parts(self, rows: Tensor) -> Tensor:
        """Row `rank` of the sum of `rows` (size, n) over all ranks: each rank gets its own."""
        mine = rows.new_empty(rows.shape[1])
        with rank_lost():
            dist.reduce_scatter_single(mine, rows.view(-1))
        return mine

    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes that rank 0 gives, on every rank."""
        if self.alone:
            assert data is not None
            return data
        size = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        with rank_lost():
            dist.broadcast(size, 0)
        length = int(size)
        assert 0 <= length < _MAX_BYTES
        body = torch.empty(length, dtype=torch.uint8, device=self.device)
        if self.first and data:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if length:
            with rank_lost():
                dist.broadcast(body, 0)
        return body.to("cpu").numpy().tobytes()

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """What is inside runs on rank 0 first, and on the others once that went well: one refusal is enough."""
        if not self.first:
            self.broadcast(None)
        yield
        if self.first:
            self.broadcast(b"done")

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """tensor <- rank 0's, in place."""
        if not self.alone:
            with rank_lost():
                dist.broadcast(tensor, 0)

    def every(self, row: Tensor) -> list[Tensor]:
        """The tensors that the ranks give, by rank."""
        found = [torch.empty_like(row) for _ in range(self.size)]
        with rank_lost():
            dist.all_gather(found, row)
        return found

    def check_same(self, **facts: bytes) -> None:
        """Refuse, on every rank, facts in which some rank differs from rank 0."""
        if self.alone:
            return
        mine = b"".join(hashlib.sha256(fact).digest() for fact in facts.values())
        every = self.every(torch.tensor(list(mine), dtype=torch.uint8, device=self.device))
        differs: dict[str, int] = {}
        for rank, other in enumerate(every):
            for i, name in enumerate(facts):
                place = slice(32 * i, 32 * (i + 1))
                if not torch.equal(other[place], every[0][place]):
                    differs.setdefault(name, rank)
        if differs:
            found = "; ".join(f"{name.replace('_', ' ')} of rank {rank}" for name, rank in differs.items())
            problem = f"the ranks disagree, so nothing is begun: {found} differs from that of rank 0"
            remedy = "give every rank the same code, plan, data, options and number of threads"
            raise EngineError("engine.ranks-differ", problem, remedy)

    def share_weights(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        if self.alone:
            return
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if not is_sharded(tensor):  # a part of a sharded model is on one rank only
                    self.broadcast_tensor(tensor.data)


ALONE = Ranks()
_WAIT = timedelta(hours=6)  # for rank 0, which evaluates while the others wait; a rank that ends is noticed at once


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Inside, the ranks that `torchrun` started are a group; a process that it did not start is alone."""
    if dist.is_initialized() or "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        yield Ranks.current()
        return
    with rank_lost():
        dist.init_process_group("gloo", timeout=_WAIT)  # the models of run files are on the CPU
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()


@contextmanager
def rank_lost() -> Iterator[None]:
    """A message that does not come through means that a process of the group is gone."""
    try:
        yield
    except RuntimeError as error:
        problem = f"another rank stopped, or cannot be reached: {str(error).splitlines()[0]}"
        remedy = "start all ranks again: what a run had begun is replayed, and charged once"
        raise RankLost("engine.rank-lost", problem, remedy) from None


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is divided over the ranks (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def is_sharded_module(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module."""
    return hasattr(module, "set_reshard_after_backward")


def is_sharded_model(model: nn.Module) -> bool:
    """Whether parts of a model are under `fully_shard`."""
    return any(map(is_sharded_module, model.modules()))


def whole_tensor(tensor: Any) -> Any:
    """A divided tensor as a whole: every rank asks for it. Anything else as it is."""
    with rank_lost():
        return tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_like(whole: Tensor, held: Any) -> Tensor:
    """This rank's part of a whole tensor, divided as `held` is."""
    if not is_sharded(held):
        return whole
    dim, mesh = held.placements[0].dim, held.device_mesh
    chunks, rank = whole.chunk(mesh.size(), dim), mesh.get_local_rank()
    return as_shard((chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)).clone(), held)


def as_shard(mine: Tensor, held: Any) -> Tensor:
    """This rank's part as the part of a tensor that is divided as `held` is."""
    from torch.distributed.tensor import DTensor

    options: dict[str, Any] = {"run_check": False, "shape": held.shape, "stride": held.stride()}
    made: Tensor = DTensor.from_local(mine, held.device_mesh, held.placements, **options)
    return made


def weights_digest(model: nn.Module) -> bytes:
    """SHA-256 of every parameter and buffer, by name."""
    total = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = tensor.detach().to("cpu", copy=True).contiguous()  # memory that numpy saw could not be freed any more
        total.update(f"{name}:{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return total.digest()


def refuse_unsharded(plan: StepPlan, ranks: Ranks) -> None:
    """Refuse plans whose steps several processes cannot take together."""
    if ranks.alone:
        return
    bins = plan.injection.form is InjectionForm.MICROBATCH and plan.injection.parts == ranks.size
    unfit = {
        "clips element by element": plan.clipping is Clipping.ELEMENTWISE,
        "makes choices on draws of their own": plan.rule(Choose) is not None,
        "correlates its noise over steps, and a checkpoint holds the past noise of rank 0 alone": plan.bands > 1,
        f"injects its noise in {plan.injection.parts} parts": plan.injection.form is not InjectionForm.STEP
        and not bins,
    }
    for why, holds in unfit.items():
        if holds:
            problem = f"the plan {why}, and {ranks.size} ranks would take its steps together"
            remedy = "train it in one process, or plan without that: each rank then adds its share of the noise"
            raise EngineError("engine.plan-not-for-ranks", problem, remedy)
