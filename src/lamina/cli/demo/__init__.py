"""`lamina demo`: a private training on simulated ECG, from policy to table, in two minutes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from lamina.cli.bars import bar
from lamina.cli.demo import folder as folders
from lamina.cli.demo.evidence import Evidence
from lamina.cli.demo.hospitals import contribute
from lamina.cli.demo.page import write_page
from lamina.cli.demo.parts import untrained
from lamina.cli.demo.patients import Patients, prevalence
from lamina.cli.demo.result import Result
from lamina.cli.demo.sizes import FULL, QUICK, Sizes
from lamina.cli.demo.training import ONWARD, START, plainly, plan_of, privately
from lamina.cli.demo.utility import measure
from lamina.cli.output import err, out, print_json
from lamina.data.neurokit import neurokit
from lamina.ledger.opening import Contract, open_or_create
from lamina.plan import Policy
from lamina.train import Gate


def demo(
    folder: Annotated[
        Path, typer.Option(help="where the report goes; a number is added if it exists")
    ] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", hidden=True)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Sign, admit and train on simulated ECG under differential privacy; show what it cost and what it was good for.

    Two hospitals sign for their patients. Sixty volunteers gave their recordings to the public: they train every layer
    of a residual autoencoder with a classifier. Five hundred sensitive patients may reach only the top quarter of its
    layers, at ε = 3 each; fifty of them signed for less and count for less. Six contributions that are expired,
    changed, copied, unsigned, too permissive or signed by a stranger are refused. Who was admitted and what was spent
    is in a signed ledger, which is verified in the end. And there is a table: the private model against one without
    these patients, and against one without privacy.

    Spends: nothing real, the patients are simulated. Every call makes new folders, with a ledger in each.

    Shows: ε so far, never the private loss: an un-noised loss would be a release that nobody paid for.

    Examples:

      lamina demo                     two minutes; the report is in runs/demo
      lamina demo --folder try --json one object for machines
    """
    started = time.perf_counter()
    neurokit()  # refuses now, and not after the first minute
    place = folders.fresh(folder)
    screen = err if as_json else out
    with _one_thread():
        result = _run(
            place, QUICK if quick else FULL, lambda text: screen.print(text, markup=False, soft_wrap=True)
        )
    result = result.timed(time.perf_counter() - started)
    report = write_page(place, result)
    if as_json:
        print_json(result.machine(place, report))
    else:
        out.print(result.table(place, report), markup=False, soft_wrap=True)


def _run(place: Path, sizes: Sizes, say: Callable[[str], None]) -> Result:
    with bar("simulating patients", sizes.volunteers + sizes.sensitive + sizes.test) as tick:
        patients = Patients.simulated(sizes, tick)
    say(f"volunteers, public: {prevalence(patients.volunteer)}")
    policy = Policy.parse(folders.policy_text(sizes), source="the demo's policy")
    contributing = patients.contributing()
    with bar("hospitals sign", sum(map(len, contributing.values()))) as tick:
        ring = contribute(place / "contributions", patients, policy, sizes, tick)
    ledger = open_or_create(place / folders.LEDGER, Contract.of_policy(policy))
    with bar("checking signatures") as tick:
        corpus = Gate(policy, ring).admit(place / "contributions", ledger, examples_per_unit=1, progress=tick)
    say(f"{corpus.admission!r}")

    start = untrained()
    volunteers = {"volunteer": patients.volunteer}
    with bar("start: volunteers alone", sizes.start) as tick:
        plainly(start, volunteers, sizes.batch, recipe=START, steps=sizes.start, seed=1, tick=tick)
    plan = plan_of(start, policy, sizes)
    folders.write_inputs(place, sizes, patients, ring, start, plan)
    say(f"\n{plan}\n\n{corpus.resolution(plan)}\n")

    private = copy.deepcopy(start)
    outcome = privately(private, patients.test, corpus, plan, place, ledger)
    ledger.close()
    without_sensitive, without_privacy = copy.deepcopy(start), copy.deepcopy(start)
    with bar("for comparison: without the sensitive", sizes.steps) as tick:
        plainly(
            without_sensitive, volunteers, sizes.batch, recipe=ONWARD, steps=sizes.steps, seed=2, tick=tick
        )
    with bar("for comparison: without privacy", sizes.steps) as tick:
        plainly(
            without_privacy, contributing, sizes.batch, recipe=ONWARD, steps=sizes.steps, seed=2, tick=tick
        )
    models = {
        "without_sensitive": without_sensitive,
        "private": private,
        "without_privacy": without_privacy,
    }
    return Result(
        plan=plan,
        outcome=outcome,
        admission=corpus.admission,
        resolution=corpus.resolution(plan),
        utility={name: measure(model, patients.test) for name, model in models.items()},
        model=private,
        test=patients.test,
        evidence=Evidence.gather(place / folders.LEDGER, corpus.admission),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors this small only make threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
