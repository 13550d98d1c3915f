"""`lamina ledger policy`: other floors or classes from now on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina import cbor
from lamina.admit import files
from lamina.admit.key import PrivateKey
from lamina.cli.ledger.common import Json, Output, Where, opened, printed, say
from lamina.cli.ledger.difference import Policy, as_object, differences, looser, number
from lamina.cli.output import columns, print_json
from lamina.cli.passphrase import PassphraseFile, open_key
from lamina.errors import EncodingError
from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.opening import Contract, follow, in_force
from lamina.ledger.parties import Parties
from lamina.ledger.records import Header, PolicyChange, Preset, Role, Signed
from lamina.ledger.records.fields import schema
from lamina.ledger.show import counted, epsilon
from lamina.ledger.spend import signed_spend
from lamina.plan.policy import Policy as PolicyFile

_MOST = 1 << 20
_SIGNATURE = 64
_ROLES = (Role.LEDGER, Role.AUDITOR)


def policy(
    ledger: Where,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="POLICY", help="the policy to adopt, policy.toml; without: show what holds"),
    ] = None,
    key: Annotated[
        list[Path] | None,
        typer.Option("--key", metavar="FILE", help="a private key that signs; may be given several times"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would change, and change nothing")
    ] = False,
    propose: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write what others are to sign, and change nothing")
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="as an auditor, with your --key: look at a proposal and sign it"),
    ] = None,
    signature: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="a signature made elsewhere with --sign; may be given several times"
        ),
    ] = None,
    output: Output = None,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Adopt a policy: its floors and classes hold for whoever is admitted and trained from now on.

    A stricter policy, or a new class, needs the ledger's key alone. One that protects less (a floor or a noise
    multiplier falls, a clip norm grows, a class becomes public or reaches further) needs the signatures of two
    different keys that the ledger names as its own or as an auditor's. Nobody signs for two.

    Where the auditor is elsewhere: --propose writes the message; the auditor, with a copy of the ledger, looks at it
    and signs with --sign (64 bytes, Ed25519, which openssl pkeyutl -rawin makes as well); --signature takes that.

    Classes that the policy does not name stay as they are. Origin, accountant and δ are the ledger's for good.

    Examples:

      lamina ledger policy ledger.db
      lamina ledger policy ledger.db policy.toml --dry-run
      lamina ledger policy ledger.db policy.toml --key ledger.key
      lamina ledger policy ledger.db policy.toml --propose change.msg
      lamina ledger policy copy.db --sign change.msg --key auditor.key -o auditor.sig
      lamina ledger policy ledger.db policy.toml --key ledger.key --signature auditor.sig
    """
    _check_words(file, key or [], dry_run, propose, sign, signature or [], output)
    keys = [open_key(path, passphrase_file) for path in key or ()]
    if sign is not None:
        _sign(ledger, sign, keys[0], output or sign.with_name(f"{sign.name}.sig"), as_json)
        return
    with opened(ledger) as book:
        before = in_force(book)
        if file is None:
            _print_policy(ledger, before, book.header, as_json)
            return
        contract = _contract(book, file)
        change = contract.change(before)
        signatures = [] if change is None else _signatures(book, change, keys, signature or [])
        parties = book.parties()
    told: dict[str, Any] = {"ledger": printed(ledger), "changed": False, "checkpoint": None}
    if change is not None and propose is not None:
        files.replace(propose, change.message(contract.origin), "the proposal", mode=0o644)
        told["proposal"] = str(propose)
    elif change is not None and not dry_run:
        with opened(ledger, signer=_signer(keys, parties, printed(ledger))) as book:
            book.check_signs()
            told["changed"] = follow(book, contract, tuple(signatures))
            told["checkpoint"] = book.latest()
    _print_change(told, before, change, signatures, as_json)


