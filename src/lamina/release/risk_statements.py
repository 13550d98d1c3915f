"""Risk figures, and the statements of a certificate, each with its source.

    membership  whether one unit (such as a patient) took part: add/remove
    content     which data a unit that is known to have taken part contributed: replace-one

Figures come from the trade-off curve and are rounded up to 1e-9, so the same charges give the same bytes. A statement
has a topic, a class or None, a text, a source, and the leaves of the ledger or the digest of the file that show it.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from lamina.account.accountants import find_accountant
from lamina.account.charges import Account
from lamina.account.schedule import EventCounts, EventKey, rdp_order_of
from lamina.account.tradeoff import BY_RENYI
from lamina.ledger.governance_records import Header
from lamina.ledger.schema import NANO, nano_epsilon, pluralize
from lamina.plan.risk import COMPOSED, STATED_RATES, ZERO_OUT, RiskOf, risk_curve
from lamina.plan.rules import NoiseKind
from lamina.plan.table import WEAK_EPSILON
from lamina.release.run_evidence import RunEvidence
from lamina.release.schema import BASELINES, BY_ISSUER, CURVE_RATES, NOT_REACHED, TWO_STEPS
from lamina.release.typeset import read_template, stated_rows

FIGURE_NAMES = {  # of a class, as every page calls them
    "epsilon": "ε of this run",
    "epsilon_total": "ε over all runs",
    "epsilon_replace_one": "ε, replace-one",
    "epsilon_unamplified": "ε without amplification",
    "rho": "ρ",
    "delta": "δ",
}
JOINT_EPSILON = "ε of this model"  # of all runs that a model of several runs stands on

Risk = Mapping[str, Any]  # as `risk_figures` returns it

LEAST_RATE = 0.001  # both error rates lie above it where μ holds; without such a limit no finite μ exists


def risk_figures(
    events: EventCounts, *, accountant: str, of: RiskOf, marks: frozenset[str] = frozenset()
) -> dict[str, Any] | None:
    """Return bounds on what an attacker can learn from all events together; None if no bound is proven.

    `events` are charges as the ledger records them. No cap on occurrences is credited, because the ledger does not prove
    one. `marks` state what limits the curves of the plans that made the events. Where no replace-one curve is proven, the
    content is bounded by the add/remove curve composed with itself. The figures include points of the curve.
    """
    return copy.deepcopy(_figures(tuple(sorted(events.items())), accountant, of, marks))


@lru_cache(maxsize=4096)
def _figures(
    events: tuple[tuple[EventKey, int], ...], accountant: str, of: RiskOf, marks: frozenset[str]
) -> dict[str, Any] | None:
    curve = risk_curve(dict(events), accountant=accountant, of=of, marks=marks)
    if curve is None:
        return None
    twice = COMPOSED in marks or curve.bound == BY_RENYI
    adjacency = "add-remove" if of == "membership" else TWO_STEPS if twice else "replace-one"
    mu, advantage = curve.mu(LEAST_RATE), _rounded_up(curve.advantage())
    found = {
        "adjacency": adjacency,
        "bound": curve.bound,
        "tpr": {f"{fpr:g}": _rounded_up(curve.tpr(fpr)) for fpr in STATED_RATES},
        "accuracy": _rounded_up(0.5 + 0.5 * advantage),
        "advantage": advantage,
        "mu": _rounded_up(mu) if math.isfinite(mu) else None,
        "mu_least_rate": LEAST_RATE,
    }
    if of == "content":
        found["success"] = {f"{base:g}": _rounded_up(curve.success(base)) for base in BASELINES}
    points = zip(CURVE_RATES, curve.rates(np.array(CURVE_RATES)).tolist(), strict=True)
    return found | {"curve": {f"{fpr:g}": _rounded_up(tpr) for fpr, tpr in points}}


def _rounded_up(value: float) -> float:
    return nano_epsilon(value) / NANO


_PEOPLE = ("patient", "person", "participant", "donor", "user", "client", "customer", "student", "employee", "subject")


def membership_sentence(unit: str, risk: Risk) -> str:
    """Return what the best attacker learns about who took part, in natural frequencies."""
    who = "who" if unit.rpartition(" ")[2] in _PEOPLE else "that"
    return (
        f"Of {pluralize(100, unit)} {who} took part, the best attacker correctly names at most "
        f"{per_hundred(risk['tpr']['0.01'])} on average while wrongly naming 1 of 100 others; guessing names 1. If a fair coin "
        f"decides whether one {unit} takes part, the attacker is right in at most {per_hundred(risk['accuracy'])} of 100 cases; "
        "guessing is right in 50."
    )


def content_sentence(unit: str, risk: Risk) -> str:
    """Return a sentence about what the best attacker learns about the content of a known participant, in natural frequencies.

    The baseline is a model that was trained with another record in place of this one (`TradeOffCurve.success`). Knowledge
    about the population helps there as well, so it is not an attack without the model.
    """
    return (
        f"Suppose that one {unit} is known to have taken part. An attacker guesses the content of its record. The guess would be "
        "right in 1 of 100 cases if another record had been used in its place; with the model trained on its record, it is right in "
        f"at most {per_hundred(risk['success']['0.01'])} of 100. If a fair coin decides which of two records was used, the attacker "
        f"is right in at most {per_hundred(risk['accuracy'])} of 100 cases; guessing is right in 50."
    )


def risk_sentence(of: str, unit: str, risk: Risk) -> str:
    """Return the sentence of a certificate about membership or content; the one about content names its adjacency."""
    if of.startswith("membership"):
        return membership_sentence(unit, risk)
    return f"{content_sentence(unit, risk)} Adjacency: {risk['adjacency']}."


def withdrawn_text(size: int, withdrawn: Mapping[str, int]) -> str:
    """Return a sentence about the withdrawn contributions of a model by class, in the first `size` leaves of the ledger."""
    counts = ", ".join(f"{name} {count}" for name, count in sorted(withdrawn.items()) if count)
    return (
        f"Contributions that this model may have learned from and that were withdrawn up to leaf {size - 1} of the ledger: "
        + (f"{counts}. What the model learned from them stays in it." if counts else "none.")
    )


def purpose_text(name: str, purposes: Sequence[str]) -> str:
    """Return a sentence about the permitted uses of a class."""
    if purposes:
        return f"Class {name} may be used for: {', '.join(purposes)}."
    denied = "A gate denies every query that uses it, unless the release allows unstated purposes."
    return f"Class {name}: no purpose is stated that all its plans allow. {denied}"


_STEP = 1.5e-6  # figures were rounded up to 1e-9 before: a rate of 0.010000001 is 1 of 100


def per_hundred(rate: float) -> str:
    """Return a rate as a number out of 100, rounded up to one decimal.

    >>> per_hundred(0.05281), per_hundred(0.5), per_hundred(1.0)
    ('5.3', '50', '100')
    """
    return f"{min(100.0, math.ceil(1000 * rate - _STEP) / 10):g}"


def short_figure(value: float) -> str:
    """Return a number as text, rounded up to three digits."""
    if not value:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-12) * unit:.3g}" if value < 1000 else f"{math.ceil(value):,}"


# ------------------------------------------------------------------------------------------ statements

_NO_PROTECTION = 20.0  # ε above which odds may change by more than 10⁸: a figure, and no protection
_SHOWN_LEAVES = 16


def shown_leaves(leaves: Sequence[int]) -> list[int]:
    """Return the leaf numbers for a statement: all of them, or the first and the last if there are more than 16."""
    return list(leaves) if len(leaves) <= _SHOWN_LEAVES else [leaves[0], leaves[-1]]


def stated(
    topic: str, text: str, source: str, *, cls: str | None = None, leaves: Sequence[int] = (), digest: str | None = None
) -> dict[str, Any]:
    """Return a statement in the form of a certificate."""
    return {
        "topic": topic, "class": cls, "text": text, "source": source, "leaves": shown_leaves(leaves) or None, "digest": digest
    }  # fmt: skip


def texts(content: Mapping[str, Any], *topics: str) -> list[str]:
    """Return the texts of a certificate's statements on these topics, in the order of the certificate."""
    return [each["text"] for each in content["statements"] if each["topic"] in topics]


