"""What leaves a run: figures on public data (`Evaluation`), ε by class, metrics.json, the weights.

And the `Outcome`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina.account.accountants import cost, find_accountant
from lamina.account.charges import Account
from lamina.account.schedule import Schedule
from lamina.engine.batch import model_device, to_device
from lamina.engine.distributed import is_sharded_model
from lamina.engine.probe import preserve_global_generators, seed_global_generators
from lamina.errors import RunError
from lamina.ledger.reader import LedgerReader
from lamina.ledger.run_records import EVALUATION, WEIGHTS, stated_conditions
from lamina.plan.charges import follows_budget
from lamina.plan.layer_stack import call_arguments
from lamina.plan.rules import FollowBudget
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import epsilon_text, finite_or_none, preformatted
from lamina.release.certificate import Certificate, certify
from lamina.release.run_evidence import file_digest
from lamina.release.utility import Figure, evaluation_file, figure_rows
from lamina.run.example_sources import ExampleSource, make_source
from lamina.run.run import Run, attempts_outside, uses_adaptive_budget
from lamina.run.run_output import Callback, Progress, RunFigures, evaluation_text, user_code
from lamina.run.segments import code_version
from lamina.run.training_checkpoint import MovingAverage, TrainingState
from lamina.validate import one_of, whole

BEST, AVERAGE = "best.safetensors", "ema.safetensors"
_SMALLER_IS_BETTER = re.compile(r"loss|nll|error|mse|mae|perplexity", re.IGNORECASE)


def model_outputs(model: nn.Module, source: ExampleSource, batch: int = 1024) -> Any:
    """Return the model's output for all examples, on the CPU."""
    parts = []
    for start in range(0, len(source), whole(RunError, "train.not-a-count", batch=batch)):
        rows = np.arange(start, min(start + batch, len(source)))
        args, named = call_arguments(to_device(source.fetch(rows)[0], model_device(model)))
        parts.append(to_device(model(*args, **named), "cpu"))
    return pytree.tree_map(lambda *each: torch.cat(each), *parts)


def _accuracy(output: Tensor, y: Tensor) -> float:
    """The share of classes that are right; of one output per example its sign decides."""
    found = output.argmax(1) if output.dim() > 1 and output.shape[1] > 1 else (output.flatten() > 0).long()
    return float((found.flatten() == y.flatten().long()).double().mean())


def _auc(output: Tensor, y: Tensor) -> float:
    """The area under the ROC curve of two classes: how often a positive scores above a negative, ties by half."""
    scores = (output[:, 1] - output[:, 0] if output.dim() > 1 and output.shape[1] == 2 else output.flatten()).double()
    positive, negative = scores[y.flatten() > 0], scores[y.flatten() <= 0].sort().values
    below, to = torch.searchsorted(negative, positive), torch.searchsorted(negative, positive, right=True)
    return float((below + to).double().mean() / (2 * len(negative)))


_FIGURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": _accuracy,
    "auc": _auc,
    "mse": lambda output, y: float((output.flatten() - y.flatten()).double().square().mean()),
    "mae": lambda output, y: float((output.flatten() - y.flatten()).double().abs().mean()),
}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of the model on data that is not protected, computed between segments.

    function  model -> {name: number}; called with the model in evaluation mode, without gradients. A `lamina.Figure` in
              place of a number has an interval and groups. A figure `equivalent_records` states on how many records
              training without privacy is as accurate. The figures of the last evaluation are in the certificate
    on        "public" or "simulated": which data the function reads. A figure on private data is a release that
              no budget paid for, and choosing by it another one, so "private" is refused
    every     after so many segments
    best      keep the weights with the largest value of this figure as best.safetensors; "-name" for the smallest
    patience  stop after so many evaluations without a new best

    The weights of a closed segment are private already, so whatever is computed from them and public data, early
    stopping and best checkpoint included, is post-processing and costs nothing.
    """

    function: Callable[[nn.Module], Mapping[str, float]]
    on: str
    every: int = 1
    best: str | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            problem = f"the evaluation's function is a {type(self.function).__name__}"
            raise RunError("train.evaluation-not-callable", problem, "give a function of the model")
        remedy = 'a figure on private data is a release without a budget: evaluate on="public" or on="simulated" data'
        one_of(RunError, "train.evaluation-on-private-data", ("public", "simulated"), on=self.on, remedy=remedy)
        whole(RunError, "train.not-a-count", every=self.every)
        if self.best is not None and _SMALLER_IS_BETTER.search(self.best) and self.best[0] not in "+-":
            problem = f"best={self.best!r} would keep the largest {self.best}"
            remedy = f'write best="-{self.best}" for the smallest, or "+{self.best}" if the largest is meant'
            raise RunError("train.best-direction", problem, remedy)
        if self.patience is not None:
            whole(RunError, "train.not-a-count", patience=self.patience)
            if self.best is None:
                problem = "patience is given without best"
                raise RunError("train.patience-without-best", problem, 'name a figure: best="auc"')

    @classmethod
    def on_data(
        cls, figure: str, x: Any, y: Any, *, on: str, patience: int | None = None, every: int = 1
    ) -> Evaluation:  # fmt: skip
        """Return the evaluation of one figure on (x, y), which also chooses best.safetensors: accuracy, auc, mse or mae.

        lamina.Trainer(…, evaluate=lamina.Evaluation.on_data("auc", x_public, y_public, on="public", patience=5))
        """
        compute = one_of(RunError, "train.figure-unknown", tuple(_FIGURES), figure=figure)
        source = make_source(x, y)

        def evaluate(model: nn.Module) -> Mapping[str, float]:
            targets = source.fetch(np.arange(len(source)))[1].cpu()
            return {figure: _FIGURES[compute](model_outputs(model, source), targets)}

        best = f"-{figure}" if _SMALLER_IS_BETTER.search(figure) else figure
        return cls(function=evaluate, on=on, every=every, best=best, patience=patience)

    def due(self, segments: int, *, last: bool) -> bool:
        return last or segments % self.every == 0

    def run(self, model: nn.Module) -> dict[str, float]:
        """The figures, checked; neither the model's mode nor the random generators are changed."""
        modes = {module: module.training for module in model.modules()}
        try:
            model.eval()
            before = [(t.data_ptr(), t._version) for t in model.state_dict(keep_vars=True).values()]
            with torch.no_grad(), preserve_global_generators():
                seed_global_generators(0)  # never where the private steps left them
                figures = self.function(model)
            if before != [(t.data_ptr(), t._version) for t in model.state_dict(keep_vars=True).values()]:
                problem = "the evaluation changed the model's weights"
                raise RunError("train.evaluation-changed-model", problem, "evaluate a copy: copy.deepcopy(model)")
        finally:
            for module, mode in modes.items():
                module.training = mode
        if not isinstance(figures, Mapping) or not figures:
            problem = f"the evaluation returned a {type(figures).__name__}"
            raise RunError("train.evaluation-not-figures", problem, 'return figures by name: {"auc": 0.91}')
        figures = {str(name): v if isinstance(v, Figure) else float(v) for name, v in figures.items()}
        for name, value in figures.items():
            if not math.isfinite(value):
                problem = f"the evaluation's figure {name!r} is {value}"
                raise RunError("train.evaluation-not-finite", problem, "return finite numbers")
        if self.best is not None and (best := self.best.lstrip("+-")) not in figures:
            problem = f"the evaluation has no figure {best!r}, which best names"
            raise RunError("train.evaluation-without-best", problem, f"choose one of {', '.join(figures)}")
        _ = list(figure_rows(figures, WEIGHTS))  # refuses names that no certificate may contain
        return figures

    def score(self, figures: Mapping[str, float]) -> float:
        """Larger is better."""
        assert self.best is not None
        value = figures[self.best.lstrip("+-")]
        return -value if self.best.startswith("-") else value

    def stops(self, scores: list[float]) -> bool:
        """Whether patience ran out: the best lies more than `patience` evaluations back."""
        return self.patience is not None and len(scores) - 1 - scores.index(max(scores)) >= self.patience


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What `fit` returns.

    epsilon   by class: what this run was charged, redone segments included
    total     by class: what all runs in the ledger were charged
    unit      by class: what ε protects
    delta     by class: the δ at which ε is stated
    private   False if anything about the run voids its guarantee
    metrics   the last evaluation on public or simulated data
    notes     everything out of the ordinary that happened, in words
    ledger    where the run was charged
    """

    run: str
    folder: Path
    steps: int
    planned: int
    epsilon: dict[str, float]
    total: dict[str, float]
    unit: dict[str, str]
    delta: dict[str, float]
    private: bool
    metrics: dict[str, float]
    notes: tuple[str, ...]
    ledger: str = ""

    @cached_property
    def certificate(self) -> Certificate:
        """The certificate of the run, not signed: `lamina certify` signs it. Verifies the ledger first."""
        with LedgerReader.read_only(self.ledger) as ledger:
            return certify(self.folder, ledger)

    def of_model(self, model: nn.Module) -> Outcome:
        """Return this outcome, to predict with the model in memory: its weights are those of the run's folder."""
        object.__setattr__(self, "_model", model)
        return self

    def predict(self, x: Any, *, batch: int = 1024) -> Any:
        """Return the model's output for x (an array, a DataFrame, a Dataset, …), on the CPU; it costs nothing.

        Of several ranks, or after the process has ended, load `folder / "model.safetensors"` into a model instead.
        """
        if (model := getattr(self, "_model", None)) is None:
            problem = f"the model of run {self.run[:8]} is not in this process"
            remedy = "load the weights into a model: model.load_state_dict(safetensors.torch.load_file(folder / 'model.safetensors'))"
            raise RunError("train.model-not-here", problem, remedy)
        modes = {module: module.training for module in model.modules()}
        try:
            model.eval()
            with torch.no_grad():
                return model_outputs(model, make_source(x), batch)
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __str__(self) -> str:
        """For people: ε is rounded up."""
        lines = [f"run {self.run[:8]}: {self.steps} of {self.planned} steps, in {self.folder}"]
        for name, epsilon in self.epsilon.items():
            if not self.delta[name]:
                lines.append(f"  class {name}: public, not protected")
                continue
            whose = f"per {self.unit[name]} at δ = {self.delta[name]:g}"
            lines.append(
                f"  class {name}: ε {epsilon_text(epsilon)} {whose}; {epsilon_text(self.total[name])} over all runs in the ledger"
            )
        if self.metrics:
            lines.append(f"  {evaluation_text(self.metrics)}")
        if not self.private:
            lines.append("  NOT PRIVATE: the noise came from a seed that somebody chose")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def weights_file(model: nn.Module, average: MovingAverage | None, sharded: TrainingState | None = None) -> bytes:
    """What `model.load_state_dict(safetensors.torch.load_file(path))` reads; the moving average if one is given.

    `sharded`: the state that gathers the weights of a model whose parts are on other ranks too.
    """
    if sharded is not None:
        return sharded.capture({}).weights_file()
    if average is not None:
        with average.applied():
            return weights_file(model, None)
    tensors = {name: t.detach().clone().contiguous() for name, t in model.state_dict().items()}
    return save(tensors, metadata={"format": "pt"})


