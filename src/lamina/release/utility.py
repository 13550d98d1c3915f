"""Utility of a model: figures with intervals and by group, evaluation.json of a run, and the section of its certificate."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import TypeAdapter

from lamina.errors import LaminaError, RunError
from lamina.ledger.run_records import EVALUATION
from lamina.release.run_evidence import RunEvidence
from lamina.release.schema import LEAST_RECORDS, EvaluationRow, UtilityRow
from lamina.sign.keys import read_small
from lamina.sign.signed_json import canonical_json, parse_json
from lamina.validate import is_short_text

LEVEL = 0.95
MAX_EVALUATION_BYTES = 16 << 20
_ROW = tuple(EvaluationRow.model_fields)
_UTILITY = TypeAdapter(list[UtilityRow])


class Figure(float):
    """A figure of an evaluation with its 95 % interval, the number of records, and the same figure by group.

    It is a float, so that an evaluation returns it in place of a number:

        lamina.Evaluation(function=lambda model: {"auc": lamina.Figure.of(scores(model), labels, sex)}, on="public")

    low, high  the interval, both or neither
    records    how many records the figure was computed from
    groups     by name of a group, its `Figure`. A group with fewer than 10 records is published by name only
    """

    low: float | None
    high: float | None
    records: int | None
    groups: Mapping[str, Figure]

    def __new__(
        cls, value: float, low: float | None = None, high: float | None = None, records: int | None = None,
        groups: Mapping[str, Figure] | None = None,
    ) -> Figure:  # fmt: skip
        self = super().__new__(cls, value)
        self.low, self.high = (None if each is None else float(each) for each in (low, high))
        self.records, self.groups = records, dict(groups or {})
        between = low is None or high is None or -math.inf < low <= self <= high < math.inf
        counted = records is None or (type(records) is int and records > 0)
        parts = (isinstance(each, Figure) and each.records and not each.groups for each in self.groups.values())
        if (low is None) != (high is None) or not (between and counted and all(parts)):
            problem = f"the figure {value!r} has the interval [{low!r}, {high!r}] and {records!r} records"
            remedy = "give low ≤ value ≤ high, a whole number of records, and groups as Figures with their own records"
            raise RunError("train.figure-invalid", problem, remedy)
        return self

    @classmethod
    def of(cls, results: ArrayLike, labels: ArrayLike | None = None, groups: Any = None) -> Figure:
        """Return a figure of the results of single records, overall and by group.

        results  1 for each right and 0 for each wrong answer: the share of right ones, with the exact interval (Clopper
                 and Pearson). With `labels`, a score for each record: the area under the ROC curve, with the
                 interval of DeLong on the logit scale
        labels   0 or 1 for each record
        groups   the group of each record; or several such columns by name
        """
        found, columns = np.asarray(results, dtype=float), groups if isinstance(groups, Mapping) else {"": groups}
        truth = found if labels is None else np.asarray(labels, dtype=float)
        named = {name: np.asarray(column).astype(str) for name, column in columns.items() if column is not None}
        one_each = all(each.shape == (len(found),) for each in (found, truth, *named.values())) and len(found) > 0
        if not one_each or not np.isin(truth, (0, 1)).all() or not np.isfinite(found).all():
            counted = f"there are {found.shape} results and {truth.shape} labels"
            problem = f"{counted}, or one of them has an impossible value"
            remedy = "give one result, label and group for each record; right answers and labels are 0 or 1"
            raise RunError("train.figure-invalid", problem, remedy)

        def part(rows: NDArray[np.bool_]) -> Figure:
            positive, negative = found[rows & (truth == 1)], found[rows & (truth == 0)]
            return _share(len(positive), len(negative)) if labels is None else _area(positive, negative)

        every = part(np.ones(len(found), dtype=bool))
        by: dict[str, Figure] = {}
        for name, column in named.items():
            by |= {f"{name}: {each}" if name else str(each): part(column == each) for each in np.unique(column)}
        return cls(every, every.low, every.high, every.records, by)


def _share(right: int, wrong: int) -> Figure:
    from scipy.stats import binomtest

    low, high = binomtest(right, right + wrong).proportion_ci(LEVEL, "exact")
    return Figure(right / (right + wrong), float(low), float(high), right + wrong)


def _area(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> Figure:
    """Return the area under the ROC curve; not a number if there are no records of one label.

    Variance: DeLong et al. 1988, by ranks (Sun and Xu 2014). Where the sample shows none, that of Birnbaum and Klose
    1957, A(1-A)/k with k the smaller number of records, which no variance exceeds. If all pairs are in order, k of them
    are independent, so that the chance of it is at most A**k.
    """
    from scipy.special import expit, logit, ndtri
    from scipy.stats import rankdata

    m, n = len(positive), len(negative)
    k, tail = min(m, n), (1 - LEVEL) / 2
    if not k:
        return Figure(math.nan, records=m + n)
    ranks = rankdata(np.concatenate([positive, negative]))
    above, below = (ranks[:m] - rankdata(positive)) / n, (ranks[m:] - rankdata(negative)) / m
    area, bound = float(above.mean()), tail ** (1 / k)
    if area in (0.0, 1.0):
        return Figure(area, area * bound, 1 - (1 - area) * bound, m + n)
    variance = above.var(ddof=1) / m + below.var(ddof=1) / n if k > 1 else 0.0
    spread = -ndtri(tail) * math.sqrt(variance or area * (1 - area) / k) / (area * (1 - area))
    return Figure(area, float(expit(logit(area) - spread)), float(expit(logit(area) + spread)), m + n)


def figure_rows(figures: Mapping[str, float], weights: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of evaluation.json; `weights` is the evaluated file."""
    for name, value in figures.items():
        whole = value if isinstance(value, Figure) else Figure(value)
        for group, each in ((None, whole), *sorted(whole.groups.items())):
            if not is_short_text(name) or not (group is None or is_short_text(group)):
                problem = f"an evaluation has the figure {name!r:.80} of group {group!r:.80}"
                raise RunError("train.evaluation-name", problem, "use printable names of at most 512 characters")
            hidden = math.isnan(each) or (group is not None and (each.records or 0) < LEAST_RECORDS)
            values = [None] * 4 if hidden else [float(each), each.low, each.high, each.records]
            yield dict(zip(_ROW, (name, group, *values, weights), strict=True))


