"""demo, plan, train, study and bench: their options and help. torch is imported when one of them runs, not for --help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lamina.cli.options import JsonOption, argument, option
from lamina.cli.terminal import print_json, stderr_is_terminal
from lamina.errors import RunError
from lamina.plan.policy import Policy
from lamina.validate import packaged_text

# Names that the help lists. The code behind them needs torch; a test compares them.
BUILT_IN_MODEL_NAMES = ("residual", "transformer", "mlp", "stacked-ae", "conv-ae", "res-ae", "trans-ae", "vae")
ALLOCATION_NAMES = (
    "flat", "uniform", "proportional", "pareto", "lsab", "ladp", "ladp-budget", "quantile", "automatic", "printed-lsab",
    "printed-ladp",
)  # fmt: skip
STUDY_NAMES = (
    "table1", "table5", "table6", "table7", "table8", "table9",
    "figure1", "figure2", "figure3", "figure4", "figure5", "figure6", "figure7",
)  # fmt: skip
STUDY_SIZES = ("quick", "full", "paper")
WORKLOAD_NAMES = ("resae", "tfae", "bert1k", "mlp_b32", "mlp_b256", "cnn")


def demo(
    folder: Annotated[Path, option("where the report goes; a number is added if it exists")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Sign, admit and train on simulated ECG under differential privacy; show its cost and its use.

    Two hospitals sign for their patients. Sixty volunteers gave their recordings to the public: they train every layer
    of a residual autoencoder with a classifier. Five hundred sensitive patients reach only the top quarter of its
    layers, at ε = 3 each; fifty of them signed a stricter bound. Six contributions are refused: expired, changed,
    copied, unsigned, too permissive, or signed by a stranger. A signed ledger records who was admitted and what was
    spent; it is verified at the end. A table compares the private model with one without these patients, and with one
    without privacy.

    Spends: nothing real, the patients are simulated. Every call makes a new folder with a ledger.

    Shows: ε so far, never the private loss: a loss without noise would reveal private data that no budget paid for.

    Examples:

      lamina demo                     two minutes; the report is in runs/demo
      lamina demo --folder try --json one object for machines
    """
    from lamina.cli.demo import show_demo

    show_demo(folder, quick=quick, as_json=as_json)


_EXPLAIN, _MEASURE = "Explaining", "Measuring the layers (never on private data)"
_MODEL_HELP = f"package.module:factory, or built in: {', '.join(BUILT_IN_MODEL_NAMES)}; default: residual"
_ALLOCATE_HELP = (
    f"how C and S are chosen: {', '.join(ALLOCATION_NAMES)}; with options: ladp:mode=budget,least=0.2; default: pareto"
)


