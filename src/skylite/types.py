"""The data that flows: prompts, completions, rollouts. No torch here; both sides of the process border import it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FLOAT32_MAX = 3.4028234663852886e38


def is_number(score: float) -> bool:
    """Whether it is finite as float32, which is what the trainer computes with."""
    return abs(score) <= FLOAT32_MAX


class Message(TypedDict):
    """One chat turn."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a prepared parquet file."""

    id: str
    """Unique in its data set, e.g. "gsm8k/train/17"; metrics and errors name it."""
    messages: list[Message]
    """Chat turns: system text, worked examples as user/assistant pairs, the question (a user turn) last."""
    answer: str
    """Ground truth in the form the reward function expects; `skylite prepare` has checked that it scores 1.0."""
    source: str
    """Data set name, e.g. "gsm8k" or "gsm8k-synthetic"."""
    difficulty: int = 0
    """Number of reasoning steps, 0 where unknown."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the reward needs besides the answer (a reasoning-gym entry, say); JSON in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What vLLM sampled. Token ids are kept as returned and never re-tokenised."""

    token_ids: list[int]
    """[C] the end-of-turn token included when it was sampled."""
    logprobs: list[float]
    """[C] of the sampling policy, natural log, at the sampling temperature."""
    text: str
    finish_reason: Literal["stop", "length"]
    adapter_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt, one completion of it and what it earned."""

    prompt: Prompt
    prompt_token_ids: list[int]
    """[P]"""
    completion: Completion
    reward: float
    """What the reward function gave. It may be NaN or infinite: the trainer's guards judge it."""
    penalty: float = 0.0
    """<= 0; added to the reward for training, left out of every score that is shown."""

    @property
    def train_reward(self) -> float:
        """What is learned from."""
        return self.reward + self.penalty


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """`group_size` rollouts of one prompt: the unit advantages are computed over."""

    rollouts: tuple[Rollout, ...]
    """[G]"""

    @property
    def is_zero_std(self) -> bool:
        """Whether all earned the same, as float32, which the trainer compares: such a group has no gradient.

        False where a reward is no number: the group must come before the guards, and not be replaced by another.
        """
        rewards = [r.train_reward for r in self.rollouts]
        return all(map(is_number, rewards)) and len(set(array("f", rewards))) == 1
