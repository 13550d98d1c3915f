"""Signals to train on: simulated ECG; loaders for real recordings follow."""

from __future__ import annotations

from lamina.data.ecg_simulator import CLASSES, ECGSimulator, Recordings
from lamina.data.heart_model import LEADS

__all__ = ["ECGSimulator", "Recordings", "CLASSES", "LEADS"]
