"""An attacker who can write a ledger's store but has no key: plain SQL in both stores, without the project's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw


def rows_of(where: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Execute SQL in its own transaction; `?` stands for a value."""
    if where.startswith("postgresql:"):
        import psycopg

        address, _, schema = where.partition("#")
        with psycopg.connect(address, autocommit=True) as db:
            db.execute(f"SET search_path = {schema}")
            found = db.execute(statement.replace("?", "%s"), values or None)
            return found.fetchall() if found.description else []
    db = apsw.Connection(where)
    db.pragma("synchronous", "OFF")
    try:
        return db.execute(statement, values).fetchall()
    finally:
        db.close()


def edit(where: str, *statements: str) -> None:
    for statement in statements:
        rows_of(where, statement)


Tables = dict[str, list[tuple[Any, ...]]]


def tables_of(where: str, *names: str) -> Tables:
    return {name: rows_of(where, f"SELECT * FROM {name}") for name in names}


def contents(path: str | Path) -> Tables:
    """Return every row of every table of a ledger in a file."""
    names = rows_of(str(path), "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    return {name: sorted(rows, key=repr) for name, rows in tables_of(str(path), *(name for (name,) in names)).items()}


def put_back(where: str, tables: Tables) -> None:
    """Make these tables hold these rows, and no others."""
    for name, rows in tables.items():
        rows_of(where, f"DELETE FROM {name}")
        for row in rows:
            rows_of(where, f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", *row)


def binary(where: str, data: bytes) -> str:
    """A binary value in SQL."""
    return f"'\\x{data.hex()}'::bytea" if where.startswith("postgresql:") else f"x'{data.hex()}'"
