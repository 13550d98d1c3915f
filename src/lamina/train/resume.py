"""Decides whether an open segment is finished, replayed or redone, and fingerprints what this depends on.

Same noise on another batch gives the difference away; fresh noise on the same step is a second release. So a segment
that never reached its checkpoint is *replayed*, seed and all, if nothing that its outcome depends on has changed: it is
then the same random variable, charged once. Otherwise it is *redone* as a new generation with a fresh seed, and charged
again; the old charge stays. docs/runs.md has the protocol.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import platform
import secrets
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina.train.journal import AttemptOpened

_MAX_DEPTH = 64
_INSTALLED_PATHS = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_IGNORED_ATTRIBUTES = {"training", "forward"}  # of a module: the trainer's and the engine's, not the user's
_PLAIN_TYPES = (bool, int, str, bytes, complex, PurePath, enum.Enum, torch.dtype, torch.device, torch.Size, range)


class CodeFingerprint:
    """Describes values as text. What cannot be described (a generator, a handle) becomes random: nothing equals it."""

    def __init__(self) -> None:
        self.values = True  # of a module's tensors, too
        self._parts: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # an id names an object only while it lives

    def text(self) -> str:
        return "\n".join(self._parts)

    def feed(self, value: Any) -> None:
        self._parts.append(self.describe(value))

    def describe(self, value: Any, depth: int = 0) -> str:
        if value is None or isinstance(value, _PLAIN_TYPES):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, float):
            return f"float:{value.hex()}"
        if depth > _MAX_DEPTH:
            return self._unknown(value)
        if isinstance(value, Tensor):
            return self._array(str(value.dtype), value.shape, value.detach().cpu().contiguous())
        if isinstance(value, np.ndarray | np.generic):
            return self._array(str(value.dtype), np.shape(value), np.ascontiguousarray(value))
        if id(value) in self._seen:
            return f"again:{self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._compound(value, depth + 1)

    def _compound(self, value: Any, depth: int) -> str:
        if isinstance(value, Mapping):
            return self._join("map", (f"{self.describe(k, depth)}={self.describe(v, depth)}" for k, v in value.items()))
        if isinstance(value, list | tuple):
            return self._join(type(value).__name__, (self.describe(v, depth) for v in value))
        if isinstance(value, set | frozenset):
            return self._join("set", sorted(self.describe(v, depth) for v in value))
        if isinstance(value, nn.Module):
            return self._module(value, depth)
        if isinstance(value, functools.partial):
            return self._join("partial", (self.describe(v, depth) for v in (value.func, value.args, value.keywords)))
        if isinstance(value, MethodType):
            return self._join("method", (self.describe(value.__func__, depth), self.describe(value.__self__, depth)))
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, CodeType):
            return self._code(value, depth)
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, ModuleType | BuiltinFunctionType):
            return f"{type(value).__name__}:{value.__name__}"
        if hasattr(value, "__dict__") and not isinstance(value, torch.Generator | np.random.Generator):
            return self._join("object", (self.kind(type(value)), self.describe(vars(value), depth)))
        return self._unknown(value)

    def kind(self, kind: type) -> str:
        """A class by its name and, unless it comes from a library that a version stands for, its methods' code."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        if (release := _package_version(kind.__module__)) is not None:
            return f"class:{name} of {release}"
        if id(kind) in self._seen:
            return f"class:{name}"
        self._seen[id(kind)] = len(self._seen)
        self._kept.append(kind)
        bases = [self.kind(base) for base in kind.__bases__]
        members = sorted(vars(kind).items())
        code = [f"{n}={self.describe(m, 1)}" for n, m in members if isinstance(m, FunctionType)]
        values = [(n, m) for n, m in members if isinstance(m, (*_PLAIN_TYPES, float)) and n[:2] != "__"]
        plain = [f"{n}={self.describe(m, 1)}" for n, m in values]
        return self._join(f"class:{name}", [*bases, *code, *plain])

    def _module(self, module: nn.Module, depth: int) -> str:
        parts = [self.kind(type(module)), module.extra_repr()]
        skipped = set(vars(nn.Module())) | _IGNORED_ATTRIBUTES
        parts += [f"{n}={self.describe(v, depth)}" for n, v in sorted(vars(module).items()) if n not in skipped]
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                parts.append(f"{name}:{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}")
                if self.values:
                    parts.append(self.describe(tensor, depth))
        parts += [f"{name}->{self.describe(child, depth)}" for name, child in module._modules.items()]
        return self._join("module", parts)

    def _function(self, function: FunctionType, depth: int) -> str:
        if (release := _package_version(function.__module__)) is not None:
            return f"function:{function.__module__}.{function.__qualname__} of {release}"
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.describe(cell.cell_contents, depth))
            except ValueError:  # not filled yet
                cells.append("empty")
        defaults = (self.describe(part, depth) for part in (function.__defaults__, function.__kwdefaults__))
        parts = (self._code(function.__code__, depth), *defaults, *cells, *self._globals(function, depth))
        return self._join(f"function:{function.__qualname__}", parts)

    def _globals(self, function: FunctionType, depth: int) -> list[str]:
        """The functions and constants of its module that a function names."""
        found = []
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, (*_PLAIN_TYPES, float, FunctionType, Tensor, np.ndarray)):
                found.append(f"{name}={self.describe(value, depth)}")
        return found

    def _code(self, code: CodeType, depth: int) -> str:
        consts = code.co_consts
        constants = [self._code(c, depth + 1) if isinstance(c, CodeType) else self.describe(c, depth) for c in consts]
        return self._join("code", (code.co_code.hex(), ",".join(code.co_names), *constants))

    def _array(self, dtype: str, shape: Any, value: Any) -> str:
        raw = value.view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) and value.dim() else None
        data = raw if raw is not None else np.asarray(value).tobytes()
        return f"array:{dtype}{tuple(shape)}{hashlib.sha256(data).hexdigest()}"

    def _unknown(self, value: Any) -> str:
        return f"unknown:{type(value).__name__}:{secrets.token_hex(8)}"

    def _join(self, head: str, parts: Any) -> str:
        return f"{head}({'|'.join(f'{len(part)}:{part}' for part in parts)})"


