"""Epochs, plans and policies that contradict themselves or each other, written by whoever has the ledger's key."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest
from build import (
    ALICE,
    BOB,
    CAROL,
    FLOORS,
    HOUR,
    PRESETS,
    RUNS,
    STRICT,
    USUAL,
    Story,
    begin,
    contribution,
    plan,
    policy_digest,
    segment,
    signed_by,
)
from forge import appended, asked, leaf, replacing, rewritten, sql
from making import AUDITOR, GOVERNING, LEDGER, SECOND, digest
from open_charges import put_open_charge
from refusals import raises_code

from lamina import cbor
from lamina.ledger.governance_records import (
    NO_POLICY,
    KeyChange,
    KeyEvent,
    LedgerFloors,
    PolicyChange,
    Release,
    Withdrawal,
    WithdrawalReason,
)
from lamina.ledger.records import ContributionTerms, Epoch, NoiseChange, Segment, SegmentOutcome, decode_leaf
from lamina.ledger.retention import Retention
from lamina.ledger.schema import program_version
from lamina.ledger.store.rows import StoredLeaf
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.plan.rules import Choose, FollowEnergy
from lamina.plan.step_plan import Clipping, PlannedClass, StepPlan
from lamina.sign.key_ring import KeyRing

WHOLE_CLASS = ContributionTerms("clinical", "ecg", 0, 0)
INVENTED = ContributionTerms("clinical", "ecg", 1_000_000, 9_000_000)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    made = begin(str(tmp_path / "a.db"))
    yield made
    made.ledger.close()


def code_of(story: Story, **options: Any) -> str | None:
    """What an auditor finds wrong."""
    story.sign()
    found: Verification = verify(story.ledger.store, **options)
    return found.problem and found.problem.code


def closed(story: Story, of: StepPlan | None = None, scales: dict[ContributionTerms, float] | None = None) -> int:
    """An epoch of one segment, of the members until now."""
    story.later(HOUR)
    return story.epoch(RUNS[0], [segment(0, read=story.ledger.size)], of=of, scales=scales)


# ------------------------------------------------------------------------------ whom an epoch charges


@pytest.mark.parametrize(
    ("signed", "scales", "code"),
    [
        ([USUAL, STRICT], {USUAL: 1.0, STRICT: 0.5}, None),
        ([USUAL, STRICT], {WHOLE_CLASS: 1.0}, None),  # members with another bound may have stayed out
        ([USUAL, STRICT], {WHOLE_CLASS: 1.0, STRICT: 0.5}, None),
        ([USUAL, STRICT], {STRICT: 0.5}, "verify.trained-class-not-charged"),
        ([USUAL, STRICT], {INVENTED: 0.001}, "verify.account-bound-unsigned"),
        ([USUAL, STRICT], {WHOLE_CLASS: 1.0, INVENTED: 0.001}, "verify.account-bound-unsigned"),
        ([], {WHOLE_CLASS: 1.0}, None),
        (
            [],
            {WHOLE_CLASS: 1.0, INVENTED: 0.001},
            None,
        ),  # a corpus without signatures: its bounds are the trainer's word
        ([], {INVENTED: 0.001}, "verify.trained-class-not-charged"),
    ],
)
def test_the_accounts_of_an_epoch(
    story: Story, signed: list[ContributionTerms], scales: dict[ContributionTerms, float], code: str | None
) -> None:
    """A class as a whole, or every bound that its members signed; and no bound that nobody signed."""
    story.admit(contribution(n, terms=terms) for n, terms in enumerate(signed))
    closed(story, scales=scales)
    assert code_of(story) == code


@pytest.mark.parametrize("key", [2, 3])
def test_half_a_bound_is_no_account(story: Story, key: int) -> None:
    """It would count as the whole class, beside which the bounds of its members need not be added, at any scale."""
    story.admit(contribution(n, terms=terms) for n, terms in enumerate([USUAL, STRICT]))
    seq, path = closed(story, scales={WHOLE_CLASS: 1.0, USUAL: 1.0, STRICT: 0.5}), story.ledger.name
    assert code_of(story) is None
    story.ledger.close()
    data = leaf(path, seq)
    body, kept = cbor2.loads(data.body or b""), cbor2.loads(data.leaf)
    whole = next(each for each in body[5] if not each.get(3))
    whole[key] = 1_000_000
    made = cbor2.dumps(body, canonical=True)
    place = next(name for name, value in kept.items() if value == hashlib.sha256(data.body or b"").digest())
    forged = StoredLeaf(cbor2.dumps(kept | {place: hashlib.sha256(made).digest()}, canonical=True), made)
    with raises_code("ledger.record-malformed"):
        decode_leaf(forged)
    rewritten(path, lambda found: [forged if at == seq else one for at, one in enumerate(found)])
    problem = verify(path).problem
    assert problem is not None and "clip_norm is" in problem.reason, problem


@pytest.mark.parametrize(("steps", "trusted"), [(1000, True), (25_000, False)])
def test_what_members_lose_is_not_split_between_their_bound_and_their_class(
    story: Story, steps: int, trusted: bool
) -> None:
    """Each account stays below what was signed; the members were in both runs, for all that anybody knows."""
    story.admit(contribution(n) for n in range(3))
    read = story.ledger.size
    story.later(HOUR)
    for run, charged in zip(RUNS[:2], (USUAL, WHOLE_CLASS), strict=True):
        story.epoch(run, [segment(0, read=read, length=steps)], of=plan(steps), scales={charged: 1.0})
    story.sign()
    found = verify(story.ledger.store, trust=Trust(plain=(GOVERNING.public,)))
    assert (found.verified, found.trusted) == (True, trusted), found
    assert any(note.startswith("bound clinical@") for note in found.notes) is not trusted


@pytest.mark.parametrize("revoked", [False, True])
def test_a_bound_that_was_pruned_is_not_forgiven_because_a_key_was_revoked(tmp_path: Path, revoked: bool) -> None:
    """Whose key is gone with the body may have been another's: the epoch is not refused, and the ledger not trusted."""
    story = begin(str(tmp_path / "b.db"), retention=HOUR)
    now = int(story.clock.now)
    story.admit([contribution(n, expires=now + 3 * HOUR) for n in range(3)])
    story.admit([contribution(9, BOB, STRICT)])
    if revoked:
        story.govern(KeyEvent(change=KeyChange.REVOKE, target=CAROL.public.id, effective=now))
    closed(story, scales={STRICT: 0.5})
    story.later(9 * HOUR)
    story.sign()
    keeper = Retention(story.ledger)
    proposal = keeper.propose()
    assert proposal is not None and proposal.count == 3
    assert verify(story.ledger.store).problem is not None
    keeper.prune(signed_by(proposal, AUDITOR))
    found = verify(story.ledger.store, trust=Trust(plain=(GOVERNING.public,)))
    assert not found.trusted and found.verified is revoked
    assert any("unless keys of pruned" in note for note in found.notes) is revoked
    story.ledger.close()


