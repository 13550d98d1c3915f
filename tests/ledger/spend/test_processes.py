"""Bookings on disks that fail and by many processes at once: all of a booking is there, or nothing of it."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from forked import in_child
from forks import in_processes
from keeping import DELTA, FIRST, KEY, Attempts, contents, epochs, open_book, owed, plan, stated, verified
from refusals import raises_code

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Event
from lamina.errors import BudgetExceeded
from lamina.ledger.records import SegmentOutcome
from lamina.ledger.schema import nano_epsilon
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.store.sqlite import SqliteStore
from lamina.ledger.writer import Ledger
from lamina.plan.charges import plan_charges
from lamina.plan.step_plan import PlannedLayer

# Newer Pythons warn of forking beside threads; the children here touch SQLite and arithmetic only.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

CHARGE = owed(10)
FORK = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds on importing torch


def pay(
    book: SpendLedger, segment: int = 0, *, run: str = FIRST, steps: int = 10, nonce: bytes = b"n" * 16, **other: Any
) -> bool:
    given = {"generation": 0, "nonce": nonce, "charges": [CHARGE.times(steps)], "bounds": {}, **other}
    return book.charge(run, segment=segment, **given)


def steps_of(book: SpendLedger, run: str = FIRST) -> int:
    runs = book.total("clinical", delta=DELTA, accountant="gaussian").runs
    return sum(each.steps for each in runs if each.run == run)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with 40 charges of 10 steps."""
    with open_book(tmp_path / "ledger.db").ledger as ledger:
        for segment in range(40):
            pay(SpendLedger(ledger), segment)
    return tmp_path / "ledger.db"


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory: these tests kill processes, they do not cut the power."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "ledger.db"


# --------------------------------------------------------------------------------------- disks


