"""Hooks that do not travel: a copy or pickle of an attached model is not attached."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from lamina.errors import CouplingError, UnclippedGradient
from lamina.plan.hazards import hazards, running_buffers


class BeforeForward:
    """A forward pre-hook. In a copy of the module it becomes a hook that takes itself away."""

    def __init__(self, call: Callable[[nn.Module, Any, Any], None] | None = None) -> None:
        self.call = call

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.call is not None:
            self.call(module, args, kwargs)
            return
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is self]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> BeforeForward:
        return BeforeForward()

    def __reduce__(self) -> Any:
        return BeforeForward, ()


class AfterForward:
    """A forward hook of the whole model. In a copy it takes itself away, too."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self.call = call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.call is not None:
            self.call()
            return
        for key in [key for key, hook in module._forward_hooks.items() if hook is self]:
            del module._forward_hooks[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> AfterForward:
        return AfterForward()

    def __reduce__(self) -> Any:
        return AfterForward, ()


def plain_forward(module: nn.Module) -> Any:
    """The forward that a module has by its class."""
    return MethodType(type(module).forward, module)


def is_plain(module: nn.Module) -> bool:
    """Whether a module's forward is its class's, perhaps bound once more by a copy."""
    own = vars(module).get("forward")
    return own is None or (isinstance(own, MethodType) and own.__func__ is type(module).forward)


def guards(model: nn.Module) -> list[nn.Module]:
    """The modules that could move buffers with private data if somebody put them in training mode."""
    return [m for m in model.modules() if running_buffers(m)]


def guard(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse a forward pass that would mix contributions or move buffers with them."""
    for hazard in hazards(module):
        raise CouplingError(
            "engine.called-attached-model",
            f"{hazard.kind} {hazard.state}, which {hazard.what.value}, was called in an attached model",
            hazard.remedy,
        )


def refuse_gradient(name: str) -> Callable[[Tensor | None], None]:
    """A tensor hook: autograd itself must never bring a covered tensor a gradient."""

    def hook(grad: Tensor | None) -> None:
        if grad is not None:
            raise UnclippedGradient(
                "engine.gradient-reached-not",
                f"a gradient reached '{name}' that was not clipped",
                "use engine.backward(losses, batch) for every gradient of a covered tensor, or engine.detach() first",
            )

    return hook
