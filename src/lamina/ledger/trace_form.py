"""A trace as machines read it."""

from __future__ import annotations

import math
from typing import Any

from lamina.admit.times import shown
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Epoch, Release, Withdrawal
from lamina.ledger.show import plain
from lamina.ledger.trace import Exposure, Trace


def as_object(found: Trace) -> dict[str, Any]:
    """Digests in hexadecimal, times as UTC, ε as plain numbers, null where it is infinite."""
    record = found.record
    return {
        "index": found.leaf.seq,
        "admitted": shown(found.leaf.time),
        "descriptor": record.descriptor.hex(),
        "anchor": None if record.anchor is None else record.anchor.hex(),
        "attestation": record.attestation.hex(),
        "key": record.key.hex(),
        "class": record.terms.cls,
        "data_class": record.terms.data_class,
        "clip_norm": record.terms.clip_norm / 1e6,
        "noise_multiplier": record.terms.noise_multiplier / 1e6,
        "profile": record.terms.profile,
        "not_before": shown(record.not_before),
        "expires": shown(record.expires),
        "epsilon": plain(found.spend),
        "epsilon_signed": None if found.signed is None else plain(found.signed),
        "epsilon_remaining": None if found.remaining is None else plain(found.remaining),
        "epochs": [_epoch(each) for each in found.epochs],
        "not_used_in": found.unused,
        "withdrawn": None if found.withdrawal is None else _withdrawal(found.withdrawal),
        "releases": [_release(each) for each in found.releases],
    }


def _epoch(each: Exposure) -> dict[str, Any]:
    epoch = each.leaf.record
    assert isinstance(epoch, Epoch)
    return {
        "index": each.leaf.seq,
        "time": shown(each.leaf.time),
        "run": epoch.run.hex(),
        "plan": epoch.plan.hex(),
        "segments": [
            {"segment": one.index, "generation": one.generation, "steps": [one.first, one.last],
             "outcome": one.outcome.name.lower()}
            for one in each.segments
        ],
        "variance": each.variance,
        "multiplier": each.multiplier if math.isfinite(each.multiplier) else None,
        "steps": each.steps,
        "epsilon": plain(each.spend),
        "epsilon_account": plain(each.account),
        "own_account": each.own,
    }  # fmt: skip


def _withdrawal(leaf: Leaf) -> dict[str, Any]:
    record = leaf.record
    assert isinstance(record, Withdrawal)
    return {
        "index": leaf.seq,
        "time": shown(leaf.time),
        "reason": record.reason.name.lower(),
        "effect": record.effect.name.lower(),
        "request": None if record.request is None else record.request.hex(),
    }


def _release(leaf: Leaf) -> dict[str, Any]:
    record = leaf.record
    assert isinstance(record, Release)
    return {
        "index": leaf.seq,
        "time": shown(leaf.time),
        "manifest": record.manifest.hex(),
        "runs": [run.hex() for run in record.runs],
        "not_after": None if record.not_after is None else shown(record.not_after),
    }
