"""Layers, blocks, depth: what a model is cut into."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lamina.allocate.make_plan import make_plan
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.selection import ROOT
from lamina.plan.step_plan import StepPlan


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


def names(stack: LayerStack) -> list[str]:
    return [layer.name for layer in stack]


def test_weight_and_bias_of_a_module_are_one_layer() -> None:
    stack = LayerStack.from_model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)))
    assert names(stack) == ["0", "2"]
    assert stack.layers[0].parameters == ("0.weight", "0.bias")
    assert [layer.size for layer in stack] == [16, 8]
    assert [layer.depth for layer in stack] == [0.0, 1.0]
    assert stack.size == 24


def test_composite_children_of_a_stack_are_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(Residual(4) for _ in range(3)), nn.Linear(4, 2))
    stack = LayerStack.from_model(model)
    assert stack.blocks == ("1", "2", "3")
    assert names(stack)[:4] == ["0", "1.norm", "1.body.0", "1.body.2"]
    assert [layer.block for layer in stack] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert LayerStack.from_model(model, "block").blocks == stack.blocks
    assert names(LayerStack.from_model(model, "block")) == ["0", "1", "2", "3", "4"]


def test_small_nested_sequential_is_a_block_and_a_large_one_is_looked_through() -> None:
    small = nn.Sequential(nn.Conv1d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU())
    large = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert LayerStack.from_model(nn.Sequential(small, large)).blocks == ("0", "1.0", "1.2")


def test_module_list_and_dict_are_containers() -> None:
    model = nn.Module()
    model.stack = nn.ModuleList(Residual(2) for _ in range(2))
    model.heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": Residual(2)})
    stack = LayerStack.from_model(model, "block")
    assert names(stack) == ["stack.0", "stack.1", "heads.a", "heads.b"]
    assert stack.blocks == ("stack.0", "stack.1")  # repeated; the heads come after them
    assert [layer.spans for layer in stack] == [((0, 1),), ((1, 2),), ((2, 2),), ((2, 2),)]


def test_bare_parameters_are_layers_of_their_module() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.token = nn.Parameter(torch.zeros(1, 2))

    stack = LayerStack.from_model(Tokens())
    assert names(stack) == [ROOT, "inner"]
    assert stack.layers[0].parameters == ("token",)


def test_a_single_block_is_the_output() -> None:
    (layer,) = LayerStack.from_model(nn.Linear(2, 2)).layers
    assert (layer.name, layer.depth, layer.spans) == (ROOT, 1.0, ((0, 1),))


def test_frozen_tensors_are_no_layers_but_their_blocks_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    stack = LayerStack.from_model(model)
    assert names(stack) == ["1", "2"]
    assert stack.frozen == ("0.weight", "0.bias", "1.bias")
    assert [layer.depth for layer in stack] == [0.5, 1.0]


def test_tied_modules_are_one_layer_used_at_both_ends() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    model[2].weight = model[0].weight
    stack = LayerStack.from_model(model)
    assert names(stack) == ["0", "1"]
    tied = stack.layers[0]
    assert tied.parameters == ("0.weight", "2.bias")
    assert tied.aliases == ("2.weight",)
    assert tied.spans == ((0, 1), (2, 3))
    assert tied.size == 15 + 5
    assert len(stack.blocks) == 3


def test_one_module_registered_twice_is_used_twice() -> None:
    shared = nn.Linear(2, 2)
    stack = LayerStack.from_model(nn.Sequential(shared, nn.Linear(2, 2), shared))
    assert stack.layers[0].spans == ((0, 1), (2, 3))
    assert stack.layers[0].parameters == ("0.weight", "0.bias")
    traced = LayerStack.from_model(nn.Sequential(shared, nn.Linear(2, 2), shared), example=torch.zeros(1, 2))
    assert traced == stack


def test_ties_in_a_chain_join_all_modules() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model[1].weight = model[0].weight
    model[3].bias = model[1].bias
    stack = LayerStack.from_model(model)
    assert names(stack) == ["0", "2"]
    assert stack.layers[0].spans == ((0, 2), (3, 4))


def test_parametrised_weight_stays_with_its_module() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    stack = LayerStack.from_model(model)
    assert names(stack) == ["0", "1"]
    assert len(stack.layers[0].parameters) == 3


class Backwards(nn.Module):
    """Registers its layers in the opposite order of use, and uses the first again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2)
        self.first = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        self.calls += 1
        x = self.last(self.dropout(self.first(x)))
        return self.first(x) if again else x


