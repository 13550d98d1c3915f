"""`make_private`: from a model and data to engine, corpus and plan in one call.

The data is signed with a local key.
"""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any

from torch import nn

from lamina.admit.admission import Admission
from lamina.admit.attestation import NONCE_BYTES, attest, commit
from lamina.admit.checks import SigningTerms
from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import AdmissionGate
from lamina.admit.key_ring import KeyRing
from lamina.admit.keys import PrivateKey
from lamina.admit.signing import SECONDS_PER_YEAR
from lamina.allocate.make_plan import DEFAULT_ALLOCATION, make_plan
from lamina.corpus.corpus import Corpus
from lamina.engine.engine import Engine
from lamina.errors import AdmissionError, PlanError
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.train.trainer_checks import refuse_loader

LOCAL_CONTRIBUTION = "data"


def sign_corpus(corpus: Corpus, policy: Policy, cls: str, key: PrivateKey | None = None) -> Admission:
    """One attestation for all contributions of a corpus, signed by `key` and verified by the gate.

    items       the number of contributions
    commitment  SHA-256(nonce ‖ SHA-256 of all data), or of its declared version
    bound       the class's: ε as the policy has it

    Without a key one is made for the call and forgotten: the evidence then says that one process saw this data under
    this bound, and not who vouches for it.
    """
    key = PrivateKey.generate() if key is None else key
    now, nonce, data = int(time.time()), secrets.token_bytes(NONCE_BYTES), corpus.fingerprint()
    descriptor = SigningTerms.make(policy, cls, not_before=now, expires=now + SECONDS_PER_YEAR).descriptor(
        contributor=key.public.id, nonce=nonce, commitment=commit(nonce, data), items=len(corpus)
    )
    ring = KeyRing()
    ring.add(key.public, label="local")
    offered = Contribution(LOCAL_CONTRIBUTION, descriptor.encode(), attest(descriptor, key, issued_at=now), data)
    found = AdmissionGate(policy, ring).review([offered])
    for refusal in found.refused:
        problem = f"the data, signed with a local key, is refused: {refusal.reason.meaning}"
        raise AdmissionError("train.data-signed-local", problem, "report this")
    return found


def make_private(
    model: nn.Module,
    data: Any,
    *,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    batch: int,
    epochs: float | None = None,
    steps: int | None = None,
    unit: Any = None,
    allocate: str = DEFAULT_ALLOCATION,
    key: PrivateKey | None = None,
) -> tuple[Engine, Corpus, StepPlan]:
    """One private class, every layer, ε and δ as given: the short way to a private model.

        engine, corpus, plan = lamina.make_private(model, (x, y), epsilon=3.0, delta=1e-5, batch=64, epochs=10)
        for batch in corpus.batches(plan):
            engine.backward(loss_fn(model(batch.x), batch.y) if len(batch) else None, batch)
            optimizer.step(); optimizer.zero_grad()

    data      a Corpus, x, a pair (x, y), or a torch Dataset
    unit      the contribution (patient, customer) of each example; default: each example is its own
    batch     expected contributions per step
    key       signs for the data; default: one that is made for this call and forgotten

    One attestation covers all of the data (`corpus.admission`): what it was, how many contributions, under which ε. A
    Dataset without a version is signed when that is first asked for, because all of its examples have to be made.

    The number of contributions is taken to be public: it sets the sampling rate. Where it is secret, declare a
    population in a policy instead. ε counts the steps of this engine; `lamina.Trainer` also adds up over runs.
    """
    refuse_loader(data)
    corpus = data if isinstance(data, Corpus) else _make_corpus(data, unit)
    if isinstance(data, Corpus) and unit is not None:
        problem = "unit is given beside a Corpus, which has its own"
        raise PlanError("train.unit-given-beside", problem, "give it to the Corpus")
    names = corpus.names
    if len(names) > 1:
        problem = f"the corpus has classes {', '.join(names)}: make_private knows one"
        remedy = "write a policy with each class, and use lamina.make_plan"
        raise PlanError("train.corpus-classes-make", problem, remedy)
    policy = Policy.from_dict(
        {
            "corpus": {"origin": corpus.origin or "local", "delta": _check_number("delta", delta, below=1.0)},
            "class": {
                names[0]: {
                    "population": len(corpus),
                    "epsilon": _check_number("epsilon", epsilon),
                    "unit": corpus.unit_name,
                }
            },
        }
    )
    if isinstance(batch, int) and batch > len(corpus):
        raise PlanError(
            "train.batch-above-contributions",
            f"batch is {batch}, above the {len(corpus)} contributions there are",
            "it is the expected number of contributions per step: choose well below, for example "
            f"{max(1, len(corpus) // 20)}",
        )
    plan = make_plan(LayerStack.from_model(model), policy, batch=batch, epochs=epochs, steps=steps, allocate=allocate)
    engine = Engine(model, plan)
    if corpus.digest_reads_all:
        corpus.set_admission(partial(sign_corpus, corpus, policy, names[0], key))
    elif corpus.admission is None:
        corpus.set_admission(sign_corpus(corpus, policy, names[0], key))
    return engine, corpus, plan


def _make_corpus(data: Any, unit: Any) -> Corpus:
    if isinstance(data, tuple) and len(data) == 2:
        return Corpus(*data, unit=unit)
    return Corpus(data, unit=unit)


def _check_number(name: str, value: Any, below: float = float("inf")) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < below:
        raise PlanError(
            "train.number-above-below",
            f"{name} is {value!r}, must be a number above 0" + (f" and below {below:g}" if below < 2 else ""),
            "ε = 0 would allow nothing to be learned at all; common choices are ε = 1 to 8 and δ below 1/population",
        )
    return float(value)
