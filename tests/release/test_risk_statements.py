"""Risk figures and their sentences: published figures, closed forms, and one direction of rounding."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import problem
import pytest
from dp_accounting.pld import privacy_loss_distribution as other
from scipy.special import ndtr, ndtri
from stopping import killed
from trained_run import Trained

from lamina import Corpus
from lamina.account.tradeoff import trade_off
from lamina.ledger.reader import LedgerReader
from lamina.plan.risk import COMPOSED
from lamina.release import risk_statements
from lamina.release.certificate import certify
from lamina.release.risk_statements import content_sentence, membership_sentence, per_hundred, protection, risk_figures
from lamina.release.schema import SOURCES, TOPICS
from lamina.release.typeset import read_template

TWO_STEPS = "replace-one, as two add/remove steps"
DEMO = {(4.805, 0.4, 0.0): 70}
Of = Literal["membership", "content"]


def figures(events: dict[tuple[float, float, float], int], of: Of, **options: Any) -> dict[str, Any]:
    found = risk_figures(events, accountant=options.pop("accountant", "pld"), of=of, **options)
    assert found is not None
    return found


def test_the_figures_of_the_demonstration() -> None:
    membership, content = figures(DEMO, "membership"), figures(DEMO, "content")
    assert membership["tpr"]["0.01"] == pytest.approx(0.0528, abs=2e-4)
    assert membership["accuracy"] == pytest.approx(0.6365, abs=5e-4)
    assert 0.70 < membership["mu"] < 0.73 and membership["mu_least_rate"] == 0.001
    assert content["tpr"]["0.01"] == content["success"]["0.01"] == pytest.approx(0.1735, abs=5e-4)
    assert content["accuracy"] == pytest.approx(0.7558, abs=5e-4)
    assert (membership["adjacency"], membership["bound"]) == ("add-remove", "privacy loss distribution")
    assert content["adjacency"] == "replace-one" and "success" not in membership


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("of", "factor"), [("membership", 1), ("content", 2)])
def test_noise_without_sampling_has_the_gaussian_figures(mu: float, of: Of, factor: int) -> None:
    found = figures({(10 / mu, 1.0, 0.0): 100}, of)
    for fpr, tpr in found["tpr"].items():
        assert 0 <= tpr - float(ndtr(ndtri(float(fpr)) + factor * mu)) < 3e-9
    assert 0 <= found["advantage"] - float(2 * ndtr(factor * mu / 2) - 1) < 1e-5
    assert found["bound"] == "Gaussian" and 0 <= found["mu"] - factor * mu < 2e-4


@pytest.mark.parametrize("accountant", ["pld", "rdp", "gaussian", "zcdp", "rdp-integer", "rdp@4"])
@pytest.mark.parametrize("of", ["membership", "content"])
def test_figures_are_rounded_up_to_the_same_bytes(accountant: str, of: Of) -> None:
    found, again = (figures(DEMO, of, accountant=accountant) for _ in range(2))
    found["tpr"]["0.01"] = 0.0  # a caller's change stays with that caller
    assert json.dumps(again) == json.dumps(figures(dict(reversed(DEMO.items())), of, accountant=accountant))
    relation = "add_remove" if of == "membership" else "replace_one"
    curve = trade_off(DEMO, accountant=accountant, adjacency=relation)
    for fpr, tpr in again["tpr"].items():
        assert tpr >= curve.tpr(float(fpr)) and math.ceil(tpr * 1e9 - 1e-3) == round(tpr * 1e9)
    assert again["accuracy"] >= curve.accuracy() and again["advantage"] >= curve.advantage()


def test_content_without_a_proven_replace_one_is_two_steps() -> None:
    for found in (
        figures(DEMO, "content", accountant="rdp-integer"),
        figures({(4.805, 0.4, 12.0): 70}, "content", accountant="rdp"),
        figures(DEMO, "content", marks=frozenset({COMPOSED})),
    ):
        assert found["adjacency"] == TWO_STEPS
        assert found["tpr"]["0.01"] >= figures(DEMO, "content")["tpr"]["0.01"]


def test_nothing_is_stated_where_nothing_is_proven() -> None:
    assert risk_figures({(4.805, 0.4, 12.0): 70}, accountant="gaussian", of="membership") is None
    none = figures({(0.05, 1.0, 0.0): 1}, "membership")
    assert none["mu"] is None and none["tpr"]["0.001"] == 1.0


def test_integer_noise_is_not_priced_at_an_order_between_integers() -> None:
    mixed = {(2.0, 0.1, 12.5): 5, (2.0, 0.1, 0.0): 5}
    below = {(2.0, 0.1, 12.5): 5, (2.0, 0.1, 0.0): 5, (1e6, 1e-6, 12.0): 1}
    found, bounded = (figures(each, "membership", accountant="rdp-integer") for each in (mixed, below))
    assert found["tpr"]["0.001"] == pytest.approx(bounded["tpr"]["0.001"], rel=1e-3)


def test_sentences_are_natural_frequencies() -> None:
    membership = membership_sentence("patient", figures(DEMO, "membership"))
    assert membership.startswith(
        "Of 100 patients who took part, the best attacker correctly names at most 5.3 on average while wrongly naming 1 of 100 "
        "others; guessing names 1."
    )
    content = content_sentence("recording", figures(DEMO, "content"))
    assert content == (
        "Suppose that one recording is known to have taken part. An attacker guesses the content of its record. The guess would be "
        "right in 1 of 100 cases if another record had been used in its place; with the model trained on its record, it is right "
        "in at most 17.4 of 100. If a fair coin decides which of two records was used, the attacker is right in at most 75.6 of "
        "100 cases; guessing is right in 50."
    )
    assert [per_hundred(rate) for rate in (0.0, 0.01, 0.010001, 0.63634, 1.0)] == ["0", "1", "1.1", "63.7", "100"]


# ------------------------------------------------------------------------------------ statements of certificates


def certified(folder: Path) -> dict[str, Any]:
    with LedgerReader.read_only(next(folder.parent.glob("*.ledger.db"))) as ledger:
        found: dict[str, Any] = json.loads(certify(folder, ledger).json())
    return found


def allowing_more() -> Corpus:
    """The same people under a policy that allows several runs."""
    return problem.corpus(
        policy=problem.POLICY.replace("epsilon = 4.0", "epsilon = 40").replace("epsilon = 2.0", "epsilon = 20")
    )


def about(content: dict[str, Any], cls: str | None, *topics: str) -> list[dict[str, Any]]:
    return [each for each in content["statements"] if each["class"] == cls and each["topic"] in topics]


def test_each_class_has_the_figures_of_its_charges(tmp_path: Path) -> None:
    """One loss distribution of dp-accounting, from the charges that the certificate lists."""
    problem.trainer(tmp_path / "a").fit()
    content = certified(tmp_path / "a")
    assert content["version"] == 4 and not {"assumptions", "not_covered", "statement"} & content.keys()
    for name in ("clinical", "sensitive"):
        found = content["classes"][name]
        (charge,) = found["charges"]
        assert charge["steps"] == 24 and charge["order"] is None and found["clip_norm"] > 0
        losses = other.from_gaussian_mechanism(
            charge["noise_multiplier"], sampling_prob=charge["sampling_rate"], value_discretization_interval=1e-3
        ).self_compose(24)
        epsilons = np.linspace(-8, 12, 4001)
        for fpr, tpr in found["membership"]["tpr"].items():
            expected = float(np.min(np.exp(epsilons) * float(fpr) + losses.get_delta_for_epsilon(epsilons)))
            assert expected * (1 - 2e-3) <= tpr <= expected * 1.02
        assert found["membership"] == found["membership_total"] and found["content"] == found["content_total"]
        (said,) = about(content, name, "membership")
        assert (
            per_hundred(found["membership"]["tpr"]["0.01"]) in said["text"] and "patients who took part" in said["text"]
        )
        assert said["source"] == "recomputed from the ledger" and said["leaves"]
        (unit,) = about(content, name, "unit")
        assert (
            "one patient" in unit["text"] and "a ward" in unit["text"] and unit["digest"] == content["plan"]["sha256"]
        )
    assert not [each for each in content["statements"] if "no plan depended" in each["text"]]
    assert {each["source"] for each in content["statements"]} == {
        "recomputed from the ledger", "stated by the trainer", "follows from the method"
    }  # fmt: skip
    topics = {each["topic"] for each in content["statements"]}
    assert topics >= {"trust", "query model", "side channels", "voids", "budget", "tuning", "not covered", "condition"}


def test_a_public_class_is_stated_as_not_protected(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a").fit()
    content = certified(tmp_path / "a")
    public = content["classes"]["open"]
    assert not any(public[f"{of}{of_all}"] for of in ("membership", "content") for of_all in ("", "_total"))
    (said,) = about(content, "open", *(set(TOPICS) - {"purpose"}))
    assert said["topic"] == "not covered" and "nothing about its contributions is protected" in said["text"]
    assert content["protects"] == {
        "private_for": ["clinical", "sensitive"],
        "weak": [],
        "not_protected": [{"class": "open", "population": 60, "unit": "contribution", "reason": "declared public"}],
        "badge": "private for: clinical, sensitive; not protected: open (declared public; declared population: 60)",
    }


@pytest.mark.parametrize("noise", ["raw", "capped"])
def test_raw_noise_protects_content_alone_and_without_sampling(tmp_path: Path, noise: str) -> None:
    problem.trainer(tmp_path / "a", **problem.parts(noise)).fit()
    content = certified(tmp_path / "a")
    for name in ("clinical", "sensitive"):
        found, steps = content["classes"][name], 24 if noise == "raw" else 2
        assert found["membership"] is found["membership_total"] is None
        mu = 2 * math.sqrt(steps) / found["noise_multiplier"]
        assert 0 <= found["content"]["tpr"]["0.01"] - float(ndtr(ndtri(0.01) + mu)) < 3e-9
        assert not about(content, name, "membership") and about(content, name, "content")
    assert content["protects"]["badge"].startswith("private for: clinical (content only), sensitive (content only);")


def test_totals_over_several_runs_state_their_condition(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", steps=6, corpus=allowing_more()).fit()
    problem.trainer(tmp_path / "b", steps=12, corpus=allowing_more()).fit()
    content = certified(tmp_path / "b")
    clinical = content["classes"]["clinical"]
    for of in ("membership", "content"):
        assert clinical[f"{of}_total"]["tpr"]["0.01"] > clinical[of]["tpr"]["0.01"]
    this, total = about(content, "clinical", "membership")
    assert (
        set(this["leaves"]) < set(total["leaves"])
        and "counting all runs" in total["text"]
        and "counting this run alone" in this["text"]
    )
    (condition,) = (each for each in content["statements"] if "no plan depended" in each["text"])
    assert condition["topic"] == "assumption" and condition["source"] == "follows from the method"


def test_a_run_without_an_end_leaves_the_membership_over_all_runs_open(tmp_path: Path) -> None:
    """Its end would have stated whether the number of contributions was public."""
    killed(tmp_path / "a", 8, corpus=allowing_more())
    problem.trainer(tmp_path / "b", steps=6, corpus=allowing_more()).fit()
    clinical = certified(tmp_path / "b")["classes"]["clinical"]
    assert clinical["membership"] and clinical["membership_total"] is None and clinical["content_total"]


def test_a_run_that_is_not_private_states_no_figure_in_words(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", run_seed=3).fit()
    content = certified(tmp_path / "a")
    assert content["protects"]["badge"] == "not private" and not content["protects"]["private_for"]
    topics = {each["topic"] for each in content["statements"]}
    assert not topics & {"membership", "content", "query model"} and "condition" in topics
    assert not [each for each in content["statements"] if "secure generator" in each["text"]], (
        "the trainer stated a seed"
    )


def test_the_badge_says_for_whom() -> None:
    risk, base = figures(DEMO, "membership"), {"public": False, "population": 60, "unit": "patient", "epsilon": 2.0}
    base["content"] = figures(DEMO, "content")
    classes = {
        "a": {**base, "membership": risk, "charges": [1]},
        "zeroed": {**base, "membership": None, "charges": [1]},
        "idle": {**base, "membership": risk, "charges": [], "epsilon": 0.0},
        "loud": {**base, "membership": risk, "charges": [1], "epsilon": 5000.0},
        "volunteer": {**base, "public": True, "membership": None, "content": None, "charges": [], "epsilon": None},
    }
    found = protection(classes, private=True)
    assert found["private_for"] == ["a", "zeroed"]
    assert found["badge"] == (
        "private for: a, zeroed (content only); not protected: loud (ε above 20 protects nobody; declared population: 60), "
        "volunteer (declared public; declared population: 60); not used by this run: idle"
    )
    assert protection(classes, private=False)["badge"] == "not private"


def test_every_statement_has_a_known_topic_source_and_facts(monkeypatch: pytest.MonkeyPatch, trained: Trained) -> None:
    """Also a statement that no run here makes: every row is filled with the facts of a run."""
    monkeypatch.setattr(risk_statements, "stated_rows", lambda rows, facts: [_named(row, facts) for row in rows])
    with LedgerReader.read_only(trained.ledger) as ledger:
        certify(trained.folder, ledger)
    for row in (row for rows in read_template("statements.toml").values() for row in rows):
        assert row["topic"] in TOPICS and row["source"] in SOURCES
        assert row.get("leaves", "end") in ("begin", "end", "epochs", "all runs", "header", "withdrawals")


def _named(row: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any]:
    assert {name.removeprefix("not ") for name in row.get("when", ())} <= facts.keys()
    return row
