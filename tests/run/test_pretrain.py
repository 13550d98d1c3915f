"""Pre-training on public or simulated data: seeded, in place, and never on private data."""

from __future__ import annotations

import pytest
import torch
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina.run.pretrain import SubspaceLinear


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


def error(output: Tensor, x: Tensor) -> Tensor:
    return (output - x).square().mean(1)


X = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)) @ torch.randn(
    2, 6, generator=torch.Generator().manual_seed(1)
)


def test_it_learns_and_gives_the_same_weights_again() -> None:
    first, second = net(), net()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    losses = lamina.pretrain(first, error, X, proxy="simulated: planes", steps=200, lr=1e-2)
    assert torch.equal(state, torch.get_rng_state())
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    lamina.pretrain(second, error, X, proxy="simulated: planes", steps=200, lr=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(p.grad is None for p in first.parameters())


def test_the_lower_band_can_be_left_as_it_was_learned() -> None:
    model = net()
    lamina.pretrain(model, error, X, proxy="public", steps=3, private_top=0.34)
    assert [p.requires_grad for p in model.parameters()] == [False] * 4 + [True] * 2
    engine, corpus, plan = lamina.make_private(model, X, epsilon=3.0, batch=20, steps=3)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for batch in corpus.batches(plan):
        engine.backward(error(model(batch.x), batch.x) if len(batch) else None, batch)
        optimizer.step()
        optimizer.zero_grad()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False] * 4 + [True] * 2
    engine.detach()


def test_a_terminal_gets_a_bar_and_a_pipe_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    lamina.pretrain(net(), error, X, proxy="public", steps=3)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal
    lamina.pretrain(net(), error, X, proxy="public", steps=3, progress=False)
    assert capsys.readouterr() == ("", "")
    lamina.pretrain(net(), error, X, proxy="public", steps=3)
    out, shown = capsys.readouterr()
    assert out == "" and "pre-training" in shown and "3/3" in shown and "loss" in shown


@pytest.mark.parametrize("x", [X[:0], X.tolist(), torch.tensor(1.0), None])
def test_data_without_examples_are_refused(x: object) -> None:
    with raises_code("train.pretrain-no-examples"):
        lamina.pretrain(net(), error, x, proxy="public", steps=3)
    with raises_code("train.pretrain-no-examples"):
        lamina.private_subspace(net(), error, x, proxy="public", layers=["5"], rank=2, scale=1.0)


@pytest.mark.parametrize("proxy", ["private", "", "patients: of our ward", None])
def test_private_data_are_refused(proxy: str) -> None:
    with raises_code("train.pretrain-not-public"):
        lamina.pretrain(net(), error, X, proxy=proxy, steps=3)


def learned_net() -> nn.Sequential:
    model = net().eval()
    lamina.pretrain(model, error, X, proxy="simulated: planes", steps=100, lr=1e-2)
    return model


@pytest.mark.parametrize("bias", [True, False])
def test_a_subspace_changes_nothing_until_it_is_trained_and_merges_into_plain_layers(bias: bool) -> None:
    model = learned_net()
    model[5] = nn.Linear(8, 6, bias=bias)
    names, before = list(model.state_dict()), model(X).detach()
    lamina.private_subspace(model, error, X, proxy="simulated: planes", layers=["0", "5"], rank=2, scale=3.0)
    assert torch.equal(model(X), before)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == {"0.core.weight", "0.core.bias", "5.core.weight"} | ({"5.core.bias"} if bias else set())
    assert all(p.numel() == 4 for name, p in trained.items() if name.endswith("weight"))
    with torch.no_grad():
        for p in trained.values():
            p.normal_()
    moved = model(X).detach()
    assert not torch.allclose(moved, before, atol=1e-2)
    lamina.merge_subspace(model)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(X), moved)


def test_directions_are_those_of_the_public_data() -> None:
    """Against the singular values of all inputs and gradients at once."""
    model = learned_net().double()
    x, last = X.double(), model[5]
    inputs = model[:5](x).detach()
    gradients = 2 * (last(inputs) - x).detach() / 6
    lamina.private_subspace(model, error, x, proxy="public", layers=["5"], rank=2, scale=3.0)
    made = model[5]
    assert isinstance(made, SubspaceLinear)
    parts = (inputs - inputs.mean(0)) @ made.down.T
    torch.testing.assert_close(parts.T @ parts / len(x), torch.eye(2).double())
    main = torch.linalg.svd(inputs - inputs.mean(0), full_matrices=False).Vh[:2]
    torch.testing.assert_close(made.down @ main.T @ main, made.down)
    out = torch.linalg.svd(gradients, full_matrices=False).Vh[:2]
    torch.testing.assert_close(made.up.T @ made.up, 9 * torch.eye(2).double())
    torch.testing.assert_close(out.T @ out @ made.up, made.up)