def test_a_bound_that_was_signed_after_the_members_were_read(story: Story) -> None:
    story.admit([contribution(1)])
    read = story.ledger.size
    story.admit([contribution(2, terms=STRICT)])
    story.later(HOUR)
    story.epoch(RUNS[0], [segment(0, read=read)])
    assert code_of(story) == "verify.account-bound-unsigned"


@pytest.mark.parametrize(
    ("leaves", "scales", "code"),
    [
        ("withdrawn", {USUAL: 1.0}, None),
        ("withdrawn", {USUAL: 1.0, STRICT: 0.5}, None),  # a run goes on charging whom it began with
        ("withdrawn later", {USUAL: 1.0}, "verify.trained-class-not-charged"),
        ("expired", {USUAL: 1.0}, None),
        ("stays", {USUAL: 1.0}, "verify.trained-class-not-charged"),
    ],
)
def test_a_bound_whose_members_left(
    story: Story, leaves: str, scales: dict[ContributionTerms, float], code: str | None
) -> None:
    now = int(story.clock.now)
    ends = now + HOUR // 2 if leaves == "expired" else None
    _, seq, _ = story.admit(
        [contribution(1), contribution(2, terms=STRICT, expires=ends), contribution(3, terms=STRICT, expires=now + 1)]
    )
    read, gone = story.ledger.size, Withdrawal(target=seq, reason=WithdrawalReason.REQUEST)
    if leaves.startswith("withdrawn"):
        story.ledger.append([gone])
    story.later(2 * HOUR)
    read = read if leaves == "withdrawn later" else story.ledger.size
    story.epoch(RUNS[0], [segment(0, read=read)], scales=scales)
    assert code_of(story) == code


