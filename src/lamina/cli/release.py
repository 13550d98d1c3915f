"""Create and verify signed model releases, ask their gate, and write papers about them.

In this order:

  lamina release make runs/first -o release-1                  make it
  lamina release verify release-1 --trust release.pub          check it; with --ledger, every figure
  lamina release ask release-1 query.json --trust release.pub  may this query draw on it
  lamina release papers release-1 --trust release.pub -o out   write papers for registries, auditors and output checkers
  lamina release log decisions.jsonl --trust log.pub           check what its service decided
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from lamina.cli.certify import RELEASE_KEY, RUN_LEDGER, TRUST, can_typeset, release_key, run_ledger
from lamina.cli.command import Answer, argument, command, group, misuse, option, time_option
from lamina.cli.open_ledger import open_ledger
from lamina.cli.terminal import existing_ledger, passphrase_if_sealed
from lamina.errors import PlanError
from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.ledger.reader import LedgerReader
from lamina.ledger.schema import pluralize
from lamina.ledger.store.sqlite import is_postgres_url
from lamina.ledger.verify.tree_checks import KnownCheckpoint, Trust
from lamina.plan.policy import AboutPolicy
from lamina.release.countersignature import OFFICER, Countersignature
from lamina.release.decision_log import verify_log
from lamina.release.enclosed_ledger import ENCLOSED, FULL_WARNING
from lamina.release.gate import ReleaseGate
from lamina.release.maker import make_release
from lamina.release.papers import TRAINING_WARNING, write_papers
from lamina.release.query import GatePolicy, Query
from lamina.release.verifier import ReleaseVerification, verify_release
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import P256Key, PrivateKey, PublicKey, format_utc, read_small
from lamina.sign.model_signing import MODEL_SIGNATURE
from lamina.sign.signed_json import parse_json

RELEASE = argument("DIR", "folder of a release")
TRUSTS = option(
    "trusted keys: a key ring, or public keys of releases and of the owner of the ledger; repeatable",
    "--trust",
    metavar="KEYS",
)
COMPARED_LEDGER = option("ledger of the release; every figure is computed again from it", "--ledger", metavar="LEDGER")


@command(keys=True)
def make(
    runs: list[Path] = argument("RUN...", "folders of the runs in the model, in their order: runs/NAME"),
    out: Path = option("the new folder", "--output", "-o", metavar="DIR", default=...),
    key: Path | None = RELEASE_KEY,
    ledger: str | None = RUN_LEDGER,
    ledger_key: Path | None = option("key of the ledger, if it is not beside it"),
    trust: Trust | None = TRUST,
    name: str = option("what the model is called", default="model"),
    not_after: int | None = time_option("until when it may be served; default: a year"),
    max_age: int = option(
        "days after the newest signed time of its ledger until a gate denies everything", metavar="DAYS", default=7
    ),
    any_purpose: bool = option("serve classes whose policy names no purpose for any purpose"),
    generation_class: list[str] = option(
        "name what queries draw on: head=layers:head.*,norm; repeatable", metavar="NAME=…"
    ),
    bundle_key: Path | None = option("P-256 key for an OpenSSF model-signing bundle, model.sig"),
    countersignature: list[Path] = option("countersignature of a privacy officer; at most one for each run"),
    with_ledger: str | None = option(
        "put the ledger into the folder: pruned (what the figures need, without contributions), or full",
        choices=list(ENCLOSED),
    ),
) -> Answer:
    """Put the weights of a run into a folder with certificates, model card, inventory and a signed manifest.

    The runs are certified first: one that is not private cannot be released. The manifest (in-toto, in a DSSE envelope)
    names every file by hash, the head of the ledger, and for each layer the classes that reached it, with ε and noise. It is
    recorded in the ledger, so that a contribution can be traced to the models it is in.

    Examples:

      lamina release make runs/first -o release-1
      lamina release make runs/first -o release-1 --key release.key --not-after 2027-06-30 --name ecg-triage
      lamina release make runs/first -o release-1 --generation-class 'head=layers:head.*'
      lamina release make runs/first -o release-1 --bundle-key bundle.key
      lamina release make runs/first -o release-1 --countersignature runs/first/countersignature.cose
      lamina release make runs/first -o release-1 --with-ledger pruned
    """
    place = run_ledger(runs[-1], ledger)
    signer = release_key(place, key)
    second = None if bundle_key is None else P256Key.load(bundle_key, passphrase_if_sealed(bundle_key))
    gate = GatePolicy(
        unstated_purposes=any_purpose,
        max_age=max_age * 86_400,
        generation_classes=dict(map(_generation_class, generation_class)),
    )
    beside = None if is_postgres_url(place) else ledger_key_path(place)
    own = PrivateKey.load(beside, None) if ledger_key is None and beside is not None and beside.exists() else None
    officers = [read_small(path, "the countersignature") for path in countersignature]
    with open_ledger(place, ledger_key, signer=own) as opened:
        manifest = make_release(
            out, runs, opened, signer, name=name, gate=gate, trust=trust, not_after=not_after, pdf=can_typeset(),
            bundle_key=second, countersignatures=officers, with_ledger=cast(Any, with_ledger),
        )  # fmt: skip
        ring = KeyRing()
        for each in {each.signer for each in map(Countersignature.read, officers)}:
            ring.add(each, label=each.name[:16], role=OFFICER)
        found = verify_release(out, trust=Trust(plain=(signer.public,), ring=ring), ledger=opened)
    told = {"folder": str(out), "manifest": str(manifest), **found.to_dict(), "signer": signer.public.name}
    warnings = [FULL_WARNING] if with_ledger == "full" else []
    told["warnings"] = warnings
    owner = governing_key_path(place).with_suffix(".pub")  # of a ledger that `lamina train` created
    trusted = f"--trust {_public_part(place, key)} --trust {owner if owner.exists() else 'OWNER.pub'}"
    where = "LEDGER" if is_postgres_url(place) else place  # the address of a server is printed nowhere
    bundle = "without an OpenSSF model-signing bundle; for one: lamina keys new bundle.key --type p256, then --bundle-key bundle.key"
    if bundle_key is not None:
        files = f"--signature {out}/{MODEL_SIGNATURE} --public_key {bundle_key.with_suffix('.pub')}"
        bundle = f"with OpenSSF's tool: model_signing verify key {out} {files}"
    return Answer(
        told,
        f"release in {out}: {len(told['files'])} files, signed with release key {signer.public.name[:16]}",
        f"  check it: lamina release verify {out} {trusted} --ledger {where}",
        f"  {bundle}",
        *(f"  warning: {each}" for each in warnings),
    )


def _public_part(place: str, key: Path | None) -> str:
    """Where the public part of the release key is, as far as that is known."""
    beside = ledger_key_path(place).with_suffix(".release.pub") if key is None else key.with_suffix(".pub")
    return str(beside) if beside.exists() else "RELEASE.pub"


def _generation_class(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=layers:a,b or NAME=depth:0.75,1 or NAME=adapter:x."""
    name, _, rest = text.partition("=")
    kind, _, values = rest.partition(":")
    parts = values.split(",")
    try:
        if kind == "layers":
            return name, {"layers": parts}
        if kind == "depth":
            low, high = map(float, parts)
            return name, {"depth": [low, high]}
        if kind == "adapter" and name:
            return name, {"adapter": values}
    except ValueError:
        pass
    problem = f"{text!r} is no generation class"
    remedy = "write NAME=layers:PATTERN,… or NAME=depth:LOW,HIGH or NAME=adapter:X"
    raise PlanError("cli.generation-class", problem, remedy)


