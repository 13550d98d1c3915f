"""A release folder: every change in it is found by name, and others' tools verify its envelope."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import raises_code
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey
from trained_run import Trained

from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.governance_records import Release
from lamina.ledger.verify.tree_checks import KnownCheckpoint, Trust
from lamina.ledger.verify.verifier import verify
from lamina.release.maker import make_release
from lamina.release.manifest import open_inside, read_manifest
from lamina.release.model_card import model_card
from lamina.release.verifier import verify_release
from lamina.sign.dsse import sign_statement
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey, parse_utc
from lamina.sign.signed_json import canonical_json


def codes(folder: Path, key: PrivateKey | None = None, **options: Any) -> set[str]:
    trust = None if key is None else Trust(plain=(key.public,))
    found = verify_release(folder, trust=trust, **options)
    assert found.verified == (not found.problems) and found.signed == (found.verified and key is not None)
    assert not found.compared and not found.trusted  # without a ledger, its figures are the word of the signer
    return {each.code for each in found.problems}


def statement(folder: Path) -> dict[str, Any]:
    envelope = json.loads((folder / "manifest.json").read_text())
    found: dict[str, Any] = json.loads(b64decode(envelope["payload"]))
    return found


def resign(folder: Path, key: PrivateKey, change: Callable[[dict[str, Any]], object]) -> None:
    """The same manifest with a change, signed again by the same key."""
    made = statement(folder)
    change(made["predicate"])
    (folder / "manifest.json").write_bytes(sign_statement(made, key))


def test_a_release_verifies_and_is_in_the_ledger(release: Path, trained: Trained, key: PrivateKey) -> None:
    assert codes(release) == set() and codes(release, key) == set()
    digest = read_manifest(release, None).digest
    with trained.open() as ledger:
        records = [leaf.record for leaf in ledger.of_kind(Release)]
    assert [each.manifest.hex() for each in records if isinstance(each, Release)] == [digest]
    assert verify(trained.ledger).verified


def test_the_same_run_and_ledger_give_the_same_release(trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    made = []
    for number in (1, 2):
        copy = Trained(tmp_path / f"runs{number}" / "first", trained.outcome)
        shutil.copytree(trained.folder.parent, copy.folder.parent, symlinks=True)
        with copy.open() as ledger:
            make_release(tmp_path / f"out{number}", [copy.folder], ledger, key)
        made.append({path.name: path.read_bytes() for path in (tmp_path / f"out{number}").iterdir()})
    assert made[0] == made[1] and len(made[0]) == 7


def test_securesystemslib_verifies_the_envelope(release: Path, key: PrivateKey) -> None:
    envelope = Envelope.from_dict(json.loads((release / "manifest.json").read_text()))
    peer = SSlibKey(key.public.name, "ed25519", "ed25519", {"public": key.public.x.hex()})
    assert envelope.verify([peer], 1)


def test_the_auditor_s_page_verifies_the_manifest_as_it_says(
    release: Path, key: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "auditing.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page.partition("## A release\n")[2], re.DOTALL)[0]
    release.rename(tmp_path / "release-1")
    monkeypatch.chdir(tmp_path)
    Path("release.pub").write_bytes(key.public.pem())
    exec(code, {})
    assert "'model.safetensors'" in capsys.readouterr().out
    Path("release.pub").write_bytes(PrivateKey.generate().public.pem())
    with pytest.raises(VerificationError):
        exec(code, {})


def test_openssl_and_jq_verify_a_release_as_the_page_says(
    release: Path, trained: Trained, key: PrivateKey, tmp_path: Path
) -> None:
    """The commands of docs/verify-without-python.md, on a release, and on one with a changed file or another key."""
    if not all(map(shutil.which, ("jq", "openssl"))):
        pytest.skip("openssl or jq is not installed")
    page = (Path(__file__).parents[2] / "docs" / "verify-without-python.md").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).replace("/tmp/", "../")
    release.rename(tmp_path / "release-1")
    (tmp_path / "release.pub").write_bytes(key.public.pem())
    (tmp_path / "ledger.pub").write_bytes(PrivateKey.load(ledger_key_path(trained.ledger), None).public.pem())

    def run() -> subprocess.CompletedProcess[str]:
        line = ["bash", "-euo", "pipefail", "-c", commands]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)

    good = run()
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("Signature Verified Successfully") == 2
    assert "model.safetensors: OK" in good.stdout
    extra = tmp_path / "release-1" / "extra"
    extra.write_text("x", encoding="utf-8")
    assert run().returncode != 0
    extra.unlink()
    for name in ("release.pub", "ledger.pub"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(PrivateKey.generate().public.pem())
        assert run().returncode != 0, name
        (tmp_path / name).write_bytes(kept)
    with (tmp_path / "release-1" / "certificate.json").open("ab") as file:
        file.write(b" ")
    assert run().returncode != 0


def test_every_byte_counts(release: Path, key: PrivateKey) -> None:
    for path in sorted(release.iterdir()):
        data = path.read_bytes()
        for at in {0, len(data) // 3, len(data) - 1}:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert codes(release, key), (path.name, at)
            assert codes(release), (path.name, at)
        path.write_bytes(data)
    assert codes(release, key) == set()


def test_the_manifest_has_one_form(release: Path, key: PrivateKey) -> None:
    """Its digest is in the ledger: what says the same in other bytes is not that manifest."""
    path, other = release / "manifest.json", PrivateKey.generate()
    kept, envelope = path.read_bytes(), json.loads(path.read_bytes())
    twice = {
        **envelope,
        "signatures": [*envelope["signatures"], {**envelope["signatures"][0], "keyid": other.public.name}],
    }
    unnamed = {**envelope, "signatures": [{**envelope["signatures"][0], "keyid": ["x"]}]}
    for data, code in (
        (kept + b"\n", "release.manifest-malformed"),
        (kept.replace(b"\n", b"\r\n"), "release.manifest-malformed"),
        (canonical_json(twice), "release.manifest-malformed"),
        (canonical_json(unnamed), "release.envelope-malformed"),
    ):
        path.write_bytes(data)
        assert codes(release, key) == {code}


def test_files_that_do_not_belong_there(release: Path, key: PrivateKey, tmp_path: Path) -> None:
    (release / "notes.txt").write_text("x")
    assert codes(release, key) == {"release.extra-file"}
    (release / "notes.txt").unlink()
    (release / "README.md").rename(tmp_path / "README.md")
    assert codes(release, key) == {"release.file-missing"}
    (release / "README.md").symlink_to(tmp_path / "README.md")
    assert codes(release, key) >= {"release.link"}
    (release / "README.md").unlink()
    os.mkfifo(release / "README.md")
    assert codes(release, key) >= {"release.not-a-file"}


def test_a_folder_that_does_not_belong_there(release: Path, key: PrivateKey) -> None:
    """Nobody may look into it, perhaps; so it is refused itself."""
    (release / "hidden").mkdir(mode=0o311)
    assert codes(release, key) == {"release.extra-file"}


def test_names_of_files_are_shown_without_commands_to_a_terminal(release: Path, key: PrivateKey) -> None:
    (release / "\x1b[2Ja: trusted\n").write_text("x")
    Path(os.fsdecode(bytes(release) + b"/\xff")).write_text("x")
    found = verify_release(release, trust=Trust(plain=(key.public,)))
    assert len(found.problems) == 2 and all(str(each).isprintable() for each in found.problems)


def test_no_file_outside_is_read(release: Path, key: PrivateKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that a signed manifest names as its certificate."""
    shutil.copy(release / "certificate.cose", release.parent / "certificate.cose")
    resign(release, key, lambda p: p["certificates"][0].update(signed="../certificate.cose"))
    opened: list[str] = []

    def remember(folder: Path, name: str) -> int:
        opened.append(name)
        return open_inside(folder, name)

    monkeypatch.setattr("lamina.release.manifest.open_inside", remember)
    assert "release.certificate-wrong" in codes(release, key)
    assert opened and not any(".." in name for name in opened)


