"""`lamina ledger policy, key`: the policy in force, and the keys of a ledger."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamina.cli.command import LEDGER, Answer, argument, command, misuse, option, table, time_option
from lamina.cli.keys import field_text
from lamina.cli.ledger.governing_commands import DAYS, KEYS, PROPOSE, keys_at_hand, make_change, outcome
from lamina.cli.open_ledger import open_ledger
from lamina.cli.terminal import existing_ledger
from lamina.errors import LedgerError
from lamina.ledger import show
from lamina.ledger.admission_batch import missing_key_events
from lamina.ledger.corpus_terms import CorpusTerms, ledger_key_path, policy_in_force
from lamina.ledger.governance_records import (
    MAX_KEY_EVENTS,
    ClassBounds,
    Header,
    Key,
    KeyChange,
    KeyEvent,
    KeyEvents,
    PolicyChange,
    Role,
    loosened,
)
from lamina.ledger.key_state import KeyState
from lamina.ledger.show import describe_event, epsilon_or_none, format_epsilon
from lamina.ledger.spending import signed_spend
from lamina.ledger.store.sqlite import is_postgres_url, printable_location
from lamina.ledger.writer import Ledger
from lamina.plan.policy import Policy as PolicyFile
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PublicKey, format_utc

RecordedPolicy = Header | PolicyChange


def policy_differences(old: RecordedPolicy, new: RecordedPolicy, delta: float) -> list[str]:
    """One line for each figure that changes."""
    before, after = (_flat_policy(policy_json(each, delta)) for each in (old, new))
    return [
        f"{name}: {field_text(before.get(name))} → {field_text(after.get(name))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _flat_policy(found: dict[str, Any]) -> dict[str, Any]:
    """Figures by name: `class clinical, noise multiplier`."""
    tables = {"floor": found["floors"], **{f"class {name}": row for name, row in found["classes"].items()}}
    flat = {f"{name}, {key.replace('_', ' ')}": row[key] for name, row in tables.items() for key in row}
    return flat | {"what contributors sign": found["policy"][:16]}


def policy_json(policy: RecordedPolicy, delta: float) -> dict[str, Any]:
    """For --json: plain numbers; ε at most over all runs, null where there is no bound."""
    floors = policy.floors
    return {
        "floors": {"clip_norm": floors.clip_norm / 1e6, "noise_multiplier": floors.noise_multiplier / 1e6},
        "classes": {
            each.cls: {
                "clip_norm": each.clip_norm / 1e6,
                "noise_multiplier": each.noise_multiplier / 1e6,
                "epsilon": epsilon_or_none(signed_spend(z, delta)) if (z := each.noise_multiplier) else None,
                "risk": None if each.risk is None else str(each.risk),
                "public": each.public,
                "profile": each.profile,
                "population": each.population,
            }
            for each in policy.presets
        },
        "policy": policy.policy.hex(),
    }


def amount_or_none(micro: int) -> str:
    return show.format_micro(micro) if micro else "none"


@command(keys=True)
def policy(
    ledger: str = LEDGER,
    file: Path | None = argument("POLICY", "policy.toml to adopt; without it: show the policy in force", default=None),
    key: list[Path] = KEYS,
    dry_run: bool = option("show what would change, and change nothing"),
    propose: Path | None = PROPOSE,
    days: int = DAYS,
) -> Answer:
    """Adopt a policy: its floors and classes apply to all admissions and runs from now on.

    A governing key of the ledger authorises it. A policy that protects less (a floor or a noise multiplier falls, a clip
    norm or a risk bound grows, a class becomes public or reaches more layers) takes two of them.

    If their holders are elsewhere: --propose writes the change, each signs it with lamina ledger sign, and lamina ledger
    submit appends it. A ledger of your own has its governing key beside it, which is used without being asked for.

    Classes that the policy does not name stay as they are. Origin, accountant and δ of a ledger never change.

    Examples:

      lamina ledger policy ledger.db
      lamina ledger policy ledger.db policy.toml --dry-run
      lamina ledger policy ledger.db policy.toml --key owner.key --key ledger.key
      lamina ledger policy ledger.db policy.toml --propose change.msg
    """
    if file is None and (key or dry_run or propose):
        raise misuse("give policy.toml", "POLICY")
    if file is not None and not file.is_file():
        raise misuse(f"there is no policy '{file}'", "POLICY")
    if dry_run and propose:
        raise misuse("give --dry-run or --propose, not both", "--dry-run")
    with open_ledger(ledger) as book:
        before, header = policy_in_force(book), book.header
        contract = None if file is None else _terms_of_policy(book, file)
    if contract is None:
        return _policy_answer(ledger, before, header)
    change = contract.change(before)
    result: dict[str, Any] = {"ledger": printable_location(ledger), "changed": False, "checkpoint": None}
    if change is not None and not dry_run:
        keys = keys_at_hand(ledger, key)
        _, result = make_change(ledger, lambda book: contract.change(policy_in_force(book)), keys, propose, days)
    return _change_answer(result, before, change, contract.delta)


def _terms_of_policy(book: Ledger, file: Path) -> CorpusTerms:
    """The terms of the policy, if it is of this ledger's corpus."""
    contract, header = CorpusTerms.of_policy(PolicyFile.load(file)), book.header
    if contract.origin != header.origin:
        problem = f"'{file}' is the policy of {contract.origin!r}, the ledger is of {header.origin!r}"
        remedy = "give the ledger of this corpus: one ledger, one corpus"
        raise LedgerError("cli.policy-of-other-corpus", problem, remedy)
    if (contract.accountant, contract.delta) != (header.accountant, header.delta):
        raise LedgerError(
            "cli.policy-changes-accounting",
            f"'{file}' has {contract.accountant} at δ = {contract.delta:g}, the ledger {header.accountant} at "
            f"δ = {header.delta:g}, which cannot change",
            "set accountant and delta of [corpus] to the ledger's, or begin a ledger under another origin",
        )
    return contract