def plan(
    policy: Annotated[
        Path | None, argument("policy.toml", "classes, populations, budgets, depth profiles; or a RUN.toml: that run")
    ] = None,
    model: Annotated[str | None, option(_MODEL_HELP, choices=BUILT_IN_MODEL_NAMES)] = None,
    batch: Annotated[int | None, option("expected contributions per step, all classes together; default: 256")] = None,
    steps: Annotated[int | None, option("number of steps; or give --epochs")] = None,
    epochs: Annotated[float | None, option("passes over the declared populations")] = None,
    allocate: Annotated[str | None, option(_ALLOCATE_HELP, choices=ALLOCATION_NAMES)] = None,
    clipping: Annotated[
        str | None, option("box or joint; default: what the allocation prefers", choices=("box", "joint"))
    ] = None,
    rho: Annotated[float | None, option("zCDP budget of every class, ρ/T per step, instead of the policy's ε")] = None,
    explain: Annotated[
        bool, option("figures and bars of every layer, and why this plan", "--explain", panel=_EXPLAIN)
    ] = False,
    compare_all: Annotated[
        bool, option("every allocation side by side at the same ε", "--compare", panel=_EXPLAIN)
    ] = False,
    among: Annotated[
        str | None, option("compare only these: flat,pareto,ladp:mode=budget", panel=_EXPLAIN, metavar="NAMES")
    ] = None,
    picture: Annotated[
        Path | None, option("draw the layers: FILE.html, or .png, .svg with matplotlib", panel=_EXPLAIN)
    ] = None,
    measure: Annotated[Path | None, option("a saved measure", panel=_MEASURE, metavar="FILE")] = None,
    proxy: Annotated[
        str | None,
        option("measure now on: gaussian, public:nets:data, simulated:nets:data", panel=_MEASURE, metavar="PROXY"),
    ] = None,
    shape: Annotated[
        str | None, option("shape of one example, for gaussian: 12,256", "--input", panel=_MEASURE, metavar="SHAPE")
    ] = None,
    loss: Annotated[
        str | None, option("as in RUN.toml; default: squared error to the input (autoencoders)", panel=_MEASURE)
    ] = None,
    passes: Annotated[int, option("how many examples to measure", panel=_MEASURE, min=1)] = 1000,
    radius: Annotated[
        float | None, option("public L2 bound on an example, for Δ; default: that of the proxy", panel=_MEASURE)
    ] = None,
    influences: Annotated[bool, option("also influence functions", "--influence", panel=_MEASURE)] = False,
    reinitialise: Annotated[
        int, option("Δ over so many copies with weights drawn anew; 0: at these weights", panel=_MEASURE, min=0)
    ] = 0,
    gamma: Annotated[
        str,
        option(
            "where Δ as printed has γ: all, norm, elsewhere, none",
            panel=_MEASURE,
            choices=("all", "norm", "elsewhere", "none"),
        ),
    ] = "all",
    seed: Annotated[int, option("seed of weights and proxy inputs", panel=_MEASURE, min=0)] = 0,
    save_measure: Annotated[Path | None, option("save the measure", panel=_MEASURE, metavar="FILE")] = None,
    template: Annotated[bool, option("print an annotated policy.toml to start from, and exit", "--template")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show clipping, noise, sigma and ε of every class and layer, before the first step.

    Spends nothing and reads no private data: the cost follows from the policy, the shape of the model, the batch and the
    number of steps. Try values until ε, noise and length suit you, then train. Writes only what --picture and
    --save-measure name.

    Examples:

      lamina plan --template > policy.toml     a policy to edit
      lamina plan policy.toml --epochs 20
      lamina plan policy.toml --model nets:build --batch 512 --steps 2000
      lamina plan RUN.toml                     the model, batch and length of that run; options change them

    Which allocation? Look at the layers, then compare all at the same ε:

      lamina plan policy.toml --epochs 20 --explain
      lamina plan policy.toml --epochs 20 --compare
      lamina plan policy.toml --epochs 20 --among flat,pareto,ladp:mode=budget

    Some allocations need measured layers. Measure once, on made-up inputs:

      lamina plan policy.toml --epochs 20 --proxy gaussian --save-measure m.json
      lamina plan policy.toml --epochs 20 --measure m.json --compare
      lamina plan policy.toml --epochs 20 --measure m.json --allocate lsab

    S/N, the signal to noise of a layer, is b·n̂/(S·√d): b contributions expected in a step, n̂ the norm of a typical
    one after clipping (the threshold C where nothing was measured), S·√d the norm of the noise. It is an upper bound:
    as if all gradients pointed the same way.
    """
    if template:
        _print_template(Policy.template_text(), as_json)
        return
    if policy is None:
        raise typer.BadParameter("give the policy, or --template to get one", param_hint="policy.toml")
    if steps is not None and epochs is not None:
        raise typer.BadParameter("give one of --steps and --epochs", param_hint="--steps")
    from lamina.cli.plan import show_plan

    show_plan(
        policy, model=model, batch=batch, steps=steps, epochs=epochs, allocate=allocate, clipping=clipping, rho=rho,
        explain=explain, compare_all=compare_all, among=among, picture=picture, measure=measure, proxy=proxy,
        shape=shape, loss=loss, passes=passes, radius=radius, seed=seed, save_measure=save_measure, as_json=as_json,
        influences=influences, reinitialise=reinitialise, gamma=gamma,
    )  # fmt: skip


def train(
    run: Annotated[Path | None, argument("RUN.toml", "the run: policy, model, data, loss, optimiser, length")] = None,
    plan_only: Annotated[
        bool, option("check all, show plan and ledger; spends and writes nothing", "--plan-only")
    ] = False,
    fresh: Annotated[bool, option("a new run in a new folder NAME-2, NAME-3, …; charged anew", "--fresh")] = False,
    inside: Annotated[bool, option("show the raw private loss in this terminal; never written", "--inside")] = False,
    threads: Annotated[int | None, option("torch threads; to go on with a run, give the same", min=1)] = None,
    template: Annotated[bool, option("print an annotated RUN.toml to start from, and exit", "--template")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model privately, as a RUN.toml says. Run the same command again to go on after a stop or a crash.

    Spends: the ε of the plan, charged in the corpus's ledger before each segment. A run that exceeds what the policy
    allows over all runs is refused before it begins.

    Writes: runs/NAME with the weights (model.safetensors), public figures (metrics.json), plan, journal and
    checkpoints; and beside it the signed ledger of what was admitted and spent (lamina ledger verify).

    Admits: with an [admit] table, only signed contributions (lamina keys, lamina attest), each under the bound that it
    signed. Validity, keys and withdrawals are checked again at every segment.

    Shows: ε so far, never the loss: a loss without noise would reveal private data that no budget paid for. Evaluate on
    public or simulated data instead.

    Examples:

      lamina train --template > RUN.toml     a run file to edit
      lamina train RUN.toml --plan-only      every check, nothing spent
      lamina train RUN.toml                  train; again to go on
      lamina train RUN.toml --fresh          another run, charged anew
      torchrun --standalone --nproc-per-node 2 -m lamina train RUN.toml
                                             with two processes: docs/distributed.md
    """
    if template:
        _print_template(packaged_text("lamina.cli", "run_template.toml"), as_json)
        return
    if run is None:
        raise typer.BadParameter("give the run file, or --template to get one", param_hint="RUN.toml")
    if inside and not stderr_is_terminal():
        problem = (
            "--inside shows the raw private loss, but standard error is not a terminal: the loss would be written down"
        )
        remedy = "run it in a terminal; or leave --inside out and evaluate on public data"
        raise RunError("cli.inside-needs-terminal", problem, remedy)
    from lamina.cli.train import run_training

    run_training(run, plan_only=plan_only, fresh=fresh, inside=inside, threads=threads, as_json=as_json)


def study(
    names: Annotated[
        list[str] | None, argument("NAMES", f"all, or any of {', '.join(STUDY_NAMES)}; default: all")
    ] = None,
    size: Annotated[
        str,
        option(
            "quick: minutes, not evidence; full: an hour or two; paper: the document's own size, days",
            choices=STUDY_SIZES,
        ),
    ] = "quick",
    data: Annotated[
        Path | None, option("folder with PTB-XL, OhioT1DM or MIMIC-III waveforms; default: simulated patients")
    ] = None,
    folder: Annotated[
        Path, option("where results, tables and figures go; what is there already is not measured again")
    ] = Path("runs/study"),
    workers: Annotated[int, option("trainings at a time, one thread each", min=1, max=64)] = 2,
    as_json: JsonOption = False,
) -> None:
    """Measure the tables and figures of the LSAB-zCDP document again, on simulated patients or on your data.

    Every method has the same true ε, first weights, samples and optimiser. The page that is written has the document's
    figures beside the measured ones, and the reason for every difference. Interrupt it at any time: the same command
    goes on where it was.

    Spends nothing of a ledger: noise comes from seeds, so that a result can be repeated. Such models are measurements;
    never release one that was trained on private data. The folder holds figures that were computed from --data.

    Examples:

      lamina study                            all of it, quick: shows that it runs
      lamina study table5 --size full         one table, five seeds
      lamina study table5 --data ptb-xl       your records: docs/signals.md says what is read
    """
    from lamina.cli.study import show_study

    show_study(names or ["all"], size=size, data=data, folder=folder, workers=workers, as_json=as_json)


def bench(
    quick: Annotated[bool, option("about five minutes; fewer rounds, wider limits", "--quick")] = False,
    only: Annotated[
        list[str] | None, option(f"one of {', '.join(WORKLOAD_NAMES)}; may be repeated", choices=WORKLOAD_NAMES)
    ] = None,
    rounds: Annotated[int | None, option("rounds per workload, all of them measured")] = None,
    threads: Annotated[int, option("torch threads")] = 2,
    processor_time: Annotated[
        bool,
        option("compare processor time, not the clock: for a busy machine, best with --threads 1", "--processor-time"),
    ] = False,
    to: Annotated[Path | None, option("folder for step.json and step.png", "--out")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure time and peak memory of a private step on this machine, against an ordinary step and Opacus.

    Spends nothing: the data is made up. Writes only with --out.

    Ratios are paired within interleaved rounds. time_ratio is the upper 95 % bootstrap limit. A peer that cannot run is
    null, with the reason beside it.

    Examples:

      lamina bench --quick
      lamina bench --only resae --out results
    """
    if rounds is not None and rounds < 1:
        raise typer.BadParameter("must be 1 or more", param_hint="--rounds")
    from lamina.cli.bench import show_benchmark

    show_benchmark(
        quick=quick, only=only, rounds=rounds, threads=threads, processor_time=processor_time, to=to, as_json=as_json
    )


def _print_template(text: str, as_json: bool) -> None:
    print_json({"template": text}) if as_json else sys.stdout.write(text)
