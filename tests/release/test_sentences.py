"""Sentences on paper for each kind of class and run: facts that a privacy officer or a contributor would act upon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hospital import loss, net, usual
from pdf_text import read_pdf
from sample_certificate import private_class, public_class, sample_content
from trained_run import Trained

import lamina
from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.withdrawal import withdraw
from lamina.release.certificate import Certificate, certificate_content, certify
from lamina.release.certificate_pdf import decision_pdf
from lamina.release.contributor_statement import signed_size, statement_content
from lamina.release.letter import letter
from lamina.release.model_card import class_rows, model_badge, model_card, model_statements
from lamina.release.posture import Posture, read_posture
from lamina.release.reconciliation import reconcile
from lamina.release.risk_statements import per_hundred, protection, texts
from lamina.release.run_evidence import RunEvidence
from lamina.release.schema import NOT_REACHED
from lamina.report.pages import reconciliation_page

FIGURE = re.compile(r"lost at most|right in|at most ε|ε = \d")
BROKEN = {
    "noise": "seeded", "sampling": "other", "probed": False, "covered": False, "raw_figures": "given to a progress",
    "sound_plan": False,
}  # fmt: skip


def sentences(content: dict[str, Any]) -> str:
    page = letter(content)
    return " ".join([page["summary"], *(part for section in page["sections"] for part in section["text"])])


def evidence_of(ledger: LedgerReader, trained: Trained) -> RunEvidence:
    (run,) = (run for run in RunEvidence.read(ledger, bytes.fromhex(_run(trained))).all_plans)
    return RunEvidence.read(ledger, run)


def _run(trained: Trained) -> str:
    with LedgerReader.read_only(trained.ledger) as ledger:
        return str(certify(trained.folder, ledger).content["run"]["id"])


@pytest.fixture
def papers(trained: Trained) -> Iterator[tuple[Certificate, Posture, RunEvidence, LedgerReader]]:
    with LedgerReader.read_only(trained.ledger) as ledger:
        evidence = evidence_of(ledger, trained)
        yield certify(trained.folder, ledger), read_posture(ledger, [evidence]), evidence, ledger


def badge(classes: dict[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    return protection(classes, private=True, **options)


# ------------------------------------------------------------------------------------ figures that nothing proves


def test_a_seeded_run_proves_no_figure_to_a_contributor(tmp_path: Path) -> None:
    made, where = usual(tmp_path, real=True), tmp_path / "runs" / "ward.ledger.db"
    torch.manual_seed(0)
    model = net()
    plan = made.plan(model, steps=3, epsilon={"clinical": 1.2, "sensitive": 0.6})
    lamina.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.05), loss, made.admit(ledger=where), plan,
        folder=tmp_path / "runs" / "a", progress=False, seed=5, ledger=str(where),
    ).fit()  # fmt: skip
    run = Trained(tmp_path / "runs" / "a", None, name=where.name)  # type: ignore[arg-type]
    with run.open() as ledger:
        leaf = ledger.leaf(run.someone("sensitive"))
        found, content = reconcile(ledger, leaf), statement_content(ledger, leaf.seq, signed_size(ledger))
    for told in (found, content):
        assert told["epsilon"] is None and told["epsilon_charged"] > 0
        assert [(each["epsilon"], each["conditions"]["noise"]) for each in told["runs"]] == [(None, "seeded")]
    assert content["membership"] is content["content"] is None
    for text in (found["statement"], sentences(content)):
        assert not FIGURE.search(text) and "No protection is proven" in text and "seed" in text
    assert "no figure is proven" in reconciliation_page(found)


@pytest.mark.parametrize(("name", "value"), BROKEN.items())
def test_every_broken_condition_is_told_in_words(ward: Trained, name: str, value: object) -> None:
    with ward.open() as ledger:
        content = statement_content(ledger, ward.someone("clinical"), signed_size(ledger))
    assert FIGURE.search(sentences(content))
    content["runs"][0]["conditions"][name] = value
    text = sentences(content)
    assert not FIGURE.search(text) and "No protection is proven" in text
    assert (
        f" {name} is" not in text and "_" not in re.sub(r"lamina ledger.*?(?= [A-Z])", "", text) and "False" not in text
    )


def test_a_broken_run_that_left_a_contribution_out_cost_it_nothing(ward: Trained) -> None:
    """Its bound was exhausted, so it had no part in these steps."""
    with ward.open() as ledger:
        content = statement_content(ledger, ward.someone("clinical"), signed_size(ledger))
    content["runs"][0]["conditions"]["noise"] = "seeded"
    for each in content["events"]:
        each["factor"] = 0.0
    text = sentences(content)
    assert "No protection is proven" not in text and "left out of" in text and "may have been sampled" not in text


# ------------------------------------------------------------------------------------ for whom a model is private


def test_totals_decide_about_a_model_that_continued_another() -> None:
    idle = private_class() | {"epsilon": 0.0, "charges": [], "epsilon_total": 9.0}
    loud = private_class() | {"epsilon": 2.0, "epsilon_total": 99.0}
    never = private_class() | {"epsilon": 0.0, "charges": [], "epsilon_total": 0.0}
    classes = {"idle": idle, "loud": loud, "never": never, "shown": private_class()}
    alone, continued = badge(classes), badge(classes, continued=True, exposed={"shown"})
    assert alone["private_for"] == ["loud", "shown"] and alone["badge"].endswith("not used by this run: idle, never")
    assert continued["private_for"] == ["idle"] and continued["badge"].endswith("not used: never")
    assert {each["class"]: each["reason"] for each in continued["not_protected"]} == {
        "loud": "ε above 20 protects nobody", "shown": "declared public in another run",
    }  # fmt: skip
    content = sample_content({"idle": idle, "loud": loud})
    content["trainer"]["starting_weights"] = {"parent": "5b" * 16, "origin": "run", "sha256": "ab" * 32}
    content["protects"] = badge(content["classes"], continued=True)
    page = read_pdf(decision_pdf(Certificate(content=content))).text.replace(" ", "")
    assert "notused" not in page and page.count("protectsnobody") == 2


def test_a_weak_guarantee_is_not_called_private() -> None:
    classes = {"a": private_class() | {"epsilon": 10.0}, "b": private_class() | {"epsilon": 10.1}}
    found = badge(classes)
    assert (
        found["private_for"] == ["a"] and found["weak"] == ["b"] and "weak protection (ε above 10): b" in found["badge"]
    )
    assert "private for: nobody" in badge({"b": classes["b"]})["badge"]


@pytest.mark.parametrize(
    ("membership", "content", "shown"),
    [(True, True, "a"), (False, True, "a (content only)"), (True, False, "a (membership only)"), (False, False, "a (ε only)")],
)  # fmt: skip
def test_the_badge_names_what_is_bounded(membership: bool, content: bool, shown: str) -> None:
    each = private_class()
    each |= {"membership": each["membership"] if membership else None, "content": each["content"] if content else None}
    assert badge({"a": each})["badge"] == f"private for: {shown}"
    assert badge({"a": each | {"epsilon": None}})["not_protected"][0]["reason"] == "no finite ε is proven"


def test_a_class_that_another_run_declared_public_has_no_total(
    papers: tuple[Certificate, Posture, RunEvidence, LedgerReader],
) -> None:
    certificate, _, evidence, ledger = papers
    plan = evidence.plan
    public = [replace(each, name="clinical") for each in plan.classes if each.public]

    class Opened:
        classes = public
        public_classes = frozenset({"clinical"})

    with_other = replace(evidence, all_plans={**evidence.all_plans, b"o" * 16: (Opened(),)})  # type: ignore[dict-item]
    found = certificate_content(with_other, ledger, verdict="trusted", failed={}, beside=())
    clinical, before = found["classes"]["clinical"], certificate.classes["clinical"]
    assert clinical["epsilon_total"] is clinical["membership_total"] is clinical["content_total"] is None
    assert clinical["epsilon"] == before["epsilon"] and before["epsilon_total"] is not None
    assert any("clinical" in each and "public in another run" in each for each in texts(found, "not covered"))
    assert not any("counting all runs" in each for each in texts(found, "membership", "content") if "clinical" in each)


def test_a_model_of_a_public_and_a_private_run_states_no_figure(
    papers: tuple[Certificate, Posture, RunEvidence, LedgerReader],
) -> None:
    """The class was public first. What the later run proves about it bounds nothing that the model learned before."""
    certificate, _, evidence, ledger = papers
    entries = [
        replace(each, public=True, delta=0.0) if each.name == "clinical" else each for each in evidence.plan.classes
    ]
    first = replace(evidence, plans={digest: _Plan(plan, entries) for digest, plan in evidence.plans.items()})  # type: ignore[misc]
    posture = read_posture(ledger, [first, evidence])
    mixed = posture.classes["clinical"]
    assert mixed.epsilon is mixed.noise_multiplier is mixed.membership is mixed.content is None and not mixed.public
    opened = {**certificate.classes["clinical"], **public_class()}
    exposed = {**certificate.classes["clinical"]} | dict.fromkeys(
        ("epsilon_total", "membership_total", "content_total")
    )
    one, two = (
        replace(certificate, content={**certificate.content, "classes": {**certificate.classes, "clinical": each}})
        for each in (opened, exposed)
    )
    assert "clinical (declared public; declared population: 60)" in model_badge([one, two], posture)
    assert "private for: sensitive" in model_badge([one, two], posture)
    row = class_rows([one, two], posture)["clinical"]
    found = "found at 1 % false accusations, over all runs"
    assert {
        row[name] for name in ("ε of this model", "ε over all runs", f"membership, {found}", f"content, {found}")
    } == {"not proven"}
    said = [each["text"] for each in model_statements([one, two], posture) if each["class"] == "clinical"]
    assert not any("at most" in each for each in said)


class _Plan:
    """A plan with other classes than it was made with."""

    def __init__(self, plan: Any, classes: Any) -> None:
        self._plan, self.classes = plan, classes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


# ------------------------------------------------------------------------------------ withdrawals, reach, purposes


def test_an_expired_contribution_can_still_be_withdrawn(ward: Trained, served: Path) -> None:
    with ward.open() as ledger:
        content = statement_content(ledger, ward.someone("sensitive"), signed_size(ledger))
    content["contribution"]["expires"] = content["as_of"]
    text = sentences(content)
    assert "expired" in text and "nothing left" not in text and "lamina ledger request" in text
    assert "refuses queries" in text and "class sensitive" in text


def test_withdrawals_are_counted_up_to_a_leaf(ward: Trained, served: Path) -> None:
    with ward.open() as ledger:
        (gone,) = withdraw(ledger, str(ward.someone("clinical")), WithdrawalReason.CONSENT)
        found = certify(ward.folder, ledger)
        evidence = evidence_of(ledger, ward)
        posture = read_posture(ledger, [evidence])
        (said,) = (each for each in found.content["statements"] if each["topic"] == "withdrawn")
        last = found.content["ledger"]["size"] - 1
    assert said["leaves"] == [gone.leaf.seq] and "clinical 1" in said["text"] and f"leaf {last} " in said["text"]
    assert said["source"] == "recomputed from the ledger"
    card = model_card("ecg", [found], posture, not_after=None).decode()
    assert f"up to leaf {last} of the ledger: 1." in card
    page = read_pdf(decision_pdf(found)).text.replace(" ", "")
    assert "clinical1.Whatthemodellearnedfromthemstaysinit" in page
    before = (served / "README.md").read_text()
    assert re.search(r"up to leaf \d+ of the ledger: 0\.", before)


def test_reach_and_purposes_are_on_the_page_that_the_officer_signs(
    papers: tuple[Certificate, Posture, RunEvidence, LedgerReader],
) -> None:
    """Class sensitive is restricted to upper layers; classes have different purposes."""
    certificate, posture, _, _ = papers
    assert NOT_REACHED in texts(certificate.content, "reach")
    page = read_pdf(decision_pdf(certificate)).text.replace(" ", "")
    assert NOT_REACHED.replace(" ", "") in page
    card = model_card("ecg", [certificate], posture, not_after=None).decode()
    assert NOT_REACHED in card
    for name, purposes in (("clinical", "care,research"), ("sensitive", "care"), ("open", "care,research,teaching")):
        assert f"Class{name}maybeusedfor:{purposes}." in page


def test_the_unit_is_one_contribution(papers: tuple[Certificate, Posture, RunEvidence, LedgerReader]) -> None:
    """A person with several contributions loses more, so no sentence may speak of all data of a person."""
    said = [each["text"] for each in papers[0].content["statements"] if each["topic"] == "unit"]
    assert len(said) == 2 and all("one contribution" in each and "several contributions" in each for each in said)
    assert not any("all data" in each for each in said)


def test_the_card_of_public_data_claims_no_privacy(
    papers: tuple[Certificate, Posture, RunEvidence, LedgerReader],
) -> None:
    certificate, posture, _, _ = papers
    content = sample_content({"open": public_class()})
    content |= {name: certificate.content[name] for name in ("about", "model", "plan")}
    opened = posture.model_copy(update={"classes": {"open": posture.classes["open"]}, "withdrawn": {"open": 0}})
    card = model_card("ecg", [Certificate(content=content)], opened, not_after=None).decode()
    assert "differential" not in card and "| figure |" not in card and "private for: nobody" in card
    assert "- differential-privacy\n" in model_card("ecg", [certificate], posture, not_after=None).decode()


@pytest.mark.parametrize("private", [True, False])
def test_a_run_on_public_data_alone_states_no_figure_and_no_noise(
    papers: tuple[Certificate, Posture, RunEvidence, LedgerReader], private: bool
) -> None:
    """Nothing of it is clipped or noised, so no sentence may speak of noise, ε or the figures of a class."""
    _, _, evidence, ledger = papers
    plan = evidence.plan
    entries = [each if private else replace(each, public=True, delta=0.0) for each in plan.classes]
    run = replace(evidence, plans={digest: _Plan(plan, entries) for digest in evidence.plans})  # type: ignore[misc]
    found = certificate_content(run, ledger, verdict="trusted", failed={}, beside=())
    said = " ".join(each["text"] for each in found["statements"] if each["topic"] != "purpose")
    about_noise = re.search(r"the noise of the plan|coins|[Tt]he figures|ε of this run|Rounding", said)
    assert bool(about_noise) is private
    assert ("Nothing bounds what others learn" in said) is not private


def test_a_letter_about_an_ended_contribution_leaves_it_no_budget(ward: Trained) -> None:
    """No later training may use a contribution that is withdrawn or expired, whatever its bound allowed."""
    with ward.open() as ledger:
        content = statement_content(ledger, ward.someone("clinical"), signed_size(ledger))
    assert re.search(r"The signed bound allows ε = [0-9.]+; [0-9.]+ remains", sentences(content))
    content["contribution"]["expires"] = content["as_of"]
    assert "remains." not in sentences(content) and "The signed bound allowed ε" in sentences(content)


def test_an_account_without_charges_finds_no_more_than_guessing() -> None:
    """Rates are rounded up to 1e-9 before they are shown with one decimal."""
    assert per_hundred(0.010000001) == "1" and per_hundred(0.01001) == "1.1"
