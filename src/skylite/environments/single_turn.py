"""One request a prompt: the engine samples its whole group, which the rewards score on arrival.

For ReMax a second request samples a greedy completion. Its reward becomes a component of the group's scores.

Consumes: prompts. Waits for: the tokenizer, the engines, the reward workers.
Produces: groups of one call a trajectory. Unblocks: the step's rollout file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from skylite.config.rollout import GREEDY
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer, encode_in_thread
from skylite.engine.interface import Sampling
from skylite.environments.judge import Judge
from skylite.environments.offline_source import Offline, with_completion
from skylite.environments.source import (
    EVAL_STEP,
    GroupRequest,
    OnGroup,
    gather_or_cancel,
    named_step,
    request_seed,
)
from skylite.environments.teacher_prompts import with_teacher_prompts
from skylite.errors import RunFailed
from skylite.types import Call, EncodedPrompt, Group, Prompt, Score, Trajectory

MAX_EVALUATED_AT_ONCE = 64
"""Requests in flight of an evaluation, which may have thousands of prompts."""


class Scorer(Protocol):
    """Scores completions: rewards/worker_pool.py, or a fake in tests."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """One score for each (prompt, completion text)."""


class Unscored:
    """Where the judge alone scores."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(0.0)] * len(items)


@dataclass(slots=True)
class SingleTurn:
    """Groups of one-turn trajectories."""

    config: TrainConfig
    tokenizer: ChatTokenizer
    scorer: Scorer
    judge: Judge | None = None
    _encoded: dict[str, EncodedPrompt] = field(default_factory=dict)
    """Conversations of evaluations, which repeat, by the text of their messages and the images."""

    async def sample(
        self, prompts: Sequence[Prompt], request: GroupRequest, on_group: OnGroup = lambda _: None
    ) -> list[Group]:
        """See RolloutSource. Raises DataError for a prompt over rollout.max_prompt_tokens.

        Raises RunFailed if the judge leaves out all first groups of a step.
        """
        if request.step != EVAL_STEP and self.config.is_offline(request.step):
            rows = [with_completion(p, self.config.algorithm.offline_column) for p in prompts]
            return await Offline(self.config, self.tokenizer, last_only=True).sample(rows, request, on_group)
        encoded = await self._encode(prompts, keep=request.step == EVAL_STEP)
        slots = asyncio.Semaphore(MAX_EVALUATED_AT_ONCE if request.step == EVAL_STEP else len(prompts))

        async def one(index: int, prompt: Prompt, ids: EncodedPrompt) -> Group | None:
            async with slots:
                group: Group | None = await self._group(request, index, prompt, ids)
                if group is not None and self.judge is not None:
                    group = await self.judge.judged(group, request)
                algorithm = self.config.algorithm
                if group is not None and algorithm.shows_teacher_more and request.step != EVAL_STEP:
                    group = await with_teacher_prompts(group, algorithm, self.tokenizer)
            on_group(group)
            return group

        numbered = enumerate(zip(prompts, encoded, strict=True), request.first_index)
        sampled = await gather_or_cancel([asyncio.create_task(one(i, p, ids)) for i, (p, ids) in numbered])
        groups = [group for group in sampled if group is not None]
        if prompts and not groups and request.first_index == 0:
            raise RunFailed(
                f"All {len(prompts)} groups of {named_step(request.step)} are left out: no reply of the "
                "judge has points (reward.judge.on_unparsed=drop).",
                "Read logs/judge.jsonl, and take a better judge, or raise reward.judge.max_tokens.",
            )
        return groups

    async def _encode(self, prompts: Sequence[Prompt], *, keep: bool) -> list[EncodedPrompt]:
        """The token ids of each prompt, kept for the next time if asked."""
        new = [p for p in prompts if _key(p) not in self._encoded]
        encoded = await encode_in_thread(self.tokenizer, new, self.config.rollout.max_prompt_tokens)
        by_text = {**self._encoded, **{_key(p): encoded[p.id] for p in new}}
        if keep:
            self._encoded = by_text
        return [by_text[_key(p)] for p in prompts]

    async def _group(
        self, request: GroupRequest, index: int, prompt: Prompt, encoded: EncodedPrompt
    ) -> Group:
        rollout = self.config.rollout
        sampling = Sampling(
            temperature=request.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_completion_tokens,
            stop_token_ids=self.tokenizer.stop_token_ids,
            stop=tuple(rollout.stop),
            seed=request_seed(self.config.seed, request.step, index),
        )
        asked = [(request.group_size, sampling)]
        if self.config.algorithm.needs_greedy and request.step != EVAL_STEP:
            asked.append((1, replace(sampling, temperature=0.0)))
        tokens = len(encoded.token_ids) + sum(n for n, _ in asked) * sampling.max_tokens
        with request.engine(tokens) as engine:
            sampled, *greedy = await gather_or_cancel(
                [
                    asyncio.create_task(engine.generate(request.model, encoded, n, how, request.version))
                    for n, how in asked
                ]
            )
        trajectories = await self._scored(prompt, sampled)
        for calls in greedy:  # scored alone: a reward may compare the completions of a batch
            (baseline,) = await self._scored(prompt, calls)
            shown = {GREEDY: baseline.train_reward}
            trajectories = [replace(t, components={**t.components, **shown}) for t in trajectories]
        return Group(prompt=prompt, trajectories=tuple(trajectories))

    async def _scored(self, prompt: Prompt, calls: Sequence[Call]) -> list[Trajectory]:
        scores = await self.scorer.score([(prompt, call.text) for call in calls])
        return [self._trajectory(call, score) for call, score in zip(calls, scores, strict=True)]

    def _trajectory(self, call: Call, score: Score) -> Trajectory:
        penalty = overlong_penalty(
            len(call.completion_token_ids),
            max_completion_tokens=self.config.rollout.max_completion_tokens,
            buffer_frac=self.config.algorithm.overlong_buffer_frac,
        )
        return Trajectory(
            calls=(call,),
            reward=score.reward,
            components=score.components,
            feedback=score.feedback,
            penalty=penalty,
        )


def _key(prompt: Prompt) -> str:
    return str((prompt.messages, *map(hash, prompt.images)))


def overlong_penalty(length: int, max_completion_tokens: int, buffer_frac: float) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    0 up to the last `buffer_frac` of `max_completion_tokens`, then linear down to -1.
    """
    buffer = buffer_frac * max_completion_tokens
    over = length - (max_completion_tokens - buffer)
    return -min(1.0, over / buffer) if buffer > 0 and over > 0 else 0.0
