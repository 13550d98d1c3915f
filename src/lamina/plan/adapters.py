"""PEFT adapters (which tensors are theirs, their identity) and the linear projections that they wrap."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from lamina.errors import PlanError

VOLATILE_CONFIG_FIELDS = (
    "peft_version", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "runtime_config",
)  # fmt: skip
"""Fields of a PEFT configuration that are not part of an adapter's identity: they change with the library, with whether
it is loaded to train or to serve, and with where the base model happens to lie."""

_ADAPTER_CONTAINERS = ("prompt_encoder", "modules_to_save")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter as PEFT holds it.

    name     what it is called in the model
    kind     LORA, PREFIX_TUNING, …
    config   SHA-256 of its configuration, in hex; with the name, its identity. Empty if it holds what has no text
    tensors  names of the trainable tensors that are its own, wherever they are used
    """

    name: str
    kind: str
    config: str
    tensors: tuple[str, ...]


def find_adapters(model: nn.Module, uses: Mapping[str, tuple[str, ...]]) -> tuple[Adapter, ...]:
    """The adapters of a model; `uses` are the names of its trainable tensors, as in `ModelTensors`."""
    configs: dict[str, dict[str, Any]] = {}
    for _, module in model.named_modules():
        configured = getattr(module, "peft_config", None)
        if isinstance(configured, Mapping):
            for name, config in configured.items():
                configs.setdefault(str(name), {})[_digest_or_empty(config)] = config
    if not configs:
        return ()
    prefixes = {name: tuple(_adapter_paths(model, name)) for name in configs}
    made = []
    for name, found in configs.items():
        tensors = tuple(
            tensor
            for tensor, names in uses.items()
            if all(any(use == p or use.startswith(f"{p}.") for p in prefixes[name]) for use in names)
        )
        for digest, config in found.items():
            kind = _config_fields(config).get("peft_type")
            kind = str(kind.value if isinstance(kind, enum.Enum) else kind or "adapter")
            made.append(Adapter(name=name, kind=kind, config=digest, tensors=tensors))
    return tuple(made)


def config_digest(config: Any) -> str:
    """SHA-256 of a configuration in canonical JSON: sorted keys and sets, no field that is None, none that is volatile.

    >>> config_digest({"r": 8, "target_modules": {"v", "q"}}) == config_digest({"target_modules": ["q", "v"], "r": 8})
    True
    """
    fields = {
        key: value
        for key, value in _config_fields(config).items()
        if key not in VOLATILE_CONFIG_FIELDS and value is not None
    }
    text = json.dumps(
        _canonical_json(fields), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _digest_or_empty(config: Any) -> str:
    try:
        return config_digest(config)
    except PlanError:  # refused where the identity is asked for
        return ""


def _adapter_paths(model: nn.Module, name: str) -> Iterator[str]:
    """The paths below which the tensors of an adapter lie: in containers that hold one entry for each adapter."""
    for path, module in model.named_modules(remove_duplicate=False):
        listed = getattr(module, "adapter_layer_names", ())
        own = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ()
        for holder in dict.fromkeys((*_ADAPTER_CONTAINERS, *own)):
            inner = getattr(module, holder, None)
            if isinstance(inner, nn.ModuleDict | nn.ParameterDict) and name in inner:
                yield f"{path}.{holder}.{name}" if path else f"{holder}.{name}"


def _config_fields(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if callable(to_dict := getattr(config, "to_dict", None)):
        return dict(to_dict())
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dict(vars(config))


def _canonical_json(value: Any) -> Any:
    """The value in JSON's terms; refused if it has none that is the same in every run."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return _canonical_json(value.value)
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else repr(value)
    if isinstance(value, Mapping):
        return {str(_canonical_json(key)): _canonical_json(each) for key, each in value.items() if each is not None}
    if isinstance(value, set | frozenset):
        return sorted((_canonical_json(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True))
    if isinstance(value, list | tuple):
        return [_canonical_json(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _canonical_json(_config_fields(value))
    if type(value).__module__.partition(".")[0] == "torch" and " at 0x" not in repr(value):
        return str(value)  # a dtype, a device
    problem = (
        f"the adapter's configuration holds a {type(value).__name__}, which cannot be written the same way in every run"
    )
    raise PlanError("plan.adapter-config-not-canonical", problem, "use only numbers, texts, lists and tables in it")


Axes = tuple[int | None, int | None]
"""The axis of what comes out, and of what goes in; None where a tensor has no such axis."""

_WRAPPER_ATTRIBUTES = ("base_layer", "original_module")


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
        width = _linear_widths(module)
        if width is None:
            return None
        outs, ins = width
        shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters(remove_duplicate=False)}
        known = dict(_known_axes(module, "", outs, ins))
        axes: dict[str, Axes] = {name: known.get(name, (None, None)) for name in shapes}
        if any(name.startswith("lora_magnitude_vector.") for name in shapes):
            axes = {name: (out, None) for name, (out, _) in axes.items()}
        return cls(path=path, ins=ins, outs=outs, axes=axes, shapes=shapes)


def _linear_widths(module: nn.Module) -> tuple[int, int] | None:
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
    for name in _WRAPPER_ATTRIBUTES:
        inner = module._modules.get(name)
        if inner is not None:
            return _linear_widths(inner)
    if isinstance(module, nn.Sequential):
        owners = [child for child in module.children() if any(True for _ in child.parameters())]
        return _linear_widths(owners[0]) if len(owners) == 1 else None
    return None


def _known_axes(module: nn.Module, path: str, outs: int, ins: int) -> Iterator[tuple[str, Axes]]:
    """The tensors whose axes are known, by their path."""
    weight = module._parameters.get("weight")
    if weight is not None:
        yield f"{path}weight", (0, 1) if isinstance(module, nn.Linear) else (1, 0)
        if module._parameters.get("bias") is not None:
            yield f"{path}bias", (0, None)
    for name, child in module._modules.items():
        if child is None:
            continue
        if name in _WRAPPER_ATTRIBUTES or isinstance(module, nn.Sequential):
            if _linear_widths(child) == (outs, ins):
                yield from _known_axes(child, f"{path}{name}.", outs, ins)
        elif name == "modules_to_save":
            for key, copy in child.named_children():
                if _linear_widths(copy) == (outs, ins):
                    yield from _known_axes(copy, f"{path}{name}.{key}.", outs, ins)
        elif name in _LORA_AXES:
            for key, tensor in child.named_parameters():
                if (axes := _LORA_AXES[name](tuple(tensor.shape), outs, ins)) is not None:
                    yield f"{path}{name}.{key}", axes


_LORA_AXES: dict[str, Callable[[tuple[int, ...], int, int], Axes | None]] = {
    "lora_A": lambda shape, outs, ins: (None, 1) if len(shape) == 2 and shape[1] == ins else None,
    "lora_B": lambda shape, outs, ins: (0, None) if len(shape) in (1, 2) and shape[0] == outs else None,
    "lora_magnitude_vector": lambda shape, outs, ins: (0, None) if shape == (outs,) else None,
}
