"""Fixed front ends: features of one record by itself, which cost no privacy, for a small model to learn on.

Each function maps one record to one row by public constants and by what is in that record. Nothing is read from other
private records: means, scales and directions come from public or simulated data (`Directions`), or from nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from scipy.signal import find_peaks
from torch import Tensor, nn

from lamina import validate
from lamina.errors import LaminaError

Array = NDArray[np.float64]

BEFORE_R, AFTER_R = 0.30, 0.50  # seconds of a beat
MILLIVOLT = 2.0  # 1 / (0.5 mV): the unit of a feature; a public constant, never a statistic of the patients


def r_waves(strip: Array, *, rate: float) -> NDArray[np.int64]:
    """Where the R waves of one lead are: peaks of the slope's energy, moved to the largest deflection within 60 ms."""
    strip = np.asarray(strip, dtype=np.float64)
    if strip.ndim != 1 or len(strip) < rate or not np.isfinite(strip).all():
        problem = f"a strip of shape {strip.shape} at {rate:g} samples per second, or with values that are not finite"
        raise LaminaError("data.strip-not-valid", problem, "give one lead of a second or more, gaps filled")
    energy = ndimage.uniform_filter1d(np.gradient(strip) ** 2, max(1, round(0.08 * rate)))
    found, _ = find_peaks(energy, height=0.3 * np.quantile(energy, 0.99), distance=max(1, round(0.3 * rate)))
    level, near = np.abs(strip - np.median(strip)), round(0.06 * rate)
    moved = [max(0, p - near) + int(level[max(0, p - near) : p + near + 1].argmax()) for p in found]
    return np.unique(np.array(moved, dtype=np.int64))


def median_beat(leads: Array, peaks: NDArray[np.int64], *, rate: float, starts: Sequence[int] | None = None) -> Array:
    """(L, samples) of one record -> (L, beat): the median over its beats, sample by sample, R at 0.3 s; 0 where none is.

    starts  the sample of the strip that `peaks` count in at which each lead begins, where leads were not recorded
            at one time, as on a printed page; default: all at 0

    The isoelectric line of a lead is the median of its own samples.
    """
    leads = np.asarray(leads, dtype=np.float64)
    begins = [0] * len(leads) if starts is None else list(starts)
    before, after = round(BEFORE_R * rate), round(AFTER_R * rate)
    level = leads - np.median(leads, axis=1, keepdims=True)
    padded = np.pad(level, ((0, 0), (before, after)), constant_values=np.nan)
    beat = np.zeros((len(leads), before + after))
    for row, begin in enumerate(begins):
        inside = [int(p) - begin for p in peaks if 0 <= p - begin < leads.shape[1]]
        if inside:
            windows = np.stack([padded[row, p : p + before + after] for p in inside])
            seen = ~np.isnan(windows).all(0)
            beat[row, seen] = np.nanmedian(windows[:, seen], axis=0)
    return beat


def lead_features(beats: Array, *, rate: float) -> Array:
    """(N, L, beat) in millivolt -> (N, 7·L): per lead the largest and least value of QRS, its area and that of its
    absolute value, the ST level 80 to 120 ms after R, the T wave's extreme and its area.
    """
    r = round(BEFORE_R * rate)

    def part(first: float, last: float) -> Array:
        piece: Array = beats[..., r + round(first * rate) : r + round(last * rate)]
        return piece

    qrs, st, t = part(-0.06, 0.08), part(0.08, 0.12), part(0.14, AFTER_R)
    extreme = np.where(t.max(-1) > -t.min(-1), t.max(-1), t.min(-1))
    rows = [qrs.max(-1), qrs.min(-1), 7.0 * qrs.mean(-1), 7.0 * np.abs(qrs).mean(-1), 3.0 * st.mean(-1)]
    return np.concatenate([*rows, extreme, 3.0 * t.mean(-1)], axis=-1)


