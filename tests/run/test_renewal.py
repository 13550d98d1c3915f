"""Runs on admitted contributions: whoever is out is out at the next segment, killed and resumed or not."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hospital import NOW, Hospital, net, usual
from refusals import raises_code
from run_state import RunAttempt, attempts
from stopping import During, Killed, die, same, weights

import lamina
from lamina import cbor
from lamina.admit.signing import SECONDS_PER_YEAR
from lamina.engine.engine import Engine
from lamina.errors import BudgetExceeded
from lamina.run.admitted import AdmittedCorpus
from lamina.run.membership import AdmissionRenewal
from lamina.run.payloads import PayloadChanged
from lamina.run.publisher import Outcome
from lamina.run.sampler import Sampler


@pytest.fixture
def hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_seeds: None) -> Hospital:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    return usual(tmp_path)


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Before the gradient of this step, once."""
    real, count = Engine.backward, iter(range(1_000_000))

    def backward(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if next(count) == step:
            raise Killed
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "backward", backward)


def killed(hospital: Hospital, name: str, step: int, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            hospital.trainer(name, **options).fit()


def attempts_of(hospital: Hospital, name: str) -> list[RunAttempt]:
    return attempts(hospital.root / "runs" / name)


def ids_in(hospital: Hospital, name: str, file: str) -> list[str]:
    folder = hospital.root / "runs" / name
    marks: list[str] = cbor.decode((folder / file).read_bytes(), max_size=1 << 20)
    admitted: dict[str, str] = cbor.decode((folder / "admitted").read_bytes(), max_size=1 << 20)
    return [admitted[mark] for mark in marks]


def told(notes: tuple[str, ...], words: str) -> str:
    (found,) = [note for note in notes if words in note]
    return found


def nobody_is_named(hospital: Hospital, name: str, *texts: str) -> None:
    public = (hospital.root / "runs" / name / "metrics.json").read_text()
    people = [path.name for path in hospital.people.iterdir() if path.is_dir()]
    words = {word for text in (public, *texts) for word in re.split(r"[^A-Za-z0-9]+", text)}
    assert not words & set(people)


# ------------------------------------------------------------------------------------------------ in one go


def test_who_expires_or_loses_their_key_is_out_at_the_next_segment(hospital: Hospital) -> None:
    other = lamina.PrivateKey.generate()
    hospital.trust(other)
    hospital.sign({f"c{i:02d}": "clinical" for i in range(10)}, expires=NOW + 100)
    hospital.sign({f"s{i:02d}": "sensitive" for i in range(4)}, key=other)

    def later() -> None:
        hospital.clock.now = NOW + 100

    def stolen() -> None:
        with lamina.KeyRing.editing(hospital.keys) as ring:
            ring.revoke(other.public.id, at=NOW + 100)

    corpus = hospital.admit()
    used: list[tuple[int, set[str]]] = []
    real = Sampler._examples

    def watched(self: Sampler, step: int, units: Any, purpose: Any) -> Any:
        used.append((step, {corpus.ids[row] for row in units.tolist()}))
        return real(self, step, units, purpose)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "_examples", watched)
        trainer = hospital.trainer(corpus=corpus, progress=During(segments={3: later, 9: stolen}))
        outcome = trainer.fit()
    before = set().union(*(ids for step, ids in used if step < 3))
    between = set().union(*(ids for step, ids in used if 3 <= step < 9))
    after = set().union(*(ids for step, ids in used if step >= 9))
    gone, revoked = {f"c{i:02d}" for i in range(10)}, {f"s{i:02d}" for i in range(4)}
    assert before & gone and not between & gone
    assert between & revoked and not after & (gone | revoked)
    assert [(each.first, each.generation) for each in attempts_of(hospital, "a")] == [(0, 0), (3, 0), (6, 0), (9, 0)]
    assert "10 (expired 10)" in told(outcome.notes, "expired")
    assert "4 (revoked-key 4)" in told(outcome.notes, "revoked-key")
    assert len(corpus) == 43
    for name, spent in outcome.epsilon.items():  # nothing was done twice
        assert spent == pytest.approx(trainer.plan.epsilon(name), rel=1e-12)
    nobody_is_named(hospital, "a", *outcome.notes)
    assert set(ids_in(hospital, "a", "withdrawn")) == gone | revoked
    assert (hospital.root / "runs" / "a" / "admitted").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", ["admit.clock-went-back", "key.ring-invalid", "key.ring-not-json"])
