"""Sensitivity of every layer's output to its input, by recursion through the traced graph (phase 2 of LSAB)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina import validate
from lamina.allocate.measure import gains
from lamina.allocate.measure.gains import (
    affine_norm_constant,
    paper_compression_clamped,
    paper_gelu_slope,
    paper_norm_compression,
    paper_relu_slope,
    paper_residual,
)
from lamina.allocate.measure.profile import EPSILON_N, ActivationProfile, product_factors
from lamina.allocate.measure.trace import SAME_ENTRIES, Node, OperationKind, TracedGraph
from lamina.errors import NoBound, PlanError
from lamina.plan.layer_stack import LayerStack


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSensitivity:
    """What is known of a node's value when one patient's input is exchanged for another.

    tight       Δ with local constants: an expectation, no bound
    worst       Δ that is not exceeded, up to the error of spectral norms
    printed     Δ as the LSAB document prints its recursion
    size        norm that the value of one patient does not exceed
    everywhere  whether `worst` is a Lipschitz constant times Δ₀ on the whole space; if not, it holds for inputs
                within the radius: attention, and every product of two values, has no constant on the whole space
    """

    tight: float
    worst: float
    printed: float
    size: float
    everywhere: bool = True


NO_CHANGE = NodeSensitivity(tight=0.0, worst=0.0, printed=0.0, size=0.0)


@dataclass(frozen=True, kw_only=True)
class PropagationState:
    """The recursion as far as it has come. `gamma` says at which layers the printed one has its γ; 1 at the others.

    `slopes` says over what the local constants E|f'(Z)| are taken: the inputs seen, or a Gaussian fitted to them.
    """

    graph: TracedGraph
    profile: ActivationProfile
    sensitivities: dict[str, NodeSensitivity]
    gamma: str = "all"
    slopes: str = "empirical"

    def inputs_of(self, node: Node) -> list[NodeSensitivity]:
        return [self.sensitivities[name] for name in node.inputs]

    def of_argument(self, argument: object) -> NodeSensitivity:
        """The sensitivity of an argument: a node's, or none for a tensor that does not depend on the input."""
        if isinstance(argument, str):
            return self.sensitivities[argument]
        return NodeSensitivity(tight=0.0, worst=0.0, printed=0.0, size=gains.euclidean_norm(argument))

    def shape(self, argument: str | Tensor) -> tuple[int, ...]:
        """The shape of an argument, moving or not."""
        return self.graph[argument].shape if isinstance(argument, str) else tuple(argument.shape)

    def zeros(self, node: Node) -> dict[str, Tensor]:
        """A zero for every input of a node."""
        sources = [self.graph[name] for name in node.inputs]
        return {source.name: torch.zeros(source.shape, dtype=source.dtype) for source in sources}

    def compression(self, node: Node, variance: float = 1.0, eps: float = 0.0) -> float:
        """γ for a layer, its activation included, forced into (0, 1]: eq. 12, or ε/σ of a norm layer of that variance."""
        norm = node.kind is OperationKind.NORM
        if norm and self.gamma == "epsilon":
            return max(paper_norm_compression(eps, math.sqrt(variance)), EPSILON_N)
        if self.gamma not in ("all", "norm" if norm else "elsewhere", "norm" if norm else "epsilon"):
            return 1.0
        before = self.profile[node.inputs[0]].std
        after = self.profile[self.graph.output_of(node).name].std
        if before == 0:
            return 1.0
        return max(paper_compression_clamped(after, before), EPSILON_N)


def product_or_zero(a: float, b: float) -> float:
    """a·b with 0·∞ = 0: what does not move is not stretched."""
    return 0.0 if a == 0 or b == 0 else a * b


def stretch(
    flow: NodeSensitivity, worst: float, *, tight: float | None = None, printed: float | None = None, rest: float = 0.0
) -> NodeSensitivity:
    """Distances multiplied by a factor (one for all unless said otherwise); `rest` is ‖f(0)‖."""
    tight = worst if tight is None else tight
    return NodeSensitivity(
        tight=product_or_zero(tight, flow.tight),
        worst=product_or_zero(worst, flow.worst),
        printed=product_or_zero(tight if printed is None else printed, flow.printed),
        size=product_or_zero(worst, flow.size) + rest,
        everywhere=flow.everywhere,
    )


