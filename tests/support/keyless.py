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


EPOCH, WITHDRAWAL, KEY_EVENTS = 3, 4, 5  # kinds of leaves


def leaves_of(where: str, kind: int) -> str:
    """A condition in SQL: the leaf is of this kind, which is not a contribution."""
    return f"substr(data, 1, 3) = {binary(where, bytes((0xA5, 1, kind)))}"


def replaced(where: str, kind: int, by: int = 0) -> str:
    """SQL that writes another leaf over every leaf of a kind."""
    other = ", ".join(f"{name} = (SELECT {name} FROM leaf WHERE seq = {by})" for name in ("data", "body"))
    return f"UPDATE leaf SET {other} WHERE {leaves_of(where, kind)}"


def deleted(where: str, kind: int) -> str:
    """SQL that deletes every leaf of a kind."""
    return f"DELETE FROM leaf WHERE {leaves_of(where, kind)}"


def binary(where: str, data: bytes) -> str:
    """A binary value in SQL."""
    return f"'\\x{data.hex()}'::bytea" if where.startswith("postgresql:") else f"x'{data.hex()}'"
