"""Queries to a released model: what they draw on, and under which rights; and the settings of a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, model_validator

from lamina.errors import PlanError
from lamina.plan.risk import STATED_RATES, RiskBound
from lamina.release.schema import Document, Text, read_document

MAX_PATTERNS = 64
MAX_PATTERN_CHARACTERS = 4096  # of all patterns together: each is tried on every layer
MAX_AGE = 366 * 86_400  # largest `max_age` in seconds
_MAX_RIGHTS = 1 << 16  # characters of all rights together: a line of the log must hold them

Name = Annotated[str, Field(min_length=1, max_length=512)]
_Least = Annotated[float, Field(ge=0)]


class DrawsOn(Document):
    """What a query draws on in JSON: layers and a band of depth, with an adapter; or a generation class of the manifest."""

    layers: list[Name] = Field(default_factory=list, max_length=MAX_PATTERNS)
    depth: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    adapter: Name | None = None
    generation_class: Name | None = Field(default=None, description="a name of the manifest; instead of the others")

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if sum(map(len, self.layers)) > MAX_PATTERN_CHARACTERS:
            raise ValueError(
                f"its patterns have more than {MAX_PATTERN_CHARACTERS} characters: name a generation class"
            )
        if self.generation_class is not None and (self.layers or self.depth or self.adapter):
            raise ValueError("it names a generation class and layers, depth or adapter beside it")
        return self


class StatedRisk(RiskBound):
    """A bound on attacks at a false-positive rate at which manifests state true-positive rates."""

    fpr: Literal[STATED_RATES]  # type: ignore[valid-type]


class RightsDocument(Document):
    """The rights of a query in JSON."""

    classes: Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=1024)] = Field(
        description="classes whose data may be drawn on"
    )
    max_epsilon: _Least | None = Field(description="largest ε; null for any")
    min_noise_multiplier: _Least
    purpose: Annotated[str, Field(max_length=512)] = Field(description="what the answer is for")
    accept_withdrawn: bool = False
    max_tpr: StatedRisk | None = Field(default=None, description="what an attack may find at most; null for any")
    attested: bool = Field(default=False, description="whether the model must come from signed contributions alone")

    @model_validator(mode="after")
    def _not_too_long(self) -> Self:
        if sum(map(len, (*self.classes, self.purpose))) > _MAX_RIGHTS:
            raise ValueError(f"classes and purpose have more than {_MAX_RIGHTS} characters together")
        return self


class QueryDocument(Document):
    """A query in JSON."""

    rights: RightsDocument
    draws_on: DrawsOn = Field(default_factory=DrawsOn)
    scope: Name | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """The rights envelope of a query: under which privacy posture whoever asks may use the model.

    classes               the classes whose data may be drawn on
    max_epsilon           the largest ε that a class may have; inf for any
    min_noise_multiplier  the least sigma that a class must have had in every step; 0 for any
    purpose               what the answer is for
    accept_withdrawn      whether contributions that were withdrawn since may be in it
    max_tpr               what an attack on a class may find at most, at a stated false-positive rate; None for any
    attested              whether the model must come from signed contributions alone, as its ledger records them
    """

    classes: frozenset[str]
    max_epsilon: float
    min_noise_multiplier: float
    purpose: str
    accept_withdrawn: bool = False
    max_tpr: RiskBound | None = None
    attested: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", frozenset(self.classes))
        _read(RightsDocument, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the rights as JSON states them."""
        return {
            "classes": sorted(self.classes, key=str),
            "max_epsilon": None if self.max_epsilon == float("inf") else self.max_epsilon,
            "min_noise_multiplier": self.min_noise_multiplier,
            "purpose": self.purpose,
            "accept_withdrawn": self.accept_withdrawn,
            "max_tpr": None if self.max_tpr is None else self.max_tpr.model_dump(),
            "attested": self.attested,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What a query draws on, and under which rights.

    layers            names or patterns of layers; all of the model if neither this nor `depth` is given
    depth             a band (low, high) of the depth, ends included: 0 is the input, 1 the output
    adapter           the adapter that is switched on; None for the base alone
    generation_class  a name that the manifest gives to one of these; instead of them
    scope             where the answer is used: an adapter may be bound to one
    """

    rights: Rights
    layers: tuple[str, ...] = ()
    depth: tuple[float, float] | None = None
    adapter: str | None = None
    generation_class: str | None = None
    scope: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        _read(QueryDocument, self.to_dict())

    @classmethod
    def from_dict(cls, plain: object) -> Query:
        """Return a query as JSON states it: {"draws_on": {…}, "scope": …, "rights": {…}}; EncodingError for anything else."""
        read = _read(QueryDocument, plain)
        rights, risk = dict(read.rights), read.rights.max_tpr
        rights["max_epsilon"] = float("inf") if read.rights.max_epsilon is None else read.rights.max_epsilon
        rights["max_tpr"] = None if risk is None else RiskBound(**dict(risk))
        return cls(rights=Rights(**rights), scope=read.scope, **draws_of(read.draws_on))

    def to_dict(self) -> dict[str, Any]:
        """Return the inverse of `from_dict`."""
        draws = {name: getattr(self, name) for name in DrawsOn.model_fields}
        stated = {name: list(value) if isinstance(value, tuple) else value for name, value in draws.items() if value}
        return {"draws_on": stated, "scope": self.scope, "rights": self.rights.to_dict()}


def _read(kind: Any, plain: object) -> Any:
    return read_document(kind, plain, "the query", "release.query-invalid")


class GatePolicy(Document):
    """Settings of the gate of a release, in addition to the posture. The gate denies everything that they do not allow.

    unstated_purposes   whether a class whose policy names no purpose may be used for any
    max_age             seconds after the newest signed time that a gate knows (of the ledger, or without one of the
                        manifest) until it denies everything, because later withdrawals are unknown to it
    generation_classes  names for what queries draw on: {"head": {"layers": ["head.*"]}}
    """

    default: Literal["deny"] = "deny"
    unstated_purposes: Annotated[
        bool,
        BeforeValidator(
            lambda value: {"allow": True, "deny": False}.get(value, value) if type(value) is str else value
        ),
        PlainSerializer(lambda value: "allow" if value else "deny"),
    ] = False
    max_age: Annotated[int, Field(ge=1, le=MAX_AGE)] = 7 * 86_400
    generation_classes: dict[Text, DrawsOn] = Field(default_factory=dict, max_length=4096)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            problem = f"the gate has an invalid setting: {'.'.join(map(str, first['loc']))[:120]}: {first['msg'][:300]}"
            remedy = f"give 1 second to {MAX_AGE // 86_400} days; layers, a band of depth in [0, 1], an adapter"
            raise PlanError("release.gate-policy-invalid", problem, remedy) from None

    @model_validator(mode="after")
    def _bands_lie_in_the_model(self) -> Self:
        for each in self.generation_classes.values():
            if each.generation_class is not None or not all(0 <= end <= 1 for end in each.depth or ()):
                raise ValueError("a generation class names another, or a depth that is not in [0, 1]")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a manifest states them."""
        return self.model_dump(exclude={"generation_classes"}) | {
            "generation_classes": {
                name: each.model_dump(exclude_unset=True) for name, each in self.generation_classes.items()
            }
        }


def draws_of(stated: DrawsOn) -> dict[str, Any]:
    """Return what JSON states as attributes of a query."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in stated}
