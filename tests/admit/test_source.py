"""Contributions on disk: what is read, and what is not even opened."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from contribution_sources import NamedSource
from refusals import raises_code

from lamina.admit import reasons
from lamina.admit.attestation import MAX_ATTESTATION, MAX_DESCRIPTOR
from lamina.admit.contribution_sources import Contribution, ContributionSource, FolderContributions, read_signed_bytes
from lamina.admit.reasons import ContributionRefused, Reason


def refused_by(admission: Any) -> dict[str, Reason]:
    return {refusal.id: refusal.reason for refusal in admission.refused}


def test_a_folder_is_sized_sorted_and_can_be_read_again(desk: Any, tmp_path: Path) -> None:
    for name in ("b", "a", "c d", "é"):
        desk.write(tmp_path, desk.offer(name))
    source = FolderContributions(tmp_path)
    assert isinstance(source, ContributionSource)
    assert len(source) == 4
    for _ in range(2):
        assert [each.id for each in source] == ["a", "b", "c d", "é"]
    assert source.get("a").payload == tmp_path / "a" / "payload.bin"
    assert len(desk.gate().review(source)) == 4
    desk.write(tmp_path, desk.offer("later"))
    assert len(source) == 5


@pytest.mark.parametrize("suffix", ["", ".npz", ".csv", ".tar.gz"])
def test_any_payload_is_a_payload(desk: Any, tmp_path: Path, suffix: str) -> None:
    desk.write(tmp_path, desk.offer("a"), suffix=suffix)
    assert len(desk.gate().review(tmp_path)) == 1


def test_what_lies_beside_is_nobodys(desk: Any, tmp_path: Path) -> None:
    desk.write(tmp_path, desk.offer("a"))
    (tmp_path / "policy.toml").write_text("…")
    (tmp_path / ".git").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("…")
    admission = desk.gate().review(tmp_path)
    assert len(admission) == 1 and not admission.refused


def test_incomplete_folders(desk: Any, tmp_path: Path) -> None:
    for missing in ("descriptor.cbor", "attestation.cose", "payload.bin"):
        (desk.write(tmp_path, desk.offer(f"without {missing}")) / missing).unlink()
    (tmp_path / "empty").mkdir()
    assert refused_by(desk.gate().review(tmp_path)) == {
        "empty": reasons.NO_ATTESTATION,
        "without attestation.cose": reasons.NO_ATTESTATION,
        "without descriptor.cbor": reasons.NO_DESCRIPTOR,
        "without payload.bin": reasons.NO_PAYLOAD,
    }


def test_links_are_not_followed(desk: Any, tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    real = desk.write(outside, desk.offer("real"))
    inside.mkdir()
    (inside / "folder").symlink_to(real)
    (inside / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("descriptor.cbor", "attestation.cose", "payload.bin"):
        place = desk.write(inside, desk.offer(name))
        (place / name).unlink()
        (place / name).symlink_to(real / name)
    loop = desk.write(inside, desk.offer("loop")) / "payload.bin"
    loop.unlink()
    loop.symlink_to(loop)
    found = refused_by(desk.gate().review(inside))
    assert set(found.values()) == {reasons.UNREADABLE}
    assert set(found) == {"folder", "dangling", "descriptor.cbor", "attestation.cose", "payload.bin", "loop"}


@pytest.mark.timeout(30)
def test_pipes_and_folders_are_not_read(desk: Any, tmp_path: Path) -> None:
    for name in ("descriptor.cbor", "attestation.cose", "payload.bin"):
        place = desk.write(tmp_path, desk.offer(f"pipe {name}"))
        (place / name).unlink()
        os.mkfifo(place / name)
        place = desk.write(tmp_path, desk.offer(f"folder {name}"))
        (place / name).unlink()
        (place / name).mkdir()
    os.mkfifo(tmp_path / "pipe")
    found = refused_by(desk.gate().review(tmp_path))
    assert len(found) == 7 and set(found.values()) == {reasons.UNREADABLE}


def test_several_payloads_are_refused(desk: Any, tmp_path: Path) -> None:
    (desk.write(tmp_path, desk.offer("a")) / "payload.npz").write_bytes(b"which?")
    (refusal,) = desk.gate().review(tmp_path).refused
    assert refusal.reason is reasons.UNREADABLE
    assert "payload.bin" in refusal.detail and "payload.npz" in refusal.detail


def test_strange_names(desk: Any, tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    for name in (b"\xff\xfe", b"new\nline", b"\x1b[31m", b"a" * 255, b" ", b"-rf", b"..."):
        os.mkdir(root + b"/" + name)
    found = refused_by(desk.gate().review(tmp_path))
    assert found.pop("a" * 255) is reasons.NO_ATTESTATION  # a long name, but a name
    assert found.pop(" ") is reasons.NO_ATTESTATION and found.pop("-rf") is reasons.NO_ATTESTATION
    assert set(found.values()) == {reasons.BAD_ID} and len(found) == 3  # "..." is hidden
    assert all(id.isprintable() for id in found)


@pytest.mark.parametrize("id", ["", ".", "..", "../a", "a/../../b", "/etc", "a\0b"])
def test_nothing_outside_the_folder_is_reached(desk: Any, tmp_path: Path, id: str) -> None:
    desk.write(tmp_path, desk.offer("a"))
    (tmp_path / "in").mkdir()
    assert FolderContributions(tmp_path / "in").get(id).read_error[0] is reasons.BAD_ID  # type: ignore[index]


def test_a_folder_that_is_exchanged_while_it_is_read(
    desk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was listed is what is read: nothing comes in through a link that took its place."""
    given, other = desk.offer("a"), desk.offer("other")
    place, outside = desk.write(tmp_path / "in", given), desk.write(tmp_path / "out", other)
    listed = os.listdir

    def exchanged(folder: Any) -> list[str]:
        found = listed(folder)
        place.rename(tmp_path / "moved")
        place.symlink_to(outside)
        return found

    monkeypatch.setattr(os, "listdir", exchanged)
    source = FolderContributions(tmp_path / "in")
    found = source.get("a")
    assert (found.descriptor, found.attestation) == (given.descriptor, given.attestation)
    assert (
        source.get("a").read_error
        == source.without_payload("a").read_error
        == (reasons.UNREADABLE, "it is not a folder")
    )


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, (1 << 20) - 4096, (1 << 20) - 1, 1 << 20, (1 << 21) + 5])
def test_payloads_of_all_sizes_are_read_to_their_end(desk: Any, tmp_path: Path, size: int) -> None:
    given = desk.offer("a", payload=os.urandom(size))
    place = desk.write(tmp_path, given) / "payload.bin"
    assert len(desk.gate().review(tmp_path)) == 1
    assert len(desk.gate(max_payload=size).review(tmp_path)) == 1
    with place.open("ab") as file:
        file.write(b"x")
    assert refused_by(desk.gate().review(tmp_path)) == {"a": reasons.PAYLOAD_MISMATCH}
    assert refused_by(desk.gate(max_payload=size).review(tmp_path)) == {"a": reasons.TOO_LARGE}


