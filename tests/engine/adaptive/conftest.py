"""The model that adaptive plans are tried on."""

from __future__ import annotations

import pytest
import torch
from adaptive_plans import Small
from torch import nn


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(7)
    return Small()
