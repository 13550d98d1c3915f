"""The state beside a key: two processes never replace a newer one by an older one, and a folder that cannot be written."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from asking import Call, asker, succeeded
from making import admitted, create, key

from lamina.ledger import newest_state
from lamina.ledger.newest_state import NewestState, NewestStateFile


@pytest.mark.parametrize(("first", "second"), [(10, 20), (20, 10)])
def test_of_two_that_write_at_once_the_newer_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int
) -> None:
    """One has read the file and not written it yet when the other begins."""
    key("ledger").save(tmp_path / "ledger.key", None)
    file = NewestStateFile(tmp_path / "ledger.key", bytes(32))
    reached, write = threading.Event(), newest_state.replace_file

    def slow(*given: Any, **more: Any) -> None:
        if not reached.is_set():
            reached.set()
            threading.Event().wait(0.4)
        write(*given, **more)

    monkeypatch.setattr(newest_state, "replace_file", slow)
    one = threading.Thread(target=file.keep, args=(NewestState({first: bytes(32)}),))
    one.start()
    assert reached.wait(10)
    assert NewestStateFile(tmp_path / "ledger.key", bytes(32)).keep(NewestState({second: bytes(32)})) is None
    one.join(10)
    assert set(file.load().trees) == ({first, second} if first < second else {first})


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    return asker(capsys, "ledger")


def test_a_state_that_cannot_be_written_gives_a_note(call: Call, tmp_path: Path) -> None:
    """The name of the key leaves no room for a new file beside it; root may write to every folder."""
    with create(str(tmp_path / "a.db"), time.time) as ledger:
        ledger.append([admitted(1, not_before=0, expires=2**32)])
    key("ledger").save(tmp_path / ("k" * 220), None)
    for command in ("checkpoint", "heartbeat"):
        result = call(command, "a.db", "--key", "k" * 220)
        succeeded(result)
        assert "is not kept beside its key" in " ".join(result[2].split()) and "Traceback" not in result[2]
