"""`lamina attest`: sign contributions under the terms of a policy."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.admit.contribute import Window, attest_folder, ids_in
from lamina.admit.terms import Terms
from lamina.admit.times import shown, when
from lamina.cli.attest_inputs import anchors_of, class_of, subjects_of
from lamina.cli.attest_table import Tally, figures, page, tell
from lamina.cli.bars import bar
from lamina.cli.output import out, print_json
from lamina.cli.passphrase import PassphraseFile, open_key
from lamina.plan import Policy
from lamina.train.corpus.listing import LISTING, Listing

_BOUND, _WINDOW, _ABOUT = "What is signed", "For how long", "Whom and what it is about"


def attest(
    policy: Annotated[
        Path, typer.Argument(metavar="policy.toml", help="the policy of the corpus that it is for")
    ],
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a contribution (payload.* inside), or a folder of them")
    ],
    key: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="private key of the contributor; not needed for --dry-run"),
    ] = None,
    passphrase_file: PassphraseFile = None,
    cls: Annotated[
        str | None,
        typer.Option(
            "--class", metavar="NAME", help="class of the policy; or a column `class` in contributions.csv"
        ),
    ] = None,
    data_class: Annotated[
        str | None,
        typer.Option(help="what the data is, such as ecg; default: as the class", rich_help_panel=_ABOUT),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(help="sign a smaller clip norm than the class has", rich_help_panel=_BOUND),
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="sign a larger noise multiplier than the class asks for", rich_help_panel=_BOUND),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(help="sign how deep the class reaches, if it is restricted", rich_help_panel=_BOUND),
    ] = True,
    valid_from: Annotated[
        str | None, typer.Option(metavar="TIME", help="default: now", rich_help_panel=_WINDOW)
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="default: after a year", rich_help_panel=_WINDOW)
    ] = None,
    subject_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="sign a keyed tag of column `subject` of contributions.csv (lamina keys subject makes the key)",
            rich_help_panel=_ABOUT,
        ),
    ] = None,
    anchor: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="content anchor, 64 hexadecimal digits; for a folder a CSV file with columns id, anchor",
            rich_help_panel=_ABOUT,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="sign all as asked, also what is stricter, signed by another key, or unchanged"
        ),
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
    root, ids = ids_in(path)
    listing = Listing.read(root / LISTING) if (root / LISTING).exists() else None
    classes = class_of(cls, listing, ids, root)
    window = Window(
        not_before=None if valid_from is None else when(valid_from),
        expires=None if expires is None else when(expires),
        now=int(time.time()),
    )
    if window.past and not force:
        raise typer.BadParameter(
            f"the window ended at {shown(window.end)}, so what is signed would never be admitted: give a later end "
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
        name: Terms.make(opened, name, not_before=window.begin, expires=window.end, **bound)
        for name in sorted(names)
    }
    anchors = None if anchor is None else anchors_of(anchor, ids)
    subjects, secret = subjects_of(subject_key, listing, root)
    signer = None if key is None else open_key(key, passphrase_file)
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
    tally = Tally()
    with bar("looking" if dry_run else "signing", len(ids)) as tick:
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
                "classes": {name: figures(opened, made) for name, made in terms.items()},
            }
        )
    else:
        out.print(page(opened, terms, names), markup=False, soft_wrap=True)
        tell(tally, force=force, dry_run=dry_run, keyless=signer is None)
    if tally.refused:
        raise typer.Exit(1)
