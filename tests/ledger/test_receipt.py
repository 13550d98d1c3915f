"""Receipts: COSE and text, checked by ours, by hand, and by other people's COSE; and everything that is no receipt."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from trees import ORIGIN, Rows, private

from lamina import cbor
from lamina.errors import EncodingError, LedgerError, NotVerified
from lamina.ledger import receipt
from lamina.ledger.merkle import inclusion_proof, leaf_hash, node_hash
from lamina.ledger.receipt import Receipt, TlogProof, make_receipt
from lamina.ledger.signed_checkpoint import RECEIPT_TYPE, LedgerCheckpoint, TreeSignature, add_cosignature
from lamina.sign.keys import PrivateKey, PublicKey
from lamina.sign.notes import NoteKey, WitnessKey, WitnessQuorum

LEAVES = [b"leaf %d" % n for n in range(40)]


KEY, OTHER = private(1), private(2)
TREE = Rows(LEAVES)


def made(index: int = 11, size: int = 21, key: PrivateKey = KEY) -> bytes:
    seal = TreeSignature.sign(TREE.head(size), key)
    return make_receipt(seal, leaf_hash(LEAVES[index]), index, inclusion_proof(TREE, index, size))


GOOD = made()


# ------------------------------------------------------------------------------------------------ what is written


def test_a_receipt_is_what_rfc_9942_says() -> None:
    """Taken apart with another CBOR library, and its root and signature computed by hand."""
    message = cbor2.loads(GOOD)
    assert message.tag == 18
    protected, unprotected, payload, signature = message.value
    assert payload is None
    header = dict(cbor2.loads(protected))
    assert header == {
        1: -8,
        4: KEY.public.id,
        15: {1: ORIGIN, 2: "tree:21"},
        16: "application/lamina-receipt+cose",
        395: 1,
    }
    assert list(unprotected) == [396] and list(unprotected[396]) == [-1]
    (proof,) = unprotected[396][-1]
    size, index, path = cbor2.loads(proof)
    assert (size, index, list(path)) == (21, 11, inclusion_proof(TREE, 11, 21))
    # 11 = 0b01011 in a tree of 21: siblings left, left, right, left, right.
    root = hashlib.sha256(b"\x00" + LEAVES[11]).digest()
    for left, sibling in zip((1, 1, 0, 1, 0), path, strict=True):
        root = hashlib.sha256(b"\x01" + (sibling + root if left else root + sibling)).digest()
    assert root == TREE.head(21).root
    signed = cbor2.dumps(["Signature1", protected, b"", root])
    Ed25519PublicKey.from_public_bytes(KEY.public.x).verify(signature, signed)
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(OTHER.public.x).verify(signature, signed)


def test_every_leaf_of_every_tree_gets_a_receipt_that_verifies() -> None:
    for size in range(2, 41):
        seal = TreeSignature.sign(TREE.head(size), KEY)
        assert seal.holds(KEY.public) and not seal.holds(OTHER.public)
        for index in range(size):
            data = make_receipt(seal, leaf_hash(LEAVES[index]), index, inclusion_proof(TREE, index, size))
            assert len(data) < 600
            if (size + index) % 5 == 0:
                assert receipt.verify_receipt(data, LEAVES[index], KEY.public, ORIGIN)
                assert not receipt.verify_receipt(data, LEAVES[index - 1], KEY.public, ORIGIN)


def test_one_seal_serves_all_leaves_and_needs_no_key() -> None:
    seal = TreeSignature.sign(TREE.head(21), KEY)
    kept = TreeSignature(seal.origin, seal.size, seal.root, seal.kid, seal.signature)  # as a store brings it back
    assert kept == seal and seal == TreeSignature.sign(TREE.head(21), KEY), "the same each time"
    receipts = {make_receipt(kept, leaf_hash(LEAVES[n]), n, inclusion_proof(TREE, n, 21)) for n in range(21)}
    assert len(receipts) == 21 and len({Receipt.decode(data).signature for data in receipts}) == 1


def test_a_seal_makes_no_receipt_of_what_it_does_not_cover() -> None:
    seal = TreeSignature.sign(TREE.head(21), KEY)
    path = inclusion_proof(TREE, 11, 21)
    for leaf, index, proof in (
        (leaf_hash(b"other"), 11, path),
        (leaf_hash(LEAVES[11]), 12, path),
        (leaf_hash(LEAVES[11]), 11, path[:-1]),
        (leaf_hash(LEAVES[11]), 11, inclusion_proof(TREE, 11, 40)),
        (leaf_hash(LEAVES[30]), 30, inclusion_proof(TREE, 30, 40)),
        (LEAVES[11], 11, path),
    ):
        with raises_code("ledger.proof-wrong"):
            make_receipt(seal, leaf, index, proof)
    with raises_code("ledger.tree-too-small"):
        make_receipt(TreeSignature.sign(TREE.head(1), KEY), leaf_hash(LEAVES[0]), 0, [])


def test_the_longest_receipt_fits() -> None:
    path = [bytes([n]) * 32 for n in range(63)]
    root = leaf_hash(b"first")
    for step in path:
        root = node_hash(root, step)
    head = LedgerCheckpoint("o" * 255, 2**63 - 1, root)
    data = make_receipt(TreeSignature.sign(head, KEY), leaf_hash(b"first"), 0, path)
    assert receipt.verify_receipt(data, b"first", KEY.public, "o" * 255)


# ---------------------------------------------------------------------------------- other people's implementations

PEER = """
import json, sys

