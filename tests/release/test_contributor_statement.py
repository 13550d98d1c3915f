"""The statement for a contributor: checked by code that is not ours, forged by keepers and others, and read as a letter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import statement_checker
from asking import Call, answer, asker, refused, succeeded
from build import ALICE, STRICT, Story, begin, build, contribution, plan, segment
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from forge import sql
from hospital import usual
from making import LEDGER, ORIGIN, OTHER, digest, ended
from postgres import Server
from refusals import raises_code
from stopping import During, Killed, die
from trained_run import Trained

from lamina.errors import LaminaError
from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.records import Epoch
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import Ledger
from lamina.release.certificate import RUN_CONDITIONS
from lamina.release.contributor_statement import (
    CONTRIBUTOR_STATEMENT,
    compare_statement,
    read_statement,
    signed_size,
    statement_content,
)
from lamina.release.letter import letter, letter_facts, letter_pdf
from lamina.release.reconciliation import reconcile
from lamina.release.typeset import read_template
from lamina.report.pages import letter_page, reconciliation_page
from lamina.sign.keys import PrivateKey
from lamina.sign.notes import NoteKey
from lamina.sign.signed_json import sign_json

TRUST = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),))


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Two runs, a withdrawal and a release; nothing is pruned."""
    if request.param == "sqlite":
        made = with_ends(str(tmp_path_factory.mktemp("story") / "ledger.db"), prune=False)
    else:
        server: Server = request.getfixturevalue("server")
        made = with_ends(server.url("statements"), prune=False)
    yield made
    made.ledger.close()


def with_ends(where: str, **options: Any) -> Story:
    """The story, with the end of its two runs."""
    made = build(where, **options)
    for name in ("redone", "run two"):
        epoch = made.ledger.leaf(made.at[name]).record
        assert isinstance(epoch, Epoch)
        last = epoch.segments[-1]
        made.ledger.append(
            [ended(epoch.run, segment=last.index, generation=last.generation, steps=last.last, plan=epoch.plan)]
        )
    return made


def content_of(story: Story, seq: int) -> dict[str, Any]:
    return statement_content(story.ledger, seq, signed_size(story.ledger))


def signed(content: dict[str, Any], key: PrivateKey = LEDGER) -> bytes:
    return sign_json(content, key, CONTRIBUTOR_STATEMENT)


def words(content: dict[str, Any]) -> str:
    return " ".join(part for section in letter(content)["sections"] for part in section["text"])


# ------------------------------------------------------------------------------ what is stated, and who can check it


def test_a_statement_during_training_names_the_open_charges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed in its first segment has charged steps, and no epoch shows them."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    hospital = usual(tmp_path)
    with hospital.ledger(tmp_path / "ledger.db") as ledger:
        corpus = hospital.admit(ledger=ledger)
        mine, out, public = (
            ledger.find(bytes.fromhex(corpus.stable_ids([name])[0]))[0] for name in ("c01", "c02", "o02")
        )
        withdraw(ledger, str(out), WithdrawalReason.CONSENT)
        with pytest.raises(Killed):
            hospital.trainer("a", corpus=corpus, ledger=ledger, progress=During({1: die})).fit()
        size = signed_size(ledger)
        content = statement_content(ledger, mine, size)
        ((run, steps),) = [each.values() for each in content["unrecorded"]]
        assert not content["events"] and content["epsilon"] is None and content["membership"] is None
        assert "no figure yet" in letter(content)["summary"] and f"{steps} steps of 1 training run" in words(content)
        assert "no figure is stated" in reconcile(ledger, ledger.leaf(mine))["statement"]
        assert all(not statement_content(ledger, seq, size)["unrecorded"] for seq in (out, public))
        key, trust = ledger.signing_key(), Trust(notes=(NoteKey(ledger.origin, ledger.signing_key().public),))
        told = read_statement(signed(content, key), trust)[0]
        assert compare_statement(told, ledger) == 0
        with raises_code("release.statement-differs"):
            read_statement(signed(content | {"epsilon": 0.5}, key), trust)
        hospital.trainer("a", corpus=hospital.admit(ledger=ledger), ledger=ledger).fit()
        after = statement_content(ledger, mine, signed_size(ledger))
        assert not after["unrecorded"] and after["epsilon"] > 0 and {each["run"] for each in after["events"]} == {run}
        assert compare_statement(told, ledger) > 0, "an older statement stays true as of its checkpoint"


