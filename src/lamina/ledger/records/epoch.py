"""`Epoch`: one or more segments of a run have ended, what was applied, and what everybody has lost so far.

What it does *not* hold is as deliberate: who was sampled, batch sizes, seeds, drawn or measured noise, norms, losses,
durations. The sampling is secret for good; with it, the amplified ε would fall (docs/theory.md, "Secrecy").
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lamina.ledger.errors import LedgerError
from lamina.ledger.records.fields import (
    CLASS,
    COUNT,
    DIGEST,
    MICRO,
    NONCE,
    RUN,
    SEQ,
    SPEND,
    Exact,
    Many,
    OneOf,
    Part,
    Whole,
    check,
    define,
)  # fmt: skip

MOST_SEGMENTS = 1024
MOST_LAYERS = 16_384
MOST_ACCOUNTS = 1024
_LARGEST = 1.7e308


class Outcome(enum.Enum):
    """How a segment ended. Charged it is in both cases."""

    CLOSED = 1  # its steps are in the model
    ABANDONED = 2  # they are not: withdrawn, crashed or redone


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An attempt at the steps [first, last) of a run.

    (run, index, generation) names it; `nonce` tells it from an attempt that a copy of the run made under the same name.
    `after` is the generation of the segment before it that its weights come from; None for the first, 0.
    `eligibility` is the number of leaves that were read when its membership was frozen: contributions admitted, and not
    withdrawn, in the leaves before that. Who of them was sampled is nowhere.
    """

    index: int
    generation: int
    nonce: bytes
    first: int
    last: int
    eligibility: int
    outcome: Outcome
    after: int | None = None

    def __post_init__(self) -> None:
        check(self)
        if not self.first < self.last:
            raise LedgerError(
                "ledger.segment-covers-steps",
                f"segment {self.index} covers steps [{self.first}, {self.last})",
                "give first < last",
            )


define(
    Segment,
    {
        1: ("index", COUNT),
        2: ("generation", COUNT),
        3: ("nonce", NONCE),
        4: ("first", COUNT),
        5: ("last", COUNT),
        6: ("eligibility", SEQ),
        7: ("outcome", OneOf(Outcome)),
        8: ("after", Whole(1, 2**53)),
    },
    optional=[8],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """`steps` Poisson-subsampled Gaussian events with multiplier `sigma` and rate `rate`.

    `order` is the Rényi order of noise that followed its budget, under a filter at that order; absent otherwise.
    """

    sigma: float
    rate: float
    steps: int
    order: float | None = None

    def __post_init__(self) -> None:
        check(self)


define(
    Charge,
    {
        1: ("sigma", Exact(5e-324, _LARGEST)),
        2: ("rate", Exact(0.0, 1.0)),
        3: ("steps", COUNT),
        4: ("order", Exact(1.02, 1e6)),
    },
    optional=[4],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What contributions with one signed bound were charged in this epoch, and have lost since the first leaf.

    The bound is (clip_norm, noise_multiplier) in 1e-6, 0 and 0 where a class has members without one. Their thresholds
    are the plan's times `scale`. `spend` is ε in 1e-9, rounded up, over all runs and generations of the ledger, for a
    contribution that was eligible all the time: at the header's δ, by its accountant.
    """

    cls: str
    clip_norm: int = 0
    noise_multiplier: int = 0
    scale: float = 1.0
    charges: tuple[Charge, ...]
    spend: int

    def __post_init__(self) -> None:
        check(self)

    @property
    def bound(self) -> tuple[str, int, int]:
        """What names the account in a ledger."""
        return (self.cls, self.clip_norm, self.noise_multiplier)

    @property
    def name(self) -> str:
        """The same in words."""
        return f"{self.cls}/{self.clip_norm}/{self.noise_multiplier}"


define(
    Account,
    {
        1: ("cls", CLASS),
        2: ("clip_norm", MICRO),
        3: ("noise_multiplier", MICRO),
        4: ("scale", Exact(5e-324, 1.0)),
        5: ("charges", Many(Part(Charge), 0, 1024)),
        6: ("spend", SPEND),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Segments of one run under one plan, closed together.

    run       16 bytes that name it
    plan      digest of the StepPlan, whose bytes are a blob of the store
    variance  S² per layer as the plan applied it, in its order of layers; never measured from what was drawn
    state     digest of the public state of the accountant after it
    previous  digest of the checkpoint before it, which the ledger fills in; absent before the first
    """

    run: bytes
    segments: tuple[Segment, ...]
    plan: bytes
    variance: tuple[float, ...]
    accounts: tuple[Account, ...]
    state: bytes
    previous: bytes | None = None

    def __post_init__(self) -> None:
        check(self)
        attempts = [(each.index, each.generation) for each in self.segments]
        if attempts != sorted(set(attempts)):
            raise LedgerError(
                "ledger.epoch-names-segment",
                "Epoch names a segment twice or out of order",
                "sort by segment and generation",
            )
        bounds = [each.bound for each in self.accounts]
        if bounds != sorted(set(bounds)):
            raise LedgerError(
                "ledger.epoch-names-bound",
                "Epoch names a bound twice or out of order",
                "sort the accounts by their bound",
            )

    @property
    def attempts(self) -> tuple[tuple[bytes, int, int], ...]:
        """(run, segment, generation) of each: what may be in a ledger once."""
        return tuple((self.run, each.index, each.generation) for each in self.segments)


define(
    Epoch,
    {
        1: ("run", RUN),
        2: ("segments", Many(Part(Segment), 1, MOST_SEGMENTS)),
        3: ("plan", DIGEST),
        4: ("variance", Many(Exact(0.0, _LARGEST), 1, MOST_LAYERS)),
        5: ("accounts", Many(Part(Account), 0, MOST_ACCOUNTS)),
        6: ("state", DIGEST),
        7: ("previous", DIGEST),
    },
    optional=[7],
)
