"""The defaults of `skylite train` on this machine: recipe and data, and what follows the data."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skylite.config.bundled import bundled_names, find_file
from skylite.config.loading import read_recipe
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer, load_tokenizer, prompt_size, read_template
from skylite.data.prompts import PromptFileInfo
from skylite.engine.model_limits import context_length
from skylite.errors import ConfigError
from skylite.hub.resolve import resolve_model
from skylite.notes import Note, notes_of
from skylite.processes.private_folders import temporary_folder
from skylite.progress_reporting import long_work
from skylite.rewards.built_in import default_system
from skylite.rewards.right_completion import ANSWER, fill, is_made_up
from skylite.rollout.plan import read_train
from skylite.types import Prompt

logger = logging.getLogger(__name__)
GPU_RECIPE = "gsm8k"
CPU_RECIPE = "gsm8k_cpu"
OWN_DATA = "own_data"
"""Recipe for data of the user's own on a GPU; without one it ends in _cpu."""
LONGEST = 256
"""Texts to tokenize, those with the most bytes: all texts would take minutes, and the start counts them."""


def find_recipe(name: str) -> Path:
    """The TOML file for a bare name, which is a bundled recipe, or for a path.

    Raises ConfigError that lists the bundled names.
    """
    known = f"The bundled recipes are {bundled_names('recipes')}."
    return find_file(name, "recipes", ("recipe", "recipe file"), known, ConfigError)


def default_recipe(data: Path | None) -> Path:
    """The recipe for this machine and, if it is not the recipe's own, the data. Logs the choice."""
    from skylite.processes.hardware import choose_device

    gpu = choose_device() == "cuda"
    if data is not None and not _is_data_of(GPU_RECIPE if gpu else CPU_RECIPE, data):
        name = OWN_DATA if gpu else f"{OWN_DATA}_cpu"
        logger.info(f"recipe {name}: lengths and steps follow the data, {data}; --recipe FILE chooses them")
        return find_recipe(name)
    if gpu:
        logger.info(f"recipe {GPU_RECIPE}: this run uses the GPU")
        return find_recipe(GPU_RECIPE)
    logger.info(
        f"recipe {CPU_RECIPE}: this run uses no GPU, so a 135M model trains on easy synthetic problems "
        "(GSM8K is too hard for it)"
    )
    return find_recipe(CPU_RECIPE)


def _is_data_of(recipe: str, data: Path) -> bool:
    """Whether the folder is the data set that the recipe was made for."""
    own = read_recipe(find_recipe(recipe))["data"]["path"]
    return bool(data.resolve() == Path(own).resolve() or data.resolve().name == Path(own).name)


def is_own_data_recipe(recipe: Path) -> bool:
    """Whether lengths and steps follow the data."""
    return recipe in (find_recipe(OWN_DATA), find_recipe(f"{OWN_DATA}_cpu"))


@contextlib.contextmanager
def default_data(config: TrainConfig, *, keep: bool) -> Iterator[TrainConfig]:
    """The settings with data to read: GSM8K with a GPU, else synthetic problems, prepared if missing.

    Without `keep` missing data is prepared in a temporary folder, which lasts as long as the block.
    """
    path = Path(config.data.path)
    if (path / "train.parquet").is_file():
        yield config
    elif keep:
        logger.info(f"preparing {path}, which does not exist yet")
        _prepare_default(path)
        yield config
    else:
        logger.info(f"{path} does not exist yet: the run prepares it, --dry-run checks a temporary copy")
        with temporary_folder("dry-run-") as folder:
            copy = folder / path.name
            with contextlib.redirect_stdout(io.StringIO()):  # stdout is for the settings
                _prepare_default(copy)
            yield config.model_copy(update={"data": config.data.model_copy(update={"path": str(copy)})})


