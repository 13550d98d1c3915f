"""Runs of several ranks: one writer, one sample, one price; whoever dies is replayed, whoever differs is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import problem
import pytest
import ranks
import torch
from open_charges import attempts_in_folder, open_charges
from run_state import attempts, open_attempt
from safetensors.torch import load_file
from stopping import LOOSE, killed

from lamina import LayerStack, Policy, make_plan
from lamina.allocate.ladp import LADP
from lamina.engine.distributed import Ranks
from lamina.ledger.verify.verifier import verify
from lamina.run.sampler import Sampler
from lamina.run.training_checkpoint import TrainingCheckpoints, tensor_bytes

STEPS, SEGMENT = 12, 4


def run_two(**folders: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = ranks.run_ranks("train_ranks.py", 2, json.dumps({name: str(f) for name, f in folders.items()}))
    return first, second


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the runs are; with the plan of all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "plan.cbor").write_bytes(problem.plan(problem.net(), STEPS).to_cbor())
    stack, policy = LayerStack.from_model(problem.net()), Policy.parse(problem.POLICY)
    rule = LADP(estimator="fisher", every=2, examples=16)
    made = make_plan(stack, policy, batch=48, steps=STEPS, allocate=rule)
    (folder / "proxied.cbor").write_bytes(made.to_cbor())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKS_PLAN", str(folder / "plan.cbor"))
        yield folder


@pytest.fixture(scope="module")
def answers(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every scenario but the one that ends its processes: of rank 0 and rank 1."""
    names = ("plain", "whole", "adam", "sharded", "proxied", "differs", "withdraw", "fails")
    return run_two(**{name: place / name / "run" for name in names})


def verified(folder: Path) -> None:
    for path in folder.rglob("*.ledger.db"):
        assert verify(path, signatures=False).problem is None


def test_ranks_end_with_the_same_weights_at_the_price_of_one_process(
    answers: Any, place: Path, tmp_path: Path, known_seeds: None
) -> None:
    alone = problem.trainer(tmp_path / "alone", steps=STEPS, segment=SEGMENT).fit()
    for name in ("plain", "whole"):
        first, second = (answer[name] for answer in answers)
        assert first == second and first["steps"] == STEPS and first["private"]
        assert first["epsilon"] == alone.epsilon
        assert [each.key for each in attempts(place / name / "run")] == [(0, 0), (1, 0), (2, 0)]
        verified(place / name)


def test_shares_that_follow_a_proxy_are_recorded_as_they_were_applied(answers: Any, place: Path) -> None:
    first, second = (answer["proxied"] for answer in answers)
    assert first == second and first["steps"] == STEPS
    verified(place / "proxied")


def test_a_rank_with_other_data_is_refused_before_anything_is_charged(answers: Any, place: Path) -> None:
    assert [answer["differs"] for answer in answers] == [{"refused": "engine.ranks-differ"}] * 2
    assert attempts(place / "differs" / "run") == []


def test_a_withdrawal_abandons_the_steps_of_all_ranks(answers: Any, place: Path) -> None:
    first, second = (answer["withdraw"] for answer in answers)
    assert first == second and first["steps"] == STEPS
    assert any("abandoned" in note for note in first["notes"])
    assert len(attempts(place / "withdraw" / "run")) == 4  # one of three was done again
    verified(place / "withdraw")


def test_an_error_on_one_rank_stops_all_and_is_charged(answers: Any, place: Path) -> None:
    assert [answer["fails"] for answer in answers] == [{"refused": "train.error-text-withheld"}] * 2
    folder = place / "fails" / "run"
    assert (folder / "stopped").exists() and open_attempt(folder) is None
    verified(place / "fails")


@pytest.fixture(scope="module")
def resumed(place: Path) -> Any:
    """Two ranks go on: with a run of which rank 1 was killed in step 6, and with one of a single process."""
    lost, fewer = place / "killed" / "run", place / "fewer" / "run"
    (_, told, _), (code, _, _) = ranks.end_ranks("train_ranks.py", 2, json.dumps({"killed": str(lost)}))
    assert code == -9 and json.loads(told.splitlines()[-1]) == {"killed": {"refused": "engine.rank-lost"}}
    assert open_attempt(lost) is not None and len(attempts(lost)) == 2
    killed(fewer, 6, steps=STEPS, segment=SEGMENT, bounds=LOOSE)
    parts = place / "parts" / "run"
    ended = ranks.end_ranks("train_ranks.py", 2, json.dumps({"killed sharded": str(parts)}))
    assert [code for code, _, _ in ended] == [0, -9]
    return run_two(plain=lost, loose=fewer, sharded=parts)


def test_a_rank_that_dies_is_replayed_and_charged_once(answers: Any, resumed: Any, place: Path) -> None:
    """The others stop; the same number of ranks takes the same steps once more, and comes to the same weights."""
    first, second = (answer["plain"] for answer in resumed)
    assert first == second == answers[0]["plain"]
    assert len(attempts(place / "killed" / "run")) == 3
    verified(place / "killed")


