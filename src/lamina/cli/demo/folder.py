"""The demo's folder: a new one each time, with all that is needed to do the private run again."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from lamina.admit.keyring import KeyRing
from lamina.cli.demo.parts import loss
from lamina.cli.demo.patients import Patients, save
from lamina.cli.demo.sizes import Sizes
from lamina.cli.demo.training import ONWARD
from lamina.errors import LaminaError
from lamina.plan import StepPlan

ORIGIN = "demo.example/simulated-ecg"
DELTA = 1e-5  # well below one over the population
LEDGER = "ledger.db"

_POLICY = """\
# The demo's policy: two classes of simulated patients.

[corpus]
origin = "{origin}"
delta = {delta}                     # well below one over the population

[class.volunteer]                 # gave their recordings to the public: they train every layer and cost nothing
public = true
population = {volunteers}
unit = "patient"

[class.sensitive]                 # only the top quarter of the layers, under ε = 3 per patient
population = {sensitive}
epsilon = 3.0
clip_norm = 1.0
profile = {{ top = 0.25 }}
unit = "patient"
"""

_RUN = """\
# The demo's private run, to do again:   cd {folder} && lamina train RUN.toml
# It checks every signature again, and begins a ledger of its own. With ledger = "ledger.db" it is refused: these
# patients' ε is spent.

policy = "policy.toml"
model = {{ factory = "lamina.cli.demo.parts:started", args = {{ weights = "start.safetensors" }} }}
loss = "lamina.cli.demo.parts:loss"       # cross entropy + {weight:g} · mean squared residual, one per window
optimizer = {{ name = "adam", lr = {lr}, eps = {eps} }}
scheduler = "one_cycle"
batch = {{ volunteer = {volunteer_batch}, sensitive = {sensitive_batch} }}
steps = {steps}
threads = 1                       # tensors this small only make threads wait for each other
output = "again"
ledger = "again.ledger.db"

[data]
kind = "folder"
path = "contributions"
examples_per_unit = 1             # one window of each sampled patient, drawn afresh at every step

[admit]
keys = "keys.json"                # public keys of the two hospitals; the private ones were forgotten

[evaluate]
function = "lamina.cli.demo.parts:evaluate"
on = "simulated"
"""


def policy_text(sizes: Sizes) -> str:
    return _POLICY.format(origin=ORIGIN, delta=DELTA, volunteers=sizes.volunteers, sensitive=sizes.sensitive)


def run_text(sizes: Sizes, folder: Path) -> str:
    return _RUN.format(
        folder=folder,
        weight=loss.weight,
        lr=ONWARD.lr,
        eps=ONWARD.eps,
        volunteer_batch=sizes.volunteer_batch,
        sensitive_batch=sizes.sensitive_batch,
        steps=sizes.steps,
    )


def fresh(wanted: Path) -> Path:
    """Make WANTED, or WANTED-2, WANTED-3, … if there is something in it already. Nothing is ever removed."""
    folder, number = wanted, 1
    while folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaminaError(
            "cli.folder-not-made",
            f"the folder '{folder}' cannot be made: {error.strerror or error}",
            "choose one that can be written: lamina demo --folder PATH",
        ) from error
    return folder


def write_inputs(
    folder: Path, sizes: Sizes, patients: Patients, ring: KeyRing, start: nn.Module, plan: StepPlan
) -> None:
    """Everything that RUN.toml names, and the plan to read."""
    (folder / "policy.toml").write_text(policy_text(sizes), encoding="utf-8")
    (folder / "RUN.toml").write_text(run_text(sizes, folder), encoding="utf-8")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    ring.save(folder / "keys.json")
    save(patients.test, folder / "test.npz")
    save_file({name: t.contiguous() for name, t in start.state_dict().items()}, folder / "start.safetensors")
