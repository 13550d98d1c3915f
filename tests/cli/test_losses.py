"""Built-in losses: one number per example, equal to torch's mean loss of that example alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from torch import Tensor, nn

from lamina.cli.by_name import make_loss
from lamina.errors import LaminaError
from lamina.run.losses import LOSSES, PerExampleLoss

ORACLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "cross_entropy": F.cross_entropy,
}


def made(name: str, **arguments: object) -> PerExampleLoss:
    found = make_loss(name, arguments)
    assert isinstance(found, PerExampleLoss)
    return found


def targets(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape) if name == "bce" else torch.randn(shape)


@pytest.mark.parametrize("name", ["mse", "l1", "huber", "bce"])
@settings(max_examples=25)
@given(shape=st.lists(st.integers(1, 4), min_size=0, max_size=3), n=st.integers(1, 5))
def test_elementwise_losses_are_the_mean_of_each_example(name: str, shape: list[int], n: int) -> None:
    output, y = torch.randn(n, *shape), targets(name, (n, *shape))
    expected = torch.stack([ORACLES[name](output[i], y[i]) for i in range(n)])
    assert torch.allclose(made(name)(output, y), expected, atol=1e-6)


@settings(max_examples=25)
@given(positions=st.lists(st.integers(1, 4), min_size=0, max_size=2), n=st.integers(1, 5))
def test_cross_entropy_is_the_mean_of_each_example(positions: list[int], n: int) -> None:
    output, y = torch.randn(n, 3, *positions), torch.randint(0, 3, (n, *positions))
    expected = torch.stack([F.cross_entropy(output[i : i + 1], y[i : i + 1]) for i in range(n)])
    assert torch.allclose(made("cross_entropy")(output, y), expected, atol=1e-6)
    weights = torch.randn(n, 3, *positions).softmax(1)
    assert torch.allclose(
        made("cross_entropy")(output, weights),
        torch.stack([F.cross_entropy(output[i : i + 1], weights[i : i + 1]) * 1.0 for i in range(n)]),
        atol=1e-6,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_others_do_not_matter(name: str) -> None:
    """Replacing every other example leaves the loss of the first as it is, to the last bit."""
    output, y = torch.randn(5, 3, 4), targets(name, (5, 3, 4))
    if name == "cross_entropy":
        y = torch.randint(0, 3, (5, 4))
        y[0, 1] = -100  # no label at this position
    before = made(name)(output, y)[0]
    output[1:], y[1:] = 7.0, y[1:].flip(0)
    assert torch.equal(made(name)(output, y)[0], before)


@pytest.mark.parametrize("name", LOSSES)
def test_nobody_has_no_loss(name: str) -> None:
    y = torch.zeros(0, dtype=torch.long) if name == "cross_entropy" else torch.zeros(0, 3)
    assert made(name)(torch.randn(0, 3), y).shape == (0,)


@pytest.mark.parametrize("name", ["mse", "bce", "l1", "huber"])
def test_axes_of_length_one_do_not_broadcast(name: str) -> None:
    """(N, 1) against (N,) is N losses; torch would make N × N of them, each about two people."""
    output, y = torch.randn(6, 1), targets(name, (6,))
    expected = torch.stack([ORACLES[name](output[i, 0], y[i]) for i in range(6)])
    assert torch.allclose(made(name)(output, y), expected, atol=1e-6)
    assert torch.allclose(made(name)(output[:, 0], y[:, None]), expected, atol=1e-6)


def test_whole_numbers_are_targets_too() -> None:
    assert made("mse")(torch.tensor([1.5]), torch.tensor([1])).item() == pytest.approx(0.25)
    assert made("bce")(torch.tensor([0.0]), torch.tensor([True])).item() == pytest.approx(0.6931, abs=1e-4)
    assert made("cross_entropy")(torch.zeros(2, 4), torch.tensor([[1], [3]])).shape == (2,)


def test_arguments_reach_torch_and_are_seen_by_a_replay() -> None:
    output, y = torch.randn(4, 3), torch.randint(0, 3, (4,))
    smooth = made("cross_entropy", label_smoothing=0.1)
    assert torch.allclose(smooth(output, y), F.cross_entropy(output, y, reduction="none", label_smoothing=0.1))
    assert vars(smooth)["arguments"] == {"label_smoothing": 0.1}


@pytest.mark.parametrize(
    ("name", "output", "y", "words"),
    [
        ("mse", torch.zeros(17, 3), torch.zeros(17, 4), "gives (3,) per example, y is (4,)"),
        ("bce", torch.zeros(17, 2), torch.zeros(17), "gives (2,) per example, y is one number"),
        ("bce", torch.zeros(17), torch.full((17,), 2), "outside 0 … 1"),
        ("cross_entropy", torch.zeros(17), torch.zeros(17).long(), 'loss = "bce"'),
        ("cross_entropy", torch.zeros(17, 3), torch.zeros(17), "not a class number"),
        ("cross_entropy", torch.zeros(17, 3), torch.full((17,), 3), "class numbers outside 0 … 2"),
        ("cross_entropy", torch.zeros(17, 3), torch.full((17,), -1), "class numbers outside 0 … 2"),
        ("cross_entropy", torch.zeros(17, 5, 3), torch.zeros(17, 5).long(), "output.transpose(1, 2)"),
        ("mse", torch.zeros(17, 3), torch.zeros(16, 3), "first axis"),
        ("mse", torch.zeros(()), torch.zeros(()), "first axis"),
        ("mse", (torch.zeros(17, 3), torch.zeros(17)), torch.zeros(17, 3), "output is a tuple"),
        ("l1", torch.zeros(17, 3), {"y": torch.zeros(17, 3)}, "y is a dict"),
    ],
)
def test_refusals_teach_and_do_not_count_the_batch(name: str, output: object, y: object, words: str) -> None:
    with pytest.raises(LaminaError) as caught:
        made(name)(output, y)
    text = f"{caught.value.problem} {caught.value.remedy}"
    assert words in text
    assert "17" not in text
    assert "16" not in text


def test_by_name() -> None:
    assert make_loss("torch.nn.functional:mse_loss", {}) is F.mse_loss
    given = make_loss("torch.nn:CrossEntropyLoss", {"reduction": "none"})
    assert isinstance(given, nn.CrossEntropyLoss)
    assert given.reduction == "none"
    assert isinstance(make_loss("torch.nn:MSELoss", {}), nn.MSELoss)
    with raises_code("cli.name-not-importable"):
        make_loss("crossentropy", {})
    with raises_code("cli.argument-not-known") as caught:
        make_loss("huber", {"beta": 1})
    assert "delta" in caught.value.remedy
    with raises_code("cli.loss-not-callable"):
        make_loss("math:pi", {})
