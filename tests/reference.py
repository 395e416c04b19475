"""GRPO as plainly as it can be written: one process, one sample at a time, no packing, no tricks. And helpers of the trainer's tests."""

from __future__ import annotations

import json
import math
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from skylite.config import GrpoConfig, Resolved, RunConfig, TrainConfig
from skylite.run.rollout_file import ROLLOUT_SCHEMA, TrainSample
from skylite.run.run_dir import RunDir
from skylite.training.dist import Dist, process_group

VOCAB = 256


def reference_advantages(samples: Sequence[TrainSample], config: GrpoConfig) -> list[float]:
    """One number a sample, with the standard library alone."""
    advantages = []
    for sample in samples:
        rewards = [s.reward for s in samples if s.group == sample.group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        advantages.append((sample.reward - mean) / (std + 1e-6 if config.normalize_std else 1.0))
    return advantages


def reference_logprobs(model: Any, sample: TrainSample, temperature: float) -> torch.Tensor:
    """[C] through the whole log softmax of a forward pass of this sample alone."""
    ids = sample.prompt_token_ids + sample.completion_token_ids
    logits = model(input_ids=torch.tensor([ids])).logits[0].float() / temperature
    first = len(sample.prompt_token_ids)
    return torch.stack([torch.log_softmax(logits[t - 1], dim=0)[ids[t]] for t in range(first, len(ids))])


def reference_loss(model: Any, samples: Sequence[TrainSample], config: TrainConfig, old: Sequence[torch.Tensor] | None) -> torch.Tensor:
    """The loss of one mini-batch. `old`: logprobs before the first update; None: this is the first."""
    grpo, total = config.grpo, 0.0
    num_tokens = sum(len(s.completion_token_ids) for s in samples)
    for index, (sample, advantage) in enumerate(zip(samples, reference_advantages(samples, grpo), strict=True)):
        policy = reference_logprobs(model, sample, config.rollout.temperature)
        before = policy.detach() if old is None else old[index]
        ratio = torch.exp(policy - before)
        clipped = torch.clamp(ratio, 1 - grpo.clip_eps_low, 1 + grpo.clip_eps_high)
        weight = torch.exp(before - torch.tensor(sample.rollout_logprobs))
        weight = torch.ones_like(weight) if grpo.importance_cap is None else torch.clamp(weight, max=grpo.importance_cap)
        token_losses = -weight * torch.minimum(ratio * advantage, clipped * advantage)
        if grpo.kl_coef > 0:
            with torch.no_grad(), model.disable_adapter():
                ref = reference_logprobs(model, sample, config.rollout.temperature)
            token_losses = token_losses + grpo.kl_coef * (torch.exp(ref - policy) - (ref - policy) - 1)
        total = total + token_losses.sum()
    return total / num_tokens


def random_samples(seed: int, num_groups: int = 4, group_size: int = 4, shared: int = 12) -> list[TrainSample]:
    """Groups with a shared prefix, prompts of several lengths, and completions some of which begin alike or are equal."""
    rng = random.Random(seed)
    tokens = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
    prefix, samples = tokens(shared), []
    for group in range(num_groups):
        prompt, opening = prefix + tokens(rng.randrange(2, 9)), tokens(2)
        for index in range(group_size):
            completion = (opening if index % 2 else []) + tokens(rng.randrange(1, 9))
            if index == 3:
                completion = samples[-1].completion_token_ids
            logprobs = [-5.0 + rng.uniform(-2, 2) for _ in completion]
            reward = float(index == group % group_size) if group != 1 else 1.0
            samples.append(
                TrainSample(
                    group=group,
                    prompt_token_ids=prompt,
                    completion_token_ids=completion,
                    rollout_logprobs=logprobs,
                    reward=reward,
                    truncated=False,
                )
            )
    return samples


def settings(**sections: dict[str, Any]) -> TrainConfig:
    """A small configuration; sections are merged over it."""
    tree: dict[str, Any] = {
        "num_steps": 3,
        "lora": {"rank": 4, "alpha": 8},
        "rollout": {"prompts_per_step": 4, "group_size": 4},
        "optim": {"lr": 1e-3, "max_grad_norm": 1e9},
        "trainer": {"num_threads": 1},
    }
    for name, values in sections.items():
        tree[name] = values if not isinstance(values, dict) else {**tree.get(name, {}), **values}
    return TrainConfig.model_validate(tree)


def resolved(model: Path, sync: Path) -> Resolved:
    return Resolved(model_path=str(model), model_fingerprint="f", dtype="float32", device="cpu", lora_sync_path=str(sync))


def make_run(root: Path, model: Path, config: TrainConfig, steps: dict[int, list[TrainSample]]) -> RunDir:
    """A run directory as the parent would leave it for the trainer, with these rollouts already there."""
    run = RunDir(root)
    for folder in (run.rollouts, run.updates, run.checkpoints, run.logs, run.default_adapters):
        folder.mkdir(parents=True)
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(model, run.default_adapters))
    run.config_path.write_text(run_config.model_dump_json(), encoding="utf-8")
    run.canary_path.write_text(json.dumps({"sequences": [list(range(20, 40)), list(range(60, 75))]}), encoding="utf-8")
    for step, samples in steps.items():
        write_samples(run.rollout_path(step), samples)
    return run


def write_samples(path: Path, samples: Sequence[TrainSample]) -> None:
    rows = [
        {
            "group": s.group,
            "prompt_id": f"test/{s.group}",
            "prompt_token_ids": s.prompt_token_ids,
            "completion_token_ids": s.completion_token_ids,
            "rollout_logprobs": s.rollout_logprobs,
            "reward": s.reward,
            "finish_reason": "stop",
            "adapter_version": 0,
            "question": "",
            "completion": "",
            "answer": "",
        }
        for s in samples
    ]
    temporary = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA), temporary)
    temporary.rename(path)


@contextmanager
def lone_rank() -> Iterator[Dist]:
    """A process group of one, as torchrun would describe it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, str(value))
        with process_group("cpu") as dist:
            yield dist
