"""The decision log of a gate: every decision as a signed record, one line of JSON each, in the order of a hash chain.

A record has the shape of a SLSA verification summary (https://slsa.dev/verification_summary/v1): an in-toto Statement in
a DSSE envelope. It says which release was asked, what the query draws on and under which rights, what was decided and
why. It never holds what was asked of the model, nor the answer. Each holds the SHA-256 of the line before it, so one
that is removed, exchanged or put elsewhere is noticed; so is a missing end, by who kept the head of the log.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time as system
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lamina.errors import EncodingError, LedgerError, NotVerified
from lamina.files import LOG_FILE, lock_file
from lamina.ledger.run_records import WEIGHTS
from lamina.release.gate import Decision
from lamina.release.manifest import MANIFEST, Manifest
from lamina.release.query import Query
from lamina.sign.dsse import make_statement, read_statement, sign_line
from lamina.sign.keys import PrivateKey, PublicKey, format_utc
from lamina.validate import open_regular

VSA_TYPE = "https://slsa.dev/verification_summary/v1"
MAX_LINE_BYTES = 8 << 20
MAX_WAITING = 20_000  # decisions that are not written yet; beyond that none is given
FIRST = "0" * 64  # what stands for the line before the first
_BATCH = 256  # records between two times that the disk is waited for
_GATHER = 0.01  # seconds in which records come together for it


class DecisionLog:
    """Appends decisions to a file, by a thread of its own: a decision does not wait for signature and disk.

    path      the file; a log that is there is continued
    key       signs every record. A key for this alone: one key has one role
    manifest  of the release whose gate decides
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        key: PrivateKey,
        manifest: Manifest,
        *,
        clock: Callable[[], float] = system.time,
    ) -> None:
        self.path, self._key, self._clock = Path(path), key, clock
        digest = {"sha256": manifest.digest}
        self._subjects = {WEIGHTS: manifest.subjects[WEIGHTS]}
        self._predicate = {
            "verifier": {"id": f"urn:lamina:gate:{key.public.name}"},
            "resourceUri": f"urn:lamina:release:{manifest.digest}",
            "policy": {"uri": MANIFEST, "digest": digest},
            "inputAttestations": [{"uri": MANIFEST, "digest": digest}],
        }
        self._failed = ""
        self._waiting: queue.Queue[tuple[float, Query, Decision] | None] = queue.Queue(MAX_WAITING)
        self._file = _open_log(self.path)
        try:
            self._count, self._head = _continue_log(self._file, self.path)
        except BaseException:
            self._file.close()
            raise
        self._thread = threading.Thread(target=self._write_all, name="decision log", daemon=True)
        self._thread.start()

    def record(self, query: Query, decision: Decision) -> None:
        """Take a decision down; LedgerError if it cannot be, and then it must not be given either."""
        if not self._failed:
            try:
                self._waiting.put_nowait((self._clock(), query, decision))
                return
            except queue.Full:
                pass
        problem = f"decisions cannot be recorded in '{self.path}': {self._failed or 'too many are waiting'}"
        raise LedgerError("release.log-not-written", problem, "free the disk, or ask less often")

    def close(self) -> str:
        """Write what is waiting; returns the SHA-256 of the last line, by which a missing end is noticed later."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
        self._file.close()
        return self._head

    def _write_all(self) -> None:
        going = True
        while going:
            batch = [self._waiting.get()]
            if batch[0] is not None:
                system.sleep(_GATHER)
            while len(batch) < _BATCH and not self._waiting.empty():
                batch.append(self._waiting.get())
            going = None not in batch
            if self._failed:
                continue
            try:
                for each in batch:
                    if each is not None:
                        self._write(*each)
                self._file.flush()
                os.fsync(self._file.fileno())
            except Exception as error:  # whatever it is: what is not recorded is not decided
                self._failed = getattr(error, "strerror", None) or type(error).__name__

    def _write(self, time: float, query: Query, decision: Decision) -> None:
        predicate = {
            **self._predicate,
            "timeVerified": format_utc(int(time)),
            "verificationResult": "PASSED" if decision.allowed else "FAILED",
            "verifiedLevels": ["LAMINA_QUERY_ALLOWED"] if decision.allowed else ["FAILED"],
            "lamina": {
                "number": self._count,
                "previous": self._head,
                "query": query.to_dict(),
                "reasons": [{"code": each.code, "class": each.cls} for each in decision.reasons],
                "layers_drawn_on": decision.drawn,
                "withdrawals_as_of": format_utc(decision.as_of),
            },
        }
        line = sign_line(make_statement(self._subjects, VSA_TYPE, predicate), self._key)
        self._file.write(line + b"\n")
        self._count, self._head = self._count + 1, hashlib.sha256(line).hexdigest()


def _open_log(path: Path) -> BinaryIO:
    try:
        file = os.fdopen(os.open(path, LOG_FILE, 0o600), "r+b")
        lock_file(file.fileno(), wait=False)
    except BlockingIOError:
        file.close()
        problem = f"another process writes the log '{path}'"
        raise LedgerError("release.log-in-use", problem, "give each service a log of its own") from None
    except OSError as error:
        problem = f"the log '{path}' cannot be opened: {error.strerror}"
        raise LedgerError("release.log-not-written", problem, "give the path of a file that may be written") from None
    return file


def _continue_log(file: BinaryIO, path: Path) -> tuple[int, str]:
    """Number and hash to go on with. A last line without an end was cut off by a crash, and goes."""
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - 2 * MAX_LINE_BYTES))
    tail = file.read()
    whole = tail.rfind(b"\n") + 1
    if whole == 0 and start:
        raise LedgerError("release.log-damaged", f"'{path}' is no decision log", "give another path")
    file.truncate(start + whole)
    file.seek(0, os.SEEK_END)
    if whole == 0:
        return 0, FIRST
    line = tail[:whole].splitlines()[-1]
    statement, _ = read_statement(line, (), VSA_TYPE)
    return _chain(statement)[0] + 1, hashlib.sha256(line).hexdigest()


def _chain(statement: dict[str, Any]) -> tuple[int, str, bool]:
    """Number, hash of the line before, and whether it was allowed; EncodingError if it is no record of a gate."""
    try:
        own, result = statement["predicate"]["lamina"], statement["predicate"]["verificationResult"]
        number, previous = own["number"], own["previous"]
        if type(number) is int and type(previous) is str and result in ("PASSED", "FAILED"):
            return number, previous, result == "PASSED"
    except (KeyError, TypeError):
        pass
    raise EncodingError("release.log-damaged", "a line of the log is no record of a gate", "give a decision log")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSummary:
    """A log that holds: how many decisions, and the SHA-256 of its last line. Keep it, to notice a missing end."""

    decisions: int
    allowed: int
    head: str


def read_log(
    path: str | os.PathLike[str], keys: PublicKey | Sequence[PublicKey]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(hash, statement) of every record, each verified and in its place; NotVerified at the first that is not."""
    trusted = (keys,) if isinstance(keys, PublicKey) else tuple(keys)
    head, number = FIRST, 0
    try:
        opened = open_regular(Path(path))
    except OSError as error:
        problem = f"the log '{path}' cannot be read: {error.strerror}"
        raise LedgerError("release.log-missing", problem, "give the path of a decision log") from None
    with os.fdopen(opened, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if not line.endswith(b"\n"):
                raise EncodingError("release.log-damaged", f"line {number + 1} of the log has no end", "fetch it again")
            statement, key = read_statement(line[:-1], trusted, VSA_TYPE)
            if key is None:
                problem = f"record {number} of the log is not signed by a trusted key"
                raise NotVerified("release.foreign-key", problem, "give the key of the log")
            if _chain(statement)[:2] != (number, head):
                problem = f"record {number} of the log is not the one after record {number - 1}"
                remedy = "records were removed, added or moved: find out by whom"
                raise NotVerified("release.log-broken", problem, remedy)
            head, number = hashlib.sha256(line[:-1]).hexdigest(), number + 1
            yield head, statement


def verify_log(
    path: str | os.PathLike[str], keys: PublicKey | Sequence[PublicKey], *, seen: str | None = None
) -> LogSummary:
    """Check every signature of a log, and that no record is missing; NotVerified otherwise.

    seen  the head of the log at an earlier time: a log that does not hold it has lost its end
    """
    head, decisions, allowed, found = FIRST, 0, 0, seen in (None, FIRST)
    for head, statement in read_log(path, keys):
        decisions, allowed, found = decisions + 1, allowed + _chain(statement)[2], found or head == seen
    if not found:
        problem = f"the log has no record {str(seen)[:16]}…, which was seen before"
        raise NotVerified("release.log-shorter", problem, "its end was removed, or it is another log")
    return LogSummary(decisions=decisions, allowed=allowed, head=head)
