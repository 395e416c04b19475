"""Renders prompts before a run starts: template, stop tokens, lengths, what stands before a completion."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer, too_long
from skylite.engine.model_limits import context_length
from skylite.environments.teacher_prompts import column_text, context_of, teacher_chat
from skylite.errors import DataError, ModelError
from skylite.notes import Note, notes_of
from skylite.types import Group, Message, Prompt

OPEN_TAG = re.compile(r"(<\w*(?:think|thought|reason)\w*>|\[THINK\])\s*$", re.IGNORECASE)
"""A tag at the end of a prompt, so that a completion begins inside it."""
CLOSING_TAG = re.compile(r"</\w*(?:think|thought|reason)\w*>|\[/THINK\]", re.IGNORECASE)
SHOWN = 40
LONGEST_TEACHER_PROMPTS = 16
"""Prompts to encode for the longest one. The longest text need not have the most tokens."""


def check_prompts(
    tokenizer: ChatTokenizer, config: TrainConfig, train: Sequence[Prompt], held_out: Sequence[Prompt]
) -> tuple[list[str], list[Note]]:
    """Ids of the prompts with too many tokens, to leave out, and notes. Raises DataError for long ones."""
    notes = completion_notes(tokenizer.prompt_end(train[0]), tokenizer.hides_thinking, config.reward.prefill)
    limit = config.rollout.max_prompt_tokens
    counts = too_long(tokenizer, train, limit) | too_long(tokenizer, held_out, limit)
    dropped, more = overlong_prompts(config, train, held_out, counts, f"rollout.max_prompt_tokens={limit}")
    return dropped, [*notes, *more]


def check_teacher_prompts(
    tokenizer: ChatTokenizer, config: TrainConfig, model_path: Path, train: Sequence[Prompt]
) -> None:
    """Raise DataError if a teacher with prompts of its own cannot read them, or not in full."""
    algorithm = config.algorithm
    if not algorithm.shows_teacher_more:
        return
    if any(prompt.images for prompt in train):
        raise DataError(
            f"The prompts have images, and the teacher of algorithm.name={algorithm.name} sees text alone.",
            "Use algorithm.name=opd without algorithm.teacher_column, or prompts without images.",
        )
    needed, context = longest_teacher_sequence(tokenizer, config, train), context_length(model_path)
    completions = 2 if algorithm.teacher_sees_success else 1
    if context is not None and needed > context:
        limit = f", a feedback of algorithm.max_feedback_tokens={algorithm.max_feedback_tokens}"
        feedback = limit if algorithm.teacher_sees_feedback else ""
        raise DataError(
            f"The teacher's longest prompt{feedback} and {completions} completions of "
            f"{config.source.shorter}={_longest_completion(config)} have {needed:,} tokens, and "
            f"{model_path.name} was made for {context:,}.",
            f"Lower {config.source.shorter}, or shorten what the teacher sees.",
        )


def longest_teacher_sequence(tokenizer: ChatTokenizer, config: TrainConfig, train: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt and completion that a teacher reads. Raises DataError."""
    algorithm = config.algorithm
    if not algorithm.shows_teacher_more:
        return config.max_sequence_tokens
    said = "." if algorithm.teacher_sees_feedback else ""
    contexts = [context_of(column_text(p, algorithm.teacher_column), said, algorithm) for p in train]
    chats = [teacher_chat(p.messages, text, algorithm) for p, text in zip(train, contexts, strict=True)]
    longest = sorted(chats, key=lambda chat: -sum(len(m["content"].encode()) for m in chat))
    encoded: list[Any] = longest[:LONGEST_TEACHER_PROMPTS]
    tokens = max(map(len, tokenizer.encode_chats(encoded)))
    completions = 2 if algorithm.teacher_sees_success else 1
    of_feedback = algorithm.max_feedback_tokens if said else 0
    return tokens + of_feedback + completions * _longest_completion(config)


def _longest_completion(config: TrainConfig) -> int:
    return config.source.max_completion_tokens or config.max_sequence_tokens


