"""Several processes: the same answer as one, and no hanging when one of them dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contribution_sources import NamedSource
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code

from lamina.admit import gate as pool
from lamina.admit import reasons
from lamina.admit.contribution_sources import Contribution, FolderContributions
from lamina.admit.examiner import Examiner
from lamina.admit.reasons import REASONS
from lamina.admit.rows import ROW_STRUCT
from lamina.sign.keys import PrivateKey, PublicKey


def mixed(desk: Any) -> list[Contribution]:
    """Good ones, bad ones, and some that exclude each other across the pool."""
    stranger = PrivateKey.generate()
    offered = []
    for i in range(60):
        good = desk.offer(f"{i:03d}", "standard" if i % 3 else "clinical", tag=f"{i % 50:064x}")
        offered.append(good)
        if i % 7 == 0:
            offered.append(replace(good, id=f"{i:03d} copy"))
        if i % 9 == 0:
            offered.append(replace(good, id=f"{i:03d} damaged", payload=b"x" * i))
        if i % 11 == 0:
            offered.append(desk.offer(f"{i:03d} stranger", key=stranger))
        if i % 13 == 0:
            offered.append(replace(good, id=f"{i:03d} \x1b\ud800", attestation=None))
    return offered


def told(admission: Any) -> Any:
    return admission.to_dict(), list(admission.ids), admission.columns.tobytes()


@pytest.mark.parametrize("part", [1, 7, 128])
def test_the_number_of_processes_changes_nothing(desk: Any, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(pool, "CHUNK_SIZE", part)
    desk.policy = desk.policy_with(standard={"population": 30})
    offered = mixed(desk)
    alone = desk.gate().review(offered)
    assert alone.refused.counts().keys() >= {
        reasons.REPLAYED, reasons.PAYLOAD_MISMATCH, reasons.UNKNOWN_KEY, reasons.BAD_ID, reasons.DUPLICATE_SUBJECT,
        reasons.CLASS_FULL,
    }  # fmt: skip
    for processes in (2, 3):
        assert told(desk.gate(processes=processes).review(iter(offered))) == told(alone)


def test_folders_are_read_by_the_workers(desk: Any, tmp_path: Path) -> None:
    for given_one in mixed(desk):
        if given_one.id.isprintable():
            desk.write(tmp_path, given_one)
    (tmp_path / "link").symlink_to(tmp_path / "000")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\xfe")
    alone = desk.gate().review(FolderContributions(tmp_path))
    assert {reasons.UNREADABLE, reasons.BAD_ID} <= alone.refused.counts().keys()
    assert told(desk.gate(processes=2).review(tmp_path)) == told(alone)


def test_many_are_examined_as_each_by_itself(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offered, examiner = mixed(desk), desk.gate().examiner()
    alone = [examiner.examine(each, desk.NOW) for each in offered]
    assert examiner.examine_all(offered, desk.NOW) == alone
    verify, place = PublicKey.verify, [each.id for each in offered].index("001")

    def broken(key: PublicKey, message: bytes, signature: bytes) -> bool:
        if signature == (offered[place].attestation or b"")[-64:]:
            raise RuntimeError("a fault of ours")
        return verify(key, message, signature)

    monkeypatch.setattr(PublicKey, "verify", broken)
    alone[place] = reasons.CHECK_FAILED, "RuntimeError"
    assert examiner.examine_all(offered, desk.NOW) == alone


def test_payloads_of_a_source_do_not_pile_up(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK_BYTES", 1000)
    held = []
    examine_all = Examiner.examine_all

    def watched(self: Examiner, offered: Any, now: int) -> Any:
        held.append(sum(len(each.payload) for each in offered))
        return examine_all(self, offered, now)

    monkeypatch.setattr(Examiner, "examine_all", watched)
    source = NamedSource([desk.offer(f"{i}", payload=bytes([i]) * 400) for i in range(10)])
    assert len(desk.gate().review(source)) == 10
    assert held == [1200, 1200, 1200, 400]


def test_nobody_has_two_parts_before_each_has_one(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK_SIZE", 1)

    def who(id: str) -> Contribution:
        time.sleep(0.2)
        return Contribution(id, read_error=(reasons.UNREADABLE, f"{os.getpid()}"))

    refused = desk.gate(processes=3).review(NamedSource("abc", who)).refused
    assert len({each.detail for each in refused}) == 3


def test_parts_are_bounded_in_bytes(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK_BYTES", 1000)
    offered = [desk.offer(f"{i}", payload=bytes(400)) for i in range(10)]
    assert [len(part) for part in pool.ContributionChunks(offered)] == [3, 3, 3, 1]
    large = [desk.offer(f"large {i}", payload=bytes([i]) * (1 << 20)) for i in range(5)]
    assert len(desk.gate(processes=2).review(large)) == 5


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [signal.SIGKILL, 0])
def test_a_worker_that_dies_is_named_and_nobody_waits(desk: Any, how: int) -> None:
    given = {f"{i}": desk.offer(f"{i}") for i in range(5)}

    def get(id: str) -> Contribution:
        """Ends whatever process reads the contribution `deadly`."""
        if id == "deadly":
            if how:
                os.kill(os.getpid(), how)
                time.sleep(60)
            os._exit(3)
        return given[id]

    with raises_code("admit.worker-ended"):
        desk.gate(processes=2).review(NamedSource([*given, "deadly"], get))
    assert not multiprocessing.active_children()


@pytest.mark.timeout(60)
def test_workers_end_with_the_review_that_fails(desk: Any) -> None:
    def broken() -> Any:
        for i in range(500):
            yield desk.offer(f"{i}") if i < 3 else Contribution(f"{i}")
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        desk.gate(processes=2).review(broken())
    assert not multiprocessing.active_children()


def test_workers_that_are_not_needed_any_more_are_ended(desk: Any) -> None:
    gate = desk.gate(processes=2)
    verdicts = gate.verdicts((Contribution(f"{i}") for i in range(10**6)), gate.examiner(), desk.NOW)
    assert next(verdicts)[0] == "0"
    assert len(multiprocessing.active_children()) == 2
    verdicts.close()
    assert not multiprocessing.active_children()


ORPHANS = """
import multiprocessing, os, signal, sys, time
from lamina.admit.gate import AdmissionGate
from lamina.sign.key_ring import KeyRing
from lamina.admit.contribution_sources import Contribution
from lamina.plan.policy import Policy

