"""The traced graph of a model: which operations lie between its input and every layer."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lamina.errors import NoBound, PlanError
from lamina.plan.layer_stack import call_arguments

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class OperationKind(enum.StrEnum):
    """The families of operations that the recursion through depth tells apart."""

    INPUT = "input"
    LINEAR = "linear"
    CONV = "conv"
    ACTIVATION = "activation"
    ATTENTION = "attention"
    SOFTMAX = "softmax"
    NORM = "norm"
    ADD = "add"
    SCALE = "scale"
    PRODUCT = "product"  # of two tensors that both depend on the input
    RESHAPE = "reshape"  # moves, drops or repeats entries, computes nothing
    CONCAT = "concat"
    POOL = "pool"
    RESAMPLE = "resample"
    REDUCE = "reduce"
    DROPOUT = "dropout"
    EMBEDDING = "embedding"
    OTHER = "other"


def _kinds_by_operation() -> dict[str, OperationKind]:
    families = {
        OperationKind.LINEAR: "linear addmm mm matmul bmm baddbmm mv einsum",
        OperationKind.CONV: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
        OperationKind.ACTIVATION: (
            "relu relu6 gelu silu tanh sigmoid elu softplus leaky_relu hardtanh clamp clamp_min clamp_max "
            "selu celu mish hardswish hardsigmoid log_sigmoid softshrink prelu abs sin cos atan erf exp"
        ),
        OperationKind.ATTENTION: "scaled_dot_product_attention",
        OperationKind.SOFTMAX: "softmax _softmax",
        OperationKind.NORM: "layer_norm group_norm batch_norm instance_norm rms_norm",
        OperationKind.ADD: "add sub rsub",
        OperationKind.SCALE: "mul div neg masked_fill where",
        OperationKind.RESHAPE: (
            "view reshape _unsafe_view view_as reshape_as permute transpose t movedim flatten unflatten squeeze "
            "unsqueeze contiguous clone alias detach to type_as _to_copy select slice narrow split "
            "split_with_sizes chunk unbind getitem expand expand_as repeat repeat_interleave tile flip roll "
            "index_select index diagonal tensor_split swapaxes numpy_T positive lift_fresh_copy float double half "
            "pixel_shuffle pixel_unshuffle channel_shuffle"
        ),
        OperationKind.CONCAT: "cat concat concatenate stack hstack vstack",
        OperationKind.POOL: (
            "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
            "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
            "amax amin"
        ),
        OperationKind.RESAMPLE: (
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
            "upsample_trilinear3d pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d "
            "replication_pad2d"
        ),
        OperationKind.REDUCE: "mean sum",
        OperationKind.DROPOUT: "dropout feature_dropout",
        OperationKind.EMBEDDING: "embedding",
    }
    return {name: kind for kind, names in families.items() for name in names.split()}


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPERATION_KINDS = _kinds_by_operation()
"""Operation of ATen, in-place underscore removed, → its kind when exactly one tensor depends on the input."""

SHAPE_ONLY = _word_set(
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty "
    "sym_size sym_numel sym_stride _assert_tensor_metadata"
)
"""Operations that read no value of their argument, only its shape and type: what they give is no function of it."""

RANDOM = _word_set(
    "rand randn rand_like randn_like randint randint_like randperm normal bernoulli uniform exponential multinomial "
    "dropout feature_dropout native_dropout"
)
"""Operations that draw."""

READS_FIRST_ARGUMENT_ONLY = _word_set("view_as reshape_as expand_as type_as to")
"""Operations that read only the shape or the type of what follows their first argument."""

PRODUCTS = _word_set("mul matmul bmm mm baddbmm")
"""Operations that are bilinear in two tensors."""

SAME_ENTRIES = _word_set(
    "view reshape _unsafe_view view_as reshape_as permute transpose t movedim flatten unflatten squeeze unsqueeze "
    "contiguous clone alias detach flip roll swapaxes numpy_T positive pixel_shuffle pixel_unshuffle "
    "channel_shuffle"
)
"""Reshapes that keep every entry exactly once, hence every moment."""


def base_operation(operation: str) -> str:
    """'aten.relu_.default' → 'relu': the name without library, overload and in-place underscore."""
    name = operation.split(".")[1] if operation.startswith("aten.") else operation
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def classify(operation: str, moving: int) -> OperationKind:
    """The kind of an operation with `moving` arguments that depend on the input (one counted as often as it occurs).

    Unknown is OTHER, never guessed: what is OTHER is refused by name where a bound would have to pass through it.
    """
    name = base_operation(operation)
    if moving >= 2 and name in PRODUCTS:
        return OperationKind.PRODUCT if moving == 2 else OperationKind.OTHER
    kind = OPERATION_KINDS.get(name, OperationKind.OTHER)
    several = {OperationKind.ADD: 2, OperationKind.ATTENTION: 3, OperationKind.CONCAT: moving}
    return kind if moving <= several.get(kind, 1) else OperationKind.OTHER


def first_patients(example: Any, count: int) -> Any:
    """The first `count` patients of an example."""
    args, kwargs = call_arguments(example)
    leaves = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf.ndim == 0 or leaf.shape[0] < count or leaf.shape[0] != leaves[0].shape[0]:
            problem = f"a tensor of the example has shape {tuple(leaf.shape)}"
            remedy = f"give tensors (patients, …) of one length >= {count}"
            raise PlanError("sensitivity.example-count", problem, remedy)
    if not leaves:
        problem = f"the example is a {type(example).__name__} without a tensor"
        raise PlanError("sensitivity.no-tensor", problem, "give model inputs")

    return map_arguments(example, lambda value: value[:count] if isinstance(value, Tensor) else value)


def map_arguments(example: Any, put: Callable[[Any], Any]) -> Any:
    """The example with every argument replaced."""
    if isinstance(example, Mapping):
        return {key: put(value) for key, value in example.items()}
    return tuple(map(put, example)) if isinstance(example, tuple) else put(example)


def patient_count(example: Any) -> int:
    """How many patients a batch holds."""
    first_patients(example, 0)
    args, kwargs = call_arguments(example)
    return next(int(t.shape[0]) for t in (*args, *kwargs.values()) if isinstance(t, Tensor))


NodeCallback = Callable[[fx.Node, Mapping[str, Any], Any], None]
"""Called with every node, its arguments by name and its value, in order, before a later node can overwrite them."""


@dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """`torch.export` of a model at one batch size. It holds no tensor of the model: they are given to `run`.

    An operation in place is a node like any other: of `relu_(h); h + 1` the sum reads the result of relu_.
    """

    module: fx.GraphModule
    leaves: tuple[tuple[str, str, str], ...]  # placeholder, where it comes from, name there
    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    layout: Any

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    def flat(self, example: Any) -> list[Any]:
        """The leaves of an example in the order of `inputs`."""
        leaves: list[Any] = self.layout.flatten_up_to(call_arguments(example))
        return leaves

    def run(self, model: nn.Module, example: Any, see: NodeCallback) -> None:
        """One forward pass. Buffers are copied first, so that what writes to them writes to a copy."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        given = iter(self.flat(example))
        values: list[Any] = []
        for _, origin, name in self.leaves:
            if origin == "parameter":
                values.append(parameters[name].detach())
            elif origin == "buffer":
                values.append(buffers[name].detach().clone())
            elif origin == "constant":
                value = self.constants[name]
                values.append(value.detach().clone() if isinstance(value, Tensor) else value)
            else:
                values.append(next(given))
        with torch.no_grad():
            _ObservedInterpreter(self.module, see).run(*values)