def protection(
    classes: Mapping[str, Mapping[str, Any]], *, private: bool, continued: bool = False, exposed: Collection[str] = ()
) -> dict[str, Any]:
    """Return the classes for which a model is private, weakly protected or not private, and its badge.

    The figures over all runs decide about a model that continued the weights of another run, because it learned there too.
    `exposed` are classes that another run of the ledger declared public.
    """
    total = "_total" if continued else ""
    private_for: list[str] = []
    weak: list[str] = []
    unused: list[str] = []
    not_protected = []
    for name, each in classes.items():
        epsilon = each[f"epsilon{total}"]
        if each["public"]:
            reason = "declared public"
        elif not private:
            reason = "the run has no privacy guarantee"
        elif continued and name in exposed:
            reason = "declared public in another run"
        elif epsilon is None:
            reason = "no finite ε is proven"
        elif epsilon > _NO_PROTECTION:
            reason = f"ε above {_NO_PROTECTION:g} protects nobody"
        else:
            used = each["charges"] or (continued and epsilon > 0)
            (unused if not used else weak if epsilon > WEAK_EPSILON else private_for).append(name)
            continue
        not_protected.append({"class": name, "population": each["population"], "unit": each["unit"], "reason": reason})
    scoped = {name: _with_scope(name, each, total) for name, each in classes.items()}
    parts = {
        "private for": [scoped[name] for name in private_for] or ["nobody"],
        f"weak protection (ε above {WEAK_EPSILON:g})": [scoped[name] for name in weak],
        "not protected": [*map(_unprotected, not_protected)],
        "not used" if continued else "not used by this run": unused,
    }
    badge = "; ".join(f"{label}: {', '.join(names)}" for label, names in parts.items() if names)
    return {
        "private_for": private_for,
        "weak": weak,
        "not_protected": not_protected,
        "badge": badge if private else "not private",
    }


