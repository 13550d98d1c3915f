"""Addresses of PostgreSQL: what libpq is told, and what is printed; never the password."""

from __future__ import annotations

import pytest
from refusals import raises_code

from lamina.errors import LedgerError
from lamina.ledger.store.sqlite import PostgresAddress, is_postgres_url, printable_location


@pytest.mark.parametrize(
    ("where", "conninfo", "schema", "shown"),
    [
        ("postgresql://h/db", "postgresql://h/db", "", "postgresql://h/db"),
        ("postgres://me@h:1/db#ward", "postgres://me@h:1/db", "ward", "postgres://me@h:1/db"),
        ("postgresql://me:pw@h/db#ward", "postgresql://me:pw@h/db", "ward", "postgresql://me@h/db"),
        ("postgresql://me:p%40w@/db?host=/run#w", "postgresql://me:p%40w@/db?host=/run", "w", "postgresql://me@/db?host=/run"),
        ("postgresql:///db?sslpassword=pw&password=pw", "postgresql:///db?sslpassword=pw&password=pw", "", "postgresql:///db"),
        ("postgresql://h/db?pass%77ord=pw&port=1", "postgresql://h/db?pass%77ord=pw&port=1", "", "postgresql://h/db?port=1"),
        ("postgresql://h/db?user=a@b", "postgresql://h/db?user=a@b", "", "postgresql://h/db?user=a@b"),
        ("postgresql://", "postgresql://", "", "postgresql://"),
    ],
)  # fmt: skip
def test_parts(where: str, conninfo: str, schema: str, shown: str) -> None:
    found = PostgresAddress.parse(where)
    assert (found.conninfo, found.schema, found.shown) == (conninfo, schema, shown)
    assert printable_location(where) == shown + (f"#{schema}" if schema else "")
    assert is_postgres_url(where)


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://me:SEC@RET@h/db",
        "postgresql://me:SEC/RET@h/db#ward",
        "postgresql://me:SEC@R/ET@h/db",
        "postgresql://me:SEC@R?ET@h/db",
        "postgresql://me:S@EC@h/db?password=R@ET",
        "postgresql://me:SEC#R?ET@h/db#w",
        "postgresql://me:SECRET/db",
        "postgresql://me:SECRET",
    ],
)
def test_a_password_that_would_be_taken_apart(where: str) -> None:
    with pytest.raises(LedgerError) as caught:
        PostgresAddress.parse(where)
    assert "/ is %2F, @ is %40" in caught.value.remedy
    assert printable_location(where) == "postgresql://…"
    for part in ("SEC", "RET", "ET", "EC"):
        assert part not in str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        "postgresql+psycopg://me:SECRET@h/db",
        "POSTGRESQL://me:SECRET@h/db",
        " postgresql://me:SECRET@h/db",
        "postgresql:/me:SECRET@h/db",
        "mysql://me:SECRET@h/db",
        "host=h password=SECRET dbname=x",
    ],
)
def test_what_was_meant_as_an_address_is_not_repeated(where: str) -> None:
    with raises_code("store.address-invalid") as caught:
        is_postgres_url(where)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://h/db#s?password=SECRET",
        "postgresql://u:x/SECRET?y@127.0.0.1/db",
        "postgresql://h/db?password =SECRET",
        "postgresql://h/db?%20password=SECRET",
        "postgresql://h/db?passfile=SECRET&oauth_client_secret=SECRET&sslkey=SECRET",
        "postgresql://u:SECRET@[::1]:5432/db",
        "postgresql://u:SECRET@h1:1,h2:2/db",
    ],
)
def test_nothing_is_shown_that_could_be_secret(where: str) -> None:
    assert "SECRET" not in printable_location(where)


@pytest.mark.parametrize("path", ["runs/a.ledger.db", "C:/runs/a.db", "./password/a.db", "a:b.db", "postgres.db"])
def test_paths(path: str) -> None:
    assert not is_postgres_url(path)
