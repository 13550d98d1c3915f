"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lamina.cli.output import err


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yields what tells it how much is done, and perhaps of how many."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as drawn:
        task = drawn.add_task(what, total=total)

        def tell(done: int, of: int | None = total) -> None:
            drawn.update(task, completed=done, total=of)

        yield tell
