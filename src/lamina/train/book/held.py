"""What a run holds of its accounts, as the store keeps it: an attempt that was charged, or what is reserved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field

from lamina import cbor
from lamina.account import order_of
from lamina.account.pooled import Kind
from lamina.errors import EncodingError
from lamina.ledger.records import Outcome, Segment
from lamina.ledger.store.errors import Damaged
from lamina.plan import StepPlan
from lamina.train.book.charge import Charge

_LARGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class Begun:
    """What the leaf of an attempt will say, beside its charges: whoever loses the run can still have it recorded."""

    first: int
    last: int
    eligibility: int
    after: int = 0
    variance: tuple[float, ...] = ()

    def segment(self, index: int, generation: int, nonce: bytes, outcome: Outcome) -> Segment:
        """The attempt, once it has ended."""
        return Segment(
            index=index,
            generation=generation,
            nonce=nonce,
            first=self.first,
            last=self.last,
            eligibility=self.eligibility,
            outcome=outcome,
            after=self.after or None,
        )

    def applied(self, plan: StepPlan) -> tuple[float, ...]:
        """The variance of each layer: the plan's, unless its rules had moved it."""
        return self.variance or tuple(s * s for s in plan.noise)


@dataclass(frozen=True, slots=True)
class Held:
    """Charges, the scale of each signed bound among them, the digest of their plan, the place of the run's journal."""

    charges: tuple[Charge, ...]
    scales: Mapping[str, float] = field(default_factory=dict)
    plan: bytes = b""
    begun: Begun | None = None
    place: int = 0

    def encode(self) -> bytes:
        rows = [list(astuple(each)) for each in self.charges]
        begun = [] if self.begun is None else [*astuple(self.begun)[:4], list(self.begun.variance)]
        whole = [rows, dict(self.scales), self.plan, begun, self.place]
        return cbor.encode(whole, floats=True, max_size=_LARGEST)

    @classmethod
    def decode(cls, data: bytes) -> Held:
        try:
            rows, scales, plan, begun, place = cbor.decode(data, floats=True, max_size=_LARGEST)
            charges, made = tuple(_charge(*row) for row in rows), _begun(*begun) if begun else None
            return cls(charges, dict(scales), plan, made, place)
        except (EncodingError, TypeError, ValueError) as error:
            raise Damaged(
                "spend.run-holds-ledger",
                "what a run holds of a ledger cannot be read",
                "restore the ledger from a copy",
            ) from error

    def of(self, name: str) -> tuple[Charge, ...]:
        """The charges of one account."""
        return tuple(each for each in self.charges if each.cls == name)


def _begun(first: int, last: int, eligibility: int, after: int, variance: list[float]) -> Begun:
    return Begun(first, last, eligibility, after, tuple(variance))


def _charge(cls: str, sigma: float, q: float, steps: int, delta: float, accountant: str) -> Charge:
    return Charge(cls=cls, sigma=sigma, q=q, steps=steps, delta=delta, accountant=accountant)


def kind(charge: Charge) -> Kind:
    """What the price of a charge depends on. Only noise that follows its budget is priced at one order."""
    return (charge.sigma, charge.q, order_of(charge.accountant) or 0.0)


def add(events: dict[Kind, int], charges: Iterable[Charge]) -> dict[Kind, int]:
    """Add charges to events, in place."""
    for each in charges:
        if each.steps:
            found = kind(each)
            events[found] = events.get(found, 0) + each.steps
    return events