def spent_so_far(run: Run, plan: StepPlan) -> dict[str, float]:
    """ε by class of everything that the run was charged for: redone segments count again.

    Journal and ledger should agree; where they do not (one of them was put back from a copy), the larger counts.
    Classes that an earlier plan of the run charged are listed too. Noise that is chosen on the way is proven to stay
    within its budget, not to have cost less on the way: from the first step on it counts as a whole.
    """
    deltas = _deltas(run, plan).items()
    return {name: _epsilon_spent(run, plan, name, delta) for name, delta in deltas if not Account.parse(name).signed}


def _charged_deltas(run: Run) -> dict[str, float]:
    """Every class and signed bound that the run was charged under, with its δ."""
    return {str(c.account): c.delta for opened in run.attempts for c in opened.charges}


def _deltas(run: Run, plan: StepPlan) -> dict[str, float]:
    return _charged_deltas(run) | {entry.name: entry.delta for entry in plan.classes}


def _epsilon_spent(run: Run, plan: StepPlan, name: str, delta: float) -> float:
    charged = run.charged.get(name, ())
    mine = find_accountant(plan.accountant).epsilon(charged, delta) if charged else 0.0
    recorded = run.spend.spent(run.id, name, delta=delta, accountant=plan.accountant) if delta else 0.0
    followed = follows_budget(plan) and (mine or recorded) and not Account.parse(name).signed
    return max(mine, recorded, plan.epsilon(name) if followed else 0.0)


