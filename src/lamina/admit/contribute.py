"""Signing what lies on disk: ID/descriptor.cbor and ID/attestation.cose beside ID/payload.*"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from lamina.admit.commitment import subject_tag
from lamina.admit.demands import Demands
from lamina.admit.key import PrivateKey
from lamina.admit.refusal import Refused
from lamina.admit.signer import YEAR, Outcome, Signer, State, Window
from lamina.admit.source import PAYLOAD, FolderContributions
from lamina.admit.terms import Terms
from lamina.admit.times import shown
from lamina.errors import AdmissionError, LaminaError
from lamina.plan.policy import Policy

__all__ = ["YEAR", "Outcome", "State", "Window", "attest_folder", "ids_in"]

V = TypeVar("V", str, bytes)


def ids_in(folder: str | Path) -> tuple[Path, list[str]]:
    """The folder of contributions and the ids in it; a folder with a payload of its own is one contribution."""
    root = Path(folder)
    try:
        names = os.listdir(root)
    except OSError as error:
        raise AdmissionError(
            "admit.not-listed",
            f"'{root}' cannot be listed: {error.strerror}",
            "give a contribution (a folder with payload.*), or the folder that holds one folder for each",
        ) from None
    if any(name.split(".", 1)[0] == PAYLOAD and not (root / name).is_dir() for name in names):
        whole = root.resolve()
        return whole.parent, [whole.name]
    found = sorted(name for name in names if not name.startswith(".") and (root / name).is_dir())
    if not found:
        raise AdmissionError(
            "admit.holds-no-contributions",
            f"'{root}' holds no contributions",
            "put each into a folder: ID/payload.npz",
        )
    return root, found


def attest_folder(
    folder: str | Path,
    key: PrivateKey | None,
    policy: Policy,
    cls: str | Mapping[str, str],
    *,
    not_before: int | None = None,
    expires: int | None = None,
    data_class: str | None = None,
    clip_norm: float | None = None,
    noise_multiplier: float | None = None,
    profile: bool = True,
    subjects: Mapping[str, str] | None = None,
    subject_key: bytes | None = None,
    anchors: Mapping[str, bytes] | None = None,
    force: bool = False,
    dry_run: bool = False,
    now: int | None = None,
) -> Iterator[Outcome]:
    """Sign every contribution of a folder, or the one that the folder is; says of each what became of it.

    `cls` is the class of all, or of each by id. `subjects` says whom each is about: only a tag under `subject_key` is
    signed. What this key signed already for this very payload is kept if the policy still admits it and nothing
    stricter is asked for; so a second call finishes what an interrupted one began. Without `force` nothing that was
    promised is taken back: a stricter bound or depth stays, and what another key signed is left alone.
    One contribution that cannot be signed stops no other. Everything that is wrong for all of them is refused before
    the first is signed. `dry_run` says the same and writes nothing; only then the key may be missing, and whatever is
    signed counts as another's.
    """
    root, ids = ids_in(folder)
    moment = int(time.time()) if now is None else now
    window = Window(not_before=not_before, expires=expires, now=moment)
    if window.past and not force:
        raise AdmissionError(
            "admit.window-ended-never",
            f"the window ended at {shown(window.end)}: it would never be admitted",
            "give a later end, or sign by force",
        )
    if key is None and not dry_run:
        raise AdmissionError(
            "admit.no-key-sign", "there is no key to sign with", "give the private key of the contributor"
        )
    if (subjects is None) != (subject_key is None):
        raise AdmissionError(
            "admit.subject-key-given",
            "a subject key is given without subjects"
            if subjects is None
            else "subjects are given without a key",
            "give both: only a keyed tag of a subject is signed",
        )
    classes = {cls} if isinstance(cls, str) else {cls[id] for id in ids if id in cls}
    terms = {
        name: Terms.make(
            policy,
            name,
            not_before=window.begin,
            expires=window.end,
            data_class=data_class,
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            profile=profile,
        )
        for name in sorted(classes)
    }
    signer = Signer(
        key=key,
        window=window,
        demands=Demands(policy),
        named=data_class is not None,
        force=force,
        dry_run=dry_run,
    )
    source = FolderContributions(root)

    def outcomes() -> Iterator[Outcome]:
        for id in ids:
            try:
                name = cls if isinstance(cls, str) else _of(cls, id, "class")
                tag = (
                    None
                    if subjects is None
                    else subject_tag(subject_key or b"", _of(subjects, id, "subject"))
                )
                anchor = None if anchors is None else _of(anchors, id, "anchor")
                yield signer.sign(source.get(id), terms[name], tag, anchor, root / id)
            except LaminaError as error:
                yield Outcome(id=id, state=State.REFUSED, problem=error.problem)
            except Refused as refused:
                yield Outcome(id=id, state=State.REFUSED, problem=refused.detail or refused.reason.meaning)

    return outcomes()


def _of(values: Mapping[str, V], id: str, what: str) -> V:
    if id not in values:
        raise AdmissionError("admit.no", f"there is no {what} for it", f"give it a {what}")
    return values[id]
