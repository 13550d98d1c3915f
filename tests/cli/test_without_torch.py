"""The base install: whoever signs, admits, verifies or reads a ledger needs no torch; whoever trains is told the remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asking import answer

from lamina.allocate.make_plan import ALLOCATIONS, DEFAULT_ALLOCATION
from lamina.cli.app import COMMANDS
from lamina.cli.explain import WHEN_TO_USE
from lamina.study.runner import NAMES

BLOCKER = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
"""
CALLS = """
import contextlib, io, json, sys
from lamina.cli import main
ends = []
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line)
        except SystemExit as end:
            ends.append([end.code or 0, out.getvalue(), err.getvalue()])
print(json.dumps(ends))
"""


def without_torch(folder: Path, script: str, given: str = "") -> str:
    """Run a script in a process in which torch cannot be imported; returns what it printed."""
    blocker = folder / "blocker"
    blocker.mkdir(exist_ok=True)
    (blocker / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join([str(blocker), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        input=given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(folder: Path, *lines: str) -> list[tuple[int, str, str]]:
    """How `lamina LINE` ends, for each line, without torch."""
    found = json.loads(without_torch(folder, CALLS, json.dumps([line.split() for line in lines])))
    return [tuple(each) for each in found]


POLICY = """
[corpus]
origin = "clinic.example/ecg"
delta = 1e-5
[class.sensitive]
epsilon = 2.0
population = 100
profile = { top = 0.25 }
"""


def test_signers_and_the_gate(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    for name in ("p1", "p2"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "payload.csv").write_text(f"a,b\n1,{name[1]}\n")
    ends = call(
        tmp_path,
        "keys new h.key --no-passphrase",
        "keys add h.pub --label hospital",
        "keys list --json",
        "attest policy.toml data --key h.key --class sensitive",
        "admit policy.toml data --json",
        "admit policy.toml data --ledger corpus.db",
        "ledger checkpoint corpus.db --key corpus.pem",
        "ledger verify corpus.db --json",
        "ledger show corpus.db",
        "ledger trace corpus.db data/p1",
        "ledger receipt corpus.db data/p1 -o mine",
        "ledger copy corpus.db copy.db",
        "ledger withdraw corpus.db data/p2 --reason consent",
        "ledger prune corpus.db --key corpus.pem --json",
        "spend corpus.db",
        "plan --template",
        "train --template",
    )
    assert [code for code, _, _ in ends] == [0] * len(ends), [end for end in ends if end[0]]
    assert json.loads(ends[4][1])["admitted"] == 2
    assert json.loads(ends[7][1])["verified"]


def test_an_auditor_of_a_run(project: Any) -> None:
    """A ledger with plans and epochs: every ε is computed anew."""
    trained = project.train_json()
    verified, shown, spent = call(
        project.folder,
        f"ledger verify {trained['ledger']} --json",
        f"ledger show {trained['ledger']} --kind epoch --json",
        f"spend {trained['ledger']} --json",
    )
    assert answer(verified)["verified"]
    assert len(answer(shown)["records"]) == 3
    assert answer(spent)


def test_who_trains_is_told_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    for code, out, err in call(
        tmp_path,
        "plan policy.toml --epochs 2 --json",
        "train RUN.toml --json",
        "demo --json",
        "bench --json",
        "admit policy.toml data --batch 3 --epochs 2 --json",
    ):
        told = json.loads(out)
        assert (code, told["code"]) == (1, "cli.torch-missing")
        assert "lamina[train]" in told["remedy"] and "Traceback" not in err


@pytest.mark.parametrize("name", ["make_private", "Engine", "Corpus", "LayerStack", "Trainer", "make_plan"])
def test_who_asks_in_python_too(tmp_path: Path, name: str) -> None:
    script = (
        "import lamina\ntry:\n    lamina.NAME\nexcept lamina.LaminaError as error:\n    "
        "print(error.code, isinstance(error, ImportError), error.__suppress_context__)"
    )
    assert without_torch(tmp_path, script.replace("NAME", name)).split() == ["cli.torch-missing", "True", "True"]


def test_what_needs_no_model_is_there_in_python(tmp_path: Path) -> None:
    names = "PrivateKey PublicKey KeyRing Ledger Policy DepthProfile StepPlan"
    assert without_torch(tmp_path, f"import lamina\nprint(*(lamina.{', lamina.'.join(names.split())},))")


def test_an_unexpected_error_is_still_one_message(tmp_path: Path) -> None:
    script = (
        "import lamina.cli.keys\nfrom lamina.cli import main\n"
        "def broken(ring): raise ZeroDivisionError\n"
        "lamina.cli.keys.KeyRing.load = broken\n"
        "try:\n    main(['keys', 'list', '--json'])\nexcept SystemExit as end:\n    assert end.code == 1"
    )
    assert json.loads(without_torch(tmp_path, script))["code"] == "cli.unexpected-error"


def test_help_needs_no_torch(tmp_path: Path) -> None:
    ends = call(tmp_path, *(f"{name} --help" for name in COMMANDS))
    assert [code for code, _, _ in ends] == [0] * len(COMMANDS)


def test_names_in_the_help_are_those_of_the_code() -> None:
    assert tuple(ALLOCATIONS) == tuple(WHEN_TO_USE)
    tables, figures = ([name for name in NAMES if name.startswith(kind)] for kind in ("table", "figure"))
    assert tables == ["table1", *(f"table{i}" for i in range(5, 10))]  # as `lamina study --help` says
    assert figures == [f"figure{i}" for i in range(1, 8)]
    assert DEFAULT_ALLOCATION == "pareto"  # the default of `lamina plan --allocate`
