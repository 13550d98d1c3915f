"""Ed25519 keys: who signs a contribution, and who checks it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from nacl.bindings import crypto_core_ed25519_is_valid_point, crypto_sign_open
from nacl.exceptions import CryptoError

from lamina import cbor
from lamina.admit import files, pkcs8
from lamina.errors import BadKey, EncodingError

EDDSA, ED25519 = -8, -19  # two names of one algorithm: RFC 9053 §2.2, RFC 9864 §2.2
ALGORITHMS = (EDDSA, ED25519)

_MAX_FILE = 16 * 1024
_THUMBPRINT = bytes.fromhex("a301012006215820")  # {1: 1, -1: 6, -2: h'x'}: kty OKP, crv Ed25519
_KTY, _KID, _ALG, _OPS, _CRV, _X, _D = 1, 2, 3, 4, -1, -2, -4  # RFC 9052 §7.1, RFC 9053 §7.2
_VERIFY = 2  # key operation
_SEALED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


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
            raise BadKey(
                "key.public-key-ed25519",
                f"the public key is {size}, an Ed25519 key has 32 bytes",
                "give its x coordinate",
            )
        if not crypto_core_ed25519_is_valid_point(self.x):
            raise BadKey(
                "key.public-key-no",
                f"the public key {self.x.hex()} is no point of prime order on Ed25519",
                "make a key with lamina keys new: this one is damaged, or made so that anybody can sign for it",
            )
        object.__setattr__(self, "id", hashlib.sha256(_THUMBPRINT + self.x).digest())

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

    # ----------------------------------------------------------------------------------- formats

    def cose(self) -> bytes:
        """A COSE_Key in deterministic CBOR."""
        return cbor.encode({_KTY: 1, _KID: self.id, _ALG: EDDSA, _CRV: 6, _X: self.x})

    @classmethod
    def from_cose(cls, data: bytes) -> PublicKey:
        """Read a COSE_Key; what it says of itself (kid, algorithm, operations) must be true."""
        try:
            found = cbor.decode(data, max_size=_MAX_FILE)
        except EncodingError as error:
            raise BadKey(
                "key.cose-key-damaged", f"the COSE key is damaged: {error.problem}", error.remedy
            ) from None
        if not isinstance(found, dict) or (found.get(_KTY), found.get(_CRV)) != (1, 6):
            raise BadKey(
                "key.cose-key-not", "the COSE key is not of kind OKP on curve Ed25519", "give an Ed25519 key"
            )
        if _D in found:
            raise BadKey(
                "key.cose-key-holds",
                "the COSE key holds its private part",
                "never hand that out: make a new key",
            )
        if unknown := sorted(map(str, found.keys() - {_KTY, _KID, _ALG, _OPS, _CRV, _X})):
            raise BadKey(
                "key.cose-key-unknown",
                f"the COSE key has unknown fields {', '.join(unknown)}",
                "leave them out",
            )
        if found.get(_ALG, EDDSA) not in ALGORITHMS:
            raise BadKey(
                "key.cose-key-algorithm",
                f"the COSE key is for algorithm {found[_ALG]!r}, known are {EDDSA} and {ED25519}",
                "give a key for EdDSA",
            )
        operations = found.get(_OPS, [_VERIFY])
        if not isinstance(operations, list) or _VERIFY not in operations:
            raise BadKey(
                "key.cose-key-not-verifying",
                "the COSE key is not for verifying",
                "give it key operation 2, or none",
            )
        key = cls(found.get(_X, b""))
        if found.get(_KID, key.id) != key.id:
            raise BadKey(
                "key.cose-key-says",
                f"the COSE key says its id is {_shown(found[_KID])}, its thumbprint is {key.name}",
                "leave the id out, or give the thumbprint (RFC 9679)",
            )
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
        except (ValueError, UnsupportedAlgorithm):
            raise BadKey(
                "key.public-key-no-pem",
                "the public key is no PEM that can be read",
                "give a BEGIN PUBLIC KEY block",
            ) from None
        if not isinstance(key, Ed25519PublicKey):
            raise BadKey(
                "key.public-key-ed25519-make",
                f"the public key is a {_kind(key)}, must be Ed25519",
                "make one with lamina keys new",
            )
        return cls(key.public_bytes_raw())

    @classmethod
    def load(cls, path: str | Path) -> PublicKey:
        """Read a public key in PEM or COSE, whichever the file holds."""
        data = files.read_small(Path(path), "the public key", most=_MAX_FILE)
        if b"PRIVATE KEY-----" in data:
            raise BadKey(
                "key.private-key-public",
                f"'{path}' is a private key, a public one is asked for",
                "give its .pub file; nobody but its owner should have the private one",
            )
        return cls.from_pem(data) if data.lstrip().startswith(b"-----BEGIN") else cls.from_cose(data)


class PrivateKey:
    """A key that signs. Nothing but its id is ever shown; on disk it is PKCS#8, encrypted with a passphrase."""

    __slots__ = ("_key", "public")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> PrivateKey:
        """A new key from the system's generator."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | Path, passphrase: bytes | None) -> PrivateKey:
        """Open a private key in PEM. A file without a passphrase must be readable by its owner alone."""
        path = Path(path)
        data = files.read_small(path, "the private key", most=_MAX_FILE)
        sealed = _SEALED in data
        if passphrase and not sealed:
            passphrase = None  # it is not locked: there is nothing to open
        if sealed and not passphrase:
            raise BadKey(
                "key.private-key-passphrase",
                f"the private key '{path}' has a passphrase",
                "give the passphrase",
            )
        try:
            key = serialization.load_pem_private_key(data, passphrase)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            problem = (
                "is not opened by this passphrase, or damaged" if sealed else "is no PEM that can be read"
            )
            raise BadKey(
                "key.private-key", f"the private key '{path}' {problem}", "give its own passphrase and file"
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise BadKey(
                "key.private-key-ed25519",
                f"the private key '{path}' is a {_kind(key)}, must be Ed25519",
                "make one with lamina keys new",
            )
        if not sealed and (mode := os.stat(path).st_mode & 0o077):
            raise BadKey(
                "key.private-key-no",
                f"the private key '{path}' has no passphrase and others may open it (mode …{mode:03o})",
                f"chmod 600 '{path}'",
            )
        return cls(key)

    @staticmethod
    def sealed(path: str | Path) -> bool:
        """Whether opening this file takes a passphrase."""
        return _SEALED in files.read_small(Path(path), "the private key", most=_MAX_FILE)

    def save(self, path: str | Path, passphrase: bytes | None) -> None:
        """Write it to a new file, mode 0600, never over another. None: without a passphrase."""
        if passphrase is not None and not passphrase:
            raise BadKey(
                "key.passphrase-empty",
                "the passphrase is empty",
                "give one, or None for a key that anybody with the file can use",
            )
        seed = self._key.private_bytes_raw()
        data = pkcs8.plain_pem(seed) if passphrase is None else pkcs8.sealed_pem(seed, passphrase)
        files.write_new(Path(path), data, "the private key", mode=0o600)

    def sign(self, message: bytes) -> bytes:
        """The signature of `message`, 64 bytes, the same each time."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"PrivateKey(id={self.public.name})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a private key is never pickled")


def _kind(key: object) -> str:
    return type(key).__name__.removesuffix("PublicKey").removesuffix("PrivateKey") or "key of another kind"


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
