"""Who governs a ledger after some leaves: keys, policy and terms, and whether the next change of them is authorised.

One rule for who writes, who signs, who admits and who verifies: a governing record that `GovernanceState.check` refuses
is neither appended nor covered by a new checkpoint nor, where it stands in a ledger, passed by a verification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, TypeVar

from lamina.errors import LedgerError
from lamina.ledger.governance_records import (
    About,
    Authorization,
    ClassBounds,
    GoverningRecord,
    Header,
    Key,
    KeyChange,
    KeyEvent,
    KeyEvents,
    PartySignature,
    PolicyChange,
    Role,
    TermsChange,
    WithdrawalRule,
    check_policy_digest,
    governing_message,
    loosened,
    profile_exceeds,
)
from lamina.ledger.merkle import TileNodes, leaf_hash, root_at
from lamina.ledger.records import LAST_SEQ, ContributionTerms
from lamina.ledger.signed_checkpoint import parse_checkpoint
from lamina.ledger.store.rows import StoreReader, tile_reader
from lamina.plan.risk import RiskBound
from lamina.sign.key_ring import KeyRing, KeyStatus
from lamina.sign.keys import PrivateKey, PublicKey, format_utc
from lamina.sign.notes import Note, WitnessKey, WitnessQuorum

G = TypeVar("G", bound=GoverningRecord)


class Violation(NamedTuple):
    """A broken rule, before it is known which leaf broke it."""

    code: str
    reason: str


@dataclass(slots=True)
class KeyHistory:
    """A key of the ledger, and what became of it."""

    key: Key
    since: int = 0
    replaced: int | None = None  # from then on it signs nothing new
    revoked: int | None = None  # from then on nothing counts that it ever signed
    heir: bytes | None = None  # the key that took over from it
    replaced_in: int = LAST_SEQ  # the leaf that states the replacement
    public: PublicKey = field(init=False)

    def __post_init__(self) -> None:
        self.public = self.key.public

    def problem(self, at: int, issued: int) -> Violation | None:
        """Why the key does not count at `at` for something signed at `issued`; None if it does."""
        key = self.key
        if self.revoked is not None and at >= self.revoked:
            return Violation("verify.key-revoked", f"is revoked from {format_utc(self.revoked)}")
        if at < self.since or at < key.valid_from or issued < key.valid_from:
            since = format_utc(max(self.since, key.valid_from))
            return Violation("verify.key-not-yet-valid", f"is valid from {since}")
        if key.valid_until is not None and at >= key.valid_until:
            return Violation("verify.key-expired", f"was valid until {format_utc(key.valid_until)}")
        if self.replaced is not None and issued >= self.replaced:
            return Violation("verify.key-replaced", f"was replaced at {format_utc(self.replaced)}")
        return None

    def contributor_problem(self, at: int, issued: int | None = None) -> Violation | None:
        """The same of a contributor's key, which is named. Without `issued`, as far as that shows without it."""
        name, role = f"key {self.public.id.hex()[:16]}", self.key.role
        if role is not Role.CONTRIBUTOR:
            return Violation("verify.key-wrong-role", f"{name} has role {role.name.lower()}, not contributor")
        # Only the attestation says when it was signed: at the earliest when the key became valid.
        wrong = self.problem(at, self.key.valid_from if issued is None else issued)
        return None if wrong is None else Violation(wrong.code, f"{name} {wrong.reason}")


