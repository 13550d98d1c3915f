"""Papers about a release: OpenDP registry entry, SPDX 3 document, EDPB documentation file, SACRO-ML target.

Every figure and sentence comes from a release that verifies. What nobody stated is printed as "not stated". The same
release and predictions give the same bytes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lamina.errors import NotVerified, PlanError
from lamina.ledger.governance_records import Release
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.release import model_card
from lamina.release.certificate import Certificate
from lamina.release.manifest import MANIFEST, Manifest, read_file
from lamina.release.model_card import FIGURE_LABELS, class_rows, markdown
from lamina.release.typeset import NOT_STATED, filled
from lamina.release.verifier import verify_release
from lamina.sign.keys import read_small, write_new
from lamina.sign.signed_json import canonical_json
from lamina.validate import one_of


class VerifiedRelease(NamedTuple):
    """A verified release without problems, and facts about it as texts by name."""

    manifest: Manifest
    certificates: tuple[Certificate, ...]
    facts: Mapping[str, str]

    def stated(self, name: str) -> str:
        """Return a fact, or "not stated"."""
        return self.facts.get(name, NOT_STATED)


def read_release(folder: Path, trust: Trust | None = None, ledger: LedgerReader | None = None) -> VerifiedRelease:
    """Verify a release and collect facts about it; NotVerified if it has a problem."""
    found = verify_release(folder, trust=trust, ledger=ledger)
    if (manifest := found.manifest) is None or not found.verified:
        problem = f"'{folder}' does not verify: {found.problems[0]}"
        raise NotVerified("release.papers-not-verified", problem, "list all problems: lamina release verify DIR")
    names = [each.signed for each in manifest.predicate.certificates]
    signed = {name: read_file(folder, name) for name in names}
    if any(hashlib.sha256(data).hexdigest() != manifest.subjects[name] for name, data in signed.items()):
        raise NotVerified("release.file-changed", f"'{folder}' changed while it was read", "try again")
    certificates = tuple(Certificate.read(data, (manifest.signer,)) for data in signed.values())
    facts = _facts(manifest, certificates, found.verdict)
    if ledger is not None:
        releases = (leaf.record for leaf in ledger.of_kind(Release))
        others = sum(isinstance(each, Release) and each.manifest.hex() != manifest.digest for each in releases)
        facts["releases"] = str(others)
        if others or "about.other_releases" not in facts:  # what the owner states about others, a program cannot judge
            facts["release"] = "Many releases" if others else "One release"
    return VerifiedRelease(manifest, certificates, facts)


_SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")  # of the OpenDP registry


def _facts(manifest: Manifest, certificates: tuple[Certificate, ...], verdict: str) -> dict[str, str]:
    """Return facts by the names that templates use: [about] of the owner, topics of statements, and those below."""
    content, posture, predicate = certificates[-1].content, manifest.posture, manifest.predicate
    facts = {f"about.{name}": str(each["text"]) for name, each in content["about"].items()}
    statements = model_card.model_statements(certificates, posture)
    for each in statements:
        facts[each["topic"]] = " ".join(filter(None, (facts.get(each["topic"]), each["text"])))
    rows, private = class_rows(certificates, posture), [each for each in posture.classes.values() if not each.public]
    plan, accountant, start = content["plan"], content["accountant"], content["trainer"]["starting_weights"]
    steps = " + ".join(str(each.content["run"]["steps"]) for each in certificates)
    facts |= {
        "name": facts.get("about.title", predicate.name),
        "badge": model_card.model_badge(certificates, posture),
        "risk": " ".join(model_card.risk_texts(statements)),
        "figures": " ".join(f"Class {cls}: {'; '.join(map(': '.join, row.items()))}." for cls, row in rows.items()),
        "mechanism": f"{plan['noise']} noise on sums of clipped gradients, {plan['clipping']} clipping, "
        f"{plan['allocation']} allocation, {steps} steps, expected batch {plan['expected_batch']:g}; accountant "
        f"{accountant['name']} ({accountant['version']}).",
        "units": ", ".join(dict.fromkeys(each.unit for each in private)) or "none: all data is declared public",
        "published": facts.get("about.publication_date", predicate.created[:10]),
        "created": predicate.created, "not after": predicate.not_after, "manifest": manifest.digest,
        "verdict": verdict, "withdrawn": str(sum(posture.withdrawn.values())), "leaf": str(posture.as_of_size - 1),
    }  # fmt: skip
    if start is not None:
        facts["start"] = f"origin {start['origin']}, SHA-256 {start['sha256']}"
    if private:
        facts["variant"] = "Approximate DP"
    if private and all(each.epsilon is not None for each in private):
        epsilon, delta = max(each.epsilon or 0.0 for each in private), max(each.delta or 0.0 for each in private)
        decimal = re.sub("^([0-9]+)e", r"\1.0e", repr(delta))  # 1e-05 is a text in YAML 1.1
        facts["parameters"] = f"{{epsilon: {epsilon:.9f}, delta: {decimal}}}"
    facts["tier"] = "2" if "parameters" in facts else "1"  # tier 3 asks for reasons that only the owner can write
    if (sector := facts.get("about.sector", "").capitalize()) in _SECTORS:
        facts["sector"] = sector
    parts = (facts["name"], facts.get("about.organisation", NOT_STATED), facts["published"][:4])
    return facts | {"slug": "_".join(re.sub(r"\W+", "_", each.lower()) for each in parts).replace("_", "-")}


def opendp_entry(release: VerifiedRelease) -> bytes:
    """Return a draft entry for the OpenDP deployments registry (opendp/deployments-registry-data)."""

    def quoted(text: str) -> str:  # inside the double quotes of YAML
        return json.dumps("".join(c if c.isprintable() else " " for c in text), ensure_ascii=False)[1:-1]

    return filled("opendp-registry.yaml", release.facts, quoted).encode()


def edpb_page(release: VerifiedRelease) -> bytes:
    """Return a document with the items of EDPB Opinion 28/2024. It claims no compliance."""
    table = model_card.figures_table(class_rows(release.certificates, release.manifest.posture))
    return filled("edpb-28-2024.md", release.facts, markdown, {"FIGURES": table}).encode()


def spdx_document(release: VerifiedRelease) -> bytes:
    """Return the release as an SPDX 3.0.1 document (JSON-LD) with the AI and Dataset profiles."""
    manifest, facts, stated = release.manifest, release.facts, release.stated
    root, none = f"urn:lamina:release:{manifest.digest}#", "expandedlicensing_NoAssertionLicense"
    rows, sensitive = (
        class_rows(release.certificates, manifest.posture),
        facts.get("about.sensitive_data", "noAssertion"),
    )
    graph: list[dict[str, Any]] = []

    def add(kind: str, at: str, **fields: Any) -> str:
        given = {name: each for name, each in fields.items() if each is not None}
        graph.append({"type": kind, "spdxId": root + at, "creationInfo": "_:creation", **given})
        return root + at

    def relate(start: str, kind: str, *ends: str) -> None:
        add("Relationship", f"{kind}-{start[len(root) :]}", **{"from": start}, to=list(ends), relationshipType=kind)

    def entries(figures: bool) -> list[dict[str, str]]:
        return [{"type": "DictionaryEntry", "key": f"{label}, class {cls}", "value": text} for cls, row in rows.items()
                for label, text in row.items() if (label in FIGURE_LABELS) is figures]  # fmt: skip

    owner = add("Organization", "organisation", name=stated("about.organisation"))
    tool = add("Tool", "program", name=release.certificates[-1].content["accountant"]["version"])
    licence = none
    if "about.licence" in facts:
        text = facts["about.licence"]
        licence = add("simplelicensing_SimpleLicensingText", "licence", simplelicensing_licenseText=text)
    package = {"releaseTime": facts["created"], "suppliedBy": owner, "software_downloadLocation": root,
               "software_packageVersion": manifest.digest}  # fmt: skip
    model = add(
        "ai_AIPackage", "model", **package, name=facts["name"], software_primaryPurpose="model",
        description=stated("about.description"), comment=facts["badge"], ai_domain=[stated("about.domain")],
        ai_typeOfModel=[stated("about.task")], ai_informationAboutApplication=stated("about.intended_use"),
        ai_informationAboutTraining=f"{facts['mechanism']} {facts['risk']}", ai_limitation=stated("not covered"),
        ai_hyperparameter=entries(False), ai_metric=entries(True), ai_useSensitivePersonalInformation=sensitive,
        ai_safetyRiskAssessment=facts.get("about.safety_risk"),
    )  # fmt: skip
    data = []
    for name, each in manifest.posture.classes.items():
        row = rows.get(name, {})
        parts = (f"{label} {row[label]}" for label in row if label.startswith("ε of") or label == "δ")
        epsilon = ", ".join((*parts, row.get("neighbouring relation", "")))
        size = next((c.classes[name]["population"] for c in release.certificates if name in c.classes), None)
        data.append(add(
            "dataset_DatasetPackage", f"data-{name}", **package, name=name, software_primaryPurpose="data",
            originatedBy=[owner], builtTime=facts["created"], dataset_datasetType=["noAssertion"], dataset_datasetSize=size,
            description=f"Contributions of class {name}, one for each {each.unit}. {stated('about.subjects')}",
            dataset_dataCollectionProcess=stated("about.collection"), dataset_knownBias=[NOT_STATED],
            dataset_confidentialityLevel=None if each.public else facts.get("about.confidentiality"),
            dataset_intendedUse=", ".join(each.purposes) or NOT_STATED, dataset_hasSensitivePersonalInformation=sensitive,
            dataset_anonymizationMethodUsed=[f"The data: not stated. The model: differential privacy, {epsilon}."] if row else None,
            dataset_datasetNoise=f"In the model, not in the data: {facts['mechanism']}" if row else None,
        ))  # fmt: skip
        relate(data[-1], "hasDeclaredLicense", none)
        relate(data[-1], "hasConcludedLicense", none)
    files = [
        add("software_File", f"file-{at}", name=name,
            verifiedUsing=[{"type": "Hash", "algorithm": "sha256", "hashValue": digest}])
        for at, (name, digest) in enumerate(sorted(manifest.subjects.items()), 1)
    ]  # fmt: skip
    relate(model, "trainedOn", *data)
    relate(model, "contains", *files)
    relate(model, "hasDeclaredLicense", licence)
    relate(model, "hasConcludedLicense", none)
    profiles, every = ["core", "software", "ai", "dataset", "simpleLicensing"], [each["spdxId"] for each in graph]
    add("SpdxDocument", "document", rootElement=[model], element=every, profileConformance=profiles)
    creation = {"type": "CreationInfo", "@id": "_:creation", "specVersion": "3.0.1", "created": facts["created"],
                "createdBy": [owner], "createdUsing": [tool]}  # fmt: skip
    return canonical_json({"@context": "https://spdx.org/rdf/3.0.1/spdx-context.jsonld", "@graph": [creation, *graph]})


# ------------------------------------------------------------------------------------------ SACRO-ML

_MOST_PREDICTION_BYTES = 256 << 20
_ON = {"public": "test", "simulated": "test", "training": "train"}  # records of the predictions, and SACRO-ML's name
_ARRAYS = ("X_train", "y_train", "X_test", "y_test", "proba_train", "proba_test")
TRAINING_WARNING = (
    "sacro/ holds predictions on training records. They are private data that ε does not cover: keep them inside, and "
    "never put them into a release"
)


def sacro_target(release: VerifiedRelease, predictions: Mapping[str, Path]) -> dict[str, bytes]:
    """Return target.yaml of SACRO-ML 2.0 (JSON, which is YAML) and the predictions as CSV, by name of file.

    `predictions` are files by kind of records. SACRO-ML ignores the key `differential_privacy`; output checkers read it.
    """
    files: dict[str, bytes] = {}
    for on, path in predictions.items():
        one_of(PlanError, "release.predictions-on", _ON, on=on)
        if f"proba_{_ON[on]}.csv" in files:
            problem = "predictions on public and on simulated records would both be SACRO-ML's test records"
            raise PlanError("release.predictions-twice", problem, "give one of them")
        for kind, rows in _read_predictions(path).items():
            files[f"{kind}_{_ON[on]}.csv"] = "".join(f"{','.join(row)}\n" for row in rows).encode()
    rows_by_class = class_rows(release.certificates, release.manifest.posture)
    target = {
        "dataset_name": release.facts["name"], "dataset_module_path": "", "features": {}, "safemodel": [],
        **{f"{name}_path": f"{name}.csv" if f"{name}.csv" in files else "" for name in _ARRAYS},
        "predictions_on": sorted(predictions) or NOT_STATED,
        "differential_privacy": {"badge": release.facts["badge"], "classes": rows_by_class},
    }  # fmt: skip
    return {"target.yaml": json.dumps(target, indent=2, ensure_ascii=False).encode(), **files}


def _read_predictions(path: Path) -> dict[str, list[list[str]]]:
    """Return probabilities and, if there is a column "label", true classes of a CSV file, by SACRO-ML's names."""
    text = read_small(path, "the predictions", most=_MOST_PREDICTION_BYTES).decode("utf-8-sig", "replace")
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise PlanError("release.predictions-malformed", f"'{path}' is not CSV: {error}", "write it again") from None
    head = rows.pop(0) if rows and not all(map(_NUMBER.fullmatch, rows[0])) else []
    at = head.index("label") if "label" in head else len(max(rows, default=[]))
    found: dict[str, list[list[str]]] = {"proba": [], "y": []}
    for number, row in enumerate(rows, 2 if head else 1):
        values = [float(each) if _NUMBER.fullmatch(each) else math.nan for each in (*row[:at], *row[at + 1 :])]
        shares = len(values) >= 2 and all(0 <= each <= 1 for each in values)
        right = shares and math.isclose(sum(values), 1, abs_tol=0.01)
        if not right or len(row) != len(rows[0]) or not all(map(_LABEL.fullmatch, row[at : at + 1])):
            problem = f"line {number} of '{path}' is not a probability for each of two or more classes"
            remedy = 'give numbers that add up to 1, as many in every line; true classes, if any, as whole numbers under "label"'
            raise PlanError("release.predictions-malformed", problem, remedy)
        found["proba"].append(list(map(repr, values)))
        found["y"] += [[str(int(each))] for each in row[at : at + 1]]
    if not rows:
        raise PlanError("release.predictions-malformed", f"'{path}' has no predictions", "give a line for each record")
    return {kind: lines for kind, lines in found.items() if lines}


