"""Check a teacher that scores over HTTP before a run: ask its server, or read the files of its model.

Of a server: its model, its tokenizer, and one score. Of a model that gets an engine: the same from its files.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from skylite.adapters.import_adapter import CONFIG, expand_adapter_path
from skylite.config.algorithm import OWN_MODEL
from skylite.config.loading import change_config
from skylite.config.provenance import Provenance, Typed
from skylite.config.resolved import TeacherModel
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer, load_tokenizer
from skylite.engine.connections import readable_by_others
from skylite.engine.interface import Launcher
from skylite.engine.model_limits import context_length
from skylite.engine.same_tokenizer import TEXTS, tokenizer_difference
from skylite.environments.teacher_server import TeacherServer
from skylite.errors import ConfigError, DataError, RunFailed
from skylite.hub.resolve import SMOLLM2, is_hub_id, resolve_model
from skylite.notes import Note, notes_of
from skylite.processes.hardware import choose_device, choose_dtype
from skylite.rollout.judge_check import PATIENCE_S
from skylite.rollout.prompt_check import longest_teacher_sequence
from skylite.types import Prompt


def with_own_teacher(config: TrainConfig) -> TrainConfig:
    """The settings with OWN_MODEL before algorithm.teacher, if that is a whole model.

    Raises ConfigError for other settings that do not go with one, or with the folder of an adapter.
    """
    name, top_k = config.algorithm.teacher_folder, config.algorithm.teacher_top_k
    if name is None:
        return config
    folder = expand_adapter_path(name)
    is_model = (folder / "config.json").is_file() and not (folder / CONFIG).is_file()
    if not is_model and name != SMOLLM2 and not is_hub_id(name):
        if top_k:
            raise ConfigError(
                f"algorithm.teacher_top_k={top_k} has no effect with algorithm.teacher={name}, an adapter, "
                "which gives its whole distributions.",
                "Leave it out.",
            )
        return config
    return change_config(
        config, Provenance(typed={"algorithm.teacher": Typed(f"{OWN_MODEL}{name}", "--set")})
    )


def check_teacher(
    config: TrainConfig, launcher: Launcher, tokenizer: ChatTokenizer, train: Sequence[Prompt]
) -> tuple[TrainConfig, TeacherModel | None, list[Note]]:
    """`check_teacher_server` and `check_own_teacher`, of which one at most has something to check."""
    config, notes = check_teacher_server(config, tokenizer, train)
    teacher, more = check_own_teacher(config, launcher, tokenizer, train)
    return config, teacher, [*notes, *more]


def check_own_teacher(
    config: TrainConfig, launcher: Launcher, tokenizer: ChatTokenizer, train: Sequence[Prompt]
) -> tuple[TeacherModel | None, list[Note]]:
    """The whole model that shall teach, from its files, and notes; None without one.

    Raises SkyliteError for a model that the engine cannot serve, or that cannot teach this one.
    """
    name, device = config.algorithm.own_teacher, choose_device()
    if name is None:
        return None, []
    if config.engine.urls:
        raise ConfigError(
            f"The teacher {name} is a whole model, for which this run would start an engine, and engine.urls "
            "names engines that others start.",
            "Serve the teacher, too, and give its URL as algorithm.teacher.",
        )
    _require_texts(train)
    model = resolve_model(name)
    served_note = launcher.check_model(model.path, device, None)
    bf16_reason = launcher.bf16_reason(model.path, device)
    dtype, _ = choose_dtype(config.model.dtype, device, lora=False, bf16_reason=bf16_reason)
    needed, context = 1 + longest_teacher_sequence(tokenizer, config, train), context_length(model.path)
    if context is not None and needed > context:
        raise ConfigError(
            f"The teacher {name} was made for {context:,} tokens, and this run may ask it about {needed:,}.",
            "Lower rollout.max_completion_tokens, or choose another teacher.",
        )
    with contextlib.closing(load_tokenizer(model.path)) as other:
        asyncio.run(_require_same(tokenizer, other, name))
    teacher = TeacherModel(
        path=model.path,
        revision=model.revision,
        fingerprint=model.fingerprint,
        dtype=dtype,
        max_tokens=needed,
    )
    about = (
        f"the teacher is {name}, in {dtype} on an engine of its own that reads {needed:,} tokens; it has the "
        f"tokenizer of {tokenizer.model_path.name}"
    )
    source = model.note.replace("model: ", "teacher: ", 1)
    return teacher, notes_of(about, source, f"teacher: {served_note}" if served_note else None)


async def _require_same(tokenizer: ChatTokenizer, other: ChatTokenizer, teacher: str) -> None:
    async def ask(route: str, body: Mapping[str, Any], field: str) -> Any:
        """As a server answers."""
        if route == "tokenize":
            return (await asyncio.to_thread(other.encode_texts, [body["prompt"]]))[0]
        return await asyncio.to_thread(other.decode, body["tokens"])

    if how := await tokenizer_difference(ask, tokenizer):
        raise ConfigError(
            f"The teacher {teacher} has another tokenizer than {tokenizer.model_path.name}: it {how}. A "
            "teacher scores the policy's own tokens.",
            "Take a model of the same family, or learn from its texts with algorithm.name=sft.",
        )


def _require_texts(train: Sequence[Prompt]) -> None:
    if pictured := next((prompt for prompt in train if prompt.images), None):
        raise DataError(
            f"The prompt {pictured.id} has images, and a teacher on a server gets token ids alone.",
            "Take a teacher here (base, ema or the folder of an adapter), or prompts without images.",
        )


def check_teacher_server(
    config: TrainConfig, tokenizer: ChatTokenizer, train: Sequence[Prompt]
) -> tuple[TrainConfig, list[Note]]:
    """The settings with the teacher's name on its server, and notes. Nothing without a server.

    Raises ConfigError for a server that cannot teach this model, DataError for prompts that it cannot read.
    """
    algorithm = config.algorithm
    if (url := algorithm.teacher_url) is None:
        return config, []
    _require_texts(train)
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
