"""What leaves the house: certificate, release manifest, inference gate. Needs no torch."""

from lamina.release.certificate import Certificate, certify
from lamina.release.gate import Query, ReleaseGate, Rights
from lamina.release.manifest import make_release, verify_release

__all__ = ["Certificate", "Query", "ReleaseGate", "Rights", "certify", "make_release", "verify_release"]
