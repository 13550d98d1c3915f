"""A run of six short segments, whole or stopped in the middle, for tests of what its ledger and certificate say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from refusals import raises_code
from torch import nn

import lamina

POLICY = """
[corpus]
origin = "example.org/resumed"
delta = 1e-5
[class.clinical]
population = 60
"""
TWO_CLASSES = POLICY + "[class.sensitive]\npopulation = 40\n"


class StopAfter(lamina.Callback):
    """Raises after a number of closed segments, like a crash."""

    def __init__(self, segments: int) -> None:
        self._left = segments

    def on_segment(self, figures: Any) -> None:
        self._left -= 1
        if not self._left:
            raise RuntimeError("crash")


def trainer(
    folder: Path,
    policy: str = POLICY,
    *,
    run: str = "first",
    epsilon: float = 2.0,
    optimizer: Any = None,
    **options: Any,
) -> lamina.Trainer:
    (folder / "policy.toml").write_text(policy)
    terms = lamina.Policy.load(folder / "policy.toml")
    torch.manual_seed(0)
    classes = ["clinical"] * 60 + ["sensitive"] * 40 * ("sensitive" in policy)
    model, x = nn.Linear(4, 2), torch.randn(len(classes), 4)
    corpus = lamina.Corpus(x, (x.sum(1) > 0).long(), policy=terms, cls=classes)
    each = dict.fromkeys(dict.fromkeys(classes), epsilon)
    plan = lamina.make_plan(lamina.LayerStack.from_model(model), terms, batch=20, steps=6, epsilon=each)
    options = {"progress": False, "segment": 1, **options}
    return lamina.Trainer(
        model, optimizer or torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(reduction="none"), corpus, plan,
        folder=folder / "runs" / run, **options,
    )  # fmt: skip


def half_of_a_run(folder: Path, policy: str = POLICY, **options: Any) -> None:
    with raises_code("train.user-code-failed"):
        trainer(folder, policy, callbacks=[StopAfter(3)], **options).fit()
