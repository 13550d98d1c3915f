"""How each kind of layer computes, and what one contribution's gradient of it is: one file per kind."""

from __future__ import annotations

from lamina.engine.layers.layer_registry import layer_forward_for
from lamina.engine.layers.layer_rule import ApplyRule, LayerForward, LayerRule

__all__ = ["ApplyRule", "LayerRule", "LayerForward", "layer_forward_for"]
