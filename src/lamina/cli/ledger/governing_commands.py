"""`lamina ledger init, terms, sign, submit`: a ledger with an owner, and changes that its governing keys authorise.

Every change goes one way: it is proposed (a file with the bytes that are signed), signed by governing keys, wherever
they are, and submitted. With the keys at hand a command does all three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamina import validate
from lamina.cli.command import KEY, LEDGER, OUTPUT, Answer, argument, command, misuse, option
from lamina.cli.open_ledger import open_ledger
from lamina.cli.terminal import existing_ledger, open_private_key
from lamina.errors import EncodingError, LedgerError
from lamina.ledger.corpus_terms import CorpusTerms, about_at, governing_key_path, ledger_key_path, load_or_make_key
from lamina.ledger.governance_records import (
    GoverningRecord,
    Header,
    Key,
    KeyEvents,
    PartySignature,
    Role,
    TermsChange,
    WithdrawalRule,
    governing_message,
    parse_proposal,
    sign_header,
)
from lamina.ledger.key_state import G, GovernanceState, checkpoint_roots, signed_record
from lamina.ledger.schema import pluralize
from lamina.ledger.show import describe_about, describe_event, describe_rule, describe_terms, format_micro
from lamina.ledger.store.sqlite import is_postgres_url, ledger_exists, printable_location
from lamina.ledger.writer import DAY_SECONDS, Ledger
from lamina.plan.policy import Policy
from lamina.sign import keys as files
from lamina.sign.keys import PrivateKey, PublicKey, format_utc

KEYS = option("private key: governing keys authorise, the ledger's own signs the checkpoint; repeatable", "--key")
PROPOSE = option("write the change, for governing keys to sign elsewhere; change nothing", "--propose")
DAYS = option("days for which the proposal may be signed and submitted", "--days", default=7, min=1)
_MAX_FILE_BYTES = 1 << 20
_SIGNATURE_BYTES = 64


# ------------------------------------------------------------------------------ one way for every change


def keys_at_hand(ledger: str, given: Sequence[Path]) -> list[PrivateKey]:
    """The keys that were given, and those that lie beside a ledger that is its user's own."""
    found = [open_private_key(path) for path in given]
    if not is_postgres_url(ledger):
        beside = (governing_key_path(ledger), ledger_key_path(ledger))
        found += [PrivateKey.load(path, None) for path in beside if path.exists() and not PrivateKey.sealed(path)]
    return found


def make_change(
    ledger: str, decide: Callable[[Ledger], G | None], keys: Sequence[PrivateKey], propose: Path | None, days: int
) -> tuple[G | None, dict[str, Any]]:
    """Propose what `decide` makes of the ledger, or authorise it with these keys; it, and what became of it."""
    result: dict[str, Any] = {"ledger": printable_location(ledger), "changed": False, "checkpoint": None}
    with open_ledger(ledger) as book:
        if (change := decide(book)) is None:
            return None, result
        record, state = book.propose(change, days=days), book.governance()
    if propose is not None:
        files.replace_file(propose, governing_message(record), "the proposal", mode=0o644)
        return record, result | {"proposal": str(propose), "expires": format_utc(_expiry(record))}
    record = signed_record(record, _authorising_keys(state, record, keys))
    return record, result | _append(ledger, state, record, keys)


def _append(ledger: str, state: GovernanceState, record: GoverningRecord, keys: Sequence[PrivateKey]) -> dict[str, Any]:
    signer = next((key for key in keys if (known := state.get(key.public.id)) and known.role is Role.LEDGER), None)
    with open_ledger(ledger, signer=signer) as book:
        seq = book.govern(record)
        signers = [] if record.authorization is None else [each.key.hex() for each in record.authorization.signatures]
        signed = book.latest() if signer is not None else None
    made = {"index": seq, "signatures": signers, "expires": format_utc(_expiry(record))}
    return {"changed": True, **made, "checkpoint": signed}


