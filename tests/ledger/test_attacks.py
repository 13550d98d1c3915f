"""An auditor's attacks: each is carried out on the store of a real ledger, and named by what it is.

By hands of three kinds: who can write the file and no more; who also makes the tree fit again; and who has the key of
the ledger and signs everything anew. What the last one may do without being found out in the ledger itself is found out
by whoever has seen a checkpoint before, or knows the key.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build import (
    ALICE,
    BOB,
    CAROL,
    HOUR,
    PRESETS,
    RUNS,
    STRICT,
    USUAL,
    YEAR,
    Story,
    begin,
    build,
    contribution,
    plan,
    segment,
    signed_by,
)
from forge import all_leaves, appended, changed, leaf, relinked, replacing, rewritten, sealed, sql
from making import AUDITOR, LEDGER, ORIGIN, OTHER, START, Clock, digest, key

from lamina import cbor
from lamina.ledger import records as leaves
from lamina.ledger.governance_records import (
    Aggregate,
    ClassTotal,
    Key,
    KeyChange,
    KeyEvent,
    LeafSpan,
    LedgerFloors,
    PolicyChange,
    Role,
    Withdrawal,
    WithdrawalReason,
    policy_record_digest,
)
from lamina.ledger.merkle import leaf_hash
from lamina.ledger.records import ContributionTerms, Epoch, Segment, SegmentOutcome
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, NoteKey
from lamina.ledger.verify.tree_checks import Finding, KnownCheckpoint, Trust
from lamina.ledger.verify.verifier import Verification, verify
from lamina.ledger.writer import Ledger

MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),))


@dataclasses.dataclass(frozen=True)
class Template:
    """A ledger that was built once, and copies of it."""

    path: Path
    at: dict[str, int]
    signed: list[str]
    size: int

    def copy(self, folder: Path) -> str:
        return str(shutil.copy(self.path, folder / "ledger.db"))


def template(folder: Path, **options: bool) -> Template:
    story = build(str(folder / "template.db"), **options)
    story.ledger.close()
    return Template(folder / "template.db", story.at, story.signed, int(story.signed[-1].split("\n")[1]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """Nothing is pruned yet."""
    return template(tmp_path_factory.mktemp("whole"), prune=False)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return template(tmp_path_factory.mktemp("pruned"), prune=True)


@pytest.fixture
def path(whole: Template, tmp_path: Path) -> str:
    return whole.copy(tmp_path)


def problem(path: str, **options: object) -> Finding:
    """What is wrong with it; something must be."""
    found: Verification = verify(path, **options)  # type: ignore[arg-type]
    assert not found.verified
    assert not found.trusted
    assert found.problem is not None
    return found.problem


def named(path: str, index: int | None, kind: str, code: str, **options: object) -> None:
    found = problem(path, **options)
    assert (found.index, found.kind, found.code) == (index, kind, code), found


def test_what_nobody_touched_verifies(whole: Template, pruned: Template, tmp_path: Path) -> None:
    for each in (whole, pruned):
        path = each.copy(tmp_path)
        found = verify(path, trust=MINE, seen=each.signed)
        assert found.problem is None
        assert found.verified
        assert found.trusted
        assert (found.size, found.signed) == (each.size, each.size)
        rewritten(path, lambda data: data) if each is whole else None
        assert verify(path, trust=MINE, seen=each.signed).problem is None  # the forger's own tools change nothing


# ------------------------------------------------------------------------------ who can write the file


def test_edited(path: str, whole: Template) -> None:
    data = bytearray(leaf(path, 9))
    data[40] ^= 1
    sql(path, "UPDATE leaf SET data = ? WHERE seq = 9", bytes(data))
    named(path, 9, "contribution", "verify.leaf-edited")
    sql(path, "UPDATE leaf SET data = ? WHERE seq = 9", changed(leaf(path, 10), seq=9))
    named(path, 9, "contribution", "verify.leaf-edited", signatures=False)


@pytest.mark.parametrize("kind", ["epoch", "withdrawal", "policy", "revocation", "release", "late"])
def test_edited_whatever_it_is(path: str, whole: Template, kind: str) -> None:
    seq = whole.at[kind]
    old = leaves.decode_leaf(leaf(path, seq))
    sql(path, "UPDATE leaf SET data = ? WHERE seq = ?", changed(leaf(path, seq), time=old.time + 1), seq)
    assert problem(path).index == seq


def test_edited_header(path: str) -> None:
    sql(path, "UPDATE leaf SET data = ? WHERE seq = 0", changed(leaf(path, 0), accountant="zcdp"))
    named(path, 0, "header", "verify.leaf-edited")


@pytest.mark.parametrize("seq", [1, 12, 41, 54])
def test_deleted(path: str, seq: int) -> None:
    sql(path, "DELETE FROM leaf WHERE seq = ?", seq)
    named(path, seq, "leaf", "verify.leaf-missing")


def test_deleted_header(path: str) -> None:
    sql(path, "DELETE FROM leaf WHERE seq = 0")
    named(path, 0, "leaf", "verify.header-missing")


def test_deleted_and_closed_up(path: str) -> None:
    sql(path, "DELETE FROM leaf WHERE seq = 12")
    sql(path, "UPDATE leaf SET seq = -seq WHERE seq > 12")
    sql(path, "UPDATE leaf SET seq = -seq - 1 WHERE seq < 0")
    assert problem(path).index == 12
    sql(path, "UPDATE head SET size = size - 1")
    assert problem(path).index == 12


def test_inserted(path: str) -> None:
    sql(path, "UPDATE leaf SET seq = -seq WHERE seq >= 12")
    sql(path, "UPDATE leaf SET seq = -seq + 1 WHERE seq < 0")
    sql(path, "INSERT INTO leaf SELECT 12, kind, data FROM leaf WHERE seq = 11")
    sql(path, "UPDATE head SET size = size + 1")
    assert problem(path).index == 12


def test_inserted_at_the_end(path: str, whole: Template) -> None:
    sql(path, "INSERT INTO leaf VALUES (?, 2, ?)", whole.size, changed(leaf(path, 11), seq=whole.size))
    named(path, whole.size, "leaf", "verify.leaf-beyond-head")


def test_reordered(path: str) -> None:
    one, two = leaf(path, 11), leaf(path, 12)
    sql(path, "UPDATE leaf SET data = ? WHERE seq = 12", one)
    sql(path, "UPDATE leaf SET data = ? WHERE seq = 11", two)
    assert problem(path).index == 11


def test_truncated(path: str, whole: Template) -> None:
    sql(path, "DELETE FROM leaf WHERE seq >= 50")
    named(path, 50, "leaf", "verify.leaf-missing")
    rewritten(path, lambda data: data[:50], None)
    named(path, 50, "checkpoint", "verify.ledger-truncated")
    sql(path, "DELETE FROM checkpoint WHERE size > 50")
    assert verify(path).signed == 44  # nothing in here tells, but whoever saw more does
    named(path, 50, "seen", "verify.ledger-rolled-back", seen=whole.signed[-1:])
    named(path, 44, "trust", "verify.leaves-unsigned", trust=MINE)


# ------------------------------------------------------------------------------ who makes the tree fit again


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (replacing(9, descriptor=digest("another")), 1),
        (lambda data: relinked([*data[:20], data[21], data[20], *data[22:]]), 1),
        (lambda data: [changed(one, time=START + 5) if at == 40 else one for at, one in enumerate(data)], 1),
        (replacing(53, manifest=digest("another")), 44),
    ],
)  # fmt: skip
def test_the_tree_was_made_to_fit(path: str, change: Callable[[list[bytes]], list[bytes]], first: int) -> None:
    """The tree, its tiles and the head are those of other leaves. What was signed is not."""
    rewritten(path, change, None)
    named(path, first, "checkpoint", "verify.checkpoint-root-differs", signatures=False)


def test_the_tree_was_made_to_fit_fewer_or_more(path: str) -> None:
    original = all_leaves(path)
    rewritten(path, lambda data: relinked(data[:30] + data[31:]), None)
    named(path, 40, "epoch", "verify.eligibility-out-of-range", signatures=False)
    rewritten(path, lambda data: relinked([*original[:30], original[29], *original[30:]]), None)
    named(path, 1, "checkpoint", "verify.checkpoint-root-differs", signatures=False)


def test_tiles_are_checked_too(path: str) -> None:
    ((data,),) = sql(path, "SELECT data FROM tile WHERE id = 0")
    sql(path, "UPDATE tile SET data = ? WHERE id = 0", data[: 32 * 7] + bytes(32) + data[32 * 8 :])
    assert problem(path).index == 7
    sql(path, "DELETE FROM tile WHERE id = 0")
    assert problem(path).kind == "tile"


def test_the_head_is_checked_too(path: str, whole: Template) -> None:
    for column, value in (("time", 5), ("epoch", 9), ("frontier", b"\x00"), ("frontier", b"\x82\x00\x80")):
        ((old,),) = sql(path, f"SELECT {column} FROM head")
        sql(path, f"UPDATE head SET {column} = ?", value)
        named(path, whole.size - 1, "store", "verify.head-differs")
        sql(path, f"UPDATE head SET {column} = ?", old)
    assert verify(path).verified
    sql(path, "DELETE FROM head")
    named(path, None, "store", "verify.head-missing")


def test_what_the_store_lists_is_checked_too(path: str, whole: Template) -> None:
    """A withdrawal that is in the leaves, and that nobody finds, would let a model be served."""
    at = whole.at
    sql(path, "DELETE FROM withdrawn")
    named(path, at["withdrawal"], "store", "verify.withdrawal-index-differs")
    sql(path, "INSERT INTO withdrawn VALUES (?, ?)", at["first"] + 5, at["withdrawal"])
    assert verify(path).verified
    sql(path, "UPDATE leaf SET kind = 2 WHERE seq = ?", at["revocation"])
    named(path, at["revocation"], "store", "verify.kind-index-differs")
    sql(path, "UPDATE leaf SET kind = 5 WHERE seq = ?", at["revocation"])
    sql(path, "UPDATE attempt SET seq = 3 WHERE seq = ?", at["epoch"])
    named(path, at["epoch"], "store", "verify.attempt-index-differs")


def test_a_value_of_another_type_is_named_too(path: str) -> None:
    sql(path, "UPDATE leaf SET data = 'text' WHERE seq = 9")
    assert problem(path).kind == "store"


def test_a_file_that_is_damaged(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * 20_000)
    assert problem(path).kind == "store"


# ------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_of_another_ledger(path: str, whole: Template) -> None:
    strange = LedgerCheckpoint("other.example", whole.size, digest("root")).signed(OTHER)
    sql(path, "UPDATE checkpoint SET text = ? WHERE size = ?", strange, whole.size)
    named(path, 53 + 1, "checkpoint", "verify.checkpoint-of-other-ledger")
    named(path, 54, "checkpoint", "verify.checkpoint-of-other-ledger", seen=whole.signed)


def test_a_checkpoint_that_was_seen_of_another_ledger(path: str, whole: Template, tmp_path: Path) -> None:
    strange = LedgerCheckpoint("other.example", 1, digest("root")).signed(LEDGER)
    named(path, None, "seen", "verify.known-checkpoint-of-other-ledger", seen=[strange])


def test_a_checkpoint_signed_by_nobody_that_counts(path: str, whole: Template) -> None:
    root = Ledger.open(path).root
    for strange in (OTHER, AUDITOR):
        text = LedgerCheckpoint(ORIGIN, whole.size, root).signed(strange)
        sql(path, "UPDATE checkpoint SET text = ? WHERE size = ?", text, whole.size)
        named(path, 54, "checkpoint", "verify.checkpoint-unsigned")


def test_a_signature_that_was_bent(path: str, whole: Template) -> None:
    ((text,),) = sql(path, "SELECT text FROM checkpoint WHERE size = ?", whole.size)
    bent = text[:-10] + ("A" if text[-10] != "A" else "B") + text[-9:]
    sql(path, "UPDATE checkpoint SET text = ? WHERE size = ?", bent, whole.size)
    named(path, 54, "checkpoint", "verify.checkpoint-signature-invalid")
    sql(path, "UPDATE checkpoint SET text = 'nonsense' WHERE size = ?", whole.size)
    named(path, 54, "checkpoint", "verify.checkpoint-unreadable")


def test_a_seal_of_somebody_else(path: str, whole: Template) -> None:
    sql(path, "UPDATE checkpoint SET seal = ? WHERE size = ?", bytes(96), whole.size)
    named(path, 54, "checkpoint", "verify.receipt-signature-invalid")


def test_a_checkpoint_under_another_size(path: str, whole: Template) -> None:
    sql(path, "UPDATE checkpoint SET size = 30 WHERE size = ?", whole.size)
    named(path, 1, "checkpoint", "verify.checkpoint-wrong-size")


# ------------------------------------------------------------------------------ who has the key


def test_rolled_back(whole: Template, tmp_path: Path) -> None:
    """An old copy of the file is a good ledger; only who saw a later one knows."""
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1)])
    story.sign()
    story.ledger.close()
    shutil.copy(tmp_path / "a.db", tmp_path / "old.db")
    later = Story(Ledger.open(str(tmp_path / "a.db"), LEDGER, clock=Clock()), Clock())
    later.admit([contribution(2)])
    seen = later.sign()
    later.ledger.close()
    assert verify(tmp_path / "a.db", trust=MINE, seen=[seen]).verified
    assert verify(tmp_path / "old.db", trust=MINE).verified
    named(str(tmp_path / "old.db"), 5, "seen", "verify.ledger-rolled-back", trust=MINE, seen=[seen])


def test_forked(path: str, whole: Template) -> None:
    """Signed by the ledger's own key, and not what was seen."""
    rewritten(path, replacing(whole.at["release"], manifest=digest("another")))
    assert verify(path, trust=MINE).verified
    named(path, 44, "seen", "verify.ledger-forked", trust=MINE, seen=whole.signed)
    named(path, 0, "seen", "verify.ledger-forked", seen=[KnownCheckpoint.parse(whole.signed[-1])])
    assert verify(path, trust=MINE, seen=whole.signed[:3]).verified  # up to there it is the same


