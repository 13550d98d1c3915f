"""Risk figures and their sentences: published figures, closed forms, and one direction of rounding."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pytest
from scipy.special import ndtr, ndtri

from lamina.account.tradeoff import trade_off
from lamina.release.risk_statements import content_sentence, membership_sentence, per_hundred, risk_figures

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
        figures(DEMO, "content", correlated=True),
    ):
        assert found["adjacency"] == "replace-one, as two add/remove steps"
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
        "Of 100 patients who took part, the best attacker names at most 5.3 while wrongly naming 1 of 100 others; "
        "guessing names 1."
    )
    content = content_sentence("recording", figures(DEMO, "content"))
    assert "recording that is known to have taken part" in content and "at most 17.4 of 100" in content
    assert [per_hundred(rate) for rate in (0.0, 0.01, 0.010001, 0.63634, 1.0)] == ["0", "1", "1.1", "63.7", "100"]
