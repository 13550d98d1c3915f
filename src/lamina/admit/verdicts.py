"""What the gate decides: a reason to refuse a contribution, or a row with the bound it signed; earlier admissions."""

from __future__ import annotations

import enum
import hashlib
import struct
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from lamina.account.charges import Account
from lamina.admit.attestation import Attestation, Descriptor
from lamina.plan.table import printable
from lamina.sign.key_ring import KeyRing


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


class Reason(enum.Enum):
    """A reason to refuse a contribution, with its meaning and remedy, in the order of the checks.

    The value is what `--json` prints; it never changes. `make docs` writes docs/admission.md from these texts.
    """

    meaning: str
    remedy: str

    def __new__(cls, word: str, meaning: str, remedy: str) -> Reason:
        member = object.__new__(cls)
        member._value_ = word
        member.meaning, member.remedy = meaning, remedy
        return member

    # fmt: off
    BAD_ID = "bad-id", "its id is empty, longer than 255 bytes, or not printable", "rename its folder to printable text"
    UNREADABLE = "unreadable", "it cannot be read: a link, a device, several payloads, no permission", \
        "put one readable payload.npz or payload.csv there, with the arrays that the others have"
    TOO_LARGE = "too-large", "its descriptor, attestation or payload is too large", \
        "split it, check that it is the right file, or allow larger payloads: Gate(max_payload=…)"
    NO_ATTESTATION = "no-attestation", "it is not signed", "sign it: lamina attest"
    NO_DESCRIPTOR = "no-descriptor", "its descriptor is missing", \
        "put descriptor.cbor back, or sign it again: lamina attest"
    NO_PAYLOAD = "no-payload", "its payload is missing", "put the payload that was signed there"
    MALFORMED = "malformed", "its descriptor or attestation is not valid, or not in canonical encoding", \
        "sign it again: lamina attest"
    UNKNOWN_SCHEMA = "unknown-schema", "the descriptor has a version that this program does not know", \
        "use a version of Lamina that knows it"
    WRONG_ALGORITHM = "wrong-algorithm", "its signature algorithm is not allowed, or not for this key", \
        "sign with Ed25519: lamina attest"
    UNKNOWN_KEY = "unknown-key", "the key ring does not have the key that signed it", \
        "check whose key it is, then lamina keys add; or leave it out"
    WRONG_ROLE = "wrong-role", "the key is registered, but not for contributors", \
        "sign with a key for contributors: lamina attest --force; lamina keys list shows what the ring says about it"
    REVOKED_KEY = "revoked-key", "the key that signed it is revoked", \
        "let its owner sign it again with a new key: lamina attest --force"
    RETIRED_KEY = "retired-key", "it was signed after its key was replaced", \
        "let its owner sign it again with the new key: lamina attest --force"
    EARLY_KEY = "key-not-yet-valid", "it is used, or was signed, before its key became valid", \
        "wait, or correct valid_from in the ring; lamina keys list shows what the ring says about it"
    BAD_SIGNATURE = "bad-signature", "the key did not sign this descriptor", \
        "it was changed, or never signed by that key: sign it again: lamina attest"
    MISMATCH = "mismatch", "its attestation and its descriptor do not say the same", \
        "make folder, listing and signature agree, or sign it again: lamina attest"
    WRONG_AUDIENCE = "wrong-audience", "it was signed for another corpus", "ask its owner to sign it for this corpus"
    NOT_BOUND = "not-bound", "it names no ledger, and the policy names one", \
        "sign it again: lamina attest, under the policy.toml that names the ledger"
    OTHER_LEDGER = "other-ledger", "it was signed for another ledger of this corpus", \
        "admit it into the ledger that it names, or ask its owner to sign for this one: lamina attest --force"
    NOT_YET_VALID = "not-yet-valid", "its validity has not begun, or its signing time is in the future", \
        "wait; or correct the clock of the computer that signed"
    EXPIRED = "expired", "its validity has ended", "ask its owner whether it may be used longer, and to sign it again"
    POLICY_MISMATCH = "policy-mismatch", "it was signed under floors that this corpus never had", \
        "ask its owner to sign under the floors in force, or list its floors as earlier_floors"
    UNKNOWN_CLASS = "unknown-class", "the policy does not have its admissibility class", \
        "add the class to the policy, or ask its owner to sign for another one"
    UNBOUNDED_CLASS = "unbounded-class", "its class has no bound on ε, so no signed bound can be checked", \
        "give the class an epsilon or a noise_multiplier in the policy, or the corpus a floor"
    PUBLIC_BOUND = "bound-in-public-class", "it signed a bound, which a public class does not keep", \
        "ask its owner which class it is meant for"
    PUBLIC_CLAIM = "public-in-private-class", "it is signed as public, and its class is private", \
        "ask its owner whether it is public: then it belongs to a public class"
    CLIP_BELOW_FLOOR = "clip-norm-below-floor", "its clip norm is below the corpus minimum", \
        "it is too strict for this corpus: leave it out, or lower the floor"
    NOISE_BELOW_FLOOR = "noise-below-floor", "its noise multiplier is below the corpus minimum", \
        "ask its owner to sign a larger noise multiplier"
    CLIP_ABOVE_CLASS = "clip-norm-above-class", "its clip norm is above the one of its class", \
        "ask its owner to sign the class's clip norm or a smaller one"
    NOISE_BELOW_CLASS = "noise-below-class", "its noise multiplier is below the one of its class", \
        "ask its owner to sign the class's noise multiplier or a larger one"
    PROFILE_MISMATCH = "profile-mismatch", "its class reaches deeper than the depth profile that was signed", \
        "it signed less depth than the policy gives its class: ask its owner, or narrow the class"
    PAYLOAD_MISMATCH = "payload-mismatch", "its payload is not the one that was signed", \
        "put back the data that was signed, or let its owner sign the new data"
    CHECK_FAILED = "check-failed", "a check failed to run, so it is not admitted", \
        "try again; if it fails again, report it"
    REPLAYED = "replayed", "the same attestation or descriptor was admitted before", \
        "leave the copy out: one contribution is admitted once"
    WITHDRAWN = "withdrawn", "it was withdrawn, which is final", \
        "leave it out: a withdrawal is final; lamina ledger trace shows when and why"
    DUPLICATE_ID = "duplicate-id", "another contribution has the same id, or one that looks like it", \
        "rename one: give every contribution an id of its own that cannot be taken for another"
    DUPLICATE_PAYLOAD = "duplicate-payload", "another contribution has the same payload, byte for byte", \
        "leave the copy out; if two people really have the same data, ask their owners"
    DUPLICATE_SUBJECT = "duplicate-subject", "another contribution is about the same person", \
        "make one contribution of all that is about one person"
    CLASS_FULL = "class-full", "its class already has its declared population", \
        "raise population in the policy and plan again, or leave some out"
    OUT_OF_REACH = "out-of-reach", "under this plan no scale of its thresholds keeps its bound", \
        "plan with fewer steps or a smaller batch, or leave it out"
    NOT_TRAINABLE = "not-trainable", "model and loss cannot be computed on it: a target or token id is out of range", \
        "correct its targets (class numbers from 0, finite values), sign it again; or leave it out"
    GONE = "gone", "it was admitted, but its source no longer has it", "put it back, or leave it out for good"
    CHANGED = "changed", "it was admitted, but its descriptor or attestation has changed", \
        "admit again: it is another contribution now"
    NOT_REPEATED = "not-repeated", "its epoch is over, and its source can be read only once", \
        "admit again; a folder can be read as often as needed"
    # fmt: on

    def __str__(self) -> str:
        return str(self.value)