# ------------------------------------------------------------------------------ attempts


def attempt(index: int, generation: int = 0, *, given_up: bool = False, **changes: Any) -> Segment:
    outcome = SegmentOutcome.ABANDONED if given_up else SegmentOutcome.CLOSED
    return dataclasses.replace(segment(index, generation, read=5, outcome=outcome), **changes)


@pytest.mark.parametrize(
    ("attempts", "code"),
    [
        ([attempt(0, given_up=True), attempt(0, 1)], None),
        ([attempt(0, 1), attempt(0, given_up=True)], None),  # a copy of the run was quicker
        ([attempt(0, 1)], "verify.generation-missing"),
        ([attempt(0, given_up=True), attempt(0, 2)], "verify.generation-missing"),
        ([attempt(0, 2**50)], "verify.generation-missing"),
        ([attempt(0, 2, unrecorded=1)], "verify.generation-missing"),
        ([attempt(0, 2, unrecorded=2)], None),
        ([attempt(0, 1, unrecorded=1), attempt(0, 2, given_up=True)], "verify.generation-missing"),
        ([attempt(0, 1, unrecorded=1), attempt(0, 2, given_up=True, unrecorded=1)], None),
    ],
)
def test_generations_that_are_missing(story: Story, attempts: list[Segment], code: str | None) -> None:
    """An attempt drew noise and was charged, also if it was given up: its leaf does not go missing."""
    story.admit([contribution(1)])
    for each in attempts:
        story.epoch(RUNS[0], [each], scales={USUAL: 1.0})
    assert code_of(story) == code
    left_out = any("left out by later generations" in note for note in verify(story.ledger.store).notes)
    assert left_out is (code is None and any(each.unrecorded for each in attempts))


def test_a_generation_that_is_still_open(story: Story) -> None:
    story.admit([contribution(1)])
    story.epoch(RUNS[0], [attempt(0, 1)], scales={USUAL: 1.0})
    assert code_of(story) == "verify.generation-missing"
    put_open_charge(story.ledger, RUNS[0])
    assert code_of(story) == "verify.open-rows-differ"
    story.ledger.accept()
    assert code_of(story) is None
    assert (
        code_of(story, trust=Trust(plain=(GOVERNING.public,))) == "verify.generation-missing"
    )  # the store is no evidence


def test_a_plan_at_another_delta_than_the_ledger_is_told(tmp_path: Path) -> None:
    """Also of a class that comes from a plan and has no policy."""
    bare = tuple(dataclasses.replace(each, clip_norm=0, noise_multiplier=0) for each in PRESETS)
    story = begin(str(tmp_path / "b.db"), presets=bare)
    classes = (dataclasses.replace(plan().classes[0], delta=1e-4), plan().classes[1])
    closed(story, of=plan(classes=classes), scales={WHOLE_CLASS: 1.0})
    story.sign()
    found = verify(story.ledger.store)
    assert found.verified and any("δ = 0.0001" in note for note in found.notes)
    story.ledger.close()


# ------------------------------------------------------------------------------ noise that a rule moves


def choosing(**changes: Any) -> StepPlan:
    candidates = ((0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 4.0))
    rule = Choose(epsilon=0.1, every=5, names=("even", "steep"), noise=candidates)
    return plan(**{"rules": (rule,), "clipping": Clipping.JOINT, **changes})


