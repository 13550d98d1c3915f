"""What a contributor signed may be anything at all: it is refused by itself, and the others are admitted."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hospital import NOW, Hospital, usual
from refusals import raises_code
from stopping import During

import lamina
from lamina.admit.attestation import attest, commit
from lamina.admit.terms import SigningTerms
from lamina.run.admitted import AdmittedCorpus


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Hospital:
    made = Hospital(tmp_path_factory.mktemp("ward"))
    made.trust()
    for seed in range(5):
        made.write(f"c{seed}", seed, windows=1)
    made.sign({f"c{seed}": "clinical" for seed in range(5)})
    return made


def put(hospital: Hospital, payload: bytes, kind: str, items: int = 1) -> None:
    """A contribution `evil`, signed as it should be with somebody else's program."""
    folder, nonce = hospital.people / "evil", os.urandom(16)
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    signed = SigningTerms.make(hospital.policy, "clinical", not_before=NOW, expires=NOW + 1000).descriptor(
        contributor=hospital.key.public.id, nonce=nonce, commitment=commit(nonce, payload), items=items
    )
    (folder / "descriptor.cbor").write_bytes(signed.encode())
    (folder / "attestation.cose").write_bytes(attest(signed, hospital.key, issued_at=NOW))
    (folder / f"payload.{kind}").write_bytes(payload)


def fetched(corpus: AdmittedCorpus) -> int:
    """How many examples can be read: all that are admitted."""
    return len(corpus.source.fetch(np.arange(len(corpus.source)))[0])


# ------------------------------------------------------------------------------------------------ payloads


