"""Whether a plan covers a model, modules that break a private step, and `fix`, which repairs them."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize, remove_spectral_norm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lamina.errors import CoverageError, PlanError
from lamina.plan.layer_stack import ModelTensors, call_arguments, refuse_lazy_tensors
from lamina.plan.selection import ROOT, complement_ranges
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import index_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What becomes of every tensor of a model under a plan.

    covered      noised at every step, and clipped in every private class that reaches it
    public_only  trained without noise, by public classes alone
    unreached    trainable, but no class reaches it: gets no gradient and stays as it is
    closed       likewise, of a tensor that is reached elsewhere: 'block.out.weight[:, 8:16]'
    frozen       not trainable
    buffers      not trained; checked for modules that write them
    """

    covered: tuple[str, ...]
    public_only: tuple[str, ...]
    unreached: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    closed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = f" and parts of {len(self.closed)}" if self.closed else ""
        return (
            f"{len(self.covered)} tensors clipped and noised, {len(self.public_only)} trained by public "
            f"classes only, {len(self.unreached)}{parts} not reached, {len(self.frozen)} frozen, "
            f"{len(self.buffers)} buffers"
        )


def check_coverage(model: nn.Module, plan: StepPlan, example: Any = None) -> Coverage:
    """Compare model and plan; refuse, naming the tensor or module, if anything would train unaccounted.

    With `example`, a public or made-up input, one forward pass also shows buffers that no list of modules
    names; model and random state are left as they were.
    """
    tensors, again = ModelTensors.of(model), "make stack and plan again from this model"
    planned = {name for layer in plan.layers for name in layer.parameters}
    for name in tensors.trainable:
        if name not in planned:
            problem = f"tensor {name!r} is trainable, but in no layer of the plan: it would train without noise"
            raise CoverageError("plan.tensor-not-in-plan", problem, f"freeze it with requires_grad_(False), or {again}")
    for name in sorted(planned):
        if name in tensors.frozen:
            problem = f"the plan trains tensor {name!r}, which is frozen"
            raise CoverageError("plan.tensor-frozen", problem, f"make it trainable, or {again}")
        if name not in tensors.sizes:
            problem = f"tensor {name!r} of the plan is not in the model"
            raise CoverageError("plan.tensor-missing", problem, f"{again} (a tensor tied later goes by its first name)")
    for layer in plan.layers:
        size = sum(tensors.sizes[name] for name in layer.parameters)
        if size != layer.size:
            problem = f"layer {layer.name!r} has {size} parameters in the model and {layer.size} in the plan"
            raise CoverageError("plan.layer-size-differs", problem, again)
    for part in plan.slices:
        shape = tuple(model.get_parameter(part.tensor).shape) or (1,)
        if part.axis >= len(shape) or shape[part.axis] != part.length:
            problem = f"the plan slices {part.tensor!r} along axis {part.axis} of {part.length}, its shape is {shape}"
            raise CoverageError("plan.slice-shape-differs", problem, again)
    for hazard in find_hazards(model):
        raise CoverageError("plan.module-unsafe", str(hazard), hazard.remedy)
    if example is not None:
        _check_buffers_unwritten(model, example)
    return _classify_tensors(model, plan, tensors)


def _check_buffers_unwritten(model: nn.Module, example: Any) -> None:
    """Refuse a buffer that a forward pass, in the modes that the modules are in, writes to."""
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    args, kwargs = call_arguments(example)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(*args, **kwargs)
        after = dict(model.named_buffers())
        moved = [name for name, (_, value) in before.items() if not _buffer_unchanged(after.get(name), value)]
        for buffer, value in before.values():
            buffer.copy_(value)
    if moved:
        problem = f"the forward pass writes buffer {moved[0]!r}: private data would move it without noise"
        remedy = f"replace its module, or call model.get_submodule({moved[0].rpartition('.')[0]!r}).eval()"
        raise CoverageError("plan.buffer-written", problem, remedy)


def _buffer_unchanged(now: torch.Tensor | None, then: torch.Tensor) -> bool:
    return now is not None and now.shape == then.shape and torch.equal(now.nan_to_num(), then.nan_to_num())


def _classify_tensors(model: nn.Module, plan: StepPlan, tensors: ModelTensors) -> Coverage:
    found: dict[str, list[str]] = {"covered": [], "public_only": [], "unreached": []}
    closed: list[str] = []
    for i, layer in enumerate(plan.layers):
        public = "public_only" if any(row[i] > 0 for row in plan.clip) else "unreached"
        fate = "covered" if plan.noise[i] > 0 else public
        for name in layer.parameters:
            opened = plan.open_ranges(name) if fate != "unreached" else None
            found["unreached" if opened is not None and not opened[1] else fate].append(name)
            if opened is not None and opened[1]:
                length = next(part.length for part in plan.slices if part.tensor == name)
                closed.append(f"{name}{index_text(opened[0], complement_ranges(opened[1], length))}")
    return Coverage(
        **{fate: tuple(names) for fate, names in found.items()},
        frozen=tensors.frozen,
        buffers=tuple(name for name, _ in model.named_buffers()),
        closed=tuple(closed),
    )


