"""`lamina ledger show, trace, withdraw, prune`: the records of a ledger."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import textwrap
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina import cbor
from lamina.admit import keys
from lamina.admit.keys import PrivateKey, format_utc, parse_time, read_small
from lamina.cli.open_ledger import (
    DIGEST_HELP,
    JsonOption,
    KeyOption,
    LedgerArgument,
    contribution_digest,
    existing_ledger,
    open_ledger,
    open_view,
    print_line,
    printable_location,
)
from lamina.cli.terminal import PassphraseOption, columns, open_private_key, out, print_json
from lamina.errors import EncodingError, LedgerError
from lamina.ledger import records as leaves
from lamina.ledger.contribution_trace import ContributionTrace, EpochExposure
from lamina.ledger.contribution_trace import trace_contribution as traced
from lamina.ledger.governance_records import Aggregate, PartySignature, Release, Withdrawal
from lamina.ledger.reader import find_contributions
from lamina.ledger.records import KIND_NAMES, ContributionRecord, Epoch, Leaf, SegmentOutcome
from lamina.ledger.retention import Retention
from lamina.ledger.schema import schema_of
from lamina.ledger.show import (
    KINDS_BY_NAME,
    RecordFilter,
    describe_leaf,
    epsilon_or_none,
    format_epsilon,
    format_micro,
    format_remaining,
    leaf_to_dict,
    pluralize,
)
from lamina.ledger.withdrawal import (
    WITHDRAWAL_EFFECTS,
    WITHDRAWAL_REASONS,
    InboxResult,
    WithdrawalInbox,
    WithdrawnContribution,
    parse_effect,
    parse_reason,
)
from lamina.ledger.withdrawal import withdraw as append
from lamina.ledger.writer import Ledger

_DEFAULT_LIMIT = 50
_MIN_TEXT_WIDTH = 24  # columns for what a record says, however narrow the screen

SinceOption = Annotated[str | None, typer.Option(metavar="TIME", help="from then on: 2026-03-01, or 2026-03-01T12:00Z")]
UntilOption = Annotated[str | None, typer.Option(metavar="TIME", help="before then; written like --since")]


def show(
    ledger: LedgerArgument,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"only these: {', '.join(KINDS_BY_NAME)}", autocompletion=lambda: list(KINDS_BY_NAME)),
    ] = None,
    cls: Annotated[str | None, typer.Option("--class", help="only what is about this class")] = None,
    run: Annotated[str | None, typer.Option(help="only what is about this run: its first hex digits")] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    first: Annotated[int, typer.Option(min=0, help="from this leaf on")] = 0,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"so many records, the last ones; 0: all. Default: {_DEFAULT_LIMIT} on the screen"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the records of a ledger, one line each, with filters.

    The last records are shown. c is a clip norm, z a noise multiplier; segment 2.1 [20, 30) is the second attempt at
    segment 2, steps 20 to 29; ε is what a bound has lost by then over all runs, rounded up. Times are UTC; that of an
    epoch is rounded down to the hour, if the header says nothing else. Nothing here is verified: lamina ledger verify
    does that.

    With --json: plain numbers, times as 2026-03-01T12:00:00Z, digests in hexadecimal, and every field of the record.

    Examples:

      lamina ledger show ledger.db
      lamina ledger show ledger.db --kind epoch --run 3f9c
      lamina ledger show ledger.db --kind withdrawal --since 2026-01-01 --json
      lamina ledger show ledger.db --class clinical --limit 0
    """
    wanted = RecordFilter(
        kinds=tuple(kind or ()),
        cls=cls,
        run=run,
        since=None if since is None else parse_time(since),
        until=None if until is None else parse_time(until),
        first=first,
    )
    most = limit if limit is not None else 0 if as_json else _DEFAULT_LIMIT
    with open_view(ledger) as book:
        found, left_out = _last_leaves(wanted.leaves(book), most)
        if as_json:
            records = [leaf_to_dict(leaf) for leaf in found]
            print_json(
                {"ledger": printable_location(ledger), "origin": book.origin, "size": book.size, "records": records}
            )
            return
        print_line(f"{book.origin}, {pluralize(book.size, 'leaf', 'leaves')}")
    if left_out:
        print_line(f"({pluralize(left_out, 'earlier one is', 'earlier ones are')} not shown: --limit 0 shows all)")
    print_line(leaf_table(found, out.width if out.is_terminal else None))


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
    """One line each; on a screen so wide, what a record says goes on below itself."""
    rows = [["leaf", "time", "kind", "what it says"]]
    rows += [[str(leaf.seq), format_utc(leaf.time), KIND_NAMES[leaf.kind], describe_leaf(leaf)] for leaf in leaves]
    if len(rows) == 1:
        return "no record fits"
    if width is not None:
        room = max(
            _MIN_TEXT_WIDTH, width - sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:3])
        )
        rows = [line for row in rows for line in _wrapped_rows(row, room)]
    return columns(rows, left=4)