def _reader_or_none(ledger: str | None) -> AbstractContextManager[LedgerReader | None]:
    return nullcontext() if ledger is None else LedgerReader.read_only(existing_ledger(ledger))


@command()
def verify(
    folder: Path = RELEASE,
    trust: list[Path] = TRUSTS,
    ledger: str | None = COMPARED_LEDGER,
    seen: list[KnownCheckpoint] = option(
        "a checkpoint of its ledger that you kept", metavar="CHECKPOINT", load=KnownCheckpoint.load
    ),
) -> Answer:
    """Check the files, signatures, certificates and dates of a release; with --ledger, also all figures.

    Without --trust a release can only be self-consistent, which anybody can achieve. With --trust, the release key must be
    one of these keys, which you obtained from another source. Without --ledger the figures are computed from the ledger in the
    folder (`release make --with-ledger`); if there is none, they are not checked. With --ledger, every figure, class,
    condition, digest and count is computed again from the ledger as it was when the release was made, and each difference is
    named. A release is trusted only if a trusted key signed it, a trusted key governs the ledger,
    and both agree.

    Examples:

      lamina release verify release-1 --trust release.pub
      lamina release verify release-1 --trust release.pub --trust owner.pub --ledger runs/ecg.ledger.db
      lamina release verify release-1 --trust trusted.json --seen last.checkpoint --json
    """
    given = Trust.load_all(trust) if trust else None
    with _reader_or_none(ledger) as reader:
        found = verify_release(folder, trust=given, seen=seen, ledger=reader)
    lines = [f"{folder}: {found.verdict}", *(f"  {each} [{each.code}]" for each in found.problems)]
    if found.verified and (said := found.manifest) is not None:
        at, runs = said.ledger, pluralize(len(said.predicate.runs), "run")
        lines += [
            f"  model   {said.predicate.name}, of {runs}; may be served until {format_utc(said.not_after)}",
            f"  key     {said.signer.name}",
            f"  files   {len(said.subjects)}, as the manifest names them",
            *(f"  officer {each}" for each in found.countersignatures),
            f"  ledger  {at.origin}, {at.size} leaves, root {at.root}",
        ]
        for name, seqs in found.since.items():
            leaves = (
                f"{'leaf' if len(seqs) == 1 else 'leaves'} {', '.join(map(str, seqs[:8]))}{', …' * (len(seqs) > 8)}"
            )
            lines.append(f"  since   {name}: {len(seqs)}, {leaves}")
        lines += [f"  note    {each}" for each in _what_was_not_checked(found)]
    return Answer({"folder": str(folder), **found.to_dict()}, *lines, ok=found.verified)


