"""Inference: behind the gate, with the bytes that were verified, and with no layer more than the query draws on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hospital import usual
from refusals import raises_code
from served_net import Client, Net
from starlette.testclient import TestClient
from torch import nn
from trained_run import Trained

from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.withdrawal import withdraw
from lamina.release.decision_log import DecisionLog, read_log, verify_log
from lamina.release.gate import REFRESH_SECONDS, ReleaseGate
from lamina.release.maker import make_release
from lamina.release.query import GatePolicy
from lamina.serve.app import Service, make_app
from lamina.serve.inference import Inference, InputForm
from lamina.serve.limits import Limits
from lamina.sign.keys import PrivateKey

Query = dict[str, Any]
INPUTS = [[0.5, -1.0, 2.0, 0.25], [1.0, 0.0, 0.0, 3.0]]


def test_the_answer_is_the_models(client: Client, release: Path, query: Query) -> None:
    answer = client().post("/v1/infer", json={"query": query, "inputs": INPUTS})
    model = Net().eval()
    model.load_state_dict(safetensors.torch.load_file(release / "model.safetensors"))
    assert answer.status_code == 200
    assert torch.allclose(torch.tensor(answer.json()["outputs"]), model(torch.tensor(INPUTS)), atol=1e-6)
    assert answer.json()["decision"]["allowed"] and "no direct gradient" in answer.json()["decision"]["note"]


def test_a_denied_query_has_every_reason(client: Client, query: Query) -> None:
    query["rights"] |= {"classes": ["clinical"], "max_epsilon": 0.5, "purpose": "research"}
    served = client()
    answer = served.post("/v1/infer", json={"query": query, "inputs": INPUTS})
    assert answer.status_code == 403 and answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["code"] == "serve.denied" and "outputs" not in told
    codes = [(each["code"], each["class"]) for each in told["reasons"]]
    assert ("epsilon-too-large", "clinical") in codes and ("purpose-not-allowed", "sensitive") in codes
    decided = served.post("/v1/decide", json={"query": query}).json()
    assert not decided["allowed"] and decided["reasons"] == told["reasons"]


@pytest.mark.parametrize("draws", [{"layers": ["4"]}, {"depth": [0.5, 1.0]}])
def test_a_query_that_names_fewer_layers_than_answer_is_denied(client: Client, query: Query, draws: Query) -> None:
    """The gate allows it; the service knows that the whole model answers."""
    served, asked = client(), {**query, "draws_on": draws}
    assert served.post("/v1/decide", json={"query": asked}).json()["allowed"]
    answer = served.post("/v1/infer", json={"query": asked, "inputs": INPUTS})
    assert [each["code"] for each in answer.json()["reasons"]] == ["draws-on-less"]


def test_a_generation_class_has_its_own_layers_and_no_others(client: Client, query: Query, release: Path) -> None:
    served, asked = client(), {**query, "draws_on": {"generation_class": "head"}}
    hidden = [[0.1] * 8]
    answer = served.post("/v1/infer", json={"query": asked, "inputs": hidden})
    tensors = safetensors.torch.load_file(release / "model.safetensors")
    expected = torch.tensor(hidden) @ tensors["4.weight"].T + tensors["4.bias"]
    assert torch.allclose(torch.tensor(answer.json()["outputs"]), expected, atol=1e-6)
    more = served.post("/v1/infer", json={"query": asked, "inputs": INPUTS})  # would go through layers 0 and 2
    assert (more.status_code, more.json()["code"]) == (422, "serve.outputs-not-finite")
    whole = client(model=lambda: nn.Sequential(*Net()))  # does not offer it
    denied = whole.post("/v1/infer", json={"query": asked, "inputs": hidden})
    assert [each["code"] for each in denied.json()["reasons"]] == ["draws-on-less"]


def test_models_that_do_not_fit_are_refused(release: Path, key: PrivateKey) -> None:
    gate, form = ReleaseGate(release, key.public), InputForm()
    with raises_code("serve.weights-do-not-fit"):
        Inference(gate, lambda: nn.Linear(4, 2), form)
    other = Net()
    other.generation_classes = {"body": other.head}
    with raises_code("serve.generation-class-unknown"):
        Inference(gate, lambda: other, form)
    one = Net()
    with raises_code("serve.model-is-one-object"):
        Inference(gate, lambda: one, form)

    def tied() -> nn.Module:
        made = Net()
        made[2].bias = made[0].bias
        return made

    with raises_code("serve.tied-tensors"):
        Inference(gate, tied, form)
    (release / "model.safetensors").write_bytes(b"other")
    with raises_code("release.file-changed"):
        Inference(gate, Net, form)


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ([], "serve.inputs-count"),
        ({}, "serve.inputs-count"),
        ([[0.0] * 4] * 257, "serve.inputs-count"),
        ([[0.0] * 3], "serve.inputs-do-not-fit"),
        ([0.0] * 4, "serve.inputs-shape"),
        ([[0.0] * 4, [0.0]], "serve.inputs-ragged"),
        ([["0.5"] * 4], "serve.inputs-not-numbers"),
        ([[None] * 4], "serve.inputs-not-numbers"),
        ([[True] * 4], "serve.inputs-not-numbers"),
        ([[10**400] * 4], "serve.inputs-not-numbers"),
        ([[True, 1, 2, 3]], "serve.inputs-not-numbers"),
        ([["x" * 500_000, *["y"] * 100_000]], "serve.inputs-not-numbers"),  # numpy would ask for 200 GB
        ([[[0.0], 1.0]], "serve.inputs-ragged"),
        ([[1e300] * 4], "serve.inputs-not-finite"),
        ([[3e38] * 4], "serve.outputs-not-finite"),
    ],
)
def test_inputs_that_are_refused(client: Client, query: Query, inputs: object, code: str) -> None:
    answer = client(model=Unbounded).post("/v1/infer", json={"query": query, "inputs": inputs})
    assert (answer.status_code, answer.json()["code"]) == (422, code)


class Unbounded(nn.Sequential):
    """The net, but what it gives grows with its input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1e30


