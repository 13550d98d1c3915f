"""The quickstart runs as it is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.cli.app import main

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"


def patients(path: Path) -> None:
    """A file of the user: 600 patients with two rows each, 150 of them volunteers."""
    generator = np.random.default_rng(0)
    patient = np.repeat(np.arange(600), 2)
    y = generator.integers(0, 2, 600)[patient]
    x = generator.normal(size=(1200, 12)) + y[:, None]
    group = np.where(patient < 150, "volunteers", "sensitive")
    np.savez(path, x=x, y=y, patient=patient, group=group)


def contributions(folder: Path) -> None:
    """A folder of the user: sixty patients, fifteen of them volunteers."""
    generator, rows = np.random.default_rng(1), ["id,class"]
    for i in range(60):
        (folder / f"p{i:02d}").mkdir(parents=True)
        np.savez(folder / f"p{i:02d}" / "payload.npz", x=generator.normal(size=(2, 12)) + i % 2, y=np.full(2, i % 2))
        rows.append(f"p{i:02d},{'volunteers' if i < 15 else 'sensitive'}")
    (folder / "contributions.csv").write_text("\n".join(rows) + "\n")


def test_the_quickstart_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAMINA_PASSPHRASE", "correct horse")
    contributions(tmp_path / "contributions")
    patients(tmp_path / "patients.npz")
    text = PAGE.read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "policy.toml").write_text(toml, encoding="utf-8")
    (query,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "query.json").write_text(query, encoding="utf-8")
    blocks = re.findall(r"```(python|sh)\n(.*?)```", text, re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "python", "sh", "python", "sh", "sh", "sh", "python"]
    names: dict[str, Any] = {}
    for language, body in blocks:
        if language == "python":
            exec(compile(body, str(PAGE), "exec"), names)
            continue
        for line in body.splitlines():
            program, *words = shlex.split(line, comments=True)
            with pytest.raises(SystemExit) as caught:
                main(words)
            assert program == "lamina" and caught.value.code in (0, None), capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "ε" in printed
    assert 0 < names["outcome"].epsilon["sensitive"] <= 3.0
    assert (tmp_path / "runs" / "first" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "second" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "third" / "model.safetensors").exists()
    assert "60 admitted, 0 refused" in printed
    assert "third.ledger.db: self-consistent, not trusted" in printed
    assert (
        "release-1: signed by a trusted key" in printed
        and "\nallowed\n" in printed
        and "signed by the contributor" in printed
    )
    assert (tmp_path / "request-1" / "reconciliation.html").exists()
    assert {path.name for path in (tmp_path / "runs").glob("*.ledger.db")} > {"elsewhere.example-cardiology.ledger.db"}
