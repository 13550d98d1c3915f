"""Who is admitted, payloads included: one answer for `lamina admit` and for a run. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.admit import reasons
from lamina.admit.admission import Admission, Progress
from lamina.admit.contribution_sources import Contribution, FolderContributions, open_with_size
from lamina.admit.gate import AdmissionGate
from lamina.admit.reasons import Reason
from lamina.admit.rows import PackedTexts
from lamina.errors import AdmissionError
from lamina.run.payloads import (
    PAYLOAD_SUFFIXES,
    FolderPayloads,
    PayloadInspector,
    Payloads,
    PayloadSurvey,
    survey_and_refuse,
)
from lamina.run.table_files import LISTING, ContributionListing, Hasher, hash_parts


class GivenPayloads:
    """Payloads that were handed over: bytes, or paths."""

    where = "that was handed over"
    frozen = False

    def __init__(self, ids: Sequence[str], payloads: Sequence[bytes | Path]) -> None:
        self.ids, self._payloads = PackedTexts(ids), payloads

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, row: int) -> str:
        payload = self._payloads[row]
        if isinstance(payload, Path):
            return str(payload)
        kind = PAYLOAD_SUFFIXES[0 if payload.startswith(b"PK") else 1]  # an .npz is a zip archive
        return f"{self.ids[row]}/payload.{kind}"

    def peek(self, row: int) -> bytes | None:
        payload = self._payloads[row]
        return None if isinstance(payload, Path) else payload

    def read(self, row: int) -> bytes | None:
        return self.peek(row)

    def take(self, rows: NDArray[np.int64]) -> GivenPayloads:
        return GivenPayloads([self.ids[row] for row in rows.tolist()], [self._payloads[row] for row in rows.tolist()])

    def feed(self, hasher: Hasher) -> None:
        """Ids and contents."""
        for row, name in enumerate(self.ids):
            content = self.peek(row)
            hash_parts(hasher, [name, read_whole(self.path(row)) if content is None else content])

    def __repr__(self) -> str:
        return "given"


def read_whole(path: str) -> bytes:
    with os.fdopen(open_with_size(path)[0], "rb") as file:
        return file.read()


def reasons_text(reasons: Mapping[Reason, int]) -> str:
    """How many left, and why: "3 (expired 2, revoked-key 1)"."""
    return f"{sum(reasons.values())} ({by_reason(reasons)})"


def by_reason(reasons: Mapping[Reason, int]) -> str:
    """Return the count of each reason: "expired 2, revoked-key 1"."""
    return ", ".join(f"{reason} {count}" for reason, count in reasons.items())


REFUSED_REMEDY = "corpus.admission.table(), or lamina admit, says who was refused and why"


def refusal_counts_text(admission: Admission) -> str:
    refused = admission.refused
    return f"refused: {len(refused)} of {len(admission) + len(refused)} ({by_reason(refused.counts())})"


Folders = str | Path | Sequence[str | Path]


def folders_of(given: Any) -> tuple[Path, ...]:
    """Return the folder or folders that are given; none for anything else, such as `Contribution`s."""
    if isinstance(given, str | Path):
        return (Path(given),)
    several = isinstance(given, list | tuple) and bool(given) and all(isinstance(each, str | Path) for each in given)
    return tuple(map(Path, given)) if several else ()


class AdmittedPayloads(NamedTuple):
    """The payloads of those who were admitted, what they hold, and what contributions.csv says of them."""

    payloads: Payloads
    labels: NDArray[Any] | None
    survey: PayloadSurvey
    subjects: list[str] | None


def admit_payloads(
    gate: AdmissionGate, contributions: Folders | Iterable[Contribution], *, dtype: str | None = None,
    stop: bool = False, progress: Progress | None = None,
) -> tuple[Admission, AdmittedPayloads | None]:  # fmt: skip
    """Review contributions and look into their payloads; enter those who pass both. `lamina admit` and a run both ask here.

    `stop` refuses all if one is refused. None: nobody is admitted.
    """
    roots = folders_of(contributions)
    # a list, because it is read again when an epoch is over
    source: Iterable[Contribution] = FolderContributions(*roots) if roots else list(contributions)  # type: ignore[arg-type]
    admission = gate.review(source, progress=progress, enter=False)
    folder = source if isinstance(source, FolderContributions) else None
    listing = ContributionListing.of_folders(roots)
    found = _survey_admitted(admission, folder, listing, dtype, gate.processes)
    if stop and admission.refused:
        problem = f"{refusal_counts_text(admission)}, and on_refusal is 'stop'"
        raise AdmissionError("corpus.contributions-refused", problem, REFUSED_REMEDY)
    if admission.enter() and found is not None:  # much may have happened meanwhile: go on without them
        found = _survey_admitted(admission, folder, listing, dtype, gate.processes)
    return admission, found


def _survey_admitted(
    admission: Admission,
    folder: FolderContributions | None,
    listing: ContributionListing | None,
    dtype: str | None,
    processes: int,
) -> AdmittedPayloads | None:
    """The payloads of those who can be trained on; the others are refused, each for itself. None: nobody is left."""
    found: dict[int, tuple[Reason, str]] = {}
    lines = _listing_lines(admission, listing, found)
    y = None if listing is None or listing.y is None else listing.y[lines]
    payloads = _payloads_of(admission, folder)

    def refuse(row: int, why: str) -> None:
        found.setdefault(row, (reasons.UNREADABLE, why))

    survey, rows = survey_and_refuse(payloads, PayloadInspector(y, dtype), refuse, processes)
    for row, size in zip(rows.tolist(), survey.sizes.tolist() if survey else (), strict=True):
        if size != (signed := int(admission.columns["items"][row])):
            found.setdefault(row, (reasons.MISMATCH, f"{signed} items were signed, the payload has {size}"))
    kept = np.setdiff1d(np.arange(len(admission)), np.array(list(found), dtype=np.int64))
    admission.refuse(found)
    if survey is None or not len(kept):
        return None
    subjects = None if listing is None else listing.subjects
    return AdmittedPayloads(
        payloads.take(kept),
        None if y is None else y[kept],
        PayloadSurvey(format=survey.format, sizes=survey.sizes[np.searchsorted(rows, kept)]),
        None if subjects is None else [subjects[line] for line in lines[kept].tolist()],
    )


def _listing_lines(
    admission: Admission, listing: ContributionListing | None, found: dict[int, tuple[Reason, str]]
) -> NDArray[np.int64]:
    """The line of each contribution in contributions.csv, which may not say another class than was signed."""
    lines = np.zeros(len(admission), dtype=np.int64)
    if listing is None:
        return lines
    known = {one: line for line, one in enumerate(listing.ids)}
    for row, one in enumerate(admission.ids):
        line = known.get(one)
        if line is None:
            found[row] = reasons.UNREADABLE, f"{LISTING} does not list it"
            continue
        lines[row], signed = line, admission.classes[admission.cls[row]]
        if listing.classes is not None and listing.classes[line] != signed:
            found[row] = reasons.MISMATCH, f"{LISTING} says class {listing.classes[line]!r}, {signed!r} was signed"
    return lines


def _payloads_of(admission: Admission, folder: FolderContributions | None) -> Payloads:
    if folder is not None:
        return FolderPayloads(folder, list(admission.ids))
    content = [each.payload for each in admission.source]
    return GivenPayloads(list(admission.ids), [content[place] for place in admission.places.tolist()])
