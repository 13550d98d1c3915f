"""`lamina attest`: sign contributions under the terms of a policy."""

from __future__ import annotations

import csv
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.admit.attestation import MICRO
from lamina.admit.checks import SigningTerms
from lamina.admit.keys import format_utc, parse_time, read_small
from lamina.admit.signing import SigningOutcome, SigningState, ValidityWindow, attest_folder, contribution_ids
from lamina.admit.verdicts import printable
from lamina.cli.terminal import (
    PassphraseOption,
    columns,
    err,
    open_private_key,
    out,
    print_json,
    progress_bar,
    round_up,
)
from lamina.corpus.corpus import LISTING, ContributionListing
from lamina.corpus.files import NameColumn, check_column, csv_header, csv_lines, open_csv
from lamina.errors import AdmissionError
from lamina.plan.policy import Policy


def classes_by_id(
    cls: str | None, listing: ContributionListing | None, ids: list[str], root: Path
) -> str | dict[str, str]:
    """The class of all, or of each by id. Where both --class and the list say it, they must agree."""
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
            raise AdmissionError(
                "cli.class-says",
                f"--class is {printable(cls)!r}, and '{root / LISTING}' says {printable(name)!r} of {printable(id)!r}",
                "leave --class out",
            )
    return cls


def read_subjects(
    key: Path | None, listing: ContributionListing | None, root: Path
) -> tuple[dict[str, str] | None, bytes | None]:
    """Whom each contribution is about, and the secret under which that is signed; or neither."""
    subjects = None if listing is None else listing.subjects
    if key is None:
        if subjects is not None:
            err.print(
                f"note: '{root / LISTING}' names subjects; without --subject-key nothing about them is signed",
                markup=False,
                soft_wrap=True,
            )
        return None, None
    if listing is None or subjects is None:
        raise AdmissionError(
            "cli.subject-key-given",
            f"--subject-key is given, and '{root / LISTING}' has no column `subject`",
            "say whom each is about",
        )
    text = read_small(key, "the subject key", most=4096).strip()
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) < 16:
        raise AdmissionError(
            "cli.subject-key-not",
            f"the subject key '{key}' is not 32 or more hexadecimal digits",
            "make one with lamina keys subject",
        )
    return dict(zip(listing.ids, subjects, strict=True)), secret


def read_anchors(given: str, ids: list[str]) -> dict[str, bytes]:
    """Digests by id: one for one contribution, or a table."""
    rows = {ids[0]: given} if len(ids) == 1 and not given.endswith(".csv") else _read_anchor_csv(Path(given))
    anchors = {}
    for id, text in rows.items():
        try:
            anchors[id] = bytes.fromhex(text)
        except ValueError:
            anchors[id] = b""
        if len(anchors[id]) != 32:
            raise AdmissionError(
                "cli.anchor-not-hexadecimal",
                f"the anchor of {printable(id)!r} is not 64 hexadecimal digits",
                "give a SHA-256 digest",
            )
    return anchors


def _read_anchor_csv(path: Path) -> dict[str, str]:
    if path.suffix != ".csv":
        raise AdmissionError(
            "cli.anchor-given-several",
            f"the anchor {printable(str(path))!r} is given for several contributions",
            "give a CSV file: id, anchor",
        )
    with open_csv(path) as file:
        lines = csv_lines(path, csv.reader(file, strict=True))
        header = csv_header(path, lines, ",")
        rows = list(lines)
    columns = []
    for name in ("id", "anchor"):
        check_column(path, name, header)
        columns.append(NameColumn(path, header, name))
        columns[-1].read(rows)
    return dict(zip(columns[0].values, columns[1].values, strict=True))


_MAX_REFUSALS_SHOWN = 20
_MAX_IDS_SHOWN = 5  # ids of what was left alone
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
    """What the signed multiplier stands for; None: public."""
    return policy.epsilon_of(terms.noise_multiplier / MICRO) if terms.noise_multiplier else None


