"""One checkpoint as one safetensors file, every byte of which is accounted for.

    tensors     by name, C order, in falling order of element size, then by name
    metadata    "lamina": base64 of CBOR {"format", "index", "alias", "state"}
                "digest": SHA-256 over that CBOR and, in order of names, (name, dtype, shape, bytes) of each tensor

A file is read back only if its header is the very one that its own content gets (so not even a blank of it can
change unseen) and its content has its digest. The digest shows damage and mix-ups; it is no signature.

The library's own writer is not used: it renames before the data is durable, and a kill leaves its temporary file
under a name that cannot be told from anybody else's. Its reader is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lamina import cbor
from lamina.errors import EncodingError, RunError

FORMAT = 1
_BODY_LIMIT = 1 << 25  # bytes of CBOR; in base64 half of what the library's reader takes as a header
_HEADER_LIMIT = 100_000_000
_DEPTH = 100
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Damaged(Exception):
    """A file that is not what was written, and how that shows."""


class OtherFormat(Exception):
    """A file of a format that another version of Lamina writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """What goes into a file: each memory once, names that share one in `alias`, and the CBOR of the state."""

    tensors: dict[str, Tensor]
    body: bytes

    @classmethod
    def of(cls, index: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Archive:
        stored: dict[str, Tensor] = {}
        alias: dict[str, str] = {}
        seen: dict[tuple[Any, ...], str] = {}
        for name, tensor in tensors.items():
            plain = _plain(name, tensor)
            first = seen.setdefault(_memory(plain), name) if plain.numel() else name
            if first == name:
                stored[name] = plain
            else:
                alias[name] = first
        content = {"format": FORMAT, "index": index, "alias": alias, "state": dict(state)}
        try:
            body = cbor.encode(content, floats=True, null=True, max_depth=_DEPTH, max_size=_BODY_LIMIT)
        except EncodingError as error:
            raise RunError(
                "train.state-not-saved", f"the state cannot be saved: {error.problem}", error.remedy
            ) from error
        return cls(tensors=stored, body=body)

    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header(bytes(32))) + sum(map(_size, self.tensors.values()))

    def header(self, digest: bytes) -> bytes:
        text = {"lamina": base64.b64encode(self.body).decode("ascii"), "digest": digest.hex()}
        table: dict[str, Any] = {"__metadata__": text}
        at = 0
        for name in self._order():
            tensor = self.tensors[name]
            span = [at, at := at + _size(tensor)]
            table[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        packed = json.dumps(table, separators=(",", ":")).encode("ascii")
        packed += b" " * (-len(packed) % 8)
        if len(packed) > _HEADER_LIMIT:
            raise RunError(
                "train.header-takes-bytes",
                f"the header takes {len(packed)} bytes, at most {_HEADER_LIMIT}",
                "keep less state",
            )
        return struct.pack("<Q", len(packed)) + packed

    def data(self) -> Iterator[memoryview]:
        """The tensors' bytes as they lie in the file; at most one tensor is copied at a time."""
        return (_raw(self.tensors[name]) for name in self._order())

    def digest(self) -> bytes:
        """Injective: each part has its length before it, or its shape and dtype, which give the length."""
        total = hashlib.sha256(b"lamina/checkpoint/1" + struct.pack(">Q", len(self.body)) + self.body)
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            facts = cbor.encode([name, _DTYPES[tensor.dtype], list(tensor.shape)], max_size=_BODY_LIMIT)
            total.update(struct.pack(">Q", len(facts)) + facts)
            total.update(_raw(tensor))
        return total.digest()

    def _order(self) -> list[str]:
        """Large elements first, so that every tensor is aligned to its own."""
        return sorted(self.tensors, key=lambda name: (-self.tensors[name].element_size(), name))


def read(path: Path) -> tuple[int, dict[str, Tensor], dict[str, Any], bytes]:
    """Index, tensors, state and digest of a file, all verified; OSError, Damaged or OtherFormat."""
    raw = _read_header(path)
    try:
        # Read, not mapped: a mapped file that somebody cuts later would kill the process.
        with safe_open(path, framework="pt", backend="pread") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        body = base64.b64decode(metadata["lamina"], validate=True)
        digest = bytes.fromhex(metadata["digest"])
        content = cbor.decode(body, floats=True, null=True, max_depth=_DEPTH, max_size=_BODY_LIMIT)
    except OSError:
        raise
    except Exception as error:  # whatever a library says about bytes that nobody wrote
        raise Damaged(f"its header, bytes 0 to {len(raw)}, does not read ({error})") from error
    if isinstance(content, dict) and type(found := content.get("format")) is int and found != FORMAT:
        raise OtherFormat(f"has format {found}, this version of Lamina reads {FORMAT}")
    _verify(Archive(tensors=tensors, body=body), raw, digest)
    shape = {"format": int, "index": int, "alias": dict, "state": dict}
    if not isinstance(content, dict) or {key: type(value) for key, value in content.items()} != shape:
        raise Damaged("its state has other fields than this version writes")
    for name, same in content["alias"].items():
        if name in tensors or not isinstance(same, str) or same not in tensors:
            raise Damaged(f"tensor {name!r} should be the same as {same!r}, which cannot be")
    tensors |= {name: tensors[same] for name, same in content["alias"].items()}
    return content["index"], tensors, content["state"], digest


def _read_header(path: Path) -> bytes:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise Damaged(f"its header takes {length} bytes by bytes 0 to 8, the file has {size}")
        return start + file.read(length)


def _verify(archive: Archive, raw: bytes, digest: bytes) -> None:
    if any(tensor.dtype not in _DTYPES for tensor in archive.tensors.values()):
        raise Damaged("a tensor has a dtype that is never written")
    if archive.header(digest) != raw:
        raise Damaged(f"its header, bytes 0 to {len(raw)}, is not the one that was written")
    if archive.digest() != digest:
        raise Damaged(
            f"its tensors, from byte {len(raw)} on, or its state do not have the digest in its header"
        )


def _plain(name: str, tensor: Tensor) -> Tensor:
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
        raise RunError(
            "train.tensor-checkpoint-not",
            f"tensor {name!r} has {problem}, which a checkpoint cannot hold",
            "convert it to a dense, plain one",
        )
    return plain


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What two names must agree in to be one tensor."""
    view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, *view)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in C order: a view where it lies so already, a copy of this one otherwise."""
    if not tensor.numel():
        return memoryview(b"")
    dense = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous with any stride, so the stride is given anew.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
