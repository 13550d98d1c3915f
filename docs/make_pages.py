"""Write what docs can take from the code: docs/errors/, docs/run-options.md and tables of other pages.

`make docs` runs it; tests/test_docs.py fails when a page is not what this would write.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from lamina.admit.reasons import REASONS
from lamina.errors import family_of
from lamina.release.gate import DENIALS
from lamina.run.options import OPTIONS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lamina"
FOLDERS = (
    "", "account", "plan", "allocate",
    "allocate/measure", "engine", "engine/layers", "engine/native", "sign", "admit", "ledger", "ledger/store",
    "ledger/verify", "release", "run", "integrations", "audit", "report", "signals", "signals/demo", "recipes", "study", "serve",
    "bench", "cli",
    "cli/ledger",
)  # fmt: skip
BEGIN, END = "<!-- files: make docs writes this -->", "<!-- end of files -->"
DENIALS_BEGIN, DENIALS_END = "<!-- denials: make docs writes this -->", "<!-- end of denials -->"
REASONS_BEGIN, REASONS_END = "<!-- reasons: make docs writes this -->", "<!-- end of reasons -->"
CODE = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")
FILES = re.compile(r".*\.(cbor|css|db|html|json|key|md)")  # names of files that look like codes
RUN_FILE_KEYS = {"admit.keys", "corpus.delta", "data.path"}
INDEX = """# Error codes

Every refusal ends in a code, such as `[plan.epsilon-above-floor]`, and its message states the problem, the value, the bound and the
remedy. A code never changes its meaning; the wording of a message may improve. Each code belongs to a family, such as `plan.policy`.
Python has both as `error.code` and `error.family`; `--json` and the [service](../service.md) as `code` and `family`.

```python
from lamina.errors import LaminaError

try:
    trainer.run()
except LaminaError as error:
    if error.family != "store":  # a store that is busy or not reachable may recover
        raise
```

Exception classes are coarser than families. A code from outside Lamina, such as `acme.no-licence`, is in the family of its first
part. [Admission](../admission.md) lists the reasons of the gate.
`make docs` writes these pages from the source and docs/error_families.toml.

| family | topic | codes |
|---|---|---|
"""


OPTIONS_PAGE = """# Options of a run

Keywords of `lamina.Trainer`, and keys of the same names in RUN.toml. `lamina train --template` prints a RUN.toml with every key.
`make docs` writes this page from `lamina/run/options.py`, where each option is declared once: its help, default, type and checks.

A program can add an option with `lamina.run.options.declare(name, Option(…))` before it reads a RUN.toml or makes a trainer.
`apply` is called with the trainer and the value, and `steps=True` says that a run which is resumed must have the same value.
It cannot replace a key that exists.
"""


class Module:
    """The syntax tree of a source file."""

    def __init__(self, tree: ast.Module) -> None:
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def values(self, name: ast.Name) -> Iterator[ast.expr]:
        """The values that the functions around a name, or else the file, assign to it."""
        node: ast.AST | None = name
        while (node := self.parents.get(node)) is not None:
            within = ast.walk(node) if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
            if isinstance(node, ast.FunctionDef | ast.Module):
                yield from (value for each in within for n, value in _assigned(each) if n == name.id)

    def codes(self, node: ast.expr, depth: int = 0) -> Iterator[str]:
        """The codes that an argument of a call may be."""
        match node:
            case ast.Constant(value=str(value)) if CODE.fullmatch(value) and value.partition(".")[0] in AREAS:
                yield from [] if value in RUN_FILE_KEYS or FILES.fullmatch(value) else [value]
            case ast.IfExp():
                yield from (code for each in (node.body, node.orelse) for code in self.codes(each, depth))
            case ast.Call(func=ast.Attribute(attr="get", value=table), args=[_, default]):
                tables = self.values(table) if isinstance(table, ast.Name) else [table]
                found = [value for each in tables if isinstance(each, ast.Dict) for value in each.values]
                yield from (code for each in [*found, default] for code in self.codes(each, depth))
            case ast.Name() if depth < 1:
                yield from (code for each in self.values(node) for code in self.codes(each, 1))


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    value = getattr(node, "value", None)
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) or value is None:
        return
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from ((t.id, v) for t, v in zip(target.elts, value.elts, strict=False) if isinstance(t, ast.Name))


FAMILIES = tomllib.loads((ROOT / "docs" / "error_families.toml").read_text(encoding="utf-8"))
AREAS = {name.partition(".")[0] for name in FAMILIES} | {"audit", "bench", "models", "report"}


@functools.cache
def error_codes() -> list[str]:
    """Every code of the source: an argument of a call that states a refusal or a finding."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        module = Module(ast.parse(path.read_text(encoding="utf-8")))
        for call in module.calls if path.name != "validate.py" else []:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name not in ("get", "startswith"):
                found |= {code for argument in call.args for code in module.codes(argument)}
    return sorted(found)


