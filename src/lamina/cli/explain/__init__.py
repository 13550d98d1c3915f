"""What `lamina plan` says beyond the table: figures per layer, reasons, pictures, policies side by side."""

from __future__ import annotations
