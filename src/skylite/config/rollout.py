"""Settings of prompts, sampling and rewards."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from skylite.config.base_section import Section


class DataConfig(Section):
    """The prompts."""

    path: str = "data/gsm8k"
    """Folder that `skylite prepare` made, with train.parquet, validation.parquet and test.parquet."""
    difficulty: list[int] = []
    """Train and evaluate only on prompts of these difficulties (reasoning steps). Empty: all."""


class RolloutConfig(Section):
    """Sampling from vLLM."""

    prompts_per_step: int = Field(8, ge=1)
    """Distinct prompts per step."""
    group_size: int = Field(8, ge=1)
    """Completions per prompt. Most algorithms compare completions within a group, which needs at least 2."""
    temperature: float = Field(1.0, gt=0, le=5)
    """Sampling temperature. The trainer divides its logits by the same value."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. 1: off. The importance weights correct for the tokens that it excludes."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens only. 0: all tokens."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt in tokens. A longer one stops the run with an error that names the row."""
    max_completion_tokens: int = Field(256, ge=1)
    """Longest completion in tokens. A completion that reaches it counts as truncated."""
    max_staleness: int = Field(0, ge=0, le=1)
    """0: on-policy; sampling and training take turns. 1: sample step k + 1 while step k trains, from an
    adapter one version older; use it if trainer and vLLM do not share their cores or GPU."""


class RewardConfig(Section):
    """Scoring completions."""

    functions: list[str] = []
    """gsm8k, math, format, reasoning-gym, or your own as FILE.py:function. The reward is their weighted sum.
    The first one decides what counts as right. Empty: the reward chosen at `skylite prepare`."""
    weights: list[float] = []
    """Weight of each function; may be negative. Empty: 1 for each."""
    num_workers: int = Field(1, ge=1)
    """Processes that compute rewards. Raise it if the reward is slow."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds to score all completions of a step. A reward that takes longer ends the run."""

    @model_validator(mode="after")
    def check_weights(self) -> Self:
        twice = sorted({spec for spec in self.functions if self.functions.count(spec) > 1})
        if twice:
            raise ValueError(
                f"reward.functions names {twice[0]} twice; name it once, with the sum of its weights."
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} numbers for the {len(self.functions)} names in "
                "reward.functions; give one for each, or none at all."
            )
        return self
