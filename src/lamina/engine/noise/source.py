"""The Gaussian noise of a private step: `SecureNoise`, `SeededNoise`, and normal draws from uniform words."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from lamina.engine import native
from lamina.engine.noise.integer_draws import WordSource, integer_noise
from lamina.engine.noise.random_stream import (
    BLOCK_BYTES,
    CELL_ELEMENTS,
    SEED_BYTES,
    KeyStream,
    Pack,
    StreamPurpose,
    Words,
    cut_into_cells,
    plan_packs,
    step_key,
)
from lamina.errors import EngineError, NoiseError
from lamina.plan.rules import NoiseKind

# Normal draws from uniform words: Box–Muller with the tail kept, in float32 or float64.
#
# A pair takes two 64-bit words, read as signed integers w1, w2; the last bit of w1 is set:
#
#     u = |w1| / 2^63  in (0, 1]     r = sqrt(-2 ln u)     theta = pi · w2 / 2^63  in [-pi, pi]
#     (r cos theta, r sin theta)     two independent N(0, 1)
#
# u has the 53 bits of a float64 *relative* to itself on a grid of 2^-62, so the tail, which is made near u = 0,
# goes on: the largest r is sqrt(126 ln 2) = 9.35, the smallest 0. The logarithm is always taken in float64: in
# float32 u would round to 1, and r to 0, once in 2^25 draws, and the exact sum would be released there. Everything
# after it (root, angle, cosine, sine, product) is smooth, so float32 there moves a draw by at most a few 1e-7 of its
# radius, the size of the rounding when it is added to a float32 sum.

GRID_BITS = 8
MAX_RADIUS = math.sqrt(126 * math.log(2.0))

Reals = NDArray[Any]  # float32 or float64
StoreDraws = Callable[[int, int, Reals, Reals], None]  # (slot, first element, r, cos or sin): put their product there

_WORD_TO_UNIT = 2.0**-63
_WORD_TO_ANGLE = math.pi * 2.0**-63


def radius(words: Words, work: NDArray[np.float64], out: Reals) -> None:
    """out = sqrt(-ln u²) = sqrt(-2 ln u). `work` is float64 scratch; the cast comes after the logarithm.

    Signed words, because uint64 to float64 is a branch per element. Setting the last bit of `words`, in place,
    keeps u from 0; u² is at most 1.
    """
    np.bitwise_or(words, np.uint64(1), out=words)
    np.copyto(work, words.view(np.int64))
    np.multiply(work, _WORD_TO_UNIT, out=work)
    np.multiply(work, work, out=work)
    np.log(work, out=work)
    np.copyto(out, work, casting="same_kind")
    np.negative(out, out=out)
    np.sqrt(out, out=out)


def angle(words: Words, out: Reals) -> None:
    """out = theta. The same word gives the same angle in both precisions, up to their rounding."""
    np.copyto(out, words.view(np.int64), casting="same_kind")
    np.multiply(out, _WORD_TO_ANGLE, out=out)


def cosine(theta: Reals, out: Reals) -> None:
    if theta.dtype == np.float32:
        np.cos(theta, out=out)
    else:  # four times as fast as numpy's float64, and parallel: on the main thread only
        torch.cos(torch.from_numpy(theta), out=torch.from_numpy(out))


def sine(theta: Reals, out: Reals) -> None:
    if theta.dtype == np.float32:
        np.sin(theta, out=out)
    else:
        torch.sin(torch.from_numpy(theta), out=torch.from_numpy(out))


def rounding_grid(std: float) -> float:
    """The public grid of a hardened release: the power of two with 2^8 <= std/grid < 2^9."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - GRID_BITS)


def add_rounded(total: Reals, noise: NDArray[np.float64], spacing: float, unit: float) -> None:
    """total = n·unit, n·spacing nearest to total + noise: computed in float64. Overwrites `noise`."""
    np.add(total, noise, out=noise)
    np.multiply(noise, 1.0 / spacing, out=noise)
    np.rint(noise, out=noise)
    np.multiply(noise, unit, out=total, casting="same_kind")


def _aligned_empty(size: int, dtype: torch.dtype) -> NDArray[Any]:
    """Uninitialised memory on a cache line, which torch gives and numpy does not: a quarter of the time."""
    return torch.empty(size, dtype=dtype).numpy()


