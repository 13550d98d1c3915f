"""A witness that cosigns: what it demands, refuses and keeps; proofs and signatures are made here by hand."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from asking import Call, answer, asker, refused, succeeded
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from making import LEDGER, ORIGIN, OTHER, START, WITNESS, admitted, create, key
from refusals import raises_code
from trees import Rows

from lamina.ledger import witness as witnessing
from lamina.ledger.merkle import consistency_proof
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, merge_signatures
from lamina.ledger.witness import Witness, WitnessRequest
from lamina.sign.keys import PrivateKey
from lamina.sign.notes import NoteKey, WitnessKey

LEAVES = [b"leaf %d" % n for n in range(60)]
TREE, FORK = Rows(LEAVES), Rows([*LEAVES[:10], *(b"other %d" % n for n in range(50))])
NAME = "witness.example"
KEYS = [LEDGER.public]


def note(size: int, tree: Rows = TREE, by: PrivateKey = LEDGER, origin: str = ORIGIN) -> str:
    return LedgerCheckpoint(origin, size, tree.head(size).root).signed(by)


def request(old: int | None, size: int, tree: Rows = TREE, **more: Any) -> WitnessRequest:
    """As the body of an add-checkpoint request says it (C2SP tlog-witness)."""
    if old is None:
        return WitnessRequest.parse(note(size, tree, **more).encode())
    lines = [base64.b64encode(each).decode() for each in consistency_proof(tree, old, size)]
    return WitnessRequest.parse("\n".join([f"old {old}", *lines, "", note(size, tree, **more)]).encode())


def make(tmp_path: Path, now: float = START, by: PrivateKey = WITNESS) -> Witness:
    return Witness(by, NAME, tmp_path / "state.json", clock=lambda: now)


def test_it_cosigns_what_continues_and_says_when(tmp_path: Path) -> None:
    for old, size, now in (
        (None, 10, START),
        (10, 10, START + 5),
        (10, 37, START + 9),
        (None, 37, START + 9),
        (37, 60, START + 70),
    ):
        text, before = make(tmp_path, now).cosign(request(old, size), KEYS)
        body, _, lines = text.partition("\n\n")
        name, blob = lines.splitlines()[-1].removeprefix("— ").split(" ")
        raw = base64.b64decode(blob)
        assert name == NAME and raw[:4] == hashlib.sha256(b"witness.example\n\x04" + WITNESS.public.x).digest()[:4]
        assert int.from_bytes(raw[4:12], "big") == now
        message = f"cosignature/v1\ntime {now}\n{body}\n".encode()
        Ed25519PublicKey.from_public_bytes(WITNESS.public.x).verify(raw[12:], message)
        assert (before is None) == (old is None and size == 10)
        state = json.loads((tmp_path / "state.json").read_text())
        assert state == {ORIGIN: text} and (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600


REFUSED: dict[str, tuple[WitnessRequest, str]] = {
    "rollback": (request(None, 19), "ledger.witness-rollback"),
    "rollback with a proof": (request(5, 19), "ledger.witness-rollback"),
    "fork of the same size": (request(None, 20, FORK), "ledger.witness-fork"),
    "fork that went on": (request(20, 40, FORK), "ledger.witness-proof-wrong"),
    "no proof": (request(None, 40), "ledger.witness-proof-missing"),
    "proof from another size": (request(19, 40), "ledger.witness-proof-other-size"),
    "proof from nothing": (WitnessRequest(note(40), 0, ()), "ledger.witness-proof-other-size"),
    "proof of another checkpoint": (WitnessRequest(note(41), 20, request(20, 40).path), "ledger.witness-proof-wrong"),
    "shortened proof": (WitnessRequest(note(40), 20, request(20, 40).path[:-1]), "ledger.witness-proof-wrong"),
    "empty proof": (WitnessRequest(note(40), 20, ()), "ledger.witness-proof-wrong"),
    "unknown key": (request(20, 40, by=OTHER), "ledger.not-signed"),
    "changed root": (
        WitnessRequest(note(40).replace("40\n", "41\n", 1), 20, request(20, 40).path),
        "ledger.signature-invalid",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(tmp_path: Path, name: str) -> None:
    make(tmp_path).cosign(request(None, 20), KEYS)
    before = (tmp_path / "state.json").read_bytes()
    asked, code = REFUSED[name]
    with raises_code(code):
        make(tmp_path, START + 100).cosign(asked, KEYS)
    assert (tmp_path / "state.json").read_bytes() == before, "a refusal changes nothing"


def test_a_ledger_is_not_its_own_witness(tmp_path: Path) -> None:
    with raises_code("ledger.witness-is-ledger"):
        make(tmp_path, by=LEDGER).cosign(request(None, 20), KEYS)


def test_a_clock_that_goes_back_is_refused(tmp_path: Path) -> None:
    make(tmp_path, START + 50).cosign(request(None, 20), KEYS)
    with raises_code("ledger.clock-behind"):
        make(tmp_path, START + 49).cosign(request(20, 30), KEYS)


def test_ledgers_do_not_mix(tmp_path: Path) -> None:
    make(tmp_path).cosign(request(None, 20), KEYS)
    make(tmp_path).cosign(request(None, 5, FORK, origin="other.example"), KEYS)
    make(tmp_path).cosign(request(20, 30), KEYS)
    assert set(json.loads((tmp_path / "state.json").read_text())) == {ORIGIN, "other.example"}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"a": 1}', b'{"a": "b"}', b'{"x": "%s"}' % note(3).replace("\n", "\\n").encode()]
)
def test_a_state_that_cannot_be_read_is_not_begun_anew(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state.json").write_bytes(data)
    with raises_code("ledger.witness-state-unreadable"):
        make(tmp_path).cosign(request(None, 20), KEYS)
    assert (tmp_path / "state.json").read_bytes() == data


@pytest.mark.parametrize(
    "data", [b"\xff", b"old x\n\n", b"old 1\n??\n\n", b"old 01\n\n", b"old 1\n" + b"A\n" * 70 + b"\n", b"nonsense"]
)
def test_requests_that_are_none_are_refused(tmp_path: Path, data: bytes) -> None:
    with raises_code(
        "ledger.witness-request-malformed", "ledger.number-invalid", "ledger.base64-invalid", "ledger.note-malformed"
    ):
        make(tmp_path).cosign(WitnessRequest.parse(data), KEYS)


def test_no_signature_leaves_before_the_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path).cosign(request(None, 20), KEYS)
    monkeypatch.setattr(witnessing, "replace_file", lambda *a, **k: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        make(tmp_path, START + 1).cosign(request(20, 30), KEYS)
    monkeypatch.undo()
    make(tmp_path, START + 1).cosign(request(20, 40), KEYS)  # the state is still that of 20 leaves


def test_of_two_processes_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two continuations of one tree that exclude each other: one of them is refused, whoever is first."""
    make(tmp_path).cosign(request(None, 10), KEYS)
    reached, write = threading.Event(), witnessing.replace_file

    def slow(*given: Any, **more: Any) -> None:
        reached.set()
        threading.Event().wait(0.3)
        write(*given, **more)

    monkeypatch.setattr(witnessing, "replace_file", slow)
    done: list[str] = []
    one = threading.Thread(target=lambda: done.append(make(tmp_path).cosign(request(10, 30), KEYS)[0]))
    one.start()
    assert reached.wait(10)
    with raises_code("ledger.witness-fork", "ledger.witness-proof-other-size"):
        make(tmp_path).cosign(request(10, 30, FORK), KEYS)
    one.join(10)
    assert len(done) == 1


