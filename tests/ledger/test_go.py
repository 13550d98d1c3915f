"""Go's sumdb packages, which know nothing of us, on our notes, proofs and tiles; and ours on a note that Go signed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import making
import pytest
from trees import ORIGIN, partial_tiles, private

from lamina.errors import NotVerified
from lamina.ledger.merkle import (
    Frontier,
    TileNodes,
    consistency_proof,
    grow_tiles,
    inclusion_proof,
    leaf_hashes,
    root_at,
    tile_path,
)
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, add_cosignature, verify_checkpoint
from lamina.ledger.witness import Witness, WitnessRequest
from lamina.sign.notes import Note, NoteKey, WitnessKey

GOPATH = Path("/usr/share/gocode")  # where Debian puts golang-golang-x-mod-dev
SIZE = 70_000
LEAVES = [b"leaf %d" % n for n in range(SIZE)]

Go = Callable[[dict[str, Any]], dict[str, Any]]


KEY, WITNESS = private(1), private(3)
LEDGER = NoteKey(ORIGIN, KEY.public)


class Shelf(dict[tuple[int, int], bytes]):
    def read(self, level: int, index: int, width: int) -> bytes:
        return self[level, index]


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    tiles, frontier = Shelf(), Frontier()
    for first in range(0, SIZE, 1000):
        for tile in grow_tiles(frontier, leaf_hashes(LEAVES[first : first + 1000]), tiles.read):
            tiles[tile.level, tile.index] = tile.data
    return tiles


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Go:
    compiler = shutil.which("go")
    if compiler is None or not (GOPATH / "src/golang.org/x/mod/sumdb").is_dir():
        pytest.skip("Go is not installed: make interop")
    folder = tmp_path_factory.mktemp("go")
    program = folder / "interop"
    environment = os.environ | {
        "GO111MODULE": "off",
        "GOPATH": str(GOPATH),
        "GOCACHE": str(folder / "cache"),
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
    }
    source = Path(__file__).parent / "go" / "interop.go"
    built = subprocess.run(
        [compiler, "build", "-o", program, source],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        run = subprocess.run(
            [program], input=json.dumps(question), capture_output=True, text=True, timeout=120, check=False
        )
        assert run.returncode == 0, run.stderr
        return dict(json.loads(run.stdout))

    return ask


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def head(nodes: TileNodes, size: int) -> LedgerCheckpoint:
    return LedgerCheckpoint(ORIGIN, size, root_at(nodes, size))


def test_go_opens_our_checkpoints(go: Go, shelf: Shelf) -> None:
    nodes = TileNodes(shelf.read)
    signed = head(nodes, SIZE).signed(KEY)
    cosigned = add_cosignature(signed, WITNESS, 1_700_000_000, "witness.example")
    stranger = WitnessKey("witness.example", private(4).public)
    witness = WitnessKey("witness.example", WITNESS.public)
    forged = cosigned.replace("70000", "70001")
    answers = go(
        {
            "Notes": [
                {"Key": LEDGER.text, "Note": signed},
                {"Key": LEDGER.text, "Note": cosigned, "Witnesses": [witness.text]},
                {"Key": LEDGER.text, "Note": cosigned, "Witnesses": [stranger.text]},
                {"Note": cosigned, "Witnesses": [witness.text]},
                {"Key": LEDGER.text, "Note": forged},
                {"Note": forged, "Witnesses": [witness.text]},
                {"Key": NoteKey(ORIGIN, WITNESS.public).text, "Note": signed},
                {"Key": LEDGER.text, "Note": signed.replace("\u2014", "-")},
            ]
        }
    )["Notes"]
    text = head(nodes, SIZE).text()
    assert [answer["Text"] for answer in answers] == [text, text, text, text, "", "", "", ""]
    assert [answer["Signers"] for answer in answers[:4]] == [
        [ORIGIN], [ORIGIN, "witness.example"], [ORIGIN], ["witness.example"],
    ]  # fmt: skip
    assert "invalid signature" in answers[4]["Problem"] and "invalid signature" in answers[5]["Problem"]
    assert "no verifiable signatures" in answers[6]["Problem"] and "malformed" in answers[7]["Problem"]


def test_go_verifies_a_heartbeat(go: Go, tmp_path: Path) -> None:
    """A cosignature by the ledger's own key, under its own name: beside the signature by the same key."""
    with making.create(str(tmp_path / "a.db")) as ledger:
        text, time = ledger.heartbeat()
    key, heart = NoteKey(making.ORIGIN, making.LEDGER.public), WitnessKey(making.ORIGIN, making.LEDGER.public)
    later = f"\u2014 {making.ORIGIN} " + b64(heart.id + (time + 1).to_bytes(8, "big") + bytes(64)) + "\n"
    answers = go(
        {
            "Notes": [
                {"Key": key.text, "Note": text, "Witnesses": [heart.text]},
                {"Note": text, "Witnesses": [heart.text]},
                {"Note": text.partition("\n\n")[0] + "\n\n" + later, "Witnesses": [heart.text]},
            ]
        }
    )["Notes"]
    assert [answer["Signers"] for answer in answers] == [[making.ORIGIN] * 2, [making.ORIGIN], None]
    assert "invalid signature" in answers[2]["Problem"]


