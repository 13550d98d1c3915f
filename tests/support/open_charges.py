"""What the store keeps of open charges, and a run's folder of its open segment: the only tests' code that knows how.

Tests that attack these rows, or ask for what they hold, go through this file; docs/ledger-format.md has the format.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyless import rows_of

from lamina.account.charges import Account, Charge, stored_charge
from lamina.ledger.attempts import Attempt
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import SegmentOutcome
from lamina.ledger.store.rows import RESERVATION_SEGMENT, WHOLE_BUDGET_SEGMENT, RunHold, RunRow, Store, StoreWriter
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import StepPlan
from lamina.run.run import charged_events, most_occurrences
from lamina.run.run_record import ATTEMPT_FILE, RECEIPTS_FILE, RUN_FILE, AttemptFile, AttemptOpened, Receipts
from lamina.sign.keys import PrivateKey

# ---------------------------------------------------------------------------------------- rows of the store


@dataclass(frozen=True)
class OpenCharge:
    """A charge or reservation that no leaf records. `kind` is "reserve", "budget" or "attempt".

    span   first and last step of an attempt; None where the store does not say
    """

    run: str
    kind: str
    segment: int
    generation: int
    nonce: bytes
    charges: tuple[Charge, ...]
    scales: dict[str, float]
    factors: dict[str, float]
    span: tuple[int, int] | None

    @property
    def steps(self) -> dict[str, int]:
        """The charged steps of each account."""
        return {str(each.account): each.event.steps for each in self.charges}


def open_charges(of: Store | LedgerReader | str | Path, run: str | None = None) -> list[OpenCharge]:
    """Return the charges and reservations that no leaf records, of one run or of all."""
    if isinstance(of, str | Path):
        with LedgerReader.read_only(of) as ledger:
            return open_charges(ledger, run)
    store = of.store if isinstance(of, LedgerReader) else of
    with store.read() as rows:
        return [_decoded(each) for each in rows.holds(None if run is None else bytes.fromhex(run))]


def _decoded(hold: RunHold) -> OpenCharge:
    kinds = {RESERVATION_SEGMENT: "reserve", WHOLE_BUDGET_SEGMENT: "budget"}
    held = Attempt.decode(hold)
    span = (held.first, held.last) if held.last else None
    kind = "attempt" if hold.attempt else kinds.get(hold.segment, "budget")
    place = hold.run.hex(), kind, hold.segment, hold.generation, hold.nonce
    return OpenCharge(*place, held.charges, dict(held.scales), dict(held.factors), span)


def put_open_charge(
    of: Ledger | StoreWriter, run: bytes, segment: int | None = 0, *, leaf: int | None = None, body: bytes = b""
) -> None:
    """Insert a row without a charge, past the ledger: of an attempt at a segment; of a reservation if that is None."""
    row = RunHold(run, RESERVATION_SEGMENT if segment is None else segment, 0, bytes(16), leaf, body)
    if isinstance(of, Ledger):
        with of.store.write() as rows:
            rows.put_hold(row)
    else:
        of.put_hold(row)


def put_run(of: Ledger | StoreWriter, run: bytes, label: str, day: int = 0) -> None:
    """Insert a run that is active, past the ledger."""
    if isinstance(of, Ledger):
        with of.store.write() as rows:
            rows.put_run(RunRow(run, label, day, False))
    else:
        of.put_run(RunRow(run, label, day, False))


def replace_open_body(ledger: Ledger, body: bytes) -> None:
    """Replace what the only open row says, past the ledger."""
    with ledger.store.write() as rows:
        (row,) = rows.holds()
        rows.put_hold(row._replace(body=body))


# ---------------------------------------------------------------------------------------- attacks, as SQL

TABLES = ("held", "terms", "run", "meta")  # what may be spent, and the head that signs it

DELETE_ALL = "DELETE FROM held"
DELETE_OPEN = "DELETE FROM held WHERE leaf IS NULL"
DELETE_ATTEMPTS = "DELETE FROM held WHERE segment >= 0"
DELETE_RESERVATIONS = "DELETE FROM held WHERE segment < 0"
DELETE_LIMITS = "DELETE FROM terms"
DELETE_RUNS = "DELETE FROM run"
DELETE_HEAD = "DELETE FROM meta WHERE name = 'open'"
CLOSE_ALL = "UPDATE held SET leaf = 1"
CLOSE_OPEN = "UPDATE held SET leaf = 1 WHERE leaf IS NULL"
CALL_RESERVED = "UPDATE held SET segment = -1"
CALL_BUDGETS = "UPDATE held SET segment = 4611686018427387904"
CALL_GENERATION_7 = "UPDATE held SET generation = 7 WHERE leaf IS NULL"
COPY_ALL = "INSERT INTO held SELECT run, segment + 7, generation, nonce, leaf, body FROM held"
FINISH_RUNS = "UPDATE run SET finished = 1"
RENAME_RUNS = "UPDATE run SET label = 'another'"
POSTDATE_RUNS = "UPDATE run SET day = 30000"
SEGMENT_AS_TEXT = "UPDATE held SET segment = 'many'"
BODY_AS_TEXT = "UPDATE held SET body = replace(body, x'05', x'01') WHERE segment >= 0"
CALL_FUNCTION = "ALTER TABLE held ADD CHECK (public.fine(run))"


def delete_attempts_at(segment: int) -> str:
    return f"DELETE FROM held WHERE leaf IS NULL AND segment = {segment}"


def insert_row(*, nonce: str = "zeroblob(16)", body: str = "x'ff'", run: str = "zeroblob(16)") -> str:
    """An open attempt, of expressions of SQLite."""
    return f"INSERT INTO held VALUES ({run}, 0, 0, {nonce}, NULL, {body})"


def change_charged_steps(where: str) -> None:
    """Make every attempt of 5 steps one of a single step."""
    for (body,) in set(rows_of(where, "SELECT body FROM held WHERE segment >= 0")):
        rows_of(where, "UPDATE held SET body = ? WHERE body = ?", body.replace(b"\x05", b"\x01"), body)


def read_head(where: str) -> bytes | None:
    """Return the signed head over the open rows."""
    found = rows_of(where, "SELECT value FROM meta WHERE name = 'open'")
    return bytes(found[0][0]) if found else None


def write_head(where: str, head: bytes) -> None:
    rows_of(where, "UPDATE meta SET value = ? WHERE name = 'open'", head)


# ---------------------------------------------------------------------------------------- the signed head, by hand


def digest_of_open_rows(where: str) -> bytes:
    """Compute what the head signs, from docs/ledger-format.md."""
    columns, kept = "run, segment, generation, nonce, leaf, body", "leaf IS NULL OR octet_length(body) > 0"
    held = rows_of(where, f"SELECT {columns} FROM held WHERE {kept}")
    terms, runs = (
        rows_of(where, "SELECT account, body FROM terms"), rows_of(where, "SELECT id, label, day, finished FROM run")
    )  # fmt: skip
    parts = [f"{name} {len(rows)}".encode() for name, rows in (("held", held), ("terms", terms), ("run", runs))]
    for run, segment, generation, nonce, leaf, body in sorted(held, key=lambda row: row[:3]):
        parts += [run, _number(segment) + _number(generation), nonce + bytes([leaf is not None]), body]
    for account, body in sorted(terms):
        parts += [account.encode(), body]
    for id, label, day, finished in sorted(runs):
        parts += [id, label.encode(), _number(day) + bytes([bool(finished)])]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def signed_text(where: str, origin: str, counter: int, size: int, root: bytes) -> bytes:
    """What the signature of the head covers."""
    return f"lamina/open/1\n{origin}\n{counter}\n{size}\n".encode() + root + digest_of_open_rows(where)


def sign_open_rows(where: str, origin: str, key: PrivateKey, counter: int, size: int, root: bytes) -> None:
    """Put a head over the present rows into the store, made from docs/ledger-format.md."""
    signature = key.sign(signed_text(where, origin, counter, size, root))
    rows_of(where, DELETE_HEAD)
    head = counter.to_bytes(8, "big") + size.to_bytes(8, "big") + root + key.public.id + signature
    rows_of(where, "INSERT INTO meta (name, value) VALUES ('open', ?)", head)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


# ---------------------------------------------------------------------------------------- the folder of a run

SECRET_FILE = ATTEMPT_FILE  # of the files of a run, the one that holds the seed of the open segment
_RANDOM = ("nonce", "seed", "checkpoint", "membership", "data", "weights", "run", "files")


def has_begun(folder: Path) -> bool:
    """Whether a run was charged, or could have been, in this folder."""
    return (folder / RUN_FILE).exists()


def folder_state(folder: Path) -> bytes:
    """Return what the folder says of attempts: it is the same bytes if nothing was opened, closed or abandoned."""
    return (folder / ATTEMPT_FILE).read_bytes() + (folder / RECEIPTS_FILE).read_bytes()


def open_segment(folder: Path) -> tuple[tuple[int, int, bytes], bytes] | None:
    """Return segment, generation and nonce of the open attempt, and its seed; None if there is none."""
    opened = AttemptFile(folder).opened
    return None if opened is None or not opened.seed else (opened.key, opened.seed)


def attempts_in_folder(folder: Path) -> dict[tuple[int, int, bytes], str]:
    """Return how each charged attempt ended, as the run's folder has it: "open", "closed" or "abandoned"."""
    states = {each.key: each.outcome.name.lower() for each in Receipts(folder).attempts if each.outcome is not None}
    found = AttemptFile(folder)
    if found.opened is not None and not found.refused:
        states.setdefault(found.opened.key, "open")
    return states


