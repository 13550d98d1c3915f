"""Work in a forked child, which may be killed, limited or stripped of its rights, and system calls that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from lamina.errors import LaminaError


def in_child(work: Callable[[], Any]) -> str:
    """What `work` returned, or the refusal that it met, as text: 'TypeOfError: message'."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(send, answer.encode())
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as stream:
        answer = stream.read().decode()
    os.waitpid(child, 0)
    return answer


@contextmanager
def child_that(work: Callable[[], Any]) -> Iterator[int]:
    """A child that did `work` and then waits to be killed; its process id. It is killed when the block ends."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            keep = work()  # what it holds is held until the kill
            os.write(send, b"y")
            while True:
                signal.pause()
            del keep
        finally:
            os._exit(1)
    os.close(send)
    try:
        with open(receive, "rb") as stream:
            assert stream.read(1) == b"y"
        yield child
    finally:
        kill(child)


def kill(child: int) -> None:
    """SIGKILL to a child of ours, and wait for its end; harmless if that was done."""
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def as_nobody(folder: Path, work: Callable[[], Any]) -> Any:
    """In a child: `work` inside `folder` without the rights of root, which no mode would stop."""
    os.chdir(folder)
    if os.geteuid() == 0:
        os.setuid(65534)
    return work()


@contextmanager
def failing(name: str, error: int, *, nth: int = 1, forever: bool = False) -> Iterator[mock.Mock]:
    """`os.name` fails with this errno at its nth call (and, with `forever`, at every later one)."""
    real = getattr(os, name)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth or (forever and calls > nth):
            raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    with mock.patch(f"os.{name}", side_effect=wrapped) as patched:
        yield patched


def refusal(error: LaminaError, path: Path) -> str:
    """The text of a refusal, which must name the file and say what to do."""
    assert str(path) in error.problem, error.problem
    assert error.remedy, error.problem
    return str(error)
