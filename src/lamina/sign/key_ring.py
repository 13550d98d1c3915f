"""The key ring: which public keys are trusted, in which role, and when each is valid, retired or revoked."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamina import cbor
from lamina.errors import BadKey, LaminaError
from lamina.sign import keys
from lamina.sign.keys import ALGORITHMS, LAST_SECOND, PublicKey, format_utc, parse_utc
from lamina.validate import distinct_fields

ROLES = ("contributor", "ledger", "release", "governing", "witness", "auditor", "operator", "officer")


class KeyStatus(enum.Enum):
    """What a key is worth at an instant."""

    USABLE = "usable"
    NOT_YET = "not yet valid"
    RETIRED = "retired"
    REVOKED = "revoked"


NEVER = LAST_SECOND + 1


def key_rules(
    at: Any, issued: Any, valid_from: Any, retired_from: Any, revoked_from: Any
) -> tuple[tuple[KeyStatus, Any], ...]:
    """What is wrong with a key at `at` for what was signed at `issued`: the first that holds counts.

    Seconds, or arrays of them: the gate asks about all its rows at once.
    """
    return (
        (KeyStatus.REVOKED, at >= revoked_from),
        (KeyStatus.NOT_YET, (at < valid_from) | (issued < valid_from)),
        (KeyStatus.RETIRED, issued >= retired_from),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """A key of the ring. Times are instants from which something holds.

    revoked_from   at or after it nothing that the key signed counts, whenever it claims to have been signed: a
                   thief can write any date
    retired_from   what claims to have been signed at or after it does not count; earlier signatures stay good
    replaced_by    the id of the key that took over
    added          when it was put into the ring; it decides nothing
    algorithms     COSE algorithms under which it may sign: both names of Ed25519, or one of them
    """

    key: PublicKey
    label: str
    role: str
    valid_from: int
    revoked_from: int | None = None
    replaced_by: bytes | None = None
    retired_from: int | None = None
    algorithms: tuple[int, ...] = ALGORITHMS
    added: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, PublicKey):
            problem = f"the key is a {type(self.key).__name__}, must be a PublicKey"
            raise BadKey("key.not-public-key", problem, "give key.public")
        if not isinstance(self.label, str) or not 0 < len(self.label) <= 128 or not self.label.isprintable():
            problem = f"the label {self.label!r} of key {self.key.name[:16]} must be 1 to 128 printable characters"
            raise BadKey("key.label-invalid", problem, "say whose key it is")
        if self.role not in ROLES:
            remedy = f"use one of {', '.join(ROLES)}; each role needs its own key"
            raise BadKey("key.role-unknown", f"key {self.label!r} has the unknown role {self.role!r}", remedy)
        for name in ("valid_from", "revoked_from", "retired_from", "added"):
            value = getattr(self, name)
            missing = value is None and name != "valid_from"
            if not missing and (type(value) is not int or not 0 <= value <= LAST_SECOND):
                problem = f"{name} of key {self.label!r} is {value!r}, must be seconds since 1970"
                raise BadKey("key.time-out-of-range", problem, "give a time before the year 10000")
        if self.replaced_by is not None and (type(self.replaced_by) is not bytes or len(self.replaced_by) != 32):
            problem = f"replaced_by of key {self.label!r} is not a key id"
            raise BadKey("key.replaced-by-invalid", problem, "give the 32 bytes of a key id")
        if not self.algorithms or not set(self.algorithms) <= set(ALGORITHMS):
            problem = f"key {self.label!r} is for algorithms {list(self.algorithms)}"
            raise BadKey("key.algorithm-unknown", problem, f"use some of {list(ALGORITHMS)}")

    @property
    def id(self) -> bytes:
        """The thumbprint of the key."""
        return self.key.id

    @property
    def times(self) -> tuple[int, int, int]:
        """When it is valid, retired and revoked: `NEVER` where nobody said so."""
        retired, revoked = self.retired_from, self.revoked_from
        return self.valid_from, NEVER if retired is None else retired, NEVER if revoked is None else revoked

    def standing(self, at: int, issued_at: int | None = None) -> KeyStatus:
        """What the key is worth at `at` for something that claims to be signed at `issued_at` (default: at `at`)."""
        rules = key_rules(at, at if issued_at is None else issued_at, *self.times)
        return next((status for status, holds in rules if holds), KeyStatus.USABLE)


KEY_RING_SCHEMA = 1

_ENTRY_FIELDS = {"id", "x", "label", "role", "valid_from", "algorithms"}
_OPTIONAL_ENTRY_FIELDS = {"retired_from", "revoked_from", "replaced_by", "added"}
_SHOW_KEYS = "lamina keys list shows ids and labels"


class KeyRing:
    """The public keys that a verifier trusts, by id. On disk: readable JSON, beside what it is used to verify.

    Entries are added, rotated and revoked, never taken out: what was signed must stay attributable. `version` is a
    digest of the content; whoever caches a verification keys it by that.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, KeyEntry] = {}
        self.quorum: int | None = None  # how many of the witnesses must have cosigned; None: all of them
        self._version: bytes | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[KeyEntry]:
        """In the order in which they were added."""
        return iter(self._entries.values())

    def get(self, kid: bytes) -> KeyEntry | None:
        """The entry of this id."""
        return self._entries.get(kid)

    def usable(self, kid: bytes, at: int, issued_at: int | None = None) -> bool:
        """Whether the ring knows the key and it may be relied on: see KeyEntry.standing."""
        entry = self._entries.get(kid)
        return entry is not None and entry.standing(at, issued_at) is KeyStatus.USABLE

    def find(self, name: str) -> KeyEntry:
        """By the beginning of an id (4 digits at least), or by label."""
        found = [each for each in self if each.label == name]
        if not found and len(name) >= 4:
            found = [each for each in self if each.key.name.startswith(name.lower())]
        if len(found) != 1:
            known = "several keys" if found else "no key"
            problem = f"the key ring has {known} {name!r}"
            raise BadKey("key.name-not-unique", problem, _SHOW_KEYS)
        return found[0]

    @property
    def version(self) -> bytes:
        """SHA-256 of the content: it changes with every key event, and not otherwise."""
        if self._version is None:
            rows = [_entry_to_json(self._entries[kid]) for kid in sorted(self._entries)]
            self._version = hashlib.sha256(cbor.encode(rows, max_size=keys.MAX_SMALL_FILE)).digest()
        return self._version

    def add(
        self,
        key: PublicKey,
        *,
        label: str,
        role: str = "contributor",
        valid_from: int = 0,
        algorithms: tuple[int, ...] = ALGORITHMS,
        added: int | None = None,
    ) -> KeyEntry:
        """Trust a key. One key has one role: a signature made for one purpose must be worth nothing for another."""
        entry = KeyEntry(
            key=key, label=label, role=role, valid_from=valid_from, algorithms=tuple(algorithms), added=added
        )
        self._put_new(entry)
        return entry

    def rotate(
        self, old: bytes, new: PublicKey, *, at: int, label: str | None = None, added: int | None = None
    ) -> KeyEntry:
        """`new` takes over from `old` at the instant `at`; what `old` signed before stays good."""
        entry = self._known(old)
        if entry.revoked_from is not None or entry.retired_from is not None:
            state = "revoked" if entry.revoked_from is not None else "replaced"
            problem = f"key {entry.label!r} is already {state}"
            raise BadKey("key.already-replaced", problem, "add the new key with lamina keys add")
        if at <= entry.valid_from:
            begin, end = format_utc(entry.valid_from), format_utc(at)
            problem = f"key {entry.label!r} is valid from {begin} and cannot retire at {end}"
            raise BadKey("key.retires-before-valid", problem, "give a later time")
        heir = replace(entry, key=new, label=label or entry.label, valid_from=at, replaced_by=None, added=added)
        retired = replace(entry, retired_from=at, replaced_by=new.id)
        self._put_new(heir)
        self._entries[old] = retired
        return heir

    def revoke(self, kid: bytes, *, at: int) -> KeyEntry:
        """From `at` on nothing that the key signed counts. A revocation can be moved to earlier, never to later."""
        entry = self._known(kid)
        if entry.revoked_from is not None and at > entry.revoked_from:
            told = f"key {entry.label!r} is revoked from {format_utc(entry.revoked_from)}"
            problem = f"{told}, which cannot move to {format_utc(at)}"
            raise BadKey("key.revocation-moved-later", problem, "a revocation is not undone: add a new key")
        self._entries[kid] = revoked = replace(entry, revoked_from=at)
        self._version = None
        return revoked

    def _known(self, kid: bytes) -> KeyEntry:
        if (entry := self._entries.get(kid)) is None:
            raise BadKey("key.not-in-ring", f"the key ring has no key {kid.hex()}", _SHOW_KEYS)
        return entry

    def _put_new(self, entry: KeyEntry) -> None:
        if (known := self._entries.get(entry.id)) is not None:
            problem = f"the key ring already has {entry.key.name}, as {known.label!r} in role {known.role!r}"
            remedy = "use another key for another role; or rotate or revoke this one"
            raise BadKey("key.already-in-ring", problem, remedy)
        self._entries[entry.id] = entry
        self._version = None

    @classmethod
    def load(cls, path: str | Path, held: bytes | None = None) -> KeyRing:
        """Read a ring, or what its file held. Anything that is not what `save` writes is refused."""
        if held is None and not Path(path).exists():
            problem = f"there is no key ring '{path}'"
            raise BadKey("key.ring-missing", problem, "lamina keys add NAME.pub makes it; or name another: --keys FILE")
        data = keys.read_small(Path(path), "the key ring") if held is None else held
        try:
            content = json.loads(data, object_pairs_hook=distinct_fields)
            fields = content.keys() - {"quorum"} if type(content) is dict else set()
            if fields != {"schema", "keys"} or type(content["keys"]) is not list:
                problem = "it must have the fields schema, keys (a list), perhaps quorum, no others"
                raise BadKey("key.ring-fields", problem)
            schema, rows = content["schema"], content["keys"]
            if type(schema) is not int or schema != KEY_RING_SCHEMA:
                problem = f"its schema is {schema!r}, this program reads {KEY_RING_SCHEMA}"
                raise BadKey("key.ring-schema-unknown", problem)
            ring = cls()
            ring.quorum = content.get("quorum")
            if ring.quorum is not None and (type(ring.quorum) is not int or ring.quorum < 0):
                raise BadKey("key.ring-quorum", f"its quorum is {ring.quorum!r}, must be a number of witnesses")
            for number, row in enumerate(rows):
                ring._put_new(_entry_from_json(row, number))
        except (ValueError, RecursionError):  # JSON, UTF-8
            problem = f"the key ring '{path}' is not JSON, or a field occurs twice"
            raise BadKey("key.ring-not-json", problem, "restore it from a copy") from None
        except LaminaError as error:
            problem = f"the key ring '{path}' is not valid: {error.problem}"
            raise BadKey("key.ring-invalid", problem, "restore it from a copy") from None
        return ring

    def save(self, path: str | Path) -> None:
        """Write it, whole or not at all."""
        rows = [_entry_to_json(entry) for entry in self]
        quorum = {} if self.quorum is None else {"quorum": self.quorum}
        text = json.dumps({"schema": KEY_RING_SCHEMA, **quorum, "keys": rows}, indent=2, ensure_ascii=False)
        keys.replace_file(Path(path), (text + "\n").encode("utf-8"), "the key ring", mode=0o644)

    @classmethod
    @contextmanager
    def editing(cls, path: str | Path, *, create: bool = False) -> Iterator[KeyRing]:
        """The ring, to be changed and saved when the block ends without an error; one editor at a time."""
        path = Path(path)
        with keys.path_lock(path.parent):
            ring = cls() if create and not path.exists() else cls.load(path)
            yield ring
            ring.save(path)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys, version {self.version.hex()[:16]})"


