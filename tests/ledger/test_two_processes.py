"""Processes that share a ledger and the state kept beside its key: none is refused, and none signs a second history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forks import in_processes
from keyless import contents, put_back
from making import START, Clock, admitted, create, digest, key
from open_charges import put_run
from refusals import raises_code

from lamina.ledger.governance_records import Withdrawal, WithdrawalReason
from lamina.ledger.newest_state import NewestStateFile
from lamina.ledger.retention import Retention
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """The key of the ledger in a file, beside which its newest state is kept."""
    path = tmp_path / "keys" / "ledger.key"
    path.parent.mkdir()
    key("ledger").save(path, None)
    return path


def opened(where: str, beside: Path, clock: Clock | None = None) -> Ledger:
    return Ledger.open(where, PrivateKey.load(beside, None), clock=clock or Clock())


def test_processes_that_race_on_the_state_beside_the_key(where: str, beside: Path) -> None:
    """Each appends, signs and changes open rows; afterwards the newest of all is kept."""
    with create(where, Clock()) as ledger:
        header = ledger.header_hash

    def worker(number: int) -> Callable[[], None]:
        def work() -> None:
            for n in range(4):
                with opened(where, beside) as ledger:
                    for m in range(2):
                        ledger.append([admitted(1000 * number + 10 * n + m)])
                        ledger.checkpoint()
                        run = digest(number, n, m)[:16]
                        ledger.change_open(lambda rows, run=run: put_run(rows, run, "x"))  # type: ignore[misc]
                    assert ledger.notes == []

        return work

    in_processes(*(worker(number) for number in range(3)))
    kept = NewestStateFile(beside, header).load()
    with opened(where, beside) as ledger, ledger.store.read() as rows:
        assert kept.size == ledger.size == 25
        assert kept.open == ledger.check_open(rows)
        assert len(rows.runs()) == 24


ACTS: dict[str, Callable[[Ledger], object]] = {
    "sign": lambda ledger: ledger.checkpoint(),
    "append": lambda ledger: ledger.append([admitted(9, expires=START + 10**6)]),
    "withdraw": lambda ledger: ledger.append([Withdrawal(target=1, reason=WithdrawalReason.DATA)]),
    "renew": lambda ledger: ledger.heartbeat(),
    "prune": lambda ledger: Retention(ledger).prune(Retention(ledger).propose()),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
def test_a_process_that_runs_does_not_sign_a_second_history(
    tmp_path: Path, beside: Path, act: Callable[[Ledger], object]
) -> None:
    """Another process appends and signs. The rows are put back to what the first one knows, which no process can see
    in the store; it must compare them with the state beside the key before it signs anything.
    """
    path, clock = str(tmp_path / "ledger.db"), Clock()
    create(path, clock).close()
    with opened(path, beside, clock) as slow:
        slow.append([admitted(n) for n in (1, 2)])
        slow.checkpoint()
        clock.now += 5000
        before = contents(path)
        with opened(path, beside, clock) as other:
            other.append([Withdrawal(target=2, reason=WithdrawalReason.CONSENT)])
            other.checkpoint()
        after = contents(path)
        put_back(path, before)
        with raises_code("ledger.older-than-kept"):
            act(slow)
        assert contents(path) == before
        put_back(path, after)
        slow.append([admitted(3, expires=START + 10**6)])
        slow.checkpoint()
        assert slow.withdrawals() == {2: 3}
