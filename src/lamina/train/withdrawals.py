"""Who withdrew while a run was under way: kept in its folder, so that a restart does not let them in again.

runs/NAME/withdrawn      marks, CBOR, mode 0600: ids, or digests of descriptors where contributions are signed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamina import cbor
from lamina.errors import EncodingError, StorageError
from lamina.train.corpus import Corpus
from lamina.train.store.durable import write_atomically

LARGEST = 1 << 28


@contextmanager
def remembered(corpus: Corpus, path: Path) -> Iterator[None]:
    """Withdraw who withdrew before; write down who withdraws inside, before `corpus.withdraw` returns."""
    known = dict.fromkeys(marks_in(path))
    if known and (present := corpus.marked(*known)):
        corpus.withdraw(*present)

    def write(marks: Sequence[str]) -> None:
        known.update(dict.fromkeys(marks))
        write_atomically(path, cbor.encode(list(known), max_size=LARGEST))

    before, corpus.when_withdrawn = corpus.when_withdrawn, write
    try:
        yield
    finally:
        corpus.when_withdrawn = before


def marks_in(path: Path) -> list[str]:
    """The marks that a file of the run lists; none if it is not there."""
    marks = read_texts(path, [])
    if not isinstance(marks, list):
        raise StorageError("train.not-list-texts", f"'{path}' is not a list of texts", "restore it")
    return marks


def read_texts(path: Path, default: Any) -> Any:
    """A list of texts, or a map from text to text."""
    if not path.exists():
        return default
    try:
        read = cbor.decode(path.read_bytes(), max_size=LARGEST)
    except (OSError, EncodingError) as error:
        raise StorageError(
            "train.not-read",
            f"'{path}' cannot be read: {error}",
            "restore it: it says who is in the run, or withdrew and must not be used again",
        ) from error
    texts = [*read, *read.values()] if isinstance(read, dict) else read
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise StorageError("train.not-hold-texts", f"'{path}' does not hold texts", "restore it")
    return read
