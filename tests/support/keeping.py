"""Ledgers that promise nothing by themselves, charges whose price is known, and plans whose epochs verify."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keyless
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from lamina.account.charges import Charge, stored_charge
from lamina.ledger.attempts import Attempt
from lamina.ledger.corpus_terms import NO_POLICY, CorpusTerms, open_or_create
from lamina.ledger.governance_records import ClassBounds, LedgerFloors
from lamina.ledger.records import Epoch, Segment, SegmentOutcome
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.charges import SignedAccount, follows_budget, plan_charges
from lamina.plan.risk import RiskBound
from lamina.plan.rules import FollowBudget, Injection, InjectionForm
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan
from lamina.run.run import adaptive_budget_charges, adaptive_budget_nonce
from lamina.sign.keys import PrivateKey

FIRST, SECOND, THIRD = "a1" * 16, "b2" * 16, "c3" * 16
DELTA = 1e-5
CLASSES = ("clinical", "wearable", "sensitive", "a", "b", "fine", "else")
KEY, GOVERNING = (
    PrivateKey(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"%s of the book's tests" % name).digest()))
    for name in (b"key", b"governing key")
)
PROFILE = "every layer"


def contract(**changes: Any) -> CorpusTerms:
    """No class is promised anything, unless `promised` gives it a noise multiplier in 1e-6, or `risks` a risk bound."""
    promised: dict[str, int] = changes.pop("promised", {})
    risks: dict[str, RiskBound] = changes.pop("risks", {})
    given: dict[str, Any] = {
        "origin": "o",
        "accountant": "gaussian",
        "delta": DELTA,
        "floors": LedgerFloors(),
        "presets": tuple(
            ClassBounds(
                cls=name,
                clip_norm=1_000_000 if name in promised else 0,
                noise_multiplier=promised.get(name, 0),
                profile=PROFILE,
                risk=risks.get(name),
            )
            for name in CLASSES
        ),
        "policy": NO_POLICY,
    }
    return CorpusTerms(**{**given, **changes})


def open_book(where: str | Path, **changes: Any) -> SpendLedger:
    """The book of a ledger, which is made if there is none."""
    return SpendLedger(open_or_create(where, contract(**changes), KEY, governing=GOVERNING))


@contextmanager
def passing_book(**changes: Any) -> Iterator[SpendLedger]:
    """In memory where the system has a place for that, where syncing is free."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        made = open_book(Path(folder) / "ledger.db", **changes)
        try:
            yield made
        finally:
            made.ledger.close()


def contents(book: SpendLedger) -> keyless.Tables:
    """Every row of every table of a ledger in a file."""
    return keyless.contents(book.path)


# --------------------------------------------------------------------------------------- charges


def owed(steps: int, *, sigma: float = 10.0, q: float = 1.0, cls: str = "clinical", **other: Any) -> Charge:
    """A charge whose price is exact and quick: the Gaussian mechanism without sampling."""
    given = {"cls": cls, "sigma": sigma, "q": q, "steps": steps, "delta": DELTA, "accountant": "gaussian"}
    return stored_charge(**{**given, **other})


def exact(*events: tuple[float, int], delta: float = DELTA) -> float:
    """ε of Gaussian releases (sigma, steps), solved from Φ(μ/2-ε/μ) - e^ε Φ(-μ/2-ε/μ) = δ."""
    mu = math.sqrt(sum(steps / sigma**2 for sigma, steps in events))
    if mu == 0:
        return 0.0

    def excess(epsilon: float) -> float:
        far = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
        return float(ndtr(mu / 2 - epsilon / mu)) - far - delta

    return 0.0 if excess(0) <= 0 else float(brentq(excess, 0, 500, xtol=1e-12))


def pay(book: SpendLedger, run: str, segment: int, *charges: Charge, bound: float | None = None, **other: Any) -> bool:
    bounds = {} if bound is None else {str(each.account): bound for each in charges}
    given = {"generation": 0, "nonce": b"n" * 16, **other}
    return book.charge(run, segment=segment, charges=charges, bounds=bounds, **given)


def hold(book: SpendLedger, run: str, *charges: Charge, bound: float | None = None, **other: Any) -> None:
    bounds = {} if bound is None else {str(each.account): bound for each in charges}
    book.reserve(run, charges=charges, bounds=bounds, **other)


def spent(book: SpendLedger, cls: str = "clinical") -> tuple[float, float]:
    found = book.total(cls, delta=DELTA, accountant="gaussian")
    return found.spent, found.committed


# --------------------------------------------------------------------------------------- plans and epochs


