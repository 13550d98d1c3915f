"""Make a release: a folder with weights, certificates and papers, signed and recorded in the ledger."""

from __future__ import annotations

import hashlib
import os
import shutil
import time as system
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lamina.errors import NotVerified, PlanError
from lamina.ledger.governance_records import Release
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import LAST_SEQ, Epoch, decode_leaf
from lamina.ledger.run_records import WEIGHTS
from lamina.ledger.store.rows import StoreReader
from lamina.ledger.store.sqlite import SqliteStore
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.release.certificate import Certificate, certify, ledger_reference
from lamina.release.certificate_pdf import certificate_pdf, decision_pdf
from lamina.release.comparison import check_parents, check_purposes
from lamina.release.countersignature import Countersignature
from lamina.release.enclosed_ledger import ENCLOSED, pruned_ledger
from lamina.release.manifest import CHECKPOINT, MANIFEST, PREDICATE_TYPE, evaluation_of
from lamina.release.model_card import ml_bom, model_card
from lamina.release.posture import read_posture
from lamina.release.query import GatePolicy
from lamina.release.run_evidence import RunEvidence, RunMetrics, file_digest
from lamina.release.utility import read_evaluation
from lamina.sign.dsse import make_statement, sign_statement
from lamina.sign.keys import P256Key, PrivateKey, PublicKey, format_utc, write_new
from lamina.sign.model_signing import MODEL_SIGNATURE, sign_model
from lamina.validate import short_repr


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
    with_ledger: Literal["pruned", "full"] | None = None,
) -> Path:
    """Make the folder `out` of a release, sign it, and record it in the ledger. Returns the path of its manifest.

    runs       folders of the runs whose training is in the model, in their order; the weights are the last one's
    ledger     the one in which they were charged, opened with its key
    key        the release key
    not_after  until when it may be served; a year after the newest checkpoint if not given, or less if an officer says so
    pdf        whether to set certificates, and the release decision about the released weights, as PDFs; needs typst
    bundle_key signs the OpenSSF model-signing bundle; without it there is none
    countersignatures  of privacy officers, at most one for each certificate
    with_ledger  the form of the ledger to put into the folder, so that a receiver computes every figure again without another file
    """
    out = Path(out)
    if out.exists():
        problem = f"'{out}' exists, and a release is never written over another"
        raise NotVerified("release.folder-exists", problem, "name a new folder")
    if with_ledger == "full" and not isinstance(ledger.store, SqliteStore):
        problem = "the ledger is in a database, which cannot be put into a folder"
        raise PlanError("release.ledger-not-a-file", problem, "put in the pruned form: --with-ledger pruned")
    if not 0 < len(name) <= 512:
        problem = f"the name {short_repr(name)} has {len(name)} characters"
        raise PlanError("release.name-length", problem, "give 1 to 512 characters")
    # 1. Certify every run at one checkpoint. A run that is not private cannot be signed.
    verification, at = verify(ledger.store, trust=trust), ledger.latest()
    certificates = [certify(each, ledger, verification=verification, checkpoint=at) for each in runs]
    signed = [each.signed(key) for each in certificates]
    # 2. Read the posture of the model from the same leaves. No run that its weights continue may be missing.
    evidence = [RunEvidence.read(ledger, RunMetrics.load(each).run, at) for each in runs]
    check_parents(evidence)
    posture, last = read_posture(ledger, evidence), evidence[-1]
    if gate is not None and gate.unstated_purposes:
        check_purposes(posture, evidence)
    # 3. Check the countersignatures of officers.
    officers = list(map(Countersignature.read, countersignatures))
    if not_after is None:
        not_after = min([last.time + 365 * 86_400, *(each.valid_until for each in officers)])
    countersigned = _by_certificate(officers, signed, key.public, ledger, not_after)
    made = out.with_name(f".{out.name}.{os.getpid()}.lamina-tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        # 4. Write weights and papers.
        _copy_weights(Path(runs[-1]) / WEIGHTS, made / WEIGHTS, certificates[-1])
        papers, entries = {CHECKPOINT: last.checkpoint_text.encode()}, list[dict[str, str]]()
        for folder, certificate, cose in zip(runs, certificates, signed, strict=True):
            number, officer = len(entries) + 1, countersigned.get(cose)
            papers |= _about_run(number, Path(folder), certificate, cose, officer)
            entries.append(_entry(number, certificate, officer))
            if pdf:
                papers[f"{_numbered('certificate', number)}.pdf"] = certificate_pdf(
                    certificate, key.public.name, officer
                )
        if pdf:
            papers["decision.pdf"] = decision_pdf(certificates[-1], countersigned.get(signed[-1]))
        if with_ledger == "pruned":
            papers[ENCLOSED["pruned"]] = pruned_ledger(ledger, last.checkpoint.size)
        elif with_ledger == "full":
            copy = made / "copy"
            assert isinstance(ledger.store, SqliteStore)
            ledger.store.copy(copy)
            papers[ENCLOSED["full"]] = copy.read_bytes()
            copy.unlink()
        papers["README.md"] = model_card(name, certificates, posture, not_after=format_utc(not_after))
        digests = {each: hashlib.sha256(data).hexdigest() for each, data in papers.items()}
        digests[WEIGHTS] = certificates[-1].content["model"]["sha256"]
        papers["bom.cdx.json"] = ml_bom(name, digests, certificates, posture)
        digests["bom.cdx.json"] = hashlib.sha256(papers["bom.cdx.json"]).hexdigest()
        # 5. Sign the manifest over all files, and the bundle over the manifest too.
        predicate = {
            "version": 1,
            "name": name,
            "created": format_utc(last.time),
            "not_after": format_utc(not_after),
            "signer": key.public.x.hex(),
            "runs": [each.run.hex() for each in evidence],
            "certificates": entries,
            "ledger": ledger_reference(last, ledger.origin),
            "posture": posture.model_dump(),
            "gate": (gate or GatePolicy()).to_dict(),
        }
        if bundle_key is not None:
            predicate["model_signing"] = {"file": MODEL_SIGNATURE, "public_key": bundle_key.public_pem.decode()}
        papers[MANIFEST] = envelope = sign_statement(make_statement(digests, PREDICATE_TYPE, predicate), key)
        if bundle_key is not None:
            covered = {**digests, MANIFEST: hashlib.sha256(envelope).hexdigest()}
            papers[MODEL_SIGNATURE] = sign_model(name, covered, bundle_key)
        for each, data in papers.items():
            write_new(made / each, data, "a file of the release", mode=0o644)
        # 6. Record the release in the ledger, unless a run was charged meanwhile, and publish the folder.
        digest, trained = hashlib.sha256(envelope).digest(), tuple(each.run for each in evidence)
        record = Release(manifest=digest, runs=trained, not_after=not_after)
        ledger.append_with([record], [envelope], lambda rows, seqs: _refuse_new_epochs(rows, last, record))
        if ledger.signs:
            ledger.checkpoint()
        os.rename(made, out)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return out / MANIFEST


def _numbered(kind: str, number: int) -> str:
    return kind if number == 1 else f"{kind}-{number}"


def _about_run(
    number: int, folder: Path, certificate: Certificate, cose: bytes, officer: Countersignature | None
) -> dict[str, bytes]:
    """Return the certificate of a run, plain and signed, with its evaluation and countersignature, by name of the file."""
    stem = _numbered("certificate", number)
    found = {f"{stem}.json": certificate.json(), f"{stem}.cose": cose}
    if certificate.content["utility"] and (data := read_evaluation(folder)) is not None:
        found[evaluation_of(f"{stem}.json")] = data
    return found | ({} if officer is None else {f"{_numbered('countersignature', number)}.cose": officer.data})


def _entry(number: int, certificate: Certificate, officer: Countersignature | None) -> dict[str, str]:
    """Return how the manifest names the files about a run."""
    stem = _numbered("certificate", number)
    entry = {"run": certificate.content["run"]["id"], "file": f"{stem}.json", "signed": f"{stem}.cose"}
    return entry | ({} if officer is None else {"countersignature": f"{_numbered('countersignature', number)}.cose"})


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


def _copy_weights(source: Path, target: Path, certificate: Certificate) -> None:
    shutil.copyfile(source, target)
    if file_digest(target) != certificate.content["model"]["sha256"]:
        problem = f"'{source}' changed while the release was made"
        raise NotVerified("release.weights-changed", problem, "make it again when nobody writes there")
