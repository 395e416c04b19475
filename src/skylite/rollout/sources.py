"""The rollout source of a run: what it checks before a run starts, and how it starts.

Consumes: settings and data. Waits for: nothing. Produces: the source that turns prompts into groups.
Unblocks: sampling and evaluation, which do not ask which source it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from skylite.config.judge import JUDGE
from skylite.config.provenance import Provenance
from skylite.config.rollout import RewardConfig, RewardParameters
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.data.prompts import Chat, Pair, PromptFileInfo, read_chats, read_pairs, read_prompts
from skylite.engine.model_limits import check_images
from skylite.environments.episode_spec import check_episode_data
from skylite.environments.episodes import BUILT_IN as BUILT_IN_EPISODES
from skylite.environments.episodes_source import episodes_running
from skylite.environments.judge import Judge
from skylite.environments.offline_source import Offline, with_completion
from skylite.environments.single_turn import SingleTurn, Unscored
from skylite.environments.source import RolloutSource
from skylite.errors import ConfigError, DataError
from skylite.notes import Note, notes_of, warning
from skylite.processes.child import Supervisor
from skylite.processes.streams import printed_lines
from skylite.rewards import load_components
from skylite.rewards.built_in import BUILT_IN
from skylite.rewards.call_rewards import named_scores
from skylite.rewards.worker_pool import RewardPool
from skylite.rollout.prompt_check import (
    check_prompts,
    opened_tag,
    overlong_prompts,
    require_chats,
    show_tag,
    without,
)
from skylite.rollout.reward_check import blind_rewards, check_calls, check_references
from skylite.rollout.trusted_programs import allow_episode, allow_rewards
from skylite.types import Prompt
from skylite.ui.logs import log_printed


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredData:
    """What scores the data of a run, allowed by the user."""

    config: TrainConfig
    """With the settings of the reward that came with the data."""
    rewards: tuple[str, ...]
    """Specs of what scores; the first one decides what is right."""
    programs: dict[str, str] = field(default_factory=dict)
    """FILE.py:function -> sha256 of the file that the user allowed."""
    notes: Sequence[Note] = ()

    @property
    def code_rewards(self) -> tuple[str, ...]:
        """`rewards` without the judge."""
        return tuple(spec for spec in self.rewards if spec != JUDGE)


class Source:
    """A rollout source before it runs. Unless it says otherwise, it reads prompts and nothing scores them."""

    def read(self, config: TrainConfig, split: str) -> tuple[list[Prompt], PromptFileInfo]:
        """The rows of a split of data.path, and its footer. Raises DataError."""
        return read_prompts(split_path(config, split), difficulty=tuple(config.data.difficulty))

    def allow(
        self,
        config: TrainConfig,
        info: PromptFileInfo,
        *,
        data: Path,
        provenance: Provenance,
        keep: Collection[str],
    ) -> ScoredData:
        """Check that the user allows what scores `data`.

        Args:
            data: the folder that `info` is from.
            provenance: what the user typed, who may name programs, and the file that else names them.
            keep: settings of the section reward that data does not change.

        Raises ConfigError or DataError.
        """
        return ScoredData(config=config, rewards=())

    def check_rewards(self, scored: ScoredData, info: PromptFileInfo, train: Sequence[Prompt]) -> list[Note]:
        """Call what scores, where that is cheap. Returns notes. Raises SkyliteError subclasses."""
        return []

    def check_prompts(
        self,
        tokenizer: ChatTokenizer,
        config: TrainConfig,
        model_path: Path,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
    ) -> tuple[list[str], list[Note]]:
        """Ids of overlong prompts, to leave out, and notes.

        Raises ModelError if the template refuses a prompt, DataError for long ones.
        """
        raise NotImplementedError

    def check_completions(
        self, scored: ScoredData, info: PromptFileInfo, tokenizer: ChatTokenizer, train: Sequence[Prompt]
    ) -> list[Note]:
        """Warnings on rewards that no completion of this model can earn. Raises SkyliteError subclasses."""
        return []

    def running(
        self,
        scored: ScoredData,
        tokenizer: ChatTokenizer,
        model_path: Path,
        logs: Path,
        supervisor: Supervisor,
        judge: Judge | None = None,
    ) -> AbstractAsyncContextManager[RolloutSource]:
        """The source, whose processes end with the block. The caller closes `tokenizer` afterwards."""
        raise NotImplementedError


def refuse_feedback(config: TrainConfig, silent: Sequence[str], flag: str) -> None:
    """Raise ConfigError if the teacher waits for feedback of rewards or episodes that give none."""
    if config.algorithm.teacher_sees_feedback:
        raise ConfigError(
            f"algorithm.teacher_sees_feedback shows what a reward returns as feedback, and "
            f"{' and '.join(silent)} returns none.",
            f"Name a FILE.py:function that does with {flag}, or leave the setting out.",
        )


class SingleTurnSource(Source):
    """One completion a trajectory, scored by reward functions."""

    def allow(
        self,
        config: TrainConfig,
        info: PromptFileInfo,
        *,
        data: Path,
        provenance: Provenance,
        keep: Collection[str],
    ) -> ScoredData:
        config, note = apply_reward_settings(config, info, keep)
        rewards, programs = allow_rewards(config.reward.functions, info, data, provenance)
        return ScoredData(config=config, rewards=rewards, programs=programs, notes=notes_of(note))

    def check_rewards(self, scored: ScoredData, info: PromptFileInfo, train: Sequence[Prompt]) -> list[Note]:
        config, rewards, programs = scored.config, scored.code_rewards, scored.programs
        code = config.reward.code
        if set(BUILT_IN) >= set(rewards):
            refuse_feedback(config, scored.rewards, "--reward")
        with printed_lines(log_printed):
            components = load_components(rewards, code.weights, train[0], programs, code)
            notes = check_references(code, info, train, components, programs)
            notes += check_calls(rewards, config, train, programs, info.answer_template)
            names = [
                name
                for spec, c in zip(rewards, components, strict=True)
                for name in (
                    [c.name] if spec in BUILT_IN else named_scores(c.name, c.function, [(train[0], "")])[0][0]
                )
            ]
            names += [JUDGE] * (JUDGE in scored.rewards)
            check_components(config, names, len(scored.rewards))
        return notes

    def check_prompts(
        self,
        tokenizer: ChatTokenizer,
        config: TrainConfig,
        model_path: Path,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
    ) -> tuple[list[str], list[Note]]:
        check_images(model_path, [*train, *held_out])
        require_chats(tokenizer, model_path, [*train, *held_out])
        dropped, notes = check_prompts(tokenizer, config, train, held_out)
        if not config.algorithm.offline_share:
            return dropped, notes
        left = without(train, dropped), without(held_out, dropped)
        longer, about = _check_completions_of_data(tokenizer, config, *left)
        return [*dropped, *longer], [*notes, *about]

    def check_completions(
        self, scored: ScoredData, info: PromptFileInfo, tokenizer: ChatTokenizer, train: Sequence[Prompt]
    ) -> list[Note]:
        config, hides = scored.config, tokenizer.hides_thinking
        opened = opened_tag(tokenizer.prompt_end(train[0]), config.reward.prefill)
        if (not opened and not hides) or not scored.code_rewards:
            return []
        tag, hidden = opened or "<think>", ("<think>", "</think>") if hides else (opened,)
        names = blind_rewards(
            scored.code_rewards, config, train, scored.programs, info.answer_template, tag, hidden
        )
        if not names:
            return []
        what = f"so the reward {', '.join(names)} gives nothing to any completion"
        if hides:
            why = "<think> or </think> is a special token of this model, which rewards never see"
            return [warning(f"{why}, {what}: take a reward that looks at the rest")]
        return [warning(f"the chat template opens {tag} at the end of every prompt, {what}: {show_tag(tag)}")]

    @contextlib.asynccontextmanager
    async def running(
        self,
        scored: ScoredData,
        tokenizer: ChatTokenizer,
        model_path: Path,
        logs: Path,
        supervisor: Supervisor,
        judge: Judge | None = None,
    ) -> AsyncIterator[RolloutSource]:
        if scored.code_rewards == ():
            yield SingleTurn(scored.config, tokenizer, Unscored(), judge)
            return
        pool = reward_pool(scored, logs)
        try:
            pool.watch(supervisor.fail)
            yield SingleTurn(scored.config, tokenizer, pool, judge)
        finally:
            pool.close()


class EpisodesSource(Source):
    """Programs that talk to the model in turns and give the reward themselves."""

    def allow(
        self,
        config: TrainConfig,
        info: PromptFileInfo,
        *,
        data: Path,
        provenance: Provenance,
        keep: Collection[str],
    ) -> ScoredData:
        spec = config.env.episode
        if spec in BUILT_IN_EPISODES:
            refuse_feedback(config, [spec], "--env")
        programs = allow_episode(spec, provenance)
        check_episode_data(spec, info.reward, str(data))
        return ScoredData(config=config, rewards=(spec,), programs=programs)

    def check_prompts(
        self,
        tokenizer: ChatTokenizer,
        config: TrainConfig,
        model_path: Path,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
    ) -> tuple[list[str], list[Note]]:
        """None is left out: the episodes' requests decide what is rendered."""
        if any(prompt.images for prompt in (*train, *held_out)):
            raise DataError(
                "The tasks have images, and episodes send text alone.",
                "Train on single turns (without env.episode), or prepare the tasks without images.",
            )
        tokenizer.encode_chats([[{"role": "user", "content": "Hello"}]])
        return [], []

    def running(
        self,
        scored: ScoredData,
        tokenizer: ChatTokenizer,
        model_path: Path,
        logs: Path,
        supervisor: Supervisor,
        judge: Judge | None = None,
    ) -> AbstractAsyncContextManager[RolloutSource]:
        return episodes_running(
            scored.config, tokenizer, model_path, scored.programs, logs, supervisor, judge
        )


