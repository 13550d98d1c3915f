"""An auditor's attacks: each is carried out on the store of a real ledger, and named by what it is.

By hands of three kinds: who can write the file and no more; who also makes the tree fit again; and who has the key of
the ledger and signs everything anew. What the last one may do without being found out in the ledger itself is found out
by whoever has seen a checkpoint before, or knows the key.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from build import (
    ALICE,
    BOB,
    CAROL,
    HOUR,
    OPEN,
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
    policy_digest,
    segment,
    signed_by,
)
from forge import all_leaves, appended, asked, changed, leaf, relinked, replacing, rewritten, sealed, sql
from making import AUDITOR, GOVERNING, LEDGER, ORIGIN, OTHER, SECOND, START, WITNESS, Clock, authorised, digest, key
from refusals import raises_code

from lamina import cbor
from lamina.ledger import records as leaves
from lamina.ledger.governance_records import (
    Aggregate,
    ClassBounds,
    ClassTotal,
    Key,
    KeyChange,
    KeyEvent,
    KeyEvents,
    LeafSpan,
    LedgerFloors,
    PolicyChange,
    Role,
    Withdrawal,
    WithdrawalReason,
)
from lamina.ledger.merkle import leaf_hash
from lamina.ledger.records import KIND_NAMES, ContributionTerms, Epoch, SegmentOutcome
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, add_cosignature
from lamina.ledger.store.rows import StoredLeaf
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Finding, KnownCheckpoint, Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey
from lamina.sign.notes import NoteKey

MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),), plain=(GOVERNING.public,))


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


def record(path: str, seq: int) -> Any:
    return leaves.decode_leaf(leaf(path, seq)).record


def part(items: tuple[Any, ...], which: int, **changes: Any) -> tuple[Any, ...]:
    """The same with one of them changed."""
    return tuple(dataclasses.replace(each, **changes) if at == which else each for at, each in enumerate(items))


_LOW = LedgerFloors(clip_norm=1, noise_multiplier=1)
LOWER_FLOORS = PolicyChange(
    floors=_LOW, presets=PRESETS, policy=policy_digest(_LOW)
)  # protects less than what was promised


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    """A ledger that a test goes on with."""
    made = begin(str(tmp_path / "a.db"))
    yield made
    made.ledger.close()


def signed_and_named(story: Story, index: int, kind: str, code: str, **options: object) -> None:
    story.sign()
    named(story.ledger.name, index, kind, code, **options)


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
    data = bytearray(leaf(path, 9).leaf)
    data[60] ^= 1
    sql(path, "UPDATE leaf SET data = ? WHERE seq = 9", bytes(data))
    named(path, 9, "contribution", "verify.leaf-edited")
    sql(path, "UPDATE leaf SET (data, body) = (?, ?) WHERE seq = 9", *changed(leaf(path, 10), seq=9))
    named(path, 9, "contribution", "verify.leaf-edited", signatures=False)


@pytest.mark.parametrize("kind", ["epoch", "withdrawal", "policy", "revocation", "release", "late"])
def test_edited_whatever_it_is(path: str, whole: Template, kind: str) -> None:
    seq = whole.at[kind]
    body = bytearray(leaf(path, seq).body or b"")
    for place in (5, len(body) // 2, len(body) - 1):
        body[place] ^= 1
        sql(path, "UPDATE leaf SET body = ? WHERE seq = ?", bytes(body), seq)
        named(path, seq, "leaf", "verify.body-edited")
        body[place] ^= 1
    sql(path, "UPDATE leaf SET body = NULL WHERE seq = ?", seq)
    assert (problem(path).index, problem(path).code) == (seq, "verify.body-missing")
    sql(path, "UPDATE leaf SET body = ? WHERE seq = ?", bytes(body), seq)
    old = leaves.decode_leaf(leaf(path, seq))
    sql(path, "UPDATE leaf SET (data, body) = (?, ?) WHERE seq = ?", *changed(leaf(path, seq), time=old.time + 1), seq)
    assert problem(path).index == seq


def test_edited_header(path: str) -> None:
    sql(path, "UPDATE leaf SET (data, body) = (?, ?) WHERE seq = 0", *changed(leaf(path, 0), accountant="zcdp"))
    named(path, 0, "header", "ledger.header-not-signed")


@pytest.mark.parametrize(
    ("statement", "index", "kind", "code"),
    [
        *((f"DELETE FROM leaf WHERE seq = {seq}", seq, "leaf", "verify.leaf-missing") for seq in (1, 12, 41, 54)),
        ("DELETE FROM leaf WHERE seq = 0", 0, "leaf", "verify.header-missing"),
        ("DELETE FROM leaf WHERE seq BETWEEN 10 AND 20", 10, "leaf", "verify.leaf-missing"),
        ("UPDATE checkpoint SET seal = zeroblob(96) WHERE size = 55", 54, "checkpoint", "verify.receipt-signature-invalid"),
        ("UPDATE checkpoint SET size = 30 WHERE size = 55", 1, "checkpoint", "verify.checkpoint-wrong-size"),
    ],
)  # fmt: skip
def test_one_statement(path: str, statement: str, index: int, kind: str, code: str) -> None:
    sql(path, statement)
    named(path, index, kind, code)


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
    sql(path, "INSERT INTO leaf SELECT 12, data, body FROM leaf WHERE seq = 11")
    sql(path, "UPDATE head SET size = size + 1")
    assert problem(path).index == 12


def test_inserted_at_the_end(path: str, whole: Template) -> None:
    sql(path, "INSERT INTO leaf VALUES (?, ?, ?)", whole.size, *changed(leaf(path, 11), seq=whole.size))
    named(path, whole.size, "leaf", "verify.leaf-beyond-head")


def test_reordered(path: str) -> None:
    one, two = leaf(path, 11), leaf(path, 12)
    sql(path, "UPDATE leaf SET (data, body) = (?, ?) WHERE seq = 12", *one)
    sql(path, "UPDATE leaf SET (data, body) = (?, ?) WHERE seq = 11", *two)
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
    named(path, 40, "epoch", "ledger.segment-from-future", signatures=False)
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
    at = whole.at
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


# ------------------------------------------------------------------------------ who has the key


def test_rolled_back(story: Story, tmp_path: Path) -> None:
    """An old copy of the file is a good ledger; only who saw a later one knows."""
    story.admit([contribution(1)])
    story.sign()
    old = str(tmp_path / "old.db")
    sql(story.ledger.name, "VACUUM INTO ?", old)
    story.admit([contribution(2)])
    seen = story.sign()
    assert verify(story.ledger.name, trust=MINE, seen=[seen]).verified
    assert verify(old, trust=MINE).verified
    named(old, 5, "seen", "verify.ledger-rolled-back", trust=MINE, seen=[seen])


def test_forked(path: str, whole: Template) -> None:
    """Signed by the ledger's own key, and not what was seen."""
    rewritten(path, replacing(whole.at["release"], manifest=digest("another")))
    assert verify(path, trust=MINE).verified
    named(path, 44, "seen", "verify.ledger-forked", trust=MINE, seen=whole.signed)
    named(path, 0, "seen", "verify.ledger-forked", seen=[KnownCheckpoint.parse(whole.signed[-1])])
    assert verify(path, trust=MINE, seen=whole.signed[:3]).verified  # up to there it is the same


