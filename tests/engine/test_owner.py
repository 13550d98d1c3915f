"""Modules without a rule: per contribution by vmap, in a loop, or by broadcasting."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from net_builders import Net, refused, sums_of, tensors_close
from oracle import agree, clip_by_hand, difference, example_grads, losses_of, plan_of, unit_grads
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina import Batch, Engine, SeededNoise
from lamina.errors import CouplingError, LaminaError

N = 6


class Bare(nn.Module):
    """y = l(x + p)·g with bare p and g."""

    def __init__(self, shape: tuple[int, ...], gain: tuple[int, ...] | None = (5,)) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))
        self.g = nn.Parameter(torch.randn(gain)) if gain is not None else None
        self.l = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x + self.p).tanh()
        return y if self.g is None else y * self.g


@pytest.mark.parametrize("shape", [(4, 5), (5,), (), (1, 4, 5), (1, 1, 5)], ids=str)
@pytest.mark.parametrize("gain", [None, (5,), (1, 5), ()], ids=str)
def test_bare_parameters(shape: tuple[int, ...], gain: tuple[int, ...] | None) -> None:
    agree(Bare(shape, gain), torch.randn(N, 4, 5))


def test_bare_parameter_whose_first_axis_is_the_batch_size() -> None:
    agree(Bare((4, 5)), torch.randn(4, 4, 5))
    agree(Bare((1, 4, 5), None), torch.randn(4, 4, 5))


def tokens_forward(m: nn.Module, x: Tensor) -> Tensor:
    """A class token and a position table on the root, blocks below with rules of their own."""
    h = torch.cat([m.token.expand(x.shape[0], -1, -1), m.embed(x)], 1) + m.position
    return m.head(m.norm(h).tanh())


def tokens() -> nn.Module:
    return Net(
        tokens_forward,
        token=nn.Parameter(torch.randn(1, 1, 6)),
        position=nn.Parameter(torch.randn(1, 5, 6)),
        embed=nn.Linear(3, 6),
        norm=nn.LayerNorm(6),
        head=nn.Linear(6, 2),
    )


def test_class_token_and_position_table() -> None:
    agree(tokens(), torch.randn(N, 4, 3))
    agree(tokens(), torch.randn(5, 4, 3))
    agree(tokens(), torch.randn(N, 4, 3), batch={"unit": torch.tensor([0, 1, 0, 2, 2, 0])})


def test_children_of_a_broadcasting_module_keep_their_rules() -> None:
    model = tokens()
    x = torch.randn(N, 4, 3)
    with Engine(model, plan_of(model)) as engine:
        losses = losses_of(model, x, None)
        engine.clipped_sums(losses, Batch(x))
        kinds = {type(module.forward).__name__ for module in (model, model.embed, model.norm)}
        assert kinds == {"PatchedForward"}
        assert model.forward.layer_forward.fallback is None


class Narrow(nn.Module):
    """A hand-made linear map with one output: lengthening its weight would give N outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 5))
        self.l = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.l(x).tanh(), self.w)


@pytest.mark.parametrize("shape", [(N, 5), (N, 4, 5)], ids=str)
def test_hand_over_where_broadcasting_changes_the_result(shape: tuple[int, ...]) -> None:
    agree(Narrow(), torch.randn(shape))


def test_a_first_batch_of_one_proves_nothing() -> None:
    """With one example, lengthening (1, d) to the batch changes nothing: the check must come again."""
    for model in (Narrow(), Bare((1, 4, 5), (1, 5)), Bare((4, 5))):
        x = torch.randn(N, 5) if isinstance(model, Narrow) else torch.randn(N, 4, 5)
        with torch.no_grad():
            want = model(x)
        with Engine(model, plan_of(model)):
            model(x[:1])
            torch.testing.assert_close(model(x).detach(), want)


