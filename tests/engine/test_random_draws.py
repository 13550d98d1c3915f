"""Models that draw at random in their forward pass: dropout, samples, stochastic depth; and draws that couple."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from by_hand import QUIET, T, V, ids, of_logits
from net_builders import Net
from oracle import clip_by_hand, difference, losses_of, losses_of_output, plan_of, thresholds
from refusals import raises_code
from replay import ReplayedDraws, replayed_by_autograd, replayed_by_vmap
from torch import Tensor, nn

import lamina
from lamina import Batch, Engine

pytestmark = QUIET

N = 6
SMALL = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
Case = tuple[nn.Module, Any, Callable[[nn.Module, Any, Any], Tensor]]


def tokens() -> dict[str, Tensor]:
    return {"input_ids": ids(T, N)}


def bert(kind: str) -> Case:
    config = getattr(transformers, f"{kind}Config")(**SMALL, max_position_embeddings=16)
    return getattr(transformers, f"{kind}ForSequenceClassification")(config), tokens(), of_logits


def gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), tokens(), of_logits


def decoder(kind: str) -> Case:
    config = getattr(transformers, f"{kind}Config")(**SMALL, num_key_value_heads=1, use_cache=False)
    return getattr(transformers, f"{kind}ForCausalLM")(config), tokens(), of_logits


def vit() -> Case:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        hidden_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(N, 3, 8, 8)}, of_logits


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, use_cache=False, decoder_start_token_id=0
    )
    x = {**tokens(), "decoder_input_ids": ids(4, N)}
    return transformers.T5ForConditionalGeneration(config), x, of_logits


class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 8), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_var = self.encode(x).chunk(2, 1)
        return self.decode(mean + (0.5 * log_var).exp() * torch.randn_like(mean))


class StochasticDepth(nn.Module):
    """A residual branch is left out, by batch or by row, as torchvision does it; by row with a scale of its own."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.inner, self.out, self.mode = nn.Linear(5, 5), nn.Linear(5, 3), mode
        self.scale = nn.Parameter(torch.ones(5)) if mode == "row" else 1.0

    def forward(self, x: Tensor) -> Tensor:
        shape = [len(x), 1] if self.mode == "row" else [1, 1]
        noise = torch.empty(shape).bernoulli_(0.8).div_(0.8)
        return self.out(x + noise * self.inner(x).tanh() * self.scale)


def small(model: nn.Module, *shape: int) -> Case:
    return model, torch.randn(N, *(shape or (5,))), losses_of


MODELS: dict[str, Callable[[], Case]] = {
    "bert": lambda: bert("Bert"),
    "roberta": lambda: bert("Roberta"),
    "gpt2": gpt2,
    "vit": vit,
    "llama": lambda: decoder("Llama"),
    "mistral": lambda: decoder("Mistral"),
    "t5": t5,
    "vae": lambda: small(VariationalAutoencoder()),
    "encoder layer": lambda: small(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 4, 8),
    "encoder": lambda: small(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False),
        4, 8,
    ),
    "functional dropout": lambda: small(Net(lambda m, x: m.out(F.dropout(m.inner(x))), inner=nn.Linear(5, 9), out=nn.Linear(9, 2))),
    "stochastic depth by row": lambda: small(StochasticDepth("row")),
    "stochastic depth by batch": lambda: small(StochasticDepth("batch")),
    "a mask shared by the batch": lambda: small(
        Net(lambda m, x: m.out(m.inner(x) * (torch.rand(1, 9) > 0.3)), inner=nn.Linear(5, 9), out=nn.Linear(9, 2))
    ),
}  # fmt: skip


# vmap cannot replay what is drawn once for the batch, nor `torch.empty(shape).bernoulli_()`, which has no batch axis
BY_AUTOGRAD = ("stochastic depth by row", "stochastic depth by batch", "a mask shared by the batch")