def test_signed_anew_by_another_key(path: str, whole: Template) -> None:
    mine = Key(name=ORIGIN, x=OTHER.public.x, role=Role.LEDGER)
    keys = (mine, *leaves.decode_leaf(leaf(path, 0)).record.keys[1:])  # type: ignore[union-attr]
    rewritten(path, replacing(0, keys=keys), OTHER)
    named(path, whole.at["policy"], "policy", "ledger.policy-wrong-predecessor")  # it hangs together
    forged = policy_record_digest(leaves.decode_leaf(leaf(path, 0)).record)
    rewritten(path, replacing(whole.at["policy"], previous=forged), OTHER)
    assert verify(path).verified  # consistent in itself: it names its own key
    assert not verify(path).trusted
    named(path, 0, "trust", "verify.trusted-signature-missing", trust=MINE)
    named(path, None, "seen", "verify.known-checkpoint-of-other-key", seen=whole.signed)
    named(path, 0, "seen", "verify.ledger-forked", trust=MINE, seen=whole.signed)


def test_signed_by_a_key_that_the_header_does_not_name(path: str) -> None:
    rewritten(path, lambda data: data, OTHER)
    named(path, 0, "checkpoint", "verify.checkpoint-unsigned")


def test_replayed_contribution(path: str, whole: Template) -> None:
    again = leaves.decode_leaf(leaf(path, 47)).record
    rewritten(path, appended(again))
    named(path, whole.size, "contribution", "verify.descriptor-repeated", signatures=False)
    assert problem(path).index == whole.size


