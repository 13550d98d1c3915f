"""What `lamina attest` is told besides a policy: classes, subjects and anchors of contributions."""

from __future__ import annotations

import csv
from pathlib import Path

import typer

from lamina.admit.files import read_small
from lamina.admit.refusal import plain
from lamina.cli.output import err
from lamina.errors import AdmissionError
from lamina.train.corpus.listing import LISTING, Listing
from lamina.train.corpus.table import Names, check_column, header_of, lines_of, opened


def class_of(cls: str | None, listing: Listing | None, ids: list[str], root: Path) -> str | dict[str, str]:
    """The class of all, or of each by id. Where both --class and the list say it, they must agree."""
    listed = None if listing is None else listing.classes
    if listing is None or listed is None:
        if cls is None:
            raise typer.BadParameter(
                f"give the class of all, or a column `class` in {LISTING}", param_hint="--class"
            )
        return cls
    wanted = set(ids)
    found = {id: name for id, name in zip(listing.ids, listed, strict=True) if id in wanted}
    if cls is None:
        return found
    for id, name in found.items():
        if name != cls:
            raise AdmissionError(
                "cli.class-says",
                f"--class is {plain(cls)!r}, and '{root / LISTING}' says {plain(name)!r} of {plain(id)!r}",
                "leave --class out",
            )
    return cls


def subjects_of(
    key: Path | None, listing: Listing | None, root: Path
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


def anchors_of(given: str, ids: list[str]) -> dict[str, bytes]:
    """Digests by id: one for one contribution, or a table."""
    rows = {ids[0]: given} if len(ids) == 1 and not given.endswith(".csv") else _anchor_table(Path(given))
    anchors = {}
    for id, text in rows.items():
        try:
            anchors[id] = bytes.fromhex(text)
        except ValueError:
            anchors[id] = b""
        if len(anchors[id]) != 32:
            raise AdmissionError(
                "cli.anchor-not-hexadecimal",
                f"the anchor of {plain(id)!r} is not 64 hexadecimal digits",
                "give a SHA-256 digest",
            )
    return anchors


def _anchor_table(path: Path) -> dict[str, str]:
    if path.suffix != ".csv":
        raise AdmissionError(
            "cli.anchor-given-several",
            f"the anchor {plain(str(path))!r} is given for several contributions",
            "give a CSV file: id, anchor",
        )
    with opened(path) as file:
        lines = lines_of(path, csv.reader(file, strict=True))
        header = header_of(path, lines, ",")
        rows = list(lines)
    columns = []
    for name in ("id", "anchor"):
        check_column(path, name, header)
        columns.append(Names(path, header, name))
        columns[-1].read(rows)
    return dict(zip(columns[0].values, columns[1].values, strict=True))
