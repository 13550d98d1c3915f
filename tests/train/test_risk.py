"""Runs under a policy with a risk bound instead of ε: signed, admitted, trained, verified; the next run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hospital import Hospital
from refusals import raises_code

from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.tradeoff import trade_off
from lamina.ledger.verify.verifier import verify
from lamina.plan.policy import Policy
from lamina.spend.accounts import account_bound
from lamina.spend.spend_ledger import SpendLedger

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
        (bound,) = (each.cls for each in spends.accounts() if "@" in each.cls)
        z = account_bound(bound)[2] / 1e6
        assert spends.total(bound, delta=1e-5).spent <= epsilon_of_noise_multiplier(z, 1e-5)
        assert spends.total("clinical", delta=1e-5, risk=ward.policy.classes["clinical"].risk).spent <= 0.05
        events = {
            (sigma, q, 0.0): n for (sigma, q, _), n in spends._recorded.spending.events(("clinical", 0, 0)).items()
        }
    curve = trade_off(events, accountant="pld", adjacency="add_remove" if of == "membership" else "replace_one")
    assert 0.98 * 0.05 <= curve.tpr(0.01) <= 0.05
    found = verify(ledger, now=int(ward.clock()) + 10)
    assert found.verified, found.problem
    with raises_code("spend.risk-exceeded"):
        ward.trainer("second").fit()
