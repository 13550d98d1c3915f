"""`lamina ledger show, trace, prune`: the records of a ledger."""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from lamina import cbor
from lamina.cli.command import KEY, LEDGER, Answer, as_json, command, misuse, option, table, time_option
from lamina.cli.open_ledger import DIGEST, compared, contribution_digest, open_view
from lamina.cli.terminal import existing_ledger, open_private_key, out
from lamina.codec import schema_of
from lamina.errors import EncodingError, LedgerError
from lamina.ledger import records as leaves
from lamina.ledger.contribution_trace import ContributionTrace, EpochExposure
from lamina.ledger.contribution_trace import trace_contribution as traced
from lamina.ledger.governance_records import Aggregate, PartySignature, Release, Withdrawal
from lamina.ledger.reader import find_contributions
from lamina.ledger.records import (
    KIND_NAMES,
    KINDS_BY_NAME,
    ContributionRecord,
    Epoch,
    KeptContribution,
    Leaf,
    SegmentOutcome,
)
from lamina.ledger.retention import Retention
from lamina.ledger.schema import pluralize
from lamina.ledger.show import (
    RecordFilter,
    describe_by,
    describe_leaf,
    epsilon_or_none,
    format_epsilon,
    format_micro,
    format_remaining,
    leaf_to_dict,
)
from lamina.ledger.store.sqlite import printable_location
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.table import at_least
from lamina.sign import keys
from lamina.sign.keys import PrivateKey, format_utc

_DEFAULT_LIMIT = 50
_MIN_TEXT_WIDTH = 24  # columns for what a record says, however narrow the screen


@command()
def show(
    ledger: str = LEDGER,
    kind: list[str] = option("only records of this kind", choices=KINDS_BY_NAME),
    cls: str | None = option("only records of this class", "--class"),
    run: str | None = option("only records of this run; the first hex digits of its id are enough"),
    since: int | None = time_option("only records from this time on: 2026-03-01, or 2026-03-01T12:00Z"),
    until: int | None = time_option("only records before this time"),
    first: int = option("begin with this leaf", min=0, default=0),
    limit: int | None = option(
        f"show the last N records; 0 shows all; default: {_DEFAULT_LIMIT}, all with --json", metavar="N", min=0
    ),
) -> Answer:
    """Show the records of a ledger, one line each, with filters.

    Shows the last records. c is a clip norm, z a noise multiplier; segment 2.1 [20, 30) is the second attempt at segment
    2, steps 20 to 29; ε is what a bound has spent by then over all runs, rounded up. Times are UTC; those of epochs are
    rounded down to the hour, unless the header says otherwise. Nothing is verified here: use lamina ledger verify.

    With --json: plain numbers, times as 2026-03-01T12:00:00Z, digests in hexadecimal, and every field of the record.

    Examples:

      lamina ledger show ledger.db
      lamina ledger show ledger.db --kind epoch --run 3f9c
      lamina ledger show ledger.db --kind withdrawal --since 2026-01-01 --json
      lamina ledger show ledger.db --class clinical --limit 0
    """
    wanted = RecordFilter(kinds=tuple(kind), cls=cls, run=run, since=since, until=until, first=first)
    most = limit if limit is not None else 0 if as_json.get() else _DEFAULT_LIMIT
    with open_view(ledger) as book:
        found, left_out = _last_leaves(wanted.leaves(book), most)
        facts: dict[str, Any] = {"ledger": printable_location(ledger), "origin": book.origin, "size": book.size}
    if as_json.get():
        return Answer({**facts, "records": [leaf_to_dict(leaf) for leaf in found]})
    more = f"({pluralize(left_out, 'earlier one is', 'earlier ones are')} not shown: --limit 0 shows all)"
    head = f"{facts['origin']}, {pluralize(facts['size'], 'leaf', 'leaves')}"
    return Answer(facts, head, more if left_out else None, leaf_table(found, out.width if out.is_terminal else None))


def _last_leaves(leaves: Iterable[Leaf], most: int) -> tuple[list[Leaf], int]:
    """The last ones, and how many came before them."""
    if most == 0:
        return list(leaves), 0
    found = iter(leaves)
    kept, gone = deque(islice(found, most), maxlen=most), 0
    for leaf in found:
        kept.append(leaf)
        gone += 1
    return list(kept), gone


