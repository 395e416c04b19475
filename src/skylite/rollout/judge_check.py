"""Try the judge of a run before it starts: one question, with the first row's rubric."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skylite.config.judge import BASE, JudgeConfig
from skylite.config.train import TrainConfig
from skylite.engine.connections import readable_by_others
from skylite.environments.judge import no_points, rubric_of
from skylite.environments.judge_servers import HttpJudge
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.notes import Note, notes_of
from skylite.rewards.judge_question import Question, question_about
from skylite.types import Prompt

PATIENCE_S = 30.0
"""At most, before a run: a person waits."""


def check_judge(config: TrainConfig, train: Sequence[Prompt]) -> list[Note]:
    """Check the rows, and ask a judge at a URL one question. Returns notes.

    Raises ConfigError if it gives no points, DataError for rows that it cannot judge.
    """
    settings = config.reward.judge
    if not config.has_judge:
        return []
    for prompt in train:
        rubric_of(prompt, settings)
    if pictured := next((prompt for prompt in train if prompt.images), None):
        raise DataError(
            f"The prompt {pictured.id} has images, and a judge gets text alone.",
            "Leave the judge out, or prepare the data without images.",
        )
    if settings.url == BASE:
        return notes_of("the judge is the run's base on the run's engine; step 1 asks it first")
    question = question_about(
        [train[0].answer or "I do not know."],
        task=train[0].messages,
        answer=train[0].answer,
        rubric=rubric_of(train[0], settings),
        max_points=settings.max_points,
    )
    try:
        points, tokens = asyncio.run(_ask(settings, question))
    except RunFailed as error:
        raise ConfigError(error.what, error.hint) from None
    answered = f"the judge {settings.name} answered: {points:.2g} of 1 for a reply to {train[0].id}"
    unsafe = readable_by_others("reward.judge.url", settings.url, settings.api_key_env)
    return notes_of(f"{answered}, {tokens} tokens", unsafe)


async def _ask(settings: JudgeConfig, question: Question) -> tuple[float, int]:
    """The points as a share, and the tokens of the question and its reply. Raises RunFailed."""
    patience_s = min(settings.patience_s, PATIENCE_S)
    server = HttpJudge(settings.model_copy(update={"patience_s": patience_s}))
    try:
        messages = question.messages
        for _ in range(1 + settings.retries):
            reply = await server.ask(messages, 0, None)
            if points := question.points(reply.text):
                return points[0], reply.prompt_tokens + reply.completion_tokens
            messages = question.reminder(reply.text)
        raise no_points(settings, "the first question", 1 + settings.retries, reply.text)
    finally:
        await server.aclose()
