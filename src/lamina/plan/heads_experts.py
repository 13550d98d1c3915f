"""Attention heads and experts: which rows and columns of which tensors belong to which head or expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lamina import validate
from lamina.errors import PlanError
from lamina.plan.adapters import Projection
from lamina.plan.selection import (
    ROOT,
    PartKind,
    Piece,
    TensorPart,
    UnreadModule,
    concatenate_pieces,
    consecutive_pieces,
    matches_pattern,
)

HEADS_ATTRIBUTE = "lamina_heads"
"""The attribute by which an attention module says itself what heads it has: a number, or `Heads`; 0: none."""


EXPERTS_ATTRIBUTE = "lamina_experts"
"""The attribute by which a module says itself how many experts it holds; 0: none."""


def find_heads(model: nn.Module, given: Mapping[str, int | Heads]) -> tuple[list[TensorPart], list[UnreadModule]]:
    """The heads of every attention. `given`: by pattern of module names, how many, or `Heads`; 0: it has none."""
    return _find_parts(model, PartKind.HEADS, ModuleDeclarations(given, HEADS_ATTRIBUTE, "heads"))


def find_experts(model: nn.Module, given: Mapping[str, int]) -> tuple[list[TensorPart], list[UnreadModule]]:
    """The experts of every mixture. `given`: by pattern of module names, how many; 0: it has none."""
    return _find_parts(model, PartKind.EXPERTS, ModuleDeclarations(given, EXPERTS_ATTRIBUTE, "experts"))


def _find_parts(
    model: nn.Module, kind: PartKind, declared: ModuleDeclarations
) -> tuple[list[TensorPart], list[UnreadModule]]:
    """The parts of one kind, and the modules that look as if they had some that are not known."""
    modules, heads = dict(model.named_modules(remove_duplicate=False)), kind is PartKind.HEADS
    parts: list[TensorPart] = []
    unread: dict[str, str] = {}
    read: set[str] = set()
    for path, module in modules.items():
        value = declared.of(path, module)
        if not heads and any(path.startswith(f"{other}.") for other in read | unread.keys()):
            continue
        if value == 0 and not isinstance(value, bool):
            read.add(path)
            continue
        if value is not None and not is_positive_int(value) and not (heads and isinstance(value, Heads)):
            remedy = "give their number, 0 if none" + (", or lamina.plan.Heads(count=…, …)" if heads else "")
            raise PlanError("plan.parts-declaration-wrong", f"{kind.value} of {path or ROOT!r} are {value!r}", remedy)
        try:
            if heads:
                wanted = Heads(count=value) if isinstance(value, int) else value
                found = list(attention_parts(path, module, modules, wanted))
            else:
                found = _experts_of_module(path, module, modules, value)
        except UnreadableParts as problem:
            if value is not None:
                problem_text = f"{kind.value} of {path or ROOT!r} are declared as {value}, but {problem}"
                raise PlanError("plan.parts-declaration-wrong", problem_text, "correct the declaration") from None
            unread[path] = str(problem)
            continue
        if found:
            parts += found
            read.add(path)
    declared.check()
    for path, module in modules.items():
        name, maps = type(module).__name__, any(not heads or tensor.ndim >= 2 for tensor in module.parameters())
        looks = ("attention" if heads else "experts") in name.lower()
        if looks and maps and not is_same_or_nested(path, read | unread.keys()):
            unread[path] = f"the layout of this {name} is not known"
    return parts, [UnreadModule(module=path or ROOT, kind=kind, why=why) for path, why in unread.items()]


# One attention: which rows and columns of which projections serve which head.
#
# An attention is found by the names of its projections and then has to prove itself: the number of heads that the
# module or its configuration states must agree with the widths of all of them,
#
#     queries  n·h        n query heads of width h
#     keys     m·h        m key/value heads, each serving n/m query heads in order (n = m: ordinary attention)
#     values   m·v
#     output   n·v columns
#
# Where it does not, or where a fused projection could be laid out in two ways, it raises
# `UnreadableParts`: nothing is guessed.

QUERY_NAMES = ("q_proj", "query", "q_lin", "q", "wq", "to_q", "query_proj", "q_attn", "linear_q", "q_linear")
KEY_NAMES = ("k_proj", "key", "k_lin", "k", "wk", "to_k", "key_proj", "linear_k", "k_linear")
VALUE_NAMES = ("v_proj", "value", "v_lin", "v", "wv", "to_v", "value_proj", "linear_v", "v_linear")
FUSED_NAMES = ("c_attn", "qkv_proj", "qkv", "Wqkv", "to_qkv", "in_proj", "query_key_value")
OUT_NAMES = ("o_proj", "out_proj", "out_lin", "o", "wo", "Wo", "out", "to_out", "c_proj", "proj", "dense", "linear_out")
OUT_IN_PARENT = "output.dense"
"""The output projection of BERT's attention, which lies beside it: in the module above."""

HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
HEAD_WIDTH_NAMES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
KEY_VALUE_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
FUSED_LAYOUTS = {"phi3": "concatenated", "modernbert": "concatenated", "gpt_neox": "interleaved"}
"""How families lay their fused projection out, by `config.model_type`: its shape does not tell."""


class UnreadableParts(Exception):
    """A module that looks like an attention or a mixture of experts, but whose parts cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What an attention of your own is made of; names of its projections as the module has them.

      count      query heads
      key_value  key/value heads, if fewer (grouped-query attention)
      query, key, value, out   names of projections; or `fused`, one projection for the first three
      layout     of a fused one: "concatenated" (all queries, all keys, all values) or "interleaved" (head by head)

    Names that are left out are looked for among the usual ones; `out=""` says that there is no output projection.
    """

    count: int
    key_value: int | None = None
    query: str | None = None
    key: str | None = None
    value: str | None = None
    out: str | None = None
    fused: str | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        validate.whole(PlanError, "plan.parts-declaration-wrong", count=self.count)
        if self.key_value is not None:
            validate.whole(PlanError, "plan.parts-declaration-wrong", key_value=self.key_value)
        if self.layout not in (None, "concatenated", "interleaved"):
            problem = f"layout of Heads is {self.layout!r}"
            raise PlanError("plan.parts-declaration-wrong", problem, "use 'concatenated' or 'interleaved'")


def attention_parts(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module], wanted: Heads | None
) -> Iterator[TensorPart]:
    """The parts of the attention at `path`; none if the module is no attention. `modules`: all of them, by path."""
    if isinstance(module, nn.MultiheadAttention):
        yield from _multihead_parts(path, module)
        yield from _peft_parts(path, module, modules)
        return
    find = _ProjectionFinder(path, modules)
    spec = wanted or Heads(count=1)
    query, key, value = (find(QUERY_NAMES, spec.query), find(KEY_NAMES, spec.key), find(VALUE_NAMES, spec.value))
    fused = None if query and key and value else find(FUSED_NAMES, spec.fused)
    if fused is None and not (query and key and value):
        if wanted is not None:
            raise UnreadableParts("it has no projections of queries, keys and values by these names")
        return
    count = wanted.count if wanted is not None else stated_number(module, HEAD_COUNT_NAMES)
    if count is None:
        raise UnreadableParts("neither it nor its configuration states how many heads it has")
    out = None if spec.out == "" else find(OUT_NAMES, spec.out)
    group = path
    if out is None and spec.out != "":
        group = path.rpartition(".")[0]
        out = _ProjectionFinder(group, modules)((OUT_IN_PARENT,), None) if path else None
        if out is None:
            raise UnreadableParts("its output projection is not known")
    read = _AttentionReader(module, group or ROOT, count, wanted)
    if fused is None:
        assert query and key and value
        yield from read.separate(query, key, value, out)
    else:
        yield from read.fused(query, fused, out)


class _ProjectionFinder:
    """Projections of a module by name: the first of several that there is, or the one that was given."""

    def __init__(self, path: str, modules: Mapping[str, nn.Module]) -> None:
        self.path, self.modules = path, modules

    def __call__(self, names: Sequence[str], given: str | None) -> Projection | None:
        for name in names if given is None else (given,):
            full = f"{self.path}.{name}" if self.path else name
            if full in self.modules and (made := Projection.of(self.modules[full], full)) is not None:
                return made
        if given is not None:
            raise UnreadableParts(f"it has no projection {given!r}")
        return None


