"""`lamina admit`: who of a folder of contributions may be learned from, and why the others may not."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.admit.admission import Admission
from lamina.admit.gate import Gate
from lamina.admit.keyring import KeyRing
from lamina.admit.resolution import Resolution
from lamina.admit.resolver import Caps
from lamina.cli.bars import bar
from lamina.cli.output import out, print_json, results_only
from lamina.cli.passphrase import open_key
from lamina.cli.remedies import remedies
from lamina.errors import AdmissionError
from lamina.plan import Policy, StepPlan
from lamina.plan.table import aligned

_LEDGER = "Where admissions are recorded, and withdrawals remembered"
_PLAN = "What signed bounds come to in a run (nothing is trained)"


def admit(
    policy: Annotated[
        Path, typer.Argument(metavar="policy.toml", help="the policy of the corpus: classes, bounds, floors")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="one folder for each contribution")],
    keys: Annotated[Path, typer.Option(metavar="FILE", help="the key ring: whose signatures count")] = Path(
        "keys.json"
    ),
    ledger: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="enter them: a path, made if there is none, or postgresql://…/database#schema",
            rich_help_panel=_LEDGER,
        ),
    ] = None,
    ledger_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="the private key that signs it; default: WHERE.pem beside WHERE.db",
            rich_help_panel=_LEDGER,
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="how many check signatures at once")] = 1,
    run: Annotated[
        Path | None,
        typer.Option("--plan", metavar="RUN.toml", help="the run to plan for", rich_help_panel=_PLAN),
    ] = None,
    model: Annotated[
        str, typer.Option(help="without --plan: as for lamina plan", rich_help_panel=_PLAN)
    ] = "residual",
    batch: Annotated[
        int | None,
        typer.Option(help="without --plan: expected contributions per step", rich_help_panel=_PLAN),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="without --plan: steps; or give --epochs", rich_help_panel=_PLAN)
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="without --plan: passes over the populations", rich_help_panel=_PLAN)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Check every contribution of a folder as a run would, and say who is admitted and who is not, and why.

    A contribution is admitted if it was signed by a key of the ring, for this corpus and a class of the policy, under a
    bound that keeps to floors and class, is inside its window, is there once, and its data is what was signed. One that
    is refused stops no other. Spends nothing; lamina train with [admit] checks again.

    With --ledger those who are admitted are entered into the ledger of the corpus, which is made if there is none, with
    the key that signs it beside it. Whoever stands in it already is admitted again, and nothing is written; whoever was
    withdrawn is refused. The ledger follows the policy, unless that would protect less than before. Without --ledger
    nothing is written at all.

    With --plan, or --batch and --epochs, it also shows what each signed bound comes to in a run: by how much the
    thresholds of a stricter contribution are scaled, between which variances its noise lies, and the ε that it spends.

    Exit code 0 if nothing was refused, 1 if something was.

    Examples:

      lamina admit policy.toml contributions
      lamina admit policy.toml contributions --ledger corpus.ledger.db
      lamina admit policy.toml contributions --keys trusted.json --processes 2
      lamina admit policy.toml contributions --plan RUN.toml
      lamina admit policy.toml contributions --batch 256 --epochs 20 --json
    """
    opened = Policy.load(policy)
    planned = _planned(opened, policy, run, model, batch, steps, epochs)
    found = _reviewed(opened, folder, keys, processes, ledger, ledger_key)
    if not len(found) and not found.refused:
        raise AdmissionError(
            "cli.holds-no-contributions",
            f"'{folder}' holds no contributions",
            "give the folder that holds one folder per contribution: ID/payload.npz",
        )
    resolution = None if planned is None else found.resolve(planned[0], max_occurrences=planned[1])
    if as_json:
        print_json(as_object(found, resolution))
    else:
        out.print(page(found, resolution), markup=False, soft_wrap=True)
    if found.refused:
        raise typer.Exit(1)


def _reviewed(
    policy: Policy, folder: Path, keys: Path, processes: int, ledger: str | None, ledger_key: Path | None
) -> Admission:
    gate = Gate(policy, KeyRing.load(keys), processes=processes)
    with ExitStack() as stack:
        if ledger is not None:
            from lamina.ledger.register import registered

            key = None if ledger_key is None else open_key(ledger_key, None)
            gate.register = stack.enter_context(registered(ledger, policy, key=key, clock=gate.clock.now))
        elif ledger_key is not None:
            raise typer.BadParameter("give --ledger with it", param_hint="--ledger-key")
        tick = stack.enter_context(bar("checking signatures"))
        return gate.review(folder, progress=tick)


def as_object(found: Admission, resolution: Resolution | None = None) -> dict[str, Any]:
    """For machines: `admitted`, `refused[].{id, reason}` and more."""
    todo = remedies(found.refused.counts())
    return {
        **found.to_dict(),
        "remedies": {str(reason): text for reason, text in todo.items()},
        "resolution": None if resolution is None else resolution.to_dict(),
    }


def page(found: Admission, resolution: Resolution | None = None) -> str:
    """For people: who is in, who is not, what to do about it, and what bounds come to."""
    lines = [found.table()]
    if todo := remedies(found.refused.counts()):
        lines += [
            "",
            *aligned([["refused for", "what to do"], *([str(r), t] for r, t in todo.items())], left=2),
        ]
    if resolution is not None:
        lines += ["", resolution.table()]
    return "\n".join(lines)


def _planned(
    policy: Policy,
    path: Path,
    run: Path | None,
    model: str,
    batch: int | None,
    steps: int | None,
    epochs: float | None,
) -> tuple[StepPlan, Caps] | None:
    """The plan to resolve bounds under, and the caps on occurrences, if one is asked for. That takes torch."""
    by_hand = [value is not None for value in (batch, steps, epochs)]
    if run is not None:
        if any(by_hand):
            raise typer.BadParameter("give --plan, or --batch with --steps or --epochs", param_hint="--plan")
        from lamina.cli.prepare import Planned
        from lamina.cli.run_file import RunFile

        with results_only():
            planned = Planned.of(RunFile.load(run), run.resolve().parent)
        if planned.policy != policy:
            raise AdmissionError(
                "cli.under-another-policy",
                f"'{run}' is under another policy ('{planned.file.policy}') than '{path}'",
                "give the policy of the run",
            )
        return planned.plan, planned.file.max_occurrences
    if not any(by_hand):
        return None
    if batch is None or (steps is None) == (epochs is None):
        raise typer.BadParameter("give --batch, and one of --steps and --epochs", param_hint="--batch")
    from lamina.allocate import make_plan
    from lamina.cli import named
    from lamina.plan import LayerStack

    with results_only():
        stack = LayerStack.from_model(named.model(model))
    return make_plan(stack, policy, batch=batch, steps=steps, epochs=epochs), None
