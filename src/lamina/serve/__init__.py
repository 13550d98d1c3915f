"""The service: inference behind the gate of a release, withdrawals, and the ledger with its proofs, over HTTP."""
