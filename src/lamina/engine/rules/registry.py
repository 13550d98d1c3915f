"""Which module gets which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lamina.engine.hooks import is_plain
from lamina.engine.rules.attention import AttentionSite
from lamina.engine.rules.conv import ConvSite, ConvTransposeSite
from lamina.engine.rules.embedding import EmbeddingSite
from lamina.engine.rules.linear import LinearSite
from lamina.engine.rules.norm import group_norm, instance_norm, layer_norm, rms_norm
from lamina.engine.rules.recurrent import RecurrentSite
from lamina.engine.rules.rule import Site

_SITES: dict[type[nn.Module], Callable[[Any], Site]] = {
    nn.Linear: LinearSite,
    nn.Conv1d: ConvSite,
    nn.Conv2d: ConvSite,
    nn.Conv3d: ConvSite,
    nn.ConvTranspose1d: ConvTransposeSite,
    nn.ConvTranspose2d: ConvTransposeSite,
    nn.ConvTranspose3d: ConvTransposeSite,
    nn.Embedding: EmbeddingSite,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.MultiheadAttention: AttentionSite,
    nn.RNN: RecurrentSite,
    nn.LSTM: RecurrentSite,
    nn.GRU: RecurrentSite,
}


def rule_for(module: nn.Module) -> Site | None:
    """The site for a module, or None where no rule is known and it must run per contribution.

    A subclass counts as its base only if it keeps the base's forward, and a module whose weight is
    not a leaf (weight_norm, parametrizations) never matches: its leaf is something else.
    """
    if hasattr(module, "parametrizations") or not is_plain(module):
        return None
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return None
    kind = type(module)
    if kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D":
        return _complete(module, LinearSite(module, transposed=True))
    for base, make in _SITES.items():
        if isinstance(module, base) and kind.forward is base.forward:
            return _complete(module, make(module))
    return None


def _complete(module: nn.Module, site: Site) -> Site | None:
    """A site must cover every parameter that the module itself owns."""
    own = {name for name, p in module._parameters.items() if p is not None}
    return site if own == set(site.parameters) else None
