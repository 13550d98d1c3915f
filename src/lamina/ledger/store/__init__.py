"""Where a ledger is kept: one interface, SQLite and PostgreSQL behind it."""
