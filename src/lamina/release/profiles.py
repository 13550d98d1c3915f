"""Profiles: the questions of a guideline about a guarantee, and the evidence in a certificate (`lamina certify --profile`).

A profile is one table, templates/NAME.toml. Each item finds its evidence in the content of the certificate, and in the
countersignature of a privacy officer if there is one. An item without evidence is "not stated". No item and no number of items
is a claim of compliance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from lamina.release.risk_statements import short_figure
from lamina.release.schema import BY_MEASUREMENT, BY_OWNER
from lamina.release.typeset import read_template

PROFILES = ("nist-800-226", "hipaa-expert-determination")
EQUIVALENT = "equivalent_records"  # a figure: on how many records training without privacy is as accurate
_UNPROVEN = ("classes", "charges", "profile")  # sections that hold figures of the guarantee
Content = Mapping[str, Any]
Evidence = tuple[str, str, Sequence[int]]  # value, source, leaves of the ledger


class _RoundedUp(Formatter):
    """A formatter that rounds up numbers without a format, and writes a bool as yes or no."""

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        rounds = not spec and isinstance(value, float) and value >= 1e-3
        return short_figure(value) if rounds else str(super().format_field(value, spec))


def _evidence(content: Content, officer: Content, item: Mapping[str, Any]) -> Iterator[Evidence]:
    no_private_class = all(each["public"] for each in content["classes"].values())
    for row in item["evidence"]:
        if (row.get("private") and no_private_class) or (row.get("of") in _UNPROVEN and not content["private"]):
            continue
        for each in content["statements"]:
            if each["topic"] in row.get("topics", ()) and row.get("word", "") in each["text"].lower():
                yield each["text"], each["source"], each["leaves"] or ()
        for name, each in content["about"].items():
            if name in row.get("about", ()):
                yield f"{name}: {each['text']}", BY_OWNER, (each["leaf"],)
        for name in row.get("officer", ()):
            if officer.get(name) is not None:
                yield (
                    f"{name.replace('_', ' ')}: {officer[name]}",
                    f"stated by the holder of key {officer['signer'][:16]}",
                    (),
                )
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


def profile_dict(name: str, content: Content, officer: Content | None = None) -> dict[str, Any]:
    """Return a profile for JSON. `officer` is the content of a countersignature. An empty list of evidence: "not stated"."""
    table = read_template(f"{name}.toml")
    rows = []
    for number, item in enumerate(table["item"], 1):
        found = [
            {"text": text, "source": by, "leaves": [*leaves]}
            for text, by, leaves in _evidence(content, officer or {}, item)
        ]
        asked = {key: item[key] for key in ("section", "question", "where")}
        rows.append({"item": number, **asked, "evidence": found})
    return {
        "notice": table["notice"], "profile": name, "run": content["run"]["id"], "private": content["private"], "rows": rows,
    }  # fmt: skip


def profile_text(found: Mapping[str, Any]) -> str:
    """Return a profile as text for a terminal."""
    lines = [found["notice"], *([] if found["private"] else ["This run is not private; lamina certify states why."])]
    for row in found["rows"]:
        lines.append(f"{row['item']:>2}  §{row['section']}  {row['question']}  [{row['where']}]")
        for each in row["evidence"] or [{"text": "not stated", "source": "", "leaves": ()}]:
            leaves = each["leaves"]
            at = f", {'leaves' if len(leaves) > 1 else 'leaf'} {', '.join(map(str, leaves[:8]))}" if leaves else ""
            known = f" ({each['source']}{at}{' …' if len(leaves) > 8 else ''})" if each["source"] else ""
            lines.append(f"      {each['text']}{known}")
    return "\n".join(lines)