def terms_table(policy: Policy, all_terms: dict[str, SigningTerms], counts: Counter[str]) -> str:
    """What is promised, by class."""
    rows = [["class", "contributions", "clip norm", "noise multiplier", "ε at most", "depth", "valid from", "until"]]
    for name, terms in all_terms.items():
        epsilon = _signed_epsilon(policy, terms)
        figures = (
            ["public", "-", "-"]
            if epsilon is None
            else [f"{terms.clip_norm / MICRO:g}", f"{terms.noise_multiplier / MICRO:g}", round_up(epsilon)]
        )
        depth = terms.profile or "as the policy says"
        rows.append(
            [name, f"{counts[name]:,}", *figures, depth, format_utc(terms.not_before), format_utc(terms.expires)]
        )
    title = f"for {policy.corpus.origin}, ε at δ = {policy.corpus.delta:g}"
    return f"{printable(title)}\n{columns(rows)}"


class SigningCounts:
    """What became of all, and whom to name."""

    def __init__(self) -> None:
        self.counts: Counter[SigningState] = Counter()
        self.replaced: Counter[SigningState] = Counter()
        self.carried = 0
        self.told: dict[SigningState, list[SigningOutcome]] = {
            state: [] for state in (SigningState.STRICTER, SigningState.ANOTHER, SigningState.REFUSED)
        }

    def add(self, outcome: SigningOutcome) -> None:
        self.counts[outcome.state] += 1
        self.carried += outcome.carried
        if outcome.replaced is not None:
            self.replaced[outcome.replaced] += 1
        if outcome.state in self.told:
            self.told[outcome.state].append(outcome)

    @property
    def refused(self) -> list[SigningOutcome]:
        return self.told[SigningState.REFUSED]

    def to_dict(self) -> dict[str, Any]:
        """For machines. `kept` are those that are as asked; the others that were left alone are named."""
        return {
            "signed": self.counts[SigningState.SIGNED],
            "kept": self.counts[SigningState.KEPT],
            "stricter": [printable(each.id) for each in self.told[SigningState.STRICTER]],
            "another_key": [printable(each.id) for each in self.told[SigningState.ANOTHER]],
            "carried": self.carried,
            "replaced": {
                "another_key": self.replaced[SigningState.ANOTHER],
                "stricter": self.replaced[SigningState.STRICTER],
            },
            "refused": [{"id": printable(each.id), "reason": each.problem} for each in self.refused],
        }


def print_counts(tally: SigningCounts, *, force: bool, dry_run: bool, keyless: bool) -> None:
    """How it went, or would go."""
    counts = tally.counts
    told = ", ".join(
        f"{counts[state]:,} {state.value}" for state in SigningState if state in _STATES_ALWAYS_SHOWN or counts[state]
    )
    _print_line(f"nothing was signed; without --dry-run: {told}" if dry_run else told)
    if force:
        lost = tally.replaced
        _print_line(
            f"replaced: {lost[SigningState.ANOTHER]:,} of another key, {lost[SigningState.STRICTER]:,} stricter than asked"
        )
    if tally.carried:
        _print_line(f"{tally.carried:,} of the signed keep the stricter bound or depth that they had")
    for state in (SigningState.STRICTER, SigningState.ANOTHER):
        if left := tally.told[state]:
            _print_line(f"{state.value} (--force replaces them): {_list_ids(left)}")
    if keyless and counts[SigningState.ANOTHER]:
        _print_line("whose they are is not looked at without --key: with it, what it signed itself is told apart")
    for each in tally.refused[:_MAX_REFUSALS_SHOWN]:
        _print_line(f"  {printable(each.id)}: {each.problem}")
    if len(tally.refused) > _MAX_REFUSALS_SHOWN:
        _print_line(f"  … and {len(tally.refused) - _MAX_REFUSALS_SHOWN:,} more: --json names them all")


def _list_ids(left: list[SigningOutcome]) -> str:
    names = [
        printable(each.id) if each.problem is None else f"{printable(each.id)} ({each.problem})"
        for each in left[:_MAX_IDS_SHOWN]
    ]
    if len(left) > _MAX_IDS_SHOWN:
        names.append(f"… and {len(left) - _MAX_IDS_SHOWN:,} more")
    return ", ".join(names)


def _print_line(line: str) -> None:
    out.print(line, markup=False, soft_wrap=True)


_BOUND_PANEL, _WINDOW_PANEL, _ABOUT_PANEL = "What is signed", "For how long", "Whom and what it is about"


