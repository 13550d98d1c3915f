"""The resolver: from signed bounds to scales that keep them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from torch import nn

from lamina.account.charges import Account
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.admit import reasons
from lamina.admit.attestation import MAX_MICRO, Descriptor
from lamina.admit.reasons import ContributionRefused, Reason
from lamina.admit.resolver import MAX_DISTINCT_BOUNDS, resolve
from lamina.admit.rows import BoundColumns
from lamina.admit.terms import PolicyTerms, floors_hash, preset
from lamina.allocate.make_plan import make_plan
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan

MICRO = 1_000_000
DELTA = 1e-5


def policy(z: float = 1.0, c: float = 1.0, accountant: str = "rdp") -> Policy:
    classes = {"data": {"population": 1000, "clip_norm": c, "noise_multiplier": z}, "open": {"public": True}}
    return Policy.from_dict({"corpus": {"origin": "x", "delta": DELTA, "accountant": accountant}, "class": classes})


def plan(
    q: float = 0.1, steps: int = 100, sigma: float = 1.0, c: float = 1.0, accountant: str = "rdp", **more: Any
) -> StepPlan:
    """Two layers, thresholds of norm c, and sigma as given."""
    clips = (0.6 * c, 0.8 * c)
    return StepPlan(
        layers=tuple(PlannedLayer(name=f"l{i}", depth=float(i), parameters=(f"l{i}.w",), size=10) for i in range(2)),
        classes=(
            PlannedClass(name="data", population=1000, sampling_rate=q, delta=DELTA),
            PlannedClass(name="open", population=None, sampling_rate=0.5, public=True),
        ),
        clip=(clips, (math.inf, math.inf)),
        noise=(sigma * c, sigma * c),
        batch=100.0,
        steps=steps,
        accountant=accountant,
        **more,
    )


def bound(c: float, z: float) -> Account:
    return Account("data", round(c * MICRO), round(z * MICRO))


# ------------------------------------------------------------------------------------------- by the policy alone


def refusal(under: Policy, descriptor: Descriptor) -> Reason | None:
    try:
        PolicyTerms(under).check(replace(descriptor, policy=floors_hash(under), profile=None))
    except ContributionRefused as refused:
        return refused.reason
    return None


def test_a_bound_is_held_against_its_class(desk: Any) -> None:
    under = desk.policy
    c, z = preset(under, "clinical")
    make = desk.descriptor
    assert refusal(under, make(b"x")) is None
    assert refusal(under, make(b"x", clip_norm=c, noise_multiplier=z)) is None
    assert refusal(under, make(b"x", clip_norm=PolicyTerms(under).clip_floor, noise_multiplier=MAX_MICRO)) is None
    assert refusal(under, make(b"x", clip_norm=c + 1)) is reasons.CLIP_ABOVE_CLASS
    assert refusal(under, make(b"x", noise_multiplier=z - 1)) is reasons.NOISE_BELOW_CLASS
    assert refusal(under, make(b"x", admissibility="other")) is reasons.UNKNOWN_CLASS
    assert refusal(under, make(b"x", "open")) is None
    assert refusal(under, make(b"x", admissibility="open")) is reasons.PUBLIC_BOUND
    loose = desk.policy_with(floors={}, standard={"noise_multiplier": None})
    assert refusal(loose, make(b"x", admissibility="standard")) is reasons.UNBOUNDED_CLASS


# ------------------------------------------------------------------------------------------- under a plan


signed_bounds = given(
    q=st.floats(1e-3, 1.0),
    steps=st.integers(1, 3000),
    sigma=st.floats(0.3, 20.0),
    z=st.floats(0.2, 50.0),
    c=st.floats(0.01, 3.0),
)


@settings(max_examples=15)
@signed_bounds
def test_what_is_spent_is_never_more_than_what_was_signed(
    q: float, steps: int, sigma: float, z: float, c: float
) -> None:
    keeps_what_was_signed(q, steps, sigma, z, c)


@pytest.mark.slow
@settings(max_examples=300)
@signed_bounds
def test_what_is_spent_is_never_more_than_what_was_signed_at_length(
    q: float, steps: int, sigma: float, z: float, c: float
) -> None:
    keeps_what_was_signed(q, steps, sigma, z, c)


def keeps_what_was_signed(q: float, steps: int, sigma: float, z: float, c: float) -> None:
    under = plan(q, steps, sigma)
    (entry,) = resolve([bound(c, z)], policy(), under, max_occurrences=steps).entries
    assert entry.epsilon_signed == epsilon_of_noise_multiplier(round(z * MICRO) / MICRO, DELTA)
    assert entry.epsilon == under.epsilon("data", scale=entry.scale) <= entry.epsilon_signed
    assert 0 < entry.scale <= 1
    assert entry.scale * under.norm("data") <= entry.bound.c * (1 + 1e-12)
    assert entry.ceiling == entry.bound.c
    # Nothing is given away either: a little more of the thresholds would break one of the three.
    more = min(1.0, entry.scale * 1.002)
    assert (
        more == 1
        or more * under.norm("data") > entry.bound.c
        or under.epsilon("data", scale=more) > entry.epsilon_signed
    )
    # What is applied is enough; and where the multiplier decides, it is no more than the plan's accountant asks for.
    assert entry.variance_floor <= entry.variance * (1 + 1e-9)
    assert entry.variance_floor <= entry.variance_ceiling
    assert entry.variance == pytest.approx((under.sigma("data") / entry.scale * entry.bound.c) ** 2)
    if entry.scale < min(1.0, entry.bound.c / under.norm("data")):
        assert entry.variance <= (entry.sigma_acc * entry.bound.c) ** 2 * 1.001


@pytest.mark.parametrize(("q", "steps"), [(1.0, 1), (1.0, 30), (0.5, 10), (0.01, 2000)])
@pytest.mark.parametrize("z", [0.5, 3.0])
def test_what_is_applied_lies_between_floor_and_ceiling(q: float, steps: int, z: float) -> None:
    """Every step may be an occurrence, the multiplier decides, and the accountant is tight."""
    under = plan(q, steps, sigma=0.4 * z * math.sqrt(steps * q * q), accountant="pld")
    (entry,) = resolve([bound(1.0, z)], policy(accountant="pld"), under, max_occurrences=steps).entries
    assert entry.scale < 1 and entry.capped
    assert entry.variance_floor <= entry.variance <= entry.variance_ceiling * 1.002


@pytest.mark.parametrize("clipping", list(Clipping)[:2])
@pytest.mark.parametrize("z", [0.7, 1.5, 6.0])
def test_pld_agrees(clipping: Clipping, z: float) -> None:
    under = plan(0.05, 400, 1.5, accountant="pld", clipping=clipping)
    (entry,) = resolve([bound(0.9, z)], policy(accountant="pld"), under).entries
    assert entry.epsilon <= entry.epsilon_signed
    assert not entry.capped and entry.occurrences == pytest.approx(20)
    assert entry.variance_ceiling >= entry.variance_floor


def test_the_figures_of_one_bound() -> None:
    """By hand: q = 1, so that nothing is amplified: T steps at sigma are one release at sigma/√T."""
    under = plan(q=1.0, steps=4, sigma=2.0, accountant="gaussian")  # together z = 1
    found = resolve([bound(1.0, 1.0), bound(1.0, 2.0), bound(0.25, 2.0)], policy(), under, max_occurrences=4)
    assert found.index.tolist() == [1, 2, 0]  # entries are sorted
    same, noisier, shorter = (found[i] for i in range(3))
    assert same.scale == pytest.approx(1.0, rel=1e-4) and same.sigma_acc == pytest.approx(2.0, rel=1e-4)
    assert noisier.scale == pytest.approx(0.5, rel=1e-4) and noisier.sigma_acc == pytest.approx(4.0, rel=1e-4)
    assert noisier.variance_floor == pytest.approx(16.0, rel=1e-3)
    assert noisier.variance_ceiling == pytest.approx(4 * 4.0)
    assert noisier.variance == pytest.approx(16.0, rel=1e-3)
    assert shorter.scale == pytest.approx(0.25)  # c decides
    assert shorter.variance == pytest.approx((2.0 / 0.25 * 0.25) ** 2)
    assert shorter.variance_floor == pytest.approx(1.0, rel=1e-3)
    assert found.scale.tolist() == [found[i].scale for i in range(3)]
    assert found.ceiling.tolist() == [1.0, 1.0, 0.25]


def test_a_public_class_is_bounded_by_nothing() -> None:
    (entry,) = resolve([Account("open", 0, 0)], policy(), plan()).entries
    assert (entry.scale, entry.ceiling, entry.epsilon) == (1.0, math.inf, 0.0)
    assert entry.to_dict()["ceiling"] is None
    assert Account("open", 0, 0).epsilon(DELTA) == math.inf


def test_a_bound_that_no_scale_keeps_stays_out(desk: Any) -> None:
    found = resolve([bound(1.0, 1e9), bound(1.0, 1.0)], policy(), plan())
    assert found.scale[0] == 0 and found.scale[1] > 0
    assert "ε = 0" in found[0].problem or "out of reach" in found[0].problem
    assert "stays out" in found.table()
    json.dumps(found.to_dict(), allow_nan=False)
    admission = desk.gate().review([desk.offer("a"), desk.offer("b", noise_multiplier=MAX_MICRO)])
    made = make_plan(LayerStack.from_model(nn.Linear(4, 2)), replace_profile(desk), batch=10, steps=10)
    with raises_code("admit.plan-of-other-policy"):
        admission.resolve(made)
    desk.policy = replace_profile(desk)
    admission = desk.gate().review(
        [desk.offer("a"), desk.offer("b", noise_multiplier=MAX_MICRO), desk.offer("c", "open")]
    )
    resolution = admission.resolve(made)
    scale = resolution.scale[admission.bound]
    assert scale[0] > 0 and scale[1] == 0 and scale[2] == 1
    admission.dismiss(np.flatnonzero(scale == 0), reasons.OUT_OF_REACH)
    assert [(r.id, r.reason) for r in admission.left] == [("b", reasons.OUT_OF_REACH)]


def replace_profile(desk: Any) -> Policy:
    changed: Policy = desk.policy_with(clinical={"profile": "all"}, open={"population": 100})
    return changed


def test_a_plan_of_another_policy_is_refused() -> None:
    signed = [bound(1.0, 1.0)]
    under = plan()
    data = under.classes[0]
    for other, words in (
        (replace(data, profile="top 25 %"), "admit.plan-of-other-policy"),
        (replace(data, delta=1e-3), "admit.plan-of-other-policy"),
    ):
        with raises_code(words):
            resolve(signed, policy(), replace(under, classes=(other, under.classes[1])))
    with raises_code("admit.class-not-in-plan"):
        resolve(signed, policy(), replace(under, classes=(replace(data, name="other"), under.classes[1])))
    with raises_code("admit.class-unknown"):
        resolve([Account("nobody", 1, 1)], policy(), under)


def test_depth_is_a_function_of_the_class_alone(desk: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    under = desk.policy_with(open={"population": 100})
    made = make_plan(LayerStack.from_model(model), under, batch=10, steps=10)
    found = resolve([Account("clinical", *preset(under, "clinical")), Account("clinical", 100_000, 10**8)], under, made)
    assert found.depth["clinical"].layers == ("6", "7")
    assert len(found.depth["standard"].layers) == 8
    assert "top 25 %" in found.table()
    assert found.to_dict()["depth"]["clinical"] == {"profile": "top 25 %", "layers": ["6", "7"]}


def test_caps_may_differ_by_class() -> None:
    signed = [bound(1.0, 1.0)]
    assert resolve(signed, policy(), plan(), max_occurrences={"data": 7}).entries[0].occurrences == 7
    assert not resolve(signed, policy(), plan(), max_occurrences={"open": 7}).entries[0].capped
    assert resolve(signed, policy(), plan(), max_occurrences=7).entries[0].capped


# ------------------------------------------------------------------------------------------- too many bounds


def entries_of(found: Any, signed: list[Account]) -> None:
    """Everybody is held to something at least as strict as what he signed."""
    assert len(found.entries) <= MAX_DISTINCT_BOUNDS
    for number, each in enumerate(signed):
        held = found[number].bound
        assert held.cls == each.cls
        assert held.clip_micro <= each.clip_micro and held.noise_micro >= each.noise_micro
        if number % 100 == 0 and found.scale[number] > 0:
            assert found[number].epsilon <= each.epsilon(DELTA)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Counts how often a scale is looked for, and does not look."""
    from lamina.admit import resolver

    asked: list[tuple[float, float]] = []

    def fake(under: StepPlan, k: int, c: float, z: float) -> float:
        asked.append((c, z))
        return min(1.0, c, 1 / z)

    monkeypatch.setattr(resolver, "scale_for_signed_bound", fake)
    monkeypatch.setattr(resolver, "sigma_acc", lambda under, k, z: z)
    monkeypatch.setattr(StepPlan, "epsilon", lambda *a, **b: 0.0)
    return asked


