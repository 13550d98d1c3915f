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

A verifier needs the folder and the keys that it trusts, and nothing else. `maker` makes a release, `verifier` verifies it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field

from lamina.errors import EncodingError, LaminaError, NotVerified
from lamina.files import Folder, close_folder, open_folder, open_plain
from lamina.release.posture import Posture
from lamina.release.query import GatePolicy, Name
from lamina.release.schema import Digest, Document, LedgerHead, RunId, Text, read_document
from lamina.sign.dsse import read_statement
from lamina.sign.keys import PublicKey, parse_utc
from lamina.sign.model_signing import MODEL_SIGNATURE
from lamina.sign.signed_json import canonical_json, parse_json

_DIGEST = re.compile("[0-9a-f]{64}")
MANIFEST = "manifest.json"
CHECKPOINT = "checkpoint.txt"
PREDICATE_TYPE = "urn:lamina:release:v1"
MAX_FILES = 4096
_MAX_RUNS = 1024
_MAX_PAPER_BYTES = 64 << 20


class CertificateEntry(Document):
    """The files about one run: its certificate, the same signed, and the countersignature of an officer."""

    run: RunId
    file: Text
    signed: Text
    countersignature: Text | None = None


class BundleKey(Document):
    """The OpenSSF model-signing bundle of a release, and the key that signed it."""

    file: Literal[MODEL_SIGNATURE]  # type: ignore[valid-type]
    public_key: str


class Predicate(Document):
    """What a manifest states, in the order of its bytes."""

    version: Literal[1] = 1
    name: Name
    created: str
    not_after: str
    signer: Digest
    runs: Annotated[list[RunId], Field(min_length=1, max_length=_MAX_RUNS)]
    certificates: Annotated[list[CertificateEntry], Field(max_length=_MAX_RUNS)]
    ledger: LedgerHead
    posture: Posture
    gate: GatePolicy
    model_signing: BundleKey | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest that was read: what it states, and its digest, under which the ledger records it."""

    digest: str
    subjects: Mapping[str, str]
    predicate: Predicate
    not_after: int
    created: int
    signer: PublicKey

    @property
    def ledger(self) -> LedgerHead:
        """Where the ledger stood."""
        return self.predicate.ledger

    @property
    def posture(self) -> Posture:
        """The privacy posture of the model."""
        return self.predicate.posture

    @property
    def gate(self) -> GatePolicy:
        """The settings of its gate."""
        return self.predicate.gate


def read_manifest(folder: Path, keys: tuple[PublicKey, ...] | None) -> Manifest:
    """Return the manifest, if its signature holds: by one of `keys`, or without keys by the one that it names itself."""
    data = read_file(folder, MANIFEST)
    statement, key = read_statement(data, keys or (), PREDICATE_TYPE)
    envelope = parse_json(data, "the envelope")
    # The ledger records the digest of these bytes.
    if data != canonical_json(envelope) or len(envelope["signatures"]) != 1:
        raise _malformed("it has other bytes than its signer wrote: spaces, ends of lines, or a second signature")
    subjects = _subjects(statement["subject"])
    try:
        predicate = read_document(Predicate, statement["predicate"], "the manifest", "release.manifest-malformed")
        signer = PublicKey(bytes.fromhex(predicate.signer))
        not_after, created = parse_utc(predicate.not_after), parse_utc(predicate.created)
    except LaminaError as error:
        raise _malformed(error.problem) from None
    if len(set(predicate.runs)) < len(predicate.runs) or not_after <= created:
        raise _malformed("it names a run twice, or its last date of serving is before the date on which it was made")
    if keys is None:
        _, key = read_statement(data, [signer], PREDICATE_TYPE)
    if key is None or key.id != signer.id:
        named = f"none of the trusted release keys signed it; it names key {signer.name[:16]}"
        problem = named if keys is not None else "the key that it names did not sign it"
        raise NotVerified("release.foreign-key", problem, "ask whoever released it for their release key")
    digest = hashlib.sha256(data).hexdigest()
    return Manifest(
        digest=digest, subjects=subjects, predicate=predicate, not_after=not_after, created=created, signer=signer
    )


def _malformed(problem: str) -> EncodingError:
    return EncodingError("release.manifest-malformed", f"the manifest cannot be read: {problem}", "fetch it again")


def _subjects(listed: object) -> dict[str, str]:
    """Return digests by name; NotVerified for a name that leads out of the folder or is there twice."""
    found: dict[str, str] = {}
    if type(listed) is not list or not 0 < len(listed) <= MAX_FILES:
        raise _malformed("it lists no files, or too many")
    for each in listed:
        try:
            name, digest = each["name"], each["digest"]["sha256"]
            plain = PurePosixPath(name)
            inside = not plain.is_absolute() and ".." not in plain.parts and str(plain) == name and "\\" not in name
            inside = inside and bool(plain.parts)
        except (TypeError, KeyError):
            raise _malformed("a file has no name or no SHA-256") from None
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise _malformed(f"the digest of {name[:80]!r} is no SHA-256")
        if not inside or not name.isprintable() or name in found or name in (MANIFEST, MODEL_SIGNATURE):
            problem = f"the manifest names the file {name[:80]!r}, which is twice, outside the folder, or no plain name"
            raise NotVerified("release.name-unsafe", problem, "do not use this release")
        found[name] = digest
    return found


def evaluation_of(certificate: str) -> str:
    """Return the name of the evaluation in a release that belongs to a certificate of this name."""
    return certificate.replace("certificate", "evaluation")


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
    at: Folder | None = None
    try:
        at = open_folder(folder, follow=True)
        *above, last = PurePosixPath(name).parts
        for part in above:
            inner = open_folder(part, at)
            close_folder(at)
            at = inner
        found = open_plain(last, at)
    except OSError as error:
        problem = f"'{name}' cannot be read: {error.strerror}"
        raise NotVerified("release.file-missing", problem, "fetch the release again") from None
    finally:
        if at is not None:
            close_folder(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise NotVerified("release.not-a-file", f"'{name}' is no regular file", "fetch the release again")
    return found
