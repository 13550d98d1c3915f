"""What a private LoRA step costs: processor time beside the plain LoRA step of the same model, in one run.

    python benchmarks/lora.py [--rounds 15] [--model gpt2|llama] [--tokens 64] [--batch 16] [--json]

One thread. Rounds are interleaved: in each, every variant takes one step, and its processor time is divided by that of the plain
step of the same round. Printed are the median of these ratios and the middle half. The base is frozen, so the plain step has no
gradients of base weights to form, and what a private step adds has little to hide behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import nn

from lamina import Batch, Engine, LayerStack, Policy, make_plan
from lamina.integrations.tokens import TokenLoss

WORDS = 1000
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "llama": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def lora(options: argparse.Namespace) -> Any:
    """A base with random weights under LoRA, the same each time."""
    torch.manual_seed(0)
    name, width, layers = options.model, options.width, options.layers
    if name == "gpt2":
        base: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=WORDS,
                n_embd=width,
                n_layer=layers,
                n_head=8,
                n_positions=512,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=1,
            )
        )
    else:
        base = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=WORDS,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=8,
                num_key_value_heads=4,
            )
        )
    base.config.use_cache = False
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=options.rank, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2"
    )
    return peft.get_peft_model(base, config).train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


def plain(model: Any, x: dict[str, torch.Tensor], y: torch.Tensor) -> Callable[[], None]:
    optimizer, loss = adamw(model), TokenLoss()

    def step() -> None:
        loss(model(**x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def private(model: Any, x: dict[str, torch.Tensor], y: torch.Tensor, clipping: str) -> Callable[[], None]:
    one = {"population": 100 * len(y), "clip_norm": 1.0, "noise_multiplier": 1.0}
    policy = Policy.from_dict({"corpus": {"origin": "benchmark", "delta": 1e-5}, "class": {"everyone": one}})
    plan = make_plan(LayerStack.from_model(model), policy, batch=len(y), steps=10_000, clipping=clipping)
    engine, optimizer, loss = Engine(model, plan), adamw(model), TokenLoss()
    engine.decline_probe()

    def step() -> None:
        batch = Batch(x, y)
        engine.backward(loss(model(**x), y), batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(model: Any, x: dict[str, torch.Tensor], y: torch.Tensor) -> Callable[[], None]:
    """Opacus with hooks, flat clipping. Its rule for the transposed layers of GPT-2 is not needed: they are frozen."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    hooked = GradSampleModule(model, strict=False)
    optimizer = DPOptimizer(adamw(hooked), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(y))
    loss = TokenLoss()

    def step() -> None:
        loss(hooked(**x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """By variant: processor seconds of a step, one for each round."""
    for step in steps.values():
        step()
        step()  # who owns which row is looked at in the first two steps
    found: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            found[name].append(time.process_time() - begin)
        gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=TARGETS, default="llama")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ids = torch.randint(1, WORDS, (options.batch, options.tokens), generator=torch.Generator().manual_seed(1))
    mask = (
        torch.arange(options.tokens) < torch.linspace(options.tokens // 2, options.tokens, options.batch)[:, None]
    ).long()
    x, y = {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)
    steps = {
        "plain": plain(lora(options), x, y),
        "box": private(lora(options), x, y, "box"),
        "joint": private(lora(options), x, y, "joint"),
    }
    try:
        steps["opacus_hooks"] = opacus(lora(options), x, y)
        steps["opacus_hooks"]()
    except Exception as error:  # whatever it cannot do is told, and the rest measured
        steps.pop("opacus_hooks", None)
        print(f"Opacus does not run this model: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    seconds = measure(steps, options.rounds)
    result = {}
    for name, own in seconds.items():
        ratios = sorted(mine / base for mine, base in zip(own, seconds["plain"], strict=True))
        quarter = len(ratios) // 4
        result[name] = {
            "ratio": round(statistics.median(ratios), 3),
            "middle_half": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
            "milliseconds": round(1000 * statistics.median(own), 1),
        }
    if options.json:
        print(json.dumps({"options": vars(options), "steps": result}, indent=2))
        return
    for name, row in result.items():
        print(f"{name:14s} {row['ratio']:6.3f} {row['middle_half']} {row['milliseconds']} ms")


if __name__ == "__main__":
    main()
