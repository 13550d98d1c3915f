"""The journal: durable, honest about damage, and rid of seeds that nobody needs."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from disk import Recorder
from forked import as_nobody, failing, in_child, kill, refusal
from hypothesis import given
from hypothesis import strategies as st
from open_charges import charge, opened
from refusals import raises_code

from lamina import cbor
from lamina.account.charges import stored_charge
from lamina.errors import EncodingError, RunError, StorageError
from lamina.run import journal as frame
from lamina.run.journal import (
    AttemptAbandoned,
    AttemptClosed,
    AttemptOpened,
    Journal,
    JournalMoved,
    JournalRecord,
    NoiseApplied,
    RunEnded,
    RunStarted,
    from_body,
    to_body,
)

RUN, SALT = "0123456789abcdef" * 2, bytes(range(32))


def close(record: AttemptOpened) -> AttemptClosed:
    return AttemptClosed(
        segment=record.segment,
        generation=record.generation,
        nonce=record.nonce,
        checkpoint=bytes([record.segment]) * 32,
    )


def make(path: Path, *records: JournalRecord) -> Journal:
    journal = Journal.create(path, run=RUN, salt=SALT)
    for record in records:
        journal.append(record)
    return journal


def put(path: Path, data: bytes) -> None:
    """Give a file this content without emptying it first, which file systems make slow on purpose."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of journals in one test: what they promise about the disk is not its subject."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def bare(records: tuple[JournalRecord, ...]) -> list[JournalRecord]:
    """Records without their seeds."""
    return [dataclasses.replace(r, seed=b"") if isinstance(r, AttemptOpened) else r for r in records]


def story() -> list[JournalRecord]:
    """Two closed segments, attempts that were given up with and without a word, and one that is pending."""
    first, second, third, again = opened(0), opened(1), opened(2), opened(2, 1)
    return [first, close(first), second, close(second), third, again]


def given_up(record: AttemptOpened, *, charged: bool = True) -> AttemptAbandoned:
    return AttemptAbandoned(segment=record.segment, generation=record.generation, nonce=record.nonce, charged=charged)


# ---------------------------------------------------------------------------------------------------- what it says


def test_a_journal_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    end = [JournalMoved(place=5), RunEnded(steps=100, reason="the plan's steps")]
    journal = make(path, *story(), *end)
    read = Journal.load(path)
    assert read.records == journal.records
    assert bare(read.records[1:]) == bare((*story(), *end))
    assert read.start == RunStarted(run=RUN, salt=SALT, place=path.stat().st_ino)
    assert [(o.segment, o.generation) for o in read.opens] == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert [read.closed(o) for o in read.opens] == [True, True, False, False]
    assert read.pending == opened(2, 1)  # its seed included
    assert path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["journal"]


def test_what_is_pending_and_what_is_done(tmp_path: Path) -> None:
    first, other = opened(0), opened(0, nonce=bytes(16))
    journal = make(tmp_path / "journal")
    assert journal.pending is None and journal.done is None and not journal.copied
    journal.append(first)
    assert journal.pending == first and not journal.closed(other)
    journal.append(close(first))
    assert journal.pending is None and journal.closed(first) and not journal.closed(other)
    end = RunEnded(steps=50, reason="bounds")
    journal.append(end)
    assert journal.done == end
    journal.append(opened(1))
    assert journal.done is None and Journal.load(journal.path).done is None


@pytest.mark.parametrize("charged", [True, False])
def test_an_attempt_that_was_given_up_loses_its_seed_for_good(tmp_path: Path, charged: bool) -> None:
    first, second = opened(0), opened(0, 1, seed=bytes(range(100, 132)))
    journal = make(tmp_path / "journal", first)
    journal.append(given_up(first, charged=charged))
    assert first.seed not in journal.path.read_bytes()
    for seen in (journal, Journal.load(journal.path)):
        assert seen.pending is None and not seen.closed(first)
        assert seen.uncharged(first) is not charged
    for record in (close(first), given_up(first), given_up(second)):
        with raises_code("train.journal-order"):
            journal.append(record)
    journal.append(second)
    assert Journal.load(journal.path).pending == second
    data = bytearray(journal.path.read_bytes())
    at = data.index(b"gcharged") + 8  # the flag that says whether it was paid
    data[at] ^= 1
    journal.path.write_bytes(data)
    with pytest.raises(StorageError):
        Journal.load(journal.path)


