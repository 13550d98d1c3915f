"""The net of `trained_run`, as a service loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.testclient import TestClient
from torch import Tensor, nn

Client = Callable[..., TestClient]


class Net(nn.Sequential):
    """The net of the run, which also offers its head alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.generation_classes: dict[str, Any] = {"head": self.head}

    def head(self, hidden: Tensor) -> Tensor:
        return self[4](hidden) if hidden.shape[1] == 8 else self(hidden)  # with 4 features: more than it says
