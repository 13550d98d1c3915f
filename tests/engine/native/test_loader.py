"""The library is found, can be switched off, and gets no pointer to anything but what it expects."""

from __future__ import annotations

import pytest
import torch

from lamina.engine import native


def test_kind_says_what_runs() -> None:
    with native.switched(True):
        assert native.kind().startswith("native-") and native.missing() is None
    with native.switched(False):
        assert native.kind() == "torch" and native.library() is None
        assert "LAMINA_NATIVE=0" in str(native.missing())


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
