"""`Mask`: which heads, or which experts, by number; the same everywhere or by pattern of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.errors import PlanError
from lamina.plan.naming import matches

EVERYWHERE = "*"
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Mask:
    """Numbers, counted from 0, of heads or experts, by `fnmatch` pattern of the module that has them.

    `rows` are (pattern, numbers) in order of the patterns; one row of pattern "*" is the same everywhere. A module that
    no pattern means has none.
    """

    rows: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def parse(cls, value: Any, what: str) -> Mask:
        """From the form of policy.toml: a list of numbers, or a table from patterns to lists. `what` they are."""
        example = (
            f'write {what} = [0, 1], or {what} = {{ "*.3.*" = [0, 1] }} for the modules that a pattern means'
        )
        if isinstance(value, Mask):
            return value
        if isinstance(value, Mapping):
            if not value or not all(isinstance(pattern, str) and pattern for pattern in value):
                raise PlanError(
                    "plan.profile-go-patterns",
                    f"profile {what} is {dict(value)!r}, must go from patterns to numbers",
                    example,
                )
            if EVERYWHERE in value and len(value) > 1:
                raise PlanError(
                    "plan.profile-pattern-beside",
                    f"profile {what} has the pattern '*' beside others, which it means too",
                    "let every module be meant by one pattern",
                )
            rows = value
        else:
            rows = {EVERYWHERE: value}
        return cls(tuple((pattern, _numbers(rows[pattern], what, example)) for pattern in sorted(rows)))

    @property
    def everywhere(self) -> tuple[int, ...] | None:
        """The numbers, if they are the same everywhere."""
        return self.rows[0][1] if self.rows[0][0] == EVERYWHERE else None

    def plain(self) -> list[int] | dict[str, list[int]]:
        """The form of policy.toml; `parse` reads it back."""
        if self.everywhere is not None:
            return list(self.everywhere)
        return {pattern: list(numbers) for pattern, numbers in self.rows}

    def of(self, module: str, what: str) -> frozenset[int]:
        """The numbers at the module of this name: none if no pattern means it."""
        found = {numbers: pattern for pattern, numbers in self.rows if matches(pattern, module)}
        if len(found) > 1:
            first, second = sorted(found.values())[:2]
            raise PlanError(
                "plan.profile-two-patterns",
                f"profile {what} has two patterns for {module!r}, {first!r} and {second!r}, with other numbers",
                "let every module be meant by one pattern",
            )
        return frozenset(next(iter(found), ()))

    def __str__(self) -> str:
        if self.everywhere is not None:
            return ", ".join(map(str, self.everywhere))
        return "; ".join(f"{', '.join(map(str, numbers))} of {pattern}" for pattern, numbers in self.rows)


def _numbers(value: Any, what: str, example: str) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise PlanError(
            "plan.profile-number-list",
            f"profile {what} is {value!r}, must be one number or more in a list",
            example,
        )
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _MOST:
            raise PlanError(
                "plan.profile-holds-whole",
                f"profile {what} holds {number!r}, must be whole numbers counted from 0",
                example,
            )
    return tuple(sorted(set(value)))
