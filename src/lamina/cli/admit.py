"""`lamina admit`: which contributions of a folder are admitted, why the others are not, and what to do about it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.admit.admission import Admission
from lamina.admit.gate import AdmissionGate
from lamina.admit.resolver import Caps, Resolution
from lamina.admit.verdicts import Reason
from lamina.cli.terminal import (
    JsonOption,
    argument,
    columns,
    open_private_key,
    option,
    print_answer,
    progress_bar,
    results_only,
)
from lamina.errors import AdmissionError
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.run.payload_admission import admit_payloads
from lamina.sign.key_ring import KeyRing

_SIGN_IT = "sign it: lamina attest"
_SIGN_AGAIN = "sign it again: lamina attest"
_SHOW_KEYS = "lamina keys list shows what the ring says about it"

REMEDIES: dict[Reason, str] = {
    Reason.BAD_ID: "rename its folder to printable text",
    Reason.UNREADABLE: "put one readable payload.npz or payload.csv there, with the arrays that the others have",
    Reason.TOO_LARGE: "split it into several contributions, or check that it is the right file",
    Reason.NO_ATTESTATION: _SIGN_IT,
    Reason.NO_DESCRIPTOR: f"put descriptor.cbor back, or {_SIGN_AGAIN}",
    Reason.NO_PAYLOAD: "put the payload that was signed there",
    Reason.MALFORMED: _SIGN_AGAIN,
    Reason.UNKNOWN_SCHEMA: "use a version of Lamina that knows it",
    Reason.WRONG_ALGORITHM: "sign with Ed25519: lamina attest",
    Reason.UNKNOWN_KEY: "check whose key it is, then lamina keys add; or leave it out",
    Reason.WRONG_ROLE: f"sign with a key for contributors: lamina attest --force; {_SHOW_KEYS}",
    Reason.REVOKED_KEY: "let its owner sign it again with a new key: lamina attest --force",
    Reason.RETIRED_KEY: "let its owner sign it again with the new key: lamina attest --force",
    Reason.EARLY_KEY: f"wait, or correct valid_from in the ring; {_SHOW_KEYS}",
    Reason.BAD_SIGNATURE: f"it was changed, or never signed by that key: {_SIGN_AGAIN}",
    Reason.MISMATCH: f"make folder, listing and signature agree, or {_SIGN_AGAIN}",
    Reason.WRONG_AUDIENCE: "ask its owner to sign it for this corpus",
    Reason.NOT_BOUND: f"{_SIGN_AGAIN}, under the policy.toml that names the ledger",
    Reason.OTHER_LEDGER: "admit it into the ledger that it names, or ask its owner to sign for this one: lamina attest --force",
    Reason.NOT_YET_VALID: "wait; or correct the clock of the computer that signed",
    Reason.EXPIRED: "ask its owner whether it may be used longer, and to sign it again",
    Reason.POLICY_MISMATCH: "ask its owner to sign under the floors in force: lamina attest",
    Reason.UNKNOWN_CLASS: "add the class to the policy, or ask its owner to sign for another one",
    Reason.UNBOUNDED_CLASS: "give the class an epsilon or a noise_multiplier in the policy",
    Reason.PUBLIC_BOUND: "ask its owner which class it is meant for",
    Reason.PUBLIC_CLAIM: "ask its owner whether it is public: then it belongs to a public class",
    Reason.CLIP_BELOW_FLOOR: "it is too strict for this corpus: leave it out, or lower the floor",
    Reason.NOISE_BELOW_FLOOR: "ask its owner to sign a larger noise multiplier",
    Reason.CLIP_ABOVE_CLASS: "ask its owner to sign the class's clip norm or a smaller one",
    Reason.NOISE_BELOW_CLASS: "ask its owner to sign the class's noise multiplier or a larger one",
    Reason.PROFILE_MISMATCH: "it signed less depth than the policy gives its class: ask its owner, or narrow the class",
    Reason.PAYLOAD_MISMATCH: "put back the data that was signed, or let its owner sign the new data",
    Reason.CHECK_FAILED: "try again; if it fails again, report it",
    Reason.WITHDRAWN: "leave it out: a withdrawal is final; lamina ledger trace shows when and why",
    Reason.DUPLICATE_ID: "rename one: give every contribution an id of its own that cannot be taken for another",
    Reason.DUPLICATE_PAYLOAD: "leave the copy out; if two people really have the same data, ask their owners",
    Reason.REPLAYED: "leave the copy out: one contribution is admitted once",
    Reason.DUPLICATE_SUBJECT: "make one contribution of all that is about one person",
    Reason.CLASS_FULL: "raise population in the policy and plan again, or leave some out",
    Reason.OUT_OF_REACH: "plan with fewer steps or a smaller batch, or leave it out",
    Reason.NOT_TRAINABLE: "correct its targets (class numbers from 0, finite values), sign it again; or leave it out",
    Reason.GONE: "put it back, or leave it out for good",
    Reason.CHANGED: "admit again: it is another contribution now",
    Reason.NOT_REPEATED: "admit again; a folder can be read as often as needed",
}


_LEDGER = "Where admissions and withdrawals are recorded"
_PLAN = "What signed bounds mean in a run (nothing is trained)"


def admit(
    policy: Annotated[Path, argument("policy.toml", "the policy of the corpus: classes, bounds, floors")],
    folder: Annotated[Path, argument("FOLDER", "one folder for each contribution")],
    keys: Annotated[Path, option("the key ring of trusted keys", metavar="FILE")] = Path("keys.json"),
    ledger: Annotated[
        str | None,
        option(
            "record them: a path, made if missing, or postgresql://…/database#schema", panel=_LEDGER, metavar="WHERE"
        ),
    ] = None,
    ledger_key: Annotated[
        Path | None,
        option("private key that signs it; default: WHERE.pem beside WHERE.db", panel=_LEDGER, metavar="FILE"),
    ] = None,
    processes: Annotated[int, option("processes that check signatures", min=1)] = 1,
    run: Annotated[Path | None, option("the run to plan for", "--plan", panel=_PLAN, metavar="RUN.toml")] = None,
    model: Annotated[str, option("without --plan: as for lamina plan", panel=_PLAN)] = "residual",
    batch: Annotated[int | None, option("without --plan: expected contributions per step", panel=_PLAN)] = None,
    steps: Annotated[int | None, option("without --plan: steps; or give --epochs", panel=_PLAN)] = None,
    epochs: Annotated[float | None, option("without --plan: passes over the populations", panel=_PLAN)] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every contribution of a folder as a run would; show which are admitted, which are not, and why.

    A contribution is admitted if a key of the ring signed it, for this corpus and a class of the policy, under a bound
    that respects the floors and the class; if it is valid now, there once, and its data is what was signed and can be
    trained on. A refusal stops no other contribution. Spends nothing; lamina train with [admit] checks again.

    With --ledger, the ledger of the corpus records who is admitted. It is made if there is none, with its key beside
    it. Contributions that are already in it are admitted again and not written again; withdrawn ones are refused. The
    ledger adopts the policy, unless that would protect less than before. Without --ledger nothing is written.

    With --plan, or --batch and --epochs, it also shows what each signed bound means in a run: how much the thresholds of
    a stricter contribution are scaled, the least and the largest variance of its noise, and the ε that it spends.

    Exit code 0 if nothing was refused, 1 if something was.

    Examples:

      lamina admit policy.toml contributions
      lamina admit policy.toml contributions --ledger corpus.ledger.db
      lamina admit policy.toml contributions --keys trusted.json --processes 2
      lamina admit policy.toml contributions --plan RUN.toml
      lamina admit policy.toml contributions --batch 256 --epochs 20 --json
    """
    opened = Policy.load(policy)
    planned = _plan_for_bounds(opened, policy, run, model, batch, steps, epochs)
    found = _review_folder(opened, folder, keys, processes, ledger, ledger_key)
    if not len(found) and not found.refused:
        problem = f"'{folder}' holds no contributions"
        remedy = "give the folder that holds one folder per contribution: ID/payload.npz"
        raise AdmissionError("cli.contributions-missing", problem, remedy)
    resolution = None if planned is None else found.resolve(planned[0], max_occurrences=planned[1])
    print_answer(admission_json(found, resolution), admission_page(found, resolution), as_json)
    if found.refused:
        raise typer.Exit(1)


