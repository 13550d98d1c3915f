"""The certificate of a run: the privacy loss of each class, whom the model protects, and statements with their sources.

Every figure follows from the charges that the ledger records (docs/theory.md, "What a certificate reports"):

    epsilon              of this run, by the ledger's accountant, with amplification by sampling where it credits that
    epsilon_total        the same, of all runs in the ledger up to the checkpoint
    epsilon_replace_one  of this run, if the content of a contribution is exchanged: what stays secret where members are known
    rho                  zCDP of this run without amplification: N/(2 sigma²) over the steps, or over capped occurrences
    epsilon_unamplified  the exact ε of that: holds even if everybody learns who was sampled when
    membership, content  what an attacker can learn from this run (`risk_statements`); with `_total`, from all runs

Figures are rounded up. Times are those of the ledger, so the same ledger and run, with the same other ledgers beside
them, give the same bytes.

Each condition and statement has a source: it is recomputed from the ledger, stated by the trainer in a record of the
run, stated by the owner, measured, observed by the issuer, or follows from the method.
`certificate_content` computes all of it from the ledger at a checkpoint. `certify` signs the result, and `comparison`
computes it again to verify a release.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lamina.account.accountants import cost, pooled_epsilon
from lamina.account.charges import Account
from lamina.account.schedule import Event, EventCounts, EventKey
from lamina.errors import BadKey, NotVerified
from lamina.ledger.corpus_terms import about_at
from lamina.ledger.governance_records import Header, Role
from lamina.ledger.neighbours import NeighbourLedger, neighbour_ledgers
from lamina.ledger.reader import LedgerReader
from lamina.ledger.run_records import WEIGHTS
from lamina.ledger.schema import nano_epsilon
from lamina.ledger.show import epsilon_or_none
from lamina.ledger.spending import signed_spend
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.plan.correlation import correlation_summary
from lamina.plan.risk import COMPOSED
from lamina.plan.step_plan import Clipping, PlannedClass
from lamina.plan.table import preformatted
from lamina.release import risk_statements
from lamina.release.enclosed_ledger import ReadableLedger
from lamina.release.posture import layer_postures, model_withdrawals
from lamina.release.risk_statements import FIGURE_NAMES, risk_figures
from lamina.release.run_evidence import RunEvidence, RunMetrics, file_digest
from lamina.release.schema import (
    BY_ISSUER,
    BY_LEDGER,
    BY_TRAINER,
    CERTIFICATE_VERSION,
    EPSILON_AT,
    CertificateContent,
    Condition,
    Risks,
    read_document,
)
from lamina.release.utility import read_evaluation, utility_section
from lamina.sign.keys import PrivateKey, PublicKey, format_utc
from lamina.sign.signed_json import canonical_json, parse_json, read_cose, sign_cose
from lamina.validate import short_repr

CERTIFICATE_TYPE = "application/lamina-certificate+json"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What is certified about a run, as one JSON object. It is signed only if every condition holds.

    `reserved` are ids of keys that the ledger names in another role than release; they may not sign it.
    """

    content: Mapping[str, Any]
    reserved: frozenset[bytes] = field(default=frozenset(), repr=False, compare=False)

    @property
    def private(self) -> bool:
        """Whether every condition holds."""
        return bool(self.content["private"])

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not private; empty if it is."""
        return tuple(each["reason"] for each in self.content["conditions"] if not each["holds"])

    @property
    def classes(self) -> Mapping[str, Mapping[str, Any]]:
        """The figures by class."""
        found: Mapping[str, Mapping[str, Any]] = self.content["classes"]
        return found

    def epsilon(self, cls: str) -> float | None:
        """ε that this run cost a contribution of a class; None if nothing finite is proven."""
        return self.classes[cls]["epsilon"]  # type: ignore[no-any-return]

    def json(self) -> bytes:
        """The same bytes for the same run and ledger."""
        return canonical_json(self.content)

    def signed(self, key: PrivateKey) -> bytes:
        """COSE_Sign1 over `json()`. NotVerified if the run was not private: there is nothing to vouch for."""
        if not self.private:
            problem = f"the run {self.content['run']['id'][:8]} is not private: {'; '.join(self.reasons)}"
            raise NotVerified("release.not-private", problem, "train again without what is named, or use it as it is")
        if key.public.id in self.reserved:
            raise in_other_role(key.public)
        return sign_cose(self.json(), key, CERTIFICATE_TYPE)

    @classmethod
    def read(cls, data: bytes, keys: tuple[PublicKey, ...]) -> Certificate:
        """A signed certificate, if one of these keys signed it."""
        found = read_cose(data, CERTIFICATE_TYPE)
        if found.by(keys) is None:
            problem = f"none of the given keys signed the certificate; it names key {found.kid.hex()[:16]}"
            raise NotVerified("release.certificate-not-by-key", problem, "give the release key of who issued it")
        content = parse_json(found.payload, "the certificate")
        version = content.get("version") if type(content) is dict else None
        if type(version) is not int or version != CERTIFICATE_VERSION:
            problem = f"the certificate has version {short_repr(version)}"
            raise NotVerified("release.certificate-version", problem, "read it with a newer version of lamina")
        read_document(CertificateContent, content, "the certificate", "release.certificate-malformed")
        return cls(content=content)

    def __str__(self) -> str:
        return "\n".join(_lines(self.content))

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def in_other_role(key: PublicKey) -> BadKey:
    """Return the error for a key that the ledger names in another role than release."""
    problem = f"the ledger names key {key.name[:16]} in another role than release"
    return BadKey("release.key-in-other-role", problem, "sign with a key of its own: lamina keys new release.key")


def certify(
    folder: str | os.PathLike[str],
    ledger: LedgerReader,
    *,
    trust: Trust | None = None,
    verification: Verification | None = None,
    checkpoint: str | None = None,
) -> Certificate:
    """Return the certificate of the run in a folder, from the ledger in which it was charged, at its newest checkpoint.

    Facts that no epoch contains come only from the end of the run that the ledger records; the files in the folder are
    compared with it. The ledger is verified first, unless a `verification` of it is given. If a condition of the
    guarantee does not hold, the certificate states `private: false` with the reasons and cannot be signed. Raises
    RunError if the end of the run is not recorded.
    """
    folder = Path(folder)
    metrics = RunMetrics.load(folder)
    evidence = replace(RunEvidence.read(ledger, metrics.run, checkpoint), evaluation=read_evaluation(folder))
    end = evidence.ended
    verification = verify(ledger.store, trust=trust) if verification is None else verification
    failed: dict[str, str] = {}
    if not verification.verified:
        failed["ledger"] = f"the ledger does not verify: {verification.problem}"
    if evidence.later or any(each.run == metrics.run for each in verification.held):
        failed["recorded"] = "the ledger has no signed record yet of some steps that were charged"
    if changed := [name for name, digest in end.digests.items() if _differs(folder / name, digest)]:
        differs = f"{', '.join(changed)} differs from what the run recorded"
        failed["weights"] = differs if (folder / WEIGHTS).is_file() else f"{WEIGHTS} is missing"
    if changed := metrics.differences(end, evidence.plan.adjacency):
        failed["metrics"] = f"metrics.json differs from what the run recorded: {', '.join(changed)}"
    beside = [each.to_dict() for each in ledgers_beside(ledger, folder)]
    content = certificate_content(evidence, ledger, verdict=verification.verdict, failed=failed, beside=beside)
    reserved = frozenset(key.id for key in ledger.parties().all() if key.role is not Role.RELEASE)
    return Certificate(content=content, reserved=reserved)


def _differs(path: Path, digest: str) -> bool:
    """Return whether a file differs from the recorded one. Only the weights must exist; other files may be removed."""
    return file_digest(path) != digest if path.is_file() else path.name == WEIGHTS


def certificate_content(
    evidence: RunEvidence, ledger: ReadableLedger, *, verdict: str, failed: Mapping[str, str],
    beside: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return what is certified about a run, from the ledger up to the checkpoint of the evidence.

    `verdict`, `failed` and `beside` are observations of the issuer: the result of verifying the ledger, the conditions
    (`_OBSERVED`) that do not hold, and the other ledgers beside it.
    """
    plan, header, end = evidence.plan, ledger.header, evidence.ended
    stated_conditions = [each.model_dump() for each in _conditions(evidence, header.delta, failed)]
    private = all(each["holds"] for each in stated_conditions)
    classes = {entry.name: _class_figures(evidence, header, entry) for entry in evidence.classes()}
    return {
        "version": CERTIFICATE_VERSION,
        "private": private,
        "attested": evidence.attested,
        "issued": format_utc(evidence.time),
        "run": {"id": end.run.hex(), "steps": end.steps, "planned_steps": plan.steps},
        "model": {"file": WEIGHTS, "sha256": end.weights, "parameters": sum(layer.size for layer in plan.layers)},
        "ledger": ledger_reference(evidence, ledger.origin) | {"verdict": verdict},
        "accountant": {"name": header.accountant, "version": header.version},
        "plan": {
            "sha256": plan.digest().hex(), "allocation": plan.allocation, "clipping": plan.clipping.value,
            "expected_batch": plan.batch, "steps": plan.steps, "noise": f"{plan.noise_kind.value}, {plan.injection.form.value}",
            **({} if (banded := correlation_summary(plan)) is None else {"correlation": banded}),
        },
        "trainer": _stated_by_trainer(evidence),
        "program": evidence.program(),
        "tuning": evidence.tuning(),
        "utility": utility_section(evidence),
        "classes": classes,
        "layers": _layers(evidence),
        "conditions": stated_conditions,
        "other_people": header.other_people,
        "about": about_at(ledger, evidence.checkpoint.size),
        "ledgers_beside": list(beside),
        "protects": risk_statements.protection(classes, private=private, continued=evidence.continued, exposed=evidence.exposed),
        "statements": risk_statements.statements(
            evidence, header, classes, conditions=stated_conditions, beside=beside,
            withdrawn=model_withdrawals(ledger, evidence),
        ),
    }  # fmt: skip