def input_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    if not node.floating:
        return NO_CHANGE  # token ids: the distance arises in the table they are looked up in
    delta = 2.0 * state.profile.radius
    return NodeSensitivity(tight=delta, worst=delta, printed=delta, size=state.profile.radius)


def linear_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    at = state.zeros(node)
    factor = gains.linear_norm(node, at)
    printed = factor * state.compression(node)
    return stretch(state.inputs_of(node)[0], factor, printed=printed, rest=gains.norm_at_zero(node, at))


def reshape_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    flow = state.inputs_of(node)[0]
    source = state.graph[node.inputs[0]]
    if node.base in SAME_ENTRIES or None in (node.dtype, source.dtype) or not node.floating:
        return flow
    return stretch(flow, gains.copy_norm(node, state.zeros(node)))


def concat_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    flows = state.inputs_of(node)
    tight, worst, printed, size = (
        math.hypot(*(getattr(f, name) for f in flows)) for name in ("tight", "worst", "printed", "size")
    )
    size += gains.norm_at_zero(node, state.zeros(node))
    return NodeSensitivity(
        tight=tight, worst=worst, printed=printed, size=size, everywhere=all(f.everywhere for f in flows)
    )


def add_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    given = node.arguments
    at = state.zeros(node)
    alpha = abs(float(given.get("alpha", 1)))
    weights = (alpha, 1.0) if node.base == "rsub" else (1.0, alpha)
    parts = [
        stretch(state.sensitivities[name], weight * math.sqrt(math.prod(node.shape) / math.prod(at[name].shape)))
        for name, weight in zip((given["self"], given["other"]), weights, strict=True)
        if isinstance(name, str)
    ]
    if len(parts) == 1:
        return stretch(parts[0], 1.0, rest=gains.norm_at_zero(node, at))
    a, b = parts
    return NodeSensitivity(
        tight=a.tight + b.tight,
        worst=a.worst + b.worst,
        printed=paper_residual(a.printed, b.printed),
        size=a.size + b.size,
        everywhere=a.everywhere and b.everywhere,
    )


def scale_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    given, at = node.arguments, state.zeros(node)
    copies = math.sqrt(math.prod(node.shape) / math.prod(next(iter(at.values())).shape))
    if node.base in ("mul", "div"):
        moving_first = isinstance(given["self"], str)
        if (node.base == "div" and not moving_first) or given.get("rounding_mode"):
            problem = f"{node} rounds, or divides by what depends on the input"
            raise NoBound("sensitivity.division-unbounded", problem, "use a bounded slope")
        other = given["other"] if moving_first else given["self"]
        sizes = torch.as_tensor(other).detach().double().abs()
        factor = float(sizes.max()) if node.base == "mul" else float(1 / sizes.min())
        if node.drawn_below is not None:  # noise: its size for tight, what it cannot exceed for worst
            drawn = copies * math.sqrt(float(sizes.square().mean()))
            return stretch(state.inputs_of(node)[0], copies * node.drawn_below, tight=drawn)
    else:
        factor = 1.0
    return stretch(state.inputs_of(node)[0], factor * copies, rest=gains.norm_at_zero(node, at))


def pool_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    at = state.zeros(node)
    if "max" in node.base or "min" in node.base:
        return stretch(state.inputs_of(node)[0], gains.max_pool_norm(node, next(iter(at.values())).shape))
    return stretch(state.inputs_of(node)[0], gains.linear_norm(node, at), rest=gains.norm_at_zero(node, at))


def dropout_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    given = node.arguments
    if not given["train"] or given["p"] == 0:
        return state.inputs_of(node)[0]
    return stretch(state.inputs_of(node)[0], gains.dropout_slope(given["p"]), tight=1.0)


def embedding_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    """All n ids of a patient may change: √n times the distance between two rows of the table.

    tight: their root mean square distance. worst: twice the largest distance to the mean row.
    """
    table: Tensor = node.arguments["weight"].detach().double()
    around = (table - table.mean(0)).norm(dim=1)
    ids = math.sqrt(math.prod(state.graph[node.inputs[0]].shape))
    tight = ids * math.sqrt(2.0 * float(around.square().mean()))
    return NodeSensitivity(
        tight=tight, worst=2.0 * ids * float(around.max()), printed=tight, size=ids * float(table.norm(dim=1).max())
    )


