"""Admission, training, withdrawal and another training by commands alone: one ledger has all of it, and verifies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import postgres
import pytest
from asking import answer, refused

if TYPE_CHECKING:
    from conftest import Project

PEOPLE = 12


@pytest.fixture
def clinic(project: Project) -> Project:
    """A project whose run admits twelve people, signed with the program itself."""
    generator = np.random.default_rng(0)
    for i in range(PEOPLE):
        x = generator.normal(size=(2, 4)).astype("f4")
        (project.folder / "people" / f"p{i:02d}").mkdir(parents=True)
        np.savez(project.folder / "people" / f"p{i:02d}" / "payload.npz", x=x, y=(x[:, 0] > 0).astype("int64"))
    key, ring = str(project.folder / "ward.key"), str(project.folder / "keys.json")
    policy, people = str(project.folder / "policy.toml"), str(project.folder / "people")
    ask(project, "keys", "new", key, "--no-passphrase")
    ask(project, "keys", "add", key.replace(".key", ".pub"), "--keys", ring)
    ask(project, "attest", policy, people, "--key", key, "--class", "clinical")
    head = project.run.partition("[data]")[0]
    project.run = f'{head}[data]\nkind = "folder"\npath = "people"\n[admit]\nkeys = "keys.json"\n'
    return project


def ask(project: Project, *words: str) -> dict[str, Any]:
    return answer(project.call(*words, "--json"))


def test_all_of_it_is_in_one_ledger(clinic: Project) -> None:
    assert clinic.train_json("--plan-only")["admission"]["admitted"] == PEOPLE
    assert not (clinic.folder / "runs").exists()
    first = clinic.train_json()
    ledger = first["ledger"]
    assert [path.name for path in Path(ledger).parent.glob("*.db")] == ["test.ledger.db"]
    found = ask(clinic, "ledger", "verify", ledger)
    assert found["attestations"] == found["counts"]["contribution"] == PEOPLE

    records = ask(clinic, "ledger", "show", ledger, "--kind", "contribution")["records"]
    leaving = records[3]["descriptor"]
    ask(clinic, "ledger", "withdraw", ledger, leaving, "--reason", "consent")
    before = ask(clinic, "ledger", "verify", ledger)
    looked = clinic.train_json("--plan-only", "--fresh")
    assert looked["admission"]["admitted"] == PEOPLE - 1
    assert [each["reason"] for each in looked["admission"]["refused"]] == ["withdrawn"]
    assert ask(clinic, "ledger", "verify", ledger)["root"] == before["root"]  # it only looked

    second = clinic.train_json("--fresh")
    assert second["ledger"] == ledger and second["admission"]["admitted"] == PEOPLE - 1
    after = ask(clinic, "ledger", "verify", ledger)
    assert after["verified"] and after["signed"] == after["size"]
    assert after["counts"]["contribution"] == PEOPLE  # who was there before is not entered again
    (gone,) = ask(clinic, "ledger", "trace", ledger, leaving)["contributions"]
    (stays,) = ask(clinic, "ledger", "trace", ledger, records[4]["descriptor"])["contributions"]
    assert {epoch["run"] for epoch in gone["epochs"]} == {first["run"]}
    assert {epoch["run"] for epoch in stays["epochs"]} == {first["run"], second["run"]}
    clinical = ask(clinic, "spend", ledger)["origins"]["test"]["clinical"]
    assert [each["label"] for each in clinical["runs"]] in (["first", "first-2"], ["first-2", "first"])
    assert clinical["epsilon"] == pytest.approx(second["classes"]["clinical"]["total"])


def test_a_ledger_in_a_database(clinic: Project, server: postgres.Server) -> None:
    database = server.url("ward")
    clinic.run = f'ledger = "{database}"\n{clinic.run}'
    refused(clinic.train(), "ledger.no-key-to-create")
    ask(clinic, "keys", "new", str(clinic.folder / "ledger.key"), "--no-passphrase")
    clinic.run = f'ledger_key = "ledger.key"\n{clinic.run}'
    assert clinic.train_json("--plan-only")["standing"]["clinical"]["spent"] == 0
    code, _, _err = clinic.call("ledger", "verify", database)
    assert code != 0  # still none
    first = clinic.train_json()
    found = ask(clinic, "ledger", "verify", database)
    assert found["verified"] and found["signed"] == found["size"] and found["attestations"] == PEOPLE
    looked = clinic.train_json("--plan-only", "--fresh")
    assert looked["standing"]["clinical"]["spent"] == pytest.approx(first["classes"]["clinical"]["total"])
    assert ask(clinic, "ledger", "verify", database)["size"] == found["size"]
    spent = ask(clinic, "spend", database)["origins"]["test"]["clinical"]
    assert spent["epsilon"] == pytest.approx(first["classes"]["clinical"]["total"])
    assert not list((clinic.folder / "runs").glob("*.db")) and not (Path(first["folder"]) / "ledger.db").exists()


def test_a_ledger_of_another_corpus_is_refused_before_anybody_is_entered(clinic: Project) -> None:
    ledger = Path(clinic.train_json()["ledger"])
    policy = (clinic.folder / "policy.toml").read_text(encoding="utf-8")
    clinic.write("policy.toml", policy.replace('"test"', '"other"'))
    size = ask(clinic, "ledger", "verify", str(ledger))["size"]
    run = f'ledger = "runs/{ledger.name}"\n' + clinic.run
    for words in ((), ("--plan-only",)):
        refused(clinic.train("--fresh", *words, run=run), "ledger.wrong-origin")
    assert ask(clinic, "ledger", "verify", str(ledger))["size"] == size
