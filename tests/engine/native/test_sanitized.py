"""The kernels under the address and undefined-behaviour sanitizers: the same tests, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.engine import native
from lamina.engine.native.sources import source_digest

HERE = Path(__file__).parent
SOURCES = sorted(Path(native.__file__).parent.glob("*.c"))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["test_products.py", "test_native_noise.py"])
def test_no_byte_outside_and_nothing_undefined(tmp_path: Path, module: str) -> None:
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1", "-fno-omit-frame-pointer"]
    built = tmp_path / "_native.so"
    flags = ["-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden", "-shared", "-fPIC", "-pthread"]
    flags.append(f'-DLAMINA_SOURCES="{source_digest()}"')
    subprocess.run(["gcc", *flags, *checks, *map(str, SOURCES), "-lm", "-o", str(built)], check=True)
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "SANITIZED": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "sanitized",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "3000",
    ]
    left_out = "not slow and not stack"  # a sanitizer keeps the stack elsewhere
    command = [*words, "-m", "not slow", "-k", left_out, str(HERE / module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[2], check=False)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
