"""`Gate` with a corpus behind it: only what was signed is learned from."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.admit import gate
from lamina.admit.admission import Admission, Progress
from lamina.admit.examine import MAX_PAYLOAD
from lamina.admit.files import read_small
from lamina.admit.keyring import KeyRing
from lamina.admit.reason import Reason
from lamina.admit.register import Register
from lamina.admit.source import Contribution, FolderContributions
from lamina.errors import AdmissionError
from lamina.ledger.ledger import Ledger
from lamina.ledger.register import registered
from lamina.plan import Policy
from lamina.train.corpus.committed import Committed, Given
from lamina.train.corpus.folder import FolderSource
from lamina.train.corpus.listing import LISTING, Listing
from lamina.train.corpus.look import Look
from lamina.train.corpus.payloads import Files, Payloads
from lamina.train.corpus.signed import AdmittedCorpus
from lamina.train.corpus.survey import Survey, tolerant

SKIP, STOP = "skip", "stop"


class Gate(gate.Gate):
    """Admits contributions under a policy, by the keys of a ring, and makes a corpus of those that may enter.

        corpus = lamina.Gate(policy, "keys.json").admit("contributions", ledger="corpus.ledger.db")
        print(corpus.admission.table())

    keys   the path of a key ring, which is read again at each segment of a run, so that a revocation is obeyed at the
           next one; or a `KeyRing`, which is asked as it is
    """

    def __init__(
        self,
        policy: Policy,
        keys: KeyRing | str | Path,
        *,
        clock: Callable[[], float] = time.time,
        register: Register | None = None,
        processes: int = 1,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        if not isinstance(policy, Policy):
            raise AdmissionError(
                "train.policy",
                f"the policy is a {type(policy).__name__}",
                "use lamina.Policy.load('policy.toml')",
            )
        self._path = None if isinstance(keys, KeyRing) else Path(keys)
        self._seen: bytes | None = None  # digest of the file that was loaded
        ring = keys
        if not isinstance(ring, KeyRing):
            self._seen, held = _file(Path(ring))
            ring = KeyRing.load(ring, held)
        super().__init__(
            policy, ring, clock=clock, register=register, processes=processes, max_payload=max_payload
        )

    def reread(self) -> KeyRing | None:
        """Rely on the ring as its file has it now; None if it came from none, or the file is as it was.

        A file that cannot be read is refused each time it is asked for: it may have said that a key is revoked.
        """
        if self._path is None:
            return None
        digest, held = _file(self._path)
        if digest == self._seen:
            return None
        self.keys = KeyRing.load(self._path, held)
        self._seen = digest  # not before: what cannot be loaded was not seen
        return self.keys

    def admit(
        self,
        contributions: str | Path | Iterable[Contribution],
        ledger: Ledger | Register | str | os.PathLike[str] | None = None,
        *,
        on_refusal: str = SKIP,
        examples_per_unit: int | None = None,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> AdmittedCorpus:
        """Examine all of them and make a corpus of those that are admitted; `corpus.admission` has the report.

        contributions  a folder with ID/payload.npz or ID/payload.csv, ID/descriptor.cbor and ID/attestation.cose, and
                       perhaps a contributions.csv with y; or `Contribution`s with their bytes
        ledger         where those who are admitted are recorded, and who was withdrawn: the path of a ledger, which is
                       made if there is none, "postgresql://…#schema", an open `Ledger`, or any register. Who stands in
                       it already is admitted again, and nothing is written
        on_refusal     "skip" whoever is refused, or "stop" with an AdmissionError
        progress       hears (how many are examined, of how many)

        The class of a contribution is the one that it signed. Payloads are read when they are sampled, and held against
        their commitment again.
        """
        if on_refusal not in (SKIP, STOP):
            raise AdmissionError(
                "train.refusal", f"on_refusal is {on_refusal!r}", f'use "{SKIP}" or "{STOP}"'
            )
        self.reread()
        if ledger is None:
            return self._admit(contributions, on_refusal, examples_per_unit, dtype, progress)
        with registered(ledger, self.policy, clock=self.clock.now) as register:
            before, self.register = self.register, register
            try:
                return self._admit(contributions, on_refusal, examples_per_unit, dtype, progress)
            finally:
                self.register = before

    def _admit(
        self,
        contributions: str | Path | Iterable[Contribution],
        on_refusal: str,
        examples_per_unit: int | None,
        dtype: torch.dtype | None,
        progress: Progress | None,
    ) -> AdmittedCorpus:
        folder = Path(contributions) if isinstance(contributions, str | Path) else None
        source: Iterable[Contribution] = (
            FolderContributions(contributions)
            if isinstance(contributions, str | Path)
            else list(contributions)  # it may be read once only, and is read again when an epoch is over
        )
        admission = self.review(source, progress=progress, enter=False)
        listing = _listing(folder)
        data = _Data.of(admission, folder, listing, dtype, self._processes)
        if on_refusal == STOP and admission.refused:
            raise AdmissionError(
                "train.refusal-2", f"{_told(admission)}, and on_refusal is {STOP!r}", _REMEDY
            )
        if admission.enter() and data is not None:  # much may have happened meanwhile: go on without them
            data = _Data.of(admission, folder, listing, dtype, self._processes)
        if data is None:
            raise AdmissionError("train.nobody-admitted", f"nobody is admitted: {_told(admission)}", _REMEDY)
        return AdmittedCorpus(
            data.source,
            admission,
            ids=list(admission.ids),
            subject=data.subjects,
            policy=self.policy,
            keys=self.reread,
            examples_per_unit=examples_per_unit,
        )


def _file(path: Path) -> tuple[bytes, bytes]:
    """Digest and bytes of a key ring."""
    held = read_small(path, "the key ring")
    return hashlib.sha256(held).digest(), held


_REMEDY = "corpus.admission.table(), or lamina admit, says who was refused and why"


def _told(admission: Admission) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in admission.refused.counts().items())
    return (
        f"{len(admission.refused)} of {len(admission) + len(admission.refused)} refused ({reasons or 'none'})"
    )


def _listing(folder: Path | None) -> Listing | None:
    path = None if folder is None else folder / LISTING
    return Listing.read(path) if path is not None and path.exists() else None


@dataclass(frozen=True, kw_only=True)
class _Data:
    """What was admitted, opened: payloads under their commitments, labels and subjects of a contributions.csv."""

    source: FolderSource
    subjects: list[str] | None

    @classmethod
    def of(
        cls,
        admission: Admission,
        folder: Path | None,
        listing: Listing | None,
        dtype: torch.dtype | None,
        processes: int,
    ) -> _Data | None:
        """None if nothing is left. Whoever cannot be opened is refused, each for itself."""
        found: dict[int, tuple[Reason, str]] = {}
        lines = _lines(admission, listing, found)
        y = None if listing is None or listing.y is None else listing.y[lines]
        payloads = _payloads(admission, folder)
        look = Look(y, dtype)

        def refuse(row: int, why: str) -> None:
            found.setdefault(row, (Reason.UNREADABLE, why))

        survey, rows = tolerant(payloads, look, refuse, processes)
        for row, size in zip(rows.tolist(), survey.sizes.tolist() if survey else (), strict=True):
            if size != (signed := int(admission.columns["items"][row])):
                found.setdefault(
                    row, (Reason.MISMATCH, f"{signed} items were signed, the payload has {size}")
                )
        kept = np.setdiff1d(np.arange(len(admission)), np.array(list(found), dtype=np.int64))
        if survey is None or not len(kept):
            admission.refuse(found)
            return None
        sizes = survey.sizes[np.searchsorted(rows, kept)]
        admission.refuse(found)
        columns = admission.columns
        committed = Committed(
            payloads.take(kept), nonces=columns["nonce"].copy(), commitments=columns["commitment"].copy()
        )
        subjects = None if listing is None else listing.subjects
        return cls(
            source=FolderSource(
                committed,
                None if y is None else y[kept],
                dtype=dtype,
                survey=Survey(form=survey.form, sizes=sizes),
            ),
            subjects=None if subjects is None else [subjects[line] for line in lines[kept].tolist()],
        )


def _lines(
    admission: Admission, listing: Listing | None, found: dict[int, tuple[Reason, str]]
) -> NDArray[np.int64]:
    """The line of each contribution in contributions.csv, which may not say another class than was signed."""
    lines = np.zeros(len(admission), dtype=np.int64)
    if listing is None:
        return lines
    known = {one: line for line, one in enumerate(listing.ids)}
    for row, one in enumerate(admission.ids):
        line = known.get(one)
        if line is None:
            found[row] = Reason.UNREADABLE, f"{LISTING} does not list it"
            continue
        lines[row], signed = line, admission.classes[admission.cls[row]]
        if listing.classes is not None and listing.classes[line] != signed:
            said = listing.classes[line]
            found[row] = Reason.MISMATCH, f"{LISTING} says class {said!r}, {signed!r} was signed"
    return lines


def _payloads(admission: Admission, folder: Path | None) -> Payloads:
    if folder is not None:
        return Files(folder, list(admission.ids))
    held = [each.payload for each in admission.source]
    return Given(list(admission.ids), [held[place] for place in admission.places.tolist()])
