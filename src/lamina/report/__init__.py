"""Pages for people: what a ledger and a run say, as HTML with pictures. Needs no torch."""
