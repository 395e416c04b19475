"""tinker-cookbook's own minimal loops, but for address, model and data: `cookbook_loops.py URL KEY MODEL`.

The data sets are on the hub, so this makes rows of their form. No model of the cookbook's list is this tiny,
so it names the plain renderer; and the reward is one that a random model sometimes gets.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import datasets

URL, os.environ["TINKER_API_KEY"], MODEL = sys.argv[1:4]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "one", "dog", "ran", "over", "two", "hills"]


def load_dataset(name: str, *_: Any) -> Any:
    """24 rows of HuggingFaceH4/no_robots or openai/gsm8k."""
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    chats = [
        {"messages": [{"role": "user", "content": text(4)}, {"role": "assistant", "content": text(5)}]}
        for _ in range(24)
    ]
    problems = [{"question": f"What is {i} plus {i}?", "answer": f"#### {2 * i}"} for i in range(24)]
    rows = chats if "no_robots" in name else problems
    return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})


datasets.load_dataset = load_dataset

from tinker_cookbook import model_info  # noqa: E402 -- the loops take what stands there when they are imported

model_info.get_recommended_renderer_name = lambda _: "role_colon"

from tinker_cookbook.recipes import rl_loop, sl_loop  # noqa: E402

SHARED = {"base_url": URL, "model_name": MODEL, "lora_rank": 8, "save_every": 1}
sl_loop.main(
    sl_loop.Config(**SHARED, log_path="sl", batch_size=8, max_length=128, max_steps=3, learning_rate=5e-3)
)
rl_loop.get_reward = lambda response, _: float(len(response) % 2)
rl_loop.main(
    rl_loop.Config(
        **SHARED, log_path="rl", batch_size=4, group_size=4, max_tokens=12, max_steps=2,
        loss_fn="importance_sampling",
    )
)  # fmt: skip
