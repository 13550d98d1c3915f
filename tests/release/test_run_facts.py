"""Facts of a run come from the ledger: edits of its folder, and forged records of its start and end, are named."""

from __future__ import annotations

import hashlib
import json
import platform
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import release_forger
import torch
from forger import Forger
from hand_ledger import encoded
from pdf_text import read_pdf
from refusals import raises_code
from release_forger import RUN_BEGIN, RUN_END, seed_of
from safetensors.torch import load_file
from short_runs import StopAfter, half_of_a_run, trainer
from torch import nn
from trained_run import Trained

import lamina
from lamina.engine import native
from lamina.errors import LedgerError, NotVerified
from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.ledger.run_history import RecordedRuns
from lamina.ledger.run_records import NoiseOrigin, RunBegin, RunEnd, WeightsOrigin
from lamina.ledger.show import describe_leaf, leaf_to_dict
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import Ledger
from lamina.release.certificate import Certificate, certify
from lamina.release.maker import make_release
from lamina.release.risk_statements import texts
from lamina.release.run_evidence import RunEvidence
from lamina.release.verifier import verify_release
from lamina.run import segments
from lamina.sign.keys import PrivateKey

NAME = "example.org-resumed.ledger.db"


def certificate(trained: Trained) -> Certificate:
    with LedgerReader.read_only(trained.ledger) as ledger:
        return certify(trained.folder, ledger)


def failing(found: Certificate) -> set[str]:
    return {each["name"] for each in found.content["conditions"] if not each["holds"]}


def edit(trained: Trained, change: Callable[[dict[str, Any]], object]) -> None:
    path = trained.folder / "metrics.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def ledger_seed(trained: Trained) -> bytes:
    return seed_of(ledger_key_path(trained.ledger))


def records(trained: Trained, kind: type[Any]) -> list[Any]:
    with LedgerReader.read_only(trained.ledger) as ledger:
        return [leaf.record for leaf in ledger.of_kind(kind)]


def test_the_ledger_has_start_and_end(trained: Trained) -> None:
    (begin,), (end,) = records(trained, RunBegin), records(trained, RunEnd)
    assert begin.run == end.run and begin.weights.hex() != end.weights
    assert (end.steps, end.noise, end.caps, list(end.digests)) == (20, NoiseOrigin.SYSTEM, (), ["model.safetensors"])
    stated = certificate(trained).content["trainer"]
    assert stated["starting_weights"]["sha256"] == begin.weights.hex() and stated["files"] == end.digests
    with LedgerReader.read_only(trained.ledger) as ledger:
        assert ledger.leaf(stated["leaf"]).record == end


def continued(folder: Path, first: lamina.Outcome, file: str = "model.safetensors", **options: Any) -> lamina.Trainer:
    """A second run that starts from a file of the first one."""
    again = trainer(folder, run="second", **options)
    again.model.load_state_dict(load_file(first.folder / file))
    return again


def test_the_digest_of_the_start_is_that_of_the_file(tmp_path: Path) -> None:
    """A run that starts from the final weights of another one has their digest, and that run as its parent."""
    first = trainer(tmp_path).fit()
    second = continued(tmp_path, first).fit()
    mine = Trained(first.folder, first, NAME)
    (_, begin), (end, _) = records(mine, RunBegin), records(mine, RunEnd)
    assert begin.weights.hex() == end.weights
    assert (begin.origin, begin.parent) == (WeightsOrigin.RUN, bytes.fromhex(first.run))
    stated = second.certificate.content["trainer"]["starting_weights"]
    assert (stated["origin"], stated["parent"]) == ("run", first.run) and verify(mine.ledger).verified
    (said,) = (each for each in second.certificate.content["statements"] if "continued the weights" in each["text"])
    assert first.run[:8] in said["text"] and said["source"] == "recomputed from the ledger"


