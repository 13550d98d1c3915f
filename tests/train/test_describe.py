"""What a run was told: the same words in every process, other words for anything that changes a step."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lamina.train.segments import CodeFingerprint

FACTOR = 2.0


def words(value: Any, *, values: bool = True) -> str:
    return CodeFingerprint(values=values).describe(value)


class Thing:
    shape = "round"

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def method(self, x: float) -> float:
        return x * FACTOR


def closure(a: Any) -> Any:
    return lambda x: x * a


def default(a: Any) -> Any:
    def made(x: float, y: Any = a) -> Any:
        return x, y

    return made


def net(slope: float = 0.1, *, width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.LeakyReLU(slope), nn.Dropout(0.2)).to(dtype)


PAIRS: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    ("1", 1),
    (0.0, -0.0),
    ([1, 2], (1, 2)),
    ([1, 23], [12, 3]),
    ({"a": 1}, {"a": 2}),
    (np.zeros(3), np.zeros(4)),
    (np.zeros(3), np.zeros(3, dtype="f4")),
    (torch.ones(2), torch.tensor([1.0, 2.0])),
    (closure(1), closure(2)),
    (closure([1]), closure([2])),
    (default(1), default(2)),
    (functools.partial(closure, np.zeros(2)), functools.partial(closure, np.ones(2))),
    (Thing(1), Thing(2)),
    (Thing(1).method, Thing(2).method),
    (net(), net(0.2)),
    (net(), net(dtype=torch.float64)),
    (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU())),
    (nn.CrossEntropyLoss(weight=torch.ones(2)), nn.CrossEntropyLoss(weight=torch.zeros(2))),
    (lambda x: x + 1, lambda x: x + 2),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_what_differs_is_described_differently(one: Any, other: Any) -> None:
    assert words(one) == words(one)
    assert words(one) != words(other)


def test_equal_things_are_described_alike() -> None:
    torch.manual_seed(0)
    first = net()
    assert words(closure([1])) == words(closure([1]))
    assert words(Thing({"a": np.ones(2)})) == words(Thing({"a": np.ones(2)}))
    assert words(torch.bfloat16) == words(torch.bfloat16)
    assert words(first, values=False) == words(net(), values=False)  # weights are the checkpoint's
    assert words(first) != words(net())


def test_a_constant_or_a_function_of_the_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = words(Thing(1).method)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert words(Thing(1).method) != before


def test_what_cannot_be_described_equals_nothing() -> None:
    generator = torch.Generator()
    assert words(generator) != words(generator)
    assert words(closure(np.random.default_rng(0))) != words(closure(np.random.default_rng(0)))


def test_something_that_holds_itself_ends() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert words(ring) == words(ring)


def test_models_of_others_are_described_alike_when_made_again() -> None:
    transformers = pytest.importorskip("transformers")

    def made(dropout: float) -> str:
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=8, resid_pdrop=dropout
        )
        torch.manual_seed(0)
        return words(transformers.GPT2LMHeadModel(config), values=False)

    assert made(0.1) == made(0.1)
    assert made(0.1) != made(0.2)


def test_another_process_says_the_same() -> None:
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / 'support')]!r}\n"
        "import hashlib, test_describe as t\n"
        "v = [t.closure({'b': 1, 'a': {'x', 'y', 'z'}}), t.Thing([1.5]).method, t.default('q'), t.net]\n"
        "print(hashlib.sha256(t.words(v).encode()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
