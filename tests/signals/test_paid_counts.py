"""Class counts as docs/signals.md makes them: a run of one step, charged and recorded in the ledger."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.writer import Ledger

PAGE = Path(__file__).parent.parent.parent / "docs" / "signals.md"


def counted() -> Callable[..., torch.Tensor]:
    block = next(
        text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "paid_class_counts" in text
    )
    names: dict[str, Callable[..., torch.Tensor]] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names["paid_class_counts"]


def test_counts_are_near_and_the_ledger_has_their_charge(tmp_path: Path) -> None:
    label = torch.tensor([0] * 60 + [1] * 30 + [2] * 30)
    patient = torch.cat([torch.arange(60), 60 + torch.arange(60) // 2])  # 60, 15 and 15 patients
    folder = tmp_path / "counts"
    found = counted()(label, patient, 3, epsilon=200.0, folder=str(folder))
    assert torch.allclose(found, torch.tensor([60.0, 15.0, 15.0]), atol=3.0)
    (path,) = tmp_path.glob("*.ledger.db")
    with Ledger.open(path) as ledger:
        spent = SpendLedger(ledger)
        ((account, limit),) = spent.accounts()
        total = spent.total(str(account), delta=limit.delta, accountant=limit.accountant)
    assert 100.0 < total.spent <= 200.0
