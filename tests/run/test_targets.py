"""One contribution whose targets model and loss cannot take: it is left out by itself, and stops nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import problem
import pytest
import torch
import torch.nn.functional as F
from hospital import Hospital, net, usual
from open_charges import has_begun
from refusals import raises_code
from run_state import open_attempt
from torch import Tensor, nn

import lamina
from lamina import Batch, Corpus, Engine
from lamina.audit.paired_step import paired_step, without_rows
from lamina.audit.target import AuditTarget
from lamina.cli.by_name import make_loss
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch, SegmentOutcome
from lamina.ledger.verify.verifier import verify
from lamina.plan.rules import FollowQuantile, Injection
from lamina.run.example_sources import ArraySource
from lamina.run.run_output import Progress
from lamina.run.sampler import Sampler
from lamina.run.target_check import TargetCheck

HUGE = 10**12


def label(hospital: Hospital, name: str, cls: str = "clinical", **arrays: Any) -> None:
    """A payload with other targets, signed like any other."""
    given = dict(np.load(hospital.people / name / "payload.npz"))
    np.savez(hospital.people / name / "payload.npz", **{**given, **arrays})
    hospital.sign({name: cls})


# ------------------------------------------------------------------------------------------------ before a run


@pytest.mark.parametrize("name", ["c00", "c17"])  # c00 is the first of the corpus: the rehearsal would meet it
@pytest.mark.parametrize("entered", [True, False])
def test_a_signed_contribution_with_an_impossible_label_is_refused_and_the_others_train(
    tmp_path: Path, name: str, entered: bool
) -> None:
    hospital = usual(tmp_path)
    label(hospital, name, y=np.array([0, HUGE]))
    hospital.sign({"c05": "clinical"}, noise_multiplier=3.0)
    where = tmp_path / "runs" / "ward-7.ledger.db"
    where.parent.mkdir()
    corpus = hospital.gate().admit(hospital.people, where if entered else None)
    plan = hospital.plan(net())
    trainer = hospital.trainer(corpus=corpus)
    outcome = trainer.fit()
    assert outcome.steps == 12
    assert trainer.plan.digest() == plan.digest()  # N, q, B and S are the declared ones
    assert [(each.id, each.reason.word) for each in corpus.admission.left] == [(name, "not-trainable")]
    assert corpus.admission.to_dict()["left"] == [{"id": name, "reason": "not-trainable", "detail": ""}]
    assert "not-trainable" in corpus.admission.table()
    assert len(corpus) == 56
    written = (tmp_path / "runs" / "a" / "metrics.json").read_text()
    assert not re.search(rf"\b{name}\b", written)  # as a word: a digest may contain it
    assert verify(where, signatures=False).problem is None


def test_who_wants_to_be_told_is_stopped_before_anything_is_spent(tmp_path: Path) -> None:
    hospital = usual(tmp_path)
    label(hospital, "c17", y=np.array([0, HUGE]))
    with raises_code("corpus.contributions-refused"):
        hospital.trainer(corpus=hospital.admit(on_refusal="stop"))
    assert not has_begun(tmp_path / "runs" / "a")


def test_nobody_is_left(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path)
    hospital.trust()
    for i in range(3):
        hospital.write(f"c{i}", i)
        label(hospital, f"c{i}", y=np.array([3, 4]))
    with raises_code("corpus.contributions-refused"):
        hospital.trainer()


def test_the_owner_of_the_data_is_told_whose_label_it_is(tmp_path: Path) -> None:
    data = problem.data()
    data["y"][np.flatnonzero(data["unit"] == 123)[0]] = -3
    with raises_code("train.labels-out-of-range") as caught:
        problem.trainer(tmp_path / "a", corpus=problem.corpus(**data)).fit()
    assert "'123'" in caught.value.problem and "400" not in caught.value.problem
    assert not has_begun(tmp_path / "a")


# ------------------------------------------------------------------------------------------------ what is judged, and how


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.place, self.out = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out((self.table(ids) + self.place(torch.arange(ids.shape[1]))).mean(1))


class Half(nn.Module):
    """Two outputs, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.out(a), self.out(b)


