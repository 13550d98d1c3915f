"""Hugging Face models with random weights whose parts need more than a rule for each layer, and those that are refused.

The oracle is `vmap(grad)` where the model can run under it, and `grad` of one example after another where its control
flow depends on data (Longformer, DETR, wav2vec 2.0, HuBERT, WavLM): `oracle.example_grads` chooses. It looks at
evaluation mode, because what runs once per contribution draws for each by itself. Where only rules are used, the draws
of training mode are replayed as well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
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
from lamina.engine.guards.outside_writes import WrittenOutsideEngine

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


def xlnet(**options: Any) -> Case:
    """XLNet: in evaluation mode it returns `mems`, whose second axis is the batch axis."""
    config = transformers.XLNetConfig(vocab_size=V, d_model=16, n_layer=2, n_head=2, d_inner=24, **options)
    return transformers.XLNetForSequenceClassification(config), tokens(), of_logits


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


SEQ2SEQ: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def bart() -> Case:
    """A vocabulary that is larger than both position tables, which are called with the ids."""
    config = transformers.BartConfig(**SEQ2SEQ, vocab_size=V, max_position_embeddings=12)
    model = transformers.BartForConditionalGeneration(config)
    return model, {"input_ids": ids(9, N), "decoder_input_ids": ids(5, N)}, of_logits


def whisper() -> Case:
    config = transformers.WhisperConfig(
        **SEQ2SEQ, vocab_size=V, num_mel_bins=8, max_source_positions=8, max_target_positions=6
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": noise(8, 16), "decoder_input_ids": ids(5, N)}, of_logits


CAUSAL: dict[str, Any] = {"vocab_size": V, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS: dict[str, Any] = {**CAUSAL, **LAYERS, "num_key_value_heads": 2}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def causal(kind: str, config: str = "", **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        given = getattr(transformers, config or f"{kind}Config")(**options)
        return getattr(transformers, f"{kind}ForCausalLM")(given), tokens(5), of_logits

    return make


def conditional_detr() -> Case:
    model, x, losses = detr()
    options = {k: v for k, v in model.config.to_dict().items() if k in ("num_queries", "d_model") or "coder_" in k}
    config = transformers.ConditionalDetrConfig(
        **options, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=model.config.backbone_config,
    )  # fmt: skip
    return transformers.ConditionalDetrForObjectDetection(config), x, losses


def efficientnet() -> Case:
    config = transformers.EfficientNetConfig(
        image_size=32, width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320, num_labels=3
    )
    model = lamina.fix(transformers.EfficientNetForImageClassification(config)).model
    for p in model.parameters():
        if p.dim() > 1:  # as they are made, gradients are denormal
            nn.init.normal_(p, std=p[0].numel() ** -0.5)
    return model, {"pixel_values": noise(3, 32, 32)}, of_logits


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
    "bart": bart,
    "whisper": whisper,
    "mamba2": causal(
        "Mamba2", **CAUSAL, hidden_size=16, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=8, n_groups=2,
        chunk_size=4,
    ),
}  # fmt: skip
SLOW: dict[str, Callable[[], Case]] = {
    "xlnet, mems": lambda: xlnet(mem_len=4, use_mems_train=True),
    "falcon-h1": causal("FalconH1", **HEADS, **MAMBA, head_dim=8, mamba_d_ssm=32),
    "bamba": causal("Bamba", **HEADS, **MAMBA, mamba_expand=2, attn_layer_indices=[1]),
    "granite hybrid": causal(
        "GraniteMoeHybrid", **HEADS, **MAMBA, mamba_expand=2, layer_types=["mamba", "attention"], num_local_experts=0,
        shared_intermediate_size=24,
    ),
    "nemotron-h": causal(
        "NemotronH", **HEADS, layers_block_type=["mamba", "attention"], mamba_num_heads=4, mamba_head_dim=8, n_groups=2,
        ssm_state_size=8, chunk_size=4, head_dim=8,
    ),
    "zamba2": causal(
        "Zamba2", **{**HEADS, "num_hidden_layers": 3}, mamba_d_state=8, mamba_headdim=8, mamba_ngroups=1, n_mamba_heads=4,
        chunk_size=4, layers_block_type=["mamba", "hybrid", "mamba"], adapter_rank=4,
    ),
    "lfm2": causal("Lfm2", **HEADS, layer_types=["conv", "full_attention"], block_multiple_of=8),
    "lfm2 moe": causal(
        "Lfm2Moe", **HEADS, layer_types=["conv", "full_attention"], num_dense_layers=2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=8,
    ),
    "qwen3 next": causal("Qwen3Next", **HEADS, **DELTA, head_dim=8, mlp_only_layers=[0, 1]),
    "qwen3.5": causal("Qwen3_5", "Qwen3_5TextConfig", **HEADS, **DELTA, head_dim=8),
    "olmo hybrid": causal("OlmoHybrid", **HEADS, **DELTA),
    "jetmoe": causal(
        "JetMoe", **CAUSAL, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_key_value_heads=2,
        kv_channels=8, num_local_experts=4, num_experts_per_tok=2,
    ),
    "llama4": causal(
        "Llama4", "Llama4TextConfig", **HEADS, head_dim=8, intermediate_size_mlp=24, num_local_experts=4,
        num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=16,
    ),
    "recurrent gemma": causal(
        "RecurrentGemma", **{**HEADS, "num_key_value_heads": 1}, head_dim=8, lru_width=16, attention_window_size=8
    ),
    "conditional detr": conditional_detr,
    "efficientnet": efficientnet,
}  # fmt: skip
MODELS |= SLOW
# Some 60 layers in float32 against the oracle's float64; sines of large multiples; a recurrence that is float32 in both.
ROUNDING = {"mobilevit": 1e-4, "efficientnet": 1e-4, "conditional detr": 1e-3, "qwen3 next": 1e-3}


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in MODELS])
def test_two_steps_with_random_draws_and_the_sum_is_the_oracles(name: str) -> None:
    torch.manual_seed(0)
    model, x, losses = MODELS[name]()
    rounding = ROUNDING.get(name, 1e-5)
    agree(model.eval(), x, losses=losses, forms=("joint",), relative=rounding)
    model.train()
    steps = 8 if name == "recurrent gemma" else 2  # an attribute is named after it changed in several steps
    engine, corpus, plan = lamina.make_private(model, (x, torch.zeros(N)), epsilon=3.0, batch=3, steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keeps_state = pytest.warns(WrittenOutsideEngine, match="recurrent_states")  # of the last batch, in an attribute
    with engine, keeps_state if name == "recurrent gemma" else nullcontext():
        for batch in corpus.batches(plan):
            engine.backward(losses(model, batch.x, batch.y) if len(batch) else None, batch)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.probed and engine.budget.taken == steps


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


class Borrows(nn.Module):
    """A module that uses the weight of a submodule without calling it, as mixers of state space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.conv.weight, self.conv.bias, groups=4)