class KeyState:
    """The keys of a ledger after some leaves.

    A ledger key that was replaced still signs the first checkpoint that covers its replacement.
    """

    def __init__(self, header: Header) -> None:
        self.origin = header.origin
        self._keys = {key.id: KeyHistory(key) for key in header.keys}
        self._uncovered_rotations: dict[bytes, int] = {}  # replaced in that leaf, which no checkpoint covers

    def apply_event(self, event: KeyEvent, seq: int) -> None:
        """Apply one key event of that leaf. An event about a key that is not there changes nothing."""
        if (key := event.key) is not None:
            self._keys[key.id] = KeyHistory(key, since=event.effective)
            self._uncovered_rotations.pop(key.id, None)
        if event.target is None or event.target not in self._keys:
            return
        target = self._keys[event.target] = copy(self._keys[event.target])
        if event.change is KeyChange.ROTATE:
            if target.replaced is None:
                self._uncovered_rotations[event.target] = seq
            if target.replaced is None or event.effective < target.replaced:
                target.replaced, target.replaced_in = event.effective, seq
            target.heir = None if key is None else key.id
        else:
            target.revoked = event.effective if target.revoked is None else min(target.revoked, event.effective)

    def covered(self, size: int) -> None:
        """A checkpoint covers the first `size` leaves."""
        self._uncovered_rotations = {kid: seq for kid, seq in self._uncovered_rotations.items() if seq >= size}

    def after(self, events: Iterable[KeyEvent], seq: int = 0) -> Self:
        """The keys as they would be after these events, in that leaf."""
        made = copy(self)
        made._keys = dict(self._keys)
        made._uncovered_rotations = dict(self._uncovered_rotations)
        for event in events:
            made.apply_event(event, seq)
        return made

    # ----------------------------------------------------------------------------------- questions

    def history(self, kid: bytes) -> KeyHistory | None:
        """The key with that id and what became of it, whether it counts or not."""
        return self._keys.get(kid)

    def heirs(self, kid: bytes) -> set[bytes]:
        """The key with that id, and those that took over from it one after the other."""
        found: set[bytes] = set()
        at: bytes | None = kid
        while at is not None and at not in found:
            found.add(at)
            at = None if (known := self._keys.get(at)) is None else known.heir
        return found

    def get(self, kid: bytes) -> Key | None:
        """The key with that id, whether it counts or not."""
        return None if (known := self._keys.get(kid)) is None else known.key

    def all(self) -> tuple[Key, ...]:
        """Every key that was ever named."""
        return tuple(each.key for each in self._keys.values())

    def problem_with(self, kid: bytes, time: int) -> str | None:
        """Why the key with that id does not count at that time, whatever its role; None if it does."""
        if (known := self._keys.get(kid)) is None:
            return "is not in the ledger"
        return None if (found := known.problem(time, time)) is None else found.reason

    def histories(self, role: Role) -> list[KeyHistory]:
        """The keys of a role that were ever named, and what became of each."""
        return [each for each in self._keys.values() if each.key.role is role]

    def why_not_signing(self, kid: bytes, time: int) -> Violation | None:
        """Why that key may not sign the next checkpoint, if the last leaf is of that time; None if it may."""
        known = self._keys.get(kid)
        if known is None or known.key.role is not Role.LEDGER or known.key.name != self.origin:
            return Violation("verify.checkpoint-key-unknown", "is not a checkpoint key of the ledger")
        if kid in self._uncovered_rotations:  # it may still sign over its replacement
            known = replace(known, replaced=None)
        return known.problem(time, time)

    def signers(
        self, message: bytes, signatures: Iterable[PartySignature], roles: tuple[Role, ...], time: int
    ) -> tuple[set[bytes], Violation | None]:
        """Who of these roles signed the message; and what is wrong with the first signature that does not count."""
        found: set[bytes] = set()
        for signed in signatures:
            known, name = self._keys.get(signed.key), f"key {signed.key.hex()[:16]}"
            if known is None or known.key.role not in roles:
                allowed = " or ".join(role.name.lower() for role in roles)
                return found, Violation("verify.signer-wrong-role", f"{name} is no {allowed}")
            if (wrong := known.problem(time, time)) is not None:
                return found, Violation(wrong.code, f"{name} {wrong.reason}")
            if not known.public.verify(message, signed.signature):
                return found, Violation("verify.signature-invalid", f"{known.key.name!r} did not sign this text")
            found.add(signed.key)
        return found, None

    def cosigned(
        self, note: Note, time: int, now: int | None = None, role: Role = Role.WITNESS
    ) -> dict[bytes, int]:  # fmt: skip
        """Return the keys that count as cosigners of a checkpoint, each with its newest time of signing.

        `time` is that of the last leaf. A key counts if it was in force both at `time` and when it cosigned, so a key
        never counts together with its successor. Witnesses count towards a quorum; cosignatures by ledger keys are
        heartbeats, which only state a time. Raises NotVerified if a cosignature is wrong, later than `now`, or older
        than the last leaf.
        """
        found = {}
        for each in self.histories(role):
            if each.revoked is None:
                named = WitnessQuorum(0, (WitnessKey(each.key.name, each.public),))
                for at in named.cosigned(note, now=now, since=time).values():
                    stood = role is Role.LEDGER or each.problem(time, time) is None
                    if stood and each.problem(at, at) is None:
                        found[each.public.id] = at
        return found

    # ----------------------------------------------------------------------------------- what may follow

    def check_event(self, event: KeyEvent) -> None:
        """LedgerError unless the event is about a known key, in its one role."""
        target = None if event.target is None else self.get(event.target)
        if event.target is not None and target is None:
            problem = f"the ledger has no key {event.target.hex()[:16]}"
            raise LedgerError("ledger.key-unknown", problem, "list its keys: lamina ledger key LEDGER")
        if (new := event.key) is not None:
            known, role, name = self.get(new.id), new.role.name.lower(), f"key {new.id.hex()[:16]}"
            if known is not None and known.role is not new.role:
                problem = f"{name} has role {known.role.name.lower()} and cannot become {role}"
                raise LedgerError("ledger.key-role-changed", problem, "make another key: one key has one role")
            if (own := self._keys.get(new.id)) is not None and own.revoked is not None:
                raise LedgerError("ledger.key-was-revoked", f"{name} was revoked", "make another key: it stays revoked")
            if known is not None and event.change is KeyChange.ROTATE:
                problem = f"{name} is in the ledger already and cannot replace another key"
                raise LedgerError("ledger.rotation-to-known-key", problem, "make a new key, or revoke the old one")
            if target is not None and target.role is not new.role:
                problem = f"{name} with role {role} cannot replace a key with role {target.role.name.lower()}"
                raise LedgerError("ledger.rotation-changes-role", problem, "give the new key the role of the old one")
            if new.role is Role.LEDGER and new.name != self.origin:
                problem = f"a key with role ledger is named {new.name!r}"
                raise LedgerError("ledger.ledger-key-name", problem, f"name it like the ledger: {self.origin!r}")

    def check_still_signed(self, event: KeyEvent, now: int) -> None:
        """LedgerError if the event revokes the last key that signs checkpoints."""
        target = None if event.target is None else self.get(event.target)
        if event.change is KeyChange.REVOKE and target is not None and target.role is Role.LEDGER:
            others, time = (kid for kid in self._keys if kid != event.target), max(now, event.effective)
            if all(self.why_not_signing(kid, time) is not None for kid in others):
                problem = f"key {target.id.hex()[:16]} is the last that signs checkpoints of {self.origin!r}"
                remedy = "add a new key in the same record, or rotate to it first"
                raise LedgerError("ledger.last-signing-key", problem, remedy)

    def standing(self, role: Role, time: int) -> list[Key]:
        """The keys of a role that count at that time."""
        return [each.key for each in self.histories(role) if each.problem(time, time) is None]


