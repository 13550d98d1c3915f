"""`Inbox`: a folder into which others put withdrawals, one small JSON file each.

    NAME.json            {"withdraw": "64 hex digits", "reason": "consent"}, perhaps "effect" and "request"
    done/NAME.json       what became a record, with the answer beside it: done/NAME.answer.json
    refused/NAME.json    what did not, with the reason beside it: refused/NAME.answer.json

A file is best written under another name and then renamed, so that it is never read half; what is not JSON and was
changed a moment ago is left for the next look. Each becomes a record once: the record is appended before the file is
moved, appending it again appends nothing, and one process at a time looks into the folder. A kill at any moment leaves
a file that is taken up again.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.admit import files
from lamina.errors import LaminaError
from lamina.ledger.errors import LedgerError
from lamina.ledger.find import find
from lamina.ledger.ledger import Ledger
from lamina.ledger.records import Effect, Reason
from lamina.ledger.store.errors import Damaged, StoreBusy, StoreError
from lamina.ledger.withdrawals import Withdrawn, effect_of, reason_of, withdraw

MOST = 16 * 1024  # bytes of one file
AT_ONCE = 1000  # files in one look
GRACE = 2.0  # seconds for which a file that is not JSON may still be written
DONE, REFUSED = "done", "refused"
_FIELDS = {"withdraw", "reason", "effect", "request"}


@dataclass(frozen=True, slots=True)
class Taken:
    """A file that was looked at, and what it came to."""

    name: str
    withdrawn: tuple[Withdrawn, ...] = ()
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For machines, and for whoever put the file there."""
        return {
            "file": self.name,
            "refused": self.refused or None,
            "withdrawn": [each.to_dict() for each in self.withdrawn],
        }


class Inbox:
    """A folder of withdrawals for one ledger."""

    def __init__(self, ledger: Ledger, folder: str | os.PathLike[str]) -> None:
        self._ledger, self.folder = ledger, Path(folder)
        if not self.folder.is_dir():
            raise LedgerError("ledger.no-folder", f"there is no folder '{self.folder}'", "make it")
        for name in (DONE, REFUSED):
            (self.folder / name).mkdir(exist_ok=True)

    def take(self) -> Iterator[Taken]:
        """Everything that lies there now, by name. Trouble with the ledger itself ends it; the files stay."""
        with files.locked(self.folder):
            for path in sorted(self.folder.glob("*.json"))[:AT_ONCE]:
                if not path.name.startswith(".") and (taken := self._take(path)) is not None:
                    yield taken

    def _take(self, path: Path) -> Taken | None:
        try:
            asked = _Asked.read(path)
            find(self._ledger, asked.name)
        except _Unfinished:
            return None
        except (StoreError, StoreBusy, Damaged):
            raise  # nothing is wrong with the file
        except LaminaError as error:
            taken = Taken(path.name, refused=error.problem)
        else:
            found = withdraw(
                self._ledger, asked.name, asked.reason, effect=asked.effect, request=asked.request
            )
            taken = Taken(path.name, tuple(found))
        self._put_away(path, REFUSED if taken.refused else DONE, taken)
        return taken

    def _put_away(self, path: Path, where: str, taken: Taken) -> None:
        place = self.folder / where / path.name
        number = 1
        while os.path.lexists(place):
            number += 1
            place = self.folder / where / f"{path.stem}.{number}.json"
        answer = json.dumps(taken.to_dict(), indent=2, ensure_ascii=False).encode("utf-8") + b"\n"
        files.replace(place.with_suffix(".answer.json"), answer, "the answer", mode=0o644)
        os.rename(path, place)


class _Unfinished(Exception):
    """Somebody is still writing it."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a file asks for."""

    name: str
    reason: Reason
    effect: Effect
    request: bytes | None

    @classmethod
    def read(cls, path: Path) -> _Asked:
        found = _object(path)
        for name in ("withdraw", "request"):
            if name in found and not _is_digest(found[name]):
                raise _refusal(path, f"has {name}, which is not 64 hex digits")
        return cls(
            found["withdraw"],
            reason_of(found["reason"]),
            effect_of(found.get("effect", "finish")),
            bytes.fromhex(found["request"]) if "request" in found else None,
        )


def _object(path: Path) -> dict[str, str]:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise _refusal(path, "is no plain file")
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}") from None
    data = files.read_small(path, "the withdrawal", most=MOST)
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError):
        if time.time() - path.stat().st_mtime < GRACE:
            raise _Unfinished from None
        raise _refusal(path, "is not JSON, or names a field twice") from None
    if not isinstance(found, dict) or not {"withdraw", "reason"} <= found.keys() <= _FIELDS:
        raise _refusal(path, "must have the fields withdraw and reason, and may have effect and request")
    if not all(isinstance(value, str) for value in found.values()):
        raise _refusal(path, "has a field that is no text")
    return found


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(each in "0123456789abcdefABCDEF" for each in text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _refusal(path: Path, problem: str) -> LedgerError:
    return LedgerError(
        "ledger.write-withdraw-hex",
        f"'{path.name}' {problem}",
        'write {"withdraw": "64 hex digits", "reason": "consent"}',
    )
