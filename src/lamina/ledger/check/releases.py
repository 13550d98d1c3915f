"""Releases: of runs that are in the ledger, under a manifest that is what the leaf names."""

from __future__ import annotations

import hashlib
from collections.abc import Container

from lamina.admit.times import shown
from lamina.ledger.check.problem import bad
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Release
from lamina.ledger.store.base import Reader


def check_release(leaf: Leaf, runs: Container[bytes], rows: Reader) -> None:
    """`runs` are those that have an epoch before it."""
    record, seq = leaf.record, leaf.seq
    assert isinstance(record, Release)
    for run in record.runs:
        if run not in runs:
            bad(
                seq,
                Release,
                "verify.run-model-no",
                f"run {run.hex()[:8]} is in the model, and no epoch of it is in the ledger before",
            )
    if len(set(record.runs)) < len(record.runs):
        bad(seq, Release, "verify.run-named-twice", "a run is named twice")
    if record.not_after is not None and record.not_after <= leaf.time:
        bad(
            seq,
            Release,
            "verify.served-until",
            f"it may be served until {shown(record.not_after)}, and is of {shown(leaf.time)}",
        )
    data = rows.blob(record.manifest)
    if data is not None and hashlib.sha256(data).digest() != record.manifest:
        bad(
            seq,
            Release,
            "verify.manifest-kept-another",
            "the manifest that is kept is another one than it names",
        )
