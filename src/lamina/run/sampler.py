"""Poisson sampling: the secret coins of a step, and `Sampler`, which draws the batches that a plan accounts for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.account.schedule import Schedule
from lamina.engine.batch import Batch, Draw
from lamina.engine.distributed import ALONE, Ranks
from lamina.engine.noise.random_stream import CELL_ELEMENTS, KeyStream, StreamPurpose, Words, step_key
from lamina.errors import CorpusError
from lamina.plan.correlation import participations
from lamina.plan.step_plan import StepPlan
from lamina.run.example_sources import Rows
from lamina.validate import whole

if TYPE_CHECKING:
    from lamina.run.corpus import Corpus


Coins = NDArray[np.uint32]
OccurrenceCounts = NDArray[np.uint32]

WORDS_PER_BLOCK = 4
WORDS_PER_RUN = CELL_ELEMENTS // 2 * WORDS_PER_BLOCK  # words that one run of a key stream gives
SECOND_WORDS = 1 << 63  # second words lie here, beyond all first words
EXAMPLE_CHOICES = 1 << 63  # tensors from here on are contributions


class WordStream(Protocol):
    """Blocks of one key: `engine.random_stream.KeyStream`."""

    def run(self, tensor: int, block: int, out: Words) -> None: ...

    def gather(self, counters: NDArray[np.uint8], out: Words) -> None: ...


def sampling_threshold(rate: float) -> int:
    """⌊q · 2^64⌋, exactly: q is a binary fraction already."""
    return math.floor(math.ldexp(rate, 64))


def poisson_sample(stream: WordStream, row: int, members: int, rate: float) -> Rows:
    """The members 0 … members-1 of class `row` whose coin falls on the side of probability `rate`.

    Member j is in if a 64-bit number is below T = ⌊q · 2^64⌋, so with probability T/2^64: at most 2^-64 too small,
    never too large; q = 1 takes everyone. Of that number, the high half is the 32-bit word j (little-endian) of
    tensor `row` of the stream. It decides unless it equals the high half of T, which happens once in 2^32 coins;
    then the low half is the first word of block 2^63 + j of that tensor. Every word belongs to one coin of one
    class, so the coins are independent as far as AES is a random function.
    """
    bound = sampling_threshold(rate)
    if bound == 1 << 64:
        return np.arange(members, dtype=np.int64)
    high, low = np.uint32(bound >> 32), bound & 0xFFFFFFFF
    space = np.empty(min(WORDS_PER_RUN, members + WORDS_PER_BLOCK - 1) // WORDS_PER_BLOCK * 2, dtype=np.uint64)
    found = []
    for start in range(0, members, WORDS_PER_RUN):
        count = min(WORDS_PER_RUN, members - start)
        blocks = (count + WORDS_PER_BLOCK - 1) // WORDS_PER_BLOCK
        stream.run(row, start // WORDS_PER_BLOCK, space[: 2 * blocks])
        words: Coins = space.view("<u4")[:count]
        near = np.flatnonzero(words <= high)
        ties = np.flatnonzero(words[near] == high)
        if len(ties):
            lost = [i for i in ties if _second_word(stream, row, start + int(near[i])) >= low]
            near = np.delete(near, lost)
        found.append(near + start)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _second_word(stream: WordStream, row: int, member: int) -> int:
    words = np.empty(2, dtype=np.uint64)
    stream.run(row, SECOND_WORDS + member, words)
    return int(words.view("<u4")[0])


def choose_examples(stream: WordStream, units: Rows, sizes: Rows, most: int) -> NDArray[np.bool_]:
    """Which examples are used, where a contribution may use at most `most` of its `sizes[i]`.

    The answer has one entry per example, contribution after contribution. A contribution with more gets a subset
    that is uniform among those of size `most`: the positions of the smallest of its 64-bit words, which are
    numbers 0, 1, … of tensor 2^63 + unit. It does not depend on who else was sampled. (Two equal words, which
    happens once in 2^64 pairs, favour the earlier. No guarantee rests on this choice: whatever a contribution
    uses is clipped as one.)
    """
    used = np.ones(int(sizes.sum()), dtype=np.bool_)
    large = np.flatnonzero(sizes > most)
    if not len(large):
        return used
    begins = np.cumsum(sizes) - sizes
    at = _ranges(begins[large], sizes[large])
    words = _words_of_contributions(stream, units[large], sizes[large])
    owner = np.repeat(np.arange(len(large)), sizes[large])
    order = np.lexsort((words, owner))  # by word inside each contribution
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes[large]) - sizes[large], sizes[large])
    used[at[order[rank >= most]]] = False
    return used


def _words_of_contributions(stream: WordStream, units: Rows, sizes: Rows) -> Words:
    """The first sizes[i] words of each contribution's tensor, in one call of the cipher."""
    blocks = (sizes + 1) // 2
    table = np.empty((int(blocks.sum()), 2), dtype=">u8")
    table[:, 0] = np.repeat(units.astype(np.uint64) + np.uint64(EXAMPLE_CHOICES), blocks)
    table[:, 1] = _ranges(np.zeros_like(blocks), blocks)
    out = np.empty(2 * len(table) + 2, dtype=np.uint64)  # the cipher wants a block to spare
    stream.gather(table.view(np.uint8).reshape(-1), out)
    words = out[:-2].view("<u8")
    return words[_ranges(2 * (np.cumsum(blocks) - blocks), sizes)]


