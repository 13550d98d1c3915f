"""`lamina attest`: signs a folder, says what was promised, and does not sign twice."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from asking import Call, answer, refused, succeeded
from c2pa_file import signed_sound

from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.admit.attestation import Attestation, Descriptor, subject_tag
from lamina.cli.open_ledger import contribution_digest
from lamina.release.reconciliation import anchor_file
from lamina.sign.keys import PrivateKey, parse_time

POLICY = """
[corpus]
origin = "example.org/corpus"
delta = 1e-6
[class.sensitive]
population = 100
epsilon = 1.0
profile = { top = 0.25 }
[class.standard]
population = 100
epsilon = 4.0
[class.open]
public = true
"""


@pytest.fixture
def call(lamina: Call) -> Call:
    """`lamina attest policy.toml …` in a folder with a policy, a key and three contributions."""
    Path("policy.toml").write_text(POLICY, encoding="utf-8")
    PrivateKey.generate().save("alice.key", None)
    for name in ("p0", "p1", "p2"):
        Path("data", name).mkdir(parents=True)
        np.savez(Path("data", name, "payload.npz"), x=np.zeros((2, 3), dtype=np.float32))
    return partial(lamina, "attest", "policy.toml")


SIGN = ("data", "--key", "alice.key", "--class", "sensitive")


def read(name: str) -> tuple[Descriptor, Attestation]:
    described = Descriptor.decode(Path("data", name, "descriptor.cbor").read_bytes())
    return described, Attestation.decode(Path("data", name, "attestation.cose").read_bytes())


def test_a_folder_is_signed_once(call: Call) -> None:
    key = PrivateKey.load("alice.key", None)
    found = answer(call(*SIGN, "--json"))
    assert (found["signed"], found["kept"], found["refused"]) == (3, 0, [])
    assert (found["contributor"], found["audience"]) == (key.public.name, "example.org/corpus")
    for name in ("p0", "p1", "p2"):
        described, claims = read(name)
        assert claims.signed_by(key.public, described.digest())
        assert claims.mismatch(described) is None
        assert (described.items, described.profile) == (2, "top=0.25")
    figures = found["classes"]["sensitive"]
    described = read("p0")[0]
    assert figures["noise_multiplier"] * 1e6 == described.noise_multiplier
    assert figures["epsilon"] == epsilon_of_noise_multiplier(figures["noise_multiplier"], 1e-6) <= 1.0
    again = answer(call(*SIGN, "--json"))
    assert (again["signed"], again["kept"]) == (0, 3)
    forced = answer(call(*SIGN, "--force", "--json"))
    assert (forced["signed"], forced["kept"]) == (3, 0)


def test_what_people_read(call: Call) -> None:
    printed = succeeded(call(*SIGN))
    assert "3 signed, 0 kept, 0 refused" in printed
    for word in ("example.org/corpus", "sensitive", "4.224679", "1.0000", "top=0.25"):
        assert word in printed


def test_one_contribution_and_options(call: Call) -> None:
    found = answer(
        call(
            "data/p1", "--key", "alice.key", "--class", "standard", "--data-class", "ecg", "--clip-norm", "0.5",
            "--noise-multiplier", "3", "--valid-from", "2026-01-01", "--expires", "2099-01-01", "--anchor", "ab" * 32,
            "--json",
        )
    )  # fmt: skip
    assert found["signed"] == 1
    described, _ = read("p1")
    assert (described.admissibility, described.data_class) == ("standard", "ecg")
    assert (described.clip_norm, described.noise_multiplier) == (500_000, 3_000_000)
    assert (described.not_before, described.expires) == (parse_time("2026-01-01"), parse_time("2099-01-01"))
    assert described.anchor == b"\xab" * 32
    assert described.profile is None
    assert not Path("data/p0/descriptor.cbor").exists()


def test_classes_and_subjects_from_the_list(call: Call) -> None:
    Path("data/contributions.csv").write_text(
        "id,class,subject\np0,sensitive,ann\np1,open,bob\np2,standard,cid\n", encoding="utf-8"
    )
    Path("subject.key").write_text("07" * 32 + "\n", encoding="ascii")
    found = answer(call("data", "--key", "alice.key", "--subject-key", "subject.key", "--json"))
    assert found["signed"] == 3
    assert set(found["classes"]) == {"sensitive", "open", "standard"}
    assert found["classes"]["open"]["epsilon"] is None
    assert read("p1")[0].noise_multiplier == 0
    assert read("p2")[1].tag == subject_tag(b"\x07" * 32, "cid")
    code, _, complaint = call("data", "--key", "alice.key", "--json")
    assert code == 0
    assert "without --subject-key" in complaint


def test_anchors_from_a_table(call: Call) -> None:
    rows = "".join(f"p{i},{bytes([i]).hex() * 32}\n" for i in range(3))
    Path("anchors.csv").write_text("id,anchor\n" + rows, encoding="utf-8")
    assert answer(call(*SIGN, "--anchor", "anchors.csv", "--json"))["signed"] == 3
    assert read("p2")[0].anchor == b"\x02" * 32
    for words in ("zz" * 32, "ab" * 32, "ab"):  # one digest for three contributions, or none at all
        assert call(*SIGN, "--anchor", words)[0] == 1
    Path("anchors.csv").write_text("id,anchor\np0,12\n", encoding="utf-8")
    refused(call(*SIGN, "--anchor", "anchors.csv"), "cli.anchor-malformed")


def test_anchors_from_c2pa_manifests(call: Call) -> None:
    """In a table by files beside it; the same file names the contribution to a ledger."""
    Path("list").mkdir()
    for i in range(2):
        Path(f"list/scan{i}.wav").write_bytes(signed_sound(bytes([i, 1]) * 50))
    Path("list/scan1.json").write_bytes(anchor_file(Path("list/scan1.wav")))
    rows = f"p0,scan0.wav\np1,scan1.json\np2,{'02' * 32}\n"
    Path("list/anchors.csv").write_text(f"id,anchor\n{rows}", encoding="utf-8")
    assert answer(call(*SIGN, "--anchor", "list/anchors.csv", "--json"))["signed"] == 3
    anchors = [read(f"p{i}")[0].anchor for i in range(3)]
    assert len(set(anchors)) == 3 and anchors[2] == b"\x02" * 32
    assert [contribution_digest(f"list/scan{i}.wav") for i in range(2)] == [(each or b"").hex() for each in anchors[:2]]
    Path("list/scan1.json").write_text("{}")
    refused(call(*SIGN, "--anchor", "list/anchors.csv"), "release.c2pa-not-bound")


def test_one_that_fails_is_one_and_makes_the_code_1(call: Call) -> None:
    Path("data/p1/payload.npz").write_bytes(b"broken")
    code, printed, _ = call(*SIGN, "--json")
    found = json.loads(printed)
    assert code == 1
    assert (found["signed"], [each["id"] for each in found["refused"]]) == (2, ["p1"])
    assert "npz" in found["refused"][0]["reason"]
    code, printed, _ = call(*SIGN)
    assert code == 1
    assert "p1: " in printed


def test_a_dry_run_signs_nothing_and_needs_no_key(call: Call) -> None:
    found = answer(call("data", "--class", "sensitive", "--dry-run", "--json"))
    assert (found["contributor"], found["dry_run"], found["signed"]) == (None, True, 3)
    assert found["classes"]["sensitive"]["clip_norm"] == 1.0
    assert "nothing was signed" in call("data", "--class", "sensitive", "--dry-run")[1]
    assert not Path("data/p0/descriptor.cbor").exists()
    answer(call(*SIGN, "--json"))
    printed = call("data", "--class", "sensitive", "--dry-run")[1]
    assert "3 kept: signed by another key" in printed
    assert "without --key, signatures" in printed


def contents() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(Path("data").rglob("*")) if path.is_file()}


def mixed(call: Call) -> None:
    """p0 as asked, p1 stricter, p2 of another key, p3 new, p4 without a payload."""
    PrivateKey.generate().save("bob.key", None)
    for name in ("p3", "p4"):
        Path("data", name).mkdir()
    np.savez("data/p3/payload.npz", x=np.zeros((2, 3), dtype=np.float32))
    rest = ("--class", "sensitive", "--json")
    answer(call("data/p0", "--key", "alice.key", *rest))
    answer(call("data/p1", "--key", "alice.key", "--noise-multiplier", "9", *rest))
    answer(call("data/p2", "--key", "bob.key", *rest))


def test_what_is_stricter_or_of_another_key_is_kept_and_named(call: Call) -> None:
    mixed(call)
    before = contents()
    code, printed, _ = call(*SIGN)
    assert code == 1  # p4
    told = "1 signed, 1 kept, 1 kept: stricter than asked, 1 kept: signed by another key, 1 refused"
    assert told in printed
    assert "kept: stricter than asked (--force replaces them): p1" in printed
    assert "kept: signed by another key (--force replaces them): p2" in printed
    assert contents().items() >= before.items()
    assert read("p1")[0].noise_multiplier == 9_000_000
    found = json.loads(call(*SIGN, "--json")[1])
    assert (found["signed"], found["kept"], found["stricter"], found["another_key"]) == (0, 2, ["p1"], ["p2"])
    assert found["replaced"] == {"another_key": 0, "stricter": 0}


def test_force_says_what_it_replaced(call: Call) -> None:
    mixed(call)
    code, printed, _ = call(*SIGN, "--force", "--dry-run")
    assert "replaced: 1 of another key, 1 with a stricter bound" in printed
    code, printed, _ = call(*SIGN, "--force")
    assert code == 1
    assert "4 signed, 0 kept, 1 refused" in printed
    assert "replaced: 1 of another key, 1 with a stricter bound" in printed
    found = json.loads(call(*SIGN, "--force", "--json")[1])
    assert found["replaced"] == {"another_key": 0, "stricter": 0}


@pytest.mark.parametrize("words", [(), ("--force",), ("--clip-norm", "0.5"), ("--no-profile",)])
def test_a_dry_run_has_the_figures_of_the_real_one(words: tuple[str, ...], call: Call) -> None:
    mixed(call)
    before = contents()
    code, printed, _ = call(*SIGN, *words, "--dry-run", "--json")
    assert contents() == before
    told = json.loads(printed)
    done_code, printed, _ = call(*SIGN, *words, "--json")
    done = json.loads(printed)
    assert (told.pop("dry_run"), done.pop("dry_run")) == (True, False)
    for each in (told, done):  # a second may have passed
        each["classes"]["sensitive"] |= {"not_before": "", "expires": ""}
    assert (told, code) == (done, done_code)
    assert contents() != before


def test_many_are_not_all_named(call: Call) -> None:
    PrivateKey.generate().save("bob.key", None)
    for number in range(3, 9):
        Path("data", f"p{number}").mkdir()
        Path("data", f"p{number}", "payload.csv").write_text("1\n", encoding="ascii")
    answer(call(*SIGN, "--json"))
    printed = call("data", "--key", "bob.key", "--class", "sensitive")[1]
    assert "9 kept: signed by another key" in printed
    assert "p4, … and 4 more" in printed
    assert "p5" not in printed


def test_signing_anew_keeps_a_stricter_bound_and_says_so(call: Call) -> None:
    mixed(call)
    np.savez("data/p1/payload.npz", x=np.ones((4, 3), dtype=np.float32))
    _, printed, _ = call(*SIGN)
    assert "2 signed, 1 kept, 1 kept: signed by another key" in printed
    assert "1 of the signed keep their stricter bound or depth" in printed
    assert (read("p1")[0].noise_multiplier, read("p1")[0].items) == (9_000_000, 4)


def test_a_window_in_the_past_is_misuse_unless_forced(call: Call) -> None:
    past = ("--valid-from", "2025-01-01", "--expires", "2025-06-01")
    code, printed, complaint = call(*SIGN, *past)
    assert (code, printed) == (2, "")
    assert "2025-06-01" in complaint
    assert not Path("data/p0/descriptor.cbor").exists()
    assert answer(call(*SIGN, *past, "--force", "--json"))["signed"] == 3
    assert read("p0")[0].expires == parse_time("2025-06-01")


def test_a_class_may_be_said_twice_if_it_is_the_same(call: Call) -> None:
    Path("data/contributions.csv").write_text("id,class\np0,sensitive\np1,open\np2,standard\n", encoding="utf-8")
    assert answer(call("data/p0", *SIGN[1:], "--json"))["signed"] == 1
    for path in ("data/p1", "data"):
        refused(call(path, *SIGN[1:]), "cli.class-differs-from-listing")
    assert not Path("data/p1/descriptor.cbor").exists()


def test_a_sealed_key_is_opened(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    PrivateKey.generate().save("bob.key", b"correct horse")
    words = ("data", "--key", "bob.key", "--class", "sensitive")
    refused(call(*words), "key.passphrase-missing")
    Path("pass").write_text("correct horse\n", encoding="ascii")
    assert call(*words, "--passphrase-file", "pass")[0] == 0
    monkeypatch.setenv("LAMINA_PASSPHRASE", "wrong")
    refused(call(*words), "key.private-not-opened")
    monkeypatch.setenv("LAMINA_PASSPHRASE", "correct horse")
    _code, printed, complaint = call(*words, "--json")
    assert json.loads(printed)["kept"] == 3
    assert "correct horse" not in printed + complaint


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("data", "--key", "alice.key", "--class", "nobody"), "no class"),
        ((*SIGN, "--clip-norm", "5"), "above"),
        ((*SIGN, "--expires", "2001-01-01"), "validity"),
        ((*SIGN, "--expires", "soon"), "not a time"),
        ((*SIGN, "--subject-key", "alice.key"), "needs a column `subject`"),
        (("none", "--key", "alice.key", "--class", "sensitive"), "cannot list"),
        (("data", "--key", "none.key", "--class", "sensitive"), "cannot read"),
    ],
)
def test_refusals_sign_nothing(words: tuple[str, ...], told: str, call: Call) -> None:
    code, printed, complaint = call(*words, "--json")
    assert code == 1
    assert told in json.loads(printed)["refused"]
    assert told in complaint
    assert not list(Path("data").rglob("*.cbor"))


@pytest.mark.parametrize("words", [("data", "--class", "sensitive"), ("data", "--key", "alice.key"), ()])
def test_misuse_is_two(words: tuple[str, ...], call: Call) -> None:
    code, printed, complaint = call(*words)
    assert code == 2
    assert printed == ""
    assert "Usage" in complaint


def test_control_characters_in_a_name_do_not_reach_the_screen(call: Call) -> None:
    Path("data", "p\x1b[2J").mkdir()
    code, printed, _ = call(*SIGN)
    assert code == 1
    assert "\x1b" not in printed
    assert r"p\x1b[2J" in printed


# ------------------------------------------------------------------------------ one bound, one ledger


def named_policy(name: str) -> None:
    Path("policy.toml").write_text(POLICY.replace("[corpus]", f'[corpus]\nledger = "{name}"'), encoding="utf-8")


def test_what_the_policy_names_is_signed_and_not_taken_back(call: Call) -> None:
    answer(call(*SIGN, "--json"))
    assert read("p0")[1].ledger is None
    named_policy("07" * 32)
    found = answer(call(*SIGN, "--json"))
    assert (found["signed"], found["kept"], found["ledger"]) == (3, 0, "07" * 32)
    assert read("p0")[1].ledger == b"\7" * 32
    assert answer(call(*SIGN, "--json"))["kept"] == 3
    Path("policy.toml").write_text(POLICY, encoding="utf-8")  # a policy that names none loosens nothing
    assert answer(call(*SIGN, "--json"))["kept"] == 3
    np.savez(Path("data", "p1", "payload.npz"), x=np.ones((2, 3), dtype=np.float32))
    assert answer(call(*SIGN, "--json"))["signed"] == 1
    assert read("p1")[1].ledger == b"\7" * 32
    named_policy("08" * 32)
    code, printed, _ = call(*SIGN, "--json")
    assert code == 1 and "second bound" in printed
    assert read("p0")[1].ledger == b"\7" * 32
    answer(call(*SIGN, "--force", "--json"))
    assert read("p0")[1].ledger == b"\x08" * 32
    named_policy("08")
    code, _, told = call(*SIGN)
    assert code == 1 and "64 hexadecimal digits" in told