def test_signed_anew_by_another_key(path: str, whole: Template) -> None:
    mine = Key(name=ORIGIN, x=OTHER.public.x, role=Role.LEDGER)
    keys = (mine, *record(path, 0).keys[1:])
    rewritten(path, replacing(0, keys=keys), OTHER, chained=False)
    named(path, 0, "header", "ledger.header-not-signed")  # its owners did not name that key
    rewritten(path, lambda data: data, OTHER)
    assert verify(path).verified  # consistent in itself, by owners who did
    assert not verify(path).trusted
    named(path, 0, "trust", "verify.trusted-signature-missing", trust=MINE)
    named(path, None, "seen", "verify.known-checkpoint-of-other-key", seen=whole.signed)
    named(path, 0, "seen", "verify.ledger-forked", trust=MINE, seen=whole.signed)


def test_signed_by_a_key_that_the_header_does_not_name(path: str) -> None:
    rewritten(path, lambda data: data, OTHER)
    named(path, 0, "checkpoint", "verify.checkpoint-unsigned")


Given = dict[str, Any] | Callable[[Any, dict[str, int]], dict[str, Any]]  # of the record, and of the leaves by name


def spend_times(factor: float) -> Given:
    return lambda old, at: {"accounts": part(old.accounts, 1, spend=round(old.accounts[1].spend * factor))}


def other_account(which: int, **changes: Any) -> Given:
    return lambda old, at: {"accounts": part(old.accounts, which, **changes)}


def fewer_steps(old: Epoch, at: dict[str, int]) -> dict[str, Any]:
    """The charges say less than the plan takes."""
    charges = tuple(dataclasses.replace(each, steps=each.steps - 10) for each in old.accounts[1].charges)
    return {"accounts": part(old.accounts, 1, charges=charges)}


