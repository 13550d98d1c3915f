"""A witness, which cosigns a checkpoint if it continues the last cosigned one of the same ledger (C2SP tlog-witness).

The witness keeps the newest checkpoint of every origin that it has cosigned, with its cosignature, in one JSON file:

    {"example.org/ledger": "example.org/ledger\n20852163\nCsUY…\n\n— example.org/ledger …\n— witness.example …\n"}

The file is written before a cosignature is returned. If a ledger forks, its two signed checkpoints are the evidence.
"""

from __future__ import annotations

import json
import time as system
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.errors import EncodingError, LaminaError, LedgerError, NotVerified
from lamina.ledger import signed_checkpoint as checkpoints
from lamina.ledger.merkle import MAX_TREE_SIZE, verify_consistency
from lamina.ledger.receipt import MAX_PROOF_HASHES
from lamina.ledger.signed_checkpoint import LedgerCheckpoint
from lamina.sign import notes
from lamina.sign.keys import PrivateKey, PublicKey, format_utc, path_lock, read_small, replace_file
from lamina.sign.notes import NoteKey, WitnessKey, WitnessQuorum
from lamina.sign.signed_json import parse_json

MAX_STATE_BYTES = 1 << 26
Prove = Callable[[int, int], Sequence[bytes]]  # (old size, new size) → consistency proof


@dataclass(frozen=True, slots=True)
class WitnessRequest:
    """A checkpoint, and the consistency proof from the tree of `old` leaves; no proof if `old` is None."""

    checkpoint: str
    old: int | None = None
    path: tuple[bytes, ...] = ()

    @classmethod
    def parse(cls, data: bytes) -> WitnessRequest:
        """Read a checkpoint, or the body of a C2SP add-checkpoint request: old size, proof, empty line, checkpoint."""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise _malformed("it is not UTF-8 text") from None
        if not text.startswith("old "):
            return cls(text)
        head, _, signed = text.partition("\n\n")
        first, *lines = head.split("\n")
        if len(lines) > MAX_PROOF_HASHES:
            raise _malformed(f"the proof has {len(lines)} hashes, must have at most {MAX_PROOF_HASHES}")
        old = notes.parse_decimal(first.removeprefix("old "), "the old size", MAX_TREE_SIZE)
        return cls(signed, old, tuple(notes.decode64(line, "a hash of the proof") for line in lines))


class Witness:
    """A holder of a witness key, with a state file of the last cosigned checkpoints."""

    def __init__(self, key: PrivateKey, name: str, state: Path, *, clock: Callable[[], float] = system.time) -> None:
        self._key, self._name, self._state, self._clock = key, name, state, clock
        self._own = WitnessKey(name, key.public)

    def cosign(
        self, request: WitnessRequest, keys: Iterable[PublicKey], prove: Prove | None = None
    ) -> tuple[str, LedgerCheckpoint | None]:
        """Return the checkpoint with a cosignature of the present time, and the previously cosigned checkpoint.

        `keys` are the ledger's, from elsewhere; `prove` gives a proof where the request has none. Raises NotVerified if
        the checkpoint is not signed by one of them, or does not continue the last one of its origin.
        """
        # 1. The ledger signed it, and is not its own witness.
        origin, known = checkpoints.parse_checkpoint(request.checkpoint)[0].origin, tuple(dict.fromkeys(keys))
        policy = WitnessQuorum(0, (self._own,))
        signers = [NoteKey(origin, key) for key in known]
        new = checkpoints.verify_checkpoint(request.checkpoint, signers, origin=origin, policy=policy)
        with path_lock(self._state.parent):
            # 2. It continues what was cosigned before.
            state = self._load()
            last = state.get(origin)
            before, earlier = (None, 0) if last is None else (last[0], policy.cosigned(last[1]).get(self._name, 0))
            if before is not None:
                _check_continues(before, new, request, prove)
            # 3. Time goes on.
            now = int(self._clock())
            if now < earlier:
                problem = f"{origin!r} was cosigned at {format_utc(earlier)}, but the clock shows {format_utc(now)}"
                raise LedgerError("ledger.clock-behind", problem, "set the clock of this machine")
            # 4. The state is on the disk before the cosignature leaves.
            text = checkpoints.add_cosignature(request.checkpoint, self._key, now, self._name)
            checkpoints.parse_checkpoint(text)  # refuses a note that is too long to be read from the state again
            kept = {name: note.encode() for name, (_, note) in state.items()} | {origin: text}
            data = json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False).encode()
            replace_file(self._state, data, "the state of the witness", mode=0o600)
        return text, before

    def _load(self) -> dict[str, tuple[LedgerCheckpoint, notes.Note]]:
        if self._state.is_symlink():  # to a disk that is not mounted, or to a state with another lock
            problem = f"the state file of the witness, '{self._state}', is a symbolic link"
            raise LedgerError("ledger.witness-state-unreadable", problem, "name the file itself")
        if not self._state.exists():
            return {}
        try:
            found = parse_json(read_small(self._state, "the state of the witness", most=MAX_STATE_BYTES), "the state")
            made = {origin: checkpoints.parse_checkpoint(text) for origin, text in found.items()}
            if all(origin == head.origin for origin, (head, _) in made.items()):
                return made
        except (EncodingError, TypeError, AttributeError):
            pass
        problem = f"the state file of the witness, '{self._state}', cannot be read"
        raise LedgerError("ledger.witness-state-unreadable", problem, "restore it from a copy; do not create a new one")


def _check_continues(
    before: LedgerCheckpoint, new: LedgerCheckpoint, request: WitnessRequest, prove: Prove | None
) -> None:
    """Raise NotVerified unless the new tree continues the previous one."""
    name = f"the checkpoint of {new.origin!r} with {new.size} leaves"
    if new.size < before.size:
        problem = f"{name} is a rollback: one with {before.size} leaves was cosigned before"
        raise NotVerified("ledger.witness-rollback", problem, "ask the operator for the newest checkpoint")
    if new.size == before.size:
        if new.root != before.root:
            problem = f"{name} is a fork: another root was cosigned for the same size"
            remedy = "keep both checkpoints, which prove the fork, and inform the users of the ledger"
            raise NotVerified("ledger.witness-fork", problem, remedy)
        return
    path: Sequence[bytes] = request.path
    if request.old is None or (request.old != before.size and prove is not None):
        if prove is None:
            problem = f"{name} comes without a proof that it continues the {before.size} leaves cosigned before"
            remedy = f"ask for one: lamina ledger prove LEDGER --from {before.size}"
            raise NotVerified("ledger.witness-proof-missing", problem, remedy)
        try:
            path = prove(before.size, new.size)
        except LaminaError as error:
            raise NotVerified("ledger.witness-proof-missing", f"{name}: {error.problem}", error.remedy) from None
    elif request.old != before.size:
        problem = f"the proof begins at {request.old} leaves, but {before.size} were cosigned before"
        remedy = f"ask for another: lamina ledger prove LEDGER --from {before.size}"
        raise NotVerified("ledger.witness-proof-other-size", problem, remedy)
    if not verify_consistency(before.size, new.size, list(path), before.root, new.root):
        problem = f"the proof does not show that {name} continues the {before.size} leaves cosigned before"
        remedy = "keep both checkpoints: if no proof exists, the ledger is forked"
        raise NotVerified("ledger.witness-proof-wrong", problem, remedy)


def _malformed(problem: str) -> EncodingError:
    return EncodingError("ledger.witness-request-malformed", f"malformed request: {problem}", "ask the operator again")
