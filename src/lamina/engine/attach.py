"""Attaching to a model: the `forward` of each covered module is replaced on the instance, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lamina.engine import batch
from lamina.engine.distributed import is_sharded
from lamina.engine.guards.guard import Guard
from lamina.engine.guards.state import StateGuard
from lamina.engine.layers import layer_forward_for
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
from lamina.engine.layers.per_contribution import BroadcastForward, FlattenedTokensForward, PerContributionForward
from lamina.engine.layers.stacked_experts import ExpertsForward, modules_in_expert_blocks
from lamina.errors import CouplingError, EngineError, LaminaError, OwnershipError, UnclippedGradient, UnsupportedLayer
from lamina.plan.coverage import find_hazards, running_buffers

# Modules of Hugging Face that look a bias up by relative position, without the batch axis, where they say so.
_RELATIVE_BIAS_MODULES = ("T5Attention", "MT5Attention", "UMT5Attention", "LongT5Attention", "Pop2PianoAttention")
# Other modules, also of timm, that are run once per contribution: they use a trained tensor without the batch axis, or with
# the batch axis second, or a tensor of a submodule without calling it (the convolution of a mixer).
_WHOLE_MODULES = ("MPNetEncoder", "DebertaEncoder", "DebertaV2Encoder", "SwinLayer", "Swinv2Layer", "DonutSwinLayer",
                  "SwinTransformerBlock", "MaskFormerSwinLayer", "WavLMEncoder", "WavLMEncoderStableLayerNorm",
                  "LongformerSelfAttention", "XLNetModel", "DetrModel", "ConditionalDetrModel", "Mamba2Mixer",
                  "BambaMixer", "FalconH1Mixer", "Zamba2MambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer",
                  "Lfm2ShortConv", "Lfm2MoeShortConv", "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet",
                  "OlmoHybridGatedDeltaNet", "RecurrentGemmaRecurrentBlock", "JetMoeAttention", "JetMoeMoE",
                  "Llama4TextMoe")  # fmt: skip
# And those that fold another axis behind the batch's (tokens, windows, frames, channels): k rows of each example, in order.
_FOLDING_MODULES = ("OPTDecoderLayer", "TimesformerLayer", "PatchTSTEncoderLayer", "MobileViTLayer", "MobileViTV2Layer",
                    "MobileVitBlock", "MobileVitV2Block", "LinearNorm")  # fmt: skip


class Attachment:
    """The engine's hold on a model: nothing is wrapped, and `detach` leaves no trace.

    While attached, every module that owns a covered tensor runs through its `LayerForward`. Modules and
    tensors keep their classes, names and identity.
    """

    def __init__(
        self, model: nn.Module, targets: Mapping[str, Target | None], *,
        state: StateGuard, guards: Sequence[Guard], rows: Mapping[str, str] | None = None,
        per_contribution: Sequence[str] = (), gather: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.model = model
        self.slot = ReceiverSlot()
        self.rows = dict(rows or {})
        self.examples: int | None = None
        self.inputs: list[int] = []  # where the arguments of the last call from outside are kept
        self._flat = modules_in_expert_blocks(model)
        self._folded = {
            f"{name}.{below}".lstrip(".")
            for name, module in model.named_modules()
            if type(module).__name__ in _FOLDING_MODULES
            for below, _ in module.named_modules()
        }
        self._adapters = mergeable_adapters(model)
        refuse_merged_adapters(self._adapters)
        floats = [(n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_floating_point()]
        self._names, self._floats = [n for n, _ in floats], [t for _, t in floats]
        self._parameters = sum(isinstance(t, nn.Parameter) for t in self._floats)
        self.targets = {id(p): targets[name] for name, p in model.named_parameters() if name in targets}
        begin, end, refuse = CopySafeHook(self._begin_call), CopySafeHook(self._end_call), CopySafeHook(refuse_hazards)
        self._calls_under_way = 0
        self._handles: list[Any] = []
        for module in filter(_may_be_called_by_itself, model.modules()):
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))
        self._state, self._guards, self._gather = state, guards, gather
        self._probed_hooks: dict[int, Any] | None = (
            None  # hooks of the model when it was probed, by id; keeps them alive
        )
        self._hooks_made = 0  # number of hooks that torch had made at that time
        self.call_with_new_hooks: Any = None  # arguments of the last call, without examples
        check, accept = CopySafeHook(lambda *_: state.look_closely()), CopySafeHook(lambda *_: state.accept())
        self._handles.append(model.register_state_dict_pre_hook(check))
        self._handles.append(model.register_load_state_dict_post_hook(accept))
        self._versions: list[int] = []
        for module in filter(running_buffers, model.modules()):
            self._handles.append(module.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True))
        self._watched = [(name, p) for name, p in model.named_parameters() if name in targets]
        refuse_parameter_hooks(self._watched)
        self._handles += [p.register_hook(gradient_refusing_hook(name)) for name, p in self._watched]
        self._patched: list[tuple[nn.Module, str, Any]] = []
        try:
            self._attach(per_contribution)
        except BaseException:
            self.detach()
            raise

    def _attach(self, per_contribution: Sequence[str]) -> None:
        unknown = set(per_contribution) - {name for name, _ in self.model.named_modules()}
        if unknown:
            problem = f"per_contribution has {sorted(unknown)}, which the model does not have"
            raise EngineError("engine.per-contribution-unknown", problem, "use names of model.named_modules()")
        for name, module in self.model.named_modules():
            if isinstance(getattr(module, "forward", None), PatchedForward):
                problem = f"module '{name}' is already attached to an engine"
                remedy = "pass that engine on (Trainer(…, engine=engine)), or call its detach() first"
                raise EngineError("engine.already-attached", problem, remedy)
            below = isinstance(module, nn.MultiheadAttention)  # uses its output projection without calling it
            own = any(p.requires_grad for p in module.parameters(recurse=below))
            biased = type(module).__name__ in _RELATIVE_BIAS_MODULES
            biased = biased and bool(getattr(module, "has_relative_attention_bias", False))
            biased = biased or type(module).__name__ in _WHOLE_MODULES
            forced = name in per_contribution or uses_parameter_containers(module) or biased
            if vars(module).get("_requires_grad") is True:  # wav2vec 2.0 and its like ask for the gradient of the input
                self._replace_method(module, "_requires_grad", False)
            if PromptPerExample.applies_to(module):
                self._replace_method(module, "get_prompt", PromptPerExample(module))
            if own or forced or hasattr(module, "parametrizations"):
                self._patch(name, module, forced)

    def _patch(self, name: str, module: nn.Module, forced: bool) -> None:
        original = module.forward
        _refuse_spectral_norm(name, module)
        try:
            made = None if forced else layer_forward_for(module)
        except LaminaError as problem:
            raise type(problem)(problem.code, f"module '{name}': {problem.problem}", problem.remedy) from None
        if made is None and not forced and ExpertsForward.applies_to(module):
            made = ExpertsForward(name, module, original, lambda x: self._token_rows(name, x))
        if made is None:
            kind: Any = PerContributionForward
            if not forced and not hasattr(module, "parametrizations"):
                if name in self._flat:
                    kind = FlattenedTokensForward
                elif BroadcastForward.applies_to(module):
                    kind = BroadcastForward
            made = kind(name, module, original, lambda: self.examples_now)
        if made.parameters:
            self._replace_method(module, "forward", PatchedForward(self, name, module, original, made))

    def _replace_method(self, module: nn.Module, method: str, call: Any) -> None:
        self._patched.append((module, method, vars(module).get(method)))
        setattr(module, method, call)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for _, p in self._watched:
            if not p._backward_hooks:
                p._backward_hooks = None
        for module, method, before in reversed(self._patched):
            if before is None:
                vars(module).pop(method, None)
            else:
                setattr(module, method, before)
        self._patched.clear()

    @property
    def run_per_contribution(self) -> list[nn.Module]:
        """The modules that are run once per contribution."""
        patched = (vars(module).get(method) for module, method, _ in self._patched)
        return [p.module for p in patched if isinstance(p, PatchedForward) and p.per_contribution]

    @property
    def examples_now(self) -> int | None:
        declared = batch.current_examples()
        return self.examples if declared is None else declared

    def _begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The model, or a part of it that is called by itself, begins a forward pass."""
        self._calls_under_way += 1
        if self._calls_under_way == 1:
            self._gather()
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
            if module is self.model:
                self.examples = None
            self.note_batch_size(tensors)
            refuse_merged_adapters(self._adapters)
            self._versions = self._written_so_far(module)
            if self.slot.receiver is None:
                for guard in self._guards:
                    guard.begin_call()
                new = module is self.model and self._hooks_made != RemovableHandle.next_id
                if new and torch.is_grad_enabled():
                    self.call_with_new_hooks = pytree.tree_map_only(Tensor, lambda t: t.detach()[:0], (args, kwargs))

    def note_batch_size(self, tensors: Sequence[Tensor]) -> None:
        """How many examples a call from outside carries: the first axis of its first tensor.

        What is computed again during a backward pass carries as many as before.
        """
        if tensors and self.slot.receiver is None:
            self.examples, self.inputs = tensors[0].shape[0], [t.untyped_storage().data_ptr() for t in tensors]

    def _end_call(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward pass must leave every tensor of the model alone: what it writes was never noised."""
        self._calls_under_way -= 1
        if self._calls_under_way or self.slot.receiver is not None:
            return
        now = self._written_so_far(module)
        if now != self._versions:
            name = next(n for n, was, new in zip(self._names, self._versions, now, strict=False) if was != new)
            problem = f"the forward pass wrote to '{name}', which would carry private data without noise"
            remedy = "train it by the optimiser, or compute it from public data before training"
            self._state.refused = True
            raise CouplingError("engine.written-during-forward", problem, remedy)
        for guard in self._guards:
            guard.end_call()

    def accept_hooks(self) -> None:
        """Note that the model was probed with its present hooks."""
        self._hooks_made, self.call_with_new_hooks = RemovableHandle.next_id, None
        self._probed_hooks = {id(hook): hook for _, hook in _hooks_of(self.model)}

    def new_hooks(self) -> list[str]:
        """Return the modules that got a hook since the probe. Fast if torch's counter of hooks has not changed."""
        if self._probed_hooks is None or self._hooks_made == RemovableHandle.next_id:
            return []
        made = RemovableHandle.next_id
        found = [name for name, hook in _hooks_of(self.model) if id(hook) not in self._probed_hooks]
        if not found:  # the new hooks are on tensors or other models
            self._hooks_made, self.call_with_new_hooks = made, None
        return list(dict.fromkeys(found))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Allow other forward passes inside the block, then restore the state of the pending one."""
        kept = self.examples, self.inputs, self._state.pending
        try:
            yield
        finally:
            self.examples, self.inputs, self._state.pending = kept

    @property
    def called_from_outside(self) -> bool:
        """Whether no forward pass of the model, or of a part with parts of its own, is under way."""
        return self._calls_under_way == 0

    def _written_so_far(self, module: nn.Module) -> list[int]:
        """How often each tensor of the model was written in place. Integer buffers (counters) are left out.

        Of a part that is called by itself the `StateGuard` looks after all buffers, at the step.
        """
        return [t._version for t in (self._floats if module is self.model else self._floats[: self._parameters])]

    def example_of_row(self, name: str, x: Tensor) -> Tensor | None:
        """The row map in force for a module's input: declared in the model, or by name to the engine."""
        declared = batch.current_rows()
        if declared is not None:
            return declared
        for pattern, order in self.rows.items():
            if fnmatchcase(name, pattern):
                return _row_map(name, x.shape[0], order, self.examples_now)
        if not self._folded and not self._flat:
            return None
        n = self.examples_now
        folded = name in self._folded and n is not None and len(x) > n and len(x) % n == 0
        if folded or (name in self._flat and x.dim() == 2):
            return _row_map(name, x.shape[0], "contiguous", self.examples_now)
        return None

    def _token_rows(self, name: str, x: Tensor) -> Tensor:
        """The example of each token of stacked experts: by default as many of each example, in order."""
        declared = self.example_of_row(name, x)
        return _row_map(name, x.shape[0], "contiguous", self.examples_now) if declared is None else declared


ResolvedParameters = tuple[tuple[nn.Parameter, ...], tuple[Target | None, ...], tuple[int, ...]]


class PatchedForward:
    """Replaces a module's `forward`. A deep copy or pickle of the model gets the original."""

    def __init__(
        self, attachment: Attachment, name: str, module: nn.Module, original: Callable[..., Any], forward: LayerForward
    ) -> None:
        self.attachment, self.name, self.module = attachment, name, module
        self.original, self.layer_forward = original, forward
        owners = [_owning_dict(module, local) for local in forward.parameters]
        self.own = [(parameters, name, parameters[name]) for parameters, name in owners]
        self._found: dict[tuple[str, ...], ResolvedParameters] = {}
        self._positions: bool | None = None  # whether one-dimensional ids are positions; None: not known yet
        self.per_contribution = isinstance(forward, PerContributionForward)
        self._bag, self._table = isinstance(module, nn.EmbeddingBag), isinstance(forward, EmbeddingForward)
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._untouched():
            if any(is_sharded(parameters.get(name)) for parameters, name, _ in self.own):
                problem = f"'{self.name}' was called past the module that fully_shard was called on, which gathers its weights"
                remedy = "call that module, or call fully_shard on this one"
                raise EngineError("engine.sharded-part-bypassed", problem, remedy)
            return self.original(*args, **kwargs)
        if self.attachment.called_from_outside:  # one row is no batch to go by: a table of positions, perhaps
            given = pytree.tree_leaves((args, kwargs))
            self.attachment.note_batch_size([t for t in given if isinstance(t, Tensor) and t.dim() > 1 and len(t) > 1])
        if self._bag and (args[1:2] or (kwargs.get("offsets"),))[0] is not None:
            problem = f"'{self.name}' is an EmbeddingBag that was called with offsets: its rows are not examples"
            remedy = "give it ids of shape (examples, ids), padded, with padding_idx or per_sample_weights"
            raise OwnershipError("engine.embedding-bag-offsets", problem, remedy)
        if self._table:
            args, kwargs = (self._batched_ids(args[0] if args else kwargs["input"]),), {}
        return self.layer_forward.forward(self.apply, *args, **kwargs)

    def _untouched(self) -> bool:
        """False while the module runs with other tensors (PerContributionForward, functional_call)."""
        return all(parameters.get(name) is p for parameters, name, p in self.own)

    def _batched_ids(self, ids: Tensor) -> Tensor:
        """Ids without the batch axis (positions), given to every example.

        One-dimensional ids that once were not the batch's never are, also when their number happens to be the batch's;
        those that once were always are. Not known yet: positions count from 0, and are no argument of the model.
        """
        n = self.attachment.examples_now
        if n is None or batch.current_rows() is not None:
            return ids
        if ids.dim() == 1:
            if ids.shape[0] != n:
                self._positions = True
            elif self._positions is None and n > 1:
                given = ids.untyped_storage().data_ptr() in self.attachment.inputs
                self._positions = not given and torch.equal(ids, torch.arange(n, device=ids.device))
            return ids.unsqueeze(0).expand(n, -1) if self._positions else ids
        return ids.expand(n, *ids.shape[1:]) if ids.dim() > 1 and ids.shape[0] == 1 else ids

    def apply(self, rule: LayerRule, x: Tensor, *names: str) -> Tensor:
        """Run a rule on the module's own parameters, through the engine where they are covered."""
        tensors, targets, layers = self._found.get(names) or self._find(names)
        params = [p if t is not None and p.requires_grad else p.detach() for p, t in zip(tensors, targets, strict=True)]
        if not layers:
            return rule.run(x, params)[0]
        device = tensors[0].device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            problem = f"'{self.name}' runs under float16 autocast"
            raise EngineError("engine.float16-autocast", problem, "use bfloat16 autocast, without GradScaler")
        rows = None if x is NO_INPUT else self.attachment.example_of_row(self.name, x)
        use = RuleCall(self.name, rule, targets, layers, self.attachment.slot, rows, x.dtype)
        return CoveredFunction.apply(use, x, *params)  # type: ignore[no-any-return, no-untyped-call]

    def _find(self, names: tuple[str, ...]) -> ResolvedParameters:
        """The named parameters and where their gradients go; looked up once."""
        tensors = tuple(self.module.get_parameter(name) for name in names)
        targets = tuple(self.attachment.targets.get(id(p)) for p in tensors)
        layers = tuple(dict.fromkeys(t.layer for t in targets if t is not None))
        self._found[names] = tensors, targets, layers
        return self._found[names]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return class_method(memo.get(id(self.module), self.module), "forward")

    def __reduce__(self) -> Any:
        return class_method, (self.module, "forward")


def _owning_dict(module: nn.Module, name: str) -> tuple[dict[str, nn.Parameter | None], str]:
    """Where a module keeps a parameter of its own or of a module below it."""
    path, _, local = name.rpartition(".")
    return module.get_submodule(path)._parameters, local


def _row_map(name: str, rows: int, order: str, examples: int | None) -> Tensor:
    if examples is None or examples == 0 or rows % examples:
        problem = f"rows={{{name!r}: {order!r}}} cannot map {rows} rows to {examples} examples"
        remedy = "use `with lamina.rows(owner):` around the call, with one example per row"
        raise EngineError("engine.rows-not-divisible", problem, remedy)
    if order == "contiguous":
        return torch.arange(examples).repeat_interleave(rows // examples)
    if order == "interleaved":
        return torch.arange(examples).repeat(rows // examples)
    problem = f"the order of rows for '{name}' is {order!r}"
    raise EngineError("engine.rows-order-unknown", problem, "use 'contiguous' (r // k) or 'interleaved' (r % n)")


def _refuse_spectral_norm(name: str, module: nn.Module) -> None:
    hooks = [type(h).__name__ for h in module._forward_pre_hooks.values()]
    if parametrize.is_parametrized(module):
        hooks += [type(p).__name__ for ps in module.parametrizations.values() for p in ps]  # type: ignore[operator]
    if any("SpectralNorm" in hook for hook in hooks):
        problem = f"module '{name}' has spectral_norm, which changes its buffers at every call"
        remedy = "remove it: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
        raise UnsupportedLayer("engine.spectral-norm", problem, remedy)


# What the attachment puts on a model: hooks and methods that a copy of the model does not keep.


class CopySafeHook:
    """A hook of a module. In a copy of the module it removes itself when called."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self.call is not None:
            self.call(module, *args)
            return
        for hooks in (
            module._forward_pre_hooks, module._forward_hooks, module._state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        ):  # fmt: skip
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopySafeHook:
        return CopySafeHook()

    def __reduce__(self) -> Any:
        return CopySafeHook, ()


def _hooks_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the hooks that may change what a model computes, with the name of their module."""
    everywhere = nn.modules.module
    for hooks in (everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks,
                  everywhere._global_backward_pre_hooks, everywhere._global_backward_hooks):  # fmt: skip
        yield from (("every module", hook) for hook in hooks.values())
    for name, m in model.named_modules():
        for hooks in (m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks):
            yield from ((name, hook) for hook in hooks.values())


def _may_be_called_by_itself(module: nn.Module) -> bool:
    """Whether a module computes more than one layer of torch."""
    return bool(module._modules) or not type(module).__module__.startswith("torch.nn.")


def class_method(module: nn.Module, name: str) -> Any:
    """The method that a module has by its class."""
    return MethodType(getattr(type(module), name), module)


def refuse_hazards(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse a forward pass that would mix contributions or move buffers with them."""
    for hazard in find_hazards(module):
        problem = f"{hazard.kind} {hazard.state}, which {hazard.what.value}, was called in an attached model"
        raise CouplingError("engine.hazard-called", problem, hazard.remedy)


def gradient_refusing_hook(name: str) -> Callable[[Tensor | None], None]:
    """A tensor hook: autograd itself must never give a covered tensor a gradient."""

    def hook(grad: Tensor | None) -> None:
        if grad is not None:
            problem = f"'{name}' got a gradient that was not clipped"
            remedy = "call engine.backward(losses, batch) instead of loss.backward(), or engine.detach() first"
            raise UnclippedGradient("engine.gradient-not-clipped", problem, remedy)

    return hook


def refuse_parameter_hooks(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """A hook on a covered tensor would wait for a gradient that autograd never brings."""
    for name, p in parameters:
        hooks = [*(p._backward_hooks or {}).values(), *(getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()]
        if any(not getattr(hook, "__qualname__", "").startswith(gradient_refusing_hook.__name__) for hook in hooks):
            problem = f"'{name}' has a gradient hook of its own, and autograd brings it no gradient"
            remedy = "remove the hook; change gradients between engine.backward and optimizer.step instead"
            raise EngineError("engine.parameter-hook", problem, remedy)


def refuse_wrappers(model: nn.Module) -> None:
    """A scripted or traced module cannot be run with another forward; one that is spread over processes waits for gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            what = f"module '{name}'" if name else "the model"
            problem = f"{what} is wrapped in {type(module).__name__}, which adds up gradients by itself"
            remedy = "use what it wraps (its .module): the ranks of an engine add up clipped sums (docs/distributed.md)"
            raise EngineError("engine.ddp-wrapped", problem, remedy)
        if isinstance(module, torch.jit.ScriptModule):
            problem = f"module '{name}' is scripted or traced by torch.jit, which hides its layers"
            raise UnsupportedLayer("engine.scripted-module", problem, "use the module that it was made from")


_SHARED_PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING")  # looked up once, and repeated for the batch


class PromptPerExample:
    """Replaces `get_prompt` of a model that repeats one prompt for the batch.

    While the engine is attached, the table of virtual tokens is looked up for every example, so that its gradient
    arrives unsummed. A copy or pickle of the model gets the original.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.original = model, model.get_prompt

    @staticmethod
    def applies_to(module: Any) -> bool:
        return callable(getattr(module, "get_prompt", None)) and hasattr(module, "prompt_encoder")

    def __call__(self, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        kind = getattr(self.model.active_peft_config, "peft_type", None)
        if getattr(kind, "value", kind) not in _SHARED_PROMPT_TYPES:
            return self.original(batch_size, *args, **kwargs)
        prompts: Tensor = self.original(1, *args, **kwargs)
        return prompts if len(prompts) == batch_size else prompts.repeat(batch_size, 1, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return class_method(memo.get(id(self.model), self.model), "get_prompt")

    def __reduce__(self) -> Any:
        return class_method, (self.model, "get_prompt")


def mergeable_adapters(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers that can have an adapter merged into their base weight."""
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "merged_adapters")]


def refuse_merged_adapters(adapters: list[tuple[str, Any]]) -> None:
    """A merged adapter is not used by the forward pass: it would train on noise alone, its base on nothing."""
    for name, module in adapters:
        if module.merged_adapters:
            problem = f"adapter {module.merged_adapters[0]!r} is merged into '{name}': its own tensors are not used"
            raise UnsupportedLayer("engine.adapter-merged", problem, "call model.unmerge_adapter() before training")


def uses_parameter_containers(module: nn.Module) -> bool:
    """Whether a module uses trainable tensors that a ParameterDict or ParameterList below it keeps (IA3, …)."""
    kept = (child for child in module.children() if isinstance(child, nn.ParameterDict | nn.ParameterList))
    return any(p.requires_grad for child in kept for p in child.parameters())
