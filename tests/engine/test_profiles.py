"""From a policy's profile to the step: heads, experts and adapters named in a policy, carried out by the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from by_hand import MODELS, QUIET, Made, gpt2, ids, llama, mixtral, of_logits
from oracle import clip_by_hand, difference, example_grads, unit_grads
from torch import nn

from lamina import Batch, Engine, LayerStack, Policy, SeededNoise, make_plan
from lamina.plan.step_plan import StepPlan

pytestmark = QUIET

# The profile that means what tests/support/by_hand.py has written out as slices.
PROFILES: dict[str, tuple[Callable[[], Made], dict[str, Any]]] = {
    "llama": (MODELS["llama"], {"layers": ["model.layers.1.self_attn.*"], "heads": [2, 3]}),
    "gpt2": (MODELS["gpt2"], {"layers": ["transformer.h.0.attn.*"], "heads": [0, 2]}),
    "bert": (MODELS["bert"], {"layers": ["bert.encoder.layer.0.attention.*"], "heads": [1]}),
    "vit": (MODELS["vit"], {"layers": ["*0.attention.*"], "heads": [1]}),
    "multihead": (MODELS["multihead"], {"all": True, "heads": [1]}),
    "ours": (MODELS["ours"], {"layers": ["decoder.0.*"], "heads": [1]}),
    "mixtral": (mixtral, {"layers": ["model.layers.0.*"], "experts": [1, 3]}),
}


def planned(model: nn.Module, clipping: str = "box", *, clip_norm: float = 0.1, **classes: dict[str, Any]) -> StepPlan:
    common = {"population": 500, "clip_norm": clip_norm, "noise_multiplier": 1.0}
    policy = Policy.from_dict(
        {
            "corpus": {"origin": "test", "delta": 1e-5},
            "class": {name: {**common, "profile": profile} for name, profile in classes.items()},
        }
    )
    return make_plan(LayerStack.from_model(model), policy, batch=8, steps=200, clipping=clipping)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("clipping", ["box", "joint"])
def test_a_profile_is_what_was_written_out_by_hand(name: str, clipping: str) -> None:
    make, profile = PROFILES[name]
    model, x, losses, slices = make()
    plan = planned(model.train(), clipping, everyone={"all": True}, some=profile, top={"top": 0.5})
    mine = {(s.tensor, s.axis, s.ranges) for s in plan.slices if s.cls == "some" and s.ranges}
    assert mine == {(s.tensor, s.axis, s.ranges) for s in slices if s.ranges}
    batch = Batch(x, cls=torch.tensor([0, 1, 2, 1, 1]))
    grads = unit_grads(example_grads(model, x, None, losses), batch)
    ref = clip_by_hand(grads, batch.cls.tolist(), plan)
    with Engine(model, plan) as engine:
        difference(engine.clipped_sums(losses(model, x, None), batch), ref)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_only_the_parts_of_a_profile_move(name: str) -> None:
    make, profile = PROFILES[name]
    model, x, losses, slices = make()
    plan = planned(model.train(), some=profile)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        for batch in (Batch(x), Batch(x)):
            engine.backward(losses(model, x, None), batch)
            optimizer.step()
            optimizer.zero_grad()
    places = {s.tensor: s for s in slices}
    for n, p in model.named_parameters():
        may = torch.zeros(p.shape, dtype=torch.bool)
        if n in places:
            for first, stop in places[n].ranges:
                may.narrow(places[n].axis, first, stop - first).fill_(True)
        assert torch.equal(p[~may], before[n][~may]), n
        assert bool((p[may] != before[n][may]).all()), n


@pytest.mark.parametrize("base", [gpt2, llama], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_an_adapter_and_the_base_it_leaves_alone(base: Callable[[], Made], kind: str) -> None:
    targets = ["c_attn"] if base is gpt2 else ["q_proj", "v_proj"]
    config = (
        peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=targets, fan_in_fan_out=base is gpt2, init_lora_weights=False
        )
        if kind == "lora"
        else peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    model = peft.get_peft_model(base()[0], config).train()
    model.requires_grad_(True)  # reached by no class, and not frozen
    plan = planned(model, some={"adapter": "default"})
    x = {"input_ids": ids()}
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    grads = unit_grads(example_grads(model, x, None, of_logits), Batch(x))
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        ref = clip_by_hand(grads, [0] * 5, plan)
        difference(engine.clipped_sums(of_logits(model, x, None), Batch(x)), ref)
        engine.backward(of_logits(model, x, None), Batch(x))
        optimizer.step()
    for n, p in model.named_parameters():
        adapter = "lora_" in n or "prompt_encoder" in n
        assert bool((p != before[n]).any()) == adapter, n
