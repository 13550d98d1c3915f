"""A release against its ledger: whatever the holder of every key signs, a figure that the epochs contradict is named."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import release_forger
from refusals import raises_code
from release_forger import RUN_END, forge, record_release, seed_of
from trained_run import Trained

from lamina.errors import LaminaError
from lamina.ledger.corpus_terms import governing_key_path, ledger_key_path
from lamina.ledger.governance_records import Key, KeyChange, KeyEvent, KeyEvents, Role, WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import Ledger
from lamina.release.certificate import certify
from lamina.release.gate import ReleaseGate
from lamina.release.maker import make_release
from lamina.release.query import GatePolicy
from lamina.release.verifier import ReleaseVerification, verify_release
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey, PublicKey


def compared(folder: Path, trained: Trained, *keys: PublicKey) -> ReleaseVerification:
    with LedgerReader.read_only(trained.ledger) as ledger:
        return verify_release(folder, trust=Trust(plain=keys) if keys else None, ledger=ledger)


def codes(found: ReleaseVerification) -> set[str]:
    return {each.code for each in found.problems}


def owner(trained: Trained) -> PublicKey:
    return PrivateKey.load(governing_key_path(trained.ledger), None).public


def seed(key: PrivateKey, tmp_path: Path) -> bytes:
    key.save(tmp_path / "release.pem", None)
    return seed_of(tmp_path / "release.pem")


def recorded(trained: Trained, folder: Path) -> None:
    """Put the forged release into the ledger, with the ledger's own key."""
    record_release(trained.ledger, folder, seed_of(ledger_key_path(trained.ledger)))


# ----------------------------------------------------------------------------------- honest releases


def test_an_honest_release_agrees_with_its_ledger(release: Path, trained: Trained, key: PrivateKey) -> None:
    alone = verify_release(release, trust=Trust(plain=(key.public,)))
    assert (alone.verified, alone.signed, alone.compared, alone.trusted) == (True, True, False, False)
    assert alone.verdict == "signed by a trusted key; figures not compared with a ledger"
    found = compared(release, trained, key.public)
    assert not found.problems and found.compared and not found.trusted
    assert found.verdict == "signed by a trusted key; figures agree with a ledger that no trusted key governs"
    both = compared(release, trained, key.public, owner(trained))
    assert both.trusted and both.verdict == "trusted" and not both.problems
    nobody = compared(release, trained)
    assert nobody.verified and not nobody.signed and not nobody.trusted


