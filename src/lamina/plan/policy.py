"""policy.toml: classes with their presets and depth profiles, floors, accountant, δ, [about]; readable schema errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.schedule import rdp_order_of
from lamina.errors import AccountingError, PlanError
from lamina.plan.correlation import MAX_BANDS
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.risk import RiskBound
from lamina.plan.rules import MAX_INJECTION_PARTS, Injection, InjectionForm, NoiseKind
from lamina.plan.selection import did_you_mean
from lamina.plan.step_plan import MAX_UNIT_CHARACTERS
from lamina.validate import parse_toml, read_text_file, whole

_STRICT = ConfigDict(
    strict=True, extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, arbitrary_types_allowed=True
)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_profile(value: Any) -> Any:
    return value if isinstance(value, DepthProfile) else DepthProfile.parse(value)


def _check_accountant(name: Any) -> Any:
    if isinstance(name, str):
        try:
            find_accountant(name)
        except AccountingError as error:
            raise ValueError(str(error)) from error
        if rdp_order_of(name) is not None:
            raise ValueError(f"{name!r} belongs to plans that follow their budget, which choose it themselves: use pld")
    return name


def _check_origin(origin: str) -> str:
    """An origin names the ledger, in every signed checkpoint: a signed note has no blanks and no plus in a name."""
    if not re.fullmatch(r"[!-*,-~]{1,255}", origin):
        better = re.sub(r"[^!-*,-~]+", "-", origin).strip("-")[:255] or "example.org/corpus"
        raise ValueError(f"use 1 to 255 printable ASCII characters without blanks and '+', for example {better!r}")
    return origin


def _check_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text on one line, because sentences of the certificate contain it")
    return text


def _check_ledger(digits: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise ValueError("use the 64 hexadecimal digits that lamina ledger init prints")
    return digits


PositiveField = Annotated[float, Field(gt=0)]
StringsField = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)]
ProfileField = Annotated[DepthProfile, BeforeValidator(_as_profile)]
AboutField = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_check_line)] | None
ClassNameField = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]


class PolicyFloors(BaseModel):
    """The least that any private class may declare."""

    model_config = _STRICT
    clip_norm: PositiveField | None = None
    noise_multiplier: PositiveField | None = None


class CorpusPolicy(BaseModel):
    """What holds for all classes: who answers for the corpus, how privacy is counted, and δ.

    floors          the least that a class, and a contribution, may declare
    earlier_floors  those that were in force before: what was signed under them is still admitted, if it meets `floors`
    epoch           seconds for which a verified signature is relied on before it is verified again
    ledger          hash of the header leaf of its ledger, which attestations then name: no other ledger admits them
    retention       days for which the ledger keeps contributions whole
    granularity     segments that an epoch of the ledger closes at most
    witnesses       cosignatures that a checkpoint of the ledger needs
    withdraw        who may withdraw: "keeper", whoever keeps the ledger, or "signed", requests that somebody signed alone
    attestation     "required": runs on this corpus use signed contributions alone; "optional": others too. The default is
                    "required" if `ledger` is named, "optional" otherwise
    exhausted       what a run does about a signed bound that earlier charges have used up: "refuse" to run, "leave-out"
                    who signed it of the segments that it does not cover, or "scale" them to what remains of it

    Retention, granularity, witnesses and withdraw are read when the ledger is made; afterwards its owner changes them
    (`lamina ledger terms`).
    """

    model_config = _STRICT
    origin: Annotated[str, Field(min_length=1), AfterValidator(_check_origin)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    accountant: Annotated[str, BeforeValidator(_check_accountant)] = "pld"
    floors: PolicyFloors = PolicyFloors()
    earlier_floors: Annotated[tuple[PolicyFloors, ...], BeforeValidator(_as_tuple)] = ()
    epoch: Annotated[int, Field(gt=0)] = 86_400
    ledger: Annotated[str, AfterValidator(_check_ledger)] | None = None
    retention: Annotated[int, Field(ge=1, le=36_500)] = 365
    granularity: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    witnesses: Annotated[int, Field(ge=0, le=1024)] | None = None
    withdraw: Literal["keeper", "signed"] = "keeper"
    attestation: Literal["required", "optional"] | None = None
    exhausted: Literal["refuse", "leave-out", "scale"] = "refuse"
    other_people: Annotated[str, Field(pattern=r"^[ -~]{1,255}$")] | None = None

    @model_validator(mode="after")
    def _floors_only_rise(self) -> Self:
        for earlier in self.earlier_floors:
            for key in PolicyFloors.model_fields:
                before, now = getattr(earlier, key), getattr(self.floors, key)
                if before is not None and (now is None or before > now):
                    stands = "none" if now is None else f"{now:g}"
                    raise ValueError(f"{key} had the floor {before:g} and now has {stands}, but floors only rise")
        return self

    @property
    def requires_attestation(self) -> bool:
        """Whether runs may use signed contributions alone."""
        return self.ledger is not None if self.attestation is None else self.attestation == "required"

    @property
    def ledger_hash(self) -> bytes | None:
        """`ledger` as attestations name it."""
        return None if self.ledger is None else bytes.fromhex(self.ledger)


class ClassPolicy(BaseModel):
    """One admissibility class.

    population        contributions it may hold, declared in public; sampling is q = b/population
    clip_norm         c, the bound on a contribution's whole gradient
    noise_multiplier  z over the whole participation: no worse than one Gaussian release at z (1/z-GDP)
    epsilon           the budget at the corpus's δ; of several that are given, the strictest holds
    risk              what an attack may find at most, instead of ε or beside it
    profile           the layers that it may reach
    unit              what a contribution is: the thing that ε protects
    public            data that costs nothing: no clip, no noise, no budget
    """

    model_config = _STRICT
    population: Annotated[int, Field(gt=0)] | None = None
    clip_norm: PositiveField = 1.0
    noise_multiplier: PositiveField | None = None
    epsilon: PositiveField | None = None
    risk: RiskBound | None = None
    profile: ProfileField = DepthProfile.all()
    unit: Annotated[str, Field(min_length=1, max_length=MAX_UNIT_CHARACTERS), AfterValidator(_check_line)] = (
        "contribution"
    )
    purposes: StringsField = ()
    public: bool = False

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.public:
            given = {"clip_norm", "noise_multiplier", "epsilon", "risk"} & self.model_fields_set
            if given:
                raise ValueError(f"a public class has no {', '.join(sorted(given))}: remove it, or public = true")
        elif self.population is None:
            raise ValueError("a private class needs its population: sampling is batch / population")
        return self


class NoisePolicy(BaseModel):
    """Which noise, and where it enters (plan/rules.py).

    kind         gaussian; discrete_gaussian or skellam, exact on integers, with accountant = "rdp-integer" in [corpus]; or
                 laplace, exact on integers, which clips L1 norms. auto: the first of discrete_gaussian, skellam, gaussian and
                 laplace that nothing in the plan, the processor or the device stands against; the plan keeps the choice
    device       where noise of kind auto is drawn: here; integer, a device without floating-point arithmetic; parties,
                 several devices that draw a share each
    injection    per_step, per_microbatch, per_sample (by shares) or per_sample_raw
    bins         of per_microbatch: how many fixed parts
    slots        of per_sample: how many contributions of a batch carry a share
    occurrences  of per_sample_raw: how often one contribution takes part, at most; else it is priced for every step
    correlation  none: every step has noise of its own; banded: it is correlated over `bands` steps (plan/correlation.py)
    bands        of banded: over how many steps; each contribution may be sampled in one of them
    """

    model_config = _STRICT
    kind: Literal["gaussian", "discrete_gaussian", "skellam", "laplace", "auto"] = "gaussian"
    device: Literal["here", "integer", "parties"] = "here"
    injection: Literal["per_step", "per_microbatch", "per_sample", "per_sample_raw"] = "per_step"
    bins: Annotated[int, Field(ge=1, le=MAX_INJECTION_PARTS)] | None = None
    slots: Annotated[int, Field(ge=1, le=MAX_INJECTION_PARTS)] | None = None
    occurrences: Annotated[int, Field(ge=1)] | None = None
    correlation: Literal["none", "banded"] = "none"
    bands: Annotated[int, Field(ge=2, le=MAX_BANDS)] | None = None

    @model_validator(mode="after")
    def _fits_its_form(self) -> Self:
        if (self.bands is None) == (self.correlation == "banded"):
            raise ValueError("correlation = 'banded' and bands (over how many steps) go together: give both or none")
        if self.device != "here" and self.kind != "auto":
            raise ValueError(f"device belongs to kind 'auto', and kind is {self.kind!r}: remove it")
        form, needs = self.injection, {"per_microbatch": "bins", "per_sample": "slots"}
        if (need := needs.get(form)) is not None and getattr(self, need) is None:
            raise ValueError(f"injection {form!r} needs {need}: how many parts the noise of a step has")
        for key, owner in {"bins": "per_microbatch", "slots": "per_sample", "occurrences": "per_sample_raw"}.items():
            if getattr(self, key) is not None and form != owner:
                raise ValueError(f"{key} belongs to injection {owner!r}, not to {form!r}: remove it")
        return self

    @property
    def as_injection(self) -> Injection:
        """As a plan has it."""
        parts = self.bins or self.slots or 1
        return Injection(form=InjectionForm(self.injection), parts=parts, occurrences=self.occurrences)


class AboutPolicy(BaseModel):
    """The owner's statements about data and model, for certificates and papers. All are optional."""

    model_config = _STRICT
    title: AboutField = None
    description: AboutField = None
    task: AboutField = None
    approach: (
        Literal["supervised", "unsupervised", "reinforcement-learning", "semi-supervised", "self-supervised"] | None
    ) = None
    domain: AboutField = None
    intended_use: AboutField = None
    safety_risk: Literal["serious", "high", "medium", "low"] | None = None  # of using the model, in the words of SPDX
    organisation: AboutField = None  # the data curator
    contact: AboutField = None
    controller: AboutField = None  # under data protection law
    representative: AboutField = None  # of the controller, or its data protection officer
    sector: AboutField = None
    region: AboutField = None
    licence: AboutField = None
    publication_date: Annotated[str, AfterValidator(lambda day: date.fromisoformat(day).isoformat())] | None = None
    subjects: AboutField = None  # whose data the records are, also where texts or images show other people
    sensitive_data: Literal["yes", "no"] | None = None  # whether it contains sensitive personal information
    confidentiality: Literal["clear", "green", "amber", "red"] | None = None  # of the records, in the words of SPDX
    collection: AboutField = None  # how, for which purposes, with which consent
    legal_basis: AboutField = None
    rights: AboutField = None  # how the people concerned exercise their rights
    security: AboutField = None  # how the data is stored, and who has access
    other_releases: AboutField = None  # of the same data, outside of this ledger
    tuning: AboutField = None  # trials and other choices on private data, outside of this ledger

    @property
    def stated(self) -> tuple[tuple[str, str], ...]:
        """Return the names and texts of the statements, in order of the names."""
        return tuple(sorted(self.model_dump(exclude_none=True).items()))


