"""Mixtures of experts with stacked weights and flattened tokens: engine against oracle, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from by_hand import N, V, bands, cut, ids, mixtral, of_logits
from net_builders import tensors_close
from oracle import FORMS, Batch, agree, plan_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Engine, SeededNoise
from lamina.engine.layers.stacked_experts import ExpertsForward
from lamina.plan.selection import Slice

MIXED = torch.tensor([0, 1, 2, 1, 0])


def test_mixtral() -> None:
    model, x, losses, _ = mixtral()
    agree(model.train(), x, losses=losses)


@pytest.mark.parametrize("cls", [MIXED.tolist(), [1] * N], ids=["mixed", "alike"])
def test_expert_slices(cls: list[int]) -> None:
    model, x, losses, slices = mixtral()
    agree(model.train(), x, losses=losses, clip=bands(model, slices), slices=slices, batch={"cls": torch.tensor(cls)})


def test_rows_and_columns_of_experts() -> None:
    """Along the other axes of a stack, too; and two classes of different experts."""
    model, x, losses, _ = mixtral()
    at = "model.layers.1.mlp.experts"
    slices = [
        cut(f"{at}.gate_up_proj", 24, (0, 5), (12, 17), axis=1),
        cut(f"{at}.down_proj", 12, (0, 5), axis=2),
        cut(f"{at}.gate_up_proj", 24, (5, 12), axis=1, cls="c2"),
        cut(f"{at}.down_proj", 12, axis=2, cls="c2"),
    ]
    rows = bands(model, slices)
    agree(
        model.train(), x, losses=losses, clip=[rows[0], rows[1], rows[1]], slices=slices, batch={"cls": MIXED},
        must_clip=False,
    )  # fmt: skip


def test_patients_with_several_windows() -> None:
    model, x, losses, slices = mixtral()
    batch = {
        "unit": torch.tensor([0, 1, 0, 2, 1]),
        "weight": torch.tensor([1.0, 1.0, 2.0, 1.0, 0.0]),
        "cls": torch.tensor([1, 0, 1]),
    }
    agree(model.train(), x, losses=losses, clip=bands(model, slices), slices=slices, batch=batch, forms=("joint",))


def test_padding_and_a_length_that_is_the_batch() -> None:
    model, _, losses, _ = mixtral()
    mask = torch.ones(N, N, dtype=torch.long)
    mask[1, 3:] = 0
    agree(model.train(), {"input_ids": ids(N), "attention_mask": mask}, losses=losses, forms=("box",))


def test_every_implementation_of_the_model_gives_the_same() -> None:
    """Attached, the experts run by the engine's rule; detached, by whatever the model is configured for."""
    model, x, losses, _ = mixtral()
    plan = plan_of(model.train(), 0.01)
    sums = {}
    for kind in ("eager", "grouped_mm", "batched_mm"):
        model.config._experts_implementation = kind
        with torch.no_grad():
            want = losses(model, x, None)
        with Engine(model, plan) as engine:
            found = losses(model, x, None)
            torch.testing.assert_close(found.detach(), want, rtol=1e-4, atol=1e-5)
            sums[kind] = engine.clipped_sums(found, Batch(x))
            torch.testing.assert_close(losses(copy.deepcopy(model), x, None).detach(), want, rtol=1e-4, atol=1e-5)
    tensors_close(sums["grouped_mm"], sums["eager"], 1e-4, 1e-6)
    tensors_close(sums["batched_mm"], sums["eager"], 1e-4, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_contribution_that_is_not_finite(form: str) -> None:
    model, x, losses, slices = mixtral()
    plan = plan_of(model.train(), bands(model, slices), 0.5, clipping=form, slices=slices)
    spoilt = torch.tensor([1.0, torch.nan, 1.0, 1.0, torch.inf])
    keep = torch.isfinite(spoilt).float()
    with Engine(model, plan) as engine:
        want = engine.clipped_sums(losses(model, x, None), Batch(x, cls=MIXED, weight=keep))
        found = engine.clipped_sums(losses(model, x, None) * spoilt, Batch(x, cls=MIXED))
    tensors_close(found, want, rtol=1e-5, atol=1e-7)


def test_generate_while_attached_and_no_trace_after() -> None:
    model, x, losses, _ = mixtral()
    model.eval()
    prompt = x["input_ids"][:2, :3]

    def text() -> Tensor:
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    want = text()
    with Engine(model, plan_of(model, 0.1), noise=SeededNoise(0)) as engine:
        engine.backward(losses(model, x, None), Batch(x))
        assert torch.equal(text(), want)
    assert all("forward" not in vars(module) for module in model.modules())


# ------------------------------------------------------------------------------- other mixtures


def qwen() -> nn.Module:
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            vocab_size=V, hidden_size=16, intermediate_size=12, moe_intermediate_size=8, num_hidden_layers=1,
            shared_expert_intermediate_size=8, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
            num_experts_per_tok=2, use_cache=False, decoder_sparse_step=1,
        )
    )  # fmt: skip


