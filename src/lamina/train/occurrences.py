"""How often a contribution may have taken part, where that is capped and each time is paid for (raw noise).

The sampler counts occurrences along the weights that the run has now. What was tried and given up, lost, or done by a
copy of the run used contributions beside that count. With N the cap, one contribution has taken part at most

    min(N, steps along the weights)  +  Σ min(N, its steps) over other attempts  +  Σ min(N, steps since) over copies

times. An attempt is charged what that sum exceeds all earlier charges by: for each class and signed bound by itself,
since a bound may have come into the run later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lamina.plan import StepPlan
from lamina.train.store.records import Moved, Open

if TYPE_CHECKING:
    from lamina.train.run import Run


def events_due(run: Run, plan: StepPlan, first: int, last: int, name: str) -> int:
    """How many events the steps first … last-1 add to what class or bound `name` was charged under this plan."""
    cap, digest = plan.injection.occurrences, plan.digest()
    assert cap is not None
    mine = [opened for opened in run.attempts if opened.plan == digest]
    begin = min([opened.first for opened in mine], default=first)
    beside = [opened.last - opened.first for opened in _beside(run, first) if opened.plan == digest]
    copies = [last - start for start in _copied(run, first)]
    most = sum(min(cap, steps) for steps in (last - begin, *beside, *copies))
    return max(
        0, most - sum(charge.steps for opened in mine for charge in opened.charges if charge.cls == name)
    )


def _beside(run: Run, step: int) -> Iterable[Open]:
    """The attempts that the weights at `step` do not come from; an open segment is going to be replayed."""
    journal = run.journal
    for opened in reversed(run.attempts):
        done = journal.closed(opened) or opened is journal.pending
        if done and opened.last == step and opened.first < step:
            step = opened.first
        else:
            yield opened


def _copied(run: Run, step: int) -> list[int]:
    """Where the run went on in another place: from there on, two of them use the same contributions."""
    starts, moved = [], 0
    for record in run.journal.records:
        if isinstance(record, Moved):
            moved += 1
        elif isinstance(record, Open):
            starts += [record.first] * moved
            moved = 0
    return starts + [step] * moved
