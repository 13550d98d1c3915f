"""Where a certificate states what NIST SP 800-226 asks about a differential privacy guarantee (`certify --profile nist-800-226`).

Questions are in our own words; section numbers are those of the final version of March 2025. Each item finds its evidence in the
content of the certificate. An item without evidence is "not stated". No item and no number of items is a claim of compliance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lamina.release.risk_statements import BY_ISSUER, BY_LEDGER, BY_MEASUREMENT, BY_OWNER, BY_TRAINER, short_figure

NIST_PROFILE = "nist-800-226"
NOTICE = "This table shows where the certificate states what NIST SP 800-226 asks about. It does not claim compliance with SP 800-226."
Content = Mapping[str, Any]
Evidence = tuple[str, str, Sequence[int]]  # value, source, leaves of the ledger
Finder = Callable[[Content], Iterable[Evidence]]


def _said(*topics: str, word: str = "") -> Finder:
    """Statements of these topics that contain a word."""
    return lambda content: (
        (each["text"], each["source"], each["leaves"] or ())
        for each in content["statements"]
        if each["topic"] in topics and word in each["text"].lower()
    )


def _owner(*names: str) -> Finder:
    """Texts of the owner, from [about] in policy.toml."""
    return lambda content: (
        (f"{name}: {each['text']}", BY_OWNER, (each["leaf"],))
        for name, each in content.get("about", {}).items()
        if name in names
    )


def _class(template: str, *needs: str) -> Finder:
    """A text about every private class of which the figures `needs` are stated; they are rounded up."""

    def shown(value: Any) -> str:
        return short_figure(value) if isinstance(value, float) and value >= 1e-3 else str(value)

    return lambda content: (
        (f"{name}: {template.format(**{need: shown(each[need]) for need in needs})}", BY_LEDGER, ())
        for name, each in content["classes"].items()
        if not each["public"] and all(each.get(need) is not None for need in needs)
    )


def _value(template: str, section: str, source: str, *needs: str) -> Finder:
    """A text about a section of the certificate, if all of `needs` are stated there."""

    def find(content: Content) -> Iterator[Evidence]:
        found = content
        for name in section.split("."):
            found = found.get(name) or {}
        if found and all(found.get(need) not in (None, "not stated", "not declared") for need in needs):
            yield template.format(**found), source, found.get("leaves", [found["leaf"]] if "leaf" in found else [])

    return find


def _charges(content: Content) -> Iterator[Evidence]:
    for name, each in content["classes"].items():
        for charge in each["charges"]:
            text = "{steps} steps with σ {noise_multiplier:.6g} at sampling rate {sampling_rate:.6g}".format(**charge)
            yield f"{name}: {text}", BY_LEDGER, ()


def _utility(content: Content, *, groups: bool) -> Iterator[Evidence]:
    for each in content.get("utility", ()):
        if (each["group"] is not None) == groups:
            name = each["figure"] + (f", {each['group']}" if groups else "")
            value = "suppressed or undefined" if each["value"] is None else f"{each['value']:.4g}"
            if each["low"] is not None:
                value += f", {100 * each['level']:g} % interval {each['low']:.4g} to {each['high']:.4g}"
            yield f"{name}: {value}, on {each['on']} data", BY_MEASUREMENT, ()


def _beside(content: Content) -> Iterator[Evidence]:
    for each in content["ledgers_beside"]:
        yield f"another ledger was found: {each['origin']} with {each['runs']} runs", BY_ISSUER, ()


class ProfileItem(NamedTuple):
    """A question of SP 800-226, the fields of a certificate that answer it, and functions that find the evidence there."""

    number: int
    section: str
    question: str
    where: str
    finders: tuple[Finder, ...]

    def evidence(self, content: Content) -> list[Evidence]:
        return [each for find in self.finders for each in find(content)]


def _items(*rows: tuple[Any, ...]) -> tuple[ProfileItem, ...]:
    return tuple(ProfileItem(number, row[0], row[1], row[2], row[3:]) for number, row in enumerate(rows, 1))


ITEMS = _items(
    ("2.2", "How large is ε, and does it still promise much?", "classes.*.epsilon, statements",
     _said("budget", word="ε of this run"), _said("membership", "content")),
    ("2.3", "How large is δ, compared with one over the number of units?", "classes.*.delta, population",
     _class("δ {delta}, declared population {population}", "delta", "population")),
    ("2.3, 2.5", "Which variant and which parameters, so that others can convert?", "classes.*.charges, rho, accountant",
     _charges,
     _class("ρ {rho} (zCDP, without amplification)", "rho"),
     _value("accountant {name} ({version})", "accountant", BY_LEDGER)),
    ("2.4", "What is the unit of privacy, and which data sets are neighbours?", "classes.*.unit, adjacency",
     _class("per {unit}, {adjacency}", "unit", "adjacency")),
    ("2.4", "Which hypotheses would a harm tell apart, and are they neighbours?", "statements: unit", _said("unit")),
    ("2.4", "How are all contributions of one unit bounded together?", "classes.*.clip_norm, max_occurrences",
     _class("the gradient of every contribution is clipped to norm {clip_norm}", "clip_norm"),
     _said("not covered", word="several contributions"),
     _class("at most {max_occurrences} uses", "max_occurrences")),
    ("2.2, 4.1", "What is the budget over all analyses, who may reset it?", "classes.*.epsilon_total, statements: budget",
     _class("ε {epsilon_total} over all runs of the ledger", "epsilon_total"), _said("budget", word="all runs")),
    ("2.6", "Which other releases of the same data exist?", "about.other_releases, ledgers_beside", _owner("other_releases"), _beside),
    ("3", "Which library and version ran, with which own mechanisms?", "program",
     _value("lamina {lamina}, torch {torch}, python {python}, kernels {kernels:.16}", "program", BY_TRAINER, "lamina")),
    ("3.1", "Which mechanism, with which sensitivity, and where is it proven?", "plan",
     _value("{noise} noise, {clipping} clipping, {allocation} allocation; proof in docs/theory.md", "plan", BY_LEDGER)),
    ("3.2", "How useful is the result, with intervals?", "utility", lambda content: _utility(content, groups=False)),
    ("3.2", "How does it compare with a simple alternative?", "statements: comparison", _said("comparison")),
    ("3.3", "Does it serve small groups worse?", "utility, by group", lambda content: _utility(content, groups=True)),
    ("3.5", "What was tuned and pre-trained, on which data, and how large is the model?", "tuning, trainer.starting_weights, model",
     _value("runs in the ledger: {runs_in_ledger}, of them before this one: {runs_before_this}", "tuning", BY_LEDGER),
     _value("trials elsewhere: {elsewhere}", "tuning", BY_OWNER, "elsewhere"), _owner("tuning"),
     _value("starting weights: {origin}, SHA-256 {sha256:.16}…", "trainer.starting_weights", BY_TRAINER, "origin"),
     _value("{parameters} parameters", "model", BY_LEDGER)),
    ("3.6", "Is synthetic data released?", "model", _value("the release contains weights ({file})", "model", BY_LEDGER)),
    ("3.7", "Whose data are records without structure (texts, images)?", "about.subjects", _owner("subjects")),
    ("4.1", "Which queries does the guarantee allow?", "statements: query model", _said("query model")),
    ("4.2", "Who is trusted with the raw data?", "statements: trust", _said("trust")),
    ("4.3", "Are attacks on floating-point noise covered?", "trainer.hardened, statements: not covered",
     _value("noise rounded to a public grid: {hardened}", "trainer", BY_TRAINER, "hardened"), _said("not covered", word="rounding")),
    ("4.3", "Were timing, errors and other channels examined?", "statements: side channels", _said("side channels")),
    ("4.4", "How is the data stored, and who has access?", "about.security", _owner("security")),
    ("4.5", "How was the data collected, with which consent, and how little of it?", "about.collection, legal_basis, rights",
     _owner("collection", "legal_basis", "rights")),
    ("4.3", "Which random generator made noise and samples?", "trainer.noise",
     _value("source of noise and samples: {noise}", "trainer", BY_TRAINER, "noise")),
    ("5", "Who verified it, and how?", "ledger, statements: attack",
     _value("verification of the ledger ({size} leaves): {verdict}", "ledger", BY_ISSUER), _said("attack")),
)  # fmt: skip


def profile_dict(content: Content) -> dict[str, Any]:
    """Return the table as machines read it. An empty list of evidence means "not stated"."""
    rows = [
        {"item": each.number, "section": each.section, "question": each.question, "where": each.where, "evidence": [
            {"text": text, "source": source, "leaves": list(leaves)} for text, source, leaves in each.evidence(content)]}
        for each in ITEMS
    ]  # fmt: skip
    about = {"profile": NIST_PROFILE, "run": content["run"]["id"], "private": content["private"]}
    return {"notice": NOTICE, **about, "rows": rows}


def profile_text(content: Content) -> str:
    """Return the table as people read it."""
    lines = [NOTICE]
    for each in ITEMS:
        lines.append(f"{each.number:>2}  §{each.section}  {each.question}  [{each.where}]")
        for text, source, leaves in each.evidence(content) or [("not stated", "", ())]:
            at = f", {'leaves' if len(leaves) > 1 else 'leaf'} {', '.join(map(str, leaves[:8]))}" if leaves else ""
            known = f" ({source}{at}{' …' if len(leaves) > 8 else ''})" if source else ""
            lines.append(f"      {text}{known}")
    return "\n".join(lines)
