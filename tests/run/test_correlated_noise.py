"""Runs whose noise is correlated over steps: killed and resumed, redone, recorded, verified and certified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problem
import pytest
from build import header
from refusals import raises_code
from safetensors.torch import load_file
from stopping import During, copied, figures, killed, same, told, weights

from lamina.account import find_accountant
from lamina.account.schedule import Event
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch, EpochAccount, Segment, SegmentOutcome
from lamina.ledger.verify.epoch_checks import ChargeChecks, Violation
from lamina.ledger.verify.verifier import verify
from lamina.plan.correlation import coefficients_digest
from lamina.release.certificate import certify
from lamina.release.risk_statements import texts
from lamina.run.run_output import Callback, RunFigures
from lamina.run.trainer import Trainer

pytestmark = pytest.mark.usefixtures("known_seeds")

BANDS = 4
POLICY = f'{problem.POLICY}\n[noise]\ncorrelation = "banded"\nbands = {BANDS}\n'


def parts(bands: int = BANDS, **options: Any) -> dict[str, Any]:
    policy = POLICY.replace(f"bands = {BANDS}", f"bands = {bands}")
    return {"plan": problem.plan(problem.net(), policy=policy, **options), "corpus": problem.corpus(policy=policy)}


def window(folder: Path, back: int = 1) -> dict[str, Any]:
    """The noise in the newest checkpoint of a run, or in one before it."""
    found = load_file(sorted((folder / "checkpoint").glob("*.safetensors"))[-back])
    return {name: tensor for name, tensor in found.items() if name.startswith("noise.")}


@pytest.mark.parametrize("step", [5, 9, 13])
def test_a_killed_run_resumes_exactly(tmp_path: Path, step: int) -> None:
    """In the first turn of a segment, and later: past noise comes from the checkpoint, bit for bit."""
    whole = problem.trainer(tmp_path / "whole" / "a", **parts())
    expected = whole.fit()
    killed(tmp_path / "cut" / "a", step, **parts())
    resumed = problem.trainer(tmp_path / "cut" / "a", seed=9, **parts())
    outcome = resumed.fit()
    assert same(weights(whole), weights(resumed)) and outcome.notes == ()
    assert outcome.epsilon == expected.epsilon and outcome.epsilon["clinical"] == pytest.approx(4.0, rel=1e-3)
    assert same(window(tmp_path / "whole" / "a", back=2), window(tmp_path / "cut" / "a", back=2))


def test_the_ledger_verifies_and_the_certificate_names_the_strategy(tmp_path: Path) -> None:
    run = problem.trainer(tmp_path / "a", **parts())
    run.fit()
    with LedgerReader.read_only(next(tmp_path.glob("*.ledger.db"))) as ledger:
        assert verify(ledger.store).verdict == "self-consistent"
        epochs = [leaf.record for leaf in ledger.leaves() if isinstance(leaf.record, Epoch)]
        found = certify(tmp_path / "a", ledger).content
    cuts = [(each.first, each.last) for epoch in epochs for each in epoch.segments]
    assert cuts == [(0, 8), (8, 16), (16, 24)]  # of 5 steps each, made whole turns
    charged = [c for epoch in epochs for a in epoch.accounts if a.bound == ("clinical", 0, 0) for c in a.charges]
    assert [(c.q, c.steps) for c in charged] == [(pytest.approx(0.4), 2)] * 3
    assert found["plan"]["correlation"]["coefficients_sha256"] == coefficients_digest(BANDS).hex()
    assert found["plan"]["correlation"]["bands"] == BANDS
    assert any("take turns" in line for line in texts(found, "assumption"))
    clinical = found["classes"]["clinical"]
    assert clinical["epsilon_replace_one"] is None  # with other content, somebody may have another turn
    assert clinical["content"]["adjacency"] == "replace-one, as two add/remove steps"
    assert figures(tmp_path / "a")["classes"]["clinical"]["epsilon_replace_one"] is None
    assert clinical["epsilon"] == pytest.approx(4.0, rel=1e-3) and clinical["rho"] == pytest.approx(
        6 / (2 * run.plan.sigma("clinical") ** 2)
    )


def test_past_noise_is_in_the_private_checkpoint_and_in_nothing_that_leaves(tmp_path: Path) -> None:
    run = problem.trainer(tmp_path / "a", **parts())
    run.fit()
    kept = window(tmp_path / "a", back=2)
    assert len({name.split(".")[1] for name in kept}) == BANDS - 1
    assert window(tmp_path / "a") == {}  # after the last step no noise follows from it
    (newest,) = [max((tmp_path / "a" / "checkpoint").glob("*.safetensors"))]
    assert newest.stat().st_mode & 0o077 == 0
    released = load_file(tmp_path / "a" / "model.safetensors")
    assert set(released) == set(run.model.state_dict())
    assert "noise." not in str(sorted(figures(tmp_path / "a")))


def remembered(trainer: Trainer, step: int) -> list[int]:
    """How many steps its noise remembers after this step, once it was taken."""
    found: list[int] = []
    trainer.progress = During({step: lambda: found.append(len(trainer.state.mechanism))})
    return found


def loose(**options: Any) -> dict[str, Any]:
    """Under bounds with room for steps that are done again."""
    return {**parts(), "corpus": problem.unpromised(), "bounds": {"clinical": 30.0, "sensitive": 30.0}, **options}


def charged(folder: Path) -> int:
    with LedgerReader.read_only(next(folder.glob("*.ledger.db"))) as ledger:
        assert verify(ledger.store).problem is None
        accounts = [a for leaf in ledger.of_kind(Epoch) for a in leaf.record.accounts]  # type: ignore[attr-defined]
    return sum(charge.steps for a in accounts if a.bound == ("clinical", 0, 0) for charge in a.charges)


def test_steps_that_are_replayed_go_on_from_past_noise(tmp_path: Path) -> None:
    killed(tmp_path / "a", 13, **loose())
    resumed = problem.trainer(tmp_path / "a", **loose())
    found = remembered(resumed, 9)
    assert not told(resumed.fit(), "charged again") and found == [BANDS - 1]
    assert charged(tmp_path) == 6


def test_steps_that_are_done_again_begin_a_new_strategy_and_are_charged(tmp_path: Path) -> None:
    """Past noise was used by the attempt that was given up: used twice, it would leave tails of columns under new noise."""
    killed(tmp_path / "a", 13, **loose())
    redone = problem.trainer(tmp_path / "a", **loose(microbatches=2))
    found = remembered(redone, 9)
    assert told(redone.fit(), "charged again") and found == [1]
    assert charged(tmp_path) == 8


def test_a_copy_begins_a_new_strategy_too(tmp_path: Path) -> None:
    killed(tmp_path / "a", 13, **loose())
    copy = copied(tmp_path / "a", "b")
    problem.trainer(tmp_path / "a", **loose()).fit()
    with raises_code("train.folder-behind-ledger"):
        problem.trainer(copy, **loose()).fit()
    second = problem.trainer(copy, **loose(take_over=True))
    found = remembered(second, 9)
    second.fit()
    assert found == [1] and charged(tmp_path) == 6 + 4


def test_another_plan_does_not_go_on_from_the_noise_of_the_first(tmp_path: Path) -> None:
    killed(tmp_path / "a", 8, **loose())
    other = problem.trainer(tmp_path / "a", **loose(plan=parts(bands=2)["plan"]))
    found = remembered(other, 9)
    outcome = other.fit()
    assert found == [1] and told(outcome, "not correlated with that of the steps before")


class Interrupt(Callback):
    def on_segment(self, now: RunFigures) -> None:
        raise KeyboardInterrupt


def test_contributions_that_are_called_otherwise_do_not_go_on_from_past_noise(tmp_path: Path) -> None:
    """Their turns are others: somebody could come again before the rows of the last time have ended."""
    with pytest.raises(KeyboardInterrupt):
        problem.trainer(tmp_path / "a", **loose(callbacks=[Interrupt()])).fit()
    renamed = problem.trainer(tmp_path / "a", **loose(corpus=problem.unpromised(unit=problem.data()["unit"] + 1000)))
    found = remembered(renamed, 9)
    assert told(renamed.fit(), "not correlated with that of the steps before") and found == [1]


def test_a_run_that_goes_on_with_independent_noise_still_says_that_turns_were_taken(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        problem.trainer(tmp_path / "a", **loose(callbacks=[Interrupt()])).fit()
    problem.trainer(tmp_path / "a", **loose(plan=problem.plan(problem.net()))).fit()
    with LedgerReader.read_only(next(tmp_path.glob("*.ledger.db"))) as ledger:
        found = certify(tmp_path / "a", ledger).content
    assert "correlation" not in found["plan"] and any("take turns" in line for line in texts(found, "assumption"))
    assert found["classes"]["clinical"]["epsilon_replace_one"] is None


def test_hardened_noise_resumes_exactly(tmp_path: Path) -> None:
    whole = problem.trainer(tmp_path / "whole" / "a", hardened=True, **parts())
    whole.fit()
    killed(tmp_path / "cut" / "a", 13, hardened=True, **parts())
    resumed = problem.trainer(tmp_path / "cut" / "a", hardened=True, **parts())
    resumed.fit()
    assert same(weights(whole), weights(resumed))


def test_bounds_that_end_a_run_early_end_it_after_whole_turns(tmp_path: Path) -> None:
    """Room for 5 turns is room for 20 steps."""
    options = loose()
    plan = options["plan"]
    five = find_accountant("pld").epsilon(plan.schedule_between("clinical", 0, 20), 1e-5)
    killed(tmp_path / "a", 6, **options, segment=4)
    resumed = problem.trainer(
        tmp_path / "a", **{**options, "bounds": {"clinical": five * 1.001, "sensitive": 30.0}}, segment=4
    )
    outcome = resumed.fit()
    assert told(outcome, "the bounds allow 20 of 24 steps") and outcome.steps == 20


@pytest.mark.parametrize(
    ("rate", "steps", "right"), [(0.4, 2, True), (0.4, 1, False), (0.1, 2, False), (0.1, 8, False)]
)
def test_a_verifier_asks_for_every_turn_at_its_rate(rate: float, steps: int, right: bool) -> None:
    """Eight steps of four bands are two events at four times the rate: not fewer, and not those of independent noise."""
    plan = parts()["plan"]
    charge = Event(sigma=plan.sigma("clinical"), q=rate, steps=steps)
    account = EpochAccount(cls="clinical", charges=(charge,), spend=10**9)
    segment = Segment(
        index=0, generation=0, nonce=bytes(16), first=0, last=8, eligibility=1, outcome=SegmentOutcome.CLOSED
    )
    variance = tuple(s * s for s in plan.noise)
    epoch = Epoch(
        run=bytes(16), segments=(segment,), plan=plan.digest(), variance=variance, accounts=(account,), state=bytes(32)
    )
    checks = ChargeChecks(header())
    checks.begin(epoch, plan)
    assert isinstance(checks.counted(epoch, plan, account), Violation) is not right


def test_caps_are_refused(tmp_path: Path) -> None:
    with raises_code("corpus.max-occurrences-correlated"):
        problem.trainer(tmp_path / "a", max_occurrences={"clinical": 2}, **parts())


def test_bands_are_those_of_the_ledger_whatever_the_folder_says(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", **parts()).fit()
    path = tmp_path / "a" / "plan.cbor"
    before, named, after = path.read_bytes().partition(b"ebands")
    assert named and after[0] == BANDS
    path.write_bytes(before + named + bytes([8]) + after[1:])
    with LedgerReader.read_only(next(tmp_path.glob("*.ledger.db"))) as ledger:
        found = certify(tmp_path / "a", ledger).content
    assert found["plan"]["correlation"]["bands"] == BANDS
    assert found["plan"]["sha256"] == parts()["plan"].digest().hex()
