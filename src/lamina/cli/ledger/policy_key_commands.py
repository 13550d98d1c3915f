"""`lamina ledger policy, key`: the policy in force, and the keys of a ledger."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina import cbor
from lamina.admit import keys as files
from lamina.admit.keys import PrivateKey, PublicKey, format_utc, parse_time
from lamina.cli.keys import field_text
from lamina.cli.open_ledger import open_ledger
from lamina.cli.terminal import (
    JsonOption,
    KeyOption,
    LedgerArgument,
    OutputOption,
    PassphraseOption,
    argument,
    columns,
    existing_ledger,
    open_private_key,
    option,
    print_answer,
    print_json,
    print_line,
)
from lamina.errors import EncodingError, LedgerError
from lamina.ledger import show
from lamina.ledger import signed_checkpoint as notes
from lamina.ledger.corpus_terms import CorpusTerms, adopt_policy, ledger_key_path, policy_in_force
from lamina.ledger.governance_records import (
    Header,
    Key,
    KeyChange,
    KeyEvent,
    PartySignature,
    PolicyChange,
    Preset,
    Role,
    loosened,
)
from lamina.ledger.key_state import KeyState
from lamina.ledger.schema import pluralize, schema_of
from lamina.ledger.show import epsilon_or_none, format_epsilon
from lamina.ledger.spending import signed_spend
from lamina.ledger.store.sqlite import is_postgres_url, printable_location
from lamina.ledger.writer import Ledger
from lamina.plan.policy import Policy as PolicyFile

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


_MAX_FILE_BYTES = 1 << 20
_SIGNATURE_BYTES = 64
_POLICY_SIGNERS = (Role.LEDGER, Role.AUDITOR)


def policy(
    ledger: LedgerArgument,
    file: Annotated[
        Path | None, argument("POLICY", "policy.toml to adopt; without it: show the policy in force")
    ] = None,
    key: Annotated[list[Path] | None, option("private key that signs; repeatable", "--key", metavar="FILE")] = None,
    dry_run: Annotated[bool, option("show what would change, and change nothing", "--dry-run")] = False,
    propose: Annotated[
        Path | None, option("write the proposal for others to sign; change nothing", metavar="FILE")
    ] = None,
    sign: Annotated[
        Path | None, option("as an auditor, with --key: show a proposal and sign it", metavar="FILE")
    ] = None,
    signature: Annotated[list[Path] | None, option("a signature made with --sign; repeatable", metavar="FILE")] = None,
    output: OutputOption = None,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Adopt a policy: its floors and classes apply to all admissions and runs from now on.

    A stricter policy, or a new class, needs only the ledger's key. A policy that protects less (a floor or a noise
    multiplier falls, a clip norm grows, a class becomes public or reaches more layers) needs two signatures, by
    different keys that the ledger lists as its own or as an auditor's.

    If the auditor is elsewhere: --propose writes the message. The auditor, with a copy of the ledger, reads and signs it
    with --sign (64 bytes, Ed25519; openssl pkeyutl -rawin makes the same). --signature takes that file.

    Classes that the policy does not name stay as they are. Origin, accountant and δ of a ledger never change.

    Examples:

      lamina ledger policy ledger.db
      lamina ledger policy ledger.db policy.toml --dry-run
      lamina ledger policy ledger.db policy.toml --key ledger.key
      lamina ledger policy ledger.db policy.toml --propose change.msg
      lamina ledger policy copy.db --sign change.msg --key auditor.key -o auditor.sig
      lamina ledger policy ledger.db policy.toml --key ledger.key --signature auditor.sig
    """
    _check_options(file, key or [], dry_run, propose, sign, signature or [], output)
    keys = [open_private_key(path, passphrase_file) for path in key or ()]
    if sign is not None:
        _sign_proposal(ledger, sign, keys[0], output or sign.with_name(f"{sign.name}.sig"), as_json)
        return
    with open_ledger(ledger) as book:
        before = policy_in_force(book)
        if file is None:
            _print_policy(ledger, before, book.header, as_json)
            return
        contract = _terms_of_policy(book, file)
        change = contract.change(before)
        signatures = [] if change is None else _signatures(book, change, keys, signature or [])
        parties = book.parties()
    result: dict[str, Any] = {"ledger": printable_location(ledger), "changed": False, "checkpoint": None}
    if change is not None and propose is not None:
        files.replace_file(propose, change.message(contract.origin), "the proposal", mode=0o644)
        result["proposal"] = str(propose)
    elif change is not None and not dry_run:
        with open_ledger(ledger, signer=_checkpoint_signer(keys, parties, printable_location(ledger))) as book:
            book.check_signs()
            result["changed"] = adopt_policy(book, contract, tuple(signatures))
            result["checkpoint"] = book.latest()
    _print_change(result, before, change, signatures, contract.delta, as_json)


