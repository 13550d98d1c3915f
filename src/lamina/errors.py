"""One tree of exceptions. Every message names the thing, its value, the bound, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CODE = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")
# Families within an area, each with how its codes begin after the area; the first that fits decides.
_FAMILIES = {
    "cli.evidence": "aggregate anchor checkpoint copy corpus counter governing key leaf ledger policy proof proposal receipt release "
    "request signature subject trust withdraw witness",
    "corpus.files": "array column csv dataset dtype entry file folder formats inputs labels list npz payload rows tensor value",
    "engine.batch": "batch- class cls examples first gradients index indices losses not-a-batch per- row seeded tokens unit views",
    "engine.model": "adapter already backward batchnorm buffer cache contributions ddp detached embedding experts extra float16 foreign "
    "frozen grad hazard hidden hook no-batch packed parameter probe reentrant result running scripted sharded spectral tensor written",
    "ledger.checkpoint": "checkpoint cosignature forked frontier head- leaf-hash no-checkpoint note older proof quorum rolled shorter "
    "size tile too-few tree verifier witness",
    "ledger.governance": "account authoris delta governing header key last no-header no-key not-authorised opened origin other policy "
    "proposal rotation second self several signed terms unit validity",
    "ledger.records": "about base64 batch blob body effect enum epoch field float kind leaf list not-a- number reason receipt record "
    "risk signature span",
    "ledger.withdrawal": "aggregate already-withdrawn horizon operator pruning request withdrawal",
    "plan.policy": "claimed class clip-norm delta epsilon noise-multiplier policy population preset public signed unit",
    "plan.profile": "adapter blocks buffer declaration depth example group layer model module nothing parts profile slice tensor",
    "release.verify": "c2pa certificate conditions countersignature expired extra facts figures file foreign from key layers ledger "
    "model not-recorded not-verified officer other plan posture purposes record signature utility weights",
    "train.model": "ema engine evaluat labels loss lr merge model optimizer pretrain proxy scheduler subspace tensor user",
    "train.resume": "checkpoint disk folder last ledger log membership no-file origin rank run second starting state stopped storage",
    "verify.contribution": "admitted attestation bound-of class-unknown clip-norm-above-class clip-norm-below descriptor no-bound "
    "noise-below-class noise-below-floor profile subject token withdraw",
    "verify.spend": "account attempt batch bound budget charge class clip eligibility epoch factor generation layer members noise "
    "not-exhausted open plan population release risk segment spend too-many trained",
}  # fmt: skip
_SHARED = {"audit": "study", "bench": "study", "report": "study", "models": "data"}  # areas of few codes


def family_of(code: str) -> str:
    """Return the family of a code: a part of its area, such as `ledger.governance`, or the area itself (docs/errors/)."""
    area, _, rest = code.partition(".")
    within = ((family, tuple(begins.split())) for family, begins in _FAMILIES.items() if family.startswith(f"{area}."))
    return next((family for family, begins in within if rest.startswith(begins)), _SHARED.get(area, area))


class LaminaError(Exception):
    """Anything Lamina refuses to do.

    `code` names the refusal for programs and tests and never changes its meaning (docs/errors/ lists all of them, by family);
    `problem` names the thing, its value and the limit; `remedy` says what to do about it.
    """

    def __init__(self, code: str, problem: str, remedy: str = "") -> None:
        assert _CODE.fullmatch(code), code
        self.code = code
        self.problem = problem
        self.remedy = remedy
        stop = "" if problem.endswith(("?", ".")) else "."
        super().__init__(f"{problem}{stop} Remedy: {remedy} [{code}]" if remedy else f"{problem} [{code}]")

    @property
    def family(self) -> str:
        return family_of(self.code)

    def __reduce__(self) -> tuple[Any, ...]:
        """Crosses to another process whole: the default would call `__init__` with the message alone."""
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[LaminaError], args: tuple[Any, ...]) -> LaminaError:
    """Without `__init__`, which a subclass may have changed; pickle then fills in the attributes."""
    return kind.__new__(kind, *args)


class EncodingError(LaminaError):
    """Bytes that are not the one deterministic encoding of a value, or a value that has none."""


class AccountingError(LaminaError):
    """A privacy cost that cannot be computed, or a schedule that makes no sense."""


class BudgetExceeded(AccountingError):
    """A step that the privacy budget does not allow. Nothing was spent on it."""


class PlanError(LaminaError):
    """A plan, policy, layer stack or depth profile that is wrong or unsound."""


class CoverageError(PlanError):
    """A tensor of the model that would change without being clipped and noised."""


class NoBound(PlanError):
    """A model through which a change of its input cannot be followed, so that its layers have no Δ."""


class EngineError(LaminaError):
    """A step that the engine will not carry out."""


class UnsupportedLayer(EngineError):
    """A layer whose per-contribution gradient Lamina does not know how to form."""


class OwnershipError(EngineError):
    """Rows of an activation that cannot be attributed to contributions."""


class CouplingError(EngineError):
    """Contributions that influence each other, so that clipping one does not bound it."""


class UnclippedGradient(EngineError):
    """A path by which a gradient would reach a covered tensor without being clipped."""


class RankLost(EngineError):
    """Another process of the step stopped. Nothing of the step was applied here."""


class StepsAbandoned(EngineError):
    """Rank 0 gave up the steps that all ranks were taking."""


class NoiseError(LaminaError):
    """A noise stream that is misused: exhausted, reused, or not what the plan declares."""


class AdmissionError(LaminaError):
    """A contribution, or a batch of them, that cannot be admitted as it is."""


class BadKey(AdmissionError):
    """A key that is damaged, weak, of the wrong kind, or not opened by its passphrase."""


class UnknownSchema(AdmissionError):
    """A descriptor of a version that this program does not know."""


class WrongAlgorithm(AdmissionError):
    """A signature under an algorithm that is not allowed."""


class CorpusError(LaminaError):
    """Contributions that cannot be sampled as a plan describes."""


class RunError(LaminaError):
    """A training run that cannot begin, go on, or be what it claims to be."""


class StorageError(RunError):
    """A disk that does not do what it must: full, read-only, or holding something damaged."""


class RunInUse(RunError):
    """A run that another process is working on."""


class LedgerError(LaminaError):
    """A ledger that cannot do what is asked of it, or is not what it claims to be."""


class NotVerified(LedgerError):
    """Evidence that does not hold: a signature, a proof, or a quorum that is not there."""


class StoreError(LedgerError):
    """A disk or a server that does not do what it must. What was acknowledged is there; what was asked now is not."""


class StoreLost(StoreError):
    """The server went away. Whether the last transaction was committed is not known; the ledger finds out."""


class StoreBusy(LedgerError):
    """Another writer holds the ledger for too long. Nothing was written."""


class LedgerDamaged(LedgerError):
    """A store that holds something else than what was written into it."""


class MissingPackage(LaminaError, ImportError):
    """A package of an extra, such as torch, that is not installed."""


@contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """The base install signs, admits and verifies without torch. Where `what` imports it and it is missing: the remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "safetensors"):
            raise
        problem = f"{what} needs {error.name}, which is not installed"
        raise MissingPackage("cli.torch-missing", problem, "pip install 'lamina[train]'") from None
