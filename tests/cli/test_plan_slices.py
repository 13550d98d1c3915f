"""`lamina plan` with head masks and weights: what it shows, what it counts, what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from asking import refused, succeeded

if TYPE_CHECKING:
    from conftest import Project

POLICY = """
[corpus]
origin = "test"
accountant = "gaussian"
delta = 1e-5
[class.sensitive]
population = 100
epsilon = 4.0
profile = {profile}
"""
MODULE = """
from lamina.signals.autoencoders import TransformerAutoencoder

def build():
    return TransformerAutoencoder(3, 4, width=8, layers=2, heads=4, hidden=5, code=2)
"""


def plan(project: Project, profile: str, *words: str) -> tuple[int, str, str]:
    project.write("policy.toml", POLICY.replace("{profile}", profile))
    project.write(f"{project.module}.py", MODULE)
    return project.plan("--batch", "30", "--steps", "20", *words)


def test_slices_are_shown(project: Project) -> None:
    text = succeeded(plan(project, '{ layers = ["decoder.*"], heads = [0, 2] }'))
    assert "layers decoder.*, heads 0, 2" in text
    assert "* reached in part by" in text and "[:, 0:2, 4:6]" in text
    text = succeeded(plan(project, '{ layers = ["decoder.*"], heads = [0, 2] }', "--explain"))
    assert "36 of 72" in text and "* reached in part by" in text


def test_json_has_slices_and_counts_what_is_reached(project: Project) -> None:
    printed = succeeded(plan(project, '{ layers = ["decoder.*"], heads = [0, 2] }', "--json", "--compare"))
    found: dict[str, Any] = json.loads(printed)
    assert found["classes"]["sensitive"]["profile"] == "layers decoder.*, heads 0, 2"
    by_name = {part["tensor"]: part for part in found["slices"]}
    assert by_name["decoder.0.out.weight"] == {
        "class": "sensitive", "tensor": "decoder.0.out.weight", "axis": 1, "length": 8, "ranges": [[0, 2], [4, 6]],
    }  # fmt: skip
    assert by_name["decoder.0.out.bias"]["ranges"] == []
    counts = {layer["name"]: layer["reached"] for layer in found["layers"]}
    assert counts["decoder.0.query"] == 36 and counts["decoder.0.out"] == 32
    assert counts["embed"] == 0
    power = sum(layer["reached"] * layer["noise_std"] ** 2 for layer in found["layers"])
    assert found["total_noise"] == pytest.approx(power)
    flat = next(row for row in found["compare"] if row["allocation"] == "flat")
    assert flat["noise_against_flat"] == pytest.approx(1.0)


def test_weights_need_a_box(project: Project) -> None:
    profile = '{ top = 0.5, weights = { "head" = 0.5 } }'
    refused(plan(project, profile), "allocate.weights-joint-clipping")
    text = succeeded(plan(project, profile, "--clipping", "box", "--json", "--among", "uniform,pareto"))
    assert all(row["ran"] for row in json.loads(text)["compare"])


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("{ heads = [7] }", ["class 'sensitive'", "names number 7 of 'encoder.0', which has 4"]),
        ("{ experts = [0] }", ["asks for experts", "known experts: none"]),
        ('{ adapter = "default" }', ["no adapter 'default'", "PEFT"]),
        ("{ haeds = [0] }", ["policy.toml", "'haeds'", "did you mean 'heads'"]),
    ],
)
def test_refusals_teach(project: Project, profile: str, words: list[str]) -> None:
    code, _, complaint = plan(project, profile)
    assert code == 1
    assert all(word in " ".join(complaint.split()) for word in words), complaint