def _what_was_not_checked(found: ReleaseVerification) -> Iterator[str]:
    """What lacks before a verified release is trusted, and the option that supplies it."""
    if not found.signed:
        yield "anybody can make such a folder: give --trust with the release key, which you have from elsewhere"
    yield from found.limits
    if not found.compared:
        yield "ε and all other figures are the signer's word: give --ledger to compute them again"
    elif not found.trusted and found.enclosed is None:
        yield "anybody can make such a ledger: give --trust also with the public key of its owner, from elsewhere"


@command()
def ask(
    folder: Path = RELEASE,
    query: Path = argument("QUERY", "JSON: what is drawn on, and under which rights"),
    trust: list[Path] = option("trusted release key, or a key ring; repeatable", metavar="KEYS", default=...),
    ledger: str | None = option(
        "ledger of the release; figures are compared with it, and withdrawals count up to now", metavar="LEDGER"
    ),
) -> Answer:
    """Ask the gate of a release whether a query is allowed, and why not.

    The query is JSON. All fields of `rights` are required except accept_withdrawn and max_tpr (max_epsilon null: any ε):

      {"draws_on": {"layers": ["head.*"]},
       "rights": {"classes": ["clinical"], "max_epsilon": 3.0, "min_noise_multiplier": 0.5, "purpose": "research"}}

    max_tpr limits the success of an attack: {"of": "membership", "fpr": 0.01, "tpr": 0.05} allows it to find at most 5 % of
    the participants if it wrongly accuses 1 % of the others. fpr is 0.001, 0.01 or 0.05; of may be "content".

    With --ledger, withdrawals count up to its newest leaf. Without it, only those count that the manifest states. In both
    cases the newest signed time (of the ledger or the manifest) must not be older than --max-age of the release.

    Exit code 0 if it is allowed, 1 if it is denied.

    Examples:

      lamina release ask release-1 query.json --trust release.pub
      lamina release ask release-1 query.json --trust trusted.json --ledger runs/first/ledger.db --json
    """
    asked = Query.from_dict(parse_json(read_small(query, "the query", most=1 << 20), f"'{query}'"))
    with _reader_or_none(ledger) as reader:
        decision = ReleaseGate(folder, Trust.load_all(trust), ledger=reader, clock=time.time).decide(asked)
    lines = ["allowed" if decision.allowed else "denied", *(f"  {r.text} [{r.code}]" for r in decision.reasons)]
    return Answer(decision.to_dict(), *lines, ok=decision.allowed)


