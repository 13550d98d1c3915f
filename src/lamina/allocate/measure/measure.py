"""`measure`: everything that is learned of a model's layers from proxy data.

In one `Measure` that a file can keep; and what noise in a layer costs.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina import validate
from lamina.allocate.measure.bounds import bounds
from lamina.allocate.measure.example_gradients import (
    ExampleLosses,
    Fisher,
    LossesOf,
    NamedTensors,
    example_count,
    fisher,
    layer_tensors,
    reconstruction_losses,
    take_examples,
)
from lamina.allocate.measure.influence import influence
from lamina.allocate.measure.profile import GAUSSIAN, ActivationProfile, gaussian_batches, gaussian_like, profile
from lamina.allocate.measure.trace import export, first_patients, isolated_rng, map_arguments, trace
from lamina.errors import NoBound, PlanError
from lamina.plan.codec import strict_json
from lamina.plan.layer_stack import LayerStack, call_arguments, model_unchanged
from lamina.plan.table import align_columns
from lamina.validate import read_text_file, short_repr

MEASURE_KIND, MEASURE_VERSION = "lamina.measure", 1
_OPTIONAL_ROWS = ("tight", "worst", "printed", "influence")
_ROW_WITH_INFINITY, _INF = "worst", "inf"  # JSON has no infinity

_WRITTEN = "give what Measure.save wrote"
_ROW_REMEDIES = {
    "tight": "0 means that the input does not reach the layer: look at the model",
    "worst": "a spectral norm of 0 or a product that overflows: initialise the weights again",
    "printed": "a spectral norm of 0 or a product that overflows: initialise the weights again",
    "harm": "measure again with more draws, or with a smaller std",
    "norms": "freeze a layer that gets no gradient with requires_grad_(False), or measure on data that reach it",
    "fisher": "freeze a layer that gets no gradient with requires_grad_(False), or measure on data that reach it",
    "influence": "freeze a layer that gets no gradient with requires_grad_(False), or measure on data that reach it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Per layer of a stack, all learned from proxy data, all > 0, all finite but `worst`, which may overflow:

      tight, worst, printed  Δ_l by the recursion with local constants, with global suprema, and as printed; all three
                             empty where no Δ can be had
      harm                   m_l, loss increase per unit of noise variance
      norms                  n_l, the typical norm of an example's gradient
      fisher                 mean squared norm of an example's gradient
      influence              how strongly single examples act on the loss of others (influence functions); empty where it was
                             not asked for

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
    influence: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.proxy, str) or not self.proxy:
            problem = f"proxy is {short_repr(self.proxy)}"
            raise PlanError("sensitivity.proxy-missing", problem, "give 'gaussian', 'public: …' or 'simulated: …'")
        for what in ("layers", "notes"):
            row = getattr(self, what)
            if not isinstance(row, tuple | list) or not all(isinstance(word, str) for word in row):
                problem = f"{what} of the measure is {short_repr(row)}"
                raise PlanError("sensitivity.measure-text", problem, "give a list of texts")
            object.__setattr__(self, what, tuple(row))
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise PlanError("sensitivity.layer-names", f"the measure has layers {self.layers}", "name every layer once")
        for what in _ROW_REMEDIES:
            object.__setattr__(self, what, self._row(what, getattr(self, what)))
        if len({len(self.tight), len(self.worst), len(self.printed)}) > 1:
            problem = "the measure has some Δ and lacks others"
            raise PlanError("sensitivity.delta-incomplete", problem, "give all three or none")

    @property
    def has_bounds(self) -> bool:
        """Whether Δ is known: not where the model has an operation whose slope is not."""
        return bool(self.tight)

    def __len__(self) -> int:
        return len(self.layers)

    def check(self, stack: LayerStack | Sequence[str]) -> None:
        """Refuse a stack, or names of layers, that this was not measured on."""
        names = tuple(layer.name for layer in stack) if isinstance(stack, LayerStack) else tuple(stack)
        if names != self.layers:
            mine, other = next(pair for pair in zip_longest(self.layers, names) if pair[0] != pair[1])
            problem = f"the measure has layer {mine!r} where the stack has {other!r}"
            remedy = "measure the model that is to be trained, with the same grouping of layers"
            raise PlanError("sensitivity.measure-of-other-layers", problem, remedy)

    def report(self) -> str:
        """A table per layer, and the notes."""
        columns = {what: row for what in _ROW_REMEDIES if (row := getattr(self, what))}
        rows = [[name, *(f"{row[i]:.3g}" for row in columns.values())] for i, name in enumerate(self.layers)]
        table = align_columns([["layer", *columns], *rows], left=1)
        return "\n".join([f"proxy: {self.proxy}", *table, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.report()

    def to_json(self) -> str:
        """Strict JSON from which `from_json` makes the same value, bit for bit."""
        state = {"kind": MEASURE_KIND, "version": MEASURE_VERSION, **dataclasses.asdict(self)}
        state[_ROW_WITH_INFINITY] = [_INF if math.isinf(value) else value for value in self.worst]
        return json.dumps(state, allow_nan=False, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Measure:
        """Read what `to_json` wrote; refuse NaN, unknown or missing keys, and whatever the value itself refuses."""
        try:
            state = strict_json(text)
        except (ValueError, RecursionError) as error:
            raise PlanError("sensitivity.measure-not-json", f"the measure is not JSON: {error}", _WRITTEN) from None
        if not isinstance(state, dict) or state.get("kind") != MEASURE_KIND or state.get("version") != MEASURE_VERSION:
            problem = f"this is no {MEASURE_KIND} of version {MEASURE_VERSION}"
            raise PlanError("sensitivity.measure-version", problem, "measure again")
        known = {field.name for field in dataclasses.fields(cls)}
        state.setdefault("influence", [])  # measures of before have none
        if (found := set(state) - {"kind", "version"}) != known:
            problem = f"the measure has the keys {sorted(found)}"
            raise PlanError("sensitivity.measure-keys", problem, f"it must have {sorted(known)}")
        if isinstance(state[_ROW_WITH_INFINITY], list):
            state[_ROW_WITH_INFINITY] = [math.inf if value == _INF else value for value in state[_ROW_WITH_INFINITY]]
        return cls(**{name: state[name] for name in known})

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Measure:
        """Read what `save` wrote."""
        try:
            text = read_text_file(path)
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot read the measure {str(path)!r}: {error}"
            raise PlanError("sensitivity.measure-unreadable", problem, _WRITTEN) from None
        return cls.from_json(text)

    def _row(self, what: str, row: Any) -> tuple[float, ...]:
        if what in _OPTIONAL_ROWS and isinstance(row, Sequence) and not len(row):
            return ()
        if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != len(self.layers):
            length = len(row) if isinstance(row, Sequence) else type(row).__name__
            problem = f"{what} has {length} entries for {len(self.layers)} layers"
            raise PlanError("sensitivity.measure-length", problem, "give one per layer")
        for name, value in zip(self.layers, row, strict=True):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            most = math.inf if what == _ROW_WITH_INFINITY and isinstance(value, float) else sys.float_info.max
            if not number or not 0 < value <= most:
                problem = f"{what} of layer {name!r} is {short_repr(value)}, must be > 0"
                raise PlanError("sensitivity.value-not-positive", problem, _ROW_REMEDIES[what])
        return tuple(float(value) for value in row)


NOISE_COST_FLOOR = 0.01
"""The least cost of noise per parameter, as a part of the mean over the whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseCost:
    """What noise in a layer costs ("harm" in a `Measure`): with L the mean proxy loss and z ~ N(0, I) over the numbers of layer l,

        raw[l] = ( E[½L(θ + s_l z) + ½L(θ − s_l z)] − L(θ) ) / s_l²   →   ½ tr H_ll   as s_l → 0

    which contains the parameter count d_l. The pair ± cancels the gradient exactly, which is far larger than the
    curvature. `error[l]` is the standard error over the draws. Curvature that sits in the kinks of a ReLU is seen
    here, though not by H.

    Away from a minimum the trace may be negative, but an allocation needs m_l > 0. So

        values[l] = max( raw[l], error[l], FLOOR · d_l · mean ),       mean = Σ_j raw[j]₊ / Σ_j d_j

    A cost below its own error cannot be told from it, so the error takes its place: rather too much care for a layer
    than a share that the draws decide. Where no layer stands out of its error, values[l] = d_l, the choice
    without a measurement. `floored` says which layers the rule raised.
    """

    layers: tuple[str, ...]
    values: tuple[float, ...]
    raw: tuple[float, ...]
    error: tuple[float, ...]
    floored: tuple[bool, ...]
    std: tuple[float, ...]
    loss: float


