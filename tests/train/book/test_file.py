"""The spend book's file: disks that fail, files that are not books, and many processes at once."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lamina.account import Event, accountant
from lamina.errors import BudgetExceeded, LaminaError, RunError, StorageError
from lamina.train.book import SpendBook
from lamina.train.book import file as book_file
from lamina.train.book.charge import Charge
from lamina.train.book.rows import Rows

# Newer Pythons warn of forking beside threads; the children here touch SQLite and arithmetic only.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

RUN = "a1" * 16
CHARGE = Charge(cls="clinical", sigma=10.0, q=1.0, steps=10, delta=1e-5, accountant="gaussian")
SPENT = accountant("gaussian").epsilon([Event(sigma=10.0, q=1.0, steps=400)], 1e-5)
FORK = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds on importing torch


def pay(book: SpendBook, segment: int = 0, *, run: str = RUN, steps: int = 10, nonce: bytes = b"n") -> bool:
    charges = [CHARGE.times(steps)]
    return book.charge(
        run, origin="o", segment=segment, generation=0, nonce=nonce, charges=charges, bounds={}
    )


def steps_of(book: SpendBook, run: str = RUN) -> int:
    runs = book.total("o", "clinical", delta=1e-5, accountant="gaussian").runs
    return sum(each.steps for each in runs if each.run == run)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A book with 40 charges of 10 steps."""
    book = SpendBook(tmp_path / "spend.db")
    with book._file.write() as db:
        rows = Rows(db)
        rows.enter(RUN)
        for segment in range(40):
            rows.attempt((RUN, segment, 0), b"n", "o", [CHARGE])
            rows.charge((RUN, segment, 0), rows.account("o", CHARGE), CHARGE)
    return book.path


# --------------------------------------------------------------------------------------- not a book


def test_a_folder_is_not_a_book(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is a folder"):
        SpendBook(tmp_path)


def test_a_file_in_the_way_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        SpendBook(tmp_path / "file" / "spend.db")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("content", [b"a text\n", b"\0" * 5000, b"SQLite format 3\0" + b"\xff" * 2000])
def test_another_file_is_not_taken_for_a_book_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "spend.db"
    path.write_bytes(content)
    with pytest.raises(StorageError, match="not a spend book|damaged"):
        SpendBook(path)
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["spend.db"]


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "spend.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE run (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StorageError, match="not a spend book"):
        SpendBook(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, 2, 99])
def test_a_book_of_another_format_is_refused(path: Path, version: int) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StorageError, match=f"format {version}.*format 1"):
        SpendBook(path)
    assert path.read_bytes() == before


