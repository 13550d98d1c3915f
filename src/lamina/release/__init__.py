"""What leaves the house: certificate, release manifest, inference gate. Needs no torch."""

from lamina.release.certificate import Certificate, certify
from lamina.release.gate import ReleaseGate
from lamina.release.maker import make_release
from lamina.release.query import Query, Rights
from lamina.release.verifier import verify_release

__all__ = ["Certificate", "Query", "ReleaseGate", "Rights", "certify", "make_release", "verify_release"]
