"""The traced graph of a model: which operations lie between an input and every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lamina.errors import PlanError
from lamina.sensitivity.example import first
from lamina.sensitivity.kinds import LIKE_ANOTHER, RANDOM, SHAPE_ONLY, Kind, base, classify
from lamina.sensitivity.program import Program, bound, export, isolated

Call = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One operation whose value depends on the input.

    operation   as ATen calls it, for example 'aten.conv1d.default'; 'input' for an input
    inputs      the nodes it reads that depend on the input, in the order of the arguments, as often as they occur
    parameters  the tensors of the model it reads, directly or through operations on tensors alone
                (a weight behind weight_norm, a table of positions), as in `model.named_parameters()`
    module      the module in whose forward it stands
    shape       of one patient; () if it gives several tensors
    dtype       of its entries; None if it gives several tensors
    arguments   everything it is called with, by name: tensors that do not depend on the input are there as
                tensors, the others as the names of nodes
    call        the operation itself, with other values for the nodes it reads
    """

    name: str
    operation: str
    kind: Kind
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    call: Call | None = field(default=None, repr=False, compare=False)

    @property
    def floating(self) -> bool:
        """Whether distances between its values mean anything."""
        return self.dtype is None or self.dtype.is_floating_point

    @property
    def base(self) -> str:
        """The operation without library, overload and in-place underscore."""
        return base(self.operation)

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.name} ({self.operation}{where})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """The operations of a model that depend on its input, in the order in which they run, for one patient.

    Its tensors are those of the model when it was traced: after training, trace again.
    """

    model: str
    nodes: tuple[Node, ...]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise PlanError(
            "measure.graph-no-node",
            f"the graph has no node {name!r}",
            f"its nodes are {', '.join(n.name for n in self.nodes)}",
        )

    def readers(self, name: str) -> tuple[Node, ...]:
        """The nodes that read a node."""
        return tuple(node for node in self.nodes if name in node.inputs)

    def residual(self) -> tuple[Node, ...]:
        """The sums of two branches that both depend on the input."""
        return tuple(node for node in self.nodes if node.kind is Kind.ADD and len(node.inputs) == 2)

    def output_of(self, node: Node) -> Node:
        """The activation that directly follows a node and is all that reads it, or else the node itself."""
        readers = self.readers(node.name)
        return readers[0] if len(readers) == 1 and readers[0].kind is Kind.ACTIVATION else node

    def uses(self, parameters: tuple[str, ...]) -> tuple[Node, ...]:
        """The nodes that read any of these tensors, in order."""
        wanted = set(parameters)
        return tuple(node for node in self.nodes if wanted.intersection(node.parameters))

    def __str__(self) -> str:
        width = max(len(node.name) for node in self.nodes)
        lines = [f"{self.model}: {len(self.nodes)} operations depend on the input"]
        for node in self.nodes:
            sizes = "×".join(map(str, node.shape[1:])) or "-"
            reads = ", ".join(node.inputs)
            lines.append(f"{node.name:<{width}}  {node.kind.value:<10}  {sizes:>12}  {reads}".rstrip())
        return "\n".join(lines)


def trace(model: nn.Module, example: Any) -> Graph:
    """Read the graph of `model` from one forward pass on `example`, which is public or made up.

    `example` is a tensor, a tuple of arguments or a dict of keyword arguments; the first axis of every tensor counts
    patients, and only the first patient is used. The model is traced in training mode with BatchNorm in evaluation
    mode. Modes, buffers and random state are left as they were.
    """
    return traced(model, example)[0]


def traced(model: nn.Module, example: Any) -> tuple[Graph, Program]:
    """The graph, and the program for one patient that it was read from."""
    one = first(example, 1)
    program = export(model, one)
    moving = {node.name for node in read(model, program)}
    constants: dict[str, Any] = {}

    def keep(node: fx.Node, given: Mapping[str, Any], value: Any) -> None:
        if node.name not in moving:  # as it is now: an operation in place may overwrite it later
            constants[node.name] = value.detach().clone().cpu() if isinstance(value, Tensor) else value

    with isolated(0):
        program.run(model, one, keep)
    return read(model, program, constants), program


