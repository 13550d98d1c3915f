"""Small models in one expression, and steps that must be refused before anything is spent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import losses_of, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine, StepPlan
from lamina.engine import native
from lamina.engine.execute.grads import ContributionGrads


class Net(nn.Module):
    """A module with these children, parameters and attributes, whose forward is `call(module, *inputs)`."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def refused(model: nn.Module, x: Any, *codes: str, losses: Callable[[Any], Any] | None = None, **options: Any) -> None:
    """A step on x, of these losses, is refused: nothing is charged, no gradient, weight or buffer is written.

    `options` are the engine's.
    """
    before = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    with Engine(model, plan_of(model), **options) as engine:
        for method in (engine.backward, engine.clipped_sums):
            with raises_code(*codes):
                method(losses_of(model, x, None) if losses is None else losses(model), Batch(x))
        assert engine.budget.taken == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *model.buffers()), strict=True))


def sums_of(model: nn.Module, plan: StepPlan, x: Any, **batch: Any) -> dict[str, Tensor]:
    """The clipped sums of a batch, by an engine of its own."""
    with Engine(model, plan) as engine:
        return engine.clipped_sums(losses_of(model, x, None), Batch(x, **batch))


def tensors_close(found: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-7) -> None:
    assert set(found) == set(want)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol)


@contextmanager
def formed_in_chunks(kind: type[ContributionGrads], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, gradients of this kind are formed by torch, some contributions at a time, in several parts."""
    starts, formed = [0], kind.dense

    def dense(grads: Any, low: int, high: int) -> Tensor:
        starts.append(low)
        return formed(grads, low, high)

    monkeypatch.setattr(kind, "dense", dense)
    with native.switched(False):
        yield
    assert max(starts) > 0, "everything was formed in one chunk"
