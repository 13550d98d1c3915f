"""PTB-XL, OhioT1DM and MIMIC-III in folders that the tests write: labels, folds, windows, parts, gaps, units, refusals."""

from __future__ import annotations

import csv
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from refusals import raises_code
from signal_files import write_edf, write_ohio, write_wfdb

from lamina.signals import (
    PTBXL_COUNTS,
    Signal,
    class_weights,
    mimic_corpus,
    mimic_records,
    noisy_class_counts,
    ohio_corpus,
    ohio_records,
    ohio_signal,
    part_of,
    prepare,
    ptbxl_corpus,
    ptbxl_records,
    read_ohio,
    read_wfdb,
    signal_corpus,
    signal_records,
    write_simulated_ohio,
    write_simulated_ptbxl,
)
from lamina.signals.simulated_folders import ohio_xml

# --------------------------------------------------------------------------------------------------- preprocessing


def sines(rate: float, seconds: float, *frequencies: float) -> Signal:
    t = np.arange(round(rate * seconds)) / rate
    x = np.stack([np.sin(2 * np.pi * f * t) for f in frequencies]).astype(np.float32)
    return Signal(x=x, rate=rate, channels=tuple(f"{f} Hz" for f in frequencies))


def test_the_band_keeps_what_is_inside_and_moves_nothing() -> None:
    given = sines(200, 20, 0.05, 5.0, 60.0)
    found = given.band_passed()
    inside = slice(1000, 3000)
    assert np.abs(found.x[0, inside]).max() < 0.05 and np.abs(found.x[2, inside]).max() < 0.08
    np.testing.assert_allclose(found.x[1, inside], given.x[1, inside], atol=0.02)
    with raises_code("data.band-not-valid"):
        sines(62.5, 10, 1.0).band_passed()


@pytest.mark.parametrize("rate", [125.0, 62.5, 500.0])
def test_resampling_keeps_the_wave(rate: float) -> None:
    found = sines(250, 8, 3.0).resampled(rate)
    wanted = sines(rate, 8, 3.0)
    assert found.x.shape == wanted.x.shape and found.rate == rate
    middle = slice(int(rate), int(7 * rate))
    np.testing.assert_allclose(found.x[0, middle], wanted.x[0, middle], atol=0.02)


def test_standardised_by_channel_and_record_and_flat_leads_are_zero() -> None:
    x = np.array([[1.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]], dtype=np.float32)
    found = Signal(x=x, rate=1.0, channels=("a", "b")).standardised()
    np.testing.assert_allclose(found.x, [[-1, 1, -1, 1], [0, 0, 0, 0]], atol=1e-6)


def test_windows_overlap_by_half_and_never_cross_a_gap() -> None:
    x = np.arange(1000, dtype=np.float32)[None].copy()
    signal = Signal(x=x, rate=100.0, channels=("a",))
    assert signal.windows()[:, 0, 0].tolist() == [0, 128, 256, 384, 512, 640]
    assert signal.windows(256, 0.0)[:, 0, 0].tolist() == [0, 256, 512]
    x[0, 600] = np.nan
    runs = list(signal.runs(256))
    assert [(run.x[0, 0], run.x.shape[1]) for run in runs] == [(0, 600), (601, 399)]
    assert Signal(x=x[:, :100], rate=100.0, channels=("a",)).windows().shape == (0, 1, 256)
    with raises_code("data.windows-not-valid"):
        signal.windows(256, 1.0)
    with raises_code("data.channel-missing"):
        signal.pick("b")


def test_parts_are_seventy_fifteen_fifteen_and_belong_to_the_patient() -> None:
    parts = [part_of(f"p{i:06d}") for i in range(4000)]
    shares = [parts.count(name) / 4000 for name in ("train", "validation", "test")]
    np.testing.assert_allclose(shares, [0.70, 0.15, 0.15], atol=0.02)
    assert [part_of(name) for name in ("p000020", "p000030", "p000052")] == ["validation", "train", "test"]


