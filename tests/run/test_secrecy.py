"""Nothing that depends on who was sampled, or on a private loss, reaches a file, a log or a screen.

Two runs that differ in nothing but their secret seeds have different coins, batch sizes, losses and norms. Whatever
they leave must be the same in both, the weights excepted, which are private. So nothing of it can tell a secret.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from open_charges import open_charges, public_records
from refusals import raises_code
from run_state import set_seeds

from lamina import Batch, Engine
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.run.sampler import Sampler
from lamina.run.training_checkpoint import TrainingCheckpoints


class Secrets:
    """What a run knew: collected where it arises, to be looked for where it must not be."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.losses: list[torch.Tensor] = []
        self.seeds: list[bytes] = []


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Secrets:
    known = Secrets()
    draw, backward = Sampler.draw, Engine.backward

    def drawn(self: Sampler, step: int) -> Batch:
        batch = draw(self, step)
        known.sizes.append(len(batch))
        return batch

    def taken(self: Engine, losses: torch.Tensor | None, batch: Batch) -> None:
        if losses is not None:
            known.losses.append(losses.detach().clone())
        backward(self, losses, batch)

    def seeded() -> bytes:
        known.seeds.append(os.urandom(32))
        return known.seeds[-1]

    monkeypatch.setattr(Sampler, "draw", drawn)
    monkeypatch.setattr(Engine, "backward", taken)
    set_seeds(monkeypatch, seeded)
    return known


def leaves(folder: Path) -> list[Any]:
    """Every leaf of the ledger, and what its store keeps beside the leaves; what is random by design is put aside."""
    with LedgerReader.read_only(folder / "ledger.db") as view:
        found = []
        for leaf in view.leaves():
            fields = asdict(leaf.record)
            for name in ("run", "previous", "keys", "signatures", "files"):  # files: the digests of its weights
                fields.pop(name, None)
            for segment in fields.get("segments", ()):
                segment.pop("nonce")
            clock = view.header.epoch_clock if leaf.kind is Epoch else 1
            assert leaf.time % clock == 0 or leaf.time == view.leaf(0).time  # an hour at best, never how long it took
            found.append([leaf.kind.__name__, leaf.seq, leaf.epoch, fields])
        assert open_charges(view) == []
        with view.store.read() as rows:
            found += [[run.label, run.finished] for run in rows.runs()]
            found.append(sorted(rows.terms()))
    return found


def left(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves but its weights, with what is random by design put aside."""
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["run"], metrics["files"]  # its name, and the digests of its weights
    states = []
    checkpoints = TrainingCheckpoints(folder / "checkpoint")
    for index in checkpoints.indices():
        snapshot, _ = checkpoints.load(index)
        state = {k: v for k, v in snapshot.state.items() if k not in ("run", "nonce", "order")}
        states.append([state, {name: (t.dtype, t.shape) for name, t in snapshot.tensors.items()}])
    names = sorted((str(p.relative_to(folder)), p.stat().st_size) for p in folder.rglob("*") if p.is_file())
    return {
        "metrics": metrics,
        "attempts": public_records(folder),
        "checkpoints": states,
        "ledger": leaves(folder),
        "files": names,
    }


def test_what_two_runs_leave_does_not_depend_on_their_coins(
    tmp_path: Path, secrets: Secrets, capfd: pytest.CaptureFixture[str]
) -> None:
    printed, found = [], []
    for name in ("one", "two"):
        problem.trainer(tmp_path / name / "a", progress=True, ema=0.9, microbatches=2).fit()
        out, err = capfd.readouterr()
        printed.append((out, err))
        found.append(left(tmp_path / name / "a"))
    assert len(set(secrets.sizes)) > 5  # there was something to hide
    assert secrets.sizes[:24] != secrets.sizes[24:]
    assert printed[0] == printed[1]
    assert printed[0][0] == "" and "step 24 of 24" in printed[0][1]
    for part in found[0]:
        assert found[0][part] == found[1][part], part


def test_no_seed_loss_or_name_is_found_anywhere(
    tmp_path: Path, secrets: Secrets, capfd: pytest.CaptureFixture[str]
) -> None:
    data = problem.data()
    names = [f"patient-{hashlib.sha256(bytes([i % 256, i // 256])).hexdigest()[:8]}" for i in range(400)]
    corpus = problem.corpus(**{**data, "unit": [names[i] for i in data["unit"]]})
    for place in (tmp_path / "one", tmp_path / "two"):
        secrets.seeds.clear()
        secrets.losses.clear()
        outcome = problem.trainer(place / "a", progress=True, corpus=corpus).fit()
        out, err = capfd.readouterr()
        texts = [out.encode(), err.encode(), repr(outcome).encode(), str(outcome).encode(), repr(corpus).encode()]
        texts += [p.read_bytes() for p in place.rglob("*") if p.is_file()]
        everything = b"\0".join(texts)
        assert len(secrets.seeds) == 5
        for seed in secrets.seeds:
            for form in (seed, seed[:12], seed.hex().encode(), seed[:12].hex().encode()):
                assert form not in everything
        short = []
        for losses in secrets.losses:
            for value in (losses.mean(), losses.sum(), losses.double().mean()):
                assert value.double().numpy().tobytes() not in everything
                short += [value] if value.numpy().tobytes() in everything else []
                assert f"{float(value):.4f}".encode() not in out.encode() + err.encode()
                text = f"{float(value):.6g}".encode()  # a round number is found in random bytes, too
                assert (text if len(text) > 5 else f"{float(value):.6f}".encode()) not in everything
        for name in names:
            assert name.encode() not in everything
        if not short:
            break
    assert not short  # four bytes may be among random bytes by chance, but hardly in two runs


def test_an_error_in_a_step_is_told_without_its_text(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = problem.loss(output, y)
        return losses if len(losses) <= 6 else losses[:1]  # right in the rehearsal, wrong later

    with raises_code("train.error-text-withheld") as caught:
        problem.trainer(tmp_path / "a", loss_fn=loss).fit()
    assert not any(letter.isdigit() for letter in caught.value.problem.partition(" at ")[0])
    assert "examples" not in caught.value.problem

    def broken(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(y) > 6:
            raise ValueError(f"{len(y)} rows, first {float(output.detach()[0, 0])}")
        return problem.loss(output, y)

    with raises_code("train.error-text-withheld") as caught:
        problem.trainer(tmp_path_factory.mktemp("other") / "b", loss_fn=broken).fit()
    assert "rows, first" not in str(caught.value)


def test_a_warning_in_a_step_is_told_without_its_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    import warnings

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        warnings.warn(f"hidden {len(y)}", UserWarning, stacklevel=1)
        return problem.loss(output, y)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        problem.trainer(tmp_path / "a", loss_fn=loss, progress=True).fit()
    err = capfd.readouterr().err
    assert err.count("warning: UserWarning at") == 5  # once a segment
    assert "hidden" not in err
