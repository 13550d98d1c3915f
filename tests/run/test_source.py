"""Sources: what can be data, what it becomes, what a digest sees, and messages for everything else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from lamina.run.example_sources import ArraySource, DatasetSource, ExampleSource, dataset_of, make_source

ROWS = np.array([4, 0, 4, 2])
NONE = np.array([], dtype=np.int64)


class Items(Dataset[Any]):
    """A map-style Dataset from a function of the row."""

    def __init__(self, item: Callable[[int], Any], size: int = 6) -> None:
        self.item, self.size = item, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> Any:
        assert isinstance(row, int) and 0 <= row < self.size
        return self.item(row)


# ------------------------------------------------------------------------------------------ arrays


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor, lambda a: a.tolist()])
def test_rows_of_an_array(make: Callable[[Any], Any]) -> None:
    x = np.arange(30, dtype=np.float64).reshape(6, 5)
    source = make_source(make(x), make(np.arange(6)))
    assert len(source) == 6 and isinstance(source, ExampleSource)
    got, y = source.fetch(ROWS)
    assert got.dtype == torch.float32 and got.tolist() == x[ROWS].tolist()
    assert y.dtype == torch.int64 and y.tolist() == [4, 0, 4, 2]
    got, y = source.fetch(NONE)
    assert got.shape == (0, 5) and got.dtype == torch.float32 and y.shape == (0,)


def test_a_fetched_batch_is_a_copy() -> None:
    for x in (np.ones((3, 2), dtype=np.float32), torch.ones(3, 2)):
        make_source(x).fetch(np.arange(3))[0].zero_()
        assert float(x.sum()) == 6


def test_tuples_and_dicts_keep_their_form() -> None:
    x = {"a": np.arange(6.0), "more": (torch.arange(6), np.ones((6, 2)))}
    got, y = make_source(x, (np.arange(6), np.arange(6.0))).fetch(ROWS)
    assert list(got) == ["a", "more"] and isinstance(got["more"], tuple)
    assert got["a"].tolist() == got["more"][0].tolist() == [4, 0, 4, 2]
    assert got["more"][1].shape == (4, 2)
    assert isinstance(y, tuple) and [t.dtype for t in y] == [torch.int64, torch.float32]


def test_a_memmap_stays_where_it_is(tmp_path: Path) -> None:
    big = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(1000, 8))
    big[:] = np.arange(1000)[:, None]
    big.flush()
    source = make_source(np.load(tmp_path / "x.npy", mmap_mode="r"))
    big[999] = 1234  # seen: nothing was copied
    big.flush()
    got, _ = source.fetch(np.array([7, 999]))
    assert got[:, 0].tolist() == [7, 1234]
    assert source.digest(b"k") == make_source(np.array(big)).digest(b"k")


def test_pandas_columns_are_arrays() -> None:
    class Frame:
        """What pandas and polars have in common."""

        def __init__(self, values: Any) -> None:
            self.values = values

        def to_numpy(self) -> Any:
            return np.array(self.values)

    x, y = make_source(Frame([[1.0, 3.0], [2.0, 4.0]]), Frame([0, 1])).fetch(np.array([1]))
    assert x.tolist() == [[2.0, 4.0]] and y.tolist() == [1] and y.dtype == torch.int64


@pytest.mark.parametrize(
    ("given_dtype", "x_dtype", "y_dtype"),
    [
        (np.float64, torch.float32, torch.float32),
        (np.float32, torch.float32, torch.float32),
        (np.float16, torch.float32, torch.float32),
        (">f8", torch.float32, torch.float32),
        (np.longdouble, torch.float32, torch.float32),
        (np.uint8, torch.uint8, torch.int64),
        (np.int32, torch.int32, torch.int64),
        (">i4", torch.int32, torch.int64),
        (np.uint16, torch.int64, torch.int64),
        (np.int64, torch.int64, torch.int64),
        (np.bool_, torch.bool, torch.int64),
        (np.complex128, torch.complex128, torch.complex128),
    ],
)
def test_dtypes(given_dtype: Any, x_dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    values = np.array([0, 1, 1, 0, 1, 1]).astype(given_dtype)
    x, y = make_source(values, values).fetch(ROWS)
    assert (x.dtype, y.dtype) == (x_dtype, y_dtype)
    assert x.tolist() == y.tolist() == [1, 0, 1, 1]


def test_dtype_asked_for() -> None:
    x, y = make_source(np.ones(6), np.ones(6), dtype=torch.float64).fetch(ROWS)
    assert (x.dtype, y.dtype) == (torch.float64, torch.float64)
    x, y = make_source(np.ones(6, np.uint8), np.ones(6, np.uint8), dtype=torch.float32).fetch(ROWS)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    x, y = make_source(np.ones(6), np.ones(6), dtype=torch.int64).fetch(ROWS)
    assert (x.dtype, y.dtype) == (torch.int64, torch.float32)
    with raises_code("corpus.dtype-not-torch"):
        make_source(np.ones(6), dtype=np.float64)  # type: ignore[arg-type]


def test_values_that_are_not_finite_pass() -> None:
    assert make_source(np.array([np.nan, np.inf])).fetch(np.arange(2))[0].isnan().tolist() == [True, False]


# ------------------------------------------------------------------------------------------ digests


def test_every_byte_counts() -> None:
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    y = np.arange(6)
    before = make_source(x, y).digest(b"k")
    assert len(before) == 32 and make_source(x.copy(), y).digest(b"k") == before
    assert make_source(torch.from_numpy(x), torch.from_numpy(y)).digest(b"k") == before
    assert make_source(x.astype(">f4"), y).digest(b"k") == before
    assert make_source(np.asfortranarray(x), y).digest(b"k") == before
    bits = x.view(np.uint32)
    for place in np.ndindex(6, 4):
        bits[place] ^= 1
        assert make_source(x, y).digest(b"k") != before
        bits[place] ^= 1
    assert make_source(x, y).digest(b"k") == before


def test_form_counts() -> None:
    x = np.zeros((4, 6), dtype=np.float32)
    different = [
        make_source(x),
        make_source(x, np.zeros(4, np.int64)),
        make_source(x.reshape(4, 3, 2)),
        make_source(x.reshape(12, 2)),
        make_source(x.view(np.int32)),
        make_source(x, dtype=torch.float64),
        make_source((x,)),
        make_source({"0": x}),
        make_source((x[:, :3], x[:, 3:])),
        make_source((x[:, :4], x[:, 4:])),
        make_source(torch.zeros(4, 12, dtype=torch.bfloat16)),
    ]
    assert len({source.digest(b"k") for source in different}) == len(different)


def test_another_key_is_another_digest() -> None:
    source = make_source(np.zeros(3))
    assert len({source.digest(key) for key in (b"", b"a", b"b", bytes(32), bytes(64))}) == 5


def test_large_arrays_are_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(1000, dtype=np.float32).reshape(100, 10)
    whole = make_source(x).digest(b"k"), make_source(torch.from_numpy(x)).digest(b"k")
    monkeypatch.setattr("lamina.run.example_sources.CHUNK_BYTES", 128)
    assert (make_source(x).digest(b"k"), make_source(torch.from_numpy(x)).digest(b"k")) == whole


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_arrays_that_differ_have_different_digests(one: list[int], other: list[int]) -> None:
    same = one == other
    assert (make_source(np.array(one)).digest(b"") == make_source(np.array(other)).digest(b"")) == same


# ------------------------------------------------------------------------------------------ datasets


def test_items_of_a_dataset_are_stacked() -> None:
    source = make_source(Items(lambda i: (np.full(3, float(i)), i)))
    assert isinstance(source, DatasetSource)
    x, y = source.fetch(ROWS)
    assert x.dtype == torch.float32 and x[:, 0].tolist() == [4, 0, 4, 2]
    assert y.dtype == torch.int64 and y.tolist() == [4, 0, 4, 2]
    x, y = source.fetch(NONE)
    assert x.shape == (0, 3) and x.dtype == torch.float32 and y.shape == (0,) and y.dtype == torch.int64


@pytest.mark.parametrize(
    "item",
    [
        lambda i: torch.full((2,), i),
        lambda i: (torch.full((2,), i),),
        lambda i: {"ids": torch.full((2,), i), "mask": torch.ones(2)},
        lambda i: ((torch.full((2,), i), torch.ones(1)), i),
        lambda i: [torch.full((2,), i), i],
    ],
)
def test_forms_of_items(item: Callable[[int], Any]) -> None:
    x, y = make_source(Items(item)).fetch(ROWS)
    leaf = x["ids"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
    assert leaf[:, 0].tolist() == [4, 0, 4, 2]
    labelled = isinstance(item(0), tuple | list) and len(item(0)) == 2
    assert y.tolist() == [4, 0, 4, 2] if labelled else y is None


def test_a_tensor_dataset_is_its_arrays() -> None:
    source = make_source(TensorDataset(torch.arange(6.0), torch.arange(6)))
    assert isinstance(source, ArraySource)
    assert source.fetch(ROWS)[1].tolist() == [4, 0, 4, 2]
    subset = make_source(Subset(TensorDataset(torch.arange(12.0)), range(6, 12)))
    assert subset.fetch(ROWS)[0].tolist() == [10, 6, 10, 8]


def test_datasets_that_fetch_many_are_asked_once() -> None:
    class Many(Items):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            return [torch.tensor(float(-i)) for i in rows]

    assert make_source(Many(lambda i: torch.tensor(0.0))).fetch(ROWS)[0].tolist() == [-4, 0, -4, -2]


def test_digest_of_a_dataset_sees_every_item_and_leaves_the_generators_alone() -> None:
    def noisy(i: int) -> Any:
        legacy = np.random.rand()  # noqa: NPY002
        return torch.rand(2) + random.random() + legacy, i

    source = make_source(Items(noisy))
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    one = source.digest(b"k")
    after = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    assert after == (torch.rand(1), random.random(), np.random.rand())  # noqa: NPY002
    assert source.digest(b"k") == one == make_source(Items(noisy)).digest(b"k")
    values = [0, 1, 2, 3, 4, 5]
    plain = make_source(Items(lambda i: torch.tensor(values[i])))
    before = plain.digest(b"k")
    values[5] = 6
    assert plain.digest(b"k") != before
    assert make_source(Items(lambda i: torch.tensor(float(i)))).digest(b"k") != before


def test_making_a_source_leaves_the_generators_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    make_source(Items(lambda i: torch.rand(1))).fetch(NONE)
    assert torch.equal(torch.rand(1), expected)


def test_what_fails_in_a_batch_is_told_without_saying_where() -> None:
    def fails(i: int) -> Any:
        if i == 4:
            raise KeyError("scan-of-patient-4")
        return torch.zeros(2)

    source = make_source(Items(fails))
    with raises_code("corpus.dataset-failed") as refusal:
        source.fetch(ROWS)
    assert "4" not in str(refusal.value) and refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__
    ragged = make_source(Items(lambda i: torch.zeros(2 + i // 4)))
    with raises_code("corpus.dataset-failed"):
        ragged.fetch(ROWS)
    with raises_code("corpus.dataset-shapes-differ"):
        ragged.digest(b"k")


# ------------------------------------------------------------------------------------------ refusals


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(1)


REFUSED: dict[str, list[Callable[[], Any]]] = {  # by code
    "corpus.dataloader-not-poisson": [
        lambda: dataset_of(DataLoader(Items(float), sampler=WeightedRandomSampler([1.0] * 6, 6))),
        lambda: dataset_of(DataLoader(Items(float), batch_sampler=[[0, 1], [2]])),
        lambda: dataset_of(DataLoader(Items(float), collate_fn=lambda items: items)),
    ],
    "corpus.inputs-not-indexable": [
        lambda: make_source(Endless()),
        lambda: make_source(i for i in range(3)),
        lambda: make_source(len),
    ],
    "corpus.lengths-differ": [
        lambda: make_source(np.zeros(4), np.zeros(3)),
        lambda: make_source((np.zeros(4), np.zeros(5))),
    ],
    "corpus.labels-are-text": [
        lambda: make_source(np.zeros(2), ["a", "b"]),
        lambda: make_source(np.zeros(2), np.array(["a", "b"], object)),
    ],
    "corpus.inputs-are-text": [lambda: make_source({"a": ["u", "v"]})],
    "corpus.dtype-not-numeric": [
        lambda: make_source(np.array([{}, {}])),
        lambda: make_source(np.zeros(2, dtype=[("a", "f4")])),
    ],
    "corpus.inputs-are-dates": [lambda: make_source(np.array(["2020-01-01"], "datetime64[D]"))],
    "corpus.rows-differ-in-length": [lambda: make_source([[1.0], [1.0, 2.0]])],
    "corpus.list-of-tensors": [lambda: make_source([torch.zeros(2)])],
    "corpus.tensor-not-dense": [lambda: make_source(torch.zeros(2, 2).to_sparse())],
    "corpus.array-without-examples-axis": [lambda: make_source(torch.tensor(1.0))],
    "corpus.key-not-text": [lambda: make_source({0: np.zeros(2)})],
    "corpus.no-inputs": [lambda: make_source(())],
    "corpus.inputs-are-a-path": [lambda: make_source("data.csv"), lambda: make_source(Path("data.npz"))],
    "corpus.options-beside-source": [
        lambda: make_source(Items(float), np.zeros(6)),
        lambda: make_source(make_source(np.zeros(2)), np.zeros(2)),
    ],
    "corpus.dataset-item-not-a-pair": [lambda: make_source(Items(lambda i: (1.0, 2.0, 3.0)))],
    "corpus.dataset-not-numeric": [lambda: make_source(Items(lambda i: (1.0, "a")))],
    "corpus.dataset-shapes-differ": [lambda: make_source(Items(lambda i: object()))],
}


@pytest.mark.parametrize(("code", "attempt"), [(code, each) for code, every in REFUSED.items() for each in every])
def test_refusals_teach(code: str, attempt: Callable[[], Any]) -> None:
    with raises_code(code) as refusal:
        attempt()
    assert refusal.value.remedy


def test_nothing_of_the_data_is_shown() -> None:
    for source in (make_source(np.arange(7.0), np.arange(7)), make_source(Items(lambda i: float(i)))):
        assert not any(letter.isdigit() for letter in repr(source))