@pytest.mark.parametrize(
    ("where", "changes", "found", "code"),
    [
        (9, {"expires": START + 9 * YEAR}, 9, "verify.attestation-window-differs"),
        (34, {"subject": digest("another")}, 34, "verify.attestation-subject-differs"),
        (34, {"subject": None}, 34, "verify.attestation-subject-differs"),
        (9, {"key": BOB.public.id}, 9, "verify.attestation-of-other-key"),
        # The keeper says other terms than were signed: above all that a private contribution is public, and has no ε.
        (9, {"terms": OPEN}, 9, "verify.attestation-public-differs"),
        (34, {"terms": USUAL}, 34, "verify.attestation-public-differs"),
        (9, {"terms": dataclasses.replace(USUAL, data_class="eeg")}, 9, "verify.attestation-data-class-differs"),
        (9, {"terms": STRICT}, 9, "verify.attestation-clip-norm-differs"),
        (8, {"terms": dataclasses.replace(STRICT, clip_norm=200_000)}, 8, "verify.attestation-clip-norm-differs"),
        (9, {"terms": dataclasses.replace(USUAL, noise_multiplier=9**7)}, 9, "verify.attestation-noise-differs"),
        (9, {"terms": dataclasses.replace(USUAL, profile=None)}, 9, "verify.attestation-depth-differs"),
        (9, {"anchor": digest("another")}, 9, "verify.attestation-anchor-differs"),
        (34, {"anchor": None}, 34, "verify.attestation-anchor-differs"),
        ("late", {"time": START}, "late", "verify.time-falls"),
        (0, {"accountant": "zcdp"}, "epoch", "verify.spend-under-reported"),
        (0, {"profile_schema": 99}, 0, "verify.profile-schema-unknown"),
        (0, {"granularity": 1}, "redone", "ledger.epoch-too-many-segments"),
        ("run two", spend_times(0.9999), "run two", "verify.spend-under-reported"),
        ("run two", spend_times(0.999), "run two", "verify.spend-under-reported"),
        ("run two", spend_times(1.001), "run two", "verify.spend-over-reported"),
        ("run two", spend_times(1e-9), "run two", "verify.spend-falls"),
        ("redone", fewer_steps, "redone", "verify.charge-differs-from-plan"),
        ("redone", other_account(1, charges=()), "redone", "verify.charge-differs-from-plan"),
        # An attempt that was given up is hidden: its noise was seen, and charged means spent.
        ("redone", lambda old, at: {"segments": old.segments[1:]}, "redone", "verify.charge-differs-from-plan"),
        ("epoch", other_account(1, scale=0.25), "epoch", "verify.charge-differs-from-plan"),
        ("epoch", other_account(0, scale=0.75), "epoch", "verify.clip-norm-above-signed"),
        ("redone", lambda old, at: {"accounts": old.accounts[1:]}, "redone", "verify.account-missing"),
        ("redone", {"accounts": ()}, "redone", "verify.account-missing"),
        ("epoch", {"state": digest("state")}, "epoch", "verify.accountant-state-differs"),
        ("run two", {"previous": digest("strange")}, "run two", "verify.previous-checkpoint-unknown"),
        ("run two", {"previous": None}, "run two", "verify.previous-checkpoint-older"),
        (
            "redone",
            lambda old, at: {"segments": part(old.segments, 2, eligibility=at["withdrawal"])},
            "redone",
            "verify.withdrawal-ignored",
        ),
        (
            "epoch",
            lambda old, at: {"segments": part(old.segments, 0, eligibility=at["epoch"] + 1)},
            "epoch",
            "ledger.segment-from-future",
        ),
        (
            "redone",
            lambda old, at: {"segments": part(old.segments, 2, last=200)},
            "redone",
            "verify.segment-beyond-plan",
        ),
        ("release", {"runs": (digest("ghost")[:16],)}, "release", "verify.release-of-unknown-run"),
        ("release", {"not_after": 5}, "release", "verify.release-expired"),
        ("release", {"runs": (RUNS[0], RUNS[0])}, "release", "verify.release-run-twice"),
    ],
)
def test_a_leaf_says_something_else(
    path: str, whole: Template, where: int | str, changes: Given, found: int | str, code: str
) -> None:
    """In a tree that fits, signed by the ledger."""
    seq, index = (each if isinstance(each, int) else whole.at[each] for each in (where, found))
    given = changes(record(path, seq), whole.at) if callable(changes) else changes
    rewritten(path, replacing(seq, **given), chained="previous" not in given)
    named(path, index, KIND_NAMES[type(record(path, index))], code)


def another_key(who: PrivateKey, role: Role, name: str = "x") -> Key:
    return Key(name=name, x=who.public.x, role=role)


@pytest.mark.parametrize(
    ("made", "kind", "code"),
    [
        (lambda path: record(path, 47), "contribution", "verify.descriptor-repeated"),
        (
            lambda path: dataclasses.replace(record(path, 47), descriptor=digest("another")),
            "contribution",
            "verify.attestation-repeated",
        ),
        (
            lambda path: dataclasses.replace(record(path, 34), descriptor=digest("another"), attestation=digest("other"),
                                             expires=START + 9 * YEAR),
            "contribution",
            "verify.subject-repeated",
        ),
        (lambda path: record(path, 41), "epoch", "verify.attempt-repeated"),
        (lambda path: record(path, 0), "header", "ledger.second-header"),
        *(
            (Withdrawal(target=target, reason=WithdrawalReason.DATA), "withdrawal", "verify.withdrawal-of-no-contribution")
            for target in (0, 1, 41, 10**6)
        ),
        (Withdrawal(target=9, reason=WithdrawalReason.DATA), "withdrawal", "verify.withdrawn-twice"),
        (
            KeyEvent(change=KeyChange.REVOKE, target=LEDGER.public.id, effective=START + 2 * YEAR),
            "key",
            "ledger.last-signing-key",
        ),
        (KeyEvent(change=KeyChange.REVOKE, target=digest("ghost"), effective=START), "key", "ledger.key-unknown"),
        (
            KeyEvent(change=KeyChange.ADD, key=another_key(OTHER, Role.LEDGER, "another.example"), effective=START),
            "key",
            "ledger.ledger-key-name",
        ),
        (
            KeyEvent(change=KeyChange.ROTATE, key=another_key(OTHER, Role.AUDITOR), target=LEDGER.public.id, effective=START),
            "key",
            "ledger.rotation-changes-role",
        ),
        (
            KeyEvent(change=KeyChange.ADD, key=another_key(ALICE, Role.AUDITOR), effective=START),
            "key",
            "ledger.key-role-changed",
        ),
        (
            KeyEvent(change=KeyChange.ROTATE, key=another_key(ALICE, Role.CONTRIBUTOR), target=CAROL.public.id, effective=START),
            "key",
            "ledger.rotation-to-known-key",
        ),
    ],
)  # fmt: skip
def test_a_leaf_too_many(path: str, whole: Template, made: Any, kind: str, code: str) -> None:
    made = made(path) if callable(made) else made
    rewritten(path, appended(asked(made) if isinstance(made, KeyEvent) else made))
    named(path, whole.size, kind, code, signatures=False)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"origin": "other.example"}, "verify.attestation-for-other-ledger"),
        ({"ledger": digest("another header")}, "verify.attestation-bound-elsewhere"),
        ({"who": key("stranger")}, "verify.key-unknown"),
        ({"who": AUDITOR}, "verify.key-wrong-role"),
        ({"number": 2, "terms": STRICT}, "verify.token-repeated"),  # one nonce under two descriptors
    ],
)
def test_an_attestation_that_does_not_count(story: Story, given: dict[str, Any], code: str) -> None:
    _, seq = story.slip([contribution(2), contribution(**{"number": 1, **given})])
    signed_and_named(story, seq, "contribution", code)
    if code == "verify.key-wrong-role":
        named(story.ledger.name, seq, "contribution", code, signatures=False)


