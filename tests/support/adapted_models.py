"""Tiny GPT-2 and Llama with random weights under PEFT adapters, and texts of different lengths for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import nn

WORDS = 40
TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "o_proj"]}
FRONT = {"task_type": "CAUSAL_LM"}

CONFIGS: dict[str, Callable[[str], Any]] = {
    "lora": lambda base: peft.LoraConfig(
        **FRONT, r=2, target_modules=TARGETS[base], init_lora_weights=False, fan_in_fan_out=base == "gpt2"
    ),
    "prefix": lambda base: peft.PrefixTuningConfig(**FRONT, num_virtual_tokens=3),
    "ia3": lambda base: peft.IA3Config(
        **FRONT, target_modules=TARGETS[base], feedforward_modules=[], fan_in_fan_out=base == "gpt2"
    ),
}


def base_model(base: str) -> Any:
    """The same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
        if base == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, **special,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(config)
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, **special,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)


def adapted(base: str, kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: nn.Module = peft.get_peft_model(base_model(base), CONFIGS[kind](base))
        if kind == "ia3":  # its scales begin at 1, where all are alike
            with torch.no_grad():
                for p in model.parameters():
                    if p.requires_grad:
                        p += 0.1 * torch.randn_like(p)
    return model.train()


def texts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids, 3 to 12 of them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 13, (count,), generator=generator).tolist()
    return [torch.randint(2, WORDS, (size,), generator=generator).tolist() for size in sizes]
