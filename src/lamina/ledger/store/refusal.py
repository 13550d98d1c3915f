"""Why a PostgreSQL server does not let anybody in, in our words: each reason with its own remedy."""

from __future__ import annotations

import psycopg
from psycopg.conninfo import conninfo_to_dict

from lamina.ledger.errors import LedgerError
from lamina.ledger.store.address import Address
from lamina.ledger.store.errors import StoreError, StoreLost

_PASSWORD = "give the right one in ~/.pgpass or PGPASSWORD, or in the address, where / is %2F and @ is %40"
_WAITS = (
    "starting up",
    "shutting down",
    "recovery mode",
    "not yet accepting",
    "too many clients",
    "connection slots",
)
_AWAY = (
    "connection refused",
    "no such file",
    "timeout",
    "timed out",
    "unreachable",
    "no route",
    "closed the connection",
)


def refusal(error: psycopg.Error, address: Address) -> LedgerError:
    """Of an attempt to connect. libpq gives a text and no code, so the text decides.

    `StoreLost`, which is tried again, is whatever may be over in a moment.
    """
    if isinstance(error, psycopg.ProgrammingError):  # its text may hold any part of the address
        return LedgerError(
            "store.address-not-read",
            f"the address {address.shown.partition('?')[0]} cannot be read",
            "write postgresql://USER@HOST/DATABASE#schema",
        )
    known = _Known(error, address)
    text = str(error).lower()
    if 'database "' in text and "does not exist" in text:
        problem = f"{known.server} has no database {known.database!r}"
        return StoreError(
            "store.give-another-after",
            problem,
            f"give another after the host, or have it made: createdb {known.database}",
        )
    if 'role "' in text and "does not exist" in text:
        problem = f"{known.server} knows no user {known.user!r}"
        return StoreError(
            "store.give-user-postgresql",
            problem,
            "give a user of it, postgresql://USER@…, or have one made: createuser",
        )
    if "password authentication failed" in text:
        return StoreError(
            "store.not-take-password",
            f"{known.server} does not take the password of user {known.user!r}",
            _PASSWORD,
        )
    if "no password supplied" in text:
        return StoreError(
            "store.asks-password-user",
            f"{known.server} asks for the password of user {known.user!r}, and has none",
            _PASSWORD,
        )
    if "pg_hba.conf" in text or "authentication failed" in text:
        problem = (
            f"{known.server} does not let user {known.user!r} in to database {known.database!r} from here"
        )
        return StoreError(
            "store.give-another-user",
            problem,
            "give another user, or have a line for this one in its pg_hba.conf",
        )
    if "permission denied for database" in text:
        problem = f"user {known.user!r} may not connect to database {known.database!r} of {known.server}"
        return StoreError(
            "store.granted-grant-connect",
            problem,
            f"have it granted: GRANT CONNECT ON DATABASE {known.database} TO {known.user}",
        )
    if "resolve host" in text or "translate host name" in text:
        return StoreLost(
            "store.no-host", f"there is no host {known.host!r}", "correct the name of the host in the address"
        )
    if any(each in text for each in _WAITS):
        return StoreLost(
            "store.not-ready", f"{known.server} is not ready: {told(error)}", "wait a little, then try again"
        )
    if any(each in text for each in _AWAY):
        return StoreLost(
            "store.not-answer",
            f"{known.server} does not answer",
            "start it, or correct host and port in the address",
        )
    return StoreLost(
        "store.not-used",
        f"{known.server} cannot be used: {told(error)}",
        "repair what it reports, then try again",
    )


def told(error: psycopg.Error) -> str:
    """The first line; what follows may repeat whole rows."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Known:
    """Whom the attempt was about: as libpq says, which knows the defaults, or as the address does."""

    def __init__(self, error: psycopg.Error, address: Address) -> None:
        given = conninfo_to_dict(address.conninfo)
        tried = error.pgconn
        self.host = _text(tried.host if tried else None) or str(given.get("host") or "localhost")
        self.user = _text(tried.user if tried else None) or str(given.get("user") or "")
        self.database = _text(tried.db if tried else None) or str(given.get("dbname") or self.user)
        port = _text(tried.port if tried else None) or str(given.get("port") or "5432")
        where = f"on the socket in {self.host}" if self.host.startswith("/") else f"at {self.host}"
        self.server = f"the server {where}, port {port},"


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")
