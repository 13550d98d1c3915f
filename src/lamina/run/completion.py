"""Enter the records of runs into a ledger again that was restored from an older copy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lamina.codec import schema_of
from lamina.errors import RunError
from lamina.ledger.run_records import RunBegin, RunEnd
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import StepPlan
from lamina.run.run import account_of_bound, charge_adaptive_budget
from lamina.run.run_files import Lease
from lamina.run.run_record import Receipts, RunIdentity


def complete_ledger(ledger: Ledger, folders: Sequence[Path]) -> int:
    """Enter what the ledger lacks of the runs in these folders, finished ones too; return the number of its new leaves.

    The receipts of a run say what the ledger recorded. Attempts, starts and ends that the ledger has are left as they are.
    """
    runs = [(folder, RunIdentity.read(folder), Receipts(folder)) for folder in folders]
    for folder, run, _ in runs:
        if run.origin != ledger.origin:
            problem = (
                f"the run in '{folder}' was charged under origin {run.origin!r}, {ledger.name} is of {ledger.origin!r}"
            )
            raise RunError("train.origin-changed", problem, "give runs of this corpus")
    names = [(bytes.fromhex(run.run), each.segment, each.generation) for _, run, had in runs for each in had.attempts]
    with ledger.completing(names):
        spend, before = SpendLedger(ledger), ledger.size
        for folder, run, receipts in runs:
            with Lease.take(folder):
                _enter(spend, folder, run.run, receipts)
                replace(run, header=ledger.header_hash).write(folder)  # another one, if the ledger was lost
        if ledger.signs:
            ledger.checkpoint()
        return ledger.size - before


def _enter(spend: SpendLedger, folder: Path, run: str, receipts: Receipts) -> None:
    records = {kind: [each[kind] for each in receipts.entries if kind in each] for kind in ("begin", "end")}
    if spend.ledger.signs:
        spend.ledger.append([schema_of(RunBegin).from_cbor(each) for each in records["begin"]])
    for each in receipts.attempts:
        if each.units:
            plan = _plan(folder, each.plan)
            accounts = [account_of_bound(plan, name, scale) for name, scale in each.scales.items()]
            charge_adaptive_budget(spend, run, plan, accounts, {}, already=True)
        if not spend.charge(
            run, segment=each.segment, generation=each.generation, nonce=each.nonce, charges=each.charges, bounds={},
            scales=each.scales, plan=each.plan, begun=each, factors=each.factors,
            units=each.units, already=True,
        ):  # fmt: skip
            problem = f"the ledger '{spend.path}' holds another attempt at segment {each.segment} than '{folder}'"
            raise RunError("train.ledger-disagrees", problem, "give the newest folder of the run first")
        assert each.outcome is not None
        spend.record(run, each.key, each, each.outcome, plan=_plan(folder, each.plan), scales=each.scales)
    if spend.ledger.signs:
        spend.ledger.append([schema_of(RunEnd).from_cbor(each) for each in records["end"]])


def _plan(folder: Path, digest: bytes) -> StepPlan:
    for path in (folder / "plan.cbor", folder / f"plan-{digest.hex()[:16]}.cbor"):
        if path.exists() and hashlib.sha256(data := path.read_bytes()).digest() == digest:
            return StepPlan.from_cbor(data)
    problem = f"the plan {digest.hex()[:16]} of a segment that was charged is not in '{folder}'"
    raise RunError(
        "train.plan-missing", problem, "restore plan.cbor: what the segment cost cannot be recorded without it"
    )
