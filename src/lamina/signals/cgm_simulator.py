"""Simulated glucose of people with type 1 diabetes as a continuous monitor shows it, from one seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.errors import LaminaError
from lamina.signals.ecg_simulator import BLOCK, Recordings, in_blocks

# Glucose and the action of insulin follow Bergman's minimal model (Bergman, Ider, Bowden and Cobelli, "Quantitative
# estimation of insulin sensitivity", Am. J. Physiol. 236, 1979),
#
#     dG/dt = -(p1 + X) G + p1 Gb + Ra/V,      dX/dt = -p2 X + p2 SI I,
#
# I the insulin in plasma above its basal level. Meals and injections pass through two compartments each, with the times
# to their peak and the volumes of Hovorka et al. ("Nonlinear model predictive control of glucose concentration in
# subjects with type 1 diabetes", Physiol. Meas. 25, 2004). Gb rises before breakfast (the dawn phenomenon: Monnier et al.,
# Diabetes Care 36, 2013). People eat three meals and perhaps a snack, misjudge carbohydrates (Brazeau et
# al., Diabetes Res. Clin. Pract. 99, 2013), forget a bolus now and then, correct high glucose and treat low glucose. The
# sensor's error is a first-order process (Facchinetti et al., IEEE Trans. Biomed. Eng. 61, 2014). Spreads, and how people
# behave, are ours: set by hand in three rounds with summary statistics of the Weinstock 2016 days in view (mean, variation, time
# in range), so the simulator is not independent of that data set: whoever trains privately on it says so beside ε.
# `benchmarks/signals.py` prints both. No dose may rest on them.

CONTROL = ("usual", "prone to hypoglycaemia")
STEP = 5  # minutes between readings
LOWEST, HIGHEST = 40.0, 400.0  # mg/dL, what a sensor shows
DRIFT = 0.65  # of what the liver gives and exercise, stress and basal insulin take, within a few hours
MISJUDGED, FORGOTTEN = 0.4, 0.1  # standard deviation of the logarithm of a bolus; share of meals without one
MEAL_HOURS, MEAL_SPREAD = (7.5, 12.7, 18.8), (0.6, 0.7, 0.9)
MEAL_GRAMS, SNACK_GRAMS = (45.0, 65.0, 70.0), 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CGMSimulator:
    """Settings of the simulator; `draw` makes days of 288 readings, from midnight to midnight.

    days    of each patient, one after the other
    prone   share of patients who take too much insulin; labels are indices into `CONTROL`
    sensor  standard deviation of the sensor's error, mg/dL

    Patient i of a seed is a function of (settings, seed, i) alone: a larger draw begins with the smaller one.
    """

    days: int = 3
    prone: float = 0.5
    sensor: float = 6.0

    def __post_init__(self) -> None:
        if not (1 <= self.days <= 366 and 0 <= self.prone <= 1 and self.sensor >= 0):
            problem = f"days={self.days}, prone={self.prone}, sensor={self.sensor}"
            raise LaminaError("data.cgm-settings", problem, "use 1 <= days <= 366, 0 <= prone <= 1 and sensor >= 0")

    def draw(self, *, patients: int, seed: int) -> Recordings:
        """(patients · days, 1, 288) in mg/dL; the days of one patient are neighbours and follow one another."""
        drawn = [(wanted, *self._block(generator)) for wanted, generator in in_blocks(patients, seed)]
        x = np.concatenate([glucose[:wanted] for wanted, _, glucose in drawn])
        label = np.concatenate([kinds[:wanted] for wanted, kinds, _ in drawn])
        number = np.repeat(np.arange(patients), self.days)
        return Recordings(x.reshape(-1, 1, 1440 // STEP), label[number], number)

    def _block(self, generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        n, minutes = BLOCK, 1440 * self.days

        def spread(middle: float, size: float) -> NDArray[np.float64]:
            return middle * np.exp(generator.normal(0.0, size, n))

        label = (generator.random(n) < self.prone).astype(np.int64)
        weight, sensitivity = spread(75.0, 0.15), spread(4.5e-4, 0.3)  # kg; SI, L/mU/min
        p1, p2 = spread(0.007, 0.2), spread(0.025, 0.15)
        basal = np.where(label, spread(142.0, 0.27), spread(164.0, 0.27))
        gut_time, skin_time = spread(42.0, 0.15), spread(55.0, 0.15)  # minutes to the peak
        volume, clearance = 1.6 * weight, 0.138 * 0.12 * weight  # dL; L/min
        drop = sensitivity * 140.0 * 1000.0 / clearance  # mg/dL per unit of insulin
        ratio = 0.8 * 0.8 * 1000.0 / volume / drop  # units per gram of carbohydrate
        grams, taken = self._meals(generator, label, minutes)
        dawn_size, dawn_hour = spread(0.10, 0.5), generator.normal(6.5, 0.7, n)
        glucose, action, plasma = basal * np.exp(generator.normal(0.0, 0.15, n)), np.zeros(n), np.zeros(n)
        gut, skin, wait, drift = np.zeros((2, n)), np.zeros((2, n)), np.zeros(n), np.zeros(n)
        shown = np.empty((n, minutes // STEP))
        for minute in range(minutes):
            if minute % STEP == 0:
                shown[:, minute // STEP] = glucose
                wait -= STEP
                drift = 0.985 * drift + generator.normal(0.0, DRIFT * np.sqrt(1 - 0.985**2), n)
                low, high = (glucose < 60.0) & (wait <= 0), (glucose > 230.0) & (wait <= 0)
                gut[0] += 15_000.0 * low  # 15 g of fast carbohydrate, wait 20 minutes
                skin[0] += 1000.0 * 0.6 * np.where(high, (glucose - 150.0) / drop, 0.0)
                wait = np.where(low, 20.0, np.where(high, 150.0, wait))
            gut[0] += 800.0 * grams[:, minute]  # mg of which 80 % are absorbed
            skin[0] += 1000.0 * ratio * taken[:, minute]  # mU
            hour = minute / 60.0 % 24.0
            level = basal * (1.0 + drift + dawn_size * np.exp(-0.5 * ((hour - dawn_hour) / 1.8) ** 2))
            out = gut[1] / gut_time
            gut += np.stack([-gut[0], gut[0] - gut[1]]) / gut_time
            enters = skin[1] / skin_time
            skin += np.stack([-skin[0], skin[0] - skin[1]]) / skin_time
            plasma += enters / (0.12 * weight) - 0.138 * plasma
            action += p2 * (sensitivity * plasma - action)
            glucose = np.maximum(glucose + p1 * (level - glucose) - action * glucose + out / volume, 30.0)
        error = np.zeros(n)
        for k in range(shown.shape[1]):
            error = 0.85 * error + generator.normal(0.0, self.sensor * np.sqrt(1 - 0.85**2), n)
            shown[:, k] += error
        return label, np.clip(np.rint(shown), LOWEST, HIGHEST).astype(np.float32)

    def _meals(
        self, generator: np.random.Generator, label: NDArray[np.int64], minutes: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(N, minutes) twice: grams eaten, and grams that are injected for."""
        n = len(label)
        eaten, believed = np.zeros((n, minutes)), np.zeros((n, minutes))
        appetite, bias = np.exp(generator.normal(0.0, 0.2, n)), np.where(label, 1.2, 0.95)
        rows = np.arange(n)
        for day in range(minutes // 1440):
            hours = [*generator.normal(MEAL_HOURS, MEAL_SPREAD, (n, 3)).T, generator.uniform(14.0, 22.5, n)]
            for hour, usual in zip(hours, (*MEAL_GRAMS, SNACK_GRAMS), strict=True):
                grams = usual * appetite * np.exp(generator.normal(0.0, 0.3, n))
                grams *= generator.random(n) < (0.5 if usual == SNACK_GRAMS else 0.95)
                at = 1440 * day + np.clip(60 * hour, 0, 1438).astype(np.int64)
                eaten[rows, at] += grams
                guess = grams * bias * np.exp(generator.normal(0.0, MISJUDGED, n)) * (generator.random(n) > FORGOTTEN)
                believed[rows, np.maximum(at - generator.integers(0, 16, n), 0)] += guess
        return eaten, believed
