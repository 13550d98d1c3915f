"""The two programs of docs/opacus.md, run as they stand: the same task, the same ε by both accountants."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant

from lamina.account.accountants import find_accountant

PAGE = (Path(__file__).parents[2] / "docs" / "opacus.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def programs() -> tuple[dict[str, Any], dict[str, Any]]:
    made: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for code, names in zip(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), made, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus warns of its own hooks and generators
            exec(code, names)
    return made


Programs = tuple[dict[str, Any], dict[str, Any]]


def test_the_same_epsilon(programs: Programs) -> None:
    theirs, ours = programs
    history = theirs["privacy"].accountant.history
    assert history == [(1.1, pytest.approx(ours["plan"].classes[0].sampling_rate), ours["plan"].steps)]
    assert ours["epsilon"] == pytest.approx(theirs["epsilon"], rel=0.01)
    rdp = RDPAccountant()
    rdp.history = history
    mine = find_accountant("rdp").epsilon(ours["plan"].schedule(0), 1e-5)
    assert mine == pytest.approx(rdp.get_epsilon(1e-5), rel=0.01)


def test_the_same_mechanism(programs: Programs) -> None:
    """Clip norm, standard deviation of the noise and divisor of a step."""
    theirs, ours = programs
    optimizer, plan = theirs["optimizer"], ours["plan"]
    assert plan.norm(0) == pytest.approx(optimizer.max_grad_norm)
    assert plan.noise == pytest.approx([optimizer.noise_multiplier * optimizer.max_grad_norm] * len(plan.layers))
    assert plan.batch == optimizer.expected_batch_size


def test_both_learn_the_task(programs: Programs) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2000, 12, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    theirs, ours = (float((names["model"](x).argmax(1) == y).float().mean()) for names in programs)
    assert min(theirs, ours) > 0.88 and abs(theirs - ours) < 0.08  # 0.943 ± 0.007 over seeds, both
