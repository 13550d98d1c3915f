"""`lamina ledger request` and `withdraw`: a contributor signs offline, a keeper records, an operator signs for a letter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import Call, answer, refused, succeeded
from build import ALICE, BOB, YEAR, Story, begin, contribution
from making import GOVERNING, LEDGER, OTHER, SECOND, START, TWO_OWNERS, key

from lamina.ledger.governance_records import Key, Role, TermsChange, Withdrawal, WithdrawalRule
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger

DESK = key("desk")
KEYS = (*TWO_OWNERS, Key(name="desk.example", x=DESK.public.x, role=Role.OPERATOR))
NAMED = {
    "alice": ALICE, "bob": BOB, "desk": DESK, "ledger": LEDGER, "owner": GOVERNING, "second": SECOND, "other": OTHER,
}  # fmt: skip


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """ledger.db, which takes signed requests alone; Alice's contribution in a folder that names it; everybody's keys."""
    made = begin(str(tmp_path / "ledger.db"), withdraw=WithdrawalRule.SIGNED, keys=KEYS)
    people = [contribution(n, (ALICE, BOB)[n % 2], ledger=made.ledger.header_hash) for n in range(4)]
    made.at["first"] = made.admit(people)[0]
    made.sign()
    made.ledger.close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "descriptor.cbor").write_bytes(people[0].descriptor.encode())
    (tmp_path / "mine" / "attestation.cose").write_bytes(people[0].attestation)
    for name, one in NAMED.items():
        one.save(tmp_path / f"{name}.key", None)
    (tmp_path / "letter.pdf").write_bytes(b"%PDF please")
    return made


def digest_of(story: Story, number: int) -> str:
    with Ledger.open("ledger.db") as ledger:
        return ledger.leaf(story.at["first"] + number).record.descriptor.hex()  # type: ignore[union-attr]


def test_a_contributor_signs_offline(ledger_call: Call, story: Story) -> None:
    call = ledger_call
    text = succeeded(call("request", "mine", "--reason", "consent", "--key", "alice.key", "-o", "mine.cose"))
    assert text.startswith("mine.cose: signed by")
    found = answer(call("withdraw", "ledger.db", "--request", "mine.cose", "--key", "ledger.key", "--json"))
    assert (found["signed"], found["withdrawn"][0]["by"]) == (True, "contributor")
    assert "signed by the contributor" in succeeded(call("show", "ledger.db", "--kind", "withdrawal"))
    assert ": consent, signed by the contributor" in succeeded(call("trace", "ledger.db", "mine"))
    assert verify("ledger.db", now=START + 5 * YEAR).verified
    again = succeeded(call("withdraw", "ledger.db", "--request", "mine.cose"))
    assert "already withdrawn" in again and "signed by the contributor" in again


def test_which_ledger_is_meant(ledger_call: Call, story: Story) -> None:
    call, whole = ledger_call, digest_of(story, 1)
    words = ("request", whole, "--reason", "data", "--key", "bob.key", "--json")
    refused(call(*words), "cli.request-ledger-missing")
    made = answer(call(*words, "--ledger", "ledger.db"))
    same = answer(call(*words, "--ledger", made["ledger"], "--effect", "finish"))
    assert (made["withdraw"], made["ledger"], made["request"]) == (
        whole,
        same["ledger"],
        f"withdrawal-{whole[:8]}.cose",
    )
    assert call("request", whole[:8], "--reason", "data", "--key", "bob.key", "--ledger", "ledger.db")[0] == 2
    assert call("request", whole, "--reason", "because", "--key", "bob.key", "--ledger", "ledger.db")[0] == 2
    answer(call(*words, "--ledger", "00" * 32, "-o", "elsewhere.cose"))
    refused(call("withdraw", "ledger.db", "--request", "elsewhere.cose"), "ledger.withdrawal-not-allowed")


def test_without_a_signature_it_is_refused_every_way(ledger_call: Call, story: Story, tmp_path: Path) -> None:
    call, whole = ledger_call, digest_of(story, 1)
    words = ("withdraw", "ledger.db", whole, "--reason", "consent")
    refused(call(*words), "ledger.withdrawal-not-signed")
    refused(call(*words, "--request", "letter.pdf", "--key", "ledger.key"), "ledger.withdrawal-not-signed")
    refused(call(*words, "--key", "other.key"), "ledger.key-may-not-sign")
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "a.json").write_text(json.dumps({"withdraw": whole, "reason": "consent"}))
    assert "refused: " in call("withdraw", "ledger.db", "--folder", "inbox")[1]
    with Ledger.open("ledger.db") as ledger:
        assert ledger.withdrawals() == {}


def test_an_operator_signs_for_a_letter(ledger_call: Call, story: Story) -> None:
    call = ledger_call
    words = ("withdraw", "ledger.db", digest_of(story, 1), "--reason", "legal")
    assert call(*words, "--key", "desk.key")[0] == 2  # for which request?
    found = answer(
        call(*words, "--request", "letter.pdf", "--key", "desk.key", "--key", "ledger.key", "--json")
    )  # fmt: skip
    assert (found["signed"], found["withdrawn"][0]["by"]) == (True, "operator")
    assert call(*words, "--request", "letter.pdf", "--key", "desk.key", "--key", "owner.key")[0] == 2
    offline = (
        "request",
        digest_of(story, 2),
        "--reason",
        "legal",
        "--ledger",
        "ledger.db",
        "--handed-in",
        "letter.pdf",
    )
    answer(call(*offline, "--key", "desk.key", "-o", "desk.cose", "--json"))
    answer(call(*offline, "--key", "other.key", "-o", "other.cose", "--json"))
    refused(call("withdraw", "ledger.db", "--request", "other.cose"), "ledger.withdrawal-not-allowed")
    assert answer(call("withdraw", "ledger.db", "--request", "desk.cose", "--json"))["withdrawn"][0]["by"] == "operator"
    assert call("withdraw", "ledger.db", "9", "--reason", "data", "--request", "desk.cose")[0] == 2
    assert verify("ledger.db", now=START + 5 * YEAR).verified


def test_the_folder_takes_what_was_signed(ledger_call: Call, story: Story, tmp_path: Path) -> None:
    call, inbox = ledger_call, tmp_path / "inbox"
    inbox.mkdir()
    answer(call("request", "mine", "--reason", "consent", "--key", "alice.key", "-o", "inbox/mine.cose", "--json"))
    assert "withdrawn in leaf" in succeeded(call("withdraw", "ledger.db", "--folder", "inbox"))
    assert (inbox / "done" / "mine.cose").is_file()
    with Ledger.open("ledger.db") as ledger:
        (leaf,) = ledger.of_kind(Withdrawal)
        assert leaf.record.signed == (inbox / "done" / "mine.cose").read_bytes()  # type: ignore[union-attr]


def test_who_may_withdraw_is_a_term_of_the_ledger(ledger_call: Call, story: Story) -> None:
    call = ledger_call
    assert answer(call("terms", "ledger.db", "--json"))["withdraw"] == "signed"
    assert call("terms", "ledger.db", "--withdraw", "anybody")[0] == 2
    keeper = ("terms", "ledger.db", "--withdraw", "keeper", "--key", "owner.key")
    refused(call(*keeper), "ledger.second-signature-missing")
    answer(call(*keeper, "--key", "second.key", "--key", "ledger.key", "--json"))
    assert "the keeper may withdraw" in succeeded(call("terms", "ledger.db"))
    assert "by the keeper alone" in succeeded(call("withdraw", "ledger.db", digest_of(story, 1), "--reason", "data"))
    answer(call("terms", "ledger.db", "--withdraw", "signed", "--key", "owner.key", "--json"))
    with Ledger.open("ledger.db") as ledger:
        assert [leaf.record.withdraw for leaf in ledger.of_kind(TermsChange)] == [  # type: ignore[union-attr]
            WithdrawalRule.KEEPER, WithdrawalRule.SIGNED,
        ]  # fmt: skip


def test_the_policy_says_who_may_withdraw(ledger_call: Call, tmp_path: Path) -> None:
    text = '[corpus]\norigin = "ward"\ndelta = 1e-5\n{}\n[class.open]\npublic = true\n'
    GOVERNING.save(tmp_path / "owner.key", None)
    found = {}
    for name, line in (("none", ""), ("keeper", 'withdraw = "keeper"'), ("signed", 'withdraw = "signed"')):
        (tmp_path / f"{name}.toml").write_text(text.format(line))
        answer(ledger_call("init", f"{name}.db", f"{name}.toml", "--governing-key", "owner.key", "--json"))
        with Ledger.open(f"{name}.db") as ledger:
            found[name] = ledger.header.withdraw
    assert found == {"none": None, "keeper": None, "signed": WithdrawalRule.SIGNED}
    assert "withdrawn by signed requests alone" in succeeded(ledger_call("show", "signed.db"))
    (tmp_path / "wrong.toml").write_text(text.format('withdraw = "anybody"'))
    refused(ledger_call("init", "wrong.db", "wrong.toml", "--governing-key", "owner.key"), "plan.policy-invalid")
