"""The privacy posture of a model: which classes reached which layer, at what ε and noise, and who withdrew since.

"Reached" means that a direct gradient of a class may have entered the layer (docs/theory.md, "Honest words"): later steps
of others saw weights that it moved, and that is covered by the noise, not by structure. ε of a class is its joint figure,
the same at every layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from lamina.account.accountants import pooled_epsilon
from lamina.account.charges import Account
from lamina.account.schedule import EventKey
from lamina.ledger.governance_records import Header, PolicyChange, Withdrawal, parse_profile
from lamina.ledger.records import ContributionRecord, Epoch, KeptContribution, Leaf
from lamina.ledger.run_records import RunBegin
from lamina.ledger.schema import nano_epsilon
from lamina.ledger.show import epsilon_or_none
from lamina.plan.depth_profile import ProfileKind
from lamina.plan.risk import UNPROVEN, stated_rates
from lamina.release.enclosed_ledger import ReadableLedger
from lamina.release.run_evidence import RunEvidence, in_model
from lamina.release.schema import NOT_REACHED, Document, Epsilon, Layer, LeafNumber, Noise, Rate, Rates, Size, Text

L = TypeVar("L")


class ClassPosture(Document):
    """A class in a model. `epsilon` is None if nothing finite is proven; for public data, `delta` is None as well.

    A class is public if all runs declared it public. If some of them did, nothing is proven about it.

    `purposes` are those that its policy allows. `membership` and `content` are the largest true-positive rates of any
    attack on these runs, by false-positive rate; None if nothing is proven, and for public data.
    """

    public: bool
    unit: Text
    epsilon: Epsilon | None
    delta: Rate | None
    noise_multiplier: Noise | None
    purposes: Annotated[list[Text], Field(max_length=1024)]
    membership: Rates | None
    content: Rates | None

    @model_validator(mode="after")
    def _public_has_no_figures(self) -> Self:
        if self.public and (self.epsilon, self.delta, self.membership, self.content) != (None, None, None, None):
            raise ValueError("it is public but states ε, δ or a risk; public data is not protected")
        if not self.public and self.delta is None:
            raise ValueError("it is private and states no δ")
        return self


class AdapterPosture(Document):
    """An adapter, by name and digest of its configuration: its layers, and where it may be deployed."""

    name: Text
    config: Text | None
    scope: Text | None
    layers: list[Text]


_MAX_PARTS = 16_384


class Posture(Document):
    """The posture of a model that one or several runs trained.

    attested   whether all runs used signed contributions alone, by the leaves of the ledger (`RunEvidence.attested`)
    eligible   [first, last): a contribution in a leaf before `last`, not withdrawn before leaf `first`, may be in it
    withdrawn  by class, how many of these were withdrawn up to leaf `as_of_size`
    """

    classes: Annotated[dict[Text, ClassPosture], Field(max_length=_MAX_PARTS)]
    layers: Annotated[list[Layer], Field(min_length=1, max_length=_MAX_PARTS)]
    adapters: Annotated[list[AdapterPosture], Field(max_length=_MAX_PARTS)]
    attested: bool
    eligible: Annotated[list[LeafNumber], Field(min_length=2, max_length=2)]
    withdrawn: dict[str, LeafNumber]
    as_of_size: Size
    note: Literal[NOT_REACHED] = NOT_REACHED  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        names, (first, last) = {layer.name for layer in self.layers}, self.eligible
        unknown = {name for layer in self.layers for name in layer.classes} - self.classes.keys()
        unknown |= {name for adapter in self.adapters for name in adapter.layers} - names
        counts = max(self.withdrawn.values(), default=0)
        if unknown or len(names) < len(self.layers) or self.withdrawn.keys() != self.classes.keys():
            raise ValueError("layers, classes, adapters and withdrawals do not fit together")
        if not first <= last <= self.as_of_size or counts > self.as_of_size:
            raise ValueError("eligible leaves or withdrawals lie beyond the ledger")
        return self


def read_posture(ledger: ReadableLedger, runs: Sequence[RunEvidence]) -> Posture:
    """The posture of a model in which the training of these runs is, by what the ledger says."""
    layers, size = layer_postures(runs), runs[-1].checkpoint.size
    names = list(dict.fromkeys(entry.name for run in runs for plan in run.plans.values() for entry in plan.classes))
    segments = [each for run in runs for _, epoch in run.closed() for each in epoch.segments]
    eligible = (min(each.eligibility for each in segments), max(each.eligibility for each in segments))
    counts = Counter(cls for _, cls in _withdrawals(ledger, eligible, size))
    return Posture(
        classes={name: _class_posture(ledger.header, runs, name) for name in names},
        layers=layers,
        adapters=list(_adapters(ledger, layers, size)),
        attested=all(run.attested for run in runs),
        eligible=list(eligible),
        withdrawn={name: counts[name] for name in names},
        as_of_size=size,
    )


def _class_posture(header: Header, runs: Iterable[RunEvidence], name: str) -> ClassPosture:
    events, entries, marks = Counter[EventKey](), [], frozenset[str]()
    for run in runs:
        marks |= run.marks([run.run])
        entries += [entry for plan in run.plans.values() for entry in plan.classes if entry.name == name]
        events.update(run.events(Account(name)))
    public, exposed = (every(entry.public for entry in entries) for every in (all, any))
    purposes = set(entries[0].purposes).intersection(*(entry.purposes for entry in entries))
    charged = any(run.charged(name) for run in runs) and not any(name in run.split for run in runs) and not exposed
    epsilon = pooled_epsilon(events, delta=header.delta, name=header.accountant) if charged else math.inf
    marks = marks if charged and not public else frozenset((UNPROVEN,))
    return ClassPosture(
        public=public,
        unit=entries[-1].unit,
        epsilon=None if public else epsilon_or_none(nano_epsilon(epsilon)),
        delta=None if public else header.delta,
        noise_multiplier=None if exposed else min((sigma for sigma, _, _ in events), default=None),
        purposes=sorted(purposes),
        membership=stated_rates(events, accountant=header.accountant, of="membership", marks=marks),
        content=stated_rates(events, accountant=header.accountant, of="content", marks=marks),
    )


def layer_postures(runs: Sequence[RunEvidence]) -> list[Layer]:
    """Of several runs: the classes of all, the least noise of any. The order is the last run's."""
    noise: dict[str, float] = {}
    reached: dict[str, dict[str, None]] = {}
    known = {layer.name: layer for run in runs for plan in run.plans.values() for layer in plan.layers}
    for run in runs:
        for name, value in run.least_noise().items():
            noise[name] = min(noise.get(name, math.inf), value)
        for name, classes in run.reached().items():
            reached.setdefault(name, {}).update(dict.fromkeys(classes))
    order = [layer.name for layer in runs[-1].plan.layers]
    return [
        Layer(
            name=name, depth=known[name].depth, parameters=known[name].size, noise_std=noise.get(name, 0.0),
            classes=list(reached.get(name, ())),
        )
        for name in dict.fromkeys((*order, *known))
    ]  # fmt: skip


