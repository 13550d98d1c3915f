"""Check every contribution of a folder as a run would; show which are admitted, which are not, and why.

A contribution is admitted if a key of the ring signed it, for this corpus and a class of the policy, under a bound that respects the
floors and the class; if it is valid now, there once, and its data is what was signed and can be trained on. A refusal stops no other
contribution. Spends nothing; lamina train with [admit] checks again.

With --ledger, the ledger of the corpus records who is admitted. It is made if there is none, with its key beside it. Contributions
that are already in it are admitted again and not written again; withdrawn ones are refused. The ledger adopts the policy, unless
that would protect less than before. Without --ledger nothing is written.

With --plan, or --batch and --epochs, it also shows what each signed bound means in a run: how much the thresholds of a stricter
contribution are scaled, the least and the largest variance of its noise, and the ε that it spends.

Exit code 0 if nothing was refused, 1 if something was.

Examples:

  lamina admit policy.toml contributions
  lamina admit policy.toml contributions --ledger corpus.ledger.db
  lamina admit policy.toml north south              of two hospitals
  lamina admit policy.toml contributions --keys trusted.json --processes 2
  lamina admit policy.toml contributions --plan RUN.toml
  lamina admit policy.toml contributions --batch 256 --epochs 20 --json
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lamina.admit.admission import Admission
from lamina.admit.gate import AdmissionGate
from lamina.admit.resolver import Caps, Resolution
from lamina.cli.command import Answer, argument, command, misuse, option, table
from lamina.cli.terminal import open_private_key, progress_bar, results_only
from lamina.errors import AdmissionError
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.run.payload_admission import admit_payloads
from lamina.sign.key_ring import KeyRing

_LEDGER = "Where admissions and withdrawals are recorded"
_PLAN = "What signed bounds mean in a run (nothing is trained)"


@command()
def admit(
    policy: Path = argument("policy.toml", "the policy of the corpus: classes, bounds, floors"),
    folders: list[Path] = argument("FOLDER…", "one folder for each contribution in it; several are one corpus"),
    keys: Path = option("the key ring of trusted keys", default=Path("keys.json")),
    ledger: str | None = option(
        "record them: a path, made if missing, or postgresql://…/database#schema", panel=_LEDGER, metavar="WHERE"
    ),
    ledger_key: Path | None = option("private key that signs it; default: WHERE.pem beside WHERE.db", panel=_LEDGER),
    processes: int = option("processes that check signatures", default=1, min=1),
    run: Path | None = option("the run to plan for", "--plan", panel=_PLAN, metavar="RUN.toml"),
    model: str = option("without --plan: as for lamina plan", default="residual", panel=_PLAN),
    batch: int | None = option("without --plan: expected contributions per step", panel=_PLAN),
    steps: int | None = option("without --plan: steps; or give --epochs", panel=_PLAN),
    epochs: float | None = option("without --plan: passes over the populations", panel=_PLAN),
) -> Answer:
    opened = Policy.load(policy)
    planned = _plan_for_bounds(opened, policy, run, model, batch, steps, epochs)
    gate = AdmissionGate(opened, KeyRing.load(keys), processes=processes)
    with ExitStack() as stack:
        if ledger is not None:
            from lamina.ledger.admission_batch import open_register

            key = None if ledger_key is None else open_private_key(ledger_key)
            gate.register = stack.enter_context(open_register(ledger, opened, key=key, clock=gate.clock.now))
        elif ledger_key is not None:
            raise misuse("give --ledger with it", "--ledger-key")
        tick = stack.enter_context(progress_bar("checking signatures"))
        found = admit_payloads(gate, folders, progress=tick)[0]
    if not len(found) and not found.refused:
        problem = f"'{', '.join(map(str, folders))}' holds no contributions"
        remedy = "give the folder that holds one folder per contribution: ID/payload.npz"
        raise AdmissionError("cli.contributions-missing", problem, remedy)
    resolution = None if planned is None else found.resolve(planned[0], max_occurrences=planned[1])
    remedies = {str(reason): reason.remedy for reason in found.refused.counts()}
    facts = {**found.to_dict(), "remedies": remedies, "resolution": resolution and resolution.to_dict()}
    return Answer(facts, admission_page(found, resolution), ok=not found.refused)


def admission_page(found: Admission, resolution: Resolution | None = None) -> str:
    """Tables of who is admitted and who is refused, what to do about it, and what bounds mean in a run."""
    lines = [found.table()]
    reasons = dict.fromkeys([*found.refused.counts(), *(each.reason for each in found.left)])
    if remedies := [[str(reason), reason.remedy] for reason in reasons]:
        lines += ["", table([["refused for", "what to do"], *remedies], left=2)]
    if resolution is not None:
        lines += ["", resolution.table()]
    return "\n".join(lines)


def _plan_for_bounds(
    policy: Policy, path: Path, run: Path | None, model: str, batch: int | None, steps: int | None, epochs: float | None
) -> tuple[StepPlan, Caps] | None:
    """The plan to resolve bounds under, and the caps on occurrences; None if no option asks for it. Imports torch."""
    by_hand = any(value is not None for value in (batch, steps, epochs))
    if run is not None:
        if by_hand:
            raise misuse("give --plan, or --batch with --steps or --epochs", "--plan")
        from lamina.cli.planned_run import PlannedRun
        from lamina.cli.run_file import RunFile

        with results_only():
            planned = PlannedRun.of(RunFile.load(run), run.resolve().parent)
        if planned.policy != policy:
            problem = f"'{run}' uses the policy '{planned.file.policy}', which differs from '{path}'"
            raise AdmissionError("cli.run-of-other-policy", problem, "give the policy of the run")
        return planned.plan, planned.option("max_occurrences")
    if not by_hand:
        return None
    if batch is None or (steps is None) == (epochs is None):
        raise misuse("give --batch, and one of --steps and --epochs", "--batch")
    from lamina.allocate.make_plan import make_plan
    from lamina.cli import by_name
    from lamina.plan.layer_stack import LayerStack

    with results_only():
        stack = LayerStack.from_model(by_name.make_model(model))
    return make_plan(stack, policy, batch=batch, steps=steps, epochs=epochs), None
