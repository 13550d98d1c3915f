"""Serve a release: every query passes its gate first. Or a run: its ledger, with proofs. Spends nothing.

POST /v1/infer takes {"query": {"draws_on": …, "rights": …}, "inputs": [[…]]}; a query that the gate denies is answered with 403 and
every reason. POST /v1/decide asks the gate alone. Where things are: GET /v1/openapi.json, docs/service.md.

The model is loaded with the bytes that the manifest names. All of it answers, so a query must draw on all layers. With --ledger a
withdrawal counts within a second. Every query is denied if the newest signed time of the ledger (without a ledger, of the release)
is too old, so run lamina ledger heartbeat by a timer.

Ctrl-C stops it. It listens on this machine alone. Any other --host needs --keys, or certificates of clients (--tls-clients). A key
is any secret text, such as openssl rand -hex 32 prints; its line in --keys is a name and printf %s KEY | sha256sum.

Examples:

  lamina serve release-1 --trust release.pub --ledger runs/ecg.ledger.db --model nets:triage --inputs float32:12,256
  lamina serve release-1 --trust release.pub --model residual --log decisions.jsonl --log-key log.key
  lamina serve release-1 --trust release.pub --host 0.0.0.0 --keys apikeys.txt --tls-cert c.pem --tls-key k.pem
  lamina serve release-1 --trust release.pub --host 0.0.0.0 --tls-clients ca.pem --tls-cert c.pem --tls-key k.pem
  lamina serve runs/first
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.cli.certify import TRUST
from lamina.cli.command import Answer, argument, command, option, print_answer
from lamina.cli.terminal import existing_ledger, open_private_key, print_note, results_only
from lamina.errors import MissingPackage, PlanError
from lamina.ledger.reader import LedgerReader
from lamina.ledger.verify.tree_checks import Trust
from lamina.release.decision_log import DecisionLog
from lamina.release.gate import ReleaseGate
from lamina.release.manifest import MANIFEST

if TYPE_CHECKING:
    from lamina.serve.app import Service

_MODEL, _DOOR, _LIMITS = "The model", "Who may ask", "Limits"


@command(keys=True)
def serve(
    folder: Path = argument("DIR", "folder of a release, or of a run: then its ledger and pages alone"),
    trust: Trust | None = TRUST,
    ledger: str | None = option("ledger: withdrawals count at once, and its leaves are served", metavar="LEDGER"),
    model: str | None = option(
        "built-in name, or package.module:factory, as in RUN.toml", panel=_MODEL, metavar="NAME"
    ),
    inputs: str | None = option("type and shape of one input: float32:12,256", panel=_MODEL, metavar="FORM"),
    keys: Path | None = option("API keys: lines of NAME and SHA-256 of the key", panel=_DOOR),
    host: str = option("address to listen on", panel=_DOOR, default="127.0.0.1"),
    port: int = option("0 for any that is free", panel=_DOOR, min=0, max=65535, default=8000),
    tls_cert: Path | None = option("certificate of the server (PEM)", panel=_DOOR),
    tls_key: Path | None = option("its private key (PEM)", panel=_DOOR),
    tls_clients: Path | None = option("mutual TLS: who signs the certificates of clients (PEM)", panel=_DOOR),
    log: Path | None = option("decision log, signed with --log-key"),
    log_key: Path | None = option("private key for the log alone"),
    withdrawals: Path | None = option(
        "folder that lamina ledger withdraw --folder watches: take signed requests", metavar="DIR"
    ),
    rate: float = option("requests a second of one key", panel=_LIMITS, min=0.01, default=500.0),
    max_body: int = option("bytes of a request", panel=_LIMITS, min=1024, default=1 << 20),
    max_inputs: int = option("inputs of a request", panel=_LIMITS, min=1, default=256),
    timeout: float = option("seconds for a request", panel=_LIMITS, min=0.1, default=10.0),
    concurrent: int = option("requests at a time", panel=_LIMITS, min=1, default=64),
    concurrent_per_key: int = option("requests of one key at a time", panel=_LIMITS, min=1, default=16),
) -> None:
    try:
        import uvicorn

        from lamina.serve.app import Service, make_app
        from lamina.serve.limits import ApiKeys, BoundedHttp, Limits
        from lamina.serve.pages import pages
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio", "httptools"):
            raise
        problem = f"lamina serve needs {error.name}, which is not installed"
        raise MissingPackage("cli.serve-missing", problem, "pip install 'lamina[serve]'") from None
    local = _check_door(host, keys, tls_cert, tls_key, tls_clients)
    if (log is None) != (log_key is None):
        raise PlanError("cli.log-key", "only one of --log and --log-key is given", "give both, or neither")
    if withdrawals is not None and not (withdrawals / "done").is_dir():
        problem = f"'{withdrawals}' is not watched: it has no folder done/"
        remedy = "run lamina ledger withdraw LEDGER --folder DIR --watch 1 on it"
        raise PlanError("cli.withdrawals-folder", problem, remedy)
    limits = Limits(body=max_body, rate=rate, timeout=timeout, concurrent=concurrent, per_key=concurrent_per_key)
    with ExitStack() as opened:
        is_release = (folder / MANIFEST).is_file()
        beside = str(folder / "ledger.db") if ledger is None and not is_release else ledger
        place = None if beside is None else existing_ledger(beside)

        def reader() -> LedgerReader | None:
            return None if place is None else opened.enter_context(LedgerReader.read_only(place))

        service = Service(
            folder=folder, ledger=reader(), withdrawals=withdrawals, limits=limits, local=local,
            keys=None if keys is None else ApiKeys.load(keys),
        )  # fmt: skip
        opened.callback(service.close)
        if is_release:
            if trust is None:
                problem = "a release is served only under a key from elsewhere"
                raise PlanError("cli.trust-missing", problem, "give --trust")
            service.gate = ReleaseGate(folder, trust, ledger=reader())
            if model is not None:
                _load_model(service, model, inputs, max_inputs)
            if log is not None and log_key is not None:
                service.log = DecisionLog(log, open_private_key(log_key), service.gate.manifest)
        elif model is not None or log is not None:
            problem = f"'{folder}' is a run, which has no gate"
            raise PlanError("cli.not-a-release", problem, "make a release of it first")
        app = make_app(service, pages(service, trust))
        listening = opened.enter_context(_listen(host, port))
        address = listening.getsockname()[1]
        scheme = "http" if tls_cert is None else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{address}"
        told = {"url": url, "folder": str(folder), "release": is_release, "model": model, "ledger": place is not None}
        print_answer(Answer(told, f"serving {'release' if is_release else 'run'} '{folder}' at {url}"))
        sys.stdout.flush()
        config = uvicorn.Config(
            app, http=BoundedHttp.within(timeout), lifespan="off", ws="none", access_log=False, server_header=False, proxy_headers=False,
            log_level="warning", limit_concurrency=16 * concurrent, timeout_keep_alive=5,
            timeout_graceful_shutdown=int(timeout) + 1, ssl_certfile=tls_cert, ssl_keyfile=tls_key,
            ssl_ca_certs=None if tls_clients is None else str(tls_clients),
            ssl_cert_reqs=ssl.CERT_NONE if tls_clients is None else ssl.CERT_REQUIRED,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises the signal again when it has ended
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    print_note("stopped")


def _load_model(service: Service, name: str, inputs: str | None, most: int) -> None:
    from lamina.cli.by_name import BUILT_IN_MODELS, make_model
    from lamina.serve.inference import Inference, InputForm

    assert service.gate is not None
    built_in = BUILT_IN_MODELS.get(name)
    form = InputForm.parse(inputs, most, built_in and built_in.shape)
    factory: Callable[[], Any] = lambda: make_model(name)  # noqa: E731
    with results_only():
        service.inference = Inference(service.gate, factory, form)


def _check_door(host: str, keys: Path | None, cert: Path | None, key: Path | None, clients: Path | None) -> bool:
    """Whether only this machine can ask; refused if others could, without a key or a certificate."""
    if (cert is None) != (key is None) or (clients is not None and cert is None):
        raise PlanError("cli.tls-incomplete", "TLS needs a certificate and its key", "give --tls-cert and --tls-key")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and keys is None and clients is None:
        problem = f"--host {host} lets others in, and nothing says who may ask"
        raise PlanError("cli.open-door", problem, "give --keys, or --tls-clients with --tls-cert and --tls-key")
    if not local and cert is None:
        print_note("API keys travel in the clear: put TLS in front, or give --tls-cert and --tls-key")
    try:
        if cert is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=clients)
            context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        problem = f"the files for TLS cannot be used: {getattr(error, 'strerror', None) or error}"
        remedy = "give a certificate and its own key in PEM, and with --tls-clients the certificate of their authority"
        raise PlanError("cli.tls-files", problem, remedy) from None
    return local and clients is None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        problem = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise PlanError("cli.port-taken", problem, "give another --port or --host") from None
