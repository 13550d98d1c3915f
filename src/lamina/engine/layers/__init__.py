"""How each kind of layer computes and what one contribution's gradient of it is; which module is run by which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lamina.engine.layers.conv import ConvForward, ConvTransposeForward
from lamina.engine.layers.layer_rule import ApplyRule, LayerForward, LayerRule, has_class_forward
from lamina.engine.layers.linear import EmbeddingForward, LinearForward
from lamina.engine.layers.norm import group_norm_forward, instance_norm_forward, layer_norm_forward, rms_norm_forward
from lamina.engine.layers.sequence import AttentionForward, RecurrentForward

__all__ = ["ApplyRule", "LayerRule", "LayerForward", "layer_forward_for"]

_FORWARDS: dict[type[nn.Module], Callable[[Any], LayerForward]] = {
    nn.Linear: LinearForward,
    nn.Conv1d: ConvForward,
    nn.Conv2d: ConvForward,
    nn.Conv3d: ConvForward,
    nn.ConvTranspose1d: ConvTransposeForward,
    nn.ConvTranspose2d: ConvTransposeForward,
    nn.ConvTranspose3d: ConvTransposeForward,
    nn.Embedding: EmbeddingForward,
    nn.LayerNorm: layer_norm_forward,
    nn.RMSNorm: rms_norm_forward,
    nn.GroupNorm: group_norm_forward,
    nn.InstanceNorm1d: instance_norm_forward,
    nn.InstanceNorm2d: instance_norm_forward,
    nn.InstanceNorm3d: instance_norm_forward,
    nn.MultiheadAttention: AttentionForward,
    nn.RNN: RecurrentForward,
    nn.LSTM: RecurrentForward,
    nn.GRU: RecurrentForward,
}


def layer_forward_for(module: nn.Module) -> LayerForward | None:
    """The `LayerForward` of a module, or None where no rule is known and it must run per contribution.

    A subclass counts as its base only if it keeps the base's forward, and a module whose weight is
    not a leaf (weight_norm, parametrizations) never matches: its leaf is something else.
    """
    if hasattr(module, "parametrizations") or not has_class_forward(module):
        return None
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return None
    kind = type(module)
    if kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D":
        return _if_complete(module, LinearForward(module, transposed=True))
    for base, make in _FORWARDS.items():
        if isinstance(module, base) and kind.forward is base.forward:
            return _if_complete(module, make(module))
    return None


def _if_complete(module: nn.Module, made: LayerForward) -> LayerForward | None:
    """None unless it covers every parameter that the module itself owns."""
    own = {name for name, p in module._parameters.items() if p is not None}
    return made if own == set(made.parameters) else None
