"""The activation profile: statistics of every operation while proxy inputs run through a model (phase 1 of LSAB)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor, fx, nn

from lamina import validate
from lamina.allocate.measure.gains import observed_slopes, paper_attention_norm, softmax_jacobian_norm
from lamina.allocate.measure.trace import (
    SAME_ENTRIES,
    Node,
    OperationKind,
    TracedGraph,
    TracedProgram,
    export,
    isolated_rng,
    map_arguments,
    patient_count,
    read_graph,
    trace,
    trace_with_program,
)
from lamina.errors import PlanError
from lamina.plan.layer_stack import call_arguments

Batches = Iterator[Any]

EPSILON_N = 1e-12
"""What eq. 8 of the LSAB document adds to a variance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreActivation:
    """What enters an activation: z over all passes and entries.

    mean, variance  of all entries, μ_l and σ_l² of the LSAB document
    slope           mean of |f'(z)|, f the activation: definition 2 and equation 7, over the inputs themselves
    steepest        largest |f'(z)| that occurred: assumption A2 says that it stays below the activation's constant
    ks              Kolmogorov distance to N(mean, variance), from a sample of fixed size: assumption A3
    atom            share of the most frequent value in that sample; a density (assumption A1) has none above 1/size
    """

    mean: float
    variance: float
    slope: float
    steepest: float
    ks: float
    atom: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeProfile:
    """One operation on the proxy inputs.

    mean, variance  of all entries of its value
    pre_activation  of an activation: what enters it
    divisor_variances  of a normalisation: the mean variance (RMSNorm: mean square) that it divides by, per group
    jacobian        of attention and softmax: the mean norm of diag(a)-aaᵀ over rows a of weights
    paper_norm      of the same: the mean of a_max(1-a_max), which the LSAB document takes for that norm (eq. 20)
    norms           of attention: mean spectral norms of weights, query, key, value; of a product of two
                    matrices: of its left and right factor
    """

    name: str
    operation: str
    kind: OperationKind
    module: str
    mean: float
    variance: float
    pre_activation: PreActivation | None = None
    divisor_variances: tuple[float, ...] = ()
    jacobian: float | None = None
    paper_norm: float | None = None
    norms: tuple[float, ...] = ()

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationProfile:
    """Statistics of a model's activations on proxy inputs; no patient's record was read for it.

    proxy      where the inputs came from: 'gaussian', 'public' or 'simulated', perhaps with a remark
    passes     how many inputs (made-up patients) went through the model, `batch` at a time
    radius     public L2 radius to which each input was clipped: Δ₀ = 2·radius
    """

    model: str
    proxy: str
    passes: int
    batch: int
    radius: float
    seed: int
    nodes: tuple[NodeProfile, ...]

    def __getitem__(self, name: str) -> NodeProfile:
        for node in self.nodes:
            if node.name == name:
                return node
        problem = f"the profile of {self.model} has no node {name!r}"
        raise PlanError("sensitivity.node-not-in-profile", problem, "profile this model")

    @property
    def activations(self) -> tuple[NodeProfile, ...]:
        """The nodes with a pre-activation, in order."""
        return tuple(node for node in self.nodes if node.pre_activation is not None)

    def non_gaussian(self, threshold: float = 0.1) -> tuple[NodeProfile, ...]:
        """The activations whose input is further from Gaussian than `threshold` (Kolmogorov distance)."""
        return tuple(
            node for node in self.activations if node.pre_activation is not None and node.pre_activation.ks > threshold
        )


