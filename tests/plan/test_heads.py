"""Heads: every place of every projection, against an experiment that asks the attention itself whom it serves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refusals import raises_code
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from lamina.plan.depth_profile import DepthProfile
from lamina.plan.heads_experts import Heads
from lamina.plan.layer_stack import LayerStack
from lamina.plan.selection import PartKind
from lamina.signals.autoencoders import TransformerAutoencoder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as hf
    from peft import LoraConfig, get_peft_model

hf.logging.set_verbosity_error()
SMALL: dict[str, Any] = {"vocab_size": 13, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2}
IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


def llama(**options: Any) -> nn.Module:
    config = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "attention_bias": True}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**config, **options}, bos_token_id=0, eos_token_id=1))


def gpt2(**options: Any) -> nn.Module:
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=13, n_embd=12, n_layer=2, n_head=3, n_positions=8, **tokens, **options)
    )


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_attention_heads=3, max_position_embeddings=8))


def vit() -> nn.Module:
    options = {**SMALL, "num_attention_heads": 3, "image_size": 4, "patch_size": 2}
    del options["vocab_size"]
    return hf.ViTForImageClassification(hf.ViTConfig(**options))


def mixtral() -> nn.Module:
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "head_dim": 4}
    config = hf.MixtralConfig(**SMALL, **options, bos_token_id=0, eos_token_id=1)
    return hf.MixtralForCausalLM._from_config(config, experts_implementation="eager")


def neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL, num_attention_heads=3, bos_token_id=0, eos_token_id=1))


def phi3() -> nn.Module:
    options = {"num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0}
    return hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL, **options, bos_token_id=0, eos_token_id=1))


def modernbert() -> nn.Module:
    tokens = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}
    return hf.ModernBertForSequenceClassification(hf.ModernBertConfig(**SMALL, **tokens, num_attention_heads=3))


def qwen3() -> nn.Module:
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, **options, bos_token_id=0, eos_token_id=1))


def t5() -> nn.Module:
    options = {"d_model": 12, "d_kv": 4, "d_ff": 10, "num_layers": 2, "num_heads": 3}
    return hf.T5EncoderModel(hf.T5Config(vocab_size=13, **options))


def distilbert() -> nn.Module:
    return hf.DistilBertModel(hf.DistilBertConfig(vocab_size=13, dim=12, hidden_dim=10, n_layers=2, n_heads=3))


def opt() -> nn.Module:
    options = {"ffn_dim": 10, "word_embed_proj_dim": 12, "max_position_embeddings": 8, "pad_token_id": 0}
    del (small := dict(SMALL))["intermediate_size"]
    return hf.OPTForCausalLM(hf.OPTConfig(**small, **options, num_attention_heads=3, bos_token_id=0, eos_token_id=1))


def lora(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """With factors that are not zero, so that each of them matters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(model, LoraConfig(r=2, target_modules=targets, **options))  # type: ignore[arg-type]
    for name, tensor in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(tensor)
    return made  # type: ignore[return-value]


class Multihead(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True, **options)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        keys = x[..., : self.attention.kdim], x[..., : self.attention.vdim]
        y: Tensor = self.head(self.attention(x, *keys, need_weights=False)[0])
        return y


