"""The public names: there when asked for, and no sooner."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lamina
import lamina.plan


@pytest.mark.parametrize("module", [lamina, lamina.plan])
def test_every_name_that_is_promised_is_there(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        assert getattr(module, name) is not None
    assert set(lamina.__all__) <= set(dir(lamina))


def test_names_are_what_they_say_and_not_modules() -> None:
    assert lamina.fix.__module__ == "lamina.plan.coverage"
    assert lamina.measure.__module__ == "lamina.allocate.measure.measure"
    assert lamina.LayerStack is lamina.plan.LayerStack
    assert lamina.merge_subspace.__module__ == lamina.pretrain.__module__ == "lamina.run.pretrain"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Opacus'"):
        _ = lamina.Opacus  # type: ignore[attr-defined]


def test_importing_lamina_does_not_wait_for_torch() -> None:
    code = "import sys, lamina; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["lamina.ledger.verify", "lamina.admit", "lamina.cli.keys", "lamina.cli.ledger"])
def test_what_checks_and_signs_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
