"""What adapters of PEFT need of the engine: prompts given to every example, no adapter merged into its base."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from lamina.errors import UnsupportedLayer

_ONE_PROMPT = ("PROMPT_TUNING", "P_TUNING")  # looked up once, and repeated for the batch


class EveryPrompt:
    """Stands in for `get_prompt` of a model that repeats one prompt for the batch.

    While the engine is attached, the table of virtual tokens is looked up for every example, so that its gradient
    arrives unsummed; there is nothing left to repeat. A copy or pickle of the model gets the original.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.original = model, model.get_prompt

    @staticmethod
    def suits(module: Any) -> bool:
        return callable(getattr(module, "get_prompt", None)) and hasattr(module, "prompt_encoder")

    def __call__(self, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        kind = getattr(self.model.active_peft_config, "peft_type", None)
        if getattr(kind, "value", kind) not in _ONE_PROMPT:
            return self.original(batch_size, *args, **kwargs)
        prompts: Tensor = self.original(1, *args, **kwargs)
        return prompts if len(prompts) == batch_size else prompts.repeat(batch_size, 1, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain(memo.get(id(self.model), self.model))

    def __reduce__(self) -> Any:
        return _plain, (self.model,)


def _plain(model: Any) -> Callable[..., Any]:
    return MethodType(type(model).get_prompt, model)


def adapters_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers that can have an adapter merged into their base weight."""
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "merged_adapters")]


def refuse_merged(adapters: list[tuple[str, Any]]) -> None:
    """A merged adapter is not used by the forward pass: it would train on noise alone, its base on nothing."""
    for name, module in adapters:
        if module.merged_adapters:
            raise UnsupportedLayer(
                "engine.adapter-merged-weight",
                f"adapter {module.merged_adapters[0]!r} is merged into the weight of '{name}': its own tensors take "
                "no part in the forward pass",
                "call model.unmerge_adapter() before training",
            )


def holds_loose(module: nn.Module) -> bool:
    """Whether a module uses trainable tensors that a ParameterDict or ParameterList below it keeps (IA3, …)."""
    kept = (child for child in module.children() if isinstance(child, nn.ParameterDict | nn.ParameterList))
    return any(p.requires_grad for child in kept for p in child.parameters())
