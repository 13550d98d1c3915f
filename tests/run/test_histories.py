"""Whatever honest people do to runs that share a ledger: it verifies, states what was spent, and no attempt stays open.

Histories are drawn by a seed (history_acts.py): runs with every form of noise are killed at a step or at any call, go
on as they were or changed, are copied, put back from older copies, taken for lost, refused, and work beside each other.
After every act an auditor looks; in the end every run goes on to its end. Acts that are refused in clear words are
fine, as long as most are not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import postgres
import pytest
from histories import World
from history_acts import drawn, drawn_with_people
from history_plans import FORMS, RULES
from wards import Ward

from lamina.run import membership

BUDGET = {"form": "budget"}
FOUND: dict[str, list[dict[str, Any]]] = {
    "a copy of a run that is finished costs nothing": [
        {"do": "go", "folder": "a", **BUDGET},
        {"do": "copy", "folder": "a", "to": "b"},
        {"do": "go", "folder": "b"},
    ],
    "a bound that comes to a run that is finished costs nothing": [
        {"do": "go", "folder": "a", **BUDGET},
        {"do": "go", "folder": "a", "signed": ("z=0.1",)},
    ],
    "a run is lost before its first segment": [
        {"do": "go", "folder": "a", "stop": ("call", 1, "/checkpoint/"), **BUDGET},
        {"do": "lose", "folder": "a"},
        {"do": "forget", "folder": "a"},
    ],
    "a plan is given up before its first segment": [
        {"do": "go", "folder": "a", "stop": ("call", 1, "/checkpoint/"), **BUDGET},
        {"do": "go", "folder": "a", "form": "raw"},
    ],
    "budgets are followed at two orders": [
        {"do": "go", "folder": "a", "stop": ("step", 5)},
        {"do": "go", "folder": "b", "steps": 11, **BUDGET},
        {"do": "go", "folder": "a", **BUDGET},
    ],
    "other runs come first in a ledger that was put back": [
        {"do": "go", "folder": "a"},
        {"do": "save_ledger"},
        {"do": "go", "folder": "b"},
        {"do": "restore_ledger"},
        {"do": "go", "folder": "c"},
    ],
    "a copy comes first in a ledger that was put back": [
        {"do": "go", "folder": "a"},
        {"do": "save_ledger"},
        {"do": "go", "folder": "b", "stop": ("step", 5), **BUDGET},
        {"do": "copy", "folder": "b", "to": "c"},
        {"do": "restore_ledger"},
        {"do": "go", "folder": "c"},
    ],
}


@pytest.fixture(autouse=True)
def _attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run looks for withdrawals after every step."""
    monkeypatch.setattr(membership, "_POLL_SECONDS", 0.0)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where wards are made, once."""
    return tmp_path_factory.mktemp("wards")


def lived(world: World, history: list[dict[str, Any]]) -> None:
    try:
        world.live(history)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{history}") from error
    assert not world.stuck, world.stuck
    assert len(world.refused) <= len(history) / 2, world.refused


@pytest.mark.parametrize("name", FOUND)
def test_a_history_that_once_went_wrong(tmp_path: Path, name: str) -> None:
    lived(World(tmp_path), FOUND[name])


@pytest.mark.parametrize("seed", [1, 2])
def test_runs_under_bounds(tmp_path: Path, seed: int) -> None:
    lived(World(tmp_path), drawn(seed, 10, FORMS))


@pytest.mark.parametrize("seed", [3])
def test_runs_under_a_policy_that_becomes_stricter(tmp_path: Path, seed: int) -> None:
    lived(World(tmp_path, promised=60.0), drawn(seed, 10, FORMS))


@pytest.mark.parametrize(("seed", "noise"), [(1, "exact"), (2, "capped")])
def test_runs_on_signed_contributions(tmp_path: Path, first: Path, seed: int, noise: str) -> None:
    forms = ("exact", *RULES) if noise == "exact" else ("exact",)
    lived(Ward(tmp_path, noise=noise, first=first), drawn_with_people(seed, 6, forms))


def test_runs_on_a_server(tmp_path: Path, server: postgres.Server) -> None:
    where = server.database(f"histories_{os.getpid()}")
    history = [act for act in drawn(4, 6, FORMS) if "ledger" not in act["do"]]
    lived(World(tmp_path, where=where), history)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_many_runs_under_bounds(tmp_path: Path, seed: int) -> None:
    lived(World(tmp_path, promised=(None, 60.0)[seed % 2]), drawn(seed, 16, FORMS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 212))
def test_many_runs_on_signed_contributions(tmp_path: Path, first: Path, seed: int) -> None:
    noise = ("exact", "capped", "raw", "bins")[seed % 4]
    forms = ("exact", *RULES) if noise == "exact" else ("exact",)
    lived(Ward(tmp_path, noise=noise, first=first), drawn_with_people(seed, 14, forms))
