"""The guides on GANs and fixed-size batches: their code runs, and prints what they say it prints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pages

DOCS = Path(__file__).parents[1] / "docs"


def test_several_optimisers_and_a_gan() -> None:
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the same simulated data is planned for twice
        assert pages.run(DOCS / "gans.md", names) == ["python", "python"]
    assert names["engine"].budget.taken == names["plan"].steps == 30
    assert names["engine"].epsilon(0) <= 3.0


def test_prices_of_fixed_batches() -> None:
    assert pages.run(DOCS / "fixed-batches.md", whole=True) == ["python", "text"]
