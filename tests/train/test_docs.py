"""The quickstart runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"


def patients(path: Path) -> None:
    """A file of the user: 600 patients with two rows each, 150 of them volunteers."""
    generator = np.random.default_rng(0)
    patient = np.repeat(np.arange(600), 2)
    y = generator.integers(0, 2, 600)[patient]
    x = generator.normal(size=(1200, 12)) + y[:, None]
    group = np.where(patient < 150, "volunteers", "sensitive")
    np.savez(path, x=x, y=y, patient=patient, group=group)


def test_the_quickstart_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    patients(tmp_path / "patients.npz")
    text = PAGE.read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "policy.toml").write_text(toml, encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for body in blocks:
        exec(compile(body, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "ε" in printed
    assert 0 < names["outcome"].epsilon["sensitive"] <= 3.0
    assert (tmp_path / "runs" / "first" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "second" / "model.safetensors").exists()
