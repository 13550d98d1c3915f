"""What is kept of a gradient and signal to noise, against gradients that are clipped and noised for real."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lamina.allocate.measure.measure import Measure
from lamina.cli.layer_figures import kept_norm, signal_to_noise, text_bar, total_noise, whole_signal_to_noise
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan
from lamina.plan.table import epsilon_text

SIZES = (400, 900, 2500)
positive = st.floats(0.05, 20.0)


def planned(clip: tuple[float, ...], noise: tuple[float, ...], form: Clipping, /, **changes: object) -> StepPlan:
    base: dict[str, object] = {
        "layers": tuple(
            PlannedLayer(name=f"l{i}", depth=i / 2, parameters=(f"l{i}.w",), size=d) for i, d in enumerate(SIZES)
        ),
        "classes": (PlannedClass(name="a", population=1000, sampling_rate=0.05, delta=1e-5),),
        "clip": (clip,),
        "noise": noise,
        "batch": 50.0,
        "steps": 10,
        "clipping": form,
        "accountant": "zcdp",
    }
    return StepPlan(**(base | changes))  # type: ignore[arg-type]


def measured(norms: tuple[float, ...]) -> Measure:
    row = (1.0,) * len(norms)
    return Measure(
        proxy="gaussian",
        layers=tuple(f"l{i}" for i in range(len(norms))),
        tight=row,
        worst=row,
        printed=row,
        harm=row,
        norms=norms,
        fisher=row,
    )


def clipped(plan: StepPlan, k: int, gradient: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """One contribution as the step clips it, by the definition in StepPlan."""
    if plan.clipping is Clipping.BOX:
        return [
            g * min(1.0, c / np.linalg.norm(g)) if c else 0 * g for g, c in zip(gradient, plan.clip[k], strict=True)
        ]
    reached = [g if c else 0 * g for g, c in zip(gradient, plan.clip[k], strict=True)]
    length = math.sqrt(sum(float(g @ g) / s**2 for g, s, c in zip(reached, plan.noise, plan.clip[k], strict=True) if c))
    return [g * min(1.0, 1 / plan.sigma(k) / length) for g in reached]


def step(plan: StepPlan, norms: tuple[float, ...], k: int = 0) -> tuple[list[float], list[float]]:
    """‖signal‖ and ‖noise‖ by layer of a step in which all contributions of class k have the same gradient."""
    rng = np.random.default_rng(0)
    gradient = [rng.normal(size=layer.size) for layer in plan.layers]
    gradient = [g * n / np.linalg.norm(g) for g, n in zip(gradient, norms, strict=True)]
    entry = plan.classes[k]
    b = entry.sampling_rate * (entry.population or 0)
    signal = [float(np.linalg.norm(b * g)) for g in clipped(plan, k, gradient)]
    drawn = [rng.normal(0.0, s, size=(60, layer.size)) for s, layer in zip(plan.noise, plan.layers, strict=True)]
    return signal, [float(np.sqrt(np.square(z).sum(1).mean())) for z in drawn]


@given(st.tuples(positive, positive, positive), st.tuples(positive, positive, positive))
@pytest.mark.parametrize("form", [Clipping.BOX, Clipping.JOINT])
def test_signal_to_noise_is_that_of_an_aligned_step(
    form: Clipping, norms: tuple[float, ...], clip: tuple[float, ...]
) -> None:
    plan = planned(clip, (2.0, 0.5, 1.3), form)
    signal, noise = step(plan, norms)
    found = signal_to_noise(plan, measured(norms))
    assert found == pytest.approx([up / down for up, down in zip(signal, noise, strict=True)], rel=0.02)
    whole = whole_signal_to_noise(plan, measured(norms))
    assert whole == pytest.approx(math.hypot(*signal) / math.hypot(*noise), rel=0.02)
    (part,) = kept_norm(plan, measured(norms))
    assert part == pytest.approx(math.hypot(*signal) / 50 / math.hypot(*norms), rel=1e-9)


@given(st.tuples(positive, positive, positive))
def test_without_a_measure_everyone_is_at_the_bound(clip: tuple[float, ...]) -> None:
    """C[k,l] for n: the norm that a box clips a long gradient to."""
    plan = planned(clip, (2.0, 0.5, 1.3), Clipping.BOX)
    assert signal_to_noise(plan, None) == pytest.approx(signal_to_noise(plan, measured((1e6, 1e6, 1e6))))


def test_classes_add_up_and_what_they_do_not_reach_is_not_counted() -> None:
    classes = (
        PlannedClass(name="a", population=1000, sampling_rate=0.05, delta=1e-5),
        PlannedClass(name="b", population=100, sampling_rate=0.2, delta=1e-5),
        PlannedClass(name="open", population=10, sampling_rate=0.5, public=True),
    )
    clip = ((1.0, 1.0, 0.0), (0.0, 2.0, 0.0), (math.inf, math.inf, math.inf))
    plan = planned((), (2.0, 0.5, 0.0), Clipping.JOINT, classes=classes, clip=clip, batch=75.0)
    norms = (3.0, 4.0, 1.0)
    a, noise = step(plan, norms, 0)
    b, _ = step(plan, norms, 1)
    first, second, third = signal_to_noise(plan, measured(norms))
    assert first == pytest.approx((a[0] + 5 * 3.0) / noise[0], rel=0.02)
    assert second == pytest.approx((a[1] + b[1] + 5 * 4.0) / noise[1], rel=0.02)
    assert third is None  # no noise, nothing to compare with
    assert kept_norm(plan, measured(norms))[2] is None
    assert signal_to_noise(plan, None)[0] == pytest.approx(50 * 1.0 / noise[0], rel=0.02)


def test_elementwise_is_of_the_mean_gradient() -> None:
    """c = 0.1 per entry bounds a layer of d entries by 0.1·√d, and C = 2·c·√d."""
    c = tuple(2 * 0.1 * math.sqrt(d) for d in SIZES)
    plan = planned(c, (0.5, 0.5, 0.5), Clipping.ELEMENTWISE, batch=1.0, allocation="printed-ladp")
    found = signal_to_noise(plan, measured((1.0, 100.0, 100.0)))
    assert found[0] == pytest.approx(1.0 / (0.5 * 20))
    assert found[1] == pytest.approx(0.1 / 0.5)
    assert signal_to_noise(plan, None) == pytest.approx([0.1 / 0.5] * 3)


def test_noise_counts_as_the_optimiser_sees_it() -> None:
    """C, S and B all ten times smaller: the same step."""
    plan = planned((1.0, 1.0, 1.0), (2.0, 0.5, 1.3), Clipping.JOINT)
    small = replace(plan, clip=((0.1, 0.1, 0.1),), noise=(0.2, 0.05, 0.13), batch=5.0)
    assert total_noise(plan) == pytest.approx(400 * 4 + 900 * 0.25 + 2500 * 1.69)
    assert total_noise(small) == pytest.approx(total_noise(plan))


@given(st.floats(1e-6, 1e300))
def test_a_printed_epsilon_is_never_smaller(epsilon: float) -> None:
    shown = float(epsilon_text(epsilon))
    assert shown >= epsilon * (1 - 1e-12)
    assert shown <= epsilon * 1.002 + 1e-4


@given(st.floats(0, 100), st.floats(0.001, 100))
def test_bars_are_as_long_as_their_figures(value: float, most: float) -> None:
    assert len(text_bar(value, most, 10)) == (max(1, round(10 * min(1.0, value / most))) if value > 0 else 0)
