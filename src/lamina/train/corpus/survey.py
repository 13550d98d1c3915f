"""`Survey`: how many examples payloads hold, and that all are of one form, before any of them is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.errors import CorpusError
from lamina.train.corpus.look import Form, Look, Said
from lamina.train.corpus.payloads import Payloads, name_of
from lamina.train.corpus.shares import looked

SHAPES = "cut or pad every example to one public shape, and label all or none"
COLUMNS = "give every table the same columns in the same order"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """`sizes[row]` examples of one form."""

    form: Form
    sizes: NDArray[np.int64]


def strict(payloads: Payloads, look: Look) -> Survey:
    """All of them, or a refusal that names the first that does not fit."""
    sizes = np.empty(len(payloads), dtype=np.int64)
    forms: dict[bool, tuple[str, Form]] = {}  # the first of all, and the first with named columns
    for row, name in enumerate(payloads.ids):
        sizes[row], said = look.said(name_of(payloads, row), payloads.look(row))
        found = look.form(said)
        for named in (False, *((True,) if found.header else ())):
            _check_form(name, found, *forms.setdefault(named, (name, found)))
    return Survey(form=forms[False][1], sizes=sizes)


def tolerant(
    payloads: Payloads, look: Look, refuse: Callable[[int, str], None], processes: int = 1
) -> tuple[Survey | None, NDArray[np.int64]]:
    """Those that fit, and their rows; of the others `refuse` hears row and reason.

    The form is that of nearly all. It may not hang on a single contribution, or adding one person would exclude
    others: where one fewer or one more would change it, nothing is surveyed and the refusal names both forms.
    """
    sizes, which, said, wrong = looked(payloads, look, processes)
    for row, why in wrong.items():
        refuse(row, why)
    forms = [_form(look, each) for each in said]
    which = _without(which, [form if isinstance(form, str) else None for form in forms], refuse)
    for kind, remedy in (("shape", SHAPES), ("columns", COLUMNS)):
        told = [None if isinstance(form, str) else _told(form, kind) for form in forms]
        counts: Counter[str] = Counter()
        for place, count in enumerate(np.bincount(which[which >= 0], minlength=len(forms)).tolist()):
            if (text := told[place]) is not None and count:
                counts[text] += count
        if len(counts) < 2:
            continue
        (common, most), (other, second), *_ = counts.most_common()
        if most - second < 2:
            raise CorpusError(
                "corpus.contributions-many", f"contributions have {common}, and as many have {other}", remedy
            )
        strange = [
            None if text in (None, common) else f"it has {text}; the others have {common}" for text in told
        ]
        which = _without(which, strange, refuse)
    rows = np.flatnonzero(which >= 0)
    if not len(rows):
        return None, rows
    form = forms[which[rows[0]]]
    assert isinstance(form, Form)
    return Survey(form=form, sizes=sizes[rows]), rows


def _form(look: Look, said: Said) -> Form | str:
    """Or why a model cannot be given that."""
    try:
        return look.form(said)
    except CorpusError as error:
        return error.problem


def _without(
    which: NDArray[np.int64], why: list[str | None], refuse: Callable[[int, str], None]
) -> NDArray[np.int64]:
    """Refuse the rows of those forms for which there is a reason: -1 then."""
    wrong = np.array([text is not None for text in why] + [False], dtype=np.bool_)[which]
    for row in np.flatnonzero(wrong).tolist():
        refuse(row, str(why[which[row]]))
    return np.where(wrong, -1, which)


def _told(form: Form, kind: str) -> str | None:
    if kind == "shape":
        return form.told()
    return None if form.header is None else f"columns {', '.join(form.header)}"


def _check_form(name: str, found: Form, first_name: str, first: Form) -> None:
    if found is first:
        return
    if found.told() != first.told():
        raise CorpusError(
            "corpus.contribution",
            f"contribution {name!r} has {found.told()}; {first_name!r} has {first.told()}",
            SHAPES,
        )
    if found.header and first.header and found.header != first.header:
        raise CorpusError(
            "corpus.contribution-columns",
            f"contribution {name!r} has columns {', '.join(found.header)}; {first_name!r} has "
            f"{', '.join(first.header)}",
            COLUMNS,
        )