def test_a_link_instead_of_a_folder_is_refused(release: Path, key: PrivateKey, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (release / "more").symlink_to(tmp_path / "elsewhere")
    assert codes(release, key) == {"release.link"}


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../b", "a//b", "./README.md", "a\\b", "manifest.json"]
)
def test_names_that_lead_out_are_refused(release: Path, key: PrivateKey, name: str) -> None:
    made = statement(release)
    made["subject"][0]["name"] = name
    (release / "manifest.json").write_bytes(sign_statement(made, key))
    assert codes(release, key) == {"release.name-unsafe"}


def test_foreign_keys(release: Path, key: PrivateKey) -> None:
    assert codes(release, PrivateKey.generate()) == {"release.foreign-key"}
    thief = PrivateKey.generate()
    resign(release, thief, lambda p: p.update(signer=thief.public.x.hex()))
    assert codes(release, key) == {"release.foreign-key"}
    assert codes(release) >= {"release.certificate-wrong"}  # whose key is another one


def test_a_key_that_was_replaced_signs_nothing_new(release: Path, key: PrivateKey) -> None:
    created = parse_utc(statement(release)["predicate"]["created"])
    for at, code in ((created + 1, set[str]()), (created, {"release.key-retired"})):
        ring = KeyRing()
        ring.add(key.public, label="release", role="release")
        ring.rotate(key.public.id, PrivateKey.generate().public, at=at)
        assert {each.code for each in verify_release(release, trust=Trust(ring=ring)).problems} == code


