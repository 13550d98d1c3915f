"""The release manifest: a folder with a model, its certificates and papers, under one signed in-toto statement.

    model.safetensors    the weights
    certificate.*        JSON, the same signed (COSE), and a PDF where typst is installed; -2, -3, … for further runs
    evaluation.json      the figures under `utility` of the certificate, if the run was evaluated; -2, -3, … likewise
    decision.pdf         one page for the privacy officer about the weights, where typst is installed
    countersignature.cose  if there is one: a privacy officer's signature over certificate.cose
    checkpoint.txt       the signed head of the ledger
    README.md            model card
    bom.cdx.json         inventory (CycloneDX)
    manifest.json        every file by SHA-256, and the privacy posture: in-toto Statement in a DSSE envelope
    model.sig            if a key for it was given: an OpenSSF model-signing bundle over all of these

Who verifies needs the folder and the keys that they trust, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import time as system
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from lamina.errors import BadKey, EncodingError, LaminaError, NotVerified, PlanError, family_of
from lamina.ledger.governance_records import Release, Role
from lamina.ledger.key_state import KeyState
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import LAST_SEQ, Epoch, decode_leaf
from lamina.ledger.run_records import WEIGHTS
from lamina.ledger.signed_checkpoint import parse_checkpoint, verify_checkpoint
from lamina.ledger.store.rows import StoreReader
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import KnownCheckpoint, Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.release.certificate import Certificate, certify, ledger_reference
from lamina.release.certificate_pdf import certificate_pdf, decision_pdf
from lamina.release.comparison import Note, changes_since, check_parents, check_purposes, compare_with_ledger
from lamina.release.countersignature import Countersignature
from lamina.release.model_card import ml_bom, model_card
from lamina.release.posture import ClassPosture, Posture, read_posture
from lamina.release.risk_statements import shown_leaves
from lamina.release.run_evidence import RunEvidence, RunMetrics, file_digest
from lamina.release.utility import MAX_EVALUATION_BYTES, read_evaluation
from lamina.sign.dsse import make_statement, read_statement, sign_statement
from lamina.sign.key_ring import KeyStatus
from lamina.sign.keys import CLOCK_SKEW, P256Key, PrivateKey, PublicKey, format_utc, parse_utc, write_new
from lamina.sign.model_signing import MODEL_SIGNATURE, check_model_signature, sign_model
from lamina.sign.notes import NoteKey
from lamina.sign.signed_json import canonical_json, parse_json
from lamina.validate import bounded_whole, is_short_text, short_repr, whole

_DIGEST = re.compile("[0-9a-f]{64}")
MANIFEST = "manifest.json"
CHECKPOINT = "checkpoint.txt"
PREDICATE_TYPE = "urn:lamina:release:v1"
MAX_AGE = 366 * 86_400  # largest `max_age` in seconds
_MAX_FILES = 4096
_MAX_RUNS = 1024
_MAX_NAME = 512
_MAX_PAPER_BYTES = 64 << 20
_PREDICATE_FIELDS = {
    "version", "name", "created", "not_after", "signer", "runs", "certificates", "ledger", "posture", "gate",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GatePolicy:
    """Settings of the gate of a release, in addition to the posture. The gate denies everything that they do not allow.

    unstated_purposes   whether a class whose policy names no purpose may be used for any
    max_age             seconds after the newest signed time that a gate knows (of the ledger, or without one of the
                        manifest) until it denies everything, because later withdrawals are unknown to it
    generation_classes  names for what queries draw on: {"head": {"layers": ["head.*"]}}
    """

    unstated_purposes: bool = False
    max_age: int = 7 * 86_400
    generation_classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        remedy = f"give 1 second to {MAX_AGE // 86_400} days"
        whole(PlanError, "release.max-age-out-of-range", least=1, most=MAX_AGE, remedy=remedy, max_age=self.max_age)
        for name, draws in self.generation_classes.items():
            if not is_short_text(name) or not _draws_on(draws) or len(self.generation_classes) > _MAX_FILES:
                problem = f"{short_repr(name)} is no generation class: {short_repr(draws)}"
                remedy = "give layers, a band of depth in [0, 1], an adapter"
                raise PlanError("release.generation-class", problem, remedy)

    def to_dict(self) -> dict[str, Any]:
        return {
            "default": "deny",
            "unstated_purposes": "allow" if self.unstated_purposes else "deny",
            "max_age": self.max_age,
            "generation_classes": {name: dict(each) for name, each in self.generation_classes.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> GatePolicy:
        """The inverse of `to_dict`; ValueError for anything else."""
        if plain.keys() != {"default", "unstated_purposes", "max_age", "generation_classes"}:
            raise ValueError("the policy of the gate has other fields than it must have")
        if plain["default"] != "deny" or plain["unstated_purposes"] not in ("allow", "deny"):
            raise ValueError("the default of a gate is to deny")
        return cls(
            unstated_purposes=plain["unstated_purposes"] == "allow",
            max_age=bounded_whole("max_age", plain["max_age"], 1, MAX_AGE),
            generation_classes=dict(plain["generation_classes"]),
        )


def _draws_on(plain: object) -> bool:
    """Return whether it states what a query draws on: layers, a band of depth, an adapter."""
    if not isinstance(plain, Mapping) or plain.keys() - {"layers", "depth", "adapter"}:
        return False
    layers, depth, adapter = plain.get("layers", []), plain.get("depth", [0, 1]), plain.get("adapter", "x")
    numbers = isinstance(depth, list | tuple) and len(depth) == 2
    return (
        isinstance(layers, list | tuple)
        and all(map(is_short_text, layers))
        and numbers
        and all(type(each) in (int, float) and 0 <= each <= 1 for each in depth)
        and is_short_text(adapter)
    )


# ------------------------------------------------------------------------------------------ making


def make_release(
    out: str | os.PathLike[str],
    runs: Sequence[str | os.PathLike[str]],
    ledger: Ledger,
    key: PrivateKey,
    *,
    name: str = "model",
    not_after: int | None = None,
    gate: GatePolicy | None = None,
    trust: Trust | None = None,
    pdf: bool = False,
    bundle_key: P256Key | None = None,
    countersignatures: Sequence[bytes] = (),
) -> Path:
    """Make the folder `out` of a release, sign it, and record it in the ledger. Returns the path of its manifest.

    runs       folders of the runs whose training is in the model, in their order; the weights are the last one's
    ledger     the one in which they were charged, opened with its key
    key        the release key
    not_after  until when it may be served; a year after the newest checkpoint if not given, or less if an officer says so
    pdf        whether to set certificates, and the release decision about the released weights, as PDFs; needs typst
    bundle_key signs the OpenSSF model-signing bundle; without it there is none
    countersignatures  of privacy officers, at most one for each certificate
    """
    out = Path(out)
    if out.exists():
        problem = f"'{out}' exists, and a release is never written over another"
        raise NotVerified("release.folder-exists", problem, "name a new folder")
    if not 0 < len(name) <= _MAX_NAME:
        problem = f"the name {short_repr(name)} has {len(name)} characters"
        raise PlanError("release.name-length", problem, f"give 1 to {_MAX_NAME} characters")
    verification, at = verify(ledger.store, trust=trust), ledger.latest()
    certificates = [certify(each, ledger, verification=verification, checkpoint=at) for each in runs]
    evidence = [RunEvidence.read(ledger, RunMetrics.load(each).run, at) for each in runs]
    check_parents(evidence)
    signed = [each.signed(key) for each in certificates]
    posture = read_posture(ledger, evidence)
    if gate is not None and gate.unstated_purposes:
        check_purposes(posture, evidence)
    last = evidence[-1]
    officers = list(map(Countersignature.read, countersignatures))
    if not_after is None:
        not_after = min([last.time + 365 * 86_400, *(each.valid_until for each in officers)])
    countersigned = _by_certificate(officers, signed, key.public, ledger, not_after)
    made = out.with_name(f".{out.name}.{os.getpid()}.lamina-tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        _copy_weights(Path(runs[-1]) / WEIGHTS, made / WEIGHTS, certificates[-1])
        papers = {CHECKPOINT: last.checkpoint_text.encode()}
        entries = []
        for number, (certificate, cose) in enumerate(zip(certificates, signed, strict=True), 1):
            stem = "certificate" if number == 1 else f"certificate-{number}"
            papers |= {f"{stem}.json": certificate.json(), f"{stem}.cose": cose}
            if certificate.content["utility"] and (data := read_evaluation(Path(runs[number - 1]))) is not None:
                papers[_evaluation_of(f"{stem}.json")] = data
            entry = {"run": certificate.content["run"]["id"], "file": f"{stem}.json", "signed": f"{stem}.cose"}
            if (officer := countersigned.get(cose)) is not None:
                entry["countersignature"] = f"{stem.replace('certificate', 'countersignature')}.cose"
                papers[entry["countersignature"]] = officer.data
            entries.append(entry)
            if pdf:
                papers[f"{stem}.pdf"] = certificate_pdf(certificate, key.public.name, officer)
            if pdf and certificate is certificates[-1]:  # its weights are those of the release
                papers["decision.pdf"] = decision_pdf(certificate, officer)
        papers["README.md"] = model_card(name, certificates, posture, not_after=format_utc(not_after))
        digests = {each: hashlib.sha256(data).hexdigest() for each, data in papers.items()}
        digests[WEIGHTS] = certificates[-1].content["model"]["sha256"]
        papers["bom.cdx.json"] = ml_bom(name, digests, certificates, posture)
        digests["bom.cdx.json"] = hashlib.sha256(papers["bom.cdx.json"]).hexdigest()
        predicate = {
            "version": 1,
            "name": name,
            "created": format_utc(last.time),
            "not_after": format_utc(not_after),
            "signer": key.public.x.hex(),
            "runs": [each.run.hex() for each in evidence],
            "certificates": entries,
            "ledger": ledger_reference(last, ledger.origin),
            "posture": posture.to_dict(),
            "gate": (gate or GatePolicy()).to_dict(),
        }
        if bundle_key is not None:
            predicate["model_signing"] = {"file": MODEL_SIGNATURE, "public_key": bundle_key.public_pem.decode()}
        envelope = sign_statement(make_statement(digests, PREDICATE_TYPE, predicate), key)
        papers[MANIFEST] = envelope
        if bundle_key is not None:
            covered = {**digests, MANIFEST: hashlib.sha256(envelope).hexdigest()}
            papers[MODEL_SIGNATURE] = sign_model(name, covered, bundle_key)
        for each, data in papers.items():
            write_new(made / each, data, "a file of the release", mode=0o644)
        digest, trained = hashlib.sha256(envelope).digest(), tuple(each.run for each in evidence)
        record = Release(manifest=digest, runs=trained, not_after=not_after)
        ledger.append_with([record], [envelope], lambda rows, seqs: _refuse_new_epochs(rows, last, record))
        if ledger.signs:
            ledger.checkpoint()
        os.rename(made, out)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return out / MANIFEST


def _by_certificate(
    officers: Sequence[Countersignature], certificates: Sequence[bytes], key: PublicKey, ledger: LedgerReader,
    not_after: int,
) -> dict[bytes, Countersignature]:  # fmt: skip
    """Return countersignatures by certificate. Raise NotVerified if one is invalid or its certificate is missing."""
    found: dict[bytes, Countersignature] = {}
    for each in officers:
        mine = next((data for data in certificates if each.is_about(data) and data not in found), b"")
        each.check(
            mine, key, trust=None, parties=ledger.parties(), not_after=not_after, now=int(system.time()),
            file=str(each), note=_refuse_countersignature,
        )  # fmt: skip
        found[mine] = each
    return found


def _refuse_countersignature(code: str, reason: str, officer: str | None) -> None:
    remedy = "certify the runs, and let the officer sign each certificate once, before the ledger grows"
    raise NotVerified(code, f"the countersignature of {officer} cannot be used: {reason}", remedy)


def _refuse_new_epochs(rows: StoreReader, last: RunEvidence, record: Release) -> None:
    """Raise NotVerified if a run was charged after its certificate: the release record would contradict the ledger."""
    for _, data in rows.leaves(last.checkpoint.size, LAST_SEQ):  # the column `kind` is no evidence
        epoch = decode_leaf(data).record
        if isinstance(epoch, Epoch) and epoch.run in record.runs:
            problem = f"run {epoch.run.hex()[:8]} was charged while the release was made"
            raise NotVerified("release.run-charged-meanwhile", problem, "make the release again when the run has ended")


def _evaluation_of(certificate: str) -> str:
    """Return the name of the evaluation in a release that belongs to a certificate of this name."""
    return certificate.replace("certificate", "evaluation")


def _copy_weights(source: Path, target: Path, certificate: Certificate) -> None:
    shutil.copyfile(source, target)
    if file_digest(target) != certificate.content["model"]["sha256"]:
        problem = f"'{source}' changed while the release was made"
        raise NotVerified("release.weights-changed", problem, "make it again when nobody writes there")


# ------------------------------------------------------------------------------------------ verifying


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
class Manifest:
    """A manifest that was read: what it says, and its digest, under which the ledger records it."""

    digest: str
    subjects: Mapping[str, str]
    predicate: Mapping[str, Any]
    posture: Posture
    gate: GatePolicy
    not_after: int
    created: int
    signer: PublicKey

    @property
    def ledger(self) -> Mapping[str, Any]:
        """Origin, size, root, header and checkpoint of the ledger."""
        found: Mapping[str, Any] = self.predicate["ledger"]
        return found


@dataclass(frozen=True, kw_only=True)
class ReleaseVerification:
    """The result of verifying a release.

    verified  no problem was found
    signed    verified, and signed by a trusted key from outside the folder
    compared  every figure was computed again from the ledger, and the ledger verified
    trusted   all of these hold, and a trusted key governs the ledger
    since     leaves of the ledger after the release, by what they change; empty unless `compared`

    `countersignatures` are those in the release, which hold if it is verified.
    """

    verified: bool = False
    signed: bool = False
    compared: bool = False
    trusted: bool = False
    problems: tuple[ReleaseProblem, ...]
    manifest: Manifest | None
    since: Mapping[str, Sequence[int]] = field(default_factory=dict)
    countersignatures: tuple[Countersignature, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if not self.verified or self.trusted:
            return "trusted" if self.trusted else "not verified"
        who = "signed by a trusted key" if self.signed else "self-consistent, not trusted"
        agree = "figures agree with a ledger that no trusted key governs"
        return f"{who}; {agree if self.compared else 'figures not compared with a ledger'}"

    def to_dict(self) -> dict[str, Any]:
        """The keys of `lamina release verify --json`."""
        return {
            "verified": self.verified,
            "signed": self.signed,
            "compared": self.compared,
            "trusted": self.trusted,
            "verdict": self.verdict,
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
    ledger  the ledger of the release, from which everything is computed again. Without it, the figures are not checked
    """
    now = int(system.time()) if now is None else now
    folder = Path(folder)
    problems: list[ReleaseProblem] = []

    def note(code: str, reason: str, file: str | None) -> None:
        problems.append(ReleaseProblem(code=code, file=file, reason=reason))

    try:
        manifest = read_manifest(folder, release_keys(trust, now))
    except LaminaError as error:
        note(error.code, error.problem, MANIFEST)
        return ReleaseVerification(problems=tuple(problems), manifest=None)
    _check_files(folder, manifest, note)
    compared: Verification | None = None
    officers: list[Countersignature] = []
    try:
        _check_model_signature(folder, manifest, note)
        certificates = _check_certificates(folder, manifest, note)
        _check_ledger_head(manifest, trust, seen, now, note)
        if ledger is not None:
            evaluations = {}
            for file in certificates:
                with suppress(LaminaError):  # it is missing; the comparison names it if it is needed
                    evaluations[file] = read_file(folder, _evaluation_of(file), MAX_EVALUATION_BYTES)
            compared = compare_with_ledger(
                manifest, certificates, ledger, trust=trust, now=now, note=note, evaluations=evaluations
            )
        parties = None if ledger is None or compared is None else ledger.parties()
        officers = _check_countersignatures(folder, manifest, trust, parties, now, note)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # fields of other types than we write
        note("release.manifest-malformed", f"a field has a wrong type: {error}", MANIFEST)
    entry = None if trust is None or trust.ring is None else trust.ring.get(manifest.signer.id)
    if entry is not None and entry.standing(now, max(manifest.created, entry.valid_from)) is not KeyStatus.USABLE:
        reason = f"its key signs nothing new any more, and it is of {format_utc(manifest.created)}"
        note("release.key-retired", reason, MANIFEST)
    if manifest.not_after <= now:
        note("release.expired", f"it might be served until {format_utc(manifest.not_after)}, which is past", MANIFEST)
    if manifest.created > now + CLOCK_SKEW:
        note("release.from-the-future", f"it is of {format_utc(manifest.created)}, which is to come", MANIFEST)
    signed = not problems and trust is not None
    return ReleaseVerification(
        verified=not problems, signed=signed, compared=compared is not None,
        trusted=signed and compared is not None and compared.trusted, problems=tuple(problems), manifest=manifest,
        since={} if ledger is None or compared is None else changes_since(manifest, ledger),
        countersignatures=tuple(officers),
    )  # fmt: skip