def test_anybody_can_check_a_statement(story: Story) -> None:
    gone = story.at["first"] + 5
    content = content_of(story, gone)
    told, leaves = statement_checker.check(signed(content), LEDGER.public.x, ORIGIN)
    assert told == json.loads(json.dumps(content))
    assert [each["index"] for each in told["events"]] == [story.at["epoch"], story.at["redone"]]
    kept, body = leaves[story.at["withdrawal"]]
    assert kept[1] == 4 and body[1] == gone and told["withdrawn"]["index"] == story.at["withdrawal"]
    assert set(leaves) == {gone, story.at["epoch"], story.at["redone"], story.at["withdrawal"], story.at["release"]}
    assert leaves[story.at["epoch"]][1] is None, (
        "bodies of epochs are about others too; the last one states the account"
    )
    spends = [each[6] for each in leaves[story.at["redone"]][1][5]]  # field 6 of an account: ε in 1e-9
    assert round(told["events"][-1]["epsilon_account"] * 1e9) in spends
    assert 0 < told["epsilon"] <= told["events"][-1]["epsilon_account"]


def test_our_reader_says_the_same(story: Story) -> None:
    for seq in (
        story.at["first"] + 5,
        story.at["strict"],
        story.at["first"] + 31,
        story.at["second"],
        story.at["late"],
    ):
        content = content_of(story, seq)
        found, note, record = read_statement(signed(content), TRUST)
        assert found == content and note.encode() == content["checkpoint"]
        assert record.descriptor.hex() == content["contribution"]["descriptor"]
        assert compare_statement(found, story.ledger) == 0


def test_the_same_ledger_gives_the_same_bytes(story: Story) -> None:
    once, again = (signed(content_of(story, story.at["strict"])) for _ in range(2))
    assert once == again
    with story.ledger.another() as other:
        assert signed(statement_content(other, story.at["strict"], other.size)) == once
    page = letter(content_of(story, story.at["strict"]))
    assert letter_pdf(page) == letter_pdf(page)


def test_a_statement_of_a_real_run(ward: Trained, served: Path) -> None:
    seq = ward.someone("sensitive")
    with ward.open() as ledger:
        before = statement_content(ledger, seq, signed_size(ledger))
        withdraw(ledger, str(seq), WithdrawalReason.CONSENT)
        after = statement_content(ledger, seq, signed_size(ledger))
        key, origin = ledger.signing_key(), ledger.origin
        assert compare_statement(before, ledger) == 1, "an older statement stays true as of its checkpoint"
        assert compare_statement(after, ledger) == 0
        assert reconcile(ledger, ledger.leaf(seq))["epsilon"] == before["epsilon"] == after["epsilon"]
    _, leaves = statement_checker.check(signed(after, key), key.public.x, origin)
    assert leaves[after["withdrawn"]["index"]][1][1] == seq
    assert before["unit"] == "patient" and before["membership"]["tpr"]["0.01"] < before["content"]["tpr"]["0.01"]
    assert "Of 100 patients who took part" in words(before) and "lamina ledger request" in words(before)
    assert "may have been sampled" in words(before) and "released model may have learned from it: model" in words(
        before
    )
    assert "The proof of the withdrawal is in the signed file" in words(after)
    assert "trained before it do not change" in words(after) and "lamina ledger request" not in words(after)
    assert letter(after)["summary"].startswith("withdrawn on ") and letter(before)["summary"].startswith("in force")


# ------------------------------------------------------------------------------ forgers


def forged(content: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(content))
    change(made)
    return made


