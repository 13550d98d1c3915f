"""The instrument itself: what a pair of steps is, what it reads, and what it costs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from audit_steps import plan_for
from hypothesis import given, settings
from hypothesis import strategies as st
from net_builders import Net
from refusals import raises_code
from torch import Tensor, nn

from lamina.audit.canaries import ascent_canary, named_canaries
from lamina.audit.paired_step import paired_step, with_empty_slot, with_only, without_rows
from lamina.audit.step_audit import Check, Verdict, epsilon_of_noise, epsilon_of_sensitivity
from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise.source import NoiseSource
from lamina.plan.step_plan import StepPlan


def subject_of(model: nn.Module, plan: StepPlan, **options: object) -> AuditTarget:
    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return model(x).flatten(1).sum(1) * y

    return AuditTarget(model=model, plan=plan, losses_of=losses_of, **options)  # type: ignore[arg-type]


def test_the_difference_is_the_clipped_gradient() -> None:
    """Against an oracle: the gradient by autograd, clipped by hand."""
    model = nn.Linear(3, 2).double()
    plan = plan_for(model)
    batch = Batch(torch.randn(3, 3).double(), torch.tensor([0.05, 40.0, 3.0]).double())
    for unit in range(3):
        model.zero_grad()
        (model(batch.x[unit : unit + 1]).sum() * batch.y[unit]).backward()
        norm = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
        model.zero_grad()
        found = paired_step(subject_of(model, plan), batch, unit)
        assert found.sensitivity == pytest.approx(min(norm, plan.clip[0][0]) / plan.noise[0], rel=5e-6)
        assert found.bound == pytest.approx(1 / plan.sigma(0))


@pytest.mark.parametrize("noise", [1.0, 2.0**-10, 2.0**-30])
def test_noise_cancels_at_every_level(noise: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)).double()
    batch = Batch(torch.randn(4, 3).double(), torch.full((4,), 9.0).double())
    subject = subject_of(model, plan_for(model), hardened=False)  # no grid, which would be coarser than what is left
    quiet = paired_step(subject, batch, 1)
    loud = paired_step(subject, batch, 1, noise=noise)
    assert loud.sensitivity == pytest.approx(quiet.sensitivity, rel=1e-12)
    assert not subject.fixed(batch)  # dropout: only slots can be compared


def test_batches_without_a_contribution() -> None:
    unit, cls = torch.tensor([2, 0, 1, 2, 0]), torch.tensor([0, 1, 2])
    batch = Batch({"a": torch.arange(5)}, torch.arange(5.0), unit=unit, cls=cls)
    slot, gone, only = with_empty_slot(batch, 1), without_rows(batch, 1), with_only(batch, 1)
    assert slot.weight.tolist() == [1, 1, 0, 1, 1]
    assert only.weight.tolist() == [0, 0, 1, 0, 0]
    assert gone.x["a"].tolist() == [0, 1, 3, 4]
    assert gone.unit.tolist() == [1, 0, 1, 0]
    assert gone.cls.tolist() == [0, 2]


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    paired_step(subject_of(model, plan_for(model)), Batch(torch.randn(4, 3), torch.ones(4)), 0)
    torch.set_rng_state(state)
    first = torch.rand(3)
    torch.set_rng_state(state)
    paired_step(subject_of(model, plan_for(model)), Batch(torch.ones(4, 3), torch.ones(4)), 0)
    assert torch.equal(first, torch.rand(3))
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all("forward" not in vars(m) for m in model.modules())


def test_a_tensor_that_only_one_step_writes() -> None:
    """Noise that is left out when nobody reaches a layer shows presence: refused by name."""

    class Skips(Engine):
        def backward(self, losses: Tensor | None, batch: Batch) -> None:
            super().backward(losses, batch)
            if float(batch.weight[0]) == 0:  # type: ignore[index]
                self.model.get_parameter("bias").grad = None

    model = nn.Linear(3, 2)

    def make(model: nn.Module, plan: StepPlan, noise: NoiseSource) -> Skips:
        return Skips(model, plan, noise=noise)

    with raises_code("audit.different-tensors-written"):
        paired_step(subject_of(model, plan_for(model), make=make), Batch(torch.randn(2, 3), torch.ones(2)), 0)


def test_ascent_presses_against_every_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    subject = subject_of(model, plan_for(model, "box"))
    batch = Batch(0.01 * torch.randn(3, 6), torch.full((3,), 0.45))
    before, after = (paired_step(subject, b, 0).ratio for b in (batch, ascent_canary(subject, batch, 0, steps=80)))
    assert before < 0.8
    assert after > before + 0.05
    assert after <= 1 + 1e-6


def test_variants_change_the_canary_alone() -> None:
    batch = Batch(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]), unit=torch.tensor([0, 0, 1, 2]))
    names = []
    for name, b in named_canaries(batch, 0):
        names.append(name)
        assert torch.equal(b.x[2:], batch.x[2:])
        assert torch.equal(b.y[2:], batch.y[2:])
        assert set(b.y.tolist()) <= {0, 1, 2}
    assert len(names) == len(set(names)) > 15
    assert {"x huge", "x not a number", "y like another"} <= set(names)


def test_price_of_a_sensitivity() -> None:
    model = nn.Linear(3, 2)
    plan = plan_for(model, several=True)
    claimed = plan.epsilon(0)
    bound = plan.joint(0)
    assert epsilon_of_sensitivity(plan, 0, bound) == pytest.approx(claimed, rel=1e-6)
    assert epsilon_of_sensitivity(plan, 0, 2 * bound) > 1.5 * claimed
    assert epsilon_of_sensitivity(plan, 0, 0.0) == 0
    assert epsilon_of_sensitivity(plan, "open", 5.0) == 0
    assert epsilon_of_sensitivity(plan, 0, math.inf) == math.inf
    assert epsilon_of_sensitivity(plan, 0, 64 * bound) > 64 * claimed
    assert epsilon_of_noise(plan, 0, plan.noise) == pytest.approx(claimed, rel=1e-6)
    assert epsilon_of_noise(plan, 0, [0.0]) == math.inf


def test_check_is_strict_json() -> None:
    check = Check(name="noise/a", lower_bound=math.inf, claimed=1.0, verdict=Verdict.FAILED)
    read = json.loads(json.dumps(check.to_dict(), allow_nan=False))
    assert read["lower_bound"] == "inf"
    assert read["verdict"] == "failed"
    assert {"name", "lower_bound", "claimed", "verdict"} <= read.keys()


# -------------------------------------------------------------------------------- canaries at the edge of float


@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize(
    ("x", "y", "dtype"),
    [
        (5e18, 5e18, torch.float32),  # the clip factor would be a denormal
        (1e18, 2e-23, torch.float32),  # squares of g underflow while a is huge
        (1e-23, 1e19, torch.float32),
        (1e18, 1e18, torch.float32),
        (2e22, 2e22, torch.float64),
        (1e150, 1e100, torch.float64),
        (1e-170, 1e172, torch.float64),
    ],
)
@pytest.mark.parametrize("shape", [(2, 64), (2, 3, 64)])
def test_extreme_sizes(x: float, y: float, dtype: torch.dtype, shape: tuple[int, ...], clipping: str) -> None:
    model = nn.Linear(64, 64, bias=False).to(dtype)
    plan = plan_for(model, clipping)
    small = replace(plan, clip=((1e-4,),), noise=(1e-4,), batch=1000.0)
    values = torch.ones(shape, dtype=dtype) * x
    batch = Batch(values, torch.tensor([y, 1.0], dtype=dtype))
    for p in (plan, small):
        found = paired_step(subject_of(model, p), with_only(batch, 0), 0)
        assert found.sound, found


def after_a_batch(subject: AuditTarget, seen: Batch) -> AuditTarget:
    """Steps of an engine that has seen another batch."""

    def make(model: nn.Module, plan: StepPlan, noise: NoiseSource) -> Engine:
        engine = Engine(model, plan, noise=noise)
        engine.clipped_sums(subject.losses_of(seen.x, seen.y), seen)
        return engine

    return replace(subject, make=make)


def test_positions_when_the_batch_is_as_long_as_the_text() -> None:
    """A table looked up with (T,) ids, in the step whose batch happens to hold T examples."""

    model = Net(
        lambda m, ids: m.out(torch.tanh(m.tok(ids) + m.pos(torch.arange(ids.shape[1])))),
        tok=nn.Embedding(9, 6),
        pos=nn.Embedding(8, 6),
        out=nn.Linear(6, 2),
    )
    subject = subject_of(model, plan_for(model))

    warm = after_a_batch(subject, Batch(torch.randint(0, 9, (3, 4)), torch.ones(3)))
    batch = Batch(torch.randint(0, 9, (4, 4)), torch.tensor([1e4, 1.0, 1.0, 1.0]))
    for which in ("slot", "absent"):
        found = paired_step(warm, batch, 0, without=which)
        assert found.sound, found
        assert found.ratio > 0.99


def test_a_constant_as_long_as_the_batch() -> None:
    """An argument of T rows given to a module without a rule, in the step whose batch holds T examples."""

    model = Net(
        lambda m, x: m.out(m.scaled(x, torch.linspace(0, 1, x.shape[1]).unsqueeze(1))),
        scaled=Net(lambda m, x, by: torch.tanh(x @ m.mix) * by, mix=nn.Parameter(torch.randn(3, 3))),
        out=nn.Linear(3, 1),
    )
    subject = subject_of(model, plan_for(model))

    warm = after_a_batch(subject, Batch(torch.randn(3, 4, 3), torch.ones(3)))
    batch = Batch(torch.randn(4, 4, 3), torch.full((4,), 20.0))
    for unit in (0, 3):
        assert paired_step(warm, batch, unit, without="absent").sound


def test_a_weight_given_to_a_layer_as_its_input() -> None:

    model = Net(lambda m, ids: m.table(ids) + m.out(m.table.weight), table=nn.Embedding(3, 4), out=nn.Linear(4, 4))
    batch = Batch(torch.arange(3), torch.full((3,), 1e3))
    with raises_code("engine.tensor-used-directly"):
        paired_step(subject_of(model, plan_for(model)), batch, 0)


@pytest.mark.parametrize("canary", ["two rows", "no gradient", "huge"])
def test_others_are_measured_alike_whoever_is_there(canary: str) -> None:
    """The norm of one contribution must not be computed in another way because of a second one."""
    width, count = 512, 64
    model = nn.Linear(width, 2, bias=False)
    row = torch.full((width,), 2.0**-12 * 0.9994)  # float32 block norms read this one low
    row[:8] = 1.0
    x, y = row.expand(count + 1, width).clone(), torch.full((count + 1,), 1e3)
    unit = torch.arange(count + 1)
    unit[-1] = unit[-2]
    y[-2:] = 0.0
    if canary != "two rows":
        x, y, unit = x[:-1], y[:-1], unit[:-1]
    if canary == "huge":
        x[-1], y[-1] = 1e17, 1e-30
    batch = Batch(x, y, unit=unit)
    found = paired_step(subject_of(model, plan_for(model)), batch, count - 1)
    assert found.sensitivity <= count * 1e-6 * found.bound  # each by its rounding, none by its measure


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    x=st.floats(-18, 17),
    y=st.floats(-18, 17),
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(3, 5), (3, 4, 5)]),
    clipping=st.sampled_from(["box", "joint"]),
)
def test_random_canaries(x: float, y: float, seed: int, shape: tuple[int, ...], clipping: str) -> None:
    source = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    plan = replace(plan_for(model, clipping), clip=((0.3, 2.0),), noise=(1.0, 0.7), batch=3.0, steps=10)
    values = torch.randn(shape, generator=source)
    values[0] *= 10.0**x
    weights = torch.randn(3, generator=source)
    weights[0] *= 10.0**y
    assert paired_step(subject_of(model, plan), Batch(values, weights), 0).sound
