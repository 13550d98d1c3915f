"""`Ended`: an attempt that has ended, on its way into a leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.account import order_of
from lamina.errors import RunError
from lamina.ledger import leaf as leaves
from lamina.ledger.records import Account, Charge, Epoch, Outcome, Segment
from lamina.ledger.store.base import WHOLE, Hold, Reader, Writer
from lamina.ledger.store.errors import Damaged
from lamina.ledger.view import head_of
from lamina.plan import StepPlan
from lamina.train.book import charge as charges
from lamina.train.book.account import bound_of, is_bound
from lamina.train.book.charge import follows_budget
from lamina.train.book.held import Held
from lamina.train.book.recorded import Recorded


class Stale(Exception):
    """Another epoch was appended meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """An attempt of a run under a plan. Its charges are those that are held, neither more nor less.

    Where noise follows a budget, an attempt itself is charged nothing; the first epoch of the run records the whole.
    """

    run: bytes
    segment: Segment
    plan: StepPlan
    digest: bytes
    variance: Sequence[float]

    def there(self, rows: Reader) -> int | None:
        """The leaf that records it already."""
        key = (self.run, self.segment.index, self.segment.generation)
        if (seq := rows.attempt(*key)) is None:
            return None
        found, name = recorded(rows, key, seq), f"segment {self.segment.index} of run {self.run.hex()[:8]}"
        if found.nonce != self.segment.nonce:
            raise RunError(
                "spend.leaf-records-generation",
                f"leaf {seq} records generation {self.segment.generation} of {name} as somebody else's",
                "give the ledger that the run was charged in",
            )
        if (found.outcome, self.segment.outcome) == (Outcome.ABANDONED, Outcome.CLOSED):
            raise RunError(
                "spend.leaf-records-given",
                f"leaf {seq} records {name} as given up: a copy of the run says so, or somebody who took it for lost "
                "(lamina spend --lost)",
                "start the run again: the segment is done again, and charged again",
            )
        return seq

    def epoch(
        self, rows: Reader, recorded: Recorded, scales: Mapping[str, float]
    ) -> tuple[Epoch, tuple[Hold, ...]]:
        """The record, with what every account has lost after it; and what is held and stands in it."""
        key = (self.run, self.segment.index, self.segment.generation)
        mine = rows.hold(*key)
        if mine is None or mine.nonce != self.segment.nonce:
            raise RunError(
                "spend.segment-generation-run-ended",
                f"segment {self.segment.index}, generation {self.segment.generation} of run {self.run.hex()[:8]} has "
                "ended, and was never charged to this ledger",
                "give the ledger that the run was charged in",
            )
        whole = [each for each in rows.holds(self.run) if each.segment >= WHOLE and self._of_plan(each)]
        held = {each: Held.decode(each.body) for each in (mine, *whole)}
        if held[mine].plan not in (b"", self.digest):  # a leaf that would not verify is there for good
            raise RunError(
                "spend.segment-run-charged",
                f"segment {self.segment.index} of run {self.run.hex()[:8]} was charged under plan "
                f"{held[mine].plan.hex()[:16]}, and is to be recorded under {self.digest.hex()[:16]}",
                "give the plan that it was charged under",
            )
        known = {**scales, **{name: scale for each in held.values() for name, scale in each.scales.items()}}
        taken: dict[str, list[Charge]] = {}
        if follows_budget(self.plan) or self.plan.injection.occurrences is not None:
            charged = {
                *recorded.scales(self.run, self.digest),
                *(n for each in held.values() for n in each.scales),
            }
            taken = {
                name: [] for name in (*self._trained(), *(known.keys() & charged))
            }  # some epochs take nothing
        for found in held.values():
            for one in found.charges:
                taken.setdefault(one.cls, []).append(_charge(one))
        if unknown := [name for name in taken if is_bound(name) and name not in known]:
            raise RunError(
                "spend.scale-account-trained",
                f"the scale at which account {unknown[0]!r} was trained on is not known",
                "give the accounts that the run was charged with",
            )
        after = recorded.spending.copy()
        for name, mine_of in taken.items():
            after.charge(bound_of(name), mine_of)
        accounts = []
        for name in sorted(taken, key=bound_of):
            cls, clip, noise = bound_of(name)
            accounts.append(
                Account(
                    cls=cls,
                    clip_norm=clip,
                    noise_multiplier=noise,
                    scale=known[name] if is_bound(name) else 1.0,
                    charges=tuple(taken[name]),
                    spend=after.spend((cls, clip, noise)),
                )
            )
        epoch = Epoch(
            run=self.run,
            segments=(self.segment,),
            plan=self.digest,
            variance=tuple(float(each) for each in self.variance),
            accounts=tuple(accounts),
            state=after.state(),
        )
        return epoch, tuple(held)

    def settle(self, rows: Writer, seq: int, parts: Sequence[Hold], epochs: int) -> None:
        """In the transaction of the leaf: from now on it counts, and nothing is held any more."""
        if head_of(rows).epoch != epochs:
            raise Stale
        for each in parts:
            left = Held((), place=Held.decode(each.body).place)
            rows.put_hold(each._replace(leaf=seq, body=left.encode()))

    def _trained(self) -> list[str]:
        """The classes that a plan which charges unevenly takes something from: each is in every epoch."""
        return [each.cls for each in charges.charges(self.plan, 0, self.plan.steps)]

    def _of_plan(self, hold: Hold) -> bool:
        """Whether a budget that is held as a whole is this plan's."""
        return Held.decode(hold.body).plan == self.digest


def recorded(rows: Reader, key: tuple[bytes, int, int], seq: int) -> Segment:
    """An attempt, as its leaf has it."""
    data = rows.leaf(seq)
    record = None if data is None else leaves.decode(data).record
    if not isinstance(record, Epoch):
        raise Damaged(
            "spend.leaf-no-epoch",
            f"leaf {seq} is no epoch, and an attempt is recorded there",
            "restore the ledger",
        )
    return next(each for each in record.segments if (each.index, each.generation) == key[1:])


def _charge(one: charges.Charge) -> Charge:
    return Charge(sigma=one.sigma, rate=one.q, steps=one.steps, order=order_of(one.accountant))
