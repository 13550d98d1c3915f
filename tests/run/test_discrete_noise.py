"""Runs with noise on integers: killed and resumed, recorded, verified, certified; and never counted by another accountant."""

from __future__ import annotations

from pathlib import Path

import problem
import pytest
from refusals import raises_code
from stopping import killed, same, weights

import lamina
from lamina.account.schedule import INTEGER_RDP
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.plan_checks import accountant_violation
from lamina.plan.policy import Policy
from lamina.plan.rules import NoiseKind
from lamina.release.certificate import certify
from lamina.release.risk_statements import texts

pytestmark = pytest.mark.usefixtures("known_seeds")

GAUSSIAN = problem.POLICY.replace("public = true\n", "epsilon = 8.0\n")
DISCRETE = (
    GAUSSIAN.replace("delta = 1e-5\n", f'delta = 1e-5\naccountant = "{INTEGER_RDP}"\n')
    + '\n[noise]\nkind = "discrete_gaussian"\n'
)


LAPLACE = GAUSSIAN + '\n[noise]\nkind = "laplace"\n'


def parts(policy: str = DISCRETE) -> dict[str, object]:
    return {"plan": problem.plan(problem.net(), policy=policy), "corpus": problem.corpus(policy=policy)}


@pytest.mark.parametrize("kind", ["discrete_gaussian", "skellam", "laplace"])
def test_a_killed_run_resumes_exactly_and_its_certificate_names_the_noise(tmp_path: Path, kind: str) -> None:
    policy, accountant = (LAPLACE, "pld") if kind == "laplace" else (DISCRETE, INTEGER_RDP)
    policy = policy.replace('"discrete_gaussian"', f'"{kind}"')
    whole = problem.trainer(tmp_path / "whole" / "a", **parts(policy))
    expected = whole.fit()
    killed(tmp_path / "cut" / "a", 13, **parts(policy))
    resumed = problem.trainer(tmp_path / "cut" / "a", seed=9, **parts(policy))
    outcome = resumed.fit()
    assert same(weights(whole), weights(resumed)) and outcome.notes == ()
    assert outcome.epsilon == expected.epsilon
    assert outcome.epsilon["clinical"] == pytest.approx(4.0, rel=1e-3)
    with LedgerReader.read_only(next((tmp_path / "cut").glob("*.ledger.db"))) as ledger:
        assert ledger.header.accountant == accountant
        found = certify(tmp_path / "cut" / "a", ledger).content
    assert found["plan"]["noise"] == f"{kind}, per_step" and found["accountant"]["name"] == accountant
    ratio = whole.plan.noise_kind.std_ratio
    assert [each["noise_std"] for each in found["layers"]] == pytest.approx([ratio * s for s in whole.plan.noise])
    figures = found["classes"]["clinical"]
    replaced = figures["epsilon_replace_one"]
    assert replaced is None if kind == "laplace" else figures["epsilon"] <= replaced  # none is proven for Laplace noise
    assert figures["epsilon"] < figures["epsilon_unamplified"]
    assert figures["content"]["adjacency"] == "replace-one, as two add/remove steps"
    assert (figures["content"]["bound"] == "Rényi divergence") == (accountant == INTEGER_RDP)
    assert not any("floating-point" in line for line in texts(found, "not covered"))


def test_a_ledger_that_counts_otherwise_takes_no_such_run(tmp_path: Path) -> None:
    """The noise of a plan and the accountant of its ledger are held together before anything is drawn."""
    with raises_code("plan.noise-kind-accountant"):
        problem.plan(problem.net(), policy=DISCRETE.replace(INTEGER_RDP, "pld"))
    plan = problem.plan(problem.net(), policy=DISCRETE)
    with raises_code("train.plan-outside-policy"):
        problem.trainer(tmp_path / "one" / "a", plan=plan, corpus=problem.corpus(policy=GAUSSIAN)).fit()
    with raises_code("train.plan-outside-policy"):
        gaussian = problem.plan(problem.net(), policy=GAUSSIAN)
        problem.trainer(tmp_path / "two" / "b", plan=gaussian, corpus=problem.corpus(policy=DISCRETE)).fit()


def test_a_verifier_finds_noise_that_its_ledger_does_not_price() -> None:
    plan = problem.plan(problem.net(), policy=DISCRETE)
    assert plan.noise_kind is NoiseKind.DISCRETE_GAUSSIAN and accountant_violation(plan, INTEGER_RDP) is None
    wrong = accountant_violation(plan, "pld")
    assert wrong is not None and wrong.code == "verify.noise-not-priced"
    gaussian = lamina.make_plan(lamina.LayerStack.from_model(problem.net()), Policy.parse(GAUSSIAN), batch=48, steps=24)
    assert accountant_violation(gaussian, "pld") is None and accountant_violation(gaussian, INTEGER_RDP) is not None
