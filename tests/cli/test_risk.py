"""A policy with a risk bound on the command line: lamina plan, spend and ledger policy show it; contributors can sign."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from asking import Call, answer, succeeded
from scipy.stats import norm
from torch import nn

from lamina.admit.terms import preset
from lamina.allocate.make_plan import make_plan
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.spend_ledger import SpendLedger
from lamina.plan.charges import plan_charges
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy

POLICY = """
[corpus]
origin = "example.org/risk"
delta = 1e-5
accountant = "gaussian"
[class.clinical]
population = 1_000
risk = { of = "OF", fpr = 0.01, tpr = 0.05 }
[class.open]
population = 1_000
public = true
"""
RUN = "3f9c21aa" * 4


def rates(found: dict[str, Any]) -> tuple[float, float]:
    return found["membership"]["tpr"]["0.01"], found["content"]["tpr"]["0.01"]


def test_a_plan_shows_epsilon_and_both_risks(tmp_path: Path, lamina: Call) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.replace("OF", "membership"))
    words = ("plan", str(path), "--steps", "20", "--batch", "100", "--model", "residual")
    found = answer(lamina(*words, "--json"))["classes"]
    mu = math.sqrt(20) / found["clinical"]["sigma"]
    closed = [float(norm.cdf(norm.ppf(0.01) + shift)) for shift in (mu, 2 * mu)]
    assert rates(found["clinical"]) == pytest.approx(closed, rel=1e-9) and closed[0] == pytest.approx(0.05, rel=1e-3)
    assert found["clinical"]["membership"]["accuracy"] == pytest.approx(float(norm.cdf(mu / 2)), abs=1e-5)
    assert found["clinical"]["epsilon"] > 0
    assert found["open"]["membership"] is found["open"]["content"] is None
    text = succeeded(lamina(*words))
    assert "found at 1 % false accusations" in text and "5.00 %" in text and "not protected" in text


@pytest.mark.parametrize("of", ["membership", "content"])
def test_what_remains_of_a_risk_and_the_policy_in_force(tmp_path: Path, lamina: Call, of: str) -> None:
    rules = Policy.parse(POLICY.replace("OF", of))
    plan = make_plan(
        LayerStack.from_model(nn.Sequential(nn.Linear(4, 2))), rules, batch={"clinical": 100, "open": 0}, steps=20
    )
    path = tmp_path / "risk.ledger.db"
    book = SpendLedger(open_or_create(path, CorpusTerms.of_policy(rules)))
    book.reserve(RUN, charges=plan_charges(plan, 0, 10), bounds={}, plan=plan)
    book.ledger.close()
    found = answer(lamina("spend", str(path), "--json"))["origins"]["example.org/risk"]["clinical"]["risk"]
    mu = math.sqrt(10) / plan.sigma("clinical") * (1 if of == "membership" else 2)
    half = float(norm.cdf(norm.ppf(0.01) + mu))
    assert (found["of"], found["fpr"], found["tpr"], found["spent"]) == (of, 0.01, 0.05, pytest.approx(0.01))
    assert found["committed"] == pytest.approx(half) and found["remaining"] == pytest.approx(0.05 - half)
    assert f"risk of clinical: {of}: at most 5 % found at 1 % false accusations" in succeeded(
        lamina("spend", str(path))
    )
    assert answer(lamina("ledger", "policy", str(path), "--json"))["classes"]["clinical"]["risk"].startswith(of)
    assert f"risk of clinical: {of}" in succeeded(lamina("ledger", "policy", str(path)))


@pytest.mark.parametrize(("of", "distance"), [("membership", 1), ("content", 2)])
def test_contributors_sign_the_gaussian_release_of_the_same_risk(of: str, distance: int) -> None:
    """One release at the signed multiplier, which is rounded up in 1e-6, keeps the bound; a smaller one would not."""
    clip, noise = preset(Policy.parse(POLICY.replace("OF", of)), "clinical")
    found = [float(norm.cdf(norm.ppf(0.01) + distance / (z / 1e6))) for z in (noise, noise - 1)]
    assert clip == 1_000_000 and found[0] <= 0.05 < found[1]
    stricter = POLICY.replace("OF", of).replace("[class.open]", "noise_multiplier = 9.0\n[class.open]")
    assert preset(Policy.parse(stricter), "clinical")[1] > 8_999_000