def test_a_model_under_fully_shard_comes_to_the_same_weights(answers: Any, resumed: Any, place: Path) -> None:
    """Its files are those of an ordinary model, and it goes on from its checkpoint after a rank was killed."""
    for answer in (*answers, *resumed):
        assert answer["sharded"] == {**answers[0]["adam"], "weights": ""}
    plain, parts, again = (
        load_file(place / name / "run" / "model.safetensors") for name in ("adam", "sharded", "parts")
    )
    assert sorted(plain) == sorted(parts) == sorted(problem.net().state_dict())
    for name, weights in plain.items():
        assert torch.equal(weights, parts[name]) and torch.equal(weights, again[name]), name
    assert len(attempts(place / "parts" / "run")) == 3
    verified(place / "parts")


def test_another_number_of_ranks_redoes_the_open_steps_and_charges_them_again(resumed: Any, place: Path) -> None:
    """The number of ranks is one of the things that must not have changed."""
    (note,) = resumed[0]["loose"]["notes"]
    assert "number of ranks changed" in note and "charged again" in note
    found = [(*each.key, each.state) for each in attempts(place / "fewer" / "run")]
    assert found == [(0, 0, "closed"), (1, 0, "abandoned"), (1, 1, "closed"), (2, 0, "closed")]
    verified(place / "fewer")


def standing(folder: Path) -> dict[str, Any]:
    """What ledger, folder, checkpoints and weights of a finished run say; they must agree with each other."""
    checkpoints, done = TrainingCheckpoints(folder / "checkpoint"), attempts(folder)
    assert {(*each.key, each.nonce): each.state for each in done} == attempts_in_folder(folder)
    assert [(*each.key, each.state) for each in done] == [(n, 0, "closed") for n in range(3)]  # nothing was done twice
    newest = max(checkpoints.indices())
    saved, _ = checkpoints.load(newest)
    weights, checkpoint = load_file(folder / "model.safetensors"), saved.tensors
    assert newest == len(done) and done[-1].last == saved.state["step"] == STEPS
    for name, value in weights.items():
        assert torch.equal(value, checkpoint[f"model.{name}"])
    (ledger,) = folder.parent.rglob("*.ledger.db")
    found = verify(ledger, signatures=False)
    assert found.problem is None
    assert open_charges(ledger) == []  # nothing is reserved any more
    return {
        "records": found.size,
        "checkpoint": {name: hashlib.sha256(tensor_bytes(value)).hexdigest() for name, value in checkpoint.items()},
        "charges": [each.events for each in done],
    }


def kill_at_random(name: str, place: Path, whole: dict[str, Any], *, kills: int, seed: int) -> None:
    """One rank is killed so often, at instants of the whole run; every run is let finish in the end and compared."""
    folders = [place / f"random {name} {seed} {number}" / "run" for number in range(4 * kills + 1)]
    commands = [json.dumps({name: str(folder)}) for folder in folders]
    found = ranks.kill_at_random("train_ranks.py", 2, commands, kills=kills, seed=seed, timeout=1700)
    wanted = standing(folders[0])
    for folder, (first, second) in zip(folders, found, strict=False):
        assert first == second
        assert {key: first[name][key] for key in whole} == whole
        assert standing(folder) == wanted


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_one_rank_killed_at_twenty_random_instants(name: str, answers: Any, place: Path) -> None:
    """Whichever rank it was, and whenever: the run goes on with the same command, to the same weights, charged once."""
    kill_at_random(name, place, answers[0][name], kills=20, seed=4)


def test_a_rank_of_a_sharded_model_killed_at_random(answers: Any, place: Path) -> None:
    kill_at_random("sharded", place, answers[0]["sharded"], kills=3, seed=1)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_divide_the_sample_of_one_process(size: int) -> None:
    """The same contributions, examples and counts, each contribution whole on one rank."""
    corpus, plan = problem.corpus(examples_per_unit=2), problem.plan(problem.net())
    seed, caps = bytes(range(32)), {"clinical": 3}

    def sampler(ranks: Ranks) -> Sampler:
        return Sampler(corpus, plan, seed=seed, max_occurrences=caps, ranks=ranks)

    whole, parts = sampler(Ranks()), [sampler(Ranks(rank, size)) for rank in range(size)]
    for step in range(6):
        batch = whole.draw(step)
        drawn = [part.draw(step) for part in parts]
        assert sum(map(len, drawn)) == len(batch)
        for rank, part in enumerate(drawn):
            assert torch.equal(part.x, batch.shard(rank, size).x) and torch.equal(part.cls, batch.cls[rank::size])
            assert part.draw.ranks == size
        assert all(np.array_equal(part.counts, whole.counts) for part in parts)