def test_example_gives_the_order_of_execution_and_leaves_no_trace() -> None:
    model = Backwards()
    model.dropout.eval()
    assert names(LayerStack.from_model(model)) == ["last", "first"]
    state = torch.get_rng_state()
    stack = LayerStack.from_model(model, example=torch.zeros(1, 2))
    assert names(stack) == ["first", "last"]
    assert [layer.depth for layer in stack] == [0.0, 1.0]
    assert model.calls == 0
    assert model.training
    assert not model.dropout.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "example", [(torch.zeros(1, 2), True), {"x": torch.zeros(1, 2), "again": True}], ids=["tuple", "dict"]
)
def test_example_shows_a_module_that_is_called_again(example: object) -> None:
    stack = LayerStack.from_model(Backwards(), example=example)
    assert stack.layers[0].spans == ((0, 2),)
    assert stack.layers[1].spans == ((1, 2),)


def test_modules_that_never_run_themselves_keep_with_their_parent() -> None:
    model = nn.Module()
    model.out = nn.Linear(4, 1)
    model.attention = nn.MultiheadAttention(4, 2)
    model.forward = lambda x: model.out(model.attention(x, x, x)[0])  # type: ignore[method-assign]
    stack = LayerStack.from_model(model, example=torch.zeros(3, 1, 4))
    assert names(stack) == ["attention", "attention.out_proj", "out"]


def test_failing_example_is_refused_and_hooks_are_gone() -> None:
    model = Backwards().train()
    with raises_code("plan.example-failed"):
        LayerStack.from_model(model, example=torch.zeros(1, 7))
    assert model.training
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_grouping_by_hand() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    stack = LayerStack.from_model(model, {"ends": ["0", "3.weight"], "middle": ["[12].*"]})
    assert names(stack) == ["ends", "middle", "3"]
    assert stack.layers[0].parameters == ("0.weight", "0.bias", "3.weight")
    assert stack.layers[0].spans == ((0, 1), (3, 4))
    assert stack.layers[1].spans == ((1, 3),)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("layers", "plan.group-unknown"),
        ({"a": ["encodr.*"]}, "plan.group-pattern-unmatched"),
        ({"a": ["encoder.*"], "b": ["encoder.0"]}, "plan.groups-overlap"),
        ({"encoder.0": ["encoder.0.weight"]}, "plan.group-named-like-module"),
        ({"a": "encoder.*"}, "plan.group-patterns"),
        ({"a": []}, "plan.group-patterns"),
        ({"a": ["head"]}, "plan.group-pattern-unmatched"),
    ],
)
def test_bad_groups_are_refused(group: object, message: str) -> None:
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model.add_module("head", nn.Linear(2, 2).requires_grad_(False))
    with raises_code(message):
        LayerStack.from_model(model, group)  # type: ignore[arg-type]


def test_what_cannot_be_clipped_is_refused() -> None:
    with raises_code("plan.tensor-lazy"):
        LayerStack.from_model(nn.Sequential(nn.LazyLinear(3)))
    with raises_code("plan.nothing-trainable"):
        LayerStack.from_model(nn.Linear(2, 2).requires_grad_(False))
    with raises_code("plan.tensor-not-real"):
        LayerStack.from_model(nn.Linear(2, 2, dtype=torch.complex64))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with raises_code("plan.tensors-share-memory"):
        LayerStack.from_model(model)


