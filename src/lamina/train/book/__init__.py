"""What runs cost together: charges, and the book in which they are added up and held to a bound."""

from __future__ import annotations

from lamina.train.book.account import Account
from lamina.train.book.book import Booked, SpendBook
from lamina.train.book.charge import Charge, charges

__all__ = ["Account", "Booked", "Charge", "SpendBook", "charges"]