@pytest.mark.parametrize(
    ("of", "noise", "code"),
    [
        (plan(rules=(FollowEnergy(),)), (0.0, 0.0, 5.0, 5.0), None),
        (plan(rules=(FollowEnergy(),)), (0.0, 0.0, 3.3, 12.0), None),
        (plan(rules=(FollowEnergy(),)), (0.0, 0.0, 3.0, 3.9), "verify.noise-below-plan"),
        (plan(rules=(FollowEnergy(),)), (0.0, 0.0, 0.0, 9.0), "verify.noise-variance-differs"),
        (plan(rules=(FollowEnergy(),)), (0.0, 0.0, 9.0), "verify.noise-variance-differs"),
        (plan(), (0.0, 0.0, 5.0, 5.0), "verify.noise-variance-differs"),
        (choosing(), (0.0, 0.0, 3.3, 13.2), None),
        (choosing(), (0.0, 0.0, 3.0, 3.9), "verify.noise-below-plan"),
        (choosing(clipping=Clipping.BOX), (0.0, 0.0, 3.0, 3.9), None),  # under a box, the clip norms go with the choice
    ],
)
def test_noise_that_changes_within_a_segment(
    story: Story, of: StepPlan, noise: tuple[float, ...], code: str | None
) -> None:
    """At the first step it is the plan's; what a rule made of it later is held to the plan as well."""
    story.admit([contribution(1)])
    change = NoiseChange(step=5, variance=tuple(s * s for s in noise))
    story.epoch(
        RUNS[0],
        [attempt(0)],
        of=of,
        scales={USUAL: 1.0},
        change=lambda made: dataclasses.replace(made, changes=(change,)),
    )
    assert code_of(story) == code


@pytest.mark.parametrize("steps", [(0,), (10,), (5, 5), (7, 3)])
def test_changes_outside_their_segment_are_no_record(story: Story, steps: tuple[int, ...]) -> None:
    made = tuple(NoiseChange(step=step, variance=(0.0, 0.0, 16.0, 16.0)) for step in steps)
    with raises_code("ledger.epoch-changes-misplaced"):
        story.epoch(RUNS[0], [attempt(0)], change=lambda epoch: dataclasses.replace(epoch, changes=made))
    several = [attempt(0, given_up=True), attempt(0, 1)]
    with raises_code("ledger.epoch-changes-misplaced"):
        change = NoiseChange(step=5, variance=(0.0, 0.0, 16.0, 16.0))
        story.epoch(RUNS[0], several, change=lambda epoch: dataclasses.replace(epoch, changes=(change,)))


# ------------------------------------------------------------------------------ how a plan samples


def sampled(population: int | None = 1000, rate: float = 0.02, batch: float = 20.0, **changes: Any) -> StepPlan:
    """A plan in which both classes declare a population; the open one brings 10 to a batch."""
    patients = dataclasses.replace(plan().classes[0], population=population, sampling_rate=rate, **changes)
    others = PlannedClass(name="open", population=100, sampling_rate=0.1, public=True)
    return plan(classes=(patients, others), batch=batch)


@pytest.mark.parametrize(
    ("of", "code"),
    [
        (sampled(batch=30.0), None),
        (sampled(batch=30.0 * (1 + 1e-12)), None),
        (sampled(batch=20.0), "verify.batch-size-differs"),
        (sampled(batch=31.0), "verify.batch-size-differs"),
        (plan(batch=500.0), None),  # one class declares no population: what it brings is not known
        (plan(batch=19.0), "verify.batch-size-differs"),
        (sampled(population=None, batch=30.0), "verify.population-missing"),
        (sampled(batch=30.0, delta=1e-6), None),
        (sampled(batch=30.0, delta=1.1e-5), "verify.plan-delta-above-header"),
    ],
)
def test_rates_populations_batch_size_and_delta_of_a_plan(story: Story, of: StepPlan, code: str | None) -> None:
    story.admit([contribution(1)])
    closed(story, of, {USUAL: 1.0})
    assert code_of(story) == code


