"""`lamina ledger`: read, check and keep the record of what was admitted, spent, withdrawn and released."""

from __future__ import annotations

from collections.abc import Callable

import typer

from lamina.cli.ledger.policy_key_commands import key, policy
from lamina.cli.ledger.proof_commands import checkpoint, copy, prove, receipt, verify
from lamina.cli.ledger.record_commands import prune, show, trace, withdraw
from lamina.cli.terminal import help_text

_HELP = """The record of what was admitted, spent, withdrawn and released: append-only, signed, and checkable.

A ledger is one file (ledger.db) or a PostgreSQL database. It holds no data of anybody: digests, bounds, plans and ε. It
never says who was sampled when.

Who checks one:

  lamina ledger verify ledger.db --trust ledger.pub   is it what it claims
  lamina ledger show ledger.db --kind epoch           what does it say
  lamina ledger trace ledger.db DIGEST                one contribution

Who contributed:

  lamina ledger receipt ledger.db DIGEST -o mine      a proof to keep
  lamina ledger withdraw ledger.db DIGEST --reason consent

Who keeps one:

  lamina ledger checkpoint ledger.db --key ledger.key sign what is there
  lamina ledger copy ledger.db auditor.db             a copy, while runs write
  lamina ledger prune ledger.db --key ledger.key      sum up what is old
  lamina ledger policy ledger.db                      floors and classes
  lamina ledger key ledger.db                         whose signatures count

DIGEST is of a descriptor or of a content anchor, 64 hex digits or the first 8 or more; a folder of lamina attest, or
the number of a leaf, does as well. What every class has lost, and what remains to it: lamina spend.
"""

app = typer.Typer(no_args_is_help=True, add_completion=False, help=help_text(_HELP))
_COMMANDS: dict[str, Callable[..., None]] = {
    "show": show,
    "verify": verify,
    "prove": prove,
    "receipt": receipt,
    "trace": trace,
    "withdraw": withdraw,
    "prune": prune,
    "checkpoint": checkpoint,
    "copy": copy,
    "policy": policy,
    "key": key,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, help=help_text(_command.__doc__))(_command)