# ------------------------------------------------------------------------------------------------------- PTB-XL


@pytest.fixture(scope="module")
def ptbxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "ptbxl"
    write_simulated_ptbxl(folder, patients=20, records=2)
    return folder


def test_ptbxl_has_superclasses_folds_and_patients(ptbxl: Path, tmp_path: Path) -> None:
    records = ptbxl_records(ptbxl)
    assert len(records) == 40
    assert {record.part for record in records if record.patient == "1008"} == {"validation"}
    assert {record.part for record in records if record.patient == "1009"} == {"test"}
    assert all(record.label is not None and record.label.sum() == 1 for record in records)
    made = prepare(records, settings={}, cache=tmp_path)
    assert {name: len(part) for name, part in made.items()} == {"train": 16 * 12, "validation": 24, "test": 24}
    train = made["train"]
    assert train.x.shape == (192, 12, 256) and train.x.dtype == np.float32
    assert train.y is not None and train.y.shape == (192, 5)
    assert len(set(train.patient)) == 16
    whole = train.x.reshape(32, 6, 12, 256)
    assert abs(float(whole.mean())) < 0.05 and 0.5 < float(whole.std()) < 1.5
    corpus = ptbxl_corpus(str(ptbxl), part="train", cache=str(tmp_path))
    assert len(corpus) == 16 and corpus.unit_name == "patient"


def test_windows_are_prepared_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    write_simulated_ptbxl(tmp_path / "ptbxl", patients=3)
    first = prepare(ptbxl_records(tmp_path / "ptbxl"), settings={"a": 1}, cache=tmp_path / "cache")
    records = ptbxl_records(tmp_path / "ptbxl")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    again = prepare(records, settings={"a": 1}, cache=tmp_path / "cache")
    assert isinstance(again["train"].x, np.memmap)
    assert np.array_equal(first["train"].x, again["train"].x)
    in_memory = prepare(records, settings={"a": 1})
    assert np.array_equal(in_memory["train"].x, again["train"].x) and not isinstance(in_memory["train"].x, np.memmap)
    prepare(records, settings={"a": 2}, cache=tmp_path / "cache")
    write_wfdb(tmp_path / "ptbxl" / "records100/00000/00001_lr", np.ones((12, 1000), dtype=int))
    prepare(ptbxl_records(tmp_path / "ptbxl"), settings={"a": 1}, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 3  # nothing half done is left
    assert (tmp_path / "cache").stat().st_mode & 0o777
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in (tmp_path / "cache").iterdir())


def test_ptbxl_in_parts_of_70_15_15_by_patient(ptbxl: Path) -> None:
    by_patient, folds = (ptbxl_records(ptbxl, split=split) for split in ("patients", "folds"))
    assert all(record.part == part_of(record.patient) for record in by_patient)
    assert [record.part for record in by_patient] != [record.part for record in folds]
    assert len(ptbxl_corpus(str(ptbxl), split="patients")) == len({r.patient for r in by_patient if r.part == "train"})
    with raises_code("data.split-not-known"):
        ptbxl_records(ptbxl, split="random")


def test_ptbxl_at_500_hertz(tmp_path: Path) -> None:
    write_simulated_ptbxl(tmp_path, patients=1, rate=500)
    (record,) = ptbxl_records(tmp_path, rate=500)
    assert record.windows().shape == (38, 12, 256)
    with raises_code("data.ptbxl-rate"):
        ptbxl_records(tmp_path, rate=250)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("scp_codes", "__import__('os').system('true')"), ("scp_codes", "[" * 9000), ("scp_codes", "'NORM'"),
        ("strat_fold", "11"), ("strat_fold", ""), ("patient_id", "nobody"), ("filename_lr", "../../etc/passwd"),
        ("filename_lr", "records100/00000/99999_lr"),
    ],
)  # fmt: skip
def test_a_broken_table_is_refused_by_line(tmp_path: Path, column: str, value: str) -> None:
    write_simulated_ptbxl(tmp_path, patients=1)
    table = tmp_path / "ptbxl_database.csv"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0][column] = value
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with raises_code("data.file-broken"):
        ptbxl_records(tmp_path)