def _wrapped_rows(row: list[str], room: int) -> list[list[str]]:
    whole = re.sub(r"\b([εcz]) (?=[0-9∞])", "\\1\u00a0", row[3])  # a figure stays with its name
    lines = textwrap.wrap(whole, room, subsequent_indent="  ", break_on_hyphens=False)
    first, *more = (line.replace("\u00a0", " ") for line in lines)
    return [[*row[:3], first], *(["", "", "", line] for line in more)]


DigestArgument = Annotated[str, typer.Argument(metavar="DIGEST", help=DIGEST_HELP)]


def trace(ledger: LedgerArgument, name: DigestArgument, as_json: JsonOption = False) -> None:
    """Show what became of a contribution: admission, depth, noise and ε of every epoch, withdrawal, releases.

    The epochs are those in which it was eligible: admitted, and neither withdrawn nor expired, when the members of a
    segment were frozen. Whether it was sampled there stands nowhere. ε is what it has lost after that epoch, over all
    runs.

    Examples:

      lamina ledger trace ledger.db 9f86d081
      lamina ledger trace ledger.db contributions/p001
      lamina ledger trace ledger.db 17 --json
    """
    with open_view(ledger) as book:
        found = [traced(book, leaf) for leaf in find_contributions(book, contribution_digest(name))]
    if as_json:
        print_json({"ledger": printable_location(ledger), "contributions": [each.to_dict() for each in found]})
        return
    print_line("\n\n".join(map(trace_page, found)))


def trace_page(found: ContributionTrace) -> str:
    """For people."""
    record, terms = found.record, found.record.terms
    bound = "public" if found.signed is None else (
        f"clip norm {format_micro(terms.clip_norm)}, noise multiplier {format_micro(terms.noise_multiplier)} "
        f"(ε ≤ {format_epsilon(found.signed)} over all runs)"
    )  # fmt: skip
    lines = [
        f"contribution {record.descriptor.hex()}",
        f"  admitted   leaf {found.leaf.seq}, {format_utc(found.leaf.time)}; expires {format_utc(record.expires)}",
        f"  class      {terms.cls}",
        f"  bound      {bound}",
        f"  depth      {terms.profile or 'as its class'}",
    ]
    if record.anchor is not None:
        lines.append(f"  anchor     {record.anchor.hex()}")
    lines.append(f"  eligible   in {pluralize(len(found.epochs), 'epoch')}{':' if found.epochs else ''}")
    lines += [f"    {line}" for line in _epoch_lines(found.epochs)]
    lines += [f"  {line}" for line in _remark_lines(found)]
    lines.append(f"  lost       {_lost_text(found)}")
    lines.append(f"  withdrawn  {_withdrawal_text(found)}")
    for release in found.releases:
        assert isinstance(release.record, Release)
        lines.append(
            f"  released   leaf {release.seq}, {format_utc(release.time)}, manifest {release.record.manifest.hex()[:16]}…"
        )
    return "\n".join(lines) if found.releases else "\n".join([*lines, "  released   in no model"])


def _epoch_lines(epochs: tuple[EpochExposure, ...]) -> list[str]:
    rows = [["leaf", "time", "run", "steps", "sigma", "variance", "ε"]]
    for each in epochs:
        epoch = each.leaf.record
        assert isinstance(epoch, Epoch)
        rows.append(
            [
                str(each.leaf.seq),
                f"{format_utc(each.leaf.time)[:16]}Z",  # it is rounded to the hour: seconds say nothing
                epoch.run.hex()[:8],
                str(each.steps),
                f"{each.multiplier:.4g}" if math.isfinite(each.multiplier) else "-",
                _variance_range(each),
                format_epsilon(each.spend) + ("" if each.own else "*"),
            ]
        )
    return columns(rows, left=3).split("\n") if epochs else []


def _variance_range(each: EpochExposure) -> str:
    """The least and the most of its layers."""
    noise = sorted(set(each.variance.values()))
    return " to ".join(dict.fromkeys(f"{value:.4g}" for value in (noise[0], noise[-1]))) if noise else "-"


def _remark_lines(found: ContributionTrace) -> list[str]:
    """What the table of epochs does not say by itself."""
    lines = []
    segments = [one for each in found.epochs for one in each.segments]
    if given_up := sum(one.outcome is SegmentOutcome.ABANDONED for one in segments):
        all = pluralize(len(segments), "segment")
        charged = "" if found.signed is None else "charged all the same, and "
        lines.append(f"given up   {given_up} of {all}: {charged}in no model")
    if found.unused:
        epochs = pluralize(found.unused, "epoch")
        lines.append(f"not used   in {epochs} nobody with its bound was charged: it stayed out")
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
    return f"leaf {found.withdrawal.seq}, {format_utc(found.withdrawal.time)}: {record.reason.name.lower()}"


