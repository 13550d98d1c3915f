"""Repair what breaks a private step, and say what was changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize, remove_spectral_norm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lamina.errors import PlanError
from lamina.plan.hazards import running_buffers

MOST_GROUPS, LEAST_CHANNELS = 32, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One module, and what was done to it, or why nothing could be."""

    module: str
    what: str

    def __str__(self) -> str:
        return f"{self.module}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What `fix` changed, and what it left for you."""

    changes: tuple[Change, ...] = ()
    left: tuple[Change, ...] = ()

    def __str__(self) -> str:
        lines = [f"changed  {change}" for change in self.changes] or ["nothing to change"]
        return "\n".join([*lines, *(f"left     {change}" for change in self.left)])


class Fixed(NamedTuple):
    """`model, report = lamina.fix(model)`."""

    model: nn.Module
    report: Report


def fix(model: nn.Module, *, inplace: bool = False) -> Fixed:
    """A model whose forward pass treats contributions one by one, and a report of what was changed.

    BatchNorm becomes GroupNorm (its weight and bias are kept, its running statistics are gone: outputs
    change, so train it further); InstanceNorm forgets its running statistics; Embedding loses max_norm,
    scale_grad_by_freq and sparse; spectral normalisation is removed at its present weight. Dropout and
    in-place activations are harmless and stay. Device, dtype, requires_grad and training mode are kept.

    The model is copied unless `inplace`. What cannot be repaired without guessing is in `report.left`.
    """
    _refuse_lazy(model)
    fixed = model if inplace else _copy(model)
    changes: list[Change] = []
    left: list[Change] = []
    replaced: dict[int, nn.Module] = {}
    for path, module in list(fixed.named_modules(remove_duplicate=False)):
        name = path or "(root)"
        if id(module) not in replaced:
            new, done, open_ = _repair(module)
            replaced[id(module)] = new
            changes.extend(Change(module=name, what=what) for what in done)
            left.extend(Change(module=name, what=what) for what in open_)
        new = replaced[id(module)]
        if new is module:
            continue
        if not path:
            fixed = new
        else:
            parent, _, child = path.rpartition(".")
            setattr(fixed.get_submodule(parent), child, new)
    return Fixed(fixed, Report(changes=tuple(changes), left=tuple(left)))


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise PlanError(
                "plan.tensor-lazy-no",
                f"tensor {name!r} is lazy and has no shape yet",
                "run model(...) once on a public or made-up input before fixing",
            )


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise PlanError(
            "plan.model-not-copied",
            f"the model cannot be copied: {error}",
            "use lamina.fix(model, inplace=True)",
        ) from error


_Repair = tuple[nn.Module, list[str], list[str]]


def _repair(module: nn.Module) -> _Repair:
    """The module to put in its place (itself, if changed or left as it is), what was done, what is left."""
    rules: list[tuple[type | tuple[type, ...], Callable[[nn.Module], _Repair]]] = [
        (_BatchNorm, _batch_norm),
        (_InstanceNorm, _instance_norm),
        ((nn.Embedding, nn.EmbeddingBag), _embedding),
    ]
    for kind, rule in rules:
        if isinstance(module, kind):
            return rule(module)
    done, left = _reparametrised(module)
    if names := running_buffers(module):
        left.append(
            f"{type(module).__name__} keeps {', '.join(names)}: replace it, or hold it in eval mode if it "
            "never writes them"
        )
    return module, done, left


def _batch_norm(module: nn.Module) -> _Repair:
    assert isinstance(module, _BatchNorm)
    exact = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    kind, channels = type(module).__name__, module.num_features
    if type(module) not in exact:
        return module, [], [f"{kind} is a BatchNorm that does more: replace it by hand"]
    if channels == 1 and isinstance(module, nn.BatchNorm1d):
        return module, [], [f"{kind}(1) of a single number has nothing to normalise by: remove it by hand"]
    groups = group_count(channels)
    new = nn.GroupNorm(groups, channels, eps=module.eps, affine=False)
    new.affine = module.affine
    new.weight, new.bias = module.weight, module.bias  # the same tensors: optimisers and ties still hold
    new.train(module.training)
    what = f"{kind}({channels}) → GroupNorm({groups}, {channels}); its running statistics are gone"
    return new, [what], []


def group_count(channels: int) -> int:
    """The most groups, up to 32, that divide the channels into eights or more.

    Groups of one or two channels would make a (batch, channels) activation constant.
    """
    return next(
        g
        for g in range(MOST_GROUPS, 0, -1)
        if channels % g == 0 and (g == 1 or channels // g >= LEAST_CHANNELS)
    )


def _instance_norm(module: nn.Module) -> _Repair:
    assert isinstance(module, _InstanceNorm)
    names = running_buffers(module)
    if not names:
        return module, [], []
    module.track_running_stats = False
    for name in names:
        setattr(module, name, None)
    return module, [f"{type(module).__name__} no longer tracks running statistics"], []


def _embedding(module: nn.Module) -> _Repair:
    assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
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
    return module, done, []


def _own_class(module: nn.Module) -> None:
    """Give a parametrised module a class to itself.

    torch hangs the parametrised tensor on the module's class as a property, a copy shares that class, and
    removal deletes the property: without this, mending a copy would break the original.
    """
    shared = type(module)
    fields = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, fields)


def _reparametrised(module: nn.Module) -> tuple[list[str], list[str]]:
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
                _own_class(module)
                parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)
                done.append(f"spectral_norm of {tensor!r} removed at its present value")
            else:
                left.append(f"{tensor!r} is parametrised by {', '.join(kinds)}: its leaf is not the weight")
    return done, left
