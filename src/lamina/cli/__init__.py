"""The command line: one verb per stage, one file per command."""

from __future__ import annotations

from lamina.cli.app import main

__all__ = ["main"]
