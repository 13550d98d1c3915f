"""Models for physiological signals, built of layers whose contributions stay independent."""

from __future__ import annotations

from lamina.models.classifier import ClassifierLoss, ResidualClassifier
from lamina.models.mlp import MLPAutoencoder
from lamina.models.residual import ResidualAutoencoder
from lamina.models.transformer import TransformerAutoencoder

__all__ = [
    "MLPAutoencoder",
    "ResidualAutoencoder",
    "ResidualClassifier",
    "ClassifierLoss",
    "TransformerAutoencoder",
]
