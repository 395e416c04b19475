"""Where the groups of a run come from, as its settings say. Nothing else asks which it is.

rollout/sources.py has what each source checks, starts and samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from skylite.config.train import TrainConfig

SourceName = Literal["single-turn", "episodes", "offline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """The source of a run's groups, and how long its sequences may get."""

    name: SourceName
    rows: str
    """What the data holds."""
    step: str
    """What a step takes."""
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
    both = rollout.max_prompt_tokens + rollout.max_completion_tokens
    limits = (
        f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and "
        f"rollout.max_completion_tokens={rollout.max_completion_tokens} allow"
    )
    if config.algorithm.source != "rollouts":  # it samples nothing, so no engine starts
        return SourceFacts(
            name="offline",
            rows=config.algorithm.source,
            step=f"{rollout.prompts_per_step} {config.algorithm.source}",
            scored_by="learned from",
            scorers=[config.algorithm.source],
            max_sequence_tokens=both,
            max_completion_tokens=None,
            limits=limits,
            shorter="rollout.max_completion_tokens",
        )
    if env.episode:
        return SourceFacts(
            name="episodes",
            rows="prompts",
            step=f"{rollout.prompts_per_step} prompts x {rollout.group_size} episodes",
            scored_by="environment",
            scorers=[env.episode],
            max_sequence_tokens=env.max_tokens,
            max_completion_tokens=None,
            limits=f"env.max_tokens={env.max_tokens} allows",
            shorter="env.max_tokens",
        )
    return SourceFacts(
        name="single-turn",
        rows="prompts",
        step=f"{rollout.prompts_per_step} prompts x {rollout.group_size} completions",
        scored_by="reward",
        scorers=config.reward.functions,
        weights=config.reward.weights if isinstance(config.reward.weights, list) else (),
        max_sequence_tokens=both,
        max_completion_tokens=rollout.max_completion_tokens,
        limits=limits,
        shorter="rollout.max_completion_tokens",
    )