def drop_epoch(made: dict[str, Any]) -> None:
    gone = made["events"].pop(0)["index"]
    made["receipts"] = [each for each in made["receipts"] if each["index"] != gone]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "epsilon": lambda made: made.update(epsilon=made["epsilon"] / 2),
    "account": lambda made: made["events"][-1].update(epsilon_account=0.1),
    "dropped epoch": drop_epoch,
    "dropped event": lambda made: made["events"].pop(0),
    "dropped receipt": lambda made: made["receipts"].pop(1),
    "descriptor": lambda made: made["contribution"].update(descriptor="ab" * 32),
    "class": lambda made: made["contribution"].update({"class": "open"}),
    "public": lambda made: made["contribution"].update(public=True),
    "not withdrawn": lambda made: made.update(withdrawn=None),
    "withdrawal of another leaf": lambda made: made["withdrawn"].update(index=made["events"][0]["index"]),
    "release": lambda made: made["releases"][0].update(manifest="cd" * 32),
    "tree": lambda made: made["ledger"].update(size=made["ledger"]["size"] - 1),
    "origin": lambda made: made["ledger"].update(origin="other.example/ledger"),
    "membership": lambda made: made.update(content=None),
}
ONLY_BY_THE_LEDGER = {"epsilon", "dropped epoch", "membership"}  # a keeper can sign these; the ledger refutes them


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_statement_is_refused(story: Story, name: str) -> None:
    """By a stranger, whose signature is not the ledger's; and by the keeper, who can sign."""
    content = content_of(story, story.at["first"] + 5)
    wrong = forged(content, CHANGES[name])
    data, stolen = signed(wrong), signed(content)
    inside = stolen.replace(b'"epsilon": ', b'"epsilom": ', 1)
    for bad in (inside, signed(wrong, OTHER), stolen[:-64] + data[-64:]):
        with raises_code("release.statement-not-by-key"):
            read_statement(bad, TRUST)
        with pytest.raises((AssertionError, InvalidSignature)):
            statement_checker.check(bad, LEDGER.public.x, ORIGIN)
    if name in ONLY_BY_THE_LEDGER:
        found, _, _ = read_statement(data, TRUST)
        with raises_code("release.statement-differs"):
            compare_statement(found, story.ledger)
        return
    with pytest.raises(LaminaError) as caught:
        read_statement(data, TRUST)
    assert caught.value.code in {
        "release.statement-differs",
        "release.statement-not-by-key",
        "release.statement-malformed",
    }


def test_receipts_of_another_contribution_are_refused(story: Story) -> None:
    mine, other = (content_of(story, story.at["first"] + n) for n in (5, 1))
    swapped = forged(mine, lambda made: made.update(receipts=other["receipts"]))
    renamed = forged(other, lambda made: made.update(contribution=mine["contribution"]))
    for wrong in (swapped, renamed):
        with pytest.raises(LaminaError) as caught:
            read_statement(signed(wrong), TRUST)
        assert caught.value.code in {"release.statement-differs", "release.statement-malformed"}
        with pytest.raises((AssertionError, KeyError)):
            statement_checker.check(signed(wrong), LEDGER.public.x, ORIGIN)


def test_bodies_and_receipts_cannot_be_exchanged(story: Story) -> None:
    content = content_of(story, story.at["first"] + 5)
    for at, part in ((0, "receipt"), (0, "leaf"), (-1, "body")):
        wrong = forged(
            content, lambda made, at=at, part=part: made["receipts"][at].update({part: made["receipts"][1]["leaf"]})
        )
        with pytest.raises(LaminaError) as caught:
            read_statement(signed(wrong), TRUST)
        assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\xd2\x84"])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(LaminaError):
        read_statement(data, TRUST)


