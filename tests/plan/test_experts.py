"""Experts: stacked or in a list, against an experiment that sends every token to one of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from refusals import raises_code
from torch import Tensor, nn

from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import LayerStack
from lamina.plan.selection import PartKind, TensorPart

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as hf
    from peft import LoraConfig, get_peft_model

hf.logging.set_verbosity_error()
SMALL: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=3))


def gpt_oss() -> nn.Module:
    """Experts with biases, and weights the other way round."""
    return hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, num_local_experts=3, head_dim=4, pad_token_id=0))


class Mixture(nn.Module):
    """A list of experts and a router of its own."""

    def __init__(self, experts: int = 3, *, alike: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(4, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5 if alike or i else 6), nn.Tanh(), nn.Linear(5 if alike or i else 6, 4))
            for i in range(experts)
        )
        self.shared_expert = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        part = torch.softmax(self.gate(x), -1)
        told = torch.stack([expert(x) for expert in self.experts], -1)
        y: Tensor = self.shared_expert(x) + (told * part[..., None, :]).sum(-1)
        return y


def told_by_one(model: nn.Module, group: str, expert: int) -> Tensor:
    """What the experts answer if every token goes to one of them."""
    module = model.get_submodule(group)
    tokens = torch.linspace(-1, 1, 40).reshape(5, 8)
    index = torch.full((5, 1), expert)
    answer: Tensor = module(tokens, index, torch.ones(5, 1))
    return answer


def told_by_list(model: nn.Module, group: str, expert: int) -> Tensor:
    gate = model.get_submodule(group.rpartition(".")[0]).gate
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.fill_(-1e9)
        gate.bias[expert] = 0.0
    answer: Tensor = model(torch.linspace(-1, 1, 20).reshape(5, 4))
    return answer


def users(part: TensorPart) -> Iterator[tuple[int, set[int]]]:
    for first, stop, who in part.pieces:
        for place in range(first, stop):
            yield place, set(who)


@pytest.mark.parametrize(
    ("make", "ask", "count"),
    [(mixtral, told_by_one, 4), (gpt_oss, told_by_one, 8), (lambda: nn.Sequential(Mixture()), told_by_list, 12)],
)
def test_a_place_belongs_to_the_expert_that_it_serves(
    make: Callable[[], nn.Module], ask: Callable[[nn.Module, str, int], Tensor], count: int
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    for name, tensor in model.named_parameters():
        if "expert" in name:
            nn.init.normal_(tensor)
    parts = [part for part in LayerStack.from_model(model).parts if part.kind is PartKind.EXPERTS]
    assert len(parts) == count
    with torch.no_grad():
        for part in parts:
            assert part.count == 3
            assert {place for place, _ in users(part)} == set(range(part.length))
            tensor = model.get_parameter(part.tensor)
            before = [ask(model, part.group, e) for e in range(3)]
            for place, who in users(part):
                kept = tensor.clone()
                tensor.select(part.axis, place).add_(0.5)
                after = [ask(model, part.group, e) for e in range(3)]
                tensor.copy_(kept)
                assert {e for e in range(3) if not torch.equal(before[e], after[e])} == who


def test_the_router_belongs_to_no_expert() -> None:
    stack = LayerStack.from_model(mixtral())
    reach = DepthProfile.all().only(experts=[2]).reach(stack)
    names = [layer.name for layer, reached in zip(stack, reach.layers, strict=True) if reached]
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert {(o.axis, o.length, o.ranges) for o in reach.openings} == {(0, 3, ((2, 3),))}
    others = DepthProfile.all().only(experts=[2], others=True).reach(stack)
    assert all(others.layers)  # the router is one of the others
    assert len(others.openings) == 4
    both = DepthProfile.blocks(0, 0).only(heads=[0, 1], experts=[0, 1]).reach(stack)
    names = [layer.name for layer, reached in zip(stack, both.layers, strict=True) if reached]
    assert names == [
        f"model.layers.0.{name}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.experts")
    ]


def test_an_expert_of_a_list_is_reached_with_its_own_layers() -> None:
    stack = LayerStack.from_model(nn.Sequential(Mixture(), Mixture()))
    reach = DepthProfile.all().only(experts={"0": [1], "1": [0, 2]}).reach(stack)
    assert not reach.openings
    assert [layer.name for layer, reached in zip(stack, reach.layers, strict=True) if reached] == [
        "0.experts.1.0", "0.experts.1.2", "1.experts.0.0", "1.experts.0.2", "1.experts.2.0", "1.experts.2.2",
    ]  # fmt: skip
    block = LayerStack.from_model(nn.Sequential(Mixture()), group={"all of it": ["0"]})
    (one,) = (o for o in DepthProfile.all().only(experts=[1]).reach(block).openings if "gate.weight" in o.tensor)
    assert one.ranges == ()


def test_what_peft_lays_around_stacked_experts_belongs_to_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(mixtral(), LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"]))  # type: ignore[arg-type]
    stack = LayerStack.from_model(model)  # type: ignore[arg-type]
    assert any("lora_A" in part.tensor for part in stack.parts)
    with raises_code("plan.profile-reaches-nothing"):
        DepthProfile.all().only(experts=[0]).reach(stack)
    with raises_code("plan.profile-reaches-nothing"):
        DepthProfile.all().only(experts=[0], others=True).reach(stack)


class Stack(nn.Module):
    """Experts stacked in tensors, with a router beside them and no name that says so."""

    def __init__(self, router: bool = True) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.zeros(3, 4, 5)), nn.Parameter(torch.zeros(3, 5))
        self.down = nn.Parameter(torch.zeros(3, 5, 4))
        if router:
            self.route = nn.Parameter(torch.zeros(3, 4))


class Told(Stack):
    lamina_experts = 3


def test_a_model_may_declare_its_experts() -> None:
    model = nn.Sequential(Stack())
    with raises_code("plan.parts-missing"):
        DepthProfile.all().only(experts=[0]).reach(LayerStack.from_model(model))
    for stack in (LayerStack.from_model(model, experts={"0": 3}), LayerStack.from_model(nn.Sequential(Told()))):
        found = {o.tensor: o.ranges for o in DepthProfile.all().only(experts=[0, 1]).reach(stack).openings}
        places = ((0, 2),)
        assert found == {"0.up": places, "0.up_bias": places, "0.down": places, "0.route": ()}
    plain = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    told = LayerStack.from_model(plain, experts={"0": 3})
    assert DepthProfile.all().only(experts=[2]).resolve(told) == (False, False, True)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"0": 4}, "plan.parts-declaration-wrong"),
        ({"0": -1}, "plan.parts-declaration-wrong"),
        ({"0": True}, "plan.parts-declaration-wrong"),
        ({"nothing": 3}, "plan.declaration-unmatched"),
    ],
)
def test_a_wrong_declaration_is_refused(experts: Any, message: str) -> None:
    with raises_code(message):
        LayerStack.from_model(nn.Sequential(Stack()), experts=experts)


class StrangeExperts(nn.Module):
    """All experts in one matrix: nobody knows which rows are whose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 4))


