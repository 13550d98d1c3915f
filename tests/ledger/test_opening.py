"""Opening the ledger of a corpus: made once, of one origin, never looser unseen, with a key that nobody else reads."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest
from build import plan
from clinic import policy
from forks import in_processes
from making import GOVERNING, LEDGER, SECOND, START, Clock, authorised, key, owned
from refusals import raises_code

from lamina.admit.terms import floors_hash
from lamina.errors import LedgerError
from lamina.ledger import signed_checkpoint
from lamina.ledger.corpus_terms import (
    NO_POLICY,
    CorpusTerms,
    adopt_policy,
    governing_key_path,
    ledger_key_path,
    open_or_create,
    origin_slug,
    policy_in_force,
)
from lamina.ledger.governance_records import (
    ClassBounds,
    Key,
    KeyChange,
    KeyEvent,
    KeyEvents,
    LedgerFloors,
    Role,
    TermsChange,
)
from lamina.ledger.store.sqlite import ledger_exists
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.policy import Policy
from lamina.sign.keys import PrivateKey


def contract(**changes: Any) -> CorpusTerms:
    return CorpusTerms.of_policy(policy(**changes))


def begin(where: str, **changes: Any) -> Ledger:
    return open_or_create(where, contract(**changes), LEDGER, governing=GOVERNING, clock=Clock())


# ------------------------------------------------------------------------------------------------ contracts


def test_the_contract_of_a_policy_is_what_the_gate_demands() -> None:
    made = contract(floors={"clip_norm": 0.29, "noise_multiplier": 0.5000001}, clinical={"clip_norm": 1.0000009})
    assert made.floors == LedgerFloors(clip_norm=290_000, noise_multiplier=500_001)
    assert (made.origin, made.accountant, made.delta) == ("clinic.example/ecg", "rdp", 1e-5)
    clinical, standard, public = made.presets
    assert (clinical.cls, clinical.clip_norm, clinical.profile) == ("clinical", 1_000_000, "top=0.25")
    assert (standard.noise_multiplier, standard.profile, standard.population) == (2_000_000, "all", 100)
    assert public == ClassBounds(cls="open", clip_norm=0, noise_multiplier=0, public=True, profile="all")
    assert contract().policy == floors_hash(policy())


def test_a_class_that_bounds_nothing_promises_no_noise() -> None:
    free = Policy.from_dict(
        {"corpus": {"origin": "a.example", "delta": 1e-5}, "class": {"free": {"population": 10, "clip_norm": 0.5}}}
    )
    made = CorpusTerms.of_policy(free)
    assert made.presets == (
        ClassBounds(cls="free", clip_norm=500_000, noise_multiplier=0, profile="all", population=10),
    )
    assert made.floors == LedgerFloors()


def test_the_contract_of_a_plan_promises_nothing() -> None:
    made = CorpusTerms.of_plan(plan(), "lab.example/42")
    assert made.policy == NO_POLICY and made.floors == LedgerFloors()
    assert made.presets == (
        ClassBounds(cls="clinical", clip_norm=0, noise_multiplier=0, profile="top 50 %", population=1000),
        ClassBounds(cls="open", clip_norm=0, noise_multiplier=0, public=True, profile="all layers"),
    )
    assert (made.accountant, made.delta) == ("pld", 1e-5)


def test_a_long_profile_is_named_by_its_digest() -> None:
    long = plan()
    long = replace(long, classes=(replace(long.classes[0], profile="layers " + "x" * 2000), long.classes[1]))
    assert CorpusTerms.of_plan(long, "a").presets[0].profile.startswith("sha256:")


@pytest.mark.parametrize("origin", ["ward 7", "a+b", "Klinik Süd", "", "x" * 256, "tab\there"])
def test_an_origin_that_cannot_name_a_ledger_is_told_what_would(origin: str) -> None:
    with raises_code("ledger.origin-not-a-name") as caught:
        CorpusTerms.of_plan(plan(), origin)
    suggested = caught.value.remedy.split('"')[1]
    assert CorpusTerms.of_plan(plan(), suggested).origin == suggested == origin_slug(origin)


def test_slugs() -> None:
    assert origin_slug("example.org/ecg") == "example.org-ecg"
    assert origin_slug("../../etc/passwd") == "etc-passwd"
    assert origin_slug("ward 7") == "ward-7"
    assert origin_slug("病院") != origin_slug("医院") and origin_slug("病院").startswith("corpus-")
    long = origin_slug("x" * 300)
    assert len(long) == 100 and long != origin_slug("x" * 301)


# ------------------------------------------------------------------------------------------------ opening


def test_it_is_made_once_and_opened_after_that(where: str) -> None:
    with begin(where) as ledger:
        assert ledger.signs and ledger.size == 1
        header = ledger.header
        assert header.version.startswith("lamina ") and "; dp-accounting " in header.version
        assert (header.granularity, header.origin) == (1, "clinic.example/ecg")
    with begin(where) as again:
        assert again.header == header and again.size == 1
    found = verify(where, now=START)
    assert found.verified and found.signed == 1


def test_another_origin_is_refused_with_both_names(where: str) -> None:
    begin(where).close()
    with raises_code("ledger.wrong-origin") as caught:
        begin(where, origin="b.example")
    assert "another path for a new one" in caught.value.remedy


def test_another_accountant_or_delta_is_refused(where: str) -> None:
    begin(where).close()
    with raises_code("ledger.accounting-differs"):
        begin(where, accountant="pld")
    with raises_code("ledger.accounting-differs"):
        begin(where, delta=1e-6)
    with open_or_create(where, CorpusTerms.of_plan(plan(), "clinic.example/ecg"), LEDGER, clock=Clock()) as ledger:
        assert ledger.header.accountant == "rdp"  # who has no policy is counted as the ledger counts


def test_another_key_is_refused(where: str) -> None:
    begin(where).close()
    with raises_code("ledger.key-may-not-sign"):
        open_or_create(where, contract(), key("other"), clock=Clock())


def test_processes_that_make_it_at_once_make_one(where: str) -> None:
    def work() -> None:
        with begin(where) as ledger:
            assert ledger.signs and ledger.size == 1
            ledger.checkpoint()

    in_processes(*[work] * 4)
    assert verify(where, now=START).verified


def test_processes_that_make_it_at_once_agree_on_the_key_beside_it(tmp_path: Path) -> None:
    where = tmp_path / "new" / "a.ledger.db"

    def work() -> None:
        with open_or_create(where, contract()) as ledger:
            assert ledger.signs and ledger.size == 1
            ledger.checkpoint()

    in_processes(*[work] * 4)
    pems = {path.name for path in where.parent.iterdir() if path.suffix == ".pem"}
    assert pems == {"a.ledger.pem", "a.ledger.governing.pem"}
    assert verify(where).verified


def test_a_database_needs_a_key_to_begin_with(server: Any) -> None:
    where = server.url("opening_without_key")
    with raises_code("ledger.no-key-to-create") as caught:
        open_or_create(where, contract(), clock=Clock())
    assert "lamina ledger init" in caught.value.remedy
    begin(where).close()
    with open_or_create(where, contract(), clock=Clock()) as ledger:
        assert not ledger.signs


# ------------------------------------------------------------------------------------------------ the key beside it


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_key_lies_beside_a_file_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    where, before = tmp_path / "new" / "clinic.ledger.db", os.umask(0)
    try:
        with open_or_create(where, contract()) as ledger:
            assert ledger.signs
    finally:
        os.umask(before)
    beside = ledger_key_path(where)
    assert beside == tmp_path / "new" / "clinic.ledger.pem"
    assert governing_key_path(where) == tmp_path / "new" / "clinic.ledger.governing.pem"
    assert mode(beside) == mode(governing_key_path(where)) == mode(where) == 0o600
    held = beside.read_bytes()
    with open_or_create(where, contract()) as ledger:
        assert ledger.signs and signed_checkpoint.parse_checkpoint(ledger.checkpoint())[0].size == 1
    assert beside.read_bytes() == held
    beside.chmod(0o640)
    with raises_code("key.private-file-open-to-others"):
        open_or_create(where, contract())
    beside.unlink()
    with open_or_create(where, contract()) as ledger:
        assert not ledger.signs  # it is read and appended to, and signs nothing
    assert not beside.exists()  # a key that is lost is not replaced in silence


def test_names_of_keys(tmp_path: Path) -> None:
    for name, expected in (("a.db", "a.pem"), ("a.ledger.db", "a.ledger.pem"), ("a", "a.pem"), ("a.x", "a.x.pem")):
        assert ledger_key_path(tmp_path / name) == tmp_path / expected


def test_a_link_leads_to_the_ledger_and_its_key(tmp_path: Path) -> None:
    open_or_create(tmp_path / "clinic.ledger.db", contract()).close()
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "ledger.db"
    link.symlink_to(Path("..") / "clinic.ledger.db")
    with open_or_create(link, contract()) as ledger:
        assert ledger.signs
    assert ledger_key_path(link) == tmp_path / "clinic.ledger.pem"
    assert os.listdir(tmp_path / "run") == ["ledger.db"]


def test_what_a_killed_process_left_is_completed(tmp_path: Path) -> None:
    where = tmp_path / "a.db"
    where.touch(0o600)
    kept = PrivateKey.generate()
    kept.save(ledger_key_path(where), None)
    with open_or_create(where, contract()) as ledger:
        assert ledger.header.keys[0].x == kept.public.x and ledger.size == 1
    (tmp_path / "b.db").write_bytes(b"something else\n" * 400)
    with pytest.raises(LedgerError):
        open_or_create(tmp_path / "b.db", contract())


def test_what_a_process_left_that_was_killed_before_there_was_a_wal_is_undone(tmp_path: Path) -> None:
    begun = apsw.Connection(str(tmp_path / "begun.db"))
    begun.execute("PRAGMA user_version = 0; BEGIN IMMEDIATE; CREATE TABLE half (written)")
    begun.cache_flush()
    for name in ("a.db", "b.db"):
        for end in ("", "-journal"):
            shutil.copy(f"{tmp_path}/begun.db{end}", f"{tmp_path}/{name}{end}")
    begun.close(True)
    assert (tmp_path / "a.db-journal").stat().st_size
    with open_or_create(tmp_path / "a.db", contract()) as ledger:
        assert ledger.size == 1
    with raises_code("store.no-ledger"):
        verify(tmp_path / "b.db")


def test_who_looks_waits_for_who_is_making_it(tmp_path: Path) -> None:
    """Before a file has a WAL, its maker holds all of it for a moment."""
    where = str(tmp_path / "a.db")
    open_or_create(where, contract()).close()
    maker = apsw.Connection(where)
    maker.pragma("journal_mode", "delete")
    maker.execute("BEGIN EXCLUSIVE; CREATE TABLE more (x)")
    assert (tmp_path / "a.db-journal").exists()
    done = threading.Timer(0.5, lambda: maker.execute("ROLLBACK"))
    done.start()
    try:
        assert ledger_exists(where)
    finally:
        done.join()
        maker.close()


# ------------------------------------------------------------------------------------------------ following


def test_the_same_policy_changes_nothing(where: str) -> None:
    with begin(where) as ledger:
        assert adopt_policy(ledger, contract()) is False
        assert ledger.size == 1


def test_a_stricter_policy_and_a_new_class_are_followed(where: str) -> None:
    with begin(where) as ledger:
        stricter = contract(floors={"clip_norm": 0.2, "noise_multiplier": 0.5}, standard={"noise_multiplier": 3.0})
        assert adopt_policy(ledger, stricter) is True
        assert adopt_policy(ledger, stricter) is False
        changed = policy_in_force(ledger)
        assert changed.floors == stricter.floors and changed.presets == stricter.presets
        latest = ledger.latest()
        assert latest is not None and signed_checkpoint.parse_checkpoint(latest)[0].size == ledger.size == 2
        other = Policy.from_dict(
            {
                "corpus": {
                    "origin": "clinic.example/ecg",
                    "delta": 1e-5,
                    "accountant": "rdp",
                    "floors": {"clip_norm": 0.2, "noise_multiplier": 0.5},
                },
                "class": {"late": {"population": 5, "epsilon": 1.0}},
            }
        )
        assert adopt_policy(ledger, CorpusTerms.of_policy(other)) is True
        assert [each.cls for each in policy_in_force(ledger).presets] == ["clinical", "standard", "open", "late"]
        assert policy_in_force(ledger).presets[:3] == stricter.presets
    assert verify(where, now=START).verified


OWNERS = [
    Key(name=name, x=one.public.x, role=Role.GOVERNING)
    for name, one in (("owner.example", GOVERNING), ("second.example", SECOND))
]


def test_a_looser_policy_needs_two_owners(where: str) -> None:
    looser = contract(floors={"clip_norm": 0.1}, standard={"noise_multiplier": 1.0}, clinical={"profile": "all"})
    header = owned(contract().header(LEDGER.public, OWNERS, retention=1000))
    with Ledger.create(where, header, LEDGER, governing=GOVERNING, clock=Clock()) as ledger:
        with raises_code("ledger.policy-loosened") as caught:
            adopt_policy(ledger, looser)
        for word in ("floor of the noise multiplier falls", "class 'standard' falls", "class 'clinical' is not inside"):
            assert word in caught.value.problem
        change = looser.change(policy_in_force(ledger))
        assert change is not None
        for keys, code in (
            ([GOVERNING], "ledger.policy-loosened"),
            ([GOVERNING, LEDGER], "ledger.authorising-signature-invalid"),
        ):
            with raises_code(code):
                ledger.govern(authorised(ledger, change, *keys))
        assert ledger.size == 1
        assert ledger.govern(authorised(ledger, change, GOVERNING, SECOND)) == 1
        assert adopt_policy(ledger, looser) is False
    assert verify(where, now=START).verified


def test_one_owner_never_adopts_a_looser_policy(where: str) -> None:
    with begin(where) as ledger:
        ledger.govern(KeyEvents(events=(KeyEvent(change=KeyChange.ADD, key=OWNERS[1], effective=START),)))
        change = contract(standard={"noise_multiplier": 1.0}).change(policy_in_force(ledger))
        assert change is not None
        for keys, code in (
            ([GOVERNING], "ledger.policy-loosened"),
            ([SECOND], "ledger.policy-loosened"),
            ([GOVERNING, SECOND], "ledger.signed-by-one-owner"),
        ):
            with raises_code(code):
                ledger.govern(authorised(ledger, change, *keys))
        assert ledger.size == 2
        assert adopt_policy(ledger, contract(standard={"noise_multiplier": 3.0}))
    assert verify(where, now=START).verified


def test_a_ledger_with_an_owner_elsewhere_takes_no_policy_by_itself(tmp_path: Path) -> None:
    begin(str(tmp_path / "a.db")).close()
    with open_or_create(tmp_path / "a.db", contract(), LEDGER, clock=Clock()) as ledger:
        assert not ledger.governs
        with raises_code("ledger.policy-not-in-force"):
            adopt_policy(ledger, contract(standard={"noise_multiplier": 3.0}))
        with raises_code("ledger.governing-key-missing"):
            ledger.govern(TermsChange(retention=10**9))
        assert adopt_policy(ledger, contract()) is False
        assert ledger.size == 1


def test_a_corpus_adopts_less_depth_by_its_policy_alone(where: str) -> None:
    with begin(where) as ledger:
        assert adopt_policy(ledger, contract(clinical={"profile": {"top": 0.125}}, standard={"profile": {"top": 0.5}}))
        with raises_code("ledger.policy-loosened"):
            adopt_policy(ledger, contract(standard={"profile": {"top": 0.5}}))
    assert verify(where, now=START).verified


def test_two_who_follow_at_once_write_one_change(where: str) -> None:
    begin(where).close()
    stricter = contract(standard={"noise_multiplier": 3.0})

    def work() -> None:
        with begin(where) as ledger:
            adopt_policy(ledger, stricter)

    in_processes(*[work] * 4)
    with begin(where) as ledger:
        assert ledger.size == 2 and policy_in_force(ledger).presets == stricter.presets