# ------------------------------------------------------------------------------ the command


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    key("witness").save(tmp_path / "witness.key", None)
    (tmp_path / "ledger.pub").write_bytes(LEDGER.public.pem())
    (tmp_path / "other.pub").write_bytes(OTHER.public.pem())
    return asker(capsys, "ledger")


OPTIONS = ("--key", "witness.key", "--state", "state.json", "--trust", "ledger.pub")


def test_a_ledger_and_its_witness(call: Call, tmp_path: Path) -> None:
    """The way of a checkpoint: to the witness, back into the ledger, and into a receipt that names how many cosigned."""
    import time

    with create(str(tmp_path / "a.db"), time.time, witnesses=1) as ledger:
        ledger.append([admitted(n, not_before=0, expires=2**32) for n in range(5)])
        ledger.checkpoint()
    succeeded(call("checkpoint", "a.db", "-o", "new.txt"))
    refused(call("witness", "new.txt", *OPTIONS), "cli.witness-name-missing")
    refused(call("witness", "new.txt", *OPTIONS[:-1], "other.pub", "--name", NAME), "ledger.not-signed")
    assert not (tmp_path / "state.json").exists()
    result = call("witness", "new.txt", *OPTIONS, "--name", NAME)
    assert "was never cosigned before" in result[2]
    (tmp_path / "back.txt").write_text(succeeded(result))
    succeeded(call("checkpoint", "a.db", "--cosigned", "back.txt"))
    assert NAME in succeeded(call("checkpoint", "a.db", "--witnessed"))
    with create(str(tmp_path / "b.db"), time.time) as other:
        other.append([admitted(9, not_before=0, expires=2**32)])
        (tmp_path / "fork.txt").write_text(other.checkpoint())
    refused(call("witness", "fork.txt", *OPTIONS, "--name", NAME), "ledger.witness-rollback")
    # it grows; the proof comes in a request, in a file of its own, or from a copy of the ledger
    from lamina.ledger.writer import Ledger

    with Ledger.open(tmp_path / "a.db", LEDGER) as ledger:
        ledger.append([admitted(7, not_before=0, expires=2**32)])
        size = json.loads(json.dumps(ledger.size)) - 1
        (tmp_path / "grown.txt").write_text(ledger.checkpoint())
    refused(call("witness", "grown.txt", *OPTIONS, "--name", NAME), "ledger.witness-proof-missing")
    succeeded(call("prove", "a.db", "--from", str(size), "-o", "request.txt"))
    for words in (
        ("request.txt", "--name", NAME),
        ("grown.txt", "--proof", "request.txt", "--name", NAME),
        ("grown.txt", "--ledger", "a.db"),
        ("--ledger", "a.db"),
    ):
        (tmp_path / "state.json").write_text(json.dumps({ORIGIN: (tmp_path / "back.txt").read_text()}))
        found = answer(call("witness", *words, *OPTIONS, "-o", "cosigned.txt", "--json"))
        assert [each["size"] for each in found["cosigned"]] == [size + 1] and found["name"] == NAME
        assert NAME in (tmp_path / "cosigned.txt").read_text()
    succeeded(call("checkpoint", "a.db", "--cosigned", "cosigned.txt"))
    check_receipts(call, tmp_path)


