"""Check this machine: versions, SQLite, randomness, cores, and whether the native kernels run.

Spends nothing and changes nothing. Without native kernels everything works, only slower.

Exit code 1 if something that Lamina needs is missing.

Examples:

  lamina doctor
  lamina doctor --json
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from lamina import __version__
from lamina.cli.command import Answer, command, table

_PACKAGES = ("torch", "numpy", "scipy", "cryptography", "dp-accounting")
_LEAST_SQLITE = (3, 35)


@command()
def doctor() -> Answer:
    found = examine()
    rows = [[name, entry["found"], "" if entry["ok"] else "✗"] for name, entry in found["checks"].items()]
    state = "everything that is needed is there" if found["ok"] else "marked ✗: missing or not usable"
    return Answer(found, table(rows, left=3), state, ok=found["ok"])


def examine() -> dict[str, Any]:
    """Every check with what was found; `ok` is False where something is needed and not there."""
    checks = {
        "lamina": _entry(__version__),
        "python": _entry(platform.python_version(), sys.version_info >= (3, 11)),
        **{name: _package(name) for name in _PACKAGES},
        "sqlite": _sqlite(),
        "randomness": _randomness(),
        "cores": _entry(str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())),
        **_kernels(),
    }
    return {"ok": all(entry["ok"] for entry in checks.values()), "checks": checks}


def _entry(found: str, ok: bool = True) -> dict[str, Any]:
    return {"found": found, "ok": ok}


def _package(name: str) -> dict[str, Any]:
    try:
        return _entry(metadata.version(name))
    except metadata.PackageNotFoundError:
        if name == "torch":  # who signs, admits, verifies or reads needs none
            return _entry(
                "not installed: signing, admitting and verifying work, training does not (pip install 'lamina[train]')"
            )
        return _entry("not installed", False)


def _sqlite() -> dict[str, Any]:
    import apsw

    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    return _entry(apsw.sqlite_lib_version(), version >= _LEAST_SQLITE)


def _randomness() -> dict[str, Any]:
    """The kernel's generator must answer, and not twice the same."""
    first, second = os.urandom(32), os.urandom(32)
    return _entry("the operating system's generator", len(first) == 32 and first != second)


def _kernels() -> dict[str, Any]:
    try:
        import torch

        from lamina.engine import native
        from lamina.engine.noise.source import noise_version
    except ImportError:
        return {}
    reason = native.missing()
    text = native.kind() if reason is None else f"the torch rules run: {reason}"
    return {"kernels": _entry(text), "noise": _entry(noise_version()), "threads": _entry(str(torch.get_num_threads()))}
