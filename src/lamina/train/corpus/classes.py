"""The classes of a corpus beside those of its policy and of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamina.errors import CorpusError
from lamina.plan import Policy

DEFAULT = "data"  # what the class of a corpus is called that names none
SAY_WHO = "give cls=: one name for all, a name per example, or a dict from unit to name"


def class_of_all(cls: Any, policy: Policy | None) -> Any:
    """`cls` as given; without it, the only class of the policy."""
    if cls is not None or policy is None:
        return cls
    if len(policy.classes) > 1:
        raise CorpusError(
            "corpus.policy-classes-cls",
            f"the policy has classes {', '.join(policy.classes)}, and cls is not given",
            SAY_WHO,
        )
    return next(iter(policy.classes))


def check_classes(names: Sequence[str] | None, known: Sequence[str], whose: str) -> None:
    """Every class of the corpus is known to the policy or plan. None: no class was named, the only one is meant."""
    if names is None:
        if len(known) > 1:
            raise CorpusError(
                "corpus.classes-corpus-not",
                f"the {whose} has classes {', '.join(known)}, and the corpus does not say who is of which",
                SAY_WHO,
            )
        return
    for name in names:
        if name not in known:
            raise CorpusError(
                "corpus.corpus-class-not",
                f"the corpus has class {name!r}, which the {whose} does not have",
                f"its classes are {', '.join(known)}: name one of them in cls=, or add [class.{name}] to the policy",
            )


def booked_under(origin: str | None, policy: Policy | None) -> str | None:
    """The origin that spending is booked under; the policy's, if there is one."""
    declared = None if policy is None else policy.corpus.origin
    if origin == "":
        raise CorpusError(
            "corpus.origin-empty",
            "origin is empty",
            "name the place that the data comes from, or leave it out",
        )
    if origin is not None and declared is not None and origin != declared:
        raise CorpusError(
            "corpus.origin-policy-says",
            f"origin is {origin!r}, and the policy says {declared!r}: spending would be booked in two places",
            "leave origin out",
        )
    return origin or declared
