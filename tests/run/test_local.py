"""`make_private` signs with a local key: one attestation for all of the data, verified by the gate."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import raises_code
from torch import nn
from torch.utils.data import Dataset

import lamina
from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.schedule import Event
from lamina.ledger.verify.verifier import verify
from lamina.plan.correlation import best_bands
from lamina.plan.table import epsilon_text
from lamina.run import private
from lamina.run.private import LargeClipNorm, typical_norm

pytestmark = pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")  # one set of data for all

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 2


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def made(
    data: Any = (X, Y), model: nn.Module | None = None, **options: Any
) -> tuple[lamina.Engine, lamina.Corpus, lamina.StepPlan]:
    return lamina.make_private(
        model or net(), data, **{"epsilon": 3.0, "delta": 1e-5, "batch": 10, "steps": 5, **options}
    )


def test_one_attestation_says_what_the_data_is_allowed_to_lose() -> None:
    key = lamina.PrivateKey.generate()
    _, corpus, plan = made(unit=np.arange(60) // 3, key=key)
    admission = corpus.admission
    assert admission is not None and len(admission) == 1 and not admission.refused
    found = admission[0]
    assert found.kid == key.public.id
    assert found.items == 20  # contributions, not rows
    assert found.account.cls == plan.classes[0].name == "data"
    assert 2.9999 < epsilon_of_noise_multiplier(found.account.z, 1e-5) <= 3.0
    assert found.account.c == 0.1
    assert found.expires > time.time()


def test_the_commitment_is_to_all_data_and_to_whose_it_is() -> None:
    commitments = set()
    for x, unit in ((X, None), (X.clone(), None), (X + 1, None), (X, np.arange(60) // 3)):
        corpus = lamina.Corpus(x, Y, unit=unit)
        commitments.add(corpus.fingerprint())
    assert len(commitments) == 3
    _, corpus, _ = made()
    _, again, _ = made()
    assert corpus.admission is not None and again.admission is not None
    assert corpus.admission.holds(0, corpus.fingerprint())
    assert not corpus.admission.holds(0, lamina.Corpus(X + 1, Y).fingerprint())
    # Under a nonce: the same data twice does not show that it is the same.
    one, other = (bytes(each.admission.columns["commitment"][0]) for each in (corpus, again))  # type: ignore[union-attr]
    assert one != other


def test_a_version_stands_for_the_data() -> None:
    one, other = (lamina.Corpus(x, Y, version="2024-03") for x in (X, X + 1))
    assert one.fingerprint() == other.fingerprint() != lamina.Corpus(X, Y, version="2024-04").fingerprint()


class Walked(Dataset[Any]):
    """Counts how often an example is made."""

    def __init__(self) -> None:
        self.made = 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> Any:
        self.made += 1
        return X[i], Y[i]


def test_a_dataset_is_walked_only_when_its_evidence_is_asked_for() -> None:
    dataset = Walked()
    _, corpus, _ = made(dataset)
    assert dataset.made < 10
    first = corpus.admission
    assert first is not None and dataset.made > 60
    assert corpus.admission is first and first[0].items == 60
    versioned = Walked()
    _, told, _ = made(lamina.Corpus(versioned, version="1"))
    assert told.admission is not None and versioned.made < 10


def test_a_corpus_that_was_admitted_keeps_its_evidence() -> None:
    _, corpus, _ = made()
    first = corpus.admission
    _, again, _ = made(corpus)
    assert again is corpus and corpus.admission is first


def test_signing_is_a_small_part_of_starting_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is some 4 seconds, nearly all of it the import of torch."""
    spent = []
    real = private.sign_corpus

    def timed(*args: Any) -> Any:
        began = time.process_time()
        found = real(*args)
        spent.append(time.process_time() - began)
        return found

    monkeypatch.setattr(private, "sign_corpus", timed)
    x = torch.randn(5_000, 100)
    lamina.make_private(nn.Linear(100, 2), (x, torch.zeros(5_000).long()), epsilon=2.5, batch=100, epochs=5)
    assert spent[0] < 0.2


def test_the_plan_follows_a_declared_population_and_not_who_is_there() -> None:
    plans = [made((X[:n], Y[:n]), population=100)[2] for n in (59, 60)]
    assert plans[0] == plans[1] and plans[0].classes[0].population == 100
    with raises_code("train.population-below-corpus"):
        made(population=59)
    engine, _, plan = made(population=100)
    assert "add/remove" in repr(engine) and plan.epsilon(0) <= 3.0