def _with_scope(name: str, figures: Mapping[str, Any], total: str) -> str:
    """Return the name of a class, with the bounded risks unless both membership and content are bounded."""
    bounded = [of for of in ("membership", "content") if figures[f"{of}{total}"]]
    return name if len(bounded) == 2 else f"{name} ({bounded[0] if bounded else 'ε'} only)"


def _unprotected(each: Mapping[str, Any]) -> str:
    declared = "" if each["population"] is None else f"; declared population: {each['population']:,}"
    return f"{each['class']} ({each['reason']}{declared})"


def statements(
    evidence: RunEvidence, header: Header, classes: Mapping[str, Mapping[str, Any]], *,
    conditions: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]], withdrawn: Sequence[tuple[int, str]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the statements of a certificate, from the ledger up to its checkpoint.

    `conditions` and the figures of `classes` are those of the certificate. `beside` are the ledgers that the issuer found,
    `withdrawn` the withdrawals from the model (`model_withdrawals`).
    """
    found = []
    if failed := [each for each in conditions if not each["holds"]]:
        text = "This run does not have a privacy guarantee. The reasons are the conditions that do not hold."
        found.append(stated("condition", text, BY_ISSUER))
        found += [stated("condition", each["reason"], each["source"], leaves=each["leaves"] or ()) for each in failed]
    for name, figures in classes.items():
        found += _class_statements(evidence, name, figures, guaranteed=not failed)
    return found + _run_statements(evidence, header, beside, withdrawn, guaranteed=not failed)


def _rows(
    group: str, facts: Mapping[str, Any], leaves: Mapping[str, Sequence[int]], cls: str | None = None
) -> list[dict[str, Any]]:
    """Return the statements of a group in templates/statements.toml whose facts hold."""
    return [
        stated(
            row["topic"], row["text"].format_map(facts), row["source"], cls=cls, leaves=leaves.get(row.get("leaves", ""), ()),
            digest=facts["plan"] if "plan" in row else None,
        )
        for row in stated_rows(read_template("statements.toml")[group], facts)
    ]  # fmt: skip


def _class_statements(
    evidence: RunEvidence, name: str, figures: Mapping[str, Any], *, guaranteed: bool
) -> list[dict[str, Any]]:
    """Return the statements about one class. If a condition does not hold, they contain no figure."""
    unit, epsilon, total = figures["unit"], figures["epsilon"], figures["epsilon_total"]
    runs, here = evidence.runs(Account(name)), evidence.run
    facts = {"name": name, "public": figures["public"], "guaranteed": guaranteed and not figures["public"]}
    facts |= {"unit": unit, "charged": figures["charges"], "plan": evidence.plan.digest().hex(), "runs": len(runs)}
    facts |= {
        "own unit": unit != "contribution",
        "exposed": name in evidence.exposed and not figures["public"],
        "continued": evidence.continued,
        "purpose": purpose_text(name, evidence.purposes(name)),
        "several": len(runs) > 1 or bool(runs and here not in runs),
        "zero-out": ZERO_OUT in evidence.marks([here]),
    }
    facts["alone"] = not (evidence.continued and facts["several"])  # this run alone bounds what its model learned
    facts["scope"] = ", counting this run alone" if facts["several"] else ""
    for of in ("membership", "content", "membership_total", "content_total"):
        text = "" if figures[of] is None else risk_sentence(of, unit, figures[of])
        facts[of] = text[:1].lower() + text[1:]
    facts["epsilon"] = "larger than can be stated" if epsilon is None else short_figure(epsilon)
    facts["delta"] = "" if figures["delta"] is None else f"{figures['delta']:g}"
    facts["total"] = "no finite ε is proven" if total is None else f"ε is {short_figure(total)}"
    facts["band"] = None if epsilon is None else next((text for most, text in _BANDS.items() if epsilon <= most), None)
    leaves = {"epochs": evidence.leaves[here]}
    leaves["all runs"] = tuple(sorted(leaf for run in runs for leaf in evidence.leaves[run]))
    return _rows("class", facts, leaves, name)


_BANDS = {1: "up to 1", 5: "1 to 5", 10: "5 to 10", _NO_PROTECTION: "above 10"}  # by the largest ε


def _run_statements(
    evidence: RunEvidence, header: Header, beside: Sequence[Mapping[str, Any]],
    withdrawn: Sequence[tuple[int, str]], *, guaranteed: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the statements about the run and its ledger: assumptions, conditions of totals, and what is not covered."""
    assert evidence.end is not None
    (leaf, end), plans, order = evidence.end, evidence.plans.values(), rdp_order_of(header.accountant)
    several, bands = len(evidence.leaves) > 1, max(each.bands for each in plans)
    said, begin = end.conditions(evidence.plan.adjacency), evidence.begin
    reached, private = (
        {frozenset(names) for names in evidence.reached().values()},
        not all(c.public for c in evidence.classes()),
    )
    facts = {
        "private": private,
        "attested": evidence.attested,
        "contributions": pluralize(sum(evidence.admitted.values()), "signed contribution"),
        "figures": guaranteed and private,
        "leaf": leaf,
        "bands": bands,
        "correlated": bands > 1,
        "gaussian": any(each.noise_kind is NoiseKind.GAUSSIAN for each in plans),
        "amplified": find_accountant(header.accountant).amplified and not evidence.plan.injection.raw,
        "secure": said["noise"] == "secure",
        "poisson": said["sampling"] == "poisson",
        "hardened": end.hardened,
        "parent": None if begin is None or begin[1].parent is None else begin[1].parent.hex()[:8],
        "zero-out": ZERO_OUT in evidence.marks([evidence.run]),
        "chosen later": several or len(plans) > 1,  # plans that may have been chosen after earlier models were seen
        "what": "The figures over all runs" if several else "The figures of this run, whose plan was changed,",
        "order": None if order is None else f"{order:g}",
        "other_people": header.other_people,
        "restricted": len(reached) > 1,
        "not_reached": NOT_REACHED,
        "withdrawn": withdrawn_text(evidence.checkpoint.size, Counter(name for _, name in withdrawn)),
        "beside": pluralize(len(beside), "other ledger"),
        "others": ", ".join(f"{each['origin']} ({pluralize(each['runs'], 'run')})" for each in beside),
    }
    every = sorted(seq for seqs in evidence.leaves.values() for seq in seqs)
    leaves: dict[str, Sequence[int]] = {
        "begin": [] if begin is None else [begin[0]], "end": [leaf], "all runs": every, "header": [0],
        "epochs": evidence.leaves[evidence.run], "withdrawals": [seq for seq, _ in withdrawn],
    }  # fmt: skip
    caps = ({"name": name, "cap": cap} for name, cap in end.max_occurrences.items())
    return [*_rows("run", facts, leaves), *(row for each in caps for row in _rows("cap", each, leaves))]
