"""Against adversarial canaries, every kind of layer and both forms of clipping keep 1/sigma_k, and reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from audit_steps import plan_for
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.audit.canaries import named_canaries, random_canaries
from lamina.audit.paired_step import PairedStep, paired_step, with_only
from lamina.audit.target import AuditTarget
from lamina.engine.batch import Batch

pytestmark = [  # what a module without a rule says, once
    pytest.mark.filterwarnings("ignore:.*cannot run under vmap"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

# Six examples of four contributions: two of two examples, one slot that is padding.
UNIT = torch.tensor([0, 0, 1, 2, 2, 3])
WEIGHT = torch.tensor([1.0, 0.5, 1.0, 1.0, 0.0, 2.0])
N = len(UNIT)


class Attend(nn.Module):
    def __init__(self, *, cross: bool) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 2)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=not cross, dropout=0.2 if not cross else 0.0)
        self.cross = cross

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        if self.cross:
            t = h.transpose(0, 1)
            return self.out(self.mix(t[:2], t, t.flip(0), need_weights=False)[0].transpose(0, 1))
        return self.out(self.mix(h, h, h)[0])


class Recur(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.run = kind(4, 5, batch_first=True, **options)
        self.out = nn.Linear(10 if options.get("bidirectional") else 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.run(x)[0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(11, 6, padding_idx=0), nn.Embedding(8, 6)
        self.mid, self.out = nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mid(self.tok(ids) + self.pos(torch.arange(ids.shape[1]).unsqueeze(0))))


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(torch.tanh(self.again(torch.tanh(self.again(x))))))


class Bare(nn.Module):
    """Parameters of its own: no rule knows it."""

    def __init__(self, *, loop: bool) -> None:
        super().__init__()
        self.gain, self.mix, self.loop = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4)), loop

    def forward(self, x: Tensor) -> Tensor:
        if self.loop and float(x.detach().sum()) == 0.125:  # data-dependent: vmap cannot
            return x
        return torch.tanh(x * self.gain) @ self.mix


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls, self.out = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.cls)


class Scale(nn.Module):
    """Bare parameters beside modules, used elementwise: expanded to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(1))
        self.run, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.run(x * self.gain + self.shift)[0])


class ScaledTable(nn.Embedding):
    """A table with a padding row that no rule knows, as in Gemma: it runs under vmap."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2.0 * super().forward(ids)


class Rows(nn.Module):
    """Tokens flattened into rows, with their owners said, and given to two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, length = x.shape[:2]
        owner = torch.arange(n).repeat_interleave(length)
        with lamina.rows(owner):
            flat = torch.tanh(self.into(x.flatten(0, 1)))
        out = flat.new_zeros(n * length, 3)
        first = torch.arange(length).repeat(n) % 3 == 0
        for expert, mine in ((self.a, first), (self.b, ~first)):
            with lamina.rows(owner[mine]):
                out = out.index_put((mine.nonzero().flatten(),), expert(flat[mine]))
        return out.view(n, length, 3)


