"""Figures with intervals and groups, evaluation.json, and the utility that a certificate states."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import release_forger
import torch
from open_charges import has_begun
from refusals import raises_code
from release_forger import seed_of
from short_runs import StopAfter, trainer

import lamina
from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.reader import LedgerReader
from lamina.ledger.run_records import FileDigest, RunEnd
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.writer import Ledger
from lamina.release.maker import make_release
from lamina.release.run_evidence import RunEvidence
from lamina.release.utility import utility_section
from lamina.release.verifier import verify_release
from lamina.sign.keys import PrivateKey

NAME = "example.org-resumed.ledger.db"
Figure = lamina.Figure

# ----------------------------------------------------------------------------------- intervals


def upper_tail(right: int, records: int, p: Fraction) -> Fraction:
    return sum(
        (math.comb(records, k) * p**k * (1 - p) ** (records - k) for k in range(right, records + 1)), Fraction(0)
    )


@pytest.mark.parametrize(("right", "records"), [(0, 7), (7, 7), (1, 12), (19, 40), (38, 40)])
def test_a_share_has_the_exact_interval(right: int, records: int) -> None:
    """By exact binomial tails: at each end of the interval, one of them is 2.5 %."""
    found = Figure.of([1] * right + [0] * (records - right))
    assert (float(found), found.records) == (right / records, records)
    assert found.low is not None and found.high is not None
    for end, tail in ((found.low, right), (1 - found.high, records - right)):
        if tail:
            assert abs(upper_tail(tail, records, Fraction(end)) - Fraction(1, 40)) < Fraction(1, 10**9)
        else:
            assert end == 0


def area_by_pairs(positive: list[float], negative: list[float]) -> tuple[float, float, float]:
    """Area and interval by the definitions, pair after pair."""
    wins = [[1.0 if p > n else 0.5 if p == n else 0.0 for n in negative] for p in positive]
    m, n = len(positive), len(negative)
    area = sum(map(sum, wins)) / (m * n)
    rows = [sum(row) / n for row in wins]
    columns = [sum(row[j] for row in wins) / m for j in range(n)]
    variance = sum((v - area) ** 2 for v in rows) / (m - 1) / m + sum((v - area) ** 2 for v in columns) / (n - 1) / n
    odds, spread = math.log(area / (1 - area)), 1.959963984540054 * math.sqrt(variance) / (area * (1 - area))
    return area, 1 / (1 + math.exp(spread - odds)), 1 / (1 + math.exp(-spread - odds))


def test_an_area_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        labels = np.array([1, 1, 0, 0, *rng.integers(0, 2, 30)])
        scores = np.round(rng.normal(size=34) + labels, 1)  # with ties
        found = Figure.of(torch.tensor(scores), torch.tensor(labels))
        expected = area_by_pairs(list(scores[labels == 1]), list(scores[labels == 0]))
        assert (found, found.low, found.high) == pytest.approx(expected) and found.records == 34


def test_the_interval_of_an_area_covers_it() -> None:
    """Of 1,500 samples of a known area, 95 % must cover it; the standard error of that share is 0.6 %."""
    rng, true, covered = np.random.default_rng(5), 0.5 * math.erfc(-1.2 / 2), 0
    for _ in range(1500):
        labels = np.arange(80) < 30
        found = Figure.of(rng.normal(size=80) + 1.2 * labels, labels)
        assert found.low is not None and found.high is not None
        covered += found.low <= true <= found.high
    assert 0.93 <= covered / 1500 <= 0.98, covered


def test_a_small_or_perfect_sample_is_not_certain() -> None:
    best = Figure.of([3, 4, 5, 0, 1], [1, 1, 1, 0, 0])
    assert (best, best.high) == (1, 1) and best.low == pytest.approx(0.025**0.5)
    worst = Figure.of([3, 4, 5, 0, 1], [0, 0, 0, 1, 1])
    assert (worst, worst.low) == (0, 0) and worst.high == pytest.approx(1 - 0.025**0.5)
    alike = Figure.of([1, 1, 1, 1], [1, 1, 0, 0])
    assert alike == 0.5 and alike.low is not None and alike.low < 0.25
    single = Figure.of([2, 1, 3], [1, 0, 0])
    assert single.low is not None and single.high is not None and single.high - single.low > 0.8


def test_groups_are_parts_of_the_records() -> None:
    right, sex, age = [1, 0, 1, 1], ["f", "f", "m", "m"], [70, 30, 30, 30]
    found = Figure.of(right, groups=sex)
    assert {name: (float(each), each.records) for name, each in found.groups.items()} == {"f": (0.5, 2), "m": (1.0, 2)}
    both = Figure.of(right, groups={"sex": sex, "age": torch.tensor(age)})
    assert list(both.groups) == ["sex: f", "sex: m", "age: 30", "age: 70"] and both.groups["age: 30"].records == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: Figure(0.5, low=0.6, high=0.7), lambda: Figure(0.5, low=0.4), lambda: Figure(0.5, records=0),
        lambda: Figure(0.5, low=-math.inf, high=1), lambda: Figure(0.5, groups={"f": Figure(0.5)}),
        lambda: Figure(0.5, groups={"f": 0.5}), lambda: Figure.of([]), lambda: Figure.of([0.5, 1]),
        lambda: Figure.of([1, 0], [1, 2]), lambda: Figure.of([1, 0], groups=["f"]), lambda: Figure.of([math.nan, 1], [0, 1]),
        lambda: Figure.of([[1, 0]]),
    ],
)  # fmt: skip
def test_what_is_no_figure_is_refused(make: Callable[[], Figure]) -> None:
    with raises_code("train.figure-invalid"):
        make()


# ----------------------------------------------------------------------------------- in a run


def figures(_: object) -> dict[str, float]:
    rng = np.random.default_rng(1)
    labels, sex = rng.integers(0, 2, 60), ["f"] * 25 + ["m"] * 27 + ["x"] * 8
    return {"auc": Figure.of(rng.normal(size=60) + labels, labels, sex), "loss": 0.25, "equivalent_records": 40.0}


EVALUATION = lamina.Evaluation(function=figures, on="simulated")


def fitted(folder: Path, **options: Any) -> lamina.Outcome:
    return trainer(folder, **{"evaluate": EVALUATION, **options}).fit()


def ends(folder: Path) -> list[RunEnd]:
    with LedgerReader.read_only(folder / "runs" / NAME) as ledger:
        return [leaf.record for leaf in ledger.of_kind(RunEnd) if isinstance(leaf.record, RunEnd)]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_last_evaluation_is_certified(tmp_path: Path) -> None:
    outcome, found = fitted(tmp_path), figures(None)
    path = outcome.folder / "evaluation.json"
    (end,) = ends(tmp_path)
    assert end.digests["evaluation.json"] == digest(path)
    rows = outcome.certificate.content["utility"]
    assert outcome.certificate.private and [(row["figure"], row["group"]) for row in rows] == [
        ("auc", None), ("auc", "f"), ("auc", "m"), ("auc", "x"), ("loss", None), ("equivalent_records", None)
    ]  # fmt: skip
    auc = found["auc"]
    assert isinstance(auc, Figure)
    assert rows[0] == {
        "figure": "auc", "group": None, "value": float(auc), "low": auc.low, "high": auc.high, "records": 60,
        "weights": "model.safetensors", "level": 0.95, "on": "simulated", "step": 6, "covered_by_epsilon": True,
        "digest": digest(path),
    }  # fmt: skip
    assert rows[1]["records"] == 25 and [rows[3][name] for name in ("value", "low", "high", "records")] == [None] * 4
    assert [rows[4][name] for name in ("value", "low", "high", "records")] == [0.25, None, None, None]
    assert json.loads(path.read_text())["run"] == outcome.run and '"x"' in path.read_text()


def test_metrics_keeps_its_meaning(tmp_path: Path) -> None:
    outcome = fitted(tmp_path)
    metrics, expected = json.loads((outcome.folder / "metrics.json").read_text()), figures(None)
    assert [each["step"] for each in metrics["evaluations"]] == list(range(7))
    assert all(each == {"step": each["step"], "figures": expected} for each in metrics["evaluations"])
    assert outcome.metrics == expected and all(type(value) is float for value in outcome.metrics.values())
    assert metrics["files"] == ends(tmp_path)[0].digests


def test_figures_of_a_moving_average_name_its_file(tmp_path: Path) -> None:
    outcome = fitted(tmp_path, ema=0.9, evaluate=lamina.Evaluation(function=weights_sum, on="public"))
    rows = outcome.certificate.content["utility"]
    assert [(row["figure"], row["weights"]) for row in rows] == [
        ("sum", "ema.safetensors"), ("sum", "model.safetensors")
    ]  # fmt: skip
    assert rows[0]["value"] == outcome.metrics["sum"] and rows[1]["value"] == outcome.metrics["sum_without_ema"]


def weights_sum(model: torch.nn.Module) -> dict[str, float]:
    return {"sum": float(sum(p.sum() for p in model.parameters()))}


def test_a_run_without_evaluation_states_no_utility(tmp_path: Path) -> None:
    outcome = fitted(tmp_path, evaluate=None)
    assert outcome.certificate.content["utility"] == [] and not (outcome.folder / "evaluation.json").exists()
    (outcome.folder / "evaluation.json").write_text("{}")  # not recorded: not read
    with LedgerReader.read_only(outcome.ledger) as ledger:
        assert lamina.certify(outcome.folder, ledger).content["utility"] == []


NOT_NAMES = [{"a\x1b[2J": 1.0}, {"": 1.0}, {"a": Figure(1, records=30, groups={"\n": Figure(1, records=30)})}]


@pytest.mark.parametrize("names", NOT_NAMES)
def test_a_name_that_no_certificate_may_contain_is_refused_first(tmp_path: Path, names: dict[str, float]) -> None:
    with raises_code("train.evaluation-name"):
        fitted(tmp_path, evaluate=lamina.Evaluation(function=lambda _: names, on="public"))
    assert not has_begun(tmp_path / "runs" / "first")


# ----------------------------------------------------------------------------------- killed and resumed


def test_after_a_kill_the_recorded_evaluation_is_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code("train.user-code-failed"):
        fitted(tmp_path, callbacks=[StopAfter(3)])
    append = Ledger.append

    def killed(self: Ledger, records: Any) -> Any:
        if any(isinstance(each, RunEnd) for each in records):
            raise KeyboardInterrupt
        return append(self, records)

    monkeypatch.setattr(Ledger, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path)
    path = tmp_path / "runs" / "first" / "evaluation.json"
    before = path.read_bytes()
    assert ends(tmp_path) == []
    monkeypatch.undo()
    outcome = fitted(tmp_path)
    (end,) = ends(tmp_path)
    assert path.read_bytes() == before and end.digests["evaluation.json"] == digest(path)
    assert outcome.certificate.private and outcome.certificate.content["utility"][0]["step"] == 6


def test_the_last_evaluation_may_be_of_an_earlier_step_and_session(tmp_path: Path) -> None:
    """The run is stopped at a step that is not evaluated, and goes on without the evaluation."""

    class Stop(lamina.Callback):
        def on_segment(self, now: lamina.RunFigures) -> None:
            self.stop = now.step == 5

    every = lamina.Evaluation(function=figures, on="public", every=4)
    with raises_code("train.user-code-failed"):
        fitted(tmp_path, evaluate=every, callbacks=[StopAfter(5)])
    outcome = fitted(tmp_path, evaluate=None, callbacks=[Stop()])
    rows = outcome.certificate.content["utility"]
    assert outcome.steps == 5 and {(row["step"], row["on"]) for row in rows} == {(4, "public")}


def test_another_evaluation_does_not_replace_the_recorded_one(tmp_path: Path) -> None:
    outcome = fitted(tmp_path)
    path = outcome.folder / "evaluation.json"
    before = path.read_bytes()
    again = fitted(tmp_path, evaluate=lamina.Evaluation(function=lambda _: {"auc": 1.0}, on="public"))
    assert path.read_bytes() == before and len(ends(tmp_path)) == 1
    assert again.certificate.private and again.certificate.content["utility"][0]["value"] != 1.0
    path.unlink()
    fitted(tmp_path)  # the same evaluation writes it again
    assert path.read_bytes() == before


def test_without_the_key_of_the_ledger_the_file_is_written_and_recorded_later(tmp_path: Path) -> None:
    with raises_code("train.user-code-failed"):
        fitted(tmp_path, callbacks=[StopAfter(3)])
    key, away = ledger_key_path(tmp_path / "runs" / NAME), tmp_path / "away"
    key.rename(away)
    path = fitted(tmp_path).folder / "evaluation.json"
    assert path.exists() and ends(tmp_path) == []
    away.rename(key)
    with Ledger.open(tmp_path / "runs" / NAME, PrivateKey.load(key, None)) as book:
        book.accept()
        book.checkpoint()
    fitted(tmp_path)
    assert ends(tmp_path)[0].digests["evaluation.json"] == digest(path)


# ----------------------------------------------------------------------------------- changed after the run


def better(data: bytes) -> bytes:
    plain = json.loads(data)
    plain["figures"][0].update(value=0.99, high=1.0)
    return release_forger.written(plain)


@pytest.mark.parametrize("change", [better, lambda data: data + b" ", None], ids=["better", "a space", "removed"])
def test_an_evaluation_that_was_changed_is_refused(tmp_path: Path, change: Callable[[bytes], bytes] | None) -> None:
    outcome = fitted(tmp_path)
    path = outcome.folder / "evaluation.json"
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with LedgerReader.read_only(outcome.ledger) as ledger, raises_code("release.evaluation-differs"):
        lamina.certify(outcome.folder, ledger)


def released(folder: Path, key: PrivateKey) -> tuple[Path, Path]:
    outcome, out = fitted(folder), folder / "release"
    book = Path(outcome.ledger)
    with Ledger.open(book, PrivateKey.load(ledger_key_path(book), None)) as ledger:
        make_release(out, [outcome.folder], ledger, key)
    return out, book


def codes(out: Path, book: Path, key: PrivateKey) -> set[str]:
    with LedgerReader.read_only(book) as ledger:
        return {each.code for each in verify_release(out, trust=Trust(plain=(key.public,)), ledger=ledger).problems}


def foreign(data: bytes) -> bytes:
    return data.replace(json.loads(data)["run"].encode(), b"00" * 16)


def revealing(data: bytes) -> bytes:
    found = json.loads(data)
    next(row for row in found["figures"] if row["group"] == "x").update(value=0.5, low=0.1, high=0.9, records=8)
    return json.dumps(found).encode()


@pytest.mark.parametrize("change", [foreign, revealing, lambda data: data.replace(b'"version": 1', b'"version": 2')])
def test_a_recorded_evaluation_of_another_run_or_of_small_groups_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    """The end of the run names the file: a trainer can write any digest there."""
    outcome = fitted(tmp_path)
    data = change((outcome.folder / "evaluation.json").read_bytes())
    with LedgerReader.read_only(tmp_path / "runs" / NAME) as ledger:
        evidence = replace(RunEvidence.read(ledger, bytes.fromhex(outcome.run)), evaluation=data)
    assert evidence.end is not None
    leaf, end = evidence.end
    other = FileDigest(name="evaluation.json", sha256=hashlib.sha256(data).digest())
    files = tuple(other if each.name == other.name else each for each in end.files)
    with raises_code("release.evaluation-malformed"):
        utility_section(replace(evidence, end=(leaf, replace(end, files=files))))


def test_a_release_contains_the_evaluation(tmp_path: Path, key: PrivateKey) -> None:
    out, book = released(tmp_path, key)
    assert (out / "evaluation.json").read_bytes() == (tmp_path / "runs" / "first" / "evaluation.json").read_bytes()
    assert codes(out, book, key) == set()


def test_a_release_whose_evaluation_is_gone_or_a_link_is_named(tmp_path: Path, key: PrivateKey) -> None:
    out, book = released(tmp_path, key)
    path = out / "evaluation.json"
    path.rename(tmp_path / "elsewhere")
    assert codes(out, book, key) == {"release.file-missing", "release.evaluation-differs"}
    path.symlink_to(tmp_path / "elsewhere")
    assert "release.link" in codes(out, book, key)


def forge(out: Path, book: Path, key: PrivateKey, folder: Path, **changes: Any) -> set[str]:
    key.save(folder / "release.pem", None)
    release_forger.forge(out, seed_of(folder / "release.pem"), **changes)
    release_forger.record_release(book, out, seed_of(ledger_key_path(book)))
    return codes(out, book, key)


def test_a_forged_utility_is_named(tmp_path: Path, key: PrivateKey) -> None:
    out, book = released(tmp_path, key)
    found = forge(out, book, key, tmp_path, certificate=lambda c: c["utility"][0].update(value=0.99, high=1.0))
    assert "release.utility-differs" in found


def test_a_group_that_was_left_out_is_named(tmp_path: Path, key: PrivateKey) -> None:
    out, book = released(tmp_path, key)
    assert "release.utility-differs" in forge(out, book, key, tmp_path, certificate=lambda c: c["utility"].pop(1))


def test_another_evaluation_in_the_release_is_named(tmp_path: Path, key: PrivateKey) -> None:
    """Figures and digest of the certificate agree with the file. The ledger knows another one."""
    out, book = released(tmp_path, key)
    path = out / "evaluation.json"
    path.write_bytes(better(path.read_bytes()))

    def lie(content: dict[str, Any]) -> None:
        content["utility"][0].update(value=0.99, high=1.0)
        content["trainer"]["files"]["evaluation.json"] = digest(path)
        for row in content["utility"]:
            row["digest"] = digest(path)

    assert "release.evaluation-differs" in forge(out, book, key, tmp_path, certificate=lie)


def test_a_release_that_conceals_the_evaluation_is_named(tmp_path: Path, key: PrivateKey) -> None:
    out, book = released(tmp_path, key)
    (out / "evaluation.json").unlink()
    before = release_forger.statement

    def without(folder: Path) -> dict[str, Any]:
        found = before(folder)
        found["subject"] = [each for each in found["subject"] if each["name"] != "evaluation.json"]
        return found

    release_forger.statement = without
    try:
        found = forge(out, book, key, tmp_path, certificate=lambda c: c.update(utility=[]))
    finally:
        release_forger.statement = before
    assert "release.evaluation-differs" in found


ROWS: list[Callable[[dict[str, Any]], object]] = [
    lambda row: row.update(value=10**400), lambda row: row.update(value="0.9"), lambda row: row.update(low=0.999),
    lambda row: row.update(low=None), lambda row: row.update(records=0), lambda row: row.update(records=1.5),
    lambda row: row.update(on="private"), lambda row: row.update(covered_by_epsilon=False), lambda row: row.pop("group"),
    lambda row: row.update(figure="\x1b[2J"), lambda row: row.update(group=7), lambda row: row.update(level=2),
    lambda row: row.update(digest="zz"), lambda row: row.update(digest=""), lambda row: row.update(step=-1),
    lambda row: row.update(value=True), lambda row: row.update(group="x", records=9),
    lambda row: row.update(group="x", records=None),
]  # fmt: skip


def test_a_certificate_with_an_impossible_figure_is_refused_without_the_ledger(tmp_path: Path, key: PrivateKey) -> None:
    out, _ = released(tmp_path, key)
    key.save(tmp_path / "release.pem", None)
    seed, content = seed_of(tmp_path / "release.pem"), json.loads((out / "certificate.json").read_text())
    for number, change in enumerate(ROWS):
        release_forger.forge(out, seed, certificate=lambda c, change=change: change(c["utility"][0]))
        found = verify_release(out, trust=Trust(plain=(key.public,)))
        assert "release.certificate-wrong" in {each.code for each in found.problems}, number
        release_forger.forge(out, seed, certificate=lambda c: c.update(json.loads(json.dumps(content))))
    assert verify_release(out, trust=Trust(plain=(key.public,))).verified
