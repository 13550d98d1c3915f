"""Sign contributions: who contributes, which data, for which corpus, under which bound, until when.

Beside each payload it writes descriptor.cbor (what is signed) and attestation.cose (the signature). The payload stays as it is; only
a salted digest of it is signed. By default the bound is that of the class in the policy; you may sign a stricter one, never a looser
one. Signing spends nothing; runs do.

Run it again to sign what is new or changed; the rest is kept. What was signed with a stricter bound, or by another key, is left
alone and listed; only --force replaces it. Exit code 1 if any contribution could not be signed; the others are signed.

Examples:

  lamina attest policy.toml data/ --key alice.key --class sensitive
  lamina attest policy.toml data/p001 --key alice.key --class sensitive --expires 2027-01-01
  lamina attest policy.toml data/ --key alice.key --subject-key subject.key
  lamina attest policy.toml data/ --class sensitive --dry-run
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lamina.admit.attestation import MICRO
from lamina.admit.signing import SigningOutcome, SigningState, ValidityWindow, attest_folder, contribution_ids
from lamina.admit.terms import SigningTerms
from lamina.cli.command import Answer, argument, command, misuse, option, table, time_option
from lamina.cli.terminal import open_private_key, print_note, progress_bar
from lamina.errors import AdmissionError
from lamina.ledger.show import format_micro
from lamina.plan.policy import Policy
from lamina.plan.table import epsilon_text, printable
from lamina.run.table_files import LISTING, ContributionListing, read_names
from lamina.sign.keys import format_utc, read_small
from lamina.sign.signed_json import parse_json

_BOUND, _WINDOW, _ABOUT = "What is signed", "For how long", "Whom and what it is about"
_MAX_REFUSALS_SHOWN = 20
_MAX_IDS_SHOWN = 5  # ids of what was left alone


@command(keys=True)
def attest(
    policy: Path = argument("policy.toml", "the policy of the corpus that it is for"),
    path: Path = argument("FOLDER", "a contribution (payload.* inside), or a folder of them"),
    key: Path | None = option("private key of the contributor; not needed for --dry-run", metavar="KEY"),
    cls: str | None = option(
        "class of the policy; or a column `class` in contributions.csv", "--class", metavar="NAME"
    ),
    data_class: str | None = option("kind of data, such as ecg; default: the class", panel=_ABOUT),
    clip_norm: float | None = option("sign a smaller clip norm than the class has", panel=_BOUND),
    noise_multiplier: float | None = option("sign a larger noise multiplier than the class has", panel=_BOUND),
    profile: bool = option(
        "sign which layers the class reaches, if not all", "--profile/--no-profile", panel=_BOUND, default=True
    ),
    valid_from: int | None = time_option("default: now", panel=_WINDOW),
    expires: int | None = time_option("default: after a year", panel=_WINDOW),
    subject_key: Path | None = option(
        "sign a keyed tag of column `subject` of contributions.csv (lamina keys subject makes the key)", panel=_ABOUT
    ),
    anchor: str | None = option(
        "content anchor: 64 hex digits, or a file with a C2PA manifest; for a folder a CSV file: id, anchor",
        panel=_ABOUT, metavar="DIGEST",
    ),
    force: bool = option("sign all again, also what is stricter, signed by another key, or unchanged"),
    dry_run: bool = option("show what would be signed, kept and refused; write nothing"),
) -> Answer:  # fmt: skip
    if key is None and not dry_run:
        raise misuse("the private key that signs is needed", "--key")
    opened = Policy.load(policy)
    root, ids = contribution_ids(path)
    listing = ContributionListing.read(root / LISTING) if (root / LISTING).exists() else None
    classes = _classes(cls, listing, ids, root)
    window = ValidityWindow(not_before=valid_from, expires=expires, now=int(time.time()))
    if window.is_over and not force:
        problem = (
            f"{format_utc(window.end)} is past, so nothing signed would be admitted: give a later time, or --force"
        )
        raise misuse(problem, "--expires")
    bound: dict[str, Any] = {"data_class": data_class, "clip_norm": clip_norm}
    bound |= {"noise_multiplier": noise_multiplier, "profile": profile}
    counts = Counter([classes] * len(ids)) if isinstance(classes, str) else Counter(classes.values())
    terms = {
        name: _terms_json(opened, SigningTerms.make(opened, name, not_before=window.begin, expires=window.end, **bound))
        for name in sorted(counts)
    }
    anchors = None if anchor is None else _read_anchors(anchor, ids)
    subjects, secret = _read_subjects(subject_key, listing, root)
    signer = None if key is None else open_private_key(key)
    signing = attest_folder(
        path, signer, opened, classes, not_before=window.not_before, expires=window.expires, subjects=subjects,
        subject_key=secret, anchors=anchors, force=force, dry_run=dry_run, now=window.now, **bound,
    )  # fmt: skip
    outcomes: list[SigningOutcome] = []
    with progress_bar("looking" if dry_run else "signing", len(ids)) as tick:
        for outcome in signing:
            outcomes.append(outcome)
            tick(len(outcomes))
    facts = {"contributor": signer and signer.public.name, "audience": opened.corpus.origin, "dry_run": dry_run}
    facts |= {"ledger": opened.corpus.ledger, **_counts_json(outcomes)}
    lines = _counts_text(outcomes, facts, force=force, keyless=signer is None)
    ok = not any(each.state is SigningState.REFUSED for each in outcomes)
    return Answer(facts | {"classes": terms}, *_terms_text(opened, terms, counts), *lines, ok=ok)


def _classes(cls: str | None, listing: ContributionListing | None, ids: list[str], root: Path) -> str | dict[str, str]:
    """Return the class of all contributions, or of each by id. --class and the listing must agree."""
    if listing is None or listing.classes is None:
        if cls is None:
            raise misuse(f"give the class of all, or a column `class` in {LISTING}", "--class")
        return cls
    wanted = set(ids)
    found = {id: name for id, name in zip(listing.ids, listing.classes, strict=True) if id in wanted}
    if differs := next(((id, name) for id, name in found.items() if cls not in (None, name)), None):
        id, name = map(printable, differs)
        problem = f"--class is {printable(str(cls))!r}, but '{root / LISTING}' says {name!r} for {id!r}"
        raise AdmissionError("cli.class-differs-from-listing", problem, "leave --class out")
    return found


def _read_subjects(
    key: Path | None, listing: ContributionListing | None, root: Path
) -> tuple[dict[str, str] | None, bytes | None]:
    """Return the subject of each contribution and the secret key of their tags; or neither."""
    subjects = None if listing is None else listing.subjects
    if key is None:
        if subjects is not None:
            print_note(f"note: '{root / LISTING}' names subjects; without --subject-key they are not signed")
        return None, None
    if listing is None or subjects is None:
        problem = f"--subject-key needs a column `subject` in '{root / LISTING}'"
        raise AdmissionError("cli.subjects-missing", problem, "name the subject of each contribution there")
    if len(secret := _hex(read_small(key, "the subject key", most=4096).strip().decode("latin-1"))) < 16:
        problem = f"the subject key '{key}' is not 32 or more hexadecimal digits"
        raise AdmissionError("cli.subject-key-malformed", problem, "make one with lamina keys subject")
    return dict(zip(listing.ids, subjects, strict=True)), secret


def _read_anchors(given: str, ids: list[str]) -> dict[str, bytes]:
    """Return digests by id: one for one contribution, or a table. Each as hex digits, or a file with a C2PA manifest."""
    rows, folder = {ids[0]: given}, Path()
    if len(ids) > 1 or given.endswith(".csv"):
        if not given.endswith(".csv"):
            problem = f"one anchor, {printable(given)!r}, is given for several contributions"
            raise AdmissionError("cli.anchor-needs-table", problem, "give a CSV file: id, anchor")
        rows, folder = dict(zip(*read_names(Path(given), "id", "anchor"), strict=True)), Path(given).parent
    anchors = {}
    for id, text in rows.items():
        if (path := folder / text).suffix and os.path.isfile(path):
            from lamina.release.reconciliation import anchor_file, c2pa_content_hash

            anchors[id] = c2pa_content_hash(parse_json(anchor_file(path), f"'{path}'"))
        elif len(digest := _hex(text)) == 32:
            anchors[id] = digest
        else:
            problem = f"the anchor of {printable(id)!r} is neither 64 hexadecimal digits nor a file"
            remedy = "give a SHA-256 digest, or a file with a C2PA manifest"
            raise AdmissionError("cli.anchor-malformed", problem, remedy)
    return anchors


def _hex(text: str) -> bytes:
    """Return the bytes of hexadecimal digits; none for any other text."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _terms_json(policy: Policy, terms: SigningTerms) -> dict[str, Any]:
    """The terms of a class; ε is that of the signed noise multiplier, null for a public class."""
    noise = terms.noise_multiplier / MICRO
    return {
        "data_class": terms.data_class, "clip_norm": terms.clip_norm / MICRO, "noise_multiplier": noise,
        "epsilon": policy.epsilon_of(noise) if noise else None, "delta": policy.corpus.delta, "profile": terms.profile,
        "not_before": format_utc(terms.not_before), "expires": format_utc(terms.expires),
    }  # fmt: skip


