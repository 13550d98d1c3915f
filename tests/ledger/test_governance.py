"""Authority stands outside the log: what a forger writes, honest programs neither append, nor sign over, nor trust."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forger
import pytest
from build import ALICE, BOB, FLOORS, PRESETS, begin, contribution
from forge import replacing, rewritten, sealed
from forger import KEYS, POLICY, TERMS, Forger, add, rotate
from making import GOVERNING, LEDGER, ORIGIN, OTHER, SECOND, START, WITNESS, Clock, authorised, digest, key
from refusals import raises_code

from lamina.admit.terms import hash_of_floors
from lamina.codec import schema_of
from lamina.ledger import signed_checkpoint
from lamina.ledger.governance_records import (
    GOVERNING_KINDS,
    Key,
    KeyChange,
    KeyEvent,
    KeyEvents,
    PolicyChange,
    Role,
    TermsChange,
)
from lamina.ledger.records import ContributionRecord
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.key_ring import KeyRing

OWNER, SECOND_OWNER, TRAINER, THIEF, AUDITOR_SEED = (
    digest("key", name) for name in ("governing", "second governing", "ledger", "other", "auditor")
)
HOURS = 7200
PINNED = Trust(plain=(GOVERNING.public,))
STEAL = {1: [add(THIEF, 1, ORIGIN, START)]}  # the thief's key signs checkpoints
PERSON = {1: [add(THIEF, 2, "contributor-x", START)]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest ledger with two owners and a checkpoint over all of it."""
    path = tmp_path_factory.mktemp("honest") / "ledger.db"
    story = begin(str(path))
    story.admit(contribution(n) for n in range(3))
    story.sign()
    story.ledger.close()
    return path


@pytest.fixture
def forged(made: Path, tmp_path: Path) -> Forger:
    return Forger(str(shutil.copy(made, tmp_path / "ledger.db")))


def presets() -> list[dict[int, Any]]:
    kind = schema_of(type(PRESETS[0]))
    return [kind.to_cbor(each) for each in PRESETS]


def policy(**floors: int) -> dict[int, Any]:
    clip = floors.get("clip", 200_000)
    return {1: {1: clip, 2: 500_000}, 2: presets(), 3: hash_of_floors(ORIGIN, clip, 500_000)}


