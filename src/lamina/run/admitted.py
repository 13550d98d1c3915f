"""`Gate` and the corpus that it makes: signed contributions, each read under its commitment and within its bound."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.admit import gate, reasons
from lamina.admit.admission import Admission, Progress
from lamina.admit.attestation import commit
from lamina.admit.contribution_sources import Contribution
from lamina.admit.examiner import MAX_PAYLOAD
from lamina.admit.reasons import ContributionRefused, Reason
from lamina.admit.register import Register
from lamina.admit.resolver import Resolution
from lamina.admit.rows import PackedTexts
from lamina.engine.batch import Batch
from lamina.engine.noise.random_stream import segment_seed
from lamina.errors import AdmissionError, CorpusError
from lamina.ledger.admission_batch import open_register
from lamina.ledger.writer import Ledger
from lamina.plan.charges import SignedAccount
from lamina.plan.policy import Policy
from lamina.plan.step_plan import Clipping, StepPlan
from lamina.run.corpus import Corpus, Factors, LimitsOfRows, ProbeArgument
from lamina.run.example_sources import PayloadSource, dtype_name
from lamina.run.payload_admission import REFUSED_REMEDY, Folders, admit_payloads, read_whole, refusal_counts_text
from lamina.run.payloads import PayloadChanged, Payloads
from lamina.run.sampler import Sampler
from lamina.run.table_files import Hasher, hash_parts
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import read_small
from lamina.validate import one_of


class CommittedPayloads:
    """The payloads of admitted contributions.

    A payload is read once and whole; its bytes are compared with the signed commitment, and only then taken for data.
    Swapping a file after it was admitted, even while it is read, stops the run, and nothing is learned from it.
    """

    frozen = True

    def __init__(self, payloads: Payloads, *, nonces: NDArray[Any], commitments: NDArray[Any]) -> None:
        self._payloads, self._nonces, self._commitments = payloads, nonces, commitments
        self.where, self.ids = payloads.where, payloads.ids

    def __len__(self) -> int:
        return len(self._payloads)

    def path(self, row: int) -> str:
        return self._payloads.path(row)

    def peek(self, row: int) -> bytes | None:
        return self._payloads.peek(row)

    def read(self, row: int) -> bytes:
        try:
            content = self._payloads.read(row)
            content = read_whole(self._payloads.path(row)) if content is None else content
        except (OSError, ContributionRefused):
            raise self._changed() from None
        found = commit(self._nonces[row].tobytes(), content)
        if not hmac.compare_digest(found, self._commitments[row].tobytes()):
            raise self._changed()
        return content

    def take(self, rows: NDArray[np.int64]) -> CommittedPayloads:
        nonces, commitments = self._nonces[rows], self._commitments[rows]
        return CommittedPayloads(self._payloads.take(rows), nonces=nonces, commitments=commitments)

    def feed(self, hasher: Hasher) -> None:
        """Ids and commitments: no other bytes are ever read under them."""
        for row, name in enumerate(self.ids):
            hash_parts(hasher, [name, self._commitments[row].tobytes()])

    def _changed(self) -> PayloadChanged:
        problem = f"a payload {self.where} is not the one that was signed and admitted; nothing was learned from it"
        remedy = "put back what was signed, or leave it out; admitting the contributions again names it"
        return PayloadChanged("corpus.payload-not-as-signed", problem, remedy)

    def __repr__(self) -> str:
        return f"signed, {self._payloads!r}"


MAX_BOUNDS = 1000  # distinct bounds of a corpus: each is an account, and all of them stand in each epoch


class AdmittedCorpus(Corpus):
    """A corpus of admitted contributions, made by `lamina.Gate.admit`; `admission` says who was refused, and why.

    Under a plan every contribution keeps to what it signed: `limits_of` gives its scale and ceiling to the batches, a
    bound that no scale keeps is never sampled, and `accounts` has one account per distinct bound, which the ledger
    enforces over all runs. `revalidate` checks windows and keys again: whoever is out is withdrawn.
    """

    def __init__(
        self, source: PayloadSource, admission: Admission, *, ids: list[str], subject: list[str] | None,
        policy: Policy, keys: Callable[[], KeyRing | None], examples_per_unit: int | None = None,
        on_refusal: str = "skip",
    ) -> None:  # fmt: skip
        names = admission.classes
        super().__init__(
            source, unit=np.repeat(np.arange(len(ids)), source.sizes), cls=[names[row] for row in admission.cls.tolist()],
            ids=ids, subject=subject, examples_per_unit=examples_per_unit, policy=policy,
        )  # fmt: skip
        self._signed = admission
        self._keys, self._on_refusal = keys, on_refusal
        self._resolved: dict[tuple[Any, ...], Resolution] = {}

    @property
    def ids(self) -> PackedTexts:
        """What contributions are called, by row."""
        return self._index.ids

    @cached_property
    def digests(self) -> PackedTexts:
        """What contributions are, by row: the digest of the signed descriptor, whatever its folder is called."""
        return PackedTexts(digest.tobytes().hex() for digest in self._signed.columns["descriptor"])

    def stable_ids(self, ids: Sequence[str]) -> list[str]:
        return [self.digests[row] for row in self._index.find(ids).tolist()]

    def _all_stable_ids(self) -> Iterable[str]:
        return self.digests

    def ids_of(self, *stable_ids: str) -> list[str]:
        return [self.ids[row] for row in self.digests.find(stable_ids).values()]

    @property
    def admission(self) -> Admission:
        """Who was let in, who was not, and why."""
        return self._signed

    def refuse_untrainable(self, rows: NDArray[np.int64]) -> None:
        """Leave these out, each for itself: model and loss cannot be computed on them. The admission says so."""
        self._signed.dismiss(rows, reasons.NOT_TRAINABLE)
        if self._on_refusal == STOP or not len(self.eligible) > len(rows):
            problem = "model and loss cannot be computed on some of the admitted contributions"
            raise AdmissionError("corpus.contributions-refused", problem, REFUSED_REMEDY)
        self.exclude([self.ids[row] for row in rows.tolist()])

    def resolution(self, plan: StepPlan, max_occurrences: Mapping[str, int] | None = None) -> Resolution:
        """The resolver's answer for this plan; worked out once."""
        key = plan.digest(), tuple(sorted((max_occurrences or {}).items()))
        if key not in self._resolved:
            self._resolved[key] = self._signed.resolve(plan, max_occurrences=max_occurrences)
        return self._resolved[key]

    def members_of(self, plan: StepPlan, factors: Factors = None) -> tuple[NDArray[np.int64], ...]:
        """As `Corpus.members_of`, without those whose bound no scale keeps under this plan."""
        kept = self.resolution(plan).scale * self._factor_by_bound(factors) > 0
        found = super().members_of(plan)
        return found if kept.all() else tuple(rows[kept[self._signed.bound[rows]]] for rows in found)

    def count_unsampled(self, plan: StepPlan) -> int:
        """How many signed a bound that no scale keeps under this plan."""
        return int(np.count_nonzero(self.resolution(plan).scale[self._signed.bound] == 0))

    def _factor_by_bound(self, factors: Factors) -> NDArray[np.float64]:
        names = (str(each) for each in self._signed.bounds)
        return np.array([(factors or {}).get(name, 1.0) for name in names])

    def count_signed(self, account: str) -> int:
        """How many eligible contributions signed the bound of an account."""
        mine = self._factor_by_bound({account: 0.0}) == 0
        return int(np.count_nonzero(mine[self._signed.bound[self.eligible]]))

    def limits_of(
        self, plan: StepPlan, max_occurrences: Mapping[str, int] | None = None, factors: Factors = None
    ) -> LimitsOfRows:
        """Scale and ceiling of contributions, by row."""
        found = self.resolution(plan, max_occurrences)
        scale, ceiling, bound = found.scale * self._factor_by_bound(factors), found.ceiling, self._signed.bound
        norm = np.array([plan.norm(each.cls) for each in self._signed.bounds])
        if not plan.rules and (scale == 1).all() and (np.isinf(norm) | (ceiling >= norm)).all():
            return lambda rows: (None, None)  # nobody is stricter than the class

        def limits(rows: NDArray[np.int64]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            which = bound[rows]
            return torch.from_numpy(scale[which]), torch.from_numpy(ceiling[which])

        return limits

    def accounts(self, plan: StepPlan, max_occurrences: Mapping[str, int] | None = None) -> tuple[SignedAccount, ...]:
        """One per distinct bound of a private class that some eligible contribution signed."""
        found, admission = self.resolution(plan, max_occurrences), self._signed
        rows = np.concatenate(self.members_of(plan))
        distinct = np.unique(admission.bound[rows]).tolist()
        private = [which for which in distinct if admission.bounds[which].signed]
        if len(private) > MAX_BOUNDS:
            problem = f"contributions signed {len(private)} distinct bounds, at most {MAX_BOUNDS} can be accounted for"
            remedy = "let them sign one of a few bounds: a stricter class in the policy for each"
            raise CorpusError("corpus.too-many-bounds", problem, remedy)
        accounts = []
        for which in private:
            bound, scale = admission.bounds[which], found[which].scale
            epsilon = bound.epsilon(plan.delta(bound.cls))
            accounts.append(SignedAccount(name=str(bound), cls=bound.cls, scale=scale, epsilon=epsilon))
        return tuple(accounts)

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        private = any(bound.signed for bound in self._signed.bounds)
        if private and plan.clipping is Clipping.ELEMENTWISE:
            problem = "contributions signed a clip norm, and the plan clamps the mean of the batch, which bounds nobody"
            raise CorpusError("corpus.limits-need-clipping", problem, "use a plan with box or joint clipping")

    def membership(self, key: bytes) -> bytes:
        """Also over what each signed: its identity is the digest of its descriptor."""
        signed = self._signed.columns["descriptor"].tobytes()
        return self._index.digest(key, f"examples_per_unit={self.examples_per_unit}", signed.hex())

    def revalidate(self) -> dict[Reason, int]:
        """Windows, keys (a file of them is read again), signatures once an epoch is over: who is out is withdrawn.

        Returns how many for which reason; never who.
        """
        lapse = self._signed.recheck(keys=self._keys())
        if len(lapse):
            self.exclude([self._signed.ids[row] for row in lapse.rows.tolist()])
        return dict(Counter(lapse.reasons))

    def batches(
        self, plan: StepPlan, *, max_occurrences: Mapping[str, int] | None = None, probe: ProbeArgument = True,
        seed: int | None = None,
    ) -> Iterator[Batch]:  # fmt: skip
        """As `Corpus.batches`; at each pass over the declared population windows and keys are looked at again."""
        rates = [entry.sampling_rate for entry in plan.classes if entry.sampling_rate > 0]
        length = max(1, round(1 / max(rates, default=1.0)))
        counts = None
        yield from self.probe_batches(plan, probe)
        for first in range(0, plan.steps, length):
            self.revalidate()
            sampler = Sampler(
                self, plan, seed=segment_seed(seed, first), max_occurrences=max_occurrences, counts=counts,
                seeded=seed is not None,
            )  # fmt: skip
            for step in range(first, min(first + length, plan.steps)):
                yield sampler.draw(step)
            counts = sampler.counts

    def __repr__(self) -> str:
        return f"Admitted{super().__repr__()}"


SKIP, STOP = "skip", "stop"


class Gate(gate.AdmissionGate):
    """Admits contributions under a policy, by the keys of a ring, and makes a corpus of those that may enter.

        corpus = lamina.Gate(policy, "keys.json").admit("contributions", ledger="corpus.ledger.db")
        print(corpus.admission.table())

    keys   the path of a key ring, which is read again at each segment of a run, so that a revocation is obeyed at the
           next one; or a `KeyRing`, which is asked as it is
    """

    def __init__(
        self, policy: Policy, keys: KeyRing | str | Path, *, clock: Callable[[], float] = time.time,
        register: Register | None = None, processes: int = 1, max_payload: int = MAX_PAYLOAD,
    ) -> None:  # fmt: skip
        if not isinstance(policy, Policy):
            problem = f"the policy is a {type(policy).__name__}"
            raise AdmissionError("corpus.policy-not-a-policy", problem, "use lamina.Policy.load('policy.toml')")
        self._path = None if isinstance(keys, KeyRing) else Path(keys)
        self._seen: bytes | None = None  # digest of the file that was loaded
        ring = keys
        if not isinstance(ring, KeyRing):
            self._seen, content = _read_key_ring(Path(ring))
            ring = KeyRing.load(ring, content)
        super().__init__(policy, ring, clock=clock, register=register, processes=processes, max_payload=max_payload)

    def reload_keys(self) -> KeyRing | None:
        """Rely on the ring as its file has it now; None if it came from none, or the file is as it was.

        A file that cannot be read is refused each time it is asked for: it may say that a key is revoked.
        """
        if self._path is None:
            return None
        digest, content = _read_key_ring(self._path)
        if digest == self._seen:
            return None
        self.keys = KeyRing.load(self._path, content)
        self._seen = digest  # not before: what cannot be loaded was not seen
        return self.keys

    def admit(
        self, contributions: Folders | Iterable[Contribution],
        ledger: Ledger | Register | str | os.PathLike[str] | None = None, *, on_refusal: str = SKIP,
        examples_per_unit: int | None = None, dtype: torch.dtype | None = None, progress: Progress | None = None,
    ) -> AdmittedCorpus:  # fmt: skip
        """Examine all of them and make a corpus of those that are admitted; `corpus.admission` has the report.

        contributions  a folder with ID/payload.npz or ID/payload.csv, ID/descriptor.cbor and ID/attestation.cose, and
                       perhaps a contributions.csv with y; a list of such folders; or `Contribution`s with their bytes
        ledger         where those who are admitted are recorded, and who was withdrawn: the path of a ledger, which is
                       made if there is none, "postgresql://…#schema", an open `Ledger`, or any register. Who stands in
                       it already is admitted again, and nothing is written
        on_refusal     "skip" whoever is refused, or "stop" with an AdmissionError
        progress       hears (how many are examined, of how many)

        The class of a contribution is the one that it signed. Payloads are read when they are sampled, and compared with
        their commitment again.
        """
        one_of(AdmissionError, "corpus.on-refusal-unknown", (SKIP, STOP), on_refusal=on_refusal)
        self.reload_keys()
        if ledger is None:
            return self._admit(contributions, on_refusal, examples_per_unit, dtype, progress)
        with open_register(ledger, self.policy, clock=self.clock.now) as register:
            before, self.register = self.register, register
            try:
                return self._admit(contributions, on_refusal, examples_per_unit, dtype, progress)
            finally:
                self.register = before

    def _admit(
        self, contributions: Folders | Iterable[Contribution], on_refusal: str, examples_per_unit: int | None,
        dtype: torch.dtype | None, progress: Progress | None,
    ) -> AdmittedCorpus:  # fmt: skip
        asked = None if dtype is None else dtype_name(dtype)
        admission, found = admit_payloads(self, contributions, dtype=asked, stop=on_refusal == STOP, progress=progress)
        if found is None:
            problem = f"nobody is admitted: {refusal_counts_text(admission)}"
            raise AdmissionError("corpus.nobody-admitted", problem, REFUSED_REMEDY)
        nonces, commitments = (admission.columns[name].copy() for name in ("nonce", "commitment"))
        committed = CommittedPayloads(found.payloads, nonces=nonces, commitments=commitments)
        source = PayloadSource(committed, found.labels, dtype=dtype, survey=found.survey)
        return AdmittedCorpus(
            source, admission, ids=list(admission.ids), subject=found.subjects, policy=self.policy, keys=self.reload_keys,
            examples_per_unit=examples_per_unit, on_refusal=on_refusal,
        )  # fmt: skip


def _read_key_ring(path: Path) -> tuple[bytes, bytes]:
    """Digest and bytes of a key ring."""
    content = read_small(path, "the key ring")
    return hashlib.sha256(content).digest(), content
