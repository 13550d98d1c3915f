"""The page of the study: tables and figures as measured, the document's figures beside them, and why they differ."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.study.cells import ResultStore
from lamina.study.figures import FIGURES
from lamina.study.methods import METHODS
from lamina.study.tables import TABLES, notes


def study_page(store: ResultStore, names: Sequence[str]) -> str:
    """Markdown; the same results give the same text."""
    size = store.size
    trained = any((TABLES | FIGURES)[name].cells(size) for name in names)
    lines = [
        "# The study of the LSAB-zCDP document, measured again",
        "",
        f"Data: {store.source}. {size.describe()}." if trained else f"{size.describe(trained=False)}.",
        "",
        "Every figure below comes from a run of this command; the document's figures are copied from it, for comparison only.",
        "",
    ]
    if not size.evidence:
        lines += ["**Quick form: it shows that everything runs. Its figures are not evidence for anything.**", ""]
    for name in names:
        if name in TABLES:
            lines += [TABLES[name].markdown(store)]
        else:
            lines += [FIGURES[name].markdown(size)]
    lines += ["## Methods", "", "| method | what it does | the document calls it |", "|---|---|---|"]
    lines += [f"| {METHODS[n].title} | {METHODS[n].what} | {METHODS[n].paper or '–'} |" for n in METHODS]
    lines += ["", "## Notes", "", *(f"- {note}" for note in notes(size)), ""]
    return "\n".join(lines)
