"""The benchmark from end to end on small models: the keys that machines read, reasons beside nulls, real steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from refusals import raises_code

from lamina.bench import step_cost, step_variants, workloads
from lamina.bench.benchmark import BenchSettings, draw_benchmark, lamina_failures, run_benchmark
from lamina.bench.workloads import WORKLOADS, Workload, squared_error
from lamina.engine.execute import compiled
from lamina.errors import LaminaError
from lamina.signals.autoencoders import MLPAutoencoder


def tiny(name: str) -> Workload:
    return Workload(
        name=name,
        batch=8,
        about="tiny",
        build=lambda: MLPAutoencoder((12, 8, 6, 4, 2)),
        data=lambda n: (torch.ones(n, 12), torch.ones(n, 12)),
        losses=squared_error,
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("resae", "cnn"):
        monkeypatch.setitem(WORKLOADS, name, tiny(name))


SMALL = BenchSettings(workloads=("resae", "cnn"), rounds=2, minimum=2, memory=False, compiled=False)


@pytest.mark.usefixtures("small")
def test_keys_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_variants, "opacus_missing", lambda: "opacus is not installed here")
    result = json.loads(json.dumps(run_benchmark(SMALL), allow_nan=False))
    assert {"median_time_ratio", "worst_time_ratio", "worst_memory_ratio", "workloads", "routing"} <= result.keys()
    assert set(result["workloads"]) == {"resae", "cnn"}
    assert {"mask_overhead", "restricted_ratio"} <= result["routing"].keys()
    assert result["worst_time_ratio"] >= result["median_time_ratio"] > 0
    assert result["routing"]["restricted_ratio"] > 0
    assert result["units"]["ratio"] > 0 and set(result["units"]["detail"]) == {"resae", "cnn"}
    assert result["torch_rules"]["median_time_ratio"] > 0 and result["about"]["kernels"]
    for found in result["workloads"].values():
        assert {"time_ratio", "memory_ratio", "peers"} <= found.keys()
        assert found["time_ratio"] >= found["detail"]["box"]["time"]["median"]
        assert found["peers"] == dict.fromkeys(step_variants.PEERS)
        assert all(found["reasons"][peer] == "opacus is not installed here" for peer in step_variants.PEERS)
    assert lamina_failures(result) == []


@pytest.mark.usefixtures("small")
def test_a_step_of_ours_that_fails_is_a_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(workload: Workload) -> step_variants.Step:
        raise LaminaError("engine.on-fire", "the engine is on fire", "put it out")

    monkeypatch.setitem(step_variants.VARIANTS, "box", broken)
    monkeypatch.setattr(step_variants, "opacus_missing", lambda: "opacus is not installed here")
    result = run_benchmark(SMALL)
    assert result["median_time_ratio"] is None
    assert any("on fire" in line for line in lamina_failures(result))


@pytest.mark.usefixtures("small")
def test_the_compiled_step_is_measured_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(step_variants, "opacus_missing", lambda: "opacus is not installed here")
    found = run_benchmark(replace(SMALL, workloads=("cnn",), compiled=True))["workloads"]["cnn"]["compiled"]
    assert found["time_ratio"] > 0 and found["of_torch_rules"] > 0 and found["compile_seconds"] > 0
    monkeypatch.setattr(compiled, "unsupported_plan", lambda plan: "graphs are forbidden")
    result = run_benchmark(replace(SMALL, workloads=("cnn",), compiled=True))
    assert "graphs are forbidden" in result["workloads"]["cnn"]["reasons"]["box_compiled"]
    assert result["workloads"]["cnn"]["compiled"]["time_ratio"] is None and lamina_failures(result) == []


def test_processor_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "cnn", tiny("cnn"))
    monkeypatch.setattr(step_variants, "opacus_missing", lambda: "opacus is not installed here")
    result = run_benchmark(replace(SMALL, workloads=("cnn",), processor_time=True))
    assert result["about"]["clock"] == "processor" and result["median_time_ratio"] > 0


def test_every_variant_of_ours_trains() -> None:
    own = {**step_variants.LAMINA, **step_variants.TORCH_RULES, **step_variants.UNITS, **step_variants.ROUTING}
    for name, make in {**own, "plain": step_variants.plain_step}.items():
        step = make(tiny("cnn"))
        step()
        step()
        assert name in step_variants.VARIANTS


def test_restricted_leaves_the_lower_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    each, made = tiny("cnn"), []
    monkeypatch.setattr(Workload, "model", lambda self: made.append(self.build()) or made[-1])
    step = step_variants.VARIANTS["restricted"](each)
    before = {name: p.clone() for name, p in made[-1].named_parameters()}
    step()
    moved = [name for name, p in made[-1].named_parameters() if not torch.equal(p, before[name])]
    assert moved
    assert all(name.startswith("decoder.") for name in moved)
    assert len(moved) <= len(before) // 4


@pytest.mark.parametrize("peer", sorted(step_variants.PEERS))
def test_peers_clip_and_noise_on_a_small_model(peer: str) -> None:
    if reason := step_variants.opacus_missing():
        pytest.skip(reason)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = step_variants.PEERS[peer](tiny("cnn"))
        step()
        step()


def test_workloads_have_the_shapes_that_they_claim() -> None:
    for each in WORKLOADS.values():
        if each.missing():
            continue
        x, target = each.data(2)
        losses = each.losses(each.model()(x), target)
        assert losses.shape == (2,)
    with raises_code("bench.workload-not-known"):
        workloads.find_workload("nope")


def test_every_variant_starts_from_the_same_weights() -> None:
    each = WORKLOADS["cnn"]
    first, second = each.model().state_dict(), each.model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_state_bytes_counts_parameters_moments_and_batch() -> None:
    each = tiny("cnn")
    size = sum(p.numel() for p in each.build().parameters())
    assert step_cost.state_bytes(each) == 4 * (3 * size + 2 * 8 * 12)


@pytest.mark.slow
def test_memory_sees_per_sample_gradients() -> None:
    """A step that keeps 32 copies of the parameters must measure as that much more."""
    found = step_cost.measure_memory([("mlp_b32", "plain"), ("mlp_b32", "box"), ("mlp_b32", "nonsense")], threads=2)
    plain, box = found["mlp_b32", "plain"], found["mlp_b32", "box"]
    assert isinstance(plain, int)
    assert isinstance(box, int)
    gradients = 4 * sum(p.numel() for p in WORKLOADS["mlp_b32"].model().parameters())
    assert gradients < plain < 4 * gradients
    assert gradients < box < 4 * gradients
    assert "not known" in str(found["mlp_b32", "nonsense"])


def test_memory_stops_when_its_time_is_over() -> None:
    found = step_cost.measure_memory([("cnn", "plain")], threads=1, seconds=0.01)
    assert "were over" in str(found["cnn", "plain"])


@pytest.mark.usefixtures("small")
def test_picture(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(step_variants, "opacus_missing", lambda: "opacus is not installed here")
    path = draw_benchmark(run_benchmark(SMALL), tmp_path / "step.png")
    assert path.read_bytes().startswith(b"\x89PNG")