def test_a_leaf_of_another_class_than_was_signed(tmp_path: Path) -> None:
    """The bound is the same, so nothing but the attestation shows it."""
    research = dataclasses.replace(PRESETS[0], cls="research")
    story = begin(str(tmp_path / "a.db"), presets=(*PRESETS, research))
    made = contribution(1)
    made.record = dataclasses.replace(made.record, terms=dataclasses.replace(USUAL, cls="research"))
    (seq,) = story.admit([made])
    signed_and_named(story, seq, "contribution", "verify.attestation-class-differs")
    story.ledger.close()


def test_the_window_ends_for_the_verifier_when_it_ends_for_the_gate(tmp_path: Path) -> None:
    """To the second, one alone and among many; the begin has the margin of the gate."""
    late, soon = "verify.admitted-after-expiry", "verify.admitted-before-valid"
    for begins, ends, count, code in (
        (-HOUR, 0, 1, late), (-HOUR, -1, 20, late), (-HOUR, 1, 20, None),
        (120, HOUR, 20, None), (121, HOUR, 20, soon), (121, HOUR, 1, soon),
    ):  # fmt: skip
        story = begin(str(tmp_path / f"{begins} {ends} {count}.db"))
        made = (contribution(n, at=START + HOUR + begins, expires=START + ends) for n in range(count))
        first, *_ = story.slip(made)
        story.sign()
        found = verify(story.ledger.name, signatures=False).problem
        assert (found and (found.index, found.code)) == (code and (first, code))
        story.ledger.close()


def test_back_dated_before_it_was_signed(story: Story) -> None:
    """The time of the leaf fits its neighbours, and is before its attestation was made."""
    path = story.ledger.name
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


def test_wrong_accountant_in_the_records(tmp_path: Path) -> None:
    """The header says pld, whoever wrote the epochs asked rdp."""
    story = begin(str(tmp_path / "a.db"), accountant="pld")
    story.admit([contribution(1), contribution(2, terms=STRICT)])
    story.spending.accountant = "rdp"
    seq = story.epoch(RUNS[0], [segment(0, read=6)])
    signed_and_named(story, seq, "epoch", "verify.spend-over-reported")


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
def test_a_plan_that_the_policy_does_not_allow(story: Story, changes: dict[str, object], code: str) -> None:
    story.admit([contribution(1)])
    base = plan()
    odd = dataclasses.replace(base.classes[0], **changes)  # type: ignore[arg-type]
    clip = ((float("inf"),) * 4, base.clip[1]) if odd.public else base.clip
    made = plan(classes=(odd, base.classes[1]), clip=clip)
    scales = {dataclasses.replace(USUAL, cls=odd.name): 1.0} if not odd.public else {USUAL: 1.0}
    seq = story.epoch(RUNS[0], [segment(0, read=5)], of=made, scales=scales)
    signed_and_named(story, seq, "epoch", code)


def test_more_than_was_signed(story: Story) -> None:
    """Every number is right, and the sum over runs is above a signed bound."""
    loud = plan(1000, noise=(0.0, 0.0, 1.0, 1.0))
    story.admit([contribution(1)])
    first = story.epoch(RUNS[0], [segment(0, read=5, length=300)], of=loud, scales={USUAL: 1.0})
    story.sign()
    assert verify(story.ledger.name).verified
    second = story.epoch(RUNS[1], [segment(0, read=first, length=900)], of=loud, scales={USUAL: 1.0})
    signed_and_named(story, second, "epoch", "verify.bound-exceeded")