def test_a_release_names_the_runs_that_its_weights_continue(tmp_path: Path) -> None:
    """A release without the first run would state the ε of the second one for a model that learned in both."""
    first = trainer(tmp_path).fit()
    second, key = continued(tmp_path, first).fit(), PrivateKey.generate()
    with Trained(first.folder, first, NAME).open() as ledger:
        with raises_code(NotVerified, "release.parent-missing"):
            make_release(tmp_path / "out", [second.folder], ledger, key, name="second")
        make_release(tmp_path / "both", [first.folder, second.folder], ledger, key, name="both", pdf=True)
        found = verify_release(tmp_path / "both", trust=Trust(plain=(key.public,)), ledger=ledger)
    assert found.verified, found.problems
    card = (tmp_path / "both" / "README.md").read_text()
    assert "| ε of this model |" in card and "ε of this run |" not in card
    pages = {path.name for path in (tmp_path / "both").glob("*.pdf")}
    assert pages == {"certificate.pdf", "certificate-2.pdf", "decision.pdf"}
    weights = hashlib.sha256((tmp_path / "both" / "model.safetensors").read_bytes()).hexdigest()
    assert f"{weights[:32]}…" in read_pdf((tmp_path / "both" / "decision.pdf").read_bytes()).text.replace(" ", "")