def _check_options(
    file: Path | None, keys: Sequence[Path], dry_run: bool, propose: Path | None, sign: Path | None,
    signatures: Sequence[Path], output: Path | None,
) -> None:  # fmt: skip
    """Refuse options that do not go together."""
    change = bool(propose or dry_run or signatures)
    for wrong, hint, problem in (
        (sign and (file or change), "--sign", "takes only --key, --output and --passphrase-file"),
        (sign and len(keys) != 1, "--key", "give the one key that signs"),
        (output and not sign, "--output", "is for --sign"),
        (not (sign or file) and (keys or change), "POLICY", "give policy.toml"),
        (file and not file.is_file(), "POLICY", f"there is no policy '{file}'"),
        (dry_run and propose, "--dry-run", "give --dry-run or --propose, not both"),
        (file and not (keys or dry_run or propose), "--key", "give the ledger's key; or --dry-run, or --propose"),
    ):
        if wrong:
            raise typer.BadParameter(problem, param_hint=hint)


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


def _signatures(
    book: Ledger, change: PolicyChange, keys: Sequence[PrivateKey], given: Sequence[Path]
) -> list[PartySignature]:
    """Signatures by these keys, and those in files, one per key."""
    message, parties, now = change.message(book.origin), book.parties(), book.now()
    found = {}
    for each in keys:
        _check_may_sign(parties, each, now)
        found[each.public.id] = each.sign(message)
    for path in given:
        data = files.read_small(path, "the signature", most=_MAX_FILE_BYTES)
        who = [
            party.id
            for party in parties.all()
            if party.role in _POLICY_SIGNERS and len(data) == _SIGNATURE_BYTES and party.public.verify(message, data)
        ]
        if not who:
            problem = f"'{path}' is not a signature of this change by a key of the ledger or an auditor"
            remedy = "write the proposal again (--propose), and have that one signed"
            raise LedgerError("cli.signature-not-valid", problem, remedy)
        found[who[0]] = data
    return [PartySignature(key=kid, signature=made) for kid, made in found.items()]


def _check_may_sign(parties: KeyState, key: PrivateKey, now: int) -> None:
    known = parties.get(key.public.id)
    if known is None or known.role not in _POLICY_SIGNERS:
        role = "is not one of the ledger" if known is None else f"is for {known.role.name.lower()}"
        problem = f"key {key.public.name[:16]} {role}, and cannot sign a policy"
        remedy = "give the ledger's own or an auditor's key: lamina ledger key LEDGER lists them"
        raise LedgerError("cli.key-cannot-sign-policy", problem, remedy)
    if (wrong := parties.problem_with(key.public.id, now)) is not None:
        raise LedgerError(
            "cli.key-not-valid-now", f"key {key.public.name[:16]} {wrong}", "give a key that is valid now"
        )


def _checkpoint_signer(keys: Sequence[PrivateKey], parties: KeyState, name: str) -> PrivateKey:
    """The key that signs checkpoints of the ledger."""
    for each in keys:
        if (known := parties.get(each.public.id)) is not None and known.role is Role.LEDGER:
            return each
    raise LedgerError(
        "cli.ledger-key-missing", f"none of the keys signs checkpoints of {name}", "give the ledger's own key too"
    )


