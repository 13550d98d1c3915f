"""Hugging Face models with random weights whose parts need more than a rule for each layer, and those that are refused.

The oracle is `vmap(grad)` where the model can run under it, and `grad` of one example after another where its control
flow depends on data (Longformer, DETR, wav2vec 2.0, HuBERT, WavLM): `oracle.example_grads` chooses. It looks at
evaluation mode, because what runs once per contribution draws for each by itself. Where only rules are used, the draws
of training mode are replayed as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from by_hand import QUIET, T, V, ids, of_logits
from oracle import agree, clip_by_hand, difference, losses_of_output, plan_of, thresholds
from refusals import raises_code
from replay import ReplayedDraws, replayed_by_autograd
from torch import Tensor, nn

import lamina
from lamina import Batch, Engine

pytestmark = QUIET

N = 6
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
Case = tuple[nn.Module, Any, Callable[[nn.Module, Any, Any], Tensor]]


def noise(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(1))


def tokens(length: int = T) -> dict[str, Tensor]:
    return {"input_ids": ids(length, N)}


def opt() -> Case:
    config = transformers.OPTConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, word_embed_proj_dim=16,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config), tokens(), of_logits


def text(kind: str, **options: Any) -> Case:
    config = getattr(transformers, f"{kind}Config")(**LAYERS, vocab_size=V, max_position_embeddings=32, **options)
    return getattr(transformers, f"{kind}ForSequenceClassification")(config), tokens(8), of_logits


def swin() -> Case:
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4
    )
    model = transformers.SwinForImageClassification(config)
    for name, p in model.named_parameters():
        if "relative_position_bias" in name:  # as they are made they are 0
            nn.init.normal_(p)
    return model, {"pixel_values": noise(3, 16, 16)}, of_logits


def speech(kind: str, frozen: bool = True, **options: Any) -> Case:
    config = getattr(transformers, f"{kind}Config")(
        **LAYERS, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, vocab_size=12,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, classifier_proj_size=8, **options,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    model.base_model.masked_spec_embed.requires_grad_(not frozen)
    return model, {"input_values": noise(300)}, of_logits


def clip() -> transformers.CLIPModel:
    image = {**LAYERS, "image_size": 8, "patch_size": 4}
    words = {**LAYERS, "vocab_size": V, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=words, vision_config=image, projection_dim=8)
    return transformers.CLIPModel(config)


def of_pairs(model: nn.Module, x: Any, y: Any) -> Tensor:
    """Each text with its own image."""
    out = model(**x)
    return losses_of_output(out.text_embeds * out.image_embeds + out.image_embeds)


def of_contrast(model: nn.Module, x: Any, y: Any) -> Tensor:
    """Each text with every image."""
    logits = model(**x).logits_per_text
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


def clip_pairs() -> Case:
    return clip(), {**tokens(), "pixel_values": noise(3, 8, 8)}, of_pairs


def clip_images() -> Case:
    model = transformers.CLIPVisionModelWithProjection(clip().config.vision_config)
    return model, {"pixel_values": noise(3, 8, 8)}, lambda m, x, y: losses_of_output(m(**x).image_embeds)


def timesformer() -> Case:
    config = transformers.TimesformerConfig(**LAYERS, image_size=8, patch_size=4, num_frames=3)
    return transformers.TimesformerForVideoClassification(config), {"pixel_values": noise(3, 3, 8, 8)}, of_logits


def patchtst(norm: str = "layernorm") -> Case:
    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, num_targets=3, d_model=16,
        num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, norm_type=norm,
    )  # fmt: skip
    model = lamina.fix(transformers.PatchTSTForClassification(config)).model
    return model, {"past_values": noise(32, 2)}, lambda m, x, y: losses_of_output(m(**x).prediction_logits)


def xlnet() -> Case:
    config = transformers.XLNetConfig(vocab_size=V, d_model=16, n_layer=2, n_head=2, d_inner=24)
    model = transformers.XLNetForSequenceClassification(config)
    return model, tokens(), lambda m, x, y: losses_of_output(m(**x, use_mems=False).logits)


def mobilevit() -> Case:
    config = transformers.MobileViTConfig(
        image_size=32, patch_size=2, hidden_sizes=[8, 12, 16], neck_hidden_sizes=[4, 8, 8, 12, 16, 16, 24],
        num_attention_heads=2, expand_ratio=2.0,
    )  # fmt: skip
    model = lamina.fix(transformers.MobileViTForImageClassification(config)).model
    for p in model.parameters():
        if p.dim() > 1:  # as they are made, almost nothing comes through so many layers
            nn.init.normal_(p, std=p[0].numel() ** -0.5)
    return model, {"pixel_values": noise(3, 64, 64)}, of_logits


def detr() -> Case:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, num_queries=4,
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config), {"pixel_values": noise(3, 64, 64)}, of_logits


RULES: dict[str, Callable[[], Case]] = {
    "opt": opt, "clip": clip_pairs, "clip images": clip_images, "timesformer": timesformer, "patchtst": patchtst,
    "patchtst, batchnorm": lambda: patchtst("batchnorm"), "mobilevit": mobilevit,
}  # fmt: skip
POSITIONS: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
MODELS: dict[str, Callable[[], Case]] = {
    **RULES,
    "deberta": lambda: text("Deberta", **POSITIONS),
    "deberta-v2": lambda: text("DebertaV2", **POSITIONS, position_buckets=8, share_att_key=True),
    "mpnet": lambda: text("MPNet"),
    "longformer": lambda: text("Longformer", attention_window=4),
    "swin": swin,
    "wav2vec2": lambda: speech("Wav2Vec2"),
    "wav2vec2, spec embedding": lambda: speech("Wav2Vec2", frozen=False, layerdrop=0.0),
    "hubert": lambda: speech("Hubert"),
    "wavlm": lambda: speech("WavLM"),
    "xlnet": xlnet,
    "detr": detr,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_with_random_draws_and_the_sum_is_the_oracles(name: str) -> None:
    torch.manual_seed(0)
    model, x, losses = MODELS[name]()
    rounding = 1e-4 if name == "mobilevit" else 1e-5  # some 60 layers in float32, against the oracle's float64
    agree(model.eval(), x, losses=losses, forms=("joint",), relative=rounding)
    model.train()
    engine, corpus, plan = lamina.make_private(model, (x, torch.zeros(N)), epsilon=3.0, batch=3, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with engine:
        for batch in corpus.batches(plan):
            engine.backward(losses(model, batch.x, batch.y) if len(batch) else None, batch)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.probed and engine.budget.taken == 2


@pytest.mark.parametrize("name", RULES)
def test_the_sum_in_training_mode_with_the_draws_replayed(name: str) -> None:
    """Against autograd, one loss after another: some of these draw once for the batch, or into memory without its axis."""
    torch.manual_seed(0)
    model, x, losses = RULES[name]()
    model.train()
    grads = replayed_by_autograd(model, lambda: losses(model, x, None), 7)
    plan = thresholds(grads, plan_of(model))
    with Engine(model, plan) as engine:
        losses(model, x, None)  # modules without a rule look at their arguments once
        with ReplayedDraws(7):
            attached = losses(model, x, None)
        difference(engine.clipped_sums(attached, Batch(x)), clip_by_hand(grads, [0] * N, plan))


def test_a_contrastive_loss_is_refused_as_coupling_and_a_scale_in_the_loss_as_unclipped() -> None:
    model, x, _ = clip_pairs()
    with Engine(model, plan_of(model)) as engine:
        with raises_code("engine.contributions-coupled"):
            engine.clipped_sums(of_contrast(model, x, None), Batch(x))
        with raises_code("engine.tensor-used-directly"):
            engine.clipped_sums(of_pairs(model, x, None) * model.logit_scale.exp(), Batch(x))


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "WavLM"])
def test_layers_dropped_for_each_example_by_itself_are_named(kind: str) -> None:
    model, x, losses = speech(kind, frozen=False, layerdrop=0.5)
    model.train()
    with Engine(model, plan_of(model)), raises_code("engine.results-differ") as refusal:
        for _ in range(4):
            losses(model, x, None)
    assert "masked_spec_embed" in str(refusal.value) and "layerdrop" in str(refusal.value)
