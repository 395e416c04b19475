"""What a teacher with a prompt of its own reads before a completion: the prompt, and what only it sees.

Consumes: scored completions of a prompt. Waits for: the chat template. Produces: the calls with the teacher's
prompts. Unblocks: the step's rollout file.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace

from skylite.config.algorithm import AlgorithmConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.errors import DataError
from skylite.types import Call, Message, Prompt, Score

TEACHER_PROMPT = "{prompt}\n\nA correct solution, for you alone:\n\n{context}\n\nNow answer the question."
"""algorithm.teacher_prompt, if it is not set."""
ANSWER = "answer"
"""The name of `Prompt.answer` as a column."""


async def with_teacher_prompts(
    prompt: Prompt,
    calls: Sequence[Call],
    scores: Sequence[Score],
    algorithm: AlgorithmConfig,
    tokenizer: ChatTokenizer,
) -> list[Call]:
    """The calls of a group, each with what the teacher reads before it. Without success to show: nothing."""
    contexts = contexts_of(prompt, [call.text for call in calls], scores, algorithm)
    different = [text for text in dict.fromkeys(contexts) if text]
    chats = [teacher_chat(prompt, text, algorithm) for text in different]
    encoded = await asyncio.to_thread(tokenizer.encode_chats, chats) if chats else []
    ids = {"": list[int](), **dict(zip(different, encoded, strict=True))}
    return [
        replace(call, teacher_prompt_token_ids=ids[text]) for call, text in zip(calls, contexts, strict=True)
    ]


def contexts_of(
    prompt: Prompt, texts: Sequence[str], scores: Sequence[Score], algorithm: AlgorithmConfig
) -> list[str]:
    """[G] what the teacher of each completion sees beside the prompt; empty: it does not teach it."""
    column = column_text(prompt, algorithm.teacher_column)
    if not algorithm.teacher_sees_success:
        return [column] * len(texts)
    right = [i for i, score in enumerate(scores) if score.reward >= algorithm.success_reward]
    shown = [next((texts[j] for j in right if j != i), "") for i in range(len(texts))]
    return [f"{column}\n\n{text}" if column and text else column or text for text in shown]


def column_text(prompt: Prompt, column: str | None) -> str:
    """The text of the prompt's row in that column. Raises DataError if it has none."""
    if column is None:
        return ""
    value = prompt.answer if column == ANSWER else prompt.extra.get(column)
    if not isinstance(value, str) or not value.strip():
        others = ", ".join(sorted(prompt.extra)) or "none"
        raise DataError(
            f"Row {prompt.id} has no text in the column {column!r} (algorithm.teacher_column).",
            f"Prepare the data with such a column, or name another. Its other columns: {others}.",
        )
    return value


def teacher_chat(prompt: Prompt, context: str, algorithm: AlgorithmConfig) -> list[Message]:
    """The prompt's turns, the last with the context."""
    *before, last = prompt.messages
    texts = {"prompt": last["content"], "context": context}
    form = algorithm.teacher_prompt or TEACHER_PROMPT
    content = re.sub(r"\{(prompt|context)\}", lambda found: texts[found[1]], form)
    return [*before, Message(role=last["role"], content=content)]
