"""The inference gate: may this query draw on these layers of a released model? Whatever is not shown to be allowed is denied.

A query says what it draws on (layers, a band of depth, an adapter, or a generation class that the manifest names) and under
which rights. It is allowed if for every layer drawn on and every class that reached the layer

    the class is allowed  ∧  ε ≤ max_epsilon  ∧  TPR(fpr) ≤ max_tpr  ∧  sigma ≥ min_noise_multiplier
    ∧  purpose ∈ purposes of the class
    ∧  (nobody of the class withdrew  ∨  accept_withdrawn)

and the release is not expired, it is attested if the query requires that, its adapter may be deployed in the scope of the
query, and withdrawals are known up to a signed time that is no older than the manifest allows.
A public class is held to its name, purpose and withdrawals: it has neither ε nor noise.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time as system
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

from lamina.errors import LaminaError, NotVerified, StoreBusy, StoreError
from lamina.ledger.following import LedgerFollower
from lamina.ledger.merkle import leaf_hash, root_from_inclusion
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Leaf, decode_leaf
from lamina.ledger.run_records import WEIGHTS
from lamina.ledger.signed_checkpoint import LedgerCheckpoint
from lamina.ledger.verify.tree_checks import KnownCheckpoint, Trust
from lamina.plan.table import percent_text
from lamina.release.manifest import Manifest, open_inside
from lamina.release.posture import AdapterPosture, WithdrawalCounter
from lamina.release.query import Query, Rights, draws_of
from lamina.release.schema import NOT_REACHED
from lamina.release.verifier import verify_release
from lamina.sign.keys import CLOCK_SKEW, PublicKey, format_utc

_MAX_REMEMBERED = 4096  # of what queries draw on, if all of them differ
REFRESH_SECONDS = 0.25  # between two looks at the ledger: a fresh withdrawal counts within a second
RETRY_SECONDS = 1.0  # seconds between looks after one that failed


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


class _Case(NamedTuple):
    """A class that reached the layers drawn on, and a query, as the check of a denial sees them."""

    cls: _ClassState
    rights: Rights
    gone: int  # withdrawn contributions of the class
    unstated_purposes: bool


class Denial(NamedTuple):
    """A reason for which the gate denies: its code, what it means, what to do, and the check of one about a class.

    The check returns the text of the reason, or None. docs/release.md has a row for each.
    """

    code: str
    means: str
    remedy: str
    check: Callable[[_Case], str | None] | None = None


def _class_not_allowed(case: _Case) -> str | None:
    allowed = case.cls.name in case.rights.classes
    return None if allowed else f"class {case.cls.name} is not among the classes that the query may use"


def _epsilon_too_large(case: _Case) -> str | None:
    if case.cls.public or case.cls.epsilon <= case.rights.max_epsilon:
        return None
    spent = "no finite ε is proven" if case.cls.epsilon == float("inf") else f"ε is {case.cls.epsilon:.6g}"
    return f"of class {case.cls.name} {spent}, allowed is {case.rights.max_epsilon:g}"


def _risk_too_large(case: _Case) -> str | None:
    most, cls = case.rights.max_tpr, case.cls
    rate = None if most is None else cls.rates.get((most.of, most.fpr))
    if cls.public or most is None or (rate is not None and rate <= most.tpr):
        return None
    found_by = f"nothing is proven about the {most.of} of class {cls.name}"
    if rate is not None:
        found_by = f"an attack on the {most.of} of class {cls.name} finds up to {percent_text(rate)}"
    return f"{found_by}, allowed is {100 * most.tpr:g} % at {100 * most.fpr:g} % false accusations"


def _noise_too_small(case: _Case) -> str | None:
    if case.cls.public or case.cls.sigma >= case.rights.min_noise_multiplier:
        return None
    asked = case.rights.min_noise_multiplier
    return f"class {case.cls.name} had noise multiplier {case.cls.sigma:.6g}, asked is {asked:g}"


def _purpose_not_allowed(case: _Case) -> str | None:
    purpose, stated = case.rights.purpose, case.cls.purposes
    if purpose in stated or (case.unstated_purposes and not stated):
        return None
    allowed = ", ".join(sorted(stated)) or "none stated"
    return f"class {case.cls.name} may not be used for {purpose!r}, its purposes are: {allowed}"


def _withdrawn(case: _Case) -> str | None:
    if not case.gone or case.rights.accept_withdrawn:
        return None
    return f"{case.gone} of class {case.cls.name} withdrew, and the query does not accept that"


_OTHER_LAYERS, _OTHER_LEDGER = (
    "ask for layers that the class did not reach",
    "restore the ledger that the manifest names",
)
DENIALS = (
    Denial("class-not-allowed", "the query may not use a class that reached the layers", _OTHER_LAYERS, _class_not_allowed),
    Denial("epsilon-too-large", "ε of a class is above `max_epsilon`", _OTHER_LAYERS, _epsilon_too_large),
    Denial(
        "risk-too-large", "an attack on a class finds more than `max_tpr` allows, or no bound is proven", _OTHER_LAYERS,
        _risk_too_large,
    ),
    Denial("noise-too-small", "σ of a class is below `min_noise_multiplier`", _OTHER_LAYERS, _noise_too_small),
    Denial(
        "purpose-not-allowed", "the purpose is not among those of a class", "ask for a purpose that its policy names",
        _purpose_not_allowed,
    ),
    Denial(
        "withdrawn", "contributions of a class were withdrawn", "accept that (`accept_withdrawn`), or train and release again",
        _withdrawn,
    ),
    Denial(
        "not-attested", "the query requires `attested`, and the ledger has no signed contributions for a run of the model",
        "train on signed contributions (`lamina attest`)",
    ),
    Denial(
        "draws-on-unknown", "no such layer, adapter or generation class: every name and pattern must mean something",
        "take names from the posture of the manifest",
    ),
    Denial("draws-on-less", "the model answers with more layers than the query names", "name all layers, or a generation class"),
    Denial(
        "outside-scope", "the adapter is bound to another scope; `ward-7` contains `ward-7/ecg`",
        "state the scope in which the answer is used",
    ),
    Denial("base-not-frozen", "the base without its adapter, and both were trained together", "name the adapter"),
    Denial("expired", "the release may no longer be served", "make a newer release"),
    Denial(
        "stale", "the newest signed time is older than `--max-age`, or more than 120 s later than the gate's clock",
        "run `lamina ledger heartbeat`, or set the clock",
    ),
    Denial("ledger-unreachable", "the ledger cannot be read", "restore its file or server"),
    Denial("ledger-replaced", "the ledger of this release was replaced by another one", _OTHER_LEDGER),
    Denial("ledger-shorter", "the ledger is shorter than it was", _OTHER_LEDGER),
    Denial("ledger-forked", "the leaves of the ledger differ from those that were signed", _OTHER_LEDGER),
    Denial("ledger-not-verified", "the ledger cannot be verified", "`lamina ledger verify` names the reason"),
)  # fmt: skip
_OF_CLASSES = [(each.code, each.check) for each in DENIALS if each.check is not None]


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
                name,
                each.public,
                float("inf") if each.epsilon is None else each.epsilon,
                0.0 if each.noise_multiplier is None else each.noise_multiplier,
                frozenset(each.purposes),
                reach[name],
                {
                    (of, float(rate)): value
                    for of, rates in (("membership", each.membership), ("content", each.content))
                    for rate, value in (rates or {}).items()
                },
            )
            for name, each in posture.classes.items()
        )

    def decide(
        self, query: Query, *, withdrawn: Mapping[str, int], as_of: int, besides: Sequence[DenialReason]
    ) -> Decision:
        """Whether the query is allowed, where so many of each class withdrew; `besides` are reasons of the release."""
        drawn, rights, unstated = self._draws_on(query), query.rights, self.manifest.gate.unstated_purposes
        reasons = [*drawn.reasons, *besides]
        if rights.attested and not self.manifest.posture.attested:
            why = "the ledger has no signed contributions of the runs, and the query requires them"
            reasons.append(DenialReason(code="not-attested", text=why))
        for each in self._classes:
            if each.reach & drawn.mask:
                case = _Case(each, rights, withdrawn.get(each.name, 0), unstated)
                found = [(code, text) for code, check in _OF_CLASSES for text in (check(case),) if text is not None]
                layers = self._reached_layers(each.reach & drawn.mask) if found else ()
                reasons += [DenialReason(code=code, text=text, cls=each.name, layers=layers) for code, text in found]
        count, digest = drawn.mask.bit_count(), self.manifest.digest
        return Decision(allowed=not reasons, reasons=tuple(reasons), drawn=count, as_of=as_of, manifest=digest)

    def layers(self, query: Query) -> tuple[str, ...]:
        """The layers that a query draws on."""
        return self._reached_layers(self._draws_on(query).mask)

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
            return self._resolve(replace(query, **draws_of(draws)))
        mine = self._adapters.get(query.adapter or "", [])
        if query.adapter is not None and not mine:
            return _unknown(f"the release has no adapter {query.adapter!r}")
        reasons = []
        for each in (each for each in mine if not _scope_allows(each.scope, query.scope)):
            text = f"adapter {each.name!r} may be deployed in {each.scope!r}, the query is for {query.scope!r}"
            reasons.append(DenialReason(code="outside-scope", text=text, layers=tuple(each.layers)))
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
    each.code: f"withdrawals are not known: {each.means}" for each in DENIALS if each.code.startswith("ledger-")
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
        if ledger.origin != at.origin or ledger.header_hash.hex() != at.header:
            problem = f"{ledger.name} is not the ledger of this release, which is of {at.origin!r}"
            raise NotVerified("release.other-ledger", problem, "give the ledger that the manifest names")
        self._ledger = ledger
        self._known = LedgerCheckpoint(at.origin, at.size, bytes.fromhex(at.root))
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
