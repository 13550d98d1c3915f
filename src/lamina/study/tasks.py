"""What is trained on: patients with windows of a signal, split by patient; a model and a loss for each kind of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lamina.engine.batch import Batch
from lamina.errors import LaminaError, RunError
from lamina.recipes.signals import median_beats
from lamina.signals import CGMSimulator, ECGSimulator, PulseSimulator
from lamina.signals.datasets import mimic_records, ohio_records, ptbxl_records
from lamina.signals.front_ends import bounded
from lamina.signals.prepared import PARTS, PatientRecord, part_of
from lamina.signals.signal_autoencoders import VAE, ConvAE, ResAE, SignalLoss, StackedAE, TransAE
from lamina.study.cells import StudySize

SIMULATED = "simulated"
WINDOW = 256
LEAST_PATIENTS = 5  # of a part
PROXY_SEED = 1_000_003  # between the patients of a seed and those of its proxy
GLUCOSE = (40.0, 400.0)  # mg/dL → 0 … 1
LOSS = SignalLoss(classification=0.1)  # beside the squared error of the reconstruction
BEATS = SignalLoss(classification=1.0)  # of median beats, which the classifier is for
PRETRAINING_PATIENTS = 4_000
SLICES = {"ecg": Path("ptbxl_slice/ptbxl_slice.npz"), "cgm": Path("cgm/weinstock_days.npz")}
"""Parts of PTB-XL and of Weinstock's days of glucose, in one folder; there the waves are simulated."""
MIX = {"NORM": 4.0, "MI": 1.0, "STTC": 1.0, "CD": 1.0, "HYP": 1.0}  # of simulated beats: half are normal
ARCHITECTURES: dict[str, tuple[Callable[..., nn.Module], int]] = {  # and how much wider than a convolution it is
    "stacked": (StackedAE, 8), "convolutional": (ConvAE, 1), "residual": (ResAE, 1), "transformer": (TransAE, 2), "vae": (VAE, 8),
}  # fmt: skip
_CHUNK = 512  # windows at a time when a model is judged


@dataclass(frozen=True, slots=True)
class Part:
    """Windows `x` (P, W, channels, samples) of P patients with W windows each, and a label (P,) for each patient."""

    x4: Tensor
    label: Tensor

    @property
    def patients(self) -> int:
        return len(self.label)

    @property
    def x(self) -> Tensor:
        """(P·W, channels, samples)"""
        return self.x4.flatten(0, 1)

    @property
    def y(self) -> Tensor:
        """(P·W,)"""
        return self.label.repeat_interleave(self.x4.shape[1])

    def take_patients(self, count: int) -> Part:
        """The first patients."""
        return Part(self.x4[:count], self.label[:count])

    def first_windows(self) -> Part:
        """The same patients with one window each."""
        return Part(self.x4[:, :1], self.label)

    def by_patient(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Windows (p, W, …) and labels (p, W) of these patients; a proxy may have fewer than were asked for."""
        chosen = chosen[chosen < self.patients]
        return self.x4[chosen], self.label[chosen][:, None].expand(-1, self.x4.shape[1])

    def batch(self, chosen: Tensor | None = None, cls: Tensor | None = None) -> Batch:
        """All windows of these patients, or of all; each patient is one contribution."""
        part = self if chosen is None else Part(self.x4[chosen], self.label[chosen])
        unit = torch.arange(part.patients).repeat_interleave(self.x4.shape[1])
        return Batch(part.x, part.y, unit=unit, cls=cls)

    def labels(self) -> NDArray[np.int64]:
        return self.label.numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Parts of one data set. `proxy` are simulated patients of another seed, who protect nobody and cost nothing."""

    train: Part
    held_out: Part
    test: Part
    proxy: Part
    classes: int
    loss: SignalLoss = LOSS

    def model(self, architecture: str, *, depth: int, activation: str, width: int) -> nn.Module:
        """An autoencoder for these windows; where there are classes, with a classifier of the code."""
        channels, samples = self.train.x4.shape[2:]
        if architecture not in ARCHITECTURES:
            problem = f"architecture {architecture!r} is not known"
            raise RunError("study.unknown-architecture", problem, f"choose from {', '.join(ARCHITECTURES)}")
        made, factor = ARCHITECTURES[architecture]
        return made(channels, samples, depth=depth, activation=activation, width=factor * width, classes=self.classes)

    def losses(self, output: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """One for each window: squared error of the reconstruction, cross entropy of the classifier, KL of the VAE."""
        return self.loss(output, y)

    def figures(self, model: nn.Module, part: Part) -> tuple[NDArray[np.float64], float]:
        """Scores of each patient for each class (the mean over windows), and the mean squared error."""
        outputs = [model(x) for x in part.x.split(_CHUNK)]
        error = torch.cat([output[0].square().flatten(1).mean(1) for output in outputs])
        scores = torch.cat([output[-1].softmax(1) for output in outputs]).view(part.patients, -1, self.classes)
        return scores.mean(1).double().numpy(), float(error.double().mean())

    def patient_losses(self, model: nn.Module, part: Part) -> NDArray[np.float64]:
        """The mean loss of each patient's windows."""
        chunks = zip(part.x.split(_CHUNK), part.y.split(_CHUNK), strict=True)
        found = torch.cat([self.losses(model(x), y) for x, y in chunks])
        return found.view(part.patients, -1).mean(1).double().numpy()


@lru_cache(maxsize=2)
def load_task(data: str, size: StudySize, source: str, seed: int, share: float) -> Task:
    """The parts of a data set, by patient: 70 % train, 15 % are held out for the attack, 15 % test.

    `seed` draws simulated patients anew, so that seeds differ in everything that is drawn.
    """
    if source == SIMULATED or (_has_slices(source) and data not in SLICES):
        everybody = simulated(data, size.patients, size.windows, seed, beats=size.beats)
        cuts = [0, round(0.7 * everybody.patients), round(0.85 * everybody.patients), everybody.patients]
        parts = [Part(everybody.x4[a:b], everybody.label[a:b]) for a, b in pairwise(cuts)]
    elif _has_slices(source):
        parts = _slice_parts(data, Path(source), size.windows, beats=size.beats)
    else:
        parts = recorded(data, Path(source), size.windows, size.patients)
    train, held_out, test = (part.take_patients(round(share * part.patients)) for part in parts)
    enough = max(64, size.passes // size.windows, PRETRAINING_PATIENTS if size.pretrain > 100 else 0)
    proxy = simulated(data, enough, size.windows, seed + PROXY_SEED, beats=size.beats)
    _refuse_other_channels(source, train.x4.shape[2:], proxy.x4.shape[2:])
    classes = int(max(part.label.max() for part in (*parts, proxy))) + 1
    loss = BEATS if size.beats and data == "ecg" else LOSS
    return Task(train=train, held_out=held_out, test=test, proxy=proxy, classes=classes, loss=loss)


def _has_slices(source: str) -> bool:
    return source != SIMULATED and all((Path(source) / path).is_file() for path in SLICES.values())


def _slice_parts(data: str, folder: Path, windows: int, *, beats: bool) -> list[Part]:
    """The slice of PTB-XL as median beats of each patient's first labelled record, or Weinstock's first days; parts by patient."""
    if windows > 1 or (data == "ecg" and not beats):
        problem = f"'{folder}' has one median beat or day of each patient, and the size asks for {windows} windows"
        raise RunError("study.other-channels", problem, "use --size full, or a folder of whole records")
    with np.load(folder / SLICES[data], allow_pickle=False) as held:
        rows, patient = np.arange(len(held["patient_id"])), held["patient_id"]
        if data == "ecg":
            rows = rows[(held["superclass"] >= 0).all(1) & (patient >= 0)]
            rows = rows[np.unique(patient[rows], return_index=True)[1]]
            starts, rhythm = [250 * (lead // 3) for lead in range(12)], held["leadII_uV"][rows] / 1e3
            x = _beat_rows(median_beats(held["x12_uV"][rows] / 1e3, rhythm=rhythm, starts=starts))
            label = torch.from_numpy(1 - held["superclass"][rows, 0].astype(np.int64))
        else:
            rows = rows[np.unique(patient, return_index=True)[1]]
            x, label = (
                _glucose(torch.from_numpy(held["x_mgdl"][rows, None, :])),
                torch.zeros(len(rows), dtype=torch.long),
            )
    mine = [torch.tensor([i for i, r in enumerate(rows) if part_of(str(patient[r])) == name]) for name in PARTS]
    return [Part(x[chosen].view(len(chosen), 1, *x.shape[1:]), label[chosen]) for chosen in mine]


def _beat_rows(beats: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(bounded(beats)).float()


def _glucose(mgdl: Tensor) -> Tensor:
    return ((mgdl[:, :, :WINDOW] - GLUCOSE[0]) / (GLUCOSE[1] - GLUCOSE[0])).clamp(0, 1)


def simulated(data: str, patients: int, windows: int, seed: int, *, beats: bool = False) -> Part:
    """Patients of a simulator, prepared as the document prepares its records; or their median beats."""
    if data == "ecg" and beats:
        drawn = ECGSimulator(mix=MIX).draw(patients=patients, seed=seed)
        found_beats = np.median(drawn.x.reshape(patients, -1, 12, 96), axis=1)[:, :, 8:88]
        rows = _beat_rows((found_beats - np.median(found_beats, axis=2, keepdims=True)).astype(np.float64))
        label = torch.from_numpy((drawn.label.reshape(patients, -1)[:, 0] > 0).astype(np.int64))
        return Part(rows[:, None].expand(-1, windows, -1, -1), label)
    samples = WINDOW + (WINDOW // 2) * (windows - 1)  # windows overlap by a half
    if data == "ecg":
        found = ECGSimulator(samples=samples).records(patients=patients, seed=seed, seconds=samples / 100)
    elif data == "waves":
        found = PulseSimulator(rate=125.0, seconds=samples / 125).records(patients=patients, seed=seed)
    elif data == "cgm":
        found = CGMSimulator(days=windows).draw(patients=patients, seed=seed)
    else:
        raise RunError("study.unknown-data", f"{data!r} is no data of the study", "choose ecg, cgm or waves")
    x = torch.from_numpy(found.x)
    if data == "cgm":
        return Part(_glucose(x).view(patients, windows, 1, WINDOW), torch.from_numpy(found.label[::windows].copy()))
    x = (x - x.mean(2, keepdim=True)) / x.std(2, keepdim=True).clamp(min=1e-6)  # of each lead of a record by itself
    return Part(x.unfold(2, WINDOW, WINDOW // 2).transpose(1, 2).contiguous(), torch.from_numpy(found.label))


RECORDS: dict[str, tuple[Callable[[Path], list[PatientRecord]], str]] = {  # what `--data` may hold, by kind of data
    "ecg": (ptbxl_records, "PTB-XL (ptbxl_database.csv, scp_statements.csv and the records they name)"),
    "cgm": (ohio_records, "OhioT1DM (ID-ws-training.xml)"),
    "waves": (
        partial(mimic_records, stream="ECG+ABP+PPG"),
        "MIMIC-III waveforms (pNNNNNN-YYYY-MM-DD-hh-mm.hea with ECG, ABP and PPG)",
    ),
}


def check_source(source: str, needed: Mapping[str, Sequence[str]]) -> None:
    """Refuse a folder that cannot be read, before anything is trained.

    `needed` has the tables and figures that need a kind of data; where it is empty, any kind will do.
    """
    if source == SIMULATED or _has_slices(source):
        return
    kinds = tuple(needed or RECORDS)
    if not Path(source).is_dir():
        remedy = f"give a folder of {' or '.join(RECORDS[data][1] for data in kinds)}"
        raise RunError("study.data-not-readable", f"--data is '{source}', which is not a folder", remedy)
    faults = {data: fault for data in kinds if (fault := _fault(data, Path(source)))}
    if not faults or (not needed and len(faults) < len(kinds)):
        return
    problem = f"--data '{source}' cannot be read: {'; '.join(f'as {data}, {faults[data]}' for data in faults)}"
    without = dict.fromkeys(name for data in faults for name in needed.get(data, ["--data"]))
    remedy = f"give a folder of {' or '.join(RECORDS[data][1] for data in faults)}; or leave out {', '.join(without)}"
    raise RunError("study.data-not-readable", problem, remedy)


def _fault(data: str, folder: Path) -> str:
    """Return the problem of the first records of a folder, or ""."""
    try:
        records = RECORDS[data][0](folder)
        first = next((x for record in records[:20] if len(x := record.windows())), None)
        if first is None:
            return "it holds no records with a window" if records else "it holds no records"
        _refuse_other_channels(str(folder), first.shape[1:], simulated(data, 1, 1, 0).x4.shape[2:])
    except LaminaError as error:
        return error.problem
    return ""


def _refuse_other_channels(source: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        problem = f"windows of '{source}' are {tuple(found)}, simulated ones {tuple(wanted)}"
        raise RunError("study.other-channels", problem, "use records with the channels that docs/study.md names")


def recorded(data: str, folder: Path, windows: int, most: int) -> list[Part]:
    """Train, validation and test patients of a folder, each with its first `windows` windows; at most `most` in all.

    Who has fewer windows is left out, so that everybody weighs the same. A patient's label is the first superclass of
    the first record that has one; where records have no labels all are 0, and no AUC can be had.
    """
    held: dict[str, tuple[str, list[NDArray[np.float32]], int | None]] = {}
    for record in RECORDS[data][0](folder):
        part, found, label = held.setdefault(record.patient, (record.part, [], None))
        if label is None and record.label is not None and record.label.any():
            held[record.patient] = (part, found, int(record.label.argmax()))
        if sum(map(len, found)) < windows:
            found.append(record.windows())
    whole = [(part, np.concatenate(x)[:windows], label or 0) for part, x, label in held.values()]
    whole = [each for each in whole if len(each[1]) == windows][:most]
    made = []
    for name in PARTS:
        mine = [(x, label) for part, x, label in whole if part == name]
        if len(mine) < LEAST_PATIENTS:
            problem = f"'{folder}' has {len(mine)} patients of part {name} with {windows} windows"
            remedy = f"give a folder with {LEAST_PATIENTS} or more in each part"
            raise RunError("study.too-few-patients", problem, remedy)
        made.append(Part(torch.from_numpy(np.stack([x for x, _ in mine])), torch.tensor([label for _, label in mine])))
    return made
