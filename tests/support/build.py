"""A ledger as a clinic would have it: several runs, redone and given up attempts, a withdrawal, keys that come and go,
a stricter policy, an aggregate, releases. Everything in it is real: signed, planned and priced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from making import AUDITOR, LEDGER, ORIGIN, START, TWO_OWNERS, WITNESS, Clock, authorised, digest, key, owned

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Event
from lamina.admit.attestation import Descriptor, attest, subject_tag
from lamina.admit.terms import hash_of_floors
from lamina.ledger import append, signed_checkpoint
from lamina.ledger.checked_leaves import CheckedLeaves, tokens_of
from lamina.ledger.governance_records import (
    ClassBounds,
    Header,
    Key,
    KeyChange,
    KeyEvent,
    LedgerFloors,
    PartySignature,
    PolicyChange,
    Release,
    Role,
    Withdrawal,
    WithdrawalEffect,
    WithdrawalReason,
)
from lamina.ledger.records import ContributionRecord, ContributionTerms, Epoch, EpochAccount, Segment, SegmentOutcome
from lamina.ledger.retention import Retention
from lamina.ledger.schema import nano_epsilon, program_version
from lamina.ledger.spending import Spending, planned_charges
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan
from lamina.sign.keys import PrivateKey

HOUR = 3600
YEAR = 365 * 24 * HOUR
RUNS = (digest("run one")[:16], digest("run two")[:16])
ALICE, BOB, BOBBY, CAROL = (key(name) for name in ("alice", "bob", "bobby", "carol"))
FLOORS = LedgerFloors(clip_norm=100_000, noise_multiplier=500_000)
PRESETS = (
    ClassBounds(cls="clinical", clip_norm=1_000_000, noise_multiplier=1_000_000, profile="top=0.5", population=1000),
    ClassBounds(cls="open", clip_norm=0, noise_multiplier=0, public=True, profile="all"),
)
USUAL = ContributionTerms("clinical", "ecg", 1_000_000, 1_000_000, "top=0.5")
STRICT = ContributionTerms("clinical", "ecg", 500_000, 4_000_000, "top=0.5")
OPEN = ContributionTerms("open", "ecg", 0, 0)


def policy_digest(floors: LedgerFloors = FLOORS, origin: str = ORIGIN) -> bytes:
    """What contributors sign where these floors are in force."""
    return hash_of_floors(origin, floors.clip_norm, floors.noise_multiplier)


def plan(steps: int = 100, **changes: Any) -> StepPlan:
    """Four layers; the class of patients reaches the upper two, with sigma 4."""
    given: dict[str, Any] = {
        "layers": tuple(
            PlannedLayer(
                name=f"layer.{i}", depth=i / 3, parameters=(f"layer.{i}.weight",), size=64, spans=((i, i + 1),)
            )
            for i in range(4)
        ),
        "blocks": 4,
        "classes": (
            PlannedClass(
                name="clinical", population=1000, sampling_rate=0.02, delta=1e-5, unit="patient", profile="top 50 %"
            ),
            PlannedClass(name="open", population=None, sampling_rate=0.1, public=True, profile="all layers"),
        ),
        "clip": ((0.0, 0.0, 0.8, 0.6), (float("inf"),) * 4),
        "noise": (0.0, 0.0, 4.0, 4.0),
        "batch": 20.0,
        "steps": steps,
    }
    return StepPlan(**{**given, **changes})


def header(**changes: Any) -> Header:
    given: dict[str, Any] = {
        "origin": ORIGIN,
        "accountant": "rdp",
        "version": program_version(),
        "delta": 1e-5,
        "floors": FLOORS,
        "presets": PRESETS,
        "policy": policy_digest(changes.get("floors", FLOORS), changes.get("origin", ORIGIN)),
        "granularity": 4,
        "retention": YEAR,
        "epoch_clock": HOUR,
        "keys": TWO_OWNERS,
    }
    return owned(Header(**{**given, **changes}))


@dataclass
class Made:
    """A contribution: what was signed, and what becomes of it in a ledger."""

    descriptor: Descriptor
    attestation: bytes
    record: ContributionRecord


def contribution(
    number: int,
    who: PrivateKey = ALICE,
    terms: ContributionTerms = USUAL,
    *,
    at: int = START,
    expires: int | None = None,
    anchor: bytes | None = None,
    subject: str | None = None,
    origin: str = ORIGIN,
    ledger: bytes | None = None,
    **changes: Any,
) -> Made:
    """Signed by `who` an hour before `at`; `changes` are made to the record, not to what was signed."""
    descriptor = Descriptor(
        contributor=who.public.id,
        data_class=terms.data_class,
        admissibility=terms.cls,
        clip_norm=terms.clip_norm,
        noise_multiplier=terms.noise_multiplier,
        not_before=at - HOUR,
        expires=at + YEAR // 2 if expires is None else expires,
        profile=terms.profile,
        commitment=digest("payload", number),
        items=1,
        nonce=digest("nonce", number)[:16],
        policy=policy_digest(origin=origin),
        audience=origin,
        anchor=anchor,
    )
    tag = None if subject is None else subject_tag(digest("subject key"), subject)
    signed = attest(descriptor, who, issued_at=at - HOUR, subject_tag=tag, ledger=ledger)
    record = ContributionRecord(
        descriptor=descriptor.digest(),
        attestation=__import__("hashlib").sha256(signed).digest(),
        key=who.public.id,
        not_before=descriptor.not_before,
        expires=descriptor.expires,
        terms=terms,
        anchor=anchor,
        subject=None if tag is None else bytes.fromhex(tag),
    )
    return Made(descriptor, signed, dataclasses.replace(record, **changes))


@dataclass
class Story:
    """Writes a ledger as its gate, trainer and keeper would. `at` are the leaves that tests look for."""

    ledger: Ledger
    clock: Clock
    at: dict[str, int] = field(default_factory=dict)
    spending: Spending = field(init=False)
    signed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spending = Spending(self.ledger.header)

    def later(self, seconds: int) -> None:
        self.clock.now += seconds

    def sign(self) -> str:
        self.signed.append(self.ledger.checkpoint())
        return self.signed[-1]

    def keys(self, *keys: PrivateKey) -> None:
        """Contributors whose signatures count from now on."""
        for one in keys:
            named = Key(name=f"contributor-{one.public.name[:8]}", x=one.public.x, role=Role.CONTRIBUTOR)
            self.govern(KeyEvent(change=KeyChange.ADD, key=named, effective=int(self.clock.now)))

    def govern(self, change: Any, *keys: PrivateKey) -> int:
        """Append a change that the owner, or these keys, authorised."""
        return self.ledger.append([authorised(self.ledger, change, *keys)])[0]

    def slip(self, made: Iterable[Made]) -> list[int]:
        """The same past the rules of the writer, as a keeper with another program does."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckedLeaves, "check_next", lambda *given: None)
            patch.setattr(append, "tokens_of", lambda data, ledger: tokens_of(data))
            return self.admit(made)

    def admit(self, made: Iterable[Made]) -> list[int]:
        made = list(made)
        return self.ledger.append([one.record for one in made], [one.attestation for one in made])

    def epoch(
        self,
        run: bytes,
        segments: Sequence[Segment],
        of: StepPlan | None = None,
        scales: dict[ContributionTerms, float] | None = None,
        change: Callable[[Epoch], Epoch] = lambda made: made,
        factors: dict[ContributionTerms, float] | None = None,
    ) -> int:
        """Close an epoch, with what it really spends; `factors` are of exhausted bounds."""
        used = plan() if of is None else of
        accounts = []
        for terms, scale in sorted((scales or {USUAL: 1.0, STRICT: 0.5}).items(), key=lambda pair: pair[0].bound):
            factor = (factors or {}).get(terms, 1.0)
            charges = planned_charges(used, terms.cls, scale * factor, segments)
            self.spending.charge(terms.bound, charges)
            made_of = account(terms, scale, charges, self.spending.spend(terms.bound))
            accounts.append(dataclasses.replace(made_of, exhausted=None if factor == 1 else factor))
        made = Epoch(
            run=run,
            segments=tuple(segments),
            plan=used.digest(),
            variance=tuple(s * s for s in used.noise),
            accounts=tuple(accounts),
            state=self.spending.state(),
        )
        return self.ledger.append([change(made)], [used.to_cbor()])[0]


