"""The ledger of a run: where it is, how it is opened or made, and which ledgers lie beside it."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from lamina.errors import LaminaError, LedgerError, RunError, StorageError
from lamina.ledger.corpus_terms import CorpusTerms, adopt_policy, check_corpus_terms, open_or_create, origin_slug
from lamina.ledger.neighbours import LEDGER_SUFFIX, NeighbourLedger, check_units, neighbour_ledgers
from lamina.ledger.reader import LedgerReader
from lamina.ledger.store.sqlite import is_ledger_file, is_postgres_url, ledger_exists
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus
from lamina.run.run_files import make_folder, replacing, storage_error, write_all
from lamina.run.run_record import has_begun
from lamina.sign.keys import PrivateKey

_SECRET_BYTES = 32


def origin_secret(folder: Path) -> bytes:
    """32 bytes of `origin.key` in the folder (mode 0600), drawn once: of two processes the first one's count."""
    path, remedy = folder / "origin.key", "restore it: it belongs to the ledgers beside it"
    try:
        if not path.exists():
            _draw_secret(path)
        key = path.read_bytes()
    except OSError as error:
        raise StorageError("train.origin-key-unreadable", f"cannot read '{path}': {error}", remedy) from None
    if len(key) != _SECRET_BYTES:
        problem = f"'{path}' has {len(key)} bytes, must have {_SECRET_BYTES}"
        raise StorageError("train.origin-key-unreadable", problem, remedy)
    return key


def _draw_secret(path: Path) -> None:
    try:
        with replacing(path, fresh=True) as file:
            write_all(file, os.urandom(_SECRET_BYTES))
    except StorageError:
        if not path.exists():  # nobody was faster: it is the disk
            raise


LEDGER_LINK = "ledger.db"  # in the folder of a run
_NEIGHBOURS_NAMED = 3  # in a message

LedgerArgument = Ledger | str | os.PathLike[str] | None


def default_ledger_path(origin: str, folder: Path) -> Path:
    """Where the ledger of a corpus is kept, for runs in `folder`/…"""
    return folder / f"{origin_slug(origin)}{LEDGER_SUFFIX}"


def refuse_second_ledger(place: Path, origin: str, around: Path) -> None:
    """LedgerError if no ledger is at `place` and one of this origin is near: in the folders of `around`, or further up.

    The same contributions could be admitted into both, each within its bound. So a second one has to be asked for.
    """
    if place.exists():
        return
    upwards = [folder / place.name for folder in place.absolute().parents[1:3]]
    for found in [around / place.name, *sorted(around.glob(f"*/{glob.escape(place.name)}")), *upwards]:
        if found.is_file() and _is_ledger_of(found, origin):
            problem = f"there is a ledger of {origin!r} at '{found}', and this run would begin another at '{place}'"
            remedy = f"go on in that one: ledger = '{found}'; for a second one, name its place: ledger = '{place}'"
            raise RunError("train.second-ledger", problem, remedy)


def _is_ledger_of(path: Path, origin: str) -> bool:
    """Return whether a file with this origin's name is its ledger; a damaged ledger counts as its ledger."""
    try:
        with LedgerReader.read_only(path) as view:
            return view.origin == origin
    except LaminaError:
        return is_ledger_file(path)


def open_run_ledger(
    given: LedgerArgument,
    corpus: Corpus,
    plan: StepPlan,
    *,
    folder: Path,
    key: PrivateKey | None,
    governing: PrivateKey | None = None,
) -> tuple[Ledger, bool]:
    """Open or make the ledger of a run, and adopt its policy; returns it and whether its policy changed.

    Data without a declared origin gets one from a digest under a secret. A run that goes on keeps the ledger, and with
    it the origin, that it began with.
    """
    if isinstance(given, Ledger):
        terms = _ledger_terms(corpus, plan, corpus.origin or given.origin)
        if terms.origin != given.origin:
            problem = f"the ledger {given.name} belongs to {given.origin!r}, the corpus to {terms.origin!r}"
            raise LedgerError("train.ledger-of-other-corpus", problem, "give the ledger of this corpus")
        check_corpus_terms(given, terms)
        return given, _adopt(given, terms, corpus, plan)
    link = folder / LEDGER_LINK
    if given is None and link.is_symlink():
        given = Path(os.path.realpath(link))
        if not given.exists() and has_begun(folder):
            problem = f"the ledger '{given}', in which the run in '{folder}' was charged, is missing"
            remedy = "put it back, or say where it is now: ledger=…; a new one would forget what was spent"
            raise LedgerError("train.ledger-missing", problem, remedy)
    origin, declared = corpus.origin, corpus.origin is not None
    if origin is None and link.exists() and has_begun(folder):
        with LedgerReader.read_only(link) as view:
            origin, declared = view.origin, True
    if origin is None:
        at_server = isinstance(given, str) and is_postgres_url(given)
        beside = folder.parent if given is None or at_server else Path(os.path.realpath(given)).parent
        make_folder(beside)
        origin = corpus.origin_or_digest(origin_secret(beside))
    terms = _ledger_terms(corpus, plan, origin)
    where = given if given is not None else default_ledger_path(origin, folder.parent)
    if given is None:
        refuse_second_ledger(Path(where), origin, folders_around(folder)[-1])
    if not declared and terms.other_people is None and not ledger_exists(str(where)):
        _refuse_undeclared(where, folder)
    ledger = open_or_create(where, terms, key, governing=governing)
    try:
        return ledger, _adopt(ledger, terms, corpus, plan)
    except BaseException:
        ledger.close()
        raise


