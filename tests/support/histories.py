"""`World`: folders of runs on one ledger, what is done to them, and what must hold whatever it was."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import problem
from history_acts import FOLDERS, SIGNED, Act, killed_at
from history_plans import BOUND, Spec, more, plan_of, policy_of
from making import GOVERNING
from open_charges import has_begun, open_charges, open_segment
from run_state import run_in
from stopping import During, Killed, die

from lamina.engine.batch import Batch
from lamina.errors import LaminaError
from lamina.ledger.governance_records import Key, KeyChange, KeyEvent, KeyEvents, Role
from lamina.ledger.key_state import signed_record
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.charges import SignedAccount
from lamina.run.completion import complete_ledger
from lamina.run.sampler import Sampler
from lamina.run.trainer import Trainer
from lamina.sign.keys import PrivateKey


@dataclass
class World:
    """`act` does something, `check` looks at the ledger, `end` finishes every run. AssertionError: something is wrong.

    promised  ε of a policy; without one, runs have bounds and no policy
    where     a ledger that is no file beside the runs
    """

    root: Path
    promised: float | None = None
    where: str | None = None
    key: PrivateKey | None = None
    done: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)  # runs that nothing brings to an end but to lose them
    specs: dict[str, list[Spec]] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    _drawn: set[tuple[str, int, int, bytes]] = field(default_factory=set)  # attempts
    _weights: dict[tuple[bytes, int], bytes] = field(default_factory=dict)  # by seed and step
    _at_work: list[str] = field(default_factory=list)  # folders; the last one takes the steps
    _put_back: set[str] = field(default_factory=set)  # runs whose folder was
    _forgotten: set[str] = field(default_factory=set)  # runs whose folder nobody has any more
    _went_back: bool = False  # the ledger was put back from an older copy

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if self.where is not None:
            self.key = PrivateKey.generate()

    def live(self, history: list[dict[str, Any]]) -> None:
        """A whole history."""
        for act in history:
            self.act(act)
            self.check()
        self.end()

    def act(self, act: Act) -> None:
        """Do it; to be refused in clear words is fine."""
        given = {name: value for name, value in act.items() if name != "do"}
        try:
            getattr(self, f"do_{act['do']}")(**given)
            self.done += 1
        except LaminaError as error:
            self.refused.append(f"{dict(act)}: {type(error).__name__}: {error}")

    def do_go(self, folder: str, stop: Any = None, during: Any = None, **changes: Any) -> None:
        spec = replace((self.specs.get(folder) or [Spec()])[-1], **changes)
        acts: dict[int, Callable[[], None]] = {}
        if during is not None:
            acts[during[0]] = lambda: self._beside(folder, during[1])
        if stop is not None and stop[0] == "step":
            acts[stop[1]] = die
        tried = self.specs.setdefault(folder, [])
        tried.append(spec)
        try:
            with killed_at(stop[1], *stop[2:]) if stop is not None and stop[0] == "call" else nullcontext():
                self.fit(folder, spec, acts)
        except Killed:
            pass
        except LaminaError:
            if len(tried) > 1:
                tried.remove(spec)
            raise

    def _beside(self, folder: str, act: Act) -> None:
        """While a run is at work nobody puts its ledger or its folder back."""
        if act["do"] not in ("restore", "restore_ledger") and (act["do"], act.get("folder")) != ("go", folder):
            self.act(act)

    def fit(self, folder: str, spec: Spec, acts: Mapping[int, Callable[[], None]] | None = None) -> None:
        """Run to the end. An attempt begins at the same weights however often, and each of its steps leaves the same."""
        place = self.root / folder

        def same(step: int) -> None:
            if (opened := open_segment(place)) is None:
                self.wrong.append(f"'{folder}' draws step {step} outside of a segment")
                return
            key, seed = opened
            self._drawn.add((self.run_of(folder), *key))
            digest = hashlib.sha256()
            for tensor in made.model.state_dict().values():
                digest.update(tensor.numpy().tobytes())
            if self._weights.setdefault((seed, step), digest.digest()) != digest.digest():
                self.wrong.append(f"a replay in '{folder}' has other weights at step {step}")

        def watched(draw: Callable[[Sampler, int], Batch]) -> Callable[[Sampler, int], Batch]:
            def drawn(sampler: Sampler, step: int) -> Batch:
                if self._at_work[-1] == folder:  # otherwise it is a run that begins during a step of this one
                    same(step)
                return draw(sampler, step)

            return drawn

        draws = {name: watched(getattr(Sampler, name)) for name in ("draw", "draw_for_choice")}
        progress, asked = During(acts, each=same), dict[str, bool]()
        for tried in range(3):
            with (
                self.trainer(folder, spec, progress=progress, **asked) as made,
                mock.patch.multiple(Sampler, **draws),  # type: ignore[arg-type]
            ):
                self._at_work.append(folder)
                try:
                    made.fit()
                    return
                except LaminaError as error:  # whoever keeps the run follows the remedy
                    if tried == 2 or not self._follow_remedy(error, asked):
                        raise
                finally:
                    self._at_work.pop()

    def _follow_remedy(self, error: LaminaError, asked: dict[str, bool]) -> bool:
        """Take a copied folder over, or enter into a restored ledger what it lacks; False if the remedy is another one."""
        if error.code == "train.folder-behind-ledger":
            asked["take_over"] = True
        elif error.code in ("train.ledger-behind-folder", "train.ledger-differs", "ledger.older-than-kept"):
            with self.ledger() as ledger:
                complete_ledger(ledger, [self.root / each for each in FOLDERS if has_begun(self.root / each)])
        else:
            return False
        return True

    @contextmanager
    def trainer(self, folder: str, spec: Spec, **options: Any) -> Iterator[Trainer]:
        promised = {"clinical": BOUND, "sensitive": BOUND} if self.promised is None else None
        corpus = problem.unpromised() if promised else problem.corpus(policy=policy_of(spec.form, self.promised))
        if spec.withdrawn:
            corpus.withdraw(*spec.withdrawn)
        accounts = [
            SignedAccount(name=f"clinical@c=9,{name}", cls="clinical", scale=SIGNED[name], epsilon=BOUND)
            for name in spec.signed
        ]
        yield problem.trainer(
            self.root / folder,
            plan=plan_of(spec.form, spec.steps, self.promised),
            corpus=corpus,
            bounds=promised,
            accounts=accounts,
            segment=spec.segment,
            augment=more if spec.augment else None,
            filters=spec.filters,
            ledger=self.where,
            ledger_key=self.key,
            governing_key=None if self.key is None else GOVERNING,
            probe=False,
            **options,
        )

    # ------------------------------------------------------------------------------------ other acts

    def do_copy(self, folder: str, to: str) -> None:
        if (self.root / folder).is_dir() and not (self.root / to).exists():
            shutil.copytree(self.root / folder, self.root / to, symlinks=True)
            self.specs[to] = list(self.specs.get(folder, ()))

    def do_save(self, folder: str) -> None:
        if (self.root / folder).is_dir():
            shutil.rmtree(self.root / "kept" / folder, ignore_errors=True)
            shutil.copytree(self.root / folder, self.root / "kept" / folder, symlinks=True)

    def do_restore(self, folder: str) -> None:
        if (kept := self.root / "kept" / folder).is_dir():
            self._put_back.add(self.run_of(folder))
            shutil.rmtree(self.root / folder, ignore_errors=True)
            shutil.copytree(kept, self.root / folder, symlinks=True)

    def do_drop_checkpoint(self, folder: str) -> None:
        if len(found := sorted((self.root / folder / "checkpoint").glob("*"))) > 1:
            kept = self.root / "dropped" / self.run_of(folder)
            kept.mkdir(parents=True, exist_ok=True)
            shutil.move(found[-1], kept / found[-1].name)

    def do_save_ledger(self) -> None:
        kept = self.root / "kept-ledger"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for path in self.root.glob("tests.ledger.*"):
            shutil.copy2(path, kept / path.name)

    def do_restore_ledger(self) -> None:
        if (self.root / "kept-ledger" / "tests.ledger.db").exists():
            found = list((self.root / "kept-ledger").glob("*"))
            for path in self.root.glob("tests.ledger.*"):
                path.unlink()
            for path in found:
                shutil.copy2(path, self.root / path.name)
            self._went_back = True

    def do_lose(self, folder: str) -> None:
        if (run := self.run_of(folder)) and self.there:
            with self.ledger() as ledger:
                SpendLedger(ledger).abandon_run(run)

    def do_forget(self, folder: str) -> None:
        """Nobody has it any more."""
        self._forgotten.add(self.run_of(folder))
        shutil.rmtree(self.root / folder, ignore_errors=True)

    def do_finish(self, folder: str) -> None:
        if (run := self.run_of(folder)) and self.there:
            with self.ledger() as ledger:
                SpendLedger(ledger).finish(run)

    def do_stricter(self, by: float) -> None:
        if self.promised is not None:
            self.promised = round(self.promised * by, 3)

    def do_rotate(self) -> None:
        if not self.there:
            return
        new = PrivateKey.generate()
        with self.ledger() as ledger:
            added = Key(name=ledger.origin, x=new.public.x, role=Role.LEDGER)
            old = self.signer().public.id
            event = KeyEvent(change=KeyChange.ROTATE, key=added, target=old, effective=ledger.now())
            ledger.govern(signed_record(ledger.propose(KeyEvents(events=(event,))), [self.signer()]))
        if self.key is not None:
            self.key = new
        else:
            (self.root / "tests.ledger.pem").unlink()
            new.save(self.root / "tests.ledger.pem", None)

    # ------------------------------------------------------------------------------------ what is there

    @property
    def place(self) -> str:
        return self.where or str(self.root / "tests.ledger.db")

    @property
    def there(self) -> bool:
        """Whether there is a ledger, and not only the beginning of one."""
        try:
            LedgerReader.read_only(self.place).close()
        except LaminaError:
            return False
        return True

    def signer(self) -> PrivateKey:
        return self.key or PrivateKey.load(self.root / "tests.ledger.pem", None)

    def ledger(self) -> Ledger:
        return Ledger.open(self.place, self.signer(), clock=self.clock)

    def run_of(self, folder: str) -> str:
        if not (self.root / folder).is_dir() or not self.there:
            return ""
        with LedgerReader.read_only(self.place) as ledger:
            return run_in(ledger, self.root / folder, without=self._forgotten)

    # ------------------------------------------------------------------------------------ what must hold

    def check(self, *, signatures: bool = False) -> None:
        """An auditor finds nothing, and what the ledger states is what the book says."""
        assert not self.wrong, self.wrong
        if not self.there:
            return
        found = verify(self.place, signatures=signatures)
        assert found.problem is None, f"verify: {found.problem}"
        with self.ledger() as ledger:
            book, header, stated = SpendLedger(ledger), ledger.header, _stated(ledger)
            held = any(each.kind != "reserve" for each in open_charges(ledger))
            for name in {str(account): None for account, _ in book.accounts()}:
                total = book.total(name, delta=header.delta, accountant=header.accountant)
                told, near = stated.get(name, 0) / 1e9, 2e-9 + 1e-7 * total.spent
                assert total.spent <= total.committed, f"{name}: {total.spent} > {total.committed}"
                assert told <= total.spent + near, f"{name}: {told} stated, {total.spent} spent"
                assert held or total.spent <= told + near, f"{name}: {told} stated, {total.spent} spent, none held"

    def end(self) -> None:
        """Every run goes on to its end, or is lost. Then no attempt is open, and all that was drawn is in a leaf.

        What stays held is a budget that was charged as a whole, of a run that was stopped before its first segment: it
        is spent, and there is no attempt whose leaf could say so.
        """
        for folder in FOLDERS:
            if self.run_of(folder):
                self._finish(folder)
        if not self.there:
            return
        with self.ledger() as ledger:
            here = {self.run_of(folder) for folder in FOLDERS} - self._put_back
            for run in SpendLedger(ledger).labels().keys() - here:
                SpendLedger(ledger).abandon_run(run)  # nobody has its folder any more, or all that was open in it
        self.check(signatures=True)
        with self.ledger() as ledger:
            open_rows = [each for each in open_charges(ledger) if each.kind != "budget"]
            left = [(each.run[:8], each.segment, each.generation) for each in open_rows]
            assert not left, f"held in the end: {left}"
            known = {
                (leaf.record.run.hex(), each.index, each.generation, each.nonce)
                for leaf in ledger.of_kind(Epoch)
                if isinstance(leaf.record, Epoch)
                for each in leaf.record.segments
            }
        lost = [key[:3] for key in self._drawn if key not in known]
        assert not lost or self._went_back, f"drawn, and in no leaf: {lost}"

    def _finish(self, folder: str) -> None:
        """By what was asked for last, or whatever was accepted before it."""
        why = []
        for spec in [self.specs[folder][-1], *reversed(self.specs[folder])]:
            try:
                self.fit(folder, spec)
                return
            except LaminaError as error:
                if (
                    error.code == "ledger.run-end-continued"
                ):  # a copy that nothing is left for: the run ended in the other
                    self.do_finish(folder)
                    return
                if error.code == "train.last-checkpoint-missing":  # a finished run: its keeper follows the remedy
                    dropped = self.root / "dropped" / self.run_of(folder)
                    shutil.copytree(dropped, self.root / folder / "checkpoint", dirs_exist_ok=True)
                why.append(f"{folder}: {type(error).__name__}: {error}")
        self.stuck.append(why[0])
        self.do_lose(folder)


def _stated(ledger: Ledger) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for leaf in ledger.of_kind(Epoch):
        assert isinstance(leaf.record, Epoch)
        found |= {str(each.bound): each.spend for each in leaf.record.accounts}
    return found