def error_pages() -> dict[str, str]:
    """docs/errors/: a page for each family, and the list of families."""
    families: dict[str, list[str]] = {name: [] for name in sorted(FAMILIES)}
    for code in error_codes():
        families[family_of(code)].append(code)
    pages, index = {}, INDEX
    for family, codes in families.items():
        page = FAMILIES[family]
        index += f"| [`{family}`]({family}.md) | {page['title']} | {len(codes)} |\n"
        text = f"# {page['title']}\n\nFamily `{family}` ([all](index.md)). {page['about']}\n\n"
        text += f"**What to do:** {page['general']}\n\n```text\n" + "".join(f"{code}\n" for code in codes) + "```\n"
        pages[f"errors/{family}.md"] = text
    return {"errors/index.md": index, **pages}


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;")


def architecture_page() -> str:
    """The page with its table of files written anew."""
    out = []
    for folder in FOLDERS:
        out.append(f"### `{folder}/`\n" if folder else "### The root\n")
        if folder:
            out.append(_head(SOURCE / folder / "__init__.py") + "\n")
        out.append("| file | holds |\n|---|---|")
        files = (p for p in sorted((SOURCE / folder).glob("*.py")) if not p.name.startswith("__"))
        out += [f"| `{path.name}` | {_head(path)} |" for path in files] + [""]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(out) + END + rest.split(END)[1]


def admission_page() -> str:
    """The page with its table of reasons written anew."""
    rows = [f"| `{each.word}` | {_cell(each.meaning)} | {_cell(each.remedy)} |" for each in REASONS]
    table = "\n".join(["| reason | what is wrong | what to do |", "|---|---|---|", *rows, ""])
    page = (ROOT / "docs" / "admission.md").read_text(encoding="utf-8")
    before, rest = page.split(REASONS_BEGIN)
    return f"{before}{REASONS_BEGIN}\n{table}{REASONS_END}{rest.split(REASONS_END)[1]}"


def release_page() -> str:
    """The page with its table of denials written anew."""
    rows = [f"| `{each.code}` | {_cell(each.means)} | {_cell(each.remedy)} |" for each in DENIALS]
    table = "\n".join(["| reason | means | what to do |", "|---|---|---|", *rows, ""])
    page = (ROOT / "docs" / "release.md").read_text(encoding="utf-8")
    before, rest = page.split(DENIALS_BEGIN)
    return f"{before}{DENIALS_BEGIN}\n{table}{DENIALS_END}{rest.split(DENIALS_END)[1]}"


def options_page() -> str:
    """The options of a run."""
    rows = [
        f"| `{name}` | {f'`{_cell(option.example)}`' if option.example else '`[' + name + ']`' if option.toml else '–'} "
        f"| {_cell(option.help)} |"
        for name, option in OPTIONS.items()
    ]
    return "\n".join([OPTIONS_PAGE, "| option | in RUN.toml | effect |", "|---|---|---|", *rows, ""])


def _head(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return _cell(doc.split("\n\n")[0])


def pages() -> dict[str, str]:
    """Every page that is written from the code, by its path in docs/."""
    ours = {
        "admission.md": admission_page(),
        "architecture.md": architecture_page(),
        "release.md": release_page(),
        "run-options.md": options_page(),
    }
    return {**error_pages(), **ours}


if __name__ == "__main__":
    written = pages()
    (ROOT / "docs" / "errors").mkdir(exist_ok=True)
    for old in (ROOT / "docs" / "errors").glob("*.md"):
        old.unlink()
    for name, text in written.items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")