def leaf_table(leaves: Iterable[Leaf], width: int | None = None) -> str:
    """One line per record; with `width`, its text is wrapped."""
    rows = [["leaf", "time", "kind", "what it says"]]
    rows += [[str(leaf.seq), format_utc(leaf.time), KIND_NAMES[leaf.kind], describe_leaf(leaf)] for leaf in leaves]
    if len(rows) == 1:
        return "no record fits"
    if width is not None:
        taken = sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:3])
        room = max(_MIN_TEXT_WIDTH, width - taken)
        rows = [line for row in rows for line in _wrapped_rows(row, room)]
    return table(rows, left=4)


def _wrapped_rows(row: list[str], room: int) -> list[list[str]]:
    whole = re.sub(r"\b([εcz]) (?=[0-9∞])", "\\1\u00a0", row[3])  # a figure stays with its name
    lines = textwrap.wrap(whole, room, subsequent_indent="  ", break_on_hyphens=False)
    first, *more = (line.replace("\u00a0", " ") for line in lines)
    return [[*row[:3], first], *(["", "", "", line] for line in more)]


@command()
def trace(ledger: str = LEDGER, name: str = DIGEST) -> Answer:
    """Show the history of a contribution: admission, depth, noise and ε of every epoch, withdrawal, releases.

    Lists the epochs in which it was eligible: admitted, neither withdrawn nor expired, when the members of a segment
    were fixed. Whether it was sampled is recorded nowhere. ε is what it has lost after that epoch, over all runs.

    Given by its folder, the leaf is compared with descriptor, attestation and payload there, and every difference is
    named. Exit code 1 if there is one.

    Examples:

      lamina ledger trace ledger.db 9f86d081
      lamina ledger trace ledger.db contributions/p001
      lamina ledger trace ledger.db 17 --json
    """
    with open_view(ledger) as book:
        found = [traced(book, leaf) for leaf in find_contributions(book, contribution_digest(name))]
    machine = {"ledger": printable_location(ledger), "contributions": [each.to_dict() for each in found]}
    return compared(machine, name, found[0].record, "\n\n".join(map(trace_page, found)))


def trace_page(found: ContributionTrace) -> str:
    """One contribution as text."""
    record, (cls, clip, noise) = found.record, found.record.bound
    bound = "public" if found.signed is None else (
        f"clip norm {format_micro(clip)}, noise multiplier {format_micro(noise)} "
        f"(ε ≤ {format_epsilon(found.signed)} over all runs)"
    )  # fmt: skip
    lines = [
        f"contribution {record.descriptor.hex()}",
        f"  admitted   leaf {found.leaf.seq}, {format_utc(found.leaf.time)}; expires {format_utc(record.expires)}",
        f"  class      {cls}",
        f"  bound      {bound}",
        *_depth_lines(found),
    ]
    if isinstance(record, KeptContribution):
        lines.append("  pruned     the rest of its record, and its attestation")
    if isinstance(record, ContributionRecord) and record.anchor is not None:
        lines.append(f"  anchor     {record.anchor.hex()}")
    lines.append(f"  eligible   in {pluralize(len(found.epochs), 'epoch')}{':' if found.epochs else ''}")
    lines += [f"    {line}" for line in _epoch_lines(found.epochs)]
    lines += [f"  {line}" for line in _remark_lines(found)]
    lines.append(f"  lost       {_lost_text(found)}")
    lines.append(f"  withdrawn  {_withdrawal_text(found)}")
    for release in found.releases:
        assert isinstance(release.record, Release)
        manifest = release.record.manifest.hex()[:16]
        lines.append(f"  released   leaf {release.seq}, {format_utc(release.time)}, manifest {manifest}…")
    if not found.releases:
        lines.append("  released   no release is recorded, which does not mean that no model was given away")
    return "\n".join(lines)


