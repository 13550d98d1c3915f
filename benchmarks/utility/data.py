"""Real data from LAMINA_DATA, and the public stand-ins on which every choice is made before the real data is seen.

task       real, private                      stand-in, public
mnist      MNIST                              scikit-learn's 8 × 8 digits, enlarged, moved and turned at random
ptbxl      PTB-XL slice, median beats         `lamina.signals.ECGSimulator`, median beats
"""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from scipy.signal import find_peaks
from torch import Tensor

from lamina.signals.ecg_simulator import ECGSimulator

Array = NDArray[np.float64]

BEFORE, AFTER = 30, 50  # samples of a beat before and after its R wave, at 100 per second
HALF_MILLIVOLT = 2.0  # 1 / (0.5 mV): a public constant, never a statistic of the patients
LARGEST = 8.0  # in that unit; what is larger is cut off
TEST_FOLDS = (7, 8)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Examples `x` with labels `y`; `unit[n]` numbers the contribution (0 … units-1) of example n."""

    x: Tensor
    y: Tensor
    unit: Tensor

    @property
    def units(self) -> int:
        return int(self.unit.max()) + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Contributions to train on and to test on; no contribution is in both."""

    train: Part
    test: Part


def _part(x: Array, y: Array, unit: NDArray[np.int64] | None = None) -> Part:
    """One contribution per row unless `unit` names them, by any integers."""
    owner = np.arange(len(x)) if unit is None else np.unique(unit, return_inverse=True)[1]
    return Part(x=torch.tensor(x, dtype=torch.float32), y=torch.tensor(y), unit=torch.tensor(owner, dtype=torch.long))


def _folder() -> Path:
    try:
        return Path(os.environ["LAMINA_DATA"])
    except KeyError:
        raise SystemExit("LAMINA_DATA is not set: name the folder that holds mnist/ and ptbxl_slice/") from None


# ------------------------------------------------------------------------------------------------------- digits


@cache
def mnist() -> Split:
    """MNIST as it comes: 60,000 and 10,000 images, grey values in [0, 1]."""

    def part(name: str) -> Part:
        folder = _folder() / "mnist"
        pixels = np.frombuffer(gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes()), np.uint8)
        labels = np.frombuffer((folder / f"{name}-labels-idx1-ubyte").read_bytes(), np.uint8)
        return _part(pixels[16:].reshape(-1, 784) / 255.0, labels[8:].astype(np.int64))

    return Split(train=part("train"), test=part("t10k"))