def test_the_form_of_inputs(client: Client, query: Query) -> None:
    served = client(form=InputForm.parse("float32:4", 1))
    for inputs, code in (([[0.0] * 8], "serve.inputs-shape"), ([[0.0] * 4] * 2, "serve.inputs-count")):
        answer = served.post("/v1/infer", json={"query": query, "inputs": inputs})
        assert (answer.status_code, answer.json()["code"]) == (422, code)
    with raises_code("serve.inputs-not-numbers"):
        InputForm.parse("int64", 4).read([[0.5]])
    with raises_code("serve.inputs-not-numbers"):
        InputForm.parse("int64", 4).read([[2**63]])  # which would become negative
    assert InputForm.parse("int64:1", 4).read([[7]]).dtype == torch.int64
    for text in ("float8", "float32:", "float32:0", "float32:a,b"):
        with raises_code("serve.input-form"):
            InputForm.parse(text, 1)


def test_a_fresh_withdrawal_denies_within_a_second(query: Query, key: PrivateKey, tmp_path: Path) -> None:
    hospital, place = usual(tmp_path, real=True), tmp_path / "runs" / "ward.ledger.db"
    trainer = hospital.trainer("first", corpus=hospital.admit(ledger=place), ledger=str(place))
    ward = Trained(tmp_path / "runs" / "first", trainer.fit(), name="ward.ledger.db")
    with ward.open() as ledger:
        make_release(tmp_path / "out", [ward.folder], ledger, key, gate=GatePolicy(unstated_purposes=True))
    with LedgerReader.read_only(place) as reader, ward.open() as ledger:
        service = Service(folder=tmp_path / "out", gate=ReleaseGate(tmp_path / "out", key.public, ledger=reader))
        served = TestClient(make_app(service), base_url="http://localhost")
        assert served.post("/v1/decide", json={"query": query}).json()["allowed"]
        withdraw(ledger, str(ward.someone("clinical")), WithdrawalReason.REQUEST)
        assert REFRESH_SECONDS <= 0.25
        began = time.monotonic()
        while (answer := served.post("/v1/decide", json={"query": query}).json())["allowed"]:
            assert time.monotonic() < began + 10  # on a busy machine; an idle one needs REFRESH_SECONDS
            time.sleep(0.02)
        assert [each["code"] for each in answer["reasons"]] == ["withdrawn"]


def test_decisions_are_logged_without_inputs_or_keys(client: Client, query: Query, release: Path, key: PrivateKey,
                                                     tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    own, path = PrivateKey.generate(), tmp_path / "decisions.jsonl"
    log = DecisionLog(path, own, ReleaseGate(release, key.public).manifest)
    served = client(log=log)
    served.post("/v1/infer", json={"query": query, "inputs": [[0.123456789] * 4]})
    served.post("/v1/infer", json={"query": {**query, "draws_on": {"layers": ["4"]}}, "inputs": INPUTS})
    served.post("/v1/decide", json={"query": query})
    log.close()
    assert verify_log(path, own.public).decisions == 3 and verify_log(path, own.public).allowed == 2
    told = [statement["predicate"]["lamina"] for _, statement in read_log(path, own.public)]
    assert [each["reasons"] for each in told][1] == [{"code": "draws-on-less", "class": None}]
    assert "0.123456789" not in json.dumps(told) and capfd.readouterr() == ("", "")
    answer = served.post("/v1/infer", json={"query": query, "inputs": INPUTS})  # the log is closed
    assert answer.status_code in (200, 503)


def test_what_cannot_be_logged_is_not_answered(client: Client, query: Query, release: Path, key: PrivateKey,
                                               tmp_path: Path) -> None:  # fmt: skip
    log = DecisionLog(tmp_path / "log", PrivateKey.generate(), ReleaseGate(release, key.public).manifest)
    log._failed = "No space left on device"
    answer = client(log=log).post("/v1/infer", json={"query": query, "inputs": INPUTS})
    assert (answer.status_code, answer.json()["code"]) == (503, "serve.unavailable")
    assert str(tmp_path) not in answer.text


def test_a_model_that_hangs_is_given_up(client: Client, query: Query) -> None:
    going = threading.Event()

    class Slow(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            going.wait(10)
            return x

    served = client(model=Slow, limits=Limits(timeout=0.3))
    answer = served.post("/v1/infer", json={"query": query, "inputs": INPUTS})
    going.set()
    assert (answer.status_code, answer.json()["code"]) == (503, "serve.timeout")
