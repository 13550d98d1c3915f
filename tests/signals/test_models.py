"""The models keep their shapes, keep examples independent, and refuse sizes that cannot work."""

from __future__ import annotations

import pytest
import torch
from refusals import raises_code
from torch import nn

from lamina.signals.autoencoders import MLPAutoencoder, ResidualAutoencoder, TransformerAutoencoder

MODELS = {
    "residual": (lambda: ResidualAutoencoder(12, (8, 16), groups=4), (12, 64)),
    "transformer": (lambda: TransformerAutoencoder(6, 10, width=16, layers=2, hidden=32, code=4), (10, 6)),
    "mlp": (lambda: MLPAutoencoder((20, 10, 3)), (20,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_output_has_the_shape_of_the_input(name: str) -> None:
    build, shape = MODELS[name]
    x = torch.randn(3, *shape)
    assert build()(x).shape == x.shape


@pytest.mark.parametrize("name", MODELS)
def test_an_example_does_not_see_the_others(name: str) -> None:
    build, shape = MODELS[name]
    model, x = build().train(), torch.randn(4, *shape)
    other = torch.cat([x[:1], 10 * torch.randn(3, *shape)])
    torch.testing.assert_close(model(x)[0], model(other)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_no_trainable_tensor_is_used_without_the_batch_axis(name: str) -> None:
    """Every parameter belongs to a layer that sees the batch: none is bare on the model or a block."""
    known = (nn.Linear, nn.Conv1d, nn.ConvTranspose1d, nn.GroupNorm, nn.LayerNorm)
    for module in MODELS[name][0]().modules():
        if any(True for _ in module.parameters(recurse=False)):
            assert isinstance(module, known)


@pytest.mark.parametrize("name", MODELS)
def test_the_code_is_smaller_than_the_signal(name: str) -> None:
    build, shape = MODELS[name]
    x = torch.randn(1, *shape)
    assert build().encode(x).numel() < x.numel()


def test_impossible_sizes_are_refused() -> None:
    with raises_code("models.widths-not-multiples"):
        ResidualAutoencoder(12, (10,), groups=4)
    with raises_code("models.kernel-even"):
        ResidualAutoencoder(12, (8,), kernel=4)
    with raises_code("models.layers-odd"):
        TransformerAutoencoder(4, 4, width=10, heads=4)