def read_manifest(folder: Path, keys: tuple[PublicKey, ...] | None) -> Manifest:
    """The manifest, if its signature holds: by one of `keys`, or without keys by the one that it names itself."""
    data = read_file(folder, MANIFEST)
    statement, key = read_statement(data, keys or (), PREDICATE_TYPE)
    envelope = parse_json(data, "the envelope")
    # The ledger records the digest of these bytes.
    if data != canonical_json(envelope) or len(envelope["signatures"]) != 1:
        problem = "the manifest has other bytes than its signer wrote: spaces, ends of lines, or a second signature"
        raise EncodingError("release.manifest-malformed", problem, "fetch the release again")
    predicate, subjects = statement["predicate"], _subjects(statement["subject"])
    try:
        version = predicate["version"]
        if predicate.keys() - {"model_signing"} != _PREDICATE_FIELDS or type(version) is not int or version != 1:
            raise ValueError("it has other fields than version 1 has")
        signer = PublicKey(bytes.fromhex(predicate["signer"]))
        found = Manifest(
            digest=hashlib.sha256(data).hexdigest(),
            subjects=subjects,
            predicate=predicate,
            posture=Posture.from_dict(predicate["posture"]),
            gate=GatePolicy.from_dict(predicate["gate"]),
            not_after=parse_utc(predicate["not_after"]),
            created=parse_utc(predicate["created"]),
            signer=signer,
        )
        _check_predicate(found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, BadKey) as error:
        problem = f"the manifest cannot be read: {error}"
        raise EncodingError("release.manifest-malformed", problem, "fetch the release again") from None
    if keys is None:
        _, key = read_statement(data, [signer], PREDICATE_TYPE)
    if key is None or key.id != signer.id:
        named = f"none of the trusted release keys signed it; it names key {signer.name[:16]}"
        problem = named if keys is not None else "the key that it names did not sign it"
        raise NotVerified("release.foreign-key", problem, "ask whoever released it for their release key")
    return found


