"""`Watch`: what is looked at, and let out, between two segments."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lamina.plan import StepPlan
from lamina.train.account import account, final_figures, public_figures, signed_figures
from lamina.train.evaluation import Evaluation
from lamina.train.outcome import Outcome
from lamina.train.progress import Progress
from lamina.train.run import Run
from lamina.train.snapshot import TrainingState
from lamina.train.weights import weights_file


class Watch:
    """Evaluates on public data, writes the public files, keeps the notes."""

    def __init__(
        self,
        plan: StepPlan,
        rule: Evaluation | None,
        *,
        caps: Mapping[str, int],
        progress: Progress,
        notes: list[str],
    ) -> None:
        self.plan, self.rule, self.caps, self.progress, self.notes = plan, rule, caps, progress, notes

    def note(self, text: str) -> None:
        """Something out of the ordinary: on the screen now, in metrics.json and the outcome later."""
        if text not in self.notes:
            self.notes.append(text)
        self.progress.note(text)

    def look(self, run: Run, state: TrainingState) -> str | None:
        """After a closed segment. Returns why to stop, if there is a reason."""
        reason = self._evaluate(run, state)
        self._publish(run, state)
        return reason

    def finish(self, run: Run, state: TrainingState, *, reason: str, private: bool) -> Outcome:
        """The weights as files, the last figures, and the end of the run."""
        if reason == "budget":
            self.note(f"the run ended at step {state.step} of {self.plan.steps}: its budget allows no more")
        if reason == "patience":
            self.note(
                f"the run ended at step {state.step}: the evaluation has found nothing better for a while"
            )
        run.write("model.safetensors", weights_file(state.model, None))
        if state.ema is not None:
            run.write("ema.safetensors", weights_file(state.model, state.ema))
        self._publish(run, state, final=True)
        run.finish(state.step, reason)
        spent = account(run, self.plan)
        deltas = {c.cls: c.delta for opened in run.attempts for c in opened.charges}
        units = {entry.name: entry.unit for entry in self.plan.classes}
        return Outcome(
            run=run.id,
            folder=run.folder,
            steps=state.step,
            planned=self.plan.steps,
            epsilon=spent.epsilon,
            total=spent.total,
            unit={name: units.get(name, "contribution") for name in spent.epsilon},
            delta={name: deltas.get(name, 0.0) for name in spent.epsilon},
            private=private,
            metrics=dict(state.evaluations[-1]["figures"]) if state.evaluations else {},
            notes=tuple(self.notes),
        )

    def _evaluate(self, run: Run, state: TrainingState) -> str | None:
        rule = self.rule
        if rule is None or not rule.due(state.segments, last=state.step == self.plan.steps):
            return None
        if not state.evaluations or state.evaluations[-1]["step"] != state.step:
            if state.ema is None:
                figures = rule.run(state.model)
            else:
                with state.ema.applied():
                    figures = rule.run(state.model)
            state.evaluations.append({"step": state.step, "figures": figures})
        if rule.best is None:
            return None
        scores = [rule.score(entry["figures"]) for entry in state.evaluations]
        if scores[-1] == max(scores):
            run.write("best.safetensors", weights_file(state.model, state.ema))
        return "patience" if rule.stops(scores) else None

    def _publish(self, run: Run, state: TrainingState, *, final: bool = False) -> None:
        facts = public_figures(run, self.plan, state, self.notes)
        if final:
            facts["bounds"] = signed_figures(run, self.plan)
            for name, figures in final_figures(run, self.plan, self.caps, state.step).items():
                facts["classes"].get(name, {}).update(figures)
        text = json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False)
        run.write("metrics.json", f"{text}\n".encode())