def _ranges(begins: Rows, sizes: Rows) -> Rows:
    """begins[0] … begins[0]+sizes[0]-1, begins[1] …, end to end."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begins - (ends - sizes), sizes) + np.arange(total)


class Sampler:
    """Batches for the steps of a plan. Sampler and accounted event are one object: `schedule(k)` is the plan's.

    Formal guarantees. At every step each eligible contribution of class k is in the batch with probability
    ⌊q_k 2^64⌋/2^64, at most 2^-64 below the plan's q_k and never above, independently of all others, of other
    classes and of other steps. q_k comes from the declared population; how many members there are has no part in
    it. The coins are `poisson_sample` under the key HKDF(seed, step, rank, coins): secret as long as the seed is.
    Who is eligible is frozen when the sampler is made; a later withdrawal needs a new one.

    `draw(step)` is a function of (seed, rank, step, frozen members, counts). Without caps a step may be drawn
    again, for a replay; with caps a replay begins with a new sampler and the counts as they were.

    `max_occurrences` caps how often a contribution of a class is used: once it was drawn that often it is not
    eligible any more. Given everything that happened before, it is then sampled with probability q_k or 0, never
    more than q_k; a subsampled Gaussian with a smaller rate is dominated by the one with q_k, so the amplified
    ε of the schedule stays valid by adaptive composition. What the cap buys is the figure that holds even when all
    occurrences become known: `account.capped(sampler.schedule(k), cap)`. The counts are as secret as the coins. A plan
    whose price counts occurrences (raw noise) brings its own cap for every private class.

    `factors` are those of exhausted signed bounds (`AttemptOpened`): who signed one takes part with clip norms times it,
    and not at all at 0. Rates, noise and divisor are the plan's for everybody.

    A plan with correlated noise (`bands` > 1) has contributions take turns: step t draws from those whose turn is t mod bands
    (`Corpus.turns`), at `plan.step_rate`, so two steps that one contribution takes part in are multiples of `bands` apart.

    `corpus.examples_per_unit` limits the examples of a contribution per step; `choose_examples` draws them.

    With `ranks`, every process draws the same sample and takes its own part of it: the coins, the examples that a
    contribution uses and the counts are those of one process. All of them need the same seed.
    """

    def __init__(
        self, corpus: Corpus, plan: StepPlan, *, seed: bytes, rank: int = 0,
        max_occurrences: Mapping[str, int] | None = None, counts: Any = None, seeded: bool = False,
        factors: Mapping[str, float] | None = None, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        corpus.check(plan)
        self._ranks = ranks
        step_key(seed, step=0, rank=rank, purpose=StreamPurpose.COINS)  # refuses a bad seed or rank now
        self._seed, self._rank, self._plan = seed, rank, plan
        self._source, self._layout, self._most = corpus.source, corpus.layout, corpus.examples_per_unit
        members = corpus.members_of(plan, factors)
        self._members = [members]  # by turn: the members of every class who may take part in such a step
        if plan.bands > 1:
            turns = corpus.turns(plan.bands)
            self._members = [_members_of_turn(plan, members, turns == turn) for turn in range(plan.bands)]
        self._limits = corpus.limits_of(plan, max_occurrences, factors)
        self._caps = _caps_by_class_index(occurrence_caps(plan, max_occurrences), plan)
        self._counts = _check_counts(counts, len(corpus.layout), capped=self._caps is not None)
        self._last, self._seeded = -1, seeded

    @property
    def counts(self) -> OccurrenceCounts | None:
        """How often each contribution (by row) was drawn so far; None without caps. A copy, and secret."""
        return None if self._counts is None else self._counts.copy()

    def schedule(self, k: str | int) -> Schedule:
        """What an accountant is asked about class k: the plan's own schedule."""
        return self._plan.schedule(k)

    def draw(self, step: int) -> Batch:
        """The batch of a step; it may be empty. Contributions of the plan's first class come first."""
        if self._counts is not None and step <= self._last:
            problem = f"step {step} is drawn after step {self._last}, while occurrences are counted in order"
            remedy = "draw steps in order; replay from a new Sampler with the counts as they were: Sampler(…, counts=…)"
            raise CorpusError("corpus.step-out-of-order", problem, remedy)
        sampled = self._sampled(step, StreamPurpose.COINS)
        units = np.concatenate(sampled)
        batch = self._batch(step, sampled, StreamPurpose.AUGMENT)
        if self._counts is not None:  # only now: a draw that failed did not happen
            self._counts[units] += np.uint32(1)
            self._last = step
        return batch

    def draw_for_choice(self, step: int) -> Batch:
        """A draw of its own for the choice that is made before a step: other coins at the same rates."""
        if self._counts is not None:
            problem = "the plan makes a choice, and its draws are not counted under max_occurrences"
            raise CorpusError("corpus.choice-with-caps", problem, "leave out max_occurrences, or the choice")
        return self._batch(step, self._sampled(step, StreamPurpose.CHOICE_COINS), StreamPurpose.CHOICE_WINDOWS)

    def _batch(self, step: int, sampled: list[Rows], purpose: StreamPurpose) -> Batch:
        mine = slice(self._ranks.rank, None, self._ranks.size)
        units = np.concatenate(sampled)[mine]
        rows, sizes = self._examples(step, units, purpose)
        x, y = self._source.fetch(rows)
        cls = np.repeat(np.arange(len(sampled)), [len(part) for part in sampled])[mine]
        unit = np.repeat(np.arange(len(units)), sizes)
        scale, ceiling = self._limits(units)
        turn = (step % self._plan.bands, self._plan.bands)
        draw = Draw(seeded=self._seeded, ranks=self._ranks.size, rank=self._ranks.rank, step=step, turn=turn)
        owner, kind = torch.from_numpy(unit), torch.from_numpy(cls)
        return Batch(x, y, unit=owner, cls=kind, scale=scale, ceiling=ceiling, draw=draw)

    def _sampled(self, step: int, purpose: StreamPurpose) -> list[Rows]:
        """The sampled contributions of each class."""
        stream = KeyStream(step_key(self._seed, step=step, rank=self._rank, purpose=purpose))
        sampled = []
        for k, members in enumerate(self._members[step % self._plan.bands]):
            drawn = members[poisson_sample(stream, k, len(members), self._plan.step_rate(k))]
            cap = self._caps.get(k) if self._caps is not None else None
            if cap is not None and self._counts is not None:
                drawn = drawn[self._counts[drawn] < cap]
            sampled.append(drawn)
        return sampled

    def _examples(self, step: int, units: Rows, purpose: StreamPurpose) -> tuple[Rows, Rows]:
        """The examples to use, contribution after contribution, and how many of each."""
        rows, sizes = self._layout.rows_of(units), self._layout.sizes(units)
        if self._most is None or not (sizes > self._most).any():
            return rows, sizes
        stream = KeyStream(step_key(self._seed, step=step, rank=self._rank, purpose=purpose))
        used = choose_examples(stream, units, sizes, self._most)
        return rows[used], np.minimum(sizes, self._most)

    def __repr__(self) -> str:
        names = ", ".join(entry.name for entry in self._plan.classes)
        return f"Sampler({names})"


