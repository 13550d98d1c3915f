"""`PlanRules`: C and S as the next step uses them, moved by the rules of a plan, its proxy and its choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from lamina.engine.distributed import Ranks
from lamina.engine.execute.clipping import Clipper, clipper_of
from lamina.engine.execute.eager import EagerExecutor
from lamina.engine.guards.checked_batch import CheckedBatch
from lamina.engine.noise.source import NoiseSource
from lamina.engine.rules.adaptation import Adaptation, OpenChoice, refuse_factor
from lamina.engine.rules.proxy import Proxy, ProxyShares
from lamina.errors import EngineError
from lamina.plan.rules import FollowProxy
from lamina.plan.step_plan import StepPlan


class PlanRules:
    """The rules of a plan, which is applied as it is if it has none.

    adaptation  what they have learned from noised gradients; None without rules
    choice      the choice that is under way
    """

    def __init__(
        self, model: nn.Module, plan: StepPlan, sizes: Sequence[int], proxy: Proxy | None, ranks: Ranks
    ) -> None:  # fmt: skip
        self.plan, self._sizes = plan, sizes
        self.adaptation = Adaptation.of(plan, sizes)
        self.choice: OpenChoice | None = None
        self._clipper = clipper_of(plan)
        rule = plan.rule(FollowProxy)
        if (rule is None) != (proxy is None):
            problem = "the plan's shares follow a proxy, and none is given" if rule else "the plan follows no proxy"
            remedy = "give proxy to such plans: allocate=LADP(estimator='fisher')"
            raise EngineError("engine.proxy-misplaced", problem, remedy)
        self._proxy = None if rule is None or proxy is None else ProxyShares(model, plan, rule, proxy, ranks)
        self._measured_at = -1  # the step before which the proxy was measured last

    @property
    def applied(self) -> StepPlan:
        """The plan with C and S as the next step will use them: the plan itself unless it has rules."""
        return self.plan if self.adaptation is None else self.adaptation.applied

    @property
    def clipper(self) -> Clipper:
        """Return the clipper of the next step."""
        if self._clipper.plan is not self.applied:
            self._clipper = clipper_of(self.applied)
        return self._clipper

    @property
    def factor(self) -> float:
        """How many times the declared sigma the next step has, at least."""
        return 1.0 if self.adaptation is None else self.adaptation.factor

    def continue_at(self, factor: float | None) -> bool:
        """Discard the observations of an open step. Return whether the caller asks the filters of an adaptive budget."""
        self._measured_at, self.choice = -1, None
        if self.adaptation is None:
            refuse_factor(factor)
            return False
        return self.adaptation.fix(factor)

    # A step

    def follow_proxy(self, step: int) -> None:
        """Move S as the plan's proxy says, if it is due before this step; a step does so where nobody did."""
        proxy = self._proxy
        if self.adaptation is not None and proxy is not None and proxy.due(step) and self._measured_at != step:
            self.adaptation.follow_proxy(proxy, step)
            self._measured_at = step

    def before_step(self, step: int) -> StepPlan:
        """The plan with the C and S of this step."""
        self.follow_proxy(step)
        if self.adaptation is not None:
            self.adaptation.apply_proposed_factor()
        return self.applied

    def after_step(
        self, step: int, whole: Callable[[], Mapping[str, Tensor]], counts: Tensor | None
    ) -> None:  # fmt: skip
        """Adapt C and S of the next step to released gradients. `whole` gathers the gradients of a divided model."""
        if self.adaptation is not None:
            self.adaptation.after(step, whole(), counts)

    # A choice

    def choice_due(self, step: int) -> bool:
        """Whether this step must be preceded by a choice."""
        return self.adaptation is not None and step < self.plan.steps and self.adaptation.due(step)

    def refuse_due_choice(self, step: int, *, probing: bool) -> None:
        """Refuse a step before the choice that it needs is complete."""
        if (self.choice_due(step) and not probing) or self.choice is not None:
            problem = f"the plan must choose the shape of its noise before step {step}"
            remedy = "draw another batch and call engine.choose(losses, batch) first (losses=None if it is empty)"
            raise EngineError("engine.choice-due", problem, remedy)

    def open_choice(self, step: int, charge: Callable[[], None]) -> None:
        """Begin the choice before a step; `charge` it first."""
        self.follow_proxy(step)  # what it measures is a candidate
        assert self.adaptation is not None
        opened = OpenChoice.of(self.plan, self.adaptation.candidates(), self._sizes)
        charge()
        self.choice, self.adaptation.chosen = opened, step

    def add_to_choice(self, part: CheckedBatch | None, eager: EagerExecutor) -> None:
        """Add the utilities of a part of the batch that the choice is made on."""
        assert self.choice is not None
        if part is not None:
            self.choice.add(part, eager.norms(part, self.clipper))

    def close_choice(self, noise: NoiseSource, step: int) -> None:
        """Draw, and apply what is drawn."""
        choice, self.choice = self.choice, None
        assert choice is not None and self.adaptation is not None
        self.adaptation.apply_choice(choice.drawn(noise, step))
