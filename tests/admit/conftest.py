"""A desk that signs contributions: good ones, and any kind of bad one."""

from __future__ import annotations

import pytest
from signing_desk import Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()
