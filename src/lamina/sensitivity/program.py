"""A model as a program of ATen operations, and how it is run with somebody looking on."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lamina.errors import NoBound
from lamina.sensitivity.example import arguments
from lamina.sensitivity.kinds import KINDS, Kind, base

if TYPE_CHECKING:
    from torch.export import ExportedProgram

See = Callable[[fx.Node, Mapping[str, Any], Any], None]
"""Called with every node, its arguments by name and its value, in order, before a later node can overwrite them."""


@dataclass(frozen=True, kw_only=True)
class Program:
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
        leaves: list[Any] = self.layout.flatten_up_to(arguments(example))
        return leaves

    def run(self, model: nn.Module, example: Any, see: See) -> None:
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
            _Watched(self.module, see).run(*values)


class _Watched(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, see: See) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._see = see

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self._see(n, bound(n, args, kwargs), value)
        return value


def bound(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names in the operation's schema, defaults filled in; by position where there is no schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value for i, value in enumerate(args)} | dict(kwargs)
    made = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    made |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    return made | dict(kwargs)


def export(model: nn.Module, example: Any) -> Program:
    """Trace `model` in training mode, BatchNorm in evaluation mode; the model is left as it was found."""
    args, kwargs = arguments(example)
    try:
        with training(model), isolated(), _silent():
            exported = torch.export.export(model, args, kwargs or None)
    except Exception as error:
        first = str(error).strip().splitlines()
        raise NoBound(
            "measure.not-traced-torch",
            f"{type(model).__name__} cannot be traced by torch.export: "
            f"{type(error).__name__}: {first[0] if first else ''}",
            "give an example that model(...) accepts (a tensor, a tuple of arguments or a dict), and write forward "
            "without branches on the values of tensors",
        ) from error
    program = _program(exported)
    _in_place(program.module.graph)
    return program


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
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
def isolated(seed: int | None = None) -> Iterator[None]:
    """Torch's global generators are as before afterwards; within, they start from `seed` if it is given."""
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        if seed is not None:
            torch.manual_seed(seed)
        yield


_ORIGIN = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "constant",
    "CUSTOM_OBJ": "constant",
    "USER_INPUT": "input",
}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What export remarks on a model's style, and the graphs that it prints when it fails, concern no user."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _program(exported: ExportedProgram) -> Program:
    leaves = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name not in _ORIGIN:
            raise NoBound(
                "measure.traced-model-needs",
                f"the traced model needs an input of kind {spec.kind.name}",
                "keep effects such as printing out of forward",
            )
        leaves.append((spec.arg.name, _ORIGIN[spec.kind.name], spec.target or spec.arg.name))
    constants = dict(exported.constants)
    return Program(
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


def _in_place(graph: fx.Graph) -> None:
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
            if KINDS.get(base(str(node.target))) is Kind.RESHAPE:
                memory[node] = memory.get(first, first)
            continue
        owner = memory.get(first, first)
        for other in (owner, *(view for view, of in memory.items() if of is owner)):
            if other is not first and any(order[user] > order[node] for user in other.users):
                raise NoBound(
                    "measure.overwrites-while-shares",
                    f"{node.target} overwrites {first.name} while {other.name}, which shares its memory, is read later",
                    "write the operation without the trailing underscore (or +=) in forward",
                )
        first.replace_all_uses_with(node, delete_user_cb=partial(_after, order, order[node]))
        memory[node] = owner


def _after(order: Mapping[fx.Node, int], place: int, user: fx.Node) -> bool:
    return order[user] > place
