"""Sign a certificate of a run: the privacy loss of every class, the assumptions, and what is not covered.

Spends no budget. Writes certificate.json, certificate.cose (the same, signed) and certificate.pdf. The command verifies the ledger
first and computes every figure from its records. Times are the ledger's: the same run and ledger give the same bytes.

Facts that no epoch contains (source of the noise, probe, digests of the weights) come from the end record of the run in the ledger.
They are marked as stated by the trainer and compared with the files of the folder. A run without that record is refused; repeat the
command that trained it to add the record.

A run whose guarantee does not hold (noise from a chosen seed, not probed, raw figures written, a ledger that does not verify, …)
gets no signature; the command prints `private: false` with the reasons, and the exit code is 1.

--countersign adds the signature of a privacy officer to a certificate that a key in --trust has signed. It writes
countersignature.cose, which `release make --countersignature` puts into a release. --name, --role and --valid-until are required;
other omitted fields are "not stated". The key must not have another role.

--profile prints the items of a guideline with the evidence for each, or "not stated": nist-800-226 (NIST SP 800-226), or
hipaa-expert-determination (45 CFR 164.514(b)(1)), which also reads countersignature.cose beside certificate.cose in the folder of
the run, if it is about this certificate. It claims no compliance.

Examples:

  lamina certify runs/first
  lamina certify runs/first --key release.key --trust trusted.json --json
  lamina certify runs/first --decision decision.pdf
  lamina certify runs/first --profile nist-800-226
  lamina certify --countersign certificate.cose --key officer.key --trust release.pub --name NAME --role ROLE --valid-until 2027-06-30
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamina.cli.command import Answer, argument, command, misuse, option, time_option
from lamina.cli.open_ledger import refuse_older
from lamina.cli.terminal import existing_ledger, open_private_key, print_note
from lamina.errors import BadKey, LaminaError, RunError
from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.ledger.reader import LedgerReader
from lamina.ledger.store.sqlite import is_postgres_url
from lamina.ledger.verify.tree_checks import Trust
from lamina.release.certificate import CERTIFICATE_TYPE, Certificate
from lamina.release.certificate import certify as make_certificate
from lamina.release.certificate_pdf import certificate_pdf, decision_pdf
from lamina.release.countersignature import Countersignature, countersign, other_role, role_of
from lamina.release.profiles import PROFILES, profile_dict, profile_text
from lamina.release.typeset import import_typst
from lamina.release.verifier import release_keys
from lamina.sign.keys import PrivateKey, read_small, replace_file, write_new
from lamina.sign.signed_json import read_cose

RUN = argument("RUN", "folder of a run: runs/NAME")
RUN_LEDGER = option("ledger of the run; default: RUN/ledger.db", "--ledger", metavar="LEDGER")
RELEASE_KEY = option("release key that signs; a ledger of your own has one beside it", "--key")
TRUST = option("keys from elsewhere, as for lamina ledger verify", "--trust", metavar="KEYS", load=Trust.load)
_OFFICER = {"panel": "Countersignature by a privacy officer"}


@command(keys=True)
def certify(
    run: Path | None = argument("RUN", "folder of a run: runs/NAME", default=None),
    key: Path | None = RELEASE_KEY,
    ledger: str | None = RUN_LEDGER,
    trust: Trust | None = TRUST,
    folder: Path | None = option("output folder; default: RUN", "--output", "-o", metavar="DIR"),
    decision: Path | None = option(
        "also write the release decision for a privacy officer, one page", metavar="FILE.pdf"
    ),
    profile: str | None = option(
        "print the evidence for each item of a checklist; write no file", choices=list(PROFILES)
    ),
    certificate: Path | None = option("signed certificate to countersign, instead of RUN", "--countersign", **_OFFICER),
    name: str | None = option("name of the officer", **_OFFICER),
    role: str | None = option("role of the officer", **_OFFICER),
    qualification: str | None = option("qualification of the officer", **_OFFICER),
    recipient: str | None = option("recipient of the model", **_OFFICER),
    purpose: str | None = option("purpose of the release", **_OFFICER),
    legal_basis: str | None = option("legal basis of the release", **_OFFICER),
    method: str | None = option("method of the determination", **_OFFICER),
    result: str | None = option("result of the determination", **_OFFICER),
    valid_until: int | None = time_option("end of validity", **_OFFICER),
) -> Answer:
    if (run is None) == (certificate is None):
        raise misuse("give the folder of a run, or --countersign with a signed certificate", "RUN")
    if certificate is not None:
        texts = {
            "name": name, "role": role, "qualification": qualification, "recipient": recipient, "purpose": purpose,
            "legal_basis": legal_basis, "method": method, "result": result,
        }  # fmt: skip
        made = _countersigned(certificate, key, trust, ledger, texts, valid_until)
        path = (folder or certificate.parent) / "countersignature.cose"
        replace_file(path, made.data, "the countersignature", mode=0o644)
        return Answer({**made.content, "file": str(path)}, f"countersigned by {made}", f"  written: {path}")
    assert run is not None
    place = run_ledger(run, ledger)
    with LedgerReader.read_only(place) as reader:
        refuse_older(reader, place)
        found = make_certificate(run, reader, trust=trust)
    if profile is not None:
        table = profile_dict(profile, found.content, _countersignature_of(found, folder or run))
        return Answer(table, profile_text(table), ok=found.private)
    signer = release_key(place, key) if found.private else None
    written = _write(found, signer, run if folder is None else folder, decision)
    paths = [f"  written: {path}" for path in written.values()]
    return Answer({**found.content, "files": written}, str(found), *paths, ok=found.private)


def _write(found: Certificate, signer: PrivateKey | None, out: Path, decision: Path | None) -> dict[str, str]:
    """Write the certificate and its papers, and remove earlier ones. Return the paths by kind."""
    signed = None if signer is None else found.signed(signer)  # before anything is written
    pdf, by = can_typeset(), None if signer is None else signer.public.name
    out.mkdir(parents=True, exist_ok=True)
    papers = {
        "json": (out / "certificate.json", found.json()),
        "cose": (out / "certificate.cose", signed),
        "pdf": (out / "certificate.pdf", certificate_pdf(found, by) if pdf else None),
        **({} if decision is None else {"decision": (decision, decision_pdf(found) if pdf else None)}),
    }
    for path, data in papers.values():
        if data is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, data, "the certificate", mode=0o644)
    return {kind: str(path) for kind, (path, data) in papers.items() if data is not None}


def _countersigned(
    file: Path, key: Path | None, trust: Trust | None, ledger: str | None, texts: Mapping[str, str | None],
    valid_until: int | None,
) -> Countersignature:  # fmt: skip
    """Return the countersignature of a certificate that a trusted release key has signed."""
    if key is None or trust is None or valid_until is None:
        problem = "a countersignature needs --key (the officer's), --trust (the release key) and --valid-until"
        raise BadKey("cli.countersign-incomplete", problem, "lamina keys new officer.key makes a key; give all three")
    officer, now, data = open_private_key(key), int(time.time()), read_small(file, "the certificate")
    keys = release_keys(trust, now) or ()
    Certificate.read(data, keys)
    by = read_cose(data, CERTIFICATE_TYPE).by(keys)
    assert by is not None  # `read` has checked it
    parties: Any = None
    if ledger is not None:
        with LedgerReader.read_only(existing_ledger(ledger)) as reader:
            parties = reader.parties()
    if named := role_of(officer.public, by, trust, parties):
        raise other_role(officer.public, named)
    return Countersignature.read(countersign(data, officer, texts, now=now, valid_until=valid_until))


def _countersignature_of(found: Certificate, folder: Path) -> Mapping[str, Any] | None:
    """Return what an officer states about this certificate; None unless the signed form in the folder is the same."""
    file, officer = folder / "certificate.cose", folder / "countersignature.cose"
    if not (file.is_file() and officer.is_file()):
        return None
    data, made = read_small(file, "the certificate"), Countersignature.read(read_small(officer, "the countersignature"))
    same = made.is_about(data) and read_cose(data, CERTIFICATE_TYPE).payload == found.json()
    if not same:
        print_note(f"'{officer}' is about another certificate of the run, so its statements are left out")
    return made.content if same else None


def run_ledger(run: Path, ledger: str | None) -> str:
    """The ledger of a run: as given, or the one that its folder links to."""
    if not (run / "metrics.json").is_file():
        problem = f"'{run}' is no folder of a run that has begun: it has no metrics.json"
        raise RunError("release.not-a-run", problem, "name the folder that lamina train wrote: runs/NAME")
    return existing_ledger(str(run / "ledger.db") if ledger is None else ledger)


def release_key(place: str, given: Path | None) -> PrivateKey:
    """The release key: as given; else the one beside a ledger of one's own, which is made when first needed."""
    if given is not None:
        return open_private_key(given)
    if is_postgres_url(place) or not governing_key_path(place).exists():
        problem = "this ledger has an owner elsewhere, and no release key was given"
        raise BadKey("cli.release-key-missing", problem, "give it: --key release.key (lamina keys new makes one)")
    path = ledger_key_path(place).with_suffix(".release.pem")
    if not path.exists():
        made = PrivateKey.generate()
        made.save(path, None)
        write_new(path.with_suffix(".pub"), made.public.pem(), "the public key", mode=0o644)
        print_note(f"made the release key '{path}'; give {path.with_suffix('.pub').name} to recipients of releases")
    return PrivateKey.load(path, None)


def can_typeset() -> bool:
    """Return whether PDFs can be set; print a note if not."""
    try:
        import_typst()
    except LaminaError as error:
        print_note(f"no PDF: {error.problem}; {error.remedy}")
        return False
    return True