REASONS = tuple(Reason)
REASON_CODES = {reason: code for code, reason in enumerate(REASONS)}  # how a reason is kept in a column of bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """One contribution that is not admitted. `id` and `detail` are safe to print: see `printable`."""

    id: str
    reason: Reason
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """One entry of `refused` in `lamina admit --json`."""
        return {"id": self.id, "reason": self.reason.value, "detail": self.detail}

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class ContributionRefused(Exception):
    """Raised by a check that a contribution fails: a verdict, not an error."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


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
        self._codes.append(REASON_CODES[reason])
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
        """How many for each reason, in the order of `Reason`."""
        found = Counter(self._codes)
        return {reason: found[code] for code, reason in enumerate(REASONS) if found[code]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


RefusedRows = dict[int, tuple[Reason, str]]  # row → why it may not enter


class RegisterEntry(NamedTuple):
    """What must not be admitted twice: (kid, cti), descriptor, subject. And the class, whose population is limited."""

    row: int  # of the admission that asks
    kid: bytes
    cti: bytes
    descriptor: bytes
    attestation: bytes
    tag: bytes | None
    cls: str
    issued: int
    expires: int


class RegisterStatus(enum.Enum):
    """What a register says of an entry."""

    NEW = "new"
    SAME = "same"  # admitted before by this very attestation: it stays, and takes no new place
    REPLAYED = "replayed"  # its descriptor or token was admitted before, by another attestation
    REPRESENTED = "represented"  # its subject is there, under another descriptor
    WITHDRAWN = "withdrawn"
    REVOKED = "revoked"  # its key is revoked in the register, whatever a ring says


REASON_OF_STATUS = {
    RegisterStatus.REVOKED: Reason.REVOKED_KEY,
    RegisterStatus.REPLAYED: Reason.REPLAYED,
    RegisterStatus.REPRESENTED: Reason.DUPLICATE_SUBJECT,
    RegisterStatus.WITHDRAWN: Reason.WITHDRAWN,
}


@dataclass(frozen=True, slots=True)
class EntryContext:
    """What a register may need about those who enter: their bytes, the keys that signed, the population of each class."""

    read: Callable[[int], tuple[bytes, bytes]]  # by row; ContributionRefused if its source does not have it any more
    keys: KeyRing
    places: Mapping[str, int | None]

    def evidence(self, entry: RegisterEntry) -> tuple[bytes, bytes]:
        """Read descriptor and attestation again; ContributionRefused if they have changed since they were examined."""
        found = self.read(entry.row)
        given = tuple(hashlib.sha256(data).digest() for data in found)
        if given != (entry.descriptor, entry.attestation):
            raise ContributionRefused(Reason.CHANGED, "it changed after it was examined")
        return found


class Register(Protocol):
    """Knows what was admitted before, and notes who is admitted now."""

    def look(self, entries: Sequence[RegisterEntry]) -> Sequence[RegisterStatus]:
        """What is known of each."""
        ...

    def members(self, cls: str) -> int:
        """How many contributions of a class stand: admitted, neither withdrawn nor expired."""
        ...

    def enter(self, entries: Iterable[RegisterEntry], beside: EntryContext) -> RefusedRows:
        """Note those who are new; returns who may not enter after all, because others entered since `look`.

        A class never exceeds its population, however many enter at the same time. Repeating a call changes nothing.
        """
        ...


ADMITTED_MEANWHILE = "admitted by another process meanwhile"


def class_full(cls: str, places: int | None) -> tuple[Reason, str]:
    """The refusal beyond the population of a class."""
    return Reason.CLASS_FULL, f"class {cls!r} has a population of {places}"


REGISTER_BATCH = 4096  # entries of one call of a register
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

    def entries(
        self, rows: NDArray[np.int64], kids: Sequence[bytes], classes: Sequence[str]
    ) -> Iterator[tuple[NDArray[np.int64], list[RegisterEntry]]]:
        """The register entries of these rows, in batches."""
        for start in range(0, len(rows), REGISTER_BATCH):
            part = rows[start : start + REGISTER_BATCH]
            found = zip(part.tolist(), self.table[part], strict=True)
            yield part, [_register_entry(row, each, kids, classes) for row, each in found]

    @property
    def nbytes(self) -> int:
        return len(self._data) + len(self._places) + self.ids.nbytes


def unpack_row(row: bytes) -> np.void:
    """One row by itself."""
    return np.frombuffer(row, dtype=ROW_DTYPE)[0]  # type: ignore[no-any-return]


def _register_entry(row: int, found: np.void, kids: Sequence[bytes], classes: Sequence[str]) -> RegisterEntry:
    return RegisterEntry(
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