Attack = Callable[[Forger], tuple[int, dict[int, Any]]]
ATTACKS: dict[str, tuple[str, Attack]] = {
    "unsigned key event": ("ledger.not-authorised", lambda f: (KEYS, STEAL)),
    "unsigned policy": ("ledger.not-authorised", lambda f: (POLICY, policy())),
    "unsigned terms": ("ledger.not-authorised", lambda f: (TERMS, {2: 10**9})),
    "authorised by nobody": ("ledger.not-authorised", lambda f: (KEYS, f.governing(KEYS, STEAL))),
    "signed by a stranger": (
        "ledger.authorising-signature-invalid", lambda f: (KEYS, f.governing(KEYS, PERSON, digest("stranger"))),
    ),
    "signed by the key that it adds": (
        "ledger.authorising-signature-invalid",
        lambda f: (KEYS, f.governing(KEYS, {1: [add(THIEF, 6, "owner.example/2", START)]}, THIEF)),
    ),
    "the ledger's key adds another": (
        "ledger.authorising-signature-invalid", lambda f: (KEYS, f.governing(KEYS, STEAL, TRAINER)),
    ),
    "the ledger's key adds a contributor": (
        "ledger.authorising-signature-invalid", lambda f: (KEYS, f.governing(KEYS, PERSON, TRAINER)),
    ),
    "the ledger's key changes the policy": (
        "ledger.authorising-signature-invalid", lambda f: (POLICY, f.governing(POLICY, policy(), TRAINER)),
    ),
    "the ledger's key rotates itself and more": (
        "ledger.authorising-signature-invalid",
        lambda f: (KEYS, f.governing(KEYS, {1: [rotate(TRAINER, digest("key", "next"), 1, ORIGIN, START), *PERSON[1]]}, TRAINER)),
    ),
    "an auditor authorises": (
        "ledger.authorising-signature-invalid", lambda f: (POLICY, f.governing(POLICY, policy(), AUDITOR_SEED)),
    ),
    "of another ledger": (
        "ledger.authorised-for-other-ledger", lambda f: (KEYS, f.governing(KEYS, PERSON, OWNER, header=digest("h"))),
    ),
    "after another record": (
        "ledger.authorised-out-of-turn", lambda f: (KEYS, f.governing(KEYS, PERSON, OWNER, previous=f.hashes[0])),
    ),
    "on another history": (
        "ledger.authorised-for-other-history", lambda f: (KEYS, f.governing(KEYS, PERSON, OWNER, root=digest("r"))),
    ),
    "after no checkpoint": (
        "ledger.authorised-for-other-history",
        lambda f: (KEYS, f.governing(KEYS, PERSON, OWNER, size=2, root=forger.root(f.hashes[:2]))),
    ),
    "after an empty tree": (
        "ledger.authorised-for-other-history",
        lambda f: (KEYS, f.governing(KEYS, PERSON, OWNER, size=0, root=forger.root([]))),
    ),
    "expired": (
        "ledger.authorisation-expired", lambda f: (KEYS, f.governing(KEYS, PERSON, OWNER, expires=START)),
    ),
    "signed for another change": (
        "ledger.authorising-signature-invalid",
        lambda f: (KEYS, f.governing(KEYS, STEAL, OWNER, signed_change=PERSON)),
    ),
    "signed as another kind": (
        "ledger.authorising-signature-invalid", lambda f: (TERMS, f.governing(TERMS, {2: 10**9}, OWNER, kind_signed=KEYS)),
    ),
    "one owner where two are needed": (
        "ledger.second-signature-missing",
        lambda f: (KEYS, f.governing(KEYS, {1: [add(THIEF, 6, "owner.example/2", START)]}, OWNER)),
    ),
    "one owner signs twice": (
        "ledger.second-signature-missing",
        lambda f: (KEYS, f.governing(KEYS, {1: [add(THIEF, 6, "owner.example/2", START)]}, OWNER, OWNER)),
    ),
    "one owner revokes the other": (
        "ledger.second-signature-missing",
        lambda f: (KEYS, f.governing(KEYS, {1: [{1: 3, 3: forger.key_id(SECOND_OWNER), 4: START}]}, OWNER)),
    ),
    "one owner lowers a floor": (
        "ledger.policy-loosened", lambda f: (POLICY, f.governing(POLICY, policy(clip=1), OWNER)),
    ),
    "a policy that contributors do not sign": (
        "ledger.policy-digest-differs",
        lambda f: (POLICY, f.governing(POLICY, policy() | {3: digest("p")}, OWNER, SECOND_OWNER)),
    ),
    "one owner shortens the retention": (
        "ledger.second-signature-missing", lambda f: (TERMS, f.governing(TERMS, {2: 60}, OWNER)),
    ),
    "more cosignatures than witnesses": (
        "ledger.too-few-witnesses", lambda f: (TERMS, f.governing(TERMS, {1: 2}, OWNER, SECOND_OWNER)),
    ),
}  # fmt: skip
HONEST: dict[str, Attack] = {
    "a contributor": lambda f: (KEYS, f.governing(KEYS, PERSON, OWNER)),
    "the ledger's key rotates itself": lambda f: (
        KEYS, f.governing(KEYS, {1: [rotate(TRAINER, digest("key", "next"), 1, ORIGIN, START)]}, TRAINER),
    ),
    "another owner": lambda f: (
        KEYS, f.governing(KEYS, {1: [add(THIEF, 6, "owner.example/2", START)]}, OWNER, SECOND_OWNER),
    ),
    "a stricter policy": lambda f: (POLICY, f.governing(POLICY, policy(), SECOND_OWNER)),
    "a looser policy": lambda f: (POLICY, f.governing(POLICY, policy(clip=1), OWNER, SECOND_OWNER)),
    "longer retention": lambda f: (TERMS, f.governing(TERMS, {2: 10**9}, OWNER)),
    "a shorter retention": lambda f: (TERMS, f.governing(TERMS, {2: 60}, OWNER, SECOND_OWNER)),
}  # fmt: skip