def check_receipts(call: Call, tmp_path: Path) -> None:
    """A ring that names the witness; one that names another; and keys without a word about witnesses."""
    from lamina.sign.key_ring import KeyRing

    def ring(name: str, *witnesses: PrivateKey) -> str:
        made = KeyRing()
        made.add(LEDGER.public, role="ledger", label=ORIGIN, valid_from=0)
        for at, each in enumerate(witnesses):
            made.add(each.public, role="witness", label=NAME if at == 0 else f"w{at}.example", valid_from=0)
        made.save(tmp_path / name)
        return name

    succeeded(call("receipt", "a.db", "2", "-o", "mine"))
    assert "witnesses: 1 cosigned, of 1 required" in succeeded(
        call("receipt", "--check", "mine", "--trust", ring("one.json", WITNESS))
    )
    refused(
        call("receipt", "--check", "mine", "--trust", ring("two.json", WITNESS, OTHER)), "ledger.quorum-not-reached"
    )
    refused(call("receipt", "--check", "mine", "--trust", ring("stranger.json", OTHER)), "ledger.quorum-not-reached")
    found = answer(call("receipt", "--check", "mine", "--trust", "ledger.pub", "--json"))
    assert found["witnesses"] == {"cosigned": None, "required": None}
    found = answer(call("receipt", "a.db", "--check", "mine", "--trust", "ledger.pub", "--json"))
    assert found["witnesses"] == {"cosigned": None, "required": 1}
    found = answer(call("receipt", "a.db", "--check", "mine", "--trust", "one.json", "--json"))
    assert found["witnesses"] == {"cosigned": 1, "required": 1}
    refused(
        call("receipt", "b.db", "--check", "mine", "--trust", "one.json"),
        "cli.receipt-other-ledger",
        "ledger.size-not-reached",
    )