def _adopt(ledger: Ledger, terms: CorpusTerms, corpus: Corpus, plan: StepPlan) -> bool:
    """Adopt the policy of a corpus and return whether it changed. Refuse a run that protects less than the policy requires."""
    check_units(ledger, plan)
    used = {entry.name for entry in plan.classes} if corpus.public_number else set()
    for each in (*ledger.governance().policy.presets, *terms.presets):
        if each.cls in used and each.risk is not None and each.risk.of == "membership":
            problem = f"class {each.cls!r} has the risk bound {each.risk}"
            problem += ", but without population= ε is about content alone"
            remedy = "declare the population of the policy: make_private(…, population=N)"
            raise RunError("train.risk-needs-population", problem, remedy)
    return adopt_policy(ledger, terms)


def folders_around(folder: Path) -> tuple[Path, ...]:
    """Return the folders to search for other ledgers: that of the run's folder, and the working directory above it."""
    working = Path.cwd()
    return (folder.parent, working) if folder.resolve().is_relative_to(working) else (folder.parent,)


def neighbours_of_run(where: str | os.PathLike[str], folder: Path) -> list[NeighbourLedger]:
    """Return the ledgers beside the one at `where`, and around the run in `folder`."""
    return neighbour_ledgers(where, *folders_around(folder))


def _refuse_undeclared(where: str | os.PathLike[str], folder: Path) -> None:
    """Raise RunError if other ledgers are near. Without an origin, the same people cannot be recognised in other data.

    One changed value gives another digest of the data, hence another ledger, which would not count what was spent.
    """
    if not (found := neighbours_of_run(where, folder)):
        return
    if damaged := [each for each in found if each.unreadable is not None]:
        problem = f"no origin is declared, and the ledger beside this run {damaged[0]} may be about the same people"
        remedy = "restore it from a copy; or declare the origin of the data: origin=…; or move the file elsewhere"
        raise RunError("train.neighbour-unreadable", problem, remedy)
    listed = "; ".join(map(str, found[:_NEIGHBOURS_NAMED]))
    more = f"; and {len(found) - _NEIGHBOURS_NAMED} more" if len(found) > _NEIGHBOURS_NAMED else ""
    problem = f"no origin is declared, and this run would create another ledger beside {listed}{more}"
    that = "that" if len(found) == 1 else "their"
    remedy = (
        f"if these are the same people, use {that} ledger: origin={found[0].origin!r}, given where the data is given "
        '(Corpus, Corpus.of_csv, …, or make_private on arrays); if they are other people, state there why: other_people="…", '
        "which the ledger and its certificates will show"
    )
    raise RunError("train.origin-not-declared", problem, remedy)


def link_ledger(ledger: Ledger, folder: Path) -> None:
    """Link the ledger into the folder of a run."""
    if ledger.store.remote:
        return
    path, target = folder / LEDGER_LINK, os.path.relpath(os.path.realpath(ledger.name), os.path.realpath(folder))
    try:
        if path.exists() and not path.is_symlink() and not path.samefile(ledger.name):
            problem = f"'{path}' is another ledger, not a link to '{ledger.name}', in which the run is charged"
            remedy = "remove it if it is a copy; copy folders with their links: cp -a"
            raise StorageError("train.ledger-not-a-link", problem, remedy)
        if path.is_symlink() and os.readlink(path) != target:
            path.unlink()
        if not os.path.lexists(path):
            path.symlink_to(target)
    except OSError as error:
        raise storage_error(error, f"cannot make the link {path}", "nothing was charged") from None


def _ledger_terms(corpus: Corpus, plan: StepPlan, origin: str) -> CorpusTerms:
    if corpus.policy is not None:
        return CorpusTerms.of_policy(corpus.policy)
    return CorpusTerms.of_plan(plan, origin, corpus.other_people)
