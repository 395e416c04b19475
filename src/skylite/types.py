"""What flows through a run: prompts, the engine's samples, trajectories, groups. No torch: parent and trainer both import it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FLOAT32_MAX = 3.4028234663852886e38


def is_number(score: float) -> bool:
    """Whether the score is finite as float32, the type the trainer computes with."""
    return abs(score) <= FLOAT32_MAX


class Message(TypedDict):
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a prepared parquet file."""

    id: str
    """Unique in its data set, e.g. "gsm8k/train/17". Metrics and errors name it."""
    messages: list[Message]
    """System text, few-shot examples as user/assistant pairs, and the question as the last user message."""
    answer: str
    """Reference answer in the form the reward expects. `skylite prepare` checked that it scores 1.0."""
    source: str
    """Data set name, e.g. "gsm8k" or "gsm8k-synthetic"."""
    difficulty: int = 0
    """Number of reasoning steps; 0: unknown."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the reward needs besides the answer, e.g. a reasoning-gym entry. JSON in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of the engine. Token ids are kept as vLLM returned them and never tokenised again."""

    prompt_token_ids: list[int]
    """[P] what the engine was given."""
    completion_token_ids: list[int]
    """[C] what it sampled, with the end-of-turn token where that was sampled."""
    rollout_logprobs: list[float]
    """[C] natural log, under the sampling policy at the sampling temperature."""
    finish_reason: Literal["stop", "length"] = "stop"
    adapter_version: int = 0
    text: str = ""
    """The completion as text. Empty in the trainer, which reads token ids only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The calls of one episode, in order of their turns, and what they earned together. One turn is one call."""

    samples: tuple[Sample, ...]
    """At least one. A later call's prompt may contain an earlier call's tokens."""
    reward: float
    """The weighted sum of `components`. NaN or infinity is allowed: the trainer's anomaly rules judge it."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Reward function name -> its own unweighted score, in the order of reward.functions."""
    penalty: float = 0.0
    """At most 0. Added for training, left out of every score that is shown."""

    @property
    def first_score(self) -> float:
        """The first reward function's own score, 1.0 for a right answer. Accuracies are means of it."""
        return next(iter(self.components.values()), self.reward)

    @property
    def train_reward(self) -> float:
        """What the trainer learns from."""
        return self.reward + self.penalty

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all calls."""
        return sum(len(s.completion_token_ids) for s in self.samples)

    @property
    def is_truncated(self) -> bool:
        """Whether the last call stopped at the token limit."""
        return self.samples[-1].finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`group_size` trajectories of one prompt. Advantages compare them with each other."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    """[G]"""

    @property
    def is_zero_std(self) -> bool:
        """Whether all trajectories earned the same, compared as float32 like in the trainer: then there is no gradient.

        False where a reward is not a finite number: such a group must reach the anomaly rules and not be resampled.
        """
        rewards = [t.train_reward for t in self.trajectories]
        return all(map(is_number, rewards)) and len(set(array("f", rewards))) == 1


@dataclass(frozen=True, slots=True)
class Score:
    """What a completion earned."""

    reward: float
    """The weighted sum of `components`; may be NaN or infinite."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Reward function name -> unweighted score, in the order of reward.functions."""
