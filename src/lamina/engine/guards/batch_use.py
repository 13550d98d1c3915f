"""`BatchUse`: every step and choice is priced as a draw of its own, by secret coins, each contribution in it once."""

from __future__ import annotations

from weakref import WeakSet

from lamina.engine.batch import Batch, Draw
from lamina.engine.distributed import Ranks
from lamina.engine.guards.guard import Guard, Moment
from lamina.errors import EngineError
from lamina.plan.step_plan import StepPlan


class BatchUse(Guard):
    """Refuses a draw that was charged before, that is another rank's, or that belongs to another turn.

    Where everybody is in every draw, all draws are the same.
    """

    def __init__(self, plan: StepPlan, ranks: Ranks) -> None:
        self.plan, self.ranks = plan, ranks
        self._sampled = any(entry.sampling_rate < 1 for entry in plan.classes)
        self._charged: WeakSet[Draw] = WeakSet()
        self._draw: Draw | None = None  # of the step or choice that is open, and the places of its parts so far
        self._places: set[int] = set()

    def before_charge(self, batch: Batch, moment: Moment) -> None:
        draw, ranks = batch.draw, self.ranks
        if draw.seeded and moment.private:
            problem = "this batch was drawn with a seed that somebody chose, and ε is priced with secret coins"
            remedy = "draw without seed=; or, where nothing has to be private, Engine(…, noise=SeededNoise(0))"
            raise EngineError("engine.seeded-batch", problem, remedy)
        if (draw.rank, draw.ranks) != (ranks.rank, ranks.size):
            problem = f"the batch is the part of rank {draw.rank} of {draw.ranks}"
            problem += f", and this is rank {ranks.rank} of {ranks.size}"
            remedy = "use corpus.batches(plan), or batch.shard(rank, size) of a batch that is the same on every rank"
            raise EngineError("engine.batch-of-other-ranks", problem, remedy)
        turn = (moment.step % self.plan.bands, self.plan.bands)
        if self.plan.bands > 1 and moment.private and batch.first and draw.turn != turn:
            problem = f"step {moment.step} is turn {turn[0]} of {turn[1]}, and this batch was not drawn from those whose turn it is"
            remedy = "correlated noise holds for contributions that take turns: use corpus.batches(plan) or a Trainer"
            raise EngineError("engine.batch-of-other-turn", problem, remedy)
        self._refuse_wrong_part(batch, moment)
        if batch.first and self._sampled and draw in self._charged:
            problem = f"this batch was charged before step {moment.step}, and each step is priced as a new draw"
            remedy = "draw a batch for each step: corpus.batches(plan), or a Batch of its own; to use it in parts, batch.split"
            raise EngineError("engine.batch-used-again", problem, remedy)
        if batch.first:
            self._draw, self._places = draw, set()
        self._places.update(batch.places or range(0))

    def after_charge(self, batch: Batch) -> None:
        self._charged.add(batch.draw)

    def _refuse_wrong_part(self, batch: Batch, moment: Moment) -> None:
        if not (batch.first or moment.under_way):
            problem = "a later part of a split batch came without its first part"
            remedy = "pass the parts of batch.split(k) in order, and begin again after an error"
            raise EngineError("engine.parts-out-of-order", problem, remedy)
        same = batch.draw is self._draw
        if batch.first or (same and self._places.isdisjoint(batch.places or range(0))):
            return
        what = "shares contributions with an earlier part" if same else "is of another draw than its first part"
        problem = f"this part of step {moment.step} {what}: a contribution could count twice in one step"
        remedy = "give each part of one batch.split(…) once, in order; to draw more, plan a larger batch"
        raise EngineError("engine.part-counted-twice", problem, remedy)
