"""The papers about a certificate: pages, sizes of text, what they say about each kind of class, the same bytes each time."""

from __future__ import annotations

from typing import Any

import pytest
from pdf_text import read_pdf
from sample_certificate import BY_TRAINER, private_class, public_class, risk, sample_content

from lamina.release.certificate import Certificate
from lamina.release.certificate_pdf import certificate_pdf, decision_pdf
from lamina.release.countersignature import Countersignature, countersign
from lamina.sign.keys import PrivateKey

LONG = "contributions-of-people-on-the-cardiology-ward-of-a-hospital-{}"
A4_WIDTH = 595.3


def papers_of(content: dict[str, Any], officer: Countersignature | None = None) -> dict[str, bytes]:
    certificate = Certificate(content=content)
    signed = certificate_pdf(certificate, "ab" * 32, officer)
    return {"certificate": signed, "decision": decision_pdf(certificate, officer)}


def many(number: int, name: str = LONG) -> dict[str, dict[str, Any]]:
    return {name.format(at): private_class(0.3 + 0.2 * at, unit="patient with all recordings") for at in range(number)}


def crowded() -> dict[str, Any]:
    """Six classes with long names, and more statements than a page holds."""
    content = sample_content(many(6))
    long = {"class": None, "leaves": list(range(40)), "digest": "ab" * 32, "text": "A long statement. " * 12}
    sources = ("recomputed from the ledger", "stated by the trainer", "stated by the owner", "measured")
    content["statements"] += [{"topic": "condition", "source": source, **long} for source in sources * 8]
    content["statements"] += [{"topic": "voids", "source": sources[0], **long}] * 9
    content["utility"] *= 20
    return content


CONTENTS = {
    "one class": sample_content(many(1)),
    "six classes": sample_content(many(6)),
    "nine classes": sample_content(many(7) | {"open": public_class(), "free": public_class()}),
    "public only": sample_content({"open": public_class()}),
    "zero-out": sample_content({"ward": private_class(zero_out=True)}),
    "not private": sample_content(private=False),
    "nothing proven": sample_content(
        {"ward": private_class() | {"content": None, "content_total": None, "epsilon": None}}
    ),
    "crowded": crowded(),
    "bare": sample_content() | {"statements": [], "utility": [], "layers": []},
}


def plain(text: str) -> str:
    return text.replace(" ", "").replace("\u200b", "")


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_the_decision_is_one_page_of_readable_text(content: dict[str, Any]) -> None:
    found = read_pdf(decision_pdf(Certificate(content=content)))
    assert found.pages == 1 and found.least_size >= 7 and found.lowest > 20 and found.rightmost < A4_WIDTH - 20
    assert (plain("lamina release verify RELEASE") in plain(found.text)) is content["private"]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_the_certificate_has_readable_text(content: dict[str, Any]) -> None:
    found = read_pdf(certificate_pdf(Certificate(content=content)))
    assert found.least_size >= 7 and found.lowest > 20 and found.rightmost < A4_WIDTH - 20
    assert plain(content["ledger"]["root"]) in plain(found.text)


def words(content: dict[str, Any]) -> str:
    papers = papers_of(content)
    return plain("".join(read_pdf(papers[kind]).text for kind in ("decision", "certificate")))


def test_each_says_for_whom_it_is_private() -> None:
    assert plain(
        "private for: sensitive; not protected: volunteer (declared public; declared population: 60)"
    ) in words(CONTENTS["bare"])
    assert plain("nothing in it is protected") in words(CONTENTS["public only"])
    told = words(CONTENTS["not private"])
    assert "NOTPRIVATE" in told and plain("the noise came from a seed that somebody chose") in told
    assert "5.4%" not in told and plain("nothing to countersign") in told  # no figure of a guarantee that does not hold
    assert plain("Membership is not protected, or no bound is proven, for: ward") in words(CONTENTS["zero-out"])
    assert plain("Nothing is proven for: ward") in words(CONTENTS["nothing proven"])
    assert "notstated" in words(CONTENTS["bare"])


def test_a_run_that_continued_other_weights_shows_the_figures_over_all_runs() -> None:
    """Its model learned in the other run too, so the figures of the last run alone do not bound it."""
    content = sample_content()
    said = next(each for each in content["statements"] if each["topic"] == "membership")
    content["statements"].append(said | {"text": "Counting all runs, at most 6.2."})
    for start, shown in (
        (None, said["text"]),
        ({"parent": "5b" * 16, "origin": "run"}, "Counting all runs, at most 6.2."),
    ):
        content["trainer"]["starting_weights"] = start
        assert plain(shown) in plain(read_pdf(decision_pdf(Certificate(content=content))).text)
    content["classes"]["sensitive"]["membership_total"] = None
    found = plain(read_pdf(decision_pdf(Certificate(content=content))).text)
    assert plain("no bound is proven, for: sensitive") in found and plain("Counting all runs") not in found


