"""`CodeFingerprint`: a digest of the settings, code and values that a step depends on, equal in every process.

A segment may be replayed with its seed only if loss, model and options are the same as when it was opened. Values are
therefore compared by content, never by address, `hash()` or `repr`: containers by their items, objects by class and
attributes, functions by bytecode, defaults, closure and the globals that they name. A value without such a description (a
lock, an open file, a random generator) is listed in `unknown` and equals nothing.
"""

from __future__ import annotations

import copyreg
import dis
import enum
import functools
import hashlib
import platform
import random
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib import metadata
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina.run.training_checkpoint import tensor_bytes

_MAX_DEPTH = 64  # levels of nested containers and objects
_MAX_VALUES = 1 << 20
_MAX_ARRAY_BYTES = 1 << 33
_MAX_TEXT = 256  # characters of a description; a longer one is hashed
_INSTALLED_PATHS = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_PYTHON_PATHS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_IGNORED_ATTRIBUTES = {
    *vars(nn.Module()),
    "training",
    "forward",
}  # of a module; set by torch, the trainer or the engine
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_FULLY_SHARD = "__composable_api_state_key"  # attribute that fully_shard sets; its name differs between processes
_OF_PROCESS = "_original_object_hash"  # attribute that transformers sets: a salted hash() of a generation config
_PLAIN_TYPES = frozenset(
    {bool, str, bytes, complex, range, slice, type(None), type(...), type(NotImplemented)}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
_IMMUTABLE = (tuple, frozenset, CodeType)  # Python may share equal objects or not, so identity means nothing
_DRAW_AND_CHANGE = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_BOUND = (BuiltinFunctionType, MethodWrapperType)
_DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType)

_PYTHON = f"python {platform.python_version()}"

_Parts = Iterable[tuple[str, Any]]  # parts of a value, with their names in it: ".x", "['x']"


SettingsFingerprint = tuple[bytes, tuple[str, ...]]  # a digest, and the names of values that it does not cover


def settings_fingerprint(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, functions: Mapping[str, Any], options: Mapping[str, Any],
    given: Iterable[Mapping[str, Any]], schedule: Any,
) -> SettingsFingerprint:  # fmt: skip
    """Return the SHA-256 of optimiser, scheduler, loss, model and options, and of the user's code that they run.

    `given` and `schedule` are the optimiser's and scheduler's settings before the first step. The user
    must keep unchanged what the digest does not cover, such as a library or a file that the model reads.
    """
    schedule = None if scheduler is None else [type(scheduler), _scheduler_functions(scheduler), schedule]
    settings = {"optimizer": [type(optimizer), [dict(group) for group in given]], "scheduler": schedule}
    fingerprint, digest = CodeFingerprint(model), hashlib.sha256()
    for name, value in {**settings, **functions, "options": dict(options), "model": model}.items():
        digest.update(f"{name}={fingerprint.describe(value, name)}\n".encode())
    return digest.digest(), tuple(fingerprint.unknown)


def _scheduler_functions(scheduler: Any) -> list[Any]:
    """Return the functions of schedulers such as LambdaLR, which their state does not contain."""
    return [value for name, value in sorted(vars(scheduler).items()) if "lambda" in name or callable(value)]


