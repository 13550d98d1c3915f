"""The certificate as a PDF, by typst (`pip install 'lamina[report]'`): one or two pages, the same bytes each time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from lamina.errors import LaminaError
from lamina.plan.table import epsilon_text
from lamina.release.certificate import Certificate
from lamina.release.risk_statements import FIGURE_NAMES, texts

_MAX_LAYERS = 24  # of the picture; more are drawn as groups of neighbours
_CLASS_HEAD = ("class", "protects", *FIGURE_NAMES.values())


def certificate_pdf(certificate: Certificate, *, signer: str | None = None) -> bytes:
    """The PDF of a certificate; `signer` is the id of the key that signed it."""
    try:
        import typst
    except ImportError:
        problem = "the PDF needs typst, which is not installed"
        raise LaminaError("release.typst-missing", problem, "pip install 'lamina[report]', or use the JSON") from None
    template = resources.files("lamina.release").joinpath("certificate.typ").read_bytes()
    data = json.dumps(_page(certificate.content, signer), ensure_ascii=False, allow_nan=False)
    made = typst.compile(template, sys_inputs={"data": data}, ignore_system_fonts=True, timestamp=0)
    assert isinstance(made, bytes)
    return made


def _page(content: Mapping[str, Any], signer: str | None) -> dict[str, Any]:
    run, model, ledger, plan = content["run"], content["model"], content["ledger"], content["plan"]
    facts = {
        "issued": content["issued"],
        "run": f"{run['id']}, {run['steps']} of {run['planned_steps']} steps",
        "model": f"{model['file']}, SHA-256 {model['sha256']}",
        "plan": f"{plan['sha256']}",
        "mechanism": f"{plan['noise']} noise, {plan['clipping']} clipping, {plan['allocation']} allocation, "
        f"expected batch {plan['expected_batch']:g}",
        "accountant": f"{content['accountant']['name']} ({content['accountant']['version']})",
        "ledger": f"{ledger['origin']}, {ledger['size']} leaves, {ledger['verdict']}",
        "ledger root": ledger["root"],
        "header": ledger["header"],
    }
    return {
        "origin": ledger["origin"],
        "private": content["private"],
        "badge": content["protects"]["badge"],
        "statement": "\n".join(texts(content, "membership", "content", "budget")),
        "reasons": [each["reason"] for each in content["conditions"] if not each["holds"]],
        "class_head": _CLASS_HEAD,
        "class_rows": [_class_row(name, each) for name, each in content["classes"].items()],
        "picture": _picture(content),
        "assumptions": texts(content, "unit", "condition", "assumption", "trust", "query model", "voids"),
        "not_covered": texts(content, "side channels", "tuning", "not covered"),
        "facts": list(facts.items()),
        "signer": signer,
    }


def _class_row(name: str, each: Mapping[str, Any]) -> list[str]:
    if each["public"]:
        return [name, "nothing: public", *["–"] * 6]
    return [name, each["unit"], *(_figure(each[key]) for key in FIGURE_NAMES if key != "delta"), f"{each['delta']:g}"]


def _figure(value: float | None) -> str:
    return "not proven" if value is None else epsilon_text(value, 3)


def _picture(content: Mapping[str, Any]) -> dict[str, Any]:
    """Layers from the output down; of a deep model, groups of neighbours with the classes of all and the least noise."""
    layers = content["layers"]
    size = -(-len(layers) // _MAX_LAYERS)
    rows = []
    for at in range(0, len(layers), size):
        group = layers[at : at + size]
        label = group[0]["name"] if len(group) == 1 else f"{group[0]['name']} … {group[-1]['name']}"
        classes = sorted({name for each in group for name in each["classes"]})
        noise = min(each["noise_std"] for each in group)
        rows.append({"label": label[-48:], "classes": classes, "noise": f"{noise:.3g}" if noise else "no noise"})
    return {"classes": list(content["classes"]), "layers": rows[::-1]}
