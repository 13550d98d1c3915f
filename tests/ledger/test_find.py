"""Finding a contribution by the first digits of a digest: one alone, several, none; in both stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from making import LEDGER, Clock, admitted, digest, header
from refusals import raises_code

from lamina.errors import LedgerError
from lamina.ledger.contribution_columns import INDEX_KEY_BYTES, index_key_ranges
from lamina.ledger.reader import find_contributions, find_leaf
from lamina.ledger.writer import Ledger


def whole(begins: str) -> bytes:
    """A digest that begins so."""
    return bytes.fromhex(begins.ljust(64, "7"))


LONG = "abcdef01" + "2" * 22  # the 15 bytes that the index keeps
ANCHOR = whole("feedf00d")
DESCRIPTORS = [
    whole("11111111a"),  # leaf 1
    whole("11111111b"),
    whole("2" * 8),
    whole(LONG + "a"),
    whole("abcdef02"),
    *(whole(f"33333333{n}") for n in range(7)),  # leaves 6 to 12
    whole("00000009"),  # 13: no number
    whole("f" * 64),
    whole("0" * 16),  # 15
]


@pytest.fixture
def ledger(where: str) -> Iterator[Ledger]:
    with Ledger.create(where, header(), LEDGER, clock=Clock()) as made:
        for n, descriptor in enumerate(DESCRIPTORS):
            anchor = ANCHOR if n in (5, 12) else None
            made.append([admitted(n, descriptor=descriptor, anchor=anchor, subject=digest("subject", n))])
        yield made


def seqs(ledger: Ledger, name: str) -> list[int]:
    return [leaf.seq for leaf in find_contributions(ledger, name)]


def test_the_first_digits_of_one(ledger: Ledger) -> None:
    for length in (9, 10, 15, 29, 30, 31, 63, 64):
        assert seqs(ledger, whole("11111111a").hex()[:length]) == [1]
    assert seqs(ledger, "ABCDEF01") == [4]
    assert seqs(ledger, LONG) == seqs(ledger, LONG + "a") == [4]
    assert seqs(ledger, "f" * 8) == seqs(ledger, "f" * 63) == [14]
    assert seqs(ledger, "0" * 12) == [15]
    assert find_leaf(ledger, "abcdef02") == 5


def test_an_anchor_of_several(ledger: Ledger) -> None:
    """One digest, two contributions: not ambiguous for who asks for all of it, but for who asks for one leaf."""
    assert seqs(ledger, "feedf00d") == seqs(ledger, ANCHOR.hex()) == [6, 13]
    for name in ("feedf00d", ANCHOR.hex()):
        with raises_code("ledger.digest-ambiguous"):
            find_leaf(ledger, name)


def test_several_that_begin_so(ledger: Ledger) -> None:
    with pytest.raises(LedgerError) as caught:
        find_contributions(ledger, "11111111")
    assert "could be 2 things" in caught.value.problem
    for number in (0, 1):
        assert f"{DESCRIPTORS[number].hex()} (leaf {number + 1})" in caught.value.problem
    assert caught.value.remedy == "give more digits"
    with pytest.raises(LedgerError) as caught:
        find_leaf(ledger, "33333333")
    assert "more than 5 things" in caught.value.problem
    assert caught.value.problem.count("(leaf ") == 5 and caught.value.problem.endswith(", …")


def test_nobody_begins_so(ledger: Ledger) -> None:
    for name in ("abcdef03", LONG + "b", "1111111c", digest("subject", 1).hex()[:12], "99999999", "00000003"):
        with raises_code("ledger.contribution-unknown"):
            find_contributions(ledger, name)
    for name in ("abcdef0", "abcdefgh", "0x11111111", "", "a" * 65):
        with raises_code("ledger.name-not-understood"):
            find_contributions(ledger, name)


def test_short_numbers_are_leaves(ledger: Ledger) -> None:
    assert seqs(ledger, "6") == seqs(ledger, "0000006") == [6]
    assert seqs(ledger, "00000009") == [13]
    assert seqs(ledger, "22222222") == [3]
    assert find_leaf(ledger, "0") == 0
    with raises_code("ledger.not-a-contribution"):
        find_contributions(ledger, "0")


def test_a_number_that_could_be_both(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ledger of so many leaves; nothing is withdrawn by a guess."""
    monkeypatch.setattr(Ledger, "size", 30_000_000)
    for ask in (find_contributions, find_leaf):
        with pytest.raises(LedgerError) as caught:
            ask(ledger, "22222222")
        assert "could be 2 things: leaf 22222222, 2222222277" in caught.value.problem
    assert find_leaf(ledger, "12345678") == 12_345_678


def test_ranges_of_keys() -> None:
    for digits in ("abcdef0", "abcdef01", LONG, LONG + "a"):
        for first, last in index_key_ranges(digits):
            assert len(first) == len(last) == INDEX_KEY_BYTES
            assert first[:1] == last[:1]
            assert first[1:].hex().startswith(digits[:30]) and last[1:].hex().startswith(digits[:30])
            assert int.from_bytes(last, "big") - int.from_bytes(first, "big") == 16 ** max(0, 30 - len(digits)) - 1