def pycose(case):
    from pycose.keys import OKPKey
    from pycose.keys.curves import Ed25519
    from pycose.messages import Sign1Message

    message = Sign1Message.decode(bytes.fromhex(case["receipt"]))
    message.key = OKPKey(crv=Ed25519, x=bytes.fromhex(case["x"]))
    return message.verify_signature(detached_payload=bytes.fromhex(case["root"]))

def scitt(case):
    from scitt_cose.receipt import verify_receipt

    result = verify_receipt(
        bytes.fromhex(case["receipt"]), leaf_entry_hex=case["leaf"], log_public_key_pem=case["pem"].encode()
    )
    return [result.ok, result.root, result.tree_size, result.leaf_index, result.issuer, result.subject]

def schema(case):
    from pycddl import Schema, ValidationError

    try:
        Schema(case["cddl"]).validate_cbor(bytes.fromhex(case["data"]))
    except ValidationError as error:
        return str(error)

json.dump([globals()[sys.argv[1]](case) for case in json.load(sys.stdin)], sys.stdout)
"""


def ask(question: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Ask a stranger: other people's libraries, in an environment of their own."""
    environment = Path(__file__).parents[2] / ".venv-pycose"
    if not (environment / ".done").exists():
        pytest.skip("pycose is not installed: make interop")
    run = subprocess.run(
        [environment / "bin" / "python", "-c", PEER, question],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "No module named 'scitt_cose'" in run.stderr:
        pytest.skip("scitt-cose is not installed: make interop")
    assert run.returncode == 0, run.stderr
    return list(json.loads(run.stdout))


def case(index: int, size: int, leaf: int, key: PrivateKey, root: int) -> dict[str, Any]:
    return {
        "receipt": made(index, size).hex(),
        "leaf": LEAVES[leaf].hex(),
        "pem": key.public.pem().decode(),
        "x": key.public.x.hex(),
        "root": TREE.head(root).root.hex(),
    }


def test_pycose_verifies_our_receipts() -> None:
    """It knows COSE and is told the root."""
    good = [case(11, 21, 11, KEY, 21), case(0, 2, 0, KEY, 2), case(39, 40, 39, KEY, 40)]
    bad = [case(11, 21, 11, OTHER, 21), case(11, 21, 11, KEY, 20)]
    assert ask("pycose", good + bad) == [True, True, True, False, False]


def test_scitt_cose_verifies_our_receipts() -> None:
    """It knows RFC 9942 and finds the root from the leaf by itself."""
    good = [case(11, 21, 11, KEY, 21), case(0, 2, 0, KEY, 2), case(39, 40, 39, KEY, 40)]
    bad = [case(11, 21, 12, KEY, 21), case(11, 21, 11, OTHER, 21)]
    answers = ask("scitt", good + bad)
    assert [answer[0] for answer in answers] == [True, True, True, False, False]
    assert answers[0] == [True, TREE.head(21).root.hex(), 21, 11, ORIGIN, "tree:21"]


def test_receipts_have_the_schema_that_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ledger-format.md").read_text(encoding="utf-8")
    (schema,) = re.findall(r"```cddl\n(Receipt = .*?)```", page, re.DOTALL)

    def parts(data: bytes) -> list[dict[str, str]]:
        """The validator cannot look through .cbor within an array: what is wrapped is shown to it by itself."""
        protected, unprotected, _, _ = cbor2.loads(data).value
        outside = re.sub(r"bstr \.cbor \w+", "bstr", schema)
        inside = {"Protected": protected, "Inclusion": unprotected[396][-1][0]}
        return [{"cddl": outside, "data": data.hex()}] + [
            {"cddl": f"start = {name}\n{schema}", "data": blob.hex()} for name, blob in inside.items()
        ]

    assert set(ask("schema", parts(made(11, 21)) + parts(made(0, 2)) + parts(made(39, 40)))) == {None}
    for at, wrong in (
        (0, {"payload": b"root"}),
        (0, {"signature": bytes(63)}),
        (1, {"header": {395: 2}}),
        (1, {"header": {1: -7}}),
        (1, {"header": {15: {1: ORIGIN, 2: "size:7"}}}),
        (1, {"header": {99: 0}}),
        (2, {"proof": [21, 11, []]}),
        (2, {"proof": [21, 11, [b"short"]]}),
    ):
        answers = ask("schema", parts(_built(**wrong)))
        assert [answer is None for answer in answers] == [at != n for n in range(3)]


# ------------------------------------------------------------------------------------------------------- attacks


def _built(change: Any = None, **parts: Any) -> bytes:
    """A receipt whose parts were replaced, signed again over what they are now where that makes sense."""
    header = {1: -8, 4: KEY.public.id, 15: {1: ORIGIN, 2: "tree:21"}, 16: RECEIPT_TYPE, 395: 1}
    header |= parts.get("header", {})
    header = {label: value for label, value in header.items() if value is not ...}
    protected = cbor.encode(header, null=True, floats=True)
    root = TREE.head(21).root
    proof = cbor.encode(parts.get("proof", [21, 11, inclusion_proof(TREE, 11, 21)]), null=True, floats=True)
    message = [
        parts.get("protected", protected),
        parts.get("unprotected", {396: {-1: [proof]}}),
        parts.get("payload"),
        parts.get("signature", KEY.sign(cbor.encode(["Signature1", protected, b"", root]))),
    ]
    tag = cbor.Tag(number=parts.get("tag", 18), value=message)
    return cbor.encode(tag, null=True, floats=True, tags=(tag.number,))


def test_the_builder_of_the_next_tests_builds_our_receipt() -> None:
    assert _built() == GOOD


WRONG_HEADERS: dict[int, list[Any]] = {  # by label; ... leaves it out
    1: [-7, "EdDSA", True, ...],
    2: [[1]],
    4: [b"short", ...],
    15: [
        {1: ORIGIN},
        {1: ORIGIN, 2: "tree:21", 6: 0},
        *({1: ORIGIN, 2: sub} for sub in ("tree:021", "tree:+21", "tree:\u0662\u0661", "tree:" + "9" * 40, 21)),
        {1: 5, 2: "tree:21"},
        ...,
    ],
    16: ["application/lamina-attestation+cose", ...],
    258: [-16],
    395: [2, True, ...],
}
WRONG_PARTS: dict[str, list[Any]] = {
    "protected": [b"", b"\xa0", {}],
    "unprotected": [
        {},
        {395: 1, 396: {-1: [b"\x80"]}},
        [],
        *(
            {396: proofs}
            for proofs in ({}, {-1: []}, {-1: [b"\x80"]}, {-1: [b"", b""]}, {-2: [b"\x80"]}, {-1: b"\x80"})
        ),
    ],
    "proof": [
        [21, 11],
        [21, 11, [bytes(32)], 0],
        [20, 11, [bytes(32)]],
        *([21, 11, path] for path in ([], [b"short"], "path")),
        *([21, index, [bytes(32)]] for index in (-1, True, 11.0, None)),
    ],
    "payload": [b"", TREE.head(21).root],
    "signature": [b"x" * 63, ""],
    "tag": [98],
}


@pytest.mark.parametrize(
    "parts",
    [
        *({"header": {label: value}} for label, values in WRONG_HEADERS.items() for value in values),
        *({name: value} for name, values in WRONG_PARTS.items() for value in values),
    ],
)
def test_anything_else_is_no_receipt(parts: dict[str, Any]) -> None:
    data = _built(**parts)
    with pytest.raises(EncodingError):
        Receipt.decode(data)
    assert receipt.verify_receipt(data, LEAVES[11], KEY.public, ORIGIN) is False


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[1:],
        GOOD[:-1],
        GOOD + b"\x00",
        b"\xd8\x12" + GOOD[1:],  # tag 18 in two bytes
        cbor2.dumps(cbor2.CBORTag(18, [1, 2, 3])),
        bytes(5000),
        None,
        "text",
    ],
)
def test_damaged_bytes_are_no_receipt(data: Any) -> None:
    with pytest.raises(EncodingError):
        Receipt.decode(data)
    assert receipt.verify_receipt(data, LEAVES[11], KEY.public, ORIGIN) is False


