"""Papers about a release: they fit the formats of others, say what was certified and nothing else, and leave the release alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from asking import asker, refused, succeeded
from refusals import raises_code
from release_forger import forge, record_release, seed_of
from trained_run import Trained

from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.ledger.governance_records import TermsChange
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.writer import Ledger
from lamina.plan.policy import AboutPolicy
from lamina.release.maker import make_release
from lamina.release.papers import read_release, write_papers
from lamina.release.schema import TOPICS
from lamina.release.verifier import verify_release
from lamina.sign.keys import PrivateKey

STATED = {
    "title": "ECG: <b>triage</b> #1",
    "description": 'A "small" classifier \\ for | wards 🫀',
    "organisation": "St. Elsewhere, *cardiology*",
    "task": "classification of twelve-lead ECG",
    "approach": "supervised",
    "domain": "cardiology",
    "sector": "healthcare",
    "region": "EU: no",
    "licence": "CC-BY-4.0",
    "intended_use": "research",
    "safety_risk": "low",
    "sensitive_data": "yes",
    "confidentiality": "amber",
    "subjects": "patients of two wards",
    "legal_basis": "Art. 9(2)(j) GDPR",
    "publication_date": "2026-11-30",
}


def govern(trained: Trained, about: Mapping[str, str]) -> int:
    """Let the owner state texts of [about]; the leaf of the record."""
    keys = (PrivateKey.load(path(trained.ledger), None) for path in (ledger_key_path, governing_key_path))
    own, governing = keys
    with Ledger.open(trained.ledger, own, governing=governing) as ledger:
        seq = ledger.govern(TermsChange(about=tuple(sorted(about.items()))))
        ledger.checkpoint()
    return seq


@pytest.fixture
def about(trained: Trained, key: PrivateKey, tmp_path: Path) -> Path:
    """A release whose owner stated everything that papers use."""
    govern(trained, STATED)
    with trained.open() as ledger:
        make_release(tmp_path / "about", [trained.folder], ledger, key, name="ecg")
    return tmp_path / "about"


@pytest.fixture(params=["stated", "not stated"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue("about" if request.param == "stated" else "release")
    return found


def papers(folder: Path, **options: Any) -> dict[str, bytes]:
    out = folder.parent / f"{folder.name}-papers"
    shutil.rmtree(out, ignore_errors=True)
    write_papers(folder, out, **options)
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------------------------------ what the owner states


def test_a_certificate_quotes_the_owner_with_the_leaf(trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    leaf = govern(trained, STATED)
    with trained.open() as ledger:
        make_release(tmp_path / "out", [trained.folder], ledger, key)
        assert verify_release(tmp_path / "out", trust=Trust(plain=(key.public,)), ledger=ledger).verified
    content = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert content["about"] == {name: {"text": text, "leaf": leaf} for name, text in STATED.items()}
    govern(trained, {"title": "another name, later"})
    with trained.open() as ledger:  # at the checkpoint of the release, it was as the certificate says
        assert verify_release(tmp_path / "out", trust=Trust(plain=(key.public,)), ledger=ledger).verified


def _put(content: dict[str, Any], value: Any) -> None:
    content["about"] = value


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({}, "release.statement-differs"),
        ({"legal_basis": {"text": "consent", "leaf": 0}}, "release.statement-differs"),
        ({"colour": {"text": "red", "leaf": 0}}, "release.certificate-wrong"),
        ({"title": {"text": "a\nb", "leaf": 0}}, "release.certificate-wrong"),
        ({"title": {"text": "a", "leaf": -1}}, "release.certificate-wrong"),
        ({"title": "a"}, "release.certificate-wrong"),
        ([], "release.certificate-wrong"),
    ],
    ids=str,
)
def test_words_that_an_issuer_puts_into_the_owners_mouth(
    about: Path, trained: Trained, key: PrivateKey, said: Any, code: str, tmp_path: Path
) -> None:
    """A forger with the release key and the ledger's key; it shares no code with the certificate."""
    release_key = tmp_path / "release.key"
    key.save(release_key, None)
    forge(about, seed_of(release_key), certificate=lambda content: _put(content, said))
    record_release(trained.ledger, about, seed_of(ledger_key_path(trained.ledger)))
    with LedgerReader.read_only(str(trained.ledger)) as ledger:
        found = verify_release(about, trust=Trust(plain=(key.public,)), ledger=ledger)
        assert code in {each.code for each in found.problems}
        with raises_code("release.papers-not-verified"):
            write_papers(about, tmp_path / "papers", ledger=ledger)
    assert not (tmp_path / "papers").exists()


