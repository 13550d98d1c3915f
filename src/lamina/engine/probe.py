"""The probe: whether the loss or the gradient of one contribution depends on the others of its batch.

A probe is a sequence of small batches of public or simulated input. Whoever computes losses computes them for these
batches, too, and hands them to the engine, which compares: nothing is charged and no gradient is written.

Random draws (dropout, the sample of a variational autoencoder) are replayed: both sides of a comparison begin at the
same state of every generator, and the others are replaced *where they are*, because moving or removing rows would
shift the draws. A mask that the whole batch shares is then the same on both sides, and sound; draws whose number or
place depends on what the others contain are not. To move and remove rows all the same, the draws of torch are made
constant (`ConstantDraws`); where other generators are drawn from, rows are only replaced.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.engine.batch import Batch, take_rows
from lamina.engine.guards.guard import Guard, Moment, tensors_of_optimizer
from lamina.engine.guards.outside_writes import OutsideWrites, kept_tensors
from lamina.engine.simulated_input import WatchLookups, simulate, simulate_for, simulated_count
from lamina.errors import CouplingError, EngineError

if TYPE_CHECKING:
    from lamina.engine.attach import Attachment
    from lamina.engine.inspection import Measured

_TOLERANCE = 1e-3
_ROUNDS_WITH_DRAWS = 3  # mixup with a weight near 1, or of a row with itself, may hide one
_EXTREME_SEEDS = {
    -1: (1106, 1810, 590),
    -2: (155, 276, 1426),
}  # of torch, numpy and Python: the first two numbers are below 0.05, above 0.95
_CONSTANTS = (0.5, 0.01, 0.99)
_LARGE, _LARGER = 100.0, 1000.0  # in a loop of one's own, whose errors cannot be caught, what no model overflows on
LEAST_EXAMPLES = 4


def _accelerator() -> Any:
    """torch.cuda, torch.mps or another, if it is in use: it draws from a generator of its own. Otherwise None."""
    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    used = module is not None and getattr(module, "is_initialized", module.is_available)()
    return module if used else None


def seed_torch(seed: int) -> None:
    """The global generator of the CPU, and of the accelerator in use."""
    torch.default_generator.manual_seed(seed)
    if (module := _accelerator()) is not None:
        (module.manual_seed_all if hasattr(module, "manual_seed_all") else module.manual_seed)(seed)


def _torch_states() -> list[Tensor]:
    module = _accelerator()
    return [torch.get_rng_state(), *([] if module is None else [module.get_rng_state()])]


def _set_torch_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        _accelerator().set_rng_state(state)


class ConstantDraws(TorchDispatchMode):
    """Makes the usual random draws of torch constant, equal for all rows, and leaves its generator alone.

    `at`: where in 0 … 1 the uniform draws lie.
    """

    def __init__(self, at: float = 0.5) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "detach") and not isinstance(args[0], Tensor):
            return torch.tensor(args[0]) if name == "detach" else args[0]  # a number in the graph, without its tensor
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if name == "native_dropout":
            return func(args[0], 0.0, *args[2:])
        if name not in ("bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_", "rand", "randn",
                        "rand_like", "randn_like"):  # fmt: skip
            return func(*args, **kwargs)
        states = _torch_states()
        drawn: Tensor = func(*args, **kwargs)
        _set_torch_states(states)
        if name.startswith("bernoulli"):
            likely = args[1] if len(args) > 1 else kwargs.get("p", args[0] if name == "bernoulli" else 0.5)
            return drawn.copy_(torch.as_tensor(likely) >= self.at)
        low = args[1] if len(args) > 1 and name == "uniform_" else 0.0
        high = args[2] if len(args) > 2 and name == "uniform_" else 1.0
        return drawn.fill_(low + (high - low) * self.at)


def seed_global_generators(seed: int) -> None:
    """The same public seed for torch's, numpy's and Python's global generators; below 0: seeds of extreme draws."""
    of_torch, of_numpy, of_python = _EXTREME_SEEDS.get(seed, (seed, seed, seed))
    seed_torch(of_torch)
    np.random.seed(of_numpy)  # noqa: NPY002
    random.seed(of_python)


