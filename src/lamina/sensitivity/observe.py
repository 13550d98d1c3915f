"""What is noted of every operation while proxy inputs run through a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lamina.errors import PlanError
from lamina.sensitivity.attention import softmax_jacobian_norm
from lamina.sensitivity.graph import Graph, Node
from lamina.sensitivity.kinds import SAME_ENTRIES, Kind
from lamina.sensitivity.moments import Average, Moments, Sample
from lamina.sensitivity.printed import attention_printed
from lamina.sensitivity.record import NodeProfile, PreActivation

SAMPLE = 4096
"""Entries from which a KS distance is read; for Gaussian data it then reads about 0.013 instead of 0."""

MOST_UNITS = 4096
MATRICES = 4
"""Patients per batch whose matrices are looked at for spectral norms."""

_CHANNELS_FIRST = {Kind.CONV, Kind.POOL, Kind.RESAMPLE}
_CHANNEL_NORMS = {"group_norm", "batch_norm", "instance_norm"}


class Observer:
    """Streams statistics of the nodes of `graph`; nothing grows with the number of passes."""

    def __init__(self, graph: Graph, batches: int, generator: torch.Generator) -> None:
        self.graph = graph
        self._nodes = {node.name: node for node in graph}
        self._logits = _logits(graph)
        self._entering = {node.inputs[0] for node in graph if node.kind is Kind.ACTIVATION}
        self._moments: defaultdict[str, Moments] = defaultdict(Moments)
        self._samples = {name: Sample(SAMPLE, batches, generator) for name in sorted(self._entering)}
        self._seen: defaultdict[str, Average] = defaultdict(Average)
        self._jacobian: defaultdict[str, Average] = defaultdict(Average)
        self._peak: defaultdict[str, Average] = defaultdict(Average)
        self._norms: defaultdict[str, Average] = defaultdict(Average)

    def __call__(self, node: fx.Node, given: Mapping[str, Any], value: Any) -> None:
        """Called for every operation; only those that depend on the input are noted."""
        mine = self._nodes.get(node.name)
        if mine is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        if mine.name in self._entering:
            axis = self._unit_axis(mine, value)
            self._moments[mine.name].add(value, axis)
            self._samples[mine.name].add(value)
        elif mine.base not in SAME_ENTRIES:
            masked = mine.name in self._logits and (value == -math.inf).any()
            self._moments[mine.name].add(value[value != -math.inf] if masked else value)
        if mine.kind is Kind.NORM:
            variance = _divided_by(mine.base, given)
            if variance is not None:
                self._seen[mine.name].add(variance)
        elif mine.kind is Kind.ATTENTION:
            self._attention(mine.name, given)
        elif mine.kind is Kind.SOFTMAX:
            self._rows(mine.name, value.movedim(given["dim"], -1))
        elif mine.kind is Kind.PRODUCT and mine.base != "mul":
            left, right = factors(mine.base, given)
            self._norms[mine.name].add(torch.stack((_spectral(left), _spectral(right))).reshape(1, 2))

    def results(self) -> tuple[NodeProfile, ...]:
        """One record for every node that holds floating-point numbers."""
        return tuple(self._result(node) for node in self.graph if self._source(node) is not None)

    # ----------------------------------------------------------------------------------- within

    def _source(self, node: Node) -> str | None:
        """The node whose moments are this node's: itself, or what it is a mere rearrangement of."""
        while node.name not in self._moments:
            if node.base not in SAME_ENTRIES or not node.inputs:
                return None
            node = self._nodes[node.inputs[0]]
        return node.name

    def _result(self, node: Node) -> NodeProfile:
        moments = self._moments[str(self._source(node))]
        if not (math.isfinite(moments.mean) and math.isfinite(moments.variance)):
            raise PlanError(
                "measure.not-finite-proxy",
                f"{node} is not finite on the proxy inputs",
                "check the weights for NaN, or give smaller inputs",
            )

        def number(found: dict[str, Average]) -> float | None:
            return found[node.name].value[0] if node.name in found else None

        return NodeProfile(
            name=node.name,
            operation=node.operation,
            kind=node.kind,
            module=node.module,
            mean=moments.mean,
            variance=moments.variance,
            before=self._before(node.inputs[0]) if node.kind is Kind.ACTIVATION else None,
            seen=self._seen[node.name].value if node.name in self._seen else (),
            jacobian=number(self._jacobian),
            peak=number(self._peak),
            norms=self._norms[node.name].value if node.name in self._norms else (),
        )

    def _before(self, name: str) -> PreActivation:
        moments = self._moments[name]
        means, variances = moments.units
        many = 1 < len(means) <= MOST_UNITS
        return PreActivation(
            mean=moments.mean,
            variance=moments.variance,
            ks=self._samples[name].distance(moments.mean, moments.variance),
            unit_means=means if many else (),
            unit_variances=variances if many else (),
        )

    def _unit_axis(self, node: Node, value: Tensor) -> int | None:
        """The axis of channels after a convolution and the like, else the last one."""
        if value.ndim < 2:
            return None
        while node.kind in (Kind.ADD, Kind.SCALE, Kind.DROPOUT, Kind.ACTIVATION):
            node = self._nodes[node.inputs[0]]
        first = node.kind in _CHANNELS_FIRST or node.base in _CHANNEL_NORMS
        axis = 1 if first else value.ndim - 1
        return axis if value.shape[axis] <= MOST_UNITS else None

    def _attention(self, name: str, given: Mapping[str, Any]) -> None:
        q, k, v = (given[part][:MATRICES].detach().double() for part in ("query", "key", "value"))
        scale = given.get("scale") or 1 / math.sqrt(q.shape[-1])
        if given.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        logits = (q @ k.mT) * scale
        mask = given.get("attn_mask")
        if given.get("is_causal"):
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if isinstance(mask, Tensor):
            mask = mask[:MATRICES] if mask.ndim == q.ndim and mask.shape[0] > 1 else mask
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        weights = logits.softmax(-1)
        self._rows(name, weights)
        whole = weights.nan_to_num(0.0)
        norms = (_spectral(whole), _spectral(q), _spectral(k), _spectral(v))
        self._norms[name].add(torch.stack(norms).reshape(1, 4))

    def _rows(self, name: str, weights: Tensor) -> None:
        rows = weights[:MATRICES].detach().double().reshape(-1, weights.shape[-1])
        rows = rows[rows.isfinite().all(-1)]  # a row whose keys are all masked has no weights
        if len(rows):
            self._jacobian[name].add(softmax_jacobian_norm(rows))
            self._peak[name].add(attention_printed(rows))