def ce(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def by_hand(output: Tensor, y: Tensor) -> Tensor:
    return -output.log_softmax(1).gather(1, y[:, None])[:, 0]


def both(output: tuple[Tensor, Tensor], y: dict[str, Tensor]) -> Tensor:
    return ce(output[0], y["a"]) + F.mse_loss(output[1][:, 0], y["b"], reduction="none")


def tokens(output: Tensor, y: Tensor) -> Tensor:
    """All positions of the batch in one axis, as language models do."""
    return ce(output.flatten(0, 1), y.flatten()).view(y.shape).mean(1)


NAN, INF = float("nan"), float("inf")
FLOATS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
CLASSES, PARTS = torch.tensor([0, 3, 2, -1, HUGE]), torch.tensor([0.0, 1.5, 0.5, -0.1, 1.0])
Case = tuple[Callable[[], nn.Module], Any, Any, Any, list[int]]  # model, loss, x, y, who cannot be taken
CASES: dict[str, Case] = {
    "class numbers": (lambda: nn.Linear(4, 3), ce, FLOATS, CLASSES, [1, 3, 4]),
    "a module": (lambda: nn.Linear(4, 3), nn.CrossEntropyLoss(reduction="none"), FLOATS, CLASSES, [1, 3, 4]),
    "ignored": (
        lambda: nn.Linear(4, 3), nn.NLLLoss(ignore_index=-1, reduction="none"), FLOATS, CLASSES, [1, 4],
    ),
    "built in": (lambda: nn.Linear(4, 3), make_loss("cross_entropy", {}), FLOATS, CLASSES, [1, 3, 4]),
    "without a label": (
        lambda: nn.Linear(4, 3), ce, FLOATS, torch.tensor([0, -100, 2, 3, -100]), [3],
    ),
    "a loss of one's own": (lambda: nn.Linear(4, 3), by_hand, FLOATS, CLASSES, [1, 3, 4]),
    "positions": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)), tokens, FLOATS,
        torch.tensor([[0, 1], [2, 3], [0, 0], [-1, 0], [2, 2]]), [1, 3],
    ),
    "bce": (
        lambda: nn.Linear(4, 1), lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="none"),
        FLOATS, PARTS, [1, 3],
    ),
    "bce of probabilities": (
        lambda: nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0)), nn.BCELoss(reduction="none"),
        FLOATS, PARTS, [1, 3],
    ),
    "bce built in": (lambda: nn.Linear(4, 1), make_loss("bce", {}), FLOATS, PARTS, [1, 3]),
    "values": (
        lambda: nn.Linear(4, 1), make_loss("mse", {}), FLOATS, torch.tensor([0.0, NAN, 1e30, INF, -INF]), [1, 3, 4],
    ),
    "a tree": (
        Half, both, (FLOATS, FLOATS),
        {"a": torch.tensor([0, 1, 9, 0, 0]), "b": torch.tensor([0.0, NAN, 0.0, 1.0, 2.0])}, [1, 2],
    ),
    "tokens": (
        Words, ce, torch.tensor([[0, 6], [7, 0], [1, 1], [0, -1], [HUGE, 2]]), torch.tensor([0, 1, 2, 0, 1]), [1, 3, 4],
    ),
    "its own input": (
        lambda: nn.Linear(4, 4), lambda o, y: nn.BCELoss(reduction="none")(o.sigmoid(), y).mean(1),
        torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0])[:, None].expand(5, 4), None, [2, 4],
    ),
}  # fmt: skip


def check_of(name: str) -> tuple[TargetCheck, nn.Module, Any, Any]:
    make, loss, x, y, _ = CASES[name]
    model = make()

    def output(given: Any) -> Any:
        return model(*given) if isinstance(given, tuple) else model(given)

    return TargetCheck(model, loss, output, Corpus(x, y).source), model, x, y


