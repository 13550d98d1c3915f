"""Files are the old one or the new one, whatever fails on the way."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
from forked import as_nobody, failing, in_child, kill, refusal
from refusals import raises_code

from lamina.errors import StorageError
from lamina.run.run_files import make_folder, remove_temporary_files, replacing, write_all, write_atomically


def write_in_parts(path: Path, *parts: bytes) -> None:
    with replacing(path) as file:
        for part in parts:
            write_all(file, part)


def test_a_file_holds_what_was_written_and_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.cbor"
    for data in (b"", b"x", os.urandom(200_000), b"short again"):
        write_atomically(path, data)
        assert path.read_bytes() == data
        assert path.stat().st_mode & 0o777 == 0o600
    write_atomically(tmp_path / "model", b"for all", mode=0o640)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["model", "plan.cbor"]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("call", "error", "advice"),
    [
        ("open", errno.EROFS, "writable"),
        ("open", errno.EACCES, "writable"),
        ("open", errno.EMFILE, "correct"),
        ("write", errno.ENOSPC, "free space"),
        ("write", errno.EDQUOT, "free space"),
        ("write", errno.EIO, "another disk"),
        ("fsync", errno.EIO, "another disk"),
        ("fsync", errno.ENOSPC, "free space"),
        ("replace", errno.EROFS, "writable"),
    ],
)
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, call: str, error: int, advice: str, there: bool
) -> None:
    path = tmp_path / "metrics.json"
    if there:
        write_atomically(path, b"old")
    with failing(call, error), pytest.raises(StorageError) as caught:
        write_atomically(path, b"new")
    text = refusal(caught.value, path)
    assert advice in text and os.strerror(error) in text and "untouched" in text
    assert os.listdir(tmp_path) == (["metrics.json"] if there else [])
    if there:
        assert path.read_bytes() == b"old"


def test_a_disk_that_takes_a_part_and_then_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    real = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: real(file, bytes(data)[:7]))
        write_atomically(path, bytes(range(100)))  # short writes are continued
    assert path.read_bytes() == bytes(range(100))
    with failing("write", errno.ENOSPC, nth=2), pytest.raises(StorageError):
        write_in_parts(path, b"first part", b"second part")
    assert path.read_bytes() == bytes(range(100)) and os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_made_durable_is_told(tmp_path: Path) -> None:
    with failing("fsync", errno.EIO, nth=2), raises_code("train.storage-failed"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_an_interruption_removes_the_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    interrupt = mock.patch("os.fsync", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        write_in_parts(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_fresh_file_takes_nobodys_place(tmp_path: Path) -> None:
    path = tmp_path / "record"
    with replacing(path, fresh=True) as file:
        write_all(file, b"first")
    for no_links in (False, True):
        with (
            raises_code("train.storage-failed") as caught,
            failing("link", errno.EOPNOTSUPP if no_links else errno.EEXIST),
            replacing(path, fresh=True) as file,
        ):
            write_all(file, b"second")
        assert "another folder" in refusal(caught.value, path)
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["record"]
    with failing("link", errno.EPERM), replacing(tmp_path / "other", fresh=True) as file:  # no hard links here
        write_all(file, b"third")
    assert (tmp_path / "other").read_bytes() == b"third"


def test_a_full_disk_in_earnest(tmp_path: Path) -> None:
    """A limit on the file size is the full disk that needs no rights: the kernel itself refuses the write."""
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
        write_atomically(path, bytes(20_000))

    answer = in_child(work)
    assert answer.startswith("StorageError") and str(path) in answer and "free space" in answer
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_read_only_folder_in_earnest(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    folder.chmod(0o555)
    for work in (
        lambda: write_atomically(Path("file"), b"new"),
        lambda: write_atomically(Path("fresh"), b"new"),
        lambda: make_folder(Path("deeper/still")),
    ):
        answer = in_child(lambda work=work: as_nobody(folder, work))
        assert answer.startswith("StorageError") and "Permission denied" in answer and "writable" in answer
    folder.chmod(0o755)
    assert os.listdir(folder) == ["file"] and (folder / "file").read_bytes() == b"old"


def test_killed_at_any_instant_the_file_is_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([i]) * 300_000 for i in range(2)]
    write_atomically(path, contents[0])
    for round_ in range(8):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for data in contents:
                        write_atomically(path, data)
            finally:
                os._exit(1)
        time.sleep(0.003 * (round_ + 1))
        kill(child)
        assert path.read_bytes() in contents
    remove_temporary_files(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_sweeping_takes_our_temporary_files_and_no_others(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with replacing(tmp_path / "000007.safetensors") as file:
            write_all(file, b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = os.listdir(tmp_path)
    others = [".tmpAbC123", "a.lamina-tmp", ".x.0123.lamina-tmp", ".hidden", "notes.tmp", left + "x"]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    remove_temporary_files(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_folders_are_made_with_their_parents_and_only_for_us(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a" / "checkpoint"
    for _ in range(2):
        make_folder(folder)
        assert folder.is_dir()
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700
    with failing("fsync", errno.EIO), raises_code("train.storage-failed"):
        make_folder(tmp_path / "other")
    (tmp_path / "file").write_bytes(b"")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("n" * 300)):
        with pytest.raises(StorageError) as caught:
            make_folder(wrong)
        refusal(caught.value, wrong)