@pytest.mark.parametrize(
    ("count", "event", "code"),
    [
        (3, None, None),
        (4, None, "verify.population-exceeded"),
        (40, None, "verify.population-exceeded"),
        (4, "withdrawn", None),
        (4, "expired", None),
        (4, "withdrawn later", "verify.population-exceeded"),
        (4, "policy", None),  # it was larger, and what was admitted then stays
    ],
)
def test_more_members_than_a_class_declares(tmp_path: Path, count: int, event: str | None, code: str | None) -> None:
    few = (dataclasses.replace(PRESETS[0], population=3), PRESETS[1])
    story = begin(str(tmp_path / "a.db"), presets=PRESETS if event == "policy" else few)
    ends = {0: int(story.clock.now) + 60} if event == "expired" else {}
    first, *_ = story.admit(contribution(n, expires=ends.get(n)) for n in range(count))
    read, gone = story.ledger.size, Withdrawal(target=first, reason=WithdrawalReason.REQUEST)
    if event == "policy":
        story.govern(PolicyChange(floors=FLOORS, presets=few, policy=policy_digest()))
    elif event in ("withdrawn", "withdrawn later"):
        story.ledger.append([gone])
    story.later(2 * HOUR)
    read = read if event == "withdrawn later" else story.ledger.size
    of = sampled(population=3, rate=0.5, batch=11.5)
    of = dataclasses.replace(of, noise=(0.0, 0.0, 40.0, 40.0))
    story.epoch(RUNS[0], [segment(0, read=read)], of=of, scales={USUAL: 1.0})
    assert code_of(story) == code
    story.ledger.close()


# ------------------------------------------------------------------------------ what a plan says of its layers


def third(row: dict[str, Any]) -> dict[str, Any]:
    return row["layers"][2]


def swap_layers(row: dict[str, Any]) -> None:
    row["layers"][2], row["layers"][3] = row["layers"][3], row["layers"][2]


@pytest.mark.parametrize(
    "forge",
    [
        lambda row: third(row).update(spans=[[3, 4], [2, 3]]),
        lambda row: third(row).update(spans=[[2, 2]]),
        lambda row: third(row).update(spans=[[2, 5]]),
        lambda row: third(row).update(spans=[[-1, 3]]),
        lambda row: third(row).update(spans=[]),
        lambda row: third(row).update(spans=[[1, 2], [2, 3]]),
        lambda row: third(row).update(depth=1.0),
        lambda row: row.update(blocks=3),
        lambda row: row.update(blocks=0),
        lambda row: row["layers"].pop(),
        lambda row: row["noise"].pop(),
        swap_layers,
    ],
)  # fmt: skip
def test_a_plan_whose_layers_do_not_fit_its_blocks(story: Story, forge: Callable[[dict[str, Any]], None]) -> None:
    """Bytes that no `StepPlan` writes, under their own digest."""
    story.admit([contribution(1)])
    row = cbor.decode(plan().to_cbor(), floats=True, null=True)
    forge(row)
    data = cbor.encode(row, floats=True, null=True)
    story.later(HOUR)
    made: list[Epoch] = []

    def kept(epoch: Epoch) -> Epoch:
        made.append(dataclasses.replace(epoch, plan=hashlib.sha256(data).digest()))
        return epoch

    seq = story.epoch(RUNS[0], [segment(0, read=story.ledger.size)], scales={USUAL: 1.0}, change=kept)
    assert code_of(story) is None
    path = story.ledger.name
    with story.ledger.store.write() as rows:
        rows.put_blob(made[0].plan, data)
    story.ledger.close()
    rewritten(path, replacing(seq, plan=made[0].plan))
    found = verify(path).problem
    assert found is not None and (found.index, found.code) == (seq, "verify.plan-unreadable")


