"""The policy file: what it accepts, what it says when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import raises_code

from lamina.errors import PlanError
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.policy import Policy
from lamina.plan.step_plan import PlannedClass

GOOD = """
[corpus]
origin = "example.org/ecg"
accountant = "rdp"
delta = 1e-5
floors = { clip_norm = 0.5, noise_multiplier = 0.5 }

[class.clinical]
population = 20_000
clip_norm = 2
noise_multiplier = 1.0
profile = { top = 0.25 }
unit = "patient"
purposes = ["research", "triage"]

[class.open]
public = true

[noise]
kind = "gaussian"
injection = "per_step"
"""


def test_a_policy_is_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(GOOD)
    policy = Policy.load(path)
    assert policy == Policy.parse(GOOD)
    clinical = policy.classes["clinical"]
    assert clinical.profile == DepthProfile.top(0.25)
    assert clinical.purposes == ("research", "triage")
    assert clinical.clip_norm == 2.0
    assert policy.classes["open"].public
    assert policy.corpus.accountant == "rdp"


ABOUT = """
[about]
title = "ECG triage"
organisation = "St. Elsewhere, cardiology"
publication_date = "2026-11-30"
approach = "supervised"
"""


def test_what_the_owner_states_about_data_and_model() -> None:
    """In order of the names, so that one statement has one form."""
    stated = Policy.parse(GOOD + ABOUT).about.stated
    assert [name for name, _ in stated] == ["approach", "organisation", "publication_date", "title"]
    assert Policy.parse(GOOD).about.stated == ()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title", "titel", ["about.titel", "did you mean 'title'"]),
        ('"ECG triage"', '""', ["about.title", "must not be empty"]),
        ('"ECG triage"', '"two\\nlines"', ["about.title", "one line"]),
        ('"ECG triage"', '"\\u001b[2J"', ["about.title", "printable"]),
        ('"ECG triage"', '"' + "x" * 2001 + '"', ["about.title", "at most 2000 characters"]),
        ('"ECG triage"', "7", ["about.title", "text in quotes"]),
        ("2026-11-30", "soon", ["about.publication_date", "soon"]),
        ("2026-11-30", "2026-02-30", ["about.publication_date", "2026-02-30"]),
        ('"supervised"', '"magic"', ["about.approach", "semi-supervised"]),
    ],
)
def test_statements_that_are_refused(old: str, new: str, words: list[str]) -> None:
    with raises_code("plan.policy-invalid") as caught:
        Policy.parse(GOOD + ABOUT.replace(old, new))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_policy_cannot_be_changed() -> None:
    policy = Policy.parse(GOOD)
    with pytest.raises(Exception, match="frozen"):
        policy.classes["clinical"].clip_norm = 3.0  # type: ignore[misc]


def test_the_template_restricts_sensitive_data_to_the_top_quarter() -> None:
    policy = Policy.template()
    assert policy.classes["sensitive"].profile == DepthProfile.top(0.25)
    assert policy.corpus.delta * max(entry.population or 0 for entry in policy.classes.values()) < 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("clip_norm = 2", "clip_norm = -1", ["class.clinical.clip_norm", "-1", "> 0"]),
        ("clip_norm = 2", 'clip_norm = "2"', ["class.clinical.clip_norm", "'2'", "number"]),
        ("clip_norm = 2", "clip_norm = inf", ["class.clinical.clip_norm", "inf", "finite"]),
        ("clip_norm = 2", "clipnorm = 2", ["class.clinical.clipnorm", "did you mean 'clip_norm'", "accepted"]),
        ("clip_norm = 2", "clip_norm = 0.1", ["class.clinical.clip_norm", "0.1", "floor 0.5"]),
        ("noise_multiplier = 1.0", "noise_multiplier = 0.4", ["clinical.noise_multiplier", "floor 0.5"]),
        ("noise_multiplier = 1.0", "epsilon = 100.0", ["class.clinical.epsilon", "100", "floor"]),
        ("noise_multiplier = 1.0", "epsilon = 0", ["class.clinical.epsilon", "0", "> 0"]),
        ("population = 20_000", "population = 2e4", ["class.clinical.population", "whole number"]),
        ("population = 20_000", "population = 0", ["class.clinical.population", "> 0"]),
        ("population = 20_000", "", ["class.clinical", "population"]),
        ("delta = 1e-5", "delta = 1.0", ["corpus.delta", "< 1"]),
        ("delta = 1e-5", "", ["corpus.delta is missing", "[corpus]"]),
        ('accountant = "rdp"', 'accountant = "magic"', ["corpus.accountant", "magic"]),
        ("top = 0.25", "top = 25", ["top is 25", "(0, 1]"]),
        ("top = 0.25", "head = [1]", ["'head'", "did you mean 'heads'", "top = 0.25", "layers"]),
        ("public = true", "public = true\nepsilon = 1.0", ["class.open", "public class has no epsilon"]),
        ("public = true", "public = 1", ["class.open.public", "true or false"]),
        ('kind = "gaussian"', 'kind = "cauchy"', ["noise.kind", "cauchy", "'gaussian'"]),
        ('"per_step"', '"per_head"', ["noise.injection", "per_head", "'per_step'", "'per_sample_raw'"]),
        ('"per_step"', '"per_sample"', ["noise", "'per_sample' needs slots"]),
        ('"per_step"', '"per_microbatch"', ["noise", "'per_microbatch' needs bins"]),
        ('"per_step"', '"per_step"\nbins = 4', ["bins belongs to injection 'per_microbatch'", "[noise]"]),
        ('"per_step"', '"per_sample"\nslots = 0', ["noise.slots", "0", ">= 1"]),
        ('"per_step"', '"per_sample"\nslots = 4\noccurrences = 3', ["occurrences belongs to", "raw"]),
        ('"per_step"', '"per_sample_raw"\noccurrences = 2.0', ["noise.occurrences", "whole number"]),
        ("[noise]", "[nose]", ["nose is not a known key", "did you mean 'noise'"]),
        ("[class.open]", '[class."a b"]', ["a b", "letters"]),
        ('purposes = ["research", "triage"]', 'purposes = "research"', ["purposes", "list"]),
        ("[corpus]", "[corpus", ["not TOML", "line"]),
    ],
)
def test_errors_name_file_key_value_and_remedy(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert GOOD.count(old) == 1
    path = tmp_path / "policy.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(PlanError) as refused:
        Policy.load(path)
    assert refused.value.remedy
    for word in [str(path), *words]:
        assert word in str(refused.value)


def test_all_errors_are_told_at_once() -> None:
    text = GOOD.replace("clip_norm = 2", "clip_norm = -1").replace("delta = 1e-5", "delta = 2.0")
    with raises_code("plan.policy-invalid"):
        Policy.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("clip_norm = 2", "clip_norm = 0.01", "plan.clip-norm-below-floor"),
        ("noise_multiplier = 1.0", "noise_multiplier = 0.4", "plan.noise-multiplier-below-floor"),
        ("clip_norm = 2", "epsilon = 1e9", "plan.epsilon-above-floor"),
        ("top = 0.25", "tip = 0.25", "plan.profile-unknown"),
    ],
)
def test_a_refusal_inside_a_policy_keeps_its_code(old: str, new: str, code: str) -> None:
    with raises_code(code):
        Policy.parse(GOOD.replace(old, new))


def test_missing_file_and_empty_class_table_are_refused(tmp_path: Path) -> None:
    with raises_code("plan.policy-unreadable"):
        Policy.load(tmp_path / "none.toml")
    with raises_code("plan.policy-invalid"):
        Policy.parse('[corpus]\norigin = "x"\ndelta = 1e-5\n')


def test_bound_is_the_strictest_of_what_is_declared() -> None:
    policy = Policy.parse(GOOD)
    exact = 4.3766  # ε of μ = 1 at δ = 1e-5, by the exact Gaussian formula (checked by quadrature)
    assert policy.bound("clinical") == pytest.approx(exact, abs=2e-3)
    assert policy.bound("open") == 0.0
    assert Policy.parse(GOOD.replace("clip_norm = 2", "epsilon = 1.5")).bound("clinical") == 1.5
    both = GOOD.replace("clip_norm = 2", "epsilon = 9.0")
    assert Policy.parse(both).bound("clinical") == policy.bound("clinical")
    plain = GOOD.replace("noise_multiplier = 1.0", "").replace(", noise_multiplier = 0.5", "")
    assert Policy.parse(plain).bound("clinical") is None


@pytest.mark.parametrize("delta", ["0", "0.0", "1", "-1e-5"])
def test_a_delta_out_of_range_has_a_remedy_about_delta(delta: str) -> None:
    text = f'[corpus]\norigin = "x"\ndelta = {delta}\n[class.a]\npopulation = 10\nepsilon = 1.0\n'
    with raises_code("plan.policy-invalid") as caught:
        Policy.parse(text)
    assert "δ" in caught.value.remedy and "ε" not in caught.value.remedy


@pytest.mark.parametrize(
    "unit", ["patient, nobody\\n\\nClass clinical: with ε = 0.01", "patient\\u001b[2K", "patient\\u202e", "x" * 65]
)
def test_a_unit_is_a_word_and_no_sentence_of_a_certificate(unit: str) -> None:
    """The signed statement of a certificate, its PDF and the model card repeat the unit as it is."""
    with pytest.raises(PlanError, match="unit"):
        Policy.parse(GOOD.replace('"patient"', f'"{unit}"'))
    with raises_code("plan.unit-invalid"):
        PlannedClass(name="clinical", population=10, sampling_rate=0.1, unit=unit.encode().decode("unicode_escape"))
