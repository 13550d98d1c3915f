"""`Projection`: a linear map in a model, and along which axes its tensors have what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

Axes = tuple[int | None, int | None]
"""The axis of what comes out, and of what goes in; None where a tensor has no such axis."""

_WRAPPED = ("base_layer", "original_module")


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """`ins` numbers go in and `outs` come out. `axes` has every tensor below `path`, by its path from there.

    Known are `nn.Linear` (weight: out × in), Conv1D as GPT-2 has it (in × out), and what PEFT puts around either:
    low-rank factors (A: rank × in, B: out × rank), magnitudes (out), saved copies. Of any other tensor neither axis is
    known. Where there are magnitudes, each row is divided by its norm: what goes in is not told apart any more.
    """

    path: str
    ins: int
    outs: int
    axes: dict[str, Axes]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, module: nn.Module, path: str) -> Projection | None:
        """Read a module; None if it is no linear map that is known."""
        width = _widths(module)
        if width is None:
            return None
        outs, ins = width
        shapes = {
            name: tuple(tensor.shape) for name, tensor in module.named_parameters(remove_duplicate=False)
        }
        known = dict(_axes(module, "", outs, ins))
        axes: dict[str, Axes] = {name: known.get(name, (None, None)) for name in shapes}
        if any(name.startswith("lora_magnitude_vector.") for name in shapes):
            axes = {name: (out, None) for name, (out, _) in axes.items()}
        return cls(path=path, ins=ins, outs=outs, axes=axes, shapes=shapes)


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """(outs, ins) of a linear map, through what is wrapped around it."""
    if parametrize.is_parametrized(module):
        return None
    weight = module._parameters.get("weight")
    if weight is not None and weight.ndim == 2:
        if isinstance(module, nn.Linear):
            return weight.shape[0], weight.shape[1]
        if getattr(module, "nf", None) == weight.shape[1]:  # Conv1D of GPT-2: y = x W + b
            return weight.shape[1], weight.shape[0]
        return None
    for name in _WRAPPED:
        inner = module._modules.get(name)
        if inner is not None:
            return _widths(inner)
    if isinstance(module, nn.Sequential):
        owners = [child for child in module.children() if any(True for _ in child.parameters())]
        return _widths(owners[0]) if len(owners) == 1 else None
    return None


def _axes(module: nn.Module, path: str, outs: int, ins: int) -> Iterator[tuple[str, Axes]]:
    """The tensors whose axes are known, by their path."""
    weight = module._parameters.get("weight")
    if weight is not None:
        yield f"{path}weight", (0, 1) if isinstance(module, nn.Linear) else (1, 0)
        if module._parameters.get("bias") is not None:
            yield f"{path}bias", (0, None)
    for name, child in module._modules.items():
        if child is None:
            continue
        if name in _WRAPPED or isinstance(module, nn.Sequential):
            if _widths(child) == (outs, ins):
                yield from _axes(child, f"{path}{name}.", outs, ins)
        elif name == "modules_to_save":
            for key, copy in child.named_children():
                if _widths(copy) == (outs, ins):
                    yield from _axes(copy, f"{path}{name}.{key}.", outs, ins)
        elif name in _FACTORS:
            for key, tensor in child.named_parameters():
                if (axes := _FACTORS[name](tuple(tensor.shape), outs, ins)) is not None:
                    yield f"{path}{name}.{key}", axes


def _factor_a(shape: tuple[int, ...], outs: int, ins: int) -> Axes | None:
    return (None, 1) if len(shape) == 2 and shape[1] == ins else None


def _factor_b(shape: tuple[int, ...], outs: int, ins: int) -> Axes | None:
    return (0, None) if len(shape) in (1, 2) and shape[0] == outs else None


def _magnitude(shape: tuple[int, ...], outs: int, ins: int) -> Axes | None:
    return (0, None) if shape == (outs,) else None


_FACTORS = {"lora_A": _factor_a, "lora_B": _factor_b, "lora_magnitude_vector": _magnitude}
