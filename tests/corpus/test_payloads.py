"""Payloads that were handed over are told apart by id and content, wherever they lie."""

from __future__ import annotations

from pathlib import Path

from lamina.corpus.admitted import GivenPayloads
from lamina.corpus.example_sources import keyed_hasher


def digest(ids: list[str], payloads: list[bytes | Path]) -> bytes:
    hasher = keyed_hasher(bytes(32), "test")
    GivenPayloads(ids, payloads).feed(hasher)
    return hasher.digest()


def test_what_was_handed_over_is_fed_by_id_and_content(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK one")
    found = digest(["a", "b"], [b"PK one", b"two"])
    assert digest(["a", "b"], [tmp_path / "a.npz", b"two"]) == found
    others = [
        digest(["a", "c"], [b"PK one", b"two"]),
        digest(["a", "b"], [b"PK one", b"tw0"]),
        digest(["a", "b"], [b"PK onet", b"wo"]),
        digest(["b", "a"], [b"two", b"PK one"]),
    ]
    assert len({found, *others}) == 5
