"""Which ledger a run writes: the one given, the one that it began in, or the one of its corpus beside its folder."""

from __future__ import annotations

import os
from pathlib import Path

from lamina.admit.key import PrivateKey
from lamina.errors import StorageError
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.opening import Contract, follow, open_or_create, slug
from lamina.ledger.view import View
from lamina.plan import StepPlan
from lamina.train.corpus import Corpus
from lamina.train.origin import origin_secret
from lamina.train.store.durable import make_folder

LINK = "ledger.db"  # in the folder of a run
_URLS = ("postgresql://", "postgres://")

Given = Ledger | str | os.PathLike[str] | None


def default_place(origin: str, folder: Path) -> Path:
    """Where the ledger of a corpus is kept, for runs in `folder`/…"""
    return folder / f"{slug(origin)}.ledger.db"


def open_ledger(
    given: Given, corpus: Corpus, plan: StepPlan, *, folder: Path, key: PrivateKey | None
) -> tuple[Ledger, bool]:
    """Open it, or make it, and bring its policy up to date; whether that changed it. `folder` is that of the run.

    Data without a declared origin gets one from a digest under a secret. A run that goes on keeps the ledger, and with
    it the origin, that it began with.
    """
    if isinstance(given, Ledger):
        contract = _contract(corpus, plan, corpus.origin or given.origin)
        if contract.origin != given.origin:
            raise LedgerError(
                "train.ledger-corpus",
                f"the ledger {given.name} is of {given.origin!r}, the corpus of {contract.origin!r}",
                "give the ledger of this corpus: one ledger, one corpus",
            )
        return given, follow(given, contract)
    begun = folder / LINK
    if given is None and begun.is_symlink():
        given = Path(os.path.realpath(begun))
        if not given.exists() and (folder / "journal").exists():
            raise LedgerError(
                "train.run-charged-ledger",
                f"the run in '{folder}' was charged in the ledger '{given}', which is not there",
                "put it back, or say where it is now: ledger=…; a new one would forget what was spent",
            )
    origin = corpus.origin
    if origin is None and begun.exists() and (folder / "journal").exists():
        with View.read_only(begun) as view:
            origin = view.origin
    if origin is None:
        beside = folder.parent if given is None or _remote(given) else Path(os.path.realpath(given)).parent
        make_folder(beside)
        origin = corpus.booked_under(origin_secret(beside))
    contract = _contract(corpus, plan, origin)
    where = given if given is not None else default_place(origin, folder.parent)
    ledger = open_or_create(where, contract, key)
    try:
        return ledger, follow(ledger, contract)
    except BaseException:
        ledger.close()
        raise


def link(ledger: Ledger, folder: Path) -> None:
    """Let the ledger be found from the folder of a run."""
    if ledger.store.remote:
        return
    path, target = folder / LINK, os.path.relpath(os.path.realpath(ledger.name), os.path.realpath(folder))
    try:
        if path.exists() and not path.is_symlink() and not path.samefile(ledger.name):
            raise StorageError(
                "train.ledger-own-not",
                f"'{path}' is a ledger of its own, and not a link to '{ledger.name}', which the run is charged in",
                "remove it if it is a copy; a folder is copied with its links: cp -a",
            )
        if path.is_symlink() and os.readlink(path) != target:
            path.unlink()
        if not os.path.lexists(path):
            path.symlink_to(target)
    except OSError as error:
        raise StorageError(
            "train.not-made", f"'{path}' cannot be made: {error}", "make room for a link there"
        ) from error


def _contract(corpus: Corpus, plan: StepPlan, origin: str) -> Contract:
    if corpus.policy is None:
        return Contract.of_plan(plan, origin)
    return Contract.of_policy(corpus.policy)


def _remote(given: str | os.PathLike[str]) -> bool:
    return isinstance(given, str) and given.startswith(_URLS)
