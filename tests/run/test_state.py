"""Nested state to flat tensors and plain values, and back: a restored optimiser makes the same steps, bit for bit."""

from __future__ import annotations

import math
import struct
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from lamina import cbor
from lamina.errors import LaminaError, StorageError
from lamina.run.training_checkpoint import TrainingCheckpoint, TrainingCheckpoints, flatten, unflatten


def identical(one: Any, two: Any) -> bool:
    """Equality that sees types, order of keys, the sign of zero, and NaN payloads."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and _bytes(one) == _bytes(two)
    if isinstance(one, dict):
        return len(one) == len(two) and all(
            identical(a, b) and identical(one[a], two[b]) for a, b in zip(one, two, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(identical(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, float) and not isinstance(one, np.generic):
        return struct.pack("d", one) == struct.pack("d", two)
    if isinstance(one, np.generic):
        return bool(one.dtype == two.dtype and one.tobytes() == two.tobytes())
    return bool(one == two)


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def round_trip(tree: Any, folder: Path | None = None) -> Any:
    """Through plain values, CBOR and, with a folder, a real checkpoint."""
    tensors, plain = flatten("part", tree)
    if folder is None:
        plain = cbor.decode(
            cbor.encode(plain, floats=True, null=True, max_depth=100), floats=True, null=True, max_depth=100
        )
        return unflatten("part", tensors, plain)
    checkpoints = TrainingCheckpoints(folder)
    checkpoints.save(0, TrainingCheckpoint(tensors=tensors, state={"part": plain}))
    read, _ = checkpoints.load(0)
    return unflatten("part", read.tensors, read.state["part"])


# ---------------------------------------------------------------------------------------------------- real states

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: optim.Adadelta(p),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "rprop": lambda p: optim.Rprop(p),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, max_iter=3),
    "tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
}


class Training:
    """A model, its optimiser and scheduler, and gradients that depend on the weights and the step alone."""

    def __init__(self, optimizer: str, scheduler: str) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)

    def step(self, number: int) -> None:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.model(x).square().sum()
            loss.backward()
            return loss

        self.optimizer.step(closure)
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        elif self.scheduler is not None:
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "scheduler": scheduler}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


COMBINATIONS = [(name, "cosine") for name in OPTIMIZERS if name not in ("tensor lr",)]
COMBINATIONS += [("tensor lr", "none")] + [("momentum", name) for name in SCHEDULERS]


@pytest.mark.parametrize(("optimizer", "scheduler"), COMBINATIONS)
def test_a_restored_optimiser_and_scheduler_make_the_same_steps(tmp_path: Path, optimizer: str, scheduler: str) -> None:
    with warnings.catch_warnings():
        # SequentialLR calls its parts with the step, which torch itself deprecates.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.optim\.lr_scheduler")
        kept = Training(optimizer, scheduler)
        for number in range(4):
            kept.step(number)
        state = kept.state()
        read = round_trip(state, tmp_path)
        assert identical(_plainly(read), _plainly(state))
        fresh = Training(optimizer, scheduler)
        fresh.restore(read)
        for number in range(4, 7):
            kept.step(number)
            fresh.step(number)
            assert identical(_plainly(fresh.state()), _plainly(kept.state()))


def _plainly(state: dict[str, Any]) -> dict[str, Any]:
    """model.state_dict() carries an attribute that is no item of it; the rest is compared as it is."""
    return {**state, "model": OrderedDict(state["model"])}


def test_a_restored_state_that_is_wrong_would_be_seen() -> None:
    """The comparison above has teeth: forget one moment, and the third step differs."""
    one, two = Training("adam", "none"), Training("adam", "none")
    for number in range(4):
        one.step(number)
    state = round_trip(one.state())
    two.restore(state)
    next(iter(two.optimizer.state.values()))["exp_avg"].add_(1e-7)
    for number in range(4, 7):
        one.step(number)
        two.step(number)
    assert not identical(_plainly(one.state()), _plainly(two.state()))


# ---------------------------------------------------------------------------------------------------- any state

tensors = st.sampled_from(
    [
        torch.tensor(1.5),
        torch.arange(4, dtype=torch.int64),
        torch.tensor([True]),
        torch.tensor([math.nan, -0.0], dtype=torch.bfloat16),
        torch.empty(0, 2),
        torch.arange(6.0).view(2, 3).t(),
    ]
)
whole = st.integers(-(2**64), 2**64 - 1)
numpy_scalars = st.sampled_from(
    [np.float64(0.1), np.float32(-0.0), np.float16("nan"), np.int64(-3), np.uint8(7), np.bool_(True), np.complex64(1j)]
)
scalars = st.one_of(
    st.none(), st.booleans(), whole, st.floats(allow_nan=False), st.text(), st.binary(max_size=9), numpy_scalars
)
keys = st.one_of(whole, st.text(max_size=3), st.booleans(), st.none(), st.floats(allow_nan=False))
trees = st.recursive(
    scalars | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(st.text(max_size=3), whole, max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@given(trees)
def test_any_state_comes_back_as_it_was(tree: Any) -> None:
    read = round_trip(tree)
    assert identical(read, tree)


def test_odd_floats_and_integers() -> None:
    tree = [math.inf, -math.inf, -0.0, 5e-324, 2**64 - 1, -(2**64), True, 1, 1.0]
    assert identical(round_trip(tree), tree)
    assert not identical([-0.0], [0.0]) and not identical([1], [True])


def test_order_names_and_sameness() -> None:
    t = torch.ones(3)
    tree = {
        "b": t,
        "a": [t, t.clone()],
        0: torch.zeros(1),
        "0": torch.ones(1),
        "x/y": {"z": torch.ones(2)},
        "x": {"y/z": t},
    }
    found, plain = flatten("optimizer", tree)
    assert set(found) == {
        "optimizer/b", "optimizer/a/1", "optimizer/0", "optimizer/0~1", "optimizer/x/y/z",
    }  # fmt: skip
    assert found["optimizer/b"].data_ptr() == t.data_ptr()  # nothing is copied
    read = unflatten("optimizer", found, plain)
    assert list(read) == list(tree) and identical(read, tree)
    assert read["b"] is read["a"][0] is read["x"]["y/z"] and read["b"] is not read["a"][1]
    root, plain = flatten("ema", t)
    assert list(root) == ["ema"] and identical(unflatten("ema", root, plain), t)


def test_parameters_come_as_plain_tensors() -> None:
    found, _ = flatten("model", {"w": nn.Parameter(torch.ones(2))})
    assert not found["model/w"].requires_grad and type(found["model/w"]) is Tensor


class Pair(NamedTuple):
    a: int


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda: 0, "function"),
        (object(), "object"),
        (np.zeros(3), "numpy.ndarray"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.str_("x"), "numpy.str_"),
        ({1, 2}, "set"),
        (Pair(1), "Pair"),
        (defaultdict(int), "defaultdict"),
        (1j, "complex"),
        (torch.float32, "torch.dtype"),
        (bytearray(b"x"), "bytearray"),
        (torch.Size([2]), "torch.Size"),
        (math.nan, "NaN"),
        (2**64, "64 bits"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(wrong: Any, kind: str) -> None:
    with raises_code("train.state-type-unsupported") as caught:
        flatten("part", {"groups": [0, {"odd": wrong}]})
    assert kind in caught.value.problem and caught.value.remedy


def test_keys_and_depth_are_checked() -> None:
    with raises_code("train.state-type-unsupported"):
        flatten("part", {"a": {(1, 2): 3}})
    endless: list[Any] = []
    endless.append(endless)
    with raises_code("train.state-too-deep"):
        flatten("part", endless)
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    assert identical(round_trip(deep), deep)


# ---------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "plain",
    [
        [], [1], ["?"], {"a": 1}, ["d", "key"], ["d", ["l"], 1], ["d", {}, 1], ["d", ["x", "part"], 1], ["d", [], 1],
        ["x"], ["x", "missing"], ["x", 3], ["x", ["l"]], ["f", b"12345678"], ["z", 1], ["l", ["?"]], ["n"],
        ["n", "O", b"12345678"], ["n", "<f4", b"12345678"], ["n", "<f4"], ["n", "<f3", b"123"], ["n", 3, b""],
        ["n", "<f8", "text"],
    ],
)  # fmt: skip
def test_a_plain_form_that_nobody_wrote_is_refused(plain: Any) -> None:
    with raises_code("train.checkpoint-state-malformed") as caught:
        unflatten("part", {"part": torch.ones(1)}, plain)
    assert caught.value.remedy


junk = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=8) | st.sampled_from(list("dloctxn")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=10,
)


@given(junk)
def test_junk_gives_a_value_or_a_refusal(plain: Any) -> None:
    try:
        unflatten("part", {"a": torch.ones(1)}, plain)
    except LaminaError as error:
        assert isinstance(error, StorageError)


def test_depth_is_bounded_when_reading_too() -> None:
    plain: Any = 1
    for _ in range(sys.getrecursionlimit() * 2):
        plain = ["l", plain]
    with raises_code("train.checkpoint-state-malformed"):
        unflatten("part", {}, plain)
