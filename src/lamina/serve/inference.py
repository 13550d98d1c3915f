"""The model of a release, loaded with the very bytes that its gate verified, and what a query to it really draws on.

Answers come from the whole model, so a query must draw on every layer. Where the model offers generation classes of the
manifest (`model.generation_classes = {"head": callable}`), each is served by a copy of the model that has the tensors of its
layers and NaN everywhere else: it cannot draw on what it does not have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from lamina.errors import EngineError, LaminaError, PlanError
from lamina.release.gate import Decision, DenialReason, ReleaseGate
from lamina.release.query import Query, Rights
from lamina.validate import one_of

_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
_MAX_DEPTH = 64  # axes, as many as numpy has
_ANYONE = Rights(classes=frozenset(), max_epsilon=0.0, min_noise_multiplier=0.0, purpose="")


class InputsRefused(LaminaError):
    """Inputs that the model cannot take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputForm:
    """What one input is: its type and shape (any, if None), and how many one request may have."""

    dtype: str = "float32"
    shape: tuple[int, ...] | None = None
    most: int = 256

    @classmethod
    def parse(cls, text: str | None, most: int, shape: tuple[int, ...] | None = None) -> InputForm:
        """TYPE, or TYPE:12,256 with the shape of one input."""
        if text is None:
            return cls(shape=shape, most=most)
        dtype, colon, sizes = text.partition(":")
        one_of(PlanError, "serve.input-form", _TYPES, remedy="write float32:12,256", inputs=dtype)
        parts = sizes.split(",") if colon else []
        if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 1 << 31 for part in parts):
            raise PlanError("serve.input-form", f"{sizes!r} is not the shape of an input", "write float32:12,256")
        return cls(dtype=dtype, shape=tuple(map(int, parts)) if colon else None, most=most)

    def read(self, inputs: object) -> Tensor:
        """Nested lists of finite numbers, the first axis counting the inputs; InputsRefused for anything else."""
        if type(inputs) is not list or not 0 < len(inputs) <= self.most:
            raise InputsRefused("serve.inputs-count", f"inputs must be a list of 1 to {self.most}", "send fewer")
        numbers = _only_numbers(inputs)
        try:
            found = np.array(inputs) if numbers else np.array(None)
        except ValueError:
            raise InputsRefused("serve.inputs-ragged", "inputs differ in shape", "send one shape a request") from None
        if found.dtype.kind not in ("i" if self.dtype == "int64" else "iuf"):
            wanted = "whole numbers" if self.dtype == "int64" else "numbers"
            raise InputsRefused("serve.inputs-not-numbers", f"inputs must be {wanted}", "send nested lists of them")
        if found.ndim < 2 or (self.shape is not None and found.shape[1:] != self.shape):
            taken = "a list" if self.shape is None else list(self.shape)
            problem = f"an input has shape {list(found.shape[1:])}, the model takes {taken}"
            raise InputsRefused("serve.inputs-shape", problem, "send that shape")
        with np.errstate(over="ignore"):
            found = found.astype(self.dtype)
        if not np.isfinite(found).all():
            raise InputsRefused("serve.inputs-not-finite", f"an input is no finite {self.dtype}", "scale the inputs")
        return torch.from_numpy(found)


def _only_numbers(values: list[Any], depth: int = 0) -> bool:
    """Whether nested lists hold numbers alone. Of text, numpy would give every place the room of the longest."""
    kinds = set(map(type, values))
    deeper = depth < _MAX_DEPTH and all(_only_numbers(v, depth + 1) for v in values if type(v) is list)
    return kinds <= {int, float, list} and (list not in kinds or deeper)


class Inference:
    """Answers queries that the gate allows. One thread at a time.

    factory  makes the model; the names of its tensors must be those of the weights
    """

    def __init__(self, gate: ReleaseGate, factory: Callable[[], nn.Module], form: InputForm) -> None:
        self.form, self._layers = form, tuple(layer.name for layer in gate.manifest.posture.layers)
        tensors = safetensors.torch.load(gate.weights())
        self._whole = _load(factory(), tensors)
        self._parts: dict[str, Callable[[Tensor], Any]] = {}
        for name in getattr(self._whole, "generation_classes", ()):
            kept = gate.rule.layers(Query(rights=_ANYONE, generation_class=name))
            if not kept:
                problem = f"the model offers the generation class {name!r}, which the manifest does not have"
                raise PlanError("serve.generation-class-unknown", problem, "release it with --generation-class")
            self._parts[name] = self._part(factory(), tensors, name, frozenset(kept))

    def _part(self, model: nn.Module, tensors: Mapping[str, Tensor], name: str, kept: frozenset[str]) -> Any:
        if model is self._whole:
            problem = f"generation class {name!r}: --model names one object, and each class needs a model of its own"
            raise PlanError("serve.model-is-one-object", problem, "name the class or the function that makes it")
        if len(dict(model.named_parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
            problem = f"generation class {name!r}: the model has tied tensors, which belong to several layers"
            raise PlanError("serve.tied-tensors", problem, "serve the whole model")
        own = {key: t if self._layer_of(key) in kept else _erased(t) for key, t in tensors.items()}
        return _load(model, own).generation_classes[name]  # type: ignore[index]

    def _layer_of(self, tensor: str) -> str | None:
        """The layer that a tensor is in: the longest name that begins its own."""
        return max((n for n in self._layers if tensor == n or tensor.startswith(f"{n}.")), key=len, default=None)

    def judge(self, query: Query, decision: Decision) -> Decision:
        """The decision of the gate, denied also if the answer would draw on more than the query says."""
        if query.generation_class in self._parts or decision.drawn in (0, len(self._layers)):
            return decision
        text = f"the query draws on {decision.drawn} layers, and the model answers with all {len(self._layers)}"
        reasons = (*decision.reasons, DenialReason(code="draws-on-less", text=text))
        return dataclasses.replace(decision, allowed=False, reasons=reasons)

    def answer(self, query: Query, inputs: Tensor) -> Any:
        """The outputs as nested lists."""
        model = self._parts.get(query.generation_class or "", self._whole)
        try:
            with torch.inference_mode():
                return _plain(model(inputs))
        except InputsRefused:
            raise
        except Exception:  # whatever a model raises about its input; the text might repeat the input
            shape = list(inputs.shape[1:])
            problem = f"the model cannot take inputs of shape {shape} and type {self.form.dtype}"
            raise InputsRefused("serve.inputs-do-not-fit", problem, "send what it was trained on") from None


def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    try:
        model.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        problem = f"the weights of the release do not fit the model: {str(error)[:300]}"
        raise EngineError("serve.weights-do-not-fit", problem, "name the model that was trained: --model") from None
    return model.eval().requires_grad_(False)


def _erased(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, math.nan) if tensor.is_floating_point() else torch.zeros_like(tensor)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not bool(torch.isfinite(value).all()):
            problem = "the answer has numbers that are not finite"
            raise InputsRefused("serve.outputs-not-finite", problem, "scale the inputs")
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(type(value).__name__)