def test_a_book_that_is_not_there_is_not_begun_by_looking(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not there"):
        SpendBook(tmp_path / "none" / "spend.db", create=False)
    assert not (tmp_path / "none").exists()


def test_a_book_that_vanishes_is_not_begun_afresh(path: Path) -> None:
    book = SpendBook(path)
    path.unlink()
    for use in (
        lambda: pay(book, 99),
        lambda: book.finish(RUN),
        lambda: book.total("o", "clinical", delta=1e-5),
        lambda: book.reserve(RUN, origin="o", charges=[CHARGE], bounds={}),
    ):
        with pytest.raises(StorageError, match="is not there"):
            use()
    assert not path.exists()


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spend.db").symlink_to(tmp_path / "nowhere.db")
    with pytest.raises(StorageError, match="is not there"):
        SpendBook(tmp_path / "spend.db")
    assert not (tmp_path / "nowhere.db").exists()


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    book = SpendBook(tmp_path / "spend.db")
    assert pay(book)
    assert stat.S_IMODE(book.path.stat().st_mode) == 0o600
    assert steps_of(SpendBook(tmp_path / "spend.db")) == 10
    with pytest.raises(FileExistsError):  # what a process meets that comes second
        book_file._give_name(tmp_path / "draft", book.path)
    assert steps_of(book) == 10
    assert [each.name for each in tmp_path.iterdir()] == ["spend.db"]


def test_a_name_that_cannot_be_written_is_refused(path: Path) -> None:
    book = SpendBook(path)
    for use in (
        lambda: book.total("\ud800", "clinical", delta=1e-5),
        lambda: book.fits("\ud800", origin="o", charge=CHARGE, bound=1.0),
        lambda: book.finish("\ud800"),
        lambda: book.next_generation("\ud800", 0),
    ):
        with pytest.raises(RunError, match="encoding"):
            use()


# --------------------------------------------------------------------------------------- damage


def test_a_truncated_book_is_refused_and_not_begun_afresh(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    cut = tmp_path / "cut" / "spend.db"
    cut.parent.mkdir()
    for size in (0, 1, 15, 16, 99, 100, 512, 1000, 4095, *range(4096, len(whole), 4096), len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(StorageError, match="empty|damaged|not a spend book"):
            SpendBook(cut)
        assert cut.read_bytes() == whole[:size]


def test_a_damaged_byte_is_refused_or_changes_no_figure(path: Path, tmp_path: Path) -> None:
    whole, chance = path.read_bytes(), random.Random(5)
    copy, refused = tmp_path / "damaged.db", 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        copy.write_bytes(damaged)
        try:
            book = SpendBook(copy)
            found = book.total("o", "clinical", delta=1e-5, accountant="gaussian")
            assert (found.spent, steps_of(book)) == (SPENT, 400)
            assert book.next_generation(RUN, 39) == 1
            assert pay(book, 99)
        except LaminaError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE charged SET steps = 9 WHERE rowid = 7",
        "UPDATE charged SET sigma = sigma * (1 + 1e-15) WHERE rowid = 7",
        "UPDATE charged SET q = 0.5 WHERE rowid = 7",
        "DELETE FROM charged WHERE rowid = 7",
        "UPDATE attempt SET nonce = x'6f' WHERE segment = 7",
        "UPDATE account SET origin = 'p'",
        "UPDATE account SET cls = 'Clinical'",
    ],
)
def test_a_charge_that_is_not_what_was_written_is_noticed(path: Path, change: str) -> None:
    with sqlite3.connect(path) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        db.execute(change)
    db.close()
    with pytest.raises(StorageError, match="damaged.*restore it"):
        SpendBook(path)


def test_a_page_of_noise_is_refused(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    for page in range(1, len(whole) // 4096):
        damaged = bytearray(whole)
        damaged[page * 4096 : (page + 1) * 4096] = random.Random(page).randbytes(4096)
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match="damaged.*restore it"):
            SpendBook(path)


# --------------------------------------------------------------------------------------- disks


def in_child(work: Callable[[], Any]) -> tuple[str, Any]:
    """The kind and text of what `work` raises, or its result, from a process of its own."""

    def run(end: Connection) -> None:
        try:
            end.send(("done", work()))
        except BaseException as error:
            end.send((type(error).__name__, str(error)))

    mine, theirs = FORK.Pipe()
    child = FORK.Process(target=run, args=(theirs,))
    child.start()
    assert mine.poll(60)
    found = mine.recv()
    child.join(60)
    return found


def test_a_full_disk_books_nothing(path: Path) -> None:
    """Files may not grow: SQLite's journal cannot be written, as on a disk without room."""
    before = path.read_bytes()

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        book = SpendBook(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        pay(book, 99)

    kind, text = in_child(work)
    assert kind == "StorageError"
    assert str(path) in text and "disk" in text and "Remedy" in text
    book = SpendBook(path)
    assert steps_of(book) == 400
    assert path.read_bytes() == before
    assert pay(book, 99)


def test_a_disk_that_fills_up_within_a_booking_books_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = book_file._connect

    def small(at: Path) -> sqlite3.Connection:
        db = connect(at)
        db.execute("PRAGMA max_page_count = 1")  # no page more than there is
        return db

    book = SpendBook(path)
    monkeypatch.setattr(book_file, "_connect", small)
    with pytest.raises(StorageError, match="no room on its disk; nothing was booked.*free some space"):
        book.charge(RUN, origin="x" * 9000, segment=99, generation=0, nonce=b"n", charges=[CHARGE], bounds={})
    monkeypatch.undo()
    assert steps_of(book) == 400
    assert book.next_generation(RUN, 99) == 0


def test_a_new_book_on_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        SpendBook(tmp_path / "spend.db")

    kind, text = in_child(work)
    assert kind == "StorageError"
    assert str(tmp_path / "spend.db") in text
    assert not (tmp_path / "spend.db").exists()
    assert SpendBook(tmp_path / "spend.db").accounts() == ()


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_is_read_only_is_refused_for_writing_and_open_for_reading(path: Path, what: str) -> None:
    place = Path(tempfile.mkdtemp())  # that another user may enter, unlike the folders of pytest
    try:
        book = place / "spend.db"
        shutil.copy(path, book)
        place.chmod(0o555 if what == "folder" else 0o777)
        book.chmod(0o444 if what == "file" else 0o666)

        def nobody() -> None:
            if os.geteuid() == 0:  # root may write anything
                os.setgroups([])
                os.setegid(65534)
                os.seteuid(65534)

        def reading() -> int:
            nobody()
            return steps_of(SpendBook(book))

        def writing() -> bool:
            nobody()
            return pay(SpendBook(book), 99)

        def beginning() -> None:
            nobody()
            SpendBook(place / "new" / "spend.db")

        assert in_child(reading) == ("done", 400)
        kind, text = in_child(writing)
        assert kind == "StorageError"
        assert str(book) in text and "nothing was booked" in text and "writable" in text
        if what == "folder":
            kind, text = in_child(beginning)
            assert kind == "StorageError"
            assert "writable" in text
            assert [each.name for each in place.iterdir()] == ["spend.db"]
        assert steps_of(SpendBook(book)) == 400
    finally:
        place.chmod(0o700)
        shutil.rmtree(place)


def test_a_book_held_for_too_long_is_a_clear_refusal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_file, "_PATIENCE", 0.05)
    book = SpendBook(path)
    holder = sqlite3.connect(path, isolation_level=None)
    try:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="held by another process.*nothing was booked"):
            pay(book, 99)
        assert steps_of(book) == 400  # readers are not in the way of one who only prepares
        holder.execute("ROLLBACK")
        holder.execute("BEGIN")
        holder.execute("SELECT count(*) FROM charged").fetchone()
        with pytest.raises(StorageError, match="held by another process"):
            pay(book, 99)  # the commit has to wait for the reader
    finally:
        holder.close()
    assert book.next_generation(RUN, 99) == 0
    assert pay(book, 99)


def test_an_exception_inside_a_booking_undoes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = SpendBook(path)

    def stop(*_: Any, **__: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("lamina.train.book.book.pooled", stop)
    with pytest.raises(KeyboardInterrupt):
        book.charge(
            RUN,
            origin="o",
            segment=99,
            generation=0,
            nonce=b"n",
            charges=[CHARGE],
            bounds={"clinical": 9.0},
        )
    assert steps_of(book) == 400
    assert pay(book, 99)


def test_every_write_is_synced(path: Path) -> None:
    with SpendBook(path)._file.write() as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert db.execute("PRAGMA foreign_keys").fetchone() == (1,)


# --------------------------------------------------------------------------------------- many processes


def start(work: Callable[[int, Connection], None], count: int) -> list[tuple[Any, Connection]]:
    children = []
    for number in range(count):
        mine, theirs = FORK.Pipe()
        child = FORK.Process(target=work, args=(number, theirs))
        child.start()
        theirs.close()
        children.append((child, mine))
    return children


def test_many_processes_begin_one_book_and_lose_no_charge(tmp_path: Path) -> None:
    path, go, count, each = tmp_path / "spend.db", FORK.Event(), 4, 15

    def work(number: int, end: Connection) -> None:
        go.wait(30)
        book = SpendBook(path)
        for segment in range(each):
            assert pay(book, segment, run=f"{number:032d}", steps=number + 1)
        end.send("ok")

    children = start(work, count)
    go.set()
    for child, end in children:
        assert end.recv() == "ok"
        child.join(60)
    book = SpendBook(path)
    assert [steps_of(book, f"{number:032d}") for number in range(count)] == [
        each * (number + 1) for number in range(count)
    ]
    steps = each * count * (count + 1) // 2
    assert book.total("o", "clinical", delta=1e-5, accountant="gaussian").spent == accountant(
        "gaussian"
    ).epsilon([Event(sigma=10.0, q=1.0, steps=steps)], 1e-5)
    assert [each.name for each in tmp_path.iterdir()] == ["spend.db"]


@pytest.mark.parametrize("how", ["reserve", "charge"])
def test_of_runs_that_fit_alone_exactly_one_is_admitted(tmp_path: Path, how: str) -> None:
    book = SpendBook(tmp_path / "spend.db")
    bound = accountant("gaussian").epsilon([Event(sigma=10.0, q=1.0, steps=15)], 1e-5)

    def work(number: int, end: Connection) -> None:
        go.wait(30)
        given: dict[str, Any] = {"origin": "o", "charges": [CHARGE], "bounds": {"clinical": bound}}
        try:
            if how == "reserve":
                book.reserve(f"{number:032d}", **given)
            else:
                book.charge(f"{number:032d}", segment=0, generation=0, nonce=b"n", **given)
            end.send("admitted")
        except BudgetExceeded:
            end.send("refused")

    for _ in range(3):
        book.path.unlink()
        book = SpendBook(tmp_path / "spend.db")
        go = FORK.Event()
        children = start(work, 4)
        go.set()
        assert sorted(end.recv() for _, end in children) == ["admitted", *["refused"] * 3]
        for child, _ in children:
            child.join(60)
        assert book.total("o", "clinical", delta=1e-5, accountant="gaussian").committed <= bound


def test_of_two_copies_of_a_run_one_is_told(tmp_path: Path) -> None:
    book = SpendBook(tmp_path / "spend.db")
    go = FORK.Event()

    def work(number: int, end: Connection) -> None:
        go.wait(30)
        end.send([pay(book, segment, nonce=bytes([number])) for segment in range(10)])

    children = start(work, 2)
    go.set()
    one, two = (end.recv() for _, end in children)
    for child, _ in children:
        child.join(60)
    assert all(a != b for a, b in zip(one, two, strict=True))
    assert steps_of(book) == 100


def kill_and_look(path: Path, chance: random.Random) -> None:
    """Kill a process that books without pause; nothing that it was told is lost, nothing is half there."""
    SpendBook(path)
    run = f"{chance.getrandbits(128):032x}"

    def work(_: int, end: Connection) -> None:
        book = SpendBook(path)
        book.reserve(run, origin="o", charges=[CHARGE.times(10_000)], bounds={"clinical": 1e6})
        for segment in range(1_000):
            pay(book, segment, run=run)
            end.send(segment)

    ((child, end),) = start(work, 1)
    told = -1
    for _ in range(chance.randrange(1, 5)):
        told = end.recv()
    time.sleep(chance.random() * 0.01)  # a booking takes 2 to 20 ms
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    try:
        while True:
            told = end.recv()
    except EOFError:
        pass
    book = SpendBook(path)  # checks the whole file
    (mine,) = (each for each in book.total("o", "clinical", delta=1e-5).runs if each.run == run)
    assert mine.steps // 10 - 1 in (told, told + 1)
    assert mine.steps + mine.reserved == 10_000
    assert pay(book, told, run=run)  # the one that was killed may ask again
    assert steps_of(book, run) == mine.steps
    assert pay(book, told + 1, run=run)
    book.finish(run)


def test_a_kill_at_any_instant_leaves_a_consistent_book(tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(5):
        kill_and_look(tmp_path / "spend.db", chance)


@pytest.mark.slow
def test_many_kills(tmp_path: Path) -> None:
    chance = random.Random(11)
    for _ in range(50):
        kill_and_look(tmp_path / "spend.db", chance)


def test_a_kill_while_a_book_is_begun_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(10):
        path = tmp_path / str(number) / "spend.db"

        def work(_: int, end: Connection, path: Path = path) -> None:
            end.send(0)
            SpendBook(path)
            end.send(1)

        ((child, end),) = start(work, 1)
        end.recv()
        time.sleep(chance.random() * 0.004)
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
        assert SpendBook(path).accounts() == ()