@pytest.mark.parametrize(
    ("signers", "code"),
    [
        ((), "ledger.not-authorised"),
        ((LEDGER,), "ledger.authorising-signature-invalid"),
        ((GOVERNING,), "ledger.policy-loosened"),
        ((GOVERNING, GOVERNING), "ledger.policy-loosened"),
        ((GOVERNING, OTHER), "ledger.authorising-signature-invalid"),
        ((GOVERNING, LEDGER), "ledger.authorising-signature-invalid"),
        ((GOVERNING, AUDITOR), "ledger.authorising-signature-invalid"),
        ((GOVERNING, SECOND), None),
    ],
)
def test_floor_lowered(path: str, whole: Template, signers: tuple[PrivateKey, ...], code: str | None) -> None:
    rewritten(path, appended(asked(LOWER_FLOORS, *signers) if signers else LOWER_FLOORS))
    assert verify(path).verified if code is None else named(path, whole.size, "policy", code) is None


def test_a_looser_policy_that_was_taken_back_is_not_adopted_again(path: str, whole: Template) -> None:
    """Two signed for it once; whoever keeps the ledger has their signatures still."""
    rewritten(path, appended(asked(LOWER_FLOORS, GOVERNING, SECOND)))
    signed = record(path, whole.size)
    rewritten(path, appended(asked(record(path, whole.at["policy"]))))
    assert verify(path).verified
    rewritten(path, appended(signed), chained=False)
    named(path, whole.size + 2, "policy", "ledger.authorised-out-of-turn")


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
def test_a_bound_that_the_policy_does_not_allow(story: Story, terms: ContributionTerms, code: str) -> None:
    many = [contribution(n, BOB) for n in range(40)]
    *_, seq = story.slip([*many, contribution(99, terms=terms)])
    story.slip(contribution(n, terms=terms) for n in range(100, 140))  # as a column, too
    signed_and_named(story, seq, "contribution", code)


@pytest.mark.parametrize(
    ("presets", "changes"),
    [
        # The plan says that the class reaches the top half, and gives it a threshold for a layer below.
        (PRESETS, {"clip": ((0.0, 0.1, 0.7, 0.5), (float("inf"),) * 4), "noise": (0.0, 4.0, 4.0, 4.0)}),
        (
            (PRESETS[0], dataclasses.replace(PRESETS[1], profile="top=0.5")),
            {"classes": part(plan().classes, 1, profile="top 50 %")},
        ),
    ],
    ids=["private", "public"],
)
def test_a_class_that_reaches_outside_its_profile(
    tmp_path: Path, presets: tuple[ClassBounds, ...], changes: dict[str, Any]
) -> None:
    story = begin(str(tmp_path / "a.db"), presets=presets)
    story.admit(contribution(n) for n in range(3))
    story.later(2 * HOUR)
    seq = story.epoch(RUNS[0], [segment(0, read=story.ledger.size)], of=plan(**changes), scales={USUAL: 1.0})
    signed_and_named(story, seq, "epoch", "verify.layer-outside-profile")


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
    sql(path, "INSERT INTO evidence VALUES (?, ?)", whole.size, old.attestation)
    rewritten(path, appended(old.record))
    assert verify(path).verified
    new = contribution(78, BOB, at=now)
    rewritten(path, appended(new.record))
    sql(path, "INSERT INTO evidence VALUES (?, ?)", whole.size + 1, new.attestation)
    named(path, whole.size + 1, "contribution", "verify.key-replaced")


def test_an_attestation_that_was_bent(path: str) -> None:
    ((data,),) = sql(path, "SELECT data FROM evidence WHERE seq = 9")
    sql(path, "UPDATE evidence SET data = ? WHERE seq = 9", data[:-1] + bytes([data[-1] ^ 1]))
    named(path, 9, "contribution", "verify.attestation-swapped")
    assert verify(path, signatures=False).verified
    sql(path, "DELETE FROM evidence WHERE seq = 9")
    named(path, 9, "contribution", "verify.attestation-missing")


def test_an_attestation_of_something_else(path: str) -> None:
    ((data,),) = sql(path, "SELECT data FROM evidence WHERE seq = 12")
    other = record(path, 12)
    sql(path, "UPDATE evidence SET data = ? WHERE seq = 9", data)
    rewritten(path, replacing(9, attestation=other.attestation, key=other.key))
    named(path, 9, "contribution", "verify.attestation-signature-invalid")


def test_a_leaf_that_is_not_canonical(path: str) -> None:
    """The same record in another encoding, in a tree that fits, signed by the ledger."""
    forms = {
        "a longer number": lambda data: data.replace(b"\x02\x09\x03", b"\x02\x18\x09\x03", 1),
        "an unknown key": lambda data: b"\xab" + data[1:] + b"\x0c\x00",
        "something behind": lambda data: data + b"\x00",
        "an unknown kind": lambda data: b"\xaa\x01\x09" + data[3:],
        "nothing at all": lambda data: b"",
        "a list": lambda data: cbor.encode([1, 2, 3]),
    }
    original = all_leaves(path)
    for name, form in forms.items():
        bent = StoredLeaf(form(original[9].leaf), original[9].body)
        assert bent != original[9], name
        rewritten(path, lambda data, bent=bent: [bent if at == 9 else one for at, one in enumerate(original)])
        found = problem(path, signatures=False)
        assert (found.index, found.kind) == (9, "leaf"), (name, found)