def appended(path: str, kind: int, body: dict[int, Any], who: Any = LEDGER) -> None:
    """What the forger made, given to the honest writer."""
    with Ledger.open(path, who, clock=Clock()) as ledger:
        ledger.append([schema_of(GOVERNING_KINDS[kind]).from_cbor(body)])


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_not_authorised_is_neither_appended_nor_signed_nor_verified(forged: Forger, name: str) -> None:
    code, attack = ATTACKS[name]
    kind, body = attack(forged)
    with raises_code(code):
        appended(forged.path, kind, body)
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as running:
        running.checkpoint()  # a run that was there before
        seq = forged.append(kind, body)
        for ledger in (running, Ledger.open(forged.path, LEDGER, clock=Clock())):
            with ledger, raises_code("ledger.leaf-not-allowed") as caught:
                ledger.checkpoint()
            assert f"leaf {seq} " in caught.value.problem and code in caught.value.problem
    sealed(forged.path, LEDGER)  # whoever has the ledger's key signs it all the same
    found = verify(forged.path, trust=PINNED)
    assert found.problem is not None and (found.problem.index, found.problem.code) == (seq, code)
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()  # also where a checkpoint covers it


@pytest.mark.parametrize("name", HONEST)
def test_what_owners_signed_is_appended_signed_and_trusted(forged: Forger, tmp_path: Path, name: str) -> None:
    kind, body = HONEST[name](forged)
    other = str(shutil.copy(forged.path, tmp_path / "other.db"))
    appended(other, kind, body)
    forged.append(kind, body)  # by whatever hand it was written
    for path in (other, forged.path):
        with Ledger.open(path, LEDGER, clock=Clock()) as ledger:
            ledger.checkpoint()
        found = verify(path, trust=PINNED)
        assert found.problem is None and found.trusted


def test_a_record_counts_once_and_on_one_fork(forged: Forger, tmp_path: Path) -> None:
    kind, body = HONEST["a contributor"](forged)
    fork = str(shutil.copy(forged.path, tmp_path / "fork.db"))
    appended(forged.path, kind, body)
    with raises_code("ledger.authorised-out-of-turn"):
        appended(forged.path, kind, body)
    with Ledger.open(fork, LEDGER, clock=Clock()) as ledger:
        ledger.append([authorised(ledger, TermsChange(retention=10**9))])
    with raises_code("ledger.authorised-out-of-turn"):
        appended(fork, kind, body)
    rewritten(fork, lambda data: data[:-2])  # the same ledger, cut before its last contribution, and signed again
    with raises_code("ledger.authorised-for-other-history"):
        appended(fork, kind, body)


def test_it_counts_at_any_later_place_until_it_expires(forged: Forger) -> None:
    kind, body = HONEST["a contributor"](forged)
    clock = Clock(START + 999)
    with Ledger.open(forged.path, LEDGER, clock=clock) as ledger:
        ledger.append([contribution(9).record], [contribution(9).attestation])
        ledger.checkpoint()
        record = schema_of(GOVERNING_KINDS[kind]).from_cbor(body)
        clock.now += 1
        with raises_code("ledger.authorisation-expired"):
            ledger.append([record])
        clock.now -= 1
        ledger.append([record])
        ledger.checkpoint()
    assert verify(forged.path, trust=PINNED).trusted


