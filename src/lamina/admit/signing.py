"""Sign the contributions of a folder; keep what is already signed, and never loosen it without `force`."""

from __future__ import annotations

import enum
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from lamina.admit.attestation import NONCE_BYTES, Attestation, Descriptor, attest, commit, subject_tag
from lamina.admit.contribution_sources import (
    ATTESTATION_FILE,
    DESCRIPTOR_FILE,
    PAYLOAD_STEM,
    Contribution,
    FolderContributions,
    open_with_size,
)
from lamina.admit.npz import count_examples
from lamina.admit.reasons import BAD_ID, ContributionRefused, has_bad_id
from lamina.admit.terms import PolicyTerms, SigningTerms
from lamina.errors import AdmissionError, EncodingError, LaminaError
from lamina.plan.policy import Policy
from lamina.sign import keys
from lamina.sign.keys import LAST_SECOND, PrivateKey, format_utc


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousSignature:
    """Descriptor and attestation as far as they can be read; `attested` if there is an attestation file."""

    descriptor: Descriptor | None
    claims: Attestation | None
    attested: bool

    @classmethod
    def of(cls, given: Contribution) -> PreviousSignature:
        descriptor = claims = None
        with suppress(EncodingError, AdmissionError):
            descriptor = None if given.descriptor is None else Descriptor.decode(given.descriptor)
        with suppress(EncodingError, AdmissionError):
            claims = None if given.attestation is None else Attestation.decode(given.attestation)
        return cls(descriptor=descriptor, claims=claims, attested=given.attestation is not None)

    def names_other_key(self, key: PrivateKey | None) -> bool:
        """Whether it names another key. The thumbprint decides: without that key the signature cannot be verified.

        If signing with this key was interrupted, the descriptor, which is written first, names this key.
        """
        signed, kid = self.descriptor, None if key is None else key.public.id
        owner = signed.contributor if signed is not None else None if self.claims is None else self.claims.kid
        return self.attested and owner is not None and owner != kid

    def descriptor_by(self, key: PrivateKey | None) -> Descriptor | None:
        """The descriptor, if it names this key; it need not be signed."""
        signed = self.descriptor
        return signed if key is not None and signed is not None and signed.contributor == key.public.id else None

    def is_signed_by(self, key: PrivateKey | None) -> bool:
        """Whether the two belong together and this key signed them."""
        if key is None or self.descriptor is None or self.claims is None:
            return False
        matches = self.claims.mismatch(self.descriptor) is None
        return matches and self.claims.signed_by(key.public, self.descriptor.digest())


def is_as_strict(signed: Descriptor, terms: SigningTerms) -> bool:
    """Whether the signed bound is at least as strict as the one in `terms`."""
    if not terms.noise_multiplier or not signed.noise_multiplier:  # public: no bound at all
        return not terms.noise_multiplier
    return signed.clip_norm <= terms.clip_norm and signed.noise_multiplier >= terms.noise_multiplier


def would_loosen(terms: SigningTerms, signed: Descriptor, checks: PolicyTerms) -> bool:
    """Whether signing `terms` would give up anything that was promised: c, z or depth."""
    if signed.noise_multiplier and (
        not terms.noise_multiplier
        or terms.clip_norm > signed.clip_norm
        or terms.noise_multiplier < signed.noise_multiplier
    ):
        return True
    if signed.profile is None:
        return False
    if not checks.profile_allows(signed.profile, terms.admissibility):
        return True
    return terms.profile is None and not checks.classes[terms.admissibility].profile.whole


def strictest_terms(terms: SigningTerms, signed: Descriptor) -> SigningTerms:
    """The terms, with what was signed in the same class wherever that is stricter."""
    if terms.noise_multiplier and signed.noise_multiplier:
        clip, noise = min(terms.clip_norm, signed.clip_norm), max(terms.noise_multiplier, signed.noise_multiplier)
        terms = replace(terms, clip_norm=clip, noise_multiplier=noise)
    return terms if terms.profile is not None else replace(terms, profile=signed.profile)


SECONDS_PER_YEAR = 365 * 86_400
_FORCE = "sign it by force"


