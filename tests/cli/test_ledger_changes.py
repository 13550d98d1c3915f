"""`lamina ledger policy` and `lamina ledger key`: what holds from now on, and whose signatures count."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asking import Call, answer, refused, succeeded
from build import YEAR, Story
from making import AUDITOR, LEDGER, ORIGIN, OTHER, START, Clock, key

from lamina.ledger.governance_records import KeyChange, KeyEvent, PolicyChange
from lamina.ledger.signed_checkpoint import NoteKey
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger

NEXT = key("next")
MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),))
POLICY = """
[corpus]
origin = "clinic.example/ledger"
accountant = "rdp"
delta = 1e-5
floors = {{ clip_norm = {floor}, noise_multiplier = 0.5 }}

[class.clinical]
population = 1000
clip_norm = 1.0
noise_multiplier = {noise}
profile = {{ top = 0.5 }}

[class.open]
public = true
"""


@pytest.fixture
def call(ledger_call: Call, template: tuple[Path, Story], tmp_path: Path) -> Call:
    """`lamina ledger …` in a folder with the ledger, keys and policies."""
    shutil.copy(template[0], tmp_path / "ledger.db")
    for name, one in (("ledger", LEDGER), ("auditor", AUDITOR), ("other", OTHER), ("next", NEXT)):
        one.save(tmp_path / f"{name}.key", None)
        (tmp_path / f"{name}.pub").write_bytes(one.public.pem())
    for name, floor, noise in (("same", 0.2, 1.0), ("stricter", 0.2, 2.0), ("looser", 0.2, 0.75)):
        (tmp_path / f"{name}.toml").write_text(POLICY.format(floor=floor, noise=noise))
    return ledger_call


def size() -> int:
    with Ledger.open("ledger.db") as ledger:
        return ledger.size


def last(kind: type[Any]) -> Any:
    with Ledger.open("ledger.db") as ledger:
        return [leaf.record for leaf in ledger.of_kind(kind)][-1]


# ------------------------------------------------------------------------------ policy


def test_the_policy_in_force(call: Call) -> None:
    found = answer(call("policy", "ledger.db", "--json"))
    assert found["floors"] == {"clip_norm": 0.2, "noise_multiplier": 0.5}
    assert found["classes"]["clinical"]["noise_multiplier"] == 1.0
    printed = succeeded(call("policy", "ledger.db"))
    assert "clinic.example/ledger, rdp at δ = 1e-05\n" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()}
    assert rows["clinical"] == ["1", "1", "4.3772", "1,000", "top=0.5"]
    assert 4.3771 < found["classes"]["clinical"]["epsilon"] < 4.3772
    assert rows["open"] == ["public", "-", "-", "-", "all"]
    assert found["classes"]["open"]["epsilon"] is None


def test_a_stricter_policy_needs_the_ledgers_key(call: Call) -> None:
    before = size()
    code, printed, _ = call("policy", "ledger.db", "stricter.toml", "--dry-run")
    assert (code, size()) == (0, before)
    assert "class clinical, noise multiplier: 1.0 → 2.0" in printed
    assert "nothing was changed" in printed
    assert "protects less" not in printed
    found = answer(call("policy", "ledger.db", "stricter.toml", "--key", "ledger.key", "--json"))
    assert (found["changed"], found["looser"], len(found["signatures"])) == (True, [], 1)
    assert found["checkpoint"].startswith(ORIGIN)
    assert size() == before + 1
    found = answer(call("policy", "ledger.db", "stricter.toml", "--key", "ledger.key", "--json"))
    assert not found["changed"]
    code, printed, _ = call("policy", "ledger.db", "stricter.toml", "--key", "ledger.key")
    assert "already in force" in printed
    assert size() == before + 1
    assert verify("ledger.db", trust=MINE).trusted


def test_a_looser_policy_needs_two(call: Call) -> None:
    answer(call("policy", "ledger.db", "same.toml", "--key", "ledger.key", "--json"))
    before = size()
    code, _, told = call("policy", "ledger.db", "looser.toml", "--key", "ledger.key")
    assert (code, size()) == (1, before)
    assert "noise multiplier of class 'clinical' falls" in told
    assert "two parties" in told
    code, _, told = call("policy", "ledger.db", "looser.toml", "--key", "ledger.key", "--key", "ledger.key")
    assert (code, size()) == (1, before)
    refused(
        call("policy", "ledger.db", "looser.toml", "--key", "ledger.key", "--key", "other.key"),
        "cli.key-cannot-sign-policy",
    )
    code, _, told = call("policy", "ledger.db", "looser.toml", "--key", "auditor.key")
    assert code == 1
    assert "the ledger's own key too" in told
    text = succeeded(call("policy", "ledger.db", "looser.toml", "--key", "ledger.key", "--key", "auditor.key"))
    assert "protects less: the noise multiplier of class 'clinical' falls" in text
    assert "adopted, with 2 signatures" in text
    assert len(last(PolicyChange).signatures) == 2
    assert verify("ledger.db", trust=MINE).trusted


def test_an_auditor_signs_elsewhere(call: Call, tmp_path: Path) -> None:
    before = size()
    assert "proposal" in answer(call("policy", "ledger.db", "looser.toml", "--propose", "change.msg", "--json"))
    assert size() == before
    shutil.copy("ledger.db", "copy.db")
    printed = succeeded(call("policy", "copy.db", "--sign", "change.msg", "--key", "auditor.key", "-o", "a.sig"))
    assert "protects less: the noise multiplier of class 'clinical' falls" in printed
    assert (tmp_path / "a.sig").read_bytes() == AUDITOR.sign((tmp_path / "change.msg").read_bytes())
    code, _, told = call("policy", "copy.db", "--sign", "change.msg", "--key", "auditor.key", "-o", "a.sig")
    assert "not overwritten" in told
    found = answer(call("policy", "copy.db", "--sign", "change.msg", "--key", "auditor.key", "--json"))
    assert found["signature"] == "change.msg.sig"
    refused(
        call("policy", "copy.db", "--sign", "change.msg", "--key", "other.key", "-o", "b.sig"),
        "cli.key-cannot-sign-policy",
    )
    # a signature is of one change, and of nothing else
    code, _, told = call("policy", "ledger.db", "stricter.toml", "--key", "ledger.key", "--signature", "a.sig")
    assert (code, size()) == (1, before)
    assert "cli.signature-not-valid" in told
    (tmp_path / "b.sig").write_bytes(b"no signature")
    assert call("policy", "ledger.db", "looser.toml", "--key", "ledger.key", "--signature", "b.sig")[0] == 1
    assert call("policy", "ledger.db", "looser.toml", "--key", "ledger.key", "--signature", "a.sig")[0] == 0
    assert size() == before + 1
    assert verify("ledger.db", trust=MINE).trusted


def test_a_proposal_that_is_none(call: Call, tmp_path: Path) -> None:
    answer(call("policy", "ledger.db", "looser.toml", "--propose", "change.msg", "--json"))
    good = (tmp_path / "change.msg").read_bytes()
    for bad in (
        b"",
        b"hello",
        good[:-1],
        good + b"\0",
        b"x" + good,
        good.replace(b"clinic.example", b"another.exampl"),
    ):
        (tmp_path / "bad.msg").write_bytes(bad)
        result = call("policy", "ledger.db", "--sign", "bad.msg", "--key", "auditor.key")
        refused(result, "cli.policy-proposal-malformed", "cli.proposal-of-other-ledger")
        assert not (tmp_path / "bad.msg.sig").exists()


def test_a_policy_of_another_ledger(call: Call, tmp_path: Path) -> None:
    text = (tmp_path / "stricter.toml").read_text()
    for old, new, problem in (
        ("clinic.example/ledger", "another.example", "is the policy of 'another.example'"),
        ("1e-5", "1e-6", "cli.policy-changes-accounting"),
        ("rdp", "pld", "cli.policy-changes-accounting"),
    ):
        (tmp_path / "other.toml").write_text(text.replace(old, new))
        code, _, told = call("policy", "ledger.db", "other.toml", "--dry-run")
        assert code == 1
        assert problem in told


def test_misuse(call: Call) -> None:
    for words in (
        ("policy", "nowhere.db"),
        ("policy", "ledger.db", "nowhere.toml", "--dry-run"),
        ("policy", "ledger.db", "same.toml"),
        ("policy", "ledger.db", "--dry-run"),
        ("policy", "ledger.db", "same.toml", "--dry-run", "--propose", "x"),
        ("policy", "ledger.db", "same.toml", "--dry-run", "-o", "x"),
        ("policy", "ledger.db", "--sign", "x"),
        ("policy", "ledger.db", "same.toml", "--sign", "x", "--key", "ledger.key"),
        ("key", "nowhere.db"),
        ("key", "ledger.db", "dance"),
        ("key", "ledger.db", "add", "next.pub", "--key", "ledger.key"),
        ("key", "ledger.db", "add", "next.pub", "--role", "king", "--key", "ledger.key"),
        ("key", "ledger.db", "revoke", "--key", "ledger.key"),
        ("key", "ledger.db", "revoke", "auditor.example", "--role", "auditor", "--key", "ledger.key"),
        ("key", "ledger.db", "rotate", "auditor.example", "next.pub"),
    ):
        assert call(*words)[0] == 2, words


# ------------------------------------------------------------------------------ keys


def test_the_keys_of_a_ledger(call: Call) -> None:
    found = {each["name"]: each for each in answer(call("key", "ledger.db", "--json"))["keys"]}
    assert found[ORIGIN]["role"] == "ledger"
    assert found["auditor.example"]["counts"]
    text = succeeded(call("key", "ledger.db"))
    assert "revoked" in text
    assert "was replaced at" in text
    assert "witness" in text


def test_looking_needs_no_clock(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "open", partial(Ledger.open, clock=Clock(START - YEAR)))
    code, text, _ = call("key", "ledger.db")
    assert code == 0 and "counts" in text
    refused(
        call("key", "ledger.db", "add", "other.pub", "--role", "auditor", "--key", "ledger.key"), "ledger.clock-behind"
    )


def test_a_key_is_added_and_revoked(call: Call) -> None:
    found = answer(call("key", "ledger.db", "add", "next.pub", "--role", "auditor", "--name", "second.example",
                        "--key", "ledger.key", "--json"))  # fmt: skip
    assert (found["change"], found["key"]["role"], found["key"]["name"]) == ("add", "auditor", "second.example")
    assert found["checkpoint"] == size() == found["index"] + 1
    printed = succeeded(call("policy", "ledger.db", "looser.toml", "--key", "ledger.key", "--key", "next.key"))
    printed = succeeded(call("key", "ledger.db", "revoke", "second.example", "--key", "ledger.key"))
    assert f"revoke {NEXT.public.id.hex()[:16]}" in printed
    refused(
        call("policy", "ledger.db", "stricter.toml", "--key", "ledger.key", "--key", "next.key"),
        "cli.key-not-valid-now",
    )
    assert verify("ledger.db", trust=MINE).trusted


def test_the_ledgers_own_key_is_rotated(call: Call, tmp_path: Path) -> None:
    shutil.copy("ledger.key", "ledger.pem")
    os.chmod("ledger.pem", 0o600)
    mine = LEDGER.public.id.hex()
    refused(call("key", "ledger.db", "revoke", mine, "--key", "ledger.key"), "cli.key-revokes-itself")
    printed = succeeded(call("key", "ledger.db", "rotate", mine[:10], "next.pub", "--key", "ledger.key"))
    assert "the new key signs from now on" in printed
    assert "replace ledger.pem" in printed
    before = size()
    code, _, told = call("key", "ledger.db", "revoke", "auditor.pub", "--key", "ledger.key")
    assert (code, size()) == (1, before)
    assert "was replaced at" in told
    printed = succeeded(call("key", "ledger.db", "revoke", mine, "--key", "next.key"))
    assert last(KeyEvent).change is KeyChange.REVOKE
    found = verify("ledger.db", trust=MINE)
    assert found.trusted, found.problem
    assert call("checkpoint", "ledger.db", "--key", "next.key")[0] == 0


def test_what_cannot_be_done_with_keys(call: Call) -> None:
    before = size()
    for words, problem in (
        (("add", "ledger.pub", "--role", "auditor"), "ledger.key-role-changed"),
        (("add", "ledger.key", "--role", "auditor"), "is a private key"),
        (("rotate", "auditor.example", "ledger.pub"), "ledger.key-role-changed"),
        (("revoke", "nobody"), "means no key"),
        (("revoke", "other.pub"), "means no key"),
        (("add", "next.pub", "--role", "ledger", "--name", "another.example"), "is named 'another.example'"),
        (("add", "next.pub", "--role", "ledger", "--at", "never"), "never"),
    ):
        code, _, told = call("key", "ledger.db", *words, "--key", "ledger.key")
        assert (code, size()) == (1, before), words
        assert problem in told
    code, _, told = call("key", "ledger.db", "add", "next.pub", "--role", "auditor", "--key", "other.key")
    assert (code, size()) == (1, before)
    assert "ledger.key-may-not-sign" in told


def test_a_link_to_a_ledger_is_the_ledger(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.db").symlink_to("../ledger.db")
    assert answer(call("verify", "run/ledger.db", "--no-signatures", "--json"))["verified"]
    assert answer(call("show", "run/ledger.db", "--json"))["size"] == size()
    assert answer(call("key", "run/ledger.db", "--json"))["origin"] == ORIGIN


def test_a_key_that_may_not_sign_changes_nothing(call: Call) -> None:
    before = size()
    for words in (("withdraw", "ledger.db", "9", "--reason", "consent"), ("prune", "ledger.db", "--yes")):
        code, _, told = call(*words, "--key", "auditor.key")
        assert (code, size()) == (1, before)
        assert "ledger.key-may-not-sign" in told
