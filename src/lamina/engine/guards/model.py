"""What a model must not have, or be run with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lamina.engine.guards.guard import Guard
from lamina.errors import CouplingError, EngineError
from lamina.plan.coverage import find_hazards


class ModelGuard(Guard):
    """Refuses products of fewer digits, and modules that have begun to mix contributions."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def check(self) -> None:
        refuse_reduced_products()

    def look_closely(self) -> None:
        for hazard in find_hazards(self.model):
            raise CouplingError("engine.hazard-in-model", str(hazard), hazard.remedy)


def refuse_float16(parameters: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        if p.requires_grad and p.dtype == torch.float16:
            problem = f"'{name}' is float16, whose gradients overflow"
            raise EngineError("engine.float16-parameter", problem, "use bfloat16 or float32")


# How torch multiplies float32, by the name of the setting, and where that is found without the 20 µs that reading it takes.
_PRODUCTS = {
    "torch.backends.fp32_precision": ("generic", "all"),
    "torch.backends.cuda.matmul.fp32_precision": ("cuda", "matmul"),
    "torch.backends.mkldnn.matmul.fp32_precision": ("mkldnn", "matmul"),
}


def refuse_reduced_products() -> None:
    """In TF32 or bfloat16, which a user may allow for float32, factors and gradients lose digits as they are added up."""
    for name, place in _PRODUCTS.items():
        if (kind := torch._C._get_fp32_precision_getter(*place)) not in ("none", "ieee"):
            problem = f"torch may multiply float32 matrices in {kind}, and a clipped sum could then leave its bound"
            raise EngineError("engine.reduced-products", problem, f'set {name} = "ieee"')


def refuse_elsewhere(tensors: Mapping[str, Tensor], what: str) -> None:
    """Refuse what is exact to the last bit only where float64 and whole numbers are added up on the CPU."""
    for name, p in tensors.items() if what else ():
        if not p.is_cpu:
            problem = f"{what} is made for sums on the CPU, and '{name}' is on {p.device}"
            remedy = "train on the CPU, or with Gaussian noise"
            raise EngineError("engine.exact-noise-elsewhere", problem, remedy)


def refuse_extra_state(model: nn.Module) -> None:
    """`state_dict` writes extra state, and nobody noises it."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            problem = f"module '{name}' ({type(module).__name__}) has get_extra_state, which is saved without noise"
            raise CouplingError("engine.extra-state", problem, "keep it outside of the model, or drop get_extra_state")