def noise_cost(
    model: nn.Module,
    losses_of: LossesOf,
    x: Any,
    y: Any,
    stack: LayerStack,
    *,
    std: float = 0.1,
    draws: int = 16,
    batch: int = 8,
    seed: int = 0,
) -> NoiseCost:
    """Measure m_l on public or simulated data.

    std    s_l as a part of the root mean square of the layer's own weights (of all weights where these are 0):
           small enough for the curvature to count alone, large enough to stand out of rounding and of kinks
    draws  antithetic pairs per layer
    batch  examples that a pair sees, drawn anew for each pair: cost and error depend on draws · batch
    """
    validate.positive(PlanError, "sensitivity.std-not-positive", std=std)
    validate.whole(PlanError, "sensitivity.draws-too-few", least=2, draws=draws)
    validate.whole(PlanError, "sensitivity.batch-not-positive", batch=batch)
    tensors, losses = layer_tensors(model, stack), ExampleLosses(model, losses_of)
    scales = _weight_scales(tensors, stack)
    generator = torch.Generator().manual_seed(seed)
    found = torch.zeros(draws, len(stack), dtype=torch.float64)
    with model_unchanged(model), torch.no_grad():
        n = losses.checked(x, y)
        base = torch.zeros(draws, dtype=torch.float64)
        for draw in range(draws):
            rows = torch.randperm(n, generator=generator)[:batch]
            part = take_examples((x, y), rows)
            here = losses.at({}, *part).double()
            base[draw] = here.mean()
            for i, layer in enumerate(tensors):
                s = std * scales[i]
                z = {name: torch.randn(t.shape, generator=generator).to(t) for name, t in layer.items()}
                pair = [
                    losses.at({name: t + sign * s * z[name] for name, t in layer.items()}, *part).double()
                    for sign in (1, -1)
                ]
                found[draw, i] = (0.5 * (pair[0] + pair[1]) - here).mean() / s**2
    raw, error = found.mean(0), found.std(0) / math.sqrt(draws)
    for layer_, value in zip(stack, raw, strict=True):
        if not value.isfinite():
            problem = f"layer {layer_.name!r} has a noise cost of {float(value)!r}"
            raise PlanError("sensitivity.noise-cost-not-finite", problem, "lower std")
    values, floored = raise_to_floor(raw.tolist(), error.tolist(), [layer.size for layer in stack])
    return NoiseCost(
        layers=tuple(layer.name for layer in stack),
        values=values,
        raw=tuple(raw.tolist()),
        error=tuple(error.tolist()),
        floored=floored,
        std=tuple(std * scale for scale in scales),
        loss=float(base.mean()),
    )