def test_text_names_every_layer() -> None:
    text = str(LayerStack.from_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).requires_grad_(False))))
    assert "frozen: 2 tensors" in text
    assert len(text.splitlines()) == 3


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Nests of containers and blocks, some frozen, some tied."""

    def module(level: int) -> nn.Module:
        kind = draw(st.sampled_from(["linear", "norm", "relu", "residual", "sequential", "list"]))
        if kind in ("sequential", "list") and level:
            inner = [module(level - 1) for _ in range(draw(st.integers(1, 3)))]
            return nn.Sequential(*inner) if kind == "sequential" else nn.ModuleList(inner)
        kinds = {"norm": nn.LayerNorm(3), "relu": nn.ReLU(), "residual": Residual(3)}
        return kinds.get(kind, nn.Linear(3, 3))

    model = nn.Sequential(nn.Linear(3, 3), *(module(2) for _ in range(draw(st.integers(1, 4)))))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for m in linears[1:]:
        what = draw(st.sampled_from(["free", "free", "frozen", "tied"]))
        if what == "frozen":
            m.requires_grad_(False)
        elif what == "tied":
            m.weight = linears[0].weight
    return model


@given(models(), st.sampled_from(["module", "block"]))
@settings(max_examples=60, deadline=None)
def test_every_trainable_tensor_is_in_exactly_one_layer(model: nn.Module, group: str) -> None:
    stack = LayerStack.from_model(model, group)
    named = dict(model.named_parameters())
    listed = [name for layer in stack for name in layer.parameters]
    assert sorted(listed) == sorted(name for name, p in named.items() if p.requires_grad)
    assert sorted(stack.frozen) == sorted(name for name, p in named.items() if not p.requires_grad)
    for layer in stack:
        assert layer.size == sum(named[name].numel() for name in layer.parameters)
        assert layer.spans[0][0] == layer.block
        ends = ((0, 0), (len(stack.blocks), len(stack.blocks)))
        assert all(0 <= span[0] < span[1] <= len(stack.blocks) or span in ends for span in layer.spans)
    assert [layer.block for layer in stack] == sorted(layer.block for layer in stack)
    assert len(set(names(stack))) == len(stack)


@pytest.mark.filterwarnings("ignore")
def test_transformers_are_cut_into_their_blocks() -> None:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    ids = torch.zeros(1, 4, dtype=torch.long)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    stack = LayerStack.from_model(gpt2, "block", example=ids)
    assert stack.blocks == ("transformer.h.0", "transformer.h.1", "transformer.h.2")
    assert [layer.spans for layer in stack] == [
        ((0, 0), (3, 3)), ((0, 0),), ((0, 1),), ((1, 2),), ((2, 3),), ((3, 3),),
    ]  # fmt: skip
    assert stack.layers[0].aliases == ("lm_head.weight",)

    bert = BertForMaskedLM(
        BertConfig(
            vocab_size=50,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
    )
    stack = LayerStack.from_model(bert, "block", example={"input_ids": ids})
    assert [name for name in stack.blocks if "encoder" in name] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    tied = next(layer for layer in stack if "cls.predictions.decoder.weight" in layer.aliases)
    assert tied.depth == 0.0
    assert tied.spans[-1][1] == len(stack.blocks)


# --------------------------------------------------------------------------- depth counts repeated blocks


class Tower(nn.Module):
    """An embedding, residual blocks, a norm; perhaps a layer between the blocks."""

    def __init__(self, blocks: int, *, between: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(Residual(2) for _ in range(blocks))
        if between is not None:
            self.layers.insert(between, nn.Linear(2, 2))
        self.norm = nn.LayerNorm(2)


def reached(model: nn.Module, profile: DepthProfile, **options: Any) -> list[str]:
    stack = LayerStack.from_model(model, "block", **options)
    return [layer.name for layer, inside in zip(stack, profile.resolve(stack), strict=True) if inside]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
def test_a_quarter_of_twelve_transformer_blocks_is_three_with_norm_and_head(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=12, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    blocks = [f"model.layers.{i}" for i in range(12)]
    head = [] if tied else ["lm_head"]  # a tied head is used at depth 0 too
    assert reached(model, DepthProfile.top(0.25)) == [*blocks[9:], "model.norm", *head]
    assert reached(model, DepthProfile.top(0.05)) == ["model.norm", *head]
    assert reached(model, DepthProfile.blocks(10, -1)) == [*blocks[10:], "model.norm", *head]
    low = [] if tied else ["model.embed_tokens"]
    assert reached(model, DepthProfile.band(0, 0.25)) == [*low, *blocks[:3]]
    assert len(reached(model, DepthProfile.band(0, 1))) == 14 + (not tied)


def test_what_lies_between_repeated_blocks_belongs_to_the_one_before() -> None:
    model = Tower(4, between=2)
    assert reached(model, DepthProfile.top(0.5)) == ["layers.3", "layers.4", "norm"]
    assert reached(model, DepthProfile.band(0, 0.5)) == ["embed", "layers.0", "layers.1", "layers.2"]


def test_stages_of_one_module_are_counted_through() -> None:
    model = nn.Module()
    model.stem = nn.Linear(2, 2)
    for stage in ("a", "b"):
        setattr(model, stage, nn.Sequential(Residual(2), Residual(2)))
    model.head = nn.Linear(2, 2)
    assert LayerStack.from_model(model).blocks == ("a.0", "a.1", "b.0", "b.1")
    assert reached(model, DepthProfile.top(0.5)) == ["b.0", "b.1", "head"]


def test_an_encoder_and_its_decoder_are_one_depth() -> None:
    model = nn.Module()
    model.encoder, model.decoder = Tower(2), Tower(2)
    assert reached(model, DepthProfile.top(0.5)) == ["decoder.layers.0", "decoder.layers.1", "decoder.norm"]


def towers(vision: int, language: int) -> nn.Module:
    model = nn.Module()
    model.vision = Tower(vision)
    model.between = nn.Linear(2, 2)
    model.language = Tower(language)
    model.head = nn.Linear(2, 2)
    return model


def test_towers_have_depths_of_their_own() -> None:
    """What lies between two towers is at no depth in particular: only the whole model holds it."""
    model = towers(4, 2)
    assert reached(model, DepthProfile.top(0.5)) == [
        "vision.layers.2", "language.layers.1", "vision.layers.3", "vision.norm", "language.norm", "head",
    ]  # fmt: skip
    assert set(reached(model, DepthProfile.band(0, 0.25))) == {"vision.embed", "language.embed", "vision.layers.0"}
    assert "between" in reached(model, DepthProfile.band(0, 1))
    assert "vision.layers.1" in reached(towers(3, 3), DepthProfile.blocks(1, 1))
    with raises_code("plan.profile-blocks-of-towers"):
        reached(model, DepthProfile.blocks(1, 1))


def test_without_repeated_blocks_depth_counts_all_as_before() -> None:
    alternating = nn.Sequential(nn.Linear(2, 2), Residual(2), nn.Linear(2, 2), Residual(2), nn.Linear(2, 2))
    assert LayerStack.from_model(alternating).blocks == ("0", "1", "2", "3", "4")


def test_a_plan_names_the_first_block_that_a_class_reaches() -> None:
    policy = Policy.parse(
        '[corpus]\norigin = "t"\ndelta = 1e-5\n[class.a]\npopulation = 100\nepsilon = 1.0\nprofile = { top = 0.25 }\n'
        "[class.b]\npopulation = 100\nepsilon = 1.0\n"
    )
    plan = make_plan(LayerStack.from_model(Tower(8)), policy, batch=10, steps=2)
    assert "top 25 %, from layers.6" in str(plan)
    assert StepPlan.from_cbor(plan.to_cbor()) == plan
    alone = make_plan(LayerStack.from_model(Tower(3)), policy, batch=10, steps=2)
    assert "top 25 %, from norm" in str(alone)


@pytest.mark.parametrize("spans", [((2, 2),), ((0, 0), (0, 1)), ((8, 8), (0, 0)), ((9, 9),), ((7, 8), (8, 8))])
def test_a_plan_refuses_spans_that_no_stack_has(spans: Any) -> None:
    policy = Policy.parse('[corpus]\norigin = "t"\ndelta = 1e-5\n[class.b]\npopulation = 100\nepsilon = 1.0\n')
    plan = make_plan(LayerStack.from_model(Tower(8)), policy, batch=10, steps=2)
    layers = (dataclasses.replace(plan.layers[0], spans=spans), *plan.layers[1:])
    with raises_code("plan.spans-out-of-range", "plan.depth-differs"):
        dataclasses.replace(plan, layers=layers)
