"""Keys, the key ring, and signature formats: COSE, DSSE envelopes, signed JSON and signed notes."""
