"""Random networks, batches and plans: the engine gives what the per-contribution oracle gives."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import FORMS, agree, losses_of, plan_of
from torch import Tensor, nn

from lamina import Batch, Engine

WIDTH, TIME = 6, 5
KINDS = (
    "linear", "no bias", "conv", "depthwise", "dilated", "layer norm", "rms norm", "group norm", "attention", "gru",
    "lstm", "residual", "bare", "prelu", "reused", "up", "frozen", "lora",
)  # fmt: skip


class Swap(nn.Module):
    """Runs a channels-first module on (N, T, d)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class First(nn.Module):
    """The first output of a module that gives several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Bare(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.p)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def piece(kind: str, shared: nn.Module) -> nn.Module:
    """A small module that maps (N, T, d) to (N, T, d)."""
    makers: dict[str, Any] = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        "conv": lambda: Swap(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
        "depthwise": lambda: Swap(nn.Conv1d(WIDTH, WIDTH, 3, padding="same", groups=WIDTH)),
        "dilated": lambda: Swap(nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=2, padding_mode="circular")),
        "layer norm": lambda: nn.LayerNorm(WIDTH),
        "rms norm": lambda: nn.RMSNorm(WIDTH),
        "group norm": lambda: Swap(nn.GroupNorm(2, WIDTH)),
        "attention": Attention,
        "gru": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
        "lstm": lambda: First(nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)),
        "residual": lambda: Residual(nn.Linear(WIDTH, WIDTH)),
        "bare": lambda: Bare((1, TIME, WIDTH)),
        "prelu": lambda: nn.PReLU(),
        "reused": lambda: shared,
        "up": lambda: Swap(
            nn.Sequential(nn.ConvTranspose1d(WIDTH, WIDTH, 3, stride=2, padding=1), nn.AvgPool1d(2, 2, 1))
        ),
        "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        "lora": Lora,
    }
    return makers[kind]()


class Net(nn.Module):
    """Tokens in; a head that may be tied to the embedding."""

    def __init__(self, kinds: list[str], tied: bool) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Embedding(9, WIDTH, padding_idx=0)
        self.body = nn.Sequential(*(nn.Sequential(piece(kind, shared), nn.Tanh()) for kind in kinds))
        self.head = nn.Linear(WIDTH, 9)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    model_seed = draw(st.integers(0, 10**6))
    torch.manual_seed(model_seed)
    model = Net(kinds, draw(st.booleans()))
    group = draw(st.sampled_from(["module", "block"]))
    layers = len(plan_of(model, group=group).layers)
    examples = draw(st.integers(2, 7))
    classes = draw(st.integers(1, 3))
    public = [k for k in range(1, classes) if draw(st.booleans())]
    clip = []
    for k in range(classes):
        low = draw(st.integers(0, layers - 1))
        high = draw(st.integers(low + 1, layers))
        reach = inf if k in public else 1.0
        clip.append([reach if low <= i < high else 0.0 for i in range(layers)])
    unit = draw(st.lists(st.integers(0, examples - 1), min_size=examples, max_size=examples))
    places = {u: i for i, u in enumerate(sorted(set(unit)))}
    units = [places[u] for u in unit]
    cls = draw(st.lists(st.integers(0, classes - 1), min_size=max(units) + 1, max_size=max(units) + 1))
    weight = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 3.0]), min_size=examples, max_size=examples))
    return {
        "model": model,
        "x": torch.randint(0, 9, (examples, TIME)),
        "group": group,
        "clip": clip,
        "public": public,
        "spread": [draw(st.sampled_from([0.3, 1.0, 3.0])) for _ in range(classes)],
        "batch": {"unit": torch.tensor(units), "cls": torch.tensor(cls), "weight": torch.tensor(weight)},
        "form": draw(st.sampled_from(FORMS)),
        "constant_time": draw(st.booleans()),
    }


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_networks_batches_and_plans(case: dict[str, Any]) -> None:
    agree(
        case["model"],
        case["x"],
        forms=(case["form"],),
        clip=case["clip"],
        public=case["public"],
        group=case["group"],
        spread=case["spread"],
        must_clip=False,
        batch=case["batch"],
        engine={"constant_time": case["constant_time"]},
    )


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(1, 5))
def test_how_a_batch_is_cut_changes_nothing(case: dict[str, Any], parts: int) -> None:
    model, x = case["model"], case["x"]
    plan = plan_of(model, case["clip"], clipping=case["form"], group=case["group"], public=case["public"])
    whole = Batch(x, **case["batch"])
    with Engine(model, plan) as engine:
        want = engine.clipped_sums(losses_of(model, x, None), whole)
        total = {name: torch.zeros_like(value) for name, value in want.items()}
        for part in whole.split(parts):
            losses = losses_of(model, part.x, None) if part.examples else None
            for name, value in engine.clipped_sums(losses, part).items():
                total[name] += value
    for name, value in want.items():
        torch.testing.assert_close(total[name], value, rtol=1e-4, atol=1e-5)