def _check_words(
    file: Path | None,
    keys: Sequence[Path],
    dry_run: bool,
    propose: Path | None,
    sign: Path | None,
    signatures: Sequence[Path],
    output: Path | None,
) -> None:
    """Misuse, if the options do not go together."""
    if sign is not None:
        if file is not None or propose is not None or dry_run or signatures:
            raise typer.BadParameter(
                "it signs the proposal of somebody else, and nothing more", param_hint="--sign"
            )
        if len(keys) != 1:
            raise typer.BadParameter("give the one key that signs", param_hint="--key")
        return
    if output is not None:
        raise typer.BadParameter("is for --sign", param_hint="--output")
    if file is None and (keys or propose is not None or dry_run or signatures):
        raise typer.BadParameter("which policy? give policy.toml", param_hint="POLICY")
    if file is not None and not file.is_file():
        raise typer.BadParameter(f"there is no policy '{file}'", param_hint="POLICY")
    if dry_run and propose is not None:
        raise typer.BadParameter(
            "one of --dry-run and --propose: both change nothing", param_hint="--dry-run"
        )
    if file is not None and not keys and not dry_run and propose is None:
        raise typer.BadParameter(
            "who signs? give the ledger's key; or --dry-run to look, --propose to ask others",
            param_hint="--key",
        )


def _contract(book: Ledger, file: Path) -> Contract:
    """What the policy asks for, of this ledger."""
    contract, header = Contract.of_policy(PolicyFile.load(file)), book.header
    if contract.origin != header.origin:
        raise LedgerError(
            "cli.policy-ledger",
            f"'{file}' is the policy of {contract.origin!r}, the ledger is of {header.origin!r}",
            "give the ledger of this corpus: one ledger, one corpus",
        )
    if (contract.accountant, contract.delta) != (header.accountant, header.delta):
        raise LedgerError(
            "cli.says-delta-ledger",
            f"'{file}' says {contract.accountant} at δ = {contract.delta:g}, the ledger counts by {header.accountant} "
            f"at δ = {header.delta:g} for good",
            "set accountant and delta of [corpus] to those, or begin a ledger under another origin",
        )
    return contract


# ------------------------------------------------------------------------------------ signatures


def _signatures(
    book: Ledger, change: PolicyChange, keys: Sequence[PrivateKey], given: Sequence[Path]
) -> list[Signed]:
    """Of the keys that are here, and those that came from elsewhere: each once."""
    message, parties, now = change.message(book.origin), book.parties(), book.now()
    found = {}
    for each in keys:
        _check_party(parties, each, now)
        found[each.public.id] = each.sign(message)
    for path in given:
        data = files.read_small(path, "the signature", most=_MOST)
        who = [
            party.id
            for party in parties.all()
            if party.role in _ROLES and len(data) == _SIGNATURE and party.public.verify(message, data)
        ]
        if not who:
            raise LedgerError(
                "cli.no-signature-change",
                f"'{path}' is no signature of this change by a key of the ledger or an auditor",
                "propose the change again (--propose), and have that signed: another policy, or another one in force, "
                "is another message",
            )
        found[who[0]] = data
    return [Signed(key=kid, signature=made) for kid, made in found.items()]


def _check_party(parties: Parties, key: PrivateKey, now: int) -> None:
    known = parties.get(key.public.id)
    if known is None or known.role not in _ROLES:
        role = "is not one of the ledger" if known is None else f"is for {known.role.name.lower()}"
        raise LedgerError(
            "cli.key-not-sign-policy",
            f"key {key.public.name[:16]} {role}, and cannot sign a policy",
            "give the ledger's own or an auditor's: lamina ledger key LEDGER lists them",
        )
    if (wrong := parties.wrong(key.public.id, now)) is not None:
        raise LedgerError("cli.key", f"key {key.public.name[:16]} {wrong}", "give one that counts now")


def _signer(keys: Sequence[PrivateKey], parties: Parties, name: str) -> PrivateKey:
    """Who signs the checkpoint over it."""
    for each in keys:
        if (known := parties.get(each.public.id)) is not None and known.role is Role.LEDGER:
            return each
    raise LedgerError(
        "cli.none-keys-signs",
        f"none of the keys signs checkpoints of {name}",
        "give the ledger's own key too; an auditor's goes beside it",
    )


