"""The ledger of a corpus: what it says of it, opening or creating it, and adopting a policy."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any, Protocol

from lamina.account.schedule import rdp_order_of
from lamina.admit.attestation import MICRO
from lamina.admit.signing import SECONDS_PER_YEAR
from lamina.admit.terms import class_multiplier, floors_hash, profile_text, to_micro
from lamina.errors import LedgerError
from lamina.ledger.governance_records import (
    NO_POLICY,
    About,
    ClassBounds,
    Header,
    Key,
    LedgerFloors,
    PolicyChange,
    Role,
    WithdrawalRule,
    sign_header,
)
from lamina.ledger.key_state import GovernanceState
from lamina.ledger.schema import ORIGIN, PROFILE, STATEMENT, program_version
from lamina.ledger.store.sqlite import is_postgres_url, ledger_exists, printable_location
from lamina.ledger.writer import DAY_SECONDS, Ledger
from lamina.plan.policy import Policy
from lamina.plan.step_plan import PlannedClass, StepPlan
from lamina.sign import keys
from lamina.sign.keys import PrivateKey, PublicKey, path_lock
from lamina.validate import short_repr

_DELTA_WITHOUT_NOISE = 1e-6  # of a plan that owes nobody noise: nothing is ever stated at it
_MAX_SLUG = 100  # characters of a slug


@dataclass(frozen=True, kw_only=True)
class CorpusTerms:
    """Origin, accountant and δ, which a ledger has for good; floors, presets and policy, which may change.

    `policy` is the digest that contributors sign (admit.checks.floors_hash); NO_POLICY where there is none. `ledger` is the
    hash of the header leaf of the only ledger that the policy admits into, if it names one. `retention` (seconds),
    `granularity`, `witnesses` (None: as many as there are), `withdraw`, `other_people` and `about` are written into the
    header of a new ledger and not used later.
    """

    origin: str
    accountant: str
    delta: float
    floors: LedgerFloors
    presets: tuple[ClassBounds, ...]
    policy: bytes
    ledger: bytes | None = None
    retention: int = SECONDS_PER_YEAR
    granularity: int = 1
    witnesses: int | None = None
    withdraw: WithdrawalRule = WithdrawalRule.KEEPER
    other_people: str | None = None
    about: About = ()

    def __post_init__(self) -> None:
        if not ORIGIN.fits(self.origin):
            problem = (
                f"the origin {self.origin!r} cannot name a ledger: a signed note takes 1 to 255 printable ASCII "
                "characters, no blank and no '+'"
            )
            remedy = f'choose something like origin = "{origin_slug(str(self.origin))}", and sign for that'
            raise LedgerError("ledger.origin-not-a-name", problem, remedy)
        if self.other_people is not None and not STATEMENT.fits(self.other_people):
            problem = f"other_people is {short_repr(self.other_people)}, must be 1 to 255 printable ASCII characters"
            remedy = 'state why these are other people: other_people="ward 3, opened after the first run; nobody was in both"'
            raise LedgerError("ledger.other-people-not-a-reason", problem, remedy)

    @classmethod
    def of_policy(cls, policy: Policy) -> CorpusTerms:
        """A corpus under a policy: what each class promises, in the integers in which it is signed."""
        corpus = policy.corpus
        return cls(
            origin=corpus.origin,
            accountant=corpus.accountant,
            delta=corpus.delta,
            floors=LedgerFloors(
                clip_norm=_floor_in_micro(corpus.floors.clip_norm, ROUND_FLOOR),
                noise_multiplier=_floor_in_micro(corpus.floors.noise_multiplier, ROUND_CEILING),
            ),
            presets=tuple(_bounds_of_policy(policy, name) for name in policy.classes),
            policy=floors_hash(policy),
            ledger=corpus.ledger_hash,
            retention=corpus.retention * DAY_SECONDS,
            granularity=corpus.granularity,
            witnesses=corpus.witnesses,
            withdraw=WithdrawalRule[corpus.withdraw.upper()],
            other_people=corpus.other_people,
            about=policy.about.stated,
        )

    @classmethod
    def of_plan(cls, plan: StepPlan, origin: str, other_people: str | None = None) -> CorpusTerms:
        """A corpus without a policy: its classes are the plan's, and promise nothing.

        A plan that follows its budget has an accountant of its own; a ledger of several runs counts by RDP then. Of
        several δ the smallest holds, at which every ε is largest.
        """
        return cls(
            origin=origin,
            accountant=plan.accountant if rdp_order_of(plan.accountant) is None else "rdp",
            delta=min((each.delta for each in plan.classes if each.delta > 0), default=_DELTA_WITHOUT_NOISE),
            floors=LedgerFloors(),
            presets=tuple(map(_bounds_of_plan, plan.classes)),
            policy=NO_POLICY,
            other_people=other_people,
        )

    def header(self, key: PublicKey, parties: Sequence[Key], **other: Any) -> Header:
        """Leaf 0 of a ledger whose checkpoints `key` signs, with its owners and witnesses; to be signed by the owners."""
        witnesses = sum(each.role is Role.WITNESS for each in parties)
        terms: dict[str, Any] = {"retention": self.retention, "granularity": self.granularity}
        terms["withdraw"] = None if self.withdraw is WithdrawalRule.KEEPER else self.withdraw
        terms["witnesses"] = witnesses if self.witnesses is None else self.witnesses
        return Header(
            origin=self.origin,
            accountant=self.accountant,
            version=program_version(),
            delta=self.delta,
            floors=self.floors,
            presets=self.presets,
            policy=self.policy,
            other_people=self.other_people,
            about=self.about or None,
            keys=(Key(name=self.origin, x=key.x, role=Role.LEDGER), *parties),
            **terms | other,
        )

    def change(self, now: Header | PolicyChange) -> PolicyChange | None:
        """What makes it the policy in force; None if it is. Classes that it does not name stay as they are."""
        presets = tuple({each.cls: each for each in (*now.presets, *self.presets)}.values())
        if (self.floors, presets, self.policy) == (now.floors, now.presets, now.policy):
            return None
        return PolicyChange(floors=self.floors, presets=presets, policy=self.policy)


def origin_slug(origin: str) -> str:
    """An origin as part of a file name.

    >>> origin_slug("example.org/ECG"), origin_slug("St. Elsewhere, cardiology")
    ('example.org-ecg', 'st.-elsewhere-cardiology')
    """
    digest = hashlib.sha256(origin.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    text = re.sub(r"[^a-z0-9._-]+", "-", origin.lower()).strip("-.")
    if len(text) > _MAX_SLUG:
        return f"{text[: _MAX_SLUG - 13]}-{digest}"
    return text or f"corpus-{digest}"


def _bounds_of_policy(policy: Policy, name: str) -> ClassBounds:
    entry = policy.classes[name]
    return ClassBounds(
        cls=name,
        clip_norm=0 if entry.public else to_micro(entry.clip_norm, ROUND_FLOOR),
        noise_multiplier=class_multiplier(policy, name),
        public=entry.public,
        profile=profile_text(entry.profile),
        population=entry.population,
        risk=entry.risk,
    )


def _bounds_of_plan(entry: PlannedClass) -> ClassBounds:
    words = entry.profile
    if not PROFILE.fits(words):
        words = f"sha256:{hashlib.sha256(words.encode()).hexdigest()}"
    return ClassBounds(
        cls=entry.name, clip_norm=0, noise_multiplier=0, public=entry.public, profile=words, population=entry.population
    )


def _floor_in_micro(value: float | None, rounding: str) -> int:
    """A floor as the gate holds contributions to it."""
    return 0 if value is None else int((Decimal(repr(value)) * MICRO).to_integral_value(rounding))


LedgerPath = str | os.PathLike[str]


def ledger_key_path(path: LedgerPath) -> Path:
    """Where the key of a ledger in a file is kept: x.db has x.pem beside it, also where x.db is a link to it."""
    found = Path(os.path.realpath(path))
    return found.with_name(f"{found.name.removesuffix('.db')}.pem")


def governing_key_path(path: LedgerPath) -> Path:
    """Where the governing key of a ledger is kept that has no other owner: x.db has x.governing.pem beside it."""
    return ledger_key_path(path).with_suffix(".governing.pem")


def open_or_create(
    where: LedgerPath,
    contract: CorpusTerms,
    key: PrivateKey | None = None,
    *,
    governing: PrivateKey | None = None,
    retention: int | None = None,
    clock: Callable[[], float] = time.time,
) -> Ledger:
    """The ledger of a corpus, at a path or in a database ("postgresql://…#schema"); made if there is none.

    key        signs its checkpoints. For a file it is the one beside it (`ledger_key_path`), which is made with the
               ledger, mode 0600; a ledger whose key is not there is opened without. To make one in a database both keys
               must be given
    governing  authorises changes of keys, policy and terms. For a file it is the one beside it (`governing_key_path`),
               made in the same way: such a ledger is its user's own, and consistent in itself. A ledger that
               `lamina ledger init` made has an owner elsewhere and no such file

    Of several processes that make it at the same moment one does, and the others open it. A ledger of another origin
    is refused, and so is one that counts by another accountant or at another δ than the policy says, or is not the one
    that the policy names: then none is made either.
    """
    remote = isinstance(where, str) and is_postgres_url(where)
    place = str(where) if remote else os.path.realpath(where)
    if not ledger_exists(place):
        if contract.ledger is not None:
            problem = f"the policy names the ledger {contract.ledger.hex()[:16]}, and there is none at {printable_location(place)}"
            raise LedgerError("ledger.named-ledger-missing", problem, _GIVE_NAMED)
        folder = Path(place).parent
        if not remote:
            folder.mkdir(parents=True, exist_ok=True)
        with nullcontext() if remote else path_lock(folder):  # a database sees to that itself
            contract = contract if retention is None else replace(contract, retention=retention)
            _create_ledger(place, contract, key, governing, remote, clock)
    if not remote:
        key, governing = key or _key_beside(ledger_key_path(place)), governing or _key_beside(governing_key_path(place))
    ledger = Ledger.open(place, key, governing=governing, clock=clock)
    try:
        check_corpus_terms(ledger, contract)
        if ledger.signs:
            ledger.check_signs()
            if ledger.latest() is None:  # of a process that was killed when it made the ledger
                ledger.checkpoint()
    except BaseException:
        ledger.close()
        raise
    return ledger


def _key_beside(path: Path) -> PrivateKey | None:
    return PrivateKey.load(path, None) if path.exists() else None


def adopt_policy(ledger: Ledger, contract: CorpusTerms) -> bool:
    """Make the contract's floors, presets and policy those in force; whether anything had to be changed.

    Classes that the contract does not name stay as they are. The ledger authorises the change if it was opened with its
    governing key; what protects less than before takes two of them (`lamina ledger policy --propose`).
    """

    def change(state: GovernanceState) -> PolicyChange | None:
        before = state.policy
        if contract.policy == NO_POLICY and before.policy != NO_POLICY:
            problem = f"the ledger {ledger.name} has a policy, but the corpus has none"
            remedy = "give the corpus its policy: Corpus(…, policy=Policy.load('policy.toml'))"
            raise LedgerError("ledger.policy-missing", problem, remedy)
        if (change := contract.change(before)) is not None and not ledger.governs:
            problem = f"another policy is in force in the ledger {ledger.name}, and its governing key is not here"
            remedy = "use the policy in force (lamina ledger policy LEDGER), or ask the owner of the ledger to adopt this one"
            raise LedgerError("ledger.policy-not-in-force", problem, remedy)
        return change

    return ledger.govern_by(change) is not None


def policy_in_force(ledger: Ledger) -> Header | PolicyChange:
    """The last word on floors, presets and policy."""
    return ledger.retry_while_lost(ledger.governance).policy


def about_at(ledger: HasParties, size: int) -> dict[str, dict[str, Any]]:
    """Return the owner's texts of [about] after the first `size` leaves, each with the leaf that states it."""
    return {name: {"text": text, "leaf": leaf} for name, (text, leaf) in ledger.parties(size).about.items()}