def test_as_many_as_there_are_accountants_are_exact(quick: list[tuple[float, float]]) -> None:
    signed = [bound(1.0, 1 + i / 1000) for i in range(MAX_DISTINCT_BOUNDS)]
    found = resolve(signed, policy(), plan())
    assert not found.rounded
    assert [found[i].bound for i in range(MAX_DISTINCT_BOUNDS)] == signed
    assert len(quick) == MAX_DISTINCT_BOUNDS


def test_many_multipliers_are_taken_to_a_grid_of_one_percent(quick: list[tuple[float, float]]) -> None:
    signed = [bound(1.0, 1 + i / 10_000) for i in range(10_000)]
    found = resolve(signed, policy(), plan())
    assert found.rounded == {"data": 1.01}
    entries_of(found, signed)
    held = np.array([found[i].bound.noise_micro for i in range(10_000)])
    assert (held <= np.array([each.noise_micro for each in signed]) * 1.01 + 1).all()
    assert found[0].bound == signed[0]  # who signed what the class asks for keeps it exactly
    assert len(quick) < 80
    assert "grid of ratio 1.01" in found.table() and "… and" in found.table()


def test_an_attack_by_a_million_bounds_costs_a_few_hundred_accountants(quick: list[tuple[float, float]]) -> None:
    rng = np.random.default_rng(1)
    noise = np.exp(rng.uniform(np.log(MICRO), np.log(MAX_MICRO), 10**6)).astype(np.int64)
    clip = np.exp(rng.uniform(0, np.log(MICRO), 10**6)).astype(np.int64)
    noise[0], clip[0] = MICRO, MICRO
    signed = BoundColumns(("data",), np.zeros(10**6, dtype=np.int64), clip, noise)
    found = resolve(signed, policy(), plan())
    assert len(quick) <= MAX_DISTINCT_BOUNDS and len(found.entries) <= MAX_DISTINCT_BOUNDS
    assert found[0].bound == Account("data", MICRO, MICRO)
    held_noise = np.array([entry.bound.noise_micro for entry in found.entries])[found.index]
    held_clip = np.array([entry.bound.clip_micro for entry in found.entries])[found.index]
    assert (held_noise >= noise).all() and (held_clip <= clip).all() and (held_clip >= 1).all()
    assert found.scale.shape == (10**6,)


def test_too_many_bounds_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.admit.resolver.MAX_DISTINCT_BOUNDS", 16)
    signed = [bound(1 - i / 1000, 1 + i / 500) for i in range(20)]
    found = resolve(signed, policy(), plan(steps=20))
    assert found.rounded == {"data": 1.01}
    entries_of(found, signed)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(1, 5)), min_size=0, max_size=30))
def test_distinct_bounds(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    kept, index = BoundColumns.distinct(("a", "b", "c"), *table.T)
    assert list(kept) == [("abc"[k], c, z) for k, c, z in sorted(set(rows))]
    assert [kept[int(i)] for i in index] == [Account("abc"[k], c, z) for k, c, z in rows]
    assert list(BoundColumns.of(list(kept))) == list(kept)
