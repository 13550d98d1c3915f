"""Compare a release with its ledger: compute every figure, class, condition and digest again, and name every difference.

The holder of the release key is the audited party, so its signature is no evidence here. What only the issuer can observe
(the result of its own verification, files in its folder) is not compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from lamina.errors import LaminaError, NotVerified
from lamina.ledger.governance_records import KeyEvents, PolicyChange, Release, Role, TermsChange, Withdrawal
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import KIND_NAMES, Epoch, Record
from lamina.ledger.schema import NANO
from lamina.ledger.signed_checkpoint import verify_checkpoint
from lamina.ledger.verify.release_checks import FIGURE_TOLERANCE
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.release.certificate import Certificate, certificate_content, in_other_role
from lamina.release.enclosed_ledger import PrunedLedger, ReadableLedger
from lamina.release.posture import Posture, read_posture
from lamina.release.run_evidence import RunEvidence
from lamina.sign.keys import format_utc
from lamina.sign.notes import NoteKey
from lamina.validate import short_repr

if TYPE_CHECKING:
    from lamina.release.manifest import Manifest

Note = Callable[[str, str, str | None], None]  # code, reason, file
_MANIFEST, _CHECKPOINT = "manifest.json", "checkpoint.txt"
_MOST_DIFFERENCES = 20  # differences that are named for one part
_VERDICTS = ("trusted", "self-consistent")


def compare_with_ledger(
    manifest: Manifest, certificates: Mapping[str, Certificate], ledger: LedgerReader | PrunedLedger, *, trust: Trust | None,
    now: int, note: Note, evaluations: Mapping[str, bytes], enclosed: bool = False,
) -> Verification | None:  # fmt: skip
    """Note every difference between a release and its ledger. Return the verification of the ledger, if it is the right one.

    `certificates` are those of the release, by file, and `evaluations` what they take their utility from, by the same file.
    Returns None for another ledger or one that does not verify. A ledger that is `enclosed` in the release cannot record it.
    """
    # 1. The ledger is the one that the manifest names, continued.
    if not _is_ledger_of(manifest, ledger, note):
        return None
    # 2. The ledger verifies, and one of its keys signed the checkpoint that the release stands on.
    try:
        parties = ledger.parties()
    except LaminaError as error:  # its leaves are not those that were signed
        note("release.ledger-not-verified", f"the ledger does not verify: {error.problem}", None)
        return None
    if isinstance(ledger, PrunedLedger):
        verification = ledger.verification
    else:
        verification = verify(ledger.store, trust=None if trust is None else trust.for_ledger(parties), now=now)
        if verification.problem is not None and verification.problem.code == "verify.leaves-unsigned":
            verification = verify(
                ledger.store, now=now
            )  # includes leaves since the release, which may not be signed yet
    if (problem := verification.problem) is not None:
        note("release.ledger-not-verified", f"the ledger does not verify: {problem}", None)
        if problem.kind != KIND_NAMES[Release]:
            return None  # a ledger that does not verify is no evidence
    signers = [each.public for each in ledger.parties(manifest.ledger.size).histories(Role.LEDGER)]
    try:
        verify_checkpoint(manifest.ledger.checkpoint, [NoteKey(ledger.origin, key) for key in signers])
    except LaminaError as error:
        note("release.ledger-head-not-verified", error.problem, _CHECKPOINT)
    # 3. The signer has no other role in the ledger.
    signer = parties.history(manifest.signer.id)
    if signer is not None and signer.key.role is not Role.RELEASE:
        note("release.key-in-other-role", in_other_role(manifest.signer).problem, _MANIFEST)
    elif signer is not None and (wrong := signer.problem(now, manifest.created)) is not None:
        note("release.key-retired", f"according to the ledger, its key may no longer sign: {wrong.reason}", _MANIFEST)
    # 4. The ledger records the release.
    if not enclosed:
        _check_record(manifest, ledger, note)
    # 5. Every certificate, and 6. the posture, follow from the leaves up to that checkpoint.
    try:
        at, runs = manifest.ledger.checkpoint, map(bytes.fromhex, manifest.predicate.runs)
        evidence = [RunEvidence.read(ledger, run, at) for run in runs]
        for run, (file, certificate) in zip(evidence, certificates.items(), strict=False):
            _compare_certificate(replace(run, evaluation=evaluations.get(file)), certificate, file, ledger, note)
        _compare_posture(manifest, read_posture(ledger, evidence), evidence, ledger, note)
    except LaminaError as error:
        note(error.code, error.problem, _MANIFEST)
    return verification if verification.verified else None


def changes_since(manifest: Manifest, ledger: LedgerReader) -> dict[str, list[int]]:
    """Return the leaves that the ledger gained after the release, by what they change. They are not problems of the release.

    Epochs count if they charge a class of the release.
    """
    classes = manifest.posture.classes.keys()
    found: dict[str, list[int]] = {}
    for kind, name in _CHANGES.items():
        for leaf in ledger.of_kind(kind, manifest.ledger.size):
            record = leaf.record
            if isinstance(record, Epoch) and not classes & {each.cls for each in record.accounts}:
                continue
            if isinstance(record, Release) and record.manifest.hex() == manifest.digest:
                continue
            found.setdefault(name, []).append(leaf.seq)
    return found


_CHANGES: dict[type[Record], str] = {
    Epoch: "epochs of its classes",
    Withdrawal: "withdrawals",
    Release: "other releases",
    KeyEvents: "key changes",
    PolicyChange: "policy changes",
    TermsChange: "changes of terms",
}


def _is_ledger_of(manifest: Manifest, ledger: ReadableLedger, note: Note) -> bool:
    at = manifest.ledger
    if ledger.origin != at.origin or ledger.header_hash.hex() != at.header:
        note("release.other-ledger", f"{ledger.name} is not its ledger, which has origin {at.origin!r}", _CHECKPOINT)
    elif ledger.size < at.size:
        reason = f"the ledger has {ledger.size} leaves, but the release refers to {at.size}"
        note("release.ledger-older", reason, _CHECKPOINT)
    elif ledger.root_at(at.size).hex() != at.root:
        note("release.ledger-forked", f"the first {at.size} leaves of the ledger have another root", _CHECKPOINT)
    else:
        return True
    return False


def _check_record(manifest: Manifest, ledger: ReadableLedger, note: Note) -> None:
    """Check that a release record after the checkpoint of the release states the same as the manifest."""
    records = (leaf.record for leaf in ledger.of_kind(Release, manifest.ledger.size))
    mine = [each for each in records if isinstance(each, Release) and each.manifest.hex() == manifest.digest]
    if not mine:
        note("release.not-recorded", "the ledger has no record of this release", _MANIFEST)
    stated = (manifest.predicate.runs, manifest.not_after)
    for each in mine:
        if ([run.hex() for run in each.runs], each.not_after) != stated:
            reason = "its record in the ledger names other runs, or another date until which it may be served"
            note("release.record-differs", reason, _MANIFEST)


def _compare_certificate(
    run: RunEvidence, certificate: Certificate, file: str, ledger: ReadableLedger, note: Note
) -> None:
    stated = certificate.content
    verdict = stated["ledger"].get("verdict")
    verdict = verdict if verdict in _VERDICTS else _VERDICTS[-1]
    # A certificate is signed only if the issuer saw nothing wrong: no condition failed.
    expected = certificate_content(run, ledger, verdict=verdict, failed={}, beside=stated["ledgers_beside"])

    def compare(code: str, *parts: str) -> None:
        for part in parts:
            found = differences(_shown(stated.get(part), ledger), _shown(expected[part], ledger), part)
            for path, one, two in islice(
                (each for each in found if not _is_hidden(each[0], ledger)), _MOST_DIFFERENCES
            ):
                reason = f"{path} is {short_repr(one)} in the certificate, but {short_repr(two)} by the ledger"
                note(code, reason, file)

    compare("release.figures-differ", "classes", "accountant")
    compare("release.weights-differ", "model")
    compare("release.plan-differs", "plan")
    compare("release.layers-differ", "layers")
    compare("release.facts-differ", "run", "trainer", "program", "tuning")
    compare("release.utility-differs", "utility")
    compare("release.conditions-differ", "private", "attested", "conditions")
    compare("release.ledger-head-differs", "ledger", "issued")
    compare("release.statement-differs", "protects", "statements", "other_people", "about")


_HIDDEN = re.compile(r"attested|posture\.attested|posture\.withdrawn\..*|classes\..*\.bounds\[\d+\]\.contributions")
HIDDEN_TOPICS = ("withdrawn", "attestation")


def _is_hidden(path: str, ledger: ReadableLedger) -> bool:
    """Return whether a pruned ledger cannot show what this field states: it is about contributions."""
    return isinstance(ledger, PrunedLedger) and _HIDDEN.fullmatch(path) is not None


def _shown(part: Any, ledger: ReadableLedger) -> Any:
    """Return a part of a certificate without statements about contributions, if the ledger is pruned."""
    if not isinstance(ledger, PrunedLedger) or type(part) is not list:
        return part
    return [each for each in part if type(each) is not dict or each.get("topic") not in HIDDEN_TOPICS]


def _compare_posture(
    manifest: Manifest, expected: Posture, runs: Sequence[RunEvidence], ledger: ReadableLedger, note: Note
) -> None:
    found = differences(manifest.posture.model_dump(), expected.model_dump(), "posture")
    for path, one, two in islice((each for each in found if not _is_hidden(each[0], ledger)), _MOST_DIFFERENCES):
        reason = f"{path} is {short_repr(one)} in the manifest, but {short_repr(two)} by the ledger"
        note("release.posture-differs", reason, _MANIFEST)
    if manifest.predicate.created != format_utc(runs[-1].time):
        reason = f"it states the date {manifest.predicate.created}, but its checkpoint {format_utc(runs[-1].time)}"
        note("release.ledger-head-differs", reason, _MANIFEST)
    try:
        check_parents(runs)
        if manifest.gate.unstated_purposes:
            check_purposes(expected, runs)
    except NotVerified as error:
        note(error.code, error.problem, _MANIFEST)


def check_parents(runs: Sequence[RunEvidence]) -> None:
    """Raise NotVerified if a run continued the weights of a run that the release omits, so that its ε would be missing."""
    for run in runs:
        parent = None if run.begin is None else run.begin[1].parent
        if parent is not None and parent not in {each.run for each in runs}:
            before = f"run {parent.hex()[:8]}, which the release leaves out"
            problem = f"run {run.run.hex()[:8]} continued the weights of {before}"
            remedy = "name the folders of all runs that trained these weights, in their order"
            raise NotVerified("release.parent-missing", problem, remedy)


def check_purposes(posture: Posture, runs: Sequence[RunEvidence]) -> None:
    """Raise NotVerified if the plans of a class state purposes but have none in common; that differs from stating none."""
    for entry in (entry for run in runs for plan in run.plans.values() for entry in plan.classes):
        if entry.purposes and not posture.classes[entry.name].purposes:
            problem = f"class {entry.name!r} was used for several purposes, but its plans have none in common"
            remedy = "leave out --any-purpose; the class may then not be used"
            raise NotVerified("release.purposes-differ", problem, remedy)


def differences(stated: Any, expected: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, stated, expected) of every difference. Floats may differ by rounding between two machines."""
    if type(stated) is dict and type(expected) is dict:
        for name in dict.fromkeys((*expected, *stated)):
            yield from differences(stated.get(name), expected.get(name), f"{path}.{name}")
    elif type(stated) is list and type(expected) is list and len(stated) == len(expected):
        for at, (one, two) in enumerate(zip(stated, expected, strict=True)):
            yield from differences(one, two, f"{path}[{at}]")
    elif type(stated) is list and type(expected) is list:
        yield from ((f"{path}[{at}]", each, None) for at, each in enumerate(stated) if each not in expected)
        yield from ((f"{path}[{at}]", None, each) for at, each in enumerate(expected) if each not in stated)
        yield f"the number of {path}", len(stated), len(expected)
    elif type(expected) is float and type(stated) in (int, float):
        if not math.isclose(stated, expected, rel_tol=FIGURE_TOLERANCE, abs_tol=2 / NANO):
            yield path, stated, expected
    elif type(stated) is not type(expected) or stated != expected:
        yield path, stated, expected
