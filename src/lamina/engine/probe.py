"""The independence probe: on proxy data, changing the others must leave one contribution alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina.engine.batch import Batch
from lamina.engine.examine import check_losses
from lamina.errors import CouplingError, EngineError

if TYPE_CHECKING:
    from lamina.engine.engine import Engine

_TOLERANCE = 1e-3


def probe(engine: Engine, losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any = None) -> None:
    """Forward passes and gradients for the first, a middle and the last example, as given and with the others
    replaced, in another order, all before it, all behind it, or fewer.

    Its loss and its gradient must not move by more than rounding. This catches what the graph cannot show: a loss
    divided by the tokens of the batch, padding to the longest, expert capacity, batch statistics. Give public or
    simulated data with at least four examples; dropout is switched off meanwhile.
    """
    whole = Batch(x, y)
    if len(whole) < 4:
        raise EngineError(
            "engine.probe-got-examples",
            f"the probe got {len(whole)} examples",
            "give at least 4, public or simulated",
        )
    n = len(whole)
    with _quiet(engine.model):
        for place in (0, n // 2, n - 1):
            reference = _alone(engine, losses_of, x, y, place)
            for what, (x2, y2), there in _others(x, y, n, place):
                _compare(reference, _alone(engine, losses_of, x2, y2, there), what)


def _others(x: Any, y: Any, n: int, place: int) -> Iterator[tuple[str, Any, int]]:
    """The batch with everybody but one example changed, and where that example then is."""
    rest = torch.cat([torch.arange(place), torch.arange(place + 1, n)])
    turned = rest.roll(1)
    mine = torch.tensor([place])
    changed = pytree.tree_map(lambda t: _perturb(t, place) if isinstance(t, Tensor) else t, (x, y))
    yield "replaced", changed, place
    yield "put in another order", _take((x, y), torch.cat([turned[:place], mine, turned[place:]])), place
    yield "moved before it", _take((x, y), torch.cat([rest, mine])), n - 1
    yield "moved behind it", _take((x, y), torch.cat([mine, rest])), 0
    yield "fewer", _take((x, y), torch.cat([rest[: n // 2 - 1], mine])), n // 2 - 1


def _alone(
    engine: Engine, losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any, place: int
) -> dict[str, Tensor]:
    with torch.enable_grad():
        losses = losses_of(x, y)
    batch = Batch(x, y)
    check_losses(losses, batch.examples)
    batch = Batch(x, y, cls=torch.zeros(len(batch), dtype=torch.long))
    return {"loss": losses.detach()[place].double(), **engine.gradient_of(losses, batch, place, routed=False)}


def _compare(reference: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    for name, a in reference.items():
        b = other[name]
        scale = float(a.double().norm()) + 1e-6
        moved = float((a.double() - b.double()).norm()) / scale
        if not moved <= _TOLERANCE:
            thing = "loss" if name == "loss" else f"gradient of {name!r}"
            raise CouplingError(
                "engine.examples-moved-size",
                f"when the other examples were {what}, the {thing} of one moved by {moved:.2g} of its size",
                "examples must not influence each other: no batch statistics, no loss over or divided by the batch, "
                "no padding to the longest without a mask",
            )


def _perturb(t: Tensor, place: int) -> Tensor:
    """One example as it is, the others replaced by values of the same kind."""
    other = t.flip(0).roll(1, 0)
    if t.is_floating_point():
        other = other * 1.7 + 0.3
    other[place] = t[place]
    return other


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
