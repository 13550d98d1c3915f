"""The demo: honest coins, a plan that is spent exactly, and nothing private in what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lamina.cli import main
from lamina.cli.demo.coins import poisson_sample
from lamina.cli.demo.training import Demo


def test_coins_have_the_right_rate_and_are_independent() -> None:
    n, rate, draws = 2_000, 0.1, 200
    present = np.zeros((draws, n))
    for row in present:
        row[poisson_sample(n, rate)] = 1
    total = present.sum()
    assert abs(total - rate * n * draws) < 6 * np.sqrt(n * draws * rate * (1 - rate))
    sizes = present.sum(axis=1)
    assert 0.6 < sizes.var() / (n * rate * (1 - rate)) < 1.6  # binomial, not a fixed size
    neighbours = (present[:, :-1] * present[:, 1:]).mean()
    assert neighbours == pytest.approx(rate**2, rel=0.1)


def test_coins_at_the_ends() -> None:
    assert poisson_sample(100, 0.0).size == 0
    assert poisson_sample(100, 1.0).tolist() == list(range(100))
    assert poisson_sample(0, 0.5).size == 0
    with pytest.raises(ValueError, match="rate"):
        poisson_sample(10, 1.5)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def prepared() -> Demo:
    return Demo.prepare(steps=2)


def test_a_batch_holds_whole_patients_and_may_be_empty(
    prepared: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = prepared.sample()
    assert batch.x.shape[0] == 2 * len(batch)
    assert batch.unit.bincount().unique().tolist() == [2]
    monkeypatch.setattr(
        "lamina.cli.demo.training.poisson_sample", lambda population, rate: np.empty(0, dtype=np.int64)
    )
    outcome = prepared.train(lambda done, spent: None)  # two steps of noise alone
    assert outcome.epsilon["clinical"] > 0


def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--steps", "3", "--folder", str(tmp_path), "--json"])
    assert caught.value.code in (0, None)
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert {"folder", "seconds", "ledger", "certificate", "report", "release"} <= result.keys()
    assert result["ledger"] is result["certificate"] is result["release"] is None
    assert result["private"] is True
    assert 0 < result["epsilon"]["sensitive"] <= 1.0
    assert 0 < result["epsilon"]["clinical"] <= 3.0
    page = Path(result["report"]).read_text(encoding="utf-8")
    assert "http" not in page  # self-contained
    assert "simulated" in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "report.html"]


@pytest.mark.slow
def test_the_demo_learns(prepared: Demo) -> None:
    outcome = Demo.prepare(steps=120).train(lambda done, spent: None)
    assert outcome.error_after < 0.3 < outcome.error_before
    assert outcome.epsilon["clinical"] <= 3.0
    assert outcome.epsilon["sensitive"] <= 1.0