def test_other_json_is_refused_by_name() -> None:
    for plain in ({}, [], None, {"ledger": {"origin": ORIGIN}}, {"ledger": {"origin": ORIGIN}, "checkpoint": 1}):
        with raises_code("release.statement-malformed"):
            read_statement(sign_json(plain, LEDGER, CONTRIBUTOR_STATEMENT), TRUST)
    with raises_code("release.cose-malformed"):  # signed for another purpose
        read_statement(sign_json({}, LEDGER, "application/lamina-reconciliation+json"), TRUST)


def test_a_statement_counts_for_one_ledger(story: Story, tmp_path: Path) -> None:
    """The same keys, origin and people; another header."""
    content = content_of(story, story.at["strict"])
    other = build(str(tmp_path / "other.db"), prune=False, retention=12345678)
    with raises_code("release.statement-differs"):
        compare_statement(content, other.ledger)


def test_a_store_that_was_changed_gets_no_statement(tmp_path: Path) -> None:
    """A plan with more noise, under the digest of the one that was trained by: the ε of everybody would be smaller."""
    story = build(str(tmp_path / "ledger.db"), prune=False)
    story.ledger.close()
    quiet = plan(noise=(0.0, 0.0, 40.0, 40.0)).to_cbor()
    sql(str(tmp_path / "ledger.db"), "UPDATE blob SET data = ? WHERE digest = ?", quiet, plan().digest())
    with (
        Ledger.open(tmp_path / "ledger.db", LEDGER, clock=story.clock) as ledger,
        raises_code("release.ledger-not-verified"),
    ):
        signed_size(ledger)


# ------------------------------------------------------------------------------ what a letter says


def test_a_public_contribution_is_not_protected(story: Story) -> None:
    content = content_of(story, story.at["first"] + 31)
    assert content["epsilon"] is content["membership"] is content["content"] is None
    assert "It is not protected" in words(content) and "best attacker" not in words(content)
    assert "not protected: declared public" in letter(content)["summary"]
    assert re.search(r"lost at most|ε =", words(content)) is None


def test_a_contribution_that_was_never_eligible(story: Story) -> None:
    content = content_of(story, story.at["late"])
    assert content["events"] == [] and content["epsilon"] == 0
    assert "not eligible in any recorded epoch" in words(content) and "best attacker" not in words(content)


def test_what_is_pruned_is_stated_as_far_as_it_goes(tmp_path: Path) -> None:
    story = with_ends(str(tmp_path / "ledger.db"))
    for seq in (story.at["first"] + 5, story.at["first"] + 1):
        content = content_of(story, seq)
        _, leaves = statement_checker.check(signed(content), LEDGER.public.x, ORIGIN)
        read_statement(signed(content), TRUST)
        assert leaves[seq][1] is None and content["contribution"]["pruned"] and content["epsilon"] > 0
        assert "Its record was pruned" in words(content) and "lamina ledger request" not in words(content)


def test_a_statement_from_before_pruning_is_checked_without_the_ledger(tmp_path: Path) -> None:
    whole = build(str(tmp_path / "whole.db"), prune=False)
    content = content_of(whole, whole.at["first"] + 1)
    pruned = build(str(tmp_path / "pruned.db"))
    with raises_code("release.statement-of-pruned"):
        compare_statement(content, pruned.ledger)


def test_an_exhausted_bound_is_named(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "ledger.db"))
    (seq,) = story.admit([contribution(1, ALICE, STRICT)])
    first = story.epoch(digest("run")[:16], [segment(0, read=story.ledger.size)])
    content = statement_content(story.ledger, seq, len_of(story))
    event = content["events"][0]
    assert event["index"] == first
    left = forged(content, lambda made: made["events"].append(event | {"index": 90, "factor": 0.0}))
    scaled = forged(content, lambda made: made["events"].append(event | {"index": 91, "factor": 0.5}))
    assert f"eligible in 1 epoch of 1 training run: leaf {first}." in words(left)
    assert "left out of 1 epoch (leaf 90) and lost nothing there" in words(left)
    assert "In 1 epoch (leaf 91) its influence was scaled down" in words(scaled)
    every = forged(content, lambda made: made["events"][0].update(factor=0.0))
    assert "may have been sampled" not in words(every)


