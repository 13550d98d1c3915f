"""The printed formulas are reproduced, and are as wrong as their docstrings say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lamina.sensitivity.activations import gelu_local, gelu_signed, local
from lamina.sensitivity.gains import (
    PAPER_RATIO_CLAIMED,
    affine_norm_constant,
    paper_attention_norm,
    paper_compression,
    paper_compression_clamped,
    paper_gelu_slope,
    paper_norm_compression,
    paper_ratio,
    paper_relu_slope,
    paper_residual,
    softmax_jacobian_norm,
)


def test_eq_8_is_right_up_to_its_regularisation() -> None:
    mean = np.array([-2.0, 0.0, 0.5])
    np.testing.assert_allclose(paper_relu_slope(mean, 4.0), local("relu", mean, 2.0), rtol=1e-14)
    np.testing.assert_allclose(paper_relu_slope(mean, 0.0, 1e-4), local("relu", mean, 1e-2), rtol=1e-14)


def test_eq_10_is_wrong_away_from_zero_and_at_zero() -> None:
    mean = np.array([0.0, -1.0, 1.0])
    np.testing.assert_allclose(paper_gelu_slope(mean, 1.0), [0.5, 0.0201, 0.9799], atol=5e-5)
    np.testing.assert_allclose(gelu_local(mean, 1.0), [0.5393, 0.2306, 0.8766], atol=5e-5)
    assert float(paper_gelu_slope(-3.0, 1.0)) == pytest.approx(-0.0723, abs=5e-5)


def test_eq_10_lacks_r_squared_in_its_second_term() -> None:
    mean, variance = 1.3, 2.0
    first = local("relu", mean, math.sqrt(1 + variance))  # Φ(μ/r)
    printed = float(paper_gelu_slope(mean, variance)) - first
    sound = float(gelu_signed(mean, math.sqrt(variance))) - first
    assert printed / sound == pytest.approx(1 + variance, rel=1e-12)


def test_eq_12_exceeds_one_and_is_clamped() -> None:
    assert paper_compression(3.0, 2.0) == 1.5 and paper_compression_clamped(3.0, 2.0) == 1.0
    assert paper_compression(1.0, 2.0) == paper_compression_clamped(1.0, 2.0) == 0.5


def test_the_printed_batch_norm_is_1e5_times_too_small() -> None:
    sound = affine_norm_constant(1.0, 1.0, 1e-5)
    assert sound / paper_norm_compression(1e-5, 1.0) == pytest.approx(1e5, rel=1e-4)


def test_eq_13_falls_short_by_up_to_root_two() -> None:
    assert 2.0 / paper_residual(1.0, 1.0) == pytest.approx(math.sqrt(2))


def test_eq_15_is_not_4_7() -> None:
    assert paper_ratio() == pytest.approx(0.000132, abs=5e-7)
    assert round(1 / paper_ratio(), -1) == 7580
    assert PAPER_RATIO_CLAIMED == 4.7


def test_eq_20_is_half_of_the_norm_at_worst() -> None:
    even = torch.tensor([0.5, 0.5])
    assert float(paper_attention_norm(even)) == 0.25
    assert float(softmax_jacobian_norm(even)) == pytest.approx(0.5)
    peaked = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    assert float(paper_attention_norm(peaked)) == pytest.approx(0.09)
    assert float(softmax_jacobian_norm(peaked)) > 1.4 * 0.09
