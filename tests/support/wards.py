"""`Ward`: the same folders, on contributions that somebody signed. People withdraw, leave, join, and sign for less."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import hospital
import torch
from histories import World
from history_plans import NOISE, RULES, Spec, more

from lamina import LayerStack, Policy, StepPlan, Trainer, make_plan
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.governance_records import WithdrawalEffect, WithdrawalReason
from lamina.ledger.retention import Retention
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import DAY_SECONDS, Ledger
from lamina.run.admitted import AdmittedCorpus

POLICY = hospital.POLICY.replace("4.0", "60.0").replace("2.0", "60.0").replace('"ward-7"', '"tests"')
KEPT = 10 * DAY_SECONDS  # retention of the ledger
VALID = 30 * DAY_SECONDS  # of what is signed


@lru_cache(maxsize=64)
def plan_of(form: str, steps: int, noise: str) -> StepPlan:
    stack, policy = LayerStack.from_model(hospital.net()), Policy.parse(policy_of(noise))
    return make_plan(stack, policy, batch=24, steps=steps, epsilon=2.0, allocate=RULES.get(form, "flat"))


def policy_of(noise: str, exhausted: str = "refuse") -> str:
    policy = POLICY.replace("[corpus]", f'[corpus]\nexhausted = "{exhausted}"')
    return policy + (f"\n[noise]\n{NOISE[noise]}\n" if NOISE[noise] else "")


@lru_cache
def first_day(root: Path, noise: str, exhausted: str) -> hospital.Hospital:
    """Four volunteers, twelve clinical and six sensitive patients; four of these signed for less than their class.

    Where an exhausted bound stops nobody, theirs soon are: a run takes ε = 2.
    """
    made = hospital.Hospital(root / f"{noise}-{exhausted}", policy=Policy.parse(policy_of(noise, exhausted)))
    signed = (0.3, 0.5, 0.4) if exhausted == "refuse" else (1.2, 1.6, 0.8)
    made.trust()
    classes = {f"o{i:02d}": "open" for i in range(4)}
    classes |= {f"c{i:02d}": "clinical" for i in range(12)} | {f"s{i:02d}": "sensitive" for i in range(6)}
    for seed, name in enumerate(classes):
        made.write(name, seed)
    until: dict[str, Any] = {"expires": hospital.NOW + VALID}
    made.sign(classes, **until)
    made.sign({"c01": "clinical", "c02": "clinical"}, noise_multiplier=signed[0], **until)
    made.sign({"c03": "clinical"}, noise_multiplier=signed[1], **until)
    made.sign({"s01": "sensitive"}, noise_multiplier=signed[2], **until)
    return made


@dataclass
class Ward(World):
    """`noise` and `exhausted` are its policy's; `first` is where its first day is made, once for all."""

    noise: str = "exact"
    first: Path = Path()
    exhausted: str = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        made = first_day(self.first, self.noise, self.exhausted)
        shutil.copytree(made.root, self.root / "ward")
        self.ward = hospital.Hospital(self.root / "ward", policy=made.policy, key=made.key)
        self.clock = self.ward.clock

    @contextmanager
    def trainer(self, folder: str, spec: Spec, **options: Any) -> Iterator[Trainer]:
        contract = CorpusTerms.of_policy(self.ward.policy)
        with open_or_create(self.place, contract, self.key, retention=KEPT, clock=self.clock) as ledger:
            corpus = self.ward.gate().admit(self.ward.people, ledger=ledger)
            corpus.withdraw(*(name for name in spec.withdrawn if name in corpus.ids))
            yield self._on(folder, spec, corpus, ledger, options)

    def _on(self, folder: str, spec: Spec, corpus: AdmittedCorpus, ledger: Ledger, options: dict[str, Any]) -> Trainer:
        torch.manual_seed(0)
        model = hospital.net()
        return Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            hospital.loss,
            corpus,
            plan_of(spec.form, spec.steps, self.noise),
            folder=self.root / folder,
            ledger=ledger,
            segment=spec.segment,
            augment=more if spec.augment else None,
            filters=spec.filters,
            probe=False,
            **options,
        )

    def do_withdraw(self, leaf: int, effect: str) -> None:
        if self.there:
            with self.ledger() as ledger:
                withdraw(ledger, str(leaf), WithdrawalReason.CONSENT, effect=WithdrawalEffect[effect])

    def do_leave(self, name: str) -> None:
        shutil.rmtree(self.ward.people / name, ignore_errors=True)

    def do_join(self, name: str, cls: str, z: float | None) -> None:
        if not (self.ward.people / name).exists():
            self.ward.write(name, 1000 + int.from_bytes(name.encode(), "big"))
            now = int(self.ward.clock.now)
            signed: dict[str, Any] = {} if z is None else {"noise_multiplier": z}
            self.ward.sign({name: cls}, now=now, not_before=now, expires=now + VALID, **signed)

    def do_change(self, name: str) -> None:
        """Its payload is another one than was signed."""
        if (self.ward.people / name).exists():
            self.ward.write(name, 99)

    def do_later(self, days: int) -> None:
        """When all that was signed has expired, there are others."""
        self.ward.clock.now += days * DAY_SECONDS
        if days * DAY_SECONDS > VALID:
            for number in range(9):
                cls = ("clinical", "clinical", "sensitive")[number % 3]
                self.do_join(f"{cls[0]}{number}-{self.ward.clock.now:.0f}", cls, (None, 0.3)[number == 1])

    def do_prune(self) -> None:
        if self.there:
            with self.ledger() as ledger:
                retention = Retention(ledger)
                if (found := retention.propose()) is not None:
                    retention.prune(found)