def _policy_answer(ledger: str, found: RecordedPolicy, header: Header) -> Answer:
    facts = {"ledger": printable_location(ledger), "origin": header.origin, "delta": header.delta}
    facts |= {"accountant": header.accountant, **policy_json(found, header.delta)}
    rows = [["class", "depth", "clip norm ≤", "noise multiplier ≥", "ε ≤", "contributions"]]
    for each in found.presets:
        amounts = [amount_or_none(each.clip_norm), amount_or_none(each.noise_multiplier)]
        people = "-" if each.population is None else f"{each.population:,}"
        bound = ["public", "-"] if each.public else amounts
        rows.append([each.cls, each.profile, *bound, _class_epsilon(each, header.delta), people])
    clip, noise = amount_or_none(found.floors.clip_norm), amount_or_none(found.floors.noise_multiplier)
    return Answer(
        facts,
        f"{header.origin}, {header.accountant} at δ = {header.delta:g}",
        f"floors: clip norm {clip}, noise multiplier {noise}",
        table(rows, left=2),
        *(f"risk of {each.cls}: {each.risk}" for each in found.presets if each.risk is not None),
    )


def _class_epsilon(preset: ClassBounds, delta: float) -> str:
    """The ε over all runs that the policy promises the class."""
    if preset.public:
        return "-"
    return format_epsilon(signed_spend(preset.noise_multiplier, delta)) if preset.noise_multiplier else "no bound"


def _change_answer(result: dict[str, Any], before: RecordedPolicy, change: PolicyChange | None, delta: float) -> Answer:
    lines = [] if change is None else policy_differences(before, change, delta)
    less = [] if change is None else loosened(before.floors, before.presets, change.floors, change.presets)
    done = outcome(result) if change is not None else "this policy is already in force: nothing changes"
    needs = "; it needs two governing keys" if less and not result["changed"] else ""
    told = [f"  {line}" for line in lines] + [f"  protects less: {each}" for each in less]
    return Answer({"signatures": [], **result, "differences": lines, "looser": less}, *told, done + needs)


_ROLE_BY_NAME = {role.name.lower(): role for role in Role}
_KEYS_TAKEN = {"list": 0, "add": 1, "rotate": 2, "revoke": 1, "enrol": 1}  # of keys that each takes
_MIN_ID_DIGITS = 8  # hex digits of an id that are enough to name a key


@command(keys=True)
def key(
    ledger: str = LEDGER,
    action: str = argument("ACTION", "list, add, rotate, revoke or enrol", choices=_KEYS_TAKEN, default="list"),
    names: list[str] = argument(
        "KEY", "add: NEW.pub; rotate: OLD NEW.pub; revoke: OLD, by id, name or file; enrol: keys.json", default=None
    ),
    role: str | None = option("with add: what it may sign", choices=_ROLE_BY_NAME),
    name: str | None = option("name of the new key; default: the ledger's, the old key's, or that of the file"),
    at: int | None = time_option("from then on; default: now"),
    key: list[Path] = KEYS,
    propose: Path | None = PROPOSE,
    days: int = DAYS,
) -> Answer:
    """List, add, rotate or revoke keys of a ledger. A governing key authorises a change.

    add: the key is valid from now on, in one role. A ledger key signs checkpoints, a contributor attestations, an
    auditor aggregates, a witness checkpoints that it has seen, a release key manifests and certificates, an operator
    withdrawals for contributors who asked in another way. A governing key
    authorises changes like this one; where two or more govern, two must agree on another.

    rotate: a new key takes over in the same role. What the old one signed stays valid. The ledger's own key may let
    another take over from itself: it signs that, the checkpoint of it, and nothing after.

    revoke: from now on nothing that the key signed is valid, whatever its date, and it never comes back.

    enrol: all contributors of a key ring, with its rotations and revocations, in one record.

    If the governing key is elsewhere: --propose, lamina ledger sign, lamina ledger submit. A ledger of your own has it
    beside it, and it is used without being asked for.

    Examples:

      lamina ledger key ledger.db
      lamina ledger key ledger.db add auditor.pub --role auditor --name auditor.example --key owner.key
      lamina ledger key ledger.db rotate 3f9c21aa new.pub --key ledger.key
      lamina ledger key ledger.db enrol keys.json --propose contributors.msg
    """
    if len(names) != _KEYS_TAKEN[action]:
        takes = {"list": "no key", "add": "NEW.pub", "rotate": "OLD NEW.pub", "revoke": "OLD", "enrol": "keys.json"}
        raise misuse(f"{action} takes {takes[action]}", "KEY")
    if (action == "add") != (role is not None):
        raise misuse(f"with add, one of {', '.join(_ROLE_BY_NAME)}; else none", "--role")
    if action == "list":
        with open_ledger(ledger) as book:
            return _keys_answer(ledger, book)
    existing_ledger(ledger)

    def decide(book: Ledger) -> KeyEvents | None:
        events = _key_events(book, action, names, role, name, book.now() if at is None else at)
        return KeyEvents(events=tuple(events)) if events else None

    record, result = make_change(ledger, decide, keys_at_hand(ledger, key), propose, days)
    return _events_answer(ledger, () if record is None else record.events, result)


