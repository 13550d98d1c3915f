"""`AdmittedCorpus`: contributions that were let in by signature, each under the bound that it signed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.admit.admission import Admission
from lamina.admit.bound import Bound
from lamina.admit.keyring import KeyRing
from lamina.admit.reason import Reason
from lamina.admit.resolution import Resolution
from lamina.engine.batch import Batch
from lamina.engine.stream import SEED_BYTES
from lamina.errors import CorpusError
from lamina.plan import Clipping, Policy, StepPlan
from lamina.train.book.account import Account, name_of
from lamina.train.corpus.corpus import Corpus, Limits
from lamina.train.corpus.folder import FolderSource
from lamina.train.corpus.sampler import Sampler
from lamina.train.corpus.text import Texts

MOST_BOUNDS = 1000  # distinct bounds of a corpus: each is an account, and all of them stand in each epoch


class AdmittedCorpus(Corpus):
    """Made by `lamina.Gate.admit`. `admission` says who was let in and who was not, and why.

    Under a plan every contribution keeps to what it signed: `limits_of` gives its scale and ceiling to the batches, a
    bound that no scale keeps is never sampled, and `accounts` has one account per distinct bound, which the ledger
    holds to over all runs. `renew` looks at windows and keys again: whoever is out is withdrawn.
    """

    def __init__(
        self,
        source: FolderSource,
        admission: Admission,
        *,
        ids: list[str],
        subject: list[str] | None,
        policy: Policy,
        keys: Callable[[], KeyRing | None],
        examples_per_unit: int | None = None,
    ) -> None:
        names = admission.classes
        super().__init__(
            source,
            unit=np.repeat(np.arange(len(ids)), source.sizes),
            cls=[names[row] for row in admission.cls.tolist()],
            ids=ids,
            subject=subject,
            examples_per_unit=examples_per_unit,
            policy=policy,
        )
        self._signed = admission
        self._keys = keys
        self._resolved: dict[tuple[Any, ...], Resolution] = {}

    @property
    def ids(self) -> Texts:
        """What contributions are called, by row."""
        return self._index.ids

    @cached_property
    def digests(self) -> Texts:
        """What contributions are, by row: the digest of the signed descriptor, whatever its folder is called."""
        return Texts(digest.tobytes().hex() for digest in self._signed.columns["descriptor"])

    def marks(self, ids: Sequence[str]) -> list[str]:
        return [self.digests[row] for row in self._index.find(ids).tolist()]

    def marked(self, *marks: str) -> list[str]:
        return [self.ids[row] for row in self.digests.find(marks).values()]

    # ------------------------------------------------------------------------------------ what each signed

    @property
    def admission(self) -> Admission:
        """Who was let in, who was not, and why."""
        return self._signed

    def resolution(self, plan: StepPlan, max_occurrences: Mapping[str, int] | None = None) -> Resolution:
        """The resolver's answer for this plan; worked out once."""
        key = plan.digest(), tuple(sorted((max_occurrences or {}).items()))
        if key not in self._resolved:
            self._resolved[key] = self._signed.resolve(plan, max_occurrences=max_occurrences)
        return self._resolved[key]

    def members_of(self, plan: StepPlan) -> tuple[NDArray[np.int64], ...]:
        """As `Corpus.members_of`, without those whose bound no scale keeps under this plan."""
        kept = self.resolution(plan).scale > 0
        found = super().members_of(plan)
        return found if kept.all() else tuple(rows[kept[self._signed.bound[rows]]] for rows in found)

    def out_of_reach(self, plan: StepPlan) -> int:
        """How many signed a bound that no scale keeps under this plan."""
        return int(np.count_nonzero(self.resolution(plan).scale[self._signed.bound] == 0))

    def limits_of(self, plan: StepPlan, max_occurrences: Mapping[str, int] | None = None) -> Limits:
        """Scale and ceiling of contributions, by row."""
        found = self.resolution(plan, max_occurrences)
        scale, ceiling, bound = found.scale, found.ceiling, self._signed.bound
        norm = np.array([plan.norm(each.cls) for each in self._signed.bounds])
        if not plan.rules and (scale == 1).all() and (np.isinf(norm) | (ceiling >= norm)).all():
            return lambda rows: (None, None)  # nobody is stricter than the class

        def limits(rows: NDArray[np.int64]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            which = bound[rows]
            return torch.from_numpy(scale[which]), torch.from_numpy(ceiling[which])

        return limits

    def accounts(
        self, plan: StepPlan, max_occurrences: Mapping[str, int] | None = None
    ) -> tuple[Account, ...]:
        """One per distinct bound of a private class that some eligible contribution signed."""
        found, admission = self.resolution(plan, max_occurrences), self._signed
        rows = np.concatenate(self.members_of(plan))
        distinct = np.unique(admission.bound[rows]).tolist()
        private = [which for which in distinct if admission.bounds[which].noise_multiplier]
        if len(private) > MOST_BOUNDS:
            raise CorpusError(
                "corpus.contributions-signed-distinct",
                f"contributions signed {len(private)} distinct bounds, at most {MOST_BOUNDS} can be accounted for",
                "let them sign one of a few bounds: a stricter class in the policy for each",
            )
        return tuple(
            Account(
                name=name_of(_named(bound := admission.bounds[which])),
                cls=bound.cls,
                scale=found[which].scale,
                epsilon=bound.epsilon(plan.delta(bound.cls)),
            )
            for which in private
        )

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        private = any(bound.noise_multiplier for bound in self._signed.bounds)
        if private and plan.clipping is Clipping.ELEMENTWISE:
            raise CorpusError(
                "corpus.contributions-signed-clip",
                "contributions signed a clip norm, and the plan clamps the mean of the batch, which bounds nobody",
                "use a plan with box or joint clipping",
            )

    def membership(self, key: bytes) -> bytes:
        """Also over what each signed: its identity is the digest of its descriptor."""
        signed = self._signed.columns["descriptor"].tobytes()
        return self._index.digest(key, f"examples_per_unit={self.examples_per_unit}", signed.hex())

    # ------------------------------------------------------------------------------------ whether it still holds

    def renew(self) -> dict[Reason, int]:
        """Windows, keys (a file of them is read again), signatures once an epoch is over: who is out is withdrawn.

        Returns how many for which reason; never who.
        """
        lapse = self._signed.recheck(keys=self._keys())
        if len(lapse):
            self.leave([self._signed.ids[row] for row in lapse.rows.tolist()])
        return dict(Counter(lapse.reasons))

    def batches(self, plan: StepPlan, *, max_occurrences: Mapping[str, int] | None = None) -> Iterator[Batch]:
        """As `Corpus.batches`; at each pass over the declared population windows and keys are looked at again."""
        rates = [entry.sampling_rate for entry in plan.classes if entry.sampling_rate > 0]
        length = max(1, round(1 / max(rates, default=1.0)))
        counts = None
        for first in range(0, plan.steps, length):
            self.renew()
            sampler = Sampler(
                self, plan, seed=os.urandom(SEED_BYTES), max_occurrences=max_occurrences, counts=counts
            )
            for step in range(first, min(first + length, plan.steps)):
                yield sampler.draw(step)
            counts = sampler.counts

    def __repr__(self) -> str:
        return f"Admitted{super().__repr__()}"


def _named(bound: Bound) -> tuple[str, int, int]:
    return bound.cls, bound.clip_norm, bound.noise_multiplier


def in_words(reasons: Mapping[Reason, int]) -> str:
    """How many left, and why: "3 (expired 2, revoked-key 1)"."""
    parts = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
    return f"{sum(reasons.values())} ({parts})"
