"""The demo's folder: policy, run file, contributions that hospitals sign (a few wrong on purpose), verified ledger."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn

from lamina.admit.admission import Admission
from lamina.admit.attestation import NONCE_BYTES, attest, commit
from lamina.admit.contribution_sources import ATTESTATION_FILE, DESCRIPTOR_FILE
from lamina.admit.signing import SECONDS_PER_YEAR, SigningState, attest_folder
from lamina.admit.terms import SigningTerms
from lamina.errors import LaminaError
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.verifier import verify
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey
from lamina.signals.demo.patients import DemoPatients, DemoSizes, PatientGroup
from lamina.signals.demo.training import FINE_TUNING, loss
from lamina.validate import packaged_text

ORIGIN = "demo.example/simulated-ecg"
DELTA = 1e-5  # well below one over the population
LEDGER_NAME = "ledger.db"


def policy_text(sizes: DemoSizes) -> str:
    template = packaged_text("lamina.signals.demo", "policy_template.toml")
    return template.format(origin=ORIGIN, delta=DELTA, volunteers=sizes.volunteers, sensitive=sizes.sensitive)


def make_new_folder(wanted: Path) -> Path:
    """Make WANTED, or WANTED-2, WANTED-3, … if there is something in it already. Nothing is ever removed."""
    folder, number = wanted, 1
    while folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the folder '{folder}' cannot be made: {error.strerror or error}"
        raise LaminaError("cli.file-not-writable", problem, "choose another: lamina demo --folder PATH") from None
    return folder


def write_inputs(
    folder: Path, sizes: DemoSizes, patients: DemoPatients, ring: KeyRing, start: nn.Module, plan: StepPlan
) -> None:
    """Everything that RUN.toml names, and the plan to read."""
    (folder / "policy.toml").write_text(policy_text(sizes), encoding="utf-8")
    batches = {"volunteer_batch": sizes.volunteer_batch, "sensitive_batch": sizes.sensitive_batch}
    settings = {"weight": loss.weight, "lr": FINE_TUNING.lr, "eps": FINE_TUNING.eps, "steps": sizes.steps, **batches}
    run = packaged_text("lamina.signals.demo", "run_template.toml")
    (folder / "RUN.toml").write_text(run.format(folder=folder, **settings), encoding="utf-8")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    ring.save(folder / "keys.json")
    patients.test.save(folder / "test.npz")
    save_file({name: t.contiguous() for name, t in start.state_dict().items()}, folder / "start.safetensors")


HOSPITALS = ("north", "south")
STRICT_NOISE_MULTIPLIER = 2.5  # the noise multiplier that some sensitive patients sign; their class asks for less
PAYLOAD_NAME = "payload.npz"


def write_contributions(
    folder: Path, patients: DemoPatients, policy: Policy, sizes: DemoSizes, tick: Callable[[int], None]
) -> KeyRing:
    """Write and sign FOLDER/ID/… for every patient; returns the ring of the hospitals' public keys.

    The private keys are forgotten: nobody can sign for these hospitals again.
    """
    keys, ring = {name: PrivateKey.generate() for name in HOSPITALS}, KeyRing()
    for name, key in keys.items():
        ring.add(key.public, label=f"hospital {name}")
    classes = {}
    for cls, group in patients.contributing_groups().items():
        for i, (x, label) in enumerate(zip(group.x, group.label.tolist(), strict=True)):
            classes[f"{cls}-{i:03d}"] = cls
            _write_payload(folder / f"{cls}-{i:03d}", x, label)
    strict = [one for one, cls in classes.items() if cls == "sensitive"][:: sizes.strict_every]
    done = 0
    for i, key in enumerate(keys.values()):
        mine = dict(list(classes.items())[i :: len(keys)])
        for some, multiplier in ((set(mine) - set(strict), None), (set(mine) & set(strict), STRICT_NOISE_MULTIPLIER)):
            given = {one: mine[one] for one in sorted(some)}
            _sign_contributions(folder, key, policy, given, noise_multiplier=multiplier)
            done += len(some)
            tick(done)
    _write_refused_ones(folder, patients.sensitive, policy, keys["north"])
    return ring


def _write_payload(folder: Path, x: Tensor, label: int) -> None:
    folder.mkdir(parents=True)
    np.savez(folder / PAYLOAD_NAME, x=x.numpy(), y=np.full(len(x), label))


def _sign_contributions(
    folder: Path, key: PrivateKey, policy: Policy, classes: Mapping[str, str], *,
    noise_multiplier: float | None = None, ago: int = 0,
) -> None:  # fmt: skip
    """As `lamina attest` does, for those that have a class; `ago`: as if it had been so many seconds earlier."""
    if not classes:
        return
    now = int(time.time()) - ago
    for each in attest_folder(folder, key, policy, classes, noise_multiplier=noise_multiplier, now=now):
        if each.id in classes and each.state is not SigningState.SIGNED:
            problem = f"the demo could not sign {each.id!r}: {each.problem}"
            raise LaminaError("cli.demo-not-signed", problem, "report this")


def _write_refused_ones(folder: Path, group: PatientGroup, policy: Policy, key: PrivateKey) -> None:
    """Six that the gate must refuse, each for another reason."""

    def fresh(name: str, patient: int) -> str:
        one = f"sensitive-{name}"
        _write_payload(folder / one, group.x[patient], int(group.label[patient]))
        return one

    fresh("unsigned", 1)
    late, stranger, changed = fresh("expired", 2), fresh("stranger", 3), fresh("changed", 4)
    _sign_contributions(folder, key, policy, {late: "sensitive"}, ago=2 * SECONDS_PER_YEAR)
    _sign_contributions(folder, PrivateKey.generate(), policy, {stranger: "sensitive"})
    _sign_contributions(folder, key, policy, {changed: "sensitive"})
    np.savez(folder / changed / PAYLOAD_NAME, x=-group.x[4].numpy(), y=np.full(len(group.x[4]), 0))
    _sign_permissively(folder / fresh("permissive", 5), key, policy)
    shutil.copytree(folder / "sensitive-000", folder / "sensitive-copied")


def _sign_permissively(folder: Path, key: PrivateKey, policy: Policy) -> None:
    """`lamina attest` does not sign a bound that is more permissive than its class; somebody else's program may."""
    now = int(time.time())
    terms = SigningTerms.make(policy, "sensitive", not_before=now, expires=now + SECONDS_PER_YEAR)
    loose = replace(terms, noise_multiplier=terms.noise_multiplier // 2)
    nonce = secrets.token_bytes(NONCE_BYTES)
    descriptor = loose.descriptor(
        contributor=key.public.id, nonce=nonce, commitment=commit(nonce, folder / PAYLOAD_NAME), items=3
    )
    (folder / DESCRIPTOR_FILE).write_bytes(descriptor.encode())
    (folder / ATTESTATION_FILE).write_bytes(attest(descriptor, key, issued_at=now))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLedger:
    """`found` took `seconds`. `contribution` is the digest of the descriptor of one sensitive patient."""

    ledger: Path
    found: Verification
    seconds: float
    contribution: str

    @classmethod
    def gather(cls, ledger: Path, admission: Admission) -> VerifiedLedger:
        """Verify the ledger, signatures and spends included."""
        started = time.perf_counter()
        found = verify(ledger)
        if found.problem is not None:
            problem = f"the demo's ledger is not verified: {found.problem}"
            raise LaminaError("cli.demo-not-verified", problem, "report this")
        seconds = time.perf_counter() - started
        traced = next(each for each in admission if each.account.signed)
        return cls(ledger=ledger, found=found, seconds=seconds, contribution=traced.descriptor.hex())

    def words(self) -> str:
        found = self.found
        return (
            f"verified in {self.seconds:.1f} seconds: {found.size} records, {found.checkpoints} signed checkpoints, "
            f"{found.attestations} signatures of contributions, {found.spends} figures of ε computed anew"
        )

    def commands(self) -> list[str]:
        """What to type, to see it oneself."""
        place = quote(str(self.ledger))
        return [
            f"lamina ledger verify {place}",
            f"lamina ledger show {place} --kind epoch",
            f"lamina ledger trace {place} {self.contribution}",
        ]

    def machine(self) -> dict[str, Any]:
        return {**self.found.to_dict(), "seconds": round(self.seconds, 2), "contribution": self.contribution}
