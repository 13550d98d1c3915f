"""The gate: what it admits, what it is held to, and what attacks on it come to."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from memory_register import MemoryRegister
from refusals import raises_code

from lamina.admit import reasons
from lamina.admit.contribution_sources import Contribution
from lamina.plan.depth_profile import DepthProfile
from lamina.sign.keys import PrivateKey, PublicKey

# ------------------------------------------------------------------------------------------- what is admitted


def test_good_ones_of_every_class_are_admitted(desk: Any) -> None:
    offered = [
        desk.offer("a"),
        desk.offer("b", "standard"),
        desk.offer("c", "open"),
        desk.offer("d", tag="ef" * 32),
        desk.offer("stricter", clip_norm=100_000, noise_multiplier=10**9),
    ]
    admission = desk.gate().review(offered)
    assert list(admission.ids) == ["a", "b", "c", "d", "stricter"]
    assert not admission.refused
    assert admission.to_dict()["classes"] == {"clinical": 3, "standard": 1, "open": 1}


def test_the_newer_name_of_the_algorithm_is_accepted(desk: Any) -> None:
    given = desk.resigned(desk.offer("a"), lambda header: header.__setitem__(1, -19))
    assert len(desk.gate().review([given])) == 1


def test_an_empty_source_is_an_empty_admission(desk: Any) -> None:
    for processes in (1, 2):
        admission = desk.gate(processes=processes).review([])
        assert len(admission) == 0 and not admission.refused
        assert "0 admitted" in admission.table()
        assert len(admission.recheck()) == 0
        assert list(admission.bounds) == []


def test_windows_hold_to_the_second(desk: Any) -> None:
    gate = desk.gate()
    skewed = desk.offer("a", not_before=desk.NOW + 120, issued_at=desk.NOW + 120)
    assert gate.check(skewed) is None
    assert gate.check(desk.offer("b", expires=desk.NOW + 1)) is None
    assert gate.check(desk.offer("c", expires=desk.NOW)).reason is reasons.EXPIRED  # type: ignore[union-attr]


def test_whoever_expires_during_the_review_does_not_enter(desk: Any) -> None:
    def slowly() -> Any:
        yield desk.offer("short", expires=desk.NOW + 5)
        desk.now += 10
        yield desk.offer("long")

    admission = desk.gate().review(slowly())
    assert list(admission.ids) == ["long"]
    assert [r.reason for r in admission.refused] == [reasons.EXPIRED]


def test_a_key_revoked_during_the_review_counts_no_more(desk: Any) -> None:
    def meanwhile() -> Any:
        yield desk.offer("a")
        desk.keys.revoke(desk.key.public.id, at=desk.NOW)

    assert [r.reason for r in desk.gate().review(meanwhile()).refused] == [reasons.REVOKED_KEY]


def test_who_is_refused_takes_nobodys_place(desk: Any) -> None:
    desk.policy = desk.policy_with(standard={"population": 1})
    given = desk.offer("first", "standard", tag="ab" * 32)
    copy = replace(given, id="copy")
    other = desk.offer("other", "clinical", tag="ab" * 32)
    third = desk.offer("third", "standard")
    admission = desk.gate().review([given, copy, other, third])
    assert [(r.id, r.reason) for r in admission.refused] == [
        ("copy", reasons.REPLAYED),
        ("other", reasons.DUPLICATE_SUBJECT),
        ("third", reasons.CLASS_FULL),
    ]
    # A replayed copy of somebody who is not let in for his subject does not speak for that subject.
    admission = desk.gate().review([replace(given, payload=b"damaged"), other, third])
    assert list(admission.ids) == ["other", "third"]


def test_nobody_takes_the_place_of_another_by_a_name_that_sorts_first(desk: Any) -> None:
    """Of two contributors neither is taken for the other; whom the ledger knows stays, and so does the first of one's own."""
    clinic = PrivateKey.generate()
    desk.keys.add(clinic.public, label="another clinic")
    honest, other, third = desk.offer("a001"), desk.offer("A001", key=clinic), desk.offer("\u0430001", key=clinic)
    bystander = desk.offer("b001")
    for order in ([other, honest], [honest, other], [third, other, honest]):
        admission = desk.gate().review([*order, bystander])
        assert list(admission.ids) == ["b001"]
        assert {r.reason for r in admission.refused} == {reasons.DUPLICATE_ID}
        assert {r.id for r in admission.refused} == {each.id for each in order}
    assert "'a001'" in desk.gate().review([other, honest]).refused[0].detail
    gate = desk.gate(register=MemoryRegister())
    assert list(gate.review([honest]).ids) == ["a001"]
    assert list(gate.review([third, other, honest, bystander]).ids) == ["a001", "b001"]
    assert list(desk.gate().review([third, other]).ids) == [third.id]
    # An id that is not admitted stands in nobody's way.
    assert list(desk.gate().review([replace(other, payload=b"damaged"), honest]).ids) == ["a001"]


