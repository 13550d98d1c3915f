"""Killed with SIGKILL at any instant, a run comes to the same weights at the same price."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STEPS, SEGMENT = 12, 4


class Killer:
    """Talks to killing.py."""

    def __init__(self) -> None:
        program = Path(__file__).parents[1] / "support" / "killing.py"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(STEPS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, folder: Path, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        told = {"folder": str(folder), "steps": STEPS, "segment": SEGMENT, **command}
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert not answer.get("failed"), answer
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    made = Killer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(killer: Killer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole") / "runs" / "a"
    answer = killer.run(folder, call=0) | {"folder": str(folder)}
    assert answer["steps"] == STEPS and answer["notes"] == []
    segments = STEPS // SEGMENT
    size = 1 + 1 + segments + 1  # header, start, epochs, end
    assert answer["ledger"] == {"problem": "None", "size": size, "signed": size, "held": 0}
    (bound,) = answer["bounds"].values()
    assert 0 < bound["epsilon"] <= bound["signed"] and bound["total"] == bound["epsilon"]
    return answer


def agrees(answer: dict[str, Any], whole: dict[str, Any]) -> None:
    for key in ("weights", "epsilon", "total", "bounds", "steps", "notes", "ledger"):
        assert answer[key] == whole[key], key


def kill_at_random(killer: Killer, whole: dict[str, Any], folder: Path, *, kills: int, seed: int) -> None:
    """Kill so often, at instants of the whole run; every run is let finish in the end and compared."""
    generator = random.Random(seed)
    duration = killer.run(folder / "timing" / "a")["seconds"]
    done = runs = 0
    while done < kills:
        runs += 1
        assert runs < 20 * kills, "the runs end before they can be killed"
        place = folder / f"run{runs}" / "a"
        while generator.random() < 0.8 or done == 0:  # often more than once
            answer = killer.run(place, after=generator.uniform(0.0, duration))
            if not answer["killed"]:
                break
            done += 1
            if done == kills:
                break
        agrees(killer.run(place), whole)


def test_killed_at_five_random_instants(killer: Killer, whole: dict[str, Any], tmp_path: Path) -> None:
    kill_at_random(killer, whole, tmp_path, kills=5, seed=1)


@pytest.mark.slow
def test_killed_at_fifty_random_instants(killer: Killer, whole: dict[str, Any], tmp_path: Path) -> None:
    kill_at_random(killer, whole, tmp_path, kills=50, seed=2)


def kill_before_calls(killer: Killer, whole: dict[str, Any], folder: Path, which: range) -> None:
    for call in which:
        place = folder / f"call{call}" / "a"
        assert killer.run(place, call=call)["killed"], call
        agrees(killer.run(place), whole)


def test_killed_before_some_calls(killer: Killer, whole: dict[str, Any], tmp_path: Path) -> None:
    calls = whole["calls"]
    assert calls > 100
    kill_before_calls(killer, whole, tmp_path, range(calls // 24, calls + 1, calls // 12))


def test_killed_while_it_ends(killer: Killer, whole: dict[str, Any], tmp_path: Path) -> None:
    """Kill the run around its end record, the weights, metrics.json and the record of its end; one end is recorded."""
    calls = whole["calls"]
    kill_before_calls(killer, whole, tmp_path, range(calls - 44, calls + 1, 4))


def at(trace: list[str], *steps: str) -> int:
    """Return the number of the first call with the last of these texts, after calls with the others, in this order."""
    place = -1
    for step in steps:
        place = next(n for n, text in enumerate(trace) if n > place and step in text)
    return place + 1


OPENED = (" {folder}/checkpoint/000001.safetensors", " {folder}/attempt")  # the rename, of the second segment
CHARGED = (*OPENED, "commit")
CHECKPOINT = (*CHARGED, " {folder}/checkpoint/000002.safetensors")
LEAF = (*CHECKPOINT, "commit")
RECEIPT = (*LEAF, "open {folder}/receipts")  # after write and fsync of the erased seed

ROWS = {  # of the protocol in docs/runs.md: the call before which the run is killed, in its trace, and how many calls later
    "start: before the record of the run": (("run.cbor",), 0),
    "start: before the reservation": (("run.cbor", "commit"), 0),
    "start: after the reservation": (("run.cbor", "commit"), 1),
    "start: before the first checkpoint has its name": ((" {folder}/checkpoint/000000.safetensors",), 0),
    "open: before the attempt is written down": (OPENED, 0),
    "open: written down, not charged": (OPENED, 1),
    "open: before the charge": (CHARGED, 0),
    "open: charged, nothing drawn": (CHARGED, 1),
    "open: some steps done": ((*CHARGED, "backward", "backward"), 0),
    "close: before the checkpoint has its name": (CHECKPOINT, 0),
    "close: the checkpoint is there": (CHECKPOINT, 1),
    "close: before the leaf": (LEAF, 0),
    "close: the leaf, not signed": (LEAF, 1),
    "close: signed, before the seed is erased": (RECEIPT, -2),
    "close: the seed is erased, perhaps not on the disk": (RECEIPT, -1),
    "close: before the receipt": (RECEIPT, 0),
    "close: the receipt is open": (RECEIPT, 2),
    "close: the receipt is written": (RECEIPT, 4),
    "end: before the leaf": ((" {folder}/checkpoint/000003.safetensors", "commit", "metrics.json", "commit"), 0),
    "end: after the leaf": ((" {folder}/checkpoint/000003.safetensors", "commit", "metrics.json", "commit"), 1),
    "end: before the record of the end": ((" {folder}/checkpoint/000003.safetensors", " {folder}/run.cbor"), 0),
    "end: after it, before the reservation is dropped": (
        (" {folder}/checkpoint/000003.safetensors", " {folder}/run.cbor", "commit"), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_killed_at_a_row_of_the_protocol(row: str, killer: Killer, whole: dict[str, Any], tmp_path: Path) -> None:
    steps, later = ROWS[row]
    folder = tmp_path / "runs" / "a"
    call = at(whole["trace"], *(step.replace("{folder}", whole["folder"]) for step in steps)) + later
    assert killer.run(folder, call=call)["killed"]
    agrees(killer.run(folder), whole)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_before_every_call_that_changes_something(killer: Killer, whole: dict[str, Any], tmp_path: Path) -> None:
    kill_before_calls(killer, whole, tmp_path, range(1, whole["calls"] + 1))