def clip_inputs(example: Any, radius: float) -> Any:
    """The batch with every patient (first axis) scaled to norm ≤ radius, over all its floating-point tensors."""
    args, kwargs = call_arguments(example)
    floats = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    if not floats:
        return example
    squares = [t.detach().double().flatten(1).square().sum(1) if t.ndim > 1 else t.double() ** 2 for t in floats]
    norms = torch.stack(squares).sum(0).sqrt()
    if not norms.isfinite().all():
        problem = "a proxy input is not finite"
        raise PlanError("sensitivity.input-not-finite", problem, "remove NaN and infinite entries")
    scale = (radius / norms.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)

    def put(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return (value.double() * scale.reshape(-1, *([1] * (value.ndim - 1)))).to(value.dtype)

    return map_arguments(example, put)


def gaussian_batches(
    example: Any, program: TracedProgram, graph: TracedGraph, passes: int, batch: int, generator: torch.Generator
) -> Batches:
    """Standard Gaussian tensors of the example's shape, and token ids drawn evenly from the table they are read from.

    Whole numbers that no table is read by (a mask) stay as the example has them.
    """
    rows = dict(zip(program.inputs, program.flat(example), strict=True))
    sizes = {id(value): _vocabulary_size(name, graph) for name, value in rows.items()}
    for start in range(0, passes, batch):
        n = min(batch, passes - start)

        def draw(value: Any, n: int = n) -> Any:
            if not isinstance(value, Tensor) or value.is_floating_point():
                return gaussian_like(value, n, generator)
            shape = (n, *value.shape[1:])
            if not sizes.get(id(value)):
                return value[:1].expand(shape).clone()
            return torch.randint(sizes[id(value)], shape, generator=generator).to(value)

        yield map_arguments(example, draw)


def gaussian_like(value: Any, n: int, generator: torch.Generator) -> Any:
    """`n` standard Gaussian rows like those of a tensor; what is no tensor stays."""
    if not isinstance(value, Tensor):
        return value
    return torch.randn((n, *value.shape[1:]), generator=generator, dtype=torch.float32).to(value)


def given_batches(inputs: Any, passes: int, batch: int) -> Batches:
    """The first `passes` patients of a tensor, or of a tuple or dict of tensors, `batch` at a time."""
    for start in range(0, min(passes, patient_count(inputs)), batch):
        cut = slice(start, min(start + batch, passes))
        yield map_arguments(inputs, lambda value, cut=cut: value[cut] if isinstance(value, Tensor) else value)  # type: ignore[misc]


def _vocabulary_size(name: str, graph: TracedGraph) -> int:
    """The rows of the smallest table that this input is looked up in; 0 if there is none."""
    reached, sizes = {name}, []
    for node in graph:
        if reached.intersection(node.inputs):
            if node.kind is OperationKind.EMBEDDING:
                sizes.append(int(node.arguments["weight"].shape[0]))
            elif node.kind is OperationKind.RESHAPE:
                reached.add(node.name)
    return min(sizes, default=0)


Array = NDArray[np.float64]


class RunningMoments:
    """Running mean and variance of all entries.

    Two sets of n and m entries with means a, b and variances u, v are one set with (Chan, Golub, LeVeque 1979)

        mean = a + (b-a)·m/(n+m)        variance = (n·u + m·v)/(n+m) + (b-a)²·n·m/(n+m)²

    A batch is reduced in its own precision, batches are joined in float64. Variances are over n, not n-1.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        """One more batch."""
        x = values.detach()
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        centre = x.mean()
        spread = (x - centre).square_().mean()  # three times as fast as var_mean, and as exact
        n, m = self.count, x.numel()
        self.count = n + m
        old, new = n / self.count, m / self.count
        shift = float(centre) - self.mean
        self.mean += shift * new
        self.variance = old * self.variance + new * float(spread) + shift**2 * old * new


class RunningMean:
    """The running mean of a vector."""

    def __init__(self) -> None:
        self.count = 0
        self._sum: Array = np.zeros(1)

    def add(self, values: Tensor) -> None:
        """One more batch (count, length) or (count,)."""
        rows = values.detach().double().reshape(values.shape[0], -1)
        self._sum = self._sum + _to_array(rows.sum(0))
        self.count += len(rows)

    @property
    def value(self) -> tuple[float, ...]:
        return tuple((self._sum / self.count).tolist())


class StreamSample:
    """A sample of fixed size of all entries of a stream of `batches` tensors of equal size, drawn with replacement.

    Every batch gives an equal part of it, so that the whole is one pass and memory does not grow.
    """

    def __init__(self, size: int, batches: int, generator: torch.Generator) -> None:
        self._part = -(-size // batches)
        self._generator = generator
        self._parts: list[Array] = []

    def add(self, values: Tensor) -> None:
        """One more batch."""
        flat = values.detach().reshape(-1)
        rows = torch.randint(len(flat), (self._part,), generator=self._generator)
        self._parts.append(_to_array(flat[rows.to(flat.device)]))

    def distance(self, mean: float, variance: float) -> float:
        return kolmogorov_distance(np.concatenate(self._parts), mean, variance)

    def largest_atom(self) -> float:
        """The share of the most frequent value; an entry that was drawn twice counts twice."""
        values = np.concatenate(self._parts)
        return float(np.unique(values, return_counts=True)[1].max() / len(values))


def kolmogorov_distance(sample: Array, mean: float, variance: float) -> float:
    """sup |F - Φ((z-mean)/std)|, F the distribution function of the sample: how far assumption A3 is from true.

    A constant has no density: its distance to a Gaussian of vanishing width around it is ½.
    """
    if not variance > 0:
        return 0.5
    z = np.sort(sample)
    fitted = special.ndtr((z - mean) / math.sqrt(variance))
    n = len(z)
    steps = np.arange(n + 1) / n
    return float(max(np.max(steps[1:] - fitted), np.max(fitted - steps[:-1])))


def _to_array(values: Tensor) -> Array:
    return np.asarray(values.detach().cpu().to(torch.float64).numpy())


KS_SAMPLE_SIZE = 4096
"""Entries from which a KS distance is read; for Gaussian data it then reads about 0.013 instead of 0."""

PATIENTS_FOR_NORMS = 4
"""Patients per batch whose matrices are looked at for spectral norms."""


class ActivationObserver:
    """Streams statistics of the nodes of `graph`; nothing grows with the number of passes."""

    def __init__(self, graph: TracedGraph, batches: int, generator: torch.Generator) -> None:
        self.graph = graph
        self._nodes = {node.name: node for node in graph}
        self._logits = _softmax_logits(graph)
        self._entering = {node.inputs[0] for node in graph if node.kind is OperationKind.ACTIVATION}
        self._moments: defaultdict[str, RunningMoments] = defaultdict(RunningMoments)
        self._samples = {name: StreamSample(KS_SAMPLE_SIZE, batches, generator) for name in sorted(self._entering)}
        self._means: defaultdict[tuple[str, str], RunningMean] = defaultdict(RunningMean)  # by what it is of, and node
        self._steepest: defaultdict[str, float] = defaultdict(float)

    def __call__(self, node: fx.Node, given: Mapping[str, Any], value: Any) -> None:
        """Called for every operation; only those that depend on the input are noted."""
        mine = self._nodes.get(node.name)
        if mine is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        if mine.name in self._entering:
            self._moments[mine.name].add(value)
            self._samples[mine.name].add(value)
        elif mine.base not in SAME_ENTRIES:
            masked = mine.name in self._logits and (value == -math.inf).any()
            self._moments[mine.name].add(value[value != -math.inf] if masked else value)
        if mine.kind is OperationKind.ACTIVATION:
            name = next(name for name, source in mine.arguments.items() if source == mine.inputs[0])
            slopes = observed_slopes(mine, given[name])
            self._means["slope", mine.name].add(slopes.double().reshape(len(slopes), -1).mean(1, keepdim=True))
            self._steepest[mine.name] = max(self._steepest[mine.name], float(slopes.max()))
        elif mine.kind is OperationKind.NORM:
            variance = _normalising_variance(mine.base, given)
            if variance is not None:
                self._means["variance", mine.name].add(variance)
        elif mine.kind is OperationKind.ATTENTION:
            self._attention(mine.name, given)
        elif mine.kind is OperationKind.SOFTMAX:
            self._rows(mine.name, value.movedim(given["dim"], -1))
        elif mine.kind is OperationKind.PRODUCT and mine.base != "mul":
            left, right = product_factors(mine.base, given)
            norms = torch.stack((_mean_spectral_norm(left), _mean_spectral_norm(right)))
            self._means["norms", mine.name].add(norms.reshape(1, 2))

    def results(self) -> tuple[NodeProfile, ...]:
        """One record for every node that holds floating-point numbers."""
        return tuple(self._result(node) for node in self.graph if self._source(node) is not None)

    def _source(self, node: Node) -> str | None:
        """The node whose moments are this node's: itself, or what it is a mere rearrangement of."""
        while node.name not in self._moments:
            if node.base not in SAME_ENTRIES or not node.inputs:
                return None
            node = self._nodes[node.inputs[0]]
        return node.name

    def _result(self, node: Node) -> NodeProfile:
        moments = self._moments[str(self._source(node))]
        if not (math.isfinite(moments.mean) and math.isfinite(moments.variance)):
            problem = f"{node} is not finite on the proxy"
            raise PlanError("sensitivity.activation-not-finite", problem, "check the weights for NaN")

        def mean(what: str) -> tuple[float, ...]:
            return self._means[what, node.name].value if (what, node.name) in self._means else ()

        return NodeProfile(
            name=node.name,
            operation=node.operation,
            kind=node.kind,
            module=node.module,
            mean=moments.mean,
            variance=moments.variance,
            pre_activation=self._before(node) if node.kind is OperationKind.ACTIVATION else None,
            divisor_variances=mean("variance"),
            jacobian=next(iter(mean("jacobian")), None),
            paper_norm=next(iter(mean("peak")), None),
            norms=mean("norms"),
        )

    def _before(self, node: Node) -> PreActivation:
        moments, sample = self._moments[node.inputs[0]], self._samples[node.inputs[0]]
        return PreActivation(
            mean=moments.mean,
            variance=moments.variance,
            slope=self._means["slope", node.name].value[0],
            steepest=self._steepest[node.name],
            ks=sample.distance(moments.mean, moments.variance),
            atom=sample.largest_atom(),
        )

    def _attention(self, name: str, given: Mapping[str, Any]) -> None:
        q, k, v = (given[part][:PATIENTS_FOR_NORMS].detach().double() for part in ("query", "key", "value"))
        scale = given.get("scale") or 1 / math.sqrt(q.shape[-1])
        if given.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        logits = (q @ k.mT) * scale
        mask = given.get("attn_mask")
        if given.get("is_causal"):
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if isinstance(mask, Tensor):
            mask = mask[:PATIENTS_FOR_NORMS] if mask.ndim == q.ndim and mask.shape[0] > 1 else mask
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        weights = logits.softmax(-1)
        self._rows(name, weights)
        whole = weights.nan_to_num(0.0)
        norms = (_mean_spectral_norm(whole), _mean_spectral_norm(q), _mean_spectral_norm(k), _mean_spectral_norm(v))
        self._means["norms", name].add(torch.stack(norms).reshape(1, 4))

    def _rows(self, name: str, weights: Tensor) -> None:
        rows = weights[:PATIENTS_FOR_NORMS].detach().double().reshape(-1, weights.shape[-1])
        rows = rows[rows.isfinite().all(-1)]  # a row whose keys are all masked has no weights
        if len(rows):
            self._means["jacobian", name].add(softmax_jacobian_norm(rows))
            self._means["peak", name].add(paper_attention_norm(rows))


def _softmax_logits(graph: TracedGraph) -> set[str]:
    """The nodes that only lead to a softmax, where a mask of -∞ is no overflow."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        readers = graph.readers(node.name)
        only = bool(readers) and all(r.kind is OperationKind.SOFTMAX or r.name in found for r in readers)
        if only and node.kind in (OperationKind.ADD, OperationKind.SCALE, OperationKind.RESHAPE, OperationKind.PRODUCT):
            found.add(node.name)
    return found


def _mean_spectral_norm(matrices: Tensor) -> Tensor:
    """The mean spectral norm of a stack of matrices."""
    m = matrices[:PATIENTS_FOR_NORMS].detach().double()
    gram = m @ m.mT if m.shape[-2] <= m.shape[-1] else m.mT @ m
    found: Tensor = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt().mean()
    return found


def product_factors(base: str, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Left and right factor of a product of matrices."""
    left, right = {"baddbmm": ("batch1", "batch2"), "matmul": ("self", "other")}.get(base, ("self", "mat2"))
    return given[left], given[right]


def _normalising_variance(base: str, given: Mapping[str, Any]) -> Tensor | None:
    """The variance that a normalisation finds in its input: (rows, groups); None if it is fixed."""
    x: Tensor = given["input"].detach().float()
    if base == "layer_norm":
        return _last_axis_variance(x.flatten(-len(given["normalized_shape"]))).reshape(-1, 1)
    if base == "rms_norm":
        return x.flatten(-len(given["normalized_shape"])).square().mean(-1).reshape(-1, 1)
    if base == "group_norm":
        return _last_axis_variance(x.reshape(x.shape[0], given["num_groups"], -1))
    if base == "instance_norm":
        return _last_axis_variance(x.flatten(2))
    return None


def _last_axis_variance(x: Tensor) -> Tensor:
    """Along the last axis, over n."""
    return (x - x.mean(-1, keepdim=True)).square_().mean(-1)


GAUSSIAN = "gaussian"
_PROXY_SOURCES = ("public", "simulated")


def profile(
    model: nn.Module,
    *,
    example: Any = None,
    inputs: Any = None,
    proxy: str = GAUSSIAN,
    passes: int = 1000,
    batch: int = 50,
    radius: float = 1.0,
    seed: int = 0,
) -> ActivationProfile:
    """Run `passes` proxy inputs through `model`, `batch` at a time, and note the statistics of every operation.

      example       what model(...) accepts, for its shapes only: a tensor, a tuple of arguments or a dict;
                    not needed if `inputs` are given
      inputs        public or simulated inputs: a tensor whose first axis counts patients, or a tuple or dict of
                    such. The profile ends with them if they are fewer than `passes`. Without, inputs are Gaussian,
                    token ids even over the vocabulary
      proxy         where `inputs` come from: 'public' or 'simulated', a remark may follow ("simulated: ECG")
      radius        public L2 radius to which every patient's input is clipped, so that Δ₀ = 2·radius

    One pass over the stream: memory does not grow with `passes`. Equal arguments give an equal profile. The model
    runs in training mode (dropout included) with BatchNorm in evaluation mode; its weights, buffers and modes and
    torch's generators are left as they were.

    Never profile private data: what a profile of private inputs says would have to be paid for.
    """
    _check_profile_options(inputs, proxy, passes, batch, radius)
    generator = torch.Generator().manual_seed(seed)
    if inputs is not None:
        graph, stream = trace(model, inputs), given_batches(inputs, passes, batch)
        size = min(batch, passes, patient_count(inputs))
    elif example is not None:
        graph, program = trace_with_program(model, example)
        stream, size = gaussian_batches(example, program, graph, passes, batch, generator), min(batch, passes)
    else:
        raise PlanError("sensitivity.no-example", "profile got neither example nor inputs", "give example=x")
    programs: dict[int, TracedProgram] = {}
    observer = ActivationObserver(graph, max(1, math.ceil(passes / size)), generator)
    done = 0
    with isolated_rng(seed):
        for part in stream:
            n = patient_count(part)
            part = clip_inputs(part, radius)
            if n not in programs:
                programs[n] = _program_for_batch(model, part, graph)
            programs[n].run(model, part, observer)
            done += n
    return ActivationProfile(
        model=type(model).__name__,
        proxy=proxy,
        passes=done,
        batch=size,
        radius=float(radius),
        seed=seed,
        nodes=observer.results(),
    )


def _check_profile_options(inputs: Any, proxy: str, passes: int, batch: int, radius: float) -> None:
    validate.whole(PlanError, "sensitivity.passes-not-positive", passes=passes)
    validate.whole(PlanError, "sensitivity.batch-not-positive", batch=batch)
    validate.positive(PlanError, "sensitivity.radius-not-positive", radius=radius)
    source = proxy.partition(":")[0].strip()
    if inputs is None and source != GAUSSIAN:
        problem = f"proxy is {proxy!r} but there are no inputs"
        raise PlanError("sensitivity.proxy-without-inputs", problem, "give inputs")
    if inputs is not None and source not in _PROXY_SOURCES:
        problem = f"proxy is {proxy!r}, must be {' or '.join(_PROXY_SOURCES)} where inputs are given"
        remedy = "say where the inputs come from; private data must not be profiled"
        raise PlanError("sensitivity.proxy-not-named", problem, remedy)


def _program_for_batch(model: nn.Module, part: Any, graph: TracedGraph) -> TracedProgram:
    """The model traced at this batch size: the same operations as for one patient, or refused."""
    program = export(model, part)
    found = [(node.name, node.operation) for node in read_graph(model, program)]
    if found != [(node.name, node.operation) for node in graph]:
        problem = f"{type(model).__name__} runs other operations on {patient_count(part)} inputs than on one"
        remedy = "write forward so that it does not depend on the batch size, or profile with batch=1"
        raise PlanError("sensitivity.graph-depends-on-batch", problem, remedy)
    return program