@contextmanager
def preserve_global_generators() -> Iterator[None]:
    """Leave the caller's global generators as they were."""
    states = _torch_states(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        _set_torch_states(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


class NotProbed(UserWarning):
    """Private steps are taken with an engine that nobody probed."""


class ProbeBatch(Batch):
    """A batch of a probe. It is never cut: `split` gives it whole."""

    def split(self, parts: int) -> Iterator[Batch]:
        yield self


_LOOKUPS, _REFERENCE, _BETWEEN, _AGAIN = "lookups", "reference", "between", "again"


@dataclass(frozen=True, kw_only=True)
class ProbeCase:
    """One batch of a probe.

    `what`    only to see what is looked up in tables of which size; a reference to compare with; the same again, after
              a batch that came between; else what was done to the others
    `places`  of the watched contributions: where they are in the reference, and where here
    """

    what: str
    batch: ProbeBatch
    places: Mapping[int, int]
    seed: int = 0
    constant: float | None = None  # under `ConstantDraws`
    extreme: bool = False  # of the round with small values of the watched and large ones of the others


MeasureOf = Callable[[Tensor | None, Batch, Sequence[int]], "list[Measured]"]


class Probe:
    """One probe of one model: `batches` hands out its batches, `receive` takes the losses of each.

    `measure`: loss and unclipped gradient of some contributions of a batch. `classes`: how many the plan has.
    `simulated`: only shapes and types of x and y are used, and the first batch shows how large the tables are that
    labels and ids are looked up in.
    """

    def __init__(
        self, model: nn.Module, classes: int, measure: MeasureOf, x: Any, y: Any = None, *, simulated: bool = False,
        joined: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.classes, self.measure, self.simulated, self._joined = (
            model,
            classes,
            measure,
            simulated,
            joined,
        )
        self.x, self.y = simulate(x, y, simulated_count(x, y)) if simulated else (x, y)
        self.n = Batch(self.x, self.y).examples
        if self.n < LEAST_EXAMPLES:
            problem = f"the probe got {self.n} examples"
            raise EngineError("engine.probe-too-few-examples", problem, "give at least 4, public or simulated")
        self.watched = (0, self.n // 2, self.n - 1)
        self.complete = False
        self.waiting: ProbeCase | None = None  # handed out, and its losses are still to come
        self._generators = [g for m in model.modules() for g in _generators_of(m)]
        self._kept = kept_tensors(model)[0]
        self._states: list[Any] = []
        self._drawn = False  # whether the last case drew at random
        self._references: dict[tuple[int, float | None, bool], dict[int, Measured]] = {}
        self._large = _LARGE if simulated else 0.0  # 0: no values but those given

    def run(self, losses_of: Callable[[Any, Any], Tensor]) -> None:
        """The whole probe of a function that computes losses."""
        self._large = _LARGER
        for batch in self.batches():
            try:
                with torch.enable_grad():
                    losses = losses_of(batch.x, batch.y)
            except Exception:
                if self.waiting is None or not self.waiting.extreme:
                    raise
                self.waiting = None  # model or loss take no such values
                continue
            self.receive(losses, batch)

    def batches(self) -> Iterator[ProbeBatch]:
        """Each batch, with the generators as it is to be computed. Ends early if nobody handed its losses in."""
        own = [(g, g.get_state()) for g in self._generators]
        try:
            with preserve_global_generators():
                for case in self._cases():
                    self._seed(case.seed)
                    self.waiting = case
                    if case.what == _LOOKUPS:
                        with WatchLookups((case.batch.x, case.batch.y)) as watch:
                            yield case.batch
                        self.x, self.y = watch.simulate(self.x, self.y, self.n)
                    else:
                        with nullcontext() if case.constant is None else ConstantDraws(case.constant):
                            yield case.batch
                    if self.waiting is not None:
                        return
            self.complete = True
        finally:
            self.waiting = None
            for generator, state in own:
                generator.set_state(state)

    def _cases(self) -> Iterator[ProbeCase]:
        if self.simulated:
            yield ProbeCase(what=_LOOKUPS, batch=self._batch(self.x, self.y), places={})
        reference = self._case(_REFERENCE, torch.arange(self.n))
        yield reference
        drawn = self._drawn
        yield replace(self._with_others_replaced(0), what=_BETWEEN)
        yield replace(reference, what=_AGAIN, batch=self._batch(self.x, self.y))
        if self._joined:
            yield self._with_others_joined(self.watched[1])
        for seed in (*range(_ROUNDS_WITH_DRAWS), *_EXTREME_SEEDS) if drawn else (0,):
            if seed:
                yield replace(reference, seed=seed, batch=self._batch(self.x, self.y))
            for place in self.watched:
                yield replace(self._with_others_replaced(place), seed=seed)
        if self._large:
            yield from self._extreme_values()
        every = torch.arange(self.n)
        for at in _CONSTANTS if drawn else (None,):
            if at is not None:
                yield replace(reference, constant=at, batch=self._batch(self.x, self.y))
                if self._drawn:
                    return
                if (0, at, False) not in self._references:
                    continue
            for what, rows in (("put in another order", every.flip(0)), ("moved to its other side", every.roll(-1))):
                yield replace(self._case(what, rows), constant=at)
            for place in self.watched:
                rest = every[every != place]
                yield replace(self._case("fewer", torch.cat([rest[: self.n // 2 - 1], every[[place]]])), constant=at)

    def _extreme_values(self) -> Iterator[ProbeCase]:
        """Inputs of the watched within 0 … 1 and targets 0 or 1; those of the others large, and the other target."""

        def small(t: Any) -> Any:
            return t.sigmoid() if isinstance(t, Tensor) and t.is_floating_point() else t

        def zero_or_one(t: Any) -> Any:
            inside = isinstance(t, Tensor) and t.is_floating_point() and bool(((t >= 0) & (t <= 1)).all())
            alternate = (torch.arange(self.n) + 1) % 2
            return alternate.view(-1, *[1] * (t.dim() - 1)).expand(t.shape).to(t) if inside else t

        x, y = pytree.tree_map(small, self.x), pytree.tree_map(zero_or_one, self.y)
        places = {place: place for place in self.watched}
        yield ProbeCase(what=_REFERENCE, batch=self._batch(x, y), places=places, extreme=True)
        if (0, None, True) not in self._references:
            return
        for place in self.watched:
            others = torch.arange(self.n) != place

            def scaled(t: Any, by: float, others: Tensor = others) -> Any:
                t = t.clone() if isinstance(t, Tensor) else t
                if isinstance(t, Tensor) and t.is_floating_point():
                    t[others] = t[others] * by if by else 1 - t[others]
                return t

            for by in (self._large, torch.nan) if self._large == _LARGER else (self._large,):
                there = pytree.tree_map(lambda t, by=by: scaled(t, by), x), pytree.tree_map(lambda t: scaled(t, 0.0), y)
                what = "not finite" if by != by else f"{by:g} times as large"
                yield ProbeCase(what=what, batch=self._batch(*there), places={place: place}, extreme=True)

    def _with_others_joined(self, place: int) -> ProbeCase:
        """The others as one contribution, of the plan's last class."""
        batch, unit = self._batch(self.x, self.y), (torch.arange(self.n) != place).long()
        classes = torch.tensor([0, self.classes - 1])
        joined = replace(batch, unit=unit, cls=classes, weight=None, places=None)
        return ProbeCase(what="joined into one contribution", batch=joined, places={place: 0})

    def _batch(self, x: Any, y: Any) -> ProbeBatch:
        """A copy, because a loss may write to its input."""
        x, y = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (x, y))
        return ProbeBatch(x, y, cls=torch.zeros(Batch(x, y).examples, dtype=torch.long))

    def _case(self, what: str, rows: Tensor) -> ProbeCase:
        there = {row: place for place, row in enumerate(rows.tolist())}
        places = {place: there[place] for place in self.watched if place in there}
        return ProbeCase(what=what, batch=self._batch(*take_rows((self.x, self.y), rows)), places=places)

    def _with_others_replaced(self, place: int) -> ProbeCase:
        def replaced(t: Any) -> Any:
            return _replace_others(t, place) if isinstance(t, Tensor) else t

        batch = self._batch(*pytree.tree_map(replaced, (self.x, self.y)))
        return ProbeCase(what="replaced", batch=batch, places={place: place})

    def _seed(self, seed: int) -> None:
        seed_global_generators(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        self._states = self._generator_states()

    def _generator_states(self) -> list[Any]:
        name, keys, *rest = np.random.get_state()  # noqa: NPY002
        states = [t.numpy().tobytes() for t in (*_torch_states(), *(g.get_state() for g in self._generators))]
        return [*states, name, np.asarray(keys).tobytes(), rest, random.getstate()]

    def receive(self, losses: Tensor | None, batch: Batch) -> None:
        """Compare what was computed for the batch that is waiting; `batch` may be one that was made from it."""
        case, self.waiting = self.waiting, None
        assert case is not None
        self._drawn = self._generator_states() != self._states
        if len(batch) != len(case.batch):
            problem = f"the probe gave {len(case.batch)} contributions, and {len(batch)} came back"
            remedy = "keep the contributions of a batch, or leave the probe out: corpus.batches(plan, probe=False)"
            raise EngineError("engine.probe-batch-changed", problem, remedy)
        if case.what == _LOOKUPS:
            return
        measured = self.measure(losses, batch, list(case.places.values()))
        found = dict(zip(case.places, measured, strict=True))
        if case.what == _REFERENCE:
            finite = all(bool(torch.isfinite(t).all()) for measured in found.values() for t in measured.values())
            if finite:
                self._references[case.seed, case.constant, case.extreme] = found
            elif case.constant is None and not case.extreme:
                raise _not_finite_error()
        elif case.what != _BETWEEN:
            self._compare(case, found)

    def _compare(self, case: ProbeCase, found: dict[int, Measured]) -> None:
        reference = self._references[case.seed, case.constant, case.extreme]
        for place, measured in found.items():
            moved = _movement(reference[place], measured)
            if moved is None:
                continue
            if case.what == _AGAIN:
                raise self._not_repeatable(moved)
            problem = f"when the other examples were {case.what}, {moved}"
            remedy = "use no batch statistics, no loss over or divided by the batch, no padding without a mask"
            raise CouplingError("engine.probe-found-coupling", problem, remedy)

    def _not_repeatable(self, moved: str) -> CouplingError:
        now = kept_tensors(self.model)[0]
        names = [name for name, written in now.items() if self._kept.get(name) != written]
        what = f"{', '.join(map(repr, names[:3]))} may keep" if names else "model or loss keep"
        problem = f"of the same batch, computed again after another one, {moved}: {what} data of one batch for the next"
        remedy = (
            "keep nothing between batches; draw at random from torch's global generator or one that a module holds, "
            "not from another"
        )
        return CouplingError("engine.probe-not-repeatable", problem, remedy)


def losses_of_outputs(outputs: Any, n: int) -> Tensor:
    """Return one loss for each of n examples that depends on every result whose first axis counts examples."""
    tensors = (t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad and t.dim())
    rows = [t.reshape(n, -1) for t in tensors if len(t) == n]
    if not rows:
        problem = "no result of the model has the examples as its first axis"
        remedy = "call engine.probe(losses_of, x, y) with public data"
        raise EngineError("engine.probe-without-results", problem, remedy)
    return torch.stack([(t + t.square()).mean(1) for t in rows]).sum(0)


@contextmanager
def preserve_schedules(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Leave the learning rate schedules of optimisers that hold these tensors as they were."""
    kinds = (o for o in gc.get_objects() if issubclass(type(o), LRScheduler))
    mine = [s for s in kinds if tensors_of_optimizer(s.optimizer, tensors)]
    before = [{k: copy.copy(v) if isinstance(v, list | dict) else v for k, v in vars(s).items()} for s in mine]
    groups = [(g, {k: v for k, v in g.items() if k != "params"}) for s in mine for g in s.optimizer.param_groups]
    try:
        yield
    finally:
        for scheduler, state in zip(mine, before, strict=True):
            vars(scheduler).update(state)
        for group, options in groups:
            group.update(options)


def _generators_of(module: nn.Module) -> list[torch.Generator]:
    """Return the generators that a module holds in plain attributes."""
    held = [value for name, value in vars(module).items() if not name.startswith("_")]
    return [g for value in held for g in pytree.tree_leaves(value) if isinstance(g, torch.Generator)]


def _movement(reference: Measured, other: Measured) -> str | None:
    """What moved, and by how much, if anything did.

    A gradient that is 0 but for rounding (of a bias before a softmax) is measured by what the others round to.
    """
    rounding = 1e-6 + 1e-4 * max(float(t.double().norm()) for t in reference.values())
    for name, a in reference.items():
        moved = float((a.double() - other[name].double()).norm()) / (float(a.double().norm()) + rounding)
        if not moved <= _TOLERANCE:
            thing = "loss" if name == "loss" else f"gradient of {name!r}"
            return f"the {thing} of one moved by {moved:.2g} of its size"
    return None


def _not_finite_error() -> EngineError:
    problem = "a loss or gradient of the probe's input is not finite, so nothing can be compared"
    remedy = "probe with public data that the model is made for: engine.probe(losses_of, x, y), or probe=(x, y)"
    return EngineError("engine.probe-not-finite", problem, remedy)


def _replace_others(t: Tensor, place: int) -> Tensor:
    """One example as it is, the others replaced by values of the same kind."""
    other = t.roll(1, 0)  # of whole numbers, one of the others is then gone, and that of the place is there twice
    if t.is_floating_point():
        inside = bool(((t >= 0) & (t <= 1)).all())
        other = other.square() * 0.9 + 0.05 if inside else other * 1.7 + 0.3
    other[place] = t[place]
    return other


class Probing(Guard):
    """Whether an engine was probed, and its probes."""

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, Tensor], classes: int, measure: MeasureOf,
        attachment: Attachment, outside: OutsideWrites, *, sharded: bool,
    ) -> None:  # fmt: skip
        self.model, self.tensors, self.classes, self.measure = model, tensors, classes, measure
        self.attachment, self.outside, self.sharded = attachment, outside, sharded
        self.done = self.declined = False
        self.running: Probe | None = None

    def accept(self) -> None:
        """The model was probed with its present hooks."""
        self.done = True
        self.attachment.accept_hooks()

    def run(self, losses_of: Callable[[Any, Any], Tensor], x: Any, y: Any) -> None:
        """The whole probe of a function that computes losses."""
        self.outside.probing = True
        try:
            Probe(self.model, self.classes, self.measure, x, y).run(losses_of)
        finally:
            self.outside.probing = False
        self.accept()

    def batches(self, x: Any, y: Any = None, *, simulated: bool = False, joined: bool = False) -> Iterator[Batch]:
        """The batches of a probe, for a loop of one's own that computes their losses and hands them to `backward`.

        Buffers, generators and learning rate schedules are left as they were. `simulated`: of x and y only shapes and
        types are used, and values are made up. `joined`: contributions may have several examples.
        """
        self.running = probe = Probe(self.model, self.classes, self.measure, x, y, simulated=simulated, joined=joined)
        self.outside.probing = True
        try:
            with preserve_schedules(self.tensors):
                yield from probe.batches()
            if probe.complete:
                self.accept()
        finally:
            self.running, self.outside.probing = None, False

    @property
    def waiting(self) -> bool:
        """Whether losses of a probe are to come next."""
        return self.running is not None and self.running.waiting is not None

    def expects(self, batch: Batch) -> bool:
        """Whether a batch may be of a probe."""
        return self.running is not None or isinstance(batch, ProbeBatch)

    def takes(self, losses: Tensor | None, batch: Batch) -> bool:
        """Compare what was computed of a probe's batch; False for any other batch."""
        if self.running is None or self.running.waiting is None:
            return isinstance(batch, ProbeBatch)  # of another engine with the same plan
        self.running.receive(losses, batch)
        return True

    def before_step(self, moment: Moment) -> None:
        """Warn if the model is not probed; probe it again if it has new hooks."""
        if not (self.done or self.declined) and moment.private:
            self.declined = True
            warnings.warn(
                "this engine was not probed: its ε holds only if examples do not influence each other in what the losses "
                "are computed from. Use corpus.batches(plan), or engine.probe(losses_of, x, y) with public data",
                NotProbed,
                stacklevel=4,
            )
        if self.done and self.attachment.call_with_new_hooks is not None and (at := self.attachment.new_hooks()):
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
            with self.attachment.aside():
                x, _ = simulate_for(losses_of, self.attachment.call_with_new_hooks, None)
                Probe(self.model, self.classes, self.measure, x).run(losses_of)
        except CouplingError as found:
            remedy = f"remove the hook, or: {found.remedy}"
            raise CouplingError(found.code, f"{problem}: {found.problem}", remedy) from None
        except Exception as error:
            problem += f", and the model cannot be probed again on simulated input: {type(error).__name__}"
            remedy = (
                "call engine.probe(losses_of, x, y) with public examples after registering it, or register it earlier"
            )
            raise EngineError("engine.hook-not-probed", problem, remedy) from None
        self.attachment.accept_hooks()
