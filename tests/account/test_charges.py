"""Accounts: one text form that reads back exactly, and words for messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code

from lamina.account.charges import Account

MICROS = st.integers(0, 10**15)


@given(st.tuples(MICROS.filter(bool), MICROS.filter(bool)) | st.just((0, 0)))
def test_the_text_of_an_account_reads_back(bound_micro: tuple[int, int]) -> None:
    clip, noise = bound_micro
    account = Account("clinical", clip, noise)
    assert Account.parse(str(account)) == account and account.signed is (str(account) != "clinical")
    name, _, bound = str(account).partition("@")
    assert name == "clinical"
    for part, letter, micro in zip(bound.split(",") if bound else (), "cz", (clip, noise), strict=False):
        whole, _, rest = part.removeprefix(f"{letter}=").partition(".")
        assert 10**6 * int(whole) + int(rest.ljust(6, "0")) == micro and not rest.endswith("0")


@pytest.mark.parametrize(
    "label",
    ["", "c=0,z=0", "c=1", "z=1,c=1", "c=1,z=", "c=1,z=01", "c=1,z=1.0", "c=1,z=1.0000001", "c=-1,z=1", "c=1,z=١"],
)
def test_another_text_names_no_account(label: str) -> None:
    with raises_code("spend.account-name-invalid"):
        Account.parse(f"clinical@{label}")


def test_accounts_are_sorted_by_their_numbers() -> None:
    texts = ["a@c=10,z=1", "a@c=9,z=1", "a", "b", "a@c=9,z=0.5"]
    assert list(map(str, sorted(map(Account.parse, texts)))) == ["a", "a@c=9,z=0.5", "a@c=9,z=1", "a@c=10,z=1", "b"]
