"""The statement for a contributor: the facts that a ledger records about one contribution, signed by the ledger's key.

`statement_content` computes the facts at a checkpoint; they are signed as JSON (COSE_Sign1), and `letter` puts the same
facts into sentences. The receipts in it prove leaves of the ledger to a reader who has only the ledger's public key: the
contribution, its epochs, its withdrawal, and releases. That no epoch is missing, and ε, are proven only by the ledger
itself: `compare_statement` computes the facts again.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from lamina.account.schedule import EventKey
from lamina.errors import EncodingError, LedgerError, NotVerified
from lamina.ledger.contribution_trace import account_of, trace_contribution
from lamina.ledger.governance_records import Release, Withdrawal
from lamina.ledger.key_state import check_key_may_sign
from lamina.ledger.reader import LedgerReader
from lamina.ledger.receipt import Receipt, verify_receipt
from lamina.ledger.records import ContributionRecord, Epoch, KeptContribution, KeptLeaf, Leaf, decode_kept, decode_leaf
from lamina.ledger.show import epsilon_or_none
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, parse_checkpoint, verify_checkpoint
from lamina.ledger.store.rows import StoredLeaf
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.risk import ZERO_OUT, curve_marks
from lamina.plan.step_plan import StepPlan
from lamina.release.reconciliation import reconciled_facts
from lamina.release.risk_statements import risk_figures
from lamina.sign.keys import PublicKey
from lamina.sign.notes import Note, NoteKey
from lamina.sign.signed_json import parse_json, read_cose

CONTRIBUTOR_STATEMENT = "application/lamina-contributor-statement+json"


def statement_content(
    ledger: LedgerReader, seq: int, size: int, unrecorded: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the facts about the contribution in leaf `seq`, as of the checkpoint of that size.

    `unrecorded` are the charges that no epoch records; by default, those that the store holds now.
    """
    with ledger.store.read() as rows:
        signed = rows.checkpoint(size)
    if signed is None or signed.size <= seq:
        problem = f"the ledger {ledger.name} has no checkpoint of {size} leaves that covers leaf {seq}"
        raise LedgerError("ledger.not-covered", problem, "sign one: lamina ledger checkpoint LEDGER --key KEY")
    header, keys = ledger.header, ledger.parties(size)
    trace = trace_contribution(ledger, ledger.checked_leaf(seq), size)
    found = reconciled_facts(ledger, trace, size, unrecorded)
    epochs = [each.leaf.record for each in trace.epochs if isinstance(each.leaf.record, Epoch)]
    plans = {epoch.plan: StepPlan.from_cbor(data) for epoch in epochs if (data := ledger.blob(epoch.plan)) is not None}
    events = Counter[EventKey]()
    for each in trace.epochs:
        events.update(each.events)
    proven = found["epsilon"] is not None
    stated = all(run["conditions"] and run["conditions"]["adjacency"] == "add/remove" for run in found["runs"])
    marks = frozenset[str]().union(*map(curve_marks, plans.values()))
    figures = partial(risk_figures, events, accountant=header.accountant, marks=marks if stated else marks | {ZERO_OUT})
    units = (each.unit for plan in plans.values() for each in plan.classes if each.name == trace.record.bound.cls)
    last, *_ = [each.leaf.seq for each in reversed(trace.epochs)] or [seq]
    proofs = [trace.leaf, *(each.leaf for each in trace.epochs), *trace.releases]
    proofs += [] if trace.withdrawal is None else [trace.withdrawal]
    return {
        **found,
        "unit": next(units, "contribution"),
        "delta": header.delta,
        "accountant": header.accountant,
        "membership": figures(of="membership") if proven else None,
        "content": figures(of="content") if proven else None,
        "withdraw": keys.withdraw.name.lower(),
        "witnesses_required": keys.witnesses,
        "checkpoint": signed.text,
        "receipts": [
            _proof(ledger, each, size, body=each.kind is not Epoch or each.seq == last)
            for each in sorted(proofs, key=lambda each: each.seq)
        ],
    }


def _proof(ledger: LedgerReader, leaf: Leaf, size: int, *, body: bool) -> dict[str, Any]:
    """Return a leaf with its receipt. Only the last epoch includes its body, because a body is about other people too."""
    data, rest = ledger.raw(leaf.seq)
    parts = {"leaf": data, "body": rest if body else None, "receipt": ledger.receipt(leaf.seq, size)}
    encoded = {name: None if part is None else base64.b64encode(part).decode() for name, part in parts.items()}
    return {"index": leaf.seq, **encoded}


def signed_size(ledger: Ledger) -> int:
    """Sign a checkpoint and return its size, if the ledger's key may state facts as of it.

    The ledger is verified first, except for attestations. NotVerified if that fails.
    """
    size = parse_checkpoint(ledger.checkpoint())[0].size
    check_key_may_sign(ledger.parties(size), ledger.signing_key(), ledger.leaf(size - 1).time)
    _check_ledger(ledger)
    return size


def _check_ledger(ledger: LedgerReader) -> None:
    if (wrong := verify(ledger.store, signatures=False).problem) is not None:
        problem = f"the ledger {ledger.name} does not verify: {wrong}"
        raise NotVerified("release.ledger-not-verified", problem, "restore the ledger from a copy")


# ------------------------------------------------------------------------------------------ checking

_ASK = "ask the keeper of the ledger for another statement"


