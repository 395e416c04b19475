"""Every form of adapter that skylite trains: its settings of LoRA, and a published adapter of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from skylite.adapters.manifest import Canary
from skylite.config.train import RunConfig
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from skylite.trainer.publish_adapter import write_adapter
from tests.cases import optimizer_of, policy_of, train_rows
from tests.decisions import resolved
from tests.rows import random_samples
from tests.small_run import lone_rank, settings

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "alpha that is not a whole number": {"alpha": 12.5},
    "ranks": {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 8, "down_proj": 2}},
    "alphas": {"alpha_pattern": {"v_proj": 40, r"layers.0.mlp.*": 3.5}},
    "ranks and alphas": {
        "use_rslora": True,
        "rank_pattern": {"k_proj": 6, "gate_proj": 3},
        "alpha_pattern": {"k_proj": 30, "o_proj": 1},
    },
    "two modules": {"target_modules": ["q_proj", "v_proj"]},
    "one layer, by wildcard": {"target_modules": ["*.layers.1.*"]},
    "Megatron's names": {"target_modules": ["linear_qkv", "*.layers.0.*.linear_fc1"]},
    "embeddings": {"target_modules": ["embed_tokens", *ATTENTION], "rank_pattern": {"embed_tokens": 2}},
    "dropout": {"dropout": 0.3},
    "xavier": {"init": "xavier"},
    "normal": {"init": "normal"},
    "gaussian": {"init": "gaussian"},
    "orthogonal": {"init": "orthogonal"},
}
SEQUENCES = [list(range(20, 50)), list(range(90, 70, -1))]


def publish(name: str, model: Path, folder: Path, **lora: Any) -> tuple[Path, list[list[float]]]:
    """An adapter of that form after a step of training, and the trainer's logprobs [S][L - 1]."""
    config = settings(lora=FORMS[name] | lora)
    with lone_rank() as dist:
        policy = policy_of(model, config, dist)
        train_rows(policy, optimizer_of(policy, config), random_samples(0), 1, config, dist)
        logprobs = canary_logprobs(policy, SEQUENCES)
        base = base_canary_logprobs(policy, SEQUENCES)
    canary = Canary(sequences=SEQUENCES, policy_logprobs=logprobs, base_logprobs=base)
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(model, folder))
    return write_adapter(policy, run_config, 1, canary).path, logprobs


def difference(logprobs: list[list[float]], model: Any) -> float:
    """The largest distance, in nats, of a transformers model's logprobs of SEQUENCES."""
    gaps = []
    for ids, expected in zip(SEQUENCES, logprobs, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        got = torch.log_softmax(logits, dim=1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        gaps.append((got - torch.tensor(expected)).abs().max().item())
    return max(gaps)
