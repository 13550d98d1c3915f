"""Which noise `[noise] kind = "auto"` stands for: one function and one table of reasons."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.account.schedule import INTEGER_RDP
from lamina.allocate.problem import Allocation
from lamina.errors import PlanError
from lamina.plan.policy import Policy
from lamina.plan.rules import NoiseKind

_WORDS = {NoiseKind.DISCRETE_GAUSSIAN: 14, NoiseKind.SKELLAM: 28, NoiseKind.LAPLACE: 11, NoiseKind.GAUSSIAN: 1}
"""Random words for one number, measured at a scale of 2¹² units (docs/decisions/integer_noise.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseHardware:
    """The random-number hardware and entropy source of a machine.

    aes      whether the processor has AES instructions, with which the words of noise are made
    entropy  whether the system's generator, from which keys are drawn, has been seeded
    """

    aes: bool
    entropy: bool

    @classmethod
    def here(cls) -> NoiseHardware:
        """Read the facts of this machine. AES instructions are assumed if the system does not list them."""
        aes = True
        if platform.system() == "Linux":
            try:
                lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                lines = []
            flags = [line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))]
            aes = not flags or "aes" in flags[0]
        try:
            entropy = len(os.getrandom(1, os.GRND_NONBLOCK)) == 1 if hasattr(os, "getrandom") else True
        except BlockingIOError:
            entropy = False
        return cls(aes=aes, entropy=entropy)


def choose_noise_kind(
    policy: Policy, names: Sequence[str], chosen: Allocation, accountant: str, hardware: NoiseHardware | None = None
) -> tuple[NoiseKind, tuple[str, ...]]:
    """The kind of noise, and why, where the policy leaves it open: the first family that nothing stands against.

    `[noise] device` says where noise is drawn: "here"; "integer", a device without floating-point arithmetic; or
    "parties", several devices that draw a share each. The kind is in the plan from then on.
    """
    if policy.noise.kind != "auto":
        return NoiseKind(policy.noise.kind), ()
    hardware, device = hardware or NoiseHardware.here(), policy.noise.device
    if not hardware.entropy:
        problem = "the system's random number generator has not been seeded, so no noise can be drawn"
        raise PlanError("allocate.no-entropy", problem, "wait until the system has collected entropy")
    whole = {
        "noise on integers enters once per step": policy.noise.injection != "per_step",
        "noise on integers is not correlated over steps": policy.noise.correlation != "none",
        "the allocation moves C or S while it runs": bool(chosen.rules),
        "the allocation reproduces a paper": bool(chosen.claimed),
        "a public class is not clipped, so it does not fit a grid": any(policy.classes[n].public for n in names),
    }
    orders = {f"accountant {accountant} does not price it ({INTEGER_RDP} does)": accountant != INTEGER_RDP, **whole}
    words, gaussian = _WORDS[NoiseKind.DISCRETE_GAUSSIAN], _WORDS[NoiseKind.GAUSSIAN]
    against: Mapping[NoiseKind, Mapping[str, bool]] = {
        NoiseKind.DISCRETE_GAUSSIAN: {
            **orders,
            f"the processor has no AES instructions, and a number takes {words} random words instead of {gaussian}":
                device == "here" and not hardware.aes,
            "a sum of shares has another law": device == "parties",
        },
        NoiseKind.SKELLAM: {
            **orders,
            f"a number takes {_WORDS[NoiseKind.SKELLAM]} random words, which only shares of several devices need":
                device == "here",
            "it needs floating-point arithmetic": device == "integer",
        },
        NoiseKind.GAUSSIAN: {
            "the device has no floating-point arithmetic": device == "integer",
            "shares are added as whole numbers, and rounded shares have another law": device == "parties",
        },
        NoiseKind.LAPLACE: {
            "it clips L1 norms, which costs more noise in every layer but the smallest": device != "integer", **whole,
        },
    }  # fmt: skip
    found = {kind: [reason for reason, holds in each.items() if holds] for kind, each in against.items()}
    for kind, reasons in found.items():
        if not reasons:
            drawn = f"drawn {'here' if device == 'here' else f'on device {device!r}'}"
            passed = [f"{other.value}: {'; '.join(r)}" for other, r in found.items() if r]
            return kind, (f"The noise is {kind.value}, {drawn}. Not {'. Not '.join(passed)}.",)
    listed = ". ".join(f"{kind.value}: {'; '.join(reasons)}" for kind, reasons in found.items())
    problem = f"no kind of noise fits [noise] device = {device!r}. {listed}"
    raise PlanError("allocate.no-noise-kind", problem, "name a kind, or change what stands against it")