def test_a_ledger_without_a_header(path: str) -> None:
    data = leaves.decode_leaf(leaf(path, 9))
    sql(path, "UPDATE leaf SET (data, body) = (?, ?) WHERE seq = 0", *leaves.encode_leaf(data.record, 0, data.time, 0))
    named(path, 0, "contribution", "verify.header-missing")


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
        event = KeyEvents(events=(_new_key(change, START),))
        with Ledger.open(path, OTHER, clock=Clock(START + 4 * YEAR)) as ledger, raises_code("ledger.not-authorised"):
            ledger.append([event])
        rewritten(path, appended(event), None)
        sealed(path, OTHER)
        named(path, whole.size, "key", "ledger.not-authorised")


@pytest.mark.parametrize("change", [KeyChange.ROTATE, KeyChange.REVOKE])
def test_a_key_that_was_put_out_lets_itself_in_again(path: str, whole: Template, change: KeyChange) -> None:
    """Its thief writes that it was added again, and signs that with it."""
    clock = Clock(START + 4 * YEAR)
    new = _new_key(KeyChange.ROTATE if change is KeyChange.ROTATE else KeyChange.ADD, START)
    gone = KeyEvent(change=KeyChange.REVOKE, target=LEDGER.public.id, effective=int(clock.now))
    with Ledger.open(path, OTHER, clock=clock) as ledger:
        ledger.append([authorised(ledger, [new, gone] if change is KeyChange.REVOKE else new)])
        ledger.checkpoint()
        ledger.append([Withdrawal(target=10, reason=WithdrawalReason.REQUEST)])
        ledger.checkpoint()
        size = ledger.size
        again = KeyEvent(
            change=KeyChange.ADD, key=Key(name=ORIGIN, x=LEDGER.public.x, role=Role.LEDGER), effective=START
        )
        by_itself = authorised(ledger, again, LEDGER)
    rewritten(path, appended(by_itself), None)
    sealed(path, LEDGER)
    code = "ledger.key-was-revoked" if change is KeyChange.REVOKE else "ledger.authorising-signature-invalid"
    named(path, size, "key", code)


def test_a_seal_by_a_key_that_was_revoked(path: str, whole: Template) -> None:
    """The checkpoint is signed as it must be; receipts would be by a key that counts no more."""
    clock = Clock(START + 4 * YEAR)
    with Ledger.open(path, LEDGER, clock=clock) as ledger:
        ledger.append([authorised(ledger, _new_key(KeyChange.ADD, START))])
        ledger.checkpoint()
    gone = KeyEvent(change=KeyChange.REVOKE, target=LEDGER.public.id, effective=int(clock.now))
    with Ledger.open(path, OTHER, clock=clock) as ledger:
        ledger.append([authorised(ledger, gone)])
    sealed(path, OTHER, seal=LEDGER)
    named(path, whole.size + 1, "checkpoint", "verify.receipt-signature-invalid")
    sealed(path, OTHER)
    assert verify(path).verified


def test_a_key_of_the_ledger_that_was_rotated(path: str, whole: Template) -> None:
    clock = Clock(START + 4 * YEAR)
    with Ledger.open(path, LEDGER, clock=clock) as ledger:
        ledger.append([authorised(ledger, _new_key(KeyChange.ROTATE, START + 4 * YEAR + HOUR), LEDGER)])
        ledger.checkpoint()
    clock.now += 2 * HOUR
    with Ledger.open(path, OTHER, clock=clock) as ledger:
        ledger.append([Withdrawal(target=10, reason=WithdrawalReason.REQUEST)])
        ledger.checkpoint()
    assert verify(path, trust=MINE, seen=whole.signed).trusted  # a trusted key vouched for the new one
    assert verify(path, trust=Trust(plain=(OTHER.public,))).verified  # who knows the new one need not know the old
    assert problem(path, trust=Trust(plain=(AUDITOR.public,))).kind == "trust"
    named(path, 0, "trust", "verify.no-trusted-key-for-ledger", trust=Trust())
    # The old key goes on signing: what it signs now does not count.
    rewritten(path, lambda data: data, LEDGER)
    named(path, whole.size + 1, "checkpoint", "verify.key-replaced")


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
    ((text,),) = sql(path, "SELECT text FROM checkpoint WHERE size = 55")
    early = add_cosignature(text, WITNESS, START, "witness.example")
    sql(path, "UPDATE checkpoint SET text = ? WHERE size = 55", early)
    named(path, 54, "checkpoint", "verify.cosigned-before-last-leaf")


# ------------------------------------------------------------------------------ pruning


def _aggregate(path: str, first: int, stop: int, horizon: int, **changes: object) -> Aggregate:
    data = all_leaves(path)[first:stop]
    classes: dict[str, int] = {}
    for one in data:
        cls = leaves.decode_leaf(one).record.terms.cls  # type: ignore[union-attr]
        classes[cls] = classes.get(cls, 0) + 1
    spent = {"clinical": max(account.spend for account in _last_epoch(path).accounts)}
    hashes = b"".join(leaf_hash(one.leaf) for one in data)
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
    sql(path, "UPDATE leaf SET body = NULL WHERE seq BETWEEN 4 AND 40")
    sql(path, "DELETE FROM evidence WHERE seq BETWEEN 4 AND 40")
    found = verify(path)
    assert found.problem is None
    assert found.counts["pruned"] == 37


