"""Where the groups of a run come from, as its settings say. Nothing else asks which it is.

rollout/sources.py has what each source checks, starts and samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from skylite.config.train import TrainConfig

SourceName = Literal["single-turn", "episodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """The source of a run's groups, and how long its sequences may get."""

    name: SourceName
    scored_by: str
    """What gives the rewards: a reward, or an environment."""
    scorers: Sequence[str]
    """Their specs. Empty: the reward that the data was prepared with."""
    weights: Sequence[float] = ()
    """Of `scorers`. Empty: 1 for each."""
    max_sequence_tokens: int
    """Longest sequence of a call: prompt and completion."""
    max_completion_tokens: int | None
    """Longest completion of any prompt. None: whatever the prompt leaves of a sequence."""
    limits: str
    """The settings with these limits and their values, and a verb."""
    shorter: str
    """The setting that makes trajectories shorter."""

    def completion_after(self, prompt_tokens: int) -> int:
        """The most tokens after a prompt of this length: of one call, or of an episode's calls together."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return max(1, self.max_sequence_tokens - prompt_tokens)


def source_of(config: TrainConfig) -> SourceFacts:
    """The source that the settings choose."""
    rollout, env = config.rollout, config.env
    if env.episode:
        return SourceFacts(
            name="episodes",
            scored_by="environment",
            scorers=[env.episode],
            max_sequence_tokens=env.max_tokens,
            max_completion_tokens=None,
            limits=f"env.max_tokens={env.max_tokens} allows",
            shorter="env.max_tokens",
        )
    return SourceFacts(
        name="single-turn",
        scored_by="reward",
        scorers=config.reward.functions,
        weights=config.reward.weights,
        max_sequence_tokens=rollout.max_prompt_tokens + rollout.max_completion_tokens,
        max_completion_tokens=rollout.max_completion_tokens,
        limits=f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and "
        f"rollout.max_completion_tokens={rollout.max_completion_tokens} allow",
        shorter="rollout.max_completion_tokens",
    )