class _ObservedInterpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, see: NodeCallback) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._see = see

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self._see(n, arguments_by_name(n, args, kwargs), value)
        return value


def arguments_by_name(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names in the operation's schema, defaults filled in; by position where there is no schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value for i, value in enumerate(args)} | dict(kwargs)
    made = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    made |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    return made | dict(kwargs)


def export(model: nn.Module, example: Any) -> TracedProgram:
    """Trace `model` in training mode, BatchNorm in evaluation mode; the model is left as it was found."""
    args, kwargs = call_arguments(example)
    try:
        with training_mode(model), isolated_rng(), _without_export_warnings():
            exported = torch.export.export(model, args, kwargs or None)
    except Exception as error:
        first = str(error).strip().splitlines()
        raise NoBound(
            "sensitivity.model-not-traceable",
            f"{type(model).__name__} cannot be traced by torch.export: "
            f"{type(error).__name__}: {first[0] if first else ''}",
            "give an example that model(...) accepts (a tensor, a tuple of arguments or a dict), and write forward "
            "without branches on the values of tensors",
        ) from error
    program = _program_of_export(exported)
    _redirect_in_place_reads(program.module.graph)
    return program


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Training mode with BatchNorm in evaluation mode, for a while."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = not isinstance(module, _BatchNorm)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Torch's global generators are as before afterwards; within, they start from `seed` if it is given."""
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        if seed is not None:
            torch.manual_seed(seed)
        yield


_LEAF_ORIGINS = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "constant",
    "CUSTOM_OBJ": "constant",
    "USER_INPUT": "input",
}


