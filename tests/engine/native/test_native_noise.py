"""Native noise: the cipher by known answers, the map by exact arithmetic, the same bits whatever draws them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from audit_steps import plan_for
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor, nn

from lamina.audit.step_audit import Verdict, audit_step
from lamina.audit.target import AuditTarget
from lamina.engine import native
from lamina.engine.batch import Batch
from lamina.engine.noise.random_stream import CELL_ELEMENTS, KeyStream, step_key
from lamina.engine.noise.source import (
    MAX_RADIUS,
    NATIVE_PIECE,
    NativeNoise,
    SecureNoise,
    SeededNoise,
    native_noise,
    noise_version,
)
from lamina.run.segments import code_version

KEY = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")


@pytest.fixture(params=["AVX2", "AVX-512"])
def kernel(request: pytest.FixtureRequest) -> NativeNoise:
    """The kernel in each form that the processor can run; the one that it runs twice where it has no other."""
    library, best = native.library(), native_noise()
    if library is None or best is None:
        pytest.skip("the native kernels were not built for this processor")
    return NativeNoise(library, min(best.level, 1 if request.param == "AVX2" else 2))


# ------------------------------------------------------------------------------------------ the key stream


def test_counter_mode_by_known_answers(kernel: NativeNoise) -> None:
    """NIST SP 800-38A, F.5.1, CTR-AES128: the output blocks of four consecutive counters."""
    got = kernel.words(KEY, 0xF0F1F2F3F4F5F6F7, 0xF8F9FAFBFCFDFEFF, 4)
    assert got.tobytes().hex() == (
        "ec8cdf7398607cb0f2d21675ea9ea1e4362b7c3c6773516318a077d7fc5073ae"
        "6a2cc3787889374fbeb4c81b17ba6c44e89c399ff0f198c6d40a31db156cabfe"
    )


@pytest.mark.parametrize(("tensor", "block"), [(0, 0), (2**64 - 1, 7), (5, 2**32 - 3), (1 << 62, 2**64 - 200)])
def test_the_stream_is_that_of_the_library(kernel: NativeNoise, tensor: int, block: int) -> None:
    key, words = step_key(bytes(range(32)), step=3), np.empty(2 * 179, dtype=np.uint64)
    KeyStream(key).run(tensor, block, words)
    assert np.array_equal(kernel.words(key, tensor, block, 179), words)


# ------------------------------------------------------------------------------------------------- the map


def box_muller(words: np.ndarray, pairs: int) -> np.ndarray:
    """The draws of a piece in extended precision."""
    w1, w2 = words[:pairs].view(np.int64) | np.int64(1), words[pairs:].view(np.int64)
    u = np.abs(w1.astype(np.float64)).astype(np.longdouble) / np.longdouble(2) ** 63
    r, theta = np.sqrt(-2 * np.log(u)), w2.astype(np.longdouble) * (np.longdouble(np.arccos(np.longdouble(-1))) / 2**63)
    return np.concatenate([r * np.cos(theta), r * np.sin(theta)])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 5e-16), (torch.float32, 4e-7)])
def test_draws_are_within_a_few_units_of_the_last_place(kernel: NativeNoise, dtype: torch.dtype, most: float) -> None:
    out = torch.empty(CELL_ELEMENTS, dtype=dtype)
    for tensor in range(6):
        kernel.draw(KEY, [out], [1.0], [], [tensor], fill=True, threads=1)
        exact = box_muller(kernel.words(KEY, tensor, 0, CELL_ELEMENTS // 2), CELL_ELEMENTS // 2)
        radius = np.hypot(exact[: exact.size // 2], exact[exact.size // 2 :])
        error = np.abs(out.numpy() - exact) / (1 + np.tile(radius, 2))
        assert error.max() < most


def test_the_noise_of_a_float32_sum_is_never_smaller_than_planned(kernel: NativeNoise) -> None:
    """A std that float32 does not have is rounded up."""
    for std in (1.0, 1 + 2.0**-40, 0.1, 1 / 3, 1e-30, 7e29):
        draws = torch.empty(2, 1 << 14)
        for out, scale in zip(draws, (1.0, std), strict=True):
            kernel.draw(KEY, [out], [scale], [], [0], fill=True, threads=1)
        ratio = (draws[1].double() / draws[0]).median().item()
        assert std * (1 - 1e-9) <= ratio <= std * (1 + 1.3e-7)


def draw_words(kernel: NativeNoise, radius_words: tuple[int, int], dtype: type = np.float64) -> np.ndarray:
    """The draws whose radii are made of these two words: their counter is found by decrypting them."""
    block = np.array(radius_words, dtype=np.uint64).tobytes()
    counter = Cipher(algorithms.AES(KEY), modes.ECB()).decryptor().update(block)
    out, pieces = np.zeros(4, dtype), np.zeros(1, dtype=NATIVE_PIECE)
    pieces[0] = (
        int.from_bytes(counter[:8], "big"),
        int.from_bytes(counter[8:], "big"),
        4,
        out.ctypes.data,
        1.0,
        0.0,
        1.0,
    )
    kernel._draw(KEY, pieces.ctypes.data, 1, int(dtype is np.float64), kernel.level, 1)
    return np.hypot(out[:2], out[2:])


@pytest.mark.parametrize(("dtype", "rel"), [(np.float64, 1e-15), (np.float32, 3e-7)])
def test_the_smallest_uniform_lies_beyond_eight_sigma_and_the_largest_at_zero(
    kernel: NativeNoise, dtype: type, rel: float
) -> None:
    assert draw_words(kernel, (0, 2**64 - 1), dtype) == pytest.approx([MAX_RADIUS, MAX_RADIUS], rel=rel)
    assert MAX_RADIUS > 9.3
    assert draw_words(kernel, (1 << 63, (1 << 63) - 1), dtype) == pytest.approx([0, 0], abs=0)
    near = draw_words(kernel, ((1 << 63) - 2048, 1 << 62), dtype)  # 1 - 2^-52, and 1/2
    assert near == pytest.approx([math.sqrt(2**-51), math.sqrt(2 * math.log(2))], rel=rel)


# ---------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_instructions_and_threads_change_no_bit(hardened: bool, dtype: torch.dtype) -> None:
    sizes = [1, 2, 3, 5, 63, 1000, 2 * CELL_ELEMENTS + 77, CELL_ELEMENTS - 1]
    library, best = native.library(), native_noise()
    assert library is not None and best is not None
    made, before = [], torch.get_num_threads()
    spacing = [2.0**-9] * len(sizes) if hardened else []
    for level in range(1, best.level + 1):
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)  # the pool is torch's
            outs = [torch.full((n,), 0.1, dtype=dtype) for n in sizes]
            stds, indices = [1.5] * len(sizes), list(range(len(sizes)))
            NativeNoise(library, level).draw(KEY, outs, stds, spacing, indices, fill=False, threads=threads)
            made.append(torch.cat(outs))
    torch.set_num_threads(before)
    assert all(torch.equal(made[0], other) for other in made)


def test_nothing_beside_a_tensor_is_written() -> None:
    for size in (*range(1, 40), 511, 513, 1025):
        room = torch.full((size + 64,), 7.0)
        SeededNoise(1).fill_(room[32 : 32 + size], 1.0, step=0)
        assert bool((room[:32] == 7).all()) and bool((room[32 + size :] == 7).all())
        assert not bool((room[32 : 32 + size] == 7).any())


@pytest.mark.parametrize("hardened", [False, True])
def test_numpy_draws_the_same_up_to_rounding(hardened: bool) -> None:
    both = []
    for on in (True, False):
        with native.switched(on):
            outs = [torch.zeros(n, dtype=torch.float64) for n in (5, 100_000)]
            SeededNoise(3, hardened=hardened).add_many_(outs, [1.0, 2.0], step=1)
            both.append(torch.cat(outs))
    assert torch.allclose(*both, rtol=0, atol=2.0**-7 if hardened else 1e-14)
    assert noise_version() == "4 native" and noise_version() in code_version()


def test_hardened_keeps_what_cannot_be_added() -> None:
    total = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    SecureNoise(hardened=True).add_(total, 1.0, step=0)
    assert total[0].isnan() and total[1:3].tolist() == [math.inf, -math.inf]


def stack() -> bytes:
    """The stack of the first thread, what lies below its top included."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[stack]"):
            first, end = (int(part, 16) for part in line.split()[0].split("-"))
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                memory.seek(first)
                return memory.read(end - first)
    raise AssertionError("no stack")


def test_no_round_key_and_no_word_stays_on_the_stack() -> None:
    """FIPS 197, A.1: the last round key of this key."""
    kernel, out = native_noise(), torch.zeros(64)
    assert kernel is not None
    words = kernel.words(KEY, 0, 0, 32).view(np.uint8).tobytes()
    kernel.draw(KEY, [out], [1.0], [], [0], fill=True, threads=1)
    seen = stack()
    assert bytes.fromhex("d014f9a8c9ee2589e13f0cc8b6630ca6") not in seen
    assert words[:16] not in seen and words[-16:] not in seen


# ------------------------------------------------------------------------------------------------ the audit


@pytest.mark.parametrize("hardened", [False, True])
def test_paired_steps_find_no_more_than_was_claimed(hardened: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return model(x).flatten(1).sum(1) * y

    subject = AuditTarget(model=model, plan=plan_for(model), losses_of=losses_of, hardened=hardened)
    checks = audit_step(subject, Batch(torch.randn(5, 6), torch.full((5,), 9.0)), quick=True)
    assert all(check.verdict is Verdict.PASSED for check in checks)
