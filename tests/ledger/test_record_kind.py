"""A kind of record from outside the package: encoded, appended by its rule, verified, shown and read by other processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forger import Forger
from making import LEDGER, Clock, create, digest
from refusals import raises_code

from lamina.codec import ledger_record, pattern_text, schema_of, stored
from lamina.errors import LedgerError
from lamina.ledger import records
from lamina.ledger.append_rules import Place
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import RecordKind, decode_leaf, encode_leaf, register_kind
from lamina.ledger.schema import COUNT, DIGEST, RUN
from lamina.ledger.show import RecordFilter, describe_leaf, leaf_to_dict
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger

OWN = bytes(range(16))


@ledger_record()
class Inspection:
    """A visit of an inspector, who saw the first `seen` leaves and wrote a report about a run."""

    inspector: str = stored(1, pattern_text(r"[a-z]{1,32}"))
    seen: int = stored(2, COUNT)
    run: bytes = stored(3, RUN)
    report: bytes | None = stored(4, DIGEST, default=None)


def check_inspection(record: Inspection, place: Place) -> None:
    if not 0 < record.seen <= place.seq:
        problem = f"the inspector saw {record.seen} leaves, but {place.seq} come before"
        raise LedgerError("ledger.inspection-of-later-leaves", problem, "give the leaves that were there")


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordKind]:
    registries = ("KINDS", "RECORD_KINDS", "KIND_NUMBERS", "KIND_NAMES", "KINDS_BY_NAME", "LEAF_STARTS")
    before = [(found := getattr(records, name), dict(found)) for name in registries]
    yield register_kind(
        RecordKind(
            type=Inspection, number=23, name="inspection", check=check_inspection,
            show=lambda r: f"{r.inspector} saw {r.seen} leaves", runs=lambda r: (r.run,),
            digests=lambda r: () if r.report is None else (r.report,), claims=lambda r: (r.inspector,),
        )
    )  # fmt: skip
    for found, old in before:
        found.clear()
        found.update(old)


def inspection(**changes: Any) -> Any:
    return Inspection(**{"inspector": "ada", "seen": 1, "run": OWN, **changes})


def test_it_is_encoded_and_decoded_by_its_declaration() -> None:
    data = encode_leaf(inspection(), 7, 1_800_000_000, 0)
    found = decode_leaf(data)
    assert (found.kind, found.record, found.seq) == (Inspection, inspection(), 7)
    assert schema_of(Inspection).to_cbor(inspection()) == {1: "ada", 2: 1, 3: OWN}
    with raises_code("ledger.field-invalid"):
        inspection(inspector="Ada")


def test_its_rule_holds_when_it_is_appended(where: str) -> None:
    report = b"all is well"
    with create(where) as ledger:
        for seen in (0, 2):
            with raises_code("ledger.inspection-of-later-leaves"):
                ledger.append([inspection(seen=seen)])
        with raises_code("ledger.batch-repeats"):
            ledger.append([inspection(), inspection(run=bytes(16))])
        told = inspection(report=records.hashlib.sha256(report).digest())
        assert ledger.append([told], [report]) == [1]
        assert ledger.blob(told.report) == report
        with raises_code("ledger.blob-unreferenced"):
            ledger.append([inspection()], [b"another report"])
        ledger.checkpoint()
    found = verify(where, now=int(Clock().now))
    assert found.verified and found.counts["inspection"] == 1


def test_it_is_shown_and_found(where: str) -> None:
    with create(where) as ledger:
        ledger.append([inspection()])
        ledger.checkpoint()
    with LedgerReader.read_only(where) as reader:
        for wanted in (RecordFilter(kinds=("inspection",)), RecordFilter(run=OWN.hex()[:6])):
            (leaf,) = wanted.leaves(reader)
            assert describe_leaf(leaf) == "ada saw 1 leaves"
        assert [each.record for each in reader.of_kind(Inspection)] == [inspection()]  # type: ignore[arg-type]
        shown = leaf_to_dict(leaf)
        assert (shown["kind"], shown["inspector"], shown["report"]) == ("inspection", "ada", None)


def test_its_rule_holds_for_who_reads_and_who_verifies(tmp_path: Path) -> None:
    """Written into the store past the rule: no other process reads on, nothing is signed over it, and verify names it."""
    path = str(tmp_path / "ledger.db")
    create(path).close()
    seq = Forger(path).append(23, {1: "eve", 2: 9, 3: OWN})
    found = verify(path, now=int(Clock().now)).problem
    assert found is not None
    assert (found.index, found.kind, found.code) == (seq, "inspection", "ledger.inspection-of-later-leaves")
    with Ledger.open(path, LEDGER, clock=Clock()) as ledger, raises_code("ledger.leaf-not-allowed"):
        ledger.checkpoint()


@pytest.mark.parametrize("taken", [{"number": 3}, {"name": "epoch"}, {"number": 24}])
def test_a_number_and_a_name_belong_to_one_kind(taken: dict[str, Any]) -> None:
    with raises_code("ledger.kind-taken"):
        register_kind(RecordKind(**{"type": Inspection, "number": 22, "name": "visit", **taken}))
    assert digest("unknown") not in records.KINDS