def _logits(graph: Graph) -> set[str]:
    """The nodes that only lead to a softmax, where a mask of -∞ is no overflow."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        readers = graph.readers(node.name)
        only = bool(readers) and all(r.kind is Kind.SOFTMAX or r.name in found for r in readers)
        if only and node.kind in (Kind.ADD, Kind.SCALE, Kind.RESHAPE, Kind.PRODUCT):
            found.add(node.name)
    return found


def _spectral(matrices: Tensor) -> Tensor:
    """The mean spectral norm of a stack of matrices."""
    m = matrices[:MATRICES].detach().double()
    gram = m @ m.mT if m.shape[-2] <= m.shape[-1] else m.mT @ m
    found: Tensor = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt().mean()
    return found


def factors(base: str, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Left and right factor of a product of matrices."""
    left, right = {"baddbmm": ("batch1", "batch2"), "matmul": ("self", "other")}.get(base, ("self", "mat2"))
    return given[left], given[right]


def _divided_by(base: str, given: Mapping[str, Any]) -> Tensor | None:
    """The variance that a normalisation finds in its input: (rows, groups); None if it is fixed."""
    x: Tensor = given["input"].detach().float()
    if base == "layer_norm":
        return _variance(x.flatten(-len(given["normalized_shape"]))).reshape(-1, 1)
    if base == "rms_norm":
        return x.flatten(-len(given["normalized_shape"])).square().mean(-1).reshape(-1, 1)
    if base == "group_norm":
        return _variance(x.reshape(x.shape[0], given["num_groups"], -1))
    if base == "instance_norm":
        return _variance(x.flatten(2))
    return None


def _variance(x: Tensor) -> Tensor:
    """Along the last axis, over n."""
    return (x - x.mean(-1, keepdim=True)).square_().mean(-1)
