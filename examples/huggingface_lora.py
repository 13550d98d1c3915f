# %% [markdown]
# # Text classification with LoRA
#
# This tutorial fine-tunes a small BERT with a LoRA adapter on the notes of patients. Model and tokenizer are made here, so that the
# page runs offline; with files of your own, use `from_pretrained` with a local folder.

# %%
import tempfile
from pathlib import Path

import peft
import tokenizers
import torch
import transformers

import lamina
from lamina.integrations.tokens import LabelLoss, token_corpus

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Texts
# Three notes per patient. The label says whether the patient improved.

# %%
good, bad = ["stable", "calm", "better"], ["pain", "fever", "worse"]
texts, labels, patient = [], [], []
for number in range(120):
    for note in range(3):
        words = [*(good if number % 2 else bad)[note:], "patient", "seen", "today"]
        texts.append(" ".join(words))
        labels.append(number % 2)
        patient.append(number)

# %% [markdown]
# ## Tokenizer
# Do not train a tokenizer on private texts: its vocabulary would reveal them. Here the vocabulary is public.

# %%
vocabulary = {word: k for k, word in enumerate(["[PAD]", "[UNK]", *good, *bad, "patient", "seen", "today"])}
words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")

# %% [markdown]
# ## Model and adapter

# %%
config = transformers.BertConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
)
base = transformers.BertForSequenceClassification(config)
adapter = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
model = peft.get_peft_model(base, adapter)

# %% [markdown]
# ## The private run
# `length` is public: choose it without looking at the texts. ε protects a patient with all notes. The learning rate is not tuned on
# the private texts.

# %%
corpus = token_corpus(
    [tokenizer(text)["input_ids"] for text in texts], length=8, pad=0, labels=labels, unit=patient, unit_name="patient"
)
engine, corpus, plan = lamina.make_private(model, corpus, epsilon=8.0, delta=1e-5, batch=24, steps=20)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
run = lamina.Trainer(model, optimizer, LabelLoss(), corpus, plan, engine=engine, folder=folder / "run")
print(run.fit())

# %% [markdown]
# ## Use it
# The model is a PEFT model as before. `save_pretrained` writes the adapter alone.

# %%
model.eval()
batch = tokenizer(["better today", "fever today"], return_tensors="pt", padding=True)
with torch.no_grad():
    print(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(1))
model.save_pretrained(folder / "adapter")
print(sorted(path.name for path in (folder / "adapter").iterdir()))
