"""Every refusal by its name: one bad contribution for each, between good ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_register import MemoryRegister
from signing_desk import NOW

from lamina.admit import reasons
from lamina.admit.attestation import MAX_ATTESTATION, MAX_DESCRIPTOR, attest
from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import AdmissionGate
from lamina.admit.reasons import REASONS, Reason
from lamina.admit.register import RegisterStatus
from lamina.admit.rows import Admitted
from lamina.sign.keys import PrivateKey

Case = Callable[[Any], Contribution | list[Contribution] | tuple[AdmissionGate, list[Contribution]]]
CASES: list[tuple[Reason, str, Case]] = []
LATER = {  # tests/admit/test_admission.py, tests/run/test_targets.py
    reasons.GONE, reasons.CHANGED, reasons.NOT_REPEATED, reasons.OUT_OF_REACH, reasons.NOT_TRAINABLE,
}  # fmt: skip

DOCS = Path(__file__).parents[2] / "docs" / "admission.md"


def case(reason: Reason) -> Callable[[Case], Case]:
    def note(function: Case) -> Case:
        CASES.append((reason, function.__name__, function))
        return function

    return note


# ------------------------------------------------------------------------------------------- one bad one for each


OFFERED: dict[Reason, list[dict[str, Any]]] = {  # what is signed otherwise
    reasons.BAD_ID: [{"id": ""}, {"id": "a\x1b[2J\nb"}, {"id": "é" * 128}, {"id": "\udcff"}],
    reasons.UNKNOWN_KEY: [{"key": PrivateKey.generate()}],
    reasons.WRONG_AUDIENCE: [{"audience": "example.org/other"}],
    reasons.NOT_YET_VALID: [{"not_before": NOW + 121}, {"issued_at": NOW + 121}],
    reasons.EXPIRED: [{"expires": NOW}],
    reasons.POLICY_MISMATCH: [{"policy": hashlib.sha256(b"lower floors").digest()}],
    reasons.UNKNOWN_CLASS: [{"admissibility": "invented"}],
    reasons.PUBLIC_BOUND: [{"admissibility": "open"}],
    reasons.PUBLIC_CLAIM: [{"clip_norm": 0, "noise_multiplier": 0}],
    reasons.CLIP_BELOW_FLOOR: [{"clip_norm": 99_999}],
    reasons.NOISE_BELOW_FLOOR: [{"noise_multiplier": 499_999}],
    reasons.CLIP_ABOVE_CLASS: [{"clip_norm": 2_000_001}],
    reasons.NOISE_BELOW_CLASS: [
        {"cls": "standard", "noise_multiplier": 1_999_999},
        {"cls": "standard", "admissibility": "clinical"},  # signed for the weaker class, offered to the stricter one
    ],
    reasons.PROFILE_MISMATCH: [
        {"profile": '{"top":0.125}'}, {"profile": "whatever you like"}, {"profile": '{"top":0.1,"top":1.0}'},
        {"profile": '{"top":' + "9" * 900 + "}"}, {"profile": "[" * 1000},
    ],
}  # fmt: skip
REPLACED: dict[Reason, list[dict[str, Any]]] = {  # what is exchanged after it was signed
    reasons.UNREADABLE: [{"payload": Path("/")}, {"payload": Path("/dev/zero")}],
    reasons.TOO_LARGE: [{"descriptor": bytes(MAX_DESCRIPTOR + 1)}, {"attestation": bytes(MAX_ATTESTATION + 1)}],
    reasons.NO_ATTESTATION: [{"attestation": None}, {"attestation": None, "descriptor": None}],
    reasons.NO_DESCRIPTOR: [{"descriptor": None}],
    reasons.NO_PAYLOAD: [{"payload": None}, {"payload": Path("/nowhere/payload.bin")}],
    reasons.MALFORMED: [{"attestation": b"\xff" * 100}],
    reasons.PAYLOAD_MISMATCH: [{"payload": b"other data"}],
}
RESIGNED: dict[
    Reason, list[Callable[[dict[Any, Any]], None]]
] = {  # another header, and a signature that is right for it
    reasons.MALFORMED: [
        lambda header: header.update({16: "application/other"}),  # of the right key, for another purpose
        lambda header: header.update({2: [258]}),  # a critical label
        lambda header: header[15].update({-65541: True}),  # public, and a bound
        lambda header: [header[15].pop(key) for key in range(-65542, -65536)],  # no terms at all
    ],
    reasons.WRONG_ALGORITHM: [lambda header: header.update({1: -7}), lambda header: header.update({1: 5})],
    reasons.MISMATCH: [
        lambda header: header[15].update({4: NOW + 10**6}),
        lambda header: header[15].update({7: bytes(16)}),  # a fresh cti for an old descriptor would pass as new
        lambda header: header[15].update({2: "contribution:" + "0" * 64}),
        lambda header: header[15].update({-65537: "standard"}),  # the terms of use: each is the descriptor's
        lambda header: header[15].update({-65538: "eeg"}),
        lambda header: header[15].update({-65539: 1_999_999}),
        lambda header: header[15].update({-65540: 5_000_000}),
        lambda header: header[15].update({-65539: 0, -65540: 0, -65541: True}),
        lambda header: header[15].update({-65542: "top=0.5"}),
        lambda header: header[15].pop(-65542),
        lambda header: header[15].update({-65543: bytes(32)}),
    ],
}
for table, make in (
    (OFFERED, lambda change: lambda desk: desk.offer(**{"id": "bad", **change})),
    (REPLACED, lambda change: lambda desk: replace(desk.offer("bad"), **change)),
    (RESIGNED, lambda change: lambda desk: desk.resigned(desk.offer("bad"), change)),
):
    CASES += [(reason, f"{i}", make(each)) for reason, changes in table.items() for i, each in enumerate(changes)]


@case(reasons.TOO_LARGE)
def large_payload(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    return desk.gate(max_payload=64), [desk.offer("bad", payload=bytes(65))]


def _naming(desk: Any, ledger: bytes | None) -> Contribution:
    """Under a policy that names a ledger, which others signed for."""
    desk.policy, desk.ledger = desk.policy_with(ledger="07" * 32), b"\7" * 32
    bad: Contribution = desk.offer("bad", ledger=ledger)
    return bad


@case(reasons.NOT_BOUND)
def for_no_ledger(desk: Any) -> Contribution:
    return _naming(desk, None)


@case(reasons.OTHER_LEDGER)
def for_another_ledger(desk: Any) -> Contribution:
    return _naming(desk, bytes(32))


@case(reasons.BAD_SIGNATURE)
def another_descriptor(desk: Any) -> Contribution:
    return replace(desk.offer("bad"), attestation=desk.offer("other").attestation)


@case(reasons.CHECK_FAILED)
def a_check_that_breaks(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    return _broken(desk.gate()), [desk.offer("bad", "standard")]


@case(reasons.DUPLICATE_ID)
def two_of_one_name(desk: Any) -> list[Contribution]:
    return [desk.offer("bad"), desk.offer("bad")]


for _name, _alike in {
    "case": ("Patient-1", "patient-1"), "composed": ("zo\u00eb", "zoe\u0308"), "width": ("\uff501", "p1"),
    "ligature": ("\ufb01n", "fin"), "cyrillic": ("\u0440\u0430t\u0456ent", "patient"), "greek": ("\u039f1", "O1"),
    "invisible": ("p\ufe0f1", "p1"), "sharp s": ("stra\u00dfe", "STRASSE"),
}.items():  # fmt: skip
    CASES.append(
        (reasons.DUPLICATE_ID, f"alike, {_name}", lambda desk, ids=_alike: [desk.offer(ids[0]), desk.offer(ids[1])])
    )


@case(reasons.DUPLICATE_PAYLOAD)
def the_same_data_under_another_nonce(desk: Any) -> list[Contribution]:
    return [desk.offer("first", payload=b"of one person"), desk.offer("bad", "standard", payload=b"of one person")]


@case(reasons.DUPLICATE_PAYLOAD)
def the_same_data_by_another_contributor(desk: Any) -> list[Contribution]:
    key = PrivateKey.generate()
    desk.keys.add(key.public, label="another clinic")
    return [desk.offer("first", payload=b"of one person"), desk.offer("bad", key=key, payload=b"of one person")]


@case(reasons.DUPLICATE_SUBJECT)
def one_person_twice(desk: Any) -> list[Contribution]:
    return [desk.offer("first", tag="cd" * 32), desk.offer("bad", "standard", tag="cd" * 32)]


@case(reasons.MALFORMED)
def trailing_byte(desk: Any) -> Contribution:
    given = desk.offer("bad")
    return replace(given, descriptor=given.descriptor + b"\0")


@case(reasons.UNKNOWN_SCHEMA)
def schema_of_the_future(desk: Any) -> Contribution:
    given = desk.offer("bad")
    assert given.descriptor[:3] == b"\xae\x01\x01"
    return replace(given, descriptor=b"\xae\x01\x02" + given.descriptor[3:])


@case(reasons.WRONG_ALGORITHM)
def not_for_this_key(desk: Any) -> Contribution:
    key = PrivateKey.generate()
    desk.keys.add(key.public, label="new name only", algorithms=(-19,))
    return desk.offer("bad", key=key)


@case(reasons.WRONG_ROLE)
def ledger_key(desk: Any) -> Contribution:
    key = PrivateKey.generate()
    desk.keys.add(key.public, label="ledger", role="ledger")
    return desk.offer("bad", key=key)


@case(reasons.REVOKED_KEY)
def revoked(desk: Any) -> Contribution:
    key = PrivateKey.generate()
    desk.keys.add(key.public, label="stolen")
    desk.keys.revoke(key.public.id, at=desk.NOW)
    return desk.offer("bad", key=key, issued_at=desk.NOW - 5 * desk.HOUR)  # a thief can write any date


@case(reasons.RETIRED_KEY)
def retired(desk: Any) -> Contribution:
    old, new = PrivateKey.generate(), PrivateKey.generate()
    desk.keys.add(old.public, label="old")
    desk.keys.rotate(old.public.id, new.public, at=desk.NOW - 2 * desk.HOUR)
    return desk.offer("bad", key=old, issued_at=desk.NOW - desk.HOUR)


@case(reasons.EARLY_KEY)
def key_of_tomorrow(desk: Any) -> Contribution:
    key = PrivateKey.generate()
    desk.keys.add(key.public, label="tomorrow", valid_from=desk.NOW + 1)
    return desk.offer("bad", key=key)


@case(reasons.BAD_SIGNATURE)
def malleable(desk: Any) -> Contribution:
    """S + L: the same equation, another encoding."""
    given = desk.offer("bad")
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(given.attestation[-32:], "little") + order
    return replace(given, attestation=given.attestation[:-32] + s.to_bytes(32, "little"))


@case(reasons.UNBOUNDED_CLASS)
def class_without_a_bound(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    policy = desk.policy_with(floors={}, standard={"noise_multiplier": None})
    desk.policy = policy
    return desk.gate(), [desk.offer("bad", admissibility="standard")]


def _broken(gate: AdmissionGate) -> AdmissionGate:
    allows = gate.terms.profile_allows

    def breaks(profile: str | None, cls: str) -> bool:
        if cls == "standard":
            raise ZeroDivisionError("a fault of ours")
        return allows(profile, cls)

    gate.terms.profile_allows = breaks
    return gate


@case(reasons.REPLAYED)
def the_same_again(desk: Any) -> list[Contribution]:
    given = desk.offer("first")
    return [given, replace(given, id="bad")]


@case(reasons.REPLAYED)
def the_same_descriptor_signed_twice(desk: Any) -> list[Contribution]:
    descriptor = desk.descriptor(b"x")
    first = Contribution("first", descriptor.encode(), attest(descriptor, desk.key, issued_at=desk.NOW), b"x")
    again = attest(descriptor, desk.key, issued_at=desk.NOW - 1, subject_tag="ab" * 32)
    return [first, Contribution("bad", descriptor.encode(), again, b"x")]


@case(reasons.REPLAYED)
def the_same_nonce_for_other_data(desk: Any) -> list[Contribution]:
    nonce = os.urandom(16)
    return [desk.offer("first", nonce=nonce), desk.offer("bad", nonce=nonce)]


@case(reasons.REPLAYED)
def admitted_before_by_another_attestation(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    descriptor = desk.descriptor(b"x")
    first, again = (attest(descriptor, desk.key, issued_at=desk.NOW - late) for late in (2, 1))
    gate = desk.gate(register=MemoryRegister())
    assert len(gate.review([Contribution("first", descriptor.encode(), first, b"x")])) == 1
    return gate, [Contribution("bad", descriptor.encode(), again, b"x")]


@case(reasons.REPLAYED)
def the_same_nonce_as_in_another_review(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    nonce, gate = os.urandom(16), desk.gate(register=MemoryRegister())
    assert len(gate.review([desk.offer("first", nonce=nonce)])) == 1
    return gate, [desk.offer("bad", nonce=nonce)]


class _Remembers(MemoryRegister):
    """One contribution was withdrawn. What a ledger says of that is in tests/ledger/test_register.py."""

    def __init__(self, gone: Contribution) -> None:
        super().__init__()
        self.gone = hashlib.sha256(gone.descriptor or b"").digest()

    def look(self, entries: Sequence[Admitted]) -> Sequence[RegisterStatus]:
        found = super().look(entries)
        return [
            RegisterStatus.WITHDRAWN if e.descriptor == self.gone else k for e, k in zip(entries, found, strict=True)
        ]


@case(reasons.WITHDRAWN)
def withdrawn_before(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    given = desk.offer("bad")
    return desk.gate(register=_Remembers(given)), [given]


@case(reasons.DUPLICATE_SUBJECT)
def one_person_in_two_reviews(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    gate = desk.gate(register=MemoryRegister())
    assert len(gate.review([desk.offer("first", tag="cd" * 32)])) == 1
    return gate, [desk.offer("bad", tag="cd" * 32)]


@case(reasons.CLASS_FULL)
def no_place_left(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    desk.policy = desk.policy_with(standard={"population": 2})
    return desk.gate(), [desk.offer(f"{i}", "standard") for i in range(2)] + [desk.offer("bad", "standard")]


@case(reasons.CLASS_FULL)
def places_taken_before(desk: Any) -> tuple[AdmissionGate, list[Contribution]]:
    desk.policy = desk.policy_with(standard={"population": 2})
    gate = desk.gate(register=MemoryRegister())
    assert len(gate.review([desk.offer(f"{i}", "standard") for i in range(2)])) == 2
    return gate, [desk.offer("bad", "standard")]


@pytest.mark.parametrize(("reason", "function"), [pytest.param(r, f, id=f"{r}-{name}") for r, name, f in CASES])
def test_each_refusal_has_its_reason_and_stops_nobody(reason: Reason, function: Case, desk: Any) -> None:
    made = function(desk)
    gate, offered = made if isinstance(made, tuple) else (desk.gate(), made)
    offered = offered if isinstance(offered, list) else [offered]
    # The bad one is the last of those that belong together; good ones stand before and behind it.
    before, after = desk.offer("good before"), desk.offer("good after", "clinical")
    admission = gate.review([before, *offered, after])
    assert [refusal.reason for refusal in admission.refused] == [reason]
    assert list(admission.ids) == ["good before", *(each.id for each in offered[:-1]), "good after"]
    told = json.loads(json.dumps(admission.to_dict()))
    assert told["admitted"] == len(offered) + 1
    assert [each["reason"] for each in told["refused"]] == [reason.word]


def test_every_reason_is_produced_by_a_test() -> None:
    assert {reason for reason, *_ in CASES} | LATER == set(REASONS)


def test_the_docs_list_every_reason_with_its_meaning() -> None:
    section = DOCS.read_text(encoding="utf-8").split("## Refusals")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+?) \| [^|]+ \|$", section, flags=re.MULTILINE))
    assert rows == {reason.word: reason.meaning for reason in REASONS}


OUTSIDE = """
import json, sys
from dataclasses import dataclass
sys.path[:0] = {support!r}
from signing_desk import Desk
from lamina.admit import REASONS, Stage, refusal

reason = refusal(
    "too-many-items", "it has more items than this hospital sends", "split it by year", Stage.CLAIMS,
    lambda case: f"{{case.signed.items}} items" if case.signed.items > 100 else None,
)
desk = Desk()
offered = [desk.offer("small", items=100), desk.offer("large", items=101), desk.offer("third")]
for processes in (1, 2):
    admission = desk.gate(processes=processes).review(offered)
    assert list(admission.ids) == ["small", "third"] and REASONS[-1] is reason
    assert "too-many-items" in admission.table() and "more items than this hospital sends" in admission.table()
refused = desk.gate().check(offered[1])
assert refused.reason is reason
print(json.dumps(admission.to_dict()))
"""


def test_a_reason_is_added_from_outside(tmp_path: Path) -> None:
    """Its meaning, remedy and check stand in one call, in a program of somebody else; no file of the package is edited."""
    support = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE.format(support=[support])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["refused"] == [{"id": "large", "reason": "too-many-items", "detail": "101 items"}]
    assert found["reasons"] == {"too-many-items": 1}
