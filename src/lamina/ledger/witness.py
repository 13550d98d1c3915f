"""Witnesses: others who saw the same tree, and say so under its checkpoint (C2SP tlog-cosignature, v1, Ed25519).

    signature value = time, 8 bytes ‖ Ed25519 signature, 64 bytes, over

        cosignature/v1
        time 1679315147
        <the text of the checkpoint>

Whoever cosigns says: as of this time, the largest tree that I saw of this origin has this root, and it is consistent
with every earlier one. A ledger that shows two faces needs two sets of witnesses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lamina.admit.key import PrivateKey
from lamina.ledger.errors import LedgerError, NotVerified
from lamina.ledger.note import NamedKey, Note, Signature

SKEW = 120  # seconds by which a clock may be wrong
LAST = 2**63 - 1

_TIME = 8


@dataclass(frozen=True, slots=True)
class WitnessKey(NamedKey):
    """An Ed25519 key that cosigns checkpoints, and nothing else."""

    KIND: ClassVar[int] = 0x04

    def holds(self, text: str, value: bytes) -> bool:
        """Whether `value` is this witness's cosignature of the text."""
        time = int.from_bytes(value[:_TIME], "big")
        return (
            len(value) == _TIME + 64 and time <= LAST and self.key.verify(_message(text, time), value[_TIME:])
        )


def cosign(text: str, name: str, key: PrivateKey, time: int) -> Signature:
    """The cosignature of a checkpoint's text, made at `time` in seconds since 1970. Look at the tree first."""
    if type(time) is not int or not 0 <= time <= LAST:
        raise LedgerError(
            "ledger.time-seconds-since",
            f"the time is {time!r}, must be seconds since 1970",
            "give int(time.time())",
        )
    value = time.to_bytes(_TIME, "big") + key.sign(_message(text, time))
    return Signature(name, WitnessKey(name, key.public).id, value)


def cosigned_at(signature: Signature) -> int:
    """The time in a cosignature."""
    return int.from_bytes(signature.value[:_TIME], "big")


@dataclass(frozen=True, slots=True)
class WitnessPolicy:
    """At least `quorum` of these witnesses must have cosigned. A quorum of 0 asks for none.

    One public key is one witness, whatever names it goes by.
    """

    quorum: int = 0
    witnesses: tuple[WitnessKey, ...] = ()

    def __post_init__(self) -> None:
        if type(self.quorum) is not int or not 0 <= self.quorum <= len(self.witnesses):
            raise LedgerError(
                "ledger.quorum-lie-number",
                f"the quorum is {self.quorum!r}, must lie in [0, {len(self.witnesses)}], the number of witnesses",
                "lower it, or name more witnesses",
            )
        if len({witness.key.x for witness in self.witnesses}) < len(self.witnesses):
            raise LedgerError(
                "ledger.two-witnesses-same",
                "two witnesses have the same public key",
                "name each witness once",
            )

    @classmethod
    def of(cls, quorum: int, keys: Iterable[str]) -> WitnessPolicy:
        """The policy with these verifier keys, one line each."""
        return cls(quorum, tuple(WitnessKey.parse(key) for key in keys))

    @property
    def keys(self) -> tuple[str, ...]:
        """The verifier keys, one line each."""
        return tuple(witness.text for witness in self.witnesses)

    def cosigned(self, note: Note, *, now: int | None = None) -> dict[str, int]:
        """Which of the witnesses cosigned the note, and when (the latest time of each).

        NotVerified if a cosignature of one of them is wrong, or later than `now` by more than clocks differ.
        """
        known = {(witness.name, witness.id): witness for witness in self.witnesses}
        times: dict[str, int] = {}
        for signature in note.signatures:
            witness = known.get((signature.name, signature.key_id))
            if witness is None:
                continue
            if not witness.holds(note.text, signature.value):
                raise NotVerified(
                    "ledger.cosignature-not-checkpoint",
                    f"the cosignature by {signature.name!r} is not one of this checkpoint",
                    "get the checkpoint again, or ask the witness",
                )
            time = cosigned_at(signature)
            if now is not None and time > now + SKEW:
                raise NotVerified(
                    "ledger.cosignature-now",
                    f"the cosignature by {signature.name!r} is of {time}, {time - now} s from now",
                    "set the clocks right",
                )
            times[witness.name] = max(time, times.get(witness.name, 0))
        return times

    def check(self, note: Note, *, now: int | None = None) -> dict[str, int]:
        """`cosigned`, and NotVerified if these are fewer than the quorum."""
        times = self.cosigned(note, now=now)
        if len(times) < self.quorum:
            raise NotVerified(
                "ledger.witnesses-cosigned-checkpoint",
                f"{len(times)} of {len(self.witnesses)} witnesses cosigned this checkpoint, {self.quorum} must",
                "ask the witnesses to look at it, or get a copy that carries their cosignatures",
            )
        return times


def _message(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()
