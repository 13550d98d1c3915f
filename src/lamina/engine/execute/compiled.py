"""`CompiledExecutor`: takes the steps that can be one compiled graph, and says why others cannot."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina.engine.attach import CopySafeHook
from lamina.engine.batch import Batch
from lamina.engine.execute.clip import safe_bounds
from lamina.engine.execute.clipping import Clipper
from lamina.engine.execute.eager import EagerExecutor, Work
from lamina.engine.execute.step_graph import LossesOf, NotTraceable, Trace, running, trace_step
from lamina.engine.execute.sums import Sums
from lamina.engine.guards.checked_batch import check_classes
from lamina.engine.guards.state import StateGuard
from lamina.engine.noise.mechanism import sum_dtype
from lamina.errors import EngineError
from lamina.plan.rules import FollowQuantile, NoiseKind
from lamina.plan.step_plan import Clipping, StepPlan

HOOK_STEPS_FIRST = 2  # of every computation, with all checks of the hook engine
COMPARE_EVERY = 128  # as often as the ownership check comes again
MOST_GRAPHS, MOST_COMPUTATIONS = 4, 16
MOST_CONTRIBUTIONS = 512  # as WIDE_UNITS of native/product.c: see `SUM_BLOCK` of grads.py
BACKEND = "inductor"
_TOLERANCE = 1e-4  # between the sums of the hook engine and of the graph as it was traced, of their size
_COMPILED_TOLERANCE = 5e-3  # and of the graph as it was compiled: an input of ReLU may round to the other side of 0
Seal = Callable[[bytes], bytes]  # what only the holder of a key makes of a digest, always the same


class NotCompiled(UserWarning):
    """`compiled=True` was asked for, and the hook engine takes the step."""


def unsupported_plan(plan: StepPlan) -> str:
    """Why no step of a plan can be compiled, or ''."""
    if plan.clipping is Clipping.ELEMENTWISE:
        return "the plan clips every element by itself"
    if plan.slices:
        return "the plan has slices: classes that may move a part of a tensor"
    if plan.rule(FollowQuantile) is not None:
        return "the plan counts how many contributions are clipped"
    if plan.noise_kind is not NoiseKind.GAUSSIAN:
        return f"the plan has {plan.noise_kind.value} noise, whose sums are whole numbers"
    return ""


@dataclass
class StepGraph:
    """A traced step, and what the compiler made of it."""

    traced: Trace
    call: Callable[..., Sequence[Tensor]]
    steps: int = 0
    compared: int | None = None  # the step when its sums were last held to those of the hook engine

    @property
    def compare_now(self) -> bool:
        return self.compared is None or self.steps - self.compared >= COMPARE_EVERY

    def run(
        self, leaves: Sequence[Tensor], bounds: Tensor, radius: Tensor, *, traced: bool = False
    ) -> Sequence[Tensor]:
        """Losses, `sound` and sums. `traced`: not compiled, so that it rounds as the hook engine does."""
        self.steps += not traced
        inputs = [t.detach() for t in (*leaves, bounds, radius, *self.traced.constants)]
        with torch.no_grad(), running(self.traced.calls):
            return (self.traced.module if traced else self.call)(*inputs)


def compile_trace(trace: Trace, folder: Path | None) -> Callable[..., Sequence[Tensor]]:
    """Compile a traced step. With a folder, compiled code is kept there and is not compiled again."""
    if BACKEND == "eager":
        return trace.module
    from torch._inductor import config, standalone_compile
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    given = [node.meta["val"] for node in trace.module.graph.nodes if node.op == "placeholder"]
    place = _unshared_cache() if folder is None else str(folder)
    kept = nullcontext() if place is None else temporary_cache_dir(place)
    with torch.no_grad(), running(trace.calls), config.patch(fallback_random=True), kept, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler says is not about the user's code
        made: Callable[..., Sequence[Tensor]] = standalone_compile(trace.module, given, dynamic_shapes="from_graph")
        return made


@cache
def _unshared_cache() -> str | None:
    """Return a folder of this process in place of torch's own cache, if others can write to that; None otherwise.

    Its name in the folder for temporary files is known, so another user may have made it, with code in it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    path = Path(default_cache_dir()).absolute()
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(path)) != str(
        path
    ):  # chosen by the user; torch itself sets it, too
        return None
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return None
    _PLACES.append(made := tempfile.TemporaryDirectory(prefix="lamina-compiled-"))
    return made.name


