"""What a run leaves in the ledger: an auditor can check it, and it agrees with the run's folder and its weights, come what may."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hospital
import postgres
import problem
import pytest
from making import GOVERNING
from open_charges import attempts_in_folder, has_begun
from refusals import raises_code
from run_state import attempts, run_id
from stopping import LOOSE, During, Killed, complete, copied, die, killed, lose_ledger, told

import lamina
from lamina.errors import BudgetExceeded
from lamina.ledger.contribution_trace import trace_contribution
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.governance_records import (
    KeyChange,
    KeyEvent,
    KeyEvents,
    PolicyChange,
    Role,
    Withdrawal,
    WithdrawalEffect,
    WithdrawalReason,
)
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord, Epoch, SegmentOutcome
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import WithdrawalInbox, withdraw, withdraw_signed
from lamina.ledger.withdrawal_request import sign_withdrawal
from lamina.ledger.writer import Ledger
from lamina.run.membership import LedgerMembership
from lamina.sign.keys import PrivateKey


def sound(where: str | Path, **options: Any) -> Verification:
    found = verify(str(where), **options)
    assert found.problem is None and found.verified, found.problem
    return found


def epochs(where: str | Path) -> list[Epoch]:
    with LedgerReader.read_only(where) as view:
        return [leaf.record for leaf in view.of_kind(Epoch) if isinstance(leaf.record, Epoch)]


def agrees(folder: Path) -> None:
    """The run's folder and the ledger know the same attempts, and how each ended."""
    assert {(*each.key, each.nonce): each.state for each in attempts(folder)} == attempts_in_folder(folder)


@pytest.fixture
def ward(tmp_path: Path) -> hospital.Hospital:
    return hospital.usual(tmp_path / "h", real=True)


# ---------------------------------------------------------------------------------------- a whole run


def test_a_run_on_signed_contributions_can_be_audited(ward: hospital.Hospital) -> None:
    outcome = ward.trainer().fit()
    where = ward.root / "runs" / "a" / "ledger.db"
    assert where.is_symlink() and where.resolve() == ward.root / "runs" / "ward-7.ledger.db"
    with LedgerReader.read_only(where) as view:
        key = next(each for each in view.header.keys if each.role is Role.GOVERNING).public
        counts = {kind: sum(1 for _ in view.of_kind(kind)) for kind in (ContributionRecord, KeyEvents, Epoch)}
        first = next(view.of_kind(ContributionRecord))
        record = first.record
        assert isinstance(record, ContributionRecord)
        told = trace_contribution(view, first)
    assert counts == {ContributionRecord: 57, KeyEvents: 1, Epoch: 4}
    found = sound(where, trust=Trust(plain=(key,), ring=lamina.KeyRing.load(ward.keys)))
    assert found.trusted and found.attestations == 57 and found.signed == found.size
    last = {account.bound: account.spend / 1e9 for account in epochs(where)[-1].accounts}
    for name in ("clinical", "sensitive"):
        assert last[name, 0, 0] == pytest.approx(outcome.epsilon[name], abs=2e-9)
        assert last[name, 0, 0] >= outcome.epsilon[name] - 1e-12
    assert told
    agrees(ward.root / "runs" / "a")


def test_the_same_folder_admitted_again_enters_nobody_twice(ward: hospital.Hospital) -> None:
    ledger = ward.root / "ledger.db"
    corpus = ward.admit(ledger=ledger)
    size = LedgerReader.read_only(ledger).size
    ward.trainer(corpus=corpus, ledger=ledger).fit()
    again = ward.admit(ledger=ledger)
    assert len(again) == 57 and not again.admission.refused
    assert LedgerReader.read_only(ledger).size == size + 6  # start, four epochs, end
    sound(ledger)


