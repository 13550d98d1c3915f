"""Models for physiological signals, built of layers whose contributions stay independent."""

from __future__ import annotations

from lamina.models.autoencoders import (
    ClassifierLoss,
    MLPAutoencoder,
    ResidualAutoencoder,
    ResidualClassifier,
    TransformerAutoencoder,
)
from lamina.models.signal_autoencoders import VAE, ConvAE, ResAE, SignalLoss, StackedAE, TransAE

__all__ = [
    "StackedAE", "ConvAE", "ResAE", "TransAE", "VAE", "SignalLoss",
    "MLPAutoencoder", "ResidualAutoencoder", "ResidualClassifier", "ClassifierLoss", "TransformerAutoencoder",
]  # fmt: skip
