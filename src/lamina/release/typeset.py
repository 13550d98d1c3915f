"""Templates of papers: rows of text with their conditions, texts with facts, and pages that typst sets."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from lamina.errors import LaminaError

NOT_STATED = "not stated"


def _text(name: str) -> str:
    return resources.files("lamina.release").joinpath("templates", name).read_text(encoding="utf-8")


def filled(
    name: str, facts: Mapping[str, str], escape: Callable[[str], str], blocks: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return a template with escaped facts, or "not stated", for {fact}, and the lines of blocks for %BLOCK%.

    A line with a fact that is missing and marked {?fact} is left out.
    """

    def put(found: re.Match[str]) -> str:
        return "\n".join((blocks or {})[found[2]]) if found[2] else escape(facts.get(found[1], NOT_STATED))

    lines = [line for line in _text(name).splitlines() if not set(re.findall(r"\{\?([a-z]+)\}", line)) - facts.keys()]
    return re.sub(r"\{\??([a-z_. ]+)\}|%([A-Z]+)%", put, "\n".join(lines)) + "\n"


@cache
def read_template(name: str) -> Mapping[str, Any]:
    """Return the tables of a template in TOML."""
    return tomllib.loads(_text(name))


def stated_rows(rows: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows whose facts under `when` all hold; "not FACT" requires that the fact does not hold."""
    for row in rows:
        if all(not facts[name[4:]] if name.startswith("not ") else facts[name] for name in row.get("when", ())):
            yield row


def import_typst() -> Any:
    """Return the module that sets PDFs; LaminaError if it is not installed."""
    try:
        import typst
    except ImportError:
        problem = "the PDF needs typst, which is not installed"
        remedy = "pip install 'lamina[report]', or use the JSON or HTML"
        raise LaminaError("release.typst-missing", problem, remedy) from None
    return typst


def typeset(data: Mapping[str, Any], *templates: str) -> bytes:
    """Return the PDF of templates that read `data` as JSON, set by typst; the same bytes each time."""
    typst = import_typst()
    folder = resources.files("lamina.release")
    source = b"".join(folder.joinpath(name).read_bytes() for name in templates)
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    made = typst.compile(source, sys_inputs={"data": text}, ignore_system_fonts=True, timestamp=0)
    assert isinstance(made, bytes)
    return made