_MAX_REQUEST_BYTES = 1 << 24


def withdraw(
    ledger: LedgerArgument,
    name: Annotated[str | None, typer.Argument(metavar="DIGEST", help=DIGEST_HELP)] = None,
    reason: Annotated[
        str | None,
        typer.Option(help=f"one of {', '.join(WITHDRAWAL_REASONS)}", autocompletion=lambda: list(WITHDRAWAL_REASONS)),
    ] = None,
    effect: Annotated[
        str, typer.Option(help="finish or abandon an open segment; charged it is in both cases")
    ] = "finish",
    request: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a signed request; its digest goes into the record")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="take up withdrawals that lie there as JSON files")
    ] = None,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="with --folder: look again and again, until stopped")
    ] = None,
    key: KeyOption = None,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Withdraw a contribution: it is in no segment that opens after this. Nothing is erased.

    What it has lost until then is shown, and the releases that it is in. A withdrawal stops further loss; it does not
    unlearn. With --key a checkpoint covers the record at once; otherwise the next one does.

    With --folder, every file NAME.json there that holds {"withdraw": "64 hex digits", "reason": "consent"} becomes a
    record, exactly once, and is moved to done/; one that cannot be is moved to refused/, with the reason beside it.

    Examples:

      lamina ledger withdraw ledger.db 9f86d081 --reason consent
      lamina ledger withdraw ledger.db 9f86d081 --reason legal --key ledger.key
      lamina ledger withdraw ledger.db --folder withdrawals --watch 10
    """
    if (name is None) == (folder is None):
        raise typer.BadParameter("give a digest, or --folder", param_hint="DIGEST")
    if effect not in WITHDRAWAL_EFFECTS:
        raise typer.BadParameter(f"{effect!r} is not one of {', '.join(WITHDRAWAL_EFFECTS)}", param_hint="--effect")
    if name is not None and reason not in WITHDRAWAL_REASONS:
        raise typer.BadParameter(f"give one of {', '.join(WITHDRAWAL_REASONS)}", param_hint="--reason")
    with open_ledger(ledger, key, passphrase_file) as book:
        if key is not None:
            book.check_signs()
        if folder is not None:
            _take_from_folder(WithdrawalInbox(book, folder), ledger, watch, as_json)
            return
        digest = (
            None
            if request is None
            else hashlib.sha256(read_small(request, "the request", most=_MAX_REQUEST_BYTES)).digest()
        )
        found = append(
            book, contribution_digest(str(name)), parse_reason(str(reason)), effect=parse_effect(effect), request=digest
        )
        signed = book.signs
        with book.store.read() as rows:
            still = sum(hold.segment >= 0 for hold in rows.holds())
    if as_json:
        print_json(
            {"ledger": printable_location(ledger), "signed": signed, "withdrawn": [each.to_dict() for each in found]}
        )
        return
    for each in found:
        print_line(_withdrawal_page(each))
    if still:
        print_line(f"{pluralize(still, 'open segment')} may add to that: lamina ledger trace tells it once recorded")
    if not signed:
        print_line("not signed yet: lamina ledger checkpoint --key, or the next epoch")


def _withdrawal_page(found: WithdrawnContribution) -> str:
    again = "was out already: " if found.again else ""
    known, signed, record = found.lost, found.lost.signed, found.target.record
    assert isinstance(record, ContributionRecord)
    lost = f"ε {format_epsilon(known.spend)}" + (
        "" if signed is None else f" of the {format_epsilon(signed)} that was signed"
    )
    lines = [
        f"{again}contribution {record.descriptor.hex()}",
        f"  withdrawn    leaf {found.target.seq}, by leaf {found.leaf.seq}",
        f"  lost so far  {lost}, in {pluralize(known.epochs, 'epoch')}",
    ]
    for release in known.releases:
        lines.append(f"  is in        the release of leaf {release.seq}")
    return "\n".join(lines)


def _take_from_folder(inbox: WithdrawalInbox, ledger: str, watch: float | None, as_json: bool) -> None:
    taken: list[InboxResult] = []
    try:
        while True:
            for each in inbox.take():
                taken.append(each)
                if not as_json:
                    leaves = ", ".join(str(one.leaf.seq) for one in each.withdrawn)
                    print_line(
                        f"{each.name}: {f'refused: {each.refused}' if each.refused else f'withdrawn in leaf {leaves}'}"
                    )
            if watch is None:
                break
            time.sleep(watch)
    except KeyboardInterrupt:
        pass
    if as_json:
        print_json({"ledger": printable_location(ledger), "files": [each.to_dict() for each in taken]})
    if any(each.refused for each in taken):
        raise typer.Exit(1)


_MAX_PROPOSAL_BYTES = 1 << 20


def prune(
    ledger: LedgerArgument,
    key: KeyOption = None,
    before: Annotated[
        str | None, typer.Option(metavar="TIME", help="only what was admitted before; default: all that is old enough")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the proposal, for auditors to countersign")
    ] = None,
    countersign: Annotated[
        Path | None, typer.Option(metavar="FILE", help="as an auditor, with your --key: check a proposal and sign it")
    ] = None,
    apply: Annotated[
        Path | None, typer.Option(metavar="FILE", help="prune by this proposal, with the countersignatures it has")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without this only what would go is shown")] = False,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sum up contributions whose time is over, and drop their records and attestations. Without --yes, only show it.

    What is older than the retention of the header, and expired, becomes totals by class: how many, how many withdrawn,
    the most that any of them lost. Hashes stay, so that every checkpoint still proves consistent with every later one.
    A single record is provable afterwards only by who kept its receipt: hand receipts out before.

    An aggregate is a claim once its inputs are gone. So an auditor can recompute and countersign it before.

    Examples:

      lamina ledger prune ledger.db --key ledger.key
      lamina ledger prune ledger.db --key ledger.key --yes
      lamina ledger prune ledger.db --key ledger.key --save proposal.cbor
      lamina ledger prune ledger.db --key auditor.key --countersign proposal.cbor
      lamina ledger prune ledger.db --key ledger.key --apply proposal.cbor --yes
    """
    if key is None:
        raise typer.BadParameter("give the ledger's, or an auditor's with --countersign", param_hint="--key")
    place = existing_ledger(ledger)
    private = open_private_key(key, passphrase_file)
    with Ledger.open(place, private) as book:
        keeper = Retention(book)
        if countersign is not None:
            found = _countersign(keeper, book, countersign, private)
            _print_aggregate(ledger, found, None, as_json)
            return
        proposal = (
            keeper.propose(None if before is None else parse_time(before)) if apply is None else _load_aggregate(apply)
        )
        if proposal is not None and save is not None:
            keys.replace_file(save, leaves.encode_body(proposal), "the proposal", mode=0o644)
        seq = keeper.prune(proposal) if proposal is not None and yes else None
        if seq is not None:
            book.store.compact()
    _print_aggregate(ledger, proposal, seq, as_json)


