"""Signals to train on. So far simulated ECG; loaders for real recordings come with the trainer."""

from __future__ import annotations

from lamina.data.ecg import LEADS, ECGSimulator, Recordings

__all__ = ["ECGSimulator", "Recordings", "LEADS"]
