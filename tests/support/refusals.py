"""How tests state which refusal they expect: by its code, never by its wording."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.errors import LaminaError


def raises_code(*codes: str) -> Any:
    """The block is refused with one of these codes (docs/errors/)."""
    return pytest.raises(LaminaError, check=lambda error: error.code in codes)
