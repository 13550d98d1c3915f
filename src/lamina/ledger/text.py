"""Rules for text that is signed or names a signer: what characters, numbers and base64 may look like."""

from __future__ import annotations

import base64

from lamina.errors import EncodingError
from lamina.ledger.errors import LedgerError

MAX_TEXT = 256 * 1024  # bytes; room for a note with 16 signatures of 5 kB and more, as C2SP asks
MAX_NAME = 256


def decode64(text: str, what: str) -> bytes:
    """Bytes in standard base64 with padding, in the one way to write them."""
    try:
        raw = base64.b64decode(text)
    except ValueError:
        raw = b""
    if encode64(raw) != text:  # whatever else a decoder lets pass
        raise EncodingError(
            "ledger.not-base64-rfc", f"{what} is not base64 as RFC 4648 §4 writes it", "copy it again, whole"
        )
    return raw


def decimal(text: str, what: str, largest: int) -> int:
    """A number of digits without leading zeroes."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20) or (text[0] == "0" and text != "0"):
        raise EncodingError(
            "ledger.not-decimal-number",
            f"{what} {text[:24]!r} is not a decimal number without leading zeroes",
            "copy it again",
        )
    if int(text) > largest:
        raise EncodingError(
            "ledger.allowed", f"{what} is {text}, at most {largest} is allowed", "copy it again"
        )
    return int(text)


def encode64(raw: bytes) -> str:
    """Bytes in standard base64."""
    return base64.b64encode(raw).decode("ascii")


def check_text(text: str) -> None:
    """Refuse what no signed note may hold: control characters but newlines, lone surrogates, too much."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise LedgerError(
            "ledger.text-holds-lone",
            "the text holds a lone surrogate, which UTF-8 cannot carry",
            "fix the text",
        ) from None
    if size > MAX_TEXT:
        raise LedgerError(
            "ledger.text-bytes-allowed",
            f"the text has {size} bytes, at most {MAX_TEXT} are allowed",
            "sign its hash",
        )
    if control := next((char for char in text if char < " " and char != "\n"), None):
        raise LedgerError(
            "ledger.text-holds-control",
            f"the text holds the control character {control!r}",
            "only newlines are allowed",
        )


def check_name(name: str) -> None:
    """Refuse what cannot name a key: nothing, blanks of any kind, or a plus sign."""
    check_text(name)
    if not 1 <= len(name.encode("utf-8")) <= MAX_NAME or "+" in name or any(map(str.isspace, name)):
        raise LedgerError(
            "ledger.key-name-bytes",
            f"the key name {name[:40]!r} must have 1 to {MAX_NAME} bytes without blanks and without +",
            "name it like example.org/ledger",
        )
