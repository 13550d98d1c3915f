"""The table in Markdown: means, paired differences to `flat`, and which of them are more than chance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from .policies import ENTRIES
from .prototype import LIKE, SEEN
from .store import Store
from .tasks import TASKS, Task
from .tuning import best

BEYOND = 2.0  # standard errors


@dataclass(frozen=True)
class Column:
    """One task's results: figures by policy and seed, in the unit of the table."""

    task: Task
    store: Store

    def figures(self, policy: str) -> dict[int, float]:
        """By seed, with what tuning chose; a run that diverged is not a number."""
        rows = self.store.runs.get(policy, [])
        if not rows or policy not in self.store.tuning:
            return {}
        clip, rate = best(self.task, self.store.tuning[policy])
        return {
            row["seed"]: self.task.scale * (math.nan if row["figure"] is None else row["figure"])
            for row in rows
            if (row["clip"], row["rate"]) == (clip, rate)
        }

    def cell(self, policy: str) -> str:
        found = list(self.figures(policy).values())
        if not found:
            return "–"
        spread = stdev(found) if len(found) > 1 else 0.0
        return f"{fmean(found):{self.form}} ± {spread:{self.form}}"

    @property
    def form(self) -> str:
        return ".2f" if self.task.scale > 1 else ".4f"

    def difference(self, policy: str) -> tuple[float, float] | None:
        """Mean difference to flat over the seeds that both have, and its standard error."""
        mine, flat = self.figures(policy), self.figures("flat")
        paired = [mine[seed] - flat[seed] for seed in mine if seed in flat]
        if len(paired) < 2 or policy == "flat":
            return None
        return fmean(paired), stdev(paired) / math.sqrt(len(paired))

    def verdict(self, policy: str) -> str:
        """better, worse, or nothing if the difference is within 2 standard errors."""
        found = self.difference(policy)
        if found is None or not abs(found[0]) > BEYOND * found[1]:
            return ""
        return "better" if (found[0] > 0) == self.task.higher else "worse"

    def difference_cell(self, policy: str) -> str:
        found = self.difference(policy)
        if found is None:
            return "–"
        text = f"{found[0]:+{self.form}} ± {found[1]:{self.form}}"
        mark = self.verdict(policy)
        return f"**{text}** {mark}" if mark else text

    def chosen(self, policy: str) -> str:
        """C and rate as tuned; an asterisk where one of them lies on the edge of its grid."""
        if policy not in self.store.tuning:
            return "–"
        clip, rate = best(self.task, self.store.tuning[policy])
        return f"{clip:g}{_edge(clip, self.task.clips)}, {rate:g}{_edge(rate, self.task.rates)}"


def _edge(value: float, grid: tuple[float, ...]) -> str:
    return "\\*" if value in (grid[0], grid[-1]) else ""


def report() -> str:
    columns = [Column(task, Store.of(name)) for name, task in TASKS.items()]
    columns = [column for column in columns if column.store.runs]
    if not columns:
        raise SystemExit("there are no results: python benchmarks/utility run")
    policies = [name for name in ENTRIES if any(column.figures(name) for column in columns)]
    parts = [
        _head(columns),
        "Mean ± standard deviation over seeds.",
        _table(policies, columns, Column.cell),
        "Difference to `flat`, paired by seed, ± its standard error; **bold** where it is beyond two standard errors.",
        _table([p for p in policies if p != "flat"], columns, Column.difference_cell),
        _verdict(policies, columns),
        _against_prototype(columns),
        _tuning_matters(policies, columns),
        "Chosen on the stand-in: clip norm C, learning rate in units of 1/C; \\* on the edge of its grid.",
        _table(policies, columns, Column.chosen),
        _grids(columns),
        _printed(columns),
    ]
    return "\n\n".join(parts) + "\n"


