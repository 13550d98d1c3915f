"""`lamina ledger verify, checkpoint, heartbeat, witness, prove, receipt, copy`: verify a ledger, and prove its content to others."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from lamina.cli.command import KEY, LEDGER, LEDGER_HELP, OUTPUT, Answer, argument, as_json, command, misuse, option
from lamina.cli.ledger.reconcile_command import letter_text
from lamina.cli.open_ledger import LEAF_HELP, compared, contribution_digest, open_ledger, open_view
from lamina.cli.terminal import (
    existing_ledger,
    open_private_key,
    print_finding,
    print_json,
    print_note,
    print_refusal,
    progress_bar,
    refusal_json,
)
from lamina.errors import LaminaError, LedgerError, NotVerified
from lamina.ledger import receipt as receipts
from lamina.ledger import records as leaves
from lamina.ledger.checked_leaves import cut_unsigned
from lamina.ledger.governance_records import Role
from lamina.ledger.merkle import leaf_hash
from lamina.ledger.reader import LedgerReader, find_leaf
from lamina.ledger.receipt import Receipt, TlogProof
from lamina.ledger.records import KIND_NAMES
from lamina.ledger.schema import pluralize
from lamina.ledger.show import describe_leaf
from lamina.ledger.signed_checkpoint import parse_checkpoint
from lamina.ledger.store.rows import StoredLeaf
from lamina.ledger.store.sqlite import SqliteStore, is_postgres_url, make_store, printable_location
from lamina.ledger.verify.report import Verification
from lamina.ledger.verify.tree_checks import KnownCheckpoint, Trust
from lamina.ledger.verify.verifier import verify as audit
from lamina.ledger.witness import Witness, WitnessRequest
from lamina.plan.table import printable
from lamina.release.contributor_statement import compare_statement, read_statement
from lamina.release.letter import letter
from lamina.sign import keys
from lamina.sign.keys import format_utc, parse_time
from lamina.sign.notes import Note, NoteKey, encode64
from lamina.sign.signed_json import MAX_STATEMENT_BYTES

_PLURALS = {"policy": "policies", "pruned": "pruned"}


@command()
def verify(
    ledger: str = LEDGER,
    trust: Trust | None = option(
        "keys from elsewhere: a key ring, an owner's public key, or verifier keys, one a line",
        metavar="KEYS",
        load=Trust.load,
    ),
    seen: list[KnownCheckpoint] = option(
        "a checkpoint that you kept; repeatable", metavar="CHECKPOINT", load=KnownCheckpoint.load
    ),
    no_signatures: bool = option("do not check attestations: much faster"),
) -> Answer:
    """Replay a ledger from its first leaf; report the first record that is wrong, and why.

    Checks form, order, hashes and times; every checkpoint and its signature; every attestation; bounds against floors
    and classes; keys, policies, withdrawals, aggregates and releases; and computes every ε again from the recorded
    plans, by the accountant of the header. Needs neither data nor models.

    A ledger lists its own keys, so whoever can write all of it can sign all of it again: without --trust it is at best
    self-consistent. With --trust, a governing key that you have from elsewhere must have signed its header, and every
    authority must follow from that: keep such keys apart from the ledger. Contributors, witnesses (with a quorum) and
    ledger keys of a key ring, where it has any, are the only ones that count. With --seen, the ledger must continue a
    checkpoint that you kept: one that was rolled back or forked does not.

    Exit code 0 if it is verified, 1 if it is not, 2 if there is no ledger or the database cannot be reached.

    Examples:

      lamina ledger verify runs/first/ledger.db
      lamina ledger verify ledger.db --trust owner.pub
      lamina ledger verify ledger.db --trust trusted.json --seen last.checkpoint
      lamina ledger verify ledger.db --no-signatures --json
    """
    place = existing_ledger(ledger)
    _check_reachable(place)
    with progress_bar("replaying") as tick:
        found = audit(place, trust=trust, seen=seen, signatures=not no_signatures, progress=tick)
    if found.problem is not None:
        print_finding("not verified:", str(found.problem))
    name = printable_location(ledger)
    return Answer({"ledger": name, **found.to_dict()}, *_verification(name, found), ok=found.problem is None)


def _check_reachable(place: str) -> None:
    """Exit with 2 if the database cannot be reached, or nothing is there: that does not make a ledger wrong."""
    try:
        make_store(place, readonly=True).close()
    except LedgerError as error:
        if not is_postgres_url(place) and error.code != "store.no-ledger":
            return
        print_refusal(error)
        if as_json.get():
            print_json(refusal_json(error))
        raise typer.Exit(2) from None


def _verification(name: str, found: Verification) -> list[str]:
    state = {"trusted": "verified and trusted", "self-consistent": "self-consistent, not trusted"}
    lines = [f"{printable(name)}: {state.get(found.verdict, found.verdict)}"]
    if found.origin is not None:
        kinds = ", ".join(pluralize(count, word, _PLURALS.get(word)) for word, count in found.counts.items() if count)
        lines += [f"  origin       {found.origin}", f"  leaves       {found.size:,}: {kinds}"]
    if found.root is not None:
        lines.append(f"  root         {found.root.hex()}")
    if found.verified:
        covered = pluralize(found.signed, "leaf", "leaves")
        newest = f"; the newest covers {covered}" if found.checkpoints else ""
        checked = f"{pluralize(found.attestations, 'attestation')}, {pluralize(found.spends, 'figure')} of ε"
        lines += [f"  checkpoints  {found.checkpoints:,}{newest}", f"  checked      {checked}"]
    lines += [f"  keys         {line}" for line in key_lines(found)]
    return [*lines, *(f"  note         {note}" for note in found.notes)]


def key_lines(found: Verification) -> list[str]:
    """Every key that was added, rotated or revoked, and by whom; contributors by number."""
    lines, by_leaf = [], dict[tuple[int, str], Counter[str]]()
    for each in found.keys:
        signers = " and ".join(one[:16] for one in each["by"]) or "nobody"
        if each["role"] == "contributor":
            by_leaf.setdefault((each["index"], signers), Counter())[each["change"]] += 1
        else:
            name = f"{each['change']} {each['role']} {each['name']} ({each['key'][:16]})"
            lines.append(f"leaf {each['index']}: {name}, by {signers}")
    for (index, signers), counts in by_leaf.items():
        parts = [f"{pluralize(counts['add'], 'contributor key')} added"] * bool(counts["add"])
        parts += [f"{counts[change]} {change}d" for change in ("rotate", "revoke") if counts[change]]
        lines.append(f"leaf {index}: {', '.join(parts)}, by {signers}")
    return lines


_MAX_FILE_BYTES = 1 << 20


@command(keys=True)
def checkpoint(
    ledger: str = LEDGER,
    key: Path | None = KEY,
    cosigned: Path | None = option("add the signatures of this copy, back from a witness"),
    size: int | None = option("the checkpoint of so many leaves; default: newest", min=0),
    witnessed: bool = option("the newest that as many witnesses cosigned as the ledger asks for"),
    accept: bool = option(
        "with --key: accept this ledger as it is, although a newer state is kept beside the key or open charges differ from "
        "those that were signed"
    ),
    output: Path | None = OUTPUT,
) -> Answer:
    """Print a checkpoint: size and root of the ledger, signed. With --key, sign a new one first.

    Keep one outside the ledger: later, lamina ledger verify --seen shows that nothing before it was changed or removed.
    The format is a C2SP signed note, which other programs read. Hand out --witnessed ones, where there are witnesses.

    Examples:

      lamina ledger checkpoint ledger.db --key ledger.key
      lamina ledger checkpoint ledger.db > last.checkpoint
      lamina ledger checkpoint ledger.db --cosigned from-witness.txt
    """
    if key is not None or cosigned is not None:
        with open_ledger(ledger, key) as book:
            if key is not None:
                if accept:
                    print_note(f"kept beside the key: {book.accept()}")
                book.checkpoint()
            if cosigned is not None:
                given = keys.read_small(cosigned, "the checkpoint", most=_MAX_FILE_BYTES)
                book.cosigned(given.decode("utf-8", "replace"))
    with open_view(ledger) as view:
        text, leaves = _witnessed_checkpoint(view) if witnessed else _checkpoint_text(view, size), view.size
    head, note = parse_checkpoint(text)
    signers = [each.name for each in note.signatures]
    facts = {"ledger": printable_location(ledger), "origin": head.origin, "size": head.size}
    facts |= {"root": head.root.hex(), "unsigned": leaves - head.size if size is None else None}
    written = f"{pluralize(head.size, 'leaf', 'leaves')}, signed by {', '.join(signers)}"
    return _text_answer({**facts, "signers": signers, "checkpoint": text}, text, output, "the checkpoint", written)


@command(keys=True)
def heartbeat(
    ledger: str = LEDGER, key: Path = option("private key of the ledger, or of one of its witnesses", default=...)
) -> Answer:
    """Sign the present time under the newest checkpoint. Run it by a timer, more often than --max-age of your releases.

    Gates use signed times. Without a heartbeat, an idle ledger becomes stale and its releases are no longer served. The
    command adds no leaf, and its line replaces that of the last heartbeat. With the ledger's key, it first signs records
    that no checkpoint covers yet.

    The newest state of the ledger is kept beside the key. The command refuses a ledger that does not continue it, so that
    an old backup cannot pass as fresh. A witness without access to the ledger uses lamina ledger witness.

    Examples:

      lamina ledger heartbeat ledger.db --key ledger.key
      lamina ledger heartbeat postgresql:///clinic#ward --key witness.key
    """
    signer = open_private_key(key)
    with open_ledger(ledger, signer=signer) as book:
        known = book.parties().get(signer.public.id)
        witness = signer if known is not None and known.role is Role.WITNESS else None
        text, time = book.heartbeat(witness)
    size = parse_checkpoint(text)[0].size
    facts = {"ledger": printable_location(ledger), "size": size, "time": format_utc(time), "checkpoint": text}
    leaves = pluralize(size, "leaf", "leaves")
    return Answer(facts, f"{printable_location(ledger)}: {leaves}, up to date at {format_utc(time)}")


@command(keys=True)
def witness(
    checkpoints: list[Path] = argument(
        "CHECKPOINT…", "checkpoints, or output files of lamina ledger prove --from", default=None
    ),
    key: Path = option("private key of the witness", default=...),
    state: Path = option("file with the last cosigned checkpoints; back it up", default=...),
    trust: Trust = option("the ledger's own keys, from another source", metavar="KEYS", default=..., load=Trust.load),
    name: str | None = option("name of the witness key; default: its name in --ledger"),
    proof: Path | None = option("consistency proof from the last checkpoint"),
    ledger: str | None = option("read the proof, and by default the checkpoint, from this ledger"),
    output: Path | None = option("output file; output folder for several checkpoints", "--output", "-o"),
) -> Answer:
    """Cosign a checkpoint as a witness, if it continues the last cosigned one.

    A witness keeps the newest checkpoint of each ledger in its state file and requires a proof that the next one continues
    it. It refuses a rollback, a fork, a checkpoint without proof, and one that no trusted ledger key signed. The command
    prints the checkpoint with the cosignature (C2SP cosignature/v1); the operator adds it with lamina ledger checkpoint
    --cosigned.

    Examples:

      lamina ledger witness new.checkpoint --key witness.key --state witness.json --trust ledger.pub --name w.example
      lamina ledger prove ledger.db --from 1000 -o request.txt
      lamina ledger witness request.txt --key witness.key --state witness.json --trust ledger.pub --name w.example
      lamina ledger witness --ledger copy.db --key witness.key --state witness.json --trust ledger.pub -o cosigned.txt
    """
    if (proof is not None and len(checkpoints) != 1) or not (checkpoints or ledger) or (ledger and proof):
        problem = "give checkpoints or --ledger; give --proof only with a single checkpoint"
        raise misuse(problem, "CHECKPOINT")
    if output is not None and len({path.name for path in checkpoints}) < len(checkpoints):
        problem = "two checkpoint files have the same name, so their outputs in --output would too"
        raise misuse(problem, "CHECKPOINT")
    signer = open_private_key(key)
    requests = [_read_request(path, "the checkpoint") for path in checkpoints]
    if proof is not None:
        requests = [replace(_read_request(proof, "the proof"), checkpoint=requests[0].checkpoint)]
    with nullcontext() if ledger is None else open_view(ledger) as book:
        if book is not None:
            requests = requests or [WitnessRequest(_checkpoint_text(book, None))]
            known = book.parties().get(signer.public.id)
            name = name or (known.name if known is not None and known.role is Role.WITNESS else None)
        if name is None:
            problem = "the name of the witness is not known"
            raise LedgerError("cli.witness-name-missing", problem, "give the name of its key in the ledger: --name")
        made, several = list[dict[str, Any]](), len(requests) > 1
        for at, request in enumerate(requests):
            origin = parse_checkpoint(request.checkpoint)[0].origin
            cosigner = Witness(signer, name, state)
            text, before = cosigner.cosign(request, trust.keys(origin), None if book is None else book.consistent)
            if output is not None:
                path = output / checkpoints[at].name if several else output
                keys.replace_file(path, text.encode("utf-8"), "the checkpoint", mode=0o644)
            head, first = parse_checkpoint(text)[0], before is None
            facts = {"origin": origin, "size": head.size, "root": head.root.hex()}
            made.append({**facts, "first": first, "checkpoint": text})
            if first:
                print_note(f"note: {origin} was never cosigned before, so nothing was compared")
    shown = "\n".join(f"{each['origin']}: cosigned {pluralize(each['size'], 'leaf', 'leaves')}" for each in made)
    facts = {"name": name, "cosigned": made}
    return Answer(facts, shown) if output else Answer(facts, *(each["checkpoint"] for each in made), raw=True)


def _read_request(path: Path, what: str) -> WitnessRequest:
    return WitnessRequest.parse(keys.read_small(path, what, most=_MAX_FILE_BYTES))


def _text_answer(facts: dict[str, Any], text: str, output: Path | None, what: str, written: str) -> Answer:
    """Write the text to the file, of which `written` is said, or print it as it is."""
    if output is None:
        return Answer(facts, text, raw=True)
    keys.replace_file(output, text.encode("utf-8"), what, mode=0o644)
    return Answer(facts, f"{output}: {written}")


def _checkpoint_text(book: LedgerReader, size: int | None) -> str:
    """The newest checkpoint, or the one of this size."""
    found = [book.latest()] if size is None else book.checkpoints()
    for text in found:
        if text is not None and size in (None, parse_checkpoint(text)[0].size):
            return text
    of = "" if size is None else f" of {pluralize(size, 'leaf', 'leaves')}"
    problem = f"the ledger {book.name} has no checkpoint{of}"
    raise LedgerError("cli.checkpoint-missing", problem, "sign one: lamina ledger checkpoint --key")


def _witnessed_checkpoint(book: LedgerReader) -> str:
    """The newest checkpoint with enough cosignatures."""
    state = book.parties()
    for text in reversed(list(book.checkpoints())):
        head, note = parse_checkpoint(text)
        if len(state.cosigned(note, leaves.decode_kept(book.raw(head.size - 1).leaf).time)) >= state.witnesses:
            return text
    problem = f"no checkpoint of {book.name} has {pluralize(state.witnesses, 'cosignature')} of its witnesses"
    raise LedgerError("cli.checkpoint-not-witnessed", problem, "send it to the witnesses, and add theirs: --cosigned")


@command()
def prove(
    ledger: str = LEDGER,
    name: str | None = argument("LEAF", LEAF_HELP, default=None),
    old: int | None = option("prove that the ledger goes on from this size", "--from", metavar="SIZE"),
    size: int | None = option("in the checkpoint of so many leaves; default: newest", metavar="SIZE"),
    output: Path | None = OUTPUT,
) -> Answer:
    """Prove that a leaf is in the ledger, or that a later checkpoint continues an earlier one.

    An inclusion proof is C2SP tlog-proof text, with its checkpoint. A consistency proof (--from) has the form that a
    C2SP witness takes: the old size, the proof, the new checkpoint.

    Examples:

      lamina ledger prove ledger.db 17
      lamina ledger prove ledger.db 9f86d081 -o mine.tlog-proof
      lamina ledger prove ledger.db --from 1000
    """
    if (name is None) == (old is None):
        raise misuse("give a leaf, or --from SIZE", "LEAF")
    with open_view(ledger) as book:
        signed = _checkpoint_text(book, size)
        found = _consistency_proof(book, old, signed) if old is not None else _inclusion_proof(book, str(name), signed)
    hashes, of = pluralize(len(found["path"]), "hash", "hashes"), pluralize(found["size"], "leaf", "leaves")
    machine, written = {"ledger": printable_location(ledger), **found}, f"{hashes}, under the checkpoint of {of}"
    return _text_answer(machine, found["text"], output, "the proof", written)


def _inclusion_proof(book: LedgerReader, name: str, signed: str) -> dict[str, Any]:
    seq = find_leaf(book, contribution_digest(name))
    head, _ = parse_checkpoint(signed)
    hash = leaf_hash(book.raw(seq).leaf)
    if seq >= head.size:
        problem = f"leaf {seq} is not in the checkpoint of {pluralize(head.size, 'leaf', 'leaves')}"
        raise LedgerError("cli.leaf-not-in-checkpoint", problem, "sign a newer checkpoint")
    path = book.prove(seq, head.size)
    return {
        "index": seq,
        "size": head.size,
        "root": head.root.hex(),
        "leaf_hash": hash.hex(),
        "path": [each.hex() for each in path],
        "text": TlogProof(seq, tuple(path), signed).encode(),
    }


def _consistency_proof(book: LedgerReader, old: int, signed: str) -> dict[str, Any]:
    head, _ = parse_checkpoint(signed)
    if not 0 <= old <= head.size:
        problem = f"--from is {old}, but the checkpoint has {pluralize(head.size, 'leaf', 'leaves')}"
        raise LedgerError("cli.proof-size-outside-checkpoint", problem, "give a size that it has reached")
    path = book.consistent(old, head.size)
    lines = [f"old {old}", *map(encode64, path)]
    return {
        "from": old,
        "size": head.size,
        "root": head.root.hex(),
        "path": [each.hex() for each in path],
        "text": "\n".join(lines) + "\n\n" + signed,
    }


_LEAF_SUFFIX, _BODY_SUFFIX, _COSE_SUFFIX, _TEXT_SUFFIX = ".leaf", ".body", ".cose", ".tlog-proof"


@command()
def receipt(
    ledger: str | None = argument("LEDGER", LEDGER_HELP, default=None),
    name: str | None = argument("LEAF", LEAF_HELP, default=None),
    output: Path = option("beginning of the file names", "--output", "-o", metavar="PREFIX", default=Path("receipt")),
    check: Path | None = option("check this receipt or statement.cose instead; needs --trust", metavar="PREFIX"),
    trust: Trust | None = option("for --check: the ledger's own keys, from elsewhere", metavar="KEYS", load=Trust.load),
    folder: Path | None = option("for --check: compare the record with this contribution"),
) -> Answer:
    """Write a receipt: proof, under the newest checkpoint, that a record is in the ledger.

    Four files: PREFIX.leaf, which is proven; PREFIX.body, the rest of the record, whose hash the leaf holds (not if it is
    pruned); PREFIX.cose, a COSE receipt (RFC 9942); and PREFIX.tlog-proof, the same as C2SP text with the cosignatures of
    witnesses. Keep them: after pruning, only a receipt proves the body.

    A contribution that is given by its folder is compared with its record: descriptor, attestation, payload. Every
    difference is named; the exit code is then 1.

    --check does the same for a receipt that you kept, or for a statement of lamina ledger statement, which it then prints.
    It shows how many witnesses cosigned and how many your key ring requires (and the terms, if a statement or a ledger is
    given). It fails if your key ring names witnesses and fewer cosigned. A ledger is optional: with a ledger, its tree must
    have the root of the receipt, and the facts of a statement are recomputed.

    Examples:

      lamina ledger receipt ledger.db 9f86d081 -o mine
      lamina ledger receipt ledger.db contributions/p001 -o mine
      lamina ledger receipt --check mine --trust ledger.pub --folder contributions/p001
      lamina ledger receipt --check statement.cose --trust trusted.json
    """
    if check is not None:
        if trust is None:
            raise misuse("give the ledger's keys", "--trust")
        with nullcontext() if ledger is None else open_view(ledger) as reader:
            examine = _check_statement if check.is_file() else _check_receipt
            return examine(check, trust, reader, folder)
    if ledger is None or name is None:
        raise misuse("give a ledger and a leaf, or --check", "LEDGER")
    with open_view(ledger) as book:
        seq = find_leaf(book, contribution_digest(name))
        leaf, body = book.raw(seq)
        parts = {_LEAF_SUFFIX: leaf} | ({} if body is None else {_BODY_SUFFIX: body})
        parts |= {_COSE_SUFFIX: book.receipt(seq), _TEXT_SUFFIX: book.proof_text(seq).encode("utf-8")}
    written = {suffix[1:]: str(_with_suffix(output, suffix)) for suffix in parts}
    for suffix, data in parts.items():
        keys.write_new(_with_suffix(output, suffix), data, "the receipt", mode=0o644)
    size = Receipt.decode(parts[_COSE_SUFFIX]).size
    made = {"ledger": printable_location(ledger), "index": seq, "size": size, "files": written}
    said = f"receipt of leaf {seq} of {size:,}: {', '.join(written.values())}"
    return compared(made, name, leaves.decode_leaf(StoredLeaf(leaf, body)).record, said)


def _check_statement(path: Path, trust: Trust, book: LedgerReader | None, folder: Path | None) -> Answer:
    """Check the statement of a contributor, and print its letter."""
    data = keys.read_small(path, "the statement", most=MAX_STATEMENT_BYTES)
    content, note, record = read_statement(data, trust)
    since = None if book is None else compare_statement(content, book)
    last = parse_time(content["as_of"])
    counted, line = _count_witnesses(note, last, trust, content["witnesses_required"])
    lines = [f"verified: statement of {content['ledger']['origin']} as of {content['as_of']}", f"  {line}"]
    if since is not None:
        more = pluralize(since, "leaf", "leaves")
        lines.append(f"  every fact agrees with the ledger at that checkpoint; the ledger has {more} more now")
    made = {"verified": True, "compared": since is not None, "witnesses": counted, "statement": content}
    return compared(made, folder, record, *lines, letter_text(letter(content)))


def _count_witnesses(note: Note, time: int, trust: Trust, required: int | None) -> tuple[dict[str, int | None], str]:
    """Return how many trusted witnesses cosigned, and how many the key ring and the terms of the ledger require.

    NotVerified if the key ring names witnesses and fewer cosigned. `required` is None if the terms are not known.
    """
    counted, quorum = trust.check_witnesses(note, time)
    wanted = max(quorum, required or 0)
    if not trust.names(Role.WITNESS):
        terms = "" if required is None else f"; the terms of the ledger require {required or 'none'}"
        return {"cosigned": None, "required": required}, f"witnesses: not counted, because --trust names none{terms}"
    if counted < wanted:
        problem = f"{counted} trusted witnesses cosigned the checkpoint, but {wanted} are required"
        raise NotVerified("ledger.quorum-not-reached", problem, "ask the witnesses, or get a copy with cosignatures")
    return {"cosigned": counted, "required": wanted}, f"witnesses: {counted} cosigned, of {wanted} required"


def _check_receipt(prefix: Path, trust: Trust, book: LedgerReader | None, folder: Path | None) -> Answer:
    """Check both proofs by the trusted keys of their origin."""
    leaf, cose, text = (
        keys.read_small(_with_suffix(prefix, s), "the receipt", most=_MAX_FILE_BYTES)
        for s in (_LEAF_SUFFIX, _COSE_SUFFIX, _TEXT_SUFFIX)
    )
    body_path = _with_suffix(prefix, _BODY_SUFFIX)
    body = keys.read_small(body_path, "the receipt", most=_MAX_FILE_BYTES) if body_path.exists() else None
    try:
        found, proof = Receipt.decode(cose), TlogProof.parse(text)
        kept = leaves.decode_kept(leaf)
        record = leaves.decode_leaf(StoredLeaf(leaf, body)) if body is not None or kept.contribution else None
    except LaminaError as error:
        problem = f"'{prefix}' is not a receipt: {error.problem}"
        raise NotVerified("cli.receipt-malformed", problem, _ASK_AGAIN) from None
    trusted = trust.keys(found.origin)
    if found.kid not in {key.id for key in trusted}:
        problem = (
            f"the receipt of {found.origin!r} is signed by key {found.kid.hex()[:16]}, which --trust does not hold"
        )
        remedy = "give the ledger's own public key, not its owner's; the operator of the ledger has it: lamina ledger key LEDGER"
        raise NotVerified("cli.receipt-key-not-trusted", problem, remedy)
    if not any(receipts.verify_receipt(cose, leaf, key, found.origin) for key in trusted):
        problem = f"the receipt of {found.origin!r} is not signed by its key, or is of another leaf"
        raise NotVerified("cli.receipt-not-trusted", problem, _ASK_AGAIN)
    named = [NoteKey(found.origin, key) for key in dict.fromkeys(trusted)]
    head = proof.verify(leaf, named, origin=found.origin)
    if proof.index != found.index or kept.seq != found.index:
        problem = f"the proofs are of leaves {found.index} and {proof.index}"
        raise NotVerified("cli.receipt-proofs-differ", problem, _ASK_AGAIN)
    if book is not None and (book.origin, book.root_at(head.size)) != (found.origin, head.root):
        raise NotVerified("cli.receipt-other-ledger", f"the receipt is not of the ledger {book.name}", _ASK_AGAIN)
    required = None if book is None else book.parties(head.size).witnesses
    counted, line = _count_witnesses(parse_checkpoint(proof.checkpoint)[1], kept.time, trust, required)
    made = {"verified": True, "origin": found.origin, "index": found.index, "size": head.size, "witnesses": counted}
    said = f"verified: leaf {found.index} of {head.size:,} in {found.origin}, {format_utc(kept.time)}\n  {line}"
    told = KIND_NAMES[kept.kind] if record is None else describe_leaf(record)
    return compared(made, folder, record and record.record, said, f"  {told}")


_ASK_AGAIN = "get the receipt again, and the keys from the owner of the ledger"


def _with_suffix(prefix: Path, suffix: str) -> Path:
    if not prefix.name:
        problem = f"'{prefix}' is not the beginning of a file name"
        raise LedgerError("cli.receipt-prefix-empty", problem, "give one, such as mine")
    return prefix.with_name(prefix.name + suffix)


@command()
def copy(
    ledger: str = LEDGER,
    target: Path = argument("FILE", "the copy; must not exist yet"),
    signed: bool = option("leave out the leaves that nobody signed or vouched for"),
) -> Answer:
    """Copy a ledger as it is at one moment, also while runs write to it.

    cp may miss the last records, which are in a second file (-wal) until SQLite moves them.

    With --signed, the copy ends where the newest checkpoint ends, or the last leaf that a process with the ledger's key
    wrote. It is the way out when somebody wrote a leaf into the store that may not stand there, and nothing can be signed
    any more: look at what was left out, then go on with the copy. Epochs that are left out were charged: resume their runs,
    which charges them again.

    Examples:

      lamina ledger copy runs/clinic.ledger.db for-the-auditor.db
      lamina ledger copy ledger.db mended.db --signed
    """
    place = existing_ledger(ledger)
    if is_postgres_url(place):
        problem = f"{printable_location(ledger)} is a database"
        raise LedgerError("cli.copy-of-database", problem, "copy it with pg_dump")
    source = SqliteStore(place, readonly=True)
    source.copy(target)
    source.close()
    cut: list[tuple[int, str]] = []
    if signed:
        store = SqliteStore(str(target))
        cut = cut_unsigned(store)
        store.close()
    with open_view(str(target)) as book:
        size = book.size
    made = {"ledger": printable_location(ledger), "copy": str(target), "size": size}
    made |= {"left_out": [{"index": seq, "kind": kind} for seq, kind in cut]} if signed else {}
    left_out = "".join(f"\n  left out: leaf {seq} ({kind})" for seq, kind in cut)
    return Answer(made, f"{target}: {pluralize(size, 'leaf', 'leaves')}{left_out}")