def test_patients_stay_in_one_part_and_smote_is_refused(ptbxl: Path) -> None:
    records = ptbxl_records(ptbxl)
    with raises_code("data.oversampling-mixes-patients"):
        prepare(records, settings={}, oversample="smote")
    with raises_code("data.oversampling-mixes-patients"):
        ptbxl_corpus(str(ptbxl), oversample="smote")
    with raises_code("data.patient-in-two-parts"):
        prepare([records[0], replace(records[1], part="test")], settings={})
    with raises_code("data.part-not-known"):
        ptbxl_corpus(str(ptbxl), part="all")
    with raises_code("data.folder-missing"):
        ptbxl_records(ptbxl / "nowhere")


# ------------------------------------------------------------------------------------------------------ OhioT1DM


def test_ohio_is_interpolated_to_five_minutes_in_the_public_range(tmp_path: Path) -> None:
    path = write_ohio(tmp_path, np.linspace(40, 400, 37), "559", late=2.5)
    signal = ohio_signal(read_ohio(path), "glucose_level")
    assert signal.x.shape == (1, 36)
    np.testing.assert_allclose(signal.x[0], (np.arange(36) + 0.5) / 36, atol=1e-6)


def test_gaps_of_more_than_half_an_hour_stay_gaps_and_wristbands_are_averaged(tmp_path: Path) -> None:
    start = datetime(2021, 1, 1)
    minutes = [*range(0, 60, 5), *range(80, 120, 5), *range(160, 200, 5)]
    pulse = [(start + timedelta(minutes=m), 40.0 + 160.0 * (m % 5) / 4) for m in range(100)]
    series = {"glucose_level": [(start + timedelta(minutes=m), 220.0) for m in minutes], "basis_heart_rate": pulse}
    found = _ohio(tmp_path, ohio_xml("540", series), "glucose_level", "basis_heart_rate")
    assert found.x.shape == (2, 40)
    assert np.isnan(found.x[0]).nonzero()[0].tolist() == list(range(24, 32))  # 115 to 160; 55 to 80 is short
    np.testing.assert_allclose(found.x[0][~np.isnan(found.x[0])], 0.5)
    np.testing.assert_allclose(found.x[1, :26], 0.5)  # the last reading is kept for half an hour
    assert np.isnan(found.x[1, 26:]).all()


def _ohio(folder: Path, text: str, *channels: str) -> Signal:
    path = folder / "540-ws-training.xml"
    path.write_text(text)
    return ohio_signal(read_ohio(path), *channels)