class OfflineSource(Source):
    """Prepared chats or pairs. No engine, no reward."""

    def read(self, config: TrainConfig, split: str) -> tuple[list[Prompt], PromptFileInfo]:
        path = split_path(config, split)
        if config.source.scorers == ["pairs"]:
            pairs, info = read_pairs(path)
            return [_prompt(pair, chosen=pair.chosen, rejected=pair.rejected) for pair in pairs], info
        chats, info = read_chats(path)
        return [_prompt(chat) for chat in chats], info

    def check_prompts(
        self,
        tokenizer: ChatTokenizer,
        config: TrainConfig,
        model_path: Path,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
    ) -> tuple[list[str], list[Note]]:
        limit = config.max_sequence_tokens
        counts = Offline(config, tokenizer).too_long([*train, *held_out], limit)
        name = f"rollout.max_prompt_tokens + rollout.max_completion_tokens={limit}"
        return overlong_prompts(config, train, held_out, counts, name)

    @contextlib.asynccontextmanager
    async def running(
        self,
        scored: ScoredData,
        tokenizer: ChatTokenizer,
        model_path: Path,
        logs: Path,
        supervisor: Supervisor,
        judge: Judge | None = None,
    ) -> AsyncIterator[RolloutSource]:
        yield Offline(scored.config, tokenizer)