# ------------------------------------------------------------------------------ policy, algorithm, version


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"floors": LedgerFloors()}, "ledger.policy-digest-differs"),
        ({"floors": LedgerFloors(clip_norm=100_000)}, "ledger.policy-digest-differs"),
        ({"policy": digest("another")}, "ledger.policy-digest-differs"),
        ({"policy": policy_digest(origin="other.example")}, "ledger.policy-digest-differs"),
        ({"policy": NO_POLICY}, "ledger.policy-digest-differs"),  # and floors that nobody signed
        ({"policy": NO_POLICY, "floors": LedgerFloors()}, None),
        ({"policy": policy_digest(LedgerFloors()), "floors": LedgerFloors()}, None),
    ],
)
@pytest.mark.parametrize("kind", ["header", "policy"])
def test_floors_that_are_not_those_that_contributors_sign(
    tmp_path: Path, kind: str, changes: dict[str, Any], code: str | None
) -> None:
    low = LedgerFloors() if kind == "policy" else FLOORS
    given: dict[str, Any] = {"policy": policy_digest(), **changes} if kind == "header" else {"floors": low}
    story = begin(str(tmp_path / "a.db"), **given)
    if kind == "policy":
        change = PolicyChange(presets=PRESETS, **{"floors": FLOORS, "policy": policy_digest(), **changes})
        if code is None:
            story.govern(change)
        else:
            with raises_code(code):
                story.govern(change)
            rewritten(story.ledger.name, appended(asked(change)))
            problem = verify(story.ledger.name).problem
            assert problem is not None and problem.code == code
            story.ledger.close()
            return
    assert code_of(story) == code
    story.ledger.close()


@pytest.mark.parametrize(
    ("number", "code"),
    [(-7, "verify.leaf-unreadable"), (-9, "verify.leaf-unreadable"), (-18, "verify.leaf-unreadable"),
     (-20, "verify.leaf-unreadable"), (-19, "ledger.header-not-signed")],
)  # fmt: skip
def test_an_algorithm_that_is_none_of_ours(story: Story, number: int, code: str) -> None:
    """-8 and -19 are Ed25519; a number between them is nothing."""
    story.sign()
    kept, body = leaf(story.ledger.name, 0)
    plain, other = (b"\x0b" + cbor.encode(each) for each in (-8, number))
    assert body is not None and body.count(plain) == 1
    forged = body.replace(plain, other)
    kept = kept.replace(*(hashlib.sha256(each).digest() for each in (body, forged)))
    sql(story.ledger.name, "UPDATE leaf SET (data, body) = (?, ?) WHERE seq = 0", kept, forged)
    found = verify(story.ledger.name).problem
    assert found is not None and (found.index, found.code) == (0, code)


def test_an_attestation_by_an_algorithm_that_its_key_is_not_for(story: Story) -> None:
    story.admit([contribution(1)])
    for algorithms, code in (((-8,), None), ((-8, -19), None), ((-19,), "verify.attestation-algorithm")):
        ring = KeyRing()
        ring.add(ALICE.public, role="contributor", label="alice", algorithms=algorithms)
        assert code_of(story, trust=Trust(plain=(LEDGER.public,), ring=ring)) == code


def test_another_program_is_noted(tmp_path: Path) -> None:
    for version, noted in ((program_version(), False), ("lamina 9.9; dp-accounting 7", True)):
        story = begin(str(tmp_path / f"{noted}.db"), version=version)
        story.sign()
        found = verify(story.ledger.store)
        assert found.verified and any(version in note for note in found.notes) is noted
        story.ledger.close()


# ------------------------------------------------------------------------------------------- exhausted bounds


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Story]:
    """Who signed for little, in a class that is promised less."""
    presets = (dataclasses.replace(PRESETS[0], noise_multiplier=500_000), PRESETS[1])
    made = begin(str(tmp_path / "b.db"), presets=presets)
    made.admit([contribution(2, BOB, STRICT)])
    yield made
    made.ledger.close()


def exhausting(story: Story, factors: dict[ContributionTerms, float], *, noise: float = 0.6) -> None:
    """Two epochs of a run; the second one says that bounds were exhausted, and charges what the factors take."""
    of = plan(100, noise=(0.0, 0.0, noise, noise))
    for index, given in enumerate(({}, factors)):
        story.later(HOUR)
        parts = [segment(index, read=story.ledger.size, length=20)]
        story.epoch(RUNS[0], parts, of, {WHOLE_CLASS: 1.0, STRICT: 0.5}, factors=given)


