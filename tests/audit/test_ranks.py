"""The audit of a step that two ranks take together: whichever rank the canary is on, and whoever cheats."""

from __future__ import annotations

import json
from typing import Any

import pytest
import ranks

SOUND = ["plain box 0", "sharded joint 1"]
FAULTY = {
    "CountedTwice box 1": {"sensitivity/plain", "sensitivity/top"},
    "WholeNoise box 0": {"noise/plain", "noise/top"},
}
MORE = [f"{kind} {form} {unit}" for kind in ("plain", "sharded") for form in ("box", "joint") for unit in (0, 1)]
MORE_FAULTY = {
    "CountedTwice joint 1": {"sensitivity/plain", "sensitivity/top"},
    "LittleNoise joint 0": {"noise/plain", "noise/top"},
}


def run(names: list[str], size: int = 2) -> dict[str, Any]:
    answers = ranks.run_ranks("audit_ranks.py", size, json.dumps(names))
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def reaches_its_bound(detail: str) -> bool:
    """The audit looked: some canary pressed against the threshold."""
    moved, allowed = detail.rpartition("moved ")[2].removesuffix(" allowed").split(" of ")
    return float(moved) > 0.99 * float(allowed)


def judge(sound: list[str], faulty: dict[str, set[str]], size: int) -> None:
    found = run(sound + list(faulty), size)
    for name in sound:
        assert found[name]["failed"] == [] and found[name]["checks"] == 9, (name, found[name])
        assert all(map(reaches_its_bound, found[name]["moved"].values())), (name, found[name])
    for name, wanted in faulty.items():
        assert wanted <= set(found[name]["failed"]), (name, found[name])


def test_a_step_of_two_ranks_is_sound_and_a_planted_fault_is_found() -> None:
    judge(SOUND, FAULTY, 2)


@pytest.mark.slow
def test_every_form_of_a_step_of_two_ranks_is_sound() -> None:
    judge(MORE, MORE_FAULTY, 2)


@pytest.mark.slow
def test_a_step_of_three_ranks_is_sound() -> None:
    judge(["plain joint 2", "sharded box 1"], {}, 3)
