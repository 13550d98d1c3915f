"""What the engine puts on a model and takes off again: hooks that a copy does not keep, PEFT prompts per example."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from lamina.errors import CouplingError, UnclippedGradient, UnsupportedLayer
from lamina.plan.coverage import find_hazards


class CopySafeHook:
    """A forward hook or pre-hook with keyword arguments. In a copy of the module it removes itself when called."""

    def __init__(self, call: Callable[[nn.Module, Any, Any], None] | None = None) -> None:
        self.call = call

    def __call__(self, module: nn.Module, args: Any, more: Any) -> None:
        if self.call is not None:
            self.call(module, args, more)
            return
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopySafeHook:
        return CopySafeHook()

    def __reduce__(self) -> Any:
        return CopySafeHook, ()


def class_method(module: nn.Module, name: str) -> Any:
    """The method that a module has by its class."""
    return MethodType(getattr(type(module), name), module)


def has_class_forward(module: nn.Module) -> bool:
    """Whether a module's forward is its class's, perhaps bound once more by a copy."""
    own = vars(module).get("forward")
    return own is None or (isinstance(own, MethodType) and own.__func__ is type(module).forward)


def refuse_hazards(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse a forward pass that would mix contributions or move buffers with them."""
    for hazard in find_hazards(module):
        problem = f"{hazard.kind} {hazard.state}, which {hazard.what.value}, was called in an attached model"
        raise CouplingError("engine.hazard-called", problem, hazard.remedy)


def gradient_refusing_hook(name: str) -> Callable[[Tensor | None], None]:
    """A tensor hook: autograd itself must never give a covered tensor a gradient."""

    def hook(grad: Tensor | None) -> None:
        if grad is not None:
            problem = f"'{name}' got a gradient that was not clipped"
            remedy = "call engine.backward(losses, batch) instead of loss.backward(), or engine.detach() first"
            raise UnclippedGradient("engine.gradient-not-clipped", problem, remedy)

    return hook


_SHARED_PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING")  # looked up once, and repeated for the batch


class PromptPerExample:
    """Replaces `get_prompt` of a model that repeats one prompt for the batch.

    While the engine is attached, the table of virtual tokens is looked up for every example, so that its gradient
    arrives unsummed. A copy or pickle of the model gets the original.
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
        return class_method(memo.get(id(self.model), self.model), "get_prompt")

    def __reduce__(self) -> Any:
        return class_method, (self.model, "get_prompt")


def mergeable_adapters(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers that can have an adapter merged into their base weight."""
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "merged_adapters")]


def refuse_merged_adapters(adapters: list[tuple[str, Any]]) -> None:
    """A merged adapter is not used by the forward pass: it would train on noise alone, its base on nothing."""
    for name, module in adapters:
        if module.merged_adapters:
            problem = f"adapter {module.merged_adapters[0]!r} is merged into '{name}': its own tensors are not used"
            raise UnsupportedLayer("engine.adapter-merged", problem, "call model.unmerge_adapter() before training")


def uses_parameter_containers(module: nn.Module) -> bool:
    """Whether a module uses trainable tensors that a ParameterDict or ParameterList below it keeps (IA3, …)."""
    kept = (child for child in module.children() if isinstance(child, nn.ParameterDict | nn.ParameterList))
    return any(p.requires_grad for child in kept for p in child.parameters())
