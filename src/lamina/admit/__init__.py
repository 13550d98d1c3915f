"""Who may contribute, under which bound, and how that is signed, checked and held to."""

from __future__ import annotations

from lamina.admit.admission import Admission, AdmittedRow, Revalidation
from lamina.admit.attestation import DESCRIPTOR_SCHEMA, Attestation, Descriptor, attest, commit, subject_tag
from lamina.admit.checks import SigningTerms, floors_hash, preset
from lamina.admit.contribution_sources import Contribution, FolderContributions
from lamina.admit.gate import AdmissionGate
from lamina.admit.key_ring import KeyEntry, KeyRing, KeyStatus
from lamina.admit.keys import PrivateKey, PublicKey
from lamina.admit.resolver import Resolution, check_bound, resolve
from lamina.admit.signing import SigningOutcome, attest_folder
from lamina.admit.verdicts import Bound, MemoryRegister, Reason, Refusal, Register

__all__ = [
    "PublicKey", "PrivateKey", "KeyRing", "KeyEntry", "KeyStatus",
    "Descriptor", "DESCRIPTOR_SCHEMA", "Attestation", "attest", "commit", "subject_tag",
    "SigningTerms", "floors_hash", "preset", "attest_folder", "SigningOutcome",
    "Contribution", "FolderContributions", "AdmissionGate", "Register", "MemoryRegister",
    "Admission", "AdmittedRow", "Revalidation", "Reason", "Refusal",
    "Bound", "check_bound", "resolve", "Resolution",
]  # fmt: skip
