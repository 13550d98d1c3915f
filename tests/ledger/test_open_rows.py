"""The head over open rows, recomputed from docs/ledger-format.md, and rows that are changed without the key, in both stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from keeping import KEY, Attempts, open_book
from keyless import edit
from open_charges import (
    CALL_GENERATION_7,
    CLOSE_OPEN,
    DELETE_ALL,
    DELETE_HEAD,
    DELETE_LIMITS,
    DELETE_OPEN,
    DELETE_RUNS,
    RENAME_RUNS,
    delete_attempts_at,
    read_head,
    sign_open_rows,
    signed_text,
)
from refusals import raises_code

from lamina.ledger.governance_records import Key, KeyChange, KeyEvent, KeyEvents, Role
from lamina.ledger.reader import LedgerReader
from lamina.ledger.run_records import RunBegin
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey


@pytest.fixture
def book(where: str) -> Iterator[SpendLedger]:
    made = open_book(where)
    Attempts(made).done(0)
    assert Attempts(made).charge(1)
    yield made
    made.ledger.close()


def test_the_head_is_what_the_format_says(book: SpendLedger, where: str) -> None:
    value = read_head(where)
    assert value is not None and len(value) == 144
    counter, size = int.from_bytes(value[:8], "big"), int.from_bytes(value[8:16], "big")
    assert (counter, size) == (4, 2)  # the header, two charges and an epoch
    assert (value[16:48], value[48:80]) == (book.ledger.root, KEY.public.id)
    text = signed_text(where, book.origin, counter, size, value[16:48])
    Ed25519PublicKey.from_public_bytes(KEY.public.x).verify(value[80:], text)


@pytest.mark.parametrize(
    "change", [DELETE_OPEN, CLOSE_OPEN, CALL_GENERATION_7, DELETE_LIMITS, DELETE_RUNS, RENAME_RUNS]
)
def test_rows_that_were_changed_decide_nothing(book: SpendLedger, where: str, change: str) -> None:
    edit(where, change)
    with Ledger.open(where, KEY) as other:
        for each in (book, SpendLedger(other)):
            with raises_code("ledger.open-rows-differ"):
                Attempts(each).charge(2)
            with raises_code("ledger.open-rows-differ"):
                Attempts(each).record(1)
    found = verify(book.ledger.store, signatures=False).problem
    assert found is not None and found.code == "verify.open-rows-differ"
    book.ledger.accept()
    assert verify(book.ledger.store, signatures=False).verified


def test_lists_that_were_changed_decide_nothing(book: SpendLedger, where: str) -> None:
    """Attempts of epochs: a process that knows them goes on by the leaves, another one refuses the store."""
    edit(where, "DELETE FROM attempt")
    assert book.recorded(Attempts(book).run, 0, 0) is not None
    with Ledger.open(where, KEY) as other, raises_code("ledger.attempt-index-differs"):
        SpendLedger(other).next_generation(Attempts(book).run, 0)


def test_a_writer_without_the_key_leaves_the_rows_unsigned(book: SpendLedger, where: str) -> None:
    with Ledger.open(where) as keyless:
        assert Attempts(SpendLedger(keyless)).charge(2)
        assert keyless.notes == []  # the rows that it read were signed
        assert Attempts(SpendLedger(keyless)).charge(3)
        assert any(note.startswith("not checked: open charges") for note in keyless.notes)
    assert read_head(where) is None
    found = verify(book.ledger.store, signatures=False)
    assert any(note.startswith("not checked: open charges") for note in found.notes)
    with raises_code("ledger.open-rows-unsigned"):  # a key that is only in memory keeps nothing
        Attempts(book).record(1)
    book.ledger.accept()
    Attempts(book).record(1)
    assert read_head(where) is not None


@pytest.mark.parametrize("begun", [False, True])
def test_rows_that_vanish_with_their_head_are_reported(where: str, begun: bool) -> None:
    """Every row and the head are deleted, and no newer state is kept, because the key is only in memory."""
    with open_book(where).ledger as ledger:
        book = SpendLedger(ledger)
        if begun:
            ledger.append(
                [RunBegin(run=bytes.fromhex(Attempts(book).run), weights=bytes(32), origin=None, parent=None)]
            )
        assert Attempts(book).charge(0)
        edit(where, DELETE_ALL, DELETE_LIMITS, DELETE_RUNS)
        with Ledger.open(where, KEY) as other, raises_code("ledger.open-rows-differ"):
            SpendLedger(other).total("clinical", delta=1e-5)
        edit(where, DELETE_HEAD)
        with Ledger.open(where, KEY) as other, raises_code("ledger.open-rows-unsigned"):
            SpendLedger(other).total("clinical", delta=1e-5)
        with raises_code("ledger.open-rows-unsigned"):
            Attempts(book).charge(1)
        with Ledger.open(where) as keyless:
            SpendLedger(keyless).total("clinical", delta=1e-5)
            assert [note[:25] for note in keyless.notes] == ["not checked: open charges"]
        found = verify(ledger.store, signatures=False)
        assert found.verified and any(note.startswith("not checked: open charges") for note in found.notes)


def test_a_key_that_was_replaced_signs_no_open_rows(book: SpendLedger, where: str, tmp_path: Path) -> None:
    """A charge is deleted, and the key that was rotated out signs the rest, over a tree with its replacement."""
    ledger, old_root, new = book.ledger, book.ledger.root, PrivateKey.generate()
    now = ledger.now()
    named = Key(name=book.origin, x=new.public.x, role=Role.LEDGER, valid_from=now)
    event = KeyEvent(change=KeyChange.ROTATE, key=named, target=KEY.public.id, effective=now)
    ledger.append([ledger.authorise(KeyEvents(events=(event,)))])
    with raises_code("ledger.key-may-not-sign"):  # no checkpoint covers the replacement yet: it signs only that
        Attempts(book).charge(2)
    ledger.checkpoint()
    kept = tmp_path / "key"
    new.save(kept, None)
    with Ledger.open(where, PrivateKey.load(kept, None)) as other:
        assert Attempts(SpendLedger(other)).charge(2)  # the head before the replacement counts, and is signed anew
        root = other.root
    with Ledger.open(where, new) as other:
        assert Attempts(SpendLedger(other)).charge(3)
    assert verify(ledger.store, signatures=False).verified
    edit(where, delete_attempts_at(3))
    sign_open_rows(where, book.origin, KEY, 99, 3, root)
    with Ledger.open(where, new) as other, raises_code("ledger.open-rows-differ"):
        SpendLedger(other).total("clinical", delta=1e-5)
    found = verify(ledger.store, signatures=False).problem
    assert found is not None and found.code == "verify.open-rows-differ" and "had replaced that key" in found.reason
    sign_open_rows(
        where, book.origin, KEY, 99, 2, old_root
    )  # over the tree before the replacement: what is kept knows a larger one
    with Ledger.open(where, PrivateKey.load(kept, None)) as other, raises_code("ledger.open-rows-replayed"):
        SpendLedger(other).total("clinical", delta=1e-5)


def test_a_leaf_that_changes_after_it_was_read_is_named(book: SpendLedger, where: str) -> None:
    with LedgerReader(book.ledger.store) as reader:
        assert len(list(reader.of_kind(type(next(reader.leaves(1)).record)))) == 1  # type: ignore[arg-type]
        edit(where, "UPDATE leaf SET data = (SELECT data FROM leaf WHERE seq = 0) WHERE seq = 1")
        with raises_code("ledger.leaf-not-allowed"):
            list(reader.of_kind(type(book.ledger.leaf(0).record)))  # type: ignore[arg-type]
            book.recorded(Attempts(book).run, 0, 0)
