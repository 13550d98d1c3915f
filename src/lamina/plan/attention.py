"""One attention: which rows and columns of which projections serve which head.

An attention is found by the names of its projections and then has to prove itself: the number of heads that the module
or its configuration states must agree with the widths of all of them,

    queries  n·h        n query heads of width h
    keys     m·h        m key/value heads, each serving n/m query heads in order (n = m: ordinary attention)
    values   m·v
    output   n·v columns

Where it does not, or where a fused projection could be laid out in two ways, it is `Unlike` an attention: nothing is
guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lamina.errors import PlanError
from lamina.plan.naming import ROOT
from lamina.plan.parts import Part, PartKind, Piece, blocks, one_after_another
from lamina.plan.projection import Projection
from lamina.plan.stated import stated, whole

QUERY = ("q_proj", "query", "q_lin", "q", "wq", "to_q", "query_proj", "q_attn", "linear_q", "q_linear")
KEY = ("k_proj", "key", "k_lin", "k", "wk", "to_k", "key_proj", "linear_k", "k_linear")
VALUE = ("v_proj", "value", "v_lin", "v", "wv", "to_v", "value_proj", "linear_v", "v_linear")
FUSED = ("c_attn", "qkv_proj", "qkv", "Wqkv", "to_qkv", "in_proj", "query_key_value")
OUT = (
    "o_proj",
    "out_proj",
    "out_lin",
    "o",
    "wo",
    "Wo",
    "out",
    "to_out",
    "c_proj",
    "proj",
    "dense",
    "linear_out",
)
BESIDE = "output.dense"
"""The output projection of BERT's attention, which lies beside it: in the module above."""

COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
LAYOUTS = {"phi3": "concatenated", "modernbert": "concatenated", "gpt_neox": "interleaved"}
"""How families lay their fused projection out, by `config.model_type`: its shape does not tell."""


class Unlike(Exception):
    """Projections that cannot be the attention that they are named like."""


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
        for what, number in (("count", self.count), ("key_value", self.key_value)):
            if number is not None and not whole(number):
                raise PlanError(
                    "plan.heads-whole-number",
                    f"{what} of Heads is {number!r}, must be a whole number >= 1",
                    "correct it",
                )
        if self.layout not in (None, "concatenated", "interleaved"):
            raise PlanError(
                "plan.layout-heads",
                f"layout of Heads is {self.layout!r}",
                "use 'concatenated' or 'interleaved'",
            )


def attention_parts(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module], wanted: Heads | None
) -> Iterator[Part]:
    """The parts of the attention at `path`; none if the module is no attention. `modules`: all of them, by path."""
    if isinstance(module, nn.MultiheadAttention):
        yield from _multihead(path, module)
        yield from _around(path, module, modules)
        return
    find = _Finder(path, modules)
    spec = wanted or Heads(count=1)
    query, key, value = find(QUERY, spec.query), find(KEY, spec.key), find(VALUE, spec.value)
    fused = None if query and key and value else find(FUSED, spec.fused)
    if fused is None and not (query and key and value):
        if wanted is not None:
            raise Unlike("it has no projections of queries, keys and values by these names")
        return
    count = wanted.count if wanted is not None else stated(module, COUNTS)
    if count is None:
        raise Unlike("neither it nor its configuration states how many heads it has")
    out = None if spec.out == "" else find(OUT, spec.out)
    group = path
    if out is None and spec.out != "":
        group = path.rpartition(".")[0]
        out = _Finder(group, modules)((BESIDE,), None) if path else None
        if out is None:
            raise Unlike("its output projection is not known")
    read = _Attention(module, group or ROOT, count, wanted)
    if fused is None:
        assert query and key and value
        yield from read.separate(query, key, value, out)
    else:
        yield from read.fused(query, fused, out)