_AGAIN = "profile the model again"
_KEEP_ROWS = {"view", "reshape", "_unsafe_view", "contiguous", "clone", "to", "squeeze", "unsqueeze"}


def activation_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    before = state.profile[node.name].pre_activation
    if before is None:
        raise NoBound("sensitivity.activation-not-profiled", f"the profile lacks the input of {node}", _AGAIN)
    limit = _largest_exponent(node, state.graph) if node.base == "exp" else 0.0
    printed, most = gains.activation_slopes(node, before.mean, math.sqrt(before.variance + EPSILON_N), limit)
    tight = gains.limit_slope(before.slope, most) if state.slopes == "empirical" else printed
    if node.base == "relu":
        printed = float(paper_relu_slope(before.mean, before.variance, EPSILON_N))
    elif node.base == "gelu" and node.arguments["approximate"] != "tanh":  # eq. 10 can be negative, a Δ cannot
        printed = max(float(paper_gelu_slope(before.mean, before.variance)), EPSILON_N)
    rest = gains.norm_at_zero(node, state.zeros(node))
    made = stretch(state.inputs_of(node)[0], most, tight=tight, printed=printed, rest=rest)
    if node.base == "exp":
        made = replace(made, size=min(made.size, most * math.sqrt(math.prod(node.shape))))
    return made


def _largest_exponent(node: Node, graph: TracedGraph) -> float:
    """What the input of exp cannot exceed, by a clamp before it; between them only factors > 0 and reshapes."""
    factor, source = 1.0, graph[node.inputs[0]]
    while source.base in SAME_ENTRIES or source.base == "mul":
        if source.base == "mul":
            given = [
                value for value in (source.arguments["self"], source.arguments["other"]) if not isinstance(value, str)
            ]
            scale = gains.single_number(given[0]) if given and source.drawn_below is None else None
            if scale is None or scale <= 0:
                break
            factor *= scale
        source = graph[source.inputs[0]]
    limit = source.arguments.get({"clamp": "max", "clamp_max": "max", "hardtanh": "max_val"}.get(source.base, ""))
    if not isinstance(limit, int | float):
        problem = f"{node} has no largest slope: nothing bounds its input from above"
        remedy = "clamp it: x.clamp(-4, 4).exp(), or (0.5 * x.clamp(-4, 4)).exp()"
        raise NoBound("sensitivity.exp-unbounded", problem, remedy)
    return factor * float(limit)


def normalisation_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    given, at, flow = node.arguments, state.zeros(node), state.inputs_of(node)[0]
    weight = given["weight"]
    gain = weight.detach().double() if isinstance(weight, Tensor) else torch.ones(1, dtype=torch.float64)
    steepest = float(gain.abs().max())
    rest = gains.norm_at_zero(node, at)
    fixed = node.base == "batch_norm" or (node.base == "instance_norm" and not given["use_input_stats"])
    if fixed:
        if given.get("training") or not isinstance(given["running_var"], Tensor):
            problem = f"{node} mixes patients: it normalises over the batch"
            raise NoBound("sensitivity.batchnorm", problem, "use lamina.fix(model)")
        variance = given["running_var"].double()
        factor = affine_norm_constant(gain, variance, given["eps"])
        printed = state.compression(node, float(variance.mean()), given["eps"])
        return stretch(flow, factor, printed=printed, rest=rest)
    eps = given["eps"]
    if eps is None:  # RMSNorm's default
        eps = torch.finfo(node.dtype or torch.float32).eps
    seen = torch.tensor(state.profile[node.name].divisor_variances, dtype=torch.float64)
    grouped = gain.reshape(len(seen), -1) if gain.numel() > 1 and len(seen) > 1 else gain.reshape(1, -1)
    tight = affine_norm_constant(grouped, seen.reshape(-1, 1), eps)
    worst = steepest / math.sqrt(eps) if eps > 0 else math.inf
    made = stretch(flow, worst, tight=tight, printed=state.compression(node, float(seen.mean()), eps), rest=rest)
    # a normalised group of n entries has norm ≤ √n, whatever comes in; at 0 only the bias is left
    most = steepest * math.sqrt(math.prod(node.shape)) + rest
    return replace(made, size=min(made.size, most))