def test_a_leaf_that_the_store_hides_is_found(forged: Forger, made: Path) -> None:
    """A revocation that another leaf replaces, or a key event that nobody authorised."""
    forged.append(KEYS, STEAL)
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()
    shutil.copy(made, forged.path)
    gone = KeyEvent(change=KeyChange.REVOKE, target=contribution(0).record.key, effective=START)
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger:
        ledger.append([authorised(ledger, gone)])
        ledger.checkpoint()
        seq = ledger.size - 1
        ledger.append([contribution(9, BOB).record])
    forged.sql("UPDATE leaf SET (data, body) = (SELECT data, body FROM leaf WHERE seq = 1) WHERE seq = ?", seq)
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.governance()


def slip(forged: Forger, made: ContributionRecord) -> int:
    """Write a contribution past the gate."""
    terms = made.terms
    kept = {6: made.descriptor, 7: made.expires, 8: terms.cls, 9: terms.clip_norm, 10: terms.noise_multiplier}
    body = {1: made.attestation, 2: made.key, 3: made.not_before, 4: terms.data_class, 5: terms.profile}
    return forged.append(2, body, kept=kept)


@pytest.mark.parametrize("changes", [{"key": digest("stranger")}, {"noise": 1}])
def test_nothing_is_signed_over_contributions_past_the_gate(forged: Forger, changes: dict[str, Any]) -> None:
    """By a key that nobody enrolled; below the policy; out of place."""
    made = contribution(9).record
    terms = dataclasses.replace(made.terms, noise_multiplier=changes.get("noise", made.terms.noise_multiplier))
    slip(forged, dataclasses.replace(made, terms=terms, key=changes.get("key", made.key)))
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()


@pytest.mark.parametrize("spoil", ["unknown", "revoked", "loose", "expired", "future"])
def test_no_contribution_is_appended_that_could_not_be_signed_over(forged: Forger, spoil: str) -> None:
    made = contribution(9).record
    changes = {
        "unknown": {"key": digest("stranger")},
        "revoked": {},
        "loose": {"terms": dataclasses.replace(made.terms, noise_multiplier=1)},
        "expired": {"expires": START},
        "future": {"not_before": START + HOURS},
    }[spoil]
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger:
        if spoil == "revoked":
            ledger.append([authorised(ledger, KeyEvent(change=KeyChange.REVOKE, target=made.key, effective=START))])
        size = ledger.size
        with raises_code("ledger.contribution-not-allowed"):
            ledger.append([contribution(8).record, dataclasses.replace(made, **changes)])
        assert ledger.size == size


def test_nobody_is_let_in_twice(forged: Forger) -> None:
    """A writer that appended the contribution refuses it, and so does one that reads it from the leaves."""
    there = contribution(9).record
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger:
        ledger.append([there])
        replayed = dataclasses.replace(there, attestation=digest("another"))
        with raises_code("ledger.already-admitted"):
            ledger.append([replayed])
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.already-admitted"):
        ledger.append([replayed])


def test_nothing_is_signed_over_what_is_pruned_too_early_or_lies_in_the_future(forged: Forger, made: Path) -> None:
    spans, totals = [{1: 4, 2: 5}], [{1: "clinical", 2: 1, 3: 0, 4: 0}]
    forged.append(6, {1: spans, 2: START, 3: totals, 4: digest("pruned"), 5: []})
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()
    shutil.copy(made, forged.path)
    with Ledger.open(forged.path, LEDGER, clock=Clock(START + HOURS)) as ledger:
        ledger.append([contribution(9).record], [contribution(9).attestation])
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.clock-behind"):
        ledger.checkpoint()


def test_a_tree_that_was_exchanged_is_not_signed(forged: Forger) -> None:
    """Between two checkpoints of one process somebody puts another leaf where one was, tree and head included."""
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger:
        ledger.checkpoint()
        (seq,) = ledger.append([contribution(9).record], [contribution(9).attestation])
        size, frontier = forged.sql("SELECT size, frontier FROM head")[0]
        forged.sql("DELETE FROM leaf WHERE seq = ?", seq)
        again = contribution(8).record
        assert slip(forged, again) == seq
        assert forged.sql("SELECT size, frontier FROM head")[0] != (size, frontier)
        with raises_code("ledger.tree-differs"):
            ledger.checkpoint()


