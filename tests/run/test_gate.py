"""`lamina.Gate.admit`: only what was signed is in the corpus, as it was signed, and nothing else is ever read."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hospital import NOW, POLICY, Hospital, net, npz, usual
from memory_register import MemoryRegister
from refusals import raises_code

import lamina
from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.admit import reasons
from lamina.admit.contribution_sources import Contribution
from lamina.admit.register import EntryContext, RefusedRows
from lamina.admit.rows import Admitted
from lamina.admit.signing import SECONDS_PER_YEAR
from lamina.ledger.admission_batch import LedgerRegister
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.governance_records import Header, KeyEvents
from lamina.ledger.governance_records import WithdrawalReason as WithdrawnFor
from lamina.ledger.records import ContributionRecord
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import Ledger
from lamina.plan.charges import SignedAccount
from lamina.run import payloads
from lamina.run.payloads import PayloadChanged
from lamina.run.sampler import Sampler


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return usual(tmp_path)


def refused(corpus: lamina.Corpus) -> dict[str, str]:
    assert corpus.admission is not None
    return {each.id: each.reason.word for each in corpus.admission.refused}


# ------------------------------------------------------------------------------------------------ who is in


def test_everybody_who_signed_is_in_with_the_class_that_they_signed(hospital: Hospital) -> None:
    corpus = hospital.admit()
    assert len(corpus) == 57
    assert not corpus.admission.refused
    for name, letter, count in (("open", "o", 12), ("clinical", "c", 30), ("sensitive", "s", 15)):
        rows = corpus.members(name)
        assert [corpus.ids[row][0] for row in rows.tolist()] == [letter] * count
    x, y = corpus.source.fetch(np.arange(len(corpus.source)))
    assert x.shape == (114, 6) and y.shape == (114,)
    with np.load(hospital.people / "c00" / "payload.npz") as first:
        assert torch.equal(x[:2], torch.from_numpy(first["x"]))  # sorted by id
    assert corpus.origin == "ward-7"


def test_who_is_refused_is_not_in_and_stops_nobody(hospital: Hospital) -> None:
    (hospital.people / "c00" / "attestation.cose").unlink()
    hospital.write("c01", 99)  # other data than was signed
    hospital.sign({"c02": "clinical"}, key=lamina.PrivateKey.generate())
    hospital.sign({"c03": "clinical"}, not_before=NOW - 9, expires=NOW - 1, now=NOW - 9)
    shutil.copytree(hospital.people / "s00", hospital.people / "t00")
    corpus = hospital.admit()
    assert refused(corpus) == {
        "c00": "no-attestation",
        "c01": "payload-mismatch",
        "c02": "unknown-key",
        "c03": "expired",
        "t00": "replayed",
    }
    assert len(corpus) == 53
    assert not {"c00", "c01", "c02", "c03", "t00"} & set(corpus.ids)
    drawn = {tuple(row) for row in corpus.source.fetch(np.arange(len(corpus.source)))[0].tolist()}
    with np.load(hospital.people / "c01" / "payload.npz") as other:
        assert not drawn & {tuple(row) for row in other["x"].tolist()}


def test_a_corpus_says_neither_who_nor_how_many(hospital: Hospital) -> None:
    corpus = hospital.admit()
    for told in (repr(corpus), repr(corpus.source), str(corpus)):
        text = told.replace(str(hospital.people), "")  # the path may hold any digits
        assert not any(one in text for one in corpus.ids)
        assert "57" not in text and "114" not in text


def test_contributions_in_memory_are_admitted_alike(hospital: Hospital) -> None:
    there, here = hospital.admit(), hospital.gate().admit(iter(hospital.contributions()))
    assert list(here.ids) == list(there.ids)
    rows = np.arange(len(there.source))
    for one, other in zip(there.source.fetch(rows), here.source.fetch(rows), strict=True):
        assert torch.equal(one, other)
    assert here.membership(b"k") == there.membership(b"k")  # a run may be resumed with either
    assert here.digest(b"k") == there.digest(b"k")
    assert np.array_equal(here.admission.bound, there.admission.bound)
    given = hospital.contributions()
    given[3] = Contribution(given[3].id, given[3].descriptor, given[3].attestation, npz(x=np.zeros((2, 6))))
    assert refused(hospital.gate().admit(given)) == {given[3].id: "payload-mismatch"}


def test_a_register_takes_everybody_once(hospital: Hospital) -> None:
    register = MemoryRegister()
    for _ in range(2):
        assert len(hospital.gate().admit(hospital.people, register)) == 57
    assert register.members("clinical") == 30
    hospital.sign({"c00": "clinical"}, not_before=NOW - 1)  # signed anew: a new descriptor, nonce and token
    assert len(hospital.gate().admit(hospital.people, register)) == 57
    assert register.members("clinical") == 31


# ------------------------------------------------------------------------------------------------ ledgers


def test_a_ledger_is_made_and_everybody_is_in_it_once(hospital: Hospital, tmp_path: Path) -> None:
    where = tmp_path / "ward-7.ledger.db"
    first = hospital.gate().admit(hospital.people, ledger=where)
    with Ledger.open(where, clock=hospital.clock) as ledger:
        size = ledger.size
        kinds = Counter(leaf.kind for leaf in ledger.leaves())
    assert kinds == {Header: 1, KeyEvents: 1, ContributionRecord: 57}
    again = hospital.gate().admit(hospital.people, ledger=str(where))
    assert list(again.ids) == list(first.ids) and not again.admission.refused
    assert again.membership(b"k") == first.membership(b"k")
    found = verify(where)
    assert found.verified and found.size == found.signed == size
    assert (tmp_path / "ward-7.ledger.pem").stat().st_mode & 0o777 == 0o600
    gate = hospital.gate()
    with Ledger.open(where, clock=hospital.clock) as ledger:
        assert len(gate.admit(hospital.people, ledger)) == 57
        assert ledger.size == size  # and it is still open
    assert gate.register is None


def test_who_was_withdrawn_is_refused_and_the_rest_is_in(hospital: Hospital, tmp_path: Path) -> None:
    where = tmp_path / "ledger.db"
    corpus = hospital.gate().admit(hospital.people, ledger=where)
    row = corpus.admission.row_of("c07")
    assert row is not None
    with Ledger.open(where, clock=hospital.clock) as ledger:
        withdraw(ledger, corpus.admission[row].descriptor.hex(), WithdrawnFor.CONSENT)
    later = hospital.gate().admit(hospital.people, ledger=where)
    assert refused(later) == {"c07": "withdrawn"} and len(later) == 56
    assert "withdrawn" in later.admission.table()
    with raises_code("corpus.contributions-refused"):
        hospital.gate().admit(hospital.people, ledger=where, on_refusal="stop")


def test_stop_enters_nobody(hospital: Hospital, tmp_path: Path) -> None:
    (hospital.people / "c00" / "attestation.cose").unlink()
    with raises_code("corpus.contributions-refused"):
        hospital.gate().admit(hospital.people, ledger=tmp_path / "ledger.db", on_refusal="stop")
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        assert ledger.size == 1


def test_whose_data_cannot_be_opened_is_not_entered(hospital: Hospital, tmp_path: Path) -> None:
    hospital.write("c05", 5, width=7)
    hospital.sign({"c05": "clinical"})
    corpus = hospital.gate().admit(hospital.people, ledger=tmp_path / "ledger.db")
    assert refused(corpus) == {"c05": "unreadable"}
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        assert sum(leaf.kind is ContributionRecord for leaf in ledger.leaves()) == 56


def test_a_ledger_of_another_corpus_or_a_promise_that_is_broken(hospital: Hospital, tmp_path: Path) -> None:
    where = tmp_path / "ledger.db"
    hospital.gate().admit(hospital.people, ledger=where)
    for change, words in (
        (("ward-7", "ward-8"), "ledger.wrong-origin"),
        (("epsilon = 4.0", "epsilon = 5.0"), "ledger.policy-loosened"),
    ):
        other = lamina.Policy.parse(POLICY.replace(*change))
        with raises_code(words):
            lamina.Gate(other, hospital.keys, clock=hospital.clock).admit(hospital.people, ledger=where)


def test_an_admission_is_entered_into_the_ledger_of_a_run_too(hospital: Hospital, tmp_path: Path) -> None:
    corpus = hospital.gate().admit(hospital.people, ledger=tmp_path / "gate.db")
    contract = CorpusTerms.of_policy(hospital.policy)
    with open_or_create(tmp_path / "run.db", contract, clock=hospital.clock) as ledger:
        assert corpus.admission.enter_into(LedgerRegister(ledger)) == {}
        size = ledger.size
        withdraw(ledger, corpus.admission[3].descriptor.hex(), WithdrawnFor.REQUEST)
        assert corpus.admission.enter_into(LedgerRegister(ledger)) == {3: (reasons.WITHDRAWN, "")}
        assert ledger.size == size + 1
        assert len(corpus.admission) == 57  # the corpus still has its rows


def test_stop_and_nobody(hospital: Hospital, tmp_path: Path) -> None:
    (hospital.people / "c00" / "attestation.cose").unlink()
    with raises_code("corpus.contributions-refused") as caught:
        hospital.admit(on_refusal="stop")
    assert "lamina admit" in caught.value.remedy
    with raises_code("corpus.on-refusal-unknown"):
        hospital.admit(on_refusal="ask")
    nobody = Hospital(tmp_path / "else")
    nobody.trust(lamina.PrivateKey.generate())
    with raises_code("corpus.nobody-admitted"):
        nobody.gate().admit(hospital.people)
    with raises_code("corpus.policy-not-a-policy"):
        lamina.Gate("policy.toml", hospital.keys)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ contributions.csv


def listing(hospital: Hospital, columns: str, *lines: str) -> None:
    (hospital.people / "contributions.csv").write_text("\n".join([columns, *lines]) + "\n")


def test_labels_may_stand_in_a_list_and_another_class_may_not(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path)
    hospital.trust()
    for i in range(6):
        hospital.write(f"p{i}", i, label=False)
    hospital.sign({f"p{i}": "clinical" for i in range(6)})
    rows = [f"p{i},{'clinical' if i != 4 else 'open'},{i % 2}" for i in range(5)]
    listing(hospital, "id,class,y", *rows, "nobody,clinical,1")
    corpus = hospital.admit()
    assert refused(corpus) == {"p4": "mismatch", "p5": "unreadable"}
    details = {each.id: each.detail for each in corpus.admission.refused}
    assert details == {
        "p4": "contributions.csv says class 'open', 'clinical' was signed",
        "p5": "contributions.csv does not list it",
    }
    assert corpus.source.fetch(np.arange(8))[1].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_subject_in_the_list_is_in_one_contribution(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path)
    hospital.trust()
    for i in range(3):
        hospital.write(f"p{i}", i)
    hospital.sign({f"p{i}": "clinical" for i in range(3)})
    listing(hospital, "id,subject", "p0,ann", "p1,bob", "p2,ann")
    with raises_code("corpus.subject-repeated"):
        hospital.admit()


# ------------------------------------------------------------------------------------------------ what can be opened


def test_what_cannot_be_opened_is_refused_and_stops_nobody(hospital: Hospital) -> None:
    bad = {"c00": b"not an archive", "c01": npz(y=np.zeros(2)), "c02": npz(x=np.zeros((2, 6)), y=np.zeros(3))}
    for name, data in bad.items():
        (hospital.people / name / "payload.npz").write_bytes(data)
    (hospital.people / "c03" / "payload.npz").rename(hospital.people / "c03" / "payload.wfdb")
    hospital.write("c04", 4, width=5)
    hospital.write("c05", 5, label=False)
    wrong = dict.fromkeys(("c02", "c03", "c04", "c05"), "clinical")
    hospital.sign(wrong)
    signed_anyway(hospital, "c00", "c01")
    corpus = hospital.admit()
    assert refused(corpus) == dict.fromkeys(sorted([*wrong, "c00", "c01"]), "unreadable")
    details = {each.id: each.detail for each in corpus.admission.refused}
    assert "cannot be read as .npz" in details["c00"]
    assert "no array 'x'" in details["c01"]
    assert "2 examples in x and y of shape (3,)" in details["c02"]
    assert "no payload" in details["c03"]
    assert details["c04"].startswith("it has x (5,) torch.float32") and "the others have x (6,)" in details["c04"]
    assert "no y" in details["c05"]
    assert len(corpus) == 51
    corpus.source.fetch(np.arange(len(corpus.source)))


def signed_anyway(hospital: Hospital, *names: str, items: int = 2) -> None:
    """With somebody else's program: ours would not sign what it cannot read."""
    from lamina.admit.attestation import attest, commit
    from lamina.admit.terms import SigningTerms

    terms = SigningTerms.make(hospital.policy, "clinical", not_before=NOW, expires=NOW + SECONDS_PER_YEAR)
    for name in names:
        folder, nonce = hospital.people / name, os.urandom(16)
        descriptor = terms.descriptor(
            contributor=hospital.key.public.id,
            nonce=nonce,
            commitment=commit(nonce, folder / "payload.npz"),
            items=items,
        )
        (folder / "descriptor.cbor").write_bytes(descriptor.encode())
        (folder / "attestation.cose").write_bytes(attest(descriptor, hospital.key, issued_at=NOW))


