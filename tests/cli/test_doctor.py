"""`lamina doctor`: what is there, what is missing, and that it says which kernels run."""

from __future__ import annotations

import json

import pytest

from lamina.cli import doctor, main
from lamina.engine import native


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_names_versions_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--json")
    found = json.loads(text)
    assert code == 0 and found["ok"]
    assert {"python", "torch", "sqlite", "randomness", "cores", "kernels", "noise"} <= set(found["checks"])


def test_without_native_kernels_it_says_so_and_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with native.switched(False):
        code, text = run(capsys)
    assert code == 0 and "the torch rules run" in text


def test_what_is_needed_and_missing_is_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("no-such-package",))
    code, text = run(capsys)
    assert code == 1 and "✗" in text
