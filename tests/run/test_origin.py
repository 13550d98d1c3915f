"""The secret beside the runs: drawn once, by whoever is first."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from refusals import raises_code

from lamina.errors import StorageError
from lamina.run import run_ledger as module
from lamina.run.run_ledger import origin_secret


def test_it_is_drawn_once_and_kept(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = origin_secret(tmp_path)
    assert len(first) == 32 and origin_secret(tmp_path) == first
    assert origin_secret(tmp_path / "other") != first
    assert stat.S_IMODE((tmp_path / "origin.key").stat().st_mode) == 0o600


def test_whoever_is_second_takes_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = module._draw_secret

    def raced(path: Path) -> None:
        path.write_bytes(b"f" * 32)  # somebody was faster
        draw(path)

    monkeypatch.setattr(module, "_draw_secret", raced)
    assert origin_secret(tmp_path) == b"f" * 32


def test_damage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "origin.key").write_bytes(b"short")
    with raises_code("train.origin-key-unreadable"):
        origin_secret(tmp_path)
    with pytest.raises(StorageError):
        origin_secret(tmp_path / "nowhere")
