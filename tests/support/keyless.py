"""An attacker who can write a ledger's store but has no key: plain SQL in both stores, without the project's code."""

from __future__ import annotations

from typing import Any

import apsw


def rows_of(where: str, statement: str) -> list[tuple[Any, ...]]:
    """Execute SQL in its own transaction."""
    if where.startswith("postgresql:"):
        import psycopg

        address, _, schema = where.partition("#")
        with psycopg.connect(address, autocommit=True) as db:
            db.execute(f"SET search_path = {schema}")
            found = db.execute(statement)
            return found.fetchall() if found.description else []
    db = apsw.Connection(where)
    try:
        return db.execute(statement).fetchall()
    finally:
        db.close()


def edit(where: str, *statements: str) -> None:
    for statement in statements:
        rows_of(where, statement)


def binary(where: str, data: bytes) -> str:
    """A binary value in SQL."""
    return f"'\\x{data.hex()}'::bytea" if where.startswith("postgresql:") else f"x'{data.hex()}'"