def test_replayed_attestation_under_another_name(path: str, whole: Template) -> None:
    again = dataclasses.replace(leaves.decode_leaf(leaf(path, 47)).record, descriptor=digest("another"))
    rewritten(path, appended(again))
    named(path, whole.size, "contribution", "verify.attestation-repeated", signatures=False)


def test_the_same_person_twice(path: str, whole: Template) -> None:
    found = leaves.decode_leaf(leaf(path, 34)).record
    twice = dataclasses.replace(
        found, descriptor=digest("another"), attestation=digest("other"), expires=START + 9 * YEAR
    )
    rewritten(path, appended(twice))
    named(path, whole.size, "contribution", "verify.subject-repeated", signatures=False)


def test_replayed_epoch(path: str, whole: Template) -> None:
    rewritten(path, appended(leaves.decode_leaf(leaf(path, whole.at["epoch"])).record))
    named(path, whole.size, "epoch", "verify.attempt-repeated")


def test_replayed_from_another_ledger(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    (seq,) = story.admit([contribution(1, origin="other.example")])
    story.sign()
    named(str(tmp_path / "a.db"), seq, "contribution", "verify.attestation-for-other-ledger")


def test_the_same_token_twice(tmp_path: Path) -> None:
    """One nonce under two descriptors."""
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1)])
    _, seq = story.admit([contribution(2), contribution(1, terms=STRICT)])
    story.sign()
    named(str(tmp_path / "a.db"), seq, "contribution", "verify.token-repeated")


def test_back_dated(path: str, whole: Template) -> None:
    seq = whole.at["late"]
    rewritten(path, replacing(seq, time=START))
    named(path, seq, "contribution", "verify.time-falls")


def test_back_dated_before_it_was_signed(tmp_path: Path) -> None:
    """The time of the leaf fits its neighbours, and is before its attestation was made."""
    path = str(tmp_path / "a.db")
    story = begin(path)
    story.admit([contribution(1)])
    story.later(YEAR // 4)
    (seq,) = story.admit([contribution(2, at=int(story.clock.now))])
    story.sign()
    story.ledger.close()
    assert verify(path).verified
    rewritten(path, replacing(seq, time=START))
    named(path, seq, "contribution", "verify.admitted-before-valid")
    rewritten(path, replacing(seq, not_before=START - HOUR))
    named(path, seq, "contribution", "verify.admitted-before-signed")


def test_wrong_accountant_in_the_header(path: str, whole: Template) -> None:
    rewritten(path, replacing(0, accountant="zcdp"))
    named(path, whole.at["epoch"], "epoch", "verify.spend-under-reported")


def test_wrong_accountant_in_the_records(tmp_path: Path) -> None:
    """The header says pld, whoever wrote the epochs asked rdp."""
    story = begin(str(tmp_path / "a.db"), accountant="pld")
    story.admit([contribution(1), contribution(2, terms=STRICT)])
    story.spending.accountant = "rdp"
    seq = story.epoch(RUNS[0], [segment(0, read=5)])
    story.sign()
    named(str(tmp_path / "a.db"), seq, "epoch", "verify.spend-over-reported")


def _account(path: str, seq: int, which: int, **changes: object) -> tuple[object, ...]:
    record = leaves.decode_leaf(leaf(path, seq)).record
    assert isinstance(record, Epoch)
    accounts = list(record.accounts)
    accounts[which] = dataclasses.replace(accounts[which], **changes)  # type: ignore[arg-type]
    return tuple(accounts)


@pytest.mark.parametrize("part", [0.9999, 0.999, 1.001])
def test_misreported_spend(path: str, whole: Template, part: float) -> None:
    seq = whole.at["run two"]
    spend = leaves.decode_leaf(leaf(path, seq)).record.accounts[1].spend  # type: ignore[union-attr]
    rewritten(path, replacing(seq, accounts=_account(path, seq, 1, spend=round(spend * part))))
    named(path, seq, "epoch", "verify.spend-under-reported" if part < 1 else "verify.spend-over-reported")


def test_spend_that_falls(path: str, whole: Template) -> None:
    seq = whole.at["run two"]
    rewritten(path, replacing(seq, accounts=_account(path, seq, 1, spend=1)))
    named(path, seq, "epoch", "verify.spend-falls")


def test_under_reported_steps(path: str, whole: Template) -> None:
    """The charges say less than the plan takes, and the spend fits the charges."""
    seq = whole.at["redone"]
    record = leaves.decode_leaf(leaf(path, seq)).record
    assert isinstance(record, Epoch)
    fewer = tuple(dataclasses.replace(each, steps=each.steps - 10) for each in record.accounts[1].charges)
    rewritten(path, replacing(seq, accounts=_account(path, seq, 1, charges=fewer)))
    named(path, seq, "epoch", "verify.charge-differs-from-plan")
    rewritten(path, replacing(seq, accounts=_account(path, seq, 1, charges=())))
    named(path, seq, "epoch", "verify.charge-differs-from-plan")


def test_an_attempt_that_was_given_up_is_hidden(path: str, whole: Template) -> None:
    """Its steps were taken, its noise was seen: charged means spent. Without it the numbers do not fit."""
    seq = whole.at["redone"]
    record = leaves.decode_leaf(leaf(path, seq)).record
    assert isinstance(record, Epoch)
    rewritten(path, replacing(seq, segments=record.segments[1:]))
    named(path, seq, "epoch", "verify.charge-differs-from-plan")


def test_a_smaller_scale_hides_spend(path: str, whole: Template) -> None:
    seq = whole.at["epoch"]
    rewritten(path, replacing(seq, accounts=_account(path, seq, 1, scale=0.25)))
    named(path, seq, "epoch", "verify.charge-differs-from-plan")


def test_a_larger_scale_breaks_the_signed_clip_norm(path: str, whole: Template) -> None:
    seq = whole.at["epoch"]
    rewritten(path, replacing(seq, accounts=_account(path, seq, 0, scale=0.75)))
    named(path, seq, "epoch", "verify.clip-norm-above-signed")


def test_an_account_is_left_out(path: str, whole: Template) -> None:
    seq = whole.at["redone"]
    rewritten(path, replacing(seq, accounts=_account(path, seq, 0)[1:]))
    named(path, seq, "epoch", "verify.account-missing")
    rewritten(path, replacing(seq, accounts=()))
    assert problem(path).index == seq


def test_another_plan(path: str, whole: Template) -> None:
    seq = whole.at["run two"]
    quiet = plan(noise=(0.0, 0.0, 50.0, 50.0))
    sql(path, "INSERT INTO blob VALUES (?, ?)", quiet.digest(), quiet.to_cbor())
    rewritten(path, replacing(seq, plan=quiet.digest()))
    named(path, seq, "epoch", "verify.noise-variance-differs")
    rewritten(path, replacing(seq, plan=digest("none")))
    named(path, seq, "epoch", "verify.plan-missing")
    sql(path, "UPDATE blob SET data = ?", b"nonsense")
    assert problem(path).code == "verify.plan-swapped"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"population": 10_000, "sampling_rate": 0.002}, "verify.plan-population-differs"),
        ({"public": True, "delta": 0.0}, "verify.plan-class-public"),
        ({"profile": "all layers"}, "verify.plan-profile-differs"),
        ({"name": "strangers"}, "verify.class-unknown"),
    ],
)
def test_a_plan_that_the_policy_does_not_allow(tmp_path: Path, changes: dict[str, object], code: str) -> None:
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1)])
    base = plan()
    odd = dataclasses.replace(base.classes[0], **changes)  # type: ignore[arg-type]
    clip = ((float("inf"),) * 4, base.clip[1]) if odd.public else base.clip
    made = plan(classes=(odd, base.classes[1]), clip=clip)
    scales = {dataclasses.replace(USUAL, cls=odd.name): 1.0} if not odd.public else {USUAL: 1.0}
    seq = story.epoch(RUNS[0], [segment(0, read=5)], of=made, scales=scales)
    story.sign()
    named(str(tmp_path / "a.db"), seq, "epoch", code)


