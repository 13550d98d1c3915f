"""Hugging Face models with random weights: engine against oracle, and `generate` while attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from oracle import FORMS, Batch, agree, losses_of_output, plan_of
from torch import Tensor, nn

from lamina import Engine

N, T, V = 5, 7, 40
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:There is a performance drop",
    "ignore:.*cannot run under vmap",
)


def ids(length: int = T) -> Tensor:
    return torch.randint(1, V, (N, length), generator=torch.Generator().manual_seed(length))


def bert() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(N, T, dtype=torch.long)
    mask[1, 4:] = 0
    return (transformers.BertForSequenceClassification(config), {"input_ids": ids(), "attention_mask": mask}, "logits")


def gpt2() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids()}, "logits"


def vit() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(N, 3, 8, 8)}, "logits"


def t5() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": ids(), "decoder_input_ids": ids(4), "use_cache": False}, "logits"


def llama() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": ids()}, "logits"


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any], str]]] = {
    "bert": bert, "gpt2": gpt2, "vit": vit, "t5": t5, "llama": llama,
}  # fmt: skip


def losses(field: str) -> Callable[[nn.Module, Any, Any], Tensor]:
    return lambda model, x, y: losses_of_output(getattr(model(**x), field))


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    model, inputs, field = MODELS[name]()
    layers = len(plan_of(model.train()).layers)
    bands = [[1.0] * layers, [0.0] * (layers - layers // 4) + [1.0] * (layers // 4)]
    agree(model, inputs, losses=losses(field), clip=bands, batch={"cls": torch.tensor([0, 1, 0, 0, 1])})


@pytest.mark.parametrize("name", MODELS)
def test_patients_with_several_windows(name: str) -> None:
    model, inputs, field = MODELS[name]()
    batch = {"unit": torch.tensor([0, 1, 0, 2, 1]), "weight": torch.tensor([1.0, 1.0, 2.0, 1.0, 0.0])}
    agree(model.train(), inputs, losses=losses(field), batch=batch, forms=("joint",))


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert"])
def test_length_equal_to_batch_by_chance(name: str) -> None:
    """After another length has passed every check."""
    model, inputs, field = MODELS[name]()
    plan = plan_of(model.train(), 0.01)
    other = {k: v[:, :N] if isinstance(v, Tensor) else v for k, v in inputs.items()}
    with Engine(model, plan) as engine:
        engine.clipped_sums(losses(field)(model, inputs, None), Batch(inputs))
        with torch.no_grad():
            want = losses(field)(model, other, None)
        attached = losses(field)(model, other, None)
        torch.testing.assert_close(attached.detach(), want, rtol=1e-4, atol=1e-5)
        sums = engine.clipped_sums(attached, Batch(other))
    with Engine(model, plan) as engine:
        fresh = engine.clipped_sums(losses(field)(model, other, None), Batch(other))
    for key, value in sums.items():
        torch.testing.assert_close(value, fresh[key], rtol=1e-5, atol=1e-7)


def test_generate_while_attached() -> None:
    model, inputs, _ = gpt2()
    model.eval()
    prompt = inputs["input_ids"][:2, :3]

    def text() -> Tensor:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            use_cache=True,
        )

    want = text()
    with Engine(model, plan_of(model, 0.1)) as engine:
        assert torch.equal(text(), want)
        engine.backward(losses_of_output(model(**inputs).logits), Batch(inputs))
        assert torch.equal(text(), want)


@pytest.mark.parametrize("form", FORMS)
def test_gradient_checkpointing(form: str) -> None:
    model, inputs, field = gpt2()
    plan = plan_of(model.train(), 0.01, clipping=form)
    with Engine(model, plan) as engine:
        plain = engine.clipped_sums(losses(field)(model, inputs, None), Batch(inputs))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        saved = engine.clipped_sums(losses(field)(model, inputs, None), Batch(inputs))
    for key, value in plain.items():
        torch.testing.assert_close(saved[key], value, rtol=1e-5, atol=1e-7)


def test_only_the_top_trains() -> None:
    """A pre-trained body that no class reaches: a frozen feature extractor without freezing anything."""
    model, inputs, field = bert()
    names = [layer.name for layer in plan_of(model.train()).layers]
    clip = [1.0 if name == "classifier" else 0.0 for name in names]
    agree(model, inputs, losses=losses(field), clip=clip)
