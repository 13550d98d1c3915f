"""`lamina ledger`: what an auditor, a contributor and a keeper type, and what they get."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import sys
from pathlib import Path

import postgres
import pytest
from asking import Call, answer, refused, succeeded
from build import ALICE, BOB, CAROL, HOUR, USUAL, YEAR, Story, begin, contribution, segment
from forge import sql
from making import AUDITOR, GOVERNING, LEDGER, ORIGIN, OTHER, START, WITNESS, digest
from open_charges import put_open_charge, put_run

from lamina.cli.ledger.record_commands import leaf_table
from lamina.ledger import signed_checkpoint
from lamina.ledger.merkle import verify_consistency, verify_inclusion
from lamina.ledger.receipt import TlogProof
from lamina.ledger.records import ContributionTerms, SegmentOutcome
from lamina.ledger.retention import Retention
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey, format_utc
from lamina.sign.notes import NoteKey

NOW = START + 4 * YEAR


@pytest.fixture
def story(template: tuple[Path, Story], tmp_path: Path) -> Story:
    """ledger.db, the keys of its keeper and auditor, and keys to trust, in the folder of the command."""
    shutil.copy(template[0], tmp_path / "ledger.db")
    for name, key in (("ledger", LEDGER), ("auditor", AUDITOR), ("other", OTHER)):
        key.save(tmp_path / f"{name}.key", None)
    (tmp_path / "trusted.txt").write_text(NoteKey(ORIGIN, LEDGER.public).text + "\n")
    (tmp_path / "owner.pub").write_bytes(GOVERNING.public.pem())
    (tmp_path / "last.checkpoint").write_text(template[1].signed[-1])
    return template[1]


@pytest.fixture
def call(ledger_call: Call) -> Call:
    return ledger_call


def test_help_teaches(call: Call) -> None:
    code, printed, _ = call()
    assert code == 2
    for word in (
        "show", "verify", "prove", "receipt", "trace", "withdraw", "prune", "checkpoint", "policy", "key", "statement",
        "witness", "reconcile",
    ):  # fmt: skip
        assert word in printed
        help = succeeded(call(word, "--help"))
        assert "Examples" in help or "Example" in help


def test_what_trainers_write(call: Call, tmp_path: Path) -> None:
    """A class as a whole, an attempt that was given up, and one that is still open."""
    made = begin("trained.db")
    (seq,) = made.admit([contribution(1)])
    made.later(HOUR)
    given_up = segment(0, read=made.ledger.size, outcome=SegmentOutcome.ABANDONED)
    made.epoch(digest("run")[:16], [given_up], scales={ContributionTerms("clinical", "ecg", 0, 0): 1.0})
    made.sign()
    put_run(made.ledger, digest("run")[:16], "[bold]first")
    put_open_charge(made.ledger, digest("run")[:16], 1)
    made.ledger.accept()  # signs the rows, which this test wrote past the ledger
    made.ledger.close()
    text = succeeded(call("trace", "trained.db", str(seq)))
    assert "eligible   in 1 epoch:" in text
    assert "abandoned  1 of 1 segment: charged all the same, and in no model" in text
    assert "1 epoch has no account for its bound: counted with its class" in text
    assert "ε at most" in text
    _code, printed, _ = call("show", "trained.db", "--kind", "epoch")
    assert "given up: clinical ε" in printed
    text = succeeded(call("verify", "trained.db"))
    assert "0 plans reserved" in text and "(1 attempt)" in text
    assert "'[bold]first' (1 attempt)" in text
    assert answer(call("verify", "trained.db", "--json"))["held"] == [
        {"run": digest("run")[:16].hex(), "label": "[bold]first", "attempts": 1, "budgets": 0, "reserved": False}
    ]


# ------------------------------------------------------------------------------ verify


def test_verify(call: Call, story: Story) -> None:
    found = answer(call("verify", "ledger.db", "--json"))
    assert {key: found[key] for key in ("verified", "trusted", "size", "problem")} == {
        "verified": True, "trusted": False, "size": 55, "problem": None,
    }  # fmt: skip
    assert len(found["root"]) == 64
    found = answer(call("verify", "ledger.db", "--trust", "owner.pub", "--seen", "last.checkpoint", "--json"))
    assert (found["verified"], found["trusted"]) == (True, True)
    text = succeeded(call("verify", "ledger.db", "--trust", "owner.pub"))
    assert "ledger.db: verified and trusted" in text
    assert "43 contributions, 3 epochs, 1 withdrawal, 5 keys, 1 policy, 1 release" in text
    assert f"leaf 0: add governing owner.example ({GOVERNING.public.name[:16]}), by" in text
    assert "self-consistent, not trusted" in succeeded(call("verify", "ledger.db", "--trust", "trusted.txt"))
    assert answer(call("verify", "ledger.db", "--no-signatures", "--json"))["attestations"] == 0


def test_verify_names_what_is_wrong(call: Call, story: Story) -> None:
    sql("ledger.db", "UPDATE leaf SET (data, body) = (SELECT data, body FROM leaf WHERE seq = 10) WHERE seq = 9")
    found = answer(call("verify", "ledger.db", "--json"), code=1)
    assert (found["verified"], found["trusted"]) == (False, False)
    assert found["problem"]["index"] == 9
    assert found["problem"]["kind"] == "contribution"
    code, printed, told = call("verify", "ledger.db")
    assert code == 1
    assert "not verified" in printed
    assert "leaf 9 (contribution)" in told


def test_verify_against_what_is_known_from_elsewhere(call: Call, story: Story, tmp_path: Path) -> None:
    (tmp_path / "others.txt").write_text(NoteKey(ORIGIN, OTHER.public).text)
    found = answer(call("verify", "ledger.db", "--trust", "others.txt", "--json"), code=1)
    assert found["problem"]["kind"] == "trust"
    story_again = begin("short.db")
    story_again.sign()
    story_again.ledger.close()
    found = answer(call("verify", "short.db", "--seen", "last.checkpoint", "--json"), code=1)
    assert "rolled back" in found["problem"]["reason"]
    sizes = ["--seen", "last.checkpoint", "--seen", "first.checkpoint"]
    (tmp_path / "first.checkpoint").write_text(story.signed[0])
    assert answer(call("verify", "ledger.db", *sizes, "--json"))["verified"]


def test_misuse(call: Call, story: Story, tmp_path: Path) -> None:
    assert call("verify", "nowhere.db", "--json")[0] == 2
    assert call("verify")[0] == 2
    assert call("show", "nowhere.db")[0] == 2
    assert call("prove", "ledger.db")[0] == 2
    assert call("prove", "ledger.db", "3", "--from", "4")[0] == 2
    assert call("withdraw", "ledger.db")[0] == 2
    assert call("withdraw", "ledger.db", "9")[0] == 2
    assert call("withdraw", "ledger.db", "9", "--reason", "because")[0] == 2
    assert call("withdraw", "ledger.db", "9", "--reason", "data", "--effect", "erase")[0] == 2
    assert call("prune", "ledger.db")[0] == 2
    assert call("receipt", "ledger.db")[0] == 2
    assert call("receipt", "--check", "mine")[0] == 2
    (tmp_path / "nonsense").write_text("nonsense")
    assert call("verify", "ledger.db", "--trust", "nonsense")[0] == 1
    assert call("verify", "ledger.db", "--seen", "nonsense")[0] == 1
    assert answer(call("verify", "nonsense", "--json"), code=1)["verified"] is False


def test_verify_an_empty_database(call: Call, tmp_path: Path) -> None:
    import apsw

    apsw.Connection(str(tmp_path / "empty.db")).execute("CREATE TABLE x (y)")
    code, printed, told = call("verify", "empty.db", "--json")
    assert code == 1
    assert "store.not-a-ledger" in told
    assert "refused" in json.loads(printed)


def test_a_server_that_is_away_is_no_ledger_that_is_wrong(call: Call, server: postgres.Server) -> None:
    """1 is for a ledger that does not hold; that there is none, or nobody answers, is 2."""
    for place, words in (
        (server.url("nothing_here"), "schema 'nothing_here' is not there"),
        (server.url().replace("/postgres", "/nodb"), "has no database 'nodb'"),
        ("postgresql://me:hunter2@127.0.0.1:1/db", "does not answer"),
    ):
        code, printed, told = call("verify", place, "--json")
        assert code == 2
        assert words in told.replace("\n", " ")
        assert words in json.loads(printed)["refused"]
        assert "hunter2" not in printed + told
        assert call("show", place)[0] == 1


# ------------------------------------------------------------------------------ show and trace


def test_show(call: Call, story: Story) -> None:
    text = succeeded(call("show", "ledger.db"))
    assert "clinic.example/ledger, 55 leaves" in text
    assert "(5 earlier ones are not shown" in text
    assert "revoke" in text
    found = answer(call("show", "ledger.db", "--kind", "epoch", "--kind", "withdrawal", "--json"))
    assert [each["index"] for each in found["records"]] == [41, 42, 43, 52]
    assert found["records"][1]["reason"] == "consent"
    assert found["records"][0]["accounts"][0]["class"] == "clinical"
    found = answer(call("show", "ledger.db", "--since", "2027-01-15T11:00Z", "--until", "2027-01-15T12:00Z", "--json"))
    assert [each["index"] for each in found["records"]] == [43, 44, 45, 46]
    assert len(answer(call("show", "ledger.db", "--limit", "3", "--json"))["records"]) == 3
    assert len(answer(call("show", "ledger.db", "--json"))["records"]) == 55
    assert "no record fits" in call("show", "ledger.db", "--class", "nobody")[1]
    assert call("show", "ledger.db", "--kind", "nonsense")[0] == 2


def test_trace(call: Call, story: Story) -> None:
    name = contribution(5, _who(5)).record.descriptor.hex()
    found = answer(call("trace", "ledger.db", name, "--json"))["contributions"]
    assert [each["index"] for each in found] == [9]
    assert found[0]["withdrawn"]["index"] == 42
    assert [each["index"] for each in found[0]["epochs"]] == [41, 43]
    assert found[0]["epochs"][0]["variance"] == {"layer.2": 16.0, "layer.3": 16.0}
    printed = succeeded(call("trace", "ledger.db", name))
    for word in (name, "leaf 9", "consent", "class      clinical", "top=0.5", "leaf 53"):
        assert word in printed
    assert all(len(line) <= 80 for line in printed.splitlines())
    left = f"{math.floor((found[0]['epsilon_signed'] - found[0]['epsilon']) * 1e4) / 1e4:.4f}"
    assert f"so far; {left} remains of what it signed" in printed
    assert found[0]["epsilon_remaining"] == pytest.approx(found[0]["epsilon_signed"] - found[0]["epsilon"], abs=1e-12)
    assert len(answer(call("trace", "ledger.db", digest("anchor", 30).hex(), "--json"))["contributions"]) == 2
    assert "no release is recorded" in call("trace", "ledger.db", "54")[1]
    refused(call("trace", "ledger.db", "ab" * 32), "ledger.contribution-unknown")


def test_first_digits_are_enough(call: Call, story: Story) -> None:
    """Of a descriptor or an anchor, for everything that is about one contribution."""
    name = contribution(7, _who(7)).record.descriptor.hex()
    assert answer(call("trace", "ledger.db", name[:8], "--json"))["contributions"][0]["index"] == 11
    assert answer(call("prove", "ledger.db", name[:9].upper(), "--json"))["index"] == 11
    assert answer(call("receipt", "ledger.db", name[:10], "-o", "mine", "--json"))["index"] == 11
    anchor = digest("anchor", 30).hex()
    assert len(answer(call("trace", "ledger.db", anchor[:8], "--json"))["contributions"]) == 2
    for command in ("prove", "receipt"):
        refused(call(command, "ledger.db", anchor[:8]), "ledger.digest-ambiguous")
    printed = succeeded(call("withdraw", "ledger.db", name[:8], "--reason", "consent"))
    assert f"contribution {name}\n  withdrawn    leaf 11, by leaf 55, by the keeper alone\n" in printed
    refused(call("withdraw", "ledger.db", name[:7], "--reason", "consent"), "ledger.name-not-understood")


def test_a_record_goes_on_below_itself_on_a_narrow_screen(story: Story, tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        leaves = list(ledger.leaves())
    wide, narrow = leaf_table(leaves).splitlines(), leaf_table(leaves, 80).splitlines()
    assert len(wide) == len(leaves) + 1 and max(map(len, wide)) > 80
    assert max(map(len, narrow)) <= 80
    assert " ".join(" ".join(narrow).split()) == " ".join(" ".join(wide).split())
    assert max(map(len, leaf_table(leaves, 10).splitlines())) < 80  # never nothing


def test_one_of_a_kind(call: Call, tmp_path: Path) -> None:
    """One is not many."""
    made = begin("one.db")
    (seq,) = made.admit([contribution(1, expires=START + HOUR)])
    made.epoch(digest("run")[:16], [segment(0, read=made.ledger.size)], scales={USUAL: 1.0})
    made.sign()
    made.ledger.close()
    LEDGER.save(tmp_path / "ledger.key", None)
    printed = "".join(
        call(*words)[1]
        for words in (
            ("verify", "one.db"),
            ("trace", "one.db", str(seq)),
            ("show", "one.db", "--limit", "5"),
            ("prune", "one.db", "--key", "ledger.key"),
            ("withdraw", "one.db", str(seq), "--reason", "data"),
        )
    )
    for words in (
        "1 contribution, 1 epoch, 3 keys",
        "checked      1 attestation, 1 figure of ε",
        "(1 earlier one is not shown",
        "1 contribution, admitted before",
        "in 1 epoch\n",
    ):
        assert words in printed
    assert re.search(r"\b1 [a-z]+s\b", printed) is None


def _who(number: int) -> PrivateKey:
    return (ALICE, BOB, CAROL)[number % 3]


# ------------------------------------------------------------------------------ proofs


def test_prove_inclusion(call: Call, story: Story, tmp_path: Path) -> None:
    found = answer(call("prove", "ledger.db", "9", "--json"))
    path = [bytes.fromhex(each) for each in found["path"]]
    leaf, root = bytes.fromhex(found["leaf_hash"]), bytes.fromhex(found["root"])
    assert verify_inclusion(leaf, 9, found["size"], path, root)
    code, printed, _ = call("prove", "ledger.db", "9")
    assert (code, printed) == (0, found["text"])
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        raw = ledger.raw(9).leaf
    assert TlogProof.parse(printed).verify(raw, [NoteKey(ORIGIN, LEDGER.public)], origin=ORIGIN).size == 55
    assert call("prove", "ledger.db", "9", "-o", "nine.tlog-proof")[0] == 0
    assert (tmp_path / "nine.tlog-proof").read_text() == printed
    assert answer(call("prove", "ledger.db", "9", "--size", "44", "--json"))["size"] == 44
    assert call("prove", "ledger.db", "50", "--size", "44")[0] == 1
    assert call("prove", "ledger.db", "9", "--size", "45")[0] == 1
    assert call("prove", "ledger.db", "99")[0] == 1


def test_prove_consistency(call: Call, story: Story) -> None:
    found = answer(call("prove", "ledger.db", "--from", "44", "--json"))
    old = signed_checkpoint.parse_checkpoint(story.signed[2])[0]
    path = [bytes.fromhex(each) for each in found["path"]]
    assert verify_consistency(44, 55, path, old.root, bytes.fromhex(found["root"]))
    first, *_ = found["text"].split("\n")
    assert first == "old 44"
    assert found["text"].endswith(call("checkpoint", "ledger.db")[1])
    assert answer(call("prove", "ledger.db", "--from", "0", "--json"))["path"] == []
    assert call("prove", "ledger.db", "--from", "56")[0] == 1


def test_receipt(call: Call, story: Story, tmp_path: Path) -> None:
    name = contribution(5, _who(5)).record.descriptor.hex()
    found = answer(call("receipt", "ledger.db", name, "-o", "mine", "--json"))
    assert (found["index"], found["size"]) == (9, 55)
    assert sorted(path.name for path in tmp_path.glob("mine.*")) == [
        "mine.body", "mine.cose", "mine.leaf", "mine.tlog-proof"
    ]  # fmt: skip
    found = answer(call("receipt", "--check", "mine", "--trust", "trusted.txt", "--json"))
    nobody = {"cosigned": None, "required": None}  # trusted.txt names no witness
    assert found == {"verified": True, "origin": ORIGIN, "index": 9, "size": 55, "witnesses": nobody}
    code, printed, _ = call("receipt", "--check", "mine", "--trust", "trusted.txt")
    assert code == 0
    assert "clinical" in printed
    # Never over another, and not for another key, leaf or proof.
    assert call("receipt", "ledger.db", name, "-o", "mine")[0] == 1
    (tmp_path / "others.txt").write_text(NoteKey(ORIGIN, OTHER.public).text)
    assert call("receipt", "--check", "mine", "--trust", "others.txt")[0] == 1
    (tmp_path / "owner.pub").write_bytes(GOVERNING.public.pem())  # good for verify --trust, and no key of receipts
    refused(call("receipt", "--check", "mine", "--trust", "owner.pub"), "cli.receipt-key-not-trusted")
    assert call("receipt", "ledger.db", "10", "-o", "other")[0] == 0
    for suffix in (".leaf", ".body", ".cose", ".tlog-proof"):
        shutil.copy(tmp_path / f"other{suffix}", tmp_path / f"mixed{suffix}")
    for suffix, code in (
        (".leaf", 1),
        (".cose", 1),
        (".tlog-proof", 1),
        (".body", 0),
    ):  # they belong together, all four
        shutil.copy(tmp_path / f"mine{suffix}", tmp_path / f"mixed{suffix}")
        assert call("receipt", "--check", "mixed", "--trust", "trusted.txt")[0] == code
    (tmp_path / "mine.body").unlink()  # the leaf is proven all the same, and says less
    assert "clinical" in succeeded(call("receipt", "--check", "mine", "--trust", "trusted.txt"))
    shutil.copy(tmp_path / "other.cose", tmp_path / "mine.cose")
    refused(call("receipt", "--check", "mine", "--trust", "trusted.txt"), "cli.receipt-not-trusted")
    (tmp_path / "mine.cose").write_bytes(b"nonsense")
    refused(call("receipt", "--check", "mine", "--trust", "trusted.txt"), "cli.receipt-malformed")


def test_heartbeat(call: Call, story: Story, tmp_path: Path) -> None:
    WITNESS.save(tmp_path / "witness.key", None)
    shutil.copy("ledger.db", "backup.db")
    found = answer(call("heartbeat", "ledger.db", "--key", "ledger.key", "--json"))
    assert found["time"] == format_utc(NOW) and found["size"] == 55
    assert found["checkpoint"] == call("checkpoint", "ledger.db")[1]
    assert len(list(tmp_path.glob("ledger.key.*"))) == 1  # the newest state, and nothing that states it again
    assert "55 leaves, up to date at" in succeeded(call("heartbeat", "ledger.db", "--key", "ledger.key"))
    succeeded(call("heartbeat", "ledger.db", "--key", "witness.key"))
    assert call("checkpoint", "ledger.db", "--json")[1].count("witness.example") == 2  # as a signer, and its line
    refused(call("heartbeat", "ledger.db", "--key", "other.key"), "ledger.key-may-not-sign")
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.append([contribution(99, at=NOW).record], [contribution(99, at=NOW).attestation])
    assert answer(call("heartbeat", "ledger.db", "--key", "ledger.key", "--json"))["size"] == 56
    succeeded(call("heartbeat", "ledger.db", "--key", "witness.key"))
    for name in ("ledger.key", "witness.key"):
        refused(call("heartbeat", "backup.db", "--key", name), "ledger.older-than-kept")


def test_checkpoint(call: Call, story: Story, tmp_path: Path) -> None:
    found = answer(call("checkpoint", "ledger.db", "--json"))
    assert (found["size"], found["unsigned"], found["signers"]) == (55, 0, [ORIGIN])
    assert call("checkpoint", "ledger.db")[1] == found["checkpoint"] == story.signed[-1]
    assert answer(call("checkpoint", "ledger.db", "--size", "54", "--json"))["signers"] == [ORIGIN, "witness.example"]
    assert call("checkpoint", "ledger.db", "--size", "53")[0] == 1
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.append([contribution(99, at=NOW).record], [contribution(99, at=NOW).attestation])
    assert answer(call("checkpoint", "ledger.db", "--json"))["unsigned"] == 1
    assert call("checkpoint", "ledger.db", "--key", "other.key")[0] == 1
    found = answer(call("checkpoint", "ledger.db", "--key", "ledger.key", "--output", "new.checkpoint", "--json"))
    assert (found["size"], found["unsigned"]) == (56, 0)
    copy = signed_checkpoint.add_cosignature((tmp_path / "new.checkpoint").read_text(), WITNESS, NOW, "witness.example")
    (tmp_path / "back.txt").write_text(copy)
    found = answer(call("checkpoint", "ledger.db", "--cosigned", "back.txt", "--json"))
    assert found["signers"] == [ORIGIN, "witness.example"]
    assert "56 leaves" in call("checkpoint", "ledger.db", "-o", "again.checkpoint")[1]


def test_who_reads_changes_nothing(call: Call, story: Story, tmp_path: Path) -> None:
    """Neither the file, nor by closing it what lies in its log."""
    with Ledger.open(tmp_path / "ledger.db") as writer:
        writer.append([contribution(99, at=NOW).record])
        before = [(tmp_path / name).read_bytes() for name in ("ledger.db", "ledger.db-wal")]
        assert all(before)
        for words in (
            ("show", "ledger.db"),
            ("trace", "ledger.db", "9"),
            ("prove", "ledger.db", "9"),
            ("receipt", "ledger.db", "9", "-o", "mine"),
            ("checkpoint", "ledger.db"),
            ("copy", "ledger.db", "copy.db"),
        ):
            assert call(*words)[0] == 0
        assert [(tmp_path / name).read_bytes() for name in ("ledger.db", "ledger.db-wal")] == before
    assert verify(tmp_path / "copy.db").size == 56


def test_a_password_is_in_no_answer(call: Call, server: postgres.Server, tmp_path: Path) -> None:
    """Neither in what people read nor in what machines do."""
    made = begin(server.url("with_password"))
    (seq,) = made.admit([contribution(1)])
    made.sign()
    made.ledger.close()
    LEDGER.save(tmp_path / "ledger.key", None)
    place = server.url("with_password").replace("lamina@", "lamina:hunter2@").replace("#", "&password=hunter2#")
    for words in (
        ("show", place),
        ("verify", place),
        ("trace", place, str(seq)),
        ("prove", place, str(seq)),
        ("receipt", place, str(seq), "-o", "mine"),
        ("checkpoint", place),
        ("policy", place),
        ("key", place),
        ("prune", place, "--key", "ledger.key"),
        ("withdraw", place, str(seq), "--reason", "data"),
        ("trace", place, "ab" * 32),
        ("copy", place, "copy.db"),
    ):
        for more in ((), ("--json",)):
            _, printed, told = call(*words, *more)
            assert printed + told
            assert "hunter2" not in printed + told, words
    assert answer(call("show", place, "--json"))["ledger"] == server.url("with_password")


# ------------------------------------------------------------------------------ withdrawals


def test_withdraw(call: Call, story: Story, tmp_path: Path) -> None:
    name = contribution(7, _who(7)).record.descriptor.hex()
    (tmp_path / "letter.pdf").write_bytes(b"please")
    words = ("withdraw", "ledger.db", name, "--reason", "consent", "--request", "letter.pdf")
    found = answer(call(*words, "--key", "ledger.key", "--json"))
    assert found["signed"]
    (out,) = found["withdrawn"]
    assert (out["index"], out["target"], out["again"], out["reason"]) == (55, 11, False, "consent")
    assert out["epsilon"] > 0
    assert out["releases"] == [53]
    assert answer(call("show", "ledger.db", "--kind", "withdrawal", "--json"))["records"][1]["request"] == (
        hashlib.sha256(b"please").hexdigest()
    )
    assert answer(call("verify", "ledger.db", "--trust", "owner.pub", "--json"))["trusted"]
    text = succeeded(call(*words))
    assert "already withdrawn" in text
    assert "no checkpoint covers it" not in text  # the first call signed one
    other = contribution(2, _who(2)).record.descriptor.hex()
    unsigned = ("withdraw", "ledger.db", other, "--reason", "consent")
    assert "no checkpoint covers it yet" in succeeded(call(*unsigned))
    assert not answer(call(*unsigned, "--json"))["signed"]
    assert call("withdraw", "ledger.db", "ab" * 32, "--reason", "data")[0] == 1


def test_withdraw_from_a_folder(call: Call, story: Story, tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    good = contribution(7, _who(7)).record.descriptor.hex()
    (tmp_path / "inbox" / "good.json").write_text(json.dumps({"withdraw": good, "reason": "legal"}))
    found = answer(call("withdraw", "ledger.db", "--folder", "inbox", "--json"))
    assert [each["file"] for each in found["files"]] == ["good.json"]
    (tmp_path / "inbox" / "bad.json").write_text(json.dumps({"withdraw": "ab" * 32, "reason": "legal"}))
    code, printed, _ = call("withdraw", "ledger.db", "--folder", "inbox")
    assert code == 1
    assert "bad.json: refused: " in printed
    assert call("withdraw", "ledger.db", "--folder", "inbox") == (0, "", "")


def test_watching_ends_when_it_is_told_to(
    call: Call, story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inbox").mkdir()
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt
        name = contribution(len(looks), _who(len(looks))).record.descriptor.hex()
        (tmp_path / "inbox" / f"{len(looks)}.json").write_text(json.dumps({"withdraw": name, "reason": "data"}))

    monkeypatch.setattr(sys.modules["lamina.cli.ledger.withdraw_commands"].time, "sleep", sleep)
    found = answer(call("withdraw", "ledger.db", "--folder", "inbox", "--watch", "7", "--json"))
    assert [each["file"] for each in found["files"]] == ["1.json", "2.json"]
    assert looks == [7.0, 7.0, 7.0]


# ------------------------------------------------------------------------------ pruning


@pytest.fixture
def old(tmp_path: Path) -> str:
    """A ledger whose contributions are old enough now."""
    path = str(tmp_path / "old.db")
    story = begin(path)
    story.admit(contribution(n, _who(n), expires=START + HOUR) for n in range(20))
    story.sign()
    story.ledger.close()
    return path


def test_prune_shows_first_and_asks(call: Call, story: Story, old: str) -> None:
    text = succeeded(call("prune", "old.db", "--key", "ledger.key"))
    assert "20 contributions" in text
    assert "would be replaced by totals" in text
    assert "--yes does it" in text
    assert verify(old).counts["contribution"] == 20
    found = answer(call("prune", "old.db", "--key", "ledger.key", "--yes", "--json"))
    assert found["pruned"]
    assert found["proposal"]["classes"]["clinical"]["count"] == 20
    after = verify(old)
    assert after.verified
    assert (after.counts["pruned"], after.counts["aggregate"]) == (20, 1)
    assert "nothing is old enough" in call("prune", "old.db", "--key", "ledger.key", "--yes")[1]
    assert call("prune", "old.db", "--key", "ledger.key", "--before", "2100-01-01")[0] == 1


def test_an_auditor_countersigns(call: Call, story: Story, old: str, tmp_path: Path) -> None:
    assert call("prune", "old.db", "--key", "ledger.key", "--save", "proposal.cbor")[0] == 0
    found = answer(call("prune", "old.db", "--key", "auditor.key", "--countersign", "proposal.cbor", "--json"))
    assert found["proposal"]["countersigned"] == [AUDITOR.public.name]
    assert not found["pruned"]
    found = answer(call("prune", "old.db", "--key", "ledger.key", "--apply", "proposal.cbor", "--yes", "--json"))
    assert found["proposal"]["countersigned"] == [AUDITOR.public.name]
    after = verify(old)
    assert after.verified
    assert not any("countersigned" in note for note in after.notes)
    with Ledger.open(old, LEDGER) as ledger:
        assert Retention(ledger).propose() is None


def test_an_auditor_countersigns_only_what_verifies(call: Call, story: Story, old: str) -> None:
    """Attestations that nobody can check any more afterwards."""
    assert call("prune", "old.db", "--key", "ledger.key", "--save", "proposal.cbor")[0] == 0
    sql(old, "UPDATE evidence SET data = x'00'")
    refused(
        call("prune", "old.db", "--key", "auditor.key", "--countersign", "proposal.cbor"),
        "cli.countersign-not-verified",
    )


def test_a_copy_without_what_nobody_signed(call: Call, story: Story, tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.append([contribution(99, at=NOW).record])
    found = answer(call("copy", "ledger.db", "mended.db", "--signed", "--json"))
    assert (found["size"], found["left_out"]) == (55, [{"index": 55, "kind": "contribution"}])
    assert verify(tmp_path / "mended.db").verified


def test_a_proposal_that_is_not_what_the_ledger_comes_to(call: Call, story: Story, old: str, tmp_path: Path) -> None:
    call("prune", "old.db", "--key", "ledger.key", "--save", "proposal.cbor")
    data = (tmp_path / "proposal.cbor").read_bytes()
    (tmp_path / "bent.cbor").write_bytes(data.replace(digest_in(old), bytes(32)))
    for words in (("--countersign", "bent.cbor"), ("--apply", "bent.cbor", "--yes")):
        code, _, told = call("prune", "old.db", "--key", "auditor.key" if "sign" in words[0] else "ledger.key", *words)
        assert code == 1, told
    (tmp_path / "nonsense.cbor").write_bytes(b"nonsense")
    refused(
        call("prune", "old.db", "--key", "ledger.key", "--apply", "nonsense.cbor", "--yes"), "cli.aggregate-malformed"
    )


def digest_in(path: str) -> bytes:
    with Ledger.open(path, LEDGER) as ledger:
        found = Retention(ledger).propose()
    assert found is not None
    return found.digest


def test_a_copy_has_what_is_still_in_the_wal(call: Call, tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    story.admit([contribution(1)])
    story.sign()  # and stays open: nothing of it is in the file itself yet
    assert answer(call("copy", "a.db", "b.db", "--json"))["size"] == story.ledger.size
    found = verify(tmp_path / "b.db")
    assert found.verified and found.size == found.signed == story.ledger.size
    assert "not overwritten" in call("copy", "a.db", "b.db")[2].replace("\n", " ")
    story.ledger.close()


def test_a_contribution_is_found_by_its_folder(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "p001"
    folder.mkdir()
    story = begin(str(tmp_path / "a.db"))
    made = contribution(1)
    (folder / "descriptor.cbor").write_bytes(made.descriptor.encode())
    (folder / "attestation.cose").write_bytes(made.attestation)
    story.admit([made])
    story.sign()
    story.ledger.close()
    for name in (folder, folder / "descriptor.cbor"):
        (found,) = answer(call("trace", "a.db", str(name), "--json"))["contributions"]
        assert found["descriptor"] == made.record.descriptor.hex()
