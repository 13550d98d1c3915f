"""Tests of the native kernels need them built."""

from __future__ import annotations

import pytest

from lamina.engine import native


@pytest.fixture(autouse=True)
def built() -> None:
    with native.switched(True):
        if (reason := native.missing()) is not None:
            pytest.skip(reason)