# ------------------------------------------------------------------------------ the header


def test_a_header_that_its_owners_did_not_sign(forged: Forger, tmp_path: Path) -> None:
    header = begin(str(tmp_path / "new.db")).ledger.header
    for signatures in ((), header.signatures[:1], (*header.signatures[:1], header.signatures[0])):
        with raises_code("ledger.header-not-signed"):
            Ledger.create(tmp_path / "x.db", dataclasses.replace(header, signatures=signatures), LEDGER)
        assert not (tmp_path / "x.db").exists()
        rewritten(forged.path, replacing(0, signatures=signatures), chained=False)
        assert code_of(verify(forged.path)) == "ledger.header-not-signed"
        with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.header-not-signed"):
            ledger.checkpoint()
        with raises_code("ledger.header-not-signed"), Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger:
            ledger.append([TermsChange(retention=10**9)])


def code_of(found: Verification) -> str | None:
    assert not found.trusted
    return None if found.problem is None else found.problem.code


# ------------------------------------------------------------------------------ what an auditor brings along


def ring(*entries: tuple[Any, str, str], quorum: int | None = None) -> KeyRing:
    made = KeyRing()
    for public, label, role in entries:
        made.add(public.public, label=label, role=role)
    made.quorum = quorum
    return made


OWNED = (GOVERNING, "owner", "governing")


def test_without_an_owner_from_elsewhere_it_is_only_consistent(forged: Forger) -> None:
    for trust in (None, Trust(plain=(LEDGER.public,)), Trust(ring=ring((LEDGER, "ledger", "ledger")))):
        found = verify(forged.path, trust=trust)
        assert found.verified and not found.trusted
    assert verify(forged.path, trust=Trust(ring=ring(OWNED))).trusted
    assert not verify(forged.path, trust=PINNED, signatures=False).trusted
    for stranger in (OTHER, LEDGER, WITNESS):
        pinned = Trust(ring=ring((stranger, "owner", "governing")))
        assert code_of(verify(forged.path, trust=pinned)) == "verify.header-not-by-trusted-key"


def test_contributors_of_the_auditor_are_the_only_ones(forged: Forger) -> None:
    known = ring(OWNED, (ALICE, "alice", "contributor"))
    assert verify(forged.path, trust=Trust(ring=known)).trusted
    for signatures in (True, False):
        others = Trust(ring=ring(OWNED, (BOB, "bob", "contributor")))
        assert code_of(verify(forged.path, trust=others, signatures=signatures)) == "verify.key-not-trusted"
        known.revoke(ALICE.public.id, at=START)
        found = verify(forged.path, trust=Trust(ring=known), signatures=signatures)
        assert code_of(found) == "verify.trusted-key-unusable" and found.problem is not None
        assert ALICE.public.name[:16] in found.problem.reason
        wrong = Trust(ring=ring(OWNED, (ALICE, "alice", "auditor"), (BOB, "bob", "contributor")))
        assert code_of(verify(forged.path, trust=wrong, signatures=signatures)) == "verify.key-wrong-role"


def test_witnesses_and_quorum_of_the_auditor(forged: Forger, tmp_path: Path) -> None:
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger:
        text = ledger.latest()
        assert text is not None
        ledger.cosigned(signed_checkpoint.add_cosignature(text, OTHER, START, "outside.example"))
    one, two = (OTHER, "outside.example", "witness"), (WITNESS, "witness.example", "witness")
    assert verify(forged.path, trust=Trust(ring=ring(OWNED, one))).trusted
    assert verify(forged.path, trust=Trust(ring=ring(OWNED, one, two, quorum=1))).trusted
    for trusted in (ring(OWNED, one, two), ring(OWNED, two), ring(OWNED, one, two, quorum=2)):
        trusted.save(tmp_path / "trusted.json")
        found = verify(forged.path, trust=Trust.load(tmp_path / "trusted.json"))
        assert code_of(found) == "verify.too-few-trusted-cosignatures"