def test_a_full_disk_books_nothing(path: Path) -> None:
    """Files may not grow: SQLite's WAL cannot be written, as on a disk without room."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        book = open_book(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        pay(book, 99)

    text = in_child(work)
    assert text.startswith("StoreError") and str(path) in text and "Remedy" in text
    book = open_book(path)
    assert steps_of(book) == 400
    assert book.next_generation(FIRST, 99) == 0
    assert pay(book, 99)


@pytest.mark.parametrize("what", ["reserve", "charge", "record"])
def test_a_disk_that_fills_up_within_a_booking_books_nothing(place: Path, what: str) -> None:
    large = PlannedLayer(name="large", depth=1.0, parameters=("x" * 9000,), size=64, spans=((0, 1),))
    book = open_book(place)
    run = Attempts(book, plan=plan(layers=(large,), blocks=1, clip=((1.0,), (0.5,)), noise=(6.0,)))
    assert run.charge(0)
    before = contents(book)
    db = book.ledger.store._connection("write")  # type: ignore[attr-defined]
    db.pragma("max_page_count", 1)  # no page more than there is
    much = [owed(1, sigma=float(n)) for n in range(1, 200)]
    bookings: dict[str, Callable[[], Any]] = {
        "reserve": lambda: book.reserve(FIRST, charges=much, bounds={}),
        "charge": lambda: pay(book, 99, charges=much),
        "record": lambda: run.record(0),
    }
    with raises_code("store.disk-full"):
        bookings[what]()
    assert contents(book) == before
    db.pragma("max_page_count", 1_000_000)
    bookings[what]()
    assert contents(book) != before


def test_a_ledger_that_cannot_be_written_is_refused_and_nothing_is_booked(path: Path) -> None:
    place = Path(tempfile.mkdtemp())  # that another user may enter, unlike the folders of pytest
    try:
        copy = place / "ledger.db"
        shutil.copy(path, copy)
        copy.chmod(0o444)
        place.chmod(0o777)

        def writing() -> bool:
            if os.geteuid() == 0:  # root may write anything
                os.setgroups([])
                os.setegid(65534)
                os.seteuid(65534)
            return pay(SpendLedger(Ledger.open(copy)), 99)

        text = in_child(writing)
        assert text.startswith("StoreError") and str(copy) in text and "writable" in text
    finally:
        shutil.rmtree(place)


def test_a_ledger_held_for_too_long_is_a_clear_refusal(path: Path) -> None:
    with Ledger(SqliteStore(path, patience=0.05), KEY) as ledger, open_book(path).ledger as other:
        book = SpendLedger(ledger)
        with other.store.write():
            with raises_code("store.busy"):
                pay(book, 99)
            assert steps_of(book) == 400  # readers are not in the way of one who writes
        assert book.next_generation(FIRST, 99) == 0
        assert pay(book, 99)


def test_an_exception_inside_a_booking_undoes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = open_book(path)
    before = contents(book)

    def stop(*_: Any, **__: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("lamina.ledger.spending.pooled_epsilon", stop)
    monkeypatch.setattr("lamina.ledger.spend_ledger.pooled_epsilon", stop)
    for booking in (
        lambda: pay(book, 99, bounds={"clinical": 9.0}),
        lambda: book.reserve(FIRST, charges=[CHARGE], bounds={"clinical": 9.0}),
    ):
        with pytest.raises(KeyboardInterrupt):
            booking()
        assert contents(book) == before
    monkeypatch.undo()
    assert steps_of(book) == 400
    assert pay(book, 99)


def test_an_exception_while_an_epoch_is_recorded_undoes_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = open_book(place)
    run = Attempts(book)
    assert run.charge(0)
    before, total = contents(book), book.total("clinical", delta=DELTA)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lamina.ledger.spend_ledger.EpochBuilder.settle", stop)
    with pytest.raises(KeyboardInterrupt):
        run.record(0)
    monkeypatch.undo()
    assert contents(book) == before
    assert book.total("clinical", delta=DELTA) == total
    run.record(0)
    assert book.total("clinical", delta=DELTA) == total
    verified(book)


@pytest.mark.parametrize("body", [b"", b"\xff", b"\x83\x81\x81\x01\xa0\x40", b"\x80"])
def test_a_hold_that_cannot_be_read_is_told_and_never_counted_as_nothing(place: Path, body: bytes) -> None:
    book = open_book(place)
    pay(book)
    with book.ledger.store.write() as rows:
        (held,) = rows.holds()
        rows.put_hold(held._replace(body=body))
    with raises_code("ledger.open-rows-differ"):
        pay(book, 1)
    book.ledger.accept()  # and also if the key signed it so
    for use in (
        lambda: pay(book, 1),
        lambda: book.total("clinical", delta=DELTA),
        lambda: book.reserve(FIRST, charges=[CHARGE], bounds={}),
        lambda: book.accounts(),
    ):
        with raises_code("spend.row-unreadable"):
            use()


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


def test_many_processes_begin_one_ledger_and_lose_no_charge(tmp_path: Path) -> None:
    path, go, count, each = tmp_path / "ledger.db", FORK.Event(), 4, 15

    def work(number: int, end: Connection) -> None:
        go.wait(30)
        book = open_book(path)
        for segment in range(each):
            assert pay(book, segment, run=f"{number:032d}", steps=number + 1)
        end.send("ok")

    children = start(work, count)
    go.set()
    for child, end in children:
        assert end.recv() == "ok"
        child.join(60)
    book = open_book(path)
    assert [steps_of(book, f"{number:032d}") for number in range(count)] == [
        each * (number + 1) for number in range(count)
    ]
    steps = each * count * (count + 1) // 2
    assert book.total("clinical", delta=DELTA, accountant="gaussian").spent == find_accountant("gaussian").epsilon(
        [Event(sigma=10.0, q=1.0, steps=steps)], DELTA
    )


@pytest.mark.parametrize("how", ["reserve", "charge"])
def test_of_runs_that_fit_alone_exactly_one_is_admitted(place: Path, how: str) -> None:
    bound = find_accountant("gaussian").epsilon([Event(sigma=10.0, q=1.0, steps=15)], DELTA)

    def work(number: int, end: Connection) -> None:
        go.wait(30)
        book = open_book(path)
        given: dict[str, Any] = {"charges": [CHARGE], "bounds": {"clinical": bound}}
        try:
            if how == "reserve":
                book.reserve(f"{number:032d}", **given)
            else:
                book.charge(f"{number:032d}", segment=0, generation=0, nonce=b"n" * 16, **given)
            end.send("admitted")
        except BudgetExceeded:
            end.send("refused")

    for attempt in range(3):
        path = place.with_name(f"{attempt}.db")
        open_book(path).ledger.close()
        go = FORK.Event()
        children = start(work, 4)
        go.set()
        assert sorted(end.recv() for _, end in children) == ["admitted", *["refused"] * 3]
        for child, _ in children:
            child.join(60)
        found = open_book(path).total("clinical", delta=DELTA, accountant="gaussian")
        assert 0 < found.committed <= bound


def test_of_two_copies_of_a_run_one_is_told(place: Path) -> None:
    open_book(place).ledger.close()
    go = FORK.Event()

    def work(number: int, end: Connection) -> None:
        go.wait(30)
        book = open_book(place)
        end.send([pay(book, segment, nonce=bytes([number]) * 16) for segment in range(10)])

    children = start(work, 2)
    go.set()
    one, two = (end.recv() for _, end in children)
    for child, _ in children:
        child.join(60)
    assert all(a != b for a, b in zip(one, two, strict=True))
    assert steps_of(open_book(place)) == 100


# --------------------------------------------------------------------------------------- recording at once


def train(where: str, number: int) -> None:
    """A run of its own: four segments, the second of them given up and done again."""
    with SpendLedger(Ledger.open(where, KEY)).ledger as ledger:
        run = Attempts(SpendLedger(ledger), f"{number:032x}")
        run.done(0)
        assert run.charge(1)
        run.record(1, outcome=SegmentOutcome.ABANDONED)
        assert run.charge(1, 1)
        run.record(1, 1)
        run.done(2, 3)


def test_processes_that_record_at_once_all_land_and_verify(where: str) -> None:
    open_book(where, accountant="rdp").ledger.close()
    in_processes(*(lambda number=number: train(where, number) for number in range(3)))
    with open_book(where, accountant="rdp").ledger as ledger:
        book = SpendLedger(ledger)
        assert verified(book).counts["epoch"] == 15
        assert len({epoch.state for epoch in epochs(ledger)}) == 15
        total = book.total("clinical", delta=DELTA, accountant="rdp")
        assert total.spent == total.committed
        assert stated(book)["clinical"] == nano_epsilon(total.spent)
        assert [(each.steps, each.redone) for each in total.runs] == [(50, 10)] * 3


def test_threads_may_share_a_book(place: Path) -> None:
    book = open_book(place, accountant="rdp")
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            run = Attempts(book, f"{number:032x}")
            for index in range(4):
                run.done(index)
                assert book.spent(run.run, "clinical", delta=DELTA, accountant="rdp") > 0
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    assert verified(book).counts["epoch"] == 16
    total = book.total("clinical", delta=DELTA, accountant="rdp")
    assert [each.steps for each in total.runs] == [40] * 4
    assert stated(book)["clinical"] == nano_epsilon(total.spent)


def test_a_ledger_that_was_restored_from_a_copy_is_made_whole_by_booking_again(place: Path) -> None:
    """What receipts hold is charged and recorded again, in its order; what the copy has stays as it is."""
    book = open_book(place, accountant="rdp")
    Attempts(book).done(0)
    assert Attempts(book).charge(1)
    book.ledger.close()
    copy = place.read_bytes()
    run = Attempts(open_book(place, accountant="rdp"))
    run.record(1)
    run.done(2)
    assert run.charge(3)
    expected = run.book.total("clinical", delta=DELTA, accountant="rdp")
    run.book.ledger.close()
    place.write_bytes(copy)
    run = Attempts(open_book(place, accountant="rdp"))
    assert run.book.total("clinical", delta=DELTA, accountant="rdp").spent < expected.spent
    for _ in range(2):
        for index in range(4):
            assert run.charge(index, bounds={"clinical": 0.0}, already=True)
            if index < 3:
                run.record(index)
        assert run.book.total("clinical", delta=DELTA, accountant="rdp") == expected
    assert verified(run.book).counts["epoch"] == 3


def test_who_was_overtaken_records_after_the_other(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading and appending another run is quicker, three times over; the figures are of after it."""
    book, quick = open_book(place, accountant="rdp"), open_book(place, accountant="rdp")
    slow, others = Attempts(book), [Attempts(quick, f"{n:032x}") for n in range(3)]
    for each in (slow, *others):
        assert each.charge(0)
    append, calls = book.ledger.append_with, []

    def late(*given: Any) -> list[int]:
        calls.append(given)
        if others:
            others.pop().record(0)
        return append(*given)

    monkeypatch.setattr(book.ledger, "append_with", late)
    assert slow.record(0) == 4
    assert len(calls) == 4
    verified(book)
    spends = [account.spend for epoch in epochs(book.ledger) for account in epoch.accounts[:1]]
    assert spends == sorted(spends) and len(set(spends)) == 4


