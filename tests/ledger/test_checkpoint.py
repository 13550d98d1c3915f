"""Checkpoints: what is signed, what is read, and when one is believed."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from trees import ORIGIN, private

from lamina.errors import EncodingError, LaminaError, LedgerError, NotVerified
from lamina.ledger import signed_checkpoint
from lamina.ledger.merkle import EMPTY_ROOT, leaf_hash, node_hash
from lamina.ledger.signed_checkpoint import (
    LedgerCheckpoint,
    add_cosignature,
    merge_signatures,
    parse_checkpoint,
    verify_checkpoint,
)
from lamina.sign.notes import Note, NoteKey, WitnessKey, WitnessQuorum

ROOT = leaf_hash(b"only")


KEY, OTHER, WITNESS = private(1), private(2), private(3)
LEDGER = NoteKey(ORIGIN, KEY.public)
ONE = LedgerCheckpoint(ORIGIN, 1, ROOT)
SIGNED = ONE.signed(KEY)


def test_a_checkpoint_is_what_the_specification_says() -> None:
    assert ONE.text() == f"{ORIGIN}\n1\n{base64.b64encode(ROOT).decode()}\n"
    assert SIGNED.startswith(ONE.text() + f"\n— {ORIGIN} ")
    assert parse_checkpoint(SIGNED) == (ONE, Note.parse(SIGNED)) == parse_checkpoint(SIGNED.encode())
    assert verify_checkpoint(SIGNED, [LEDGER]) == ONE == verify_checkpoint(SIGNED, [LEDGER], origin=ORIGIN)


def test_the_example_of_the_c2sp_page_is_read() -> None:
    text = (
        "example.com/behind-the-sofa\n"
        "20852163\n"
        "CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n"
        "\n"
        "— example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+"
        "zyWE+xeMcTOAYQ8=\n"
    )
    head, found = parse_checkpoint(text)
    assert (head.origin, head.size, head.root.hex()[:8]) == ("example.com/behind-the-sofa", 20852163, "0ac5186a")
    assert found.encode() == text and head.text() == found.text


def test_lines_of_other_ledgers_are_read_and_kept() -> None:
    more = LedgerCheckpoint(ORIGIN, 1, ROOT, ("first extension", "second"))
    assert parse_checkpoint(more.signed(KEY))[0] == more
    assert verify_checkpoint(more.signed(KEY), [LEDGER]).extensions == ("first extension", "second")


GOOD_ROOT = base64.b64encode(ROOT).decode()
WRONG_SIZES = ["", "01", "+1", "-1", "1.0", "1 ", "\u0661", "9223372036854775808", "9" * 100, "0"]
WRONG_ROOTS = [
    base64.b64encode(ROOT[:31]).decode(),
    base64.b64encode(ROOT + b"x").decode(),
    base64.urlsafe_b64encode(b">>>???" + ROOT[6:]).decode(),
    GOOD_ROOT.rstrip("="),
    ROOT.hex(),
    f"{GOOD_ROOT}\n",
    f"{GOOD_ROOT}\n\nextension",
]


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", f"{ORIGIN}\n1\n", f"\n1\n{GOOD_ROOT}\n", f"{ORIGIN}\n1\n{GOOD_ROOT}"),
        *(f"{ORIGIN}\n{size}\n{GOOD_ROOT}\n" for size in WRONG_SIZES),
        *(f"{ORIGIN}\n1\n{root}\n" for root in WRONG_ROOTS),
        f"{ORIGIN}\r\n1\r\n{GOOD_ROOT}\r\n",
    ],
)
def test_anything_else_is_no_checkpoint(text: str) -> None:
    with pytest.raises(EncodingError):
        LedgerCheckpoint.of_text(text)
    line = SIGNED.rpartition("\n\n")[2]
    with pytest.raises(EncodingError):
        parse_checkpoint(text + "\n" + line)


@given(st.integers(0, len(SIGNED) - 1), st.characters(codec="utf-8"))
def test_no_single_changed_character_is_believed(at: int, char: str) -> None:
    changed = SIGNED[:at] + char + SIGNED[at + 1 :]
    if changed == SIGNED:
        assert verify_checkpoint(changed, [LEDGER]) == ONE
        return
    with pytest.raises((EncodingError, NotVerified)):
        verify_checkpoint(changed, [LEDGER])


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_garbage_is_refused_as_such(data: Any) -> None:
    with pytest.raises(EncodingError):
        parse_checkpoint(data)


@pytest.mark.parametrize(
    "build",
    [
        lambda: LedgerCheckpoint(ORIGIN, -1, ROOT),
        lambda: LedgerCheckpoint(ORIGIN, 2**63, ROOT),
        lambda: LedgerCheckpoint(ORIGIN, True, ROOT),
        lambda: LedgerCheckpoint(ORIGIN, 1, ROOT[:31]),
        lambda: LedgerCheckpoint(ORIGIN, 0, ROOT),
        lambda: LedgerCheckpoint("", 1, ROOT),
        lambda: LedgerCheckpoint("a\nb", 1, ROOT),
        lambda: LedgerCheckpoint("a\tb", 1, ROOT),
        lambda: LedgerCheckpoint(ORIGIN, 1, ROOT, ("",)),
        lambda: LedgerCheckpoint("with blank", 1, ROOT).signed(KEY),
        lambda: LedgerCheckpoint("with+plus", 1, ROOT).signed(KEY),
        lambda: ONE.signed(KEY, "with blank"),
    ],
)
def test_what_makes_no_sense_is_not_signed(build: Any) -> None:
    with pytest.raises(LedgerError):
        build()


def test_an_empty_ledger_has_a_checkpoint() -> None:
    empty = LedgerCheckpoint(ORIGIN, 0, EMPTY_ROOT)
    assert verify_checkpoint(empty.signed(KEY), [LEDGER]) == empty


# ------------------------------------------------------------------------------------------------------- attacks


def test_a_checkpoint_of_another_ledger_is_not_believed() -> None:
    other = LedgerCheckpoint("example.org/other", 1, ROOT)
    with raises_code("ledger.checkpoint-wrong-origin"):
        verify_checkpoint(other.signed(KEY, ORIGIN), [LEDGER])
    with raises_code("ledger.checkpoint-wrong-origin"):
        verify_checkpoint(other.signed(KEY), [NoteKey("example.org/other", KEY.public)], origin=ORIGIN)


def test_a_checkpoint_signed_by_another_key_is_not_believed() -> None:
    with raises_code("ledger.not-signed"):
        verify_checkpoint(ONE.signed(OTHER), [LEDGER])
    with pytest.raises(NotVerified):
        verify_checkpoint(ONE.signed(KEY), [])
    stolen = parse_checkpoint(SIGNED)[1].signatures
    two = LedgerCheckpoint(ORIGIN, 2, node_hash(ROOT, ROOT))
    with raises_code("ledger.signature-invalid"):
        verify_checkpoint(Note(two.text(), stolen).encode(), [LEDGER])


def test_a_rotated_key_signs_on() -> None:
    both = (
        Note.parse(SIGNED).with_signatures(*signed_checkpoint.sign_note(ONE.text(), ORIGIN, OTHER).signatures).encode()
    )
    for keys in ([LEDGER], [NoteKey(ORIGIN, OTHER.public)], [LEDGER, NoteKey(ORIGIN, OTHER.public)]):
        assert verify_checkpoint(both, keys) == ONE


def test_a_witness_is_no_ledger_and_a_ledger_no_witness() -> None:
    cosigned = add_cosignature(SIGNED, WITNESS, 1_700_000_000, "witness.example")
    policy = WitnessQuorum(1, (WitnessKey("witness.example", WITNESS.public),))
    assert verify_checkpoint(cosigned, [LEDGER], policy=policy) == ONE
    with raises_code("ledger.quorum-not-reached"):
        verify_checkpoint(SIGNED, [LEDGER], policy=policy)
    only = Note(ONE.text(), parse_checkpoint(cosigned)[1].signatures[1:]).encode()
    with raises_code("ledger.not-signed"):
        verify_checkpoint(only, [LEDGER], policy=policy)
    own = WitnessQuorum(1, (WitnessKey(ORIGIN, KEY.public),))
    with raises_code("ledger.witness-is-ledger"):
        verify_checkpoint(add_cosignature(SIGNED, KEY, 1_700_000_000, ORIGIN), [LEDGER], policy=own)


def test_cosignatures_that_come_one_by_one_are_joined() -> None:
    copies = [add_cosignature(SIGNED, private(seed), 1_700_000_000, f"w{seed}") for seed in (3, 4, 5)]
    whole = merge_signatures(*copies, SIGNED)
    policy = WitnessQuorum(3, tuple(WitnessKey(f"w{seed}", private(seed).public) for seed in (3, 4, 5)))
    assert verify_checkpoint(whole, [LEDGER], policy=policy) == ONE
    assert len(parse_checkpoint(whole)[1].signatures) == 4
    with raises_code("ledger.checkpoints-differ"):
        merge_signatures(SIGNED, LedgerCheckpoint(ORIGIN, 0, EMPTY_ROOT).signed(KEY))


def test_every_refusal_is_one_of_ours() -> None:
    for data in (b"", SIGNED[:-5], SIGNED.encode()[5:], SIGNED + SIGNED, SIGNED.replace("1", "2")):
        with pytest.raises(LaminaError):
            verify_checkpoint(data, [LEDGER])
