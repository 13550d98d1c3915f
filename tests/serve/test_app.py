"""The service: ledger and proofs, withdrawals, papers, limits, keys, headers; every refusal a problem with a code."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hospital import usual
from refusals import raises_code
from served_net import Client
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient
from trained_run import Trained

from lamina.errors import family_of
from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.governance_records import Release
from lamina.ledger.merkle import leaf_hash, verify_consistency, verify_inclusion
from lamina.ledger.reader import LedgerReader
from lamina.ledger.receipt import TlogProof, verify_receipt
from lamina.ledger.records import ContributionRecord
from lamina.ledger.signed_checkpoint import verify_checkpoint
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import WithdrawalInbox
from lamina.ledger.withdrawal_request import sign_withdrawal
from lamina.ledger.writer import Ledger
from lamina.serve.app import Service, make_app
from lamina.serve.limits import ApiKeys, Limits, Metrics, TokenBuckets
from lamina.sign.keys import PrivateKey
from lamina.sign.notes import NoteKey

COSE = {"content-type": "application/cose"}


def code(answer: Any) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == answer.status_code and told["type"].endswith(told["code"]) and told["detail"]
    assert told["family"] == family_of(told["code"])
    return answer.status_code, told["code"]


def test_the_ledger_with_its_proofs(client: Client, trained: Trained) -> None:
    served = client()
    public = PrivateKey.load(ledger_key_path(trained.ledger), None).public
    head = served.get("/v1/ledger/head").json()
    signed = verify_checkpoint(served.get("/v1/ledger/checkpoint").text, [NoteKey(head["origin"], public)])
    assert head["size"] >= signed.size == head["signed"]
    for seq in (0, 5, signed.size - 1):
        leaf = served.get(f"/v1/ledger/leaves/{seq}").json()
        data = bytes.fromhex(leaf["leaf"])
        assert leaf["hash"] == leaf_hash(data).hex() and leaf["record"]["index"] == seq
        proof = served.get(f"/v1/ledger/proof/{seq}").json()
        path = [bytes.fromhex(each) for each in proof["path"]]
        assert verify_inclusion(leaf_hash(data), seq, signed.size, path, signed.root)
        assert TlogProof.parse(proof["text"]).verify(data, [NoteKey(head["origin"], public)]) == signed
        receipt = served.get(f"/v1/ledger/receipt/{seq}")
        assert receipt.headers["content-type"] == "application/cose"
        assert verify_receipt(receipt.content, data, public, head["origin"])
    told = served.get("/v1/ledger/consistency?old=7").json()
    path = [bytes.fromhex(each) for each in told["path"]]
    old, new = bytes.fromhex(told["old_root"]), bytes.fromhex(told["new_root"])
    assert told["new_root"] == head["root"] and verify_consistency(7, head["size"], path, old, new)


def test_leaves_in_pages(client: Client) -> None:
    served = client(limits=Limits(leaves=10))
    size, found = served.get("/v1/ledger/head").json()["size"], []
    while (page := served.get(f"/v1/ledger/leaves?from={len(found)}").json())["leaves"]:
        assert len(page["leaves"]) <= 10
        found += page["leaves"]
    assert [each["index"] for each in found] == list(range(size))
    assert served.get("/v1/ledger/leaves?from=3&to=5").json()["to"] == 5
    assert served.get("/v1/ledger/leaves?from=99999999").json()["leaves"] == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/ledger/leaves/x", (400, "serve.parameter")),
        ("/v1/ledger/leaves/-1", (400, "serve.parameter")),
        ("/v1/ledger/leaves/" + "9" * 5000, (400, "serve.parameter")),
        ("/v1/ledger/leaves/99999999", (404, "ledger.leaf-unknown")),
        ("/v1/ledger/proof/99999999", (404, "ledger.leaf-unknown")),
        ("/v1/ledger/receipt/99999999", (404, "ledger.leaf-unknown")),
        ("/v1/ledger/leaves?from=²", (400, "serve.parameter")),
        ("/v1/ledger/consistency", (400, "serve.parameter")),
        ("/v1/ledger/consistency?old=0", (400, "serve.parameter")),
        ("/v1/ledger/consistency?old=9&new=3", (400, "serve.parameter")),
        ("/v1/ledger/consistency?old=1&new=99999999", (404, "ledger.size-not-reached")),
        ("/v1/release/weights", (404, "serve.no-paper")),
        ("/v1/withdrawals/" + "0" * 32, (404, "serve.no-withdrawals")),
        ("/v1/infer", (405, "serve.method")),
        ("/v2", (404, "serve.not-found")),
        ("/v1/ledger/head/", (404, "serve.not-found")),
    ],
)
def test_what_is_not_there(client: Client, path: str, expected: tuple[int, str]) -> None:
    assert code(client(model=None).get(path)) == expected


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (b"{}", "text/plain", (415, "serve.content-type")),
        (b"{", "application/json", (400, "release.not-json")),
        (b"\xff", "application/json", (400, "release.not-json")),
        (b"[" * 100_000, "application/json", (400, "release.not-json")),
        (b'{"query": 1, "query": 2}', "application/json", (400, "release.not-json")),
        (b'{"query": NaN}', "application/json", (400, "release.not-json")),
        (b'{"query": "\\ud800"}', "application/json", (400, "release.not-json")),
        (b"[]", "application/json", (400, "serve.fields")),
        (b'{"query": 1, "more": 2}', "application/json", (400, "serve.fields")),
        (b'{"query": []}', "application/json", (400, "release.query-invalid")),
        (b"x" * (1 << 21), "application/json", (413, "serve.body-too-large")),
    ],
)
def test_bodies_that_are_refused(client: Client, body: bytes, kind: str, expected: tuple[int, str]) -> None:
    assert code(client().post("/v1/decide", content=body, headers={"content-type": kind})) == expected


def test_a_run_has_its_ledger_alone(trained: Trained, query: dict[str, Any]) -> None:
    with LedgerReader.read_only(trained.ledger) as ledger:
        served = TestClient(make_app(Service(folder=trained.folder, ledger=ledger)), base_url="http://127.0.0.1:8000")
        assert served.get("/v1/ledger/head").status_code == 200
        assert code(served.post("/v1/decide", json={"query": query})) == (404, "serve.no-release")
        assert code(served.post("/v1/infer", json={"query": query, "inputs": [[1]]})) == (404, "serve.no-model")
        assert code(served.get("/v1/release/manifest")) == (404, "serve.no-paper")
    bare = TestClient(make_app(Service(folder=trained.folder)), base_url="http://[::1]:8000")
    assert code(bare.get("/v1/ledger/head")) == (404, "serve.no-ledger")


def test_a_ledger_that_went_away_is_no_5xx_with_its_path(client: Client, tmp_path: Path) -> None:
    served = client()
    (ledger := served.app.service.ledger).store.close()  # type: ignore[attr-defined]
    Path(ledger.name).rename(tmp_path / "elsewhere")
    answer = served.get("/v1/ledger/leaves/3")
    assert answer.status_code in (200, 503) and str(tmp_path) not in answer.text


def test_a_ledger_that_is_destroyed_denies_and_names_no_path(
    client: Client, trained: Trained, query: dict[str, Any]
) -> None:
    served = client()
    assert served.post("/v1/decide", json={"query": query}).json()["allowed"]
    trained.ledger.write_bytes(b"\0" * 8192)
    time.sleep(0.3)
    answer = served.post("/v1/decide", json={"query": query})
    assert [each["code"] for each in answer.json()["reasons"]] == ["ledger-not-verified"]
    leaf = served.get("/v1/ledger/leaves/3")
    assert code(leaf) == (503, "serve.unavailable")
    assert str(trained.ledger.parent) not in answer.text + leaf.text


def test_the_papers_are_those_that_were_verified(client: Client, release: Path) -> None:
    served = client(model=None)
    assert served.get("/v1/release/manifest").content == (release / "manifest.json").read_bytes()
    assert served.get("/v1/release/certificate").content == (release / "certificate.json").read_bytes()
    service = served.app.service  # type: ignore[attr-defined]
    (release / "certificate.json").write_text("{}")
    with raises_code("release.file-changed"):
        make_app(service)


def test_a_withdrawal_needs_the_contributors_signature(tmp_path: Path) -> None:
    hospital, inbox = usual(tmp_path, real=True), tmp_path / "withdrawals"
    hospital.admit(ledger=tmp_path / "corpus.db")
    inbox.mkdir()
    keys = ApiKeys({"alice": hashlib.sha256(b"secret").digest()})
    with LedgerReader.read_only(tmp_path / "corpus.db") as ledger, Ledger.open(tmp_path / "corpus.db") as book:
        watched = WithdrawalInbox(book, inbox)
        service = Service(folder=tmp_path, ledger=ledger, withdrawals=inbox, keys=keys)
        served = TestClient(make_app(service), headers={"authorization": "Bearer secret"})
        record = next(ledger.of_kind(ContributionRecord)).record
        assert isinstance(record, ContributionRecord)
        header = bytes.fromhex(served.get("/v1/ledger/head").json()["header"])
        forged = sign_withdrawal(record.descriptor, "consent", PrivateKey.generate(), ledger=header)
        signed = sign_withdrawal(record.descriptor, "consent", hospital.key, ledger=header)
        refused = served.post("/v1/withdrawals", content=forged, headers=COSE)
        assert code(refused) == (403, "ledger.request-not-signed")
        for body in (b"", b"{}", b"\xa0", signed[:-1]):
            assert served.post("/v1/withdrawals", content=body, headers=COSE).status_code == 400
        assert code(served.post("/v1/withdrawals", content=b"x" * 9999, headers=COSE)) == (413, "serve.body-too-large")
        assert not [path for path in inbox.iterdir() if path.is_file()]
        taken = served.post("/v1/withdrawals", content=signed, headers=COSE)
        assert (taken.status_code, taken.json()["state"]) == (202, "pending")
        (result,) = watched.take()
        assert result.withdrawn[0].target.record == record
        assert result.withdrawn[0].leaf.record.signed == signed  # type: ignore[union-attr]
        assert verify(tmp_path / "corpus.db").verified
        again = served.post("/v1/withdrawals", content=signed, headers=COSE)
        assert (again.status_code, again.json()["state"]) == (200, "done")
        assert served.get(f"/v1/withdrawals/{taken.json()['name']}").json()["state"] == "done"
        assert code(served.get("/v1/withdrawals/.."))[0] == 404
        assert code(served.get("/v1/withdrawals/" + "0" * 32)) == (404, "serve.withdrawal-unknown")


def test_keys(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "apikeys.txt"
    file.write_text(f"# made today\nalice {hashlib.sha256(b'wonder').hexdigest()}  # laptop\n\n")
    served = client(keys=ApiKeys.load(file), local=False)
    basic = base64.b64encode(b"anybody:wonder").decode()
    for good in ("Bearer wonder", "bearer wonder", f"Basic {basic}"):
        assert served.get("/v1/ledger/head", headers={"authorization": good}).status_code == 200
    for bad in ("", "Bearer", "Bearer Wonder", "Basic wonder", "Basic !!", "Digest wonder", "wonder"):
        answer = served.get("/v1/ledger/head", headers={"authorization": bad})
        assert code(answer) == (401, "serve.key-missing") and "wonder" not in answer.text.lower()
        assert "Basic" in answer.headers["www-authenticate"]
    assert code(served.get("/metrics")) == (401, "serve.key-missing")
    assert served.get("/healthz").json() == {"status": "ok"}
    of_nothing = hashlib.sha256(b"").hexdigest()
    for text in ("", "alice wonder", f"alice {'0' * 64}\nalice {'1' * 64}", f"alice {of_nothing}"):
        file.write_text(text)
        with raises_code("serve.keys-file"):
            ApiKeys.load(file)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost:80:80"])
def test_a_page_elsewhere_cannot_ask_a_local_service(client: Client, host: str) -> None:
    assert code(client().get("/v1/ledger/head", headers={"host": host})) == (421, "serve.host-unknown")


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"origin": "https://evil.example"}, True),
        ({"origin": "null"}, True),
        ({"origin": "http://localhost:8001", "sec-fetch-site": "same-site"}, True),
        ({"origin": "http://localhost", "sec-fetch-site": "same-origin"}, False),
        ({"origin": "http://localhost"}, False),
        ({}, False),
    ],
)
def test_a_page_elsewhere_cannot_send_a_form(client: Client, headers: dict[str, str], refused: bool) -> None:
    found = code(client().post("/v1/decide", content=b"{}", headers={"content-type": "application/json", **headers}))
    assert found == ((403, "serve.cross-site") if refused else (400, "serve.fields"))


def test_the_rate_of_a_key_is_limited(client: Client) -> None:
    served = client(limits=Limits(rate=2.0), model=None)
    assert [served.get("/v1/openapi.json").status_code for _ in range(4)] == [200] * 4
    served = client(limits=Limits(rate=0.01), model=None)  # no second token while the test runs
    assert served.get("/v1/openapi.json").status_code == 200
    refused = served.get("/v1/openapi.json")
    assert code(refused) == (429, "serve.too-many-requests") and int(refused.headers["retry-after"]) >= 1
    buckets = TokenBuckets(10.0)
    assert sum(buckets.wait("a", 0.0) == 0 for _ in range(30)) == 20 and buckets.wait("b", 0.0) == 0
    assert buckets.wait("a", 0.05) == pytest.approx(0.05)
    assert buckets.wait("a", 0.2) == 0
    assert sum(buckets.wait(f"c{i}", 0.3) == 0 for i in range(20_000)) <= 10_000


def test_slow_bodies_and_crowds_are_refused(client: Client) -> None:
    app = client(limits=Limits(timeout=0.2, concurrent=1)).app
    sent: list[dict[str, Any]] = []

    async def ask(path: str, receive: Any) -> None:
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "client": ("x", 1)}  # fmt: skip

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app(scope, receive, send)  # type: ignore[arg-type]

    async def never() -> Any:
        await asyncio.sleep(5)

    async def both() -> None:
        await asyncio.gather(ask("/v1/decide", never), ask("/v1/decide", never))

    asyncio.run(both())
    assert [each["status"] for each in sent if each["type"] == "http.response.start"] == [503, 408]


def test_headers_and_pages(client: Client) -> None:
    service = client(model=None).app.service  # type: ignore[attr-defined]

    async def page(request: Any) -> Response:
        raise ValueError("with a secret in it")

    served = TestClient(make_app(service, [Route("/page", page)]), base_url="http://localhost")
    answers = [served.get("/healthz"), served.get("/none"), served.get("/page")]
    assert [each.status_code for each in answers] == [200, 404, 500]
    assert code(answers[2]) == (500, "serve.unexpected") and "secret" not in answers[2].text
    for each in answers:
        policy = each.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe-inline" not in policy
        assert each.headers["x-content-type-options"] == "nosniff"
        assert each.headers["referrer-policy"] == "no-referrer"


def test_metrics(client: Client, query: dict[str, Any]) -> None:
    served = client()
    served.post("/v1/decide", json={"query": query})
    query["rights"]["classes"] = []
    served.post("/v1/decide", json={"query": query})
    served.get("/none")
    lines = served.get("/metrics").text.splitlines()
    assert 'lamina_requests_total{route="/v1/decide",status="200"} 2' in lines
    assert 'lamina_requests_total{route="other",status="404"} 1' in lines
    assert 'lamina_decisions_total{verdict="denied"} 1' in lines
    assert 'lamina_denied_total{reason="class-not-allowed"} 1' in lines
    assert "lamina_request_seconds_count 3" in lines and "lamina_requests_in_flight 1" in lines
    assert any(line.startswith("lamina_ledger_leaves ") for line in lines)
    assert "lamina_ledger_leaves" not in Metrics().text(None)


def test_a_ledger_that_is_moved_or_replaced_is_noticed(
    client: Client, query: dict[str, Any], trained: Trained, tmp_path: Path
) -> None:
    """By the gate, and by what else is served of it. Refusals name the cause, and no file."""
    served = client(model=None)
    assert served.post("/v1/decide", json={"query": query}).json()["allowed"]
    size = served.get("/v1/ledger/head").json()["size"]
    os.rename(trained.ledger, away := tmp_path / "away.db")
    time.sleep(0.3)
    found = served.post("/v1/decide", json={"query": query}).json()
    assert [each["code"] for each in found["reasons"]] == ["ledger-unreachable"]
    assert str(tmp_path) not in json.dumps(found)
    assert code(served.get("/v1/ledger/head")) == (503, "serve.unavailable")
    shutil.copy(away, trained.ledger)
    with trained.open() as ledger:
        ledger.append([Release(manifest=bytes(32), runs=())])
        ledger.checkpoint()
    time.sleep(1.1)
    found = served.post("/v1/decide", json={"query": query}).json()
    assert found["allowed"] and served.get("/v1/ledger/head").json()["size"] == size + 1
