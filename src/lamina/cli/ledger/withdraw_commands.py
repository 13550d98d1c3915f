"""`lamina ledger request, withdraw`: sign a request to withdraw a contribution, and withdraw it."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from lamina.admit.attestation import Attestation
from lamina.cli.command import LEDGER, OUTPUT, Answer, argument, command, misuse, option
from lamina.cli.open_ledger import DIGEST_HELP, contribution_digest, contributor_folder, open_ledger, open_view
from lamina.cli.terminal import open_private_key, say
from lamina.errors import LedgerError
from lamina.ledger.governance_records import Withdrawal
from lamina.ledger.records import ContributionRecord, KeptContribution
from lamina.ledger.schema import pluralize
from lamina.ledger.show import describe_by, format_epsilon
from lamina.ledger.store.sqlite import printable_location
from lamina.ledger.withdrawal import InboxResult, WithdrawalInbox, WithdrawnContribution, withdraw_signed
from lamina.ledger.withdrawal import withdraw as append
from lamina.ledger.withdrawal_request import (
    OPERATOR_ROLES,
    WITHDRAWAL_EFFECTS,
    WITHDRAWAL_REASONS,
    is_hex_digest,
    parse_effect,
    parse_reason,
    sign_withdrawal,
)
from lamina.plan.table import printable
from lamina.sign.keys import PrivateKey, read_small, replace_file

_MAX_HANDED_IN_BYTES = 1 << 24
_COSE_SIGN1 = b"\xd2"  # how a signed request begins; no text and no PDF does

REASON = option("why it is withdrawn", "--reason", choices=WITHDRAWAL_REASONS)
EFFECT = option(
    "finish or abandon an open segment; it is charged in both cases",
    "--effect",
    default="finish",
    choices=WITHDRAWAL_EFFECTS,
)


@command(keys=True)
def request(
    name: str = argument("DIGEST", "your contribution: its folder, or the whole digest of its descriptor"),
    key: Path = option("the key that signed the contribution; asks for its passphrase", default=...),
    reason: str | None = REASON,
    effect: str = EFFECT,
    ledger: str | None = option(
        "the ledger, a copy, or the hash of its header; default: the one that the folder's attestation names",
        metavar="LEDGER",
    ),
    handed_in: Path | None = option("as an operator of the ledger: what the contributor handed in"),
    output: Path | None = OUTPUT,
) -> Answer:
    """Sign a request to withdraw your contribution, without a network; send the file to the operator of the ledger.

    The keeper records it with lamina ledger withdraw LEDGER --request FILE, or puts it into the folder of --folder; a
    service takes it at /v1/withdrawals. It counts for this contribution, this reason and this ledger alone, and
    everybody who verifies the ledger verifies it. If your key was rotated, sign with the new one.

    Examples:

      lamina ledger request data/p001 --reason consent --key alice.key
      lamina ledger request DIGEST --reason consent --key alice.key --ledger copy.db -o mine.cose
      lamina ledger request DIGEST --reason consent --key operator.key --ledger ledger.db --handed-in letter.pdf
    """
    if reason is None:
        raise misuse("say why it is withdrawn", "--reason")
    digest = contribution_digest(name)
    if not is_hex_digest(digest):
        raise misuse("give a folder of lamina attest, or all 64 hex digits", "DIGEST")
    header, private = _header_hash(name, ledger), open_private_key(key)
    letter, target = _read_handed_in(handed_in), bytes.fromhex(digest)
    asked = None if letter is None else hashlib.sha256(letter).digest()
    data = sign_withdrawal(target, reason, private, ledger=header, effect=effect, request=asked)
    output = output or Path(f"withdrawal-{digest[:8]}.cose")
    replace_file(output, data, "the request", mode=0o644)
    made = {"request": str(output), "withdraw": digest, "reason": reason, "effect": effect, "ledger": header.hex()}
    text = f"{output}: signed by {private.public.name[:16]}, to withdraw {digest[:16]} from ledger {header.hex()[:16]}"
    return Answer(made | {"key": private.public.name, "digest": hashlib.sha256(data).hexdigest()}, text)


def _header_hash(name: str, ledger: str | None) -> bytes:
    """The hash of the header of the ledger that is meant."""
    if ledger is not None and is_hex_digest(ledger):
        return bytes.fromhex(ledger)
    if ledger is not None:
        with open_view(ledger) as book:
            return book.header_hash
    given = contributor_folder(name)
    named = None if given is None or given.attestation is None else Attestation.decode(given.attestation).ledger
    if named is None:
        problem = "no attestation here names the ledger that is meant"
        raise LedgerError("cli.request-ledger-missing", problem, "give --ledger: a copy, or the hash of its header")
    return named


def _read_handed_in(path: Path | None) -> bytes | None:
    return None if path is None else read_small(path, "the request", most=_MAX_HANDED_IN_BYTES)


@command(keys=True)
def withdraw(
    ledger: str = LEDGER,
    name: str | None = argument("DIGEST", DIGEST_HELP, default=None),
    reason: str | None = REASON,
    effect: str = EFFECT,
    request: Path | None = option(
        "a signed request; or, with a DIGEST, what was handed in: the record holds its digest"
    ),
    folder: Path | None = option("record the withdrawals in its files", metavar="FOLDER"),
    watch: float | None = option("with --folder: look again every so often", metavar="SECONDS"),
    key: list[Path] = option(
        "private key: the ledger's own signs a checkpoint, an operator's the withdrawal; repeatable"
    ),
) -> Answer:
    """Withdraw a contribution: no segment that opens after this uses it. Nothing is erased.

    Shows the ε that it has lost so far, and the releases that it is in. A withdrawal stops further loss; models do not
    unlearn it. With the ledger's key, a checkpoint covers the record at once; otherwise the next one does.

    The record holds the request that its contributor signed (lamina ledger request). For who asked in another way, a key
    with role operator, or a governing one, signs with the digest of what was handed in. Otherwise the record says that
    the keeper alone withdrew, which a ledger with withdraw = "signed" refuses (lamina ledger terms).

    With --folder, every file there becomes a record, exactly once, and is moved to done/: NAME.cose, a signed request, or
    NAME.json with {"withdraw": "64 hex digits", "reason": "consent"}, which nobody signed. A file that is refused is
    moved to refused/, with the reason beside it.

    Examples:

      lamina ledger withdraw ledger.db --request mine.cose
      lamina ledger withdraw ledger.db 9f86d081 --reason consent --request letter.pdf --key operator.key
      lamina ledger withdraw ledger.db 9f86d081 --reason legal --key ledger.key
      lamina ledger withdraw ledger.db --folder withdrawals --watch 10
    """
    data = _read_handed_in(request)
    signed = data is not None and data.startswith(_COSE_SIGN1)
    if sum((name is not None, folder is not None, signed)) != 1:
        raise misuse("give a digest, a signed request alone, or --folder", "DIGEST")
    if name is not None and reason is None:
        raise misuse("say why it is withdrawn", "--reason")
    signer, operator = _keys(ledger, [open_private_key(path) for path in key])
    if operator is not None and (name is None or data is None):
        problem = "an operator signs for one contributor who asked: give DIGEST and --request"
        raise misuse(problem, "--key")
    with open_ledger(ledger, signer=signer) as book:
        if signer is not None:
            book.check_signs()
        if folder is not None:
            return _take_from_folder(WithdrawalInbox(book, folder), ledger, watch)
        if signed and data is not None:
            found = withdraw_signed(book, data)
        else:
            why, what = parse_reason(str(reason)), parse_effect(effect)
            digest = None if data is None else hashlib.sha256(data).digest()
            target = contribution_digest(str(name))
            found = append(book, target, why, effect=what, request=digest, operator=operator)
        with book.store.read() as rows:
            still = sum(hold.segment >= 0 for hold in rows.holds())
            newest = rows.checkpoint()
    covered = newest is not None and all(each.leaf.seq < newest.size for each in found)
    lines = [_withdrawal_page(each) for each in found]
    if still:
        lines.append(f"{pluralize(still, 'open segment')} may add to that: lamina ledger trace shows it once recorded")
    if not covered:
        lines.append(
            "no checkpoint covers it yet: lamina ledger checkpoint --key signs one, and so does the next epoch"
        )
    withdrawn = [each.to_dict() for each in found]
    machine = {"ledger": printable_location(ledger), "signed": covered, "withdrawn": withdrawn}
    return Answer(machine, *lines)


def _keys(ledger: str, given: list[PrivateKey]) -> tuple[PrivateKey | None, PrivateKey | None]:
    """The ledger's key, and the operator's or governing one, among these."""
    if not given:
        return None, None
    with open_ledger(ledger) as book:
        state = book.governance()
    roles = [None if (known := state.get(each.public.id)) is None else known.role for each in given]
    operators = [each for each, role in zip(given, roles, strict=True) if role in OPERATOR_ROLES]
    others = [each for each in given if each not in operators]
    if len(operators) > 1 or len(others) > 1:
        raise misuse("give the ledger's key, an operator's, or one of each", "--key")
    return next(iter(others), None), next(iter(operators), None)


def _withdrawal_page(found: WithdrawnContribution) -> str:
    again = "already withdrawn: " if found.again else ""
    known, signed, record = found.lost, found.lost.signed, found.target.record
    withdrawal = found.leaf.record
    assert isinstance(record, ContributionRecord | KeptContribution)
    assert isinstance(withdrawal, Withdrawal)
    of = "" if signed is None else f" of the {format_epsilon(signed)} that was signed"
    lost = f"ε {format_epsilon(known.spend)}{of}"
    lines = [
        f"{again}contribution {record.descriptor.hex()}",
        f"  withdrawn    leaf {found.target.seq}, by leaf {found.leaf.seq}, {describe_by(withdrawal)}",
        f"  lost so far  {lost}, in {pluralize(known.epochs, 'epoch')}",
    ]
    for release in known.releases:
        lines.append(f"  is in        the release of leaf {release.seq}")
    return "\n".join(lines)


def _take_from_folder(inbox: WithdrawalInbox, ledger: str, watch: float | None) -> Answer:
    taken: list[InboxResult] = []
    try:
        while True:
            for each in inbox.take():
                taken.append(each)
                leaves = ", ".join(str(one.leaf.seq) for one in each.withdrawn)
                done = f"refused: {each.refused}" if each.refused else f"withdrawn in leaf {leaves}"
                say(f"{printable(each.name)}: {done}")
            if watch is None:
                break
            time.sleep(watch)
    except KeyboardInterrupt:
        pass
    facts = {"ledger": printable_location(ledger), "files": [each.to_dict() for each in taken]}
    return Answer(facts, ok=not any(each.refused for each in taken))