def plan(steps: int = 40, sigma: float = 6.0, **changes: Any) -> StepPlan:
    """Two layers and two private classes, one of which reaches the upper layer only; sampled at 2 %."""
    given: dict[str, Any] = {
        "layers": tuple(
            PlannedLayer(
                name=f"layer.{i}", depth=float(i), parameters=(f"layer.{i}.weight",), size=64, spans=((i, i + 1),)
            )
            for i in range(2)
        ),
        "blocks": 2,
        "classes": tuple(
            PlannedClass(name=name, population=1000, sampling_rate=0.02, delta=DELTA, unit="patient", profile=PROFILE)
            for name in ("clinical", "wearable")
        ),
        "clip": ((0.8, 0.6), (0.0, 0.5)),
        "noise": (sigma, sigma),
        "batch": 40.0,
        "steps": steps,
        "accountant": "rdp",
    }
    return StepPlan(**{**given, **changes})


def capped(occurrences: int = 4, **changes: Any) -> StepPlan:
    """Raw noise: who takes part pays for every occurrence, of which there are few."""
    return plan(injection=Injection(form=InjectionForm.RAW, occurrences=occurrences), **changes)


def following(**changes: Any) -> StepPlan:
    """Noise that follows its budget."""
    return plan(rules=(FollowBudget(order=16),), accountant="rdp@16", **changes)


def signed(name: str, scale: float, epsilon: float = 50.0) -> SignedAccount:
    return SignedAccount(name=name, cls=name.partition("@")[0], scale=scale, epsilon=epsilon)


@dataclass
class Attempts:
    """A run as it charges segments of ten steps, and records them."""

    book: SpendLedger
    run: str = FIRST
    plan: StepPlan = field(default_factory=plan)
    accounts: tuple[SignedAccount, ...] = ()
    bounds: dict[str, float] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # segment → the generation of it that was closed last

    def segment(self, index: int, generation: int = 0, **changes: Any) -> Segment:
        given: dict[str, Any] = {
            "index": index,
            "generation": generation,
            "nonce": hashlib.sha256(f"{self.run} {index} {generation}".encode()).digest()[:16],
            "first": 10 * index,
            "last": 10 * index + 10,
            "eligibility": self.book.ledger.retry_while_lost(lambda: self.book.ledger.size),
            "outcome": SegmentOutcome.CLOSED,
            "after": self.newest.get(index - 1, 0) or None,
        }
        return Segment(**{**given, **changes})

    def charge(self, index: int = 0, generation: int = 0, due: Sequence[Charge] | None = None, **other: Any) -> bool:
        """Charge what the plan takes in these steps, or what is given."""
        made = self.segment(index, generation)
        if due is None:
            due = plan_charges(self.plan, made.first, made.last, self.accounts)
        all_of_them = self.plan.injection.occurrences is not None or follows_budget(self.plan)
        given: dict[str, Any] = {
            "segment": index,
            "generation": generation,
            "nonce": made.nonce,
            "charges": due,
            "bounds": self.bounds,
            "scales": {
                a.name: a.scale for a in self.accounts if all_of_them or a.name in {str(each.account) for each in due}
            },
            "plan": self.plan.digest(),
            "begun": _begun(made),
        }
        return self.book.charge(self.run, **{**given, **other})

    def budget(self) -> None:
        """Charge the whole of a budget that is followed, as a run does when it begins."""
        for segment, due in adaptive_budget_charges(self.plan, self.accounts).items():
            mark, generation = adaptive_budget_nonce(self.plan), 0
            while not self.charge(generation=generation, due=due, segment=segment, nonce=mark):
                generation += 1

    def record(self, index: int, generation: int = 0, **changes: Any) -> int:
        segment = self.segment(index, generation, **changes)
        if segment.outcome is SegmentOutcome.CLOSED:
            self.newest[index] = generation
        key, scales = (index, generation, segment.nonce), {each.name: each.scale for each in self.accounts}
        begun = _begun(segment)
        return self.book.record(self.run, key, begun, segment.outcome, plan=self.plan, scales=scales)

    def done(self, *indices: int) -> None:
        for index in indices:
            assert self.charge(index)
            self.record(index)


def _begun(made: Segment) -> Attempt:
    return Attempt(first=made.first, last=made.last, eligibility=made.eligibility, after=made.after or 0)


def epochs(ledger: Ledger) -> list[Epoch]:
    return [leaf.record for leaf in ledger.of_kind(Epoch) if isinstance(leaf.record, Epoch)]


def verified(book: SpendLedger) -> Verification:
    """Everything in the ledger is as an auditor finds it who trusts its key only."""
    found = verify(book.ledger.store, trust=Trust(plain=(GOVERNING.public, KEY.public)))
    assert found.verified and found.trusted, found.problem
    assert found.signed == found.size
    return found


def stated(book: SpendLedger) -> dict[str, float]:
    """By account, the spend that the last epoch of it states, in 1e-9."""
    return {str(each.bound): each.spend for epoch in epochs(book.ledger) for each in epoch.accounts}