def _terms_text(policy: Policy, all_terms: Mapping[str, Any], counts: Counter[str]) -> Iterator[str]:
    only = "" if policy.corpus.ledger is None else f" and its ledger {policy.corpus.ledger[:16]} alone"
    yield printable(f"for {policy.corpus.origin}{only}, ε at δ = {policy.corpus.delta:g}")
    rows = [["class", "contributions", "clip norm", "noise multiplier", "ε at most", "depth", "valid from", "until"]]
    for cls, terms in all_terms.items():
        figures = ["public", "-", "-"]
        if terms["epsilon"] is not None:
            amounts = (format_micro(round(terms[name] * MICRO)) for name in ("clip_norm", "noise_multiplier"))
            figures = [*amounts, epsilon_text(terms["epsilon"])]
        window = [terms["profile"] or "as the policy says", terms["not_before"], terms["expires"]]
        rows.append([cls, f"{counts[cls]:,}", *figures, *window])
    yield table(rows)


def _counts_json(outcomes: list[SigningOutcome]) -> dict[str, Any]:
    """`kept` are those that already have these terms; others that were left alone are listed."""
    counts, replaced = Counter(each.state for each in outcomes), Counter(each.replaced for each in outcomes)
    listed = {state: [each for each in outcomes if each.state is state] for state in SigningState}
    return {
        "signed": counts[SigningState.SIGNED],
        "kept": counts[SigningState.KEPT],
        "stricter": [printable(each.id) for each in listed[SigningState.STRICTER]],
        "another_key": [printable(each.id) for each in listed[SigningState.OTHER_KEY]],
        "carried": sum(each.carried for each in outcomes),
        "replaced": {"another_key": replaced[SigningState.OTHER_KEY], "stricter": replaced[SigningState.STRICTER]},
        "refused": [{"id": printable(each.id), "reason": each.problem} for each in listed[SigningState.REFUSED]],
    }


