"""Contributions as columns: texts end to end, refusals, admitted rows and their bounds. A million fits into memory."""

from __future__ import annotations

import hashlib
import struct
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lamina.account.charges import Account
from lamina.admit.attestation import Attestation, Descriptor
from lamina.admit.reasons import REASONS, Reason
from lamina.plan.table import printable


class PackedTexts(Sequence[str]):
    """An append-only list of texts, end to end in UTF-8, and where each begins.

    It takes 8 bytes a text more than its letters; a Python string takes 50 more, and a dict entry another hundred.

    >>> PackedTexts(["a", "βγ", ""])[1]
    'βγ'
    """

    __slots__ = ("_data", "_starts")

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._data, self._starts = bytearray(), array("q", [0])
        for value in values:
            self.append(str(value))

    @classmethod
    def packed(cls, data: bytes, starts: NDArray[np.int64]) -> PackedTexts:
        """From `data` and `starts` as they were."""
        made = cls()
        made._data, made._starts = bytearray(data), array("q", starts.astype(np.int64).tobytes())
        return made

    @property
    def data(self) -> bytes:
        return bytes(self._data)

    @property
    def starts(self) -> NDArray[np.int64]:
        """(n + 1,): text i is data[starts[i] : starts[i + 1]]."""
        return np.array(self._starts, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return len(self._data) + 8 * len(self)

    def append(self, text: str) -> None:
        self._data += text.encode("utf-8", "surrogatepass")
        self._starts.append(len(self._data))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self._bytes(range(len(self))[index]).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self._bytes(row).decode("utf-8", "surrogatepass") for row in range(len(self)))

    def _bytes(self, row: int) -> bytes:
        return bytes(self._data[self._starts[row] : self._starts[row + 1]])

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the others."""
        kept = PackedTexts(self[row] for row in np.flatnonzero(mask).tolist())
        self._data, self._starts = kept._data, kept._starts

    def find(self, wanted: Iterable[str]) -> dict[str, int]:
        """The rows of those that are there. One pass over all texts, however many are wanted."""
        missing = {text.encode("utf-8", "surrogatepass"): text for text in wanted}
        found: dict[str, int] = {}
        for row in range(len(self)):
            if (text := self._bytes(row)) in missing:
                found.setdefault(missing[text], row)
        return found

    def repeat(self) -> tuple[int, int] | None:
        """Two rows with the same text, or None. Equal texts have equal hashes: only those are compared."""
        hashes = np.fromiter(map(hash, map(self._bytes, range(len(self)))), dtype=np.int64, count=len(self))
        order = np.argsort(hashes, kind="stable")
        twins = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        seen: dict[bytes, int] = {}
        for row in np.unique(order[np.concatenate([twins, twins + 1])]).tolist():
            first = seen.setdefault(self._bytes(row), row)
            if first != row:
                return first, row
        return None

    def empty(self) -> int | None:
        """The first row without any text, or None."""
        rows = np.flatnonzero(np.diff(self.starts) == 0)
        return int(rows[0]) if len(rows) else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """One contribution that is not admitted. `id` and `detail` are safe to print: see `printable`."""

    id: str
    reason: Reason
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """One entry of `refused` in `lamina admit --json`."""
        return {"id": self.id, "reason": self.reason.word, "detail": self.detail}

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class Refusals(Sequence[Refusal]):
    """Refusals in the order of their source. A flood of a million of them takes a hundred megabytes, not a gigabyte."""

    def __init__(self) -> None:
        self._ids, self._details = PackedTexts(), PackedTexts()
        self._codes, self._places = bytearray(), array("q")
        self._order: list[int] | None = None

    def add(self, place: int, id: str, reason: Reason, detail: str = "") -> None:
        """Note a refusal; `place` is the position in the source."""
        self._ids.append(printable(id))
        self._details.append(printable(detail))
        self._codes.append(reason.code)
        self._places.append(place)
        self._order = None

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Refusal: ...
    @overload
    def __getitem__(self, index: slice) -> list[Refusal]: ...
    def __getitem__(self, index: int | slice) -> Refusal | list[Refusal]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if self._order is None:
            self._order = sorted(range(len(self)), key=self._places.__getitem__)
        row = self._order[index]
        return Refusal(self._ids[row], REASONS[self._codes[row]], self._details[row])

    def counts(self) -> dict[Reason, int]:
        """Return how many there are for each reason, in the order of their definition."""
        found = Counter(self._codes)
        return {reason: found[reason.code] for reason in REASONS if found[reason.code]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Admitted(NamedTuple):
    """A contribution that the gate admitted. Neither nonce nor payload is part of it."""

    row: int  # of its admission
    id: str
    kid: bytes  # of the key that signed it
    cti: bytes
    descriptor: bytes  # SHA-256 of its bytes: the identity of the contribution
    attestation: bytes  # SHA-256 of its bytes
    tag: bytes | None  # of the person that it is about; secret
    account: Account  # its class and the bound that it signed
    issued: int
    not_before: int
    expires: int
    items: int
    profile_signed: bool  # False: attestation only, depth is the policy's alone

    @property
    def cls(self) -> str:
        """Its class."""
        return self.account.cls


REGISTER_BATCH = 4096  # rows of one call of a register
TAGGED, PROFILED = 1, 2  # flags: it has a subject tag; it signed a depth profile

# Byte strings are void ("V"): numpy's "S" would drop the zeros at the end of a digest.
ROW_DTYPE = np.dtype([
    ("name", "V16"),  # BLAKE2b of the id
    ("descriptor", "V32"),  # SHA-256 of its bytes: the identity of the contribution
    ("attestation", "V32"),  # SHA-256 of its bytes
    ("commitment", "V32"), ("tag", "V32"),
    ("content", "<i8"),  # of equal payloads the same: what nonces hide is compared here, and never leaves
    ("nonce", "V16"),  # secret
    ("cti", "V16"), ("not_before", "<i8"), ("expires", "<i8"), ("issued", "<i8"),
    ("clip_norm", "<i8"), ("noise_multiplier", "<i8"),  # both in 1e-6
    ("items", "<i8"),
    ("key", "<u4"),  # row of the key ring
    ("cls", "<u2"),  # row of the policy
    ("flags", "<u1"),
])  # fmt: skip
ROW_STRUCT = struct.Struct("<16s32s32s32s32sq16s16s6qIHB")
assert ROW_STRUCT.size == ROW_DTYPE.itemsize

_NO_TAG = bytes(32)


def pack_row(
    id: str, descriptor: Descriptor, attestation: Attestation, digest: bytes, content: int, key: int, cls: int
) -> bytes:
    """One row. `digest` is that of the attestation as it was received, `content` from `Examiner.check_payload`."""
    tag = attestation.tag
    flags = (TAGGED if tag is not None else 0) | (PROFILED if descriptor.profile is not None else 0)
    return ROW_STRUCT.pack(
        id_hash(id), descriptor.digest(), digest, descriptor.commitment,
        _NO_TAG if tag is None else bytes.fromhex(tag), content, descriptor.nonce, attestation.cti,
        descriptor.not_before, descriptor.expires, attestation.iat,
        descriptor.clip_norm, descriptor.noise_multiplier, descriptor.items, key, cls, flags,
    )  # fmt: skip


# Letters of other scripts that look like Latin ones in most fonts (from the table of Unicode TS 39), and signs that show
# nothing. Digits and letters stay apart: l and 1 are too common in honest ids.
_LOOK_ALIKES = str.maketrans(
    "авсԁегһніјкӏморԛѕтѵԝхуαβεζηικμνορτυχγωϳɡıɑ", "abcderhhijklmopqstvwxyabezhikmnoptyxywjgia",
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))),
)  # fmt: skip


def id_hash(id: str) -> bytes:
    """BLAKE2b of how an id looks, which stands for it in a column: no two people should be shown as one.

    Case, width, the form of accents (NFKC) and letters of other scripts make no difference.
    """
    if not id.isascii():
        id = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", id).casefold()).translate(_LOOK_ALIKES)
    return hashlib.blake2b(id.lower().encode("utf-8", "surrogatepass"), digest_size=16).digest()


class AdmittedRows:
    """Rows with their ids and their positions in the source."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.ids = PackedTexts()
        self._places = bytearray()

    def add(self, place: int, id: str, row: bytes) -> None:
        self._data += row
        self.ids.append(id)
        self._places += place.to_bytes(8, "little")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def table(self) -> NDArray[Any]:
        """All rows, (n,) of `ROW`: a view, which must not outlive the next `add` or `keep`."""
        return np.frombuffer(self._data, dtype=ROW_DTYPE)

    @property
    def places(self) -> NDArray[np.int64]:
        return np.frombuffer(self._places, dtype="<i8")

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the others, in place: the table is the largest thing that the gate holds."""
        if mask.all():
            return
        self.ids.keep(mask)
        self._data = _filter_in_place(self._data, ROW_DTYPE, mask)
        self._places = _filter_in_place(self._places, np.dtype("<i8"), mask)

    def admitted(self, row: int, found: np.void, kids: Sequence[bytes], classes: Sequence[str]) -> Admitted:
        """Return row number `row`, whose columns were read; the columns `key` and `cls` count in `kids` and `classes`."""
        return Admitted(
            row=row,
            id=self.ids[row],
            kid=kids[int(found["key"])],
            cti=found["cti"].tobytes(),
            descriptor=found["descriptor"].tobytes(),
            attestation=found["attestation"].tobytes(),
            tag=found["tag"].tobytes() if found["flags"] & TAGGED else None,
            account=Account(classes[int(found["cls"])], int(found["clip_norm"]), int(found["noise_multiplier"])),
            issued=int(found["issued"]),
            not_before=int(found["not_before"]),
            expires=int(found["expires"]),
            items=int(found["items"]),
            profile_signed=bool(found["flags"] & PROFILED),
        )

    def entries(
        self, rows: NDArray[np.int64], kids: Sequence[bytes], classes: Sequence[str]
    ) -> Iterator[tuple[NDArray[np.int64], list[Admitted]]]:
        """Yield these rows in batches, as a register takes them."""
        for start in range(0, len(rows), REGISTER_BATCH):
            part = rows[start : start + REGISTER_BATCH]
            found = zip(part.tolist(), self.table[part], strict=True)
            yield part, [self.admitted(row, each, kids, classes) for row, each in found]

    @property
    def nbytes(self) -> int:
        return len(self._data) + len(self._places) + self.ids.nbytes


def unpack_row(row: bytes) -> np.void:
    """One row by itself."""
    return np.frombuffer(row, dtype=ROW_DTYPE)[0]  # type: ignore[no-any-return]


def _filter_in_place(data: bytearray, dtype: np.dtype[Any], mask: NDArray[np.bool_]) -> bytearray:
    try:
        data.append(0)
        data.pop()
    except BufferError:  # somebody holds a view of it, which must not change
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


def is_repeat(keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Which entries of a column (or of the columns of a structured array) occurred further up."""
    text = np.ascontiguousarray(keys).view(f"S{keys.dtype.itemsize}")  # of one length, so no zero is lost
    order = np.argsort(text, kind="stable")
    result = np.zeros(len(text), dtype=np.bool_)
    result[order[1:]] = text[order[1:]] == text[order[:-1]]
    return result