class SigningState(enum.Enum):
    """What became of one contribution."""

    SIGNED = "signed"
    KEPT = "kept"
    STRICTER = "kept: stricter than asked"
    OTHER_KEY = "kept: signed by another key"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningOutcome:
    """One contribution after `attest_folder`.

    `problem` says why it was refused, or why a stricter one was kept. `replaced` is what `force` replaced: STRICTER or
    OTHER_KEY. `carried`: signed anew, and kept the stricter bound or depth that it had.
    """

    id: str
    state: SigningState
    digest: bytes | None = None
    problem: str | None = None
    replaced: SigningState | None = None
    carried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidityWindow:
    """When the signature is valid: by default from now on, for a year."""

    not_before: int | None
    expires: int | None
    now: int

    def __post_init__(self) -> None:
        if not self.begin < self.end:
            problem = f"the validity ends at {format_utc(self.end)}, before it begins at {format_utc(self.begin)}"
            raise AdmissionError("admit.window-empty", problem, "give a later end")

    @property
    def begin(self) -> int:
        return self.now if self.not_before is None else self.not_before

    @property
    def end(self) -> int:
        return min(self.begin + SECONDS_PER_YEAR, LAST_SECOND) if self.expires is None else self.expires

    @property
    def is_over(self) -> bool:
        """Whether it is over already, so that nothing signed for it would ever be admitted."""
        return self.end <= self.now

    def keeps(self, signed: Descriptor) -> bool:
        """Whether the window that was signed can stay: it has not ended, and no other was asked for."""
        same = self.not_before in (None, signed.not_before) and self.expires in (None, signed.expires)
        return same and self.now < signed.expires


