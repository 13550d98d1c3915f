"""Damaged or extreme files of the user: every outcome is a value or a Lamina error, within a bounded time."""

from __future__ import annotations

import base64
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa, x448
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.cli.by_name import parse_allocation
from lamina.cli.plan import run_file_or_none
from lamina.cli.run_file import RunFile
from lamina.errors import LaminaError
from lamina.plan.policy import Policy
from lamina.run.corpus import Corpus
from lamina.run.table_files import MAX_COLUMNS
from lamina.sign import keys
from lamina.sign.keys import P256Key, PrivateKey, PublicKey, p256_verifies

FEW = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def within(seconds: float, megabytes: float) -> Iterator[None]:
    """Assert that the block stays within these limits of processor time and Python memory."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        taken, most = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < seconds and most < megabytes * 1e6, f"{taken:.2f} s, {most / 1e6:.0f} MB"


# ------------------------------------------------------------------------------------------ TOML

POLICY = '[corpus]\norigin = "tests"\ndelta = 1e-5\n[class.a]\npopulation = 100\nepsilon = 1.0\n'
RUN = 'policy = "policy.toml"\nsteps = 3\nbatch = 4\nmodel = "m:f"\nloss = "l"\noptimizer = "sgd"\n[data]\nkind = "npz"\npath = "x"\n'
ABSURD = {
    "an integer of 5,000 digits": f"x = {'7' * 5000}\n",
    "an integer of 900,000 digits": f"x = {'7' * 900_000}\n",
    "a fraction of 900,000 digits": f"x = 1.{'7' * 900_000}\n",
    "a hexadecimal integer of 900,000 digits": f"x = 0x{'a' * 900_000}\n",
    "a hexadecimal integer of 20 digits": f"x = 0x{'f' * 20}\n",
    "a hexadecimal integer": f"x = 0x{'f' * 5000}\n",
    "arrays inside each other": f"x = {'[' * 5000}{']' * 5000}\n",
    "some arrays inside each other": f"x = {'[' * 100}{']' * 100}\n",
    "tables inside each other": "x = " + "{a=" * 3000 + "1" + "}" * 3000 + "\n",
    "a dotted key of 100,000 parts": f"{'.'.join('a' * 100_000)} = 1\n",
    "a dotted key with blanks and quotes": " . ".join(["a", '"b"', "'c'"] * 30_000) + " = 1\n",
    "a dotted header": f"[{'.'.join('a' * 100_000)}]\n",
    "a dotted key inside": f"x = {{ {'.'.join('a' * 100_000)} = 1 }}\n",
    "a megabyte more": "# " + "x" * (1 << 20) + "\n",
}


@pytest.mark.parametrize("absurd", ABSURD)
def test_absurd_toml_is_refused_at_once(absurd: str, tmp_path: Path) -> None:
    text = ABSURD[absurd]
    with within(seconds=2, megabytes=40):
        with raises_code("plan.policy-not-toml"):
            Policy.parse(text + POLICY)
        with raises_code("cli.run-file-not-toml"):
            RunFile.parse(text + RUN)
        (tmp_path / "RUN.toml").write_text(text + RUN)
        assert run_file_or_none(tmp_path / "RUN.toml") is None


def test_toml_that_looks_long_is_read() -> None:
    """Long words, long texts and many keys are no dotted keys."""
    words = f"# {'a' * 500_000}\n# {'a.' * 20} and {'x = [' * 40}\n"
    with within(seconds=2, megabytes=40):
        assert Policy.parse(words + POLICY).corpus.origin == "tests"
        assert RunFile.parse(words + RUN).steps == 3


@pytest.mark.parametrize(
    "text", [f"flat:x={'[' * 4000}{']' * 4000}", f"flat:x={'.'.join('a' * 5000)}", f"flat:x={'9' * 5000}"]
)
def test_absurd_options_of_an_allocation_are_refused(text: str) -> None:
    with within(seconds=2, megabytes=40), pytest.raises(LaminaError):
        parse_allocation(text)


TOML_PARTS = [*'[]{}=.,\n"1a -_#', "'", '"""', "0x", "e", "[[", "class", "corpus", "é", "1979-05-27"]


