"""Ed25519 keys (and P-256 ones for bundles): make, sign, verify, PEM and COSE; the small files and UTC times around them."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.pbkdf2 import PBKDF2HMAC
from nacl.bindings import crypto_core_ed25519_is_valid_point, crypto_sign_open
from nacl.exceptions import CryptoError

from lamina import cbor
from lamina.errors import AdmissionError, BadKey, EncodingError
from lamina.files import NEW, PIPE, locked, sync_folder
from lamina.validate import open_regular

LAST_SECOND = 253_402_300_799  # the end of the year 9999: what a calendar can still show

_UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@lru_cache(1024)
def format_utc(seconds: int) -> str:
    """A time in UTC, to the second.

    >>> format_utc(1_767_225_600)
    '2026-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime(_UTC_FORMAT).rjust(20, "0")


def parse_utc(text: str) -> int:
    """Read what `format_utc` writes, and only that: key rings are compared byte by byte."""
    try:
        seconds = int(datetime.strptime(text, _UTC_FORMAT).replace(tzinfo=UTC).timestamp())
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= LAST_SECOND or format_utc(seconds) != text:
        problem = f"the time {text!r} is not of the form 2026-01-31T12:00:00Z"
        raise AdmissionError("admit.time-not-utc", problem, "give UTC, to the second")
    return seconds


def parse_time(text: str) -> int:
    """Read a time as people write it: a day, a day and an hour (UTC unless an offset is given), or seconds since 1970.

    >>> parse_time("2026-01-01") == parse_time("2026-01-01T02:00+02:00") == parse_time("1767225600")
    True
    """
    try:
        if text.isascii() and text.strip().isdecimal():
            seconds = int(text)
        else:
            moment = datetime.fromisoformat(text.strip())
            seconds = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        seconds = -1
    if not 0 <= seconds <= LAST_SECOND:
        problem = f"{text!r} is not a time between 1970 and 9999"
        raise AdmissionError("admit.time-invalid", problem, "write 2026-01-31 or 2026-01-31T12:00Z")
    return seconds


CLOCK_SKEW = 120  # seconds by which clocks of several machines may differ
MAX_SMALL_FILE = 64 * 1024 * 1024  # a key ring of 100,000 entries has some 30 MB


