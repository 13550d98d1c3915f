"""The sources: determinism, hardening, refusals, secrecy. The draws themselves: test_noise_normal.py."""

from __future__ import annotations

import copy
import math
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.engine.noise import GRID_BITS, NoiseBuffers, NoiseSource, SecureNoise, SeededNoise, rounding_grid
from lamina.engine.random_stream import CELL_ELEMENTS, PACK_BELOW_ELEMENTS
from lamina.errors import NoiseError

DRAWS = 10_000_000


def draw(
    source: NoiseSource,
    size: int,
    std: float = 1.0,
    *,
    step: int = 0,
    tensor: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = torch.full((size,), math.nan, dtype=dtype)
    source.fill_(out, std, step=step, tensor=tensor)
    return out


# ----------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_packing_and_company_change_nothing(hardened: bool, dtype: torch.dtype) -> None:
    sizes = [3, PACK_BELOW_ELEMENTS - 1, CELL_ELEMENTS + 1, 1, 0, 2 * CELL_ELEMENTS + 77, PACK_BELOW_ELEMENTS, 129, 2]
    source = SeededNoise(5, hardened=hardened)
    alone = [draw(source, n, 0.5 + i, step=2, tensor=i, dtype=dtype) for i, n in enumerate(sizes)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            together = [torch.zeros(n, dtype=dtype) for n in sizes]
            source.add_many_(together, [0.5 + i for i in range(len(sizes))], step=2)
            for a, b in zip(alone, together, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)
    order = list(range(len(sizes)))[::-1]
    backwards = [torch.zeros(sizes[i], dtype=dtype) for i in order]
    source.add_many_(backwards, [0.5 + i for i in order], step=2, tensors=order)
    assert all(torch.equal(alone[i], b) for i, b in zip(order, backwards, strict=True))


@settings(max_examples=30, deadline=None)
@given(
    size=st.one_of(
        st.integers(1, 70),
        st.sampled_from(
            [
                PACK_BELOW_ELEMENTS - 1,
                PACK_BELOW_ELEMENTS + 1,
                CELL_ELEMENTS - 1,
                CELL_ELEMENTS,
                CELL_ELEMENTS + 3,
                2 * CELL_ELEMENTS + 5,
            ]
        ),
    )
)
def test_every_element_is_noised_once(size: int) -> None:
    out = torch.full((size,), 1e6, dtype=torch.float64)
    SeededNoise(1).add_(out, 1.0, step=0)
    z = out - 1e6
    assert bool((z != 0).all())
    assert float(z.abs().max()) < 7
    assert torch.allclose(z, draw(SeededNoise(1), size, dtype=torch.float64), atol=1e-9)


def test_mixed_dtypes_in_one_call() -> None:
    source = SeededNoise(2)
    outs = [torch.zeros(100), torch.zeros(100, dtype=torch.float64), torch.zeros(7)]
    source.add_many_(outs, [1.0, 2.0, 3.0], step=0)
    for i, out in enumerate(outs):
        assert torch.equal(out, draw(source, out.numel(), i + 1.0, tensor=i, dtype=out.dtype))


def test_non_contiguous_tensors_get_the_noise_of_their_logical_order() -> None:
    out = torch.ones(30, 40).t()
    assert not out.is_contiguous()
    SeededNoise(9).add_(out, 1.0, step=0)
    assert torch.equal(out.reshape(-1), 1 + draw(SeededNoise(9), 1200))


def test_autograd_sees_the_change() -> None:
    out = torch.zeros(5, requires_grad=True)
    before = out._version
    SeededNoise(9).add_(out, 1.0, step=0)
    assert out._version > before
    assert out.requires_grad
    assert out.grad_fn is None


# -------------------------------------------------------------------------------------------- hardened


@pytest.mark.parametrize("std", [1.0, 0.75, 3.1e-5, 1.99999, 4096.0])
def test_hardened_results_lie_on_a_grid_that_depends_on_std_alone(std: float) -> None:
    spacing = rounding_grid(std)
    assert math.frexp(spacing)[0] == 0.5
    assert 2**GRID_BITS <= std / spacing < 2 ** (GRID_BITS + 1)
    total = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * std * 3
    plain, hard = total.clone(), total.clone()
    SeededNoise(1).add_(plain, std, step=0)
    SeededNoise(1, hardened=True).add_(hard, std, step=0)
    steps = hard.double() / spacing
    assert torch.equal(steps, steps.round())
    assert float((plain.double() - hard.double()).abs().max()) <= spacing / 2 * (1 + 1e-2)
    exact = total.double() + draw(SeededNoise(1), 10_000, std, dtype=torch.float64)
    assert torch.equal(hard.double(), (exact / spacing).round() * spacing)


def test_declared() -> None:
    assert SecureNoise().private
    assert not SecureNoise().hardened
    assert SecureNoise(hardened=True).hardened
    assert not SeededNoise(1).private


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("std", [-1.0, -1e-300, math.nan, math.inf, -math.inf, 1e31, 1e-31])
def test_bad_std_is_refused_before_anything_changes(std: float) -> None:
    outs = [torch.zeros(4), torch.zeros(4)]
    source = SecureNoise()
    with raises_code("noise.std-out-of-range"):
        source.add_many_(outs, [1.0, std], step=0)
    assert not outs[0].any()
    source.add_many_(outs, [1.0, 1.0], step=0)  # nothing was spent


def test_no_std_no_noise() -> None:
    outs = [torch.ones(4), torch.ones(4)]
    SecureNoise(hardened=True).add_many_(outs, [0.0, 1.0], step=0)
    assert torch.equal(outs[0], torch.ones(4))
    assert not torch.equal(outs[1], torch.ones(4))
    SecureNoise().fill_(outs[0], 0.0, step=0)
    assert torch.equal(outs[0], torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_low_precision_is_refused(dtype: torch.dtype) -> None:
    with raises_code("noise.tensor-dtype"):
        SecureNoise().add_(torch.zeros(4, dtype=dtype), 1.0, step=0)


def test_memory_that_is_shared_is_refused() -> None:
    with raises_code("noise.tensor-shares-memory"):
        SecureNoise().add_(torch.zeros(1, 3).expand(4, 3), 1.0, step=0)
    x = torch.zeros(4)
    with raises_code("noise.tensor-shares-memory"):
        SecureNoise().add_many_([x, x.view(2, 2)], [1.0, 1.0], step=0)


def test_other_devices_and_layouts_are_refused() -> None:
    for bad in (torch.zeros(4, device="meta"), torch.zeros(4, 4).to_sparse()):
        with raises_code("noise.tensor-not-dense"):
            SecureNoise().add_(bad, 1.0, step=0)


@pytest.mark.parametrize("tensors", [[0], [0, 0], [0, -1], [0, 1 << 64], [0, 1, 2]])
def test_bad_indices_are_refused(tensors: list[int]) -> None:
    with raises_code("noise.tensor-index", "noise.lengths-differ"):
        SecureNoise().add_many_([torch.zeros(2), torch.zeros(2)], [1.0, 1.0], step=0, tensors=tensors)


def test_empty_tensors_and_empty_calls() -> None:
    SecureNoise().add_many_([], [], step=0)
    SecureNoise().add_many_([torch.zeros(0), torch.zeros(3, 0)], [1.0, 1.0], step=0)


# --------------------------------------------------------------------------------------------- secrecy


def test_a_secure_source_never_draws_twice() -> None:
    source = SecureNoise()
    x = torch.zeros(4)
    source.add_(x, 1.0, step=3, tensor=0)
    source.add_(x, 1.0, step=3, tensor=1)
    kept = x.clone()
    for again in (source.add_, source.fill_):
        with raises_code("noise.drawn-twice"):
            again(x, 1.0, step=3, tensor=1)
    source.add_(torch.zeros(4), 1.0, step=4, tensor=1)
    with raises_code("noise.step-repeated"):
        source.add_(x, 1.0, step=3, tensor=7)
    assert torch.equal(x, kept)


def test_two_secure_sources_share_nothing() -> None:
    a, b = (draw(SecureNoise(), 200_000, dtype=torch.float64).numpy() for _ in range(2))
    assert not np.intersect1d(a, b).size
    assert abs(np.dot(a, b)) < 7 * math.sqrt(a.size)


def test_a_journal_replays_and_only_a_journal() -> None:
    seed = os.urandom(32)
    x = draw(SecureNoise.of_journal(seed, hardened=True), 1000, step=5)
    replayed = SecureNoise.of_journal(seed, hardened=True)
    assert replayed.private
    assert torch.equal(x, draw(replayed, 1000, step=5))
    with raises_code("noise.drawn-twice"):
        draw(replayed, 1000, step=5)
    assert not torch.equal(x, draw(SecureNoise.of_journal(seed, rank=1, hardened=True), 1000, step=5))
    for bad in (bytes(32), b"secret" * 5 + b"se", os.urandom(31)):
        with pytest.raises(NoiseError):
            SecureNoise.of_journal(bad)


@pytest.mark.parametrize("source", [SecureNoise(), SeededNoise(123456789)])
def test_no_copies_and_no_seed_in_sight(source: NoiseSource) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with raises_code("noise.source-copied"):
            attempt(source)
    shown = repr(source) + str(source)
    assert "123456789" not in shown
    assert source._seed.hex() not in shown
    assert repr(source._seed) not in shown


def in_child(work: object) -> bytes:
    """What `work` returns in a forked child."""
    assert callable(work)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, work())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_cannot_repeat_its_parent() -> None:
    source = SecureNoise()
    draw(source, 8)

    def attempt() -> bytes:
        try:
            draw(source, 8, step=1)
        except NoiseError as error:
            return error.problem.encode()
        return b"drawn"

    assert b"belongs to the parent process" in in_child(attempt)
    assert draw(source, 8, step=1).isfinite().all()  # the parent goes on
    assert in_child(lambda: draw(SecureNoise(), 8).numpy().tobytes()) != in_child(
        lambda: draw(SecureNoise(), 8).numpy().tobytes()
    )


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    def last() -> bytes:
        out = np.zeros(
            4 * CELL_ELEMENTS, dtype=np.float32
        )  # torch's own threads do not survive a fork: not torch.zeros
        SeededNoise(1).add_(torch.from_numpy(out), 1.0, step=0)
        return out[-100:].tobytes()

    parent = last()  # and now its pool exists
    assert in_child(last) == parent


def test_workspace_has_room_for_a_cell() -> None:
    space = NoiseBuffers()
    assert space.words.size >= CELL_ELEMENTS + 2
    r, theta, scratch = space.polar(CELL_ELEMENTS // 2, torch.float32)
    assert r.size == theta.size == scratch.size == CELL_ELEMENTS // 2
