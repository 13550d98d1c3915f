"""Signals to train on: simulators of ECG, blood pressure and glucose, and loaders of PTB-XL, OhioT1DM, MIMIC-III, WFDB, EDF."""

from __future__ import annotations

from lamina.data.cgm_simulator import CGMSimulator
from lamina.data.datasets import (
    PTBXL_COUNTS,
    ecg_windows,
    mimic_corpus,
    mimic_records,
    ohio_corpus,
    ohio_records,
    ohio_signal,
    paper_run,
    ptbxl_corpus,
    ptbxl_records,
    read_ohio,
    signal_corpus,
    signal_records,
)
from lamina.data.ecg_simulator import CLASSES, ECGSimulator, Recordings
from lamina.data.heart_model import LEADS
from lamina.data.prepared import PatientRecord, PreparedPart, class_weights, noisy_class_counts, part_of, prepare
from lamina.data.pulse_simulator import PulseSimulator
from lamina.data.signal import Signal, read_csv_signal, read_edf, read_npz_signal
from lamina.data.simulated_folders import write_simulated_ohio, write_simulated_ptbxl
from lamina.data.wfdb import read_wfdb, segments

__all__ = [
    "ECGSimulator", "PulseSimulator", "CGMSimulator", "Recordings", "CLASSES", "LEADS",
    "Signal", "read_wfdb", "segments", "read_edf", "read_csv_signal", "read_npz_signal", "read_ohio",
    "ptbxl_corpus", "ohio_corpus", "mimic_corpus", "signal_corpus", "ptbxl_records", "ohio_records", "mimic_records", "signal_records",
    "ecg_windows", "ohio_signal", "PatientRecord", "PreparedPart", "prepare", "part_of",
    "class_weights", "noisy_class_counts", "PTBXL_COUNTS", "paper_run", "write_simulated_ptbxl", "write_simulated_ohio",
]  # fmt: skip
