"""How a step is carried out: routing, clipping, noise."""

from __future__ import annotations

from lamina.engine.batch import Batch, examples, rows
from lamina.engine.engine import Engine
from lamina.engine.noise.source import NoiseSource, SecureNoise, SeededNoise
from lamina.engine.reference import route
from lamina.engine.rules.proxy import Proxy

__all__ = ["Batch", "Engine", "NoiseSource", "Proxy", "SecureNoise", "SeededNoise", "examples", "route", "rows"]
