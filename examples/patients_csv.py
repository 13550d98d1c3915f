# %% [markdown]
# # Patients in a CSV file
#
# A hospital has one CSV file with several visits of each patient. This tutorial trains on it, records ε in a ledger, and runs again
# to show that the ledger adds up both runs.

# %%
import tempfile
import warnings
from pathlib import Path

import numpy as np
from torch import nn

import lamina

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The file
# Replace this cell by your own file. Each row is a visit; `patient` says whose.

# %%
generator = np.random.default_rng(0)
lines = ["age,pressure,glucose,patient,readmitted"]
for number in range(400):
    ill = number % 2
    for _ in range(1 + number % 3):
        age, pressure, glucose = generator.normal(size=3) + ill
        lines.append(f"{age:.3f},{pressure:.3f},{glucose:.3f},P{number:03d},{ill}")
(folder / "patients.csv").write_text("\n".join(lines), encoding="utf-8")

# %% [markdown]
# ## The corpus
# All columns except the label and the patient are features. `origin` names these data, so that every run on them is added up in one
# ledger, even if rows are added later.

# %%
corpus = lamina.Corpus.of_csv(
    folder / "patients.csv", y="readmitted", unit="patient", origin="clinic.example/readmission"
)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
engine, corpus, plan = lamina.make_private(model, corpus, epsilon=2.0, delta=1e-5, batch=64, epochs=4)
loss = nn.CrossEntropyLoss(reduction="none")
first = lamina.Trainer(model, "auto", loss, corpus, plan, engine=engine, folder=folder / "runs" / "first").fit()
print(first.epsilon, first.total)

# %% [markdown]
# ## A second run
# The second run is on the same people. `make_private` warns, and `total` states the ε of both runs together, computed from the
# signed ledger `runs/clinic.example-readmission.ledger.db`.

# %%
again = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
with warnings.catch_warnings(record=True) as noted:
    warnings.simplefilter("always")
    engine, corpus, plan = lamina.make_private(again, corpus, epsilon=2.0, delta=1e-5, batch=64, epochs=4)
print(*(each.message for each in noted), sep="\n")
second = lamina.Trainer(again, "auto", loss, corpus, plan, engine=engine, folder=folder / "runs" / "second").fit()
(one,), (both,) = second.epsilon.values(), second.total.values()
print(f"this run: ε = {one:.2f}; both runs: ε = {both:.2f}")
