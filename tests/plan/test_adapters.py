"""Adapters: which tensors are theirs, which adapter it is, and what a profile that is bound to one reaches."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from refusals import raises_code
from torch import nn

from lamina.plan.adapters import VOLATILE_CONFIG_FIELDS, config_digest
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import LayerStack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as hf
    from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, get_peft_model, get_peft_model_state_dict

hf.logging.set_verbosity_error()


def gpt2() -> Any:
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=13, n_embd=8, n_layer=2, n_head=2, n_positions=8, **tokens))


def llama() -> Any:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=13, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def adapted(base: Any, config: Any, name: str = "default") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(base, config, adapter_name=name)


CASES: dict[str, tuple[Any, Any]] = {
    "lora on gpt2": (gpt2, lambda: LoraConfig(r=2, target_modules=["c_attn"])),
    "lora on llama": (llama, lambda: LoraConfig(r=2, target_modules=["q_proj", "down_proj"])),
    "dora, embedding, saved head": (
        llama,
        lambda: LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], use_dora=True, modules_to_save=["lm_head"]),
    ),
    "prefix tuning": (gpt2, lambda: PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
    "prefix tuning, projected": (
        gpt2,
        lambda: PrefixTuningConfig(
            num_virtual_tokens=3, task_type="CAUSAL_LM", prefix_projection=True, encoder_hidden_size=4
        ),
    ),
    "prompt encoder": (
        gpt2,
        lambda: PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM", encoder_hidden_size=4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_has_the_tensors_that_peft_saves_for_it(case: str) -> None:
    base, config = CASES[case]
    model = adapted(base(), config())
    model.requires_grad_(True)  # also the base, which the profile must leave alone
    if "prompt" not in case and "prefix" not in case:
        saved = {value.data_ptr() for value in get_peft_model_state_dict(model, save_embedding_layers=False).values()}
    else:
        saved = {value.data_ptr() for value in model.prompt_encoder.parameters()}
    stack = LayerStack.from_model(model)
    (adapter,) = stack.adapters
    assert {model.get_parameter(name).data_ptr() for name in adapter.tensors} == saved
    reach = DepthProfile.adapter("default").reach(stack)
    reached = {name for layer, kept in zip(stack, reach.layers, strict=True) if kept for name in layer.parameters} - {
        o.tensor for o in reach.openings if not o.ranges
    }
    assert reached == set(adapter.tensors)
    assert reach.words == f"adapter default ({adapter.config[:12]})"
    one = LayerStack.from_model(model, group={"everything": ["*"]})
    (whole,) = (DepthProfile.adapter("default").reach(one),)
    assert {o.tensor for o in whole.openings} == set(one.layers[0].parameters) - set(adapter.tensors)
    assert all(o.ranges == () for o in whole.openings)


def test_one_adapter_of_two() -> None:
    model = adapted(gpt2(), LoraConfig(r=2, target_modules=["c_attn"]), "ecg")
    model.add_adapter("eeg", LoraConfig(r=3, target_modules=["c_attn"]))
    stack = LayerStack.from_model(model)
    ecg, eeg = stack.adapters
    assert ecg.config != eeg.config and ecg.kind == "LORA"
    with raises_code("plan.adapter-frozen"):
        DepthProfile.adapter("eeg").reach(stack)
    model.requires_grad_(True)
    stack = LayerStack.from_model(model)
    reach = DepthProfile.adapter("eeg").reach(stack)
    names = [layer.name for layer, kept in zip(stack, reach.layers, strict=True) if kept]
    assert len(names) == 4 and all(".eeg" in name for name in names)
    with raises_code("plan.adapter-missing"):
        DepthProfile.adapter("emg").reach(stack)
    with raises_code("plan.adapter-missing"):
        DepthProfile.adapter("ecg").reach(LayerStack.from_model(gpt2()))


def test_an_adapter_and_some_of_its_heads() -> None:
    model = adapted(llama(), LoraConfig(r=2, target_modules=["q_proj", "k_proj", "o_proj"]))
    stack = LayerStack.from_model(model)
    reach = DepthProfile.adapter("default").only(heads=[0]).reach(stack)
    found = {o.tensor.removeprefix("base_model.model.model."): (o.axis, o.ranges) for o in reach.openings}
    assert found["layers.1.self_attn.q_proj.lora_B.default.weight"] == (0, ((0, 2),))
    assert found["layers.1.self_attn.o_proj.lora_A.default.weight"] == (1, ((0, 2),))
    assert sum(reach.layers) == 4  # what all heads share is out: A of queries, B of the output, keys
    others = DepthProfile.adapter("default").only(heads=[0], others=True).reach(stack)
    assert others.layers == reach.layers


def test_a_transformers_model_with_an_adapter_of_its_own() -> None:
    model = gpt2()
    model.add_adapter(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True), "mine")
    stack = LayerStack.from_model(model)
    assert [adapter.name for adapter in stack.adapters] == ["mine"]
    assert sum(DepthProfile.adapter("mine").resolve(stack)) == 4
    assert "adapter mine: LORA, config " in str(stack)


# ----------------------------------------------------------------------------------------------- identity

CODE = """
import sys, warnings
warnings.simplefilter("ignore")
from peft import LoraConfig
from lamina.plan.adapters import config_digest
print(config_digest(LoraConfig(r=4, target_modules=["v_proj", "q_proj", "o_proj"], modules_to_save=["lm_head"])))
"""


@pytest.mark.slow
def test_the_same_configuration_has_the_same_digest_in_every_process() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", CODE],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    config = LoraConfig(r=4, target_modules=["o_proj", "q_proj", "v_proj"], modules_to_save=["lm_head"])
    assert seen == {config_digest(config) + "\n"}


def test_what_belongs_to_the_identity_and_what_does_not() -> None:
    base = config_digest(LoraConfig(r=4, target_modules=["q_proj"]))
    assert len(base) == 64
    for change in (
        {"r": 8}, {"target_modules": ["k_proj"]}, {"lora_alpha": 3}, {"use_dora": True}, {"lora_dropout": 0.5},
        {"bias": "all"}, {"rank_pattern": {"q_proj": 2}},
    ):  # fmt: skip
        assert config_digest(LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **change})) != base
    volatile = {"inference_mode": True, "base_model_name_or_path": "/somewhere/else", "revision": "main"}
    assert config_digest(LoraConfig(r=4, target_modules=["q_proj"], **volatile)) == base
    assert set(volatile) < set(VOLATILE_CONFIG_FIELDS)
    kept = json.loads(json.dumps({"r": 4, "peft_version": "1.0", "nothing": None}))
    assert config_digest(kept) == config_digest({"r": 4})
    assert config_digest({"scale": float("inf"), "dtype": torch.float16}) != config_digest({"scale": 1.0})
    with raises_code("plan.adapter-config-not-canonical"):
        config_digest({"thing": object()})


def test_a_policy_may_pin_the_configuration_and_the_scope() -> None:
    stack = LayerStack.from_model(adapted(gpt2(), LoraConfig(r=2, target_modules=["c_attn"])))
    config = stack.adapters[0].config
    profile = DepthProfile.parse({"adapter": {"name": "default", "config": config, "scope": "ward-7/ecg"}})
    assert profile.reach(stack).words == f"adapter default ({config[:12]}, for ward-7/ecg)"
    assert str(profile) == profile.reach(stack).words
    other = LayerStack.from_model(adapted(gpt2(), LoraConfig(r=3, target_modules=["c_attn"])))
    with raises_code("plan.adapter-config-differs"):
        profile.reach(other)
    free = DepthProfile.adapter("default", scope="ward-7/ecg")
    assert free.described_by(free.reach(stack).words) and free.described_by(free.reach(other).words)
    assert not free.described_by(DepthProfile.adapter("default").reach(stack).words)
    assert not profile.described_by(free.reach(other).words)


class Odd:
    """A configuration with something in it that has no text."""

    peft_type = "LORA"

    def to_dict(self) -> dict[str, object]:
        return {"peft_type": "LORA", "hook": lambda: None}


def test_a_configuration_without_a_text_is_refused_only_where_it_matters() -> None:
    model = gpt2()
    model.add_adapter(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True), "mine")
    model.peft_config = {"mine": Odd()}
    stack = LayerStack.from_model(model)
    assert all(DepthProfile.all().resolve(stack))
    with raises_code("plan.adapter-config-not-canonical"):
        DepthProfile.adapter("mine").reach(stack)


def test_two_adapters_of_one_name_are_refused() -> None:
    pair = nn.ModuleList(adapted(gpt2(), LoraConfig(r=r, target_modules=["c_attn"])) for r in (2, 3))
    with raises_code("plan.adapter-ambiguous"):
        DepthProfile.adapter("default").reach(LayerStack.from_model(pair))
