"""The certificate of a run: figures by a second accountant, conditions, signature, the same bytes each time."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import cbor2
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from refusals import raises_code
from scipy.stats import norm
from torch import nn
from trained_run import Trained

import lamina
from lamina.ledger.reader import LedgerReader
from lamina.release.certificate import Certificate, certify
from lamina.release.certificate_pdf import certificate_pdf
from lamina.release.posture import read_posture
from lamina.release.risk_statements import texts
from lamina.release.run_evidence import RunEvidence
from lamina.sign.keys import PrivateKey


def certificate(trained: Trained) -> Certificate:
    with LedgerReader.read_only(trained.ledger) as ledger:
        return certify(trained.folder, ledger)


def edit_metrics(trained: Trained, **changes: Any) -> None:
    path = trained.folder / "metrics.json"
    facts = json.loads(path.read_text())
    for name, value in changes.items():
        facts[name] = facts[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(facts))


def test_the_figures_agree_with_a_second_accountant(trained: Trained) -> None:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    found = certificate(trained)
    assert found.private and not found.reasons
    for name, each in found.classes.items():
        if each["public"]:
            assert each["epsilon"] is each["rho"] is each["delta"] is None  # it has no protection
            continue
        sigma, q, steps = each["noise_multiplier"], each["sampling_rate"], 20
        mechanism = PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=sigma)
        peer = PRVAccountant(
            prvs=mechanism, eps_error=1e-3, delta_error=1e-10, max_self_compositions=steps
        ).compute_epsilon(delta=1e-5, num_self_compositions=[steps])
        assert peer[0] - 1e-9 <= each["epsilon"] <= peer[2] + 2e-2, name
        assert each["epsilon"] < each["epsilon_replace_one"] < each["epsilon_unamplified"] * 2
        assert each["rho"] == pytest.approx(steps / (2 * sigma**2), rel=1e-6)
        mu, epsilon = math.sqrt(steps) / sigma, each["epsilon_unamplified"]
        delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        assert delta == pytest.approx(1e-5, rel=1e-3)
        assert each["epsilon_total"] == each["epsilon"] == pytest.approx(trained.outcome.epsilon[name], abs=2e-9)


def test_it_names_what_each_class_reached(trained: Trained) -> None:
    layers = {each["name"]: each for each in certificate(trained).content["layers"]}
    assert layers["0"]["classes"] == ["clinical", "open"] and layers["4"]["classes"] == [
        "clinical",
        "sensitive",
        "open",
    ]
    assert all(each["noise_std"] > 0 for each in layers.values())


def test_the_same_run_and_ledger_give_the_same_bytes(trained: Trained, key: PrivateKey) -> None:
    one, two = certificate(trained), certificate(trained)
    assert one.json() == two.json() and one.signed(key) == two.signed(key)
    assert certificate_pdf(one, signer=key.public.name) == certificate_pdf(two, signer=key.public.name)
    assert certificate_pdf(one).startswith(b"%PDF-")


def test_the_outcome_has_it(trained: Trained) -> None:
    assert trained.outcome.certificate.private


def test_a_stranger_verifies_the_signature(trained: Trained, key: PrivateKey) -> None:
    """With cbor2 and cryptography, by RFC 9052 §4.4, and none of our code."""
    found = certificate(trained)
    tag = cbor2.loads(found.signed(key))
    protected, unprotected, payload, signature = tag.value
    assert (tag.tag, unprotected, payload) == (18, {}, found.json())
    message = cbor2.dumps(["Signature1", protected, b"", payload])
    Ed25519PublicKey.from_public_bytes(key.public.x).verify(signature, message)
    header = cbor2.loads(protected)
    assert header[1] == -8 and header[4] == key.public.id and header[16] == "application/lamina-certificate+json"


def test_a_changed_certificate_is_not_read(trained: Trained, key: PrivateKey) -> None:
    signed = certificate(trained).signed(key)
    assert Certificate.read(signed, (key.public,)).private
    with raises_code("release.certificate-not-by-key"):
        Certificate.read(signed, (PrivateKey.generate().public,))
    for at in range(0, len(signed), 97):
        changed = bytearray(signed)
        changed[at] ^= 1
        with pytest.raises(Exception, match=r"\[(release|cbor)\."):
            Certificate.read(bytes(changed), (key.public,))


NOT_PRIVATE: list[dict[str, Any]] = [
    {"conditions": {"noise": "seeded"}},
    {"conditions": {"probed": False}},
    {"conditions": {"covered": False}},
    {"conditions": {"sampling": "shuffled"}},
    {"conditions": {"raw_figures": "losses.csv"}},
    {"conditions": {"noise": None}},
    {"files": {"model.safetensors": "0" * 64}},
]


@pytest.mark.parametrize("change", NOT_PRIVATE, ids=str)
def test_a_run_that_was_not_private_gets_no_signature(
    trained: Trained, key: PrivateKey, change: dict[str, Any]
) -> None:
    edit_metrics(trained, **change)
    found = certificate(trained)
    assert not found.private and len(found.reasons) == 1
    assert json.loads(found.json())["private"] is False
    with raises_code("release.not-private"):
        found.signed(key)


def test_what_metrics_json_leaves_out_is_in_the_ledger(trained: Trained) -> None:
    """Killed before its last figures were written, a run has recorded its end already."""
    path, before = trained.folder / "metrics.json", certificate(trained)
    facts = json.loads(path.read_text())
    del facts["conditions"], facts["files"]
    path.write_text(json.dumps(facts))
    assert certificate(trained).json() == before.json()


def test_swapped_weights_and_a_damaged_ledger_are_not_private(trained: Trained) -> None:
    weights = trained.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert any("differs from what the run recorded" in reason for reason in certificate(trained).reasons)


def test_what_is_no_run_is_refused(trained: Trained) -> None:
    with LedgerReader.read_only(trained.ledger) as ledger:
        with raises_code("release.not-a-run"):
            certify(trained.folder / "nowhere", ledger)
        edit_metrics(trained, run="00" * 16)
        with raises_code("release.run-not-in-ledger"):
            certify(trained.folder, ledger)
        (trained.folder / "metrics.json").write_text('{"run": 1, "run": 2}')
        with raises_code("release.not-json"):
            certify(trained.folder, ledger)


@pytest.mark.parametrize(("population", "adjacency"), [(None, "zero-out"), (80, "add/remove")])
def test_what_epsilon_compares_is_what_the_run_claims(tmp_path: Path, population: int | None, adjacency: str) -> None:
    """Where nobody declared a population, the number of contributions is public, and ε is about content."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(60, 4)
    engine, corpus, plan = lamina.make_private(
        model, (x, (x.sum(1) > 0).long()), epsilon=2.0, batch=16, steps=4, population=population
    )
    trainer = lamina.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(reduction="none"), corpus, plan,
        folder=tmp_path / "runs" / "a", progress=False, engine=engine,
    )  # fmt: skip
    found = trainer.fit().certificate
    assert all(each["adjacency"].startswith(adjacency) for each in found.classes.values())
    assert any("number of contributions is public" in each for each in texts(found.content, "not covered")) == (
        population is None
    )


