"""Write what docs can take from the code: docs/errors.md and the file table of docs/architecture.md.

`make docs` runs it; tests/test_docs.py fails when a page is not what this would write.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lamina"
FOLDERS = (
    "", "account", "plan", "sensitivity", "allocate", "engine", "engine/layers", "engine/native", "admit", "ledger", "ledger/store",
    "ledger/verify", "spend", "release", "corpus", "train", "integrations", "audit", "models", "data", "study", "report", "serve",
    "bench", "demo", "cli",
    "cli/ledger",
)  # fmt: skip
BEGIN, END = "<!-- files: make docs writes this -->", "<!-- end of files -->"
CODE = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")
HEAD = """# Error codes

Every refusal ends in a code, such as `[plan.epsilon-not-positive]`. `--json` prints it as `code`; in Python it is
`error.code`. A code never changes its meaning, so programs and tests may rely on it. The wording may improve.

`…` stands for a value. The gate's reasons for refusing a contribution are listed in [admission](admission.md).
`make docs` writes this page from the code.
"""
AREAS = {
    "account": "What a schedule costs", "admit": "Admission", "allocate": "Allocations", "audit": "Audits",
    "bench": "The benchmark", "cbor": "Deterministic CBOR", "cli": "The command line", "corpus": "The corpus",
    "engine": "The private step", "key": "Keys", "ledger": "The ledger", "noise": "Noise", "plan": "Plans and policies",
    "sensitivity": "Sensitivity of layers", "spend": "Accounts of a ledger", "store": "Where a ledger is kept",
    "models": "Ready models", "data": "Signals", "demo": "The demo", "train": "Runs",
    "integrations": "Hugging Face, Lightning, loggers",
    "release": "Certificates, releases and their gate", "report": "Pages", "serve": "The service", "study": "The study",
    "verify": "Findings of `lamina ledger verify`",
}  # fmt: skip


def error_codes() -> dict[str, list[tuple[str, str]]]:
    """Every code with what is said and the remedy, wherever the source constructs a refusal."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name == "validate.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        strings = _local_strings(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            for at, argument in enumerate(node.args):
                if (
                    isinstance(argument, ast.Constant)
                    and isinstance(argument.value, str)
                    and _is_code(node, argument.value)
                ):
                    rest = [
                        text(strings.get((id(node), each.id), each) if isinstance(each, ast.Name) else each)
                        for each in node.args[at + 1 : at + 3]
                    ]
                    keywords = {k.arg: text(k.value) for k in node.keywords}
                    said = rest[0] if rest else _limits(node)
                    finding = isinstance(node.func, ast.Name) and node.func.id == "note"  # (code, reason, file)
                    remedy = rest[1] if len(rest) > 1 and not finding else keywords.get("remedy", "")
                    entry = (said, remedy)
                    if entry not in found[argument.value]:
                        found[argument.value].append(entry)
    return dict(sorted(found.items()))


def _local_strings(tree: ast.Module) -> dict[tuple[int, str], ast.expr]:
    """What a name in a call was last assigned in the block that the call stands in: `problem = …; raise E(code, problem)`."""
    found: dict[tuple[int, str], ast.expr] = {}
    for block in (
        b for n in ast.walk(tree) for b in (getattr(n, "body", None), getattr(n, "orelse", None)) if isinstance(b, list)
    ):
        values: dict[str, ast.expr] = {}
        for line in block:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                values[line.targets[0].id] = line.value
            elif isinstance(line, ast.Raise | ast.Return):
                found |= {
                    (id(n), name): v for n in ast.walk(line) if isinstance(n, ast.Call) for name, v in values.items()
                }
    return found


def _is_code(call: ast.Call, value: str) -> bool:
    """A code stands first in an error, second in a check of `validate`, third in a finding."""
    area, _, rest = value.partition(".")
    return bool(CODE.fullmatch(value)) and area in AREAS and rest not in ("html", "css")  # names of templates


def _limits(call: ast.Call) -> str:
    """What a check of `lamina.validate` says."""
    names = [
        k.arg for k in call.keywords if k.arg and k.arg not in ("least", "most", "above", "below", "remedy", "infinite")
    ]
    limits = [f"{k.arg} {ast.unparse(k.value)}" for k in call.keywords if k.arg in ("least", "most", "above", "below")]
    return f"{', '.join(names) or '…'} is …, outside its range" + (f" ({', '.join(limits)})" if limits else "")


def text(node: ast.expr) -> str:
    """The words of an expression, with … for values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text(node.body)}" if text(node.body) != "…" else text(node.orelse)
    return "…"


def errors_page() -> str:
    areas: dict[str, list[str]] = defaultdict(list)
    for code, entries in error_codes().items():
        said = "<br>".join(_cell(s) for s in dict.fromkeys(s for s, _ in entries))
        remedy = "<br>".join(_cell(r) for r in dict.fromkeys(r for _, r in entries) if r and r != "…")
        areas[code.split(".")[0]].append(f"| `{code}` | {said} | {remedy} |")
    parts = [HEAD]
    for area in sorted(areas):
        parts.append(
            f"## {area}: {AREAS[area]}\n\n| code | what is said | remedy |\n|---|---|---|\n"
            + "\n".join(areas[area])
            + "\n"
        )
    return "\n".join(parts)


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


def _head(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return _cell(doc.split("\n\n")[0])


PAGES = {"errors.md": errors_page, "architecture.md": architecture_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make(), encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")
