"""GKD's lambda: some steps learn from completions of the data. Their tokens, run, gradient and checks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from skylite.config.train import TrainConfig
from skylite.environments.single_turn import SingleTurn, Unscored
from skylite.environments.source import EVAL_STEP
from skylite.errors import DataError
from skylite.rollout.sources import SingleTurnSource
from skylite.run.metrics_file import read_metrics
from skylite.run.rollout_file import examples_of, read_rollouts
from skylite.trainer.step import train_step
from skylite.trainer.trainer import make_trainer
from skylite.types import Group
from tests.cases import flat_gradient, plain_model, policy_of, relative_difference
from tests.rows import groups_of, random_samples
from tests.small_run import settings
from tests.tiny_models import CHAT_TEMPLATE
from tests.unit.environment_cases import (
    ScriptedEngine,
    make_prompt,
    make_request,
    shared_tokenizer,
    to_text,
)
from tests.unit.peer_code import load_trl_gkd
from tests.unit.simulated_run import run_of
from tests.unit.test_gkd import base_of, logits_of

MIXED = {"name": "gkd", "teacher": "x", "offline_column": "reply"}
HALF = MIXED | {"offline_share": 0.5}


def config_of(share: float, **sections: Any) -> TrainConfig:
    return settings(algorithm=MIXED | {"offline_share": share}, **sections)


def test_the_seed_draws_the_share_of_the_steps() -> None:
    steps, none, every = range(1, 2001), settings(), config_of(1.0)
    configs = [config_of(0.3, seed=seed) for seed in (0, 0, 1)]
    drawn = [[config.is_offline(k) for k in steps] for config in configs]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(abs(sum(x) / 2000 - 0.3) < 0.03 for x in drawn)
    more = config_of(0.6, seed=0)
    assert all(more.is_offline(k) for k, is_offline in zip(steps, drawn[0], strict=True) if is_offline)
    assert not any(none.is_offline(k) for k in steps)
    assert all(every.is_offline(k) for k in steps)


def test_the_last_turn_is_learned_after_the_prompt_that_is_sampled_from() -> None:
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"},
             {"role": "user", "content": "And 2 + 2?"}]  # fmt: skip
    prompt = make_prompt(1, messages=turns, extra={"reply": " 4 "})
    engine = ScriptedEngine()

    def sample(share: float, step: int) -> Group:
        source = SingleTurn(config_of(share), shared_tokenizer(CHAT_TEMPLATE), Unscored())
        (group,) = asyncio.run(source.sample([prompt], make_request(engine, step, group_size=1)))
        return group

    ((offline,), (sampled,)) = (sample(share, 3).trajectories for share in (1.0, 1e-9))
    (call,), (peer,) = offline.calls, sampled.calls
    assert call.prompt_token_ids == peer.prompt_token_ids
    assert (to_text(call.completion_token_ids), call.text) == (" 4 <|im_end|>", " 4 ")
    assert call.sampling_logprobs == []
    assert call.adapter_version == peer.adapter_version
    assert len(engine.prompts) == 1
    assert sample(1.0, EVAL_STEP).trajectories[0].calls[0].text == "ok", "an evaluation samples"


def test_a_run_alternates_and_repeats_a_step_bit_for_bit(tmp_path: Path) -> None:
    algorithm = MIXED | {"offline_share": 0.5}
    run, engine, _ = run_of(tmp_path / "run", 0, 6, sample_s=0.0, train_s=0.0, algorithm=algorithm)
    drawn = [config_of(0.5, seed=TrainConfig().seed).is_offline(k) for k in range(1, 7)]
    assert 0 < sum(drawn) < 6
    for step, is_offline in enumerate(drawn, 1):
        calls = [c for g in read_rollouts(run.rollout_path(step)) for t in g.trajectories for c in t.calls]
        assert len(calls) == (2 if is_offline else 4)
        for call in calls:
            learned = [100 + call.prompt_token_ids[0], 5] if is_offline else [7]
            assert call.completion_token_ids == learned
    metrics = read_metrics(run.metrics_path)
    assert ["reward/mean" not in m for m in metrics] == drawn
    assert all("canary/verified" in m for m in metrics)
    assert len(engine.requests) == 2 * drawn.count(False)
    last = max(k for k, is_offline in enumerate(drawn, 1) if is_offline)
    path = run.rollout_path(last)
    before = path.read_bytes()
    path.unlink()
    run.trainer_step_path(last).unlink()
    run_of(tmp_path / "run", 0, last, first_step=last, sample_s=0.0, train_s=0.0, algorithm=algorithm)
    assert path.read_bytes() == before


@pytest.mark.parametrize("budget", [4096, 60], ids=["one pass", "many passes"])
def test_an_offline_step_has_the_gradient_of_trls_loss_and_no_other(
    budget: int, tiny_llama: Path, dist: Any
) -> None:
    """Rewards, and an importance that would leave out every token, are no part of it."""
    config = config_of(1.0, trainer={"tokens_per_micro_batch": budget}, importance={"off_policy_kl": 1e-9})
    rows = random_samples(0)
    groups = [
        replace(g, trajectories=tuple(
            replace(t, calls=(replace(t.calls[0], sampling_logprobs=[]),)) for t in g.trajectories
        ))
        for g in groups_of(rows)
    ]  # fmt: skip
    policy = policy_of(tiny_llama, config, dist)
    plain = plain_model(tiny_llama, policy, config)
    facts: dict[str, Any] = {}
    trainer = make_trainer(policy, config, dist)
    metrics = train_step(trainer, examples_of(groups), 1, facts)
    total, trl_loss = torch.zeros(()), load_trl_gkd()
    for row in rows:
        with base_of(plain):
            teacher: Tensor = logits_of(plain, row, row.prompt_token_ids, 1.0)
        logits = logits_of(plain, row, row.prompt_token_ids, 1.0)
        total = total + trl_loss(logits[None], teacher[None], None, 0.5, 1.0, "sum")
    count = sum(len(row.completion_token_ids) for row in rows)
    (total / count).backward()
    assert relative_difference(trainer.optimizer.grads, flat_gradient(plain, policy)) < 1e-5
    assert metrics["teacher/divergence"] == pytest.approx(total.item() / count, rel=1e-5)
    assert not [name for name in metrics if name.startswith(("mismatch/", "policy/", "groups/"))]
    assert facts == {}


def test_rows_without_a_completion_or_with_a_long_one_are_found_before_a_run(tiny_llama: Path) -> None:
    tokenizer, source = shared_tokenizer(CHAT_TEMPLATE), SingleTurnSource()
    rows = [make_prompt(n, extra={"reply": "x" * (10 * n)}) for n in (1, 2, 9)]
    limits = {"max_prompt_tokens": 60, "max_completion_tokens": 20}
    check = lambda config, train: source.check_prompts(tokenizer, config, tiny_llama, train, rows[:1])  # noqa: E731
    with pytest.raises(DataError, match=r"1 of 4 prompts have more than with algorithm.offline_column=reply"):
        check(config_of(0.5, rollout=limits), rows)
    filtered = config_of(0.5, rollout=limits, data={"filter_overlong_prompts": True})
    dropped, notes = check(filtered, rows)
    assert dropped == ["p9"]
    assert "1 of 3 training prompts" in notes[-1].text
    assert check(settings(rollout=limits), rows)[0] == []
    with pytest.raises(DataError, match=r"no text in the column 'reply' \(algorithm.offline_column\)"):
        check(filtered, [replace(rows[0], extra={"other": "x"})])


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"algorithm": {"offline_share": 0.5}}, "offline_share=0.5 has no effect with algorithm.name=grpo"),
        ({"algorithm": {"name": "gkd", "teacher": "x", "offline_share": 0.5}}, "set both, the share"),
        ({"algorithm": MIXED}, "offline_share=0 and algorithm.offline_column=reply: set both"),
        ({"algorithm": HALF | {"name": "opd"}}, "not go with algorithm.teacher_beta=none"),
        ({"algorithm": HALF | {"reward_weight": 1.0}}, "algorithm.reward_weight=1.0"),
        ({"algorithm": HALF | {"kl_coef": 0.1}}, "not go with algorithm.kl_coef=0.1"),
        ({"algorithm": HALF, "reward": {"prefill": "<x>"}}, "which reward.prefill=<x>"),
        ({"algorithm": HALF, "data": {"retire_after": 2}}, "data.retire_after=2"),
        ({"algorithm": HALF, "env": {"episode": "guess"}}, "env.episode=guess"),
    ],
)  # fmt: skip
def test_settings_without_a_sense_are_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        settings(**sections)