_LABEL = re.compile("[0-9]{1,18}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{0,20}\.?[0-9]{1,30}(e-?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)

# ------------------------------------------------------------------------------------------ writing


def write_papers(
    folder: Path, out: Path, *, trust: Trust | None = None, ledger: LedgerReader | None = None,
    predictions: Mapping[str, Path] | None = None,
) -> VerifiedRelease:  # fmt: skip
    """Write the papers of a release into the new folder `out`, which must not be inside a release.

    Predictions on training records are private data: their folder and files are readable by their owner only.
    """
    place, given = out.resolve(), predictions or {}
    if any((above / MANIFEST).exists() for above in (place, *place.parents)):
        problem = f"'{out}' lies in a release, whose files must be those of its manifest"
        raise PlanError("release.papers-in-release", problem, "name a folder outside of any release: -o OUT")
    if out.exists():
        raise PlanError("release.papers-exist", f"'{out}' exists", "name a new folder: -o OUT")
    release = read_release(folder, trust, ledger)
    papers = {"opendp-registry.yaml": opendp_entry(release), "spdx.json": spdx_document(release)}
    papers |= {"edpb-28-2024.md": edpb_page(release)}
    papers |= {f"sacro/{name}": data for name, data in sacro_target(release, given).items()}
    (out / "sacro").mkdir(parents=True, mode=0o700 if "training" in given else 0o755)
    for name, data in papers.items():
        secret = "training" in given and name.startswith("sacro/")
        write_new(out / name, data, "a paper", mode=0o600 if secret else 0o644)
    return release