@pytest.mark.parametrize("name", CASES)
def test_each_example_is_judged_by_itself(name: str) -> None:
    check, _, x, y = check_of(name)
    assert not check.unknown
    state = torch.get_rng_state()
    assert check.unfit(x, y).nonzero().flatten().tolist() == CASES[name][-1]
    for rows in ([4, 3, 2, 1, 0], [2, 0], *([i] for i in range(5))):
        some = check.unfit(*oracle.rows_of((x, y), torch.tensor(rows)))
        assert [row for row, bad in zip(rows, some.tolist(), strict=True) if bad] == [
            row for row in rows if row in CASES[name][-1]
        ]
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_known_where_the_loss_takes_no_public_targets(tmp_path: Path) -> None:
    """Then that is said, and what is not finite is found all the same."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        assert float(y.std()) > 0
        return (output[:, 0] - y) ** 2

    model, y = nn.Linear(4, 1), torch.tensor([0.0, NAN, 1e30, INF, 2.0])
    check = TargetCheck(model, loss, model, Corpus(FLOATS, y).source)
    assert check.unknown
    assert check.unfit(FLOATS, y).tolist() == [False, True, False, True, False]
    data = {**problem.data(), "y": np.random.default_rng(0).normal(size=len(problem.data()["y"])).astype(np.float32)}
    outcome = problem.trainer(tmp_path / "a", corpus=problem.corpus(**data), loss_fn=loss).fit()
    assert [note for note in outcome.notes if "not compared" in note]


# ------------------------------------------------------------------------------------------------ inside a step

UNITS, KINDS = torch.tensor([0, 0, 1, 1, 2, 3, 3]), torch.tensor([0, 1, 0, 1])
BAD = 1  # of the contributions; one of its two examples


def spoiled_batch(classes: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(7, 6, generator=generator), torch.tensor([0, 1, 2, HUGE, 0, 1, 2])
    return Batch(x, y, unit=UNITS, cls=KINDS if classes else None)


def check_for(model: nn.Module, batch: Batch) -> TargetCheck:
    return TargetCheck(model, ce, model, Corpus(batch.x, batch.y).source)


class Bare(nn.Module):
    """A parameter of its own: differentiated per contribution."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ self.mix))


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("make", [net, Bare])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_its_clipped_gradient_is_exactly_zero(form: str, make: Callable[[], nn.Module], parts: int) -> None:
    """Against the oracle, which never sees it; and a batch without it is the same batch."""
    torch.manual_seed(0)
    model, batch = make(), spoiled_batch()
    check, rest = check_for(model, batch), without_rows(batch, BAD)
    assert rest.cls is not None
    grads = oracle.unit_grads(oracle.example_grads(model, rest.x, rest.y, lambda m, x, y: ce(m(x), y)), rest)
    clip = [[1.0] * len(oracle.layers_of(model))] * 2
    plan = oracle.thresholds(grads, oracle.plan_of(model, clip, clipping=form))
    want = oracle.clip_by_hand(grads, rest.cls.tolist(), plan)
    masked = check.mask(batch)
    assert masked.weight is not None and masked.weight.tolist() == [1, 1, 0, 0, 1, 1, 1]
    with Engine(model, plan) as engine:
        sums = {name: torch.zeros_like(total) for name, total in want.sums.items()}
        for part in masked.split(parts):
            for name, total in engine.clipped_sums(ce(model(part.x), part.y), part).items():
                sums[name] += total
        oracle.difference(sums, want)
        alone = check.mask(Batch(batch.x[2:4], batch.y[2:4], unit=torch.zeros(2, dtype=torch.long), cls=KINDS[:1]))
        assert all(not bool(total.any()) for total in engine.clipped_sums(ce(model(alone.x), alone.y), alone).values())


PATHS: dict[str, dict[str, Any]] = {
    "box": {},
    "joint": {"clipping": "joint"},
    "microbatches": {"parts": 3},
    "constant time": {"options": {"constant_time": True}},
    "hardened": {"hardened": True},
    "quantile": {"rules": (FollowQuantile(noise=3.0),)},
    "bins": {"injection": Injection(form="per_microbatch", parts=3)},  # type: ignore[arg-type]
    "shares": {"injection": Injection(form="per_sample", parts=6)},  # type: ignore[arg-type]
    "raw": {"injection": Injection(form="per_sample_raw")},  # type: ignore[arg-type]
}


@pytest.mark.parametrize("path", PATHS)
def test_the_paired_step_sees_nothing_of_it(path: str) -> None:
    torch.manual_seed(0)
    model, batch = net(), spoiled_batch()
    check, how = check_for(model, batch), dict(PATHS[path])
    plan = oracle.plan_of(model, [[0.01] * len(oracle.layers_of(model))] * 2, clipping=how.pop("clipping", "box"))
    plan = replace(plan, **{name: how.pop(name) for name in ("rules", "injection") if name in how})
    target = AuditTarget(model=model, plan=plan, losses_of=lambda x, y: ce(model(x), y), **how)
    masked = check.mask(batch)
    other = replace(batch, x=batch.x.clone(), y=batch.y.clone())
    other.x[UNITS == BAD], other.y[UNITS == BAD] = torch.tensor(NAN), torch.tensor([7, 0])
    one, another = (target.release(each) for each in (masked, check.mask(other)))
    assert all(torch.equal(one[name], another[name]) for name in one)  # whatever it is: to the last bit
    if path != "raw":  # there a contribution takes its noise along, also one whose gradient is 0
        gone = paired_step(target, masked, BAD, without="absent")
        assert gone.sensitivity <= gone.rounding and not any(gone.counts)
    others = [paired_step(target, masked, unit) for unit in (0, 2, 3)]
    assert all(each.sound and each.ratio > 0.9 for each in others)


