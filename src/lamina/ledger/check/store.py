"""What a store keeps beside the leaves, so that things are found quickly: it must say what the leaves say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lamina.errors import EncodingError
from lamina.ledger.check.problem import LEAF, STORE, bad
from lamina.ledger.check.report import Held
from lamina.ledger.frontier import Frontier
from lamina.ledger.records import NUMBERS, WORDS, Admitted, Record
from lamina.ledger.store.base import RESERVED, WHOLE, Head, Hold, Reader

_FAR = 2**63 - 1


def check_head(rows: Reader, head: Head, frontier: Frontier, time: int, epoch: int) -> None:
    """The head is that of the leaves that were read."""
    beyond = next(rows.leaves(head.size, _FAR), None)
    if beyond is not None:
        bad(
            beyond[0],
            LEAF,
            "verify.lies-beyond-leaves",
            f"it lies beyond the {head.size} leaves that the head counts: it was inserted",
        )
    try:
        stored = Frontier.decode(head.frontier)
    except EncodingError as error:
        bad(
            head.size - 1,
            STORE,
            "verify.edge-tree-head-not",
            f"the edge of the tree in the head cannot be read: {error.problem}",
        )
    if stored != frontier:
        bad(
            head.size - 1,
            STORE,
            "verify.edge-tree-head",
            "the edge of the tree in the head is not that of the leaves",
        )
    if (head.time, head.epoch) != (time, epoch):
        bad(
            head.size - 1,
            STORE,
            "verify.head-says-time",
            f"the head says time {head.time} and {head.epoch} epochs, the leaves {time} and {epoch}",
        )


def check_kinds(rows: Reader, size: int, others: Mapping[int, type[Record]]) -> None:
    """Every record that is not a contribution is found under its kind, and nothing else is."""
    for kind, number in NUMBERS.items():
        if kind is Admitted:
            continue
        listed = {seq for seq, _ in rows.of_kind(number, 0, size)}
        real = {seq for seq, found in others.items() if found is kind}
        if wrong := sorted(listed ^ real):
            where = "not" if wrong[0] in real else "wrongly"
            bad(
                wrong[0],
                STORE,
                "verify.store-lists-leaf",
                f"the store lists this leaf {where} as {WORDS[kind]}",
            )


def check_withdrawn(rows: Reader, withdrawals: Mapping[int, int]) -> None:
    """Whoever asks the store finds every withdrawal, and no other."""
    listed = dict(rows.withdrawals())
    for target in sorted(listed.keys() | withdrawals.keys()):
        if listed.get(target) != withdrawals.get(target):
            seq, stored = withdrawals.get(target), listed.get(target)
            reason = f"leaf {target} was withdrawn in leaf {stored} by the store, in leaf {seq} by the leaves"
            bad(target if seq is None else seq, STORE, "verify.check-withdrawn", reason)


def check_attempts(rows: Reader, attempts: Iterable[tuple[tuple[bytes, int, int], int]]) -> None:
    """Whoever asks the store finds the epoch of every attempt."""
    for (run, segment, generation), seq in attempts:
        if (found := rows.attempt(run, segment, generation)) != seq:
            name = f"segment {segment}, generation {generation} of run {run.hex()[:8]}"
            bad(seq, STORE, "verify.leaf-store", f"{name} is in leaf {found} by the store")


def held(rows: Reader) -> tuple[Held, ...]:
    """What runs hold of the bounds. It is the store's word: what it takes is for who writes, and is not read here."""
    labels = {run.id: run.label for run in rows.runs()}
    found: dict[bytes, list[Hold]] = {}
    for hold in rows.holds():
        found.setdefault(hold.run, []).append(hold)
    return tuple(
        Held(
            run=run,
            label=labels.get(run, ""),
            attempts=sum(hold.attempt for hold in holds),
            budgets=sum(hold.segment >= WHOLE for hold in holds),
            reserved=any(hold.segment == RESERVED for hold in holds),
        )
        for run, holds in sorted(found.items())
    )
