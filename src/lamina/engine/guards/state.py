"""`StateGuard`: what the model holds was written by the optimiser, or before the engine was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina.engine.distributed import is_sharded
from lamina.engine.guards.guard import Guard, tensors_of_optimizer
from lamina.errors import CouplingError

_EVERY_CALL_UNTIL, _THEN_EVERY = 24, 64


class StateGuard(Guard):
    """Refuses a step once the model holds what the optimiser did not write: it was never noised.

    Buffers and frozen parameters must stay as they are, of every type, whoever writes them. Between two looks a write
    shows by identity and version; a write through `.data` shows by value only, and values are compared at some steps
    and before the weights are handed out. A buffer that was written is put back; of a frozen parameter, which may be
    large, only a checksum is kept.

    Trained parameters must stay the same tensors, and keep their values from the beginning of a forward pass to the
    step: checksums show it, at the first calls and at every 64th. Between steps they may be written, as an optimiser
    of one's own does.

    Of a model that is divided over ranks this is about the part that a rank holds (`held`): what is gathered for a step
    is dropped after it.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, Tensor], held: Mapping[str, Any] | None = None) -> None:
        self.model, self.trained = model, trained
        self._held = {name: p for name, p in (held or {}).items() if is_sharded(p)}
        self._trained_ids = {id(p) for p in trained.values()}
        self.refused = False
        self._calls, self.pending = 0, dict[str, int]()  # checksums of a forward pass whose step is pending
        self.accept()

    def accept(self) -> None:
        """Compare with buffers and frozen parameters as they are now."""
        self._seen = {name: (b, b._version, b.detach().clone()) for name, b in self.model.named_buffers()}
        frozen = ((name, self._kept(name, p)) for name, p in self.model.named_parameters() if name not in self.trained)
        self._frozen = {name: (p, p._version, checksum(p)) for name, p in frozen}
        self._found = self._fingerprint()

    def _fingerprint(self) -> list[tuple[int, int]]:
        """Which buffers and frozen parameters the model has, and how often each was written. (`accept` keeps them alive.)"""
        trained, found = self._trained_ids, []
        seen: set[nn.Module] = set()
        left: list[nn.Module | None] = [self.model]
        for module in left:  # grows as it goes
            if module is None or module in seen:
                continue
            seen.add(module)
            for t in (*module._buffers.values(), *module._parameters.values()):
                if t is not None and id(t) not in trained:
                    found.append((id(t), t._version))
            left += module._modules.values()
        return found

    def check(self) -> None:
        """Refuse writes that show by identity and version."""
        if self._found != self._fingerprint():
            self._compare(values=False)
            self._found = self._fingerprint()

    def look_closely(self) -> None:
        """Refuse writes that show by value only."""
        self._compare(values=True)
        self._found = self._fingerprint()

    def _compare(self, *, values: bool) -> None:
        live = dict(self.model.named_buffers())
        for name in dict.fromkeys((*self._seen, *live)):
            now, (before, version, value) = live.get(name), self._seen.get(name, (None, 0, None))
            if now is not None and now is before and now._version == version and not values:
                continue
            if now is not None and value is not None and _same_values(now, value):
                self._seen[name] = (now, now._version, value)
                continue
            if before is not None and value is not None:
                self._put_back(name, before, value)
            raise CouplingError("engine.buffer-written", *self._written("buffer", name))
        parameters = dict(self.model.named_parameters()) if self._frozen else {}
        for name, (p, version, total) in self._frozen.items():
            held = self._kept(name, parameters.get(name, p))
            if held is p and p._version == version and not values:
                continue
            if checksum(held) != total:
                raise CouplingError("engine.frozen-written", *self._written("frozen parameter", name))
            self._frozen[name] = (held, held._version, total)

    def _kept(self, name: str, p: Tensor) -> Tensor:
        """What this process keeps of a parameter between steps."""
        kept: Tensor = self._held.get(name, p)
        return kept

    def at_end(self) -> None:
        """Refuse writes that no step refused."""
        said = self.refused
        try:
            self.look_closely()
        except CouplingError:
            if not said:
                raise

    def begin_call(self) -> None:
        """A forward pass begins."""
        self._calls += 1
        due = self._calls <= _EVERY_CALL_UNTIL or self._calls % _THEN_EVERY == 0
        self.pending = {name: checksum(self._kept(name, p)) for name, p in self.trained.items()} if due else {}

    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimiser writes the parameters now: forget their checksums."""
        if self.pending and (
            tensors_of_optimizer(optimizer, self.trained) or tensors_of_optimizer(optimizer, self._held)
        ):
            self.pending = {}

    def end_call(self) -> None:
        self.check_trained(again=True)

    def check_trained(self, *, again: bool = False) -> None:
        """Refuse trained parameters that were replaced, or moved since the last forward pass began.

        `again`: this will be asked again, before the step.
        """
        for name, p in self.model.named_parameters() if self.pending and not again else ():
            if p is not self.trained.get(name) and p is not self._held.get(name) and name not in self._frozen:
                problem = f"parameter '{name}' was replaced or added, and what it holds was never noised"
                remedy = "write to it by the optimiser, or make stack, plan and engine anew"
                raise CouplingError("engine.parameter-replaced", problem, remedy)
        sums, self.pending = self.pending, self.pending if again else {}
        for name, value in sums.items():
            if checksum(self._kept(name, self.trained[name])) != value:
                problem = (
                    f"'{name}' was written between forward pass and step: it would carry private data without noise"
                )
                raise CouplingError("engine.parameter-written", problem, "train it by the optimiser alone")

    def _written(self, kind: str, name: str) -> tuple[str, str]:
        """Problem and remedy."""
        self.refused = True
        problem = f"{kind} '{name}' was written since the last step: it would carry private data without noise"
        remedy = (
            "train it by the optimiser, or compute it from public data before the engine is made; if public data "
            "alone wrote it, call engine.accept_buffers() before the next forward pass"
        )
        return problem, remedy

    def _put_back(self, name: str, before: Tensor, value: Tensor) -> None:
        path, _, local = name.rpartition(".")
        with torch.no_grad():
            before.copy_(value)
        self.model.get_submodule(path)._buffers[local] = before
        self._seen[name] = (before, before._version, value)


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(t: Tensor) -> int:
    """The sum of the bits of all values, modulo their width: what overwrites a tensor moves it."""
    bits, t = BITS[t.element_size()], t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]
    return int(t.detach().view(bits).sum(dtype=bits))


def _same_values(now: Tensor, then: Tensor) -> bool:
    if now.shape != then.shape:
        return False
    then = then.to(now.dtype)
    return bool(((now == then) | ((now != now) & (then != then))).all())