def test_a_clock_that_goes_back_or_a_damaged_ring_stops_the_run_between_segments(hospital: Hospital, code: str) -> None:
    held = hospital.keys.read_bytes()

    def spoil() -> None:
        if code == "admit.clock-went-back":
            hospital.clock.now = NOW - 10
        else:
            hospital.keys.write_bytes(b"{}" if code == "key.ring-invalid" else held[:-40])

    trainer = hospital.trainer(progress=During(segments={3: spoil}))
    for _ in range(3):  # each time
        with raises_code(code):
            trainer.fit()
    assert trainer.state.step == 3
    hospital.clock.now = NOW
    hospital.keys.write_bytes(held)
    again = trainer.fit()
    assert again.steps == 12 and again.notes == ()


def test_a_run_on_whom_nobody_is_left_stops(hospital: Hospital) -> None:
    def later() -> None:
        hospital.clock.now = NOW + 10 * SECONDS_PER_YEAR

    with raises_code("train.nobody-left"):
        hospital.trainer(progress=During(segments={6: later})).fit()
    assert len(attempts_of(hospital, "a")) == 2


def test_each_withdrawal_is_noted_with_its_step(hospital: Hospital) -> None:
    hospital.sign({"c00": "clinical"}, expires=NOW + 100)
    hospital.sign({"c01": "clinical"}, expires=NOW + 200)

    def at(seconds: int) -> Any:
        return lambda: setattr(hospital.clock, "now", NOW + seconds)

    outcome = hospital.trainer(progress=During(segments={3: at(100), 6: at(200)})).fit()
    assert [note.partition(":")[0] for note in outcome.notes] == [
        f"contributions that are no longer valid were withdrawn before step {step}" for step in (3, 6)
    ]


def test_a_run_that_never_began_withdraws_nobody(hospital: Hospital) -> None:
    """Refused by the book, its folder holds no run; another admission there is a first one."""
    book = hospital.root / "tests.ledger.db"
    hospital.trainer("first", ledger=book).fit()
    with pytest.raises(BudgetExceeded):
        hospital.trainer("second", ledger=book).fit()
    for path in (hospital.people / "c00").iterdir():
        path.unlink()
    (hospital.people / "c00").rmdir()
    outcome = hospital.trainer("second", ledger=hospital.root / "other.db").fit()
    assert notes_of(outcome) == []


# ------------------------------------------------------------------------------------------------ killed and resumed


def notes_of(outcome: Outcome) -> list[str]:
    """The notes of a run, except that another ledger of this test lies near its own."""
    return [note for note in outcome.notes if not note.startswith("another ledger")]


@pytest.fixture
def whole(hospital: Hospital) -> dict[str, torch.Tensor]:
    """The weights of a run that nobody killed, with a book of its own."""
    trainer = hospital.trainer("whole", ledger=hospital.root / "whole.db")
    assert trainer.fit().notes == ()
    return weights(trainer)


@pytest.mark.parametrize("step", [0, 4, 11])
def test_killed_and_admitted_again_it_is_the_same_run(
    hospital: Hospital, whole: dict[str, torch.Tensor], step: int
) -> None:
    killed(hospital, "a", step)
    hospital.clock.now = NOW + 5000  # everybody is still inside their window
    trainer = hospital.trainer("a")
    outcome = trainer.fit()
    assert notes_of(outcome) == []
    assert same(weights(trainer), whole)
    assert outcome.epsilon["clinical"] == pytest.approx(trainer.plan.epsilon("clinical"), rel=1e-12)


@pytest.mark.parametrize("how", ["expired", "revoked-key", "gone", "payload-mismatch"])
def test_killed_and_somebody_is_out_the_open_segment_is_redone_without_them(hospital: Hospital, how: str) -> None:
    other = lamina.PrivateKey.generate()
    hospital.trust(other)
    hospital.sign({"c03": "clinical", "c04": "clinical"}, key=other, expires=NOW + 100)
    loose = hospital.plan(hospital.trainer("x").model, epsilon={"clinical": 2.0, "sensitive": 1.0})
    killed(hospital, "a", 4, plan=loose)
    if how == "expired":
        hospital.clock.now = NOW + 100
    elif how == "revoked-key":
        with lamina.KeyRing.editing(hospital.keys) as ring:
            ring.revoke(other.public.id, at=NOW)
    else:
        for one in ("c03", "c04"):
            if how == "gone":
                for path in (hospital.people / one).iterdir():
                    path.unlink()
                (hospital.people / one).rmdir()
            else:
                hospital.write(one, 4321)
    trainer = hospital.trainer("a", plan=loose)
    outcome = trainer.fit()
    assert f"2 ({how} 2)" in told(outcome.notes, "are not admitted now")
    redone = told(outcome.notes, "done again with fresh noise")
    assert "contributions were added or withdrawn" in redone
    made = attempts_of(hospital, "a")
    assert [each.key for each in made] == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)]
    assert [each.state for each in made] == ["closed", "abandoned", *["closed"] * 3]
    assert made[1].events == made[2].events
    assert outcome.steps == 12
    assert hospital.figures("a")["classes"]["clinical"]["steps_charged"] == 15  # the old charge stays
    assert outcome.epsilon["clinical"] > loose.epsilon("clinical")
    nobody_is_named(hospital, "a", *outcome.notes)
    assert set(ids_in(hospital, "a", "withdrawn")) == {"c03", "c04"}


