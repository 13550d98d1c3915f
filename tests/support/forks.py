"""Several processes at once: each does one thing, and none of them may fail."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def in_processes(*targets: Callable[[], None]) -> None:
    """Fork one child for each target, and wait for all of them."""
    children = []
    for target in targets:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                target()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
