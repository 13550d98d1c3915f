"""Following a ledger that others write: what is believed, what is refused, and up to which signed time it is known."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import making
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from making import GOVERNING, LEDGER, ORIGIN, OTHER, START, WITNESS, Clock, admitted, authorised, create, digest, reopen
from postgres import Server
from refusals import raises_code

from lamina.errors import LaminaError, StoreError
from lamina.ledger.following import LedgerFollower
from lamina.ledger.governance_records import Key, KeyChange, KeyEvent, Role, Withdrawal, WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.signed_checkpoint import parse_checkpoint
from lamina.ledger.verify.tree_checks import Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.key_ring import KeyRing

HOUR = 3600


def withdraw(ledger: Ledger, target: int, *, sign: bool = True) -> int:
    (seq,) = ledger.append([Withdrawal(target=target, reason=WithdrawalReason.CONSENT)])
    if sign:
        ledger.checkpoint()
    return seq


class Following:
    """A follower with the set of contributions that it knows to be withdrawn."""

    def __init__(self, where: Any, trust: Trust | None = None, known: str | None = None) -> None:
        self.reader = LedgerReader.read_only(where)
        first = known or next(self.reader.checkpoints())
        self.follower = LedgerFollower(self.reader, trust or Trust(), parse_checkpoint(first)[0])
        self.signed: set[int] = set()
        self.unsigned: set[int] = set()

    def _use(self, signed: Any, unsigned: Any) -> None:
        self.signed |= {leaf.record.target for leaf in signed}
        self.unsigned = {leaf.record.target for leaf in unsigned}

    def look(self, now: float = START) -> set[int]:
        self.follower.look(self._use, now)
        return self.signed | self.unsigned


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of five contributions, of which the first is withdrawn."""
    found = tmp_path / "a.db"
    with create(str(found)) as ledger:
        ledger.append([admitted(n) for n in range(5)])
        withdraw(ledger, 1)
    return found


@pytest.fixture
def following(path: Path) -> Iterator[Following]:
    made = Following(path)
    assert made.look() == {1}
    yield made
    made.reader.close()


def sql(path: Path, *statements: str, values: tuple[Any, ...] = ()) -> None:
    db = apsw.Connection(str(path))
    for each in statements:
        db.execute(each, values)
    db.close()


def copied(path: Path, name: str = "copy.db") -> Path:
    """The committed ledger as one file."""
    with LedgerReader.read_only(path) as reader:
        reader.store.copy(path.with_name(name))  # type: ignore[attr-defined]
    return path.with_name(name)


