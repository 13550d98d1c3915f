"""`Sampler`: Poisson batches of a corpus, as a plan prices them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.account import Schedule
from lamina.engine.batch import Batch
from lamina.engine.stream import KeyStream, Purpose, step_key
from lamina.errors import CorpusError
from lamina.plan import StepPlan
from lamina.train.corpus.coins import Rows, heads, windows

if TYPE_CHECKING:
    from lamina.train.corpus.corpus import Corpus

Counts = NDArray[np.uint32]


class Sampler:
    """Batches for the steps of a plan. Sampler and accounted event are one object: `schedule(k)` is the plan's.

    Formal guarantees. At every step each eligible contribution of class k is in the batch with probability
    ⌊q_k 2^64⌋/2^64, at most 2^-64 below the plan's q_k and never above, independently of all others, of other
    classes and of other steps. q_k comes from the declared population; how many members there are has no part in
    it. The coins are `coins.heads` under the key HKDF(seed, step, rank, coins): secret as long as the seed is.
    Who is eligible is frozen when the sampler is made; a later withdrawal needs a new one.

    `draw(step)` is a function of (seed, rank, step, frozen members, counts). Without caps a step may be drawn
    again, for a replay; with caps a replay begins with a new sampler and the counts as they were.

    `max_occurrences` caps how often a contribution of a class is used: once it was drawn that often it is not
    eligible any more. Given everything that happened before, it is then sampled with probability q_k or 0, never
    more than q_k; a subsampled Gaussian with a smaller rate is dominated by the one with q_k, so the amplified
    ε of the schedule stays valid by adaptive composition. What the cap buys is the figure that holds even when all
    occurrences become known: `account.capped(sampler.schedule(k), cap)`. The counts are as secret as the coins. A plan
    whose price counts occurrences (raw noise) brings its own cap for every private class.

    `corpus.examples_per_unit` limits the examples of a contribution per step; `coins.windows` chooses them.
    """

    def __init__(
        self,
        corpus: Corpus,
        plan: StepPlan,
        *,
        seed: bytes,
        rank: int = 0,
        max_occurrences: Mapping[str, int] | None = None,
        counts: Any = None,
    ) -> None:
        corpus.check(plan)
        step_key(seed, step=0, rank=rank, purpose=Purpose.COINS)  # refuses a bad seed or rank now
        self._seed, self._rank, self._plan = seed, rank, plan
        self._source, self._layout, self._most = corpus.source, corpus.layout, corpus.examples_per_unit
        self._members = corpus.members_of(plan)
        self._limits = corpus.limits_of(plan, max_occurrences)
        self._caps = _caps(caps_of(plan, max_occurrences), plan)
        self._counts = _counts(counts, len(corpus.layout), capped=self._caps is not None)
        self._last = -1

    @property
    def counts(self) -> Counts | None:
        """How often each contribution (by row) was drawn so far; None without caps. A copy, and secret."""
        return None if self._counts is None else self._counts.copy()

    def schedule(self, k: str | int) -> Schedule:
        """What an accountant is asked about class k: the plan's own schedule."""
        return self._plan.schedule(k)

    def draw(self, step: int) -> Batch:
        """The batch of a step; it may be empty. Contributions of the plan's first class come first."""
        if self._counts is not None and step <= self._last:
            raise CorpusError(
                "corpus.step-asked-after",
                f"step {step} was asked for after step {self._last}, and occurrences are counted",
                "draw steps in order; replay from a new Sampler with the counts as they were: Sampler(…, counts=…)",
            )
        sampled = self._sampled(step, Purpose.COINS)
        units = np.concatenate(sampled)
        batch = self._batch(step, sampled, Purpose.AUGMENT)
        if self._counts is not None:  # only now: a draw that failed did not happen
            self._counts[units] += np.uint32(1)
            self._last = step
        return batch

    def draw_for_choice(self, step: int) -> Batch:
        """A draw of its own for the choice that is made before a step: other coins at the same rates."""
        if self._counts is not None:
            raise CorpusError(
                "corpus.choice-draws-contributions",
                "a choice draws contributions whose occurrences are capped",
                "leave out max_occurrences, or the choice",
            )
        return self._batch(step, self._sampled(step, Purpose.CHOICE_COINS), Purpose.CHOICE_WINDOWS)

    def _batch(self, step: int, sampled: list[Rows], purpose: Purpose) -> Batch:
        units = np.concatenate(sampled)
        rows, sizes = self._examples(step, units, purpose)
        x, y = self._source.fetch(rows)
        cls = np.repeat(np.arange(len(sampled)), [len(part) for part in sampled])
        unit = np.repeat(np.arange(len(units)), sizes)
        scale, ceiling = self._limits(units)
        return Batch(
            x, y, unit=torch.from_numpy(unit), cls=torch.from_numpy(cls), scale=scale, ceiling=ceiling
        )

    def _sampled(self, step: int, purpose: Purpose) -> list[Rows]:
        """The sampled contributions of each class."""
        stream = KeyStream(step_key(self._seed, step=step, rank=self._rank, purpose=purpose))
        sampled = []
        for k, (entry, members) in enumerate(zip(self._plan.classes, self._members, strict=True)):
            drawn = members[heads(stream, k, len(members), entry.sampling_rate)]
            cap = self._caps.get(k) if self._caps is not None else None
            if cap is not None and self._counts is not None:
                drawn = drawn[self._counts[drawn] < cap]
            sampled.append(drawn)
        return sampled

    def _examples(self, step: int, units: Rows, purpose: Purpose) -> tuple[Rows, Rows]:
        """The examples to use, contribution after contribution, and how many of each."""
        rows, sizes = self._layout.rows_of(units), self._layout.sizes(units)
        if self._most is None or not (sizes > self._most).any():
            return rows, sizes
        stream = KeyStream(step_key(self._seed, step=step, rank=self._rank, purpose=purpose))
        used = windows(stream, units, sizes, self._most)
        return rows[used], np.minimum(sizes, self._most)

    def __repr__(self) -> str:
        names = ", ".join(entry.name for entry in self._plan.classes)
        return f"Sampler({names})"


