"""`audit_step`: every claim of a plan about one step, measured, priced and judged, class by class."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from scipy.stats import chi2, norm
from torch import Tensor

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Event
from lamina.audit.canaries import ascent_canary, named_canaries, random_canaries
from lamina.audit.paired_step import PairedStep, Without, coupling_to_others, paired_step
from lamina.audit.target import COUNTS_KEY, AuditTarget, Region, plan_regions
from lamina.engine.batch import Batch, take_rows
from lamina.engine.distributed import is_sharded_model
from lamina.errors import EngineError
from lamina.plan.correlation import band_coefficients, participations
from lamina.plan.rules import FollowQuantile, NoiseKind, effective_sigma
from lamina.plan.step_plan import StepPlan


class Verdict(enum.Enum):
    """`passed`: nothing was found against the claim. `failed`: the claim is refuted."""

    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A claim and the evidence.

    lower_bound  the least that is true, by what was measured
    claimed      what the plan says
    unit         of both: "epsilon", "noise std" (how far something moved that must not move at all) or "relative"
    """

    name: str
    lower_bound: float
    claimed: float
    verdict: Verdict
    unit: str = "epsilon"
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASSED

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values: an infinite figure is the string "inf"."""
        plain = {name: v if math.isfinite(v) else str(v) for name, v in vars(self).items() if isinstance(v, float)}
        return {**vars(self), **plain, "verdict": self.verdict.value}


def epsilon_of_sensitivity(plan: StepPlan, k: str | int, sensitivity: float) -> float:
    """ε at the plan's δ if a contribution of class k moves every one of its T steps by `sensitivity`.

    A canary that does so in one step can do so in all of them, and the subsampled Gaussian of multiplier 1/sensitivity
    is then exactly what an observer of all steps faces. So no smaller ε is true (up to the grid of the PLD, which is
    exact to about 1e-3), and an ε above the claim refutes the claim. A plan that credits nothing to sampling is held to
    its word: the exact Gaussian, with the canary in every step (of raw noise, in as many as it may take part in).
    """
    row = plan.index(k)
    if plan.classes[row].public or sensitivity == 0:
        return 0.0
    if not math.isfinite(sensitivity):
        return math.inf
    amplified = find_accountant(plan.accountant).amplified and not plan.injection.raw
    q = plan.step_rate(row) if amplified else 1.0
    steps = plan.injection.events(0, plan.steps) if plan.injection.raw else participations(plan.steps, plan.bands)
    event = Event(sigma=1.0 / sensitivity, q=q, steps=steps)
    return find_accountant("pld" if amplified else "gaussian").epsilon((event,), plan.delta(row))


def epsilon_of_noise(plan: StepPlan, k: str | int, noise: Sequence[float], counts: float = 1.0) -> float:
    """ε of class k if its layers carry this noise instead of the plan's, and its counts so many times theirs."""
    row = plan.index(k)
    if plan.classes[row].public:
        return 0.0
    sigma = effective_sigma(plan.clip[row], noise, plan.bits(row) / counts)
    return epsilon_of_sensitivity(plan, row, math.inf if sigma == 0 else 1.0 / sigma)


def claimed_epsilon(plan: StepPlan, k: str | int, scale: float = 1.0) -> float:
    """The ε that is claimed for class k: the plan's own, or that of the paper which the plan reproduces."""
    return plan.claimed[plan.index(k)] if plan.claimed else plan.epsilon(k, scale=scale)


# Reading S: steps without a contribution are noise alone, and say how much there is.
#
# N draws of N(0, S²): Σ z²/S² is chi-square with N degrees of freedom, so that
#
#     S in [ √(Σz²/χ²_N(1-α/2)),  √(Σz²/χ²_N(α/2)) ]      with probability 1-α.

_MAX_STEPS = 128


@dataclass(frozen=True, kw_only=True)
class NoiseLevel:
    """The noise of one layer or region: what the plan says, and what was measured, with its confidence limits.

    `index`: of the layer in the plan, None for the counts; `classes`: those that may move it.
    """

    layer: str
    index: int | None
    classes: frozenset[int]
    planned: float
    measured: float
    low: float
    high: float

    @property
    def as_planned(self) -> bool:
        return self.low <= self.planned <= self.high