def test_who_was_out_once_does_not_come_back_to_the_run(hospital: Hospital) -> None:
    other = lamina.PrivateKey.generate()
    hospital.trust(other)
    hospital.sign({"c03": "clinical"}, key=other)
    held = hospital.keys.read_bytes()
    loose = hospital.plan(hospital.trainer("x").model, epsilon={"clinical": 1.5, "sensitive": 0.8})
    killed(hospital, "a", 4, plan=loose)
    with lamina.KeyRing.editing(hospital.keys) as ring:
        ring.revoke(other.public.id, at=NOW)
    killed(hospital, "a", 4, plan=loose)  # counts from 0: in the third segment
    hospital.keys.write_bytes(held)  # somebody puts the old ring back
    trainer = hospital.trainer("a", plan=loose)
    assert trainer.corpus.ids_of(*trainer.corpus.stable_ids(["c03"]))
    outcome = trainer.fit()
    assert "c03" not in {trainer.corpus.ids[row] for row in trainer.corpus.members("clinical").tolist()}
    assert outcome.steps == 12


def test_a_segment_that_could_be_replayed_is_not_if_somebody_expires_just_then(hospital: Hospital) -> None:
    """Between the admission of a resumed run and its first segment."""
    hospital.sign({"c03": "clinical"}, expires=NOW + 100)
    loose = hospital.plan(hospital.trainer("x").model, epsilon={"clinical": 2.0, "sensitive": 1.0})
    killed(hospital, "a", 4, plan=loose)
    trainer = hospital.trainer("a", plan=loose)  # admitted: still inside
    hospital.clock.now = NOW + 100
    outcome = trainer.fit()
    assert "1 (expired 1)" in told(outcome.notes, "no longer valid")
    assert told(outcome.notes, "done again with fresh noise")
    assert [each.key for each in attempts_of(hospital, "a")][:3] == [(0, 0), (1, 0), (1, 1)]


def test_somebody_new_may_join_a_run_that_goes_on(hospital: Hospital) -> None:
    loose = hospital.plan(hospital.trainer("x").model, epsilon={"clinical": 2.0, "sensitive": 1.0})

    with pytest.raises(Killed):
        hospital.trainer("a", plan=loose, progress=During(segments={3: die})).fit()  # the first segment is closed
    hospital.write("c99", 99)
    hospital.sign({"c99": "clinical"})
    outcome = hospital.trainer("a", plan=loose).fit()
    assert outcome.notes == ()  # nothing was open, so nothing is redone
    assert outcome.epsilon["clinical"] == pytest.approx(loose.epsilon("clinical"), rel=1e-12)
    assert "c99" in ids_in(hospital, "a", "admitted")


def test_a_run_without_its_file_of_admitted_contributions_is_refused(hospital: Hospital) -> None:
    """Without it, a contribution that is refused for a while would be used again as if it had never left."""
    file = hospital.root / "runs" / "a" / "admitted"
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # killed before anything is drawn: the file is there when the run begins
        patch.setattr(AdmissionRenewal, "write_members", lambda renewal: die())
        with pytest.raises(Killed):
            hospital.trainer("a").fit()
    assert cbor.decode(file.read_bytes()) == {}
    killed(hospital, "a", 4)
    kept = file.read_bytes()
    file.unlink()
    hospital.sign({"c05": "clinical"}, key=lamina.PrivateKey.generate())  # refused now
    with raises_code("train.membership-file-missing"):
        hospital.trainer("a").fit()
    assert not file.exists()
    file.write_bytes(kept)
    outcome = hospital.trainer("a").fit()
    assert told(outcome.notes, "not admitted now and were withdrawn") and ids_in(hospital, "a", "withdrawn") == ["c05"]


def test_a_finished_run_is_only_read_whoever_expired_since(hospital: Hospital) -> None:
    hospital.sign({"c03": "clinical"}, expires=NOW + 100)
    trainer = hospital.trainer("a")
    first = trainer.fit()
    hospital.clock.now = NOW + 100
    again = hospital.trainer("a")
    second = again.fit()
    assert second.epsilon == first.epsilon and second.steps == 12
    assert same(weights(again), weights(trainer))


# ------------------------------------------------------------------------------------------------ occurrences


