"""The program: exit codes, help, refusals without tracebacks, one JSON object on standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.cli import main

POLICY = """
[corpus]
origin = "test"
delta = 1e-5
[class.clinical]
population = 2000
epsilon = 2.0
[class.sensitive]
population = 500
epsilon = 1.0
profile = { top = 0.25 }
"""


def code_of(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    code = caught.value.code
    return code if isinstance(code, int) else 1


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["plan", "--help"], ["bench", "--help"]]
)
def test_help_teaches(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(arguments) == 0
    assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["demo", "--nonsense"], ["demo", "--steps", "0"], ["plan"]]
)
def test_misuse_is_two(arguments: list[str]) -> None:
    assert code_of(arguments) == 2


def test_plan_prints_the_keys_of_the_contract(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["plan", policy, "--model", "mlp", "--batch", "50", "--steps", "100", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made["classes"]) == {"clinical", "sensitive"}
    for figures in made["classes"].values():
        assert {"sigma", "epsilon", "rho", "delta", "sampling_rate", "steps"} <= figures.keys()
    assert made["classes"]["clinical"]["epsilon"] == pytest.approx(2.0, rel=1e-2)
    for layer in made["layers"]:
        assert {"name", "depth", "parameters", "noise_std", "clip", "share"} <= layer.keys()
        assert set(layer["clip"]) == {"clinical", "sensitive"}


def test_plan_prints_a_table_for_people(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["plan", policy, "--model", "mlp", "--batch", "50", "--epochs", "2"]) == 0
    text = capsys.readouterr().out
    assert "decoder.8" in text
    assert "sensitive" in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--model", "no.such.module:thing"], "no.such.module"),
        (["--model", "nonsense"], "residual"),
        (["--model", "math:floor"], "TypeError"),
        (["--model", "builtins:dict"], "torch.nn.Module"),
        (["--batch", "1000000"], "population"),
        (["--allocate", "magic"], "magic"),
        (["--epochs", "3"], "one of --steps and --epochs"),
    ],
)
def test_a_refusal_is_one_with_a_remedy_and_no_traceback(
    policy: str, change: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(["plan", policy, "--model", "mlp", "--batch", "50", "--steps", "10", *change]) == 1
    printed = capsys.readouterr()
    assert "refused" in printed.err
    assert word in printed.err.replace("\n", " ")
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_missing_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["plan", "nowhere.toml", "--steps", "1"]) == 1
    assert "nowhere.toml" in capsys.readouterr().err


def test_the_installed_program_starts() -> None:
    program = Path(sys.executable).with_name("lamina")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
