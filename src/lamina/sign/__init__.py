"""Keys, the key ring, and the formats of what is signed: COSE, DSSE envelopes, signed JSON and signed notes."""
