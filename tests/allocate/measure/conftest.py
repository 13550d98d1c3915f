"""Small models and a check that measuring leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn


@contextmanager
def _no_trace(model: nn.Module) -> Iterator[None]:
    """Fails if weights, buffers, gradients, modes, hooks or the global random state are not as before."""

    def state() -> tuple[object, ...]:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        tensors = {name: (id(t), t.detach().clone()) for name, t in model.named_parameters()}
        buffers = {name: (id(t), t.clone()) for name, t in model.named_buffers()}
        grads = {name: (t.requires_grad, t.grad is None) for name, t in model.named_parameters()}
        return [m.training for m in model.modules()], hooks, grads, tensors, buffers, torch.get_rng_state()

    before = state()
    yield
    after = state()
    assert before[:3] == after[:3]
    for kind in (3, 4):
        assert before[kind].keys() == after[kind].keys()  # type: ignore[attr-defined]
        for name, (place, value) in before[kind].items():  # type: ignore[attr-defined]
            assert after[kind][name][0] == place  # type: ignore[index]
            assert torch.equal(after[kind][name][1], value), name  # type: ignore[index]
    assert torch.equal(before[5], after[5])  # type: ignore[arg-type]


@pytest.fixture
def no_trace() -> Callable[[nn.Module], object]:
    return _no_trace
