"""Call the rewards of a run as its steps will: with right, wrong and empty completions, before it starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, RunFailed
from skylite.rewards.built_in import BUILT_IN
from skylite.rewards.right_completion import ANSWER, fill
from skylite.rewards.worker_pool import RewardPool
from skylite.types import Prompt, is_number

PROMPTS = 2
WRONG = ("", "I do not know.", "<think>", "12345")
"""Completions of a model that has learned nothing."""


def check_calls(
    rewards: Sequence[str],
    config: TrainConfig,
    train: Sequence[Prompt],
    programs: Mapping[str, str],
    template: str = "",
) -> None:
    """Raise ConfigError if a user's reward raises or gives no number. Not finite ones may be skipped
    (anomaly.action). `template`: the form of a right completion that `prepare` found.

    Called in a worker process, as in a run.
    """
    own = [spec for spec in rewards if spec not in BUILT_IN]
    if not own:
        return
    prompts = train[:PROMPTS]
    items = [
        (prompt, completion)
        for prompt in prompts
        for completion in (*WRONG, fill(template or ANSWER, prompt.answer))
    ]
    pool = RewardPool(
        own,
        timeout_s=config.reward.timeout_s,
        programs=programs,
        log_path=Path(os.devnull),  # a run writes nothing before it starts
        parameters=config.reward,
        prefill=config.reward.prefill,
    )
    try:
        scores = asyncio.run(pool.score(items))
    except RunFailed as error:
        raise ConfigError(f"The reward cannot be used: {error.what}", error.hint) from error
    finally:
        pool.close()
    if config.anomaly.action == "skip":
        return
    for (prompt, completion), score in zip(items, scores, strict=True):
        for name, value in score.components.items():
            if not is_number(value):
                raise ConfigError(
                    f"The reward {name} returned {value} for the completion {completion[:80]!r} of prompt "
                    f"{prompt.id}.",
                    "A reward must return a finite number for every completion, also an empty one.",
                )
