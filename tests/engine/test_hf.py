"""Hugging Face models with random weights: engine against oracle, and `generate` while attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import by_hand
import pytest
import torch
import transformers
from by_hand import QUIET, Made, N, T, V, ids, of_logits
from net_builders import tensors_close
from oracle import FORMS, Batch, agree, losses_of_output, plan_of
from torch import Tensor

from lamina import Engine

pytestmark = QUIET


def masked_bert() -> Made:
    model, x, losses, slices = by_hand.bert()
    mask = torch.ones(N, T, dtype=torch.long)
    mask[1, 4:] = 0
    return model, {**x, "attention_mask": mask}, losses, slices


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": ids(), "decoder_input_ids": ids(4), "use_cache": False}, of_logits, []


MODELS: dict[str, Callable[[], Made]] = {
    "bert": masked_bert, "gpt2": by_hand.gpt2, "vit": by_hand.vit, "t5": t5, "llama": by_hand.llama,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    model, x, losses, _ = MODELS[name]()
    layers = len(plan_of(model.train()).layers)
    bands = [[1.0] * layers, [0.0] * (layers - layers // 4) + [1.0] * (layers // 4)]
    agree(model, x, losses=losses, clip=bands, batch={"cls": torch.tensor([0, 1, 0, 0, 1])})


@pytest.mark.parametrize("name", MODELS)
def test_patients_with_several_windows(name: str) -> None:
    model, x, losses, _ = MODELS[name]()
    batch = {"unit": torch.tensor([0, 1, 0, 2, 1]), "weight": torch.tensor([1.0, 1.0, 2.0, 1.0, 0.0])}
    agree(model.train(), x, losses=losses, batch=batch, forms=("joint",))


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert"])
def test_length_equal_to_batch_by_chance(name: str) -> None:
    """After another length has passed every check."""
    model, x, losses, _ = MODELS[name]()
    plan = plan_of(model.train(), 0.01)
    other = {k: v[:, :N] if isinstance(v, Tensor) else v for k, v in x.items()}
    with Engine(model, plan) as engine:
        engine.clipped_sums(losses(model, x, None), Batch(x))
        with torch.no_grad():
            want = losses(model, other, None)
        attached = losses(model, other, None)
        torch.testing.assert_close(attached.detach(), want, rtol=1e-4, atol=1e-5)
        sums = engine.clipped_sums(attached, Batch(other))
    with Engine(model, plan) as engine:
        fresh = engine.clipped_sums(losses(model, other, None), Batch(other))
    tensors_close(sums, fresh)


def test_generate_while_attached() -> None:
    model, x, _, _ = by_hand.gpt2()
    model.eval()
    prompt = x["input_ids"][:2, :3]

    def text() -> Tensor:
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    want = text()
    with Engine(model, plan_of(model, 0.1)) as engine:
        assert torch.equal(text(), want)
        engine.backward(losses_of_output(model(**x).logits), Batch(x))
        assert torch.equal(text(), want)


@pytest.mark.parametrize("form", FORMS)
def test_gradient_checkpointing(form: str) -> None:
    model, x, losses, _ = by_hand.gpt2()
    plan = plan_of(model.train(), 0.01, clipping=form)
    with Engine(model, plan) as engine:
        plain = engine.clipped_sums(losses(model, x, None), Batch(x))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        saved = engine.clipped_sums(losses(model, x, None), Batch(x))
    tensors_close(saved, plain)


def test_only_the_top_trains() -> None:
    """A pre-trained body that no class reaches: a frozen feature extractor without freezing anything."""
    model, x, losses, _ = masked_bert()
    names = [layer.name for layer in plan_of(model.train()).layers]
    clip = [1.0 if name == "classifier" else 0.0 for name in names]
    agree(model, x, losses=losses, clip=clip)
