"""Data in memory, signed as a whole by a local key: the same evidence as a contribution from elsewhere."""

from __future__ import annotations

import secrets
import time

from lamina.admit.admission import Admission
from lamina.admit.attestation import attest
from lamina.admit.commitment import NONCE_BYTES, commit
from lamina.admit.contribute import YEAR
from lamina.admit.gate import Gate
from lamina.admit.key import PrivateKey
from lamina.admit.keyring import KeyRing
from lamina.admit.source import Contribution
from lamina.admit.terms import Terms
from lamina.errors import AdmissionError
from lamina.plan import Policy
from lamina.train.corpus import Corpus

NAME = "data"


def signed(corpus: Corpus, policy: Policy, cls: str, key: PrivateKey | None = None) -> Admission:
    """One attestation for all contributions of a corpus, signed by `key` and verified by the gate.

    items       the number of contributions
    commitment  SHA-256(nonce ‖ SHA-256 of all data), or of its declared version
    bound       the class's: ε as the policy has it

    Without a key one is made for the call and forgotten: the evidence then says that one process saw this data under
    this bound, and not who vouches for it.
    """
    key = PrivateKey.generate() if key is None else key
    now, nonce, data = int(time.time()), secrets.token_bytes(NONCE_BYTES), corpus.fingerprint()
    descriptor = Terms.make(policy, cls, not_before=now, expires=now + YEAR).descriptor(
        contributor=key.public.id, nonce=nonce, commitment=commit(nonce, data), items=len(corpus)
    )
    ring = KeyRing()
    ring.add(key.public, label="local")
    offered = Contribution(NAME, descriptor.encode(), attest(descriptor, key, issued_at=now), data)
    found = Gate(policy, ring).review([offered])
    for refusal in found.refused:
        raise AdmissionError(
            "train.data-signed-local",
            f"the data, signed with a local key, is refused: {refusal.reason.meaning}",
            "report this",
        )
    return found
