"""The library is found, can be switched off, and gets no pointer to anything but what it expects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lamina.engine import native
from lamina.engine.native import sources


def test_kind_says_what_runs() -> None:
    with native.switched(True):
        assert native.kind().startswith("native-") and native.missing() is None
    with native.switched(False):
        assert native.kind() == "torch" and native.library() is None
        assert "LAMINA_NATIVE=0" in str(native.missing())


def test_a_library_that_was_built_from_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "source_digest", lambda: "0" * 16)
    library, why = native._load.__wrapped__()
    assert library is None and "build them again" in why


def test_every_byte_of_every_source_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in sources.FOLDER.glob("*.[ch]"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = sources.source_digest()
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    assert sources.source_digest() == before
    (tmp_path / "product.h").write_text((tmp_path / "product.h").read_text() + " ")
    assert sources.source_digest() != before


@pytest.mark.parametrize(
    "given",
    [torch.zeros(3, 4).t(), torch.zeros(4, 3, dtype=torch.float64), torch.zeros(3, 4), torch.zeros(12)],
    ids=["not contiguous", "float64", "other shape", "other rank"],
)
def test_other_memory_is_not_passed(given: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="a kernel got"):
        native.pointer(given, torch.float32, 4, 3)


def test_memory_is_passed() -> None:
    t = torch.zeros(4, 3)
    assert native.pointer(t, torch.float32, 4, 3) == t.data_ptr()
