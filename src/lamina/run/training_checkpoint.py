"""Training checkpoints: everything that training changes, in one verified safetensors file after each segment."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import os
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina import cbor
from lamina.account.filters import PrivacyFilter
from lamina.admit.rows import PackedTexts
from lamina.engine.distributed import is_sharded, shard_like, whole_tensor
from lamina.errors import EncodingError, RunError, StorageError
from lamina.run.run_files import make_folder, remove_temporary_files, replacing, storage_error, sync_folder, write_all
from lamina.validate import number

if TYPE_CHECKING:
    from lamina.engine.execute.compiled import CompiledExecutor
    from lamina.engine.noise.mechanism import NoiseMechanism
    from lamina.engine.rules.adaptation import Adaptation
    from lamina.plan.step_plan import StepPlan

# **State.** Nested state, such as `optimizer.state_dict()`, becomes flat tensors and a tree that CBOR can carry, bit for
# bit. In the tree a scalar stands for itself, and everything else is a list that begins with its kind:
#
#     ["d", key, value, …] a dict, in order      ["l", …] a list      ["t", …] a tuple
#     ["o", key, value, …] an OrderedDict        ["c", key, value, …] a Counter
#     ["x", name] a tensor                       ["n", dtype, bytes] a numpy scalar
#
# `unflatten(prefix, *flatten(prefix, tree))` equals the tree: types, order of keys, the sign of zero, and which leaves
# are one and the same tensor. Gradients, devices and strides are not kept (tensors come back contiguous). Anything else
# (a function, an array, NaN, an integer beyond 64 bits) is refused.
#
# **File.** Every byte of `checkpoint/000007.safetensors`, the state after 7 closed segments, is accounted for.
#
#     tensors     by name, C order, in falling order of element size, then by name; names that share memory once
#     metadata    "lamina": base64 of CBOR {"format", "index", "alias", "state"}
#                 "digest": SHA-256 over that CBOR and, in order of names, (name, dtype, shape, bytes) of each tensor
#
# A file is read back only if its header is the very one that its own content gets and its content has its digest. The
# digest shows damage and mix-ups; it is no signature. It is the checkpoint's identity: AttemptOpened names the one that
# it starts from, AttemptClosed the one that it leaves. The library's own writer is not used: it renames before the data
# is durable, and a kill leaves its temporary file under a name that cannot be told from anybody else's. Its reader is.

_MAPS: dict[str, type[Any]] = {"d": dict, "o": OrderedDict, "c": Counter}
_LISTS: dict[str, type[Any]] = {"l": list, "t": tuple}
_CODE_OF_TYPE = {kind: code for code, kind in (_MAPS | _LISTS).items()}
_NUMPY_SCALAR = re.compile("[<>|][biufc][0-9]{1,2}")  # numpy types whose bytes are their whole value


def flatten(prefix: str, tree: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of `tree`, named by their path under `prefix`, and the rest of it. Tensors are not copied."""
    writer = _StateWriter()
    try:
        plain = writer.node(tree, prefix)
    except RecursionError:
        remedy = "a state that contains itself cannot be saved"
        raise RunError("train.state-too-deep", f"the state {prefix!r} is nested too deep", remedy) from None
    return writer.tensors, plain


def unflatten(prefix: str, tensors: Mapping[str, Tensor], plain: Any) -> Any:
    """The tree that `flatten` was given. Tensors are not copied."""
    try:
        return _read_node(tensors, plain)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"the state {prefix!r} of a checkpoint holds what is never written: {error}"
        remedy = "read it with the version that wrote it"
        raise StorageError("train.checkpoint-state-malformed", problem, remedy) from None


class _StateWriter:
    """Walks over a tree: a node becomes its plain form, and its tensors are collected."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}  # by id: the tree keeps its tensors alive during the walk

    def node(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return ["x", self._name(value, path)]
        code = _CODE_OF_TYPE.get(type(value))
        if code in _MAPS:
            items: list[Any] = [code]
            for key, entry in value.items():
                items += [_encode_scalar(key, f"a key of {path}"), self.node(entry, f"{path}/{key}")]
            return items
        if code is not None:
            return [code, *(self.node(entry, f"{path}/{i}") for i, entry in enumerate(value))]
        return _encode_scalar(value, path)

    def _name(self, tensor: Tensor, path: str) -> str:
        """A tensor's own name; the same tensor at two places of the tree is one tensor in the file."""
        if id(tensor) not in self._names:
            name, again = path, 0
            while name in self.tensors:  # the keys 0 and "0" make the same path
                again += 1
                name = f"{path}~{again}"
            self.tensors[name] = tensor.detach()
            self._names[id(tensor)] = name
        return self._names[id(tensor)]


