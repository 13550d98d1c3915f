"""What a policy asks to sign: presets on the strict side, a digest that adopting routing does not change."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.admit.attestation import Descriptor, commit, subject_tag
from lamina.admit.terms import PolicyTerms, SigningTerms, floors_hash, preset, profile_text
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.policy import Policy

WINDOW = {"not_before": 1_767_225_600, "expires": 1_798_761_600}


def policy(
    classes: str = "", *, origin: str = "example.org/corpus", floors: str = "{clip_norm = 0.1, noise_multiplier = 0.3}"
) -> Policy:
    usual = """
        [class.sensitive]
        population = 1000
        clip_norm = 0.29
        epsilon = 1.0
        profile = {top = 0.25}
        [class.Standard_2]
        population = 1000
        noise_multiplier = 1.1
        [class.open]
        public = true
    """
    return Policy.parse(f"[corpus]\norigin = {origin!r}\ndelta = 1e-6\nfloors = {floors}\n" + (classes or usual))


# ------------------------------------------------------------------------------ presets


def test_presets_of_the_three_kinds() -> None:
    made = policy()
    clip, noise = preset(made, "sensitive")
    assert clip == 290_000
    assert epsilon_of_noise_multiplier(noise / 1e6, 1e-6) <= 1.0 < epsilon_of_noise_multiplier((noise - 1) / 1e6, 1e-6)
    assert preset(made, "Standard_2") == (1_000_000, 1_100_000)
    assert preset(made, "open") == (0, 0)
    with raises_code("admit.class-unknown"):
        preset(made, "other")


def test_a_class_without_any_bound_has_nothing_to_sign() -> None:
    made = policy("[class.loose]\npopulation = 10\n", floors="{clip_norm = 0.1}")
    with raises_code("admit.class-without-bound"):
        preset(made, "loose")


def test_the_floor_bounds_a_class_that_says_nothing() -> None:
    made = policy("[class.loose]\npopulation = 10\n")
    assert preset(made, "loose") == (1_000_000, 300_000)


@settings(max_examples=30)
@given(st.floats(0.01, 60.0), st.floats(1e-9, 1e-3), st.floats(1e-5, 1e6))
def test_a_preset_is_never_more_permissive_than_its_class(epsilon: float, delta: float, clip: float) -> None:
    made = Policy.from_dict(
        {
            "corpus": {"origin": "o", "delta": delta},
            "class": {"a": {"population": 10, "epsilon": epsilon, "clip_norm": clip}},
        }
    )
    c, z = preset(made, "a")
    assert c / 1e6 <= clip < (c + 1) / 1e6 * (1 + 1e-12)
    assert epsilon_of_noise_multiplier(z / 1e6, delta) <= epsilon
    assert z == 1 or epsilon_of_noise_multiplier((z - 1) / 1e6, delta) > epsilon


# ------------------------------------------------------------------------------ the digest of the floors


def test_the_digest_is_over_origin_and_floors() -> None:
    floors = {"clip_norm": 0.1, "noise_multiplier": 0.3}
    pairs = [cbor2.dumps(k) + (cbor2.dumps(v) if k == "origin" else b"\xa2" + _floors(floors)) for k, v in
             (("floors", floors), ("origin", "example.org/corpus"))]  # fmt: skip
    assert floors_hash(policy()) == hashlib.sha256(b"\xa2" + b"".join(pairs)).digest()


def _floors(floors: dict[str, float]) -> bytes:
    order = sorted(floors, key=cbor2.dumps)
    return b"".join(cbor2.dumps(key) + cbor2.dumps(floors[key], canonical=True) for key in order)


def test_what_changes_the_digest_and_what_does_not() -> None:
    """Classes and depth profiles may come and go without new credentials; origin and floors may not."""
    usual = floors_hash(policy())
    routed = policy("[class.sensitive]\npopulation = 9\nepsilon = 0.5\nprofile = {band = [0.5, 1.0]}\n")
    assert floors_hash(routed) == usual
    others = {
        floors_hash(policy(origin="example.org/other")),
        floors_hash(policy(floors="{clip_norm = 0.1, noise_multiplier = 0.31}")),
        floors_hash(policy(floors="{clip_norm = 0.11, noise_multiplier = 0.3}")),
        floors_hash(policy(floors="{clip_norm = 0.1}")),
        floors_hash(policy(floors="{noise_multiplier = 0.3}")),
        floors_hash(policy(floors="{}")),
    }
    assert len(others | {usual}) == 7


# ------------------------------------------------------------------------------ terms


def test_terms_become_a_descriptor() -> None:
    terms = SigningTerms.make(policy(), "sensitive", **WINDOW)
    made = terms.descriptor(contributor=bytes(32), nonce=bytes(16), commitment=bytes(32), items=3)
    assert isinstance(made, Descriptor)
    assert (made.audience, made.policy) == ("example.org/corpus", floors_hash(policy()))
    assert (made.admissibility, made.data_class) == ("sensitive", "sensitive")
    assert (made.clip_norm, made.noise_multiplier) == preset(policy(), "sensitive")
    assert made.profile == "top=0.25"


def test_depth_is_signed_only_where_it_is_restricted_and_wanted() -> None:
    assert SigningTerms.make(policy(), "Standard_2", **WINDOW).profile is None
    assert SigningTerms.make(policy(), "sensitive", profile=False, **WINDOW).profile is None
    assert SigningTerms.make(policy(), "Standard_2", **WINDOW).data_class == "standard-2"


def test_a_stricter_bound_may_be_signed_and_a_looser_one_not() -> None:
    made = policy()
    strict = SigningTerms.make(made, "sensitive", clip_norm=0.1234567, noise_multiplier=9.0000001, **WINDOW)
    assert (strict.clip_norm, strict.noise_multiplier) == (123_456, 9_000_001)
    for bound, word in (
        ({"clip_norm": 0.3}, "admit.clip-norm-above-class"),
        ({"noise_multiplier": 1.0}, "admit.noise-below-class"),
        ({"clip_norm": 0.0999}, "admit.clip-norm-below-floor"),
        ({"clip_norm": float("nan")}, "admit.bound-not-signable"),
        ({"clip_norm": -1.0}, "admit.bound-not-signable"),
        ({"noise_multiplier": float("inf")}, "admit.bound-not-signable"),
        ({"noise_multiplier": 2e9}, "admit.bound-not-signable"),
    ):
        with raises_code(word):
            SigningTerms.make(made, "sensitive", **WINDOW, **bound)
    with raises_code("admit.bound-for-public-class"):
        SigningTerms.make(made, "open", clip_norm=1.0, **WINDOW)
    assert SigningTerms.make(made, "open", **WINDOW).clip_norm == 0


def test_what_no_descriptor_could_hold_is_refused_at_once() -> None:
    corpus = policy().corpus.model_copy(update={"origin": "o" * 256})  # which no policy that is read may have
    with raises_code("admit.descriptor-field-invalid"):
        SigningTerms.make(policy().model_copy(update={"corpus": corpus}), "sensitive", **WINDOW)
    with raises_code("admit.descriptor-field-invalid"):
        SigningTerms.make(policy(), "sensitive", not_before=5, expires=5)
    with raises_code("admit.descriptor-field-invalid"):
        SigningTerms.make(policy(), "sensitive", data_class="ECG", **WINDOW)


def test_long_profiles_are_signed_as_a_digest() -> None:
    short, long = DepthProfile.layers(["a.b", -1]), DepthProfile.layers([f"layer.{i}" for i in range(200)])
    assert profile_text(short) == "layers=a.b,-1"
    assert profile_text(long).startswith("sha256:")
    assert len(profile_text(long)) == 71
    assert profile_text(long) != profile_text(DepthProfile.layers([f"layer.{i}" for i in range(199)]))


# ------------------------------------------------------------------------------ commitments and tags


def test_a_commitment_is_the_salted_digest_however_the_payload_comes(tmp_path: Path) -> None:
    nonce, payload = bytes(range(16)), bytes(3_000_000)
    (tmp_path / "payload.bin").write_bytes(payload)
    expected = hashlib.sha256(nonce + payload).digest()
    assert commit(nonce, payload) == commit(nonce, tmp_path / "payload.bin") == expected
    assert commit(bytes(16), payload) != expected
    with raises_code("admit.nonce-size"):
        commit(bytes(15), payload)
    with raises_code("admit.file-unreadable"):
        commit(nonce, tmp_path / "missing")


def test_a_subject_tag_is_an_hmac() -> None:
    key = bytes(range(32))
    assert subject_tag(key, "patient 17") == hmac.new(key, b"patient 17", hashlib.sha256).hexdigest()
    assert subject_tag(key, " patient 17\n") == subject_tag(key, "patient 17")
    assert subject_tag(key, "Zoe\u0308") == subject_tag(key, "Zo\u00eb")  # two ways to write one letter
    assert subject_tag(bytes(32), "patient 17") != subject_tag(key, "patient 17")
    with raises_code("admit.subject-key-too-short"):
        subject_tag(b"short", "patient 17")
    for nobody in ("", "  "):
        with raises_code("admit.subject-empty"):
            subject_tag(key, nobody)


# ------------------------------------------------------------------------------ the keys of [corpus] that the gate reads


def corpus(**keys: Any) -> Policy:
    table = {"origin": "x", "delta": 1e-5, **keys}
    return Policy.from_dict({"corpus": table, "class": {"a": {"population": 10, "epsilon": 1.0, "clip_norm": 9.0}}})


def test_an_epoch_is_a_day_unless_said_otherwise() -> None:
    assert corpus().corpus.epoch == 86_400
    assert corpus(epoch=60).corpus.epoch == 60
    for wrong in (0, -1, 1.5, "1 d"):
        with raises_code("plan.policy-invalid"):
            corpus(epoch=wrong)


def test_floors_only_rise() -> None:
    now = {"clip_norm": 1.0, "noise_multiplier": 0.5}
    fine: list[dict[str, float]] = [{}, {"clip_norm": 1.0}, {"clip_norm": 0.1, "noise_multiplier": 0.5}]
    assert len(corpus(floors=now, earlier_floors=fine).corpus.earlier_floors) == 3
    for wrong in ({"clip_norm": 1.1}, {"noise_multiplier": 0.6}):
        with raises_code("plan.policy-invalid"):
            corpus(floors=now, earlier_floors=[wrong])
    with raises_code("plan.policy-invalid"):
        corpus(earlier_floors=[{"clip_norm": 1.0}])
    with raises_code("plan.policy-invalid"):
        corpus(floors=now, earlier_floors=[{"clipnorm": 1.0}])


def test_the_digests_of_all_floors_are_accepted_and_no_other() -> None:
    old, older, never = {"clip_norm": 0.5}, {"clip_norm": 0.25}, {"clip_norm": 0.3}
    policy = corpus(floors={"clip_norm": 1.0}, earlier_floors=[old, older])
    digests = PolicyTerms(policy).digests
    assert digests == {floors_hash(corpus(floors=f)) for f in ({"clip_norm": 1.0}, old, older)}
    assert floors_hash(corpus(floors=never)) not in digests
    assert floors_hash(corpus(floors={"clip_norm": 1.0}, origin="y")) not in digests