def test_records_come_in_order(tmp_path: Path) -> None:
    first = opened(0)
    journal = make(tmp_path / "journal", first)
    size = journal.path.stat().st_size
    wrong: list[JournalRecord] = [
        journal.start,
        opened(0),
        close(opened(0, nonce=bytes(16))),
        close(opened(0, 1)),
        close(opened(1)),
    ]
    for record in wrong:
        with pytest.raises(RunError) as caught:
            journal.append(record)
        assert caught.value.remedy and not isinstance(caught.value, StorageError)
    with raises_code("train.journal-record-invalid"):
        journal.append(opened(1, seed=b""))
    assert journal.path.stat().st_size == size
    journal.append(close(first))
    with pytest.raises(RunError):
        journal.append(close(first))


def test_a_run_may_go_back_to_earlier_segments(tmp_path: Path) -> None:
    """A damaged checkpoint was removed: its segments are done, and charged, again."""
    journal = make(tmp_path / "journal")
    for segment, generation in [(0, 0), (1, 0), (2, 0), (0, 1), (1, 3), (2, 1), (3, 0)]:
        journal.append(opened(segment, generation))
        journal.append(close(opened(segment, generation)))
    for segment, generation in [(0, 1), (1, 2), (3, 0)]:
        with raises_code("train.journal-order"):
            journal.append(opened(segment, generation))
    assert Journal.load(journal.path).records == journal.records


