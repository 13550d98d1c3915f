"""What runs cost together: charges, and the ledger as they are added up in it and held to a bound."""

from __future__ import annotations

from lamina.train.book.account import Account
from lamina.train.book.asking import Booked
from lamina.train.book.book import Book
from lamina.train.book.charge import Charge, charges

__all__ = ["Account", "Book", "Booked", "Charge", "charges"]
