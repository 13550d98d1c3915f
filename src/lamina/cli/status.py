"""Show all ledgers and runs below a folder: ε spent and left, whether each ledger verifies, and runs side by side.

Spends nothing and writes nothing. Runs of one corpus are compared by ε, by their last evaluation on public data, and by the settings
in which they differ. Figures of a run come from its public files; ε and limits come from the leaves of the ledger.

Exit code 1 if a ledger does not verify.

Examples:

  lamina status
  lamina status runs --trust owner.pub
  lamina status runs --no-verify --json
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lamina.cli.certify import TRUST
from lamina.cli.command import Answer, argument, command, option, table
from lamina.cli.open_ledger import read_spend
from lamina.cli.spend import account_figures
from lamina.cli.terminal import progress_bar
from lamina.errors import LaminaError
from lamina.ledger.neighbours import LEDGER_SUFFIX
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.plan.table import epsilon_text, printable, remaining_text

_VERDICTS = {
    "trusted": "verified and trusted", "self-consistent": "consistent, not checked against an outside key (--trust)",
    "not verified": "DOES NOT VERIFY", "not asked": "not verified now", "unreadable": "CANNOT BE READ",
}  # fmt: skip


@command()
def status(
    where: Path = argument("FOLDER", "where to look, with all folders below it", default=Path()),
    trust: Trust | None = TRUST,
    no_verify: bool = option("do not verify the ledgers, which takes time for large ones"),
) -> Answer:
    places = sorted({*where.rglob(f"*{LEDGER_SUFFIX}"), *where.rglob("ledger.db")})
    ledgers = []
    with progress_bar("verifying", len(places)) as tick:
        for done, place in enumerate(each for each in places if each.is_file() and not each.is_symlink()):
            ledgers.append(_ledger(place, trust, asked=not no_verify))
            tick(done + 1)
    runs = [found for path in sorted(where.rglob("metrics.json")) if (found := _run(path.parent)) is not None]
    for run, changed in zip(runs, _differences([run.pop("settings") for run in runs]), strict=True):
        run["differs"] = changed
    facts = {"folder": str(where), "ledgers": ledgers, "runs": runs}
    return Answer(
        facts, *_lines(facts), ok=all(each["verdict"] not in ("not verified", "unreadable") for each in ledgers)
    )


def _ledger(place: Path, trust: Trust | None, *, asked: bool) -> dict[str, Any]:
    """The state of one ledger."""
    facts: dict[str, Any] = {
        "ledger": str(place),
        "origin": None,
        "verdict": "not asked",
        "problem": None,
        "remedy": None,
        "accounts": {},
    }
    try:
        if asked:
            found = verify(str(place), trust=trust)
            facts |= {"verdict": found.verdict, "problem": None if found.problem is None else str(found.problem)}
        with read_spend(str(place)) as book:
            figures = {str(account): values for account, values in account_figures(book) if not account.signed}
            facts |= {"origin": book.origin, "accounts": {name: _account(each) for name, each in figures.items()}}
    except LaminaError as error:
        facts |= {"verdict": "not verified" if facts["verdict"] == "not verified" else "unreadable"}
        if facts["problem"] is None:
            facts |= {"problem": error.problem, "remedy": error.remedy}
    return facts


def _account(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in ("epsilon", "committed", "bound", "remaining", "delta")}


def _run(folder: Path) -> dict[str, Any] | None:
    """The public figures of a run; None for another folder."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        facts = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        settings: dict[str, Any] = {}
        with suppress(OSError, ValueError, KeyError):
            settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"]
        last = facts["evaluations"][-1]["figures"] if facts["evaluations"] else {}
        return {
            "folder": str(folder), "run": str(facts["run"]), "origin": facts["origin"], "steps": int(facts["steps"]),
            "planned_steps": int(facts["planned_steps"]), "evaluation": dict(last), "settings": dict(settings),
            "epsilon": {name: row.get("epsilon") for name, row in facts["classes"].items()},
        }  # fmt: skip
    return None


def _differences(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of each run that differ between the runs."""
    names = sorted({name for each in settings for name in each})
    differ = [name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)]
    return [{name: each.get(name) for name in differ} for each in settings]


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts["ledgers"] and not facts["runs"]:
        yield f"no ledgers and no runs below '{facts['folder']}'"
    for each in facts["ledgers"]:
        yield f"{printable(each['ledger'])}: {_VERDICTS[each['verdict']]}"
        if each["problem"] is not None:
            yield f"  problem: {printable(each['problem'])}"
        if each["remedy"] is not None:
            yield f"  remedy:  {printable(each['remedy'])}"
        if each["accounts"]:
            rows = [[f"corpus {printable(each['origin'])}", "ε spent", "committed", "bound", "remains"]]
            for name, account in each["accounts"].items():
                bound = "-" if account["bound"] is None else epsilon_text(account["bound"])
                left = "-" if account["remaining"] is None else remaining_text(account["remaining"])
                rows.append(
                    [printable(name), *(_epsilon(account[key]) for key in ("epsilon", "committed")), bound, left]
                )
            yield table(rows, indent=2)
        yield ""
    if runs := facts["runs"]:
        figures = sorted({name for run in runs for name in run["evaluation"]})
        changed = list(runs[0]["differs"])
        rows = [["run", "steps", "ε", *figures, *changed]]
        for run in runs:
            spent = ", ".join(f"{name} {_epsilon(value)}" for name, value in run["epsilon"].items())
            values = [f"{run['evaluation'][name]:.4g}" if name in run["evaluation"] else "-" for name in figures]
            steps = f"{run['steps']:,} of {run['planned_steps']:,}"
            folder = os.path.relpath(run["folder"], facts["folder"])
            rows.append(
                [
                    printable(folder),
                    steps,
                    printable(spent),
                    *values,
                    *(_short(run["differs"][name]) for name in changed),
                ]
            )
        yield table(rows)


def _epsilon(value: float | None) -> str:
    return "no protection" if value is None else epsilon_text(value)


def _short(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= 40 else f"{text[:39]}…")
