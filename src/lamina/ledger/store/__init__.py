"""Where a ledger is kept: one SQLite file, or a PostgreSQL database for many trainers."""

from __future__ import annotations

import os

from lamina.ledger.store.address import is_url
from lamina.ledger.store.base import Store
from lamina.ledger.store.errors import Damaged, Pruned, StoreBusy, StoreError, StoreLost
from lamina.ledger.store.sqlite import SqliteStore

__all__ = ["Store", "SqliteStore", "make_store", "StoreError", "StoreLost", "StoreBusy", "Damaged", "Pruned"]


def make_store(where: str | os.PathLike[str], *, create: bool = False, readonly: bool = False) -> Store:
    """The store at a path, or at "postgresql://…/database" with "#schema" for one of several ledgers in it."""
    if isinstance(where, str) and is_url(where):
        try:
            from lamina.ledger.store.postgres import PostgresStore  # an extra: only who uses it needs psycopg
        except ImportError as missing:
            raise StoreError(
                "store.psycopg-not-installed",
                "psycopg is not installed, which PostgreSQL needs",
                "pip install 'lamina[postgres]'",
            ) from missing
        return PostgresStore(where, create=create, readonly=readonly)
    return SqliteStore(where, create=create, readonly=readonly)
