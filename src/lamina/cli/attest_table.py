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
_NAMED = 5  # ids of what was left alone
_ALWAYS = (State.SIGNED, State.KEPT, State.REFUSED)


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


class Tally:
    """What became of all, and whom to name."""

    def __init__(self) -> None:
        self.counts: Counter[State] = Counter()
        self.replaced: Counter[State] = Counter()
        self.carried = 0
        self.told: dict[State, list[Outcome]] = {
            state: [] for state in (State.STRICTER, State.ANOTHER, State.REFUSED)
        }

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.state] += 1
        self.carried += outcome.carried
        if outcome.replaced is not None:
            self.replaced[outcome.replaced] += 1
        if outcome.state in self.told:
            self.told[outcome.state].append(outcome)

    @property
    def refused(self) -> list[Outcome]:
        return self.told[State.REFUSED]

    def to_dict(self) -> dict[str, Any]:
        """For machines. `kept` are those that are as asked; the others that were left alone are named."""
        return {
            "signed": self.counts[State.SIGNED],
            "kept": self.counts[State.KEPT],
            "stricter": [plain(each.id) for each in self.told[State.STRICTER]],
            "another_key": [plain(each.id) for each in self.told[State.ANOTHER]],
            "carried": self.carried,
            "replaced": {
                "another_key": self.replaced[State.ANOTHER],
                "stricter": self.replaced[State.STRICTER],
            },
            "refused": [{"id": plain(each.id), "reason": each.problem} for each in self.refused],
        }


def tell(tally: Tally, *, force: bool, dry_run: bool, keyless: bool) -> None:
    """How it went, or would go."""
    counts = tally.counts
    told = ", ".join(
        f"{counts[state]:,} {state.value}" for state in State if state in _ALWAYS or counts[state]
    )
    _say(f"nothing was signed; without --dry-run: {told}" if dry_run else told)
    if force:
        lost = tally.replaced
        _say(
            f"replaced: {lost[State.ANOTHER]:,} of another key, {lost[State.STRICTER]:,} stricter than asked"
        )
    if tally.carried:
        _say(f"{tally.carried:,} of the signed keep the stricter bound or depth that they had")
    for state in (State.STRICTER, State.ANOTHER):
        if left := tally.told[state]:
            _say(f"{state.value} (--force replaces them): {_named(left)}")
    if keyless and counts[State.ANOTHER]:
        _say("whose they are is not looked at without --key: with it, what it signed itself is told apart")
    for each in tally.refused[:_SHOWN]:
        _say(f"  {plain(each.id)}: {each.problem}")
    if len(tally.refused) > _SHOWN:
        _say(f"  … and {len(tally.refused) - _SHOWN:,} more: --json names them all")


def _named(left: list[Outcome]) -> str:
    names = [
        plain(each.id) if each.problem is None else f"{plain(each.id)} ({each.problem})"
        for each in left[:_NAMED]
    ]
    if len(left) > _NAMED:
        names.append(f"… and {len(left) - _NAMED:,} more")
    return ", ".join(names)


def _say(line: str) -> None:
    out.print(line, markup=False, soft_wrap=True)
