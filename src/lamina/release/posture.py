"""The privacy posture of a model: which classes reached which layer, at what ε and noise, and who withdrew since.

"Reached" means that a direct gradient of a class may have entered the layer (docs/theory.md, "Honest words"): later steps
of others saw weights that it moved, and that is covered by the noise, not by structure. ε of a class is its joint figure,
the same at every layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from lamina.account.accountants import pooled_epsilon
from lamina.account.charges import Account
from lamina.account.schedule import EventKey
from lamina.ledger.governance_records import Header, PolicyChange, Withdrawal, parse_profile
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord, Epoch, KeptContribution, Leaf
from lamina.ledger.run_records import RunBegin
from lamina.ledger.schema import MAX_EPSILON, nano_epsilon
from lamina.ledger.show import epsilon_or_none
from lamina.plan.depth_profile import ProfileKind
from lamina.plan.risk import STATED_RATES, UNPROVEN, stated_rates
from lamina.release.run_evidence import RunEvidence, in_model
from lamina.validate import bounded_number, bounded_whole, is_short_text

_Layer = TypeVar("_Layer")
MAX_NOISE = 1e15  # no plan adds more

NOT_REACHED = (
    "A class that did not reach a layer had no direct gradient there. Later steps of others saw weights that it moved "
    "elsewhere: the noise covers that, not the structure."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassPosture:
    """A class in a model. `epsilon` is None if nothing finite is proven; for public data, `delta` is None as well.

    A class is public if all runs declared it public. If some of them did, nothing is proven about it.

    `purposes` are those that its policy allows. `membership` and `content` are the largest true-positive rates of any
    attack on these runs, by false-positive rate; None if nothing is proven, and for public data.
    """

    name: str
    public: bool
    unit: str
    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    purposes: tuple[str, ...]
    membership: Mapping[str, float] | None
    content: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPosture:
    """A layer in a model: the classes that reached it, and the least noise that it had in a step."""

    name: str
    depth: float
    parameters: int
    noise_std: float
    classes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPosture:
    """An adapter, by name and digest of its configuration: its layers, and where it may be deployed."""

    name: str
    config: str | None
    scope: str | None
    layers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Posture:
    """The posture of a model that one or several runs trained.

    eligible   [first, last): a contribution in a leaf before `last`, not withdrawn before leaf `first`, may be in it
    withdrawn  by class, how many of these were withdrawn up to leaf `as_of_size`
    """

    classes: Mapping[str, ClassPosture]
    layers: tuple[LayerPosture, ...]
    adapters: tuple[AdapterPosture, ...]
    eligible: tuple[int, int]
    withdrawn: Mapping[str, int]
    as_of_size: int

    def to_dict(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {
            "classes": {name: plain(each, "name") for name, each in self.classes.items()},
            "layers": [plain(each) for each in self.layers],
            "adapters": [plain(each) for each in self.adapters],
            "eligible": list(self.eligible),
            "withdrawn": dict(self.withdrawn),
            "as_of_size": self.as_of_size,
            "note": NOT_REACHED,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Posture:
        """The inverse of `to_dict`; KeyError, TypeError or ValueError for anything else."""
        if plain.keys() != {"classes", "layers", "adapters", "eligible", "withdrawn", "as_of_size", "note"}:
            raise ValueError("the posture lacks a field, or has an unknown one")
        size = bounded_whole("as_of_size", plain["as_of_size"], 1, 2**63 - 1)
        first, last = (bounded_whole("eligible", each, 0, size) for each in plain["eligible"])
        classes = {name: _read(ClassPosture, {"name": name, **each}) for name, each in plain["classes"].items()}
        layers = tuple(_read(LayerPosture, each) for each in plain["layers"])
        adapters = tuple(_read(AdapterPosture, each) for each in plain["adapters"])
        withdrawn = {name: bounded_whole("withdrawn", each, 0, size) for name, each in plain["withdrawn"].items()}
        for each in classes.values():
            _check_class(each)
        for layer in layers:
            if type(layer.classes) is not tuple or not all(map(is_short_text, (layer.name, *layer.classes))):
                raise ValueError(f"layer {str(layer.name)[:80]!r} has a name or classes of a wrong type")
            bounded_number("depth", layer.depth, 0.0, 1.0)
            bounded_number("noise_std", layer.noise_std, 0.0, MAX_NOISE)
            bounded_whole("parameters", layer.parameters, 0, 2**53)
        names = {layer.name for layer in layers}
        for adapter in adapters:
            texts = [adapter.name, *(text for text in (adapter.config, adapter.scope) if text is not None)]
            if not all(map(is_short_text, texts)) or type(adapter.layers) is not tuple or set(adapter.layers) - names:
                name = str(adapter.name)[:80]
                raise ValueError(f"an adapter has no name, or layers that the model does not have: {name!r}")
        unknown = {name for layer in layers for name in layer.classes} - classes.keys()
        if unknown or not layers or len(names) < len(layers) or first > last or withdrawn.keys() != classes.keys():
            raise ValueError("layers, classes, withdrawals and eligible leaves do not fit together")
        if max(len(layers), len(classes), len(adapters)) > _MAX_PARTS or plain["note"] != NOT_REACHED:
            raise ValueError(f"it has more than {_MAX_PARTS} layers, classes or adapters, or another note")
        return cls(
            classes=classes, layers=layers, adapters=adapters, eligible=(first, last), withdrawn=withdrawn,
            as_of_size=size,
        )  # fmt: skip


_MAX_PARTS = 16_384


def _check_class(each: ClassPosture) -> None:
    """Raise ValueError unless figures are in range, purposes are texts, and only a private class has figures."""
    texts = type(each.purposes) is tuple and len(each.purposes) <= 1024 and all(map(is_short_text, each.purposes))
    if not texts or type(each.public) is not bool or not is_short_text(each.unit) or not is_short_text(each.name):
        raise ValueError(f"class {str(each.name)[:80]!r} has a name, unit, purposes or a field public of a wrong type")
    if each.epsilon is not None:
        bounded_number("epsilon", each.epsilon, 0.0, MAX_EPSILON)
    if each.noise_multiplier is not None:
        bounded_number("noise_multiplier", each.noise_multiplier, 0.0, MAX_NOISE)
    for name, rates in (("membership", each.membership), ("content", each.content)):
        if rates is None:
            continue
        if type(rates) is not dict or list(rates) != [f"{rate:g}" for rate in STATED_RATES]:
            raise ValueError(f"class {each.name!r} must state {name} at the rates {STATED_RATES}")
        for rate, value in rates.items():
            bounded_number(name, value, float(rate), 1.0)
    if each.public:
        if (each.epsilon, each.delta, each.membership, each.content) != (None, None, None, None):
            raise ValueError(f"class {each.name!r} is public but states ε, δ or a risk; public data is not protected")
    else:
        bounded_number("delta", each.delta, 0.0, 1.0)


def plain(each: Any, *without: str) -> dict[str, Any]:
    """Return a part of a posture in the form of a manifest."""
    values = {name: getattr(each, name) for name in each.__slots__ if name not in without}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _read(kind: Any, plain: Mapping[str, Any]) -> Any:
    if plain.keys() != set(kind.__slots__):
        raise ValueError(f"{kind.__name__} must have the fields {', '.join(kind.__slots__)}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()})


def read_posture(ledger: LedgerReader, runs: Sequence[RunEvidence]) -> Posture:
    """The posture of a model in which the training of these runs is, by what the ledger says."""
    layers, size = layer_postures(runs), runs[-1].checkpoint.size
    names = list(dict.fromkeys(entry.name for run in runs for plan in run.plans.values() for entry in plan.classes))
    segments = [each for run in runs for _, epoch in run.closed() for each in epoch.segments]
    eligible = (min(each.eligibility for each in segments), max(each.eligibility for each in segments))
    counts = Counter(cls for _, cls in _withdrawals(ledger, eligible, size))
    return Posture(
        classes={name: _class_posture(ledger.header, runs, name) for name in names},
        layers=layers,
        adapters=tuple(_adapters(ledger, layers, size)),
        eligible=eligible,
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
        name=name,
        public=public,
        unit=entries[-1].unit,
        epsilon=None if public else epsilon_or_none(nano_epsilon(epsilon)),
        delta=None if public else header.delta,
        noise_multiplier=None if exposed else min((sigma for sigma, _, _ in events), default=None),
        purposes=tuple(sorted(purposes)),
        membership=stated_rates(events, accountant=header.accountant, of="membership", marks=marks),
        content=stated_rates(events, accountant=header.accountant, of="content", marks=marks),
    )


def layer_postures(runs: Sequence[RunEvidence]) -> tuple[LayerPosture, ...]:
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
    return tuple(
        LayerPosture(
            name=name, depth=known[name].depth, parameters=known[name].size, noise_std=noise.get(name, 0.0),
            classes=tuple(reached.get(name, ())),
        )
        for name in dict.fromkeys((*order, *known))
    )  # fmt: skip


def merge_neighbours(layers: Sequence[_Layer], same: Callable[[_Layer], object], most: int) -> list[list[_Layer]]:
    """Return groups of adjacent layers that are drawn as one: equal ones, and more of them if there are more than `most`."""
    equal = [list(group) for _, group in groupby(layers, same)]
    size = max(1, -(-len(equal) // most))
    return [[each for group in equal[at : at + size] for each in group] for at in range(0, len(equal), size)]


def _adapters(ledger: LedgerReader, layers: Sequence[LayerPosture], size: int) -> Iterable[AdapterPosture]:
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
            yield AdapterPosture(name=name, config=config, scope=scope, layers=tuple(names))


def _withdrawals(ledger: LedgerReader, eligible: tuple[int, int], size: int) -> list[tuple[int, str]]:
    """Return (leaf, class) of each withdrawal, before leaf `size`, of a contribution that may be in a model."""
    counter, found = WithdrawalCounter(ledger.leaf, eligible), []
    for leaf in ledger.of_kind(Withdrawal, 0, size):
        if (cls := counter.see(leaf)) is not None:
            found.append((leaf.seq, cls))
    return found


def model_withdrawals(ledger: LedgerReader, run: RunEvidence) -> list[tuple[int, str]]:
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
        self, leaf_at: Callable[[int], Leaf], eligible: tuple[int, int], counts: Mapping[str, int] | None = None
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
