"""An allocation and an accountant from outside the package: plan, training, ledger, verification, certificate, by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
from asking import refused, succeeded
from refusals import raises_code

from lamina.account.accountants import ACCOUNTANTS, Accountant, find_accountant
from lamina.allocate import Allocation, AllocationProblem, declare_allocation
from lamina.allocate.make_plan import _DECLARED
from lamina.plan.step_plan import Clipping, StepPlan

if TYPE_CHECKING:
    from conftest import Project


@dataclass(frozen=True, kw_only=True, slots=True)
class ByDepth:
    """Thresholds and noise that rise by a factor from each layer to the next."""

    name: ClassVar[str] = "by-depth"
    slope: float = 2.0

    def __call__(self, problem: AllocationProblem) -> Allocation:
        raw = [self.slope**i for i in range(len(problem.sizes))]
        length = sum(c * c for c in raw) ** 0.5
        clip = tuple(
            tuple(bound * c / length if reached else 0.0 for c, reached in zip(raw, reach, strict=True))
            for bound, reach in zip(problem.clip_norm, problem.reach, strict=True)
        )
        return Allocation(clip=clip, noise=tuple(raw), clipping=Clipping.BOX, why=("Deeper layers get more.",))


EXACT = find_accountant("gaussian")
CAUTIOUS = Accountant(
    name="cautious", amplified=False,
    _epsilon=lambda schedule, delta, relation: 1.5 * EXACT.epsilon(schedule, delta, relation),
    _delta=lambda schedule, epsilon, relation: EXACT.delta(schedule, epsilon / 1.5, relation),
)  # fmt: skip


@pytest.fixture(autouse=True)
def declared_for_one_test() -> Iterator[None]:
    yield
    _DECLARED.pop(ByDepth.name, None)


def test_both_are_used_by_name_from_plan_to_certificate(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    policy = (project.folder / "policy.toml").read_text()
    project.write("policy.toml", policy.replace("[corpus]", '[corpus]\naccountant = "cautious"'))
    run = project.run.replace("batch = 12", 'allocate = { name = "by-depth", slope = 3.0 }\nbatch = 12')
    assert project.train(run=run)[0] != 0  # not known before they are added
    declare_allocation(ByDepth())
    with raises_code("allocate.allocation-declared"):
        declare_allocation(ByDepth())
    monkeypatch.setitem(ACCOUNTANTS, CAUTIOUS.name, CAUTIOUS)
    assert "Deeper layers get more." in succeeded(project.call("plan", "first.toml", "--explain"))
    found = project.train_json(run=run)
    plan = StepPlan.from_cbor((project.folder / "runs/first/plan.cbor").read_bytes())
    assert (plan.allocation, plan.accountant) == ("by-depth", "cautious")
    assert plan.clip[0][1] == pytest.approx(3.0 * plan.clip[0][0]) and plan.noise[1] == pytest.approx(
        3.0 * plan.noise[0]
    )
    price = 1.5 * EXACT.epsilon(plan.schedule(0), 1e-5)
    assert 1.9 < price <= 2.0 and found["classes"]["clinical"]["epsilon"] == pytest.approx(price)
    (ledger,) = (project.folder / "runs").glob("*.ledger.db")
    verified = json.loads(succeeded(project.call("ledger", "verify", str(ledger), "--json")))
    assert verified["verified"] is True
    succeeded(project.call("certify", "runs/first"))
    certificate = json.loads((project.folder / "runs/first/certificate.json").read_text())
    text = json.dumps(certificate)
    assert "by-depth" in text and "cautious" in text
    monkeypatch.delitem(ACCOUNTANTS, CAUTIOUS.name)
    code, out, err = project.call("ledger", "verify", str(ledger))  # nobody else can check its figures
    assert code != 0 and "cautious" in out + err
    refused(project.call("plan", "first.toml"), "account.accountant-unknown", "plan.policy-invalid")
