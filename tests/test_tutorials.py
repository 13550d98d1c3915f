"""The tutorials in examples/ run as notebooks: each cell after the other, in an empty folder."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def tutorials() -> ModuleType:
    found = importlib.util.spec_from_file_location("tutorials", ROOT / "docs" / "tutorials.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def run_notebook(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the code cells of a notebook; return the names that they define."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("LAMINA_PASSPHRASE", "of another test")  # restored after the tutorial has set its own
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    return names


CHECKS: dict[str, Any] = {
    "quickstart": lambda names: names["accuracy"] > 0.8 and names["plan"].epsilon(0) <= 3.0,
    "patients_csv": lambda names: names["one"] <= 2.0 < names["both"] < 4.0 and len(names["noted"]) > 0,
    "two_hospitals": lambda names: len(names["corpus"]) == 119 and names["outcome"].epsilon["south"] <= 2.0,
    "huggingface_lora": lambda names: (names["folder"] / "adapter" / "adapter_config.json").exists(),
    "ecg": lambda names: names["losses"][-1] < names["losses"][0] and names["certificate"].private,
}


def test_every_tutorial_has_a_check() -> None:
    assert sorted(CHECKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, tutorials: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_notebook(tutorials.notebook(name), tmp_path, monkeypatch)
    assert CHECKS[name](names)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_every_cell_of_its_notebook(name: str, tutorials: ModuleType) -> None:
    page = tutorials.page(name)
    cells = json.loads(tutorials.notebook(name))["cells"]
    assert [each["cell_type"] for each in cells].count("code") >= 4
    assert all("".join(each["source"]).partition("\n")[2] in page for each in cells)
