"""Whoever can write the store and has no key: what an honest keeper signs over, and what a verifier makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import pytest
from build import begin, contribution
from forge import sealed
from forger import KEYS, POLICY, TERMS, Forger, add, key_id, rotate
from keyless import put_back, tables_of
from making import GOVERNING, LEDGER, ORIGIN, PARTIES, SECOND, START, Clock, create, digest
from open_charges import insert_row
from refusals import raises_code

from lamina.codec import schema_of
from lamina.ledger.checked_leaves import cut_unsigned
from lamina.ledger.governance_records import GOVERNING_KINDS, Key, Release, Role
from lamina.ledger.store.sqlite import SqliteStore
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger

OWNER, TRAINER, SECRET = (digest("key", name) for name in ("governing", "ledger", "other"))
PINNED = Trust(plain=(GOVERNING.public,))
PERSON = {1: [add(SECRET, 2, "contributor-x", START)]}


def honest(where: str) -> str:
    story = begin(where)
    story.admit(contribution(n) for n in range(3))
    story.sign()
    story.ledger.close()
    return where


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(honest(str(tmp_path_factory.mktemp("honest") / "ledger.db")))


@pytest.fixture
def forged(made: Path, tmp_path: Path) -> Forger:
    """In a file."""
    return Forger(str(shutil.copy(made, tmp_path / "ledger.db")))


@pytest.fixture
def in_store(where: str) -> Forger:
    """In each kind of store."""
    return Forger(honest(where))


def opened(forged: Forger, now: int = START) -> Ledger:
    return Ledger.open(forged.path, LEDGER, clock=Clock(now))


def slip_contribution(forged: Forger) -> None:
    """In the name of somebody who is enrolled, whose key made none of it."""
    one = contribution(9).record
    kept = {
        6: digest("nobody"),
        7: one.expires,
        8: one.terms.cls,
        9: one.terms.clip_norm,
        10: one.terms.noise_multiplier,
    }
    body = {1: one.attestation, 2: one.key, 3: one.not_before, 4: one.terms.data_class}
    seq = forged.append(2, body, kept=kept)
    forged.sql("INSERT INTO evidence (seq, data) VALUES (?, ?)", seq, contribution(9).attestation)


def slip_epoch(forged: Forger) -> None:
    segment = {1: 0, 2: 0, 3: b"n" * 16, 4: 0, 5: 10, 6: 1, 7: 1}
    forged.append(3, {1: b"r" * 16, 2: [segment], 3: digest("plan"), 4: ["1.0"], 5: [], 6: digest("state")})
    forged.sql("UPDATE head SET epoch = 1")


def slip_aggregate(forged: Forger) -> None:
    totals = [{1: "clinical", 2: 1, 3: 0, 4: 0}]
    forged.append(6, {1: [{1: 1, 2: 2}], 2: 0, 3: totals, 4: digest("pruned"), 5: []})


@pytest.mark.parametrize(
    "slip",
    [
        slip_contribution,
        slip_epoch,
        slip_aggregate,
        lambda forged: forged.append(8, {1: digest("a manifest"), 2: [b"r" * 16]}),
    ],
    ids=["contribution", "epoch", "aggregate", "release"],
)
def test_nothing_is_signed_over_that_would_not_verify_or_that_only_the_keeper_writes(
    in_store: Forger, slip: Callable[[Forger], Any]
) -> None:
    slip(in_store)
    with opened(in_store) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()


def test_leave_that_has_ended_is_not_used_by_back_dating(in_store: Forger) -> None:
    in_store.append(KEYS, in_store.governing(KEYS, PERSON, OWNER))
    with opened(in_store, START + 1000) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()
    with opened(in_store, START + 999) as ledger:
        ledger.checkpoint()
    with opened(in_store, START + 1000) as ledger:
        ledger.checkpoint()  # it was signed in time


def killed_keeper(forged: Forger) -> None:
    """A keeper appended a release, and was killed before it signed."""
    with opened(forged) as ledger:
        ledger.append([Release(manifest=digest("a manifest"), runs=(b"r" * 16,))])


def test_what_a_keeper_wrote_who_was_killed_is_signed(in_store: Forger) -> None:
    killed_keeper(in_store)
    with opened(in_store) as ledger:
        ledger.checkpoint()


@pytest.mark.parametrize("change", ["more", "another", "bent"])
def test_the_mark_of_a_keeper_is_for_the_leaves_that_it_wrote(in_store: Forger, change: str) -> None:
    before = tables_of(in_store.path, "leaf", "head", "tile", "meta")
    killed_keeper(in_store)
    ((mark,),) = in_store.sql("SELECT value FROM meta WHERE name = 'written'")
    if change == "bent":
        in_store.sql("UPDATE meta SET value = ? WHERE name = 'written'", mark[:-1] + bytes([mark[-1] ^ 1]))
    elif change == "another":
        put_back(in_store.path, before)
        in_store.append(8, {1: digest("another manifest"), 2: [b"r" * 16]})
        in_store.sql("UPDATE meta SET value = ? WHERE name = 'written'", mark)
    else:
        in_store.append(8, {1: digest("another manifest"), 2: [b"r" * 16]})
    with opened(in_store) as ledger:
        with raises_code("ledger.leaf-not-allowed"):
            ledger.checkpoint()
        ledger.append([contribution(5).record], [contribution(5).attestation])  # a keeper vouches for its own leaves
    with opened(in_store) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()


SECOND_OWNER, THIRD = digest("key", "second governing"), digest("key", "third")
Step = tuple[dict[int, Any], tuple[bytes, ...]]  # a key event, and who signs it
LET_IN: Step = (add(SECRET, 6, "second.example/2", START), (OWNER,))
ONE_OWNER: dict[str, tuple[list[Step], tuple[bytes, bytes]]] = {
    "a second key": ([LET_IN], (OWNER, SECRET)),
    "a third by both": ([LET_IN, (add(THIRD, 6, "third", START), (OWNER, SECRET))], (OWNER, THIRD)),
    "the first is replaced": ([LET_IN, (rotate(OWNER, THIRD, 6, "third", START), (OWNER, SECRET))], (SECRET, THIRD)),
    "in the place of who left": (
        [(rotate(SECOND_OWNER, SECRET, 6, "second.example", START), (OWNER,))],
        (OWNER, SECRET),
    ),
    "who left is let in again": ([(add(SECOND_OWNER, 6, "second.example", START), (OWNER,))], (OWNER, SECOND_OWNER)),
}


def governed(forged: Forger, kind: int, change: dict[int, Any], *signers: bytes) -> None:
    forged.append(kind, forged.governing(kind, change, *signers))
    sealed(forged.path, LEDGER)


@pytest.mark.parametrize("kind", [TERMS, POLICY])
@pytest.mark.parametrize("way", ONE_OWNER)
def test_an_owner_who_lets_another_in_is_still_one(tmp_path: Path, way: str, kind: int) -> None:
    """One owner stands: the key of the second of the header has ended."""
    forged = Forger(str(tmp_path / "ledger.db"))
    left = Key(name="second.example", x=SECOND.public.x, role=Role.GOVERNING, valid_until=START)
    create(forged.path, keys=(*PARTIES, left)).close()
    steps, signers = ONE_OWNER[way]
    for event, by in steps:
        governed(forged, KEYS, {1: [event]}, *by)
    assert verify(forged.path, trust=PINNED).trusted
    header = cbor2.loads(forged.sql("SELECT body FROM leaf WHERE seq = 0")[0][0])
    change = (
        {2: 60} if kind == TERMS else {1: header[6], 2: [header[7][0] | {2: 9_000_000}, *header[7][1:]], 3: header[8]}
    )
    body = forged.governing(kind, change, *signers)
    with opened(forged) as ledger, raises_code("ledger.signed-by-one-owner"):
        ledger.append([schema_of(GOVERNING_KINDS[kind]).from_cbor(body)])
    seq = forged.append(kind, body)
    with opened(forged) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()
    sealed(forged.path, LEDGER)
    found = verify(forged.path, trust=PINNED).problem
    assert found is not None and (found.index, found.code) == (seq, "ledger.signed-by-one-owner")


def test_one_owner_with_two_keys_does_not_put_the_other_owner_out(tmp_path: Path) -> None:
    forged = Forger(str(tmp_path / "ledger.db"))
    late = Key(name="second.example", x=SECOND.public.x, role=Role.GOVERNING, valid_from=START + 100)
    create(forged.path, keys=(*PARTIES, late)).close()
    governed(forged, KEYS, {1: [LET_IN[0]]}, OWNER)
    forged.sql("UPDATE head SET time = ?", START + 100)
    out = {1: [{1: 3, 3: key_id(SECOND_OWNER), 4: START + 100}]}
    governed(forged, KEYS, out, OWNER, SECRET)
    found = verify(forged.path, trust=PINNED).problem
    assert found is not None and found.code == "ledger.signed-by-one-owner"


def test_whom_two_owners_let_in_is_an_owner(forged: Forger) -> None:
    governed(forged, KEYS, {1: [LET_IN[0]]}, OWNER, SECOND_OWNER)
    governed(forged, TERMS, {2: 60}, SECOND_OWNER, SECRET)
    governed(forged, KEYS, {1: [rotate(OWNER, THIRD, 6, "third", START)]}, OWNER, SECRET)
    governed(forged, TERMS, {2: 50}, THIRD, SECRET)
    assert verify(forged.path, trust=PINNED).trusted


def test_a_key_of_the_ledger_replaces_itself_soon_and_once(forged: Forger, made: Path) -> None:
    for effective in ([START + 86_401], [START + 60, START + 60]):
        for n, since in enumerate(effective):
            body = forged.governing(KEYS, {1: [rotate(TRAINER, digest("key", n), 1, ORIGIN, since)]}, TRAINER)
            forged.append(KEYS, body)
            sealed(forged.path, LEDGER)
        found = verify(forged.path)
        assert found.problem is not None and found.problem.code == "ledger.self-rotation-later"
        shutil.copy(made, forged.path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE head SET frontier = 9223372036854775807",
        "UPDATE head SET frontier = 'text'",
        "UPDATE checkpoint SET seal = 9223372036854775807",
        "UPDATE leaf SET body = 1000000000000 WHERE seq = 2",
        "UPDATE evidence SET data = 1000000000000",
        "UPDATE tile SET data = 9e999",
        "INSERT INTO token VALUES (2500000000)",
        "INSERT INTO attempt VALUES (9, 'one', 2, 3)",
        "INSERT INTO run VALUES (7, 8, 'nine', 1)",
        insert_row(run="x'00'", nonce="5", body="2500000000"),
    ],
)
def test_numbers_and_texts_where_bytes_belong(forged: Forger, change: str) -> None:
    """`bytes` of a number are so many zeros."""
    forged.sql(change)
    found = verify(forged.path)
    assert found.problem is not None and found.problem.code == "verify.row-wrong-type"
    if "head" in change:
        with raises_code("store.row-wrong-type"):
            opened(forged)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE head SET size = 1e300",
        "UPDATE head SET time = 'noon'",
        "UPDATE checkpoint SET text = 5",
        "UPDATE checkpoint SET text = x'00'",
    ],
)
def test_values_of_other_types_are_findings(forged: Forger, change: str) -> None:
    forged.sql(change)
    found = verify(forged.path)
    assert found.problem is not None and found.problem.code.startswith("verify.")


@pytest.mark.parametrize("slip", [slip_contribution, slip_epoch, "garbage", "beyond the head"])
def test_the_way_out_is_a_copy_without_what_nobody_signed(
    forged: Forger, tmp_path: Path, slip: Callable[[Forger], Any] | str
) -> None:
    """What a keeper wrote who was killed stays, and so does everything that is signed."""
    with opened(forged) as ledger:
        (kept,) = ledger.append([contribution(6).record], [contribution(6).attestation])
    if slip == "garbage":
        seq = forged.append(9, {1: b"garbage"})
        forged.sql("UPDATE leaf SET data = ? WHERE seq = ?", b"garbage", seq)
    elif slip == "beyond the head":
        forged.sql("INSERT INTO leaf (seq, data, body) VALUES (?, ?, ?)", kept + 1, b"garbage", b"")
    elif callable(slip):
        slip(forged)
    mended = str(tmp_path / "mended.db")
    store = SqliteStore(forged.path)
    store.copy(mended)
    store.close()
    store = SqliteStore(mended)
    assert [seq for seq, _ in cut_unsigned(store)] == [kept + 1]
    store.close()
    with Ledger.open(mended, LEDGER, clock=Clock()) as ledger:
        assert ledger.size == kept + 1
        ledger.append([contribution(9).record], [contribution(9).attestation])
        ledger.checkpoint()
    assert verify(mended, trust=Trust(plain=(GOVERNING.public,))).trusted