def test_as_many_items_as_were_signed(hospital: Hospital) -> None:
    signed_anyway(hospital, "c07", items=3)
    corpus = hospital.admit()
    assert refused(corpus) == {"c07": "mismatch"}
    assert corpus.admission.refused[0].detail == "3 items were signed, the payload has 2"


def test_the_number_of_processes_changes_nothing(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    hospital.write("c04", 4, width=5)
    hospital.sign({"c04": "clinical"})
    signed_anyway(hospital, "s07", items=3)
    (hospital.people / "s09" / "attestation.cose").unlink()
    alone = hospital.admit()
    monkeypatch.setattr(payloads, "MIN_PAYLOADS_PER_PROCESS", 8)
    corpus = hospital.gate(processes=3).admit(hospital.people)
    assert corpus.admission.to_dict() == alone.admission.to_dict()
    assert len(corpus.admission.refused) == 3
    assert corpus.digest(b"k") == alone.digest(b"k")


def test_one_contribution_does_not_decide_which_form_is_right(tmp_path: Path) -> None:
    """Otherwise adding a person could exclude all others."""
    hospital = Hospital(tmp_path)
    hospital.trust()
    for i in range(5):
        hospital.write(f"p{i}", i, width=6 if i < 3 else 5)
    hospital.sign({f"p{i}": "clinical" for i in range(5)})
    with raises_code("corpus.formats-tied"):
        hospital.admit()
    hospital.write("p5", 5)
    hospital.sign({"p5": "clinical"})
    assert refused(hospital.admit()) == {"p3": "unreadable", "p4": "unreadable"}


def test_tables_of_other_columns_are_refused(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path)
    hospital.trust()
    for i, header in enumerate(["a,b"] * 4 + ["b,a"]):
        (hospital.people / f"p{i}").mkdir(parents=True)
        (hospital.people / f"p{i}" / "payload.csv").write_text(f"{header}\n1,2\n3,{i}\n")
    hospital.sign({f"p{i}": "clinical" for i in range(5)})
    corpus = hospital.admit()
    assert refused(corpus) == {"p4": "unreadable"}
    x, y = corpus.source.fetch(np.arange(4))
    assert x[:, 1, 1].tolist() == [0, 1, 2, 3] and y is None


# ------------------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("how", ["other data", "a link", "gone", "one byte"])
def test_a_payload_that_was_swapped_after_admission_is_never_learned_from(
    hospital: Hospital, how: str, tmp_path: Path
) -> None:
    corpus = hospital.admit()
    path = hospital.people / "c05" / "payload.npz"
    held = path.read_bytes()
    if how == "other data":
        hospital.write("c05", 1234)
    elif how == "a link":
        (tmp_path / "copy.npz").write_bytes(held)
        path.unlink()
        path.symlink_to(tmp_path / "copy.npz")
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(held[:200] + bytes([held[200] ^ 1]) + held[201:])
    row = list(corpus.ids).index("c05")
    others = np.setdiff1d(np.arange(len(corpus.source)), [2 * row, 2 * row + 1])
    corpus.source.fetch(others)
    with pytest.raises(PayloadChanged) as caught:
        corpus.source.fetch(np.array([0, 2 * row]))
    assert "c05" not in str(caught.value) and "not the one that was signed" in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_what_was_read_and_checked_once_may_be_kept(hospital: Hospital) -> None:
    corpus = hospital.admit()
    first = corpus.source.fetch(np.array([0, 1]))[0].clone()
    hospital.write("c00", 77)
    assert torch.equal(corpus.source.fetch(np.array([0, 1]))[0], first)  # the bytes that were signed, not the file's


def test_the_digest_of_the_data_is_over_what_was_signed(hospital: Hospital) -> None:
    before = hospital.admit()
    again = hospital.admit()
    assert before.digest(b"k") == again.digest(b"k") != before.digest(b"l")
    hospital.sign({"c00": "clinical"})  # a new nonce, a new identity
    other = hospital.admit()
    assert other.digest(b"k") != before.digest(b"k")
    assert other.membership(b"k") != before.membership(b"k")


# ------------------------------------------------------------------------------------------------ what was signed


@pytest.fixture
def strict(hospital: Hospital) -> Hospital:
    """Five clinical patients sign more noise, three a smaller clip norm, one of them both."""
    hospital.sign({f"c{i:02d}": "clinical" for i in range(5)}, noise_multiplier=3.0)
    hospital.sign({f"c{i:02d}": "clinical" for i in (5, 6)}, clip_norm=0.25)
    hospital.sign({"c07": "clinical"}, clip_norm=0.25, noise_multiplier=3.0)
    return hospital


def test_batches_carry_the_limits_of_those_who_are_in_them(strict: Hospital) -> None:
    corpus, model = strict.admit(), net()
    plan = strict.plan(model)
    limits = {}
    k = plan.index("clinical")
    norm = plan.norm(k)
    sampler = Sampler(corpus, plan, seed=bytes(32))
    for step in range(plan.steps):
        batch = sampler.draw(step)
        assert batch.scale is not None and batch.ceiling is not None and batch.cls is not None
        for cls, scale, ceiling in zip(batch.cls.tolist(), batch.scale.tolist(), batch.ceiling.tolist(), strict=True):
            limits.setdefault(plan.classes[cls].name, set()).add((round(scale, 6), ceiling))
    assert limits["open"] == {(1.0, float("inf"))}
    assert limits["sensitive"] == {(1.0, 1.0)}  # what the class asks for
    found = limits["clinical"]
    assert {ceiling for _, ceiling in found} == {1.0, 0.25}
    by_clip = round(0.25 / norm, 6)
    assert (by_clip, 0.25) in found
    (by_noise,) = [scale for scale, ceiling in found if ceiling == 1.0 and scale < 0.99]
    # An accountant of its own, asked by hand: what is spent is what was signed, and not much less.
    events = plan.schedule("clinical", scale=by_noise)
    spent, signed = find_accountant("pld").epsilon(events, 1e-5), epsilon_of_noise_multiplier(3.0, 1e-5)
    assert 0.999 * signed < spent <= signed


def test_who_signed_what_the_class_asks_for_is_not_scaled(hospital: Hospital) -> None:
    plan = hospital.plan(net())
    found = Sampler(hospital.admit(), plan, seed=bytes(32)).draw(0)
    assert len(found)
    assert found.scale is None or bool((found.scale > 1 - 1e-12).all())


def test_a_bound_that_no_scale_keeps_is_never_sampled(hospital: Hospital) -> None:
    """Noised counts cost by themselves; whoever signed for less stays out, and the others do not notice."""
    hospital.sign({"s00": "sensitive", "s01": "sensitive"}, noise_multiplier=400.0)
    corpus, model = hospital.admit(), net()
    stack = lamina.LayerStack.from_model(model)
    plan = lamina.make_plan(stack, hospital.policy, batch=30, steps=12, allocate="quantile")
    assert corpus.count_unsampled(plan) == 2
    rows = corpus.members_of(plan)[plan.index("sensitive")]
    assert [corpus.ids[row] for row in rows.tolist()] == [f"s{i:02d}" for i in range(2, 15)]
    names = {each.name for each in corpus.accounts(plan)}
    assert not any("z=400" in name for name in names)
    outcome = hospital.trainer(corpus=corpus, model=model, plan=plan).fit()
    assert any(note.startswith("2 admitted contributions are not sampled") for note in outcome.notes)


def test_a_bound_that_nobody_signed_has_no_account(hospital: Hospital) -> None:
    made = SignedAccount(name="clinical@c=1,z=9", cls="clinical", scale=0.1, epsilon=1.0)
    with raises_code("train.account-not-signed"):
        hospital.trainer("a", accounts=[made])


def test_one_account_per_distinct_bound_and_a_second_run_is_refused_by_name(strict: Hospital) -> None:
    first, second = {"clinical": 3.0, "sensitive": 1.5}, {"clinical": 1.0, "sensitive": 0.3}
    trainer = strict.trainer("first", plan=strict.plan(net(), epsilon=first))
    accounts = {each.name: each for each in trainer.accounts}
    assert {name.split(",")[0] for name in accounts} == {"clinical@c=1", "clinical@c=0.25", "sensitive@c=1"}
    assert len(accounts) == 5  # of the class, stricter noise, stricter norm, both; and of the sensitive
    strictest = accounts["clinical@c=1,z=3"]
    assert strictest.epsilon == pytest.approx(epsilon_of_noise_multiplier(3.0, 1e-5), rel=1e-12)
    assert 0 < strictest.scale < 1
    outcome = trainer.fit()
    assert outcome.epsilon["clinical"] <= 3.0
    bounds = strict.figures("first")["bounds"]
    assert bounds.keys() == accounts.keys()
    for name, row in bounds.items():
        assert row["epsilon"] <= row["signed"] == pytest.approx(accounts[name].epsilon)
    # The classes have something left. Those who signed for less have nothing left.
    assert bounds["clinical@c=1,z=3"]["epsilon"] == pytest.approx(strictest.epsilon, rel=1e-3)
    with raises_code("spend.budget-exceeded") as caught:
        strict.trainer("second", plan=strict.plan(net(), epsilon=second)).fit()
    assert "leave out those who signed this bound" in caught.value.remedy
    for one in (0, 1, 2, 3, 4, 7):
        shutil.rmtree(strict.people / f"c{one:02d}")
    assert strict.trainer("third", plan=strict.plan(net(), epsilon=second)).fit().steps == 12


# ------------------------------------------------------------------------------------------------ later


def test_windows_and_keys_are_looked_at_again(hospital: Hospital) -> None:
    other = lamina.PrivateKey.generate()
    hospital.trust(other)
    hospital.sign({"c00": "clinical", "c01": "clinical"}, expires=NOW + 100)
    hospital.sign({"s00": "sensitive"}, key=other)
    corpus = hospital.admit()
    assert corpus.revalidate() == {}
    hospital.clock.now = NOW + 100
    assert corpus.revalidate() == {reasons.EXPIRED: 2}
    assert corpus.revalidate() == {}  # told once
    assert len(corpus) == 55 and corpus.revision == 2
    with lamina.KeyRing.editing(hospital.keys) as ring:
        ring.revoke(other.public.id, at=NOW + 150)
    assert corpus.revalidate() == {}  # not yet
    hospital.clock.now = NOW + 150
    assert corpus.revalidate() == {reasons.REVOKED_KEY: 1}
    assert len(corpus) == 54


def test_a_ring_in_memory_is_asked_as_it_is(hospital: Hospital) -> None:
    ring = lamina.KeyRing.load(hospital.keys)
    corpus = lamina.Gate(hospital.policy, ring, clock=hospital.clock).admit(hospital.people)
    ring.revoke(hospital.key.public.id, at=NOW)
    assert corpus.revalidate() == {reasons.REVOKED_KEY: 57}


def test_after_an_epoch_signatures_are_verified_again(hospital: Hospital) -> None:
    corpus = hospital.admit()
    (hospital.people / "c00" / "attestation.cose").unlink()
    shutil.rmtree(hospital.people / "c01")
    hospital.write("c02", 222)
    hospital.clock.now = NOW + hospital.policy.corpus.epoch - 1
    assert corpus.revalidate() == {}  # within the epoch the gate relies on what it verified
    hospital.clock.now = NOW + hospital.policy.corpus.epoch
    assert corpus.revalidate() == {reasons.NO_ATTESTATION: 1, reasons.GONE: 1, reasons.PAYLOAD_MISMATCH: 1}
    assert len(corpus) == 54


def test_a_loop_of_ones_own_looks_again_at_each_pass(hospital: Hospital) -> None:
    hospital.sign({f"s{i:02d}": "sensitive" for i in range(15)}, expires=NOW + 100)
    corpus, plan = hospital.admit(), hospital.plan(net(), steps=40)
    k = plan.index("sensitive")
    length = round(1 / max(entry.sampling_rate for entry in plan.classes))
    seen = []
    for step, batch in enumerate(corpus.batches(plan)):
        if step == 10:
            hospital.clock.now = NOW + 100
        assert batch.cls is not None
        seen.append(int((batch.cls == k).sum()))
    assert len(seen) == plan.steps
    assert sum(seen[:10]) > 0 and sum(seen[10 + length :]) == 0


def test_occurrences_are_counted_over_all_passes(hospital: Hospital) -> None:
    corpus, plan = hospital.admit(), hospital.plan(net(), steps=60)
    k = plan.index("sensitive")
    used = sum(
        int((batch.cls == k).sum())  # type: ignore[operator]
        for batch in corpus.batches(plan, max_occurrences={"sensitive": 2})
    )
    assert 15 < used <= 30


def test_who_was_admitted_elsewhere_meanwhile_is_left_out_and_the_rest_is_in(hospital: Hospital) -> None:
    """Another gate admits the first of them between our question and our entry."""

    class Raced(MemoryRegister):
        raced = False

        def enter(self, entries: Iterable[Admitted], beside: EntryContext) -> RefusedRows:
            first, *rest = entries
            if not self.raced:
                self.raced = True
                super().enter([first._replace(attestation=bytes(32))], beside)
            return super().enter([first, *rest], beside)

    corpus, everybody = hospital.gate().admit(hospital.people, Raced()), hospital.admit()
    assert len(corpus) == len(everybody) - 1
    assert [each.reason for each in corpus.admission.refused] == [reasons.REPLAYED]
    assert len(corpus.source) == len(everybody.source) - 2  # two windows each
    corpus.source.fetch(np.arange(len(corpus.source)))


def test_a_turn_goes_with_what_was_signed_and_not_with_the_name_of_a_folder(hospital: Hospital) -> None:
    """Admitted again under another name, somebody keeps the turn that their noise was correlated for."""
    before = hospital.admit()
    turns = dict(zip(before.digests, before.turns(5).tolist(), strict=True))
    first = sorted(hospital.people.iterdir())[0]
    first.rename(first.with_name("zz-renamed"))
    after = hospital.admit()
    assert dict(zip(after.digests, after.turns(5).tolist(), strict=True)) == turns and len(set(turns.values())) > 1