def test_files_of_a_patient_are_one_contribution_in_one_part(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for patient in range(540, 560):
        for kind, cohort in (("training", "2018/train"), ("testing", "2020/test")):
            write_ohio(tmp_path / cohort, generator.uniform(80, 200, 600), str(patient), kind)
    made = prepare(ohio_records(tmp_path), settings={})
    patients = [set(part.patient) for part in made.values()]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 20
    assert made["train"].x.shape == (len(patients[0]) * 2 * 3, 1, 256)
    assert made["train"].x.min() >= 0 and made["train"].x.max() <= 1
    assert len(ohio_corpus(str(tmp_path), cache=str(tmp_path / "cache"))) == len(patients[0])


LAUGHS = '<!DOCTYPE lolz [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]><patient id="1"><x>&b;</x></patient>'
WRONG_XML = {
    "entities": LAUGHS,
    "entities in UTF-16": LAUGHS,
    "another file": '<!DOCTYPE patient SYSTEM "file:///etc/passwd"><patient id="1"/>',
    "not closed": '<patient id="1"><glucose_level>',
    "no id": "<patient/>",
    "a strange id": '<patient id="../x"/>',
    "another root": '<person id="1"/>',
    "too deep": '<patient id="1"><a><event><b/></event></a></patient>',
    "nothing": "",
}


@pytest.mark.parametrize("what", WRONG_XML)
def test_hostile_and_broken_xml_is_refused_by_name(tmp_path: Path, what: str) -> None:
    path = tmp_path / "1-ws-training.xml"
    path.write_bytes(WRONG_XML[what].encode("utf-16" if "UTF-16" in what else "utf-8"))
    with raises_code("data.file-broken") as caught:
        read_ohio(path)
    assert path.name in caught.value.problem


def test_units_names_and_sizes_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code("data.file-broken") as caught:
        ohio_signal(read_ohio(write_ohio(tmp_path, np.full(300, 7.5), "544")), "glucose_level")
    assert "18.016" in caught.value.remedy
    write_ohio(tmp_path, np.full(300, 120.0), "544").rename(tmp_path / "545-ws-training.xml")
    with raises_code("data.file-broken"):
        prepare(ohio_records(tmp_path), settings={})
    with raises_code("data.ohio-channels"):
        ohio_records(tmp_path, channels=("blood",))
    with raises_code("data.no-records"):
        (tmp_path / "empty").mkdir()
        ohio_records(tmp_path / "empty")
    bad = (tmp_path / "545-ws-training.xml").read_text().replace("07-12-2021 00:00:00", "2021-12-07")
    with raises_code("data.file-broken"):
        _ohio(tmp_path, bad, "glucose_level")
    monkeypatch.setattr("lamina.signals.datasets.MOST_XML", 100)
    with raises_code("data.file-broken"):
        read_ohio(tmp_path / "545-ws-training.xml")


# ------------------------------------------------------------------------------------------------------ MIMIC-III


def test_mimic_streams_come_from_segments_at_their_rates(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(20, 40):
        folder, patient = tmp_path / "p00" / f"p{number:06d}", f"p{number:06d}"
        write_wfdb(
            folder / f"3{number}_0001",
            generator.integers(-50, 50, (2, 1500)),
            form=80,
            rate=125,
            channels=("II", "ABP"),
        )
        write_wfdb(
            folder / f"3{number}_0002", generator.integers(-50, 50, (1, 900)), form=80, rate=125, channels=("PLETH",)
        )
        name = f"{patient}-2183-04-28-17-47"
        (folder / f"{name}.hea").write_text(f"{name}/3 3 125 2700\n3{number}_0001 1500\n~ 300\n3{number}_0002 900\n")
        (folder / f"{name}n.hea").write_text(f"{name}n 1 1 10\nn.dat 16 1\n")  # numerics: another kind of record
    assert len(mimic_records(tmp_path)) == 20
    for stream, count in (("ECG", 10), ("ABP", 4), ("PPG", 2)):
        made = prepare(mimic_records(tmp_path, stream=stream), settings={})
        assert sum(map(len, made.values())) == 20 * count
        assert made["train"].x.shape[1:] == (1, 256)
    assert sum(map(len, prepare(mimic_records(tmp_path, most=3), settings={}).values())) == 60
    assert len(mimic_corpus(str(tmp_path), stream="PPG")) == len(
        {p for p in map(str, range(20, 40)) if part_of(f"p{int(p):06d}") == "train"}
    )
    for stream in ("EEG", "ECG+EEG", "ECG+"):
        with raises_code("data.stream-not-known"):
            mimic_records(tmp_path, stream=stream)
    with raises_code("data.missing-not-known"):
        mimic_records(tmp_path, stream="ECG+ABP", missing="guess")
    with raises_code("data.no-records"):
        (tmp_path / "none").mkdir()
        mimic_records(tmp_path / "none")


def test_mimic_streams_are_cut_together_at_the_same_moments(tmp_path: Path) -> None:
    """A pulse in all three streams at the same moment stays there; a segment without PPG is left out or filled with 0."""
    t, patients = np.arange(6000), [f"p{number:06d}" for number in range(20, 26)]
    beat = np.exp(-(((t % 125) - 60.0) ** 2) / 400)
    waves = np.rint(100 * np.stack([beat, 2 * beat, -beat])).astype(int)
    for patient in patients:
        folder, number = tmp_path / "p00" / patient, patient[1:]
        write_wfdb(folder / f"3{number}_0001", waves, rate=125, channels=("II", "ABP", "PLETH"))
        write_wfdb(folder / f"3{number}_0002", waves[:2], rate=125, channels=("V", "ART"))
        gap = waves.copy()
        gap[1, 2800:3000] = -(1 << 15)  # WFDB's mark of a missing sample
        write_wfdb(folder / f"3{number}_0003", gap, rate=125, channels=("II", "ABP", "PLETH"))
        name = f"{patient}-2183-04-28-17-47"
        parts = "".join(f"3{number}_000{i} 6000\n" for i in (1, 2, 3))
        (folder / f"{name}.hea").write_text(f"{name}/3 3 125 18000\n{parts}")
    (first, *_) = mimic_records(tmp_path, stream="ECG+ABP+PPG")
    found = first.windows()
    whole, before, after = ((n - 256) // 128 + 1 for n in (6000, 2800, 3000))
    assert found.shape == (whole + before + after, 3, 256)
    for window in found[:whole]:
        assert np.corrcoef(window[0], window[1])[0, 1] > 0.99 and np.corrcoef(window[0], window[2])[0, 1] < -0.99
    assert np.abs(found[:whole].mean(axis=(0, 2))).max() < 0.1
    filled = mimic_records(tmp_path, stream="ECG+ABP+PPG", missing="zero")[0].windows()
    assert len(filled) == len(found) + whole
    assert not filled[whole : 2 * whole, 2].any() and filled[whole : 2 * whole, :2].any()
    np.testing.assert_array_equal(filled[:whole], found[:whole])
    two = mimic_records(tmp_path, stream="ABP+PPG")[0].windows()  # 62.5 a second: half as many samples
    assert (
        two.shape[1:] == (2, 256)
        and len(two) == (3000 - 256) // 128 + 1 + (1400 - 256) // 128 + 1 + (1500 - 256) // 128 + 1
    )
    corpus = mimic_corpus(str(tmp_path), stream="ECG+ABP+PPG", part=part_of(patients[0]))
    assert len(corpus) == sum(part_of(patient) == part_of(patients[0]) for patient in patients)


# --------------------------------------------------------------------------------------------------- other folders


def test_any_recordings_with_one_folder_per_patient(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 1000)).astype(np.float32)
    for i in range(20):
        (tmp_path / f"p{i}").mkdir()
        write_wfdb(tmp_path / f"p{i}" / "a", np.rint(100 * x).astype(int), rate=100, channels=("II", "V5"))
        write_edf(tmp_path / f"p{i}" / "b.edf", np.clip(x[::-1], -3, 3), rate=100, channels=("V5", "II"))
        np.savez(tmp_path / f"p{i}" / "c.npz", x=np.repeat(x, 2, axis=1), rate=200.0, channels=np.array(["II", "V5"]))
        rows = "\n".join(",".join(f"{v:.4f}" for v in row) for row in x.T)
        (tmp_path / f"p{i}" / "d.csv").write_text(f"II,V5\n{rows}\n")
        (tmp_path / f"p{i}" / "notes.txt").write_text("not a recording")
    records = signal_records(tmp_path, rate=100, channels=("II",), band=(0.5, 40.0))
    assert len(records) == 80
    made = prepare(records, settings={})
    assert sum(map(len, made.values())) == 80 * 6 and made["train"].x.shape[1:] == (1, 256)
    one, *others = (record.windows() for record in records[:4])  # the same signal, four ways
    for other in (others[0], others[2]):
        assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.99
    corpus = signal_corpus(str(tmp_path), rate=100, channels=["V5"], band=[0.5, 40.0], cache=str(tmp_path / ".cache"))
    assert len(corpus) == len(set(made["train"].patient))
    with raises_code("data.channel-missing"):
        signal_corpus(str(tmp_path), rate=100, channels=["aVF"])
    (tmp_path / "p0" / "d.csv").write_text("II,V5\n1,x\n")
    with raises_code("corpus.value-not-a-number"):
        prepare(signal_records(tmp_path, rate=100), settings={})
    with raises_code("data.no-records"):
        signal_records(tmp_path / "p0", rate=100)


# ---------------------------------------------------------------------------------------------------- class weights


def test_class_weights_come_from_public_or_noisy_counts() -> None:
    weights = class_weights(PTBXL_COUNTS)
    assert sum(weights[name] * count for name, count in PTBXL_COUNTS.items()) == pytest.approx(
        sum(PTBXL_COUNTS.values())
    )
    assert weights["HYP"] > weights["NORM"]
    with raises_code("data.counts-not-positive"):
        class_weights({"a": 0})
    pairs = [("p1", "a"), ("p1", "b"), ("p1", "a"), ("p2", "b"), ("p3", "b")]
    found = noisy_class_counts(pairs, ("a", "b", "c"), noise_multiplier=1e-6)
    assert found == pytest.approx({"a": 1, "b": 2, "c": 1}, abs=1e-3)  # nobody counts twice
    many = [noisy_class_counts([("p", "a")] * 100, ("c",), noise_multiplier=50)["c"] for _ in range(200)]
    assert np.std(many) > 5
    with raises_code("data.noise-multiplier"):
        noisy_class_counts(pairs, ("a",), noise_multiplier=0)


def test_nothing_long_enough_is_refused(tmp_path: Path) -> None:
    write_ohio(tmp_path, np.full(20, 120.0), "544")
    with raises_code("data.no-windows"):
        prepare(ohio_records(tmp_path), settings={})
    write_ohio(tmp_path, np.full(400, 120.0), "544")
    made = prepare(ohio_records(tmp_path), settings={})
    empty = next(part for part in made.values() if not len(part))
    with raises_code("data.part-empty"):
        empty.corpus()


def test_a_written_record_reads_as_simulated(ptbxl: Path) -> None:
    record = read_wfdb(ptbxl / "records100/00000/00001_lr")
    assert record.x.shape == (12, 1000) and record.channels[:3] == ("I", "II", "III")
    np.testing.assert_allclose(record.x[0] + record.x[2], record.x[1], atol=0.002)


def test_simulated_glucose_reads_as_written_and_is_higher_by_its_factor(tmp_path: Path) -> None:
    write_simulated_ohio(tmp_path / "usual", patients=3, days=2, seed=1)
    write_simulated_ohio(tmp_path / "higher", patients=3, days=2, seed=1, factor=1.25)
    usual, higher = (
        ohio_signal(read_ohio(tmp_path / name / "1001-ws-training.xml"), "glucose_level")
        for name in ("usual", "higher")
    )
    assert usual.x.shape == higher.x.shape == (1, 576) and not np.isnan(usual.x).any()
    readings = np.clip(1.25 * (40 + 360 * usual.x), 40, 400)
    np.testing.assert_allclose(40 + 360 * higher.x, readings, atol=0.51)
    assert len(ohio_records(tmp_path / "usual")) == 3


def test_simulated_patients_are_not_written_among_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("ours")
    for write in (write_simulated_ohio, write_simulated_ptbxl):
        for folder in (tmp_path, tmp_path / "notes.txt"):
            with raises_code("data.folder-not-empty"):
                write(folder, patients=2)
        with raises_code("data.patients-not-positive"):
            write(tmp_path / "new", patients=0)
    with raises_code("data.ptbxl-rate"):
        write_simulated_ptbxl(tmp_path / "other", patients=2, rate=250)
    with raises_code("data.records-not-a-count"):
        write_simulated_ptbxl(tmp_path / "other", patients=2, records=0)
    with raises_code("data.factor-not-positive"):
        write_simulated_ohio(tmp_path / "other", patients=2, factor=0.0)
    assert not (tmp_path / "other").exists()