# ------------------------------------------------------------------------------------------ formats of others

OPENDP = yaml.safe_load((Path(__file__).parent / "opendp" / "deployments-schema.yaml").read_text(encoding="utf-8"))
KEYWORDS = {  # of JSON Schema, as that schema uses it; the others describe
    "type", "properties", "required", "additionalProperties", "enum", "items", "minItems", "format", "description",
    "description_long", "tier",
}  # fmt: skip
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float)
}  # fmt: skip


def check_schema(value: Any, schema: Mapping[str, Any], path: str = "") -> None:
    """Validate a value by a JSON Schema that has no other keywords than KEYWORDS."""
    assert schema.keys() <= KEYWORDS, (path, schema.keys() - KEYWORDS)
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        assert type(value) in [kind for name in names for kind in TYPES[name]], (path, value)
    assert value in schema.get("enum", [value]), (path, value)
    if schema.get("format") == "date":
        assert date.fromisoformat(value).isoformat() == value
    if isinstance(value, dict):
        known = schema.get("properties", {})
        assert set(schema.get("required", ())) <= value.keys(), path
        assert schema.get("additionalProperties", True) or value.keys() <= known.keys(), (
            path,
            value.keys() - known.keys(),
        )
        for name, each in value.items():
            check_schema(each, known.get(name, {}), f"{path}.{name}")
    if isinstance(value, list):
        assert len(value) >= schema.get("minItems", 0), path
        for each in value:
            check_schema(each, schema.get("items", {}), path)


@pytest.mark.parametrize(
    "change",
    [lambda e: e.update(tier=4), lambda e: e.pop("status"), lambda e: e["deployment"].update(more="x"),
     lambda e: e["deployment"]["basic"].update(publication_date="2026"), lambda e: e.update(tier="2"),
     lambda e: e["deployment"]["basic"].update(data_curators=[]), lambda e: e["deployment"]["basic"].update(name=1)],
)  # fmt: skip
def test_the_schema_of_the_registry_refuses(release: Path, change: Any) -> None:
    entry = yaml.safe_load(papers(release)["opendp-registry.yaml"])
    check_schema(entry, OPENDP)
    change(entry)
    with pytest.raises((AssertionError, ValueError)):
        check_schema(entry, OPENDP)


