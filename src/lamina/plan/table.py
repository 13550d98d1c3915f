"""A step plan for people (a plain-text table) and for machines (the keys of `lamina plan --json`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from html import escape
from typing import TYPE_CHECKING, Any

from lamina.plan.codec import rule_to_dict, slice_to_dict
from lamina.plan.correlation import correlation_summary, prefix_error_ratio
from lamina.plan.rules import PER_STEP_INJECTION, NoiseKind
from lamina.plan.selection import Range, common_path

if TYPE_CHECKING:
    from lamina.plan.step_plan import StepPlan


WEAK_EPSILON = 10.0
"""ε above which a guarantee may mean little."""


def preformatted(text: str) -> str:
    """Return a page of text as HTML, for notebooks."""
    return f"<pre>{escape(text)}</pre>"


def layer_shares(plan: StepPlan) -> tuple[float, ...]:
    """The part of the budget that each layer takes, averaged over the private classes; sums to 1."""
    rows = [plan.share(k) for k in range(len(plan.classes)) if math.isfinite(plan.sigma(k))]
    if not rows:
        return (0.0,) * len(plan.layers)
    return tuple(math.fsum(column) / len(rows) for column in zip(*rows, strict=True))


def plan_summary(plan: StepPlan) -> dict[str, Any]:
    """Return figures per class and layer. Infinite figures, and ε, ρ and δ of unprotected public classes, are null."""
    return {
        "classes": {
            entry.name: {
                "sigma": finite_or_none(plan.sigma(k)),
                "epsilon": None if entry.public else finite_or_none(plan.epsilon(k)),
                "rho": None if entry.public else finite_or_none(plan.rho(k)),
                "delta": None if entry.public else plan.delta(k),
                "sampling_rate": entry.sampling_rate,
                "steps": plan.steps,
                "unit": entry.unit,
                "adjacency": plan.adjacency,
                "public": entry.public,
                "profile": entry.profile,
                **({"claimed": finite_or_none(plan.claimed[k])} if plan.claimed else {}),
            }
            for k, entry in enumerate(plan.classes)
        },
        "layers": [
            {
                "name": layer.name,
                "depth": layer.depth,
                "parameters": layer.size,
                "noise_std": plan.noise[i],
                "clip": {entry.name: finite_or_none(plan.clip[k][i]) for k, entry in enumerate(plan.classes)},
                "share": share,
            }
            for i, (layer, share) in enumerate(zip(plan.layers, layer_shares(plan), strict=True))
        ],
        "batch": plan.batch,
        "steps": plan.steps,
        "clipping": plan.clipping.value,
        "accountant": plan.accountant,
        "allocation": plan.allocation,
        "rules": [rule_to_dict(rule) for rule in plan.rules],
        "injection": plan.injection.to_dict(),
        "noise_kind": plan.noise_kind.value,
        "correlation": None
        if (found := correlation_summary(plan)) is None
        else {**found, "prefix_error_ratio": prefix_error_ratio(plan)},
        "slices": [
            {"class" if name == "cls" else name: value for name, value in slice_to_dict(part).items()}
            for part in plan.slices
        ],
        "digest": plan.digest().hex(),
    }


def plan_table(plan: StepPlan) -> str:
    """One row per layer, then one row per class with its ε before the first step."""
    size = sum(layer.size for layer in plan.layers)
    head = (
        f"{len(plan.layers)} layers, {size:,} parameters; {plan.allocation} allocation, "
        f"{plan.clipping.value} clipping; {plan.steps:,} steps of {_batch_text(plan)}; "
        f"accountant {plan.accountant}{_injection_text(plan)}"
    )
    layers = [["layer", "depth", "parameters", "noise S", *(f"C {c.name}" for c in plan.classes), "share"]]
    for i, (layer, share) in enumerate(zip(plan.layers, layer_shares(plan), strict=True)):
        clips = [clip_text(plan, k, i) for k in range(len(plan.classes))]
        noise = at_least(plan.noise[i]) if plan.noise[i] else "none"
        layers.append([layer.name, f"{layer.depth:.2f}", f"{layer.size:,}", noise, *clips, f"{100 * share:.1f} %"])
    classes = [["class", "reaches", "population", "rate q", "sigma", "ε", "δ", "unit"]]
    notes = [f"note: {correlation_text(plan)}"] if plan.bands > 1 else []
    if plan.injection.raw:
        count = plan.injection.events(0, plan.steps)
        notes.append(
            f"note: ε is {plan.adjacency}: it prices {count:,} occurrences of a contribution, hidden by its own noise alone"
        )
    for k, entry in enumerate(plan.classes):
        population = "-" if entry.population is None else f"{entry.population:,}"
        row = [entry.name, reach_text(plan, k), population, at_most(entry.sampling_rate)]
        if entry.public:
            classes.append([*row, "public", "not protected", "–", entry.unit])
            continue
        epsilon = epsilon_text(plan.epsilon(k))
        classes.append([*row, at_least(plan.sigma(k)), epsilon, f"{entry.delta:g}", entry.unit])
        if plan.claimed:
            notes.append(
                f"warning: this reproduces a paper's method: for class {entry.name} the paper claims ε = "
                f"{at_most(plan.claimed[k])}; the true figure is the {epsilon} above"
            )
        if plan.epsilon(k) > WEAK_EPSILON:
            weak = f"warning: ε = {epsilon} protects class {entry.name} weakly: choose {WEAK_EPSILON:g} or less, at best 1 to 3"
            notes.append(weak)
        if entry.population is not None and entry.delta * entry.population >= 1:
            notes.append(f"note: δ of class {entry.name} is not below 1/population")
    parts = ["", *slice_lines(plan)] if plan.slices else []
    return "\n".join([head, "", *align_columns(layers, left=1), "", *align_columns(classes, left=2), *notes, *parts])


def reach_text(plan: StepPlan, k: int) -> str:
    """The profile of a class, and the first block that it reaches where that is not the model's first."""
    reached = [layer for layer, c in zip(plan.layers, plan.clip[k], strict=True) if c > 0]
    profile = plan.classes[k].profile
    if not reached or len(reached) == len(plan.layers):
        return profile
    block = [layer.name.split(".") for layer in plan.layers if layer.spans[:1] == reached[0].spans[:1]]
    common = common_path(*block) if plan.blocks and len(block) > 1 else ()
    return f"{profile}, from {'.'.join(common) or reached[0].name}"


