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
from lamina.plan.risk import RiskBound
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