def rhythm_features(peaks: Sequence[NDArray[np.int64]], *, rate: float) -> Array:
    """(N, 3): seconds between beats, less 0.8; how much they vary, as root mean square of successive differences;
    and the share of intervals that are a fifth off their median. 0 where there are fewer than three beats.
    """
    found = np.zeros((len(peaks), 3))
    for row, of_record in enumerate(peaks):
        if len(of_record) >= 3:
            gaps = np.diff(of_record) / rate
            middle = float(np.median(gaps))
            odd = np.abs(gaps - middle) > 0.2 * middle
            found[row] = middle - 0.8, math.sqrt(float(np.mean(np.diff(gaps) ** 2))), float(odd.mean())
    return found


def bounded(x: Array, *, unit: float = MILLIVOLT) -> Array:
    """tanh(unit·x): in (-1, 1), so that no artefact outweighs a record's other features."""
    return np.tanh(unit * np.asarray(x, dtype=np.float64))


def unit_norm(x: Array) -> Array:
    """Every row over its own L2 norm; a row of zeros stays."""
    size = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.where(size > 0, size, 1.0))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Directions:
    """Mean and principal directions of public or simulated features: x -> (x - mean)·axes/scale.

    mean (d,), axes (d, k), scale (k,): the deviation along each axis to the power of `whiten` (0: axes only turn the
    features, 1: all get deviation 1). `proxy` says what they were learned from. A number read from private records would be
    a release that somebody has to pay for: such data are refused by what they are called.
    """

    proxy: str
    mean: Array
    axes: Array
    scale: Array

    @classmethod
    def of(cls, x: Array, *, proxy: str, count: int, whiten: float = 0.0) -> Directions:
        """The `count` directions of most variance."""
        if proxy.partition(":")[0].strip() not in ("public", "simulated"):
            problem = f"the directions are to be those of data called {proxy!r}"
            remedy = "give public or simulated data and say so, as in proxy='simulated: ECG'; private ones cost ε, and none is paid here"
            raise LaminaError("data.directions-not-public", problem, remedy)
        x = np.asarray(x, dtype=np.float64)
        validate.whole(LaminaError, "data.directions-count", most=min(x.shape), count=count)
        mean = x.mean(0)
        _, size, axes = np.linalg.svd(x - mean, full_matrices=False)
        deviation = np.maximum(size[:count] / math.sqrt(len(x)), 1e-6 * size[0] / math.sqrt(len(x)))
        return cls(proxy=proxy, mean=mean, axes=axes[:count].T.copy(), scale=deviation**whiten)

    def __call__(self, x: Array) -> Array:
        return np.asarray((np.asarray(x, dtype=np.float64) - self.mean) @ self.axes / self.scale)


