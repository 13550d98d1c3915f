"""What is known of a model's layers before it sees private data, in one value that can be kept."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import PlanError
from lamina.plan import LayerStack
from lamina.plan.limits import shown

KIND, VERSION = "lamina.measure", 1
_MAY_LACK = ("tight", "worst", "printed")
_MAY_OVERFLOW, _INF = "worst", "inf"  # JSON has no infinity

_REMEDY = {
    "tight": "0 means that the input does not reach the layer: look at the profile's report() and at the model",
    "worst": "a spectral norm of 0 or a product that overflows: initialise the weights again",
    "printed": "a spectral norm of 0 or a product that overflows: initialise the weights again",
    "harm": "measure again with more draws, or with a smaller std",
    "norms": "freeze a layer that gets no gradient with requires_grad_(False), or measure on data that reach it",
    "fisher": "freeze a layer that gets no gradient with requires_grad_(False), or measure on data that reach it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Per layer of a stack, all learned from proxy data, all > 0, all finite but `worst`, which may overflow:

      tight, worst, printed  Δ_l by the recursion with local constants, with global suprema, and as printed; all three
                             empty where no Δ can be had
      harm                   m_l, loss increase per unit of noise variance
      norms                  n_l, the typical norm of an example's gradient
      fisher                 mean squared norm of an example's gradient

    `proxy` says what the data were, `notes` what a reader of a plan should know. None of these numbers is a
    guarantee: they shape C and S, and clipping makes the step private whatever they are.
    """

    proxy: str
    layers: tuple[str, ...]
    tight: tuple[float, ...]
    worst: tuple[float, ...]
    printed: tuple[float, ...]
    harm: tuple[float, ...]
    norms: tuple[float, ...]
    fisher: tuple[float, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.proxy, str) or not self.proxy:
            raise PlanError(
                "measure.proxy",
                f"proxy is {shown(self.proxy)}",
                "say what the data were: 'gaussian', 'public: …'",
            )
        for what in ("layers", "notes"):
            row = getattr(self, what)
            if not isinstance(row, tuple | list) or not all(isinstance(word, str) for word in row):
                raise PlanError(
                    "measure.measure", f"{what} of the measure is {shown(row)}", "give a list of texts"
                )
            object.__setattr__(self, what, tuple(row))
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise PlanError(
                "measure.layers-measure",
                f"the layers of the measure are {self.layers}",
                "name each layer once, at least one",
            )
        for what in _REMEDY:
            object.__setattr__(self, what, self._row(what, getattr(self, what)))
        if len({len(self.tight), len(self.worst), len(self.printed)}) > 1:
            raise PlanError(
                "measure.measure-delta-lacks",
                "the measure has some Δ and lacks others",
                "give tight, worst and printed, or none",
            )

    @property
    def has_bounds(self) -> bool:
        """Whether Δ is known: not where the model has an operation whose slope is not."""
        return bool(self.tight)

    def __len__(self) -> int:
        return len(self.layers)

    def check(self, stack: LayerStack | Sequence[str]) -> None:
        """Refuse a stack, or names of layers, that this was not measured on."""
        names = tuple(layer.name for layer in stack) if isinstance(stack, LayerStack) else tuple(stack)
        if len(names) != len(self):
            raise PlanError(
                "measure.measure-layers-stack",
                f"the measure has {len(self)} layers and the stack {len(names)}",
                "measure the model that is to be trained, with the same grouping of layers",
            )
        for mine, other in zip(self.layers, names, strict=True):
            if mine != other:
                raise PlanError(
                    "measure.measure-knows-layer",
                    f"the measure knows the layer {mine!r} where the stack has {other!r}",
                    "measure the model that is to be trained, with the same grouping of layers",
                )

    @property
    def ratio(self) -> tuple[float, ...]:
        """How much of the global bound the local constants leave: tight/worst."""
        return tuple(t / w for t, w in zip(self.tight, self.worst, strict=True))

    def report(self) -> str:
        """A table per layer, and the notes."""
        columns = [what for what in _REMEDY if getattr(self, what)]
        width = max(5, *(len(name) for name in self.layers))
        lines = [f"proxy: {self.proxy}", f"{'layer':<{width}}" + "".join(f"  {what:>9}" for what in columns)]
        for i, name in enumerate(self.layers):
            lines.append(f"{name:<{width}}" + "".join(f"  {getattr(self, what)[i]:9.3g}" for what in columns))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.report()

    # ----------------------------------------------------------------------------------- keeping it

    def to_json(self) -> str:
        """Strict JSON from which `from_json` makes the same value, bit for bit."""
        state = {"kind": KIND, "version": VERSION, **dataclasses.asdict(self)}
        state[_MAY_OVERFLOW] = [_INF if math.isinf(value) else value for value in self.worst]
        return json.dumps(state, allow_nan=False, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Measure:
        """Read what `to_json` wrote; refuse NaN, unknown or missing keys, and whatever the value itself refuses."""
        try:
            state = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise PlanError(
                "measure.measure-not-json",
                f"the measure is not JSON: {error}",
                "give what Measure.save wrote",
            ) from error
        if not isinstance(state, dict) or state.get("kind") != KIND or state.get("version") != VERSION:
            raise PlanError(
                "measure.not-version",
                f"this is not a {KIND} of version {VERSION}",
                "give a measure that this version wrote",
            )
        known = {field.name for field in dataclasses.fields(cls)}
        if set(state) - {"kind", "version"} != known:
            raise PlanError(
                "measure.measure-keys",
                f"the measure has the keys {sorted(set(state) - {'kind', 'version'})}",
                f"it must have {sorted(known)}",
            )
        if isinstance(state[_MAY_OVERFLOW], list):
            state[_MAY_OVERFLOW] = [math.inf if value == _INF else value for value in state[_MAY_OVERFLOW]]
        return cls(**{name: state[name] for name in known})

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Measure:
        """Read what `save` wrote."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                "measure.measure-not-read",
                f"the measure {str(path)!r} cannot be read: {error}",
                "give what Measure.save wrote",
            ) from error
        return cls.from_json(text)

    def _row(self, what: str, row: Any) -> tuple[float, ...]:
        if what in _MAY_LACK and isinstance(row, Sequence) and not len(row):
            return ()
        if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != len(self.layers):
            told = len(row) if isinstance(row, Sequence) else type(row).__name__
            raise PlanError(
                "measure.measure-entries",
                f"{what} of the measure has {told} entries",
                f"it has {len(self.layers)} layers",
            )
        for name, value in zip(self.layers, row, strict=True):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            most = math.inf if what == _MAY_OVERFLOW and isinstance(value, float) else sys.float_info.max
            if not number or not 0 < value <= most:
                raise PlanError(
                    "measure.layer-finite-number",
                    f"{what} of layer {name!r} is {shown(value)}, must be a finite number > 0",
                    _REMEDY[what],
                )
        return tuple(float(value) for value in row)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made