def test_release_type_and_tier_follow_from_the_ledger(trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    def entry(ledger: LedgerReader | None) -> Any:
        found = yaml.safe_load(papers(tmp_path / "first", ledger=ledger)["opendp-registry.yaml"])
        return found["deployment"]["deployment_model"], found["tier"]

    with trained.open() as ledger:
        make_release(tmp_path / "first", [trained.folder], ledger, key)
        assert "release_type" not in entry(None)[0] and entry(None)[1] == 2
        assert entry(ledger)[0]["release_type"] == "One release"
        make_release(tmp_path / "second", [trained.folder], ledger, key, name="another")
        model, tier = entry(ledger)
    assert model["release_type"] == "Many releases" and "records: 1." in model["release_type_details"] and tier == 2


def test_no_release_type_where_the_owner_states_other_releases(
    trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    govern(trained, STATED | {"other_releases": "see the annual report"})
    with trained.open() as ledger:
        make_release(tmp_path / "first", [trained.folder], ledger, key)
        found = yaml.safe_load(papers(tmp_path / "first", ledger=ledger)["opendp-registry.yaml"])
    model = found["deployment"]["deployment_model"]
    assert "release_type" not in model and "see the annual report" in model["release_type_details"]


def test_an_entry_for_the_opendp_registry(folder: Path) -> None:
    text = papers(folder)["opendp-registry.yaml"].decode()
    entry = yaml.safe_load(text)
    check_schema(entry, OPENDP)
    basic, loss = entry["deployment"]["basic"], entry["deployment"]["privacy_loss"]
    slug = "-".join((basic["name"], basic["data_curators"][0], basic["publication_date"][:4]))
    assert text.startswith(f"url_slug: {re.sub('[^a-z0-9]', '-', entry['url_slug'])}\n")
    assert re.sub("[^a-z0-9]", "", entry["url_slug"]) == re.sub("[^a-z0-9]", "", slug.lower())
    released = json.loads((folder / "certificate.json").read_text())
    epsilons = [each["epsilon"] for each in released["classes"].values() if not each["public"]]
    assert loss["privacy_parameters"] == {"epsilon": max(epsilons), "delta": 1e-5}
    if folder.name == "about":
        assert (basic["name"], basic["data_curators"]) == (STATED["title"], [STATED["organisation"]])
        assert STATED["description"] in basic["description"] and basic["data_product_region"] == "EU: no"
        assert basic["publication_date"] == "2026-11-30" and basic["data_product_sector"] == "Healthcare"
    else:
        assert basic["intended_use"] == basic["data_product_region"] == "not stated"
        assert "data_product_sector" not in basic


# SPDX 3.0.1 in our words, as far as we use it: by type what must be there, and what may be there beside it.
PACKAGE = {
    "name",
    "releaseTime",
    "suppliedBy",
    "software_downloadLocation",
    "software_packageVersion",
    "software_primaryPurpose",
}
SPDX: dict[str, tuple[set[str], set[str]]] = {
    "CreationInfo": ({"@id", "specVersion", "created", "createdBy"}, {"createdUsing"}),
    "Organization": ({"name"}, set()),
    "Tool": ({"name"}, set()),
    "simplelicensing_SimpleLicensingText": ({"simplelicensing_licenseText"}, set()),
    "ai_AIPackage": (PACKAGE, {
        "description", "comment", "ai_domain", "ai_typeOfModel", "ai_informationAboutApplication",
        "ai_informationAboutTraining", "ai_limitation", "ai_hyperparameter", "ai_metric",
        "ai_useSensitivePersonalInformation", "ai_safetyRiskAssessment",
    }),
    "dataset_DatasetPackage": (PACKAGE | {"dataset_datasetType", "originatedBy", "builtTime"}, {
        "description", "dataset_datasetSize", "dataset_dataCollectionProcess", "dataset_knownBias", "dataset_intendedUse",
        "dataset_hasSensitivePersonalInformation", "dataset_anonymizationMethodUsed", "dataset_datasetNoise",
        "dataset_confidentialityLevel",
    }),
    "software_File": ({"name", "verifiedUsing"}, set()),
    "Relationship": ({"from", "to", "relationshipType"}, set()),
    "SpdxDocument": ({"rootElement", "element", "profileConformance"}, set()),
}  # fmt: skip
LISTS = {
    "createdBy", "createdUsing", "ai_domain", "ai_typeOfModel", "ai_hyperparameter", "ai_metric", "dataset_datasetType",
    "dataset_knownBias", "dataset_anonymizationMethodUsed", "originatedBy", "verifiedUsing", "to", "rootElement", "element",
    "profileConformance",
}  # fmt: skip
VALUES = {
    "relationshipType": {"trainedOn", "contains", "hasDeclaredLicense", "hasConcludedLicense"},
    "ai_useSensitivePersonalInformation": {"yes", "no", "noAssertion"},
    "dataset_hasSensitivePersonalInformation": {"yes", "no", "noAssertion"},
    "ai_safetyRiskAssessment": {"serious", "high", "medium", "low"},
    "dataset_confidentialityLevel": {"clear", "green", "amber", "red"},
    "software_primaryPurpose": {"model", "data"},
}


def test_an_spdx_document(folder: Path) -> None:
    document = json.loads(papers(folder)["spdx.json"])
    assert document.keys() == {"@context", "@graph"}
    assert document["@context"] == "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
    graph = document["@graph"]
    ids = [each.get("spdxId", each.get("@id")) for each in graph]
    assert len(set(ids)) == len(ids)
    for each in graph:
        must, may = SPDX[each["type"]]
        common = {"type"} if each["type"] == "CreationInfo" else {"type", "spdxId", "creationInfo"}
        assert must | common <= each.keys() <= must | may | common, each
        for name, value in each.items():
            assert isinstance(value, list) == (name in LISTS), name
            assert name not in VALUES or value in VALUES[name]
        assert {"name", "to"} & each.keys() != {"name"} or each["name"]
    links = [end for each in graph if each["type"] == "Relationship" for end in (each["from"], *each["to"])]
    links += [end for each in graph for name in ("createdBy", "createdUsing", "originatedBy", "rootElement", "element")
              for end in each.get(name, ())]  # fmt: skip
    assert set(links) <= {*ids, "expandedlicensing_NoAssertionLicense"}
    for each in graph:  # the AI profile asks for exactly one licence of each kind
        for kind in ("hasDeclaredLicense", "hasConcludedLicense") if each["type"] == "ai_AIPackage" else ():
            assert sum((r.get("from"), r.get("relationshipType")) == (each["spdxId"], kind) for r in graph) == 1
    (model,) = (each for each in graph if each["type"] == "ai_AIPackage")
    metrics = {each["key"]: each["value"] for each in model["ai_metric"]}
    assert {
        "ε of this run, class clinical",
        "membership, found at 1 % false accusations, class sensitive",
    } <= metrics.keys()
    assert "ai_standardCompliance" not in model  # nobody claims any
    levels = {
        each["name"]: each.get("dataset_confidentialityLevel")
        for each in graph
        if each["type"] == "dataset_DatasetPackage"
    }
    stated = "amber" if folder.name == "about" else None
    assert levels == {"clinical": stated, "sensitive": stated, "open": None}  # what is declared public has no level
    hashes = {each["name"]: each["verifiedUsing"][0]["hashValue"] for each in graph if each["type"] == "software_File"}
    assert hashes == dict(read_release(folder).manifest.subjects)


# CycloneDX 1.7 in our words, as far as we use it: the keys that each part may have.
CYCLONEDX = {
    "": {
        "bomFormat",
        "specVersion",
        "serialNumber",
        "version",
        "metadata",
        "components",
        "declarations",
        "formulation",
    },
    "model": {"type", "bom-ref", "name", "hashes", "modelCard"},
    "card": {"modelParameters", "quantitativeAnalysis", "considerations"},
    "parameters": {"approach", "task", "datasets"},
    "metric": {"type", "value", "slice", "confidenceInterval"},
    "considerations": {"useCases", "technicalLimitations", "ethicalConsiderations"},
    "file": {"type", "bom-ref", "name", "hashes"},
    "data": {"type", "bom-ref", "name", "description", "data"},
    "dataset": {"type", "name", "governance"},
    "claim": {"bom-ref", "target", "predicate", "reasoning", "evidence"},
    "evidence": {"bom-ref", "propertyName", "description", "data"},
    "formula": {"bom-ref", "components", "workflows"},
    "program": {"type", "bom-ref", "name", "version"},
    "workflow": {"bom-ref", "uid", "name", "taskTypes", "resourceReferences", "inputs", "outputs"},
}


def test_the_inventory_of_a_release(folder: Path) -> None:
    bom = json.loads((folder / "bom.cdx.json").read_text())
    model, declared = bom["metadata"]["component"], bom["declarations"]
    card = model["modelCard"]
    kinds = {kind: [each for each in bom["components"] if each["type"] == kind] for kind in ("file", "data")}
    parts: dict[str, list[Mapping[str, Any]]] = {
        "": [bom], "model": [model], "card": [card], "parameters": [card["modelParameters"]], **kinds,
        "metric": card["quantitativeAnalysis"]["performanceMetrics"], "considerations": [card["considerations"]],
        "dataset": [one for each in kinds["data"] for one in each["data"]],
        "claim": declared["claims"], "evidence": declared["evidence"], "formula": bom["formulation"],
        "program": bom["formulation"][0]["components"], "workflow": bom["formulation"][0]["workflows"],
    }  # fmt: skip
    assert sum(map(len, kinds.values())) == len(bom["components"])
    for name, found in parts.items():
        assert found and all(each.keys() <= CYCLONEDX[name] for each in found), name
    refs = [each["bom-ref"] for each in (model, *bom["components"], *declared["claims"], *declared["evidence"])]
    refs += [each["bom-ref"] for name in ("formula", "program", "workflow") for each in parts[name]]
    assert len(set(refs)) == len(refs)
    links = [end for each in declared["claims"] for end in (each["target"], *each["evidence"])]
    assert {*links, *(each["ref"] for each in card["modelParameters"]["datasets"])} <= set(refs)
    assert all(type(each["value"]) is str for each in parts["metric"])
    (run,) = parts["workflow"]
    used = [each["resource"]["ref"] for each in (*run["inputs"], *run["outputs"]) if "resource" in each]
    assert {*used, *(each["ref"] for each in run["resourceReferences"])} <= set(refs) and "model" in used
    assert all(len(each) == 1 for each in run["inputs"])  # resource or parameters
    content = json.loads((folder / "certificate.json").read_text())
    assert [each["predicate"] for each in declared["claims"]] == [each["text"] for each in content["statements"]]
    settings = {each["name"]: each["value"] for each in run["inputs"][-1]["parameters"]}
    assert (run["uid"], settings["plan (SHA-256)"]) == (content["run"]["id"], content["plan"]["sha256"])
    assert {each["name"]: each["version"] for each in parts["program"]} == {
        name: content["program"][name] for name in ("lamina", "torch", "python")
    }
    stated = folder.name == "about"
    assert card["modelParameters"]["task"] == (STATED["task"] if stated else "not stated")
    assert ("approach" in card["modelParameters"]) is stated  # an enumeration that has no value for "not stated"
    assert card["considerations"]["useCases"] == ["research" if stated else "not stated"]


# ------------------------------------------------------------------------------------------ model card, EDPB


def test_the_model_card_says_what_the_curve_says(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    content = json.loads((folder / "certificate.json").read_text())
    assert (
        f"**{content['protects']['badge']}**" in card
        and "not protected: open (declared public; declared population: 10)" in card
    )
    plain = card.replace("\\", "")
    for each in content["statements"]:
        assert each["text"] in plain, each
    for name in ("neighbouring relation | add/remove", "unit | contribution", "δ | 1e-05", "found at 1 % false accusations",
                 "right answers from a coin toss", "ε without amplification", "20 steps"):  # fmt: skip
        assert name in card, name
    assert not re.search("factor of|except with probability|odds", card)
    assert ("St. Elsewhere, \\*cardiology\\*" in card) == (folder.name == "about")


def test_documentation_for_the_edpb(folder: Path) -> None:
    page = papers(folder)["edpb-28-2024.md"].decode()
    content = json.loads((folder / "certificate.json").read_text())
    for each in content["statements"]:
        if each["topic"] in ("membership", "content", "not covered", "voids"):
            assert each["text"] in page.replace("\\", ""), each
    (leaf,) = set(re.findall(r"withdrawn up to leaf ([0-9]+)", page + (folder / "README.md").read_text()))
    assert int(leaf) == content["ledger"]["size"] - 1
    assert page.count("not stated") >= 5 and "Membership inference: not stated" in page  # nobody has tested one
    assert "does not claim" in page and not re.search("complies|compliant|is anonymous[.]", page)
    assert not re.search(r"\{[a-z_. ]+\}|\[FIGURES\]", page)
    if folder.name == "about":
        assert "ECG: \\<b\\>triage\\</b\\> \\#1" in page and "Art. 9(2)(j) GDPR" in page


def test_templates_name_facts_that_exist(about: Path, trained: Trained) -> None:
    """A fact under a wrong name would be printed as not stated."""
    with trained.open() as ledger:
        facts = read_release(about, ledger=ledger).facts
    known = {*facts, *TOPICS, *(f"about.{name}" for name in AboutPolicy.model_fields)}
    known |= {f"attack.{name}" for name in ("membership", "attribute", "inversion", "reconstruction", "regurgitation")}
    known.add("trained")  # of the model card
    for file in resources.files("lamina.release").joinpath("templates").iterdir():
        if file.name.endswith((".md", ".yaml")):
            named = set(re.findall(r"\{\??([a-z_. ]+)\}", file.read_text(encoding="utf-8")))
            assert named and named <= known, named - known


def test_a_model_of_several_runs_claims_no_figure_of_one_run(trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    """Its parts are certified one by one; the figures over all runs of the ledger bound the whole."""
    from lamina.ledger.verify.verifier import verify
    from lamina.release.certificate import certify
    from lamina.release.model_card import class_rows, model_badge, model_statements
    from lamina.release.posture import read_posture
    from lamina.release.run_evidence import RunEvidence

    with trained.open() as ledger:
        one = certify(trained.folder, ledger, verification=verify(ledger.store))
        posture = read_posture(ledger, [RunEvidence.read(ledger, bytes.fromhex(one.content["run"]["id"]), None)])
    stated = model_statements([one, one], posture)
    curve = [each for each in stated if each["topic"] in ("membership", "content")]
    assert len(curve) == 4 and all("counting all runs of the ledger" in each["text"] for each in curve)
    assert not [each for each in stated if each["topic"] == "budget" and each["class"] is not None]
    row = class_rows([one, one], posture)["clinical"]
    assert "ε of this model" in row and "ε of this run" not in row
    unused = {"charges": [], "epsilon": 0.0, "membership": None}
    later = replace(one, content={**one.content, "classes": {
        name: dict(each) | ({} if each["public"] else unused) for name, each in one.classes.items()}})  # fmt: skip
    assert model_badge([one, later], posture) == one.content["protects"]["badge"]
    assert row["ε, replace-one"] == row["ρ"] == "not proven" and row["ε over all runs"] != "not proven"
    assert row["noise multiplier σ, sampling rate q, steps"].count("20 steps") == 2


HOSTILE = (
    '%FIGURES% [FIGURES] {name} </script> {?sector} "]: - &a *a #{x} $(id) \\' + "`" * 3 + " 1. | --- | ![](http://x)"
)


def test_no_text_of_the_owner_becomes_markup(trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    texts = {name: HOSTILE for name in STATED if name in ("title", "description", "organisation", "subjects", "rights")}
    govern(trained, STATED | texts | {"rights": HOSTILE})
    with trained.open() as ledger:
        make_release(tmp_path / "hostile", [trained.folder], ledger, key, name="ecg")
    found = papers(tmp_path / "hostile")
    page = found["edpb-28-2024.md"].decode()
    assert page.count("\n## ") == 6 and page.count("| figure |") == 1 and "\n| ε of this run |" in page
    assert "[FIGURES]" not in page and not re.search(r"(?<!\\)[`<>]", page)
    basic = yaml.safe_load(found["opendp-registry.yaml"])["deployment"]["basic"]
    assert basic["name"] == HOSTILE and basic["data_curators"] == [HOSTILE]
    assert json.loads(found["spdx.json"])["@graph"][1]["name"] == HOSTILE


# ------------------------------------------------------------------------------------------ SACRO-ML


def predictions(path: Path, text: str = "label,sick,well\n0,0.25,0.75\n1,.5,5e-1\n") -> Path:
    path.write_text(text)
    return path


def test_a_target_for_sacro_ml(release: Path, tmp_path: Path) -> None:
    given = predictions(tmp_path / "p.csv")
    found = papers(release, predictions={"simulated": given})
    target = yaml.safe_load(found["sacro/target.yaml"])
    assert (target["proba_test_path"], target["y_test_path"], target["proba_train_path"]) == (
        "proba_test.csv",
        "y_test.csv",
        "",
    )
    assert target["features"] == {} and target["safemodel"] == [] and target["dataset_module_path"] == ""
    assert found["sacro/proba_test.csv"] == b"0.25,0.75\n0.5,0.5\n" and found["sacro/y_test.csv"] == b"0\n1\n"
    assert target["differential_privacy"]["classes"]["clinical"]["δ"] == "1e-05"
    assert set(papers(release)) == {"opendp-registry.yaml", "spdx.json", "edpb-28-2024.md", "sacro/target.yaml"}


def test_predictions_on_training_records_stay_inside(release: Path, tmp_path: Path) -> None:
    given = predictions(tmp_path / "p.csv", "0.25,0.75\n")
    write_papers(release, tmp_path / "out", predictions={"training": given})
    assert (tmp_path / "out" / "sacro").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out" / "sacro").iterdir()} == {0o600}
    assert verify_release(release).verified and not list(release.rglob("*train*"))
    (release / "inside").mkdir()
    for out in (release, release / "papers", release / "inside", release / "inside" / ".." / "x"):
        with raises_code("release.papers-in-release"):
            write_papers(release, out, predictions={"training": given})
    (tmp_path / "link").symlink_to(release)
    with raises_code("release.papers-in-release"):
        write_papers(release, tmp_path / "link" / "papers", predictions={"training": given})


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n", "0.5,0.4\n", "1.0\n", "0.5,0.5\n0.2,0.3,0.5\n", "0.5,nan\n", "1.5,-0.5\n", "label,a,b\nx,0.5,0.5\n",
     "label,a,b\n-1,0.5,0.5\n", f"label,a,b\n{'1' * 5000},0.5,0.5\n", f"{'1' * 140_000},0.5\n",
     "label,a,b\n٣,0.5,0.5\n", "0.5,=1+1\n", "0.5,0.5\nsick,well\n", "label,a,b\n1\n", "\x00,1\n"],
)  # fmt: skip
def test_predictions_that_are_none(release: Path, tmp_path: Path, text: str) -> None:
    given = predictions(tmp_path / "p.csv", text)
    with raises_code("release.predictions-malformed"):
        write_papers(release, tmp_path / "out", predictions={"public": given})
    assert not (tmp_path / "out").exists()


def test_predictions_of_a_kind(release: Path, tmp_path: Path) -> None:
    given = predictions(tmp_path / "p.csv")
    with raises_code("release.predictions-on"):
        write_papers(release, tmp_path / "out", predictions={"private": given})
    with raises_code("release.predictions-twice"):
        write_papers(release, tmp_path / "out", predictions={"public": given, "simulated": given})
    both = papers(release, predictions={"training": given, "simulated": given})
    assert {"sacro/proba_train.csv", "sacro/proba_test.csv"} <= both.keys()


# ------------------------------------------------------------------------------------------ the whole


def test_the_same_release_gives_the_same_bytes(about: Path, trained: Trained, tmp_path: Path) -> None:
    given = {"public": predictions(tmp_path / "p.csv")}
    before = {path: path.read_bytes() for path in about.iterdir()}
    assert papers(about, predictions=given) == papers(about, predictions=given)
    assert before == {path: path.read_bytes() for path in about.iterdir()}
    with raises_code("release.papers-exist"):
        write_papers(about, tmp_path / "about-papers")
    (about / "README.md").write_text("changed")
    with raises_code("release.papers-not-verified"):
        write_papers(about, tmp_path / "again")


def test_the_command(about: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lamina = asker(capsys)
    given, out = str(predictions(tmp_path / "p.csv")), tmp_path / "out"
    words = ("release", "papers", str(about), "-o", str(out), "--predictions", given)
    assert lamina(*words)[0] == 2 and not out.exists()  # on which records?
    found = json.loads(succeeded(lamina(*words, "--on", "training", "--json")))
    assert "sacro/proba_train.csv" in found["files"] and "private data" in found["warnings"][0]
    assert found["not_stated"] == sorted(AboutPolicy.model_fields.keys() - STATED.keys())
    assert "not trusted" in found["verdict"]
    refused(lamina(*words, "--on", "training"), "release.papers-exist")
    printed = succeeded(lamina("release", "papers", str(about)))
    assert "about.security" in printed and (tmp_path / "about-papers" / "spdx.json").exists()
