"""Ask a teacher's server before a run: its model, its tokenizer, and one score."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.environments.teacher_server import TEXTS, TeacherServer
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.notes import Note, notes_of
from skylite.rollout.judge_check import PATIENCE_S, readable_by_others
from skylite.rollout.prompt_check import longest_teacher_sequence
from skylite.types import Prompt


def check_teacher_server(
    config: TrainConfig, tokenizer: ChatTokenizer, train: Sequence[Prompt]
) -> tuple[TrainConfig, list[Note]]:
    """The settings with the teacher's name on its server, and notes. Nothing without a server.

    Raises ConfigError for a server that cannot teach this model, DataError for prompts that it cannot read.
    """
    algorithm = config.algorithm
    if (url := algorithm.teacher_url) is None:
        return config, []
    if pictured := next((prompt for prompt in train if prompt.images), None):
        raise DataError(
            f"The prompt {pictured.id} has images, and a teacher on a server gets token ids alone.",
            "Take a teacher here (base, ema or the folder of an adapter), or prompts without images.",
        )
    try:
        model, longest = asyncio.run(_ask(config, tokenizer))
    except RunFailed as error:
        raise ConfigError(error.what, error.hint) from None
    needed = 1 + longest_teacher_sequence(tokenizer, config, train)  # the server samples a token
    if 0 < longest < needed:
        raise ConfigError(
            f"The teacher {model} at {url} reads {longest:,} tokens, and this run may send {needed:,}.",
            "Serve it with a larger --max-model-len, or lower rollout.max_completion_tokens.",
        )
    config = config.model_copy(update={"algorithm": algorithm.model_copy(update={"teacher_model": model})})
    note = f"the teacher is {model} at {url}, which has the tokenizer of {tokenizer.model_path.name}"
    return config, notes_of(note, readable_by_others("algorithm.teacher", url, algorithm.teacher_key_env))


async def _ask(config: TrainConfig, tokenizer: ChatTokenizer) -> tuple[str, int]:
    """The model's name, and the tokens of its longest sequence."""
    server = TeacherServer(config.algorithm, PATIENCE_S)
    try:
        longest = await server.choose_model()
        await server.check_tokenizer(tokenizer)
        (ids,) = await asyncio.to_thread(tokenizer.encode_texts, TEXTS[:1])
        await server.score(ids, 1)
        return server.model, longest
    finally:
        await server.aclose()