def _encode_scalar(value: Any, path: str) -> Any:
    kind = type(value)
    what = f"of type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
    if kind is int and not -(1 << 64) <= value < 1 << 64:
        what = "an integer beyond 64 bits"
    elif kind is float and math.isnan(value):
        what = "NaN"
    elif value is None or kind in (bool, str, bytes, int, float):
        return value
    elif isinstance(value, np.generic) and _NUMPY_SCALAR.fullmatch(value.dtype.str):
        return ["n", value.dtype.str, value.tobytes()]
    remedy = "keep numbers, text, tensors, lists, tuples and dicts in the state (an array: torch.from_numpy)"
    raise RunError("train.state-type-unsupported", f"{path} is {what}, which a checkpoint cannot hold", remedy)


def _read_node(tensors: Mapping[str, Tensor], plain: Any) -> Any:
    if not isinstance(plain, list) or plain[:1] == ["n"]:
        return _decode_scalar(plain)
    code, *rest = plain
    if code == "x":
        (name,) = rest
        return tensors[name]
    if code in _MAPS:
        entries = (_read_node(tensors, entry) for entry in rest[1::2])
        return _MAPS[code](dict(zip(map(_decode_scalar, rest[::2]), entries, strict=True)))
    return _LISTS[code](_read_node(tensors, entry) for entry in rest)


def _decode_scalar(plain: Any) -> Any:
    if not isinstance(plain, list | dict):
        return plain
    code, name, packed = plain
    if code != "n" or not _NUMPY_SCALAR.fullmatch(name):
        raise ValueError(f"a scalar of kind {code!r}")
    (value,) = np.frombuffer(packed, dtype=np.dtype(name))
    return value