def test_more_than_was_signed(tmp_path: Path) -> None:
    """Every number is right, and the sum over runs is above a signed bound."""
    story = begin(str(tmp_path / "a.db"))
    loud = plan(1000, noise=(0.0, 0.0, 1.0, 1.0))
    story.admit([contribution(1)])
    first = story.epoch(RUNS[0], [segment(0, read=5, length=300)], of=loud, scales={USUAL: 1.0})
    story.sign()
    assert verify(str(tmp_path / "a.db")).verified
    second = story.epoch(RUNS[1], [segment(0, read=first, length=900)], of=loud, scales={USUAL: 1.0})
    story.sign()
    named(str(tmp_path / "a.db"), second, "epoch", "verify.bound-exceeded")


def test_floor_lowered(path: str, whole: Template) -> None:
    lower = PolicyChange(
        floors=LedgerFloors(clip_norm=1, noise_multiplier=1), presets=PRESETS, policy=digest("low"),
        previous=policy_record_digest(leaves.decode_leaf(leaf(path, whole.at["policy"])).record),
    )  # fmt: skip
    rewritten(path, appended(lower))
    named(path, whole.size, "policy", "ledger.policy-loosened")
    rewritten(path, replacing(whole.size, signatures=signed_by(lower, LEDGER).signatures))
    named(path, whole.size, "policy", "ledger.policy-loosened")
    rewritten(path, replacing(whole.size, signatures=signed_by(lower, LEDGER, LEDGER).signatures))
    named(path, whole.size, "policy", "ledger.policy-loosened")
    rewritten(path, replacing(whole.size, signatures=signed_by(lower, LEDGER, OTHER).signatures))
    named(path, whole.size, "policy", "ledger.policy-signature-invalid")
    rewritten(path, replacing(whole.size, signatures=signed_by(lower, LEDGER, AUDITOR).signatures))
    assert verify(path).verified


def test_a_looser_policy_that_was_taken_back_is_not_adopted_again(path: str, whole: Template) -> None:
    """Two signed for it once; whoever keeps the ledger has their signatures still."""
    before = leaves.decode_leaf(leaf(path, whole.at["policy"])).record
    assert isinstance(before, PolicyChange)
    lower = PolicyChange(
        floors=LedgerFloors(clip_norm=1, noise_multiplier=1),
        presets=PRESETS,
        policy=digest("low"),
        previous=policy_record_digest(before),
    )
    signed = signed_by(lower, LEDGER, AUDITOR)
    back = dataclasses.replace(before, previous=policy_record_digest(signed))
    rewritten(path, appended(signed))
    rewritten(path, appended(back))
    assert verify(path).verified
    rewritten(path, appended(signed))
    named(path, whole.size + 2, "policy", "ledger.policy-wrong-predecessor")


@pytest.mark.parametrize(
    ("terms", "code"),
    [
        (ContributionTerms("clinical", "ecg", 50_000, 2_000_000), "verify.clip-norm-below-floor"),
        (ContributionTerms("clinical", "ecg", 1_000_000, 400_000), "verify.noise-below-floor"),
        (ContributionTerms("clinical", "ecg", 2_000_000, 2_000_000), "verify.clip-norm-above-class"),
        (ContributionTerms("clinical", "ecg", 1_000_000, 900_000), "verify.noise-below-class"),
        (ContributionTerms("clinical", "ecg", 1_000_000, 2_000_000, "top=0.25"), "verify.profile-exceeded"),
        (ContributionTerms("clinical", "ecg", 1_000_000, 2_000_000, "sideways"), "verify.profile-exceeded"),
        (ContributionTerms("clinical", "ecg", 0, 0), "verify.no-bound-signed"),
        (ContributionTerms("open", "ecg", 1_000_000, 2_000_000), "verify.bound-of-public-class"),
        (ContributionTerms("unheard-of", "ecg", 1_000_000, 2_000_000), "verify.class-unknown"),
    ],
)
def test_a_bound_that_the_policy_does_not_allow(tmp_path: Path, terms: ContributionTerms, code: str) -> None:
    story = begin(str(tmp_path / "a.db"))
    many = [contribution(n, BOB) for n in range(40)]
    *_, seq = story.admit([*many, contribution(99, terms=terms)])
    story.admit(contribution(n, terms=terms) for n in range(100, 140))  # as a column, too
    story.sign()
    named(str(tmp_path / "a.db"), seq, "contribution", code)


def test_a_threshold_outside_the_profile(tmp_path: Path) -> None:
    """The plan says that the class reaches the top half, and gives it a threshold for a layer below."""
    story, deep = (
        begin(str(tmp_path / "a.db")),
        plan(clip=((0.0, 0.1, 0.7, 0.5), (float("inf"),) * 4), noise=(0.0, 4.0, 4.0, 4.0)),
    )
    story.admit(contribution(n) for n in range(3))
    story.later(2 * HOUR)
    seq = story.epoch(RUNS[0], [segment(0, read=story.ledger.size)], of=deep, scales={USUAL: 1.0})
    story.sign()
    named(str(tmp_path / "a.db"), seq, "epoch", "verify.layer-outside-profile")


def test_a_public_class_outside_its_profile(tmp_path: Path) -> None:
    upper = dataclasses.replace(PRESETS[1], profile="top=0.5")
    story = begin(str(tmp_path / "a.db"), presets=(PRESETS[0], upper))
    story.admit(contribution(n) for n in range(3))
    story.later(2 * HOUR)
    classes = (plan().classes[0], dataclasses.replace(plan().classes[1], profile="top 50 %"))
    seq = story.epoch(RUNS[0], [segment(0, read=story.ledger.size)], of=plan(classes=classes), scales={USUAL: 1.0})
    story.sign()
    named(str(tmp_path / "a.db"), seq, "epoch", "verify.layer-outside-profile")


def test_key_revoked(path: str, whole: Template) -> None:
    made = contribution(77, CAROL, at=int(leaves.decode_leaf(leaf(path, whole.size - 1)).time))
    rewritten(path, appended(made.record))
    named(path, whole.size, "contribution", "verify.key-revoked", signatures=False)
    sql(path, "INSERT INTO evidence VALUES (?, ?)", whole.size, made.attestation)
    named(path, whole.size, "contribution", "verify.key-revoked")


def test_key_replaced(path: str, whole: Template) -> None:
    """What it signed before stays good; what it claims to have signed later does not."""
    now = leaves.decode_leaf(leaf(path, whole.size - 1)).time
    old = contribution(77, BOB, at=START, expires=now + YEAR)
    rewritten(path, appended(old.record))
    sql(path, "INSERT INTO evidence VALUES (?, ?)", whole.size, old.attestation)
    assert verify(path).verified
    new = contribution(78, BOB, at=now)
    rewritten(path, appended(new.record))
    sql(path, "INSERT INTO evidence VALUES (?, ?)", whole.size + 1, new.attestation)
    named(path, whole.size + 1, "contribution", "verify.key-replaced")


