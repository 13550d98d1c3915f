"""Checkpoints: bit for bit, whole or not there, and refused by name when they are not what was written."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import resource
import shutil
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from forked import as_nobody, failing, in_child, kill, refusal
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from safetensors.torch import load_file
from torch import Tensor

from lamina import cbor
from lamina.errors import StorageError
from lamina.run.training_checkpoint import _DTYPES, CheckpointArchive, TrainingCheckpoint, TrainingCheckpoints


def bits(tensor: Tensor) -> bytes:
    """Dtype, shape and the bytes in C order, by another way than the one under test."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    raw = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{plain.dtype} {tuple(plain.shape)} ".encode() + raw


def same(one: TrainingCheckpoint, two: TrainingCheckpoint) -> bool:
    return one.state == two.state and {n: bits(t) for n, t in one.tensors.items()} == {
        n: bits(t) for n, t in two.tensors.items()
    }


def small(number: int = 1) -> TrainingCheckpoint:
    tensors = {"model/w": torch.arange(3.0) + number, "model/b": torch.tensor([True, False])}
    return TrainingCheckpoint(tensors=tensors, state={"step": number, "lr": 0.1})


def put(path: Path, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


# ---------------------------------------------------------------------------------------------------- what it holds


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {f"dtype/{i}": torch.randint(0, 2, (3, 2)).to(dtype) for i, dtype in enumerate(_DTYPES)}
    tensors |= {
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "empty scalar-like": torch.empty(0),
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([1.0]).expand(5),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "negated": torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "of a graph": torch.nn.Parameter(torch.randn(3)) * 2,
        "odd values": torch.tensor([math.nan, -math.nan, math.inf, -0.0, 5e-324], dtype=torch.float64),
        "payload": torch.tensor([0x7FC01234, -0x400000], dtype=torch.int32).view(torch.float32),
        'ünïcode / "quoted" \\ name': torch.ones(1),
    }
    state = {"none": None, "floats": [0.1, math.inf, -0.0], "deep": {"er": [[1], {"2": b"x"}]}, 7: True}
    snapshot = TrainingCheckpoint(tensors=tensors, state=state)
    checkpoints = TrainingCheckpoints(tmp_path / "checkpoint")
    digest = checkpoints.save(7, snapshot)
    read, again = checkpoints.load(7)
    assert same(read, snapshot) and again == digest and len(digest) == 32
    assert all(t.is_contiguous() and not t.requires_grad for t in read.tensors.values())
    assert os.listdir(checkpoints.folder) == ["000007.safetensors"]
    assert checkpoints.path(7).stat().st_mode & 0o777 == 0o600
    theirs = load_file(checkpoints.path(7))  # the format's own library reads the same
    assert {n: bits(t) for n, t in theirs.items()} == {n: bits(t) for n, t in tensors.items()}


names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 4), max_size=3)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(names, st.tuples(st.sampled_from(list(_DTYPES)), shapes), max_size=5),
    st.dictionaries(st.text(), values, max_size=3),
)
def test_any_snapshot_comes_back(
    tmp_path_factory: pytest.TempPathFactory, spec: dict[str, tuple[torch.dtype, list[int]]], state: dict[str, object]
) -> None:
    checkpoints = TrainingCheckpoints(tmp_path_factory.getbasetemp() / "any")
    tensors = {}
    for i, (name, (dtype, shape)) in enumerate(spec.items()):
        raw = torch.arange(i, i + math.prod(shape) * dtype.itemsize) % 2
        tensors[name] = (
            raw.to(torch.uint8).view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
        )
    snapshot = TrainingCheckpoint(tensors=tensors, state=state)
    with mock.patch("os.fsync"):
        digest = checkpoints.save(0, snapshot)
    read, again = checkpoints.load(0)
    assert same(read, snapshot) and digest == again
    assert checkpoints.path(0).stat().st_size == CheckpointArchive.of(0, tensors, state).size()


