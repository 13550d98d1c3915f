"""The sdist builds the wheel, and the wheel runs in a clean environment that takes only its dependencies from this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*words: str | Path, folder: Path) -> str:
    """Run a program outside of the repository; returns what it printed."""
    done = subprocess.run(list(map(str, words)), cwd=folder, env=CLEAN, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def build(kind: str, source: Path, to: Path) -> Path:
    """Build with the backend that pyproject.toml names, without fetching it."""
    to.mkdir(exist_ok=True)
    return to / run(sys.executable, "-c", BUILD, kind, to, folder=source).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sdist_gives_a_wheel_that_runs_the_demo(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("build_sdist", source, tmp_path / "dist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("lamina-*")
    wheel = build("build_wheel", unpacked, tmp_path / "dist")
    place = tmp_path / "environment"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch and others, after lamina
    home = run(python, "-c", "import lamina; print(lamina.__file__)", folder=tmp_path).strip()
    assert Path(home).is_relative_to(packages)
    lamina = place / "bin" / "lamina"
    found = json.loads(run(lamina, "doctor", "--json", folder=tmp_path))
    assert found["ok"]
    if shutil.which("cc") or shutil.which("gcc"):
        assert "torch rules run" not in found["checks"]["kernels"]["found"]
    told = json.loads(run(lamina, "demo", "--quick", "--folder", "report", "--json", folder=tmp_path))
    assert told and any((tmp_path / "report").rglob("*.html"))
    run(lamina, "plan", "--template", folder=tmp_path)