def evaluation_file(run: str, evaluation: Mapping[str, Any]) -> bytes:
    """Return the bytes of evaluation.json: the last evaluation of a run, from its state."""
    about = {"version": 1, "run": run, "step": evaluation["step"], "on": evaluation["on"], "level": LEVEL}
    return canonical_json(about | {"figures": evaluation["rows"]})


def read_evaluation(folder: Path) -> bytes | None:
    """Return evaluation.json in the folder of a run; None if there is none."""
    path = folder / EVALUATION
    return read_small(path, "the evaluation of the run", most=MAX_EVALUATION_BYTES) if path.is_file() else None


def utility_section(evidence: RunEvidence) -> list[dict[str, Any]]:
    """Return the figures of the evaluation that the end of the run names, for a certificate.

    A value of None is that of a group with fewer than 10 records, or is not defined. Raises RunError if the file is
    missing or differs from its digest in the ledger.
    """
    digest, data = evidence.ended.digests.get(EVALUATION), evidence.evaluation
    if digest is None:
        return []
    if data is None or hashlib.sha256(data).hexdigest() != digest:
        how = "is missing" if data is None else "differs from what the run recorded"
        raise RunError("release.evaluation-differs", f"{EVALUATION} {how}", "restore it from a copy of the run")
    try:
        found = parse_json(data, EVALUATION)
        if (found["version"], found["run"]) != (1, evidence.run.hex()):
            raise ValueError("it belongs to another run, or has another version")
        about = {name: found[name] for name in ("level", "on", "step")} | {"covered_by_epsilon": True, "digest": digest}
        rows = [{name: each[name] for name in _ROW} | about for each in found["figures"]]
        return [row.model_dump() for row in _UTILITY.validate_python(rows)]
    except (KeyError, TypeError, ValueError, LaminaError) as error:
        problem = f"{EVALUATION} cannot be read: {error}"
        raise RunError("release.evaluation-malformed", problem, "evaluate it again in another run") from None
