"""The portable kernels on another processor: cross-built for aarch64, and run under emulation."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lamina.engine import native

HERE, SOURCES = Path(__file__).parent, Path(native.__file__).parent
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fno-math-errno",
    "-fno-trapping-math",
]
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


@pytest.mark.slow
def test_clipped_sums_on_aarch64_are_those_of_plain_loops(tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None:
        pytest.skip("the compiler or the emulator of aarch64 is not installed")
    built = tmp_path / "emulated"
    compile_it = [COMPILER, *FLAGS, f"-I{SOURCES}", "-static", str(HERE / "emulated.c"), "-lm", "-o", str(built)]
    subprocess.run(compile_it, check=True)
    ran = subprocess.run([EMULATOR, str(built)], check=True, capture_output=True, text=True)
    assert 0.0 < float(ran.stdout) < 1e-6


@pytest.mark.slow
def test_every_source_builds_for_aarch64(tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip("the compiler or the emulator of aarch64 is not installed")
    built = tmp_path / "_native.so"
    command = [COMPILER, *FLAGS, "-shared", "-fPIC", *map(str, sorted(SOURCES.glob("*.c"))), "-lm", "-o", str(built)]
    subprocess.run(command, check=True)
    assert built.stat().st_size > 0
