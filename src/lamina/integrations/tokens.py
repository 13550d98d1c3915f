"""Texts as a corpus, and one loss per example: what language models of Hugging Face need for a private step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lamina.errors import CorpusError, RunError
from lamina.run.corpus import EACH_EXAMPLE, Corpus
from lamina.validate import whole

IGNORED = -100
"""The label of a position that no loss counts, as Hugging Face has it."""


def token_corpus(
    texts: Any, *, length: int, pad: int, labels: Sequence[Any] | str | None = None, unit: Any = None, **options: Any
) -> Corpus:
    """A corpus of tokenised texts, each cut or padded on the right to `length` tokens.

        corpus = token_corpus(tokenizer(notes), length=128, pad=tokenizer.pad_token_id, unit=patient)

    texts    what a tokeniser gives for a list of texts; a `datasets.Dataset` or a list of mappings with `input_ids`; or a
             list of token ids for each example. Positions with `attention_mask` 0 are left out
    length   a public number, chosen without looking at the data: the longest text would give itself away
    pad      the token at positions after the end, which attention and loss leave out
    labels   by example a class number, or a number per token, or the name of a column; default: the column `labels` or
             `label`, or the tokens themselves, from which a causal language model predicts each from those before it
    unit     as `Corpus` takes it, or the name of a column
    options  as `Corpus` takes them: cls, policy, …
    """
    whole(CorpusError, "integrations.not-a-count", length=length)
    found = _column(texts, "input_ids") or list(texts)
    masks, rows = _column(texts, "attention_mask"), [_numbers(ids) for ids in found]
    kept = rows if masks is None else [_numbers(mask).bool() for mask in masks]
    ids_of = rows if masks is None else [ids[mask] for ids, mask in zip(rows, kept, strict=True)]
    if empty := [row for row, ids in enumerate(ids_of) if not len(ids)]:
        problem = f"text {empty[0]} has no tokens, and attention over nothing is not a number"
        remedy = "leave it out, or begin every text with a token of its own"
        raise CorpusError("integrations.text-empty", problem, remedy)
    if isinstance(labels, str):
        labels = _named(texts, labels)
    elif labels is None:
        labels = _column(texts, "labels") or _column(texts, "label")
    ids = _padded(ids_of, length, pad)
    mask = _padded([torch.ones_like(row) for row in ids_of], length, 0)
    if labels is None:
        y = ids.masked_fill(mask == 0, IGNORED)
    else:
        targets = [_numbers(label) for label in labels]
        if masks is not None:
            targets = [t[m] if t.shape == m.shape else t for t, m in zip(targets, kept, strict=True)]
        y = torch.stack(targets) if all(t.dim() == 0 for t in targets) else _padded(targets, length, IGNORED)
    if isinstance(unit, str) and unit != EACH_EXAMPLE:
        options.setdefault("unit_name", unit)
        unit = _named(texts, unit)
    return Corpus({"input_ids": ids, "attention_mask": mask}, y, unit=unit, **options)


def _column(texts: Any, name: str) -> list[Any] | None:
    """A column of a mapping of columns, of a `datasets.Dataset`, or of a list of mappings; None if it is not there."""
    names = texts if isinstance(texts, Mapping) else getattr(texts, "column_names", None)
    if names is not None:
        return list(texts[name]) if name in names else None
    first = next(iter(texts), None) if isinstance(texts, Sequence) else None
    return [text[name] for text in texts] if isinstance(first, Mapping) and name in first else None


def _named(texts: Any, name: str) -> list[Any]:
    if (found := _column(texts, name)) is None:
        problem = f"the texts have no column {name!r}"
        raise CorpusError("corpus.column-unknown", problem, "name a column of the data set, or give one value per text")
    return found


def _numbers(values: Any) -> Tensor:
    found = torch.as_tensor(values)
    if found.is_floating_point() and found.numel():
        problem = "token ids or labels are floats, and their fractions would be cut off"
        raise CorpusError(
            "integrations.tokens-not-whole", problem, "give whole numbers; other targets: lamina.Corpus(x, y)"
        )
    return found.long()


def _padded(rows: Sequence[Tensor], length: int, value: int) -> Tensor:
    made = torch.full((len(rows), length), value)
    for row, numbers in zip(made, rows, strict=True):
        row[: len(numbers)] = numbers[:length]
    return made


@dataclass(frozen=True)
class TokenLoss:
    """The mean cross-entropy over an example's own tokens, one loss per example; labels of -100 are left out.

    The loss that models of Hugging Face compute by themselves is the mean over all tokens of a batch: in it the length
    of one text scales the gradients of all others, so no clipping of one bounds its influence.

    shift      predict every token from those before it, as a causal language model does
    smoothing  label smoothing, from 0 to 1
    """

    shift: bool = True
    smoothing: float = 0.0

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        logits = output.logits[:, -y.shape[1] :]  # without the positions of a learned prompt
        if self.shift:
            logits, y = logits[:, :-1], y[:, 1:]
        each = functional.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="none", label_smoothing=self.smoothing
        )
        return each.view(y.shape).sum(1) / (y != IGNORED).sum(1).clamp(min=1)


@dataclass(frozen=True)
class LabelLoss:
    """The cross-entropy of one class number per example; `smoothing` is label smoothing, from 0 to 1."""

    smoothing: float = 0.0

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        return functional.cross_entropy(output.logits, y, reduction="none", label_smoothing=self.smoothing)


_LOSSES: dict[str, Callable[[float], TokenLoss | LabelLoss]] = {
    "ForCausalLM": lambda smoothing: TokenLoss(shift=True, smoothing=smoothing),
    "LMHeadModel": lambda smoothing: TokenLoss(shift=True, smoothing=smoothing),
    "ForMaskedLM": lambda smoothing: TokenLoss(shift=False, smoothing=smoothing),
    "ForTokenClassification": lambda smoothing: TokenLoss(shift=False, smoothing=smoothing),
    "ForSequenceClassification": LabelLoss,
    "ForImageClassification": LabelLoss,
}


_NOT_CAUSAL = ("FlaubertWithLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel")  # each token sees those after it


def loss_for(model: Any, smoothing: float = 0.0) -> TokenLoss | LabelLoss:
    """The loss per example for a model of Hugging Face, with an adapter of PEFT or without, by the name of its class."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    name, config = type(base).__name__, getattr(base, "config", None)
    single = getattr(config, "problem_type", None) in (None, "single_label_classification")
    for ending, make in _LOSSES.items():
        if not name.endswith(ending) or not single or name in _NOT_CAUSAL:
            continue
        if make is not LabelLoss or getattr(config, "num_labels", 2) > 1:  # of one output, the cross-entropy is 0
            return make(smoothing)
    problem = f"the loss of a {name} is not one of those that are known ({', '.join(_LOSSES)}; one label an example)"
    remedy = "give loss_fn=, a function of (output, y) with one loss per example"
    raise RunError("integrations.loss-unknown", problem, remedy)