def _stated_by_trainer(evidence: RunEvidence) -> dict[str, Any]:
    """Return what the trainer states in the start and end records of the run. The ledger does not prove it."""
    assert evidence.end is not None
    leaf, end = evidence.end
    start = None
    if evidence.begin is not None:
        at, begin = evidence.begin
        origin = "not declared" if begin.origin is None else begin.origin.name.lower()
        parent = None if begin.parent is None else begin.parent.hex()
        start = {"leaf": at, "sha256": begin.weights.hex(), "origin": origin, "parent": parent}
    return {
        "leaf": leaf,
        **end.conditions(evidence.plan.adjacency),
        "max_occurrences": end.max_occurrences,
        "files": end.digests,
        "starting_weights": start,
    }


def ledgers_beside(ledger: LedgerReader, folder: Path) -> list[NeighbourLedger]:
    """Return the other ledgers around a ledger and a run. They are not verified."""
    return neighbour_ledgers(ledger.store.where, folder.resolve().parent)


def ledger_reference(evidence: RunEvidence, origin: str) -> dict[str, Any]:
    """Where a ledger stood: enough to check later that it was only continued."""
    at = evidence.checkpoint
    return {
        "origin": origin,
        "size": at.size,
        "root": at.root.hex(),
        "header": evidence.header_hash.hex(),
        "checkpoint": evidence.checkpoint_text,
    }