def test_a_signature_that_does_not_hold_is_named(release: Path, key: PrivateKey) -> None:
    path = release / "manifest.json"
    envelope = json.loads(path.read_text())
    envelope["payload"] = b64encode(b64decode(envelope["payload"]).replace(b'"deny"', b'"Deny"')).decode()
    path.write_text(json.dumps(envelope))
    assert codes(release, key) == {"release.signature-wrong"}


def test_swapped_weights_with_a_new_manifest(release: Path, key: PrivateKey) -> None:
    """Who has the release key can sign other weights, but not certify them."""
    import hashlib

    weights = release / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    made = statement(release)
    for subject in made["subject"]:
        if subject["name"] == weights.name:
            subject["digest"]["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    (release / "manifest.json").write_bytes(sign_statement(made, key))
    assert codes(release, key) == {"release.weights-not-certified"}


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "smaller ε": (lambda p: p["posture"]["classes"]["clinical"].update(epsilon=0.1), "release.posture-differs"),
    "private as public": (
        lambda p: p["posture"]["classes"]["clinical"].update(
            public=True, epsilon=None, delta=None, membership=None, content=None
        ),
        "release.posture-differs",
    ),
    "ε of a public class": (
        lambda p: p["posture"]["classes"]["open"].update(epsilon=0.0),
        "release.manifest-malformed",
    ),
    "a rate of a public class": (
        lambda p: p["posture"]["classes"]["open"].update(membership={"0.001": 0.001, "0.01": 0.01, "0.05": 0.05}),
        "release.manifest-malformed",
    ),
    "a rate below guessing": (
        lambda p: p["posture"]["classes"]["clinical"]["membership"].update({"0.01": 0.009}),
        "release.manifest-malformed",
    ),
    "other rates": (
        lambda p: p["posture"]["classes"]["clinical"].update(content={"0.02": 0.03}),
        "release.manifest-malformed",
    ),
    "text as rates": (lambda p: p["posture"]["classes"]["clinical"].update(content="0"), "release.manifest-malformed"),
    "reach": (lambda p: p["posture"]["layers"][2]["classes"].remove("sensitive"), "release.posture-differs"),
    "more noise": (lambda p: p["posture"]["layers"][0].update(noise_std=1e6), "release.posture-differs"),
    "no certificate": (lambda p: p["certificates"].clear(), "release.certificate-missing"),
    "other run": (lambda p: p["runs"].append("00" * 16), "release.certificate-missing"),
    "ledger head": (lambda p: p["ledger"].update(size=3), "release.ledger-head-differs"),
    "ledger size of the posture": (lambda p: p["posture"].update(as_of_size=99), "release.ledger-head-differs"),
    "other ledger": (lambda p: p["ledger"].update(header="00" * 32), "release.certificate-wrong"),
    "text as ε": (lambda p: p["posture"]["classes"]["clinical"].update(epsilon="0.1"), "release.manifest-malformed"),
    "text as noise": (lambda p: p["posture"]["layers"][0].update(noise_std="9"), "release.manifest-malformed"),
    "text as certificates": (lambda p: p.update(certificates="x"), "release.manifest-malformed"),
    "more noise of a class": (
        lambda p: p["posture"]["classes"]["clinical"].update(noise_multiplier=99.0),
        "release.posture-differs",
    ),
    "other δ": (lambda p: p["posture"]["classes"]["clinical"].update(delta=1e-12), "release.posture-differs"),
    "other unit": (lambda p: p["posture"]["classes"]["clinical"].update(unit="patient"), "release.posture-differs"),
    "text as purposes": (
        lambda p: p["posture"]["classes"]["clinical"].update(purposes="care"),
        "release.manifest-malformed",
    ),
    "fewer than nobody": (lambda p: p["posture"]["withdrawn"].update(clinical=-1), "release.manifest-malformed"),
    "extra field": (lambda p: p.update(allow=True), "release.manifest-malformed"),
    "allow by default": (lambda p: p["gate"].update(default="allow"), "release.manifest-malformed"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_says_less_than_its_certificates(release: Path, key: PrivateKey, name: str) -> None:
    change, code = FORGED[name]
    resign(release, key, change)
    assert code in codes(release, key)


def test_times(release: Path, key: PrivateKey) -> None:
    until = parse_utc(statement(release)["predicate"]["not_after"])
    assert codes(release, key, now=until - 1) == set()
    assert codes(release, key, now=until) == {"release.expired"}
    assert codes(release, key, now=1_000) == {"release.from-the-future"}


def test_an_older_ledger_head_than_one_saw(release: Path, trained: Trained, key: PrivateKey) -> None:
    with trained.open() as ledger:
        seen = KnownCheckpoint.parse(ledger.latest() or "")
    assert codes(release, key, seen=[seen]) == {"release.ledger-head-older"}


def test_another_ledger_head_than_one_saw(release: Path, trained: Trained, key: PrivateKey) -> None:
    """Of the same size with another root: the ledger was forked. Or of another ledger altogether."""
    seen = KnownCheckpoint.parse((release / "checkpoint.txt").read_text())
    assert codes(release, key, seen=[seen]) == set()
    for change, code in (({"root": bytes(32)}, "release.ledger-forked"), ({"origin": "a"}, "release.other-ledger")):
        other = KnownCheckpoint(dataclasses.replace(seen.head, **change), seen.note)  # type: ignore[arg-type]
        assert codes(release, key, seen=[other]) == {code}


def test_a_run_that_is_not_private_is_not_released(trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    path = trained.folder / "metrics.json"
    path.write_text(path.read_text().replace('"noise": "secure"', '"noise": "seeded"'))
    with trained.open() as ledger:
        size = ledger.size
        with raises_code("release.not-private"):
            make_release(tmp_path / "out", [trained.folder], ledger, key)
        assert ledger.size == size
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_a_release_is_never_written_over_another(release: Path, trained: Trained, key: PrivateKey) -> None:
    with trained.open() as ledger, raises_code("release.folder-exists"):
        make_release(release, [trained.folder], ledger, key)


def test_the_papers(release: Path) -> None:
    card, bom = (release / "README.md").read_text(), json.loads((release / "bom.cdx.json").read_text())
    assert card.startswith("---\nlibrary_name: pytorch\n") and "## Privacy" in card and "| sensitive |" in card
    assert "\n\nClass sensitive: " in card  # a paragraph of its own
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.7")
    assert bom["metadata"]["component"]["type"] == "machine-learning-model"


def test_what_a_certificate_says_is_text_in_the_model_card(
    trained: Trained, key: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit stands in every sentence of the statement, and names of classes in the lists."""
    evil = "<img src=x onerror=alert(1)> [paid](http://x)"
    whole = model_card

    def with_evil_words(name: str, certificates: Any, *rest: Any, **more: Any) -> bytes:
        last = certificates[-1]
        statements = [{**each, "text": evil} for each in last.content["statements"]]
        content = {**last.content, "statements": statements, "protects": {**last.content["protects"], "badge": evil}}
        return whole(name, [dataclasses.replace(last, content=content)], *rest, **more)

    monkeypatch.setattr("lamina.release.maker.model_card", with_evil_words)
    with trained.open() as ledger:
        make_release(tmp_path / "release", [trained.folder], ledger, key)
    card = (tmp_path / "release" / "README.md").read_text()
    assert card.count("\\<img src=x") > 10 and not re.search(r"(?<!\\)(<img|\[paid)", card)


def test_the_name_of_a_model_commands_no_terminal(trained: Trained, key: PrivateKey, tmp_path: Path) -> None:
    with trained.open() as ledger:
        make_release(tmp_path / "release", [trained.folder], ledger, key, name="a\x1b[2Jb\n# c")
    assert "# a\\[2Jb \\# c\n" in (tmp_path / "release" / "README.md").read_text()
