"""The noise of a step: streams, draws, and the mechanisms that are made of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lamina.engine.distributed import Ranks
from lamina.engine.noise.correlated import CorrelatedNoise
from lamina.engine.noise.gaussian import GaussianNoise, RawNoise
from lamina.engine.noise.integer import IntegerNoise
from lamina.engine.noise.mechanism import NoiseMechanism
from lamina.plan.rules import NoiseKind
from lamina.plan.step_plan import StepPlan


def noise_mechanism(plan: StepPlan, tensors: Mapping[str, Tensor], ranks: Ranks) -> NoiseMechanism:
    """The noise of the steps of a plan."""
    kind: type[NoiseMechanism] = GaussianNoise
    if plan.bands > 1:
        kind = CorrelatedNoise
    elif plan.noise_kind is not NoiseKind.GAUSSIAN:
        kind = IntegerNoise
    elif plan.injection.raw:
        kind = RawNoise
    return kind(plan, tensors, ranks)
