"""The papers inside a release: a model card (Hugging Face format) and a CycloneDX ML-BOM.

Both take every figure and sentence from the certificates. What the owner states comes from [about] in policy.toml.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lamina.release.certificate import Certificate
from lamina.release.posture import Posture
from lamina.release.risk_statements import (
    FIGURE_NAMES,
    JOINT_EPSILON,
    per_hundred,
    protection,
    purpose_text,
    risk_sentence,
    short_figure,
    stated,
    withdrawn_text,
)
from lamina.release.schema import BY_LEDGER, BY_TRAINER
from lamina.release.typeset import NOT_STATED, filled
from lamina.sign.signed_json import canonical_json

_LAYERS_SHOWN = 60
_ABOUT_MODEL = ("description", "task", "domain", "intended_use", "organisation", "contact", "region", "licence")


def about(content: Mapping[str, Any], name: str) -> str:
    """Return the owner's text under a name of [about], or "not stated"."""
    return str(content["about"][name]["text"]) if name in content["about"] else NOT_STATED


_RISKS = ("membership", "content")
_RISK_NAMES = {"tpr": "found at 1 % false accusations", "accuracy": "right answers from a coin toss", "mu": "μ"}
_OF_ONE_RUN = ("epsilon_replace_one", "epsilon_unamplified", "rho")


def figure_labels(several: bool) -> dict[str, str]:
    """Return the names of the figures of a class. Of a model of several runs, risks are those over all runs."""
    scope = ", over all runs" if several else ""
    risks = {f"{of} {key}": f"{of}, {label}{scope}" for of in _RISKS for key, label in _RISK_NAMES.items()}
    return FIGURE_NAMES | ({"epsilon": JOINT_EPSILON} if several else {}) | risks


FIGURE_LABELS = {label for several in (False, True) for label in figure_labels(several).values()}


def class_rows(certificates: Sequence[Certificate], posture: Posture) -> dict[str, dict[str, str]]:
    """Return for every private class its unit, figures and settings as texts, by their names on paper.

    A model of several runs has no curve of its own; the figures over all runs of the ledger, which bound it, stand for it.
    """
    rows, several = {}, len(certificates) > 1
    labels = figure_labels(several)
    for name, each in posture.classes.items():
        if each.public:
            continue
        known = [dict(found.classes[name]) for found in certificates if name in found.classes]
        charges = [one for figures in known for one in figures["charges"]]
        values = known[-1] | dict.fromkeys(_OF_ONE_RUN if several else ())
        values |= {"epsilon": each.epsilon, "delta": each.delta}
        for of in _RISKS:
            risk = known[-1][f"{of}_total" if several else of] or {}
            rates = {"tpr": risk.get("tpr", {}).get("0.01"), "accuracy": risk.get("accuracy"), "mu": risk.get("mu")}
            values |= {f"{of} {key}": value for key, value in rates.items()}
        steps = (f"σ {c['noise_multiplier']:.6g}, q {c['sampling_rate']:.6g}, {c['steps']} steps" for c in charges)
        rows[name] = {
            "unit": each.unit,
            "neighbouring relation": known[-1]["adjacency"],
            **{label: _figure(key.rpartition(" ")[2], values[key]) for key, label in labels.items()},
            "noise multiplier σ, sampling rate q, steps": "; ".join(steps) or "not used",
            "declared population": NOT_STATED if (count := known[-1]["population"]) is None else f"{count:,}",
            "purposes": ", ".join(each.purposes) or NOT_STATED,
        }
    return rows


def _figure(key: str, value: float | None) -> str:
    if value is None:
        return "not proven"
    if key in ("tpr", "accuracy"):
        return f"{per_hundred(value)} %"
    return f"{value:g}" if key == "delta" else short_figure(value)