# ------------------------------------------------------------------------------------------- floors and profiles


def test_what_was_signed_under_earlier_floors_is_held_to_those_in_force(desk: Any) -> None:
    old = desk.policy_with(floors={"clip_norm": 0.1, "noise_multiplier": 0.5})
    new = desk.policy_with(
        floors={"clip_norm": 0.5, "noise_multiplier": 1.0}, earlier_floors=[{"clip_norm": 0.1, "noise_multiplier": 0.5}]
    )
    forgetful = desk.policy_with(floors={"clip_norm": 0.5, "noise_multiplier": 1.0})
    desk.policy = old
    fine, low = desk.offer("fine"), desk.offer("low", clip_norm=200_000)
    assert len(desk.gate(policy=old).review([fine, low])) == 2
    admission = desk.gate(policy=new).review([fine, low])
    assert [(r.id, r.reason) for r in admission.refused] == [("low", reasons.CLIP_BELOW_FLOOR)]
    refused = desk.gate(policy=forgetful).review([fine]).refused
    assert [r.reason for r in refused] == [reasons.POLICY_MISMATCH]


def test_a_floor_is_met_as_it_was_written(desk: Any) -> None:
    """0.29 · 10⁶ is 289,999.99999999994 in floating point."""
    desk.policy = desk.policy_with(floors={"clip_norm": 0.29, "noise_multiplier": 0.57})
    gate = desk.gate()
    assert gate.check(desk.offer("a", clip_norm=290_000)) is None
    assert gate.check(desk.offer("b", clip_norm=289_999)).reason is reasons.CLIP_BELOW_FLOOR  # type: ignore[union-attr]


def test_the_preset_of_every_class_passes_its_own_floors(desk: Any) -> None:
    floors = {"clip_norm": 0.1234567, "noise_multiplier": 0.3000005}
    desk.policy = desk.policy_with(
        floors=floors,
        clinical={"clip_norm": 0.1234567, "epsilon": 5.0},
        standard={"clip_norm": 0.1234567, "noise_multiplier": 0.3000005},
    )
    admission = desk.gate().review([desk.offer("a"), desk.offer("b", "standard")])
    assert not admission.refused


def test_routing_is_adopted_without_new_credentials(desk: Any) -> None:
    """Signed without a profile under a policy without one; then the policy restricts the class."""
    before = desk.policy_with(clinical={"profile": "all"})
    desk.policy = before
    given = desk.offer("a", profile=None)
    assert len(desk.gate().review([given])) == 1
    after = desk.policy_with(clinical={"profile": {"top": 0.25}})
    admission = desk.gate(policy=after).review([given])
    assert len(admission) == 1
    assert admission.profile("clinical") == "top 25 %"
    assert not admission[0].profile_signed


def test_a_signed_profile_is_a_limit(desk: Any) -> None:
    given = desk.offer("a")
    assert desk.gate().review([given])[0].profile_signed
    narrower = desk.policy_with(clinical={"profile": {"top": 0.125}})
    assert len(desk.gate(policy=narrower).review([given])) == 1
    for wider in ({"top": 0.5}, "all", {"blocks": [0, 1]}):
        refused = desk.gate(policy=desk.policy_with(clinical={"profile": wider})).review([given]).refused
        assert [r.reason for r in refused] == [reasons.PROFILE_MISMATCH]


def test_a_profile_may_be_signed_as_a_table_or_as_its_text(desk: Any) -> None:
    gate = desk.gate()
    for text in ('{"top":0.25}', '{"top": 0.5}', "top=0.25", DepthProfile.top(0.5).text(), DepthProfile.all().text()):
        assert gate.check(desk.offer("a", profile=text)) is None, text
    for text in ("top=0.125", "top=0.125;heads=0", "TOP=0.25", "top=0.25 ", "{}", '"all"'):
        refusal = gate.check(desk.offer("a", profile=text))
        assert refusal is not None and refusal.reason is reasons.PROFILE_MISMATCH, text


