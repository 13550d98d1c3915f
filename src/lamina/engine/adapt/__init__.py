"""Plans that change while they run: one file per rule, and `Adaptation`, which holds what they came to."""

from __future__ import annotations

from lamina.engine.adapt.adaptation import Adaptation

__all__ = ["Adaptation"]
