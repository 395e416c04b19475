"""Settings of environments: episodes of several turns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from skylite.config.base_section import WHAT, Flag, Section


class EnvConfig(Section):
    """Episodes of several turns. Without `episode`, a trajectory is one completion."""

    episode: Annotated[str, Flag("--env", WHAT, default="one turn")] = ""
    """Episodes of several turns: guess, calculator, reasoning-gym, FILE.py:function,
    `command:PROGRAM ARGUMENTS` or `verifiers:NAME`. Empty: one turn, scored by reward.functions."""
    max_turns: int = Field(16, ge=1)
    """Calls of the model in one trajectory. A further call ends it."""
    max_tokens: int = Field(4096, ge=2)
    """Longest sequence of a call: prompt and reply. A longer prompt ends the trajectory."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds for an episode. Then its processes are killed, and the trajectory ends."""
    limit_reward: float = 0.0
    """Reward of a trajectory that a limit ended before its episode returned one."""
    on_error: Literal["stop", "drop"] = "stop"
    """If an episode raises: stop the run, or leave its group out of the step and count it."""
    max_concurrent: int = Field(64, ge=1)
    """Episodes that run at the same time, each in its own process."""
    history: Literal["sampled", "template"] = "sampled"
    """sampled: a later call's prompt keeps the tokens that were sampled. template: the chat template writes
    the history again, as a plain server would, which may drop reasoning; such calls share fewer tokens."""
    tool_format: Literal["auto", "hermes", "qwen-xml", "glm", "mistral", "llama", "gemma", "harmony"] = "auto"
    """How the model writes tool calls. auto: what its chat template shows."""
    weights: dict[str, float] = {}
    """Weight of each named component that an episode returns. Names that are not here count 1, and those that
    begin with metric/ count 0."""

    def check_fits(self, max_prompt_tokens: int, overlong_buffer_frac: float) -> None:
        """Raise ValueError if other settings do not go with an environment."""
        if not self.episode:
            return
        if overlong_buffer_frac > 0:
            raise ValueError(
                f"algorithm.overlong_buffer_frac={overlong_buffer_frac:g} punishes a long completion, and an "
                "episode has several (env.episode); set algorithm.overlong_buffer_frac=0 and let the "
                "episode's reward punish length."
            )
        if self.max_tokens <= max_prompt_tokens:
            raise ValueError(
                f"env.max_tokens={self.max_tokens} leaves no room for a reply to a prompt of "
                f"rollout.max_prompt_tokens={max_prompt_tokens} tokens; raise env.max_tokens."
            )