SIGNAL = torch.linspace(-1, 1, 36).reshape(2, 3, 6)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "llama": (llama, IDS, "model.layers.1.self_attn"),
    "llama, one key": (lambda: llama(num_key_value_heads=1), IDS, "model.layers.1.self_attn"),
    "gpt2": (gpt2, IDS, "transformer.h.1.attn"),
    "bert": (bert, IDS, "bert.encoder.layer.1.attention"),
    "vit": (vit, torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4), "vit.layers.1.attention"),
    "mixtral": (mixtral, IDS, "model.layers.1.self_attn"),
    "gpt-neox": (neox, IDS, "gpt_neox.layers.1.attention"),
    "phi3": (phi3, IDS, "model.layers.1.self_attn"),
    "modernbert": (modernbert, IDS, "model.layers.1.attn"),
    "qwen3": (qwen3, IDS, "model.layers.1.self_attn"),
    "t5": (t5, IDS, "encoder.block.1.layer.0.SelfAttention"),
    "distilbert": (distilbert, IDS, "transformer.layer.1.attention"),
    "opt": (opt, IDS, "model.decoder.layers.1.self_attn"),
    "multihead": (Multihead, SIGNAL, "attention"),
    "multihead, other keys": (lambda: Multihead(kdim=4, vdim=5, add_bias_kv=True), SIGNAL, "attention"),
    "multihead, lora": (
        lambda: lora(Multihead(), ["attention"]), SIGNAL, "base_model.model.attention"
    ),
    "our own": (
        lambda: TransformerAutoencoder(6, 3, width=6, layers=2, heads=3, hidden=5, code=2), SIGNAL, "decoder.0"
    ),
    "gpt2, lora": (
        lambda: lora(gpt2(), ["attn.c_attn", "attn.c_proj"]), IDS, "base_model.model.transformer.h.1.attn"
    ),
    "llama, dora": (
        lambda: lora(llama(), ["q_proj", "k_proj", "v_proj", "o_proj"], use_dora=True),
        IDS,
        "base_model.model.model.layers.1.self_attn",
    ),
    "llama, saved": (
        lambda: lora(llama(), ["v_proj"], modules_to_save=["q_proj"]),
        IDS,
        "base_model.model.model.layers.1.self_attn",
    ),
}  # fmt: skip
"""How each is made, what goes in, and its last attention."""


# ------------------------------------------------------------------------------------------- the experiment