_PLACES: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@cache
def compiler_version() -> str:
    """Return what compiled sums depend on beside the graph: torch's compiler, its settings, and the C++ compiler."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[
            0
        ]
    except Exception as error:  # of torch's own kind, or the operating system's
        problem = f"compiled steps need a C++ compiler, and none works here ({_why(error)})"
        raise EngineError("engine.no-compiler", problem, "install g++, or leave compiled out") from None
    settings = hashlib.sha256(repr(config.get_config_copy()).encode()).hexdigest()[:16]
    return f"inductor of torch {torch.__version__}, settings {settings}, {said}"


def code_digest(folder: Path) -> bytes:
    """SHA-256 over names and contents of all files of compiled code in a folder.

    b'' if there is none, or if others could exchange what was read here: the folder or a file in it is somebody else's, the
    folder is open to others, or something in it is a link or cannot be listed.
    """
    try:
        found = sorted(_own_files(folder))
    except OSError:
        return b""
    total = hashlib.sha256()
    for path in found:
        total.update(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n".encode())
    return total.digest() if found else b""


def _own_files(folder: Path) -> Iterator[Path]:
    """Yield all files in a folder that only this user may enter; raise OSError where `code_digest` says b''."""
    waiting = [folder]
    if folder.lstat().st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others")
    while waiting:
        path = waiting.pop()
        found = path.lstat()
        if found.st_uid != os.geteuid() or not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
            raise PermissionError(f"{path} is a link, or not a file of this user")
        if stat.S_ISDIR(found.st_mode):
            waiting += path.iterdir()
        else:
            yield path


class CompiledExecutor:
    """Which steps of an engine are a graph, and why others are not.

    The eager executor takes the first steps of every computation with all its checks, and every 128th, when the graph's
    sums are held to its own. `reason` says why there is no graph, or was none for the last batch; '' if there was one.

    In a loop of one's own, graphs are made when batches come that need them. A run makes them before its first step
    (`compile_ahead`), and none after: which executor takes a step then follows from the seed and the data of its
    segment alone, so that a segment can be replayed bit for bit.
    """

    def __init__(self, model: nn.Module, plan: StepPlan, eager: EagerExecutor, state: StateGuard) -> None:
        self.model, self.plan, self.eager, self.state = model, plan, eager, state
        self.tensors = eager.tensors
        self.steps = 0  # taken by a graph
        self.graphs: list[tuple[Any, StepGraph]] = []
        self.reason, self._off, self._said = "", "", set[str]()
        self.complete = False  # no further graph is made
        self.code = b""  # the seal of the compiled code that a run keeps
        self._digest = b""  # of the code that was compiled here
        self._seal: Seal | None = None
        self._restored = False  # whether the run gave compiling up earlier
        self.replaced = False  # whether the folder held other code than that
        self._hook_steps: Counter[Any] = Counter()
        if problem := unsupported_plan(plan):
            self.give_up(problem)
        elif not all(p.is_cpu for p in self.tensors.values()):
            self.give_up("the model is not on the CPU")

    # Before the first step of a run

    def compile_ahead(self, losses_of: LossesOf, batch: Batch, sizes: Iterable[int], folder: Path | None) -> str:
        """Make the graphs for batches of these shapes and sizes, and no more. Returns why there is none, or ''.

        Of the batch only shapes and types are used. Code in the folder is used again if `code` is the seal of its digest.
        """
        self.complete = True
        if self._restored:
            return ""
        if not self._off:
            if folder is not None:
                self._remove_other_code(folder)
            key = self._key(losses_of, batch)
            for size in sizes:
                if not self._off and not self._fitting(key, size):
                    self._trace(key, losses_of, batch, size, folder)
            if folder is not None and self.graphs:
                self._digest = code_digest(folder)
                self.seal_with(self._seal)
        return self._off

    def seal_with(self, seal: Seal | None) -> None:
        """Vouch for the code that was compiled here, and ask for this seal of what was compiled before.

        Without a seal no code is used again: who can write to the folder may write to the checkpoint, too.
        """
        self._seal = seal
        if self._digest:
            self.code = b"" if seal is None else seal(self._digest)

    def _remove_other_code(self, folder: Path) -> None:
        """Remove code that no seal vouches for, links too: it is compiled anew, and never run."""
        if self.code and self._seal is not None and (digest := code_digest(folder)) and self._seal(digest) == self.code:
            return
        if os.path.lexists(folder):
            self.replaced = bool(self.code)
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
            else:
                folder.unlink()
        folder.mkdir(mode=0o700, parents=True)

    def begin_segment(self) -> None:
        """Count from 0, as every process that takes these steps does."""
        self._hook_steps.clear()
        for _, graph in self.graphs:
            graph.steps, graph.compared = 0, None

    def to_state(self) -> dict[str, Any]:
        """For a training checkpoint: the seal of the code that was compiled, and why it was given up, if it was."""
        return {"code": self.code, "given_up": self._off}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.code, self._off = state["code"], state["given_up"]
        self.reason, self._restored = self._off, bool(self._off)

    # A step

    def prepare(self, losses_of: LossesOf, batch: Batch, clipper: Clipper) -> tuple[Work, Tensor] | None:
        """What a part of a batch adds to a step, and its losses; None where the eager executor must compute them."""
        if len(batch) == 0:
            return None
        eager, classes = self.eager, check_classes(batch, self.plan)
        reached = clipper.reached(classes) == eager.trained or eager.constant_time
        graph = self.graph_for(losses_of, batch, all_reached=reached)
        if graph is None:
            return None
        eager.check()
        self.state.begin_call()
        ready = self.sums(graph, batch, clipper)
        self.state.check_trained()
        if ready is None:
            return None
        made, losses = ready
        if graph.compare_now:
            losses = losses_of(batch.x, batch.y)
            part, own = eager.examine(losses, batch, again=True), Sums(self.tensors)
            assert part is not None
            eager.add(part, clipper, own)
            self.compare(graph, made, own.whole())
            made = own
        return Work(classes, lambda _, sums, last: sums.adopt(_with_own_storage(made, self.tensors))), losses.detach()

    def give_up(self, reason: str) -> None:
        """No step will be compiled from here on."""
        self._off = reason
        self._say(reason)

    def _say(self, reason: str) -> None:
        self.reason = reason
        if reason not in self._said and not self.complete:  # in a run, it would tell who was sampled
            self._said.add(reason)
            warnings.warn(f"the hook engine takes this step, it is not compiled: {reason}", NotCompiled, stacklevel=4)

    def graph_for(self, losses_of: LossesOf, batch: Batch, *, all_reached: bool) -> StepGraph | None:
        """The graph of a step on this batch, traced if need be; None where the hook engine takes it."""
        if self._off:
            return None
        key = self._key(losses_of, batch)
        self._hook_steps[key] += 1
        if len(self._hook_steps) > MOST_COMPUTATIONS:
            self.give_up(f"{MOST_COMPUTATIONS} kinds of batch or losses came: give step the same function and shapes")
            return None
        if self._hook_steps[key] <= HOOK_STEPS_FIRST or batch.examples < 2:
            return None
        problem = self._unsupported_batch(batch, [m for m, _ in key[3]], all_reached=all_reached)
        if problem:
            self._say(problem)
            return None
        graph = self._fitting(key, batch.examples)
        if graph is None and self.complete:
            self._say("its shapes or size are not those that were compiled before the first step")
            return None
        graph = graph or self._trace(key, losses_of, batch, batch.examples, None)
        self.reason = "" if graph is not None else self.reason
        return graph

    def _fitting(self, key: Any, size: int) -> StepGraph | None:
        return next((graph for known, graph in self.graphs if known == key and graph.traced.fits(size)), None)

    def _trace(
        self, key: Any, losses_of: LossesOf, batch: Batch, size: int, folder: Path | None
    ) -> StepGraph | None:  # fmt: skip
        if len(self.graphs) >= MOST_GRAPHS:
            self.give_up(f"{MOST_GRAPHS} graphs were made already: give step the same function and shapes")
            return None
        try:
            with torch.random.fork_rng(devices=[]):
                trace = trace_step(
                    losses_of, batch, self.eager.attachment, self.eager.names, self.tensors, len(self.plan.layers),
                    joint=self.plan.clipping is Clipping.JOINT, count=size,
                )  # fmt: skip
                graph = StepGraph(trace, compile_trace(trace, folder))
        except Exception as error:  # whatever a trace cannot follow, or the compiler cannot do
            self.give_up(_why(error))
            return None
        self.graphs.append((key, graph))
        return graph

    def _key(self, losses_of: LossesOf, batch: Batch) -> Any:
        """What a graph holds fixed. Functions and modules are kept, so that none is taken for another."""
        leaves, spec = pytree.tree_flatten((batch.x, batch.y))
        shapes = tuple((t.shape[1:], t.dtype) if isinstance(t, Tensor) else None for t in leaves)
        modules = tuple((m, m.training) for m in _modules_of(self.model))
        return losses_of, spec, shapes, modules, torch.get_default_dtype()

    def _unsupported_batch(self, batch: Batch, modules: Sequence[nn.Module], *, all_reached: bool) -> str:
        assert batch.unit is not None and batch.weight is not None
        if len(batch) != batch.examples or not torch.equal(batch.unit, torch.arange(len(batch))):
            return "a contribution has several examples"
        if not bool((batch.weight > 0).all()):
            return "the batch has padding"
        if len(batch) > MOST_CONTRIBUTIONS:
            return f"more than {MOST_CONTRIBUTIONS} contributions are added up in float64"
        if not all_reached:
            return "nobody in the batch reaches some layer, so that the backward pass is cut short"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        for module in modules:
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            if not all(isinstance(hook, CopySafeHook) for hook in hooks):
                name = next(name for name, found in self.model.named_modules() if found is module)
                return f"module '{name}' has a hook of its own"
        return ""

    def sums(self, graph: StepGraph, batch: Batch, clipper: Clipper) -> tuple[dict[str, Tensor], Tensor] | None:
        """Clipped sums and the losses; None where the hook engine must look at the numbers, or cannot.

        What is to be compared is held to the graph as it was traced here, and to the hook engine by `compare`.
        """
        leaves = [t.contiguous() for t in pytree.tree_leaves((batch.x, batch.y)) if t is not None]
        bounds, radius = clipper.limits(batch)
        if self.plan.clipping is Clipping.JOINT:
            noise = torch.tensor([s or 1.0 for s in clipper.plan.noise], dtype=torch.float64)
            bounds = torch.where(bounds > 0, noise.square().reciprocal(), 0.0).t().contiguous()
            radius = safe_bounds(radius)
        else:
            bounds = safe_bounds(bounds).t().contiguous()
        state = torch.get_rng_state() if graph.traced.draws else None
        given, names = (leaves, bounds, radius), graph.traced.names
        try:
            losses, sound, *sums = graph.run(*given)
            if graph.compare_now and bool(sound) and graph.call is not graph.traced.module:
                if state is not None:
                    torch.set_rng_state(state)
                made, (losses, sound, *sums) = sums, graph.run(*given, traced=True)
                self._hold(names, made, sums, _COMPILED_TOLERANCE, "the compiler made something else of it")
        except Exception as error:  # what the compiler cannot do shows at the first call
            self.give_up(_why(error))
            sound = torch.zeros((), dtype=torch.bool)
        if state is not None and (graph.compare_now or not bool(sound)):
            torch.set_rng_state(state)  # the hook engine draws the same
        if not bool(sound):
            return None
        self.steps += not graph.compare_now
        found = dict(zip(names, sums, strict=True))
        return {name: found[name] for name in self.tensors if name in found}, losses

    def __repr__(self) -> str:
        return f"{self.steps} steps compiled{f', the last not: {self.reason}' if self.reason else ''}"

    def compare(self, graph: StepGraph, made: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Give up if the graph's sums are not those of the hook engine."""
        graph.compared = graph.steps
        here = [made.get(name, torch.zeros_like(t)) for name, t in own.items()]
        self._hold([*own], here, [*own.values()], _TOLERANCE, "model or losses are not what was traced")

    def _hold(self, names: Sequence[str], made: Sequence[Tensor], own: Sequence[Tensor], most: float, why: str) -> None:
        """Give up if sums are not what they should be."""
        whole = sum(float(t.double().square().sum()) for t in own) ** 0.5
        for name, here, t in zip(names, made, own, strict=True):
            off = float((t.double() - here.double()).norm())
            if not off <= most * (float(t.double().norm()) + 0.01 * whole):
                self.give_up(f"the graph's sum of '{name}' is {off:.2g} off: {why}")
                return


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()`, which takes ten times as long; in another order."""
    found, waiting = dict[int, nn.Module](), [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [m for m in module._modules.values() if m is not None]
    return list(found.values())


def _why(error: Exception) -> str:
    """The first line of what stood in the way."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first if isinstance(error, NotTraceable) else f"{type(error).__name__}: {first}"[:300]


def _with_own_storage(sums: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each sum in its own type, in memory that nothing else uses: noise is added to it in place."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, t in sums.items():
        own = t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes and t.data_ptr() not in seen
        kept = t if own else t.clone(memory_format=torch.contiguous_format)
        found[name] = kept.to(sum_dtype(tensors[name].dtype))
        seen.add(t.data_ptr())
    return found
