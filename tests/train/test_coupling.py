"""What the step really computes is probed: augmentation, model and loss, in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from problem import Tensor
from refusals import raises_code


def mixup(x: Tensor) -> Tensor:
    weight = torch.distributions.Beta(0.4, 0.4).sample()
    return weight * x + (1 - weight) * x[torch.randperm(len(x))]


AUGMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mixup": mixup,
    "standardised by the batch": lambda x: (x - x.mean(0)) / x.std(0),
    "divided by the largest": lambda x: x / x.abs().max(),
}


@pytest.mark.parametrize("kind", AUGMENTS)
def test_an_augmentation_that_mixes_examples_is_refused_before_anything_is_spent(kind: str, tmp_path: Path) -> None:
    trainer = problem.trainer(tmp_path / "a", augment=AUGMENTS[kind])
    with raises_code("engine.probe-found-coupling"):
        trainer.fit()
    assert not list(tmp_path.rglob("*.db")) and not list(tmp_path.rglob("metrics.json"))


@pytest.mark.parametrize("augment", [lambda x: x + 0.1 * torch.randn_like(x), lambda x: x.mul_(1.0 + torch.rand(()))])
def test_an_augmentation_of_each_example_by_itself_is_accepted(augment: Any, tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", augment=augment).rehearse()
