"""The programs of docs/huggingface.md, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from by_hand import QUIET

pytestmark = QUIET
PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")


def program(place: int) -> str:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[place]  # type: ignore[no-any-return]


def test_a_private_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, names = program(0), dict[str, Any]()
    assert len(code.strip().splitlines()) <= 100
    exec(code, names)
    said = capsys.readouterr().out
    assert "per patient at δ = 1e-05" in said and names["plan"].epsilon(0) <= 8.0
    assert "tensor([[ 1,  2,  3," in said
    base = transformers.LlamaForCausalLM(names["config"])
    base.load_state_dict(names["model"].get_base_model().state_dict(), strict=False)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    trained = {n: t for n, t in names["model"].state_dict().items() if "lora_" in n}
    assert trained and all(torch.equal(t, again.state_dict()[n]) for n, t in trained.items())


def test_from_text_to_a_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program(1), names)
    said = capsys.readouterr().out
    assert "20 of 20 steps" in said and "per patient at δ = 1e-05" in said and "tensor([" in said
    assert len(names["corpus"]) == 80 and names["corpus"].unit_name == "patient"


def test_a_private_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, names = program(2), dict[str, Any]()
    assert len(code.strip().splitlines()) <= 100
    exec(code, names)
    said = capsys.readouterr().out
    assert "20 of 20 steps" in said and "'epsilon'" in said
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "runs" / "gpt2" / "checkpoint-20")
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in names["model"].state_dict().items())
