"""Simulated input of the probe: inside the tables that it is looked up in, and no value of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from net_builders import Net
from refusals import raises_code
from torch import Tensor, nn
from torch.nn import functional as F

import lamina
from lamina.engine.simulated_input import simulate, simulate_for

pytestmark = pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")  # one set of data for all

ROWS, CLASSES, LENGTH = 13, 5, 4


class Tagger(nn.Module):
    """Token ids and a mask to `CLASSES` scores. The ids of the data are large: those of the probe must come from the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, 6), nn.Linear(6, CLASSES)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        keep = attention_mask.unsqueeze(-1).float()
        return self.out((self.table(ids) * keep).sum(1) / keep.sum(1))


TAKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda out, y: F.cross_entropy(out, y, reduction="none"),
    "of a keyword": lambda out, y: nn.CrossEntropyLoss(reduction="none")(out, target=y),
    "of a copy": lambda out, y: F.nll_loss(out.log_softmax(1), y.clone().long(), reduction="none"),
    "gather": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).squeeze(1),
    "indexing": lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y],
    "one hot": lambda out, y: -(F.one_hot(y, CLASSES) * out.log_softmax(1)).sum(1),
}


def data(n: int = 40) -> tuple[dict[str, Tensor], Tensor]:
    """Every id is the largest, every label the largest, every mask whole."""
    x = {"ids": torch.full((n, LENGTH), ROWS - 1), "attention_mask": torch.ones(n, LENGTH, dtype=torch.long)}
    return x, torch.full((n,), CLASSES - 1)


@pytest.mark.parametrize("kind", TAKES)
def test_ids_and_labels_fill_their_tables(kind: str) -> None:
    model, (x, y) = Tagger(), data()
    x, y = simulate_for(lambda x, y: TAKES[kind](model(**x), y), x, y)
    assert int(x["ids"].min()) >= 0 and 2 < int(x["ids"].max()) < ROWS and len(x["ids"].unique()) > 4
    assert int(y.min()) >= 0 and 1 < int(y.max()) < CLASSES
    assert set(x["attention_mask"].unique().tolist()) == {0, 1} and bool(x["attention_mask"][:, 0].all())


def test_values_do_not_depend_on_the_data() -> None:
    model, loss = Tagger(), TAKES["cross entropy"]
    zeros = torch.zeros(3, LENGTH, dtype=torch.long)
    one, other = data(), ({"ids": zeros, "attention_mask": zeros}, torch.zeros(3, dtype=torch.long))
    made = [simulate_for(lambda x, y: loss(model(**x), y), *given) for given in (one, other)]
    assert torch.equal(made[0][0]["ids"], made[1][0]["ids"]) and torch.equal(made[0][1], made[1][1])


def test_values_of_lengths_bytes_and_targets_of_which_nothing_is_known() -> None:
    x, y = simulate(
        {"lengths": torch.tensor([9]), "bytes": torch.zeros(1, 8, dtype=torch.uint8)}, torch.tensor([7.5]), 6, {}
    )
    assert x["lengths"].tolist() == [1, 1, 1, 1, 2, 1] and int(x["bytes"].max()) > 200
    assert x["bytes"].dtype == torch.uint8 and bool(((y >= 0) & (y <= 1)).all()) and len(y.unique()) == 6


def loop_of(losses: Callable[[nn.Module, Any, Any], Tensor], **options: Any) -> Iterator[tuple[Any, lamina.Batch]]:
    model = Tagger()
    engine, corpus, plan = lamina.make_private(model, data(), epsilon=3.0, batch=8, steps=1)
    with engine:
        for batch in corpus.batches(plan, **options):
            engine.backward(losses(model, batch.x, batch.y) if len(batch) else None, batch)
            model.zero_grad()
            yield engine, batch


def test_a_loop_of_ones_own_sees_no_example_before_the_first_step() -> None:
    seen = []
    for engine, batch in loop_of(lambda m, x, y: TAKES["cross entropy"](m(**x), y)):
        if not engine.budget.taken:
            seen.append(batch)
    assert len(seen) > 8 and engine.probed
    for batch in seen[:1]:
        assert int(batch.x["ids"].max()) == int(batch.y.max()) == 0
    for batch in seen[1:]:
        assert int(batch.x["ids"].max()) < ROWS and len(batch.y.unique()) > 1 and len(batch.x["ids"].unique()) > 2