class Policy(BaseModel):
    """The class table of a corpus: public, declared before training, and the only source of a plan's figures.

    In TOML: `[corpus]`, one `[class.NAME]` per class, `[noise]`, `[about]`.
    """

    model_config = _STRICT
    corpus: CorpusPolicy
    classes: Annotated[Mapping[ClassNameField, ClassPolicy], Field(alias="class", min_length=1)]
    noise: NoisePolicy = NoisePolicy()
    about: AboutPolicy = AboutPolicy()

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a policy.toml."""
        try:
            text = read_text_file(path)
        except (OSError, UnicodeDecodeError) as error:
            problem = f"policy {str(path)!r} cannot be read: {error}"
            remedy = "give a TOML file; start from Policy.template_text()"
            raise PlanError("plan.policy-unreadable", problem, remedy) from None
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, source: str = "policy") -> Policy:
        """Read a policy from TOML text; `source` names it in errors."""
        try:
            data = parse_toml(text)
        except ValueError as error:
            raise PlanError("plan.policy-not-toml", f"{source} is not TOML: {error}", "correct that line") from None
        return cls.from_dict(data, source=source)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "policy") -> Policy:
        """Check a policy given as plain tables."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise explain_validation_error(error, cls, source) from None
        except PlanError as error:
            raise PlanError(error.code, f"{source}: {error.problem}", error.remedy) from None

    def with_noise_kind(self, kind: NoiseKind) -> Policy:
        """Return the policy with the kind of noise that was chosen where it says "auto"."""
        if self.noise.kind != "auto":
            return self
        changes = {"kind": kind.value, "device": "here"}
        return self.model_copy(update={"noise": self.noise.model_copy(update=changes)})

    def with_bands(self, bands: int) -> Policy:
        """Return the policy with noise correlated over this many steps. Refuse a policy that names its own bands."""
        whole(PlanError, "plan.bands-out-of-range", most=MAX_BANDS, bands=bands)
        if self.noise.bands not in (None, bands):
            problem = f"bands is {bands}, and the policy has {self.noise.bands} under [noise]"
            raise PlanError("plan.bands-differ", problem, "leave one of them out")
        correlation = "none" if bands == 1 else "banded"
        changes = {"correlation": correlation, "bands": None if bands == 1 else bands}
        return self.model_copy(update={"noise": self.noise.model_copy(update=changes)})

    @classmethod
    def template(cls) -> Policy:
        """The policy that ships with Lamina: `sensitive` reaches only the top 25 %."""
        return cls.parse(cls.template_text(), source="template.toml")

    @staticmethod
    def template_text() -> str:
        """Its text, to copy and change."""
        return resources.files("lamina.plan").joinpath("template.toml").read_text(encoding="utf-8")

    @model_validator(mode="after")
    def _risks_are_proven(self) -> Self:
        for name, entry in self.classes.items():
            if entry.risk is not None and entry.risk.of == "membership" and self.noise.as_injection.raw:
                problem = f"class.{name}.risk is of membership, but noise.injection is {self.noise.injection}"
                problem += ": its claim is zero-out, which hides content and not membership"
                raise PlanError("plan.risk-not-proven", problem, 'use of = "content", or injection = "per_step"')
        return self

    @model_validator(mode="after")
    def _respects_floors(self) -> Self:
        floors = self.corpus.floors
        for name, entry in self.classes.items():
            if entry.public:
                continue
            where = f"class.{name}"
            if floors.clip_norm is not None and entry.clip_norm < floors.clip_norm:
                problem = f"{where}.clip_norm is {entry.clip_norm:g}, below the floor {floors.clip_norm:g}"
                raise PlanError("plan.clip-norm-below-floor", problem, "raise it, or lower corpus.floors.clip_norm")
            if floors.noise_multiplier is None:
                continue
            z = entry.noise_multiplier
            if z is not None and z < floors.noise_multiplier:
                problem = f"{where}.noise_multiplier is {z:g}, below the floor {floors.noise_multiplier:g}"
                remedy = "raise it, or lower corpus.floors.noise_multiplier"
                raise PlanError("plan.noise-multiplier-below-floor", problem, remedy)
            most = self.epsilon_of(floors.noise_multiplier)
            if entry.epsilon is not None and entry.epsilon > most:
                problem = f"{where}.epsilon is {entry.epsilon:g}, but the noise floor allows {most:.4g} at δ = {self.corpus.delta:g}"
                remedy = "lower it, or lower corpus.floors.noise_multiplier"
                raise PlanError("plan.epsilon-above-floor", problem, remedy)
        return self

    def epsilon_of(self, noise_multiplier: float) -> float:
        """ε of one Gaussian release with multiplier z at the corpus's δ: exact, μ = 1/z."""
        return epsilon_of_noise_multiplier(noise_multiplier, self.corpus.delta)

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


