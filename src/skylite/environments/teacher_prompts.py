"""What a teacher with a prompt of its own reads before a completion: the prompt, and what only it sees.

Consumes: scored completions of a prompt. Waits for: the chat template. Produces: the calls with the teacher's
prompts. Unblocks: the step's rollout file.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skylite.config.algorithm import AlgorithmConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.errors import DataError, RunFailed
from skylite.types import Group, Prompt, Trajectory

TEACHER_PROMPT = "{prompt}\n\n{context}\n\nNow answer the question."
"""algorithm.teacher_prompt, if it is not set. Then each part of the context has its heading."""
SOLUTION = "A correct solution, for you alone:\n\n"
SAID = "Feedback on an earlier answer of yours:\n\n"
ANSWER = "answer"
"""The name of `Prompt.answer` as a column."""


async def with_teacher_prompts(group: Group, algorithm: AlgorithmConfig, tokenizer: ChatTokenizer) -> Group:
    """The group, each completion with what its teacher reads before it: nothing where it does not teach.

    Raises RunFailed for a feedback over algorithm.max_feedback_tokens.
    """
    contexts = await contexts_of(group, algorithm, tokenizer)
    different = [text for text in dict.fromkeys(contexts) if text]
    chats: list[Any] = [teacher_chat(group.prompt.messages, text, algorithm) for text in different]
    encoded = await asyncio.to_thread(tokenizer.encode_chats, chats) if chats else []
    ids = {"": list[int](), **dict(zip(different, encoded, strict=True))}
    return taught(group, [ids[text] for text in contexts])


def taught(group: Group, prompts: Sequence[Sequence[int]]) -> Group:
    """The group with these token ids [G] for its teachers, empty where one does not teach.

    A later call of an episode continues the teacher's prompt as it continues the policy's first one. A call
    with another beginning has no teacher.
    """

    def with_prompt(trajectory: Trajectory, ids: Sequence[int]) -> Trajectory:
        own = trajectory.calls[0].prompt_token_ids
        calls = tuple(
            replace(call, teacher_prompt_token_ids=[*ids, *call.prompt_token_ids[len(own) :]])
            if ids and call.prompt_token_ids[: len(own)] == own
            else call
            for call in trajectory.calls
        )
        return replace(trajectory, calls=calls)

    pairs = zip(group.trajectories, prompts, strict=True)
    return replace(group, trajectories=tuple(with_prompt(t, ids) for t, ids in pairs))


async def contexts_of(group: Group, algorithm: AlgorithmConfig, tokenizer: ChatTokenizer) -> list[str]:
    """[G] what the teacher of each completion sees beside the prompt; empty: it does not teach it."""
    trajectories, column = group.trajectories, column_text(group.prompt, algorithm.teacher_column)
    right = [
        i
        for i, t in enumerate(trajectories)
        if algorithm.teacher_sees_success and t.reward >= algorithm.success_reward
    ]
    shown = [next((j for j in right if j != i), None) for i in range(len(trajectories))]
    successes = ["" if j is None else trajectories[j].text_without_rewards for j in shown]
    feedbacks = [t.feedback if algorithm.teacher_sees_feedback else "" for t in trajectories]
    await _require_short(group.prompt, feedbacks, algorithm, tokenizer)
    return [
        context_of("\n\n".join(filter(None, [column, success])), feedback, algorithm)
        for success, feedback in zip(successes, feedbacks, strict=True)
    ]


def context_of(solution: str, feedback: str, algorithm: AlgorithmConfig) -> str:
    """{context} of the teacher's prompt. Empty without either."""
    headings = (SOLUTION, SAID) if algorithm.teacher_prompt is None else ("", "")
    parts = zip(headings, (solution, feedback), strict=True)
    return "\n\n".join(heading + text for heading, text in parts if text)


async def _require_short(
    prompt: Prompt, feedbacks: Sequence[str], algorithm: AlgorithmConfig, tokenizer: ChatTokenizer
) -> None:
    """Raise RunFailed for a feedback over the limit, which the plan has found room for."""
    limit = algorithm.max_feedback_tokens
    doubtful = [text for text in dict.fromkeys(feedbacks) if len(text.encode()) > limit]
    encoded = await asyncio.to_thread(tokenizer.encode_texts, doubtful) if doubtful else []
    if (longest := max(map(len, encoded), default=0)) > limit:
        raise RunFailed(
            f"The feedback on a completion of prompt {prompt.id} has {longest:,} tokens, over "
            f"algorithm.max_feedback_tokens={limit}.",
            "Return the part of it that teaches most, or raise the setting, which --resume allows.",
        )


def column_text(prompt: Prompt, column: str | None, setting: str = "teacher_column") -> str:
    """The text of the prompt's row in that column. Raises DataError if it has none."""
    if column is None:
        return ""
    value = prompt.answer if column == ANSWER else prompt.extra.get(column)
    if not isinstance(value, str) or not value.strip():
        others = ", ".join(sorted(prompt.extra)) or "none"
        raise DataError(
            f"Row {prompt.id} has no text in the column {column!r} (algorithm.{setting}).",
            f"Prepare the data with such a column, or name another. Its other columns: {others}.",
        )
    return value


def teacher_chat(
    messages: Sequence[Mapping[str, Any]], context: str, algorithm: AlgorithmConfig
) -> list[dict[str, Any]]:
    """The prompt's turns, the last one of the user with the context."""
    place = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages) - 1)
    texts = {"prompt": messages[place]["content"], "context": context}
    form = algorithm.teacher_prompt or TEACHER_PROMPT
    content = re.sub(r"\{(prompt|context)\}", lambda found: texts[found[1]], form)
    return [
        {**message, "content": content} if i == place else dict(message) for i, message in enumerate(messages)
    ]
