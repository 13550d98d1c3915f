"""Forked processes that answer messages in bytes; one thread waits for each."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from lamina.errors import AdmissionError

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess  # missing on Windows

M = TypeVar("M")


class WorkerProcess:
    """A forked process that runs `serve(line)`, and our end of the line. It ends when we do."""

    def __init__(self, serve: Callable[[Connection[Any, Any]], None], others: Iterable[WorkerProcess]) -> None:
        context = multiprocessing.get_context("fork")
        self.line, theirs = context.Pipe()
        ours = [self.line, *(other.line for other in others)]
        self._process: ForkProcess = context.Process(target=_serve, args=(serve, theirs, ours), daemon=True)
        with warnings.catch_warnings():  # it runs no threads and takes no locks that ours may hold
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """AdmissionError: the process has ended."""
        try:
            self.line.send(message)
        except OSError:
            raise self._ended() from None

    def receive(self) -> bytes:
        """Bytes, and never a pickle: whoever reads what strangers sent must not be able to run code here.

        AdmissionError: the process has ended.
        """
        try:
            return self.line.recv_bytes()
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> AdmissionError:
        self._process.join(5)
        code = self._process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        problem = f"worker process {self._process.pid} was ended {how}; nothing was admitted"
        return AdmissionError("admit.worker-ended", problem, "admit again; with processes=1 if memory is short")

    def stop(self) -> None:
        self.line.close()  # which ends a process that is waiting for work
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(
    serve: Callable[[Connection[Any, Any]], None], line: Connection[Any, Any], others: list[Connection[Any, Any]]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    for other in others:
        other.close()  # or we would keep the lines of other workers open, and wait for a parent that is gone
    with contextlib.suppress(EOFError, OSError):
        serve(line)


Answers = Callable[[Iterable[M], int], Iterator[tuple[M, bytes]]]


@contextmanager
def worker_pool(serve: Callable[[Connection[Any, Any]], None], processes: int) -> Iterator[Answers[Any]]:
    """Yield a function of messages, and of how many of them may be on their way, that yields each with its answer, in order.

    What is on its way is read from the messages and not answered yet. `concurrent.futures.ProcessPoolExecutor` is not used,
    because it unpickles what a worker sends: a worker that a payload has taken over could run code here.
    """
    workers: list[WorkerProcess] = []
    idle = SimpleQueue[WorkerProcess]()
    threads = ThreadPoolExecutor(processes)  # its threads start after all processes were forked

    def ask(message: Any) -> bytes:
        worker = idle.get()
        worker.send(message)
        answer = worker.receive()
        idle.put(worker)
        return answer

    def answers(messages: Iterable[M], ahead: int) -> Iterator[tuple[M, bytes]]:
        waiting = deque[tuple[M, Future[bytes]]]()
        for message in messages:
            waiting.append((message, threads.submit(ask, message)))
            if len(waiting) >= ahead:
                first, answer = waiting.popleft()
                yield first, answer.result()
        for first, answer in waiting:
            yield first, answer.result()

    try:
        for _ in range(processes):
            workers.append(WorkerProcess(serve, workers))
        for worker in workers:
            idle.put(worker)
        yield answers
    finally:
        for worker in workers:
            worker.stop()  # a thread that waits for it gets an error
        threads.shutdown(wait=False, cancel_futures=True)
