"""Reads the text of PDFs as typst writes them: pages, lines of text, sizes and places. No PDF library is needed."""

from __future__ import annotations

import ast
import re
import zlib
from dataclasses import dataclass

_TEXT = re.compile(rb"1 0 0 -1 ([\d.-]+) ([\d.-]+) cm|/(f\d+) ([\d.]+) Tf|(\[.*?\])TJ", re.S)


@dataclass(frozen=True)
class PdfText:
    """The text of a file, without spaces between its pieces; the smallest size; the extent of all places of text."""

    pages: int
    text: str
    least_size: float
    lowest: float
    rightmost: float


def read_pdf(data: bytes) -> PdfText:
    objects = {int(found[1]): _inflated(found[2]) for found in re.finditer(rb"(\d+) 0 obj\s*(.*?)endobj", data, re.S)}
    pages = re.findall(rb"/Type/Page/Resources (\d+) 0 R.*?/Contents (\d+) 0 R", data, re.S)
    pieces, sizes, places = [], [], []
    for resources, contents in pages:
        fonts: dict[bytes, dict[int, str]] = {}
        for name, number in re.findall(rb"/(f\d+) (\d+) 0 R", objects[int(resources)]):
            unicode_map = re.search(rb"/ToUnicode (\d+) 0 R", objects[int(number)])
            assert unicode_map is not None
            pairs = re.findall(rb"<(\w{4})> <(\w+)>\n", objects[int(unicode_map[1])])
            fonts[name] = {int(code, 16): bytes.fromhex(text.decode()).decode("utf-16-be") for code, text in pairs}
        font: dict[int, str] = {}
        for x, y, name, size, shown in _TEXT.findall(objects[int(contents)]):
            if name:
                font = fonts[name]
                sizes.append(float(size))
            elif x:
                places.append((float(x), float(y)))
            else:
                parts = re.findall(rb"\(((?:\\.|[^\\)])*)\)", shown, re.S)
                pieces.append("".join(_decoded(part, font) for part in parts))
    return PdfText(
        pages=len(pages),
        text="".join(pieces),
        least_size=min(sizes),
        lowest=min(y for _, y in places),
        rightmost=max(x for x, _ in places),
    )


def _inflated(body: bytes) -> bytes:
    """The content of a stream; its compressed form may end with a byte that looks like the end of a line."""
    begin = re.search(rb"stream\r?\n", body)
    try:
        return zlib.decompressobj().decompress(body[begin.end() :]) if begin else body
    except zlib.error:
        return body


def _decoded(part: bytes, font: dict[int, str]) -> str:
    escaped = re.sub(rb"\\([()])", rb"\1", part.replace(b'"', b'\\"').replace(b"\n", b"\\n").replace(b"\r", b"\\r"))
    codes = ast.literal_eval('b"' + "".join(chr(c) if c < 128 else f"\\x{c:02x}" for c in escaped) + '"')
    return "".join(font.get(int.from_bytes(codes[at : at + 2], "big"), "") for at in range(0, len(codes), 2))
