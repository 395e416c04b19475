"""The verbs in process, as a person writes a loop with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
LOOP = """
import json, sys
import numpy as np
import skylite
from skylite.errors import SkyliteError
from skylite.verbs import Datum

found = {"sentences": []}
def refused(call):
    try:
        call()
    except SkyliteError as error:
        found["sentences"].append(str(error))

with skylite.open_trainer(sys.argv[1], "first", rank=4, seed=2) as trainer:
    ids = trainer.encode("one text to learn")
    data = [Datum.of_text(ids, weights=[0, 0] + [1] * (len(ids) - 3))]
    found["losses"] = []
    for step in range(4):
        found["losses"].append(trainer.forward_backward(data).loss)
        trainer.optim_step(learning_rate=1e-2, eps=1e-8)
        if step == 1:
            trainer.save("kept")
    trainer.load("kept")
    found["again"] = trainer.forward_backward(data).loss
    trainer.optim_step(learning_rate=1e-2, eps=1e-8)
    found["then"] = trainer.forward(data).loss
    found["ids"], found["logprobs"] = ids, trainer.forward(data).logprobs[0].tolist()
    found["adapter"] = str(trainer.publish())
    refused(lambda: skylite.open_trainer(sys.argv[1], "second"))
    refused(lambda: trainer.forward(data, "ppo"))
    refused(lambda: trainer.forward(data, "gspo"))
    refused(lambda: trainer.forward(data, beta=1))
    refused(lambda: trainer.forward([Datum.of_text([1, 5000])]))
print(json.dumps(found))
"""


def run(folder: Path, *words: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_example_lowers_its_loss_and_publishes(tiny_llama: Path, tmp_path: Path):
    out = run(tmp_path, str(ROOT / "examples" / "custom_loop.py"), MODEL=str(tiny_llama))
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert losses[0] == 0.6931  # log 2
    assert losses == sorted(losses, reverse=True)
    assert (tmp_path / "runs/custom-loop/adapters/policy-v000001/adapter_config.json").is_file()


def test_verbs_of_a_notebook(tiny_llama: Path, tmp_path: Path):
    found = json.loads(run(tmp_path, "-c", LOOP, str(tiny_llama)).splitlines()[-1])
    losses = found["losses"]
    assert losses == sorted(losses, reverse=True)
    assert found["again"] == losses[2]  # the state is that after two updates
    assert found["then"] == losses[3]  # and so are its moments
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32), found["adapter"]
    ).eval()
    ids = torch.tensor([found["ids"]])
    with torch.no_grad():
        table = torch.log_softmax(model(ids[:, :-1]).logits[0].float(), 1)
    expected = table.gather(1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(torch.tensor(found["logprobs"]), expected, atol=1e-5)
    taken, no_advantages, no_loss, no_setting, no_token = found["sentences"]
    assert "Close it first" in taken
    assert "A datum has no logprobs" in no_advantages
    assert "'gspo' is not offered" in no_loss
    assert "cross_entropy has no setting beta" in no_setting
    assert "the token 5000" in no_token