def noise_levels(
    subject: AuditTarget, batch: Batch, *, draws: int = 4096, risk: float = 1e-9, seed: int = 1
) -> tuple[NoiseLevel, ...]:
    """Measure the noise of every layer (with slices: of every region) from empty steps under different seeds.

    At least `draws` numbers of each are used. The noise of the counts comes last, if the plan has them. Raw noise is
    measured per contribution, from steps with an empty contribution of each private class. `risk` is the probability
    that a sound step is flagged, over all layers together. Of `batch` only the kinds of its tensors are used.
    """
    plan = subject.plan
    private = [k for k, entry in enumerate(plan.classes) if not entry.public and plan.injection.raw]
    nobody = _batch_without_signal(batch, private)
    parts = [r for r in plan_regions(plan, dict(subject.model.named_parameters())) if r.classes or r.span is None]
    smallest = min(part.size for part in parts)
    rule = plan.rule(FollowQuantile)
    squares, counts = [0.0] * (len(parts) + 1), [0] * (len(parts) + 1)
    for i in range(max(2, min(_MAX_STEPS, -(-draws // smallest)))):
        seen = subject.release(nobody, seed=seed + i)
        for index, part in enumerate(parts):
            if counts[index] < draws or i < 2:
                squares[index] += part.square(seen)
                counts[index] += part.size
        if rule is not None and COUNTS_KEY in seen:
            squares[-1] += float(seen[COUNTS_KEY].square().sum())
            counts[-1] += len(seen[COUNTS_KEY])
    alpha = risk / (len(parts) + (rule is not None))
    made = []
    for part, total, n in zip(parts, squares, counts, strict=False):
        sources = len(part.classes.intersection(private)) if private else 1
        ratio = plan.noise_kind.std_ratio  # of its standard deviation to S, as which everything here is stated
        ratio /= band_coefficients(plan.bands)[0]  # a first step has nothing before it
        worth = 0.4 if plan.noise_kind is NoiseKind.LAPLACE else 1.0  # the squares of 5 such draws vary as those of 2
        total, n = worth * total / ratio**2, round(worth * n)
        made.append(_noise_level(part, plan.noise[part.layer], total, n, alpha, sources))
    if rule is not None:
        made.append(_noise_level(None, rule.noise, squares[-1], counts[-1], alpha))
    return tuple(made)


def _batch_without_signal(batch: Batch, classes: list[int]) -> Batch:
    """Nobody, so that a step is noise alone; where noise comes with contributions: an empty one of each class."""
    if len(classes) > batch.examples:
        problem = f"the audit got {batch.examples} examples"
        raise EngineError("audit.too-few-examples", problem, f"give {len(classes)} or more")
    x, y = take_rows((batch.x, batch.y), torch.arange(len(classes)))
    return Batch(x, y, cls=torch.tensor(classes, dtype=torch.long), weight=torch.zeros(len(classes)))


def _noise_level(part: Region | None, planned: float, total: float, n: int, alpha: float, times: int = 1) -> NoiseLevel:
    low = high = measured = 0.0
    planned, total = (planned, total / times) if times else (0.0, total)
    if n:  # otherwise the plan pays for counts that never came
        low, high = math.sqrt(total / chi2.isf(alpha / 2, n)), math.sqrt(total / chi2.ppf(alpha / 2, n))
        measured = math.sqrt(total / n)
    layer, index, classes = (COUNTS_KEY, None, frozenset()) if part is None else (part.name, part.layer, part.classes)
    return NoiseLevel(layer=layer, index=index, classes=classes, planned=planned, measured=measured, low=low, high=high)


_MAX_COUPLING = 1e-4
_QUICK_CANARIES = (
    "as given", "x large", "y large", "x like another", "y like another", "x cancelling", "x not a number", "y huge",
)  # fmt: skip

PairedSteps = list[tuple[str, PairedStep]]


def audit_step(
    subject: AuditTarget, batch: Batch, *, unit: int = 0, tries: int = 8, seed: int = 0, quick: bool = False
) -> tuple[Check, ...]:
    """Check a step's claims on a batch of public or simulated contributions.

    Contribution `unit` takes every class of the plan in turn and becomes one canary after another: the `named_canaries`
    (eight of them if `quick`), `tries` random ones, and one found by gradient ascent. Per private class:

      sensitivity  the farthest a canary moved the step, priced over the plan's steps, against the claimed ε (of a
                   contribution stricter than its class: at its scale)
      routing      how far a layer outside the class's band, or a part outside its slices, moved: must be 0, up to
                   rounding
    and for the step:
      noise        ε with the noise that was seen (its upper confidence limit), against the claimed ε
      untouched    layers, and places of layers, that no class reaches got no gradient and no noise
      independence how far the others' parts move when the canary appears: must be 0 up to rounding
      correlation  of noise that is correlated over steps: C times the noise of many steps must be independent, of S
    """
    if len(batch) < 2:
        problem = f"the audit got {len(batch)} contributions"
        raise EngineError("audit.too-few-contributions", problem, "give two or more, public or simulated")
    checks, fixed = [], subject.fixed(batch)
    for k, entry in enumerate(subject.plan.classes):
        if not entry.public:
            found = _try_canaries(subject, _with_class(batch, unit, k), unit, tries, seed, fixed, quick)
            checks += [_sensitivity_check(subject, k, found), _routing_check(subject, k, found)]
    levels = noise_levels(subject, batch, seed=seed + 1)
    for k, entry in enumerate(subject.plan.classes):
        if not entry.public:
            checks.append(_noise_check(subject.plan, k, levels))
    if subject.plan.bands > 1:
        checks.append(_correlation_check(subject, batch, seed + 2))
    return (*checks, _untouched_check(subject, batch), *_independence_checks(subject, batch, unit, fixed))


def _try_canaries(
    subject: AuditTarget, batch: Batch, unit: int, tries: int, seed: int, fixed: bool, quick: bool
) -> PairedSteps:
    def canaries() -> Iterable[tuple[str, Batch]]:
        yield from (pair for pair in named_canaries(batch, unit) if not quick or pair[0] in _QUICK_CANARIES)
        yield from random_canaries(batch, unit, count=tries, seed=seed)
        if not is_sharded_model(subject.model):  # whose parameters are not those that a forward pass uses
            yield "ascent", ascent_canary(subject, batch, unit)

    # Raw noise goes with its contribution: what is claimed is a gradient of 0 in its place.
    absent = fixed and not subject.plan.injection.raw
    forms = [Without.SLOT, Without.ABSENT] if absent else [Without.SLOT]
    found = [
        (f"{name}, {form.value}", paired_step(subject, b, unit, without=form, seed=seed))
        for name, b in canaries()
        for form in forms
    ]
    # Noise that depends on who is there does not cancel: seen only where it is not turned down.
    loud = [(f"full noise, {form.value}", paired_step(subject, batch, unit, without=form, noise=1.0)) for form in forms]
    return found + loud


def _noise_check(plan: StepPlan, k: int, levels: tuple[NoiseLevel, ...]) -> Check:
    counts = [level for level in levels if level.index is None]
    highs = [
        min((level.high for level in levels if level.index == i and k in level.classes), default=s)
        for i, s in enumerate(plan.noise)
    ]
    more = counts[0].high / counts[0].planned if counts and counts[0].high > 0 else 1.0
    worst = epsilon_of_noise(plan, k, highs, more)
    wrong = [level.layer for level in levels if not level.as_planned]
    detail = f"not as planned: {', '.join(wrong)}" if wrong else f"{len(levels)} layers as planned"
    holds = not plan.claimed or worst <= claimed_epsilon(plan, k)
    name, detail = f"noise/{plan.classes[k].name}", detail + _true_epsilon_text(plan, k)
    return _make_check(name, worst, claimed_epsilon(plan, k), not wrong and holds, detail=detail)


def _true_epsilon_text(plan: StepPlan, k: int) -> str:
    """Of a plan that reproduces a paper: the ε that the paper claims, and the true one."""
    return f"; ε = {claimed_epsilon(plan, k):.4g} is claimed, ε = {plan.epsilon(k):.4g} is true" if plan.claimed else ""


def _sensitivity_check(subject: AuditTarget, k: int, found: PairedSteps) -> Check:
    plan = subject.plan
    claimed = claimed_epsilon(plan, k, found[0][1].scale)
    name, worst = max(found, key=lambda pair: (not pair[1].sound, pair[1].sensitivity))
    bound = epsilon_of_sensitivity(plan, k, worst.sensitivity)
    sound = all(p.sound for _, p in found) and (not plan.claimed or bound <= claimed)
    bound = min(bound, claimed) if sound else bound  # equal steps may differ in the PLD's last digit
    detail = f"{len(found)} canaries; '{name}' moved {worst.sensitivity:.6g} of {worst.bound:.6g} allowed"
    detail += _true_epsilon_text(plan, k)
    return _make_check(f"sensitivity/{plan.classes[k].name}", bound, claimed, sound, detail=detail)


def _routing_check(subject: AuditTarget, k: int, found: PairedSteps) -> Check:
    slots = [p for name, p in found if name.endswith(Without.SLOT.value)]
    worst, layer = max(
        ((p.moved_outside[i], subject.plan.layers[i].name) for p in slots for i in p.layers_outside), default=(0.0, "")
    )
    detail = f"layer '{layer}' is outside the band, or a part of it outside the slices" if layer else ""
    return _make_check(f"routing/{subject.plan.classes[k].name}", worst, 0.0, worst == 0, "noise std", detail)


def _correlation_check(subject: AuditTarget, batch: Batch, seed: int, risk: float = 1e-9) -> Check:
    """Empty steps are noise W alone; C·W must have the S of every layer, and no correlation between steps."""
    plan = subject.plan
    std = {name: s for layer, s in zip(plan.layers, plan.noise, strict=True) for name in layer.parameters if s > 0}
    steps = max(3 * plan.bands, -(-4096 // sum(layer.size for layer in plan.layers)))
    seen = subject.releases([_batch_without_signal(batch, []) for _ in range(steps)], seed=seed)
    rows = torch.stack([torch.cat([each[name].flatten() / std[name] for name in std if name in each]) for each in seen])
    rows = rows[:, (rows != 0).any(0)]  # without places that no class reaches
    fresh = sum(c * torch.cat([rows.new_zeros(j, rows.shape[1]), rows[: steps - j]])
                for j, c in enumerate(band_coefficients(plan.bands)))  # fmt: skip
    assert isinstance(fresh, Tensor)
    square = float(fresh.square().sum())
    low, high = (square / chi2.isf(risk, fresh.numel()), square / chi2.ppf(risk, fresh.numel()))
    limit = -norm.ppf(risk / (2 * plan.bands))
    lags = [float((fresh[j:] * fresh[: steps - j]).sum()) / math.sqrt(fresh[j:].numel()) for j in range(1, plan.bands)]
    worst = max(map(abs, lags))
    detail = f"C·W has {square / fresh.numel():.4g} times the planned variance over {steps} steps"
    return _make_check("correlation", worst, limit, low <= 1 <= high and worst <= limit, "noise std", detail)


def _untouched_check(subject: AuditTarget, batch: Batch) -> Check:
    grads = subject.release(batch)
    idle = (r for r in plan_regions(subject.plan, dict(subject.model.named_parameters())) if not r.classes)
    moved = [part.name for part in idle if part.moved(grads)]
    return _make_check("untouched", float(len(moved)), 0.0, not moved, "tensors", ", ".join(moved))


def _independence_checks(subject: AuditTarget, batch: Batch, unit: int, fixed: bool) -> Iterable[Check]:
    for form, detail in (("slot", "canary present"), ("absent", "row gone"))[: 2 if fixed else 1]:
        worst = coupling_to_others(subject, batch, unit, absent=form == "absent")
        detail = f"the others' parts, {detail}"
        yield _make_check(f"independence/{form}", worst, 0.0, worst <= _MAX_COUPLING, "relative", detail)


def _with_class(batch: Batch, unit: int, k: int) -> Batch:
    cls = cast(Tensor, batch.cls).clone()
    cls[unit] = torch.tensor(k)
    return replace(batch, cls=cls)


def _make_check(
    name: str, found: float, claimed: float, passed: bool, unit: str = "epsilon", detail: str = ""
) -> Check:
    verdict = Verdict.PASSED if passed else Verdict.FAILED
    return Check(name=name, lower_bound=found, claimed=claimed, verdict=verdict, unit=unit, detail=detail)
