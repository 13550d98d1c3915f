"""Sample content of certificates, written by hand: figures are plausible and not computed from any ledger."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

BY_LEDGER, BY_TRAINER, BY_OWNER = "recomputed from the ledger", "stated by the trainer", "stated by the owner"
CURVE_RATES = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.08,
    0.12,
    0.17,
    0.25,
    0.35,
    0.5,
    0.65,
    0.8,
    0.9,
    0.95,
    0.99,
)
MEASURED, BY_ISSUER = "measured", "observed by the issuer"


def risk(mu: float, *, content: bool = False) -> dict[str, Any]:
    """Figures of a Gaussian trade-off curve."""
    law = NormalDist()

    def rate(fpr: float) -> float:
        return law.cdf(law.inv_cdf(fpr) + mu)

    advantage = 2 * law.cdf(mu / 2) - 1
    found: dict[str, Any] = {
        "adjacency": "replace-one" if content else "add-remove",
        "bound": "privacy loss distribution",
        "tpr": {"0.001": rate(0.001), "0.01": rate(0.01), "0.05": rate(0.05)},
        "accuracy": 0.5 + advantage / 2,
        "advantage": advantage,
        "mu": mu,
        "mu_least_rate": 0.001,
        "curve": {f"{fpr:g}": rate(fpr) for fpr in CURVE_RATES},
    }
    return found | ({"success": {"0.01": rate(0.01), "0.1": rate(0.1), "0.5": rate(0.5)}} if content else {})


def private_class(mu: float = 0.71, *, unit: str = "patient", zero_out: bool = False) -> dict[str, Any]:
    return {
        "unit": unit, "public": False, "population": 240, "adjacency": "zero-out" if zero_out else "add-remove",
        "delta": 1e-5, "epsilon": 3.0 * mu / 0.71, "epsilon_replace_one": 6.42 * mu / 0.71, "rho": 1.52,
        "epsilon_unamplified": 8.8, "epsilon_total": 3.4 * mu / 0.71, "noise_multiplier": 4.805, "sampling_rate": 0.4,
        "max_occurrences": None, "clip_norm": 1.0,
        "epsilon_at": {"0.001": 2.1, "0.0001": 2.6, "1e-05": 3.0, "1e-06": 3.4, "1e-08": None},
        "charges": [{"noise_multiplier": 4.805, "sampling_rate": 0.4, "steps": 70, "order": None}],
        "membership": None if zero_out else risk(mu), "content": risk(2 * mu, content=True),
        "membership_total": None if zero_out else risk(1.1 * mu), "content_total": risk(2.2 * mu, content=True),
        "bounds": [{"clip_norm": 1.0, "noise_multiplier": 4.805, "contributions": 37, "epochs": 5,
                    "epochs_left_out": 1, "epochs_scaled": 2, "scale": 0.5, "epsilon": 3.0, "epsilon_total": 3.4,
                    "epsilon_signed": 4.0, "membership": None, "content": None, "membership_total": None,
                    "content_total": None}],
    }  # fmt: skip


def public_class(unit: str = "patient") -> dict[str, Any]:
    figures = ("epsilon", "epsilon_total", "epsilon_replace_one", "rho", "epsilon_unamplified", "delta")
    risks = ("membership", "content", "membership_total", "content_total")
    settings = ("noise_multiplier", "sampling_rate", "clip_norm", "epsilon_at")
    known = {"unit": unit, "public": True, "population": 60, "adjacency": "add-remove", "bounds": [], "charges": []}
    return known | dict.fromkeys((*figures, *risks, *settings))


def utility(group: str | None, value: float | None) -> dict[str, Any]:
    """A figure of an evaluation; without a value it is suppressed."""
    known = {"value": value, "low": None, "high": None, "records": None}
    known |= {} if value is None else {"low": value - 0.03, "high": value + 0.02, "records": 400}
    about = {"level": 0.95, "on": "public", "covered_by_epsilon": True, "step": 70, "digest": "ab" * 32}
    return {"figure": "accuracy", "group": group, "weights": "model.safetensors"} | known | about


def sample_content(classes: dict[str, dict[str, Any]] | None = None, *, private: bool = True) -> dict[str, Any]:
    """A certificate of version 4."""
    classes = {"sensitive": private_class(), "volunteer": public_class()} if classes is None else classes
    reason = "declared public" if private else "the run has no privacy guarantee"
    closed = [name for name, each in classes.items() if not each["public"]]
    opened = [name for name, each in classes.items() if each["public"]]
    badge = f"private for: {', '.join(closed) or 'nobody'}"
    if opened:
        badge += (
            f"; not protected: {', '.join(f'{name} (declared public; declared population: 60)' for name in opened)}"
        )
    rows = [(f"blocks.{at}.attention.projection", 0.012, list(classes)) for at in range(6)]
    rows += [("head.weight", 0.02, closed), ("head.bias", 0.02, closed)]

    def statement(topic: str, text: str, source: str, cls: str | None = None, **more: Any) -> dict[str, Any]:
        return {"topic": topic, "class": cls, "text": text, "source": source, "leaves": None, "digest": None} | more

    said = [
        statement("membership", f"Class {name}: Of 100 patients who took part, the best attacker names at most 5.3 while "
                  "wrongly naming 1 of 100 others; guessing names 1.", BY_LEDGER, name, leaves=[3, 40])
        for name in closed if classes[name]["membership"]
    ]  # fmt: skip
    said += [
        statement("content", f"Class {name}: Of 100 patients who are known to have taken part, the best attacker names the "
                  "right record for at most 17.4; guessing names 1.", BY_LEDGER, name, leaves=[3, 40])
        for name in closed
    ]  # fmt: skip
    said += [
        statement("budget", "ε of this run is 3.01 per patient at δ = 1e-05, in the band 1 to 5.", BY_LEDGER),
        statement("budget", "ε over all runs includes every run of this ledger; charges are never refunded.", BY_LEDGER),
        statement("unit", "One unit is one patient with all recordings. A family or a ward is not one unit.", BY_OWNER),
        statement("condition", "Noise and sampling coins come from a secure generator and are not kept.", BY_TRAINER,
                  leaves=[41]),
        statement("trust", "The trainer sees the raw data and is trusted with it (central model).", BY_TRAINER),
        statement("query model", "The weights are released once; any number of queries costs nothing more.", BY_LEDGER),
        statement("side channels", "Timing and error messages were not examined.", BY_TRAINER),
        statement("tuning", "12 trials are recorded in the ledger.", BY_LEDGER, leaves=[4, 9]),
        statement("assumption", "Each contribution's gradient is clipped as the plan says.", BY_TRAINER),
        statement("not covered", "A person with several contributions is less protected.", BY_LEDGER),
        statement("voids", "A further release of the same data that the ledger does not record.", BY_LEDGER),
        statement("voids", "A seed or a state of the noise generator that becomes known.", BY_LEDGER),
        statement("condition", "The files of the folder are those that the run recorded.", BY_ISSUER),
    ]  # fmt: skip
    why = "the noise came from a seed that somebody chose"
    return {
        "version": 4, "private": private, "attested": True, "issued": "2026-11-30T12:00:00Z",
        "run": {"id": "5a" * 16, "steps": 70, "planned_steps": 70},
        "model": {"file": "model.safetensors", "sha256": "c0" * 32, "parameters": 12345},
        "ledger": {"origin": "example.org/ecg", "size": 42, "root": "11" * 32, "header": "22" * 32,
                   "checkpoint": "example.org/ecg\n42\n…", "verdict": "trusted"},
        "accountant": {"name": "pld", "version": "1"},
        "plan": {"sha256": "33" * 32, "allocation": "uniform", "clipping": "global", "expected_batch": 96.0,
                 "steps": 70, "noise": "gaussian, per-layer"},
        "trainer": {"leaf": 41, "noise": "secure", "sampling": "poisson", "starting_weights": None},
        "classes": classes,
        "layers": [{"name": name, "depth": 0.5, "parameters": 64, "noise_std": noise, "classes": reached}
                   for name, noise, reached in rows],
        "protects": {"private_for": closed if private else [], "weak": [], "badge": badge, "not_protected": [
            {"class": name, "population": 60, "unit": "patient", "reason": reason}
            for name in (opened if private else classes)]},
        "conditions": [{"name": "noise", "holds": private, "reason": None if private else why, "source": BY_TRAINER}],
        "other_people": None, "ledgers_beside": [], "statements": said,
        "about": {"security": {"text": "encrypted at rest; two administrators", "leaf": 0}},
        "program": {"leaf": 41, "lamina": "0.1", "sources": "44" * 32, "torch": "2.13.0", "python": "3.11.2",
                    "kernels": "none", "earlier": []},
        "tuning": {"runs_in_ledger": 12, "runs_before_this": 11, "leaves": [3, 9],
                   "optimizer": "Adam, rate 0.021, HoldThenFall(steps=150, falling=0.3)"},
        "utility": [utility(None, 0.91), utility("sex: f", 0.9), utility("site: 7", None)],
    }  # fmt: skip