def test_a_key_that_nobody_named(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    (seq,) = story.admit([contribution(1, key("stranger"))])
    story.sign()
    named(str(tmp_path / "a.db"), seq, "contribution", "verify.key-unknown")


def test_a_key_in_another_role(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    (seq,) = story.admit([contribution(1, AUDITOR)])
    story.sign()
    named(str(tmp_path / "a.db"), seq, "contribution", "verify.key-wrong-role", signatures=False)
    named(str(tmp_path / "a.db"), seq, "contribution", "verify.key-wrong-role")


def test_an_attestation_that_was_bent(path: str) -> None:
    ((data,),) = sql(path, "SELECT data FROM evidence WHERE seq = 9")
    sql(path, "UPDATE evidence SET data = ? WHERE seq = 9", data[:-1] + bytes([data[-1] ^ 1]))
    named(path, 9, "contribution", "verify.attestation-swapped")
    assert verify(path, signatures=False).verified
    sql(path, "DELETE FROM evidence WHERE seq = 9")
    named(path, 9, "contribution", "verify.attestation-missing")


def test_an_attestation_of_something_else(path: str) -> None:
    ((data,),) = sql(path, "SELECT data FROM evidence WHERE seq = 12")
    record = leaves.decode_leaf(leaf(path, 12)).record
    sql(path, "UPDATE evidence SET data = ? WHERE seq = 9", data)
    rewritten(path, replacing(9, attestation=record.attestation, key=record.key))  # type: ignore[union-attr]
    found = problem(path)
    assert (found.index, found.kind) == (9, "contribution")
    assert found.code == "verify.attestation-signature-invalid"


@pytest.mark.parametrize(
    ("seq", "changes", "code"),
    [
        (9, {"expires": START + 9 * YEAR}, "verify.attestation-window-differs"),
        (34, {"subject": digest("another")}, "verify.attestation-subject-differs"),
        (34, {"subject": None}, "verify.attestation-subject-differs"),
        (9, {"key": BOB.public.id}, "verify.attestation-of-other-key"),
    ],
)
def test_a_leaf_that_says_something_else_than_was_signed(
    path: str, seq: int, changes: dict[str, object], code: str
) -> None:
    rewritten(path, replacing(seq, **changes))
    named(path, seq, "contribution", code)


def test_a_leaf_that_is_not_canonical(path: str) -> None:
    """The same record in another encoding, in a tree that fits, signed by the ledger."""
    forms = {
        "a longer number": lambda data: data.replace(b"\x02\x09\x03", b"\x02\x18\x09\x03", 1),
        "an unknown key": lambda data: b"\xa6" + data[1:] + b"\x06\x00",
        "something behind": lambda data: data + b"\x00",
        "an unknown kind": lambda data: b"\xa5\x01\x09" + data[3:],
        "nothing at all": lambda data: b"",
        "a list": lambda data: cbor.encode([1, 2, 3]),
    }
    original = all_leaves(path)
    for name, form in forms.items():
        bent = form(original[9])
        assert bent != original[9], name
        rewritten(path, lambda data, bent=bent: [bent if at == 9 else one for at, one in enumerate(original)])
        found = problem(path, signatures=False)
        assert (found.index, found.kind) == (9, "leaf"), (name, found)


def test_a_second_header(path: str, whole: Template) -> None:
    rewritten(path, appended(leaves.decode_leaf(leaf(path, 0)).record))
    named(path, whole.size, "header", "verify.second-header")


def test_a_ledger_without_a_header(path: str) -> None:
    data = leaves.decode_leaf(leaf(path, 9))
    sql(path, "UPDATE leaf SET data = ? WHERE seq = 0", leaves.encode_leaf(data.record, 0, data.time, 0))
    named(path, 0, "contribution", "verify.header-missing")


def test_an_unknown_schema_of_profiles(path: str) -> None:
    rewritten(path, replacing(0, profile_schema=99))
    named(path, 0, "header", "verify.profile-schema-unknown")


def test_a_hidden_epoch(path: str, whole: Template) -> None:
    """Taken out with everything that points to it; the leaves after it have counted it."""
    seq = whole.at["run two"]
    rewritten(path, lambda data: [*data[:seq], *(changed(one, seq=at) for at, one in enumerate(data[seq + 1 :], seq))])
    named(path, seq, "release", "verify.epoch-count-wrong")


# ------------------------------------------------------------------------------ segments and withdrawals


def test_an_epoch_too_precise_in_time(path: str, whole: Template) -> None:
    seq = whole.at["redone"]
    time = leaves.decode_leaf(leaf(path, seq)).time
    rewritten(path, lambda data: [changed(one, time=max(leaves.decode_leaf(one).time, time + 7)) if at >= seq else one
                                  for at, one in enumerate(data)])  # fmt: skip
    named(path, seq, "epoch", "verify.epoch-time-not-rounded")


def test_more_segments_than_the_header_allows(path: str, whole: Template) -> None:
    rewritten(path, replacing(0, granularity=1))
    named(path, whole.at["redone"], "epoch", "verify.too-many-segments")


def _segments(path: str, seq: int, which: int, **changes: object) -> tuple[Segment, ...]:
    record = leaves.decode_leaf(leaf(path, seq)).record
    assert isinstance(record, Epoch)
    found = list(record.segments)
    found[which] = dataclasses.replace(found[which], **changes)  # type: ignore[arg-type]
    return tuple(found)


def test_a_withdrawal_that_was_not_heeded(path: str, whole: Template) -> None:
    seq = whole.at["redone"]
    rewritten(path, replacing(seq, segments=_segments(path, seq, 2, eligibility=whole.at["withdrawal"])))
    named(path, seq, "epoch", "verify.withdrawal-ignored")


def test_members_from_the_future(path: str, whole: Template) -> None:
    seq = whole.at["epoch"]
    rewritten(path, replacing(seq, segments=_segments(path, seq, 0, eligibility=seq + 1)))
    named(path, seq, "epoch", "verify.eligibility-out-of-range")


def test_more_steps_than_the_plan(path: str, whole: Template) -> None:
    seq = whole.at["redone"]
    rewritten(path, replacing(seq, segments=_segments(path, seq, 2, last=200)))
    named(path, seq, "epoch", "verify.segment-beyond-plan")


def test_an_epoch_that_names_a_strange_checkpoint(path: str, whole: Template) -> None:
    seq = whole.at["run two"]
    rewritten(path, replacing(seq, previous=digest("strange")), chained=False)
    named(path, seq, "epoch", "verify.previous-checkpoint-unknown")
    first = leaves.decode_leaf(leaf(path, whole.at["epoch"])).record
    assert isinstance(first, Epoch)


def test_an_epoch_that_forgets_a_checkpoint(path: str, whole: Template) -> None:
    seq = whole.at["run two"]
    rewritten(path, replacing(seq, previous=None), chained=False)
    named(path, seq, "epoch", "verify.previous-checkpoint-older")


def test_another_state_of_the_accountant(path: str, whole: Template) -> None:
    rewritten(path, replacing(whole.at["epoch"], state=digest("state")))
    named(path, whole.at["epoch"], "epoch", "verify.accountant-state-differs")


@pytest.mark.parametrize("target", [0, 1, 41, 10**6])
def test_a_withdrawal_of_something_else(path: str, whole: Template, target: int) -> None:
    rewritten(path, appended(Withdrawal(target=target, reason=WithdrawalReason.DATA)))
    named(path, whole.size, "withdrawal", "verify.withdrawal-of-no-contribution")


def test_withdrawn_twice(path: str, whole: Template) -> None:
    rewritten(path, appended(Withdrawal(target=9, reason=WithdrawalReason.DATA)))
    named(path, whole.size, "withdrawal", "verify.withdrawn-twice")


def test_a_release_of_a_run_that_is_not_there(path: str, whole: Template) -> None:
    rewritten(path, replacing(whole.at["release"], runs=(digest("ghost")[:16],)))
    named(path, whole.at["release"], "release", "verify.release-of-unknown-run")
    rewritten(path, replacing(whole.at["release"], runs=RUNS, not_after=5))
    named(path, whole.at["release"], "release", "verify.release-expired")
    rewritten(path, replacing(whole.at["release"], not_after=None, runs=(RUNS[0], RUNS[0])))
    named(path, whole.at["release"], "release", "verify.release-run-twice")


def test_a_manifest_that_was_changed(path: str, whole: Template) -> None:
    sql(path, "INSERT INTO blob VALUES (?, ?)", digest("manifest"), b"another")
    named(path, whole.at["release"], "release", "verify.release-manifest-swapped")


# ------------------------------------------------------------------------------ keys of the ledger


def _new_key(change: KeyChange, effective: int, name: str = ORIGIN, role: Role = Role.LEDGER) -> KeyEvent:
    new = Key(name=name, x=OTHER.public.x, role=role)
    return KeyEvent(change=change, key=new, target=LEDGER.public.id if change is KeyChange.ROTATE else None,
                    effective=effective)  # fmt: skip


def test_a_key_that_makes_itself_the_ledgers(path: str, whole: Template) -> None:
    """Whoever can write, and has no key, names one, and signs with it."""
    for change in (KeyChange.ADD, KeyChange.ROTATE):
        shutil.copy(whole.path, path)
        with Ledger.open(path, OTHER, clock=Clock(START + 4 * YEAR)) as ledger:
            ledger.append([_new_key(change, START)])
        sealed(path, OTHER)
        named(path, whole.size, "checkpoint", "verify.checkpoint-key-unvouched")


@pytest.mark.parametrize("change", [KeyChange.ROTATE, KeyChange.REVOKE])
def test_a_key_that_was_put_out_lets_itself_in_again(path: str, whole: Template, change: KeyChange) -> None:
    """Its thief writes that it was added again, and signs that with it."""
    clock = Clock(START + 4 * YEAR)
    with Ledger.open(path, LEDGER, clock=clock) as ledger:
        ledger.append([_new_key(KeyChange.ROTATE if change is KeyChange.ROTATE else KeyChange.ADD, START)])
        ledger.checkpoint()
    again = KeyEvent(change=KeyChange.ADD, key=Key(name=ORIGIN, x=LEDGER.public.x, role=Role.LEDGER), effective=START)
    with Ledger.open(path, OTHER, clock=clock) as ledger:
        if change is KeyChange.REVOKE:
            ledger.append([KeyEvent(change=change, target=LEDGER.public.id, effective=int(clock.now))])
        ledger.append([Withdrawal(target=10, reason=WithdrawalReason.REQUEST)])
        ledger.checkpoint()
        size = ledger.size
        ledger.append([again])
    assert verify(path, trust=MINE).problem is not None  # nobody has signed that yet
    sealed(path, LEDGER)
    named(path, size, "checkpoint", "verify.checkpoint-key-unvouched")
    sealed(path, OTHER)  # who keeps the ledger now may let it in
    assert verify(path, trust=MINE).verified


def test_a_seal_by_a_key_that_was_revoked(path: str, whole: Template) -> None:
    """The checkpoint is signed as it must be; receipts would be by a key that counts no more."""
    clock = Clock(START + 4 * YEAR)
    with Ledger.open(path, LEDGER, clock=clock) as ledger:
        ledger.append([_new_key(KeyChange.ADD, START)])
        ledger.checkpoint()
    with Ledger.open(path, OTHER, clock=clock) as ledger:
        ledger.append([KeyEvent(change=KeyChange.REVOKE, target=LEDGER.public.id, effective=int(clock.now))])
    sealed(path, OTHER, seal=LEDGER)
    named(path, whole.size + 1, "checkpoint", "verify.receipt-signature-invalid")
    sealed(path, OTHER)
    assert verify(path).verified


def test_a_key_of_the_ledger_that_was_rotated(path: str, whole: Template) -> None:
    clock = Clock(START + 4 * YEAR)
    with Ledger.open(path, LEDGER, clock=clock) as ledger:
        ledger.append([_new_key(KeyChange.ROTATE, START + 4 * YEAR + HOUR)])
        ledger.checkpoint()
    clock.now += 2 * HOUR
    with Ledger.open(path, OTHER, clock=clock) as ledger:
        ledger.append([Withdrawal(target=10, reason=WithdrawalReason.REQUEST)])
        ledger.checkpoint()
    assert verify(path, trust=MINE, seen=whole.signed).trusted  # a trusted key vouched for the new one
    assert verify(path, trust=Trust(plain=(OTHER.public,))).trusted  # who knows the new one need not know the old
    assert problem(path, trust=Trust(plain=(AUDITOR.public,))).kind == "trust"
    named(path, 0, "trust", "verify.no-trusted-key-for-ledger", trust=Trust())
    # The old key goes on signing: what it signs now does not count.
    rewritten(path, lambda data: data, LEDGER)
    named(path, whole.size + 1, "checkpoint", "verify.key-replaced")


def test_a_key_of_the_ledger_that_was_revoked(path: str, whole: Template) -> None:
    now = leaves.decode_leaf(leaf(path, whole.size - 1)).time
    rewritten(path, appended(KeyEvent(change=KeyChange.REVOKE, target=LEDGER.public.id, effective=now)))
    named(path, whole.size, "checkpoint", "verify.key-revoked")


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (KeyEvent(change=KeyChange.REVOKE, target=digest("ghost"), effective=START), "ledger.key-unknown"),
        (_new_key(KeyChange.ADD, START, name="another.example"), "ledger.ledger-key-name"),
        (_new_key(KeyChange.ROTATE, START, role=Role.AUDITOR), "ledger.rotation-changes-role"),
        (
            KeyEvent(change=KeyChange.ADD, key=Key(name="x", x=ALICE.public.x, role=Role.AUDITOR), effective=START),
            "ledger.key-role-changed",
        ),
        (
            KeyEvent(
                change=KeyChange.ROTATE,
                key=Key(name="x", x=ALICE.public.x, role=Role.CONTRIBUTOR),
                target=CAROL.public.id,
                effective=START,
            ),
            "ledger.rotation-to-known-key",
        ),
    ],
)
def test_key_events_that_make_no_sense(path: str, whole: Template, event: KeyEvent, code: str) -> None:
    rewritten(path, appended(event))
    named(path, whole.size, "key", code)


