"""Opening a store by its path or PostgreSQL address; addresses without their password."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from lamina.errors import LedgerError, StoreError
from lamina.ledger.store.interface import Store
from lamina.ledger.store.sqlite import SqliteStore

POSTGRES_SCHEMES = ("postgresql://", "postgres://")
DEFAULT_SCHEMA = "lamina"
_SHOWN_OPTIONS = {"host", "hostaddr", "port", "dbname", "user", "sslmode", "target_session_attrs", "connect_timeout"}
_ADDRESS_REMEDY = "write postgresql://USER@HOST/DATABASE#schema; in a password, / is %2F and @ is %40"
_LOOKS_LIKE_URL = re.compile(
    r"\s*postgres\w*(\+\w+)?\s*:|\s*[a-z][a-z0-9+.-]*://|.*\bpassword\s*=", re.IGNORECASE | re.DOTALL
)
_HOST_PATTERN = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")


def is_postgres_url(where: str) -> bool:
    """Whether it is a database server's, and no path. LedgerError if it was meant to be, and is not.

    >>> is_postgres_url("postgresql://me@host/db"), is_postgres_url("runs/ward.ledger.db")
    (True, False)
    """
    if where.startswith(POSTGRES_SCHEMES):
        return True
    if _LOOKS_LIKE_URL.match(where):  # not repeated: it may hold a password
        raise LedgerError(
            "store.address-invalid", "the ledger is neither a path nor a PostgreSQL address", _ADDRESS_REMEDY
        )
    return False


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """conninfo: what libpq takes, with the password. schema: '' if none is named. shown: for messages, without both."""

    conninfo: str
    schema: str
    shown: str

    @classmethod
    def parse(cls, where: str) -> PostgresAddress:
        """Of "postgresql://user:password@host/database?option=value#schema".

        LedgerError if the password has a character that would make it a part of something else: libpq takes what comes
        before the first @ or / for the user, and would look for a host that is named like the rest.
        """
        if _has_stray_separator(where):
            problem = f"the address {without_password(where)} has an @ or a / too many"
            raise LedgerError("store.address-invalid", problem, _ADDRESS_REMEDY)
        if not _has_ports(where):
            problem = f"the address {without_password(where)} has a port that is not a number"
            raise LedgerError("store.address-invalid", problem, _ADDRESS_REMEDY)
        scheme, user, place = _split_address(where)
        place, _, schema = place.partition("#")
        return cls(f"{scheme}://{user}{place}", schema, without_password(where).partition("#")[0])


def without_password(where: str) -> str:
    """An address as it may be printed: only what is known to be no secret.

    >>> without_password("postgresql://me:a#b?c@host/db?sslmode=require&password=x#ward")
    'postgresql://me@host/db?sslmode=require#ward'
    """
    scheme, user, place = _split_address(where)
    place, mark, schema = place.partition("#")
    place, question, query = place.partition("?")
    if _has_stray_separator(where) or not _has_ports(where) or _at_outside_user(query) or not _is_plain_name(schema):
        return f"{scheme}://…"  # nobody knows where its password ends
    kept = "&".join(each for each in query.split("&") if each.partition("=")[0] in _SHOWN_OPTIONS)
    name = user.rstrip("@").partition(":")[0] + "@" * bool(user)
    return f"{scheme}://{name}{place}{question if kept else ''}{kept}{mark}{schema}"


def _split_address(where: str) -> tuple[str, str, str]:
    """Scheme, user and password with the @ behind them, and the rest."""
    scheme, _, rest = where.partition("://")
    head = rest.partition("/")[0]
    user = head[: head.rfind("@") + 1]
    return scheme, user, rest[len(user) :]


def _has_stray_separator(where: str) -> bool:
    """Whether libpq would take a part of the password for something else."""
    _, user, place = _split_address(where)
    return "@" in user[:-1] or "@" in place.partition("?")[0].partition("#")[0]


def _has_ports(where: str) -> bool:
    """Whether every host has a number behind its colon. Without a host, the password stands there."""
    hosts = re.split(r"[/?#]", _split_address(where)[2], maxsplit=1)[0]
    return all(_HOST_PATTERN.fullmatch(host) is not None for host in hosts.split(","))


def _at_outside_user(query: str) -> bool:
    """Some servers have an @ in the names of users; anywhere else it is the end of a password."""
    return any("@" in each and not each.startswith("user=") for each in query.split("&"))


def _is_plain_name(schema: str) -> bool:
    return re.fullmatch(r"\w*", schema, re.ASCII) is not None


def make_store(where: str | os.PathLike[str], *, create: bool = False, readonly: bool = False) -> Store:
    """The store at a path, or at "postgresql://…/database" with "#schema" for one of several ledgers in it."""
    if isinstance(where, str) and is_postgres_url(where):
        try:
            from lamina.ledger.store.postgres import PostgresStore  # an extra: only who uses it needs psycopg
        except ImportError as missing:
            problem = "PostgreSQL needs psycopg, which is not installed"
            raise StoreError("store.psycopg-missing", problem, "pip install 'lamina[postgres]'") from missing
        return PostgresStore(where, create=create, readonly=readonly)
    return SqliteStore(where, create=create, readonly=readonly)
