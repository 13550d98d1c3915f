"""Adapters of PEFT on tiny GPT-2 and Llama: engine against oracle, and a base that stays bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from by_hand import QUIET, N, cut, gpt2, ids, llama, of_logits
from oracle import FORMS, agree, layers_of, plan_of, trace_of
from refusals import raises_code
from torch import Tensor, nn

from lamina import Batch, Engine, SeededNoise

pytestmark = QUIET
BASES: dict[str, Callable[[], nn.Module]] = {"gpt2": lambda: gpt2()[0], "llama": lambda: llama()[0]}
TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "o_proj"]}
X = {"input_ids": ids()}


def lora(base: str, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=TARGETS[base], init_lora_weights=False,
        fan_in_fan_out=base == "gpt2", **options,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[str], peft.PeftConfig]] = {
    "lora": lora,
    "prompt": lambda base: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda base: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "projected prefix": lambda base: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
    ),
    "p-tuning": lambda base: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8, encoder_dropout=0.0
    ),
    "ia3": lambda base: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=TARGETS[base], feedforward_modules=[], fan_in_fan_out=base == "gpt2"
    ),
}  # fmt: skip


def adapted(base: str, kind: str, **options: Any) -> nn.Module:
    model: nn.Module = peft.get_peft_model(BASES[base](), CONFIGS[kind](base, **options))
    return model.train()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_adapter(base: str, kind: str) -> None:
    agree(adapted(base, kind), X, losses=of_logits)


@pytest.mark.parametrize("base", BASES)
def test_adapter_of_patients_with_several_windows(base: str) -> None:
    batch = {"unit": torch.tensor([0, 1, 0, 2, 1]), "weight": torch.tensor([1.0, 1.0, 2.0, 1.0, 0.0])}
    for kind in ("lora", "prompt"):
        agree(adapted(base, kind), X, losses=of_logits, batch=batch, forms=("joint",))


def is_adapter(name: str) -> bool:
    return "lora_" in name or "prompt_encoder" in name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "not reached"])
@pytest.mark.parametrize("kind", ["lora", "prefix", "prompt"])
def test_only_the_adapter_moves(base: str, kind: str, frozen: bool, form: str) -> None:
    """The base stays bit for bit, whether it is frozen or merely reached by no class; the optimiser holds all of it."""
    model = adapted(base, kind)
    if not frozen:
        model.requires_grad_(True)
    layers = layers_of(model)
    clip = [1.0 if all(map(is_adapter, layer.parameters)) else 0.0 for layer in layers]
    plan = plan_of(model, [clip], 0.5, clipping=form)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Engine(model, plan, noise=SeededNoise(4)) as engine:
        for batch in (Batch(X), Batch({"input_ids": X["input_ids"][:0]}), Batch(X)):
            engine.backward(of_logits(model, batch.x, None) if len(batch) else None, batch)
            optimizer.step()
            optimizer.zero_grad()
    for name, p in model.named_parameters():
        if is_adapter(name):
            assert bool((p != before[name]).any()), name
        else:
            assert torch.equal(p, before[name]), name
            assert not optimizer.state.get(p)


@pytest.mark.parametrize("base", BASES)
def test_a_class_on_the_adapter_and_one_on_heads_of_the_base(base: str) -> None:
    """In one batch: c0 moves the adapter, c1 some rows of a base weight, c2 some ranks of the adapter."""
    model = adapted(base, "lora")
    model.requires_grad_(True)
    layers = layers_of(model)
    names = dict(model.named_parameters())
    kind, axis = ("c_attn", 1) if base == "gpt2" else ("q_proj", 0)
    weight = next(name for name in names if name.endswith(f"{kind}.base_layer.weight"))
    low = next(name for name in names if f"{kind}.lora_A" in name)
    width = names[weight].shape[axis]
    slices = [cut(weight, width, (0, 4), axis=axis), cut(low, 2, (1, 2), cls="c2")]
    if base == "gpt2":
        slices.append(cut(weight.replace("weight", "bias"), width))
    rows = [
        [1.0 if all(map(is_adapter, layer.parameters)) else 0.0 for layer in layers],
        [1.0 if weight in layer.parameters else 0.0 for layer in layers],
        [1.0 if low in layer.parameters else 0.0 for layer in layers],
    ]
    agree(
        model, X, losses=of_logits, clip=rows, slices=slices, batch={"cls": torch.tensor([0, 1, 2, 1, 0])},
        must_clip=False,
    )  # fmt: skip


# ------------------------------------------------------------------------------- what is refused


def test_a_merged_adapter_is_refused() -> None:
    model = adapted("llama", "lora")
    plan = plan_of(model)
    model.merge_adapter()
    with raises_code("engine.adapter-merged"):
        Engine(model, plan)
    model.unmerge_adapter()
    with Engine(model, plan) as engine:
        engine.clipped_sums(of_logits(model, X, None), Batch(X))
        model.merge_adapter()
        with raises_code("engine.adapter-merged"):
            of_logits(model, X, None)
        model.unmerge_adapter()
        engine.clipped_sums(of_logits(model, X, None), Batch(X))


def test_dora_is_refused_until_its_layers_run_per_contribution() -> None:
    """Its gain is divided by the norm of the merged weight, which is computed without the batch axis."""
    model = adapted("llama", "lora", use_dora=True)
    with Engine(model, plan_of(model)) as engine, raises_code("engine.row-owner-unknown"):
        engine.clipped_sums(of_logits(model, X, None), Batch(X))
    layers = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    agree(model, X, losses=of_logits, engine={"per_contribution": layers}, forms=("box",))


# ------------------------------------------------------------------------------- no trace


@pytest.mark.parametrize("kind", ["lora", "prompt", "ia3"])
def test_nothing_is_left_behind(kind: str) -> None:
    model = adapted("llama", kind)
    before = trace_of(model)
    keys = list(model.state_dict())
    with torch.no_grad():
        want = of_logits(model, X, None)
    with Engine(model, plan_of(model)):
        assert list(model.state_dict()) == keys
        twin = copy.deepcopy(model)
        assert all("Patched" not in type(vars(m).get("forward")).__name__ for m in twin.modules())
        torch.testing.assert_close(of_logits(twin, X, None).detach(), want)
        with torch.no_grad():
            torch.testing.assert_close(of_logits(model, X, None), want)
    assert trace_of(model) == before


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_generate_with_a_prompt_while_attached() -> None:
    model = adapted("llama", "prompt").eval()
    prompt = X["input_ids"][:2, :3]

    def text() -> Tensor:
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)

    want = text()
    with Engine(model, plan_of(model, 0.1), noise=SeededNoise(0)) as engine:
        engine.backward(of_logits(model, X, None), Batch(X))
        assert torch.equal(text(), want)


def test_a_prompt_for_one_example_and_for_none() -> None:
    model = adapted("gpt2", "prompt")
    plan = plan_of(model, 0.1)
    one = {"input_ids": X["input_ids"][:1]}
    with torch.no_grad():
        want = of_logits(model, one, None)
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        losses = of_logits(model, one, None)
        torch.testing.assert_close(losses.detach(), want, rtol=1e-4, atol=1e-5)
        engine.backward(losses, Batch(one))
        engine.backward(None, Batch({"input_ids": X["input_ids"][:0]}))
    assert len(X["input_ids"]) == N
