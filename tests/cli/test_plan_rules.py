"""A RUN.toml chooses an allocation with options, a measure and a zCDP budget; `lamina train` says what moves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from asking import refused, succeeded

from lamina.allocate.measure.measure import Measure
from lamina.cli.explain import NOT_SIGNED

if TYPE_CHECKING:
    from conftest import Project


def saved(project: Project, *, layers: tuple[str, ...] = ("0", "2")) -> None:
    n = len(layers)
    row = tuple(0.1 * (i + 1) for i in range(n))
    Measure(proxy="gaussian", layers=layers, tight=row, worst=row, printed=row, harm=row, norms=row, fisher=row).save(
        project.folder / "measure.json"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('allocate = "ladp"', "rule: Shares follow the energy of the noised gradient, read every 10 steps"),
        ('allocate = { name = "ladp", every = 2 }', "read every 2 steps"),
        ('allocate = "quantile"', "rule: Thresholds follow the 0.5 quantile"),
        (
            'allocate = { name = "ladp", choose_every = 3, choose_epsilon = 0.1 }',
            "rule: An exponential mechanism of ε 0.1 chooses the shape of S every 3 steps (2 times)",
        ),
        ('allocate = { name = "ladp", mode = "budget" }', "rule: sigma follows the remaining budget"),
    ],
)
def test_train_says_which_rules_are_active(project: Project, line: str, words: str) -> None:
    out = succeeded(project.train(run=f"{line}\n{project.run}"))
    plan, _, summary = out.partition("ε of this run")
    assert words in plan
    assert words in summary


def test_train_says_nothing_of_rules_where_nothing_moves(project: Project) -> None:
    out = succeeded(project.train("--plan-only"))
    assert "rule:" not in out


def test_the_rules_are_in_the_object_for_machines(project: Project) -> None:
    found = project.train_json(run=f'allocate = {{ name = "ladp", every = 2 }}\n{project.run}')
    assert found["allocation"] == "ladp"
    (rule,) = found["rules"]
    assert "read every 2 steps" in rule
    signed = json.loads((project.folder / "runs" / "first" / "run.json").read_text(encoding="utf-8"))
    assert signed["settings"]["allocate"] == {"name": "ladp", "every": 2}


def test_a_measure_lies_beside_the_run_file(project: Project) -> None:
    run = f'allocate = "lsab"\nmeasure = "measure.json"\n{project.run}'
    refused(project.train("--plan-only", run=run), "cli.file-missing")
    saved(project)
    out = succeeded(project.train("--plan-only", run=run))
    assert "lsab allocation, box clipping" in out


def test_a_measure_of_another_model_is_refused(project: Project) -> None:
    saved(project, layers=("0", "1"))
    refused(
        project.train("--plan-only", run=f'measure = "measure.json"\n{project.run}'),
        "sensitivity.measure-of-other-layers",
    )


def test_an_allocation_without_its_measure_is_refused(project: Project) -> None:
    refused(project.train("--plan-only", run=f'allocate = "lsab"\n{project.run}'), "allocate.needs-measure")


def test_rho_is_a_budget_too(project: Project) -> None:
    run = "rho = 0.05\n" + project.run.replace("epsilon = 2.0\n", "")
    found = project.train_json("--plan-only", run=run)
    assert found["accountant"] == "zcdp"
    assert found["classes"]["clinical"]["rho"] == pytest.approx(0.05, rel=1e-11)
    assert found["classes"]["clinical"]["rho"] <= 0.05
    assert found["notes"] == [NOT_SIGNED]  # what was asked for is planned
    refused(project.train("--plan-only", run="rho = 0.05\n" + project.run), "cli.epsilon-or-rho")


def test_a_run_chooses_its_clip_norm_and_its_noise_multiplier(project: Project) -> None:
    run = "noise_multiplier = 4.0\nclip_norm = 0.02\n" + project.run.replace("epsilon = 2.0\n", "")
    found = project.train_json("--plan-only", run=run)
    assert found["classes"]["clinical"]["sigma"] == pytest.approx(4.0, rel=1e-9)
    assert sum(layer["clip"]["clinical"] ** 2 for layer in found["layers"]) ** 0.5 == pytest.approx(0.02, rel=1e-9)
    assert found["notes"] == [NOT_SIGNED]
    both = "noise_multiplier = 4.0\n" + project.run
    refused(project.train("--plan-only", run=both), "cli.epsilon-or-rho")
    wide = "clip_norm = 7.0\n" + project.run
    refused(project.train("--plan-only", run=wide), "allocate.clip-norm-above-policy")
