"""`lamina serve` does not start with a release whose figures, curve or statements its ledger contradicts.

The forger has the release key and the ledger's key, and shares no code with `certify` (support/release_forger.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import answer, asker
from release_forger import Change, forge, record_release, seed_of
from trained_run import Trained

from lamina.ledger.corpus_terms import ledger_key_path
from lamina.sign.keys import PrivateKey, write_new


def clinical(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["classes"]["clinical"]
    return found


FORGED: dict[str, tuple[Change | None, Change | None, str]] = {
    "ε": (lambda c: clinical(c).update(epsilon=0.1), lambda p: clinical(p["posture"]).update(epsilon=0.1), "clinical.epsilon"),
    "ε at another δ": (lambda c: clinical(c)["epsilon_at"].update({"1e-05": 0.1}), None, "clinical.epsilon_at.1e-05"),
    "curve": (
        lambda c: clinical(c)["membership"]["curve"].update({"0.35": 0.36}), None, "clinical.membership.curve.0.35"
    ),
    "true-positive rate": (
        lambda c: clinical(c)["content"]["tpr"].update({"0.01": 0.0101}), None, "clinical.content.tpr.0.01"
    ),
    "rate of the gate": (
        None, lambda p: clinical(p["posture"])["membership"].update({"0.01": 0.0101}), "clinical.membership.0.01"
    ),
    "statement": (lambda c: c["statements"][0].update(text="Everything is fine."), None, "statements[0].text"),
    "badge": (lambda c: c["protects"].update(badge="private for: everybody"), None, "protects.badge"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["nothing", *FORGED])
def test_a_forged_release_is_not_served(
    release: Path, trained: Trained, key: PrivateKey, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key.save(tmp_path / "release.key", None)
    write_new(tmp_path / "release.pub", key.public.pem(), "the key", mode=0o644)
    certificate, predicate, path = FORGED.get(name, (None, None, ""))
    if path:
        forge(release, seed_of(tmp_path / "release.key"), certificate=certificate, predicate=predicate)
        record_release(trained.ledger, release, seed_of(ledger_key_path(trained.ledger)))
    # with a model that cannot be found, so that a service which accepts the release stops after that, too
    words = (str(release), "--trust", str(tmp_path / "release.pub"), "--ledger", str(trained.ledger))
    found = answer(asker(capsys, "serve")(*words, "--port", "0", "--model", "json:none", "--json"), 1)
    assert found["code"] == ("release.not-verified" if path else "cli.attribute-not-found")
    assert path in str(found)