def test_nothing_else_may_stand_in_the_unprotected_header() -> None:
    proof = cbor.encode([21, 11, inclusion_proof(TREE, 11, 21)])
    assert receipt.verify_receipt(_built(unprotected={396: {-1: [proof]}}), LEAVES[11], KEY.public, ORIGIN)
    for unprotected in (
        {396: {-1: [proof], -2: []}},
        {396: {-1: [proof]}, 4: KEY.public.id},
        {396: {-1: [proof, proof]}},
    ):
        assert not receipt.verify_receipt(_built(unprotected=unprotected), LEAVES[11], KEY.public, ORIGIN)


def test_a_receipt_must_name_the_key_that_signed_it() -> None:
    assert not receipt.verify_receipt(_built(header={4: OTHER.public.id}), LEAVES[11], KEY.public, ORIGIN)


def test_the_newer_name_of_the_algorithm_is_accepted() -> None:
    assert receipt.verify_receipt(_built(header={1: -19}), LEAVES[11], KEY.public, ORIGIN)
    assert not receipt.verify_receipt(
        _built(header={1: -19}, signature=Receipt.decode(GOOD).signature), LEAVES[11], KEY.public, ORIGIN
    ), "the algorithm is signed"


def test_a_receipt_is_for_one_leaf_one_key_and_one_ledger() -> None:
    assert receipt.verify_receipt(GOOD, LEAVES[11], KEY.public, ORIGIN)
    assert not receipt.verify_receipt(GOOD, LEAVES[12], KEY.public, ORIGIN)
    assert not receipt.verify_receipt(GOOD, leaf_hash(LEAVES[11]), KEY.public, ORIGIN)
    assert not receipt.verify_receipt(GOOD, LEAVES[11], OTHER.public, ORIGIN)
    assert not receipt.verify_receipt(GOOD, LEAVES[11], KEY.public, "example.org/other")
    assert not receipt.verify_receipt(made(key=OTHER), LEAVES[11], KEY.public, ORIGIN)
    renamed = _built(header={4: KEY.public.id}, signature=Receipt.decode(made(key=OTHER)).signature)
    assert not receipt.verify_receipt(renamed, LEAVES[11], KEY.public, ORIGIN)
    assert not receipt.verify_receipt(GOOD, None, KEY.public, ORIGIN)  # type: ignore[arg-type]


