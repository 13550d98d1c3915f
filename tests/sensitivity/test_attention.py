"""The softmax Jacobian's norm against dense eigenvalues and its bounds; norms of row-stochastic matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from torch import Tensor

from lamina.sensitivity.gains import expected_jacobian_norm, row_stochastic_norm, softmax_jacobian_norm


def dense_norm(a: Tensor) -> Tensor:
    jacobian = torch.diag_embed(a) - a.unsqueeze(-1) * a.unsqueeze(-2)
    return torch.linalg.matrix_norm(jacobian, 2)


def rows(seed: int, count: int, n: int, temperature: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(temperature * torch.randn(count, n, generator=generator, dtype=torch.float64), -1)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-3, 0.3, 1.0, 3.0, 12.0, 60.0])
def test_it_is_the_spectral_norm(n: int, temperature: float) -> None:
    a = rows(n, 50, n, temperature)
    torch.testing.assert_close(softmax_jacobian_norm(a), dense_norm(a), rtol=1e-12, atol=3e-16)


def test_it_is_the_jacobian_of_softmax() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, 0), logits)
    norm = torch.linalg.matrix_norm(jacobian, 2)
    torch.testing.assert_close(softmax_jacobian_norm(torch.softmax(logits, 0)), norm, rtol=1e-12, atol=0)


@given(seed=st.integers(0, 10_000), n=st.integers(2, 30), temperature=st.floats(0, 50))
def test_bounds(seed: int, n: int, temperature: float) -> None:
    a = rows(seed, 20, n, temperature)
    norm, corner = softmax_jacobian_norm(a), (a * (1 - a)).amax(-1)
    slack = 1e-13 * norm + 1e-16  # 1 - a has lost its digits where a is nearly 1
    assert (corner <= norm + slack).all()
    assert (norm <= 2 * corner + slack).all()
    assert (norm <= 0.5 + 1e-15).all()


@given(seed=st.integers(0, 10_000), n=st.integers(2, 12), gap=st.floats(0, 1e-6), few=st.booleans())
def test_near_ties_and_zeros(seed: int, n: int, gap: float, few: bool) -> None:
    a = rows(seed, 1, n, 1.0)[0]
    top = a.argsort(descending=True)
    a[top[1]] = a[top[0]] * (1 - gap)
    if few:
        a[top[2:]] = 0.0
    a = a / a.sum()
    torch.testing.assert_close(softmax_jacobian_norm(a), dense_norm(a), rtol=1e-12, atol=1e-16)


def test_two_weights_attain_the_upper_bound() -> None:
    p = torch.tensor([0.5, 0.9, 0.999, 1.0], dtype=torch.float64)
    other = torch.tensor([0.5, 0.1, 0.001, 1e-20], dtype=torch.float64)
    norms = softmax_jacobian_norm(torch.stack([p, other], -1))
    torch.testing.assert_close(norms, 2 * p * other, rtol=1e-13, atol=0)


def test_known_rows() -> None:
    uniform = torch.full((8,), 1 / 8)
    assert float(softmax_jacobian_norm(uniform)) == pytest.approx(1 / 8)
    assert float(softmax_jacobian_norm(torch.tensor([0.0, 1.0, 0.0]))) == 0.0
    assert float(softmax_jacobian_norm(torch.ones(1))) == 0.0


def test_shapes_and_precision() -> None:
    a = rows(3, 12, 5, 2.0).reshape(2, 2, 3, 5)
    assert softmax_jacobian_norm(a).shape == (2, 2, 3)
    assert softmax_jacobian_norm(a.float()).dtype == torch.float64
    torch.testing.assert_close(softmax_jacobian_norm(a.half()), softmax_jacobian_norm(a), rtol=3e-3, atol=0)
    assert softmax_jacobian_norm(torch.empty(0, 4)).shape == (0,)
    assert expected_jacobian_norm(a) == pytest.approx(float(dense_norm(a).mean()), rel=1e-12)


def test_chunks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    a = rows(4, 37, 6, 1.5)
    whole = softmax_jacobian_norm(a)
    monkeypatch.setattr("lamina.sensitivity.gains._ENTRIES_PER_CHUNK", 30)
    torch.testing.assert_close(softmax_jacobian_norm(a), whole, rtol=1e-13, atol=0)


def test_a_row_stochastic_matrix_reaches_root_n() -> None:
    n = 16
    all_at_one_key = torch.zeros(n, n)
    all_at_one_key[:, 3] = 1.0
    assert float(row_stochastic_norm(all_at_one_key)) == pytest.approx(math.sqrt(n))
    assert float(row_stochastic_norm(torch.eye(n))) == pytest.approx(1.0)
    assert float(row_stochastic_norm(torch.full((n, n), 1 / n))) == pytest.approx(1.0)


@pytest.mark.parametrize(("queries", "keys"), [(9, 5), (5, 9), (1, 4), (4, 1)])
def test_row_stochastic_norms_are_largest_singular_values(queries: int, keys: int) -> None:
    a = rows(5, 3 * queries, keys, 2.0).reshape(3, queries, keys)
    norm = row_stochastic_norm(a)
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(a, 2), rtol=1e-12, atol=0)
    assert (norm <= math.sqrt(queries) * (1 + 1e-12)).all()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: softmax_jacobian_norm(torch.tensor([0.5, float("nan")])), "measure.attention-weights-negative"),
        (lambda: softmax_jacobian_norm(torch.tensor([1.5, -0.5])), "measure.attention-weights-negative"),
        (lambda: softmax_jacobian_norm(torch.tensor([0.5, 0.4])), "measure.row-attention-weights"),
        (lambda: softmax_jacobian_norm(torch.empty(3, 0)), "measure.attention-weights-shape-give"),
        (lambda: row_stochastic_norm(torch.ones(1)), "measure.attention-weights-shape"),
        (lambda: expected_jacobian_norm(torch.empty(0, 3)), "measure.no-attention-weights"),
    ],
)
def test_refusals(call: Callable[[], Any], told: str) -> None:
    with raises_code(told) as caught:
        call()
    assert caught.value.remedy