def test_pruned_beyond_the_horizon(path: str, whole: Template) -> None:
    """The horizon is right, and what is summed up is younger."""
    rewritten(path, appended(_aggregate(path, 4, 41, START)))
    named(path, whole.size, "aggregate", "verify.pruned-beyond-horizon")
    sql(path, "UPDATE leaf SET body = NULL WHERE seq BETWEEN 4 AND 40")
    named(path, whole.size, "aggregate", "verify.pruned-beyond-horizon")


def totals(withdrawn: int, spend: int, others: int = 0) -> dict[str, Any]:
    clinical = ClassTotal(cls="clinical", count=31, withdrawn=withdrawn, spend=spend)
    return {"classes": (clinical, ClassTotal(cls="open", count=6, withdrawn=others, spend=0))}


@pytest.mark.parametrize(
    ("span", "horizon", "changes", "code"),
    [
        ((4, 41), START + HOUR, {"digest": digest("other")}, "verify.aggregate-digest-differs"),
        (
            (4, 41),
            START + HOUR,
            {"classes": (ClassTotal(cls="clinical", count=37, withdrawn=1, spend=0),)},
            "verify.aggregate-count-differs",
        ),
        ((4, 41), START + HOUR, totals(0, 0), "verify.aggregate-withdrawn-differs"),
        ((4, 41), START + HOUR, totals(0, 0, 1), "verify.aggregate-withdrawn-differs"),  # under another class
        ((4, 41), START + HOUR, totals(1, 5), "verify.aggregate-spend-differs"),
        ((4, 41), START + 3 * YEAR, {}, "verify.pruned-before-retention"),
        ((47, 52), START + YEAR, {}, "verify.pruned-before-expiry"),
    ],
)
def test_an_aggregate_that_is_wrong(
    path: str, whole: Template, span: tuple[int, int], horizon: int, changes: dict[str, Any], code: str
) -> None:
    rewritten(path, appended(_aggregate(path, *span, horizon, **changes)))
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
    sql(path, "UPDATE leaf SET body = NULL WHERE seq BETWEEN 4 AND 40")
    named(path, whole.size, "aggregate", "verify.pruned-without-checkpoint")


def test_more_is_gone_than_was_pruned(pruned: Template, tmp_path: Path) -> None:
    path = pruned.copy(tmp_path)
    sql(path, "UPDATE leaf SET body = NULL WHERE seq = 47")
    named(path, 47, "contribution", "verify.body-missing")
    sql(path, "DELETE FROM leaf WHERE seq = 7")
    named(path, 7, "leaf", "verify.leaf-missing")


def test_what_is_left_of_pruned_leaves_is_held_to_tiles_and_checkpoints(pruned: Template, tmp_path: Path) -> None:
    path = pruned.copy(tmp_path)
    ((data,),) = sql(path, "SELECT data FROM tile WHERE id = 0")
    sql(path, "UPDATE tile SET data = ? WHERE id = 0", data[: 32 * 7] + bytes(32) + data[32 * 8 :])
    named(path, 7, "contribution", "verify.leaf-edited")
    sql(path, "DELETE FROM tile WHERE id = 0")
    assert problem(path).kind == "tile"


# ------------------------------------------------------------------------------ an operator who signs what he likes


WHOLE_CLASS = ContributionTerms("clinical", "ecg", 0, 0)


@pytest.mark.parametrize(
    ("reads", "scales", "code"),
    [
        ({0: 0, 1: 0}, None, None),
        ({0: 0, 2: 0}, None, "verify.segment-missing"),
        ({1: 0}, None, "verify.segment-missing"),
        ({0: 0, 1: 0, 3: 0}, None, "verify.segment-missing"),
        ({7: 0, 0: 0}, None, "verify.segment-missing"),
        ({0: 0, 1: 5}, None, "verify.members-read-too-early"),  # who withdrew meanwhile would be in it
        ({0: 0}, {WHOLE_CLASS: 1.0, STRICT: 0.5}, None),
        ({0: 0}, {WHOLE_CLASS: 0.05, STRICT: 0.5}, "verify.class-account-scaled"),
    ],
)
def test_segments_that_a_keeper_writes_down(
    story: Story, reads: dict[int, int], scales: dict[ContributionTerms, float] | None, code: str | None
) -> None:
    """By segment, after how many leaves its members were read; 0 for just then. Each epoch costs what it would."""
    story.admit([contribution(1), contribution(2, terms=STRICT)])
    for index, read in reads.items():
        story.epoch(RUNS[0], [segment(index, read=read or story.ledger.size)], scales=scales)
    story.sign()
    found = verify(story.ledger.store).problem
    assert (found and found.code) == code


def test_a_scale_that_shrinks_on_the_way(story: Story) -> None:
    story.admit([contribution(1), contribution(2, terms=STRICT)])
    for index, scale in enumerate((0.5, 0.1)):
        story.epoch(RUNS[0], [segment(index, read=story.ledger.size)], scales={USUAL: 1.0, STRICT: scale})
    story.sign()
    found = verify(story.ledger.store).problem
    assert found is not None and found.code == "verify.account-scale-changed"