class _AttentionReader:
    """The numbers of one attention, and the parts that follow from them."""

    def __init__(self, module: nn.Module, group: str, count: int, wanted: Heads | None) -> None:
        self.module, self.group, self.count, self.wanted = module, group, count, wanted

    def separate(
        self, query: Projection, key: Projection, value: Projection, out: Projection | None
    ) -> Iterator[TensorPart]:
        width = self._width(query.outs)
        groups = self._groups(key.outs, width)
        if value.outs % groups:
            raise UnreadableParts(f"its values are {value.outs} wide, which {groups} heads cannot share")
        wide = value.outs // groups
        yield from self._rows(query, consecutive_pieces(self.count, width))
        yield from self._rows(key, consecutive_pieces(groups, width, self._serves(groups)))
        yield from self._rows(value, consecutive_pieces(groups, wide, self._serves(groups)))
        yield from self._columns(out, wide)

    def fused(self, query: Projection | None, fused: Projection, out: Projection | None) -> Iterator[TensorPart]:
        layout = (self.wanted.layout if self.wanted is not None else None) or self._layout(fused)
        if layout is None:
            raise UnreadableParts(
                f"its fused projection {fused.path!r} may hold head after head, or queries, keys and values: declare "
                "its layout"
            )
        if query is not None:  # cross-attention: queries apart, keys and values fused
            if layout != "concatenated" or fused.outs % 2:
                raise UnreadableParts(f"its fused keys and values are {fused.outs} wide and {layout}")
            width = self._width(query.outs)
            yield from self._rows(query, consecutive_pieces(self.count, width))
            keys = self._shared(fused.outs // 2, width)
            pieces = concatenate_pieces(keys, keys)
        elif layout == "interleaved":
            if fused.outs % 3:
                raise UnreadableParts(f"its fused projection is {fused.outs} wide, no three times a number of heads")
            width = self._width(fused.outs // 3)
            pieces = consecutive_pieces(self.count, 3 * width)
        else:
            width = stated_number(self.module, HEAD_WIDTH_NAMES, configured=False) or fused.outs // (3 * self.count)
            rest = fused.outs - self.count * width
            if rest <= 0 or rest % 2 or not width:
                raise UnreadableParts(
                    f"its fused projection is {fused.outs} wide, with {self.count} query heads of {width}"
                )
            keys = self._shared(rest // 2, width)
            pieces = concatenate_pieces(consecutive_pieces(self.count, width), keys, keys)
        yield from self._rows(fused, pieces)
        yield from self._columns(out, width)

    def _width(self, outs: int) -> int:
        """How wide a head is: what comes out over the number of heads, and what the module states."""
        stated = stated_number(self.module, HEAD_WIDTH_NAMES, configured=False)
        if outs % self.count or (stated is not None and stated * self.count != outs):
            raise UnreadableParts(f"its queries are {outs} wide, not {self.count} heads of {stated or 'any width'}")
        return outs // self.count

    def _groups(self, outs: int, width: int) -> int:
        """How many key/value heads there are: by their width, and by what is declared or stated."""
        groups = outs // width
        if not groups or outs % width or self.count % groups:
            raise UnreadableParts(f"its keys are {outs} wide, which {self.count} query heads of {width} cannot share")
        stated = self.wanted.key_value if self.wanted is not None else None
        if stated is None:
            stated = stated_number(self.module, KEY_VALUE_COUNT_NAMES)
            each = stated_number(self.module, ("num_key_value_groups",), configured=False)
            if stated is None and each is not None:
                stated = self.count // each
        if stated is not None and stated != groups:
            raise UnreadableParts(f"{stated} key/value heads are stated, and its keys are wide enough for {groups}")
        return groups

    def _serves(self, groups: int) -> list[tuple[int, ...]]:
        """The query heads that each key/value head serves, in order."""
        each = self.count // groups
        return [tuple(range(j * each, (j + 1) * each)) for j in range(groups)]

    def _shared(self, outs: int, width: int) -> list[Piece]:
        groups = self._groups(outs, width)
        return consecutive_pieces(groups, width, self._serves(groups))

    def _layout(self, fused: Projection) -> str | None:
        """How a fused projection that nobody declared is laid out, if that is certain."""
        split = stated_number(self.module, ("split_size",), configured=False)  # the pieces that GPT-2 cuts it into
        if split and fused.path.endswith("c_attn") and fused.outs in (2 * split, 3 * split):
            return "concatenated"
        return FUSED_LAYOUTS.get(str(getattr(getattr(self.module, "config", None), "model_type", "")))

    def _rows(self, projection: Projection, pieces: list[Piece]) -> Iterator[TensorPart]:
        """What comes out of a projection belongs to heads: rows of a weight, a bias; what goes in is common to all."""
        for name, (axis, _) in projection.axes.items():
            yield self._part(projection, name, axis, pieces)

    def _columns(self, projection: Projection | None, width: int) -> Iterator[TensorPart]:
        """What goes into the output projection belongs to heads: columns of its weight; its bias is common to all."""
        if projection is None:
            return
        if projection.ins != self.count * width:
            raise UnreadableParts(f"its output projection takes {projection.ins}, not {self.count} heads of {width}")
        for name, (_, axis) in projection.axes.items():
            yield self._part(projection, name, axis, consecutive_pieces(self.count, width))

    def _part(self, projection: Projection, name: str, axis: int | None, pieces: list[Piece]) -> TensorPart:
        shape, tensor = projection.shapes[name] or (1,), f"{projection.path}.{name}"
        return _head_part(self.group, self.count, tensor, axis or 0, shape[axis or 0], [] if axis is None else pieces)


def _multihead_parts(path: str, module: nn.MultiheadAttention) -> Iterator[TensorPart]:
    """`nn.MultiheadAttention` owns its projections of queries, keys and values as tensors."""
    count, width, group = module.num_heads, module.head_dim, path or ROOT
    one = consecutive_pieces(count, width)
    layout = {
        "in_proj_weight": (0, concatenate_pieces(one, one, one)),
        "in_proj_bias": (0, concatenate_pieces(one, one, one)),
    }
    layout |= dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), (0, one))
    layout |= dict.fromkeys(("bias_k", "bias_v"), (2, one))
    for name, (axis, pieces) in layout.items():
        tensor = module._parameters.get(name)
        if tensor is not None:
            yield _head_part(group, count, f"{path}.{name}" if path else name, axis, tensor.shape[axis], pieces)
    out = Projection.of(module.out_proj, f"{path}.out_proj" if path else "out_proj")
    if out is None:
        raise UnreadableParts("its output projection is no Linear")
    yield from _AttentionReader(module, group, count, None)._columns(out, width)


def _peft_parts(path: str, module: nn.MultiheadAttention, modules: Mapping[str, nn.Module]) -> Iterator[TensorPart]:
    """What PEFT puts around it: rows of factor B are those of the fused projection; the rest is common to all heads."""
    above, _, last = path.rpartition(".")
    if last != "base_layer" or above not in modules:
        return
    one = consecutive_pieces(module.num_heads, module.head_dim)
    for name, tensor in modules[above].named_parameters(remove_duplicate=False):
        if not name.startswith("base_layer."):
            shape = tuple(tensor.shape) or (1,)
            pieces = (
                concatenate_pieces(one, one, one) if name.startswith("lora_B.") and shape[0] == 3 * one[-1][1] else []
            )
            yield _head_part(path, module.num_heads, f"{above}.{name}", 0, shape[0], pieces)


def _head_part(group: str, count: int, tensor: str, axis: int, length: int, pieces: Sequence[Piece]) -> TensorPart:
    if pieces and pieces[-1][1] != length:
        raise UnreadableParts(f"tensor {tensor!r} is {length} long, but its heads take up {pieces[-1][1]}")
    return TensorPart(
        kind=PartKind.HEADS, group=group, count=count, tensor=tensor, axis=axis, length=length, pieces=tuple(pieces)
    )


# The experts of a model: stacked in tensors with an axis of experts, or modules in a list.
#
#     stacked   a module that states its number of experts E and owns a tensor of three or more axes, the first of E
#     a list    a ModuleList of equal modules that is called, or whose modules are called, experts
#
# The router belongs to no expert, nor does an expert that all tokens visit.

EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts", "experts")


def _experts_of_module(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module], wanted: int | None
) -> list[TensorPart]:
    """The parts of the experts that this module holds."""
    above = modules.get(path.rpartition(".")[0])
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        name = path.rpartition(".")[2].lower()
        called = "expert" in name or any("expert" in type(child).__name__.lower() for child in module.children())
        if wanted is None and (not called or "shared" in name):
            return []
        number = wanted if wanted is not None or above is None else stated_number(above, EXPERT_COUNT_NAMES)
        return _listed_experts(path, module, number)
    count = wanted if wanted is not None else stated_number(module, EXPERT_COUNT_NAMES)
    own = [tensor for tensor in module._parameters.values() if tensor is not None]
    if count is None or not any(tensor.ndim >= 3 and tensor.shape[0] == count for tensor in own):
        if wanted is not None:
            raise UnreadableParts("no tensor of it has such an axis")
        return []
    return list(_stacked_experts(path, module, count, modules))


