"""What admission costs: contributions per second in one and two processes, a cached check, memory of a million.

    python benchmarks/admission.py [--contributions 20000] [--million 1000000] [--rounds 3] [--json]

Contributions are signed by one key and made beforehand; making them is not counted. `review` is the whole gate: strict
parsing, signature, claims, policy, payload, replays. `folder` is the same from disk, three files for each of half as
many contributions, in the page cache; `corpus` is `lamina.Gate.admit` of such a folder with .npz payloads: a review,
and a look at what each payload holds. `microseconds` are those of all processors for one contribution, the least of
the rounds, and `steps` says where they go in one process. `recheck` is `Admission.recheck` within an epoch over all
rows, `check` is `Gate.check` of one contribution after the other. `peak` is the largest resident set of a
process of its own that imports torch, admits `--million` contributions from a generator, rechecks them and tells how
many there are; `rows` is what the admission holds. Rates are per second of the clock and the best of the rounds, which
is the figure to read on a busy machine; memory is in MB.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lamina.admit.attestation import Attestation, Descriptor, attest, token_id
from lamina.admit.contribution_sources import Contribution, FolderContributions
from lamina.admit.gate import AdmissionGate, ContributionChunks
from lamina.admit.reasons import Case
from lamina.admit.rows import AdmittedRows
from lamina.admit.terms import SigningTerms
from lamina.plan.policy import Policy
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey
from lamina.sign.signed_json import sig_structure

NOW = 1_800_000_000


class Mint:
    """Signs many contributions that differ in nonce, payload and id, from one template."""

    def __init__(self) -> None:
        self.key, self.keys = PrivateKey.generate(), KeyRing()
        self.keys.add(self.key.public, label="mint")
        classes = {"clinical": {"population": 10**7, "epsilon": 1.0, "profile": {"top": 0.25}}}
        corpus = {"origin": "example.org/benchmark", "delta": 1e-8}
        self.policy = Policy.from_dict({"corpus": corpus, "class": classes})
        terms = SigningTerms.make(self.policy, "clinical", not_before=NOW - 60, expires=NOW + 10**7)
        self._nonce, self._commitment = os.urandom(16), os.urandom(32)
        made = terms.descriptor(contributor=self.key.public.id, nonce=self._nonce, commitment=self._commitment, items=1)
        signed = attest(made, self.key, issued_at=NOW)
        self._descriptor, self._attestation = made.encode(), signed
        self._protected = Attestation.decode(signed).protected

    def one(self, number: int, payload: bytes | None = None) -> Contribution:
        nonce, payload = os.urandom(16), payload or b"the record of patient %d" % number
        commitment = hashlib.sha256(nonce + payload).digest()
        descriptor = self._descriptor.replace(self._nonce, nonce).replace(self._commitment, commitment)
        digest = hashlib.sha256(descriptor).digest()
        old = hashlib.sha256(self._descriptor).hexdigest().encode()
        protected = self._protected.replace(token_id(self._nonce), token_id(nonce))
        protected = protected.replace(old, digest.hex().encode())
        signature = self.key.sign(sig_structure(protected, digest))
        attestation = self._attestation.replace(self._protected, protected)[:-64] + signature
        return Contribution(f"patient-{number:09d}", descriptor, attestation, payload)

    def many(self, count: int) -> Iterator[Contribution]:
        return map(self.one, range(count))

    def gate(self, processes: int = 1) -> AdmissionGate:
        return AdmissionGate(self.policy, self.keys, clock=lambda: NOW, processes=processes)

    def reviewer(self, processes: int) -> Callable[[Any], Any]:
        return self.gate(processes).review

    def admitter(self, processes: int) -> Callable[[Any], Any]:
        import lamina

        return lamina.Gate(self.policy, self.keys, clock=lambda: NOW, processes=processes).admit


def best(rounds: int, count: int, work: Callable[[], Any]) -> float:
    """Contributions per second in the fastest round."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return round(count / min(taken))


def reviews(
    made: Callable[[int], Callable[[Any], Any]], offered: Any, count: int, rounds: int, what: str
) -> dict[str, Any]:
    """Rates and processor time of one process and of two, one after the other in each round."""
    works = {processes: made(processes) for processes in (1, 2)}
    rate, spent = dict.fromkeys(works, 0.0), dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for processes, work in works.items():
            start, before = time.perf_counter(), _spent()
            found = work(offered)
            rate[processes] = max(rate[processes], count / (time.perf_counter() - start))
            spent[processes] = min(spent[processes], (_spent() - before) / count)
            admission = getattr(found, "admission", found)
            assert len(admission) == count and not admission.refused
    result: dict[str, Any] = {}
    for processes in works:
        name = f"{what}, {processes} process{'es' if processes > 1 else ''}"
        result[name] = round(rate[processes])
        result[f"{name}, microseconds"] = round(1e6 * spent[processes], 1)
    return result