def test_the_six_classes_with_the_largest_risk_are_on_the_decision() -> None:
    content = sample_content(many(7, "ward-{}") | {"open": public_class(), "free": public_class()})
    found = plain(read_pdf(decision_pdf(Certificate(content=content))).text)
    table = found[found.index("protected") : found.index("more,seecertificate")]
    assert [f"ward-{at}" in table for at in range(7)] == [False, *[True] * 6] and "and3" in table


def test_a_badge_that_is_too_long_counts_the_classes_instead_of_ending_before_the_unprotected_ones() -> None:
    classes = many(7) | {LONG.format("open"): public_class()}
    content = sample_content(classes)
    content["protects"]["not_protected"] = [
        {"class": LONG.format("open"), "population": 60, "unit": "patient", "reason": "x"}
    ]
    assert len(content["protects"]["badge"]) > 300
    found = plain(read_pdf(decision_pdf(Certificate(content=content))).text)
    assert plain("private for: 7 classes; NOT protected: 1 class") in found
    assert plain(content["protects"]["badge"]) in plain(read_pdf(certificate_pdf(Certificate(content=content))).text)


def test_purposes_are_whole_sentences() -> None:
    content = sample_content(many(9, "ward-{}"))
    for name in content["classes"]:
        text = f"Class {name} may be used for: care of patients, research at the hospital, teaching, quality control."
        content["statements"].append(
            {"topic": "purpose", "class": name, "text": text, "source": BY_TRAINER, "leaves": None, "digest": None}
        )
    found = plain(read_pdf(decision_pdf(Certificate(content=content))).text)
    assert found.count("qualitycontrol.") == 4 and plain("Purposes of 5 more classes: see certificate.") in found


def test_figures_are_rounded_up() -> None:
    found = private_class(0.71) | {"epsilon": 2.0000001, "epsilon_total": 1234.5671, "rho": 0.0, "delta": 2.5e-7}
    found["membership"]["tpr"]["0.01"] = 0.05301
    text = words(sample_content({"ward": found}))
    assert {"2.001", "1,234.568", "0.000", "2.5e-07", "5.4%"} <= {
        each for each in ("2.001", "1,234.568", "0.000", "2.5e-07", "5.4%") if each in text
    }


def test_the_curve_is_drawn_from_the_points_in_the_certificate() -> None:
    def page(**changed: Any) -> bytes:
        content = sample_content()
        content["classes"]["sensitive"]["membership"] |= changed
        return decision_pdf(Certificate(content=content))

    points = sample_content()["classes"]["sensitive"]["membership"]["curve"]
    assert page() == page(mu=None) == page(mu=3.0)  # one number that bounds the curve is not the curve
    assert page() != page(curve=points | {"0.35": points["0.35"] + 0.05})


def test_signed_bounds_and_other_deltas_are_on_the_certificate() -> None:
    content = sample_content()
    (bound,) = content["classes"]["sensitive"]["bounds"]
    bound |= {"contributions": 4321, "epochs": 77, "epochs_left_out": 11, "epochs_scaled": 13, "epsilon": 1.23401}
    text = plain(read_pdf(certificate_pdf(Certificate(content=content))).text)
    row = text[text.index("Signedbounds") : text.index("Whichclass")]
    assert plain("4,321 77 11 13 0.5 1.235 3.400 4.000") in row
    assert plain("2.100 2.600 3.000 3.400 not proven") in text
    assert "2.2%" not in row
    bound |= {"membership": risk(0.3), "content": risk(0.6, content=True)}
    page = certificate_pdf(Certificate(content=content))
    assert plain("4.000 2.2 % 4.3 %") in plain(read_pdf(page).text)
    bound["content"]["curve"]["0.35"] += 0.05  # the curve is drawn from its points
    assert page != certificate_pdf(Certificate(content=content))
    content["classes"]["sensitive"]["bounds"] = [bound] * 60
    assert "and20more" in plain(read_pdf(certificate_pdf(Certificate(content=content))).text)


def test_adjacent_equal_layers_are_one_row() -> None:
    text = words(sample_content())
    assert plain("(6 layers)") in text and plain("(2 layers)") in text and "blocks.3" not in text


def test_the_countersignature_is_on_both() -> None:
    key = PrivateKey.generate()
    texts = {"name": "A. Lovelace", "role": "privacy officer", "recipient": "example.org"}
    officer = Countersignature.read(
        countersign(b"certificate", key, texts, now=1_800_000_000, valid_until=1_900_000_000)
    )
    for page in papers_of(sample_content(), officer).values():
        text = plain(read_pdf(page).text)
        assert "A.Lovelace" in text and "2030-03-17" in text and key.public.name[:16] in text and "notstated" in text


def test_the_same_content_gives_the_same_bytes() -> None:
    one, two = (papers_of(sample_content()) for _ in range(2))
    assert one == two and one["decision"].startswith(b"%PDF-")


def test_text_of_the_certificate_stays_text() -> None:
    evil = '#panic("no") $ * _ \\ <label> @ref'
    content = sample_content()
    content["statements"][0]["text"] = evil
    assert plain(evil) in words(content)