def test_the_size_in_a_receipt_is_signed() -> None:
    """Leaf 2 of 3 has the path of leaf 1 of 2: with an unsigned size one receipt would serve for both."""
    path = inclusion_proof(TREE, 2, 3)
    data = make_receipt(TreeSignature.sign(TREE.head(3), KEY), leaf_hash(LEAVES[2]), 2, path)
    signature = Receipt.decode(data).signature
    moved = {"header": {15: {1: ORIGIN, 2: "tree:2"}}, "proof": [2, 1, path], "signature": signature}
    assert Receipt.decode(_built(**moved)).index == 1
    assert not receipt.verify_receipt(_built(**moved), LEAVES[2], KEY.public, ORIGIN)
    moved["header"] = {15: {1: ORIGIN, 2: "tree:3"}}
    assert not receipt.verify_receipt(_built(**moved), LEAVES[2], KEY.public, ORIGIN)


@given(st.integers(0, len(GOOD) * 8 - 1))
def test_no_single_flipped_bit_is_believed(bit: int) -> None:
    wrong = bytearray(GOOD)
    wrong[bit // 8] ^= 1 << bit % 8
    assert not receipt.verify_receipt(bytes(wrong), LEAVES[11], KEY.public, ORIGIN)


@given(st.binary(max_size=300))
def test_garbage_is_refused_without_a_word(data: bytes) -> None:
    assert receipt.verify_receipt(data, b"", KEY.public, ORIGIN) is False


def test_what_is_signed_for_a_receipt_is_nothing_else() -> None:
    """One key signs checkpoints and receipts: their texts can never be the same bytes."""
    signed: list[bytes] = []

    class Recorder(PrivateKey):
        def sign(self, message: bytes) -> bytes:
            signed.append(message)
            return super().sign(message)

    key = Recorder(Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32))
    TreeSignature.sign(TREE.head(21), key)
    TREE.head(21).signed(key)
    assert len(signed) == 2
    with pytest.raises(UnicodeDecodeError):
        signed[0].decode("utf-8")  # every note is UTF-8; a Sig_structure begins with 0x84, which is none
    signed[1].decode("utf-8")


# ------------------------------------------------------------------------------------------------------------ text

