"""How a step is carried out: routing, clipping, noise."""

from __future__ import annotations

from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise import NoiseSource, SecureNoise, SeededNoise
from lamina.engine.route import route
from lamina.engine.scope import examples, rows

__all__ = ["Batch", "Engine", "NoiseSource", "SecureNoise", "SeededNoise", "examples", "route", "rows"]
