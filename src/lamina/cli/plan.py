"""Show clipping, noise, sigma and ε of every class and layer, before the first step.

Spends nothing and reads no private data: the cost follows from the policy, the shape of the model, the batch and the number of
steps. Try values until ε, noise and length suit you, then train. Writes only what --picture and --save-measure name.

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

S/N, the signal to noise of a layer, is b·n̂/(S·√d): b contributions expected in a step, n̂ the norm of a typical one after clipping
(the threshold C where nothing was measured), S·√d the norm of the noise. It is an upper bound: as if all gradients pointed the same
way.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.cli import by_name
from lamina.cli.by_name import BUILT_IN_MODELS
from lamina.cli.command import Answer, argument, command, misuse, option
from lamina.cli.explain import (
    WHEN_TO_USE,
    PlanExplanation,
    bands_note,
    compare_allocations,
    plan_notes,
    requested_epsilon,
)
from lamina.cli.layer_figures import check_picture, draw_plan
from lamina.cli.terminal import results_only
from lamina.errors import LaminaError
from lamina.plan.policy import Policy
from lamina.sign.keys import read_small
from lamina.validate import parse_toml

if TYPE_CHECKING:
    from torch import nn

    from lamina.cli.run_file import RunFile

_EXPLAIN, _MEASURE = "Explaining", "Measuring the layers (never on private data)"
_MODEL_HELP = f"package.module:factory, or built in: {', '.join(BUILT_IN_MODELS)}; default: residual"
_ALLOCATE_HELP = (
    f"how C and S are chosen: {', '.join(WHEN_TO_USE)}; with options: ladp:mode=budget,least=0.2; default: pareto"
)


@command()
def plan(
    policy: Path | None = argument(
        "policy.toml", "classes, populations, budgets, depth profiles; or a RUN.toml: that run", default=None
    ),
    model: str | None = option(_MODEL_HELP, suggest=BUILT_IN_MODELS),
    batch: int | None = option("expected contributions per step, all classes together; default: 256"),
    steps: int | None = option("number of steps; or give --epochs"),
    epochs: float | None = option("passes over the declared populations"),
    allocate: str | None = option(_ALLOCATE_HELP, suggest=WHEN_TO_USE),
    clipping: str | None = option("box or joint; default: what the allocation prefers", choices=("box", "joint")),
    rho: float | None = option("zCDP budget of every class, ρ/T per step, instead of the policy's ε"),
    explain: bool = option("figures and bars of every layer, and why this plan", panel=_EXPLAIN),
    compare_all: bool = option("every allocation side by side at the same ε", "--compare", panel=_EXPLAIN),
    among: str | None = option("compare only these: flat,pareto,ladp:mode=budget", panel=_EXPLAIN, metavar="NAMES"),
    picture: Path | None = option("draw the layers: FILE.html, or .png, .svg with matplotlib", panel=_EXPLAIN),
    measure: Path | None = option("a saved measure", panel=_MEASURE),
    proxy: str | None = option(
        "measure now on: gaussian, public:nets:data, simulated:nets:data", panel=_MEASURE, metavar="PROXY"
    ),
    shape: str | None = option(
        "shape of one example, for gaussian: 12,256", "--input", panel=_MEASURE, metavar="SHAPE"
    ),
    loss: str | None = option("as in RUN.toml; default: squared error to the input (autoencoders)", panel=_MEASURE),
    passes: int = option("how many examples to measure", panel=_MEASURE, min=1, default=1000),
    radius: float | None = option("public L2 bound on an example, for Δ; default: that of the proxy", panel=_MEASURE),
    influences: bool = option("also influence functions", "--influence", panel=_MEASURE),
    reinitialise: int = option(
        "Δ over so many copies with weights drawn anew; 0: at these weights", panel=_MEASURE, min=0, default=0
    ),
    gamma: str = option(
        "where Δ as printed has γ: all, norm, elsewhere, none; epsilon: all, with ε/σ at norm layers",
        panel=_MEASURE,
        choices=("all", "norm", "elsewhere", "epsilon", "none"),
        default="all",
    ),
    slopes: str = option(
        "local constants over the inputs seen, or over a Gaussian fit",
        panel=_MEASURE,
        choices=("empirical", "gaussian"),
        default="empirical",
    ),
    seed: int = option("seed of weights and proxy inputs", panel=_MEASURE, min=0, default=0),
    save_measure: Path | None = option("save the measure", panel=_MEASURE),
    template: bool = option("print an annotated policy.toml to start from, and exit"),
) -> Answer:
    if template:
        text = Policy.template_text()
        return Answer({"template": text}, text, raw=True)
    if policy is None:
        raise misuse("give the policy, or --template to get one", "policy.toml")
    if steps is not None and epochs is not None:
        raise misuse("give one of --steps and --epochs", "--steps")
    from lamina.allocate.make_plan import ALLOCATIONS, DEFAULT_ALLOCATION, explained_plan
    from lamina.cli.planned_run import PlannedRun, auto_bands_note, layer_stack, plan_arguments
    from lamina.cli.proxy_measure import MeasureOptions
    from lamina.plan.selection import planned_noised_sizes
    from lamina.run.restricted import restricted_notes

    wanted = MeasureOptions(
        file=measure, proxy=proxy, shape=shape, loss=loss, passes=passes, radius=radius, seed=seed, save=save_measure,
        influences=influences, reinitialise=reinitialise, gamma=gamma, slopes=slopes,
    )  # fmt: skip
    wanted.check()
    if picture is not None:
        check_picture(picture)
    file, beside = run_file_or_none(policy), policy.resolve().parent
    if file is None and steps is None and epochs is None:
        if not policy.exists():
            raise misuse(f"there is no file '{policy}'", "policy.toml")
        raise misuse("give one of --steps and --epochs", "--steps")
    rules = Policy.load(policy if file is None else beside / file.policy)
    if file is not None:
        wanted = replace(wanted, run=file, beside=beside)
        if measure is not None or proxy is not None:  # the measure that RUN.toml names may not exist yet
            file = file.model_copy(update={"measure": None})
    common: dict[str, Any] = {"batch": 256} if file is None else plan_arguments(file, beside, rules)
    if steps is not None or epochs is not None:
        common |= {"steps": steps, "epochs": epochs}
    if rho is not None:
        common |= {"rho": rho, "epsilon": None, "noise_multiplier": None}
    given = {"batch": batch, "clipping": clipping, "allocate": allocate and by_name.parse_allocation(allocate)}
    common |= {name: value for name, value in given.items() if value is not None}
    chosen = common.pop("allocate", None) or by_name.parse_allocation(DEFAULT_ALLOCATION)
    allocate = allocate or (file and file.allocate and file.allocate.name) or DEFAULT_ALLOCATION
    name, arguments = (model or "residual", {}) if model or file is None else (file.model.factory, file.model.args)
    with results_only():
        net = _seeded_model(name, arguments, None if file is None else beside, seed)
        stack = layer_stack(net, file)
        known = wanted.of(name, net, stack) or common.get("measure")
    common["measure"] = known
    made, allocation = explained_plan(stack, rules, allocate=chosen, **common)
    sizes = planned_noised_sizes(made, stack.shapes)
    asked = requested_epsilon(common.get("epsilon"), common.get("rho"), rules.corpus.delta)
    notes = (
        ()
        if common.get("noise_multiplier")
        else (*plan_notes(made, rules, asked), *(auto_bands_note(file, rules) or bands_note(made)))
    )
    with results_only():
        labelled = wanted.labelled()
        if labelled is None and file is not None:
            labelled = PlannedRun(file=file, beside=beside, policy=rules, model=net, plan=made).option("proxy")
        notes = (*notes, *restricted_notes(net, made, labelled, progress=True))
    if model is None and file is None:
        notes = (
            *notes,
            f"the model is the built-in '{name}': --model package.module:factory, or RUN.toml, plans yours",
        )
    rows = None
    if compare_all or among is not None:
        names = by_name.split_allocations(among) if among is not None else dict.fromkeys((*ALLOCATIONS, allocate))
        rows = compare_allocations(lambda a: explained_plan(stack, rules, allocate=a, **common), names, known, sizes)
    answer = PlanExplanation(
        plan=made, allocation=allocation, measure=known, notes=notes, compared=rows, chosen=allocate, full=explain,
        sizes=sizes,
    )  # fmt: skip
    if picture is not None:
        draw_plan(made, answer.layers, answer.why, picture)
    written = [f"written: {path}" for path in (picture, save_measure) if path is not None]
    return Answer(answer.to_dict(), str(answer), *written)


def run_file_or_none(path: Path) -> RunFile | None:
    """A RUN.toml, which names its policy; None for a policy, or what is neither."""
    found: dict[str, Any] = {}
    with suppress(LaminaError, ValueError):
        found = parse_toml(read_small(path, "the file", most=1 << 20).decode("utf-8"))
    if "policy" not in found:
        return None
    from lamina.cli.run_file import RunFile

    return RunFile.load(path)


def _seeded_model(name: str, arguments: Mapping[str, Any], beside: Path | None, seed: int) -> nn.Module:
    """The model with weights drawn from the seed, so that a measurement can be repeated."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return by_name.make_model(name, arguments, beside=beside)
