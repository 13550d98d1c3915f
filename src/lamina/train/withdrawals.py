"""Who withdrew while a run was under way: kept in its folder, so that a restart does not let them in again.

runs/NAME/withdrawn      ids, CBOR, mode 0600
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lamina import cbor
from lamina.errors import EncodingError, StorageError
from lamina.train.corpus import Corpus
from lamina.train.store.durable import write_atomically

LARGEST = 1 << 28


@contextmanager
def remembered(corpus: Corpus, path: Path) -> Iterator[None]:
    """Withdraw who withdrew before; write down who withdraws inside, before `corpus.withdraw` returns."""
    known = dict.fromkeys(ids_in(path))
    if known and (present := corpus.those(*known)):
        corpus.withdraw(*present)

    def write(ids: Sequence[str]) -> None:
        known.update(dict.fromkeys(ids))
        write_atomically(path, cbor.encode(list(known), max_size=LARGEST))

    before, corpus.when_withdrawn = corpus.when_withdrawn, write
    try:
        yield
    finally:
        corpus.when_withdrawn = before


def ids_in(path: Path) -> list[str]:
    """The ids that a file of the run lists; none if it is not there."""
    if not path.exists():
        return []
    try:
        ids = cbor.decode(path.read_bytes(), max_size=LARGEST)
    except (OSError, EncodingError) as error:
        raise StorageError(
            f"'{path}' cannot be read: {error}",
            "restore it: it says who is in the run, or withdrew and must not be used again",
        ) from error
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        raise StorageError(f"'{path}' is not a list of ids", "restore it")
    return ids
