"""The weights as a file for others: safetensors, the model's own names."""

from __future__ import annotations

from safetensors.torch import save
from torch import nn

from lamina.train.ema import MovingAverage


def weights_file(model: nn.Module, average: MovingAverage | None) -> bytes:
    """What `model.load_state_dict(safetensors.torch.load_file(path))` reads; the moving average if one is given."""
    if average is not None:
        with average.applied():
            return weights_file(model, None)
    tensors = {name: t.detach().clone().contiguous() for name, t in model.state_dict().items()}
    return save(tensors, metadata={"format": "pt"})
