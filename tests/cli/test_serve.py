"""`lamina serve`: as a program that is started, asked and stopped; and what it refuses to start with."""

from __future__ import annotations

import ipaddress
import json
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from asking import Call, answer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from trained_run import Trained, copied_run

from lamina.release.maker import make_release
from lamina.sign.keys import PrivateKey, write_new

NETS = """
from torch import nn
def net():
    print("made")
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
"""
QUERY = {
    "rights": {
        "classes": ["clinical", "sensitive", "open"],
        "max_epsilon": None,
        "min_noise_multiplier": 0,
        "purpose": "care",
    }
}


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    key, found = PrivateKey.generate(), copied_run(tmp_path)
    with found.open() as ledger:
        make_release(tmp_path / "release", [found.folder], ledger, key)
    write_new(tmp_path / "release.pub", key.public.pem(), "the key", mode=0o644)
    key.save(tmp_path / "log.key", None)
    (tmp_path / "nets.py").write_text(NETS)
    return found


@contextmanager
def running(folder: Path, *words: str) -> Iterator[dict[str, Any]]:
    """The service, and what it says when it begins; stopped as a supervisor does."""
    command = [sys.executable, "-m", "lamina", "serve", *words, "--port", "0", "--json"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        lines = []
        while (line := process.stdout.readline()) and (lines.append(line) or line != "}\n"):
            pass
        assert lines, process.stderr.read()
        yield json.loads("".join(lines))
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert "stopped" in said and "Traceback" not in said, said


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"})) as answer:
        return json.load(answer)


def test_a_release_is_served_and_stopped(trained: Trained, tmp_path: Path, lamina: Call) -> None:
    words = ["release", "--trust", "release.pub", "--ledger", str(trained.ledger), "--model", "nets:net"]
    words += ["--inputs", "float32:4", "--log", "decisions.jsonl", "--log-key", "log.key"]
    with running(tmp_path, *words) as told:
        assert told["release"] and told["ledger"] and told["url"].startswith("http://127.0.0.1:")
        found = ask(f"{told['url']}/v1/infer", {"query": QUERY, "inputs": [[1, 2, 3, 4]]})
        assert len(found["outputs"][0]) == 2
        assert ask(f"{told['url']}/healthz") == {"status": "ok"}
    own = PrivateKey.load(tmp_path / "log.key", None).public
    write_new(tmp_path / "log.pub", own.pem(), "the key", mode=0o644)
    found = answer(lamina("release", "log", "decisions.jsonl", "--trust", "log.pub", "--json"))
    assert found == {"log": "decisions.jsonl", "decisions": 1, "allowed": 1, "head": found["head"]}
    again = lamina("release", "log", "decisions.jsonl", "--trust", "log.pub", "--seen", "0" * 63 + "1", "--json")
    assert answer(again, 1)["code"] == "release.log-shorter"


def test_a_run_is_served(trained: Trained, tmp_path: Path) -> None:
    with running(tmp_path, str(trained.folder)) as told:
        assert not told["release"]
        assert ask(f"{told['url']}/v1/ledger/head")["origin"] == "example.org/ecg"


def certificate(
    folder: Path, name: str, by: str | None = None, *, days: int = 0, usage: x509.ObjectIdentifier | None = None
) -> None:
    """Write NAME.pem and NAME-key.pem: an authority, or a certificate signed by one; valid for `days` from now."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC) + timedelta(days=days)
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateBuilder().subject_name(own).public_key(key.public_key()).serial_number(len(name) + 1)
    made = made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
    made = made.add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signer: Any = key
    if usage is not None:
        made = made.add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
    if by is not None:
        made = made.add_extension(names, critical=False)
        signer = serialization.load_pem_private_key((folder / f"{by}-key.pem").read_bytes(), None)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by or name)])
    pem = made.issuer_name(issuer).sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / f"{name}.pem").write_bytes(pem)
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / f"{name}-key.pem").write_bytes(secret)


def test_mutual_tls(trained: Trained, tmp_path: Path) -> None:
    for name, by in (("authority", None), ("server", "authority"), ("client", "authority")):
        certificate(tmp_path, name, by)
    words = ["--tls-cert", "server.pem", "--tls-key", "server-key.pem", "--tls-clients", "authority.pem"]
    with running(tmp_path, str(trained.folder), *words) as told:
        stranger = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        with pytest.raises(OSError, match="certificate required|reset|closed|EOF"):
            urllib.request.urlopen(f"{told['url']}/healthz", context=stranger)
        known = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        known.load_cert_chain(tmp_path / "client.pem", tmp_path / "client-key.pem")
        with urllib.request.urlopen(f"{told['url']}/v1/ledger/head", context=known) as answer:
            assert answer.status == 200


def test_mutual_tls_lets_nobody_else_in(trained: Trained, tmp_path: Path) -> None:
    for name, by in (("authority", None), ("server", "authority"), ("client", "authority")):
        certificate(tmp_path, name, by)
    certificate(tmp_path, "expired", "authority", days=-1)
    certificate(tmp_path, "future", "authority", days=1)
    certificate(tmp_path, "other-server", "authority", usage=ExtendedKeyUsageOID.SERVER_AUTH)
    certificate(tmp_path, "by-a-client", "client")
    (tmp_path / "elsewhere").mkdir()
    certificate(tmp_path / "elsewhere", "authority")  # of the same name
    certificate(tmp_path / "elsewhere", "client", "authority")
    words = ["--tls-cert", "server.pem", "--tls-key", "server-key.pem", "--tls-clients", "authority.pem"]
    with running(tmp_path, str(trained.folder), *words) as told:
        port = int(told["url"].rpartition(":")[2])

        def status(name: str | None, sni: str | None = None, least: ssl.TLSVersion | None = None) -> int:
            context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
            context.check_hostname = False
            if name is not None:
                context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}-key.pem")
            if least is not None:
                context.minimum_version = context.maximum_version = least
            with (
                socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=sni) as secured,
            ):
                secured.sendall(b"GET /v1/ledger/head HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return int(secured.recv(65536).split()[1])

        def refused(name: str | None, **options: Any) -> None:
            with pytest.raises((OSError, IndexError)):  # a closed connection answers nothing
                status(name, **options)

        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]  # never begin a handshake
        assert status("client") == status("client", sni="another.example") == 200
        for name in (None, "expired", "future", "other-server", "by-a-client", "elsewhere/client"):
            refused(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            refused("client", least=ssl.TLSVersion.TLSv1_1)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP/")
        assert status("client") == 200
        for each in silent:
            each.close()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("release", "cli.trust-missing"),
        ("release --trust log.pub", "release.not-verified"),
        ("release --trust release.pub --host 0.0.0.0", "cli.open-door"),
        ("release --trust release.pub --host example.org", "cli.open-door"),
        ("release --trust release.pub --host 0.0.0.0 --tls-cert c --tls-key k", "cli.open-door"),
        ("release --trust release.pub --tls-cert c", "cli.tls-incomplete"),
        ("release --trust release.pub --tls-clients c", "cli.tls-incomplete"),
        ("release --trust release.pub --tls-cert c --tls-key k", "cli.tls-files"),
        ("release --trust release.pub --tls-cert server.pem --tls-key client-key.pem", "cli.tls-files"),
        ("release --trust release.pub --tls-cert log.pub --tls-key server-key.pem", "cli.tls-files"),
        ("release --trust release.pub --tls-cert server.pem --tls-key server-key.pem --tls-clients c", "cli.tls-files"),
        ("release --trust release.pub --log x", "cli.log-key"),
        ("release --trust release.pub --withdrawals .", "cli.withdrawals-folder"),
        ("release --trust release.pub --model nets:none", "cli.attribute-not-found"),
        ("release --trust release.pub --model mlp", "serve.weights-do-not-fit"),
        ("release --trust release.pub --keys empty", "serve.keys-file"),
        ("trained/first --model nets:net", "cli.not-a-release"),
    ],
)
def test_what_it_does_not_start_with(trained: Trained, tmp_path: Path, words: str, code: str, lamina: Call) -> None:
    write_new(tmp_path / "log.pub", PrivateKey.generate().public.pem(), "the key", mode=0o644)
    (tmp_path / "empty").write_text("")
    if "server.pem" in words or "server-key.pem" in words:
        for name, by in (("authority", None), ("server", "authority"), ("client", "authority")):
            certificate(tmp_path, name, by)
    assert answer(lamina("serve", *words.split(), "--port", "0", "--json"), 1)["code"] == code
