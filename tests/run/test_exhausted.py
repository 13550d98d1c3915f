"""Exhausted signed bounds stop nobody else, where the policy says so: who signed them is left out, or scaled."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import asker, succeeded
from audit_steps import target_of
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from history_acts import drawn_with_people
from hospital import POLICY, Hospital, loss, net
from open_charges import has_begun
from refusals import raises_code
from run_state import attempts, open_attempt, run_id
from stopping import During, Killed, die
from wards import Ward

from lamina import LayerStack, Policy, Trainer, make_plan
from lamina.account.charges import Account
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.allocate.ladp import LADP
from lamina.audit.paired_step import paired_step
from lamina.engine.batch import Batch
from lamina.ledger.contribution_trace import trace_contribution
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord, Epoch
from lamina.plan.charges import SignedAccount
from lamina.plan.rules import Injection, InjectionForm
from lamina.plan.signed_bounds import REMAINING_FACTORS
from lamina.run.sampler import Sampler
from lamina.run.trainer_checks import remaining_factors

USUAL, STRICT, MIDDLE, TOP = (
    f"{cls}@c=1,z={z}" for cls, z in (("clinical", "0.290042"), ("clinical", 2), ("clinical", 1.2), ("sensitive", 1.5))
)
SIGNED = {"c00": 2.0, "c01": 2.0, "c02": 1.2, "s00": 1.5}
WIDE = POLICY.replace("epsilon = 4.0", "epsilon = 20.0").replace("epsilon = 2.0", "epsilon = 20.0")


@lru_cache
def first_day(root: Path, exhausted: str, everybody: bool) -> Hospital:
    """Ten clinical and four sensitive patients. A run takes ε = 2 of each; four of them, or all, signed for little."""
    policy = Policy.parse(WIDE.replace("[corpus]", f'[corpus]\nexhausted = "{exhausted}"'))
    made = Hospital(root / f"{exhausted}-{everybody}", policy=policy)
    made.trust()
    classes = {f"c{i:02d}": "clinical" for i in range(10)} | {f"s{i:02d}": "sensitive" for i in range(4)}
    for seed, name in enumerate(classes):
        made.write(name, seed)
    made.sign(classes, **({"noise_multiplier": 2.0} if everybody else {}))
    for name, z in SIGNED.items():
        if not everybody:
            made.sign({name: classes[name]}, noise_multiplier=z)
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exhausted")


def hospital(root: Path, tmp_path: Path, exhausted: str, *, everybody: bool = False) -> Hospital:
    made = first_day(root, exhausted, everybody)
    shutil.copytree(made.root, tmp_path / "ward")
    return Hospital(tmp_path / "ward", policy=made.policy, key=made.key)


def trainer(made: Hospital, name: str, **options: Any) -> Trainer:
    return made.trainer(name, plan=options.pop("plan", None) or made.plan(net(), epsilon=2.0), **options)


def ledger_of(made: Hospital) -> Path:
    return made.root / "runs" / "ward-7.ledger.db"


def told(made: Hospital, name: str) -> list[dict[str, tuple[float, int]]]:
    """By segment of a run: factor and charged steps of each account, as the ledger has them."""
    run = bytes.fromhex(run_id(made.root / "runs" / name))
    with LedgerReader.read_only(ledger_of(made)) as ledger:
        records = [leaf.record for leaf in ledger.of_kind(Epoch)]
    return [
        {str(each.bound): (each.factor, sum(c.steps for c in each.charges)) for each in epoch.accounts}
        for epoch in records
        if isinstance(epoch, Epoch) and epoch.run == run
    ]


# ---------------------------------------------------------------------------------------- what a policy chooses


def test_refusing_is_the_default_and_as_before(root: Path, tmp_path: Path) -> None:
    assert Policy.parse(POLICY).corpus.exhausted == "refuse" == Policy.template().corpus.exhausted
    made = hospital(root, tmp_path, "refuse")
    trainer(made, "a").fit()
    with raises_code("spend.budget-exceeded"):
        trainer(made, "b").fit()
    assert not has_begun(made.root / "runs" / "b")
    with raises_code("plan.policy-invalid"):
        Policy.parse(POLICY.replace("[corpus]", '[corpus]\nexhausted = "ignore"'))


def test_who_is_exhausted_is_left_out_of_the_segments_that_the_bound_does_not_cover(root: Path, tmp_path: Path) -> None:
    made = hospital(root, tmp_path, "leave-out")
    first, second = trainer(made, "a").fit(), trainer(made, "b")
    assert not any("exhausted" in note for note in first.notes)
    outcome = second.fit()
    assert outcome.steps == outcome.planned == 12
    assert [note.partition(" from")[0] for note in outcome.notes] == [
        "signed bound 'c=1,z=2' of class 'clinical' (contributions: 2) is exhausted by earlier charges: left out",
        "signed bound 'c=1,z=1.5' of class 'sensitive' (contributions: 1) is exhausted by earlier charges: left out",
    ]
    for number, accounts in enumerate(told(made, "b")):
        assert accounts["clinical"] == accounts["sensitive"] == accounts[USUAL] == accounts[MIDDLE] == (1.0, 3)
        assert accounts[STRICT] == (0.0, 0)
        assert accounts[TOP] == ((0.0, 0) if number == 3 else (1.0, 3))
    bounds = made.figures("b")["bounds"]
    assert (bounds[STRICT]["steps_left_out"], bounds[STRICT]["steps_scaled"], bounds[STRICT]["epsilon"]) == (12, 0, 0)
    assert bounds[TOP]["steps_left_out"] == 3 and "steps_left_out" not in bounds[MIDDLE]
    assert all(row["total"] <= row["signed"] for row in bounds.values())
    certified = {
        (cls, round(row["noise_multiplier"], 6)): [row[f] for f in ("contributions", "epochs", "epochs_left_out", "epochs_scaled", "scale")]
        for cls, each in outcome.certificate.classes.items() for row in each["bounds"]
    }  # fmt: skip
    assert certified["clinical", 0.290042][:3] == [7, 4, 0] and certified["clinical", 2.0] == [2, 4, 4, 0, 0.0]
    assert certified["sensitive", 1.5][:3] == [1, 4, 1] and certified["clinical", 1.2][:3] == [1, 4, 0]


def test_who_is_exhausted_is_scaled_to_what_remains(root: Path, tmp_path: Path) -> None:
    made = hospital(root, tmp_path, "scale")
    factors: list[float] = []
    for name in "abc":
        trainer(made, name).fit()
        factors += [accounts[TOP][0] for accounts in told(made, name)]
    assert factors[:4] == [1.0] * 4 and factors == sorted(factors, reverse=True)
    assert {0.5, 0.25} <= set(factors) <= set(REMAINING_FACTORS["scale"])
    with LedgerReader.read_only(ledger_of(made)) as ledger:
        plan = trainer(made, "c").plan
        for leaf in ledger.of_kind(Epoch):
            assert isinstance(leaf.record, Epoch) and leaf.record.plan == plan.digest()  # N, q, B and S are the plan's
            assert leaf.record.variance == tuple(s * s for s in plan.noise)
            for each in leaf.record.accounts:
                assert [c.sigma for c in each.charges] == ([plan.sigma(each.cls, each.scaled)] if each.factor else [])
                assert {c.q for c in each.charges} <= {plan.classes[plan.index(each.cls)].sampling_rate}


def test_a_contributor_reads_in_the_ledger_that_it_was_left_out(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = hospital(root, tmp_path, "leave-out")
    for name in "ab":
        trainer(made, name).fit()
    where = ledger_of(made)
    with LedgerReader.read_only(where) as ledger:
        leaves = {leaf.record.bound: leaf for leaf in ledger.of_kind(ContributionRecord)}
        found = trace_contribution(ledger, leaves[Account.parse(STRICT)])
    assert [each.factor for each in found.epochs] == [1.0] * 4 + [0.0] * 4
    assert found.epochs[3].spend == found.spend <= (found.signed or 0)
    assert [each["factor"] for each in found.to_dict()["epochs"]] == [1.0] * 4 + [0.0] * 4
    ask = asker(capsys, "ledger")
    assert "left out   of 4 epochs" in succeeded(ask("trace", str(where), str(found.leaf.seq)))
    assert "(exhausted: left out)" in succeeded(ask("show", str(where), "--kind", "epoch"))


# ---------------------------------------------------------------------------------------- what is drawn


def test_who_is_left_out_is_never_drawn_and_who_is_scaled_has_smaller_thresholds(root: Path, tmp_path: Path) -> None:
    made = hospital(root, tmp_path, "scale")
    corpus, plan = made.admit(), made.plan(net(), epsilon=2.0)
    factors = {STRICT: 0.0, TOP: 0.25}
    everyone, fewer = (np.concatenate(corpus.members_of(plan, given)) for given in ({}, factors))
    assert {corpus.ids[row] for row in set(everyone) - set(fewer)} == {"c00", "c01"}
    rows = np.array([corpus.ids.index(name) for name in ("c02", "s00", "s01")])
    before, after = (corpus.limits_of(plan, None, given)(rows)[0] for given in ({}, factors))
    whole = torch.ones(3, dtype=torch.float64) if before is None else before
    assert after is not None and torch.equal(after, whole * torch.tensor([1.0, 0.25, 1.0], dtype=torch.float64))
    drawn = Counter(len(Sampler(corpus, plan, seed=bytes([n]) * 32, factors=factors).draw(0)) for n in range(60))
    assert max(drawn) <= len(fewer)
    assert corpus.count_signed(STRICT) == 2 and corpus.count_signed("clinical@c=1,z=7") == 0


@pytest.mark.parametrize("clipping", ["flat", "uniform"])
def test_the_influence_of_a_scaled_contribution_is_bounded_by_its_factor(
    root: Path, tmp_path: Path, clipping: str
) -> None:
    """The paired-seed audit under the limits that the sampler gives a batch: with and without it, the same noise."""
    made = hospital(root, tmp_path, "scale")
    model = net()
    corpus, plan = made.admit(), made.plan(model, epsilon=2.0, allocate=clipping)
    assert plan.clipping.value == {"flat": "joint", "uniform": "box"}[clipping]
    rows = np.array([corpus.ids.index(name) for name in ("s00", "c03", "c04", "s01")])
    x, y = corpus.source.fetch(corpus.layout.rows_of(rows))
    scale, ceiling = corpus.limits_of(plan, None, {TOP: 0.25})(rows)
    assert scale is not None and scale[0] == pytest.approx(0.25, rel=1e-3)
    unit = torch.arange(4).repeat_interleave(2)
    cls = torch.tensor(
        [plan.index("sensitive"), plan.index("clinical"), plan.index("clinical"), plan.index("sensitive")]
    )
    x[:2] *= 1e4  # its gradient is far beyond every threshold
    batch = Batch(x, y, unit=unit, cls=cls, scale=scale, ceiling=ceiling)
    found = paired_step(target_of(model, plan, losses_of=lambda x, y: loss(model(x), y)), batch, 0)
    own = plan.sigma("sensitive", float(scale[0]))
    assert found.sound and found.scale == pytest.approx(float(scale[0]))
    assert 0.5 / own < found.sensitivity <= 1 / own * (1 + 1e-6)
    assert found.sensitivity < 0.26 / plan.sigma("sensitive")


# ---------------------------------------------------------------------------------------- killed and resumed


@pytest.mark.usefixtures("known_seeds")
def test_a_killed_segment_is_replayed_with_the_same_members(root: Path, tmp_path: Path) -> None:
    """Another run charges the bound meanwhile: the open segment keeps its factor, and the next one sees the charge."""
    made = hospital(root, tmp_path, "scale")
    trainer(made, "a").fit()
    whole = shutil.copytree(made.root, tmp_path / "whole", symlinks=True)
    same = Hospital(whole, policy=made.policy, key=made.key)
    kept = trainer(same, "b")
    kept.fit()
    with pytest.raises(Killed):
        trainer(made, "b", progress=During({11: die})).fit()
    pending = open_attempt(made.root / "runs" / "b")
    assert pending is not None and pending.segment == 3 and pending.factors == {STRICT: 0.0, TOP: 0.5}
    trainer(made, "c", plan=made.plan(net(), epsilon=2.0, steps=3)).fit()
    again = trainer(made, "b")
    outcome = again.fit()
    assert not any("done again" in note for note in outcome.notes)
    found = [each.factors for each in attempts(made.root / "runs" / "b")]
    assert found == [each.factors for each in attempts(whole / "runs" / "b")]
    for one, other in zip(kept.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def spends(where: str) -> dict[tuple[str, int, int], float]:
    """ε of every signed bound by the accountant of dp-accounting, from the leaves alone."""
    events: dict[tuple[str, int, int], Counter[tuple[float, float]]] = {}
    with LedgerReader.read_only(where) as ledger:
        for leaf in ledger.of_kind(Epoch):
            assert isinstance(leaf.record, Epoch)
            for account in leaf.record.accounts:
                for each in account.charges if account.noise_multiplier else ():
                    events.setdefault(account.bound, Counter())[each.sigma, each.q] += each.steps
    found = {}
    for bound, counts in events.items():
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        for (sigma, q), steps in counts.items():
            accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
        found[bound] = float(accountant.get_epsilon(1e-5))
    return found


@pytest.mark.parametrize(
    ("seed", "exhausted"),
    [
        (5, "scale"),
        (8, "leave-out"),
        *(pytest.param(s, m, marks=pytest.mark.slow) for s in range(20, 40) for m in ("scale", "leave-out")),
    ],
)
def test_whatever_happens_to_runs_nobody_loses_more_than_was_signed(
    root: Path, tmp_path: Path, seed: int, exhausted: str
) -> None:
    """Runs are killed, copied, put back and lost, people come and go; an auditor looks after every act."""
    world = Ward(tmp_path, first=root, exhausted=exhausted)
    world.live([act for act in drawn_with_people(seed, 14, ("exact",)) if act["do"] != "restore_ledger"])
    assert not world.stuck
    for bound, epsilon in spends(world.place).items():
        assert epsilon <= epsilon_of_noise_multiplier(bound[2] / 1e6, 1e-5) * (1 + 1e-6), bound
    with LedgerReader.read_only(world.place) as ledger:
        factors = {each.factor for leaf in ledger.of_kind(Epoch) for each in leaf.record.accounts}
    assert factors <= set(REMAINING_FACTORS[exhausted]) and (seed >= 20 or 0.0 in factors)


# ---------------------------------------------------------------------------------------- what is refused


def test_a_run_in_which_nobody_is_left_is_refused_before_anything_is_charged(root: Path, tmp_path: Path) -> None:
    made = hospital(root, tmp_path, "leave-out", everybody=True)
    first = trainer(made, "a").fit()
    assert first.steps == 12
    with raises_code("train.everybody-exhausted"):
        trainer(made, "b").fit()
    assert not has_begun(made.root / "runs" / "b")


def test_a_run_in_which_nobody_is_left_later_ends_there(root: Path, tmp_path: Path) -> None:
    made = hospital(root, tmp_path, "leave-out", everybody=True)
    trainer(made, "a", plan=made.plan(net(), epsilon=1.6)).fit()
    outcome = trainer(made, "b", segment=1).fit()
    assert 0 < outcome.steps < 12 and any("all contributions are exhausted" in note for note in outcome.notes)
    assert outcome.epsilon["clinical"] < 2.0  # nobody is trained on, so nobody is charged


def test_what_cannot_be_proven_is_refused(root: Path, tmp_path: Path) -> None:
    made = hospital(root, tmp_path, "scale")
    adaptive = make_plan(LayerStack.from_model(net()), made.policy, batch=30, steps=12, epsilon=2.0, allocate=LADP())
    with raises_code("train.exhausted-not-provable"):
        trainer(made, "a", plan=adaptive)
    corpus, plan = made.admit(), made.plan(net(), epsilon=2.0)
    further = SignedAccount(name="clinical@c=1,z=3", cls="clinical", scale=1.0, epsilon=1.0)
    with raises_code("train.exhausted-not-provable"):
        remaining_factors(corpus, plan, [further])
    with raises_code("train.exhausted-not-provable"):
        remaining_factors(corpus, replace(plan, injection=Injection(form=InjectionForm.RAW, occurrences=3)), ())
    assert remaining_factors(corpus, plan, ()) == REMAINING_FACTORS["scale"]
