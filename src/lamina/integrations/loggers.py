"""Plans, profiling statistics, noise and ε of a run in TensorBoard, Weights & Biases or MLflow.

    lamina.Trainer(…, callbacks=[TensorBoard("runs/first/board", plan, measure=measure)])

One interface: a `FigureLogger` is a callback of a run, so it is told public figures only (`lamina.Callback`), and adds what was
public before the first step: the plan, and what was measured on proxy data. An adapter says where text and scalars go. The time of
a figure is its step: how long a segment took depends on who was sampled.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamina.allocate.measure.measure import Measure
from lamina.errors import RunError
from lamina.plan.step_plan import StepPlan
from lamina.run.run_output import Callback, RunFigures

_STATISTICS = ("tight", "worst", "printed", "harm", "norms", "fisher", "influence")


def plan_scalars(plan: StepPlan, measure: Measure | None = None) -> dict[str, float]:
    """What is known before the first step: by class ε, sigma and rate; by layer clip norms, noise, profiling statistics."""
    found: dict[str, float] = {"plan/batch": plan.batch, "plan/steps": float(plan.steps)}
    for k, entry in enumerate(plan.classes):
        found[f"plan/sampling_rate/{entry.name}"] = entry.sampling_rate
        if not entry.public:
            found[f"plan/epsilon/{entry.name}"] = plan.epsilon(k)
            found |= {f"clip/{entry.name}/{layer.name}": c for layer, c in zip(plan.layers, plan.clip[k], strict=True)}
    found |= {f"noise/{layer.name}": s for layer, s in zip(plan.layers, plan.noise, strict=True)}
    if measure is not None:
        for what in _STATISTICS:  # some are empty where they cannot be had
            found |= {f"profile/{what}/{n}": v for n, v in zip(measure.layers, getattr(measure, what), strict=False)}
    return found


def segment_scalars(now: RunFigures) -> dict[str, float]:
    """What a closed segment lets out: ε by class so far, the noise of every layer, figures on public data."""
    found = {f"epsilon/{name}": value for name, value in now.epsilon.items()}
    found |= {f"noise/{name}": value for name, value in now.noise.items()}
    return found | {f"evaluation/{name}": value for name, value in now.evaluation.items()}


def take_clock_away(writer: Any) -> Any:
    """Make a TensorBoard writer use the step as the time of a figure: real times depend on the sampled contributions."""
    add_scalar, add_text = writer.add_scalar, writer.add_text
    writer.add_scalar = lambda name, value, step=0: add_scalar(name, value, step, walltime=float(step))
    writer.add_text = lambda name, text, step=0: add_text(name, text, step, walltime=float(step))
    return writer


class FigureLogger(Callback, ABC):
    """Sends the plan once, and public figures after each segment, to `text` and `scalars` of an adapter.

    plan     of the run: its clip norms, noise, rates and ε
    measure  what `lamina.measure` found on proxy data, if there is one
    """

    def __init__(self, plan: StepPlan, measure: Measure | None = None) -> None:
        if not isinstance(plan, StepPlan) or not isinstance(measure, Measure | None):
            problem = f"plan is a {type(plan).__name__}, measure a {type(measure).__name__}"
            remedy = "give the StepPlan of the run, and a lamina.Measure or nothing"
            raise RunError("integrations.not-a-plan", problem, remedy)
        self.plan, self.measure = plan, measure
        self._begun = False

    @abstractmethod
    def text(self, name: str, content: str) -> None:
        """A text that says something about the whole run."""

    @abstractmethod
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Numbers at a step."""

    def weights(self, path: Path) -> None:
        """A file of weights that the run published at its end. Not every tracker stores files."""

    def close(self) -> None:
        """End of the run: whoever made the logger closes it."""

    def on_segment(self, now: RunFigures) -> None:
        if not self._begun:
            self._begun = True
            self.text("plan", str(self.plan))
            self.text("plan.json", json.dumps(self.plan.to_dict(), ensure_ascii=False))
            self.scalars(plan_scalars(self.plan, self.measure), 0)
        self.scalars(segment_scalars(now), now.step)

    def on_evaluation(self, now: RunFigures) -> None:
        if not now.step:  # later ones come again with their segment
            self.on_segment(now)


class TensorBoard(FigureLogger):
    """Into the event files of a folder, which `tensorboard --logdir` shows."""

    def __init__(self, folder: str | Path, plan: StepPlan, measure: Measure | None = None) -> None:
        super().__init__(plan, measure)
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def text(self, name: str, content: str) -> None:
        self._writer.add_text(name, f"```\n{content}\n```")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=float(step))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(FigureLogger):
    """Into a run of W&B. `options` are those of `wandb.init`: project, name, mode="offline".

    Without the host's own statistics and without standard output: how long a step takes, and how much memory, tells how many
    were sampled.
    """

    def __init__(self, plan: StepPlan, measure: Measure | None = None, **options: Any) -> None:
        super().__init__(plan, measure)
        if "settings" in options:
            problem = "settings is given, and this logger sets it: nothing about the machine or the output may leave"
            remedy = "give what wandb.init takes beside it: project, name, mode, …"
            raise RunError("train.option-taken", problem, remedy)
        import wandb

        closed = {
            "x_disable_stats": True,
            "x_disable_meta": True,
            "console": "off",
            "disable_code": True,
            "disable_git": True,
        }
        self._run = wandb.init(**options, settings=wandb.Settings(**closed))

    def text(self, name: str, content: str) -> None:
        self._run.config.update({name: content})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step, "_timestamp": float(step)})

    def weights(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(path.stem, type="model")
        artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


class MLflow(FigureLogger):
    """Into a run of MLflow. `store` is its tracking address (a folder, or http…); options are those of `create_run`."""

    def __init__(
        self, store: str | Path, plan: StepPlan, measure: Measure | None = None, *, experiment: str = "lamina", **options: Any
    ) -> None:  # fmt: skip
        super().__init__(plan, measure)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=os.fspath(store))
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        self._run = self._client.create_run(place, **options).info.run_id

    def text(self, name: str, content: str) -> None:
        self._client.log_text(self._run, content, f"{name}.txt" if "." not in name else name)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(
                self._run, name.replace("[", "(").replace("]", ")"), value, timestamp=step, step=step
            )

    def weights(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def close(self) -> None:
        self._client.set_terminated(self._run)


LOGGERS: dict[str, type[FigureLogger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
"""By their names in the [loggers] table of a RUN.toml."""
LOCAL_PLACES = {"tensorboard": "folder", "wandb": "dir", "mlflow": "store"}
"""The argument that may name a folder, which is relative to the run file there."""