_ERROR_TEXTS = {
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "literal_error": "which is not available; accepted: {expected}",
    "finite_number": "must be finite",
    "string_pattern_mismatch": "must be letters, digits, '_', '-' or '.'",
    **dict.fromkeys(("string_too_short", "too_short"), "must not be empty"),
    "string_too_long": "must have at most {max_length} characters",
    "float_type": "must be a number",
    "int_type": "must be a whole number without quotes or decimal point",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    **dict.fromkeys(("model_type", "dict_type", "mapping_type"), "must be a table"),
}


_DELTA_REMEDY = "give a δ well below 1 / population, such as 1e-5"


def explain_validation_error(error: ValidationError, schema: type[BaseModel], source: str) -> PlanError:
    """All complaints in one PlanError."""
    explained = [_explain_one(dict(item), schema) for item in error.errors(include_url=False)]
    problems, remedies = zip(*explained, strict=True)
    return PlanError("plan.policy-invalid", f"{source}: {'; '.join(problems)}", "; ".join(dict.fromkeys(remedies)))


def _explain_one(item: dict[str, Any], schema: type[BaseModel]) -> tuple[str, str]:
    path = [str(part) for part in item["loc"] if part != "[key]"]
    key = ".".join(path)
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "missing":
        return f"{key} is missing", f"add it under [{'.'.join(path[:-1]) or path[0]}]"
    if kind == "extra_forbidden":
        known = _accepted_keys(schema, path[:-1])
        hint = did_you_mean(path[-1], known)
        return f"{key} is not a known key{hint}", f"accepted here: {', '.join(known)}"
    if kind in _ERROR_TEXTS:
        remedy = _DELTA_REMEDY if key == "corpus.delta" else f"change {key}"
        return f"{key} is {value!r}, {_ERROR_TEXTS[kind].format(**context)}", remedy
    message = str(context["error"]) if "error" in context else str(item["msg"])
    if kind == "value_error" and isinstance(value, dict | BaseModel):
        return f"{key}: {message}", f"correct [{key}]"
    return f"{key} is {value!r}: {message}", f"correct {key}"


def _accepted_keys(schema: type[BaseModel], path: list[str]) -> list[str]:
    """The keys that the schema accepts at `path`; names of classes are free, so they are stepped over."""
    for part in path:
        for name, field in schema.model_fields.items():
            if part in (name, field.alias):
                schema = _model_in(field.annotation) or schema
    return [field.alias or name for name, field in schema.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model named in a field's type, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(inner) for inner in getattr(annotation, "__args__", ()))
    return next((model for model in found if model is not None), None)
