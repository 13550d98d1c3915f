"""The base install needs no torch, and nothing that Windows lacks; a command that trains states what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asking import answer
from trained_run import copied_run

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
OTHER_SYSTEM = (
    BLOCKER
    + """
import os
def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] in ("torch", "safetensors", "fcntl", "uvloop", "resource", "termios", "pwd", "grp"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
NotInstalled.find_spec = find_spec
for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules.pop(name, None)
for name in ("O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_CLOEXEC", "fchmod", "pread"):
    delattr(os, name)
os.supports_dir_fd, system_open = set(), os.open
def open_without_folders(path, flags, mode=0o777):
    if os.path.isdir(path):
        raise PermissionError(13, "a folder cannot be opened", path)
    return system_open(path, flags, mode)
os.open = open_without_folders
"""
)
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


def without_torch(folder: Path, script: str, given: str = "", *, blocked: str = BLOCKER) -> str:
    """Run a script in a process in which torch cannot be imported; returns what it printed."""
    blocker = folder / "blocker"
    blocker.mkdir(exist_ok=True)
    (blocker / "sitecustomize.py").write_text(blocked)
    path = os.pathsep.join([str(blocker), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        input=given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(folder: Path, *lines: str, blocked: str = BLOCKER) -> list[tuple[int, str, str]]:
    """How `lamina LINE` ends, for each line, without torch."""
    found = json.loads(without_torch(folder, CALLS, json.dumps([line.split() for line in lines]), blocked=blocked))
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


def test_the_base_runs_without_what_windows_lacks(tmp_path: Path, lamina: Any) -> None:
    """Keys, attestations, admission, ledgers and releases; links are refused there too."""
    (tmp_path / "policy.toml").write_text(POLICY)
    for name in ("p1", "p2", "p3"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "payload.csv").write_text(f"a,b\n1,{name[1]}\n")
    trained = copied_run(tmp_path)
    assert lamina("certify", str(trained.folder))[0] == 0
    assert lamina("release", "make", str(trained.folder), "-o", str(tmp_path / "out"))[0] == 0
    key = str(trained.ledger).replace(".db", ".release.pub")
    signing = (
        "keys new h.key --no-passphrase",
        "keys add h.pub --label hospital",
        "attest policy.toml data --key h.key --class sensitive",
        "admit policy.toml data --ledger corpus.db --json",
        "ledger checkpoint corpus.db --key corpus.pem",
        "ledger verify corpus.db --json",
        f"ledger verify {trained.ledger} --json",
        f"release verify out --trust {key} --ledger {trained.ledger} --json",
        f"spend {trained.ledger}",
    )
    ends = call(tmp_path, *signing, blocked=OTHER_SYSTEM)
    assert [code for code, _, _ in ends] == [0] * len(ends), [end for end in ends if end[0]]
    assert answer(ends[3])["admitted"] == 3
    assert all(answer(ends[i])["verified"] for i in (5, 6, 7))
    assert not list(tmp_path.rglob("*.lamina-lock"))
    for path in (tmp_path / "data" / "p1" / "payload.csv", tmp_path / "out" / "README.md"):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    (tmp_path / "data" / "p4").symlink_to(tmp_path / "data" / "p2")
    refused, verified, damaged = call(
        tmp_path,
        "admit policy.toml data --json",
        "release verify out --json",
        "keys add missing.pub",
        blocked=OTHER_SYSTEM,
    )
    told = answer(refused, 1)
    assert told["admitted"] == 2 and {each["id"] for each in told["refused"]} == {"p1", "p4"}
    assert verified[0] == 1 and "release.file-missing" in verified[1] and damaged[0] == 1


def test_a_lock_that_is_a_file(tmp_path: Path) -> None:
    """Where there is no `flock`, a lock is a file that a second process waits for, and then names."""
    script = (
        "import threading, time\nfrom pathlib import Path\nfrom lamina import files\nfiles._PATIENCE = 0.3\nheld = []\n"
        "def other():\n    try:\n        with files.locked(Path('.')):\n            held.append('got it')\n"
        "    except OSError as error:\n        held.append(error.strerror)\n"
        "for pause in (0.1, 0.6):\n    thread = threading.Thread(target=other)\n    with files.locked(Path('.')):\n"
        "        thread.start()\n        time.sleep(pause)\n        assert pause > 0.3 or not held\n    thread.join()\n"
        "print(*held, sep='\\n')"
    )
    first, second = without_torch(tmp_path, script, blocked=OTHER_SYSTEM).splitlines()
    assert first == "got it" and "remove it if no other process" in second
    assert not (tmp_path / ".lamina-lock").exists()


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
