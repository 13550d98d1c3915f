"""The papers beside a released model: a model card (Hugging Face format) and a CycloneDX ML-BOM."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from lamina.admit.signed_json import canonical_json
from lamina.plan.table import epsilon_text
from lamina.release.certificate import Certificate
from lamina.release.posture import Posture
from lamina.release.risk_statements import FIGURE_NAMES, texts

_FIGURES = ("epsilon_total", "epsilon_replace_one", "epsilon_unamplified")  # beside that of the model
_CLASS_COLUMNS = (
    "class", "protects", FIGURE_NAMES["epsilon"], *(FIGURE_NAMES[key] for key in _FIGURES), FIGURE_NAMES["delta"], "purposes",
)  # fmt: skip
_LAYERS_SHOWN = 60
_ASSUMED = ("unit", "condition", "assumption", "trust", "query model", "voids")
_NOT_COVERED = ("side channels", "tuning", "not covered")


def model_card(name: str, certificates: Sequence[Certificate], posture: Posture, *, not_after: str | None) -> bytes:
    """README.md of a release: what the model is, and a section on its privacy."""
    last = certificates[-1].content
    lines = [
        "---",
        "library_name: pytorch",
        "tags:",
        "- differential-privacy",
        "- lamina",
        "---",
        "",
        f"# {_text(name)}",
        "",
        f"A model of {last['model']['parameters']:,} parameters, trained with layer-wise differential privacy "
        f"({_text(last['plan']['allocation'])} allocation, {last['plan']['clipping']} clipping).",
        "",
        "## Privacy",
        "",
        _text(last["protects"]["badge"]),
        "",
        "\n\n".join(map(_text, texts(last, "membership", "content", "budget"))),
        "",
        *_table(_CLASS_COLUMNS, [_class_row(name, posture, certificates) for name in posture.classes]),
        "",
        "What this assumes:",
        "",
        *(f"- {_text(each)}" for each in texts(last, *_ASSUMED)),
        "",
        "What it does not cover:",
        "",
        *(f"- {_text(each)}" for each in texts(last, *_NOT_COVERED)),
        "",
        "### Which class reached which layer",
        "",
        *_table(("layer", "depth", "noise (standard deviation)", "classes"), _layer_rows(posture)),
        "",
        "## Use",
        "",
        "Check the release before use: `lamina release verify FOLDER --trust KEYS`. `manifest.json` says who may draw on "
        "which layers; a gate (`lamina.ReleaseGate`) decides query by query.",
        "",
        f"May be served until: {not_after or 'no date was set'}. Contributions withdrawn so far: "
        f"{sum(posture.withdrawn.values())}.",
        "",
    ]
    return "\n".join(lines).encode()


def _class_row(name: str, posture: Posture, certificates: Sequence[Certificate]) -> list[str]:
    each = posture.classes[name]
    if each.public:
        return [name, "nothing: public data", "–", "–", "–", "–", "–", ", ".join(each.purposes) or "none stated"]
    told: Mapping[str, Any] = next((c.classes[name] for c in reversed(certificates) if name in c.classes), {})
    figures = [told.get(key) for key in _FIGURES]
    return [
        name,
        each.unit,
        _figure(each.epsilon),
        *map(_figure, figures),
        f"{each.delta:g}",
        ", ".join(each.purposes) or "none stated",
    ]


def _layer_rows(posture: Posture) -> list[list[str]]:
    rows = [
        [each.name, f"{each.depth:.2f}", f"{each.noise_std:.4g}", ", ".join(each.classes) or "none: not trained"]
        for each in posture.layers[:_LAYERS_SHOWN]
    ]
    if (more := len(posture.layers) - _LAYERS_SHOWN) > 0:
        rows.append([f"… and {more} more: manifest.json", "", "", ""])
    return rows


def _figure(value: float | None) -> str:
    return "not proven" if value is None else epsilon_text(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(_text, cells))} |"

    return [line(head), f"|{'---|' * len(head)}", *map(line, rows)]


def _text(text: str) -> str:
    """A name as Markdown shows it, whatever is in it: no mark-up, no table cell, no line of its own, no command."""
    flat = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|!" else c for c in flat)


def ml_bom(name: str, files: Mapping[str, str], certificates: Sequence[Certificate], posture: Posture) -> bytes:
    """An inventory of the release: CycloneDX 1.7, with the model card of its machine-learning model."""
    last = certificates[-1].content
    metrics = [
        {"type": f"epsilon at delta {each.delta:g}, class {cls}", "value": _figure(each.epsilon)}
        for cls, each in posture.classes.items()
        if not each.public
    ]
    considerations = {
        "technicalLimitations": texts(last, *_NOT_COVERED),
        "ethicalConsiderations": [
            {"name": "privacy", "mitigationStrategy": "\n".join(texts(last, "membership", "content"))}
        ],
    }
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": name,
        "hashes": [{"alg": "SHA-256", "content": files[last["model"]["file"]]}],
        "modelCard": {
            "modelParameters": {"approach": {"type": "supervised"}, "task": "unspecified"},
            "quantitativeAnalysis": {"performanceMetrics": metrics},
            "considerations": considerations,
        },
    }
    others = [
        {"type": "file", "bom-ref": each, "name": each, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for each, digest in sorted(files.items())
        if each != last["model"]["file"]
    ]
    seed = json.dumps([name, sorted(files.items())], ensure_ascii=False)
    return canonical_json(
        {
            "bomFormat": "CycloneDX",
            "specVersion": "1.7",
            "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, seed)}",
            "version": 1,
            "metadata": {"timestamp": last["issued"], "component": model},
            "components": others,
        }
    )
