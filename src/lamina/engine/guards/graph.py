"""The walk over the autograd graph of the losses, before anything is differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lamina.engine.layers.layer_rule import CoveredFunction, RuleCall, module_above
from lamina.errors import CouplingError, EngineError, UnclippedGradient


@dataclass(frozen=True)
class LossGraph:
    """What a backward pass from the losses will meet."""

    uses: tuple[RuleCall, ...]
    nodes: dict[RuleCall, Any] = field(repr=False)
    signature: int  # of the kinds of all nodes, in the order of the walk: equal computations have equal ones

    def leads_to(self, wanted: Callable[[RuleCall], bool]) -> set[RuleCall]:
        """The uses below whose input lies a wanted use, so that their input's gradient is needed."""
        memo: dict[Any, bool] = {}

        def reaches(root: Any) -> bool:
            stack = [(root, False)]
            while stack:
                node, done = stack.pop()
                children = [child for child, _ in node.next_functions if child is not None]
                if done:
                    use = getattr(node, "lamina_use", None)
                    memo[node] = (use is not None and wanted(use)) or any(memo[c] for c in children)
                elif node not in memo:
                    memo[node] = False
                    stack.append((node, True))
                    stack.extend((c, False) for c in children if c not in memo)
            return memo[root]

        found = set()
        for use, node in self.nodes.items():
            below = node.next_functions[0][0]  # the input; the parameters follow
            if below is not None and reaches(below):
                found.add(use)
        return found


def walk_graph(losses: Tensor, names: Mapping[int, str]) -> LossGraph:
    """Every node from the losses down. `names` maps id(parameter) to its name, for every parameter.

    Refused: a trainable tensor entered by anything but the engine's Function (an L2 penalty,
    `F.linear(x, module.weight)`), a leaf that is not the model's, a checkpoint that hides its graph.
    """
    if losses.grad_fn is None:
        problem = "the losses have no autograd graph: no tensor that the plan trains was used to compute them"
        remedy = "compute them from model(batch.x) with gradients enabled"
        raise EngineError("engine.losses-without-graph", problem, remedy)
    uses: dict[RuleCall, Any] = {}
    kinds: list[type] = []
    seen: set[Any] = {losses.grad_fn}
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        kind = type(node)
        kinds.append(kind)
        use = node.lamina_use if kind is _COVERED else None
        if use is not None:
            uses[use] = node
        elif kind not in _HARMLESS:
            _refuse_node(node)
        for place, (child, _) in enumerate(node.next_functions):
            if child is None or child in seen:
                continue
            if type(child).__name__ == "AccumulateGrad":
                if use is None or place == 0:  # place 0 is the input: a tensor used as data is not clipped
                    _refuse_leaf(child.variable, names, node)
            else:
                seen.add(child)
                stack.append(child)
    return LossGraph(tuple(uses), uses, hash(tuple(kinds)))


_COVERED: type = CoveredFunction._backward_cls
_HARMLESS: set[type] = set()  # kinds of nodes that are never refused


def _refuse_node(node: Any) -> None:
    name = type(node).__name__
    if name == "CheckpointFunctionBackward":
        problem = "a reentrant activation checkpoint hides the layers inside it"
        remedy = "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        raise UnclippedGradient("engine.reentrant-checkpoint", problem, remedy)
    if "BatchNorm" in name and getattr(node, "_saved_training", False) and node._saved_input.shape[0] > 1:
        problem = f"{name}: batch normalisation in training mode mixes contributions"
        remedy = "use GroupNorm, or `model, report = lamina.fix(model)`, or put the layer in eval mode"
        raise CouplingError("engine.batchnorm", problem, remedy)
    if "BatchNorm" not in name:
        _HARMLESS.add(type(node))


def _refuse_leaf(leaf: Tensor, names: Mapping[int, str], node: Any) -> None:
    name = names.get(id(leaf))
    if name is None:
        problem = f"the losses depend on a trainable tensor of shape {tuple(leaf.shape)} that is not the model's"
        remedy = "detach it, or make it a parameter of the model so that the plan covers it"
        raise UnclippedGradient("engine.foreign-tensor", problem, remedy)
    problem = f"{type(node).__name__} uses tensor '{name}' outside the engine: its gradient would not be clipped"
    owner = name.rpartition(".")[0]
    remedy = (
        "use the optimiser's weight decay instead of a penalty in the losses, and call the module that owns the tensor"
    )
    if owner:
        user = module_above(owner)
        remedy += f"; where module {user!r} uses it without that call, give Engine(..., per_contribution=[{user!r}])"
    raise UnclippedGradient("engine.tensor-used-directly", problem, remedy)
