"""`Rows`: what is kept of each contribution that passed, as columns of a table, 231 bytes a row."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lamina.admit.attestation import Attestation
from lamina.admit.descriptor import Descriptor
from lamina.admit.packed import Packed
from lamina.admit.register import Entry

AT_ONCE = 4096  # entries of one question to a register
TAGGED, PROFILED = 1, 2  # flags: it has a subject tag; it signed a depth profile

# Byte strings are void ("V"): numpy's "S" would drop the zeros at the end of a digest.
ROW = np.dtype(
    [
        ("name", "V16"),  # BLAKE2b of the id
        ("descriptor", "V32"),  # SHA-256 of its bytes: the identity of the contribution
        ("attestation", "V32"),  # SHA-256 of its bytes
        ("commitment", "V32"),
        ("tag", "V32"),
        ("nonce", "V16"),  # secret
        ("cti", "V16"),
        ("not_before", "<i8"),
        ("expires", "<i8"),
        ("issued", "<i8"),
        ("clip_norm", "<i8"),  # both in 1e-6
        ("noise_multiplier", "<i8"),
        ("items", "<i8"),
        ("key", "<u4"),  # row of the key ring
        ("cls", "<u2"),  # row of the policy
        ("flags", "<u1"),
    ]
)
PACK = struct.Struct("<16s32s32s32s32s16s16s6qIHB")
assert PACK.size == ROW.itemsize

_NO_TAG = bytes(32)


def pack(
    id: str, descriptor: Descriptor, attestation: Attestation, digest: bytes, key: int, cls: int
) -> bytes:
    """One row. `digest` is that of the attestation as it was received."""
    tag = attestation.tag
    flags = (TAGGED if tag is not None else 0) | (PROFILED if descriptor.profile is not None else 0)
    return PACK.pack(
        name_of(id),
        descriptor.digest(),
        digest,
        descriptor.commitment,
        _NO_TAG if tag is None else bytes.fromhex(tag),
        descriptor.nonce,
        attestation.cti,
        descriptor.not_before,
        descriptor.expires,
        attestation.iat,
        descriptor.clip_norm,
        descriptor.noise_multiplier,
        descriptor.items,
        key,
        cls,
        flags,
    )


def name_of(id: str) -> bytes:
    """What stands for an id in a column: 16 bytes, never the same for two ids."""
    return hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Rows:
    """Rows with their ids and their places in the source."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.ids = Packed()
        self._places = bytearray()

    def add(self, place: int, id: str, row: bytes) -> None:
        self._data += row
        self.ids.append(id.encode())
        self._places += place.to_bytes(8, "little")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def table(self) -> NDArray[Any]:
        """All rows, (n,) of `ROW`: a view, which must not outlive the next `add` or `keep`."""
        return np.frombuffer(self._data, dtype=ROW)

    @property
    def places(self) -> NDArray[np.int64]:
        return np.frombuffer(self._places, dtype="<i8")

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the others, in place: the table is the largest thing that the gate holds."""
        if mask.all():
            return
        self.ids.keep(mask)
        self._data = _kept(self._data, ROW, mask)
        self._places = _kept(self._places, np.dtype("<i8"), mask)

    def entries(
        self, rows: NDArray[np.int64], kids: Sequence[bytes], classes: Sequence[str]
    ) -> Iterator[tuple[NDArray[np.int64], list[Entry]]]:
        """What a register is asked and told about these rows, a part of them after the other."""
        for start in range(0, len(rows), AT_ONCE):
            part = rows[start : start + AT_ONCE]
            found = zip(part.tolist(), self.table[part], strict=True)
            yield part, [_entry(row, each, kids, classes) for row, each in found]

    @property
    def nbytes(self) -> int:
        return len(self._data) + len(self._places) + self.ids.nbytes


class Ids(Sequence[str]):
    """The ids of all rows."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self._packed[index].decode()

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))


def unpack(row: bytes) -> np.void:
    """One row by itself."""
    return np.frombuffer(row, dtype=ROW)[0]  # type: ignore[no-any-return]


def _entry(row: int, found: np.void, kids: Sequence[bytes], classes: Sequence[str]) -> Entry:
    return Entry(
        row=row,
        kid=kids[int(found["key"])],
        cti=found["cti"].tobytes(),
        descriptor=found["descriptor"].tobytes(),
        attestation=found["attestation"].tobytes(),
        tag=found["tag"].tobytes() if found["flags"] & TAGGED else None,
        cls=classes[int(found["cls"])],
        issued=int(found["issued"]),
        expires=int(found["expires"]),
    )


def _kept(data: bytearray, dtype: np.dtype[Any], mask: NDArray[np.bool_]) -> bytearray:
    try:
        data.append(0)
        data.pop()
    except BufferError:  # somebody looks at it: leave him what he sees
        return bytearray(np.frombuffer(data, dtype=dtype)[mask].tobytes())
    view = np.frombuffer(data, dtype=dtype)
    filled, at_once = 0, 1 << 16
    for start in range(0, len(mask), at_once):
        kept = view[start : start + at_once][mask[start : start + at_once]]
        view[filled : filled + len(kept)] = kept
        filled += len(kept)
    del view
    del data[filled * dtype.itemsize :]
    return data


def repeated(keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Which entries of a column (or of the columns of a structured array) occurred further up."""
    text = np.ascontiguousarray(keys).view(f"S{keys.dtype.itemsize}")  # of one length, so no zero is lost
    order = np.argsort(text, kind="stable")
    result = np.zeros(len(text), dtype=np.bool_)
    result[order[1:]] = text[order[1:]] == text[order[:-1]]
    return result
