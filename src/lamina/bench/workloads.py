"""The six models that a step is measured on: shapes, data and a loss per example. Nothing here is private."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.errors import LaminaError
from lamina.signals.autoencoders import MLPAutoencoder, ResidualAutoencoder, TransformerAutoencoder

SEED = 20240501


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model, one fixed batch and one loss per example. Every variant starts from the same weights."""

    name: str
    batch: int
    about: str
    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    losses: Callable[[Tensor, Tensor], Tensor]
    needs: str | None = None  # a package that must be installed

    def missing(self) -> str | None:
        """Why this workload cannot run here, or None."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed (pip install 'lamina[bench]')"
        return None

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self.build().train()

    def example(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(SEED + 1)
        return self.data(self.batch)


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each example: (N, …) -> (N,)."""
    return F.mse_loss(y, target, reduction="none").flatten(1).mean(1)


def cross_entropy(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y, target, reduction="none")


class MnistCNN(nn.Module):
    """The small CNN of the DP-SGD literature: two convolutions, two Linears, 26,010 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
        )
        self.classifier = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.features(x).flatten(1))
        return y


class SmallBert(nn.Module):
    """BERT with 4 layers of width 256 and a classifier on top, dropout off.

    Positions and token types are given per example, because a (1, T) lookup would sum its gradient over the batch.
    """

    def __init__(self, vocabulary: int = 1_000, tokens: int = 128) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1_024,
            max_position_embeddings=tokens,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=2,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
        output = self.bert(input_ids=ids, position_ids=positions, token_type_ids=torch.zeros_like(ids))
        logits: Tensor = output.logits
        return logits


def _gaussian_signal(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Gaussian input that is its own target."""
    return lambda n: (torch.randn(n, *shape),) * 2


_WORKLOAD_LIST = (
    Workload(
        name="resae",
        batch=256,
        about="residual Conv1d autoencoder, 12 × 256",
        build=lambda: ResidualAutoencoder(12, (32, 64, 64)),
        data=_gaussian_signal(12, 256),
        losses=squared_error,
    ),
    Workload(
        name="tfae",
        batch=64,
        about="transformer autoencoder, 8 layers of width 128, 64 tokens",
        build=lambda: TransformerAutoencoder(48, 64, width=128, layers=8),
        data=_gaussian_signal(64, 48),
        losses=squared_error,
    ),
    Workload(
        name="bert1k",
        batch=16,
        about="BERT, 4 layers of width 256, 128 tokens, vocabulary 1,000",
        build=SmallBert,
        data=lambda n: (torch.randint(0, 1_000, (n, 128)), torch.randint(0, 2, (n,))),
        losses=cross_entropy,
        needs="transformers",
    ),
    *(
        Workload(
            name=f"mlp_b{batch}",
            batch=batch,
            about="autoencoder 864-512-256-128-64-32 and back",
            build=MLPAutoencoder,
            data=_gaussian_signal(864),
            losses=squared_error,
        )
        for batch in (32, 256)
    ),
    Workload(
        name="cnn",
        batch=512,
        about="MNIST CNN",
        build=MnistCNN,
        data=lambda n: (torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,))),
        losses=cross_entropy,
    ),
)
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _WORKLOAD_LIST}


def find_workload(name: str) -> Workload:
    """The workload of that name.

    >>> find_workload("cnn").batch
    512
    """
    if name not in WORKLOADS:
        problem = f"workload '{name}' is not known"
        raise LaminaError("bench.workload-not-known", problem, f"choose from {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