def _members_of_turn(plan: StepPlan, members: tuple[Rows, ...], due: NDArray[np.bool_]) -> tuple[Rows, ...]:
    """The members whose turn it is; those of public classes take part in every step."""
    pairs = zip(plan.classes, members, strict=True)
    return tuple(rows if entry.public else rows[due[rows]] for entry, rows in pairs)


def occurrence_caps(plan: StepPlan, given: Mapping[str, int] | None) -> Mapping[str, int] | None:
    """How often a contribution of a class may be used: as given, and never more than the plan accounts for."""
    if given and plan.bands > 1:
        problem = f"max_occurrences is {dict(given)!r}, and the plan correlates its noise over {plan.bands} steps"
        remedy = f"leave it out: contributions that take turns are used {participations(plan.steps, plan.bands)} times at most"
        raise CorpusError("corpus.max-occurrences-correlated", problem, remedy)
    most, private = plan.injection.occurrences, [entry.name for entry in plan.classes if not entry.public]
    if most is None or not isinstance(given, Mapping | None):
        return given
    for name, cap in (given or {}).items():
        if name in private and isinstance(cap, int) and cap > most:
            problem = f"max_occurrences of class {name!r} is {cap}, the plan accounts for {most}"
            remedy = "leave it out, or plan with more occurrences under [noise]"
            raise CorpusError("corpus.max-occurrences-above-plan", problem, remedy)
    return {**dict.fromkeys(private, most), **(given or {})}


