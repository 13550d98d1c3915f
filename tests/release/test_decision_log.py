"""The decision log: signed records in a chain, none of which holds what was asked of the model."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
from refusals import raises_code
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from lamina.release.decision_log import FIRST, DecisionLog, read_log, verify_log
from lamina.release.gate import ReleaseGate
from lamina.release.query import Query, Rights
from lamina.sign.keys import PrivateKey

LOG_KEY = PrivateKey.generate()
RIGHTS = Rights(
    classes=frozenset({"open", "clinical", "sensitive"}), max_epsilon=9.0, min_noise_multiplier=0.0, purpose="care"
)
QUERIES = (Query(rights=RIGHTS), Query(rights=RIGHTS, layers=("4",)), Query(rights=RIGHTS, generation_class="none"))


@pytest.fixture
def gate(release: Path, key: PrivateKey) -> ReleaseGate:
    return ReleaseGate(release, key.public)


def write(path: Path, gate: ReleaseGate, count: int = 6, key: PrivateKey = LOG_KEY) -> str:
    log = DecisionLog(path, key, gate.manifest)
    for at in range(count):
        query = QUERIES[at % len(QUERIES)]
        log.record(query, gate.decide(query))
    return log.close()


def test_records_are_read_back_in_their_order(gate: ReleaseGate, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    head = write(path, gate)
    found = verify_log(path, LOG_KEY.public)
    assert (found.decisions, found.allowed, found.head) == (6, 4, head)
    statements = [statement for _, statement in read_log(path, LOG_KEY.public)]
    assert [each["predicate"]["lamina"]["number"] for each in statements] == list(range(6))
    first, third = statements[0]["predicate"], statements[2]["predicate"]
    assert first["verificationResult"] == "PASSED" and first["policy"]["digest"]["sha256"] == gate.manifest.digest
    assert first["lamina"]["query"] == QUERIES[0].to_dict() and first["lamina"]["previous"] == FIRST
    assert third["verificationResult"] == "FAILED"
    assert third["lamina"]["reasons"] == [{"code": "draws-on-unknown", "class": None}]
    assert os.stat(path).st_mode & 0o077 == 0


def test_a_log_is_continued(gate: ReleaseGate, tmp_path: Path) -> None:
    path, other = tmp_path / "decisions.jsonl", PrivateKey.generate()
    before = write(path, gate, 2)
    write(path, gate, 2, other)
    assert verify_log(path, [LOG_KEY.public, other.public], seen=before).decisions == 4
    with raises_code("release.foreign-key"):
        verify_log(path, LOG_KEY.public)


def test_half_a_line_of_a_crash_goes(gate: ReleaseGate, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    write(path, gate, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    with raises_code("release.log-damaged"):
        verify_log(path, LOG_KEY.public)
    write(path, gate, 1)
    assert verify_log(path, LOG_KEY.public).decisions == 3


def test_what_was_changed_removed_or_moved_is_noticed(gate: ReleaseGate, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    head = write(path, gate)
    lines = path.read_bytes().splitlines(keepends=True)

    def judged(changed: list[bytes], *codes: str, seen: str | None = None) -> None:
        path.write_bytes(b"".join(changed))
        with raises_code(*codes):
            verify_log(path, LOG_KEY.public, seen=seen)

    judged(lines[:2] + lines[3:], "release.log-broken")
    judged(lines[1:], "release.log-broken")
    judged([lines[1], lines[0], *lines[2:]], "release.log-broken")
    judged([*lines[:3], lines[2], *lines[3:]], "release.log-broken")
    judged(lines[:-1], "release.log-shorter", seen=head)
    envelope = json.loads(lines[2])
    payload = base64.b64decode(envelope["payload"]).replace(b'"FAILED"', b'"PASSED"')
    envelope["payload"] = base64.b64encode(payload).decode()
    judged([*lines[:2], json.dumps(envelope).encode() + b"\n", *lines[3:]], "release.signature-wrong")
    judged([*lines, b"{}\n"], "release.envelope-malformed")


def test_another_implementation_verifies_a_record(gate: ReleaseGate, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    write(path, gate, 1)
    name = LOG_KEY.public.name
    key = SSlibKey(name, "ed25519", "ed25519", {"public": LOG_KEY.public.x.hex()})
    envelope = Envelope.from_dict(
        {**(plain := json.loads(path.read_text())), "signatures": [dict(each) for each in plain["signatures"]]}
    )
    assert envelope.verify([key], 1).keys() == {name}


def test_one_writer_and_what_cannot_be_written_is_not_decided(gate: ReleaseGate, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path, LOG_KEY, gate.manifest)
    with raises_code("release.log-in-use"):
        DecisionLog(path, LOG_KEY, gate.manifest)
    log._failed = "No space left on device"
    with raises_code("release.log-not-written"):
        log.record(QUERIES[0], gate.decide(QUERIES[0]))
    log.close()
    with raises_code("release.log-not-written"):
        DecisionLog(tmp_path / "none" / "log", LOG_KEY, gate.manifest)
    with raises_code("release.log-missing"):
        verify_log(tmp_path / "none", LOG_KEY.public)
    (tmp_path / "other").write_text("something else\n")
    with raises_code("release.not-json"):
        DecisionLog(tmp_path / "other", LOG_KEY, gate.manifest)
    assert (
        hashlib.sha256((tmp_path / "other").read_bytes()).hexdigest() == hashlib.sha256(b"something else\n").hexdigest()
    )