class Seen:
    """What attentions are called with, head by head, in the order in which they run; `kept`: only this head answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []
        self.kept: int | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        each = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        self.calls.append((q, k, v))
        y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        if self.kept is None:
            return y
        only = torch.zeros(q.shape[1])
        only[self.kept] = 1
        return y * only[:, None, None]


@contextmanager
def watched() -> Iterator[Seen]:
    seen, usual = Seen(), F.scaled_dot_product_attention
    F.scaled_dot_product_attention = seen.attend
    try:
        yield seen
    finally:
        F.scaled_dot_product_attention = usual


def nudged(tensor: Tensor, axis: int, place: int) -> Iterator[None]:
    """The tensor with other numbers at one place, and then as it was."""
    with torch.no_grad():
        before = tensor.clone()
        there = tensor.select(axis, place)
        there += 0.5 + torch.rand(there.shape)  # no constant: a norm would not see it
        yield
        tensor.copy_(before)


def served(attention: Callable[[], Tensor], tensor: Tensor, axis: int, seen: Seen) -> list[set[int]]:
    """For each place of a tensor, the heads for which it makes a difference.

    Before the attention a difference is one in queries, keys or values of a head. After it, one in the answer when all
    heads but one answer 0.
    """

    def run(kept: int | None) -> tuple[tuple[Tensor, ...], Tensor]:
        seen.calls, seen.kept = [], kept
        answer = attention()
        (call,) = seen.calls
        return call, answer

    before, heads = run(None)[0], range(run(None)[0][0].shape[1])
    usual = {h: run(h)[1] for h in heads}
    found: list[set[int]] = []
    for place in range(tensor.shape[axis]):
        differs: set[int] = set()
        for _ in nudged(tensor, axis, place):
            for old, new in zip(before, run(None)[0], strict=True):
                moved = (old - new).abs().amax((0, 2, 3)) > 1e-6
                differs |= set(torch.nonzero(moved).flatten().tolist())
            if not differs:
                differs = {h for h in heads if float((usual[h] - run(h)[1]).abs().max()) > 1e-6}
        found.append(differs)
    return found


def alone(model: nn.Module, x: Any, path: str) -> Callable[[], Tensor]:
    """A module of the model, called again and again as the model calls it."""
    calls: list[tuple[Any, Any]] = []
    module = model.get_submodule(path)
    hook = module.register_forward_pre_hook(lambda m, args, options: calls.append((args, options)), with_kwargs=True)
    model(x)
    hook.remove()
    ((args, options),) = calls
    options = {key: value for key, value in options.items() if "past" not in key}

    def again() -> Tensor:
        y = module(*args, **options)
        return y[0] if isinstance(y, tuple) else y

    return again


SLOWER = ("qwen3", "t5", "distilbert", "opt", "llama, saved", "llama, one key")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in SLOWER else ()) for name in FAMILIES]
)
def test_a_place_belongs_to_the_heads_that_it_serves(family: str) -> None:
    torch.manual_seed(0)
    make, x, path = FAMILIES[family]
    model = make().double().eval()  # PEFT adds and takes away again, which should leave nothing
    x = x.double() if x.is_floating_point() else x
    for name, tensor in model.named_parameters():
        if name.endswith("bias") or "bias_" in name:
            nn.init.normal_(tensor)  # a bias of 0 may hide something
        tensor.requires_grad_(True)
    parts = [part for part in LayerStack.from_model(model).parts if part.kind is PartKind.HEADS]
    groups = list(dict.fromkeys(part.group for part in parts))
    assert len(groups) == (1 if "multihead" in family else 2)
    with watched() as seen, torch.no_grad():
        attention = alone(model, x, path)
        for part in parts:
            if part.group != groups[-1] or "original_module" in part.tensor:  # PEFT uses its copy instead
                continue
            if family == "multihead, lora" and "lora" not in part.tensor:  # PEFT makes these anew at every call
                continue
            users: list[set[int]] = [set() for _ in range(part.length)]
            for first, stop, who in part.pieces:
                for place in range(first, stop):
                    assert not users[place]
                    users[place] = set(who)
            found = served(attention, model.get_parameter(part.tensor), part.axis, seen)
            if part.pieces:
                assert found == users, part.tensor
            else:  # of no head, because it is of several
                assert all(len(who) > 1 for who in found), part.tensor


# ------------------------------------------------------------------------------------------ what is reached


def openings(profile: DepthProfile, stack: LayerStack) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
    return {o.tensor: (o.axis, o.ranges) for o in profile.reach(stack).openings}


def test_a_key_is_reached_only_with_all_of_its_queries() -> None:
    stack = LayerStack.from_model(llama(attention_bias=False))
    one = openings(DepthProfile.blocks(0, 0).only(heads=[0]), stack)
    assert one == {
        "model.layers.0.self_attn.q_proj.weight": (0, ((0, 4),)),
        "model.layers.0.self_attn.o_proj.weight": (1, ((0, 4),)),
    }
    both = openings(DepthProfile.blocks(0, 0).only(heads=[1, 2, 3]), stack)
    assert both["model.layers.0.self_attn.k_proj.weight"] == (0, ((4, 8),))
    assert both["model.layers.0.self_attn.q_proj.weight"] == (0, ((4, 16),))
    alone = LayerStack.from_model(llama(num_key_value_heads=1))
    reach = DepthProfile.all().only(heads=[0, 1, 2]).reach(alone)
    named = {layer.name for layer, reached in zip(alone, reach.layers, strict=True) if reached}
    assert not any("k_proj" in name or "v_proj" in name for name in named)
    every = DepthProfile.all().only(heads=[0, 1, 2, 3]).reach(alone)
    assert sum(every.layers) == 8
    assert {o.tensor.rpartition(".")[2] for o in every.openings} == {"bias"}  # of the output: common to all heads


def test_fused_projections_are_cut_in_columns() -> None:
    stack = LayerStack.from_model(gpt2())
    found = openings(DepthProfile.layers(["transformer.h.1.*"]).only(heads=[0, 2]), stack)
    assert found["transformer.h.1.attn.c_attn.weight"] == (1, ((0, 4), (8, 16), (20, 28), (32, 36)))
    assert found["transformer.h.1.attn.c_attn.bias"] == (0, ((0, 4), (8, 16), (20, 28), (32, 36)))
    assert found["transformer.h.1.attn.c_proj.weight"] == (0, ((0, 4), (8, 12)))
    assert found["transformer.h.1.attn.c_proj.bias"] == (0, ())
    assert len(found) == 4


def test_others_are_what_has_no_heads() -> None:
    stack = LayerStack.from_model(bert())
    reach = DepthProfile.all().only(heads=[1], others=True).reach(stack)
    out = [layer.name for layer, kept in zip(stack, reach.layers, strict=True) if not kept]
    assert out and all(name.endswith("attention.output.LayerNorm") for name in out)  # inside, and all heads share it
    assert {o.tensor.rpartition(".")[2] for o in reach.openings if not o.ranges} == {"bias"}
    assert all(".attention.self." in o.tensor or ".attention.output.dense." in o.tensor for o in reach.openings)
    assert len(reach.openings) == 16


@pytest.mark.parametrize("others", [True, False])
def test_what_may_serve_single_heads_inside_an_attention_is_no_other(others: bool) -> None:
    config = T5Config(d_model=16, d_kv=4, num_heads=4, num_layers=1, d_ff=24, vocab_size=20)
    stack = LayerStack.from_model(T5ForConditionalGeneration(config))
    reach = DepthProfile.all().only(heads=[1], others=others).reach(stack)
    reached = {layer.name for layer, kept in zip(stack, reach.layers, strict=True) if kept}
    assert not [name for name in reached if "relative_attention_bias" in name]
    assert others == any("DenseReluDense" in name for name in reached)


def test_what_a_block_holds_beside_its_heads_is_no_other_but_its_mlp_is() -> None:
    model = TransformerAutoencoder(4, tokens=4, width=8, layers=2, heads=4, hidden=12, code=3)
    block = model.get_submodule("encoder.0")
    block.sinks = nn.Parameter(torch.zeros(3))
    block.tilt = nn.Linear(4, 3)
    stack = LayerStack.from_model(model)
    reach = DepthProfile.all().only(heads=[1], others=True).reach(stack)
    reached = {layer.name for layer, kept in zip(stack, reach.layers, strict=True) if kept}
    assert {"encoder.0.up", "encoder.0.down", "encoder.0.norm1", "decoder.0.up"} <= reached
    assert not {"encoder.0", "encoder.0.tilt"} & reached


def test_heads_by_pattern() -> None:
    stack = LayerStack.from_model(bert())
    profile = DepthProfile.all().only(heads={"bert.encoder.layer.1.*": [0, 1], "*.layer.0.attention": [2]})
    found = openings(profile, stack)
    assert found["bert.encoder.layer.1.attention.output.dense.weight"] == (1, ((0, 8),))
    assert found["bert.encoder.layer.0.attention.self.key.bias"] == (0, ((8, 12),))
    only = DepthProfile.all().only(heads={"*.layer.1.*": [0]}).reach(stack)
    assert {o.tensor.split(".")[3] for o in only.openings} == {"1"}


def test_a_block_as_one_layer_is_cut_tensor_by_tensor() -> None:
    model = TransformerAutoencoder(3, 4, width=6, layers=2, heads=3, hidden=5, code=2)
    stack = LayerStack.from_model(model, group="block")
    reach = DepthProfile.layers(["encoder.0"]).only(heads=[1]).reach(stack)
    found = {o.tensor: o.ranges for o in reach.openings}
    assert len(found) == len(stack.layers[1].parameters)  # all of them: the rest is closed
    assert {name for name, ranges in found.items() if ranges} == {
        f"encoder.0.{name}" for name in
        ("query.weight", "query.bias", "key.weight", "key.bias", "value.weight", "value.bias", "out.weight")
    }  # fmt: skip


def test_a_tensor_of_two_attentions_is_reached_only_with_both() -> None:
    model = TransformerAutoencoder(3, 4, width=6, layers=2, heads=3, hidden=5, code=2)
    model.decoder[0].query.weight = model.encoder[0].query.weight
    model.decoder[0].key.weight = model.squeeze.weight = nn.Parameter(torch.zeros(6, 6))  # and one used otherwise
    stack = LayerStack.from_model(model)
    both = openings(DepthProfile.all().only(heads={"encoder.0": [0, 1], "decoder.0": [1, 2]}), stack)
    assert both["encoder.0.query.weight"] == (0, ((2, 4),))
    assert both["encoder.0.query.bias"] == (0, ((0, 4),))
    reached = DepthProfile.all().only(heads=[0, 1, 2]).reach(stack)
    assert {o.tensor for o in reached.openings if not o.ranges} >= {"encoder.0.out.bias", "decoder.0.out.bias"}
    key = next(o for o in reached.openings if o.tensor == "squeeze.weight")
    assert key.ranges == ()


# ----------------------------------------------------------------------------------- declared, and refused


class Strange(nn.Module):
    """Attention whose projections nobody could know by name."""

    def __init__(self, width: int = 6, heads: int = 3) -> None:
        super().__init__()
        self.mix, self.back, self.parts = nn.Linear(width, 3 * width), nn.Linear(width, width), heads


class Named(Strange):
    lamina_heads = Heads(count=3, fused="mix", layout="interleaved", out="back")


def test_a_model_may_declare_its_heads() -> None:
    model = nn.Sequential(Strange(), Strange())
    spec = Heads(count=3, fused="mix", layout="concatenated", out="back")
    found = openings(DepthProfile.layers(["0.*"]).only(heads=[1]), LayerStack.from_model(model, heads={"?": spec}))
    assert found["0.mix.weight"] == (0, ((2, 4), (8, 10), (14, 16)))
    assert found["0.back.weight"] == (1, ((2, 4),))
    stack = LayerStack.from_model(nn.Sequential(Named()))
    assert openings(DepthProfile.all().only(heads=[1]), stack)["0.mix.bias"] == (0, ((6, 12),))
    other = LayerStack.from_model(nn.Sequential(Named()), heads={"0": spec})  # who asks, knows better
    assert openings(DepthProfile.all().only(heads=[1]), other)["0.mix.bias"] == (0, ((2, 4), (8, 10), (14, 16)))
    bare = Heads(count=3, fused="mix", layout="concatenated", out="")  # its output is projected by nothing of its own
    found = openings(
        DepthProfile.all().only(heads=[0]), LayerStack.from_model(nn.Sequential(Strange()), heads={"0": bare})
    )
    assert set(found) == {"0.mix.weight", "0.mix.bias"}
    block = TransformerAutoencoder(3, 4, width=6, layers=2, heads=3, hidden=5, code=2)
    six = LayerStack.from_model(block, heads={"encoder.0": 6})
    assert openings(DepthProfile.layers(["encoder.0"]).only(heads=[5]), six)["encoder.0.out.weight"] == (1, ((5, 6),))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({"0": 3}, "plan.parts-declaration-wrong"),
        ({"0": Heads(count=3, fused="nix")}, "plan.parts-declaration-wrong"),
        ({"0": Heads(count=3, fused="mix", layout="interleaved")}, "plan.parts-declaration-wrong"),
        ({"0": Heads(count=4, fused="mix", layout="interleaved", out="back")}, "plan.parts-declaration-wrong"),
        ({"0": Heads(count=3, fused="mix", out="back")}, "plan.parts-declaration-wrong"),
        ({"9": 3}, "plan.declaration-unmatched"),
        ({"0": "three"}, "plan.parts-declaration-wrong"),
        ({"0": True}, "plan.parts-declaration-wrong"),
        ({"0": -1}, "plan.parts-declaration-wrong"),
    ],
)
def test_a_wrong_declaration_is_refused(heads: Any, message: str) -> None:
    with raises_code(message):
        LayerStack.from_model(nn.Sequential(Strange()), heads=heads)


def test_heads_has_sound_numbers() -> None:
    with raises_code("plan.parts-declaration-wrong"):
        Heads(count=0)
    with raises_code("plan.parts-declaration-wrong"):
        Heads(count=1, layout="both")


class GatedAttention(nn.Module):
    """Queries twice as wide as its heads are: what looks like an attention and is another thing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 3
        self.q_proj, self.k_proj = nn.Linear(6, 12), nn.Linear(6, 6)
        self.v_proj, self.o_proj = nn.Linear(6, 6), nn.Linear(6, 6)


