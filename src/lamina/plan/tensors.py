"""The tensors of a model by name: trainable, frozen, shared."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lamina.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """Names of a model's parameters, each tensor once, under its name in `model.named_parameters()`.

    `uses[name]` are all names under which the model holds that tensor, its own first.
    """

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    uses: dict[str, tuple[str, ...]]
    sizes: dict[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> Tensors:
        """Read them; refuse what cannot be clipped: nothing to train, no shape, complex, shared memory."""
        canonical: dict[int, str] = {}
        uses: dict[str, list[str]] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            uses.setdefault(canonical.setdefault(id(tensor), name), []).append(name)
        tensors = {name: model.get_parameter(name) for name in uses}
        memory: dict[int, str] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, UninitializedParameter):
                raise PlanError(
                    "plan.tensor-lazy-no",
                    f"tensor {name!r} is lazy and has no shape yet",
                    "run model(...) once on a public or made-up input before planning",
                )
            if tensor.requires_grad and not tensor.is_floating_point():
                raise PlanError(
                    "plan.tensor-real-tensors",
                    f"tensor {name!r} is {tensor.dtype}; only real tensors can be clipped and noised",
                    "hold real and imaginary parts in two tensors, or freeze it with requires_grad_(False)",
                )
            if tensor.device.type == "meta" or not tensor.numel():
                continue
            other = memory.setdefault(tensor.data_ptr(), name)
            if other != name:
                raise PlanError(
                    "plan.tensors-share-memory",
                    f"tensors {other!r} and {name!r} share memory but are two parameters",
                    "tie them by assigning one Parameter to both modules, or copy one",
                )
        trainable = tuple(name for name, tensor in tensors.items() if tensor.requires_grad)
        if not trainable:
            raise PlanError(
                "plan.model-no-trainable",
                "the model has no trainable tensor",
                "call requires_grad_(True) on what should train",
            )
        return cls(
            trainable=trainable,
            frozen=tuple(name for name, tensor in tensors.items() if not tensor.requires_grad),
            uses={name: tuple(found) for name, found in uses.items()},
            sizes={name: tensor.numel() for name, tensor in tensors.items()},
        )