def _spent() -> float:
    """Processor time of this process and of those that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def rates(mint: Mint, count: int, rounds: int) -> dict[str, Any]:
    offered = list(mint.many(count))
    assert Descriptor.decode(offered[0].descriptor or b"").items == 1
    result = {"contributions": count, **reviews(mint.reviewer, offered, count, rounds, "review")}
    gate = mint.gate()
    result["recheck"] = best(10 * rounds, count, gate.review(offered).recheck)
    few, check = offered[:10_000], gate.check
    result["check"] = best(3 * rounds, len(few), lambda: [check(given) for given in few])
    return result


def written(root: str, contributions: Iterator[Contribution], payload: str) -> None:
    for given in contributions:
        place = Path(root) / given.id
        place.mkdir()
        (place / "descriptor.cbor").write_bytes(given.descriptor or b"")
        (place / "attestation.cose").write_bytes(given.attestation or b"")
        assert isinstance(given.payload, bytes)
        (place / payload).write_bytes(given.payload)


def from_folder(mint: Mint, count: int, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        written(name, mint.many(count), "payload.bin")
        found = reviews(mint.reviewer, name, count, rounds, "folder")
        return found, steps(mint, FolderContributions(name), rounds)


def to_corpus(mint: Mint, count: int, rounds: int) -> dict[str, Any]:
    def payload(number: int) -> bytes:
        held = io.BytesIO()
        np.savez(held, x=np.full((1, 16), number, dtype=np.float32), y=np.array([number % 2]))
        return held.getvalue()

    with tempfile.TemporaryDirectory() as name:
        written(name, (mint.one(number, payload(number)) for number in range(count)), "payload.npz")
        return reviews(mint.admitter, name, count, rounds, "corpus")


def steps(mint: Mint, folder: FolderContributions, rounds: int) -> dict[str, Any]:
    """Microseconds of one contribution in each step of a review, the least of the rounds."""
    least: dict[str, float] = {}
    gate = mint.gate()
    examiner = gate.examiner()
    for _ in range(rounds):
        taken: Counter[str] = Counter()

        @contextmanager
        def timed(name: str, taken: Counter[str] = taken) -> Iterator[None]:
            start = time.process_time()
            yield
            taken[name] += time.process_time() - start  # type: ignore[assignment]

        rows = AdmittedRows()
        with timed("list the folder"):
            parts = ContributionChunks(folder)
        for part in parts:
            with timed("open and read descriptor, attestation"):
                cases = [Case(given, NOW, gate.terms) for given in parts.contributions(part)]
            for name, step in (
                ("parse, look up the key", examiner._read),
                ("signature", examiner._verify),
                ("policy, open and hash the payload", examiner._check_content),
            ):
                with timed(name):
                    for case in cases:
                        step(case)
            with timed("keep the rows"):
                for place, id, case in zip(part, parts.ids(part), cases, strict=True):
                    rows.add(place, id, case.row)  # type: ignore[arg-type]
        for name, seconds in taken.items():
            least[name] = min(least.get(name, float("inf")), 1e6 * seconds / len(rows))
    return {name: round(figure, 1) for name, figure in least.items()}


def peak(count: int, processes: int) -> dict[str, Any]:
    """In a process of its own."""
    import torch

    def resident(whose: int = resource.RUSAGE_SELF) -> float:
        return round(resource.getrusage(whose).ru_maxrss / 1e3, 1)  # kilobytes on Linux

    mint, before = Mint(), resident()
    assert torch.get_num_threads() > 0
    start = time.perf_counter()
    admission = mint.gate(processes).review(mint.many(count))
    seconds = time.perf_counter() - start
    assert len(admission) == count
    start = time.perf_counter()
    assert len(admission.recheck()) == 0
    rechecked = time.perf_counter() - start
    assert len(admission.bounds) == 1
    return {
        "contributions": count,
        "imported": before,
        "peak": resident(),
        "peak of a worker": resident(resource.RUSAGE_CHILDREN),
        "rows": round(admission.nbytes / 1e6, 1),
        "seconds, signing included": round(seconds, 1),
        "recheck": round(count / rechecked),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    mint = Mint()
    result: dict[str, Any] = {"rates": rates(mint, options.contributions, options.rounds)}
    folder, taken = from_folder(mint, options.contributions // 2, options.rounds)
    result["rates"] |= folder | to_corpus(mint, options.contributions // 2, options.rounds)
    result["steps"] = taken
    if options.million:
        command = [sys.executable, __file__, "--peak", "--million", str(options.million)]
        command += ["--processes", str(options.processes)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        result["memory"] = json.loads(told)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates and memory of admission.")
    parser.add_argument("--contributions", type=int, default=20_000)
    parser.add_argument("--million", type=int, default=1_000_000, help="for the memory; 0 leaves it out")
    parser.add_argument("--processes", type=int, default=1, help="of the memory run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        json.dump(peak(options.million, options.processes), sys.stdout)
        return
    result = measure(options)
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        return
    for part, figures in result.items():
        print(part)
        for name, figure in figures.items():
            print(f"  {name:40} {figure:>14,}")


if __name__ == "__main__":
    main()