# ------------------------------------------------------------------------------------------ figures


def _class_figures(evidence: RunEvidence, header: Header, entry: PlannedClass) -> dict[str, Any]:
    """Return the figures of a class. None means that nothing is proven, or that a public class is not protected."""
    plan, end = evidence.plan, evidence.ended
    adjacency = end.conditions(plan.adjacency)["adjacency"]
    common = {"unit": entry.unit, "public": entry.public, "population": entry.population, "adjacency": adjacency}
    nothing: dict[str, Any] = dict.fromkeys(("epsilon_at", "noise_multiplier", "sampling_rate", "clip_norm"))
    nothing |= {"charges": [], "bounds": []}
    if entry.public:
        return common | dict.fromkeys(("delta", "epsilon_total", *_FIGURES, *_RISKS)) | nothing
    whole, bounds = Account(entry.name), [each for each in evidence.bounds() if each.cls == entry.name]
    took_part = bool(bounds) or any(entry.name in names for names in evidence.reached().values())
    known = evidence.charged(entry.name) if took_part else entry.name not in evidence.split
    exposed = entry.name in evidence.exposed
    total = epsilon_or_none(evidence.spending.spend(whole)) if known and not exposed else None
    common |= {"delta": header.delta, "epsilon_total": total}
    risks = _risks(evidence, header, whole) if known else dict.fromkeys(_RISKS)
    risks |= dict.fromkeys(_RISKS[2:]) if exposed else {}
    if not took_part:  # it has lost nothing
        return common | dict.fromkeys(_FIGURES, 0.0) | risks | nothing
    events, most = evidence.events(whole), end.max_occurrences.get(entry.name)
    if most is not None:  # each abandoned attempt may add to it
        most += sum(min(most, steps) for steps in evidence.abandoned_steps())
    figures = _figures(events, header, most, raw=plan.injection.raw) if known else dict.fromkeys(_FIGURES)
    if COMPOSED in evidence.marks([evidence.run]):
        figures["epsilon_replace_one"] = None
    planned = [each for each in evidence.plans.values() if entry.name in {other.name for other in each.classes}]
    norms = [norm for norm in (each.norm(entry.name) for each in planned) if math.isfinite(norm)]
    return (
        common
        | figures
        | risks
        | {
            "epsilon_at": {delta: _epsilon(events, header, float(delta)) if known else None for delta in EPSILON_AT},
            "noise_multiplier": min((sigma for sigma, _, _ in events), default=None),
            "sampling_rate": entry.sampling_rate,
            "clip_norm": max(norms, default=None),
            "max_occurrences": end.max_occurrences.get(entry.name),
            "charges": [
                {"noise_multiplier": sigma, "sampling_rate": q, "steps": steps, "order": order or None}
                for (sigma, q, order), steps in sorted(events.items())
            ],
            "bounds": [_bound_figures(evidence, header, each) for each in bounds if each.noise_micro],
        }
    )