def caps_of(plan: StepPlan, given: Mapping[str, int] | None) -> Mapping[str, int] | None:
    """How often a contribution of a class may be used: as given, and never more than the plan is priced for."""
    most, private = plan.injection.occurrences, [entry.name for entry in plan.classes if not entry.public]
    if most is None or not isinstance(given, Mapping | None):
        return given
    for name, cap in (given or {}).items():
        if name in private and isinstance(cap, int) and cap > most:
            raise CorpusError(
                "corpus.max-occurrences-class",
                f"max_occurrences of class {name!r} is {cap}, and the plan is priced for {most}",
                "leave it out, or plan with more occurrences under [noise]",
            )
    return {**dict.fromkeys(private, most), **(given or {})}


def _caps(given: Mapping[str, int] | None, plan: StepPlan) -> dict[int, int] | None:
    if given is None:
        return None
    names = [entry.name for entry in plan.classes]
    if not isinstance(given, Mapping):
        raise CorpusError(
            "corpus.max-occurrences",
            f"max_occurrences is {given!r}",
            f"give it by class: max_occurrences={{{names[0]!r}: 100}}",
        )
    for name, cap in given.items():
        if name not in names:
            raise CorpusError(
                "corpus.max-occurrences-names",
                f"max_occurrences names class {name!r}, which is not in the plan",
                f"its classes are {', '.join(names)}",
            )
        if isinstance(cap, bool) or not isinstance(cap, int) or not 1 <= cap < 1 << 32:
            raise CorpusError(
                "corpus.max-occurrences-class-whole",
                f"max_occurrences of class {name!r} is {cap!r}, must be a whole number >= 1",
                "leave the class out of the plan if it is not to be used",
            )
    return {names.index(name): cap for name, cap in given.items()}


def _counts(given: Any, contributions: int, *, capped: bool) -> Counts | None:
    if not capped:
        if given is not None:
            raise CorpusError(
                "corpus.counts-given-without",
                "counts are given without max_occurrences",
                "give the caps that they belong to",
            )
        return None
    if given is None:
        return np.zeros(contributions, dtype=np.uint32)
    counts = np.asarray(given)
    if counts.dtype != np.uint32 or counts.shape != (contributions,):
        raise CorpusError(
            "corpus.counts-dtype-shape",
            f"counts has dtype {counts.dtype} and shape {counts.shape}, expected {contributions} of uint32",
            "restore Sampler.counts as it was, for the same corpus",
        )
    return counts.copy()