def _check_completions_of_data(
    tokenizer: ChatTokenizer, config: TrainConfig, train: Sequence[Prompt], held_out: Sequence[Prompt]
) -> tuple[list[str], list[Note]]:
    """As `Source.check_prompts`, for the completions of algorithm.offline_column."""
    if pictured := next((prompt for prompt in train if prompt.images), None):
        raise DataError(
            f"The prompt {pictured.id} has images, which algorithm.offline_share does not take.",
            "Leave algorithm.offline_share out, or take prompts without images.",
        )
    limit = config.max_sequence_tokens
    rows = [with_completion(prompt, config.algorithm.offline_column) for prompt in train]
    name = (
        f"with algorithm.offline_column={config.algorithm.offline_column} and "
        f"rollout.max_prompt_tokens + rollout.max_completion_tokens={limit}"
    )
    counts = Offline(config, tokenizer, last_only=True).too_long(rows, limit)
    return overlong_prompts(config, train, held_out, counts, name)


def _prompt(row: Chat | Pair, **replies: str) -> Prompt:
    return Prompt(id=row.id, messages=row.messages, answer="", source="", extra=replies)


SOURCES: Mapping[str, Source] = {
    "single-turn": SingleTurnSource(),
    "episodes": EpisodesSource(),
    "offline": OfflineSource(),
}


def check_components(config: TrainConfig, names: Sequence[str], num_functions: int) -> None:
    """Raise ConfigError if settings do not fit the components that the reward functions return."""
    weights = config.reward.weights
    if isinstance(weights, list) and weights and len(names) != num_functions:
        raise ConfigError(
            f"reward.weights has a number for each function, and the functions return {', '.join(names)}.",
            "Give the weights by name: --set 'reward.weights={" + f"{names[0]}: 1.0" + ", ...}'.",
        )
    try:
        config.algorithm.check_components(names, weights if isinstance(weights, dict) else {})
    except ValueError as error:
        what, _, hint = str(error).partition("; ")
        raise ConfigError(f"{what}.", hint[:1].upper() + hint[1:]) from None


def split_path(config: TrainConfig, split: str) -> Path:
    """The file of a split."""
    return Path(config.data.path) / f"{split}.parquet"


def source_for(config: TrainConfig) -> Source:
    """The source that the settings choose."""
    return SOURCES[config.source.name]


def reward_pool(scored: ScoredData, logs: Path) -> RewardPool:
    """The reward workers. Raises ConfigError if a reward cannot be loaded."""
    config = scored.config.reward.code
    return RewardPool(
        scored.code_rewards,
        config.weights,
        config.num_workers,
        config.timeout_s,
        scored.programs,
        logs / "rewards.log",
        config,
        config.prefill,
    )


def apply_reward_settings(
    config: TrainConfig, info: PromptFileInfo, keep: Collection[str]
) -> tuple[TrainConfig, str]:
    """Take over the settings that `skylite prepare` was given, if the data's own reward is used.

    `keep`: settings of the section reward that the user chose. Returns a note on what was taken over.
    Raises DataError for settings that do not exist.
    """
    update = {name: value for name, value in info.reward_settings.items() if name not in keep}
    if config.reward.functions or not update:
        return config, ""
    try:
        RewardParameters.model_validate(info.reward_settings)
        reward = RewardConfig.model_validate(config.reward.model_dump() | update)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise DataError(
            f"The data was prepared with a reward setting that is refused: {name}: {problem['msg']}.",
            "Prepare it again with `skylite prepare`.",
        ) from None
    values = ", ".join(f"reward.{name}={value!r}" for name, value in update.items())
    return config.model_copy(update={"reward": reward}), f"from the data: {values}"