def softmax_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    seen = state.profile[node.name]
    if seen.jacobian is None or seen.paper_norm is None:
        raise NoBound("sensitivity.attention-not-profiled", f"the profile lacks the weights of {node}", _AGAIN)
    made = stretch(state.inputs_of(node)[0], 0.5, tight=seen.jacobian, printed=seen.paper_norm)
    rows = math.prod(node.shape) / node.shape[node.arguments["dim"]]
    return replace(made, size=math.sqrt(rows))


def attention_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    """softmax(s·QKᵀ)V: Δ ≤ ‖A‖Δ_V + ‖J‖·s·‖V‖(‖K‖Δ_Q + ‖Q‖Δ_K), J the Jacobian of a row of the softmax.

    tight: mean norms on the proxy. worst: ‖A‖ ≤ √queries, ‖J‖ ≤ ½ and the sizes within the radius.
    printed: eq. 19 and 20, E[a_max(1-a_max)]·Δ_V.
    """
    given, seen = node.arguments, state.profile[node.name]
    if isinstance(given["attn_mask"], str):
        problem = f"the mask of {node} depends on the input"
        raise NoBound("sensitivity.mask-depends-on-input", problem, "use a fixed mask")
    if seen.jacobian is None or seen.paper_norm is None or len(seen.norms) != 4:
        raise NoBound("sensitivity.attention-not-profiled", f"the profile lacks the weights of {node}", _AGAIN)
    q, k, v = (state.of_argument(given[part]) for part in ("query", "key", "value"))
    shape = state.shape(given["query"])
    if given["enable_gqa"]:
        heads = state.shape(given["key"])
        k, v = (stretch(f, math.sqrt(shape[-3] / heads[-3])) for f in (k, v))
    s = abs(float(given["scale"])) if given["scale"] is not None else 1 / math.sqrt(shape[-1])
    kept = gains.dropout_slope(given["dropout_p"])
    rows = math.sqrt(shape[-2])
    weights, query, key, value = seen.norms
    logits = product_or_zero(k.size, q.worst) + product_or_zero(q.size, k.worst)
    return NodeSensitivity(
        tight=weights * v.tight + seen.jacobian * s * value * (key * q.tight + query * k.tight),
        worst=kept * (product_or_zero(rows, v.worst) + 0.5 * s * product_or_zero(v.size, logits)),
        printed=seen.paper_norm * v.printed,
        size=kept * rows * v.size,
        everywhere=False,
    )


def product_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    """Δ(ab) ≤ ‖b‖Δ_a + ‖a‖Δ_b, for entries as for matrices."""
    given = node.arguments
    if node.base == "mul":
        names = (given["self"], given["other"])
        a, b = (state.of_argument(name) for name in names)
        x, y = (math.hypot(state.profile[name].mean, state.profile[name].std) for name in names)
        # a factor that is repeated meets as many entries of the other
        x *= math.sqrt(math.prod(node.shape) / math.prod(state.graph[names[1]].shape))
        y *= math.sqrt(math.prod(node.shape) / math.prod(state.graph[names[0]].shape))
        left, right, alpha, rest, peak = a.size, b.size, 1.0, 0.0, None
    else:
        names = product_factors(node.base, given)
        shapes = [state.graph[name].shape for name in names]
        if shapes[0][:-2] != shapes[1][:-2]:
            problem = f"{node} multiplies {shapes[0]} by {shapes[1]}"
            raise NoBound("sensitivity.matrix-batches-differ", problem, "expand both to one batch")
        a, b = (state.of_argument(name) for name in names)
        x, y = state.profile[node.name].norms
        alpha = abs(float(given.get("alpha", 1)))
        rest = gains.euclidean_norm(given["self"]) if node.base == "baddbmm" else 0.0
        rows, peak = _attention_weight_bound(names[0], state)
        left, right = min(a.size, rows), b.size
    return NodeSensitivity(
        tight=alpha * (y * a.tight + x * b.tight),
        worst=alpha * (product_or_zero(right, a.worst) + product_or_zero(left, b.worst)),
        printed=alpha * (y * a.printed + x * b.printed) if peak is None else peak * b.printed,
        size=alpha * product_or_zero(left, right) + rest,
        everywhere=False,
    )