def slice_lines(plan: StepPlan) -> list[str]:
    """What classes reach of tensors that they do not reach whole; modules that differ only by numbers in one line."""
    found: dict[tuple[object, ...], dict[str, list[str]]] = {}
    for part in plan.slices:
        owner, _, name = part.tensor.rpartition(".")
        alike = (part.cls, re.sub(r"[0-9]+", "#", owner), part.axis, part.length, part.ranges)
        found.setdefault(alike, {}).setdefault(owner, []).append(name)
    rows = [["* reached in part by", "tensor", "places", "of", ""]]
    for (cls, _, axis, length, ranges), owners in found.items():
        owner, names = next(iter(owners.items()))
        places = index_text(axis, ranges) if ranges else "none"  # type: ignore[arg-type]
        more = f"and {len(owners) - 1} like it" if len(owners) > 1 else ""
        rows.append([str(cls), f"{owner}.{', '.join(names)}".lstrip("."), places, str(length), more])
    return align_columns(rows, left=3)


def index_text(axis: int, ranges: Sequence[Range]) -> str:
    """Places along an axis as an index would have them: '[:, 0:8, 16:24]'."""
    return "[" + ":, " * axis + ", ".join(f"{first}:{stop}" for first, stop in ranges) + "]"


def align_columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns of equal width; the first `left` flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _batch_text(plan: StepPlan) -> str:
    """How many contributions a step expects, and the divisor of the sum where that is another number."""
    expected = math.fsum(e.sampling_rate * (e.population or math.nan) for e in plan.classes)
    if math.isnan(expected) or math.isclose(expected, plan.batch, rel_tol=1e-9):
        return f"expected batch {plan.batch:g}"
    return f"expected batch {expected:g}, its sum divided by {plan.batch:g}"


