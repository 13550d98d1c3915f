"""`Engine`: carries out the step that a plan describes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamina import validate
from lamina.account.filters import PrivacyFilter
from lamina.engine.attach import Attachment, refuse_wrappers
from lamina.engine.batch import Batch, Draw
from lamina.engine.budget import Budget
from lamina.engine.distributed import Ranks, is_sharded_model, refuse_unsharded, weights_digest, whole_tensor
from lamina.engine.execute import grads
from lamina.engine.execute.clipping import BoxCollector, ClipBounds, Collector, JointCollector, NormCollector
from lamina.engine.execute.paper_step import PaperStep, UnclippedSums, warn_if_reproduction
from lamina.engine.execute.sharded import OWNERSHIP_PASSES, ShardedModel, ShardedStep
from lamina.engine.execute.step import (
    ClippedSums,
    CorrelatedStep,
    IntegerStep,
    OpenStep,
    SumMemory,
    check_is_batch,
    own_their_storage,
    parts_out_of_order_error,
    zero_sums,
)
from lamina.engine.guards.outside_writes import OutsideWrites
from lamina.engine.guards.safety_checks import (
    CheckedBatch,
    GradWriter,
    OwnershipCheck,
    StateGuard,
    check_batch,
    check_classes,
    refuse_elsewhere,
    refuse_extra_state,
    refuse_float16,
    refuse_reduced_products,
)
from lamina.engine.layers.layer_rule import Target
from lamina.engine.noise.correlated import NoiseWindow
from lamina.engine.noise.integer import Grid, GridSums
from lamina.engine.noise.source import PLAIN_NOISE, PLAIN_NOTE, NoiseSource, PlainNoise, SecureNoise, widest_dtype
from lamina.engine.probe import Measured, NotProbed, Probe, ProbeBatch, losses_of_outputs, preserve_schedules
from lamina.engine.rules.adaptation import Adaptation, OpenChoice, refuse_factor
from lamina.engine.rules.proxy import Proxy, ProxyShares
from lamina.engine.simulated_input import simulate_for
from lamina.engine.slices import NO_MASKS, PlanSlices, RestoreUnreached, TensorMasks, trained_tensors
from lamina.errors import CouplingError, EngineError
from lamina.plan.coverage import check_coverage, find_hazards
from lamina.plan.rules import FollowProxy, NoiseKind
from lamina.plan.step_plan import Clipping, StepPlan

if TYPE_CHECKING:
    from lamina.engine.execute.compiled import CompiledStep, LossesOf

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
        self.ranks = Ranks.current() if ranks is None else ranks
        refuse_unsharded(plan, self.ranks)
        per_contribution = list(per_contribution)
        self.options: dict[str, Any] = {"rows": dict(rows or {}), "per_contribution": per_contribution}
        self.options["constant_time"] = constant_time
        if proxy is not None:
            self.options["proxy"] = proxy
        refuse_wrappers(model)
        self._open: OpenStep | ShardedStep | None = None
        self._sharded = ShardedModel(model, plan, self.ranks, compiled=compiled, step=self._step_number)
        self.budget = Budget(plan, filters or {}, taken)
        self._sharded.gather()
        self.coverage = check_coverage(model, plan)
        self.model, self.plan, self.constant_time = model, plan, constant_time
        self.plain_noise_note = ""  # why the noise is not hardened although it should be
        self.noise = self._own_noise(SecureNoise(rank=self.ranks.rank) if noise is None else noise)
        self._trained = [any(row[i] > 0 for row in plan.clip) for i in range(len(plan.layers))]
        self._layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
        parameters = dict(model.named_parameters())
        self._tensors = {name: parameters[name] for name in trained_tensors(plan)}
        self._names = {id(p): name for name, p in parameters.items()}
        self._slices = PlanSlices(plan, parameters)
        self.adaptation = Adaptation.of(plan, self._slices.sizes)
        refuse_float16(parameters)
        self._soften_elsewhere(self.noise)
        refuse_elsewhere(self._tensors, "integer noise" if plan.noise_kind is not NoiseKind.GAUSSIAN else "")
        refuse_extra_state(model)
        rule, self._proxy_step = plan.rule(FollowProxy), -1
        if (rule is None) != (proxy is None):
            problem = "the plan's shares follow a proxy, and none is given" if rule else "the plan follows no proxy"
            remedy = "give proxy to such plans: allocate=LADP(estimator='fisher')"
            raise EngineError("engine.proxy-misplaced", problem, remedy)
        self._proxy = None if rule is None or proxy is None else ProxyShares(model, plan, rule, proxy, self.ranks)
        warn_if_reproduction(plan)
        self._elementwise = plan.clipping is Clipping.ELEMENTWISE
        self._bounds = ClipBounds(plan)
        self._ownership = OwnershipCheck()
        held = {name: self._sharded.held[name] for name in self._tensors}
        self._gradients, self._guard = GradWriter(held), StateGuard(model, self._tensors, self._sharded.held)
        self._charged_draws: WeakSet[Draw] = WeakSet()
        self._draw: Draw | None = None  # of the step or choice that is open, and the places of its parts so far
        self._places: set[int] = set()
        self._memory = SumMemory(self._tensors)
        self.claim = ""  # what ε compares, where it is not what the plan says
        self.starting_weights: str | None = None  # what make_private was told about them, for the trainer
        self.detached = False
        self.probed = self._unprobed_said = False
        self._probe: Probe | None = None
        self.window = NoiseWindow(plan, list(self._tensors)) if plan.bands > 1 else None
        self._choice: OpenChoice | None = None
        targets = {name: Target(name, i) if name in self._tensors else None for name, i in self._layer_of.items()}
        self._outside = OutsideWrites(model, self._tensors, held)
        self._attachment = Attachment(
            model, targets, rows=rows, per_contribution=per_contribution, guard=self._guard, outside=self._outside,
            gather=self._sharded.begin_call,
        )  # fmt: skip
        self._sharded.attach(self._attachment.run_per_contribution)
        restore = RestoreUnreached(self._tensors, self._slices.unreached)
        self._hooks = [
            register_optimizer_step_pre_hook(self._gradients.before_optimizer_step),
            register_optimizer_step_pre_hook(self._guard.before_optimizer_step),
            register_optimizer_step_pre_hook(restore.before),
            register_optimizer_step_post_hook(restore.after),
            register_optimizer_step_post_hook(self._sharded.after_optimizer_step),
            register_optimizer_step_pre_hook(self._outside.before_optimizer_step),
            register_optimizer_step_post_hook(self._outside.after_optimizer_step),
        ]
        self.compiled: CompiledStep | None = None
        if compiled:
            from lamina.engine.execute.compiled import CompiledStep  # torch's tracing is slow to import

            started = model, plan, self._attachment, self._tensors, self._names
            self.compiled = CompiledStep(*started, adaptive=self.adaptation is not None)
        if not self.ranks.alone:
            kind = f"{type(self.noise).__name__}, hardened {self.noise.hardened}, secret {self.noise.private}".encode()
            self.ranks.check_same(plan=plan.digest(), weights=weights_digest(model), kind_of_noise=kind)
        self._sharded.divide()
        _engines.add(self)

    def _step_number(self) -> int:
        """Of the step that is open, or of the next one."""
        return self.budget.taken if self._open is None else self._open.step

    def _own_noise(self, noise: NoiseSource) -> NoiseSource:
        """Refuse noise of another rank: two ranks with one stream would add the same noise twice."""
        if noise.rank != self.ranks.rank:
            problem = f"the noise source is of rank {noise.rank}, this is rank {self.ranks.rank} of {self.ranks.size}"
            raise EngineError("engine.noise-of-other-rank", problem, f"make it with rank={self.ranks.rank}")
        return noise

    def _soften_elsewhere(self, noise: NoiseSource) -> None:
        """Use plain noise for a model on a device without float64, and say so."""
        if not noise.hardened:
            return
        lacking = next((p.device for p in self._tensors.values() if widest_dtype(p.device) != torch.float64), None)
        if lacking is not None:
            noise.use_plain()
            if not self.plain_noise_note:
                self.plain_noise_note = f"{PLAIN_NOTE} device {lacking.type} has no float64"
                warnings.warn(f"{self.plain_noise_note}: {PLAIN_NOISE}", PlainNoise, stacklevel=4)

    @property
    def device(self) -> torch.device:
        """Where the model is: the device of its first trained tensor."""
        return next((p.device for p in self._tensors.values()), torch.device("cpu"))

    def step(self, losses_of: LossesOf, batch: Batch) -> Tensor | None:
        """`backward` of the losses that `losses_of(x, y)` computes, one per example. Returns them: they are secret.

        With `compiled=True` this is a compiled graph where that can be; `engine.compiled.reason` says why it was not.
        Give the same function at every step. Numbers that it reads from Python are those of its first steps: what
        changes must be a tensor.
        """
        ready = self._ready_sums(losses_of, check_is_batch(batch))
        if ready is None:
            losses = losses_of(batch.x, batch.y) if len(batch) else None
            self.backward(losses, batch)
            return None if losses is None else losses.detach()
        self._before_step()
        if batch.first:
            self._open = None
        try:
            self._take(None, batch, ready[0])
        except BaseException:
            self._open = None
            raise
        return ready[1]

    def _ready_sums(self, losses_of: LossesOf, batch: Batch) -> tuple[dict[str, Tensor], Tensor] | None:
        """The clipped sums of a batch from the compiled graph, and its losses; None where there is no graph for it."""
        compiled, of_probe = self.compiled, isinstance(batch, ProbeBatch) or self._probe is not None
        if compiled is None or of_probe or self.detached or len(batch) == 0:
            return None
        reached = self._limits.reached(check_classes(batch, self.plan)) == self._trained or self.constant_time
        bounds, radius = self._limits.of(batch)
        graph = compiled.graph_for(losses_of, batch, all_reached=reached)
        if graph is None:
            return None
        self._check_state()
        self._guard.begin_call()
        ready = compiled.sums(graph, batch, bounds, radius)
        self._guard.check_trained()
        if ready is None or not graph.compare_now:
            return ready
        losses = losses_of(batch.x, batch.y)
        part, own = self._examine(losses, batch, again=True), ClippedSums(zero_sums(self._tensors))
        assert part is not None
        self._accumulate(part, own)
        compiled.compare(graph, ready[0], own.sums)
        return own.sums, losses.detach()

    def backward(self, losses: Tensor | None, batch: Batch) -> None:
        """One charged event: `.grad` of every trained tensor becomes (clipped sum + noise) / B.

        `losses` holds one loss per example, or is None for an empty batch, which still gets its
        noise. With `batch.split`, call it once per part: noise and `.grad` come with the last.

        Batches of a probe, which `corpus.batches` hands out first, are compared instead: nothing is charged, and
        `.grad` stays None.
        """
        if self._is_of_probe(losses, check_is_batch(batch)):
            return
        self._before_step()
        if batch.first:
            self._open = None  # an earlier step that was not finished is given up; its charge stays
        try:
            self._take(losses, batch)
        except BaseException:
            self._open = None
            self._sharded.give_up()
            raise

    def _take(self, losses: Tensor | None, batch: Batch, ready: dict[str, Tensor] | None = None) -> None:
        if batch.first and (self.choice_due or self._choice is not None):
            problem = f"the plan must choose the shape of its noise before step {self.budget.taken}"
            remedy = "draw another batch and call engine.choose(losses, batch) first (losses=None if it is empty)"
            raise EngineError("engine.choice-due", problem, remedy)
        part = self._examine(losses, batch, stepping=True) if ready is None else None
        self._refuse_second_use(batch)
        if batch.first:
            self._open = self._begin(ready)
            self._open.drawn = batch.draw.step
            self._charged_draws.add(batch.draw)
        if self._open is None:
            raise parts_out_of_order_error()
        if part is None or not self._accumulate(part, self._open, last=batch.last):
            self._sharded.follow(1, self._open)
        if ready is not None and self._open.sums is not ready:
            torch._foreach_add_([self._open.sums[name] for name in ready], list(ready.values()))
        if batch.last:
            step, self._open = self._open, None
            released = step.release()
            self._slices.zero_unreached(released)
            self._sharded.divide()  # the weights first: nobody needs them whole any more
            self._gradients.write(self._sharded.divided(released))
            self._outside.after_write()
            if self.adaptation is not None:
                self.adaptation.after(step.step, {n: whole_tensor(t) for n, t in released.items()}, step.counts)

    def _begin(self, ready: dict[str, Tensor] | None = None) -> OpenStep | ShardedStep:
        factor = 1.0
        self.follow_proxy()
        if self.adaptation is not None:
            self.adaptation.apply_proposed_factor()
            factor = self.adaptation.factor
        made: type[Any] = OpenStep
        options: dict[str, Any] = {"memory": self._memory}
        if self.window is not None:
            made, options["window"] = CorrelatedStep, self.window
        elif self._elementwise:
            made = PaperStep
        elif self.plan.noise_kind is not NoiseKind.GAUSSIAN:
            made = IntegerStep
        elif self.sharded:
            made, options = ShardedStep, {"model": self._sharded}
        elif ready is not None and own_their_storage(ready, self._tensors):
            options["sums"] = ready
        given = self.applied, self.noise, self._tensors, self._layer_of, self.budget.charge(factor)
        opened: OpenStep | ShardedStep = made(*given, ranks=self.ranks, **options)
        return opened

    def follow_proxy(self) -> None:
        """Move S as the plan's proxy says, if it is due before the next step; `backward` does so where nobody did."""
        adaptation, proxy, step = self.adaptation, self._proxy, self.budget.taken
        if adaptation is not None and proxy is not None and proxy.due(step) and self._proxy_step != step:
            adaptation.follow_proxy(proxy, step)
            self._proxy_step = step

    @property
    def choice_due(self) -> bool:
        """Whether the next step must be preceded by `choose`."""
        taken = self.budget.taken
        if self._probe is not None and self._probe.waiting is not None:
            return False
        return self.adaptation is not None and taken < self.plan.steps and self.adaptation.due(taken)

    def choose(self, losses: Tensor | None, batch: Batch) -> None:
        """One charged event: an exponential mechanism picks the shape of the noise for the steps to come.

        `batch` is a Poisson draw of its own, at the rates of the plan; `losses` is None if it is empty. No gradient
        is written. Like `backward`, it may be called once for each part of `batch.split`.
        """
        try:
            self._choose(losses, check_is_batch(batch))
        except BaseException:
            self._choice = None  # if it was charged, it stays charged, and S stays as it is
            raise

    def _choose(self, losses: Tensor | None, batch: Batch) -> None:
        adaptation, step = self.adaptation, self.budget.taken
        if adaptation is None or (batch.first and not self.choice_due):
            raise EngineError("engine.no-choice-due", f"no choice is due before step {step}", "ask engine.choice_due")
        part = self._examine(losses, batch)
        self._refuse_second_use(batch)
        if batch.first:
            self.follow_proxy()  # what it measures is a candidate
            self._open, choice = None, OpenChoice(self.plan, adaptation.candidates(), self._slices.sizes)
            self.budget.charge_choice()
            self._charged_draws.add(batch.draw)
            self._choice, adaptation.chosen = choice, step
        if self._choice is None:
            raise parts_out_of_order_error()
        if part is not None:
            self._choice.add(part, self._norms(part, self._reached(part), self._masks_for(part)))
        if batch.last:
            choice, self._choice = self._choice, None
            adaptation.apply_choice(choice.drawn(self.noise, step))

    def _refuse_second_use(self, batch: Batch) -> None:
        """Each step is priced as a draw of its own; where everybody is in every draw, all draws are the same."""
        if batch.draw.seeded and self.noise.private:
            problem = "this batch was drawn with a seed that somebody chose, and ε is priced with secret coins"
            remedy = "draw without seed=; or, where nothing has to be private, Engine(…, noise=SeededNoise(0))"
            raise EngineError("engine.seeded-batch", problem, remedy)
        if (batch.draw.rank, batch.draw.ranks) != (self.ranks.rank, self.ranks.size):
            problem = f"the batch is the part of rank {batch.draw.rank} of {batch.draw.ranks}"
            problem += f", and this is rank {self.ranks.rank} of {self.ranks.size}"
            remedy = "use corpus.batches(plan), or batch.shard(rank, size) of a batch that is the same on every rank"
            raise EngineError("engine.batch-of-other-ranks", problem, remedy)
        turn = (self.budget.taken % self.plan.bands, self.plan.bands)
        if self.window is not None and self.noise.private and batch.first and batch.draw.turn != turn:
            problem = f"step {self.budget.taken} is turn {turn[0]} of {turn[1]}, and this batch was not drawn from those whose turn it is"
            remedy = "correlated noise holds for contributions that take turns: use corpus.batches(plan) or a Trainer"
            raise EngineError("engine.batch-of-other-turn", problem, remedy)
        places = batch.places or range(0)
        under_way = not batch.first and (self._open or self._choice)
        if under_way and (batch.draw is not self._draw or not self._places.isdisjoint(places)):
            what = "shares contributions with an earlier part"
            what = what if batch.draw is self._draw else "is of another draw than its first part"
            problem = f"this part of step {self._step_number()} {what}: a contribution could count twice in one step"
            remedy = "give each part of one batch.split(…) once, in order; to draw more, plan a larger batch"
            raise EngineError("engine.part-counted-twice", problem, remedy)
        sampled = any(entry.sampling_rate < 1 for entry in self.plan.classes)
        if batch.first and sampled and batch.draw in self._charged_draws:
            problem = f"this batch was charged before step {self.budget.taken}, and each step is priced as a new draw"
            remedy = "draw a batch for each step: corpus.batches(plan), or a Batch of its own; to use it in parts, batch.split"
            raise EngineError("engine.batch-used-again", problem, remedy)
        if batch.first:
            self._draw, self._places = batch.draw, set()
        self._places.update(places)

    def gradient_of(self, losses: Tensor, batch: Batch, unit: int, *, routed: bool = True) -> dict[str, Tensor]:
        """The unclipped gradient of one contribution: for probes on proxy data only.

        `routed`: 0 where its class may not move a tensor or a part of it.
        """
        part = self._examine(losses, batch)
        return zero_sums(self._tensors) if part is None else self._gradient_of(part, unit, routed=routed)

    def _gradient_of(
        self, part: CheckedBatch, unit: int, *, routed: bool, retain_graph: bool = False
    ) -> dict[str, Tensor]:
        sums = zero_sums(self._tensors)
        bounds = torch.zeros(part.layout.units, len(self.plan.layers), dtype=torch.float64)
        reach = self._limits.clip[part.classes[unit]] > 0
        bounds[unit] = torch.where(reach, torch.inf, 0.0) if routed else torch.inf
        masks = self._masks_for(part) if routed else NO_MASKS
        collector = BoxCollector(part, self._trained, sums, masks, bounds=bounds)
        self._collect(part, collector, retain_graph=retain_graph)
        return sums

    def clipped_sums(self, losses: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """The routed, clipped sum without noise and without division, of this rank: for tests and audits only."""
        part = self._examine(losses, batch)
        unclipped = UnclippedSums(self.plan, self._tensors, self._layer_of) if self._elementwise else None
        into = ClippedSums(zero_sums(self._tensors)) if unclipped is None else unclipped
        if part is not None:
            self._accumulate(part, into)
        return into.sums if unclipped is None else unclipped.mean()

    def grid_sums(self, losses: Tensor | None, batch: Batch, grids: Sequence[Grid]) -> GridSums:
        """The routed, clipped sum in whole units of each layer's grid, int64, without noise: of one party of a `SecureSum`.

        It goes into one step: a batch is taken whole, and once, as by `backward`.
        """
        refuse_elsewhere(self._tensors, "a sum in whole units of a grid")
        if not (check_is_batch(batch).first and batch.last):
            problem = "the batch is a part of a batch, and a party adds up its whole part of a step at once"
            raise EngineError("engine.grid-sum-of-part", problem, "give the batch itself, without split")
        part = self._examine(losses, batch)
        self._refuse_second_use(batch)
        self._charged_draws.add(batch.draw)
        into = ClippedSums({name: torch.zeros(p.shape, dtype=torch.int64) for name, p in self._tensors.items()})
        into.grid = {name: grids[self._layer_of[name]] for name in self._tensors}
        if part is not None:
            self._accumulate(part, into)
        return GridSums(into.sums, grids, self.applied.digest())

    def refuse_sharded_since(self) -> None:
        """Refuse a model that came under `fully_shard` after this engine was made: ranks would wait for each other."""
        if not self.ranks.alone and is_sharded_model(self.model) and not self.sharded:
            problem = "fully_shard was called on the model after the engine was made"
            remedy = "call fully_shard first, then make_private, Engine or Trainer, then the optimizer"
            raise EngineError("engine.sharded-after-engine", problem, remedy)

    def _check_state(self, *, whole: bool = True) -> None:
        if self.detached:
            remedy = "make a new one: lamina.Engine(model, plan)"
            raise EngineError("engine.detached", "this engine was detached from its model", remedy)
        refuse_reduced_products()
        self.refuse_sharded_since()
        if whole:
            self._sharded.gather()
        self._gradients.check()
        self._guard.check(values=False)

    def _examine(
        self, losses: Tensor | None, batch: Batch, *, again: bool = False, stepping: bool = False
    ) -> CheckedBatch | None:
        """Everything that can be refused, before anything is spent. `again`: the ownership check, too, due or not.

        `stepping`: for a step, whose weights may come block by block.
        """
        self._check_state(whole=not stepping)
        part = check_batch(losses, batch, self.plan, self._names)
        self._guard.check_trained()
        due = part is not None and (self._ownership.due(part.graph, part.layout.units) or again)
        if stepping:
            self._sharded.start(batch, empty=part is None, passes=OWNERSHIP_PASSES if due else 0)
        if part is not None and due:
            self._guard.check(values=True)
            for hazard in find_hazards(self.model):
                raise CouplingError("engine.hazard-in-model", str(hazard), hazard.remedy)
            with torch.autocast(self.device.type, enabled=False):
                around = self._sharded.backward_pass
                self._ownership.run(part.losses, part.layout.owner, part.layout.units, part.graph, part.layouts, around)
        if stepping:
            self._sharded.follow()
        return part

    @property
    def applied(self) -> StepPlan:
        """The plan with C and S as the next step will use them: the plan itself unless it has rules."""
        return self.plan if self.adaptation is None else self.adaptation.applied

    @property
    def _limits(self) -> ClipBounds:
        if self._bounds.plan is not self.applied:
            self._bounds = ClipBounds(self.applied)
        return self._bounds

    def _reached(self, part: CheckedBatch) -> list[bool]:
        return self._trained if self.constant_time else self._limits.reached(part.classes)

    def _masks_for(self, part: CheckedBatch) -> TensorMasks:
        return self._slices.masks_for(part.classes, narrow=not self.constant_time)

    def _accumulate(self, part: CheckedBatch, into: ClippedSums, *, last: bool = False) -> bool:
        """Clip and add up a part; False if it reaches nothing. `last`: of a step, so that complete sums may be given away."""
        reached = self._reached(part)
        if any(reached):
            part = into.prepare(part)
            collector = self._limits.collector(part, into, reached, self._masks_for(part))
            self._collect(part, collector, into=into if last else None)
        return any(reached)

    def _collect(
        self, part: CheckedBatch, collector: Collector, *, retain_graph: bool = False, into: ClippedSums | None = None
    ) -> None:
        """Run autograd for one collector; refuse gradients that anything else writes meanwhile."""
        before, slot = self._gradients.versions(), self._attachment.slot
        inputs = [p for name, p in self._tensors.items() if collector.reached[self._layer_of[name]]]
        slot.receiver = collector
        try:
            with torch.autocast(self.device.type, enabled=False), self._sharded.backward_pass(into, collector):
                torch.autograd.backward(part.losses, part.weights, inputs=inputs, retain_graph=retain_graph)
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                if isinstance(into, ShardedStep) and isinstance(collector, JointCollector):
                    collector.measure()
                    into.later = collector
                else:
                    collector.finish()
        finally:
            slot.receiver = None
            grads.release_buffers()
        self._gradients.check_unchanged(before)

    def _norms(self, part: CheckedBatch, reached: list[bool], masks: TensorMasks = NO_MASKS) -> Tensor:
        """(P, L) norms of every contribution at every layer that is reached: secret."""
        collector = NormCollector(part, reached, masks)
        if any(reached):
            self._collect(part, collector)
        return collector.norms

    @property
    def sharded(self) -> bool:
        """Whether the model is under `fully_shard`."""
        return bool(self._sharded.parts)

    def gather(self) -> None:
        """Make a sharded model whole until the end of the next step; every rank does so. Others are whole."""
        self._sharded.gather()

    def divide(self) -> None:
        """Take `gather` back; every rank does so."""
        self._sharded.divide()

    @property
    def private(self) -> bool:
        """False where the noise came from a chosen seed."""
        return self.noise.private

    def epsilon(self, k: str | int) -> float:
        """An ε that holds for class k after the steps and choices so far: cheap enough for a progress bar."""
        return self.budget.epsilon(self.plan.index(k))

    def weights_text(self) -> str:
        """Return a note on weights that were written since the last `optimizer.step`; empty if none were."""
        return self._outside.weights_text()

    def continue_at(self, step: int, noise: NoiseSource, *, factor: float | None = None, resumed: bool = False) -> None:
        """The next step is number `step` of the plan, with noise from `noise`.

        For a run that is cut into segments with a noise stream each: the journal and the ledger say what was charged.
        `factor`: of a plan that follows its budget, how many times the declared sigma the steps from here on have.
        The caller has asked the filters for it; the engine does not. `resumed`: of a plan with correlated noise, the
        window holds the noise of the steps before, which nothing else went on from; otherwise it begins anew.
        """
        validate.whole(EngineError, "engine.step-out-of-range", least=0, most=self.plan.steps, step=step)
        if self.adaptation is not None:
            self.budget.filters_asked_elsewhere = self.adaptation.fix(factor)
        else:
            refuse_factor(factor)
        self._open = self._choice = None
        self._outside.forget()
        self._proxy_step = -1
        self.noise = self._own_noise(noise)
        self._soften_elsewhere(noise)
        self.budget.set_taken(step)
        if self.window is not None and not resumed:
            self.window.clear()

    def probe(self, losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any = None) -> None:
        """Refuse a model or loss in which one example's loss or gradient depends on the other examples.

        `losses_of(x, y)` computes one loss per example, model included; x and y are at least four public or simulated
        examples. The first, a middle and the last are watched, while the others are replaced, in another order or
        fewer. This finds what the graph cannot show: a loss divided by the tokens of the batch, padding to the
        longest, expert capacity, batch statistics. Random draws are replayed. See `lamina.engine.probe`.
        """
        self._outside.probing = True
        try:
            Probe(self, x, y).run(losses_of)
        finally:
            self._outside.probing = False
        self.probed = True
        self._attachment.accept_hooks()

    def probe_batches(self, x: Any, y: Any = None, *, simulated: bool = False, joined: bool = False) -> Iterator[Batch]:
        """As `probe`, for a loop of one's own: batches to compute losses of and to hand to `backward`.

        Buffers, generators and learning rate schedules are left as they were. `simulated`: of x and y only shapes and
        types are used, and values are made up. `joined`: contributions may have several examples.
        """
        self._probe, self._outside.probing = Probe(self, x, y, simulated=simulated, joined=joined), True
        try:
            with preserve_schedules(self._tensors):
                yield from self._probe.batches()
            if self._probe.complete:
                self.probed = True
                self._attachment.accept_hooks()
        finally:
            self._probe, self._outside.probing = None, False

    def decline_probe(self) -> None:
        """Say that this engine is meant to take steps without a probe: it does not warn of it."""
        self._unprobed_said = True

    def _is_of_probe(self, losses: Tensor | None, batch: Batch) -> bool:
        if self._probe is None or self._probe.waiting is None:
            return isinstance(batch, ProbeBatch)  # of another engine with the same plan
        self._probe.receive(losses, batch)
        return True

    def _before_step(self) -> None:
        """Warn if the model is not probed or was written outside of the engine; probe it again if it has new hooks."""
        self._say_if_unprobed()
        self._outside.private = self.noise.private
        self._outside.check_weights()
        if self.probed and self._attachment.call_with_new_hooks is not None and (at := self._attachment.new_hooks()):
            self._probe_hooks(at[0])

    def _probe_hooks(self, name: str) -> None:
        """Probe the model alone, on simulated arguments of its last call. Nothing is charged."""
        problem = f"a hook was registered on '{name}' after the probe"
        if self.sharded:
            remedy = "register hooks before the engine is probed"
            raise EngineError("engine.hook-not-probed", f"{problem}, but the model is divided over ranks", remedy)

        def losses_of(x: Any, y: Any) -> Tensor:
            return losses_of_outputs(self.model(*x[0], **x[1]), Batch(x).examples)

        try:
            with self._attachment.aside():
                x, _ = simulate_for(losses_of, self._attachment.call_with_new_hooks, None)
                Probe(self, x).run(losses_of)
        except CouplingError as found:
            remedy = f"remove the hook, or: {found.remedy}"
            raise CouplingError(found.code, f"{problem}: {found.problem}", remedy) from None
        except Exception as error:
            problem += f", and the model cannot be probed again on simulated input: {type(error).__name__}"
            remedy = (
                "call engine.probe(losses_of, x, y) with public examples after registering it, or register it earlier"
            )
            raise EngineError("engine.hook-not-probed", problem, remedy) from None
        self._attachment.accept_hooks()

    def _say_if_unprobed(self) -> None:
        if not (self.probed or self._unprobed_said) and self.noise.private:
            self._unprobed_said = True
            warnings.warn(
                "this engine was not probed: its ε holds only if examples do not influence each other in what the losses "
                "are computed from. Use corpus.batches(plan), or engine.probe(losses_of, x, y) with public data",
                NotProbed,
                stacklevel=3,
            )

    def accept_buffers(self) -> None:
        """Buffers and frozen parameters were set from public data alone: from here on they must stay as they are."""
        self._guard.accept()

    def measure(self, losses: Tensor | None, batch: Batch, units: Sequence[int]) -> list[Measured]:
        """Loss and unclipped gradient of some contributions: for probes on proxy data only."""
        part, found = self._examine(losses, batch), []
        assert part is not None
        for unit in units:
            mine = part.losses.detach().cpu()[part.layout.owner == unit].double()
            gradient = self._gradient_of(part, unit, routed=False, retain_graph=True)
            found.append({"loss": mine.mean(), **{name: t.cpu() for name, t in gradient.items()}})
        return found

    def proxy_norms(self, losses: Tensor, batch: Batch) -> Tensor:
        """(P,) the norm of each contribution's whole gradient before clipping: for public or simulated input only.

        The losses may be used again.
        """
        part = self._examine(losses, batch)
        assert part is not None
        collector = NormCollector(part, self._reached(part), self._masks_for(part))
        self._collect(part, collector, retain_graph=True)
        return collector.norms.square().sum(1).sqrt()

    def detach(self) -> None:
        """Give the model back as it was. Refused afterwards, if a buffer or frozen parameter holds what was never noised."""
        attached = not self.detached
        self._take_away()
        if attached:
            self._guard.check_at_end()

    def _take_away(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._attachment.detach()
        self._sharded.detach()
        self._open = None
        self.detached = True

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
