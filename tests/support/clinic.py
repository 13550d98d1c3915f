"""A clinic whose contributions go through a gate into a ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from making import GOVERNING, LEDGER, START, Clock, digest, key

from lamina.admit.admission import Admission
from lamina.admit.attestation import Descriptor, attest, commit, subject_tag
from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import AdmissionGate
from lamina.admit.terms import SigningTerms
from lamina.ledger.admission_batch import LedgerRegister
from lamina.ledger.corpus_terms import CorpusTerms, adopt_policy, open_or_create
from lamina.ledger.records import ContributionRecord
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.policy import Policy
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey

HOUR = 3600
ALICE, BOB = key("alice"), key("bob")


def policy(**changes: Any) -> Policy:
    """Two private classes and a public one. `changes` go into [corpus]; those named by a class into its table."""
    classes: dict[str, dict[str, Any]] = {
        "clinical": {"population": 100, "clip_norm": 1.0, "epsilon": 2.0, "profile": {"top": 0.25}},
        "standard": {"population": 100, "clip_norm": 1.0, "noise_multiplier": 2.0},
        "open": {"public": True},
    }
    for name in list(changes):
        if name in classes:
            classes[name] |= changes.pop(name)
    corpus = {
        "origin": "clinic.example/ecg",
        "delta": 1e-5,
        "accountant": "rdp",
        "floors": {"clip_norm": 0.1, "noise_multiplier": 0.5},
    }
    return Policy.from_dict({"corpus": corpus | changes, "class": classes})


class Clinic:
    """A policy, a key ring, a clock; and the ledger at a place."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.policy = policy()
        self.clock = Clock()
        self.keys = KeyRing()
        for name, one in (("alice", ALICE), ("bob", BOB)):
            self.keys.add(one.public, label=name, valid_from=START - 10 * HOUR)

    def open(self) -> Ledger:
        contract = CorpusTerms.of_policy(self.policy)
        ledger = open_or_create(self.where, contract, LEDGER, governing=GOVERNING, clock=self.clock)
        adopt_policy(ledger, contract)
        return ledger

    def gate(self, ledger: Ledger | None = None) -> AdmissionGate:
        register = None if ledger is None else LedgerRegister(ledger)
        return AdmissionGate(self.policy, self.keys, clock=self.clock, register=register)

    def admit(self, given: Iterable[Contribution] | str | Path) -> Admission:
        with self.open() as ledger:
            return self.gate(ledger).review(given)

    @contextmanager
    def opened(self) -> Iterator[Ledger]:
        with self.open() as ledger:
            yield ledger

    def offer(
        self,
        id: str,
        cls: str = "clinical",
        *,
        who: PrivateKey = ALICE,
        subject: str | None = None,
        life: int = 100 * HOUR,
        issued: int = START - HOUR,
        anchor: bytes | None = None,
        ledger: bytes | None = None,
    ) -> Contribution:
        """The same for the same words, in every process."""
        nonce, payload = digest("nonce", id)[:16], id.encode()
        terms = SigningTerms.make(self.policy, cls, not_before=START - HOUR, expires=START + life)
        made = terms.descriptor(contributor=who.public.id, nonce=nonce, commitment=commit(nonce, payload), items=1)
        if anchor is not None:
            made = Descriptor(**{**_fields(made), "anchor": anchor})
        tag = None if subject is None else subject_tag(digest("subject key"), subject)
        signed = attest(made, who, issued_at=issued, subject_tag=tag, ledger=ledger)
        return Contribution(id, made.encode(), signed, payload)

    def offers(self, first: int, stop: int, cls: str = "clinical", **options: Any) -> list[Contribution]:
        return [self.offer(f"p{n:04d}", cls, **options) for n in range(first, stop)]

    def resigned(self, given: Contribution, issued: int) -> Contribution:
        """The same descriptor under another attestation."""
        assert given.descriptor is not None
        again = attest(Descriptor.decode(given.descriptor), ALICE, issued_at=issued)
        return Contribution(given.id, given.descriptor, again, given.payload)


def write(folder: Path, given: Iterable[Contribution]) -> Path:
    """A folder of contributions."""
    for one in given:
        place = folder / one.id
        place.mkdir(parents=True, exist_ok=True)
        assert one.descriptor is not None and one.attestation is not None and isinstance(one.payload, bytes)
        (place / "descriptor.cbor").write_bytes(one.descriptor)
        (place / "attestation.cose").write_bytes(one.attestation)
        (place / "payload.bin").write_bytes(one.payload)
    return folder


def admitted(ledger: Ledger) -> list[ContributionRecord]:
    return [leaf.record for leaf in ledger.of_kind(ContributionRecord) if isinstance(leaf.record, ContributionRecord)]


def digest_of(given: Contribution) -> bytes:
    assert given.descriptor is not None
    return hashlib.sha256(given.descriptor).digest()


def check(where: str, now: int = START + 50 * HOUR) -> None:
    """An auditor finds nothing, signatures of contributors and checkpoints included."""
    found = verify(where, now=now)
    assert found.problem is None and found.verified
    assert found.signed == found.size


def reasons(admission: Admission) -> dict[str, str]:
    return {each.id: each.reason.word for each in admission.refused}


def _fields(made: Descriptor) -> dict[str, Any]:
    names = Descriptor.__dataclass_fields__
    return {name: getattr(made, name) for name in names if names[name].init}
