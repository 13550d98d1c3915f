"""The recursion through operations that bend: activations, normalisation, softmax, attention, products."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lamina.errors import NoBound
from lamina.sensitivity import gains
from lamina.sensitivity.affine import affine_norm_constant
from lamina.sensitivity.flow import Depth, Flow, stretched, times
from lamina.sensitivity.graph import Node
from lamina.sensitivity.kinds import Kind
from lamina.sensitivity.lipschitz import local, local_of, supremum
from lamina.sensitivity.observe import factors
from lamina.sensitivity.printed import gelu_printed, relu_printed

_NAMES = {
    "log_sigmoid": "logsigmoid",
    "abs": "identity",
    "clamp": "hardtanh",
    "clamp_min": "hardtanh",
    "clamp_max": "hardtanh",
}
_FUNCTIONS = {
    "sin": (torch.sin, 1.0),
    "cos": (torch.cos, 1.0),
    "atan": (torch.atan, 1.0),
    "erf": (torch.erf, 2 / math.sqrt(math.pi)),
}
_OPTIONS = {
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "celu": ("alpha",),
    "softplus": ("beta",),
    "softshrink": ("lambd",),
}
_FAR = 1e300
_KEEP_ROWS = {"view", "reshape", "_unsafe_view", "contiguous", "clone", "to", "squeeze", "unsqueeze"}


def activation(node: Node, depth: Depth) -> Flow:
    before = depth.profile[node.name].before
    if before is None:
        raise NoBound(
            "measure.no-pre-activation",
            f"{node} has no pre-activation in the profile",
            "profile the model again",
        )
    mean, std = before.mean, math.sqrt(before.variance + depth.profile.epsilon_n)
    flow = depth.into(node)[0]
    if node.base in _FUNCTIONS:
        function, most = _FUNCTIONS[node.base]
        tight = printed = min(float(local_of(function, mean, std)), most)
    elif node.base == "prelu":
        slopes = node.arguments["weight"].detach().double().abs()
        tight = printed = local("leaky_relu", mean, std, negative_slope=float(slopes.mean()))
        most = max(1.0, float(slopes.max()))
    else:
        name, options = _named(node)
        tight = printed = local(name, mean, std, **options)
        most = supremum(name, **options)
        if name == "relu":
            printed = float(relu_printed(before.mean, before.variance, depth.profile.epsilon_n))
        elif name == "gelu":  # eq. 10 can be negative, a Δ cannot
            printed = max(float(gelu_printed(before.mean, before.variance)), depth.profile.epsilon_n)
    return stretched(flow, most, tight=tight, printed=printed, rest=gains.offset(node, depth.at(node)))


def _named(node: Node) -> tuple[str, dict[str, float]]:
    """An activation as lipschitz.py knows it."""
    given = node.arguments
    name = _NAMES.get(node.base, node.base)
    if name == "gelu" and given["approximate"] == "tanh":
        return "gelu_tanh", {}
    if name == "hardtanh":
        low, high = given.get("min_val", given.get("min")), given.get("max_val", given.get("max"))
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            raise NoBound("measure.clamps-tensors", f"{node} clamps to tensors", "clamp to two numbers")
        return name, {
            "min_val": -_FAR if low is None else float(low),
            "max_val": _FAR if high is None else float(high),
        }
    if name == "elu" and not (float(given["scale"]) == float(given["input_scale"]) == 1):
        raise NoBound(
            "measure.scales-input-output", f"{node} scales its input or output", "use ELU, SELU or CELU"
        )
    return name, {option: float(given[option]) for option in _OPTIONS.get(name, ())}


def normalisation(node: Node, depth: Depth) -> Flow:
    given, at, flow = node.arguments, depth.at(node), depth.into(node)[0]
    weight = given["weight"]
    gain = weight.detach().double() if isinstance(weight, Tensor) else torch.ones(1, dtype=torch.float64)
    steepest = float(gain.abs().max())
    rest = gains.offset(node, at)
    fixed = node.base == "batch_norm" or (node.base == "instance_norm" and not given["use_input_stats"])
    if fixed:
        if given.get("training") or not isinstance(given["running_var"], Tensor):
            raise NoBound(
                "measure.normalises-over-batch",
                f"{node} normalises over the batch, which mixes patients",
                "use GroupNorm: lamina.fix(model)",
            )
        factor = affine_norm_constant(gain, given["running_var"].double(), given["eps"])
        return stretched(flow, factor, printed=depth.compression(node), rest=rest)
    eps = given["eps"]
    if eps is None:  # RMSNorm's default
        eps = torch.finfo(node.dtype or torch.float32).eps
    seen = torch.tensor(depth.profile[node.name].seen, dtype=torch.float64)
    grouped = gain.reshape(len(seen), -1) if gain.numel() > 1 and len(seen) > 1 else gain.reshape(1, -1)
    tight = affine_norm_constant(grouped, seen.reshape(-1, 1), eps)
    worst = steepest / math.sqrt(eps) if eps > 0 else math.inf
    made = stretched(flow, worst, tight=tight, printed=depth.compression(node), rest=rest)
    # a normalised group of n entries has norm ≤ √n, whatever comes in; at 0 only the bias is left
    most = steepest * math.sqrt(math.prod(node.shape)) + rest
    return replace(made, size=min(made.size, most))


def softmax(node: Node, depth: Depth) -> Flow:
    seen = depth.profile[node.name]
    if seen.jacobian is None or seen.peak is None:
        raise NoBound(
            "measure.no-attention-weights-profile",
            f"{node} has no attention weights in the profile",
            "profile the model again",
        )
    made = stretched(depth.into(node)[0], 0.5, tight=seen.jacobian, printed=seen.peak)
    rows = math.prod(node.shape) / node.shape[node.arguments["dim"]]
    return replace(made, size=math.sqrt(rows))


def attention(node: Node, depth: Depth) -> Flow:
    """softmax(s·QKᵀ)V: Δ ≤ ‖A‖Δ_V + ‖J‖·s·‖V‖(‖K‖Δ_Q + ‖Q‖Δ_K), J the Jacobian of a row of the softmax.

    tight: mean norms on the proxy. worst: ‖A‖ ≤ √queries, ‖J‖ ≤ ½ and the sizes within the radius.
    printed: eq. 19 and 20, E[a_max(1-a_max)]·Δ_V.
    """
    given, seen = node.arguments, depth.profile[node.name]
    if isinstance(given["attn_mask"], str):
        raise NoBound(
            "measure.mask-depends-input",
            f"{node} has a mask that depends on the input",
            "use a mask that is the same for all inputs",
        )
    if seen.jacobian is None or seen.peak is None or len(seen.norms) != 4:
        raise NoBound(
            "measure.no-attention-weights-profile",
            f"{node} has no attention weights in the profile",
            "profile the model again",
        )
    q, k, v = (depth.of(given[part]) for part in ("query", "key", "value"))
    shape = depth.shape(given["query"])
    if given["enable_gqa"]:
        heads = depth.shape(given["key"])
        k, v = (stretched(f, math.sqrt(shape[-3] / heads[-3])) for f in (k, v))
    s = abs(float(given["scale"])) if given["scale"] is not None else 1 / math.sqrt(shape[-1])
    kept = supremum("dropout", p=float(given["dropout_p"]))
    rows = math.sqrt(shape[-2])
    weights, query, key, value = seen.norms
    logits = times(k.size, q.worst) + times(q.size, k.worst)
    return Flow(
        tight=weights * v.tight + seen.jacobian * s * value * (key * q.tight + query * k.tight),
        worst=kept * (times(rows, v.worst) + 0.5 * s * times(v.size, logits)),
        printed=seen.peak * v.printed,
        size=kept * rows * v.size,
        everywhere=False,
    )


def product(node: Node, depth: Depth) -> Flow:
    """Δ(ab) ≤ ‖b‖Δ_a + ‖a‖Δ_b, for entries as for matrices."""
    given = node.arguments
    if node.base == "mul":
        names = (given["self"], given["other"])
        a, b = (depth.of(name) for name in names)
        x, y = (math.hypot(depth.profile[name].mean, depth.profile[name].std) for name in names)
        # a factor that is repeated meets as many entries of the other
        x *= math.sqrt(math.prod(node.shape) / math.prod(depth.graph[names[1]].shape))
        y *= math.sqrt(math.prod(node.shape) / math.prod(depth.graph[names[0]].shape))
        left, right, alpha, rest, peak = a.size, b.size, 1.0, 0.0, None
    else:
        names = factors(node.base, given)
        shapes = [depth.graph[name].shape for name in names]
        if shapes[0][:-2] != shapes[1][:-2]:
            raise NoBound(
                "measure.multiplies-matrices",
                f"{node} multiplies matrices {shapes[0]} by {shapes[1]}",
                "expand both to one batch first",
            )
        a, b = (depth.of(name) for name in names)
        x, y = depth.profile[node.name].norms
        alpha = abs(float(given.get("alpha", 1)))
        rest = gains.norm(given["self"]) if node.base == "baddbmm" else 0.0
        rows, peak = _weights(names[0], depth)
        left, right = min(a.size, rows), b.size
    return Flow(
        tight=alpha * (y * a.tight + x * b.tight),
        worst=alpha * (times(right, a.worst) + times(left, b.worst)),
        printed=alpha * (y * a.printed + x * b.printed) if peak is None else peak * b.printed,
        size=alpha * times(left, right) + rest,
        everywhere=False,
    )


def _weights(name: str, depth: Depth) -> tuple[float, float | None]:
    """If a node holds attention weights, some perhaps dropped: what their matrices' norm cannot exceed, and their peak.

    The rows sum to 1, or to 1/(1-p) at most after dropout, so that the norm is at most √rows times that.
    """
    node, kept, shape = depth.graph[name], 1.0, depth.graph[name].shape
    while node.kind is Kind.DROPOUT or node.base in _KEEP_ROWS:
        if node.kind is Kind.DROPOUT and node.arguments["train"]:
            kept *= supremum("dropout", p=float(node.arguments["p"]))
        node = depth.graph[node.inputs[0]]
    if node.kind is not Kind.SOFTMAX or node.arguments["dim"] not in (-1, len(node.shape) - 1):
        return math.inf, None
    if shape[-2:] != node.shape[-2:]:
        return math.inf, None
    return kept * math.sqrt(shape[-2]), depth.profile[node.name].peak
