"""`torchrun -m tests.integration.ranks MODEL OUT CASE...`: writes the gradient of each case to OUT."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from skylite.model.process_group import Dist, process_group, set_threads
from skylite.trainer.critic import make_critic
from skylite.types import ImageTokens, TrainingExample
from tests.cases import ALGORITHMS, IMPORTANCE, optimizer_of, policy_of, train_rows
from tests.rows import Row, random_call_trees, random_episodes, random_samples
from tests.small_run import settings

CASES = {
    **{n: {"algorithm": a} for n, a in ALGORITHMS.items()},
    **{n: {"importance": i} for n, i in IMPORTANCE.items()},
}
CASES["ppo"] = {"algorithm": {"name": "ppo", "gae_lambda": 0.9}, "critic": {"rank": 3, "max_grad_norm": 1e9}}
# The plan would copy the folder x; here the base teaches.
CASES["gkd"] = {"algorithm": {"name": "gkd", "teacher": "x", "reward_weight": 0.5}}
CASES["two updates"] = {"algorithm": {"updates_per_step": 2}}
REPLICATED = "replicated base"
CASES[REPLICATED] = {**CASES["grpo"], "trainer": {"tokens_per_micro_batch": 60, "replicate_base": True}}
SEVERAL_TURNS = "several turns: "
CASES |= {f"{SEVERAL_TURNS}{n}": CASES[n] for n in ("grpo", "gspo", "kl_cov", "otb", "ppo", "reinforce++")}
CALL_TREES = "call tree "
CASES |= {f"{CALL_TREES}{seed}": CASES["grpo"] for seed in range(4)}
CASES |= {
    f"{CALL_TREES}{seed}, at most {budget} tokens": {
        **CASES["grpo"],
        "trainer": {"tokens_per_micro_batch": budget},
    }
    for seed in range(4)
    for budget in (4096, 16)
}
"""All calls in one micro-batch, and cuts between the calls of a trajectory. Other cases cut at 60 tokens."""


def rows_of(name: str) -> list[Row]:
    """The trajectories of a case."""
    if name.startswith(CALL_TREES):
        return random_call_trees(int(name.removeprefix(CALL_TREES).partition(",")[0]))
    return random_episodes(0) if name.startswith(SEVERAL_TURNS) else random_samples(0)


def shares_an_image(dist: Dist) -> int:
    """1 if two examples with one image have one object for it on this rank."""
    file = b"a picture"
    examples = [replace(one_example(), images=(ImageTokens(0, 1, file),)) for _ in range(2)]
    first, second = dist.share(examples if dist.is_main else None)
    assert first.images[0].data == file
    return int(first.images[0].data is second.images[0].data)


def one_example() -> TrainingExample:
    return TrainingExample(
        token_ids=np.array([1, 2], np.int32), weights=np.array([0, 1], np.float32), group=0
    )


def main(model: Path, out: Path, names: list[str]) -> None:
    set_threads(1)
    with process_group("cpu") as dist:
        found = {}
        for name in names:
            config = settings(**{"trainer": {"tokens_per_micro_batch": 60}, **CASES[name]})
            policy = policy_of(model, config, dist)
            optimizer, critic = optimizer_of(policy, config), None
            if config.algorithm.uses_critic:
                critic = make_critic(policy, config, dist)
                critic.head.weight.data.fill_(0.01)
            samples = [replace(s) for s in rows_of(name)]
            metrics = train_rows(policy, optimizer, samples, 1, config, dist, critic)
            found[name] = {
                "grads": optimizer.grads,
                "metrics": metrics,
                "sharded": any(isinstance(p, DTensor) for p in policy.model.parameters()),
                "critic": None if critic is None else critic.optimizer.grads,
            }
        images = dist.all_reduce_sum_(torch.tensor([shares_an_image(dist)]))
        if dist.is_main:
            torch.save({"cases": found, "images": int(images)}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
