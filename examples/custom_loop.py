# %% [markdown]
# # A loop of your own
#
# The trainer's verbs in this process: DPO on one pair, from nothing to an adapter.
# [Write your own loop](../docs/how-to/write-your-own-loop.md) says what else there is. The script
# `custom_loop.py` and the notebook `custom_loop.ipynb` hold the same code.

# %%
import os

import torch

import skylite
from skylite.verbs import Datum

MODEL = os.environ.get("MODEL", "smollm2-135m")

# %% [markdown]
# A policy on the base, with a folder for its logs and adapters. A process holds one trainer: `close` ends it.

# %%
trainer = skylite.open_trainer(MODEL, "runs/custom-loop", rank=8)

# %% [markdown]
# One question with a good and a bad reply, and the logprobs of both before training. The first token of a
# reply is predicted by the last one of the question.

# %%
prompt = "Question: What is 7 + 5?\nAnswer:"
start = len(trainer.encode(prompt)) - 1
pair = [Datum.of_text(trainer.encode(prompt + reply)) for reply in (" 12", " 75")]
before = [logprobs[start:].sum() for logprobs in trainer.forward(pair).logprobs]

# %% [markdown]
# The loss is a function of the data and their logprobs, which want a gradient.


# %%
def dpo(data: list[Datum], logprobs: list[torch.Tensor]) -> torch.Tensor:
    good, bad = (x[start:].sum() - float(old) for x, old in zip(logprobs, before, strict=True))
    return -torch.nn.functional.logsigmoid(0.1 * (good - bad))


# %%
for step in range(5):
    scored = trainer.forward_backward(pair, dpo)
    norm = trainer.optim_step(learning_rate=1e-3)
    print(f"step {step + 1}: loss {scored.loss:.4f}, gradient norm {norm:.3f}")

# %% [markdown]
# A PEFT folder, for vLLM, `skylite serve` and `skylite export`, too.

# %%
print(f"adapter: {trainer.publish()}")
trainer.close()
