"""Attacks on our own claims. The paired-seed step audit: what one contribution really moves, against the plan."""

from __future__ import annotations

from lamina.audit.canaries import ascent_canary, named_canaries, random_canaries
from lamina.audit.paired_step import PairedStep, coupling_to_others, paired_step
from lamina.audit.step_audit import (
    Check,
    NoiseLevel,
    Verdict,
    audit_step,
    epsilon_of_noise,
    epsilon_of_sensitivity,
    noise_levels,
)
from lamina.audit.target import AuditTarget, Stepper

__all__ = [
    "AuditTarget", "Stepper",
    "audit_step", "Check", "Verdict",
    "paired_step", "PairedStep", "coupling_to_others",
    "noise_levels", "NoiseLevel",
    "named_canaries", "random_canaries", "ascent_canary",
    "epsilon_of_sensitivity", "epsilon_of_noise",
]  # fmt: skip
