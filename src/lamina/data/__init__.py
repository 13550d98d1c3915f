"""Signals to train on: simulators of ECG, blood pressure and pulse, and glucose; loaders of real recordings follow."""

from __future__ import annotations

from lamina.data.cgm_simulator import CGMSimulator
from lamina.data.ecg_simulator import CLASSES, ECGSimulator, Recordings
from lamina.data.heart_model import LEADS
from lamina.data.pulse_simulator import PulseSimulator

__all__ = ["ECGSimulator", "PulseSimulator", "CGMSimulator", "Recordings", "CLASSES", "LEADS"]