def _check_predicate(found: Manifest) -> None:
    """Raise ValueError unless all fields have the right types and ranges."""
    predicate, at = found.predicate, found.ledger
    if at.keys() != {"origin", "size", "root", "header", "checkpoint"}:
        raise ValueError("its ledger has other fields than origin, size, root, header and checkpoint")
    if type(at["origin"]) is not str or type(at["checkpoint"]) is not str:
        raise ValueError("its ledger has no origin and checkpoint")
    bounded_whole("size", at["size"], 1, 2**63 - 1)
    runs, entries = predicate["runs"], predicate["certificates"]
    if type(runs) is not list or not 0 < len(runs) <= _MAX_RUNS or len(set(runs)) < len(runs):
        raise ValueError("it names no runs, one of them twice, or too many")
    for digits, size in ((at["root"], 32), (at["header"], 32), *((run, 16) for run in runs)):
        if len(bytes.fromhex(digits)) != size or digits != digits.lower():
            raise ValueError(f"{short_repr(digits)} is no digest or run")
    if type(predicate["name"]) is not str or not 0 < len(predicate["name"]) <= _MAX_NAME or len(entries) > _MAX_RUNS:
        raise ValueError(f"it has no name of 1 to {_MAX_NAME} characters, or too many certificates")
    if found.not_after <= found.created:
        raise ValueError("its last date of serving is before the date on which it was made")