def test_a_copy_is_noticed_and_a_move_is_not(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    make(path, opened(0))
    copy = tmp_path / "copy"
    shutil.copy(path, copy)
    assert not Journal.load(path).copied
    journal = Journal.load(copy)
    assert journal.copied
    journal.append(JournalMoved(place=journal.place))
    assert not journal.copied and not Journal.load(copy).copied
    os.rename(copy, tmp_path / "elsewhere")
    assert not Journal.load(tmp_path / "elsewhere").copied
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o600


def test_a_copy_under_an_ordinary_umask_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    make(path, opened(0))
    path.chmod(0o644)
    Journal.load(path)
    assert path.stat().st_mode & 0o777 == 0o600


# ---------------------------------------------------------------------------------------------------- seeds


def test_only_the_pending_seed_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = make(path)
    seeds: list[bytes] = []
    for record in story():
        journal.append(record)
        if isinstance(record, AttemptOpened):
            seeds.append(record.seed)
        data = path.read_bytes()
        pending = journal.pending
        assert [seed in data for seed in seeds] == [bool(pending) and seed == pending.seed for seed in seeds]
        assert [o.seed for o in journal.opens if o is not pending] == [b""] * (len(seeds) - bool(pending))


def test_nothing_prints_a_seed(tmp_path: Path) -> None:
    record = opened(0, seed=b"S" * 32)
    journal = make(tmp_path / "journal", record)
    shown = (
        repr(record) + repr(journal.records) + str(record) + repr(journal) + repr(frame.encode_frame(record, 0, b"")[1])
    )
    assert "SSSS" not in shown and (b"S" * 32).hex() not in shown and "nonce" in shown


@pytest.mark.parametrize("closing", [True, False])
def test_a_crash_before_the_erasure_is_made_good_by_the_next_load(tmp_path: Path, closing: bool) -> None:
    path, first = tmp_path / "journal", opened(0)
    with mock.patch.object(Journal, "_erase"):
        make(path, first, close(first) if closing else opened(0, 1))
    assert first.seed in path.read_bytes()
    journal = Journal.load(path)
    assert first.seed not in path.read_bytes() and journal.opens[0].seed == b""
    assert journal.pending == (None if closing else opened(0, 1))
    assert Journal.load(path).records == journal.records


@pytest.mark.parametrize("closing", [True, False])
def test_a_half_erased_seed_is_erased_and_a_damaged_one_is_told(tmp_path: Path, closing: bool) -> None:
    path, first = tmp_path / "journal", opened(0)
    with mock.patch.object(Journal, "_erase"):
        make(path, first, *([close(first)] if closing else []))
    data = path.read_bytes()
    at = data.index(first.seed)
    path.write_bytes(data.replace(first.seed, bytes(16) + first.seed[16:]))
    if closing:
        assert Journal.load(path).pending is None
        assert path.read_bytes()[at : at + 40] == bytes(40)
    else:
        with raises_code("train.journal-damaged"):
            Journal.load(path)
        path.write_bytes(data.replace(data[at : at + 40], bytes(40)))
        assert Journal.load(path).pending == dataclasses.replace(first, seed=b"")


def test_a_seed_that_cannot_be_erased_is_told_and_the_record_stands(tmp_path: Path) -> None:
    path, first = tmp_path / "journal", opened(0)
    journal = make(path, first)
    with failing("fsync", errno.EIO, nth=3), raises_code("train.storage-failed") as caught:
        journal.append(close(first))
    assert first.seed.hex() not in refusal(caught.value, path)
    assert journal.closed(first) and Journal.load(path).closed(first)


# ---------------------------------------------------------------------------------------------------- damage


@pytest.mark.usefixtures("no_sync")
def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = make(path, *story()[2:])
    data, records = path.read_bytes(), journal.records
    erased = data.count(bytes(40))
    seen = 0
    for at in range(len(data)):
        for mask in (1 << at % 8, 0xFF)[: 1 + (at % 4 == 0)]:
            put(path, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
            try:
                read = Journal.load(path)
            except StorageError as error:
                assert "byte " in refusal(error, path)
            else:  # in a slot that was erased: it is erased again, and nothing is lost
                assert read.records == records and path.read_bytes() == data
                seen += mask != 0xFF
    assert erased == 2 and seen == 2 * 40


@pytest.mark.usefixtures("no_sync")
def test_cut_anywhere_the_whole_records_are_there_and_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.create(path, run=RUN, salt=SALT)
    ends = [path.stat().st_size]
    for record in story()[2:]:
        journal.append(record)
        ends.append(path.stat().st_size)
    data, records = path.read_bytes(), bare(journal.records)
    for length in range(len(data)):
        put(path, data[:length])
        if length < ends[0]:
            with raises_code("train.journal-damaged"):
                Journal.load(path)
            continue
        whole = sum(end <= length for end in ends)
        read = Journal.load(path)
        assert bare(read.records) == records[:whole]
        if length % 17 == 0:  # the tail is cut by the next append
            read.append(JournalMoved(place=7))
            assert bare(Journal.load(path).records) == [*records[:whole], JournalMoved(place=7)]


@pytest.mark.parametrize("tail", [b"\0" * 3, bytes(700), b"\x17" * 50, b"LMJ1", b"LMJ1" + bytes(60), b"LMJ9" * 30])
def test_a_tail_that_was_never_acknowledged_is_ignored(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "journal"
    journal = make(path, opened(0))
    with open(path, "ab") as file:
        file.write(tail)
    read = Journal.load(path)
    assert read.records == journal.records
    read.append(close(opened(0)))
    assert Journal.load(path).records == read.records and tail not in path.read_bytes()[-len(tail) :]


@given(st.binary(max_size=300))
def test_bytes_that_nobody_wrote_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "nobody's journal"
    path.touch()
    for start in (b"", b"LMJ1", b"LMJ1\x01\x00\x00\x00\x10"):
        for end in (b"", frame.DURABLE_MARK):
            put(path, start + data + end)
            with raises_code("train.journal-damaged"):
                Journal.load(path)


def test_frames_cannot_be_lost_doubled_or_exchanged(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = [0]
    journal = Journal.create(path, run=RUN, salt=SALT)
    ends.append(path.stat().st_size)
    for step in range(4):
        journal.append(JournalMoved(place=step))
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    parts = [data[a:b] for a, b in itertools.pairwise(ends)]
    for order in ([0, 2, 3, 4], [0, 1, 3], [0, 1, 1, 2], [0, 2, 1, 3, 4], [1, 2, 3], [0, 0, 1]):
        path.write_bytes(b"".join(parts[i] for i in order))
        with raises_code("train.journal-damaged"):
            Journal.load(path)


def seal(path: Path, kind: int, body: bytes, *, version: bytes = b"1") -> None:
    """Append a frame as a writer of another mind would: acknowledged, with a right checksum."""
    data = path.read_bytes()
    length = len(data)
    chain = Journal.load(path)._chain
    checksum = frame._frame_checksum(chain, kind, body)
    head = b"LMJ" + version + bytes([kind]) + len(body).to_bytes(4, "big") + checksum + body
    path.write_bytes(data + head + bytes(-(length + len(head)) % 16) + frame.DURABLE_MARK)


def test_a_record_of_a_later_version_is_told(tmp_path: Path) -> None:
    for kind, body, version, words in [
        (4, cbor.encode({"train.journal-damaged": 1}), b"2", "train.journal-damaged"),
        (9, cbor.encode({"train.journal-damaged": 1}), b"1", "train.journal-damaged"),
        (4, cbor.encode({"train.journal-damaged": 1, "why": "x"}), b"1", "train.journal-damaged"),
        (4, cbor.encode({"train.journal-damaged": -1}), b"1", "train.journal-damaged"),
        (4, cbor.encode([1]), b"1", "train.journal-damaged"),
        (4, b"\xff", b"1", "train.journal-damaged"),
        (1, to_body(RunStarted(run=RUN, salt=SALT, place=1))[1], b"1", "train.journal-damaged"),
        (3, to_body(close(opened(4)))[1], b"1", "train.journal-damaged"),
    ]:
        path = tmp_path / "journal"
        path.unlink(missing_ok=True)
        size = make(path).path.stat().st_size
        seal(path, kind, body, version=version)
        with raises_code(words) as caught:
            Journal.load(path)
        assert f"byte {size}" in refusal(caught.value, path)


# ---------------------------------------------------------------------------------------------------- crashes


@pytest.mark.usefixtures("no_sync")
def test_power_lost_at_any_instant(tmp_path: Path) -> None:
    """After any crash it reads, holds all that was acknowledged and at most one record more, and only its seeds."""
    path = tmp_path / "journal"
    wide = [dataclasses.replace(r, code="v" * 900) if isinstance(r, AttemptOpened) else r for r in story()]
    journal = make(path)
    recorder = Recorder(path)
    acknowledged = [(0, 1)]  # events so far, records so far
    with recorder.running():
        for record in wide:
            journal.append(record)
            acknowledged.append((len(recorder.events), len(journal.records)))
    everything = bare(journal.records)
    rng = random.Random(3)
    torn = 0
    for happened in range(len(recorder.events) + 1):
        least = max(count for events, count in acknowledged if events <= happened)
        for image_number in range(12):
            put(path, image := recorder.after_crash(happened, rng))
            read = Journal.load(path)
            count = len(read.records)
            assert least <= count <= least + 1 and bare(read.records) == everything[:count]
            pending = read.pending
            if pending is not None:
                assert pending.seed == next(
                    o.seed for o in wide if isinstance(o, AttemptOpened) and o.key == pending.key
                )
            torn += len(image) > read._end
            if image_number < 3:  # and the run goes on
                for record in wide[count - 1 :]:
                    read.append(record)
                assert read.records == journal.records == Journal.load(path).records
    assert torn > 50


def test_killed_at_any_instant_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    path, told = tmp_path / "journal", tmp_path / "told"
    make(path)
    told.write_text("-1")
    for round_ in range(6):
        child = os.fork()
        if child == 0:
            try:
                journal = Journal.load(path)
                for segment in range(len(journal.opens), 10_000):
                    record = opened(segment)
                    journal.append(record)
                    journal.append(close(record))
                    told.write_text(str(segment))
            finally:
                os._exit(1)
        time.sleep(0.01 * (round_ + 1))
        kill(child)
        journal = Journal.load(path)
        done = [o.segment for o in journal.opens if journal.closed(o)]
        assert done == list(range(len(done))) and len(done) > int(told.read_text() or 0)
        if journal.pending is not None:
            assert journal.pending == opened(len(done))
            journal.append(close(journal.pending))
        data = path.read_bytes()  # an Open that was not acknowledged has a seed that nobody used
        assert not any(opened(o.segment).seed in data for o in journal.opens)


def test_a_killed_creation_leaves_no_journal_or_a_whole_one(tmp_path: Path) -> None:
    def at(name: str, nth: int) -> Callable[[], None]:
        def work() -> None:
            with failing(name, 0, nth=nth) as patched:
                patched.side_effect = _killed_at(getattr(os, name), nth, patched)
                make(tmp_path / "journal")

        return work

    for name, nth in (("open", 1), ("write", 1), ("fsync", 1), ("link", 1), ("unlink", 1), ("fsync", 2)):
        child = os.fork()
        if child == 0:
            try:
                at(name, nth)()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        if (tmp_path / "journal").exists():
            assert Journal.load(tmp_path / "journal").records[0] == Journal.load(tmp_path / "journal").start
            os.unlink(tmp_path / "journal")
    make(tmp_path / "journal")
    assert os.listdir(tmp_path) == ["journal"]  # what the killed ones left is swept


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("call", "nth", "error"),
    [
        ("open", 1, errno.EROFS),
        ("ftruncate", 1, errno.EIO),
        ("write", 1, errno.ENOSPC),
        ("write", 2, errno.ENOSPC),
        ("fsync", 1, errno.EIO),
        ("fsync", 2, errno.EIO),
    ],
)
def test_a_failed_append_leaves_the_journal_as_it_was(tmp_path: Path, call: str, nth: int, error: int) -> None:
    path, first = tmp_path / "journal", opened(0)
    journal = make(path, first)
    data = path.read_bytes()
    with failing(call, error, nth=nth), pytest.raises(StorageError) as caught:
        journal.append(close(first))
    text = refusal(caught.value, path)
    assert os.strerror(error) in text and "earlier records are in it, the last one is not" in text
    assert path.read_bytes() == data and journal.pending == first
    journal.append(close(first))
    assert Journal.load(path).records == journal.records and journal.pending is None


def test_a_journal_that_cannot_be_brought_back_takes_no_more(tmp_path: Path) -> None:
    path, first = tmp_path / "journal", opened(0)
    journal = make(path, first)
    with failing("fsync", errno.EIO, nth=2, forever=True), raises_code("train.storage-failed"):
        journal.append(close(first))
    with raises_code("train.journal-state-unknown"):
        journal.append(close(first))
    read = Journal.load(path)
    assert bare(read.records)[:2] == bare(journal.records)
    if read.pending:
        read.append(close(first))
    assert read.closed(first)


def test_a_full_disk_in_earnest(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = make(path, opened(0))
    data = path.read_bytes()

    def work() -> None:
        limit = len(data) + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        journal.append(opened(1))

    answer = in_child(work)
    assert answer.startswith("StorageError") and "free space" in answer and str(path) in answer
    assert path.read_bytes() == data


def test_a_read_only_folder_in_earnest(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    first = opened(0)
    make(folder / "journal", first)
    data = (folder / "journal").read_bytes()
    (folder / "journal").chmod(0o400)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.chown(folder / "journal", 65534, 65534)

    def extend() -> None:
        Journal.load(Path("journal")).append(close(first))

    for work in (extend, lambda: Journal.create(Path("other"), run=RUN, salt=SALT)):
        answer = in_child(lambda work=work: as_nobody(folder, work))
        assert answer.startswith("StorageError") and "writable" in answer
    folder.chmod(0o755)
    assert (folder / "journal").read_bytes() == data and os.listdir(folder) == ["journal"]


def test_a_journal_is_never_made_over_another(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    make(path, opened(0))
    data = path.read_bytes()
    with raises_code("train.storage-failed") as caught:
        Journal.create(path, run=RUN, salt=SALT)
    refusal(caught.value, path)
    assert path.read_bytes() == data and os.listdir(tmp_path) == ["journal"]


def test_what_somebody_else_wrote_meanwhile_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    mine = make(path, opened(0))
    Journal.load(path).append(close(opened(0)))
    data = path.read_bytes()
    with raises_code("train.journal-changed") as caught:
        mine.append(opened(0, 1))
    refusal(caught.value, path)
    assert path.read_bytes() == data
    shutil.copy(path, tmp_path / "copy")
    theirs = Journal.load(path)
    os.replace(tmp_path / "copy", path)
    with raises_code("train.journal-changed"):
        theirs.append(opened(1))


def test_what_is_not_there_or_no_file_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StorageError) as caught:
            Journal.load(path)
        refusal(caught.value, path)


# ---------------------------------------------------------------------------------------------------- records

digests = st.binary(min_size=32, max_size=32)
numbers = st.integers(0, 2**64 - 1)
finite = st.floats(allow_nan=False)
charges = st.builds(
    stored_charge,
    cls=st.text(st.characters(exclude_characters="@")),
    sigma=st.floats(min_value=0, exclude_min=True),
    q=st.floats(0, 1),
    steps=numbers,
    delta=finite,
    accountant=st.text(),
)
nonces = st.binary(min_size=16, max_size=16)
opens = st.builds(
    lambda span, **fields: AttemptOpened(first=min(span), last=max(span), **fields),
    span=st.tuples(numbers, numbers),
    segment=numbers,
    generation=numbers,
    nonce=nonces,
    plan=digests,
    settings=digests,
    membership=digests,
    checkpoint=digests,
    data=digests,
    eligibility=numbers,
    variance=st.lists(finite, max_size=3).map(tuple),
    scales=st.dictionaries(st.text(), finite, max_size=3),
    world_size=numbers,
    threads=numbers,
    code=st.text(),
    charges=st.lists(charges, max_size=3).map(tuple),
    seed=digests,
)
names = st.text(alphabet="0123456789abcdef", min_size=32, max_size=32)
any_record = st.one_of(
    opens,
    st.builds(RunStarted, run=names, salt=digests, place=numbers),
    st.builds(AttemptClosed, segment=numbers, generation=numbers, nonce=nonces, checkpoint=digests),
    st.builds(AttemptAbandoned, segment=numbers, generation=numbers, nonce=nonces, charged=st.booleans()),
    st.builds(
        NoiseApplied,
        segment=numbers,
        generation=numbers,
        nonce=nonces,
        steps=st.lists(numbers, max_size=3).map(tuple),
        variance=st.lists(st.lists(finite, max_size=3).map(tuple), max_size=3).map(tuple),
    ),
    st.builds(JournalMoved, place=numbers),
    st.builds(RunEnded, steps=numbers, reason=st.text()),
)


@given(any_record)
def test_a_record_reads_back_without_its_seed(record: JournalRecord) -> None:
    kind, body = to_body(record)
    assert [from_body(kind, body)] == bare((record,))
    data, written = frame.encode_frame(record, 32, b"c" * 32)
    whole = bytes(32) + data[:-16] + frame.DURABLE_MARK
    assert (
        frame.decode_frame(whole, 32, b"c" * 32) == written and written.record == record and written.end == len(whole)
    )


@given(st.integers(0, 10), st.binary(max_size=200))
def test_a_body_that_nobody_wrote_is_refused(kind: int, body: bytes) -> None:
    with pytest.raises((EncodingError, RunError)):
        from_body(kind, body)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": b"short"},
        {"nonce": bytes(15)},
        {"plan": bytes(31)},
        {"segment": -1},
        {"segment": True},
        {"first": 60, "last": 50},
        {"code": 3},
        {"threads": 2.0},
        {"charges": (charge(delta=4),)},
        {"charges": (charge(accountant=7),)},
    ],
)
def test_a_record_is_checked_where_it_is_made(wrong: dict[str, object]) -> None:
    with pytest.raises(RunError) as caught:
        opened(0, **wrong)
    assert caught.value.remedy
    for name in ("XYZ", "A" * 32, "0" * 31):
        with pytest.raises(RunError):
            RunStarted(run=name, salt=SALT, place=1)


def test_a_value_that_has_no_encoding_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    journal = make(tmp_path / "journal")
    size = journal.path.stat().st_size
    for record in (
        opened(0, charges=(charge(delta=float("nan")),)),
        opened(0, code="x" * (1 << 20)),
        RunEnded(steps=1, reason="\ud800"),
    ):
        with pytest.raises(RunError):
            journal.append(record)
    assert journal.path.stat().st_size == size


def _killed_at(real: Callable[..., object], nth: int, patched: mock.Mock) -> Callable[..., object]:
    def wrapped(*args: object, **kwargs: object) -> object:
        if patched.call_count == nth:
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)

    return wrapped