class HasParties(Protocol):
    """A ledger that states whose signatures count."""

    def parties(self, before: int | None = None) -> GovernanceState: ...


# --------------------------------------------------------------------------------------- making


def _create_ledger(
    place: str, contract: CorpusTerms, key: PrivateKey | None, governing: PrivateKey | None, remote: bool,
    clock: Callable[[], float],
) -> None:  # fmt: skip
    """Make it, unless another process did meanwhile."""
    if ledger_exists(place):
        return
    if remote and (key is None or governing is None):
        problem = "the database has no ledger yet, and there are no keys to sign and to govern one"
        raise LedgerError("ledger.no-key-to-create", problem, "make it with lamina ledger init, or give both keys")
    if contract.witnesses:
        problem = f"the policy asks for {contract.witnesses} cosignatures of witnesses, and a ledger that is made here has none"
        remedy = "make it with lamina ledger init --witness NAME.pub, or leave witnesses out of [corpus]"
        raise LedgerError("ledger.witnesses-missing", problem, remedy)
    key = key or load_or_make_key(ledger_key_path(place))
    governing = governing or load_or_make_key(governing_key_path(place))
    owner = Key(name=f"governing-{governing.public.name[:8]}", x=governing.public.x, role=Role.GOVERNING)
    header = sign_header(contract.header(key.public, [owner]), [governing])
    try:
        Ledger.create(place, header, key, clock=clock).close()
    except LedgerError:
        if not (remote and ledger_exists(place)):  # else another machine was quicker
            raise


