"""nn.MultiheadAttention and the transformer layers made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from net_builders import Net, refused
from oracle import agree
from torch import Tensor, nn

N, T, D = 5, 6, 8


class Attend(nn.Module):
    """Attention between batch-first tensors, whatever the module's own layout."""

    def __init__(
        self, *, cross: bool = False, weights: bool = False, call: dict[str, Any] | None = None, **options: Any
    ):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, **options)
        self.cross, self.weights, self.call = cross, weights, call or {}
        self.key, self.value = nn.Linear(D, options.get("kdim") or D), nn.Linear(D, options.get("vdim") or D)
        self.out = nn.Linear(D, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        k, v = (self.key(x), self.value(x)) if self.cross else (x, x)
        if not self.attention.batch_first:
            x, k, v = (t.transpose(0, 1) for t in (x, k, v)) if self.cross else (x.transpose(0, 1),) * 3
        y, a = self.attention(x, k, v, key_padding_mask=padding, need_weights=self.weights, **self.call)
        y = self.out((y if self.attention.batch_first else y.transpose(0, 1)).tanh())
        return y if a is None else torch.cat([y.flatten(1), a.flatten(1)], 1)


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("weights", [True, False], ids=["weights", "fused"])
@pytest.mark.parametrize("cross", [True, False], ids=["cross", "self"])
def test_layouts(cross: bool, weights: bool, first: bool) -> None:
    model = Attend(cross=cross, weights=weights, batch_first=first)
    if not cross:
        del model.key, model.value
    agree(model, torch.randn(N, T, D))


@pytest.mark.parametrize("first", [True, False])
def test_length_equal_to_batch(first: bool) -> None:
    model = Attend(batch_first=first)
    del model.key, model.value
    agree(model, torch.randn(N, N, D))


@pytest.mark.parametrize(
    "options", [{"kdim": 4, "vdim": 6}, {"kdim": 4}, {"bias": False}, {"bias": False, "vdim": 3}], ids=str
)
@pytest.mark.parametrize("first", [True, False])
def test_other_widths_and_no_bias(options: dict[str, Any], first: bool) -> None:
    agree(Attend(cross=True, batch_first=first, **options), torch.randn(N, T, D))


def test_one_source_for_key_and_value() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        memory = m.memory(x[:, :4])
        return m.attention(x, memory, memory, need_weights=False)[0]

    agree(
        Net(forward, attention=nn.MultiheadAttention(D, 2, batch_first=True), memory=nn.Linear(D, D)),
        torch.randn(N, T, D),
    )


@pytest.mark.parametrize("average", [True, False])
def test_weights_averaged_or_per_head(average: bool) -> None:
    agree(
        Attend(cross=True, weights=True, call={"average_attn_weights": average}, batch_first=True), torch.randn(N, T, D)
    )


CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
MASKS = {"bool": CAUSAL, "float": torch.zeros(T, T).masked_fill(CAUSAL, -1e4) + torch.randn(T, T) * 0.1}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "per example and head"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_mask(mask: str, each: bool, weights: bool) -> None:
    class Masked(Attend):
        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            made = MASKS[mask].to(x.dtype) if mask == "float" else MASKS[mask]
            self.call = {"attn_mask": made.expand(x.shape[0] * 2, T, T) if each else made}
            return super().forward(x, padding)

    agree(Masked(cross=True, weights=weights, batch_first=True), torch.randn(N, T, D))


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_key_padding(first: bool, weights: bool) -> None:
    padding = torch.zeros(N, T, dtype=torch.bool)
    padding[:, 4:] = True
    padding[1, 2:] = True
    agree(Attend(cross=True, weights=weights, batch_first=first), (torch.randn(N, T, D), padding))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_bias_k_and_zero_attention_run_per_contribution() -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        agree(Attend(cross=True, batch_first=True, **options), torch.randn(N, T, D))


def test_a_time_first_module_given_batch_first_data_is_refused() -> None:
    """It would attend across the batch. Found by its rows, or by the ownership check when T == N."""

    model = Net(lambda m, x: m.attention(x, x, x, need_weights=False)[0], attention=nn.MultiheadAttention(D, 2))
    refused(model, torch.randn(N, T, D), "engine.row-owner-unknown")
    refused(model, torch.randn(N, N, D), "engine.contributions-coupled")


class Encoder(nn.Module):
    def __init__(self, *, norm_first: bool, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if self.first else self.body(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer(norm_first: bool) -> None:
    agree(Encoder(norm_first=norm_first, batch_first=True), torch.randn(N, T, D))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("length", [T, N])
def test_a_time_first_encoder_is_refused_or_run_per_contribution(length: int) -> None:
    model, x = Encoder(norm_first=True, batch_first=False), torch.randn(N, length, D)
    refused(model, x, "engine.contributions-coupled", "engine.row-owner-unknown")
    agree(model, x, engine={"per_contribution": [""]})


def test_decoder_layer() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)
        return m.body(x, m.memory(x[:, :3]), tgt_mask=mask, tgt_is_causal=True)

    agree(
        Net(forward, body=nn.TransformerDecoderLayer(D, 2, 12, dropout=0.0, batch_first=True), memory=nn.Linear(D, D)),
        torch.randn(N, T, D),
    )


@pytest.mark.parametrize("apart", [{}, {"kdim": 8, "vdim": 8}], ids=["packed", "apart"])
def test_input_projections_frozen(apart: dict[str, int]) -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.a(x, x, x)[0].mean(1)

    model = Net(forward, a=nn.MultiheadAttention(8, 2, batch_first=True, **apart))
    for name, p in model.named_parameters():
        p.requires_grad_("out_proj" in name)
    agree(model, torch.randn(5, 4, 8))
