"""The inference gate: may this query draw on these layers of a released model? Whatever is not shown to be allowed is denied.

A query says what it draws on (layers, a band of depth, an adapter, or a generation class that the manifest names) and under
which rights. It is allowed if for every layer drawn on and every class that reached the layer

    the class is allowed  ∧  ε ≤ max_epsilon  ∧  TPR(fpr) ≤ max_tpr  ∧  sigma ≥ min_noise_multiplier  ∧  purpose ∈ purposes of the class
    ∧  (nobody of the class withdrew  ∨  accept_withdrawn)

and the release is not expired, its adapter may be deployed in the scope of the query, and withdrawals are known up to a
signed time that is no older than the manifest allows.
A public class is held to its name, purpose and withdrawals: it has neither ε nor noise.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time as system
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

from lamina.errors import EncodingError, LaminaError, NotVerified, StoreBusy, StoreError
from lamina.ledger.following import LedgerFollower
from lamina.ledger.merkle import leaf_hash, root_from_inclusion
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Leaf, decode_leaf
from lamina.ledger.run_records import WEIGHTS
from lamina.ledger.signed_checkpoint import LedgerCheckpoint
from lamina.ledger.verify.tree_checks import KnownCheckpoint, Trust
from lamina.plan.risk import STATED_RATES, RiskBound
from lamina.plan.table import percent_text
from lamina.release.manifest import Manifest, open_inside, verify_release
from lamina.release.posture import NOT_REACHED, AdapterPosture, WithdrawalCounter
from lamina.sign.keys import CLOCK_SKEW, PublicKey, format_utc
from lamina.validate import number

MAX_PATTERNS = 64
MAX_PATTERN_CHARACTERS = 4096  # of all patterns together: each is tried on every layer
_MAX_NAME, _MAX_RIGHTS = 512, 1 << 16  # characters, of one and of all together: a line of the log must hold them
_MAX_REMEMBERED = 4096  # of what queries draw on, if all of them differ
REFRESH_SECONDS = 0.25  # between two looks at the ledger: a fresh withdrawal counts within a second
RETRY_SECONDS = 1.0  # seconds between looks after one that failed

_DRAWS_ON = ("layers", "depth", "adapter", "generation_class")
_RIGHTS = ("classes", "max_epsilon", "min_noise_multiplier", "purpose", "accept_withdrawn", "max_tpr")
_MAX_TPR = (
    "max_tpr must state of (membership or content), "
    f"fpr ({', '.join(f'{rate:g}' for rate in STATED_RATES)}) and tpr (above fpr, below 1)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """The rights envelope of a query: under which privacy posture whoever asks may use the model.

    classes               the classes whose data may be drawn on
    max_epsilon           the largest ε that a class may have; inf for any
    min_noise_multiplier  the least sigma that a class must have had in every step; 0 for any
    purpose               what the answer is for
    accept_withdrawn      whether contributions that were withdrawn since may be in it
    max_tpr               what an attack on a class may find at most, at a stated false-positive rate; None for any
    """

    classes: frozenset[str]
    max_epsilon: float
    min_noise_multiplier: float
    purpose: str
    accept_withdrawn: bool = False
    max_tpr: RiskBound | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", frozenset(self.classes))
        texts = (*self.classes, self.purpose)
        if not all(isinstance(each, str) and len(each) <= _MAX_NAME for each in texts) or len(self.classes) > 1024:
            raise _invalid(f"classes and purpose must be texts of at most {_MAX_NAME} characters, 1024 classes at most")
        if sum(map(len, texts)) > _MAX_RIGHTS:
            raise _invalid(f"classes and purpose have more than {_MAX_RIGHTS} characters together")
        if type(self.accept_withdrawn) is not bool:
            raise _invalid(f"accept_withdrawn is {self.accept_withdrawn!r}, must be true or false")
        if self.max_tpr is not None and not (isinstance(self.max_tpr, RiskBound) and self.max_tpr.fpr in STATED_RATES):
            raise _invalid(_MAX_TPR)
        for name in ("max_epsilon", "min_noise_multiplier"):
            value = getattr(self, name)
            if isinstance(value, bool):
                raise _invalid(f"{name} is {value!r}, must be a number")
            checked = number(EncodingError, "release.query-invalid", least=0, infinite=True, **{name: value})
            object.__setattr__(self, name, checked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What a query draws on, and under which rights.

    layers            names or patterns of layers; all of the model if neither this nor `depth` is given
    depth             a band (low, high) of the depth, ends included: 0 is the input, 1 the output
    adapter           the adapter that is switched on; None for the base alone
    generation_class  a name that the manifest gives to one of these; instead of them
    scope             where the answer is used: an adapter may be bound to one
    """

    rights: Rights
    layers: tuple[str, ...] = ()
    depth: tuple[float, float] | None = None
    adapter: str | None = None
    generation_class: str | None = None
    scope: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        texts = (*self.layers, *(t for t in (self.adapter, self.generation_class, self.scope) if t is not None))
        if len(self.layers) > MAX_PATTERNS or not all(isinstance(t, str) and 0 < len(t) <= _MAX_NAME for t in texts):
            raise _invalid(f"it names more than {MAX_PATTERNS} layers, or something that is no name")
        if sum(map(len, self.layers)) > MAX_PATTERN_CHARACTERS:
            raise _invalid(f"its patterns have more than {MAX_PATTERN_CHARACTERS} characters: name a generation class")
        if self.depth is not None:
            low, high = (number(EncodingError, "release.query-invalid", depth=each) for each in self.depth)
            object.__setattr__(self, "depth", (low, high))
        if self.generation_class is not None and (self.layers or self.depth or self.adapter):
            raise _invalid("it names a generation class and layers, depth or adapter beside it")

    @classmethod
    def from_dict(cls, plain: object) -> Query:
        """A query as JSON states it: {"draws_on": {…}, "scope": …, "rights": {…}}; EncodingError for anything else."""
        if type(plain) is not dict or not {"rights"} <= plain.keys() <= {"rights", "draws_on", "scope"}:
            raise _invalid("it must have rights, and may have draws_on and scope")
        draws, rights = plain.get("draws_on", {}), plain["rights"]
        if type(draws) is not dict or draws.keys() - set(_DRAWS_ON):
            raise _invalid(f"draws_on may have {', '.join(_DRAWS_ON)}")
        if type(rights) is not dict or not set(_RIGHTS[:4]) <= rights.keys() <= set(_RIGHTS):
            raise _invalid(f"rights must have {', '.join(_RIGHTS[:4])}, and may have {', '.join(_RIGHTS[4:])}")
        if not (type(rights["classes"]) is list and type(draws.get("layers", [])) is list):
            raise _invalid("classes and layers must be lists")
        most, risk = rights["max_epsilon"], rights.get("max_tpr")
        try:
            bound = None if risk is None else RiskBound.model_validate(risk)
        except ValueError:
            raise _invalid(_MAX_TPR) from None
        try:
            read = {"max_epsilon": float("inf") if most is None else most, "max_tpr": bound}
            what: dict[str, Any] = {name: tuple(v) if type(v) is list else v for name, v in draws.items()}
            return cls(rights=Rights(**rights | read), scope=plain.get("scope"), **what)
        except (TypeError, ValueError):
            raise _invalid("a field has a wrong type") from None

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`."""
        rights = {name: getattr(self.rights, name) for name in _RIGHTS}
        rights["classes"] = sorted(self.rights.classes)
        rights["max_epsilon"] = None if self.rights.max_epsilon == float("inf") else self.rights.max_epsilon
        rights["max_tpr"] = None if self.rights.max_tpr is None else self.rights.max_tpr.model_dump()
        draws = {name: getattr(self, name) for name in _DRAWS_ON}
        told = {name: list(value) if isinstance(value, tuple) else value for name, value in draws.items() if value}
        return {"draws_on": told, "scope": self.scope, "rights": rights}


def _invalid(problem: str) -> EncodingError:
    return EncodingError("release.query-invalid", f"the query cannot be decided: {problem}", "see docs/release.md")


@dataclass(frozen=True, kw_only=True, slots=True)
class DenialReason:
    """Why a query is denied. `layers` are the layers drawn on that the class reached; empty if it is about the whole."""

    code: str
    text: str
    cls: str | None = None
    layers: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "class": self.cls, "text": self.text, "layers": list(self.layers)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A decision of the gate: the reasons of a denial, and the signed time up to which withdrawals were known."""

    allowed: bool
    reasons: tuple[DenialReason, ...]
    drawn: int
    as_of: int
    manifest: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "allowed": self.allowed,
            "reasons": [each.to_dict() for each in self.reasons],
            "layers_drawn_on": self.drawn,
            "withdrawals_as_of": format_utc(self.as_of),
            "manifest": self.manifest,
            "note": NOT_REACHED,
        }


@dataclass(frozen=True, slots=True)
class _ClassState:
    """A class of the posture, as decisions need it. `reach` has bit l set if it reached layer l."""

    name: str
    public: bool
    epsilon: float
    sigma: float
    purposes: frozenset[str]
    reach: int
    rates: Mapping[tuple[str, float], float]  # what an attack finds, by its kind and false-positive rate

    def exceeds(self, most: RiskBound | None) -> bool:
        """Return whether an attack finds more than the bound allows, or no bound is proven."""
        return most is not None and self.rates.get((most.of, most.fpr), 1.0) > most.tpr


class _Drawn(NamedTuple):
    """The layers that a query draws on, as bits, and what forbids drawing on them at all."""

    mask: int
    reasons: tuple[DenialReason, ...]


class GateRule:
    """The rule of a gate for one manifest, without files and clocks."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._names = [layer.name for layer in manifest.posture.layers]
        self._depths = [layer.depth for layer in manifest.posture.layers]
        self._classes = self._read_classes()
        self._adapters: dict[str, list[AdapterPosture]] = {}  # one name may have had several scopes: all of them bind
        for each in manifest.posture.adapters:
            self._adapters.setdefault(each.name, []).append(each)
        self._drawn: dict[tuple[Any, ...], _Drawn] = {}
        self._reached_layers = lru_cache(maxsize=_MAX_REMEMBERED)(self._layers_of)

    def _read_classes(self) -> tuple[_ClassState, ...]:
        posture, reach = self.manifest.posture, dict.fromkeys(self.manifest.posture.classes, 0)
        for at, layer in enumerate(posture.layers):
            for name in layer.classes:
                reach[name] |= 1 << at
        return tuple(
            _ClassState(
                each.name,
                each.public,
                float("inf") if each.epsilon is None else each.epsilon,
                0.0 if each.noise_multiplier is None else each.noise_multiplier,
                frozenset(each.purposes),
                reach[each.name],
                {
                    (of, float(rate)): value
                    for of, rates in (("membership", each.membership), ("content", each.content))
                    for rate, value in (rates or {}).items()
                },
            )
            for each in posture.classes.values()
        )

    def decide(
        self, query: Query, *, withdrawn: Mapping[str, int], as_of: int, besides: Sequence[DenialReason]
    ) -> Decision:
        """Whether the query is allowed, where so many of each class withdrew; `besides` are reasons of the release."""
        drawn, rights, unstated = self._draws_on(query), query.rights, self.manifest.gate.unstated_purposes
        reasons = [*drawn.reasons, *besides]
        for each in self._classes:
            if not each.reach & drawn.mask:
                continue
            gone = withdrawn.get(each.name, 0)
            if (
                each.name in rights.classes
                and (each.public or (each.epsilon <= rights.max_epsilon and each.sigma >= rights.min_noise_multiplier))
                and (each.public or not each.exceeds(rights.max_tpr))
                and (rights.purpose in each.purposes or (unstated and not each.purposes))
                and (not gone or rights.accept_withdrawn)
            ):
                continue
            reasons += self._class_reasons(each, rights, gone, drawn.mask)
        count, digest = drawn.mask.bit_count(), self.manifest.digest
        return Decision(allowed=not reasons, reasons=tuple(reasons), drawn=count, as_of=as_of, manifest=digest)

    def layers(self, query: Query) -> tuple[str, ...]:
        """The layers that a query draws on."""
        return self._reached_layers(self._draws_on(query).mask)

    def _class_reasons(self, each: _ClassState, rights: Rights, gone: int, mask: int) -> list[DenialReason]:
        found: list[tuple[str, str]] = []
        if each.name not in rights.classes:
            found.append(("class-not-allowed", f"class {each.name} is not among the classes that the query may use"))
        if not each.public and each.epsilon > rights.max_epsilon:
            spent = "no finite ε is proven" if each.epsilon == float("inf") else f"ε is {each.epsilon:.6g}"
            found.append(("epsilon-too-large", f"of class {each.name} {spent}, allowed is {rights.max_epsilon:g}"))
        if not each.public and (most := rights.max_tpr) is not None and each.exceeds(most):
            rate = each.rates.get((most.of, most.fpr))
            found_by = f"nothing is proven about the {most.of} of class {each.name}"
            if rate is not None:
                found_by = f"an attack on the {most.of} of class {each.name} finds up to {percent_text(rate)}"
            allowed = f"{100 * most.tpr:g} % at {100 * most.fpr:g} % false accusations"
            found.append(("risk-too-large", f"{found_by}, allowed is {allowed}"))
        if not each.public and each.sigma < rights.min_noise_multiplier:
            reason = f"had noise multiplier {each.sigma:.6g}, asked is {rights.min_noise_multiplier:g}"
            found.append(("noise-too-small", f"class {each.name} {reason}"))
        if rights.purpose not in each.purposes and not (self.manifest.gate.unstated_purposes and not each.purposes):
            allowed = ", ".join(sorted(each.purposes)) or "none stated"
            reason = f"class {each.name} may not be used for {rights.purpose!r}, its purposes are: {allowed}"
            found.append(("purpose-not-allowed", reason))
        if gone and not rights.accept_withdrawn:
            found.append(("withdrawn", f"{gone} of class {each.name} withdrew, and the query does not accept that"))
        layers = self._reached_layers(each.reach & mask)
        return [DenialReason(code=code, text=text, cls=each.name, layers=layers) for code, text in found]

    def _layers_of(self, reached: int) -> tuple[str, ...]:
        return tuple(name for at, name in enumerate(self._names) if reached >> at & 1)

    def _draws_on(self, query: Query) -> _Drawn:
        key = (query.layers, query.depth, query.adapter, query.generation_class, query.scope)
        found = self._drawn.get(key)
        if found is None:
            if len(self._drawn) >= _MAX_REMEMBERED:
                self._drawn.clear()
            found = self._drawn[key] = self._resolve(query)
        return found

    def _resolve(self, query: Query) -> _Drawn:
        named = query.generation_class
        if named is not None:
            draws = self.manifest.gate.generation_classes.get(named)
            if draws is None:
                return _unknown(f"the manifest has no generation class {named!r}")
            try:
                inner = Query.from_dict(query.to_dict() | {"draws_on": dict(draws)})
            except EncodingError as error:
                return _unknown(f"generation class {named!r} of the manifest is not usable: {error.problem}")
            nested = inner.generation_class is not None
            return _unknown("a generation class names another") if nested else self._resolve(inner)
        mine = self._adapters.get(query.adapter or "", [])
        if query.adapter is not None and not mine:
            return _unknown(f"the release has no adapter {query.adapter!r}")
        reasons = []
        for each in (each for each in mine if not _scope_allows(each.scope, query.scope)):
            text = f"adapter {each.name!r} may be deployed in {each.scope!r}, the query is for {query.scope!r}"
            reasons.append(DenialReason(code="outside-scope", text=text, layers=each.layers))
        if self._adapters and not mine and (text := self._base_trained()):
            reasons.append(DenialReason(code="base-not-frozen", text=text))
        own = {name for each in mine for name in each.layers}
        others = {name for each in self._all_adapters() for name in each.layers} - own
        usable = self._bits(name not in others for name in self._names)
        matching = [self._bits(map(re.compile(translate(each)).match, self._names)) for each in query.layers]
        for pattern in (p for p, bits in zip(query.layers, matching, strict=True) if not bits & usable):
            text = f"no layer that is switched on is called {pattern!r}"
            reasons.append(DenialReason(code="draws-on-unknown", text=text))
        chosen = usable
        if matching:
            chosen &= reduce(or_, matching)
        if query.depth is not None:
            low, high = query.depth
            chosen &= self._bits(low <= depth <= high for depth in self._depths)
        chosen |= self._bits(name in own for name in self._names)
        if not chosen:
            names = ", ".join(self._names[:8]) + (", …" if len(self._names) > 8 else "")
            text = f"it draws on no layer of the model, which has {names}"
            reasons.append(DenialReason(code="draws-on-unknown", text=text))
        return _Drawn(chosen, tuple(reasons))

    def _all_adapters(self) -> list[AdapterPosture]:
        return [each for group in self._adapters.values() for each in group]

    def _base_trained(self) -> str:
        """Why the base cannot be offered without its adapters: it was trained with them."""
        own = {name for each in self._all_adapters() for name in each.layers}
        trained = [layer.name for layer in self.manifest.posture.layers if layer.classes and layer.name not in own]
        return f"the base was not frozen while the adapter trained: {', '.join(trained[:3])}" if trained else ""

    @staticmethod
    def _bits(flags: Any) -> int:
        return sum(1 << at for at, flag in enumerate(flags) if flag)


class ReleaseGate:
    """Decides about queries to one release. Several threads may ask it.

    folder   the release
    trusted  release keys from elsewhere: a key, several, or what `Trust.load` reads
    ledger   the ledger of the release: withdrawals count as soon as they are in it. Without a ledger, only the
             withdrawals that the manifest states count
    seen     checkpoints of that ledger that were seen before

    Every query is denied once the newest signed time up to which withdrawals are known (of the ledger, otherwise of the
    manifest) is older than `max_age` of the manifest's policy, and while the ledger cannot be read or verified.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        trusted: Trust | PublicKey | Sequence[PublicKey],
        *,
        ledger: LedgerReader | None = None,
        seen: Sequence[KnownCheckpoint] = (),
        clock: Callable[[], float] = system.time,
    ) -> None:
        keys = (trusted,) if isinstance(trusted, PublicKey) else trusted
        trust = keys if isinstance(keys, Trust) else Trust(plain=tuple(keys))
        self.folder, self._clock = Path(folder), clock
        self._latest = clock()  # the latest time shown; setting the clock back makes nothing valid again
        found = verify_release(folder, trust=trust, seen=seen, now=int(clock()), ledger=ledger)
        if not found.signed or found.manifest is None:
            problem = f"the release in '{folder}' is {found.verdict}: {'; '.join(map(str, found.problems[:3]))}"
            raise NotVerified("release.not-verified", problem, "serve a release that verifies, with its own key")
        self.manifest: Manifest = found.manifest
        self.rule = GateRule(self.manifest)
        self._withdrawn: Mapping[str, int] = self.manifest.posture.withdrawn
        self._as_of = self.manifest.created
        self._failed: DenialReason | None = None
        self._lock, self._looked, self._pause = threading.Lock(), float("-inf"), REFRESH_SECONDS
        self._ledger = None if ledger is None else _ReleaseLedger(ledger, self.manifest, trust)
        self._look(clock())

    def decide(self, query: Query) -> Decision:
        """Whether the query is allowed, with every reason why not."""
        now = self._clock()
        self._look(now)
        self._latest = max(now, self._latest)
        besides = self._release_reasons(now) or self._release_reasons(self._latest)
        return self.rule.decide(query, withdrawn=self._withdrawn, as_of=self._as_of, besides=besides)

    def _release_reasons(self, now: float) -> list[DenialReason]:
        found = [] if self._failed is None else [self._failed]
        if now >= self.manifest.not_after:
            text = f"the release might be served until {format_utc(self.manifest.not_after)}"
            found.append(DenialReason(code="expired", text=text))
        if not -CLOCK_SKEW <= now - self._as_of <= (most := self.manifest.gate.max_age):
            known = f"withdrawals are known up to {format_utc(self._as_of)}"
            if now < self._as_of:
                text = f"{known}, which is later than the clock of this machine; set the clock"
            elif self._ledger is None:
                text = f"{known}, more than {most} s ago; give the gate the ledger, or a newer release"
            else:
                text = f"{known}, more than {most} s ago; run lamina ledger heartbeat on the ledger"
            found.append(DenialReason(code="stale", text=text))
        return found

    def _look(self, now: float) -> None:
        """Follow the ledger, at most every quarter of a second. What cannot be verified denies every query."""
        if self._ledger is None or 0 <= now - self._looked < self._pause:  # below 0: the clock was set back
            return
        with self._lock:
            if 0 <= now - self._looked < self._pause:
                return
            try:
                self._withdrawn, self._as_of = self._ledger.look(now)
                self._failed, self._pause = None, REFRESH_SECONDS
            except LaminaError as error:
                self._failed, self._pause = _ledger_denial(error), RETRY_SECONDS
            self._looked = self._clock()  # read again: a server that does not answer takes a while

    def weights(self) -> bytes:
        """The weights: the very bytes whose hash is in the manifest, whatever happened to the file since."""
        with os.fdopen(open_inside(self.folder, WEIGHTS), "rb") as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != self.manifest.subjects[WEIGHTS]:
            raise NotVerified("release.file-changed", f"'{WEIGHTS}' was changed after the check", "fetch it again")
        return data


def _unknown(text: str) -> _Drawn:
    return _Drawn(0, (DenialReason(code="draws-on-unknown", text=text),))


def _scope_allows(bound: str | None, asked: str | None) -> bool:
    """Whether a scope lies in the one that an adapter is bound to: equal, or below it ("ward-7" holds "ward-7/ecg")."""
    return bound is None or (asked is not None and (asked == bound or asked.startswith(f"{bound}/")))


LEDGER_DENIALS = {  # texts for clients; the gate adds details, which name files, for the operator
    "ledger-unreachable": "withdrawals are not known: the ledger cannot be read",
    "ledger-replaced": "withdrawals are not known: the ledger of this release was replaced by another one",
    "ledger-shorter": "withdrawals are not known: the ledger is shorter than it was",
    "ledger-forked": "withdrawals are not known: the leaves of the ledger differ from those that were signed",
    "ledger-not-verified": "withdrawals are not known: the ledger cannot be verified",
}
_DENIAL_OF_ERROR = {
    "ledger.replaced-by-other": "ledger-replaced",
    "ledger.shorter-than-seen": "ledger-shorter",
    "ledger.forked-from-seen": "ledger-forked",
    "store.no-ledger": "ledger-unreachable",
}


def _ledger_denial(error: LaminaError) -> DenialReason:
    lost = "ledger-unreachable" if isinstance(error, StoreError | StoreBusy) else "ledger-not-verified"
    code = _DENIAL_OF_ERROR.get(error.code, lost)
    return DenialReason(code=code, text=f"{LEDGER_DENIALS[code]} ({error.problem})")


class _ReleaseLedger:
    """Counts the withdrawals in the ledger of a release from its leaves (`LedgerFollower`), up to the newest leaf."""

    def __init__(self, ledger: LedgerReader, manifest: Manifest, trust: Trust) -> None:
        at = manifest.ledger
        if ledger.origin != at["origin"] or ledger.header_hash.hex() != at["header"]:
            problem = f"{ledger.name} is not the ledger of this release, which is of {at['origin']!r}"
            raise NotVerified("release.other-ledger", problem, "give the ledger that the manifest names")
        self._ledger = ledger
        self._known = LedgerCheckpoint(str(at["origin"]), int(at["size"]), bytes.fromhex(at["root"]))
        self._follower = LedgerFollower(ledger, trust, self._known)
        self._counter = WithdrawalCounter(self._proven_leaf, manifest.posture.eligible)
        self._counts = dict(manifest.posture.withdrawn)

    def look(self, now: float) -> tuple[Mapping[str, int], int]:
        """Return, by class, how many contributions that may be in the model were withdrawn, never fewer than before; and
        the signed time up to which that is known. Raises LedgerError if the ledger does not continue the verified one."""
        self._follower.look(self._count, now)
        return self._counts, self._follower.time

    def _count(self, signed: Sequence[Leaf], unsigned: Sequence[Leaf]) -> None:
        counter = self._counter.copy()
        for leaf in signed:
            counter.see(leaf)
        total = counter.copy()
        for leaf in unsigned:
            total.see(leaf)
        self._counter = counter
        names = self._counts.keys() | total.counts.keys()
        self._counts = {name: max(self._counts.get(name, 0), total.counts.get(name, 0)) for name in names}

    def _proven_leaf(self, seq: int) -> Leaf:
        """A leaf of the tree that the manifest states, by an inclusion proof: a row of a table is no evidence."""
        data = self._ledger.raw(seq)
        size = self._known.size
        if root_from_inclusion(leaf_hash(data.leaf), seq, size, self._ledger.prove(seq, size)) != self._known.root:
            problem = f"leaf {seq} is not one of the first {size} leaves that were signed"
            raise NotVerified("ledger.forked-from-seen", problem, "give the ledger that the manifest names")
        return decode_leaf(data)
