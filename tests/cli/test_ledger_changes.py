"""`lamina ledger policy` and `lamina ledger key`: what holds from now on, and whose signatures count."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asking import Call, answer, refused, succeeded
from build import YEAR, Story, begin
from making import AUDITOR, GOVERNING, LEDGER, ORIGIN, OTHER, SECOND, START, Clock, key

from lamina.ledger import signed_checkpoint
from lamina.ledger.governance_records import KeyChange, KeyEvents, PolicyChange
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.key_ring import KeyRing
from lamina.sign.notes import NoteKey

NEXT = key("next")
OWNERS = (("owner", GOVERNING), ("second", SECOND))
BOTH = ("--key", "owner.key", "--key", "ledger.key")
MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),), plain=(GOVERNING.public,))
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
    for name, one in (("ledger", LEDGER), ("auditor", AUDITOR), ("other", OTHER), ("next", NEXT), *OWNERS):
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
    assert rows["clinical"] == ["top=0.5", "1", "1", "4.3772", "1,000"]
    assert 4.3771 < found["classes"]["clinical"]["epsilon"] < 4.3772
    assert rows["open"] == ["all", "public", "-", "-", "-"]
    assert found["classes"]["open"]["epsilon"] is None


def test_a_stricter_policy_needs_an_owner(call: Call) -> None:
    before = size()
    code, printed, _ = call("policy", "ledger.db", "stricter.toml", "--dry-run")
    assert (code, size()) == (0, before)
    assert "class clinical, noise multiplier: 1.0 → 2.0" in printed
    assert "nothing was changed" in printed
    assert "protects less" not in printed
    for words in ((), ("--key", "ledger.key"), ("--key", "auditor.key"), ("--key", "other.key")):
        refused(call("policy", "ledger.db", "stricter.toml", *words), "cli.governing-key-missing")
    found = answer(call("policy", "ledger.db", "stricter.toml", *BOTH, "--json"))
    assert (found["changed"], found["looser"], len(found["signatures"])) == (True, [], 1)
    assert found["checkpoint"].startswith(ORIGIN)
    assert size() == before + 1
    found = answer(call("policy", "ledger.db", "stricter.toml", *BOTH, "--json"))
    assert not found["changed"]
    code, printed, _ = call("policy", "ledger.db", "stricter.toml", *BOTH)
    assert "already in force" in printed
    assert size() == before + 1
    assert verify("ledger.db", trust=MINE).trusted


def test_a_looser_policy_needs_two(call: Call) -> None:
    answer(call("policy", "ledger.db", "same.toml", *BOTH, "--json"))
    before = size()
    code, _, told = call("policy", "ledger.db", "looser.toml", *BOTH)
    assert (code, size()) == (1, before)
    assert "noise multiplier of class 'clinical' falls" in told
    assert "ledger.policy-loosened" in told
    code, _, told = call("policy", "ledger.db", "looser.toml", *BOTH, "--key", "owner.key")
    assert (code, size()) == (1, before)
    text = succeeded(call("policy", "ledger.db", "looser.toml", *BOTH, "--key", "second.key"))
    assert "protects less: the noise multiplier of class 'clinical' falls" in text
    assert "authorised by 2 keys, and covered by a checkpoint" in text
    assert len(last(PolicyChange).authorization.signatures) == 2
    assert verify("ledger.db", trust=MINE).trusted


def test_owners_sign_elsewhere(call: Call, tmp_path: Path) -> None:
    before = size()
    assert "proposal" in answer(call("policy", "ledger.db", "looser.toml", "--propose", "change.msg", "--json"))
    assert size() == before
    shutil.copy("ledger.db", "copy.db")
    elsewhere = ("sign", "change.msg", "--ledger", "copy.db")
    printed = succeeded(call(*elsewhere, "--key", "owner.key", "-o", "a.sig"))
    assert "protects less: the noise multiplier of class 'clinical' falls" in printed
    assert (tmp_path / "a.sig").read_bytes() == GOVERNING.sign((tmp_path / "change.msg").read_bytes())
    refused(call(*elsewhere, "--key", "owner.key", "-o", "a.sig"), "admit.file-exists")
    found = answer(call(*elsewhere, "--key", "second.key", "--json"))
    assert found["signature"] == "change.msg.sig"
    for name in ("other.key", "auditor.key", "ledger.key"):
        refused(call(*elsewhere, "--key", name, "-o", "b.sig"), "cli.key-cannot-authorise")
    submit = ("submit", "ledger.db", "change.msg", "--key", "ledger.key", "--signature")
    refused(call(*submit, "a.sig"), "ledger.policy-loosened")
    (tmp_path / "b.sig").write_bytes(b"no signature")
    refused(call(*submit, "b.sig"), "cli.signature-not-valid")
    succeeded(call("policy", "ledger.db", "stricter.toml", "--propose", "other.msg"))
    # a signature is of one change, and of nothing else
    refused(call("submit", "ledger.db", "other.msg", "--signature", "a.sig"), "cli.signature-not-valid")
    assert size() == before
    succeeded(call(*submit, "a.sig", "--signature", "change.msg.sig"))
    assert size() == before + 1
    refused(call(*submit, "a.sig", "--signature", "change.msg.sig"), "ledger.authorised-out-of-turn")
    refused(call("sign", "other.msg", "--ledger", "ledger.db", "--key", "owner.key"), "ledger.authorised-out-of-turn")
    assert verify("ledger.db", trust=MINE).trusted


def test_a_proposal_that_is_none(call: Call, tmp_path: Path) -> None:
    answer(call("policy", "ledger.db", "looser.toml", "--propose", "change.msg", "--json"))
    good = (tmp_path / "change.msg").read_bytes()
    for bad in (b"", b"hello", good[:-1], good + b"\0", b"x" + good, good.replace(b"record/1", b"record/2")):
        (tmp_path / "bad.msg").write_bytes(bad)
        result = call("sign", "bad.msg", "--ledger", "ledger.db", "--key", "owner.key")
        refused(result, "cli.proposal-malformed")
        assert not (tmp_path / "bad.msg.sig").exists()


def test_another_ledger_takes_no_proposal_of_this_one(call: Call, tmp_path: Path) -> None:
    begin("again.db").ledger.close()
    for path in ("ledger.db", "again.db"):
        succeeded(call("terms", path, "--retention", "900", "--propose", f"{path}.msg"))
    result = call("sign", "again.db.msg", "--ledger", "ledger.db", "--key", "owner.key")
    refused(result, "ledger.authorised-for-other-ledger", "ledger.authorised-out-of-turn")


def test_quorum_and_retention(call: Call) -> None:
    assert answer(call("terms", "ledger.db", "--json"))["retention"] == YEAR
    refused(call("terms", "ledger.db", "--quorum", "2", *BOTH), "ledger.too-few-witnesses")
    succeeded(call("terms", "ledger.db", "--quorum", "1", "--retention", "500", *BOTH))
    found = answer(call("terms", "ledger.db", "--json"))
    assert (found["quorum"], found["retention"]) == (1, 500 * 86_400)
    for words in (("--quorum", "0"), ("--retention", "400")):
        refused(call("terms", "ledger.db", *words, *BOTH), "ledger.second-signature-missing")
    refused(call("key", "ledger.db", "revoke", "witness.example", *BOTH), "ledger.too-few-witnesses")
    succeeded(call("terms", "ledger.db", "--retention", "400", *BOTH, "--key", "second.key"))
    problem = verify("ledger.db", trust=MINE).problem
    assert problem is not None and problem.code == "verify.too-few-cosignatures"  # nobody cosigned the last one yet


def test_what_the_owner_states_about_data_and_model(call: Call) -> None:
    """From policy.toml into a governing record; an owner reads every text before signing."""
    Path("about.toml").write_text(Path("same.toml").read_text() + '[about]\ntitle = "ECG"\ncontact = "a@b.example"\n')
    succeeded(call("terms", "ledger.db", "--about", "about.toml", *BOTH))
    at = size() - 1
    stated = {"contact": {"text": "a@b.example", "leaf": at}, "title": {"text": "ECG", "leaf": at}}
    assert answer(call("terms", "ledger.db", "--json"))["about"] == stated
    assert f"about.title (leaf {at}): ECG" in call("terms", "ledger.db")[1]
    assert not answer(call("terms", "ledger.db", "--about", "about.toml", *BOTH, "--json"))["changed"]
    Path("about.toml").write_text(Path("same.toml").read_text() + '[about]\ntitle = "ECG, second edition"\n')
    succeeded(call("terms", "ledger.db", "--about", "about.toml", "--propose", "about.msg"))
    result = call("sign", "about.msg", "--ledger", "ledger.db", "--key", "owner.key")
    assert "about.title: ECG, second edition" in result[1] and "about.contact: no longer stated" in result[1]
    succeeded(call("submit", "ledger.db", "about.msg", "--signature", "about.msg.sig", "--key", "ledger.key"))
    stated = {"title": {"text": "ECG, second edition", "leaf": at + 1}}
    assert answer(call("terms", "ledger.db", "--json"))["about"] == stated
    assert verify("ledger.db", trust=MINE).verified
    Path("about.toml").write_text(Path("same.toml").read_text() + '[about]\ncolour = "red"\n')
    refused(call("terms", "ledger.db", "--about", "about.toml", *BOTH), "plan.policy-invalid")


def test_a_ledger_with_owners(call: Call, tmp_path: Path) -> None:
    keys = ("--governing-key", "owner.pub", "--governing-key", "second.pub", "--witness", "other.pub")
    words = ("init", "new.db", "stricter.toml", *keys, "--key", "next.key")
    refused(call(*words), "ledger.header-not-signed")
    assert not Path("new.db").exists()
    succeeded(call(*words, "--propose", "header.msg"))
    for name in ("owner", "second"):
        printed = succeeded(call("sign", "header.msg", "--key", f"{name}.key", "-o", f"{name}.sig"))
        assert f"governing key owner ({GOVERNING.public.name[:16]})" in printed
    refused(call("sign", "header.msg", "--key", "other.key", "-o", "other.sig"), "cli.key-cannot-authorise")
    submit = ("submit", "new.db", "header.msg", "--key", "next.key", "--signature", "owner.sig")
    refused(call(*submit), "ledger.header-not-signed")
    found = answer(call(*submit, "--signature", "second.sig", "--json"))
    assert len(found["governing"]) == 2 and found["checkpoint"].startswith(ORIGIN)
    assert call(*words)[0] == 2  # it is there
    with Ledger.open("new.db") as made:
        assert (made.header.witnesses, made.header.retention) == (1, YEAR)
        text = made.latest()
    assert text is not None
    ring = KeyRing()
    ring.add(SECOND.public, label="owner", role="governing")
    ring.save("trusted.json")
    refused(call("checkpoint", "new.db", "--witnessed"), "cli.checkpoint-not-witnessed")
    Path("signed.txt").write_text(signed_checkpoint.add_cosignature(text, OTHER, int(time.time()), "other"))
    succeeded(call("checkpoint", "new.db", "--cosigned", "signed.txt"))
    assert succeeded(call("checkpoint", "new.db", "--witnessed")) == Path("signed.txt").read_text()
    assert "verified and trusted" in succeeded(call("verify", "new.db", "--trust", "trusted.json"))
    assert "self-consistent, not trusted" in succeeded(call("verify", "new.db"))
    # A cosignature by a witness after it was replaced does not count.
    succeeded(call("key", "new.db", "rotate", "other", "auditor.pub", "--key", "owner.key", "--key", "next.key"))
    with Ledger.open("new.db") as made:
        text = made.latest()
    assert text is not None
    Path("late.txt").write_text(signed_checkpoint.add_cosignature(text, OTHER, START + 4 * YEAR, "other"))
    succeeded(call("checkpoint", "new.db", "--cosigned", "late.txt"))
    assert succeeded(call("checkpoint", "new.db", "--witnessed")) == Path("signed.txt").read_text()


def test_a_key_ring_is_enrolled_in_one_record(call: Call) -> None:
    ring, before = KeyRing(), size()
    for n in range(5):
        ring.add(key(f"person {n}").public, label=f"person {n}", valid_from=START)
    ring.revoke(key("person 4").public.id, at=START + 5)
    ring.save("keys.json")
    found = answer(call("key", "ledger.db", "enrol", "keys.json", *BOTH, "--json"))
    assert (len(found["events"]), size()) == (6, before + 1)
    assert "nothing changes" in succeeded(call("key", "ledger.db", "enrol", "keys.json", *BOTH))
    printed = succeeded(call("verify", "ledger.db"))
    assert f"leaf {before}: 5 contributor keys added, 1 revoked, by {GOVERNING.public.name[:16]}" in printed


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
        ("policy", "ledger.db", "--dry-run"),
        ("policy", "ledger.db", "same.toml", "--dry-run", "--propose", "x"),
        ("policy", "ledger.db", "--propose", "x"),
        ("sign", "x"),
        ("submit", "ledger.db"),
        ("init", "new.db", "same.toml"),
        ("terms", "nowhere.db"),
        ("key", "nowhere.db"),
        ("key", "ledger.db", "dance"),
        ("key", "ledger.db", "add", "next.pub", "--key", "ledger.key"),
        ("key", "ledger.db", "add", "next.pub", "--role", "king", "--key", "ledger.key"),
        ("key", "ledger.db", "revoke", "--key", "ledger.key"),
        ("key", "ledger.db", "revoke", "auditor.example", "--role", "auditor", "--key", "ledger.key"),
        ("key", "ledger.db", "enrol", "--key", "owner.key"),
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
        call("key", "ledger.db", "add", "other.pub", "--role", "auditor", "--key", "owner.key"), "ledger.clock-behind"
    )


def test_a_key_is_added_and_revoked(call: Call) -> None:
    found = answer(call("key", "ledger.db", "add", "next.pub", "--role", "auditor", "--name", "third.example",
                        *BOTH, "--json"))  # fmt: skip
    (event,) = found["events"]
    assert (event["change"], event["key"]["role"], event["key"]["name"]) == ("add", "auditor", "third.example")
    assert found["checkpoint"].split("\n")[1] == str(size()) == str(found["index"] + 1)
    printed = succeeded(call("key", "ledger.db", "revoke", "third.example", *BOTH))
    assert f"revoke {NEXT.public.id.hex()[:16]}" in printed
    refused(call("key", "ledger.db", "add", "next.pub", "--role", "auditor", *BOTH), "ledger.key-was-revoked")
    refused(
        call("key", "ledger.db", "add", "other.pub", "--role", "governing", *BOTH), "ledger.second-signature-missing"
    )
    succeeded(call("key", "ledger.db", "add", "other.pub", "--role", "governing", *BOTH, "--key", "second.key"))
    printed = succeeded(call("key", "ledger.db", "revoke", "auditor.example", "--key", "other.key"))
    assert "no checkpoint covers it yet" in printed and "lamina ledger checkpoint ledger.db --key" in printed
    assert verify("ledger.db").verified


def test_the_ledgers_own_key_is_rotated(call: Call, tmp_path: Path) -> None:
    shutil.copy("ledger.key", "ledger.pem")
    os.chmod("ledger.pem", 0o600)
    mine = LEDGER.public.id.hex()
    refused(call("key", "ledger.db", "revoke", mine, *BOTH), "ledger.last-signing-key")
    refused(call("key", "ledger.db", "revoke", mine, "--key", "ledger.key"), "ledger.last-signing-key")
    printed = succeeded(call("key", "ledger.db", "rotate", mine[:10], "next.pub", "--key", "ledger.key"))
    assert "the new key signs from now on" in printed
    assert "replace ledger.pem" in printed
    os.unlink("ledger.pem")
    before = size()
    refused(call("key", "ledger.db", "revoke", "auditor.pub", *BOTH), "ledger.key-may-not-sign")
    assert size() == before
    succeeded(call("key", "ledger.db", "revoke", mine, "--key", "owner.key", "--key", "next.key"))
    assert last(KeyEvents).events[0].change is KeyChange.REVOKE
    found = verify("ledger.db", trust=Trust(plain=(GOVERNING.public,)))
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
        code, _, told = call("key", "ledger.db", *words, *BOTH)
        assert (code, size()) == (1, before), words
        assert problem in told
    for name in ("other.key", "ledger.key", "auditor.key"):  # the ledger's own key adds no other
        refused(
            call("key", "ledger.db", "add", "next.pub", "--role", "auditor", "--key", name), "cli.governing-key-missing"
        )
    assert size() == before


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


def test_init_names_the_ledger_in_the_policy(call: Call, tmp_path: Path) -> None:
    before = Path("same.toml").read_text()
    owner = ("--governing-key", "owner.key")
    found = answer(call("init", "first.db", "same.toml", *owner, "--json"))
    with Ledger.open("first.db") as ledger:
        assert found["header"] == ledger.header_hash.hex()
    assert Path("same.toml").read_text() == before
    printed = succeeded(call("init", "second.db", "same.toml", *owner, "--write"))
    with Ledger.open("second.db") as ledger:
        line = f'ledger = "{ledger.header_hash.hex()}"'
    assert line in printed and Path("same.toml").read_text() == before.replace("[corpus]\n", f"[corpus]\n{line}\n")
    refused(call("init", "third.db", "same.toml", *owner), "cli.policy-names-ledger")
    assert call("init", "third.db", "stricter.toml", *owner, "--write", "--propose", "a.msg")[0] == 2
    Path("odd.toml").write_text(before.replace("[corpus]", "[ corpus ]"))
    refused(call("init", "third.db", "odd.toml", *owner, "--write"), "cli.no-corpus-table")
    assert not Path("third.db").exists() and not Path("a.msg").exists()


def test_init_takes_its_terms_from_the_policy(call: Call) -> None:
    """Options come before the policy; what a policy cannot have is refused."""
    for name in ("w1", "w2"):
        Path(f"{name}.pub").write_bytes(key(name).public.pem())
    said = Path("same.toml").read_text()
    Path("said.toml").write_text(said.replace("[corpus]", "[corpus]\nretention = 30\ngranularity = 3\nwitnesses = 1"))
    words = ("--governing-key", "owner.key", "--witness", "w1.pub", "--witness", "w2.pub")

    def made(place: str, *more: str) -> tuple[int, int, int]:
        answer(call("init", place, *more, *words, "--json"))
        with Ledger.open(place) as ledger:
            return ledger.header.retention // 86_400, ledger.header.granularity, ledger.header.witnesses

    assert made("a.db", "same.toml") == (365, 1, 2)
    assert made("b.db", "said.toml") == (30, 3, 1)
    assert made("c.db", "said.toml", "--quorum", "0", "--retention", "10") == (10, 3, 0)
    assert verify("c.db").verified  # b.db waits for its witness
    for wrong in ("retention = 0", "granularity = 0", "witnesses = -1"):
        Path("wrong.toml").write_text(said.replace("[corpus]", f"[corpus]\n{wrong}"))
        refused(call("init", "d.db", "wrong.toml", *words), "plan.policy-invalid")
    refused(call("init", "d.db", "said.toml", *words[:2]), "ledger.header-too-few-witnesses")
    assert not Path("d.db").exists()