def test_occurrences_stay_with_those_who_took_part(hospital: Hospital) -> None:
    """After an admission without the first of them, every row is another one's."""
    hospital.sign({"c00": "clinical"}, expires=NOW + 100)
    loose = hospital.plan(hospital.trainer("x").model, epsilon={"clinical": 2.0, "sensitive": 1.0})
    caps = {"clinical": 3, "sensitive": 3}
    first = hospital.trainer("a", plan=loose, max_occurrences=caps, progress=During(segments={6: die}))
    with pytest.raises(Killed):
        first.fit()
    assert first.state.counts is not None
    before = dict(zip(first.corpus.ids, first.state.counts.tolist(), strict=True))
    assert max(before.values()) > 1
    hospital.clock.now = NOW + 100
    seen: dict[str, int] = {}

    second = hospital.trainer("a", plan=loose, max_occurrences=caps)
    real = Sampler.__init__

    def watched(self: Sampler, corpus: Any, plan: Any, **options: Any) -> None:
        if options.get("counts") is not None and not seen:
            seen.update(zip(second.corpus.ids, options["counts"].tolist(), strict=True))
        real(self, corpus, plan, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "__init__", watched)
        second.fit()
    assert len(second.corpus.ids) == len(first.corpus.ids) - 1
    assert seen == {one: count for one, count in before.items() if one != "c00"}
    assert second.state.counts is not None
    after = dict(zip(second.corpus.ids, second.state.counts.tolist(), strict=True))
    assert all(after[one] >= seen[one] for one in seen)
    private = [count for one, count in after.items() if one[0] != "o"]
    assert max(private) <= 3


# ------------------------------------------------------------------------------------------------ payloads


def test_a_payload_that_is_swapped_stops_the_run_before_anything_is_drawn(hospital: Hospital) -> None:
    trainer = hospital.trainer("a")
    held = {path: path.read_bytes() for path in sorted(hospital.people.glob("*/payload.npz"))}
    for path in held:
        path.write_bytes(b"PK\x03\x04 something else")
    with raises_code("corpus.payload-not-as-signed") as caught:
        trainer.fit()
    text = str(caught.value)
    assert not [path for path in held if path.parent.name in text]
    assert not (hospital.root / "runs" / "a" / "model.safetensors").exists()
    for path, data in held.items():
        path.write_bytes(data)
    assert hospital.trainer("a").fit().notes == ()  # nothing was drawn yet


def test_a_payload_that_is_swapped_inside_a_segment_ends_its_coins(hospital: Hospital) -> None:
    held = {path: path.read_bytes() for path in sorted(hospital.people.glob("*/payload.npz"))}

    def swap() -> None:
        for path in held:
            path.write_bytes(b"PK\x03\x04 something else")

    with pytest.raises(PayloadChanged):
        hospital.trainer("a", progress=During(segments={3: swap})).fit()
    for path, data in held.items():
        path.write_bytes(data)
    outcome = hospital.trainer("a").fit()  # at which step it stopped said who was sampled: never replayed
    first, second = [each for each in attempts_of(hospital, "a") if each.segment == 1]
    assert first.generation < second.generation and first.nonce != second.nonce
    assert "charged again" in told(outcome.notes, "done again")


# ------------------------------------------------------------------------------------------------ under another name


def renamed(hospital: Hospital) -> None:
    """The same descriptors and attestations, in folders of other names."""
    for path in sorted(hospital.people.iterdir()):
        if path.is_dir():
            path.rename(path.with_name(f"x{path.name}"))


def test_who_withdrew_does_not_come_back_under_another_name(hospital: Hospital) -> None:
    corpus = hospital.admit()
    leave = During(segments={3: lambda: corpus.withdraw("c05"), 6: die})
    with pytest.raises(Killed):
        hospital.trainer(corpus=corpus, progress=leave).fit()
    renamed(hospital)
    again = hospital.admit()
    assert again.ids_of(*again.stable_ids(["xc05"]))
    hospital.trainer(corpus=again).fit()
    assert "xc05" not in [again.ids[row] for name in again.names for row in again.members(name).tolist()]


def test_occurrences_are_counted_on_under_another_name(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[str] = Counter()
    corpora: list[AdmittedCorpus] = []
    sampled = Sampler._sampled

    def counting(self: Sampler, *args: Any) -> list[Any]:
        found = sampled(self, *args)
        drawn.update(corpora[-1].digests[row] for rows in found for row in rows.tolist())
        return found

    def trainer(**options: Any) -> lamina.Trainer:
        corpora.append(hospital.admit())
        plan = hospital.plan(net(), batch=60)
        return hospital.trainer(corpus=corpora[-1], plan=plan, max_occurrences={"clinical": 2}, **options)

    monkeypatch.setattr(Sampler, "_sampled", counting)
    with pytest.raises(Killed):
        trainer(progress=During(segments={6: die})).fit()
    clinical = {corpora[0].digests[row] for row in corpora[0].members("clinical").tolist()}
    assert max(drawn[one] for one in clinical) == 2
    renamed(hospital)
    trainer().fit()
    assert max(drawn[one] for one in clinical) == 2
