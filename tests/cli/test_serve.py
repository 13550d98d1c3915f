"""`lamina serve`: as a program that is started, asked and stopped; and what it refuses to start with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from asking import Call, answer
from trained_run import Trained, copied_run

from lamina.admit.keys import PrivateKey, write_new
from lamina.release.decision_log import verify_log
from lamina.release.manifest import make_release

NETS = """
from torch import nn
def net():
    print("made")
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
"""
QUERY = {
    "rights": {
        "classes": ["clinical", "sensitive", "open"],
        "max_epsilon": None,
        "min_noise_multiplier": 0,
        "purpose": "care",
    }
}


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    key, found = PrivateKey.generate(), copied_run(tmp_path)
    with found.open() as ledger:
        make_release(tmp_path / "release", [found.folder], ledger, key)
    write_new(tmp_path / "release.pub", key.public.pem(), "the key", mode=0o644)
    key.save(tmp_path / "log.key", None)
    (tmp_path / "nets.py").write_text(NETS)
    return found


@contextmanager
def running(folder: Path, *words: str) -> Iterator[dict[str, Any]]:
    """The service, and what it says when it begins; stopped as a supervisor does."""
    command = [sys.executable, "-m", "lamina", "serve", *words, "--port", "0", "--json"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        lines = []
        while (line := process.stdout.readline()) and (lines.append(line) or line != "}\n"):
            pass
        assert lines, process.stderr.read()
        yield json.loads("".join(lines))
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert "stopped" in said and "Traceback" not in said, said


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"})) as answer:
        return json.load(answer)


def test_a_release_is_served_and_stopped(trained: Trained, tmp_path: Path) -> None:
    words = ["release", "--trust", "release.pub", "--ledger", str(trained.ledger), "--model", "nets:net"]
    words += ["--inputs", "float32:4", "--log", "decisions.jsonl", "--log-key", "log.key"]
    with running(tmp_path, *words) as told:
        assert told["release"] and told["ledger"] and told["url"].startswith("http://127.0.0.1:")
        found = ask(f"{told['url']}/v1/infer", {"query": QUERY, "inputs": [[1, 2, 3, 4]]})
        assert len(found["outputs"][0]) == 2
        assert ask(f"{told['url']}/healthz") == {"status": "ok"}
    assert verify_log(tmp_path / "decisions.jsonl", PrivateKey.load(tmp_path / "log.key", None).public).decisions == 1


def test_a_run_is_served(trained: Trained, tmp_path: Path) -> None:
    with running(tmp_path, str(trained.folder)) as told:
        assert not told["release"]
        assert ask(f"{told['url']}/v1/ledger/head")["origin"] == "example.org/ecg"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("release", "cli.trust-missing"),
        ("release --trust log.pub", "release.not-verified"),
        ("release --trust release.pub --host 0.0.0.0", "cli.open-door"),
        ("release --trust release.pub --host example.org", "cli.open-door"),
        ("release --trust release.pub --host 0.0.0.0 --tls-cert c --tls-key k", "cli.open-door"),
        ("release --trust release.pub --tls-cert c", "cli.tls-incomplete"),
        ("release --trust release.pub --tls-clients c", "cli.tls-incomplete"),
        ("release --trust release.pub --log x", "cli.log-key"),
        ("release --trust release.pub --withdrawals .", "cli.withdrawals-folder"),
        ("release --trust release.pub --model nets:none", "cli.attribute-not-found"),
        ("release --trust release.pub --model mlp", "serve.weights-do-not-fit"),
        ("release --trust release.pub --keys empty", "serve.keys-file"),
        ("trained/first --model nets:net", "cli.not-a-release"),
    ],
)
def test_what_it_does_not_start_with(trained: Trained, tmp_path: Path, words: str, code: str, lamina: Call) -> None:
    write_new(tmp_path / "log.pub", PrivateKey.generate().public.pem(), "the key", mode=0o644)
    (tmp_path / "empty").write_text("")
    assert answer(lamina("serve", *words.split(), "--port", "0", "--json"), 1)["code"] == code
