"""The program: exit codes, help, refusals without tracebacks, one JSON object on standard output."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from asking import Call, refused, succeeded
from refusals import raises_code

from lamina import __version__
from lamina.allocate.make_plan import ALLOCATIONS
from lamina.bench.benchmark import benchmark_json
from lamina.cli.app import COMMANDS, main, summary
from lamina.cli.explain import plan_notes
from lamina.errors import LaminaError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy

NAMES = [name for name in COMMANDS if name not in ("keys", "ledger", "release", "contributions")]

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


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY, encoding="utf-8")
    return str(path)


# ------------------------------------------------------------------------------------ help


def test_help_shows_the_stages_in_order(lamina: Call) -> None:
    order = [
        "demo",
        "check",
        "init",
        "attest",
        "admit",
        "plan",
        "train",
        "audit",
        "spend",
        "status",
        "certify",
        "report",
        "serve",
        "study",
        "bench",
        "doctor",
    ]
    assert order == NAMES
    text = succeeded(lamina("--help"))
    listed = text[text.index("Commands") :]
    places = [listed.index(f"│ {name} ") for name in NAMES]
    assert places == sorted(places)
    assert "--debug" in text
    assert "lamina train --template" in text


def test_help_imports_no_command() -> None:
    script = (
        "import sys\nfrom lamina.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    "
        "heavy = {'torch', 'dp_accounting', 'lamina.run', 'lamina.ledger'} & set(sys.modules)\n    "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


@pytest.mark.parametrize("command", NAMES)
def test_every_command_teaches(command: str, lamina: Call) -> None:
    """It has an example, says what it spends or changes, takes --json; and the list of commands says the same of it."""
    text = " ".join(succeeded(lamina(command, "--help")).split())
    if command == "audit":
        text += " ".join(succeeded(lamina("audit", "step", "--help")).split())
    assert summary(command) in text
    assert f"lamina {command}" in text.partition("Example")[2]
    assert any(word in text.lower() for word in ("spend", "spent"))
    assert "--json" in text


def test_version(lamina: Call) -> None:
    assert succeeded(lamina("--version")) == f"lamina {__version__}\n"


def test_the_module_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "lamina", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"lamina {__version__}\n"


def test_nothing_to_do_shows_help(lamina: Call) -> None:
    code, out, err = lamina()
    assert code == 2
    assert "Commands" in out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["demo", "--nonsense"],
        ["demo", "--steps", "0"],
        ["plan"],
        ["plan", "x.toml"],
        ["plan", "x.toml", "--steps", "3", "--epochs", "1"],
        ["plan", "x.toml", "--steps", "many"],
        ["train"],
        ["train", "a.toml", "b.toml"],
        ["train", "a.toml", "--threads", "none"],
        ["bench", "--rounds", "0"],
    ],
)
def test_misuse_is_two(arguments: list[str], lamina: Call) -> None:
    code, out, err = lamina(*arguments)
    assert code == 2
    assert out == ""
    assert "Usage" in err
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------ plan


def test_plan_prints_the_keys_of_the_contract(policy: str, lamina: Call) -> None:
    made = json.loads(succeeded(lamina("plan", policy, "--model", "mlp", "--batch", "50", "--steps", "100", "--json")))
    assert set(made["classes"]) == {"clinical", "sensitive"}
    for figures in made["classes"].values():
        assert {"sigma", "epsilon", "rho", "delta", "sampling_rate", "steps"} <= figures.keys()
    assert made["classes"]["clinical"]["epsilon"] == pytest.approx(2.0, rel=1e-2)
    for layer in made["layers"]:
        assert {"name", "depth", "parameters", "noise_std", "clip", "share"} <= layer.keys()
        assert set(layer["clip"]) == {"clinical", "sensitive"}


def test_plan_prints_a_table_for_people(policy: str, lamina: Call) -> None:
    text = succeeded(lamina("plan", policy, "--model", "mlp", "--batch", "50", "--epochs", "2"))
    assert "decoder.8" in text
    assert "sensitive" in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--model", "no.such.module:thing"], "no.such.module"),
        (["--model", "nonsense"], "residual"),
        (["--model", "math:floor"], "missing a required argument"),
        (["--model", "math:pi"], "is a float"),
        (["--model", "builtins:dict"], "torch.nn.Module"),
        (["--batch", "1000000"], "population"),
        (["--allocate", "magic"], "magic"),
    ],
)
def test_a_refusal_is_one_with_a_remedy_and_no_traceback(
    policy: str, change: list[str], word: str, lamina: Call
) -> None:
    code, out, err = lamina("plan", policy, "--model", "mlp", "--batch", "50", "--steps", "10", *change)
    assert code == 1
    assert "refused" in err
    assert word in err.replace("\n", " ")
    assert "Traceback" not in err
    assert out == ""


def test_a_smaller_epsilon_is_explained(policy: str, lamina: Call) -> None:
    """Both classes reach the top layers; the one that needs more noise there decides for both."""
    arguments = ["plan", policy, "--model", "mlp", "--batch", "50", "--steps", "100", "--allocate", "flat"]
    text = succeeded(lamina(*arguments))
    assert "note: class 'clinical' is planned at ε" in text
    assert "below the 2 that it may spend" in text
    assert "class 'sensitive' needs more of it" in text
    found = json.loads(succeeded(lamina(*arguments, "--json")))
    assert found["classes"]["clinical"]["epsilon"] < 1.9
    assert found["classes"]["sensitive"]["epsilon"] == pytest.approx(1.0, rel=1e-2)
    assert len(explained(found["notes"])) == 1


def explained(notes: list[str]) -> list[str]:
    """Return the notes on ε, without those on bands and on classes that nobody can assess without a proxy."""
    return [each for each in notes if "correlated over" not in each and "not assessable" not in each]


def test_no_note_where_nothing_needs_one(policy: str, lamina: Call) -> None:
    found = json.loads(succeeded(lamina("plan", policy, "--model", "mlp", "--batch", "50", "--steps", "100", "--json")))
    bounds = {"clinical": 2.0, "sensitive": 1.0}
    short = [name for name, figures in found["classes"].items() if figures["epsilon"] < 0.99 * bounds[name]]
    assert len(explained(found["notes"])) == len(short)
    assert sum("not assessable" in each for each in found["notes"]) == 1  # of the class that reaches a part


def test_notes_compare_with_what_was_asked_for() -> None:
    from torch import nn

    import lamina

    one = Policy.parse(POLICY.partition("[class.sensitive]")[0])
    stack = LayerStack.from_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    plan = lamina.make_plan(stack, one, batch=50, steps=10, epsilon=0.5)
    assert plan_notes(plan, one, 0.5) == ()
    assert plan_notes(plan, one, {"clinical": 0.5}) == ()
    (note,) = plan_notes(plan, one)
    assert "below the 2 that it may spend" in note
    assert "class '' " not in note


def test_a_policy_to_start_from(lamina: Call) -> None:
    text = succeeded(lamina("plan", "--template"))
    assert Policy.parse(text) == Policy.template()
    assert json.loads(succeeded(lamina("plan", "--template", "--json"))) == {"template": text}


# ------------------------------------------------------------------------------------ refusals and defects


def test_json_refusals_are_objects_too(policy: str, lamina: Call) -> None:
    code, out, err = lamina("plan", policy, "--model", "nonsense", "--steps", "3", "--json")
    assert code == 1
    told = json.loads(out)
    assert told.keys() == {"refused", "remedy", "code", "family"} and told["family"] == "cli"
    assert "nonsense" in told["refused"]
    assert "residual" in told["remedy"]
    assert "refused: model 'nonsense'" in err


@pytest.mark.parametrize("words", [["--debug", "plan"], ["plan", "--debug"]])
def test_debug_shows_the_traceback(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with raises_code("plan.policy-unreadable"):
        main([*words, "nowhere.toml", "--steps", "1"])
    assert "refused" in capsys.readouterr().err


def test_debug_by_environment(lamina: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_DEBUG", "0")
    refused(lamina("plan", "nowhere.toml", "--steps", "1"), "plan.policy-unreadable")
    monkeypatch.setenv("LAMINA_DEBUG", "1")
    with pytest.raises(LaminaError):
        main(["plan", "nowhere.toml", "--steps", "1"])


def test_a_defect_is_one_message_too(policy: str, monkeypatch: pytest.MonkeyPatch, lamina: Call) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(sys.modules["lamina.allocate.make_plan"], "explained_plan", broken)
    arguments = ["plan", policy, "--model", "mlp", "--steps", "3", "--json"]
    code, out, err = lamina(*arguments)
    assert code == 1
    assert f"ZeroDivisionError: by nothing (at {__file__}:" in json.loads(out)["refused"]
    assert "Traceback" not in err
    with pytest.raises(ZeroDivisionError):
        main([*arguments, "--debug"])


def test_a_defect_of_ours_names_no_line_of_ours(policy: str, monkeypatch: pytest.MonkeyPatch, lamina: Call) -> None:
    """A place in our source means nothing to a user; --debug shows it to whoever reports the defect."""
    monkeypatch.setattr(sys.modules["lamina.allocate.make_plan"], "explained_plan", lambda *_, **__: (None, None))
    told = refused(lamina("plan", policy, "--model", "mlp", "--steps", "3"), "cli.unexpected-error")
    assert "AttributeError" in told and "--debug" in told
    assert not re.search(r"\.py:\d", told)
    with pytest.raises(AttributeError):
        main(["plan", policy, "--model", "mlp", "--steps", "3", "--debug"])


def test_a_failed_benchmark_is_one_object(monkeypatch: pytest.MonkeyPatch, lamina: Call) -> None:
    nothing = benchmark_json([], {"kernels": "none", "load": 0.0})
    monkeypatch.setattr("lamina.bench.benchmark.run_benchmark", lambda settings, say: nothing)
    monkeypatch.setattr("lamina.bench.benchmark.lamina_failures", lambda result: ["mlp: no"])
    code, out, err = lamina("bench", "--quick", "--json")
    assert code == 1
    told = json.loads(out)
    assert {"workloads", "refused", "remedy", "code", "family"} <= told.keys()
    assert "mlp: no" in err


# ------------------------------------------------------------------------------------ completion


def completed(words: str, monkeypatch: pytest.MonkeyPatch, lamina: Call) -> list[str]:
    monkeypatch.setenv("_LAMINA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"lamina {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    return lamina()[1].split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", set(COMMANDS)),
        ("pl", {"plan"}),
        ("train --pl", {"--plan-only"}),
        ("plan --model ", {"residual", "transformer", "mlp"}),
        ("plan --model res", {"res-ae", "residual"}),
        ("plan --allocate ", set(ALLOCATIONS)),
        ("plan --clipping j", {"joint"}),
    ],
)
def test_bash_completion(words: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, lamina: Call) -> None:
    assert expected <= set(completed(words, monkeypatch, lamina))
    if not words.endswith(" ") and words:
        assert set(completed(words, monkeypatch, lamina)) == expected


def test_the_installed_program_starts() -> None:
    program = Path(sys.executable).with_name("lamina")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


@pytest.mark.slow
def test_the_completion_script_is_shown() -> None:
    program = Path(sys.executable).with_name("lamina")
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [program, "--show-completion", "bash"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "_LAMINA_COMPLETE=complete_bash" in done.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS, "keys new", "ledger verify"])
def test_flags_have_no_type_in_the_help(command: str, lamina: Call) -> None:
    assert "bool" not in succeeded(lamina(*command.split(), "--help"))


def test_help_takes_less_than_a_second_of_one_core() -> None:
    """CPU time of all commands' help, each in a process of its own, as a user calls it."""

    def seconds(command: str) -> float:
        line = [sys.executable, "-c", "import sys; from lamina.cli import main; main(sys.argv[1:])", command, "--help"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(line, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    for command in COMMANDS:
        # 0.3 to 0.9 s on an idle machine, where torch alone takes 2 s. A busy machine can double one measurement, and
        # the first one compiles the modules; one of four shows that the command does not need the time.
        assert any(seconds(command) < 2 for _ in range(4)), command


@pytest.mark.parametrize(
    "name", ["a\x1b[1A\x1b[2Kverified and trusted", "a\rverified", "a\x9b2Kb", "a\u202eb", "a\nverified"]
)
@pytest.mark.parametrize("command", ["ledger verify", "ledger show", "keys show", "spend", "release verify --trust"])
def test_a_name_does_not_steer_the_terminal(lamina: Call, tmp_path: Path, command: str, name: str) -> None:
    """File names may come from an attacker, in a folder of contributions or in a release."""
    path = tmp_path / name
    path.write_bytes(b"neither a ledger nor a key")
    for more in ((), ("--json",)):
        code, out, err = lamina(*command.split(), str(path), *(["."] if "release" in command else []), *more)
        said = out + err
        assert code and said
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", said)
        assert not any(line.startswith("verified") for line in said.splitlines())


def test_a_ledger_in_a_path_that_is_not_text(lamina: Call, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.db"
    with open(path, "wb") as file:
        file.write(b"not a ledger")
    for command in (["ledger", "verify"], ["spend"]):
        code, out, err = lamina(*command, os.fsdecode(path))
        assert code and "Unicode" not in out + err
        assert "\\udcff.db" in out + err
