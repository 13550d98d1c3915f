"""What is decided before a step is taken: layers, depth profiles, policy, the step plan, its coverage."""

from __future__ import annotations

from lamina.plan.coverage import Coverage, check_coverage
from lamina.plan.fix import Change, Fixed, Report, fix
from lamina.plan.hazards import Break, Hazard, hazards
from lamina.plan.policy import ClassPolicy, Corpus, Floors, Noise, Policy
from lamina.plan.profile import DepthProfile, Kind
from lamina.plan.rescale import effective_sigma, radius, rescale
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy, FollowQuantile, Rule
from lamina.plan.stack import ROOT, Layer, LayerStack
from lamina.plan.step import Clipping, PlannedClass, PlannedLayer, StepPlan

__all__ = [
    "LayerStack", "Layer", "ROOT",
    "DepthProfile", "Kind",
    "Policy", "Corpus", "Floors", "ClassPolicy", "Noise",
    "StepPlan", "PlannedLayer", "PlannedClass", "Clipping",
    "Rule", "FollowEnergy", "FollowQuantile", "Choose", "FollowBudget",
    "rescale", "effective_sigma", "radius",
    "Coverage", "check_coverage", "Hazard", "Break", "hazards",
    "fix", "Fixed", "Report", "Change",
]  # fmt: skip
