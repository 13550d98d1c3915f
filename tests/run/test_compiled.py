"""`compiled=True` in a run: exact when it is killed, refused where most steps would not be compiled."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import problem
import pytest
import torch
from oracle import clip_by_hand, example_grads
from refusals import raises_code
from run_state import run_id
from stopping import killed, told
from test_kill import Killer, agrees
from torch import Tensor, nn
from torch._inductor.runtime import cache_dir_utils

from lamina import Batch, Corpus, SeededNoise, Trainer
from lamina.engine.engine import Engine
from lamina.engine.execute import compiled
from lamina.run.trainer_checks import part_sizes

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler is installed"
)
STEPS = 12


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the traced graph as it is, without the compiler."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")


@pytest.fixture(scope="module")
def killer() -> Any:
    made = Killer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(killer: Killer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The compiled run that nobody killed."""
    answer = killer.run(tmp_path_factory.mktemp("whole") / "runs" / "a", call=0, compiled="traced")
    assert answer["compiled"] >= 2 and answer["steps"] == STEPS
    return answer


def test_a_compiled_run_that_is_killed_comes_to_the_same_weights(
    killer: Killer, whole: dict[str, Any], tmp_path: Path
) -> None:
    """Before calls that change something, over the whole run; every segment is replayed by the same executors."""
    plain = killer.run(tmp_path / "plain" / "a", compiled="off")
    assert plain["epsilon"] == whole["epsilon"] and plain["weights"] != whole["weights"]  # the last bits of sums show
    for call in range(whole["calls"] // 10, whole["calls"], whole["calls"] // 8):
        place = tmp_path / f"call{call}" / "a"
        assert killer.run(place, call=call, compiled="traced")["killed"], call
        agrees(killer.run(place, compiled="traced"), whole)


@needs_compiler
def test_a_run_that_is_killed_is_exact_with_the_compiler_too(killer: Killer, tmp_path: Path) -> None:
    """One process compiles, is killed in the second segment and goes on; another one compiles anew."""
    first = killer.run(tmp_path / "first" / "a", call=0, compiled="inductor")
    place = tmp_path / "killed" / "a"
    assert killer.run(place, call=first["calls"] // 2, compiled="inductor")["killed"]
    agrees(killer.run(place, compiled="inductor"), first)


@needs_compiler
@pytest.mark.slow
def test_killed_at_several_instants_with_the_compiler(killer: Killer, tmp_path: Path) -> None:
    first = killer.run(tmp_path / "first" / "a", call=0, compiled="inductor")
    for part in (0.1, 0.3, 0.6, 0.8, 0.95):
        place = tmp_path / f"killed{part}" / "a"
        assert killer.run(place, call=int(first["calls"] * part), compiled="inductor")["killed"]
        agrees(killer.run(place, compiled="inductor"), first)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("change", ["not compiled", "another compiler"])
def test_a_segment_that_other_executors_began_is_charged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    killed(tmp_path / "a", 13, corpus=problem.singles(), compiled=True)
    monkeypatch.setattr(compiled, "compiler_version", lambda: "another one")
    resumed = problem.trainer(tmp_path / "a", seed=9, corpus=problem.singles(), compiled=change != "not compiled")
    outcome = resumed.fit()
    assert told(outcome, "charged again, because the version of the program") and "compile" in str(outcome.notes)


def silent(self: SeededNoise, totals: list[Tensor], stds: Any, *, divisor: float = 1.0, **_: Any) -> None:
    """In place of noise: what is released is the clipped sum over B."""
    for total in totals:
        total.detach().div_(divisor)


def released(
    folder: Path, monkeypatch: pytest.MonkeyPatch, corpus: Corpus
) -> tuple[list[Batch], list[dict[str, Tensor]], Trainer]:
    """Batches and gradients, without noise, of a compiled run whose weights stay as they are."""
    model = problem.net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches, grads, step = list[Batch](), list[dict[str, Tensor]](), Engine.step

    def noted(self: Engine, losses_of: Any, batch: Batch) -> Any:
        found = step(self, losses_of, batch)
        batches.append(batch)
        grads.append({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", noted)
        patch.setattr(SeededNoise, "_apply", silent)
        trainer = problem.trainer(
            folder, model=model, steps=STEPS, optimizer=optimizer, scheduler=None, run_seed=3, segment=STEPS,
            hardened=False, corpus=corpus, compiled=True,
        )  # fmt: skip
        trainer.fit()
    assert trainer._engine.compiled is not None and trainer._engine.compiled.steps == STEPS - 3
    return batches, grads, trainer


def one_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return problem.loss(model(x), y)


@pytest.mark.usefixtures("traced")
def test_compiled_steps_of_a_trainer_give_the_sums_of_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, grads, trainer = released(tmp_path / "run", monkeypatch, problem.singles())
    model, plan = trainer.model, trainer.plan
    for batch, ours in zip(batches, grads, strict=True):
        classes = cast(Tensor, batch.cls).tolist()
        expected = clip_by_hand(example_grads(model, batch.x, batch.y, one_loss), classes, plan)
        for name, total in expected.sums.items():
            off = (ours[name].double() * plan.batch - total).abs().max()
            assert float(off) <= 1e-5 * expected.sizes[name] + 1e-6


@pytest.mark.usefixtures("traced")
def test_another_payload_moves_a_compiled_step_of_a_trainer_by_no_more_than_twice_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paired-seed audit: the same seed and members, and one contribution with another payload."""
    corpus = problem.singles()
    x, _ = corpus.source.fetch(np.arange(len(corpus.source)))
    other = x.clone()
    other[100] = 100.0
    found = [
        released(tmp_path / str(i) / "run", monkeypatch, problem.singles(x=each.numpy()))
        for i, each in enumerate((x, other))
    ]
    plan, moved = found[0][2].plan, []
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        norms = []
        for layer in plan.layers:
            parts = [(ours[name] - theirs[name]).double() * plan.batch for name in layer.parameters if name in ours]
            norms.append(sum(float(t.square().sum()) for t in parts) ** 0.5)
        moved.append(norms)
        assert math.hypot(*(n / s for n, s in zip(norms, plan.noise, strict=True))) <= 2 / plan.sigma("clinical") + 1e-4
    assert max(map(max, moved[3:])) > 1e-3


@pytest.mark.usefixtures("traced")
def test_what_would_not_be_compiled_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    refusals = {
        "train.compiled-misplaced": [
            {"corpus": problem.corpus()},
            {"corpus": problem.singles(), "views": 2, "augment": lambda x: x},
            {
                "corpus": problem.singles(),
                "engine": Engine(model := problem.net(), problem.plan(model)),
                "model": model,
            },
        ],
        "train.step-not-compiled": [
            {
                "corpus": problem.singles(),
                "loss_fn": lambda output, y: problem.loss(output, y) * (1 + bool((y > 2).any())),
            }
        ],
    }
    for code, cases in refusals.items():
        for i, options in enumerate(cases):
            folder = tmp_path / f"{code}{i}" / "run"
            with raises_code(code):
                problem.trainer(folder, compiled=True, **options).fit()
            assert not (folder / "run.cbor").exists()
    model.zero_grad()


def test_a_plan_that_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "unsupported_plan", lambda plan: "the plan has slices")
    with raises_code("train.compiled-misplaced"):
        problem.trainer(tmp_path / "run", corpus=problem.singles(), compiled=True)


@needs_compiler
def test_the_second_process_starts_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is kept in the run's folder, and used again only if the ledger's key vouches for it."""
    folder, made = tmp_path / "runs" / "a", []
    compile_trace = compiled.compile_trace

    def counted(trace: Any, folder: Any) -> Any:
        before = set(folder.rglob("*.so"))
        found = compile_trace(trace, folder)
        made.append(len(set(folder.rglob("*.so")) - before))
        return found

    monkeypatch.setattr(compiled, "compile_trace", counted)

    def session(last: int) -> Trainer:
        trainer = problem.trainer(folder, steps=STEPS, segment=4, corpus=problem.singles(), compiled=True)

        def stop(opened: Any, *rest: Any, run: Any = trainer._run_segment) -> bool:
            if opened.first >= last:
                raise KeyboardInterrupt
            return bool(run(opened, *rest))

        monkeypatch.setattr(trainer, "_run_segment", stop)
        try:
            trainer.fit()
        except KeyboardInterrupt:
            assert last < STEPS
        return trainer

    first = session(4)
    assert made[0] > 0 and first._engine.compiled is not None
    code, digest = first._engine.compiled.code, compiled.code_digest(folder / "compiled")
    text = f"lamina/compiled/1\ntests\n{run_id(folder)}\n".encode() + digest
    assert first.ledger.signing_key().public.verify(text, code)
    assert (folder / "compiled").stat().st_mode & 0o077 == 0
    session(8)
    assert sum(made[1:]) == 0 and compiled.code_digest(folder / "compiled") == digest
    changed = next(iter(sorted((folder / "compiled").rglob("*.so"))))
    content = changed.read_bytes()
    changed.unlink()  # this process has the library loaded: another file, not other bytes under its memory
    changed.write_bytes(content + b"\0")
    done = session(STEPS)._engine.compiled
    assert done is not None and done.replaced and made[-1] > 0  # it is compiled again


def planted(folder: Path, how: str) -> None:
    """Put code beside that of a run, so that no file of the run's own code differs."""
    beside = folder.with_name("planted")
    beside.mkdir()
    (beside / "graph").write_bytes(b"planted")
    match how:
        case "link to a folder":
            (folder / "fxgraph").symlink_to(beside)
        case "link to a file":
            (folder / "graph").symlink_to(beside / "graph")
        case "pipe":
            os.mkfifo(folder / "graph")
        case "folder open to others":
            folder.chmod(0o770)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("how", ["link to a folder", "link to a file", "pipe", "folder open to others"])
def test_planted_code_is_removed_whatever_its_files_are(tmp_path: Path, how: str, begun: bool) -> None:
    trainer = problem.trainer(tmp_path / "run", corpus=problem.singles(), compiled=True)
    executor, folder = trainer._engine.compiled, tmp_path / "compiled"
    assert executor is not None
    folder.mkdir(mode=0o700)
    executor.seal_with(seal)
    if begun:
        (folder / "own").write_bytes(b"compiled here")
        executor.code = seal(compiled.code_digest(folder))
        executor._remove_other_code(folder)
        assert executor.code and (folder / "own").exists()
    planted(folder, how)
    executor._remove_other_code(folder)
    assert [*folder.iterdir()] == [] and folder.stat().st_mode & 0o777 == 0o700 and executor.replaced == begun
    folder.rmdir()
    folder.symlink_to(tmp_path / "planted")
    executor._remove_other_code(folder)
    assert not folder.is_symlink() and [*folder.iterdir()] == [] and (tmp_path / "planted" / "graph").exists()


@pytest.mark.parametrize("how", ["own", "open to others", "named by torch", "link", "chosen"])
def test_torchs_own_cache_is_used_only_if_nobody_else_can_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    shared, place = tmp_path / "shared", tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored afterwards, whoever changes it
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    shared.mkdir(mode=0o700)
    there = Path(cache_dir_utils.default_cache_dir())
    assert there.parent == place
    match how:
        case "open to others" | "named by torch":
            if how == "named by torch":
                cache_dir_utils.cache_dir()  # sets the variable
            there.mkdir(exist_ok=True)
            there.chmod(0o777)
        case "link":
            there.symlink_to(shared)
        case "chosen":
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    found = compiled._unshared_cache.__wrapped__()
    assert (found is None) == (how in ("own", "chosen"))
    if found is not None:
        assert Path(found).stat().st_mode & 0o077 == 0 and Path(found) not in (there, shared)


def seal(digest: bytes) -> bytes:
    return b"by a key" + digest


@pytest.mark.usefixtures("traced")
def test_who_writes_the_checkpoint_does_not_vouch_for_code(tmp_path: Path) -> None:
    """A folder that somebody hands over may have a checkpoint that names the planted code."""
    trainer = problem.trainer(tmp_path / "run", corpus=problem.singles(), compiled=True)
    executor, folder = trainer._engine.compiled, tmp_path / "compiled"
    assert executor is not None
    for there, asked in ((bytes, seal), (seal, None), (bytes, None)):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "graph").write_bytes(b"planted")
        executor.load_state({"code": there(compiled.code_digest(folder)), "given_up": ""})
        executor.seal_with(asked)
        executor._remove_other_code(folder)
        assert [*folder.iterdir()] == [] and executor.replaced


def test_sizes_of_parts_follow_from_the_plan() -> None:
    plan = problem.plan(problem.net())
    assert part_sizes(plan, 1) == (48, 6, 90)
    assert part_sizes(plan, 48)[0] == 2