def _injection_text(plan: StepPlan) -> str:
    if plan.noise_kind is not NoiseKind.GAUSSIAN:
        std = (
            f" of standard deviation {at_least(plan.noise_kind.std_ratio)} S"
            if plan.noise_kind is NoiseKind.LAPLACE
            else ""
        )
        return f"; {plan.noise_kind.value} noise{std}"
    if plan.bands > 1:
        return f"; noise correlated over {plan.bands} steps"
    return "" if plan.injection == PER_STEP_INJECTION else f"; noise {plan.injection}"


def correlation_text(plan: StepPlan) -> str:
    """What correlated noise does to the sums of gradients, and what it asks of the sampling."""
    ratio = prefix_error_ratio(plan)
    verdict = "a gain" if ratio < 1 else "a loss: use fewer bands, or none"
    return (
        f"Noise is correlated over {plan.bands} steps: sums of gradients have {at_most(ratio)} times the mean squared error of "
        f"independent noise at the same ε ({verdict}). Contributions take turns: each may be sampled in one of {plan.bands} steps, "
        f"at {plan.bands} times its rate q, which is the mean over all steps"
    )


def clip_text(plan: StepPlan, k: int, layer: int) -> str:
    """C of a class at a layer for a table; with a star where it reaches the layer in part."""
    c = plan.clip[k][layer]
    star = "*" if c > 0 and any(plan.slice(k, name) for name in plan.layers[layer].parameters) else ""
    return ("-" if c == 0 else "public" if math.isinf(c) else at_most(c)) + star


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity: null claims nothing."""
    return value if math.isfinite(value) else None


# Figures for people are rounded to the safe side, so that no table promises more than there is: what is lost or may be
# lost up (ε, its bound, ρ, C, q, scales), what protects or remains down (S, sigma, variances). Two figures that are
# compared are rounded the same way, so that what keeps a bound looks as if it did.


def epsilon_text(epsilon: float, digits: int = 4) -> str:
    """ε, spent or allowed: rounded up.

    >>> epsilon_text(0.99991, 3)
    '1.000'
    """
    return _rounded(epsilon, digits, ROUND_CEILING)


def percent_text(rate: float) -> str:
    """Return the success rate of an attack in per cent, rounded up.

    >>> percent_text(0.05281)
    '5.29 %'
    """
    return f"{_rounded(100 * rate, 2, ROUND_CEILING)} %"


def remaining_text(epsilon: float, digits: int = 4) -> str:
    """What remains of an ε: rounded down.

    >>> remaining_text(0.99999, 3)
    '0.999'
    """
    return _rounded(epsilon, digits, ROUND_FLOOR)


def at_most(value: float, digits: int = 4) -> str:
    """What costs privacy (C, q, ρ, a scale), by significant digits: rounded up.

    >>> at_most(0.123412)
    '0.1235'
    """
    return _rounded(value, digits, ROUND_CEILING, significant=True)


def at_least(value: float, digits: int = 4) -> str:
    """What protects (S, sigma, a variance), by significant digits: rounded down.

    >>> at_least(1.802461)
    '1.802'
    """
    return _rounded(value, digits, ROUND_FLOOR, significant=True)


def _rounded(value: float, digits: int, rounding: str, *, significant: bool = False) -> str:
    """With so many decimal places, or significant digits; from 10,000 on four of these."""
    if not math.isfinite(value):
        return "∞"
    exact = Decimal(repr(float(value)))
    if not significant and abs(value) < 1e4:
        return f"{exact.quantize(Decimal(1).scaleb(-digits), rounding, Context(prec=700)):.{digits}f}"
    digits = digits if significant else 4
    found = exact.quantize(Decimal(1).scaleb(exact.adjusted() + 1 - digits), rounding, Context(prec=700))
    return f"{float(found):.{digits}g}"


MAX_PRINTED_CHARACTERS = 255


def printable(text: str) -> str:
    r"""Text from outside as it may be shown: printable, on one line, not endless.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if len(text) > MAX_PRINTED_CHARACTERS:
        text = f"{text[: MAX_PRINTED_CHARACTERS - 1]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
