"""Groups of episodes: each trajectory of a prompt, with its reward and its calls from the OpenAI server."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skylite.config.environment import EnvConfig
from skylite.config.train import TrainConfig
from skylite.engine.collect_groups import gather_or_cancel, request_seed
from skylite.environments.chat import METRIC, Endpoint, Task
from skylite.environments.episode_pool import EpisodeFailed, EpisodePool, EpisodeTooLong
from skylite.environments.openai_server import OpenAIServer
from skylite.environments.trajectory_log import Sampler, TrajectoryLog
from skylite.errors import RunFailed
from skylite.types import Group, Prompt, Trajectory

logger = logging.getLogger(__name__)
TRAJECTORY_SEEDS = 1 << 20
"""Distance between the seeds of two trajectories of a prompt."""
EVAL_STEP = -1
"""Takes the place of a step in the seeds of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the episodes of a step sample from."""

    model: str
    version: int
    engines: Sequence[Sampler]
    temperature: float


@dataclass(frozen=True, slots=True)
class Reward:
    """The parts of what an episode returned."""

    total: float
    components: dict[str, float]
    turns: tuple[float, ...] = ()


class GroupDropped(Exception):
    """An episode of the group failed, and env.on_error is drop."""


@dataclass(slots=True)
class Environment:
    """Runs the episodes of a run."""

    config: TrainConfig
    server: OpenAIServer
    pool: EpisodePool
    dropped: int = 0
    """Groups left out since the start, because an episode failed."""
    _slots: asyncio.Semaphore = field(init=False)
    _noted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.config.env.max_concurrent)

    async def sample(
        self,
        source: Source,
        prompts: Sequence[Prompt],
        *,
        step: int,
        first_index: int,
        group_size: int,
        on_group: Callable[[], None] = lambda: None,
    ) -> list[Group]:
        """One group a prompt, without the groups that env.on_error=drop leaves out.

        `step`, `first_index`: as for the seeds of one-turn requests. `on_group` is called at the end of each
        group. Raises RunFailed if all first groups of a step are left out.
        """

        async def one(prompt: Prompt, index: int) -> Group | None:
            group = await self._group(source, prompt, step, index, group_size)
            on_group()
            return group

        tasks = [asyncio.create_task(one(prompt, index)) for index, prompt in enumerate(prompts, first_index)]
        groups = [group for group in await gather_or_cancel(tasks) if group is not None]
        self.dropped += len(prompts) - len(groups)
        if not groups and first_index == 0:
            raise RunFailed(
                f"{_named(step).capitalize()} has no trajectories: an episode of each of its {len(prompts)} "
                "groups failed, and env.on_error=drop left them out.",
                f"Read {self.pool.log_path}.",
            )
        return groups

    async def _group(self, source: Source, prompt: Prompt, step: int, index: int, size: int) -> Group | None:
        seed = request_seed(self.config.seed, step, index)
        engine = source.engines[index % len(source.engines)]  # always the same: its prefix cache is reused
        tasks = [
            asyncio.create_task(self._trajectory(source, engine, prompt, seed + i * TRAJECTORY_SEEDS, i))
            for i in range(size)
        ]
        try:
            return Group(prompt=prompt, trajectories=tuple(await gather_or_cancel(tasks)))
        except GroupDropped as error:
            logger.warning(f"{_named(step)}: the group of prompt {prompt.id} is left out: {error}")
            return None

    async def _trajectory(
        self, source: Source, engine: Sampler, prompt: Prompt, seed: int, number: int
    ) -> Trajectory:
        log = TrajectoryLog(
            name=f"prompt {prompt.id}, trajectory {number}",
            model=source.model,
            version=source.version,
            engine=engine,
            seed=seed,
            temperature=source.temperature,
        )
        async with self._slots:
            value = await self._run(log, prompt)
        self._note(log)
        if not log.calls:
            if log.end == "stop":
                raise self._failed(log, "made no call of the model")
            raise self._failed(log, f"reached its limit ({log.end}) before its first reply")
        try:
            reward = read_reward(value, self.config.env, len(log.calls))
        except ValueError as error:
            raise self._failed(log, str(error)) from None
        return Trajectory(
            calls=tuple(answered.call for answered in log.calls),
            reward=reward.total,
            components=reward.components,
            turn_rewards=reward.turns,
            end=log.end,
        )

    async def _run(self, log: TrajectoryLog, prompt: Prompt) -> Any:
        """What the episode returned; env.limit_reward if a limit ended it first."""
        limits, key = self.config.env, self.server.open(log)
        endpoint = Endpoint(base_url=self.server.base_url, api_key=key, model=log.model)
        running = asyncio.ensure_future(
            self.pool.run(task_of(prompt, log.seed), endpoint, limits.timeout_s, log.engine.lost_s)
        )
        failed = asyncio.ensure_future(log.failed.wait())
        try:
            await asyncio.wait({running, failed}, return_when=asyncio.FIRST_COMPLETED)
            if log.failure is not None:
                raise log.failure
            return running.result()
        except EpisodeTooLong:
            log.end = "time"
            return limits.limit_reward
        except EpisodeFailed as error:
            if error.at_limit and log.end != "stop":  # the episode did not expect its limit
                return limits.limit_reward
            raise self._failed(log, str(error)) from None
        finally:
            self.server.close(key)
            failed.cancel()
            running.cancel()
            await asyncio.gather(running, failed, return_exceptions=True)

    def _failed(self, log: TrajectoryLog, reason: str) -> Exception:
        if self.config.env.on_error == "drop":
            return GroupDropped(f"the episode of {log.name} {reason}")
        return RunFailed(
            f"The episode of {log.name} {reason}.",
            f"Read {self.pool.log_path}, and correct the episode; env.on_error=drop leaves such groups out.",
        )

    def _note(self, log: TrajectoryLog) -> None:
        """Print once that requests asked for another sampling than the run's."""
        for name in sorted(log.notes - self._noted):
            self._noted.add(name)
            logger.warning(
                f"episodes ask for their own {name}; skylite samples with the run's (rollout.temperature, "
                "top_p, top_k), because the trainer must know the distribution"
            )


def _named(step: int) -> str:
    return "the evaluation" if step == EVAL_STEP else f"step {step}"


def task_of(prompt: Prompt, seed: int) -> Task:
    """The prompt as an episode sees it."""
    return Task(
        id=prompt.id,
        prompt=prompt.messages[-1]["content"],
        messages=[dict(m) for m in prompt.messages],
        answer=prompt.answer,
        columns=dict(prompt.extra),
        seed=seed,
    )


def read_reward(value: Any, config: EnvConfig, num_turns: int) -> Reward:
    """A number, named components (weighted by env.weights), or one number a turn. Raises ValueError."""
    if isinstance(value, dict):
        if not value:
            raise ValueError("returned no component of a reward")
        components = {name: _number(x) for name, x in value.items()}
        weights = {n: config.weights.get(n, 0.0 if n.startswith(METRIC) else 1.0) for n in components}
        return Reward(sum(weights[n] * x for n, x in components.items()), components)
    if isinstance(value, list):
        if len(value) != num_turns:
            raise ValueError(f"returned {len(value)} rewards for {num_turns} turns")
        turns = tuple(map(_number, value))
        return Reward(sum(turns), {}, turns)
    return Reward(_number(value), {})


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"returned {value!r}, which is no reward")
    return float(value)