_FIGURES = ("epsilon", "epsilon_replace_one", "rho", "epsilon_unamplified")
_RISKS = tuple(Risks.model_fields)


def _epsilon(events: EventCounts, header: Header, delta: float) -> float | None:
    """Return ε by the ledger's accountant, in steps of 1e-9 rounded up; None if no finite ε is proven."""
    return epsilon_or_none(nano_epsilon(pooled_epsilon(events, delta=delta, name=header.accountant)))


def _risks(evidence: RunEvidence, header: Header, bound: Account) -> dict[str, Any]:
    """Return the risk figures of an account: of this run, and of all runs up to the checkpoint."""
    here, every = [evidence.run], evidence.runs(bound)
    found: list[dict[str, Any] | None] = []
    for runs, events in ((here, evidence.events(bound)), (every, evidence.spending.events(bound))):
        marks = evidence.marks(runs)
        price = partial(risk_figures, events, accountant=header.accountant, marks=marks)
        found += [price(of="membership"), price(of="content")]
    return dict(zip(_RISKS, found, strict=True))


def _figures(events: Mapping[EventKey, int], header: Header, most: int | None, *, raw: bool) -> dict[str, Any]:
    """ε by the ledger's accountant, and what holds beside it. None: nothing is proven."""
    found = {"epsilon": _epsilon(events, header, header.delta)}
    if any(order for _, _, order in events):  # noise that followed its budget is proven at one order alone
        return found | {"epsilon_replace_one": None, "rho": None, "epsilon_unamplified": None}
    schedule = [Event(sigma=sigma, q=q, steps=steps) for (sigma, q, _), steps in sorted(events.items())]
    told = cost(schedule, delta=header.delta, accountant=header.accountant, occurrences=most)
    replaced = told.epsilon_unamplified_replace_one if raw else told.epsilon_replace_one
    return found | {
        "epsilon_replace_one": epsilon_or_none(nano_epsilon(replaced)),
        "rho": epsilon_or_none(nano_epsilon(told.rho)),
        "epsilon_unamplified": epsilon_or_none(nano_epsilon(told.epsilon_unamplified)),
    }


_SCALE_TOLERANCE = 1e-9  # scales are quotients of floats


def _bound_figures(evidence: RunEvidence, header: Header, bound: Account) -> dict[str, Any]:
    """Return the figures of contributions that signed this bound. `scale` is the largest scale at which they took part."""
    scales = evidence.scales(bound)
    return {
        "clip_norm": bound[1] / 1e6,
        "noise_multiplier": bound[2] / 1e6,
        "contributions": evidence.signed[bound],
        "epochs": len(scales),
        "epochs_left_out": scales.count(0.0),
        "epochs_scaled": sum(0 < scale < 1 - _SCALE_TOLERANCE for scale in scales),
        "scale": max(scales),
        "epsilon": _epsilon(evidence.events(bound), header, header.delta),
        "epsilon_total": epsilon_or_none(evidence.spending.spend(bound)),
        "epsilon_signed": epsilon_or_none(signed_spend(bound[2], header.delta)),
    } | _risks(evidence, header, bound)