def test_the_digest_is_what_it_says(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    snapshot = small()
    digest = checkpoints.save(3, snapshot)
    header = checkpoints.path(3).read_bytes()
    header = header[8 : 8 + int.from_bytes(header[:8], "little")]
    metadata = json.loads(header)["__metadata__"]
    body = base64.b64decode(metadata["lamina"])
    assert cbor.decode(body, floats=True) == {"format": 2, "index": 3, "alias": {}, "state": snapshot.state}
    total = hashlib.sha256(b"lamina/checkpoint/1" + len(body).to_bytes(8, "big") + body)
    for name, dtype, shape, raw in [
        ("model/b", "BOOL", [2], b"\x01\x00"),
        ("model/w", "F32", [3], b"\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40"),
    ]:
        facts = cbor.encode([name, dtype, shape])
        total.update(len(facts).to_bytes(8, "big") + facts + raw)
    assert metadata == {"lamina": metadata["lamina"], "digest": digest.hex()} and digest == total.digest()


def test_anything_that_differs_has_another_digest(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    w = torch.arange(6.0)
    variants: list[TrainingCheckpoint] = [
        TrainingCheckpoint(tensors={"a": w}, state={}),
        TrainingCheckpoint(tensors={"b": w}, state={}),
        TrainingCheckpoint(tensors={"a": w.view(2, 3)}, state={}),
        TrainingCheckpoint(tensors={"a": w.view(torch.int32)}, state={}),
        TrainingCheckpoint(tensors={"a": w + 1}, state={}),
        TrainingCheckpoint(tensors={"a": w[:3], "b": w[3:]}, state={}),
        TrainingCheckpoint(tensors={"a": w[:2], "b": w[2:]}, state={}),
        TrainingCheckpoint(tensors={"a": w}, state={"x": 1}),
        TrainingCheckpoint(tensors={"a": w}, state={"x": 1.0}),
        TrainingCheckpoint(tensors={"a": w}, state={"x": True}),
    ]
    digests = [checkpoints.save(0, v) for v in variants] + [checkpoints.save(1, variants[0])]
    assert len(set(digests)) == len(digests)
    assert checkpoints.save(0, TrainingCheckpoint(tensors={"a": w.clone()}, state={})) == digests[0]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    w = torch.randn(1000)
    z = torch.randn(4, dtype=torch.complex64)
    tensors = {"embed": w, "head": w.view(1000), "part": w[:999], "shape": w.view(10, 100), "z": z, "z*": z.conj()}
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(0, TrainingCheckpoint(tensors=tensors, state={}))
    assert set(load_file(checkpoints.path(0))) == set(tensors) - {"head"}
    read, _ = checkpoints.load(0)
    assert same(read, TrainingCheckpoint(tensors=tensors, state={}))
    assert read.tensors["head"] is read.tensors["embed"]


def test_a_checkpoint_is_smaller_than_twice_the_model_and_optimiser(tmp_path: Path) -> None:
    tensors = {f"layer{i}/w": torch.randn(64, 64) for i in range(24)}
    tensors |= {f"optimizer/{i}/step": torch.tensor(1.0) for i in range(24)}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(0, TrainingCheckpoint(tensors=tensors, state={"optimizer": [["d", "lr", 0.1]] * 24}))
    assert size < checkpoints.path(0).stat().st_size < 1.05 * size


def test_saving_copies_at_most_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Peak of resident memory in a child, over what the tensors take: the non-contiguous ones are copied singly."""

    def work() -> int:
        torch.set_num_threads(1)  # a forked child has no threads of OpenMP to wait for
        tensors = {str(i): torch.ones(512, 1024).t() for i in range(32)}  # 2 MB each, 64 MB in all
        checkpoints = TrainingCheckpoints(tmp_path)
        checkpoints.save(0, TrainingCheckpoint(tensors={"warm": tensors["0"]}, state={}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        checkpoints.save(1, TrainingCheckpoint(tensors=tensors, state={}))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert int(in_child(work)) < 32_000  # kilobytes: half of the tensors, since pages that a fork touches count too
    tracemalloc.start()
    TrainingCheckpoints(tmp_path).save(2, TrainingCheckpoint(tensors={"w": torch.ones(1 << 20)}, state={}))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_what_a_checkpoint_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(0, small())
    for wrong in (torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        for attempt in (lambda s: checkpoints.save(1, s), checkpoints.room):
            with raises_code("train.tensor-unsupported") as caught:
                attempt(TrainingCheckpoint(tensors={"model/odd": wrong}, state={}))
            assert caught.value.remedy
    with raises_code("train.tensor-unsupported"):
        checkpoints.save(1, TrainingCheckpoint(tensors={"__metadata__": torch.ones(1)}, state={}))
    with raises_code("train.tensor-unsupported"):
        checkpoints.save(1, TrainingCheckpoint(tensors={"\ud800": torch.ones(1)}, state={}))
    for state in ({"x": math.nan}, {"x": torch.ones(1)}, {"x": {1.5: 2}}, {"x": b"y" * (1 << 26)}):
        with raises_code("train.state-not-encodable"):
            checkpoints.save(1, TrainingCheckpoint(tensors={}, state=state))
    assert checkpoints.indices() == [0] and same(checkpoints.load(0)[0], small())


# ---------------------------------------------------------------------------------------------------- which are there


def test_which_are_there_and_pruning(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    assert checkpoints.indices() == []
    for index in (3, 0, 1_234_567, 12, 999_999):
        checkpoints.save(index, small(index))
    for name in ("12.safetensors", "0000012.safetensors", "000001.txt", "abcdef.safetensors", "notes"):
        (tmp_path / name).write_bytes(b"")
    assert checkpoints.indices() == [0, 3, 12, 999_999, 1_234_567]
    checkpoints.prune(keep=7)
    assert len(checkpoints.indices()) == 5
    checkpoints.prune()
    assert checkpoints.indices() == [999_999, 1_234_567]
    assert same(checkpoints.load(999_999)[0], small(999_999))
    assert (tmp_path / "notes").exists() and (tmp_path / "12.safetensors").exists()
    checkpoints.prune(keep=1)
    assert checkpoints.indices() == [1_234_567]
    checkpoints.save(1_234_567, small(5))  # again, in its place
    assert same(checkpoints.load(1_234_567)[0], small(5))


def test_a_missing_one_is_told_with_those_there(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(3, small())
    with raises_code("train.checkpoint-missing") as caught:
        checkpoints.load(4)
    refusal(caught.value, checkpoints.path(4))


def test_room_is_asked_for_before_anything_is_spent(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    snapshot = TrainingCheckpoint(tensors={"w": torch.zeros(250_000)}, state={})
    checkpoints.room(snapshot)
    checkpoints.save(0, snapshot)
    size = checkpoints.path(0).stat().st_size
    for free, enough in ((size, False), (int(1.09 * size), False), (int(1.11 * size) + 512, True)):
        with mock.patch("os.statvfs", return_value=SimpleNamespace(f_bavail=free // 512, f_frsize=512)):
            if enough:
                checkpoints.room(snapshot)
            else:
                with raises_code("train.disk-full") as caught:
                    checkpoints.room(snapshot)
                refusal(caught.value, tmp_path)


# ---------------------------------------------------------------------------------------------------- damage


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(5, small())
    path = checkpoints.path(5)
    data = path.read_bytes()
    for at in range(len(data)):
        for mask in (1 << at % 8, 0xFF):
            put(path, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
            with pytest.raises(StorageError) as caught:
                checkpoints.load(5)
            refusal(caught.value, path)
    put(path, data)
    assert same(checkpoints.load(5)[0], small())


def test_cut_or_lengthened_anywhere_it_is_refused(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(5, small())
    path = checkpoints.path(5)
    data = path.read_bytes()
    for length in range(len(data)):
        put(path, data[:length])
        with raises_code("train.checkpoint-damaged") as caught:
            checkpoints.load(5)
        assert "byte" in refusal(caught.value, path)
    for tail in (b"\0", b"x" * 100):
        put(path, data + tail)
        with raises_code("train.checkpoint-damaged"):
            checkpoints.load(5)


def test_a_file_that_is_cut_after_it_was_read_does_no_harm(tmp_path: Path) -> None:
    """A mapped tensor would meet SIGBUS here, which no handler can turn into a message."""
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(5, small())

    def work() -> bool:
        read, _ = checkpoints.load(5)
        os.truncate(checkpoints.path(5), 0)
        return same(read, small())

    assert in_child(work) == "True"


@given(st.binary(max_size=200), st.integers(0, 400))
def test_bytes_that_nobody_wrote_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int
) -> None:
    checkpoints = TrainingCheckpoints(tmp_path_factory.getbasetemp() / "nobody's")
    checkpoints.path(0).touch()
    for content in (data, length.to_bytes(8, "little") + b'{"__metadata__":{' + data):
        put(checkpoints.path(0), content)
        with raises_code("train.checkpoint-damaged"):
            checkpoints.load(0)


def forged(checkpoints: TrainingCheckpoints, content: object, tensors: dict[str, Tensor], index: int = 0) -> None:
    """A file with a right digest over a content that this version never writes."""
    archive = CheckpointArchive(tensors=tensors, body=cbor.encode(content, floats=True))
    data = archive.header(archive.digest()) + b"".join(archive.data())
    checkpoints.path(index).write_bytes(data)


def test_a_later_format_a_swapped_file_and_a_strange_state_are_told(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    plain = {"format": 2, "index": 0, "alias": {}, "state": {}}
    forged(checkpoints, plain, {})
    checkpoints.load(0)
    for wrong, words in [
        ({**plain, "format": 3, "more": 1}, "train.checkpoint-format-unknown"),
        ({**plain, "format": 1}, "train.checkpoint-format-unknown"),
        ({**plain, "format": "2"}, "train.checkpoint-damaged"),
        ({**plain, "extra": 1}, "train.checkpoint-damaged"),
        ({**plain, "index": 4}, "train.checkpoint-misnamed"),
        ({**plain, "state": []}, "train.checkpoint-damaged"),
        ({**plain, "alias": {"a": "b"}}, "train.checkpoint-damaged"),
        ({**plain, "alias": {"a": ["b"]}}, "train.checkpoint-damaged"),
        ({**plain, "alias": {"w": "w"}}, "train.checkpoint-damaged"),
        ([1], "train.checkpoint-damaged"),
    ]:
        forged(checkpoints, wrong, {"w": torch.ones(1)})
        with raises_code(words) as caught:
            checkpoints.load(0)
        refusal(caught.value, checkpoints.path(0))
    for index in (1, 2):
        checkpoints.save(index, small(index))
    shutil.copy(checkpoints.path(2), checkpoints.path(1))
    with raises_code("train.checkpoint-misnamed"):
        checkpoints.load(1)


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("call", "nth", "error", "advice"),
    [
        ("open", 1, errno.EROFS, "writable"),
        ("write", 1, errno.ENOSPC, "free space"),
        ("write", 2, errno.ENOSPC, "free space"),
        ("fsync", 1, errno.EIO, "another disk"),
        ("replace", 1, errno.EACCES, "writable"),
    ],
)
@pytest.mark.parametrize("index", [1, 2])
def test_a_failed_save_leaves_everything_as_it_was(
    tmp_path: Path, call: str, nth: int, error: int, advice: str, index: int
) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(1, small(1))
    with failing(call, error, nth=nth), pytest.raises(StorageError) as caught:
        checkpoints.save(index, small(9))
    assert advice in refusal(caught.value, checkpoints.path(index))
    assert os.listdir(tmp_path) == ["000001.safetensors"] and same(checkpoints.load(1)[0], small(1))


def test_a_failed_prune_or_read_is_told(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    for index in range(3):
        checkpoints.save(index, small(index))
    with failing("unlink", errno.EROFS), pytest.raises(StorageError) as caught:
        checkpoints.prune(keep=1)
    refusal(caught.value, tmp_path)
    assert checkpoints.indices() == [0, 1, 2]
    for call, attempt in (("listdir", checkpoints.indices), ("fstat", lambda: checkpoints.load(0))):
        with failing(call, errno.EIO), pytest.raises(StorageError) as caught:
            attempt()
        refusal(caught.value, tmp_path)
    with failing("statvfs", errno.EIO), pytest.raises(StorageError):
        checkpoints.room(small())


def test_a_full_disk_in_earnest(tmp_path: Path) -> None:
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(1, small())
    large = TrainingCheckpoint(tensors={"w": torch.ones(100_000)}, state={})

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        checkpoints.save(2, large)

    answer = in_child(work)
    assert answer.startswith("StorageError") and "free space" in answer and str(checkpoints.path(2)) in answer
    assert os.listdir(tmp_path) == ["000001.safetensors"] and same(checkpoints.load(1)[0], small())


def test_a_read_only_folder_in_earnest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    TrainingCheckpoints(folder).save(1, small())
    folder.chmod(0o555)
    answer = in_child(lambda: as_nobody(folder, lambda: TrainingCheckpoints(Path()).save(2, small())))
    assert answer.startswith("StorageError") and "writable" in answer
    folder.chmod(0o755)
    assert os.listdir(folder) == ["000001.safetensors"]


def test_killed_at_any_instant_each_checkpoint_is_whole(tmp_path: Path) -> None:
    snapshots = [
        TrainingCheckpoint(tensors={f"w{i}": torch.full((50_000,), n + 0.5) for i in range(3)}, state={"n": n})
        for n in range(2)
    ]
    TrainingCheckpoints(tmp_path).save(0, snapshots[0])
    left = 0
    for round_ in range(80):
        if left and round_ >= 8:
            break  # some of the kills hit a writer at work; on a busy machine that takes longer
        child = os.fork()
        if child == 0:
            try:
                checkpoints = TrainingCheckpoints(tmp_path)
                while True:
                    for snapshot in snapshots:
                        checkpoints.save(0, snapshot)
            finally:
                os._exit(1)
        time.sleep(0.004 * (round_ % 40 + 1))
        kill(child)
        left += len(os.listdir(tmp_path)) - 1
        checkpoints = TrainingCheckpoints(tmp_path)
        assert os.listdir(tmp_path) == ["000000.safetensors"]
        read, _ = checkpoints.load(0)
        assert same(read, snapshots[read.state["n"]])
    assert left > 0
