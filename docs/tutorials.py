"""Tutorials: programs in examples/ whose comments are prose. They become pages of the site and Jupyter notebooks.

A line `# %%` begins a cell of code, `# %% [markdown]` a cell of text, as in the editors that know this format.
"""

from __future__ import annotations

import json
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
TUTORIALS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def cells(name: str) -> list[tuple[str, str]]:
    """The cells of a tutorial: "markdown" or "code", and the text."""
    found: list[tuple[str, str]] = []
    for part in f"\n{(EXAMPLES / f'{name}.py').read_text('utf-8')}".split("\n# %%")[1:]:
        kind, _, body = part.partition("\n")
        if kind.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            found.append(("markdown", "\n".join(lines)))
        else:
            found.append(("code", body.strip("\n")))
    return found


def page(name: str) -> str:
    """A tutorial as a page."""
    first, *rest = (body if kind == "markdown" else f"```python\n{body}\n```" for kind, body in cells(name))
    title, _, text = first.partition("\n")
    note = f"[Notebook]({name}.ipynb) · `python examples/{name}.py` runs this page. The tests run it, too."
    return "\n\n".join([title, note, text.strip(), *rest]) + "\n"


def notebook(name: str) -> str:
    """A tutorial as a Jupyter notebook."""
    made = []
    for place, (kind, body) in enumerate(cells(name)):
        cell = {"cell_type": kind, "id": f"cell-{place}", "metadata": {}, "source": body.splitlines(keepends=True)}
        made.append(cell if kind == "markdown" else cell | {"execution_count": None, "outputs": []})
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