def _prepare_default(path: Path) -> None:
    from skylite.cli.prepare import prepare_data
    from skylite.cli.prepare_flags import PrepareFlags
    from skylite.processes.hardware import choose_device

    gpu = choose_device() == "cuda"
    prepare_data(PrepareFlags(target="gsm8k", out=path, synthetic=not gpu, first_source=gpu, replace=True))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a kind of machine."""

    steps: tuple[int, int]
    """At least and at most."""
    completion: int
    """Least tokens of a completion."""
    thoughts: int
    """Least tokens of a completion that has to think before it answers."""


CPU, GPU = Limits((20, 50), 32, 128), Limits((50, 200), 128, 512)


def size_by_data(config: TrainConfig, *, gpu: bool) -> tuple[TrainConfig, list[Note]]:
    """Set the lengths and steps that nobody set, with a note on each. Raises DataError and ModelError."""
    limits = GPU if gpu else CPU
    train, info, _ = read_train(config)
    rollout: dict[str, int] = {}
    notes: list[str] = []
    given = config.rollout.model_fields_set
    per_step = config.rollout.prompts_per_step
    if len(train) < per_step:
        rollout["prompts_per_step"] = per_step = len(train)
        notes.append(f"rollout.prompts_per_step={per_step}: the data has only {len(train)} training prompts")
    path = resolve_model(config.model.name).path
    with contextlib.closing(load_tokenizer(path, read_template(config.data))) as tokenizer:
        if "max_prompt_tokens" not in given:
            longest = _longest_prompt(tokenizer, train)
            rollout["max_prompt_tokens"] = _round_up(longest * 9 // 8, 64)
            limit = rollout["max_prompt_tokens"]
            notes.append(f"rollout.max_prompt_tokens={limit}: the longest prompt has {longest} tokens")
        if "max_completion_tokens" not in given and config.source.max_completion_tokens is not None:
            answer = _longest_answer(tokenizer, train, info)
            room = _room(limits, info)
            tokens = max(room, _round_up(2 * answer, 32))
            prompt = rollout.get("max_prompt_tokens", config.rollout.max_prompt_tokens)
            if context := context_length(path):
                tokens = max(1, min(tokens, context - prompt))
            rollout["max_completion_tokens"] = tokens
            notes.append(
                f"rollout.max_completion_tokens={tokens}: the longest right completion has {answer} tokens; "
                f"twice that, at least {room}"
            )
    update: dict[str, object] = {"rollout": config.rollout.model_copy(update=rollout)}
    if config.num_epochs is None and "num_steps" not in config.model_fields_set:
        least, most = limits.steps
        epoch = max(1, len(train) // per_step)
        steps = min(max(epoch, least), most)
        update["num_steps"] = steps
        notes.append(f"num_steps={steps}: one epoch has {epoch}; at least {least}, at most {most} (--steps)")
    return config.model_copy(update=update), notes_of(*notes)


def _longest_prompt(tokenizer: ChatTokenizer, train: Sequence[Prompt]) -> int:
    longest = sorted(train, key=prompt_size)[-LONGEST:]
    with long_work("counting the tokens of the longest prompts"):
        return max(map(len, tokenizer.encode_chats(longest)))


def _longest_answer(tokenizer: ChatTokenizer, train: Sequence[Prompt], info: PromptFileInfo) -> int:
    """Tokens of the longest right completion, or worked example; 0 if the data has neither."""
    replies = [turn["content"] for turn in info.few_shot if turn["role"] == "assistant"]
    template = info.answer_template or ANSWER
    texts = [*replies, *(fill(template, prompt.answer) for prompt in train if prompt.answer)]
    texts = sorted(texts, key=lambda text: len(text.encode()))[-LONGEST:]
    return max(map(len, tokenizer.encode_texts(texts))) if texts else 0


def _room(limits: Limits, info: PromptFileInfo) -> int:
    """Tokens that a completion gets at least: more where the model has to think."""
    thinks = bool(default_system(info.reward)) or is_made_up(info.answer_template) or not info.has_answers
    return limits.thoughts if thinks and not info.few_shot else limits.completion


def _round_up(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit
