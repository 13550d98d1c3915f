"""`lamina keys`: keys are made, never shown; the ring says who counts."""

from __future__ import annotations

import json
import os
import stat
import time
from functools import partial
from pathlib import Path
from typing import Any

import cbor2
import pytest
from asking import Call, answer, refused, succeeded
from cryptography.hazmat.primitives import serialization

from lamina.cli import terminal
from lamina.cli.keys import app
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey, PublicKey, parse_time


@pytest.fixture
def call(lamina: Call) -> Call:
    return partial(lamina, "keys")


def made(call: Call, name: str = "alice") -> str:
    return str(answer(call("new", f"{name}.key", "--no-passphrase", "--json"))["id"])


# ------------------------------------------------------------------------------ help


COMMANDS = [str(command.name) for command in app.registered_commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches(command: str, call: Call) -> None:
    text = succeeded(call(command, "--help"))
    told = " ".join(text.split())
    assert f"lamina keys {command}" in told.partition("Example")[2]
    assert "--json" in told
    assert "--passphrase " not in told  # never on the command line


def test_the_group_teaches(call: Call) -> None:
    text = succeeded(call("--help"))
    places = [text.index(f"│ {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert "Spends nothing" in " ".join(text.split())
    assert call()[0] == 2


@pytest.mark.parametrize(
    "words",
    [
        ("new",), ("nonsense",), ("list", "--nonsense"), ("add",), ("rotate", "a"),
        ("export", "a.pub", "--format", "der"), ("add", "a.pub", "--algorithm", "-7"),
        ("new", "a.key", "--no-passphrase", "--passphrase-file", "f"),
        ("new", "a.key", "--passphrase", "secret"),
    ],
)  # fmt: skip
def test_misuse_is_two(words: tuple[str, ...], call: Call) -> None:
    Path("a.pub").write_bytes(PrivateKey.generate().public.pem())
    code, printed, complaint = call(*words)
    assert code == 2
    assert printed == ""
    assert "Usage" in complaint
    assert not Path("a.key").exists()


# ------------------------------------------------------------------------------ new


def test_a_passphrase_may_come_through_a_pipe(call: Call) -> None:
    read, write = os.pipe()
    os.write(write, b"correct horse\n")
    os.close(write)
    answer(call("new", "alice.key", "--passphrase-file", f"/dev/fd/{read}", "--json"))
    os.close(read)
    assert PrivateKey.load("alice.key", b"correct horse").public == PublicKey.load("alice.pub")


def test_a_new_key_is_two_files(call: Call) -> None:
    Path("secret.txt").write_text("correct horse\nsecond line\n", encoding="utf-8")
    found = answer(call("new", "alice.key", "--passphrase-file", "secret.txt", "--json"))
    assert found == {"id": found["id"], "private": "alice.key", "public": "alice.pub", "sealed": True}
    key = PrivateKey.load("alice.key", b"correct horse")
    assert key.public == PublicKey.load("alice.pub")
    assert key.public.name == found["id"]
    assert stat.S_IMODE(os.stat("alice.key").st_mode) == 0o600
    serialization.load_pem_public_key(Path("alice.pub").read_bytes())


def test_the_passphrase_comes_from_the_environment(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_PASSPHRASE", "from outside")
    code, printed, complaint = call("new", "alice.key")
    assert code == 0
    assert "from outside" not in printed + complaint
    PrivateKey.load("alice.key", b"from outside")


def test_or_from_the_keyboard_twice(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def prompt(text: str, **options: Any) -> str:
        asked.append({"text": text, **options})
        return "typed"

    monkeypatch.setattr("lamina.cli.terminal.can_prompt", lambda: True)
    monkeypatch.setattr(terminal.typer, "prompt", prompt)
    assert call("new", "alice.key")[0] == 0
    PrivateKey.load("alice.key", b"typed")
    assert asked == [
        {"text": "Passphrase of the new key 'alice.key'", "hide_input": True, "confirmation_prompt": True, "err": True}
    ]


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_without_a_passphrase_only_if_it_is_said(call: Call, content: str | None) -> None:
    words = ["new", "alice.key"]
    if content is not None:
        Path("secret.txt").write_text(content, encoding="utf-8")
        words += ["--passphrase-file", "secret.txt"]
    code, printed, complaint = call(*words)
    assert code == 1
    assert printed == ""
    assert "--no-passphrase" in complaint
    assert not Path("alice.key").exists()
    made(call)
    assert not PrivateKey.sealed("alice.key")


def test_nothing_is_overwritten(call: Call) -> None:
    made(call)
    before = Path("alice.key").read_bytes(), Path("alice.pub").read_bytes()
    assert call("new", "alice.key", "--no-passphrase")[0] == 1
    Path("alice.key").rename("other.key")
    refused(call("new", "alice.key", "--no-passphrase"), "key.file-exists")
    assert (Path("other.key").read_bytes(), Path("alice.pub").read_bytes()) == before
    assert not Path("alice.key").exists()
    assert call("new", "alice.pub", "--no-passphrase")[0] == 1


def test_no_private_part_is_ever_printed(call: Call) -> None:
    texts = ["".join(call("new", "alice.key", "--no-passphrase")[1:])]
    for words in (("add", "alice.pub"), ("list",), ("show", "alice"), ("show", "alice.pub"), ("export", "alice")):
        for extra in ((), ("--json",)):
            if words[0] != "add" or not extra:
                texts.append("".join(call(*words, *extra)[1:]))
    pem = Path("alice.key").read_text(encoding="utf-8").split("\n")[1]
    key = serialization.load_pem_private_key(Path("alice.key").read_bytes(), None)
    secret = key.private_bytes_raw().hex()  # type: ignore[union-attr]
    assert not any(pem in text or secret in text for text in texts)


def test_a_private_key_is_not_shown_added_or_exported(call: Call) -> None:
    made(call)
    for words in (("show", "alice.key"), ("add", "alice.key"), ("export", "alice.key")):
        code, printed, complaint = call(*words)
        assert code == 1
        assert printed == ""
        assert "private key" in complaint


# ------------------------------------------------------------------------------ the ring


def test_add_list_show(call: Call) -> None:
    id = made(call)
    added = answer(call("add", "alice.pub", "--label", "Alice [A]", "--valid-from", "2026-01-01", "--json"))
    assert [row["id"] for row in added["keys"]] == [id]
    listed = answer(call("list", "--json"))
    assert listed == added
    assert listed["version"] == KeyRing.load("keys.json").version.hex()
    row = dict(listed["keys"][0])
    assert parse_time(row.pop("added")) == pytest.approx(time.time(), abs=100)
    assert row == {
        "id": id, "label": "Alice [A]", "role": "contributor", "algorithms": [-8, -19],
        "valid_from": "2026-01-01T00:00:00Z", "retired_from": None, "replaced_by": None, "revoked_from": None,
        "standing": "usable",
    }  # fmt: skip
    text = succeeded(call("list"))
    assert "Alice [A]" in text
    assert id[:16] in text
    shown = answer(call("show", "alice.pub", "--json"))
    assert shown == answer(call("show", id[:8], "--json"))
    assert (shown["id"], shown["ring"]) == (id, listed["keys"][0])
    assert id in call("show", "Alice [A]")[1]


def test_an_empty_ring_and_none(call: Call) -> None:
    KeyRing().save("keys.json")
    assert "no keys" in call("list")[1]
    assert call("list", "--keys", "none.json")[0] == 1
    made(call)
    assert "not in" in call("show", "alice.pub")[1]
    assert answer(call("show", "alice.pub", "--json"))["ring"] is None


def test_roles_and_algorithms(call: Call) -> None:
    made(call)
    found = answer(call("add", "alice.pub", "--role", "ledger", "--algorithm", "-19", "--json"))
    assert (found["keys"][0]["role"], found["keys"][0]["algorithms"]) == ("ledger", [-19])
    refused(call("add", "alice.pub", "--role", "contributor"), "key.already-in-ring")
    made(call, "bob")
    assert call("add", "bob.pub", "--role", "root")[0] == 2


def test_rotate(call: Call) -> None:
    old, new = made(call), made(call, "alice2")
    call("add", "alice.pub")
    found = answer(call("rotate", "alice", "alice2.pub", "--at", "2026-06-01", "--json"))
    at = parse_time("2026-06-01")
    assert [row["id"] for row in found["keys"]] == [old, new]
    assert found["keys"][0]["replaced_by"] == new
    ring = KeyRing.load("keys.json")
    assert ring.usable(bytes.fromhex(old), at + 5, issued_at=at - 1)
    assert not ring.usable(bytes.fromhex(old), at + 5, issued_at=at)
    assert ring.usable(bytes.fromhex(new), at)
    refused(call("rotate", "alice", "alice2.pub"), "key.name-not-unique")


def test_revoke(call: Call) -> None:
    id = made(call)
    call("add", "alice.pub")
    text = succeeded(call("revoke", "alice", "--at", "2026-03-01T12:00Z"))
    assert "2026-03-01T12:00:00Z" in text
    assert not KeyRing.load("keys.json").usable(bytes.fromhex(id), parse_time("2026-03-01T12:00Z"), issued_at=0)
    before = Path("keys.json").read_bytes()
    assert call("revoke", "alice", "--at", "2099-01-01")[0] == 1
    assert call("revoke", "bob")[0] == 1
    assert call("revoke", "alice", "--at", "whenever")[0] == 1
    assert Path("keys.json").read_bytes() == before
    now = answer(call("revoke", "alice", "--at", "2026-02-01", "--json"))
    assert now["keys"][0]["revoked_from"] == "2026-02-01T00:00:00Z"


def test_export(call: Call) -> None:
    id = made(call)
    call("add", "alice.pub")
    assert call("export", "alice")[1].encode() == Path("alice.pub").read_bytes()
    succeeded(call("export", "alice", "--format", "cose", "--output", "alice.cose"))
    assert cbor2.loads(Path("alice.cose").read_bytes())[2].hex() == id
    assert PublicKey.load("alice.cose") == PublicKey.load("alice.pub")
    found = answer(call("export", "alice.pub", "--format", "cose", "--json"))
    assert bytes.fromhex(found["key"]) == Path("alice.cose").read_bytes()
    assert call("export", "alice", "--output", "alice.cose")[0] == 1  # not overwritten


def test_a_ring_with_a_weak_key_is_refused(call: Call) -> None:
    made(call)
    call("add", "alice.pub")
    content = json.loads(Path("keys.json").read_text(encoding="utf-8"))
    content["keys"][0]["x"] = "01" + "00" * 31
    Path("keys.json").write_text(json.dumps(content), encoding="utf-8")
    code, printed, complaint = call("list", "--json")
    assert code == 1
    assert "prime order" in json.loads(printed)["refused"]
    assert "prime order" in complaint


def test_a_subject_key(call: Call) -> None:
    assert answer(call("subject", "subject.key", "--json")) == {"subject_key": "subject.key"}
    text = Path("subject.key").read_text(encoding="ascii")
    assert len(bytes.fromhex(text)) == 32
    assert stat.S_IMODE(os.stat("subject.key").st_mode) == 0o600
    assert text.strip() not in "".join(call("subject", "second.key")[1:])
    assert call("subject", "subject.key")[0] == 1
    assert Path("subject.key").read_text(encoding="ascii") == text
