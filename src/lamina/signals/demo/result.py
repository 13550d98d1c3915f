"""A private training on simulated ECG, from contributions to a table of what it cost, and its report."""

from __future__ import annotations

import copy
import hashlib
import html
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lamina.admit.admission import Admission
from lamina.admit.resolver import Resolution
from lamina.allocate.make_plan import make_plan
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import align_columns, at_least, at_most, epsilon_text
from lamina.release.risk_statements import content_sentence, membership_sentence
from lamina.run.admitted import Gate
from lamina.run.publisher import Outcome
from lamina.sign.keys import format_utc
from lamina.signals.demo import hospitals as folders
from lamina.signals.demo.hospitals import VerifiedLedger, write_contributions
from lamina.signals.demo.leaving import Leaving, leave
from lamina.signals.demo.patients import (
    FULL_SIZES,
    QUICK_SIZES,
    DemoPatients,
    DemoSizes,
    PatientGroup,
    Utility,
    measure_utility,
    prevalence_text,
)
from lamina.signals.demo.svg_charts import auc_bars, bar_legend, beat_curves
from lamina.signals.demo.training import (
    FINE_TUNING,
    PRETRAINING,
    train_privately,
    train_without_privacy,
    untrained_model,
)
from lamina.validate import packaged_text

REPORT = "report.html"
TRAINING_LABELS = {
    "without_sensitive": "without the sensitive patients",
    "private": "private",
    "without_privacy": "without privacy",
}
_FIGURE = re.compile(r"[\d.,e-]+|–|public|not protected")
_LEDGER_LABELS = ("audit:", "record:", "trace:")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """`utility` by training (TRAINING_LABELS); `model` is the private one, `test` the patients it was measured on.

    `finished` is when, in seconds since 1970: the report is made from this alone and from the folder.
    """

    plan: StepPlan
    outcome: Outcome
    admission: Admission
    resolution: Resolution
    utility: dict[str, Utility]
    model: nn.Module
    test: PatientGroup
    evidence: VerifiedLedger
    leaving: Leaving
    seconds: float = 0.0
    finished: int = 0

    def cost_rows(self) -> list[list[str]]:
        """By class: what it reaches, and what it was charged."""
        rows = [["class", "reaches", "ε", "δ", "unit"]]
        for entry in self.plan.classes:
            spent = "not protected" if entry.public else epsilon_text(self.outcome.epsilon[entry.name])
            delta = "–" if entry.public else f"{entry.delta:g}"
            rows.append([entry.name, entry.profile, spent, delta, entry.unit])
        return rows

    def refusal_rows(self) -> list[list[str]]:
        """Who was refused, and why."""
        rows = [["contribution", "refused because", "reason"]]
        return rows + [[each.id, each.reason.meaning, str(each.reason)] for each in self.admission.refused]

    def bound_rows(self) -> list[list[str]]:
        """Each signed bound: by how many, and the ε spent under it."""
        rows = [["class", "signed by", "clip norm", "noise multiplier", "ε signed", "ε spent", "scale"]]
        for which, count in enumerate(np.bincount(self.admission.bound).tolist()):
            found = self.resolution[which]
            if not found.bound.signed:
                rows.append([found.bound.cls, str(count), "public", "–", "–", "–", "–"])
                continue
            signed = [at_most(found.bound.c), at_least(found.bound.z), epsilon_text(found.epsilon_signed)]
            rows.append([found.bound.cls, str(count), *signed, epsilon_text(found.epsilon), at_most(found.scale)])
        return rows

    def utility_rows(self) -> list[list[str]]:
        """By training: how good it is on fresh simulated patients."""
        rows = [["trained", "AUC", *(next(iter(self.utility.values())).by_class), "reconstruction error"]]
        for name, words in TRAINING_LABELS.items():
            found = self.utility[name]
            rows.append([words, *(f"{value:.3f}" for value in (found.auc, *found.by_class.values(), found.error))])
        return rows

    def table(self, folder: Path) -> str:
        noise = "from a secure stream" if self.outcome.private else "seeded: NOT PRIVATE"
        return "\n".join(
            [
                "",
                f"plan: {self.plan.steps} steps, expected batch {self.plan.batch:g}, {self.plan.allocation} "
                f"allocation, {self.plan.clipping.value} clipping, noise {noise}",
                "",
                f"admitted by signature: {len(self.admission)}; refused: {len(self.admission.refused)}",
                *align_columns(self.refusal_rows(), 3),
                "",
                *align_columns(self.cost_rows(), 2),
                "",
                *align_columns(self.bound_rows(), 1),
                "",
                f"on {len(self.test)} fresh simulated patients (AUC: mean of the classes, each against the rest; "
                "error: fraction of the variance):",
                *align_columns(self.utility_rows(), 1),
                "",
                *(f"note: {note}" for note in self.outcome.notes),
                f"ledger {self.evidence.words()}",
                *(f"query {line}" for line in self.leaving.words()),
                "",
                f"{self.seconds:.0f} seconds. Where to look:",
                f"  report:  {folder / REPORT}",
                f"  run:     {self.leaving.page}",
                f"  paper:   {self.leaving.certificate}",
                f"  release: {self.leaving.release}",
                *(
                    f"  {name:<8} {line}"
                    for name, line in zip(("check:", "ask:"), self.leaving.commands(), strict=True)
                ),
                f"  spend:   lamina spend {self.evidence.ledger}",
                *(f"  {name:<8} {line}" for name, line in zip(_LEDGER_LABELS, self.evidence.commands(), strict=True)),
                f"  again:   cd {folder} && lamina train RUN.toml",
            ]
        )

    def machine(self, folder: Path) -> dict[str, Any]:
        """For --json."""
        return {
            "folder": str(folder),
            "seconds": round(self.seconds, 2),
            "ledger": str(self.evidence.ledger),
            "verification": self.evidence.machine(),
            "certificate": str(self.leaving.certificate),
            "report": str(folder / REPORT),
            "run_report": str(self.leaving.page),
            "release": str(self.leaving.release),
            "queries": self.leaving.machine(),
            "private": self.outcome.private,
            **{key: self.admission.to_dict()[key] for key in ("admitted", "refused")},
            "bounds": [self.resolution[row].to_dict() for row in range(len(self.admission.bounds))],
            "epsilon": {e.name: None if e.public else self.outcome.epsilon[e.name] for e in self.plan.classes},
            "delta": {entry.name: None if entry.public else entry.delta for entry in self.plan.classes},
            "auc": {name: found.auc for name, found in self.utility.items()},
            "auc_by_class": {name: found.by_class for name, found in self.utility.items()},
            "error": {name: found.error for name, found in self.utility.items()},
            "notes": list(self.outcome.notes),
        }


