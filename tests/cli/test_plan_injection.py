"""What the command line says of plans whose noise enters otherwise, and that it trains them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from asking import succeeded

if TYPE_CHECKING:
    from conftest import Project

BANDED = '\n[noise]\ncorrelation = "banded"\nbands = 2\n'
RAW = '\n[noise]\ninjection = "per_sample_raw"\noccurrences = 4\n'


def with_noise(project: Project, noise: str) -> None:
    project.write("policy.toml", (project.folder / "policy.toml").read_text() + noise)


def test_a_raw_plan_says_what_its_figures_are(project: Project) -> None:
    with_noise(project, RAW)
    size = ("--batch", "12", "--steps", "6")
    out = succeeded(project.plan(*size, "--json"))
    found = json.loads(out)
    assert found["injection"] == {"form": "per_sample_raw", "parts": 1, "occurrences": 4}
    clinical = found["classes"]["clinical"]
    assert clinical["adjacency"] == "zero-out, no amplification"
    assert clinical["rho"] == pytest.approx(4 / (2 * clinical["sigma"] ** 2))
    assert 5.9 < clinical["epsilon"] <= 6.0
    out = succeeded(project.plan(*size))
    assert "noise per_sample_raw, at most 4 occurrences" in out
    assert "zero-out, no amplification" in out
    out = succeeded(project.plan(*size, "--explain"))
    told = " ".join(out.split())
    assert "in each of 4 occurrences" in told and "sampled with rate" not in told


def test_a_plan_says_what_correlated_noise_gains(project: Project) -> None:
    with_noise(project, BANDED)
    size = ("--batch", "12", "--steps", "6")
    found = json.loads(succeeded(project.plan(*size, "--json")))["correlation"]
    assert found["bands"] == 2 and found["prefix_error_ratio"] > 0 and len(found["coefficients_sha256"]) == 64
    table = " ".join(succeeded(project.plan(*size)).split())
    assert "times the mean squared error of independent noise" in table and "at 2 times its rate q" in table
    told = " ".join(succeeded(project.plan(*size, "--explain")).split())
    assert "in one of 2 of them" in told and "Contributions take turns" in told


def spread_out(project: Project) -> None:
    """A rate that sampling credits little."""
    text = (project.folder / "policy.toml").read_text().replace("population = 60", "population = 6000")
    project.write("policy.toml", text.replace("[class", 'accountant = "rdp"\n[class', 1))


def bands_of(project: Project, old: str = "", new: str = "") -> int:
    """Of a run whose RUN.toml says "auto"."""
    run = project.run.replace("epsilon = 2.0", 'epsilon = 6.0\nbands = "auto"').replace("steps = 6", "steps = 40")
    found = project.train_json("--plan-only", run=run.replace(old, new))
    bands: int = (found["correlation"] or {"bands": 1})["bands"]
    assert any('bands = "auto" takes 1 band' in note for note in found["notes"]) == bool(new)
    return bands


def test_a_run_file_takes_the_bands_that_gain(project: Project) -> None:
    assert bands_of(project) == 1
    spread_out(project)
    assert bands_of(project) > 1
    assert bands_of(project, 'unit = "patient"', 'unit = "each"') == 1  # contributions are called by their rows
    assert bands_of(project, "segment =", "max_occurrences = 3\nsegment =") == 1


def test_a_plan_says_where_bands_would_gain(project: Project) -> None:
    def told() -> list[str]:
        notes = json.loads(succeeded(project.plan("--batch", "12", "--steps", "40", "--json")))["notes"]
        return [note for note in notes if 'bands = "auto"' in note]

    assert not told()
    spread_out(project)
    assert told()


@pytest.mark.parametrize(
    "noise",
    [
        RAW,
        BANDED,
        '\n[noise]\ninjection = "per_microbatch"\nbins = 3\n',
        '\n[noise]\ninjection = "per_sample"\nslots = 9\n',
    ],
)
def test_every_form_trains(project: Project, noise: str) -> None:
    with_noise(project, noise)
    found = project.train_json()
    assert found["steps"] == 6 and found["private"]
    assert 0 < found["classes"]["clinical"]["epsilon"] <= 2.0
    assert project.train("--plan-only", run=project.run)[0] == 0
