"""`Trainer`: the whole job, from the first check to the final weights, in segments that survive being killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina.account import Filter
from lamina.admit.key import PrivateKey
from lamina.engine import Batch, Engine, SecureNoise
from lamina.engine.stream import Purpose
from lamina.errors import RunError
from lamina.ledger.ledger import Ledger
from lamina.plan import StepPlan
from lamina.train.account import spent_so_far
from lamina.train.blame import discreet, withhold
from lamina.train.book import Account, Book
from lamina.train.book.account import check_accounts
from lamina.train.checks import (
    check_caps,
    check_filters,
    check_names,
    check_options,
    check_parts,
    count,
    policy_bounds,
)
from lamina.train.corpus import Corpus
from lamina.train.corpus.payloads import PayloadChanged
from lamina.train.corpus.sampler import Sampler, caps_of
from lamina.train.depth import check_depth
from lamina.train.ema import MovingAverage
from lamina.train.evaluation import Evaluation
from lamina.train.members import Members
from lamina.train.opening import Given, link, open_ledger
from lamina.train.outcome import Outcome
from lamina.train.progress import Progress, screen
from lamina.train.randomness import borrowed_generators, reseed
from lamina.train.recharge import keep
from lamina.train.rehearsal import check_labels, rehearse
from lamina.train.renewal import Renewal
from lamina.train.run import Run
from lamina.train.segments import Segments
from lamina.train.settings import settings
from lamina.train.snapshot import TrainingState
from lamina.train.store.durable import make_folder
from lamina.train.store.lease import Lease
from lamina.train.store.records import Open
from lamina.train.watch import Watch
from lamina.train.withdrawals import remembered


class Trainer:
    """Train `model` on `corpus` as `plan` says, and leave evidence of what it cost.

    Formal guarantee. Under the conditions of `Engine`, with coins, noise and dropout from secret streams, the
    weights that leave the process (files, callbacks, evaluations) are (ε_k, δ_k)-differentially private for every
    class k, ε_k being the price of every step *charged* to the run: killed, resumed, redone or given up. Nothing of
    a segment leaves before its charge is durable in journal and ledger, its checkpoint is, and the leaf that
    records it.

        run = lamina.Trainer(model, optimizer, loss_fn, corpus, plan, folder="runs/first")
        outcome = run.fit()          # again after a crash: goes on where it was

    loss_fn(output, y) gives one loss per example; without y it gets x. A mapping x is passed as keywords, a tuple as
    arguments.

    folder           where the run lives; the same folder again resumes it
    ledger           an open `Ledger`, the path of one, or "postgresql://…#schema"; made if there is none. Default: the
                     corpus's own beside the folder, ORIGIN.ledger.db, which all runs on it share
    key              signs the ledger's checkpoints; default: ORIGIN.ledger.pem, made with the ledger
    bounds           ε that each class may spend over all runs of the ledger; default: the corpus's policy, whose
                     promise holds in any case
    accounts         further bounds, each held to over all runs by itself, beside what the corpus was admitted with
    scheduler        stepped once per private step
    microbatches     forward and backward in so many parts: less memory, the same result
    ema              decay of a moving average of the weights, kept beside them
    evaluate         an `Evaluation` on public or simulated data
    segment          steps between two checkpoints
    max_occurrences  by class: how often one contribution may be used in all
    filters          by class: asked for a whole segment before it begins
    augment          x -> x, drawing from the global generators
    on_withdrawal    "finish" the segment in which somebody withdrew, or "abandon" it; both are charged
    hardened         float64 noise on a public grid: docs/decisions/noise.md
    probe            check on simulated input that examples do not influence each other
    inside           show the raw loss on the terminal; it is never written
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        corpus: Corpus,
        plan: StepPlan,
        *,
        folder: str | Path,
        ledger: Given = None,
        key: PrivateKey | None = None,
        bounds: Mapping[str, float] | None = None,
        accounts: Sequence[Account] | None = None,
        engine: Engine | None = None,
        scheduler: Any = None,
        microbatches: int = 1,
        ema: float | None = None,
        evaluate: Evaluation | None = None,
        segment: int | None = None,
        max_occurrences: Mapping[str, int] | None = None,
        filters: Mapping[str, Filter] | None = None,
        augment: Callable[[Any], Any] | None = None,
        on_withdrawal: str = "finish",
        hardened: bool = False,
        probe: bool = True,
        inside: bool = False,
        progress: bool | Progress = True,
    ) -> None:
        check_parts(model, optimizer, loss_fn, corpus, plan, scheduler)
        check_options(folder, evaluate, max_occurrences)
        corpus.check(plan)
        self._depth = check_depth(model, corpus.policy, plan)
        if on_withdrawal not in ("finish", "abandon"):
            raise RunError(
                "train.withdrawal", f"on_withdrawal is {on_withdrawal!r}", 'use "finish" or "abandon"'
            )
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.corpus, self.plan, self.scheduler = corpus, plan, scheduler
        self.folder = Path(folder)
        self._given, self._key = ledger, key
        self._ledger: Ledger | None = None
        self._changed = False  # the ledger's policy, by opening it
        self._book: Book | None = None
        self.bounds = policy_bounds(corpus, plan) if bounds is None else dict(bounds)
        check_names(plan, bounds=self.bounds, filters=filters or {})
        check_filters(plan, filters or {})
        self.microbatches = count("microbatches", microbatches)
        self.segment = count("segment", min(1000, math.ceil(plan.steps / 10)) if segment is None else segment)
        self.evaluate, self.augment, self.probe, self.inside = evaluate, augment, probe, inside
        self.max_occurrences = dict(caps_of(plan, max_occurrences) or {})
        signed = corpus.accounts(plan, self.max_occurrences)
        self.accounts = check_accounts(plan, (*signed, *(accounts or ())))
        check_caps(corpus, plan, self.max_occurrences)
        self.on_withdrawal, self.hardened = on_withdrawal, hardened
        self.progress = screen(wanted=progress, inside=inside) if isinstance(progress, bool) else progress
        average = None if ema is None else MovingAverage(model, ema)
        self.state = TrainingState(
            model=model, optimizer=optimizer, scheduler=scheduler, ema=average, filters=dict(filters or {})
        )
        self._engine = engine if engine is not None else Engine(model, plan)
        self.state.adaptation = self._engine.adaptation
        self._renewal = Renewal(corpus, plan, self.folder / "admitted")
        self.state.names = self._renewal.names
        if self._engine.model is not model or self._engine.plan.digest() != plan.digest():
            raise RunError(
                "train.engine-belongs-another",
                "the engine belongs to another model or plan",
                "leave engine out, or give the matching one",
            )

    def _settings(self) -> bytes:
        """What the outcome of a step depends on beside plan, data and seed; asked anew at every fit."""
        return settings(
            self.model,
            self.optimizer,
            self.scheduler,
            {"loss": self.loss_fn, "augment": self.augment},
            {
                "microbatches": self.microbatches,
                "ema": None if self.state.ema is None else self.state.ema.decay,
                "hardened": self.hardened,
                "max_occurrences": self.max_occurrences,
                "filters": {name: getattr(f, "budget", None) for name, f in self.state.filters.items()},
                "autocast": [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))],
                "engine": self._engine.options,
            },
            given=self.state.given,
            schedule=self.state.given_schedule,
        )

    @property
    def ledger(self) -> Ledger:
        """The ledger; opened, or made, when it is first asked for."""
        if self._ledger is None:
            self._ledger, self._changed = open_ledger(
                self._given, self.corpus, self.plan, folder=self.folder, key=self._key
            )
        return self._ledger

    def _let_go(self) -> None:
        """Close the ledger if it was opened here; it is opened again when it is asked for."""
        if self._ledger is not None and self._ledger is not self._given:
            self._ledger.close()
            self._ledger = self._book = None

    @property
    def book(self) -> Book:
        """The ledger as runs charge it."""
        if self._book is None:
            self._book = Book(self.ledger)
        return self._book

    # ------------------------------------------------------------------------------------ the job

    def fit(self) -> Outcome:
        """Train to the end of the plan, or go on from where the folder's run was left."""
        make_folder(self.folder)
        withdrawn = remembered(self.corpus, self.folder / "withdrawn")
        with Lease.take(self.folder), withdrawn, borrowed_generators():
            self._attach()
            try:
                return self._fit()
            except KeyboardInterrupt:
                self.progress.note("stopped; the same again goes on where it was, at no further cost")
                raise
            finally:
                self.corpus.when_asked = None
                self._let_go()
                self.progress.end()
                self.optimizer.zero_grad()
                self._engine.detach()

    def _fit(self) -> Outcome:
        self.optimizer.zero_grad()
        self.corpus.refresh()
        self._rehearse()
        self.state.notes[:] = [] if self._depth is None else [self._depth]
        watch = Watch(
            self.plan,
            self.evaluate,
            caps=self.max_occurrences,
            progress=self.progress,
            notes=self.state.notes,
        )
        self._renewal.begin(watch.note)
        members = Members(self.ledger, self.corpus)
        if self._changed:
            watch.note(
                "the policy in force in the ledger is another one now, this run's: lamina ledger policy shows it"
            )
        members.enrol(watch.note)
        self.corpus.when_asked = members.withdraw
        link(self.ledger, self.folder)
        run = Run(self.folder, book=self.book, bounds=self.bounds, accounts=self.accounts)
        keep(run, self.plan, members.standing)
        segments = Segments(
            run,
            self.state,
            plan=self.plan,
            corpus=self.corpus,
            members=members,
            settings=self._settings(),
            caps=self.max_occurrences,
            length=self.segment,
            note=watch.note,
            say=self.progress.note,
        )
        segments.start()
        self._renewal.begun()
        self.progress.begin(self.state.step, segments.end)
        reason = watch.look(run, self.state)
        while reason is None and (opened := self._next(segments, watch)) is not None:
            if self._carried_out(opened, segments):
                segments.close(opened)
                reason = watch.look(run, self.state)
                self.progress.segment(self.state.step, spent_so_far(run, self.plan))
            else:
                segments.abandon(opened)
        reason = reason or ("complete" if self.state.step == self.plan.steps else "budget")
        return watch.finish(run, self.state, reason=reason, private=self._engine.private)

    def _next(self, segments: Segments, watch: Watch) -> Open | None:
        """The next segment, among those who may still be learned from when it begins."""
        self._renewal.again(watch.note, self.state.step)
        return segments.open()

    def rehearse(self) -> None:
        """Try everything that could fail in a step, on simulated input; nothing is spent, made or changed."""
        self._attach()
        try:
            self._rehearse()
        finally:
            self._engine.detach()

    def _attach(self) -> None:
        if self._engine.detached:
            self._engine = Engine(self.model, self.plan, **self._engine.options)
            self.state.adaptation = self._engine.adaptation

    def _rehearse(self) -> None:
        if self.evaluate is not None:
            self.evaluate.run(self.model)
        check_labels(self.corpus, self.loss_fn, self._output)
        rehearse(self._engine, self._losses, self.corpus, probe=self.probe)

    def _carried_out(self, opened: Open, segments: Segments) -> bool:
        """As `_carry_out`. A payload that was changed shows when somebody was sampled: these coins are over."""
        try:
            return self._carry_out(opened, segments.revision, segments.members)
        except PayloadChanged:
            segments.run.give_up(opened)
            raise

    def _carry_out(self, opened: Open, revision: int, members: Members) -> bool:
        """The steps of a segment. False if it is to be given up because somebody withdrew."""
        counts = None if self.state.counts is None else self.state.counts.copy()
        caps = self.max_occurrences or None
        sampler = Sampler(self.corpus, self.plan, seed=opened.seed, max_occurrences=caps, counts=counts)
        if (
            self.corpus.revision != revision
        ):  # between the charge and now: these are not the members that were frozen
            return False
        noise = SecureNoise.of_journal(opened.seed, hardened=self.hardened)
        self._engine.continue_at(opened.first, noise, factor=self.state.factor)
        self.model.train()
        with discreet(self.progress.note, inside=self.inside):
            for step in range(opened.first, opened.last):
                self.progress.step(step + 1, self._guarded(sampler, opened.seed, step))
                if self.on_withdrawal == "abandon" and self.corpus.revision != revision:
                    return False
                if members.abandons():
                    return False
        self.state.counts = sampler.counts
        return True

    def _guarded(self, sampler: Sampler, seed: bytes, step: int) -> float | None:
        """One step; what goes wrong in it is told without its text."""
        try:
            if self._engine.choice_due:
                self._choose(sampler, seed, step)
            reseed(seed, step=step, purpose=Purpose.AUGMENT)
            batch = sampler.draw(step)
            if self.augment is not None and len(batch):
                batch = replace(batch, x=self.augment(batch.x))
            reseed(seed, step=step, purpose=Purpose.DROPOUT)
            return self._step(batch)
        except PayloadChanged:  # its text names nobody and holds no size
            raise
        except Exception as error:
            if self.inside:
                raise
            told = withhold(error, self.model)
        raise told  # outside of the handler, which would attach the error and its text

    def _choose(self, sampler: Sampler, seed: bytes, step: int) -> None:
        """The exponential mechanism of the plan, on a draw of its own."""
        reseed(seed, step=step, purpose=Purpose.CHOICE_DROPOUT)
        batch = sampler.draw_for_choice(step)
        self._engine.choose(self._losses(batch.x, batch.y) if len(batch) else None, batch)

    def _step(self, batch: Batch) -> float | None:
        """One private step. Returns the raw loss for a screen inside, and only if it was asked for."""
        loss = None
        for part in batch.split(self.microbatches) if self.microbatches > 1 else (batch,):
            losses = self._losses(part.x, part.y) if len(part) else None
            if self.inside and losses is not None:
                loss = float(losses.detach().mean())
            self._engine.backward(losses, part)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.state.ema is not None:
            self.state.ema.update()
        return loss

    def _losses(self, x: Any, y: Any) -> Tensor:
        return self.loss_fn(self._output(x), x if y is None else y)

    def _output(self, x: Any) -> Any:
        if isinstance(x, Mapping):
            return self.model(**x)
        return self.model(*x) if isinstance(x, tuple | list) else self.model(x)
