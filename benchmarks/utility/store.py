"""Results of one task in one JSON file, written after every run: an interrupted measurement goes on where it was."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass
class Store:
    """`tuning`, `runs`, `spread`: policy → list of {clip, rate, seed, plan, figure, …}; `plan` is the plan's digest.

    A figure counts only for the plan that it was measured with: if a policy changes, its runs are measured again.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    spread: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    printed: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, task: str, folder: Path = RESULTS) -> Store:
        store = cls(path=folder / f"utility-{task}.json")
        if store.path.exists():
            held = json.loads(store.path.read_text(encoding="utf-8"))
            store.about, store.printed = held["about"], held["printed"]
            store.tuning, store.runs, store.spread = held["tuning"], held["runs"], held.get("spread", {})
        return store

    def find(self, table: str, policy: str, **wanted: Any) -> dict[str, Any] | None:
        for row in getattr(self, table).get(policy, []):
            if all(row.get(key) == value for key, value in wanted.items()):
                return dict(row)
        return None

    def add(self, table: str, policy: str, row: dict[str, Any]) -> None:
        """Keep a row in place of one with the same clip, rate and seed."""
        rows = getattr(self, table).setdefault(policy, [])
        same = ("clip", "rate", "seed")
        rows[:] = [old for old in rows if any(old[key] != row[key] for key in same)]
        rows.append(row)
        self.save()

    def forget(self, policies: list[str]) -> None:
        """Measure these policies anew: what carries out a plan has changed, though the plan has not."""
        for policy in policies:
            self.tuning.pop(policy, None)
            self.runs.pop(policy, None)
        self.save()

    def save(self) -> None:
        tables = {"tuning": self.tuning, "runs": self.runs, "spread": self.spread, "printed": self.printed}
        text = {"about": self.about, **tables}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(scratch, self.path)
