"""Models for physiological signals, built of layers whose contributions stay independent."""

from __future__ import annotations

from lamina.models.autoencoders import (
    ClassifierLoss,
    MLPAutoencoder,
    ResidualAutoencoder,
    ResidualClassifier,
    TransformerAutoencoder,
)

__all__ = ["MLPAutoencoder", "ResidualAutoencoder", "ResidualClassifier", "ClassifierLoss", "TransformerAutoencoder"]