def raise_to_floor(
    raw: Sequence[float], error: Sequence[float], sizes: Sequence[int]
) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """The floor rule of `NoiseCost`: positive values, and which of them it raised."""
    if not any(value > spread for value, spread in zip(raw, error, strict=True)):
        return tuple(float(d) for d in sizes), (True,) * len(sizes)
    mean = math.fsum(max(value, 0.0) for value in raw) / sum(sizes)
    least = [max(spread, NOISE_COST_FLOOR * d * mean) for spread, d in zip(error, sizes, strict=True)]
    return (
        tuple(max(value, low) for value, low in zip(raw, least, strict=True)),
        tuple(value < low for value, low in zip(raw, least, strict=True)),
    )


def _weight_scales(tensors: Sequence[NamedTensors], stack: LayerStack) -> list[float]:
    """The root mean square of each layer's weights."""
    squares = [sum(float(t.detach().double().square().sum()) for t in layer.values()) for layer in tensors]
    for layer, value in zip(stack, squares, strict=True):
        if not math.isfinite(value):
            problem = f"layer {layer.name!r} has weights that are not finite"
            raise PlanError("sensitivity.weight-not-finite", problem, "initialise it again")
    whole = math.sqrt(sum(squares) / stack.size)
    if not whole > 0:
        raise PlanError("sensitivity.weights-zero", "all weights of the model are 0", "initialise it")
    return [math.sqrt(v / layer.size) or whole for v, layer in zip(squares, stack, strict=True)]


