"""`lamina admit` and `lamina train` with [admit]: signed by the program, admitted, trained, withdrawn and verified by it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import postgres
import pytest
import torch
from asking import answer, refused, succeeded
from forge import replacing, rewritten
from run_state import attempts
from safetensors.torch import load_file

from lamina.admit import reasons
from lamina.admit.attestation import Descriptor, attest
from lamina.admit.reasons import REASONS
from lamina.cli.explain import NOT_SIGNED
from lamina.ledger.governance_records import Header, KeyEvents
from lamina.ledger.records import ContributionRecord, ContributionTerms
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.policy import Policy
from lamina.run.admitted import Gate
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey

if TYPE_CHECKING:
    from conftest import Project

POLICY = """
[corpus]
origin = "test"
delta = 1e-5
[class.clinical]
population = 30
epsilon = 6.0
unit = "patient"
"""
MODULE = """
import torch
from torch import nn

def build():
    torch.manual_seed(3)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)]
    return nn.Sequential(*layers)
"""
RUN = """
policy = "policy.toml"
model = "{module}:build"
loss = "cross_entropy"
optimizer = {{ name = "sgd", lr = 0.1, momentum = 0.9, weight_decay = 0.01 }}
batch = 10
steps = 6
segment = 2
epsilon = 2.0
[data]
kind = "folder"
path = "people"
"""
PEOPLE = 20
ADMIT = '[admit]\nkeys = "keys.json"\n'


@dataclass
class Clinic:
    """A project whose contributions are signed with the program itself."""

    project: Project

    @property
    def folder(self) -> Path:
        return self.project.folder

    @property
    def run(self) -> str:
        return RUN.format(module=self.project.module) + ADMIT

    def ok(self, *words: str) -> str:
        return succeeded(self.project.call(*words))

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        return answer(self.project.call(*words, "--json"), code)

    def key(self, name: str) -> str:
        """A new key that the ring trusts; returns its path."""
        path = self.folder / f"{name}.key"
        self.ok("keys", "new", str(path), "--no-passphrase")
        self.ok("keys", "add", str(path.with_suffix(".pub")), "--keys", str(self.folder / "keys.json"))
        return str(path)

    def write(self, name: str, seed: int) -> None:
        generator = np.random.default_rng(seed)
        x = generator.normal(size=(2, 4)).astype("f4")
        (self.folder / "people" / name).mkdir(parents=True, exist_ok=True)
        np.savez(self.folder / "people" / name / "payload.npz", x=x, y=(x[:, 0] > 0).astype("int64"))

    def attest(self, key: str, *words: str, where: str = "people", code: int = 0) -> dict[str, Any]:
        place, policy = str(self.folder / where), str(self.folder / "policy.toml")
        return self.json("attest", policy, place, "--key", key, *words, code=code)

    def admit(self, *words: str, code: int = 0) -> dict[str, Any]:
        return self.json("admit", *self.where, *words, code=code)

    @property
    def where(self) -> tuple[str, ...]:
        keys = ("--keys", str(self.folder / "keys.json"))
        return str(self.folder / "policy.toml"), str(self.folder / "people"), *keys


@pytest.fixture
def clinic(project: Project) -> Iterator[Clinic]:
    """Twenty patients, signed for a year."""
    made = Clinic(project)
    project.write("policy.toml", POLICY)
    project.write(f"{project.module}.py", MODULE)
    for i in range(PEOPLE):
        made.write(f"p{i:02d}", i)
    made.key("ann")
    assert made.attest(str(project.folder / "ann.key"), "--class", "clinical")["signed"] == PEOPLE
    project.run = made.run
    return made


def refused_by(found: dict[str, Any]) -> dict[str, str]:
    return {each["id"]: each["reason"] for each in found["refused"]}


# ------------------------------------------------------------------------------------------------ lamina admit


def test_all_are_admitted(clinic: Clinic) -> None:
    found = clinic.admit()
    assert found["admitted"] == 20 and found["refused"] == []
    assert found["resolution"] is None
    code, out, err = clinic.project.call("admit", *clinic.where)
    assert code == 0
    assert out.startswith("20 admitted, 0 refused")
    assert "checking signatures" in err  # progress is no result


def spoil(clinic: Clinic) -> dict[str, str]:
    """Five that must stay outside, and why."""
    people = clinic.folder / "people"
    clinic.write("p00", 100)
    (people / "p01" / "attestation.cose").unlink()
    bob = str(clinic.folder / "bob.key")
    clinic.ok("keys", "new", bob, "--no-passphrase")
    clinic.attest(bob, "--class", "clinical", "--force", where="people/p02")
    ann = str(clinic.folder / "ann.key")
    past = ("--valid-from", "2001-01-01", "--expires", "2002-01-01", "--force")
    clinic.attest(ann, "--class", "clinical", *past, where="people/p03")
    shutil.copytree(people / "p04", people / "p04-again")
    return {
        "p00": "payload-mismatch",
        "p01": "no-attestation",
        "p02": "unknown-key",
        "p03": "expired",
        "p04-again": "replayed",
    }


def test_each_refusal_has_its_reason_and_what_to_do(clinic: Clinic) -> None:
    expected = spoil(clinic)
    found = clinic.admit(code=1)
    assert found["admitted"] == 16 and refused_by(found) == expected
    assert found["remedies"].keys() == set(expected.values())
    code, out, _ = clinic.project.call("admit", *clinic.where)
    assert code == 1
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows[0] == "16 admitted, 5 refused"
    remedies = {each.word: each.remedy for each in REASONS}
    for name, reason in expected.items():
        assert any(row.startswith(f"{name} {reason}") for row in rows)
        assert f"{reason} {remedies[reason]}" in rows
    several = clinic.admit("--processes", "2", code=1)
    assert several == found


def hostile(clinic: Clinic) -> dict[str, str]:
    """What strangers and careless people put into a folder, and why it stays outside. Some of it is rightly signed."""
    expected, people, ann = spoil(clinic), clinic.folder / "people", str(clinic.folder / "ann.key")
    key, x = PrivateKey.load(ann, None), np.ones((2, 4), dtype="f4")

    def signed(name: str, suffix: str = "npz", **arrays: Any) -> Path:
        clinic.write(name, int.from_bytes(name.encode()))
        path = people / name / f"payload.{suffix}"
        (people / name / "payload.npz").rename(path)
        if arrays:
            np.savez(path, **arrays)
        assert clinic.attest(ann, "--class", "clinical", where=f"people/{name}")["signed"] == 1
        return path

    signed("q-text", x=np.array([["a"] * 4]), y=np.zeros(1))
    signed("q-shape", x=np.ones((2, 5), dtype="f4"), y=np.zeros(2, dtype="i8"))
    signed("q-unlabelled", x=x)
    signed("q-labels", x=x, y=np.zeros(3, dtype="i8"))
    signed("q-other-file", "bin")
    signed("q-table", "csv").write_text("a,b\n1,2\n")
    clinic.attest(ann, "--class", "clinical", where="people/q-table")
    signed("q-items")
    path = people / "q-items" / "descriptor.cbor"
    told = dataclasses.replace(Descriptor.decode(path.read_bytes()), items=5)
    path.write_bytes(told.encode())
    (people / "q-items" / "attestation.cose").write_bytes(attest(told, key, issued_at=told.not_before))
    shutil.copytree(people / "p05", people / "q-twin")
    clinic.attest(ann, "--class", "clinical", "--force", where="people/q-twin")
    signed("Q-TABLET")
    signed("q-tablet")
    signed("\u0440\u041e7")  # as p07 and its like, in Cyrillic
    signed("pO7")
    (people / "q-link").symlink_to(people / "p08")
    signed("q-linked-payload")
    (people / "q-linked-payload" / "payload.npz").rename(clinic.folder / "elsewhere.npz")
    (people / "q-linked-payload" / "payload.npz").symlink_to(clinic.folder / "elsewhere.npz")
    signed("q-two")
    (people / "q-two" / "payload.csv").write_text("1,2\n")
    signed("q-pipe").unlink()
    os.mkfifo(people / "q-pipe" / "payload.npz")
    (people / "q-empty").mkdir()
    signed("q-cut").write_bytes(b"PK")
    return expected | {
        "q-text": "unreadable", "q-shape": "unreadable", "q-unlabelled": "unreadable", "q-labels": "unreadable",
        "q-other-file": "unreadable", "q-table": "unreadable", "q-items": "mismatch", "q-twin": "duplicate-payload",
        "q-tablet": "duplicate-id", "\u0440\u041e7": "duplicate-id", "q-link": "unreadable", "q-linked-payload": "unreadable",
        "q-two": "unreadable", "q-pipe": "unreadable", "q-empty": "no-attestation", "q-cut": "payload-mismatch",
    }  # fmt: skip


@pytest.mark.timeout(120)
def test_a_run_admits_whom_lamina_admit_admits(clinic: Clinic) -> None:
    """The same people, and the same words about the others."""
    expected = hostile(clinic)
    looked = clinic.admit(code=1)
    assert refused_by(looked) == expected
    assert clinic.admit("--processes", "2", code=1) == looked
    run = clinic.json("train", str(clinic.project.write("RUN.toml", clinic.run)))["admission"]
    assert run["refused"] == looked["refused"] and run["admitted"] == looked["admitted"]
    gate = Gate(Policy.load(clinic.folder / "policy.toml"), clinic.folder / "keys.json")
    corpus = gate.admit(clinic.folder / "people")
    assert [each.to_dict() for each in corpus.admission.refused] == looked["refused"]
    assert len(corpus) == looked["admitted"]
    where = str(clinic.folder / "other.ledger.db")
    assert refused_by(clinic.admit("--ledger", where, code=1)) == expected
    (clinic.folder / "people" / "contributions.csv").write_text("id,class\np06,clinical\np09,other\n")
    looked = clinic.admit(code=1)
    assert (looked["admitted"], refused_by(looked)["p09"], refused_by(looked)["p10"]) == (1, "mismatch", "unreadable")
    assert [each.to_dict() for each in gate.admit(clinic.folder / "people").admission.refused] == looked["refused"]


def test_whom_the_ledger_knows_stays_before_a_copy(clinic: Clinic) -> None:
    """The copy comes first in the folder, and its data was signed again."""
    where, people = str(clinic.folder / "test.ledger.db"), clinic.folder / "people"
    assert clinic.admit("--ledger", where)["admitted"] == 20
    shutil.copytree(people / "p05", people / "a-twin")
    clinic.attest(str(clinic.folder / "ann.key"), "--class", "clinical", "--force", where="people/a-twin")
    assert refused_by(clinic.admit("--ledger", where, code=1)) == {"a-twin": "duplicate-payload"}
    assert refused_by(clinic.admit(code=1)) == {"p05": "duplicate-payload"}  # without it, the first stays


def test_a_linked_folder_is_not_signed_either(clinic: Clinic) -> None:
    link = clinic.folder / "people" / "linked"
    link.symlink_to(clinic.folder / "people" / "p00")
    before = (clinic.folder / "people" / "p00" / "attestation.cose").read_bytes()
    found = clinic.attest(
        str(clinic.folder / "ann.key"), "--class", "clinical", "--force", where="people/linked", code=1
    )
    assert found["signed"] == 0
    assert (clinic.folder / "people" / "p00" / "attestation.cose").read_bytes() == before
    assert refused_by(clinic.admit(code=1)) == {"linked": "unreadable"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(clinic: Clinic, kind: str) -> None:
    """Whichever file it is: nothing is waited for, and nothing endless is read."""
    place, policy, people, *_ = clinic.folder / kind, *clinic.where
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(place))
    elif kind == "folder":
        place.mkdir()
    else:
        place = Path("/dev/zero")
    strange, ann, keys = str(place), str(clinic.folder / "ann.key"), clinic.where[3]
    (clinic.folder / "people" / "contributions.csv").symlink_to(place)
    run = clinic.project.write("RUN.toml", clinic.run)
    for words in (
        ("admit", strange, people, "--keys", keys),
        ("admit", policy, people, "--keys", strange),
        ("admit", *clinic.where),  # its contributions.csv
        ("admit", *clinic.where, "--ledger", strange),
        ("attest", policy, people, "--key", strange, "--class", "clinical"),
        ("attest", policy, people, "--key", ann, "--class", "clinical"),
        ("attest", policy, people, "--key", ann, "--class", "clinical", "--subject-key", strange),
        ("keys", "add", strange, "--keys", keys),
        ("keys", "list", "--keys", strange),
        ("train", strange),
        ("train", str(run)),
        ("plan", strange, "--steps", "3"),
        ("ledger", "verify", strange),
        ("ledger", "show", strange),
    ):
        code, _, told = clinic.project.call(*words)
        assert code in (1, 2), (words, told)
        assert "cli.unexpected-error" not in told, (words, told)


def test_there_is_something_to_do_about_every_reason() -> None:
    assert all(len(each.remedy) > 8 for each in REASONS)


def test_without_a_ledger_nothing_is_written(clinic: Clinic) -> None:
    def there() -> list[str]:
        return sorted(str(path) for path in clinic.folder.rglob("*") if "__pycache__" not in path.parts)

    before = there()
    clinic.admit()
    assert there() == before


def test_with_a_ledger_those_who_are_admitted_are_entered_once(clinic: Clinic) -> None:
    expected = spoil(clinic)
    where = clinic.folder / "test.ledger.db"
    plain = clinic.admit(code=1)
    for _ in range(2):
        assert clinic.admit("--ledger", str(where), code=1) == plain  # the answer says the same with and without
    with Ledger.open(where) as ledger:
        kinds = Counter(leaf.kind for leaf in ledger.leaves())
        first = next(leaf.record for leaf in ledger.of_kind(ContributionRecord))
    assert kinds == {Header: 1, KeyEvents: 1, ContributionRecord: 16}
    found = verify(where)
    assert found.verified and found.signed == found.size == 18
    beside = clinic.folder / "test.ledger.pem"
    assert beside.stat().st_mode & 0o777 == where.stat().st_mode & 0o777 == 0o600
    assert isinstance(first, ContributionRecord)
    clinic.ok("ledger", "withdraw", str(where), first.descriptor.hex(), "--reason", "consent", "--key", str(beside))
    assert refused_by(clinic.admit("--ledger", str(where), code=1)) == {**expected, "p04": "withdrawn"}
    code, out, _ = clinic.project.call("admit", *clinic.where, "--ledger", str(where))
    assert code == 1 and reasons.WITHDRAWN.remedy in out


def test_a_ledger_that_promised_more_is_not_made_to_promise_less(clinic: Clinic) -> None:
    where = str(clinic.folder / "test.ledger.db")
    clinic.admit("--ledger", where)
    clinic.project.write("policy.toml", POLICY.replace("epsilon = 6.0", "epsilon = 7.0"))
    refused(clinic.project.call("admit", *clinic.where, "--ledger", where), "ledger.policy-loosened")


def test_the_key_of_a_ledger_may_be_ones_own(clinic: Clinic) -> None:
    key, where = str(clinic.folder / "mine.key"), clinic.folder / "test.ledger.db"
    clinic.ok("keys", "new", key, "--no-passphrase")
    code, _, err = clinic.project.call("admit", *clinic.where, "--ledger-key", key)
    assert code == 2 and "--ledger" in err
    clinic.admit("--ledger", str(where), "--ledger-key", key)
    assert not where.with_suffix(".pem").exists()
    found = verify(where)
    assert found.verified and found.signed == found.size
    other = str(clinic.folder / "other.key")
    clinic.ok("keys", "new", other, "--no-passphrase")
    refused(
        clinic.project.call("admit", *clinic.where, "--ledger", str(where), "--ledger-key", other),
        "ledger.key-may-not-sign",
    )


def test_what_bounds_come_to_in_a_run(clinic: Clinic) -> None:
    ann = str(clinic.folder / "ann.key")
    for i in range(3):
        clinic.attest(ann, "--class", "clinical", "--noise-multiplier", "4", where=f"people/p{i:02d}")
    run = clinic.project.write("RUN.toml", clinic.run)
    found = clinic.admit("--plan", str(run))["resolution"]
    plain, strict = found["bounds"]
    assert plain["class"] == "clinical" and plain["scale"] == pytest.approx(1.0)
    assert strict["noise_multiplier"] == 4_000_000
    assert 0 < strict["scale"] < 1
    assert strict["epsilon"] <= strict["epsilon_signed"] < 1.0 < plain["epsilon"] <= 2.0
    for row in (plain, strict):
        assert row["variance_floor"] <= row["variance"] * (1 + 1e-3)
        assert row["variance_floor"] <= row["variance_ceiling"]
    assert found["depth"]["clinical"] == {"profile": "all layers", "layers": ["0", "2", "4", "6"]}
    by_hand = clinic.admit("--batch", "10", "--steps", "6", "--model", "mlp")["resolution"]
    assert len(by_hand["bounds"]) == 2
    code, out, _ = clinic.project.call("admit", *clinic.where, "--plan", str(run))
    assert code == 0 and "ε signed" in out and "all layers" in out


def test_misuse_and_what_cannot_be_checked(clinic: Clinic) -> None:
    run = str(clinic.project.write("RUN.toml", clinic.run))
    for words in (
        ("--plan", run, "--batch", "10"),
        ("--batch", "10"),
        ("--steps", "10"),
        ("--batch", "10", "--steps", "3", "--epochs", "2"),
        ("--processes", "0"),
    ):
        assert clinic.project.call("admit", *clinic.where, *words)[0] == 2, words
    assert clinic.project.call("admit")[0] == 2
    code, out, _err = clinic.project.call("admit", *clinic.where[:2], "--keys", "nowhere.json", "--json")
    assert code == 1 and "nowhere.json" in json.loads(out)["refused"]
    refused(
        clinic.project.call("admit", clinic.where[0], str(clinic.folder / "none"), *clinic.where[2:]),
        "admit.folder-unreadable",
    )
    other = clinic.project.write("other.toml", POLICY.replace("6.0", "5.0"))
    refused(clinic.project.call("admit", str(other), *clinic.where[1:], "--plan", run), "cli.run-of-other-policy")


def test_help_says_how_and_what_it_costs(clinic: Clinic) -> None:
    text = " ".join(clinic.ok("admit", "--help").split())
    for words in (
        "Spends nothing",
        "Without --ledger nothing is written",
        "withdrawn ones are refused",
        "--ledger corpus.ledger.db",
        "Exit code 0 if nothing was refused",
        "lamina admit policy.toml",
    ):
        assert words in text


def test_the_record_is_compared_with_the_folder(clinic: Clinic) -> None:
    where, people = str(clinic.folder / "test.ledger.db"), clinic.folder / "people"
    clinic.admit("--ledger", where)
    mine, trust = str(people / "p00"), str(clinic.folder / "test.pub")
    ledger_key = PrivateKey.load(clinic.folder / "test.ledger.pem", None)
    Path(trust).write_bytes(ledger_key.public.pem())

    def differences(*folder: str) -> list[list[str]]:
        """By trace, by a receipt that is written, and by the same receipt when it is checked."""
        prefix = str(clinic.folder / f"mine{len(list(clinic.folder.glob('mine*')))}")
        found = []
        for words in (
            ("trace", where, mine),
            ("receipt", where, mine, "-o", prefix),
            ("receipt", "--check", prefix, "--trust", trust, "--folder", mine),
        ):
            code, out, _ = clinic.project.call("ledger", *words, "--json")
            assert "differences" in json.loads(out), out
            found.append(json.loads(out)["differences"])
            assert code == (1 if found[-1] else 0)
        return found

    assert differences() == [[]] * 3
    assert "equal to the leaf" in clinic.ok("ledger", "trace", where, mine)
    index = clinic.json("ledger", "trace", where, mine)["contributions"][0]["index"]
    payload = people / "p00" / "payload.npz"
    held = payload.read_bytes()
    payload.write_bytes(b"other data")
    assert differences() == [["payload"]] * 3
    payload.unlink()
    assert differences() == [[]] * 3  # nothing to compare it with
    payload.write_bytes(held)
    told = Descriptor.decode((people / "p00" / "descriptor.cbor").read_bytes())
    signed = people / "p00" / "attestation.cose"
    kept = signed.read_bytes()
    signed.write_bytes(
        attest(told, PrivateKey.load(clinic.folder / "ann.key", None), issued_at=7, subject_tag="ab" * 32)
    )
    assert differences() == [["attestation", "subject"]] * 3
    signed.write_bytes(b"")
    assert all("attestation" in each[0] or "CBOR" in each[0] for each in differences())
    signed.write_bytes(kept)
    public = ContributionTerms("clinical", told.data_class, 0, 0)
    rewritten(where, replacing(index, terms=public, expires=told.expires + 1), ledger_key, chained=False)
    for kept_state in clinic.folder.glob("*.seen"):
        kept_state.unlink()  # a keeper who rewrites the ledger removes what would show it
    assert differences() == [["expires", "clip_norm", "noise_multiplier", "public"]] * 3
    code, out, _ = clinic.project.call("ledger", "trace", where, mine)
    assert code == 1 and "NOT equal: expires, clip_norm" in out
    assert clinic.json("ledger", "trace", where, str(index)).get("differences") is None


def test_what_is_no_ledger_is_misuse_and_not_a_wrong_one(clinic: Clinic) -> None:
    """An empty file is what a killed program or a full disk leaves: it says nothing about a ledger."""
    empty, other = clinic.project.write("empty.db", ""), clinic.project.write("other.db", "x" * 200)
    for words in (("verify", str(empty)), ("verify", str(empty), "--json"), ("verify", str(clinic.folder / "none.db"))):
        assert clinic.project.call("ledger", *words)[0] == 2, words
    assert clinic.project.call("ledger", "verify", str(other))[0] == 1


# ------------------------------------------------------------------------------------------------ lamina train


def test_a_run_on_admitted_contributions(clinic: Clinic) -> None:
    spoil(clinic)
    ann = str(clinic.folder / "ann.key")
    for i in (5, 6, 7):
        clinic.attest(ann, "--class", "clinical", "--noise-multiplier", "4", where=f"people/p{i:02d}")
    out = succeeded(clinic.project.train())
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "16 admitted, 5 refused" in rows
    assert "admitted by signature: 16; refused: 5" in rows
    assert any(row.startswith("clinical@c=1,z=4 1e-05") for row in rows)
    assert not any("not admitted by signature" in row for row in rows)
    found = clinic.project.train_json()  # the same run, read again
    assert found["admission"]["admitted"] == 16 and len(found["admission"]["refused"]) == 5
    bounds = found["bounds"]
    assert len(bounds) == 2
    for row in bounds.values():
        assert 0 < row["epsilon"] <= row["total"] <= row["signed"]
    with Ledger.open(found["ledger"]) as ledger:
        spent = SpendLedger(ledger).total("clinical@c=1,z=4", delta=1e-5).spent
    assert spent == pytest.approx(bounds["clinical@c=1,z=4"]["total"])
    public = (clinic.folder / "runs" / "first" / "metrics.json").read_text()
    assert '"p05"' not in public
    code, out, _ = clinic.project.call("spend", found["ledger"])
    assert code == 0 and "\n  clinical@c=1,z=4 " in out


def test_without_signatures_the_run_says_so(clinic: Clinic) -> None:
    unsigned = clinic.run.replace(ADMIT, "")
    found = clinic.project.train_json(run=unsigned)
    assert found["admission"] is None and NOT_SIGNED in found["notes"]
    clinic.project.write("second.toml", clinic.run)
    signed = clinic.json("train", str(clinic.folder / "second.toml"))
    assert NOT_SIGNED not in signed["notes"]


def test_stop_means_that_nothing_begins(clinic: Clinic) -> None:
    spoil(clinic)
    refused(clinic.project.train(run=clinic.run + 'on_refusal = "stop"\n'), "corpus.contributions-refused")
    assert not (clinic.folder / "runs").exists()


def test_plan_only_admits_and_writes_nothing(clinic: Clinic) -> None:
    found = clinic.project.train_json("--plan-only")
    assert found["admission"]["admitted"] == 20 and found["refused"] == []
    assert not (clinic.folder / "runs").exists()


def test_a_run_that_would_pass_a_signed_bound_is_refused_by_name(clinic: Clinic) -> None:
    ann = str(clinic.folder / "ann.key")
    clinic.attest(ann, "--class", "clinical", "--noise-multiplier", "4", where="people/p00")
    clinic.project.train_json()
    name = "clinical@c=1,z=4"
    looked = clinic.project.call("train", str(clinic.folder / "first.toml"), "--fresh", "--plan-only", "--json")
    assert looked[0] == 1 and json.loads(looked[1])["refused"] == [name]
    refused(clinic.project.train("--fresh"), "spend.budget-exceeded")
    clinic.project.write("policy.toml", POLICY.replace("[corpus]", '[corpus]\nexhausted = "leave-out"'))
    looked = clinic.project.train_json("--fresh", "--plan-only")  # the policy lets the run go on without them
    assert looked["refused"] == [] and looked["exhausted"] == {name: 0.0}
    out = succeeded(clinic.project.train("--fresh"))
    assert f"{name} was exhausted: left out of" in out and "(contributions: 1) is exhausted" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('kind = "folder"', 'kind = "npz"'), "cli.admit-needs-folder"),
        (('path = "people"', 'path = "people"\nclass = "clinical"'), "cli.data-key-with-admit"),
        (('path = "people"', 'path = "people"\nversion = "1"'), "cli.data-key-with-admit"),
        (('"keys.json"', '"nowhere.json"'), "admit.keys is 'nowhere.json'"),
        (("[admit]\n", '[admit]\non_refusal = "ask"\n'), "admit.on_refusal is 'ask'"),
        (("[admit]\n", "[admit]\nprocesses = 0\n"), "admit.processes is 0"),
        (('[admit]\nkeys = "keys.json"\n', "[admit]\n"), "admit.keys is missing"),
    ],
)
def test_what_an_admit_table_may_not_say(clinic: Clinic, change: tuple[str, str], words: str) -> None:
    assert change[0] in clinic.run
    code, _, err = clinic.project.train(run=clinic.run.replace(*change))
    assert code == 1 and words in err
    assert not (clinic.folder / "runs").exists()


# ------------------------------------------------------------------------------------------------ later


def first_weights() -> dict[str, torch.Tensor]:
    space: dict[str, Any] = {}
    exec(MODULE, space)
    model: torch.nn.Module = space["build"]()
    return dict(model.state_dict())


def moved(found: dict[str, Any]) -> set[str]:
    """The layers that are not as they began."""
    before, after = first_weights(), load_file(found["model"])
    return {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}


def test_a_corpus_that_only_attests_adopts_routing_by_its_policy_alone(clinic: Clinic) -> None:
    """Nobody signs anything again."""
    signatures = {
        path: path.read_bytes() for path in sorted((clinic.folder / "people").glob("*/*")) if path.suffix != ".npz"
    }
    assert len(signatures) == 40
    whole = clinic.project.train_json()
    assert moved(whole) == {"0", "2", "4", "6"}
    assert clinic.admit()["classes"] == {"clinical": 20}
    clinic.project.write("policy.toml", POLICY + "profile = { top = 0.25 }\n")
    code, out, _ = clinic.project.call("admit", *clinic.where)
    assert code == 0 and "top 25 %" in out
    routed = clinic.project.train_json("--fresh")
    assert routed["admission"]["admitted"] == 20 and routed["admission"]["refused"] == []
    assert moved(routed) == {"6"}  # the others are what they were, to the last bit
    for path, data in signatures.items():
        assert path.read_bytes() == data


def test_whoever_signed_a_depth_is_not_taken_deeper(clinic: Clinic) -> None:
    clinic.project.write("policy.toml", POLICY + "profile = { top = 0.5 }\n")
    ann = str(clinic.folder / "ann.key")
    assert clinic.attest(ann, "--class", "clinical", "--force")["signed"] == 20
    clinic.project.write("policy.toml", POLICY + "profile = { top = 0.25 }\n")
    assert clinic.admit()["admitted"] == 20  # less deep than was signed
    clinic.project.write("policy.toml", POLICY)
    found = clinic.admit(code=1)
    assert found["admitted"] == 0 and found["reasons"] == {"profile-mismatch": 20}


@pytest.mark.slow
def test_killed_from_outside_and_a_key_revoked_before_it_goes_on(clinic: Clinic) -> None:
    """SIGKILL in the middle of a segment, a revocation, and the same command again."""
    bob = clinic.key("bob")
    for i in range(4):
        clinic.attest(bob, "--class", "clinical", "--force", where=f"people/p{i:02d}")
    run = clinic.run.replace("steps = 6", "steps = 300").replace("segment = 2", "segment = 60")
    path = clinic.project.write("first.toml", run)
    options = clinic.project.train_killed_in_a_segment(path)
    clinic.ok("keys", "revoke", "bob", "--keys", str(clinic.folder / "keys.json"))
    assert KeyRing.load(clinic.folder / "keys.json").find("bob").revoked_from is not None
    found = clinic.project.train_again(path, options)
    assert found["admission"]["reasons"] == {"revoked-key": 4}
    assert any("4 (revoked-key 4)" in note for note in found["notes"])
    assert any("contributions were added or withdrawn" in note for note in found["notes"])
    generations = [(each.segment, each.generation) for each in attempts(clinic.folder / "runs" / "first")]
    assert generations[:2] == [(0, 0), (0, 1)]


def test_a_folder_without_contributions_is_no_success(clinic: Clinic) -> None:
    (clinic.folder / "empty").mkdir()
    policy = str(clinic.folder / "policy.toml")
    for place in ("empty", "people/p00"):
        refused(
            clinic.project.call(
                "admit", policy, str(clinic.folder / place), "--keys", str(clinic.folder / "keys.json")
            ),
            "cli.contributions-missing",
        )


@pytest.mark.parametrize("command", ["admit", "train"])
def test_brackets_in_help_are_text(command: str, project: Project) -> None:
    code, printed, _ = project.call(command, "--help")
    assert code == 0 and "[admit]" in printed


# ------------------------------------------------------------------------------------------------ one ledger of all of it


def test_all_of_it_is_in_one_ledger(clinic: Clinic) -> None:
    assert clinic.project.train_json("--plan-only")["admission"]["admitted"] == PEOPLE
    assert not (clinic.folder / "runs").exists()
    first = clinic.project.train_json()
    ledger = first["ledger"]
    assert [path.name for path in Path(ledger).parent.glob("*.db")] == ["test.ledger.db"]
    found = clinic.json("ledger", "verify", ledger)
    assert found["attestations"] == found["counts"]["contribution"] == PEOPLE

    records = clinic.json("ledger", "show", ledger, "--kind", "contribution")["records"]
    leaving = records[3]["descriptor"]
    clinic.json("ledger", "withdraw", ledger, leaving, "--reason", "consent")
    before = clinic.json("ledger", "verify", ledger)
    looked = clinic.project.train_json("--plan-only", "--fresh")
    assert looked["admission"]["admitted"] == PEOPLE - 1
    assert [each["reason"] for each in looked["admission"]["refused"]] == ["withdrawn"]
    assert clinic.json("ledger", "verify", ledger)["root"] == before["root"]  # it only looked

    second = clinic.project.train_json("--fresh")
    assert second["ledger"] == ledger and second["admission"]["admitted"] == PEOPLE - 1
    after = clinic.json("ledger", "verify", ledger)
    assert after["verified"] and after["signed"] == after["size"]
    assert after["counts"]["contribution"] == PEOPLE  # who was there before is not entered again
    (gone,) = clinic.json("ledger", "trace", ledger, leaving)["contributions"]
    (stays,) = clinic.json("ledger", "trace", ledger, records[4]["descriptor"])["contributions"]
    assert {epoch["run"] for epoch in gone["epochs"]} == {first["run"]}
    assert {epoch["run"] for epoch in stays["epochs"]} == {first["run"], second["run"]}
    clinical = clinic.json("spend", ledger)["origins"]["test"]["clinical"]
    assert [each["label"] for each in clinical["runs"]] in (["first", "first-2"], ["first-2", "first"])
    assert clinical["epsilon"] == pytest.approx(second["classes"]["clinical"]["total"])


def test_one_impossible_label_stops_nobody(clinic: Clinic) -> None:
    path = clinic.folder / "people" / "p03" / "payload.npz"
    np.savez(path, x=np.load(path)["x"], y=np.array([0, 10**12]))
    clinic.attest(str(clinic.folder / "ann.key"), "--class", "clinical", "--force")
    for words in (("--plan-only",), ()):
        found = clinic.project.train_json(*words)["admission"]
        assert found["left"] == [{"id": "p03", "reason": "not-trainable", "detail": ""}]
    out = succeeded(clinic.project.train("--fresh"))
    assert "p03           not-trainable" in out and "correct its targets" in out and "had to leave: 1" in out


def test_a_ledger_in_a_database(clinic: Clinic, server: postgres.Server) -> None:
    database = server.url("ward")
    clinic.project.run = f'ledger = "{database}"\n{clinic.project.run}'
    refused(clinic.project.train(), "ledger.no-key-to-create")
    ledger_key, owner = (str(clinic.folder / name) for name in ("ledger.key", "owner.key"))
    for name in (ledger_key, owner):
        clinic.json("keys", "new", name, "--no-passphrase")
    clinic.project.run = f'ledger_key = "ledger.key"\n{clinic.project.run}'
    assert clinic.project.train_json("--plan-only")["standing"]["clinical"]["spent"] == 0
    code, _, _err = clinic.project.call("ledger", "verify", database)
    assert code != 0  # still none
    policy = str(clinic.folder / "policy.toml")
    clinic.json("ledger", "init", database, policy, "--key", ledger_key, "--governing-key", owner)
    refused(clinic.project.train(), "corpus.nobody-admitted")
    clinic.json("ledger", "key", database, "enrol", str(clinic.folder / "keys.json"), "--key", owner)
    first = clinic.project.train_json()
    found = clinic.json("ledger", "verify", database)
    assert found["verified"] and found["signed"] == found["size"] and found["attestations"] == PEOPLE
    looked = clinic.project.train_json("--plan-only", "--fresh")
    assert looked["standing"]["clinical"]["spent"] == pytest.approx(first["classes"]["clinical"]["total"])
    assert clinic.json("ledger", "verify", database)["size"] == found["size"]
    spent = clinic.json("spend", database)["origins"]["test"]["clinical"]
    assert spent["epsilon"] == pytest.approx(first["classes"]["clinical"]["total"])
    assert not list((clinic.folder / "runs").glob("*.db")) and not (Path(first["folder"]) / "ledger.db").exists()


def test_a_ledger_of_another_corpus_is_refused_before_anybody_is_entered(clinic: Clinic) -> None:
    ledger = Path(clinic.project.train_json()["ledger"])
    policy = (clinic.folder / "policy.toml").read_text(encoding="utf-8")
    clinic.project.write("policy.toml", policy.replace('"test"', '"other"'))
    size = clinic.json("ledger", "verify", str(ledger))["size"]
    run = f'ledger = "runs/{ledger.name}"\n' + clinic.project.run
    for words in ((), ("--plan-only",)):
        refused(clinic.project.train("--fresh", *words, run=run), "ledger.wrong-origin")
    assert clinic.json("ledger", "verify", str(ledger))["size"] == size
