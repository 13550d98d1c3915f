"""What the README and the page on the command line promise, run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.cli.app import main
from lamina.run.private import PlannedBefore

ROOT = Path(__file__).parents[1]


PAGE = "docs/command-line.md"


def block(language: str, place: int = 0, page: str = PAGE) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[place]  # type: ignore[no-any-return]


def test_ten_lines_and_a_table_make_a_private_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    rows = [",".join([*(f"lead{i}" for i in range(12)), "label", "patient"])]
    for patient in range(200):
        label = patient % 2
        for _ in range(1 + patient % 3):
            values = generator.normal(size=12) + label
            rows.append(",".join([*(f"{v:.4f}" for v in values), str(label), f"P{patient:03d}"]))
    (tmp_path / "patients.csv").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = block("python", page="README.md")
    assert len(code.strip().splitlines()) <= 10
    names: dict[str, Any] = {}
    exec(code, names)
    first = capsys.readouterr().out
    assert "ε" in first
    assert names["plan"].epsilon(0) <= 3.0
    with pytest.warns(PlannedBefore):
        exec(code, {})  # again: the run is finished, nothing is trained or charged
    assert capsys.readouterr().out == first


def test_a_table_becomes_a_release_without_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    rows = ["age,bmi,label,patient"]
    rows += [f"{generator.normal():.4f},{generator.normal():.4f},{i % 2},P{i // 2:03d}" for i in range(300)]
    (tmp_path / "patients.csv").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```\n(lamina check .*?)```", text, re.DOTALL)
    for line in commands.strip().splitlines():
        words = shlex.split(line, comments=True)
        with pytest.raises(SystemExit) as done:
            main(words[1:])
        out, err = capsys.readouterr()
        assert not done.value.code, (line, out, err)
    trust = re.findall(r"--trust (\S+)", out)
    with pytest.raises(SystemExit) as done:
        main(
            [
                "release",
                "verify",
                "release-1",
                "--trust",
                trust[0],
                "--trust",
                trust[1],
                "--ledger",
                "runs/patients.ledger.db",
            ]
        )
    assert not done.value.code and "release-1: trusted" in capsys.readouterr().out


def test_the_lines_with_a_policy_train_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy.toml").write_text(block("toml"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    before = {name: p.clone() for name, p in model.named_parameters()}
    names = {
        "lamina": lamina,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loss": nn.CrossEntropyLoss(reduction="none"),
        "x": torch.randn(500, 4),
        "y": torch.randint(0, 3, (500,)),
        "patient": torch.arange(500) // 2,
        "group": ["clinical"] * 400 + ["sensitive"] * 100,
    }
    exec(block("python"), names)
    plan = names["plan"]
    assert isinstance(plan, lamina.StepPlan)
    assert plan.epsilon("clinical") <= 3.0
    assert plan.epsilon("sensitive") <= 1.0
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_stranger_signs_admits_and_trains_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands as they are printed, on a folder, a policy and a model of their own."""
    policy, run = block("toml"), block("toml", 1)
    (tmp_path / "policy.toml").write_text(policy, encoding="utf-8")
    (tmp_path / "RUN.toml").write_text(run, encoding="utf-8")
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2))\n"
    )
    generator = np.random.default_rng(0)
    for i in range(30):
        folder = tmp_path / "contributions" / f"P{i:03d}"
        folder.mkdir(parents=True)
        np.savez(folder / "payload.npz", x=generator.normal(size=(3, 12)) + i % 2, y=np.full(3, i % 2))
    classes = [f"P{i:03d},{'sensitive' if i < 10 else 'clinical'}" for i in range(30)]
    (tmp_path / "contributions" / "contributions.csv").write_text("\n".join(["id,class", *classes]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "nets", raising=False)  # of another test
    monkeypatch.setenv("LAMINA_PASSPHRASE", "correct horse")
    commands = [shlex.split(line, comments=True) for place in (0, 1) for line in block("sh", place).splitlines()]
    assert [words[:2] for words in commands] == [
        ["lamina", "keys"], ["lamina", "attest"], ["lamina", "keys"], ["lamina", "admit"], ["lamina", "train"],
        ["lamina", "train"], ["lamina", "ledger"],
        ["lamina", "keys"], ["lamina", "ledger"], ["lamina", "ledger"], ["lamina", "ledger"],
    ]  # fmt: skip
    told = {}
    try:
        for words in commands:
            with pytest.raises(SystemExit) as caught:
                main(words[1:])
            printed = capsys.readouterr()
            assert caught.value.code in (0, None), printed.err
            told[words[1]] = told.get(words[1], "") + printed.out
    finally:
        sys.modules.pop("nets", None)
    assert "admitted by signature: 30; refused: 0" in told["train"]
    assert "not admitted by signature" not in told["train"]
    assert "sensitive@c=1" in told["train"] and "clinical@c=1" in told["train"]
    assert ".ledger.db: self-consistent, not trusted" in told["ledger"]
    assert "30 attestations" in told["ledger"]
    assert "ledger.db: verified and trusted" in told["ledger"]
    assert (tmp_path / "runs" / "first" / "model.safetensors").exists()
    assert b"ENCRYPTED PRIVATE KEY" in (tmp_path / "hospital.key").read_bytes()


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_architecture_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for folder in (ROOT / "src" / "lamina").iterdir():
        if folder.is_dir() and not folder.name.startswith("__"):
            assert f"`{folder.name}/`" in text, folder.name