def test_every_key_is_listed_with_who_added_it(forged: Forger) -> None:
    appended(forged.path, *HONEST["another owner"](forged))
    found = verify(forged.path, trust=Trust(plain=(SECOND.public,)))
    owners = {forger.key_id(OWNER).hex(), forger.key_id(SECOND_OWNER).hex()}
    assert {each["name"] for each in found.keys if each["index"] == 0} == {
        ORIGIN, "auditor.example", "witness.example", "owner.example", "second.example",
    }  # fmt: skip
    assert all(set(each["by"]) == owners for each in found.keys if each["index"] == 0)
    last = found.keys[-1]
    assert (last["change"], last["role"], last["key"]) == ("add", "governing", forger.key_id(THIEF).hex())
    assert set(last["by"]) == owners and found.to_dict()["keys"][-1] == last


def test_quorum_in_force_is_what_a_checkpoint_needs(forged: Forger) -> None:
    with Ledger.open(forged.path, LEDGER, clock=Clock()) as ledger:
        ledger.append([authorised(ledger, TermsChange(witnesses=1))])
        text = ledger.checkpoint()
        assert code_of(verify(forged.path)) == "verify.too-few-cosignatures"
        ledger.cosigned(signed_checkpoint.add_cosignature(text, WITNESS, START, "witness.example"))
        assert verify(forged.path).verified
        gone = KeyEvent(change=KeyChange.REVOKE, target=WITNESS.public.id, effective=START)
        with raises_code("ledger.too-few-witnesses"):
            ledger.append([authorised(ledger, gone)])
        other = Key(name="outside.example", x=OTHER.public.x, role=Role.WITNESS)
        both = KeyEvents(events=(KeyEvent(change=KeyChange.ADD, key=other, effective=START), gone))
        ledger.append([authorised(ledger, both)])
        assert ledger.governance().witnesses == 1
        assert isinstance(ledger.governance().policy, type(ledger.header)) and ledger.header.floors == FLOORS
        assert PolicyChange not in {leaf.kind for leaf in ledger.leaves()}


# ------------------------------------------------------------------------------ whose cosignatures count

SEEN, SECOND_SEEN, NEXT_SEEN = (digest("key", name) for name in ("witness", "second witness", "next witness"))
NOW = START + 1000


def witnessed(forged: Forger, *cosigned: tuple[bytes, str, int], **second: int) -> Verification:
    """Two must cosign, and these do; `second` says until when the second witness's key is valid, or when replaced."""
    named = add(SECOND_SEEN, 4, "second", START)
    named[2] |= {5: second["until"]} if "until" in second else {}
    forged.append(KEYS, forged.governing(KEYS, {1: [named]}, OWNER))
    sealed(forged.path, LEDGER)
    forged.append(TERMS, forged.governing(TERMS, {1: 2}, OWNER))
    sealed(forged.path, LEDGER)
    if "replaced" in second:
        change = {1: [rotate(SECOND_SEEN, NEXT_SEEN, 4, "next", second["replaced"])]}
        forged.append(KEYS, forged.governing(KEYS, change, OWNER))
        sealed(forged.path, LEDGER)
    for each in cosigned:
        forged.cosign(*each)
    return verify(forged.path, trust=PINNED, now=NOW)


FIRST_COSIGNED = (SEEN, "witness.example", START)


def test_two_witnesses_are_two_keys_that_count(forged: Forger) -> None:
    assert witnessed(forged, FIRST_COSIGNED, (SECOND_SEEN, "second", START)).trusted


