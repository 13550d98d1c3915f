"""Pruning where somebody without a key edited the store, where it was stopped again and again, and after key rotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import cbor2
import pytest
from build import ALICE, BOB, RUNS, YEAR, Story, begin, contribution, signed_by
from forger import Forger
from keyless import binary, edit, leaves_of, rows_of
from making import AUDITOR, GOVERNING, LEDGER, ORIGIN, key
from open_charges import CALL_BUDGETS, CALL_RESERVED, CLOSE_ALL, DELETE_ALL, POSTDATE_RUNS, put_open_charge, put_run
from refusals import raises_code

from lamina.errors import LedgerDamaged
from lamina.ledger import retention
from lamina.ledger.governance_records import Aggregate, Key, KeyChange, KeyEvent, Role, WithdrawalReason
from lamina.ledger.receipt import verify_receipt
from lamina.ledger.retention import Retention
from lamina.ledger.store.rows import StoreWriter
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import check_withdrawal, withdraw
from lamina.ledger.withdrawal_request import sign_withdrawal
from lamina.ledger.writer import Ledger
from lamina.sign.notes import NoteKey

DAY = 86_400
MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),), plain=(GOVERNING.public,))
PAIRS = 3  # contributions of each round of admissions


@pytest.fixture
def story(where: str) -> Iterator[Story]:
    """Six contributions that may be pruned, and an open attempt that may be using the second half of them."""
    made = begin(where)
    made.at["first"], *_ = admit(made, 0, 10 * DAY)
    admit(made, PAIRS, 30 * DAY)
    made.sign()
    put_run(made.ledger, RUNS[0], "open", int(made.clock.now) // DAY + 20)
    put_open_charge(made.ledger, RUNS[0], 4, body=b"not read")
    made.later(2 * YEAR)
    made.ledger.accept()  # the key signs the open rows
    yield made
    made.ledger.close()


def admit(story: Story, first: int, lasting: int) -> list[int]:
    now = int(story.clock.now)
    who = (ALICE, BOB)
    made = [contribution(n, who[n % 2], at=now, expires=now + lasting) for n in range(first, first + PAIRS)]
    return story.admit(made)


def again(story: Story, where: str) -> Ledger:
    return Ledger.open(where, LEDGER, clock=story.clock)


def proposed(ledger: Ledger) -> Aggregate:
    found = Retention(ledger).propose()
    assert found is not None
    return found


def prune(ledger: Ledger) -> int:
    return Retention(ledger).prune(signed_by(proposed(ledger), AUDITOR))


def bodies(where: str) -> list[int]:
    """The contributions that have a body."""
    starts = ", ".join(binary(where, bytes((0xAA + more, 1, 2))) for more in (0, 1))
    contributions = f"substr(data, 1, 3) IN ({starts})"
    return [
        seq
        for (seq,) in rows_of(where, f"SELECT seq FROM leaf WHERE {contributions} AND body IS NOT NULL ORDER BY seq")
    ]


def counts(where: str) -> Counter[int]:
    """How often each leaf is summed up, read without the project's code."""
    found = Counter[int]()
    for (body,) in rows_of(where, f"SELECT body FROM leaf WHERE {leaves_of(where, 6)} ORDER BY seq"):
        found.update(seq for span in cbor2.loads(body)[1] for seq in range(span[1], span[2]))
    return found


# ------------------------------------------------------------------------------------- an open attempt that is hidden

HIDING = {
    "its charge is deleted": DELETE_ALL,
    "its charge is listed under a leaf": CLOSE_ALL,
    "its charge is listed as a reservation": CALL_RESERVED,
    "its charge is listed as a budget": CALL_BUDGETS,
    "its run is said to have begun later": POSTDATE_RUNS,
}


@pytest.mark.parametrize("statement", HIDING.values(), ids=HIDING.keys())
@pytest.mark.parametrize("when", ["before the proposal", "before the pruning", "before the append"])
def test_a_hidden_attempt_deletes_no_body(
    story: Story, where: str, monkeypatch: pytest.MonkeyPatch, statement: str, when: str
) -> None:
    with again(story, where) as ledger:
        part = proposed(ledger)
        assert part.count == PAIRS
        append = ledger.append_aggregate

        def late(*given: object) -> list[int]:
            edit(where, statement)
            return append(*given)  # type: ignore[arg-type]

        if when == "before the append":
            monkeypatch.setattr(ledger, "append_aggregate", late)
        else:
            edit(where, statement)
        if when == "before the proposal":
            with raises_code("ledger.open-rows-differ"):
                Retention(ledger).propose()
        with raises_code("ledger.open-rows-differ"):
            Retention(ledger).prune(signed_by(part, AUDITOR))
    assert len(bodies(where)) == 2 * PAIRS and not counts(where)