def test_large_files_are_not_read(desk: Any, tmp_path: Path) -> None:
    for name in ("descriptor.cbor", "attestation.cose", "payload.bin"):
        with open(desk.write(tmp_path, desk.offer(name)) / name, "r+b") as file:
            file.truncate(1 << 40)
    source = FolderContributions(tmp_path)
    assert len(source.get("descriptor.cbor").descriptor or b"") == MAX_DESCRIPTOR + 1
    assert len(source.get("attestation.cose").attestation or b"") == MAX_ATTESTATION + 1
    found = refused_by(desk.gate().review(source))
    assert len(found) == 3 and set(found.values()) == {reasons.TOO_LARGE}


def test_a_payload_that_grows_while_it_is_read(desk: Any, tmp_path: Path) -> None:
    """/proc files have size 0 and content; so has a file that is being written."""
    given = desk.offer("a")
    gate = desk.gate(max_payload=16)
    path = Path("/proc/self/status")
    refusal = gate.check(Contribution("a", given.descriptor, given.attestation, path))
    assert refusal.reason is reasons.TOO_LARGE and "grew" in refusal.detail  # type: ignore[union-attr]


def test_a_folder_that_vanishes_during_the_review(desk: Any, tmp_path: Path) -> None:
    source = FolderContributions(tmp_path)
    assert source.get("nobody").read_error == (reasons.UNREADABLE, "No such file or directory")


def test_a_file_is_no_folder_of_contributions(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        with raises_code("admit.folder-unreadable"):
            FolderContributions(path)


def test_no_descriptor_of_a_file_is_left_open(desk: Any, tmp_path: Path) -> None:
    for i in range(20):
        desk.write(tmp_path, desk.offer(f"{i}"))
    (tmp_path / "3" / "payload.bin").write_bytes(b"x")
    gc.collect()  # what other tests left open is closed before it is counted
    before = len(os.listdir("/proc/self/fd"))
    desk.gate().review(tmp_path)
    desk.gate(processes=2).review(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_source_is_read_again_without_payloads(desk: Any, tmp_path: Path) -> None:
    given = [desk.offer(name) for name in ("a", "b", "c")]
    for each in given:
        desk.write(tmp_path, each)
    (tmp_path / "a" / "payload.bin").unlink()
    (tmp_path / "b" / "attestation.cose").unlink()
    (tmp_path / "c" / "descriptor.cbor").unlink()
    (tmp_path / "c" / "descriptor.cbor").symlink_to(tmp_path / "a" / "descriptor.cbor")
    folder = FolderContributions(tmp_path)
    assert read_signed_bytes(folder, "a", 0) == (given[0].descriptor, given[0].attestation)
    for name, reason in (("b", reasons.GONE), ("c", reasons.UNREADABLE), ("d", reasons.GONE)):
        with pytest.raises(ContributionRefused) as caught:
            read_signed_bytes(folder, name, 0)
        assert caught.value.reason is reason


def test_any_source_that_can_be_asked_is_read_again(desk: Any) -> None:
    given = [desk.offer(f"{i}") for i in range(6)]
    for source in (NamedSource(given), given):
        for place in (0, 2, 5):
            assert read_signed_bytes(source, f"{place}", place) == (given[place].descriptor, given[place].attestation)
        for name, place in (("9", 9), ("x", 1)):
            with pytest.raises(ContributionRefused) as caught:
                read_signed_bytes(source, name, place)
            assert caught.value.reason is reasons.GONE
    with raises_code("admit.source-read-once"):
        read_signed_bytes(iter(given), "0", 0)
