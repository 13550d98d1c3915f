"""Dropout and augmentation of a run: random to everybody outside, the same again when a segment is replayed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lamina.engine.stream import Purpose, step_key


def reseed(seed: bytes, *, step: int, purpose: Purpose, rank: int = 0) -> None:
    """Put torch's, numpy's and Python's global generators at the start of one step's stream.

    Models and datasets draw from these generators. Their randomness carries no guarantee (the coins and the noise
    have streams of their own), it only has to be the same in a replay.
    """
    key = step_key(seed, step=step, rank=rank, purpose=purpose)
    torch.default_generator.manual_seed(int.from_bytes(key[:8], "big") >> 1)
    np.random.seed(np.frombuffer(key, dtype=np.uint32))  # noqa: NPY002  # datasets draw from the global generator
    random.seed(key)


def seed_all(seed: int) -> None:
    """The same public seed for all three."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


@contextmanager
def borrowed_generators() -> Iterator[None]:
    """Leave the caller's global generators as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
