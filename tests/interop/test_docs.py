"""What docs/attestation.md tells a third party is true: the script runs, the grammars fit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from signed_descriptor import FULL_VALUES, KEY, encoded

from lamina.admit.attestation import Attestation, Descriptor, attest, subject_tag
from lamina.admit.signing import SigningState, attest_folder
from lamina.errors import LaminaError
from lamina.plan.policy import Policy
from lamina.sign.keys import PrivateKey

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "attestation.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


# ------------------------------------------------------------------------------ the script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A contribution that `lamina attest` signed, the public key, and the script as it is printed."""
    (tmp_path / "p1").mkdir()
    np.savez(tmp_path / "p1" / "payload.npz", x=np.zeros((3, 4)))
    (outcome,) = attest_folder(tmp_path / "p1", KEY, Policy.template(), "sensitive")
    assert outcome.state is SigningState.SIGNED
    (tmp_path / "alice.cose").write_bytes(KEY.public.cose())
    (script,) = blocks("python")
    (tmp_path / "check.py").write_text(script, encoding="utf-8")
    return tmp_path


def check(python: Path, folder: Path) -> tuple[int, str]:
    words = [str(python), "check.py", "p1", "alice.cose"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_script_finds_everything_in_order(pycose: Path, folder: Path) -> None:
    code, printed = check(pycose, folder)
    assert code == 0, printed
    assert printed.count(": ok") == 8


def _payload(folder: Path) -> None:
    with open(folder / "p1" / "payload.npz", "ab") as file:
        file.write(b"\0")


def _bound(folder: Path) -> None:
    path = folder / "p1" / "descriptor.cbor"
    content = cbor2.loads(path.read_bytes())
    path.write_bytes(cbor2.dumps(content | {6: content[6] - 1}, canonical=True))


def _key(folder: Path) -> None:
    (folder / "alice.cose").write_bytes(PrivateKey.generate().public.cose())


def _other_descriptor(folder: Path) -> None:
    (folder / "p1" / "attestation.cose").rename(folder / "kept")
    list(attest_folder(folder / "p1", KEY, Policy.template(), "sensitive", force=True))
    shutil.copy(folder / "kept", folder / "p1" / "attestation.cose")


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (_payload, ["payload"]),
        (_bound, ["signature", "terms of use"]),
        (_key, ["signature", "contributor"]),
        (_other_descriptor, ["signature", "one descriptor"]),
    ],
)
def test_the_script_finds_what_is_wrong(change: Any, failed: list[str], pycose: Path, folder: Path) -> None:
    change(folder)
    code, printed = check(pycose, folder)
    assert code == 1, printed
    assert [line.partition(":")[0] for line in printed.splitlines() if line.endswith("NOT OK")] == failed


# ------------------------------------------------------------------------------ the grammars

FULL = Descriptor(**FULL_VALUES)


