"""Addresses of PostgreSQL: what libpq is told, and what is printed; never the password."""

from __future__ import annotations

import pytest

from lamina.ledger.errors import LedgerError
from lamina.ledger.store.address import Address, is_url, without_password


@pytest.mark.parametrize(
    ("where", "conninfo", "schema", "shown"),
    [
        ("postgresql://h/db", "postgresql://h/db", "", "postgresql://h/db"),
        ("postgres://me@h:1/db#ward", "postgres://me@h:1/db", "ward", "postgres://me@h:1/db"),
        ("postgresql://me:pw@h/db#ward", "postgresql://me:pw@h/db", "ward", "postgresql://me@h/db"),
        ("postgresql://me:p#w?x@h/db#w", "postgresql://me:p#w?x@h/db", "w", "postgresql://me@h/db"),
        ("postgresql://me:p%40w@/db?host=/run#w", "postgresql://me:p%40w@/db?host=/run", "w", "postgresql://me@/db?host=/run"),
        ("postgresql:///db?sslpassword=pw&password=pw", "postgresql:///db?sslpassword=pw&password=pw", "", "postgresql:///db"),
        ("postgresql://h/db?pass%77ord=pw&port=1", "postgresql://h/db?pass%77ord=pw&port=1", "", "postgresql://h/db?port=1"),
        ("postgresql://h/db?user=a@b", "postgresql://h/db?user=a@b", "", "postgresql://h/db?user=a@b"),
        ("postgresql://", "postgresql://", "", "postgresql://"),
    ],
)  # fmt: skip
def test_parts(where: str, conninfo: str, schema: str, shown: str) -> None:
    found = Address.parse(where)
    assert (found.conninfo, found.schema, found.shown) == (conninfo, schema, shown)
    assert without_password(where) == shown + (f"#{schema}" if schema else "")
    assert is_url(where)


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("postgresql://me:SEC@RET@h/db", "postgresql://me@h/db"),
        ("postgresql://me:SEC/RET@h/db#ward", "postgresql://me@h/db#ward"),
        ("postgresql://me:SEC@R/ET@h/db", "postgresql://me@h/db"),
        ("postgresql://me:SEC@R?ET@h/db", "postgresql://…"),
        ("postgresql://me:S@EC@h/db?password=R@ET", "postgresql://…"),
    ],
)
def test_a_password_that_would_be_taken_apart(where: str, shown: str) -> None:
    with pytest.raises(LedgerError) as caught:
        Address.parse(where)
    assert "/ is %2F and @ is %40" in caught.value.remedy
    assert without_password(where) == shown
    for part in ("SEC", "RET", "ET", "EC"):
        assert part not in str(caught.value)