def put_in_place(other: Path, path: Path) -> None:
    """Put another file in the place of the ledger and remove the WAL of the first one."""
    for end in ("-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    os.replace(other, path)


# ------------------------------------------------------------------------------ leaves are the only evidence


def test_a_key_that_was_revoked_signs_nothing(path: Path, following: Following) -> None:
    """A ledger key is stolen. The owner replaces and revokes it, and the thief signs further leaves."""
    with reopen(str(path)) as ledger:
        named = Key(name=ORIGIN, x=OTHER.public.x, role=Role.LEDGER)
        add = KeyEvent(change=KeyChange.ADD, key=named, effective=START)
        revoke = KeyEvent(change=KeyChange.REVOKE, target=LEDGER.public.id, effective=START)
        ledger.append([authorised(ledger, [add, revoke])])
        signed = {key: ledger.tree().signed(key) for key in (LEDGER, OTHER)}
    add_row = "INSERT OR REPLACE INTO checkpoint SELECT size, ?, zeroblob(96) FROM head"
    sql(path, add_row, values=(signed[LEDGER],))
    with raises_code("ledger.not-signed"):
        following.look()
    sql(path, add_row, values=(signed[OTHER],))
    assert following.look() == {1}


def test_an_edited_leaf_is_refused_by_who_has_not_read_it_yet(path: Path, following: Following) -> None:
    with reopen(str(path)) as ledger:
        seq = withdraw(ledger, 2)
        withdraw(ledger, 3)
    sql(path, f"UPDATE leaf SET (data, body) = (SELECT data, body FROM leaf WHERE seq = 2) WHERE seq = {seq}")
    with raises_code("ledger.forked-from-seen"):
        following.look()
    assert following.signed == {1}


def test_the_time_of_the_last_leaf_is_that_of_the_leaf_that_was_hashed(path: Path, following: Following) -> None:
    """An attacker writes a later time into the last leaf to make an old ledger look fresh."""
    db = apsw.Connection(str(path))
    ((seq, data),) = db.execute("SELECT seq, data FROM leaf ORDER BY seq DESC LIMIT 1").fetchall()
    later = data.replace(START.to_bytes(4, "big"), (START + 9 * HOUR).to_bytes(4, "big"))
    assert later != data
    db.execute("UPDATE leaf SET data = ? WHERE seq = ?", (later, seq))
    db.execute("UPDATE head SET time = ?", (START + 9 * HOUR,))
    db.execute("UPDATE checkpoint SET text = text || ?", ("\u2014 someone AAAAAAAA\n",))  # so that it is read again
    db.close()
    following.look()
    assert following.follower.time == START
    with raises_code("ledger.forked-from-seen"):
        Following(path).look()


# ------------------------------------------------------------------------------ another file


def test_a_file_that_continues_the_ledger_takes_its_place(path: Path, following: Following) -> None:
    longer = copied(path)
    with reopen(str(longer)) as ledger:
        withdraw(ledger, 2)
        withdraw(ledger, 3, sign=False)
    os.replace(longer, path)
    assert following.look() == {1, 2, 3}
    with reopen(str(path)) as ledger:  # and it is followed from there
        withdraw(ledger, 4)
    assert following.look() == {1, 2, 3, 4}


@pytest.mark.parametrize("how", ["replaced", "overwritten", "linked"])
def test_a_backup_in_its_place_is_refused(path: Path, tmp_path: Path, how: str) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    backup = copied(path)
    with reopen(str(path)) as ledger:
        withdraw(ledger, 2)
    made = Following(link)
    assert made.look() == {1, 2}
    if how == "replaced":
        put_in_place(backup, path)
    elif how == "overwritten":
        path.write_bytes(backup.read_bytes())
    else:
        link.unlink()
        link.symlink_to(backup)
    with raises_code("ledger.shorter-than-seen"):
        made.look()
    with raises_code("ledger.shorter-than-seen"):  # it does not forget
        made.look()
    made.reader.close()


def test_a_fork_in_its_place_is_refused(path: Path, following: Following) -> None:
    fork = copied(path)
    for each, target in ((path, 2), (fork, 3)):  # both are signed with the key of the ledger
        with reopen(str(each)) as ledger:
            withdraw(ledger, target)
    assert following.look() == {1, 2}
    with reopen(str(fork)) as ledger:
        withdraw(ledger, 4)
    put_in_place(fork, path)
    with raises_code("ledger.forked-from-seen"):
        following.look()


def test_a_file_beside_the_wal_of_another_is_refused_or_read_as_that_ledger(path: Path, following: Following) -> None:
    """SQLite reads the new file together with the old WAL: what is not a signed state after the last one is refused."""
    longer = copied(path)
    with reopen(str(path)) as ledger:
        withdraw(ledger, 2)
    with reopen(str(longer)) as ledger:
        withdraw(ledger, 2)
        withdraw(ledger, 3)
        withdraw(ledger, 4)
    os.replace(longer, path)
    assert Path(f"{path}-wal").stat().st_size
    with suppress(LaminaError):
        assert following.look() == {1, 2}  # what the WAL's ledger had signed
    Path(f"{path}-wal").unlink()
    Path(f"{path}-shm").unlink()
    assert following.look() == {1, 2, 3, 4}


def test_another_ledger_in_its_place_is_refused(path: Path, following: Following) -> None:
    with create(str(path.with_name("other.db")), retention=999):
        pass
    put_in_place(path.with_name("other.db"), path)
    with raises_code("ledger.replaced-by-other"):
        following.look()


def test_a_ledger_that_is_away_is_refused_until_it_is_back(path: Path, following: Following) -> None:
    os.rename(path, path.with_name("away.db"))
    for _ in range(2):
        with raises_code("store.no-ledger"):
            following.look()
    os.rename(path.with_name("away.db"), path)
    assert following.look() == {1}


def test_the_known_checkpoint_must_be_continued(path: Path) -> None:
    fork = copied(path)
    with reopen(str(path)) as ledger:
        withdraw(ledger, 2)
        known = ledger.latest()
    with reopen(str(fork)) as ledger:
        withdraw(ledger, 3)
        withdraw(ledger, 4)
    with raises_code("ledger.forked-from-seen"):
        Following(fork, known=known).look()
    with reopen(str(path)) as ledger:
        withdraw(ledger, 3)
        later = ledger.latest()
    with raises_code("ledger.forked-from-seen"):
        Following(fork, known=later).look()
    assert Following(path, known=known).look() == {1, 2, 3}


def test_a_writer_notices_that_its_file_was_replaced(path: Path) -> None:
    """Otherwise a charge or a withdrawal would be written into a file that no process opens again, and be lost."""
    backup = copied(path)
    with reopen(str(path)) as ledger:
        os.replace(backup, path)
        with raises_code("store.file-replaced"):
            withdraw(ledger, 2)
        with raises_code("store.file-replaced"):
            ledger.leaf(1)
        os.unlink(path)
        with raises_code("store.file-replaced"):
            ledger.checkpoint()


def test_a_server_that_is_away_is_refused_until_it_is_back(server: Server) -> None:
    where = server.url("followed")
    with create(where) as ledger:
        ledger.append([admitted(n) for n in range(5)])
        withdraw(ledger, 1)
    made = Following(where)
    assert made.look() == {1}
    server.stop()
    try:
        with pytest.raises(StoreError):
            made.look()
    finally:
        server.start()
    with reopen(where) as ledger:
        withdraw(ledger, 2)
    assert made.look() == {1, 2}
    made.reader.close()


# ------------------------------------------------------------------------------ the signed time


def cosigned_by_hand(path: Path, secret: Any, name: str, time: int, *, over: str | None = None) -> None:
    """A cosignature/v1 line under the newest checkpoint, made as C2SP writes it, without our code."""
    seed = Ed25519PrivateKey.from_private_bytes(secret)
    db = apsw.Connection(str(path))
    ((size, text),) = db.execute("SELECT size, text FROM checkpoint ORDER BY size DESC LIMIT 1").fetchall()
    body = text.partition("\n\n")[0] + "\n"
    message = f"cosignature/v1\ntime {time}\n{body if over is None else over}".encode()
    x = seed.public_key().public_bytes_raw()
    key_id = hashlib.sha256(name.encode() + b"\n\x04" + x).digest()[:4]
    line = base64.b64encode(key_id + time.to_bytes(8, "big") + seed.sign(message)).decode()
    db.execute("UPDATE checkpoint SET text = ? WHERE size = ?", (f"{text}\u2014 {name} {line}\n", size))
    db.close()


def check_cosignature(line: str, text: str, x: bytes, time: int) -> None:
    """Verify a cosignature by the text of C2SP tlog-cosignature, without code of Lamina."""
    dash, name, blob = line.split(" ")
    raw = base64.b64decode(blob, validate=True)
    assert (dash, name) == ("\u2014", text.partition("\n")[0])
    assert raw[:4] == hashlib.sha256(name.encode() + b"\n\x04" + x).digest()[:4]
    assert int.from_bytes(raw[4:12], "big") == time
    message = f"cosignature/v1\ntime {time}\n{text}".encode()
    Ed25519PublicKey.from_public_bytes(x).verify(raw[12:], message)


SECRETS = {name: digest("key", name) for name in ("ledger", "witness", "other", "governing")}


@pytest.mark.parametrize(
    ("who", "name", "counts"),
    [
        ("ledger", ORIGIN, True),
        ("witness", "witness.example", True),
        ("ledger", "witness.example", False),  # under another name
        ("witness", ORIGIN, False),
        ("other", ORIGIN, False),  # keys that the ledger does not name
        ("other", "other.example", False),
        ("governing", "owner.example", False),  # it has another role
    ],
)
def test_cosignatures_by_keys_in_force_tell_the_time(path: Path, who: str, name: str, counts: bool) -> None:
    cosigned_by_hand(path, SECRETS[who], name, START + HOUR)
    made = Following(path)
    assert made.look(START + HOUR) == {1}
    assert made.follower.time == (START + HOUR if counts else START)


def test_a_cosignature_that_does_not_hold_is_refused(path: Path, following: Following) -> None:
    cosigned_by_hand(path, SECRETS["ledger"], ORIGIN, START + HOUR, over="another checkpoint\n1\nAAAA\n")
    with raises_code("ledger.cosignature-invalid"):
        following.look(START + HOUR)
    found = verify(path, now=START + HOUR, signatures=False).problem
    assert found is not None and found.code == "verify.cosignature-invalid"


def test_a_ring_says_whose_times_count(path: Path) -> None:
    """If the key ring names ledger keys or witnesses, only those keys of the role count."""
    cosigned_by_hand(path, SECRETS["ledger"], ORIGIN, START + HOUR)
    cosigned_by_hand(path, SECRETS["witness"], "witness.example", START + 2 * HOUR)
    cosigned_by_hand(path, SECRETS["other"], "outside.example", START + 3 * HOUR)
    now = START + 4 * HOUR

    def time(*named: tuple[Any, str, str]) -> int:
        ring = KeyRing()
        for key, role, label in named:
            ring.add(key.public, role=role, label=label, valid_from=START - HOUR)
        made = Following(path, Trust(ring=ring))
        made.look(now)
        return made.follower.time

    assert time((GOVERNING, "governing", "owner")) == START + 2 * HOUR
    assert time((OTHER, "witness", "outside.example")) == START + 3 * HOUR
    assert time((WITNESS, "witness", "witness.example")) == START + 2 * HOUR
    with raises_code("ledger.not-signed"):
        time((OTHER, "ledger", ORIGIN))


def test_a_heartbeat_renews_the_time_and_adds_nothing(path: Path, following: Following) -> None:
    clock = Clock()
    with reopen(str(path), clock) as ledger:
        size = ledger.size
        for passed in (HOUR, 2 * HOUR, 90 * 24 * HOUR):
            clock.now = START + passed + 0.7
            text, time = ledger.heartbeat()
            assert time == START + passed and ledger.latest() == text and ledger.size == size
            assert following.look(clock.now) == {1} and following.follower.time == time
        lines = text.partition("\n\n")[2].splitlines()
        assert len(lines) == 2  # the newest takes the place of the last
        check_cosignature(lines[1], text.partition("\n\n")[0] + "\n", LEDGER.public.x, time)
        assert verify(path, now=int(clock.now), signatures=False).verified
        clock.now -= 60
        with raises_code("ledger.clock-behind"):
            ledger.heartbeat()


def test_a_heartbeat_covers_what_was_not_signed_yet(path: Path, following: Following) -> None:
    with reopen(str(path), Clock(START + HOUR)) as ledger:
        withdraw(ledger, 2, sign=False)
        text, _ = ledger.heartbeat()
        assert parse_checkpoint(text)[0].size == ledger.size
    assert following.look() == {1, 2} and following.unsigned == set()


def test_a_witness_gives_a_heartbeat_without_the_key_of_the_ledger(path: Path, following: Following) -> None:
    with Ledger.open(path, None, clock=Clock(START + HOUR)) as ledger:
        ledger.heartbeat(WITNESS)
        for stranger in (OTHER, GOVERNING, LEDGER):
            with raises_code("ledger.key-may-not-cosign"):
                ledger.heartbeat(stranger)
        with raises_code("ledger.opened-without-key"):
            ledger.heartbeat()
    following.look()
    assert following.follower.time == START + HOUR


def test_a_heartbeat_of_a_replaced_key_counts_up_to_its_end(path: Path) -> None:
    cosigned_by_hand(path, SECRETS["ledger"], ORIGIN, START + HOUR)
    clock = Clock(START + 2 * HOUR)
    with reopen(str(path), clock) as ledger:
        named = Key(name=ORIGIN, x=OTHER.public.x, role=Role.LEDGER)
        rotate = KeyEvent(change=KeyChange.ROTATE, key=named, target=LEDGER.public.id, effective=START + 2 * HOUR)
        ledger.append([authorised(ledger, rotate)])
        ledger.checkpoint()
        clock.now += HOUR
        with raises_code("ledger.key-may-not-sign"):
            ledger.heartbeat()
    made = Following(path)
    cosigned_by_hand(path, SECRETS["ledger"], ORIGIN, START + 3 * HOUR)  # by its thief
    made.look(clock.now)
    assert made.follower.time == START + 2 * HOUR  # the leaf of the rotation
    cosigned_by_hand(path, SECRETS["other"], ORIGIN, START + 3 * HOUR)
    made.look(clock.now)
    assert made.follower.time == START + 3 * HOUR


@pytest.mark.parametrize("by", ["ledger", "witness"])
def test_a_heartbeat_refuses_a_ledger_that_was_rolled_back(path: Path, tmp_path: Path, by: str) -> None:
    """By what is kept beside the key, of a witness too."""
    mine = making.key(by)
    mine.save(tmp_path / "mine.key", None)
    backup, fork = copied(path), copied(path, "fork.db")
    with reopen(str(path)) as ledger:
        withdraw(ledger, 2)
    with reopen(str(fork)) as ledger:
        withdraw(ledger, 4)

    def beat(where: Path) -> str:
        with Ledger.open(where, mine, clock=Clock(START + HOUR)) as ledger:
            return ledger.heartbeat(None if by == "ledger" else mine)[0]

    size = parse_checkpoint(beat(path))[0].size
    assert parse_checkpoint(beat(path))[0].size == size
    for other in (backup, fork):
        with reopen(str(other)) as ledger:
            before = ledger.latest()
            withdraw(ledger, 3, sign=False)
        with raises_code("ledger.older-than-kept"):
            beat(other)
        with Ledger.open(other) as ledger:
            assert ledger.latest() == before  # nothing was signed over the other history


def test_a_failed_look_changes_nothing(path: Path, following: Following) -> None:
    with reopen(str(path)) as ledger:
        withdraw(ledger, 2)

    def fail(signed: Any, unsigned: Any) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        following.follower.look(fail, START)
    assert following.look() == {1, 2}
