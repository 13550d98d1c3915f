"""Verification: what is good is found good, whatever is changed is found, and every spend is computed anew."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import dp_accounting
import pytest
from build import (
    ALICE,
    BOB,
    FLOORS,
    HOUR,
    OPEN,
    PRESETS,
    RUNS,
    STRICT,
    USUAL,
    YEAR,
    Story,
    begin,
    build,
    contribution,
    plan,
    policy_digest,
    segment,
)
from build import header as full
from forge import appended, leaf, replacing, rewritten, sql
from hypothesis import given, settings
from hypothesis import strategies as st
from making import AUDITOR, GOVERNING, LEDGER, ORIGIN, OTHER, SECOND, START, WITNESS, Clock, admitted, attestation
from making import create as create_plain
from refusals import raises_code

from lamina.account.accountants import pooled_epsilon
from lamina.account.schedule import RDP_ORDERS, Event
from lamina.errors import LaminaError, family_of
from lamina.ledger import records as leaves
from lamina.ledger import signed_checkpoint
from lamina.ledger.contribution_columns import ContributionColumns, other_kinds, read_columns
from lamina.ledger.governance_records import (
    ClassBounds,
    Key,
    KeyChange,
    KeyEvent,
    PolicyChange,
    Role,
    Withdrawal,
    WithdrawalReason,
)
from lamina.ledger.key_state import KeyState, PolicyInForce
from lamina.ledger.records import (
    ContributionRecord,
    ContributionTerms,
    Epoch,
    EpochAccount,
    KeptContribution,
    SegmentOutcome,
)
from lamina.ledger.retention import Retention
from lamina.ledger.schema import nano_epsilon
from lamina.ledger.spending import Spending, planned_charges, signed_spend, whole_plan_charges
from lamina.ledger.store.rows import LeafBlock, StoredLeaf
from lamina.ledger.verify.contribution_checks import AdmittedMembers, AttestationChecks, ContributionChecks
from lamina.ledger.verify.tree_checks import AggregateTallies, Finding, KnownCheckpoint, Trust, VerificationStopped
from lamina.ledger.verify.verifier import verify
from lamina.plan.rules import FollowBudget, FollowEnergy, Injection, InjectionForm
from lamina.plan.step_plan import StepPlan
from lamina.sign.key_ring import KeyRing
from lamina.sign.notes import NoteKey

MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),), plain=(GOVERNING.public,))


def finding(where: str | Path, **options: Any) -> Finding:
    found = verify(where, **options)
    assert found.problem is not None
    return found.problem


# ------------------------------------------------------------------------------ good ledgers


def test_a_good_ledger_in_every_kind_of_store(where: str) -> None:
    story = build(where)
    found = verify(where, trust=MINE, seen=story.signed)
    assert found.problem is None
    assert found.trusted
    assert found.root == story.ledger.root
    assert found.counts == {
        "header": 1, "contribution": 43, "epoch": 3, "withdrawal": 1, "key": 5, "aggregate": 1, "policy": 1,
        "release": 1, "terms": 0, "run-begin": 0, "run-end": 0, "pruned": 37,
    }  # fmt: skip
    assert (found.attestations, found.spends, found.signed) == (6, 6, 56)
    assert verify(story.ledger.store).verified  # an open store, while it is in use
    story.ledger.close()


def test_the_answer_for_machines(tmp_path: Path) -> None:
    build(str(tmp_path / "a.db")).ledger.close()
    found = verify(tmp_path / "a.db").to_dict()
    assert {"verified", "trusted", "size", "root", "problem"} <= found.keys()
    assert (found["verified"], found["trusted"], found["problem"], found["size"]) == (True, False, None, 56)
    sql(str(tmp_path / "a.db"), "DELETE FROM leaf WHERE seq = 47")
    found = verify(tmp_path / "a.db").to_dict()
    assert (found["verified"], found["trusted"]) == (False, False)
    assert found["problem"].keys() == {"index", "kind", "code", "family", "reason"}
    assert found["problem"]["family"] == family_of(found["problem"]["code"])
    assert found["problem"]["index"] == 47


def test_leaves_that_nobody_signed_yet(tmp_path: Path) -> None:
    story = begin(str(tmp_path / "a.db"))
    story.sign()
    story.admit([contribution(1)])
    found = verify(tmp_path / "a.db")
    assert found.verified
    assert (found.size, found.signed) == (5, 4)
    assert any("[4, 5) are not signed" in note for note in found.notes)
    trusting = finding(tmp_path / "a.db", trust=MINE)
    assert (trusting.index, trusting.kind) == (4, "trust")
    story.sign()
    assert verify(tmp_path / "a.db", trust=MINE).trusted


def test_a_new_ledger(tmp_path: Path) -> None:
    create_plain(str(tmp_path / "a.db")).close()
    found = verify(tmp_path / "a.db", trust=MINE)
    assert found.trusted
    assert found.size == 1


def test_what_is_no_ledger(tmp_path: Path) -> None:
    with raises_code("store.no-ledger"):
        verify(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("not a database, and long enough to be looked at" * 100)
    assert finding(tmp_path / "text.db").kind == "store"


def test_a_ledger_of_many_leaves_is_pruned(tmp_path: Path) -> None:
    """Bodies go at every place of the tree; leaves, tiles and checkpoints are still held against each other."""
    path = str(tmp_path / "a.db")
    clock = Clock()
    with create_plain(path, clock) as ledger:
        signed = [ledger.checkpoint()]
        for first, stop in ((1, 300), (300, 1100), (1100, 1153)):
            ledger.append([admitted(n) for n in range(first, stop)], [attestation(n) for n in range(first, stop)])
            signed.append(ledger.checkpoint())
        ledger.append([Withdrawal(target=17, reason=WithdrawalReason.REQUEST)])
        signed.append(ledger.checkpoint())
        before = verify(path, trust=MINE, seen=signed, signatures=False)
        assert before.problem is None
        clock.now = START + 5000
        proposal = Retention(ledger).propose()
        assert proposal is not None
        Retention(ledger).prune(proposal)
        signed.append(ledger.checkpoint())
    found = verify(path, trust=MINE, seen=signed)
    assert found.problem is None
    assert found.counts["pruned"] == found.counts["contribution"] == 1152
    assert not found.trusted  # nobody but the ledger itself vouches for the attestations that are gone
    assert any("self-consistent" in note for note in found.notes)
    # Somebody shows a checkpoint of a size at which nothing was ever signed here, amid pruned leaves.
    strange = KnownCheckpoint.parse(signed[2].replace("\n1100\n", "\n700\n"))
    assert finding(path, seen=[strange]).kind == "seen"
    for level, index in ((1, 0), (0, 4)):
        ((data,),) = sql(path, "SELECT data FROM tile WHERE id = ?", (level << 56) | index)
        sql(path, "UPDATE tile SET data = ? WHERE id = ?", bytes(32) + data[32:], (level << 56) | index)
        assert not verify(path).verified
        sql(path, "UPDATE tile SET data = ? WHERE id = ?", data, (level << 56) | index)
    assert verify(path).verified
    sql(path, "DELETE FROM tile WHERE id = ?", 1 << 56)
    assert finding(path).kind == "tile"


def test_it_needs_no_torch(tmp_path: Path) -> None:
    build(str(tmp_path / "a.db")).ledger.close()
    program = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ImportError('there is no torch here')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from lamina.ledger.verify import verify\n"
        "from lamina.ledger import contribution_trace, reader, retention, show, withdrawal\n"
        f"found = verify({str(tmp_path / 'a.db')!r}, now=4_000_000_000)\n"
        "assert found.verified, found.problem\n"
        "print(found.spends)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


# ------------------------------------------------------------------------------ keys from elsewhere


def test_trusted_keys_as_files(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    build(str(path)).ledger.close()
    ring, both = KeyRing(), KeyRing()
    ring.add(LEDGER.public, label="the ledger", role="ledger")
    ring.save(tmp_path / "keys.json")
    both.add(SECOND.public, label="the owner", role="governing")
    both.save(tmp_path / "owner.json")
    both.add(LEDGER.public, label="the ledger", role="ledger")
    both.save(tmp_path / "both.json")
    (tmp_path / "keys.txt").write_text(f"# of the clinic\n{NoteKey(ORIGIN, LEDGER.public).text}\n\n")
    (tmp_path / "ledger.pub").write_bytes(LEDGER.public.pem())
    (tmp_path / "owner.pub").write_bytes(GOVERNING.public.pem())
    for name in ("owner.json", "both.json", "owner.pub"):
        assert verify(path, trust=Trust.load(tmp_path / name)).trusted, name
    for name in ("keys.json", "keys.txt", "ledger.pub"):  # of who governs it, only the ledger speaks
        report = verify(path, trust=Trust.load(tmp_path / name))
        assert report.verified and not report.trusted and any("governs" in note for note in report.notes), name
    (tmp_path / "other.txt").write_text(NoteKey(ORIGIN, OTHER.public).text)
    (tmp_path / "elsewhere.txt").write_text(NoteKey("elsewhere.example", LEDGER.public).text)
    for name in ("other.txt", "elsewhere.txt"):
        found = finding(path, trust=Trust.load(tmp_path / name))
        assert (found.index, found.kind) == (0, "trust")
    late = START + 10 * YEAR
    ring.revoke(LEDGER.public.id, at=late)
    ring.save(tmp_path / "revoked.json")
    assert verify(path, trust=Trust.load(tmp_path / "revoked.json"), now=late - 1).verified
    assert not verify(path, trust=Trust.load(tmp_path / "revoked.json"), now=late).verified
    both.revoke(SECOND.public.id, at=late)
    assert verify(path, trust=Trust(ring=both), now=late - 1).trusted
    assert not verify(path, trust=Trust(ring=both), now=late).trusted
    for pinned in (OTHER, LEDGER):
        stranger = KeyRing()
        stranger.add(pinned.public, label="the owner", role="governing")
        assert finding(path, trust=Trust(ring=stranger)).code == "verify.header-not-by-trusted-key"
    for content in (b"", b"nonsense", b"\xff\xfe", b"{}", b"-----BEGIN nonsense"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(LaminaError):
            Trust.load(tmp_path / "bad")


def test_a_ring_knows_contributors_that_the_ledger_does_not_name(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    story = begin(str(path))
    stranger = OTHER
    (seq,) = story.slip([contribution(1, stranger)])
    story.sign()
    story.ledger.close()
    assert verify(path).problem is not None
    ring = KeyRing()
    ring.add(GOVERNING.public, label="the owner", role="governing")
    trust = Trust(ring=ring)
    assert finding(path, trust=trust).code == "verify.key-unknown"
    ring.add(stranger.public, label="a stranger", role="contributor")
    assert verify(path, trust=trust).trusted
    ring.revoke(stranger.public.id, at=START)
    found = finding(path, trust=trust)
    assert (found.index, found.code) == (seq, "verify.trusted-key-unusable")


# ------------------------------------------------------------------------------ many contributions at once


def side_by_side(block: Sequence[StoredLeaf]) -> LeafBlock:
    return LeafBlock([one.leaf for one in block], [one.body for one in block])


def some_leaves(seed: int, count: int) -> list[StoredLeaf]:
    """Contributions as varied as they come: widths of numbers, terms, anchors, subjects, keys."""
    draw = random.Random(seed)
    terms = [
        USUAL, STRICT, OPEN, ContributionTerms("clinical", "ecg", 1_000_000, 1_000_000),
        ContributionTerms("clinical", "eeg", 999, 5), ContributionTerms("unheard-of", "ecg", 10**9, 10**9),
    ]  # fmt: skip
    made = []
    for at in range(count):
        begin, end = sorted(draw.sample([0, 5, 300, 70_000, START - 500, START + 500, 2**33, 10**11], 2))
        record = ContributionRecord(
            descriptor=draw.randbytes(32), attestation=draw.randbytes(32),
            key=draw.choice([ALICE, BOB, AUDITOR]).public.id, not_before=begin, expires=end,
            terms=draw.choice(terms), anchor=draw.choice([None, draw.randbytes(32)]),
            subject=draw.choice([None, draw.randbytes(32)]),
        )  # fmt: skip
        time = draw.choice([0, 23, 24, 255, 256, 65_535, 65_536, START, START + at, 2**33])
        data = leaves.encode_leaf(record, draw.choice([at, at, at, 2**40, 7]), time, draw.choice([0, 0, 24]))
        made.append(draw.choice([data, data, StoredLeaf(data.leaf, None)]))
    return made


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), few=st.integers(1, 120))
def test_columns_say_what_the_strict_reader_says(seed: int, few: int) -> None:
    block = some_leaves(seed, few)
    block *= 3  # so that there are groups
    seen: set[int] = set()
    for group in read_columns(side_by_side(block)):
        rows = group.rows if isinstance(group, ContributionColumns) else group
        assert seen.isdisjoint(rows.tolist())
        seen.update(rows.tolist())
        if not isinstance(group, ContributionColumns):
            continue
        assert group.rows.tolist() == sorted(group.rows.tolist())
        for at, row in enumerate(rows.tolist()):
            found = leaves.decode_leaf(block[row])
            record = found.record
            assert isinstance(record, ContributionRecord | KeptContribution)
            numbers = (group.seq, group.time, group.epoch, group.expires)
            assert [int(column[at]) for column in numbers] == [found.seq, found.time, found.epoch, record.expires]
            assert group.bound == record.bound
            assert int(group.descriptor[at]) == int.from_bytes(record.descriptor[:8], "little")
            assert (group.terms is None) == (group.attestation is None) == (group.not_before is None)
            assert (group.terms is None) == isinstance(record, KeptContribution)
            if (
                isinstance(record, ContributionRecord)
                and group.attestation is not None
                and group.not_before is not None
            ):
                assert group.terms == record.terms
                assert int(group.not_before[at]) == record.not_before
                assert int(group.attestation[at]) == int.from_bytes(record.attestation[:8], "little")
                assert record.key in group.kids
            assert (group.subject is None) == (record.subject is None)
            if group.subject is not None and record.subject is not None:
                assert int(group.subject[at]) == int.from_bytes(record.subject[:8], "little")
    assert seen == set(range(len(block)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), at=st.integers(0, 39), position=st.integers(0, 400), value=st.integers(0, 255))
def test_columns_read_nothing_that_the_strict_reader_refuses(seed: int, at: int, position: int, value: int) -> None:
    """Any byte of any leaf is changed: it is in no group, or it is still a leaf, and the group says what it says."""
    made = [dataclasses.replace(admitted(seed), descriptor=bytes([k]) * 32) for k in range(40)]
    block = [leaves.encode_leaf(each, 70_000, START, 0) for each in made]
    leaf, body = block[at]
    data = bytearray(leaf + (body or b""))
    data[position % len(data)] = value
    block[at] = StoredLeaf(bytes(data[: len(leaf)]), bytes(data[len(leaf) :]))
    if position % len(data) >= len(leaf) and position % 2:  # a leaf that states the hash of the changed body
        start = leaf.index(b"\x05\x58\x20") + 3
        stated = hashlib.sha256(block[at].body or b"").digest()
        block[at] = StoredLeaf(leaf[:start] + stated + leaf[start + 32 :], block[at].body)
    try:
        real: ContributionRecord | None = leaves.decode_leaf(block[at]).record  # type: ignore[assignment]
    except LaminaError:
        real = None
    if other_kinds(side_by_side(block)):
        return  # it is none of ours any more
    for group in read_columns(side_by_side(block)):
        if isinstance(group, ContributionColumns) and at in group.rows.tolist():
            place = group.rows.tolist().index(at)
            assert real is not None
            assert int(group.expires[place]) == real.expires
            assert group.terms == real.terms


def checker(signatures: bool = False) -> ContributionChecks:
    opened = full()
    keys, policy = KeyState(opened), PolicyInForce(opened)
    attestations = AttestationChecks(ORIGIN, bytes(32), keys, None) if signatures else None
    members = AdmittedMembers(policy, keys, {})
    return ContributionChecks(policy, keys, attestations, AggregateTallies({}), None, members, 2**40)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), first=st.integers(0, 3), time=st.sampled_from([0, START - 50, START]))
def test_a_block_finds_what_one_by_one_finds(seed: int, first: int, time: int) -> None:
    """The quick way names the same leaf, for the same reason, as looking at each by itself."""
    block = some_leaves(seed, 60)

    def one_by_one() -> str | None:
        before, alone = time, checker()
        for row, data in enumerate(block):
            found = leaves.decode_leaf(data)
            try:
                alone.check(found, first + row, before, 0)
            except VerificationStopped as error:
                return str(error)
            before = found.time
        return None

    def at_once() -> str | None:
        try:
            checker().block(first, side_by_side(block), time, 0, {})
        except VerificationStopped as error:
            return str(error)
        return None

    assert at_once() == one_by_one()


# ------------------------------------------------------------------------------ any change whatever


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    build(str(folder / "template.db")).ledger.close()
    return folder / "template.db"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    table=st.sampled_from(["leaf", "leaf", "leaf", "tile", "checkpoint", "evidence", "blob"]),
    which=st.integers(0, 10**6),
    position=st.integers(0, 10**6),
    flip=st.integers(1, 255),
)
def test_any_byte_that_changes_is_noticed(
    template: Path, tmp_path_factory: pytest.TempPathFactory, table: str, which: int, position: int, flip: int
) -> None:
    path = str(shutil.copy(template, tmp_path_factory.mktemp("flipped") / "a.db"))
    column = "text" if table == "checkpoint" else "data"
    rows = sql(path, f"SELECT rowid, {column} FROM {table}")
    row, value = rows[which % len(rows)]
    data = bytearray(value.encode() if isinstance(value, str) else value)
    data[position % len(data)] ^= flip
    changed: object = bytes(data) if table != "checkpoint" else bytes(data).decode("utf-8", "replace")
    sql(path, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", changed, row)
    if changed == value:
        return
    found = verify(path, trust=MINE)
    if found.verified:  # the one thing that nobody has to keep: a signature by a key that nobody asked for
        assert table == "checkpoint"
        assert "witness" in str(value)
        assert not verify(path, trust=MINE).problem


@settings(max_examples=30, deadline=None, derandomize=True)
@given(order=st.permutations(range(8)), gone=st.integers(0, 8))
def test_any_other_order_is_noticed(
    template: Path, tmp_path_factory: pytest.TempPathFactory, order: list[int], gone: int
) -> None:
    path = str(shutil.copy(template, tmp_path_factory.mktemp("ordered") / "a.db"))
    data = {seq: leaf(path, 41 + seq) for seq in range(8)}
    for to, origin in enumerate(order):
        if to == gone:
            sql(path, "DELETE FROM leaf WHERE seq = ?", 41 + to)
        else:
            sql(path, "UPDATE leaf SET (data, body) = (?, ?) WHERE seq = ?", *data[origin], 41 + to)
    first = next((to for to, origin in enumerate(order) if origin != to or to == gone), None)
    found = verify(path)
    assert found.verified == (first is None)
    assert first is None or (found.problem is not None and found.problem.index == 41 + first)


# ------------------------------------------------------------------------------ spends


@pytest.mark.parametrize("name", ["rdp", "moments", "zcdp", "gaussian", "pld", "rdp@16"])
def test_spends_of_every_accountant(tmp_path: Path, name: str) -> None:
    story = begin(str(tmp_path / "a.db"), accountant=name)
    story.admit([contribution(1), contribution(2, terms=STRICT)])
    used = plan(noise=(0.0, 0.0, 40.0, 40.0))
    for run, index in ((0, 0), (1, 0), (0, 1)):
        story.epoch(RUNS[run], [segment(index, read=story.ledger.size)], of=used)
    story.sign()
    found = verify(tmp_path / "a.db")
    assert found.problem is None
    assert found.spends == 6
    story.ledger.close()


def test_what_a_ledger_states_is_what_another_accountant_finds(tmp_path: Path) -> None:
    """dp-accounting, asked directly about all steps of all runs: redone and given up ones included."""
    story = build(str(tmp_path / "a.db"), accountant="rdp", prune=False)
    last = story.ledger.leaf(story.at["run two"]).record
    assert isinstance(last, Epoch)
    steps = {4.0: 10 + 30, 5.0: 10}  # run one: 10, then 10 given up, 10 again, 10; run two: 10
    for account, scale in zip(last.accounts, (0.5, 1.0), strict=True):
        accountant = dp_accounting.rdp.RdpAccountant(orders=RDP_ORDERS)
        for sigma, count in steps.items():
            step = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(sigma / scale))
            accountant.compose(dp_accounting.SelfComposedDpEvent(step, count))
        assert account.spend / 1e9 == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


def test_the_state_of_the_accountant_is_of_its_charges_alone() -> None:
    one, two = Spending(full()), Spending(full())
    charge = Event(sigma=4.0, q=0.02, steps=10)
    one.charge(("clinical", 1, 1), [charge, charge])
    two.charge(("clinical", 1, 1), [dataclasses.replace(charge, steps=20)])
    assert one.state() == two.state()
    tried = two.copy()
    tried.charge(("clinical", 1, 1), [charge])
    assert tried.state() != two.state() == one.state()
    assert one.epsilon(("clinical", 1, 1), [charge]) == tried.epsilon(("clinical", 1, 1))
    assert one.spend(("clinical", 1, 1)) == nano_epsilon(one.epsilon(("clinical", 1, 1)))
    assert one.bounds() == [("clinical", 1, 1)]


def test_what_was_signed_is_one_gaussian_release() -> None:
    """ε(z): δ(ε) = Φ(1/2z - εz) - e^ε Φ(-1/2z - εz), by its own formula."""
    for z in (0.5, 1.0, 4.0):
        epsilon, phi = signed_spend(round(z * 1e6), 1e-5) / 1e9, NormalDist().cdf
        assert phi(0.5 / z - epsilon * z) - math.exp(epsilon) * phi(-0.5 / z - epsilon * z) == pytest.approx(
            1e-5, rel=1e-4
        )


def followed() -> StepPlan:
    return plan(rules=(FollowBudget(order=16),), accountant="rdp@16")


def test_noise_that_follows_its_budget_is_charged_as_a_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    story = begin(path, accountant="rdp")
    story.admit([contribution(1)])
    used = followed()
    charges = whole_plan_charges(used, "clinical", 1.0)
    assert [(c.steps, c.order) for c in charges] == [(100, 16.0)]
    first = _epoch(story, used, 0, charges)
    second = _epoch(story, used, 1, ())
    story.sign()
    story.ledger.close()
    assert verify(path).problem is None
    # Less than the whole of it is less than was spent.
    for changes in ((), (dataclasses.replace(charges[0], steps=99),), (dataclasses.replace(charges[0], order=None),)):
        record = leaves.decode_leaf(leaf(path, first)).record
        assert isinstance(record, Epoch)
        accounts = (dataclasses.replace(record.accounts[0], charges=changes),)
        shutil.copy(path, tmp_path / "b.db")
        rewritten(str(tmp_path / "b.db"), replacing(first, accounts=accounts))
        found = finding(tmp_path / "b.db")
        assert (found.index, found.kind) == (first, "epoch")
    assert second == first + 1


def _epoch(story: Story, used: StepPlan, index: int, charges: tuple[Event, ...], **changes: object) -> int:
    story.spending.charge(("clinical", 0, 0), charges)
    made = Epoch(
        run=RUNS[0],
        segments=(dataclasses.replace(segment(index, read=story.ledger.size), **changes),),  # type: ignore[arg-type]
        plan=used.digest(),
        variance=tuple(s * s for s in used.noise),
        accounts=(EpochAccount(cls="clinical", charges=charges, spend=story.spending.spend(("clinical", 0, 0))),),
        state=story.spending.state(),
    )
    return story.ledger.append([made], [used.to_cbor()])[0]


def test_raw_noise_with_a_cap_is_charged_for_every_attempt(tmp_path: Path) -> None:
    """min(N, steps) along the weights, and min(N, steps) again for what was given up and is done again."""
    path = str(tmp_path / "a.db")
    story = begin(path, accountant="gaussian", presets=_loose())
    story.admit([contribution(1)])
    used = plan(injection=Injection(form=InjectionForm.RAW, occurrences=15), noise=(0.0, 0.0, 20.0, 20.0))

    def events(count: int) -> tuple[Event, ...]:
        return (Event(sigma=used.sigma("clinical"), q=1.0, steps=count),) if count else ()

    _epoch(story, used, 0, events(10))
    _epoch(story, used, 1, events(5))  # the cap is reached
    _epoch(story, used, 2, (), outcome=SegmentOutcome.ABANDONED)  # whoever was in it was counted on
    third = _epoch(story, used, 2, events(10), generation=1)
    story.sign()
    story.ledger.close()
    assert verify(path).problem is None
    record = leaves.decode_leaf(leaf(path, third)).record
    assert isinstance(record, Epoch)
    rewritten(path, replacing(third, accounts=(dataclasses.replace(record.accounts[0], charges=events(9)),)))
    found = finding(path)
    assert (found.index, found.code, "its plan takes 25" in found.reason) == (
        third,
        "verify.charge-differs-from-plan",
        True,
    )


def _loose() -> tuple[ClassBounds, ...]:
    return (
        ClassBounds(cls="clinical", clip_norm=1_000_000, noise_multiplier=500_000, profile="top=0.5", population=1000),
        ClassBounds(cls="open", clip_norm=0, noise_multiplier=0, public=True, profile="all"),
    )


def test_noise_that_moves_between_layers_keeps_its_multiplier(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    story = begin(path)
    story.admit([contribution(1)])
    used = plan(rules=(FollowEnergy(),))
    moved = (0.0, 0.0, 18.0, 14.0)  # (0.8²/18 + 0.6²/14)^-1/2 = 4.08: above the 4 that was declared
    seq = story.epoch(RUNS[0], [segment(0, read=5)], of=used, scales={USUAL: 1.0},
                      change=lambda made: dataclasses.replace(made, variance=moved))  # fmt: skip
    story.sign()
    story.ledger.close()
    assert verify(path).problem is None
    for variance in ((0.0, 0.0, 14.0, 14.0), (0.0, 1.0, 18.0, 14.0), (0.0, 0.0, 18.0)):
        rewritten(path, replacing(seq, variance=variance))
        found = finding(path)
        assert found.index == seq


def test_a_class_account_is_held_to_the_class(tmp_path: Path) -> None:
    """Members without a bound of their own are promised what their class promises."""
    loud = plan(3000, noise=(0.0, 0.0, 1.0, 1.0))
    for steps, good in ((300, True), (2900, False)):
        story = begin(str(tmp_path / f"{steps}.db"))
        charges = planned_charges(loud, "clinical", 1.0, [segment(0, read=1, length=steps)])
        story.spending.charge(("clinical", 0, 0), charges)
        spend = story.spending.spend(("clinical", 0, 0))
        account = EpochAccount(cls="clinical", charges=charges, spend=spend)
        made = Epoch(
            run=RUNS[0], segments=(segment(0, read=1, length=steps),), plan=loud.digest(),
            variance=tuple(s * s for s in loud.noise), accounts=(account,), state=story.spending.state(),
        )  # fmt: skip
        story.ledger.append([made], [loud.to_cbor()])
        story.sign()
        story.ledger.close()
        assert verify(tmp_path / f"{steps}.db").verified is good


def test_several_charges_have_one_price() -> None:
    """Composed, not added: however a schedule was cut, it costs the same."""
    cut = {(4.0, 0.02, 0.0): 30}
    assert pooled_epsilon(cut, delta=1e-5, name="rdp") < 3 * pooled_epsilon(
        {(4.0, 0.02, 0.0): 10}, delta=1e-5, name="rdp"
    )
    assert pooled_epsilon({(4.0, 0.02, 16.0): 30}, delta=1e-5, name="zcdp") == math.inf
    assert pooled_epsilon({(4.0, 0.02, 16.0): 30}, delta=1e-5, name="rdp@16") == pytest.approx(
        pooled_epsilon(cut, delta=1e-5, name="rdp@16"), rel=1e-9
    )
    assert pooled_epsilon({}, delta=1e-5, name="pld") == 0


# ------------------------------------------------------------------------------ the rest


def test_a_stricter_policy_binds_whoever_comes_later(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    story = begin(path)
    story.admit([contribution(1), contribution(2, terms=STRICT)])
    doubled = tuple(dataclasses.replace(each, noise_multiplier=2 * each.noise_multiplier) for each in PRESETS)
    story.govern(PolicyChange(floors=FLOORS, presets=doubled, policy=policy_digest()))
    story.admit([contribution(3, terms=STRICT)])
    story.sign()
    assert verify(path).verified
    (seq,) = story.slip([contribution(4, terms=USUAL)])
    story.sign()
    found = finding(path)
    assert (found.index, found.kind) == (seq, "contribution")


def test_time_may_stand_still_and_windows_may_be_a_little_off(tmp_path: Path) -> None:
    """Clocks of contributors and ledgers differ by two minutes at most."""
    path = str(tmp_path / "a.db")
    story = begin(path)
    now = int(story.clock.now)
    story.admit([contribution(1, at=now + HOUR + 120, expires=now + YEAR), contribution(2, expires=now + 1)])
    story.sign()
    assert verify(path, signatures=False).verified
    (seq,) = story.slip([contribution(3, at=now + HOUR + 121, expires=now + YEAR)])
    story.sign()
    found = finding(path, signatures=False)
    assert found.index == seq


def test_progress_is_told(tmp_path: Path) -> None:
    build(str(tmp_path / "a.db")).ledger.close()
    told: list[tuple[int, int]] = []
    verify(tmp_path / "a.db", progress=lambda done, of: told.append((done, of)))
    assert told[-1] == (56, 56)


def test_a_witness_is_heard_once_it_is_asked_for(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    story = begin(path, witnesses=1)
    assert not verify(path).verified
    story.ledger.cosigned(signed_checkpoint.add_cosignature(story.sign(), WITNESS, START, "witness.example"))
    assert verify(path).verified


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (START, START, None),
        (None, START, None),
        (START, None, "verify.too-few-cosignatures"),  # it was replaced
        (None, START + YEAR, "verify.cosignature-invalid"),  # in the verifier's future
        (START, START - 121, "verify.cosigned-before-last-leaf"),
    ],
)
def test_a_witness_that_was_replaced_is_not_heard(
    tmp_path: Path, old: int | None, new: int | None, code: str | None
) -> None:
    path = str(tmp_path / "a.db")
    story = begin(path, witnesses=1)
    named = Key(name="next.example", x=OTHER.public.x, role=Role.WITNESS)
    story.govern(KeyEvent(change=KeyChange.ROTATE, key=named, target=WITNESS.public.id, effective=START))
    text = story.sign()
    for who, name, at in ((WITNESS, "witness.example", old), (OTHER, "next.example", new)):
        text = text if at is None else signed_checkpoint.add_cosignature(text, who, at, name)
    story.ledger.cosigned(text)
    found = verify(path, now=START + HOUR).problem
    assert (found and found.code) == code


def test_the_first_of_several_problems_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    story = build(path, prune=False)
    story.ledger.close()
    again = leaves.decode_leaf(leaf(path, 47)).record
    rewritten(path, appended(again))
    spent = leaves.decode_leaf(leaf(path, story.at["redone"])).record
    assert isinstance(spent, Epoch)
    wrong = (spent.accounts[0], dataclasses.replace(spent.accounts[1], spend=spent.accounts[1].spend - 99_999))
    rewritten(path, replacing(story.at["redone"], accounts=wrong))
    sql(path, "DELETE FROM leaf WHERE seq = 50")
    found = finding(path, signatures=False)
    assert (found.index, found.code) == (story.at["redone"], "verify.spend-under-reported")
