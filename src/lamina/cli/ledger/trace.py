"""`lamina ledger trace`: everything that happened to one contribution."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from lamina.admit.times import shown
from lamina.cli.ledger.common import Json, Where, named, opened, say
from lamina.cli.output import columns, print_json
from lamina.ledger.find import find
from lamina.ledger.records import Epoch, Outcome, Release, Withdrawal
from lamina.ledger.show import epsilon
from lamina.ledger.trace import Exposure, Trace
from lamina.ledger.trace import trace as traced

Name = Annotated[
    str,
    typer.Argument(
        metavar="DIGEST",
        help="of its descriptor or content anchor, 64 hex digits; its folder (with descriptor.cbor); or its leaf",
    ),
]


def trace(ledger: Where, name: Name, as_json: Json = False) -> None:
    """Show what became of a contribution: admission, depth, noise and ε of every epoch, withdrawal, releases.

    The epochs are those in which it was eligible: admitted, and neither withdrawn nor expired, when the members of a
    segment were frozen. Whether it was sampled there stands nowhere. ε is what it has lost after that epoch, over all
    runs.

    Examples:

      lamina ledger trace ledger.db 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      lamina ledger trace ledger.db contributions/p001
      lamina ledger trace ledger.db 17 --json
    """
    with opened(ledger) as book:
        found = [traced(book, leaf) for leaf in find(book, named(name))]
    if as_json:
        print_json({"ledger": ledger, "contributions": [each.to_dict() for each in found]})
        return
    say("\n\n".join(map(page, found)))


def page(found: Trace) -> str:
    """For people."""
    record, terms = found.record, found.record.terms
    bound = "public" if found.signed is None else (
        f"c {terms.clip_norm / 1e6:g}, z {terms.noise_multiplier / 1e6:g} (ε ≤ {epsilon(found.signed)})"
    )  # fmt: skip
    lines = [
        f"contribution {record.descriptor.hex()}",
        f"  admitted   leaf {found.leaf.seq}, {shown(found.leaf.time)}, until {shown(record.expires)}",
        f"  bound      class {terms.cls}, {bound}",
        f"  depth      {terms.profile or 'as its class'}",
    ]
    if record.anchor is not None:
        lines.append(f"  anchor     {record.anchor.hex()}")
    lines += [f"  {line}" for line in _epochs(found.epochs)]
    if found.unused:
        lines.append(
            f"  not used   in {found.unused} epochs nobody with its bound was charged: it stayed out"
        )
    if found.shared:
        lines.append(
            f"  with *     {found.shared} epochs have no account for its bound: counted with its class"
        )
    lines.append(f"  lost       ε {'at most ' if found.shared else ''}{epsilon(found.spend)} so far")
    lines.append(f"  withdrawn  {_withdrawn(found)}")
    for release in found.releases:
        assert isinstance(release.record, Release)
        lines.append(
            f"  released   leaf {release.seq}, {shown(release.time)}, {release.record.manifest.hex()[:16]}…"
        )
    return "\n".join(lines) if found.releases else "\n".join([*lines, "  released   in no model"])


def _epochs(epochs: tuple[Exposure, ...]) -> list[str]:
    if not epochs:
        return ["epochs     none while it was eligible"]
    rows = [["epochs", "time", "run", "segments", "steps", "sigma", "variance", "ε"]]
    for each in epochs:
        epoch = each.leaf.record
        assert isinstance(epoch, Epoch)
        given_up = sum(one.outcome is Outcome.ABANDONED for one in each.segments)
        segments = f"{len(each.segments)}" + (f" ({given_up} given up)" if given_up else "")
        noise = sorted(set(each.variance.values()))
        spread = (
            ""
            if not noise
            else f"{noise[0]:.4g}"
            if len(noise) == 1
            else f"{noise[0]:.4g} to {noise[-1]:.4g}"
        )
        sigma = f"{each.multiplier:.4g}" if math.isfinite(each.multiplier) else "-"
        time, run = shown(each.leaf.time), epoch.run.hex()[:8]
        rows.append(
            [
                f"leaf {each.leaf.seq}",
                time,
                run,
                segments,
                str(each.steps),
                sigma,
                spread,
                epsilon(each.spend) + ("" if each.own else "*"),
            ]
        )
    return columns(rows, left=4).split("\n")


def _withdrawn(found: Trace) -> str:
    if found.withdrawal is None:
        return "no"
    record = found.withdrawal.record
    assert isinstance(record, Withdrawal)
    return f"leaf {found.withdrawal.seq}, {shown(found.withdrawal.time)}: {record.reason.name.lower()}"
