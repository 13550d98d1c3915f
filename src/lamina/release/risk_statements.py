"""Risk figures, and the statements of a certificate, each with its source.

    membership  whether one unit (such as a patient) took part: add/remove
    content     which data a unit that is known to have taken part contributed: replace-one

Figures come from the trade-off curve and are rounded up to 1e-9, so the same charges give the same bytes. A statement
has a topic, a class or None, a text, a source, and the leaves of the ledger or the digest of the file that show it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lamina.account.accountants import find_accountant
from lamina.account.schedule import EventCounts, EventKey, rdp_order_of
from lamina.account.tradeoff import BY_GAUSSIAN, BY_LOSSES, BY_RENYI
from lamina.ledger.governance_records import Header
from lamina.ledger.schema import NANO, nano_epsilon, pluralize
from lamina.plan.risk import COMPOSED, STATED_RATES, ZERO_OUT, RiskOf, risk_curve
from lamina.plan.rules import NoiseKind
from lamina.release.run_evidence import RunEvidence
from lamina.release.signed import MAX_EPSILON, bounded_number

BY_LEDGER, BY_TRAINER, BY_OWNER = "recomputed from the ledger", "stated by the trainer", "stated by the owner"
BY_MEASUREMENT, BY_ISSUER = "measured", "observed by the issuer"
SOURCES = (BY_LEDGER, BY_TRAINER, BY_OWNER, BY_MEASUREMENT, BY_ISSUER)
TOPICS = (
    "membership", "content", "budget", "unit", "condition", "assumption", "trust", "query model", "side channels", "tuning",
    "utility", "voids", "not covered",
)  # fmt: skip
FIGURE_NAMES = {  # of a class, as every page calls them
    "epsilon": "ε of this model",
    "epsilon_total": "ε over all runs",
    "epsilon_replace_one": "ε, replace-one",
    "epsilon_unamplified": "ε without amplification",
    "rho": "ρ",
    "delta": "δ",
}

Risk = Mapping[str, Any]  # as `risk_figures` returns it

BASELINES = (0.01, 0.1, 0.5)  # of attribute inference and reconstruction
LEAST_RATE = 0.001  # both error rates lie above it where μ holds; without such a limit no finite μ exists
TWO_STEPS = "replace-one, as two add/remove steps"
ADJACENCIES = ("add-remove", "replace-one", TWO_STEPS)


def risk_figures(
    events: EventCounts, *, accountant: str, of: RiskOf, marks: frozenset[str] = frozenset()
) -> dict[str, Any] | None:
    """Return what an attacker can learn from all events together; None if nothing is proven.

    `events` are charges as the ledger records them. No cap on occurrences is credited, because the ledger does not prove
    one. `marks` state what limits the curves of the plans that made the events. Where no replace-one curve is proven, the
    content is bounded by the add/remove curve composed with itself.
    """
    found = _figures(tuple(sorted(events.items())), accountant, of, marks)
    return copy.deepcopy(found)


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
    return found


def _rounded_up(value: float) -> float:
    return nano_epsilon(value) / NANO


_PEOPLE = ("patient", "person", "participant", "donor", "user", "client", "customer", "student", "employee", "subject")


def membership_sentence(unit: str, risk: Risk) -> str:
    """Return what the best attacker learns about who took part, in natural frequencies."""
    return (
        f"Of {pluralize(100, unit)} {_who(unit)} took part, the best attacker names at most {per_hundred(risk['tpr']['0.01'])} "
        "while wrongly naming 1 of 100 others; guessing names 1. If a fair coin decides whether one "
        f"{unit} takes part, the attacker is right in at most {per_hundred(risk['accuracy'])} of 100 cases; guessing is right in 50."
    )


def content_sentence(unit: str, risk: Risk) -> str:
    """Return what the best attacker learns about the content of a known participant, in natural frequencies."""
    first, second, third = (per_hundred(risk["success"][base]) for base in ("0.01", "0.1", "0.5"))
    return (
        f"An attacker guesses the content of one {unit} {_who(unit)} is known to have taken part ({risk['adjacency']}). A guess "
        f"that is right for 1 of {pluralize(100, unit)} whose data was not used is right for at most {first} of 100 whose data was "
        f"used; one that is right for 10, for at most {second}; one that is right for 50, for at most {third}. If a fair coin "
        f"decides which of two records was used, the attacker is right in at most {per_hundred(risk['accuracy'])} of 100 cases."
    )


def _who(unit: str) -> str:
    return "who" if unit.rpartition(" ")[2] in _PEOPLE else "that"


def per_hundred(rate: float) -> str:
    """Return a rate as so many of 100, rounded up to one decimal.

    >>> per_hundred(0.05281), per_hundred(0.5), per_hundred(1.0)
    ('5.3', '50', '100')
    """
    return f"{min(100.0, math.ceil(1000 * rate - 1e-6) / 10):g}"


def short_figure(value: float) -> str:
    """Return a number as text, rounded up to three digits."""
    if not value:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-12) * unit:.3g}" if value < 1000 else f"{math.ceil(value):,}"


_FIELDS = {"adjacency", "bound", "tpr", "accuracy", "advantage", "mu", "mu_least_rate"}


def check_risk(of: str, risk: Any) -> None:
    """Raise ValueError, TypeError or KeyError unless this is None or figures as `risk_figures` returns them.

    `of` is the name of the field: membership or content, of this run or in total.
    """
    if risk is None:
        return
    if risk["adjacency"] not in ADJACENCIES or risk["bound"] not in (BY_LOSSES, BY_GAUSSIAN, BY_RENYI):
        raise ValueError("a risk has an unknown adjacency or bound")
    rates = {"tpr": STATED_RATES} | ({"success": BASELINES} if of.startswith("content") else {})
    if any([*risk[name]] != [f"{rate:g}" for rate in rates[name]] for name in rates) or risk.keys() != _FIELDS | {
        *rates
    }:
        raise ValueError("a risk is not stated at the rates of every certificate, or has other fields")
    if risk["mu"] is not None:
        bounded_number("mu", risk["mu"], 0.0, MAX_EPSILON)
    for name, value in (*risk["tpr"].items(), *risk.get("success", {}).items()):
        bounded_number(name, value, float(name), 1.0)
    for name, least in (("accuracy", 0.5), ("advantage", 0.0), ("mu_least_rate", 0.0)):
        bounded_number(name, risk[name], least, 1.0)


# ------------------------------------------------------------------------------------------ statements

_NO_PROTECTION = 20.0  # ε above which odds may change by more than 10⁸: a figure, and no protection
_SHOWN_LEAVES = 16


def shown_leaves(leaves: Sequence[int]) -> list[int]:
    """Return leaf numbers as a statement lists them: more than 16 are given by the first and the last."""
    return list(leaves) if len(leaves) <= _SHOWN_LEAVES else [leaves[0], leaves[-1]]


def stated(
    topic: str, text: str, source: str, *, cls: str | None = None, leaves: Sequence[int] = (), digest: str | None = None
) -> dict[str, Any]:
    """Return a statement as a certificate has it."""
    return {
        "topic": topic, "class": cls, "text": text, "source": source, "leaves": shown_leaves(leaves) or None, "digest": digest
    }  # fmt: skip


def texts(content: Mapping[str, Any], *topics: str) -> list[str]:
    """Return the texts of a certificate's statements on these topics, in the order of the certificate."""
    return [each["text"] for each in content["statements"] if each["topic"] in topics]


