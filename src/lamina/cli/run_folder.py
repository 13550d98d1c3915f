"""Which folder a run lives in: the newest of its name, or the next one for a fresh run.

    runs/NAME, runs/NAME-2, runs/NAME-3, …

A folder counts once its run has begun (it holds a journal) and if it says that it belongs to this output: another
run file may well have been given `output = "runs/NAME-2"`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from lamina.train.store.durable import make_folder, write_atomically

_SIGN = "run.json"


def newest(output: Path) -> Path:
    """Where `lamina train` goes on: the latest run that was begun, or `output` itself."""
    begun = [folder for folder in _family(output) if (folder / "journal").exists()]
    return begun[-1] if begun else output


def unused(output: Path) -> Path:
    """Where `lamina train --fresh` begins: the first folder in which nothing has begun."""
    number, folder = 1, output
    while folder.exists() and not (_belongs(folder, output) and not (folder / "journal").exists()):
        number += 1
        folder = _numbered(output, number)
    return folder


def sign(folder: Path, output: Path, settings: dict[str, Any]) -> None:
    """Write down what the run was asked to do, and to which output it belongs. Public facts only."""
    text = json.dumps({"output": output.name, "settings": settings}, indent=2, ensure_ascii=False)
    make_folder(folder)
    write_atomically(folder / _SIGN, f"{text}\n".encode(), mode=0o644)


def figures(folder: Path) -> dict[str, Any]:
    """The run's public figures, if it has any yet."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _family(output: Path) -> list[Path]:
    """`output` and the fresh runs of it, in the order of their numbers; a deleted one leaves a gap."""
    found = {1: output}
    for folder in output.parent.glob(f"{_escaped(output.name)}-*"):
        number = folder.name.removeprefix(output.name + "-")
        if number.isdecimal() and str(int(number)) == number and int(number) > 1 and _belongs(folder, output):
            found[int(number)] = folder
    return [found[number] for number in sorted(found)]


def _numbered(output: Path, number: int) -> Path:
    return output.with_name(f"{output.name}-{number}")


def _belongs(folder: Path, output: Path) -> bool:
    if folder == output:
        return True
    with suppress(OSError, ValueError):
        found = json.loads((folder / _SIGN).read_text(encoding="utf-8"))
        return isinstance(found, dict) and found.get("output") == output.name
    return False


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
