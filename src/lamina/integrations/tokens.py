"""Texts as a corpus, and one loss per example: what language models of Hugging Face need for a private step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lamina.errors import CorpusError, RunError
from lamina.run.corpus import Corpus
from lamina.validate import whole

IGNORED = -100
"""The label of a position that no loss counts, as Hugging Face has it."""


def token_corpus(
    texts: Sequence[Any], *, length: int, pad: int, labels: Sequence[Any] | None = None, **options: Any
) -> Corpus:
    """A corpus of tokenised texts, each cut or padded on the right to `length` tokens.

        corpus = token_corpus([tokenizer(t) for t in texts], length=128, pad=tokenizer.pad_token_id, unit=patient)

    texts    for each example its token ids: a sequence of numbers, or a mapping with `input_ids` and perhaps `labels`,
             as tokenisers and data sets of Hugging Face have them
    length   a public number, chosen without looking at the data: the longest text would give itself away
    pad      the token at positions after the end, which attention and loss leave out
    labels   by example a class number, or a number per token; default: `labels` of the mappings, or the tokens
             themselves, from which a causal language model predicts each from those before it
    options  as `Corpus` takes them: unit, cls, policy, …
    """
    whole(CorpusError, "integrations.not-a-count", length=length)
    found = [_numbers(text["input_ids"] if isinstance(text, Mapping) else text) for text in texts]
    if empty := [row for row, ids in enumerate(found) if not len(ids)]:
        problem = f"text {empty[0]} has no tokens, and attention over nothing is not a number"
        remedy = "leave it out, or begin every text with a token of its own"
        raise CorpusError("integrations.text-empty", problem, remedy)
    if labels is None and texts and isinstance(texts[0], Mapping) and "labels" in texts[0]:
        labels = [text["labels"] for text in texts]
    ids = _padded(found, length, pad)
    mask = _padded([torch.ones_like(row) for row in found], length, 0)
    if labels is None:
        y = ids.masked_fill(mask == 0, IGNORED)
    else:
        targets = [_numbers(label) for label in labels]
        y = torch.stack(targets) if all(t.dim() == 0 for t in targets) else _padded(targets, length, IGNORED)
    return Corpus({"input_ids": ids, "attention_mask": mask}, y, **options)


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
