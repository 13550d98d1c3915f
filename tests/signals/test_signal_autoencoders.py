"""The five autoencoders: any depth, heads, independent examples, exact clipped sums, and a run by `lamina train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_steps import failed, plan_for
from oracle import agree
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch
from lamina.audit.step_audit import audit_step
from lamina.audit.target import AuditTarget
from lamina.cli.app import main
from lamina.signals.signal_autoencoders import VAE, ConvAE, ResAE, SignalAutoencoder, SignalLoss, StackedAE, TransAE

MODELS: dict[str, type[SignalAutoencoder]] = {
    "stacked-ae": StackedAE, "conv-ae": ConvAE, "res-ae": ResAE, "trans-ae": TransAE, "vae": VAE,
}  # fmt: skip
LAYERS = (nn.Linear, nn.Conv1d, nn.ConvTranspose1d)


def small(name: str, **settings: Any) -> SignalAutoencoder:
    usual: dict[str, Any] = {"depth": 8, "latent": 4, "width": 8, "dropout": 0.0}
    if name == "trans-ae":
        usual |= {"depth": 4, "heads": 2, "patch": 8}
    return MODELS[name](2, 32, **(usual | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_shapes_with_and_without_classes(name: str) -> None:
    x = torch.randn(3, 2, 32)
    plain, headed = small(name), small(name, classes=5)
    assert plain.encode(x).shape == (3, 4)
    assert plain.decode(plain.encode(x)).shape == x.shape
    if name != "vae":
        torch.testing.assert_close(plain(x), plain.decode(plain.encode(x)))
    residual, *rest = headed(x)
    assert residual.shape == x.shape
    assert rest[-1].shape == (3, 5)
    if name == "vae":
        residual, divergence = plain.train()(x)
        assert residual.shape == x.shape and divergence.shape == (3,)
        assert (divergence >= 0).all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("depth", [4, 6, 10, 20])
def test_depth_counts_the_layers_on_both_ways(name: str, depth: int) -> None:
    model = small(name, depth=depth)
    assert model.decode(model.encode(torch.randn(2, 2, 32))).shape == (2, 2, 32)
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    if name == "trans-ae":
        assert len(layers) == 6 * depth + 4  # four projections and two of the feed-forward; embed, code twice, head
    else:
        assert len(layers) == depth + (name == "vae")  # its mean and log-variance are side by side


@pytest.mark.parametrize("name", MODELS)
def test_the_paper_s_sizes_are_the_defaults(name: str) -> None:
    model = MODELS[name]().eval()
    x = torch.randn(1, 12, 256)
    assert model.encode(x).shape == (1, 32)
    assert any(isinstance(module, nn.Dropout) and module.p == 0.1 for module in model.modules())
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_an_example_does_not_see_the_others(name: str) -> None:
    model, x = small(name, classes=3), torch.randn(4, 2, 32)
    other = torch.cat([x[:1], 10 * torch.randn(3, 2, 32)])

    def seeded(inputs: Tensor) -> Any:
        torch.manual_seed(0)
        return model(inputs)

    for mine, theirs in zip(seeded(x), seeded(other), strict=True):
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vae"])
def test_the_engine_forms_the_clipped_sums_of_the_oracle(name: str) -> None:
    torch.manual_seed(1)
    model, loss = small(name, classes=3, depth=4), SignalLoss()
    x, y = torch.randn(6, 2, 32), torch.randint(0, 3, (6,))
    unit = torch.tensor([0, 0, 1, 2, 2, 3])
    agree(model, x, y, losses=lambda model, x, y: loss(model(x), y), batch={"unit": unit})


def test_no_contribution_of_a_vae_moves_a_step_further_than_the_plan_says() -> None:
    """The audit, with the draws of the model replayed on both sides of every comparison."""
    torch.manual_seed(2)
    model, loss = small("vae", depth=4), SignalLoss(divergence=0.1)
    target = AuditTarget(model=model, plan=plan_for(model), losses_of=lambda x, y: loss(model(x), y))
    batch = Batch(x := torch.randn(5, 2, 32), x, unit=torch.tensor([0, 0, 1, 2, 3]))
    assert not failed(audit_step(target, batch, tries=2, quick=True))


def test_the_code_of_a_vae_is_drawn_within_bounds_and_is_its_mean_in_evaluation() -> None:
    model, x = small("vae"), torch.randn(3, 2, 32)
    with torch.no_grad():
        for layer in (model.mean, model.log_variance):
            layer.weight.zero_()  # type: ignore[union-attr, operator]
            layer.bias.fill_(100.0)  # type: ignore[union-attr, operator]
    drawn: list[Tensor] = []
    model.decoder.register_forward_pre_hook(lambda module, given: drawn.append(given[0]))
    model(x), model.eval()(x)
    assert (drawn[0] - 100.0).abs().max() <= 3.0 * np.exp(2.0) + 1e-3
    assert (drawn[0] - 100.0).abs().min() > 0
    assert torch.equal(drawn[1], torch.full((3, 4), 100.0))


def test_losses_of_each_example() -> None:
    x, y = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    error = (x - y).square().mean((1, 2))
    torch.testing.assert_close(SignalLoss()(y, x), error)
    logits, numbers = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    entropy = nn.functional.cross_entropy(logits, numbers, reduction="none")
    loss = SignalLoss(reconstruction=2.0, classification=3.0, divergence=0.5)
    torch.testing.assert_close(loss((x - y, logits), numbers), 2 * error + 3 * entropy)
    several = torch.randint(0, 2, (4, 3)).float()
    binary = nn.functional.binary_cross_entropy_with_logits(logits, several, reduction="none").mean(1)
    far = torch.rand(4)
    torch.testing.assert_close(loss((x - y, far, logits), several), 2 * error + 0.5 * far + 3 * binary)


def test_impossible_settings_are_refused() -> None:
    for name in MODELS:
        for depth in (2, 7, 22):
            with raises_code("models.depth-not-valid"):
                small(name, depth=depth)
        with raises_code("models.activation-not-known"):
            small(name, activation="sine")
        with raises_code("models.dropout-not-valid"):
            small(name, dropout=1.0)
    for made in (ConvAE, ResAE):
        with raises_code("models.samples-not-divisible"):
            made(2, 250, depth=20)
    with raises_code("models.patches-do-not-fit"):
        TransAE(2, 250)


@pytest.mark.parametrize("name", MODELS)
def test_lamina_train_takes_them_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 2, 32)).astype(np.float32)
    y = np.arange(40) % 3
    np.savez(tmp_path / "data.npz", x=x, y=y, patient=np.arange(40) // 2)
    (tmp_path / "policy.toml").write_text(
        '[corpus]\norigin = "ward"\ndelta = 1e-3\n[class.all]\npopulation = 20\nepsilon = 3.0\n'
    )
    patch = ", patch = 8, heads = 2" if name == "trans-ae" else ""
    sizes = f"channels = 2, samples = 32, depth = 4, latent = 4, width = 8, classes = 3{patch}"
    (tmp_path / "RUN.toml").write_text(
        f'policy = "policy.toml"\nmodel = {{ factory = "{name}", args = {{ {sizes} }} }}\n'
        'loss = "lamina.signals:SignalLoss"\noptimizer = { name = "adamw", lr = 1e-3 }\nbatch = 8\nsteps = 2\n'
        '[data]\nkind = "npz"\npath = "data.npz"\nx = "x"\ny = "y"\nunit = "patient"\n'
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["train", "RUN.toml", "--json"])
    assert caught.value.code in (0, None), capsys.readouterr().err
    assert (tmp_path / "runs" / "RUN" / "model.safetensors").exists()
