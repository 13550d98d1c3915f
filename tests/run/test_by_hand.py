"""A segment by hand: coins, clipped sums, noise and optimiser, worked out from the journalled seed without the trainer.

Coins by AES in counter mode from `cryptography`, per-contribution gradients by `torch.func`, sums and updates in plain
torch. Only the noise is the project's own; its distribution and its stream have tests of their own.
"""

from __future__ import annotations

import hmac
from pathlib import Path

import numpy as np
import problem
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from run_state import set_seeds
from torch import Tensor, nn
from torch.func import functional_call, grad

import lamina
from lamina import SecureNoise, StepPlan

SEED = bytes(range(7, 39))


def coins(step: int, row: int, members: int) -> np.ndarray:
    """The first 32-bit words of a class's coins: HKDF (RFC 5869), then AES-CTR."""
    info = b"lamina/stream/1" + b"coins".ljust(16, b"\0") + step.to_bytes(8, "big") + bytes(4)
    key = hmac.digest(hmac.digest(bytes(32), SEED, "sha256"), info + b"\1", "sha256")[:16]
    stream = Cipher(algorithms.AES(key), modes.CTR(row.to_bytes(8, "big") + bytes(8))).encryptor()
    return np.frombuffer(stream.update(bytes(4 * members + 16)), dtype="<u4")[:members]


def clipped_sum(model: nn.Module, plan: StepPlan, data: dict[str, np.ndarray], step: int) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return problem.loss(functional_call(model, values, (x,)), y).mean()

    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    owner = np.array([data["cls"][np.flatnonzero(data["unit"] == u)[0]] for u in range(400)])
    for row, entry in enumerate(plan.classes):
        members = np.flatnonzero(owner == entry.name)
        drawn = members[coins(step, row, len(members)).astype(np.float64) / 2**32 < entry.sampling_rate]
        for unit in drawn:
            rows = data["unit"] == unit
            gradient = grad(loss)(parameters, torch.from_numpy(data["x"][rows]), torch.from_numpy(data["y"][rows]))
            for name, part in clipped(gradient, plan, row).items():
                sums[name] += part
    return sums


def clipped(gradient: dict[str, Tensor], plan: StepPlan, row: int) -> dict[str, Tensor]:
    """Joint clipping: the vector of g/S over the layers reached, to 1/sigma; a public class as it is."""
    reached = [i for i, c in enumerate(plan.clip[row]) if c > 0]
    names = {name: i for i in reached for name in plan.layers[i].parameters}
    if plan.classes[row].public:
        return {name: gradient[name] for name in names}
    scaled = [gradient[name].double() / plan.noise[i] for name, i in names.items()]
    norm = float(torch.sqrt(sum((s**2).sum() for s in scaled)))
    factor = min(1.0, plan.joint(row) / norm)
    return {name: gradient[name] * factor for name in names}


@pytest.mark.parametrize("steps", [1, 4])
def test_a_segment_is_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    set_seeds(monkeypatch, lambda: SEED)
    data = problem.data()
    torch.manual_seed(0)
    model = problem.net(dropout=0.0)
    by_hand = problem.net(dropout=0.0)
    by_hand.load_state_dict(model.state_dict())
    plan = problem.plan(model, steps=steps)
    assert plan.clipping is lamina.Clipping.JOINT
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"scheduler": None, "segment": steps, "hardened": False}  # a rounded sum hides small differences
    problem.trainer(tmp_path / "a", model=model, plan=plan, optimizer=optimizer, **options).fit()
    noise = SecureNoise.of_segment(SEED, hardened=False)
    names = [name for layer in plan.layers for name in layer.parameters]
    stds = [plan.noise[i] / plan.batch for i, layer in enumerate(plan.layers) for _ in layer.parameters]
    for step in range(steps):
        sums = clipped_sum(by_hand, plan, data, step)
        drawn = [torch.empty_like(sums[name]) for name in names]
        noise.fill_many_(drawn, stds, step=step)
        with torch.no_grad():
            for name, z in zip(names, drawn, strict=True):
                by_hand.get_parameter(name).sub_(0.1 * (sums[name] / plan.batch + z))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, by_hand.get_parameter(name), rtol=1e-4, atol=1e-6)
