"""`lamina ledger trace`: everything that happened to one contribution."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from lamina.admit.times import shown
from lamina.cli.ledger.common import DIGEST, Json, Where, looked_at, named, printed, say
from lamina.cli.output import columns, print_json
from lamina.ledger.find import find
from lamina.ledger.records import Epoch, Outcome, Release, Withdrawal
from lamina.ledger.show import counted, epsilon, number, remaining
from lamina.ledger.trace import Exposure, Trace
from lamina.ledger.trace import trace as traced

Name = Annotated[
    str,
    typer.Argument(
        metavar="DIGEST",
        help=DIGEST,
    ),
]


def trace(ledger: Where, name: Name, as_json: Json = False) -> None:
    """Show what became of a contribution: admission, depth, noise and ε of every epoch, withdrawal, releases.

    The epochs are those in which it was eligible: admitted, and neither withdrawn nor expired, when the members of a
    segment were frozen. Whether it was sampled there stands nowhere. ε is what it has lost after that epoch, over all
    runs.

    Examples:

      lamina ledger trace ledger.db 9f86d081
      lamina ledger trace ledger.db contributions/p001
      lamina ledger trace ledger.db 17 --json
    """
    with looked_at(ledger) as book:
        found = [traced(book, leaf) for leaf in find(book, named(name))]
    if as_json:
        print_json({"ledger": printed(ledger), "contributions": [each.to_dict() for each in found]})
        return
    say("\n\n".join(map(page, found)))


def page(found: Trace) -> str:
    """For people."""
    record, terms = found.record, found.record.terms
    bound = "public" if found.signed is None else (
        f"clip norm {number(terms.clip_norm)}, noise multiplier {number(terms.noise_multiplier)} "
        f"(ε ≤ {epsilon(found.signed)} over all runs)"
    )  # fmt: skip
    lines = [
        f"contribution {record.descriptor.hex()}",
        f"  admitted   leaf {found.leaf.seq}, {shown(found.leaf.time)}; expires {shown(record.expires)}",
        f"  class      {terms.cls}",
        f"  bound      {bound}",
        f"  depth      {terms.profile or 'as its class'}",
    ]
    if record.anchor is not None:
        lines.append(f"  anchor     {record.anchor.hex()}")
    lines.append(f"  eligible   in {counted(len(found.epochs), 'epoch')}{':' if found.epochs else ''}")
    lines += [f"    {line}" for line in _epochs(found.epochs)]
    lines += [f"  {line}" for line in _remarks(found)]
    lines.append(f"  lost       {_lost(found)}")
    lines.append(f"  withdrawn  {_withdrawn(found)}")
    for release in found.releases:
        assert isinstance(release.record, Release)
        lines.append(
            f"  released   leaf {release.seq}, {shown(release.time)}, manifest {release.record.manifest.hex()[:16]}…"
        )
    return "\n".join(lines) if found.releases else "\n".join([*lines, "  released   in no model"])


def _epochs(epochs: tuple[Exposure, ...]) -> list[str]:
    rows = [["leaf", "time", "run", "steps", "sigma", "variance", "ε"]]
    for each in epochs:
        epoch = each.leaf.record
        assert isinstance(epoch, Epoch)
        rows.append(
            [
                str(each.leaf.seq),
                f"{shown(each.leaf.time)[:16]}Z",  # it is rounded to the hour: seconds say nothing
                epoch.run.hex()[:8],
                str(each.steps),
                f"{each.multiplier:.4g}" if math.isfinite(each.multiplier) else "-",
                _spread(each),
                epsilon(each.spend) + ("" if each.own else "*"),
            ]
        )
    return columns(rows, left=3).split("\n") if epochs else []


def _spread(each: Exposure) -> str:
    """The least and the most of its layers."""
    noise = sorted(set(each.variance.values()))
    return " to ".join(dict.fromkeys(f"{value:.4g}" for value in (noise[0], noise[-1]))) if noise else "-"


def _remarks(found: Trace) -> list[str]:
    """What the table of epochs does not say by itself."""
    lines = []
    segments = [one for each in found.epochs for one in each.segments]
    if given_up := sum(one.outcome is Outcome.ABANDONED for one in segments):
        all = counted(len(segments), "segment")
        charged = "" if found.signed is None else "charged all the same, and "
        lines.append(f"given up   {given_up} of {all}: {charged}in no model")
    if found.unused:
        epochs = counted(found.unused, "epoch")
        lines.append(f"not used   in {epochs} nobody with its bound was charged: it stayed out")
    if found.shared:
        has = counted(found.shared, "epoch has", "epochs have")
        lines.append(f"with *     {has} no account for its bound: counted with its class")
    return lines


def _lost(found: Trace) -> str:
    lost = f"ε {'at most ' if found.shared else ''}{epsilon(found.spend)} so far"
    return (
        lost if found.remaining is None else f"{lost}; {remaining(found.remaining)} remains of what it signed"
    )


def _withdrawn(found: Trace) -> str:
    if found.withdrawal is None:
        return "no"
    record = found.withdrawal.record
    assert isinstance(record, Withdrawal)
    return f"leaf {found.withdrawal.seq}, {shown(found.withdrawal.time)}: {record.reason.name.lower()}"
