"""The independence probe: on proxy data, changing the others must leave one contribution alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina.engine.batch import Batch
from lamina.errors import CouplingError, EngineError

if TYPE_CHECKING:
    from lamina.engine.engine import Engine

_TOLERANCE = 1e-3


def probe(engine: Engine, losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any = None) -> None:
    """Three forward passes and their gradients for example 0: as given, with the others replaced, without half of them.

    Its loss and its gradient must not move by more than rounding. This catches what the graph cannot show:
    a loss divided by the tokens of the batch, padding to the longest, expert capacity, batch statistics.
    Give public or simulated data with at least four examples; dropout is switched off meanwhile.
    """
    whole = Batch(x, y)
    if len(whole) < 4:
        raise EngineError(f"the probe got {len(whole)} examples", "give at least 4, public or simulated")
    n = len(whole)
    keep = torch.tensor([0])
    mixed = torch.cat([keep, torch.arange(1, n).roll(1)])
    fewer = torch.arange(n // 2)
    changed = pytree.tree_map(lambda t: _perturb(t) if isinstance(t, Tensor) else t, (x, y))
    with _quiet(engine.model):
        reference = _alone(engine, losses_of, x, y)
        for what, (x2, y2) in {
            "replaced": changed,
            "put in another order": _take((x, y), mixed),
            "fewer": _take((x, y), fewer),
        }.items():
            _compare(reference, _alone(engine, losses_of, x2, y2), what)


def _alone(engine: Engine, losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any) -> dict[str, Tensor]:
    with torch.enable_grad():
        losses = losses_of(x, y)
    return {"loss": losses.detach()[:1].double(), **engine.gradient_of(losses, Batch(x, y), 0)}


def _compare(reference: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    for name, a in reference.items():
        b = other[name]
        scale = float(a.double().norm()) + 1e-6
        moved = float((a.double() - b.double()).norm()) / scale
        if not moved <= _TOLERANCE:
            thing = "loss" if name == "loss" else f"gradient of {name!r}"
            raise CouplingError(
                f"when the other examples were {what}, the {thing} of the first moved by {moved:.2g} of its size",
                "examples must not influence each other: no batch statistics, no loss over or divided by the batch, "
                "no padding to the longest without a mask",
            )


def _perturb(t: Tensor) -> Tensor:
    """The first example as it is, the others replaced by values of the same kind."""
    rest = t[1:].flip(0)
    if t.is_floating_point():
        rest = rest * 1.7 + 0.3
    return torch.cat([t[:1], rest])


def _take(tree: Any, rows: Tensor) -> Any:
    return pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, tree)


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Dropout off, everything else as in training."""
    dropouts = [m for m in model.modules() if "Dropout" in type(m).__name__]
    modes = [m.training for m in dropouts]
    state = torch.get_rng_state()
    try:
        for m in dropouts:
            m.training = False
        yield
    finally:
        torch.set_rng_state(state)
        for m, mode in zip(dropouts, modes, strict=True):
            m.training = mode