@pytest.mark.parametrize(
    ("code", "cosigned", "second"),
    [
        pytest.param("verify.too-few-cosignatures", [(SECOND_SEEN, "second", START), (NEXT_SEEN, "next", START)],
                     {"replaced": START}, id="one that was replaced, and its successor"),
        pytest.param("verify.too-few-cosignatures", [(SECOND_SEEN, "second", START), (NEXT_SEEN, "next", START + 60)],
                     {"replaced": START + 60}, id="one before it is replaced, and its successor after"),
        pytest.param("verify.too-few-cosignatures", [FIRST_COSIGNED, (SECOND_SEEN, "second", START + 70)],
                     {"replaced": START + 60}, id="one after it was replaced"),
        pytest.param("verify.too-few-cosignatures", [FIRST_COSIGNED, (NEXT_SEEN, "next", START)],
                     {"replaced": START + 60}, id="one before it takes over"),
        pytest.param("verify.too-few-cosignatures", [FIRST_COSIGNED, (SEEN, "witness.example", START + 1)], {}, id="one twice"),
        pytest.param("verify.too-few-cosignatures", [FIRST_COSIGNED, (SEEN, "second", START)], {}, id="by another name"),
        pytest.param("verify.cosignature-invalid", [FIRST_COSIGNED, (SECOND_SEEN, "second", NOW + 121)], {}, id="in the future"),
        pytest.param("verify.cosigned-before-last-leaf", [FIRST_COSIGNED, (SECOND_SEEN, "second", START - 121)], {}, id="too early"),
    ],
)  # fmt: skip
def test_dead_keys_and_successors_do_not_make_a_quorum(
    forged: Forger, code: str, cosigned: list[tuple[bytes, str, int]], second: dict[str, int]
) -> None:
    assert code_of(witnessed(forged, *cosigned, **second)) == code


def test_a_cosignature_after_its_key_expired_does_not_count(forged: Forger) -> None:
    late = (SECOND_SEEN, "second", START + 50)
    assert code_of(witnessed(forged, FIRST_COSIGNED, late, until=START + 50)) == "verify.too-few-cosignatures"


def test_a_successor_counts_once_it_has_taken_over(forged: Forger) -> None:
    assert witnessed(forged, FIRST_COSIGNED, (NEXT_SEEN, "next", START + 5), replaced=START).trusted


@pytest.mark.parametrize("label", ["second", "next"])
def test_a_witness_of_the_auditor_and_its_successor_are_one(forged: Forger, label: str) -> None:
    """Whatever the two keys are called in the ring, and whatever it says of a quorum."""
    first, old, new = (key(name) for name in ("witness", "second witness", "next witness"))
    mine = ring(OWNED, (first, "first", "witness"), (old, "second", "witness"))
    mine.rotate(old.public.id, new.public, at=START + 60, label=label)

    def judged(*cosigned: tuple[bytes, str, int], quorum: int | None = None) -> Verification:
        mine.quorum, text = quorum, forged.sql("SELECT text FROM checkpoint ORDER BY size DESC LIMIT 1")[0][0]
        for each in cosigned:
            forged.cosign(*each)
        found = verify(forged.path, trust=Trust(ring=mine), now=NOW)
        forged.sql("UPDATE checkpoint SET text = ? WHERE size = (SELECT max(size) FROM checkpoint)", text)
        return found

    before, after = (SECOND_SEEN, "second", START), (NEXT_SEEN, label, START + 70)
    for quorum in (None, 2):
        assert judged((SEEN, "first", START), before, quorum=quorum).trusted
        assert judged((SEEN, "first", START), after, quorum=quorum).trusted
        for few in ((before, after), ((SEEN, "first", START), (SECOND_SEEN, "second", START + 70))):
            assert code_of(judged(*few, quorum=quorum)) == "verify.too-few-trusted-cosignatures"
    for wrong in ((SEEN, "first", NOW + 121), (SEEN, "first", START - 121)):
        assert code_of(judged(wrong, before)) == "verify.too-few-trusted-cosignatures"
    said = judged((SEEN, "first", START)).problem
    assert said is not None and '"quorum"' in said.reason