def overlong_prompts(
    config: TrainConfig,
    train: Sequence[Prompt],
    held_out: Sequence[Prompt],
    counts: Mapping[str, int],
    limit: str,
) -> tuple[list[str], list[Note]]:
    """The ids in `counts` (id -> tokens), to leave out, and a note. Raises DataError if they must stay.

    `limit`: the setting that they exceed, and its value.
    """
    if counts and not config.data.filter_overlong_prompts:
        raise _too_long(counts, len(train) + len(held_out), limit)
    left = len(without(train, counts)), len(without(held_out, counts))
    if not left[0]:
        raise DataError(
            f"Every training prompt has more than {limit} tokens.",
            f"Raise it; the longest has {max(counts.values())}.",
        )
    note = (
        f"{len(train) - left[0]} of {len(train)} training prompts and "
        f"{len(held_out) - left[1]} of {len(held_out)} held-out ones have more than "
        f"{limit} tokens and are left out (data.filter_overlong_prompts)"
    )
    return sorted(counts), notes_of(note if counts else None)


def without(prompts: Sequence[Prompt], ids: Collection[str]) -> list[Prompt]:
    """The prompts with other ids."""
    dropped = set(ids)
    return [p for p in prompts if p.id not in dropped]


def completion_notes(end: str, hides_thinking: bool, prefill: str) -> list[Note]:
    """What the rewards of this run see of a completion, and what they do not."""
    shown = repr(end[-SHOWN:])
    before = f", and before it reward.prefill={prefill!r}" if prefill else ""
    notes = [Note(f"rewards see what the model samples after {shown}, without special tokens{before}")]
    if tag := opened_tag(end, prefill):
        notes.append(Note(f"completions begin inside {tag}, which the chat template opens: rewards see none"))
    if hides_thinking:
        notes.append(Note("<think> or </think> is a special token of this model: rewards never see it"))
    return notes


def opened_tag(end: str, prefill: str) -> str:
    """The tag at the end of a prompt, unless `prefill` shows it to the rewards; empty if there is none."""
    tag = OPEN_TAG.search(end)
    return tag[1] if tag is not None and tag[1] not in prefill else ""


def unopened_tag(groups: Sequence[Group], prefill: str) -> str:
    """A warning after a step in which nothing was earned and completions only close a tag; else empty."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = {t.reward for t in trajectories}
    texts = [prefill + t.calls[-1].text for t in trajectories]
    closing = next(filter(None, map(CLOSING_TAG.search, texts)), None)
    if closing is None or len(rewards) != 1 or not max(rewards) <= 0:
        return ""
    tag = closing[0].replace("/", "")
    if any(tag in text for text in texts):
        return ""
    return (
        f"every reward of this step is {max(rewards):g}, and completions close {tag} without opening it: if "
        f"the reward wants {tag}, {show_tag(tag)}"
    )


def show_tag(tag: str) -> str:
    """How to put it before completions."""
    return f"--set 'reward.prefill=\"{tag}\\n\"' puts it before each completion"


def require_chats(tokenizer: ChatTokenizer, model_path: Path, prompts: Sequence[Prompt]) -> None:
    """Render a chat of each order of roles: a template may refuse some roles. Raises ModelError."""
    kinds = {(*(m["role"] for m in p.messages), bool(p.images)): p for p in reversed(prompts)}
    for prompt in kinds.values():
        _require_rendered(tokenizer, prompt, model_path)


def _require_rendered(tokenizer: ChatTokenizer, prompt: Prompt, model_path: Path) -> None:
    turns = prompt.messages
    try:
        tokenizer.encode_chats([prompt])
    except ModelError as error:
        if turns[0]["role"] != "system" or not _renders(tokenizer, turns[1:]):
            raise
        raise ModelError(
            f"The chat template of {model_path} refuses a system message, which the prompts have: "
            f"{error.what}",
            "Prepare the data without one (skylite prepare --system ''), or set data.chat_template.",
        ) from None


def _renders(tokenizer: ChatTokenizer, turns: list[Message]) -> bool:
    try:
        tokenizer.encode_chats([turns])
    except ModelError:
        return False
    return True


def _too_long(counts: Mapping[str, int], total: int, limit: str) -> DataError:
    longest = max(counts, key=lambda name: counts[name])
    return DataError(
        f"{len(counts)} of {total} prompts have more than {limit} tokens; the "
        f"longest ({longest}) has {counts[longest]}.",
        f"Raise it to {counts[longest]}, or leave them out with --set data.filter_overlong_prompts=true.",
    )