# ------------------------------------------------------------------------------ witnesses


def test_a_cosignature_that_was_bent(path: str, whole: Template) -> None:
    ((text,),) = sql(path, "SELECT text FROM checkpoint WHERE size = 54")
    assert "witness.example" in text
    sql(path, "UPDATE checkpoint SET text = ? WHERE size = 54", text[:-12] + "AAAA" + text[-8:])
    assert problem(path).code == "verify.cosignature-invalid"


def test_fewer_witnesses_than_the_header_asks_for(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"), witnesses=1)
    story.admit([contribution(1)])
    story.sign()
    named(str(tmp_path / "a.db"), 1, "checkpoint", "verify.too-few-cosignatures")


def test_leaves_after_a_witness_saw_them(path: str) -> None:
    """A witness saw the checkpoint long before its last leaf claims to have been written."""
    from making import WITNESS

    from lamina.ledger import signed_checkpoint

    ((text,),) = sql(path, "SELECT text FROM checkpoint WHERE size = 55")
    early = signed_checkpoint.add_cosignature(text, WITNESS, START, "witness.example")
    sql(path, "UPDATE checkpoint SET text = ? WHERE size = 55", early)
    named(path, 54, "checkpoint", "verify.cosigned-before-last-leaf")


# ------------------------------------------------------------------------------ pruning


def test_pruned_without_an_aggregate(path: str) -> None:
    sql(path, "DELETE FROM leaf WHERE seq BETWEEN 10 AND 20")
    named(path, 10, "leaf", "verify.leaf-missing")


def _aggregate(path: str, first: int, stop: int, horizon: int, **changes: object) -> Aggregate:
    data = all_leaves(path)[first:stop]
    classes: dict[str, int] = {}
    for one in data:
        cls = leaves.decode_leaf(one).record.terms.cls  # type: ignore[union-attr]
        classes[cls] = classes.get(cls, 0) + 1
    spent = {"clinical": max(account.spend for account in _last_epoch(path).accounts)}
    hashes = b"".join(map(leaf_hash, data))
    given = {
        "spans": (LeafSpan(first=first, stop=stop),),
        "horizon": horizon,
        "classes": tuple(
            ClassTotal(
                cls=cls, count=count, withdrawn=int(first <= 9 < stop and cls == "clinical"), spend=spent.get(cls, 0)
            )
            for cls, count in sorted(classes.items())
        ),
        "digest": __import__("hashlib").sha256(hashes).digest(),
    }
    return Aggregate(**{**given, **changes})  # type: ignore[arg-type]


def _last_epoch(path: str) -> Epoch:
    found = [one.record for one in map(leaves.decode_leaf, all_leaves(path)) if one.kind is Epoch]
    assert isinstance(found[-1], Epoch)
    return found[-1]


def test_an_aggregate_made_by_hand_is_good(path: str, whole: Template) -> None:
    """The oracle of the tests below: the same aggregate, as the forger makes it, passes."""
    rewritten(path, appended(_aggregate(path, 4, 41, START + HOUR)))
    assert verify(path).problem is None
    sql(path, "DELETE FROM leaf WHERE seq BETWEEN 4 AND 40")
    sql(path, "DELETE FROM evidence WHERE seq BETWEEN 4 AND 40")
    found = verify(path)
    assert found.problem is None
    assert found.counts["pruned"] == 37


def test_pruned_beyond_the_horizon(path: str, whole: Template) -> None:
    now = leaves.decode_leaf(leaf(path, whole.size - 1)).time
    rewritten(path, appended(_aggregate(path, 4, 41, now)))
    named(path, whole.size, "aggregate", "verify.pruned-before-retention")
    rewritten(path, lambda data: data[:-1])
    # The horizon is right, and what is summed up is younger.
    rewritten(path, appended(_aggregate(path, 4, 41, START)))
    named(path, whole.size, "aggregate", "verify.pruned-beyond-horizon")
    sql(path, "DELETE FROM leaf WHERE seq BETWEEN 4 AND 40")
    named(path, whole.size, "aggregate", "verify.pruned-beyond-horizon")


def test_an_aggregate_over_what_has_not_expired(path: str, whole: Template) -> None:
    rewritten(path, appended(_aggregate(path, 47, 52, START + YEAR)))
    named(path, whole.size, "aggregate", "verify.pruned-before-expiry")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"digest": digest("other")}, "verify.aggregate-digest-differs"),
        ({"classes": (ClassTotal(cls="clinical", count=37, withdrawn=1, spend=0),)}, "verify.aggregate-count-differs"),
        (
            {
                "classes": (
                    ClassTotal(cls="clinical", count=31, withdrawn=0, spend=0),
                    ClassTotal(cls="open", count=6, withdrawn=0, spend=0),
                )
            },
            "verify.aggregate-withdrawn-differs",
        ),
        (
            {
                "classes": (
                    ClassTotal(cls="clinical", count=31, withdrawn=1, spend=5),
                    ClassTotal(cls="open", count=6, withdrawn=0, spend=0),
                )
            },
            "verify.aggregate-spend-differs",
        ),
    ],
)
def test_an_aggregate_that_says_something_else(
    path: str, whole: Template, changes: dict[str, object], code: str
) -> None:
    rewritten(path, appended(_aggregate(path, 4, 41, START + HOUR, **changes)))
    named(path, whole.size, "aggregate", code)


