"""`make_private`: from a model and data, signed with a local key, to engine, corpus and plan in one call."""

from __future__ import annotations

import copy
import math
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Schedule
from lamina.admit.admission import Admission
from lamina.admit.attestation import NONCE_BYTES, attest, commit
from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import AdmissionGate
from lamina.admit.signing import SECONDS_PER_YEAR
from lamina.admit.terms import SigningTerms
from lamina.allocate.make_plan import DEFAULT_ALLOCATION, make_plan
from lamina.allocate.problem import FAR_ABOVE, untuned_clip_norm
from lamina.engine.batch import Batch, model_device, to_device
from lamina.engine.distributed import Ranks
from lamina.engine.engine import Engine
from lamina.engine.probe import preserve_global_generators, seed_global_generators
from lamina.errors import AdmissionError, PlanError
from lamina.plan.correlation import AUTO_BANDS
from lamina.plan.layer_stack import LayerStack, call_arguments
from lamina.plan.policy import Policy
from lamina.plan.selection import known_keywords
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import epsilon_text
from lamina.run.corpus import Corpus
from lamina.run.trainer_checks import check_model, declared_start
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey
from lamina.validate import number, whole

_P = ParamSpec("_P")
_R = TypeVar("_R")
LOCAL_CONTRIBUTION = "data"
_PROXY_CONTRIBUTIONS, _LEAST_PROXY = 256, 16
_TRIAL_STEPS, _TRIAL_BATCH = 40, 16
DEFAULT_CLIP_NORM = 0.1
"""Where nothing is known: a norm that is too small costs a few percent of the error, one that is too large several times
the error (docs/allocations/utility.md)."""


class LargeClipNorm(UserWarning):
    """The clip norm lies far above the gradients of the proxy."""


NOTHING_REMAINS = 0.01  # of a bound
TUNE_ELSEWHERE = "tune on simulated or public data, which costs nothing: every further run on these contributions adds to what they lose"


class PlannedBefore(UserWarning):
    """Data that this process planned for before: what all of the plans cost together."""


_planned: dict[bytes, list[Schedule]] = {}  # by origin, or fingerprint of the data; stays in this process


def sign_corpus(corpus: Corpus, policy: Policy, cls: str, key: PrivateKey | None = None) -> Admission:
    """Sign one attestation for all contributions of a corpus with `key`, and let the gate verify it.

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
    attestation = attest(descriptor, key, issued_at=now, ledger=policy.corpus.ledger_hash)
    offered = Contribution(LOCAL_CONTRIBUTION, descriptor.encode(), attestation, data)
    found = AdmissionGate(policy, ring).review([offered])
    for refusal in found.refused:
        problem = f"the gate refused the data signed with a local key: {refusal.reason.meaning}"
        raise AdmissionError("train.local-signature-refused", problem, "report this")
    return found


def typical_norm(
    model: nn.Module, plan: StepPlan, loss_fn: Callable[[Any, Any], Tensor], proxy: Corpus, **options: Any
) -> float:
    """The median norm of a contribution's gradient on one half of a public corpus: at the weights as they are, or after
    a short training of a copy on the other half, whichever is less.

    Gradients of a classifier stay as long as they were; those of a model that comes to fit its data shrink to a fraction,
    and a clip norm above them leaves it with noise. Where the short training does not get anywhere, it does not count.
    `options` are those of the engine.
    """
    if len(proxy) < _LEAST_PROXY:
        problem = f"the proxy has {len(proxy)} contributions, must be {_LEAST_PROXY} or more"
        raise PlanError("train.proxy-too-small", problem, "give more, or give clip_norm")
    units, copied = proxy.eligible[:_PROXY_CONTRIBUTIONS], copy.deepcopy(model)
    optimizer = torch.optim.Adam([p for p in copied.parameters() if p.requires_grad], lr=1e-3)

    def losses(some: np.ndarray) -> tuple[Tensor, Batch]:
        x, y = to_device(proxy.source.fetch(proxy.layout.rows_of(some)), model_device(copied))
        unit = np.repeat(np.arange(len(some)), proxy.layout.sizes(some))
        args, named = call_arguments(x)
        return loss_fn(copied(*args, **named), x if y is None else y), Batch(x, y, unit=torch.from_numpy(unit))

    def median() -> float:
        optimizer.zero_grad()
        with Engine(copied, plan, **options) as engine:
            return float(engine.proxy_norms(*losses(units[1::2])).median())

    with preserve_global_generators(), torch.enable_grad():
        seed_global_generators(0)
        found = median()
        for step in range(_TRIAL_STEPS):
            rows = np.arange(step * _TRIAL_BATCH, (step + 1) * _TRIAL_BATCH) % len(units[::2])
            optimizer.zero_grad()
            losses(np.unique(units[::2][rows]))[0].mean().backward()
            optimizer.step()
        later = median()
    if not 0 < found < math.inf:
        problem = f"the typical gradient on the proxy has norm {found:g}"
        raise PlanError("train.proxy-norm-not-positive", problem, "use other proxy data, or give clip_norm")
    return min(found, later) if later > 0 else found


_OPACUS_NAMES = {
    "module": "give the model first: make_private(model, data, …)",
    "optimizer": "leave it out: make any optimizer of model.parameters(), and call its step after engine.backward",
    "data_loader": "give the data themselves, make_private(model, (x, y), batch=64, …), and loop over corpus.batches(plan)",
    "batch_size": "write batch=, the expected number of contributions in a step",
    "sample_rate": "write batch= and population=: the rate is batch / population",
    "max_grad_norm": "write clip_norm=",
    "target_epsilon": "write epsilon=",
    "target_delta": "write delta=",
    "poisson_sampling": "leave it out: samples are always Poisson",
    "clipping": 'leave it out: a plan clips by layer or all layers together; as Opacus does it: allocate="flat"',
    "grad_sample_mode": "leave it out: the engine chooses by layer",
    "criterion": "leave it out: give one loss per example to engine.backward",
    "noise_generator": "leave it out: the noise is secret; for tests Engine(…, noise=SeededNoise(0))",
}


def _teach_opacus_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuse arguments by the names of Opacus, and say what they are called here."""

    @wraps(function)
    def checked(*args: _P.args, **options: _P.kwargs) -> _R:
        if strange := [name for name in options if name in _OPACUS_NAMES]:
            problem = f"make_private got {', '.join(strange)}, {'a name' if len(strange) == 1 else 'names'} of Opacus"
            raise PlanError("train.opacus-name", problem, "; ".join(_OPACUS_NAMES[name] for name in strange))
        return function(*args, **options)

    return checked


