"""The files that are private to a run: `run.cbor`, `attempt` and `receipts`. What was spent is the ledger's to say.

run.cbor   id and salt of the run, header hash and origin of its ledger, how the run ended
attempt    the newest attempt, the digests of its inputs, and its seed
receipts   each record that the ledger has of the run; from them a restored ledger is completed

    attempt  = "LMA1" | slot (40) | length of body (4) | checksum (32) | body
    slot     = seed (32) | SHA-256("lamina/attempt/seed/1" | checksum | seed)[:8]; 40 zeros once it was erased; 40 bytes
               255 if the attempt was never charged
    receipts = frames of length of body (4) | SHA-256 of body (32) | body
    body     = the record; "key" and "signature" of the ledger key over "lamina/run-receipt/1" LF origin LF run LF and the
               record, if the run had the key

The seed decides who is sampled and what the noise is. It is in the file only while the attempt is open, and is overwritten
in place, fsynced, before the file is replaced. That is best effort: flash translation layers, copy-on-write file systems,
snapshots and backups may keep the old block. Where that matters, put the run's folder on an encrypted disk.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lamina import cbor
from lamina.errors import EncodingError, LaminaError, StorageError
from lamina.files import CHANGE
from lamina.ledger.attempts import Attempt
from lamina.ledger.governance_records import Role
from lamina.ledger.key_state import KeyState
from lamina.ledger.spend_ledger import FIRST_NONCE
from lamina.run.run_files import remove_temporary_files, storage_error, write_all, write_atomically
from lamina.sign.keys import PrivateKey

RUN_FILE, ATTEMPT_FILE, RECEIPTS_FILE = "run.cbor", "attempt", "receipts"
SEED_BYTES = 32
_MAGIC = b"LMA1"
_SLOT_AT, _SLOT_BYTES = len(_MAGIC), SEED_BYTES + 8
ERASED, REFUSED = bytes(_SLOT_BYTES), b"\xff" * _SLOT_BYTES
_MOST_BYTES = 1 << 24


def has_begun(folder: Path) -> bool:
    """Return whether a run was begun in this folder."""
    return (folder / RUN_FILE).exists()


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentInputs:
    """All inputs on which the outcome of a segment depends, apart from its seed. `AttemptOpened` has the same fields."""

    plan: bytes
    settings: bytes
    membership: bytes
    checkpoint: bytes
    data: bytes
    world_size: int
    threads: int
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOpened(Attempt):
    """An attempt that was opened in this folder, with the inputs and the seed that a replay needs.

    A replay is allowed only if all of the inputs are still what they were. `seed` is b"" once it was erased.
    """

    settings: bytes
    membership: bytes
    checkpoint: bytes
    data: bytes
    world_size: int
    threads: int
    code: str
    seed: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """The content of `run.cbor`. `ended` is the number of steps, and the reason, once the run has ended."""

    run: str
    salt: bytes
    origin: str
    header: bytes
    ended: tuple[int, str] | None = None

    @classmethod
    def begin(cls, folder: Path, origin: str, header: bytes) -> RunIdentity:
        """Write the record of a new run."""
        remove_temporary_files(folder)
        made = cls(run=secrets.token_hex(16), salt=os.urandom(32), origin=origin, header=header)
        made.write(folder)
        return made

    @classmethod
    def read(cls, folder: Path) -> RunIdentity:
        path = folder / RUN_FILE
        try:
            plain = cbor.decode(_read(path), null=True)
            return cls(**{**plain, "ended": plain["ended"] and tuple(plain["ended"])})
        except (EncodingError, TypeError, KeyError, ValueError):
            raise _damaged(path, "it is no record of a run") from None

    def write(self, folder: Path) -> None:
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["ended"] = None if self.ended is None else list(self.ended)
        write_atomically(folder / RUN_FILE, cbor.encode(plain, null=True))


class AttemptFile:
    """The file `attempt` of a run's folder.

    opened   the attempt that it holds; None before the first one
    prev     the nonce of the attempt before it
    erased   whether its seed was erased: it has ended, or will be abandoned
    refused  whether it was never charged: then `prev` is the latest attempt that the folder knows
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ATTEMPT_FILE
        self.opened: AttemptOpened | None = None
        self.prev, self._slot = FIRST_NONCE, REFUSED
        if self.path.exists():
            self._load(_read(self.path))

    def _load(self, data: bytes) -> None:
        slot, body_at = data[_SLOT_AT : _SLOT_AT + _SLOT_BYTES], _SLOT_AT + _SLOT_BYTES + 36
        length = int.from_bytes(data[body_at - 36 : body_at - 32], "big")
        checksum, body = data[body_at - 32 : body_at], data[body_at:]
        if data[:_SLOT_AT] != _MAGIC or len(body) != length or hashlib.sha256(body).digest() != checksum:
            raise _damaged(self.path, "its checksum does not match")
        try:
            plain = cbor.decode(body, floats=True, null=True, max_size=_MOST_BYTES)
            self.prev = plain["prev"]
            seed = b"" if slot in (ERASED, REFUSED) or slot != _slot(checksum, slot[:SEED_BYTES]) else slot[:SEED_BYTES]
            opened = plain["opened"]
            self.opened = None if opened is None else AttemptOpened.from_plain({**opened, "seed": seed})
        except (LaminaError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise _damaged(self.path, f"it is not what this version writes ({error})") from None
        self._slot = slot if seed or slot == REFUSED else ERASED

    @property
    def erased(self) -> bool:
        return self._slot == ERASED

    @property
    def refused(self) -> bool:
        return self._slot == REFUSED

    @property
    def latest(self) -> tuple[bytes, ...]:
        """The nonces that the latest attempt of the run may have in the ledger: with its seed, it may not be charged."""
        if self.refused or self.opened is None:
            return (self.prev,)
        return (self.opened.nonce,) if self.erased else (self.opened.nonce, self.prev)

    def write(self, opened: AttemptOpened | None, prev: bytes) -> None:
        """Replace the file, durably. Without a seed the attempt counts as never charged, and `prev` as the latest."""
        plain = None if opened is None else {**opened.to_plain(), "seed": b""}
        body = cbor.encode({"prev": prev, "opened": plain}, floats=True, null=True, max_size=_MOST_BYTES)
        checksum = hashlib.sha256(body).digest()
        slot = _slot(checksum, opened.seed) if opened is not None and opened.seed else REFUSED
        write_atomically(self.path, _MAGIC + slot + len(body).to_bytes(4, "big") + checksum + body)
        self.opened, self.prev, self._slot = opened, prev, slot

    def erase(self, *, refused: bool = False) -> None:
        """Overwrite the seed, durably. `refused`: nothing was charged or drawn."""
        slot = REFUSED if refused else ERASED
        if self.opened is None or self._slot in (slot, REFUSED):
            return
        try:
            file = os.open(self.path, CHANGE)
            try:
                os.lseek(file, _SLOT_AT, os.SEEK_SET)
                write_all(file, slot)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise storage_error(error, f"cannot erase the seed in {self.path}", "the ledger is complete") from None
        self._slot, self.opened = slot, replace(self.opened, seed=b"")


def _slot(checksum: bytes, seed: bytes) -> bytes:
    return seed + hashlib.sha256(b"lamina/attempt/seed/1" + checksum + seed).digest()[: _SLOT_BYTES - SEED_BYTES]


class Receipts:
    """The file `receipts`: maps that say what the ledger recorded of the run. A torn end is ignored and overwritten."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECEIPTS_FILE
        self.entries: list[dict[str, Any]] = []
        self._end = 0
        data = _read(self.path) if self.path.exists() else b""
        while (found := _frame(data, self._end)) is not None:
            entry, self._end = found
            self.entries.append(entry)

    @property
    def nonces(self) -> set[bytes]:
        """The nonces of the attempts."""
        return self.nonces_in(self.entries)

    @staticmethod
    def nonces_in(entries: Iterable[Mapping[str, Any]]) -> set[bytes]:
        """The nonces of the attempts among these entries."""
        attempts = [each["attempt"] for each in entries if isinstance(each.get("attempt"), dict)]
        return {each["nonce"] for each in attempts if isinstance(each.get("nonce"), bytes)}

    def add(self, *entries: Mapping[str, Any]) -> None:
        """Append entries, durably, but those that are there already."""
        if not (new := [dict(entry) for entry in entries if entry not in self.entries]):
            return
        bodies = [cbor.encode(entry, floats=True, null=True, max_size=_MOST_BYTES) for entry in new]
        data = b"".join(len(body).to_bytes(4, "big") + hashlib.sha256(body).digest() + body for body in bodies)
        try:
            file = os.open(self.path, CHANGE | os.O_CREAT, 0o600)
            try:
                os.ftruncate(file, self._end)
                os.lseek(file, self._end, os.SEEK_SET)
                write_all(file, data)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise storage_error(error, f"cannot write {self.path}", "the ledger is complete") from None
        self.entries += new
        self._end += len(data)

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that ended, in the order of their leaves."""
        return self.attempts_in(self.entries)

    def attempts_in(self, entries: Iterable[Mapping[str, Any]]) -> list[Attempt]:
        """The attempts among these entries."""
        try:
            found = [Attempt.from_plain(each["attempt"]) for each in entries if "attempt" in each]
        except (LaminaError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise _damaged(self.path, f"it is not what this version writes ({error})") from None
        if any(each.outcome is None for each in found):
            raise _damaged(self.path, "it has an attempt that did not end")
        return found


_SIGNATURE = ("key", "signature")


def signed_receipt(entry: Mapping[str, Any], origin: str, run: str, key: PrivateKey) -> dict[str, Any]:
    """Return a receipt with the signature of the ledger key: it says what the ledger recorded."""
    return {**entry, "key": key.public.id, "signature": key.sign(_receipt_text(entry, origin, run))}


def has_signature(entry: Mapping[str, Any], keys: KeyState, run: str) -> bool:
    """Return whether a ledger key that was not revoked signed a receipt of this run."""
    kid, signature = (entry.get(name) for name in _SIGNATURE)
    if not isinstance(kid, bytes) or not isinstance(signature, bytes):
        return False
    known = keys.history(kid)
    if known is None or known.key.role is not Role.LEDGER or known.revoked is not None:
        return False
    return known.public.verify(_receipt_text(entry, keys.origin, run), signature)


def _receipt_text(entry: Mapping[str, Any], origin: str, run: str) -> bytes:
    record = {name: value for name, value in entry.items() if name not in _SIGNATURE}
    body = cbor.encode(record, floats=True, null=True, max_size=_MOST_BYTES)
    return f"lamina/run-receipt/1\n{origin}\n{run}\n".encode() + body


def _frame(data: bytes, at: int) -> tuple[dict[str, Any], int] | None:
    """Return the entry whose frame begins at `at`, and where it ends; None if no whole one does."""
    length = int.from_bytes(data[at : at + 4], "big")
    digest, body = data[at + 4 : at + 36], data[at + 36 : at + 36 + length]
    if len(body) < max(1, length) or hashlib.sha256(body).digest() != digest:
        return None
    try:
        entry = cbor.decode(body, floats=True, null=True, max_size=_MOST_BYTES)
    except EncodingError:
        return None
    return (entry, at + 36 + length) if isinstance(entry, dict) else None


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                os.fchmod(file.fileno(), 0o600)  # a copy made under an ordinary umask
            return file.read(_MOST_BYTES << 4)
    except OSError as error:
        raise storage_error(error, f"cannot read {path}", "it is as it was") from None


def _damaged(path: Path, how: str) -> StorageError:
    remedy = "restore it from a backup, or begin in another folder: what this run charged stays in the ledger"
    return StorageError("train.run-record-damaged", f"{path} is damaged: {how}", remedy)
