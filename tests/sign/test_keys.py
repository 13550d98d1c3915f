"""Keys: identities that others compute alike, weak points refused, files that give nothing away."""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import stat
from pathlib import Path

import cbor2
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from signed_descriptor import encoded

from lamina.errors import AdmissionError, BadKey
from lamina.sign.keys import PBKDF2_ROUNDS, PrivateKey, PublicKey

# ------------------------------------------------------------------------------ the curve, written down once more

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
ROOT = pow(2, (P - 1) // 4, P)  # of -1
Point = tuple[int, int]


def add(a: Point, b: Point) -> Point:
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2 % P
    return ((x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P)


def times(n: int, a: Point) -> Point:
    result = (0, 1)
    while n:
        if n & 1:
            result = add(result, a)
        a, n = add(a, a), n >> 1
    return result


def lift(y: int, odd: int) -> Point | None:
    """The point with this y and this parity of x, if there is one (RFC 8032 §5.1.3)."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * ROOT % P
    if x * x % P != square:
        return None
    return (x if x & 1 == odd else -x % P, y)


def packed(a: Point) -> bytes:
    return (a[1] | (a[0] & 1) << 255).to_bytes(32, "little")


def unpacked(data: bytes) -> Point:
    number = int.from_bytes(data, "little")
    found = lift(number & (2**255 - 1), number >> 255)
    assert found is not None
    return found


def small_order() -> list[Point]:
    """The 8 points whose order divides 8: multiples of L times a point that has such a part."""
    y = 2
    while True:
        point = lift(y, 0)
        if point is not None:
            torsion = times(L, point)
            if times(4, torsion) != (0, 1):
                return [times(i, torsion) for i in range(8)]
        y += 1


TORSION = small_order()


def weak_encodings() -> list[bytes]:
    """All 8, and every other way to write one of them: y + p where it fits, and the sign of an x that is 0."""
    found = {packed(point) for point in TORSION}
    for x, y in TORSION:
        ways = [y] + ([y + P] if y + P < 2**255 else [])
        signs = [x & 1] if x else [0, 1]
        found |= {(way | sign << 255).to_bytes(32, "little") for way in ways for sign in signs}
    return sorted(found)


# ------------------------------------------------------------------------------ identity


# RFC 8032 §7.1, tests 1 to 3: secret key, public key, message, signature
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
        "655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aee"
        "b00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28d"
        "c027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("secret", "public", "message", "signature"), VECTORS)
def test_published_signatures(secret: str, public: str, message: str, signature: str) -> None:
    key = PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))
    assert key.public.x.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature
    assert key.public.verify(bytes.fromhex(message), bytes.fromhex(signature))
    assert not key.public.verify(bytes.fromhex(message) + b"\0", bytes.fromhex(signature))


@pytest.mark.parametrize("public", [vector[1] for vector in VECTORS])
def test_the_id_is_the_cose_key_thumbprint(public: str) -> None:
    """RFC 9679: SHA-256 over the deterministic CBOR of the required members, kty, crv and x for OKP."""
    key = PublicKey(bytes.fromhex(public))
    assert key.id == hashlib.sha256(encoded({1: 1, -1: 6, -2: key.x})).digest()
    assert key.name == key.id.hex()


def test_the_thumbprint_of_rfc_8032_test_1() -> None:
    # {1: 1, -1: 6, -2: h'd75a…511a'}, hashed with sha256sum
    found = PublicKey(bytes.fromhex(VECTORS[0][1])).name
    assert found == "866eefbd6718c8846cd7ddfe43fc74ab1daac4538ff8514ea2ec2d410a415743"


# ------------------------------------------------------------------------------ weak keys, malleable signatures


def test_there_are_eight_points_of_small_order_and_more_encodings() -> None:
    assert len(set(TORSION)) == 8
    assert len(weak_encodings()) == 14


@pytest.mark.parametrize("data", weak_encodings(), ids=lambda data: data.hex()[:16])
def test_small_order_keys_are_refused(data: bytes) -> None:
    with raises_code("key.point-invalid"):
        PublicKey(data)
    with pytest.raises(BadKey):
        PublicKey.from_cose(cbor2.dumps({1: 1, -1: 6, -2: data}))


def test_why_the_other_library_does_not_verify() -> None:
    """With the identity as key, R = identity and S = 0 are a signature of everything: cryptography accepts it."""
    identity = packed((0, 1))
    forged = identity + bytes(32)
    Ed25519PublicKey.from_public_bytes(identity).verify(forged, b"anything at all")


@pytest.mark.parametrize("point", TORSION[1:])
def test_keys_of_mixed_order_are_refused(point: Point) -> None:
    """An honest key plus a point of small order has 8 L-fold siblings that verify alike under some verifiers."""
    honest = unpacked(PrivateKey.generate().public.x)
    with raises_code("key.point-invalid"):
        PublicKey(packed(add(honest, point)))


def test_points_off_the_curve_and_encodings_beyond_p_are_refused() -> None:
    y = next(y for y in range(2, 100) if lift(y, 0) is None)
    for number in (y, P, P + 1, 2**255 - 1, P + 5):
        with raises_code("key.point-invalid"):
            PublicKey(number.to_bytes(32, "little"))


def test_a_signature_has_one_encoding() -> None:
    """S + L satisfies the same equation; accepted, it would be a second signature of one message."""
    key = PrivateKey.generate()
    for number in range(20):
        message = bytes([number])
        signature = key.sign(message)
        s = int.from_bytes(signature[32:], "little")
        assert s < L
        assert key.public.verify(message, signature)
        for shifted in (s + L, s + 2 * L, s + 8 * L):
            assert not key.public.verify(message, signature[:32] + shifted.to_bytes(32, "little"))
        assert not key.public.verify(message, signature[:32] + L.to_bytes(32, "little"))
        assert not key.public.verify(message, packed((0, 1)) + bytes(32))


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_verify_says_no_and_never_raises(message: bytes, signature: bytes) -> None:
    public = PublicKey(bytes.fromhex(VECTORS[0][1]))
    assert public.verify(message, signature) is False


def test_verify_of_what_is_not_bytes() -> None:
    public = PublicKey(bytes.fromhex(VECTORS[0][1]))
    assert public.verify("text", bytes(64)) is False  # type: ignore[arg-type]
    assert public.verify(b"", None) is False  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [b"", bytes(31), bytes(33), "00" * 32, None])
def test_wrong_sizes_and_types(x: object) -> None:
    with raises_code("key.public-size"):
        PublicKey(x)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ formats of public keys


def test_pem_and_cose_round_trip_and_others_read_them(tmp_path: Path) -> None:
    key = PrivateKey.generate().public
    assert PublicKey.from_pem(key.pem()) == key
    assert PublicKey.from_cose(key.cose()) == key
    loaded = serialization.load_pem_public_key(key.pem())
    assert isinstance(loaded, Ed25519PublicKey)
    assert loaded.public_bytes_raw() == key.x
    assert cbor2.loads(key.cose()) == {1: 1, 2: key.id, 3: -8, -1: 6, -2: key.x}
    for name, data in (("k.pub", key.pem()), ("k.cose", key.cose())):
        (tmp_path / name).write_bytes(data)
        assert PublicKey.load(tmp_path / name) == key


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({1: 2}, "key.not-ed25519"),
        ({-1: 4}, "key.not-ed25519"),
        ({-1: None}, "key.not-ed25519"),
        ({-2: None}, "key.public-size"),
        ({-2: bytes(31)}, "key.public-size"),
        ({-4: bytes(32)}, "key.cose-private-part"),
        ({2: b"another"}, "key.id-not-thumbprint"),
        ({3: -7}, "key.cose-algorithm"),
        ({4: [1]}, "key.cose-not-for-verifying"),
        ({4: 2}, "key.cose-not-for-verifying"),
        ({5: b"iv"}, "key.cose-unknown-fields"),
        ({"note": "x"}, "key.cose-unknown-fields"),
    ],
)
def test_cose_keys_that_lie_are_refused(changed: dict[int | str, object], word: str) -> None:
    key = PrivateKey.generate().public
    members = {1: 1, 2: key.id, 3: -19, 4: [2], -1: 6, -2: key.x}
    with raises_code(word):
        PublicKey.from_cose(encoded({k: v for k, v in (members | changed).items() if v is not None}))


def test_cose_keys_with_what_may_be_left_out() -> None:
    key = PrivateKey.generate().public
    for members in ({}, {3: -8}, {3: -19}, {2: key.id}, {4: [2]}, {4: [1, 2]}):
        assert PublicKey.from_cose(encoded({1: 1, -1: 6, -2: key.x} | members)) == key


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xa1\x01", b"\xbf\xff", b"-----BEGIN nothing-----", bytes(100_000)])
def test_damaged_keys_are_bad_keys(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadKey):
        PublicKey.from_cose(data)
    with pytest.raises(BadKey):
        PublicKey.from_pem(data)
    (tmp_path / "k").write_bytes(data)
    with pytest.raises(AdmissionError):
        PublicKey.load(tmp_path / "k")


def test_other_kinds_of_keys_are_refused(tmp_path: Path) -> None:
    others = (
        ec.generate_private_key(ec.SECP256R1()),
        rsa.generate_private_key(65537, 2048),
        x25519.X25519PrivateKey.generate(),
        ed448.Ed448PrivateKey.generate(),
    )
    for number, key in enumerate(others):
        spki = serialization.PublicFormat.SubjectPublicKeyInfo
        with raises_code("key.not-ed25519"):
            PublicKey.from_pem(key.public_key().public_bytes(serialization.Encoding.PEM, spki))
        path = tmp_path / f"{number}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        path.chmod(0o600)
        with raises_code("key.not-ed25519"):
            PrivateKey.load(path, None)


def test_a_private_key_where_a_public_one_is_asked_for(tmp_path: Path) -> None:
    PrivateKey.generate().save(tmp_path / "k.key", None)
    with raises_code("key.private-given-for-public"):
        PublicKey.load(tmp_path / "k.key")


# ------------------------------------------------------------------------------ private keys on disk


def test_a_sealed_key_opens_with_its_passphrase_only(tmp_path: Path) -> None:
    key, path = PrivateKey.generate(), tmp_path / "k.key"
    key.save(path, "pässphrase".encode())
    assert PrivateKey.sealed(path)
    assert PrivateKey.load(path, "pässphrase".encode()).public == key.public
    for wrong in (b"passphrase", b"p"):
        with raises_code("key.private-not-opened"):
            PrivateKey.load(path, wrong)
    with raises_code("key.passphrase-missing"):
        PrivateKey.load(path, None)


def test_a_sealed_key_is_standard_and_slow_to_guess(tmp_path: Path) -> None:
    """Another reader opens it, the seed is not in it, and the number of rounds is really written down."""
    key, path = PrivateKey.generate(), tmp_path / "k.key"
    key.save(path, b"secret")
    data = path.read_bytes()
    opened = serialization.load_pem_private_key(data, b"secret")
    assert isinstance(opened, Ed25519PrivateKey)
    assert opened.public_key().public_bytes_raw() == key.public.x
    der = base64.b64decode(b"".join(data.split(b"\n")[1:-2]))
    assert opened.private_bytes_raw() not in der
    assert PBKDF2_ROUNDS >= 600_000
    assert b"\x02\x03" + PBKDF2_ROUNDS.to_bytes(3, "big") in der
    again = tmp_path / "again.key"
    key.save(again, b"secret")
    assert again.read_bytes() != data  # fresh salt and vector


def test_an_open_key_is_what_the_library_writes(tmp_path: Path) -> None:
    key, path = PrivateKey.generate(), tmp_path / "k.key"
    key.save(path, None)
    opened = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(opened, Ed25519PrivateKey)
    assert path.read_bytes() == opened.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    assert not PrivateKey.sealed(path)
    assert PrivateKey.load(path, None).public == PrivateKey.load(path, b"not needed").public == key.public


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_files_are_private_and_never_overwritten(tmp_path: Path, secret: bytes | None) -> None:
    path = tmp_path / "k.key"
    before = os.umask(0)
    try:
        PrivateKey.generate().save(path, secret)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = path.read_bytes()
    with raises_code("admit.file-exists"):
        PrivateKey.generate().save(path, secret)
    assert path.read_bytes() == data
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with raises_code("admit.file-exists"):
        PrivateKey.generate().save(tmp_path / "link", secret)
    with raises_code("admit.file-not-written"):
        PrivateKey.generate().save(tmp_path / "no" / "folder.key", secret)


def test_an_open_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "k.key"
    PrivateKey.generate().save(path, None)
    for mode in (0o640, 0o604, 0o644):
        path.chmod(mode)
        with raises_code("key.private-file-open-to-others"):
            PrivateKey.load(path, None)
    sealed = tmp_path / "s.key"
    PrivateKey.generate().save(sealed, b"x")
    sealed.chmod(0o644)
    PrivateKey.load(sealed, b"x")


def test_an_empty_passphrase_is_not_a_passphrase(tmp_path: Path) -> None:
    with raises_code("key.passphrase-empty"):
        PrivateKey.generate().save(tmp_path / "k.key", b"")
    assert not (tmp_path / "k.key").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_damaged_private_keys(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "k.key"
    path.write_bytes(data)
    with raises_code("key.private-not-opened"):
        PrivateKey.load(path, None)
    with raises_code("admit.file-unreadable"):
        PrivateKey.load(tmp_path / "missing", None)


def test_nothing_of_a_private_key_is_shown() -> None:
    key = PrivateKey.generate()
    secret = key._key.private_bytes_raw()
    for text in (repr(key), str(key), repr(key.public)):
        assert secret.hex() not in text
        assert key.public.name in text
    with pytest.raises(TypeError, match="never pickled"):
        copy.deepcopy(key)


@pytest.mark.parametrize("data", [b"[corpus]\norigin = 'x'\n", b'{"schema": 1}', b"", b"id,class\n"])
def test_a_file_that_is_no_key_is_called_so(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_bytes(data)
    with raises_code("key.not-a-public-key"):
        PublicKey.load(tmp_path / "policy.toml")


def test_a_public_key_where_a_private_one_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "h.pub").write_bytes(PrivateKey.generate().public.pem())
    for name, words in (("", "h.key', if it is named so"), ("h.pem", "h.pem'"), ("h.key", "h.key'")):
        if name:
            (tmp_path / name).touch()
        with raises_code("key.public-given-for-private") as refused:
            PrivateKey.load(tmp_path / "h.pub", None)
        assert str(refused.value.remedy).endswith(words)


def test_a_passphrase_is_bytes(tmp_path: Path) -> None:
    key = PrivateKey.generate()
    with raises_code("key.passphrase-type"):
        key.save(tmp_path / "h.key", "secret")  # type: ignore[arg-type]
    assert not (tmp_path / "h.key").exists()
    key.save(tmp_path / "h.key", b"secret")
    with raises_code("key.passphrase-type"):
        PrivateKey.load(tmp_path / "h.key", "secret")  # type: ignore[arg-type]