@_teach_opacus_names
@known_keywords(PlanError, "train.keyword-unknown")
def make_private(
    model: nn.Module, data: Any, *, epsilon: float | None = None, noise_multiplier: float | None = None,
    delta: float = 1e-5, clip_norm: float | None = None, proxy: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None, batch: int, epochs: float | None = None,
    steps: int | None = None, unit: Any = None, population: int | None = None, allocate: str = DEFAULT_ALLOCATION,
    key: PrivateKey | None = None, rows: Mapping[str, str] | None = None, per_contribution: Sequence[str] = (),
    origin: str | None = None, other_people: str | None = None, starting_weights: str | os.PathLike[str] | None = None,
    bands: int | str = 1,
) -> tuple[Engine, Corpus, StepPlan]:  # fmt: skip
    """Make engine, corpus and plan for one private class that reaches every layer, with ε and δ as given.

        engine, corpus, plan = lamina.make_private(model, (x, y), epsilon=3.0, delta=1e-5, batch=64, epochs=10)
        optimizer, schedule = lamina.private_optimizer(model, plan)
        for batch in corpus.batches(plan):
            engine.backward(loss_fn(model(batch.x), batch.y) if len(batch) else None, batch)
            optimizer.step(); optimizer.zero_grad(); schedule.step()

    data        a Corpus, x, a pair (x, y), or a torch Dataset
    unit        the contribution (patient, customer) of each example; default: each example is its own
    epsilon     ε to spend at δ; or noise_multiplier, the sigma of every step, and ε is what the steps cost at it
    clip_norm   the largest norm that the gradient of one contribution may have. Default: with `proxy` and `loss_fn` a
                part of the typical norm on the proxy (`typical_norm`), which depends on the first weights: seed them if
                the run is to be resumed; without them 0.1. Steps of plain SGD are as long as the clip norm, Adam's not
    proxy       public or simulated data in the form of `data`, targets included; never the private data
    loss_fn     (output, y), or (output, x) where there is no y: one loss per example
    batch       expected contributions per step
    population  a public number that the contributions do not exceed, whoever is there; default: their number
    key         signs for the data; default: one that is made for this call and forgotten
    origin      the name under which ε of all runs on these people is added up, even if the data changes. Required if
                `Trainer` would otherwise create another ledger beside an existing one; default: a digest of the data
    other_people  instead of origin: your statement why these are other people than in the ledgers beside it. The new
                ledger and its certificates show it
    bands       correlate the noise over so many steps (docs/decisions/correlated_noise.md). Needs `population`, and names:
                `unit`. "auto": as many as gain at this ε, batch and length; 1 without those two, or on several ranks
    rows, per_contribution  as `Engine` takes them: whose rows are whose, and what is run once per contribution
    starting_weights  as `Trainer` takes it, which gets it with the engine: "untrained", "public", or another run

    One attestation covers all of the data (`corpus.admission`): what it was, how many contributions, under which ε. A
    Dataset without a version is signed on first use, because all of its examples have to be made.

    Formal guarantee. The sampling rate is batch / population, and the noise follows from it. With `population`, ε is
    that of add/remove: whether somebody is there is protected. Without it rate and noise follow from the number of
    contributions, which is then public: ε is that of zero-out (what somebody contributed, or nothing in its place) at
    this number, and replacing one contribution by another costs `plan.epsilon(0, "replace_one")`. `engine.claim` says
    which. ε counts the steps of this engine; `lamina.Trainer` also adds up over runs. After the steps nothing of ε
    remains; a second call on the same data, which is not looked for in a Dataset without a version, warns with what all
    calls cost together (`PlannedBefore`).
    """
    check_model(model)
    start = declared_start(starting_weights)
    if isinstance(data, Corpus):
        for name, value in {"unit": unit, "origin": origin, "other_people": other_people}.items():
            if value is not None:
                problem = f"{name} is given together with a Corpus"
                remedy = f"give {name} to the Corpus instead: Corpus(…, {name}=…)"
                raise PlanError("train.unit-beside-corpus", problem, remedy)
    if (proxy is None) != (loss_fn is None):
        problem = f"{'loss_fn' if proxy is None else 'proxy'} is given alone"
        raise PlanError("train.proxy-needs-loss", problem, "give both: gradients on the proxy set the clip norm")
    corpus = _as_corpus(data, unit=unit, origin=origin, other_people=other_people)
    if {id(t) for t in tree_leaves(proxy) if t is not None} & {id(t) for t in tree_leaves(data)}:
        problem = "the proxy is the data itself, and a norm read from it would be a release without a budget"
        raise PlanError("train.proxy-is-the-data", problem, "give public or simulated data, or leave proxy out")
    names = corpus.names
    if len(names) > 1:
        problem = f"the corpus has {len(names)} classes ({', '.join(names)}), make_private takes one"
        raise PlanError("train.several-classes", problem, "write a policy with each class, and use lamina.make_plan")
    if (epsilon is None) == (noise_multiplier is None):
        problem = f"epsilon is {epsilon!r} and noise_multiplier is {noise_multiplier!r}"
        raise PlanError("train.epsilon-or-noise-multiplier", problem, "give exactly one of them: epsilon=3.0")
    if epsilon is not None:
        epsilon = number(PlanError, "train.epsilon-out-of-range", above=0, remedy="choose 1 to 8", epsilon=epsilon)
    if clip_norm is not None:
        clip_norm = _checked_clip_norm(clip_norm)
    delta = number(PlanError, "train.delta-out-of-range", above=0, below=1, remedy="stay below 1/people", delta=delta)
    present = len(corpus)
    declared = present if population is None else whole(PlanError, "train.not-a-count", population=population)
    if present > declared:
        problem = f"the corpus has more contributions than population={declared}"
        raise PlanError("train.population-below-corpus", problem, "declare a number that it cannot exceed")
    if bands == AUTO_BANDS:
        conditions = {
            "population": population is not None, "unit": corpus.has_stable_ids, "one rank": Ranks.current().alone,
        }  # fmt: skip
        if missing := [name for name, met in conditions.items() if not met]:
            bands = 1
            warnings.warn(f'bands="auto" takes 1 band: it requires {" and ".join(missing)}', stacklevel=3)
    if bands != 1 and population is None:  # ε would be zero-out, with a replace-one figure that is not proven here
        problem = f"bands is {bands}, and population is not given"
        raise PlanError("train.bands-need-population", problem, "declare a number that the contributions do not exceed")
    if delta * declared >= 1:
        problem = f"delta={delta:g} with {declared} contributions"
        problem += ": publishing one of them whole would be within the promise"
        remedy = f"stay well below 1/{declared}: e.g. delta={0.01 / declared:.0e}"
        raise PlanError("train.delta-out-of-range", problem, remedy)
    only = None if corpus.policy is None else corpus.policy.corpus.ledger
    about = {"origin": corpus.origin or "local", "delta": delta, "ledger": only}
    terms = {"population": declared, "clip_norm": clip_norm or DEFAULT_CLIP_NORM, "unit": corpus.unit_name}
    policy = Policy.from_dict({"corpus": about, "class": {names[0]: terms}})
    if isinstance(batch, int) and batch > declared:
        problem = f"batch is {batch}, the corpus has {declared} contributions"
        remedy = f"batch is the expected contributions per step: choose fewer, such as {max(1, declared // 20)}"
        raise PlanError("train.batch-above-corpus", problem, remedy)
    planned = partial(
        make_plan, LayerStack.from_model(model), batch=batch, epochs=epochs, steps=steps, allocate=allocate,
        epsilon=epsilon, noise_multiplier=noise_multiplier, bands=bands,
    )  # fmt: skip
    plan = planned(policy)
    if proxy is not None and loss_fn is not None:
        typical = typical_norm(model, plan, loss_fn, _as_corpus(proxy), rows=rows, per_contribution=per_contribution)
        if clip_norm is None:
            terms["clip_norm"] = _checked_clip_norm(untuned_clip_norm(typical))
            plan = planned(Policy.from_dict({"corpus": about, "class": {names[0]: terms}}))
        elif clip_norm > FAR_ABOVE * typical:
            text = f"clip_norm is {clip_norm:g}, {clip_norm / typical:.2g} times the typical gradient on the proxy: it scales"
            remedy = f"the noise up and clips nearly nobody. Leave it out, or give {untuned_clip_norm(typical):g}"
            warnings.warn(f"{text} {remedy}", LargeClipNorm, stacklevel=4)
    terms["epsilon"] = allowed = plan.epsilon(0) if epsilon is None else epsilon
    policy = Policy.from_dict({"corpus": about, "class": {names[0]: terms}})
    engine = Engine(model, plan, rows=rows, per_contribution=per_contribution)
    engine.starting_weights = start
    corpus.public_number = population is None
    spent, claim = f"this run spends ε = {epsilon_text(allowed)} per {plan.classes[0].unit}", f"({plan.adjacency})"
    if corpus.public_number:
        replaced = epsilon_text(plan.epsilon(0, "replace_one"))
        claim = f"(zero-out; replace-one: {replaced}). The number of contributions, {present:,}, is public and not protected"
    engine.claim = f"{spent} {claim}. Another run on the same data adds to it: tune on simulated or public data"
    if corpus.digest_reads_all:
        corpus.set_admission(partial(sign_corpus, corpus, policy, names[0], key))
        return engine, corpus, plan
    if corpus.admission is None:
        corpus.set_admission(sign_corpus(corpus, policy, names[0], key))
    _warn_of_earlier_plans(corpus, plan)
    return engine, corpus, plan