def _depth_lines(found: ContributionTrace) -> list[str]:
    """How deep its class may reach: when it was admitted, and wherever that changed later."""
    (_, first), *later = found.depths or ((found.leaf.seq, "its class is in no policy"),)
    profile = found.record.terms.profile if isinstance(found.record, ContributionRecord) else None
    signed = f", signed {profile}" if profile not in (None, first) else ""
    return [f"  depth      {first}{signed}", *(f"             {profile} from leaf {seq} on" for seq, profile in later)]


def _epoch_lines(epochs: tuple[EpochExposure, ...]) -> list[str]:
    rows = [["leaf", "time", "run", "steps", "sigma", "variance", "ε"]]
    for each in epochs:
        epoch = each.leaf.record
        assert isinstance(epoch, Epoch)
        hour = f"{format_utc(each.leaf.time)[:16]}Z"  # rounded to the hour: seconds mean nothing
        sigma = at_least(each.multiplier) if math.isfinite(each.multiplier) else "-"
        epsilon = format_epsilon(each.spend) + ("" if each.own else "*")
        figures = [str(each.steps), sigma, _variance_range(each), epsilon]
        rows.append([str(each.leaf.seq), hour, epoch.run.hex()[:8], *figures])
    return table(rows, left=3).split("\n") if epochs else []


def _variance_range(each: EpochExposure) -> str:
    """The least and the most of its layers."""
    noise = sorted(set(each.variance.values()))
    return " to ".join(dict.fromkeys(at_least(value) for value in (noise[0], noise[-1]))) if noise else "-"


def _remark_lines(found: ContributionTrace) -> list[str]:
    """Remarks on the table of epochs."""
    lines = []
    segments = [one for each in found.epochs for one in each.segments]
    if given_up := sum(one.outcome is SegmentOutcome.ABANDONED for one in segments):
        all = pluralize(len(segments), "segment")
        charged = "" if found.signed is None else "charged all the same, and "
        lines.append(f"abandoned  {given_up} of {all}: {charged}in no model")
    if found.unused:
        epochs = pluralize(found.unused, "epoch")
        lines.append(f"not used   in {epochs} nobody with its bound was charged: it stayed out")
    if out := sum(not each.factor for each in found.epochs):
        lines.append(f"left out   of {pluralize(out, 'epoch')}: its bound was exhausted, and it lost nothing there")
    if scaled := sum(0 < each.factor < 1 for each in found.epochs):
        lines.append(f"scaled     in {pluralize(scaled, 'epoch')}, to what remained of its bound")
    if found.shared:
        has = pluralize(found.shared, "epoch has", "epochs have")
        lines.append(f"with *     {has} no account for its bound: counted with its class")
    return lines


def _lost_text(found: ContributionTrace) -> str:
    lost = f"ε {'at most ' if found.shared else ''}{format_epsilon(found.spend)} so far"
    return lost if found.remaining is None else f"{lost}; {format_remaining(found.remaining)} remains of what it signed"


def _withdrawal_text(found: ContributionTrace) -> str:
    if found.withdrawal is None:
        return "no"
    record = found.withdrawal.record
    assert isinstance(record, Withdrawal)
    by = describe_by(record)
    return f"leaf {found.withdrawal.seq}, {format_utc(found.withdrawal.time)}: {record.reason.name.lower()}, {by}"


_MAX_PROPOSAL_BYTES = 1 << 20