def olmoe() -> nn.Module:
    return transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(
            vocab_size=V, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, use_cache=False,
        )
    )  # fmt: skip


def gpt_oss() -> nn.Module:
    """Transposed, with biases, gate and up interleaved."""
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            vocab_size=V, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, head_dim=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
            layer_types=["full_attention"],
        )
    )  # fmt: skip


def deepseek() -> nn.Module:
    """A router that flattens the tokens itself, shared experts, groups of experts."""
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            vocab_size=V, hidden_size=16, intermediate_size=12, moe_intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
            topk_group=1, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8,
            qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8, use_cache=False,
        )
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:There is a performance")
@pytest.mark.parametrize("make", [qwen, olmoe, gpt_oss, deepseek], ids=lambda f: f.__name__)
def test_other_mixtures(make: Any) -> None:
    torch.manual_seed(3)
    model = make().train()
    model.config._experts_implementation = "eager"
    for name, p in model.named_parameters():
        if ".mlp." in name:
            nn.init.normal_(p, std=0.4)
    agree(model, {"input_ids": ids()}, losses=of_logits, forms=("box",))


# ------------------------------------------------------------------------------- what is refused


def test_a_load_balancing_loss_is_refused() -> None:
    model, x, _, _ = mixtral(output_router_logits=True)
    with raises_code("engine.router-loss"):
        Engine(model, plan_of(model))
    model.config.output_router_logits = False
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.output_router_logits = False
    with Engine(model, plan_of(model)) as engine:
        out = model(**x, output_router_logits=True)
        losses = out.logits.flatten(1).square().mean(1) + 0.1 * out.aux_loss
        with raises_code("engine.contributions-coupled"):
            engine.backward(losses, Batch(x))
    assert engine.budget.taken == 0


class Odd(nn.Module):
    """Looks like stacked experts, and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gate = self.has_bias = self.is_transposed = False
        self.num_experts, self.act_fn = 2, torch.tanh
        self.up_proj, self.down_proj = nn.Parameter(torch.randn(2, 5, 3)), nn.Parameter(torch.randn(2, 3, 5))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return torch.tanh(hidden_states @ self.up_proj[0].T) @ self.down_proj[0].T


class Block(nn.Module):
    def __init__(self, experts: nn.Module, *, cut: bool = False) -> None:
        super().__init__()
        self.experts, self.cut = experts, cut

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        rows = rows[1:] if self.cut else rows
        index = (rows[:, :1] > 0).long()
        y = self.experts(rows, index, torch.ones_like(index, dtype=x.dtype))
        return y.mean(0, keepdim=True).expand(len(x), -1) if self.cut else y.unflatten(0, x.shape[:2])


def test_what_only_looks_like_experts_is_refused() -> None:
    model = Block(Odd())
    assert ExpertsForward.applies_to(model.experts)
    with Engine(model, plan_of(model)), raises_code("engine.experts-differ"):
        model(torch.randn(4, 3, 3))
    agree(model, torch.randn(4, 3, 3), engine={"per_contribution": [""]})


def test_tokens_that_are_not_as_many_of_each_example_are_refused() -> None:
    model = Block(Odd(), cut=True)
    with Engine(model, plan_of(model)), raises_code("engine.rows-not-divisible"):
        model(torch.randn(4, 3, 3))


def test_a_slice_that_leaves_no_expert_of_the_batch() -> None:
    """A class whose experts no token of the batch goes to: its part of the sum is 0, and nothing breaks."""
    model, x, losses, _ = mixtral()
    at = "model.layers.0.mlp.experts"
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.gate.weight")[3] = -1e3 * 1.0
    one: list[Slice] = [cut(f"{at}.{name}", 4, (3, 4), cls="c0") for name in ("gate_up_proj", "down_proj")]
    clip = [[1.0 if layer.name == at else 0.0 for layer in plan_of(model).layers]]
    with Engine(model.train(), plan_of(model, clip, slices=one)) as engine:
        sums = engine.clipped_sums(losses(model, x, None), Batch(x))
    assert all(bool(torch.isfinite(value).all()) for value in sums.values())
    assert not sums[f"{at}.down_proj"][:3].any()