def measure(
    model: nn.Module,
    stack: LayerStack,
    *,
    x: Any = None,
    y: Any = None,
    losses_of: LossesOf | None = None,
    example: Any = None,
    passes: int = 1000,
    radius: float | None = None,
    seed: int = 0,
    proxy: str = GAUSSIAN,
    examples: int = 256,
    draws: int = 16,
    influences: bool = False,
    reinitialise: int = 0,
    gamma: str = "all",
    slopes: str = "empirical",
) -> Measure:
    """Measure Δ, noise cost, gradient norms and Fisher information of every layer, on made-up, public or simulated data.

      x, y       proxy data; without x, Gaussian inputs of the shape of `example`
      losses_of  (x, y) → one loss per example, model included; default: mean squared error of model(x) to x
      example    what model(...) accepts, for its shapes only; not needed with x
      passes     inputs that the profile sees (at most as many as x holds)
      radius     public L2 radius of an input, for the sensitivities Δ; noise cost and norms take the data as they are.
                 Default: as large as the largest proxy input
      proxy      where x comes from: 'public' or 'simulated', a remark may follow ("simulated: ECG")
      gamma      where `printed` has its factor γ of eq. 12: "all" layers, "norm" layers, "elsewhere", "none";
                 or "epsilon", which is "all" with γ = ε/σ at norm layers
      slopes     where the local constants of `tight` come from: "empirical", the inputs that the profile saw; "gaussian",
                 a Gaussian fitted to them
      examples   at most so many for norms and Fisher information; the noise cost takes its `draws` from them too
      influences    also measure influence functions, which takes Hessian-vector products
      reinitialise  Δ over so many copies of the model with weights drawn anew, as their geometric mean, instead of at the
                    present weights; all else is measured at these

    The model is measured at its present weights and left as it was. Equal arguments give an equal measure. Where no Δ
    can be had (an operation whose slope is not known, a layer of zeros), the measure has none, and a note says why.
    Never measure private data: whatever is read from it would have to be paid for.
    """
    layer_tensors(model, stack)
    validate.whole(PlanError, "sensitivity.examples-too-few", least=2, examples=examples)
    if x is None and (example is None or y is not None):
        raise PlanError("sensitivity.no-example", "measure got neither x nor example", "give x, or example=x and no y")
    if (x is None) != (proxy.partition(":")[0].strip() == GAUSSIAN):
        problem = f"proxy is {proxy!r} and x is {'not ' * (x is None)}given"
        remedy = "say proxy='public' or 'simulated' for x; private data must not be measured"
        raise PlanError("sensitivity.proxy-not-named", problem, remedy)
    data = _gaussian_inputs(model, example, examples, seed) if x is None else x
    part_x, part_y = take_examples((data, y), slice(min(examples, example_count(data))))
    losses = reconstruction_losses(model) if losses_of is None else losses_of
    with model_unchanged(model):
        ExampleLosses(model, losses).checked(*take_examples((part_x, part_y), slice(2)))  # before the long part
    radius = _largest_norm(part_x) if radius is None else radius
    seen, deltas, missing = None, dict.fromkeys(("tight", "worst", "printed"), tuple[float, ...]()), ""
    try:
        rows = []
        for drawn in _drawn_anew(model, reinitialise, seed) if reinitialise else (model,):
            graph = trace(drawn, example if x is None else x)
            seen = profile(drawn, example=example, inputs=x, proxy=proxy, passes=passes, radius=radius, seed=seed)
            rows.append(bounds(graph, seen, stack, gamma=gamma, slopes=slopes))
        deltas = {row: _geometric_mean([getattr(each, row) for each in rows]) for row in deltas}
    except NoBound as error:
        missing = error.problem
    costs = noise_cost(model, losses, part_x, part_y, stack, draws=draws, seed=seed)
    norms = fisher(model, losses, part_x, part_y, stack)
    return Measure(
        proxy=proxy,
        layers=tuple(layer.name for layer in stack),
        **deltas,
        harm=costs.values,
        norms=norms.norms,
        fisher=norms.information,
        influence=influence(model, losses, part_x, part_y, stack).values if influences else (),
        notes=_reader_notes(None if missing else seen, missing, slopes, costs, norms, part_x, radius),
    )


