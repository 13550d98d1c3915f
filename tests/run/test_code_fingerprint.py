"""The fingerprint is equal in every process and differs for anything that changes a step."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from lamina.run.code_fingerprint import CodeFingerprint

FACTOR = 2.0
own_settings = ModuleType("own_settings")
own_settings.RATES = {"a": 1.0}  # type: ignore[attr-defined]


def words(value: Any, model: nn.Module | None = None) -> str:
    found = CodeFingerprint(model)
    text = found.describe(value)
    assert not found.unknown
    return text


def unknown(value: Any) -> list[str]:
    found = CodeFingerprint()
    found.describe(value, "loss")
    return found.unknown


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
    first, second = net(), net()
    assert words(closure([1])) == words(closure([1]))
    assert words(Thing({"a": np.ones(2)})) == words(Thing({"a": np.ones(2)}))
    assert words(torch.bfloat16) == words(torch.bfloat16)
    assert words(first, first) == words(second, second)  # weights are the checkpoint's
    assert words(closure(first), first) == words(closure(second), second)
    assert words(first) != words(second)


def test_a_constant_or_a_function_of_the_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = words(Thing(1).method)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert words(Thing(1).method) != before


class Slotted:
    __slots__ = ("rate", "unset")

    def __init__(self, rate: float) -> None:
        self.rate = rate


@dataclass(slots=True)
class Settings:
    weights: dict[str, float]
    names: set[str] = field(default_factory=set)


class Missing(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return FACTOR


class Closed:
    """Pickles nothing of itself."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Colour(enum.Enum):
    RED = (1, 2)


class Registry:
    rates: ClassVar[dict[str, float]] = {"a": 1.0}


TABLE: dict[str, Any] = {"rate": [1.0, {"deep": (1, 2)}]}
BOX = Thing({"rate": 1.0})
SETTINGS = Settings({"a": 1.0})
SLOTTED = Slotted(1.0)
CLOSED = Closed(1.0)
MISSING = Missing(a=1.0)
COUNTS = collections.defaultdict(int, {"a": 1})
QUEUE = collections.deque([1, 2])
ARRAY = np.array([{"a": 1}], dtype=object)
MASKED = np.ma.masked_array([1.0, 2.0], mask=[True, False])  # type: ignore[no-untyped-call]
PARTIAL = functools.partial(default, 1)
HUGE = [10**5000]


def reads(what: str) -> Any:
    """A loss that reads a global of this module in a comprehension, in a helper or in a method."""
    source = {
        "comprehension": f"def loss(x):\n    return [x for _ in range(2) if {what}]",
        "helper": f"def helper():\n    return {what}\ndef loss(x):\n    return helper()",
        "method": f"class Loss:\n    def __call__(self, x):\n        return {what}\nloss = Loss()",
    }
    for text in source.values():
        exec(text, globals())
        yield globals()["loss"]


