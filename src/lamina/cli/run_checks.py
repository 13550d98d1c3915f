"""What a RUN.toml must have as a whole, told with an example of what to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.errors import PlanError

_LEAST = {
    "policy": 'policy = "policy.toml"',
    "model": 'model = "package.module:factory"',
    "data": '[data] with kind = "npz" and path = "data.npz"',
    "loss": 'loss = "cross_entropy"',
    "optimizer": 'optimizer = { name = "adam", lr = 1e-3 }',
    "batch": "batch = 256",
}


def has_the_least(data: Mapping[str, Any], source: str) -> None:
    """What every run file has, with an example of each; one length and not two."""
    missing = [key for key in _LEAST if key not in data]
    if missing:
        tables = [key for key, value in data.items() if isinstance(value, dict)]
        strayed = [f"[{t}]" for t in tables for key in missing if key in data[t]]
        hint = f" (a key below {strayed[0]} belongs to that table)" if strayed else ""
        raise PlanError(
            "cli.missing",
            f"{source}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{hint}",
            "add " + "; ".join(_LEAST[key] for key in missing) + ", above the first [table] what is not one",
        )
    if ("steps" in data) == ("epochs" in data):
        raise PlanError(
            "cli.steps-epochs",
            f"{source}: steps is {data.get('steps', 'missing')} and epochs is {data.get('epochs', 'missing')}",
            "give exactly one of them: steps = 1000, or epochs = 20",
        )
    if "epsilon" in data and "rho" in data:
        raise PlanError(
            "cli.epsilon-rho",
            f"{source}: epsilon is {data['epsilon']} and rho is {data['rho']}",
            "give one of them: epsilon for the policy's accountant, rho for zCDP",
        )


def names_a_ledger(data: Mapping[str, Any], source: str) -> None:
    """`book` was the spend book of earlier versions; what runs spend is in the corpus's ledger now."""
    if "book" in data:
        raise PlanError(
            "cli.book-no-spend",
            f"{source}: book is {data['book']!r}, and there are no spend books any more: what runs spend is in the "
            "ledger of their corpus",
            'write ledger = "NAME.ledger.db" instead; or remove it, and the ledger is beside the output folder',
        )


def admits_a_folder(data: Mapping[str, Any], source: str) -> None:
    """[admit] reads a signature beside each payload, and the class that was signed."""
    table = data["data"]
    if "admit" not in data or not isinstance(table, dict):
        return
    if (kind := table.get("kind")) != "folder":
        raise PlanError(
            "cli.admit-given-data",
            f"{source}: [admit] is given, and data.kind is {kind!r}: only a folder has a signature beside each payload",
            'use kind = "folder" with ID/payload.npz, signed by lamina attest; or remove [admit]',
        )
    for key, why in (
        ("class", "the class of each is the one that was signed"),
        ("version", "signed commitments say which data it is"),
    ):
        if key in table:
            raise PlanError(
                "cli.data-admit",
                f"{source}: data.{key} is {table[key]!r}, and with [admit] {why}",
                f"remove data.{key}",
            )
