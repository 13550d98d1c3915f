"""The keys of [corpus] that the gate reads."""

from __future__ import annotations

from typing import Any

from refusals import raises_code

from lamina.admit.checks import PolicyChecks, floors_hash
from lamina.plan.policy import Policy


def corpus(**keys: Any) -> Policy:
    table = {"origin": "x", "delta": 1e-5, **keys}
    return Policy.from_dict({"corpus": table, "class": {"a": {"population": 10, "epsilon": 1.0, "clip_norm": 9.0}}})


def test_an_epoch_is_a_day_unless_said_otherwise() -> None:
    assert corpus().corpus.epoch == 86_400
    assert corpus(epoch=60).corpus.epoch == 60
    for wrong in (0, -1, 1.5, "1 d"):
        with raises_code("plan.policy-invalid"):
            corpus(epoch=wrong)


def test_floors_only_rise() -> None:
    now = {"clip_norm": 1.0, "noise_multiplier": 0.5}
    fine: list[dict[str, float]] = [{}, {"clip_norm": 1.0}, {"clip_norm": 0.1, "noise_multiplier": 0.5}]
    assert len(corpus(floors=now, earlier_floors=fine).corpus.earlier_floors) == 3
    for wrong in ({"clip_norm": 1.1}, {"noise_multiplier": 0.6}):
        with raises_code("plan.policy-invalid"):
            corpus(floors=now, earlier_floors=[wrong])
    with raises_code("plan.policy-invalid"):
        corpus(earlier_floors=[{"clip_norm": 1.0}])
    with raises_code("plan.policy-invalid"):
        corpus(floors=now, earlier_floors=[{"clipnorm": 1.0}])


def test_the_digests_of_all_floors_are_accepted_and_no_other() -> None:
    old, older, never = {"clip_norm": 0.5}, {"clip_norm": 0.25}, {"clip_norm": 0.3}
    policy = corpus(floors={"clip_norm": 1.0}, earlier_floors=[old, older])
    digests = PolicyChecks(policy).digests
    assert digests == {floors_hash(corpus(floors=f)) for f in ({"clip_norm": 1.0}, old, older)}
    assert floors_hash(corpus(floors=never)) not in digests
    assert floors_hash(corpus(floors={"clip_norm": 1.0}, origin="y")) not in digests
