"""`Limits`: what an account may lose, by what was asked for and by what the ledger itself promises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from lamina.account.pooled import Events, pooled
from lamina.ledger.amounts import NANO, UNBOUNDED
from lamina.ledger.opening import last_policy
from lamina.ledger.records import Header
from lamina.ledger.spend import signed_spend
from lamina.ledger.store.base import Reader
from lamina.train.book.account import bound_of
from lamina.train.book.charge import Charge
from lamina.train.book.desk import Desk
from lamina.train.book.total import Terms

_CLASS = 1e-6  # relative: a class's own bound is kept in 1e-6
_most = lru_cache(maxsize=1 << 16)(signed_spend)  # asked at every charge, for every bound


class Refused(Exception):
    """Ends a transaction: an account would pass a bound."""

    def __init__(self, cls: str, terms: Terms, asked: int, epsilon: float) -> None:
        super().__init__(cls)
        self.cls, self.terms, self.asked, self.epsilon = cls, terms, asked, epsilon


class Limits:
    """The bounds of a ledger. Nothing is remembered here: an account knows the terms of its last admission."""

    def __init__(self, header: Header) -> None:
        self._header = header

    def wanted(self, rows: Reader, name: str, *asked: Terms) -> list[Terms]:
        """What is asked for, and what the ledger itself promises: the stricter of two at one δ and accountant."""
        cls, _, noise = bound_of(name)
        header, promised = self._header, noise
        if not noise:
            presets = (each.noise_multiplier for each in last_policy(rows, header).presets if each.cls == cls)
            promised = next(presets, 0)
        found = list(asked)
        if promised and (most := _most(promised, header.delta)) < UNBOUNDED:
            bound = (
                math.nextafter(most / NANO, 0.0) if noise else most / NANO * (1 + _CLASS)
            )  # as `verify` will
            found.append(Terms(bound=bound, delta=header.delta, accountant=header.accountant))
        return [t for t in found if not any(o is not t and o.within(t) and o != t for o in found)]

    def admit(
        self,
        desk: Desk,
        rows: Reader,
        charges: Sequence[Charge],
        bounds: Mapping[str, float],
        before: Mapping[str, Events],
    ) -> None:
        """Raise unless every account, as this transaction would leave it, is within its bounds."""
        for name, earlier in before.items():
            mine = [each for each in charges if each.cls == name]
            if not any(each.steps for each in mine):
                continue  # nothing is asked, so nothing can be refused
            bound, after = bounds.get(name, math.inf), desk.standing(name)
            kinds = sorted({(each.delta, each.accountant) for each in mine})
            asked = [Terms(bound=bound, delta=delta, accountant=accountant) for delta, accountant in kinds]
            held = desk.terms(name)
            grown = any(steps > earlier.get(event, 0) for event, steps in after.items())
            wanted = self.wanted(rows, name, *asked)
            for terms in wanted:
                if math.isinf(terms.bound) or (not grown and any(h.within(terms) for h in held)):
                    continue
                epsilon = pooled(after, delta=terms.delta, name=terms.accountant)
                if not epsilon <= terms.bound:
                    raise Refused(name, terms, sum(each.steps for each in mine), epsilon)
            new = [w for w in wanted if grown or not any(h.within(w) for h in held)]
            if new:
                kept = () if grown else (h for h in held if not any(w.within(h) for w in new))
                desk.set_terms(name, (*new, *kept))