def _counts_text(
    outcomes: list[SigningOutcome], facts: Mapping[str, Any], *, force: bool, keyless: bool
) -> Iterator[str]:
    """What was signed, or would be."""
    counts, always = (
        Counter(each.state for each in outcomes),
        (SigningState.SIGNED, SigningState.KEPT, SigningState.REFUSED),
    )
    shown = ", ".join(f"{counts[state]:,} {state.value}" for state in SigningState if state in always or counts[state])
    yield f"nothing was signed; without --dry-run: {shown}" if facts["dry_run"] else shown
    if force:
        another, stricter = facts["replaced"].values()
        yield f"replaced: {another:,} of another key, {stricter:,} with a stricter bound"
    if facts["carried"]:
        yield f"{facts['carried']:,} of the signed keep their stricter bound or depth"
    for state in (SigningState.STRICTER, SigningState.OTHER_KEY):
        left = [printable(o.id) + (f" ({o.problem})" if o.problem else "") for o in outcomes if o.state is state]
        if left:
            yield f"{state.value} (--force replaces them): {', '.join(_first(left, _MAX_IDS_SHOWN))}"
    if keyless and counts[SigningState.OTHER_KEY]:
        yield "without --key, signatures of your own key are not told apart from others"
    refused = [f"{each['id']}: {each['reason']}" for each in facts["refused"]]
    yield from (f"  {line}" for line in _first(refused, _MAX_REFUSALS_SHOWN, ": --json names them all"))


def _first(lines: list[str], most: int, hint: str = "") -> list[str]:
    more = [f"… and {len(lines) - most:,} more{hint}"] if len(lines) > most else []
    return lines[:most] + more