class CodeFingerprint:
    """Describes values as text, which is equal in every process and differs for anything that changes a step.

    model    its weights change and are in the checkpoint, so they count by shape and type only
    unknown  values that could not be described, by path: "loss: SETTINGS['file'] (TextIOWrapper)"
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.unknown: list[str] = []
        self._weights: dict[int, str] = {}
        if model is not None:
            named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
            self._weights = {id(tensor): name for name, tensor in named}
        self._seen: dict[int, tuple[int, Any]] = {}  # an id names an object only while it lives
        self._values, self._array_bytes = 0, 0

    def describe(self, value: Any, path: str = "", depth: int = 0) -> str:
        """Return the description of a value; `path` names it in `unknown`."""
        kind = type(value)
        self._values += 1
        if kind in _PLAIN_TYPES:
            return _short(f"{kind.__name__}:{value!r}")
        if kind is int:
            return _short(f"int:{value:x}")
        if kind is float:
            return f"float:{value.hex()}"
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if not isinstance(value, _IMMUTABLE):
            if id(value) in self._seen:
                return f"again:{self._seen[id(value)][0]}"
            self._seen[id(value)] = len(self._seen), value
        if depth > _MAX_DEPTH or self._values > _MAX_VALUES:
            return self._cannot(value, path, "too deep" if depth > _MAX_DEPTH else "too many values")
        try:
            parts = self._parts(value)
            parts = None if parts is None else list(islice(parts, _MAX_VALUES))
        except Exception:  # of any kind: attribute access of a user's object may fail
            parts = None
        if parts is None:
            return self._cannot(value, path)
        elements = value if isinstance(value, set | frozenset) else ()
        texts = sorted(self._element(one, value, path, depth) for one in elements)
        texts += [self.describe(part, path + name, depth + 1) for name, part in parts]
        return _short(f"{kind.__name__}({'|'.join(f'{len(text)}:{text}' for text in texts)})")

    def _cannot(self, value: Any, path: str, why: str = "") -> str:
        name = f"{path.removeprefix('.') or 'a value'} ({type(value).__name__}{why and f', {why}'})"
        if name not in self.unknown:
            self.unknown.append(name)
        return f"unknown:{type(value).__name__}"

    def _tensor(self, value: Tensor, path: str) -> str:
        if (name := self._weights.get(id(value))) is not None:
            return f"weight:{name}:{value.dtype}{tuple(value.shape)}{value.requires_grad}"
        self._array_bytes += value.numel() * value.element_size()
        if self._array_bytes > _MAX_ARRAY_BYTES:
            return self._cannot(value, path, "too large")
        try:
            data = tensor_bytes(value.detach())
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, on the meta device, …
            return self._cannot(value, path)
        kind = f"{value.dtype}{tuple(value.shape)}{value.requires_grad}"
        return f"{type(value).__name__}:{kind}{hashlib.sha256(data).hexdigest()}"

    def _parts(self, value: Any) -> _Parts | None:
        """Return the parts of a compound value in an order that is the same in every process; None if they are unknown."""
        kind = type(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        if kind is dict:
            return _items(value)
        if kind in (list, tuple):
            return _numbered(value)
        if isinstance(value, set | frozenset):
            return [] if kind in (set, frozenset) else [("", kind), *_state(value)]
        if isinstance(value, nn.Module):
            return self._module(value)
        if kind is functools.partial:
            return [(".func", value.func), (".args", value.args), (".keywords", value.keywords), *_attributes(value)]
        if kind is MethodType:
            return [("", value.__func__), (".__self__", value.__self__)]
        if kind is FunctionType:
            return _function(value)
        if kind is CodeType:
            return [("", value.co_code), ("", value.co_names), *(("", one) for one in value.co_consts)]
        if isinstance(value, ModuleType):
            version = _package_version(value.__name__)
            own = () if version is not None else sorted(vars(value).items())
            return [("", value.__name__), ("", version), *((f".{n}", part) for n, part in own if n[:2] != "__")]
        if isinstance(value, type):
            return _class(value)
        if isinstance(value, enum.Enum):
            return [("", kind), ("", value.name), (".value", value.value)]
        if kind in _BOUND:
            owner = value.__self__
            return [("", value.__qualname__), (".__self__", None if isinstance(owner, ModuleType | type) else owner)]
        if kind in _DESCRIPTORS:
            return [("", value.__objclass__), ("", value.__name__)]
        if kind is property:
            return [(".fget", value.fget), (".fset", value.fset), (".fdel", value.fdel)]
        if kind in (staticmethod, classmethod):
            return [("", value.__func__)]
        return _object(value)

    def _element(self, one: Any, inside: Any, path: str, depth: int) -> str:
        """Return the description of one element of a set, independent of elements before it: sets have no order."""
        seen, self._seen = self._seen, {id(inside): (0, inside)}
        try:
            return self.describe(one, path, depth + 1)
        finally:
            self._seen = seen

    def _array(self, value: Any) -> _Parts | None:
        plain = np.asarray(value)
        self._array_bytes += plain.nbytes
        if self._array_bytes > _MAX_ARRAY_BYTES:
            return None
        parts: list[tuple[str, Any]] = [("", str(plain.dtype)), ("", plain.shape), *_state(value)]
        if plain.dtype.hasobject:
            return [*parts, *_numbered(plain.ravel().tolist())]
        return [*parts, ("", hashlib.sha256(np.ascontiguousarray(plain).tobytes()).digest())]

    def _module(self, module: nn.Module) -> _Parts:
        yield "", type(module)
        yield "", module.extra_repr()
        for name, part in sorted(vars(module).items()):
            if name not in _IGNORED_ATTRIBUTES and not name.startswith(_OF_FULLY_SHARD):
                yield "", name
                yield f".{name}", part
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield "", name
            yield f".{name}", tensor
        for name in _HOOKS:
            for hook in getattr(module, name).values():
                if _package_version(getattr(hook, "__module__", None)) is None:
                    yield f".{name}", hook
        for name, child in module._modules.items():
            yield "", name
            yield f".{name}", child


def _short(text: str) -> str:
    """Return the text, or its digest if it is long, so that descriptions stay small."""
    if len(text) <= _MAX_TEXT:
        return text
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _items(value: Mapping[Any, Any]) -> _Parts:
    for key, part in value.items():
        yield "", key
        yield f"[{_short_key(key)}]", part


def _short_key(key: Any) -> str:
    text = repr(key) if type(key) in (str, int, bool) else type(key).__name__
    return text if len(text) <= 40 else f"{text[:37]}…"


def _numbered(values: Iterable[Any]) -> _Parts:
    return ((f"[{i}]", part) for i, part in enumerate(values))


def _function(function: FunctionType) -> _Parts:
    """Yield code, defaults, closure and named globals of a function; for code of a package, its version."""
    yield "", function.__qualname__
    modules: list[tuple[str, ModuleType]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            part = cell.cell_contents
        except ValueError:  # not filled yet
            yield "", "empty"
            continue
        if _is_own_module(part):
            modules.append((name, part))
        else:
            yield f": {name}", part
    version = _package_version(function.__module__)
    if version is not None:
        yield "", (function.__module__, version)
        return
    yield "", function.__code__
    yield " default", function.__defaults__
    yield " default", function.__kwdefaults__
    yield from _attributes(function)
    yield from _globals_read(function, modules)


def _globals_read(function: FunctionType, modules: list[tuple[str, ModuleType]]) -> _Parts:
    """Yield the globals that a function reads, and the attributes that it reads from the user's modules (`settings.RATE`)."""
    loaded, names = _names_in(function.__code__)
    for name in sorted(loaded & function.__globals__.keys()):
        part = function.__globals__[name]
        yield "", name
        if _is_own_module(part):
            modules.append((name, part))
        else:
            yield f": {name}", part
    modules += [(name, sys.modules[name]) for name in sorted(names & sys.modules.keys())]  # imported by the function
    visited: set[int] = set()
    for prefix, module in modules:  # grows inside the loop
        if id(module) in visited or not _is_own_module(module):
            continue
        visited.add(id(module))
        for name in sorted(names & vars(module).keys()):
            part = vars(module)[name]
            yield "", f"{prefix}.{name}"
            if _is_own_module(part):
                modules.append((f"{prefix}.{name}", part))
            else:
                yield f": {prefix}.{name}", part


