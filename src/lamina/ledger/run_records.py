"""Records of the start and end of a run: the facts that a certificate states and no epoch contains.

They are statements of the trainer. Once they are in the ledger, neither they nor the weights can be changed after the
run.
"""

from __future__ import annotations

import enum

from lamina.codec import check_fields, enum_member, integer, ledger_record, nested, pattern_text, stored, tuple_of
from lamina.errors import LedgerError
from lamina.ledger.governance_records import MAX_CLASSES
from lamina.ledger.schema import BOOLEAN, CLASS, COUNT, DIGEST, RUN, VERSION

WEIGHTS = "model.safetensors"
EVALUATION = "evaluation.json"
MAX_RUN_FILES = 16
MAX_RUN_PROGRAMS = 64
ZERO_OUT = "zero-out at a public number of contributions"  # adjacency of ε if no population was declared


class WeightsOrigin(enum.Enum):
    """What the trainer declares about the starting weights."""

    NONE = 1  # they were not trained before
    PUBLIC = 2  # trained on public data only
    RUN = 3  # weights that another run of the ledger wrote at its end


DECLARED_ORIGINS = {"untrained": WeightsOrigin.NONE, "public": WeightsOrigin.PUBLIC}


class NoiseOrigin(enum.Enum):
    """The source of noise and sampling coins. A chosen seed is never recorded."""

    SYSTEM = 1  # the system's generator
    SEEDED = 2  # a seed that the user chose


class SamplingScheme(enum.Enum):
    """How contributions were sampled."""

    POISSON = 1
    OTHER = 2


@ledger_record()
class OccurrenceCap:
    """The largest number of times that a contribution of one class was used."""

    cls: str = stored(1, CLASS)
    most: int = stored(2, integer(1, 2**53))


@ledger_record()
class FileDigest:
    """A file that a run wrote, by name and SHA-256."""

    name: str = stored(1, pattern_text(r"[a-z0-9][a-z0-9_.-]{0,63}"))
    sha256: bytes = stored(2, DIGEST)


@ledger_record()
class ProgramVersions:
    """A program that performed steps of a run.

    sources  SHA-256 of the list of Lamina's sources with their own SHA-256
    kernels  SHA-256 of the file of the native kernels; absent: the torch rules ran
    """

    lamina: str = stored(1, VERSION)
    sources: bytes = stored(2, DIGEST)
    torch: str = stored(3, VERSION)
    python: str = stored(4, VERSION)
    kernels: bytes | None = stored(5, DIGEST, default=None)


@ledger_record()
class RunBegin:
    """The starting weights of a run, recorded before its first segment is charged.

    weights  SHA-256 of the file that the run would have written as model.safetensors before its first step
    origin   what the trainer declares about them; absent: nothing
    parent   the run that they come from, if `origin` is RUN
    optimizer  optimiser, learning rates and schedule before the first step, as ASCII text
    """

    run: bytes = stored(1, RUN)
    weights: bytes = stored(2, DIGEST)
    origin: WeightsOrigin | None = stored(3, enum_member(WeightsOrigin), default=None)
    parent: bytes | None = stored(4, RUN, default=None)
    optimizer: str | None = stored(5, pattern_text(r"[ -~]{1,256}"), default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.origin is WeightsOrigin.RUN) != (self.parent is not None) or self.parent == self.run:
            problem = "the start of a run names a parent without the origin RUN, the origin RUN without a parent, or itself as parent"
            raise LedgerError("ledger.run-parent", problem, "give a parent if, and only if, the origin is RUN")

    @property
    def declaration(self) -> str | None:
        """Return the origin in the form of `starting_weights=`: "untrained", "public" or the id of a run."""
        words = (word for word, origin in DECLARED_ORIGINS.items() if origin is self.origin)
        return next(words, None) if self.parent is None else self.parent.hex()


