"""Attacks on our own claims. The paired-seed step audit: what one contribution really moves, against the plan."""

from __future__ import annotations

from lamina.audit.ascent import ascend
from lamina.audit.canary import random_canaries, variants
from lamina.audit.check import Check, Verdict
from lamina.audit.independence import moved_others
from lamina.audit.noise import Level, noise_levels
from lamina.audit.paired import Paired, paired_step
from lamina.audit.price import epsilon_of_noise, epsilon_of_sensitivity
from lamina.audit.step import audit_step
from lamina.audit.subject import Stepper, Subject

__all__ = [
    "Subject", "Stepper",
    "audit_step", "Check", "Verdict",
    "paired_step", "Paired", "moved_others",
    "noise_levels", "Level",
    "variants", "random_canaries", "ascend",
    "epsilon_of_sensitivity", "epsilon_of_noise",
]  # fmt: skip
