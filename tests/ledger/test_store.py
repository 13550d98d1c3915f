"""What a store promises, on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import os
import resource
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest
from open_charges import CALL_FUNCTION
from refusals import raises_code

from lamina.errors import LedgerDamaged, LedgerError, StoreError
from lamina.ledger.merkle import Tile
from lamina.ledger.store import rows as row_tables
from lamina.ledger.store import sqlite
from lamina.ledger.store.rows import AttemptRow, LedgerHead, Store, StoredCheckpoint, WriterBatch
from lamina.ledger.store.sqlite import SqliteStore, ledger_exists, make_store

HEAD = LedgerHead(3, 100, 1, b"edge")


@pytest.fixture
def store(where: str) -> Iterator[Store]:
    made = make_store(where, create=True)
    yield made
    made.close()


def test_what_is_written_is_read(store: Store, where: str) -> None:
    with store.write() as rows:
        assert rows.head() is None
        rows.add("leaf", [(0, b"header", b"h"), (1, b"one", None), (2, b"epoch", b"e")])
        rows.add("evidence", [(1, b"attestation")])
        rows.add("token", [(b"k" * 16,), (b"l" * 16,)])
        rows.add("attempt", [AttemptRow(bytes(16), 4, 1, 2)])
        rows.put_tiles([Tile(0, 0, b"h" * 96), Tile(1, 7, b"i" * 32)])
        rows.put_head(HEAD)
        rows.put_checkpoint(StoredCheckpoint(2, "two", b"seal"))
        rows.put_checkpoint(StoredCheckpoint(3, "three", b"other"))
        rows.put_blob(b"d" * 32, b"plan")
        rows.put_blob(b"d" * 32, b"never again")
        rows.put_batch(b"w" * 16, WriterBatch(b"t" * 16, b"seqs"), 100)
        rows.put_meta("name", b"\x00value")
    other = make_store(where)
    for each in (store, other):
        with each.read() as rows:
            assert rows.head() == HEAD
            assert (rows.leaf(1), rows.leaf(3)) == ((b"one", None), None)
            assert list(rows.leaves(0, 2)) == [(0, (b"header", b"h")), (1, (b"one", None))]
            assert list(rows.beginning([b"on"], 0, 9)) == [(1, (b"one", None))]
            assert list(rows.beginning([b"ep", b"on"], 0, 9)) == [(1, (b"one", None)), (2, (b"epoch", b"e"))]
            assert list(rows.beginning([b"ep"], 0, 2)) == []
            assert (rows.evidence(1), rows.evidence(0)) == (b"attestation", None)
            assert list(rows.evidences(0, 9)) == [(1, b"attestation")]
            assert rows.tokens([b"l" * 16, b"m" * 16]) == {b"l" * 16}
            assert rows.tokens([]) == set()
            assert list(rows.attempts()) == [(bytes(16), 4, 1, 2)]
            assert (rows.tile(0, 0), rows.tile(1, 7), rows.tile(1, 0)) == (b"h" * 96, b"i" * 32, None)
            assert rows.checkpoint() == rows.checkpoint(3) == StoredCheckpoint(3, "three", b"other")
            assert rows.checkpoint(1) is None
            assert [signed.size for signed in rows.checkpoints()] == [2, 3]
            assert (rows.blob(b"d" * 32), rows.blob(bytes(32))) == (b"plan", None)
            assert rows.batch(b"w" * 16) == WriterBatch(b"t" * 16, b"seqs")
            assert rows.batch(bytes(16)) is None
            assert rows.meta("name") == b"\x00value"
        each.close()


def test_rows_are_replaced_and_dropped(store: Store) -> None:
    with store.write() as rows:
        rows.add("leaf", [(seq, b"%d" % seq, b"b%d" % seq) for seq in range(10)])
        rows.add("evidence", [(seq, b"e%d" % seq) for seq in range(10)])
        rows.put_tiles([Tile(0, index, b"t" * 32) for index in range(4)])
        rows.put_head(HEAD)
        rows.put_checkpoint(StoredCheckpoint(2, "two", b"seal"))
        rows.put_batch(b"w" * 16, WriterBatch(b"t" * 16, b"1"), 10)
    with store.write() as rows:
        rows.drop_bodies(2, 5)
        rows.put_tiles([Tile(0, 0, b"u" * 64)])
        rows.put_head(HEAD._replace(size=4))
        rows.put_checkpoint(StoredCheckpoint(2, "two, cosigned", b"ignored"))
        rows.put_batch(b"w" * 16, WriterBatch(b"u" * 16, b"2"), 11)
        rows.put_batch(b"v" * 16, WriterBatch(b"u" * 16, b"2"), 14)
        rows.forget_writers(12)
    with store.read() as rows:
        assert [seq for seq, _ in rows.leaves(0, 10)] == list(range(10))
        assert [seq for seq, data in rows.leaves(0, 10) if data.body is None] == [2, 3, 4]
        assert [seq for seq, _ in rows.evidences(0, 10)] == [0, 1, 5, 6, 7, 8, 9]
        assert [rows.tile(0, index) for index in range(4)] == [b"u" * 64, b"t" * 32, b"t" * 32, b"t" * 32]
        assert rows.head() == HEAD._replace(size=4)
        assert rows.checkpoint() == StoredCheckpoint(2, "two, cosigned", b"seal")
        assert rows.batch(b"w" * 16) is None  # a writer that was silent for days
        assert rows.batch(b"v" * 16) == WriterBatch(b"u" * 16, b"2")
    store.compact()
    with store.read() as rows:
        assert rows.leaf(5) == (b"5", b"b5")


def test_long_ranges_come_whole_and_in_order(store: Store) -> None:
    seqs = [seq for seq in range(5000) if seq % 7]
    with store.write() as rows:
        rows.add("leaf", [(seq, b"%d %d" % (seq % 2, seq), None) for seq in seqs])
        rows.add("token", [(b"%016d" % seq,) for seq in seqs])
    with store.read() as rows:
        assert [seq for seq, _ in rows.leaves(1, 4999)] == [seq for seq in seqs if 1 <= seq < 4999]
        assert [seq for seq, _ in rows.beginning([b"1"], 0, 5000)] == [seq for seq in seqs if seq % 2]
        assert sorted(map(int, rows.tokens([b"%016d" % seq for seq in range(5000)]))) == seqs


def test_a_transaction_is_all_or_nothing(store: Store) -> None:
    with store.write() as rows:
        rows.put_head(HEAD)

    def stops() -> None:
        with store.write() as rows:
            rows.add("leaf", [(0, b"x", b"")])
            rows.put_head(HEAD._replace(size=9))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stops()
    with store.read() as rows:
        assert rows.head() == HEAD
        assert rows.leaf(0) is None
    with store.write() as rows:  # and the store can go on
        rows.put_head(HEAD._replace(size=5))
    with store.read() as rows:
        assert rows.head() == HEAD._replace(size=5)


def test_a_row_twice_is_damage(store: Store) -> None:
    with store.write() as rows:
        rows.add("leaf", [(0, b"x", b"")])
    with raises_code("store.row-unexpected"), store.write() as rows:
        rows.add("leaf", [(0, b"y", b"")])
    with store.read() as rows:
        assert rows.leaf(0) == (b"x", b"")


def test_a_view_does_not_change_while_others_write(store: Store, where: str) -> None:
    with store.write() as rows:
        rows.add("leaf", [(0, b"x", b"")])
        rows.put_head(HEAD)
    other = make_store(where)
    with store.read() as rows:
        assert rows.head() == HEAD
        with other.write() as more:
            more.add("leaf", [(1, b"y", b"")])
            more.put_head(HEAD._replace(size=4))
        with store.write() as own:  # a writer beside the view, in the same process
            own.put_head(HEAD._replace(size=6))
        with store.read() as inner:  # a view inside a view is the same view
            assert inner.head() == HEAD
        assert rows.head() == HEAD
        assert rows.leaf(1) is None
    with store.read() as rows:
        assert rows.head() == HEAD._replace(size=6)
        assert rows.leaf(1) == (b"y", b"")
    other.close()


def test_writers_take_turns(store: Store, where: str) -> None:
    with store.write() as rows:
        rows.put_head(HEAD._replace(size=0))

    def count(own: Store) -> None:
        for _ in range(20):
            with own.write() as rows:
                head = rows.head()
                assert head is not None
                rows.put_head(head._replace(size=head.size + 1))

    stores = [make_store(where) for _ in range(3)]
    threads = [threading.Thread(target=count, args=(each,)) for each in (*stores, stores[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.read() as rows:
        assert rows.head() == HEAD._replace(size=80)
    for each in stores:
        each.close()


def test_whoever_waits_too_long_is_told(where: str) -> None:
    first = make_store(where, create=True)
    with first.write() as rows:
        rows.put_head(HEAD)
    second = type(first)(where, patience=0.2)  # type: ignore[call-arg]
    with first.write() as rows:
        rows.put_head(HEAD._replace(size=4))
        with raises_code("store.busy"), second.write():
            pass
    with second.write() as rows:
        assert rows.head() == HEAD._replace(size=4)
    first.close()
    second.close()


def test_a_store_does_not_survive_a_fork(store: Store) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store.read().__enter__()
        except LedgerError as error:
            status = 0 if "fork" in error.problem else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with store.read() as rows:
        assert rows.head() is None


# ----------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(("more", "code"), [(1, "store.tables-outdated"), (-1, "store.tables-too-new")])
def test_tables_of_another_version_are_refused(
    where: str, more: int, code: str, readonly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(where, create=True).close()
    monkeypatch.setattr(row_tables, "TABLES_VERSION", row_tables.TABLES_VERSION + more)
    with raises_code(code):
        make_store(where, readonly=readonly)


def test_tables_are_made_all_or_none(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(row_tables, "TABLES", (*row_tables.TABLES, "CREATE nonsense"))
        with pytest.raises(StoreError):
            make_store(where, create=True)
    for create in (False, True):
        assert not ledger_exists(where)
        if not create:
            with raises_code("store.no-ledger"):
                make_store(where)
        else:
            make_store(where, create=True).close()


def test_what_is_not_there_is_not_opened(where: str) -> None:
    with raises_code("store.no-ledger"):
        make_store(where)


def test_who_reads_changes_nothing(where: str) -> None:
    with raises_code("store.no-ledger"):
        make_store(where, readonly=True)
    store = make_store(where, create=True)
    with store.write() as rows:
        rows.put_head(HEAD)
    reader = make_store(where, readonly=True)
    with reader.read() as rows:
        assert rows.head() == HEAD
    with store.write() as rows:
        rows.put_head(HEAD._replace(size=4))
    with reader.read() as rows:
        assert rows.head() == HEAD._replace(size=4)
    with raises_code("store.opened-read-only"), reader.write():
        pass
    reader.close()
    store.close()


# ----------------------------------------------------------------------------------- SQLite alone


def test_a_copy_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "a b?c%.db", create=True)
    with store.write() as rows:
        rows.put_head(HEAD)
    store.close()
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(sqlite.os, "access", lambda path, mode: False)  # root may write everywhere
    with monkeypatch.context() as patch:
        patch.setattr(sqlite.apsw, "SQLITE_OPEN_READWRITE", 0)  # would fail
        store = SqliteStore(tmp_path / "a b?c%.db", readonly=True)
    with store.read() as rows:
        assert rows.head() == HEAD
        assert set(tmp_path.iterdir()) == before
    store.close()


def test_a_library_with_the_reset_bug_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite.apsw, "sqlite_lib_version", lambda: "3.51.2")
    with raises_code("store.sqlite-too-old"):
        SqliteStore(tmp_path / "x.db", create=True)
    assert not (tmp_path / "x.db").exists()


def test_the_file_is_private_durable_and_marked(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "x.db", create=True)
    assert stat.S_IMODE((tmp_path / "x.db").stat().st_mode) == 0o600
    for purpose in ("read", "write"):
        db = store._connection(purpose)
        assert (db.pragma("journal_mode"), db.pragma("synchronous")) == ("wal", 2)
        assert db.pragma("secure_delete") == 1
    store.close()
    data = (tmp_path / "x.db").read_bytes()
    assert data[68:72] == b"LmLg"


def test_other_files_are_not_taken_for_ledgers(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE t (x)")
    other.close()
    (tmp_path / "text").write_text("no database at all, but long enough to be taken for one" * 20)
    for name in ("other.db", "text"):
        before = (tmp_path / name).read_bytes()
        for create in (False, True):
            with pytest.raises((LedgerError, LedgerDamaged)):
                SqliteStore(tmp_path / name, create=create)
        if name == "text":
            assert (tmp_path / name).read_bytes() == before
    (tmp_path / "link").symlink_to(tmp_path / "other.db")
    with pytest.raises(LedgerError):
        SqliteStore(tmp_path / "link")
    with raises_code("store.cannot-create"):
        SqliteStore(tmp_path / "missing" / "x.db", create=True)


def test_a_link_leads_to_the_ledger_and_what_lies_beside_it(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "x.db", create=True).close()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.db").symlink_to("../x.db")
    first, second = SqliteStore(tmp_path / "x.db"), SqliteStore(tmp_path / "run" / "ledger.db")
    assert first.name == second.name
    with first.write() as rows:
        rows.put_head(HEAD)
    with second.read() as rows:
        assert rows.head() == HEAD
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ledger.db"]
    first.close()
    second.close()


def test_what_a_killed_creator_left_is_used(tmp_path: Path) -> None:
    (tmp_path / "x.db").touch()
    store = SqliteStore(tmp_path / "x.db", create=True)
    with store.read() as rows:
        assert rows.head() is None
    store.close()


def test_pruned_bytes_are_gone_from_the_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "x.db", create=True)
    with store.write() as rows:
        rows.add("leaf", [(seq, b"a leaf", b"a body that must go %d" % seq * 5) for seq in range(200)])
    with store.write() as rows:
        rows.drop_bodies(0, 200)
    store.compact()
    store.close()
    assert not any(b"a body that must go" in each.read_bytes() for each in tmp_path.iterdir())


# ----------------------------------------------------------------------------------- PostgreSQL alone


def test_a_server_that_forgets_is_refused(server: postgres.Server) -> None:
    import psycopg

    with psycopg.connect(server.url(), autocommit=True) as admin:
        for name in ("fsync", "full_page_writes"):
            admin.execute(f"ALTER SYSTEM SET {name} = off")
            admin.execute("SELECT pg_reload_conf()")
            try:
                with raises_code("store.not-durable"):
                    _until_seen(server.url("forgets"), name)
            finally:
                admin.execute(f"ALTER SYSTEM RESET {name}")
                admin.execute("SELECT pg_reload_conf()")


def _until_seen(url: str, name: str) -> None:
    """The server reads its settings a moment later."""
    for _ in range(100):
        make_store(url, create=True).close()
        time.sleep(0.05)


def test_a_session_that_would_not_wait_for_the_disk_is_made_to(server: postgres.Server) -> None:
    where = server.url("waits").replace("#", "&options=-csynchronous_commit%3Doff#")
    store = make_store(where, create=True)
    with store.write() as rows:
        assert rows._db.rows("SHOW synchronous_commit") == [("on",)]
    store.close()


def test_names_of_schemas_are_plain_and_passwords_stay_secret(server: postgres.Server) -> None:
    with raises_code("store.schema-name-invalid"):
        make_store(server.url("Ward"))
    with raises_code("store.address-invalid"):
        make_store(server.url("x; drop"))
    with pytest.raises(StoreError) as refused:
        make_store("postgresql://user:secret@127.0.0.1:1/nowhere")
    assert "secret" not in str(refused.value)


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lamina.ledger.store.postgres", raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with raises_code("store.psycopg-missing"):
        make_store("postgresql://somewhere/database")


def test_two_ledgers_of_one_database_do_not_meet(server: postgres.Server) -> None:
    one, two = (make_store(server.url(name), create=True) for name in ("left", "right"))
    with one.write() as rows:
        rows.put_head(HEAD)
    with two.write() as rows:
        assert rows.head() is None
    one.close()
    two.close()


OTHER_SCHEMAS = {
    "a check that calls a function": (CALL_FUNCTION,),
    "a foreign key that deletes": (
        "ALTER TABLE attempt ADD FOREIGN KEY (seq) REFERENCES leaf (seq) ON DELETE CASCADE",
    ),
    "an index over a function": (
        "ALTER TABLE token DROP CONSTRAINT token_pkey",
        "CREATE INDEX token_pkey ON token (public.fine(key))",
    ),
    "a key that is not unique": (
        "ALTER TABLE token DROP CONSTRAINT token_pkey",
        "CREATE INDEX token_pkey ON token (key)",
    ),
    "rows of a table elsewhere": ("CREATE TABLE public.heir () INHERITS (run)",),
    "a table that a crash empties": ("ALTER TABLE leaf SET UNLOGGED",),
    "leaves that may be missing": ("ALTER TABLE leaf ALTER COLUMN data DROP NOT NULL",),
    "a default": ("ALTER TABLE leaf ALTER COLUMN body SET DEFAULT ''",),
    "names that sort otherwise": ('ALTER TABLE meta ALTER COLUMN name TYPE text COLLATE "POSIX"',),
    "two heads": ("ALTER TABLE head DROP CONSTRAINT head_id_check",),
    "a function": ("CREATE FUNCTION octet_length(bytea) RETURNS int LANGUAGE sql AS 'SELECT 1'",),
    "a trigger": (
        "CREATE TRIGGER t BEFORE UPDATE ON leaf FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    ),
    "a rule": ("CREATE RULE r AS ON DELETE TO leaf DO INSTEAD NOTHING",),
    "row-level security": ("ALTER TABLE leaf ENABLE ROW LEVEL SECURITY",),
}


@pytest.mark.parametrize("statements", OTHER_SCHEMAS.values(), ids=OTHER_SCHEMAS.keys())
def test_a_schema_that_is_not_exactly_ours_is_refused(server: postgres.Server, statements: tuple[str, ...]) -> None:
    """Each of these runs code in the session of a writer, adds or hides rows, or loses them, without a trigger or view."""
    import psycopg

    where = server.url("altered")
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("DROP SCHEMA IF EXISTS altered CASCADE; DROP TABLE IF EXISTS public.heir")
        admin.execute(
            "CREATE OR REPLACE FUNCTION public.fine(bytea) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true'"
        )
        make_store(where, create=True).close()
        make_store(where, readonly=True).close()
        admin.execute("SET search_path = altered")
        for statement in statements:
            admin.execute(statement)
        for readonly in (True, False):
            with raises_code("store.tables-differ"):
                make_store(where, readonly=readonly)
        admin.execute("DROP SCHEMA altered CASCADE")


def test_a_schema_that_changes_is_noticed_by_the_next_connection(server: postgres.Server) -> None:
    import psycopg

    store = make_store(server.url("later"), create=True)
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("ALTER TABLE later.leaf ADD CHECK (octet_length(data) > 0)")
    with raises_code("store.tables-differ"), store.read() as rows:  # the first view, by a connection of its own
        rows.head()
    store.close()


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_writer_sees_the_one_before_whatever_the_default_isolation_is(
    server: postgres.Server, isolation: str
) -> None:
    """With a snapshot from before its lock, a writer would miss the other's reservation, and both would spend the same room."""
    import psycopg

    database = isolation.partition(" ")[0]
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {database}")
        admin.execute(f"ALTER DATABASE {database} SET default_transaction_isolation = '{isolation}'")
    where = server.url("race").replace("/postgres?", f"/{database}?")
    one, two = make_store(where, create=True), make_store(where)
    with one.write() as rows:
        rows.put_head(HEAD)
    seen: list[bytes | None] = []

    def reserve() -> None:
        with two.write() as rows:
            seen.append(rows.meta("reserved"))

    thread = threading.Thread(target=reserve)
    with one.write() as rows:
        rows.put_meta("reserved", b"all that is left")
        thread.start()
        with psycopg.connect(where.partition("#")[0], autocommit=True) as admin:
            waiting = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            while admin.execute(waiting).fetchone() == (0,):
                time.sleep(0.01)
    thread.join()
    assert seen == [b"all that is left"]
    one.close()
    two.close()


