"""The rule about skips is itself enforced: a skip that nobody listed must fail the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LISTED = "opacus is not installed"


def run(folder: Path, body: str, *, require_all: bool = False) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "allowed_skips.txt"):
        (folder / name).write_text((HERE / name).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "test_it.py").write_text("import pytest\n" + body, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "LAMINA_REQUIRE_ALL"}
    if require_all:
        environment["LAMINA_REQUIRE_ALL"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.mark.parametrize(
    ("body", "require_all", "code"),
    [
        (f"def test_a(): pytest.skip({LISTED!r})\n", False, 0),
        (f"def test_a(): pytest.skip({LISTED!r})\n", True, 1),
        ("def test_a(): pytest.skip('I felt like it')\n", False, 1),
        ("pytest.importorskip('no_such_package_anywhere')\ndef test_a(): pass\n", False, 1),
        ("def test_a(): pass\n", True, 0),
    ],
    ids=["listed", "listed but all required", "unlisted", "module skipped", "nothing skipped"],
)
def test_only_listed_skips_pass(tmp_path: Path, body: str, require_all: bool, code: int) -> None:
    done = run(tmp_path, body, require_all=require_all)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("skips that are not allowed" in done.stdout) == (code == 1)
