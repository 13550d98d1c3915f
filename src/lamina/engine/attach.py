"""Attaching to a model: the `forward` of each covered module is replaced on the instance, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from lamina.engine import batch
from lamina.engine.layers.layer_registry import layer_forward_for
from lamina.engine.layers.layer_rule import (
    NO_INPUT,
    CoveredFunction,
    LayerForward,
    LayerRule,
    ReceiverSlot,
    RuleCall,
    Target,
)
from lamina.engine.layers.linear import EmbeddingForward
from lamina.engine.layers.stacked_experts import ExpertsForward, modules_in_expert_blocks
from lamina.engine.model_hooks import (
    CopySafePostHook,
    CopySafePreHook,
    PromptPerExample,
    class_forward,
    gradient_refusing_hook,
    mergeable_adapters,
    modules_with_running_buffers,
    refuse_hazards,
    refuse_merged_adapters,
    uses_parameter_containers,
)
from lamina.engine.per_contribution import BroadcastForward, FlattenedTokensForward, PerContributionForward
from lamina.errors import CouplingError, EngineError, LaminaError, UnsupportedLayer

# Attention modules that look a bias up by relative position, without the batch axis.
_RELATIVE_BIAS_MODULES = ("T5Attention", "MT5Attention", "UMT5Attention", "LongT5Attention", "Pop2PianoAttention")


class Attachment:
    """The engine's hold on a model: nothing is wrapped, and `detach` leaves no trace.

    While attached, every module that owns a covered tensor runs through its `LayerForward`. Modules and
    tensors keep their classes, names and identity.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Target | None],
        *,
        rows: Mapping[str, str] | None = None,
        per_contribution: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.slot = ReceiverSlot()
        self.rows = dict(rows or {})
        self.examples: int | None = None
        self._flat = modules_in_expert_blocks(model)
        self._adapters = mergeable_adapters(model)
        refuse_merged_adapters(self._adapters)
        self._state = [*model.named_parameters(), *model.named_buffers()]
        self.targets = {id(p): targets[name] for name, p in model.named_parameters() if name in targets}
        see = CopySafePreHook(self._note_batch_size)
        self._handles = [model.register_forward_pre_hook(see, prepend=True, with_kwargs=True)]
        self._handles.append(model.register_forward_hook(CopySafePostHook(self._refuse_writes)))
        self._versions: dict[str, int] = {}
        for module in modules_with_running_buffers(model):
            self._handles.append(
                module.register_forward_pre_hook(CopySafePreHook(refuse_hazards), prepend=True, with_kwargs=True)
            )
        self._watched = [p for name, p in model.named_parameters() if name in targets]
        for name, p in model.named_parameters():
            if name in targets:
                self._handles.append(p.register_hook(gradient_refusing_hook(name)))
        self._patched: list[tuple[nn.Module, str, Any]] = []
        try:
            self._attach(per_contribution)
        except BaseException:
            self.detach()
            raise

    def _attach(self, per_contribution: Sequence[str]) -> None:
        unknown = set(per_contribution) - {name for name, _ in self.model.named_modules()}
        if unknown:
            raise EngineError(
                "engine.per-contribution-unknown",
                f"per_contribution names {sorted(unknown)}, which the model does not have",
                "use names of model.named_modules()",
            )
        for name, module in self.model.named_modules():
            if isinstance(getattr(module, "forward", None), PatchedForward):
                raise EngineError(
                    "engine.already-attached",
                    f"module '{name}' is attached to an engine already",
                    "give that engine on (Trainer(…, engine=engine)), or call its detach() first",
                )
            own = any(p.requires_grad for p in module.parameters(recurse=False))
            forced = (
                name in per_contribution
                or uses_parameter_containers(module)
                or (
                    type(module).__name__ in _RELATIVE_BIAS_MODULES
                    and bool(getattr(module, "has_relative_attention_bias", False))
                )
            )
            if PromptPerExample.applies_to(module):
                self._replace_method(module, "get_prompt", PromptPerExample(module))
            if own or forced or hasattr(module, "parametrizations"):
                self._patch(name, module, forced)

    def _patch(self, name: str, module: nn.Module, forced: bool) -> None:
        original = module.forward
        _refuse_spectral_norm(name, module)
        try:
            site = None if forced else layer_forward_for(module)
        except LaminaError as problem:
            raise type(problem)(problem.code, f"module '{name}': {problem.problem}", problem.remedy) from None
        if site is None and not forced and ExpertsForward.applies_to(module):
            site = ExpertsForward(name, module, original, lambda x: self._token_rows(name, x))
        if site is None:
            plain = not forced and not hasattr(module, "parametrizations")
            kind: type[FlattenedTokensForward] | type[BroadcastForward] | type[PerContributionForward] = (
                PerContributionForward
            )
            if plain and name in self._flat:
                kind = FlattenedTokensForward
            elif plain and BroadcastForward.applies_to(module):
                kind = BroadcastForward
            site = kind(name, module, original, lambda: self.examples_now)
        if not site.parameters:
            return
        self._replace_method(module, "forward", PatchedForward(self, name, module, original, site))

    def _replace_method(self, module: nn.Module, method: str, call: Callable[..., Any]) -> None:
        self._patched.append((module, method, vars(module).get(method)))
        setattr(module, method, call)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for p in self._watched:
            if not p._backward_hooks:
                p._backward_hooks = None
        for module, method, before in reversed(self._patched):
            if before is None:
                vars(module).pop(method, None)
            else:
                setattr(module, method, before)
        self._patched.clear()

    @property
    def examples_now(self) -> int | None:
        said = batch.current_examples()
        return self.examples if said is None else said

    def _note_batch_size(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """How many examples a forward pass of the whole model carries: the first axis of its first tensor."""
        first = next((t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()), None)
        self.examples = None if first is None else first.shape[0]
        refuse_merged_adapters(self._adapters)
        self._versions = self._written_so_far()

    def _refuse_writes(self) -> None:
        """A forward pass must leave every tensor of the model alone: what it writes was never noised."""
        now = self._written_so_far()
        for name, version in self._versions.items():
            if now.get(name, version) != version:
                raise CouplingError(
                    "engine.written-during-forward",
                    f"'{name}' was written during the forward pass: it would carry private data without noise",
                    "train it by the optimiser, or compute it from public data before training",
                )

    def _written_so_far(self) -> dict[str, int]:
        """How often each tensor of the model was written in place. Integer buffers (counters) are left out."""
        return {n: t._version for n, t in self._state if t.is_floating_point()}

    def example_of_row(self, name: str, x: Tensor) -> Tensor | None:
        """The row map in force for a module's input: declared in the model, or by name to the engine."""
        said = batch.current_rows()
        if said is not None:
            return said
        for pattern, order in self.rows.items():
            if fnmatchcase(name, pattern):
                return _row_map(name, x.shape[0], order, self.examples_now)
        if name in self._flat and x.dim() == 2:
            return _row_map(name, x.shape[0], "contiguous", self.examples_now)
        return None

    def _token_rows(self, name: str, x: Tensor) -> Tensor:
        """Whose tokens stacked experts were given: by default as many of each example, in order."""
        said = self.example_of_row(name, x)
        return _row_map(name, x.shape[0], "contiguous", self.examples_now) if said is None else said


ResolvedParameters = tuple[tuple[nn.Parameter, ...], tuple[Target | None, ...], tuple[int, ...]]


class PatchedForward:
    """What stands in for a module's `forward`. A deep copy or pickle of the model gets the original."""

    def __init__(
        self, attachment: Attachment, name: str, module: nn.Module, original: Callable[..., Any], site: LayerForward
    ) -> None:
        self.attachment, self.name, self.module, self.original, self.layer_forward = (
            attachment,
            name,
            module,
            original,
            site,
        )
        slots = [_owning_dict(module, local) for local in site.parameters]
        self.own = [(parameters, name, parameters[name]) for parameters, name in slots]
        self._found: dict[tuple[str, ...], ResolvedParameters] = {}
        self._positions = False
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._untouched():
            return self.original(*args, **kwargs)
        if isinstance(self.layer_forward, EmbeddingForward):
            args, kwargs = (self._batched_ids(args[0] if args else kwargs["input"]),), {}
        return self.layer_forward.forward(self.apply, *args, **kwargs)

    def _untouched(self) -> bool:
        """False while somebody (an owner, functional_call) runs the module with other tensors."""
        return all(parameters.get(name) is p for parameters, name, p in self.own)

    def _batched_ids(self, ids: Tensor) -> Tensor:
        """Ids without the batch axis (positions), given to every example.

        One-dimensional ids that once were not the batch's never are, also when their number happens to be
        the batch's. If it is so from the start, the ownership check decides.
        """
        n = self.attachment.examples_now
        if n is None or batch.current_rows() is not None:
            return ids
        if ids.dim() == 1 and (self._positions or ids.shape[0] != n):
            self._positions = True
            return ids.unsqueeze(0).expand(n, -1)
        return ids.expand(n, *ids.shape[1:]) if ids.dim() > 1 and ids.shape[0] == 1 else ids

    def apply(self, rule: LayerRule, x: Tensor, *names: str) -> Tensor:
        """Run a rule on the module's own parameters, through the engine where they are covered."""
        tensors, targets, layers = self._find(names)
        params = [p if t is not None and p.requires_grad else p.detach() for p, t in zip(tensors, targets, strict=True)]
        if not layers:
            return rule.run(x, params)[0]
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
            raise EngineError(
                "engine.float16-autocast",
                f"'{self.name}' runs under float16 autocast",
                "use bfloat16 autocast, without GradScaler",
            )
        rows = None if x is NO_INPUT else self.attachment.example_of_row(self.name, x)
        use = RuleCall(self.name, rule, targets, layers, self.attachment.slot, rows, x.dtype)
        return CoveredFunction.apply(use, x, *params)  # type: ignore[no-any-return, no-untyped-call]

    def _find(self, names: tuple[str, ...]) -> ResolvedParameters:
        """The named parameters and where their gradients go; looked up once."""
        found = self._found.get(names)
        if found is None:
            tensors = tuple(self.module.get_parameter(name) for name in names)
            targets = tuple(self.attachment.targets.get(id(p)) for p in tensors)
            layers = tuple(dict.fromkeys(t.layer for t in targets if t is not None))
            found = self._found[names] = (tensors, targets, layers)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return class_forward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        return class_forward, (self.module,)


def _owning_dict(module: nn.Module, name: str) -> tuple[dict[str, nn.Parameter | None], str]:
    """Where a module keeps a parameter of its own or of a module below it."""
    path, _, local = name.rpartition(".")
    return module.get_submodule(path)._parameters, local


def _row_map(name: str, rows: int, order: str, examples: int | None) -> Tensor:
    if examples is None or examples == 0 or rows % examples:
        raise EngineError(
            "engine.rows-not-divisible",
            f"rows={{{name!r}: {order!r}}} cannot map {rows} rows to {examples} examples",
            "use `with lamina.rows(owner):` around the call, with one example per row",
        )
    if order == "contiguous":
        return torch.arange(examples).repeat_interleave(rows // examples)
    if order == "interleaved":
        return torch.arange(examples).repeat(rows // examples)
    raise EngineError(
        "engine.rows-order-unknown", f"rows order {order!r} for '{name}'", "use 'contiguous' (r // k) or 'interleaved' (r % n)"
    )


def _refuse_spectral_norm(name: str, module: nn.Module) -> None:
    hooks = [type(h).__name__ for h in module._forward_pre_hooks.values()]
    if parametrize.is_parametrized(module):
        hooks += [type(p).__name__ for ps in module.parametrizations.values() for p in ps]  # type: ignore[operator]
    if any("SpectralNorm" in hook for hook in hooks):
        raise UnsupportedLayer(
            "engine.spectral-norm",
            f"module '{name}' has spectral_norm, which changes its buffers at every call",
            "remove it: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
        )
