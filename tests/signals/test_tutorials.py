"""The tutorials run as they are printed, with fewer patients and steps, on simulated files in the same layout."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import raises_code

from lamina import LayerStack, Measure
from lamina.cli.app import main
from lamina.cli.by_name import make_model
from lamina.cli.run_file import RunFile
from lamina.signals.presets import run_file, run_files

DOCS = Path(__file__).parents[2] / "docs"
SMALLER = {
    "patients=3000": "patients=20", "patients=500": "patients=20", "reshape(500,": "reshape(20,", "steps=2000": "steps=3",
    "patients=300,": "patients=24, days=2,", "patients=1000": "patients=40", "--steps 200": "--steps 2",
    'preset = "cgm-pretrained"': 'preset = "cgm-pretrained"\nsteps = 2',
    'preset = "autoencoder-pretrained"': 'preset = "autoencoder-pretrained"\nsteps = 2',
}  # fmt: skip


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A block that begins with the name of a file is that file; the others are carried out. What they printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "nets", raising=False)  # of another test
    text = (DOCS / page).read_text(encoding="utf-8")
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    names: dict[str, Any] = {}
    try:
        for language, body in re.findall(r"```(python|toml|sh)\n(.*?)```", text, re.DOTALL):
            if name := re.match(r"# (\w+\.(?:py|toml))\n", body):
                (folder / name[1]).write_text(body, encoding="utf-8")
            elif language == "python":
                exec(compile(body, page, "exec"), names)
            else:
                assert language == "sh"
                for line in body.splitlines():
                    program, *words = shlex.split(line, comments=True)
                    with pytest.raises(SystemExit) as caught:
                        main(words)
                    assert program == "lamina" and caught.value.code in (0, None), capsys.readouterr().err
    finally:
        sys.modules.pop("nets", None)
    printed = capsys.readouterr().out
    exec(compile(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], page, "exec"), {})  # complete by itself
    assert capsys.readouterr().out in printed
    return printed


def test_from_a_folder_of_ptbxl_to_a_certified_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run_page("tutorial-ptbxl.md", tmp_path, monkeypatch, capsys)
    assert "(12, 1000) 100.0 ('I', 'II'" in printed and "(6, 12, 256)" in printed
    assert "HYP: AUC" in printed
    assert (tmp_path / "runs" / "RUN" / "certificate.cose").exists()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_from_glucose_readings_to_a_certified_autoencoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run_page("tutorial-cgm.md", tmp_path, monkeypatch, capsys)
    assert "0.0% missing" in printed
    assert "before the private run" in printed and "after the private run" in printed
    assert (tmp_path / "runs" / "RUN" / "certificate.cose").exists()


def test_the_layers_of_a_paper_run_are_measured_on_simulated_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "signals.md").read_text(encoding="utf-8").replace("patients=100", "patients=8")
    (body,) = (one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "lamina.measure(" in one)
    monkeypatch.chdir(tmp_path)
    exec(compile(body, "signals.md", "exec"), {})
    found = RunFile.parse(run_file("paper-ptbxl"))
    stack = LayerStack.from_model(make_model(found.model.factory, found.model.args))
    assert Measure.load(tmp_path / str(found.measure)).layers == tuple(layer.name for layer in stack)


@pytest.mark.parametrize(
    ("name", "model"),
    [("paper-ptbxl", "res-ae"), ("paper-ptbxl-conv", "conv-ae"), ("paper-ohio", "stacked-ae"), ("paper-ohio-vae", "vae"),
     ("paper-mimic", "trans-ae"), ("paper-mimic-conv", "conv-ae")],
)  # fmt: skip
def test_the_settings_of_the_paper_are_run_files(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`lamina train --preset` prints what `--presets` lists, and its model takes the channels that its data give."""
    for words in (["--presets"], ["--preset", name]):
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
        assert ended.value.code in (0, None)
        printed = capsys.readouterr().out
        assert words == ["--preset", name] or name in printed
    found = RunFile.parse(printed)
    assert found.model.factory == model
    assert found.allocate is not None and found.allocate.name == "lsab"
    made = make_model(found.model.factory, found.model.args)
    assert sum(p.numel() for p in made.parameters()) > 10_000
    streams = found.data.args.get("stream", "").split("+")
    assert found.model.args.get("channels", 12) == len(found.data.args.get("channels", streams)) or "ptbxl" in name


def test_a_preset_without_a_run_file_is_refused() -> None:
    assert len(run_files()) == 6
    for name, code in (("ecg-linear", "plan.preset-without-run"), ("paper-ptb", "plan.preset-not-known")):
        with raises_code(code):
            run_file(name)