def _layers(evidence: RunEvidence) -> list[dict[str, Any]]:
    """Noise and classes by layer, as the steps in the model had them."""
    ratio = min(plan.noise_kind.std_ratio for plan in evidence.plans.values())
    return [{**each.model_dump(), "noise_std": each.noise_std * ratio} for each in layer_postures([evidence])]


# ------------------------------------------------------------------------------------------ conditions

# conditions that the trainer states in the end record: (required value, reason if it differs)
RUN_CONDITIONS = {
    "noise": ("secure", "the noise came from a seed that somebody chose, so whoever knows the seed can remove it"),
    "sampling": ("poisson", "contributions were not Poisson-sampled, so amplification by sampling cannot be claimed"),
    "probed": (True, "nobody tested that contributions do not influence each other in augmentation, model and loss"),
    "covered": (True, "the model has tensors that trained without being clipped and noised"),
    "raw_figures": ("none", "raw figures of private data (losses, norms) were written down"),
}
PRINTED_PLAN = "the plan reproduces a printed mechanism, whose noise is too small"
_OBSERVED = ("ledger", "recorded", "weights", "metrics")  # conditions about ledger and folder that the issuer observes


def _conditions(evidence: RunEvidence, delta: float, failed: Mapping[str, str]) -> list[Condition]:
    assert evidence.end is not None
    stated, ended = evidence.ended.conditions(evidence.plan.adjacency), (evidence.end[0],)

    def condition(name: str, holds: bool, why: str, source: str, leaves: Sequence[int] = ()) -> Condition:
        reason, shown = None if holds else why, list(leaves) or None
        return Condition(name=name, holds=holds, reason=reason, source=source, leaves=shown)

    found = [
        condition(name, stated[name] == wanted, why, BY_TRAINER, ended)
        for name, (wanted, why) in RUN_CONDITIONS.items()
    ]
    found += [condition(name, name not in failed, failed.get(name, ""), BY_ISSUER) for name in _OBSERVED]
    printed = any(p.claimed or p.clipping is Clipping.ELEMENTWISE for p in evidence.plans.values())
    checks = {
        "sound_plan": (not printed, PRINTED_PLAN),
        "finite": (_all_finite(evidence), "a private class was not charged as a whole, or no finite ε of it is proven"),
        "delta": (
            all(e.public or e.population is None or delta * e.population < 1 for e in evidence.classes()),
            "δ is not below one over the population: publishing somebody's data whole would be within the promise",
        ),
    }
    epochs = risk_statements.shown_leaves(evidence.leaves[evidence.run])
    return found + [condition(name, holds, why, BY_LEDGER, epochs) for name, (holds, why) in checks.items()]


def _all_finite(evidence: RunEvidence) -> bool:
    """Every private class that reached a layer was charged as a whole, and every account has a finite price."""
    reached = {name for names in evidence.reached().values() for name in names}
    private = {each.name for plan in evidence.plans.values() for each in plan.classes if not each.public} & reached
    charged = all(map(evidence.charged, private))
    return charged and all(math.isfinite(evidence.spending.epsilon(bound)) for bound in evidence.bounds())


def _lines(content: Mapping[str, Any]) -> list[str]:
    run = content["run"]
    head = f"certificate of run {run['id'][:8]}: {content['protects']['badge']}"
    attested = "" if content["attested"] else "; not attested: the data is not signed"
    lines = [f"{head}; {run['steps']} of {run['planned_steps']} steps{attested}"]
    for name, each in content["classes"].items():
        if not each["public"]:
            shown = "; ".join(f"{label}: {_shown(each[key])}" for key, label in FIGURE_NAMES.items() if key != "delta")
            lines.append(f"  class {name}, per {each['unit']} at δ = {each['delta']:g}: {shown}")
    lines += [f"  {text}" for text in risk_statements.texts(content, "membership", "content")]
    lines += [f"  not private: {each['reason']}" for each in content["conditions"] if not each["holds"]]
    return lines


def _shown(value: float | None) -> str:
    return "not proven" if value is None else risk_statements.short_figure(value)
