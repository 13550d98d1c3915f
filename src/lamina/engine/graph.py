"""The walk before each backward pass: covered tensors may be entered only through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lamina.engine.function import Use
from lamina.errors import CouplingError, EngineError, UnclippedGradient


@dataclass(frozen=True)
class Graph:
    """What a backward pass from the losses will meet."""

    uses: tuple[Use, ...]
    nodes: dict[Use, Any] = field(repr=False)
    signature: int  # of the kinds of all nodes, in the order of the walk: equal computations have equal ones

    def leads_to(self, wanted: Callable[[Use], bool]) -> set[Use]:
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


def walk(losses: Tensor, names: dict[int, str]) -> Graph:
    """Every node from the losses down. `names` maps id(parameter) to its name, for every parameter.

    Refused: a trainable tensor entered by anything but the engine's Function (an L2 penalty,
    `F.linear(x, module.weight)`), a leaf that is not the model's, a checkpoint that hides its graph.
    """
    if losses.grad_fn is None:
        raise EngineError(
            "engine.losses-carry-no",
            "the losses carry no graph: nothing that the plan trains was used to compute them",
            "compute them from model(batch.x) with gradients enabled",
        )
    uses: dict[Use, Any] = {}
    kinds: list[type] = []
    seen: set[Any] = {losses.grad_fn}
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        kinds.append(type(node))
        use = getattr(node, "lamina_use", None)
        if use is not None:
            uses[use] = node
        else:
            _refuse(node)
        for place, (child, _) in enumerate(node.next_functions):
            if child is None:
                continue
            leaf = getattr(child, "variable", None)
            if leaf is not None:
                if use is None or place == 0:  # place 0 is the input: a tensor used as data is not clipped
                    _refuse_leaf(leaf, names, node)
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    return Graph(tuple(uses), uses, hash(tuple(kinds)))


def _refuse(node: Any) -> None:
    name = type(node).__name__
    if name == "CheckpointFunctionBackward":
        raise UnclippedGradient(
            "engine.reentrant-activation-checkpoint",
            "a reentrant activation checkpoint hides the layers inside it",
            "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
        )
    if "BatchNorm" in name and getattr(node, "_saved_training", False) and node._saved_input.shape[0] > 1:
        raise CouplingError(
            "engine.batch-normalisation-training",
            f"{name}: batch normalisation in training mode mixes contributions",
            "use GroupNorm, or `model, report = lamina.fix(model)`, or put the layer in eval mode",
        )


def _refuse_leaf(leaf: Tensor, names: dict[int, str], node: Any) -> None:
    name = names.get(id(leaf))
    if name is None:
        raise UnclippedGradient(
            "engine.losses-depend-tensor",
            f"the losses depend on a tensor of shape {tuple(leaf.shape)} that requires a gradient "
            "and is not the model's",
            "detach it, or make it a parameter of the model so that the plan covers it",
        )
    raise UnclippedGradient(
        "engine.tensor-used-outside",
        f"tensor '{name}' is used by {type(node).__name__} outside the engine: its gradient would not be clipped",
        "call the module that owns it instead of using its weight directly, or leave penalties out of the losses "
        "(weight decay belongs to the optimiser)",
    )