def protection(classes: Mapping[str, Mapping[str, Any]], *, private: bool) -> dict[str, Any]:
    """Return for which classes a model is private, for which it is not, and the badge that says so."""
    private_for: list[str] = []
    unused: list[str] = []
    not_protected = []
    for name, each in classes.items():
        if each["public"]:
            reason = "declared public"
        elif not private:
            reason = "the run has no privacy guarantee"
        elif each["epsilon"] is None or each["epsilon"] > _NO_PROTECTION:
            reason = f"ε above {_NO_PROTECTION:g} protects nobody"
        else:
            (private_for if each["charges"] else unused).append(name)
            continue
        not_protected.append({"class": name, "population": each["population"], "unit": each["unit"], "reason": reason})
    shown = [name if classes[name]["membership"] else f"{name} (content only)" for name in private_for]
    parts = {
        "private for": shown or ["nobody"],
        "not protected": [*map(_unprotected, not_protected)],
        "not used": unused,
    }
    badge = "; ".join(f"{label}: {', '.join(names)}" for label, names in parts.items() if names)
    return {"private_for": private_for, "not_protected": not_protected, "badge": badge if private else "not private"}


def _unprotected(each: Mapping[str, Any]) -> str:
    number = "" if each["population"] is None else f"{pluralize(each['population'], each['unit'])}, "
    return f"{each['class']} ({number}{each['reason']})"