def _stacked_experts(
    path: str, module: nn.Module, count: int, modules: Mapping[str, nn.Module]
) -> Iterator[TensorPart]:
    """One piece for each expert, along the first axis. A matrix beside them may be a router: only a bias is theirs."""
    each = tuple((e, e + 1, (e,)) for e in range(count))
    for name, tensor in module._parameters.items():
        if tensor is not None:
            theirs = tensor.ndim >= 3 or (tensor.ndim == 2 and "bias" in name)
            pieces = each if theirs and tensor.shape[0] == count else ()
            yield _expert_part(path, count, f"{path}.{name}" if path else name, tuple(tensor.shape), pieces)
    head, _, last = path.rpartition(".")
    if last == "base_layer" and head in modules:  # factors that PEFT lays around them serve all experts
        for name, tensor in modules[head].named_parameters(remove_duplicate=False):
            if not name.startswith("base_layer."):
                yield _expert_part(path, count, f"{head}.{name}", tuple(tensor.shape), ())


def _listed_experts(path: str, module: nn.ModuleList | nn.ModuleDict, number: int | None) -> list[TensorPart]:
    children = list(module.named_children())
    forms = {_tensor_shapes(child) for _, child in children}
    if not children or forms == {()}:
        return []
    if len(forms) > 1:
        raise UnreadableParts("its experts are not alike")
    if number is not None and number != len(children):
        raise UnreadableParts(f"it holds {len(children)} modules where {number} experts are stated")
    return [
        _expert_part(path, len(children), f"{path}.{key}.{name}", shape, ((0, shape[0] if shape else 1, (e,)),))
        for e, (key, child) in enumerate(children)
        for name, shape in _tensor_shapes(child)
    ]


