"""What `lamina attest` prints: what is promised, and what became of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lamina.admit.contribute import Outcome, State
from lamina.admit.descriptor import MICRO
from lamina.admit.refusal import plain
from lamina.admit.terms import Terms
from lamina.admit.times import shown
from lamina.cli.output import columns, out, round_up
from lamina.plan import Policy

_SHOWN = 20


def figures(policy: Policy, terms: Terms) -> dict[str, Any]:
    """The terms of a class as machines read them."""
    return {
        "data_class": terms.data_class,
        "clip_norm": terms.clip_norm / MICRO,
        "noise_multiplier": terms.noise_multiplier / MICRO,
        "epsilon": _epsilon(policy, terms),
        "delta": policy.corpus.delta,
        "profile": terms.profile,
        "not_before": shown(terms.not_before),
        "expires": shown(terms.expires),
    }


def _epsilon(policy: Policy, terms: Terms) -> float | None:
    """What the signed multiplier stands for; None: public."""
    return policy.epsilon_of(terms.noise_multiplier / MICRO) if terms.noise_multiplier else None


def page(policy: Policy, all_terms: dict[str, Terms], counts: Counter[str]) -> str:
    """What is promised, by class."""
    rows = [
        [
            "class",
            "contributions",
            "clip norm",
            "noise multiplier",
            "ε at most",
            "depth",
            "valid from",
            "until",
        ]
    ]
    for name, terms in all_terms.items():
        epsilon = _epsilon(policy, terms)
        figures = (
            ["public", "-", "-"]
            if epsilon is None
            else [f"{terms.clip_norm / MICRO:g}", f"{terms.noise_multiplier / MICRO:g}", round_up(epsilon)]
        )
        depth = terms.profile or "as the policy says"
        rows.append(
            [name, f"{counts[name]:,}", *figures, depth, shown(terms.not_before), shown(terms.expires)]
        )
    title = f"for {policy.corpus.origin}, ε at δ = {policy.corpus.delta:g}"
    return f"{plain(title)}\n{columns(rows)}"


def tell(counts: Counter[State], refused: list[Outcome], total: int, dry_run: bool) -> None:
    """How it went."""
    if dry_run:
        out.print(f"nothing was signed: {total:,} would be looked at", markup=False)
        return
    told = ", ".join(f"{counts[state]:,} {state.value}" for state in State)
    out.print(told, markup=False)
    for each in refused[:_SHOWN]:
        out.print(f"  {plain(each.id)}: {each.problem}", markup=False, soft_wrap=True)
    if len(refused) > _SHOWN:
        out.print(f"  … and {len(refused) - _SHOWN:,} more: --json names them all", markup=False)