def _review_folder(
    policy: Policy, folder: Path, keys: Path, processes: int, ledger: str | None, ledger_key: Path | None
) -> Admission:
    gate = AdmissionGate(policy, KeyRing.load(keys), processes=processes)
    with ExitStack() as stack:
        if ledger is not None:
            from lamina.ledger.admission_batch import open_register

            key = None if ledger_key is None else open_private_key(ledger_key, None)
            gate.register = stack.enter_context(open_register(ledger, policy, key=key, clock=gate.clock.now))
        elif ledger_key is not None:
            raise typer.BadParameter("give --ledger with it", param_hint="--ledger-key")
        tick = stack.enter_context(progress_bar("checking signatures"))
        return admit_payloads(gate, folder, progress=tick)[0]


def admission_json(found: Admission, resolution: Resolution | None = None) -> dict[str, Any]:
    """For --json: `admitted`, `refused[].{id, reason}` and more."""
    remedies = {str(reason): REMEDIES[reason] for reason in found.refused.counts()}
    return {
        **found.to_dict(), "remedies": remedies, "resolution": None if resolution is None else resolution.to_dict(),
    }  # fmt: skip


def admission_page(found: Admission, resolution: Resolution | None = None) -> str:
    """Tables of who is admitted and who is refused, what to do about it, and what bounds mean in a run."""
    lines = [found.table()]
    reasons = dict.fromkeys([*found.refused.counts(), *(each.reason for each in found.left)])
    if remedies := [[str(reason), REMEDIES[reason]] for reason in reasons]:
        lines += ["", columns([["refused for", "what to do"], *remedies], left=2)]
    if resolution is not None:
        lines += ["", resolution.table()]
    return "\n".join(lines)