def test_text_is_utf8_whatever_server_and_session_would_take(
    server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    with psycopg.connect(server.url(), autocommit=True) as admin:
        for encoding in ("LATIN1", "SQL_ASCII"):
            admin.execute(f"CREATE DATABASE in_{encoding} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
            with raises_code("store.encoding-not-utf8"):
                make_store(server.url("x").replace("/postgres?", f"/in_{encoding.lower()}?"), create=True)
    for encoding in ("LATIN1", "SQL_ASCII"):
        monkeypatch.setenv("PGCLIENTENCODING", encoding)
        store = make_store(server.url(f"client_{encoding.lower()}"), create=True)
        with store.write() as rows:
            rows.put_checkpoint(StoredCheckpoint(1, "— ward", b"seal"))
            assert rows.checkpoint() == StoredCheckpoint(1, "— ward", b"seal")
        store.close()


def test_a_lock_that_anybody_can_take_keeps_nobody_out(server: postgres.Server) -> None:
    import psycopg

    from lamina.ledger.store.postgres import PostgresStore

    make_store(server.url("locked"), create=True).close()
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("SELECT pg_advisory_lock(hashtext('lamina locked'))")
        for options in ({"readonly": True}, {}, {"create": True}):
            PostgresStore(server.url("locked"), patience=0.2, **options).close()


def test_temporary_tables_do_not_stand_before_those_of_the_ledger(server: postgres.Server) -> None:
    store = make_store(server.url("shadowed"), create=True)
    with store.write() as rows:
        rows.put_head(HEAD)
        rows._db.rows("CREATE TEMPORARY TABLE head (LIKE shadowed.head)")
    with store.write() as rows:
        assert rows.head() == HEAD
    store.close()


def test_a_process_with_many_open_files_reads(server: postgres.Server) -> None:
    """select.select supports only the first 1,024 file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, before[1]), before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        store = make_store(server.url("many_files"), create=True)
        for _ in range(2):
            with store.read() as rows:
                assert rows.head() is None
        store.close()
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("wrong", [-3600, 3600, 10**9])
def test_a_machine_whose_clock_is_not_the_servers_does_not_write(
    server: postgres.Server, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """A leaf is never earlier than the one before it, so a leaf dated tomorrow would block all other machines until then."""
    make_store(server.url("in_time"), create=True).close()
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + wrong)
    with raises_code("store.clocks-differ"):
        make_store(server.url("in_time"))
    make_store(server.url("in_time"), readonly=True).close()