def account(terms: ContributionTerms, scale: float, charges: tuple[Event, ...], spend: int) -> EpochAccount:
    return EpochAccount(
        cls=terms.cls,
        clip_norm=terms.clip_norm,
        noise_multiplier=terms.noise_multiplier,
        scale=scale,
        charges=charges,
        spend=spend,
    )


def segment(
    index: int,
    generation: int = 0,
    *,
    read: int,
    outcome: SegmentOutcome = SegmentOutcome.CLOSED,
    length: int = 10,
    after: int | None = None,
) -> Segment:
    return Segment(
        index=index,
        generation=generation,
        nonce=digest("segment", index, generation)[:16],
        first=length * index,
        last=length * (index + 1),
        eligibility=read,
        outcome=outcome,
        after=after,
    )


def signed_by(record: Any, *keys: PrivateKey, origin: str = ORIGIN) -> Any:
    """An aggregate with the signatures of these keys."""
    message = record.message(origin)
    found = tuple(PartySignature(key=one.public.id, signature=one.sign(message)) for one in keys)
    return dataclasses.replace(record, signatures=found)


def begin(where: str, **changes: Any) -> Story:
    """A ledger with a header and the keys of contributors."""
    clock = Clock()
    story = Story(Ledger.create(where, header(**changes), LEDGER, clock=clock), clock)
    story.keys(ALICE, BOB, CAROL)
    return story