@FEW
@given(st.lists(st.sampled_from(TOML_PARTS), max_size=60).map("".join), st.integers(0, len(POLICY)))
def test_any_toml_is_a_policy_or_a_lamina_error(text: str, at: int) -> None:
    for parse, whole in ((Policy.parse, POLICY), (RunFile.parse, RUN)):
        with suppress(LaminaError):
            parse(whole[:at] + text + whole[at:])


# ------------------------------------------------------------------------------------------ private keys

DER = (serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
KINDS: dict[str, Callable[[], Any]] = {
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "x448": x448.X448PrivateKey.generate,
    "rsa": lambda: rsa.generate_private_key(65537, 1024),
    "dsa": lambda: dsa.generate_private_key(1024),
}
PLAIN = {name: make().private_bytes(*DER) for name, make in KINDS.items()}
LABELS = (
    "PRIVATE KEY",
    "ENCRYPTED PRIVATE KEY",
    "EC PRIVATE KEY",
    "RSA PRIVATE KEY",
    "OPENSSH PRIVATE KEY",
    "X509 CRL",
)


def pem(der: bytes, label: str = "PRIVATE KEY") -> bytes:
    text = base64.b64encode(der)
    lines = b"\n".join(text[i : i + 64] for i in range(0, len(text), 64))
    return b"-----BEGIN %b-----\n%b\n-----END %b-----\n" % (label.encode(), lines, label.encode())


def opened(path: Path, data: bytes, passphrase: bytes | None = None) -> None:
    path.write_bytes(data)
    os.chmod(path, 0o600)
    for kind in (PrivateKey, P256Key):
        with suppress(LaminaError):
            kind.load(path, passphrase)


def test_every_changed_bit_of_a_private_key_ends_in_a_key_or_a_lamina_error(tmp_path: Path) -> None:
    """One of these changes makes the library fail internally: it names another algorithm for the same bytes."""
    for name in ("ed25519", "p256"):
        for bit in range(8 * len(PLAIN[name])):
            changed = bytearray(PLAIN[name])
            changed[bit // 8] ^= 1 << bit % 8
            opened(tmp_path / "k", pem(bytes(changed)))


@FEW
@given(
    st.sampled_from(sorted(PLAIN)), st.sampled_from(LABELS), st.integers(0, 4000), st.binary(max_size=8),
    st.one_of(st.none(), st.binary(min_size=1, max_size=8)),
)  # fmt: skip
def test_any_damage_ends_in_a_key_or_a_lamina_error(
    tmp_path: Path, kind: str, label: str, at: int, put: bytes, passphrase: bytes | None
) -> None:
    der = PLAIN[kind]
    at %= len(der)
    text = pem(der[:at] + put + der[at + len(put) :], label)
    opened(tmp_path / "k", text, passphrase)
    opened(tmp_path / "k", text[: at % len(text)], passphrase)
    opened(tmp_path / "k", put * 3000, passphrase)


def encrypted(rounds: bytes, derivation: bytes = bytes.fromhex("06092a864886f70d01050c")) -> bytes:
    """PKCS#8 by hand, under PBKDF2 with this number of rounds."""

    def der(tag: int, *parts: bytes) -> bytes:
        content = b"".join(parts)
        return bytes([tag, 0x82, *len(content).to_bytes(2, "big")]) + content

    function = der(
        0x30, derivation, der(0x30, der(4, bytes(16)), der(2, rounds), bytes.fromhex("300c06082a864886f70d02090500"))
    )
    cipher = der(0x30, bytes.fromhex("060960864801650304012a"), der(4, bytes(16)))
    scheme = der(0x30, bytes.fromhex("06092a864886f70d01050d"), der(0x30, function, cipher))
    return pem(der(0x30, scheme, der(4, bytes(64))), "ENCRYPTED PRIVATE KEY")


def test_a_damaged_number_of_rounds_does_not_take_minutes(tmp_path: Path) -> None:
    path = tmp_path / "k"
    for rounds in ((1 << 31) - 1, 1 << 62, 10_000_001):
        path.write_bytes(encrypted(rounds.to_bytes(8, "big")))
        with within(seconds=1, megabytes=10), raises_code("key.private-not-opened"):
            PrivateKey.load(path, b"secret")
    scrypt = der_scrypt(cost=1 << 24, block=64)  # 128 GiB
    path.write_bytes(scrypt)
    with within(seconds=1, megabytes=10), raises_code("key.private-not-opened"):
        PrivateKey.load(path, b"secret")


def der_scrypt(cost: int, block: int) -> bytes:
    def der(tag: int, *parts: bytes) -> bytes:
        content = b"".join(parts)
        return bytes([tag, 0x82, *len(content).to_bytes(2, "big")]) + content

    def number(value: int) -> bytes:
        return der(2, value.to_bytes(5, "big"))

    terms = der(0x30, der(4, bytes(16)), number(cost), number(block), number(1))
    function = der(0x30, bytes.fromhex("06092b06010401da47040b"), terms)
    cipher = der(0x30, bytes.fromhex("060960864801650304012a"), der(4, bytes(16)))
    scheme = der(0x30, bytes.fromhex("06092a864886f70d01050d"), der(0x30, function, cipher))
    return pem(der(0x30, scheme, der(4, bytes(64))), "ENCRYPTED PRIVATE KEY")


def test_keys_that_others_encrypted_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual numbers of rounds are accepted; a wrong passphrase and every truncated file are refused."""
    monkeypatch.setattr(keys, "PBKDF2_ROUNDS", 1 << 20)
    ours = PrivateKey.generate()
    ours.save(tmp_path / "ours", b"secret")
    assert PrivateKey.load(tmp_path / "ours", b"secret").public == ours.public
    theirs = ed25519.Ed25519PrivateKey.generate()
    form = serialization.BestAvailableEncryption(b"secret")
    text = theirs.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, form)
    (tmp_path / "theirs").write_bytes(text)
    assert PrivateKey.load(tmp_path / "theirs", b"secret").public.x == theirs.public_key().public_bytes_raw()
    with raises_code("key.private-not-opened"):
        PrivateKey.load(tmp_path / "theirs", b"Secret")
    for cut in range(0, len(text), 7):
        opened(tmp_path / "cut", text[:cut], b"secret")


@FEW
@given(st.integers(0, 8 * 44 - 1))
def test_any_changed_public_key_ends_in_a_key_or_a_lamina_error(bit: int) -> None:
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    changed = bytearray(
        public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    changed[bit // 8] ^= 1 << bit % 8
    text = pem(bytes(changed), "PUBLIC KEY")
    assert p256_verifies(text, b"x", b"y") is False
    with suppress(LaminaError):
        PublicKey.from_pem(text)


# ------------------------------------------------------------------------------------------ CSV


@pytest.mark.parametrize("rows", ["{wide}\n", "a,b\n{wide}\n", '"a\n"' + ',"a\n"' * 300_000 + "\n"])
def test_a_table_of_millions_of_columns_is_refused_before_it_is_cut(rows: str, tmp_path: Path) -> None:
    wide = ",".join(["x"] * 3_000_000)
    path = tmp_path / "wide.csv"
    path.write_text(rows.format(wide=wide))
    del wide
    with within(seconds=2, megabytes=60), raises_code("corpus.csv-too-wide"):
        Corpus.of_csv(path)


def test_a_line_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("a" * ((1 << 26) + 10))
    with raises_code("corpus.csv-too-wide"):
        Corpus.of_csv(path)


def test_a_wide_table_is_read_in_a_time_that_grows_with_its_width(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    columns = MAX_COLUMNS // 4
    path.write_text(",".join(f"c{i}" for i in range(columns)) + "\n" + ",".join(["1"] * columns) + "\n")
    with within(seconds=10, megabytes=100):
        assert tuple(Corpus.of_csv(path).source.fetch([0])[0].shape) == (1, columns)  # type: ignore[arg-type]
    with raises_code("corpus.column-unknown") as refused:
        Corpus.of_csv(path, y="no such")
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("delimiter", ["", ";;", "\n", '"'])
def test_a_delimiter_is_one_character(delimiter: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with raises_code("corpus.csv-delimiter"):
        Corpus.of_csv(tmp_path / "t.csv", delimiter=delimiter)


@FEW
@given(
    st.lists(st.sampled_from(["a", "1", ",", "\n", '"', "\r", " ", "nan", ";", "é", "\0", "1e999"]), max_size=40).map(
        "".join
    )
)
def test_any_table_is_a_corpus_or_a_lamina_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, newline="")
    with suppress(LaminaError):
        Corpus.of_csv(path)
