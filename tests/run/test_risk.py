"""Runs under a policy with a risk bound instead of ε: signed, admitted, trained, verified; the next run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hospital import Hospital, loss, net
from refusals import raises_code

import lamina
from lamina.account.charges import Account
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.tradeoff import trade_off
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.verifier import verify
from lamina.plan.policy import Policy

POLICY = """
[corpus]
origin = "ward-7"
delta = 1e-5
[class.clinical]
population = 60
risk = { of = "OF", fpr = 0.01, tpr = 0.05 }
unit = "patient"
"""


@pytest.mark.parametrize("of", ["membership", "content"])
def test_signed_contributions_are_trained_on_up_to_the_bound(tmp_path: Path, of: str) -> None:
    ward = Hospital(tmp_path, policy=Policy.parse(POLICY.replace("OF", of)))
    ward.trust()
    classes = {f"c{i:02d}": "clinical" for i in range(20)}
    for seed, name in enumerate(classes):
        ward.write(name, seed)
    ward.sign(classes)
    trainer = ward.trainer("first")
    trainer.fit()
    ledger = tmp_path / "runs" / "ward-7.ledger.db"
    with ward.ledger(ledger) as book:
        spends = SpendLedger(book)
        (bound,) = (str(account) for account, _ in spends.accounts() if account.signed)
        z = Account.parse(bound)[2] / 1e6
        assert spends.total(bound, delta=1e-5).spent <= epsilon_of_noise_multiplier(z, 1e-5)
        assert spends.total("clinical", delta=1e-5, risk=ward.policy.classes["clinical"].risk).spent <= 0.05
        events = {(sigma, q, 0.0): n for (sigma, q, _), n in spends._recorded.events(Account("clinical")).items()}
    curve = trade_off(events, accountant="pld", adjacency="add_remove" if of == "membership" else "replace_one")
    assert 0.98 * 0.05 <= curve.tpr(0.01) <= 0.05
    found = verify(ledger, now=int(ward.clock()) + 10)
    assert found.verified, found.problem
    with raises_code("spend.risk-exceeded"):
        ward.trainer("second").fit()


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_a_run_that_hides_content_alone_keeps_no_bound_on_membership(tmp_path: Path) -> None:
    """Without population= the number of contributions is public, whatever the policy declares."""
    text = POLICY.replace("OF", "membership").replace("60", "20").replace("unit", "clip_norm = 1.0\nunit")
    ward = Hospital(tmp_path, policy=Policy.parse(text))
    ward.trust()
    classes = {f"c{i:02d}": "clinical" for i in range(20)}
    for seed, name in enumerate(classes):
        ward.write(name, seed)
    ward.sign(classes)
    enough = ward.plan(net(), batch=10).sigma(0) * 1.001
    for population in (None, 20):
        model = net()
        engine, corpus, plan = lamina.make_private(
            model, ward.admit(), noise_multiplier=enough, delta=1e-5, batch=10, steps=12, clip_norm=1.0, allocate="flat",
            population=population,
        )  # fmt: skip
        with ward.ledger(tmp_path / "ledger.db") as ledger:
            trainer = lamina.Trainer(
                model, torch.optim.SGD(model.parameters(), lr=0.05), loss, corpus, plan, engine=engine, ledger=ledger,
                folder=tmp_path / f"run-{population}", progress=False,
            )  # fmt: skip
            if population is None:
                size = ledger.size
                with raises_code("train.risk-needs-population"):
                    trainer.fit()
                assert ledger.size == size
            else:
                trainer.fit()
    assert verify(tmp_path / "ledger.db", now=int(ward.clock()) + 10).verified
