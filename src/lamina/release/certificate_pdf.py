"""PDFs about a certificate, set by typst (`pip install 'lamina[report]'`): the certificate, and the one-page release decision.

The templates read the content of the certificate itself. The same inputs give the same bytes, and no text is smaller than 7 pt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.release.certificate import Certificate
from lamina.release.countersignature import Countersignature
from lamina.release.posture import merge_neighbours
from lamina.release.typeset import typeset

_MAX_LAYERS = 24  # of the picture; more are drawn as groups of neighbours


def certificate_pdf(
    certificate: Certificate, signer: str | None = None, countersignature: Countersignature | None = None
) -> bytes:
    """Return the PDF of a certificate; `signer` is the id of the key that signed it."""
    content = certificate.content
    return _compiled("certificate.typ", content, countersignature, signer=signer, layers=_merged_layers(content))


def decision_pdf(certificate: Certificate, countersignature: Countersignature | None = None) -> bytes:
    """Return the page on which a privacy officer decides about a release."""
    return _compiled("decision.typ", certificate.content, countersignature)


def _compiled(template: str, content: Mapping[str, Any], officer: Countersignature | None, **more: Any) -> bytes:
    signed = None if officer is None else {**officer.content, "key": officer.signer.name}
    return typeset({"content": content, "countersignature": signed, **more}, "paper.typ", template)


def _merged_layers(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the layers from the output down. Adjacent equal layers are one row; many rows are merged with their neighbours."""
    rows = []
    for group in merge_neighbours(content["layers"], lambda each: (each["classes"], each["noise_std"]), _MAX_LAYERS):
        first, last = group[0]["name"], group[-1]["name"]
        label = first[-44:] if len(group) == 1 else f"{first[-24:]} … {last[-24:]} ({len(group)} layers)"
        classes = sorted({name for each in group for name in each["classes"]})
        noise = min(each["noise_std"] for each in group)
        rows.append({"label": label, "classes": classes, "noise": f"{noise:.3g}" if noise else "no noise"})
    return rows[::-1]
