"""Keys of a ring as they are printed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lamina.admit.keyring import KeyEntry, KeyRing, Standing
from lamina.admit.times import shown
from lamina.cli.output import columns, out, print_json


def row(entry: KeyEntry, now: int) -> dict[str, Any]:
    """As machines read it."""

    def time_of(instant: int | None) -> str | None:
        return None if instant is None else shown(instant)

    return {
        "id": entry.key.name,
        "label": entry.label,
        "role": entry.role,
        "algorithms": list(entry.algorithms),
        "valid_from": shown(entry.valid_from),
        "retired_from": time_of(entry.retired_from),
        "replaced_by": None if entry.replaced_by is None else entry.replaced_by.hex(),
        "revoked_from": time_of(entry.revoked_from),
        "standing": entry.standing(now).value,
    }


def table(ring: KeyRing, now: int) -> str:
    """One line per key; empty for an empty ring."""
    rows = [["id", "label", "role", "valid from", "now"]]
    for each in ring:
        rows.append(
            [each.key.name[:16], each.label, each.role, shown(each.valid_from), each.standing(now).value]
        )
    return columns(rows, left=5) if len(ring) else ""


def told(value: Any) -> str:
    """A value of a row for people."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def report(ring: KeyRing, path: Path, entries: list[KeyEntry], as_json: bool) -> None:
    """What a key event has changed."""
    now = int(time.time())
    if as_json:
        rows = [row(each, now) for each in entries]
        print_json({"ring": str(path), "version": ring.version.hex(), "keys": rows})
        return
    for each in entries:
        out.print(f"{each.label} ({each.role}) {each.key.name}", markup=False, soft_wrap=True)
        out.print(f"  {_history(each, now)}", markup=False, soft_wrap=True)
    out.print(f"{path}: {len(ring)} keys", markup=False, soft_wrap=True)


def _history(entry: KeyEntry, now: int) -> str:
    parts = [f"valid from {shown(entry.valid_from)}"]
    if entry.retired_from is not None:
        parts.append(f"retired from {shown(entry.retired_from)}")
    if entry.revoked_from is not None:
        parts.append(f"revoked from {shown(entry.revoked_from)}")
    standing = entry.standing(now)
    return ", ".join(parts) + ("" if standing is Standing.USABLE else f" ({standing.value} now)")