def _authorising_keys(state: GovernanceState, record: GoverningRecord, keys: Sequence[PrivateKey]) -> list[PrivateKey]:
    """The governing keys among these; or the ledger's own, for its rotation."""
    found = [key for key in keys if (known := state.get(key.public.id)) and known.role is Role.GOVERNING]
    if not found and isinstance(record, KeyEvents) and len(record.events) == 1:
        found = [key for key in keys if key.public.id == record.events[0].target]
    if not found:
        problem = "none of the keys governs the ledger"
        remedy = "give a governing key (lamina ledger key LEDGER lists them), or --propose the change to its holder"
        raise LedgerError("cli.governing-key-missing", problem, remedy)
    return found


def _expiry(record: GoverningRecord) -> int:
    return 0 if record.authorization is None else record.authorization.expires


def outcome(result: dict[str, Any]) -> str:
    """What became of a change, in words."""
    if path := result.get("proposal"):
        return (
            f"{path}: proposed, until {result['expires']}\n  every signer:  lamina ledger sign {path} --key GOVERNING.key "
            f"--ledger COPY\n  then:          lamina ledger submit LEDGER {path} --signature FILE"
        )
    if not result["changed"]:
        return "nothing was changed"
    made = f"leaf {result['index']}: authorised by {pluralize(len(result['signatures']), 'key')}"
    if result["checkpoint"]:
        return f"{made}, and covered by a checkpoint"
    how = f"lamina ledger checkpoint {result['ledger']} --key LEDGER.key"
    return f"{made}, no checkpoint covers it yet: the next run before {result['expires']} signs one, or {how}"


# ------------------------------------------------------------------------------ init


@command(keys=True)
def init(
    ledger: str = argument("LEDGER", "ledger.db, or postgresql://…/database#schema; must not exist yet"),
    file: Path = argument("POLICY", "policy.toml of the corpus"),
    governing_key: list[Path] = option("key of an owner: private to sign now, or public; repeatable", default=...),
    witness: list[Path] = option("public key of a witness, NAME.pub; repeatable"),
    quorum: int | None = option(
        "cosignatures that a checkpoint needs; default: as POLICY says, or all witnesses", min=0
    ),
    retention: int | None = option("days for which contributions are kept; default: as POLICY says, or 365", min=1),
    key: Path | None = KEY,
    propose: Path | None = option("write the header, for owners to sign elsewhere"),
    write: bool = option("write the ledger's name into POLICY, so that attestations name it"),
) -> Answer:
    """Make a ledger that has an owner: whoever holds its governing keys decides about keys, policy and terms.

    The trainer's machine has the ledger's key, which signs checkpoints (--key; without it one is made beside the
    ledger), and no governing key. Keep these offline, and hand their public keys to auditors: verify --trust.

    Whatever protects less takes two of these keys; with one alone it can never be agreed on. If owners are elsewhere, give their public
    keys and --propose: each signs with lamina ledger sign, and lamina ledger submit makes the ledger.

    It prints the name of the ledger, the hash of its header leaf, which belongs into policy.toml: [corpus] ledger = "…".
    --write puts it there. Contributors who sign under that policy sign for this ledger, and no other admits them.

    Examples:

      lamina ledger init ledger.db policy.toml --governing-key owner.key --write
      lamina ledger init ledger.db policy.toml --governing-key a.pub --governing-key b.pub --propose header.msg
      lamina ledger init ledger.db policy.toml --governing-key owner.key --witness w1.pub --witness w2.pub --quorum 1
    """
    if ledger_exists(ledger):
        raise misuse(f"'{printable_location(ledger)}' exists already", "LEDGER")
    terms, owners = CorpusTerms.of_policy(Policy.load(file)), [_owner(path) for path in governing_key]
    if terms.ledger is not None:
        problem = f"'{file}' names the ledger {terms.ledger.hex()[:16]} already, and this would be a second one of {terms.origin!r}"
        raise LedgerError("cli.policy-names-ledger", problem, "use that ledger, or remove the line ledger of [corpus]")
    if write and propose is not None:
        problem = "the ledger has no name before it is made: add the line that submit prints"
        raise misuse(problem, "--write")
    named_in = _with_ledger_line(file, "0" * 64) if write else ""
    named = [Key(name=name, x=public.x, role=Role.GOVERNING) for name, public, _ in owners]
    seen = [Key(name=path.stem, x=PublicKey.load(path).x, role=Role.WITNESS) for path in witness]
    signer = _signing_key(ledger, key)
    asked = {"retention": None if retention is None else retention * DAY_SECONDS, "witnesses": quorum}
    given = {name: value for name, value in asked.items() if value is not None}
    header = terms.header(signer.public, [*named, *seen], **given)
    header = sign_header(header, [private for _, _, private in owners if private is not None])
    result: dict[str, Any] = {"ledger": printable_location(ledger), "origin": header.origin}
    if propose is not None:
        files.replace_file(propose, header.message(), "the proposal", mode=0o644)
        text = f"{propose}: have every owner sign it: lamina ledger sign {propose} --key GOVERNING.key"
        return Answer(result | {"proposal": str(propose)}, text)
    made = _create(ledger, header, signer, result)
    if named_in:
        text = named_in.replace("0" * 64, made.facts["header"], 1)
        files.replace_file(file, text.encode(), "the policy", mode=file.stat().st_mode & 0o777)
    return made


