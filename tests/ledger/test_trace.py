"""Trace: what a ledger tells of one contribution is what happened to it, counted by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from build import (
    CAROL,
    FLOORS,
    HOUR,
    OPEN,
    PRESETS,
    RUNS,
    STRICT,
    USUAL,
    Story,
    begin,
    build,
    contribution,
    plan,
    policy_digest,
    segment,
    spent,
)
from forge import sql
from making import LEDGER, Clock, digest
from refusals import raises_code

from lamina.admit.contribution_sources import Contribution
from lamina.cli.ledger.record_commands import trace_page
from lamina.errors import LedgerError
from lamina.ledger.contribution_trace import (
    ContributionTrace,
    account_of,
    contribution_spend,
    leaf_differences,
    trace_contribution,
)
from lamina.ledger.governance_records import PolicyChange, Release, Withdrawal, WithdrawalReason
from lamina.ledger.neighbours import NeighbourLedger
from lamina.ledger.reader import find_contributions
from lamina.ledger.records import ContributionRecord, ContributionTerms, EpochAccount, KeptContribution, SegmentOutcome
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import PlannedClass


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    made = build(str(tmp_path / "a.db"), prune=False)
    yield made
    made.ledger.close()


def of(story: Story, seq: int) -> ContributionTrace:
    return trace_contribution(story.ledger, story.ledger.leaf(seq))


def test_a_contribution_from_the_beginning(story: Story) -> None:
    """Segment 0; segment 1 twice and 2; and the second run: 10, 30 and 10 steps."""
    found = of(story, story.at["first"] + 1)
    assert found.record.terms == USUAL
    assert [each.leaf.seq for each in found.epochs] == [story.at[name] for name in ("epoch", "redone", "run two")]
    assert [each.steps for each in found.epochs] == [10, 30, 10]
    assert [each.multiplier for each in found.epochs] == [4.0, 4.0, 5.0]
    assert [each.spend for each in found.epochs] == [
        spent((4.0, 10)), spent((4.0, 40)), spent((4.0, 40), (5.0, 10)),
    ]  # fmt: skip
    assert [each.account for each in found.epochs] == [each.spend for each in found.epochs]
    assert found.epochs[0].variance == {"layer.2": 16.0, "layer.3": 16.0}  # where its class reaches
    assert found.epochs[2].variance == {"layer.2": 25.0, "layer.3": 25.0}
    assert found.spend == found.epochs[-1].spend
    summed = contribution_spend(story.ledger, found.leaf)
    assert (summed.spend, summed.signed, summed.epochs) == (found.spend, found.signed, 3)
    assert summed.releases == found.releases
    assert found.withdrawal is None
    assert [each.seq for each in found.releases] == [story.at["release"]]


def test_a_stricter_bound_loses_less(story: Story) -> None:
    found = of(story, story.at["strict"])
    assert found.record.terms == STRICT
    assert [each.multiplier for each in found.epochs] == [8.0, 8.0, 10.0]
    assert found.spend == spent((8.0, 40), (10.0, 10))
    assert found.signed is not None
    assert found.spend < found.signed


def test_who_withdrew_loses_nothing_more(story: Story) -> None:
    """Withdrawn between the epochs: of the second it was in the attempt that was frozen before, and given up."""
    found = of(story, story.at["first"] + 5)
    assert [(each.leaf.seq, each.steps) for each in found.epochs] == [(story.at["epoch"], 10), (story.at["redone"], 10)]
    assert [one.outcome for one in found.epochs[1].segments] == [SegmentOutcome.ABANDONED]
    assert found.spend == spent((4.0, 20))
    assert found.epochs[1].account == spent((4.0, 40))  # what the account lost is more
    assert found.withdrawal is not None
    assert found.withdrawal.seq == story.at["withdrawal"]
    assert [each.seq for each in found.releases] == [story.at["release"]]  # it was in segment 0


def test_who_came_late_lost_less_than_the_account(story: Story) -> None:
    found = of(story, story.at["second"])
    assert [each.steps for each in found.epochs] == [10]
    assert found.spend == spent((5.0, 10))
    assert found.epochs[0].account == spent((4.0, 40), (5.0, 10))
    assert of(story, story.at["late"]).epochs == ()
    assert of(story, story.at["late"]).releases == ()


def test_whose_key_was_revoked_is_out(story: Story) -> None:
    seq = story.at["first"] + 2  # by carol, whose key was revoked before the second run
    assert story.ledger.leaf(seq).record.key == CAROL.public.id  # type: ignore[union-attr]
    assert [each.leaf.seq for each in of(story, seq).epochs] == [story.at["epoch"], story.at["redone"]]


def test_who_expired_is_out(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    seq, _ = story.admit([contribution(1, expires=int(story.clock.now) + HOUR), contribution(2)])
    story.epoch(RUNS[0], [segment(0, read=6)], scales={USUAL: 1.0})
    story.later(2 * HOUR)
    story.admit([contribution(3, at=int(story.clock.now))])
    story.epoch(RUNS[0], [segment(1, read=8)], scales={USUAL: 1.0})
    assert [each.steps for each in of(story, seq).epochs] == [10]
    assert [each.steps for each in of(story, seq + 1).epochs] == [10, 10]


def test_a_public_contribution_loses_nothing(story: Story) -> None:
    found = of(story, 34)
    assert found.record.terms == OPEN
    assert (found.spend, found.signed) == (0, None)
    assert len(found.epochs) == 3
    assert found.epochs[0].variance == {f"layer.{i}": s for i, s in enumerate((0.0, 0.0, 16.0, 16.0))}
    assert found.to_dict()["epochs"][0]["multiplier"] is None


def test_who_stayed_out_of_a_run(tmp_path: Path) -> None:
    """Eligible, and nobody with its bound was charged."""
    story = begin(str(tmp_path / "a.db"))
    seq, _ = story.admit([contribution(1, terms=STRICT), contribution(2)])
    story.epoch(RUNS[0], [segment(0, read=6)], scales={USUAL: 1.0})
    found = of(story, seq)
    assert (found.epochs, found.unused, found.spend) == ((), 1, 0)


WHOLE_CLASS = ContributionTerms("clinical", "ecg", 0, 0)


def test_bounds_without_their_class_are_no_figure_of_a_neighbour(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1)])
    for at, scales in enumerate(({USUAL: 1.0}, {WHOLE_CLASS: 1.0})):
        story.epoch(RUNS[0], [segment(at, read=story.ledger.size)], scales=scales)
        assert NeighbourLedger.read(story.ledger).epsilon == {"clinical": None}


@pytest.mark.parametrize("known", [True, False])
def test_what_was_signed_as_private_has_no_bound_after_its_class_was_trained_as_public(
    tmp_path: Path, known: bool
) -> None:
    """It is in no account of such an epoch, and nobody who reads the ledger can tell that it stayed out."""
    story = begin(str(tmp_path / "a.db"))
    (seq,) = story.admit([contribution(1)])
    classes = tuple(
        PlannedClass(name=each, population=None, sampling_rate=0.1, public=True) for each in ("clinical", "open")
    )
    bare = plan(classes=classes, clip=((math.inf,) * 4,) * 2, noise=(0.0,) * 4)
    story.epoch(RUNS[0], [segment(0, read=story.ledger.size)], scales={USUAL: 1.0, WHOLE_CLASS: 1.0})
    assert of(story, seq).spend == spent((4.0, 10))
    assert NeighbourLedger.read(story.ledger).epsilon == {"clinical": spent((4.0, 10)) / 1e9}
    after = story.epoch(
        RUNS[1], [segment(0, read=story.ledger.size)], of=bare, change=lambda made: replace(made, accounts=())
    )
    if not known:
        sql(story.ledger.name, "DELETE FROM blob WHERE digest = ?", bare.digest())
    (manifest,) = story.ledger.append([Release(manifest=digest("manifest"), runs=(RUNS[1],))])
    found = of(story, seq)
    assert (found.spend, found.unused, found.remaining) == (2**64 - 1, 0, 0) and found.to_dict()["epsilon"] is None
    assert [each.leaf.seq for each in found.epochs][-1] == after and [each.seq for each in found.releases] == [manifest]
    assert contribution_spend(story.ledger, found.leaf).spend == 2**64 - 1
    (lost,) = (line for line in trace_page(found).splitlines() if line.strip().startswith("lost"))
    assert "∞" in lost
    if known:
        assert NeighbourLedger.read(story.ledger).epsilon == {"clinical": None}


def test_releases_of_runs_that_it_was_given_up_in(tmp_path: Path) -> None:
    """An attempt that was given up is charged, and is in no model."""
    story = begin(str(tmp_path / "a.db"))
    (seq,) = story.admit([contribution(1)])
    story.epoch(RUNS[0], [segment(0, read=5, outcome=SegmentOutcome.ABANDONED)], scales={USUAL: 1.0})
    story.ledger.append([Withdrawal(target=seq, reason=WithdrawalReason.REQUEST)])
    story.epoch(RUNS[0], [segment(0, 1, read=7)], scales={USUAL: 1.0})
    story.ledger.append([Release(manifest=digest("m"), runs=(RUNS[0],))])
    found = of(story, seq)
    assert [each.steps for each in found.epochs] == [10]
    assert found.releases == ()


def test_a_plan_that_is_gone(story: Story, tmp_path: Path) -> None:
    story.ledger.close()
    sql(str(tmp_path / "a.db"), "DELETE FROM blob")
    with Ledger.open(str(tmp_path / "a.db"), LEDGER, clock=Clock()) as ledger:
        found = trace_contribution(ledger, ledger.leaf(story.at["first"] + 1))
    assert found.spend == spent((4.0, 40), (5.0, 10))
    assert found.epochs[0].variance == {"layer 0": 0.0, "layer 1": 0.0, "layer 2": 16.0, "layer 3": 16.0}


@pytest.mark.parametrize("signed", [None, "top=0.5", "top=0.75"])
def test_the_depth_of_its_class_when_it_was_admitted_and_later(tmp_path: Path, signed: str | None) -> None:
    story = begin(str(tmp_path / "a.db"))
    (seq,) = story.admit([contribution(1, terms=replace(USUAL, profile=signed))])
    for profile in ("top=0.25", "top=0.25", "top=0.1"):
        presets = (replace(PRESETS[0], profile=profile), PRESETS[1])
        story.govern(PolicyChange(floors=FLOORS, presets=presets, policy=policy_digest()))
    (late,) = story.admit([contribution(2)])
    found = of(story, seq)
    assert found.depths == ((seq, "top=0.5"), (seq + 1, "top=0.25"), (seq + 3, "top=0.1"))
    assert found.to_dict()["depth"][1] == {"index": seq + 1, "profile": "top=0.25"}
    lines = [line.strip() for line in trace_page(found).splitlines()]
    at = lines.index("depth      top=0.5" + (", signed top=0.75" if signed == "top=0.75" else ""))
    assert lines[at + 1 : at + 3] == [f"top=0.25 from leaf {seq + 1} on", f"top=0.1 from leaf {seq + 3} on"]
    assert of(story, late).depths == ((late, "top=0.1"),)


def test_the_account_of_a_bound() -> None:
    def account(clip: int, noise: int) -> EpochAccount:
        return EpochAccount(cls="clinical", clip_norm=clip, noise_multiplier=noise, charges=(), spend=0)

    whole, own, grid, far = account(0, 0), account(500, 4000), account(400, 4100), account(100, 9000)
    bound = ("clinical", 500, 4000)
    assert account_of([whole, grid, own], bound) == own
    assert account_of([whole, far, grid], bound) == whole  # never told too small
    assert account_of([far, grid], bound) == grid
    assert account_of([whole, account(600, 4000), account(500, 3999)], bound) == whole
    assert account_of([account(600, 4000)], bound) is None
    assert account_of([own], ("open", 0, 0)) is None


# ------------------------------------------------------------------------------ finding it


def test_by_descriptor_anchor_subject_or_leaf(story: Story) -> None:
    ledger = story.ledger
    record = ledger.leaf(34).record
    assert isinstance(record, ContributionRecord)
    assert record.anchor is not None
    assert record.subject is not None
    for name in (record.descriptor.hex(), record.subject.hex().upper(), "34"):
        assert [leaf.seq for leaf in find_contributions(ledger, name)] == [34]
    assert [leaf.seq for leaf in find_contributions(ledger, record.anchor.hex())] == [34, 40]  # two with one anchor
    for name in ("", "0", "41", "xyz", "ab" * 31, "99999999999999999999999", digest("nobody").hex(), "-1", "١"):
        with pytest.raises(LedgerError):
            find_contributions(ledger, name)


def test_what_was_pruned_is_found_and_traced_by_its_leaf(tmp_path: Path) -> None:
    story = build(str(tmp_path / "a.db"))
    whole = build(str(tmp_path / "b.db"), prune=False)
    before = of(whole, 34).to_dict()
    (leaf,) = find_contributions(story.ledger, "34")
    assert isinstance(leaf.record, KeptContribution)
    (same,) = find_contributions(story.ledger, leaf.record.descriptor.hex())
    assert same == leaf
    with raises_code("ledger.contribution-unknown"):
        find_contributions(story.ledger, before["anchor"])  # it went with the body
    found = of(story, 34).to_dict()
    gone = {"attestation", "key", "not_before", "anchor", "data_class", "profile"}
    assert {name for name in found if found[name] != before[name]} == {*gone, "pruned"} - {"profile"}  # it had none
    assert found["pruned"]
    assert all(found[name] is None for name in gone)


def test_a_leaf_against_what_the_contributor_has() -> None:
    """All that a record says, or all that is left of it when its body is pruned."""
    made = contribution(1, terms=STRICT, anchor=digest("anchor"), subject="ann")
    mine = Contribution("mine", made.descriptor.encode(), made.attestation)
    whole = made.record
    kept = KeptContribution(
        descriptor=whole.descriptor, expires=whole.expires, cls=STRICT.cls, clip_norm=STRICT.clip_norm,
        noise_multiplier=STRICT.noise_multiplier, subject=whole.subject,
    )  # fmt: skip
    assert leaf_differences(whole, mine) == leaf_differences(kept, mine) == []
    for name in ("descriptor", "attestation", "key", "anchor", "subject"):
        assert leaf_differences(replace(whole, **{name: digest("other")}), mine) == [name]
    for name, value in (("not_before", whole.not_before + 1), ("expires", whole.expires + 1)):
        assert leaf_differences(replace(whole, **{name: value}), mine) == [name]
    for name, value in (("clip_norm", 7), ("noise_multiplier", 7), ("data_class", "eeg"), ("profile", None)):
        assert leaf_differences(replace(whole, terms=replace(STRICT, **{name: value})), mine) == [name]
    assert leaf_differences(replace(whole, terms=replace(STRICT, cls="open")), mine) == ["admissibility"]
    assert leaf_differences(replace(kept, cls="open", clip_norm=0, noise_multiplier=0), mine) == [
        "admissibility", "clip_norm", "noise_multiplier", "public",
    ]  # fmt: skip
    assert leaf_differences(replace(kept, subject=None), mine) == ["subject"]
    assert leaf_differences(whole, replace(mine, payload=b"other data")) == ["payload"]
    assert leaf_differences(whole, Contribution("mine", mine.descriptor)) == ["descriptor or attestation is missing"]


def test_the_answer_for_machines(story: Story) -> None:
    found = of(story, story.at["first"] + 5).to_dict()
    assert found["descriptor"] == contribution(5, CAROL).record.descriptor.hex()
    assert found["class"] == "clinical"
    assert found["profile"] == "top=0.5"
    assert found["withdrawn"]["reason"] == "consent"
    assert found["withdrawn"]["effect"] == "abandon"
    assert found["epsilon"] == spent((4.0, 20)) / 1e9
    assert found["epsilon_signed"] > 4
    assert [each["epsilon"] for each in found["epochs"]] == sorted(each["epsilon"] for each in found["epochs"])
    assert found["epochs"][1]["segments"][0]["outcome"] == "abandoned"
    assert found["releases"][0]["index"] == story.at["release"]
    assert found["expires"] == "2027-07-16T20:00:00Z"