def _key_events(
    book: Ledger, action: str, given: list[str], role: str | None, name: str | None, at: int
) -> list[KeyEvent]:
    parties = book.parties()
    if action == "enrol":
        ring = KeyRing.load(given[0])
        contributors = [each.id for each in ring if each.role == Role.CONTRIBUTOR.name.lower()]
        return missing_key_events(parties, ring, contributors)[:MAX_KEY_EVENTS]
    if action == "add":
        kind = _ROLE_BY_NAME[str(role)]
        called = name or (book.origin if kind is Role.LEDGER else Path(given[0]).stem)
        new = Key(name=called, x=PublicKey.load(given[0]).x, role=kind)
        return [KeyEvent(change=KeyChange.ADD, key=new, effective=at)]
    old = find_ledger_key(parties, given[0])
    if action == "revoke":
        return [KeyEvent(change=KeyChange.REVOKE, target=old.id, effective=at)]
    new = Key(name=name or old.name, x=PublicKey.load(given[1]).x, role=old.role)
    return [KeyEvent(change=KeyChange.ROTATE, key=new, target=old.id, effective=at)]


def find_ledger_key(parties: KeyState, name: str) -> Key:
    """A key of the ledger by its id (or the first digits), its name, or its file."""
    keys = parties.all()
    if Path(name).is_file():
        public = PublicKey.load(name)
        found = [each for each in keys if each.id == public.id]
    else:
        begins = name.lower() if len(name) >= _MIN_ID_DIGITS else "none"
        found = [each for each in keys if each.id.hex().startswith(begins)]
        found = found or [each for each in keys if each.name == name]
    if len(found) != 1:
        which = "no key" if not found else f"{len(found)} keys"
        problem = f"{name!r} means {which} of the ledger"
        remedy = f"give its id, or the first {_MIN_ID_DIGITS} hex digits or more: lamina ledger key LEDGER lists them"
        raise LedgerError("cli.key-not-found", problem, remedy)
    return found[0]


def _keys_answer(ledger: str, book: Ledger) -> Answer:
    parties, now = book.parties(), book.reading_time()
    found = [(each, parties.problem_with(each.id, now)) for each in parties.all()]
    keys = [{**_key_json(each), "counts": wrong is None, "why_not": wrong} for each, wrong in found]
    rows = [["id", "role", "name", "state"]]
    rows += [[each["id"][:16], each["role"], each["name"], each["why_not"] or "counts"] for each in keys]
    machine = {"ledger": printable_location(ledger), "origin": book.origin, "keys": keys}
    return Answer(machine, table(rows, left=4))


def _key_json(found: Key) -> dict[str, Any]:
    return {"id": found.id.hex(), "name": found.name, "role": found.role.name.lower(), "x": found.x.hex()}


def _events_answer(ledger: str, events: Sequence[KeyEvent], result: dict[str, Any]) -> Answer:
    told = [
        {
            "change": event.change.name.lower(),
            "key": event.key and _key_json(event.key),
            "target": event.target and event.target.hex(),
            "effective": format_utc(event.effective),
        }
        for event in events
    ]
    lines = [f"  {describe_event(event)}" for event in events]
    lines.append(outcome(result) if events else "the ledger says all of that already: nothing changes")
    rotated = any(each.change is KeyChange.ROTATE and each.key and each.key.role is Role.LEDGER for each in events)
    if rotated and result["changed"]:
        hint = ""
        if not is_postgres_url(ledger) and (path := ledger_key_path(ledger)).exists():
            hint = f", and replace {os.path.relpath(path)}, where runs look for it"
        lines.append(f"the new key signs from now on: give it to everyone who admits, trains and signs{hint}")
    return Answer({**result, "events": told}, *lines)