def test_a_class_that_goes_and_comes_back_looser(path: str, whole: Template) -> None:
    """It promised something: leaving it out needs two signatures like any other loosening."""
    before = record(path, whole.at["policy"])
    gone = dataclasses.replace(before, presets=PRESETS[1:])
    rewritten(path, appended(asked(gone)))
    named(path, whole.size, "policy", "ledger.policy-loosened")
    rewritten(path, replacing(whole.size, authorization=asked(gone, GOVERNING, SECOND).authorization))
    assert verify(path).verified


def test_who_keeps_the_ledger_does_not_make_owners(path: str, whole: Template) -> None:
    """The keeper names an owner himself, and signs for two."""
    owner = Key(name="second.example/2", x=OTHER.public.x, role=Role.GOVERNING)
    rewritten(path, appended(asked(KeyEvent(change=KeyChange.ADD, key=owner, effective=START), LEDGER)))
    named(path, whole.size, "key", "ledger.authorising-signature-invalid")
    rewritten(path, replacing(whole.size, authorization=asked(record(path, whole.size)).authorization))
    named(path, whole.size, "key", "ledger.second-signature-missing")


def test_a_class_without_signed_members_is_not_charged(story: Story) -> None:
    (seq,) = (story.epoch(RUNS[0], [segment(0, read=1)], change=lambda made: dataclasses.replace(made, accounts=())),)
    signed_and_named(story, seq, "epoch", "verify.trained-class-not-charged")


def test_an_auditor_who_has_only_the_new_key_knows_the_old_checkpoints(story: Story) -> None:
    old = story.ledger.checkpoint()
    new, target, now = key("the next one"), LEDGER.public.id, int(story.clock.now)
    named_key = Key(name=ORIGIN, x=new.public.x, role=Role.LEDGER)
    story.govern(KeyEvent(change=KeyChange.ROTATE, key=named_key, target=target, effective=now), LEDGER)
    story.ledger.checkpoint()
    store = story.ledger.store
    with Ledger.open(story.ledger.name, new, clock=story.clock) as ledger:
        change = PolicyChange(floors=ledger.header.floors, presets=PRESETS, policy=ledger.header.policy)
        ledger.append([authorised(ledger, change)])
        ledger.checkpoint()
    found = verify(store, trust=Trust(plain=(new.public,)), seen=[old])
    assert found.problem is None
    stranger = verify(store, trust=Trust(plain=(OTHER.public,)), seen=[old])
    assert not stranger.verified


def test_a_segment_that_read_nothing_hides_nobody(story: Story) -> None:
    """Beside the real segments, one that was given up and read the header alone: whoever is eligible in any counts."""
    story.admit([contribution(1, ALICE, STRICT), contribution(2)])
    story.later(HOUR)
    story.epoch(RUNS[0], [segment(0, read=story.ledger.size)])
    story.later(HOUR)
    beside = segment(0, 1, read=1, outcome=SegmentOutcome.ABANDONED)
    seq = story.epoch(RUNS[0], [beside, segment(1, read=story.ledger.size)], scales={USUAL: 1.0})
    found = verify(story.ledger.store).problem
    assert found is not None and (found.index, found.kind) == (seq, "epoch")
    assert found.code == "verify.account-missing" and "clinical@c=0.5,z=4" in found.reason


def test_what_a_run_has_charged_it_does_not_forget(story: Story) -> None:
    """An epoch in which nobody was eligible comes between."""
    story.admit([contribution(1, ALICE, STRICT), contribution(2)])
    story.later(HOUR)
    story.epoch(RUNS[0], [segment(0, read=story.ledger.size)])
    story.later(HOUR)
    story.epoch(RUNS[0], [segment(0, 1, read=1, outcome=SegmentOutcome.ABANDONED)], scales={WHOLE_CLASS: 1.0})
    story.later(HOUR)
    seq = story.epoch(RUNS[0], [segment(1, read=story.ledger.size)], scales={USUAL: 1.0})
    found = verify(story.ledger.store).problem
    assert found is not None and (found.index, found.kind) == (seq, "epoch")


@pytest.mark.parametrize("hidden", [False, True])
def test_the_strictest_promise_of_all_segments_holds(story: Story, hidden: bool) -> None:
    story.later(HOUR)
    strict = (dataclasses.replace(PRESETS[0], noise_multiplier=400_000_000), *PRESETS[1:])
    header = story.ledger.header
    story.govern(PolicyChange(floors=header.floors, presets=strict, policy=header.policy))
    story.later(HOUR)
    again = int(hidden)
    segments = [segment(0, again, read=story.ledger.size), segment(1, read=story.ledger.size, after=again or None)]
    first = [segment(0, read=1, outcome=SegmentOutcome.ABANDONED)] if hidden else []
    seq = story.epoch(RUNS[0], [*first, *segments], scales={ContributionTerms("clinical", "ecg", 0, 0): 1.0})
    signed_and_named(story, seq, "epoch", "verify.bound-exceeded")
