"""Content anchors, and the reconciliation of a deletion request: from a contribution to every model that may have used it.

A content anchor is a record outside the ledger that names a contribution by the hash of its descriptor, which the ledger
holds too: whoever has one of the two finds the other. It is JSON of its own, or an assertion in a C2PA manifest (in the JSON
form that C2PA tools print, or embedded in a file), with the label `lamina.contribution`. Content that had a C2PA manifest before
it was contributed is anchored by the hash that its manifest binds it with (`c2pa.hash.data`), which the contributor signs.

    {"type": "urn:lamina:content-anchor:v1", "descriptor": "<SHA-256>", "ledger": {"origin": …, "header": …}, …}
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lamina.account.accountants import pooled_epsilon
from lamina.account.charges import Account
from lamina.account.schedule import EventKey
from lamina.errors import EncodingError, LedgerError
from lamina.ledger.attempts import SpendView
from lamina.ledger.contribution_trace import ContributionTrace, EpochExposure, trace_contribution
from lamina.ledger.governance_records import Release
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch, Leaf
from lamina.ledger.run_records import RunBegin, RunEnd
from lamina.ledger.schema import nano_epsilon
from lamina.ledger.show import epsilon_or_none, leaf_excerpt
from lamina.ledger.spending import Spending
from lamina.plan.step_plan import Clipping, StepPlan
from lamina.release.letter import is_proven, reconciled_text
from lamina.release.run_evidence import newest_by_run
from lamina.sign.keys import format_utc, read_small
from lamina.sign.signed_json import parse_json

ANCHOR_TYPE = "urn:lamina:content-anchor:v1"
RECONCILIATION = "application/lamina-reconciliation+json"
C2PA_LABEL = "lamina.contribution"
_HARD_BINDING = "c2pa.hash.data"
_DIGEST = re.compile("[0-9a-f]{64}")
_MAX_DEPTH = 12


def anchor_record(ledger: LedgerReader, leaf: Leaf) -> dict[str, Any]:
    """The content anchor of the contribution in a leaf; with a receipt where a checkpoint covers it."""
    trace = trace_contribution(ledger, leaf)
    try:
        receipt = base64.b64encode(ledger.receipt(leaf.seq)).decode()
    except LedgerError:
        receipt = None
    told = trace.to_dict()
    return {
        "type": ANCHOR_TYPE,
        "descriptor": trace.record.descriptor.hex(),
        "anchor": told["anchor"],
        "ledger": {"origin": ledger.origin, "header": ledger.header_hash.hex()},
        "leaf": leaf.seq,
        "admitted": told["admitted"],
        "receipt": receipt,
    }


def read_anchor(data: bytes) -> str:
    """The digest by which a content anchor or a C2PA manifest (as JSON) names a contribution; EncodingError if it does not.

    It is that of the descriptor, or where a C2PA manifest names none, the hash of its content.
    """
    plain = parse_json(data, "the content anchor")
    found = {each for each in _descriptors(plain, 0) if isinstance(each, str) and _DIGEST.fullmatch(each)}
    if not found and isinstance(plain, dict) and "active_manifest" in plain:
        return c2pa_content_hash(plain).hex()
    if len(found) != 1:
        problem = f"the file names {len(found)} contributions, must name one"
        remedy = f"give a content anchor of lamina ledger reconcile, or a C2PA manifest with one {C2PA_LABEL} assertion"
        raise EncodingError("release.anchor-malformed", problem, remedy)
    return found.pop()


def c2pa_content_hash(plain: Any) -> bytes:
    """The SHA-256 by which the active C2PA manifest binds its content; EncodingError if it does so in another way, or wrongly."""
    try:
        bound = plain["manifests"][plain["active_manifest"]]["assertion_store"][_HARD_BINDING]
        found = base64.b64decode(bound["hash"], validate=True)
        alg, state = bound.get("alg", "sha256"), plain.get("validation_state")
    except (KeyError, TypeError, ValueError, AttributeError):
        found, alg, state = b"", None, None
    if alg != "sha256" or len(found) != 32 or state == "Invalid":
        said = f"it has no {_HARD_BINDING} with a SHA-256"
        said = "its own tool says that it is invalid" if state == "Invalid" else said
        problem = f"the C2PA manifest names no content: {said}"
        remedy = "give what c2patool --detailed prints of a file with a valid manifest, or the SHA-256 itself"
        raise EncodingError("release.c2pa-not-bound", problem, remedy)
    return found


def anchor_file(path: Path) -> bytes:
    """The JSON of a content anchor: of a .json file as it is, of any other the C2PA manifest that is embedded in it."""
    if path.suffix == ".json":
        return read_small(path, "the content anchor", most=1 << 24)
    try:
        from c2pa import C2paError, Context, Reader, Settings
    except ImportError:
        problem = f"'{path}' is no .json, and C2PA manifests inside of files cannot be read here"
        remedy = "pip install 'lamina[c2pa]', or give what c2patool --detailed prints"
        raise EncodingError("release.c2pa-not-installed", problem, remedy) from None
    offline = Settings.from_dict({"verify": {"remote_manifest_fetch": False, "ocsp_fetch": False}})
    try:
        with Context(offline) as context, Reader(path, context=context) as reader:
            return bytes(reader.detailed_json().encode())
    except C2paError as error:
        problem = f"no C2PA manifest can be read from '{path}': {str(error)[:200]}"
        raise EncodingError("release.c2pa-not-read", problem, "give a media file with an embedded manifest") from None


def _descriptors(value: Any, depth: int) -> Iterator[str]:
    """The descriptors of all anchors and assertions in a JSON value."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, dict):
        data = value.get("data")
        if value.get("label") == C2PA_LABEL and isinstance(data, dict):
            yield data.get("descriptor", "")
        elif isinstance(store := value.get("assertion_store"), dict) and isinstance(own := store.get(C2PA_LABEL), dict):
            yield own.get("descriptor", "")
        elif value.get("type") == ANCHOR_TYPE:
            yield value.get("descriptor", "")
        else:
            for each in value.values():
                yield from _descriptors(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            yield from _descriptors(each, depth + 1)


def reconcile(ledger: LedgerReader, leaf: Leaf, size: int | None = None) -> dict[str, Any]:
    """Return the answer to a request to delete the contribution in a leaf: events, models, and the spending for it.

    All of it is as of the first `size` leaves; by default of all.
    """
    size = ledger.size if size is None else size
    found = reconciled_facts(ledger, trace_contribution(ledger, leaf, size), size)
    return found | {"statement": reconciled_text(found)}


def reconciled_facts(
    ledger: LedgerReader, trace: ContributionTrace, size: int, unrecorded: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the facts of a trace over the first `size` leaves: the contribution, its events, runs and models.

    `epsilon_charged` is what the ledger charged for it. `epsilon`, also of each run, is a bound on what it has lost, and null
    unless one is proven: the contribution is private, and each run that may have used it has ended and kept its conditions.
    `unrecorded` are the charges that no epoch records; by default, those that the store holds now.
    """
    told, root = trace.to_dict(), ledger.root_at(size).hex()
    names = ("index", "admitted", "descriptor", "anchor", "class", "expires", "pruned")
    found = {
        "ledger": {"origin": ledger.origin, "header": ledger.header_hash.hex(), "size": size, "root": root},
        "as_of": format_utc(ledger.leaf(size - 1).time),
        "contribution": {name: told[name] for name in names if name in told} | {"public": trace.signed is None},
        "withdrawn": told["withdrawn"],
        "epsilon": None,
        "epsilon_charged": None if trace.signed is None else told["epsilon"],
        "epsilon_signed": told["epsilon_signed"],
        "epsilon_remaining": told["epsilon_remaining"],
        "events": told["epochs"],
        "not_used_in": told["not_used_in"],
        "runs": list(_by_run(ledger, trace, size)),
        "unrecorded": _unrecorded(ledger, trace) if unrecorded is None else unrecorded,
        "releases": [_release(ledger, each) for each in trace.releases],
    }
    if is_proven(found):
        found["epsilon"] = found["epsilon_charged"]
    else:
        for each in found["runs"]:
            each["epsilon"] = None
    return found


def _unrecorded(ledger: LedgerReader, trace: ContributionTrace) -> list[dict[str, Any]]:
    """Return by run the steps charged for the contribution that no epoch records: the run is under way, or was stopped.

    Runs that began after the contribution was withdrawn or expired are left out.
    """
    bound, end = trace.record.bound, trace.withdrawal
    starts = {each.record.run.hex(): each for each in ledger.of_kind(RunBegin) if isinstance(each.record, RunBegin)}
    late = {run for run, each in starts.items() if (end and end.seq < each.seq) or trace.record.expires <= each.time}
    with ledger.store.read() as rows:
        leaves, recorded = ledger.checked(rows), Spending(ledger.header)
        recorded.follow(rows, leaves.size, leaves)
        view = SpendView(rows, recorded)
        for account in (bound, Account(bound.cls)) if bound.signed else ():  # its own, or else that of its class
            written = Counter[str]()
            for run, _, _, steps in recorded.attempts(account):
                written[run.hex()] += steps
            left = {each.run: each.steps - written[each.run] for each in view.runs(account)}
            if any(left.values()):
                return [
                    {"run": run, "steps": steps} for run, steps in sorted(left.items()) if steps and run not in late
                ]
    return []


def _by_run(ledger: LedgerReader, trace: ContributionTrace, size: int) -> Iterator[dict[str, Any]]:
    """Yield for each run the number of steps in which the contribution was eligible, their ε alone, and the run's conditions.

    `conditions` are null unless an end of the run is recorded after its last epoch.
    """
    header, runs, plans = ledger.header, dict[bytes, list[EpochExposure]](), dict[bytes, set[bytes]]()
    for each in trace.epochs:
        epoch = each.leaf.record
        assert isinstance(epoch, Epoch)
        runs.setdefault(epoch.run, []).append(each)
        plans.setdefault(epoch.run, set()).add(epoch.plan)
    ends = newest_by_run(ledger, RunEnd, size)
    last = {leaf.record.run: leaf.seq for leaf in ledger.of_kind(Epoch, 0, size) if isinstance(leaf.record, Epoch)}
    for run, epochs in runs.items():
        events = Counter[EventKey]()
        for each in epochs:
            events.update(each.events)
        epsilon = pooled_epsilon(dict(events), delta=header.delta, name=header.accountant)
        at, end = ends.get(run, (-1, None))
        yield {
            "run": run.hex(),
            "steps": sum(each.steps for each in epochs),
            "epsilon": epsilon_or_none(nano_epsilon(epsilon)),
            "conditions": None if end is None or at < last[run] else _conditions(ledger, end, plans[run]),
        }


def _conditions(ledger: LedgerReader, end: RunEnd, plans: Collection[bytes]) -> dict[str, str | bool]:
    """Return the trainer's statements about a run, and whether its plans have enough noise; a missing plan does not."""
    known = [StepPlan.from_cbor(data) for plan in plans if (data := ledger.blob(plan)) is not None]
    adjacency = max((plan.adjacency for plan in known), key=len, default="")  # zero-out, if one of them is
    sound = len(known) == len(plans) and not any(p.claimed or p.clipping is Clipping.ELEMENTWISE for p in known)
    return end.conditions(adjacency) | {"sound_plan": sound}


def _release(ledger: LedgerReader, leaf: Leaf) -> dict[str, Any]:
    """Return a release of a model that may have used the contribution, with the name in its manifest."""
    record = leaf.record
    assert isinstance(record, Release)
    found = leaf_excerpt(leaf, "manifest", "runs", "not_after")
    data = ledger.blob(record.manifest)
    try:
        payload = base64.b64decode(parse_json(data or b"", "the manifest")["payload"])
        return found | {"name": parse_json(payload, "the manifest")["predicate"]["name"]}
    except (EncodingError, KeyError, TypeError, ValueError):
        return found | {"name": None}