@command()
def papers(
    folder: Path = RELEASE,
    out: Path | None = option("new folder; default: DIR-papers in the same place", "--output", "-o", metavar="OUT"),
    trust: list[Path] = TRUSTS,
    ledger: str | None = COMPARED_LEDGER,
    predictions: list[Path] = option("CSV with the model's probabilities for sacro/; repeatable"),
    on: list[str] = option("kind of records in each FILE, in the same order: public, simulated or training"),
) -> Answer:
    """Write papers about a release: OpenDP registry entry, SPDX 3, EDPB documentation, SACRO-ML target.

    The command first verifies the release like lamina release verify. Missing texts are printed as "not stated"; the owner
    of the data states them under [about] in policy.toml. The release is not changed.

    Predictions have one line per record with a probability for each class, and optionally a column "label". Predictions on
    training records are private data that ε does not cover: their files have mode 0600 and must not be published.

    Examples:

      lamina release papers release-1 --trust release.pub -o papers-1
      lamina release papers release-1 --predictions held-out.csv --on simulated
    """
    if len(predictions) != len(on) or len(set(on)) != len(on):
        raise misuse("give one kind of records for each file of predictions", "--on")
    out = folder.with_name(f"{folder.resolve().name}-papers") if out is None else out
    given = dict(zip(on, predictions, strict=True))
    trusted = Trust.load_all(trust) if trust else None
    with _reader_or_none(ledger) as reader:
        found = write_papers(folder, out, trust=trusted, ledger=reader, predictions=given)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    unstated = sorted(AboutPolicy.model_fields.keys() - found.certificates[-1].content["about"].keys())
    verdict = found.facts["verdict"]
    warnings = [TRAINING_WARNING] if "training" in given else []
    told = {"folder": str(out), "files": files, "verdict": verdict, "not_stated": unstated, "warnings": warnings}
    missing = f"  not stated {', '.join(f'about.{name}' for name in unstated)}" if unstated else None
    lines = (f"papers in {out}: {', '.join(files)}", f"  release    {verdict}", missing)
    return Answer(told, *lines, *(f"  warning    {each}" for each in warnings))


@command()
def log(
    file: Path = argument("LOG", "decision log of lamina serve"),
    trust: list[PublicKey] = option(
        "public key of the log; repeatable, after a change of keys", metavar="KEY", default=..., load=PublicKey.load
    ),
    seen: str | None = option("head of the log at an earlier time, which it must hold", metavar="HASH"),
) -> Answer:
    """Check a decision log: every signature, and that no record is missing. Keep the head that it prints.

    Example:

      lamina release log decisions.jsonl --trust log.pub --seen 9f86d081…
    """
    found = verify_log(file, trust, seen=seen)
    told = {"log": str(file), "decisions": found.decisions, "allowed": found.allowed, "head": found.head}
    text = f"{file}: {found.decisions} decisions, {found.allowed} allowed, each signed, none missing"
    return Answer(told, text, f"  head {found.head}")


app = group(__doc__, make, verify, ask, papers, log)