def _with_ledger_line(file: Path, name: str) -> str:
    """The text of the policy with the ledger's name in [corpus]."""
    old = validate.read_text_file(file)
    text, found = re.subn(r"(?m)^[ \t]*\[corpus\].*$", rf'\g<0>\nledger = "{name}"', old, count=1)
    if not found:
        problem = f"'{file}' has no line [corpus] after which the ledger could be named"
        remedy = "leave --write out, and add the line that is printed yourself"
        raise LedgerError("cli.no-corpus-table", problem, remedy)
    Policy.parse(text, source=str(file))
    return text


def _owner(path: Path) -> tuple[str, PublicKey, PrivateKey | None]:
    private = None
    if b"PRIVATE KEY-----" in files.read_small(path, "the governing key", most=_MAX_FILE_BYTES):
        private = open_private_key(path)
    return path.stem, PublicKey.load(path) if private is None else private.public, private


def _signing_key(ledger: str, key: Path | None) -> PrivateKey:
    if key is not None:
        return open_private_key(key)
    if is_postgres_url(ledger):
        raise misuse("give the key that signs checkpoints of the database", "--key")
    return load_or_make_key(ledger_key_path(ledger))


def _create(ledger: str, header: Header, signer: PrivateKey, result: dict[str, Any]) -> Answer:
    """Make it, and say its name, which is the hash of the header leaf."""
    with Ledger.create(ledger, header, signer) as book:
        name, signed = book.header_hash.hex(), book.latest()
    owners = [each.key.hex() for each in header.signatures]
    return Answer(
        result | {"governing": owners, "header": name, "checkpoint": signed},
        f"{result['ledger']}: {header.origin}, governed by {', '.join(each[:16] for each in owners)}",
        "in policy.toml, so that attestations name this ledger and no other admits them:",
        f'  [corpus]\n  ledger = "{name}"',
    )


# ------------------------------------------------------------------------------ terms

_WITHDRAWAL_RULES = {rule.name.lower(): rule for rule in WithdrawalRule}