def read(model: nn.Module, program: Program, constants: Mapping[str, Any] | None = None) -> Graph:
    """The graph of a traced program; with the values of its constants, `arguments` and `call` are there too."""
    owners: dict[str, tuple[str, ...]] = {}  # tensors of the model that a constant node is made of
    moving: dict[str, Node] = {}
    random: set[str] = set()  # constants that are drawn anew in every pass
    canonical = _canonical(model)
    for placeholder, origin, name in program.leaves:
        owners[placeholder] = (canonical[name],) if origin == "parameter" else ()
    for node in program.nodes:
        if node.op == "output":
            continue
        made = node.meta.get("val")
        if node.name in program.inputs:
            if isinstance(made, Tensor):
                moving[node.name] = Node(
                    name=node.name, operation="input", kind=Kind.INPUT, inputs=(), parameters=(), module="",
                    shape=tuple(made.shape), dtype=made.dtype,
                )  # fmt: skip
            continue
        reads = _reads(node)
        inside = tuple(name for name in reads if name in moving)
        if base(str(node.target)) in LIKE_ANOTHER:
            inside = inside[: int(bool(reads) and reads[0] in moving)]
        held = tuple(dict.fromkeys(p for name in reads for p in owners.get(name, ())))
        operation = str(node.target)
        chance = not random.isdisjoint(reads)
        if node.op != "call_function" or not inside or base(operation) in SHAPE_ONLY:
            owners.setdefault(node.name, held)
            if chance or base(operation) in RANDOM:
                random.add(node.name)
            continue
        operation = "getitem" if "getitem" in operation else operation
        moving[node.name] = Node(
            name=node.name, operation=operation, kind=_kind(operation, inside, moving, made, chance), inputs=inside,
            parameters=held, module=_module(node), shape=tuple(made.shape) if isinstance(made, Tensor) else (),
            dtype=made.dtype if isinstance(made, Tensor) else None,
            arguments={} if constants is None else _arguments(node, constants),
            call=None if constants is None else _call(node, constants),
        )  # fmt: skip
    if not moving:
        raise PlanError(
            "measure.given-no-tensor",
            f"{type(model).__name__} was given no tensor",
            "give an example that holds a tensor",
        )
    return Graph(model=type(model).__name__, nodes=tuple(moving.values()))


def _kind(
    operation: str, inside: tuple[str, ...], moving: Mapping[str, Node], made: Any, chance: bool
) -> Kind:
    """The kind of an operation in its place.

    Whole numbers may only be moved about and looked up in a table. What is drawn anew in every pass may only be added:
    a factor that was drawn once bounds nothing.
    """
    kind = classify(operation, len(inside))
    whole = any(not moving[name].floating for name in inside)
    if kind is Kind.EMBEDDING:
        return kind if whole else Kind.OTHER
    if whole and (kind is not Kind.RESHAPE or (isinstance(made, Tensor) and made.is_floating_point())):
        return Kind.OTHER
    return Kind.OTHER if chance and kind not in (Kind.ADD, Kind.CONCAT) else kind


def _reads(node: fx.Node) -> list[str]:
    """Every node among the arguments, in order and as often as it occurs."""
    found: list[str] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n.name))
    return found


def _call(node: fx.Node, constants: Mapping[str, Any]) -> Call:
    def call(values: Mapping[str, Any]) -> Any:
        """The operation in the precision of the values that are given."""
        wide = torch.float64 in {getattr(value, "dtype", None) for value in values.values()}

        def put(n: fx.Node) -> Any:
            value = values[n.name] if n.name in values else constants[n.name]
            return (
                value.double() if wide and isinstance(value, Tensor) and value.is_floating_point() else value
            )

        args, kwargs = fx.map_arg((node.args, node.kwargs), put)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return call


def _arguments(node: fx.Node, constants: Mapping[str, Any]) -> dict[str, Any]:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: constants.get(n.name, n.name))
    return bound(node, args, kwargs)


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return str(paths[-1]) if paths else ""


def _canonical(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter → its name in `model.named_parameters()`."""
    known = {id(tensor): name for name, tensor in model.named_parameters()}
    return {name: known[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False)}