def test_private_steps_change_the_core_alone() -> None:
    model = learned_net()
    lamina.private_subspace(model, error, X, proxy="simulated", layers=["5"], rank=2, scale=1.0)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    engine, corpus, plan = lamina.make_private(model, X, epsilon=3.0, batch=20, steps=3)
    assert sum(layer.size for layer in lamina.LayerStack.from_model(model)) == 6
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for batch in corpus.batches(plan):
        engine.backward(error(model(batch.x), batch.x) if len(batch) else None, batch)
        optimizer.step()
        optimizer.zero_grad()
    with raises_code("train.merge-while-attached"):
        lamina.merge_subspace(model)
    with raises_code("train.subspace-while-attached"):
        lamina.private_subspace(model, error, X, proxy="simulated", layers=["0"], rank=2, scale=1.0)
    engine.detach()
    moved = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert moved == {"5.core.weight", "5.core.bias"}


def test_what_a_subspace_cannot_be_made_of_is_refused() -> None:
    def make(**other: object) -> None:
        given = {"x": X, "proxy": "public", "layers": ["5"], "rank": 2, "scale": 1.0} | other
        lamina.private_subspace(learned_net(), error, **given)  # type: ignore[arg-type]

    with raises_code("train.pretrain-not-public"):
        make(proxy="our ward")
    for layers in (["1"], ["nowhere"], [""], [], "5"):
        with raises_code("train.subspace-not-linear"):
            make(layers=layers)
    with raises_code("train.subspace-rank-too-large"):
        make(rank=7)
    with raises_code("train.subspace-scale-not-positive"):
        make(scale=0.0)
    for alike in (torch.ones(50, 6), X[:1].repeat(300, 1)):
        with raises_code("train.subspace-no-directions"):
            make(x=alike)
    for wrong in (torch.nan, torch.inf):
        with raises_code("train.subspace-not-finite"):
            make(x=torch.where(X > 2, wrong, X))


def test_a_layer_that_is_not_called_is_refused() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 6), "other": nn.Linear(6, 6)})
    model.forward = lambda x: model["used"](x)
    with raises_code("train.subspace-not-linear"):
        lamina.private_subspace(model, error, X, proxy="public", layers=["other"], rank=1, scale=1.0)


class Shared(nn.Module):
    """A layer, or its weight alone, in two places."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = self.a if whole else nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


@pytest.mark.parametrize("whole", [True, False])
def test_a_layer_in_two_places_is_refused(whole: bool) -> None:
    """Only one of them would learn, and merging would then change both."""
    with raises_code("train.subspace-shared"):
        lamina.private_subspace(Shared(whole=whole), error, X, proxy="public", layers=["a"], rank=1, scale=1.0)


def test_a_refused_subspace_leaves_the_model_as_it_was() -> None:
    model = learned_net()
    model[0].requires_grad_(False)
    model.train()[2].eval()
    modes = [layer.training for layer in model]
    with raises_code("train.subspace-rank-too-large"):
        lamina.private_subspace(model, error, X, proxy="public", layers=["0"], rank=60, scale=1.0)
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4
    assert [layer.training for layer in model] == modes


def test_a_second_subspace_is_refused_until_the_first_is_merged() -> None:
    """It would freeze the first one as it is."""
    model = learned_net()
    lamina.private_subspace(model, error, X, proxy="public", layers=["5"], rank=1, scale=1.0)
    for layer in ("0", "5", "5.base", "5.core"):
        with raises_code("train.subspace-there-already"):
            lamina.private_subspace(model, error, X, proxy="public", layers=[layer], rank=1, scale=1.0)
    lamina.merge_subspace(model)
    lamina.private_subspace(model, error, X, proxy="public", layers=["0", "5"], rank=1, scale=1.0)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(input=x)
        return out


def test_a_layer_may_be_called_by_keyword() -> None:
    torch.manual_seed(0)
    model = ByKeyword()
    before = model(X).detach()
    lamina.private_subspace(model, error, X, proxy="public", layers=["layer"], rank=2, scale=1.0)
    assert torch.equal(model(X), before)


def test_the_fast_path_of_a_transformer_gives_what_the_ordinary_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation without gradients torch reads weight and bias of its two Linear layers, and does not call them."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), torch.randn(20, 5, 8)
    lamina.private_subspace(
        model, lambda out, y: error(out.flatten(1), y.flatten(1)), x, proxy="public", layers=["linear1", "linear2"],
        rank=2, scale=1.0,
    )  # fmt: skip
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):
            p.normal_()
    ordinary = model.eval()(x).detach()
    monkeypatch.delattr(SubspaceLinear, "forward")  # so that the ordinary path would fail
    with torch.no_grad():
        torch.testing.assert_close(model(x), ordinary, rtol=1e-4, atol=1e-5)
    for name in ("weight", "bias"):
        with pytest.raises(AttributeError):
            setattr(model.linear1, name, None)


def test_a_step_that_reads_the_weight_past_the_layer_is_refused() -> None:
    """The gradient of the core would not be clipped."""
    model = learned_net()
    lamina.private_subspace(model, error, X, proxy="public", layers=["5"], rank=2, scale=1.0)
    engine, corpus, plan = lamina.make_private(model, X, epsilon=3.0, batch=20, steps=3)
    for batch in corpus.batches(plan, probe=False):
        if len(batch):
            output = nn.functional.linear(model[:5](batch.x), model[5].weight, model[5].bias)
            with raises_code("engine.tensor-used-directly"):
                engine.backward(error(output, batch.x), batch)
            break
    engine.detach()
