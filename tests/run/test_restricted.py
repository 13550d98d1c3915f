"""Whether a class that reaches a part of the model helps: good and bad cases, and what the trial leaves alone."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path

import problem
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from lamina import LayerStack, Policy, StepPlan, make_plan
from lamina.engine.rules.proxy import Proxy
from lamina.run import restricted
from lamina.run.restricted import restricted_notes


def clusters(rows: int = 1500) -> Proxy:
    generator = torch.Generator().manual_seed(0)
    centres, y = torch.randn(6, 12, generator=generator), torch.randint(6, (rows,), generator=generator)
    x = centres[y] + torch.randn(rows, 12, generator=generator)
    return Proxy(source="simulated: clusters", x=x, y=y, loss_fn=partial(F.cross_entropy, reduction="none"))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 6))


def plan_of(epsilon: float, *, volunteers: int = 40, profile: str = "{ top = 0.5 }") -> StepPlan:
    policy = Policy.parse(
        '[corpus]\norigin = "tests"\ndelta = 1e-5\naccountant = "rdp"\n'
        f"[class.open]\npublic = true\npopulation = {volunteers}\n"
        f"[class.sensitive]\npopulation = 4000\nepsilon = {epsilon}\nprofile = {profile}\n"
    )
    return make_plan(LayerStack.from_model(net()), policy, batch={"open": 30, "sensitive": 200}, steps=60)


def said(plan: StepPlan, proxy: Proxy | None) -> str:
    (note,) = restricted_notes(net(), plan, proxy)
    return note


def test_many_patients_at_a_large_epsilon_help_and_noise_alone_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restricted, "_RATES", (1.0,))
    good, bad = said(plan_of(8.0), clusters()), said(plan_of(0.01, volunteers=4000), clusters())
    assert good.startswith("class sensitive helps") and "simulated: clusters" in good
    assert bad.startswith("class sensitive DOES NOT HELP") and "leave it out of data and plan (batch 0)" in bad
    assert good == said(plan_of(8.0), clusters())  # seeded


@pytest.mark.parametrize(
    ("progress", "quiet", "terminal"), [(True, -1, True), (True, 99, True), (True, -1, False), (False, -1, True)]
)
def test_a_longer_trial_shows_a_bar_on_a_terminal(
    progress: bool, quiet: float, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(restricted, "Console", lambda stderr: Console(file=shown, force_terminal=terminal))
    monkeypatch.setattr(restricted, "_QUIET_SECONDS", quiet)
    monkeypatch.setattr(restricted, "_STEPS", 2)
    restricted_notes(net(), plan_of(8.0), clusters(60), progress=progress)
    assert ("trial of class sensitive" in shown.getvalue()) == (progress and terminal and quiet < 0)


def test_without_data_that_answer_it_nothing_is_guessed() -> None:
    assert "not assessable" in said(plan_of(8.0), None)
    moving = make_plan(
        LayerStack.from_model(net()), Policy.parse(problem.POLICY), batch=48, steps=24, allocate="quantile"
    )
    assert all("not assessable" in note for note in restricted_notes(net(), moving, clusters(40)))


def test_classes_that_reach_everything_are_not_tried() -> None:
    def fails(output: Tensor, y: Tensor) -> Tensor:
        raise AssertionError

    whole = plan_of(8.0, profile="{ top = 1.0 }")
    assert restricted_notes(net(), whole, Proxy(source="public", x=torch.zeros(9, 12), loss_fn=fails)) == ()


def test_leaving_the_only_class_out_is_not_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss without it is that of the model as it is, computed here by hand."""
    monkeypatch.setattr(restricted, "_SEEDS", 1)
    policy = Policy.parse(
        '[corpus]\norigin = "tests"\ndelta = 1e-5\n[class.a]\npopulation = 400\nepsilon = 3\nprofile = { top = 0.5 }\n'
    )
    model, proxy = net(), clusters(100)
    plan = make_plan(LayerStack.from_model(model), policy, batch=40, steps=10)
    (note,) = restricted_notes(model, plan, proxy)
    held = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:25]
    with torch.no_grad():
        expected = F.cross_entropy(model.eval()(proxy.x[held]), proxy.y[held])
    assert f"{float(expected):.4g} without it" in note


def test_model_generators_and_gradients_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restricted, "_STEPS", 2)
    model, plan = net(), plan_of(8.0)
    before, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    restricted_notes(model, plan, clusters(60))
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())  # nothing is attached


def test_a_trainer_tries_it_before_it_begins_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_seeds: None
) -> None:
    monkeypatch.setattr(restricted, "_STEPS", 2)
    x, y = torch.randn(80, 6), torch.randint(3, (80,))
    proxy = Proxy(source="public: tests", x=x, y=y, loss_fn=problem.loss)
    plain, tried = problem.trainer(tmp_path / "a" / "a"), problem.trainer(tmp_path / "b" / "b", proxy=proxy)
    assert [note[:15] for note in tried.restricted] == ["class sensitive"] and "not assessable" in plain.restricted[0]
    assert plain.fit().notes == () and tried.fit().notes == tried.restricted
    weights = [run.model.state_dict() for run in (plain, tried)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    again = problem.trainer(tmp_path / "b" / "b", proxy=proxy)
    assert again.restricted == ()  # a run that has begun is past the question


@pytest.mark.parametrize("allocate", ["pareto", "proportional"])
def test_what_a_class_is_compared_with_has_the_noise_of_a_plan_without_it(allocate: str) -> None:
    """A class with a small ε raises the noise of the layers that it reaches; leaving it out removes that noise."""
    policy = Policy.parse(
        '[corpus]\norigin = "tests"\ndelta = 1e-5\naccountant = "rdp"\n[class.all]\npopulation = 400\nepsilon = 3\n'
        "[class.few]\npopulation = 40\nepsilon = 0.02\nprofile = { top = 0.5 }\n"
    )
    both, alone = (
        make_plan(LayerStack.from_model(net()), policy, batch={"all": 60, "few": few}, steps=60, allocate=allocate)
        for few in (6, 0)
    )
    found = restricted._without(both, both.index("few"))
    ratios = [[s / c for s, c in zip(plan.noise, plan.clip[plan.index("all")], strict=True)] for plan in (found, alone)]
    assert both.noise[1] / both.clip[both.index("all")][1] > 20 * ratios[1][1]
    assert found.sigma("all") == pytest.approx(both.sigma("all"))  # no less private than before
    assert all(0.5 < mine / its < 2 for mine, its in zip(*ratios, strict=True))
