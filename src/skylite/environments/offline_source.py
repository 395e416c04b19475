"""Groups from prepared rows: chats to learn, or pairs of a better and a worse reply. Nothing is sampled.

A row of prompts with a completion is a chat, too (algorithm.offline_column).
A chat is a group of one trajectory, with a call for each reply of the assistant. A pair is a group of two
trajectories of one call: the chosen reply, with reward 1, and the rejected one, with reward 0.

Consumes: prepared rows. Waits for: the chat template. Produces: groups. Unblocks: the step's rollout file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import PROMPTS_PER_CALL, ChatTokenizer
from skylite.data.chat_tokenizer_in_sandbox import Job
from skylite.environments.source import GroupRequest, OnGroup
from skylite.environments.teacher_prompts import column_text
from skylite.errors import DataError
from skylite.progress_reporting import long_work
from skylite.types import Call, Group, Message, Prompt, Trajectory
from skylite.untrusted_text import plain

CHOSEN, REJECTED = "chosen", "rejected"
"""Names of the replies in a pair's `Prompt.extra`."""


@dataclass(frozen=True, slots=True)
class Offline:
    """The rows of the steps, rendered with the model's chat template."""

    config: TrainConfig
    tokenizer: ChatTokenizer
    last_only: bool = False
    """Of a chat, too, only the last reply is learned: see `with_completion`."""

    async def sample(
        self, prompts: Sequence[Prompt], request: GroupRequest, on_group: OnGroup = lambda _: None
    ) -> list[Group]:
        """See RolloutSource."""
        rendered = await asyncio.to_thread(self.render, prompts)
        groups = []
        for prompt, trajectories in zip(prompts, rendered, strict=True):
            groups.append(_group(prompt, trajectories, request.version))
            on_group(groups[-1])
        return groups

    def render(self, prompts: Sequence[Prompt]) -> list[list[list[Call]]]:
        """[rows][trajectories][replies as the model would sample them].

        Raises DataError for a row whose replies cannot be found.
        """
        jobs = [[self._job(prompt, chat) for chat in _chats(prompt)] for prompt in prompts]
        results = self.tokenizer.run([job for of_prompt in jobs for job in of_prompt])
        return [
            [_replies(prompt, job, next(results)) for job in of_prompt]
            for prompt, of_prompt in zip(prompts, jobs, strict=True)
        ]

    def _job(self, prompt: Prompt, chat: list[Message]) -> Job:
        last = len(chat) - 1
        learned = [last] if self.last_only or CHOSEN in prompt.extra else _replies_of(chat)
        arguments = dict(self.config.data.template_args)
        return {"messages": chat, "tools": None, "arguments": arguments, "learned": learned}

    def too_long(self, prompts: Sequence[Prompt], limit: int) -> dict[str, int]:
        """Id -> tokens of each row with more than `limit`. Renders every row, as training will."""
        counts = {}
        with long_work("counting the tokens of rows", total=len(prompts)) as work:
            for start in range(0, len(prompts), PROMPTS_PER_CALL):
                part = prompts[start : start + PROMPTS_PER_CALL]
                for prompt, trajectories in zip(part, self.render(part), strict=True):
                    counts[prompt.id] = max(num_tokens(call) for calls in trajectories for call in calls)
                work.advance(len(part))
        return {name: count for name, count in counts.items() if count > limit}


def with_completion(prompt: Prompt, column: str | None) -> Prompt:
    """The prompt with its row's completion as the last turn, for `Offline`. Raises DataError without one."""
    reply = Message(role="assistant", content=column_text(prompt, column, "offline_column"))
    return replace(prompt, messages=[*prompt.messages, reply], extra={})


def _chats(prompt: Prompt) -> Iterator[list[Message]]:
    """The conversations of a row, each with a reply at its end."""
    if CHOSEN not in prompt.extra:
        yield prompt.messages
        return
    for name in (CHOSEN, REJECTED):
        yield [*prompt.messages, {"role": "assistant", "content": prompt.extra[name]}]


def _replies_of(chat: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(chat) if message["role"] == "assistant"]


def _replies(prompt: Prompt, job: Job, result: Any) -> list[Call]:
    calls: Any = result.get("calls") if isinstance(result, dict) else None
    if not _are_calls(calls):
        error = result.get("error") if isinstance(result, dict) else "it gave no tokens"
        reason = plain(str(error)).removeprefix("ValueError: ")
        raise DataError(
            f"The chat template cannot show the replies of row {prompt.id} exactly: {reason}.",
            "Correct or delete the row, or choose another template (data.chat_template).",
        )
    texts = [job["messages"][index]["content"] for index in job["learned"]]
    return [
        Call(prompt_token_ids=prompt_ids, completion_token_ids=ids, sampling_logprobs=[], text=text)
        for (prompt_ids, ids), text in zip(calls, texts, strict=True)
    ]


def num_tokens(call: Call) -> int:
    """Prompt and reply, with the end-of-turn token."""
    return len(call.prompt_token_ids) + len(call.completion_token_ids)


def _are_calls(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(call, list)
        and len(call) == 2
        and all(isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids) for ids in call)
        for call in value
    )


def _group(prompt: Prompt, trajectories: Sequence[Sequence[Call]], version: int) -> Group:
    question = prompt.messages if CHOSEN in prompt.extra else prompt.messages[:-1]
    return Group(
        prompt=Prompt(id=prompt.id, messages=question, answer="", source=prompt.source),
        trajectories=tuple(
            Trajectory(calls=tuple(replace(c, adapter_version=version) for c in calls), reward=reward)
            for calls, reward in zip(trajectories, (1.0, 0.0), strict=False)
        ),
    )
