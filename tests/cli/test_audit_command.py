"""`lamina audit step`: the audit of a run's step as a command; and [layers] and [loggers] of a RUN.toml."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import pytest
from asking import answer, refused, succeeded
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

if TYPE_CHECKING:
    from conftest import Project

AUDIT = ("audit", "step", "first.toml", "--input", "4", "--quick")


@pytest.fixture
def asked(project: Project) -> Project:
    project.monkeypatch.chdir(project.folder)
    project.write("first.toml", project.run)
    return project


def test_a_sound_step_passes_and_spends_nothing(asked: Project) -> None:
    found = json.loads(succeeded(asked.call(*AUDIT, "--json")))
    assert found["passed"] is True and found["proxy"].startswith("simulated: Gaussian")
    names = {check["name"] for check in found["checks"]}
    assert {"sensitivity/clinical", "routing/clinical", "noise/clinical", "untouched", "independence/slot"} <= names
    bound = next(check for check in found["checks"] if check["name"] == "sensitivity/clinical")
    assert 0.99 < bound["lower_bound"] / bound["claimed"] <= 1.0
    assert not (asked.folder / "runs").exists()


def test_a_printed_step_is_refuted_on_simulated_data(asked: Project) -> None:
    module = (asked.folder / f"{asked.module}.py").read_text()
    asked.write(f"{asked.module}.py", module + "\ndef data():\n    return PUBLIC, (PUBLIC[:, 0] > 0).long()\n")
    asked.write("first.toml", asked.run.replace("batch = 12", 'allocate = "printed-ladp"\nbatch = 12'))
    code, out, _ = asked.call(*AUDIT[:3], "--quick", "--proxy", f"simulated:{asked.module}:data")
    assert code == 1 and "FAILED: a claim is refuted" in out and "is true" in out
    refused(asked.call(*AUDIT, "--proxy", "private:x:y"), "cli.proxy-not-known")


ATTENTION = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).view(-1, 2, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(torch.softmax(q @ k.transpose(1, 2), 2).matmul(v).flatten(1))

def build(width=4):
    return nn.Sequential(Own(), nn.Tanh(), nn.Linear(4, 2))
"""


def test_layers_are_grouped_and_heads_are_named_in_the_run_file(asked: Project) -> None:
    asked.write(f"{asked.module}.py", ATTENTION)
    by_module = [row["name"] for row in json.loads(succeeded(asked.call("plan", "first.toml", "--json")))["layers"]]
    assert by_module == ["0.q_proj", "0.k_proj", "0.v_proj", "0.out_proj", "2"]
    asked.write("first.toml", asked.run + '\n[layers]\ngroup = { attention = ["0.*"] }\n')
    grouped = [row["name"] for row in json.loads(succeeded(asked.call("plan", "first.toml", "--json")))["layers"]]
    assert grouped == ["attention", "2"]
    assert answer(asked.call("train", "first.toml", "--json"))["steps"] == 6
    asked.write(
        "policy.toml", (asked.folder / "policy.toml").read_text() + 'profile = { heads = [0], layers = ["0.*"] }\n'
    )
    asked.write("first.toml", asked.run.replace("steps = 6", 'steps = 6\noutput = "runs/heads"'))
    refused(asked.call("plan", "first.toml"), "allocate.profile-refused")
    asked.write(
        "first.toml",
        asked.run.replace("steps = 6", 'steps = 6\noutput = "runs/heads"') + '\n[layers]\nheads = { "0" = 2 }\n',
    )
    planned = json.loads(succeeded(asked.call("plan", "first.toml", "--json")))
    ranges = {part["tensor"]: part["ranges"] for part in planned["slices"]}
    assert ranges["0.q_proj.weight"] == [[0, 2]]
    assert json.loads(succeeded(asked.call(*AUDIT, "--json")))["passed"] is True
    refused(
        asked.call("plan", asked.write("bad.toml", asked.run + "\n[layers]\nrow = 2\n").name), "plan.policy-invalid"
    )


def test_trackers_of_the_run_file_get_public_figures_and_public_weights(asked: Project) -> None:
    asked.monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    table = '\n[loggers]\ntensorboard = { folder = "board" }\nmlflow = { store = "tracked" }\ncheckpoints = true\n'
    asked.write("first.toml", asked.run + table)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = answer(asked.call("train", "first.toml", "--json"))
        client = MlflowClient(tracking_uri=str(asked.folder / "tracked"))
        (run,) = client.search_runs([client.get_experiment_by_name("lamina").experiment_id])
    assert run.data.metrics["epsilon/clinical"] == pytest.approx(found["classes"]["clinical"]["epsilon"])
    files = {path.name: path for path in (asked.folder / "tracked").rglob("*") if "artifacts" in path.parts}
    assert files["model.safetensors"].read_bytes() == (asked.folder / "runs/first/model.safetensors").read_bytes()
    assert not {name for name in files if name.endswith(".safetensors")} - {"model.safetensors"}
    events = EventAccumulator(str(asked.folder / "board"))
    events.Reload()
    assert "noise/0" in events.Tags()["scalars"]
    kept = json.loads((asked.folder / "runs" / "first" / "run.json").read_text())
    assert "loggers" not in json.dumps(kept)
    asked.write(
        "first.toml",
        asked.run.replace("steps = 6", 'steps = 6\noutput = "runs/b"') + "\n[loggers]\nmlflow = { nothing = 1 }\n",
    )
    refused(asked.call("train", "first.toml"), "train.user-code-failed")
