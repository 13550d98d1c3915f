"""Hooks of the documentation site (`make site`): pages that are made while it is built, and links that leave docs/.

The API reference comes from the docstrings of `lamina.__all__`, the command reference from the help of every command, and the
tutorials from examples/.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from tutorials import TUTORIALS, notebook, page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {  # pages of the repository that the site has, too
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")
API = {  # the public names by topic, in the order in which a run comes to be
    "Layers, policy and plan": "LayerStack DepthProfile Policy fix measure Measure make_plan StepPlan Clipping",
    "Corpus and run": "make_private Corpus Trainer Outcome Evaluation Figure Callback RunFigures private_optimizer",
    "Private steps": "Engine Batch route rows examples NoiseSource SecureNoise SeededNoise",
    "Pre-training": "pretrain private_subspace merge_subspace",
    "Keys, admission and ledger": "PrivateKey PublicKey KeyRing Gate Ledger",
    "Releases": "certify Certificate make_release verify_release ReleaseGate Query Rights",
    "Errors": "LaminaError",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code, and those of the repository's root."""
    made = {
        "api.md": api_page(),
        "commands.md": command_page(),
        **{name: (ROOT / path).read_text("utf-8") for path, name in ROOT_PAGES.items() if name != "index.md"},
        **{f"tutorials/{name}.md": page(name) for name in TUTORIALS},
        **{f"tutorials/{name}.ipynb": notebook(name) for name in TUTORIALS},
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository that are not part of the site into their paths."""
    uri = page.file.src_uri
    of_root = next((path for path, name in ROOT_PAGES.items() if name == uri and uri != "index.md"), None)
    folder = "." if of_root else posixpath.dirname(f"docs/{uri}")

    def rewritten(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        if ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        inside = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside:
            return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return found[0]  # a dead link, which the build reports
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return "".join(part if code else LINK.sub(rewritten, part) for part, code in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """The page in parts, and whether each is a block of code."""
    for place, part in enumerate(re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)):
        yield part, place % 2 == 1


def api_page() -> str:
    """The public names with their signatures and docstrings."""
    import lamina

    text = "# Python API\n\nThe public names of `lamina`, from their docstrings.\n"
    for topic, names in API.items():
        text += f"\n## {topic}\n" + "".join(_described(name, getattr(lamina, name), "###") for name in names.split())
    missing = {*lamina.__all__} ^ {name for names in API.values() for name in names.split()}
    if missing:
        raise ValueError(f"docs/site_hooks.py: API and lamina.__all__ differ in {sorted(missing)}")
    return text


def _described(name: str, thing: Any, level: str) -> str:
    """A name with its signature and docstring, and the public methods of a class."""
    text = f"\n{level} {name}\n\n"
    if callable(thing):
        text += f"```python\n{name}{_signature(thing)}\n```\n\n"
    text += _prose(inspect.getdoc(thing) or "") + "\n"
    members = vars(thing) if isinstance(thing, type) and level == "###" else {}
    for member, value in members.items():
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        if not member.startswith("_") and inspect.isroutine(inner) and inner.__doc__:
            signature = "" if isinstance(value, property) else _signature(getattr(thing, member))
            text += f"\n#### {name}.{member}\n\n```python\n{member}{signature}\n```\n\n{_prose(inspect.getdoc(inner) or '')}\n"
    return text


def _signature(thing: Any) -> str:
    """The signature as it is written, on several lines if it is long."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(…)"
    short = _bare(str(signature))
    if len(short) < 90:
        return short
    parts = [_bare(str(each)) for each in signature.parameters.values()]
    first = next((i for i, each in enumerate(signature.parameters.values()) if each.kind is each.KEYWORD_ONLY), None)
    if first is not None:
        parts.insert(first, "*")
    returned = _bare(str(signature.replace(parameters=())))[2:]
    return "(\n    " + ",\n    ".join(parts) + f",\n){returned}"


def _bare(signature: str) -> str:
    """A signature whose annotations are not in quotes."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)


def _prose(doc: str) -> str:
    """A docstring as Markdown: paragraphs with a layout of their own stay as they are."""
    return "\n\n".join(
        f"```text\n{part}\n```" if re.search(r"^  |\S  +\S|>>>", part, re.MULTILINE) else part
        for part in re.split(r"\n\s*\n", doc)
    )


def command_page() -> str:
    """The help of every command, from the declarations of their options."""
    import typer

    from lamina.cli.app import COMMANDS, app

    group: Any = typer.main.get_command(app)
    text = "# Commands\n\nThe help of every command. `lamina COMMAND --help` prints the same.\n"

    def add(command: Any, name: str, parent: Any) -> None:
        nonlocal text
        with type(parent)(command, info_name=name.rpartition(" ")[2], parent=parent) as context:
            parameters = [each for each in command.get_params(context) if each.name != "help" and not each.hidden]
            usage = " ".join([name, *command.collect_usage_pieces(context)])
            text += f"\n## {name}\n\n```text\n{usage}\n```\n\n{_help(command.help)}\n"
            if parameters:
                records = (each.get_help_record(context) for each in parameters)
                rows = (f"| `{record[0].strip()}` | {_cell(record[1])} |\n" for record in records if record)
                text += "\n| argument or option | meaning |\n|---|---|\n" + "".join(rows)
            for each in command.list_commands(context) if hasattr(command, "list_commands") else []:
                add(command.commands[each], f"{name} {each}", context)

    with group.context_class(group, info_name="lamina") as context:
        for each in COMMANDS:
            add(group.get_command(context, each), f"lamina {each}", context)
    return text


def _help(text: str | None) -> str:
    """The help of a command: indented lines are code."""
    plain = re.sub(r"\\(\[)", r"\1", text or "")
    parts = (f"```text\n{part}\n```" if part.startswith("  ") else part for part in plain.split("\n\n"))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(re.sub(r"\\(\[)", r"\1", text).split()).replace("|", "\\|").replace("<", "&lt;")
