"""Sums modulo a power of two: several parties add up a step of Skellam noise without anybody seeing a party's own sum.

Each party cuts its clipped gradients to the grid, adds them up in int64, adds its share of the noise, and sends the result
modulo 2^k. Modulo 2^k the messages can be masked by any secure aggregation; their sum, read as a number in
[-2^(k-1), 2^(k-1)), is the clipped sum of all plus Skellam noise of the planned variance (docs/decisions/integer_noise.md).
Opening a sum is one step of the plan: it is charged to a `Budget` first, and refused where that has no room.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lamina import validate
from lamina.engine.budget import Budget
from lamina.engine.noise.grid import LEAST_BITS, MOST_BITS, Grid, layer_grids
from lamina.engine.noise.source import NoiseSource
from lamina.errors import NoiseError
from lamina.plan.rules import NoiseKind
from lamina.plan.step_plan import StepPlan

MOST_MODULUS_BITS = 62  # so that int64 holds the sum of two
MAX_PARTIES = 4 ** (MOST_BITS - LEAST_BITS)


class GridSums(dict[str, Tensor]):
    """Clipped sums by tensor, in whole units of the grids of their layers: of one draw, for one step.

    `plan`: the digest of the plan that clipped them. `sent`: whether they went into a message.
    """

    def __init__(self, sums: Mapping[str, Tensor], grids: Sequence[Grid], plan: bytes) -> None:
        super().__init__(sums)
        self.grids, self.plan, self.sent = tuple(grids), plan, False


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyMessage:
    """What a party sends, or the sum of such messages. `sums` may be masked; the rest goes in the clear, and is compared.

    parties  whose sums and noise are in it
    step     of the plan
    terms    `SecureSum.terms` of the sender
    """

    parties: tuple[int, ...]
    step: int
    terms: bytes
    sums: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """How `parties` add up the steps of a plan: the grid and the modulus of every layer, and the shares of the noise.

    Shares. Skellam noise of variance 4^b units is the sum of 4^j draws of variance 4^(b-j), 4^j the least power of four that
    is no less than `parties`; party p adds one draw, or a few, so that all of them are there: together exactly the planned
    law. The unit is 2^j times finer where draws would otherwise be too small for the sampler.

    Modulus. A sum leaves [-2^(k-1), 2^(k-1)) only if the noise of some coordinate passes what the clipped gradients of
    `population` contributions leave of it. Over all coordinates and steps that has a probability of at most `wrap`
    (Chernoff). It would spoil a step, and cost no privacy: wrapping is a post-processing, so ε is that of the plan.

    A party that leaves out its noise, or makes it known, takes its share of it from everybody: with m such parties ε is
    that of S²·(1 - share of these m).
    """

    plan: StepPlan
    parties: int
    wrap: float
    grids: tuple[Grid, ...]
    modulus_bits: tuple[int, ...]

    @classmethod
    def of(cls, plan: StepPlan, *, parties: int, wrap: float = 2.0**-40, modulus_bits: int | None = None) -> Self:
        """The least moduli for a plan; or one that is given, refused if it is too small."""
        validate.whole(NoiseError, "noise.parties-out-of-range", most=MAX_PARTIES, parties=parties)
        validate.number(NoiseError, "noise.wrap-out-of-range", above=0, below=1, wrap=wrap)
        if modulus_bits is not None:
            validate.whole(NoiseError, "noise.modulus-out-of-range", most=MOST_MODULUS_BITS, modulus_bits=modulus_bits)
        if plan.noise_kind is not NoiseKind.SKELLAM:
            problem = f"the plan has {plan.noise_kind.value} noise, and shares of it do not add up to such noise"
            raise NoiseError("noise.shares-need-skellam", problem, 'use kind = "skellam" under [noise]')
        populations = [entry.population for entry in plan.classes]
        if any(each is None for each in populations):
            problem = "the plan declares no population for some class, so nothing bounds its sums"
            raise NoiseError("noise.sum-without-population", problem, "declare it in the policy")
        grids = layer_grids(plan, least=LEAST_BITS + _split(parties))
        coordinates = sum(layer.size for layer in plan.layers) * plan.steps
        needed = []
        for i, grid in enumerate(grids):
            signal = sum(_largest(plan, k, i) * (n or 0) for k, n in enumerate(populations)) / grid.unit
            reach = math.ceil(signal) + (skellam_reach(grid.bits, wrap / coordinates) if grid.bits else 0)
            needed.append(1 + reach.bit_length())
        if (most := max(needed)) > min(MOST_MODULUS_BITS, modulus_bits or MOST_MODULUS_BITS):
            limit = min(MOST_MODULUS_BITS, modulus_bits or MOST_MODULUS_BITS)
            name = plan.layers[needed.index(most)].name
            problem = f"sums of layer {name!r} need {most} bits, and the modulus has {limit}"
            remedy = f"give modulus_bits={most}" if most <= MOST_MODULUS_BITS else "declare smaller populations"
            raise NoiseError("noise.modulus-too-small", problem, remedy)
        bits = needed if modulus_bits is None else [modulus_bits] * len(grids)
        return cls(plan=plan, parties=parties, wrap=wrap, grids=grids, modulus_bits=tuple(bits))

    def draws(self, party: int) -> int:
        """How many of the 4^j equal draws a party adds."""
        validate.whole(NoiseError, "noise.party-unknown", least=0, most=self.parties - 1, party=party)
        all_of_them = 1 << 2 * _split(self.parties)
        return all_of_them // self.parties + (party < all_of_them % self.parties)

    @property
    def terms(self) -> bytes:
        """SHA-256 of everything in which the parties must agree: plan, number of parties, grids and moduli."""
        grids = ";".join(f"{grid.bits} {grid.unit.hex()} {grid.taxicab}" for grid in self.grids)
        terms = f"{self.parties}|{grids}|{self.modulus_bits}".encode()
        return hashlib.sha256(self.plan.digest() + terms).digest()

    def message(self, sums: GridSums, noise: NoiseSource, *, party: int, step: int) -> PartyMessage:
        """What a party sends: its `Engine.grid_sums`, and its share of the noise, modulo 2^k."""
        validate.whole(NoiseError, "noise.step-not-priced", least=0, most=self.plan.steps - 1, step=step)
        if getattr(sums, "grids", None) != self.grids:
            problem = f"the sums of party {party} are not on the grids of this SecureSum: they would be scaled wrongly"
            remedy = "use engine.grid_sums(losses, batch, secure_sum.grids)"
            raise NoiseError("noise.sums-on-other-grids", problem, remedy)
        if sums.plan != self.plan.digest():
            problem = f"the sums of party {party} were clipped by another plan: the noise would not fit them"
            raise NoiseError("noise.sums-of-other-plan", problem, "use the engine of the plan of this SecureSum")
        if sums.sent:
            problem = f"these sums of party {party} went into a message before, and each step is priced as a new draw"
            remedy = "draw another batch for another step; to send a message again, keep the message"
            raise NoiseError("noise.sums-sent-before", problem, remedy)
        names, totals = list(sums), [total.clone() for total in sums.values()]
        places = self._places()
        bits = [max(0, self.grids[places[name]].bits - _split(self.parties)) for name in names]
        noise.add_integers_(totals, bits, step=step, kind=NoiseKind.SKELLAM, times=self.draws(party))
        reduced = {name: self._reduced(name, total) for name, total in zip(names, totals, strict=True)}
        sums.sent = True
        return PartyMessage(parties=(party,), step=step, terms=self.terms, sums=reduced)

    def combined(self, messages: Sequence[PartyMessage]) -> PartyMessage:
        """The sum of messages modulo 2^k: what whoever adds them up may do without opening it.

        Refused: parties with another plan, number of parties, grid or modulus; other tensors or steps; a party twice.
        """
        for message in messages:
            who = ", ".join(map(str, message.parties))
            differs = {
                "plan, number of parties, grids or modulus": message.terms != self.terms,
                "step": message.step != messages[0].step,
                "tensors": {n: t.shape for n, t in message.sums.items()} != {n: t.shape for n, t in messages[0].sums.items()},
            }  # fmt: skip
            if wrong := [what for what, holds in differs.items() if holds]:
                problem = f"the message of party {who} has another {' and another '.join(wrong)}"
                raise NoiseError("noise.parties-differ", problem, "give all parties the same plan and SecureSum.of(…)")
        parties = tuple(sorted(party for message in messages for party in message.parties))
        if not parties or len(set(parties)) < len(parties):
            problem = f"the messages are of parties {', '.join(map(str, parties)) or 'none'}: each may count once"
            remedy = "give the message of every party, or the sum of all of them"
            raise NoiseError("noise.shares-missing", problem, remedy)
        found = dict(messages[0].sums)
        for message in messages[1:]:
            found = {name: self._reduced(name, total + message.sums[name]) for name, total in found.items()}
        return PartyMessage(parties=parties, step=messages[0].step, terms=self.terms, sums=found)

    def total(self, messages: Sequence[PartyMessage], *, budget: Budget) -> dict[str, Tensor]:
        """Open a step: the noised sum in whole units, from the messages of all parties or from their sum.

        It is charged to `budget` first (`engine.budget` of the plan), as one step; refused where a filter has no room.
        """
        whole = self.combined(messages)
        if whole.parties != tuple(range(self.parties)):
            problem = f"messages of {len(whole.parties)} of {self.parties} parties: the noise of the others is missing"
            remedy = "give the message of every party, or the sum of all of them"
            raise NoiseError("noise.shares-missing", problem, remedy)
        if budget.plan.digest() != self.plan.digest() or budget.taken != whole.step:
            problem = f"step {whole.step} is opened, and the budget is at step {budget.taken} of its plan"
            remedy = "give the budget of an engine of the same plan, and open each step once, in order"
            raise NoiseError("noise.sum-of-other-budget", problem, remedy)
        budget.charge()
        places = self._places()
        half = {name: 1 << (self.modulus_bits[places[name]] - 1) for name in whole.sums}
        return {name: ((total + half[name]) & (2 * half[name] - 1)) - half[name] for name, total in whole.sums.items()}

    def released(self, total: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(clipped sum + noise) / B in float64: what a step of one process releases."""
        places = self._places()
        return {name: t.double() * (self.grids[places[name]].unit / self.plan.batch) for name, t in total.items()}

    def _places(self) -> dict[str, int]:
        return {name: i for i, layer in enumerate(self.plan.layers) for name in layer.parameters}

    def _reduced(self, name: str, total: Tensor) -> Tensor:
        return torch.bitwise_and(total, (1 << self.modulus_bits[self._places()[name]]) - 1)


def _split(parties: int) -> int:
    """The least j with 4^j ≥ parties."""
    return (max(parties - 1, 0).bit_length() + 1) // 2


def _largest(plan: StepPlan, k: int, layer: int) -> float:
    """How far one contribution of a class can move a coordinate of a layer."""
    return plan.norm(k) if plan.clip[k][layer] > 0 else 0.0


def skellam_reach(bits: int, risk: float) -> int:
    """A whole x with P(|X| > x) ≤ risk for Skellam X of variance v = 4^bits, by Chernoff: 2·exp(v(cosh t - 1) - tx), sinh t = x/v."""
    v, x = 4.0**bits, 2.0**bits * math.sqrt(2.0 * math.log(2.0 / risk))
    while True:
        t = math.asinh(x / v)
        if math.log(2.0) + 2.0 * v * math.sinh(t / 2) ** 2 - t * x <= math.log(risk):
            return math.ceil(x)
        x *= 1.001