def _sign_proposal(ledger: str, path: Path, key: PrivateKey, output: Path, as_json: bool) -> None:
    """Sign a proposal as an auditor, and print how it differs from the policy in force."""
    data = files.read_small(path, "the proposal", most=_MAX_FILE_BYTES)
    with open_ledger(ledger) as book:
        change = _read_proposal(path, data, book.origin)
        before = policy_in_force(book)
        _check_may_sign(book.parties(), key, book.now())
        delta = book.header.delta
    files.write_new(output, key.sign(data), "the signature", mode=0o644)
    result = {"ledger": printable_location(ledger), "signature": str(output), "key": key.public.name}
    _print_change(result, before, change, [], delta, as_json)


def _read_proposal(path: Path, data: bytes, origin: str) -> PolicyChange:
    try:
        named, body = cbor.decode(data.partition(b"\n")[2], max_size=_MAX_FILE_BYTES)
        found = schema_of(PolicyChange).from_cbor(body)
        whole = dataclasses.replace(found, signatures=()).message(str(named)) == data
    except (EncodingError, TypeError, ValueError):
        whole = False
    if not whole:
        problem = f"'{path}' is not a proposal of a policy"
        raise LedgerError("cli.policy-proposal-malformed", problem, "write one with --propose")
    if named != origin:
        problem = f"'{path}' is for the ledger {str(named)[:80]!r}, this is {origin!r}"
        raise LedgerError("cli.proposal-of-other-ledger", problem, "give its ledger")
    assert isinstance(found, PolicyChange)
    return found


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


def _class_epsilon(preset: Preset, delta: float) -> str:
    """The ε over all runs that the policy promises the class."""
    if preset.public:
        return "-"
    return format_epsilon(signed_spend(preset.noise_multiplier, delta)) if preset.noise_multiplier else "no bound"


def _print_change(
    result: dict[str, Any], before: RecordedPolicy, change: PolicyChange | None, signatures: Sequence[PartySignature],
    delta: float, as_json: bool,
) -> None:  # fmt: skip
    lines = [] if change is None else policy_differences(before, change, delta)
    less = [] if change is None else loosened(before.floors, before.presets, change.floors, change.presets)
    if change is None:
        done = "this policy is already in force: nothing changes"
    elif result.get("changed"):
        done = f"adopted, with {pluralize(len(signatures), 'signature')}, and covered by a checkpoint"
    elif "signature" in result:
        done = f"{result['signature']}: signed by {result['key'][:16]}; return it for --signature"
    elif path := result.get("proposal"):
        done = f"{path}: have it signed with lamina ledger policy LEDGER --sign {path} --key KEY"
    else:
        done = "nothing was changed" + ("; it needs the signatures of two parties" if less else "")
    text = "\n".join([*(f"  {line}" for line in lines), *(f"  protects less: {each}" for each in less), done])
    signers = [each.key.hex() for each in signatures]
    print_answer({**result, "differences": lines, "looser": less, "signatures": signers}, text, as_json)


_ROLE_BY_NAME = {role.name.lower(): role for role in Role}
_KEYS_TAKEN = {"list": 0, "add": 1, "rotate": 2, "revoke": 1}  # of keys that each takes
_MIN_ID_DIGITS = 8  # hex digits of an id that are enough to name a key


