"""Head and expert slices written out by hand, architecture by architecture: nothing here asks the plan for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from oracle import layers_of, losses_of_output
from torch import Tensor, nn

from lamina.plan.selection import Range, Slice
from lamina.signals.autoencoders import TransformerAutoencoder

N, T, V = 5, 7, 40
QUIET = pytest.mark.filterwarnings(  # what transformers, peft and modules without a rule say
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:There is a performance drop",
    "ignore:.*cannot run under vmap", "ignore:fan_in_fan_out is set", "ignore:.*weights will be saved",
)  # fmt: skip
Made = tuple[nn.Module, Any, Callable[[nn.Module, Any, Any], Tensor], list[Slice]]


def cut(tensor: str, length: int, *ranges: Range, axis: int = 0, cls: str = "c1") -> Slice:
    return Slice(cls=cls, tensor=tensor, axis=axis, length=length, ranges=ranges)


def ids(length: int = T, n: int = N) -> Tensor:
    return torch.randint(1, V, (n, length), generator=torch.Generator().manual_seed(length))


def of_logits(model: nn.Module, x: Any, y: Any) -> Tensor:
    return losses_of_output(model(**x).logits)


def of_output(model: nn.Module, x: Any, y: Any) -> Tensor:
    out = model(x)
    return losses_of_output(out[0] if isinstance(out, tuple) else out)


def llama() -> Made:
    """4 query heads of width 4 on 2 key/value groups: heads 2 and 3 with their group 1."""
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    at = "model.layers.1.self_attn"
    slices = [
        cut(f"{at}.q_proj.weight", 16, (8, 16)),
        cut(f"{at}.k_proj.weight", 8, (4, 8)),
        cut(f"{at}.v_proj.weight", 8, (4, 8)),
        cut(f"{at}.o_proj.weight", 16, (8, 16), axis=1),
    ]
    return transformers.LlamaForCausalLM(config), {"input_ids": ids()}, of_logits, slices


def gpt2() -> Made:
    """4 heads of width 4, q, k, v in one transposed matrix: heads 0 and 2."""
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    at = "transformer.h.0.attn"
    thrice = ((0, 4), (8, 12), (16, 20), (24, 28), (32, 36), (40, 44))
    slices = [
        cut(f"{at}.c_attn.weight", 48, *thrice, axis=1),
        cut(f"{at}.c_attn.bias", 48, *thrice),
        cut(f"{at}.c_proj.weight", 16, (0, 4), (8, 12)),
        cut(f"{at}.c_proj.bias", 16),
    ]
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids()}, of_logits, slices


def _separate(at: str, out: str, names: Sequence[str] = ("query", "key", "value")) -> list[Slice]:
    """2 heads of width 8, biases everywhere: head 1; the output's bias belongs to no head."""
    made = [cut(f"{at}.{name}.{part}", 16, (8, 16)) for name in names for part in ("weight", "bias")]
    return [*made, cut(f"{out}.weight", 16, (8, 16), axis=1), cut(f"{out}.bias", 16)]


def bert() -> Made:
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    at = "bert.encoder.layer.0.attention"
    model = transformers.BertForSequenceClassification(config)
    return model, {"input_ids": ids()}, of_logits, _separate(f"{at}.self", f"{at}.output.dense")


def vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    at = next(n for n, _ in model.named_parameters() if n.endswith(("query.weight", "q_proj.weight")))
    at = at.rpartition(".")[0].rpartition(".")[0]
    names = ("query", "key", "value") if hasattr(model.get_submodule(at), "query") else ("q_proj", "k_proj", "v_proj")
    own = model.get_submodule(at)
    out = f"{at}.o_proj" if hasattr(own, "o_proj") else f"{at.rpartition('.')[0]}.output.dense"
    x = torch.randn(N, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return model, {"pixel_values": x}, of_logits, _separate(at, out, names)


class Attend(nn.Module):
    """nn.MultiheadAttention with packed projections, of one sequence or of two."""

    def __init__(self, *, cross: bool = False) -> None:
        super().__init__()
        self.into, self.cross = nn.Linear(6, 16), cross
        self.mha = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        other = torch.tanh(h) if self.cross else h
        return self.head(self.mha(h, other, other)[0])


def multihead(cross: bool = False) -> Made:
    thrice = ((4, 8), (20, 24), (36, 40))
    slices = [
        cut("mha.in_proj_weight", 48, *thrice),
        cut("mha.in_proj_bias", 48, *thrice),
        cut("mha.out_proj.weight", 16, (4, 8), axis=1),
        cut("mha.out_proj.bias", 16),
    ]
    x = torch.randn(N, T, 6, generator=torch.Generator().manual_seed(2))
    return Attend(cross=cross), x, of_output, slices


def ours() -> Made:
    model = TransformerAutoencoder(5, T, width=16, layers=2, heads=2, hidden=24, code=4)
    x = torch.randn(N, T, 5, generator=torch.Generator().manual_seed(3))
    return model, x, of_output, _separate("decoder.0", "decoder.0.out")


def mixtral(**options: Any) -> Made:
    """4 experts, 2 of them for each token: experts 1 and 3, and nothing of the router."""
    config = transformers.MixtralConfig(
        vocab_size=V, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False, sliding_window=None,
        **options,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.config._experts_implementation = "eager"  # the oracle works in float64, which grouped products do not know
    for name, p in model.named_parameters():  # as they are made, experts hardly matter
        if ".mlp." in name:
            nn.init.normal_(p, std=0.4)
    at = "model.layers.0.mlp.experts"
    slices = [cut(f"{at}.gate_up_proj", 4, (1, 2), (3, 4)), cut(f"{at}.down_proj", 4, (1, 2), (3, 4))]
    return model, {"input_ids": ids()}, of_logits, slices


MODELS: dict[str, Callable[[], Made]] = {
    "llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit, "multihead": multihead,
    "multihead cross": lambda: multihead(cross=True), "ours": ours,
}  # fmt: skip


def bands(model: nn.Module, slices: Sequence[Slice]) -> list[list[float]]:
    """c0 reaches everything, c1 only the layers that it has slices in, c2 the upper third."""
    layers = layers_of(model)
    mine = {part.tensor for part in slices}
    return [
        [1.0] * len(layers),
        [1.0 if mine & set(layer.parameters) else 0.0 for layer in layers],
        [1.0 if 3 * i >= 2 * len(layers) else 0.0 for i in range(len(layers))],
    ]