def _head(columns: list[Column]) -> str:
    about = columns[0].store.about
    seeds = {len(column.figures("flat")) for column in columns}
    lines = [
        f"Measured {max(c.store.about['date'] for c in columns)} on {about['machine']}, one thread per run; "
        f"δ = {about['delta']:g}; {' or '.join(map(str, sorted(seeds)))} seeds, each the same initial weights and the "
        "same Poisson samples for all policies. Noise from a seed: measurements, not releases. "
        "`python benchmarks/utility` measures it again.",
        "",
        "| task | figure | private unit | units | tested on | batch | steps | noise of pareto-n over flat's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for column in columns:
        a = column.store.about
        lines.append(
            f"| {a['task']} | {column.task.metric}{'' if column.task.higher else ' (lower is better)'} | {a['unit']} | "
            f"{a['units']:,} | {a['tested']:,} | {a['batch']} | {a['steps']} | {a['saved']:.2f} |"
        )
    return "\n".join(lines)


def _table(policies: list[str], columns: list[Column], cell: Any) -> str:
    heads = [c.task.title.replace(" slice", "") for c in columns]
    lines = [f"| policy | | {' | '.join(heads)} |", "|---" * (len(columns) + 2) + "|"]
    for policy in policies:
        cells = " | ".join(cell(column, policy) for column in columns)
        lines.append(f"| `{policy}` | {ENTRIES[policy].what} | {cells} |")
    return "\n".join(lines)


def _verdict(policies: list[str], columns: list[Column]) -> str:
    lines = []
    for word in ("better", "worse"):
        for policy in policies:
            where = [c.task.title for c in columns if c.verdict(policy) == word]
            if where:
                lines.append(
                    f"- `{policy}` is {word} than `flat` beyond {BEYOND:g} standard errors: {'; '.join(where)}."
                )
    others = [p for p in policies if p != "flat" and not any(c.verdict(p) for c in columns)]
    if others:
        names = ", ".join(f"`{p}`" for p in others)
        lines.append(f"- Within {BEYOND:g} standard errors of `flat` everywhere: {names}.")
    chances = [
        2 * float(student.sf(BEYOND, len(c.figures("flat")) - 1))
        for c in columns
        for p in policies
        if c.difference(p) is not None
    ]
    lines.append(
        f"- Two standard errors of so few seeds are weak evidence: of {len(chances)} comparisons, {sum(chances):.0f} "
        "would be marked if no policy differed from `flat` at all. A mark counts where several tasks agree, or where "
        "the difference is many times its error."
    )
    return "\n".join(["Verdict:", "", *lines])


def _against_prototype(columns: list[Column]) -> str:
    """Our difference to flat beside the prototype's: same sign and marked, opposite sign and marked, or open."""
    lines = [
        "Against the prototype of docs/theory.md (difference to its `flat`; NMSE in % of flat's):",
        "",
        "| policy | prototype's name | task | prototype | here | |",
        "|---|---|---|---|---|---|",
    ]
    for policy, name in LIKE.items():
        for column in columns:
            seen, found = SEEN[column.task.name], column.difference(policy)
            if policy not in seen or found is None:
                continue
            theirs, mine = seen[policy] - seen["flat"], found[0]
            if not column.task.higher:
                theirs, mine = (
                    100 * theirs / seen["flat"],
                    100 * mine / fmean(column.figures("flat").values()),
                )
            form = ".1f" if not column.task.higher else ".2f" if column.task.scale > 1 else ".3f"
            unit = "" if column.task.higher else " %"
            same = (theirs > 0) == (mine > 0)
            word = (
                ("reproduced" if same else "refuted")
                if column.verdict(policy)
                else "open: within 2 standard errors"
            )
            lines.append(
                f"| `{policy}` | {name} | {column.task.name} | {theirs:+{form}}{unit} | {mine:+{form}}{unit} | {word} |"
            )
    return "\n".join(lines)


def _tuning_matters(policies: list[str], columns: list[Column]) -> str:
    """How far apart the grid points of flat lie on the stand-in, and how far apart the policies, each at its best."""
    lines = ["Tuning against policies, on the stand-in (worst to best figure):", ""]
    for c in columns:
        tuned = {p: _points(c, p) for p in policies if _points(c, p)}
        low, high = min(tuned["flat"]), max(tuned["flat"])
        tops = {p: max(found) if c.task.higher else min(found) for p, found in tuned.items()}
        lines.append(
            f"- {c.task.name}: `flat` over its grid {low:{c.form}} to {high:{c.form}}; the policies at their best "
            f"{min(tops.values()):{c.form}} to {max(tops.values()):{c.form}}, or without LADP and quantile "
            f"{min(v for p, v in tops.items() if _fixed(p)):{c.form}} to "
            f"{max(v for p, v in tops.items() if _fixed(p)):{c.form}}"
        )
    return "\n".join(lines)


def _fixed(policy: str) -> bool:
    return not policy.startswith(("ladp", "quantile"))


def _points(c: Column, policy: str) -> list[float]:
    """Mean figures of the grid points that did not diverge."""
    held: dict[tuple[float, float], list[float]] = {}
    for row in c.store.tuning.get(policy, []):
        if row["figure"] is not None and row["clip"] in c.task.clips and row["rate"] in c.task.rates:
            held.setdefault((row["clip"], row["rate"]), []).append(c.task.scale * row["figure"])
    return [fmean(found) for found in held.values()]


def _grids(columns: list[Column]) -> str:
    lines = ["Every policy was tuned on the same grid with the same number of tries:"]
    for c in columns:
        clips, rates = (", ".join(f"{v:g}" for v in grid) for grid in (c.task.clips, c.task.rates))
        lines.append(
            f"{c.task.name}: C in {clips}; rate in {rates}; {c.task.tries} seed{'s' if c.task.tries > 1 else ''} each."
        )
    return "  \n".join(lines)


def _printed(columns: list[Column]) -> str:
    lines = [
        "Not in the table, because they have no such ε (true ε at the same δ, beside what the document would claim):",
        "",
    ]
    for c in columns:
        for name, row in c.store.printed.items():
            lines.append(f"- `{name}`, {c.task.title}: claims {row['claimed']:.3g}, is {row['epsilon']:.3g}")
    return "\n".join(lines)