def _caps_by_class_index(given: Mapping[str, int] | None, plan: StepPlan) -> dict[int, int] | None:
    if given is None:
        return None
    names = [entry.name for entry in plan.classes]
    if not isinstance(given, Mapping):
        remedy = f"give it by class: max_occurrences={{{names[0]!r}: 100}}"
        raise CorpusError("corpus.max-occurrences-not-by-class", f"max_occurrences is {given!r}", remedy)
    for name, cap in given.items():
        if name not in names:
            problem = f"max_occurrences names class {name!r}, which the plan does not have"
            raise CorpusError("corpus.class-not-in-plan", problem, f"its classes are {', '.join(names)}")
        remedy = f"it is the cap of class {name!r}; leave the class out of the plan if it is not to be used"
        whole(
            CorpusError, "corpus.max-occurrences-out-of-range", most=(1 << 32) - 1, remedy=remedy, max_occurrences=cap
        )
    return {names.index(name): cap for name, cap in given.items()}


def _check_counts(given: Any, contributions: int, *, capped: bool) -> OccurrenceCounts | None:
    if not capped:
        if given is not None:
            problem = "counts are given without max_occurrences"
            raise CorpusError("corpus.counts-without-caps", problem, "give the caps that they belong to")
        return None
    if given is None:
        return np.zeros(contributions, dtype=np.uint32)
    counts = np.asarray(given)
    if counts.dtype != np.uint32 or counts.shape != (contributions,):
        problem = f"counts has dtype {counts.dtype} and shape {counts.shape}, expected {contributions} of uint32"
        remedy = "restore Sampler.counts as it was, for the same corpus"
        raise CorpusError("corpus.counts-of-other-corpus", problem, remedy)
    return counts.copy()