def read_small(path: Path, what: str, *, most: int = MAX_SMALL_FILE, pipe: bool = False) -> bytes:
    """Read all bytes of a file that has no reason to be large; of a pipe only where one is expected."""
    try:
        with os.fdopen(os.open(path, PIPE) if pipe else open_regular(path), "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        problem = f"cannot read {what} '{path}': {error.strerror}"
        raise AdmissionError("admit.file-unreadable", problem, "give the path of a readable file") from None
    if len(data) > most:
        problem = f"{what} '{path}' has more than {most} bytes"
        raise AdmissionError("admit.file-too-large", problem, "check that this is the right file")
    return data


def write_new(path: Path, data: bytes, what: str, *, mode: int) -> None:
    """Write a file that does not exist yet, whole or not at all. An existing file is never overwritten."""
    _write(path, data, what, mode, os.link, durable=True)


def replace_file(path: Path, data: bytes, what: str, *, mode: int, durable: bool = True) -> None:
    """Make `path` hold exactly `data`, or leave it as it was."""
    _write(path, data, what, mode, os.replace, durable=durable)


def _write(
    path: Path, data: bytes, what: str, mode: int, publish: Callable[[Path, Path], None], *, durable: bool
) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.lamina-tmp")
    try:
        file = os.open(temporary, NEW, mode)
        with os.fdopen(file, "wb") as stream:
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        publish(temporary, path)  # all or nothing
        if durable:
            sync_folder(path.parent)
    except FileExistsError:
        problem = f"{what} '{path}' exists and is not overwritten"
        raise AdmissionError("admit.file-exists", problem, "give another path, or move the file away") from None
    except OSError as error:
        problem = f"cannot write {what} '{path}': {error.strerror or type(error).__name__}"
        raise AdmissionError("admit.file-not-written", problem, "make its folder writable") from None
    finally:
        with suppress(OSError):
            os.unlink(temporary)


@contextmanager
def path_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a folder or an existing file against other Lamina processes. The lock ends with the process."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path))
        except OSError as error:
            problem = f"cannot open '{path}' to lock it: {error.strerror}"
            raise AdmissionError("admit.folder-unreadable", problem, "create it, or give another path") from None
        yield


# A private key as PKCS#8 in PEM, encrypted with a passphrase (RFC 5958, 8018, 8410).
#
# The library's own writer stretches a passphrase by 2,048 rounds of PBKDF2, which a graphics card tries some million
# times a second. This one writes the same structure with 600,000 rounds. What reads it is the library, or `openssl pkey`.

PBKDF2_ROUNDS = 600_000

_SEQUENCE, _INTEGER, _OCTETS = 0x30, 0x02, 0x04
_PBES2, _PBKDF2 = bytes.fromhex("06092a864886f70d01050d"), bytes.fromhex("06092a864886f70d01050c")
_HMAC_SHA256, _AES_256_CBC = bytes.fromhex("300c06082a864886f70d02090500"), bytes.fromhex("060960864801650304012a")


def _der(tag: int, *parts: bytes) -> bytes:
    """An element of DER, of at most 255 bytes inside."""
    content = b"".join(parts)
    return bytes([tag, len(content)] if len(content) < 128 else [tag, 0x81, len(content)]) + content


def encrypted_pem(key: bytes, passphrase: bytes) -> bytes:
    """The PKCS#8 encoding of a key encrypted under a passphrase."""
    salt, vector = os.urandom(16), os.urandom(16)
    secret = PBKDF2HMAC(algorithm=SHA256(), length=32, salt=salt, iterations=PBKDF2_ROUNDS).derive(passphrase)
    cipher = Cipher(algorithms.AES(secret), modes.CBC(vector)).encryptor()
    padding = 16 - len(key) % 16
    ciphertext = cipher.update(key + bytes([padding] * padding)) + cipher.finalize()
    rounds = _der(_INTEGER, PBKDF2_ROUNDS.to_bytes(3, "big"))  # three bytes, the first of them below 0x80
    derivation = _der(_SEQUENCE, _PBKDF2, _der(_SEQUENCE, _der(_OCTETS, salt), rounds, _HMAC_SHA256))
    scheme = _der(_SEQUENCE, derivation, _der(_SEQUENCE, _AES_256_CBC, _der(_OCTETS, vector)))
    text = base64.b64encode(_der(_SEQUENCE, _der(_SEQUENCE, _PBES2, scheme), _der(_OCTETS, ciphertext)))
    lines = [text[i : i + 64] for i in range(0, len(text), 64)]
    return b"\n".join([_ENCRYPTED_PEM_LABEL, *lines, _ENCRYPTED_PEM_LABEL.replace(b"BEGIN", b"END"), b""])


EDDSA, ED25519 = -8, -19  # two names of one algorithm: RFC 9053 §2.2, RFC 9864 §2.2
ALGORITHMS = (EDDSA, ED25519)

_MAX_KEY_FILE = 16 * 1024
_THUMBPRINT_PREFIX = bytes.fromhex("a301012006215820")  # {1: 1, -1: 6, -2: h'x'}: kty OKP, crv Ed25519
_KTY, _KID, _ALG, _OPS, _CRV, _X, _D = 1, 2, 3, 4, -1, -2, -4  # RFC 9052 §7.1, RFC 9053 §7.2
_OPERATION_VERIFY = 2  # key operation
_ENCRYPTED_PEM_LABEL = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


@dataclass(frozen=True, slots=True, repr=False)
class PublicKey:
    """A point of prime order on Ed25519, in its one encoding of 32 bytes.

    `id` is its COSE key thumbprint (RFC 9679, SHA-256): the `kid` of everything that it signs. Points of small or
    mixed order and encodings that are not canonical are refused here, so that they never enter a ring.
    """

    x: bytes
    id: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.x, bytes) or len(self.x) != 32:
            size = f"{len(self.x)} bytes" if isinstance(self.x, bytes) else type(self.x).__name__
            problem = f"the public key is {size}, an Ed25519 key has 32 bytes"
            raise BadKey("key.public-size", problem, "give its x coordinate")
        if not crypto_core_ed25519_is_valid_point(self.x):
            problem = f"the public key {self.x.hex()} is not a point of prime order on Ed25519"
            remedy = "make a key with lamina keys new: this one is damaged, or anybody can sign for it"
            raise BadKey("key.point-invalid", problem, remedy)
        object.__setattr__(self, "id", hashlib.sha256(_THUMBPRINT_PREFIX + self.x).digest())

    @property
    def name(self) -> str:
        """The id in hexadecimal."""
        return self.id.hex()

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether `signature` is this key's over `message`. Only the one encoding of it counts: S ≥ L is refused."""
        if not isinstance(signature, bytes) or len(signature) != 64:
            return False
        try:
            crypto_sign_open(signature + message, self.x)
        except (CryptoError, TypeError):
            return False
        return True

    def __repr__(self) -> str:
        return f"PublicKey({self.name})"

    def cose(self) -> bytes:
        """A COSE_Key in deterministic CBOR."""
        return cbor.encode({_KTY: 1, _KID: self.id, _ALG: EDDSA, _CRV: 6, _X: self.x})

    @classmethod
    def from_cose(cls, data: bytes) -> PublicKey:
        """Read a COSE_Key; what it says of itself (kid, algorithm, operations) must be true."""
        try:
            found = cbor.decode(data, max_size=_MAX_KEY_FILE)
        except EncodingError as error:
            raise BadKey("key.cose-damaged", f"the COSE key is damaged: {error.problem}", error.remedy) from None
        if not isinstance(found, dict) or (found.get(_KTY), found.get(_CRV)) != (1, 6):
            raise BadKey("key.not-ed25519", "the COSE key is not of type OKP on curve Ed25519", "give an Ed25519 key")
        if _D in found:
            remedy = "never hand the private part out: make a new key"
            raise BadKey("key.cose-private-part", "the COSE key contains its private part", remedy)
        if unknown := sorted(map(str, found.keys() - {_KTY, _KID, _ALG, _OPS, _CRV, _X})):
            problem = f"the COSE key has unknown fields {', '.join(unknown)}"
            raise BadKey("key.cose-unknown-fields", problem, "leave them out")
        if found.get(_ALG, EDDSA) not in ALGORITHMS:
            problem = f"the COSE key is for algorithm {found[_ALG]!r}, known are {EDDSA} and {ED25519}"
            raise BadKey("key.cose-algorithm", problem, "give a key for EdDSA")
        operations = found.get(_OPS, [_OPERATION_VERIFY])
        if not isinstance(operations, list) or _OPERATION_VERIFY not in operations:
            remedy = "give it key operation 2, or none"
            raise BadKey("key.cose-not-for-verifying", "the COSE key is not for verifying", remedy)
        key = cls(found.get(_X, b""))
        if (kid := found.get(_KID, key.id)) != key.id:
            told = kid.hex() if isinstance(kid, bytes) else repr(kid)
            problem = f"the COSE key gives its id as {told}, its thumbprint is {key.name}"
            raise BadKey("key.id-not-thumbprint", problem, "leave the id out, or give the thumbprint (RFC 9679)")
        return key

    def pem(self) -> bytes:
        """SubjectPublicKeyInfo in PEM (RFC 8410), as openssl reads it."""
        return Ed25519PublicKey.from_public_bytes(self.x).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @classmethod
    def from_pem(cls, data: bytes) -> PublicKey:
        """Read a public key in PEM."""
        try:
            key = serialization.load_pem_public_key(data)
        except Exception:  # as in `_open_private`
            remedy = "give a BEGIN PUBLIC KEY block"
            raise BadKey("key.public-not-pem", "the public key is not readable PEM", remedy) from None
        if not isinstance(key, Ed25519PublicKey):
            problem = f"the public key is a {_key_type(key)}, must be Ed25519"
            raise BadKey("key.not-ed25519", problem, "make one with lamina keys new")
        return cls(key.public_bytes_raw())

    @classmethod
    def load(cls, path: str | Path) -> PublicKey:
        """Read a public key in PEM or COSE, whichever the file holds."""
        data = read_small(Path(path), "the public key", most=_MAX_KEY_FILE)
        if b"PRIVATE KEY-----" in data:
            remedy = "give its .pub file; nobody but its owner should have the private one"
            raise BadKey("key.private-given-for-public", f"'{path}' is a private key, not a public one", remedy)
        if data.lstrip().startswith(b"-----BEGIN"):
            return cls.from_pem(data)
        if data[:1] and data[0] >> 5 == 5:  # a CBOR map
            return cls.from_cose(data)
        problem = f"'{path}' is not a public key: it is neither PEM nor COSE"
        raise BadKey("key.not-a-public-key", problem, "give the .pub file that lamina keys new wrote")