def test_an_aggregate_over_other_records(path: str, whole: Template) -> None:
    made = _aggregate(path, 4, 41, START + HOUR)
    spans = (LeafSpan(first=5, stop=42),)
    rewritten(path, appended(dataclasses.replace(made, spans=spans)))
    assert problem(path).kind == "aggregate"
    later = (LeafSpan(first=whole.size - 10, stop=whole.size + 27),)
    rewritten(path, replacing(whole.size, spans=later))
    named(path, whole.size, "aggregate", "verify.aggregate-of-later-leaves")


def test_summed_up_twice(path: str, whole: Template) -> None:
    made = _aggregate(path, 4, 41, START + HOUR)
    rewritten(path, appended(made))
    rewritten(path, appended(made))
    named(path, whole.size + 1, "aggregate", "verify.aggregates-overlap")


def test_a_countersignature_of_somebody_else(path: str, whole: Template) -> None:
    made = _aggregate(path, 4, 41, START + HOUR)
    rewritten(path, appended(signed_by(made, AUDITOR)))
    assert not any("countersigned" in note for note in verify(path).notes)
    rewritten(path, replacing(whole.size, signatures=signed_by(made, AUDITOR, OTHER).signatures))
    named(path, whole.size, "aggregate", "verify.signer-wrong-role")
    rewritten(path, replacing(whole.size, signatures=signed_by(made, AUDITOR, origin="other.example").signatures))
    named(path, whole.size, "aggregate", "verify.signature-invalid")
    rewritten(path, replacing(whole.size, signatures=()))
    assert any("countersigned by nobody" in note for note in verify(path).notes)


def test_bodies_that_went_before_the_aggregate_was_signed(path: str, whole: Template) -> None:
    rewritten(path, appended(_aggregate(path, 4, 41, START + HOUR)))
    sql(path, "DELETE FROM checkpoint WHERE size > ?", whole.size)
    assert verify(path).verified
    sql(path, "DELETE FROM leaf WHERE seq BETWEEN 4 AND 40")
    named(path, whole.size, "aggregate", "verify.pruned-without-checkpoint")


def test_more_is_gone_than_was_pruned(pruned: Template, tmp_path: Path) -> None:
    path = pruned.copy(tmp_path)
    sql(path, "DELETE FROM leaf WHERE seq = 47")
    named(path, 47, "leaf", "verify.leaf-missing")


def test_hashes_of_what_is_gone_are_held_to_the_checkpoints(pruned: Template, tmp_path: Path) -> None:
    path = pruned.copy(tmp_path)
    ((data,),) = sql(path, "SELECT data FROM tile WHERE id = 0")
    sql(path, "UPDATE tile SET data = ? WHERE id = 0", data[: 32 * 7] + bytes(32) + data[32 * 8 :])
    named(path, 1, "checkpoint", "verify.checkpoint-root-differs")
    sql(path, "DELETE FROM tile WHERE id = 0")
    assert problem(path).kind == "tile"


# ------------------------------------------------------------------------------ an operator who signs what he likes