def public_records(folder: Path) -> list[Any]:
    """Return what the folder keeps of attempts, without what is random by design."""
    opened = AttemptFile(folder).opened
    found = [next(iter(each.items())) for each in Receipts(folder).entries]
    if opened is not None:
        found.append(("opened", opened.to_plain()))
    ours = [(kind, plain) for kind, plain in found if kind in ("attempt", "opened")]
    return [[kind, {name: value for name, value in plain.items() if name not in _RANDOM}] for kind, plain in ours]


# ---------------------------------------------------------------------------------------- a run without a folder


def charge(**other: object) -> Charge:
    plain: dict[str, object] = {"cls": "sensitive", "sigma": 4.31, "q": 0.0128, "steps": 50, "delta": 1e-5}
    return stored_charge(**{"accountant": "pld", **plain, **other})  # type: ignore[arg-type]


def opened(segment: int, generation: int = 0, /, **other: object) -> AttemptOpened:
    """The same for the same numbers; any field may be given."""
    rng = random.Random(f"{segment} {generation}")
    digests = {name: rng.randbytes(32) for name in ("plan", "settings", "membership", "checkpoint", "data")}
    plain: dict[str, object] = {
        "segment": segment,
        "generation": generation,
        "nonce": rng.randbytes(16),
        "first": 50 * segment,
        "last": 50 * segment + 50,
        "world_size": 1,
        "threads": 2,
        "code": "lamina 0.1.0",
        "charges": (charge(), charge(cls="ärzte")),
        "eligibility": 7,
        "variance": (0.25, 1e-300),
        "scales": {"sensitive@c=1,z=2": 0.25},
        "seed": rng.randbytes(32),
        **digests,
    }
    return AttemptOpened(**{**plain, **other})  # type: ignore[arg-type]


class CappedRun:
    """The attempts of a run with capped occurrences, and what the next one is charged.

    `weights_from` are segment and generation of the attempt from which the present weights come.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan, self.attempts = plan, list[Attempt]()
        self.weights_from: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        return len(self.attempts)

    def due(self, first: int, last: int, name: str = "clinical") -> int:
        """Return how many events these steps add to the charges of an account."""
        most = most_occurrences(self, self.plan, first, last)  # type: ignore[arg-type]
        return max(0, most - charged_events(self, self.plan)[Account.parse(name)])  # type: ignore[arg-type]

    def open(self, segment: int, generation: int, **fields: Any) -> tuple[int, int, bytes]:
        """Charge an attempt; its segment, generation and nonce."""
        self.attempts.append(opened(segment, generation, plan=self.plan.digest(), **fields))
        return self.attempts[-1].key

    def close(self) -> None:
        self.attempts[-1] = replace(self.attempts[-1], outcome=SegmentOutcome.CLOSED)

    def abandon(self) -> None:
        self.attempts[-1] = replace(self.attempts[-1], outcome=SegmentOutcome.ABANDONED)