def _epsilon_total(run: Run, plan: StepPlan, name: str, delta: float, epsilon: float) -> float:
    """ε of every run in the ledger, and never less than that of this one."""
    if not delta:
        return epsilon
    return max(epsilon, run.spend.total(name, delta=delta, accountant=plan.accountant).spent)


def epsilon_of_run(run: Run, plan: StepPlan) -> tuple[dict[str, float], dict[str, float]]:
    """ε by class: of this run, and of every run in the ledger. Public classes owe nothing."""
    mine, deltas = spent_so_far(run, plan), _deltas(run, plan)
    return mine, {name: _epsilon_total(run, plan, name, deltas[name], epsilon) for name, epsilon in mine.items()}


def signed_bound_figures(run: Run, plan: StepPlan) -> dict[str, dict[str, Any]]:
    """By signed bound: ε that was signed, of this run, and of all runs. Without `scale`: of an earlier start.

    Worked out at the end of a run: there may be thousands, and after each segment every price would be another one.
    """
    deltas = {name: delta for name, delta in _charged_deltas(run).items() if Account.parse(name).signed}
    deltas |= {each.name: plan.delta(each.cls) for each in run.accounts}
    found: dict[str, dict[str, Any]] = {}
    for name, delta in deltas.items():
        epsilon = _epsilon_spent(run, plan, name, delta)
        found[name] = {"delta": delta, "epsilon": epsilon, "total": _epsilon_total(run, plan, name, delta, epsilon)}
    for each in run.accounts:
        found[each.name] |= {"class": each.cls, "scale": each.scale, "signed": each.epsilon}
        if steps := [(o.last - o.first, o.factors[each.name]) for o in run.attempts if each.name in o.factors]:
            left_out = sum(count for count, factor in steps if not factor)
            scaled = sum(count for count, factor in steps if factor)
            found[each.name] |= {"steps_left_out": left_out, "steps_scaled": scaled}
    return found


def public_figures(run: Run, plan: StepPlan, state: TrainingState, notes: Sequence[str]) -> dict[str, Any]:
    """The content of metrics.json: nothing in it depends on who was sampled, or on a private loss."""
    epsilon, total = epsilon_of_run(run, plan)
    classes: dict[str, dict[str, Any]] = {
        entry.name: {
            "unit": entry.unit,
            "public": entry.public,
            "adjacency": plan.adjacency,
            "delta": None if entry.public else entry.delta,  # public data is not protected
            "epsilon": None if entry.public else epsilon[entry.name],
            "total": None if entry.public else total[entry.name],
            "steps_charged": sum(
                o.last - o.first for o in run.attempts if any(c.account == Account(entry.name) for c in o.charges)
            ),
        }
        for entry in plan.classes
    }
    for name in epsilon.keys() - classes.keys():  # of an earlier plan of this run
        classes[name] = {"epsilon": epsilon[name], "total": total[name]}
    return {
        "run": run.id,
        "origin": run.origin,
        "steps": state.step,
        "planned_steps": plan.steps,
        "segments": state.segments,
        "plan": plan.digest().hex(),
        "accountant": plan.accountant,
        "optimizer": state.optimizer_figures,
        "attested": run.attested,
        "classes": classes,
        "evaluations": [{name: each[name] for name in ("step", "figures")} for each in state.evaluations],
        "code": code_version(),
        "notes": list(notes),
    }