@contextlib.contextmanager
def _without_export_warnings() -> Iterator[None]:
    """What export remarks on a model's style, and the graphs that it prints when it fails, concern no user."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _program_of_export(exported: ExportedProgram) -> TracedProgram:
    leaves = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name not in _LEAF_ORIGINS:
            problem = f"the traced model has an input of kind {spec.kind.name}"
            raise NoBound("sensitivity.model-not-traceable", problem, "keep effects such as printing out of forward")
        leaves.append((spec.arg.name, _LEAF_ORIGINS[spec.kind.name], spec.target or spec.arg.name))
    constants = dict(exported.constants)
    return TracedProgram(
        module=exported.graph_module,
        leaves=tuple(leaves),
        inputs=tuple(name for name, origin, _ in leaves if origin == "input"),
        constants=constants,
        layout=exported.call_spec.in_spec,
    )


def mutates(node: fx.Node) -> bool:
    """Whether an operation overwrites its first argument."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _redirect_in_place_reads(graph: fx.Graph) -> None:
    """Let later readers of an overwritten tensor read the operation that overwrote it.

    A tensor that shares memory with it through a view, and is read later, changes without any node saying so: refused.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    memory: dict[fx.Node, fx.Node] = {}  # a view and what it is a view of
    for node in graph.nodes:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        first = node.args[0]
        if not mutates(node):
            if OPERATION_KINDS.get(base_operation(str(node.target))) is OperationKind.RESHAPE:
                memory[node] = memory.get(first, first)
            continue
        owner = memory.get(first, first)
        for other in (owner, *(view for view, of in memory.items() if of is owner)):
            if other is not first and any(order[user] > order[node] for user in other.users):
                problem = f"{node.target} overwrites {first.name}, whose memory {other.name} shares"
                raise NoBound("sensitivity.in-place-view", problem, "use the operation without underscore (or +=)")
        later = {other for other, at in order.items() if at > order[node]}
        first.replace_all_uses_with(node, delete_user_cb=later.__contains__)
        memory[node] = owner


NodeCall = Callable[[Mapping[str, Any]], Any]


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
    drawn_below of a product with noise: what the noise, drawn anew in every pass, cannot exceed
    arguments   everything it is called with, by name: tensors that do not depend on the input are there as
                tensors, the others as the names of nodes
    call        the operation itself, with other values for the nodes it reads
    """

    name: str
    operation: str
    kind: OperationKind
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    drawn_below: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    call: NodeCall | None = field(default=None, repr=False, compare=False)

    @property
    def floating(self) -> bool:
        """Whether distances between its values mean anything."""
        return self.dtype is None or self.dtype.is_floating_point

    @property
    def base(self) -> str:
        """The operation without library, overload and in-place underscore."""
        return base_operation(self.operation)

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.name} ({self.operation}{where})"


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedGraph:
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
        problem = f"no node is called {name!r}"
        raise PlanError("sensitivity.unknown-node", problem, f"use one of {', '.join(n.name for n in self.nodes)}")

    def readers(self, name: str) -> tuple[Node, ...]:
        """The nodes that read a node."""
        return tuple(node for node in self.nodes if name in node.inputs)

    def output_of(self, node: Node) -> Node:
        """The activation that directly follows a node and is all that reads it, or else the node itself."""
        readers = self.readers(node.name)
        return readers[0] if len(readers) == 1 and readers[0].kind is OperationKind.ACTIVATION else node

    def uses(self, parameters: tuple[str, ...]) -> tuple[Node, ...]:
        """The nodes that read any of these tensors, in order."""
        wanted = set(parameters)
        return tuple(node for node in self.nodes if wanted.intersection(node.parameters))


def trace(model: nn.Module, example: Any) -> TracedGraph:
    """Read the graph of `model` from one forward pass on `example`, which is public or made up.

    `example` is a tensor, a tuple of arguments or a dict of keyword arguments; the first axis of every tensor counts
    patients, and only the first patient is used. The model is traced in training mode with BatchNorm in evaluation
    mode. Modes, buffers and random state are left as they were.
    """
    return trace_with_program(model, example)[0]


def trace_with_program(model: nn.Module, example: Any) -> tuple[TracedGraph, TracedProgram]:
    """The graph, and the program for one patient that it was read from."""
    one = first_patients(example, 1)
    program = export(model, one)
    moving = {node.name for node in read_graph(model, program)}
    constants: dict[str, Any] = {}

    def keep(node: fx.Node, given: Mapping[str, Any], value: Any) -> None:
        if node.name not in moving:  # as it is now: an operation in place may overwrite it later
            constants[node.name] = value.detach().clone().cpu() if isinstance(value, Tensor) else value

    with isolated_rng(0):
        program.run(model, one, keep)
    return read_graph(model, program, constants), program