class Autocast(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def sequence(*layers: nn.Module, kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    return kind(nn.Linear(4, 8), nn.Tanh(), *layers, nn.Linear(8, 3))


def image(*layers: nn.Module, kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    return kind(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Tanh(), *layers, nn.Flatten(), nn.LazyLinear(2)
    )


def signal(first: nn.Module, second: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Tanh(), second)


SHAPE = {"flat": (N, 4), "sequence": (N, 5, 4), "signal": (N, 3, 9), "image": (N, 3, 6, 6)}

FAMILIES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "linear": ("flat", sequence),
    "linear in a sequence": ("sequence", lambda: sequence(nn.Linear(8, 8), nn.ReLU())),
    "one linear, no bias": ("flat", lambda: nn.Linear(4, 3, bias=False)),
    "conv 1d": ("signal", lambda: signal(nn.Conv1d(3, 4, 3, stride=2, dilation=2), nn.Conv1d(4, 2, 2))),
    "conv 2d": ("image", lambda: image(nn.Conv2d(4, 4, 3, groups=2))),
    "transposed": ("signal", lambda: signal(nn.ConvTranspose1d(3, 4, 3, 2, output_padding=1), nn.Conv1d(4, 1, 1))),
    "group norm": ("image", lambda: image(nn.GroupNorm(2, 4))),
    "instance norm": ("image", lambda: image(nn.InstanceNorm2d(4, affine=True))),
    "layer norm": ("sequence", lambda: sequence(nn.LayerNorm(8))),
    "rms norm": ("sequence", lambda: sequence(nn.RMSNorm(8))),
    "attention, dropout": ("sequence", lambda: Attend(cross=False)),
    "attention, cross": ("sequence", lambda: Attend(cross=True)),
    "rnn": ("sequence", lambda: Recur(nn.RNN, num_layers=2)),
    "lstm": ("sequence", lambda: Recur(nn.LSTM, bidirectional=True)),
    "gru": ("sequence", lambda: Recur(nn.GRU)),
    "tied embedding": ("ids", Tied),
    "reused": ("flat", Reused),
    "owner, vmap": ("sequence", lambda: nn.Sequential(nn.Linear(4, 4), Bare(loop=False), nn.Linear(4, 2))),
    "owner, loop": ("sequence", lambda: nn.Sequential(nn.Linear(4, 4), Bare(loop=True), nn.Linear(4, 2))),
    "broadcast parameter": ("sequence", Token),
    "expanded parameters": ("sequence", Scale),
    "padding row, vmap": ("ids", lambda: nn.Sequential(ScaledTable(11, 6, padding_idx=0), nn.Tanh(), nn.Linear(6, 2))),
    "row map": ("sequence", Rows),
    "weight norm": ("flat", lambda: signal(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 2))),
    "bfloat16 autocast": ("sequence", lambda: sequence(nn.Linear(8, 8), kind=Autocast)),
    "checkpoint": ("sequence", lambda: sequence(nn.LayerNorm(8), nn.Dropout(0.3), kind=Checkpointed)),
    "float64": ("sequence", lambda: sequence(nn.Linear(8, 8), nn.Tanh()).double()),
}  # fmt: skip

# Enough to saturate, vanish, cancel, overflow and poison; the whole library runs in `make test-all`.
SOME = ("y huge", "x large", "x huge", "x cancelling", "x mixed sizes", "x not a number", "x and y large")


def subject_for(name: str, clipping: str, **options: Any) -> tuple[AuditTarget, Batch]:
    kind, make = FAMILIES[name]
    model = make()
    x = torch.randint(0, 11, (N, 5)) if kind == "ids" else torch.randn(SHAPE[kind])
    if name == "float64":
        x = x.double()
    model(x)  # lazy layers
    group: Any = {"first": ["into.*", "a.*"], "rest": ["b.*"]} if name == "row map" else "module"
    plan = plan_for(model, clipping, group=group, several=True)

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(model(x).flatten(1)).sum(1) * y

    y = torch.tensor([1.0, 0.5, 30.0, 0.01, 0.01, 1.0]).to(x.dtype if x.is_floating_point() else torch.float32)
    batch = Batch(x, y, unit=UNIT, cls=torch.tensor([0, 0, 2, 1]), weight=WEIGHT)
    return AuditTarget(model=model, plan=plan, losses_of=losses_of, **options), batch


def attack(subject: AuditTarget, batch: Batch, unit: int, wanted: Any = None, **options: Any) -> dict[str, PairedStep]:
    return {
        name: paired_step(subject, b, unit, **options)
        for name, b in named_canaries(batch, unit)
        if wanted is None or name in wanted
    }


def assert_sound(found: dict[str, PairedStep]) -> None:
    for name, p in found.items():
        assert p.sound, (name, p)
        assert not p.layers_outside, (name, p)
        assert p.ratio <= 1 + 1e-6 + p.rounding / p.bound, (name, p)


@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize("name", FAMILIES)
def test_never_above_and_reached(name: str, clipping: str) -> None:
    subject, batch = subject_for(name, clipping)
    found = attack(subject, batch, 0, SOME)
    assert_sound(found)
    assert max(p.ratio for p in found.values()) >= 0.99
    assert all(p.rounding < 2e-5 * p.bound for n, p in found.items() if "huge" not in n)
    if "x not a number" in found:
        assert found["x not a number"].sensitivity <= found["x not a number"].rounding


@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize("name", ["linear in a sequence", "tied embedding", "owner, vmap", "row map"])
@pytest.mark.parametrize(
    ("parts", "hardened", "options"), [(1, True, {}), (3, False, {}), (3, True, {"constant_time": True})]
)
def test_however_the_step_is_taken(
    name: str, clipping: str, parts: int, hardened: bool, options: dict[str, Any]
) -> None:
    subject, batch = subject_for(name, clipping, parts=parts, hardened=hardened, options=options)
    for unit in (0, 3):  # a class that reaches everything, and one that is restricted
        found = attack(subject, batch, unit, ("y huge", "x cancelling"))
        assert_sound(found)
        assert max(p.ratio for p in found.values()) >= 0.99


@pytest.mark.parametrize("constant_time", [False, True])
@pytest.mark.parametrize("clipping", ["box", "joint"])
def test_restricted_class_moves_nothing_below(clipping: str, constant_time: bool) -> None:
    options = {"constant_time": constant_time}
    subject, batch = subject_for("linear in a sequence", clipping, options=options)
    for among in (batch, with_only(batch, 3)):
        found = attack(subject, among, 3, SOME)
        assert_sound(found)
        assert max(p.per_layer[-1] for p in found.values()) > 0
    for p in found.values():
        assert p.per_layer[0] == 0  # beside empty slots: to the last bit


def test_public_class_is_not_bounded() -> None:
    subject, batch = subject_for("linear", "box")
    p = attack(subject, batch, 2, ("y large",))["y large"]
    assert p.sound
    assert p.bound == float("inf")
    assert p.sensitivity > 100


@pytest.mark.parametrize("clipping", ["box", "joint"])
def test_rows_taken_away(clipping: str) -> None:
    """Add or remove in earnest: the batch has fewer rows. 'linear' has no dropout."""
    for name in ("linear", "row map", "tied embedding"):
        subject, batch = subject_for(name, clipping)
        assert subject.fixed(batch)
        found = attack(subject, batch, 0, SOME, without="absent")
        for canary, p in found.items():
            assert p.sound, (name, canary, p)


@pytest.mark.slow
@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize("name", FAMILIES)
def test_whole_library(name: str, clipping: str, hardened: bool) -> None:
    subject, batch = subject_for(name, clipping, hardened=hardened)
    for unit in (0, 3):
        assert_sound(attack(subject, batch, unit))
        for canary, b in random_canaries(batch, unit, count=20):
            assert_sound({canary: paired_step(subject, b, unit)})