class Reduced(nn.Module):
    """Uses of a (1, d) parameter that look the same when lengthened, but mix the copies."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(1, 5))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        p = self.p[0] if self.how == "first" else self.p.mean(0)
        return (x * p).tanh()


@pytest.mark.parametrize("how", ["first", "mean"])
def test_copies_that_are_mixed_are_right_or_refused(how: str) -> None:
    try:
        agree(Reduced(how), torch.randn(N, 5))
    except CouplingError as refused:
        assert "per_contribution" in str(refused)
    agree(Reduced(how), torch.randn(N, 5), engine={"per_contribution": [""]})


class Branch(nn.Module):
    """Control flow on data, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.l = nn.Parameter(torch.randn(5)), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.l(row * self.scale if row.sum().item() > 0 else row).unsqueeze(0) for row in x])


@pytest.mark.filterwarnings("ignore:.*cannot run under vmap")
def test_loop_where_vmap_cannot_run() -> None:
    agree(nn.Sequential(Branch(), nn.Tanh(), nn.Linear(4, 2)), torch.randn(N, 5))


def test_the_loop_says_so_once() -> None:
    model = nn.Sequential(Branch(), nn.Linear(4, 2))
    x = torch.randn(N, 5)
    with Engine(model, plan_of(model)):
        with pytest.warns(UserWarning, match=r"'0' \(Branch\) cannot run under vmap and runs one example"):
            model(x)
        model(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*cannot run under vmap")
@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.PReLU(5), torch.randn(N, 5)),
        (nn.PReLU(), torch.randn(N, 3, 5)),
        (nn.EmbeddingBag(9, 5, mode="sum"), torch.randint(0, 9, (N, 4))),
        (nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)), torch.randn(N, 3, 5)),
        (nn.utils.parametrizations.orthogonal(nn.Linear(5, 5), use_trivialization=False), torch.randn(N, 5)),
        (nn.utils.parametrizations.weight_norm(nn.Conv1d(5, 4, 3)), torch.randn(N, 5, 6)),
    ],
    ids=["prelu per channel", "prelu", "embedding bag", "weight norm", "orthogonal", "weight norm of a convolution"],
)
def test_modules_without_a_rule(module: nn.Module, x: Tensor) -> None:
    width = module(x).shape[-1]
    agree(nn.Sequential(module, nn.Tanh(), nn.Linear(width, 2)), x)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:There is a performance drop")
def test_the_older_weight_norm_is_refused_or_run_per_contribution() -> None:
    """It makes the weight in a hook, before the module's own forward."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(N, 5)
    refused(model, x, "engine.tensor-used-directly")
    agree(model, x, engine={"per_contribution": [""]})


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_bilinear_with_two_inputs() -> None:

    agree(
        Net(lambda m, x: m.mix(m.a(x), m.b(x)), a=nn.Linear(5, 3), b=nn.Linear(5, 4), mix=nn.Bilinear(3, 4, 2)),
        torch.randn(N, 5),
    )


def test_per_contribution_by_name() -> None:
    """A model that is time first inside is right once the module that turns it runs per contribution."""

    for length in (3, N):
        model = nn.Sequential(
            Net(lambda m, x: m.l(x.transpose(0, 1)).tanh().transpose(0, 1), l=nn.Linear(5, 4)), nn.Linear(4, 2)
        )
        agree(model, torch.randn(N, length, 5), engine={"per_contribution": ["0"]})


def test_per_contribution_of_a_name_that_is_not_there() -> None:
    model = nn.Sequential(nn.Linear(5, 2))
    with raises_code("engine.per-contribution-unknown"):
        Engine(model, plan_of(model), per_contribution=["nothere"])
    assert "forward" not in vars(model[0])


# A bare parameter beside an argument (T, T) without batch axis.


def masked_forward(m: nn.Module, x: Tensor) -> Tensor:
    t = x.shape[1]
    mask = (torch.ones(t, t).tril() * torch.arange(1, t + 1)).to(x.dtype)
    return m.out(m.inner(x, mask).tanh())


def masked() -> nn.Module:
    return Net(
        masked_forward,
        inner=Net(lambda m, x, mask: torch.einsum("ts,nsd->ntd", mask, x) * m.p, p=nn.Parameter(torch.randn(5))),
        out=nn.Linear(5, 2),
    )


def test_an_argument_without_batch_axis() -> None:
    agree(masked(), torch.randn(4, N, 5))


@pytest.mark.parametrize("before", [(), (4,), (1, 4)], ids=str)
def test_an_argument_that_is_as_long_as_the_batch_by_chance(before: tuple[int, ...]) -> None:
    model = masked()
    x = torch.randn(N, N, 5)
    with torch.no_grad():
        want = model(x)
    with Engine(model, plan_of(model)):
        for n in before:
            model(x[:n])
        try:
            got = model(x)
        except LaminaError as refused:
            assert "'inner'" in str(refused)
            return
    torch.testing.assert_close(got.detach(), want)


@pytest.mark.parametrize("extreme", [None, math.nan, math.inf, 3e38])
def test_examples_that_mix_in_a_module_without_a_rule_are_refused(extreme: float | None) -> None:
    """Also where one of them is so large that it is not compared: the others feel it."""
    model, x = Net(lambda m, x: (x - x.mean(0)) * m.g, g=nn.Parameter(torch.randn(5))), torch.randn(N, 5)
    if extreme is not None:
        x[2] = extreme
    refused(model, x, "engine.examples-not-separate")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("extreme", [math.nan, math.inf, 3.4e38])
def test_an_example_that_overflows_is_no_proof_of_mixing(extreme: float) -> None:
    """Whether a sum of numbers near the largest overflows is a matter of its order."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 32)), nn.Linear(32, 2))
    x = torch.randn(N, 64)
    x[0] = extreme * x[0].sign()
    sums = sums_of(model, plan_of(model), x)
    assert all(torch.isfinite(value).all() for value in sums.values())