def _countersign(keeper: Retention, book: Ledger, path: Path, key: PrivateKey) -> Aggregate:
    """The proposal with one more signature, if it is what this ledger says."""
    given = _load_aggregate(path)
    mine = keeper.propose(given.horizon)
    if mine != dataclasses.replace(given, signatures=()):
        raise LedgerError(
            "cli.not-ledger-comes",
            f"'{path}' is not what this ledger comes to",
            "have it proposed again, and do not sign",
        )
    others = tuple(each for each in given.signatures if each.key != key.public.id)
    signed = PartySignature(key=key.public.id, signature=key.sign(given.message(book.origin)))
    made = dataclasses.replace(given, signatures=(*others, signed))
    keys.replace_file(path, leaves.encode_body(made), "the proposal", mode=0o644)
    return made


def _load_aggregate(path: Path) -> Aggregate:
    data = keys.read_small(path, "the proposal", most=_MAX_PROPOSAL_BYTES)
    try:
        found = schema_of(Aggregate).value(cbor.decode(data, max_size=_MAX_PROPOSAL_BYTES))
    except EncodingError as error:
        raise LedgerError(
            "cli.no-proposal", f"'{path}' is no proposal: {error.problem}", "write one with --save"
        ) from None
    assert isinstance(found, Aggregate)
    return found


def _print_aggregate(ledger: str, found: Aggregate | None, seq: int | None, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ledger": printable_location(ledger),
                "pruned": seq is not None,
                "index": seq,
                "proposal": _aggregate_json(found),
            }
        )
        return
    if found is None:
        print_line("nothing is old enough to be summed up")
        return
    one = found.count == 1
    done = ("was" if one else "were") if seq is not None else "would be"
    where = "" if seq is None else f", in leaf {seq}"
    print_line(
        f"{pluralize(found.count, 'contribution')}, admitted before {format_utc(found.horizon)}, {done} summed up{where}"
    )
    rows = [["class", "contributions", "withdrawn", "ε at most"]]
    rows += [[each.cls, f"{each.count:,}", f"{each.withdrawn:,}", format_epsilon(each.spend)] for each in found.classes]
    print_line(columns(rows))
    print_line(f"countersigned by {len(found.signatures)}" + ("" if seq is not None else "; --yes does it"))


def _aggregate_json(found: Aggregate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
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