@command(keys=True)
def prune(
    ledger: str = LEDGER,
    key: Path | None = KEY,
    before: int | None = time_option("only what was admitted before; default: all that is old"),
    save: Path | None = option("write the proposal, for auditors to countersign"),
    countersign: Path | None = option("as an auditor, with --key: check a proposal and sign it"),
    apply: Path | None = option("prune by this proposal and its countersignatures"),
    yes: bool = option("prune; without it, only show what would go"),
) -> Answer:
    """Drop the bodies and attestations of old contributions, and sum them up. Without --yes, only show it.

    What is expired and older than the retention time is summed up by class: how many, how many withdrawn, the largest ε
    that any of them lost. Their leaves stay, with class, bound and expiry, and every proof can still be made. Key,
    attestation and anchor go.

    Attestations cannot be checked once they are gone. So an auditor checks them and countersigns before; without that a
    ledger is no longer verified as trusted.

    Examples:

      lamina ledger prune ledger.db --key ledger.key
      lamina ledger prune ledger.db --key ledger.key --yes
      lamina ledger prune ledger.db --key ledger.key --save proposal.cbor
      lamina ledger prune ledger.db --key auditor.key --countersign proposal.cbor
      lamina ledger prune ledger.db --key ledger.key --apply proposal.cbor --yes
    """
    if key is None:
        raise misuse("give the ledger's, or an auditor's with --countersign", "--key")
    place = existing_ledger(ledger)
    private = open_private_key(key)
    with Ledger.open(place, private) as book:
        keeper = Retention(book)
        if countersign is not None:
            return _aggregate_answer(ledger, _countersign(keeper, book, countersign, private), None)
        proposal = keeper.propose(before) if apply is None else _load_aggregate(apply)
        if proposal is not None and save is not None:
            keys.replace_file(save, leaves.encode_body(proposal), "the proposal", mode=0o644)
        seq = keeper.prune(proposal) if proposal is not None and yes else None
        if seq is not None:
            book.store.compact()
    return _aggregate_answer(ledger, proposal, seq)


def _countersign(keeper: Retention, book: Ledger, path: Path, key: PrivateKey) -> Aggregate:
    """The proposal with one more signature, if the ledger verifies and it is what the ledger says."""
    given = _load_aggregate(path)
    if (wrong := verify(book.store).problem) is not None:
        remedy = "do not sign: what is pruned can never be checked again; lamina ledger verify shows it"
        raise LedgerError("cli.countersign-not-verified", f"the ledger is not verified: {wrong}", remedy)
    mine = keeper.propose(given.horizon)
    if mine != dataclasses.replace(given, signatures=()):
        problem = f"'{path}' differs from what this ledger adds up to"
        raise LedgerError("cli.aggregate-differs", problem, "do not sign it; have it proposed again")
    others = tuple(each for each in given.signatures if each.key != key.public.id)
    signed = PartySignature(key=key.public.id, signature=key.sign(given.message(book.origin)))
    made = dataclasses.replace(given, signatures=(*others, signed))
    keys.replace_file(path, leaves.encode_body(made), "the proposal", mode=0o644)
    return made


def _load_aggregate(path: Path) -> Aggregate:
    data = keys.read_small(path, "the proposal", most=_MAX_PROPOSAL_BYTES)
    try:
        found = schema_of(Aggregate).from_cbor(cbor.decode(data, max_size=_MAX_PROPOSAL_BYTES))
    except EncodingError as error:
        problem = f"'{path}' is not a proposal: {error.problem}"
        raise LedgerError("cli.aggregate-malformed", problem, "write one with --save") from None
    assert isinstance(found, Aggregate)
    return found


def _aggregate_answer(ledger: str, found: Aggregate | None, seq: int | None) -> Answer:
    facts = {"ledger": printable_location(ledger), "pruned": seq is not None, "index": seq}
    if found is None:
        return Answer({**facts, "proposal": None}, "nothing is old enough to prune")
    proposal = {
        "count": found.count,
        "horizon": format_utc(found.horizon),
        "spans": [[span.first, span.stop] for span in found.spans],
        "classes": {
            each.cls: {"count": each.count, "withdrawn": each.withdrawn, "epsilon": epsilon_or_none(each.spend)}
            for each in found.classes
        },
        "countersigned": [each.key.hex() for each in found.signatures],
        "digest": found.digest.hex(),
    }
    done = "would be" if seq is None else "was" if found.count == 1 else "were"
    rows = [["class", "contributions", "withdrawn", "ε at most"]]
    rows += [[each.cls, f"{each.count:,}", f"{each.withdrawn:,}", format_epsilon(each.spend)] for each in found.classes]
    return Answer(
        {**facts, "proposal": proposal},
        f"{pluralize(found.count, 'contribution')}, admitted before {format_utc(found.horizon)}, {done} replaced by totals"
        f"{'' if seq is None else f', in leaf {seq}'}",
        table(rows),
        f"countersigned by {len(found.signatures)}{'; --yes does it' if seq is None else ''}",
    )