def test_of_two_that_record_the_same_attempt_one_writes_the_leaf(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book, quick = Attempts(open_book(place, accountant="rdp")), Attempts(open_book(place, accountant="rdp"))
    assert book.charge(0)
    append = book.book.ledger.append_with

    def late(*given: Any) -> list[int]:
        quick.record(0)
        return append(*given)

    monkeypatch.setattr(book.book.ledger, "append_with", late)
    assert book.record(0) == 1
    assert verified(book.book).counts["epoch"] == 1


# --------------------------------------------------------------------------------------- kills


def kill_and_look(path: Path, chance: random.Random) -> None:
    """Kill a process that books without pause; nothing that it was told is lost, nothing is half there."""
    open_book(path, accountant="rdp").ledger.close()
    run = f"{chance.getrandbits(128):032x}"
    every = [each.times(10_000) for each in plan_charges(plan(), 0, 1)]

    def work(_: int, end: Connection) -> None:
        mine = Attempts(open_book(path, accountant="rdp"), run)
        mine.book.reserve(run, charges=every, bounds={"clinical": 1e6, "wearable": 1e6})
        for generation in range(1_000):
            assert mine.charge(0, generation)
            end.send((generation, False))
            mine.record(0, generation)
            end.send((generation, True))

    ((child, end),) = start(work, 1)
    told = (-1, True)
    for _ in range(chance.randrange(1, 9)):
        told = end.recv()
    time.sleep(chance.random() * 0.01)  # a booking takes 1 to 10 ms
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    try:
        while True:
            told = end.recv()
    except EOFError:
        pass
    with open_book(path, accountant="rdp").ledger as ledger:
        mine = Attempts(SpendLedger(ledger), run)
        generation, recorded = told
        for name in ("clinical", "wearable"):
            runs = mine.book.total(name, delta=DELTA, accountant="rdp").runs
            (found,) = (each for each in runs if each.run == run)
            assert found.steps // 10 - 1 in ((generation, generation + 1) if recorded else (generation,))
            assert found.steps + found.reserved == 10_000
        assert not recorded or mine.book.recorded(run, 0, generation)
        assert not mine.book.recorded(run, 0, generation + 1)
        before = mine.book.total("clinical", delta=DELTA, accountant="rdp").spent
        if generation >= 0:  # the one that was killed may ask again
            assert mine.charge(0, generation)
            mine.record(0, generation)
        assert mine.book.total("clinical", delta=DELTA, accountant="rdp").spent == before
        assert mine.charge(0, generation + 1)
        mine.record(0, generation + 1)
        mine.book.finish(run)
        verified(mine.book)


def test_a_kill_at_any_instant_leaves_a_consistent_book(place: Path) -> None:
    chance = random.Random(7)
    for _ in range(5):
        kill_and_look(place, chance)


@pytest.mark.slow
def test_many_kills(place: Path) -> None:
    chance = random.Random(11)
    for _ in range(50):
        kill_and_look(place, chance)


# --------------------------------------------------------------------------------------- a server


def test_a_server_that_restarts_between_charge_and_record_is_waited_for(server: Any) -> None:
    where = server.url(f"restarted_{os.getpid()}")
    with open_book(where, accountant="rdp").ledger as ledger:
        run = Attempts(SpendLedger(ledger))
        assert run.charge(0)
        server.stop("immediate")
        starter = FORK.Process(target=lambda: (time.sleep(0.5), server.start()))
        starter.start()
        assert run.record(0) == 1
        starter.join(60)
        assert starter.exitcode == 0
        server.stop("immediate")
        server.start()
        assert run.charge(0)  # the same once more
        assert run.charge(1)
        run.record(1)
        assert verified(run.book).counts["epoch"] == 2
        assert run.book.total("clinical", delta=DELTA, accountant="rdp").runs[0].steps == 20
