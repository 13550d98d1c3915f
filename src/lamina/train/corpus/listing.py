"""A folder of contributions, and the list that says what each of them is."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.errors import CorpusError
from lamina.train.corpus.folder import FolderSource
from lamina.train.corpus.payloads import Files
from lamina.train.corpus.table import Labels, Names, header_of, lines_of, opened

COLUMNS = ("id", "class", "subject", "y")
LISTING = "contributions.csv"


@dataclass(frozen=True, kw_only=True)
class Listing:
    """ROOT/contributions.csv: one line per contribution."""

    ids: list[str]
    classes: list[str] | None
    subjects: list[str] | None
    y: NDArray[Any] | None

    @classmethod
    def read(cls, path: Path) -> Listing:
        with opened(path) as file:
            lines = lines_of(path, csv.reader(file, strict=True))
            header = header_of(path, lines, ",")
            rows = list(lines)
        strange = [name for name in header if name not in COLUMNS]
        if strange or "id" not in header:
            what = f"has a column {strange[0]!r}" if strange else "has no column 'id'"
            raise CorpusError(
                "corpus.columns-id-required",
                f"'{path}' {what}",
                f"its columns are {', '.join(COLUMNS)}; only id is required",
            )
        if not rows:
            raise CorpusError(
                "corpus.lists-no-contributions",
                f"'{path}' lists no contributions",
                "give one line per contribution",
            )

        def names(column: str) -> list[str] | None:
            if column not in header:
                return None
            reader = Names(path, header, column)
            reader.read(rows)
            return reader.values

        y = None
        if "y" in header:
            labels = Labels(path, header, ["y"])
            labels.read(rows)
            y = labels.array()[:, 0]
        ids = names("id")
        assert ids is not None
        return cls(ids=ids, classes=names("class"), subjects=names("subject"), y=y)

    def sorted(self) -> Listing:
        """By id, which is the order of a corpus of a folder."""
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)

        def by_id(values: list[str] | None) -> list[str] | None:
            return None if values is None else [values[i] for i in order]

        return Listing(
            ids=[self.ids[i] for i in order],
            classes=by_id(self.classes),
            subjects=by_id(self.subjects),
            y=None if self.y is None else self.y[order],
        )


def folder_parts(path: str | Path, *, cls: Any, subject: Any, dtype: torch.dtype | None) -> dict[str, Any]:
    """What a corpus is made of, from a folder."""
    root = Path(path)
    if not root.is_dir():
        raise CorpusError(
            "corpus.not-folder",
            f"'{root}' is not a folder",
            "give the folder that holds one folder per contribution",
        )
    there = sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    listing = Listing(ids=there, classes=None, subjects=None, y=None)
    if (root / LISTING).exists():
        listing = Listing.read(root / LISTING).sorted()
        _check_same(root, listing.ids, there)
    if not there:
        raise CorpusError(
            "corpus.holds-no-contributions",
            f"'{root}' holds no contributions",
            "put each into a folder: ID/payload.npz",
        )
    for what, column, given in (("cls", listing.classes, cls), ("subject", listing.subjects, subject)):
        if column is not None and given is not None:
            raise CorpusError(
                "corpus.given-too",
                f"{what} is given, and '{root / LISTING}' has it too",
                "keep it in one of the two places",
            )
    source = FolderSource(Files(root, listing.ids), listing.y, dtype=dtype)
    return {
        "x": source,
        "unit": np.repeat(np.arange(len(listing.ids)), source.sizes),
        "ids": listing.ids,
        "cls": cls if listing.classes is None else listing.classes,
        "subject": subject if listing.subjects is None else listing.subjects,
    }


def _check_same(root: Path, listed: list[str], there: list[str]) -> None:
    """The list and the folders name the same contributions, each once."""
    for one, next_one in pairwise(listed):
        if one == next_one:
            raise CorpusError(
                "corpus.lists-twice",
                f"'{root / LISTING}' lists {one!r} twice",
                "list every contribution once",
            )
    if missing := sorted(set(listed) - set(there)):
        raise CorpusError(
            "corpus.lists-no-folder",
            f"'{root / LISTING}' lists {missing[0]!r}, which has no folder",
            "remove the line",
        )
    if strange := sorted(set(there) - set(listed)):
        raise CorpusError(
            "corpus.folder-not",
            f"folder {strange[0]!r} is not in '{root / LISTING}'",
            "list it, or move it away",
        )
