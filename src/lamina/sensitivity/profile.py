"""Phase 1 of LSAB: what the pre-activations of a model look like on inputs that are no patient's."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from lamina.errors import PlanError
from lamina.sensitivity.example import count
from lamina.sensitivity.graph import Graph, read, trace, traced
from lamina.sensitivity.inputs import clipped, gaussian, given, peek
from lamina.sensitivity.observe import Observer
from lamina.sensitivity.program import Program, export, isolated
from lamina.sensitivity.record import NodeProfile, PreActivation, Profile

__all__ = ["profile", "Profile", "NodeProfile", "PreActivation"]

GAUSSIAN = "gaussian"
_SOURCES = ("public", "simulated")


def profile(
    model: nn.Module,
    *,
    example: Any = None,
    inputs: Any = None,
    proxy: str = GAUSSIAN,
    passes: int = 1000,
    batch: int = 50,
    radius: float = 1.0,
    reinitialise: bool = False,
    seed: int = 0,
    epsilon_n: float = 1e-12,
) -> Profile:
    """Run `passes` proxy inputs through `model`, `batch` at a time, and note the statistics of every operation.

      example       what model(...) accepts, for its shapes only: a tensor, a tuple of arguments or a dict;
                    not needed if `inputs` are given
      inputs        public or simulated inputs: a tensor whose first axis counts patients (or a tuple or dict of
                    such), or an iterable of batches. The profile ends with them if they are fewer than `passes`.
                    Without, inputs are Gaussian, token ids even over the vocabulary
      proxy         where `inputs` come from: 'public' or 'simulated', a remark may follow ("simulated: ECG")
      radius        public L2 radius to which every patient's input is clipped, so that Δ₀ = 2·radius
      reinitialise  draw the weights anew (`reset_parameters` on a copy) before every *batch*: passes/batch
                    initialisations. With batch=1 every pass has its own, as the LSAB document profiles
      epsilon_n     what eq. 8 adds to a variance

    One pass over the stream: memory does not grow with `passes`. Equal arguments give an equal profile. The model
    runs in training mode (dropout included) with BatchNorm in evaluation mode; its weights, buffers and modes and
    torch's generators are left as they were.

    Private data has no place here: what a profile of private inputs says would have to be paid for.
    """
    _check(inputs, proxy, passes, batch, radius, epsilon_n)
    generator = torch.Generator().manual_seed(seed)
    if inputs is not None:
        head, stream = peek(given(inputs, passes, batch))
        graph, size = trace(model, head), count(head)
    elif example is not None:
        graph, program = traced(model, example)
        stream, size = gaussian(example, program, graph, passes, batch, generator), min(batch, passes)
    else:
        raise PlanError(
            "measure.profile-given-neither",
            "profile was given neither example nor inputs",
            "give example=x, an input of the right shape",
        )
    subject = _copied(model) if reinitialise else model
    programs: dict[int, Program] = {}
    observer = Observer(graph, max(1, math.ceil(passes / size)), generator)
    done = drawn = 0
    with isolated(seed):
        for part in stream:
            n = count(part)
            part = clipped(part, radius)
            if n not in programs:
                programs[n] = _program(model, part, graph)
            if reinitialise:
                _reset(subject)
                drawn += 1
            programs[n].run(subject, part, observer)
            done += n
    return Profile(
        model=type(model).__name__,
        proxy=proxy,
        passes=done,
        batch=size,
        initialisations=drawn,
        radius=float(radius),
        seed=seed,
        epsilon_n=float(epsilon_n),
        nodes=observer.results(),
    )


def _check(inputs: Any, proxy: str, passes: int, batch: int, radius: float, epsilon_n: float) -> None:
    for name, value in (("passes", passes), ("batch", batch)):
        if not isinstance(value, int) or value < 1:
            raise PlanError(
                "measure.whole-number-least",
                f"{name} is {value!r}, must be a whole number of at least 1",
                f"for example {name}=50",
            )
    for name, number in (("radius", radius), ("epsilon_n", epsilon_n)):
        if not (math.isfinite(number) and number > 0):
            raise PlanError(
                "measure.finite", f"{name} is {number!r}, must be finite and > 0", f"give a positive {name}"
            )
    source = proxy.partition(":")[0].strip()
    if inputs is None and source != GAUSSIAN:
        raise PlanError(
            "measure.proxy-no-inputs",
            f"proxy is {proxy!r} but there are no inputs",
            "give inputs=…, or proxy='gaussian'",
        )
    if inputs is not None and source not in _SOURCES:
        raise PlanError(
            "measure.inputs-given-proxy",
            f"inputs are given and proxy is {proxy!r}, must be {' or '.join(_SOURCES)}",
            "name where the inputs come from; private data must not be profiled",
        )


def _program(model: nn.Module, part: Any, graph: Graph) -> Program:
    """The model traced at this batch size: the same operations as for one patient, or refused."""
    program = export(model, part)
    found = [(node.name, node.operation) for node in read(model, program)]
    if found != [(node.name, node.operation) for node in graph]:
        raise PlanError(
            "measure.runs-operations-inputs",
            f"{type(model).__name__} runs other operations on {count(part)} inputs than on one",
            "write forward so that it does not ask for the batch size, or profile with batch=1",
        )
    return program


def _copied(model: nn.Module) -> nn.Module:
    try:
        subject = copy.deepcopy(model)
    except Exception as error:
        raise PlanError(
            "measure.not-copied-draw",
            f"{type(model).__name__} cannot be copied to draw its weights anew: {error}",
            "use reinitialise=False",
        ) from error
    for path, module in subject.named_modules():
        if _resetter(module) is None and any(True for _ in module.parameters(recurse=False)):
            raise PlanError(
                "measure.module-parameters-no",
                f"module {path or '(root)'!r} ({type(module).__name__}) has parameters but no reset_parameters()",
                "give it that method, or use reinitialise=False",
            )
    return subject


def _resetter(module: nn.Module) -> Any:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(found := getattr(module, name, None)):
            return found
    return None


def _reset(model: nn.Module) -> None:
    """Children first, so that a parent's rule for its children has the last word."""
    for module in reversed(list(model.modules())):
        if (reset := _resetter(module)) is not None:
            reset()
