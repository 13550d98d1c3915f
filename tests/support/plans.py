"""Plans and policies by hand, for tests that need no model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lamina.plan.policy import Policy
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan


def hand_plan(
    clip: Sequence[Sequence[float]],
    noise: Sequence[float],
    *,
    names: Sequence[str] = tuple(f"c{k}" for k in range(8)),
    public: Collection[int] = (),
    rate: float = 0.1,
    **changes: Any,
) -> StepPlan:
    """Layers l0, l1, … of two tensors each; one class for every row of C, all sampled at one rate."""
    layers = tuple(
        PlannedLayer(name=f"l{i}", depth=i / max(len(noise) - 1, 1), parameters=(f"l{i}.w", f"l{i}.b"), size=10 + i)
        for i in range(len(noise))
    )
    classes = tuple(
        PlannedClass(
            name=names[k], population=1000, sampling_rate=rate, public=k in public, delta=0.0 if k in public else 1e-5
        )
        for k in range(len(clip))
    )
    fields = {"layers": layers, "classes": classes, "clip": clip, "noise": noise, "batch": 100, "steps": 50}
    return StepPlan(**{**fields, **changes})


def policy_of(accountant: str = "rdp", floors: dict[str, float] | None = None, **classes: dict[str, Any]) -> Policy:
    """These classes, at δ = 1e-5."""
    corpus = {"origin": "test", "delta": 1e-5, "accountant": accountant, "floors": floors or {}}
    return Policy.from_dict({"corpus": corpus, "class": classes})