def test_a_second_plan_for_the_same_data_says_what_both_cost() -> None:
    first, _, one = made()
    assert "this run spends ε = 3.0000 per example" in repr(first)
    assert "Another run on the same data adds to it" in repr(first)
    with pytest.warns(private.PlannedBefore) as caught:
        _, _, two = made((X.clone(), Y), epsilon=1.0)
    both = find_accountant("pld").epsilon((*one.schedule(0), *two.schedule(0)), 1e-5)
    assert f"together they cost ε {epsilon_text(both)}" in str(caught[0].message)
    assert "simulated" in str(caught[0].message) and 3.0 < both < 4.0
    assert caught[0].filename == __file__  # where make_private was called
    made((X + 1, Y))  # other data


def test_without_a_population_the_claim_is_zero_out_at_a_public_number(tmp_path: Path) -> None:
    plans = [made((X[:n], Y[:n]))[2] for n in (59, 60)]
    assert plans[0].noise != plans[1].noise  # noise and rate show the number: it cannot be secret
    engine, corpus, plan = made()
    for words in ("zero-out", "60", f"replace-one: {epsilon_text(plan.epsilon(0, 'replace_one'))}"):
        assert words in engine.claim and words in repr(engine)
    assert "add/remove" not in repr(engine)
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss(reduction="none")
    trainer = lamina.Trainer(
        engine.model, optimizer, loss, corpus, plan, engine=engine, folder=tmp_path / "run", progress=False
    )
    assert engine.claim in trainer.fit().notes


def test_names_of_opacus_are_refused_with_ours() -> None:
    model, x = nn.Linear(3, 2), torch.zeros(40, 3)
    theirs = {
        "max_grad_norm": "clip_norm=", "target_epsilon": "epsilon=", "target_delta": "delta=", "data_loader": "(x, y)",
        "optimizer": "engine.backward", "batch_size": "batch=", "module": "make_private(model",
    }  # fmt: skip
    for name, ours in theirs.items():
        with raises_code("train.opacus-name") as refusal:
            lamina.make_private(model, x, batch=4, steps=2, **{name: 1.0})  # type: ignore[arg-type]
        assert ours in str(refusal.value)
    with raises_code("train.opacus-name"):
        lamina.make_private(module=model, optimizer=None, data_loader=x, noise_multiplier=1.1, max_grad_norm=1.0)  # type: ignore[call-arg]


def test_exactly_one_of_epsilon_and_noise_multiplier_is_given() -> None:
    with raises_code("train.epsilon-or-noise-multiplier"):
        made(epsilon=None)
    with raises_code("train.epsilon-or-noise-multiplier"):
        made(noise_multiplier=1.1)


def test_a_noise_multiplier_is_the_sigma_of_every_step_and_its_cost_is_signed() -> None:
    _, corpus, plan = made(epsilon=None, noise_multiplier=1.1)
    assert plan.sigma(0) == pytest.approx(1.1, rel=1e-9)
    cost = find_accountant("pld").epsilon([Event(sigma=1.1, q=10 / 60, steps=5)], 1e-5)
    assert plan.epsilon(0) == pytest.approx(cost, rel=1e-6)
    assert corpus.admission is not None
    assert epsilon_of_noise_multiplier(corpus.admission[0].account.z, 1e-5) == pytest.approx(cost, rel=1e-4)


def test_the_clip_norm_is_planned_and_signed() -> None:
    _, corpus, plan = made(clip_norm=0.02)
    assert plan.norm(0) == pytest.approx(0.02, rel=1e-9)
    assert plan.noise[0] == pytest.approx(0.02 * plan.sigma(0), rel=1e-9)
    assert corpus.admission is not None and corpus.admission[0].account.c == 0.02
    with raises_code("train.clip-norm-out-of-range"):
        made(clip_norm=0.0)


def class_losses(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, y, reduction="none")


PROXY = (torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 2)


def test_without_a_proxy_the_clip_norm_is_small() -> None:
    _, corpus, plan = made()
    assert plan.norm(0) == pytest.approx(0.1, rel=1e-9)
    assert corpus.admission is not None and corpus.admission[0].account.c == 0.1


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_clip_norm_follows_the_gradients_of_the_proxy_and_nothing_of_the_data(scale: float) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scale * nn.functional.cross_entropy(output, y, reduction="none")

    torch.manual_seed(3)
    model = net()
    before = torch.get_rng_state()
    plans = [
        made((x, y), model=copy.deepcopy(model), proxy=PROXY, loss_fn=loss)[2] for x, y in ((X, Y), (1000 * X, 1 - Y))
    ]
    assert plans[0] == plans[1]
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    first = [
        torch.autograd.grad(loss(model(x[None]), y[None]).sum(), list(model.parameters()))
        for x, y in zip(*PROXY, strict=True)
    ]
    norms = torch.tensor([sum(float(g.square().sum()) for g in each) ** 0.5 for each in first])
    assert 0.1 * float(norms.median()) < plans[0].norm(0) <= 0.5 * float(norms.median())
    assert plans[0].allocation == "pareto"


