"""The signed JSON documents of a release: every field, its type and its bounds, declared once.

What is read is checked by these models, because a signer may have written anything. Unknown fields, other types (1 is not
true, "1" is not 1) and values out of range are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lamina.account.tradeoff import BY_GAUSSIAN, BY_LOSSES, BY_RENYI
from lamina.errors import EncodingError
from lamina.ledger.governance_records import ABOUT
from lamina.ledger.schema import MAX_EPSILON
from lamina.plan.risk import STATED_RATES
from lamina.validate import is_short_text, short_repr

BY_LEDGER, BY_TRAINER, BY_OWNER = "recomputed from the ledger", "stated by the trainer", "stated by the owner"
BY_MEASUREMENT, BY_ISSUER = "measured", "observed by the issuer"
BY_METHOD = "follows from the method"  # of every run, or of the plans of this one
SOURCES = (BY_LEDGER, BY_TRAINER, BY_OWNER, BY_MEASUREMENT, BY_ISSUER, BY_METHOD)
TOPICS = (
    "membership", "content", "budget", "unit", "purpose", "attestation", "withdrawn", "reach", "condition", "assumption", "trust",
    "query model", "side channels", "tuning", "utility", "voids", "not covered",
)  # fmt: skip
BASELINES = (0.01, 0.1, 0.5)  # of attribute inference and reconstruction
CURVE_RATES: Sequence[float] = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.17, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99,
)  # fmt: skip
"""False-positive rates of the points of a curve on paper."""
TWO_STEPS = "replace-one, as two add/remove steps"
EPSILON_AT = ("0.001", "0.0001", "1e-05", "1e-06", "1e-08")  # δ at which ε is stated as well
LEAST_RECORDS = 10  # groups with fewer are suppressed
MAX_NOISE = 1e15  # no plan adds more
CERTIFICATE_VERSION = 4
NOT_REACHED = (
    "A class that did not reach a layer had no direct gradient there. Later steps of others saw weights that it moved "
    "elsewhere: the noise covers that, not the structure."
)


class Document(BaseModel):
    """A part of a document."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


D = TypeVar("D", bound=Document)


def read_document(kind: type[D], content: Any, what: str, code: str) -> D:
    """Return a document; raise EncodingError with the first field that does not fit."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:120]
        problem = f"{what} has a field that is out of range: {place + ': ' if place else ''}{first['msg'][:300]}"
        raise EncodingError(code, problem, "fetch it again") from None


def _short_text(value: str) -> str:
    if not is_short_text(value):
        raise ValueError(f"{short_repr(value)} is not a text of 1 to 512 printable characters")
    return value


def _exactly(names: Sequence[str]) -> AfterValidator:
    """Return a check that a map has these keys, in this order."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        if [*value] != [*names]:
            raise ValueError(f"it must have the keys {', '.join(names)}")
        return value

    return AfterValidator(check)


def _bounded_below(value: dict[str, float]) -> dict[str, float]:
    if low := [rate for rate, found in value.items() if found < float(rate)]:
        raise ValueError(f"an attack finds less than guessing at {low[0]}")
    return value