def load_or_make_key(path: Path) -> PrivateKey:
    """A new key; or one that is there already, for a ledger that was not made in the end."""
    if path.exists():
        return PrivateKey.load(path, None)
    key = PrivateKey.generate()
    keys.replace_file(path.with_suffix(".pub"), key.public.pem(), "the public key", mode=0o644)
    key.save(path, None)
    return key


_GIVE_NAMED = "give the place of that ledger (--ledger, or ledger in RUN.toml); for another one, another policy.toml"


def check_named_ledger(ledger: Ledger, contract: CorpusTerms) -> None:
    """LedgerError if the policy names another ledger."""
    if contract.ledger not in (None, found := ledger.header_hash):
        named = "" if contract.ledger is None else contract.ledger.hex()[:16]
        problem = f"the policy names the ledger {named}, {ledger.name} is {found.hex()[:16]}"
        raise LedgerError("ledger.not-the-named-ledger", problem, _GIVE_NAMED)


def check_corpus_terms(ledger: Ledger, contract: CorpusTerms) -> None:
    """LedgerError if the ledger is of another corpus, not the one that its policy names, or counts in another way."""
    header = ledger.header
    if header.origin != contract.origin:
        problem = f"the ledger {ledger.name} is of {header.origin!r}, not of {contract.origin!r}"
        remedy = f"give the ledger of this corpus, or another path for a new one; if it holds the same people, set origin={header.origin!r}"
        raise LedgerError("ledger.wrong-origin", problem, remedy)
    check_named_ledger(ledger, contract)
    if contract.other_people is not None and contract.other_people != header.other_people:
        stated = "nothing" if header.other_people is None else repr(header.other_people)
        problem = f"other_people is {contract.other_people!r}, but the ledger {ledger.name} was created with {stated}"
        remedy = "leave other_people out: it is stated only when a ledger is created"
        raise LedgerError("ledger.other-people-too-late", problem, remedy)
    if contract.policy == NO_POLICY and contract.delta != header.delta:
        problem = f"the ledger {ledger.name} of origin {header.origin!r} uses δ = {header.delta:g}, this run δ = {contract.delta:g}"
        remedy = f"set delta={header.delta:g}, or use another origin: a person in both ledgers then loses the sum"
        raise LedgerError("ledger.delta-differs", problem, remedy)
    counted, asked = (header.accountant, header.delta), (contract.accountant, contract.delta)
    if contract.policy != NO_POLICY and counted != asked:
        problem = (
            f"the ledger {ledger.name} counts by {counted[0]} at δ = {counted[1]:g} for good, "
            f"the policy says {asked[0]} at δ = {asked[1]:g}"
        )
        remedy = "set accountant and delta of [corpus] to those of the ledger, or start a ledger under another origin"
        raise LedgerError("ledger.accounting-differs", problem, remedy)
