"""Runs and what draws their noise: killed and resumed with the native kernel, and with another one than before."""

from __future__ import annotations

import json
from pathlib import Path

import problem
import pytest
from stopping import LOOSE, killed, same, told, weights

from lamina.engine import native
from lamina.run.trainer import Trainer


@pytest.fixture(autouse=True)
def built() -> None:
    with native.switched(True):
        if (reason := native.missing()) is not None:
            pytest.skip(reason)


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.usefixtures("known_seeds")
def test_a_killed_run_resumes_exactly_with_native_noise(tmp_path: Path, hardened: bool) -> None:
    with native.switched(True):
        whole = problem.trainer(tmp_path / "whole" / "a", hardened=hardened)
        expected = whole.fit()
        killed(tmp_path / "cut" / "a", 13, hardened=hardened)
        resumed = problem.trainer(tmp_path / "cut" / "a", seed=9, hardened=hardened)
        outcome = resumed.fit()
    assert same(weights(whole), weights(resumed))
    assert outcome.epsilon == expected.epsilon and outcome.notes == ()


def hardened_in(trainer: Trainer) -> bool:
    found: bool = json.loads((trainer.folder / "metrics.json").read_text())["conditions"]["hardened"]
    return found


@pytest.mark.parametrize("begun", [None, True, False])
@pytest.mark.usefixtures("known_seeds")
def test_a_resumed_run_keeps_the_kind_of_noise_that_it_began_with(tmp_path: Path, begun: bool | None) -> None:
    whole = problem.trainer(tmp_path / "whole" / "a", hardened=begun)
    expected = whole.fit()
    killed(tmp_path / "cut" / "a", 13, hardened=begun)
    resumed = problem.trainer(tmp_path / "cut" / "a", seed=9)  # which names none
    outcome = resumed.fit()
    assert same(weights(whole), weights(resumed)) and outcome.notes == ()
    assert outcome.total == expected.total
    assert hardened_in(resumed) is hardened_in(whole) is (begun is not False)


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_is_resumed_with_the_other_kind_by_name_is_charged_again(tmp_path: Path, begun: bool) -> None:
    killed(tmp_path / "a", 13, hardened=begun, bounds=LOOSE)
    resumed = problem.trainer(tmp_path / "a", seed=9, hardened=not begun, bounds=LOOSE)
    assert told(resumed.fit(), "charged again, because")
    assert not hardened_in(resumed)


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_goes_on_with_other_noise_is_charged_again_and_says_so(tmp_path: Path, begun: bool) -> None:
    with native.switched(begun):
        killed(tmp_path / "a", 13)
    with native.switched(not begun):
        outcome = problem.trainer(tmp_path / "a", seed=9).fit()
    assert told(outcome, "charged again, because the version of the program, what draws its noise")
