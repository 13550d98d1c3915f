"""Signals to train on. So far simulated ECG (needs `pip install lamina[demo]`); loaders for real recordings follow."""

from __future__ import annotations

from lamina.data.ecg_simulator import CLASSES, ECGSimulator, Recordings
from lamina.data.heart_model import LEADS

__all__ = ["ECGSimulator", "Recordings", "CLASSES", "LEADS"]