def _entry_to_json(entry: KeyEntry) -> dict[str, Any]:
    retired, heir, revoked = entry.retired_from, entry.replaced_by, entry.revoked_from
    row = {
        "id": entry.key.name,
        "x": entry.key.x.hex(),
        "label": entry.label,
        "role": entry.role,
        "algorithms": list(entry.algorithms),
        "valid_from": format_utc(entry.valid_from),
        "retired_from": None if retired is None else format_utc(retired),
        "replaced_by": None if heir is None else heir.hex(),
        "revoked_from": None if revoked is None else format_utc(revoked),
        "added": None if entry.added is None else format_utc(entry.added),
    }
    return {name: value for name, value in row.items() if value is not None}


def _entry_from_json(row: Any, number: int) -> KeyEntry:
    def invalid(problem: str) -> BadKey:
        return BadKey("key.ring-entry-invalid", problem)

    def hex32(name: str) -> bytes:
        try:
            value = bytes.fromhex(row[name])
        except ValueError:
            value = b""
        if value.hex() != row[name] or len(value) != 32:
            raise invalid(f"{name} of entry {number} must be 64 hexadecimal digits")
        return value

    def time(name: str) -> int | None:
        return parse_utc(row[name]) if name in row else None

    if not isinstance(row, dict) or not _ENTRY_FIELDS <= row.keys() <= _ENTRY_FIELDS | _OPTIONAL_ENTRY_FIELDS:
        raise invalid(f"entry {number} must have {', '.join(sorted(_ENTRY_FIELDS))}, and nothing unknown")
    if not isinstance(row["algorithms"], list) or any(type(each) is not int for each in row["algorithms"]):
        raise invalid(f"algorithms of entry {number} must be a list of numbers")
    for name, value in row.items():
        if name != "algorithms" and not isinstance(value, str):
            raise invalid(f"{name} of entry {number} must be text")
    entry = KeyEntry(
        key=PublicKey(hex32("x")),
        label=row["label"],
        role=row["role"],
        valid_from=parse_utc(row["valid_from"]),
        revoked_from=time("revoked_from"),
        replaced_by=hex32("replaced_by") if "replaced_by" in row else None,
        retired_from=time("retired_from"),
        added=time("added"),
        algorithms=tuple(row["algorithms"]),
    )
    if entry.key.name != row["id"]:
        problem = f"entry {number} gives id {row['id']!r}, the thumbprint of its key is {entry.key.name}"
        raise BadKey("key.id-not-thumbprint", problem)
    return entry