def read_graph(model: nn.Module, program: TracedProgram, constants: Mapping[str, Any] | None = None) -> TracedGraph:
    """The graph of a traced program; with the values of its constants, `arguments` and `call` are there too."""
    owners: dict[str, tuple[str, ...]] = {}  # tensors of the model that a constant node is made of
    moving: dict[str, Node] = {}
    random: dict[str, float] = {}  # constants that are drawn anew in every pass, and what they cannot exceed
    canonical = _canonical_names(model)
    for placeholder, origin, name in program.leaves:
        owners[placeholder] = (canonical[name],) if origin == "parameter" else ()
    for node in program.nodes:
        if node.op == "output":
            continue
        made = node.meta.get("val")
        if node.name in program.inputs:
            if isinstance(made, Tensor):
                moving[node.name] = Node(
                    name=node.name, operation="input", kind=OperationKind.INPUT, inputs=(), parameters=(), module="",
                    shape=tuple(made.shape), dtype=made.dtype,
                )  # fmt: skip
            continue
        reads = _names_read(node)
        inside = tuple(name for name in reads if name in moving)
        if base_operation(str(node.target)) in READS_FIRST_ARGUMENT_ONLY:
            inside = inside[: int(bool(reads) and reads[0] in moving)]
        parameters = tuple(dict.fromkeys(p for name in reads for p in owners.get(name, ())))
        operation = str(node.target)
        chance = not random.keys().isdisjoint(reads)
        below = max((random[name] for name in reads if name in random), default=None)
        if node.op != "call_function" or not inside or base_operation(operation) in SHAPE_ONLY:
            owners.setdefault(node.name, parameters)
            if chance or base_operation(operation) in RANDOM:
                random[node.name] = _clamped_to(node)
            continue
        operation = "getitem" if "getitem" in operation else operation
        moving[node.name] = Node(
            name=node.name, operation=operation, kind=_kind_in_context(operation, inside, moving, made, below), inputs=inside,
            parameters=parameters, module=_module_path(node), shape=tuple(made.shape) if isinstance(made, Tensor) else (),
            dtype=made.dtype if isinstance(made, Tensor) else None, drawn_below=below,
            arguments={} if constants is None else _node_arguments(node, constants),
            call=None if constants is None else _node_call(node, constants),
        )  # fmt: skip
    if not moving:
        problem = f"the example of {type(model).__name__} holds no tensor"
        raise PlanError("sensitivity.no-tensor", problem, "give model inputs")
    return TracedGraph(model=type(model).__name__, nodes=tuple(moving.values()))


def _clamped_to(node: fx.Node) -> float:
    """What the entries of noise cannot exceed: the larger limit of a clamp to two numbers, else infinity."""
    given = arguments_by_name(node, node.args, node.kwargs)
    limits = [given.get("min"), given.get("max")]
    if base_operation(str(node.target)) != "clamp" or not all(isinstance(limit, int | float) for limit in limits):
        return math.inf
    return max(abs(float(limit)) for limit in limits if isinstance(limit, int | float))


def _kind_in_context(
    operation: str, inside: tuple[str, ...], moving: Mapping[str, Node], made: Any, drawn_below: float | None
) -> OperationKind:
    """The kind of an operation from what it reads.

    Whole numbers may only be moved about and looked up in a table. What is drawn anew in every pass may be added, and
    multiplied by if it is clamped to two numbers: a factor that was drawn once bounds nothing.
    """
    kind = classify(operation, len(inside))
    whole = any(not moving[name].floating for name in inside)
    if kind is OperationKind.EMBEDDING:
        return kind if whole else OperationKind.OTHER
    if whole and (kind is not OperationKind.RESHAPE or (isinstance(made, Tensor) and made.is_floating_point())):
        return OperationKind.OTHER
    if drawn_below is None or kind in (OperationKind.ADD, OperationKind.CONCAT):
        return kind
    bounded = base_operation(operation) == "mul" and kind is OperationKind.SCALE and drawn_below < math.inf
    return kind if bounded else OperationKind.OTHER


def _names_read(node: fx.Node) -> list[str]:
    """Every node among the arguments, in order and as often as it occurs."""
    found: list[str] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n.name))
    return found


def _node_call(node: fx.Node, constants: Mapping[str, Any]) -> NodeCall:
    def call(values: Mapping[str, Any]) -> Any:
        """The operation in the precision of the values that are given."""
        wide = torch.float64 in {getattr(value, "dtype", None) for value in values.values()}

        def put(n: fx.Node) -> Any:
            value = values[n.name] if n.name in values else constants[n.name]
            return value.double() if wide and isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = fx.map_arg((node.args, node.kwargs), put)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return call


def _node_arguments(node: fx.Node, constants: Mapping[str, Any]) -> dict[str, Any]:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: constants.get(n.name, n.name))
    return arguments_by_name(node, args, kwargs)


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return str(paths[-1]) if paths else ""


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter → its name in `model.named_parameters()`."""
    known = {id(tensor): name for name, tensor in model.named_parameters()}
    return {name: known[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False)}