Text = Annotated[str, AfterValidator(_short_text)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
RunId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
LeafNumber = Annotated[int, Field(ge=0, le=2**63 - 1)]
Size = Annotated[int, Field(ge=1, le=2**63 - 1)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Steps = Annotated[int, Field(ge=1, le=2**53)]
Rate = Annotated[float, Field(ge=0, le=1)]
Epsilon = Annotated[float, Field(ge=0, le=MAX_EPSILON)]
Noise = Annotated[float, Field(ge=0, le=MAX_NOISE)]
Source = Literal[SOURCES]  # type: ignore[valid-type]
Rates = Annotated[dict[str, Rate], _exactly([f"{rate:g}" for rate in STATED_RATES]), AfterValidator(_bounded_below)]


class Risk(Document):
    """What an attacker can learn: the largest true-positive rates of any attack, and points of their curve."""

    adjacency: Literal["add-remove", "replace-one", TWO_STEPS]  # type: ignore[valid-type]
    bound: Literal[BY_LOSSES, BY_GAUSSIAN, BY_RENYI]  # type: ignore[valid-type]
    tpr: Rates
    accuracy: Annotated[float, Field(ge=0.5, le=1)]
    advantage: Rate
    mu: Epsilon | None
    mu_least_rate: Rate
    curve: Annotated[dict[str, Rate], _exactly([f"{rate:g}" for rate in CURVE_RATES]), AfterValidator(_bounded_below)]


class ContentRisk(Risk):
    """The same about content, with the success of attribute inference and reconstruction."""

    success: Annotated[dict[str, Rate], _exactly([f"{rate:g}" for rate in BASELINES]), AfterValidator(_bounded_below)]


class Risks(Document):
    """The risks of an account: of one run, and over all runs up to the checkpoint. None: nothing is proven."""

    membership: Risk | None
    content: ContentRisk | None
    membership_total: Risk | None
    content_total: ContentRisk | None


class Charge(Document):
    """Steps of one kind that a class was charged; `order` of noise that followed its budget."""

    noise_multiplier: Noise
    sampling_rate: Rate
    steps: Count
    order: Annotated[float, Field(ge=0, le=1e15)] | None


class SignedBound(Risks):
    """The figures of contributions that signed a stricter bound."""

    clip_norm: Noise
    noise_multiplier: Noise
    contributions: Count
    epochs: Count
    epochs_left_out: Count
    epochs_scaled: Count
    scale: Noise
    epsilon: Epsilon | None
    epsilon_total: Epsilon | None
    epsilon_signed: Epsilon | None


class ClassFigures(Risks):
    """The figures of a class. None: nothing is proven, or the class is public and not protected."""

    unit: Text
    public: bool
    population: Count | None
    adjacency: Text
    delta: Rate | None
    epsilon: Epsilon | None
    epsilon_total: Epsilon | None
    epsilon_replace_one: Epsilon | None
    epsilon_unamplified: Epsilon | None
    rho: Epsilon | None
    epsilon_at: Annotated[dict[str, Epsilon | None], _exactly(EPSILON_AT)] | None
    noise_multiplier: Noise | None
    sampling_rate: Rate | None
    clip_norm: Noise | None
    max_occurrences: Count | None = None
    charges: list[Charge]
    bounds: list[SignedBound]

    @model_validator(mode="after")
    def _public_has_no_figures(self) -> Self:
        names = ("delta", "epsilon", "epsilon_at", *Risks.model_fields)
        if self.public and any(getattr(self, name) is not None for name in names):
            raise ValueError("it is public but states ε, δ or a risk; public data is not protected")
        return self


class Layer(Document):
    """A layer: the classes that reached it, and the least noise that it had in a step."""

    name: Text
    depth: Rate
    parameters: Count
    noise_std: Noise
    classes: list[Text]


class Condition(Document):
    """A condition of the guarantee of a run: why it does not hold, its source, and the leaves of the ledger that show it."""

    name: Text
    holds: bool
    reason: str | None
    source: Source
    leaves: list[LeafNumber] | None


class Statement(Document):
    """A statement with its source, and the leaves or the digest of the file that show it."""

    topic: Literal[TOPICS]  # type: ignore[valid-type]
    cls: str | None = Field(alias="class")
    text: str
    source: Source
    leaves: list[LeafNumber] | None
    digest: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")] | None


class NotProtected(Document):
    """A class that is not protected, and why."""

    cls: str = Field(alias="class")
    population: Count | None
    unit: Text
    reason: str


class Protects(Document):
    """The classes for which a model is private, weakly protected or not private."""

    private_for: list[str]
    weak: list[str]
    not_protected: list[NotProtected]
    badge: str


class StartingWeights(Document):
    """The weights with which a run began: their origin, and the run that wrote them."""

    leaf: LeafNumber
    sha256: Digest
    origin: Text
    parent: RunId | None


class TrainerFacts(Document):
    """What the trainer states in the start and end records of the run."""

    leaf: LeafNumber
    noise: Text
    sampling: Text
    adjacency: Text
    probed: bool
    covered: bool
    raw_figures: Text
    hardened: bool
    max_occurrences: dict[str, Count]
    files: dict[str, Digest]
    starting_weights: StartingWeights | None


class Program(Document):
    """Versions and digests of the program that trained."""

    lamina: Text
    sources: Text
    torch: Text
    python: Text
    kernels: Text


class Programs(Program):
    """The program of the end of a run, and those of earlier sessions."""

    leaf: LeafNumber
    earlier: list[Program]


class Tuning(Document):
    """The runs of the ledger, as trials, and the optimiser of this run by its start record."""

    runs_in_ledger: LeafNumber
    runs_before_this: LeafNumber
    leaves: list[LeafNumber]
    optimizer: Text


class OwnerText(Document):
    """A text of the owner, and the leaf that states it."""

    text: str
    leaf: LeafNumber


class Neighbour(Document):
    """Another ledger that the issuer found."""

    model_config = ConfigDict(extra="allow")
    origin: Text
    runs: Count


class EvaluationRow(Document):
    """A figure of an evaluation, of all records or of a group; a value of None is suppressed or not defined."""

    figure: Text
    group: Text | None
    value: Annotated[float, Field(ge=-1e300, le=1e300)] | None
    low: Annotated[float, Field(ge=-1e300, le=1e300)] | None
    high: Annotated[float, Field(ge=-1e300, le=1e300)] | None
    records: Steps | None
    weights: Text

    @model_validator(mode="after")
    def _interval_and_group(self) -> Self:
        numbers = [each for each in (self.low, self.value, self.high) if each is not None]
        named = [name for name in ("low", "value", "high") if getattr(self, name) is not None]
        if named not in ([], ["value"], ["low", "value", "high"]) or numbers != sorted(numbers):
            raise ValueError("a figure lies outside of its interval")
        if self.group is not None and numbers and (self.records or 0) < LEAST_RECORDS:
            raise ValueError(f"a group has fewer than {LEAST_RECORDS} records and is not suppressed")
        return self


class UtilityRow(EvaluationRow):
    """The same in a certificate, with the data and the digest of the evaluation."""

    level: Rate
    on: Literal["public", "simulated"]
    step: Count
    covered_by_epsilon: Literal[True]
    digest: Digest


class RunFacts(Document):
    """The run of a certificate."""

    id: RunId
    steps: Steps
    planned_steps: Steps


class ModelFacts(Document):
    """The weights of a certificate."""

    file: Text
    sha256: Digest
    parameters: Annotated[int, Field(ge=0, le=2**63)]


class PlanFacts(Document):
    """The plan of a certificate."""

    sha256: Digest
    allocation: Text
    clipping: Text
    expected_batch: Annotated[float, Field(ge=0, le=2.0**53)]
    steps: Steps
    noise: Text
    correlation: dict[str, Any] | None = None


class LedgerHead(Document):
    """Where a ledger stood: enough to check later that it was only continued."""

    origin: str
    size: Size
    root: Digest
    header: Digest
    checkpoint: str


class CertifiedHead(LedgerHead):
    """The same with the verdict about the ledger."""

    verdict: Text


class Accountant(Document):
    """The accountant of a ledger."""

    name: Text
    version: Text


class CertificateContent(Document):
    """What a certificate states."""

    version: Literal[4]
    private: bool
    attested: bool
    issued: Text
    run: RunFacts
    model: ModelFacts
    ledger: CertifiedHead
    accountant: Accountant
    plan: PlanFacts
    trainer: TrainerFacts
    program: Programs
    tuning: Tuning
    utility: list[UtilityRow]
    classes: dict[Text, ClassFigures]
    layers: list[Layer]
    conditions: Annotated[list[Condition], Field(min_length=1)]
    other_people: str | None
    about: dict[str, OwnerText]
    ledgers_beside: list[Neighbour]
    protects: Protects
    statements: list[Statement]

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        protects = self.protects
        named = {name for layer in self.layers for name in layer.classes} | {*protects.private_for, *protects.weak}
        named |= {each.cls for each in self.statements if each.cls is not None}
        named |= {each.cls for each in protects.not_protected}
        if unknown := named - self.classes.keys():
            raise ValueError(f"class {short_repr(min(unknown))} is named and has no figures")
        if any(each.population != self.classes[each.cls].population for each in protects.not_protected):
            raise ValueError("protects names another population than the class has")
        if bad := [name for name, each in self.about.items() if not ABOUT.fits(((name, each.text),))]:
            raise ValueError(f"about.{bad[0][:80]} is no text of the owner")
        if self.private != all(each.holds for each in self.conditions):
            raise ValueError("private contradicts the conditions")
        return self