# Modules that break a private step whatever the plan says: each with its reason, and its remedy.
#
# Clipping bounds what a contribution adds to the gradient. It bounds nothing if a module mixes contributions
# in its forward pass, or writes to buffers or weights by another way than the optimiser's step.


class HazardKind(enum.Enum):
    """What goes wrong."""

    BATCH_STATISTICS = "normalises each contribution by the others"
    RUNNING_STATISTICS = "moves its buffers with private data"
    RENORMALISES = "rewrites its weight in the forward pass, by the rows that were looked up"
    COUNTS_BATCH = "scales gradients by how often the batch holds a row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """One module that breaks the step: where, what it is, why, and what to do."""

    module: str
    kind: str
    what: HazardKind
    state: str
    remedy: str

    def __str__(self) -> str:
        return f"module {self.module!r} is {self.kind} {self.state}, which {self.what.value}"


def find_hazards(model: nn.Module) -> Iterator[Hazard]:
    """Everything in the model, as it stands now, that breaks a private step."""
    for path, module in model.named_modules():
        if (found := _module_hazard(module)) is not None:
            what, state, remedy = found
            remedy = remedy.format(fix="use `model, report = lamina.fix(model)`", here=f"model.get_submodule({path!r})")
            yield Hazard(module=path or ROOT, kind=type(module).__name__, what=what, state=state, remedy=remedy)


def running_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that a module keeps as running statistics, and may write."""
    if "FrozenBatchNorm" in type(module).__name__ and not isinstance(module, _BatchNorm):
        return []  # of torchvision, timm and DETR: constants. The engine looks whether they stay so
    return [
        name
        for name, buffer in module.named_buffers(recurse=False)
        if buffer is not None and (name == "num_batches_tracked" or name.startswith("running_"))
    ]


def _module_hazard(module: nn.Module) -> tuple[HazardKind, str, str] | None:
    if isinstance(module, _BatchNorm):
        state = "in training mode" if module.training else "without running statistics"
        if module.training or module.running_mean is None:
            known = type(module) in _EXACT_BATCH_NORMS or _norm_with_activation(module)
            by_hand = "replace it by hand, by GroupNorm and whatever else it does (lamina.fix cannot know that)"
            return HazardKind.BATCH_STATISTICS, state, "{fix} or GroupNorm" if known else by_hand
    elif isinstance(module, _InstanceNorm):
        if module.training and running_buffers(module):
            state = "that tracks running statistics in training mode"
            return HazardKind.RUNNING_STATISTICS, state, "{fix}, or track_running_stats=False"
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return HazardKind.RENORMALISES, f"with max_norm={module.max_norm:g}", "{fix}, or max_norm=None"
        if module.scale_grad_by_freq:
            return HazardKind.COUNTS_BATCH, "with scale_grad_by_freq=True", "{fix}, or scale_grad_by_freq=False"
    elif module.training and (names := running_buffers(module)):
        remedy = "replace it by a module without running statistics; if it never writes them, call {here}.eval()"
        return HazardKind.RUNNING_STATISTICS, f"with buffers {', '.join(names)} in training mode", remedy
    return None


MAX_GROUPS, MIN_CHANNELS_PER_GROUP = 32, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleChange:
    """One module, and what was done to it, or why nothing could be."""

    module: str
    what: str

    def __str__(self) -> str:
        return f"{self.module}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FixReport:
    """What `fix` changed, and what it left for you."""

    changes: tuple[ModuleChange, ...] = ()
    left: tuple[ModuleChange, ...] = ()

    def __str__(self) -> str:
        lines = [f"changed  {change}" for change in self.changes] or ["nothing to change"]
        return "\n".join([*lines, *(f"left     {change}" for change in self.left)])


class Fixed(NamedTuple):
    """`model, report = lamina.fix(model)`."""

    model: nn.Module
    report: FixReport


def fix(model: nn.Module, *, inplace: bool = False) -> Fixed:
    """A model whose forward pass treats contributions one by one, and a report of what was changed.

    BatchNorm becomes GroupNorm (its weight and bias are kept, its running statistics are gone: outputs
    change, so train it further); InstanceNorm forgets its running statistics; Embedding loses max_norm,
    scale_grad_by_freq and sparse; spectral normalisation is removed at its present weight. Dropout and
    in-place activations are harmless and stay. Device, dtype, requires_grad and training mode are kept.

    The model is copied unless `inplace`. What cannot be repaired without guessing is in `report.left`.
    """
    refuse_lazy_tensors(model)
    fixed = model if inplace else _copy_model(model)
    changes: list[ModuleChange] = []
    left: list[ModuleChange] = []
    replaced: dict[int, nn.Module] = {}
    for path, module in list(fixed.named_modules(remove_duplicate=False)):
        name = path or ROOT
        if id(module) not in replaced:
            new, done, open_ = _repair(module)
            replaced[id(module)] = new
            changes.extend(ModuleChange(module=name, what=what) for what in done)
            left.extend(ModuleChange(module=name, what=what) for what in open_)
        new = replaced[id(module)]
        if new is module:
            continue
        if not path:
            fixed = new
        else:
            parent, _, child = path.rpartition(".")
            setattr(fixed.get_submodule(parent), child, new)
    return Fixed(fixed, FixReport(changes=tuple(changes), left=tuple(left)))


