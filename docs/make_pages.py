"""Write what docs can take from the code: docs/errors/, docs/run-options.md and tables of other pages.

`make docs` runs it; tests/test_docs.py fails when a page is not what this would write.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from lamina.admit.verdicts import Reason
from lamina.errors import family_of
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
REASONS_BEGIN, REASONS_END = "<!-- reasons: make docs writes this -->", "<!-- end of reasons -->"
CODE = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")
FILES = re.compile(r".*\.(cbor|css|db|html|json|key|md)")  # names of files that look like codes
RUN_FILE_KEYS = {"admit.keys", "corpus.delta", "data.path"}
INDEX = """# Error codes

Every refusal ends in a code, such as `[plan.epsilon-above-floor]`. Each code belongs to a family of related refusals, such as
`plan.policy`. A code never changes its meaning, so programs and tests may rely on it; the wording may improve.

| | code | family |
|---|---|---|
| Python | `error.code` | `error.family` |
| `--json`: a refusal, a problem of `lamina ledger verify` or `lamina release verify` | `code` | `family` |
| a refusal of the [service](../service.md) | `code` | `family` |

```python
from lamina.errors import LaminaError

try:
    trainer.run()
except LaminaError as error:
    if error.family != "store":  # a store that is busy or not reachable may recover
        raise
```

The exception classes of `lamina.errors` are coarser than families. A code from outside Lamina, such as `acme.no-licence`, is in the
family of its first part (`acme`). The gate's reasons for refusing a contribution are listed in [admission](../admission.md).
`make docs` writes these pages from the source and from docs/error_families.toml.

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
    """The syntax tree of a source file, and what its names stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._assignments: dict[ast.FunctionDef, list[tuple[ast.stmt, str, ast.expr]]] = {}
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        self.constants = {name: value for line in tree.body for name, value in _assigned(line)}
        self.imported = {
            a.asname or a.name: a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
        }

    def assignments(self, function: ast.FunctionDef) -> list[tuple[ast.stmt, str, ast.expr]]:
        """The assignments in a function: where, to which name, which value."""
        if function not in self._assignments:
            self._assignments[function] = [(n, name, v) for n in ast.walk(function) for name, v in _assigned(n)]
        return self._assignments[function]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that enclose a node, from the innermost."""
        while (node := self.parents.get(node, self.tree)) is not self.tree:
            yield node

    def meanings(self, name: ast.Name, others: Mapping[str, ast.expr], depth: int = 0) -> list[ast.expr]:
        """What a name may stand for: local assignments that reach it, else arguments of callers, else a constant."""
        around = [*self.around(name)]
        for function in (n for n in around if isinstance(n, ast.FunctionDef)):
            found = []
            for line, value in reversed(
                [
                    (n, v)
                    for n in ast.walk(function)
                    for at, v in _assigned(n)
                    if at == name.id and n.lineno <= name.lineno
                ]
            ):
                block = self.parents[line]
                if block not in around and _leaves(block, line):
                    continue
                if block in around and _other_branch(block, line, [name, *around]):
                    continue
                found.append(value)
                if block in around:
                    break
            if found:
                return found
            names = [each.arg for each in function.args.args]
            if name.id in names and depth < 2:
                return self._passed(function, names, name.id)
        constant = self.constants.get(name.id) or others.get(self.imported.get(name.id, ""))
        return [] if constant is None else [constant]

    def _passed(self, function: ast.FunctionDef, names: list[str], name: str) -> list[ast.expr]:
        """What callers in this file pass as an argument."""
        at, found = names.index(name) - (names[0] == "self"), []
        for call in self.calls:
            if called(call) == function.name:
                found += [k.value for k in call.keywords if k.arg == name] or call.args[at : at + 1]
        defaults = dict(zip(reversed(names), reversed(function.args.defaults), strict=False))
        return found + ([defaults[name]] if name in defaults else [])


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


def _branch(block: ast.AST, line: ast.AST) -> list[ast.AST]:
    branches = (getattr(block, field, None) for field in ("body", "orelse", "finalbody"))
    return next((b for b in branches if isinstance(b, list) and line in b), [])


def _leaves(block: ast.AST, line: ast.AST) -> bool:
    """Whether the branch of a line ends elsewhere, so that its assignments reach no later line."""
    branch = _branch(block, line)
    return bool(branch) and isinstance(branch[-1], ast.Raise | ast.Return | ast.Continue | ast.Break)


def _other_branch(block: ast.AST, line: ast.AST, path: list[ast.AST]) -> bool:
    branch = _branch(block, line)
    return bool(branch) and not any(node in branch for node in path)


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