def merge_neighbours(layers: Sequence[L], same: Callable[[L], object], most: int) -> list[list[L]]:
    """Return groups of adjacent layers that are drawn as one: equal ones, and more of them if there are more than `most`."""
    equal = [list(group) for _, group in groupby(layers, same)]
    size = max(1, -(-len(equal) // most))
    return [[each for group in equal[at : at + size] for each in group] for at in range(0, len(equal), size)]


def _adapters(ledger: ReadableLedger, layers: Sequence[Layer], size: int) -> Iterable[AdapterPosture]:
    """Yield the adapters that the policy names before leaf `size`, with the layers that their classes reached."""
    policies = [ledger.header, *(leaf.record for leaf in ledger.of_kind(PolicyChange, 0, size))]
    found: dict[tuple[str, str | None, str | None], dict[str, None]] = {}
    for record in policies:
        assert isinstance(record, Header | PolicyChange)
        for preset in record.presets:
            if not preset.profile.startswith(("adapter=", "{")):
                continue
            profile = parse_profile(preset.profile)
            if profile.kind is ProfileKind.ADAPTER:
                assert profile.name is not None
                mine = (layer.name for layer in layers if preset.cls in layer.classes)
                found.setdefault((profile.name, profile.config, profile.scope), {}).update(dict.fromkeys(mine))
    for (name, config, scope), names in found.items():
        if names:
            yield AdapterPosture(name=name, config=config, scope=scope, layers=list(names))


def _withdrawals(ledger: ReadableLedger, eligible: tuple[int, int], size: int) -> list[tuple[int, str]]:
    """Return (leaf, class) of each withdrawal, before leaf `size`, of a contribution that may be in a model."""
    counter, found = WithdrawalCounter(ledger.leaf, eligible), []
    for leaf in ledger.of_kind(Withdrawal, 0, size):
        if (cls := counter.see(leaf)) is not None:
            found.append((leaf.seq, cls))
    return found


def model_withdrawals(ledger: ReadableLedger, run: RunEvidence) -> list[tuple[int, str]]:
    """Return (leaf, class) of each withdrawal of a contribution that the model of a run may have learned from.

    That includes the runs whose weights it continued.
    """
    size = run.checkpoint.size
    begins = (leaf.record for leaf in ledger.of_kind(RunBegin, 0, size))
    parents = {begin.run: begin.parent for begin in begins if isinstance(begin, RunBegin)}
    lineage = set[bytes]()
    at: bytes | None = run.run
    while at is not None and at not in lineage:
        lineage.add(at)
        at = parents.get(at)
    epochs = (leaf.record for leaf in ledger.of_kind(Epoch, 0, size))
    mine = (each for each in epochs if isinstance(each, Epoch) and each.run in lineage and in_model(each))
    eligibility = [each.eligibility for epoch in mine for each in epoch.segments]
    return _withdrawals(ledger, (min(eligibility), max(eligibility)), size) if eligibility else []


class WithdrawalCounter:
    """Counts, by class, the contributions that may be in a model and were withdrawn. `leaf_at` reads the leaf of one."""

    def __init__(
        self, leaf_at: Callable[[int], Leaf], eligible: Sequence[int], counts: Mapping[str, int] | None = None
    ) -> None:
        self._leaf_at, self._eligible = leaf_at, eligible
        self.counts = dict(counts or {})

    def see(self, leaf: Leaf) -> str | None:
        """Count the leaf if it is the withdrawal of such a contribution. Return its class if so."""
        if not isinstance(leaf.record, Withdrawal):
            return None
        first, last = self._eligible
        if leaf.seq < first or leaf.record.target >= last:
            return None
        target = self._leaf_at(leaf.record.target).record
        if not isinstance(target, ContributionRecord | KeptContribution):
            return None
        cls = target.bound.cls
        self.counts[cls] = self.counts.get(cls, 0) + 1
        return cls

    def copy(self) -> WithdrawalCounter:
        """To count on from here without changing this."""
        return WithdrawalCounter(self._leaf_at, self._eligible, self.counts)
