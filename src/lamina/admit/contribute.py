"""Signing what lies on disk: ID/descriptor.cbor and ID/attestation.cose beside ID/payload.*"""

from __future__ import annotations

import enum
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from lamina.admit import files
from lamina.admit.attestation import attest
from lamina.admit.commitment import NONCE_BYTES, commit, subject_tag
from lamina.admit.demands import Demands
from lamina.admit.descriptor import Descriptor
from lamina.admit.examine import check_id
from lamina.admit.items import count_items
from lamina.admit.key import PrivateKey
from lamina.admit.prior import Prior, as_strict, loosens, strictest
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
from lamina.errors import AdmissionError, LaminaError
from lamina.plan.policy import Policy

YEAR = 365 * 86_400
V = TypeVar("V", str, bytes)


class State(enum.Enum):
    """What became of one contribution."""

    SIGNED = "signed"
    KEPT = "kept"
    STRICTER = "kept: stricter than asked"
    ANOTHER = "kept: signed by another key"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One contribution after `attest_folder` has looked at it.

    `problem` says why it was refused, or what else is to be known of one that was kept. `replaced` is what `force`
    did away with: STRICTER or ANOTHER. `carried`: signed anew, with a bound or depth of its own that was stricter.
    """

    id: str
    state: State
    digest: bytes | None = None
    problem: str | None = None
    replaced: State | None = None
    carried: bool = False


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

    @property
    def past(self) -> bool:
        """Whether nothing that is signed for it would ever be admitted."""
        return self.end <= self.now

    def fits(self, signed: Descriptor) -> bool:
        """Whether what is signed need not be signed again: it has not ended, and nobody asks for another window."""
        return (
            self.now < signed.expires
            and self.not_before in (None, signed.not_before)
            and self.expires in (None, signed.expires)
        )


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
    key: PrivateKey | None,
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
    dry_run: bool = False,
    now: int | None = None,
) -> Iterator[Outcome]:
    """Sign every contribution of a folder, or the one that the folder is; says of each what became of it.

    `cls` is the class of all, or of each by id. `subjects` says whom each is about: only a tag under `subject_key` is
    signed. What this key signed already for this very payload is kept if the policy still admits it and nothing
    stricter is asked for; so a second call finishes what an interrupted one began. Without `force` nothing that was
    promised is taken back: a stricter bound or depth stays, and what another key signed is left alone.
    One contribution that cannot be signed stops no other. Everything that is wrong for all of them is refused before
    the first is signed. `dry_run` says the same and writes nothing; only then the key may be missing, and whatever is
    signed counts as another's.
    """
    root, ids = ids_in(folder)
    moment = int(time.time()) if now is None else now
    window = Window(not_before=not_before, expires=expires, now=moment)
    if window.past and not force:
        raise AdmissionError(
            f"the window ended at {shown(window.end)}: it would never be admitted",
            "give a later end, or sign by force",
        )
    if key is None and not dry_run:
        raise AdmissionError("there is no key to sign with", "give the private key of the contributor")
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
    signer = _Signer(
        key=key,
        window=window,
        demands=Demands(policy),
        named=data_class is not None,
        force=force,
        dry_run=dry_run,
    )
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
class _Asked:
    """What is to be signed about one contribution."""

    terms: Terms
    items: int
    tag: str | None
    anchor: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signer:
    key: PrivateKey | None
    window: Window
    demands: Demands
    named: bool  # the data class was asked for by name
    force: bool
    dry_run: bool

    def sign(
        self, given: Contribution, terms: Terms, tag: str | None, anchor: bytes | None, folder: Path
    ) -> Outcome:
        check_id(given.id)
        if given.trouble is not None:
            raise Refused(*given.trouble)
        if not isinstance(given.payload, Path):
            raise AdmissionError("there is no payload", "put one payload.npz, payload.csv or payload.* there")
        os.close(open_plain(given.payload))  # a link is refused here as it would be at the gate
        asked = _Asked(terms=terms, items=count_items(given.payload), tag=tag, anchor=anchor)
        prior = Prior.of(given)
        if self.force:
            return self._write(given.id, given.payload, asked, folder, replaced=self._lost(prior, terms))
        if prior.of_another(None if self.key is None else self.key.public.id):
            digest = None if prior.descriptor is None else prior.descriptor.digest()
            return Outcome(id=given.id, state=State.ANOTHER, digest=digest)
        signed = prior.by(self.key)
        if signed is None or signed.audience != terms.audience:
            return self._write(given.id, given.payload, asked, folder)
        valid = prior.holds(self.key)
        same = valid and commit(signed.nonce, given.payload) == signed.commitment
        if same and (kept := self._kept(given.id, asked, signed, prior)) is not None:
            return kept
        carried = self._carried(asked, signed, prior, valid=valid, same=same)
        stricter = loosens(terms, signed, self.demands) and carried.terms != terms
        return self._write(given.id, given.payload, carried, folder, carried=stricter)

    def _lost(self, prior: Prior, terms: Terms) -> State | None:
        """What is done away with by signing `terms` whatever there is."""
        if prior.of_another(None if self.key is None else self.key.public.id):
            return State.ANOTHER
        signed = prior.by(self.key)
        if signed is None or signed.audience != terms.audience or not prior.holds(self.key):
            return None
        return State.STRICTER if loosens(terms, signed, self.demands) else None

    def _kept(self, id: str, asked: _Asked, signed: Descriptor, prior: Prior) -> Outcome | None:
        """What is signed already, by this key for this payload, if there is nothing to sign again."""
        assert prior.claims is not None
        try:
            self.demands.check(signed)
        except Refused:
            return None
        stricter = loosens(asked.terms, signed, self.demands)
        if signed.admissibility != asked.terms.admissibility:
            if not stricter or self.window.now >= signed.expires:
                return None
            problem = (
                f"signed as {signed.admissibility!r}, which is stricter than {asked.terms.admissibility!r}"
            )
            return Outcome(id=id, state=State.STRICTER, digest=signed.digest(), problem=problem)
        if not (
            as_strict(signed, asked.terms)
            and self.window.fits(signed)
            and signed.items == asked.items
            and asked.tag in (None, prior.claims.tag)
            and asked.anchor in (None, signed.anchor)
            and (not self.named or signed.data_class == asked.terms.data_class)
        ):
            return None
        return Outcome(id=id, state=State.STRICTER if stricter else State.KEPT, digest=signed.digest())

    def _carried(self, asked: _Asked, signed: Descriptor, prior: Prior, *, valid: bool, same: bool) -> _Asked:
        """What is asked, and of what was signed before all that was stricter or is not asked for now.

        Refused where that cannot be had together: then something would be taken back.
        """
        terms = asked.terms
        try:
            if signed.admissibility == terms.admissibility:
                self._check(terms, signed)
                terms = strictest(terms, signed)
                terms = terms if self.named else replace(terms, data_class=signed.data_class)
            elif loosens(terms, signed, self.demands):
                raise AdmissionError(f"it was signed as {signed.admissibility!r}", "sign it by force")
        except (Refused, AdmissionError) as error:
            why = error.detail if isinstance(error, Refused) else error.problem
            if valid:
                raise AdmissionError(
                    f"signing it again would loosen what was signed ({why}): only by force",
                    "sign it by force",
                ) from None
        tag = prior.claims.tag if asked.tag is None and valid and prior.claims is not None else asked.tag
        anchor = signed.anchor if asked.anchor is None and same else asked.anchor
        return _Asked(terms=terms, items=asked.items, tag=tag, anchor=anchor)

    def _check(self, terms: Terms, signed: Descriptor) -> None:
        """Whether the policy would admit the strictest of both. Refused otherwise."""
        if not loosens(terms, signed, self.demands):
            return
        stricter = strictest(terms, signed)
        self.demands.check(
            replace(
                signed,
                clip_norm=stricter.clip_norm or signed.clip_norm,  # 0: public now, and was not
                noise_multiplier=stricter.noise_multiplier or signed.noise_multiplier,
                policy=terms.policy,
            )
        )

    def _write(
        self,
        id: str,
        payload: Path,
        asked: _Asked,
        folder: Path,
        *,
        replaced: State | None = None,
        carried: bool = False,
    ) -> Outcome:
        if self.dry_run or self.key is None:
            return Outcome(id=id, state=State.SIGNED, replaced=replaced, carried=carried)
        nonce = secrets.token_bytes(NONCE_BYTES)
        descriptor = asked.terms.descriptor(
            contributor=self.key.public.id,
            nonce=nonce,
            commitment=commit(nonce, payload),
            items=asked.items,
            anchor=asked.anchor,
        )
        signed = attest(descriptor, self.key, issued_at=self.window.now, subject_tag=asked.tag)
        # The attestation last: until it is there, the pair does not verify, and the next call signs again.
        mode = (
            os.stat(payload).st_mode & 0o666
        )  # whoever may read the payload may read what is signed about it
        files.replace(folder / DESCRIPTOR, descriptor.encode(), "the descriptor", mode=mode, durable=False)
        files.replace(folder / ATTESTATION, signed, "the attestation", mode=mode, durable=False)
        return Outcome(
            id=id, state=State.SIGNED, digest=descriptor.digest(), replaced=replaced, carried=carried
        )


def _of(values: Mapping[str, V], id: str, what: str) -> V:
    if id not in values:
        raise AdmissionError(f"there is no {what} for it", f"give it a {what}")
    return values[id]