@dataclass(frozen=True, slots=True, kw_only=True)
class _SigningRequest:
    """What is to be signed about one contribution."""

    terms: SigningTerms
    items: int
    tag: str | None
    anchor: bytes | None
    ledger: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Signs one contribution after the other under the same request."""

    key: PrivateKey | None
    window: ValidityWindow
    policy_terms: PolicyTerms
    named: bool  # the data class was asked for by name
    force: bool
    dry_run: bool

    def sign(
        self, given: Contribution, terms: SigningTerms, tag: str | None, anchor: bytes | None, folder: Path
    ) -> SigningOutcome:
        if has_bad_id(given.id):
            raise ContributionRefused(BAD_ID)
        if given.read_error is not None:
            raise ContributionRefused(*given.read_error)
        if not isinstance(given.payload, Path):
            remedy = "put payload.npz, payload.csv or one other payload.* there"
            raise AdmissionError("admit.payload-missing", "it has no payload", remedy)
        os.close(open_with_size(given.payload)[0])  # a link is refused here as it would be at the gate
        items, only = count_examples(given.payload), self.policy_terms.ledger
        asked = _SigningRequest(terms=terms, items=items, tag=tag, anchor=anchor, ledger=only)
        prior = PreviousSignature.of(given)
        if self.force:
            return self._write(given.id, given.payload, asked, folder, replaced=self._what_force_replaces(prior, terms))
        if prior.names_other_key(self.key):
            digest = None if prior.descriptor is None else prior.descriptor.digest()
            return SigningOutcome(id=given.id, state=SigningState.OTHER_KEY, digest=digest)
        signed = prior.descriptor_by(self.key)
        if signed is None or signed.audience != terms.audience:
            return self._write(given.id, given.payload, asked, folder)
        valid = prior.is_signed_by(self.key)
        same = valid and commit(signed.nonce, given.payload) == signed.commitment
        if same and (kept := self._kept(given.id, asked, signed, prior)) is not None:
            return kept
        carried = self._merged_with_previous(asked, signed, prior, valid=valid, same=same)
        stricter = would_loosen(terms, signed, self.policy_terms) and carried.terms != terms
        return self._write(given.id, given.payload, carried, folder, carried=stricter)

    def _what_force_replaces(self, prior: PreviousSignature, terms: SigningTerms) -> SigningState | None:
        if prior.names_other_key(self.key):
            return SigningState.OTHER_KEY
        signed = prior.descriptor_by(self.key)
        if signed is None or signed.audience != terms.audience or not prior.is_signed_by(self.key):
            return None
        return SigningState.STRICTER if would_loosen(terms, signed, self.policy_terms) else None

    def _kept(
        self, id: str, asked: _SigningRequest, signed: Descriptor, prior: PreviousSignature
    ) -> SigningOutcome | None:
        """What this key already signed for this payload, if there is nothing to sign again."""
        assert prior.claims is not None
        try:
            self.policy_terms.check(signed)
        except ContributionRefused:
            return None
        stricter = would_loosen(asked.terms, signed, self.policy_terms)
        if signed.admissibility != asked.terms.admissibility:
            if not stricter or self.window.now >= signed.expires:
                return None
            problem = f"signed as {signed.admissibility!r}, which is stricter than {asked.terms.admissibility!r}"
            return SigningOutcome(id=id, state=SigningState.STRICTER, digest=signed.digest(), problem=problem)
        if not (
            is_as_strict(signed, asked.terms)
            and self.window.keeps(signed)
            and signed.items == asked.items
            and asked.tag in (None, prior.claims.tag)
            and asked.anchor in (None, signed.anchor)
            and asked.ledger in (None, prior.claims.ledger)
            and (not self.named or signed.data_class == asked.terms.data_class)
        ):
            return None
        state = SigningState.STRICTER if stricter else SigningState.KEPT
        return SigningOutcome(id=id, state=state, digest=signed.digest())

    def _merged_with_previous(
        self, asked: _SigningRequest, signed: Descriptor, prior: PreviousSignature, *, valid: bool, same: bool
    ) -> _SigningRequest:
        """The request, with whatever was signed before and is stricter, or is not part of the request.

        Refused where the two cannot be combined: signing would take back something.
        """
        terms = asked.terms
        try:
            if signed.admissibility == terms.admissibility:
                self._check(terms, signed)
                terms = strictest_terms(terms, signed)
                terms = terms if self.named else replace(terms, data_class=signed.data_class)
            elif would_loosen(terms, signed, self.policy_terms):
                raise AdmissionError("admit.would-loosen", f"it was signed as {signed.admissibility!r}", _FORCE)
        except (ContributionRefused, AdmissionError) as error:
            why = error.detail if isinstance(error, ContributionRefused) else error.problem
            if valid:
                problem = f"signing it again would loosen what was signed ({why}): only force does that"
                raise AdmissionError("admit.would-loosen", problem, _FORCE) from None
        claims = prior.claims if valid else None
        tag = claims.tag if asked.tag is None and claims is not None else asked.tag
        bound = None if claims is None else claims.ledger
        if bound is not None and asked.ledger not in (None, bound):
            problem = f"it is signed for the ledger {bound.hex()[:16]} alone"
            problem += "; signing for another would give a second bound"
            raise AdmissionError("admit.would-loosen", problem, _FORCE)
        anchor = signed.anchor if asked.anchor is None and same else asked.anchor
        return _SigningRequest(terms=terms, items=asked.items, tag=tag, anchor=anchor, ledger=asked.ledger or bound)

    def _check(self, terms: SigningTerms, signed: Descriptor) -> None:
        """Check that the policy admits the strictest of both. ContributionRefused otherwise."""
        if not would_loosen(terms, signed, self.policy_terms):
            return
        stricter = strictest_terms(terms, signed)
        self.policy_terms.check(
            replace(
                signed,
                clip_norm=stricter.clip_norm or signed.clip_norm,  # 0: public now, and was not
                noise_multiplier=stricter.noise_multiplier or signed.noise_multiplier,
                policy=terms.policy,
            )
        )

    def _write(
        self, id: str, payload: Path, asked: _SigningRequest, folder: Path, *,
        replaced: SigningState | None = None, carried: bool = False,
    ) -> SigningOutcome:  # fmt: skip
        outcome = SigningOutcome(id=id, state=SigningState.SIGNED, replaced=replaced, carried=carried)
        if self.dry_run or self.key is None:
            return outcome
        nonce = secrets.token_bytes(NONCE_BYTES)
        contributor, commitment = self.key.public.id, commit(nonce, payload)
        descriptor = asked.terms.descriptor(
            contributor=contributor, nonce=nonce, commitment=commitment, items=asked.items, anchor=asked.anchor
        )
        issued = self.window.now
        signed = attest(descriptor, self.key, issued_at=issued, subject_tag=asked.tag, ledger=asked.ledger)
        # The attestation last: until it is there, the pair does not verify, and the next call signs again.
        mode = os.stat(payload).st_mode & 0o666  # whoever may read the payload may read what is signed about it
        keys.replace_file(folder / DESCRIPTOR_FILE, descriptor.encode(), "the descriptor", mode=mode, durable=False)
        keys.replace_file(folder / ATTESTATION_FILE, signed, "the attestation", mode=mode, durable=False)
        return replace(outcome, digest=descriptor.digest())


_Value = TypeVar("_Value", str, bytes)


def contribution_ids(folder: str | Path) -> tuple[Path, list[str]]:
    """The folder of contributions and the ids in it; a folder with a payload of its own is one contribution."""
    root = Path(folder)
    try:
        names = os.listdir(root)
    except OSError as error:
        problem = f"cannot list '{root}': {error.strerror}"
        remedy = "give a contribution (a folder with payload.*), or the folder with one folder per contribution"
        raise AdmissionError("admit.folder-unreadable", problem, remedy) from None
    if any(name.split(".", 1)[0] == PAYLOAD_STEM and not (root / name).is_dir() for name in names):
        whole = Path(os.path.abspath(root))  # not where a link leads: the gate does not follow it either
        return whole.parent, [whole.name]
    found = sorted(name for name in names if not name.startswith(".") and (root / name).is_dir())
    if not found:
        problem = f"'{root}' has no contributions"
        raise AdmissionError("admit.no-contributions", problem, "put each into a folder: ID/payload.npz")
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
) -> Iterator[SigningOutcome]:
    """Sign every contribution of a folder, or the one that the folder is. Yields the outcome of each.

    `cls` is the class of all, or of each by id. `subjects` names the person of each; only a tag of the name under
    `subject_key` is signed. A contribution that this key already signed is kept if the payload is the same, the policy
    still admits it and nothing stricter is asked for, so a second call finishes an interrupted one. Without `force`
    nothing is taken back: a stricter bound or depth stays, and what another key signed is left alone.
    One contribution that cannot be signed stops no other. What is wrong for all of them is refused before the first
    is signed. `dry_run` yields the same and writes nothing; only then may the key be missing, and every signature
    counts as another key's.
    """
    root, ids = contribution_ids(folder)
    moment = int(time.time()) if now is None else now
    window = ValidityWindow(not_before=not_before, expires=expires, now=moment)
    if window.is_over and not force:
        problem = f"the validity ended at {format_utc(window.end)}, so it would never be admitted"
        raise AdmissionError("admit.window-over", problem, "give a later end, or sign by force")
    if key is None and not dry_run:
        problem = "there is no key to sign with"
        raise AdmissionError("admit.signing-key-missing", problem, "give the contributor's private key")
    if (subjects is None) != (subject_key is None):
        given = "a subject key is given without subjects" if subjects is None else "subjects are given without a key"
        raise AdmissionError("admit.subjects-without-key", given, "give both: only a keyed tag of a subject is signed")
    classes = {cls} if isinstance(cls, str) else {cls[id] for id in ids if id in cls}
    terms = {
        name: SigningTerms.make(
            policy, name, not_before=window.begin, expires=window.end, data_class=data_class, clip_norm=clip_norm,
            noise_multiplier=noise_multiplier, profile=profile,
        )
        for name in sorted(classes)
    }  # fmt: skip
    checks, named = PolicyTerms(policy), data_class is not None
    signer = Signer(key=key, window=window, policy_terms=checks, named=named, force=force, dry_run=dry_run)
    source = FolderContributions(root)

    def outcomes() -> Iterator[SigningOutcome]:
        for id in ids:
            try:
                name = cls if isinstance(cls, str) else _value_for(cls, id, "class")
                tag = None if subjects is None else subject_tag(subject_key or b"", _value_for(subjects, id, "subject"))
                anchor = None if anchors is None else _value_for(anchors, id, "anchor")
                yield signer.sign(source.get(id), terms[name], tag, anchor, root / id)
            except LaminaError as error:
                yield SigningOutcome(id=id, state=SigningState.REFUSED, problem=error.problem)
            except ContributionRefused as refused:
                problem = refused.detail or refused.reason.meaning
                yield SigningOutcome(id=id, state=SigningState.REFUSED, problem=problem)

    return outcomes()


def _value_for(values: Mapping[str, _Value], id: str, what: str) -> _Value:
    if id not in values:
        raise AdmissionError("admit.value-missing-for-id", f"it has no {what}", f"give it a {what}")
    return values[id]
