"""Settings, run folders and a single rank for tests."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.config.train import RunConfig, TrainConfig
from skylite.model.process_group import Dist, process_group
from skylite.run.run_dir import RunDir
from tests.decisions import resolved
from tests.rows import Row, write_samples


def settings(**sections: Any) -> TrainConfig:
    """A small configuration, with `sections` merged into it."""
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


def make_run(root: Path, model: Path, config: TrainConfig, steps: dict[int, list[Row]]) -> RunDir:
    """A run directory as the parent makes it for the trainer, with the rollouts of `steps`."""
    run = RunDir(root)
    for folder in (run.rollouts, run.trainer_steps, run.checkpoints, run.logs, run.default_adapters):
        folder.mkdir(parents=True)
    run_config = RunConfig(
        skylite_version="test", config=config, resolved=resolved(model, run.default_adapters)
    )
    run.config_path.write_text(run_config.model_dump_json(), encoding="utf-8")
    run.canary_path.write_text(
        json.dumps({"sequences": [list(range(20, 40)), list(range(60, 75))], "longest_prompt_tokens": 20}),
        encoding="utf-8",
    )
    for step, samples in steps.items():
        write_samples(run.rollout_path(step), samples)
    return run


@contextmanager
def lone_rank() -> Iterator[Dist]:
    """A process group of one rank, with torchrun's environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, str(value))
        try:
            with process_group("cpu") as dist:
                yield dist
        finally:  # a failed test would leave the group to the next one
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
