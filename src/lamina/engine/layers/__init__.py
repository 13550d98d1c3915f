"""How each kind of layer computes and what one contribution's gradient of it is; which module is run by which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lamina.engine.layers.conv import ConvForward, ConvTransposeForward
from lamina.engine.layers.layer_rule import ApplyRule, LayerForward, LayerRule, has_class_forward
from lamina.engine.layers.linear import EmbeddingForward, LinearForward
from lamina.engine.layers.norm import GroupNormRule, LayerNormRule, NormForward, RMSNormRule, instance_norm_forward
from lamina.engine.layers.sequence import AttentionForward, RecurrentForward
from lamina.errors import EngineError

__all__ = ["ApplyRule", "LayerRule", "LayerForward", "declare_layer", "declared_rules", "layer_forward_for"]

_FORWARDS: dict[type[nn.Module], Callable[[Any], LayerForward]] = {
    nn.Linear: LinearForward,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvForward),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ConvTransposeForward),
    nn.Embedding: EmbeddingForward,
    nn.LayerNorm: lambda m: NormForward(m, LayerNormRule(m.normalized_shape, m.eps)),
    nn.RMSNorm: lambda m: NormForward(m, RMSNormRule(m.normalized_shape, m.eps)),
    nn.GroupNorm: lambda m: NormForward(m, GroupNormRule(m.num_groups, m.eps)),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm_forward),
    nn.MultiheadAttention: AttentionForward,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), RecurrentForward),
}


_declared: dict[type[nn.Module], Callable[[Any], LayerForward]] = {}


def declare_layer(kind: type[nn.Module], make: Callable[[Any], LayerForward]) -> None:
    """Cover modules of a class by a rule of your own; without one they are run once per contribution.

    `make` gets the module. Compare the rule with `vmap(grad)` on your module: nothing else checks its gradients.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or kind in _FORWARDS or kind in _declared:
        problem = f"{kind!r} is no class of modules, or has a rule already"
        raise EngineError("engine.layer-not-declared", problem, "declare a class of your own, once")
    _declared[kind] = make


def declared_rules(model: nn.Module) -> dict[str, Any]:
    """The makers of rules from outside that modules of a model use, by class: code that a step depends on."""
    kinds = sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__)
    return {kind.__qualname__: _declared[kind] for kind in kinds if kind in _declared}


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
    for base, make in (*_declared.items(), *_FORWARDS.items()):
        if isinstance(module, base) and kind.forward is base.forward:
            return _if_complete(module, make(module))
    return None


def _if_complete(module: nn.Module, made: LayerForward) -> LayerForward | None:
    """None unless it covers every parameter that the module itself owns."""
    own = {name for name, p in module._parameters.items() if p is not None}
    return made if own == set(made.parameters) else None
