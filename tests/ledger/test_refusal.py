"""A database that does not let anybody in: each reason has its own words and remedy, and the password is in none."""

from __future__ import annotations

import time
from collections.abc import Iterator

import postgres
import psycopg
import pytest
from making import LEDGER, Clock, admitted, header
from refusals import raises_code

from lamina.errors import StoreError, StoreLost
from lamina.ledger.reader import LedgerReader
from lamina.ledger.store.sqlite import make_store
from lamina.ledger.writer import Ledger

SECRET = "hunter2"


@pytest.fixture(scope="module")
def doors(server: postgres.Server) -> Iterator[str]:
    """Users of the server that may do less than they would like; the address of one, to be filled in."""
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute(f"CREATE ROLE locked LOGIN PASSWORD '{SECRET}'")
        for name in ("barred", "poor", "looker"):
            db.execute(f"CREATE ROLE {name} LOGIN")
        db.execute("CREATE DATABASE closed")
        db.execute("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
        place = db.execute("SHOW hba_file").fetchone()
        assert place is not None
        path = place[0]
        with open(path) as file:
            before = file.read()
        with open(path, "w") as file:
            file.write(f"local all locked scram-sha-256\nlocal all barred reject\n{before}")
        loaded = db.execute("SELECT pg_conf_load_time()").fetchone()
        db.execute("SELECT pg_reload_conf()")
        while db.execute("SELECT pg_conf_load_time()").fetchone() == loaded:  # a session follows the server
            time.sleep(0.02)
    yield server.url().replace("lamina@/postgres", "{}")
    with open(path, "w") as file:
        file.write(before)
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute("SELECT pg_reload_conf()")
        db.execute("DROP DATABASE closed")
        for name in ("locked", "barred", "poor", "looker"):
            db.execute(f"DROP OWNED BY {name}")
            db.execute(f"DROP ROLE {name}")


@pytest.mark.parametrize(
    ("who", "words", "remedy"),
    [
        ("lamina@/nodb", "has no database 'nodb'", "createdb nodb"),
        ("stranger:PW@/postgres", "knows no user 'stranger'", "createuser"),
        ("locked:PWPW@/postgres", "refuses the password of user 'locked'", "pgpass"),
        ("locked@/postgres", "asks for the password of user 'locked'", "PGPASSWORD"),
        ("barred:PW@/postgres", "does not let user 'barred' in to database 'postgres'", "pg_hba.conf"),
        ("poor:PW@/closed", "does not let user 'poor' in to database 'closed'", "GRANT CONNECT ON DATABASE closed"),
    ],
)  # fmt: skip
def test_the_server_says_no(doors: str, who: str, words: str, remedy: str) -> None:
    with pytest.raises(StoreError) as caught:
        make_store(doors.format(who.replace("PW", SECRET)))
    assert type(caught.value) is StoreError  # trying again does not help
    assert words in caught.value.problem and "on the socket in /" in caught.value.problem
    assert remedy in caught.value.remedy
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "words", "remedy"),
    [
        ("me:PW@127.0.0.1:1/db", "the server at 127.0.0.1, port 1, does not answer", "start it"),
        ("me:PW@/db?host=/nowhere", "the server on the socket in /nowhere, port 5432, does not answer", "start it"),
        ("me:PW@nohost.invalid/db", "there is no host 'nohost.invalid'", "correct the host"),
    ],
)  # fmt: skip
def test_nobody_answers(where: str, words: str, remedy: str) -> None:
    with pytest.raises(StoreLost) as caught:
        make_store(f"postgresql://{where.replace('PW', SECRET)}")
    assert words in caught.value.problem and remedy in caught.value.remedy
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("where", [f"h/db?{SECRET}", f"h/db?pasword={SECRET}", f"me:{SECRET}@[::1/db"])
def test_an_address_that_cannot_be_read(where: str) -> None:
    """libpq quotes what it does not understand."""
    with raises_code("store.address-invalid") as caught:
        make_store(f"postgresql://{where}")
    assert "postgresql://USER@HOST/DATABASE#schema" in caught.value.remedy
    assert SECRET not in str(caught.value)


def test_a_schema_without_a_ledger(server: postgres.Server, doors: str) -> None:
    with Ledger.create(server.url("a_ledger"), header(), LEDGER, clock=Clock()):
        pass
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute("CREATE SCHEMA bare")
        db.execute("CREATE DATABASE nothing")
    for schema, words in (("bare", "schema 'bare' has none"), ("gone", "schema 'gone' is not there")):
        with raises_code("store.no-ledger") as caught:
            make_store(server.url(schema))
        assert words in caught.value.problem
        assert "#a_ledger" in caught.value.remedy
    with raises_code("store.no-ledger") as caught:
        make_store(doors.format("lamina@/nothing"))
    assert "no schema of this one has a ledger" in caught.value.remedy
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute("DROP DATABASE nothing")
        db.execute("DROP SCHEMA bare")
        db.execute("DROP SCHEMA a_ledger CASCADE")


def test_a_user_who_may_only_look(server: postgres.Server, doors: str) -> None:
    """An auditor needs USAGE and SELECT, and is told so; more would be refused by the server."""
    mine = doors.format("looker@/postgres") + "#looked_at"
    with Ledger.create(server.url("looked_at"), header(), LEDGER, clock=Clock()):
        pass
    with raises_code("store.access-refused") as caught:
        LedgerReader.read_only(mine)
    assert "GRANT USAGE ON SCHEMA looked_at" in caught.value.remedy
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute("GRANT USAGE ON SCHEMA looked_at TO looker")
        with raises_code("store.access-refused") as caught:
            LedgerReader.read_only(mine)
        assert "SELECT to read" in caught.value.remedy
        db.execute("GRANT SELECT ON ALL TABLES IN SCHEMA looked_at TO looker")
    with LedgerReader.read_only(mine) as view:
        assert view.size == 1
    with Ledger.open(mine, clock=Clock()) as ledger, raises_code("store.access-refused"):
        ledger.append([admitted(1)])
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute("DROP SCHEMA looked_at CASCADE")