def _sign(ledger: str, path: Path, key: PrivateKey, output: Path, as_json: bool) -> None:
    """What an auditor does: read, compare with what holds, sign."""
    data = files.read_small(path, "the proposal", most=_MOST)
    with opened(ledger) as book:
        change = _proposal(path, data, book.origin)
        before = in_force(book)
        _check_party(book.parties(), key, book.now())
    files.write_new(output, key.sign(data), "the signature", mode=0o644)
    told = {"ledger": printed(ledger), "signature": str(output), "key": key.public.name}
    _print_change(told, before, change, [], as_json)


def _proposal(path: Path, data: bytes, origin: str) -> PolicyChange:
    try:
        named, body = cbor.decode(data.partition(b"\n")[2], max_size=_MOST)
        found = schema(PolicyChange).value(body)
    except (EncodingError, TypeError, ValueError):
        raise LedgerError(
            "cli.no-proposal-policy", f"'{path}' is no proposal of a policy", "write one with --propose"
        ) from None
    assert isinstance(found, PolicyChange)
    if named != origin:
        raise LedgerError(
            "cli.ledger-give",
            f"'{path}' is for the ledger {str(named)[:80]!r}, this is {origin!r}",
            "give its ledger",
        )
    if dataclasses.replace(found, signatures=()).message(origin) != data:
        raise LedgerError(
            "cli.no-proposal-policy", f"'{path}' is no proposal of a policy", "write one with --propose"
        )
    return found


# ------------------------------------------------------------------------------------ what is printed


def _print_policy(ledger: str, found: Policy, header: Header, as_json: bool) -> None:
    told = {"origin": header.origin, "delta": header.delta, "accountant": header.accountant}
    if as_json:
        print_json({"ledger": printed(ledger), **told, **as_object(found, header.delta)})
        return
    say(f"{header.origin}, {header.accountant} at δ = {header.delta:g}")
    say(
        f"floors: clip norm {number(found.floors.clip_norm)}, noise multiplier {number(found.floors.noise_multiplier)}"
    )
    rows = [["class", "clip norm ≤", "noise multiplier ≥", "ε ≤", "contributions", "depth"]]
    for each in found.presets:
        clip = "public" if each.public else number(each.clip_norm)
        noise = "-" if each.public else number(each.noise_multiplier)
        people = "-" if each.population is None else f"{each.population:,}"
        rows.append([each.cls, clip, noise, _most(each, header.delta), people, each.profile])
    figures = columns([row[:-1] for row in rows]).split("\n")
    say("\n".join(f"{line}  {row[-1]}" for line, row in zip(figures, rows, strict=True)))


def _most(preset: Preset, delta: float) -> str:
    """ε over all runs that the class is held to."""
    if preset.public:
        return "-"
    return epsilon(signed_spend(preset.noise_multiplier, delta)) if preset.noise_multiplier else "no bound"


def _print_change(
    told: dict[str, Any],
    before: Policy,
    change: PolicyChange | None,
    signatures: Sequence[Signed],
    as_json: bool,
) -> None:
    lines = [] if change is None else differences(before, change)
    less = [] if change is None else looser(before, change)
    if as_json:
        signers = [each.key.hex() for each in signatures]
        print_json({**told, "differences": lines, "looser": less, "signatures": signers})
        return
    for line in lines:
        say(f"  {line}")
    for line in less:
        say(f"  protects less: {line}")
    if change is None:
        say("this policy holds already: nothing changes")
    elif told.get("changed"):
        say(f"adopted, with {counted(len(signatures), 'signature')}, and covered by a checkpoint")
    elif "signature" in told:
        say(f"{told['signature']}: signed by {told['key'][:16]}; give it back for --signature")
    elif "proposal" in told:
        say(
            f"{told['proposal']}: have it signed with lamina ledger policy LEDGER --sign {told['proposal']} --key KEY"
        )
    else:
        say("nothing was changed" + ("; it needs the signatures of two parties" if less else ""))
