# %% [markdown]
# # Quickstart: a private model from arrays
#
# This tutorial trains a small classifier with differential privacy on simulated patients. It shows the plan before the run, the run,
# and the result. Nothing is downloaded.

# %%
import tempfile
from pathlib import Path

import torch
from torch import nn

import lamina

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Data
# 600 patients with two rows each. `unit` names the patient of each row, so that ε protects a patient with both rows.

# %%
patient = torch.arange(600).repeat_interleave(2)
y = torch.randint(0, 2, (600,))[patient]
x = torch.randn(1200, 12) + y[:, None]
corpus = lamina.Corpus(x, y, unit=patient, unit_name="patient")

# %% [markdown]
# ## Plan
# `make_private` chooses the noise for ε = 3 and prepares the model. It spends nothing. The plan lists the clip norm and the noise of
# each layer.

# %%
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 2))
engine, corpus, plan = lamina.make_private(model, corpus, epsilon=3.0, delta=1e-5, batch=64, epochs=6)
print(plan)

# %% [markdown]
# ## Run
# The optimiser `"auto"` derives its learning rate and schedule from the plan. The loss returns one number per example, because a mean
# over the batch cannot be clipped per patient. If the process dies, the same program resumes the run.

# %%
loss = nn.CrossEntropyLoss(reduction="none")
trainer = lamina.Trainer(model, "auto", loss, corpus, plan, engine=engine, folder=folder / "run")
outcome = trainer.fit()
print(outcome)

# %% [markdown]
# ## Result
# Evaluate on data that needs no protection. Here it is simulated.

# %%
public_y = torch.randint(0, 2, (1000,))
public_x = torch.randn(1000, 12) + public_y[:, None]
accuracy = float((model.eval()(public_x).argmax(1) == public_y).float().mean())
print(f"ε = {plan.epsilon(0):.2f} per patient; accuracy {accuracy:.2f}")
