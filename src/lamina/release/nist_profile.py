"""The questions of NIST SP 800-226 about a guarantee, and the evidence in a certificate (`certify --profile nist-800-226`).

The items are in templates/nist-800-226.toml. Each finds its evidence in the content of the certificate. An item without evidence
is "not stated". No item and no number of items is a claim of compliance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from lamina.release.risk_statements import short_figure
from lamina.release.schema import BY_MEASUREMENT, BY_OWNER
from lamina.release.typeset import read_template

NIST_PROFILE = "nist-800-226"
EQUIVALENT = "equivalent_records"  # a figure: on how many records training without privacy is as accurate
NOTICE = "This table shows where the certificate states what NIST SP 800-226 asks about. It does not claim compliance with SP 800-226."
ITEMS: Sequence[Mapping[str, Any]] = read_template("nist-800-226.toml")["item"]
Content = Mapping[str, Any]
Evidence = tuple[str, str, Sequence[int]]  # value, source, leaves of the ledger


class _RoundedUp(Formatter):
    """A formatter that rounds up numbers without a format."""

    def format_field(self, value: Any, spec: str) -> str:
        rounds = not spec and isinstance(value, float) and value >= 1e-3
        return short_figure(value) if rounds else str(super().format_field(value, spec))


def _evidence(content: Content, item: Mapping[str, Any]) -> Iterator[Evidence]:
    for row in item["evidence"]:
        for each in content["statements"]:
            if each["topic"] in row.get("topics", ()) and row.get("word", "") in each["text"].lower():
                yield each["text"], each["source"], each["leaves"] or ()
        for name, each in content["about"].items():
            if name in row.get("about", ()):
                yield f"{name}: {each['text']}", BY_OWNER, (each["leaf"],)
        if "text" in row:
            yield from _filled(content, row)
        if "utility" in row:
            yield from _utility(content, row["utility"])


def _filled(content: Content, row: Mapping[str, str]) -> Iterator[Evidence]:
    """Fill the text of a row from every record of a section that states all fields of the text."""
    text, needs = row["text"], [field for _, field, _, _ in Formatter().parse(row["text"]) if field]
    for label, record in _records(content, row["of"]):
        if row.get("at") in (None, record.get("delta")) and all(
            record.get(need) not in (None, "not stated", "not declared") for need in needs
        ):
            leaves = record.get("leaves", [record["leaf"]] if "leaf" in record else [])
            yield label + _RoundedUp().vformat(text, (), record), row["source"], leaves


def _records(content: Content, section: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (label, record) of a section; of the private classes, their charges and profiles, with the name of the class."""
    if section in ("classes", "charges", "profile"):
        for name, each in content["classes"].items():
            points = [{"delta": delta, "epsilon": epsilon} for delta, epsilon in (each["epsilon_at"] or {}).items()]
            records = {"classes": [each], "charges": each["charges"], "profile": points}[section]
            yield from ((f"{name}: ", one) for one in records if not each["public"])
        return
    found: Any = content
    for name in section.split("."):
        found = found.get(name) or {}
    yield from (("", each) for each in (found if isinstance(found, list) else [found]))


def _utility(content: Content, which: str) -> Iterator[Evidence]:
    for each in content["utility"]:
        kind = "comparison" if each["figure"] == EQUIVALENT else "overall" if each["group"] is None else "by group"
        if kind == which:
            name = each["figure"] + (f", {each['group']}" if each["group"] is not None else "")
            value = "suppressed or undefined" if each["value"] is None else f"{each['value']:.4g}"
            if each["low"] is not None:
                value += f", {100 * each['level']:g} % interval {each['low']:.4g} to {each['high']:.4g}"
            yield f"{name}: {value}, on {each['on']} data", BY_MEASUREMENT, ()


def profile_dict(content: Content) -> dict[str, Any]:
    """Return the table for JSON. An empty list of evidence means "not stated"."""
    rows = []
    for number, item in enumerate(ITEMS, 1):
        found = [{"text": text, "source": by, "leaves": [*leaves]} for text, by, leaves in _evidence(content, item)]
        asked = {name: item[name] for name in ("section", "question", "where")}
        rows.append({"item": number, **asked, "evidence": found})
    about = {"profile": NIST_PROFILE, "run": content["run"]["id"], "private": content["private"]}
    return {"notice": NOTICE, **about, "rows": rows}


def profile_text(content: Content) -> str:
    """Return the table as text for a terminal."""
    lines = [NOTICE, *([] if content["private"] else ["This run is not private; lamina certify states why."])]
    for row in profile_dict(content)["rows"]:
        lines.append(f"{row['item']:>2}  §{row['section']}  {row['question']}  [{row['where']}]")
        for each in row["evidence"] or [{"text": "not stated", "source": "", "leaves": ()}]:
            leaves = each["leaves"]
            at = f", {'leaves' if len(leaves) > 1 else 'leaf'} {', '.join(map(str, leaves[:8]))}" if leaves else ""
            known = f" ({each['source']}{at}{' …' if len(leaves) > 8 else ''})" if each["source"] else ""
            lines.append(f"      {each['text']}{known}")
    return "\n".join(lines)