def test_an_example_that_overflows_is_no_proof_against_mixing() -> None:
    """It overflows in the batch and not alone, so that nothing is known of it: the check comes again."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = torch.where(x > 1e30, x * len(x), x) * m.g
        return y + y.mean(0) if m.mix else y

    model, x = Net(forward, g=nn.Parameter(torch.ones(5)), mix=False), torch.randn(N, 5)
    x[0] = 3e38
    with Engine(model, plan_of(model)):
        model(x)
        model.mix = True
        with raises_code("engine.examples-not-separate"):
            model(torch.randn(N, 5))


def test_a_module_called_without_the_batch_is_refused() -> None:

    model = Net(
        lambda m, x: m.l(x + m.table()),
        table=Net(lambda m, ids=None: m.t, t=nn.Parameter(torch.randn(3, 5))),
        l=nn.Linear(5, 2),
    )
    with Engine(model, plan_of(model)), raises_code("engine.no-batch-argument"):
        model(torch.randn(N, 3, 5))
    agree(model, torch.randn(N, 3, 5), engine={"per_contribution": [""]})


def test_examples_said_where_the_first_argument_does_not_show_them() -> None:

    model = Net(lambda m, t, x: m.l((x + m.position(t)).tanh()), position=nn.Embedding(7, 5), l=nn.Linear(5, 2))
    x, times = torch.randn(N, 4, 5), torch.arange(4)
    plan = plan_of(model, 0.1)
    with Engine(model, plan) as engine:
        with lamina.examples(N):
            out = model(times, x)
        sums = engine.clipped_sums(out.square().flatten(1).mean(1), Batch(x))
        usual = model.position(times.expand(N, -1))
        again = model.l((x + usual).tanh()).square().flatten(1).mean(1)
        want = engine.clipped_sums(again, Batch(x))
    tensors_close(want, sums, 1.3e-6, 1e-5)


def test_a_cache_is_refused() -> None:
    class Cache:
        def update(self) -> None: ...

    model = Net(lambda m, x, cache: x * m.g, g=nn.Parameter(torch.randn(5)))
    with Engine(model, plan_of(model)), raises_code("engine.cache-argument"):
        model(torch.randn(N, 5), Cache())


def test_dropout_differs_between_examples() -> None:

    model = Net(lambda m, x: F.dropout(x * m.g, 0.5, m.training), g=nn.Parameter(torch.ones(200)))
    with Engine(model, plan_of(model)):
        out = model(torch.ones(2, 200))
    assert not torch.equal(out[0], out[1])


class ScaledEmbedding(nn.Embedding):
    """As Hugging Face's Gemma has it: no rule fits it, so it runs under vmap."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3.0 * super().forward(ids)


