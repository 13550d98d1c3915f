"""`Release`: a model left, under a manifest."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.ledger.records.fields import DIGEST, RUN, TIME, Many, check, define


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The digest of the manifest, the runs whose training is in the model, and until when it may be served.

    Which contributions are in it follows from the epochs of those runs before this leaf.
    """

    manifest: bytes
    runs: tuple[bytes, ...]
    not_after: int | None = None

    def __post_init__(self) -> None:
        check(self)


define(
    Release,
    {1: ("manifest", DIGEST), 2: ("runs", Many(RUN, 0, 1024)), 3: ("not_after", TIME)},
    optional=[3],
)
