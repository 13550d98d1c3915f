"""How each kind of layer computes, and what one contribution's gradient of it is: one file per kind."""

from __future__ import annotations

from lamina.engine.rules.registry import rule_for
from lamina.engine.rules.rule import Apply, Rule, Site

__all__ = ["Apply", "Rule", "Site", "rule_for"]