class PrivateKey:
    """A key that signs. Only its id is ever shown; on disk it is PKCS#8, encrypted with a passphrase.

    `path` is the file that it was read from or written to; None for a key that is only in memory.
    """

    __slots__ = ("_key", "path", "public")

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None) -> None:
        self._key, self.path = key, path
        self.public = PublicKey(key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> PrivateKey:
        """A new key from the system's generator."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | Path, passphrase: bytes | None) -> PrivateKey:
        """Open a private key in PEM. A file without a passphrase must be readable by its owner alone."""
        key = _open_private(Path(path), passphrase)
        if not isinstance(key, Ed25519PrivateKey):
            problem = f"the private key '{path}' is a {_key_type(key)}, must be Ed25519"
            raise BadKey("key.not-ed25519", problem, "make one with lamina keys new")
        _check_only_its_owner_reads(Path(path))
        return cls(key, Path(os.path.realpath(path)))

    @staticmethod
    def sealed(path: str | Path) -> bool:
        """Whether opening this file takes a passphrase."""
        return _ENCRYPTED_PEM_LABEL in read_small(Path(path), "the private key", most=_MAX_KEY_FILE)

    def save(self, path: str | Path, passphrase: bytes | None) -> None:
        """Write it to a new file, mode 0600, never over another. None: without a passphrase."""
        _save_private(Path(path), self._key, passphrase)
        self.path = Path(os.path.realpath(path))

    def sign(self, message: bytes) -> bytes:
        """The signature of `message`, 64 bytes, the same each time."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"PrivateKey(id={self.public.name})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a private key is never pickled")


class P256Key:
    """A private key on the curve P-256, for signatures that others' tools ask for; on disk as a `PrivateKey` is."""

    __slots__ = ("_key", "id", "public_pem")

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key, form = key, serialization.PublicFormat.SubjectPublicKeyInfo
        self.public_pem = key.public_key().public_bytes(serialization.Encoding.PEM, form)
        self.id = hashlib.sha256(self.public_pem).hexdigest()

    @classmethod
    def generate(cls) -> P256Key:
        """A new key from the system's generator."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def load(cls, path: str | Path, passphrase: bytes | None) -> P256Key:
        """Open a private key in PEM. A file without a passphrase must be readable by its owner alone."""
        key = _open_private(Path(path), passphrase)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            problem = f"the private key '{path}' is a {_key_type(key)}, must be one on the curve P-256"
            raise BadKey("key.not-p256", problem, "make one with lamina keys new --type p256")
        _check_only_its_owner_reads(Path(path))
        return cls(key)

    def save(self, path: str | Path, passphrase: bytes | None) -> None:
        """Write it to a new file, mode 0600, never over another. None: without a passphrase."""
        _save_private(Path(path), self._key, passphrase)

    def sign(self, message: bytes) -> bytes:
        """The ECDSA signature with SHA-256, in DER; the same each time where OpenSSL can (RFC 6979, from 3.2 on)."""
        try:
            return self._key.sign(message, ec.ECDSA(SHA256(), deterministic_signing=True))
        except UnsupportedAlgorithm:
            return self._key.sign(message, ec.ECDSA(SHA256()))

    def __repr__(self) -> str:
        return f"P256Key(id={self.id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a private key is never pickled")


def p256_verifies(public_pem: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the P-256 key in this PEM signed the message; False for a key of another kind, too."""
    try:
        key = serialization.load_pem_public_key(public_pem)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            return False
        key.verify(signature, message, ec.ECDSA(SHA256()))
    except Exception:  # InvalidSignature, and as in `_open_private`
        return False
    return True


def _open_private(path: Path, passphrase: bytes | None) -> object:
    _check_passphrase(passphrase)
    data = read_small(path, "the private key", most=_MAX_KEY_FILE)
    encrypted = _ENCRYPTED_PEM_LABEL in data
    if b"BEGIN PUBLIC KEY-----" in data:
        beside = [each for suffix in (".key", ".pem") if (each := path.with_suffix(suffix)).exists()]
        named = f"'{beside[0]}'" if beside else f"'{path.with_suffix('.key')}', if it is named so"
        remedy = f"give the private key that belongs to it: {named}"
        raise BadKey("key.public-given-for-private", f"'{path}' is a public key, which cannot sign", remedy)
    if encrypted and not passphrase:
        raise BadKey("key.passphrase-missing", f"the private key '{path}' has a passphrase", "give the passphrase")
    try:
        if encrypted:
            _check_derivation(data)
        return serialization.load_pem_private_key(data, passphrase if encrypted else None)
    except Exception:  # of any kind: for some damaged keys the library raises an internal error
        problem = "is damaged, or has another passphrase" if encrypted else "is not readable PEM"
        remedy = "give the right passphrase and file"
        raise BadKey("key.private-not-opened", f"the private key '{path}' {problem}", remedy) from None


_SCRYPT = bytes.fromhex("060b2b06010401da47040b")
_MAX_ROUNDS, _MAX_SCRYPT = 10_000_000, 1 << 20  # rounds of PBKDF2; N·r of scrypt, in blocks of 128 bytes


def _check_derivation(pem: bytes) -> None:
    """Raise ValueError if deriving the key from the passphrase would take minutes or gigabytes: the file is damaged."""
    text = pem.partition(_ENCRYPTED_PEM_LABEL)[2].partition(b"-----END")[0]
    _, content = next(_elements(base64.b64decode(text)))
    _, algorithm = next(_elements(content))
    numbers, open_parts = [], [algorithm]
    for part in open_parts:  # grows inside the loop
        for tag, inner in _elements(part):
            if tag == _INTEGER:
                numbers.append(int.from_bytes(inner, "big"))
            elif tag == _SEQUENCE:
                open_parts.append(inner)
    if max(numbers, default=0) > _MAX_ROUNDS or (_SCRYPT in algorithm and math.prod(numbers[:2]) > _MAX_SCRYPT):
        raise ValueError("deriving its key from the passphrase would take minutes")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the consecutive DER elements of these bytes; raise ValueError if they are not DER."""
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1] if at + 1 < len(data) else 0xFF, at + 2
        if size >= 0x80:
            length, at = size & 0x7F, at + (size & 0x7F)
            size = int.from_bytes(data[at - length : at], "big") if 0 < length <= 4 else len(data)
        if at + size > len(data):
            raise ValueError("the bytes are not DER")
        yield tag, data[at : at + size]
        at += size


def _check_only_its_owner_reads(path: Path) -> None:
    if not PrivateKey.sealed(path) and (mode := os.stat(path).st_mode & 0o077):
        problem = f"the private key '{path}' has no passphrase and others may open it (mode …{mode:03o})"
        raise BadKey("key.private-file-open-to-others", problem, f"chmod 600 '{path}'")


def _save_private(path: Path, key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, passphrase: bytes | None) -> None:
    _check_passphrase(passphrase)
    if passphrase is not None and not passphrase:
        remedy = "give one, or None for a key that anybody with the file can use"
        raise BadKey("key.passphrase-empty", "the passphrase is empty", remedy)
    form = serialization.Encoding.PEM if passphrase is None else serialization.Encoding.DER
    data = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    data = data if passphrase is None else encrypted_pem(data, passphrase)
    write_new(path, data, "the private key", mode=0o600)


def _check_passphrase(given: object) -> None:
    if not isinstance(given, bytes | None):
        problem = f"the passphrase is a {type(given).__name__}, must be bytes"
        raise BadKey("key.passphrase-type", problem, 'give passphrase.encode("utf-8"), as lamina keys does')


def _key_type(key: object) -> str:
    return type(key).__name__.removesuffix("PublicKey").removesuffix("PrivateKey") or "key of another kind"