def _drawn_anew(model: nn.Module, count: int, seed: int) -> Iterator[nn.Module]:
    """Copies of the model whose modules have drawn their weights again."""
    validate.whole(PlanError, "sensitivity.reinitialise-count", least=0, reinitialise=count)
    for name, module in model.named_modules():
        if module._parameters and not hasattr(module, "reset_parameters"):
            problem = f"module {name!r} is {type(module).__name__}, which cannot draw its weights again"
            remedy = "give it reset_parameters(), or measure as it is"
            raise PlanError("sensitivity.cannot-reinitialise", problem, remedy)
    for draw in range(count):
        drawn = copy.deepcopy(model)
        with isolated_rng(seed + draw):
            for module in drawn.modules():
                if module._parameters:
                    module.reset_parameters()  # type: ignore[operator]
        yield drawn


def _geometric_mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    if len(rows) == 1:
        return tuple(rows[0])
    return tuple(math.exp(math.fsum(map(math.log, column)) / len(column)) for column in zip(*rows, strict=True))


def _gaussian_inputs(model: nn.Module, example: Any, examples: int, seed: int) -> Any:
    """Gaussian inputs (even token ids) of the example's shape; not those of the profile.

    Only token ids need a trace, which tells how many there are. A model that cannot be traced gets its numbers all
    the same.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    one = first_patients(example, 1)
    try:
        program, graph = export(model, one), trace(model, example)
    except NoBound:
        args, kwargs = call_arguments(one)
        if not all(t.is_floating_point() for t in (*args, *kwargs.values()) if isinstance(t, Tensor)):
            raise

        return map_arguments(one, lambda value: gaussian_like(value, examples, generator))
    return next(gaussian_batches(example, program, graph, examples, examples, generator))


def _reader_notes(
    seen: ActivationProfile | None, missing: str, slopes: str, costs: NoiseCost, norms: Fisher, x: Any, radius: float
) -> tuple[str, ...]:
    """What a reader of a plan should know about these numbers."""
    notes = [f"no Δ, which lsab needs: {missing}"] if missing else []
    if seen is not None and seen.activations:
        failed = f"{len(seen.non_gaussian())} of {len(seen.activations)} pre-activations are not Gaussian (KS > 0.1)"
        if slopes == "empirical":
            notes.append(f"local constants: mean slopes over the inputs that were seen (definition 2); {failed}")
        else:
            notes.append(f"local constants: mean slopes over Gaussian fits (assumption A3); {failed}")
    if float(typical := _input_norms(x).median()) > radius:
        notes.append(
            f"the radius {radius:g} clips most proxy inputs (median norm {float(typical):.3g}): the sensitivities are "
            "those of inputs that small"
        )
    if raised := [name for name, was in zip(costs.layers, costs.floored, strict=True) if was]:
        notes.append(
            f"the noise cost was raised in {len(raised)} of {len(costs.layers)} layers, where it is negative, below its "
            f"error or below the floor: {', '.join(raised)}"
        )
    for name, part in zip(norms.layers, norms.reached, strict=True):
        if part < 1:
            notes.append(f"only {part:.0%} of the proxy examples reach layer {name!r}; its norm is theirs")
    return tuple(notes)


def _largest_norm(x: Any) -> float:
    """The L2 norm of the largest proxy input; 1 for inputs that are only token ids or zeros."""
    return float(_input_norms(x).max()) or 1.0


def _input_norms(x: Any) -> Tensor:
    """The L2 norm of every input, over the tensors that are numbers; 0 where there are none."""
    found = [t.double().flatten(1).square().sum(1) for t in pytree.tree_leaves(x) if _has_norm(t)]
    return torch.stack(found).sum(0).sqrt() if found else torch.zeros(1)


def _has_norm(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1