def test_coupling_through_labels_or_masks_of_others_is_found() -> None:
    def by_frequency(m: nn.Module, x: Any, y: Tensor) -> Tensor:
        return TAKES["cross entropy"](m(**x), y) / torch.bincount(y, minlength=CLASSES)[y]

    def trimmed(m: nn.Module, x: Any, y: Tensor) -> Tensor:
        longest = int(x["attention_mask"].sum(1).max())
        return TAKES["cross entropy"](m(**x), y) * longest

    for losses in (by_frequency, trimmed):
        with raises_code("engine.probe-found-coupling"):
            list(loop_of(losses))


def strict(model: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Takes only examples that end with the largest id, as models with an end token do."""
    if not bool((x["ids"][:, -1] == ROWS - 1).all()):
        raise ValueError("every example must end with the end token")
    return TAKES["cross entropy"](model(**x), y)


def test_public_examples_for_a_model_that_takes_no_simulated_ones() -> None:
    with pytest.raises(ValueError, match="end token"):
        list(loop_of(strict))
    public = data(6)[0], torch.arange(6) % CLASSES
    assert [engine.probed for engine, _ in loop_of(strict, probe=public)][-1]


def test_the_trainer_takes_public_examples_too(tmp_path: Path) -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        if int(y.max()) == 0:
            raise ValueError("one class alone")
        return problem.loss(output, y)

    with raises_code("train.model-or-loss-failed"):
        problem.trainer(tmp_path / "a", loss_fn=loss).rehearse()
    problem.trainer(tmp_path / "b", loss_fn=loss, probe=(torch.randn(6, 6), torch.arange(6) % 3)).rehearse()


def test_a_table_looked_up_with_computed_ids_gets_0_or_1() -> None:
    model = Net(lambda m, x: m.out(m.table(x + 1).sum(1)), table=nn.Embedding(3, 4), out=nn.Linear(4, 2))
    x, _ = simulate_for(lambda x, y: model(x).sum(1), torch.zeros(1, LENGTH).long(), None)
    assert set(x.unique().tolist()) == {0, 1}


class Counts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.out, self.x = nn.Linear(LENGTH, CLASSES), torch.ones(40, LENGTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.out(x / x.amax(0).clamp(min=1))


class Shortened(nn.Module):
    """Cut to the longest of the batch, mean without a mask."""

    def __init__(self, lengths: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, 6), nn.Linear(6, CLASSES)
        ids = torch.ones(40, LENGTH, dtype=torch.long)
        self.x = (ids, torch.ones(40, dtype=torch.long)) if lengths else (ids,)

    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        longest = x[1].max() if len(x) == 2 else (x[0] != 0).sum(1).max()
        return self.out(self.table(x[0][:, : int(longest)]).mean(1))


@pytest.mark.parametrize(
    "model",
    [Counts(torch.uint8), Counts(torch.long), Shortened(True), Shortened(False)],
    ids=["bytes", "counts", "lengths", "padding"],
)
def test_coupling_through_whole_numbers_is_found(model: Any) -> None:
    engine, corpus, plan = lamina.make_private(model, (model.x, data()[1]), epsilon=3.0, batch=8, steps=1)
    with engine, raises_code("engine.probe-found-coupling"):
        for batch in corpus.batches(plan):
            engine.backward(TAKES["cross entropy"](model(batch.x), batch.y), batch)


@pytest.mark.parametrize("coupled", [True, False])
def test_labels_that_the_loss_ignores(coupled: bool) -> None:
    model = Net(lambda m, x: m.out(m.table(x)), table=nn.Embedding(ROWS, 4), out=nn.Linear(4, CLASSES))
    y = torch.zeros(40, LENGTH, dtype=torch.long)
    engine, corpus, plan = lamina.make_private(model, (y, y.clone()), epsilon=3.0, batch=8, steps=1)

    def losses(batch: lamina.Batch) -> Tensor | None:
        if not len(batch):
            return None
        tokens = F.cross_entropy(model(batch.x).transpose(1, 2), batch.y, reduction="none").sum(1)
        kept = (batch.y != -100).sum(1)
        return tokens * len(kept) / kept.sum() if coupled else tokens / kept

    with engine, raises_code("engine.probe-found-coupling") if coupled else nullcontext():
        for batch in corpus.batches(plan):
            engine.backward(losses(batch), batch)
