"""Physiological signals: simulators and loaders of ECG, blood pressure and glucose, models for them, presets, and the demo.

Names are imported on first use: presets are read where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamina.errors import needs_torch

if TYPE_CHECKING:
    from lamina.signals.autoencoders import (
        ClassifierLoss,
        MLPAutoencoder,
        ResidualAutoencoder,
        ResidualClassifier,
        TransformerAutoencoder,
    )
    from lamina.signals.cgm_simulator import CGMSimulator
    from lamina.signals.datasets import (
        PTBXL_COUNTS,
        ecg_windows,
        mimic_corpus,
        mimic_records,
        ohio_corpus,
        ohio_records,
        ohio_signal,
        ptbxl_corpus,
        ptbxl_records,
        read_ohio,
        signal_corpus,
        signal_records,
    )
    from lamina.signals.ecg_simulator import CLASSES, ECGSimulator, Recordings
    from lamina.signals.heart_model import LEADS
    from lamina.signals.prepared import PatientRecord, PreparedPart, class_weights, noisy_class_counts, part_of, prepare
    from lamina.signals.pulse_simulator import PulseSimulator
    from lamina.signals.signal import Signal, read_csv_signal, read_edf, read_npz_signal
    from lamina.signals.signal_autoencoders import VAE, ConvAE, ResAE, SignalLoss, StackedAE, TransAE
    from lamina.signals.simulated_folders import write_simulated_ohio, write_simulated_ptbxl
    from lamina.signals.wfdb import read_wfdb, segments

__all__ = [
    "ECGSimulator", "PulseSimulator", "CGMSimulator", "Recordings", "CLASSES", "LEADS",
    "Signal", "read_wfdb", "segments", "read_edf", "read_csv_signal", "read_npz_signal", "read_ohio",
    "ptbxl_corpus", "ohio_corpus", "mimic_corpus", "signal_corpus", "ptbxl_records", "ohio_records", "mimic_records", "signal_records",
    "ecg_windows", "ohio_signal", "PatientRecord", "PreparedPart", "prepare", "part_of",
    "class_weights", "noisy_class_counts", "PTBXL_COUNTS", "write_simulated_ptbxl", "write_simulated_ohio",
    "StackedAE", "ConvAE", "ResAE", "TransAE", "VAE", "SignalLoss",
    "MLPAutoencoder", "ResidualAutoencoder", "ResidualClassifier", "ClassifierLoss", "TransformerAutoencoder",
]  # fmt: skip

_HOME = {
    "autoencoders": ("ClassifierLoss", "MLPAutoencoder", "ResidualAutoencoder", "ResidualClassifier", "TransformerAutoencoder"),
    "cgm_simulator": ("CGMSimulator",),
    "datasets": (
        "PTBXL_COUNTS", "ecg_windows", "mimic_corpus", "mimic_records", "ohio_corpus", "ohio_records", "ohio_signal",
        "ptbxl_corpus", "ptbxl_records", "read_ohio", "signal_corpus", "signal_records",
    ),
    "ecg_simulator": ("CLASSES", "ECGSimulator", "Recordings"),
    "heart_model": ("LEADS",),
    "prepared": ("PatientRecord", "PreparedPart", "class_weights", "noisy_class_counts", "part_of", "prepare"),
    "pulse_simulator": ("PulseSimulator",),
    "signal": ("Signal", "read_csv_signal", "read_edf", "read_npz_signal"),
    "signal_autoencoders": ("VAE", "ConvAE", "ResAE", "SignalLoss", "StackedAE", "TransAE"),
    "simulated_folders": ("write_simulated_ohio", "write_simulated_ptbxl"),
    "wfdb": ("read_wfdb", "segments"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "presets":
        return import_module("lamina.signals.presets")
    for home, names in _HOME.items():
        if name in names:
            with needs_torch(f"lamina.signals.{name}"):
                return globals().setdefault(name, getattr(import_module(f"lamina.signals.{home}"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
