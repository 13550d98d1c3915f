"""`Engine`: carries out the step that a plan describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamina import validate
from lamina.account.filters import PrivacyFilter
from lamina.allocate.paper import warn_if_reproduction
from lamina.engine import inspection
from lamina.engine.attach import Attachment, refuse_wrappers
from lamina.engine.batch import Batch, check_is_batch
from lamina.engine.budget import Budget
from lamina.engine.distributed import Ranks, refuse_unsharded, weights_digest
from lamina.engine.execute.eager import EagerExecutor, Work
from lamina.engine.execute.placement import OpenStep
from lamina.engine.execute.sharded import placement_of
from lamina.engine.guards.batch_use import BatchUse
from lamina.engine.guards.gradients import GradWriter
from lamina.engine.guards.guard import Guard, Moment
from lamina.engine.guards.model import ModelGuard, refuse_elsewhere, refuse_extra_state, refuse_float16
from lamina.engine.guards.outside_writes import OutsideWrites
from lamina.engine.guards.state import StateGuard
from lamina.engine.layers.layer_rule import Target
from lamina.engine.noise import noise_mechanism
from lamina.engine.noise.grid import Grid
from lamina.engine.noise.mechanism import COUNTS
from lamina.engine.noise.secure_sums import GridSums
from lamina.engine.noise.source import NoiseSource, SecureNoise, refuse_other_rank, use_plain_where_needed
from lamina.engine.probe import Probing
from lamina.engine.rules.plan_rules import PlanRules
from lamina.engine.rules.proxy import Proxy
from lamina.engine.slices import PlanSlices, RestoreUnreached, trained_tensors
from lamina.errors import EngineError
from lamina.plan.coverage import check_coverage
from lamina.plan.rules import NoiseKind
from lamina.plan.step_plan import StepPlan

if TYPE_CHECKING:
    from lamina.engine.execute.compiled import CompiledExecutor
    from lamina.engine.execute.step_graph import LossesOf

_engines: WeakSet[Engine] = WeakSet()


def unprobed_engines(plan: StepPlan) -> list[Engine]:
    """The attached engines of a plan that nobody probed yet."""
    found = [e for e in _engines if not (e.detached or e.probed)]
    return [e for e in found if e.plan is plan or e.plan.digest() == plan.digest()]


def is_attached(model: nn.Module) -> bool:
    """Whether some engine is attached to a model, to a part of it, or to what it is a part of."""
    mine = set(model.modules())
    return any(not (e.detached or mine.isdisjoint(e.model.modules())) for e in _engines)


class Engine:
    """Route, clip, sum, noise: one call of `backward` is one private step.

    Formal guarantee. If the batches are drawn as the plan says (Poisson, rate q_k from the declared
    population), contributions do not influence each other in `model` and loss, and `noise` is
    secure, then after T calls the tensors that the engine wrote are (ε_k, δ_k)-differentially
    private for every class k of the plan, with ε_k = plan.epsilon(k): docs/theory.md.

    Attaching changes nothing that a user of the model can see; `detach` (or leaving a `with` block)
    takes every trace away.

    Under torch.distributed it takes its steps together with the engines of the other ranks: each is given its own part
    of the batch (`corpus.batches` divides it) and adds its share of the noise, and all get the same gradient.
    """

    def __init__(
        self, model: nn.Module, plan: StepPlan, *, noise: NoiseSource | None = None,
        filters: Mapping[str, PrivacyFilter] | None = None, rows: Mapping[str, str] | None = None,
        per_contribution: Sequence[str] = (), constant_time: bool = False, taken: int = 0, proxy: Proxy | None = None,
        compiled: bool = False, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """
        noise             where the noise comes from: a secure, hardened stream by default; SecureNoise(hardened=False)
                          for plain noise
        filters           by class name: asked before each step, and charged for it
        rows              by pattern of module name: 'contiguous' or 'interleaved' rows per example
        per_contribution  names of modules to run once per contribution
        constant_time     do not skip arithmetic where no sampled contribution reaches
        taken             steps of this plan that an earlier engine took on the same data: ε counts from there
        proxy             of a plan whose shares follow a proxy (`FollowProxy`): its public or simulated examples
        compiled          run `step` as a compiled graph where that can be: see `lamina.engine.execute.compiled`
        ranks             the processes that take the steps together: torch.distributed's default group, if there is one
        """
        self.model, self.plan = model, plan
        self.ranks = Ranks.current() if ranks is None else ranks
        refuse_unsharded(plan, self.ranks)
        self.options: dict[str, Any] = {
            "rows": dict(rows or {}), "per_contribution": list(per_contribution), "constant_time": constant_time,
            "compiled": compiled, **({} if proxy is None else {"proxy": proxy}),
        }  # fmt: skip
        refuse_wrappers(model)
        self._open: OpenStep | None = None
        self.placement = placement_of(model, plan, self.ranks, step=self._step_number, compiled=compiled)
        self.budget = Budget(plan, filters or {}, taken)
        self.placement.gather()
        self.coverage = check_coverage(model, plan)

        parameters = dict(model.named_parameters())
        self._tensors = {name: parameters[name] for name in trained_tensors(plan)}
        refuse_float16(parameters)
        refuse_elsewhere(self._tensors, "integer noise" if plan.noise_kind is not NoiseKind.GAUSSIAN else "")
        refuse_extra_state(model)
        warn_if_reproduction(plan)
        self.plain_noise_note = ""  # why the noise is not hardened although it should be
        self._take_noise(SecureNoise(rank=self.ranks.rank) if noise is None else noise)
        self.mechanism = noise_mechanism(plan, self._tensors, self.ranks)
        self._slices = PlanSlices(plan, parameters)
        self.rules = PlanRules(model, plan, self._slices.sizes, proxy, self.ranks)

        held = {name: self.placement.held[name] for name in self._tensors}
        self._gradients, self._state = GradWriter(held), StateGuard(model, self._tensors, self.placement.held)
        self.outside = OutsideWrites(model, self._tensors, held)
        self._uses = BatchUse(plan, self.ranks)
        restore = RestoreUnreached(self._tensors, self._slices.unreached)
        self.guards: list[Guard] = [
            ModelGuard(model), self.placement, self._gradients, self._state, restore, self.outside, self._uses,
        ]  # fmt: skip
        targets = {
            name: Target(name, i) if name in self._tensors else None for name, i in self.mechanism.layer_of.items()
        }
        self._attachment = Attachment(
            model, targets, rows=rows, per_contribution=list(per_contribution), state=self._state, guards=self.guards,
            gather=self.placement.begin_forward,
        )  # fmt: skip
        self.placement.attach(self._attachment.run_per_contribution)
        names = {id(p): name for name, p in parameters.items()}
        self.eager = EagerExecutor(
            plan, names, self._tensors, attachment=self._attachment, placement=self.placement, guards=self.guards,
            gradients=self._gradients, state=self._state, slices=self._slices, constant_time=constant_time,
        )  # fmt: skip
        self.probing = Probing(
            model, self._tensors, len(plan.classes), partial(inspection.measure, self.eager), self._attachment,
            self.outside, sharded=self.placement.sharded,
        )  # fmt: skip
        self.guards.append(self.probing)
        self.compiled: CompiledExecutor | None = None
        if compiled:
            from lamina.engine.execute.compiled import CompiledExecutor  # torch's tracing is slow to import

            self.compiled = CompiledExecutor(model, plan, self.eager, self._state)
        self._hooks = [register_optimizer_step_pre_hook(guard.before_optimizer_step) for guard in self.guards]
        self._hooks += [register_optimizer_step_post_hook(guard.after_optimizer_step) for guard in self.guards]
        self.claim = ""  # what ε compares, where it is not what the plan says
        self.starting_weights: str | None = None  # what make_private was told about them, for the trainer
        self.detached = False
        if not self.ranks.alone:
            kind = f"{type(self.noise).__name__}, hardened {self.noise.hardened}, secret {self.noise.private}".encode()
            self.ranks.check_same(plan=plan.digest(), weights=weights_digest(model), kind_of_noise=kind)
        self.placement.divide()
        _engines.add(self)

    def _step_number(self) -> int:
        """Of the step that is open, or of the next one."""
        return self.budget.taken if self._open is None else self._open.number

    def _take_noise(self, noise: NoiseSource) -> None:
        refuse_other_rank(noise, self.ranks.rank)
        note = use_plain_where_needed(noise, self._tensors, announced=bool(self.plain_noise_note))
        self.noise, self.plain_noise_note = noise, self.plain_noise_note or note

    # A step

    def backward(self, losses: Tensor | None, batch: Batch) -> None:
        """One charged event: `.grad` of every trained tensor becomes (clipped sum + noise) / B.

        `losses` holds one loss per example, or is None for an empty batch, which still gets its
        noise. With `batch.split`, call it once per part: noise and `.grad` come with the last.

        Batches of a probe, which `corpus.batches` hands out first, are compared instead: nothing is charged, and
        `.grad` stays None.
        """
        if not self.probing.takes(losses, check_is_batch(batch)):
            self._take(batch, lambda: self.eager.prepare(losses, batch))

    def step(self, losses_of: LossesOf, batch: Batch) -> Tensor | None:
        """`backward` of the losses that `losses_of(x, y)` computes, one per example. Returns them: they are secret.

        With `compiled=True` this is a compiled graph where that can be; `engine.compiled.reason` says why it was not.
        Give the same function at every step. Numbers that it reads from Python are those of its first steps: what
        changes must be a tensor.
        """
        prepared = None
        if self.compiled is not None and not (self.detached or self.probing.expects(check_is_batch(batch))):
            if batch.first:
                self.rules.before_step(self.budget.taken)  # thresholds are an argument of the graph
            prepared = self.compiled.prepare(losses_of, batch, self.rules.clipper)
        if prepared is not None:
            self._take(batch, lambda: prepared[0])
            return prepared[1]
        losses = losses_of(batch.x, batch.y) if len(batch) else None
        self.backward(losses, batch)
        return None if losses is None else losses.detach()

    def _take(self, batch: Batch, prepare: Callable[[], Work]) -> None:
        """One part of a step. Everything that can be refused is refused before anything is charged."""
        for guard in self.guards:
            guard.before_step(self._moment(batch))
        if batch.first:
            self._open = None  # an earlier step that was not finished is given up; its charge stays
        with self._giving_up_on_error():
            if batch.first:
                self.rules.refuse_due_choice(self.budget.taken, probing=self.probing.waiting)
            work = prepare()
            self._before_charge(batch)
            if batch.first:
                self._open = self._begin(batch)
            opened = self._open
            assert opened is not None
            if work.classes is not None:
                opened.sums.noise.saw(work.classes)
            work.add(opened.clipper, opened.sums, batch.last)
            if not batch.last:
                return
            self._open = None
            opened.refuse_fork()
            opened.clipper.settle(opened.sums)
            released = self.placement.release(opened)
            counts = released.pop(COUNTS, None)
            self._slices.zero_unreached(released)
            self.placement.divide()  # the weights first: nobody needs them whole any more
            self._gradients.write(self.placement.divided(released))
            for guard in self.guards:
                guard.after_write()
            self.rules.after_step(opened.number, lambda: self.placement.whole(released), counts)

    def _begin(self, batch: Batch) -> OpenStep:
        """Charge a step, with C and S as they are from now on, and begin its sums."""
        applied = self.rules.before_step(self.budget.taken)
        step = self.budget.charge(self.rules.factor)
        for guard in self.guards:
            guard.after_charge(batch)
        sums = self.placement.sums(self._tensors, self.mechanism.open(applied, self.noise, step))
        return OpenStep(number=step, drawn=batch.draw.step, clipper=self.rules.clipper, sums=sums)

    def _moment(self, batch: Batch) -> Moment:
        under_way = not batch.first and (self._open is not None or self.rules.choice is not None)
        return Moment(step=self._step_number(), under_way=under_way, private=self.noise.private)

    def _before_charge(self, batch: Batch) -> None:
        for guard in self.guards:
            guard.before_charge(batch, self._moment(batch))

    @contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        """A step that fails is given up; if it was charged, it stays charged."""
        try:
            yield
        except BaseException:
            self._open = None
            self.placement.give_up()
            raise

    # Rules of the plan

    @property
    def applied(self) -> StepPlan:
        """The plan with C and S as the next step will use them: the plan itself unless it has rules."""
        return self.rules.applied

    def follow_proxy(self) -> None:
        """Move S as the plan's proxy says, if it is due before the next step; `backward` does so where nobody did."""
        self.rules.follow_proxy(self.budget.taken)

    @property
    def choice_due(self) -> bool:
        """Whether the next step must be preceded by `choose`."""
        return self.rules.choice_due(self.budget.taken) and not self.probing.waiting

    def choose(self, losses: Tensor | None, batch: Batch) -> None:
        """One charged event: an exponential mechanism picks the shape of the noise for the steps to come.

        `batch` is a Poisson draw of its own, at the rates of the plan; `losses` is None if it is empty. No gradient
        is written. Like `backward`, it may be called once for each part of `batch.split`.
        """
        step, rules = self.budget.taken, self.rules
        try:
            if rules.adaptation is None or (check_is_batch(batch).first and not self.choice_due):
                raise EngineError(
                    "engine.no-choice-due", f"no choice is due before step {step}", "ask engine.choice_due"
                )
            part = self.eager.examine(losses, batch)
            self._before_charge(batch)
            if batch.first:
                self._open = None
                rules.open_choice(step, self.budget.charge_choice)
                for guard in self.guards:
                    guard.after_charge(batch)
            rules.add_to_choice(part, self.eager)
            if batch.last:
                rules.close_choice(self.noise, step)
        except BaseException:
            rules.choice = None  # if it was charged, it stays charged, and S stays as it is
            raise

    # Steps of a run

    @property
    def private(self) -> bool:
        """False where the noise came from a chosen seed."""
        return self.noise.private

    def epsilon(self, k: str | int) -> float:
        """An ε that holds for class k after the steps and choices so far: cheap enough for a progress bar."""
        return self.budget.epsilon(self.plan.index(k))

    def continue_at(self, step: int, noise: NoiseSource, *, factor: float | None = None, resumed: bool = False) -> None:
        """The next step is number `step` of the plan, with noise from `noise`.

        For a run that is cut into segments with a noise stream each: the ledger says what was charged.
        `factor`: of a plan that follows its budget, how many times the declared sigma the steps from here on have.
        The caller has asked the filters for it; the engine does not. `resumed`: what the noise mechanism keeps is from
        the steps before, which nothing else went on from; otherwise it begins anew.
        """
        validate.whole(EngineError, "engine.step-out-of-range", least=0, most=self.plan.steps, step=step)
        self.budget.filters_asked_elsewhere = self.rules.continue_at(factor)
        self._open = None
        self.outside.forget()
        self._take_noise(noise)
        self.budget.set_taken(step)
        if self.compiled is not None:
            self.compiled.begin_segment()
        if not resumed:
            self.mechanism.clear()

    # Probes, audits and tests

    @property
    def probed(self) -> bool:
        return self.probing.done

    def probe(self, losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any = None) -> None:
        """Refuse a model or loss in which one example's loss or gradient depends on the other examples.

        `losses_of(x, y)` computes one loss per example, model included; x and y are at least four public or simulated
        examples. The first, a middle and the last are watched, while the others are replaced, in another order or
        fewer. This finds what the graph cannot show: a loss divided by the tokens of the batch, padding to the
        longest, expert capacity, batch statistics. Random draws are replayed. See `lamina.engine.probe`.
        """
        self.probing.run(losses_of, x, y)

    def decline_probe(self) -> None:
        """Say that this engine is meant to take steps without a probe: it does not warn of it."""
        self.probing.declined = True

    def gradient_of(self, losses: Tensor, batch: Batch, unit: int, *, routed: bool = True) -> dict[str, Tensor]:
        """The unclipped gradient of one contribution: for probes on proxy data only.

        `routed`: 0 where its class may not move a tensor or a part of it.
        """
        return inspection.gradient_of(self.eager, self.rules.clipper, losses, batch, unit, routed=routed)

    def clipped_sums(self, losses: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """The routed, clipped sum without noise and without division, of this rank: for tests and audits only."""
        return inspection.clipped_sums(self.eager, self.rules.clipper, losses, batch)

    def grid_sums(self, losses: Tensor | None, batch: Batch, grids: Sequence[Grid]) -> GridSums:
        """The routed, clipped sum in whole units of each layer's grid, int64, without noise: of one party of a `SecureSum`.

        It goes into one step: a batch is taken whole, and once, as by `backward`.
        """
        refuse_elsewhere(self._tensors, "a sum in whole units of a grid")
        if not (check_is_batch(batch).first and batch.last):
            problem = "the batch is a part of a batch, and a party adds up its whole part of a step at once"
            raise EngineError("engine.grid-sum-of-part", problem, "give the batch itself, without split")
        part = self.eager.examine(losses, batch)
        self._before_charge(batch)
        for guard in self.guards:
            guard.after_charge(batch)
        by_name = {name: grids[self.mechanism.layer_of[name]] for name in self._tensors}
        sums = inspection.sums_of_part(self.eager, self.rules.clipper, part, by_name)
        return GridSums(sums, grids, self.rules.applied.digest())

    def proxy_norms(self, losses: Tensor, batch: Batch) -> Tensor:
        """(P,) the norm of each contribution's whole gradient before clipping: for public or simulated input only.

        The losses may be used again.
        """
        return inspection.gradient_norms(self.eager, self.rules.clipper, losses, batch)

    def accept_buffers(self) -> None:
        """Buffers and frozen parameters were set from public data alone: from here on they must stay as they are."""
        self._state.accept()

    # The end

    def detach(self) -> None:
        """Give the model back as it was. Refused afterwards, if a buffer or frozen parameter holds what was never noised."""
        attached = not self.detached
        self._take_away()
        for guard in self.guards if attached else ():
            guard.at_end()

    def _take_away(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._attachment.detach()
        self.placement.detach()
        self._open = None
        self.detached = self.eager.detached = True

    def __repr__(self) -> str:
        taken, steps = self.budget.taken, self.plan.steps
        probed = f"{self.claim or f'ε is {self.plan.adjacency}'}; {'probed' if self.probed else 'not probed'}"
        how = "" if self.compiled is None else f"; {self.compiled}"
        return f"Engine({self.coverage}; {taken} of {steps} steps taken; {probed}; {self.noise!r}{how})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        else:  # which says more than what the tensors hold
            self._take_away()