@command(keys=True)
def terms(
    ledger: str = LEDGER,
    quorum: int | None = option("cosignatures that a checkpoint needs from now on", min=0),
    retention: int | None = option("days for which contributions are kept from now on", min=1),
    withdraw: str | None = option("who may withdraw from now on", choices=_WITHDRAWAL_RULES),
    about: Path | None = option("policy.toml whose [about] replaces the present one", metavar="POLICY"),
    key: list[Path] = KEYS,
    propose: Path | None = PROPOSE,
    days: int = DAYS,
) -> Answer:
    """Show or change the terms of a ledger: required witnesses, retention, who may withdraw, and the texts of [about].

    A governing key authorises it; fewer cosignatures, a shorter time, or leave for the keeper to withdraw without a signed
    request take two.

    Examples:

      lamina ledger terms ledger.db
      lamina ledger terms ledger.db --quorum 2 --key owner.key --key ledger.key
      lamina ledger terms ledger.db --retention 30 --propose shorter.msg
      lamina ledger terms ledger.db --withdraw signed --key owner.key
      lamina ledger terms ledger.db --about policy.toml --key owner.key --key ledger.key
    """
    if all(each is None for each in (quorum, retention, withdraw, about)):
        with open_ledger(ledger) as book:
            now, stated = book.parties(), about_at(book, book.size)
        found = {"quorum": now.witnesses, "retention": now.retention, "withdraw": now.withdraw.name.lower()}
        asked = f"{pluralize(now.witnesses, 'cosignature')} of witnesses, kept {now.retention / DAY_SECONDS:g} days"
        texts = [f"about.{name} (leaf {each['leaf']}): {each['text']}" for name, each in stated.items()]
        facts = {"ledger": printable_location(ledger), **found, "about": stated}
        return Answer(facts, f"{asked}, {describe_rule(now.withdraw)}", *texts)
    seconds, rule = None if retention is None else retention * DAY_SECONDS, _WITHDRAWAL_RULES.get(withdraw or "")
    wanted = None if about is None else Policy.load(about).about.stated

    def change(book: Ledger) -> TermsChange | None:
        texts = None if wanted is None else book.governance().about_change(wanted)
        given = {"witnesses": quorum, "retention": seconds, "withdraw": rule, "about": texts}
        return None if all(each is None for each in given.values()) else TermsChange(**given)  # type: ignore[arg-type]

    _, result = make_change(ledger, change, keys_at_hand(ledger, key), propose, days)
    return Answer(result, outcome(result))


# ------------------------------------------------------------------------------ sign, submit


@command(keys=True)
def sign(
    proposal: Path = argument("PROPOSAL", "a file that --propose wrote"),
    key: Path = option("your governing key; asks for its passphrase", default=...),
    ledger: str | None = option(
        "the ledger or a copy: check that the change follows it, and show what it changes", metavar="LEDGER"
    ),
    output: Path | None = OUTPUT,
) -> Answer:
    """As an owner: read a proposal, and sign it with a governing key.

    The signature is 64 bytes, Ed25519, over the bytes of the file; openssl pkeyutl -sign -rawin makes the same. It counts
    for this change of this ledger alone, once, and until the proposal expires. Give --ledger, a copy, to see what the
    proposal changes there.

    Examples:

      lamina ledger sign change.msg --key owner.key --ledger copy.db
      lamina ledger sign header.msg --key owner.key -o owner.sig
    """
    data = files.read_small(proposal, "the proposal", most=_MAX_FILE_BYTES)
    record, lines = _read_proposal(proposal, data), []
    private = open_private_key(key)
    if isinstance(record, Header):
        known = [each for each in record.keys if each.role is Role.GOVERNING and each.id == private.public.id]
        if not known:
            problem = f"the header does not name key {private.public.name[:16]} as one that governs"
            raise LedgerError("cli.key-cannot-authorise", problem, "sign with a key that it names")
    elif ledger is not None:
        lines = _check_proposal(ledger, record, private)
    output = output or proposal.with_name(f"{proposal.name}.sig")
    files.write_new(output, private.sign(data), "the signature", mode=0o644)
    change = describe_change(record)
    facts = {"proposal": str(proposal), "signature": str(output), "key": private.public.name}
    told = (f"  {line}" for line in [*change, *lines])
    return Answer(facts | {"change": change, "needs": lines}, *told, f"{output}: signed by {private.public.name[:16]}")


