# %% [markdown]
# # An autoencoder for ECG
#
# This tutorial pre-trains a residual autoencoder on simulated 12-lead ECG, which costs no privacy, and then trains it privately on
# the windows of patients. The [tutorial on PTB-XL](../tutorial-ptbxl.md) does the same with real recordings.

# %%
import tempfile
from pathlib import Path

import numpy as np
import torch

import lamina
from lamina.ledger.reader import LedgerReader
from lamina.signals import LEADS, ECGSimulator, ResAE, Signal, SignalLoss, ecg_windows

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Recordings
# A recording is filtered, scaled per lead, and cut into windows of 256 samples. All windows of a patient are one contribution. Here
# the "private" patients are simulated, too, with another seed.


# %%
def windows(patients, seed):
    """Windows, labels of five classes, and the patient of each window."""
    made = ECGSimulator().records(patients=patients, seed=seed)
    found = [ecg_windows(Signal(x=each, rate=100, channels=LEADS)) for each in made.x]
    owner = np.repeat(np.arange(len(found)), [len(each) for each in found])
    return np.concatenate(found), np.eye(5, dtype=np.float32)[made.label[owner]], owner


public_x, public_y, _ = windows(24, seed=1)
x, y, patient = windows(48, seed=2)
print(x.shape)

# %% [markdown]
# ## Learn from simulated patients first
# Use some thousand steps in earnest.

# %%
model = ResAE(classes=5)
proxy = torch.from_numpy(public_x), torch.from_numpy(public_y)
losses = lamina.pretrain(model, SignalLoss(), *proxy, proxy="simulated: ECG", steps=10)
print(f"{losses[0]:.3f} -> {losses[-1]:.3f}")

# %% [markdown]
# ## The private run
# `examples_per_unit` bounds the work per patient and does not change ε. `microbatches` bounds the memory.

# %%
corpus = lamina.Corpus(x, y, unit=patient, unit_name="patient", examples_per_unit=2)
engine, corpus, plan = lamina.make_private(model, corpus, epsilon=8.0, delta=1e-3, batch=12, steps=4)
run = lamina.Trainer(model, "auto", SignalLoss(), corpus, plan, engine=engine, folder=folder / "run", microbatches=2)
print(run.fit())

# %% [markdown]
# ## Evidence
# The run wrote a signed ledger. The certificate states ε per patient, computed from it.

# %%
with LedgerReader.read_only(folder / "run" / "ledger.db") as ledger:
    certificate = lamina.certify(folder / "run", ledger)
print(certificate)
