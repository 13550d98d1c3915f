"""Contributions in several folders: one corpus, one admission, one listing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refusals import raises_code

from lamina import Corpus, Gate, KeyRing, Policy, PrivateKey
from lamina.admit.signing import attest_folder

POLICY = Policy.from_dict(
    {
        "corpus": {"origin": "several", "delta": 1e-5},
        "class": {"data": {"population": 20, "epsilon": 2.0, "unit": "patient"}},
    }
)


def write(root: Path, *ids: str, listing: str | None = None) -> Path:
    for id in ids:
        (root / id).mkdir(parents=True)
        np.savez(root / id / "payload.npz", x=np.full((2, 3), ord(id[-1]), np.float32), y=np.zeros(2, int))
    if listing is not None:
        (root / "contributions.csv").write_text(listing)
    return root


@pytest.fixture
def hospitals(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / "north", "b", "d"), write(tmp_path / "south", "a", "c")]


def test_several_folders_are_one_corpus(hospitals: list[Path], tmp_path: Path) -> None:
    corpus, whole = Corpus.of_folder(hospitals), Corpus.of_folder(write(tmp_path / "all", "a", "b", "c", "d"))
    assert list(corpus._index.ids) == ["a", "b", "c", "d"] == list(whole._index.ids)
    rows = np.arange(8)
    assert corpus.source.fetch(rows)[0].tolist() == whole.source.fetch(rows)[0].tolist()
    assert corpus.digest(b"k") == whole.digest(b"k")


def test_several_folders_are_admitted_by_signature(hospitals: list[Path]) -> None:
    key, ring = PrivateKey.generate(), KeyRing()
    ring.add(key.public, label="hospital")
    for folder in hospitals:
        assert len(list(attest_folder(folder, key, POLICY, "data"))) == 2
    corpus = Gate(POLICY, ring).admit(hospitals)
    assert list(corpus.ids) == ["a", "b", "c", "d"] and not corpus.admission.refused
    assert corpus.source.fetch(np.arange(8))[0][:, 0].tolist() == [ord(c) for c in "aabbccdd"]
    np.savez(hospitals[1] / "c" / "payload.npz", x=np.zeros((2, 3), np.float32), y=np.zeros(2, int))
    found = Gate(POLICY, ring).admit(hospitals)
    assert [each.id for each in found.admission.refused] == ["c"]


def test_an_id_lies_in_one_folder(hospitals: list[Path]) -> None:
    write(hospitals[1], "b")
    with raises_code("admit.id-in-two-folders") as refused:
        Corpus.of_folder(hospitals)
    assert "north" in refused.value.problem and "south" in refused.value.problem
    with raises_code("admit.id-in-two-folders"):  # nobody counts twice
        Corpus.of_folder([hospitals[0], hospitals[0]])


def test_listings_are_joined(tmp_path: Path) -> None:
    folders = [tmp_path / "north", tmp_path / "south"]
    for folder, (id, label) in zip(folders, [("b", 1), ("a", 0)], strict=True):
        (folder / id).mkdir(parents=True)
        np.savez(folder / id / "payload.npz", x=np.zeros((1, 2), np.float32))
        (folder / "contributions.csv").write_text(f"id,y\n{id},{label}\n")
    assert Corpus.of_folder(folders).source.fetch(np.arange(2))[1].tolist() == [0, 1]
    (folders[1] / "contributions.csv").write_text("id,y,subject\na,0,s\n")
    with raises_code("corpus.listings-differ"):
        Corpus.of_folder(folders)
    (folders[1] / "contributions.csv").unlink()
    with raises_code("corpus.listings-differ"):
        Corpus.of_folder(folders)
