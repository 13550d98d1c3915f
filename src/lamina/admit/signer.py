"""`Signer`: signs one contribution, or leaves it as it was signed."""

from __future__ import annotations

import enum
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from lamina.admit import files
from lamina.admit.attestation import attest
from lamina.admit.commitment import NONCE_BYTES, commit
from lamina.admit.demands import Demands
from lamina.admit.descriptor import Descriptor
from lamina.admit.examine import check_id
from lamina.admit.items import count_items
from lamina.admit.key import PrivateKey
from lamina.admit.prior import Prior, as_strict, loosens, strictest
from lamina.admit.refusal import Refused
from lamina.admit.source import ATTESTATION, DESCRIPTOR, Contribution, open_plain
from lamina.admit.terms import Terms
from lamina.admit.times import LAST, shown
from lamina.errors import AdmissionError

YEAR = 365 * 86_400


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
                "admit.window-ends-begins",
                f"the window ends at {shown(self.end)}, and begins at {shown(self.begin)}",
                "give a later end",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is to be signed about one contribution."""

    terms: Terms
    items: int
    tag: str | None
    anchor: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
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
            raise AdmissionError(
                "admit.no-payload",
                "there is no payload",
                "put one payload.npz, payload.csv or payload.* there",
            )
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
                raise AdmissionError(
                    "admit.signed", f"it was signed as {signed.admissibility!r}", "sign it by force"
                )
        except (Refused, AdmissionError) as error:
            why = error.detail if isinstance(error, Refused) else error.problem
            if valid:
                raise AdmissionError(
                    "admit.signing-again-loosen",
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
