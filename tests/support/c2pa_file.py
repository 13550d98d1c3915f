"""A sound file with an embedded C2PA manifest, signed by a certificate made for it."""

from __future__ import annotations

import io
import json
import wave
from datetime import UTC, datetime, timedelta
from typing import Any

import c2pa
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def _name(common: str) -> x509.Name:
    parts = {NameOID.COUNTRY_NAME: "US", NameOID.ORGANIZATION_NAME: "Example", NameOID.COMMON_NAME: common}
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in parts.items()])


def _certificate(key: Any, issuer: Any, *, authority: bool) -> bytes:
    now, usage = datetime.now(UTC), dict.fromkeys(_USAGES, False)
    usage["key_cert_sign" if authority else "digital_signature"] = True
    made = (
        x509.CertificateBuilder(serial_number=x509.random_serial_number(), public_key=key.public_key())
        .subject_name(_name("authority" if authority else "signer"))
        .issuer_name(_name("authority"))
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
    )
    if not authority:
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION]), critical=False)
    return made.sign(issuer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def signed_sound(samples: bytes, *assertions: dict[str, Any]) -> bytes:
    """A WAV file with these samples and a C2PA manifest with these assertions."""
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    chain = _certificate(key, authority, authority=False) + _certificate(authority, authority, authority=True)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    plain, signed = io.BytesIO(), io.BytesIO()
    with wave.open(plain, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(250)
        file.writeframes(samples)
    plain.seek(0)
    source = "http://cv.iptc.org/newscodes/digitalsourcetype/digitalCapture"
    created = {"label": "c2pa.actions", "data": {"actions": [{"action": "c2pa.created", "digitalSourceType": source}]}}
    manifest = {"claim_generator_info": [{"name": "test", "version": "1"}], "title": "recording", "format": "audio/wav"}
    info = c2pa.C2paSignerInfo(alg=b"es256", sign_cert=chain, private_key=secret, ta_url=None)
    told = json.dumps({**manifest, "assertions": [created, *assertions]})
    with c2pa.Signer.from_info(info) as signer, c2pa.Builder(told) as builder:
        builder.sign(signer, "audio/wav", plain, signed)
    return signed.getvalue()
