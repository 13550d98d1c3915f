"""`lamina attest`: sign contributions under the terms of a policy."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.admit.attestation import MICRO
from lamina.admit.signing import SigningOutcome, SigningState, ValidityWindow, attest_folder, contribution_ids
from lamina.admit.terms import SigningTerms
from lamina.cli.options import JsonOption, PassphraseOption, argument, option
from lamina.cli.terminal import columns, open_private_key, print_answer, print_note, progress_bar
from lamina.errors import AdmissionError
from lamina.ledger.show import format_micro
from lamina.plan.policy import Policy
from lamina.plan.table import epsilon_text, printable
from lamina.run.table_files import LISTING, ContributionListing, read_names
from lamina.sign.keys import format_utc, parse_time, read_small
from lamina.sign.signed_json import parse_json


def classes_by_id(
    cls: str | None, listing: ContributionListing | None, ids: list[str], root: Path
) -> str | dict[str, str]:
    """The class of all contributions, or of each by id. --class and the listing must agree."""
    listed = None if listing is None else listing.classes
    if listing is None or listed is None:
        if cls is None:
            raise typer.BadParameter(f"give the class of all, or a column `class` in {LISTING}", param_hint="--class")
        return cls
    wanted = set(ids)
    found = {id: name for id, name in zip(listing.ids, listed, strict=True) if id in wanted}
    if cls is None:
        return found
    for id, name in found.items():
        if name != cls:
            problem = (
                f"--class is {printable(cls)!r}, but '{root / LISTING}' says {printable(name)!r} for {printable(id)!r}"
            )
            raise AdmissionError("cli.class-differs-from-listing", problem, "leave --class out")
    return cls


def read_subjects(
    key: Path | None, listing: ContributionListing | None, root: Path
) -> tuple[dict[str, str] | None, bytes | None]:
    """The subject of each contribution and the secret key of their tags; or neither."""
    subjects = None if listing is None else listing.subjects
    if key is None:
        if subjects is not None:
            print_note(f"note: '{root / LISTING}' names subjects; without --subject-key they are not signed")
        return None, None
    if listing is None or subjects is None:
        problem = f"--subject-key needs a column `subject` in '{root / LISTING}'"
        raise AdmissionError("cli.subjects-missing", problem, "name the subject of each contribution there")
    text = read_small(key, "the subject key", most=4096).strip()
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) < 16:
        problem = f"the subject key '{key}' is not 32 or more hexadecimal digits"
        raise AdmissionError("cli.subject-key-malformed", problem, "make one with lamina keys subject")
    return dict(zip(listing.ids, subjects, strict=True)), secret


def read_anchors(given: str, ids: list[str]) -> dict[str, bytes]:
    """Digests by id: one for one contribution, or a table. Each as hex digits, or a file with a C2PA manifest."""
    one = len(ids) == 1 and not given.endswith(".csv")
    rows, folder = ({ids[0]: given}, Path()) if one else (_read_anchor_csv(Path(given)), Path(given).parent)
    anchors = {}
    for id, text in rows.items():
        if (path := folder / text).suffix and os.path.isfile(path):
            from lamina.release.reconciliation import anchor_file, c2pa_content_hash

            anchors[id] = c2pa_content_hash(parse_json(anchor_file(path), f"'{path}'"))
            continue
        try:
            anchors[id] = bytes.fromhex(text)
        except ValueError:
            anchors[id] = b""
        if len(anchors[id]) != 32:
            problem = f"the anchor of {printable(id)!r} is neither 64 hexadecimal digits nor a file"
            remedy = "give a SHA-256 digest, or a file with a C2PA manifest"
            raise AdmissionError("cli.anchor-malformed", problem, remedy)
    return anchors


def _read_anchor_csv(path: Path) -> dict[str, str]:
    if path.suffix != ".csv":
        problem = f"one anchor, {printable(str(path))!r}, is given for several contributions"
        raise AdmissionError("cli.anchor-needs-table", problem, "give a CSV file: id, anchor")
    ids, anchors = read_names(path, "id", "anchor")
    return dict(zip(ids, anchors, strict=True))


_MAX_REFUSALS_SHOWN = 20
_MAX_IDS_SHOWN = 5  # ids of what was left alone
_REPLACED = (("another_key", SigningState.OTHER_KEY), ("stricter", SigningState.STRICTER))
_STATES_ALWAYS_SHOWN = (SigningState.SIGNED, SigningState.KEPT, SigningState.REFUSED)


def terms_json(policy: Policy, terms: SigningTerms) -> dict[str, Any]:
    """The terms of a class as machines read them."""
    return {
        "data_class": terms.data_class,
        "clip_norm": terms.clip_norm / MICRO,
        "noise_multiplier": terms.noise_multiplier / MICRO,
        "epsilon": _signed_epsilon(policy, terms),
        "delta": policy.corpus.delta,
        "profile": terms.profile,
        "not_before": format_utc(terms.not_before),
        "expires": format_utc(terms.expires),
    }


def _signed_epsilon(policy: Policy, terms: SigningTerms) -> float | None:
    """The ε of the signed noise multiplier; None if the class is public."""
    return policy.epsilon_of(terms.noise_multiplier / MICRO) if terms.noise_multiplier else None


def terms_table(policy: Policy, all_terms: dict[str, SigningTerms], counts: Counter[str]) -> str:
    """What is promised, by class."""
    rows = [["class", "contributions", "clip norm", "noise multiplier", "ε at most", "depth", "valid from", "until"]]
    for name, terms in all_terms.items():
        epsilon = _signed_epsilon(policy, terms)
        figures = ["public", "-", "-"]
        if epsilon is not None:
            figures = [format_micro(terms.clip_norm), format_micro(terms.noise_multiplier), epsilon_text(epsilon)]
        window = [format_utc(terms.not_before), format_utc(terms.expires)]
        rows.append([name, f"{counts[name]:,}", *figures, terms.profile or "as the policy says", *window])
    only = "" if policy.corpus.ledger is None else f" and its ledger {policy.corpus.ledger[:16]} alone"
    title = f"for {policy.corpus.origin}{only}, ε at δ = {policy.corpus.delta:g}"
    return f"{printable(title)}\n{columns(rows)}"


def counts_json(outcomes: list[SigningOutcome]) -> dict[str, Any]:
    """For --json. `kept` are those that already have these terms; others that were left alone are listed."""
    counts, replaced = Counter(each.state for each in outcomes), Counter(each.replaced for each in outcomes)
    listed = {state: [each for each in outcomes if each.state is state] for state in SigningState}
    return {
        "signed": counts[SigningState.SIGNED],
        "kept": counts[SigningState.KEPT],
        "stricter": [printable(each.id) for each in listed[SigningState.STRICTER]],
        "another_key": [printable(each.id) for each in listed[SigningState.OTHER_KEY]],
        "carried": sum(each.carried for each in outcomes),
        "replaced": {key: replaced[state] for key, state in _REPLACED},
        "refused": [{"id": printable(each.id), "reason": each.problem} for each in listed[SigningState.REFUSED]],
    }


def counts_text(outcomes: list[SigningOutcome], *, force: bool, dry_run: bool, keyless: bool) -> str:
    """What was signed, or would be."""
    counts, figures = Counter(each.state for each in outcomes), counts_json(outcomes)
    shown = [state for state in SigningState if state in _STATES_ALWAYS_SHOWN or counts[state]]
    summary = ", ".join(f"{counts[state]:,} {state.value}" for state in shown)
    lines = [f"nothing was signed; without --dry-run: {summary}" if dry_run else summary]
    if force:
        another, stricter = figures["replaced"].values()
        lines.append(f"replaced: {another:,} of another key, {stricter:,} with a stricter bound")
    if figures["carried"]:
        lines.append(f"{figures['carried']:,} of the signed keep their stricter bound or depth")
    for state in (SigningState.STRICTER, SigningState.OTHER_KEY):
        if left := [each for each in outcomes if each.state is state]:
            lines.append(f"{state.value} (--force replaces them): {_list_ids(left)}")
    if keyless and counts[SigningState.OTHER_KEY]:
        lines.append("without --key, signatures of your own key are not told apart from others")
    refused = [f"  {each['id']}: {each['reason']}" for each in figures["refused"]]
    lines += refused[:_MAX_REFUSALS_SHOWN]
    if len(refused) > _MAX_REFUSALS_SHOWN:
        lines.append(f"  … and {len(refused) - _MAX_REFUSALS_SHOWN:,} more: --json names them all")
    return "\n".join(lines)


def _list_ids(left: list[SigningOutcome]) -> str:
    names = [printable(o.id) + ("" if o.problem is None else f" ({o.problem})") for o in left[:_MAX_IDS_SHOWN]]
    if len(left) > _MAX_IDS_SHOWN:
        names.append(f"… and {len(left) - _MAX_IDS_SHOWN:,} more")
    return ", ".join(names)


_BOUND, _WINDOW, _ABOUT = "What is signed", "For how long", "Whom and what it is about"
_SUBJECT_HELP = "sign a keyed tag of column `subject` of contributions.csv (lamina keys subject makes the key)"


def attest(
    policy: Annotated[Path, argument("policy.toml", "the policy of the corpus that it is for")],
    path: Annotated[Path, argument("FOLDER", "a contribution (payload.* inside), or a folder of them")],
    key: Annotated[
        Path | None, option("private key of the contributor; not needed for --dry-run", metavar="KEY")
    ] = None,
    passphrase_file: PassphraseOption = None,
    cls: Annotated[
        str | None, option("class of the policy; or a column `class` in contributions.csv", "--class", metavar="NAME")
    ] = None,
    data_class: Annotated[str | None, option("kind of data, such as ecg; default: the class", panel=_ABOUT)] = None,
    clip_norm: Annotated[float | None, option("sign a smaller clip norm than the class has", panel=_BOUND)] = None,
    noise_multiplier: Annotated[
        float | None, option("sign a larger noise multiplier than the class has", panel=_BOUND)
    ] = None,
    profile: Annotated[bool, option("sign which layers the class reaches, if not all", panel=_BOUND)] = True,
    valid_from: Annotated[str | None, option("default: now", panel=_WINDOW, metavar="TIME")] = None,
    expires: Annotated[str | None, option("default: after a year", panel=_WINDOW, metavar="TIME")] = None,
    subject_key: Annotated[Path | None, option(_SUBJECT_HELP, panel=_ABOUT, metavar="FILE")] = None,
    anchor: Annotated[
        str | None,
        option(
            "content anchor: 64 hex digits, or a file with a C2PA manifest; for a folder a CSV file: id, anchor",
            panel=_ABOUT,
            metavar="DIGEST",
        ),
    ] = None,
    force: Annotated[
        bool, option("sign all again, also what is stricter, signed by another key, or unchanged", "--force")
    ] = False,
    dry_run: Annotated[bool, option("show what would be signed, kept and refused; write nothing", "--dry-run")] = False,
    as_json: JsonOption = False,
) -> None:
    """Sign contributions: who contributes, which data, for which corpus, under which bound, until when.

    Beside each payload it writes descriptor.cbor (what is signed) and attestation.cose (the signature). The payload
    stays as it is; only a salted digest of it is signed. By default the bound is that of the class in the policy; you
    may sign a stricter one, never a looser one. Signing spends nothing; runs do.

    Run it again to sign what is new or changed; the rest is kept. What was signed with a stricter bound, or by another
    key, is left alone and listed; only --force replaces it. Exit code 1 if any contribution could not be signed; the
    others are signed.

    Examples:

      lamina attest policy.toml data/ --key alice.key --class sensitive
      lamina attest policy.toml data/p001 --key alice.key --class sensitive --expires 2027-01-01
      lamina attest policy.toml data/ --key alice.key --subject-key subject.key
      lamina attest policy.toml data/ --class sensitive --dry-run
    """
    if key is None and not dry_run:
        raise typer.BadParameter("the private key that signs is needed", param_hint="--key")
    opened = Policy.load(policy)
    root, ids = contribution_ids(path)
    listing = ContributionListing.read(root / LISTING) if (root / LISTING).exists() else None
    classes = classes_by_id(cls, listing, ids, root)
    window = ValidityWindow(
        not_before=None if valid_from is None else parse_time(valid_from),
        expires=None if expires is None else parse_time(expires),
        now=int(time.time()),
    )
    if window.is_over and not force:
        raise typer.BadParameter(
            f"{format_utc(window.end)} is past, so nothing signed would be admitted: give a later time, or --force",
            param_hint="--expires",
        )
    bound: dict[str, Any] = {"data_class": data_class, "clip_norm": clip_norm}
    bound |= {"noise_multiplier": noise_multiplier, "profile": profile}
    names = Counter([classes] * len(ids)) if isinstance(classes, str) else Counter(classes.values())
    terms = {
        name: SigningTerms.make(opened, name, not_before=window.begin, expires=window.end, **bound)
        for name in sorted(names)
    }
    anchors = None if anchor is None else read_anchors(anchor, ids)
    subjects, secret = read_subjects(subject_key, listing, root)
    signer = None if key is None else open_private_key(key, passphrase_file)
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
    facts["ledger"] = opened.corpus.ledger
    promised = {name: terms_json(opened, made) for name, made in terms.items()}
    text = counts_text(outcomes, force=force, dry_run=dry_run, keyless=signer is None)
    text = f"{terms_table(opened, terms, names)}\n{text}"
    ok = not any(each.state is SigningState.REFUSED for each in outcomes)
    print_answer({**facts, **counts_json(outcomes), "classes": promised}, text, as_json, ok=ok)