def _attention_weight_bound(name: str, state: PropagationState) -> tuple[float, float | None]:
    """If a node holds attention weights, some perhaps dropped: what their matrices' norm cannot exceed, and their peak.

    The rows sum to 1, or to 1/(1-p) at most after dropout, so that the norm is at most √rows times that.
    """
    node, kept, shape = state.graph[name], 1.0, state.graph[name].shape
    while node.kind is OperationKind.DROPOUT or node.base in _KEEP_ROWS:
        if node.kind is OperationKind.DROPOUT and node.arguments["train"]:
            kept *= gains.dropout_slope(node.arguments["p"])
        node = state.graph[node.inputs[0]]
    if node.kind is not OperationKind.SOFTMAX or node.arguments["dim"] not in (-1, len(node.shape) - 1):
        return math.inf, None
    if shape[-2:] != node.shape[-2:]:
        return math.inf, None
    return kept * math.sqrt(shape[-2]), state.profile[node.name].paper_norm


NodeRule = Callable[[Node, PropagationState], NodeSensitivity]

NODE_RULES: Mapping[OperationKind, NodeRule] = {
    OperationKind.INPUT: input_rule,
    OperationKind.LINEAR: linear_rule,
    OperationKind.CONV: linear_rule,
    OperationKind.ACTIVATION: activation_rule,
    OperationKind.ATTENTION: attention_rule,
    OperationKind.SOFTMAX: softmax_rule,
    OperationKind.NORM: normalisation_rule,
    OperationKind.ADD: add_rule,
    OperationKind.SCALE: scale_rule,
    OperationKind.PRODUCT: product_rule,
    OperationKind.RESHAPE: reshape_rule,
    OperationKind.CONCAT: concat_rule,
    OperationKind.POOL: pool_rule,
    OperationKind.RESAMPLE: pool_rule,
    OperationKind.REDUCE: pool_rule,
    OperationKind.DROPOUT: dropout_rule,
    OperationKind.EMBEDDING: embedding_rule,
}

_UNKNOWN_SLOPE_REMEDY = (
    "use operations with a known slope (linear and convolution layers, activations, LayerNorm, GroupNorm, RMSNorm, "
    "pooling, dropout, sums, attention, products with noise that is clamped to two numbers) "
    "between the input and the layers, or an allocation that needs no Δ"
)


def apply_rule(node: Node, state: PropagationState) -> NodeSensitivity:
    """The sensitivity of a node from those of its inputs; a refusal names the node."""
    try:
        return NODE_RULES[node.kind](node, state)
    except PlanError as error:
        if node.name in error.problem:
            raise
        raise NoBound("sensitivity.operation-refused", f"{node}: {error.problem}", error.remedy) from None


