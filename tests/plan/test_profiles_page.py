"""The page on profiles: its code runs and prints what it says, its TOML is read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pages
from lamina.plan.adapters import VOLATILE_CONFIG_FIELDS
from lamina.plan.depth_profile import DepthProfile

PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_python_runs_and_prints_what_follows() -> None:
    assert pages.run(PAGE, whole=True) == ["python", "text", "python", "python", "text"]


def test_every_profile_is_read() -> None:
    lines = [line for block in blocks("toml") for line in block.splitlines() if line.startswith("profile")]
    assert len(lines) == 13
    for line in lines:
        profile = DepthProfile.parse(tomllib.loads(line.replace("0f3a…", "0f" * 32))["profile"])
        assert DepthProfile.from_text(profile.text()) == profile


def test_it_names_every_field_that_is_left_out() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{field}`" in text for field in VOLATILE_CONFIG_FIELDS)
