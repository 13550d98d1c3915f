"""A folder of contributions that somebody signed, small enough to train on in a moment."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lamina
from lamina import KeyRing, LayerStack, Policy, PrivateKey, StepPlan, Trainer, make_plan
from lamina.admit.contribution_sources import Contribution
from lamina.admit.signing import SECONDS_PER_YEAR, SigningState, attest_folder
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.writer import Ledger
from lamina.run.admitted import AdmittedCorpus

NOW = 1_800_000_000  # when everything is signed, unless a test says otherwise
POLICY = """
[corpus]
origin = "ward-7"
delta = 1e-5
[class.open]
public = true
population = 20
[class.clinical]
population = 60
epsilon = 4.0
unit = "patient"
[class.sensitive]
population = 30
epsilon = 2.0
unit = "patient"
profile = { top = 0.5 }
"""

PLANS: dict[Any, StepPlan] = {}


@dataclass
class Clock:
    """What the gate takes for the time."""

    now: float = float(NOW)

    def __call__(self) -> float:
        return self.now


@dataclass
class Hospital:
    """Contributions under ROOT/people, signed with `key`; ROOT/keys.json trusts it.

    Gate and ledger go by `clock`, which a test sets; in a `real` one by the system's.
    """

    root: Path
    real: bool = False
    policy: Policy = field(default_factory=lambda: Policy.parse(POLICY))
    key: PrivateKey = field(default_factory=PrivateKey.generate)
    clock: Clock = field(default_factory=Clock)

    @property
    def people(self) -> Path:
        return self.root / "people"

    @property
    def keys(self) -> Path:
        return self.root / "keys.json"

    def trust(self, *keys: PrivateKey) -> None:
        self.root.mkdir(exist_ok=True)
        ring = KeyRing.load(self.keys) if self.keys.exists() else KeyRing()
        for key in keys or (self.key,):
            ring.add(key.public, label=f"key {len(ring)}")
        ring.save(self.keys)

    def write(self, name: str, seed: int, *, windows: int = 2, width: int = 6, label: bool = True) -> Path:
        """A payload: some windows, and a label that can be learned from them."""
        generator = np.random.default_rng(seed)
        y = np.full(windows, seed % 3)
        x = generator.normal(size=(windows, width)) + np.eye(width)[y % width] * 2
        (self.people / name).mkdir(parents=True, exist_ok=True)
        np.savez(self.people / name / "payload.npz", x=x.astype(np.float32), **({"y": y} if label else {}))
        return self.people / name

    def sign(self, classes: Mapping[str, str], *, key: PrivateKey | None = None, **options: Any) -> None:
        now = int(time.time()) if self.real else NOW
        options = {"now": now, "not_before": now, "expires": now + SECONDS_PER_YEAR, **options}
        made = attest_folder(self.people, key or self.key, self.policy, classes, force=True, **options)
        found = {each.id: each for each in made if each.id in classes}
        assert {each.state for each in found.values()} <= {SigningState.SIGNED}, found
        assert found.keys() == classes.keys()

    def gate(self, **options: Any) -> lamina.Gate:
        clock = time.time if self.real else self.clock
        return lamina.Gate(self.policy, self.keys, clock=clock, **options)

    def ledger(self, where: Path) -> Ledger:
        """With the hospital's clock."""
        return open_or_create(where, CorpusTerms.of_policy(self.policy), clock=self.clock)

    def admit(self, **options: Any) -> AdmittedCorpus:
        return self.gate().admit(self.people, **options)

    def contributions(self) -> list[Contribution]:
        """The same, in memory."""
        return [
            Contribution(
                folder.name,
                (folder / "descriptor.cbor").read_bytes(),
                (folder / "attestation.cose").read_bytes(),
                (folder / "payload.npz").read_bytes(),
            )
            for folder in sorted(self.people.iterdir())
        ]

    # ------------------------------------------------------------------------------------ what is trained

    def plan(self, model: nn.Module, *, steps: int = 12, batch: int = 30, **options: Any) -> StepPlan:
        """With one S, so that a class's thresholds have the norm that it signs."""
        key = (LayerStack.from_model(model), self.policy.model_dump_json(), batch, steps, repr(options))
        if key not in PLANS:  # calibrating takes longer than the run
            options = {"allocate": "flat", **options}
            PLANS[key] = make_plan(key[0], self.policy, batch=batch, steps=steps, **options)
        return PLANS[key]

    def trainer(
        self, name: str = "a", *, corpus: AdmittedCorpus | None = None, seed: int = 0, **options: Any
    ) -> Trainer:
        torch.manual_seed(seed)
        model = options.pop("model", None) or net()
        plan = options.pop("plan", None) or self.plan(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options = {"progress": False, "segment": 3, **options}
        corpus = self.admit() if corpus is None else corpus
        if not self.real:
            where = options.get("ledger") or self.root / "runs" / "ward-7.ledger.db"
            options["ledger"] = where if isinstance(where, Ledger) else self.ledger(where)
        return Trainer(model, optimizer, loss, corpus, plan, folder=self.root / "runs" / name, **options)

    def figures(self, name: str = "a") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "runs" / name / "metrics.json").read_text())
        return found


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, y, reduction="none")


def usual(root: Path, *, real: bool = False) -> Hospital:
    """Twelve volunteers, thirty clinical and fifteen sensitive patients, all signed alike."""
    made = Hospital(root, real)
    made.trust()
    classes = {f"o{i:02d}": "open" for i in range(12)}
    classes |= {f"c{i:02d}": "clinical" for i in range(30)}
    classes |= {f"s{i:02d}": "sensitive" for i in range(15)}
    for seed, name in enumerate(classes):
        made.write(name, seed)
    made.sign(classes)
    return made


def npz(**arrays: Any) -> bytes:
    held = io.BytesIO()
    np.savez(held, **arrays)
    return held.getvalue()