class Later(torch.utils.data.Dataset[Any]):
    """Labels that are right until the run has begun."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, self.spoiled = data, False

    def __len__(self) -> int:
        return len(self.data["y"])

    def __getitem__(self, i: int) -> Any:
        bad = self.spoiled and self.data["unit"][i] % 50 == 7
        return torch.from_numpy(self.data["x"][i]), HUGE if bad else int(self.data["y"][i])


def count_bad_labels(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[int], None]) -> list[int]:
    """Calls `spoil` before every draw. The list gets how many bad labels each draw has."""
    draw, seen = Sampler.draw, list[int]()

    def drawn(self: Sampler, step: int) -> Batch:
        spoil(step)
        batch = draw(self, step)
        seen.append(int((batch.y == HUGE).sum()))
        return batch

    monkeypatch.setattr(Sampler, "draw", drawn)
    return seen


@pytest.mark.parametrize("options", [{}, {"microbatches": 3}, {"augment": lambda x: x + 0.01 * torch.randn_like(x)}])
def test_a_label_that_turns_bad_counts_as_nothing(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = problem.data()
    dataset = Later(data)
    corpus = Corpus(
        dataset, unit=data["unit"], cls=data["cls"], version="1", policy=lamina.Policy.parse(problem.POLICY)
    )
    trainer = problem.trainer(tmp_path / "a", corpus=corpus, **options)

    def spoil(step: int) -> None:
        dataset.spoiled = True

    seen = count_bad_labels(monkeypatch, spoil)
    assert trainer.fit().steps == 24
    assert sum(seen) > 0
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


@pytest.mark.parametrize("mapped", [False, True])
def test_an_array_that_is_changed_while_the_run_goes_on_counts_as_nothing(
    tmp_path: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = problem.data()
    data["y"] = np.array(data["y"])
    if mapped:
        np.save(tmp_path / "y.npy", data["y"])
        data["y"] = np.load(tmp_path / "y.npy", mmap_mode="r+")
    trainer = problem.trainer(tmp_path / "a", corpus=problem.corpus(**data))

    def spoil(step: int) -> None:
        if step == 3:
            data["y"][::20] = HUGE

    seen = count_bad_labels(monkeypatch, spoil)
    assert trainer.fit().steps == 24
    assert sum(seen) > 0


# ------------------------------------------------------------------------------------------------ any other error


def fragile(output: Tensor, y: Tensor) -> Tensor:
    """Fails on examples that the check of targets cannot know of: public outputs are small."""
    if bool((output.detach().abs() > 1e3).any()):
        raise ValueError(f"{len(y)} rows, {float(output.detach().max())}")
    return ce(output, y)


def outcomes(folder: Path) -> list[SegmentOutcome]:
    with LedgerReader.read_only(folder / "ledger.db") as view:
        return [each.outcome for leaf in view.of_kind(Epoch) for each in leaf.record.segments]


def test_an_error_on_somebodys_data_ends_the_segment_and_the_next_start_leaves_them_out(tmp_path: Path) -> None:
    hospital = usual(tmp_path)
    with np.load(hospital.people / "c09" / "payload.npz") as held:
        label(hospital, "c09", x=held["x"] * np.float32(1e9))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    plan = hospital.plan(model, steps=30, batch=60)

    def trainer() -> lamina.Trainer:
        made = hospital.trainer(model=nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), plan=plan, segment=5)
        made.loss_fn = fragile
        return made

    first = trainer()
    with raises_code("train.error-text-withheld") as caught:
        first.fit()
    told = str(caught.value)
    assert "c09" not in told and "rows" not in told
    assert not any(letter.isdigit() for letter in caught.value.problem.partition(" at ")[0])
    folder = tmp_path / "runs" / "a"
    assert open_attempt(folder) is None
    assert outcomes(folder) == [SegmentOutcome.ABANDONED]  # charged, and the ledger says so
    again = trainer()
    outcome = again.fit()
    assert [(each.id, each.reason.word) for each in again.corpus.admission.left] == [("c09", "not-trainable")]
    assert outcomes(folder)[0] is SegmentOutcome.ABANDONED and SegmentOutcome.CLOSED in outcomes(folder)
    assert [note for note in outcome.notes if "left out" in note]
    assert "c09" not in json.dumps(outcome.notes)
    assert trainer().fit().steps == outcome.steps  # who was left out stays out


def test_an_error_that_would_come_again_is_not_paid_for_again(tmp_path: Path) -> None:
    failing = [True]

    class Loss(nn.Module):
        def forward(self, output: Tensor, y: Tensor) -> Tensor:
            if failing[0] and len(y) > 6 and self.training and output.requires_grad:
                raise ValueError(f"{len(y)} rows")
            return ce(output, y)

    def trainer(loss: Callable[[Tensor, Tensor], Tensor]) -> lamina.Trainer:
        return problem.trainer(tmp_path / "a", loss_fn=loss, bounds={"clinical": 100.0, "sensitive": 100.0})

    with raises_code("train.error-text-withheld"):
        trainer(Loss()).fit()
    before = outcomes(tmp_path / "a")
    assert before == [SegmentOutcome.ABANDONED]
    for _ in range(2):
        with raises_code("train.stopped-before") as caught:
            trainer(Loss()).fit()
        assert "stopped'" in caught.value.remedy
        assert outcomes(tmp_path / "a") == before  # nothing was charged
    (tmp_path / "a" / "stopped").unlink()  # it was the machine, says its owner
    with raises_code("train.error-text-withheld"):
        trainer(Loss()).fit()
    assert outcomes(tmp_path / "a") == [*before, SegmentOutcome.ABANDONED]
    outcome = trainer(ce).fit()  # another loss
    assert outcome.steps == 24 and outcomes(tmp_path / "a").count(SegmentOutcome.CLOSED) == 5
    assert not (tmp_path / "a" / "stopped").exists()


def test_what_was_killed_is_replayed_whatever_stopped_before(tmp_path: Path) -> None:
    """Never with other members: the same noise on another batch would give the difference away."""

    class Killed(BaseException):
        pass

    class At(Progress):
        def step(self, done: int, loss: float | None) -> None:
            if done == 7:
                raise Killed

    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=At()).fit()
    pending = open_attempt(tmp_path / "a")
    assert pending is not None
    (tmp_path / "a" / "stopped").write_bytes(pending.nonce)
    assert problem.trainer(tmp_path / "a").fit().notes == ()
    assert set(outcomes(tmp_path / "a")) == {SegmentOutcome.CLOSED}


def test_the_owner_of_the_data_is_told_on_whom_the_model_fails(tmp_path: Path) -> None:
    data = problem.data()
    data["x"][data["unit"] == 123] *= 1e9

    def trainer() -> lamina.Trainer:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        plan = problem.plan(model, batch=150)
        return problem.trainer(tmp_path / "a", model=model, plan=plan, corpus=problem.corpus(**data), loss_fn=fragile)

    with raises_code("train.error-text-withheld"):
        trainer().fit()
    with raises_code("train.labels-out-of-range") as caught:
        trainer().fit()
    assert "'123'" in caught.value.problem


def _check_of(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor) -> TargetCheck:
    return TargetCheck(model, loss_fn, model, ArraySource(x, y))


def test_a_target_is_judged_by_itself_where_the_loss_takes_no_single_row() -> None:
    """`squeeze` drops the axis of a batch of one: nobody else may be left out for a target that is not theirs."""
    model, x, y = nn.Linear(5, 1), torch.randn(40, 5), torch.zeros(40)
    check = _check_of(
        model, lambda o, t: nn.functional.binary_cross_entropy_with_logits(o.squeeze(), t, reduction="none"), x, y
    )
    bad = y.clone()
    bad[3] = 2.0
    assert check.unfit(x, bad).nonzero().flatten().tolist() == [3]
    assert not check.unfit(x[:1], y[:1]).any()


def test_a_loss_that_writes_to_its_input_carries_nothing_to_later_batches() -> None:
    def limited(o: Tensor, t: Tensor) -> Tensor:
        o.add_(t.unsqueeze(1))
        if bool((o.abs() > 50).any()):
            raise ValueError("out of range")
        return o.square().mean(1)

    model, x, y = nn.Linear(5, 1), torch.randn(40, 5), torch.full((40,), 8.0)
    check = _check_of(model, limited, x, y)
    large = y.clone()
    large[0] = 45.0
    check.unfit(x, large)
    assert not check.unfit(x, y).any()
