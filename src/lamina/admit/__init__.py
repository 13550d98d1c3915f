"""Who may contribute, under which bound, and how that is signed, checked and kept.

These names are imported on first use: `lamina keys` needs neither a policy nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamina.admit.admission import Admission, Revalidation
    from lamina.admit.attestation import DESCRIPTOR_SCHEMA, Attestation, Descriptor, attest, commit, subject_tag
    from lamina.admit.contribution_sources import Contribution, FolderContributions
    from lamina.admit.gate import AdmissionGate
    from lamina.admit.reasons import REASONS, Reason, Stage, refusal
    from lamina.admit.register import Register
    from lamina.admit.resolver import Resolution, resolve
    from lamina.admit.rows import Admitted, Refusal
    from lamina.admit.signing import SigningOutcome, attest_folder
    from lamina.admit.terms import SigningTerms, floors_hash, preset

__all__ = [
    "Descriptor", "DESCRIPTOR_SCHEMA", "Attestation", "attest", "commit", "subject_tag",
    "SigningTerms", "floors_hash", "preset", "attest_folder", "SigningOutcome",
    "Contribution", "FolderContributions", "AdmissionGate", "Register",
    "Admission", "Admitted", "Revalidation", "Refusal", "Reason", "REASONS", "Stage", "refusal",
    "resolve", "Resolution",
]  # fmt: skip
_FILES = (
    "attestation", "reasons", "rows", "register", "contribution_sources", "terms", "signing", "resolver", "admission", "gate",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        for file in _FILES:
            if hasattr(found := import_module(f"lamina.admit.{file}"), name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