def test_it_agrees_after_the_ledger_has_grown(release: Path, trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    """Another release, and a leaf that no checkpoint covers: what counts is the ledger as it was."""
    with trained.open() as ledger:
        assert not compared(release, trained, key.public, owner(trained)).since  # its own record is no change
        make_release(tmp_path / "second", [trained.folder], ledger, key)
        size = ledger.size
    found = compared(release, trained, key.public, owner(trained))
    assert found.trusted and found.since == {"other releases": [size - 1]}
    with Ledger.open(trained.ledger, governing=PrivateKey.load(governing_key_path(trained.ledger), None)) as ledger:
        at = ledger.now()
        made = Key(name="late", x=PrivateKey.generate().public.x, role=Role.OPERATOR)
        ledger.govern(KeyEvents(events=(KeyEvent(change=KeyChange.ADD, key=made, effective=at),)))
    found = compared(release, trained, key.public, owner(trained))
    assert found.since["key changes"] == [size]
    assert found.compared and not found.problems and not found.trusted  # nobody vouches for the last leaf yet


def test_withdrawals_since_the_release_are_listed_and_are_no_problem(
    served: Path, ward: Trained, key: PrivateKey
) -> None:
    with ward.open() as ledger:
        withdraw(ledger, str(ward.someone("clinical")), WithdrawalReason.REQUEST)
        size = ledger.size
    found = compared(served, ward, key.public)
    assert not found.problems and found.to_dict()["since"] == {"withdrawals": {"count": 1, "leaves": [size - 1]}}


def test_a_ledger_that_is_not_its_own_or_too_short_is_named(
    release: Path, trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(trained.folder.parent, short, symlinks=True)
    hand = release_forger.HandLedger(str(short / trained.name))
    del hand.rows[8:]
    with closing(sqlite3.connect(short / trained.name)) as db, db:
        db.execute("DELETE FROM attempt WHERE seq >= 8")
    hand.write(seed_of(ledger_key_path(trained.ledger)))
    found = compared(release, Trained(short / "first", trained.outcome), key.public)
    assert codes(found) == {"release.ledger-older"} and not found.compared


# ----------------------------------------------------------------------------------- forged by all keys (A7)

Change = Callable[[dict[str, Any]], object]


def cheaper(content: dict[str, Any]) -> None:
    content["classes"]["clinical"].update(epsilon=0.1, epsilon_total=0.1)


def stated_by(content: dict[str, Any], source: str) -> dict[str, Any]:
    """The first statement with this source."""
    found: dict[str, Any] = next(each for each in content["statements"] if each["source"] == source)
    return found


FORGED: dict[str, tuple[Change | None, Change | None, str]] = {
    "a smaller ε": (cheaper, lambda p: p["posture"]["classes"]["clinical"].update(epsilon=0.1), "release.figures-differ"),
    "a smaller ε of all runs": (
        lambda c: c["classes"]["clinical"].update(epsilon_total=0.5), None, "release.figures-differ"
    ),
    "a smaller replace-one": (
        lambda c: c["classes"]["clinical"].update(epsilon_replace_one=1.0), None, "release.figures-differ"
    ),
    "one digit": (
        lambda c: c["classes"]["clinical"].update(epsilon=c["classes"]["clinical"]["epsilon"] - 1e-5), None,
        "release.figures-differ",
    ),
    "a smaller sampling rate": (
        lambda c: c["classes"]["clinical"].update(sampling_rate=0.001), None, "release.figures-differ"
    ),
    "another adjacency": (lambda c: c["classes"]["clinical"].update(adjacency="none"), None, "release.figures-differ"),
    "another unit": (
        lambda c: c["classes"]["clinical"].update(unit="patient"),
        lambda p: p["posture"]["classes"]["clinical"].update(unit="patient"), "release.figures-differ",
    ),
    "an unknown class": (
        lambda c: c["classes"].update(ghost=c["classes"]["clinical"]), None, "release.posture-differs"
    ),
    "another plan": (lambda c: c["plan"].update(sha256="00" * 32), None, "release.plan-differs"),
    "more steps": (lambda c: c["run"].update(steps=21), None, "release.facts-differ"),
    "other noise": (lambda c: c["trainer"].update(hardened=not c["trainer"]["hardened"]), None, "release.facts-differ"),
    "starting weights": (lambda c: c["trainer"].update(starting_weights=None), None, "release.facts-differ"),
    "a smaller true-positive rate": (
        lambda c: c["classes"]["clinical"]["membership"]["tpr"].update({"0.01": 0.0101}), None, "release.figures-differ"
    ),
    "a smaller true-positive rate of all runs": (
        lambda c: c["classes"]["clinical"]["content_total"]["tpr"].update({"0.01": 0.0101}), None, "release.figures-differ"
    ),
    "a smaller accuracy": (
        lambda c: c["classes"]["sensitive"]["content"].update(accuracy=0.5), None, "release.figures-differ"
    ),
    "a smaller μ": (lambda c: c["classes"]["sensitive"]["membership"].update(mu=0.01), None, "release.figures-differ"),
    "a smaller success": (
        lambda c: c["classes"]["clinical"]["content"]["success"].update({"0.5": 0.5}), None, "release.figures-differ"
    ),
    "a swapped adjacency": (
        lambda c: c["classes"]["clinical"]["content"].update(c["classes"]["clinical"]["membership"]), None,
        "release.figures-differ",
    ),
    "a lower curve": (
        lambda c: c["classes"]["clinical"]["membership"]["curve"].update({"0.35": 0.36}), None, "release.figures-differ"
    ),
    "a smaller ε at another δ": (
        lambda c: c["classes"]["clinical"]["epsilon_at"].update({"1e-05": 0.5}), None, "release.figures-differ"
    ),
    "no curve": (
        lambda c: c["classes"]["clinical"]["content"].pop("curve"), None, "release.certificate-wrong"
    ),
    "a curve below guessing": (
        lambda c: c["classes"]["clinical"]["content_total"]["curve"].update({"0.5": 0.4}), None, "release.certificate-wrong"
    ),
    "trials elsewhere": (lambda c: c["tuning"].update(elsewhere=0), None, "release.certificate-wrong"),
    "fewer charged steps": (
        lambda c: c["classes"]["clinical"]["charges"][0].update(steps=1), None, "release.figures-differ"
    ),
    "a caveat less": (lambda c: c["statements"].pop(), None, "release.statement-differs"),
    "another statement": (
        lambda c: c["statements"][0].update(text="Everything is fine."), None, "release.statement-differs"
    ),
    "another source of a statement": (
        lambda c: stated_by(c, "stated by the trainer").update(source="recomputed from the ledger"), None,
        "release.statement-differs",
    ),
    "another leaf of a statement": (
        lambda c: stated_by(c, "stated by the trainer").update(leaves=[1]), None, "release.statement-differs"
    ),
    "a false badge": (
        lambda c: c["protects"].update(badge="private for: everybody"), None, "release.statement-differs"
    ),
    "a class that is not protected": (
        lambda c: c["protects"].update(not_protected=[]), None, "release.statement-differs"
    ),
    "another leaf of a condition": (
        lambda c: c["conditions"][0].update(leaves=None), None, "release.conditions-differ"
    ),
    "another program": (lambda c: c["program"].update(sources="00" * 32), None, "release.facts-differ"),
    "another torch": (lambda c: c["program"].update(torch="9.9"), None, "release.facts-differ"),
    "fewer trials": (lambda c: c["tuning"].update(runs_in_ledger=0), None, "release.facts-differ"),
    "an evaluation that nobody recorded": (
        lambda c: c["utility"].append({
            "figure": "auc", "group": None, "value": 0.99, "low": 0.98, "high": 1.0, "records": 900, "level": 0.95,
            "weights": "model.safetensors", "on": "public", "step": 20, "covered_by_epsilon": True, "digest": "00" * 32,
        }), None, "release.utility-differs",
    ),
    "a condition less": (lambda c: c["conditions"].pop(0), None, "release.conditions-differ"),
    "another source": (
        lambda c: c["conditions"][0].update(source="recomputed from the ledger"), None, "release.conditions-differ"
    ),
    "more noise of a layer": (lambda c: c["layers"][0].update(noise_std=9.0), None, "release.layers-differ"),
    "another date": (lambda c: c.update(issued="2020-01-01T00:00:00Z"), None, "release.ledger-head-differs"),
    "widened purposes": (
        None, lambda p: p["posture"]["classes"]["sensitive"].update(purposes=["ads", "care"]), "release.posture-differs"
    ),
    "members found less often": (
        None, lambda p: p["posture"]["classes"]["clinical"]["membership"].update({"0.01": 0.011}), "release.posture-differs"
    ),
    "content found less often": (
        None, lambda p: p["posture"]["classes"]["clinical"]["content"].update({"0.05": 0.051}), "release.posture-differs"
    ),
    "other withdrawn counts": (None, lambda p: p["posture"]["withdrawn"].update(clinical=1), "release.posture-differs"),
    "another depth": (None, lambda p: p["posture"]["layers"][0].update(depth=1.0), "release.posture-differs"),
    "other eligible leaves": (None, lambda p: p["posture"].update(eligible=[0, 1]), "release.posture-differs"),
    "a later end": (None, lambda p: p.update(not_after="2096-01-01T00:00:00Z"), "release.record-differs"),
    "another date of the manifest": (
        None, lambda p: p.update(created="2020-01-01T00:00:00Z"), "release.ledger-head-differs"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_what_contradicts_the_ledger_is_named(
    release: Path, trained: Trained, key: PrivateKey, tmp_path: Path, name: str
) -> None:
    certificate, predicate, code = FORGED[name]
    forge(release, seed(key, tmp_path), certificate=certificate, predicate=predicate)
    recorded(trained, release)
    found = compared(release, trained, key.public)
    assert code in codes(found) and not found.verified and not found.trusted, found.problems
    with LedgerReader.read_only(trained.ledger) as reader, raises_code("release.not-verified"):
        ReleaseGate(release, key.public, ledger=reader)


def bound(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["classes"]["clinical"]["bounds"][0]
    return found


OF_SIGNED_DATA: dict[str, tuple[Change, str]] = {
    "a smaller ε of a bound": (lambda c: bound(c).update(epsilon=0.1), "release.figures-differ"),
    "a larger signed ε": (lambda c: bound(c).update(epsilon_signed=99.0), "release.figures-differ"),
    "a lower curve of a bound": (
        lambda c: bound(c)["membership"]["curve"].update({"0.35": 0.36}), "release.figures-differ"
    ),
    "content of a bound": (lambda c: bound(c)["content"]["tpr"].update({"0.01": 0.0101}), "release.figures-differ"),
    "more contributions": (lambda c: bound(c).update(contributions=1000), "release.figures-differ"),
    "no epoch left out": (lambda c: bound(c).update(epochs_left_out=1), "release.figures-differ"),
    "a bound less": (lambda c: c["classes"]["clinical"].update(bounds=[]), "release.figures-differ"),
    "unsigned data": (lambda c: c.update(attested=False), "release.conditions-differ"),
    "other people": (lambda c: c.update(other_people="nobody was in both"), "release.statement-differs"),
    "a text of the owner": (
        lambda c: c["about"].update(title={"text": "triage", "leaf": 0}), "release.statement-differs"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_SIGNED_DATA)
def test_what_contradicts_signed_contributions_is_named(
    served: Path, ward: Trained, key: PrivateKey, tmp_path: Path, name: str
) -> None:
    change, code = OF_SIGNED_DATA[name]
    forge(served, seed(key, tmp_path), certificate=change)
    recorded(ward, served)
    found = compared(served, ward, key.public)
    assert code in codes(found) and not found.verified, found.problems


def test_swapped_weights_with_every_key_of_the_operator(
    release: Path, trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    """Other weights, ε = 0.1, a release record: signed by the release key and the ledger key. Nothing says "trusted"."""
    weights, release_seed = release / "model.safetensors", seed(key, tmp_path)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    digest = release_forger.hashlib.sha256(weights.read_bytes()).hexdigest()

    def lie(content: dict[str, Any]) -> None:
        cheaper(content)
        content["model"]["sha256"] = digest

    forge(
        release, release_seed, certificate=lie,
        predicate=lambda p: p["posture"]["classes"]["clinical"].update(epsilon=0.1),
    )  # fmt: skip
    recorded(trained, release)
    alone = verify_release(release, trust=Trust(plain=(key.public,)))
    assert alone.signed and not alone.trusted and "trusted;" not in alone.verdict.partition("by a ")[0]
    ledger_alone = verify(trained.ledger, trust=Trust(plain=(owner(trained),)))
    assert ledger_alone.problem is not None and ledger_alone.problem.code == "verify.release-weights-differ"
    found = compared(release, trained, key.public, owner(trained))
    assert codes(found) >= {"release.ledger-not-verified", "release.weights-differ", "release.figures-differ"}
    assert not found.compared
    with LedgerReader.read_only(trained.ledger) as reader, raises_code("release.not-verified"):
        ReleaseGate(release, key.public, ledger=reader)


def test_a_ledger_without_the_bad_release_still_shows_it(
    release: Path, trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    """The honest release is recorded and another manifest is presented. Neither its weights nor its ε are accepted."""
    weights = release / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    digest = release_forger.hashlib.sha256(weights.read_bytes()).hexdigest()
    forge(release, seed(key, tmp_path), certificate=lambda c: (cheaper(c), c["model"].update(sha256=digest)))
    found = compared(release, trained, key.public, owner(trained))
    assert codes(found) >= {"release.weights-differ", "release.figures-differ", "release.not-recorded"}
    assert any("classes.clinical.epsilon is 0.1" in each.reason for each in found.problems)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda c: c.update(epsilon=0.1), "verify.release-contradicts-epochs"),
        (lambda c: c.update(noise_multiplier=99.0), "verify.release-contradicts-epochs"),
        (lambda c: c.update(public=True, epsilon=None, delta=None), "verify.release-contradicts-epochs"),
        (lambda c: c["membership"].update({"0.01": 0.011}), "verify.release-contradicts-epochs"),
        (lambda c: c["content"].update({"0.05": 0.051}), "verify.release-contradicts-epochs"),
        (lambda c: c.update(content={"0.01": "0.01"}), "verify.release-contradicts-epochs"),
        (lambda c: c.update(membership=[0.001, 0.01, 0.05]), "verify.release-contradicts-epochs"),
    ],
    ids=["ε", "noise", "public", "membership", "content", "text as a rate", "a list of rates"],
)
def test_ledger_verify_compares_release_records_with_epochs(
    release: Path, trained: Trained, key: PrivateKey, tmp_path: Path, change: Change, code: str
) -> None:
    forge(release, seed(key, tmp_path), predicate=lambda p: change(p["posture"]["classes"]["clinical"]))
    recorded(trained, release)
    found = verify(trained.ledger).problem
    assert found is not None and (found.kind, found.code) == ("release", code)


def test_ledger_verify_refuses_a_claim_of_membership_at_a_public_number(
    trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    """The end of the run states that the number of contributions is public, so that ε is about content alone."""
    ledger_seed = seed_of(ledger_key_path(trained.ledger))
    body = release_forger.last(trained.ledger, RUN_END)
    release_forger.cut(trained.ledger, RUN_END, ledger_seed)
    release_forger.append(trained.ledger, RUN_END, {**body, 8: True}, ledger_seed)
    for kept in trained.ledger.parent.glob("*.seen"):  # the keeper removes what is kept beside the key
        kept.unlink()
    facts = {"run": body[1].hex(), "classes": {}, "steps": body[4], "plan": body[5].hex()}
    (trained.folder / "metrics.json").write_text(json.dumps(facts))
    with trained.open() as ledger:
        make_release(tmp_path / "out", [trained.folder], ledger, key)
    found = release_forger.statement(tmp_path / "out")["predicate"]["posture"]["classes"]["clinical"]
    assert found["membership"] is None and found["content"] and verify(trained.ledger).verified
    rates = found["content"]
    forge(
        tmp_path / "out",
        seed(key, tmp_path),
        predicate=lambda p: p["posture"]["classes"]["clinical"].update(membership=rates),
    )
    recorded(trained, tmp_path / "out")
    problem = verify(trained.ledger).problem
    assert problem is not None and (problem.kind, problem.code) == ("release", "verify.release-contradicts-epochs")


def test_a_release_of_a_run_without_an_end_is_named(
    release: Path, trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    """In a ledger of an earlier version, runs have no end record. It verifies, and a note names the release."""
    older, ledger_seed = tmp_path / "older", seed_of(ledger_key_path(trained.ledger))
    shutil.copytree(trained.folder.parent, older, symlinks=True)
    mine = Trained(older / "first", trained.outcome)
    hand = release_forger.HandLedger(str(mine.ledger))
    ends = [seq for seq in range(len(hand.rows)) if hand.kept(seq)[1] == RUN_END]
    del hand.rows[ends[0] :]
    with closing(sqlite3.connect(mine.ledger)) as db, db:
        db.execute("DELETE FROM meta WHERE name = 'open'")  # older ledgers have no head over open rows
    hand.write(ledger_seed)
    seq = record_release(mine.ledger, release, ledger_seed)
    found = verify(mine.ledger)
    assert found.verified, found.problem
    assert any("because the end of a run is not recorded" in each and str(seq) in each
                                  for each in found.notes)  # fmt: skip


# ----------------------------------------------------------------------------------- roles of keys (A4)

OTHER_ROLES = [role for role in Role if role is not Role.RELEASE]


def named(trained: Trained, role: Role) -> PrivateKey:
    """A key that the ledger names in a role."""
    if role in (Role.LEDGER, Role.GOVERNING):
        path = ledger_key_path(trained.ledger) if role is Role.LEDGER else governing_key_path(trained.ledger)
        return PrivateKey.load(path, None)
    made = PrivateKey.generate()
    governing = PrivateKey.load(governing_key_path(trained.ledger), None)
    with Ledger.open(
        trained.ledger, PrivateKey.load(ledger_key_path(trained.ledger), None), governing=governing
    ) as ledger:
        event = KeyEvent(
            change=KeyChange.ADD, key=Key(name=f"a-{role.name.lower()}", x=made.public.x, role=role),
            effective=ledger.now(),
        )  # fmt: skip
        ledger.govern(KeyEvents(events=(event,)))
    return made


@pytest.mark.parametrize("role", OTHER_ROLES, ids=lambda role: role.name.lower())
def test_a_key_with_another_role_signs_neither_certificate_nor_release(
    trained: Trained, tmp_path: Path, role: Role
) -> None:
    thief = named(trained, role)
    with trained.open() as ledger:
        found = certify(trained.folder, ledger)
        with raises_code("release.key-in-other-role"):
            found.signed(thief)
        size = ledger.size
        with raises_code("release.key-in-other-role"):
            make_release(tmp_path / "out", [trained.folder], ledger, thief)
        assert ledger.size == size
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("role", OTHER_ROLES, ids=lambda role: role.name.lower())
def test_a_release_by_a_key_with_another_role_is_refused(
    trained: Trained, key: PrivateKey, tmp_path: Path, role: Role
) -> None:
    thief = named(trained, role)
    with trained.open() as ledger:
        make_release(tmp_path / "release", [trained.folder], ledger, key)
    forge(tmp_path / "release", seed(thief, tmp_path))
    recorded(trained, tmp_path / "release")
    assert "release.key-in-other-role" in codes(compared(tmp_path / "release", trained, thief.public))
    ring = KeyRing()
    ring.add(thief.public, label="somebody", role=role.name.lower())
    assert codes(verify_release(tmp_path / "release", trust=Trust(ring=ring))) == {"release.foreign-key"}
    assert codes(verify_release(tmp_path / "release", trust=Trust(ring=ring, plain=(thief.public,)))) == {
        "release.foreign-key"
    }
    alone = verify_release(tmp_path / "release", trust=Trust(plain=(thief.public,)))
    assert codes(alone) == ({"release.key-in-other-role"} if role is Role.LEDGER else set()) and not alone.trusted


def test_a_key_that_the_ledger_names_for_releases_signs_until_it_is_revoked(trained: Trained, tmp_path: Path) -> None:
    mine = named(trained, Role.RELEASE)
    with trained.open() as ledger:
        make_release(tmp_path / "release", [trained.folder], ledger, mine)
    assert not compared(tmp_path / "release", trained, mine.public).problems
    governing = PrivateKey.load(governing_key_path(trained.ledger), None)
    with Ledger.open(
        trained.ledger, PrivateKey.load(ledger_key_path(trained.ledger), None), governing=governing
    ) as ledger:
        event = KeyEvent(change=KeyChange.REVOKE, target=mine.public.id, effective=ledger.now())
        ledger.govern(KeyEvents(events=(event,)))
    assert codes(compared(tmp_path / "release", trained, mine.public)) == {"release.key-retired"}


# ----------------------------------------------------------------------------------- ranges (A6)

NO_FIGURES: list[Any] = [10**400, -(10**400), -1, -0.5, 1e301, 2**70, True, "1", [], {}]


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all numbers in a JSON value."""
    if type(value) in (int, float):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        yield from numbers(each, (*path, name))


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for name in path[:-1]:
        value = value[name]
    value[path[-1]] = new


def test_no_number_of_a_manifest_is_out_of_range(release: Path, key: PrivateKey, tmp_path: Path) -> None:
    """Each number is replaced by one out of range. The result is a named problem, never a raw exception."""
    trust, release_seed = Trust(plain=(key.public,)), seed(key, tmp_path)
    predicate = release_forger.statement(release)["predicate"]
    paths = [path for path in numbers(predicate) if path != ("version",)]
    assert len(paths) > 20 and ("gate", "max_age") in paths
    for path in paths:
        for new in NO_FIGURES:
            forge(release, release_seed, predicate=lambda p, path=path, new=new: put(p, path, new))
            assert codes(verify_release(release, trust=trust)), (path, new)
            forge(release, release_seed, predicate=lambda p: p.update(copy.deepcopy(predicate)))
    assert not codes(verify_release(release, trust=trust))


def test_no_number_of_a_certificate_is_out_of_range(release: Path, key: PrivateKey, tmp_path: Path) -> None:
    trust, release_seed = Trust(plain=(key.public,)), seed(key, tmp_path)
    content = json.loads((release / "certificate.json").read_text())
    unchecked = ("trainer",)  # leaves of the ledger, which only the ledger can tell
    paths = [path for path in numbers(content) if path[0] not in unchecked]
    assert len(paths) > 30

    def restore(found: dict[str, Any]) -> None:
        found.clear()
        found.update(copy.deepcopy(content))

    for path in paths:
        for new in NO_FIGURES:
            forge(release, release_seed, certificate=lambda c, path=path, new=new: (restore(c), put(c, path, new)))
            assert codes(verify_release(release, trust=trust)), (path, new)
    forge(release, release_seed, certificate=restore)
    assert not codes(verify_release(release, trust=trust))


NO_FIELDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no rates": lambda c: c["classes"]["clinical"]["membership"].update(tpr={}),
    "content without baselines": lambda c: c["classes"]["clinical"]["content"].pop("success"),
    "membership with baselines": lambda c: c["classes"]["clinical"].update(
        membership=c["classes"]["clinical"]["content"]
    ),
    "another field of a risk": lambda c: c["classes"]["clinical"]["content"].update(note="safe"),
    "no noise in a charge": lambda c: c["classes"]["clinical"]["charges"][0].update(noise_multiplier=None),
    "a charge without steps": lambda c: c["classes"]["clinical"]["charges"][0].pop("steps"),
    "no adjacency": lambda c: c["classes"]["clinical"].update(adjacency=None),
    "no population": lambda c: c["classes"]["clinical"].pop("population"),
    "an accountant that is a text": lambda c: c.update(accountant="pld"),
    "an accountant without a name": lambda c: c["accountant"].pop("name"),
    "a clipping that is none": lambda c: c["plan"].update(clipping=[]),
    "a trainer that is a text": lambda c: c.update(trainer="none"),
    "a start that is a text": lambda c: c["trainer"].update(starting_weights="none"),
    "a start that is a number": lambda c: c["trainer"].update(starting_weights=0),
}


@pytest.mark.parametrize("name", NO_FIELDS)
def test_a_certificate_that_lacks_a_field_is_refused_before_a_paper_needs_it(
    release: Path, key: PrivateKey, tmp_path: Path, name: str
) -> None:
    forge(release, seed(key, tmp_path), certificate=NO_FIELDS[name])
    assert "release.certificate-wrong" in codes(verify_release(release, trust=Trust(plain=(key.public,))))


def test_random_changes_never_end_in_a_raw_error(release: Path, key: PrivateKey, tmp_path: Path) -> None:
    rng, trust, release_seed = random.Random(5), Trust(plain=(key.public,)), seed(key, tmp_path)
    kept = {path.name: path.read_bytes() for path in release.iterdir()}

    def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, each in list(items):
            yield (*path, name)
            yield from places(each, (*path, name))

    def spoil(found: dict[str, Any]) -> None:
        put(found, rng.choice(list(places(found))), rng.choice([*NO_FIGURES, None, "\x1b[2J", "a" * 2000, [[[]]]]))

    for _ in range(150):
        which = rng.choice([{"certificate": spoil}, {"predicate": spoil}])
        forge(release, release_seed, **which)
        verify_release(release, trust=trust)  # whatever it says, it says it
        for name, data in kept.items():
            (release / name).write_bytes(data)


@pytest.mark.parametrize("age", [0, -1, 10**9, 366 * 86_400 + 1, 1.5, True])
def test_a_gate_does_not_go_without_withdrawals_for_years(age: Any) -> None:
    with raises_code("release.gate-policy-invalid"):
        GatePolicy(max_age=age)


@pytest.mark.parametrize("draws", [{"depth": [0, 2]}, {"depth": [10**400, 1]}, {"layers": "a"}, {"all": True}, 3])
def test_a_generation_class_means_something(draws: Any) -> None:
    with pytest.raises(LaminaError, match="gate-policy-invalid"):
        GatePolicy(generation_classes={"head": draws})
