"""Whether those who were admitted may still be learned from: asked when a run begins or goes on, and at each segment.

runs/NAME/admitted      digest of the descriptor of each who was ever admitted to the run, and its id; CBOR, mode 0600

A contribution is known by the digest of its descriptor: whoever gives its folder another name finds its occurrences and
its withdrawal where they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from lamina import cbor
from lamina.admit.reason import Reason
from lamina.errors import AdmissionError, StorageError
from lamina.plan import StepPlan
from lamina.train.corpus import Corpus
from lamina.train.corpus.signed import AdmittedCorpus, in_words
from lamina.train.corpus.text import Texts
from lamina.train.store.durable import write_atomically
from lamina.train.withdrawals import LARGEST, marks_in, read_texts

Note = Callable[[str], None]


class Renewal:
    """Takes out who is out. A corpus that was not admitted by signature is left alone.

    Whoever took part before and is refused now is withdrawn, for this run for good; so is whoever expires or loses
    their key while it runs. It happens between segments: the next one is frozen without them, and one that was open
    when the run was killed is not replayed but redone, because its membership has changed.
    """

    def __init__(self, corpus: Corpus, plan: StepPlan, path: Path) -> None:
        self._corpus = corpus if isinstance(corpus, AdmittedCorpus) else None
        self._plan, self._path = plan, path
        self._before: dict[str, str] = {}  # mark: id

    @property
    def names(self) -> Texts | None:
        """Who is which row: after another admission the rows may be others."""
        return None if self._corpus is None else self._corpus.digests

    def begin(self, note: Note) -> None:
        """Before a run begins or goes on: hold who is admitted now against who was before."""
        if self._corpus is None:
            return
        self._before = read_texts(self._path, {}) if self._path.with_name("journal").exists() else {}
        if not isinstance(self._before, dict):
            raise StorageError(
                "train.not-say-admitted", f"'{self._path}' does not say who was admitted", "restore it"
            )
        here = set(self._corpus.digests)
        if gone := {mark: one for mark, one in self._before.items() if mark not in here}:
            self._leave(gone, note)
        if out := self._corpus.out_of_reach(self._plan):
            note(
                f"{out} admitted contributions signed a bound that no scale keeps under this plan: they are not sampled"
            )
        self.again(note)

    def begun(self) -> None:
        """The run is there, and nothing of it is drawn yet: write down who is in it."""
        if self._corpus is None:
            return
        ever = {**dict(zip(self._corpus.digests, self._corpus.ids, strict=True)), **self._before}
        if len(ever) > len(self._before):
            write_atomically(self._path, cbor.encode(ever, max_size=LARGEST))

    def again(self, note: Note, step: int | None = None) -> None:
        """Before a segment is opened: windows, keys, and signatures once an epoch is over."""
        if self._corpus is None or not (reasons := self._corpus.renew()):
            return
        when = "" if step is None else f" before step {step}"
        note(
            f"contributions that may no longer be used were withdrawn{when}: {in_words(reasons)}; what was learned "
            "from them earlier stays"
        )
        if not len(self._corpus):
            raise AdmissionError(
                "train.nobody-left-learned",
                f"nobody is left who may be learned from{when}",
                "the weights so far are kept; let contributors sign again, and begin a run in another folder",
            )

    def _leave(self, gone: Mapping[str, str], note: Note) -> None:
        """Refused now, or not offered any more."""
        assert self._corpus is not None and self._corpus.admission is not None
        known = set(marks_in(self._path.with_name("withdrawn")))
        if not (new := {mark: one for mark, one in gone.items() if mark not in known}):
            return
        refused = {each.id: each.reason for each in self._corpus.admission.refused}
        reasons = Counter(refused.get(one, Reason.GONE) for one in new.values())
        if self._corpus.when_withdrawn is not None:
            self._corpus.when_withdrawn(list(new))  # on disk, so that they stay out
        note(
            f"contributions that took part before are not admitted now, and are withdrawn: {in_words(reasons)}"
        )