def test_a_continued_run_states_no_risk_of_itself_alone(tmp_path: Path) -> None:
    """Its model learned in the other run too."""
    first = trainer(tmp_path).fit()
    before = texts(first.certificate.content, "membership", "content")
    after = texts(continued(tmp_path, first).fit().certificate.content, "membership", "content")
    assert len(before) == len(after) > 0
    assert all("counting all runs" in each for each in after) and not any("counting" in each for each in before)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "cap": (lambda m: m["classes"]["clinical"].update(max_occurrences=1), "max_occurrences"),
    "adjacency": (lambda m: m["conditions"].update(adjacency="zero-out, no amplification"), "conditions.adjacency"),
    "steps": (lambda m: m.update(steps=1), "steps"),
    "infinite steps": (lambda m: m.update(steps=1e300), "steps"),
    "hardened": (lambda m: m["conditions"].update(hardened=not m["conditions"]["hardened"]), "conditions.hardened"),
    "a number for a condition": (lambda m: m["conditions"].update(probed=1), "conditions.probed"),
    "plan": (lambda m: m.update(plan="00" * 32), "plan"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_metrics_file_changes_no_figure_and_is_named(trained: Trained, key: PrivateKey, name: str) -> None:
    before, (change, field) = certificate(trained).content, EDITS[name]
    edit(trained, change)
    found = certificate(trained)
    assert failing(found) == {"metrics"} and field in found.reasons[0]
    for part in ("run", "model", "trainer", "classes", "layers", "plan"):
        assert found.content[part] == before[part]
    assert texts(found.content, "not covered", "assumption") == texts(before, "not covered", "assumption")
    with raises_code("release.not-private"):
        found.signed(key)


def test_other_weights_with_their_digest_are_not_certified(trained: Trained) -> None:
    path, before = trained.folder / "model.safetensors", certificate(trained).content["model"]
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(trained, lambda m: m["files"].update({path.name: digest}))
    found = certificate(trained)
    assert failing(found) == {"weights", "metrics"} and found.content["model"] == before
    path.unlink()
    assert "weights" in failing(certificate(trained))


def test_the_name_of_a_cheaper_run_is_not_believed(tmp_path: Path) -> None:
    dear, cheap = trainer(tmp_path).fit(), trainer(tmp_path, run="second", epsilon=1.0).fit()
    mine = Trained(dear.folder, dear, NAME)
    edit(mine, lambda m: m.update(run=cheap.run))
    assert "weights" in failing(certificate(mine))


def test_a_seeded_run_does_not_become_private_by_an_edit(tmp_path: Path) -> None:
    outcome = trainer(tmp_path, seed=7).fit()
    mine = Trained(outcome.folder, outcome, NAME)
    edit(mine, lambda m: m["conditions"].update(noise="secure"))
    edit(mine, lambda m: m.update(notes=[]))
    assert failing(certificate(mine)) == {"noise", "metrics"}
    (end,) = records(mine, RunEnd)
    assert end.noise is NoiseOrigin.SEEDED


FACTS = {6: (2, "noise"), 7: (2, "sampling"), 9: (False, "probed"), 10: (False, "covered"), 11: (True, "raw_figures")}


@pytest.mark.parametrize("field", FACTS)
def test_a_run_that_states_a_broken_condition_gets_no_signature(trained: Trained, key: PrivateKey, field: int) -> None:
    value, name = FACTS[field]
    body, seed = release_forger.last(trained.ledger, RUN_END), ledger_seed(trained)
    release_forger.cut(trained.ledger, RUN_END, seed)
    release_forger.append(trained.ledger, RUN_END, {**body, field: value}, seed)
    (trained.folder / "metrics.json").write_text(json.dumps({"run": body[1].hex(), "classes": {}, "steps": 20,
                                                             "plan": body[5].hex()}))  # fmt: skip
    found = certificate(trained)
    assert verify(trained.ledger).verified and failing(found) == {name}
    source = next(each["source"] for each in found.content["conditions"] if each["name"] == name)
    assert source == "stated by the trainer"
    with raises_code("release.not-private"):
        found.signed(key)


def test_a_run_from_before_these_records_is_recorded_when_it_is_opened_again(tmp_path: Path) -> None:
    outcome = trainer(tmp_path).fit()
    mine = Trained(outcome.folder, outcome, NAME)
    release_forger.cut(mine.ledger, RUN_END, ledger_seed(mine))
    with raises_code("release.run-not-ended"):
        certificate(mine)
    with mine.open() as book:
        book.accept()  # the forger cannot sign the head over open charges for a smaller tree
    again = trainer(tmp_path).fit()
    assert again.certificate.private and len(records(mine, RunEnd)) == 1 and verify(mine.ledger).verified


def test_a_finished_run_that_is_opened_again_writes_nothing_twice(tmp_path: Path) -> None:
    outcome = trainer(tmp_path).fit()
    mine, sizes = Trained(outcome.folder, outcome, NAME), []
    for options in ({}, {}, {"hardened": False}):  # options without effect change no fact
        assert trainer(tmp_path, **options).fit().certificate.private
        with LedgerReader.read_only(mine.ledger) as ledger:
            sizes.append(ledger.size)
    assert len(set(sizes)) == 1 and len(records(mine, RunBegin)) == len(records(mine, RunEnd)) == 1


def test_older_weights_do_not_become_the_end_of_a_run(tmp_path: Path) -> None:
    """The newest checkpoint is gone: what is left is not the state that the ledger records as the end."""
    outcome = trainer(tmp_path).fit()
    weights = (outcome.folder / "model.safetensors").read_bytes()
    newest = sorted((outcome.folder / "checkpoint").iterdir())[-1]
    newest.unlink()
    with raises_code("train.last-checkpoint-missing"):
        trainer(tmp_path).fit()
    assert (outcome.folder / "model.safetensors").read_bytes() == weights


ENDS: dict[str, tuple[Callable[[dict[int, Any]], object], str]] = {
    "more steps": (lambda e: e.update({4: 60}), "ledger.run-end-differs"),
    "another plan": (lambda e: e.update({5: bytes(32)}), "ledger.run-end-differs"),
    "a segment that nobody recorded": (lambda e: e.update({2: 77}), "ledger.run-end-unknown-segment"),
    "an earlier segment": (lambda e: e.update({2: 3, 4: 8}), "ledger.run-end-continued"),
    "another run": (lambda e: e.update({1: bytes(16)}), "ledger.run-end-unknown-segment"),
    "other weights": (lambda e: e.update({14: [{1: "model.safetensors", 2: bytes(32)}]}), "ledger.run-ended-twice"),
    "no weights": (lambda e: e.update({14: [{1: "ema.safetensors", 2: bytes(32)}]}), "verify.leaf-unreadable"),
    "free text": (lambda e: e.update({14: [{1: "Anna Müller", 2: bytes(32)}]}), "verify.leaf-unreadable"),
    "an unknown field": (lambda e: e.update({15: "seed 7"}), "verify.leaf-unreadable"),
    "an unknown source of noise": (lambda e: e.update({6: 9}), "verify.leaf-unreadable"),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_that_contradicts_the_epochs_is_named_and_not_written(trained: Trained, name: str) -> None:
    change, code = ENDS[name]
    body, (end,) = release_forger.last(trained.ledger, RUN_END), records(trained, RunEnd)
    change(body)
    if not code.startswith("verify."):
        made = RunEnd(
            **{each: getattr(end, each) for each in end.__slots__}
            | {"run": body[1], "segment": body[2], "steps": body[4], "plan": body[5]}
            | {"files": tuple(type(end.files[0])(name=one[1], sha256=one[2]) for one in body[14])}
        )
        with trained.open() as ledger, raises_code(code):
            ledger.append([made])
    release_forger.append(trained.ledger, RUN_END, body, ledger_seed(trained))
    found = verify(trained.ledger).problem
    assert found is not None and found.code == code


def test_a_start_comes_first_and_once(trained: Trained) -> None:
    body = release_forger.last(trained.ledger, RUN_BEGIN)
    for change, code in (
        ({2: bytes(32)}, "ledger.run-begun-twice"),
        ({1: bytes(16), 3: 3, 4: bytes(15) + b"\x01"}, None),
    ):
        with trained.open() as ledger:
            made = {**body, **change}
            origin = None if 3 not in made else WeightsOrigin(made[3])
            record = RunBegin(run=made[1], weights=made[2], origin=origin, parent=made.get(4))
            with pytest.raises(LedgerError) as refused:
                ledger.append([record])
            assert refused.value.code == (code or "ledger.run-parent-differs")
    release_forger.append(trained.ledger, RUN_BEGIN, {**body, 2: bytes(32)}, ledger_seed(trained))
    found = verify(trained.ledger).problem
    assert found is not None and found.code == "ledger.run-begun-twice"


def test_a_start_after_the_first_epoch_is_too_late(trained: Trained) -> None:
    """Rows are moved by hand: the start behind the first epoch."""
    hand = release_forger.HandLedger(str(trained.ledger))
    begin, epoch = hand.kept(1), hand.kept(2)
    assert (begin[1], epoch[1]) == (RUN_BEGIN, 3)
    (segment, *more), start = hand.body(2)[2], hand.rows[1][1]
    charged = encoded({**hand.body(2), 2: [{**segment, 6: 1}, *more]})  # it read its members before leaf 1
    hand.rows[1] = (encoded({**epoch, 2: 1, 5: hashlib.sha256(charged).digest()}), charged)
    hand.rows[2] = (encoded({**begin, 2: 2, 4: 1}), start)
    hand.write(ledger_seed(trained))
    with sqlite3.connect(trained.ledger) as db:
        db.execute("UPDATE attempt SET seq = 1 WHERE seq = 2")
        db.execute("DELETE FROM checkpoint WHERE size < (SELECT size FROM head)")
    found = verify(trained.ledger).problem
    assert found is not None and found.code in ("ledger.run-begin-late", "verify.previous-checkpoint-unknown")
    history = RecordedRuns()
    history.see(records(trained, Epoch)[0])
    with raises_code("ledger.run-begin-late"):
        history.check(records(trained, RunBegin)[0])


def test_a_resumed_run_has_one_start(tmp_path: Path) -> None:
    half_of_a_run(tmp_path)
    outcome = trainer(tmp_path).fit()
    mine = Trained(outcome.folder, outcome, NAME)
    assert len(records(mine, RunBegin)) == len(records(mine, RunEnd)) == 1 and outcome.certificate.private


def test_the_time_of_an_end_tells_no_more_than_that_of_an_epoch(trained: Trained) -> None:
    """Rounded like the time of an epoch, or equal to that of the leaf before: how long steps took stays unknown."""
    body, seed = release_forger.last(trained.ledger, RUN_END), ledger_seed(trained)
    release_forger.cut(trained.ledger, RUN_END, seed)
    hand = release_forger.HandLedger(str(trained.ledger))
    late = hand.kept(len(hand.rows) - 1)[3] + 61
    hand.append(RUN_END, body, time=late - late % 3600 + 3601)
    hand.write(seed)
    found = verify(trained.ledger, now=late + 7200).problem
    assert found is not None and found.code == "verify.epoch-time-not-rounded"


def test_one_layer_model_is_certified(tmp_path: Path) -> None:
    """With a cap, which is in the record and on the certificate."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(60, 4)
    engine, corpus, plan = lamina.make_private(
        model, (x, (x.sum(1) > 0).long()), epsilon=2.0, batch=16, steps=4, population=60
    )
    outcome = lamina.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(reduction="none"), corpus, plan,
        folder=tmp_path / "runs" / "a", progress=False, engine=engine, max_occurrences={plan.classes[0].name: 3},
    ).fit()  # fmt: skip
    (figures,) = outcome.certificate.classes.values()
    assert outcome.certificate.private and figures["max_occurrences"] == 3


# ------------------------------------------------------------------- declared origin of the starting weights


@pytest.mark.parametrize(("declared", "origin"), [(None, "not declared"), ("untrained", "none"), ("public", "public")])
def test_the_certificate_names_the_declared_origin(tmp_path: Path, declared: str | None, origin: str) -> None:
    outcome = trainer(tmp_path, starting_weights=declared).fit()
    stated = outcome.certificate.content["trainer"]["starting_weights"]
    assert (stated["origin"], stated["parent"]) == (origin, None)


def test_a_run_is_named_by_folder_or_id_and_recognised_by_its_average(tmp_path: Path) -> None:
    first = trainer(tmp_path, ema=0.9).fit()
    by_folder = continued(tmp_path, first, starting_weights=first.folder).fit()
    assert by_folder.certificate.content["trainer"]["starting_weights"]["parent"] == first.run
    by_id = trainer(tmp_path, run="third", epsilon=0.5, starting_weights=first.run)
    by_id.model.load_state_dict(load_file(first.folder / "ema.safetensors"))
    assert by_id.fit().certificate.content["trainer"]["starting_weights"]["parent"] == first.run
    assert verify(first.ledger).verified


@pytest.mark.parametrize("declared", ["untrained", "public", "00" * 16])
def test_a_declaration_that_the_ledger_contradicts_is_refused(tmp_path: Path, declared: str) -> None:
    first = trainer(tmp_path).fit()
    mine = Trained(first.folder, first, NAME)
    with LedgerReader.read_only(mine.ledger) as ledger:
        size = ledger.size
    with raises_code("train.starting-weights-differ"):
        continued(tmp_path, first, starting_weights=declared).fit()
    with LedgerReader.read_only(mine.ledger) as ledger:
        assert ledger.size == size and not verify(mine.ledger).held
    assert continued(tmp_path, first).fit().certificate.private  # the same folder, without the declaration


@pytest.mark.parametrize("parent", ["another run", "a run that wrote other weights"])
def test_a_parent_that_did_not_write_the_weights_is_refused(tmp_path: Path, parent: str) -> None:
    first = trainer(tmp_path).fit()
    with raises_code("train.starting-weights-differ"):
        trainer(tmp_path, run="second", starting_weights=first.run if "other" in parent else "ab" * 16).fit()


@pytest.mark.parametrize("declared", ["untraned", "runs/nowhere", "ab", ""])
def test_a_declaration_that_says_nothing_is_refused(tmp_path: Path, declared: str) -> None:
    with raises_code("train.starting-weights-unknown"):
        trainer(tmp_path, starting_weights=declared)


def test_make_private_passes_the_declaration_on(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2), torch.randn(60, 4)
    arguments = (model, (x, (x.sum(1) > 0).long()))
    with raises_code("train.starting-weights-unknown"):
        lamina.make_private(*arguments, epsilon=2.0, batch=16, steps=4, starting_weights="imagenet")
    engine, corpus, plan = lamina.make_private(
        *arguments, epsilon=2.0, batch=16, steps=4, population=60, starting_weights="public"
    )
    outcome = lamina.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(reduction="none"), corpus, plan,
        folder=tmp_path / "runs" / "a", progress=False, engine=engine,
    ).fit()  # fmt: skip
    assert outcome.certificate.content["trainer"]["starting_weights"]["origin"] == "public"


def test_a_resumed_run_keeps_its_declaration(tmp_path: Path) -> None:
    half_of_a_run(tmp_path, starting_weights="public")
    with raises_code("train.starting-weights-differ"):
        trainer(tmp_path, starting_weights="untrained").fit()
    outcome = trainer(tmp_path).fit()
    (begin,) = records(Trained(outcome.folder, outcome, NAME), RunBegin)
    assert begin.origin is WeightsOrigin.PUBLIC and outcome.certificate.private
    with raises_code("train.starting-weights-differ"):
        trainer(tmp_path, starting_weights="untrained").fit()


def test_a_run_that_was_killed_before_its_start_was_recorded_keeps_its_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lamina.run.run.Run.begin", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, starting_weights="public").fit()
    monkeypatch.undo()
    outcome = trainer(tmp_path).fit()
    assert outcome.certificate.content["trainer"]["starting_weights"]["origin"] == "public"


FORGED_STARTS: dict[str, tuple[dict[int, Any], str]] = {
    "untrained": ({3: 1}, "ledger.run-parent-missing"),
    "public": ({3: 2}, "ledger.run-parent-missing"),
    "not declared": ({}, "ledger.run-parent-missing"),
    "a parent that is not in the ledger": ({3: 3, 4: bytes(15) + b"\x07"}, "ledger.run-parent-differs"),
}


@pytest.mark.parametrize("name", FORGED_STARTS)
def test_a_forged_start_from_the_weights_of_a_run_is_named(trained: Trained, name: str) -> None:
    """The ledger's key signs a start that conceals which run wrote its weights."""
    fields, code = FORGED_STARTS[name]
    (end,) = records(trained, RunEnd)
    body = {1: bytes(15) + b"\x01", 2: bytes.fromhex(end.weights), **fields}
    release_forger.append(trained.ledger, RUN_BEGIN, body, ledger_seed(trained))
    found = verify(trained.ledger).problem
    assert found is not None and (found.code, found.kind) == (code, "run-begin")


# ------------------------------------------------------------------- the program


def source_list_digest() -> str:
    """As docs/release.md says: with find, sort and sha256sum."""
    command = "find . -name '*.py' -o -name '*.[ch]' | sed 's|^./||' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    root = Path(lamina.__file__).parent
    return subprocess.run(command, shell=True, cwd=root, check=True, capture_output=True, text=True).stdout[:64]


def test_the_end_names_the_program(trained: Trained) -> None:
    (end,), stated = records(trained, RunEnd), certificate(trained).content["program"]
    library = sorted(Path(lamina.__file__).parent.glob("engine/native/_native*.so"))
    kernels = hashlib.sha256(library[0].read_bytes()).hexdigest() if native.library() is not None else "none"
    with LedgerReader.read_only(trained.ledger) as ledger:
        leaf = ledger.leaf(stated["leaf"])
    assert leaf.record == end and stated == {
        "leaf": stated["leaf"], "lamina": lamina.__version__, "sources": source_list_digest(),
        "torch": torch.__version__, "python": platform.python_version(), "kernels": kernels, "earlier": [],
    }  # fmt: skip
    assert leaf_to_dict(leaf)["programs"][0]["sources"] == stated["sources"]
    assert f"by lamina {lamina.__version__}, torch {torch.__version__}" in describe_leaf(leaf)


def test_every_program_whose_steps_are_in_the_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_of_a_run(tmp_path)
    with native.switched(False):
        trainer(tmp_path).fit()
    monkeypatch.setattr(lamina, "__version__", "0.2.0")  # only opens the finished run
    outcome = trainer(tmp_path).fit()
    stated = outcome.certificate.content["program"]
    assert stated["kernels"] == "none" and stated["lamina"] == "0.1.0"
    assert [each["kernels"] != "none" for each in stated["earlier"]] == [True] * (native.library() is not None)


def test_other_sources_are_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that one version of the sources began are not replayed by another."""
    before = segments.code_version()
    monkeypatch.setattr(segments, "source_digest", lambda: bytes(32))
    assert segments.code_version() != before


def test_an_end_without_a_program_states_none(trained: Trained) -> None:
    body, seed = release_forger.last(trained.ledger, RUN_END), ledger_seed(trained)
    release_forger.cut(trained.ledger, RUN_END, seed)
    body.pop(15)
    release_forger.append(trained.ledger, RUN_END, body, seed)
    found = certificate(trained)
    assert found.private and found.content["program"]["sources"] == "not stated" and verify(trained.ledger).verified


PROGRAMS: list[Any] = [
    [], [{}], [{1: "0.1.0", 2: bytes(31), 3: "2", 4: "3"}], [{1: "0.1.0; Anna Müller", 2: bytes(32), 3: "2", 4: "3"}],
    [{1: "0.1.0", 2: bytes(32), 3: "2", 4: "3", 6: "seed 7"}],
]  # fmt: skip


@pytest.mark.parametrize("programs", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_malformed_program_is_not_read(trained: Trained, programs: Any) -> None:
    body, seed = release_forger.last(trained.ledger, RUN_END), ledger_seed(trained)
    release_forger.cut(trained.ledger, RUN_END, seed)
    release_forger.append(trained.ledger, RUN_END, {**body, 15: programs}, seed)
    found = verify(trained.ledger).problem
    assert found is not None and found.code == "verify.leaf-unreadable"


# ------------------------------------------------------------------- tuning


def test_runs_of_the_ledger_are_counted_up_to_the_checkpoint(tmp_path: Path) -> None:
    first = trainer(tmp_path).fit()
    with LedgerReader.read_only(first.ledger) as ledger:
        at = ledger.latest()
    tuning = first.certificate.content["tuning"]
    assert (tuning["runs_in_ledger"], tuning["runs_before_this"], tuning["leaves"]) == (1, 0, [1])
    with raises_code("train.user-code-failed"):  # abandoned after three segments: it counts
        trainer(tmp_path, run="second", callbacks=[StopAfter(3)]).fit()
    third = trainer(tmp_path, run="third").fit()
    with LedgerReader.read_only(first.ledger) as ledger:
        begins = [leaf.seq for leaf in ledger.of_kind(RunBegin)]
        now = [certify(each.folder, ledger).content["tuning"] for each in (first, third)]
        before = certify(first.folder, ledger, checkpoint=at).content["tuning"]
        evidence = RunEvidence.read(ledger, bytes.fromhex(third.run))
    assert [(each["runs_in_ledger"], each["runs_before_this"], each["leaves"]) for each in now] == [
        (3, 0, begins), (3, 2, begins)
    ]  # fmt: skip
    assert (before["runs_in_ledger"], before["leaves"]) == (1, [1]) and evidence.tuning() == now[1]


def test_the_schedule_is_signed_before_the_first_step_and_survives_a_resume(tmp_path: Path) -> None:
    """It is in one start record before the first epoch, in metrics.json and in the certificate, all in the same words."""
    half_of_a_run(tmp_path, optimizer="auto")
    outcome = trainer(tmp_path, optimizer="auto").fit()
    with LedgerReader.read_only(outcome.ledger) as ledger:
        ((at, stated),) = [(leaf.seq, leaf.record.optimizer) for leaf in ledger.of_kind(RunBegin)]
        assert at < next(iter(ledger.of_kind(Epoch))).seq
    figures = json.loads((outcome.folder / "metrics.json").read_text())["optimizer"]
    assert stated == f"Adam, rate {figures['lr'][0]}, HoldThenFall(steps=6, falling=0.3)"
    assert outcome.certificate.content["tuning"]["optimizer"] == stated
    again = trainer(tmp_path, run="second").fit().certificate.content["tuning"]
    assert again["optimizer"] == "SGD, rate 0.1"


# ------------------------------------------------------------------- records written past the ledger, without its key


def forged_end(ledger: Path, weights: bytes) -> dict[int, Any]:
    """The end of the run after its last epoch, with these weights and every condition as a certificate wants it."""
    epoch = release_forger.last(ledger, 3)
    segment = epoch[2][-1]
    files = [{1: "model.safetensors", 2: hashlib.sha256(weights).digest()}]
    facts = {6: 1, 7: 1, 8: False, 9: True, 10: True, 11: False, 12: True, 13: [], 14: files}
    return {1: epoch[1], 2: segment[1], 3: segment[2], 4: segment[5], 5: epoch[3], **facts}


def test_an_end_that_was_written_without_the_key_is_never_signed_over(tmp_path: Path) -> None:
    """Between a kill and the end of a seeded run, a hand in the store writes the end, with weights of its own."""
    half_of_a_run(tmp_path, seed=7)
    ledger = tmp_path / "runs" / NAME
    key = PrivateKey.load(ledger_key_path(ledger), None)
    seq = Forger(str(ledger)).append(RUN_END, forged_end(ledger, b"other weights"))
    with Ledger.open(ledger, key) as book:
        for sign in (book.checkpoint, book.heartbeat):
            with pytest.raises(LedgerError) as refused:
                sign()
            assert refused.value.code == "ledger.leaf-not-allowed" and f"leaf {seq} " in refused.value.problem
    with raises_code("ledger.leaf-not-allowed"):
        trainer(tmp_path, seed=7).fit()


def test_a_start_that_was_written_without_the_key_is_never_signed_over(trained: Trained) -> None:
    Forger(str(trained.ledger)).append(RUN_BEGIN, {1: bytes(16), 2: bytes(32)})
    with trained.open() as book, raises_code("ledger.leaf-not-allowed"):
        book.checkpoint()


def test_a_run_without_the_key_records_no_end_until_the_key_is_there(tmp_path: Path) -> None:
    half_of_a_run(tmp_path)
    path = tmp_path / "runs" / NAME
    key, away = ledger_key_path(path), tmp_path / "away.key"
    key.rename(away)
    outcome = trainer(tmp_path).fit()
    mine = Trained(outcome.folder, outcome, NAME)
    assert len(records(mine, RunBegin)) == 1 and records(mine, RunEnd) == []
    away.rename(key)
    with mine.open() as book:
        book.accept()
        book.checkpoint()
    assert trainer(tmp_path).fit().certificate.private and verify(path).verified


def test_a_start_after_leaves_without_the_key_can_be_signed(ward: Trained) -> None:
    """Withdrawals come from processes without the key, at any moment: the writer of the start looks at them."""
    with Ledger.open(ward.ledger) as keyless:
        withdraw(keyless, str(ward.someone("sensitive")), WithdrawalReason.REQUEST)
    with ward.open() as book:
        book.append([RunBegin(run=bytes(16), weights=bytes(32))])
    with ward.open() as book:  # the first writer was killed before it signed
        book.checkpoint()
    assert verify(ward.ledger).verified
