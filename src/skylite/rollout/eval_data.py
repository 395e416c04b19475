"""The data sets of `skylite eval`: problems, reward and its settings, and what samples and scores them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skylite.config.provenance import Provenance
from skylite.config.rollout import RewardParameters
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTemplate, load_tokenizer
from skylite.data.prompts import read_info, read_prompts
from skylite.environments.judge import judge_running
from skylite.environments.source import RolloutSource
from skylite.errors import ConfigError
from skylite.evaluation.versions import ProblemSet
from skylite.notes import log_notes
from skylite.processes.child import Supervisor
from skylite.rewards.built_in import NO_REWARD
from skylite.rollout.plan import fit_difficulty
from skylite.rollout.prompt_check import without
from skylite.rollout.sources import ScoredData, source_for
from skylite.rollout.trusted_programs import allow_judge
from skylite.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoice:
    """What the flags say about the data."""

    paths: tuple[Path, ...]
    split: str
    limit: int | None
    provenance: Provenance
    """What the user typed; its file is the run, which may name reward programs."""
    is_own: bool
    """The run's own data, whose reward settings the run has recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalData:
    """A data set to evaluate on."""

    name: str
    """Name of its folder."""
    path: Path
    prompts: list[Prompt]
    scored: ScoredData
    """The first of its rewards alone scores."""

    @property
    def reward(self) -> str:
        """Spec of what scores."""
        return self.scored.rewards[0]


def read_data(choice: DataChoice, config: TrainConfig) -> list[EvalData]:
    """The problems of each data set, and its reward. Raises ConfigError or DataError."""
    paths = choice.paths
    names = [path.resolve().name for path in paths]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"Two data sets are named {twice[0]!r}, and the names of result files need different ones.",
            "Give each folder once, or rename one.",
        )
    return [_read_one(name, path, choice, config) for name, path in zip(names, paths, strict=True)]


def _read_one(name: str, path: Path, choice: DataChoice, config: TrainConfig) -> EvalData:
    file = path / f"{choice.split}.parquet"
    config = _without_foreign_filter(file, choice, config)
    prompts, info = read_prompts(file, difficulty=tuple(config.data.difficulty))
    provenance = choice.provenance
    keep = [k for k in RewardParameters.model_fields if choice.is_own or provenance.is_typed(f"reward.{k}")]
    first = config.reward.model_copy(update={"functions": config.reward.functions[:1], "weights": []})
    scored = source_for(config).allow(
        config.model_copy(update={"reward": first}),
        info,
        data=path,
        provenance=provenance,
        keep=keep,
    )
    if scored.rewards[0] == NO_REWARD:
        raise ConfigError(
            f"{path} was prepared without a reward (--reward {NO_REWARD}), so nothing says what is right.",
            "Prepare it with one, or name other data with --data.",
        )
    allow_judge(scored.config, provenance)
    log_notes(scored.notes)
    return EvalData(name=name, path=path, prompts=prompts[: choice.limit], scored=scored)


def _without_foreign_filter(file: Path, choice: DataChoice, config: TrainConfig) -> TrainConfig:
    """Leave out the run's data.difficulty if --data names another data set. Logs that."""
    run = choice.provenance.file_of("data.difficulty")
    if choice.is_own or run is None:
        return config
    data = config.data.model_copy(update={"path": str(file.parent)})
    elsewhere = config.model_copy(update={"data": data})
    fitted, note = fit_difficulty(elsewhere, config.data.model_dump(), read_info(file), str(run))
    if note:
        logger.info(note)
    return fitted


async def start_problems(
    stack: contextlib.AsyncExitStack,
    data: Sequence[EvalData],
    template: ChatTemplate,
    model_path: Path,
    *,
    seed: int,
    logs: Path,
) -> list[ProblemSet]:
    """One problem set for each data set. `stack` ends the processes.

    Args:
        seed: seeds the requests.
        logs: folder of rewards.log or episodes.log.

    Raises SkyliteError subclasses.
    """
    supervisor = await stack.enter_async_context(Supervisor())
    tokenizer = await asyncio.to_thread(load_tokenizer, model_path, template)
    stack.callback(tokenizer.close)
    sources: dict[str, RolloutSource] = {}
    problem_sets = []
    for d in data:
        scored = _as_evaluated(d.scored, seed)
        source = source_for(scored.config)
        dropped, _ = await asyncio.to_thread(
            source.check_prompts, tokenizer, scored.config, model_path, d.prompts, []
        )
        if dropped:
            limit = scored.config.rollout.max_prompt_tokens
            logger.info(f"{d.name}: {len(dropped)} prompts over {limit} tokens are left out")
        key = f"{scored.rewards} {scored.config.reward!r}"
        if key not in sources:  # data sets with the same scorer share its processes
            judge = await stack.enter_async_context(judge_running(scored.config, tokenizer, logs))
            sources[key] = await stack.enter_async_context(
                source.running(scored, tokenizer, model_path, logs, supervisor, judge)
            )
        problem_sets.append(ProblemSet(name=d.name, prompts=without(d.prompts, dropped), source=sources[key]))
    return problem_sets


def _as_evaluated(scored: ScoredData, seed: int) -> ScoredData:
    """Evaluations sample the model's own distribution."""
    rollout = scored.config.rollout.model_copy(update={"top_p": 1.0, "top_k": 0})
    return replace(scored, config=scored.config.model_copy(update={"seed": seed, "rollout": rollout}))