def write_report(folder: Path, result: DemoResult) -> Path:
    """Write report.html into the folder; returns its path."""
    population = {entry.name: entry.population for entry in result.plan.classes}
    spent = {row[0]: row[2] for row in result.cost_rows()[1:]}
    risks = result.outcome.certificate.classes["sensitive"]
    page = packaged_text("lamina.signals.demo", "report_template.html").format(
        right=", ".join(f".r{i} tr > :nth-child({i})" for i in range(2, 9)),
        facts=_facts(folder, result),
        membership=html.escape(membership_sentence("patient", risks["membership"])),
        content=html.escape(content_sentence("patient", risks["content"])),
        findings=", ".join(html.escape(name) for name in next(iter(result.utility.values())).by_class),
        volunteers=population["volunteer"],
        sensitive=population["sensitive"],
        epsilon=spent["sensitive"].rstrip("0").rstrip("."),
        test=len(result.test),
        admitted=len(result.admission),
        refused=_html_table(result.refusal_rows()),
        bounds=_html_table(result.bound_rows()),
        utility=_html_table(result.utility_rows()),
        legend=bar_legend(TRAINING_LABELS),
        bars=_scrolling(auc_bars(result.utility, TRAINING_LABELS)),
        cost=_html_table(result.cost_rows()),
        noise="from a cryptographically secure stream" if result.outcome.private else "seeded, so NOT PRIVATE",
        verified=html.escape(result.evidence.words()),
        commands=html.escape("\n".join(result.evidence.commands())),
        queries="".join(f"<li>{html.escape(line)}</li>" for line in result.leaving.words()),
        release_commands=html.escape("\n".join(result.leaving.commands())),
        beats=_scrolling(beat_curves(result.model, result.test)),
        plan=html.escape(str(result.plan)),
        seconds=result.seconds,
    )
    path = folder / REPORT
    path.write_text(page, encoding="utf-8")
    return path


