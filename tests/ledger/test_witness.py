"""Witnesses: cosignatures as C2SP writes them, and quorums."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from trees import ORIGIN, private

from lamina.ledger.merkle import leaf_hash
from lamina.ledger.signed_checkpoint import LedgerCheckpoint
from lamina.sign.keys import CLOCK_SKEW
from lamina.sign.notes import (
    Note,
    NoteKey,
    NoteSignature,
    WitnessKey,
    WitnessQuorum,
    cosignature_time,
    make_cosignature,
    sign_note,
)

TIME = 1_700_000_000


KEY = private(1)
WITNESSES = [private(seed) for seed in (11, 12, 13)]
KEYS = tuple(WitnessKey(f"w{n}.example", key.public) for n, key in enumerate(WITNESSES))
TEXT = LedgerCheckpoint(ORIGIN, 1, leaf_hash(b"only")).text()
NOTE = sign_note(TEXT, ORIGIN, KEY)


def signature(n: int, text: str = TEXT, time: int = TIME) -> NoteSignature:
    return make_cosignature(text, KEYS[n].name, WITNESSES[n], time)


def test_a_cosignature_is_what_the_specification_says() -> None:
    found = signature(0)
    x = WITNESSES[0].public.x
    assert found.key_id == KEYS[0].id == hashlib.sha256(b"w0.example\n\x04" + x).digest()[:4]
    assert found.value[:8] == TIME.to_bytes(8, "big") and len(found.value) == 72
    message = f"cosignature/v1\ntime {TIME}\n{TEXT}".encode()
    Ed25519PublicKey.from_public_bytes(x).verify(found.value[8:], message)
    assert cosignature_time(found) == TIME
    assert base64.b64decode(KEYS[0].text.split("+", 2)[2]) == b"\x04" + x
    assert WitnessKey.parse(KEYS[0].text) == KEYS[0]


def test_the_example_of_the_c2sp_page_is_read() -> None:
    line = (
        "— witness.example.com/w1 jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0"
        "xUe+mbIUBkBIfZ+qnA==\n"
    )
    (found,) = Note.parse("text\n\n" + line).signatures
    assert cosignature_time(found) == 1679315147 and len(found.value) == 72


def test_a_key_for_one_kind_is_none_for_the_other() -> None:
    key = WITNESSES[0].public
    assert NoteKey("w0.example", key).id != KEYS[0].id
    with raises_code("ledger.verifier-key-invalid"):
        WitnessKey.parse(NoteKey("w0.example", key).text)
    with raises_code("ledger.verifier-key-invalid"):
        NoteKey.parse(KEYS[0].text)
    plain = sign_note(TEXT, "w0.example", WITNESSES[0]).signatures[0]
    assert not KEYS[0].holds(TEXT, plain.value)
    assert not NoteKey("w0.example", key).holds(TEXT, signature(0).value)
    assert not NoteKey("w0.example", key).holds(TEXT, signature(0).value[8:])


@pytest.mark.parametrize("time", [-1, 2**63, 1.5, True, None])
def test_times_that_are_none_are_not_signed(time: Any) -> None:
    with raises_code("ledger.cosignature-time"):
        make_cosignature(TEXT, "w0.example", WITNESSES[0], time)


def test_a_time_beyond_all_times_is_not_believed() -> None:
    time = 2**63
    value = time.to_bytes(8, "big") + WITNESSES[0].sign(f"cosignature/v1\ntime {time}\n{TEXT}".encode())
    assert not KEYS[0].holds(TEXT, value)


# --------------------------------------------------------------------------------------------------------- quorum


@given(st.sets(st.sampled_from([0, 1, 2])), st.integers(0, 3))
def test_k_of_n(signed: set[int], quorum: int) -> None:
    note = NOTE.with_signatures(*(signature(n, time=TIME + n) for n in signed))
    policy = WitnessQuorum(quorum, KEYS)
    expected = {f"w{n}.example": TIME + n for n in signed}
    assert policy.cosigned(note) == expected
    if len(signed) >= quorum:
        assert policy.check(note) == expected
    else:
        with raises_code("ledger.quorum-not-reached"):
            policy.check(note)


def test_one_witness_counts_once_with_its_latest_time() -> None:
    twice = Note(TEXT, (*NOTE.signatures, signature(0), signature(0, time=TIME + 9), signature(0, time=TIME + 5)))
    assert WitnessQuorum(1, KEYS).cosigned(twice) == {"w0.example": TIME + 9}
    with raises_code("ledger.quorum-not-reached"):
        WitnessQuorum(2, KEYS).check(twice)


def test_unknown_witnesses_are_passed_over_and_wrong_cosignatures_are_not() -> None:
    stranger = make_cosignature(TEXT, "w9.example", private(99), TIME)
    pretender = make_cosignature(TEXT, "w1.example", private(99), TIME)  # the name of a witness, the key of somebody
    note = NOTE.with_signatures(signature(0), stranger, pretender)
    assert WitnessQuorum(1, KEYS).check(note) == {"w0.example": TIME}
    for value in (
        signature(1, text=TEXT.replace("1", "2")).value,
        (TIME + 1).to_bytes(8, "big") + signature(1).value[8:],
        signature(1).value[:-1],
        signature(1).value + b"x",
        b"x",
    ):
        wrong = NOTE.with_signatures(signature(0), NoteSignature("w1.example", KEYS[1].id, value))
        with raises_code("ledger.cosignature-invalid"):
            WitnessQuorum(1, KEYS).check(wrong)


def test_a_cosignature_from_the_future_is_not_believed() -> None:
    note = NOTE.with_signatures(signature(0))
    policy = WitnessQuorum(1, KEYS)
    assert policy.check(note, now=TIME - CLOCK_SKEW) and policy.check(note, now=TIME + 10**9)
    with raises_code("ledger.cosignature-from-future"):
        policy.check(note, now=TIME - CLOCK_SKEW - 1)


def test_a_quorum_of_nobody_is_always_met() -> None:
    assert WitnessQuorum().check(NOTE) == {}


@pytest.mark.parametrize("quorum", [-1, 4, True, 1.0, None])
def test_quorums_that_cannot_be_met_are_refused(quorum: Any) -> None:
    with raises_code("ledger.quorum-invalid"):
        WitnessQuorum(quorum, KEYS)


def test_one_key_under_two_names_is_one_witness() -> None:
    with raises_code("ledger.witness-twice"):
        WitnessQuorum(2, (KEYS[0], WitnessKey("alias.example", KEYS[0].key)))
