"""What an operation of a traced model does to a distance between two inputs, by name of the operation."""

from __future__ import annotations

import enum


class Kind(enum.StrEnum):
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


def _table() -> dict[str, Kind]:
    families = {
        Kind.LINEAR: "linear addmm mm matmul bmm baddbmm mv einsum",
        Kind.CONV: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
        Kind.ACTIVATION: (
            "relu relu6 gelu silu tanh sigmoid elu softplus leaky_relu hardtanh clamp clamp_min clamp_max "
            "selu celu mish hardswish hardsigmoid log_sigmoid softshrink prelu abs sin cos atan erf"
        ),
        Kind.ATTENTION: "scaled_dot_product_attention",
        Kind.SOFTMAX: "softmax _softmax",
        Kind.NORM: "layer_norm group_norm batch_norm instance_norm rms_norm",
        Kind.ADD: "add sub rsub",
        Kind.SCALE: "mul div neg masked_fill where",
        Kind.RESHAPE: (
            "view reshape _unsafe_view view_as reshape_as permute transpose t movedim flatten unflatten squeeze "
            "unsqueeze contiguous clone alias detach to type_as _to_copy select slice narrow split "
            "split_with_sizes chunk unbind getitem expand expand_as repeat repeat_interleave tile flip roll "
            "index_select index diagonal tensor_split swapaxes numpy_T positive lift_fresh_copy float double half "
            "pixel_shuffle pixel_unshuffle channel_shuffle"
        ),
        Kind.CONCAT: "cat concat concatenate stack hstack vstack",
        Kind.POOL: (
            "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
            "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
            "amax amin"
        ),
        Kind.RESAMPLE: (
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
            "upsample_trilinear3d pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d "
            "replication_pad2d"
        ),
        Kind.REDUCE: "mean sum",
        Kind.DROPOUT: "dropout feature_dropout",
        Kind.EMBEDDING: "embedding",
    }
    return {name: kind for kind, names in families.items() for name in names.split()}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


KINDS = _table()
"""Operation of ATen, in-place underscore removed, → its kind when exactly one tensor depends on the input."""

SHAPE_ONLY = _words(
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty "
    "sym_size sym_numel sym_stride _assert_tensor_metadata"
)
"""Operations that read no value of their argument, only its shape and type: what they give is no function of it."""

RANDOM = _words(
    "rand randn rand_like randn_like randint randint_like randperm normal bernoulli uniform exponential multinomial "
    "dropout feature_dropout native_dropout"
)
"""Operations that draw."""

LIKE_ANOTHER = _words("view_as reshape_as expand_as type_as to")
"""Operations that read only the shape or the type of what follows their first argument."""

PRODUCTS = _words("mul matmul bmm mm baddbmm")
"""Operations that are bilinear in two tensors."""

SAME_ENTRIES = _words(
    "view reshape _unsafe_view view_as reshape_as permute transpose t movedim flatten unflatten squeeze unsqueeze "
    "contiguous clone alias detach flip roll swapaxes numpy_T positive pixel_shuffle pixel_unshuffle "
    "channel_shuffle"
)
"""Reshapes that keep every entry exactly once, hence every moment."""


def base(operation: str) -> str:
    """'aten.relu_.default' → 'relu': the name without library, overload and in-place underscore."""
    name = operation.split(".")[1] if operation.startswith("aten.") else operation
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def classify(operation: str, moving: int) -> Kind:
    """The kind of an operation with `moving` arguments that depend on the input (one counted as often as it occurs).

    Unknown is OTHER, never guessed: what is OTHER is refused by name where a bound would have to pass through it.
    """
    name = base(operation)
    if moving >= 2 and name in PRODUCTS:
        return Kind.PRODUCT if moving == 2 else Kind.OTHER
    kind = KINDS.get(name, Kind.OTHER)
    several = {Kind.ADD: 2, Kind.ATTENTION: 3, Kind.CONCAT: moving}
    return kind if moving <= several.get(kind, 1) else Kind.OTHER
