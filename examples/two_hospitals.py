# %% [markdown]
# # Two hospitals with signatures
#
# Two hospitals sign their patients' data for one corpus. A trainer admits only what carries a valid signature, trains, and an
# auditor verifies the ledger without the data.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from torch import nn

import lamina

folder = Path(tempfile.mkdtemp())
os.environ["LAMINA_PASSPHRASE"] = "correct horse battery"  # protects the key files of this tutorial


def command(line):
    """Run a command as in a terminal, and print what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "lamina", *line.split()], cwd=folder, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    return done.returncode


# %% [markdown]
# ## The owner's policy
# It states the classes of data, their ε over all runs, and how deep into the model each may reach.

# %%
policy_text = """
[corpus]
origin = "two-hospitals.example/ecg"
delta = 1e-5

[class.north]
population = 100
epsilon = 4.0
unit = "patient"

[class.south]
population = 100
epsilon = 2.0
unit = "patient"
profile = { top = 0.5 }
"""
(folder / "policy.toml").write_text(policy_text, encoding="utf-8")

# %% [markdown]
# ## Each hospital signs its folder
# A contribution is a folder with `payload.npz`. The signature covers the digest of the payload, the corpus, the class and the bound.

# %%
generator = np.random.default_rng(0)
for hospital in ("north", "south"):
    for number in range(60):
        patient = folder / hospital / f"{hospital}-{number:02d}"
        patient.mkdir(parents=True)
        y = np.full(3, number % 2)
        np.savez(patient / "payload.npz", x=generator.normal(size=(3, 12)) + y[:, None], y=y)
    assert command(f"keys new {hospital}.key") == 0
    assert command(f"attest policy.toml {hospital} --class {hospital} --key {hospital}.key") == 0
    assert command(f"keys add {hospital}.pub") == 0

# %% [markdown]
# ## The trainer admits
# A changed payload no longer matches its signature. The gate refuses it and says why; all others are admitted.

# %%
together = folder / "contributions"
together.mkdir()
for hospital in ("north", "south"):
    for patient in (folder / hospital).iterdir():
        if patient.is_dir():
            patient.rename(together / patient.name)
with open(together / "south-07" / "payload.npz", "ab") as file:
    file.write(b"changed after it was signed")
assert command("admit policy.toml contributions") == 1  # one contribution is refused

# %% [markdown]
# ## A run on both

# %%
policy = lamina.Policy.load(folder / "policy.toml")
corpus = lamina.Gate(policy, folder / "keys.json").admit(together, ledger=folder / "ledger.db")
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
plan = lamina.make_plan(lamina.LayerStack.from_model(model), policy, batch=40, steps=10)
loss = nn.CrossEntropyLoss(reduction="none")
run = lamina.Trainer(model, "auto", loss, corpus, plan, folder=folder / "run", ledger=folder / "ledger.db")
outcome = run.fit()
print(outcome.epsilon)

# %% [markdown]
# ## The auditor verifies
# This needs the ledger, but neither the data nor the model.

# %%
assert command("ledger verify ledger.db") == 0
assert command("spend ledger.db") == 0