def key(
    ledger: LedgerArgument,
    action: Annotated[str, argument("ACTION", "list, add, rotate or revoke", choices=list(_KEYS_TAKEN))] = "list",
    names: Annotated[
        list[str] | None, argument("KEY", "add: NEW.pub; rotate: OLD NEW.pub; revoke: OLD, by id, name or file")
    ] = None,
    role: Annotated[str | None, option(f"with add: {', '.join(_ROLE_BY_NAME)}", choices=_ROLE_BY_NAME)] = None,
    name: Annotated[
        str | None, option("name of the new key; default: the ledger's, the old key's, or that of the file")
    ] = None,
    at: Annotated[str | None, option("from then on; default: now", metavar="TIME")] = None,
    key: KeyOption = None,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List, add, rotate or revoke keys of a ledger. Changes need --key, the ledger's own key, which signs them.

    add: the key is valid from now on, in one role. A ledger key signs checkpoints, a contributor attestations, an
    auditor aggregates and looser policies, a witness checkpoints that it has seen, a release key manifests and
    certificates.

    rotate: a new key takes over in the same role. What the old one signed stays valid. If it is the ledger's own, the
    old key signs the checkpoint of this change now, and nothing after.

    revoke: from now on nothing that the key signed is valid, whatever its date. The ledger's last key cannot be revoked:
    rotate first, and revoke the old key with the new one.

    Examples:

      lamina ledger key ledger.db
      lamina ledger key ledger.db add auditor.pub --role auditor --name auditor.example --key ledger.key
      lamina ledger key ledger.db rotate 3f9c21aa new.pub --key ledger.key
      lamina ledger key ledger.db revoke auditor.example --key ledger.key
    """
    given = names or []
    if action not in _KEYS_TAKEN:
        raise typer.BadParameter(f"{action!r} is not one of {', '.join(_KEYS_TAKEN)}", param_hint="ACTION")
    if len(given) != _KEYS_TAKEN[action]:
        takes = {"list": "no key", "add": "NEW.pub", "rotate": "OLD NEW.pub", "revoke": "OLD"}[action]
        raise typer.BadParameter(f"{action} takes {takes}", param_hint="KEY")
    if (action == "add") != (role is not None) or (role is not None and role not in _ROLE_BY_NAME):
        raise typer.BadParameter(f"with add, one of {', '.join(_ROLE_BY_NAME)}; else none", param_hint="--role")
    if action == "list":
        with open_ledger(ledger) as book:
            _print_keys(ledger, book, as_json)
        return
    if key is None:
        raise typer.BadParameter("give the ledger's own key, which signs the change", param_hint="--key")
    existing_ledger(ledger)
    private = open_private_key(key, passphrase_file)
    with open_ledger(ledger, signer=private) as book:
        event = _key_event(book, action, given, role, name, book.now() if at is None else parse_time(at))
        if event.change is KeyChange.REVOKE and event.target == private.public.id:
            problem = f"key {private.public.name[:16]} cannot sign its own revocation"
            remedy = "rotate to another key, and revoke this one with the new key"
            raise LedgerError("cli.key-revokes-itself", problem, remedy)
        book.check_signs([event])
        (seq,) = book.append([event])
        size = notes.parse_checkpoint(book.checkpoint())[0].size
    _print_event(ledger, seq, size, event, as_json)


def _key_event(book: Ledger, action: str, given: list[str], role: str | None, name: str | None, at: int) -> KeyEvent:
    parties = book.parties()
    if action == "add":
        kind = _ROLE_BY_NAME[str(role)]
        called = name or (book.origin if kind is Role.LEDGER else Path(given[0]).stem)
        new = Key(name=called, x=PublicKey.load(given[0]).x, role=kind)
        return KeyEvent(change=KeyChange.ADD, key=new, effective=at)
    old = find_ledger_key(parties, given[0])
    if action == "revoke":
        return KeyEvent(change=KeyChange.REVOKE, target=old.id, effective=at)
    new = Key(name=name or old.name, x=PublicKey.load(given[1]).x, role=old.role)
    return KeyEvent(change=KeyChange.ROTATE, key=new, target=old.id, effective=at)


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


def _print_event(ledger: str, seq: int, size: int, event: KeyEvent, as_json: bool) -> None:
    if as_json:
        facts = {"ledger": printable_location(ledger), "index": seq, "change": event.change.name.lower()}
        keys = {"key": event.key and _key_json(event.key), "target": event.target and event.target.hex()}
        print_json({**facts, **keys, "effective": format_utc(event.effective), "checkpoint": size})
        return
    new = "" if event.key is None else f" {event.key.id.hex()[:16]} ({event.key.role.name.lower()} {event.key.name})"
    old = "" if event.target is None else f" {'for ' if event.key else ''}{event.target.hex()[:16]}"
    print_line(f"leaf {seq}: {event.change.name.lower()}{new}{old} from {format_utc(event.effective)}")
    print_line(f"signed, in the checkpoint of {pluralize(size, 'leaf', 'leaves')}")
    if event.change is KeyChange.ROTATE and event.key is not None and event.key.role is Role.LEDGER:
        hint = ""
        if not is_postgres_url(ledger) and (path := ledger_key_path(ledger)).exists():
            hint = f", and replace {os.path.relpath(path)}, where runs look for it"
        print_line(f"the new key signs from now on: give it to everyone who admits, trains and signs{hint}")