def test_data_without_a_policy_has_a_ledger_that_promises_nothing(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", bounds={}).fit()
    problem.trainer(tmp_path / "b", bounds={}).fit()
    found = sound(tmp_path / "tests.ledger.db")
    assert found.counts["epoch"] == 10 and found.counts["contribution"] == 0
    with LedgerReader.read_only(tmp_path / "tests.ledger.db") as view:
        assert {preset.noise_multiplier for preset in view.header.presets} == {0}


def test_a_policy_that_promises_less_is_refused(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a").fit()
    looser = problem.POLICY.replace("epsilon = 4.0", "epsilon = 5.0")
    size = LedgerReader.read_only(tmp_path / "tests.ledger.db").size
    plan = problem.plan(problem.net(), policy=looser)
    with raises_code("ledger.policy-loosened"):
        problem.trainer(tmp_path / "b", corpus=problem.corpus(policy=looser), plan=plan).fit()
    assert LedgerReader.read_only(tmp_path / "tests.ledger.db").size == size
    with raises_code("ledger.policy-missing"):
        problem.trainer(tmp_path / "b", bounds={}).fit()


def test_a_policy_that_promises_more_is_followed(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", steps=4).fit()
    stricter = problem.POLICY.replace("epsilon = 2.0", "epsilon = 1.9") + "[class.new]\nepsilon = 1.0\npopulation = 9\n"
    plan = problem.plan(problem.net(), policy=stricter)
    with pytest.raises(BudgetExceeded):
        problem.trainer(tmp_path / "b", corpus=problem.corpus(policy=stricter), plan=plan).fit()
    with LedgerReader.read_only(tmp_path / "tests.ledger.db") as view:
        assert sum(1 for _ in view.of_kind(PolicyChange)) == 1
    problem.trainer(tmp_path / "a", steps=4, corpus=problem.corpus(policy=stricter)).fit()
    sound(tmp_path / "tests.ledger.db")


# ---------------------------------------------------------------------------------------- where it is


def test_data_whose_origin_nobody_declared_keeps_its_ledger_when_it_changes(tmp_path: Path) -> None:
    given = problem.data()
    plan = problem.plan(problem.net())
    problem.trainer(tmp_path / "a", corpus=lamina.Corpus(**given), plan=plan, bounds={}, steps=24).fit()
    killed(tmp_path / "b", 8, corpus=lamina.Corpus(**given), plan=plan, bounds={})
    (ledger,) = tmp_path.glob("data-*.ledger.db")
    given["x"][0] += 1
    problem.trainer(tmp_path / "b", corpus=lamina.Corpus(**given), plan=plan, bounds={}).fit()
    assert list(tmp_path.glob("data-*.ledger.db")) == [ledger]
    with raises_code("train.origin-not-declared"):  # other data, and nobody says whose
        problem.trainer(tmp_path / "c", corpus=lamina.Corpus(**given), plan=plan, bounds={}).fit()
    others = lamina.Corpus(**given, other_people="another ward")
    problem.trainer(tmp_path / "c", corpus=others, plan=plan, bounds={}).fit()
    assert len(list(tmp_path.glob("data-*.ledger.db"))) == 2  # other data, by themselves
    assert (tmp_path / "origin.key").stat().st_mode & 0o077 == 0
    assert sound(ledger).counts["epoch"] == 5 + 5


def test_the_key_beside_a_ledger_is_secret_and_signs(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a").fit()
    path = tmp_path / "tests.ledger.pem"
    assert path.stat().st_mode & 0o077 == 0
    with Ledger.open(tmp_path / "tests.ledger.db", PrivateKey.load(path, None)) as ledger:
        assert ledger.checkpoint() == ledger.latest()


def test_a_folder_with_a_copy_of_the_ledger_in_it_is_refused(tmp_path: Path) -> None:
    """A copy would be charged, and the ledger would not know."""
    killed(tmp_path / "a", 8)
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # follows the link
    with raises_code("train.ledger-not-a-link"):
        problem.trainer(tmp_path / "b").fit()


def test_a_ledger_of_another_corpus_is_refused(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", ledger=tmp_path / "l.db").fit()
    other = problem.POLICY.replace('"tests"', '"others"')
    with raises_code("ledger.wrong-origin"):
        problem.trainer(tmp_path / "b", corpus=problem.corpus(policy=other), ledger=tmp_path / "l.db").fit()
    with Ledger.open(tmp_path / "l.db") as ledger, raises_code("train.ledger-of-other-corpus"):
        problem.trainer(tmp_path / "b", corpus=problem.corpus(policy=other), ledger=ledger).fit()
    assert not has_begun(tmp_path / "b")


def test_an_open_ledger_is_used_and_left_open(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", ledger=tmp_path / "l.db", steps=4).fit()
    with Ledger.open(tmp_path / "l.db") as ledger:  # without its key: nothing is signed
        problem.trainer(tmp_path / "b", ledger=ledger, steps=4, plan=problem.plan(problem.net(), 4)).rehearse()
        size = ledger.size
    assert size == 4  # header, start, epoch, end


# ---------------------------------------------------------------------------------------- redone, abandoned, copied


def test_every_attempt_is_a_leaf_however_it_ended(tmp_path: Path) -> None:
    killed(tmp_path / "a", 8, bounds=LOOSE)
    problem.trainer(tmp_path / "a", bounds=LOOSE, microbatches=2).fit()  # the open segment is redone
    outcomes = [(s.index, s.generation, s.outcome) for e in epochs(tmp_path / "tests.ledger.db") for s in e.segments]
    assert outcomes[:3] == [
        (0, 0, SegmentOutcome.CLOSED),
        (1, 0, SegmentOutcome.ABANDONED),
        (1, 1, SegmentOutcome.CLOSED),
    ]
    sound(tmp_path / "tests.ledger.db")
    agrees(tmp_path / "a")


def test_a_copied_run_is_refused_or_pays_for_what_it_does_again(tmp_path: Path) -> None:
    plan = killed(tmp_path / "a", 8, bounds=LOOSE).plan
    copied(tmp_path / "a", "b")
    one = problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
    with raises_code("train.folder-behind-ledger"):
        problem.trainer(tmp_path / "b", bounds=LOOSE).fit()
    other = problem.trainer(tmp_path / "b", bounds=LOOSE, take_over=True).fit()
    assert one.notes == () and told(other, "took over")
    sound(tmp_path / "tests.ledger.db")
    last = epochs(tmp_path / "tests.ledger.db")[-1]
    (clinical,) = [each for each in last.accounts if each.cls == "clinical"]
    assert clinical.spend / 1e9 == pytest.approx(other.total["clinical"], abs=2e-9)
    # 24 steps of the first; of the copy everything after its checkpoint
    both = [replace(plan.schedule("clinical")[0], steps=24 + 19)]
    assert other.total["clinical"] == pytest.approx(lamina.account.find_accountant("pld").epsilon(both, 1e-5))


def test_a_ledger_restored_from_an_older_copy_is_completed_from_receipts(tmp_path: Path) -> None:
    folder = tmp_path / "a"

    def save() -> None:
        for path in tmp_path.glob("tests.ledger.db*"):
            shutil.copy(path, tmp_path / f"old-{path.name}")

    with pytest.raises(Killed):
        problem.trainer(folder, progress=During({7: save, 13: die})).fit()
    lose_ledger(tmp_path)
    for path in tmp_path.glob("old-*"):
        path.rename(tmp_path / path.name.removeprefix("old-"))
    with raises_code("train.ledger-behind-folder"):
        problem.trainer(folder).fit()
    assert complete(tmp_path / "tests.ledger.db", folder) == 1
    outcome = problem.trainer(folder).fit()
    assert outcome.total == outcome.epsilon
    sound(tmp_path / "tests.ledger.db")
    agrees(folder)


def test_what_is_held_counts_until_it_is_a_leaf(tmp_path: Path) -> None:
    trainer = killed(tmp_path / "a", 8)  # segment 0 is a leaf, segment 1 is held
    (run,) = trainer.spend.labels()
    event = trainer.plan.schedule("clinical")[0]
    ten = lamina.account.find_accountant("pld").epsilon(
        [lamina.account.Event(sigma=event.sigma, q=event.q, steps=10)], 1e-5
    )
    assert trainer.spend.spent(run, "clinical", delta=1e-5) == pytest.approx(ten)
    assert len(epochs(tmp_path / "tests.ledger.db")) == 1
    assert any("open" in note or "held" in note for note in sound(tmp_path / "tests.ledger.db").notes)


# ---------------------------------------------------------------------------------------- withdrawals


def stopped(ward: hospital.Hospital, at: int, act: Callable[[Ledger, str], None], **options: Any) -> tuple[Any, str]:
    """A run during whose step `at` somebody does something to the ledger from outside."""
    corpus = ward.admit(ledger=ward.root / "l.db")
    digest = corpus.digests[20]  # clinical

    def during() -> None:
        with Ledger.open(ward.root / "l.db") as other:
            act(other, digest)
        time.sleep(1.1)  # a run looks once a second

    options = {"ledger": ward.root / "l.db", "corpus": corpus, "bounds": None, **options}
    trainer = ward.trainer(progress=During({at: during}), **options)
    return trainer, digest


def test_a_withdrawal_from_outside_is_out_from_the_next_segment(ward: hospital.Hospital) -> None:
    trainer, _ = stopped(ward, 5, lambda ledger, name: withdraw(ledger, name, WithdrawalReason.CONSENT) and None)
    outcome = trainer.fit()
    assert outcome.steps == 12
    assert "1 contributions withdrew and are not used from step 6 on" in outcome.notes
    assert len(trainer.corpus) == 56
    with LedgerReader.read_only(ward.root / "l.db") as view:
        (leaf,) = view.of_kind(Withdrawal)
        read = [segment.eligibility for epoch in epochs(ward.root / "l.db") for segment in epoch.segments]
        assert [each > leaf.seq for each in read] == [False, False, True, True]
    sound(ward.root / "l.db")
    agrees(ward.root / "runs" / "a")
    assert len(ward.admit(ledger=ward.root / "l.db")) == 56  # out of every later run too


def test_a_withdrawal_that_asks_for_it_ends_the_segment(ward: hospital.Hospital) -> None:
    trainer, _ = stopped(
        ward,
        5,
        lambda ledger, name: withdraw(ledger, name, WithdrawalReason.REQUEST, effect=WithdrawalEffect.ABANDON) and None,
    )
    outcome = trainer.fit()
    assert told(outcome, "abandoned")
    outcomes = [segment.outcome for epoch in epochs(ward.root / "l.db") for segment in epoch.segments]
    assert outcomes.count(SegmentOutcome.ABANDONED) == 1
    sound(ward.root / "l.db")
    agrees(ward.root / "runs" / "a")


def test_a_file_in_a_watched_folder_reaches_a_run(ward: hospital.Hospital) -> None:
    def drop(ledger: Ledger, digest: str) -> None:
        inbox = ward.root / "inbox"
        inbox.mkdir()
        (inbox / "one.json").write_text(json.dumps({"withdraw": digest, "reason": "legal"}))
        (taken,) = WithdrawalInbox(ledger, inbox).take()
        assert not taken.refused

    trainer, _ = stopped(ward, 2, drop)
    trainer.fit()
    assert len(trainer.corpus) == 56
    sound(ward.root / "l.db")


def test_nobody_leaves_through_the_corpus_where_requests_are_signed(ward: hospital.Hospital) -> None:
    """A contributor's request is another matter: the ledger takes it, and the next segment is without it."""
    ward.policy = lamina.Policy.parse(hospital.POLICY.replace("delta", 'withdraw = "signed"\ndelta', 1))
    corpus = ward.admit()
    corpus.withdraw("c03")
    with raises_code("ledger.withdrawal-not-signed"):
        ward.trainer(corpus=corpus).fit()
    where, corpus = ward.root / "runs" / "ward-7.ledger.db", ward.admit()
    (digest,) = corpus.stable_ids(["c03"])

    def ask() -> None:
        with raises_code("ledger.withdrawal-not-signed"):
            corpus.withdraw("c04")
        with Ledger.open(where) as ledger:
            asked = {"ledger": ledger.header_hash, "time": ledger.now()}
            withdraw_signed(ledger, sign_withdrawal(bytes.fromhex(digest), "consent", ward.key, **asked))

    ward.trainer(corpus=corpus, progress=During({5: ask})).fit()
    sound(where)
    refused = ward.admit(ledger=where).admission.refused
    assert {(each.id, str(each.reason)) for each in refused} == {("c03", "withdrawn")}


def test_who_leaves_through_the_corpus_leaves_the_ledger(ward: hospital.Hospital) -> None:
    corpus = ward.admit()
    corpus.withdraw("c03")  # before any run: the ledger hears of it when there is one

    ward.trainer(corpus=corpus, progress=During({5: lambda: corpus.withdraw("c04")})).fit()
    where = ward.root / "runs" / "ward-7.ledger.db"
    with LedgerReader.read_only(where) as view:
        targets = [view.leaf(leaf.record.target).record for leaf in view.of_kind(Withdrawal)]  # type: ignore[union-attr]
    assert {t.descriptor.hex() for t in targets} == set(corpus.stable_ids(["c03", "c04"]))  # type: ignore[union-attr]
    sound(where)
    refused = ward.admit(ledger=where).admission.refused
    assert {(each.id, str(each.reason)) for each in refused} == {("c03", "withdrawn"), ("c04", "withdrawn")}


def test_a_key_that_the_ledger_revoked_is_out_whatever_the_ring_says(ward: hospital.Hospital) -> None:
    """The ring in use still calls it good: it was put back from an older copy."""
    where = ward.root / "l.db"
    corpus = ward.admit(ledger=where)
    contract = CorpusTerms.of_policy(ward.policy)
    with open_or_create(where, contract) as ledger:
        members = LedgerMembership(ledger, corpus)
        members.freeze()
        assert len(corpus) == 57
        (kid,) = corpus.admission.kids
        gone = KeyEvent(change=KeyChange.REVOKE, target=kid, effective=ledger.now())
        ledger.govern(KeyEvents(events=(gone,)))
        members.freeze()
        assert len(corpus) == 0
    with raises_code("corpus.nobody-admitted"):
        ward.admit(ledger=where)


def test_a_segment_is_not_replayed_with_somebody_who_withdrew_meanwhile(ward: hospital.Hospital) -> None:
    corpus = ward.admit(ledger=ward.root / "l.db")

    with pytest.raises(Killed):
        ward.trainer(corpus=corpus, ledger=ward.root / "l.db", progress=During({5: die})).fit()
    with Ledger.open(ward.root / "l.db") as ledger:
        withdraw(ledger, corpus.digests[20], WithdrawalReason.CONSENT)
    outcome = ward.trainer(ledger=ward.root / "l.db").fit()
    assert told(outcome, "added or withdrawn")
    sound(ward.root / "l.db")


# ---------------------------------------------------------------------------------------- PostgreSQL


def test_a_server_that_restarts_is_waited_for(tmp_path: Path, server: postgres.Server) -> None:
    where, key = server.database("run_restarted"), PrivateKey.generate()
    with raises_code("ledger.no-key-to-create"):
        problem.trainer(tmp_path / "a", ledger=where).fit()

    def restart() -> None:  # back half a second later, when the segment has ended and is to be recorded
        server.stop("immediate")
        threading.Timer(0.5, server.start).start()

    away = During({3: restart, 14: restart})
    outcome = problem.trainer(
        tmp_path / "a", ledger=where, ledger_key=key, governing_key=GOVERNING, progress=away
    ).fit()
    assert outcome.steps == 24 and outcome.notes == ()
    found = sound(where)
    assert found.counts["epoch"] == 5 and found.signed == found.size
    with Ledger.open(where, key) as ledger:
        assert SpendLedger(ledger).total("clinical", delta=1e-5).spent == pytest.approx(outcome.total["clinical"])


def test_a_server_that_stays_away_stops_the_run_and_loses_nothing(tmp_path: Path, server: postgres.Server) -> None:
    where, key = server.database("run_away"), PrivateKey.generate()
    problem.trainer(tmp_path / "x", ledger=where, ledger_key=key, governing_key=GOVERNING).ledger.close()

    away = During({8: lambda: server.stop("immediate")})
    with Ledger.open(where, key, patience=0.3) as ledger, raises_code("store.server-lost"):
        problem.trainer(tmp_path / "a", ledger=ledger, progress=away).fit()
    server.start()
    outcome = problem.trainer(tmp_path / "a", ledger=where, ledger_key=key, governing_key=GOVERNING).fit()
    assert outcome.steps == 24 and outcome.notes == ()
    assert outcome.total == outcome.epsilon
    assert sound(where).counts["epoch"] == 5


# ---------------------------------------------------------------------------------------- out of a run


@pytest.mark.parametrize("how", ["gone", "changed", "expired"])
def test_a_bound_that_a_run_has_charged_goes_on_being_charged(tmp_path: Path, how: str) -> None:
    """Whoever reads the ledger cannot tell that they stayed away from the steps that follow."""
    ward = hospital.usual(tmp_path / "h")
    expires = {"expires": hospital.NOW + 100} if how == "expired" else {}
    ward.sign({"c05": "clinical"}, noise_multiplier=3.0, **expires)

    with pytest.raises(Killed):
        ward.trainer(progress=During({5: die})).fit()
    if how == "gone":
        shutil.rmtree(ward.people / "c05")
    elif how == "changed":
        ward.write("c05", 99)
    else:
        ward.clock.now = hospital.NOW + 100
    outcome = ward.trainer().fit()
    assert told(outcome, "not admitted now")
    where = ward.root / "runs" / "ward-7.ledger.db"
    sound(where)
    charged = [any(a.noise_multiplier == 3_000_000 for a in epoch.accounts) for epoch in epochs(where)]
    assert charged[:2] == [True, True] and set(charged[2:]) == {how != "expired"}
    with ward.ledger(where) as ledger:
        for leaf in list(ledger.of_kind(ContributionRecord)):
            assert isinstance(leaf.record, ContributionRecord)
            if leaf.record.terms.noise_multiplier == 3_000_000 and how != "expired":
                withdraw(ledger, str(leaf.seq), WithdrawalReason.DATA)
    ward.trainer().fit()  # only read
    sound(where)


def test_a_withdrawal_may_name_a_segment_that_is_not_open_yet_or_is_given_up(ward: hospital.Hospital) -> None:
    def name(ledger: Ledger, digest: str) -> None:
        run = bytes.fromhex(run_id(ward.root / "runs" / "a"))
        with raises_code("ledger.segment-already-open"):
            withdraw(ledger, digest, WithdrawalReason.REQUEST, run=run, segment=1)
        withdraw(ledger, digest, WithdrawalReason.REQUEST, effect=WithdrawalEffect.ABANDON, run=run, segment=1)

    trainer, _ = stopped(ward, 5, name)
    trainer.fit()
    assert [s.outcome for e in epochs(ward.root / "l.db") for s in e.segments].count(SegmentOutcome.ABANDONED) == 1
    sound(ward.root / "l.db")


def test_data_that_nobody_signed_for_does_not_join_those_that_are_signed(ward: hospital.Hospital) -> None:
    """Nobody could tell whether one of them has withdrawn."""
    ward.admit(ledger=ward.root / "l.db")
    unsigned = lamina.Corpus.of_folder(ward.people, policy=ward.policy, cls="clinical")
    with raises_code("train.contributions-not-signed"):
        ward.trainer(corpus=unsigned, ledger=ward.root / "l.db").fit()
    assert not has_begun(ward.root / "runs" / "a")


def test_a_ledger_that_is_not_where_it_was_is_not_begun_anew(tmp_path: Path) -> None:
    killed(tmp_path / "runs" / "a", 8)
    (tmp_path / "else").mkdir()
    (tmp_path / "runs" / "a").rename(tmp_path / "else" / "a")  # the link leads nowhere
    with raises_code("train.ledger-missing"):
        problem.trainer(tmp_path / "else" / "a").fit()
    assert [path.name for path in (tmp_path / "else").iterdir()] == ["a"]
    problem.trainer(tmp_path / "else" / "a", ledger=tmp_path / "runs" / "tests.ledger.db").fit()
    sound(tmp_path / "runs" / "tests.ledger.db")


def test_a_restored_ledger_takes_up_a_run_whose_neighbour_is_gone_and_whose_plan_changed(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "x", bounds=LOOSE).fit()
    killed(tmp_path / "y", 8, bounds=LOOSE)
    model = problem.net()
    new = problem.plan(model, steps=20, batch=40)

    with pytest.raises(Killed):
        problem.trainer(tmp_path / "y", model=model, plan=new, bounds=LOOSE, progress=During({12: die})).fit()
    lose_ledger(tmp_path)
    shutil.rmtree(tmp_path / "x")
    with raises_code("train.ledger-differs"):  # a new one, which would forget what was spent
        problem.trainer(tmp_path / "y", plan=new, bounds=LOOSE, ledger=tmp_path / "tests.ledger.db").fit()
    complete(tmp_path / "tests.ledger.db", tmp_path / "y")
    problem.trainer(tmp_path / "y", plan=new, bounds=LOOSE).fit()
    sound(tmp_path / "tests.ledger.db")
    agrees(tmp_path / "y")


def test_a_run_says_that_it_changed_the_policy(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a", steps=4, plan=problem.plan(problem.net(), 4)).fit()
    more = problem.POLICY + "[class.new]\nepsilon = 1.0\npopulation = 9\n"
    trainer = problem.trainer(
        tmp_path / "a", steps=4, plan=problem.plan(problem.net(), 4), corpus=problem.corpus(policy=more)
    )
    assert any("policy in force" in note for note in trainer.fit().notes)
    with LedgerReader.read_only(tmp_path / "tests.ledger.db") as view:
        assert sum(1 for _ in view.of_kind(PolicyChange)) == 1
