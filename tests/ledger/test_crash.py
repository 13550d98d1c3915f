"""kill -9 at any moment: head, rows and root agree, nothing acknowledged is lost, and work goes on."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import cuts
import postgres
import pytest
from making import START, Clock, admitted, create, header, reopen
from refusals import raises_code

from lamina.errors import LedgerError
from lamina.ledger.records import ContributionRecord
from lamina.ledger.writer import Ledger


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_append_checkpoint_and_prune(where: str, tmp_path: Path, kills: int) -> None:
    create(where, retention=60).close()
    acknowledged, coin = tmp_path / "acknowledged", random.Random(kills)
    for number in range(kills):
        # Between a commit and several rounds; often short, since a short time ends in a different place each time.
        pause = coin.choice([0.002, 0.02, 0.2]) * coin.random()
        cuts.kill_after(pause, lambda seed=number: cuts.work(where, acknowledged, seed), acknowledged)
        with reopen(where, Clock(START + 10**6)) as ledger:
            cuts.check(ledger, acknowledged)
    words = {line.split()[0] for line in acknowledged.read_text().splitlines()}
    assert words >= {"appended"}
    if kills == 100:
        assert words == {"appended", "signed", "pruned"}
    with reopen(where, Clock(START + 10**6)) as ledger:  # and it goes on
        size = ledger.size
        assert ledger.append([admitted(-1, expires=START + 2 * 10**6)]) == [size]
        ledger.checkpoint()


def test_killed_while_it_is_made(where: str, tmp_path: Path) -> None:
    """A creator that was killed leaves nothing, an empty store, or a ledger with its header; never less."""
    ready, coin = tmp_path / "ready", random.Random(0)

    def make(place: str) -> None:
        ready.write_text("x")
        create(place)
        time.sleep(60)

    for number in range(4):
        place = f"{where}_{number}"
        cuts.kill_after(0.04 * coin.random(), lambda place=place: make(place), ready)
        ready.unlink()
        try:
            ledger = create(place)
        except LedgerError as refused:
            assert refused.code == "ledger.already-exists"
            ledger = reopen(place)
            ledger.checkpoint()
        with ledger:
            assert ledger.size == 1
            assert ledger.header == header()
            assert ledger.latest() is not None


def test_a_server_that_crashes_is_waited_for(server: postgres.Server) -> None:
    """PostgreSQL is stopped as by a power cut, again and again, while a run appends: every batch is there once."""
    where = server.url("restarted")
    create(where).close()
    appended: list[int] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            with Ledger.open(where, clock=Clock(), patience=60) as ledger:
                number = 0
                while not done.is_set():
                    number += 1
                    appended.extend(ledger.append([admitted(10 * number + n) for n in range(10)]))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(3):
        time.sleep(0.3)
        server.stop("immediate")
        server.start()
    until = time.monotonic() + 60
    while len(appended) <= 30 and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)
    done.set()
    thread.join(60)
    assert not failed
    assert appended == list(range(1, len(appended) + 1))
    assert len(appended) > 30
    with reopen(where) as ledger:
        assert ledger.size == len(appended) + 1
        found = [leaf.record.descriptor for leaf in ledger.leaves(1) if isinstance(leaf.record, ContributionRecord)]
        assert found == [admitted(n).descriptor for n in range(10, 10 + len(appended))]
        assert ledger.root_at(ledger.size) == ledger.root


def test_a_server_that_stays_away_is_a_clean_stop(server: postgres.Server) -> None:
    where = server.url("away")
    create(where).close()
    with Ledger.open(where, clock=Clock(), patience=0.3) as ledger:
        ledger.append([admitted(1)])
        server.stop("immediate")
        try:
            with raises_code("store.server-lost"):
                ledger.append([admitted(2)])
        finally:
            server.start()
        assert ledger.append([admitted(2)]) == [2]  # the same object goes on
        assert ledger.size == 3