def final_figures(run: Run, plan: StepPlan, caps: Mapping[str, int], step: int) -> dict[str, dict[str, Any]]:
    """By class, what a certificate says beside ε: the replace-one figure, and what holds without amplification.

    An attempt that was given up used its contributions too: each adds at most the cap, or its steps.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, delta in _charged_deltas(run).items():
        if Account.parse(name).signed:
            continue
        schedule, cap = run.charged.get(name, ()), caps.get(name)
        most = None if cap is None else cap + sum(min(cap, o.last - o.first) for o in attempts_outside(run, step))
        if any(uses_adaptive_budget(o) and any(str(c.account) == name for c in o.charges) for o in run.attempts):
            found[name] = _adaptive_budget_figures(run, plan, name, schedule, delta, step)
        else:
            figures = cost(schedule, delta=delta, accountant=plan.accountant, occurrences=most)
            found[name] = {
                "epsilon_replace_one": finite_or_none(figures.epsilon_replace_one),
                "rho": figures.rho,
                "epsilon_unamplified": figures.epsilon_unamplified,
            }
        if not plan.proves_replace_one:
            found[name]["epsilon_replace_one"] = None
        found[name]["max_occurrences"] = cap
    return found


def _adaptive_budget_figures(
    run: Run, plan: StepPlan, name: str, fixed: Schedule, delta: float, step: int
) -> dict[str, float | None]:
    """The same where noise followed a budget. None where nothing is proven: under several plans.

    Where occurrences are known, all that is sure is the least noise that the rule allows, at every step there was.
    """
    rule = plan.rule(FollowBudget)
    if fixed or rule is None or any(o.plan != plan.digest() for o in run.attempts):
        return {"epsilon_replace_one": None, "rho": None, "epsilon_unamplified": None}
    steps, *choices = plan.schedule(name)
    wasted = attempts_outside(run, step)
    again = sum(o.last - o.first for o in wasted)
    lowest = replace(steps, sigma=steps.sigma * rule.least, steps=plan.steps + again)
    more = [c.event for o in wasted for c in o.charges if str(c.account) == name and c.event.sigma != steps.sigma]
    sure = cost((lowest, *choices, *more), delta=delta, accountant="gaussian")
    figures = cost(plan.schedule(name), delta=delta, accountant=plan.accountant)
    return {
        "epsilon_replace_one": finite_or_none(figures.epsilon_replace_one),
        "rho": sure.rho,
        "epsilon_unamplified": sure.epsilon_unamplified,
    }


WITHOUT_EMA = "_without_ema"
"""Where there is a moving average, figures are of it; those of the weights themselves have this after their name."""


def _scores(rule: Evaluation, figures: Mapping[str, float]) -> tuple[float, ...]:
    """Of the figures, and of the weights without their moving average, if there is one."""
    plain = {name.removesuffix(WITHOUT_EMA): value for name, value in figures.items() if name.endswith(WITHOUT_EMA)}
    return (rule.score(figures), rule.score(plain)) if plain else (rule.score(figures),)


class Publisher:
    """Evaluates on public data, writes the public files, keeps the notes."""

    def __init__(
        self, plan: StepPlan, rule: Evaluation | None, *, caps: Mapping[str, int], progress: Progress, notes: list[str],
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        self.plan, self.rule, self.caps, self.progress, self.notes = plan, rule, caps, progress, notes
        self.callbacks = (progress, *callbacks)

    def note(self, text: str) -> None:
        """Something out of the ordinary: on the screen now, in metrics.json and the outcome later."""
        if text not in self.notes:
            self.notes.append(text)
        self.progress.note(text)

    def publish(self, run: Run, state: TrainingState) -> str | None:
        """Evaluate, write and tell the public figures after a closed segment. Returns why to stop, if there is a reason."""
        reason = self._evaluate(run, state)
        classes = self._write_figures(run, state)["classes"]
        last: dict[str, Any] = state.evaluations[-1] if state.evaluations else {"step": None}
        now = RunFigures(
            step=state.step,
            steps=self.plan.steps,
            epsilon={name: row["epsilon"] for name, row in classes.items() if not row.get("public")},
            evaluation=dict(last["figures"]) if last["step"] == state.step else {},
            noise=dict(zip((layer.name for layer in self.plan.layers), state.noise(self.plan), strict=True)),
        )
        for callback in self.callbacks:
            name, remedy = type(callback).__name__, "correct it; the same folder goes on from here"
            with user_code(f"callback {name} failed", remedy):
                if now.evaluation:
                    callback.on_evaluation(now)
                if state.segments:
                    callback.on_segment(now)
        asked = any(getattr(callback, "stop", False) is True for callback in self.callbacks)  # some are no Callback
        stopped = state.step < self.plan.steps and asked
        return reason or ("callback" if stopped else None)

    def finish(self, run: Run, state: TrainingState, *, reason: str, facts: Mapping[str, Any]) -> Outcome:
        """Record the end of the run, then write the weights and the last figures. `facts` are fields of `RunEnd`.

        If the process is killed here, resuming the run completes the rest, with the same weights and the recorded end.
        """
        if reason == "budget":
            self.note(f"the run ended at step {state.step} of {self.plan.steps}: its budget allows no more")
        if reason == "patience":
            self.note(f"the run ended at step {state.step}: the evaluation has not improved within patience")
        if reason == "callback":
            self.note(f"the run ended at step {state.step} of {self.plan.steps}: a callback stopped it")
        weights = {WEIGHTS: weights_file(state.model, None, state if is_sharded_model(state.model) else None)}
        if state.ema is not None:
            weights[AVERAGE] = weights_file(state.model, state.ema)
        files = {name: hashlib.sha256(data).hexdigest() for name, data in weights.items()}
        last: Mapping[str, Any] = state.evaluations[-1] if state.evaluations else {}
        evaluation = evaluation_file(run.id, last) if "rows" in last else None
        files |= {} if evaluation is None else {EVALUATION: hashlib.sha256(evaluation).hexdigest()}
        if (best := run.folder / BEST).is_file():
            files[BEST] = file_digest(best)
        ended = run.end(
            state.step, facts=facts, caps=self.caps, files=files, programs=state.programs, evaluation=evaluation
        )
        for name, data in weights.items():
            run.write(name, data)
        if ended is None and evaluation is not None:
            run.write(EVALUATION, evaluation)
        adjacency = self.plan.adjacency
        conditions = stated_conditions(adjacency, **facts) if ended is None else ended.conditions(adjacency)
        recorded = {} if ended is None else {"plan": ended.plan.hex(), "files": ended.digests}
        self._write_figures(run, state, final={"conditions": conditions, "files": files, **recorded})
        run.finish(state.step, reason)
        epsilon, total = epsilon_of_run(run, self.plan)
        deltas, units = _charged_deltas(run), {entry.name: entry.unit for entry in self.plan.classes}
        return Outcome(
            run=run.id, folder=run.folder, steps=state.step, planned=self.plan.steps, epsilon=epsilon, total=total,
            unit={name: units.get(name, "contribution") for name in epsilon},
            delta={name: deltas.get(name, 0.0) for name in epsilon},
            private=conditions["noise"] == "secure", ledger=str(run.spend.ledger.name),
            metrics=dict(state.evaluations[-1]["figures"]) if state.evaluations else {},
            notes=tuple(self.notes),
        )  # fmt: skip

    def _evaluate(self, run: Run, state: TrainingState) -> str | None:
        rule = self.rule
        if rule is None or not rule.due(state.segments, last=state.step == self.plan.steps):
            return None
        if not state.evaluations or state.evaluations[-1]["step"] != state.step:
            figures = rule.run(state.model)
            rows = [*figure_rows(figures, WEIGHTS)]
            if state.ema is not None:
                plain = {f"{name}{WITHOUT_EMA}": value for name, value in figures.items()}
                with state.ema.applied():
                    figures = rule.run(state.model)
                rows, figures = [*figure_rows(figures, AVERAGE), *rows], figures | plain
            for entry in state.evaluations:
                entry.pop("rows", None)  # only those of the last one are used
            values = {name: float(value) for name, value in figures.items()}
            state.evaluations.append({"step": state.step, "figures": values, "on": rule.on, "rows": rows})
        if rule.best is None:
            return None
        pairs = [_scores(rule, entry["figures"]) for entry in state.evaluations]
        scores = [max(pair) for pair in pairs]
        if scores[-1] == max(scores):
            average = state.ema if pairs[-1][0] == scores[-1] else None
            run.write(BEST, weights_file(state.model, average))
        return "patience" if rule.stops(scores) else None

    def _write_figures(
        self, run: Run, state: TrainingState, *, final: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        facts = public_figures(run, self.plan, state, self.notes)
        if final is not None:
            facts |= final
            for figures in facts["classes"].values():
                figures["adjacency"] = final["conditions"]["adjacency"]
            facts["bounds"] = signed_bound_figures(run, self.plan)
            for name, figures in final_figures(run, self.plan, self.caps, state.step).items():
                facts["classes"].get(name, {}).update(figures)
        text = json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False)
        run.write("metrics.json", f"{text}\n".encode())
        return facts