@ledger_record()
class RunEnd:
    """The end of a run: the segment that its weights come from, its conditions, and the files that it wrote.

    segment, generation  the closed attempt after which the run ended
    steps, plan     its last step and its plan, as its epoch records them
    noise, sampling source of the noise, and how contributions were sampled
    public_number   whether the number of contributions is public, so that ε is about content alone
    probed          whether it was tested that contributions do not influence each other
    covered         whether every trained tensor was clipped and noised
    raw_figures     whether raw figures of private data were handed out
    hardened        whether noise was rounded to a public grid in every session
    caps            how often a contribution was used at most, by class; absent classes were not capped
    files           the final weights and whatever else the run wrote, in the order of their names
    programs        versions of the program whose steps are in the weights, in the order of their first step
    """

    run: bytes = stored(1, RUN)
    segment: int = stored(2, COUNT)
    generation: int = stored(3, COUNT)
    steps: int = stored(4, integer(1, 2**53))
    plan: bytes = stored(5, DIGEST)
    noise: NoiseOrigin = stored(6, enum_member(NoiseOrigin))
    sampling: SamplingScheme = stored(7, enum_member(SamplingScheme))
    public_number: bool = stored(8, BOOLEAN)
    probed: bool = stored(9, BOOLEAN)
    covered: bool = stored(10, BOOLEAN)
    raw_figures: bool = stored(11, BOOLEAN)
    hardened: bool = stored(12, BOOLEAN)
    caps: tuple[OccurrenceCap, ...] = stored(13, tuple_of(nested(OccurrenceCap), 0, MAX_CLASSES))
    files: tuple[FileDigest, ...] = stored(14, tuple_of(nested(FileDigest), 1, MAX_RUN_FILES))
    programs: tuple[ProgramVersions, ...] | None = stored(
        15, tuple_of(nested(ProgramVersions), 1, MAX_RUN_PROGRAMS), default=None
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for what, names in (("class", [each.cls for each in self.caps]), ("file", [each.name for each in self.files])):
            if names != sorted(set(names)):
                problem = f"the end of a run names a {what} twice or out of order"
                raise LedgerError("ledger.run-end-not-sorted", problem, "list each once, in order")
        if WEIGHTS not in self.digests:
            raise LedgerError("ledger.run-end-no-weights", f"the end of a run has no digest of {WEIGHTS}", "add it")

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of every file, in hex."""
        return {each.name: each.sha256.hex() for each in self.files}

    @property
    def weights(self) -> str:
        """SHA-256 of the final weights, in hex."""
        return self.digests[WEIGHTS]

    @property
    def weight_files(self) -> set[bytes]:
        """SHA-256 of every file of weights."""
        return {each.sha256 for each in self.files if each.name.endswith(".safetensors")}

    @property
    def max_occurrences(self) -> dict[str, int]:
        """The caps by class."""
        return {each.cls: each.most for each in self.caps}

    @property
    def attempt(self) -> tuple[bytes, int, int]:
        """(run, segment, generation) of the attempt after which the run ended."""
        return (self.run, self.segment, self.generation)

    def conditions(self, adjacency: str) -> dict[str, str | bool]:
        """Return the facts of this record, named as in metrics.json and certificates; `adjacency` is that of the plan."""
        return stated_conditions(
            adjacency, noise=self.noise, sampling=self.sampling, public_number=self.public_number, probed=self.probed,
            covered=self.covered, raw_figures=self.raw_figures, hardened=self.hardened,
        )  # fmt: skip


def stated_conditions(
    adjacency: str, *, noise: NoiseOrigin, sampling: SamplingScheme, public_number: bool, probed: bool, covered: bool,
    raw_figures: bool, hardened: bool,
) -> dict[str, str | bool]:  # fmt: skip
    """Return facts of a run, named as in metrics.json and certificates; `adjacency` is that of the plan."""
    return {
        "noise": "secure" if noise is NoiseOrigin.SYSTEM else "seeded",
        "sampling": "poisson" if sampling is SamplingScheme.POISSON else "other",
        "adjacency": ZERO_OUT if public_number else adjacency,
        "probed": probed,
        "covered": covered,
        "raw_figures": "given to a progress of the user's own" if raw_figures else "none",
        "hardened": hardened,
    }


RunRecord = RunBegin | RunEnd
