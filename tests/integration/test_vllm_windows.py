"""Real vLLM sees one token more through Cohere2's window than transformers: only the rollouts show it."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import SyncFailed
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.policy import load_policy
from skylite.rollout.judge_rollouts import RolloutJudge
from skylite.run.files import write_json
from skylite.run.rollout_file import examples_of
from skylite.trainer.canary import base_canary_logprobs
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.step import train_step
from skylite.trainer.trainer import Trainer
from skylite.types import Group
from tests.decisions import resolved
from tests.engines import EngineServer, running_server
from tests.rows import Row, groups_of
from tests.small_run import lone_rank, settings
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.vllm
WINDOW = 64
PROMPTS = [[(7 * k * k + 3 * g) % 256 for k in range(length)] for g, length in enumerate((10, 40, 80, 120))]
CANARY = [prompt[:24] for prompt in PROMPTS[1:3]]
NOISE = 1e-6


def sample(server: EngineServer) -> list[Group]:
    """Four completions of 32 tokens for each prompt, at temperature 1."""

    def of(group: int) -> list[Row]:
        body = {
            "model": server.base, "prompt": PROMPTS[group], "n": 4, "max_tokens": 32, "temperature": 1.0,
            "seed": group, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        choices = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        return [
            Row(
                group=group,
                prompt_token_ids=PROMPTS[group],
                completion_token_ids=choice["token_ids"],
                sampling_logprobs=choice["logprobs"]["token_logprobs"],
                reward=float(choice["index"]),
            )
            for choice in choices
        ]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return groups_of([row for rows in pool.map(of, range(len(PROMPTS))) for row in rows])


def prompt_logprobs(server: EngineServer, ids: list[int]) -> list[float]:
    body = {"model": server.base, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    [choice] = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    rows = choice["prompt_logprobs"][1:]
    return [row[str(token)]["logprob"] for row, token in zip(rows, ids[1:], strict=True)]


def trained(model: Path, groups: list[Group]) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """The trainer's logprobs of the canary, and the step's gaps by depth."""
    own, facts = settings(), dict[str, Any]()
    with lone_rank() as dist:
        policy = load_policy(resolved(model, model.parent), own, dist)
        policy, _ = enable_shortcuts(policy, list(range(20, 40)))
        canary = base_canary_logprobs(policy, CANARY)
        optimizer = make_optimizer("policy", policy.lora, 1e-3, 1e9, own.optim)
        trainer = Trainer(config=own, dist=dist, policy=policy, optimizer=optimizer)
        train_step(trainer, examples_of(groups), 1, facts)
    return canary, facts["rollout_gaps"]["bins"]


def test_rollouts_show_where_a_window_differs(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "cohere2")
    with running_server(model) as server:
        groups = sample(server)
        of_engine = [prompt_logprobs(server, ids) for ids in CANARY]
    canary, bins = trained(model, groups)
    for row, other in zip(canary, of_engine, strict=True):
        assert row == pytest.approx(other, abs=5 * NOISE), "the canary shows nothing"
    judge = RolloutJudge("float32", 1.0, "stop")
    assert f"from a context of {WINDOW} tokens on" in judge.judge(1, bins, NOISE), bins
    with pytest.raises(SyncFailed, match=f"from a context of {WINDOW} tokens on"):
        judge.judge(2, bins, NOISE)

    longer = shutil.copytree(model, tmp_path / "longer")
    config = json.loads((longer / "config.json").read_text())
    write_json(longer / "config.json", config | {"sliding_window": WINDOW + 1})
    _, bins = trained(longer, groups)
    assert RolloutJudge("float32", 1.0, "stop").judge(1, bins, NOISE) == "", "with vLLM's window all agree"
    assert max(row["from"] for row in bins) >= 128
