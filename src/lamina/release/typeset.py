"""Templates of papers: rows of text with the facts under which they are stated, and pages that typst sets."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from lamina.errors import LaminaError


def template_text(name: str) -> str:
    """Return a file of release/templates."""
    return resources.files("lamina.release").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def read_template(name: str) -> Mapping[str, Any]:
    """Return the tables of a template in TOML."""
    return tomllib.loads(template_text(name))


def stated_rows(rows: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows whose facts under `when` all hold; a fact that begins with "not " must not hold."""
    for row in rows:
        if all(not facts[name[4:]] if name.startswith("not ") else facts[name] for name in row.get("when", ())):
            yield row


def typeset(data: Mapping[str, Any], *templates: str) -> bytes:
    """Return the PDF that typst makes of templates, which read `data` as JSON; the same bytes each time."""
    try:
        import typst
    except ImportError:
        problem = "the PDF needs typst, which is not installed"
        remedy = "pip install 'lamina[report]', or use the JSON or HTML"
        raise LaminaError("release.typst-missing", problem, remedy) from None
    folder = resources.files("lamina.release")
    source = b"".join(folder.joinpath(name).read_bytes() for name in templates)
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    made = typst.compile(source, sys_inputs={"data": text}, ignore_system_fonts=True, timestamp=0)
    assert isinstance(made, bytes)
    return made