def read_statement(data: bytes, trust: Trust) -> tuple[dict[str, Any], Note, ContributionRecord | KeptContribution]:
    """Return a statement that a trusted key of its ledger signed, its checkpoint, and the record of the contribution.

    Raises NotVerified if the key, a receipt, or what a receipt proves differs; EncodingError for any other file.
    """
    # 1. A trusted ledger key signed it.
    message = read_cose(data, CONTRIBUTOR_STATEMENT)
    content = parse_json(message.payload, "the statement")
    try:
        origin = content["ledger"]["origin"]
        keys = trust.keys(origin)
        if message.by(keys) is None:
            named = f"it names key {message.kid.hex()[:16]}"
            problem = f"the statement of {origin!r} is not signed by a trusted key; {named}"
            raise NotVerified("release.statement-not-by-key", problem, "give the ledger's own public key")
        # 2. So is its checkpoint, of the tree that it names.
        signers = [NoteKey(origin, key) for key in dict.fromkeys(keys)]
        head = verify_checkpoint(content["checkpoint"], signers, origin=origin)
        if (head.size, head.root.hex()) != (content["ledger"]["size"], content["ledger"]["root"]):
            raise _differs("its checkpoint states another tree")
        # 3. Every receipt proves its leaf in this tree.
        leaves = {each["index"]: _check_proof(each, keys, head) for each in content["receipts"]}
        # 4. The facts are those of the leaves.
        _check_facts(content, leaves)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise EncodingError("release.statement-malformed", f"the statement lacks a field: {error!r}", _ASK) from None
    return content, parse_checkpoint(content["checkpoint"])[1], leaves[content["contribution"]["index"]][1]


def _check_proof(proof: Mapping[str, Any], keys: list[PublicKey], head: LedgerCheckpoint) -> tuple[KeptLeaf, Any]:
    """Return a leaf that its receipt proves, and its record; None as the record of an epoch without its body."""
    leaf, receipt = (base64.b64decode(proof[name], validate=True) for name in ("leaf", "receipt"))
    body = None if proof["body"] is None else base64.b64decode(proof["body"], validate=True)
    found, kept = Receipt.decode(receipt), decode_kept(leaf)
    shown = any(verify_receipt(receipt, leaf, key, head.origin) for key in keys)
    if not shown or (found.size, found.index) != (head.size, kept.seq) or kept.seq != proof["index"]:
        raise _differs(f"the receipt of leaf {proof['index']} does not prove that leaf")
    bare = body is None and kept.kind is Epoch
    return kept, None if bare else decode_leaf(StoredLeaf(leaf, body)).record


def _check_facts(content: Mapping[str, Any], leaves: Mapping[int, tuple[KeptLeaf, Any]]) -> None:
    """Raise NotVerified unless the facts are those that the leaves prove."""
    told, gone, events = content["contribution"], content["withdrawn"], content["events"]
    if content["unrecorded"] and content["epsilon"] is not None:
        raise _differs("it states an ε beside charges that no epoch records")
    record = leaves[told["index"]][1]
    facts = [(record.descriptor.hex(), told["descriptor"], "its receipt is of another contribution")]
    bound = record.bound
    facts += [((bound.cls, not bound.noise_micro), (told["class"], told["public"]), "it names another class")]
    if gone is not None:
        facts.append((leaves[gone["index"]][1].target, told["index"], "its withdrawal is of another contribution"))
    for each in content["releases"]:
        facts.append((leaves[each["index"]][1].manifest.hex(), each["manifest"], "it names another release"))
    if events and (account := account_of(leaves[events[-1]["index"]][1].accounts, bound)) is not None:
        facts.append((epsilon_or_none(account.spend), events[-1]["epsilon_account"], "its last epoch states another ε"))
    stated = {told["index"]: ContributionRecord} | {each["index"]: Epoch for each in events}
    stated |= {each["index"]: Release for each in content["releases"]} | ({gone["index"]: Withdrawal} if gone else {})
    proves = {seq: kept.kind for seq, (kept, _) in leaves.items()}
    facts.append((proves, stated, "it proves other leaves than it states"))
    for proven, said, problem in facts:
        if proven != said:
            raise _differs(problem)


def compare_statement(content: Mapping[str, Any], ledger: LedgerReader) -> int:
    """Return how many leaves the ledger has gained since; NotVerified if it gives other facts at the same checkpoint.

    The ledger is verified first, except for attestations.
    """
    _check_ledger(ledger)
    size, seq = int(content["ledger"]["size"]), int(content["contribution"]["index"])
    if ledger.header_hash.hex() != content["ledger"]["header"]:
        raise _differs("it is about another ledger")
    if isinstance(ledger.leaf(seq).record, KeptContribution) and not content["contribution"]["pruned"]:
        problem = f"the body of leaf {seq} was pruned after the statement, whose facts cannot be computed again"
        raise LedgerError("release.statement-of-pruned", problem, "check it without the ledger")
    again = statement_content(ledger, seq, size, content["unrecorded"])  # leaves do not show what was open at a time
    again["checkpoint"] = content["checkpoint"]  # it gains cosignatures; the tree is compared by its root
    if wrong := [name for name in again if again[name] != content.get(name)]:
        raise _differs(f"the ledger gives another {' and '.join(wrong)}")
    return ledger.size - size


def _differs(problem: str) -> NotVerified:
    return NotVerified("release.statement-differs", f"the statement is wrong: {problem}", _ASK)