def test_an_attention_that_does_not_add_up_is_not_guessed_at() -> None:
    stack = LayerStack.from_model(nn.Sequential(GatedAttention(), nn.Linear(6, 2)))
    assert not stack.parts
    assert "queries are 12 wide, not 2 heads of 3" in stack.unread[0].why
    with raises_code("plan.parts-missing"):
        DepthProfile.all().only(heads=[0]).reach(stack)
    wrong = {
        "num_heads": (5, "queries are 12 wide, not 5"),
        "k_proj": (nn.Linear(6, 8), "keys are 8 wide"),
        "v_proj": (nn.Linear(6, 8), "output projection takes 6, not 2 heads of 4"),
        "o_proj": (nn.Linear(5, 6), "output projection takes 5"),
        "num_key_value_heads": (1, "1 key/value heads are stated"),
        "num_key_value_groups": (2, "1 key/value heads are stated"),
    }
    for name, (value, message) in wrong.items():
        broken = GatedAttention()
        if name != "num_heads":
            broken.q_proj = nn.Linear(6, 6)
        setattr(broken, name, value)
        found = LayerStack.from_model(nn.Sequential(broken)).unread
        assert message in found[0].why


def test_others_beside_an_attention_that_is_not_understood_are_refused() -> None:
    model = nn.Sequential(Named(), GatedAttention(), nn.Linear(6, 2))
    profile = DepthProfile.all().only(heads=[0], others=True)
    with raises_code("plan.parts-unknown"):
        profile.reach(LayerStack.from_model(model))
    assert DepthProfile.all().only(heads=[0]).reach(LayerStack.from_model(model)).layers[2:] == (False,) * 5
    assert all(profile.reach(LayerStack.from_model(model, heads={"1": 0})).layers)
    place = DepthProfile.layers(["0", "2"]).only(heads=[0], others=True)
    assert sum(place.reach(LayerStack.from_model(model)).layers) == 3


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (DepthProfile.all().only(heads=[3]), "plan.parts-out-of-range"),
        (DepthProfile.layers(["classifier"]).only(heads=[0]), "plan.parts-missing"),
        (DepthProfile.all().only(experts=[0]), "plan.parts-missing"),
        (DepthProfile.all().only(heads={"encoder.*": [0]}), "plan.parts-pattern-unmatched"),
        (DepthProfile.layers(["*.layer.0"]).only(heads={"*.layer.1.*": [0]}), "plan.parts-none-chosen"),
        (DepthProfile.all().only(heads={"*.layer.1.*": [0], "*.attention": [1]}), "plan.profile-parts-overlap"),
    ],
)
def test_masks_that_mean_nothing_are_refused(profile: DepthProfile, message: str) -> None:
    with raises_code(message):
        profile.reach(LayerStack.from_model(bert()))


def test_cross_attention_of_gpt2() -> None:
    stack = LayerStack.from_model(gpt2(add_cross_attention=True))
    found = openings(DepthProfile.all().only(heads={"transformer.h.0.crossattention": [2]}), stack)
    assert found["transformer.h.0.crossattention.q_attn.weight"] == (1, ((8, 12),))
    assert found["transformer.h.0.crossattention.c_attn.weight"] == (1, ((8, 12), (20, 24)))
    assert "transformer.h.0.attn.c_attn.weight" not in found


def test_the_stack_tells_its_heads() -> None:
    assert "heads: bert.encoder.layer.0.attention 3, bert.encoder.layer.1.attention 3" in str(
        LayerStack.from_model(bert())
    )
