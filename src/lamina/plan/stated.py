"""What a module states about itself, and what somebody declares about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lamina.errors import PlanError
from lamina.plan.naming import ROOT, matches


def whole(value: Any) -> bool:
    """Whether it is a whole number >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def stated(module: nn.Module, names: Sequence[str], *, configured: bool = True) -> int | None:
    """The first of these numbers that the module itself, or else its configuration, states."""
    for holder in (module.__dict__, getattr(module, "config", None)) if configured else (module.__dict__,):
        for name in names:
            value: Any = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if whole(value):
                return int(value)
    return None


class Declarations:
    """What is declared about modules: by pattern of their names, or by an attribute of the module itself."""

    def __init__(self, given: Mapping[str, Any], attribute: str, what: str) -> None:
        self.given, self.attribute, self.what = given, attribute, what
        self._met: set[str] = set()

    def of(self, path: str, module: nn.Module) -> Any:
        """What is declared about this module; None if nothing is. A pattern means a module, not what is inside it."""
        name = path or ROOT
        found = getattr(module, self.attribute, None)
        for pattern, value in self.given.items():
            if matches(pattern, name) and not matches(pattern, name.rpartition(".")[0]):
                self._met.add(pattern)
                found = value
        return found

    def check(self) -> None:
        """Refuse a pattern that meant no module."""
        for pattern in self.given:
            if pattern not in self._met:
                raise PlanError(
                    "plan.declared-means-no",
                    f"{self.what} are declared for {pattern!r}, which means no module",
                    "correct the pattern",
                )


def related(path: str, others: set[str]) -> bool:
    """Whether one of the others is this module, above it, or inside it."""
    return any(
        path == other or not path or not other or other.startswith(f"{path}.") or path.startswith(f"{other}.")
        for other in others
    )