@pytest.mark.parametrize(
    ("factors", "noise", "code"),
    [
        ({STRICT: 0.0}, 0.6, None),
        ({STRICT: 0.5}, 0.6, None),
        ({STRICT: 0.25}, 0.6, "verify.not-exhausted"),  # half would fit
        ({STRICT: 0.0}, 4.0, "verify.not-exhausted"),
        ({STRICT: 0.5}, 4.0, "verify.not-exhausted"),
        ({STRICT: 0.3}, 0.6, "verify.factor-not-listed"),
        ({WHOLE_CLASS: 0.5}, 0.6, "verify.class-account-scaled"),
        ({}, 0.6, "verify.bound-exceeded"),
    ],
)
def test_a_bound_is_scaled_or_left_out_only_if_earlier_charges_have_used_it_up(
    patient: Story, factors: dict[ContributionTerms, float], noise: float, code: str | None
) -> None:
    exhausting(patient, factors, noise=noise)
    assert code_of(patient) == code


def test_a_factor_that_is_not_charged_as_such(patient: Story) -> None:
    """Who was scaled by a half is charged for a half, neither less nor more; and who was left out, nothing."""
    exhausting(patient, {STRICT: 0.5})
    last = patient.ledger.size - 1
    record = patient.ledger.leaf(last).record
    assert isinstance(record, Epoch)
    accounts = tuple(
        dataclasses.replace(a, exhausted=0.0) if a.noise_multiplier == 4_000_000 else a for a in record.accounts
    )
    rewritten(patient.ledger.name, replacing(last, accounts=accounts))
    found = verify(patient.ledger.name)
    assert found.problem is not None and found.problem.code == "verify.charge-differs-from-plan"


def test_a_bound_that_was_used_up_later_is_not_trusted(patient: Story) -> None:
    """By its order, the ledger does not show that it was exhausted when it was left out: only that it was in the end."""
    of = plan(100, noise=(0.0, 0.0, 0.6, 0.6))
    for index, factor in enumerate((0.0, 1.0)):
        patient.later(HOUR)
        parts = [segment(index, read=patient.ledger.size, length=20)]
        patient.epoch(RUNS[0], parts, of, {WHOLE_CLASS: 1.0, STRICT: 0.5}, factors={STRICT: factor})
    patient.sign()
    found = verify(patient.ledger.store, trust=Trust(plain=(GOVERNING.public, LEDGER.public)))
    assert found.verified and not found.trusted
    assert any("no leaf shows to have been open" in note for note in found.notes)


@pytest.mark.parametrize(("runs", "code"), [(1, None), (2, "verify.release-contradicts-epochs")])
@pytest.mark.parametrize("figure", [{"epsilon": 1.0}, {"membership": {"0.01": 0.5}}], ids=["ε", "membership"])
def test_a_release_of_a_run_that_trained_a_class_as_public_states_no_figure_of_it(
    tmp_path: Path, runs: int, code: str | None, figure: dict[str, Any]
) -> None:
    """Two owners made the class public after its first run. The charges of that run alone would allow the figure."""
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1)])
    bare = (dataclasses.replace(PRESETS[0], clip_norm=0, noise_multiplier=0, public=True, profile="all"), PRESETS[1])
    everyone = tuple(
        PlannedClass(name=each, population=None, sampling_rate=0.1, public=True, profile="all layers")
        for each in ("clinical", "open")
    )
    closed(story, scales={WHOLE_CLASS: 1.0, USUAL: 1.0})
    story.govern(PolicyChange(floors=FLOORS, presets=bare, policy=policy_digest()), GOVERNING, SECOND)
    story.later(HOUR)
    story.epoch(
        RUNS[1], [segment(0, read=story.ledger.size)], scales={USUAL: 1.0},
        of=plan(classes=everyone, clip=((float("inf"),) * 4,) * 2, noise=(0.0,) * 4),
        change=lambda made: dataclasses.replace(made, accounts=()),
    )  # fmt: skip
    assert code_of(story) is None
    named = RUNS[:runs]
    predicate = {
        "runs": [run.hex() for run in named],
        "posture": {"classes": {"clinical": {"public": False, **figure}}},
    }
    statement = json.dumps({"predicate": predicate, "subject": []}).encode()
    manifest = json.dumps({"payload": base64.b64encode(statement).decode()}).encode()
    story.ledger.append([Release(manifest=hashlib.sha256(manifest).digest(), runs=named)], [manifest])
    assert code_of(story) == code
    story.ledger.close()
