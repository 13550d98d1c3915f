"""What a corpus allows: classes with their presets and depth profiles, floors, accountant and δ."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from lamina.account import accountant, epsilon_of_multiplier, order_of
from lamina.errors import AccountingError, PlanError
from lamina.plan.injection import MOST_PARTS, Form, Injection
from lamina.plan.profile import DepthProfile
from lamina.plan.schema_errors import explain

_STRICT = ConfigDict(
    strict=True,
    extra="forbid",
    frozen=True,
    populate_by_name=True,
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_profile(value: Any) -> Any:
    return value if isinstance(value, DepthProfile) else DepthProfile.parse(value)


def _known_accountant(name: Any) -> Any:
    if isinstance(name, str):
        try:
            accountant(name)
        except AccountingError as error:
            raise ValueError(str(error)) from error
        if order_of(name) is not None:
            raise ValueError(
                f"{name!r} belongs to plans that follow their budget, which choose it themselves: use pld"
            )
    return name


def _signable(origin: str) -> str:
    """An origin names the ledger, in every signed checkpoint: a signed note has no blanks and no plus in a name."""
    if not re.fullmatch(r"[!-*,-~]{1,255}", origin):
        better = re.sub(r"[^!-*,-~]+", "-", origin).strip("-")[:255] or "example.org/corpus"
        raise ValueError(
            f"{origin!r} cannot name a ledger: use 1 to 255 printable ASCII characters without blanks and '+', for "
            f"example {better!r}"
        )
    return origin


Positive = Annotated[float, Field(gt=0)]
Words = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)]
Profile = Annotated[DepthProfile, BeforeValidator(_as_profile)]
ClassName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]


class Floors(BaseModel):
    """The least that any private class may declare."""

    model_config = _STRICT
    clip_norm: Positive | None = None
    noise_multiplier: Positive | None = None


class Corpus(BaseModel):
    """What holds for all classes: who answers for the corpus, how privacy is counted, and δ.

    floors          the least that a class, and a contribution, may declare
    earlier_floors  those that were in force before: what was signed under them is still admitted, if it meets `floors`
    epoch           seconds for which a verified signature is relied on before it is verified again
    """

    model_config = _STRICT
    origin: Annotated[str, Field(min_length=1), AfterValidator(_signable)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    accountant: Annotated[str, BeforeValidator(_known_accountant)] = "pld"
    floors: Floors = Floors()
    earlier_floors: Annotated[tuple[Floors, ...], BeforeValidator(_as_tuple)] = ()
    epoch: Annotated[int, Field(gt=0)] = 86_400

    @model_validator(mode="after")
    def _floors_only_rise(self) -> Self:
        for earlier in self.earlier_floors:
            for key in Floors.model_fields:
                before, now = getattr(earlier, key), getattr(self.floors, key)
                if before is not None and (now is None or before > now):
                    stands = "none" if now is None else f"{now:g}"
                    raise ValueError(
                        f"an earlier floor of {key} is {before:g}, the one in force is {stands}: floors only rise"
                    )
        return self


class ClassPolicy(BaseModel):
    """One admissibility class.

    population        contributions it may hold, declared in public; sampling is q = b/population
    clip_norm         c, the bound on a contribution's whole gradient
    noise_multiplier  z over the whole participation: no worse than one Gaussian release at z (1/z-GDP)
    epsilon           the budget at the corpus's δ; with both given, the stricter holds
    profile           the layers that it may reach
    unit              what a contribution is: the thing that ε protects
    public            data that costs nothing: no clip, no noise, no budget
    """

    model_config = _STRICT
    population: Annotated[int, Field(gt=0)] | None = None
    clip_norm: Positive = 1.0
    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None
    profile: Profile = DepthProfile.all()
    unit: Annotated[str, Field(min_length=1)] = "contribution"
    purposes: Words = ()
    public: bool = False

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.public:
            given = {"clip_norm", "noise_multiplier", "epsilon"} & self.model_fields_set
            if given:
                raise ValueError(
                    f"a public class has no {', '.join(sorted(given))}: remove it, or public = true"
                )
        elif self.population is None:
            raise ValueError("a private class needs its population: sampling is batch / population")
        return self


class Noise(BaseModel):
    """Which noise, and where it enters (plan/injection.py).

    injection    per_step, per_microbatch, per_sample (by shares) or per_sample_raw
    bins         of per_microbatch: how many fixed parts
    slots        of per_sample: how many contributions of a batch carry a share
    occurrences  of per_sample_raw: how often one contribution takes part, at most; else it is priced for every step
    """

    model_config = _STRICT
    kind: Literal["gaussian"] = "gaussian"
    injection: Literal["per_step", "per_microbatch", "per_sample", "per_sample_raw"] = "per_step"
    bins: Annotated[int, Field(ge=1, le=MOST_PARTS)] | None = None
    slots: Annotated[int, Field(ge=1, le=MOST_PARTS)] | None = None
    occurrences: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _fits_its_form(self) -> Self:
        form, needs = self.injection, {"per_microbatch": "bins", "per_sample": "slots"}
        if (need := needs.get(form)) is not None and getattr(self, need) is None:
            raise ValueError(f"injection {form!r} needs {need}: how many parts the noise of a step has")
        for key, owner in {
            "bins": "per_microbatch",
            "slots": "per_sample",
            "occurrences": "per_sample_raw",
        }.items():
            if getattr(self, key) is not None and form != owner:
                raise ValueError(f"{key} belongs to injection {owner!r}, not to {form!r}: remove it")
        return self

    @property
    def enters(self) -> Injection:
        """As a plan has it."""
        parts = self.bins or self.slots or 1
        return Injection(form=Form(self.injection), parts=parts, occurrences=self.occurrences)


class Policy(BaseModel):
    """The class table of a corpus: public, declared before training, and the only source of a plan's figures.

    In TOML: `[corpus]`, one `[class.NAME]` per class, `[noise]`.
    """

    model_config = _STRICT
    corpus: Corpus
    classes: Annotated[Mapping[ClassName, ClassPolicy], Field(alias="class", min_length=1)]
    noise: Noise = Noise()

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a policy.toml."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                "plan.policy-not-read",
                f"policy {str(path)!r} cannot be read: {error}",
                "give the path of a TOML file; Policy.template_text() is one to start from",
            ) from error
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, source: str = "policy") -> Policy:
        """Read a policy from TOML text; `source` names it in errors."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(
                "plan.not-toml", f"{source} is not TOML: {error}", "correct the line that it names"
            ) from error
        return cls.from_dict(data, source=source)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "policy") -> Policy:
        """Check a policy given as plain tables."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise explain(error, cls, source) from error
        except PlanError as error:
            raise PlanError("plan.from-dict", f"{source}: {error.problem}", error.remedy) from error

    @classmethod
    def template(cls) -> Policy:
        """The policy that ships with Lamina: `sensitive` reaches only the top 25 %."""
        return cls.parse(cls.template_text(), source="template.toml")

    @staticmethod
    def template_text() -> str:
        """Its text, to copy and change."""
        return resources.files("lamina.plan").joinpath("template.toml").read_text(encoding="utf-8")

    @model_validator(mode="after")
    def _respects_floors(self) -> Self:
        floors = self.corpus.floors
        for name, entry in self.classes.items():
            if entry.public:
                continue
            where = f"class.{name}"
            if floors.clip_norm is not None and entry.clip_norm < floors.clip_norm:
                raise PlanError(
                    "plan.clip-norm-below",
                    f"{where}.clip_norm is {entry.clip_norm:g}, below the floor of {floors.clip_norm:g}",
                    "raise it, or lower corpus.floors.clip_norm",
                )
            if floors.noise_multiplier is None:
                continue
            z = entry.noise_multiplier
            if z is not None and z < floors.noise_multiplier:
                raise PlanError(
                    "plan.noise-multiplier-below",
                    f"{where}.noise_multiplier is {z:g}, below the floor of {floors.noise_multiplier:g}",
                    "raise it, or lower corpus.floors.noise_multiplier",
                )
            most = self.epsilon_of(floors.noise_multiplier)
            if entry.epsilon is not None and entry.epsilon > most:
                raise PlanError(
                    "plan.epsilon-above-floor",
                    f"{where}.epsilon is {entry.epsilon:g}, above {most:.4g}, which the floor "
                    f"noise_multiplier {floors.noise_multiplier:g} allows at δ = {self.corpus.delta:g}",
                    "lower it, or lower corpus.floors.noise_multiplier",
                )
        return self

    def epsilon_of(self, noise_multiplier: float) -> float:
        """ε of one Gaussian release with multiplier z at the corpus's δ: exact, μ = 1/z."""
        return epsilon_of_multiplier(noise_multiplier, self.corpus.delta)

    def bound(self, name: str) -> float | None:
        """The ε that class `name` may spend: the strictest of epsilon, noise_multiplier and floor.

        None if none of them is given; 0 for a public class.
        """
        entry = self.classes[name]
        if entry.public:
            return 0.0
        multipliers = (entry.noise_multiplier, self.corpus.floors.noise_multiplier)
        bounds = [self.epsilon_of(z) for z in multipliers if z is not None]
        if entry.epsilon is not None:
            bounds.append(entry.epsilon)
        return min(bounds, default=None)
