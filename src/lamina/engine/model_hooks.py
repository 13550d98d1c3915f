"""What the engine puts on a model and takes off again.

Hooks that a copy does not keep, PEFT prompts per example.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from lamina.errors import CouplingError, UnclippedGradient, UnsupportedLayer
from lamina.plan.coverage import find_hazards, running_buffers


class CopySafePreHook:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> CopySafePreHook:
        return CopySafePreHook()

    def __reduce__(self) -> Any:
        return CopySafePreHook, ()


class CopySafePostHook:
    """A forward hook of the whole model. In a copy it takes itself away, too."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self.call = call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.call is not None:
            self.call()
            return
        for key in [key for key, hook in module._forward_hooks.items() if hook is self]:
            del module._forward_hooks[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> CopySafePostHook:
        return CopySafePostHook()

    def __reduce__(self) -> Any:
        return CopySafePostHook, ()


def class_forward(module: nn.Module) -> Any:
    """The forward that a module has by its class."""
    return MethodType(type(module).forward, module)


def has_class_forward(module: nn.Module) -> bool:
    """Whether a module's forward is its class's, perhaps bound once more by a copy."""
    own = vars(module).get("forward")
    return own is None or (isinstance(own, MethodType) and own.__func__ is type(module).forward)


def modules_with_running_buffers(model: nn.Module) -> list[nn.Module]:
    """The modules that could move buffers with private data if somebody put them in training mode."""
    return [m for m in model.modules() if running_buffers(m)]


def refuse_hazards(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse a forward pass that would mix contributions or move buffers with them."""
    for hazard in find_hazards(module):
        raise CouplingError(
            "engine.hazard-called",
            f"{hazard.kind} {hazard.state}, which {hazard.what.value}, was called in an attached model",
            hazard.remedy,
        )


def gradient_refusing_hook(name: str) -> Callable[[Tensor | None], None]:
    """A tensor hook: autograd itself must never bring a covered tensor a gradient."""

    def hook(grad: Tensor | None) -> None:
        if grad is not None:
            raise UnclippedGradient(
                "engine.gradient-not-clipped",
                f"a gradient reached '{name}' that was not clipped",
                "use engine.backward(losses, batch) for every gradient of a covered tensor, or engine.detach() first",
            )

    return hook


_SHARED_PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING")  # looked up once, and repeated for the batch


class PromptPerExample:
    """Stands in for `get_prompt` of a model that repeats one prompt for the batch.

    While the engine is attached, the table of virtual tokens is looked up for every example, so that its gradient
    arrives unsummed; there is nothing left to repeat. A copy or pickle of the model gets the original.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.original = model, model.get_prompt

    @staticmethod
    def applies_to(module: Any) -> bool:
        return callable(getattr(module, "get_prompt", None)) and hasattr(module, "prompt_encoder")

    def __call__(self, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        kind = getattr(self.model.active_peft_config, "peft_type", None)
        if getattr(kind, "value", kind) not in _SHARED_PROMPT_TYPES:
            return self.original(batch_size, *args, **kwargs)
        prompts: Tensor = self.original(1, *args, **kwargs)
        return prompts if len(prompts) == batch_size else prompts.repeat(batch_size, 1, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _class_get_prompt(memo.get(id(self.model), self.model))

    def __reduce__(self) -> Any:
        return _class_get_prompt, (self.model,)


def _class_get_prompt(model: Any) -> Callable[..., Any]:
    return MethodType(type(model).get_prompt, model)


def mergeable_adapters(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers that can have an adapter merged into their base weight."""
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "merged_adapters")]


def refuse_merged_adapters(adapters: list[tuple[str, Any]]) -> None:
    """A merged adapter is not used by the forward pass: it would train on noise alone, its base on nothing."""
    for name, module in adapters:
        if module.merged_adapters:
            raise UnsupportedLayer(
                "engine.adapter-merged",
                f"adapter {module.merged_adapters[0]!r} is merged into the weight of '{name}': its own tensors take "
                "no part in the forward pass",
                "call model.unmerge_adapter() before training",
            )


def uses_parameter_containers(module: nn.Module) -> bool:
    """Whether a module uses trainable tensors that a ParameterDict or ParameterList below it keeps (IA3, …)."""
    kept = (child for child in module.children() if isinstance(child, nn.ParameterDict | nn.ParameterList))
    return any(p.requires_grad for child in kept for p in child.parameters())