def _as_corpus(data: Any, **options: Any) -> Corpus:
    if isinstance(data, Corpus):
        return data
    return Corpus(*data, **options) if isinstance(data, tuple) and len(data) == 2 else Corpus(data, **options)


def _checked_clip_norm(c: float) -> float:
    remedy = "multiply the loss by a constant: clip norms are signed in 1e-6"
    return number(PlanError, "train.clip-norm-out-of-range", least=1e-4, remedy=remedy, clip_norm=c)


def _warn_of_earlier_plans(corpus: Corpus, plan: StepPlan) -> None:
    """Warn if this process planned for the same data before, with what all plans cost together."""
    origin = corpus.origin  # the same people, even if the data has changed
    plans = _planned.setdefault(corpus.fingerprint() if origin is None else origin.encode(), [])
    plans.append(plan.schedule(0))
    if len(plans) > 1:
        together = find_accountant(plan.accountant).epsilon(sum(plans, ()), plan.delta(0))
        text = (
            f"make_private was called {len(plans)} times on this data: together they cost ε {epsilon_text(together)} at "
            f"δ = {plan.delta(0):g}, if all are trained to the end (a run that is resumed counts once); {TUNE_ELSEWHERE}"
        )
        warnings.warn(text, PlannedBefore, stacklevel=5)
