"""`python -m lamina.cli.ledger verify …`: the commands of a ledger by themselves."""

from __future__ import annotations

import sys

from lamina.cli.ledger import app
from lamina.cli.terminal import print_json, print_refusal, refusal_json
from lamina.errors import LaminaError

if __name__ == "__main__":
    try:
        app(prog_name="lamina ledger")
    except LaminaError as error:
        print_refusal(error)
        if "--json" in sys.argv:
            print_json(refusal_json(error))
        sys.exit(1)