CONTRIBUTOR_ROLE = Role.CONTRIBUTOR.name.lower()


def contributor_key(
    keys: KeyState, ring: KeyRing | None, kid: bytes, at: int, issued: int | None
) -> PublicKey | Violation:
    """The key of a contribution of that time, signed at `issued` if that is known; or why it does not count.

    Both the ledger and the ring of an auditor, if there is one, must accept it; who is in the ring alone counts too.
    """
    name, known = f"key {kid.hex()[:16]}", keys.history(kid)
    entry = None if ring is None else ring.get(kid)
    if ring is not None and entry is None:
        return Violation("verify.key-not-trusted", f"{name} is not among the trusted keys")
    if entry is not None and entry.role != CONTRIBUTOR_ROLE:
        return Violation("verify.key-wrong-role", f"{name} has role {entry.role} among the trusted keys")
    if entry is not None:
        status = entry.standing(at, entry.valid_from if issued is None else issued)
        if status is not KeyStatus.USABLE:
            return Violation("verify.trusted-key-unusable", f"{name} is {status.value} among the trusted keys")
    if known is not None:
        return known.contributor_problem(at, issued) or known.public
    return Violation("verify.key-unknown", f"{name} is not in the ledger") if entry is None else entry.key


RootAt = Callable[[int], bytes | None]


class KeyAddition(NamedTuple):
    """A key event that was applied: its leaf, and the keys that authorised it."""

    seq: int
    event: KeyEvent
    by: tuple[bytes, ...]