def fits(python: Path, grammar: str, data: list[bytes]) -> list[bool]:
    """What the validator says. It searches where .regexp means the whole text (RFC 8610 §3.8.3): hence the anchors."""
    grammar = re.sub(r'\.regexp "(.*?)"', r'.regexp "^(\1)$"', grammar)
    done = subprocess.run(
        [str(python), str(HERE / "cddl_peer.py")],
        input=json.dumps({"grammar": grammar, "data": [each.hex() for each in data]}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def ours(kind: type[Descriptor] | type[Attestation], data: bytes) -> bool:
    try:
        kind.decode(data)
    except LaminaError:
        return False
    return True


def test_the_grammar_of_the_descriptor_is_what_is_checked(pycose: Path) -> None:
    """It and our decoder say the same about each content.

    Left out are the rules that a grammar cannot state, and types under .size, which this validator does not look at.
    """
    grammar, _ = blocks("cddl")
    content: dict[Any, Any] = cbor2.loads(FULL.encode())
    changes: list[dict[Any, Any]] = [{}, {9: ...}, {15: ...}, {9: ..., 15: ...}]
    changes += [{key: ...} for key in content if key not in (9, 15)]
    changes += [{key: 1} for key in (0, 16, -1, "x")]
    for key, values in {
        1: (0, 2, "1"), 2: (bytes(31), bytes(33), "a"), 3: ("", "A", "a" * 64, "a" * 65, b"a"),
        4: ("", "a b", "A.b_c-d", "-", "a" * 65), 5: (-1, 10**15, 10**15 + 1, 1.5, "1"), 6: (-1, True),
        7: (-1, None), 8: (253402300799, 253402300800), 9: ("", "a" * 1024, "a" * 1025),
        10: (bytes(31),), 11: (0, 1, 10**15 + 1), 12: (bytes(15), bytes(17)), 13: (b"",),
        14: ("", "é" * 127, "é" * 128), 15: (bytes(31), None),
    }.items():  # fmt: skip
        changes += [{key: value} for value in values]
    data = [
        encoded({key: value for key, value in (content | change).items() if value is not ...}) for change in changes
    ]
    theirs = fits(pycose, grammar, data)
    for change, answer, each in zip(changes, theirs, data, strict=True):
        assert answer is ours(Descriptor, each), change
    assert theirs.count(True) == 11


def test_the_grammar_of_the_attestation_is_what_is_checked(pycose: Path) -> None:
    _, grammar = blocks("cddl")
    plain = attest(FULL, KEY, issued_at=1_767_225_601)
    tagged = attest(FULL, KEY, issued_at=1_767_225_601, subject_tag=subject_tag(bytes(32), "ann"))
    bound = attest(FULL, KEY, issued_at=1_767_225_601, ledger=bytes(32))
    body = cbor2.loads(plain).value
    header: dict[Any, Any] = cbor2.loads(body[0])
    claims = header[15]

    def message(protected: Any, unprotected: Any = None, payload: Any = None, signature: Any = bytes(64)) -> bytes:
        items = (encoded(protected), {} if unprotected is None else unprotected, payload, signature)
        return b"\xd2\x84" + b"".join(encoded(each) for each in items)

    data = [
        plain, tagged, bound, message(header), message(header | {1: -19}),
        message(header | {15: {key: value for key, value in claims.items() if key > -65542}}),
        message(header | {1: -7}), message(header | {2: [1]}), message(header | {3: 1}),
        message(header | {4: bytes(31)}), message(header | {16: "application/cwt"}),
        message(header | {258: -44}), message(header | {259: "x"}),
        message(header | {260: "x"}), message({key: value for key, value in header.items() if key != 15}),
        message(header | {15: claims | {1: "alice"}}), message(header | {15: claims | {2: "ann"}}),
        message(header | {15: claims | {3: ""}}), message(header | {15: claims | {4: -1}}),
        message(header | {15: claims | {5: 2**40}}), message(header | {15: claims | {6: "now"}}),
        message(header | {15: claims | {7: bytes(15)}}), message(header | {15: claims | {8: 1}}),
        *(message(header | {15: claims | {key: value}}) for key, value in (
            (-65537, "-"), (-65538, "ECG"), (-65539, -1), (-65540, 10**15 + 1), (-65541, 1), (-65542, "a" * 1025),
            (-65543, bytes(31)), (-65544, 1),
        )),
        *(message(header | {15: {k: v for k, v in claims.items() if k != key}}) for key in range(-65541, -65536)),
        message(header, payload=b""), message(header, signature=bytes(63)),
        message(header, signature=None), plain[1:], b"\xd1" + plain[1:], b"\x01",
    ]  # fmt: skip
    # The validator applies .cbor to every item of an array and takes anything for {}: so the message and what it wraps
    # are looked at one by one, and unprotected headers are not among the data.
    outer = grammar.replace("bstr .cbor header", "bstr")
    inner = grammar[grammar.index("header =") :]
    wrapped = [_first(each) for each in data]
    theirs = [a and b for a, b in zip(fits(pycose, outer, data), fits(pycose, inner, wrapped), strict=True)]
    for number, (answer, each) in enumerate(zip(theirs, data, strict=True)):
        assert answer is ours(Attestation, each), number
    assert theirs == [True] * 6 + [False] * (len(data) - 6)


def _first(message: bytes) -> bytes:
    """The protected header, or something that is none."""
    body = getattr(cbor2.loads(message), "value", None)
    return body[0] if isinstance(body, list | tuple) else b"\x00"
