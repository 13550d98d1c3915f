"""`Injection`: where the noise of a step enters, which decides who is credited with it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lamina.errors import PlanError

MOST_PARTS = 1 << 16


class Form(enum.Enum):
    """per step, per microbatch, per sample by shares, or per sample as the document has it."""

    STEP = "per_step"
    MICROBATCH = "per_microbatch"
    SHARES = "per_sample"
    RAW = "per_sample_raw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """
      per_step        N(0, S²) once
      per_microbatch  `parts` fixed bins, each N(0, S²/parts), also when a bin is empty: in sum N(0, S²)
      per_sample      `parts` slots, each N(0, S²/parts), unused ones topped up; contributions beyond carry no share
      per_sample_raw  every private contribution brings N(0, S²) of its own, on what its class reaches; an empty batch
                      brings none. `occurrences` caps how often one takes part (None: in every step)

    The first three have the same law whoever was sampled, so the claim of `StepPlan` holds for them as it stands.

    Raw noise depends on who was sampled, so its size tells who was, and a contribution can rely on its own noise only.
    The claim is another: for replacing a contribution's gradient by 0 and leaving its noise (zero-out), a step in which
    it takes part is one Gaussian mechanism with multiplier sigma_k, and nothing is credited to sampling. N occurrences
    are ρ = N/(2 sigma_k²). Every price of such a plan is that (`StepPlan.stretch`).
    """

    form: Form = Form.STEP
    parts: int = 1
    occurrences: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.form, Form):
            object.__setattr__(self, "form", _form(self.form))
        if (
            isinstance(self.parts, bool)
            or not isinstance(self.parts, int)
            or not 1 <= self.parts <= MOST_PARTS
        ):
            raise PlanError(
                "plan.noise-enters-parts",
                f"noise enters in {self.parts!r} parts, must be 1 to {MOST_PARTS}",
                "correct bins or slots",
            )
        if self.form in (Form.STEP, Form.RAW) and self.parts != 1:
            raise PlanError(
                "plan.noise-parts",
                f"{self.form.value} noise has {self.parts} parts",
                "leave out bins and slots",
            )
        cap = self.occurrences
        if cap is not None and (
            self.form is not Form.RAW or isinstance(cap, bool) or not isinstance(cap, int) or cap < 1
        ):
            raise PlanError(
                "plan.occurrences-under-noise",
                f"occurrences is {cap!r} under {self.form.value} noise",
                "a number >= 1, under per_sample_raw only",
            )

    def events(self, first: int, last: int) -> int:
        """How often one contribution takes part, at most, in the steps first … last-1, as they count toward the cap.

        After t steps it has taken part min(N, t) times at most.
        """
        most = last if self.occurrences is None else self.occurrences
        return min(most, last) - min(most, first)

    def to_plain(self) -> dict[str, str | int | None]:
        """As a codec writes it."""
        return {"form": self.form.value, "parts": self.parts, "occurrences": self.occurrences}

    def __str__(self) -> str:
        if self.form in (Form.MICROBATCH, Form.SHARES):
            return f"{self.form.value} in {self.parts} {'bins' if self.form is Form.MICROBATCH else 'slots'}"
        cap = "" if self.occurrences is None else f", at most {self.occurrences} occurrences"
        return f"{self.form.value}{cap}"

    @property
    def raw(self) -> bool:
        """Whether a contribution is credited with its own noise only."""
        return self.form is Form.RAW


PER_STEP = Injection()


def _form(value: object) -> Form:
    try:
        return Form(value)
    except ValueError:
        accepted = ", ".join(form.value for form in Form)
        raise PlanError(
            "plan.injection-not-known", f"injection is {value!r}, which is not known", f"accepted: {accepted}"
        ) from None
