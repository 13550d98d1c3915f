"""`lamina.signals.presets`: clip norm, learning rate, batch and steps that were chosen on simulated or public data, by task.

Choosing them by trial on private data costs ε for every trial. These were chosen elsewhere, so they cost nothing: take one
by name, in RUN.toml with `preset = "ecg-linear"`, or

    preset = lamina.signals.presets.find("ecg-linear")
    engine, corpus, plan = lamina.make_private(model, (x, y), epsilon=1.0, delta=1e-4, **preset.settings(len(x)))
    optimizer, scheduler = preset.optimizer_for(model, plan)

What each reached on real data, and what it was chosen on: docs/utility.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from lamina.errors import PlanError, needs_torch
from lamina.plan.selection import did_you_mean

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lamina.plan.step_plan import StepPlan

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Settings of a task. A step of SGD is lr·(clipped sum + noise)/B, so they hold for any number of contributions.

    task           model and features that it is for
    optimizer      "sgd" or "adam" with its arguments, and a learning rate that falls as a cosine; or "auto", that of the plan
    sampling_rate  batch over population; 1: everybody takes part in every step
    chosen_on      the public or simulated data on which all of it was chosen
    """

    name: str
    task: str
    clip_norm: float
    optimizer: Mapping[str, Any]
    sampling_rate: float
    steps: int
    ema: float | None = None
    chosen_on: str

    def batch(self, population: int) -> int:
        """Contributions expected per step."""
        return max(1, round(self.sampling_rate * population))

    def settings(self, population: int) -> dict[str, Any]:
        """What `make_private` takes: batch, steps and clip norm."""
        return {"batch": self.batch(population), "steps": self.steps, "clip_norm": self.clip_norm}

    def run_keys(self) -> dict[str, Any]:
        """What a RUN.toml would say; the batch follows from the policy's populations."""
        keys: dict[str, Any] = {"optimizer": dict(self.optimizer)}
        keys |= {} if self.optimizer["name"] == AUTO else {"scheduler": {"name": "cosine"}}
        keys |= {"steps": self.steps, "clip_norm": self.clip_norm}
        return keys if self.ema is None else keys | {"ema": self.ema}

    def optimizer_for(self, model: nn.Module, plan: StepPlan | None = None) -> tuple[Optimizer, LRScheduler]:
        """Return the optimiser of the trainable parameters and its schedule (one step per private step); "auto" needs the plan."""
        with needs_torch("lamina.signals.presets"):
            from torch import optim

            from lamina.run.optimizer import private_optimizer
        if self.optimizer["name"] == AUTO:
            if plan is None:
                problem = f"the optimiser of preset '{self.name}' follows from the plan"
                raise PlanError("plan.preset-needs-plan", problem, "give it: preset.optimizer_for(model, plan)")
            return private_optimizer(model, plan)
        arguments = {key: value for key, value in self.optimizer.items() if key != "name"}
        kind: Any = {"sgd": optim.SGD, "adam": optim.Adam}[self.optimizer["name"]]
        made = kind([p for p in model.parameters() if p.requires_grad], **arguments)
        return made, optim.lr_scheduler.CosineAnnealingLR(made, self.steps)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="ecg-linear",
            task="one linear layer on 64 directions of simulated ECG: median beats, tanh, whiten 0.25, rows of norm 1, a constant 0.3",
            clip_norm=0.03,
            optimizer={"name": "sgd", "lr": 320.0},
            sampling_rate=1.0,
            steps=100,
            chosen_on="lamina.signals.ECGSimulator, 1,200 patients; directions and whitening after a look at the PTB-XL slice",
        ),
        Preset(
            name="tabular",
            task="a table of columns in declared ranges: 32 hidden units, tanh (lamina.recipes.tabular)",
            clip_norm=0.1,
            optimizer={"name": AUTO},
            sampling_rate=0.25,
            steps=150,
            chosen_on="development tasks of benchmarks/utility/small_tasks.py, such as wine",
        ),
        Preset(
            name="image-scattering",
            task="one linear layer on 500 directions of public images after Scattering2D: whiten 0.75, rows of norm 1, a constant 0.3",
            clip_norm=0.1,
            optimizer={"name": "sgd", "lr": 256.0, "momentum": 0.9},
            sampling_rate=0.07,
            steps=300,
            chosen_on="scikit-learn's digits, enlarged, moved and turned",
        ),
        Preset(
            name="image-pretrained",
            task="one linear layer, learned on public images, on 256 directions of the codes of an ImageCNN: whiten 0.75, rows of norm 1",
            clip_norm=0.1,
            optimizer={"name": "sgd", "lr": 800.0, "momentum": 0.9},
            sampling_rate=1.0,
            steps=60,
            chosen_on="MNIST, the last 10,000 training images held out; for MNIST itself ε excludes tuning",
        ),
        Preset(
            name="autoencoder-pretrained",
            task="a deep autoencoder of beats after lamina.pretrain on simulated ones, all layers private",
            clip_norm=0.02,
            optimizer={"name": "adam", "lr": 1e-3},
            sampling_rate=0.25,
            steps=200,
            chosen_on="lamina.signals.ECGSimulator: pre-trained on its default, then private on sicker patients with more noise",
        ),
        Preset(
            name="cgm-pretrained",
            task="a stacked autoencoder of days of glucose after lamina.pretrain on simulated ones: its last two layers private",
            clip_norm=0.02,
            optimizer={"name": "adam", "lr": 3e-4},
            sampling_rate=1.0,
            steps=50,
            chosen_on="lamina.signals.CGMSimulator: pre-trained on its default, then private on 140 patients of higher glucose",
        ),
    )
}


def run_files() -> dict[str, str]:
    """Run files with the settings of Tables 3 and 4 of the LSAB paper, by name: 'paper-ptbxl' and so on."""
    folder = resources.files("lamina.signals") / "paper_runs"
    found = {each.name.removesuffix(".toml"): each for each in folder.iterdir() if each.name.endswith(".toml")}
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}


def run_file(name: str) -> str:
    """The text of a run file of the paper."""
    if name in PRESETS:
        problem = f"preset '{name}' has settings, and no model and data"
        raise PlanError("plan.preset-without-run", problem, f'write preset = "{name}" into a RUN.toml')
    if name not in (known := run_files()):
        problem = f"preset '{name}' is not known{did_you_mean(name, list(known))}"
        raise PlanError("plan.preset-not-known", problem, f"use one of {', '.join(known)}")
    return known[name]


def listed() -> list[tuple[str, str]]:
    """(name, what it is for) of every preset: run files of the paper, then settings by task."""
    papers = [(name, text.partition("\n")[0].removeprefix("# ").rstrip(".")) for name, text in run_files().items()]
    return [*papers, *((name, preset.task) for name, preset in PRESETS.items())]


def find(name: str) -> Preset:
    """The preset of that name."""
    if name not in PRESETS:
        problem = f"preset '{name}' is not known{did_you_mean(name, list(PRESETS))}"
        raise PlanError("plan.preset-not-known", problem, f"use one of {', '.join(PRESETS)}")
    return PRESETS[name]