class NoiseBuffers:
    """The buffers of one thread: words and two precisions of (radius, angle, product). Made once."""

    def __init__(self) -> None:
        self.words: Words = _aligned_empty(CELL_ELEMENTS + 2, torch.int64).view(np.uint64)
        self._log: NDArray[np.float64] = _aligned_empty(CELL_ELEMENTS // 2, torch.float64)
        self._real: dict[torch.dtype, tuple[Reals, Reals, Reals]] = {}

    def polar(self, pairs: int, dtype: torch.dtype) -> tuple[Reals, Reals, Reals]:
        """(r, theta, scratch) in this precision from the first 2·pairs words."""
        if dtype not in self._real:
            size = CELL_ELEMENTS // 2
            self._real[dtype] = (_aligned_empty(size, dtype), _aligned_empty(size, dtype), _aligned_empty(size, dtype))
        r, theta, scratch = (buffer[:pairs] for buffer in self._real[dtype])
        radius(self.words[:pairs], self._log[:pairs], r)
        angle(self.words[pairs : 2 * pairs], theta)
        return r, theta, scratch


_thread_local = threading.local()


def noise_buffers() -> NoiseBuffers:
    """The buffers of the calling thread."""
    if not hasattr(_thread_local, "space"):
        _thread_local.space = NoiseBuffers()
    space: NoiseBuffers = _thread_local.space
    return space


def draw_pack(
    stream: KeyStream, pack: Pack, space: NoiseBuffers, stds: Reals, precise: bool, store: StoreDraws
) -> None:
    """Draw one pack and store it."""
    pairs = pack.pairs
    if pack.counters is None:
        piece = pack.pieces[0]
        stream.run(piece.tensor, piece.block, space.words[: 2 * pairs])
        scale = stds[piece.slot]
    else:
        stream.gather(pack.counters, space.words)
        scale = np.repeat(stds[pack.slots], pack.widths)
    r, theta, noise = space.polar(pairs, torch.float64 if precise else torch.float32)
    np.multiply(r, scale, out=r)
    for function, spans in ((cosine, pack.cosines), (sine, pack.sines)):
        function(theta, noise)
        for slot, start, count, at in spans:
            store(slot, start, r[at : at + count], noise[at : at + count])


# The native kernel (native/noise.c) makes the same words and puts draw and sum into one pass over memory, all in
# float64. Its arithmetic is fixed to the last bit, so its draws are the same on every processor that has it, for any
# number of threads. They differ from those of numpy in the last digits: a run keeps which of the two drew, and a
# segment that was begun by the other one is not replayed but charged anew.

NOISE_VERSIONS = {True: "4 native", False: "2 numpy"}
NATIVE_PIECE = np.dtype(
    [
        *((name, "u8") for name in ("tensor", "block")),
        ("size", "i8"),
        ("out", "u8"),
        *((name, "f8") for name in ("std", "spacing", "unit")),
    ],
    align=True,
)
_FLOAT64, _FILL = 1, 2
_BATCH_BLOCKS = 16


class NativeNoise:
    """The functions of native/noise.c. `level` is the instructions that they use: 1 AVX2 and AES, 2 AVX-512 and VAES."""

    def __init__(self, library: ctypes.CDLL, level: int) -> None:
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self.level = level
        self._draw, self._words = library.lamina_noise_draw, library.lamina_noise_words
        self._draw.argtypes = [ctypes.c_char_p, pointer, *4 * [ctypes.c_int]]
        self._words.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, whole, pointer, ctypes.c_int]
        self._draw.restype = self._words.restype = None

    def words(self, key: bytes, tensor: int, block: int, blocks: int) -> Words:
        """The key stream itself, as `KeyStream.run` writes it."""
        assert len(key) == BLOCK_BYTES
        out = np.empty(2 * -(-blocks // _BATCH_BLOCKS) * _BATCH_BLOCKS, dtype=np.uint64)
        self._words(key, tensor, block, out.size // 2, out.ctypes.data, self.level)
        return out[: 2 * blocks]

    def draw(
        self, key: bytes, totals: list[torch.Tensor], stds: list[float], spacing: list[float], indices: list[int], *,
        fill: bool, threads: int, divisor: float = 1.0,
    ) -> None:  # fmt: skip
        """Add stds[i] · z to totals[i], all float32 or all float64; round to spacing[i] if that is given; then divide."""
        dtype = totals[0].dtype
        assert len(key) == BLOCK_BYTES and dtype in (torch.float32, torch.float64)
        for x in totals:
            assert x.dtype is dtype and x.is_contiguous() and x.is_cpu
        layout, slots, starts = _native_pieces(tuple(map(torch.Tensor.numel, totals)), tuple(indices))
        pieces = layout.copy()
        pieces["out"] = np.array([x.data_ptr() for x in totals], dtype=np.uint64)[slots] + starts * dtype.itemsize
        pieces["std"] = np.array(stds)[slots]
        pieces["unit"] = 1.0 / divisor
        if spacing:
            pieces["spacing"] = np.array(spacing)[slots]
            pieces["unit"] = pieces["spacing"] / divisor
        flags = _FLOAT64 * (dtype == torch.float64) | _FILL * (fill and not spacing)
        if _fork_count[0]:  # the threads of the kernel are torch's, which a forked child does not have
            threads = 1
        self._draw(key, pieces.ctypes.data, len(pieces), flags, self.level, threads)


@functools.lru_cache(maxsize=256)  # a step may draw in many calls
def _native_pieces(numels: tuple[int, ...], tensors: tuple[int, ...]) -> tuple[NDArray[Any], Words, Words]:
    """The pieces of a call, and of each its tensor's position and its first element."""
    every = [p for slot, (t, n) in enumerate(zip(tensors, numels, strict=True)) for p in cut_into_cells(slot, t, n)]
    layout = np.zeros(len(every), dtype=NATIVE_PIECE)
    for i, piece in enumerate(every):
        layout[i] = piece.tensor, piece.block, piece.size, 0, 0.0, 0.0, 1.0
    slots, starts = (np.array([getattr(p, name) for p in every], dtype=np.uint64) for name in ("slot", "start"))
    return layout, slots, starts


@functools.lru_cache(maxsize=1)
def _bind(library: ctypes.CDLL) -> NativeNoise | None:
    level = library.lamina_noise_level()
    return NativeNoise(library, level) if level else None


def native_noise() -> NativeNoise | None:
    """The native kernel, or None where it is not built, switched off, or the processor lacks its instructions."""
    library = native.library()
    return None if library is None else _bind(library)


def noise_version() -> str:
    """Return how noise is drawn here. The same seed gives the same noise only where this is the same."""
    return NOISE_VERSIONS[native_noise() is not None]


# The Gaussian noise of a private step.
#
#     source.add_many_(sums, stds, step=t)        sums[i] <- sums[i] + stds[i] · z_i,   z_i ~ N(0, I)
#
# Two sources, one construction (AES counter mode of random_stream.py, Box–Muller of the words as above):
#
# - `SecureNoise()` is keyed by the system's generator. It draws a (step, tensor) once and refuses it a second
#   time, refuses to be copied, pickled or used in a forked child: the difference of two releases under the same
#   noise is the difference of their sums. `SecureNoise.of_segment(seed)` replays a segment whose seed a run kept.
# - `SeededNoise(seed)` is for tests: `private` is False, and so is everything derived from it.
#
# Formal guarantees. With uniform words the draws are N(0, 1) up to the floating-point error stated above, and cut at
# 9.35 standard deviations (mass 2^-63 a pair). Hardened (the default): normals and sum in float64, the result rounded to
# the public grid `rounding_grid(std)`. docs/decisions/noise.md says what that does and does not protect against.
# `hardened=False` is plain noise: the sum is taken in the sums' own precision. Which low bits can occur then depends on
# the sum, and its bits give a contribution away. A certificate lists floating point as not covered.

STD_RANGE = (1e-30, 1e30)
PLAIN_NOTE = "the noise is plain, not hardened:"  # in the notes of a run on a device without float64
PLAIN_NOISE = "the low-order bits of a released gradient can show whether a contribution was in the batch"


class PlainNoise(UserWarning):
    """The noise is plain although it should be hardened."""


_DISCRETE_GAUSSIAN = NoiseKind.DISCRETE_GAUSSIAN


class NoiseSource:
    """N(0, std²) for tensors, determined by (seed, step, rank, part, tensor index, element index) alone.

    `part` numbers independent draws for one step and tensor: the bins, slots or contributions of plan/rules.py.
    """

    private: ClassVar[bool] = False

    def __init__(self, seed: bytes, *, rank: int, hardened: bool, threads: int | None) -> None:
        self._seed, self._rank, self._hardened = seed, rank, hardened
        self._threads = threads  # None: as many as torch may use
        self._last_key: tuple[tuple[int, int], bytes] = (-1, -1), b""
        step_key(seed, step=0, rank=rank)  # refuses a bad seed or rank now

    @property
    def rank(self) -> int:
        """Of which process: the ranks of a step have streams of their own."""
        return self._rank

    @property
    def hardened(self) -> bool:
        """True if sums are taken in float64 and rounded to a public grid; docs/decisions/noise.md has its limits."""
        return self._hardened

    def add_(self, total: torch.Tensor, std: float, *, step: int, tensor: int = 0) -> None:
        """total <- total + std · z, in place."""
        self.add_many_([total], [std], step=step, tensors=[tensor])

    def fill_(self, out: torch.Tensor, std: float, *, step: int, tensor: int = 0) -> None:
        """out <- std · z."""
        self.fill_many_([out], [std], step=step, tensors=[tensor])

    def fill_many_(
        self, outs: Sequence[torch.Tensor], stds: Sequence[float], *,
        step: int, tensors: Sequence[int] | None = None, part: int = 0,
    ) -> None:  # fmt: skip
        """outs[i] <- stds[i] · z_i."""
        self._apply(outs, stds, step=step, tensors=tensors, part=part, fill=True, rounded=self._hardened)

    def add_many_(
        self, totals: Sequence[torch.Tensor], stds: Sequence[float], *,
        step: int, tensors: Sequence[int] | None = None, part: int = 0, rounded: bool = True, divisor: float = 1.0,
    ) -> None:  # fmt: skip
        """totals[i] <- (totals[i] + stds[i] · z_i) / divisor, on as many threads as torch uses.

        `tensors[i]` is the index that identifies the tensor in the model, by default its position. A std of 0 adds
        nothing to its tensor. Everything is checked before anything is drawn.

        A hardened source rounds the sum to the grid of its std before it is divided. rounded=False leaves that out, for
        noise that is gathered in float64 and rounded once, with the sum (`add_gathered_`): the grid belongs to the std
        of the whole.
        """
        if self._hardened and not rounded and any(total.dtype != torch.float64 for total in totals):
            problem = "hardened noise is gathered in a tensor that is not float64"
            raise NoiseError("noise.hardened-not-float64", problem, "use float64")
        rounded = rounded and self._hardened
        self._apply(totals, stds, step=step, tensors=tensors, part=part, fill=False, rounded=rounded, divisor=divisor)

    def add_gathered_(
        self, totals: Sequence[torch.Tensor], noises: Sequence[torch.Tensor], stds: Sequence[float], *,
        divisor: float = 1.0,
    ) -> None:  # fmt: skip
        """totals[i] <- (totals[i] + noises[i]) / divisor: noise that this source drew before, of std stds[i] in all.

        A hardened source rounds the sum to the grid of stds[i] before it is divided. `noises` are float64 and are
        overwritten; float32 where there is no float64. A std of 0 adds nothing to its tensor.
        """
        for total, noise, std in zip(totals, noises, stds, strict=True):
            whole = total.detach()
            if std > 0 and self._hardened:
                _add_rounded(whole, noise, std, divisor)
            elif std > 0:
                whole.copy_(noise.add_(whole).div_(divisor))
            else:
                whole.div_(divisor)

    def use_plain(self) -> None:
        """Draw plain noise from here on: of a model on a device without float64."""
        self._hardened = False

    def add_integers_(
        self, totals: Sequence[torch.Tensor], bits: Sequence[int], *, step: int, kind: NoiseKind = _DISCRETE_GAUSSIAN,
        times: int = 1,
    ) -> None:  # fmt: skip
        """totals[i] <- totals[i] + x, int64: x of this kind and of scale 2^bits[i], none for 0 bits; `times` such draws.

        Exact: drawn and added in integers (engine/noise/integer_draws.py).
        """
        indices = list(range(len(totals)))
        key = step_key(self._seed, step=step, rank=self._rank, purpose=StreamPurpose.INTEGER_NOISE)
        assert all(total.dtype == torch.int64 and total.is_contiguous() for total in totals)
        self._claim(step, indices)
        for index, total, scale in zip(indices, totals, bits, strict=True):
            if scale:
                words = WordSource(key, index)
                for _ in range(times):
                    total.view(-1).add_(torch.from_numpy(integer_noise(kind, words, total.numel(), scale)))

    def _apply(
        self, totals: Sequence[torch.Tensor], stds: Sequence[float], *,
        step: int, tensors: Sequence[int] | None, part: int, fill: bool, rounded: bool, divisor: float = 1.0,
    ) -> None:  # fmt: skip
        indices = _check_tensors(totals, stds, tensors)
        key = self._key_of(step, part)
        self._claim(step, [(part << 64) + index for index in indices])
        for total, std in zip(totals, stds, strict=True):
            if fill and (rounded or std == 0):
                total.detach().zero_()
            elif std == 0 and divisor != 1:
                total.detach().div_(divisor)
        for dtype in (torch.float32, torch.float64):
            live = [i for i, x in enumerate(totals) if x.dtype == dtype and stds[i] > 0 and x.numel()]
            for i in [i for i in live if not totals[i].is_cpu]:
                live.remove(i)
                self._draw_elsewhere(totals[i], float(stds[i]), indices[i], key, fill, rounded, divisor)
            if live:
                outs, scales = [totals[i] for i in live], [float(stds[i]) for i in live]
                self._draw(outs, scales, [indices[i] for i in live], key, fill, rounded, divisor)

    def _draw_elsewhere(
        self, total: torch.Tensor, std: float, index: int, key: bytes, fill: bool, rounded: bool, divisor: float
    ) -> None:
        """On another device: the draws of the CPU, one tensor at a time. Noise is all that travels."""
        noise, whole = torch.empty(total.shape, dtype=torch.float64 if rounded else total.dtype), total.detach()
        self._draw([noise], [std], [index], key, fill=True, rounded=False)
        if rounded:
            _add_rounded(whole, noise.to(total.device), std, divisor)
        elif fill:
            whole.copy_(noise)
        else:
            whole.add_(noise.to(total.device)).mul_(1.0 / divisor)

    def _draw(
        self, totals: list[torch.Tensor], stds: list[float], indices: list[int], key: bytes, fill: bool, rounded: bool,
        divisor: float = 1.0,
    ) -> None:  # fmt: skip
        flat = [x if x.is_contiguous() else x.detach().contiguous() for x in totals]
        spacing = [rounding_grid(std) for std in stds] if rounded else []
        threads = torch.get_num_threads() if self._threads is None else self._threads
        if (kernel := native_noise()) is not None:
            kernel.draw(key, flat, stds, spacing, indices, fill=fill, threads=threads, divisor=divisor)
        else:
            arrays = [x.detach().numpy().reshape(-1) for x in flat]
            precise = self._hardened or flat[0].dtype == torch.float64
            _draw_in_python(
                key, arrays, stds, spacing, indices, fill=fill, threads=threads, precise=precise, divisor=divisor
            )
        for total, written in zip(totals, flat, strict=True):
            if written is not total:
                total.detach().copy_(written)
        torch.autograd.graph.increment_version(totals)

    def _key_of(self, step: int, part: int) -> bytes:
        """The last one is kept: the tensors of a step are drawn in several calls."""
        kept, key = self._last_key  # read once: another thread may draw for another step meanwhile
        if kept != (step, part):
            key = step_key(self._seed, step=step, rank=self._rank, purpose=StreamPurpose.NOISE, part=part)
            self._last_key = (step, part), key
        return key

    def _claim(self, step: int, indices: list[int]) -> None:
        """Called once before a draw, with part · 2^64 + tensor. A source that must not repeat itself refuses here."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        problem = f"{type(self).__name__} cannot be pickled or copied: a copy would repeat its stream"
        raise NoiseError("noise.source-copied", problem, "make a new source where one is needed")

    def __repr__(self) -> str:
        private = "private" if self.private else "not private"
        return f"{type(self).__name__}({private}, {'hardened' if self._hardened else 'plain'})"


class SecureNoise(NoiseSource):
    """Noise for private runs. Every (step, part, tensor) is drawn at most once; steps may not go back."""

    private: ClassVar[bool] = True

    def __init__(self, *, rank: int = 0, hardened: bool = True, threads: int | None = None) -> None:
        self._start(os.urandom(SEED_BYTES), rank=rank, hardened=hardened, threads=threads)

    @classmethod
    def of_segment(
        cls, seed: bytes, *, rank: int = 0, hardened: bool = True, threads: int | None = None
    ) -> SecureNoise:
        """Return the source of one segment of a run, from its seed: 32 secret bytes of os.urandom.

        A second source of the same seed replays the first. Use it only for the same steps of the same segment.
        """
        if len(set(seed)) < 8:  # 32 random bytes have so few distinct values with probability below 2^-100
            raise NoiseError(
                "noise.seed-not-random", "the seed of the segment is not random", "draw it with os.urandom(32)"
            )
        source = cls.__new__(cls)
        source._start(seed, rank=rank, hardened=hardened, threads=threads)
        return source

    def _start(self, seed: bytes, *, rank: int, hardened: bool, threads: int | None) -> None:
        super().__init__(seed, rank=rank, hardened=hardened, threads=threads)
        self._lineage = _process_identity()
        self._lock = threading.Lock()
        self._step = -1
        self._drawn: set[int] = set()

    def _claim(self, step: int, indices: list[int]) -> None:
        if self._lineage != _process_identity():
            problem = "this noise source belongs to the parent process, whose stream a child must not repeat"
            raise NoiseError("noise.forked-source", problem, "make a new SecureNoise in the child")
        with self._lock:
            if step < self._step:
                problem = f"noise of step {step} was asked for after step {self._step}"
                raise NoiseError("noise.step-repeated", problem, "never repeat a step")
            again = self._drawn.intersection(indices) if step == self._step else ()
            if again:
                problem = f"noise of step {step}, tensor {min(again) % (1 << 64)} was drawn already"
                remedy = "count the step up, or replay a crashed segment with SecureNoise.of_segment"
                raise NoiseError("noise.drawn-twice", problem, remedy)
            if step > self._step:
                self._step, self._drawn = step, set()
            self._drawn.update(indices)


class SeededNoise(NoiseSource):
    """Noise that anyone can predict: for tests and audits. It may be drawn again and again."""

    def __init__(self, seed: int, *, rank: int = 0, hardened: bool = True, threads: int | None = None) -> None:
        raw = repr(int(seed)).encode()
        derived = HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=b"lamina/test seed").derive(raw)
        super().__init__(derived, rank=rank, hardened=hardened, threads=threads)

    @classmethod
    def of_segment(cls, seed: bytes, *, rank: int = 0, hardened: bool = True) -> SeededNoise:
        """The source of a segment whose seed follows from one that somebody chose."""
        source = cls.__new__(cls)
        NoiseSource.__init__(source, seed, rank=rank, hardened=hardened, threads=None)
        return source


def _add_rounded(total: torch.Tensor, noise: torch.Tensor, std: float, divisor: float) -> None:
    """total <- the multiple of grid(std) nearest to total + noise, divided. `noise` is float64 and overwritten."""
    spacing = rounding_grid(std)
    noise.add_(total).mul_(1.0 / spacing).round_()
    total.copy_(noise.mul_(spacing / divisor))


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, which hardened noise is added and rounded in, or float32 on a device without it: MPS."""
    try:
        if device.type != "cpu":
            torch.zeros(1, dtype=torch.float64, device=device)
    except TypeError:
        return torch.float32
    return torch.float64


def _check_tensors(totals: Sequence[torch.Tensor], stds: Sequence[float], tensors: Sequence[int] | None) -> list[int]:
    """The tensors' indices, after everything about the call was checked."""
    indices = list(range(len(totals))) if tensors is None else list(tensors)
    if not len(totals) == len(stds) == len(indices):
        problem = f"the call has {len(totals)} tensors, {len(stds)} stds and {len(indices)} indices"
        raise NoiseError("noise.lengths-differ", problem, "give one std and one index per tensor")
    if len(set(indices)) != len(indices) or (indices and not 0 <= min(indices) <= max(indices) < 1 << 64):
        problem = "tensor indices repeat or are outside [0, 2^64)"
        raise NoiseError("noise.tensor-index", problem, "give every tensor its own index")
    low, high = STD_RANGE
    seen: set[int] = set()
    for index, total, std in zip(indices, totals, stds, strict=True):
        if not (low <= std <= high or std == 0):  # NaN fails both
            problem = f"std of tensor {index} is {std}, must be 0 or in [{low}, {high}]"
            raise NoiseError("noise.std-out-of-range", problem, "check the plan")
        if total.dtype is not torch.float32 and total.dtype is not torch.float64:
            problem = f"tensor {index} is {total.dtype}, must be float32 or float64"
            raise NoiseError("noise.tensor-dtype", problem, "sum in float32 or better")
        if total.layout is not torch.strided or total.is_meta:
            problem = f"tensor {index} is not a dense tensor"
            raise NoiseError("noise.tensor-not-dense", problem, "make it dense first: total.to_dense()")
        place = total.data_ptr()
        if (place in seen and total.numel()) or (not total.is_contiguous() and _expanded(total)):
            problem = f"tensor {index} is expanded, or shares its memory with another tensor of the call"
            raise NoiseError("noise.tensor-shares-memory", problem, "clone it first")
        seen.add(place)
    return indices


def _expanded(t: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))


def _draw_in_python(
    key: bytes, arrays: list[Reals], stds: list[float], spacing: list[float], indices: list[int], *,
    fill: bool, threads: int, precise: bool, divisor: float,
) -> None:  # fmt: skip
    """What `NativeNoise.draw` does, in numpy: the same words, other last digits (NOISE_VERSIONS)."""
    scales = np.array(stds, dtype=np.float64 if precise else np.float32)

    def put(slot: int, start: int, r: Reals, noise: Reals) -> None:
        np.multiply(r, noise, out=arrays[slot][start : start + noise.size])

    def add(slot: int, start: int, r: Reals, noise: Reals) -> None:
        np.multiply(r, noise, out=noise)
        part = arrays[slot][start : start + noise.size]
        np.add(part, noise, out=part)
        np.multiply(part, part.dtype.type(1.0 / divisor), out=part)

    def add_hardened(slot: int, start: int, r: Reals, noise: Reals) -> None:
        np.multiply(r, noise, out=noise)
        add_rounded(arrays[slot][start : start + noise.size], noise, spacing[slot], spacing[slot] / divisor)

    store = add_hardened if spacing else put if fill else add
    packs = plan_packs(tuple(x.size for x in arrays), tuple(indices))
    rest = iter(packs)

    def drain() -> None:
        stream = KeyStream(key)
        for pack in rest:
            draw_pack(stream, pack, noise_buffers(), scales, precise, store)

    if precise:  # float64 uses torch's own threads: entered from a second one, they would outnumber the cores
        threads = 1
    _on_threads(min(threads, len(packs)) if sum(x.size for x in arrays) >= CELL_ELEMENTS else 1, drain)


def _on_threads(threads: int, drain: Callable[[], None]) -> None:
    """Call `drain` on so many threads, the caller's included, until all of them return."""
    others = [_noise_threads().submit(drain) for _ in range(threads - 1)]
    try:
        drain()
    finally:
        for other in others:
            other.result()


_fork_count = [0]


@functools.lru_cache(maxsize=1)
def _noise_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="lamina-noise")


def _process_identity() -> tuple[int, int]:
    return os.getpid(), _fork_count[0]


def _after_fork() -> None:
    _fork_count[0] += 1
    _noise_threads.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


def refuse_other_rank(noise: NoiseSource, rank: int) -> None:
    """Refuse noise of another rank: two ranks with one stream would add the same noise twice."""
    if noise.rank != rank:
        problem = f"the noise source is of rank {noise.rank}, and this is rank {rank}"
        raise EngineError("engine.noise-of-other-rank", problem, f"make it with rank={rank}")


def use_plain_where_needed(noise: NoiseSource, tensors: Mapping[str, torch.Tensor], *, announced: bool) -> str:
    """Use plain noise for a model on a device without float64. Return a note that says so, or ''. Warn unless `announced`."""
    lacking = next((p.device for p in tensors.values() if widest_dtype(p.device) != torch.float64), None)
    if lacking is None or not noise.hardened:
        return ""
    noise.use_plain()
    note = f"{PLAIN_NOTE} device {lacking.type} has no float64"
    if not announced:
        warnings.warn(f"{note}: {PLAIN_NOISE}", PlainNoise, stacklevel=4)
    return note