class GovernanceState(KeyState):
    """Keys, policy and terms after the first `size` leaves, and whether a governing record may come next.

    One governing key authorises a change. Two of different owners authorise whatever protects less; and changes of the
    governing keys themselves where two or more stand, of different owners where there are two. All of them stood before
    the record. A ledger key may replace itself, which it signs, and nothing more.

    header_hash  of leaf 0
    last         hash of the leaf of the last governing record; of leaf 0 before the first
    policy       header or policy change in force
    witnesses, retention, withdraw   in force
    about        by name of [about] the text in force, and the leaf that states it
    owners       by governing key the first key of its owner: each of the header, and each that two owners let in, is an
                 owner; whom one owner let in, or rotated to, is the same owner
    """

    def __init__(self, header: Header, leaf: bytes) -> None:
        """`leaf` are the bytes of leaf 0; LedgerError unless every governing key of the header signed it."""
        super().__init__(header)
        check_header_signed(header)
        self.size = 1
        self.header_hash = self.last = leaf_hash(leaf)
        self.policy: Header | PolicyChange = header
        self.witnesses, self.retention = header.witnesses, header.retention
        self.withdraw = header.withdraw or WithdrawalRule.KEEPER
        self.about = {name: (text, 0) for name, text in header.about or ()}
        self.additions: list[KeyAddition] = []
        self.owners = {each.id: each.id for each in header.keys if each.role is Role.GOVERNING}

    def after(self, events: Iterable[KeyEvent], seq: int = 0) -> Self:
        made = super().after(events, seq)
        made.additions, made.owners = list(self.additions), dict(self.owners)
        return made

    # ----------------------------------------------------------------------------------- replaying

    def see(self, record: GoverningRecord, seq: int, time: int, data: bytes, root_of: RootAt) -> None:
        """Check and apply the governing record of that leaf; LedgerError if it is not authorised."""
        self.check(record, seq, time, root_of)
        self.apply(record, seq, data)

    def apply(self, record: GoverningRecord, seq: int, data: bytes) -> None:
        """Apply the governing record of that leaf, which was checked."""
        if isinstance(record, KeyEvents):
            given = record.authorization.signatures if record.authorization is not None else ()
            signers = tuple(each.key for each in given)
            owners = {self.owners[each] for each in signers if each in self.owners}
            for event in record.events:
                self.apply_event(event, seq)
                self.additions.append(KeyAddition(seq, event, signers))
                if (key := event.key) is not None and key.role is Role.GOVERNING:
                    self.owners[key.id] = min(owners) if len(owners) == 1 else key.id
        elif isinstance(record, PolicyChange):
            self.policy = record
        else:
            self.witnesses = self.witnesses if record.witnesses is None else record.witnesses
            self.retention = self.retention if record.retention is None else record.retention
            self.withdraw = record.withdraw or self.withdraw
            stated = self.about | {name: (text, seq) for name, text in record.about or ()}
            self.about = {name: stated[name] for name in sorted(stated) if stated[name][0]}
        self.last = leaf_hash(data)

    def about_change(self, wanted: About) -> About | None:
        """Return the change to these texts of the owner; None if they are in force."""
        new, old = dict(wanted), {name: text for name, (text, _) in self.about.items()}
        names = sorted(name for name in new | old if new.get(name) != old.get(name))
        return tuple((name, new.get(name, "")) for name in names) or None

    # ----------------------------------------------------------------------------------- authority

    def proposed(self, record: G, rows: StoreReader, expires: int) -> G:
        """The record with its authorization, but for the signatures: it follows the newest checkpoint."""
        if (signed := rows.checkpoint()) is None:
            problem = f"the ledger {self.origin!r} has no checkpoint that a change could follow"
            raise LedgerError("ledger.no-checkpoint-to-follow", problem, "sign one: lamina ledger checkpoint --key")
        root = parse_checkpoint(signed.text)[0].root
        header, last, size = self.header_hash, self.last, signed.size
        given = Authorization(header=header, previous=last, size=size, root=root, expires=expires)
        return replace(record, authorization=given)

    def check_follows(self, record: GoverningRecord, seq: int, time: int, root_of: RootAt) -> Authorization:
        """LedgerError unless the record may come next, as that leaf at that time, if it is signed; its authorization."""
        if (given := record.authorization) is None:
            problem = "a change of keys, policy or terms is not signed by a governing key"
            raise LedgerError("ledger.not-authorised", problem, _ASK_OWNER)
        if given.header != self.header_hash:
            raise LedgerError("ledger.authorised-for-other-ledger", "the change is for another ledger", _ASK_OWNER)
        if given.previous != self.last:
            problem = "the change follows another governing record than the last one"
            problem += ": it was used before, or is too late"
            raise LedgerError("ledger.authorised-out-of-turn", problem, "propose it again, and have that signed")
        if given.size > seq or root_of(given.size) != given.root:
            problem = f"the ledger has no checkpoint of {given.size} leaves with the root that the change follows"
            raise LedgerError("ledger.authorised-for-other-history", problem, "propose it again, and have that signed")
        if time >= given.expires:
            problem = f"leave for the change ended at {format_utc(given.expires)}, the leaf is of {format_utc(time)}"
            raise LedgerError("ledger.authorisation-expired", problem, "propose it again, and have that signed")
        self._check_change(record, time)
        return given

    def check(self, record: GoverningRecord, seq: int, time: int, root_of: RootAt) -> set[bytes]:
        """Who authorised the record as the next one, as that leaf at that time; LedgerError if that is not enough.

        `root_of` gives the root of the checkpoint of a size, None if there is none.
        """
        given = self.check_follows(record, seq, time, root_of)
        itself = isinstance(record, KeyEvents) and self._replaces_itself(record, given)
        if itself and isinstance(record, KeyEvents):
            event, known = record.events[0], self._keys[given.signatures[0].key]
            if event.effective > time + _MAX_SELF_ROTATION_DELAY or known.replaced is not None:
                problem = f"a ledger key that lets another take over from {format_utc(event.effective)} on is not replaced now"
                remedy = "let it take over within a day, and once; or ask a governing key"
                raise LedgerError("ledger.self-rotation-later", problem, remedy)
        roles = (Role.LEDGER,) if itself else (Role.GOVERNING,)
        signers, wrong = self.signers(governing_message(record), given.signatures, roles, time)
        if wrong is not None:
            problem = f"a signature of the change does not count: {wrong.reason}"
            remedy = "leave it out, or give one by a governing key of the ledger, over this very change"
            raise LedgerError("ledger.authorising-signature-invalid", problem, remedy)
        if not signers:
            problem = "a change of keys, policy or terms is not signed by a governing key"
            raise LedgerError("ledger.not-authorised", problem, _ASK_OWNER)
        if len(signers) < 2 and (why := self.needs_two(record, time)):
            remedy = "keep what was promised, or have a second governing key sign: lamina ledger sign"
            if isinstance(record, PolicyChange):
                problem = f"the policy protects less than {self.origin!r} has promised: {'; '.join(why)}"
                raise LedgerError("ledger.policy-loosened", problem, remedy)
            problem = f"the change takes two governing keys, one signed: {'; '.join(why)}"
            raise LedgerError("ledger.second-signature-missing", problem, remedy)
        several = len({self.owners[each.id] for each in self.standing(Role.GOVERNING, time)}) > 1
        alone = not itself and len({self.owners[each] for each in signers}) < 2
        if alone and (several or not isinstance(record, KeyEvents)) and (why := self.needs_two(record, time)):
            problem = f"the change takes two owners, and one let the other key in: {'; '.join(why)}"
            remedy = "have another owner of the header sign; where there is none, only a new ledger can promise less"
            raise LedgerError("ledger.signed-by-one-owner", problem, remedy)
        return signers

    def needs_two(self, record: GoverningRecord, time: int) -> list[str]:
        """Why the record needs the signatures of two governing keys; empty if one is enough."""
        if isinstance(record, PolicyChange):
            return loosened(self.policy.floors, self.policy.presets, record.floors, record.presets)
        if isinstance(record, TermsChange):
            found = []
            if record.witnesses is not None and record.witnesses < self.witnesses:
                found.append(f"{record.witnesses} cosignatures are fewer than {self.witnesses}")
            if record.retention is not None and record.retention < self.retention:
                found.append(f"a retention of {record.retention} s is shorter than {self.retention} s")
            if record.withdraw is WithdrawalRule.KEEPER and self.withdraw is WithdrawalRule.SIGNED:
                found.append("the keeper may withdraw alone, and before only signed requests did")
            return found
        governing = any(Role.GOVERNING in self._roles_of(event) for event in record.events)
        several = len(self.standing(Role.GOVERNING, time)) > 1
        return ["it changes who governs, and two or more do"] if governing and several else []

    def _roles_of(self, event: KeyEvent) -> set[Role]:
        keys = (event.key, None if event.target is None else self.get(event.target))
        return {key.role for key in keys if key is not None}

    def _replaces_itself(self, record: KeyEvents, given: Authorization) -> bool:
        """Whether a ledger key lets another take over from itself."""
        event = record.events[0]
        rotation = event.change is KeyChange.ROTATE and self._roles_of(event) == {Role.LEDGER}
        return rotation and len(record.events) == 1 and {each.key for each in given.signatures} == {event.target}

    def _check_change(self, record: GoverningRecord, time: int) -> None:
        """LedgerError unless the change itself may follow, whoever signed it."""
        after = self
        if isinstance(record, PolicyChange):
            check_policy_digest(self.origin, record.floors, record.policy)
            return
        if isinstance(record, KeyEvents):
            after = self.after(())
            for event in record.events:
                after.check_event(event)
                after.check_still_signed(event, time)
                after.apply_event(event, self.size)
            time = max(time, *(event.effective for event in record.events))
            if not after.standing(Role.GOVERNING, time):
                problem = f"nobody would govern the ledger {self.origin!r} any more"
                remedy = "add or rotate to another key in the same record"
                raise LedgerError("ledger.last-governing-key", problem, remedy)
            if not any(Role.WITNESS in self._roles_of(event) for event in record.events):
                return
        wanted = record.witnesses if isinstance(record, TermsChange) else self.witnesses
        if wanted is not None and wanted > (there := len(after.standing(Role.WITNESS, time))):
            problem = f"checkpoints would need {wanted} cosignatures, and {there} witnesses would be left"
            raise LedgerError("ledger.too-few-witnesses", problem, "name more witnesses first, or require fewer")