SIGNED = TREE.head(21).signed(KEY)
TEXT = TlogProof(11, tuple(inclusion_proof(TREE, 11, 21)), SIGNED)
LEDGER = NoteKey(ORIGIN, KEY.public)


def test_the_text_is_what_c2sp_says() -> None:
    hashes = "".join(base64.b64encode(step).decode() + "\n" for step in inclusion_proof(TREE, 11, 21))
    assert TEXT.encode() == f"c2sp.org/tlog-proof@v1\nindex 11\n{hashes}\n{SIGNED}"
    more = dataclasses.replace(TEXT, extra=b"abc")
    assert more.encode().splitlines()[1] == "extra YWJj"
    for text in (TEXT, more):
        assert TlogProof.parse(text.encode()) == text == TlogProof.parse(text.encode().encode())
    assert TEXT.verify(LEAVES[11], [LEDGER]) == TREE.head(21)


def test_every_leaf_has_its_text() -> None:
    for size in range(1, 41, 3):
        signed = TREE.head(size).signed(KEY)
        for index in range(size):
            text = TlogProof(index, tuple(inclusion_proof(TREE, index, size)), signed).encode()
            assert TlogProof.parse(text).verify(LEAVES[index], [LEDGER], origin=ORIGIN).size == size


def test_a_text_carries_the_witnesses() -> None:
    policy = WitnessQuorum(1, (WitnessKey("w.example", OTHER.public),))
    with raises_code("ledger.quorum-not-reached"):
        TEXT.verify(LEAVES[11], [LEDGER], policy=policy)
    seen = dataclasses.replace(TEXT, checkpoint=add_cosignature(SIGNED, OTHER, 1_700_000_000, "w.example"))
    assert TlogProof.parse(seen.encode()).verify(LEAVES[11], [LEDGER], policy=policy)


def test_a_text_proves_nothing_else() -> None:
    for leaf in (LEAVES[12], leaf_hash(LEAVES[11]), b""):
        with raises_code("ledger.proof-wrong"):
            TEXT.verify(leaf, [LEDGER])
    for change in (
        {"index": 12},
        {"path": TEXT.path[:-1]},
        {"path": (*TEXT.path, bytes(32))},
        {"path": TEXT.path[::-1]},
        {"checkpoint": TREE.head(22).signed(KEY)},
        {"checkpoint": TREE.head(21).signed(OTHER)},
        {"checkpoint": LedgerCheckpoint("example.org/other", 21, TREE.head(21).root).signed(KEY)},
    ):
        with pytest.raises(NotVerified):
            dataclasses.replace(TEXT, **change).verify(LEAVES[11], [LEDGER])


WHOLE = TEXT.encode()


WRONG_INDEX_LINES = [
    *(f"index {number}" for number in ("011", " 11", "-1", "9223372036854775808")),
    *("Index 11", "index 11\nextra YWJj", "index 11\nindex 11", "index 11\nAAAA"),
    *(f"{extra}\nindex 11" for extra in ("extra YWJj\nextra YWJj", "extra ", "extra YWJ")),
    "index 11" + ("\n" + base64.b64encode(bytes(32)).decode()) * 60,
]


@pytest.mark.parametrize(
    "data",
    [
        *("", SIGNED, "x" * 600_000, WHOLE + "\n", "\n" + WHOLE, WHOLE.encode() + b"\xff"),
        *(WHOLE.replace("index 11", line) for line in WRONG_INDEX_LINES),
        *(WHOLE.replace(*pair) for pair in (("@v1", "@v2"), ("\nindex 11", ""), ("\n\n", "\n"), ("\n", "\r\n"))),
    ],
)
def test_anything_else_is_no_proof_text(data: str | bytes) -> None:
    with pytest.raises(EncodingError):
        TlogProof.parse(data)


@given(st.integers(0, len(WHOLE) - 1), st.characters(codec="utf-8"))
def test_no_single_changed_character_of_a_text_is_believed(at: int, char: str) -> None:
    changed = WHOLE[:at] + char + WHOLE[at + 1 :]
    if changed == WHOLE:
        return
    with pytest.raises((EncodingError, NotVerified)):
        TlogProof.parse(changed).verify(LEAVES[11], [LEDGER])


@pytest.mark.parametrize("change", [{"index": -1}, {"index": True}, {"path": (b"x",)}, {"path": (bytes(32),) * 64}])
def test_texts_that_make_no_sense_are_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(LedgerError):
        dataclasses.replace(TEXT, **change)


def test_a_public_key_is_all_that_is_needed() -> None:
    assert receipt.verify_receipt(GOOD, LEAVES[11], PublicKey(KEY.public.x), ORIGIN)
