"""Sentences for a contributor about the facts that a ledger records about their contribution.

The sentences are in templates/letter.toml. They follow from the facts of a statement or a reconciliation alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lamina.account.schedule import rdp_order_of
from lamina.ledger.schema import pluralize
from lamina.plan.table import epsilon_text, remaining_text
from lamina.release.certificate import RUN_CONDITIONS
from lamina.release.risk_statements import content_sentence, membership_sentence, shown_leaves
from lamina.release.typeset import read_template, stated_rows, typeset


def letter(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the letter to a contributor from the content of a statement: summary, facts, and sections of sentences."""
    told, tree, facts = content["contribution"], content["ledger"], letter_facts(content)
    unknown = "no figure yet" if facts["open"] else "no protection is proven"
    lost = f"privacy loss at most ε {facts['epsilon']}" if facts["priced"] else unknown
    gone = content["withdrawn"]
    summary = [
        f"withdrawn on {gone['time'][:10]}" if gone else "expired" if facts["expired"] else "in force",
        "not protected: declared public" if told["public"] else lost,
        pluralize(len(content["releases"]), "released model"),
    ]
    shown = {
        "contribution": told["descriptor"],
        "ledger": f"{tree['origin']}, {tree['size']:,} leaves",
        "as of": content["as_of"],
        "admitted": f"{told['admitted']} (leaf {told['index']}), class {told['class']}",
        "valid until": told["expires"],
    }
    sections = [
        {"heading": each["heading"], "text": _sentences(facts, each["groups"])}
        for each in read_template("letter.toml")["section"]
    ]
    return {"summary": " · ".join(summary), "facts": list(shown.items()), "sections": sections}


def letter_pdf(page: Mapping[str, Any]) -> bytes:
    """Return the letter as a PDF; the same bytes each time."""
    return typeset(page, "statement.typ")


def reconciled_text(found: Mapping[str, Any]) -> str:
    """Return the answer to a deletion request from the facts of a reconciliation."""
    return " ".join(_sentences(letter_facts(found), ("withdrawal", "use", "loss", "models")))


def _sentences(facts: Mapping[str, Any], groups: Sequence[str]) -> list[str]:
    rows = read_template("letter.toml")
    return [row["text"].format_map(facts) for group in groups for row in stated_rows(rows[group], facts)]


def _runs_of_use(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs that may have used the contribution. It was left out of the others, which its bound had exhausted."""
    used = {each["run"] for each in content["events"] if each["factor"]}
    return [run for run in content["runs"] if run["run"] in used]


def _broken(content: Mapping[str, Any]) -> list[str]:
    """Return in words which conditions of the figures do not hold, by run."""
    reasons = read_template("letter.toml")["condition"]
    wanted = {name: value for name, (value, _) in RUN_CONDITIONS.items()} | {"sound_plan": True}
    return [
        f"in run {run['run'][:8]}, {reasons[name]}"
        for run in _runs_of_use(content)
        for name, value in wanted.items()
        if run["conditions"] and run["conditions"][name] != value
    ]


def is_proven(content: Mapping[str, Any]) -> bool:
    """Return whether ε bounds the privacy loss: each run that may have used the contribution ended, and its conditions hold."""
    if content["unrecorded"]:
        return False
    charged = not content["contribution"]["public"] and content["epsilon_charged"] is not None
    return charged and all(run["conditions"] for run in _runs_of_use(content)) and not _broken(content)


def letter_facts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts and texts of the sentences, by their names in letter.toml."""
    told, gone, runs, released = (content[name] for name in ("contribution", "withdrawn", "runs", "releases"))
    used, left_out = ([each for each in content["events"] if bool(each["factor"]) is used] for used in (True, False))
    scaled = [each for each in used if each["factor"] < 1]
    finite = not told["public"] and content["epsilon_charged"] is not None
    broken = _broken(content) if finite else []
    unrecorded = content["unrecorded"]
    unended = finite and (bool(unrecorded) or not all(run["conditions"] for run in _runs_of_use(content)))
    priced = is_proven(content)
    expired = told["expires"] <= content["as_of"]  # times of one format
    signed, remains = content["epsilon_signed"], content["epsilon_remaining"]
    facts: dict[str, Any] = {
        "public": told["public"],
        "pruned": told["pruned"],
        "class": told["class"],
        "expired": expired,
        "signed requests": content.get("withdraw") == "signed",
        "withdrawn": gone,
        "ended": gone or expired,
        "used": used,
        "epochs": pluralize(len(used), "epoch"),
        "runs": pluralize(len({each["run"] for each in used}), "training run"),
        "steps": pluralize(sum(each["steps"] for each in used), "step"),
        "leaves": _leaves(used),
        "unrecorded": unrecorded,
        "unrecorded_runs": pluralize(len(unrecorded), "training run"),
        "unrecorded_steps": pluralize(sum(each["steps"] for each in unrecorded), "step"),
        "stayed out": content["not_used_in"],
        "epochs_without": pluralize(content["not_used_in"], "epoch"),
        "left out": left_out,
        "left_out_epochs": pluralize(len(left_out), "epoch"),
        "left_out_leaves": _leaves(left_out),
        "scaled": scaled,
        "scaled_epochs": pluralize(len(scaled), "epoch"),
        "scaled_leaves": _leaves(scaled),
        "abandoned": sum(one["outcome"] == "abandoned" for each in used for one in each["segments"]),
        "unbounded": not told["public"] and not finite,
        "broken": "; ".join(broken),
        "open": unended and not broken,
        "priced": priced,
        "figures": priced and runs,
        "limited": signed is not None and remains is not None,
        "shared": any(not each["own_account"] for each in content["events"]),
        "zero-out": any(run["conditions"]["adjacency"] != "add/remove" for run in runs if run["conditions"]),
        "epsilon": epsilon_text(content["epsilon"] or 0),
        "signed": epsilon_text(signed or 0),
        "remains": remaining_text(remains or 0),
        "released": released and pluralize(len(released), "released model"),
        "models": "; ".join(
            f"{each['name'] or 'a model'} (released {each['time'][:10]}, leaf {each['index']}, manifest {each['manifest'][:16]}…)"
            for each in released
        ),
    }
    if gone is not None:
        signer = f"on a request signed by the {gone['by']}"
        facts["by"] = "by the keeper of the ledger alone" if gone["by"] == "keeper" else signer
    if "unit" in content:  # a statement, which has risk figures
        sentences = {"membership": membership_sentence, "content": content_sentence}
        facts |= {of: content[of] and text(content["unit"], content[of]) for of, text in sentences.items()}
        facts |= {"unit": content["unit"], "delta": content["delta"]}
        facts["chosen later"] = len(runs) > 1 and rdp_order_of(content["accountant"]) is None
    return facts


def _leaves(events: Sequence[Mapping[str, Any]]) -> str:
    shown = [str(leaf) for leaf in shown_leaves([each["index"] for each in events])]
    between = ", " if len(shown) == len(events) else " to "
    return f"{'leaf' if len(events) == 1 else 'leaves'} {between.join(shown)}"