def _subjects(listed: object) -> dict[str, str]:
    """Names and digests; NotVerified for a name that leads out of the folder or is there twice."""
    found: dict[str, str] = {}
    if type(listed) is not list or not 0 < len(listed) <= _MAX_FILES:
        raise EncodingError("release.manifest-malformed", "the manifest lists no files, or too many", "fetch it again")
    for each in listed:
        try:
            name, digest = each["name"], each["digest"]["sha256"]
            plain = PurePosixPath(name)
            inside = not plain.is_absolute() and ".." not in plain.parts and str(plain) == name and "\\" not in name
            inside = inside and bool(plain.parts)
        except (TypeError, KeyError):
            problem = "a file has no name or no SHA-256"
            raise EncodingError("release.manifest-malformed", problem, "fetch it again") from None
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            problem = f"the digest of {name[:80]!r} is no SHA-256"
            raise EncodingError("release.manifest-malformed", problem, "fetch it again")
        if not inside or not name.isprintable() or name in found or name in (MANIFEST, MODEL_SIGNATURE):
            problem = f"the manifest names the file {name[:80]!r}, which is twice, outside the folder, or no plain name"
            raise NotVerified("release.name-unsafe", problem, "do not use this release")
        found[name] = digest
    return found


def read_file(folder: Path, name: str, most: int = _MAX_PAPER_BYTES) -> bytes:
    """The bytes of a regular file in the folder; a link anywhere on the way is refused."""
    with os.fdopen(open_inside(folder, name), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        problem = f"'{name}' has more than {most:,} bytes"
        raise NotVerified("release.file-too-large", problem, "check that this is a release")
    return data


def open_inside(folder: Path, name: str) -> int:
    """Open a regular file below the folder without following links; NotVerified if it is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at: int | None = None
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        *above, last = PurePosixPath(name).parts
        for part in above:
            inner = os.open(part, flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        found = os.open(last, flags, dir_fd=at)
    except OSError as error:
        problem = f"'{name}' cannot be read: {error.strerror}"
        raise NotVerified("release.file-missing", problem, "fetch the release again") from None
    finally:
        if at is not None:
            os.close(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise NotVerified("release.not-a-file", f"'{name}' is no regular file", "fetch the release again")
    return found


def _check_files(folder: Path, manifest: Manifest, note: Note) -> None:
    expected = {*manifest.subjects, MANIFEST}
    if "model_signing" in manifest.predicate:
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
    """The bundle is there if the manifest names its key, and covers all files, the manifest too."""
    if "model_signing" not in manifest.predicate:
        return
    named = manifest.predicate["model_signing"]
    if named["file"] != MODEL_SIGNATURE:
        raise ValueError(f"the model-signing bundle is called {named['file']!r}, not {MODEL_SIGNATURE}")
    try:
        covered, key = {**manifest.subjects, MANIFEST: manifest.digest}, named["public_key"].encode()
        check_model_signature(read_file(folder, MODEL_SIGNATURE), manifest.predicate["name"], covered, key)
    except LaminaError as error:
        note(error.code, error.problem, MODEL_SIGNATURE)


def _check_certificates(folder: Path, manifest: Manifest, note: Note) -> dict[str, Certificate]:
    """Check that every run has a certificate by the same key, for these weights and this ledger; return them by file."""
    entries, certified = manifest.predicate["certificates"], []
    by_file: dict[str, Certificate] = {}
    for each in entries if type(entries) is list else []:
        try:
            if {each["file"], each["signed"]} - manifest.subjects.keys():
                raise NotVerified("release.certificate-wrong", "it is not among the files of the manifest")
            plain, cose = (read_file(folder, each[kind]) for kind in ("file", "signed"))
            found = Certificate.read(cose, (manifest.signer,))
            if found.json() != plain:
                raise NotVerified("release.certificate-differs", "its JSON is not what was signed")
            if not found.private or found.content["run"]["id"] != each["run"]:
                raise NotVerified("release.certificate-wrong", "it is of another run, or of one that is not private")
            if found.content["ledger"]["header"] != manifest.ledger["header"]:
                raise NotVerified("release.certificate-wrong", "it is about another ledger")
            certified.append(found)
            by_file[each["file"]] = found
        except (LaminaError, KeyError, TypeError) as error:
            reason = error.problem if isinstance(error, LaminaError) else f"it cannot be read: {error}"
            note("release.certificate-wrong", reason, str(each.get("file"))[:80] if type(each) is dict else None)
    runs = [each.content["run"]["id"] for each in certified]
    if runs != manifest.predicate["runs"] or not runs:
        note("release.certificate-missing", "a run in the model has no certificate", MANIFEST)
    elif certified[-1].content["model"]["sha256"] != manifest.subjects.get(WEIGHTS):
        note("release.weights-not-certified", "the certificate is about other weights", WEIGHTS)
    else:
        for found in certified:
            _check_posture(manifest, found, note)
    return by_file


def _check_countersignatures(
    folder: Path, manifest: Manifest, trust: Trust | None, parties: KeyState | None, now: int, note: Note
) -> list[Countersignature]:
    """Check the countersignatures that the manifest names: each is about its certificate, by an officer, and in force."""
    found: list[Countersignature] = []
    for entry in (each for each in manifest.predicate["certificates"] if "countersignature" in each):
        file, at = str(entry["countersignature"])[:_MAX_NAME], manifest.ledger
        try:
            if file not in manifest.subjects:
                raise NotVerified("release.countersignature-wrong", "it is not among the files of the manifest")
            found.append(each := Countersignature.read(read_file(folder, file)))
            each.check(
                read_file(folder, entry["signed"]), manifest.signer, trust=trust, parties=parties,
                not_after=manifest.not_after, now=now, file=file, note=note,
            )  # fmt: skip
            if _signed_by(at["checkpoint"], NoteKey(at["origin"], each.signer)):
                note("release.officer-key-in-other-role", "its key signs the checkpoints of the ledger", file)
        except LaminaError as error:
            note(error.code, error.problem, file)
    return found


def _check_posture(manifest: Manifest, certificate: Certificate, note: Note) -> None:
    """The posture says no less than the certificate of a run."""
    layers = {layer.name: layer for layer in manifest.posture.layers}
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
        checkpoint, _ = parse_checkpoint(at["checkpoint"])
        if _signed_by(at["checkpoint"], NoteKey(checkpoint.origin, manifest.signer)):
            note("release.key-in-other-role", "its key signs the checkpoints of the ledger", MANIFEST)
        stated = (at["origin"], at["size"], at["root"], manifest.posture.as_of_size)
        if (checkpoint.origin, checkpoint.size, checkpoint.root.hex(), checkpoint.size) != stated:
            note("release.ledger-head-differs", "the manifest and its checkpoint state another ledger head", CHECKPOINT)
        keys = [] if trust is None else replace(trust, plain=()).keys(checkpoint.origin, now)  # plain: releases, owner
        if trust is not None and trust.ring is not None and keys:
            verify_checkpoint(at["checkpoint"], [NoteKey(checkpoint.origin, key) for key in keys])
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