def test_a_model_that_comes_to_fit_its_data_gets_a_smaller_clip_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))

    def near(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (output - x).square().mean(1)

    easy = torch.randn(256, 4, generator=torch.Generator().manual_seed(2))
    plan = lamina.make_private(model, X, epsilon=3.0, batch=10, steps=5)[2]
    at_first = typical_norm(model, plan, near, lamina.Corpus(easy))
    with torch.no_grad():
        model[0].weight.copy_(0.97 * torch.eye(4))
        model[0].bias.zero_()
    assert typical_norm(model, plan, near, lamina.Corpus(easy)) < 0.2 * at_first


def test_a_clip_norm_far_above_the_gradients_of_the_proxy_is_told() -> None:
    both = {"proxy": PROXY, "loss_fn": class_losses}
    with pytest.warns(LargeClipNorm, match="50"):
        made(clip_norm=50.0, **both)
    made(clip_norm=0.5, **both)  # warnings are errors


def test_a_proxy_needs_a_loss_enough_of_it_and_is_not_the_data() -> None:
    with raises_code("train.proxy-needs-loss"):
        made(proxy=PROXY)
    with raises_code("train.proxy-needs-loss"):
        made(loss_fn=class_losses)
    with raises_code("train.proxy-is-the-data"):
        made(proxy=(X, Y), loss_fn=class_losses)
    with raises_code("train.proxy-too-small"):
        made(proxy=(PROXY[0][:9], PROXY[1][:9]), loss_fn=class_losses)
    with raises_code("train.proxy-norm-not-positive"):
        made(proxy=PROXY, loss_fn=lambda output, y: 0.0 * output.sum(1))


@pytest.mark.parametrize(("clip_norm", "told"), [(50.0, True), (0.5, False)])
def test_a_run_tells_of_a_clip_norm_far_above_the_gradients_of_simulated_examples(
    tmp_path: Path, clip_norm: float, told: bool
) -> None:
    engine, corpus, plan = made(clip_norm=clip_norm)
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    trainer = lamina.Trainer(
        engine.model, optimizer, class_losses, corpus, plan, engine=engine, folder=tmp_path / "run", progress=False
    )
    notes = trainer.fit().notes
    assert any(note.startswith("the clip norm of class data, 50") for note in notes) == told
    assert verify(next(tmp_path.glob("*.ledger.db"))).verified


def test_bands_correlate_the_noise_of_named_contributions() -> None:
    model = net()
    engine, corpus, plan = made(model=model, unit=[f"p{i}" for i in range(60)], population=60, bands=2, steps=6)
    assert plan.bands == 2
    turns = Event(sigma=plan.sigma(0), q=2 * 10 / 60, steps=3)  # six steps are three turns at twice the rate
    price = find_accountant("pld").epsilon((turns,), 1e-5)
    assert plan.epsilon(0) == pytest.approx(price, rel=1e-6) and price <= 3.0
    before = copy.deepcopy(model.state_dict())
    optimizer, schedule = lamina.private_optimizer(model, plan)
    for batch in corpus.batches(plan):
        engine.backward(
            nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none") if len(batch) else None, batch
        )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert engine.budget.taken == 6
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_auto_takes_bands_that_gain_and_none_without_names_or_population() -> None:
    named = {"unit": [f"p{i}" for i in range(60)], "population": 6000, "epsilon": 8.0, "steps": 40}
    _, corpus, plan = made(bands="auto", **named)
    assert plan.bands == best_bands(made(**named)[2]) > 1
    assert plan.epsilon(0) <= 8.0 and len(list(corpus.batches(plan, probe=False))) == 40
    for left_out in ("unit", "population"):
        less = {name: value for name, value in named.items() if name != left_out}
        with pytest.warns(UserWarning, match=f"requires {left_out}"):
            assert made(bands="auto", **less)[2].bands == 1


def test_bands_are_refused_where_turns_or_the_claim_would_not_hold() -> None:
    with raises_code("train.bands-need-population"):
        made(bands=2)
    with raises_code("plan.bands-out-of-range"):
        made(bands=0, population=60)
    _, corpus, plan = made(bands=2, population=60, steps=6)
    with raises_code("corpus.turns-without-ids"):
        next(iter(corpus.batches(plan, probe=False)))
