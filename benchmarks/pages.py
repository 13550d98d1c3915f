"""What the dashboard's pages cost on a large ledger: CPU and wall time of each, while the ledger is verified and afterwards.

    python benchmarks/pages.py [--contributions 1000000] [--rounds 5] [--folder DIR] [--json]

A small run is released (as in benchmarks/serve.py), and so many contributions are appended to its ledger, with a withdrawal for
every ten thousand of them. `first` is the first page that a new service answers, while it counts and verifies in other
threads, which share Python's lock with it; the rest are asked when both are done. CPU time is that of the whole process, and
alone says something on a busy machine; `ms` is the median of the rounds. `--folder` keeps the ledger for another time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.ledger.governance_records import Withdrawal, WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord, ContributionTerms
from lamina.ledger.writer import Ledger
from lamina.release.gate import ReleaseGate
from lamina.report.pages import run_report
from lamina.serve.app import Service, make_app
from lamina.serve.limits import Limits
from lamina.serve.pages import pages
from lamina.sign.keys import PrivateKey, PublicKey
from serve import make_folder  # type: ignore[import-not-found]

BATCH, EVERY = 5_000, 10_000


def make_ledger(folder: Path, contributions: int) -> None:
    place, contributor = make_folder(folder), PrivateKey.generate().public
    (folder / "contributor.pub").write_bytes(contributor.pem())
    words = ["add", str(folder / "contributor.pub"), "--role", "contributor", "--name", "hospital.example"]
    owner = ["--key", str(governing_key_path(place))]
    subprocess.run([sys.executable, "-m", "lamina", "ledger", "key", str(place), *words, *owner], check=True)
    with Ledger.open(place, PrivateKey.load(ledger_key_path(place), None)) as ledger:
        preset = next(each for each in ledger.header.presets if each.cls == "clinical")
        terms = ContributionTerms(
            "clinical", "ecg", preset.clip_norm, preset.noise_multiplier or 4_310_000, preset.profile
        )
        first, now = ledger.size, int(time.time())

        def record() -> ContributionRecord:
            some, signer = os.urandom(64), contributor.id
            return ContributionRecord(
                descriptor=some[:32], attestation=some[32:], key=signer, not_before=now - 9, expires=now + 10**7, terms=terms
            )  # fmt: skip

        for at in range(0, contributions, BATCH):
            ledger.append([record() for _ in range(min(BATCH, contributions - at))])
        ledger.append(
            [
                Withdrawal(target=at, reason=WithdrawalReason.CONSENT)
                for at in range(first, first + contributions, EVERY)
            ]
        )
        ledger.checkpoint()


def timed(ask: Callable[[], Any]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    ask()
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu)


def measure(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    place = Path(os.path.realpath(folder / "runs" / "first" / "ledger.db"))
    key, found = PublicKey.load(folder / "release.pub"), dict[str, dict[str, float]]()
    with LedgerReader.read_only(place) as one, LedgerReader.read_only(place) as two:
        began = time.perf_counter()
        gate = ReleaseGate(folder / "release", key, ledger=two)
        service = Service(folder=folder / "release", ledger=one, gate=gate, limits=Limits(rate=1e9, timeout=600.0))
        routes: Any = pages(service)
        client = TestClient(make_app(service, routes), base_url="http://localhost")
        found["ready"] = {"ms": 1e3 * (time.perf_counter() - began)}
        middle, size = one.size // 2, one.size
        some = one.leaf(middle).record.descriptor.hex()  # type: ignore[union-attr]
        paths = {
            "first": "/", "overview": "/", "budget": "/budget", "layers": "/layers", "contributions": "/contributions",
            "deep page": f"/contributions?from={middle}", "last page": f"/contributions?from={size - 400}",
            "search by digest": f"/contributions?find={some}", "search by 8 digits": f"/contributions?find={some[:8]}",
            "not found": f"/contributions?find={'0' * 64}", "one contribution": f"/contributions/{middle}",
            "withdrawals": "/withdrawals", "gate": "/gate", "verification": "/verification",
        }  # fmt: skip
        for name, path in paths.items():

            def ask(path: str = path) -> None:
                assert client.get(path).status_code == 200, path

            times = [timed(ask) for _ in range(1 if name == "first" else rounds)]
            found[name] = dict(zip(("ms", "cpu_ms"), map(statistics.median, zip(*times, strict=True)), strict=True))
            if name == "first":
                dashboard = routes[0].endpoint.__self__
                while dashboard.checking.running or not dashboard.counted.is_set():
                    time.sleep(0.2)
                found["counted and verified"] = {"ms": 1e3 * (time.perf_counter() - began)}
        report = timed(lambda: run_report(folder / "runs" / "first", one))
        found["report"] = dict(zip(("ms", "cpu_ms"), report, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contributions", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lamina-pages-") as other:
        folder = asked.folder or Path(other)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "release").exists():
            make_ledger(folder, asked.contributions)
        found: dict[str, Any] = {"load": os.getloadavg()[0], "pages": measure(folder, asked.rounds)}
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for name, figures in found["pages"].items():
        print(f"{name:22}", "  ".join(f"{kind} {value:,.0f}" for kind, value in figures.items()))
    print(f"load {found['load']:.1f}")


if __name__ == "__main__":
    main()