class Scattering2D(nn.Module):
    """Scattering transform of images: (N, C, H, W) -> (N, C·channels, ⌈H/2^scales⌉, ⌈W/2^scales⌉). It has no learned parameters.

        S0 = x∗φ,   S1[λ] = |x∗ψ_λ|∗φ,   S2[λ, μ] = ||x∗ψ_λ|∗ψ_μ|∗φ,  μ coarser than λ

    with Morlet wavelets ψ of `scales` octaves and `angles` directions, φ a Gaussian of the coarsest scale, in periodic
    Fourier form on a reflected border: 1 + J·A + A²·J(J-1)/2 channels, 81 for J = 2 and A = 8 (Bruna and Mallat,
    "Invariant scattering convolution networks", IEEE TPAMI 35, 2013). Every plane of every image by itself; sides that are
    no multiples of 2^scales get a wider border.
    """

    psi: Tensor

    def __init__(self, shape: tuple[int, int] = (28, 28), *, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        self.shape, self.scales, self.angles, cell = shape, scales, angles, 2**scales
        if min(shape) < 2 * cell:
            problem = f"images of {shape[0]} x {shape[1]}, must have sides of {2 * cell} or more"
            raise LaminaError("data.scattering-shape", problem, "enlarge the images, or use fewer scales")
        wider = [-side % cell for side in shape]
        self.border = [cell + part for more in reversed(wider) for part in (more // 2, more - more // 2)]
        full = (shape[0] + wider[0] + 2 * cell, shape[1] + wider[1] + 2 * cell)
        waves = [
            [
                _morlet(full, 0.8 * 2**j, 3.0 / 4.0 * math.pi / 2**j, math.pi * a / angles, 4.0 / angles)
                for a in range(angles)
            ]
            for j in range(scales)
        ]
        self.register_buffer("psi", torch.stack([torch.stack(row) for row in waves]), persistent=False)
        for j in range(scales):
            for name, side in zip(("rows", "columns"), full, strict=True):
                self.register_buffer(f"{name}{j}", _smoothing(side, scales, 2**j), persistent=False)

    @property
    def channels(self) -> int:
        """Return the number of channels of one plane."""
        return 1 + self.scales * self.angles + self.angles**2 * self.scales * (self.scales - 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Return the coefficients, those of the first plane first."""
        if x.shape[-2:] != self.shape or x.dim() != 4:
            problem = f"images of shape {tuple(x.shape)}, not (N, C, {self.shape[0]}, {self.shape[1]})"
            raise LaminaError("data.scattering-shape", problem, "reshape them, or make the transform for their shape")
        padded = nn.functional.pad(x, self.border, mode="reflect").flatten(0, 1)  # (N·C, H, W)
        spectrum = torch.fft.fft2(padded)
        found = [self._smooth(padded, 0).unsqueeze(1)]
        for j in range(self.scales):
            first = _moduli(spectrum, self.psi[j], 2**j)  # (N·C, A, h, w)
            found.append(self._smooth(first, j))
            inner = torch.fft.fft2(first.flatten(0, 1)) if j + 1 < self.scales else first
            for k in range(j + 1, self.scales):
                second = _moduli(inner, _decimated(self.psi[k], 2**j), 2 ** (k - j))
                found.append(self._smooth(second, k).unflatten(0, first.shape[:2]).flatten(1, 2))  # (N·C, A², …)
        planes = torch.cat(found, dim=1)
        return planes.view(len(x), -1, *planes.shape[-2:])

    def mirrored(self, found: Tensor) -> Tensor:
        """Return the coefficients of the mirror image from those of the image, up to a shift by one pixel."""
        turned = -torch.arange(self.angles) % self.angles
        both = (self.angles * turned[:, None] + turned).flatten()
        parts = [torch.zeros(1, dtype=torch.long)]
        for j in range(self.scales):
            for part in (turned, *[both] * (self.scales - 1 - j)):
                parts.append(sum(map(len, parts)) + part)
        planes: Tensor = found.unflatten(1, (-1, self.channels))
        return planes[:, :, torch.cat(parts)].flatten(1, 2).flip(-1)

    def _smooth(self, x: Tensor, j: int) -> Tensor:
        """Return x∗φ without the border, one sample in 2^scales; samples of x are 2^j samples of the image apart."""
        found: Tensor = self.get_buffer(f"rows{j}") @ x @ self.get_buffer(f"columns{j}").mT
        return found


class ImageCNN(nn.Module):
    """(N, 1, 28, 28) -> logits: three convolutions with GroupNorm and a linear layer; small, to be learned on public images.

    `codes` gives the 576 numbers before the linear layer: features for a linear model of private images (docs/utility.md).
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for into, out, size, stride in ((1, 16, 5, 2), (16, 32, 3, 2), (32, 64, 3, 1)):
            conv = nn.Conv2d(into, out, size, stride=stride, padding=size // 2)
            parts += [conv, nn.GroupNorm(out // 4, out), nn.ReLU()]
        self.body = nn.Sequential(*parts, nn.AvgPool2d(3, 2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(576, 128), nn.Tanh(), nn.Dropout(0.2), nn.Linear(128, classes))

    def codes(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.codes(x))
        return logits


def distorted(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """(N, 1, H, W) in [0, 1] -> the same number, each turned, sheared, scaled, moved, bent and drawn with another pen.

    Every image by itself and at random: to learn from few public images, or for views of private ones:
    `Trainer(augment=lambda x: distorted(x[None])[0], views=4)`.
    """
    n = len(images)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *shape, generator=generator)

    turn, zero = between(-0.26, 0.26), torch.zeros(n)
    rotation = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], 1).view(n, 2, 2)
    shape = torch.stack([between(0.8, 1.25), between(-0.3, 0.3), zero, between(0.85, 1.2)], 1).view(n, 2, 2)
    grid = nn.functional.affine_grid(
        torch.cat([rotation @ shape, between(-0.15, 0.15, 2, 1)], 2), list(images.shape), align_corners=False
    )
    bend = 0.07 * torch.randn(n, 2, 5, 5, generator=generator)
    bend = nn.functional.interpolate(bend, images.shape[-2:], mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
    moved = nn.functional.grid_sample(images, grid + bend, align_corners=False)
    level, contrast = between(0.25, 0.6, 1, 1, 1), between(2.0, 6.0, 1, 1, 1)
    return ((moved - level) * contrast + 0.3).clamp(0.0, 1.0)


def _decimated(spectrum: Tensor, by: int) -> Tensor:
    """The spectrum of one sample in `by` along both axes: the mean over its aliases."""
    if by == 1:
        return spectrum
    rows, columns = spectrum.shape[-2] // by, spectrum.shape[-1] // by
    aliases: Tensor = spectrum.unflatten(-2, (by, rows)).unflatten(-1, (by, columns))
    return aliases.mean((-4, -2))


def _moduli(spectrum: Tensor, psi: Tensor, by: int) -> Tensor:
    """Return |x∗ψ| for every x (M, h, w) and ψ (A, h, w), given as spectra, with one sample in `by`."""
    (m, h, w), a = spectrum.shape, len(psi)
    # the spectrum of one sample in `by` is the mean over its by² aliases: one small matrix product per frequency
    alias = (by, h // by, by, w // by)
    left = spectrum.reshape(m, *alias).permute(2, 4, 0, 1, 3).reshape(-1, m, by * by)
    right = psi.reshape(a, *alias).permute(2, 4, 1, 3, 0).reshape(-1, by * by, a) / by**2
    kept = (left @ right.to(left.dtype)).view(h // by, w // by, m, a).permute(2, 3, 0, 1)
    wave = torch.fft.ifft2(kept)
    modulus: Tensor = (wave.real.square() + wave.imag.square()).sqrt()
    return modulus


def _smoothing(side: int, scales: int, by: int) -> Tensor:
    """Return the matrix that smooths one axis by φ and keeps one sample in 2^scales, no border; `by`: step of its input."""
    cell, at = 2**scales, torch.arange(side)
    phi = torch.exp(
        -0.5 * (0.8 * 2 ** (scales - 1) * 2.0 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64)) ** 2
    )
    centres = torch.arange(cell + cell // 2, side - cell, cell)
    found: Tensor = by * torch.fft.ifft(phi).real[(centres[:, None] - at[None, ::by]) % side]
    return found.float()


def _frequencies(shape: tuple[int, int]) -> tuple[Tensor, ...]:
    across, down = (2.0 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64) for side in shape)
    return torch.meshgrid(across, down, indexing="ij")


def _morlet(shape: tuple[int, int], sigma: float, frequency: float, angle: float, slant: float) -> Tensor:
    """The spectrum of a Morlet wavelet, 0 at frequency 0: a Gaussian round `frequency` in direction `angle`, less one
    round 0. `slant` is the ratio of its widths. Summed over the aliases of a sampled wavelet.
    """
    u, v = _frequencies(shape)
    found, low = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for i in (-1, 0, 1):
        for j in (-1, 0, 1):
            p, q = u + 2 * math.pi * i, v + 2 * math.pi * j
            along = math.cos(angle) * p + math.sin(angle) * q
            across = (-math.sin(angle) * p + math.cos(angle) * q) / slant
            found += torch.exp(-0.5 * sigma**2 * ((along - frequency) ** 2 + across**2))
            low += torch.exp(-0.5 * sigma**2 * (along**2 + across**2))
    return (found - found[0, 0] / low[0, 0] * low).float()
