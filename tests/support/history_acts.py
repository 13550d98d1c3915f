"""What people do to runs that share a ledger: acts as plain mappings, drawn by a seed.

A history that fails can be printed, cut down, and put into a test as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from run_state import moments
from stopping import die

Act = Mapping[str, Any]
FOLDERS = ("a", "b", "c", "d")
STEPS = (8, 11)
SIGNED = {"z=0.1": 0.25, "z=0.2": 0.5, "z=0.3": 1.0}  # what is signed, and the scale that it is trained at
FREQUENT = {
    "go": 14.0, "copy": 3.0, "save": 2.0, "restore": 2.0, "drop_checkpoint": 1.0, "save_ledger": 1.0,
    "restore_ledger": 1.0, "lose": 1.0, "finish": 1.0, "stricter": 0.5, "rotate": 0.4,
}  # fmt: skip


@contextmanager
def killed_at(number: int, only: str = "") -> Iterator[None]:
    """The process ends before the n-th call that changes a file, the ledger or the model; `only` as in `moments`."""
    count = 0

    def pass_by() -> None:
        nonlocal count
        count += 1
        if count == number:
            die()

    with moments(pass_by, only):
        yield


# ---------------------------------------------------------------------------------------- drawn


def drawn(seed: int, length: int, forms: Sequence[str]) -> list[dict[str, Any]]:
    """A history of runs with up to three of these forms of noise: the same for a seed."""
    dice = random.Random(seed)
    mine = dice.sample(list(forms), k=min(len(forms), dice.choice((1, 2, 3))))
    return [_act(dice, mine) for _ in range(length)]


def _act(dice: random.Random, forms: Sequence[str], inner: bool = False) -> dict[str, Any]:
    kind = dice.choices(list(FREQUENT), list(FREQUENT.values()))[0]
    folder = dice.choice(FOLDERS[:3])
    if kind == "go":
        return _go(dice, forms, folder, inner)
    if kind == "copy":
        return {"do": kind, "folder": folder, "to": dice.choice([each for each in FOLDERS if each != folder])}
    if kind == "stricter":
        return {"do": kind, "by": 0.9}
    if kind in ("save_ledger", "restore_ledger", "rotate"):
        return {"do": kind}
    return {"do": kind, "folder": folder}


def _go(dice: random.Random, forms: Sequence[str], folder: str, inner: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"do": "go", "folder": dice.choice([folder, dice.choice(FOLDERS)])}
    how = dice.random()
    if how < 0.5:
        made["stop"] = ("step", dice.randint(1, 11))
    elif how < 0.85:
        made["stop"] = ("call", int(2 ** dice.uniform(0, 8)))
    if dice.random() < 0.3:
        made |= {"form": dice.choice(forms), "steps": dice.choice(STEPS)}
    if dice.random() < 0.3:
        made["segment"] = dice.choice((2, 3, 5))
    if dice.random() < 0.25:
        made["signed"] = tuple(name for name in SIGNED if dice.random() < 0.5)
    if dice.random() < 0.2:
        made["augment"] = dice.random() < 0.5
    if dice.random() < 0.1:
        made["filtered"] = dice.random() < 0.5
    if dice.random() < 0.1:
        made["withdrawn"] = tuple(str(dice.randint(60, 200)) for _ in range(2))
    if not inner and dice.random() < 0.3:
        made["during"] = (dice.randint(1, 9), _act(dice, forms, inner=True))
    return made


def drawn_with_people(seed: int, length: int, forms: Sequence[str]) -> list[dict[str, Any]]:
    """The same, in which people come and go, also while a run is at work, time passes, and old records are pruned."""
    dice, found = random.Random(seed), []
    for act in drawn(seed, length, forms):
        act.pop("signed", None)
        if "withdrawn" in act:
            act["withdrawn"] = (f"c{dice.randrange(12):02d}",)
        if act["do"] == "go" and dice.random() < 0.25:
            act["during"] = (dice.randint(1, 9), _person(dice))
        found.append(act)
        if dice.random() < 0.3:
            found.append(_person(dice))
    return found


def _person(dice: random.Random) -> dict[str, Any]:
    kind = dice.choice(("withdraw", "withdraw", "leave", "join", "join", "change", "later", "prune"))
    if kind == "withdraw":
        return {"do": kind, "leaf": dice.randint(3, 24), "effect": dice.choice(("FINISH", "ABANDON"))}
    if kind == "join":
        cls, number = dice.choice(("clinical", "sensitive")), dice.randrange(20, 60)
        return {"do": kind, "name": f"{cls[0]}{number}", "cls": cls, "z": dice.choice((None, 0.3, 0.5, 0.6))}
    if kind == "later":
        return {"do": kind, "days": dice.choice((1, 1, 40))}
    if kind == "prune":
        return {"do": kind}
    return {"do": kind, "name": f"{dice.choice('cs')}{dice.randrange(6):02d}"}