@pytest.mark.parametrize("name", MODELS)
def test_random_draws_are_no_coupling_and_the_gradient_is_that_of_the_replayed_draws(name: str) -> None:
    """Against `vmap(grad)` with the same draws; those of BY_AUTOGRAD against autograd, one loss after another."""
    torch.manual_seed(0)
    model, x, losses = MODELS[name]()
    model.train()
    y = torch.zeros(N)
    engine, corpus, plan = lamina.make_private(model, (x, y), epsilon=3.0, batch=3, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with engine:
        state = torch.get_rng_state()
        engine.probe(lambda x, y: losses(model, x, y), x, y)
        assert torch.equal(state, torch.get_rng_state()) and engine.probed and engine.budget.taken == 0
        for batch in corpus.batches(plan):
            engine.backward(losses(model, batch.x, batch.y) if len(batch) else None, batch)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.budget.taken == 2
    if name in BY_AUTOGRAD:
        grads = replayed_by_autograd(model, lambda: losses(model, x, y), 7)
    else:
        grads = replayed_by_vmap(model, losses, x, y, 7)
    plan = thresholds(grads, plan_of(model))
    with Engine(model, plan) as engine:
        losses(model, x, y)  # modules without a rule look at their arguments once
        with ReplayedDraws(7):
            attached = losses(model, x, y)
        sums = engine.clipped_sums(attached, Batch(x, y))
        difference(sums, clip_by_hand(grads, [0] * N, plan))


def draw_for_positive(m: nn.Module, x: Tensor) -> Tensor:
    """Every positive entry of the batch takes one draw: who comes later gets others."""
    noise = torch.zeros_like(x)
    noise[x > 0] = torch.rand(int((x > 0).sum()))
    return losses_of(m, x + noise, None)


def mixup(m: nn.Module, x: Tensor, lam: float, order: Tensor) -> Tensor:
    return losses_of(m, lam * x + (1 - lam) * x[order], None)


COUPLED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "as many draws as the others have positive entries": draw_for_positive,
    "dropout where the batch's mean is positive": lambda m, x: losses_of(m, F.dropout(x, float(x.mean().sigmoid())), None),
    "mixup, numpy": lambda m, x: mixup(m, x, np.random.beta(0.2, 0.2), torch.from_numpy(np.random.permutation(len(x)))),  # noqa: NPY002
    "mixup, torch": lambda m, x: mixup(m, x, float(torch.rand(())), torch.randperm(len(x))),
    "mixup, python": lambda m, x: mixup(m, x, random.betavariate(0.2, 0.2), torch.arange(len(x)).roll(random.randint(0, 3))),
    "dropout, and divided by the batch": lambda m, x: losses_of(m, F.dropout(x), None) / len(x),
    "dropout, and centred": lambda m, x: losses_of_output(m(F.dropout(x)) - m(x).mean(0).detach()),
    "dropout, and standardised": lambda m, x: losses_of(m, F.dropout((x - x.mean(0)) / x.std(0)), None),
}  # fmt: skip


@pytest.mark.parametrize("kind", COUPLED)
def test_draws_that_depend_on_others_and_coupling_beside_draws_are_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    with Engine(model, plan_of(model)) as engine, raises_code("engine.probe-found-coupling"):
        engine.probe(lambda x, y: COUPLED[kind](model, x), torch.randn(N, 5))


def test_a_generator_that_a_module_holds_is_replayed_and_another_is_named() -> None:
    own = torch.Generator().manual_seed(1)

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.out(x + torch.randn(x.shape, generator=m.generator if hasattr(m, "generator") else own))

    model = Net(forward, out=nn.Linear(5, 3))
    with Engine(model, plan_of(model)) as engine:
        with raises_code("engine.probe-not-repeatable"):
            engine.probe(lambda x, y: losses_of(model, x, y), torch.randn(N, 5))
        model.generator = own
        before = own.get_state()
        engine.probe(lambda x, y: losses_of(model, x, y), torch.randn(N, 5))
        assert torch.equal(own.get_state(), before)


class Memory(nn.Module):
    """Keeps what it saw, and uses it in the next batch."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.out, self.used, self.seen = nn.Linear(5, 3), used, torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        seen, self.seen = self.seen, 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return self.out(x - seen if self.used else x)


def test_a_plain_attribute_that_carries_data_to_the_next_batch_is_named() -> None:
    x = torch.randn(N, 5) + 1
    model = Memory(used=True)
    with Engine(model, plan_of(model)) as engine, raises_code("engine.probe-not-repeatable") as refusal:
        engine.probe(lambda x, y: losses_of(model, x, y), x)
    assert "'seen'" in str(refusal.value)
    model = Memory(used=False)  # kept for somebody to look at, not used
    with Engine(model, plan_of(model)) as engine:
        engine.probe(lambda x, y: losses_of(model, x, y), x)


def test_input_on_which_nothing_is_finite_is_not_called_coupled() -> None:
    model = nn.Linear(5, 3)
    with Engine(model, plan_of(model)) as engine, raises_code("engine.probe-not-finite"):
        engine.probe(lambda x, y: losses_of(model, x.log(), y), torch.randn(N, 5))
