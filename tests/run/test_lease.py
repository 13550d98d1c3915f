"""One process per run; the lock dies with its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from forked import as_nobody, child_that, failing, in_child, kill, refusal
from refusals import raises_code

from lamina.errors import RunInUse, StorageError
from lamina.run.run_files import Lease


def attempt(folder: Path) -> str:
    """What a fresh process is told that wants the lease."""
    return in_child(lambda: "taken" if Lease.take(folder) else "")


def test_the_second_process_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with child_that(lambda: Lease.take(tmp_path)) as holder:
        with pytest.raises(RunInUse) as caught:
            Lease.take(tmp_path)
        text = refusal(caught.value, tmp_path)
        assert f"process {holder} on {os.uname().nodename}" in text and "this process" not in text
        assert attempt(tmp_path).startswith("RunInUse")
        kill(holder)  # SIGKILL: no code of ours runs, no clock passes
        with Lease.take(tmp_path):
            assert f"process {os.getpid()}" in attempt(tmp_path)
    assert attempt(tmp_path) == "taken"


def test_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with Lease.take(tmp_path), raises_code("train.run-in-use"):
        Lease.take(tmp_path)
    Lease.take(tmp_path).release()
    lease = Lease.take(tmp_path)
    lease.release()
    lease.release()
    assert attempt(tmp_path) == "taken"


@pytest.mark.parametrize("left", [b"", b"\xff" * 100, b"12345", b"\xa1\x63pid\x01"])
def test_a_file_that_is_left_over_is_no_obstacle(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "lease").write_bytes(left)
    with Lease.take(tmp_path):
        assert (tmp_path / "lease").stat().st_size < 200
    with open(tmp_path / "lease", "wb") as file:  # somebody who says nothing about himself
        file.write(left)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process" in attempt(tmp_path)


def test_only_the_user_reads_it(tmp_path: Path) -> None:
    with Lease.take(tmp_path):
        assert (tmp_path / "lease").stat().st_mode & 0o777 == 0o600


def test_a_forked_child_cannot_give_it_back(tmp_path: Path) -> None:
    with Lease.take(tmp_path) as lease:
        assert in_child(lease.release) == "None"
        assert attempt(tmp_path).startswith("RunInUse")


def test_a_child_that_outlives_its_parent_does_not_keep_it(tmp_path: Path) -> None:
    """A data loader's worker, orphaned by a kill of the trainer."""

    def holder() -> Lease:
        lease = Lease.take(tmp_path)
        child = os.fork()
        if child == 0:
            os.close(send)
            os.read(receive, 1)  # until the test ends, or its process does
            os._exit(0)
        (tmp_path / "orphan").write_text(str(child))
        return lease

    receive, send = os.pipe()
    with child_that(holder) as parent:
        assert attempt(tmp_path).startswith("RunInUse")
        kill(parent)
        os.kill(int((tmp_path / "orphan").read_text()), 0)  # it lives
        Lease.take(tmp_path).release()
    os.close(send)
    os.close(receive)


def test_a_program_that_was_started_does_not_keep_it(tmp_path: Path) -> None:
    lease = Lease.take(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as program:
        lease.release()
        assert attempt(tmp_path) == "taken"
        program.kill()


def test_a_file_removed_between_open_and_lock_is_not_taken_for_the_lease(tmp_path: Path) -> None:
    real = fcntl.flock
    removed = []

    def flock(file: int, how: int) -> None:
        if not removed:
            removed.append(os.unlink(tmp_path / "lease"))
        real(file, how)

    with mock.patch("fcntl.flock", flock), Lease.take(tmp_path):
        assert attempt(tmp_path).startswith("RunInUse")


def test_what_the_disk_refuses(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        Lease.take(tmp_path / "missing")
    refusal(caught.value, tmp_path / "missing")
    for call, error in (("open", errno.EROFS), ("write", errno.ENOSPC), ("ftruncate", errno.EIO)):
        before = set(os.listdir("/proc/self/fd"))
        with failing(call, error), pytest.raises(StorageError) as caught:
            Lease.take(tmp_path)
        refusal(caught.value, tmp_path / "lease")
        assert set(os.listdir("/proc/self/fd")) <= before  # others may be collected meanwhile
    no_locks = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with mock.patch("fcntl.flock", side_effect=no_locks), raises_code("train.no-file-locks"):
        Lease.take(tmp_path)
    assert attempt(tmp_path) == "taken"


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o555)
    answer = in_child(lambda: as_nobody(folder, lambda: Lease.take(Path())))
    assert answer.startswith("StorageError") and "writable" in answer
