"""Texts of different lengths under PEFT adapters: engine against oracle, audit, saving, and the loss of one example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from adapted_models import CONFIGS, TARGETS, adapted, base_model, texts
from by_hand import QUIET
from oracle import agree, plan_of
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina import Batch, Engine, SeededNoise
from lamina.audit.paired_step import Without, paired_step
from lamina.audit.target import AuditTarget
from lamina.integrations.tokens import IGNORED, LabelLoss, TokenLoss, loss_for, token_corpus

pytestmark = QUIET
LENGTH = 9
BERT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def losses(model: nn.Module, x: Any, y: Tensor) -> Tensor:
    return TokenLoss()(model(**x), y)


def batch_of(count: int = 6) -> tuple[dict[str, Tensor], Tensor]:
    """Texts of 3 to 12 tokens, padded or cut to 9."""
    x, y = token_corpus(texts(count), length=LENGTH, pad=0).source.fetch(torch.arange(count).numpy())
    return x, y


@pytest.mark.parametrize("base", TARGETS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_clipped_sums_of_padded_texts(base: str, kind: str) -> None:
    x, y = batch_of()
    assert int((y == IGNORED).sum()) > 0
    agree(adapted(base, kind), x, y, losses=losses)


@pytest.mark.parametrize("kind", CONFIGS)
def test_patients_with_several_texts(kind: str) -> None:
    x, y = batch_of()
    unit = torch.tensor([0, 1, 0, 2, 1, 2])
    agree(adapted("llama", kind), x, y, losses=losses, batch={"unit": unit}, forms=("joint",))


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        ("llama", "lora"),
        *(pytest.param(b, k, marks=pytest.mark.slow) for b in TARGETS for k in CONFIGS if (b, k) != ("llama", "lora")),
    ],
)
@pytest.mark.parametrize("without", list(Without))
def test_no_text_moves_more_than_its_bound(base: str, kind: str, without: Without) -> None:
    """The paired step, for the longest text, the shortest, and each in between."""
    x, y = batch_of()
    model = adapted(base, kind)
    plan = plan_of(model, 0.02, 0.03)
    target = AuditTarget(model=model, plan=plan, losses_of=lambda x, y: losses(model, x, y))
    found = [
        paired_step(target, Batch(x, y, cls=torch.zeros(6, dtype=torch.long)), u, without=without) for u in range(6)
    ]
    assert all(step.sound for step in found), [step.ratio for step in found]
    assert max(step.ratio for step in found) > 0.1  # the bound is pressed against, not far away


@pytest.mark.parametrize("shift", [True, False])
def test_the_loss_of_one_text_is_the_models_own(shift: bool) -> None:
    """Alone in its batch, the loss that the model computes by itself is the same; among others it is not."""
    x, y = batch_of()
    if shift:
        model = base_model("llama").eval()
    else:
        config = transformers.BertConfig(**BERT)
        model = transformers.BertForMaskedLM(config).eval()
    assert loss_for(model) == TokenLoss(shift=shift)
    with torch.no_grad():
        each = loss_for(model)(model(**x), y)
        for i in range(len(y)):
            alone = {name: t[i : i + 1] for name, t in x.items()}
            torch.testing.assert_close(each[i], model(**alone, labels=y[i : i + 1]).loss, rtol=1e-4, atol=1e-5)
        assert abs(float(each.mean() - model(**x, labels=y).loss)) > 1e-6


def test_the_loss_by_the_name_of_the_model() -> None:
    config = transformers.BertConfig(**BERT)
    assert loss_for(transformers.BertForSequenceClassification(config), 0.1) == LabelLoss(0.1)
    assert loss_for(adapted("gpt2", "lora")) == TokenLoss()
    with raises_code("integrations.loss-unknown"):
        loss_for(transformers.BertModel(config))
    config.problem_type = "regression"
    with raises_code("integrations.loss-unknown"):
        loss_for(transformers.BertForSequenceClassification(config))


def test_labels_of_texts() -> None:
    corpus = token_corpus(
        [{"input_ids": [5, 6], "labels": [IGNORED, 6]}, {"input_ids": [7], "labels": [7]}], length=3, pad=0
    )
    x, y = corpus.source.fetch(torch.arange(2).numpy())
    assert x["input_ids"].tolist() == [[5, 6, 0], [7, 0, 0]]
    assert x["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert y.tolist() == [[IGNORED, 6, IGNORED], [7, IGNORED, IGNORED]]
    classified = token_corpus([[5, 6], [7]], length=3, pad=0, labels=[1, 0])
    assert classified.source.fetch(torch.arange(2).numpy())[1].tolist() == [1, 0]
    with raises_code("integrations.text-empty"):
        token_corpus([[5], []], length=3, pad=0)
    with raises_code("integrations.not-a-count"):
        token_corpus([[5]], length=0, pad=0)


@pytest.mark.parametrize("base", TARGETS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_save_and_load(base: str, kind: str, tmp_path: Path) -> None:
    """After private steps: the same keys, `generate` as ever, and the adapter reads back bit for bit."""
    model = adapted(base, kind)
    keys, x, y = list(model.state_dict()), *batch_of()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    with Engine(model, plan_of(model, 0.1, 0.1), noise=SeededNoise(1)) as engine:
        for _ in range(2):
            engine.backward(losses(model, x, y), Batch(x, y))
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(tmp_path)  # also while the engine is attached
    assert list(model.state_dict()) == keys
    again = peft.PeftModel.from_pretrained(base_model(base), tmp_path).eval()
    model.eval()

    def written(m: Any) -> Tensor:
        start = {name: t[:2, :3] for name, t in x.items()}
        found: Tensor = m.generate(**start, max_new_tokens=4, do_sample=False)
        return found

    assert torch.equal(written(again), written(model))
    with torch.no_grad():
        assert torch.equal(again(**x).logits, model(**x).logits)


class Columns:
    """What `datasets.Dataset` is to us: named columns, rows by number."""

    def __init__(self, **columns: Any) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: each[key] for name, each in self.columns.items()}


def test_what_tokenisers_and_data_sets_give() -> None:
    """Lists, mappings of columns, data sets and lists of mappings are the same corpus; padding of a tokeniser goes."""
    ids, labels, patient = [[5, 6, 7], [8], [9, 4]], [1, 0, 1], ["a", "a", "b"]
    padded = {"input_ids": [[5, 6, 7], [8, 0, 0], [9, 4, 0]], "attention_mask": [[1, 1, 1], [1, 0, 0], [1, 1, 0]]}
    expected = token_corpus(ids, length=4, pad=0, labels=labels, unit=patient)
    columns = {**padded, "label": labels, "patient": patient}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(3)]
    for given in (columns, Columns(**columns), rows, {"input_ids": ids, "labels": labels, "patient": patient}):
        found = token_corpus(given, length=4, pad=0, unit="patient")
        assert found.digest(b"k") == expected.digest(b"k") and len(found) == 2 and found.unit_name == "patient"
    left = {"input_ids": [[0, 5, 6]], "attention_mask": [[0, 1, 1]]}
    x, y = token_corpus({**left, "tags": [[-100, 1, 2]]}, length=3, pad=0, labels="tags").source.fetch(np.arange(1))
    assert x["input_ids"].tolist() == [[5, 6, 0]] and y.tolist() == [[1, 2, IGNORED]]
    with raises_code("corpus.column-unknown"):
        token_corpus(columns, length=4, pad=0, unit="person")
    with raises_code("corpus.dataset-of-tokens"):
        lamina.Corpus(Columns(**columns))
