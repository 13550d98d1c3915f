"""`TrainingState`: everything that training changes, the moving average of the weights included, and its checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina.account.filters import PrivacyFilter
from lamina.admit.verdicts import PackedTexts
from lamina.errors import RunError
from lamina.train.training_checkpoint import TrainingCheckpoint, flatten, unflatten
from lamina.validate import number

if TYPE_CHECKING:
    from lamina.engine.adaptive import Adaptation


class MovingAverage:
    """average <- decay · average + (1 - decay) · weights, after every step, over every trainable tensor."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        number(RunError, "train.ema-out-of-range", above=0, below=1, remedy="for example ema=0.999", ema=decay)
        self.decay = decay
        self._live = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        live = [p.detach() for p in self._live.values()]
        torch._foreach_lerp_(list(self.average.values()), live, 1.0 - self.decay)  # one call for all tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, average in self.average.items():
            average.copy_(tensors[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the average inside, its own weights again afterwards."""
        with torch.no_grad():
            kept = {name: p.detach().clone() for name, p in self._live.items()}
            for name, p in self._live.items():
                p.copy_(self.average[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self._live.items():
                    p.copy_(kept[name])


@dataclass(kw_only=True)
class TrainingState:
    """All that a step of a run changes.

    `segments` closed so far and `step`, the next one; `counts`, occurrences per contribution where these are
    capped; `evaluations`, the figures on public data so far, by step; `notes`, what a reader of the outcome should know;
    `adaptation`, what the plan's rules have learned from noised gradients.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any = None
    ema: MovingAverage | None = None
    filters: dict[str, PrivacyFilter] = field(default_factory=dict)
    counts: NDArray[np.uint32] | None = None
    segments: int = 0
    step: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    adaptation: Adaptation | None = None
    names: PackedTexts | None = None  # whose occurrences are counted, where rows may be others after a resume
    given: list[dict[str, Any]] = field(init=False)  # the optimiser's settings as the caller gave them
    given_schedule: Any = field(init=False)

    def __post_init__(self) -> None:
        self.given_schedule = None if self.scheduler is None else copy.deepcopy(_scheduler_state(self.scheduler))
        self.given = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]

    @property
    def factor(self) -> float:
        """What the noise of the next segment is multiplied by under an adaptive budget; 1 otherwise."""
        return 1.0 if self.adaptation is None else self.adaptation.proposed_factor

    def apply_given(self) -> str:
        """After a restore: apply the optimiser settings given now, unless a schedule owns them; returns what changed."""
        if self.scheduler is not None:
            return "the learning rate and schedule of the checkpoint are used"
        changes = []
        for group, given in zip(self.optimizer.param_groups, self.given, strict=True):
            for name, value in given.items():
                if not isinstance(value, Tensor) and group.get(name) != value:
                    changes.append(f"{name} changes from {group.get(name)} to {value}")
                    group[name] = value
        return ", ".join(changes) or "those given now are used"

    def capture(self, header: Mapping[str, Any]) -> TrainingCheckpoint:
        """Weights, optimiser, scheduler, average, filters, counters; `header` says whose they are."""
        tensors, aliases = _weights_and_aliases(self.model)
        optimizer, optimizer_plain = flatten("optimizer", self.optimizer.state_dict())
        tensors |= optimizer
        plain: dict[str, Any] = {
            **header,
            "aliases": aliases,
            "optimizer": optimizer_plain,
            "segments": self.segments,
            "step": self.step,
            "evaluations": self.evaluations,
            "notes": self.notes,
            "filters": {name: _filter_state(f) for name, f in self.filters.items()},
            "adaptation": None,
        }
        if self.adaptation is not None:
            declared = self.adaptation.declared.digest()
            plain["adaptation"] = {"plan": declared, "state": self.adaptation.to_state()}
        if self.scheduler is not None:
            scheduler, plain["scheduler"] = flatten("scheduler", self.scheduler.state_dict())
            tensors |= scheduler
        if self.ema is not None:
            tensors |= {f"ema.{name}": t for name, t in self.ema.average.items()}
        if self.counts is not None:
            tensors["occurrences"] = torch.from_numpy(self.counts.view(np.int32))
            if self.names is not None:
                tensors["occurrences_of"] = torch.from_numpy(np.frombuffer(self.names.data, np.uint8).copy())
                tensors["occurrences_at"] = torch.from_numpy(self.names.starts)
        return TrainingCheckpoint(tensors=tensors, state=plain)

    def restore(self, snapshot: TrainingCheckpoint) -> None:
        """Put everything back, bit for bit."""
        tensors, plain = snapshot.tensors, snapshot.state
        self._fits(plain, any(name.startswith("ema.") for name in tensors))
        weights = {name[6:]: t for name, t in tensors.items() if name.startswith("model.")}
        weights |= {name: weights[first] for name, first in plain["aliases"].items()}
        try:
            self.model.load_state_dict(weights, strict=True)
            self.optimizer.load_state_dict(unflatten("optimizer", tensors, plain["optimizer"]))
            if self.scheduler is not None:
                self.scheduler.load_state_dict(unflatten("scheduler", tensors, plain["scheduler"]))
        except (RuntimeError, ValueError, KeyError) as error:
            problem = f"the checkpoint does not fit the model or the optimiser: {str(error).splitlines()[0]}"
            remedy = "give the model and optimiser that the run was begun with, or begin a new run in another folder"
            raise RunError("train.checkpoint-not-of-model", problem, remedy) from error
        if self.ema is not None:
            self.ema.load({name[4:]: t for name, t in tensors.items() if name.startswith("ema.")})
        if "occurrences" in tensors:
            self.counts = self._counted(tensors)
        for name, state in plain["filters"].items():
            self.filters[name] = type(self.filters[name]).from_state(state)
        if self.adaptation is not None and plain["adaptation"] is not None:
            if plain["adaptation"]["plan"] == self.adaptation.declared.digest():
                self.adaptation.load_state(plain["adaptation"]["state"])
            else:
                self.notes.append("the plan changed: what its rules had learned is forgotten")
        self.segments, self.step = plain["segments"], plain["step"]
        self.evaluations = list(plain["evaluations"])
        self.notes[:] = [*plain["notes"], *(note for note in self.notes if note not in plain["notes"])]

    def _counted(self, tensors: Mapping[str, Tensor]) -> NDArray[np.uint32]:
        """Occurrences by row. Admitted again, contributions may have other rows: they are found by name."""
        counts = tensors["occurrences"].numpy().view(np.uint32).copy()
        if self.names is None or "occurrences_of" not in tensors:
            return counts
        before = PackedTexts.packed(tensors["occurrences_of"].numpy().tobytes(), tensors["occurrences_at"].numpy())
        if (before.data, before.starts.tolist()) == (self.names.data, self.names.starts.tolist()):
            return counts
        rows = before.find(self.names)
        return np.array([counts[rows[one]] if one in rows else 0 for one in self.names], dtype=np.uint32)

    def _fits(self, plain: Mapping[str, Any], averaged: bool) -> None:
        pairs = (
            ("a moving average", self.ema is not None, averaged),
            ("a scheduler", self.scheduler is not None, "scheduler" in plain),
        )
        for name, given, kept in pairs:
            if given != kept:
                problem = f"the run was begun {'with' if kept else 'without'} {name}, the trainer has {'one' if given else 'none'}"
                remedy = "use what the run was begun with, or begin a new run in another folder"
                raise RunError("train.checkpoint-not-of-trainer", problem, remedy)
        allowed = {name: _filter_terms(_filter_state(f)) for name, f in self.filters.items()}
        at_first = {name: _filter_terms(state) for name, state in plain["filters"].items()}
        if allowed != at_first:
            problem = f"filters are {allowed or 'not given'}, and were {at_first or 'not given'} when the run began"
            remedy = "keep them for the whole run: another filter would not know what was spent before"
            raise RunError("train.filters-changed", problem, remedy)


def _filter_terms(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a filter allows, without what it has spent."""
    return {name: value for name, value in state.items() if name != "spent"}


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Without the step counters' objects: what a scheduler would save."""
    return {name: value for name, value in scheduler.state_dict().items() if not callable(value)}


def _weights_and_aliases(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's tensors by name, and the names that are second names of another one (tied weights)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            problem = f"the model's state '{name}' is a {type(value).__name__}, not a tensor"
            remedy = "checkpoints hold tensors only: register it as a buffer, or leave it out of the state"
            raise RunError("train.model-state-not-tensor", problem, remedy)
        memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and memory in seen:
            aliases[name] = seen[memory]
        else:
            seen[memory] = name
            tensors[f"model.{name}"] = value
    return tensors, aliases


def _filter_state(filter_: PrivacyFilter) -> dict[str, Any]:
    if not hasattr(filter_, "to_state"):
        problem = f"the filter is a {type(filter_).__name__}, which a checkpoint cannot hold"
        raise RunError("train.filter-without-state", problem, "use lamina.account.GaussianFilter or RenyiFilter")
    return dict(filter_.to_state())