class Reader:
    """Reads codes, messages and remedies out of the calls that state them."""

    def __init__(self) -> None:
        paths = (p for p in sorted(SOURCE.rglob("*.py")) if p.name != "validate.py")
        self.modules = [Module(ast.parse(path.read_text(encoding="utf-8"))) for path in paths]
        self.constants = {name: value for module in self.modules for name, value in module.constants.items()}
        self.areas = {name.partition(".")[0] for name in FAMILIES} | {"audit", "bench", "models", "report"}

    def codes(self, module: Module, node: ast.expr, depth: int = 0) -> list[str]:
        """The codes that an argument may be."""
        match node:
            case ast.Constant(value=str(value)) if CODE.fullmatch(value) and value not in RUN_FILE_KEYS:
                return [value] if value.partition(".")[0] in self.areas and not FILES.fullmatch(value) else []
            case ast.IfExp():
                return self.codes(module, node.body, depth) + self.codes(module, node.orelse, depth)
            case ast.Call(func=ast.Attribute(attr="get", value=table), args=[_, default]):
                tables = module.meanings(table, self.constants) if isinstance(table, ast.Name) else [table]
                found = [value for each in tables if isinstance(each, ast.Dict) for value in each.values]
                return [code for each in [*found, default] for code in self.codes(module, each, depth)]
            case ast.Name() if depth < 1:
                functions = (each for each in module.around(node) if isinstance(each, ast.FunctionDef))
                values = [v for each in functions for _, name, v in module.assignments(each) if name == node.id]
                return [code for each in values for code in self.codes(module, each, 1)]
        return []

    def texts(self, module: Module, node: ast.expr, depth: int = 0) -> list[str]:
        """The texts that an expression may have, with … for values."""
        match node:
            case ast.Constant():
                return [node.value] if isinstance(node.value, str) else ["…"]
            case ast.JoinedStr():
                plain = "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
                return [plain] if _words([plain]) else self._joined(module, node, depth)
            case ast.BinOp(op=ast.Add()):
                right = self.texts(module, node.right, depth)
                return [one + two for one in self.texts(module, node.left, depth) for two in right]
            case ast.IfExp():
                return self.texts(module, node.body, depth) + self.texts(module, node.orelse, depth)
            case ast.BoolOp():
                return [text for each in node.values for text in self.texts(module, each, depth)]
            case ast.Name() if depth < 4:
                found = module.meanings(node, self.constants, depth)
                return [text for each in found for text in self.texts(module, each, depth + 1)] or ["…"]
            case ast.Call() if called(node) in module.functions and depth < 4:
                returned = [
                    n.value for n in ast.walk(module.functions[called(node)]) if isinstance(n, ast.Return) and n.value
                ]
                return [text for each in returned for text in self.texts(module, each, depth + 1)] or ["…"]
        return ["…"]

    def _joined(self, module: Module, node: ast.JoinedStr, depth: int) -> list[str]:
        """The texts of an f-string whose words are all in the names that it holds."""
        found, worded = [""], False
        for part in node.values:
            name = part.value if isinstance(part, ast.FormattedValue) else part
            texts = self.texts(module, name, depth) if isinstance(name, ast.Name | ast.Constant) else ["…"]
            found = [before + text for before in found for text in (["…"] if worded and len(texts) > 1 else texts)]
            worded = worded or bool(_words(texts))
        return found

    def stated(self, module: Module, call: ast.Call, at: int) -> tuple[list[str], list[str]]:
        """The messages and remedies of a call whose argument `at` is the code."""
        keywords = {k.arg: k.value for k in call.keywords}
        remedies = self.texts(module, keywords["remedy"]) if "remedy" in keywords else []
        if called(call) in ("whole", "number", "positive", "one_of", "partial"):
            value = self._bounds(module, call, at)
            names = [name for name in keywords if name not in (None, *CHECK_OPTIONS)]
            return [f"{names[0] if names else '…'} is …, must be {value}"], _words(remedies) or [f"pass {value}"]
        rest: list[ast.expr] = []
        for argument in call.args[at + 1 : at + 3]:
            value = argument.value if isinstance(argument, ast.Starred) else argument
            if isinstance(argument, ast.Starred) and isinstance(value, ast.Name):
                value = next(iter(module.meanings(value, self.constants)), value)
            if isinstance(argument, ast.Starred) and isinstance(value, ast.Call) and called(value) in module.functions:
                returned = (n.value for n in ast.walk(module.functions[called(value)]) if isinstance(n, ast.Return))
                value = next((each for each in returned if isinstance(each, ast.Tuple)), value)
            rest += value.elts if isinstance(argument, ast.Starred) and isinstance(value, ast.Tuple) else [value]
        messages = self.texts(module, rest[0]) if rest else []
        if called(call) == "compare":  # of a certificate with its ledger: parts that differ
            return ["… is … in the certificate, but … by the ledger"], []
        if len(rest) > 1 and called(call) != "note":  # a finding: code, reason, file
            remedies = self.texts(module, rest[1])
        if not (_words(messages) and _words(remedies)) and called(call) in module.functions:
            more = self._of_helper(module, module.functions[called(call)], at)
            messages, remedies = (
                one if _words(one) else two for one, two in zip((messages, remedies), more, strict=True)
            )
        return messages, remedies

    def _of_helper(self, module: Module, helper: ast.FunctionDef, at: int) -> tuple[list[str], list[str]]:
        """What a function states for the code that it is given."""
        names = [each.arg for each in helper.args.args if each.arg != "self"]
        for call in (n for n in ast.walk(helper) if isinstance(n, ast.Call) and called(n) != helper.name):
            for place, argument in enumerate(call.args):
                if at < len(names) and isinstance(argument, ast.Name) and argument.id == names[at]:
                    passed_on = {each.id for each in call.args[place + 1 :] if isinstance(each, ast.Name)} & {*names}
                    return ([], []) if passed_on else self.stated(module, call, place)
        return [], []

    def _bounds(self, module: Module, call: ast.Call, at: int) -> str:
        """What a check of `lamina.validate` demands, in its words."""
        limits = {k.arg: self._figure(module, k.value) for k in call.keywords if k.arg in SIGNS}
        match called(call):
            case "one_of":
                return f"one of {self._choices(module, call.args[at + 1])}"
            case "whole" if "most" in limits:
                return f"a whole number in [{limits.get('least', '1')}, {limits['most']}]"
            case "whole":
                return f"a whole number >= {limits.get('least', '1')}"
            case "positive":
                return "a number > 0"
        return "a number " + (" and ".join(f"{SIGNS[name]} {limits[name]}" for name in limits) or "that is finite")

    def _figure(self, module: Module, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            node = next(iter(module.meanings(node, self.constants)), node)
        return "…" if any(isinstance(n, ast.Name | ast.Call) for n in ast.walk(node)) else ast.unparse(node)

    def _choices(self, module: Module, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            node = next(iter(module.meanings(node, self.constants)), node)
        parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        return ", ".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts) or "…"


SIGNS = {"above": ">", "least": ">=", "below": "<", "most": "<="}
CHECK_OPTIONS = (*SIGNS, "remedy", "infinite")
FAMILIES = tomllib.loads((ROOT / "docs" / "error_families.toml").read_text(encoding="utf-8"))


def _words(texts: list[str]) -> list[str]:
    """Those texts that say something."""
    return [text for text in dict.fromkeys(texts) if re.search(r"[a-z]{2}", text)]


@functools.cache
def error_codes() -> dict[str, tuple[list[str], list[str]]]:
    """Every code with its messages and remedies, wherever the source states a refusal or a finding."""
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    reader = Reader()
    for module in reader.modules:
        for call in module.calls:
            for at, argument in enumerate(call.args):
                for code in reader.codes(module, argument) if called(call) not in ("get", "startswith") else []:
                    for known, more in zip(found[code], reader.stated(module, call, at), strict=True):
                        known += [text for text in _words(more) if text not in known]
    return dict(sorted(found.items()))


def error_pages() -> dict[str, str]:
    """docs/errors/: a page for each family, and the list of families."""
    families: dict[str, dict[str, tuple[list[str], list[str]]]] = {name: {} for name in sorted(FAMILIES)}
    for code, stated in error_codes().items():
        families[family_of(code)][code] = stated
    pages, index = {}, INDEX
    for family, codes in families.items():
        page = FAMILIES[family]
        index += f"| [`{family}`]({family}.md) | {page['title']} | {len(codes)} |\n"
        text = f"# {page['title']}\n\nFamily `{family}` ([all families](index.md)). {page['about']}\n\n"
        text += f"**What to do:** {page['general']}\n\n`…` stands for a value.\n\n"
        own = "remedy" in page  # findings share what to do in general
        text += "| code | message | remedy |\n|---|---|---|\n" if own else "| code | message |\n|---|---|\n"
        for code, (messages, remedies) in codes.items():
            said = messages or [f"{code.partition('.')[2].replace('-', ' ')}: …"]  # passes on what failed underneath
            cells = [_cells(said), _cells(remedies or [page["remedy"]])] if own else [_cells([*said, *remedies])]
            text += f"| `{code}` | {' | '.join(cells)} |\n"
        pages[f"errors/{family}.md"] = text
    return {"errors/index.md": index, **pages}


def _cells(texts: list[str]) -> str:
    return "<br>".join(map(_cell, texts))


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
    rows = [f"| `{each.value}` | {_cell(each.meaning)} | {_cell(each.remedy)} |" for each in Reason]
    table = "\n".join(["| reason | what is wrong | what to do |", "|---|---|---|", *rows, ""])
    page = (ROOT / "docs" / "admission.md").read_text(encoding="utf-8")
    before, rest = page.split(REASONS_BEGIN)
    return f"{before}{REASONS_BEGIN}\n{table}{REASONS_END}{rest.split(REASONS_END)[1]}"


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
    ours = {"admission.md": admission_page(), "architecture.md": architecture_page(), "run-options.md": options_page()}
    return {**error_pages(), **ours}


if __name__ == "__main__":
    written = pages()
    (ROOT / "docs" / "errors").mkdir(exist_ok=True)
    for old in (ROOT / "docs" / "errors").glob("*.md"):
        old.unlink()
    for name, text in written.items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")