def npy(descr: str, shape: str, data: bytes = b"") -> bytes:
    return raw(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", data)


def raw(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def archive(x: bytes, y: bytes | None = None, how: int = zipfile.ZIP_DEFLATED) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", how) as made:
        made.writestr("x.npy", x)
        made.writestr("y.npy", npy("'<i8'", "(1,)", bytes(8)) if y is None else y)
    return held.getvalue()


GOOD = npy("'<f4'", "(1, 6)", bytes(24))
LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


def marked(local: int, value: int) -> bytes:
    """A good archive with a byte of every header changed; in the directory it stands two bytes further."""
    held = bytearray(archive(GOOD))
    for signature, place in ((LOCAL, local), (CENTRAL, local + 2)):
        at = held.find(signature)
        while at >= 0:
            held[at + place] = value
            at = held.find(signature, at + 4)
    return bytes(held)


def spoiled(how: int) -> bytes:
    held = bytearray(archive(GOOD, how=how))
    at = held.find(b"x.npy") + 5
    held[at : at + 20] = b"\xff" * 20
    return bytes(held)


BAD = {
    "more than there is memory": archive(npy("'<f4'", f"(1, {2**62}, 8)")),
    "more than an integer": archive(npy("'<f4'", f"(1, {2**70})")),
    "71 axes": archive(npy("'<f4'", "(1," + "1," * 70 + ")", bytes(4))),
    "a negative axis": archive(npy("'<f4'", "(1, -6)")),
    "a negative axis of y": archive(GOOD, npy("'<i8'", "(1, -3)")),
    "signs": archive(raw("-" * 9000 + "1\n")),
    "brackets": archive(raw("(" * 9000 + "\n")),
    "truth for a number": archive(npy("'<f4'", "(True, 6)", bytes(24))),
    "truth for a number in y": archive(GOOD, npy("'<i8'", "(True,)", bytes(8))),
    "data cut off": archive(npy("'<f4'", "(1, 6)", bytes(20))),
    "labels cut off": archive(GOOD, npy("'<i8'", "(1,)")),
    "data cut off, plain": archive(npy("'<f4'", "(1, 6)"), how=zipfile.ZIP_STORED),
    "elements with axes": archive(npy("('<f4', (6,))", "(1,)", bytes(24))),
    "nothing in an example": archive(npy("'<f4'", "(1, 0)")),
    "encrypted": marked(6, 1),
    "strongly encrypted": marked(6, 0x40),
    "packed in no known way": marked(8, 99),
    "packed data damaged": spoiled(zipfile.ZIP_DEFLATED),
    "packed otherwise": archive(GOOD, how=zipfile.ZIP_LZMA),
    "a file that ends": archive(GOOD)[:-30],
}


@pytest.mark.parametrize("what", BAD)
def test_a_payload_that_is_malformed_is_refused_by_itself(ward: Hospital, what: str) -> None:
    put(ward, BAD[what], "npz")
    for corpus in (ward.admit(), ward.gate().admit(ward.contributions())):
        (refusal,) = corpus.admission.refused
        assert (refusal.id, refusal.reason.word) == ("evil", "unreadable")
        assert list(corpus.ids) == [f"c{i}" for i in range(5)]
        assert fetched(corpus) == 5


TABLES = {"nul": b"1,\0\n", "long": b'"' + b"1" * 200_000 + b'"\n', "not text": b"\xff\xfe1\n", "_": b"1_0,2\n"}


@pytest.mark.parametrize("what", TABLES)
def test_a_table_that_is_malformed_is_refused_by_itself(ward: Hospital, what: str) -> None:
    put(ward, TABLES[what], "csv")
    corpus = ward.admit()
    assert [(each.id, each.reason.word) for each in corpus.admission.refused] == [("evil", "unreadable")]
    assert fetched(corpus) == 5


def test_examples_without_numbers_cannot_be_counted_without_end(ward: Hospital) -> None:
    put(ward, archive(npy("'<f4'", f"({2**40}, 0)"), npy("'<i8'", f"({2**40}, 0)")), "npz", items=2**31)
    assert [each.reason.word for each in ward.admit().admission.refused] == ["unreadable"]


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("descr", ["'<f2'", "'>f4'", "'<f16'"])
def test_unusual_numbers_are_admitted_and_read(ward: Hospital, how: int, descr: str) -> None:
    size = np.dtype(descr.strip("'")).itemsize
    put(ward, archive(npy(descr, "(1, 6)", bytes(6 * size)), how=how), "npz")
    corpus = ward.admit()
    assert not corpus.admission.refused and fetched(corpus) == 6


def test_a_wrong_checksum_stops_no_run(ward: Hospital) -> None:
    """What was signed is what is read, whatever a checksum says: nobody can choose the step at which a run stops."""
    held = archive(npy("'<f4'", "(1, 6)", b"\1" * 24), how=zipfile.ZIP_STORED).replace(b"\1" * 24, b"\2" * 24)
    put(ward, held, "npz")
    corpus = ward.admit()
    assert not corpus.admission.refused and fetched(corpus) == 6


# ------------------------------------------------------------------------------------------------ key ring


def test_the_ring_that_was_compared_is_the_one_that_is_loaded(ward: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes between two reads must not be taken for the one of the first."""
    gate, reads = ward.gate(), []
    before = ward.keys.read_bytes()
    ring = lamina.KeyRing.load(ward.keys)
    ring.revoke(ward.key.public.id, at=NOW)
    ring.save(ward.keys)
    revoked = ward.keys.read_bytes()
    real = lamina.run.admitted.read_small

    def racing(path: Path, what: str) -> bytes:
        reads.append(path)
        found = real(path, what)
        path.write_bytes(before)  # just after it was read
        return found

    try:
        monkeypatch.setattr("lamina.run.admitted.read_small", racing)
        found = gate.reload_keys()
        assert found is not None and not found.usable(ward.key.public.id, NOW)
        ward.keys.write_bytes(revoked)
        assert gate.reload_keys() is None and len(reads) == 2
    finally:
        ward.keys.write_bytes(before)


def test_a_revocation_that_was_read_is_kept_when_the_clock_then_stops_the_run(tmp_path: Path) -> None:
    hospital, other = usual(tmp_path), lamina.PrivateKey.generate()
    hospital.trust(other)
    hospital.sign({f"c{i:02d}": "clinical" for i in range(4)}, key=other)

    def stolen() -> None:
        with lamina.KeyRing.editing(hospital.keys) as ring:
            ring.revoke(other.public.id, at=NOW)
        hospital.clock.now = NOW - 10

    trainer = hospital.trainer(progress=During(segments={3: stolen}))
    with raises_code("admit.clock-went-back"):
        trainer.fit()
    hospital.clock.now = NOW
    outcome = trainer.fit()
    assert any("4 (revoked-key 4)" in note for note in outcome.notes)


def test_a_gate_asks_the_ring_that_is_there_when_it_admits(tmp_path: Path) -> None:
    hospital = usual(tmp_path)
    gate = hospital.gate()
    with lamina.KeyRing.editing(hospital.keys) as ring:
        ring.revoke(hospital.key.public.id, at=NOW)
    with raises_code("corpus.nobody-admitted"):
        gate.admit(hospital.people)