def _is_own_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and _package_version(value.__name__) is None


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a function and its inner functions load as globals, and all names and texts in them."""
    loaded = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    names = set(code.co_names)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            inner = _names_in(part)
            loaded |= inner[0]
            names |= inner[1]
        elif isinstance(part, str):  # getattr(settings, "RATE")
            names.add(part)
    return frozenset(loaded), frozenset(names)


def _class(cls: type) -> _Parts:
    yield "", (cls.__module__, cls.__qualname__, version := _package_version(cls.__module__))
    if version is None:
        yield "", cls.__bases__
        for name, member in sorted(vars(cls).items()):
            if _counts(name, member):
                yield "", name
                yield f".{name}", member


def _counts(name: str, member: Any) -> bool:
    """Return whether a member of a class affects its objects. Python's own bookkeeping does not."""
    return isinstance(member, FunctionType) or (name[:2] != "__" and name != "_abc_impl")


def _object(value: Any) -> _Parts | None:
    """Return the parts of an object, by class and attributes; None if it has state that attributes do not show.

    `__reduce_ex__` refuses objects with hidden state (locks, files, generators) and returns the content of C containers.
    A user's class may omit something there, so its attributes count as well.
    """
    if isinstance(value, _DRAW_AND_CHANGE):
        return None
    kind = type(value)
    try:
        reducer = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
    except Exception:  # of any kind: the method may be the user's
        return None
    parts: list[tuple[str, Any]] = [("", kind)]
    if isinstance(reduced, str):  # a global name: what it stands for is wrapped, if anywhere
        return [*parts, ("", reduced), ("", getattr(value, "__wrapped__", None))]
    _, args, state, listed, mapped = (*reduced, None, None, None)[:5]
    methods = ("__reduce_ex__", "__reduce__", "__getstate__")
    default = all(getattr(kind, name) is getattr(object, name) for name in methods)
    parts += [] if len(args) == 1 and args[0] is kind else [("", reduced[0]), ("", args)]
    if type(state) is dict:
        state = {name: part for name, part in state.items() if name != _OF_PROCESS}
    parts += [] if default else [("", state)]
    parts += _state(value) if default or _package_version(kind.__module__) is None else []
    parts += [*_numbered(listed or ()), *_items(dict(mapped or ()))]
    return parts


def _state(value: Any) -> _Parts:
    """Yield the attributes of an object, in `__dict__` and in slots."""
    yield from _attributes(value)
    for cls in type(value).__mro__:
        for name, member in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                yield "", name
                yield f".{name}", getattr(value, name)


def _attributes(value: Any) -> _Parts:
    for name, part in getattr(value, "__dict__", {}).items():
        if name != _OF_PROCESS:
            yield "", name
            yield f".{name}", part


@functools.lru_cache
def _package_version(module: str | None) -> str | None:
    """Return the version of the installed package that contains the code; None for the user's own code."""
    root = str(module).partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    if root in sys.stdlib_module_names and (not file or file.startswith(_PYTHON_PATHS)):
        return _PYTHON
    if root != "lamina" and not file.startswith(_INSTALLED_PATHS):
        return None
    try:
        return f"{root} {metadata.version(root)}"
    except metadata.PackageNotFoundError:
        return f"{root} {getattr(sys.modules[root], '__version__', '')}"
