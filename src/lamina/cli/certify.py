"""`lamina certify`: the certificate of a run, as JSON, signed, and as a PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamina.admit.keys import PrivateKey, replace_file, write_new
from lamina.cli.open_ledger import refuse_older
from lamina.cli.terminal import (
    JsonOption,
    PassphraseOption,
    argument,
    existing_ledger,
    open_private_key,
    option,
    print_answer,
    print_note,
)
from lamina.errors import BadKey, LaminaError, RunError
from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.ledger.reader import LedgerReader
from lamina.ledger.store.sqlite import is_postgres_url
from lamina.ledger.verify.tree_checks import Trust
from lamina.release.certificate import Certificate
from lamina.release.certificate import certify as make_certificate
from lamina.release.certificate_pdf import certificate_pdf

RunArgument = Annotated[Path, argument("RUN", "folder of a run: runs/NAME")]
LedgerOption = Annotated[str | None, option("ledger of the run; default: RUN/ledger.db", "--ledger", metavar="LEDGER")]
ReleaseKeyOption = Annotated[
    Path | None, option("release key that signs; a ledger of your own has one beside it", "--key", metavar="FILE")
]
TrustOption = Annotated[Path | None, option("keys from elsewhere, as for lamina ledger verify", metavar="KEYS")]


def certify(
    run: RunArgument,
    key: ReleaseKeyOption = None,
    passphrase_file: PassphraseOption = None,
    ledger: LedgerOption = None,
    trust: TrustOption = None,
    folder: Annotated[Path | None, option("where to write it; default: RUN", "--output", "-o", metavar="DIR")] = None,
    as_json: JsonOption = False,
) -> None:
    """State what a run has cost every class, under which assumptions, and what is not covered; and sign it.

    Spends nothing. Writes certificate.json, certificate.cose (the same, signed) and certificate.pdf (one or two pages for a file). The
    ledger is verified first, and every figure is computed from what it records. Times are the ledger's: the same run and
    ledger give the same bytes.

    Facts that no epoch contains (source of the noise, probe, digests of the weights) are read from the end of the run that
    the ledger records. They are marked as stated by the trainer, and the files of the folder are compared with them. A run
    without that record is refused; run the command that trained it again to add the record.

    A run whose guarantee does not hold (noise from a chosen seed, not probed, raw figures written, a ledger that does not
    verify, …) gets no signature: exit code 1, `private: false` and the reasons.

    Examples:

      lamina certify runs/first
      lamina certify runs/first --key release.key --trust trusted.json --json
    """
    place = run_ledger(run, ledger)
    trusted = None if trust is None else Trust.load(trust)
    with LedgerReader.read_only(place) as reader:
        refuse_older(reader, place)
        found = make_certificate(run, reader, trust=trusted)
    signer = release_key(place, key, passphrase_file) if found.private else None
    signed = None if signer is None else found.signed(signer)  # before anything is written
    out = run if folder is None else folder
    paths = {"json": out / "certificate.json"}
    out.mkdir(parents=True, exist_ok=True)
    replace_file(paths["json"], found.json(), "the certificate", mode=0o644)
    if signed is not None:
        paths["cose"] = out / "certificate.cose"
        replace_file(paths["cose"], signed, "the certificate", mode=0o644)
    else:
        (out / "certificate.cose").unlink(missing_ok=True)
    if (pdf := pdf_or_note(found, None if signer is None else signer.public.name)) is not None:
        paths["pdf"] = out / "certificate.pdf"
        replace_file(paths["pdf"], pdf, "the certificate", mode=0o644)
    else:
        (out / "certificate.pdf").unlink(missing_ok=True)  # of an earlier time, which says something else
    written = {kind: str(path) for kind, path in paths.items()}
    text = "\n".join([str(found), *(f"  written: {path}" for path in written.values())])
    print_answer({**found.content, "files": written}, text, as_json)
    if not found.private:
        raise typer.Exit(1)


def run_ledger(run: Path, ledger: str | None) -> str:
    """The ledger of a run: as given, or the one that its folder links to."""
    if not (run / "metrics.json").is_file():
        problem = f"'{run}' is no folder of a run that has begun: it has no metrics.json"
        raise RunError("release.not-a-run", problem, "name the folder that lamina train wrote: runs/NAME")
    return existing_ledger(str(run / "ledger.db") if ledger is None else ledger)


def release_key(place: str, given: Path | None, passphrase_file: Path | None) -> PrivateKey:
    """The release key: as given; else the one beside a ledger of one's own, which is made when first needed."""
    if given is not None:
        return open_private_key(given, passphrase_file)
    if is_postgres_url(place) or not governing_key_path(place).exists():
        problem = "this ledger has an owner elsewhere, and no release key was given"
        raise BadKey("cli.release-key-missing", problem, "give it: --key release.key (lamina keys new makes one)")
    path = ledger_key_path(place).with_suffix(".release.pem")
    if not path.exists():
        made = PrivateKey.generate()
        made.save(path, None)
        write_new(path.with_suffix(".pub"), made.public.pem(), "the public key", mode=0o644)
        print_note(f"made the release key '{path}'; give {path.with_suffix('.pub').name} to who checks releases")
    return PrivateKey.load(path, None)


def pdf_or_note(certificate: Certificate, signer: str | None) -> bytes | None:
    """The PDF; without typst, a note instead."""
    try:
        return certificate_pdf(certificate, signer=signer)
    except LaminaError as error:
        print_note(f"no PDF: {error.problem}; {error.remedy}")
        return None