def test_experts_that_are_not_understood_are_refused_where_they_matter() -> None:
    uneven = nn.Sequential(Mixture(alike=False), Mixture())
    stack = LayerStack.from_model(uneven)
    assert [(entry.module, entry.why) for entry in stack.unread] == [("0.experts", "its experts are not alike")]
    with raises_code("plan.parts-unknown"):
        DepthProfile.all().only(experts=[0], others=True).reach(stack)
    assert sum(DepthProfile.all().only(experts=[0]).resolve(stack)) == 2
    assert sum(
        DepthProfile.all().only(experts=[0], others=True).resolve(LayerStack.from_model(uneven, experts={"0": 0}))
    ) == (8 + 2 + 2)
    strange = LayerStack.from_model(nn.Sequential(StrangeExperts(), Mixture()))
    with raises_code("plan.parts-unknown"):
        DepthProfile.all().only(experts=[0], others=True).reach(strange)
    wrong = Mixture()
    wrong.num_experts = 4  # type: ignore[assignment]
    assert "3 modules where 4 experts are stated" in LayerStack.from_model(nn.Sequential(wrong)).unread[0].why


def test_numbers_that_are_not_there_are_refused() -> None:
    stack = LayerStack.from_model(mixtral())
    with raises_code("plan.parts-out-of-range"):
        DepthProfile.all().only(experts=[3]).reach(stack)
    assert "experts: model.layers.0.mlp.experts 3, model.layers.1.mlp.experts 3" in str(stack)