_MAX_SELF_ROTATION_DELAY = 86_400  # seconds until the next key takes over
_ASK_OWNER = (
    "have it signed by a governing key: lamina ledger key, policy and terms propose it, lamina ledger sign signs"
)


def check_header_signed(header: Header) -> None:
    """LedgerError unless exactly the governing keys of the header signed it."""
    signed = {each.key: each.signature for each in header.signatures}
    keys = {each.id: each.public for each in header.keys if each.role is Role.GOVERNING}
    message = header.message()
    for kid in keys.keys() | signed.keys():
        if kid not in keys or kid not in signed or not keys[kid].verify(message, signed[kid]):
            problem = f"governing key {kid.hex()[:16]} of the header did not sign it"
            remedy = "have every governing key that the header names sign it, and no other: lamina ledger init"
            raise LedgerError("ledger.header-not-signed", problem, remedy)


def signed_record(record: G, keys: Iterable[PrivateKey]) -> G:
    """A proposed record with the signatures of these keys added."""
    assert record.authorization is not None
    message, made = governing_message(record), {each.key: each for each in record.authorization.signatures}
    made |= {key.public.id: PartySignature(key=key.public.id, signature=key.sign(message)) for key in keys}
    return replace(record, authorization=replace(record.authorization, signatures=tuple(made.values())))


