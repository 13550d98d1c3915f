"""The adapters of a model: low-rank factors, prefixes, prompts; which tensors are theirs, and which adapter it is."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lamina.errors import PlanError

VOLATILE = (
    "peft_version",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "runtime_config",
)
"""Fields of a PEFT configuration that are not part of an adapter's identity: they change with the library, with whether
it is loaded to train or to serve, and with where the base model happens to lie."""

_HOLDERS = ("prompt_encoder", "modules_to_save")


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
    """The adapters of a model; `uses` are the names of its trainable tensors, as in `Tensors`."""
    configs: dict[str, dict[str, Any]] = {}
    for _, module in model.named_modules():
        held = getattr(module, "peft_config", None)
        if isinstance(held, Mapping):
            for name, config in held.items():
                configs.setdefault(str(name), {})[_digest_or_nothing(config)] = config
    if not configs:
        return ()
    prefixes = {name: tuple(_prefixes(model, name)) for name in configs}
    made = []
    for name, found in configs.items():
        tensors = tuple(
            tensor
            for tensor, names in uses.items()
            if all(any(use == p or use.startswith(f"{p}.") for p in prefixes[name]) for use in names)
        )
        for digest, config in found.items():
            made.append(
                Adapter(
                    name=name, kind=_word(_plain(config).get("peft_type")), config=digest, tensors=tensors
                )
            )
    return tuple(made)


def config_digest(config: Any) -> str:
    """SHA-256 of a configuration in canonical JSON: sorted keys and sets, no field that is None, none that is volatile.

    >>> config_digest({"r": 8, "target_modules": {"v", "q"}}) == config_digest({"target_modules": ["q", "v"], "r": 8})
    True
    """
    fields = {
        key: value for key, value in _plain(config).items() if key not in VOLATILE and value is not None
    }
    text = json.dumps(
        _canonical(fields), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _digest_or_nothing(config: Any) -> str:
    try:
        return config_digest(config)
    except PlanError:  # refused where the identity is asked for
        return ""


def _prefixes(model: nn.Module, name: str) -> Iterator[str]:
    """The paths below which the tensors of an adapter lie: in containers that hold one entry for each adapter."""
    for path, module in model.named_modules(remove_duplicate=False):
        listed = getattr(module, "adapter_layer_names", ())
        holders = (
            *_HOLDERS,
            *(listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ()),
        )
        for holder in dict.fromkeys(holders):
            inner = getattr(module, holder, None)
            if isinstance(inner, nn.ModuleDict | nn.ParameterDict) and name in inner:
                yield f"{path}.{holder}.{name}" if path else f"{holder}.{name}"


def _plain(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if callable(to_dict := getattr(config, "to_dict", None)):
        return dict(to_dict())
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dict(vars(config))


def _canonical(value: Any) -> Any:
    """The value in JSON's terms; refused if it has none that is the same in every run."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return _canonical(value.value)
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else repr(value)
    if isinstance(value, Mapping):
        return {str(_canonical(key)): _canonical(each) for key, each in value.items() if each is not None}
    if isinstance(value, set | frozenset):
        return sorted((_canonical(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True))
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _canonical(_plain(value))
    if type(value).__module__.partition(".")[0] == "torch" and " at 0x" not in repr(value):
        return str(value)  # a dtype, a device
    raise PlanError(
        "plan.adapter-configuration-holds",
        f"the adapter's configuration holds a {type(value).__name__}, which has no text that is the same in every run",
        "use numbers, words, lists and tables in it",
    )


def _word(value: Any) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value or "adapter")