def _facts(folder: Path, result: DemoResult) -> str:
    """Which run this page is about: what somebody who holds the model or the ledger can compare."""
    model, found = (folder / "run" / "model.safetensors").read_bytes(), result.evidence.found
    facts = {
        "date": format_utc(result.finished).replace("T", " ").replace("Z", " UTC"),
        "run": result.outcome.run,
        "model (SHA-256)": hashlib.sha256(model).hexdigest(),
        "ledger root": f"{found.root.hex() if found.root else '–'}, {found.size} records",
    }
    rows = "".join(f"<tr><th>{name}</th><td><code>{html.escape(text)}</code></td></tr>" for name, text in facts.items())
    return f"<table>{rows}</table>"


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of figures are flush right, columns of text flush left."""
    figures = [i for i, cells in enumerate(zip(*rows[1:], strict=True), 1) if all(map(_FIGURE.fullmatch, cells))]
    lines = []
    for i, row in enumerate(rows):
        tag = "td" if i else "th"
        lines.append("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row))
    of = " ".join(f"r{i}" for i in figures)
    return _scrolling(f'<table class="{of}">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>')


def _scrolling(wide: str) -> str:
    """What may be wider than a telephone scrolls by itself, not the page."""
    return f'<div class="scroll" tabindex="0">{wide}</div>'


Progress = Callable[
    ..., AbstractContextManager[Callable[..., None]]
]  # of a title, and the number of steps if it is known


def run_demo(folder: Path, *, quick: bool, say: Callable[[str], None], progress_bar: Progress) -> DemoResult:
    """Run the demo in a new folder, and write its report."""
    started = time.perf_counter()
    with _one_thread():
        result = _train(folder, QUICK_SIZES if quick else FULL_SIZES, say, progress_bar)
    result = replace(result, seconds=time.perf_counter() - started, finished=int(time.time()))
    write_report(folder, result)
    return result


def _train(place: Path, sizes: DemoSizes, say: Callable[[str], None], progress_bar: Progress) -> DemoResult:
    with progress_bar("simulating patients", sizes.volunteers + sizes.sensitive + sizes.test) as tick:
        patients = DemoPatients.simulated(sizes, tick)
    say(f"volunteers, public: {prevalence_text(patients.volunteer)}")
    policy = Policy.parse(folders.policy_text(sizes), source="the demo's policy")
    contributing = patients.contributing_groups()
    with progress_bar("hospitals sign", sum(map(len, contributing.values()))) as tick:
        ring = write_contributions(place / "contributions", patients, policy, sizes, tick)
    ledger = open_or_create(place / folders.LEDGER_NAME, CorpusTerms.of_policy(policy))
    with progress_bar("checking signatures") as tick:
        corpus = Gate(policy, ring).admit(place / "contributions", ledger, examples_per_unit=1, progress=tick)
    say(f"{corpus.admission!r}")

    start = untrained_model()
    volunteers = {"volunteer": patients.volunteer}
    with progress_bar("start: volunteers alone", sizes.start) as tick:
        train_without_privacy(start, volunteers, sizes.batch, recipe=PRETRAINING, steps=sizes.start, seed=1, tick=tick)
    plan = make_plan(LayerStack.from_model(start), policy, batch=sizes.batch, steps=sizes.steps)
    folders.write_inputs(place, sizes, patients, ring, start, plan)
    say(f"\n{plan}\n\n{corpus.resolution(plan)}\n")

    private = copy.deepcopy(start)
    outcome = train_privately(private, patients.test, corpus, plan, place, ledger)
    ledger.close()
    without_sensitive, without_privacy = copy.deepcopy(start), copy.deepcopy(start)
    for what, model, groups in (
        ("without the sensitive", without_sensitive, volunteers),
        ("without privacy", without_privacy, contributing),
    ):
        with progress_bar(f"for comparison: {what}", sizes.steps) as tick:
            train_without_privacy(model, groups, sizes.batch, recipe=FINE_TUNING, steps=sizes.steps, seed=2, tick=tick)
    with progress_bar("certificate and release"):
        leaving = leave(place, place / folders.LEDGER_NAME)
    models = {"without_sensitive": without_sensitive, "private": private, "without_privacy": without_privacy}
    return DemoResult(
        plan=plan,
        outcome=outcome,
        admission=corpus.admission,
        resolution=corpus.resolution(plan),
        utility={name: measure_utility(model, patients.test) for name, model in models.items()},
        model=private,
        test=patients.test,
        evidence=VerifiedLedger.gather(place / folders.LEDGER_NAME, corpus.admission),
        leaving=leaving,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread: with tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