def len_of(story: Story) -> int:
    story.ledger.checkpoint()
    return story.ledger.size


def test_a_run_without_a_guarantee_states_none(ward: Trained) -> None:
    with ward.open() as ledger:
        content = statement_content(ledger, ward.someone("clinical"), signed_size(ledger))
    for name, value, said in (
        ("noise", "seeded", "No protection is proven, because"),
        ("adjacency", "zero-out at a public number of contributions", "is not protected: the number"),
    ):
        made = forged(content, lambda made, n=name, v=value: made["runs"][0]["conditions"].update({n: v}))
        assert said in words(made | {"membership": None})


FIGURE = re.compile(r"lost at most|right in|at most ε|ε = \d")


def test_a_run_that_has_not_ended_states_no_figure(tmp_path: Path) -> None:
    """Its end would have stated where its noise came from."""
    story = build(str(tmp_path / "ledger.db"), prune=False)
    content = content_of(story, story.at["strict"])
    assert [each["conditions"] for each in content["runs"]] == [None, None]
    assert content["epsilon"] is content["membership"] is content["content"] is None and content["epsilon_charged"] > 0
    assert not FIGURE.search(words(content)) and not FIGURE.search(letter(content)["summary"])
    found = reconcile(story.ledger, story.ledger.leaf(story.at["strict"]))
    assert found["epsilon"] is None and {each["epsilon"] for each in found["runs"]} == {None}
    assert not FIGURE.search(found["statement"]) and "no figure is proven" in reconciliation_page(found)


def test_runs_that_have_ended_state_their_figures(story: Story) -> None:
    content = content_of(story, story.at["strict"])
    assert FIGURE.search(words(content)) and FIGURE.search(letter(content)["summary"])
    assert "assume that no plan depended on what an earlier model revealed" in words(content)


def test_an_end_before_the_last_epoch_does_not_count(tmp_path: Path) -> None:
    """What the trainer stated at the end of a run is not about steps that followed."""
    story = begin(str(tmp_path / "ledger.db"))
    (seq,) = story.admit([contribution(1, ALICE, STRICT)])
    run = digest("run")[:16]
    first = story.ledger.leaf(story.epoch(run, [segment(0, read=story.ledger.size)])).record
    assert isinstance(first, Epoch)
    story.ledger.append([ended(run, plan=first.plan)])
    assert statement_content(story.ledger, seq, len_of(story))["epsilon"] > 0
    story.epoch(run, [segment(1, read=story.ledger.size)])
    content = statement_content(story.ledger, seq, len_of(story))
    assert content["epsilon"] is None and content["epsilon_charged"] > 0 and not FIGURE.search(words(content))


def test_a_letter_has_one_page(story: Story) -> None:
    content = content_of(story, story.at["strict"])
    event, release = content["events"][0], content["releases"][0]
    many = content | {
        "events": [event | {"index": n, "factor": (1.0, 0.5, 0.0)[n % 3]} for n in range(300)],
        "releases": [release | {"name": "a name of some length"}] * 4,
        "not_used_in": 3,
    }
    assert len(re.findall(rb"/Type\s*/Page\b", letter_pdf(letter(many)))) == 1


def test_a_statement_is_of_what_a_checkpoint_covers(story: Story) -> None:
    with raises_code("ledger.not-covered"):
        statement_content(story.ledger, story.at["late"], story.at["late"])
    with story.ledger.another() as view:
        assert statement_content(view, story.at["strict"], view.size)["ledger"]["size"] == view.size


# ------------------------------------------------------------------------------ the command


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], ward: Trained, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(ward.ledger.parent)
    return asker(capsys, "ledger")


