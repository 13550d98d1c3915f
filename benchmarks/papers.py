"""What papers cost: the trade-off curve of a plan once its ε is known, and a release compared with a large ledger.

    python benchmarks/papers.py [--contributions 100000] [--rounds 5] [--out benchmarks/results/papers.json]

Times are processor time, the least of all rounds, which take turns. `curves` counts all figures of one risk (rates, points,
accuracy, μ, success) after ε of the same charges was computed, without what was remembered of them. `verify` compares
`release verify --ledger` with `ledger verify`, on a ledger of that many attested contributions beside a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lamina
from lamina.account import tradeoff
from lamina.account.accountants import pooled_epsilon
from lamina.admit.attestation import attest
from lamina.admit.terms import SigningTerms
from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.ledger.governance_records import Key, KeyChange, KeyEvent, KeyEvents, Role
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord, ContributionTerms, Record
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.release import risk_statements
from lamina.release.maker import make_release
from lamina.release.verifier import verify_release
from lamina.sign.keys import PrivateKey

POLICY = """
[corpus]
origin = "example.org/benchmark"
delta = 1e-6
[class.clinical]
population = 3000
epsilon = 2.0
[class.sensitive]
population = 1000
epsilon = 2.0
profile = {top = 0.34}
"""
SCHEDULES = {"demonstration": (4.805, 0.4, 70), "long": (1.1, 0.01, 5000)}
ACCOUNTANTS = ("pld", "rdp", "rdp-integer", "rdp@24")


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def curves(rounds: int) -> dict[str, Any]:
    """Milliseconds of all figures of a risk, by accountant, schedule and risk."""
    found: dict[str, Any] = {}
    for accountant in ACCOUNTANTS:
        for name, schedule in SCHEDULES.items():
            sigma, q, steps = schedule
            events = {(sigma, q, 0.0): steps}
            pooled_epsilon(events, delta=1e-5, name=accountant)
            for of in ("membership", "content"):

                def price(of: Any = of, events: Any = events, accountant: str = accountant) -> None:
                    risk_statements.risk_figures(events, accountant=accountant, of=of)

                price()  # composes the losses, of which the price of ε needs the add/remove ones only
                times = []
                for _ in range(rounds):
                    risk_statements._figures.cache_clear()
                    tradeoff._corners.clear()
                    times.append(1e3 * seconds(price))
                found.setdefault(accountant, {}).setdefault(name, {})[of] = min(times)
    return found


def made(folder: Path, contributions: int) -> tuple[Path, Path, Trust]:
    """A release, its ledger with so many contributions, and the keys to trust."""
    policy = lamina.Policy.parse(POLICY)
    x, classes = torch.randn(4000, 4), ["clinical"] * 3000 + ["sensitive"] * 1000
    corpus = lamina.Corpus(x, (x.sum(1) > 0).long(), policy=policy, cls=classes)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    plan = lamina.make_plan(lamina.LayerStack.from_model(model), policy, batch=400, steps=20)
    loss, run = nn.CrossEntropyLoss(reduction="none"), folder / "runs" / "first"
    lamina.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), loss, corpus, plan, folder=run, progress=False
    ).fit()
    place, key = Path(os.path.realpath(run / "ledger.db")), PrivateKey.generate()
    owner = PrivateKey.load(governing_key_path(place), None)
    with Ledger.open(place, PrivateKey.load(ledger_key_path(place), None), governing=owner) as ledger:
        contributor = PrivateKey.generate()
        known = Key(name="hospital.example", x=contributor.public.x, role=Role.CONTRIBUTOR)
        ledger.govern(KeyEvents(events=(KeyEvent(change=KeyChange.ADD, key=known, effective=ledger.now()),)))
        for part in range(0, contributions, 1000):
            ledger.append(*signed(contributor, policy, ledger.now(), min(1000, contributions - part)))
        ledger.checkpoint()
        make_release(folder / "release", [run], ledger, key)
    return folder / "release", place, Trust(plain=(key.public, owner.public))


def signed(key: PrivateKey, policy: lamina.Policy, now: int, count: int) -> tuple[list[Record], list[bytes]]:
    """Contributions as an admission records them, and their attestations."""
    terms = SigningTerms.make(policy, "clinical", not_before=now - 60, expires=now + 10**7)
    found, attestations = list[Record](), list[bytes]()
    for _ in range(count):
        some = os.urandom(48)
        made = terms.descriptor(contributor=key.public.id, nonce=some[:16], commitment=some[16:], items=1)
        attestations.append(attest(made, key, issued_at=now))
        found.append(
            ContributionRecord(
                descriptor=made.digest(), attestation=hashlib.sha256(attestations[-1]).digest(), key=key.public.id,
                not_before=made.not_before, expires=made.expires,
                terms=ContributionTerms(
                    made.admissibility, made.data_class, made.clip_norm, made.noise_multiplier, made.profile
                ),
            )
        )  # fmt: skip
    return found, attestations


def compared(contributions: int, rounds: int) -> dict[str, Any]:
    """Seconds of both verifications, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        release, place, trust = made(Path(folder), contributions)

        def alone() -> None:
            with LedgerReader.read_only(place) as ledger:
                parties = trust.for_ledger(ledger.parties())
                assert verify(ledger.store, trust=parties).verified

        def whole() -> None:
            with LedgerReader.read_only(place) as ledger:
                assert verify_release(release, trust=trust, ledger=ledger).trusted

        times = [(seconds(alone), seconds(whole)) for _ in range(rounds)]
    one, two = (min(each) for each in zip(*times, strict=True))
    return {"contributions": contributions, "ledger_seconds": one, "release_seconds": two, "ratio": two / one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contributions", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"load": os.getloadavg()[0], "torch": torch.__version__, "curves": curves(asked.rounds)}
    found["verify"] = compared(asked.contributions, max(2, asked.rounds // 2))
    text = json.dumps(found, indent=2)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