def _plan_for_bounds(
    policy: Policy, path: Path, run: Path | None, model: str, batch: int | None, steps: int | None, epochs: float | None
) -> tuple[StepPlan, Caps] | None:
    """The plan to resolve bounds under, and the caps on occurrences; None if no option asks for it. Imports torch."""
    by_hand = [value is not None for value in (batch, steps, epochs)]
    if run is not None:
        if any(by_hand):
            raise typer.BadParameter("give --plan, or --batch with --steps or --epochs", param_hint="--plan")
        from lamina.cli.run_file import RunFile
        from lamina.cli.train import PlannedRun

        with results_only():
            planned = PlannedRun.of(RunFile.load(run), run.resolve().parent)
        if planned.policy != policy:
            problem = f"'{run}' uses the policy '{planned.file.policy}', which differs from '{path}'"
            raise AdmissionError("cli.run-of-other-policy", problem, "give the policy of the run")
        return planned.plan, planned.file.max_occurrences
    if not any(by_hand):
        return None
    if batch is None or (steps is None) == (epochs is None):
        raise typer.BadParameter("give --batch, and one of --steps and --epochs", param_hint="--batch")
    from lamina.allocate.make_plan import make_plan
    from lamina.cli import by_name
    from lamina.plan.layer_stack import LayerStack

    with results_only():
        stack = LayerStack.from_model(by_name.make_model(model))
    return make_plan(stack, policy, batch=batch, steps=steps, epochs=epochs), None
