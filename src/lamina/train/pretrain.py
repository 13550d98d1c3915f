"""`pretrain`: learn from public or simulated data first, which costs nothing, and let private data change the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina import validate
from lamina.engine.batch import take_rows
from lamina.engine.probe import preserve_global_generators
from lamina.errors import RunError
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import LayerStack, call_arguments


def pretrain(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any = None, *, proxy: str, steps: int = 1000,
    batch: int = 128, lr: float = 1e-3, seed: int = 0, private_top: float | None = None,
) -> list[float]:  # fmt: skip
    """Train `model` in place on public or simulated examples, with Adam, and a learning rate that falls as a cosine.

    loss_fn      as for `Trainer`: (output, y), or (output, x) without y, gives one loss per example
    proxy        where x comes from: 'public' or 'simulated', a remark may follow ("simulated: ECG")
    private_top  afterwards freeze all but the top share of the depth, so that private contributions reach that band alone:
                 fewer numbers are noised. Worth it where the simulation is good; default: everything stays trainable

    Returns the mean loss of every step. No step of it is private or needs to be: never give it private data. Equal
    arguments give equal weights.
    """
    if proxy.partition(":")[0].strip() not in ("public", "simulated"):
        problem = f"the model is to be pre-trained on data called {proxy!r}"
        remedy = "give public or simulated data and say so: proxy='simulated: ECG'; private data go to lamina.Trainer"
        raise RunError("train.pretrain-not-public", problem, remedy)
    validate.whole(RunError, "train.not-a-count", steps=steps)
    validate.whole(RunError, "train.not-a-count", batch=batch)
    validate.positive(RunError, "train.lr-not-positive", lr=lr)
    rows = next(len(t) for t in pytree.tree_leaves(x) if isinstance(t, Tensor))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, losses, mode = torch.Generator().manual_seed(seed), [], model.training
    model.train()
    with preserve_global_generators(), torch.enable_grad():
        torch.manual_seed(seed)
        for _ in range(steps):
            part_x, part_y = take_rows((x, y), torch.randint(rows, (min(batch, rows),), generator=generator))
            args, named = call_arguments(part_x)
            loss = loss_fn(model(*args, **named), part_x if y is None else part_y).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    optimizer.zero_grad()
    model.train(mode)
    if private_top is not None:
        stack = LayerStack.from_model(model)
        tensors = dict(model.named_parameters())
        for layer, kept in zip(stack, DepthProfile.top(private_top).resolve(stack), strict=True):
            for name in () if kept else layer.parameters:
                tensors[name].requires_grad_(False)
    return losses
