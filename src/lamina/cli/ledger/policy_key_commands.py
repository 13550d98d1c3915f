"""`lamina ledger policy, key`: the policy in force, and the keys of a ledger."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.cli.keys import field_text
from lamina.cli.ledger.governing_commands import (
    DaysOption,
    KeysOption,
    ProposeOption,
    keys_at_hand,
    make_change,
    outcome,
)
from lamina.cli.open_ledger import open_ledger
from lamina.cli.options import JsonOption, LedgerArgument, PassphraseOption, argument, option
from lamina.cli.terminal import columns, existing_ledger, print_answer, print_json, print_line
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
from lamina.sign.keys import PublicKey, format_utc, parse_time

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


def policy(
    ledger: LedgerArgument,
    file: Annotated[
        Path | None, argument("POLICY", "policy.toml to adopt; without it: show the policy in force")
    ] = None,
    key: KeysOption = None,
    dry_run: Annotated[bool, option("show what would change, and change nothing", "--dry-run")] = False,
    propose: ProposeOption = None,
    days: DaysOption = 7,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
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
        raise typer.BadParameter("give policy.toml", param_hint="POLICY")
    if file is not None and not file.is_file():
        raise typer.BadParameter(f"there is no policy '{file}'", param_hint="POLICY")
    if dry_run and propose:
        raise typer.BadParameter("give --dry-run or --propose, not both", param_hint="--dry-run")
    with open_ledger(ledger) as book:
        before, header = policy_in_force(book), book.header
        contract = None if file is None else _terms_of_policy(book, file)
    if contract is None:
        _print_policy(ledger, before, header, as_json)
        return
    change = contract.change(before)
    result: dict[str, Any] = {"ledger": printable_location(ledger), "changed": False, "checkpoint": None}
    if change is not None and not dry_run:
        keys = keys_at_hand(ledger, key or (), passphrase_file)
        _, result = make_change(ledger, lambda book: contract.change(policy_in_force(book)), keys, propose, days)
    _print_change(result, before, change, contract.delta, as_json)


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


def _print_policy(ledger: str, found: RecordedPolicy, header: Header, as_json: bool) -> None:
    if as_json:
        terms = {"origin": header.origin, "delta": header.delta, "accountant": header.accountant}
        print_json({"ledger": printable_location(ledger), **terms, **policy_json(found, header.delta)})
        return
    clip, noise = amount_or_none(found.floors.clip_norm), amount_or_none(found.floors.noise_multiplier)
    print_line(f"{header.origin}, {header.accountant} at δ = {header.delta:g}")
    print_line(f"floors: clip norm {clip}, noise multiplier {noise}")
    rows = [["class", "clip norm ≤", "noise multiplier ≥", "ε ≤", "contributions", "depth"]]
    for each in found.presets:
        clip = "public" if each.public else amount_or_none(each.clip_norm)
        noise = "-" if each.public else amount_or_none(each.noise_multiplier)
        people = "-" if each.population is None else f"{each.population:,}"
        rows.append([each.cls, clip, noise, _class_epsilon(each, header.delta), people, each.profile])
    figures = columns([row[:-1] for row in rows]).split("\n")
    print_line("\n".join(f"{line}  {row[-1]}" for line, row in zip(figures, rows, strict=True)))
    for each in found.presets:
        if each.risk is not None:
            print_line(f"risk of {each.cls}: {each.risk}")


def _class_epsilon(preset: ClassBounds, delta: float) -> str:
    """The ε over all runs that the policy promises the class."""
    if preset.public:
        return "-"
    return format_epsilon(signed_spend(preset.noise_multiplier, delta)) if preset.noise_multiplier else "no bound"


def _print_change(
    result: dict[str, Any], before: RecordedPolicy, change: PolicyChange | None, delta: float, as_json: bool
) -> None:
    lines = [] if change is None else policy_differences(before, change, delta)
    less = [] if change is None else loosened(before.floors, before.presets, change.floors, change.presets)
    done = outcome(result) if change is not None else "this policy is already in force: nothing changes"
    needs = "; it needs two governing keys" if less and not result["changed"] else ""
    text = "\n".join([*(f"  {line}" for line in lines), *(f"  protects less: {each}" for each in less), done + needs])
    print_answer({"signatures": [], **result, "differences": lines, "looser": less}, text, as_json)


_ROLE_BY_NAME = {role.name.lower(): role for role in Role}
_KEYS_TAKEN = {"list": 0, "add": 1, "rotate": 2, "revoke": 1, "enrol": 1}  # of keys that each takes
_MIN_ID_DIGITS = 8  # hex digits of an id that are enough to name a key


def key(
    ledger: LedgerArgument,
    action: Annotated[
        str, argument("ACTION", "list, add, rotate, revoke or enrol", choices=list(_KEYS_TAKEN))
    ] = "list",
    names: Annotated[
        list[str] | None,
        argument("KEY", "add: NEW.pub; rotate: OLD NEW.pub; revoke: OLD, by id, name or file; enrol: keys.json"),
    ] = None,
    role: Annotated[str | None, option(f"with add: {', '.join(_ROLE_BY_NAME)}", choices=_ROLE_BY_NAME)] = None,
    name: Annotated[
        str | None, option("name of the new key; default: the ledger's, the old key's, or that of the file")
    ] = None,
    at: Annotated[str | None, option("from then on; default: now", metavar="TIME")] = None,
    key: KeysOption = None,
    propose: ProposeOption = None,
    days: DaysOption = 7,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
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
    given = names or []
    if action not in _KEYS_TAKEN:
        raise typer.BadParameter(f"{action!r} is not one of {', '.join(_KEYS_TAKEN)}", param_hint="ACTION")
    if len(given) != _KEYS_TAKEN[action]:
        takes = {"list": "no key", "add": "NEW.pub", "rotate": "OLD NEW.pub", "revoke": "OLD", "enrol": "keys.json"}
        raise typer.BadParameter(f"{action} takes {takes[action]}", param_hint="KEY")
    if (action == "add") != (role is not None) or (role is not None and role not in _ROLE_BY_NAME):
        raise typer.BadParameter(f"with add, one of {', '.join(_ROLE_BY_NAME)}; else none", param_hint="--role")
    if action == "list":
        with open_ledger(ledger) as book:
            _print_keys(ledger, book, as_json)
        return
    existing_ledger(ledger)

    def decide(book: Ledger) -> KeyEvents | None:
        when = book.now() if at is None else parse_time(at)
        events = _key_events(book, action, given, role, name, when)
        return KeyEvents(events=tuple(events)) if events else None

    keys = keys_at_hand(ledger, key or (), passphrase_file)
    record, result = make_change(ledger, decide, keys, propose, days)
    _print_events(ledger, () if record is None else record.events, result, as_json)


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


def _print_keys(ledger: str, book: Ledger, as_json: bool) -> None:
    parties, now = book.parties(), book.reading_time()
    found = [(each, parties.problem_with(each.id, now)) for each in parties.all()]
    keys = [{**_key_json(each), "counts": wrong is None, "why_not": wrong} for each, wrong in found]
    rows = [["id", "role", "name", "state"]]
    rows += [[each["id"][:16], each["role"], each["name"], each["why_not"] or "counts"] for each in keys]
    machine = {"ledger": printable_location(ledger), "origin": book.origin, "keys": keys}
    print_answer(machine, columns(rows, left=4), as_json)


def _key_json(found: Key) -> dict[str, Any]:
    return {"id": found.id.hex(), "name": found.name, "role": found.role.name.lower(), "x": found.x.hex()}


def _print_events(ledger: str, events: Sequence[KeyEvent], result: dict[str, Any], as_json: bool) -> None:
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
    print_answer({**result, "events": told}, "\n".join(lines), as_json)
