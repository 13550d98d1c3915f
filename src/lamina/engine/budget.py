"""`Budget`: asks the filters of every class before each step whether it may be taken, and charges it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lamina import validate
from lamina.account.accountants import SpendCurve
from lamina.account.filters import PrivacyFilter, RenyiFilter
from lamina.account.gaussian_rdp import choice_noise_multiplier
from lamina.errors import BudgetExceeded, PlanError
from lamina.plan.rules import Choose, FollowBudget
from lamina.plan.step_plan import StepPlan
from lamina.validate import short_repr


class Budget:
    """The steps that the plan priced, the filters of a plan whose noise follows its budget, and a caller's.

    Charged means spent: a step or choice that fails after it was charged is not given back.

    A plan that follows its budget has a filter of its own for every class: at the plan's one Rényi order, worth the
    plan's whole schedule. With `filters_asked_elsewhere` the caller asks such filters for this stretch of steps.
    """

    def __init__(self, plan: StepPlan, filters: Mapping[str, PrivacyFilter], taken: int = 0) -> None:
        validate.whole(PlanError, "engine.taken-out-of-range", least=0, most=plan.steps, taken=taken)
        self.plan, self.filters_asked_elsewhere = plan, False
        self.set_taken(taken)
        self._curves: dict[int, SpendCurve] = {}
        self._given: list[tuple[int, PrivacyFilter]] = []
        for name, filter_ in filters.items():
            k = plan.index(name)
            if plan.classes[k].public:
                problem = f"filters has class '{name}', which is public and has no budget"
                raise PlanError("engine.filter-for-public-class", problem, "leave it out of filters")
            refuse_filter(plan, name, filter_)
            self._given.append((k, filter_))
        self._own: dict[int, RenyiFilter] = {}
        if (follow := plan.rule(FollowBudget)) is not None:
            for k in range(len(plan.classes)):
                if schedule := plan.schedule(k):
                    self._own[k] = RenyiFilter.for_schedule(schedule, order=follow.order)
            self._charge_earlier_steps(follow.least)

    def set_taken(self, step: int) -> None:
        """`step` steps were taken, and every choice that fell on them was made. Nothing is charged."""
        choose = self.plan.rule(Choose)
        self.taken, self._choices = step, 0 if choose is None else choose.calls(0, step)
        self._begun = step

    def _charge_earlier_steps(self, factor: float) -> None:
        """Steps of an earlier engine whose sigma is not known here: charged as if each had been the dearest."""
        for k, filter_ in self._own.items():
            sigma, q = self.plan.sigma(k), self.plan.classes[k].sampling_rate
            fits = filter_.admits(factor * sigma, q, self.taken)
            if fits:
                filter_.charge(factor * sigma, q, self.taken)
            if self._choices and fits:
                fits = filter_.admits(*self._choice(k), self._choices)
                filter_.charge(*self._choice(k), self._choices if fits else 0)
            if not fits:
                name = self.plan.classes[k].name
                problem = (
                    f"{self.taken} steps at {factor:g} times the declared sigma exceed the budget of class '{name}'"
                )
                remedy = "make the engine with taken=0, and pass the to_state() of the earlier budget to load_state(…)"
                raise BudgetExceeded("engine.earlier-steps-exceed-budget", problem, remedy)

    def charge(self, factor: float = 1.0) -> int:
        """Take one step's price from every class, or refuse and take nothing. Returns the step's number.

        `factor`: the step's sigma_k is at least so many times the declared one.
        """
        self._refuse_if_finished()
        due = [(k, f, factor * self.plan.sigma(k), self._rate(k)) for k, f in self._asked()]
        free = self.plan.injection.raw and not self.plan.injection.events(self.taken, self.taken + 1)
        free = free or (self.taken - self._begun) % self.plan.bands != 0  # one turn of everybody is one event
        self._take([] if free else due, f"step {self.taken + 1}")
        self.taken += 1
        return self.taken - 1

    def charge_choice(self) -> None:
        """Take the price of one choice from every class, or refuse and take nothing."""
        self._refuse_if_finished()
        self._take([(k, f, *self._choice(k)) for k, f in self._asked()], f"the choice before step {self.taken + 1}")
        self._choices += 1

    def _refuse_if_finished(self) -> None:
        if self.taken >= self.plan.steps:
            problem = f"all {self.plan.steps} steps that the plan was priced for are taken"
            remedy = "corpus.batches(plan) is the whole run: loop over it once; or make a plan with more steps, whose noise or ε is larger"
            raise BudgetExceeded("engine.no-steps-left", problem, remedy)

    def _take(self, due: list[tuple[int, PrivacyFilter, float, float]], what: str) -> None:
        for k, filter_, sigma, q in due:
            if not filter_.admits(sigma, q):
                name = self.plan.classes[k].name
                problem = f"the budget of class '{name}' does not allow {what} at sigma {sigma:.4g}, q {q:.4g}"
                raise BudgetExceeded("engine.budget-exhausted", problem, "stop training and keep the model as it is")
        for _, filter_, sigma, q in due:
            filter_.charge(sigma, q)

    def _asked(self) -> list[tuple[int, PrivacyFilter]]:
        return [*self._given, *(() if self.filters_asked_elsewhere else self._own.items())]

    def _rate(self, k: int) -> float:
        """At which a step is priced: raw noise credits nothing to sampling."""
        return 1.0 if self.plan.injection.raw else self.plan.step_rate(k)

    def _choice(self, k: int) -> tuple[float, float]:
        choose = self.plan.rule(Choose)
        assert choose is not None
        return choice_noise_multiplier(choose.epsilon), self._rate(k)

    def epsilon(self, k: int) -> float:
        """An ε that holds for class k after what was charged so far.

        Where sigma follows the budget, it is the whole budget's from the first step on: what a filter has let through
        at a moment that itself depends on the outputs is no guarantee, only its limit is.
        """
        plan = self.plan
        schedule, choose = plan.schedule(k), plan.rule(Choose)
        if not schedule or not (self.taken or self._choices):
            return 0.0
        if plan.rule(FollowBudget) is not None:
            return plan.epsilon(k)
        if k not in self._curves:
            so_far = partial(plan.schedule_between, k, 0)
            self._curves[k] = SpendCurve(so_far, steps=plan.steps, delta=plan.delta(k), accountant=plan.accountant)
        ahead = choose is not None and self._choices > choose.calls(0, self.taken)
        return self._curves[k].epsilon(min(plan.steps, self.taken + ahead))

    def to_state(self) -> dict[str, Any]:
        """Steps, choices and the plan's own filters as plain numbers; a caller's filters are the caller's."""
        own = {self.plan.classes[k].name: filter_.to_state() for k, filter_ in self._own.items()}
        return {"taken": self.taken, "choices": self._choices, "filters": own}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `to_state` returned. Refused, and nothing changes, if it is not of this plan."""
        if not isinstance(state, Mapping) or set(state) != {"taken", "choices", "filters"}:
            raise _state_error("has other fields than a budget's")
        taken, choices, filters = state["taken"], state["choices"], state["filters"]
        if type(taken) is not int or not 0 <= taken <= self.plan.steps:
            raise _state_error(f"has {short_repr(taken)} of {self.plan.steps} steps taken")
        choose = self.plan.rule(Choose)
        made = [0 if choose is None else choose.calls(0, steps) for steps in (taken, taken + 1)]
        if type(choices) is not int or not made[0] <= choices <= made[1]:
            raise _state_error(f"has {short_repr(choices)} choices in {taken} steps")
        names = {self.plan.classes[k].name: k for k in self._own}
        if not isinstance(filters, Mapping) or set(filters) != set(names):
            raise _state_error("has filters of other classes")
        own = {names[name]: self._restored(names[name], each) for name, each in filters.items()}
        self.taken, self._choices, self._own = taken, choices, own

    def _restored(self, k: int, state: Any) -> RenyiFilter:
        """The filter of class k, worth what this plan's schedule is worth at its order, and spent as the state says."""
        name, follow = self.plan.classes[k].name, self.plan.rule(FollowBudget)
        assert follow is not None
        whole = RenyiFilter.for_schedule(self.plan.schedule(k), order=follow.order).to_state()
        if not isinstance(state, Mapping) or set(state) != set(whole):
            raise _state_error(f"has no filter for class '{name}'")
        for what in ("kind", "order", "budget", "limit"):
            if type(state[what]) is not type(whole[what]) or state[what] != whole[what]:
                found = f"{what} {short_repr(state[what])}, the plan has {whole[what]!r}"
                raise _state_error(f"has a filter for class '{name}' with {found}")
        if type(state["spent"]) is not int or not 0 <= state["spent"] <= int(whole["limit"]):
            raise _state_error(f"has {short_repr(state['spent'])} units spent by class '{name}'")
        return RenyiFilter.from_state(state)


def refuse_filter(plan: StepPlan, name: str, filter_: PrivacyFilter) -> None:
    """Refuse a filter that does not count what the noise of the plan costs."""
    if not plan.noise_kind.integer_orders or (isinstance(filter_, RenyiFilter) and filter_.order % 1 == 0):
        return
    problem = f"the filter of class '{name}' does not hold for {plan.noise_kind.value} noise"
    raise PlanError("engine.filter-for-other-noise", problem, "use a RenyiFilter of an integer order, e.g. 32")


def _state_error(why: str) -> PlanError:
    return PlanError("engine.budget-state", f"the budget state {why}", "load a to_state() of the same plan's budget")