CHECKPOINT_FORMAT = 2
_BODY_LIMIT = 1 << 25  # bytes of CBOR; in base64 half of what the library's reader takes as a header
_HEADER_LIMIT = 100_000_000
_DEPTH = 100
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointArchive:
    """What goes into a file: each memory once, names that share one in `alias`, and the CBOR of the state."""

    tensors: dict[str, Tensor]
    body: bytes

    @classmethod
    def of(cls, index: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> CheckpointArchive:
        stored: dict[str, Tensor] = {}
        alias: dict[str, str] = {}
        seen: dict[tuple[Any, ...], str] = {}
        for name, tensor in tensors.items():
            plain = _dense_tensor(name, tensor)
            view = (plain.shape, plain.stride(), plain.is_conj(), plain.is_neg())
            memory = (plain.device, plain.data_ptr(), plain.dtype, *view)  # names that agree in it are one tensor
            first = seen.setdefault(memory, name) if plain.numel() else name
            if first == name:
                stored[name] = plain
            else:
                alias[name] = first
        content = {"format": CHECKPOINT_FORMAT, "index": index, "alias": alias, "state": dict(state)}
        try:
            body = cbor.encode(content, floats=True, null=True, max_depth=_DEPTH, max_size=_BODY_LIMIT)
        except EncodingError as error:
            problem = f"the state cannot be saved: {error.problem}"
            raise RunError("train.state-not-encodable", problem, error.remedy) from None
        return cls(tensors=stored, body=body)

    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header(bytes(32))) + sum(map(_tensor_size, self.tensors.values()))

    def header(self, digest: bytes) -> bytes:
        text = {"lamina": base64.b64encode(self.body).decode("ascii"), "digest": digest.hex()}
        table: dict[str, Any] = {"__metadata__": text}
        at = 0
        for name in self._order():
            tensor = self.tensors[name]
            span = [at, at := at + _tensor_size(tensor)]
            table[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        packed = json.dumps(table, separators=(",", ":")).encode("ascii")
        packed += b" " * (-len(packed) % 8)
        if len(packed) > _HEADER_LIMIT:
            problem = f"the header of the checkpoint takes {len(packed)} bytes, at most {_HEADER_LIMIT}"
            raise RunError("train.checkpoint-header-too-large", problem, "keep less state")
        return struct.pack("<Q", len(packed)) + packed

    def data(self) -> Iterator[memoryview]:
        """The tensors' bytes as they lie in the file; at most one tensor is copied at a time."""
        return (tensor_bytes(self.tensors[name]) for name in self._order())

    def digest(self) -> bytes:
        """Injective: each part has its length before it, or its shape and dtype, which give the length."""
        total = hashlib.sha256(b"lamina/checkpoint/1" + struct.pack(">Q", len(self.body)) + self.body)
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            facts = cbor.encode([name, _DTYPES[tensor.dtype], list(tensor.shape)], max_size=_BODY_LIMIT)
            total.update(struct.pack(">Q", len(facts)) + facts)
            total.update(tensor_bytes(tensor))
        return total.digest()

    def _order(self) -> list[str]:
        """Large elements first, so that every tensor is aligned to its own."""
        return sorted(self.tensors, key=lambda name: (-self.tensors[name].element_size(), name))


def _read_file(path: Path) -> tuple[int, TrainingCheckpoint, bytes]:
    """Index, content and digest of a file, all verified."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(8)
        length = int.from_bytes(raw, "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise _damaged(path, f"its header takes {length} bytes by bytes 0 to 8, the file has {size}")
        raw += file.read(length)
    try:
        # Read, not mapped: a mapped file that somebody cuts later would kill the process.
        with safe_open(path, framework="pt", backend="pread") as archive:
            metadata = archive.metadata() or {}
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
        body = base64.b64decode(metadata["lamina"], validate=True)
        digest = bytes.fromhex(metadata["digest"])
        content = decode_body(body)
    except OSError:
        raise
    except Exception as error:  # whatever a library says about bytes that nobody wrote
        raise _damaged(path, f"its header, bytes 0 to {len(raw)}, does not read ({error})") from None
    if isinstance(content, dict) and type(found := content.get("format")) is int and found != CHECKPOINT_FORMAT:
        problem = f"the checkpoint {path} has format {found}, this version of Lamina reads {CHECKPOINT_FORMAT}"
        raise StorageError("train.checkpoint-format-unknown", problem, "resume with the version that wrote it")
    whole = CheckpointArchive(tensors=tensors, body=body)
    if any(tensor.dtype not in _DTYPES for tensor in tensors.values()) or whole.header(digest) != raw:
        raise _damaged(path, f"its header, bytes 0 to {len(raw)}, is not the one that was written")
    if whole.digest() != digest:
        raise _damaged(path, f"its tensors, from byte {len(raw)} on, or its state do not match its digest")
    shape = {"format": int, "index": int, "alias": dict, "state": dict}
    if not isinstance(content, dict) or {key: type(value) for key, value in content.items()} != shape:
        raise _damaged(path, "its state has other fields than this version writes")
    for name, same in content["alias"].items():
        if name in tensors or not isinstance(same, str) or same not in tensors:
            raise _damaged(path, f"tensor {name!r} should be the same as {same!r}, which cannot be")
    tensors |= {name: tensors[same] for name, same in content["alias"].items()}
    return content["index"], TrainingCheckpoint(tensors=tensors, state=content["state"]), digest


def decode_body(body: bytes) -> Any:
    """The CBOR of an archive."""
    return cbor.decode(body, floats=True, null=True, max_depth=_DEPTH, max_size=_BODY_LIMIT)


def torch_dtype(name: str) -> torch.dtype:
    """torch.float32 for "torch.float32"; only types that a checkpoint holds."""
    return next(dtype for dtype in _DTYPES if str(dtype) == name)


def _damaged(path: Path, how: str) -> StorageError:
    problem = f"the checkpoint {path} is damaged: {how}"
    remedy = "restore it from a backup; or remove it, and steps since the one before are done and charged again"
    return StorageError("train.checkpoint-damaged", problem, remedy)


def _dense_tensor(name: str, tensor: Tensor) -> Tensor:
    """A tensor as memory: without autograd, and refused by name if it has no plain bytes."""
    plain = tensor.detach()
    problem = ""
    if name == "__metadata__" or not name.isprintable():
        problem = "a name that the format does not allow"
    elif plain.layout != torch.strided or plain.device.type == "meta" or type(plain) is not Tensor:
        problem = f"the form {type(plain).__name__} on {plain.device} with layout {plain.layout}"
    elif plain.dtype not in _DTYPES:
        problem = f"dtype {plain.dtype}"
    if problem:
        problem = f"tensor {name!r} has {problem}, which a checkpoint cannot hold"
        raise RunError("train.tensor-unsupported", problem, "convert it to a dense tensor of a common dtype")
    return plain


def _tensor_size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in C order: a view where it lies so already, a copy of this one otherwise."""
    if not tensor.numel():
        return memoryview(b"")
    dense = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous with any stride, so the stride is given anew.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


_FILE_NAME = re.compile(r"[0-9]{6,18}\.safetensors")
_SPACE_FACTOR = 1.1  # free space asked for, in units of the checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCheckpoint:
    """What a checkpoint holds: named tensors, and a state of plain values (`flatten` makes it plain)."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def weights_file(self) -> bytes:
        """Return the bytes of model.safetensors: the tensors of the model as the run publishes them."""
        whole = {name.removeprefix("model."): t for name, t in self.tensors.items() if name.startswith("model.")}
        return save({name: t.detach().clone().contiguous() for name, t in whole.items()}, metadata={"format": "pt"})


class TrainingCheckpoints:
    """The checkpoints of one run. For the holder of its lease: making it clears what a killed writer left."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        make_folder(self.folder)
        remove_temporary_files(self.folder)

    def path(self, index: int) -> Path:
        return self.folder / f"{index:06d}.safetensors"

    def indices(self) -> list[int]:
        """The checkpoints that are there, oldest first."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise storage_error(error, f"cannot read the folder {self.folder}", "nothing changed") from None
        found = {int(name.partition(".")[0]) for name in names if _FILE_NAME.fullmatch(name)}
        return sorted(index for index in found if self.path(index).name in names)

    def save(self, index: int, snapshot: TrainingCheckpoint) -> bytes:
        """Write a checkpoint, durably, and return its digest; on StorageError what was there is untouched.

        The tensors are read while it writes: nothing may step the model meanwhile.
        """
        assert index >= 0
        archive = CheckpointArchive.of(index, snapshot.tensors, snapshot.state)
        digest = archive.digest()
        with replacing(self.path(index)) as file:
            write_all(file, archive.header(digest))
            for part in archive.data():
                write_all(file, part)
        return digest

    def load(self, index: int) -> tuple[TrainingCheckpoint, bytes]:
        """A checkpoint and its digest, every byte of it verified; tensors come to the CPU, contiguous."""
        path = self.path(index)
        try:
            found, snapshot, digest = _read_file(path)
        except FileNotFoundError:
            have = ", ".join(map(str, self.indices())) or "none"
            problem = f"there is no checkpoint {path}"
            raise StorageError("train.checkpoint-missing", problem, f"it has {have}") from None
        except OSError as error:
            raise storage_error(error, f"cannot read the checkpoint {path}", "it is as it was") from None
        if found != index:
            problem = f"the file {path} holds checkpoint {found}, its name says {index}"
            remedy = "give the files of this folder their names back"
            raise StorageError("train.checkpoint-misnamed", problem, remedy)
        return snapshot, digest

    def prune(self, keep: int = 2) -> None:
        """Remove all but the newest `keep` checkpoints."""
        assert keep >= 1
        self.remove(*self.indices()[:-keep])

    def remove(self, *indices: int) -> None:
        try:
            for index in indices:
                os.unlink(self.path(index))
        except OSError as error:
            kept = "the others are untouched"
            raise storage_error(error, f"cannot remove a checkpoint in {self.folder}", kept) from None
        if indices:
            sync_folder(self.folder)

    def room(self, snapshot: TrainingCheckpoint) -> None:
        """Refuse a disk without room for such a checkpoint, before anything is spent."""
        needed = int(CheckpointArchive.of(0, snapshot.tensors, snapshot.state).size() * _SPACE_FACTOR) + 1
        try:
            facts = os.statvfs(self.folder)
        except OSError as error:
            raise storage_error(error, f"cannot read the free space of {self.folder}", "nothing was spent") from None
        free = facts.f_bavail * facts.f_frsize
        if free < needed:
            problem = f"{self.folder} has {free / 1e6:.1f} MB free, a checkpoint needs {needed / 1e6:.1f} MB"
            remedy = "free space on this disk, or give another folder; nothing was spent"
            raise StorageError("train.disk-full", problem, remedy)


class MovingAverage:
    """average <- d · average + (1 - d) · weights, after every step t = 0, 1, …, over every trainable tensor.

    d = min(decay, (1 + t)/(10 + t)): a short run is averaged over its last tenth, and not over its first weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        number(RunError, "train.ema-out-of-range", above=0, below=1, remedy="for example ema=0.999", ema=decay)
        self.decay = decay
        self._live = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        live, decay = [p.detach() for p in self._live.values()], min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.values()), live, 1.0 - decay)  # one call for all tensors

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
    `adaptation`, what the plan's rules have learned from noised gradients; `programs`, the versions whose steps are in
    the weights, as `RunEnd` has them.
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
    programs: list[dict[int, Any]] = field(default_factory=list)
    adaptation: Adaptation | None = None
    mechanism: NoiseMechanism | None = None  # what the noise of the next steps follows from. Secret
    compiled: CompiledExecutor | None = None  # which code takes steps
    names: PackedTexts | None = None  # whose occurrences are counted, where rows may be others after a resume
    before_capture: Callable[[], None] = field(default=lambda: None)  # tells other ranks to take part in it
    restored: TrainingCheckpoint | None = None  # until the other ranks have it too
    given: list[dict[str, Any]] = field(init=False)  # the optimiser's settings as the caller gave them
    given_schedule: Any = field(init=False)

    def __post_init__(self) -> None:
        state = {} if self.scheduler is None else self.scheduler.state_dict()  # without the step counters' objects:
        plain = {name: value for name, value in state.items() if not callable(value)}
        self.given_schedule = None if self.scheduler is None else copy.deepcopy(plain)
        groups = self.optimizer.param_groups
        self.given = [{name: value for name, value in group.items() if name != "params"} for group in groups]

    @property
    def optimizer_figures(self) -> dict[str, Any]:
        """Return the optimiser, the learning rate of each group and the whole schedule before the first step."""
        rates = [float(group.get("initial_lr", group["lr"])) for group in self.given]
        figures = {"name": type(self.optimizer).__name__, "lr": rates, "scheduler": None}
        if self.scheduler is None:
            return figures
        plain = {k: v for k, v in self.given_schedule.items() if isinstance(v, bool | int | float | str)}
        terms = {k: v for k, v in plain.items() if not k.startswith("_") and k not in ("base_lrs", "last_epoch")}
        return figures | {"scheduler": type(self.scheduler).__name__, "schedule": terms}

    @property
    def optimizer_text(self) -> str:
        """Return `optimizer_figures` as ASCII text of at most 256 characters, for the ledger."""
        found = self.optimizer_figures
        terms = ", ".join(f"{name}={value}" for name, value in found.get("schedule", {}).items())
        schedule = "" if found["scheduler"] is None else f", {found['scheduler']}({terms})"
        text = f"{found['name']}, rate {', '.join(map(str, dict.fromkeys(found['lr'])))}{schedule}"
        return text.encode("ascii", "backslashreplace").decode()[:256]

    @property
    def factor(self) -> float:
        """What the noise of the next segment is multiplied by under an adaptive budget; 1 otherwise."""
        return 1.0 if self.adaptation is None else self.adaptation.proposed_factor

    def noise(self, plan: StepPlan) -> tuple[float, ...]:
        """S per layer at the next step: the plan's, or as its rules have moved it by what was released."""
        if self.adaptation is None:
            return plan.noise
        return tuple(s * (self.factor / self.adaptation.factor) for s in self.adaptation.applied.noise)

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
        """Weights, optimiser, scheduler, average, filters, counters; `header` says whose they are.

        What is divided over ranks (`fully_shard`) becomes whole: every rank takes part, by `take_part_in_capture`.
        """
        self.before_capture()
        tensors = {name: whole_tensor(t) for name, t in _weights(self.model).items()}
        optimizer, optimizer_plain = flatten("optimizer", _each_tensor(whole_tensor, self.optimizer.state_dict()))
        tensors |= optimizer
        plain: dict[str, Any] = {
            **header,
            "optimizer": optimizer_plain,
            "segments": self.segments,
            "step": self.step,
            "evaluations": self.evaluations,
            "notes": self.notes,
            "programs": self.programs,
            "filters": {name: _filter_state(f) for name, f in self.filters.items()},
            "adaptation": None,
        }
        if self.adaptation is not None:
            declared = self.adaptation.declared.digest()
            plain["adaptation"] = {"plan": declared, "state": self.adaptation.to_state()}
        if self.compiled is not None:
            plain["compiled"] = self.compiled.to_state()
        if self.mechanism is not None:
            noise, plain["noise"] = self.mechanism.to_state()
            tensors |= {f"noise.{name}": t for name, t in noise.items()}
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

    def whole(self) -> TrainingCheckpoint:
        """As `capture`; where the model is sharded and was restored just now, from the file: other ranks have no state yet."""
        snapshot, self.restored = self.restored, None
        if snapshot is None or not any(is_sharded(p) for group in self.optimizer.param_groups for p in group["params"]):
            return self.capture({})
        optimizer = unflatten("optimizer", snapshot.tensors, snapshot.state["optimizer"])
        optimizer["param_groups"] = self.optimizer.state_dict()["param_groups"]  # as they are given now
        found, plain = flatten("optimizer", optimizer)
        others = {name: t for name, t in snapshot.tensors.items() if not name.startswith("optimizer/")}
        return TrainingCheckpoint(tensors={**others, **found}, state={**snapshot.state, "optimizer": plain})

    def take_part_in_capture(self) -> None:
        """Give this rank's parts to the rank that captures, one tensor after another; nothing is kept here."""
        for tensor in _weights(self.model).values():
            whole_tensor(tensor)
        _each_tensor(lambda t: whole_tensor(t)[:0] if is_sharded(t) else t, self.optimizer.state_dict())

    def restore(self, snapshot: TrainingCheckpoint) -> None:
        """Put everything back, bit for bit."""
        self.restored = snapshot
        tensors, plain = snapshot.tensors, snapshot.state
        self._fits(plain, any(name.startswith("ema.") for name in tensors))
        weights = {name[6:]: t for name, t in tensors.items() if name.startswith("model.")}
        try:
            held = self.model.state_dict()
            mine = {name: shard_like(t, held.get(name)) for name, t in weights.items()}
            self.model.load_state_dict(mine, strict=True)
            self.optimizer.load_state_dict(self._divided(unflatten("optimizer", tensors, plain["optimizer"])))
            if self.scheduler is not None:
                self.scheduler.load_state_dict(unflatten("scheduler", tensors, plain["scheduler"]))
        except (RuntimeError, ValueError, KeyError) as error:
            problem = f"the checkpoint does not fit the optimiser or the schedule: {str(error).splitlines()[0]}"
            if differing := _first_difference(weights, self.model.state_dict()):
                problem = f"the model is not the one that the run was begun with: {differing}"
            remedy = "give the model and optimiser that the run was begun with, or begin a new run in another folder"
            raise RunError("train.checkpoint-not-of-model", problem, remedy) from None
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
        if self.compiled is not None and "compiled" in plain:
            self.compiled.load_state(plain["compiled"])
        noise = {name[6:]: t for name, t in tensors.items() if name.startswith("noise.")}
        if self.mechanism is not None and not self.mechanism.load(noise, plain.get("noise")):
            changed = "the plan or the contributions changed"
            self.notes.append(f"{changed}: its noise is not correlated with that of the steps before")
        self.segments, self.step = plain["segments"], plain["step"]
        self.evaluations, self.programs = list(plain["evaluations"]), list(plain.get("programs", ()))
        self.notes[:] = [*plain["notes"], *(note for note in self.notes if note not in plain["notes"])]

    def _divided(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """The state of an optimiser, divided over the ranks as its parameters are."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not any(map(is_sharded, parameters)):
            return optimizer
        for i, state in optimizer["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameters[i].shape:
                    state[name] = shard_like(value, parameters[i])
        return optimizer

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


def _each_tensor(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with a function applied to the tensors in it; dicts and lists keep their types and order."""
    if isinstance(tree, dict):
        return type(tree)((key, _each_tensor(function, value)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_each_tensor(function, value) for value in tree)
    return function(tree) if isinstance(tree, Tensor) else tree


def _filter_terms(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a filter allows, without what it has spent."""
    return {name: value for name, value in state.items() if name != "spent"}


def _first_difference(saved: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> str | None:
    """The first tensor that only one of the two has, or that has another shape."""
    for name in dict.fromkeys((*now, *saved)):
        then, here = (f"has shape {tuple(found[name].shape)}" if name in found else "is not" for found in (saved, now))
        if then != here:
            return f"'{name}' {then} in the checkpoint and {here} in the model"
    return None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by name."""
    found = model.state_dict()
    for name, value in found.items():
        if not isinstance(value, Tensor):
            problem = f"the model's state '{name}' is a {type(value).__name__}, not a tensor"
            remedy = "checkpoints hold tensors only: register it as a buffer, or leave it out of the state"
            raise RunError("train.model-state-not-tensor", problem, remedy)
    return {f"model.{name}": value for name, value in found.items()}


def _filter_state(filter_: PrivacyFilter) -> dict[str, Any]:
    if not hasattr(filter_, "to_state"):
        problem = f"the filter is a {type(filter_).__name__}, which a checkpoint cannot hold"
        raise RunError("train.filter-without-state", problem, "use lamina.account.GaussianFilter or RenyiFilter")
    return dict(filter_.to_state())
