"""Enter the records of runs into a ledger again that was restored from an older copy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamina.codec import schema_of
from lamina.errors import RunError
from lamina.ledger.run_records import RunBegin, RunEnd
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import StepPlan
from lamina.run.run import account_of_bound, charge_adaptive_budget
from lamina.run.run_files import Lease
from lamina.run.run_record import Receipts, RunIdentity, has_signature, signed_receipt


def complete_ledger(ledger: Ledger, folders: Sequence[Path]) -> int:
    """Enter what the ledger lacks of the runs in these folders, finished ones too; return the number of its new leaves.

    The receipts of a run say what the ledger recorded. Attempts, starts and ends that the ledger has are left as they are.
    With the ledger's key, only receipts that a key of this ledger signed are entered, except those of a run that was charged
    in another ledger, which was lost. Raise RunError if others are there.
    """
    runs = [(folder, RunIdentity.read(folder), Receipts(folder)) for folder in folders]
    for folder, run, _ in runs:
        if run.origin != ledger.origin:
            problem = (
                f"the run in '{folder}' was charged under origin {run.origin!r}, {ledger.name} is of {ledger.origin!r}"
            )
            raise RunError("train.origin-changed", problem, "give runs of this corpus")
    keys = ledger.governance()
    signed = {
        run.run: [each for each in had.entries if not ledger.signs or has_signature(each, keys, run.run)]
        for _, run, had in runs
    }
    for folder, run, receipts in runs:
        if run.header == ledger.header_hash:
            _refuse_unsigned(folder, receipts, signed[run.run])
    names = [
        (bytes.fromhex(run.run), each.segment, each.generation)
        for _, run, had in runs
        for each in had.attempts_in(signed[run.run])
    ]
    with ledger.completing(names):
        spend, before, restored = SpendLedger(ledger), ledger.size, ledger.lacks_records
        for folder, run, receipts in runs:
            lost = run.header != ledger.header_hash and not restored
            entries = receipts.entries if lost else signed[run.run]
            _refuse_unsigned(folder, receipts, entries)
            with Lease.take(folder):
                _enter(spend, folder, run.run, receipts, entries)
                if ledger.signs:
                    key = ledger.signing_key()
                    receipts.add(*(signed_receipt(each, run.origin, run.run, key) for each in entries))
                replace(run, header=ledger.header_hash).write(folder)  # another one, if the ledger was lost
        if ledger.signs:
            ledger.checkpoint()
        return ledger.size - before


def _refuse_unsigned(folder: Path, receipts: Receipts, entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError if the ledger key signed no receipt of something that there is a receipt of."""
    unsigned = len(receipts.nonces - receipts.nonces_in(entries))
    for kind in ("begin", "end"):
        found = [each[kind] for each in entries if kind in each]
        unsigned += sum(each[kind] not in found for each in receipts.entries if kind in each)
    if unsigned:
        problem = f"{unsigned} receipts in '{folder}' have no signature by a key of this ledger: they may be edited"
        remedy = (
            "restore the newest copy of the ledger, or of the receipts; or enter them without the ledger's key, review them "
            "with lamina spend, and accept them: lamina ledger checkpoint LEDGER --key KEY --accept"
        )
        raise RunError("train.receipt-not-signed", problem, remedy)


def _enter(
    spend: SpendLedger, folder: Path, run: str, receipts: Receipts, entries: Sequence[Mapping[str, Any]]
) -> None:  # fmt: skip
    _enter_records(spend.ledger, folder, run, "begin", entries)
    for each in receipts.attempts_in(entries):
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
    _enter_records(spend.ledger, folder, run, "end", entries)


def _enter_records(
    ledger: Ledger, folder: Path, run: str, kind: str, entries: Sequence[Mapping[str, Any]]
) -> None:  # fmt: skip
    """Append the start or the ends of the run, if the ledger was opened with its key."""
    schema = schema_of(RunBegin if kind == "begin" else RunEnd)
    records = list(dict.fromkeys(schema.from_cbor(each[kind]) for each in entries if kind in each))
    if any(each.run.hex() != run for each in records):
        problem = f"the receipts in '{folder}' have a record of another run than {run[:8]}"
        raise RunError("train.receipt-of-other-run", problem, "restore the receipts of the run from a copy")
    if ledger.signs:
        ledger.append(records)


def _plan(folder: Path, digest: bytes) -> StepPlan:
    for path in (folder / "plan.cbor", folder / f"plan-{digest.hex()[:16]}.cbor"):
        if path.exists() and hashlib.sha256(data := path.read_bytes()).digest() == digest:
            return StepPlan.from_cbor(data)
    problem = f"the plan {digest.hex()[:16]} of a segment that was charged is not in '{folder}'"
    raise RunError(
        "train.plan-missing", problem, "restore plan.cbor: what the segment cost cannot be recorded without it"
    )
