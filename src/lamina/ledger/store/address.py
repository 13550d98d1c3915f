"""`Address`: where a ledger lies in a PostgreSQL server, and how that is told without the password."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

from lamina.ledger.errors import LedgerError

URLS = ("postgresql://", "postgres://")
SCHEMA = "lamina"
_SECRET = {"password", "sslpassword"}
_FORM = "write postgresql://USER@HOST/DATABASE#schema; in a password, / is %2F and @ is %40"


def is_url(where: str) -> bool:
    """Whether it is a database server's, and no path."""
    return where.startswith(URLS)


@dataclass(frozen=True, slots=True)
class Address:
    """conninfo: what libpq takes, with the password. schema: '' if none is named. shown: for messages, without both."""

    conninfo: str
    schema: str
    shown: str

    @classmethod
    def parse(cls, where: str) -> Address:
        """Of "postgresql://user:password@host/database?option=value#schema".

        LedgerError if the password has a character that would make it a part of something else: libpq takes what comes
        before the first @ or / for the user, and would look for a host that is named like the rest.
        """
        if _is_mistaken(where):
            raise LedgerError(f"the address {without_password(where)} has an @ or a / too many", _FORM)
        scheme, user, place = _parts(where)
        place, _, schema = place.partition("#")
        return cls(f"{scheme}://{user}{place}", schema, without_password(where).partition("#")[0])


def without_password(where: str) -> str:
    """An address as it may be printed.

    >>> without_password("postgresql://me:a#b?c@host/db?sslmode=require&password=x#ward")
    'postgresql://me@host/db?sslmode=require#ward'
    """
    scheme, user, place = _parts(where)
    if _is_mistaken(where):
        rest = where.partition("://")[2]
        if "@" in rest.partition("?")[2]:
            return f"{scheme}://…"  # nobody knows where its password ends
        user, _, place = rest.partition("?")[0].rpartition("@")
        user += "@"
    place, mark, schema = place.partition("#")
    place, question, query = place.partition("?")
    kept = "&".join(each for each in query.split("&") if not _is_secret(each))
    name = user.rstrip("@").partition(":")[0] + "@" * bool(user)
    return f"{scheme}://{name}{place}{question if kept else ''}{kept}{mark}{schema}"


def _parts(where: str) -> tuple[str, str, str]:
    """Scheme, user and password with the @ behind them, and the rest."""
    scheme, _, rest = where.partition("://")
    head = rest.partition("/")[0]
    user = head[: head.rfind("@") + 1]
    return scheme, user, rest[len(user) :]


def _is_mistaken(where: str) -> bool:
    """Whether libpq would take a part of the password for something else."""
    _, user, place = _parts(where)
    return "@" in user[:-1] or "@" in place.partition("?")[0].partition("#")[0]


def _is_secret(option: str) -> bool:
    return unquote(option.partition("=")[0]).lower() in _SECRET
