"""RUN.toml: every key is known, explained in the template, and told by name, value and bound when it is wrong."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from refusals import raises_code

from lamina.cli.run_file import AdmitTable, DataTable, ModelTable, NamedTable, RunFile, run_template
from lamina.errors import LaminaError
from lamina.run.options import EvaluateTable, ProxyTable

LEAST = """
policy = "policy.toml"
model = "nets:build"
loss = "mse"
optimizer = "sgd"
batch = 8
steps = 10
[data]
kind = "npz"
path = "data.npz"
"""


def parse(top: str = "", data: str = "", *, least: str = LEAST) -> RunFile:
    """LEAST with lines put in front, and lines added to [data]; a line in front replaces the key that it sets."""
    for key in re.findall(r"^(\w+) =", top, re.MULTILINE):
        least = re.sub(rf"^{key} = .*\n", "", least, flags=re.MULTILINE)
    for key in re.findall(r"^(\w+) =", data, re.MULTILINE):
        least = re.sub(rf"(\[data\](?:.*\n)*?){key} = .*\n", r"\1", least)
    return RunFile.parse(f"{top}\n{least}{data}\n", source="RUN.toml")


def refused(top: str = "", data: str = "", **changes: Any) -> LaminaError:
    with pytest.raises(LaminaError) as caught:
        parse(top, data, **changes)
    assert caught.value.remedy
    return caught.value


def test_the_least_is_enough() -> None:
    run = parse()
    assert run.model == ModelTable(factory="nets:build")
    assert run.optimizer.name == "sgd"
    assert run.optimizer.arguments == {}
    assert (run.allocate, run.output, run.options) == (None, None, {})


def test_text_stands_for_a_table() -> None:
    assert parse('model = "a:b"').model == parse('model = { factory = "a:b" }').model
    assert parse('loss = "huber"').loss == parse('loss = { name = "huber" }').loss
    assert parse('optimizer = { name = "adam", lr = 0.1, betas = [0.8, 0.9] }').optimizer.arguments == {
        "lr": 0.1,
        "betas": [0.8, 0.9],
    }


def test_numbers_may_be_one_or_by_class() -> None:
    assert parse("batch = { a = 3, b = 0 }").batch == {"a": 3, "b": 0}
    assert parse("epsilon = 2").epsilon == 2
    assert parse("epsilon = { a = 1.5 }").epsilon == {"a": 1.5}
    assert parse("max_occurrences = { a = 5 }").options == {"max_occurrences": {"a": 5}}


@pytest.mark.parametrize("key", ["policy", "model", "loss", "batch"])
def test_what_is_missing_is_named_with_an_example(key: str) -> None:
    error = refused(least=re.sub(rf"^{key} = .*\n", "", LEAST, flags=re.MULTILINE))
    assert error.code == "cli.run-keys-missing" and key in error.problem
    assert f"{key} = " in error.remedy


def test_a_key_below_a_table_is_found_there() -> None:
    error = refused(data="batch = 8", least=LEAST.replace("batch = 8\n", ""))
    assert "lacks batch (a key below [data] belongs to that table)" in error.problem


@pytest.mark.parametrize(
    ("length", "words"),
    [("", "steps is missing and epochs is missing"), ("steps = 3\nepochs = 2", "steps is 3 and epochs is 2")],
)
def test_one_length(length: str, words: str) -> None:
    assert words in refused(length, least=LEAST.replace("steps = 10\n", "")).problem


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("policy = 3", "policy is 3, must be text in quotes"),
        ('policy = ""', "policy is '', must not be empty"),
        ("model = 3", "must be text in quotes, or a table"),
        ('model = { factory = "a:b", width = 3 }', "model.width is not a known key"),
        ("model = { args = {} }", "model.factory is missing"),
        ('model = { factory = "a:b", args = 3 }', "model.args is 3, must be a table"),
        ("loss = []", "must be text in quotes, or a table"),
        ("optimizer = { lr = 0.1 }", "optimizer.name is missing"),
        ("optimizer = { name = 3 }", "optimizer.name is 3, must be text"),
        ("scheduler = 1", "must be text in quotes, or a table"),
        ("batch = 2.5", "batch is 2.5"),
        ("batch = -1", "must be a whole number >= 0"),
        ("batch = true", "batch is True"),
        ('batch = { a = "3" }', "must be a whole number"),
        ("steps = 0", "steps is 0, must be >= 1"),
        ("steps = 1.5", "steps is 1.5, must be a whole number"),
        ('allocate = "parreto"', "did you mean 'pareto'"),
        ('clipping = "round"', "clipping is 'round'"),
        ("epsilon = 0", "must be a number > 0"),
        ('epsilon = "2"', "epsilon is '2'"),
        ("epsilon = { a = -1.0 }", "must be a number > 0"),
        ("segment = 0", "segment is 0, must be >= 1"),
        ("microbatches = 0", "microbatches is 0"),
        ("ema = 1.0", "ema is 1.0, must be < 1"),
        ("ema = nan", "ema is nan"),
        ('on_withdrawal = "ignore"', "on_withdrawal is 'ignore'"),
        ("threads = 0", "threads is 0"),
        ("max_occurrences = 0", "max_occurrences is 0"),
        ('hardened = "yes"', "hardened is 'yes', must be true or false"),
        ("output = 3", "output is 3"),
        ("ledger = []", "ledger is []"),
        ("ledger_key = 3", "ledger_key is 3"),
        ("evaluate = { function = 'a:b', on = 'private' }", "no budget pays"),
        ("evaluate = { function = 'a:b', on = 'train' }", "evaluate.on is 'train'"),
        ("evaluate = { on = 'public' }", "evaluate.function is missing"),
        ("evaluate = { function = 'a:b', on = 'public', every = 0 }", "evaluate.every is 0"),
        ("evaluate = { function = 'a:b', on = 'public', patience = 2 }", "patience needs best"),
        ("evaluate = { function = 'a:b', on = 'public', metric = 1 }", "evaluate.metric is not a known key"),
        ('allocate = { name = "ladp", mod = "budget" }', "'ladp' has no option 'mod'; did you mean 'mode'"),
        ('allocate = { name = "ladp", mode = "fast" }', "mode of ladp is 'fast'"),
        ('allocate = { name = "ladp", every = "10" }', "every of 'ladp' is '10', must be a whole number"),
        ('allocate = { name = "flat", every = 3 }', "'flat' has no option 'every'; it takes none"),
        ('allocate = { name = "lsba" }', "did you mean 'lsab'"),
        ("allocate = { mode = 'budget' }", "allocate.name is missing"),
        ("allocate = 3", "must be text in quotes, or a table"),
        ("allocate = { name = 'pareto', shrink = 2.0 }", "shrink of pareto is 2.0, must be a number >= 0 and <= 1"),
        ("measure = 3", "measure is 3, must be text"),
        ("rho = 0", "must be a number > 0"),
        ("stepps = 10", "did you mean 'steps'"),
        ("learning_rate = 0.1", "learning_rate is not a known key"),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_bound(line: str, words: str) -> None:
    error = refused(line)
    assert error.problem.startswith("RUN.toml: ")
    assert words in error.problem


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            'kind = "parquet"',
            "data.kind is 'parquet', which is not available; accepted: 'npz', 'csv', 'folder' or 'factory'",
        ),
        ('kind = "factory"\nfactory = "a:b"', 'kind = "factory" takes no path: return lamina.Corpus'),
        ('kind = "factory"', 'kind = "factory" needs factory'),
        ('kind = "csv"\nargs = { a = 1 }', 'kind = "csv" takes no args'),
        ('kind = "folder"\nunit = "patient"', 'kind = "folder" takes no unit'),
        ('kind = "npz"\ndelimiter = ";"', 'kind = "npz" takes no delimiter'),
        ('kind = "npz"\nx = ["a", "b"]', "one array each"),
        ("x = 3", "data.x is 3: must be a name"),
        ("x = []", "data.x is []"),
        ("examples_per_unit = 0", "data.examples_per_unit is 0, must be >= 1"),
        ("class = 3", "data.class is 3"),
        ('clas = "a"', "data.clas is not a known key; did you mean 'class'"),
        ("version = 2024", "data.version is 2024, must be text"),
    ],
)
def test_what_is_wrong_with_the_data(lines: str, words: str) -> None:
    assert words in refused(data=lines).problem


def test_what_is_kept_of_a_file_has_no_password() -> None:
    for written, kept in {
        "postgresql://me:pw@host:5432/db#ward": "postgresql://me@host:5432/db#ward",
        "postgres://me:p@w/d@host/db": "postgres://…",
        "postgresql://me@host/db": "postgresql://me@host/db",
        "postgresql:///db?host=/run&password=pw&port=1": "postgresql:///db?host=/run&port=1",
        "postgresql://host/db?PASSWORD=pw#ward": "postgresql://host/db#ward",
        "me:pw@x.db": "me:pw@x.db",
    }.items():
        assert parse(f'ledger = "{written}"').settings()["ledger"] == kept
    assert "ledger" not in parse().settings()


@given(st.sampled_from(["", "data", "evaluate", "model"]), st.from_regex(r"[a-z]{1,12}", fullmatch=True))
def test_no_unknown_key_passes(table: str, key: str) -> None:
    schema: dict[str, type[BaseModel]] = {
        "": RunFile.schema_with_options(),
        "data": DataTable,
        "evaluate": EvaluateTable,
        "proxy": ProxyTable,
        "model": ModelTable,
    }
    known = {field.alias or name for name, field in schema[table].model_fields.items()}
    if key in known | {"cls"}:
        return
    text = LEAST.replace('model = "nets:build"', 'model = { factory = "nets:build" }')
    text += '[evaluate]\nfunction = "a:b"\non = "public"\n[proxy]\nfunction = "a:b"\non = "public"\n'
    if table == "model":
        text = text.replace("{ factory", f"{{ {key} = 1, factory")
    else:
        text = text.replace(f"[{table}]\n", f"[{table}]\n{key} = 1\n") if table else f"{key} = 1\n{text}"
    with raises_code("plan.policy-invalid"):
        RunFile.parse(text)


def test_not_toml_names_the_line() -> None:
    error = refused("steps == 3")
    assert "is not TOML" in error.problem
    assert "line 1" in error.problem


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with raises_code("cli.run-file-unreadable") as caught:
        RunFile.load(tmp_path / "nowhere.toml")
    assert "--template" in caught.value.remedy
    (tmp_path / "latin.toml").write_bytes(b"policy = '\xe9'")
    with raises_code("cli.run-file-unreadable"):
        RunFile.load(tmp_path / "latin.toml")


def test_an_allocation_with_options_is_the_policy_with_them() -> None:
    run = parse('allocate = { name = "ladp", sensitive = { top = 0.5 }, thresholds = [1, 3], clipping = "joint" }')
    policy = run.allocate.policy
    assert (policy.thresholds, policy.clipping.value) == ((1.0, 3.0), "joint")  # type: ignore[attr-defined]
    assert str(policy.sensitive) == "top 50 %"  # type: ignore[attr-defined]
    assert parse('allocate = "ladp"').allocate == parse('allocate = { name = "ladp" }').allocate


# ------------------------------------------------------------------------------------ the template


def test_the_template_is_a_run_file() -> None:
    run = RunFile.parse(run_template())
    assert run.data.kind == "npz"


def test_the_template_shows_every_key() -> None:
    text = run_template()
    for schema in (RunFile.schema_with_options(), DataTable, AdmitTable, EvaluateTable, ProxyTable, ModelTable):
        for name, entry in schema.model_fields.items():
            key = entry.alias or name
            assert re.search(rf"\b{key} = |\[{key}\]", text), f"{schema.__name__}.{key}"
            assert entry.description or schema is ModelTable or f"[{key}]" in text, (
                f"{schema.__name__}.{key} has no help"
            )
    assert set(NamedTable.model_fields) == {"name"}


def shown() -> list[tuple[str, str]]:
    """(table, line) of every key that the template shows in a comment."""
    table, found = "", []
    for line in run_template().splitlines():
        if head := re.match(r"(?:# )?\[(\w+)\]", line):
            table = head[1]
        elif re.match(r"# \w+ = ", line):
            found.append((table, line.removeprefix("# ")))
    return found


@pytest.mark.parametrize(("table", "line"), shown())
def test_what_the_template_shows_is_valid(table: str, line: str) -> None:
    data = tomllib.loads(run_template())
    value = tomllib.loads(line)
    if table == "evaluate":
        value = {"evaluate": {"function": "a:b", "on": "public", "best": "auc"} | value}
    elif table == "proxy":
        value = {"proxy": {"function": "a:b", "on": "public"} | value}
    elif table in ("layers", "loggers"):
        value = {table: value}
    elif table == "admit":
        value = {"data": {"kind": "folder", "path": "d"}, "admit": {"keys": "keys.json"} | value}
    elif table == "data":
        kind = {"delimiter": "csv", "factory": "factory", "args": "factory"}.get(next(iter(value)), "npz")
        base = {"factory": "a:b"} if kind == "factory" else {"path": "d"}
        value = {"data": {"kind": kind} | base | value}
    elif "scheduler" in value:
        value |= {"optimizer": "adam"}  # "auto" has a schedule of its own
    RunFile.schema_with_options().model_validate(data | value)


def test_a_misspelt_key_is_named_with_the_nearest() -> None:
    text = 'policy = "p"\nmodel = "m"\nloss = "mse"\noptimizer = "adam"\nbacth = 3\nsteps = 4\n[data]\nkind = "npz"\npath = "d"\n'
    with raises_code("cli.run-keys-unknown") as caught:
        RunFile.parse(text)
    assert "bacth" in caught.value.problem and "'batch'" in caught.value.problem
