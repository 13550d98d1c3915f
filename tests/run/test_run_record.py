"""The private files of a run: durable, honest about damage, and rid of seeds that nobody needs."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from forked import failing, kill
from hypothesis import given
from hypothesis import strategies as st
from open_charges import opened
from refusals import raises_code

from lamina.errors import EncodingError, StorageError
from lamina.ledger.records import SegmentOutcome
from lamina.run.run_record import AttemptFile, AttemptOpened, Receipts, RunIdentity, has_begun

FIRST = opened(0)
SECOND = opened(1, 3)


def without_seed(attempt: AttemptOpened | None) -> AttemptOpened:
    assert attempt is not None
    return replace(attempt, seed=b"")


def written(folder: Path, attempt: AttemptOpened = FIRST) -> AttemptFile:
    file = AttemptFile(folder)
    file.write(attempt, bytes(16))
    return file


def test_the_record_of_a_run_reads_back(tmp_path: Path) -> None:
    assert not has_begun(tmp_path)
    made = RunIdentity.begin(tmp_path, "tests", bytes(32))
    assert has_begun(tmp_path) and RunIdentity.read(tmp_path) == made and made.ended is None
    replace(made, ended=(24, "complete")).write(tmp_path)
    assert RunIdentity.read(tmp_path).ended == (24, "complete")
    assert (tmp_path / "run.cbor").stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["run.cbor"]
    (tmp_path / "run.cbor").write_bytes(b"\xa0")
    with raises_code("train.run-record-damaged"):
        RunIdentity.read(tmp_path)


def test_an_attempt_reads_back_with_its_seed(tmp_path: Path) -> None:
    assert AttemptFile(tmp_path).opened is None and AttemptFile(tmp_path).latest == (bytes(16),)
    written(tmp_path)
    read = AttemptFile(tmp_path)
    assert read.opened == FIRST and read.opened.seed == FIRST.seed
    assert read.latest == (FIRST.nonce, bytes(16)) and not read.erased and not read.refused
    assert (tmp_path / "attempt").stat().st_mode & 0o777 == 0o600


def test_an_erased_seed_is_nowhere(tmp_path: Path) -> None:
    """An attempt that ended is the latest; one that was never charged leaves the one before it."""
    file = written(tmp_path)
    assert FIRST.seed in (tmp_path / "attempt").read_bytes()
    inode = (tmp_path / "attempt").stat().st_ino
    file.erase()
    assert FIRST.seed not in (tmp_path / "attempt").read_bytes()
    assert (tmp_path / "attempt").stat().st_ino == inode  # overwritten where it lay
    read = AttemptFile(tmp_path)
    assert read.erased and read.latest == (FIRST.nonce,) and without_seed(read.opened) == without_seed(FIRST)
    read.write(SECOND, FIRST.nonce)
    read.erase(refused=True)
    read = AttemptFile(tmp_path)
    assert read.refused and read.latest == (FIRST.nonce,) and SECOND.seed not in (tmp_path / "attempt").read_bytes()
    read.erase()  # it was never charged, whatever comes later
    assert AttemptFile(tmp_path).refused


def test_nothing_prints_a_seed(tmp_path: Path) -> None:
    assert FIRST.seed.hex() not in repr(FIRST) and repr(FIRST.seed) not in repr(FIRST)
    entry = {"attempt": replace(FIRST, seed=b"").to_plain()}
    Receipts(tmp_path).add(entry)
    assert FIRST.seed not in (tmp_path / "receipts").read_bytes()


def test_every_flipped_byte_is_found_or_costs_the_seed(tmp_path: Path) -> None:
    """A slot with a wrong check value has no seed: the attempt is abandoned, and never drawn from other coins."""
    written(tmp_path)
    path = tmp_path / "attempt"
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        try:
            read = AttemptFile(tmp_path)
        except StorageError as error:
            assert error.code == "train.run-record-damaged" and str(path) in error.problem
            assert not 4 <= place < 44
        else:
            assert 4 <= place < 44 and read.erased and without_seed(read.opened) == without_seed(FIRST)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "attempt"
    data = path.read_bytes()
    for length in (*range(90), len(data) - 1):
        path.write_bytes(data[:length])
        with raises_code("train.run-record-damaged"):
            AttemptFile(tmp_path)


@given(data=st.binary(max_size=200))
def test_bytes_that_nobody_wrote_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("nobody")
    for name in ("attempt", "run.cbor"):
        (folder / name).write_bytes(data)
    with raises_code("train.run-record-damaged"):
        AttemptFile(folder)
    with raises_code("train.run-record-damaged"):
        RunIdentity.read(folder)
    (folder / "receipts").write_bytes(data)
    assert Receipts(folder).entries == []


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_leaves_the_attempt_as_it_was(tmp_path: Path, call: str, error: int) -> None:
    file = written(tmp_path)
    file.erase()
    before = (tmp_path / "attempt").read_bytes()
    with failing(call, error), pytest.raises(StorageError) as refused:
        file.write(SECOND, FIRST.nonce)
    assert refused.value.code == "train.storage-failed" and refused.value.remedy
    assert (tmp_path / "attempt").read_bytes() == before and AttemptFile(tmp_path).latest == (FIRST.nonce,)
    assert file.latest == (FIRST.nonce,)


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_seed_that_cannot_be_erased_is_told(tmp_path: Path, call: str) -> None:
    file = written(tmp_path)
    with failing(call, errno.EIO), pytest.raises(StorageError) as refused:
        file.erase()
    assert "cannot erase the seed" in refused.value.problem and not file.erased
    file.erase()
    assert AttemptFile(tmp_path).erased


def test_killed_at_any_instant_a_whole_attempt_is_there(tmp_path: Path) -> None:
    """Each attempt names the one before it: none is skipped, and no seed but the newest is in the file."""
    written(tmp_path)
    for round_ in range(4):
        child = os.fork()
        if child == 0:
            try:
                file = AttemptFile(tmp_path)
                assert file.opened is not None
                for segment in range(file.opened.segment + 1, 10_000):
                    nonce = file.opened.nonce
                    file.erase()
                    file.write(opened(segment), nonce)
            finally:
                os._exit(1)
        time.sleep(0.01 * (round_ + 1))
        kill(child)
        read = AttemptFile(tmp_path)
        assert read.opened is not None and read.opened == replace(opened(read.opened.segment), seed=read.opened.seed)
        assert read.opened.seed in (b"", opened(read.opened.segment).seed)
        assert read.prev == (opened(read.opened.segment - 1).nonce if read.opened.segment else bytes(16))
        assert (
            opened(max(0, read.opened.segment - 1)).seed not in (tmp_path / "attempt").read_bytes()
            or read.opened == FIRST
        )


def ended(segment: int) -> dict[str, object]:
    attempt = opened(segment)
    return {"attempt": replace(attempt, seed=b"", outcome=SegmentOutcome.CLOSED).to_plain()}


def receipt(segment: int) -> dict[str, object]:
    """As a run writes it: what the ledger says, without inputs."""
    ours = ("settings", "membership", "checkpoint", "data", "world_size", "threads", "code", "seed")
    (plain,) = ended(segment).values()
    assert isinstance(plain, dict)
    return {"attempt": {name: value for name, value in plain.items() if name not in ours}}


def test_receipts_read_back_and_none_is_written_twice(tmp_path: Path) -> None:
    receipts = Receipts(tmp_path)
    receipts.add(receipt(0), receipt(1))
    receipts.add(receipt(1), receipt(2))
    read = Receipts(tmp_path)
    assert read.entries == receipts.entries == [receipt(0), receipt(1), receipt(2)]
    assert [each.key for each in read.attempts] == [opened(n).key for n in range(3)]
    assert all(each.outcome is SegmentOutcome.CLOSED for each in read.attempts)
    assert (tmp_path / "receipts").stat().st_mode & 0o777 == 0o600


def test_a_torn_tail_is_ignored_and_overwritten(tmp_path: Path) -> None:
    Receipts(tmp_path).add(receipt(0), receipt(1))
    path = tmp_path / "receipts"
    whole = path.read_bytes()
    first = len(whole) // 2
    for length in range(first + 1, len(whole), 37):
        path.write_bytes(whole[:length])
        read = Receipts(tmp_path)
        assert read.entries == [receipt(0)]
        read.add(receipt(1), receipt(2))
        assert Receipts(tmp_path).entries == [receipt(0), receipt(1), receipt(2)]


def test_receipts_that_say_something_else_are_refused(tmp_path: Path) -> None:
    Receipts(tmp_path).add({"attempt": {"nonce": b"x"}})
    with raises_code("train.run-record-damaged"):
        _ = Receipts(tmp_path).attempts


def test_a_value_that_has_no_encoding_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = written(tmp_path)
    before = (tmp_path / "attempt").read_bytes()
    with pytest.raises(EncodingError):
        file.write(replace(SECOND, variance=(float("nan"),)), FIRST.nonce)
    assert (tmp_path / "attempt").read_bytes() == before