def test_a_letter_is_written_and_checked(call: Call, ward: Trained, served: Path) -> None:
    seq, folder = str(ward.someone("sensitive")), ward.ledger.parent
    found = answer(call("statement", ward.name, seq, "-o", "mine", "--json"))
    assert [Path(each).name for each in found["files"]] == ["statement.cose", "letter.html", "letter.pdf"]
    first = {name: (folder / "mine" / name).read_bytes() for name in ("statement.cose", "letter.html", "letter.pdf")}
    succeeded(call("statement", ward.name, found["contribution"]["descriptor"][:12], "-o", "again"))
    assert first == {name: (folder / "again" / name).read_bytes() for name in first}, "the same inputs, the same bytes"
    page = first["letter.html"].decode()
    HTMLParser().feed(page)
    assert all(part in unescape(page) for section in letter(found)["sections"] for part in section["text"])
    assert "<script" not in page and "http" not in page
    check = ("receipt", "--check", "mine/statement.cose", "--trust", "ward.ledger.pub")
    text = succeeded(call(*check))
    assert "verified: statement of ward-7" in text and "has not been withdrawn" in text
    assert "every fact agrees with the ledger" in succeeded(call("receipt", ward.name, *check[1:]))
    with ward.open() as ledger:
        withdraw(ledger, seq, WithdrawalReason.CONSENT)
    assert "the ledger has 1 leaf more now" in succeeded(call("receipt", ward.name, *check[1:])), (
        "an old letter is not a new one"
    )
    (folder / "mine" / "statement.cose").write_bytes(first["statement.cose"].replace(b'"sensitive"', b'"clinical_"'))
    refused(call(*check), "release.statement-not-by-key")
    PrivateKey.generate().save(folder / "other.key", None)
    refused(call("statement", ward.name, seq, "--key", "other.key", "-o", "forged"), "ledger.key-may-not-sign")
    assert not (folder / "forged").exists()


def test_every_sentence_depends_on_facts_that_exist(story: Story) -> None:
    """Also a sentence that no story here states."""
    facts = letter_facts(content_of(story, story.at["first"] + 5))
    template = read_template("letter.toml")
    assert {group for each in template["section"] for group in each["groups"]} == template.keys() - {
        "section",
        "condition",
    }
    assert template["condition"].keys() == {*RUN_CONDITIONS, "sound_plan"}
    for row in (row for group, rows in template.items() if group not in ("section", "condition") for row in rows):
        assert {name.removeprefix("not ") for name in row.get("when", ())} <= facts.keys()
        row["text"].format_map(facts)


def test_names_in_a_letter_are_text(story: Story) -> None:
    content = content_of(story, story.at["strict"])
    content["releases"][0]["name"] = "<script>alert(1)</script> $x^2$ #import"
    page = letter(content)
    assert "<script>alert" not in letter_page(page) and letter_pdf(page).startswith(b"%PDF")


def test_a_reconciliation_is_signed_and_addressed_to_the_person(call: Call, ward: Trained) -> None:
    seq = ward.someone("clinical")
    text = succeeded(call("reconcile", ward.name, str(seq), "-o", "asked", "--key", "ward.ledger.pem"))
    assert "Your contribution has not been withdrawn." in text and "may have been sampled" in text
    plain = (ward.ledger.parent / "asked" / "reconciliation.json").read_bytes()
    (protected, _, payload, signature), _ = statement_checker.unpack(
        (ward.ledger.parent / "asked" / "reconciliation.cose").read_bytes()
    )
    assert payload == plain and statement_checker.unpack(protected)[0][16] == "application/lamina-reconciliation+json"
    with ward.open() as ledger:
        x = ledger.signing_key().public.x
    message = statement_checker.to_be_signed(protected, payload)
    Ed25519PublicKey.from_public_bytes(x).verify(signature, message)
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(x).verify(signature, message + b" ")


def test_a_public_contribution_has_no_figure_in_a_reconciliation(call: Call, ward: Trained) -> None:
    found = answer(call("reconcile", ward.name, str(ward.someone("open")), "-o", "asked", "--json"))
    assert found["epsilon"] is None and "is not protected" in found["statement"]
    assert "ε 0" not in (ward.ledger.parent / "asked" / "reconciliation.html").read_text()
