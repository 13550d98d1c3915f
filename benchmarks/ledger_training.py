"""What the ledger costs a run: the share of the demo's private training that is spent in it.

    python benchmarks/ledger_training.py [--rounds 3] [--out FILE]

The private run of `lamina demo` (500 sensitive patients and 60 volunteers, 70 steps in 10 segments), as it is, with a
clock around every call by which the trainer asks or tells the ledger. `segments` is what is paid per segment: members
frozen, charge held, epoch priced and appended, checkpoint signed. `begin` is paid once: ledger made or opened,
contributions entered, plan reserved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from lamina.allocate.make_plan import make_plan
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.spend_ledger import SpendLedger
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.run.admitted import Gate
from lamina.run.membership import LedgerMembership
from lamina.signals.demo import hospitals as folders
from lamina.signals.demo.hospitals import write_contributions
from lamina.signals.demo.patients import FULL_SIZES, DemoPatients
from lamina.signals.demo.training import train_privately, untrained_model

SEGMENTS = (
    (LedgerMembership, "freeze"),
    (LedgerMembership, "abandons"),
    (SpendLedger, "charge"),
    (SpendLedger, "record"),
)
ONCE = ((LedgerMembership, "enrol"), (SpendLedger, "reserve"), (SpendLedger, "finish"))


class Clock:
    """Seconds inside some methods, calls inside each other counted once."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inside = False

    def watch(self, owner: type, name: str, under: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        @wraps(real)
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return real(*args, **options)
            self._inside, began = True, time.perf_counter()
            try:
                return real(*args, **options)
            finally:
                self._inside = False
                key = f"{under}: {owner.__name__}.{name}"
                self.spent[key] = self.spent.get(key, 0.0) + time.perf_counter() - began

        setattr(owner, name, timed)

    def total(self, under: str) -> float:
        return sum(seconds for key, seconds in self.spent.items() if key.startswith(under))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    patients = DemoPatients.simulated(FULL_SIZES, lambda _: None)
    policy = Policy.parse(folders.policy_text(FULL_SIZES))
    clock = Clock()
    for owner, name in SEGMENTS:
        clock.watch(owner, name, "segments")
    for owner, name in ONCE:
        clock.watch(owner, name, "begin")
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        ring = write_contributions(Path(made) / "contributions", patients, policy, FULL_SIZES, lambda _: None)
        model = untrained_model()
        plan = make_plan(LayerStack.from_model(model), policy, batch=FULL_SIZES.batch, steps=FULL_SIZES.steps)
        for number in range(asked.rounds):
            clock.spent.clear()
            place = Path(made) / str(number)
            place.mkdir()
            ledger = open_or_create(place / "ledger.db", CorpusTerms.of_policy(policy))
            corpus = Gate(policy, ring).admit(Path(made) / "contributions", ledger, examples_per_unit=1)
            began = time.perf_counter()
            outcome = train_privately(untrained_model(), patients.test, corpus, plan, place, ledger)
            seconds = time.perf_counter() - began
            ledger.close()
            part = clock.total("segments")
            rounds.append(
                {
                    "fit": seconds,
                    "steps": outcome.steps,
                    "segments": part,
                    "begin": clock.total("begin"),
                    "share": part / (seconds - part - clock.total("begin")),
                    "calls": dict(clock.spent),
                }
            )
            print(json.dumps(rounds[-1], indent=1), flush=True)
    found: dict[str, Any] = {
        "share_of_a_step": statistics.median(each["share"] for each in rounds),
        "rounds": rounds,
        "load": os.getloadavg()[0],
    }
    print(f"share of a step: {100 * found['share_of_a_step']:.2f} %")
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