class TimeFirst(nn.Module):
    """A module whose result has no axis of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, (x * self.weight).sum(0)


def test_the_printed_remedy_for_a_borrowed_weight_gives_the_oracles_sums() -> None:
    model = nn.Sequential(Borrows(), nn.Flatten(), nn.Linear(24, 2))
    x = noise(4, 8)
    with Engine(model, plan_of(model)) as engine, raises_code("engine.tensor-used-directly") as refusal:
        engine.clipped_sums(losses_of_output(model(x)), Batch(x))
    assert "per_contribution=['0']" in refusal.value.remedy
    agree(model, x, engine={"per_contribution": ["0"]})


def test_a_result_without_an_axis_of_examples_is_named_as_the_reason() -> None:
    model = TimeFirst()
    with Engine(model, plan_of(model), per_contribution=[""]), raises_code("engine.result-without-batch") as refusal:
        model(noise(3))
    assert "(3,)" in refusal.value.problem


def test_a_position_table_that_is_called_with_the_ids_is_not_taken_for_their_table(tmp_path: Path) -> None:
    """Whisper looks up positions, not ids, in its position table. An id outside the token table is still found."""
    torch.manual_seed(0)
    for make in (whisper, bart):
        model, x, _ = make()
        engine, corpus, plan = lamina.make_private(model, (x, torch.zeros(N)), epsilon=3.0, batch=3, steps=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with engine:
            folder = tmp_path / type(model).__name__ / "runs" / "first"
            run = lamina.Trainer(model, optimizer, of_answer, corpus, plan, engine=engine, folder=folder)
            assert run.fit().steps == 1
        x["decoder_input_ids"][4, 2] = V
        engine, corpus, plan = lamina.make_private(model, (x, torch.zeros(N)), epsilon=3.0, batch=3, steps=1)
        with engine, raises_code("train.labels-out-of-range") as refusal:
            lamina.Trainer(model, optimizer, of_answer, corpus, plan, engine=engine, folder=tmp_path / "other")
        assert "'4'" in refusal.value.problem and f"of {N}" not in refusal.value.problem


def of_answer(output: Any, y: Tensor) -> Tensor:
    return losses_of_output(output.logits)
