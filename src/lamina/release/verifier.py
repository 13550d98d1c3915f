"""Verify a release: its manifest, files, certificates and dates; with its ledger, also every figure.

The steps of `verify_release` are numbered as in docs/release.md.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time as system
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from lamina.errors import LaminaError, NotVerified, family_of
from lamina.ledger.governance_records import Role
from lamina.ledger.key_state import KeyState
from lamina.ledger.reader import LedgerReader
from lamina.ledger.run_records import WEIGHTS
from lamina.ledger.signed_checkpoint import parse_checkpoint, verify_checkpoint
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import KnownCheckpoint, Trust
from lamina.release.certificate import Certificate
from lamina.release.comparison import Note, changes_since, compare_with_ledger
from lamina.release.countersignature import Countersignature
from lamina.release.enclosed_ledger import ENCLOSED, ENCLOSED_LIMITS, MAX_LEDGER_BYTES, PRUNED_LIMITS, PrunedLedger
from lamina.release.manifest import CHECKPOINT, MANIFEST, Manifest, evaluation_of, open_inside, read_file, read_manifest
from lamina.release.posture import ClassPosture
from lamina.release.risk_statements import shown_leaves
from lamina.release.utility import MAX_EVALUATION_BYTES
from lamina.sign.key_ring import KeyStatus
from lamina.sign.keys import CLOCK_SKEW, PublicKey, format_utc
from lamina.sign.model_signing import MODEL_SIGNATURE, check_model_signature
from lamina.sign.notes import NoteKey


@dataclass(frozen=True, kw_only=True)
class ReleaseProblem:
    """Something in a release that is not as it must be."""

    code: str
    file: str | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "family": family_of(self.code), "file": self.file, "reason": self.reason}

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}" if self.file else self.reason


@dataclass(frozen=True, kw_only=True)
class ReleaseVerification:
    """The result of verifying a release.

    verified  no problem was found
    signed    verified, and signed by a trusted key from outside the folder
    compared  every figure was computed again from the ledger, and the ledger verified
    trusted   all of these hold, and a trusted key governs the ledger
    enclosed  the ledger in the release from which figures were computed again: "pruned", "full", or None
    since     leaves of the ledger after the release, by what they change; empty unless a ledger was given

    `countersignatures` are those in the release, which hold if it is verified.
    """

    verified: bool = False
    signed: bool = False
    compared: bool = False
    trusted: bool = False
    problems: tuple[ReleaseProblem, ...]
    manifest: Manifest | None
    enclosed: str | None = None
    since: Mapping[str, Sequence[int]] = field(default_factory=dict)
    countersignatures: tuple[Countersignature, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if not self.verified or self.trusted:
            return "trusted" if self.trusted else "not verified"
        who = "signed by a trusted key" if self.signed else "self-consistent, not trusted"
        agree = "figures agree with a ledger that no trusted key governs"
        if self.enclosed is not None:
            agree = f"figures agree with the {self.enclosed} ledger in the release"
        return f"{who}; {agree if self.compared else 'figures not compared with a ledger'}"

    @property
    def limits(self) -> tuple[str, ...]:
        """Return the facts that the ledger in the release cannot show."""
        found = {"pruned": PRUNED_LIMITS, "full": ENCLOSED_LIMITS}
        return found.get(self.enclosed or "", ()) if self.compared else ()

    def to_dict(self) -> dict[str, Any]:
        """The keys of `lamina release verify --json`."""
        return {
            "verified": self.verified,
            "signed": self.signed,
            "compared": self.compared,
            "trusted": self.trusted,
            "verdict": self.verdict,
            "enclosed": self.enclosed,
            "limits": list(self.limits),
            "problems": [each.to_dict() for each in self.problems],
            "since": {name: {"count": len(seqs), "leaves": shown_leaves(seqs)} for name, seqs in self.since.items()},
            "countersignatures": [dict(each.content) for each in self.countersignatures],
            "files": {} if self.manifest is None else dict(self.manifest.subjects),
        }


def release_keys(trust: Trust | None, now: int) -> tuple[PublicKey, ...] | None:
    """The release keys that somebody trusts: of a ring, those with that role; None if nothing was given."""
    if trust is None:
        return None
    release, ring = Role.RELEASE.name.lower(), () if trust.ring is None else trust.ring
    others = {each.id for each in ring if each.role != release}
    mine = (each for each in ring if each.role == release and each.standing(now, each.valid_from) is KeyStatus.USABLE)
    return (*(key for key in trust.plain if key.id not in others), *(each.key for each in mine))


def verify_release(
    folder: str | os.PathLike[str],
    *,
    trust: Trust | None = None,
    seen: Iterable[KnownCheckpoint] = (),
    now: int | None = None,
    ledger: LedgerReader | None = None,
) -> ReleaseVerification:
    """Check names, files, hashes, signatures, certificates and times of a release; with its ledger, also every figure.

    Returns all problems.

    trust   release keys (and ledger keys) from another source. Without them, a release can only be self-consistent,
            which anybody can achieve
    seen    checkpoints of its ledger that were seen before: a release that stands on an older one is refused
    ledger  the ledger of the release, from which everything is computed again. Without it, the figures are computed from the
            ledger in the release, and if there is none, they are not checked
    """
    now, folder = int(system.time()) if now is None else now, Path(folder)
    problems: list[ReleaseProblem] = []

    def note(code: str, reason: str, file: str | None) -> None:
        problems.append(ReleaseProblem(code=code, file=file, reason=reason))

    # 1. The manifest is strict, and a trusted release key in force signed it.
    try:
        manifest = read_manifest(folder, release_keys(trust, now))
    except LaminaError as error:
        note(error.code, error.problem, MANIFEST)
        return ReleaseVerification(problems=tuple(problems), manifest=None)
    _check_key(manifest, trust, now, note)
    # 2. The folder has exactly the files of the manifest, and no links.
    _check_files(folder, manifest, note)
    # 3. The model-signing bundle, if the manifest names its key, covers all files.
    _check_model_signature(folder, manifest, note)
    # 4. Every run has a certificate by the same key, for these weights and this ledger; 5. the posture says no less.
    certificates = _check_certificates(folder, manifest, note)
    # 6. The checkpoint is that of the ledger, and no older than those that were seen.
    _check_ledger_head(manifest, trust, seen, now, note)
    # 7. With the ledger, given or in the release: every figure follows from its leaves.
    compared: Verification | None = None
    evaluations = {}
    for file in certificates:
        with suppress(LaminaError):  # it is missing; the comparison names it if it is needed
            evaluations[file] = read_file(folder, evaluation_of(file), MAX_EVALUATION_BYTES)
    compare = partial(
        compare_with_ledger, manifest, certificates, trust=trust, now=now, note=note, evaluations=evaluations
    )
    enclosed = next((kind for kind, file in ENCLOSED.items() if file in manifest.subjects), None)
    if ledger is not None:
        compared, enclosed = compare(ledger), None
    elif enclosed is not None:
        try:
            with _enclosed_ledger(folder, manifest, enclosed) as inside:
                compared = compare(inside, enclosed=True)
        except LaminaError as error:
            note(error.code, error.problem, ENCLOSED[enclosed])
    # 8. Countersignatures are about their certificates, by an officer's key, and in force.
    parties = None if ledger is None or compared is None else ledger.parties()
    officers = _check_countersignatures(folder, manifest, trust, parties, now, note)
    # 9. It may be served now.
    if manifest.not_after <= now:
        note("release.expired", f"it might be served until {format_utc(manifest.not_after)}, which is past", MANIFEST)
    if manifest.created > now + CLOCK_SKEW:
        note("release.from-the-future", f"it is of {format_utc(manifest.created)}, which is to come", MANIFEST)
    signed = not problems and trust is not None
    return ReleaseVerification(
        verified=not problems, signed=signed, compared=compared is not None,
        trusted=signed and compared is not None and compared.trusted and enclosed is None, enclosed=enclosed,
        problems=tuple(problems), manifest=manifest,
        since={} if ledger is None or compared is None else changes_since(manifest, ledger),
        countersignatures=tuple(officers),
    )  # fmt: skip


@contextmanager
def _enclosed_ledger(folder: Path, manifest: Manifest, kind: str) -> Iterator[LedgerReader | PrunedLedger]:
    """Open the ledger in a release: the very bytes that the manifest names, outside of the folder."""
    data = read_file(folder, ENCLOSED[kind], MAX_LEDGER_BYTES)
    if hashlib.sha256(data).hexdigest() != manifest.subjects[ENCLOSED[kind]]:
        raise NotVerified("release.file-changed", "the ledger in the release is not the one that the manifest names")
    if kind == "pruned":
        yield PrunedLedger(data, manifest.ledger)
        return
    with tempfile.TemporaryDirectory(prefix="lamina-ledger-") as place:
        copy = Path(place) / ENCLOSED[kind]
        copy.write_bytes(data)
        with LedgerReader.read_only(copy) as inside:
            yield inside


def _check_key(manifest: Manifest, trust: Trust | None, now: int, note: Note) -> None:
    """Check that the key of the manifest, if a ring knows it, was in force when it signed."""
    entry = None if trust is None or trust.ring is None else trust.ring.get(manifest.signer.id)
    if entry is not None and entry.standing(now, max(manifest.created, entry.valid_from)) is not KeyStatus.USABLE:
        reason = f"its key signs nothing new any more, and it is of {format_utc(manifest.created)}"
        note("release.key-retired", reason, MANIFEST)


def _check_files(folder: Path, manifest: Manifest, note: Note) -> None:
    expected = {*manifest.subjects, MANIFEST}
    if manifest.predicate.model_signing is not None:
        expected.add(MODEL_SIGNATURE)
    folders = {str(above) for name in manifest.subjects for above in PurePosixPath(name).parents}
    there = set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        shown = name if name.isprintable() else ascii(name)  # a name may hold commands to a terminal
        if path.is_symlink():
            note("release.link", "it is a link, and a release has none", shown)
        elif path.is_dir() and name in folders:
            continue
        elif path.is_dir() or name not in expected:
            note("release.extra-file", "it is not in the manifest", shown)
        there.add(name)
    for name, digest in manifest.subjects.items():
        if name not in there:
            note("release.file-missing", "the manifest names it, and it is not there", name)
            continue
        try:
            with os.fdopen(open_inside(folder, name), "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except LaminaError as error:
            note(error.code, error.problem, name)
            continue
        if found != digest:
            note("release.file-changed", f"its SHA-256 is {found[:16]}…, the manifest says {str(digest)[:16]}…", name)


def _check_model_signature(folder: Path, manifest: Manifest, note: Note) -> None:
    if (named := manifest.predicate.model_signing) is None:
        return
    try:
        covered, key = {**manifest.subjects, MANIFEST: manifest.digest}, named.public_key.encode()
        check_model_signature(read_file(folder, MODEL_SIGNATURE), manifest.predicate.name, covered, key)
    except LaminaError as error:
        note(error.code, error.problem, MODEL_SIGNATURE)


def _check_certificates(folder: Path, manifest: Manifest, note: Note) -> dict[str, Certificate]:
    """Check the certificates and what the posture says of them; return those that hold, by file."""
    found: dict[str, Certificate] = {}
    for each in manifest.predicate.certificates:
        try:
            if {each.file, each.signed} - manifest.subjects.keys():
                raise NotVerified("release.certificate-wrong", "it is not among the files of the manifest")
            plain, cose = read_file(folder, each.file), read_file(folder, each.signed)
            certificate = Certificate.read(cose, (manifest.signer,))
            if certificate.json() != plain:
                raise NotVerified("release.certificate-differs", "its JSON is not what was signed")
            if not certificate.private or certificate.content["run"]["id"] != each.run:
                raise NotVerified("release.certificate-wrong", "it is of another run, or of one that is not private")
            if certificate.content["ledger"]["header"] != manifest.ledger.header:
                raise NotVerified("release.certificate-wrong", "it is about another ledger")
            found[each.file] = certificate
        except LaminaError as error:
            note("release.certificate-wrong", error.problem, each.file[:80])
    last = next(reversed(found.values()), None)
    if last is None or [each.content["run"]["id"] for each in found.values()] != manifest.predicate.runs:
        note("release.certificate-missing", "a run in the model has no certificate", MANIFEST)
    elif last.content["model"]["sha256"] != manifest.subjects.get(WEIGHTS):
        note("release.weights-not-certified", "the certificate is about other weights", WEIGHTS)
    else:
        for certificate in found.values():
            _check_posture(manifest, certificate, note)
    return found


def _check_countersignatures(
    folder: Path, manifest: Manifest, trust: Trust | None, parties: KeyState | None, now: int, note: Note
) -> list[Countersignature]:
    """Check the countersignatures that the manifest names: each is about its certificate, by an officer, and in force."""
    found: list[Countersignature] = []
    for entry in manifest.predicate.certificates:
        if (file := entry.countersignature) is None:
            continue
        try:
            if file not in manifest.subjects:
                raise NotVerified("release.countersignature-wrong", "it is not among the files of the manifest")
            found.append(each := Countersignature.read(read_file(folder, file)))
            each.check(
                read_file(folder, entry.signed), manifest.signer, trust=trust, parties=parties,
                not_after=manifest.not_after, now=now, file=file, note=note,
            )  # fmt: skip
            if _signed_by(manifest.ledger.checkpoint, NoteKey(manifest.ledger.origin, each.signer)):
                note("release.officer-key-in-other-role", "its key signs the checkpoints of the ledger", file)
        except LaminaError as error:
            note(error.code, error.problem, file)
    return found


def _check_posture(manifest: Manifest, certificate: Certificate, note: Note) -> None:
    """The posture says no less than the certificate of a run."""
    layers = {layer.name: layer for layer in manifest.posture.layers}
    if manifest.posture.attested and not certificate.content["attested"]:
        note("release.posture-differs", "it states signed contributions, but a certificate does not", MANIFEST)
    for each in certificate.content["layers"]:
        mine = layers.get(each["name"])
        if mine is None or not set(each["classes"]) <= set(mine.classes) or mine.noise_std > each["noise_std"]:
            note("release.posture-differs", f"layer {each['name'][:80]!r} has another posture than certified", MANIFEST)
    for name, figures in certificate.classes.items():
        stated = manifest.posture.classes.get(name)
        if stated is None or not _says_as_much(stated, figures):
            note("release.posture-differs", f"class {name[:80]!r} has another posture than certified", MANIFEST)


def _says_as_much(stated: ClassPosture, figures: Mapping[str, Any]) -> bool:
    """Whether the posture of a class says no less than a certificate of it."""
    spent, sigma = figures["epsilon"], figures["noise_multiplier"]
    return (
        (not stated.public or figures["public"])
        and (stated.epsilon is None or (spent is not None and stated.epsilon >= spent))
        and (stated.noise_multiplier is None or sigma is None or stated.noise_multiplier <= sigma)
        and (stated.public or figures["public"] or (stated.delta, stated.unit) == (figures["delta"], figures["unit"]))
    )


def _check_ledger_head(
    manifest: Manifest, trust: Trust | None, seen: Iterable[KnownCheckpoint], now: int, note: Note
) -> None:
    at = manifest.ledger
    try:
        checkpoint, _ = parse_checkpoint(at.checkpoint)
        if _signed_by(at.checkpoint, NoteKey(checkpoint.origin, manifest.signer)):
            note("release.key-in-other-role", "its key signs the checkpoints of the ledger", MANIFEST)
        stated = (at.origin, at.size, at.root, manifest.posture.as_of_size)
        if (checkpoint.origin, checkpoint.size, checkpoint.root.hex(), checkpoint.size) != stated:
            note("release.ledger-head-differs", "the manifest and its checkpoint state another ledger head", CHECKPOINT)
        keys = [] if trust is None else replace(trust, plain=()).keys(checkpoint.origin, now)  # plain: releases, owner
        if trust is not None and trust.ring is not None and keys:
            verify_checkpoint(at.checkpoint, [NoteKey(checkpoint.origin, key) for key in keys])
    except LaminaError as error:
        note("release.ledger-head-not-verified", error.problem, CHECKPOINT)
        return
    for head in (known.head for known in seen):
        if head.origin != checkpoint.origin:
            note("release.other-ledger", f"seen before was {head.origin!r}, it stands on another ledger", CHECKPOINT)
        elif head.size > checkpoint.size:
            reason = f"it stands on {checkpoint.size} leaves of the ledger, {head.size} were seen before"
            note("release.ledger-head-older", reason, CHECKPOINT)
        elif head.size == checkpoint.size and head.root != checkpoint.root:
            reason = f"the ledger of {head.size} leaves that was seen before has another root"
            note("release.ledger-forked", reason, CHECKPOINT)


def _signed_by(checkpoint: str, key: NoteKey) -> bool:
    try:
        verify_checkpoint(checkpoint, [key])
    except LaminaError:
        return False
    return True