EDITS: dict[str, tuple[str, Callable[[], Any]]] = {
    "dict": ("TABLE", lambda: TABLE.update(rate=2.0)),
    "deep": ("TABLE", lambda: TABLE["rate"][1].update(deep=(1, 3))),
    "attribute": ("BOX", lambda: BOX._inner.update(rate=2.0)),
    "class of an object": ("BOX", lambda: setattr(Thing, "shape", "square")),
    "dataclass": ("SETTINGS", lambda: SETTINGS.weights.update(a=2.0)),
    "set": ("SETTINGS", lambda: SETTINGS.names.add("b")),
    "slot": ("SLOTTED", lambda: setattr(SLOTTED, "rate", 2.0)),
    "own pickling": ("CLOSED", lambda: setattr(CLOSED, "rate", 2.0)),
    "dict of a subclass": ("MISSING", lambda: MISSING.update(a=2.0)),
    "code of a subclass": ("MISSING", lambda: setattr(Missing, "__missing__", lambda self, key: 3.0)),
    "class attribute": ("Registry", lambda: Registry.rates.update(a=2.0)),
    "defaultdict": ("COUNTS", lambda: COUNTS.update(a=2)),
    "default factory": ("COUNTS", lambda: setattr(COUNTS, "default_factory", float)),
    "deque": ("QUEUE", lambda: QUEUE.append(3)),
    "array of objects": ("ARRAY", lambda: ARRAY[0].update(a=2)),
    "mask": ("MASKED", lambda: MASKED.mask.__setitem__(0, False)),
    "large integer": ("HUGE", lambda: HUGE.__setitem__(0, 10**5000 + 1)),
    "module": ("own_settings", lambda: own_settings.RATES.update(a=2.0)),
    "text of a name": ("getattr(own_settings, 'RATES')", lambda: own_settings.RATES.update(a=2.0)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_a_function_reads_from_its_module_counts_by_value(edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what, change = EDITS[edit]
    if edit == "module":
        what = "own_settings.RATES"
    kept = copy.deepcopy(
        {name: globals()[name] for name in ("TABLE", "BOX", "SETTINGS", "SLOTTED", "CLOSED", "MISSING")}
    )
    kept |= copy.deepcopy({name: globals()[name] for name in ("COUNTS", "QUEUE", "ARRAY", "MASKED", "HUGE")})
    monkeypatch.setattr(Thing, "shape", "round")
    monkeypatch.setattr(Missing, "__missing__", Missing.__missing__)
    before = [words(loss) for loss in reads(what)]
    assert [words(loss) for loss in reads(what)] == before
    change()
    after = [words(loss) for loss in reads(what)]
    globals().update(kept)
    Registry.rates["a"] = own_settings.RATES["a"] = 1.0
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_what_a_function_does_not_read_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`x.size` reads no global `size`, so a global of that name does not count."""
    monkeypatch.setitem(globals(), "size", threading.Lock())
    assert words(lambda x: x.size) and words(lambda x: own_settings)


UNKNOWN: dict[str, tuple[Any, str]] = {
    "generator of torch": (closure(torch.Generator()), "loss: a (Generator)"),
    "generator of numpy": (closure([np.random.default_rng(0)]), "loss: a[0] (Generator)"),
    "random": (closure({"r": random.Random(0)}), "loss: a['r'] (Random)"),
    "lock": (closure(Thing(threading.Lock())), "loss: a._inner (lock)"),
    "iterator": (closure(one for one in "ab"), "loss: a (generator)"),
    "too deep": (closure(functools.reduce(lambda inner, _: [inner], range(100), 1)), "too deep"),
    "too many": (closure(list(range(1 << 21))), "too many values"),
    "meta": (closure(torch.ones(1, device="meta")), "loss: a (Tensor)"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_described_is_named(what: str) -> None:
    value, path = UNKNOWN[what]
    assert any(path in each for each in unknown(value))


def test_an_open_file_that_a_function_reads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "x").open("w") as file:
        monkeypatch.setitem(TABLE, "file", file)
        assert unknown(next(reads("TABLE"))) == ["loss: TABLE['file'] (TextIOWrapper)"]


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
        model = transformers.GPT2LMHeadModel(config)
        return words(model, model)

    assert made(0.1) == made(0.1)
    assert made(0.1) != made(0.2)


def test_another_process_says_the_same() -> None:
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / 'support')]!r}\n"
        "import hashlib, test_code_fingerprint as t\n"
        "v = [t.closure({'b': 1, 'a': {'x', 'y', 'z'}}), t.Thing([1.5]).method, t.default('q'), t.net, *t.reads('(TABLE, BOX)')]\n"
        "v += [t.Settings({}, {'p', 'q', 'r'}), {('a', 'b'), ('c', 'd'), t.Colour.RED, frozenset('xyz')}, t.COUNTS, t.ARRAY]\n"
        "v += [t.MASKED, t.Slotted(1.0), t.Registry, t.MISSING, t.QUEUE, lambda x: x in {'p', 'q', 'r'}]\n"
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
