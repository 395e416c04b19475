"""A loop of your own around the trainer's verbs: DPO on one pair, in this process.

python examples/custom_loop.py [MODEL]
"""

import sys

import torch

import skylite
from skylite.verbs import Datum

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
with skylite.open_trainer(MODEL, "runs/custom-loop", rank=8) as trainer:
    prompt = "Question: What is 7 + 5?\nAnswer:"
    start = len(trainer.encode(prompt)) - 1  # the place that predicts the reply's first token
    pair = [Datum.of_text(trainer.encode(prompt + reply)) for reply in (" 12", " 75")]
    before = [logprobs[start:].sum() for logprobs in trainer.forward(pair).logprobs]

    def dpo(data: list[Datum], logprobs: list[torch.Tensor]) -> torch.Tensor:
        good, bad = (x[start:].sum() - float(old) for x, old in zip(logprobs, before, strict=True))
        return -torch.nn.functional.logsigmoid(0.1 * (good - bad))

    for step in range(5):
        scored = trainer.forward_backward(pair, dpo)
        norm = trainer.optim_step(learning_rate=1e-3)
        print(f"step {step + 1}: loss {scored.loss:.4f}, gradient norm {norm:.3f}")
    print(f"adapter: {trainer.publish()}")