@command(keys=True)
def submit(
    ledger: str = argument("LEDGER", "ledger.db, or postgresql://…/database#schema; of a header: to be made"),
    proposal: Path = argument("PROPOSAL", "a file that --propose wrote"),
    signature: list[Path] = option("a signature of lamina ledger sign; repeatable"),
    key: list[Path] = KEYS,
) -> Answer:
    """Append a proposal that governing keys signed; of a header: make the ledger.

    Examples:

      lamina ledger submit ledger.db change.msg --signature owner.sig --key ledger.key
      lamina ledger submit ledger.db header.msg --signature a.sig --signature b.sig
    """
    data = files.read_small(proposal, "the proposal", most=_MAX_FILE_BYTES)
    record = _read_proposal(proposal, data)
    given = [(path, files.read_small(path, "the signature", most=_MAX_FILE_BYTES)) for path in signature]
    if isinstance(record, Header):
        made = tuple(_signature(path, data, each, record.keys) for path, each in given)
        signer = open_private_key(key[0]) if key else _signing_key(ledger, None)
        result = {"ledger": printable_location(ledger), "origin": record.origin}
        return _create(ledger, replace(record, signatures=made), signer, result)
    existing_ledger(ledger)
    with open_ledger(ledger) as book:
        state = book.governance()
    assert record.authorization is not None
    made = tuple(_signature(path, data, each, state.all()) for path, each in given)
    record = replace(record, authorization=replace(record.authorization, signatures=made))
    result = {"ledger": printable_location(ledger), **_append(ledger, state, record, keys_at_hand(ledger, key))}
    change = describe_change(record)
    return Answer(result | {"change": change}, *(f"  {line}" for line in change), outcome(result))


def _read_proposal(path: Path, data: bytes) -> Header | GoverningRecord:
    try:
        return parse_proposal(data)
    except EncodingError as error:
        problem = f"'{path}': {error.problem}"
        raise LedgerError("cli.proposal-malformed", problem, "write one with --propose") from None


def _signature(path: Path, message: bytes, data: bytes, keys: Sequence[Key]) -> PartySignature:
    """Whose signature of the message it is."""
    for each in keys:
        if len(data) == _SIGNATURE_BYTES and each.public.verify(message, data):
            return PartySignature(key=each.id, signature=data)
    problem = f"'{path}' is not a signature of this proposal by a key of the ledger"
    raise LedgerError("cli.signature-not-valid", problem, "have this very proposal signed: lamina ledger sign")


def _check_proposal(ledger: str, record: GoverningRecord, key: PrivateKey) -> list[str]:
    """Refuse a proposal that this key could not authorise there; what it protects less."""
    with open_ledger(ledger) as book, book.store.read() as rows:
        state, now = book.governance(rows), book.now()
        if key.public.id not in {each.id for each in state.standing(Role.GOVERNING, now)}:
            problem = f"key {key.public.name[:16]} does not govern {printable_location(ledger)} now"
            raise LedgerError("cli.key-cannot-authorise", problem, "lamina ledger key LEDGER lists those that do")
        state.check_follows(record, book.size, now, checkpoint_roots(rows))
    why = state.needs_two(record, now)
    return [*(f"protects less: {each}" for each in why), "needs a second governing key"] if why else []


def describe_change(record: Header | GoverningRecord) -> list[str]:
    """What a proposal says, a line each."""
    if isinstance(record, KeyEvents):
        return [describe_event(event) for event in record.events]
    if isinstance(record, TermsChange):
        return [describe_terms(record), *describe_about(record.about)]
    lines = [f"policy {record.policy.hex()[:16]}"]
    for each in record.presets:
        bound = f"clip norm ≤ {format_micro(each.clip_norm)}, noise multiplier ≥ {format_micro(each.noise_multiplier)}"
        bound += "" if each.risk is None else f", {each.risk}"
        lines.append(f"class {each.cls}: {'public' if each.public else bound}, {each.profile}")
    if isinstance(record, Header):
        lines = [f"header of {record.origin}: {record.accountant} at δ = {record.delta:g}", *lines]
        lines += [] if record.withdraw is None else [describe_rule(record.withdraw)]
        lines += describe_about(record.about)
        lines += [f"{each.role.name.lower()} key {each.name} ({each.id.hex()[:16]})" for each in record.keys]
    return lines