def statements(
    evidence: RunEvidence, header: Header, classes: Mapping[str, Mapping[str, Any]], *,
    conditions: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the statements of a certificate, from the ledger up to its checkpoint.

    `conditions` and the figures of `classes` are those of the certificate. `beside` are the ledgers that the issuer found.
    """
    found = []
    if failed := [each for each in conditions if not each["holds"]]:
        text = "This run does not have a privacy guarantee. The reasons are the conditions that do not hold."
        found.append(stated("condition", text, BY_ISSUER))
        found += [stated("condition", each["reason"], each["source"], leaves=each["leaves"] or ()) for each in failed]
    for name, figures in classes.items():
        found += _class_statements(evidence, name, figures, private=not failed)
    found += [stated(topic, text, BY_ISSUER) for topic, text in _EVERY_RUN if topic != "query model" or not failed]
    return found + _run_statements(evidence, header, beside)


def _class_statements(
    evidence: RunEvidence, name: str, figures: Mapping[str, Any], *, private: bool
) -> list[dict[str, Any]]:
    """Return what is stated about one class. If a condition does not hold, no figure is stated in words."""
    epochs, unit = evidence.leaves[evidence.run], figures["unit"]
    if figures["public"]:
        text = f"Class {name} is declared public: nothing about its contributions is protected."
        return [stated("not covered", text, BY_LEDGER, cls=name, leaves=epochs)]
    runs = evidence.runs((name, 0, 0))
    every = sorted(leaf for run in runs for leaf in evidence.leaves[run])
    several = len(runs) > 1 or (len(runs) == 1 and evidence.run not in runs)
    found = []

    def add(topic: str, text: str, leaves: Sequence[int] = epochs) -> None:
        found.append(stated(topic, f"Class {name}: {text[0].lower()}{text[1:]}", BY_LEDGER, cls=name, leaves=leaves))

    if private and not figures["charges"]:
        add("membership", "this run used no contribution of it. Its starting weights may come from a run that did.")
    elif private:
        if figures["membership"] is None:
            add("not covered", f"whether one {unit} took part. The number of members is public, or shows in the noise.")
        else:
            add("membership", membership_sentence(unit, figures["membership"]))
        add("content", content_sentence(unit, figures["content"]))
        add("budget", _band(unit, figures["epsilon"], figures["delta"]))
    if private and several:
        total = figures["epsilon_total"]
        spent = "no finite ε is proven" if total is None else f"ε is {short_figure(total)}"
        add("budget", f"over all runs of the ledger ({len(runs)} used it), {spent} per {unit}.", every)
        for of, sentence in (("membership", membership_sentence), ("content", content_sentence)):
            if (risk := figures[f"{of}_total"]) is not None:
                add(of, f"from the models of all these runs together. {sentence(unit, risk)}", every)
    plan = evidence.plan.digest().hex()
    text = (
        f"Class {name}: the figures compare two worlds that differ in one {unit}, with all data of that {unit}. A family, a "
        f"ward or any other group of several {unit}s is not covered: for them the loss is larger."
    )
    return [*found, stated("unit", text, BY_TRAINER, cls=name, leaves=epochs, digest=plan)]


def _band(unit: str, epsilon: float | None, delta: float) -> str:
    if epsilon is None or epsilon > _NO_PROTECTION:
        shown = "larger than can be stated" if epsilon is None else short_figure(epsilon)
        return f"ε of this model is {shown} per {unit} at δ = {delta:g}. It promises nothing to rely on."
    band = "up to 1" if epsilon <= 1 else "1 to 5" if epsilon <= 5 else "5 to 10" if epsilon <= 10 else "above 10"
    return (
        f"ε of this model is {short_figure(epsilon)} per {unit} at δ = {delta:g}, in the band {band}. The larger ε is, the "
        "less it promises; above 10 it may mean little. δ is not the probability that the promise fails."
    )


def _run_statements(evidence: RunEvidence, header: Header, beside: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is stated about the run and its ledger: assumptions, conditions of totals, and what is not covered."""
    assert evidence.end is not None
    leaf, end = evidence.end
    plans = evidence.plans.values()
    bands, gaussian = max(each.bands for each in plans), any(each.noise_kind is NoiseKind.GAUSSIAN for each in plans)
    amplified = find_accountant(header.accountant).amplified and not evidence.plan.injection.raw
    exact = "a sum of float32 can move by more than its bound." if gaussian else "sums are exact, norms are not."
    others = ", ".join(f"{each['origin']} ({pluralize(each['runs'], 'run')})" for each in beside)
    by_trainer: list[tuple[bool, str, str]] = [
        (True, "assumption", "Each contribution's gradient is clipped as the plan says, and the noise of the plan is added at every step."),
        (True, "assumption", "Noise and sampling coins come from a cryptographically secure generator and are not kept."),
        (amplified, "assumption", "Contributions are sampled independently at the stated rate (Poisson sampling), and nobody learns who "
         "was sampled when. If that becomes known, the figure without amplification holds."),
        (bands > 1, "assumption", f"The noise is correlated over {bands} steps. Contributions take turns, by a digest of their identity: "
         f"each may be sampled in one of {bands} steps, and the stated rate is the average over steps. The noise of earlier steps was "
         "kept secret until it had no part in later ones."),
        (True, "condition", "The trainer states the source of the noise, the sampling, the probe, the covered tensors and the raw figures "
         f"in leaf {leaf} of the ledger. These statements cannot be changed after the run, but the ledger does not prove them."),
        *((True, "assumption", f"No contribution of class {name} was used more than {cap} times. The run counted that itself; the "
           "figures without amplification rest on it.") for name, cap in end.max_occurrences.items()),
        (ZERO_OUT in evidence.marks([evidence.run]), "not covered",
         "How many took part: their number is public here, and ε compares content with nothing in its place."),
        (gaussian and not end.hardened, "not covered",
         "Attacks on floating-point rounding of the noise: not all of it was hardened, some was plain."),
    ]  # fmt: skip
    by_issuer = [
        (True, "not covered", f"Rounding in the sum of clipped gradients: {exact} What it adds to ε was measured, not proven."),
        (bool(beside), "not covered", "ε over all runs includes only the runs of this ledger. The issuer found "
         f"{pluralize(len(beside), 'other ledger')} beside it: {others}. A person whose data is in several of them has lost the sum."),
    ]  # fmt: skip
    found = [stated(topic, text, BY_TRAINER, leaves=[leaf]) for applies, topic, text in by_trainer if applies]
    found += _chosen_later(evidence, header)
    if header.other_people is not None:
        text = "The owner states that this ledger holds other people than the ledgers beside which it was created: "
        found.append(
            stated("assumption", f"{text}{header.other_people}. This statement is not verified.", BY_OWNER, leaves=[0])
        )
    return found + [stated(topic, text, BY_ISSUER) for applies, topic, text in by_issuer if applies]


def _chosen_later(evidence: RunEvidence, header: Header) -> list[dict[str, Any]]:
    """Return the condition of totals over plans that may have been chosen after earlier models were seen."""
    every, several = sorted(leaf for leaves in evidence.leaves.values() for leaf in leaves), len(evidence.leaves) > 1
    if not several and len(evidence.plans) == 1:
        return []
    what = "The figures over all runs" if several else "The figures of this run, whose plan was changed,"
    if (order := rdp_order_of(header.accountant)) is not None:
        text = f"{what} are priced at the Rényi order {order:g} that the header fixes. For plans that were chosen after earlier models "
        return [
            stated(
                "assumption",
                f"{text}were seen, the limit that the policy sets in advance holds.",
                BY_LEDGER,
                leaves=every,
            )
        ]
    text = f"{what} assume that no plan depended on what an earlier model revealed about single contributions. "
    return [stated("assumption", f"{text}Nothing in the ledger shows whether this holds.", BY_ISSUER, leaves=every)]


_EVERY_RUN = (  # (topic, text) of what holds for every run
    ("budget", "Charges of all runs add up in the ledger. They are never refunded, and the budget is never reset."),
    ("trust", "Central model: the trainer reads the contributions themselves. The figures are about everybody else who sees the "
     "model, not about the trainer or others who hold the data."),
    ("query model", "The model is released: any number of queries, and any use of it, costs nothing beyond the stated figures."),
    ("side channels", "Running times, error messages, logs and other files of the machine that trained are not covered."),
    ("voids", "The figures do not hold if a statement of the trainer is untrue, if noise, seeds or unclipped gradients become known, "
     "if the contributions were used outside of this ledger, or for other weights than those with this digest."),
    ("tuning", "Choices made by looking at private data outside this run, such as tuning: ε excludes tuning."),
    ("not covered", "Who took part is not hidden from readers of the ledger, which records members. The figures are about those who "
     "see the model."),
    ("not covered", "A person who is behind several contributions: ε is per unit as stated."),
    ("not covered", "What the weights had learned before this run began: ε over all runs has it, if this ledger has those runs."),
)  # fmt: skip
