"""An admission for people (a plain-text table) and for machines (the keys of `lamina admit --json`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.plan.table import aligned

if TYPE_CHECKING:
    from lamina.admit.admission import Admission

SHOWN = 20  # refusals in the table


def by_class(admission: Admission) -> dict[str, int]:
    """How many of each class are admitted."""
    counts = np.bincount(admission.cls, minlength=len(admission.classes))
    return {name: int(counts[row]) for row, name in enumerate(admission.classes)}


def summary(admission: Admission) -> dict[str, Any]:
    """Every refusal, and what they come to."""
    refused = admission.refused
    left = admission.left
    return {
        "admitted": len(admission),
        "refused": [refusal.to_dict() for refusal in refused],
        "reasons": {reason.value: count for reason, count in refused.counts().items()},
        "classes": by_class(admission),
        "untagged": admission.untagged,
        **({"left": [refusal.to_dict() for refusal in left]} if left else {}),
    }


def table(admission: Admission) -> str:
    """One line per class, one per reason, and the first refusals by id."""
    refused = admission.refused
    counts = by_class(admission)
    distinct = np.bincount(admission.bounds.cls, minlength=len(admission.classes))
    classes = [["class", "reaches", "admitted", "bounds"]]
    for row, name in enumerate(admission.classes):
        classes.append([name, admission.profile(name), f"{counts[name]:,}", f"{int(distinct[row]):,}"])
    lines = [f"{len(admission):,} admitted, {len(refused):,} refused", "", *aligned(classes, left=2)]
    if admission.untagged:
        lines.append(
            f"{admission.untagged:,} without a subject tag: what is protected is the descriptor, not a person "
            "(lamina attest --subject-key signs one)"
        )
    if refused:
        reasons = [["refused for", "", "how many"]]
        reasons += [[str(reason), reason.meaning, f"{n:,}"] for reason, n in refused.counts().items()]
        lines += ["", *aligned(reasons, left=2), ""]
        lines += aligned(
            [["id", "reason", "detail"], *([r.id, str(r.reason), r.detail] for r in refused[:SHOWN])], 3
        )
        if len(refused) > SHOWN:
            lines.append(f"… and {len(refused) - SHOWN:,} more")
    if left := admission.left:
        gone = [["had to leave", "reason"], *([r.id, str(r.reason)] for r in left[:SHOWN])]
        lines += ["", *aligned(gone, left=2)]
        if len(left) > SHOWN:
            lines.append(f"… and {len(left) - SHOWN:,} more")
    return "\n".join(lines)