def _tensor_shapes(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters(remove_duplicate=False))


def _expert_part(path: str, count: int, tensor: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> TensorPart:
    length, group = shape[0] if shape else 1, path or ROOT
    return TensorPart(
        kind=PartKind.EXPERTS, group=group, count=count, tensor=tensor, axis=0, length=length, pieces=pieces
    )


def is_positive_int(value: Any) -> bool:
    """Whether it is a whole number >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def stated_number(module: nn.Module, names: Sequence[str], *, configured: bool = True) -> int | None:
    """The first of these numbers that the module itself, or else its configuration, states."""
    for holder in (module.__dict__, getattr(module, "config", None)) if configured else (module.__dict__,):
        for name in names:
            value: Any = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if is_positive_int(value):
                return int(value)
    return None


class ModuleDeclarations:
    """What is declared about modules: by pattern of their names, or by an attribute of the module itself."""

    def __init__(self, given: Mapping[str, Any], attribute: str, what: str) -> None:
        self.given, self.attribute, self.what = given, attribute, what
        self._met: set[str] = set()

    def of(self, path: str, module: nn.Module) -> Any:
        """What is declared about this module; None if nothing is. A pattern means a module, not what is inside it."""
        name = path or ROOT
        found = getattr(module, self.attribute, None)
        for pattern, value in self.given.items():
            if matches_pattern(pattern, name) and not matches_pattern(pattern, name.rpartition(".")[0]):
                self._met.add(pattern)
                found = value
        return found

    def check(self) -> None:
        """Refuse a pattern that meant no module."""
        for pattern in self.given:
            if pattern not in self._met:
                problem = f"{self.what} are declared for {pattern!r}, which matches no module"
                raise PlanError("plan.declaration-unmatched", problem, "correct the pattern")


def is_same_or_nested(path: str, others: set[str]) -> bool:
    """Whether one of the others is this module, above it, or inside it."""
    return any(
        path == other or not path or not other or other.startswith(f"{path}.") or path.startswith(f"{other}.")
        for other in others
    )