def test_the_padding_row_of_a_table_has_no_gradient_in_any_example() -> None:
    """torch.vmap leaves it out of the first example alone: then what one contribution adds depends on its place."""
    torch.manual_seed(0)
    model = nn.Sequential(ScaledEmbedding(9, 4, padding_idx=0), nn.Tanh(), nn.Linear(4, 2))
    ids = torch.tensor([[0, 1, 2], [0, 0, 3], [4, 0, 0], [5, 6, 0]])
    engine, _, _ = lamina.make_private(model, ids, noise_multiplier=1.0, clip_norm=0.5, batch=2, steps=2)
    sums = engine.clipped_sums(model(ids).sum((1, 2)), lamina.Batch(ids))
    assert torch.equal(sums["0.weight"][0], torch.zeros(4))
    alone = [engine.clipped_sums(model(ids[i : i + 1]).sum((1, 2)), lamina.Batch(ids[i : i + 1])) for i in range(4)]
    for name, found in sums.items():
        torch.testing.assert_close(found, torch.stack([each[name] for each in alone]).sum(0), rtol=1e-5, atol=1e-7)


class IndexedBias(nn.Module):
    """Like the attention of LeViT: in evaluation mode the bias is looked up once and cached until training mode."""

    def __init__(self, heads: int = 4, positions: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.biases = nn.Parameter(torch.randn(heads, positions))
        self.register_buffer("places", torch.randint(positions, (positions, positions)))
        self.kept: Tensor | None = None

    def train(self, mode: bool = True) -> IndexedBias:
        super().train(mode)
        if mode:
            self.kept = None
        return self

    def bias(self) -> Tensor:
        if self.training:
            return self.biases[:, self.places]
        if self.kept is None:
            self.kept = self.biases[:, self.places]
        return self.kept

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1) + self.bias()).softmax(-1)
        out: Tensor = self.out((attention @ v).transpose(1, 2).reshape(x.shape))
        return out


class Gated(nn.Module):
    """A branch that ends in zeros, as the last layer of many a residual branch or classifier does at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gate = nn.Parameter(torch.rand(8) + 0.5), nn.Linear(8, 8)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(x * self.scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [3, 4, 5])
@pytest.mark.parametrize("zero", [False, True])
def test_a_table_that_is_indexed_and_kept_in_evaluation(length: int, zero: bool) -> None:
    """Heads, positions and entries of the table have one length, so that a copy on a wrong axis is not refused by its shape."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), IndexedBias(4, length), nn.Linear(8, 3))
    if zero:
        nn.init.zeros_(model[1].out.weight)
    agree(model.train(), torch.randn(length, length, 5), must_clip=False)
    kept = model[1].kept
    assert kept is None  # what was looked up with other values is not used in an evaluation


@pytest.mark.parametrize("count", [2, 4, 6])
def test_a_scale_in_a_branch_that_is_closed_at_first(count: int) -> None:
    """With as many examples as positions, a copy for each example could be taken for one for each position."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), Gated(), nn.Linear(8, 3))
    zeros = [p.detach().clone() for p in model[1].gate.parameters()]
    x = torch.randn(count, 4, 5)
    plan = plan_of(model, 0.05)
    with Engine(model, plan, noise=SeededNoise(1)) as engine:
        engine.probe(lambda x, y: losses_of(model, x, y), torch.randn(4, 4, 5))
        assert all(torch.equal(p, zero) for p, zero in zip(model[1].gate.parameters(), zeros, strict=True))
        engine.backward(losses_of(model, x, None), Batch(x))
        model.zero_grad()
        with torch.no_grad():
            model[1].gate.weight.copy_(torch.randn(8, 8))
        ref = clip_by_hand(unit_grads(example_grads(model, x), Batch(x)), [0] * count, plan)
        difference(engine.clipped_sums(losses_of(model, x, None), Batch(x)), ref)