def attest(
    policy: Annotated[Path, typer.Argument(metavar="policy.toml", help="the policy of the corpus that it is for")],
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a contribution (payload.* inside), or a folder of them")
    ],
    key: Annotated[
        Path | None, typer.Option(metavar="KEY", help="private key of the contributor; not needed for --dry-run")
    ] = None,
    passphrase_file: PassphraseOption = None,
    cls: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="class of the policy; or a column `class` in contributions.csv"),
    ] = None,
    data_class: Annotated[
        str | None,
        typer.Option(help="what the data is, such as ecg; default: as the class", rich_help_panel=_ABOUT_PANEL),
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="sign a smaller clip norm than the class has", rich_help_panel=_BOUND_PANEL)
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="sign a larger noise multiplier than the class asks for", rich_help_panel=_BOUND_PANEL),
    ] = None,
    profile: Annotated[
        bool, typer.Option(help="sign how deep the class reaches, if it is restricted", rich_help_panel=_BOUND_PANEL)
    ] = True,
    valid_from: Annotated[
        str | None, typer.Option(metavar="TIME", help="default: now", rich_help_panel=_WINDOW_PANEL)
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="default: after a year", rich_help_panel=_WINDOW_PANEL)
    ] = None,
    subject_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="sign a keyed tag of column `subject` of contributions.csv (lamina keys subject makes the key)",
            rich_help_panel=_ABOUT_PANEL,
        ),
    ] = None,
    anchor: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="content anchor, 64 hexadecimal digits; for a folder a CSV file with columns id, anchor",
            rich_help_panel=_ABOUT_PANEL,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="sign all as asked, also what is stricter, signed by another key, or unchanged"),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be signed, kept and refused; write nothing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Sign contributions: who contributes, which data, for which corpus, under which bound, until when.

    Beside each payload it writes descriptor.cbor (what is signed) and attestation.cose (the signature). The payload
    stays as it is, and only a salted digest of it is signed. By default the bound is the one that the policy gives
    the class; you may sign a stricter one, never a more permissive one. Signing spends nothing: what is spent is
    decided by the runs that you let in.

    Running it again signs what is new or has changed and keeps the rest, so an interrupted run is simply repeated.
    What was signed stricter than is asked now stays so, and what another key signed is left alone; both are named.
    Only --force replaces them. Exit code 1 if any contribution could not be signed; the others are.

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
            f"the window ended at {format_utc(window.end)}, so what is signed would never be admitted: give a later end "
            "(--force signs it all the same)",
            param_hint="--expires",
        )
    bound: dict[str, Any] = {
        "data_class": data_class,
        "clip_norm": clip_norm,
        "noise_multiplier": noise_multiplier,
        "profile": profile,
    }
    names = Counter([classes] * len(ids)) if isinstance(classes, str) else Counter(classes.values())
    terms = {
        name: SigningTerms.make(opened, name, not_before=window.begin, expires=window.end, **bound)
        for name in sorted(names)
    }
    anchors = None if anchor is None else read_anchors(anchor, ids)
    subjects, secret = read_subjects(subject_key, listing, root)
    signer = None if key is None else open_private_key(key, passphrase_file)
    outcomes = attest_folder(
        path,
        signer,
        opened,
        classes,
        not_before=window.not_before,
        expires=window.expires,
        subjects=subjects,
        subject_key=secret,
        anchors=anchors,
        force=force,
        dry_run=dry_run,
        now=window.now,
        **bound,
    )
    tally = SigningCounts()
    with progress_bar("looking" if dry_run else "signing", len(ids)) as tick:
        for number, outcome in enumerate(outcomes, start=1):
            tally.add(outcome)
            tick(number)
    if as_json:
        print_json(
            {
                "contributor": None if signer is None else signer.public.name,
                "audience": opened.corpus.origin,
                "dry_run": dry_run,
                **tally.to_dict(),
                "classes": {name: terms_json(opened, made) for name, made in terms.items()},
            }
        )
    else:
        out.print(terms_table(opened, terms, names), markup=False, soft_wrap=True)
        print_counts(tally, force=force, dry_run=dry_run, keyless=signer is None)
    if tally.refused:
        raise typer.Exit(1)