def figures_table(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return `class_rows` as a table in Markdown, with a column for each class."""
    names = list(next(iter(rows.values()), {}))
    return markdown_table(("figure", *rows), [(each, *(row[each] for row in rows.values())) for each in names])


def model_protection(certificates: Sequence[Certificate], posture: Posture) -> Mapping[str, Any]:
    """Return for whom a model is private, over all its runs. A class that one of them declares public is not protected."""
    if len(certificates) == 1:
        found: Mapping[str, Any] = certificates[0].content["protects"]
        return found
    classes = {}
    for name, each in posture.classes.items():
        known = [found.classes[name] for found in certificates if name in found.classes]
        classes[name] = {
            **next((one for one in known if one["public"]), known[-1]),
            "epsilon_total": each.epsilon,
            "charges": [charge for one in known for charge in one["charges"]],
        }
    return protection(classes, private=True, continued=True)


def model_badge(certificates: Sequence[Certificate], posture: Posture) -> str:
    """Return the badge of `model_protection`."""
    return str(model_protection(certificates, posture)["badge"])


def model_statements(certificates: Sequence[Certificate], posture: Posture) -> list[Mapping[str, Any]]:
    """Return the statements of the certificates about a model, without figures of single runs if it has several runs."""
    if len(certificates) == 1:
        return list(certificates[0].content["statements"])
    every = [each for certificate in certificates for each in certificate.content["statements"]]
    of_one_run = (*_RISKS, "budget", "purpose")
    whole = (each for each in every if each["class"] is None or each["topic"] not in of_one_run)
    found = {each["text"]: each for each in whole if each["topic"] != "withdrawn"}
    texts = [("purpose", name, purpose_text(name, each.purposes), BY_TRAINER) for name, each in posture.classes.items()]
    found |= {text: stated(topic, text, source, cls=name) for topic, name, text, source in texts}
    gone = withdrawn_text(posture.as_of_size, posture.withdrawn)
    found[gone] = stated("withdrawn", gone, BY_LEDGER)
    for name in (name for name, each in posture.classes.items() if not each.public):
        figures = next(each.classes[name] for each in reversed(certificates) if name in each.classes)
        for topic in _RISKS:
            unit, risk = figures["unit"], figures[f"{topic}_total"]
            unproven = f"nothing is proven about the {topic} of one {unit}."
            known = unproven if risk is None else risk_sentence(topic, unit, risk)
            text = f"Class {name}: counting all runs of the ledger. {known}"
            found[text] = stated(topic, text, BY_LEDGER, cls=name)
    return list(found.values())


def risk_texts(statements: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the texts about membership and content."""
    return [each["text"] for each in statements if each["topic"] in _RISKS]


def model_card(name: str, certificates: Sequence[Certificate], posture: Posture, *, not_after: str | None) -> bytes:
    """README.md of a release: what the model is, and a section on its privacy."""
    last = certificates[-1].content
    rows, statements = class_rows(certificates, posture), model_statements(certificates, posture)
    facts = {
        "name": name, "badge": model_badge(certificates, posture), "parameters": f"{last['model']['parameters']:,}",
        "allocation": last["plan"]["allocation"], "clipping": last["plan"]["clipping"],
        "not after": not_after or "no date was set", "withdrawn": str(sum(posture.withdrawn.values())),
        "leaf": str(posture.as_of_size - 1),
    }  # fmt: skip
    protects = model_protection(certificates, posture)
    if protects["private_for"] or protects["weak"]:
        trained = "trained with layer-wise differential privacy ({allocation} allocation, {clipping} clipping)"
        facts["trained"], tags = trained.format_map(facts), ["- differential-privacy", "- lamina"]
    else:
        facts["trained"] = "trained without privacy: none of the data that it learned from is protected"
        tags = ["- lamina"]
    owner = [(each.replace("_", " "), about(last, each)) for each in _ABOUT_MODEL]
    blocks = {
        "TAGS": tags,
        "OWNER": markdown_table(("stated by the owner", ""), owner),
        "RISK": [f"{markdown(text)}\n" for text in risk_texts(statements)],
        "FIGURES": figures_table(rows) if rows else [],
        "STATEMENTS": _statements(statements),
        "LAYERS": markdown_table(("layer", "depth", "noise (standard deviation)", "classes"), _layer_rows(posture)),
    }
    return filled("model-card.md", facts, markdown, blocks).encode()


def _statements(statements: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the other statements under their topics, each with its source."""
    topics: dict[str, list[str]] = {}
    for each in (each for each in statements if each["topic"] not in _RISKS):
        topics.setdefault(each["topic"], []).append(f"- {markdown(each['text'])} ({each['source']})")
    return [line for topic, lines in topics.items() for line in ("", f"### {topic.capitalize()}", "", *lines)]


def _layer_rows(posture: Posture) -> list[list[str]]:
    rows = []
    for each in posture.layers[:_LAYERS_SHOWN]:
        classes = ", ".join(each.classes) or "none (the layer was not trained)"
        rows.append([each.name, f"{each.depth:.2f}", f"{each.noise_std:.4g}", classes])
    if (more := len(posture.layers) - _LAYERS_SHOWN) > 0:
        rows.append([f"… and {more} more: manifest.json", "", "", ""])
    return rows


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(markdown, cells))} |"

    return [line(head), f"|{'---|' * len(head)}", *map(line, rows)]


def markdown(text: str) -> str:
    """A name as Markdown shows it, whatever is in it: no mark-up, no table cell, no line of its own, no command."""
    flat = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|!" else c for c in flat)


def ml_bom(name: str, files: Mapping[str, str], certificates: Sequence[Certificate], posture: Posture) -> bytes:
    """Return an inventory of the release: CycloneDX 1.7 with a model card, a data component for each class, and claims."""
    last = certificates[-1].content
    rows, statements = class_rows(certificates, posture), model_statements(certificates, posture)
    limits = [each["text"] for each in statements if each["topic"] in ("not covered", "side channels")]
    approach = {"approach": {"type": about(last, "approach")}} if "approach" in last["about"] else {}
    metrics = [
        {"type": label, "value": text, "slice": f"class {cls}"}
        for cls, row in rows.items() for label, text in row.items() if label in FIGURE_LABELS
    ]  # fmt: skip
    card = {
        "modelParameters": approach
        | {"task": about(last, "task"), "datasets": [{"ref": f"data:{cls}"} for cls in posture.classes]},
        "quantitativeAnalysis": {"performanceMetrics": metrics},
        "considerations": {
            "useCases": [about(last, "intended_use")],
            "technicalLimitations": limits,
            "ethicalConsiderations": [{"name": "privacy", "mitigationStrategy": s} for s in risk_texts(statements)],
        },
    }
    model = {
        "type": "machine-learning-model", "bom-ref": "model", "name": name, "modelCard": card,
        "hashes": [{"alg": "SHA-256", "content": files[last["model"]["file"]]}],
    }  # fmt: skip
    unprotected = {each["class"] for each in model_protection(certificates, posture)["not_protected"]}
    party = [{"organization": {"name": about(last, "organisation")}}]
    data = [
        {
            "type": "data", "bom-ref": f"data:{cls}", "name": cls,
            "description": f"{about(last, 'subjects')}; unit: {each.unit}; {'not protected' if cls in unprotected else 'protected'}",
            "data": [{"type": "dataset", "name": cls, "governance": {"custodians": party}}],
        }
        for cls, each in posture.classes.items()
    ]  # fmt: skip
    others = [
        {"type": "file", "bom-ref": each, "name": each, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for each, digest in sorted(files.items())
        if each != last["model"]["file"]
    ]
    proof = {
        "bom-ref": "evidence",
        "propertyName": "certificates of the runs",
        "description": "Check them: lamina release verify FOLDER --trust KEYS --ledger LEDGER",
        "data": [{"name": each, "contents": {"url": each}} for each in sorted(files) if each.endswith(".cose")],
    }
    claims = [
        {
            "bom-ref": f"claim:{number}", "target": "model", "predicate": each["text"], "evidence": ["evidence"],
            "reasoning": each["source"] + (f", leaves {each['leaves']}" if each["leaves"] else ""),
        }
        for number, each in enumerate(statements, 1)
    ]  # fmt: skip
    seed = json.dumps([name, sorted(files.items())], ensure_ascii=False)
    return canonical_json(
        {
            "bomFormat": "CycloneDX",
            "specVersion": "1.7",
            "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, seed)}",
            "version": 1,
            "metadata": {"timestamp": last["issued"], "component": model},
            "components": [*data, *others],
            "formulation": [_formula(certificates)],
            "declarations": {"claims": claims, "evidence": [proof]},
        }
    )


def _formula(certificates: Sequence[Certificate]) -> dict[str, Any]:
    """Return the runs of the model as a CycloneDX formula: one workflow for each run, with the programs that performed it."""
    programs: dict[str, dict[str, str]] = {}
    kinds = {"python": "platform"}
    workflows = []
    for content in (each.content for each in certificates):
        plan, run, used = content["plan"], content["run"], content["program"]
        found = [(name, used[name]) for name in ("lamina", "torch", "python") if used[name] != NOT_STATED]
        refs = [f"program:{name}@{version}" for name, version in found]
        programs |= {
            ref: {"type": kinds.get(name, "library"), "bom-ref": ref, "name": name, "version": version}
            for ref, (name, version) in zip(refs, found, strict=True)
        }
        settings = {name: plan[name] for name in ("allocation", "clipping", "noise", "expected_batch")} | {
            "plan (SHA-256)": plan["sha256"], "steps": run["steps"], "weights (SHA-256)": content["model"]["sha256"],
            "accountant": content["accountant"]["name"],
        }  # fmt: skip
        if (start := content["trainer"]["starting_weights"]) is not None:
            settings["starting weights (SHA-256)"] = start["sha256"]
        inputs: list[dict[str, Any]] = [{"resource": {"ref": f"data:{cls}"}} for cls in content["classes"]]
        inputs.append({"parameters": [{"name": name, "value": str(value)} for name, value in settings.items()]})
        workflows.append(
            {
                "bom-ref": f"run:{run['id']}", "uid": run["id"], "name": "training with differential privacy", "taskTypes": ["build"],
                "resourceReferences": [{"ref": ref} for ref in refs], "inputs": inputs,
            }
        )  # fmt: skip
    workflows[-1]["outputs"] = [{"type": "artifact", "resource": {"ref": "model"}}]
    return {"bom-ref": "formula", "components": list(programs.values()), "workflows": workflows}
