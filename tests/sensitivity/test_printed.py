"""The printed formulas are reproduced, and are as wrong as their docstrings say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lamina.sensitivity.affine import affine_norm_constant
from lamina.sensitivity.attention import softmax_jacobian_norm
from lamina.sensitivity.gelu import gelu_local, gelu_signed
from lamina.sensitivity.lipschitz import local
from lamina.sensitivity.printed import (
    RATIO_CLAIMED,
    attention_printed,
    clamped_compression,
    compression_printed,
    gelu_printed,
    norm_compression_printed,
    ratio_printed,
    relu_printed,
    residual_printed,
)


def test_eq_8_is_right_up_to_its_regularisation() -> None:
    mean = np.array([-2.0, 0.0, 0.5])
    np.testing.assert_allclose(relu_printed(mean, 4.0), local("relu", mean, 2.0), rtol=1e-14)
    np.testing.assert_allclose(relu_printed(mean, 0.0, 1e-4), local("relu", mean, 1e-2), rtol=1e-14)


def test_eq_10_is_wrong_away_from_zero_and_at_zero() -> None:
    mean = np.array([0.0, -1.0, 1.0])
    np.testing.assert_allclose(gelu_printed(mean, 1.0), [0.5, 0.0201, 0.9799], atol=5e-5)
    np.testing.assert_allclose(gelu_local(mean, 1.0), [0.5393, 0.2306, 0.8766], atol=5e-5)
    assert float(gelu_printed(-3.0, 1.0)) == pytest.approx(-0.0723, abs=5e-5)


def test_eq_10_lacks_r_squared_in_its_second_term() -> None:
    mean, variance = 1.3, 2.0
    first = local("relu", mean, math.sqrt(1 + variance))  # Φ(μ/r)
    printed = float(gelu_printed(mean, variance)) - first
    sound = float(gelu_signed(mean, math.sqrt(variance))) - first
    assert printed / sound == pytest.approx(1 + variance, rel=1e-12)


def test_eq_12_exceeds_one_and_is_clamped() -> None:
    assert compression_printed(3.0, 2.0) == 1.5 and clamped_compression(3.0, 2.0) == 1.0
    assert compression_printed(1.0, 2.0) == clamped_compression(1.0, 2.0) == 0.5


def test_the_printed_batch_norm_is_1e5_times_too_small() -> None:
    sound = affine_norm_constant(1.0, 1.0, 1e-5)
    assert sound / norm_compression_printed(1e-5, 1.0) == pytest.approx(1e5, rel=1e-4)


def test_eq_13_falls_short_by_up_to_root_two() -> None:
    assert 2.0 / residual_printed(1.0, 1.0) == pytest.approx(math.sqrt(2))


def test_eq_15_is_not_4_7() -> None:
    assert ratio_printed() == pytest.approx(0.000132, abs=5e-7)
    assert round(1 / ratio_printed(), -1) == 7580
    assert RATIO_CLAIMED == 4.7


def test_eq_20_is_half_of_the_norm_at_worst() -> None:
    even = torch.tensor([0.5, 0.5])
    assert float(attention_printed(even)) == 0.25
    assert float(softmax_jacobian_norm(even)) == pytest.approx(0.5)
    peaked = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    assert float(attention_printed(peaked)) == pytest.approx(0.09)
    assert float(softmax_jacobian_norm(peaked)) > 1.4 * 0.09