def refuse_unknown_operations(nodes: Sequence[Node]) -> None:
    """Refuse operations that no rule knows, all of them by name."""
    bad = [node for node in nodes if node.kind not in NODE_RULES]
    if bad:
        named = ", ".join(map(str, bad[:6])) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
        raise NoBound("sensitivity.slope-unknown", f"the slope of {named} is not known", _UNKNOWN_SLOPE_REMEDY)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSensitivity:
    """Δ at the output of a layer's last use, after the activation that directly follows it, if one does.

    tight       by local constants E|f'(Z)| over the inputs of the profile (or a Gaussian fit), norms as fixed affine maps,
                a+b at a sum.
                NOT a sensitivity bound: an expectation is no Lipschitz constant, and inputs exist that move the
                layer further. It may shape thresholds C; clipping to C is what makes a step private
    worst       by global suprema (eq. 6): no two inputs within the radius move the output further apart, up to the
                error of the spectral norms (typically within 1 %, not proven: lamina.allocate.measure.gains)
    printed     by eqs. 8, 10, 11 with γ forced into (0, 1], 13 as √(a²+b²), and 20, as the LSAB document has them;
                neither an expectation nor a bound, for comparison only
    everywhere  whether `worst`/Δ₀ is a Lipschitz constant on the whole space, or only within the radius
                (behind attention or a product of two activations, which have none on the whole space)
    node        the operation at whose output Δ is taken
    """

    name: str
    tight: float
    worst: float
    printed: float
    everywhere: bool
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityBounds:
    """Δ_l of every layer of a stack, from Δ₀ = 2·radius (token ids: from the rows of the embedding)."""

    radius: float
    proxy: str
    layers: tuple[LayerSensitivity, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerSensitivity:
        for layer in self.layers:
            if layer.name == name:
                return layer
        problem = f"no layer {name!r} has a bound"
        raise NoBound("sensitivity.unknown-layer", problem, f"use one of {', '.join(row.name for row in self.layers)}")

    @property
    def tight(self) -> tuple[float, ...]:
        return tuple(layer.tight for layer in self.layers)

    @property
    def worst(self) -> tuple[float, ...]:
        return tuple(layer.worst for layer in self.layers)

    @property
    def printed(self) -> tuple[float, ...]:
        return tuple(layer.printed for layer in self.layers)


GAMMA = ("all", "norm", "elsewhere", "epsilon", "none")
SLOPES = ("empirical", "gaussian")


def bounds(
    graph: TracedGraph, profile: ActivationProfile, stack: LayerStack, *, gamma: str = "all", slopes: str = "empirical"
) -> SensitivityBounds:
    """Δ of every layer of `stack`, by recursion through the traced graph.

    `profile` must be of the same model; the weights are those of `graph`. An operation between the input and a layer
    whose slope is not known is refused by name, as is a layer that the input does not reach, or that is zero.
    `gamma` says where the printed recursion has its factor γ of eq. 12: everywhere, at norm layers, at the others, or
    nowhere; "epsilon" is everywhere, with γ = ε/σ at norm layers.
    `slopes` says where the local constants of `tight` come from: "empirical", the mean slope over the inputs that were
    seen (definition 2 of the LSAB document); or "gaussian", over a Gaussian fitted to them (its assumption A3).
    """
    validate.one_of(PlanError, "sensitivity.gamma-unknown", GAMMA, gamma=gamma)
    validate.one_of(PlanError, "sensitivity.slopes-unknown", SLOPES, slopes=slopes)
    ends = {layer.name: _last_use(graph, layer.name, layer.parameters) for layer in stack}
    needed = _nodes_before(graph, [node.name for node in ends.values()])
    refuse_unknown_operations(needed)
    state = PropagationState(graph=graph, profile=profile, sensitivities={}, gamma=gamma, slopes=slopes)
    for node in needed:
        _refuse_other_model(node, profile)
        state.sensitivities[node.name] = apply_rule(node, state)
    layers = []
    for name, node in ends.items():
        flow = state.sensitivities[node.name]
        if math.isnan(flow.worst) or not (0 < flow.tight < math.inf and 0 < flow.printed < math.inf and flow.worst > 0):
            raise NoBound(
                "sensitivity.delta-not-positive",
                f"layer {name!r} has Δ tight {flow.tight:g}, worst {flow.worst:g}, printed {flow.printed:g} "
                f"at {node}; all must be > 0, and tight finite",
                "a weight or gain of zero, or a dead activation, stops every input there: initialise the layer anew, "
                "or use an allocation that needs no Δ",
            )
        deltas = {"tight": flow.tight, "worst": flow.worst, "printed": flow.printed}
        layers.append(LayerSensitivity(name=name, **deltas, everywhere=flow.everywhere, node=node.name))
    return SensitivityBounds(radius=profile.radius, proxy=profile.proxy, layers=tuple(layers))


def _last_use(graph: TracedGraph, name: str, parameters: tuple[str, ...]) -> Node:
    uses = graph.uses(parameters)
    if not uses:
        problem = f"layer {name!r} is not used between the input and the output of {graph.model}"
        remedy = "freeze it with requires_grad_(False), or trace with an example that reaches it"
        raise NoBound("sensitivity.layer-not-used", problem, remedy)
    return graph.output_of(uses[-1])


def _nodes_before(graph: TracedGraph, names: list[str]) -> list[Node]:
    """The nodes on the way from the input to any of these, in order."""
    wanted = set(names)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _refuse_other_model(node: Node, profile: ActivationProfile) -> None:
    if node.dtype is not None and node.floating and profile[node.name].operation != node.operation:
        problem = f"{node} is not in the profile of {profile.model}"
        raise NoBound("sensitivity.profile-of-other-model", problem, "profile this model")
