"""Profiles of guidelines: each item has evidence with its source or is "not stated", and no profile claims compliance."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sample_certificate import public_class, sample_content

from lamina.release.profiles import PROFILES, profile_dict, profile_text
from lamina.release.typeset import read_template

SECTIONS = (
    "2.2", "2.3", "2.3, 2.5", "2.4", "2.4", "2.4", "2.2, 4.1", "2.6", "3", "3.1", "3.2", "3.2", "3.3", "3.5", "3.6", "3.7",
    "4.1", "4.2", "4.3", "4.3", "4.4", "4.5", "4.3", "5",
)  # fmt: skip


NIST, HIPAA = PROFILES


def rows(content: dict[str, Any], profile: str = NIST, **officer: Any) -> dict[int, list[str]]:
    """Evidence by item."""
    return {
        row["item"]: [f"{each['text']} ({each['source']}) {each['leaves']}" for each in row["evidence"]]
        for row in profile_dict(profile, content, officer or None)["rows"]
    }


def test_it_has_24_items_in_order() -> None:
    assert [each["item"] for each in profile_dict(NIST, sample_content())["rows"]] == list(range(1, 25))
    assert tuple(each["section"] for each in read_template(f"{NIST}.toml")["item"]) == SECTIONS


@pytest.mark.parametrize("name", PROFILES)
def test_the_first_line_claims_no_compliance(name: str) -> None:
    table = profile_dict(name, sample_content())
    first, *rest = profile_text(table).splitlines()
    assert "does not claim compliance" in first and not any("complian" in line for line in rest)
    assert "does not claim compliance" in next(iter(json.loads(json.dumps(table)).values()))


def test_evidence_has_its_source_and_leaves() -> None:
    found = rows(sample_content())
    assert (
        found[1][0]
        == "ε of this run is 3.01 per patient at δ = 1e-05, in the band 1 to 5. (recomputed from the ledger) []"
    )
    assert found[3][0] == "sensitive: 70 steps with σ 4.805 at sampling rate 0.4 (recomputed from the ledger) []"
    assert "sensitive: ε 3 at δ 1e-05, for comparison (recomputed from the ledger) []" in found[2]
    points = [each for each in found[3] if " at δ " in each]
    assert (
        points[0] == "sensitive: ε 2.1 at δ 0.001 (recomputed from the ledger) []" and len(points) == 4
    )  # of 1e-08, none
    assert found[9] == ["lamina 0.1, torch 2.13.0, python 3.11.2, kernels none (stated by the trainer) [41]"]
    assert found[21] == ["security: encrypted at rest; two administrators (stated by the owner) [0]"]
    assert found[11] == ["accuracy: 0.91, 95 % interval 0.88 to 0.93, on public data (measured) []"]
    assert len(found[13]) == 2 and found[23] == ["source of noise and samples: secure (stated by the trainer) [41]"]


def test_what_nobody_states_is_not_stated() -> None:
    content = sample_content() | {"statements": [], "about": {}, "utility": []}
    content["program"] = dict.fromkeys(content["program"], "not stated") | {"leaf": 41, "earlier": []}
    found = rows(content)
    silent = {item for item, evidence in found.items() if not evidence}
    assert silent == {1, 5, 8, 9, 11, 12, 13, *range(16, 23)}
    lines = profile_text(profile_dict(NIST, content)).splitlines()
    assert lines.count("      not stated") == 14


def test_public_classes_have_no_figures() -> None:
    found = rows(sample_content({"open": public_class()}))
    assert not found[2] and not found[4] and not any("open" in each for evidence in found.values() for each in evidence)


def test_the_comparison_with_training_without_privacy_is_an_item_of_its_own() -> None:
    content = sample_content()
    figure = {"figure": "equivalent_records", "group": None, "value": 40.0, "low": None, "high": None}
    content["utility"] = [*content["utility"], content["utility"][0] | figure]
    found = rows(content)
    assert found[11] == rows(sample_content())[11]
    assert found[12] == ["equivalent_records: 40, on public data (measured) []"]


def test_a_run_that_is_not_private_is_named_so() -> None:
    lines = profile_text(profile_dict(NIST, sample_content() | {"private": False})).splitlines()
    assert lines[1] == "This run is not private; lamina certify states why."


@pytest.mark.parametrize("name", PROFILES)
def test_a_run_without_a_guarantee_states_no_figure(name: str) -> None:
    content = sample_content(private=False)
    content["statements"] = []  # the certificate of such a run has no statement with a figure
    told = [each for evidence in rows(content, name).values() for each in evidence]
    assert told and not any("ε" in each or "ρ" in each or "σ" in each for each in told)


def test_public_data_has_no_mechanism() -> None:
    told = [each for evidence in rows(sample_content({"open": public_class()})).values() for each in evidence]
    assert not any("gaussian" in each or "grid" in each or "source of noise" in each for each in told)


def test_an_expert_determination_has_the_fields_of_the_officer() -> None:
    empty, officer = rows(sample_content(), HIPAA), {
        "signer": "ab" * 32, "name": "R. Roe", "role": "statistician", "qualification": "PhD, statistics", "method": None,
        "signed": "2026-11-30T12:00:00Z", "valid_until": "2027-11-30T12:00:00Z", "recipient": "University of X",
        "purpose": "research", "legal_basis": None, "result": "very small risk",
    }  # fmt: skip
    found = rows(sample_content(), HIPAA, **officer)
    assert not empty[1] and not empty[2] and not empty[3] and not empty[15] and empty[8] and empty[9]
    by = "(stated by the holder of key abababababababab) []"
    assert found[1] == [f"name: R. Roe {by}", f"role: statistician {by}"] and found[2] == [
        f"qualification: PhD, statistics {by}"
    ]
    assert f"valid until: 2027-11-30T12:00:00Z {by}" in found[3] and f"result: very small risk {by}" in found[15]
    assert not any("method:" in each or "legal basis" in each for evidence in found.values() for each in evidence)
    assert "class volunteer: declared public (recomputed from the ledger) []" in found[6]
