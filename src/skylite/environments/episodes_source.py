"""Groups of episodes: each trajectory of a prompt, with its reward and its calls from the OpenAI server.

`episodes_running` starts what they need: the server and the process that runs the episodes.

Consumes: prompts. Waits for: the episodes, which call the server, which asks the engines.
Produces: groups of as many calls as each episode made. Unblocks: the step's rollout file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skylite.config.rollout import EnvConfig, weight_of
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.environments.chat import Endpoint, Task
from skylite.environments.chat_request import ApiError
from skylite.environments.episode_pool import (
    EpisodeFailed,
    EpisodePool,
    EpisodeTooLong,
    running_episodes,
)
from skylite.environments.judge import Judge
from skylite.environments.openai_server import OpenAIServer
from skylite.environments.parse_reply import tool_format
from skylite.environments.renderer import Renderer
from skylite.environments.source import (
    EVAL_STEP,
    GroupRequest,
    OnGroup,
    Sampler,
    gather_or_cancel,
    named_step,
    request_seed,
)
from skylite.environments.teacher_prompts import contexts_of, taught, teacher_chat
from skylite.environments.trajectory_log import AnsweredRequest, TrajectoryLog
from skylite.errors import RunFailed
from skylite.processes.child import Supervisor
from skylite.processes.private_folders import temporary_folder
from skylite.types import Group, Prompt, Score, Trajectory
from skylite.user_functions import split_feedback

logger = logging.getLogger(__name__)
TRAJECTORY_SEEDS = 1 << 20
"""Distance between the seeds of two trajectories of a prompt."""


class GroupDropped(Exception):
    """An episode of the group failed, and env.on_error is drop."""


@dataclass(slots=True)
class Episodes:
    """Groups of episodes."""

    config: TrainConfig
    server: OpenAIServer
    pool: EpisodePool
    tokenizer: ChatTokenizer
    judge: Judge | None = None
    _slots: asyncio.Semaphore = field(init=False)
    _noted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.config.env.max_concurrent)

    async def sample(
        self, prompts: Sequence[Prompt], request: GroupRequest, on_group: OnGroup = lambda _: None
    ) -> list[Group]:
        """See RolloutSource. Raises RunFailed if all first groups of a step are left out."""

        async def one(prompt: Prompt, index: int) -> Group | None:
            group = await self._group(request, prompt, index)
            on_group(group)
            return group

        numbered = enumerate(prompts, request.first_index)
        tasks = [asyncio.create_task(one(prompt, index)) for index, prompt in numbered]
        groups = [group for group in await gather_or_cancel(tasks) if group is not None]
        if not groups and request.first_index == 0:
            raise RunFailed(
                f"{named_step(request.step).capitalize()} has no trajectories: an episode of each of its "
                f"{len(prompts)} groups failed, or the judge gave no points, and env.on_error=drop or "
                "reward.judge.on_unparsed=drop left them out.",
                f"Read {self.pool.log_path}.",
            )
        return groups

    async def _group(self, request: GroupRequest, prompt: Prompt, index: int) -> Group | None:
        seed = request_seed(self.config.seed, request.step, index)
        try:
            with request.engine(request.group_size * self.config.env.max_tokens) as engine:
                seeds = [seed + i * TRAJECTORY_SEEDS for i in range(request.group_size)]
                trajectories = (self._trajectory(request, engine, prompt, s, i) for i, s in enumerate(seeds))
                sampled = await gather_or_cancel([asyncio.create_task(t) for t in trajectories])
            played = Group(prompt=prompt, trajectories=tuple(t for t, _ in sampled))
            group = played if self.judge is None else await self.judge.judged(played, request)
            if group is None or not self.config.algorithm.shows_teacher_more or request.step == EVAL_STEP:
                return group
            return await self._with_teacher_prompts(group, [first for _, first in sampled])
        except GroupDropped as error:
            logger.warning(
                f"{named_step(request.step)}: the group of prompt {prompt.id} is left out: {error}"
            )
            return None

    async def _with_teacher_prompts(self, group: Group, firsts: Sequence[AnsweredRequest]) -> Group:
        """The group, each first request rendered again with what its teacher sees besides."""
        algorithm = self.config.algorithm
        contexts = await contexts_of(group, algorithm, self.tokenizer)

        async def prompt(first: AnsweredRequest, context: str) -> Sequence[int]:
            messages = teacher_chat(first.messages, context, algorithm)
            arguments = {**self.config.data.template_args, **first.arguments}
            try:
                return (await self.server.renderer.prompt(messages, first.tools, arguments)).ids
            except ApiError as error:
                what = f"The teacher's prompt for {group.prompt.id} cannot be written: {error}"
                raise RunFailed(what, "Correct the chat template, or use algorithm.name=opd.") from None

        pairs = zip(firsts, contexts, strict=True)
        rendered = [asyncio.create_task(prompt(*pair)) for pair in pairs if pair[1]]
        ids = iter(await gather_or_cancel(rendered))
        return taught(group, [next(ids) if context else () for context in contexts])

    async def _trajectory(
        self, request: GroupRequest, engine: Sampler, prompt: Prompt, seed: int, number: int
    ) -> tuple[Trajectory, AnsweredRequest]:
        """The trajectory and its first call."""
        log = TrajectoryLog(
            name=f"prompt {prompt.id}, trajectory {number}",
            model=request.model,
            version=request.version,
            engine=engine,
            seed=seed,
            temperature=request.temperature,
        )
        async with self._slots:
            value = await self._run(log, prompt)
        self._note(log)
        if not log.calls:
            if log.end == "stop":
                raise self._failed(log, "made no call of the model")
            raise self._failed(log, f"reached its limit ({log.end}) before its first reply")
        try:
            score = read_reward(value, self.config.env, len(log.calls))
        except ValueError as error:
            raise self._failed(log, str(error)) from None
        trajectory = Trajectory(
            calls=tuple(answered.call for answered in log.calls),
            reward=score.reward,
            components=score.components,
            feedback=score.feedback,
            turn_rewards=score.turns,
            end=log.end,
        )
        return trajectory, log.calls[0]

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


def read_reward(value: Any, config: EnvConfig, num_turns: int) -> Score:
    """A number, named components (weighted by env.weights), or one number a turn. Raises ValueError."""
    if isinstance(value, dict):
        numbers, feedback = split_feedback(value)
        if not numbers:
            raise ValueError("returned no component of a reward")
        components = {name: _number(x) for name, x in numbers.items()}
        reward = sum(weight_of(n, config.weights) * x for n, x in components.items())
        return Score(reward, components, feedback=feedback)
    if isinstance(value, list):
        if len(value) != num_turns:
            raise ValueError(f"returned {len(value)} rewards for {num_turns} turns")
        turns = tuple(map(_number, value))
        return Score(sum(turns), turns=turns)
    return Score(_number(value))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"returned {value!r}, which is no reward")
    return float(value)


@contextlib.asynccontextmanager
async def episodes_running(
    config: TrainConfig,
    tokenizer: ChatTokenizer,
    model_path: Path,
    programs: Mapping[str, str],
    logs: Path,
    supervisor: Supervisor,
    judge: Judge | None = None,
) -> AsyncIterator[Episodes]:
    """The source of env.episode.

    Args:
        tokenizer: the model's; the caller closes it afterwards.
        programs: FILE.py:function -> sha256 that the user allowed.

    Raises SkyliteError subclasses.
    """
    spec, settings = config.env.episode, config.env
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder())  # its sockets are for this user only
        renderer = Renderer(tokenizer.run, model_path)
        facts = await renderer.facts(config.data.template_args)
        server = OpenAIServer(
            config=config,
            renderer=renderer,
            stop_token_ids=tokenizer.stop_token_ids,
            stops=facts.stops,
            tool_format=tool_format(facts.template)
            if settings.tool_format == "auto"
            else settings.tool_format,
            socket_path=folder / "openai.sock",
        )
        await stack.enter_async_context(server.serving())
        pool = await stack.enter_async_context(
            running_episodes(spec, programs.get(spec), folder, logs, supervisor)
        )
        yield Episodes(config, server, pool, tokenizer, judge)