@functools.lru_cache
def _package_version(module: str | None) -> str | None:
    """The version that stands for code which nobody edits: of an installed package; None for the user's own."""
    root = str(module).partition(".")[0]
    if root in sys.builtin_module_names or root in sys.stdlib_module_names:
        return f"python {platform.python_version()}"
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    if root != "lamina" and not file.startswith(_INSTALLED_PATHS):
        return None
    try:
        return f"{root} {metadata.version(root)}"
    except metadata.PackageNotFoundError:
        return f"{root} {getattr(sys.modules[root], '__version__', '')}"


def settings_digest(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, functions: Mapping[str, Any], options: Mapping[str, Any],
    given: Iterable[Mapping[str, Any]], schedule: Any,
) -> bytes:  # fmt: skip
    """SHA-256 over optimiser, scheduler, loss, model and options as given, and over the user's code that they run.

    Functions count by bytecode, defaults, closures and what they are bound to; modules by name, class, attributes,
    methods and the types of their tensors; objects by class and attributes (`CodeFingerprint`). `given` and `schedule` are
    the optimiser's and scheduler's settings before the first step. What none of this can see (a changed library, a file
    that the model reads) is the user's to keep.
    """
    words = CodeFingerprint()
    for part in (
        words.kind(type(optimizer)),
        [dict(group) for group in given],
        None if scheduler is None else [words.kind(type(scheduler)), _scheduler_functions(scheduler), schedule],
        dict(functions),
        model,
        dict(options),
    ):
        words.values = part is not model  # the model's weights are the checkpoint's, and change
        words.feed(part)
    return hashlib.sha256(words.text().encode()).digest()


def _scheduler_functions(scheduler: Any) -> list[Any]:
    """LambdaLR and its kin keep functions that their state leaves out."""
    return [value for name, value in sorted(vars(scheduler).items()) if "lambda" in name or callable(value)]


def code_version() -> str:
    """Versions and processor: sums of floats are the same again only where all of these are."""
    from lamina import __version__

    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"lamina {__version__}; torch {torch.__version__}; numpy {np.__version__}; {processor}"


class ResumeAction(enum.Enum):
    """What resuming a pending segment means."""

    FINISH = "its checkpoint is there: close it"
    REPLAY = "everything matches: the same seed again, nothing is charged"
    REDO = "something changed: a fresh seed, charged again"


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentInputs:
    """All that the outcome of a segment depends on, apart from its seed. Field names are those of `AttemptOpened`."""

    plan: bytes
    settings: bytes
    membership: bytes
    checkpoint: bytes
    data: bytes
    world_size: int
    threads: int
    code: str


_MISMATCH_TEXTS = {
    "plan": "the plan changed",
    "settings": "optimiser, scheduler, loss or options changed",
    "membership": "contributions were added or withdrawn",
    "checkpoint": "the segment began at another checkpoint",
    "data": "the data changed",
    "world_size": "the number of ranks changed",
    "threads": "the number of threads changed",
    "code": "the version of the program or the kind of processor changed",
}


def replay_mismatches(
    pending: AttemptOpened, facts: SegmentInputs, *, copied: bool, abandoned: bool = False
) -> tuple[str, ...]:
    """Why a pending segment cannot be replayed. Empty if it can."""
    found = [_MISMATCH_TEXTS[f.name] for f in fields(facts) if getattr(pending, f.name) != getattr(facts, f.name)]
    if copied:
        found.append("the run's folder was copied or restored from a copy")
    if abandoned:
        found.append("the ledger records them as abandoned")
    if not pending.seed:
        found.append("their seed was erased")
    return tuple(found)


def decide_resume(
    pending: AttemptOpened, facts: SegmentInputs, *, newest: int, copied: bool, abandoned: bool = False
) -> tuple[ResumeAction, tuple[str, ...]]:
    """What to do about a pending segment, and why; `newest` counts the closed segments of the newest checkpoint."""
    if newest > pending.segment:
        return ResumeAction.FINISH, ()
    reasons = replay_mismatches(pending, facts, copied=copied, abandoned=abandoned)
    return (ResumeAction.REDO, reasons) if reasons else (ResumeAction.REPLAY, ())
