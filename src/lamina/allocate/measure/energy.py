"""`EnergyEstimate`: the energy of a gradient sum, read from its noised release at no extra privacy cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina import validate
from lamina.errors import PlanError

Array = NDArray[np.float64]
_DAMAGED = "the state is damaged: start again with EnergyEstimate.start(layers)"
_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyEstimate:
    """E_l ≈ ‖Σ_i g_il‖² per layer, from releases Y_l = Σ_i g_il + N(0, S_l² I) and nothing else.

    ‖Y_l‖² − d_l S_l² has the mean ‖Σ g_il‖², and variance 2 d_l S_l⁴ where there is no signal. With decay a,

        energy_l ← a·energy_l + (1−a)·(‖Y_l‖² − d_l S_l²)
        sd_l²    ← a²·sd_l²  + (1−a)²·2 d_l S_l⁴                 S_l may be another one at every step
        mass_l   ← a·mass_l  + (1−a)

    so E_l = (energy_l/mass_l)₊ is a weighted mean of all that was seen, and sd_l/mass_l is its standard deviation
    under noise alone. For constant S it tends to √(2d)·S²·√((1−a)/(1+a)) (docs/theory.md, "Choosing C and S").

    Y is already private, so whatever follows from it is post-processing. A squared norm that is not finite, or
    negative, or so large that its average overflows is ignored for that layer: all three numbers stay as they
    were. Observing returns a new estimate; this one does not change.
    """

    decay: float
    energy: tuple[float, ...]
    sd: tuple[float, ...]
    mass: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("energy", "sd", "mass"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        validate.number(PlanError, "sensitivity.decay-range", least=0, below=1, decay=self.decay)
        layers = len(self.energy)
        if not layers or len(self.sd) != layers or len(self.mass) != layers:
            problem = f"energy, sd, mass have {layers}, {len(self.sd)}, {len(self.mass)} entries"
            raise PlanError("sensitivity.energy-state-shape", problem, "give one per layer")
        for i, (e, sd, mass) in enumerate(zip(self.energy, self.sd, self.mass, strict=True)):
            if not (math.isfinite(e) and 0 <= sd < math.inf and 0 <= mass <= 1 + 1e-9):
                problem = f"layer {i} has energy {e!r}, sd {sd!r}, mass {mass!r}"
                raise PlanError("sensitivity.energy-state-damaged", problem, _DAMAGED)

    @classmethod
    def start(cls, layers: int, decay: float = 0.9) -> EnergyEstimate:
        """Nothing seen yet."""
        zeros = (0.0,) * layers
        return cls(decay=float(decay), energy=zeros, sd=zeros, mass=zeros)

    def __len__(self) -> int:
        return len(self.energy)

    def observed(
        self, squares: Sequence[float] | Array, *, noise: Sequence[float] | Array, sizes: Sequence[int]
    ) -> EnergyEstimate:
        """After one more release: ‖Y_l‖² of the noised *sum* (not divided by B), its S_l and d_l."""
        y = self._row("squares", squares)
        s, d = self._row("noise", noise, 0.0), self._row("sizes", sizes, 1.0)
        a, keep = self.decay, 1.0 - self.decay
        with np.errstate(all="ignore"):  # what overflows is ignored below
            unit = s * s
            energy = a * np.array(self.energy) + keep * (y - d * unit)
            sd = np.hypot(a * np.array(self.sd), keep * np.sqrt(2.0 * d) * unit)  # no S⁴, which would overflow
            mass = a * np.array(self.mass) + keep
            usable = np.isfinite(y) & (y >= 0) & np.isfinite(energy) & np.isfinite(sd)
        return EnergyEstimate(
            decay=a,
            energy=tuple(np.where(usable, energy, self.energy).tolist()),
            sd=tuple(np.where(usable, sd, self.sd).tolist()),
            mass=tuple(np.where(usable, mass, self.mass).tolist()),
        )

    def energies(self) -> Array:
        """E_l, free of the start-up bias, never negative; 0 where nothing was seen."""
        return np.maximum(self._corrected(self.energy), 0.0)

    def deviations(self) -> Array:
        """The standard deviation of E_l if there is no signal; infinite where nothing was seen."""
        seen = np.array(self.mass) > 0
        return np.where(seen, self._corrected(self.sd), np.inf)

    def signal_to_noise(self) -> Array:
        """E_l over its standard deviation; infinite for a layer without noise that carries something."""
        energy, sd = self.energies(), self.deviations()
        with np.errstate(all="ignore"):
            return np.where(energy > 0, energy / sd, 0.0)

    def shares(
        self, proxy: Sequence[float] | Array, sizes: Sequence[int], least: float = 0.1
    ) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        """Shares w of the budget (Σw = 1, w_l ≥ least/L), and which layers were measured rather than assumed.

        Where E_l < its standard deviation the layer keeps its proxy share. The measured layers divide what is
        left: w_l = λ_l·target_l + (1−λ_l)·proxy_l, λ_l = E_l/(E_l + sd_l), target_l ∝ √(E_l d_l), the optimum
        for layers whose norm is √E_l (docs/theory.md). Shares below least/L are raised to it, at the expense of
        the others in proportion.
        """
        base, d = self._row("proxy", proxy, 0.0, 1 + 1e-9), self._row("sizes", sizes, 1.0)
        if not abs(base.sum() - 1.0) <= 1e-9:
            problem = f"proxy shares sum to {base.sum()!r}, must be 1"
            raise PlanError("sensitivity.shares-sum", problem, "divide them by their sum")
        base = np.asarray(base / base.sum())
        validate.number(PlanError, "sensitivity.least-range", above=0, most=1, least_share=least)
        energy, sd = self.energies(), self.deviations()
        measured = (energy > 0) & (energy >= sd)
        w = base.copy()
        if measured.any():
            e, left = energy[measured], base[measured].sum()
            target = np.sqrt(e / e.max()) * np.sqrt(d[measured])
            mix = 1.0 / (1.0 + sd[measured] / e)
            mixed = mix * left * target / target.sum() + (1.0 - mix) * base[measured]
            if (total := mixed.sum()) > 0:
                w[measured] = mixed * (left / total)
        return tuple(raise_shares_to_floor(w, least / len(self)).tolist()), tuple(bool(m) for m in measured)

    def to_state(self) -> dict[str, Any]:
        """Plain floats; JSON or CBOR carry them exactly."""
        return {
            "decay": self.decay, "energy": list(self.energy), "sd": list(self.sd), "mass": list(self.mass)
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EnergyEstimate:
        """The estimate that `to_state` described, bit for bit."""
        known = ["decay", "energy", "mass", "sd"]
        if not isinstance(state, Mapping) or sorted(state) != known:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            problem = f"the state of an energy estimate has {found}"
            raise PlanError("sensitivity.energy-state-keys", problem, f"it must have {known}")
        try:
            return cls(
                decay=float(state["decay"]), energy=tuple(state["energy"]),
                sd=tuple(state["sd"]), mass=tuple(state["mass"]),
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            problem = f"the energy state holds no numbers: {error}"
            raise PlanError("sensitivity.energy-state-damaged", problem, _DAMAGED) from None

    def _corrected(self, values: Sequence[float]) -> Array:
        """values/mass, 0 where nothing was seen; at most the largest number."""
        mass = np.array(self.mass)
        with np.errstate(all="ignore"):
            return np.clip(np.where(mass > 0, np.array(values) / mass, 0.0), -_LARGEST, _LARGEST)

    def _row(
        self, what: str, values: Sequence[float] | Array, least: float | None = None, most: float = _LARGEST
    ) -> Array:
        """One value per layer; none below `least` or above `most`, if there is a limit."""
        row = np.asarray(values, dtype=np.float64)
        if row.shape != (len(self),):
            problem, remedy = f"{what} has shape {row.shape}", f"give one for each of {len(self)} layers"
            raise PlanError("sensitivity.energy-length", problem, remedy)
        if least is not None and not ((row >= least) & (row <= most)).all():
            problem = f"{what} of the layers is {row.tolist()}, must be in [{least:g}, {most:g}]"
            raise PlanError("sensitivity.energy-range", problem, "take S and sizes from the plan, shares from [0, 1]")
        return row


def raise_shares_to_floor(w: Array, floor: float) -> Array:
    """The shares with every one at least `floor`: those below are raised, the others shrink in proportion.

    Shrinking can push another share below, so it is repeated; each round fixes one more, or ends.
    """
    low = np.zeros(len(w), dtype=bool)
    while True:
        rest, weight = 1.0 - floor * low.sum(), w[~low].sum()
        if low.all() or not weight > 0:  # nothing to take from: equal shares are all that is left
            return np.full(len(w), 1.0 / len(w))
        scaled = np.where(low, floor, w * (rest / weight))
        below = ~low & (scaled < floor)
        if not below.any():
            return np.asarray(np.maximum(scaled, floor))
        low |= below
