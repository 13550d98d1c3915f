"""The record of what was admitted, spent, withdrawn and released: append-only, signed, and checkable.

A ledger is one file (ledger.db) or a PostgreSQL database. It holds nobody's data: only digests, bounds, plans and ε. It
never records who was sampled when.

To check one:

  lamina ledger verify ledger.db --trust owner.pub    is it what it claims
  lamina ledger show ledger.db --kind epoch           what does it say
  lamina ledger trace ledger.db DIGEST                one contribution

If you contributed:

  lamina ledger receipt ledger.db DIGEST -o mine      a proof to keep
  lamina ledger statement ledger.db DIGEST -o DIR     a signed letter: where it was used, what it lost
  lamina ledger request FOLDER --reason consent --key alice.key
  lamina ledger reconcile ledger.db DIGEST -o DIR     what a deletion request comes to

To maintain one:

  lamina ledger checkpoint ledger.db --key ledger.key sign all records
  lamina ledger heartbeat ledger.db --key ledger.key  sign the present time; run it by a timer
  lamina ledger withdraw ledger.db --request mine.cose
  lamina ledger copy ledger.db auditor.db             copy it while runs write
  lamina ledger complete ledger.db runs/first         enter records of runs again that a restored copy lacks
  lamina ledger prune ledger.db --key ledger.key      replace old records by totals
  lamina ledger policy ledger.db                      floors and classes
  lamina ledger key ledger.db                         its keys
  lamina ledger terms ledger.db                       witnesses, retention, who may withdraw

To be a witness of one, without access to it:

  lamina ledger witness new.checkpoint --key witness.key --state witness.json --trust ledger.pub

To own one, with governing keys that stay offline:

  lamina ledger init ledger.db policy.toml --governing-key owner.key
  lamina ledger sign change.msg --key owner.key       authorise what --propose wrote
  lamina ledger submit ledger.db change.msg --signature change.msg.sig

DIGEST is that of a descriptor or of a content anchor: 64 hex digits, or the first 8 or more. A folder of lamina attest,
or the number of a leaf, works too. For the ε that every class has spent: lamina spend.
"""

from __future__ import annotations

from lamina.cli.command import group
from lamina.cli.ledger.governing_commands import init, sign, submit, terms
from lamina.cli.ledger.policy_key_commands import key, policy
from lamina.cli.ledger.proof_commands import checkpoint, copy, heartbeat, prove, receipt, verify, witness
from lamina.cli.ledger.reconcile_command import reconcile, statement
from lamina.cli.ledger.record_commands import complete, prune, show, trace
from lamina.cli.ledger.withdraw_commands import request, withdraw

app = group(
    __doc__, show, verify, prove, receipt, trace, statement, reconcile, request, withdraw, complete, prune, checkpoint, heartbeat, witness,
    copy, policy, key, init, terms, sign, submit,
)  # fmt: skip
