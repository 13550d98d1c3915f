"""A stranger with a CDDL validator: which of some encodings fit a grammar. Runs without Lamina.

Reads {"grammar": text, "data": [hex]} from standard input, writes a list of true and false.
"""

import json
import sys

from pycddl import Schema, ValidationError


def fits(schema: Schema, data: bytes) -> bool:
    try:
        schema.validate_cbor(data)
    except ValidationError:
        return False
    return True


asked = json.load(sys.stdin)
schema = Schema(asked["grammar"])
json.dump([fits(schema, bytes.fromhex(text)) for text in asked["data"]], sys.stdout)
