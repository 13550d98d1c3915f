"""The demo's hospitals: each signs for its patients with a key of its own. A few contributions are wrong on purpose."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from lamina.admit.attestation import attest
from lamina.admit.commitment import NONCE_BYTES, commit
from lamina.admit.contribute import YEAR, State, attest_folder
from lamina.admit.key import PrivateKey
from lamina.admit.keyring import KeyRing
from lamina.admit.source import ATTESTATION, DESCRIPTOR
from lamina.admit.terms import Terms
from lamina.cli.demo.patients import Group, Patients
from lamina.cli.demo.sizes import Sizes
from lamina.errors import LaminaError
from lamina.plan import Policy

HOSPITALS = ("north", "south")
STRICT = 2.5  # the noise multiplier that some sensitive patients sign; their class asks for less
PAYLOAD = "payload.npz"


def contribute(
    folder: Path, patients: Patients, policy: Policy, sizes: Sizes, tick: Callable[[int], None]
) -> KeyRing:
    """Write and sign FOLDER/ID/… for every patient; returns the ring of the hospitals' public keys.

    The private keys are forgotten: nobody can sign for these hospitals again.
    """
    keys, ring = {name: PrivateKey.generate() for name in HOSPITALS}, KeyRing()
    for name, key in keys.items():
        ring.add(key.public, label=f"hospital {name}")
    classes = {
        one: cls for cls, group in patients.contributing().items() for one in _write(folder, cls, group)
    }
    strict = [one for one, cls in classes.items() if cls == "sensitive"][:: sizes.strict_every]
    done = 0
    for i, key in enumerate(keys.values()):
        mine = dict(list(classes.items())[i :: len(keys)])
        for some, multiplier in ((set(mine) - set(strict), None), (set(mine) & set(strict), STRICT)):
            _sign(folder, key, policy, {one: mine[one] for one in sorted(some)}, noise_multiplier=multiplier)
            done += len(some)
            tick(done)
    _spoil(folder, patients.sensitive, policy, keys["north"])
    return ring


def _write(folder: Path, cls: str, group: Group) -> list[str]:
    names = [f"{cls}-{i:03d}" for i in range(len(group))]
    for name, x, label in zip(names, group.x, group.label.tolist(), strict=True):
        _payload(folder / name, x, label)
    return names


def _payload(folder: Path, x: Tensor, label: int) -> None:
    folder.mkdir(parents=True)
    np.savez(folder / PAYLOAD, x=x.numpy(), y=np.full(len(x), label))


def _sign(
    folder: Path,
    key: PrivateKey,
    policy: Policy,
    classes: Mapping[str, str],
    *,
    noise_multiplier: float | None = None,
    ago: int = 0,
) -> None:
    """As `lamina attest` does, for those that have a class; `ago`: as if it had been so many seconds earlier."""
    if not classes:
        return
    now = int(time.time()) - ago
    for each in attest_folder(folder, key, policy, classes, noise_multiplier=noise_multiplier, now=now):
        if each.id in classes and each.state is not State.SIGNED:
            raise LaminaError(
                "cli.demo-could-not", f"the demo could not sign {each.id!r}: {each.problem}", "report this"
            )


def _spoil(folder: Path, group: Group, policy: Policy, key: PrivateKey) -> None:
    """Six that the gate must refuse, each for another reason."""

    def fresh(name: str, patient: int) -> str:
        one = f"sensitive-{name}"
        _payload(folder / one, group.x[patient], int(group.label[patient]))
        return one

    fresh("unsigned", 1)
    late, stranger, changed = fresh("expired", 2), fresh("stranger", 3), fresh("changed", 4)
    _sign(folder, key, policy, {late: "sensitive"}, ago=2 * YEAR)
    _sign(folder, PrivateKey.generate(), policy, {stranger: "sensitive"})
    _sign(folder, key, policy, {changed: "sensitive"})
    np.savez(folder / changed / PAYLOAD, x=-group.x[4].numpy(), y=np.full(len(group.x[4]), 0))
    _sign_permissively(folder / fresh("permissive", 5), key, policy)
    shutil.copytree(folder / "sensitive-000", folder / "sensitive-copied")


def _sign_permissively(folder: Path, key: PrivateKey, policy: Policy) -> None:
    """`lamina attest` does not sign a bound that is more permissive than its class; somebody else's program may."""
    now = int(time.time())
    terms = Terms.make(policy, "sensitive", not_before=now, expires=now + YEAR)
    loose = replace(terms, noise_multiplier=terms.noise_multiplier // 2)
    nonce = secrets.token_bytes(NONCE_BYTES)
    descriptor = loose.descriptor(
        contributor=key.public.id, nonce=nonce, commitment=commit(nonce, folder / PAYLOAD), items=3
    )
    (folder / DESCRIPTOR).write_bytes(descriptor.encode())
    (folder / ATTESTATION).write_bytes(attest(descriptor, key, issued_at=now))