def build(where: str, *, prune: bool = True, **changes: Any) -> Story:
    """The whole story."""
    story = begin(where, **changes)
    ledger, at = story.ledger, story.at
    made = [contribution(n, (ALICE, BOB, CAROL)[n % 3], STRICT if n % 4 == 0 else USUAL) for n in range(30)]
    made += [contribution(n, BOB, OPEN, subject=f"patient {n}", anchor=digest("anchor", n)) for n in range(30, 36)]
    made.append(contribution(36, CAROL, STRICT, anchor=digest("anchor", 30)))
    at["first"], *_, at["last"] = story.admit(made)
    at["strict"] = at["first"]
    story.sign()
    story.later(2 * HOUR)
    at["epoch"] = story.epoch(RUNS[0], [segment(0, read=ledger.size)])
    story.sign()
    (at["withdrawal"],) = ledger.append(
        [
            Withdrawal(
                target=at["first"] + 5,
                reason=WithdrawalReason.CONSENT,
                effect=WithdrawalEffect.ABANDON,
                run=RUNS[0],
                segment=2,
            )
        ]
    )
    story.later(HOUR)
    read = at["withdrawal"]
    at["redone"] = story.epoch(
        RUNS[0],
        [
            segment(1, 0, read=read, outcome=SegmentOutcome.ABANDONED),
            segment(1, 1, read=read + 1),
            segment(2, read=read + 1, after=1),
        ],
    )
    story.sign()
    higher = LedgerFloors(clip_norm=200_000, noise_multiplier=500_000)
    at["policy"] = story.govern(PolicyChange(floors=higher, presets=PRESETS, policy=policy_digest(higher)))
    now = int(story.clock.now)
    bobby = Key(name="contributor-bobby", x=BOBBY.public.x, role=Role.CONTRIBUTOR)
    at["rotation"] = story.govern(KeyEvent(change=KeyChange.ROTATE, key=bobby, target=BOB.public.id, effective=now))
    at["revocation"] = story.govern(KeyEvent(change=KeyChange.REVOKE, target=CAROL.public.id, effective=now))
    story.later(HOUR)
    now = int(story.clock.now)
    at["second"], *_ = story.admit(contribution(n, BOBBY, at=now, expires=now + 3 * YEAR) for n in range(40, 45))
    at["run two"] = story.epoch(RUNS[1], [segment(0, read=ledger.size)], of=plan(50, noise=(0.0, 0.0, 5.0, 5.0)))
    (at["release"],) = ledger.append([Release(manifest=digest("manifest"), runs=RUNS, not_after=now + YEAR)])
    cosigned = signed_checkpoint.add_cosignature(story.sign(), WITNESS, now, "witness.example")
    ledger.cosigned(cosigned)
    story.later(2 * YEAR)
    (at["late"],) = story.admit([contribution(50, ALICE, at=int(story.clock.now))])
    if prune:
        proposal = Retention(ledger).propose()
        assert proposal is not None
        at["aggregate"] = Retention(ledger).prune(signed_by(proposal, AUDITOR))
    story.sign()
    return story


def spent(*stretches: tuple[float, int]) -> int:
    """(sigma, steps) of class clinical, by the accountant of the header."""
    events = [Event(sigma=sigma, q=0.02, steps=steps) for sigma, steps in stretches]
    return nano_epsilon(find_accountant("rdp").epsilon(events, 1e-5))