Int64Array = NDArray[np.int64]


class BoundColumns(Sequence[Account]):
    """Distinct bounds as columns: `cls` counts in `names`. A corpus in which everybody signs another one has many."""

    def __init__(
        self, names: Sequence[str], cls: Int64Array, clip_norm: Int64Array, noise_multiplier: Int64Array
    ) -> None:
        self.names = tuple(names)
        self.cls, self.clip_norm, self.noise_multiplier = cls, clip_norm, noise_multiplier

    @classmethod
    def of(cls, bounds: Sequence[Account]) -> BoundColumns:
        """Columns of given bounds."""
        if isinstance(bounds, BoundColumns):
            return bounds
        names = tuple(dict.fromkeys(bound.cls for bound in bounds))
        return cls(
            names,
            np.array([names.index(bound.cls) for bound in bounds], dtype=np.int64),
            np.array([bound.clip_micro for bound in bounds], dtype=np.int64),
            np.array([bound.noise_micro for bound in bounds], dtype=np.int64),
        )

    @classmethod
    def distinct(
        cls, names: Sequence[str], row: Int64Array, clip: Int64Array, noise: Int64Array
    ) -> tuple[BoundColumns, NDArray[np.int32]]:
        """Each bound once, sorted by class, c and z, and where each of the given ones is."""
        order = np.lexsort((noise, clip, row))
        columns = [np.asarray(column)[order].astype(np.int64) for column in (row, clip, noise)]
        new = np.ones(len(order), dtype=np.bool_)
        if len(order):
            new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        index = np.empty(len(order), dtype=np.int32)
        index[order] = np.cumsum(new, dtype=np.int32) - 1
        return cls(names, *(column[new] for column in columns)), index

    def __len__(self) -> int:
        return len(self.cls)

    @overload
    def __getitem__(self, index: int) -> Account: ...
    @overload
    def __getitem__(self, index: slice) -> list[Account]: ...
    def __getitem__(self, index: int | slice) -> Account | list[Account]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return Account(self.names[int(self.cls[index])], int(self.clip_norm[index]), int(self.noise_multiplier[index]))
