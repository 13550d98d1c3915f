"""`Trainer`: the whole job, from the first check to the final weights, in segments that survive being killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lamina.engine.batch import Batch, model_device, to_device
from lamina.engine.distributed import Ranks, is_sharded_model, weights_digest
from lamina.engine.engine import Engine
from lamina.engine.layers import declared_rules
from lamina.engine.noise.random_stream import StreamPurpose
from lamina.engine.noise.source import PLAIN_NOTE, NoiseSource, SecureNoise, SeededNoise
from lamina.engine.probe import preserve_global_generators
from lamina.engine.simulated_input import simulate_for
from lamina.errors import EngineError, RankLost, RunError, StepsAbandoned
from lamina.ledger.run_records import NoiseOrigin, SamplingScheme
from lamina.ledger.schema import pluralize
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.writer import Ledger
from lamina.plan.charges import check_accounts
from lamina.plan.rules import FollowProxy, FreeRule
from lamina.plan.step_plan import StepPlan
from lamina.run.code_fingerprint import SettingsFingerprint, settings_fingerprint
from lamina.run.corpus import Corpus
from lamina.run.distributed import LedSegment, RunLead, follow
from lamina.run.example_sources import ArraySource, seed_step
from lamina.run.loss_advice import LossAdvice
from lamina.run.membership import AdmissionRenewal, LedgerMembership, remember_withdrawals
from lamina.run.optimizer import resolve_optimizer
from lamina.run.options import OPTIONS, TrainOptions, options_help, settled
from lamina.run.payloads import PayloadChanged
from lamina.run.publisher import Outcome, Publisher
from lamina.run.restricted import restricted_notes
from lamina.run.run import Run, keep_charging_bounds
from lamina.run.run_files import Lease, make_folder
from lamina.run.run_ledger import link_ledger, neighbours_of_run, open_run_ledger
from lamina.run.run_output import (
    Progress,
    RunStopped,
    TerminalProgress,
    WithheldError,
    hide_warning_texts,
    make_progress,
    withhold_text,
)
from lamina.run.run_record import AttemptOpened, has_begun
from lamina.run.sampler import Sampler, occurrence_caps
from lamina.run.segments import EAGER, OPTIONS_DIFFER, Segments, code_version
from lamina.run.target_check import TARGETS_NOT_COMPARED, TargetCheck
from lamina.run.trainer_checks import (
    NOT_PROBED_NOTE,
    RAW_SHOWN_NOTE,
    SEEDED_NOTE,
    check_accounts_signed,
    check_caps,
    check_class_names,
    check_compiled,
    check_depth_profiles,
    check_filters,
    check_optimizer,
    check_scheduler,
    check_trainer_arguments,
    check_trainer_options,
    declared_start,
    epsilon_bounds_of_policy,
    part_sizes,
    raw_shown_before,
    rehearse,
    remaining_factors,
    unwrap_prepared,
)
from lamina.run.training_checkpoint import MovingAverage, TrainingState

_TRIED_TOGETHER = 32  # contributions


_EXAMPLES_READ = 8  # before anything is spent
COMPILED = "compiled"  # the folder of compiled code, in that of the run
RANKS_KNOW = ("engine.rank-failed", "engine.ranks-out-of-step")  # errors that every rank has


class Trainer:
    """Train `model` on `corpus` as `plan` says, and leave evidence of what it cost.

        Formal guarantee. Under the conditions of `Engine`, with coins, noise and dropout from secret streams, the
        weights that leave the process (files, callbacks, evaluations) are (ε_k, δ_k)-differentially private for every
        class k, ε_k being the price of every step *charged* to the run: killed, resumed, redone or given up. Nothing of
        a segment leaves before its charge is durable in the ledger, its checkpoint is, and the leaf that
        records it.

            run = lamina.Trainer(model, "auto", loss_fn, corpus, plan, folder="runs/first")
            outcome = run.fit()          # again after a crash: goes on where it was

        Under torch.distributed every rank makes the same trainer and calls `fit`: docs/distributed.md. Rank 0 alone writes.

        loss_fn(output, y) gives one loss per example; without y it gets x. A mapping x is passed as keywords, a tuple as
        arguments.

        optimizer  "auto": that of the plan, with its schedule (`private_optimizer`); or a torch optimiser
        folder     where the run lives; the same folder again resumes it
        options    declared in lamina/run/options.py; those that a RUN.toml can give have the same names there:

    {options}
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Literal["auto"], loss_fn: Callable[[Any, Any], Tensor], corpus: Corpus,
        plan: StepPlan, folder: str | Path, **options: Unpack[TrainOptions],
    ) -> None:  # fmt: skip
        corpus = Corpus(corpus) if isinstance(corpus, DataLoader) else corpus
        check_trainer_arguments(model, loss_fn, corpus, plan)
        self.options = o = settled(options)
        if o["device"] is not None:
            model.to(o["device"])
        engine, evaluate, proxy = o["engine"], o["evaluate"], o["proxy"]
        chosen, scheduler = resolve_optimizer(model, plan, unwrap_prepared(optimizer), unwrap_prepared(o["scheduler"]))
        check_optimizer(model, chosen)
        self.interval = check_scheduler(scheduler, plan, o["interval"])
        check_trainer_options(folder, evaluate, o["max_occurrences"], o["callbacks"])
        corpus.check(plan)
        self._notes = [note for note in (check_depth_profiles(model, corpus.policy, plan),) if note is not None]
        self._ranks = Ranks.current() if engine is None else engine.ranks
        self._ranks.share_weights(model)
        self._lead = RunLead(self._ranks)
        self.model, self.optimizer, self.loss_fn = model, chosen, loss_fn
        self.corpus, self.plan, self.scheduler = corpus, plan, scheduler
        self.folder = Path(folder)
        self._ledger: Ledger | None = None
        self._policy_changed = False  # the ledger's policy, by opening it
        self._settings_of_rank = b""
        self._spend: SpendLedger | None = None
        self._noise_applied: list[tuple[int, tuple[float, ...]]] = []  # of a segment: from which step on, S² per layer
        self.bounds = epsilon_bounds_of_policy(corpus, plan) if o["bounds"] is None else dict(o["bounds"])
        filters = dict(o["filters"] or {})
        check_class_names(plan, bounds=self.bounds, filters=filters)
        check_filters(plan, filters)
        self.segment = min(1000, math.ceil(plan.steps / 10)) if o["segment"] is None else o["segment"]
        self.microbatches, self.views = o["microbatches"], o["views"]
        self.evaluate, self.augment, self.probe, self.inside = evaluate, o["augment"], o["probe"], o["inside"]
        if self.views > 1 and self.augment is None:
            problem = f"views is {self.views} without an augmentation, so all of them would be alike"
            raise RunError("train.views-without-augment", problem, "give augment, or leave views out")
        self.callbacks = tuple(o["callbacks"])
        self.max_occurrences = dict(occurrence_caps(plan, o["max_occurrences"]) or {})
        self._targets = TargetCheck(model, loss_fn, self._output, corpus.source)
        if len(unfit := self._targets.unfit_contributions(corpus)):
            corpus.refuse_untrainable(unfit)
            self._notes.append("contributions whose targets model and loss cannot take are left out")
        if self._targets.unknown:
            self._notes.append(TARGETS_NOT_COMPARED)
        signed, further = corpus.accounts(plan, self.max_occurrences), o["accounts"] or ()
        self.accounts = check_accounts(plan, (*signed, *further))
        check_accounts_signed(signed, further)
        self.factors = remaining_factors(corpus, plan, further)
        check_caps(corpus, plan, self.max_occurrences)
        self.on_withdrawal, self.hardened, self.seed = o["on_withdrawal"], o["hardened"] is not False, o["seed"]
        self._notes += [] if self.seed is None else [SEEDED_NOTE]
        progress, ema = o["progress"] if self._ranks.first else Progress(), o["ema"]
        self.progress = make_progress(wanted=progress, inside=self.inside) if isinstance(progress, bool) else progress
        if is_sharded_model(model) and (ema is not None or evaluate is not None):
            problem = "the model is under fully_shard, and ema or evaluate is given, which need all of it on rank 0"
            raise RunError("train.sharded-model", problem, "leave them out, and evaluate the checkpoint or the outcome")
        average = None if ema is None else MovingAverage(model, ema)
        self.state = TrainingState(model=model, optimizer=chosen, scheduler=scheduler, ema=average, filters=filters)
        self.restricted = () if engine is not None or plan.rule(FollowProxy) else restricted_notes(model, plan, None)
        mine = None if self.restricted else proxy  # for the plan's rule; or else restricted classes are tried on it
        if self.restricted and proxy is not None:
            begun = has_begun(self.folder) or not self._ranks.alone
            shown = o["progress"] is not False
            self.restricted = () if begun else restricted_notes(model, plan, proxy, progress=shown)
            self._notes += self.restricted
        if o["compiled"]:
            check_compiled(corpus, plan, engine, self._ranks, parts=self.microbatches, views=self.views)
        self._engine = engine if engine is not None else Engine(model, plan, proxy=mine, compiled=o["compiled"])
        if engine is not None and engine.budget.taken and self._ranks.first and not has_begun(self.folder):
            problem = f"the engine has taken {pluralize(engine.budget.taken, 'step')}, which this run would not be charged for"
            raise RunError("train.engine-used", problem, "make the model anew, with a new engine")
        starting = o["starting_weights"]
        self._declared = declared_start(self._engine.starting_weights if starting is None else starting)
        self._engine.placement.check()
        if self._engine.placement.sharded and self._ranks.first:
            self.state.before_capture = self._lead.capture
        self._notes += [self._engine.plain_noise_note] if self._engine.plain_noise_note and self.hardened else []
        self._notes += [self._engine.claim] if self._engine.claim else []
        self._share_state()
        self._renewal = AdmissionRenewal(corpus, plan, self.folder / "admitted")
        self.state.names = self._renewal.names
        if self._engine.model is not model or self._engine.plan.digest() != plan.digest():
            problem = "the engine belongs to another model or plan"
            raise RunError("train.engine-of-other-model", problem, "leave engine out, or give the matching one")
        for name, option in OPTIONS.items():
            if option.apply is not None:
                option.apply(self, self.options[name])  # type: ignore[literal-required]

    @property
    def writes(self) -> bool:
        """Return whether this process writes files: of several ranks, rank 0 alone."""
        return self._ranks.first

    def keep_hardened(self, hardened: bool) -> None:
        """Use the kind of noise with which the run began, unless the caller chose one."""
        if self.options["hardened"] is None:
            self.hardened = hardened

    def _settings(self, *, hardened: bool | None = None) -> SettingsFingerprint:
        """Return a digest of what a step depends on beside plan, data and seed, and the values that it does not cover."""
        functions, where = {"loss": self.loss_fn, "augment": self.augment}, model_device(self.model).type
        options = {
            **{name: value for name, value in self.options.items() if OPTIONS[name].steps},
            "hardened": self.hardened if hardened is None else hardened,
            "max_occurrences": self.max_occurrences,
            "filters": {name: getattr(f, "budget", None) for name, f in self.state.filters.items()},
            "autocast": [torch.is_autocast_enabled(where), str(torch.get_autocast_dtype(where))],
            "engine": {name: value for name, value in self._engine.options.items() if name != "compiled"},
            "declared": [
                declared_rules(self.model),
                *(type(rule) for rule in self.plan.rules if isinstance(rule, FreeRule)),
            ],
        }
        state = self.state
        return settings_fingerprint(
            self.model, self.optimizer, self.scheduler, functions, options, state.given, state.given_schedule
        )

    @property
    def ledger(self) -> Ledger:
        """The ledger; opened, or made, when it is first asked for."""
        if self._ledger is None:
            keys = {"key": self.options["ledger_key"], "governing": self.options["governing_key"]}
            self._ledger, self._policy_changed = open_run_ledger(
                self.options["ledger"], self.corpus, self.plan, folder=self.folder, **keys
            )
        return self._ledger

    def _close_ledger(self) -> None:
        """Close the ledger if it was opened here; it is opened again when it is asked for."""
        if self._ledger is not None and self._ledger is not self.options["ledger"]:
            self._ledger.close()
            self._ledger = self._spend = None

    @property
    def spend(self) -> SpendLedger:
        """The ledger as runs charge it."""
        if self._spend is None:
            self._spend = SpendLedger(self.ledger)
        return self._spend

    def fit(self) -> Outcome:
        """Train to the end of the plan, or go on from where the folder's run was left."""
        self._settings_of_rank, *_ = self._settings()  # before rank 0 tries model and loss: call counters may change
        if not self._ranks.first:
            return self._follow()
        try:
            outcome = self._lead_fit()
        except BaseException as error:
            self._lead.stopped(error)
            raise
        self._lead.end(outcome)
        return outcome.of_model(self.model)

    def _follow(self) -> Outcome:
        """As one of several ranks that rank 0 leads: take its steps, write nothing."""
        with preserve_global_generators():
            self._attach()
            try:
                self.optimizer.zero_grad()
                self.corpus.refresh()
                self._engine.decline_probe()  # rank 0 probes the same model
                return follow(self, self._ranks)
            finally:
                self.optimizer.zero_grad()
                self._engine.detach()

    def facts_of_rank(self, salt: bytes) -> dict[str, bytes]:
        """What every rank must have like rank 0."""
        corpus = self.corpus
        return {
            "plan": self.plan.digest(),
            "options, model or loss": self._settings_of_rank,
            "contributions": corpus.order(salt) + corpus.membership(salt),
            "data": corpus.digest(salt),
            "number of threads": b"%d" % torch.get_num_threads(),
            "program": code_version().encode(),
            "weights": b"" if self._engine.placement.sharded else weights_digest(self.model),
        }

    def take_led_segment(self, opened: LedSegment) -> None:
        """The steps of a segment that rank 0 opened."""
        if self._run_steps(opened, self.corpus.revision, None):
            self.state.segments, self.state.step = opened.segment + 1, opened.last

    def _lead_fit(self) -> Outcome:
        make_folder(self.folder)
        withdrawn = remember_withdrawals(self.corpus, self.folder / "withdrawn")
        with Lease.take(self.folder), withdrawn, preserve_global_generators():
            self._attach()
            try:
                return self._fit()
            except KeyboardInterrupt:
                raise RunStopped.told(
                    f"stopped in '{self.folder}'; run it again to go on from here at no further cost"
                ) from None
            finally:
                self.corpus.on_withdrawal_request = None
                self._close_ledger()
                self.progress.end()
                self.optimizer.zero_grad()
                self._engine.detach()

    def _fit(self) -> Outcome:
        self.optimizer.zero_grad()
        self.corpus.refresh()
        self._rehearse()
        if not has_begun(self.folder):
            self._compile(self.folder / COMPILED)  # what cannot be compiled is refused before anything is reserved
        self.state.notes[:] = self._notes if self._engine.probed else [*self._notes, NOT_PROBED_NOTE]
        if (self.inside and not isinstance(self.progress, TerminalProgress)) or raw_shown_before(self.folder):
            self.state.notes.append(RAW_SHOWN_NOTE)
        publisher = Publisher(
            self.plan, self.evaluate, caps=self.max_occurrences, progress=self.progress, notes=self.state.notes,
            callbacks=self.callbacks,
        )  # fmt: skip
        self._renewal.start(publisher.note)
        members = LedgerMembership(self.ledger, self.corpus)
        for each in neighbours_of_run(self.ledger.name, self.folder):
            publisher.note(each.note(self.ledger.origin))
        if self._policy_changed:
            publisher.note("this run changed the policy in force in the ledger: lamina ledger policy shows it")
        members.enter_ledger(publisher.note)
        self.corpus.on_withdrawal_request = members.withdraw
        link_ledger(self.ledger, self.folder)
        run = Run(
            self.folder, spend=self.spend, bounds=self.bounds, accounts=self.accounts, factors=self.factors,
            seed=self.seed, declared=self._declared,
        )  # fmt: skip
        if self._engine.compiled is not None:
            self._engine.compiled.seal_with(run.seal)
        keep_charging_bounds(run, self.plan, members.standing)
        if (last := run.file.opened) is not None:  # the digest of its options tells the kind of noise of the run
            self.keep_hardened(last.settings != self._settings(hardened=False)[0])
        self._lead.check(self.corpus, run.salt, self.facts_of_rank, hardened=self.hardened)
        segments = Segments(
            run, self.state, plan=self.plan, corpus=self.corpus, members=members, settings=self._settings,
            caps=self.max_occurrences, length=self.segment, note=publisher.note, say=self.progress.note,
            world_size=self._ranks.size, executor=self._executor, take_over=self.options["take_over"],
        )  # fmt: skip
        segments.start()
        for note in self.ledger.notes:
            publisher.note(note)
        if (stopped := run.stopped) is not None:
            if self._engine.placement.sharded:  # rank 0 alone cannot compute anything
                segments.refuse_same_error(stopped)
            else:
                self._look_into_stop(stopped, segments)
        self._renewal.write_members()
        self._lead.state(self.state)
        self.progress.begin(self.state.step, segments.end)
        reason = publisher.publish(run, self.state)
        while reason is None and (opened := self._next(segments, publisher)) is not None:
            if self._run_segment(opened, segments):
                segments.close(opened, tuple(self._noise_applied))
                reason = publisher.publish(run, self.state)
                if text := self._engine.outside.weights_text():  # by a callback or an evaluation
                    publisher.note(text)
            else:
                segments.abandon(opened)
                self._lead.state(self.state)
        reason = reason or ("complete" if self.state.step == self.plan.steps else "budget")
        return publisher.finish(run, self.state, reason=reason, facts=self._facts())

    def _facts(self) -> dict[str, Any]:
        """Return the facts that a certificate needs and no epoch contains: fields of `RunEnd`."""
        planned = {name for layer in self.plan.layers for name in layer.parameters}
        trained = {name for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        notes = self.state.notes  # of every session of the run, not of the last one alone
        return {
            "noise": NoiseOrigin.SEEDED if SEEDED_NOTE in notes or not self._engine.private else NoiseOrigin.SYSTEM,
            "sampling": SamplingScheme.POISSON,
            "public_number": bool(self.corpus.public_number),
            "probed": NOT_PROBED_NOTE not in notes,
            "covered": trained <= planned,
            "raw_figures": RAW_SHOWN_NOTE in notes,
            "hardened": self.hardened and not any(OPTIONS_DIFFER in note or PLAIN_NOTE in note for note in notes),
        }

    def _next(self, segments: Segments, publisher: Publisher) -> AttemptOpened | None:
        """The next segment, among those who may still be learned from when it begins."""
        self._renewal.revalidate(publisher.note, self.state.step)
        self._lead.check(self.corpus, segments.run.salt, self.facts_of_rank, hardened=self.hardened)
        self._compile(self.folder / COMPILED)
        return segments.open()

    @property
    def _executor(self) -> str:
        """Return the executor of the steps: sums of different compilers differ in their last bits."""
        if self._engine.compiled is None:
            return EAGER
        from lamina.engine.execute.compiled import compiler_version  # torch's tracing is slow to import

        return compiler_version()

    def _compile(self, folder: Path | None) -> None:
        """Compile the step if that is asked for and was not done; refuse what cannot be compiled."""
        executor = self._engine.compiled
        if executor is None or executor.complete:
            return
        self.progress.note("compiling the step")
        self.model.train()
        with preserve_global_generators():
            x, y = self.probe if isinstance(self.probe, tuple) else self.corpus.no_examples()
            if not isinstance(self.probe, tuple):
                x, y = simulate_for(self._losses_augmented, x, y)
            batch = Batch(self._augmented(x), y)
        if reason := executor.compile_ahead(self._losses, batch, part_sizes(self.plan, self.microbatches), folder):
            problem = f"compiled is true, and the step cannot be one graph: {reason}"
            remedy = "leave compiled out; if a segment of the run is open, its steps are then charged again"
            raise RunError("train.step-not-compiled", problem, remedy)
        if executor.replaced:
            self.progress.note(
                f"the code in '{folder}' has no valid signature in the checkpoint: it was compiled again"
            )

    def rehearse(self) -> None:
        """Try everything that could fail in a step, on simulated input; nothing is spent, made or changed."""
        self._attach()
        try:
            self._rehearse()
            self._compile(None)
        finally:
            self._engine.detach()

    def _share_state(self) -> None:
        """What the engine changes from step to step belongs to the checkpoint."""
        self.state.adaptation, self.state.mechanism = self._engine.rules.adaptation, self._engine.mechanism
        self.state.compiled = self._engine.compiled
        if self.plan.bands > 1:
            self._engine.mechanism.members = self.corpus.order(b"lamina/turns")

    def _attach(self) -> None:
        if self._engine.detached:
            self._engine = Engine(self.model, self.plan, **self._engine.options)
            self._share_state()
        self._engine.placement.gather()

    def _rehearse(self) -> None:
        self.corpus.source.fetch(np.arange(min(len(self.corpus.source), _EXAMPLES_READ)))  # unreadable: refused here
        if self.evaluate is not None:
            self.evaluate.run(self.model)
        advice = LossAdvice(lambda x: self._output(to_device(self._augmented(x), model_device(self.model))))
        for note in rehearse(self._engine, self._losses_augmented, self.corpus, probe=self.probe, advice=advice):
            if note not in self._notes:
                self._notes.append(note)

    def _run_segment(self, opened: AttemptOpened, segments: Segments) -> bool:
        """As `_run_steps`. A changed payload, or an error, shows who was sampled, so its segment is abandoned."""
        try:
            return self._run_steps(opened, segments.revision, segments.members)
        except PayloadChanged:
            segments.run.abandon(opened)
            raise
        except WithheldError:
            segments.run.stop(opened)
            raise

    def _look_into_stop(self, stopped: AttemptOpened, segments: Segments) -> None:
        """After an error in a step: try every contribution alone, whoever was sampled. Who fails is left out."""
        found: list[int] = []
        for part in torch.from_numpy(self.corpus.eligible).split(_TRIED_TOGETHER):
            if self._fails(part):
                alone = [int(unit) for unit in part.split(1) if self._fails(unit)]
                found += alone
                if not alone:  # they fail together only: that is the code
                    break
        if found:
            self.corpus.refuse_untrainable(np.array(found))
            segments.note("contributions on which model or loss fails are left out")
        segments.refuse_same_error(stopped)

    def _fails(self, units: Tensor) -> bool:
        """Whether a step without noise or release fails on these contributions."""
        layout = self.corpus.layout
        with preserve_global_generators():
            try:
                x, y = self.corpus.source.fetch(layout.rows_of(units.numpy()))
                x = self._augmented(x)
                owner = torch.arange(len(units)).repeat_interleave(torch.from_numpy(layout.sizes(units.numpy())))
                batch = self._targets.mask(Batch(x, y, unit=owner, cls=torch.zeros_like(units)))
                self._engine.clipped_sums(self._losses(batch.x, batch.y), batch)
            except PayloadChanged:
                raise
            except Exception:  # of whatever kind: model, loss and augmentation are the user's
                return True
        return False

    def _run_steps(self, opened: AttemptOpened | LedSegment, revision: int, members: LedgerMembership | None) -> bool:
        """The steps of a segment. False if somebody withdrew and it must be abandoned: rank 0, with `members`, decides."""
        counts = None if self.state.counts is None else self.state.counts.copy()
        caps = self.max_occurrences or None
        sampler = Sampler(
            self.corpus, self.plan, seed=opened.seed, max_occurrences=caps, counts=counts, factors=opened.factors,
            ranks=self._ranks,
        )  # fmt: skip
        if self.corpus.revision != revision:  # between the charge and now: these are not the members that were frozen
            return False
        rank = self._ranks.rank
        noise: NoiseSource = SecureNoise.of_segment(opened.seed, rank=rank, hardened=self.hardened)
        if self.seed is not None:
            noise = SeededNoise.of_segment(opened.seed, rank=rank, hardened=self.hardened)
        self._lead.segment(opened)
        self._engine.placement.divide()
        resumed = opened.first > 0 and opened.generation == 0  # nothing else went on from the noise of the checkpoint
        self._engine.continue_at(opened.first, noise, factor=self.state.factor, resumed=resumed)
        self.model.train()
        self._noise_applied = []
        with hide_warning_texts(self.progress.note, inside=self.inside):
            try:
                for step in range(opened.first, opened.last):
                    self.progress.step(step + 1, self._run_step(sampler, opened.seed, step))
                    withdrew = self.on_withdrawal == "abandon" and self.corpus.revision != revision
                    if members is not None and (withdrew or members.abandon_requested()):
                        self._ranks.agree(step + 1, abandoned=True)
                        self._lead.segment_over()
                        return False
                self._agree_at_end(opened.last)
            except StepsAbandoned:
                return False
        self._lead.segment_over()
        self.state.counts = sampler.counts
        return True

    def _agree_at_end(self, step: int) -> None:
        """All ranks have taken all steps of the segment."""
        try:
            self._ranks.agree(step)
        except (RankLost, StepsAbandoned):
            raise
        except EngineError as error:
            raise withhold_text(error, self.model) from None

    def _run_step(self, sampler: Sampler, seed: bytes, step: int) -> float | None:
        """One step; an error in it is reported without its text."""
        try:
            if self._engine.choice_due:
                self._choose(sampler, seed, step)
            self._engine.follow_proxy()
            self._note_noise(step)
            if self.augment is not None or not isinstance(self.corpus.source, ArraySource):  # which draws nothing
                seed_step(seed, step=step, purpose=StreamPurpose.AUGMENT, rank=self._ranks.rank)
            batch = sampler.draw(step)
            if len(batch) and self.augment is not None:
                batch = batch.views(self.views)
                batch = replace(batch, x=self._augmented(batch.x))
            batch = self._targets.mask(batch)
            seed_step(seed, step=step, purpose=StreamPurpose.DROPOUT, rank=self._ranks.rank)
            return self._step(batch, step)
        except (RankLost, StepsAbandoned):
            raise
        except PayloadChanged:  # its text names nobody and holds no size
            self._ranks.agree(step, failed=True)
            raise
        except Exception as error:
            if getattr(error, "code", "") not in RANKS_KNOW:
                self._ranks.agree(step, failed=True)
            withheld = withhold_text(error, self.model, inside=self.inside)
        raise withheld  # outside of the handler, which would attach the error and its text

    def _note_noise(self, step: int) -> None:
        """Note S² per layer of this step, if a rule of the plan moved it since the last one."""
        if self._engine.rules.adaptation is not None:
            variance = tuple(s * s for s in self._engine.applied.noise)
            if not self._noise_applied or variance != self._noise_applied[-1][1]:
                self._noise_applied.append((step, variance))

    def _choose(self, sampler: Sampler, seed: bytes, step: int) -> None:
        """The exponential mechanism of the plan, on a draw of its own."""
        seed_step(seed, step=step, purpose=StreamPurpose.CHOICE_DROPOUT)
        batch = sampler.draw_for_choice(step)
        with preserve_global_generators():
            batch = self._targets.mask(batch)
        self._engine.choose(self._losses(batch.x, batch.y) if len(batch) else None, batch)

    def _step(self, batch: Batch, step: int) -> float | None:
        """One private step. Returns the raw loss for a screen inside, and only if it was asked for."""
        loss = None
        for part in batch.split(self.microbatches) if self.microbatches > 1 else (batch,):
            losses = self._engine.step(self._losses, part)
            if self.inside and losses is not None:
                loss = float(losses.mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None and (step + 1) % self.interval == 0:
            self.scheduler.step()
        if self.state.ema is not None:
            self.state.ema.update(step)
        return loss

    def _augmented(self, x: Any) -> Any:
        return x if self.augment is None else self.augment(x)

    def _losses_augmented(self, x: Any, y: Any) -> Tensor:
        return self._losses(self._augmented(x), y)

    def _losses(self, x: Any, y: Any) -> Tensor:
        x, y = to_device((x, y), model_device(self.model))
        return self.loss_fn(self._output(x), x if y is None else y)

    def _output(self, x: Any) -> Any:
        if isinstance(x, Mapping):
            return self.model(**x)
        return self.model(*x) if isinstance(x, tuple | list) else self.model(x)


Trainer.__doc__ = str(Trainer.__doc__).replace("{options}", options_help())