def checkpoint_roots(rows: StoreReader) -> RootAt:
    """The root of a stored checkpoint, if the tree agrees with it."""

    def root_of(size: int) -> bytes | None:
        signed = rows.checkpoint(size) if size else None
        if signed is None:
            return None
        root = parse_checkpoint(signed.text)[0].root
        return root if root_at(TileNodes(tile_reader(rows)), size) == root else None

    return root_of


def leaf_bytes(rows: StoreReader, seq: int) -> bytes:
    """What the tree hashes of a leaf; nothing if it is not there."""
    return b"" if (data := rows.leaf(seq)) is None else data.leaf


def check_key_may_sign(keys: KeyState, key: PrivateKey, time: int) -> None:
    """LedgerError unless the key may sign the next checkpoint, if the last leaf is of that time."""
    if (wrong := keys.why_not_signing(key.public.id, time)) is not None:
        problem = f"key {key.public.name[:16]} cannot sign for the ledger {keys.origin!r}: it {wrong.reason}"
        remedy = "give the key that the header or the last key record names: lamina ledger key LEDGER lists them"
        raise LedgerError("ledger.key-may-not-sign", problem, remedy)


class PolicyInForce:
    """Floors and class presets after the leaves read so far. `version` changes with them."""

    def __init__(self, header: Header, current: PolicyChange | Header | None = None) -> None:
        """`current` skips the changes in between: for admission, where only the newest policy counts."""
        last = current or header
        self.floors, self.presets = last.floors, {each.cls: each for each in last.presets}
        self.version = 0
        self._since: list[tuple[int, dict[str, ClassBounds]]] = [(0, self.presets)]

    def change(self, seq: int, new: PolicyChange) -> None:
        """Apply one policy change that is authorised."""
        self.floors, self.presets = new.floors, {each.cls: each for each in new.presets}
        self.version += 1
        self._since.append((seq, self.presets))

    def promised(self, cls: str, leaf: int) -> int:
        """The least noise multiplier that a class was promised after so many leaves, or later; 0 if none was.

        A segment is charged when it is opened, and what was promised then holds for it to its end.
        """
        found = [presets.get(cls) for presets in self._from(leaf)]
        return min(0 if each is None else each.noise_multiplier for each in found)

    def risks(self, cls: str, leaf: int) -> tuple[RiskBound, ...]:
        """Return the risk bounds of a class after so many leaves or later; none if it once had none.

        A segment is charged when it is opened: it must keep one of them.
        """
        found = [None if (each := presets.get(cls)) is None else each.risk for presets in self._from(leaf)]
        return () if None in found else tuple(each for each in found if each is not None)

    def presets_since(self, cls: str, leaf: int) -> list[ClassBounds]:
        """The presets of a class after so many leaves, and later: a run keeps the plan that it began with."""
        return [presets[cls] for presets in self._from(leaf) if cls in presets]

    def _from(self, leaf: int) -> list[dict[str, ClassBounds]]:
        first = sum(seq < leaf for seq, _ in self._since) - 1
        return [presets for _, presets in self._since[max(first, 0) :]]

    def violation(self, terms: ContributionTerms) -> Violation | None:
        """Why a contribution with these terms must not be admitted; None if it may."""
        if (wrong := self.bound_violation(terms.cls, terms.clip_norm, terms.noise_multiplier)) is not None:
            return wrong
        if terms.profile is not None and (deeper := profile_exceeds(self.presets[terms.cls].profile, terms.profile)):
            return Violation("verify.profile-exceeded", deeper)
        return None

    def bound_violation(self, cls: str, c: int, z: int) -> Violation | None:
        """Why the policy does not admit clip norm c and noise multiplier z (in 1e-6) in a class; None if it does."""
        preset, name, floors = self.presets.get(cls), f"class {cls!r}", self.floors
        if preset is None:
            return Violation("verify.class-unknown", f"{name} is not in the policy")
        if preset.public:
            reason = f"{name} is public, but the contribution signed a bound"
            return Violation("verify.bound-of-public-class", reason) if c or z else None
        if not z:
            return Violation("verify.no-bound-signed", f"{name} is private, but the contribution signed no bound")
        clip, noise = f"clip norm {c / 1e6:.9g} is", f"noise multiplier {z / 1e6:.9g} is"
        if c < floors.clip_norm:
            return Violation("verify.clip-norm-below-floor", f"{clip} below the floor, {floors.clip_norm / 1e6:.9g}")
        if z < floors.noise_multiplier:
            reason = f"{noise} below the floor, {floors.noise_multiplier / 1e6:.9g}"
            return Violation("verify.noise-below-floor", reason)
        if c > preset.clip_norm:
            reason = f"{clip} above that of {name}, {preset.clip_norm / 1e6:.9g}"
            return Violation("verify.clip-norm-above-class", reason)
        if z < preset.noise_multiplier:
            reason = f"{noise} below that of {name}, {preset.noise_multiplier / 1e6:.9g}"
            return Violation("verify.noise-below-class", reason)
        return None
