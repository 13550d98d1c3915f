"""`lamina demo`: a private training on simulated ECG, from policy to table, in two minutes; with its report."""

from __future__ import annotations

import copy
import hashlib
import html
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lamina.admit.admission import Admission
from lamina.admit.resolver import Resolution
from lamina.allocate.make_plan import make_plan
from lamina.cli.terminal import columns, print_answer, print_line, print_note, progress_bar
from lamina.demo import hospitals as folders
from lamina.demo.hospitals import VerifiedLedger, write_contributions
from lamina.demo.leaving import Leaving, leave
from lamina.demo.patients import (
    FULL_SIZES,
    QUICK_SIZES,
    DemoPatients,
    DemoSizes,
    PatientGroup,
    Utility,
    measure_utility,
    prevalence_text,
)
from lamina.demo.svg_charts import auc_bars, bar_legend, beat_curves
from lamina.demo.training import FINE_TUNING, PRETRAINING, train_privately, train_without_privacy, untrained_model
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import at_least, at_most, epsilon_text
from lamina.release.risk_statements import content_sentence, membership_sentence
from lamina.run.admitted import Gate
from lamina.run.publisher import Outcome
from lamina.sign.keys import format_utc

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

    def table(self, folder: Path, report: Path) -> str:
        noise = "from a secure stream" if self.outcome.private else "seeded: NOT PRIVATE"
        return "\n".join(
            [
                "",
                f"plan: {self.plan.steps} steps, expected batch {self.plan.batch:g}, {self.plan.allocation} "
                f"allocation, {self.plan.clipping.value} clipping, noise {noise}",
                "",
                f"admitted by signature: {len(self.admission)}; refused: {len(self.admission.refused)}",
                columns(self.refusal_rows(), left=3),
                "",
                columns(self.cost_rows(), left=2),
                "",
                columns(self.bound_rows()),
                "",
                f"on {len(self.test)} fresh simulated patients (AUC: mean of the classes, each against the rest; "
                "error: fraction of the variance):",
                columns(self.utility_rows()),
                "",
                *(f"note: {note}" for note in self.outcome.notes),
                f"ledger {self.evidence.words()}",
                *(f"query {line}" for line in self.leaving.words()),
                "",
                f"{self.seconds:.0f} seconds. Where to look:",
                f"  report:  {report}",
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

    def machine(self, folder: Path, report: Path) -> dict[str, Any]:
        """For --json."""
        return {
            "folder": str(folder),
            "seconds": round(self.seconds, 2),
            "ledger": str(self.evidence.ledger),
            "verification": self.evidence.machine(),
            "certificate": str(self.leaving.certificate),
            "report": str(report),
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


_REPORT_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Lamina demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b }}
table {{ border-collapse: collapse }}
td, th {{ padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }}
{right} {{ text-align: right; white-space: nowrap }}
.scroll {{ overflow-x: auto; margin: 1rem 0 }} .scroll svg {{ min-width: 34rem }}
code {{ overflow-wrap: anywhere }}
pre {{ background: #f5f5f2; padding: 1rem; overflow-x: auto; font-size: .8rem }}
.words {{ color: #555; font-size: .9rem }}
.key {{ margin-right: 1.2rem; white-space: nowrap }} .key i {{ display: inline-block; width: .8em; height: .8em; margin-right: .4em }}
@media (max-width: 40rem) {{ body {{ margin: 1rem auto }} h1 {{ font-size: 1.5rem }} td, th {{ padding: .25rem .5rem }} }}
@media print {{
  @page {{ margin: 1.5cm }}
  body {{ max-width: none; margin: 0; padding: 0; font-size: 10pt; print-color-adjust: exact }}
  .scroll {{ overflow: visible }} .scroll svg {{ min-width: 0 }} td, th {{ padding: .15rem .4rem; font-size: 9pt }}
  pre {{ overflow: visible; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 6.5pt; padding: .5rem }}
  h2 {{ break-after: avoid }} tr, svg {{ break-inside: avoid }}
}}
</style></head><body>
<h1>A private training on simulated ECG</h1>
<p>A residual autoencoder with a classifier learned from simulated patients of two classes. {volunteers} volunteers,
mostly healthy, gave their recordings to the public and train every layer. {sensitive} sensitive patients reach only the
top quarter of the layers, the classifier, and each loses at most ε = {epsilon}.</p>
<p><b>What ε = {epsilon} means.</b> {membership} {content} These are bounds for every attacker who sees the model, whatever else they
know. The volunteers declared their recordings public, so they are not protected.</p>
{facts}

<h2>Who was let in</h2>
<p>Two hospitals signed for their patients: who contributes, which data, for which class, under which bound, until when.
{admitted} contributions were admitted. The gate refused these, and let none of them near a batch:</p>
{refused}
<p>Some sensitive patients signed a stricter bound than their class asks for. Their gradients count for less (scale),
the noise is the same for everybody, and each bound has an account of its own:</p>
{bounds}
<p class="words">Clip norm: the longest gradient that one patient may contribute to a step; longer ones are cut. Noise multiplier:
the noise that was promised, in units of the clip norm; more noise means a smaller ε. ε signed: the loss of privacy that the patient
agreed to, over all runs; ε spent: that of this run. Scale: the factor on the patient's gradients that keeps the promise.</p>

<h2>What it was good for</h2>
<p>Measured on {test} other simulated patients, whom no training saw. All three went on from the same start on
volunteers alone, with the same steps, batches and optimiser.</p>
{utility}
<p class="words">AUC: the probability that a patient with the finding is ranked above one without it; 0.5 is guessing, 1 is perfect.
The first column is the mean over the findings ({findings}), each against the rest. Reconstruction error: the part of the signal's
variance that the autoencoder does not give back.</p>
<p>{legend}</p>
{bars}
<p>What the sensitive patients gave is the step from the first row to the second; what their privacy cost, noise,
clipping and the closed lower layers together, is the step from the second to the third. The private figures
differ a little from run to run: the noise is secret and new each time.</p>

<h2>What it cost</h2>
{cost}
<p class="words">Reaches: the layers that the class may change. Unit: what ε protects; here all recordings of a patient together.</p>
<p>Compared are trainings with and without one patient, with all windows (adjacency: add or remove). The figures hold
because each patient was in each batch by a secret coin of their own (Poisson sampling). Noise: {noise}. Not covered: rounding in
the sum of clipped gradients, whose effect on ε was measured, not proven. The demo's settings were chosen on
simulated patients, which costs nothing; choosing them on private data would.</p>

<h2>What an auditor finds</h2>
<p>Who was admitted, under which bound, and what was spent is in <code>ledger.db</code>: records that nobody can change
unseen, because a signed tree of hashes stands over them; its root, above, stands for all of them. It was {verified}. No data and
no model are needed for that. The demo made all keys itself: an auditor would bring the owner's key (<code>--trust</code>).
The first command does it again; the last shows what became of one patient's contribution:</p>
<pre>{commands}</pre>

<h2>How the model leaves the house</h2>
<p><a href="certificate.pdf">certificate.pdf</a> states what the run cost, signed in <code>certificate.cose</code>.
<a href="run.html">run.html</a> shows budgets and layers. <code>release/</code> holds the weights with all papers under one signed
manifest. Its gate was asked twice for the whole model, once for care and once for advertising:</p>
<ul>{queries}</ul>
<pre>{release_commands}</pre>

<h2>Reconstructed beats</h2>
<p>Simulated test patients in grey, the private model's reconstruction in blue. The autoencoder learned from volunteers
alone: the sensitive class does not reach it.</p>
{beats}

<h2>The plan</h2>
<p class="words">All of it was fixed before the first step. Sigma: standard deviation of the noise divided by the clip norm. Rate q: the
probability that a patient is in a batch. What the other columns mean is in docs/plans.md.</p>
<pre>{plan}</pre>

<h2>What is here, and what is not</h2>
<p>Beside this page: <code>policy.toml</code>, <code>contributions/</code> (a payload, what was signed about it and the
signature of each patient), <code>keys.json</code> (the hospitals' public keys; the private ones were forgotten),
<code>plan.json</code>, <code>RUN.toml</code> (the private run, to do again with <code>lamina train</code>),
<code>ledger.db</code> (what was admitted and spent), <code>ledger.pem</code> (the key that signs it), and
<code>run/</code> with the private model and its public figures. <code>ledger.pem</code>, <code>run/journal</code> and
<code>run/checkpoint/</code> would be secret if the patients were real.</p>
<p>No private loss, batch size or gradient norm is in this report: none of them was paid for. The beats are simulated:
no person's data is in them, and no diagnosis may rest on them. {seconds:.0f} seconds.</p>
</body></html>
"""


def write_report(folder: Path, result: DemoResult) -> Path:
    """Write report.html into the folder; returns its path."""
    population = {entry.name: entry.population for entry in result.plan.classes}
    spent = {row[0]: row[2] for row in result.cost_rows()[1:]}
    risks = result.outcome.certificate.classes["sensitive"]
    page = _REPORT_TEMPLATE.format(
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
    path = folder / "report.html"
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


def show_demo(folder: Path, *, quick: bool, as_json: bool) -> None:
    """`lamina demo` (options and help: torch_commands.py)."""
    started = time.perf_counter()
    place = folders.make_new_folder(folder)
    with _one_thread():
        result = _run_demo(place, QUICK_SIZES if quick else FULL_SIZES, print_note if as_json else print_line)
    result = replace(result, seconds=time.perf_counter() - started, finished=int(time.time()))
    report = write_report(place, result)
    print_answer(result.machine(place, report), result.table(place, report), as_json)


def _run_demo(place: Path, sizes: DemoSizes, say: Callable[[str], None]) -> DemoResult:
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
