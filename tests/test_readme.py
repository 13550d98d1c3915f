"""What the README promises, run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import lamina

ROOT = Path(__file__).parents[1]


def block(language: str, place: int = 0) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[place]  # type: ignore[no-any-return]


def test_the_five_lines_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy.toml").write_text(block("toml"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    before = {name: p.clone() for name, p in model.named_parameters()}
    cls = torch.tensor([0, 0, 1, 1, 0])
    names = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loss_fn": nn.CrossEntropyLoss(reduction="none"),
        "batches": [
            lamina.Batch(torch.randn(5, 4), torch.randint(0, 3, (5,)), cls=cls),
            lamina.Batch(torch.empty(0, 4), torch.empty(0, dtype=torch.long)),
        ],
    }
    exec(block("python"), names)
    plan = names["plan"]
    assert isinstance(plan, lamina.StepPlan)
    assert plan.epsilon("clinical") <= 3.0
    assert plan.epsilon("sensitive") <= 1.0
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_sampling_lines_draw_a_batch() -> None:
    plan = _two_class_plan()
    cls = torch.tensor([0, 1]).repeat(500)
    names = {"plan": plan, "x": torch.randn(1000, 4), "y": torch.zeros(1000), "cls": cls}
    names |= {"torch": torch, "numpy": numpy, "os": os, "lamina": lamina}
    exec(block("python", 1), names)
    batch, rates = names["batch"], [c.sampling_rate for c in plan.classes]
    assert isinstance(batch, lamina.Batch)
    drawn = torch.bincount(batch.cls, minlength=2)
    for count, rate in zip(drawn.tolist(), rates, strict=True):
        assert abs(count - 500 * rate) < 6 * (500 * rate) ** 0.5 + 1


def _two_class_plan() -> lamina.StepPlan:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    return lamina.make_plan(
        lamina.LayerStack.from_model(model), lamina.Policy.parse(block("toml")), batch=2400, steps=10
    )


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_architecture_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for folder in (ROOT / "src" / "lamina").iterdir():
        if folder.is_dir() and not folder.name.startswith("__"):
            assert f"`{folder.name}/`" in text, folder.name