def test_a_delta_above_one_over_the_population_is_no_promise(trained: Trained) -> None:
    with raises_code("train.delta-out-of-range"):
        lamina.make_private(
            nn.Linear(4, 2), (torch.zeros(60, 4), torch.zeros(60).long()), epsilon=1.0, delta=0.5, batch=8, steps=1
        )


def test_the_best_loss_is_the_smallest() -> None:
    with raises_code("train.best-direction"):
        lamina.Evaluation(function=lambda model: {"nll": 1.0}, on="public", best="nll")
    assert lamina.Evaluation(function=lambda model: {"nll": 1.0}, on="public", best="-nll").score({"nll": 2.0}) == -2.0


def test_a_class_that_is_charged_only_by_its_bounds_has_no_figure(
    trained: Trained, key: PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its loss could stand in one account and half in another: nothing is certified, least of all ε = 0."""
    read = RunEvidence.read

    def split(ledger: LedgerReader, run: bytes, checkpoint: str | None = None, **options: Any) -> RunEvidence:
        return dataclasses.replace(read(ledger, run, checkpoint, **options), split=frozenset(["clinical"]))

    monkeypatch.setattr(RunEvidence, "read", split)
    found = certificate(trained)
    assert found.epsilon("clinical") is None and found.epsilon("sensitive") is not None and not found.private
    with trained.open() as ledger:
        posture = read_posture(ledger, [split(ledger, bytes.fromhex(trained.outcome.run))])
    assert posture.classes["clinical"].epsilon is None
    with raises_code("release.not-private"):
        found.signed(key)
