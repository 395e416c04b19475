"""An environment of verifiers: TextArena's game GuessTheNumber-v0, which needs no download.

It has the form of verifiers' own environment `textarena`, whose word games need the word lists of nltk.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import textarena as ta
import verifiers.v1 as vf

GAME = "GuessTheNumber-v0"
SYSTEM = "You play a game. Answer with one number in square brackets, e.g. [7], and nothing else."


class NumberData(vf.TaskData):
    """A game."""

    seed: int
    """Gives the secret number."""


class NumberTask(vf.Task[NumberData, vf.State, vf.TaskConfig]):
    """Its rewards come from the game, in NumberEnv."""

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        """Replies of the player."""
        return float(trace.num_turns)


class NumberConfig(vf.TasksetConfig):
    """Its settings."""

    games: int = 256
    """Number of tasks."""


class NumberTaskset(vf.Taskset[NumberTask, NumberConfig]):
    """Games with the seeds 0, 1, ..."""

    def load(self) -> Iterator[NumberTask]:
        for seed in range(self.config.games):
            prompt = _observation(_new_game(seed))
            data = NumberData(name=f"{GAME}#{seed}", prompt=prompt, system_prompt=SYSTEM, seed=seed)
            yield NumberTask(data, self.config.task)


class NumberEnvConfig(vf.EnvConfig):
    """The agents: one."""

    player: vf.AgentConfig = vf.AgentConfig()


class NumberEnv(vf.Env[NumberEnvConfig]):
    """Plays the game as the player's user."""

    async def run(self, task: NumberTask, agents: Any) -> None:
        game, won, closeness = _new_game(task.data.seed), 0.0, 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                game.step(segment.last_reply)
                if game.state.done:
                    closeness = float((game.state.rewards or {}).get(0, 0.0))
                    won = float("Congratulations" in str(game.state.game_info[0]["reason"]))
                    break
                segment = await interaction.turn(_observation(game).splitlines()[-1].strip())
        interaction.trace.record_reward("won", won, 1.0)
        interaction.trace.record_reward("closeness", closeness, 0.5)


def _new_game(seed: int) -> Any:
    random.seed(seed)
    game = ta.make(env_id=f"{GAME}-train")
    game.reset(num_players=1)
    return game


def _observation(game: Any) -> str:
    return str(game.get_observation()[1]).split("[GAME]")[-1].strip()


__all__ = ["NumberEnv", "NumberTaskset"]
