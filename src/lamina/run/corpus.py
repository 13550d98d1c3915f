"""`Corpus`: the contributions that a run may learn from, from arrays, a file or a folder."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lamina.admit.admission import Admission
from lamina.admit.contribution_sources import FolderContributions
from lamina.engine.batch import Batch
from lamina.engine.distributed import Ranks
from lamina.engine.engine import unprobed_engines
from lamina.engine.noise.random_stream import segment_seed
from lamina.errors import CorpusError
from lamina.plan.charges import SignedAccount
from lamina.plan.policy import Policy
from lamina.plan.selection import known_keywords
from lamina.plan.step_plan import Clipping, StepPlan
from lamina.run.column_checks import ZERO, check_columns, frame_columns, is_frame, stack_columns
from lamina.run.contribution_index import (
    ContributionIndex,
    ExampleLayout,
    check_classes,
    declared_origin,
    default_class,
)
from lamina.run.example_sources import (
    LOADER_NOTE,
    ArraySource,
    DatasetSource,
    ExampleSource,
    PayloadSource,
    dataset_of,
    keyed_hasher,
    make_source,
)
from lamina.run.payload_admission import Folders, folders_of
from lamina.run.payloads import FolderPayloads
from lamina.run.sampler import Sampler
from lamina.run.table_files import LISTING, ContributionListing, check_column, hash_parts, read_npz, read_table
from lamina.validate import one_of, whole


def _check_listing_matches_folders(where: str, listed: list[str], there: list[str]) -> None:
    """The list and the folders name the same contributions, each once."""
    for one, next_one in pairwise(listed):
        if one == next_one:
            problem = f"{LISTING} of '{where}' lists {one!r} twice"
            raise CorpusError("corpus.id-repeated", problem, "list every contribution once")
    if missing := sorted(set(listed) - set(there)):
        problem = f"{LISTING} of '{where}' lists {missing[0]!r}, which has no folder"
        raise CorpusError("corpus.listed-without-folder", problem, "remove the line")
    if strange := sorted(set(there) - set(listed)):
        problem = f"folder {strange[0]!r} is not in {LISTING} of '{where}'"
        raise CorpusError("corpus.folder-not-listed", problem, "list it, or move it away")


LimitsOfRows = Callable[[NDArray[np.int64]], tuple[torch.Tensor | None, torch.Tensor | None]]
Factors = Mapping[str, float] | None  # by account of a signed bound, where it is exhausted
EACH_EXAMPLE = "each"  # every example is a contribution of its own, and that is meant
ProbeArgument = bool | tuple[Any, Any]  # by simulated input, not at all, or by public (x, y)
UNITS_OF_ONE_EXAMPLE = ("contribution", "example", "record", "row", "sample")


PROBE_NOTE = "note: the first batches test the loop on simulated or public examples; they cost nothing and are no steps of the plan"


class LoaderReplaced(UserWarning):
    """A DataLoader was given; its Dataset is used, and batches are drawn anew."""


class Corpus:
    """Contributions with their examples, classes, ids and subject tags.

    x, y      tensors, arrays (memmaps too) or DataFrames, tuples or dicts of them; a map-style torch Dataset of x or
              (x, y), or a DataLoader of one; or a `Source`. The first axis counts examples
    unit      the contribution of each example: the patient of a window. Default: every example is its own. The
              unit is what ε protects: one person in two contributions is protected half as well. Where a policy
              protects patients, say so even if every example is another one: unit="each"
    cls       the class of each contribution: one name for all, a dict by unit or id, or a sequence by example.
              Default: the only class of the plan
    ids       a name for each contribution, as text; default: the unit's value
    subject   a keyed tag of the person behind each contribution; two contributions with one tag are refused
    scale     in (0, 1], by contribution as `cls`: its thresholds are its class's times this (`lamina.plan.signed_bounds`)
    ceiling   > 0, by contribution: the largest norm that its clipped gradient may have, in plain units
    examples_per_unit  at most so many examples of a contribution per step, chosen afresh at every step
    policy    the policy that the corpus is under: its origin, its classes, its bounds
    origin    the name under which spending is recorded; default: the policy's, or a digest of the data, which is
              accepted only if no other ledger is beside the new one
    other_people  the owner's statement why these are other people than in the ledgers beside a new one. The new ledger
              and its certificates show it
    version   a name for this state of the data, if reading all of it at every start takes too long. Whoever changes
              the data and not the version has a replay that is not one
    dtype     of x, instead of float32 for floating point and whatever it was for integers
    nan       "zero": missing and infinite values of x become 0. Default: they are refused; with a `version` only the first
              1,024 examples are looked at
    unit_name what a contribution is called; default: the column it came from

    A corpus is named and counted, never shown: its repr says neither who is in it nor how many.
    """

    @known_keywords(CorpusError, "corpus.keyword-unknown")
    def __init__(
        self, x: Any, y: Any = None, *, unit: Any = None, cls: Any = None, ids: Any = None, subject: Any = None,
        scale: Any = None, ceiling: Any = None, examples_per_unit: int | None = None, policy: Policy | None = None,
        origin: str | None = None, version: str | None = None, dtype: torch.dtype | None = None, nan: str | None = None,
        unit_name: str | None = None, other_people: str | None = None,
    ) -> None:  # fmt: skip
        if policy is not None and not isinstance(policy, Policy):
            problem = f"policy is a {type(policy).__name__}"
            raise CorpusError("corpus.policy-not-a-policy", problem, "use lamina.Policy.load('policy.toml')")
        if examples_per_unit is not None:
            remedy = "leave it out to use all examples"
            whole(CorpusError, "corpus.not-a-count", remedy=remedy, examples_per_unit=examples_per_unit)
        if isinstance(x, DataLoader):
            x = dataset_of(x)
            warnings.warn(LOADER_NOTE, LoaderReplaced, stacklevel=3)
        filled = nan is not None and one_of(CorpusError, "corpus.nan-unknown", (ZERO,), nan=nan) == ZERO
        self.source: ExampleSource = make_source(x, y, dtype=dtype, filled=filled)
        each = isinstance(unit, str) and unit == EACH_EXAMPLE
        self._unit_declared = unit is not None or ids is not None or subject is not None
        if isinstance(self.source, ArraySource):
            check_columns(self.source.columns, unit_given=self._unit_declared)
            self.source.check_values(None if version is None else 1024)
        unit = None if each else unit
        self._called_by_row = unit is None and ids is None
        self.unit_name = unit_name or ("contribution" if self._unit_declared else "example")
        self.examples_per_unit, self.policy = examples_per_unit, policy
        self._origin = declared_origin(origin, policy)
        if policy is not None and other_people is not None:
            problem = "other_people is given together with a policy"
            raise CorpusError("corpus.other-people-beside-policy", problem, "write it into [corpus] of the policy")
        self.other_people = other_people if policy is None else policy.corpus.other_people
        self.version = version
        self._index = ContributionIndex(
            len(self.source), unit=unit, cls=default_class(cls, policy), ids=ids, subject=subject, scale=scale,
            ceiling=ceiling,
        )  # fmt: skip
        self._digests: dict[bytes, bytes] = {}
        self._turns: dict[int, NDArray[np.int64]] = {}
        self._admission: Admission | Callable[[], Admission] | None = None
        self.on_exclusion: Callable[[Sequence[str]], None] | None = None  # a run keeps it in its folder
        self.on_withdrawal_request: Callable[[Sequence[str]], None] | None = None  # and in its ledger
        self.withdrawal_requests: list[str] = []  # stable ids of those who asked
        self.public_number = False  # whether nobody declared a population: then how many there are is public
        if policy is not None:
            check_classes(self.names, list(policy.classes), "policy")

    @classmethod
    def of_csv(
        make, path: str | Path, *, x: Sequence[str] | None = None, y: str | Sequence[str] | None = None,
        unit: Any = None, cls: Any = None, ids: Any = None, subject: Any = None, delimiter: str = ",", **options: Any,
    ) -> Self:  # fmt: skip
        """From a table with a header, one row an example. Text in x, y, unit, cls, ids, subject names columns.

        x defaults to all other columns. A `cls` that is a class of `policy` is the class of all rows.
        """
        named, given = _named_columns(options, unit=unit, cls=cls, ids=ids, subject=subject)
        names, dtype = list(dict.fromkeys(named.values())), np.float32 if options.get("dtype") is None else np.float64
        x = [x] if isinstance(x, str) else x
        filled = options.get("nan") is not None
        table = read_table(Path(path), x=x, y=y, names=names, delimiter=delimiter, dtype=dtype, filled=filled)
        found: dict[str, Any] = {what: table.names[name] for what, name in named.items()}
        declared = any(columns is not None for columns in (unit, ids, subject))
        check_columns(dict(zip(table.features, table.x.T, strict=True)), unit_given=declared)
        return make(table.x, table.y, **given, **found, **options)

    @classmethod
    def of_frame(
        make, frame: Any, *, x: Sequence[str] | None = None, y: str | Sequence[str] | None = None, unit: Any = None,
        cls: Any = None, ids: Any = None, subject: Any = None, **options: Any,
    ) -> Self:  # fmt: skip
        """From a DataFrame, one row an example. Text in x, y, unit, cls, ids, subject names columns, as in `of_csv`."""
        if not is_frame(frame):
            problem = f"frame is a {type(frame).__name__}, which has no named columns"
            raise CorpusError("corpus.not-a-frame", problem, "give a DataFrame; or arrays: Corpus(x, y, unit=…)")
        named, given = _named_columns(options, unit=unit, cls=cls, ids=ids, subject=subject)
        columns = frame_columns(frame)
        labels, x = [y] if isinstance(y, str) else list(y or ()), [x] if isinstance(x, str) else x
        for name in (*(x or ()), *labels, *named.values()):
            check_column("the DataFrame", name, list(columns))
        taken = {*labels, *named.values()}
        features = [name for name in columns if name not in taken] if x is None else list(x)
        if not features:
            raise CorpusError(
                "corpus.no-inputs", "the DataFrame has no column left for x", "name the columns with x=[…]"
            )
        inputs = {name: columns[name] for name in features}
        check_columns(inputs, unit_given=any(each is not None for each in (unit, ids, subject)))
        targets = stack_columns({name: columns[name] for name in labels}, "y") if labels else None
        found: dict[str, Any] = {what: columns[name] for what, name in named.items()}
        one = targets[:, 0] if targets is not None and isinstance(y, str) else targets
        return make(stack_columns(inputs), one, **given, **found, **options)

    @classmethod
    def of_npz(
        make, path: str | Path, *, x: str = "x", y: str | None = "y", unit: Any = None, cls: Any = None,
        ids: Any = None, subject: Any = None, **options: Any,
    ) -> Self:  # fmt: skip
        """From the arrays of an .npz file. Text in x, y, unit, cls, ids, subject names arrays; y=None: no labels."""
        named, given = _named_columns(options, unit=unit, cls=cls, ids=ids, subject=subject)
        named |= {"x": x} if y is None else {"x": x, "y": y}
        found: dict[str, Any] = read_npz(Path(path), list(dict.fromkeys(named.values())))
        return make(**given, **{what: found[name] for what, name in named.items()}, **options)

    @classmethod
    def of_folder(make, path: Folders, *, cls: Any = None, subject: Any = None, **options: Any) -> Self:
        """From PATH/ID/payload.npz (x with one example a row, perhaps y) or payload.csv (one example, a table).

        PATH/contributions.csv, if it is there, lists id and perhaps class, subject and y of each. Contributions are
        sorted by id. Payloads are read when they are sampled. Several paths are one corpus.
        """
        roots = folders_of(path)
        if not roots or (missing := [root for root in roots if not root.is_dir()]):
            problem = f"'{missing[0] if roots else path}' is not a folder"
            raise CorpusError("corpus.folder-missing", problem, "give the folder with one folder per contribution")
        contributions = FolderContributions(*roots)
        there = list(contributions.names())
        where = ", ".join(map(str, roots))
        listing = ContributionListing.of_folders(roots)
        if listing is not None:
            _check_listing_matches_folders(where, listing.ids, there)
        listing = listing or ContributionListing(ids=there, classes=None, subjects=None, y=None)
        if not there:
            problem = f"'{where}' holds no contributions"
            raise CorpusError("corpus.no-contributions", problem, "put each into a folder: ID/payload.npz")
        for what, column, given in (("cls", listing.classes, cls), ("subject", listing.subjects, subject)):
            if column is not None and given is not None:
                problem = f"{what} is given, and {LISTING} of '{where}' has it too"
                raise CorpusError("corpus.column-given-twice", problem, "keep it in one of the two places")
        source = PayloadSource(FolderPayloads(contributions, listing.ids), listing.y, dtype=options.pop("dtype", None))
        unit = np.repeat(np.arange(len(listing.ids)), source.sizes)
        cls, subject = listing.classes or cls, listing.subjects or subject
        return make(source, unit=unit, cls=cls, ids=listing.ids, subject=subject, **options)

    @property
    def names(self) -> tuple[str, ...]:
        """The classes that occur, in order of appearance; ("data",) if none was named."""
        return self._index.names

    @property
    def layout(self) -> ExampleLayout:
        """Where the examples of each contribution lie."""
        return self._index.layout

    @property
    def revision(self) -> int:
        """How many contributions were withdrawn."""
        return self._index.revision

    def __len__(self) -> int:
        """The number of eligible contributions."""
        return len(self._index)

    @property
    def eligible(self) -> NDArray[np.int64]:
        """The eligible contributions of all classes, by row."""
        return self._index.eligible

    def members(self, name: str) -> NDArray[np.int64]:
        """The eligible contributions of a class, by row. Rows count contributions in order of first appearance."""
        return self._index.members(name)

    def members_of(self, plan: StepPlan, factors: Factors = None) -> tuple[NDArray[np.int64], ...]:
        """The eligible contributions of each class of a plan; none where the corpus has nobody of the class.

        `factors` are of signed bounds that are exhausted, by account: who signed one with factor 0 is left out.
        """
        if not self._index.named:
            return (self.members(self.names[0]),)
        nobody = np.empty(0, dtype=np.int64)
        return tuple(self.members(entry.name) if entry.name in self.names else nobody for entry in plan.classes)

    @property
    def has_stable_ids(self) -> bool:
        """Return whether the names of contributions are independent of the rows before them."""
        return not self._called_by_row

    def turns(self, bands: int) -> NDArray[np.int64]:
        """The turn of every contribution, by row: SHA-256 of its stable id modulo `bands`. Nobody else has a part in it."""
        if self._called_by_row:
            problem = "contributions have no ids, so the turn of each would follow from its row, and move with those before it"
            remedy = "give what stays with each contribution: unit= or ids=, in a RUN.toml the name of a column or array as unit"
            raise CorpusError("corpus.turns-without-ids", problem, remedy)
        if bands not in self._turns:
            digests = (hashlib.sha256(b"lamina/turn " + one.encode()).digest() for one in self._all_stable_ids())
            turns = (int.from_bytes(digest[:8], "big") % bands for digest in digests)
            self._turns[bands] = np.fromiter(turns, dtype=np.int64, count=len(self.layout))
        return self._turns[bands]

    def _all_stable_ids(self) -> Iterable[str]:
        return self._index.ids

    def limits(self, rows: NDArray[np.int64]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scale and ceiling of these contributions, as a `Batch` takes them; None where nobody has one."""
        scale, ceiling = self._index.scale, self._index.ceiling
        return (
            None if scale is None else torch.from_numpy(scale[rows]),
            None if ceiling is None else torch.from_numpy(ceiling[rows]),
        )

    def count_signed(self, account: str) -> int:
        """How many eligible contributions signed the bound of an account; here nobody signed."""
        return 0

    def limits_of(
        self, plan: StepPlan, max_occurrences: Mapping[str, int] | None = None, factors: Factors = None
    ) -> LimitsOfRows:
        """`limits` as a plan has them: here they are given, and the same for every plan."""
        return self.limits

    def accounts(self, plan: StepPlan, max_occurrences: Mapping[str, int] | None = None) -> tuple[SignedAccount, ...]:
        """Bounds that contributions signed, each held to over all runs; none where nobody signed."""
        return ()

    @property
    def admission(self) -> Admission | None:
        """The gate's report where contributions were admitted by signature, None where nobody signed."""
        if callable(self._admission):
            self._admission = self._admission()
        return self._admission

    def set_admission(self, admission: Admission | Callable[[], Admission]) -> None:
        """The evidence under which this data is used; a function is asked for it when it is first wanted."""
        self._admission = admission

    def withdraw(self, *ids: str) -> None:
        """Never sampled again, from the next Sampler on. An unknown id is refused, and then nobody is withdrawn.

        What a model learned before stays in it: a withdrawal stops further loss, it does not unlearn.
        """
        self._index.find(ids)  # refuses an unknown id
        stable_ids = self.stable_ids(ids)
        if self.on_withdrawal_request is not None:
            self.on_withdrawal_request(stable_ids)  # the ledger first: it counts in other runs too
        self.withdrawal_requests += stable_ids
        self.exclude(ids)

    def exclude(self, ids: Sequence[str]) -> None:
        """As `withdraw`, for those who did not ask: expired, revoked, or withdrawn in the ledger already."""
        rows = self._index.find(ids)
        if self.on_exclusion is not None:
            self.on_exclusion(self.stable_ids(ids))  # on disk first: a restart must not let them in again
        self._index.withdraw(rows)

    def keep_only(self, rows: NDArray[np.int64]) -> None:
        """Exclude everybody else, in this process: rank 0 of the run has written it down."""
        self._index.withdraw(np.setdiff1d(self.eligible, rows))

    def refuse_untrainable(self, rows: NDArray[np.int64]) -> None:
        """Refuse to train: model and loss cannot be computed on these. Their owner is here, and can correct them."""
        problem = f"model and loss cannot be computed on some contributions, such as {self._index.ids[rows[0]]!r}"
        remedy = (
            "number labels 0 … C-1, C the model's outputs: numpy.unique(labels, return_inverse=True)[1]; with one output, use BCE "
            "in place of cross entropy; keep token ids "
            "below the size of their table, targets finite, and 0 … 1 for BCE; or withdraw them"
        )
        raise CorpusError("train.labels-out-of-range", problem, remedy)

    def stable_ids(self, ids: Sequence[str]) -> list[str]:
        """What the files of a run know these contributions by: here their ids."""
        return [str(one) for one in ids]

    def ids_of(self, *stable_ids: str) -> list[str]:
        """The ids that belong to these stable ids, as far as they are in this corpus, withdrawn or not."""
        return list(self._index.ids.find(stable_ids))

    def order(self, key: bytes) -> bytes:
        """32 bytes over which contribution is which row: what occurrence counters belong to."""
        return self._index.order(key)

    def membership(self, key: bytes) -> bytes:
        """32 bytes over ids, classes, subjects, scales and ceilings, the layout of examples and who is eligible."""
        return self._index.digest(key, f"examples_per_unit={self.examples_per_unit}")

    def digest(self, key: bytes) -> bytes:
        """32 bytes over all data, or over `version` and the number of examples. Worked out once per key."""
        if key not in self._digests:
            if self.version is None:
                self._digests[key] = self.source.digest(key)
            else:
                hasher = keyed_hasher(key, "lamina/version")
                hash_parts(hasher, [self.version, len(self.source)])
                self._digests[key] = hasher.digest()
        return self._digests[key]

    def fingerprint(self) -> bytes:
        """SHA-256 over all data, or its `version`: for whoever signs it under a nonce. It must not leave by itself."""
        hasher = hashlib.sha256()
        if self.version is None and isinstance(self.source, ArraySource):
            self.source.feed(hasher)
        else:
            hash_parts(hasher, [self.digest(b"lamina/fingerprint")])
        self.layout.feed(hasher)
        return hasher.digest()

    @property
    def digest_reads_all(self) -> bool:
        """Whether a digest has to make every example: a Dataset without a version."""
        return self.version is None and isinstance(self.source, DatasetSource)

    @property
    def origin(self) -> str | None:
        """The declared origin: the policy's, or the one given; None if nobody declared one."""
        return self._origin

    def origin_or_digest(self, key: bytes) -> str:
        """What spending is recorded under: the origin; without one a digest of data and units under a secret key.

        Keyed, because an unkeyed digest that leaves would let anybody check a guess of the data. With the units,
        because ε per row and ε per patient do not add up.
        """
        if self._origin is not None:
            return self._origin
        hasher = keyed_hasher(key, "lamina/origin")
        hash_parts(hasher, [self.digest(key)])
        self.layout.feed(hasher)
        return f"data-{hasher.digest().hex()[:16]}"

    def refresh(self) -> None:
        """Forget digests, and payloads that were kept: they may have been changed since."""
        self._digests.clear()
        if isinstance(self.source, PayloadSource):
            self.source.forget()

    def check(self, plan: StepPlan) -> None:
        """Refuse a plan that cannot be carried out on this corpus.

        Every class here must be one of the plan's, and none may have more members than were declared. A class of the plan
        without members is fine: its steps are noise.
        """
        if not isinstance(plan, StepPlan):
            problem = f"plan is a {type(plan).__name__}"
            raise CorpusError("corpus.plan-not-a-plan", problem, "use lamina.make_plan(stack, policy, …)")
        check_classes(self.names if self._index.named else None, [entry.name for entry in plan.classes], "plan")
        for entry in plan.classes:
            if not (entry.public or self._unit_declared or entry.unit in UNITS_OF_ONE_EXAMPLE):
                unknown = "the corpus does not say whose an example is"
                problem = f"class {entry.name!r} protects a {entry.unit}, and {unknown}"
                remedy = f"give unit=: the {entry.unit} of each example; if every example is another one, unit='each'"
                raise CorpusError("corpus.unit-not-given", problem, remedy)
        strict = self._index.scale is not None or self._index.ceiling is not None
        if strict and plan.clipping is Clipping.ELEMENTWISE:
            problem = "contributions have a scale or ceiling, and the plan clamps the mean of the batch"
            problem += ", which bounds nobody"
            raise CorpusError("corpus.limits-need-clipping", problem, "use a plan with box or joint clipping")
        for entry, members in zip(plan.classes, self.members_of(plan), strict=True):
            if entry.population is not None and len(members) > entry.population:
                problem = f"class {entry.name!r} has {len(members)} contributions, its population is {entry.population}"
                remedy = f"raise population in [class.{entry.name}] and make the plan again, or leave contributions out"
                raise CorpusError("corpus.population-too-small", problem, remedy)

    def batches(
        self, plan: StepPlan, *, max_occurrences: Mapping[str, int] | None = None, probe: ProbeArgument = True,
        seed: int | None = None,
    ) -> Iterator[Batch]:  # fmt: skip
        """The batches of all steps of a plan, with fresh secret coins: exactly `plan.steps`, some maybe empty.

        If an engine of the plan was not probed, a few small batches of simulated input come before them: treat them
        like the others. `engine.backward` compares what was computed, charges nothing and leaves `.grad` None;
        schedules of the learning rate do not count them. `probe=(x, y)` makes them from public examples instead, for
        a model that takes no others; `probe=False` leaves them out. With a `seed` the coins can be repeated, and an
        engine with secret noise refuses the batches: no ε holds for somebody who knows who was drawn.

        Under torch.distributed every rank gets its own part of the same sample, whose seed rank 0 draws.
        """
        ranks, chosen = Ranks.current(), seed is not None
        drawn_from = ranks.broadcast(segment_seed(seed) if ranks.first else None)
        if not ranks.alone:
            caps = repr(sorted((max_occurrences or {}).items())).encode()
            who = self.order(drawn_from) + self.membership(drawn_from)
            ranks.check_same(plan=plan.digest(), contributions=who, max_occurrences=caps)
        sampler = Sampler(self, plan, seed=drawn_from, max_occurrences=max_occurrences, seeded=chosen, ranks=ranks)
        return chain(self.probe_batches(plan, probe), (sampler.draw(step) for step in range(plan.steps)))

    def probe_batches(self, plan: StepPlan, probe: ProbeArgument = True) -> Iterator[Batch]:
        """The batches by which engines of a plan are probed, if they were not yet."""
        for engine in unprobed_engines(plan):
            if probe is not False and Ranks.current().first:
                print(PROBE_NOTE, file=sys.stderr)
            if isinstance(probe, tuple):
                yield from engine.probing.batches(*probe)
            elif probe:
                joined = self.layout.examples > len(self.layout)
                yield from engine.probing.batches(*self.no_examples(), simulated=True, joined=joined)
            else:
                engine.decline_probe()

    def no_examples(self) -> tuple[Any, Any]:
        """(x, y) with the shapes and types of the data, and a first axis of 0."""
        return self.source.fetch(np.empty(0, dtype=np.int64))

    def __repr__(self) -> str:
        return f"Corpus({self.source!r}, classes {', '.join(self.names)})"


def _named_columns(options: dict[str, Any], **columns: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Which of these are named by a column or array of a file, and the others as they are.

    Text names a column, unless it is unit="each" or a class of the policy: then it is the class of all. A contribution
    is called by the column that it came from.
    """
    policy, unit, cls = options.get("policy"), columns["unit"], columns["cls"]
    each = isinstance(unit, str) and unit == EACH_EXAMPLE
    if isinstance(unit, str):
        options.setdefault("unit_name", "example" if each else unit)
    named = {what: value for what, value in columns.items() if isinstance(value, str)}
    if each:
        del named["unit"]
    if isinstance(cls, str) and policy is not None and cls in policy.classes:
        del named["cls"]
    return named, {what: value for what, value in columns.items() if what not in named}
