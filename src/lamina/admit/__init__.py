"""Who may contribute, under which bound, and how that is signed, checked and held to."""

from __future__ import annotations

from lamina.admit.admission import Admission, Admitted
from lamina.admit.attestation import Attestation, attest
from lamina.admit.bound import Bound
from lamina.admit.commitment import commit, subject_tag
from lamina.admit.contribute import Outcome, attest_folder
from lamina.admit.descriptor import SCHEMA, Descriptor
from lamina.admit.gate import Gate
from lamina.admit.key import PrivateKey, PublicKey
from lamina.admit.keyring import KeyEntry, KeyRing, Standing
from lamina.admit.lapse import Lapse
from lamina.admit.reason import Reason
from lamina.admit.refusal import Refusal
from lamina.admit.register import MemoryRegister, Register
from lamina.admit.resolution import Resolution
from lamina.admit.resolver import check_bound, resolve
from lamina.admit.source import Contribution, FolderContributions
from lamina.admit.terms import Terms, floors_hash, preset

__all__ = [
    "PublicKey", "PrivateKey", "KeyRing", "KeyEntry", "Standing",
    "Descriptor", "SCHEMA", "Attestation", "attest", "commit", "subject_tag",
    "Terms", "floors_hash", "preset", "attest_folder", "Outcome",
    "Contribution", "FolderContributions", "Gate", "Register", "MemoryRegister",
    "Admission", "Admitted", "Lapse", "Reason", "Refusal",
    "Bound", "check_bound", "resolve", "Resolution",
]  # fmt: skip