gate = AdmissionGate(Policy.template(), KeyRing(), processes=2)
verdicts = gate.verdicts((Contribution(f"{i}") for i in range(10**9)), gate.examiner(), 0)
next(verdicts)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
for _ in verdicts:
    pass
"""


@pytest.mark.timeout(120)
def test_workers_do_not_outlive_a_gate_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [int(word) for word in process.stdout.readline().split()]
        assert len(children) == 2
        process.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not any(running(child) for child in children):
            return
        time.sleep(0.05)
    raise AssertionError("a worker is still there")


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_source_that_fails_for_one_stops_no_other(desk: Any, processes: int) -> None:
    def get(id: str) -> Contribution | None:
        if id == "a":
            raise RuntimeError("a fault of the source")
        return Contribution(id) if id == "b" else None

    refused = desk.gate(processes=processes).review(NamedSource("abc", get)).refused
    assert [(r.id, r.reason, r.detail) for r in refused] == [
        ("a", reasons.CHECK_FAILED, "RuntimeError"),
        ("b", reasons.NO_ATTESTATION, ""),
        ("c", reasons.CHECK_FAILED, "TypeError"),
    ]


def test_a_slow_part_does_not_let_the_others_pile_up(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK_SIZE", 1)
    monkeypatch.setattr(pool, "MAX_CHUNKS_AHEAD", 4)
    taken = 0

    def slow(id: str) -> Contribution:
        time.sleep(0.4 if id == "0" else 0)
        return Contribution(id)

    class Counting(pool.ContributionChunks):
        def __iter__(self) -> Any:
            nonlocal taken
            for each in super().__iter__():
                taken += 1
                yield each

    monkeypatch.setattr(pool, "ContributionChunks", Counting)
    gate = desk.gate(processes=2)
    verdicts = gate.verdicts(NamedSource([f"{i}" for i in range(200)], slow), gate.examiner(), desk.NOW)
    assert next(verdicts)[0] == "0"
    assert taken <= 10
    assert [id for id, _ in verdicts] == [f"{i}" for i in range(1, 200)]


@given(
    st.lists(
        st.tuples(st.sampled_from(REASONS), st.text(st.characters(), max_size=10))
        | st.binary(min_size=ROW_STRUCT.size, max_size=ROW_STRUCT.size),
        max_size=5,
    )
)
def test_verdicts_arrive(verdicts: list[Any]) -> None:
    assert pool.verdicts_from_bytes(pool.verdicts_to_bytes(verdicts), len(verdicts)) == verdicts


FORGER = """
import multiprocessing, os, pickle, stat, struct, sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import AdmissionGate
from lamina.sign.key_ring import KeyRing
from lamina.admit.rows import PackedTexts
from lamina.plan.policy import Policy

class Code:
    def __reduce__(self):
        return exec, (f"import os; os.mkdir({sys.argv[2]!r} + str(os.getpid()))",)

def attack(id="a"):
    forged = pickle.dumps(Code())
    for line in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            mode = os.fstat(line).st_mode
            if line > 2 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.write(line, struct.pack("!i", len(forged)) + forged)
    os._exit(0)

class Source:
    def names(self):
        return PackedTexts(["a"])

    def get(self, id):
        attack()

with suppress(Exception):
    if sys.argv[1] == "gate":
        AdmissionGate(Policy.template(), KeyRing(), processes=2).review(Source())
    else:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            pool.submit(attack).result()
print(os.path.exists(sys.argv[2] + str(os.getpid())))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("pool_of", "runs"), [("gate", "False"), ("concurrent.futures", "True")])
def test_what_a_worker_sends_is_not_unpickled(pool_of: str, runs: str, tmp_path: Path) -> None:
    """A worker that a payload has taken over writes pickles to each of its lines; ProcessPoolExecutor opens them."""
    command = [sys.executable, "-c", FORGER, pool_of, f"{tmp_path}/ran-in-"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [runs]


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x00", b"\x01" + b"\xff" * 8, b"\x01" + bytes(8) + b"more"])
def test_a_malformed_message_of_a_worker_is_refused(data: bytes) -> None:
    with raises_code("admit.worker-malformed"):
        pool.verdicts_from_bytes(data, 1)