def test_several_checkpoints_go_into_a_folder(call: Call, tmp_path: Path) -> None:
    (tmp_path / "back").mkdir()
    for name, origin in (("a.txt", "a.example"), ("b.txt", "b.example")):
        (tmp_path / name).write_text(note(20, origin=origin))
    result = call("witness", "a.txt", "b.txt", *OPTIONS, "--name", NAME, "-o", "back")
    assert "a.example: cosigned 20 leaves" in succeeded(result)
    assert all(NAME in (tmp_path / "back" / name).read_text() for name in ("a.txt", "b.txt"))
    (tmp_path / "back" / "a.txt").unlink()
    assert call("witness", "a.txt", "back/../a.txt", *OPTIONS, "--name", NAME, "-o", "back")[0] == 2, (
        "one would be lost"
    )
    assert not (tmp_path / "back" / "a.txt").exists()
    assert call("witness", *OPTIONS, "--name", NAME)[0] == 2
    assert call("witness", "a.txt", "b.txt", "--proof", "a.txt", *OPTIONS, "--name", NAME)[0] == 2


def test_a_witness_that_is_killed_has_not_signed_less_than_it_knows(tmp_path: Path) -> None:
    """Killed while it prints: the state has the tree, and the other continuation is refused afterwards."""
    make(tmp_path).cosign(request(None, 10), KEYS)
    program = (
        "import os, sys; from pathlib import Path; sys.path[:0] = sys.argv[1].split(':');\n"
        "from test_witnessing import *\n"
        "make(Path(sys.argv[2])).cosign(request(10, 30), KEYS); os.kill(os.getpid(), 9)\n"
    )
    folders = ":".join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")])
    done = subprocess.run([sys.executable, "-c", program, folders, str(tmp_path)], check=False, env=dict(os.environ))
    assert done.returncode == -9
    with raises_code("ledger.witness-fork"):
        make(tmp_path).cosign(request(10, 30, FORK), KEYS)


def test_copies_come_together(tmp_path: Path) -> None:
    one, _ = make(tmp_path).cosign(request(None, 20), KEYS)
    (tmp_path / "two").mkdir()
    two, _ = Witness(OTHER, "second.example", tmp_path / "two" / "state.json", clock=lambda: START).cosign(
        request(None, 20), KEYS
    )
    merged = merge_signatures(note(20), one, two)
    for name, by in ((NAME, WITNESS), ("second.example", OTHER)):
        assert f"— {name} {base64.b64encode(WitnessKey(name, by.public).id).decode()[:5]}" in merged
    assert NoteKey(ORIGIN, LEDGER.public).name in merged


@pytest.mark.parametrize("kind", ["dangling", "loop", "linked", "folder"])
def test_a_state_that_is_no_file_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    """A link to a disk that is not mounted is not an empty state, and a link beside a file is a second state with a second lock."""
    place, other = tmp_path / "state.json", tmp_path / "elsewhere" / "state.json"
    other.parent.mkdir()
    if kind == "linked":
        make(other.parent).cosign(request(None, 20), KEYS)
    if kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(place if kind == "loop" else other)
    with raises_code("admit.file-unreadable" if kind == "folder" else "ledger.witness-state-unreadable"):
        make(tmp_path).cosign(request(None, 30), KEYS)
    assert place.is_symlink() == (kind != "folder")


def test_a_note_that_only_just_fits_does_not_destroy_the_state(tmp_path: Path) -> None:
    """Anybody can add signature lines to a checkpoint; with the cosignature it must still be readable."""
    make(tmp_path).cosign(request(None, 20), KEYS)
    before = (tmp_path / "state.json").read_bytes()
    proof = request(20, 30).path
    text, more = note(30), 256 * 1024
    for at in range(60):
        room = min(6000, more - len(text.encode()) - 80)
        if room > 100:
            text += f"— junk{at} {base64.b64encode(bytes(room * 3 // 4 // 3 * 3)).decode()}\n"
    assert more - 120 < len(text.encode()) <= more
    with raises_code("ledger.note-malformed"):
        make(tmp_path, START + 1).cosign(WitnessRequest(text, 20, proof), KEYS)
    assert (tmp_path / "state.json").read_bytes() == before
    make(tmp_path, START + 2).cosign(request(20, 30), KEYS)