def lying(path: Path, *segments: Segment, **options: Any) -> Finding | None:
    """A ledger whose keeper writes down these segments of a run, each in an epoch with what it would cost."""
    story = begin(str(path))
    story.admit([contribution(1), contribution(2, terms=STRICT)])
    for each in segments:
        at = story.ledger.size
        read = at if each.eligibility == 0 else each.eligibility
        story.epoch(RUNS[0], [dataclasses.replace(each, eligibility=read)], **options)
    story.sign()
    found = verify(story.ledger.store).problem
    story.ledger.close()
    return found


def test_an_epoch_in_the_middle_is_left_out(tmp_path: Path) -> None:
    now = 0  # frozen just then
    assert lying(tmp_path / "a.db", segment(0, read=now), segment(1, read=now)) is None
    for n, kept in enumerate(([0, 2], [1], [0, 1, 3], [7, 0])):
        found = lying(tmp_path / f"{n}.db", *(segment(index, read=now) for index in kept))
        assert found is not None and found.code == "verify.segment-missing"


def test_members_that_were_read_before_the_segment_before(tmp_path: Path) -> None:
    """Who withdrew meanwhile would be in it, and a trace would not show it."""
    found = lying(tmp_path / "a.db", segment(0, read=0), segment(1, read=5))
    assert found is not None and found.code == "verify.members-read-too-early"


def test_a_class_whose_thresholds_are_scaled(tmp_path: Path) -> None:
    whole = ContributionTerms("clinical", "ecg", 0, 0)
    assert lying(tmp_path / "a.db", segment(0, read=0), scales={whole: 1.0, STRICT: 0.5}) is None
    found = lying(tmp_path / "b.db", segment(0, read=0), scales={whole: 0.05, STRICT: 0.5})
    assert found is not None and found.code == "verify.class-account-scaled"


def test_a_scale_that_shrinks_on_the_way(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1), contribution(2, terms=STRICT)])
    for index, scale in enumerate((0.5, 0.1)):
        story.epoch(RUNS[0], [segment(index, read=story.ledger.size)], scales={USUAL: 1.0, STRICT: scale})
    story.sign()
    found = verify(story.ledger.store).problem
    story.ledger.close()
    assert found is not None and found.code == "verify.account-scale-changed"


def test_a_class_that_goes_and_comes_back_looser(path: str, whole: Template) -> None:
    """It promised something: leaving it out needs two signatures like any other loosening."""
    before = leaves.decode_leaf(leaf(path, whole.at["policy"])).record
    assert isinstance(before, PolicyChange)
    gone = dataclasses.replace(
        before, presets=tuple(each for each in PRESETS if each.public), previous=policy_record_digest(before)
    )
    rewritten(path, appended(gone))
    named(path, whole.size, "policy", "ledger.policy-loosened")
    rewritten(path, replacing(whole.size, signatures=signed_by(gone, LEDGER, AUDITOR).signatures))
    assert verify(path).verified


def test_whoever_signs_as_two_is_told_of(path: str, whole: Template) -> None:
    """The keeper names an auditor himself, and signs for both."""
    before = leaves.decode_leaf(leaf(path, whole.at["policy"])).record
    auditor = Key(name="auditor.example/2", x=OTHER.public.x, role=Role.AUDITOR)
    rewritten(path, appended(KeyEvent(change=KeyChange.ADD, key=auditor, effective=START)))
    lower = PolicyChange(
        floors=LedgerFloors(clip_norm=1, noise_multiplier=1),
        presets=PRESETS,
        policy=digest("low"),
        previous=policy_record_digest(before),
    )
    rewritten(path, appended(signed_by(lower, LEDGER, OTHER)))
    found = verify(path)
    assert found.verified and any(f"leaf {whole.size + 1}" in note and "does not name" in note for note in found.notes)


def test_a_class_without_signed_members_is_not_charged(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    (seq,) = (story.epoch(RUNS[0], [segment(0, read=1)], change=lambda made: dataclasses.replace(made, accounts=())),)
    story.sign()
    found = verify(story.ledger.store).problem
    story.ledger.close()
    assert found is not None and (found.index, found.code) == (seq, "verify.trained-class-not-charged")


def test_an_auditor_who_has_only_the_new_key_knows_the_old_checkpoints(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    old = story.ledger.checkpoint()
    new = key("the next one")
    event = KeyEvent(
        change=KeyChange.ROTATE,
        key=Key(name=ORIGIN, x=new.public.x, role=Role.LEDGER),
        target=LEDGER.public.id,
        effective=int(story.clock.now),
    )
    story.ledger.append([event])
    story.ledger.checkpoint()
    store = story.ledger.store
    with Ledger.open(tmp_path / "a.db", new, clock=story.clock) as ledger:
        ledger.append(
            [
                PolicyChange(
                    floors=ledger.header.floors,
                    presets=PRESETS,
                    policy=digest("p"),
                    previous=policy_record_digest(ledger.header),
                )
            ]
        )
        ledger.checkpoint()
    found = verify(store, trust=Trust(plain=(new.public,)), seen=[old])
    assert found.problem is None and found.trusted
    stranger = verify(store, trust=Trust(plain=(OTHER.public,)), seen=[old])
    assert not stranger.verified
    story.ledger.close()


def test_a_segment_that_read_nothing_hides_nobody(tmp_path: Path) -> None:
    """Beside the real segments, one that was given up and read the header alone: whoever is eligible in any counts."""
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1, ALICE, STRICT), contribution(2)])
    story.later(HOUR)
    story.epoch(RUNS[0], [segment(0, read=story.ledger.size)])
    story.later(HOUR)
    beside = segment(0, 1, read=1, outcome=SegmentOutcome.ABANDONED)
    seq = story.epoch(RUNS[0], [beside, segment(1, read=story.ledger.size)], scales={USUAL: 1.0})
    found = verify(story.ledger.store).problem
    assert found is not None and (found.index, found.kind) == (seq, "epoch")
    assert found.code == "verify.account-missing" and "clinical/500000/4000000" in found.reason
    story.ledger.close()


def test_what_a_run_has_charged_it_does_not_forget(tmp_path: Path) -> None:
    """An epoch in which nobody was eligible comes between."""
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1, ALICE, STRICT), contribution(2)])
    story.later(HOUR)
    story.epoch(RUNS[0], [segment(0, read=story.ledger.size)])
    story.later(HOUR)
    story.epoch(RUNS[0], [segment(0, 1, read=1, outcome=SegmentOutcome.ABANDONED)], scales={USUAL: 1.0})
    story.later(HOUR)
    seq = story.epoch(RUNS[0], [segment(1, read=story.ledger.size)], scales={USUAL: 1.0})
    found = verify(story.ledger.store).problem
    assert found is not None and (found.index, found.kind) == (seq, "epoch")
    story.ledger.close()


@pytest.mark.parametrize("hidden", [False, True])
def test_the_strictest_promise_of_all_segments_holds(tmp_path: Path, hidden: bool) -> None:
    story = begin(str(tmp_path / "a.db"))
    story.later(HOUR)
    strict = (dataclasses.replace(PRESETS[0], noise_multiplier=400_000_000), *PRESETS[1:])
    header = story.ledger.header
    change = PolicyChange(
        floors=header.floors, presets=strict, policy=digest("p"), previous=policy_record_digest(header)
    )
    story.ledger.append([change])
    story.later(HOUR)
    segments = [segment(0, 1, read=story.ledger.size), segment(1, read=story.ledger.size, after=1)]
    first = [segment(0, read=1, outcome=SegmentOutcome.ABANDONED)] if hidden else []
    seq = story.epoch(RUNS[0], [*first, *segments], scales={ContributionTerms("clinical", "ecg", 0, 0): 1.0})
    story.sign()
    found = verify(story.ledger.store).problem
    assert found is not None and (found.index, found.code) == (seq, "verify.bound-exceeded")
    story.ledger.close()