def test_an_attempt_that_begins_during_the_pruning_is_noticed(
    story: Story, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It appends no leaf, and may be reading what is about to be summed up."""
    with again(story, where) as ledger:
        part, append = proposed(ledger), ledger.append_aggregate

        def late(*given: object) -> list[int]:
            def charge(rows: StoreWriter) -> None:
                put_run(rows, RUNS[1], "earlier")
                put_open_charge(rows, RUNS[1])

            ledger.change_open(charge)
            return append(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(ledger, "append_aggregate", late)
        with raises_code("ledger.proposal-outdated"):
            Retention(ledger).prune(signed_by(part, AUDITOR))
    assert len(bodies(where)) == 2 * PAIRS and not counts(where)


# ------------------------------------------------------------------------------------- prunings that stop


class Stop(Exception):
    """The process ends here."""


def stop_at(ledger: Ledger, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process before its transaction of that number."""
    through, left = ledger.transact, count

    def counted(work: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stop
        return through(work)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "transact", counted)


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_stopped_pruning_is_not_summed_up_again(
    story: Story, where: str, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Stopped after the append, after the checkpoint, and after some bodies."""
    monkeypatch.setattr(retention, "_LEAVES_PER_TRANSACTION", 1)
    with again(story, where) as ledger, monkeypatch.context() as patch:
        aggregate = signed_by(proposed(ledger), AUDITOR)
        stop_at(ledger, at, patch)
        with pytest.raises(Stop):
            Retention(ledger).prune(aggregate)
    assert len(bodies(where)) > PAIRS
    with again(story, where) as ledger:
        assert Retention(ledger).propose() is None
        Retention(ledger).resume()
    assert len(bodies(where)) == PAIRS
    assert verify(where, trust=MINE, now=int(story.clock.now)).trusted


def test_the_mark_of_the_writer_is_needed_to_go_on(story: Story, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody can tell the aggregate, which no checkpoint covers, from one that an attacker wrote."""
    with again(story, where) as ledger, monkeypatch.context() as patch:
        aggregate = signed_by(proposed(ledger), AUDITOR)
        stop_at(ledger, 1, patch)
        with pytest.raises(Stop):
            Retention(ledger).prune(aggregate)
    edit(where, "DELETE FROM meta WHERE name = 'written'")
    with again(story, where) as ledger:
        for act in (Retention(ledger).resume, lambda: Retention(ledger).prune(aggregate)):
            with pytest.raises(LedgerDamaged):
                act()
        assert Retention(ledger).propose() is None
    assert len(bodies(where)) == 2 * PAIRS


def test_a_body_that_was_put_back_is_named_and_goes_again(story: Story, where: str) -> None:
    """From an old copy: the person was told that it is gone."""
    first = story.at["first"]
    saved = rows_of(where, f"SELECT body FROM leaf WHERE seq = {first}")[0][0]
    with again(story, where) as ledger:
        prune(ledger)
        edit(where, f"UPDATE leaf SET body = {binary(where, saved)} WHERE seq = {first}")
        problem = verify(where, now=int(story.clock.now)).problem
        assert problem is not None and problem.code == "verify.attestation-missing"
        assert Retention(ledger).propose() is None
        Retention(ledger).resume()
    assert len(bodies(where)) == PAIRS
    assert verify(where, trust=MINE, now=int(story.clock.now)).trusted


@pytest.mark.parametrize("seed", range(4))
def test_prunings_in_a_row_that_stop_anywhere_sum_up_every_leaf_once(
    where: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Four rounds of admissions and prunings, each stopped two times at another place, always in a new process."""
    monkeypatch.setattr(retention, "_LEAVES_PER_TRANSACTION", 2)
    story, everyone = begin(where), list[int]()
    for turn in range(4):
        everyone += admit(story, turn * PAIRS, 10 * DAY)
        story.later(2 * YEAR)
        story.sign()
        for at in (seed + turn) % 5, (3 * seed + turn + 1) % 6:
            with again(story, where) as ledger, monkeypatch.context() as patch:
                aggregate = Retention(ledger).propose()
                stop_at(ledger, at, patch)
                try:
                    if aggregate is None:
                        Retention(ledger).resume()
                    else:
                        Retention(ledger).prune(signed_by(aggregate, AUDITOR))
                except Stop:
                    pass
        with again(story, where) as ledger:
            Retention(ledger).resume()
            if (aggregate := Retention(ledger).propose()) is not None:
                Retention(ledger).prune(signed_by(aggregate, AUDITOR))
        assert bodies(where) == [] and counts(where) == Counter(everyone)
        assert verify(where, trust=MINE, now=int(story.clock.now)).trusted
    story.ledger.close()


# ------------------------------------------------------------------------------------- aggregates that nobody signed


def test_an_aggregate_that_nobody_signed_stands_for_nobody(tmp_path: object) -> None:
    """It would make deleted bodies look pruned: a request would be refused, and the bodies of others deleted."""
    where = f"{tmp_path}/ledger.db"
    story = begin(where)
    first, *_ = admit(story, 0, 10 * DAY)
    story.sign()
    story.later(2 * YEAR)
    signed = sign_withdrawal(
        story.ledger.leaf(first).record.descriptor,  # type: ignore[union-attr]
        "consent", ALICE, ledger=story.ledger.header_hash, time=int(story.clock.now),
    )  # fmt: skip
    aggregate = signed_by(proposed(story.ledger), AUDITOR)
    story.ledger.close()
    forger = Forger(where)
    totals = [{1: "clinical", 2: PAIRS, 3: 0, 4: 0}]
    forger.append(6, {1: [{1: first, 2: first + PAIRS}], 2: 1, 3: totals, 4: bytes(32), 5: []})
    with again(story, where) as ledger:
        for act in (Retention(ledger).resume, lambda: Retention(ledger).prune(aggregate)):
            with raises_code("ledger.leaf-not-allowed"):
                act()
    assert len(bodies(where)) == PAIRS
    forger.sql("UPDATE leaf SET body = NULL WHERE seq = ?", first)
    with again(story, where) as ledger, raises_code("ledger.leaf-not-allowed"):
        check_withdrawal(signed, ledger, now=story.clock.now)


# ------------------------------------------------------------------------------------- receipts and readers beside


def test_receipts_and_readers_hold_through_prunings(story: Story, where: str) -> None:
    """A receipt from before proves the leaf afterwards; a reader that was open before goes on without a restart."""
    first, leaf = story.at["first"], story.ledger.raw(story.at["first"]).leaf
    with Ledger.open(where, clock=story.clock) as reader:
        assert reader.find(story.ledger.leaf(first).record.descriptor) == [first]  # type: ignore[union-attr]
        with again(story, where) as ledger:
            receipts = dict(Retention(ledger).receipts(proposed(ledger)))
            prune(ledger)
            receipts[-1] = ledger.receipt(first)
        assert reader.find(cbor2.loads(leaf)[6]) == [first]
        assert all(verify_receipt(receipts[each], leaf, LEDGER.public, ORIGIN) for each in (first, -1))
        with raises_code("ledger.withdrawal-target"):
            withdraw(reader, str(first), WithdrawalReason.REQUEST)
        edit(where, f"UPDATE leaf SET body = NULL WHERE seq = {first + PAIRS}")
        with raises_code("ledger.leaf-not-allowed"):
            withdraw(reader, str(first + PAIRS), WithdrawalReason.REQUEST)


# ------------------------------------------------------------------------------------- after the key was rotated

NEXT = key("next ledger key")


def rotate(story: Story, where: str) -> None:
    """The ledger key hands over to the next one; a checkpoint of the old one covers that."""
    named = Key(name=ORIGIN, x=NEXT.public.x, role=Role.LEDGER)
    event = KeyEvent(change=KeyChange.ROTATE, key=named, target=LEDGER.public.id, effective=int(story.clock.now))
    story.govern(event)
    story.sign()
    story.later(60)


def test_after_a_rotation_all_goes_on_with_the_next_key(story: Story, where: str) -> None:
    rotate(story, where)
    with Ledger.open(where, NEXT, clock=story.clock) as ledger:
        heir = Story(ledger, story.clock)
        admit(heir, 20, 10 * DAY)
        heir.sign()
        withdraw(ledger, str(story.at["first"]), WithdrawalReason.REQUEST)
        assert prune(ledger) == ledger.size - 1
        ledger.change_open(lambda rows: rows.drop_hold(RUNS[0], 4))  # its attempt ends
        heir.later(2 * YEAR)
        assert proposed(ledger).count == 2 * PAIRS
        prune(ledger)
    assert counts(where).total() == 3 * PAIRS
    assert verify(where, trust=Trust(plain=(GOVERNING.public,)), now=int(story.clock.now)).verified


def begin_a_run(ledger: Ledger) -> None:
    ledger.change_open(lambda rows: put_run(rows, RUNS[1], "x"))


ACTS: dict[str, tuple[Callable[[Ledger], object], str]] = {
    "prune": (lambda ledger: Retention(ledger).prune(Retention(ledger).propose()), "ledger.open-rows-differ"),  # type: ignore[arg-type]
    "change open rows": (begin_a_run, "ledger.open-rows-differ"),
    "accept the open rows": (Ledger.accept, "ledger.key-may-not-sign"),
    "sign": (Ledger.check_signs, "ledger.key-may-not-sign"),
}


@pytest.mark.parametrize(("act", "code"), ACTS.values(), ids=ACTS.keys())
def test_a_rotated_key_does_nothing_more(story: Story, where: str, act: Callable[[Ledger], object], code: str) -> None:
    """Nor can its holder make a hidden attempt be accepted."""
    rotate(story, where)
    with Ledger.open(where, NEXT, clock=story.clock) as ledger:
        Story(ledger, story.clock).admit([contribution(40, at=int(story.clock.now))])
        ledger.checkpoint()
    before = rows_of(where, "SELECT size, text FROM checkpoint ORDER BY size")
    edit(where, DELETE_ALL)
    with again(story, where) as ledger:
        with raises_code(code):
            act(ledger)
        ledger.checkpoint()
    assert rows_of(where, "SELECT size, text FROM checkpoint ORDER BY size") == before
    assert len(bodies(where)) == 2 * PAIRS + 1
