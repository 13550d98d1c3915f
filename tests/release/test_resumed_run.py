"""The certificate of a run that went on in another session: what holds must hold of every session, plan and class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import raises_code
from short_runs import POLICY, TWO_CLASSES, half_of_a_run, trainer
from trained_run import Trained

from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.release.certificate import Certificate, certify
from lamina.release.gate import ReleaseGate
from lamina.release.maker import make_release
from lamina.release.manifest import PREDICATE_TYPE
from lamina.release.query import GatePolicy, Query, Rights
from lamina.release.risk_statements import texts
from lamina.release.verifier import verify_release
from lamina.sign.dsse import read_statement, sign_statement
from lamina.sign.keys import PrivateKey


class Shown:
    """A progress of the user's own, which could write down what it is given."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []

    def step(self, step: int, loss: float | None) -> None:
        self.losses.append(loss)

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


def failing(found: Certificate) -> set[str]:
    return {each["name"] for each in found.content["conditions"] if not each["holds"]}


def test_a_class_of_an_earlier_plan_is_certified_too(tmp_path: Path) -> None:
    half_of_a_run(tmp_path, TWO_CLASSES)
    found = trainer(tmp_path).fit().certificate
    assert found.private and found.epsilon("sensitive") == pytest.approx(1.5, abs=0.5)
    assert any("Class sensitive" in each for each in texts(found.content, "membership"))


def test_raw_losses_of_an_earlier_session_count(tmp_path: Path) -> None:
    shown = Shown()
    half_of_a_run(tmp_path, inside=True, progress=shown)
    assert any(isinstance(loss, float) for loss in shown.losses)
    for _ in range(2):  # to its end, and once more when it has ended
        assert failing(trainer(tmp_path).fit().certificate) == {"raw_figures"}


def test_raw_losses_of_a_session_that_got_to_no_checkpoint_count(tmp_path: Path) -> None:
    half_of_a_run(tmp_path)

    class Crash(Shown):
        def step(self, step: int, loss: float | None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, inside=True, progress=Crash()).fit()
    assert failing(trainer(tmp_path).fit().certificate) == {"raw_figures"}


def test_noise_that_was_hardened_only_at_the_end_is_not_hardened(tmp_path: Path) -> None:
    half_of_a_run(tmp_path, hardened=False)
    for _ in range(2):
        found = trainer(tmp_path, hardened=True).fit().certificate
        assert found.private and any("floating-point" in each for each in texts(found.content, "not covered"))


def test_purposes_without_a_common_one_are_not_unstated(tmp_path: Path, key: PrivateKey) -> None:
    half_of_a_run(tmp_path, POLICY + 'purposes = ["care"]\n')
    folder = trainer(tmp_path, POLICY + 'purposes = ["research"]\n').fit().folder
    with Trained(folder, None, "example.org-resumed.ledger.db").open() as ledger:  # type: ignore[arg-type]
        with raises_code("release.purposes-differ"):
            make_release(tmp_path / "any", [folder], ledger, key, gate=GatePolicy(unstated_purposes=True))
        make_release(tmp_path / "stated", [folder], ledger, key)
    rights = Rights(classes=frozenset(["clinical"]), max_epsilon=9.0, min_noise_multiplier=0.0, purpose="research")
    denied = ReleaseGate(tmp_path / "stated", key.public).decide(Query(rights=rights))
    assert {each.code for each in denied.reasons} == {"purpose-not-allowed"}


def test_a_posture_says_no_less_than_the_certificate_of_an_earlier_run(tmp_path: Path, key: PrivateKey) -> None:
    """The first run had less noise than the second, whose weights are released."""
    outcomes = [trainer(tmp_path).fit(), trainer(tmp_path, run="second", epsilon=1.0).fit()]
    out, trust = tmp_path / "release", Trust(plain=(key.public,))
    with Trained(outcomes[0].folder, None, "example.org-resumed.ledger.db").open() as ledger:  # type: ignore[arg-type]
        make_release(out, [each.folder for each in outcomes], ledger, key)
    assert verify_release(out, trust=trust).signed
    statement, _ = read_statement((out / "manifest.json").read_bytes(), [key.public], PREDICATE_TYPE)
    layer, second = statement["predicate"]["posture"]["layers"][0], outcomes[1].certificate.content["layers"][0]
    assert layer["noise_std"] < second["noise_std"]
    layer["noise_std"] = second["noise_std"]
    (out / "manifest.json").write_bytes(sign_statement(statement, key))
    assert {each.code for each in verify_release(out, trust=trust).problems} == {"release.posture-differs"}


def test_the_steps_are_those_of_the_ledger(tmp_path: Path) -> None:
    outcome = trainer(tmp_path).fit()
    assert outcome.certificate.private
    path = outcome.folder / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": 60}))
    with LedgerReader.read_only(outcome.folder / "ledger.db") as ledger:
        found = certify(outcome.folder, ledger)
    assert failing(found) == {"metrics"} and found.content["run"]["steps"] == 6
