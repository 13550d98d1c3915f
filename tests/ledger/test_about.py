"""What an owner states about data and model: in the header, changed by governing records, and by nobody else."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import cbor2
import pytest
from build import ALICE, begin
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hand_ledger import HandLedger
from making import GOVERNING, LEDGER, START, Clock, authorised, digest, header
from refusals import raises_code

from lamina.ledger.corpus_terms import CorpusTerms, about_at
from lamina.ledger.governance_records import Key, Role, TermsChange
from lamina.ledger.reader import LedgerReader
from lamina.ledger.show import describe_leaf, leaf_to_dict
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.policy import Policy

STATED = (("contact", "privacy@example.org"), ("title", "ECG triage"))


def texts(path: Path, size: int) -> dict[str, tuple[str, int]]:
    with LedgerReader.read_only(str(path)) as ledger:
        return {name: (each["text"], each["leaf"]) for name, each in about_at(ledger, size).items()}


def test_texts_of_the_policy_are_in_the_header_and_change_by_governing_records(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"), about=STATED)
    before = story.ledger.size
    change = TermsChange(about=(("contact", ""), ("title", "ECG triage, second edition")))
    with raises_code("ledger.authorising-signature-invalid"):
        story.ledger.append([authorised(story.ledger, change, ALICE)])
    (leaf,) = story.ledger.append([authorised(story.ledger, change)])
    story.sign()
    story.ledger.close()
    path = tmp_path / "a.db"
    assert verify(str(path), now=START).verified
    assert texts(path, before) == {"contact": ("privacy@example.org", 0), "title": ("ECG triage", 0)}
    assert texts(path, leaf) == texts(path, before)  # it holds after its leaf
    assert texts(path, leaf + 1) == {"title": ("ECG triage, second edition", leaf)}
    with LedgerReader.read_only(str(path)) as ledger:
        first, changed = ledger.leaf(0), ledger.leaf(leaf)
    assert leaf_to_dict(first)["about"] == dict(STATED) and "about.title" in describe_leaf(first)
    assert leaf_to_dict(changed)["about"]["contact"] == "" and "about.contact" in describe_leaf(changed)


def test_only_what_differs_is_changed(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"), about=STATED)
    state = story.ledger.governance()
    assert state.about_change(STATED) is None
    assert state.about_change((("title", "x"),)) == (("contact", ""), ("title", "x"))
    assert state.about_change(()) == (("contact", ""), ("title", ""))
    story.ledger.close()


def test_a_policy_becomes_a_header_with_its_texts() -> None:
    text = Policy.template_text().replace("[about]", '[about]\ntitle = "ECG triage"')
    terms = CorpusTerms.of_policy(Policy.parse(text))
    made = terms.header(LEDGER.public, _parties())
    assert made.about == (("title", "ECG triage"),)
    assert CorpusTerms.of_policy(Policy.template()).header(LEDGER.public, _parties()).about is None


def _parties() -> list[Key]:
    return [Key(name="owner", x=GOVERNING.public.x, role=Role.GOVERNING)]


def forged_header(path: str, about: Any, *, signed: bool) -> None:
    """Write another field 20, with own CBOR, tree and signatures; `signed`: by the owner, else only by the ledger's key."""
    forged = HandLedger(path)
    body = {**forged.header, 20: about}
    if signed:
        message = b"lamina/header/1\n" + cbor2.dumps({**body, 17: []}, canonical=True)
        key = Ed25519PrivateKey.from_private_bytes(digest("key", "governing"))
        body[17] = [{1: GOVERNING.public.id, 2: key.sign(message)}]
    data = cbor2.dumps(body, canonical=True)
    forged.rows[0] = (cbor2.dumps({**forged.kept(0), 5: sha256(data).digest()}, canonical=True), data)
    forged.write(digest("key", "ledger"))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM meta WHERE name = 'open'")  # signed over the first header; its absence is only a note


@pytest.mark.parametrize(
    ("about", "signed"),
    [
        ({"title": "forged"}, False),  # well formed, but the owner did not sign it
        ({"colour": "red"}, True),
        ({"title": "two\nlines"}, True),
        ({"title": ""}, True),
        ({"title": 7}, True),
        ({1: "a"}, True),
        ([["title", "a"]], True),
        ({}, True),
    ],
    ids=str,
)
def test_a_keeper_cannot_put_words_into_the_header(tmp_path: Path, about: Any, signed: bool) -> None:
    path = str(tmp_path / "a.db")
    Ledger.create(path, header(about=STATED), LEDGER, clock=Clock()).close()
    forged_header(path, {"title": "by the owner"}, signed=True)
    assert verify(path, now=START).verified  # the forger writes what a verifier reads
    assert texts(tmp_path / "a.db", 1) == {"title": ("by the owner", 0)}
    forged_header(path, about, signed=signed)
    assert not verify(path, now=START).verified
