"""Signing what lies on disk: ID/descriptor.cbor and ID/attestation.cose beside ID/payload.*"""

from __future__ import annotations

import enum
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lamina.admit import files
from lamina.admit.attestation import Attestation, attest
from lamina.admit.commitment import NONCE_BYTES, commit, subject_tag
from lamina.admit.descriptor import Descriptor
from lamina.admit.examine import check_id
from lamina.admit.items import count_items
from lamina.admit.key import PrivateKey
from lamina.admit.refusal import Refused
from lamina.admit.source import (
    ATTESTATION,
    DESCRIPTOR,
    PAYLOAD,
    Contribution,
    FolderContributions,
    open_plain,
)
from lamina.admit.terms import Terms
from lamina.admit.times import LAST, shown
from lamina.errors import AdmissionError, EncodingError, LaminaError
from lamina.plan.policy import Policy

YEAR = 365 * 86_400
V = TypeVar("V", str, bytes)


class State(enum.Enum):
    """What became of one contribution."""

    SIGNED = "signed"
    KEPT = "kept"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One contribution after `attest_folder` has looked at it; `problem` says why it was refused."""

    id: str
    state: State
    digest: bytes | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When what is signed is valid: from now on, for a year, where nothing else is asked for."""

    not_before: int | None
    expires: int | None
    now: int

    def __post_init__(self) -> None:
        if not self.begin < self.end:
            raise AdmissionError(
                f"the window ends at {shown(self.end)}, and begins at {shown(self.begin)}", "give a later end"
            )

    @property
    def begin(self) -> int:
        return self.now if self.not_before is None else self.not_before

    @property
    def end(self) -> int:
        return min(self.begin + YEAR, LAST) if self.expires is None else self.expires

    def like(self, signed: Descriptor) -> tuple[int, int]:
        """The window to compare with: an end that nobody asked for is no reason to sign again what is still valid."""
        valid = signed.not_before <= self.now < signed.expires
        begin = signed.not_before if valid and self.not_before is None else self.begin
        return begin, signed.expires if valid and self.expires is None else self.end


def ids_in(folder: str | Path) -> tuple[Path, list[str]]:
    """The folder of contributions and the ids in it; a folder with a payload of its own is one contribution."""
    root = Path(folder)
    try:
        names = os.listdir(root)
    except OSError as error:
        raise AdmissionError(
            f"'{root}' cannot be listed: {error.strerror}",
            "give a contribution (a folder with payload.*), or the folder that holds one folder for each",
        ) from None
    if any(name.split(".", 1)[0] == PAYLOAD and not (root / name).is_dir() for name in names):
        whole = root.resolve()
        return whole.parent, [whole.name]
    found = sorted(name for name in names if not name.startswith(".") and (root / name).is_dir())
    if not found:
        raise AdmissionError(f"'{root}' holds no contributions", "put each into a folder: ID/payload.npz")
    return root, found


