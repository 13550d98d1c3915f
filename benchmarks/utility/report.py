"""The table in Markdown: means, paired differences to `flat`, and which of them are more than chance."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from .columns import LEVEL, Column
from .policies import ENTRIES
from .prototype import LIKE, SEEN, SPREAD
from .store import Store
from .tasks import TASKS
from .tuning import best


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
        "Difference to `flat`, paired by seed, ± its standard error; **bold** where a paired t-test is significant at 5 %.",
        _table([p for p in policies if p != "flat"], columns, Column.difference_cell),
        "The same against `flat` at the policy's own C and rate, where `flat` was run there too: what is left when the "
        "choice of C is taken out.",
        _table([p for p in policies if p != "flat"], columns, Column.same_point_cell),
        _verdict(policies, columns),
        _why(columns),
        _against_prototype(columns),
        _tuning_matters(policies, columns),
        _spread(columns),
        "Chosen on the stand-in: clip norm C, learning rate in units of 1/C; \\* on the edge of its grid.",
        _table(policies, columns, Column.chosen),
        _grids(columns),
        NOTES,
        _printed(columns),
    ]
    return "\n\n".join(parts) + "\n"


def _head(columns: list[Column]) -> str:
    about = columns[0].store.about
    lines = [
        f"Measured {max(c.store.about['date'] for c in columns)} on {about['machine']}, one thread per run; "
        f"δ = {about['delta']:g}. A seed has the same initial weights and the same Poisson samples for all policies. "
        "Noise comes from the seed too: these are measurements, not releases. "
        "`python benchmarks/utility` measures it again.",
        "",
        "| task | figure | private unit | units | tested on | batch | steps | seeds | noise of pareto-n over flat's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for column in columns:
        a = column.store.about
        lines.append(
            f"| {a['task']} | {column.task.metric}{'' if column.task.higher else ' (lower is better)'} | {a['unit']} | "
            f"{a['units']:,} | {a['tested']:,} | {a['batch']} | {a['steps']} | {len(column.seeds)} | "
            f"{a['saved']:.2f} |"
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
            where = [c.task.name for c in columns if c.verdict(policy) == word]
            if where:
                lines.append(f"- `{policy}` is significantly {word} than `flat`: {', '.join(where)}.")
    others = [p for p in policies if p != "flat" and not any(c.verdict(p) for c in columns)]
    if others:
        lines.append(f"- No significant difference to `flat`: {', '.join(f'`{p}`' for p in others)}.")
    compared = sum(c.difference(p) is not None for c in columns for p in policies)
    lines.append(
        f"- Of {compared} comparisons, {LEVEL * compared:.0f} would be significant if no policy differed from `flat`."
    )
    return "\n".join(["Verdict (paired t-test, 5 %):", "", *lines])


def _against_prototype(columns: list[Column]) -> str:
    """Our difference to flat beside the prototype's."""
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
                theirs, mine = (100 * theirs / seen["flat"], 100 * mine / fmean(column.figures("flat").values()))
            form = ".1f" if not column.task.higher else ".2f" if column.task.scale > 1 else ".3f"
            unit = "" if column.task.higher else " %"
            word = _compared(
                abs(seen[policy] - seen["flat"]) > SPREAD[column.task.name] + 1e-9, theirs, mine, column.verdict(policy)
            )
            lines.append(
                f"| `{policy}` | {name} | {column.task.name} | {theirs:+{form}}{unit} | {mine:+{form}}{unit} | {word} |"
            )
    return "\n".join(lines)


def _compared(told: bool, theirs: float, mine: float, verdict: str) -> str:
    """`told`: whether the prototype's difference was beyond its own spread over seeds."""
    if told and verdict:
        return "reproduced" if (theirs > 0) == (mine > 0) else f"not reproduced: {verdict} here"
    if told:
        return "not reproduced: no significant difference here"
    return f"no difference there, {verdict} here" if verdict else "no difference in either"


def _tuning_matters(policies: list[str], columns: list[Column]) -> str:
    """How far apart the grid points of flat lie on the stand-in, and how far apart the policies, each at its best."""
    lines = ["Tuning against policies, on the stand-in (worst to best figure):", ""]
    for c in columns:
        tuned = {p: c.tuned(p) for p in policies if c.tuned(p)}
        low, high = min(tuned["flat"]), max(tuned["flat"])
        tops = {p: max(found) if c.task.higher else min(found) for p, found in tuned.items()}
        lines.append(
            f"- {c.task.name}: `flat` over its grid {low:{c.form}} to {high:{c.form}}; the policies at their best "
            f"{min(tops.values()):{c.form}} to {max(tops.values()):{c.form}}, or without LADP and quantile "
            f"{min(v for p, v in tops.items() if _fixed(p)):{c.form}} to "
            f"{max(v for p, v in tops.items() if _fixed(p)):{c.form}}"
        )
    return "\n".join(lines)


def _spread(columns: list[Column]) -> str:
    """What the clip norm alone does to flat on the real data."""
    lines = [
        "`flat` on the real data at every clip norm of its grid (a look after the fact; no choice rests on it):",
        "",
    ]
    for c in columns:
        rate = best(c.task, c.store.tuning["flat"])[1]
        cells = []
        for clip in c.task.clips:
            rows = [r for r in c.store.spread.get("flat", []) if (r["clip"], r["rate"]) == (clip, rate)]
            found = [c.task.scale * r["figure"] for r in rows if r["figure"] is not None]
            if found:
                cells.append(f"C = {clip:g}: {fmean(found):{c.form}}")
        lines.append(f"- {c.task.name}: {', '.join(cells) or 'not measured'}")
    return "\n".join(lines)


def _fixed(policy: str) -> bool:
    return not policy.startswith(("ladp", "quantile"))


def _why(columns: list[Column]) -> str:
    """Why flat is hard to beat: the optimum with the measured harm has nearly equal S."""
    lines = [
        "Why: noise that is best for the loss has S_l² ∝ n_l/√m_l. With m_l = d_l that favours large layers. With the "
        "harm m_l that was measured it is nearly the same for all layers, as if a layer's curvature went with its "
        "Fisher information, n_l² ∝ m_l; then `flat` *is* the optimum. (On PTB-XL the harm of two of the three layers "
        "does not stand out of its error, so there this says little.) Largest over smallest S_l:",
        "",
        "| task | m = d (`pareto-n`) | m = harm (`pareto-harm`) |",
        "|---|---|---|",
    ]
    for c in columns:
        a = c.store.about
        ratios = []
        for m in (a["sizes"], a["harm"]):
            s = [math.sqrt(n / math.sqrt(each)) for n, each in zip(a["norms"], m, strict=True)]
            ratios.append(f"{max(s) / min(s):.2f}")
        lines.append(f"| {c.task.name} | {' | '.join(ratios)} |")
    return "\n".join(lines)


NOTES = """\
How it came about: stand-ins are scikit-learn's digits, enlarged, moved and turned (for MNIST), and
`lamina.signals.ECGSimulator` (for PTB-XL). C, rate and everything measured of the layers come from them alone. The grids
were widened upward once, for all policies, because `lsab` and `ladp` stood at their upper edge on the stand-in (on some
tasks they still do, so larger rates might suit them better); first figures on PTB-XL had been seen by then, and stay in
the JSON files. `ladp-choice` and `ladp-budget` were measured again after they changed. `pareto-harm`, the look at
`flat`'s other clip norms and the seeds beyond three were added last. The slice of PTB-XL holds 1,481 labelled records
in the form of a printed page: its figures are not PTB-XL benchmark numbers."""


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
