"""Signed notes: read strictly, signed as C2SP writes it, and trusted only by the reader's own keys."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from trees import private

from lamina.errors import EncodingError, LaminaError, LedgerError, NotVerified
from lamina.sign.keys import PublicKey
from lamina.sign.notes import (
    MAX_NOTE_BYTES,
    MAX_SIGNATURES,
    Note,
    NoteKey,
    NoteSignature,
    decode64,
    parse_decimal,
    sign_note,
    verify_note,
)

NAME = "example.org/ledger"
TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"


KEY, OTHER = private(1), private(2)
MINE = NoteKey(NAME, KEY.public)


# ----------------------------------------------------------------------------------------------- what is written


def test_a_note_is_what_the_specification_says() -> None:
    note = sign_note(TEXT, NAME, KEY)
    text, empty, line = note.encode().rpartition("\n\n")
    assert text + "\n" == TEXT and empty
    dash, name, blob = line.rstrip("\n").split(" ")
    assert (dash, name) == ("\u2014", NAME)
    raw = base64.b64decode(blob)
    x = KEY.public.x
    assert raw[:4] == hashlib.sha256(NAME.encode() + b"\n\x01" + x).digest()[:4]
    Ed25519PublicKey.from_public_bytes(x).verify(raw[4:], TEXT.encode())


def test_a_note_of_the_go_documentation_verifies() -> None:
    """The example of package golang.org/x/mod/sumdb/note: a key and a note that somebody else made."""
    key = NoteKey.parse("PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")
    text = (
        "If you think cryptography is the answer to your problem,\n"
        "then you don't know what your problem is.\n"
        "\n"
        "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
    )
    (signature,) = verify_note(Note.parse(text), [key])
    assert signature.name == "PeterNeumann" and key.text.startswith("PeterNeumann+c74f20a3+")
    with pytest.raises(NotVerified):
        verify_note(Note.parse(text.replace("think", "thunk")), [key])


def test_a_text_may_have_empty_lines_and_what_looks_like_a_signature() -> None:
    forged = sign_note("promise\n", NAME, OTHER).encode()
    for text in ("\n", "a\n\n", "\n\n\n", forged):
        note = sign_note(text, NAME, KEY)
        again = Note.parse(note.encode())
        assert again == note and again.text == text
        assert verify_note(again, [MINE]) == note.signatures


def test_a_verifier_key_is_written_and_read() -> None:
    name, digits, blob = MINE.text.split("+", 2)
    assert (name, digits) == (NAME, MINE.id.hex())
    assert base64.b64decode(blob) == b"\x01" + KEY.public.x
    assert NoteKey.parse(MINE.text) == MINE


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("example", "exemple"),
        lambda text: text.replace("+", "-", 1),
        lambda text: text.upper(),
        lambda text: text + "=",
        lambda text: text[:-4],
        lambda text: text + "\n",
        lambda text: "",
        lambda text: NAME + "+00000000+" + text.split("+", 2)[2],
        lambda text: NAME + "+" + text.split("+")[1] + "+" + base64.b64encode(b"\x04" + KEY.public.x).decode(),
        lambda text: NAME + "+" + text.split("+")[1] + "+" + base64.b64encode(b"\x01" + bytes(32)).decode(),
        lambda text: " " + text,
        lambda text: "\ud800" + text,
    ],
)
def test_a_verifier_key_is_read_strictly(change: Any) -> None:
    with pytest.raises(EncodingError):
        NoteKey.parse(change(MINE.text))


# -------------------------------------------------------------------------------------------------- who is trusted


def test_signatures_by_others_are_passed_over() -> None:
    note = sign_note(TEXT, NAME, KEY)
    same_name = NoteSignature(NAME, b"\x00\x01\x02\x03", b"whatever it is")
    same_id = NoteSignature("somebody.else", MINE.id, b"whatever it is")
    crowd = note.with_signatures(same_name, same_id)
    assert verify_note(crowd, [MINE]) == note.signatures
    assert verify_note(crowd, [NoteKey("unrelated", OTHER.public), MINE]) == note.signatures


def test_a_wrong_signature_by_a_known_key_spoils_the_note() -> None:
    note = sign_note(TEXT, NAME, KEY)
    wrong = NoteSignature(NAME, MINE.id, OTHER.sign(TEXT.encode()))
    for order in ((wrong, *note.signatures), (*note.signatures, wrong)):
        with raises_code("ledger.signature-invalid"):
            verify_note(Note(TEXT, order), [MINE])
    for value in (b"x", note.signatures[0].value[:-1], note.signatures[0].value + b"x"):
        with pytest.raises(NotVerified):
            verify_note(Note(TEXT, (NoteSignature(NAME, MINE.id, value),)), [MINE])


def test_a_repeated_signature_counts_once() -> None:
    note = sign_note(TEXT, NAME, KEY)
    assert verify_note(Note(TEXT, note.signatures * 3), [MINE]) == note.signatures


def test_without_a_known_signature_a_note_says_nothing() -> None:
    note = sign_note(TEXT, NAME, KEY)
    for keys in ([], [NoteKey(NAME, OTHER.public)], [NoteKey("example.org/other", KEY.public)]):
        with raises_code("ledger.not-signed"):
            verify_note(note, keys)


def test_two_keys_that_cannot_be_told_apart_are_refused() -> None:
    note = sign_note(TEXT, NAME, KEY)

    class Twin:
        name, id = NAME, MINE.id

        def holds(self, text: str, value: bytes) -> bool:
            return True

    with raises_code("ledger.verifier-keys-collide"):
        verify_note(note, [MINE, Twin()])
    assert verify_note(note, [MINE, MINE]) == note.signatures


def test_adding_replaces_the_signature_of_the_same_key() -> None:
    note = sign_note(TEXT, NAME, KEY)
    other = sign_note(TEXT, "other", OTHER).signatures[0]
    assert note.with_signatures(other).signatures == (*note.signatures, other)
    assert note.with_signatures(other).with_signatures(*note.signatures).signatures == (other, *note.signatures)


# ---------------------------------------------------------------------------------------------------- what is read


GOOD = sign_note(TEXT, NAME, KEY).encode()
LINE = GOOD.rpartition("\n\n")[2]


WRONG_BASE64 = [" AAAA", " AAAAAA==", " ", "", " AAAAAAB=", " AA-_AAAA"]  # the fifth: bits that no encoder sets


@pytest.mark.parametrize(
    "data",
    [
        *("", "\n", "text only\n", TEXT + LINE, GOOD[:-1], GOOD + "\n", GOOD + "x"),
        *(GOOD.replace("— ", dash) for dash in ("- ", "—", "—  ")),
        *(GOOD.replace(NAME, name) for name in ("a+b", "a\u00a0b", "a\u2003b", "")),
        *(GOOD.replace(LINE, f"— {NAME}{blob}\n") for blob in WRONG_BASE64),
        *(GOOD.replace("think", f"th{char}ink") for char in "\t\x00\x1f\ud800"),
        *(GOOD.encode().replace(b"think", b"th%bink" % raw) for raw in (b"\xff", b"\xc0\xaf")),
        *(GOOD.replace(LINE, LINE.replace("\n", " \n")), GOOD.replace("=", ""), GOOD.replace("\n", "\r\n")),
        *(GOOD.encode("utf-16"), b"\xef\xbb\xbf", GOOD + LINE * MAX_SIGNATURES, "x" * MAX_NOTE_BYTES + GOOD),
    ],
)
def test_anything_else_is_no_note(data: str | bytes) -> None:
    with pytest.raises(EncodingError):
        Note.parse(data)


def test_as_many_signatures_as_the_specification_asks_for_are_read() -> None:
    large = [NoteSignature(f"witness-{n}", bytes(4), bytes(5000)) for n in range(16)]
    note = sign_note(TEXT, NAME, KEY).with_signatures(*large)
    assert len(note.encode()) > 100_000
    assert verify_note(Note.parse(note.encode()), [MINE])
    full = note.with_signatures(*(NoteSignature(f"w{n}", bytes(4), b"x") for n in range(MAX_SIGNATURES - 17)))
    assert Note.parse(full.encode().encode()) == full


notes = st.text(alphabet="a\n— +=", max_size=30) | st.binary(max_size=30)


@given(notes | st.tuples(st.integers(0, len(GOOD) - 1), st.characters()), st.booleans())
def test_what_is_read_is_written_the_same(data: Any, raw: bool) -> None:
    if isinstance(data, tuple):
        at, char = data
        data = GOOD[:at] + char + GOOD[at + 1 :]
        data = data.encode("utf-8", "surrogatepass") if raw else data
    try:
        note = Note.parse(data)
    except LaminaError as error:
        assert isinstance(error, EncodingError)
        return
    assert note.encode() == (data if isinstance(data, str) else data.decode())
    if note.encode() != GOOD:
        with pytest.raises(NotVerified):
            verify_note(note, [MINE])


@pytest.mark.parametrize("text", ["", "no newline", "tab\t\n", "\ud800\n", "x" * MAX_NOTE_BYTES + "\n"])
def test_texts_that_no_note_may_have_are_not_signed(text: str) -> None:
    with pytest.raises(LedgerError):
        sign_note(text, NAME, KEY)


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\nb", "a\u3000b", "x" * 257, "\ud800", "a\x1cb"])
def test_names_that_no_key_may_have_are_refused(name: str) -> None:
    with pytest.raises(LedgerError):
        sign_note(TEXT, name, KEY)


def test_empty_signatures_and_notes_without_any_are_refused() -> None:
    with pytest.raises(LedgerError):
        NoteSignature(NAME, b"abc", b"x")
    with pytest.raises(LedgerError):
        NoteSignature(NAME, b"abcd", b"")
    with pytest.raises(LedgerError):
        Note(TEXT, ())


# --------------------------------------------------------------------------------------------------- small rules


@given(st.binary(max_size=40))
def test_base64_has_one_form(raw: bytes) -> None:
    text = base64.b64encode(raw).decode()
    assert decode64(text, "it") == raw
    for wrong in (text + "=", text + " ", text[:-1] or "A", text.replace("=", "") + ("" if "=" in text else "*")):
        with pytest.raises(EncodingError):
            decode64(wrong, "it")


@given(st.text(alphabet="0123456789+-_ .e٣", max_size=22))
def test_numbers_have_one_form(text: str) -> None:
    try:
        value = parse_decimal(text, "it", 2**63 - 1)
    except EncodingError:
        assert not text.isascii() or not text.isdigit() or str(int(text)) != text or int(text) >= 2**63
    else:
        assert str(value) == text and value < 2**63


def test_a_small_order_key_is_no_verifier() -> None:
    weak = bytes([1]) + bytes(31)
    with pytest.raises(LaminaError):
        PublicKey(weak)
    blob = base64.b64encode(b"\x01" + weak).decode()
    digits = hashlib.sha256(b"weak\n\x01" + weak).hexdigest()[:8]
    with raises_code("ledger.verifier-key-invalid"):
        NoteKey.parse(f"weak+{digits}+{blob}")
