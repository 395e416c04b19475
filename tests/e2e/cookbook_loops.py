"""tinker-cookbook's own loops, but for address, model, data and sizes: `cookbook_loops.py URL KEY MODEL`.

The data sets are on the hub, so this makes rows of their form. No model of the cookbook's list is this tiny,
so it names the plain renderer; and the reward of rl_loop is one that a random model sometimes gets. It notes
every pass and update that a loop asks for in NAME/passes.json, and gives each policy the seed 7.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import tinker

URL, os.environ["TINKER_API_KEY"], MODEL = sys.argv[1:4]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "one", "dog", "ran", "over", "two", "hills"]


def load_dataset(name: str, *_: Any, split: str | None = None) -> Any:
    """24 rows of HuggingFaceH4/no_robots, openai/gsm8k, zwhe99/DeepMath-103K or Anthropic/hh-rlhf."""
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    def row(i: int) -> dict[str, Any]:
        if "no_robots" in name:
            turns = [("user", text(4)), ("assistant", text(5))]
            return {"messages": [{"role": role, "content": words} for role, words in turns]}
        if "hh-rlhf" in name:
            prompt = f"\n\nHuman: {text(4)}\n\nAssistant: "
            return {"chosen": prompt + text(4), "rejected": prompt + text(3)}
        return {"question": f"What is {i} plus {i}?", "answer": f"#### {2 * i}"}

    rows = datasets.Dataset.from_list([row(i) for i in range(24)])
    found = datasets.DatasetDict({"train": rows, "test": rows.select(range(2))})
    return found if split is None else found[split]


datasets.load_dataset = load_dataset
STEPS: list[dict[str, Any]] = []
RESULTS: list[Any] = []
_pass = tinker.TrainingClient._run_fwd_bwd
_update = tinker.TrainingClient.optim_step
_create = tinker.ServiceClient.create_lora_training_client


def noted_pass(self: Any, requests: Any, loss: str, config: Any, *, forward_only: bool) -> Any:
    result = _pass(self, requests, loss, config, forward_only=forward_only)
    if not forward_only:
        data = [
            {name: list(value.data) for name, value in datum.loss_fn_inputs.items()}
            | {"ids": datum.model_input.to_ints()}
            for request in requests
            for datum in request.data
        ]
        STEPS.append({"loss": loss, "data": data})
        RESULTS.append(result)
    return result


def noted_update(self: Any, params: Any) -> Any:
    STEPS.append({"adam": params.model_dump()})
    return _update(self, params)


def note(name: str) -> None:
    """Write what has been asked for since the last call."""
    for step, result in zip([s for s in STEPS if "loss" in s], RESULTS, strict=True):
        found = result.result()
        step["sum"] = found.metrics["loss:sum"]
        step["logprobs"] = [out["logprobs"].tolist() for out in found.loss_fn_outputs]
    Path(name, "passes.json").write_text(json.dumps(STEPS))
    STEPS.clear()
    RESULTS.clear()


tinker.TrainingClient._run_fwd_bwd = noted_pass
tinker.TrainingClient.optim_step = noted_update
tinker.ServiceClient.create_lora_training_client = lambda *words, **named: _create(*words, seed=7, **named)

from tinker_cookbook import model_info  # noqa: E402 -- the loops take what stands there when they are imported

model_info.get_recommended_renderer_name = lambda _: "role_colon"

from tinker_cookbook.recipes import rl_loop, sl_loop  # noqa: E402
from tinker_cookbook.recipes.distillation import on_policy_distillation  # noqa: E402
from tinker_cookbook.recipes.preference.dpo import train as dpo  # noqa: E402

SERVED = {"base_url": URL, "model_name": MODEL}
RECIPE = {**SERVED, "renderer_name": "role_colon", "max_steps": 2}
sl_loop.main(
    sl_loop.Config(
        **SERVED, log_path="sl", lora_rank=8, save_every=1, batch_size=8, max_length=128, max_steps=3,
        learning_rate=5e-3,
    )
)  # fmt: skip
note("sl")
TEACHER = json.loads(Path("sl", "checkpoints.jsonl").read_text().splitlines()[-1])["sampler_path"]
rl_loop.get_reward = lambda response, _: float(len(response) % 2)
rl_loop.main(
    rl_loop.Config(
        **SERVED, log_path="rl", lora_rank=8, save_every=1, batch_size=4, group_size=4, max_tokens=12,
        max_steps=2, loss_fn="importance_sampling",
    )
)  # fmt: skip
note("rl")
asyncio.run(
    on_policy_distillation.cli_main(
        on_policy_distillation.CLIConfig(
            **RECIPE, teacher_model=MODEL, teacher_checkpoint=TEACHER, log_path="distillation", lora_rank=8,
            group_size=2, groups_per_batch=2, max_tokens=12, learning_rate=1e-3,
        )
    )
)  # fmt: skip
note("distillation")
dpo.cli_main(
    dpo.CLIConfig(**RECIPE, log_path="dpo", dataset="hhh", batch_size=4, max_length=128, learning_rate=1e-3)
)
note("dpo")