def test_go_verifies_what_a_witness_prints(go: Go, shelf: Shelf, tmp_path: Path) -> None:
    nodes, witness = TileNodes(shelf.read), Witness(WITNESS, "witness.example", tmp_path / "state.json")
    texts = []
    for old, size in ((None, 1000), (1000, SIZE)):
        proof = () if old is None else tuple(consistency_proof(nodes, old, size))
        texts.append(witness.cosign(WitnessRequest(head(nodes, size).signed(KEY), old, proof), [KEY.public])[0])
    key = WitnessKey("witness.example", WITNESS.public).text
    answers = go({"Notes": [{"Key": LEDGER.text, "Note": text, "Witnesses": [key]} for text in texts]})["Notes"]
    assert [each["Signers"] for each in answers] == [[ORIGIN, "witness.example"]] * 2


def test_go_verifies_our_inclusion_proofs(go: Go, shelf: Shelf) -> None:
    nodes = TileNodes(shelf.read)
    pairs = [(index, size) for size in range(1, 20) for index in range(size)]
    pairs += [(index, size) for size in (255, 256, 257, 65_536, 65_537, SIZE) for index in range(0, size, 251)]
    questions = [
        {
            "Index": index,
            "Size": size,
            "Leaf": b64(LEAVES[index]),
            "Root": b64(root_at(nodes, size)),
            "Proof": [b64(step) for step in inclusion_proof(nodes, index, size)],
        }
        for index, size in pairs
    ]
    wrong = [question | {"Leaf": b64(b"another")} for question in questions[:50]]
    wrong += [question | {"Proof": question["Proof"][:-1]} for question in questions[1:50]]
    answers = [answer["Problem"] for answer in go({"Inclusion": questions + wrong})["Inclusion"]]
    assert not any(answers[: len(questions)])
    assert all(answers[len(questions) :])


def test_go_verifies_our_consistency_proofs(go: Go, shelf: Shelf) -> None:
    nodes = TileNodes(shelf.read)
    pairs = [(old, new) for new in range(1, 20) for old in range(1, new + 1)]
    pairs += [(old, new) for new in (256, 257, 65_537, SIZE) for old in range(1, new, 509)]
    questions = [
        {
            "Old": old,
            "New": new,
            "OldRoot": b64(root_at(nodes, old)),
            "NewRoot": b64(root_at(nodes, new)),
            "Proof": [b64(step) for step in consistency_proof(nodes, old, new)],
        }
        for old, new in pairs
    ]
    wrong = [question | {"OldRoot": b64(bytes(32))} for question in questions[:50]]
    wrong += [question | {"Proof": [*question["Proof"], b64(bytes(32))]} for question in questions[:50]]
    answers = [answer["Problem"] for answer in go({"Consistency": questions + wrong})["Consistency"]]
    assert not any(answers[: len(questions)])
    assert all(answers[len(questions) :])


@pytest.mark.parametrize("size", [255, 256, 257, 65_536, 65_792, SIZE])
def test_go_reads_our_tiles_and_makes_the_same_proofs(go: Go, shelf: Shelf, size: int) -> None:
    nodes = TileNodes(shelf.read)
    tiles = {tile_path(*place): place for place in partial_tiles(size)}
    files = {name: b64(shelf[place[:2]][: 32 * place[2]]) for name, place in tiles.items()}
    for (level, index), data in shelf.items():
        if (index + 1) * 256 <= size >> 8 * level:
            files[tile_path(level, index)] = b64(data)
    leaves = sorted({0, size // 3, size // 2, size - 1})
    olds = sorted({1, size // 3 + 1, size // 2 + 1, size})
    question = {"Size": size, "Root": b64(root_at(nodes, size)), "Tiles": files, "Leaves": leaves, "Olds": olds}
    (first,) = (name for name in files if name.startswith("tile/0/000"))
    damaged = question | {"Tiles": files | {first: b64(bytes(len(base64.b64decode(files[first]))))}}
    answer, refused = go({"Trees": [question, damaged]})["Trees"]
    assert answer["Problem"] == ""
    ours = [[b64(step) for step in inclusion_proof(nodes, leaf, size)] for leaf in leaves]
    assert [proof or [] for proof in answer["Records"]] == ours
    ours = [[b64(step) for step in consistency_proof(nodes, old, size)] for old in olds]
    assert [proof or [] for proof in answer["Trees"]] == ours
    # x/mod 0.7 does not compare every tile with the one above: then its proofs are others, and prove nothing.
    assert refused["Problem"] or (refused["Records"], refused["Trees"]) != (answer["Records"], answer["Trees"])


def test_we_verify_what_go_signed(go: Go) -> None:
    text = LedgerCheckpoint(ORIGIN, 1, leaf_hashes([b"only"])[0]).text()
    answer = go({"Sign": text, "Name": ORIGIN})
    key = NoteKey.parse(answer["SignedKey"])
    assert verify_checkpoint(answer["SignedNote"], [key]).text() == text
    assert Note.parse(answer["SignedNote"]).encode() == answer["SignedNote"]
    with pytest.raises(NotVerified):
        verify_checkpoint(answer["SignedNote"].replace("\n1\n", "\n2\n"), [key])
    with pytest.raises(NotVerified):
        verify_checkpoint(answer["SignedNote"], [LEDGER])