class _Finder:
    """Projections of a module by name: the first of several that there is, or the one that was given."""

    def __init__(self, path: str, modules: Mapping[str, nn.Module]) -> None:
        self.path, self.modules = path, modules

    def __call__(self, names: Sequence[str], given: str | None) -> Projection | None:
        for name in names if given is None else (given,):
            full = f"{self.path}.{name}" if self.path else name
            if full in self.modules and (made := Projection.of(self.modules[full], full)) is not None:
                return made
        if given is not None:
            raise Unlike(f"it has no projection {given!r}")
        return None


class _Attention:
    """The numbers of one attention, and the parts that follow from them."""

    def __init__(self, module: nn.Module, group: str, count: int, wanted: Heads | None) -> None:
        self.module, self.group, self.count, self.wanted = module, group, count, wanted

    def separate(
        self, query: Projection, key: Projection, value: Projection, out: Projection | None
    ) -> Iterator[Part]:
        width = self._width(query.outs)
        groups = self._groups(key.outs, width)
        if value.outs % groups:
            raise Unlike(f"its values are {value.outs} wide, which {groups} heads cannot share")
        wide = value.outs // groups
        yield from self._rows(query, one_after_another(self.count, width))
        yield from self._rows(key, one_after_another(groups, width, self._serves(groups)))
        yield from self._rows(value, one_after_another(groups, wide, self._serves(groups)))
        yield from self._columns(out, wide)

    def fused(self, query: Projection | None, fused: Projection, out: Projection | None) -> Iterator[Part]:
        layout = (self.wanted.layout if self.wanted is not None else None) or self._layout(fused)
        if layout is None:
            raise Unlike(
                f"its fused projection {fused.path!r} may hold head after head, or queries, keys and values: declare "
                "its layout"
            )
        if query is not None:  # cross-attention: queries apart, keys and values fused
            if layout != "concatenated" or fused.outs % 2:
                raise Unlike(f"its fused keys and values are {fused.outs} wide and {layout}")
            width = self._width(query.outs)
            yield from self._rows(query, one_after_another(self.count, width))
            keys = self._shared(fused.outs // 2, width)
            pieces = blocks(keys, keys)
        elif layout == "interleaved":
            if fused.outs % 3:
                raise Unlike(f"its fused projection is {fused.outs} wide, no three times a number of heads")
            width = self._width(fused.outs // 3)
            pieces = one_after_another(self.count, 3 * width)
        else:
            width = stated(self.module, WIDTHS, configured=False) or fused.outs // (3 * self.count)
            rest = fused.outs - self.count * width
            if rest <= 0 or rest % 2 or not width:
                raise Unlike(
                    f"its fused projection is {fused.outs} wide, with {self.count} query heads of {width}"
                )
            keys = self._shared(rest // 2, width)
            pieces = blocks(one_after_another(self.count, width), keys, keys)
        yield from self._rows(fused, pieces)
        yield from self._columns(out, width)

    # ------------------------------------------------------------------------------------------- numbers

    def _width(self, outs: int) -> int:
        """How wide a head is: what comes out over the number of heads, and what the module states."""
        told = stated(self.module, WIDTHS, configured=False)
        if outs % self.count or (told is not None and told * self.count != outs):
            raise Unlike(
                f"its queries are {outs} wide, not {self.count} heads{f' of {told}' if told else ''}"
            )
        return outs // self.count

    def _groups(self, outs: int, width: int) -> int:
        """How many key/value heads there are: by their width, and by what is declared or stated."""
        groups = outs // width
        if not groups or outs % width or self.count % groups:
            raise Unlike(
                f"its keys are {outs} wide, no number of heads of {width} that {self.count} query heads can share"
            )
        told = self.wanted.key_value if self.wanted is not None else None
        if told is None:
            told = stated(self.module, GROUPS)
            each = stated(self.module, ("num_key_value_groups",), configured=False)
            if told is None and each is not None:
                told = self.count // each
        if told is not None and told != groups:
            raise Unlike(f"{told} key/value heads are stated, and its keys are wide enough for {groups}")
        return groups

    def _serves(self, groups: int) -> list[tuple[int, ...]]:
        """The query heads that each key/value head serves, in order."""
        each = self.count // groups
        return [tuple(range(j * each, (j + 1) * each)) for j in range(groups)]

    def _shared(self, outs: int, width: int) -> list[Piece]:
        groups = self._groups(outs, width)
        return one_after_another(groups, width, self._serves(groups))

    def _layout(self, fused: Projection) -> str | None:
        """How a fused projection that nobody declared is laid out, if that is certain."""
        split = stated(self.module, ("split_size",), configured=False)  # the pieces that GPT-2 cuts it into
        if split and fused.path.endswith("c_attn") and fused.outs in (2 * split, 3 * split):
            return "concatenated"
        return LAYOUTS.get(str(getattr(getattr(self.module, "config", None), "model_type", "")))

    # --------------------------------------------------------------------------------------------- parts

    def _rows(self, projection: Projection, pieces: list[Piece]) -> Iterator[Part]:
        """What comes out of a projection belongs to heads: rows of a weight, a bias; what goes in is common to all."""
        for name, (axis, _) in projection.axes.items():
            yield self._part(projection, name, axis, pieces)

    def _columns(self, projection: Projection | None, width: int) -> Iterator[Part]:
        """What goes into the output projection belongs to heads: columns of its weight; its bias is common to all."""
        if projection is None:
            return
        if projection.ins != self.count * width:
            raise Unlike(f"its output projection takes {projection.ins}, not {self.count} heads of {width}")
        for name, (_, axis) in projection.axes.items():
            yield self._part(projection, name, axis, one_after_another(self.count, width))

    def _part(self, projection: Projection, name: str, axis: int | None, pieces: list[Piece]) -> Part:
        shape, tensor = projection.shapes[name] or (1,), f"{projection.path}.{name}"
        return _part(
            self.group, self.count, tensor, axis or 0, shape[axis or 0], [] if axis is None else pieces
        )


def _multihead(path: str, module: nn.MultiheadAttention) -> Iterator[Part]:
    """`nn.MultiheadAttention` owns its projections of queries, keys and values as tensors."""
    count, width, group = module.num_heads, module.head_dim, path or ROOT
    one = one_after_another(count, width)
    places = {"in_proj_weight": (0, blocks(one, one, one)), "in_proj_bias": (0, blocks(one, one, one))}
    places |= dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), (0, one))
    places |= dict.fromkeys(("bias_k", "bias_v"), (2, one))
    for name, (axis, pieces) in places.items():
        tensor = module._parameters.get(name)
        if tensor is not None:
            yield _part(group, count, f"{path}.{name}" if path else name, axis, tensor.shape[axis], pieces)
    out = Projection.of(module.out_proj, f"{path}.out_proj" if path else "out_proj")
    if out is None:
        raise Unlike("its output projection is no Linear")
    yield from _Attention(module, group, count, None)._columns(out, width)


def _around(path: str, module: nn.MultiheadAttention, modules: Mapping[str, nn.Module]) -> Iterator[Part]:
    """What PEFT puts around it: rows of factor B are those of the fused projection; the rest is common to all heads."""
    above, _, last = path.rpartition(".")
    if last != "base_layer" or above not in modules:
        return
    one = one_after_another(module.num_heads, module.head_dim)
    for name, tensor in modules[above].named_parameters(remove_duplicate=False):
        if not name.startswith("base_layer."):
            shape = tuple(tensor.shape) or (1,)
            pieces = (
                blocks(one, one, one) if name.startswith("lora_B.") and shape[0] == 3 * one[-1][1] else []
            )
            yield _part(path, module.num_heads, f"{above}.{name}", 0, shape[0], pieces)


def _part(group: str, count: int, tensor: str, axis: int, length: int, pieces: Sequence[Piece]) -> Part:
    if pieces and pieces[-1][1] != length:
        raise Unlike(f"tensor {tensor!r} has {length} places, and its heads take up {pieces[-1][1]}")
    return Part(
        kind=PartKind.HEADS,
        group=group,
        count=count,
        tensor=tensor,
        axis=axis,
        length=length,
        pieces=tuple(pieces),
    )