def test_a_long_profile_is_compared_by_its_digest(desk: Any) -> None:
    names = [f"decoder.block.{i}.attention" for i in range(60)]
    desk.policy = desk.policy_with(clinical={"profile": {"layers": names}})
    given = desk.offer("a", profile=desk.terms().profile)
    assert desk.terms().profile.startswith("sha256:")
    assert len(desk.gate().review([given])) == 1
    other = desk.policy_with(clinical={"profile": {"layers": names[:-1]}})
    refused = desk.gate(policy=other).review([given]).refused
    assert [r.reason for r in refused] == [reasons.PROFILE_MISMATCH]


# ------------------------------------------------------------------------------------------- attacks


def test_no_flipped_bit_is_admitted(desk: Any) -> None:
    gate, given = desk.gate(), desk.offer("a")
    assert desk.gate().check(given) is None
    chosen = random.Random(5)
    for name in ("descriptor", "attestation", "payload"):
        data = getattr(given, name)
        bits = chosen.sample(range(8 * len(data)), min(8 * len(data), 150))
        for bit in bits:
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            assert gate.check(replace(given, **{name: bytes(flipped)})) is not None, (name, bit)


def test_a_flood_costs_no_crypto(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is too large, nor what nobody's key signed, nor what a key of another role signed."""
    asked = []
    monkeypatch.setattr(PublicKey, "verify", lambda *given: asked.append(given))
    stranger, ledger = PrivateKey.generate(), PrivateKey.generate()
    desk.keys.add(ledger.public, label="ledger", role="ledger")
    flood = [
        replace(desk.offer("0"), descriptor=bytes(1 << 20)),
        replace(desk.offer("1"), attestation=bytes(1 << 20)),
        desk.offer("2", key=stranger),
        desk.offer("3", key=ledger),
    ]
    assert len(desk.gate().review(flood).refused) == 4
    assert not asked


def test_hostile_ids_are_shown_as_text(desk: Any) -> None:
    hostile = ["\x1b]0;owned\x07", "a\nb,admitted", "x" * 10_000, "\u202egpj.exe", "\ud800"]
    admission = desk.gate().review([replace(desk.offer("a"), id=id) for id in hostile])
    assert len(admission.refused) == len(hostile)
    for told in (admission.table(), json.dumps(admission.to_dict(), ensure_ascii=False)):
        assert told.replace("\n", "").isprintable()
    assert all(len(r.id) < 300 for r in admission.refused)


def test_secrets_are_not_shown(desk: Any) -> None:
    given = desk.offer("a")
    admission = desk.gate().review([given])
    nonce = admission.columns["nonce"][0].tobytes()
    for text in (repr(given), repr(admission), repr(admission[0]), admission.table(), json.dumps(admission.to_dict())):
        assert nonce.hex() not in text and repr(nonce)[2:-1] not in text


def test_wrong_types_are_named(desk: Any) -> None:
    with raises_code("admit.contribution-field-type"):
        Contribution("a", descriptor="text")  # type: ignore[arg-type]
    with raises_code("admit.contribution-field-type"):
        Contribution(1)  # type: ignore[arg-type]
    with raises_code("admit.not-a-contribution"):
        desk.gate().review(["a"])
    with raises_code("admit.processes-out-of-range"):
        desk.gate(processes=0)


def test_a_clock_that_goes_back_admits_nothing(desk: Any) -> None:
    gate, given = desk.gate(), desk.offer("a")
    admission = gate.review([given])
    desk.now -= 1
    for ask in (lambda: gate.review([given]), lambda: gate.check(given), admission.recheck):
        with raises_code("admit.clock-went-back"):
            ask()
    desk.now += 1.5
    assert gate.check(given) is None

    def back() -> Any:
        yield given
        desk.now -= 10

    with raises_code("admit.clock-went-back"):
        gate.review(back())


@pytest.mark.parametrize("time", [float("nan"), -1.0, 1e18])
def test_a_clock_that_makes_no_sense_admits_nothing(desk: Any, time: float) -> None:
    desk.now = time
    with raises_code("admit.clock-out-of-range"):
        desk.gate().review([])


def test_progress_is_told(desk: Any) -> None:
    seen: list[tuple[int, int | None]] = []
    offered = [Contribution(f"{i}") for i in range(300)]
    desk.gate().review(offered, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(128, 300), (256, 300), (300, 300)]