def _copy_model(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        problem = f"the model cannot be copied: {error}"
        raise PlanError("plan.model-not-copyable", problem, "use lamina.fix(model, inplace=True)") from error


_Repair = tuple[nn.Module, list[str], list[str]]


def _repair(module: nn.Module) -> _Repair:
    """The module to put in its place (itself, if changed or left as it is), what was done, what is left."""
    if isinstance(module, _BatchNorm):
        return _fix_batch_norm(module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module, _fix_embedding(module), []
    kind, names = type(module).__name__, running_buffers(module)
    if isinstance(module, _InstanceNorm):
        module.track_running_stats = bool(module.track_running_stats and not names)
        for name in names:
            setattr(module, name, None)
        return module, [f"{kind} no longer tracks running statistics"] if names else [], []
    done, left = _remove_spectral_norm(module)
    if names:
        left.append(f"{kind} keeps {', '.join(names)}: replace it, or hold it in eval mode if it never writes them")
    return module, done, left


_EXACT_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _norm_with_activation(module: nn.Module) -> bool:
    """Whether it is timm's BatchNorm2d followed by dropout and an activation."""
    parts = (getattr(module, name, None) for name in ("drop", "act"))
    return type(module).__name__ == "BatchNormAct2d" and all(isinstance(part, nn.Module) for part in parts)


def _fix_batch_norm(module: _BatchNorm) -> _Repair:
    kind, channels = type(module).__name__, module.num_features
    if type(module) not in _EXACT_BATCH_NORMS and not _norm_with_activation(module):
        return module, [], [f"{kind} is a BatchNorm that does more: replace it by hand"]
    if channels == 1 and isinstance(module, nn.BatchNorm1d):
        return module, [], [f"{kind}(1) of a single number has nothing to normalise by: remove it by hand"]
    groups = group_count(channels)
    new = nn.GroupNorm(groups, channels, eps=module.eps, affine=False)
    new.affine = module.affine
    new.weight, new.bias = module.weight, module.bias  # the same tensors: optimisers and ties still hold
    new.train(module.training)
    what = f"{kind}({channels}) → GroupNorm({groups}, {channels}); its running statistics are gone"
    if _norm_with_activation(module):
        drop, act = module.get_submodule("drop"), module.get_submodule("act")
        return nn.Sequential(new, drop, act).train(module.training), [f"{what}; drop and act follow"], []
    return new, [what], []


def group_count(channels: int) -> int:
    """The most groups, up to 32, that divide the channels into eights or more.

    Groups of one or two channels would make a (batch, channels) activation constant.
    """
    return next(
        g for g in range(MAX_GROUPS, 0, -1) if channels % g == 0 and (g == 1 or channels // g >= MIN_CHANNELS_PER_GROUP)
    )


def _fix_embedding(module: nn.Embedding | nn.EmbeddingBag) -> list[str]:
    done = []
    if module.max_norm is not None:
        done.append(f"max_norm={module.max_norm:g} → None: the clip bounds what one contribution moves")
        module.max_norm = None
    if module.scale_grad_by_freq:
        done.append("scale_grad_by_freq → False: counts of the batch would mix contributions")
        module.scale_grad_by_freq = False
    if module.sparse:
        done.append("sparse → False: noise is dense, and which rows were touched is private")
        module.sparse = False
    return done


def _give_own_class(module: nn.Module) -> None:
    """Give a parametrised module a class to itself.

    torch hangs the parametrised tensor on the module's class as a property, a copy shares that class, and
    removal deletes the property: without this, mending a copy would break the original.
    """
    shared = type(module)
    fields = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, fields)


def _remove_spectral_norm(module: nn.Module) -> tuple[list[str], list[str]]:
    """Remove spectral normalisation, in its old and new form; weight normalisation is only named."""
    done, left = [], []
    for hook in list(module._forward_pre_hooks.values()):
        if isinstance(hook, SpectralNorm):
            remove_spectral_norm(module, hook.name)
            done.append(f"spectral_norm of {hook.name!r} removed at its present value")
        elif isinstance(hook, WeightNorm):
            left.append(f"weight_norm of {hook.name!r}: remove_weight_norm(module) makes it a plain weight")
    if parametrize.is_parametrized(module):
        for tensor, chain in list(module.parametrizations.items()):  # type: ignore[union-attr,operator]
            kinds = [type(step).__name__ for step in chain]
            if all(isinstance(step, _SpectralNorm) for step in chain):
                _give_own_class(module)
                parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)
                done.append(f"spectral_norm of {tensor!r} removed at its present value")
            else:
                left.append(f"{tensor!r} is parametrised by {', '.join(kinds)}: its leaf is not the weight")
    return done, left
