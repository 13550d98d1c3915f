"""A run of several ranks: rank 0 leads it and alone writes checkpoints and ledger; the others take its steps.

    check    every rank has the same plan, options, contributions, data, threads, program and weights; before any charge
    capture  of a model under fully_shard, every rank gives its part: rank 0 writes the whole
    state    weights, optimiser and counters of rank 0, at the start and after steps that were abandoned
    segment  first and last step, seed and factors of the segment that rank 0 opened and charged
    end      what the run came to; or why rank 0 stopped

Messages are CBOR. The seed decides coins and noise of the segment: whoever can read the messages is trusted like a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lamina import cbor
from lamina.engine.distributed import Ranks
from lamina.errors import LaminaError, RankLost, RunError
from lamina.run.corpus import Corpus
from lamina.run.publisher import Outcome
from lamina.run.run_record import AttemptOpened
from lamina.run.training_checkpoint import (
    CheckpointArchive,
    TrainingCheckpoint,
    TrainingState,
    decode_body,
    torch_dtype,
)

if TYPE_CHECKING:
    from lamina.run.trainer import Trainer

_MESSAGE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class LedSegment:
    """What a rank that does not lead knows of an open segment."""

    segment: int
    generation: int
    first: int
    last: int
    seed: bytes = field(repr=False)
    factors: Mapping[str, float]


class RunLead:
    """Rank 0's side of the messages; of a process by itself, nothing. `waiting`: the others wait for a message."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.waiting = ranks, True

    def _tell(self, kind: str, *, waiting: bool = True, **what: Any) -> None:
        message = cbor.encode({"kind": kind, **what}, floats=True, null=True, max_size=_MESSAGE_BYTES)
        self.waiting = waiting
        self.ranks.broadcast(message)

    def check(
        self, corpus: Corpus, salt: bytes, facts: Callable[[bytes], Mapping[str, bytes]], *, hardened: bool
    ) -> None:
        """Refuse, on all ranks, to go on if one of them differs. Who is not eligible here is nowhere.

        `hardened`: the kind of noise of the run, which a rank to which none was named takes over.
        """
        if not self.ranks.alone:
            members = corpus.eligible.astype("<i8").tobytes()
            self._tell("check", waiting=False, salt=salt, members=members, hardened=hardened)
            self.ranks.check_same(**facts(salt))
            self.waiting = True

    def state(self, state: TrainingState) -> None:
        """Give every rank the state of this one."""
        if self.ranks.alone:
            state.restored = None
            return
        snapshot = state.whole()
        archive = CheckpointArchive.of(0, snapshot.tensors, snapshot.state)
        table = [[name, str(t.dtype), list(t.shape)] for name, t in archive.tensors.items()]
        self._tell("state", waiting=False, body=archive.body, table=table)
        for tensor in archive.tensors.values():
            self.ranks.broadcast_tensor(tensor.to(self.ranks.device).contiguous().reshape(-1).view(torch.uint8))
        self.waiting = True

    def capture(self) -> None:
        """The others give their parts of a sharded model now."""
        self._tell("capture")

    def segment(self, opened: AttemptOpened | LedSegment) -> None:
        """The others take these steps now: until `segment_over` they wait for sums, not for messages."""
        if not self.ranks.alone and self.ranks.first:
            told = {name: getattr(opened, name) for name in ("segment", "generation", "first", "last", "seed")}
            self._tell("segment", waiting=False, **told, factors=dict(opened.factors))

    def segment_over(self) -> None:
        self.waiting = True

    def end(self, outcome: Outcome) -> None:
        if not self.ranks.alone:
            plain = {**asdict(outcome), "folder": str(outcome.folder), "notes": list(outcome.notes)}
            self._tell("end", waiting=False, outcome=plain)

    def stopped(self, error: BaseException) -> None:
        """Tell the others, if they wait, that rank 0 stopped."""
        if not self.ranks.alone and self.waiting:
            with suppress(RankLost):
                code = error.code if isinstance(error, LaminaError) else type(error).__name__
                self._tell("stopped", waiting=False, code=code)


def follow(trainer: Trainer, ranks: Ranks) -> Outcome:
    """Do what rank 0 tells, until it tells what the run came to."""
    while True:
        told = cbor.decode(ranks.broadcast(None), floats=True, null=True, max_size=_MESSAGE_BYTES)
        kind = told.pop("kind")
        if kind == "check":
            trainer.corpus.keep_only(np.frombuffer(told["members"], dtype="<i8").astype(np.int64))
            trainer.keep_hardened(told["hardened"])
            ranks.check_same(**trainer.facts_of_rank(told["salt"]))
        elif kind == "state":
            trainer.state.restore(_received_state(ranks, told))
        elif kind == "capture":
            trainer.state.take_part_in_capture()
        elif kind == "segment":
            trainer.take_led_segment(LedSegment(**told))
        elif kind == "end":
            plain = told["outcome"]
            return Outcome(**{**plain, "folder": Path(plain["folder"]), "notes": tuple(plain["notes"])})
        else:
            problem = f"rank 0 stopped ({told['code']}), and rank {ranks.rank} with it"
            raise RunError("train.rank-0-stopped", problem, "rank 0 says why; the same command goes on from there")


def _received_state(ranks: Ranks, told: Mapping[str, Any]) -> TrainingCheckpoint:
    tensors = {}
    for name, dtype, shape in told["table"]:
        made = torch.empty(shape, dtype=torch_dtype(dtype), device=ranks.device)
        raw = made.reshape(-1).view(torch.uint8)
        ranks.broadcast_tensor(raw)
        tensors[name] = raw.view(made.dtype).view(shape).to("cpu")
    content = decode_body(told["body"])
    tensors |= {name: tensors[same] for name, same in content["alias"].items()}
    return TrainingCheckpoint(tensors=tensors, state=content["state"])
