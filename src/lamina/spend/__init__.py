"""What runs cost together: charges, and the ledger as they are added up in it and held to a bound."""

from __future__ import annotations

from lamina.spend.accounts import Charge, SignedAccount, plan_charges
from lamina.spend.spend_ledger import SpendLedger

__all__ = ["SignedAccount", "SpendLedger", "Charge", "plan_charges"]
