"""`lamina check, init, contributions, status`: from a table to a run, with what each says on the way."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import Call, answer, refused, succeeded

from lamina import Corpus
from lamina.cli import terminal

TABLE = Path("patients.csv")


def write_table(path: Path = TABLE, **columns: Any) -> Path:
    rng = np.random.default_rng(0)
    data = {
        "age": rng.normal(size=60),
        "bmi": rng.normal(size=60),
        "patient": np.arange(60) // 3,
        "sick": np.arange(60) % 2,
    }
    data |= columns
    lines = [",".join(data), *(",".join(map(str, row)) for row in zip(*data.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)


# ------------------------------------------------------------------------------------------------ check


def test_a_table_is_looked_at(lamina: Call) -> None:
    write_table()
    before = sorted(os.listdir())
    found = answer(lamina("check", "patients.csv", "--unit", "patient", "--y", "sick", "--json"))
    assert found["rows"] == 60 and found["problems"] == [] and found["classes"] == {"0": 30, "1": 30}
    assert found["unit"] == {
        "column": "patient", "units": 20, "rows_of_a_unit": {"fewest": 3, "median": 3, "most": 3}, "missing": 0,
    }  # fmt: skip
    assert found["columns"]["age"]["values"] == 60 and set(found["columns"]) == {"age", "bmi"}
    text = succeeded(lamina("check", "patients.csv", "--unit", "patient", "--y", "sick"))
    assert "20 values of 'patient': 3 to 3 rows each" in text and "50.0 %" in text and "not protected" in text
    assert sorted(os.listdir()) == before


def test_what_a_run_would_refuse_is_named(lamina: Call) -> None:
    ages = [*np.arange(58.0), "", "nan"]
    write_table(age=ages, ward=["a", "b"] * 30, one=[1] * 60, income=np.arange(60) * 1e5)
    found = answer(lamina("check", "patients.csv", "--y", "sick", "--json"), 1)
    told = "\n".join(found["problems"])
    assert "'patient' looks like an id" in told and "unit='patient'" in told
    assert "'age' has no number in 2 rows" in told and "'ward' holds text" in told
    text = lamina("check", "patients.csv", "--y", "sick")[1]
    write_table(Path("unlabelled.csv"), sick=["", *np.arange(59) % 2])
    found = answer(lamina("check", "unlabelled.csv", "--unit", "patient", "--y", "sick", "--json"), 1)
    assert found["problems"] == ["rows without a label: 1 (leave these rows out: a label cannot be filled in)"]
    assert "the same in every row" in text and "scale it by a public constant" in text
    for words, code in ((("--unit", "case"), "corpus.column-unknown"), (("--y", "case"), "corpus.column-unknown")):
        refused(lamina("check", "patients.csv", *words), code)


# ------------------------------------------------------------------------------------------------ contributions


def test_a_folder_for_each_patient(lamina: Call) -> None:
    write_table(site=["north"] * 30 + ["south"] * 30, person=[f"s{i // 3}" for i in range(60)])
    words = ("--unit", "patient", "--y", "sick", "--class", "site", "--subject", "person", "-o", "data")
    made = answer(lamina("contributions", "from-csv", "patients.csv", *words, "--json"))
    assert (made["contributions"], made["examples"], made["features"]) == (20, 60, ["age", "bmi"])
    folders, table = Corpus.of_folder("data"), Corpus.of_csv(TABLE, x=["age", "bmi"], y="sick", unit="patient")
    assert folders.names == ("north", "south") and len(folders) == 20
    for id in ("0", "7", "19"):
        x, y = folders.source.fetch(folders.layout.rows_of(folders._index.find([id])))
        expected = table.source.fetch(table.layout.rows_of(table._index.find([id])))
        assert x.tolist() == expected[0].tolist() and y.tolist() == expected[1].tolist()
    assert oct((Path("data") / "7" / "payload.npz").stat().st_mode)[-3:] == "600"
    refused(lamina("contributions", "from-csv", "patients.csv", *words), "cli.folder-exists")


def test_ids_that_are_no_names_of_folders(lamina: Call) -> None:
    for wrong in ("../x", ".hidden", "a/b", "c:d"):
        write_table(patient=[wrong, *range(59)])
        refused(lamina("contributions", "from-csv", "patients.csv", "--unit", "patient"), "cli.id-not-a-name")
    write_table(site=["a", "b"] * 30)
    words = ("--unit", "patient", "--class", "site")
    refused(lamina("contributions", "from-csv", "patients.csv", *words), "corpus.column-contradicts-itself")
    assert not Path("contributions").exists()


# ------------------------------------------------------------------------------------------------ init


def test_the_files_that_init_writes_run(lamina: Call) -> None:
    write_table()
    made = answer(lamina("init", "patients.csv", "--population", "25", "--epsilon", "8", "--json"))
    assert made["files"] == ["policy.toml", "RUN.toml", "nets.py"] and made["unit"] == "patient" and made["y"] == "sick"
    planned = answer(lamina("train", "RUN.toml", "--plan-only", "--json"))
    assert planned["standing"]["data"]["bound"] == 8
    found = answer(lamina("train", "RUN.toml", "--json"))
    assert found["private"] and found["classes"]["data"]["unit"] == "patient"
    told = succeeded(lamina("status"))
    assert "consistent, not checked against an outside key" in told and "corpus patients" in told and "runs/RUN" in told
    text = succeeded(lamina("spend"))
    assert "corpus patients" in text
    os.chdir("runs")
    assert succeeded(lamina("spend")) == text  # ledgers in the current folder
    os.chdir("..")
    refused(lamina("init", "patients.csv", "--population", "25"), "cli.file-exists")


def test_each_line_that_init_suggests_works(lamina: Call) -> None:
    write_table()
    text = succeeded(lamina("init", "patients.csv", "--population", "25", "--folder", "project"))
    commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("  lamina ")]
    assert [words[0] for words in commands] == ["check", "train", "train"]
    for words in commands[:2]:
        succeeded(lamina(*words))


@pytest.mark.parametrize(("classes", "labels"), [("1", np.linspace(0, 1, 60)), ("3", np.arange(60) % 3)])
def test_other_labels(lamina: Call, classes: str, labels: Any) -> None:
    write_table(sick=labels)
    succeeded(lamina("init", "patients.csv", "--population", "60", "--unit", "each", "--classes", classes))
    assert answer(lamina("train", "RUN.toml", "--plan-only", "--json"))["standing"]["data"]["planned"] <= 3


def test_init_asks_for_what_is_not_given(lamina: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table()
    code, _, err = lamina("init", "patients.csv")
    assert code == 2 and "--population" in err
    asked = []

    def prompt(question: str, *, default: Any, err: bool) -> Any:
        asked.append(question)
        return {"A public upper limit": "40"}.get(question[:20], default)

    monkeypatch.setattr(terminal, "can_prompt", lambda: True)
    monkeypatch.setattr("typer.prompt", prompt)
    succeeded(lamina("init", "patients.csv"))
    assert len(asked) == 5 and "population = 40 " in Path("policy.toml").read_text()


# ------------------------------------------------------------------------------------------------ status


def test_runs_side_by_side_and_a_ledger_that_does_not_verify(lamina: Call) -> None:
    write_table()
    assert "no ledgers and no runs" in succeeded(lamina("status"))
    succeeded(lamina("init", "patients.csv", "--population", "25", "--epsilon", "8"))
    text = Path("RUN.toml").read_text().replace("epochs = 20", "steps = 2\nepsilon = 1.0")
    for name, changed in {"a": text, "b": text.replace("epsilon = 1.0", "epsilon = 2.0")}.items():
        Path(f"{name}.toml").write_text(changed)
        succeeded(lamina("train", f"{name}.toml"))
    found = answer(lamina("status", "--json"))
    first, second = found["runs"]
    assert (first["differs"], second["differs"]) == ({"epsilon": 1.0}, {"epsilon": 2.0})
    assert first["steps"] == 2 and 0.5 < first["epsilon"]["data"] <= 1.0 < second["epsilon"]["data"] <= 2.0
    (ledger,) = found["ledgers"]
    assert ledger["verdict"] == "self-consistent" and ledger["accounts"]["data"]["bound"] == 8
    assert answer(lamina("status", "--no-verify", "--json"))["ledgers"][0]["verdict"] == "not asked"
    place = Path(ledger["ledger"])
    data = bytearray(place.read_bytes())
    at = data.find(b"patients", data.find(b"patients") + 1)
    data[at : at + 8] = b"somebody"
    place.write_bytes(bytes(data))
    broken = answer(lamina("status", "--json"), 1)
    assert broken["ledgers"][0]["verdict"] in ("not verified", "unreadable") and broken["ledgers"][0]["problem"]
    Path("runs/a/metrics.json").write_text(json.dumps({"steps": 1}))  # of another program
    assert len(answer(lamina("status", "--json"), 1)["runs"]) == 1