@cache
def digits(train: int = 60_000, test: int = 5_000) -> Split:
    """As many images as MNIST has, from scikit-learn's 1,797 digits of 8 × 8, each used many times over.

    Every image is enlarged to 20 × 20 in a field of 28 × 28, turned by up to 12°, scaled and sheared by up to 15 % and
    moved by up to 2 pixels, then thinned by a threshold. Those of every fifth original are test images.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    held_out = np.arange(len(found.images)) % 5 == 0
    generator = np.random.default_rng(0)

    def part(images: Array, labels: NDArray[np.int64], count: int) -> Part:
        index = generator.integers(len(images), size=count)
        return _part(np.stack([_moved(images[i], generator) for i in index]), labels[index].astype(np.int64))

    images = np.stack([np.pad(ndimage.zoom(image / 16.0, 2.5, order=1), 4) for image in found.images])
    return Split(
        train=part(images[~held_out], found.target[~held_out], train),
        test=part(images[held_out], found.target[held_out], test),
    )


def _moved(image: Array, generator: np.random.Generator) -> Array:
    turn, shear = generator.uniform(-0.2, 0.2), generator.uniform(-0.15, 0.15)
    across, down = generator.uniform(0.85, 1.15, size=2)
    matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ np.array(
        [[down, shear], [0.0, across]]
    )
    centre = np.full(2, 13.5)
    offset = centre - matrix @ (centre + generator.uniform(-2.0, 2.0, size=2))
    moved = ndimage.affine_transform(image, matrix, offset=offset, order=1)
    flat: Array = np.clip(2.0 * (moved - 0.4), 0.0, 1.0).ravel()
    return flat


# -------------------------------------------------------------------------------------------------------- beats


@cache
def ptbxl() -> Split:
    """Median beats (480 numbers: 12 leads, 50 per second) of the labelled records; y = 1 where NORM is not among the
    record's superclasses. A contribution is a patient, with its first record; folds 7 and 8 are for testing.

    The slice is in the form of a printed page: three leads at a time, 2.5 seconds of each. R waves come from lead II,
    which is there for all ten seconds.
    """
    with np.load(_folder() / "ptbxl_slice" / "ptbxl_slice.npz", allow_pickle=False) as arrays:
        pages, rhythm = arrays["x12_uV"] / 1e3, arrays["leadII_uV"] / 1e3
        kinds, fold, patient = arrays["superclass"], arrays["strat_fold"], arrays["patient_id"]
    labelled = (kinds >= 0).all(1) & (fold > 0)
    beats = np.stack([_median_beat(page, strip) for page, strip in zip(pages, rhythm, strict=True)])
    y = 1.0 - kinds[:, 0].astype(np.float64)
    test = labelled & np.isin(fold, TEST_FOLDS)
    shared = np.isin(patient, np.unique(patient[test]))  # nobody trains whose beats are tested
    first = np.zeros(len(patient), dtype=bool)
    first[np.unique(np.where(labelled, patient, -1), return_index=True)[1]] = True
    train = labelled & first & ~shared
    return Split(
        train=_part(_scaled(beats[train]), y[train], patient[train]),
        test=_part(_scaled(beats[test]), y[test], patient[test]),
    )


def _median_beat(page: Array, strip: Array) -> Array:
    """(12, 250) and (1000,) -> (12, 80): over the beats that begin in the 2.5 seconds of a lead, sample by sample."""
    energy = ndimage.uniform_filter1d(np.gradient(strip) ** 2, 8)
    peaks, _ = find_peaks(energy, height=0.3 * np.quantile(energy, 0.99), distance=30)
    level = strip - np.median(strip)
    peaks = np.array([max(0, p - 6) + int(np.abs(level[max(0, p - 6) : p + 7]).argmax()) for p in peaks])
    beat = np.zeros((12, BEFORE + AFTER))
    for group in range(4):
        leads = page[3 * group : 3 * group + 3]
        leads = np.pad(
            leads - np.median(leads, axis=1, keepdims=True), ((0, 0), (BEFORE, AFTER)), constant_values=np.nan
        )
        inside = [p - 250 * group for p in peaks if 0 <= p - 250 * group < 250]
        if inside:
            windows = np.stack([leads[:, p : p + BEFORE + AFTER] for p in inside])
            seen = ~np.isnan(windows).all(0)
            beat[3 * group : 3 * group + 3][seen] = np.nanmedian(windows[:, seen], axis=0)
    return beat


def simulated(cache_folder: Path, *, train: int = 1_100, test: int = 500) -> Split:
    """Simulated patients, half of them normal, three beats of each, of which the median is taken."""
    path = cache_folder / f"simulated-{train}-{test}.npz"
    if not path.exists():
        cache_folder.mkdir(parents=True, exist_ok=True)
        mix = {"NORM": 4.0, "MI": 1.0, "STTC": 1.0, "CD": 1.0, "HYP": 1.0}
        drawn = ECGSimulator(mix=mix).draw(patients=train + test, seed=7)
        beats = np.median(drawn.x.reshape(train + test, 3, 12, 96), axis=1)
        np.savez_compressed(path, beats=beats, label=drawn.label[::3])
    with np.load(path, allow_pickle=False) as arrays:
        beats, y = arrays["beats"][:, :, 8:88], (arrays["label"] > 0).astype(np.float64)
    beats = beats - np.median(beats, axis=2, keepdims=True)
    return Split(train=_part(_scaled(beats[:train]), y[:train]), test=_part(_scaled(beats[train:]), y[train:]))


def _scaled(beats: Array) -> Array:
    """(N, 12, 80) in millivolt -> (N, 480): every second sample, as the mean of two, in units of half a millivolt."""
    pairs = beats.reshape(len(beats), 12, -1, 2).mean(3)
    flat: Array = np.clip(HALF_MILLIVOLT * pairs, -LARGEST, LARGEST).reshape(len(beats), -1)
    return flat
