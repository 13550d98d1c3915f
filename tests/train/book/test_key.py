"""The secret beside the book: drawn once, by whoever is first."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lamina.errors import StorageError
from lamina.train.book import key as module
from lamina.train.book.key import secret_beside


def test_it_is_drawn_once_and_kept(tmp_path: Path) -> None:
    first = secret_beside(tmp_path / "spend.db")
    assert len(first) == 32 and secret_beside(tmp_path / "spend.db") == first
    assert secret_beside(tmp_path / "other.db") != first
    assert stat.S_IMODE((tmp_path / "spend.db.key").stat().st_mode) == 0o600


def test_whoever_is_second_takes_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = module._draw

    def raced(path: Path) -> None:
        path.write_bytes(b"f" * 32)  # somebody was faster
        draw(path)

    monkeypatch.setattr(module, "_draw", raced)
    assert secret_beside(tmp_path / "spend.db") == b"f" * 32


def test_damage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spend.db.key").write_bytes(b"short")
    with pytest.raises(StorageError, match="must have 32"):
        secret_beside(tmp_path / "spend.db")
    with pytest.raises(StorageError):
        secret_beside(tmp_path / "nowhere" / "spend.db")
