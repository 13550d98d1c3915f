"""`looked`: what all payloads say, found out by this process or by several, each with a share of the rows."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.errors import AdmissionError, CorpusError
from lamina.train.corpus.look import Look, Said
from lamina.train.corpus.payloads import Payloads, name_of

LEAST = 512  # payloads for which a process is worth starting


class Looked(NamedTuple):
    """`sizes[i]` examples in the i-th payload, which says `said[which[i]]`; -1: it says nothing, `wrong[i]` why."""

    sizes: NDArray[np.int64]
    which: NDArray[np.int64]
    said: list[Said]
    wrong: dict[int, str]


def looked(payloads: Payloads, look: Look, processes: int = 1) -> Looked:
    """All of them, in their order; what is found does not depend on the number of processes."""
    count = len(payloads)
    shares = max(1, min(processes, count // LEAST))
    ends = [count * share // shares for share in range(shares + 1)]
    first, *rest = (range(*each) for each in pairwise(ends))
    with contextlib.ExitStack() as stack:
        others: list[_Share] = []
        for part in rest:
            others.append(stack.enter_context(_Share(partial(_said, payloads, look, part), others)))
        return _joined([_said(payloads, look, first), *(other.result() for other in others)])


def _said(payloads: Payloads, look: Look, rows: range) -> Looked:
    """No torch: it runs in processes that were forked."""
    found = Looked(np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64), [], {})
    places: dict[Said, int] = {}
    for i, row in enumerate(rows):
        try:
            found.sizes[i], said = look.said(name_of(payloads, row), payloads.look(row))
        except CorpusError as error:
            found.wrong[i] = error.problem
            continue
        if (place := places.setdefault(said, len(places))) == len(found.said):
            found.said.append(said)
        found.which[i] = place
    return found


def _joined(parts: list[Looked]) -> Looked:
    said: dict[Said, int] = {}
    wrong: dict[int, str] = {}
    which, before = [], 0
    for part in parts:
        places = np.array([said.setdefault(each, len(said)) for each in part.said] + [-1], dtype=np.int64)
        which.append(places[part.which])  # -1 is the last
        wrong |= {before + i: why for i, why in part.wrong.items()}
        before += len(part.which)
    return Looked(np.concatenate([part.sizes for part in parts]), np.concatenate(which), list(said), wrong)


class _Share:
    """One process that works something out, and ends with the block."""

    def __init__(self, work: Callable[[], Looked], others: list[_Share]) -> None:
        context = multiprocessing.get_context("fork")
        self._line, theirs = context.Pipe(duplex=False)
        ours = [self._line, *(other._line for other in others)]
        self._process: ForkProcess = context.Process(target=_work, args=(work, theirs, ours), daemon=True)
        with warnings.catch_warnings():  # it runs no threads and takes no locks that ours may hold
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            self._process.start()
        theirs.close()

    def result(self) -> Looked:
        try:
            found: Looked = self._line.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise AdmissionError(
                "corpus.process-looks-payloads",
                f"a process that looks at payloads was ended (code {self._process.exitcode}); nothing was admitted",
                "admit again; with processes=1 if memory is short",
            ) from None
        return found

    def __enter__(self) -> _Share:
        return self

    def __exit__(self, *error: object) -> None:
        self._line.close()
        self._process.join(0.0 if any(error) else 0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _work(work: Callable[[], Looked], line: Connection[Any, Any], others: list[Connection[Any, Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
    for other in others:
        other.close()  # or we would wait for ever for a parent that is gone
    with contextlib.suppress(OSError):
        line.send(work())