def attest_folder(
    folder: str | Path,
    key: PrivateKey,
    policy: Policy,
    cls: str | Mapping[str, str],
    *,
    not_before: int | None = None,
    expires: int | None = None,
    data_class: str | None = None,
    clip_norm: float | None = None,
    noise_multiplier: float | None = None,
    profile: bool = True,
    subjects: Mapping[str, str] | None = None,
    subject_key: bytes | None = None,
    anchors: Mapping[str, bytes] | None = None,
    force: bool = False,
    now: int | None = None,
) -> Iterator[Outcome]:
    """Sign every contribution of a folder, or the one that the folder is; says of each what became of it.

    `cls` is the class of all, or of each by id. `subjects` says whom each is about: only a tag under `subject_key` is
    signed. What is signed already, by this key under these terms for this very payload, is kept unless `force`; so a
    second call finishes what an interrupted one began. One contribution that cannot be signed stops no other.
    Everything that is wrong for all of them is refused before the first is signed.
    """
    root, ids = ids_in(folder)
    moment = int(time.time()) if now is None else now
    window = Window(not_before=not_before, expires=expires, now=moment)
    if (subjects is None) != (subject_key is None):
        raise AdmissionError(
            "a subject key is given without subjects"
            if subjects is None
            else "subjects are given without a key",
            "give both: only a keyed tag of a subject is signed",
        )
    classes = {cls} if isinstance(cls, str) else {cls[id] for id in ids if id in cls}
    terms = {
        name: Terms.make(
            policy,
            name,
            not_before=window.begin,
            expires=window.end,
            data_class=data_class,
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            profile=profile,
        )
        for name in sorted(classes)
    }
    signer = _Signer(key=key, window=window, force=force)
    source = FolderContributions(root)

    def outcomes() -> Iterator[Outcome]:
        for id in ids:
            try:
                name = cls if isinstance(cls, str) else _of(cls, id, "class")
                tag = (
                    None
                    if subjects is None
                    else subject_tag(subject_key or b"", _of(subjects, id, "subject"))
                )
                anchor = None if anchors is None else _of(anchors, id, "anchor")
                yield signer.sign(source.get(id), terms[name], tag, anchor, root / id)
            except LaminaError as error:
                yield Outcome(id=id, state=State.REFUSED, problem=error.problem)
            except Refused as refused:
                yield Outcome(id=id, state=State.REFUSED, problem=refused.detail or refused.reason.meaning)

    return outcomes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signer:
    key: PrivateKey
    window: Window
    force: bool

    def sign(
        self, given: Contribution, terms: Terms, tag: str | None, anchor: bytes | None, folder: Path
    ) -> Outcome:
        check_id(given.id)
        if given.trouble is not None:
            raise Refused(*given.trouble)
        if not isinstance(given.payload, Path):
            raise AdmissionError("there is no payload", "put one payload.npz, payload.csv or payload.* there")
        os.close(open_plain(given.payload))  # a link is refused here as it would be at the gate
        items = count_items(given.payload)
        if not self.force and (kept := self._kept(given, terms, items, tag, anchor)) is not None:
            return Outcome(id=given.id, state=State.KEPT, digest=kept)
        nonce = secrets.token_bytes(NONCE_BYTES)
        descriptor = terms.descriptor(
            contributor=self.key.public.id,
            nonce=nonce,
            commitment=commit(nonce, given.payload),
            items=items,
            anchor=anchor,
        )
        signed = attest(descriptor, self.key, issued_at=self.window.now, subject_tag=tag)
        # The attestation last: until it is there, the pair does not verify, and the next call signs again.
        mode = (
            os.stat(given.payload).st_mode & 0o666
        )  # whoever may read the payload may read what is signed about it
        files.replace(folder / DESCRIPTOR, descriptor.encode(), "the descriptor", mode=mode, durable=False)
        files.replace(folder / ATTESTATION, signed, "the attestation", mode=mode, durable=False)
        return Outcome(id=given.id, state=State.SIGNED, digest=descriptor.digest())

    def _kept(
        self, given: Contribution, terms: Terms, items: int, tag: str | None, anchor: bytes | None
    ) -> bytes | None:
        """The digest of what is signed already, if there is nothing to sign again."""
        if given.descriptor is None or given.attestation is None:
            return None
        assert isinstance(given.payload, Path)
        try:
            descriptor = Descriptor.decode(given.descriptor)
            claims = Attestation.decode(given.attestation)
        except (EncodingError, AdmissionError):
            return None
        wanted = terms.within(*self.window.like(descriptor)).descriptor(
            contributor=self.key.public.id,
            nonce=descriptor.nonce,
            commitment=descriptor.commitment,
            items=items,
            anchor=anchor,
        )
        same = descriptor == wanted and claims.tag == tag and claims.agrees(descriptor) is None
        if not same or not claims.signed_by(self.key.public, descriptor.digest()):
            return None
        return (
            descriptor.digest() if commit(descriptor.nonce, given.payload) == descriptor.commitment else None
        )


def _of(values: Mapping[str, V], id: str, what: str) -> V:
    if id not in values:
        raise AdmissionError(f"there is no {what} for it", f"give it a {what}")
    return values[id]
