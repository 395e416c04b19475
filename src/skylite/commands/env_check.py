"""`skylite env check`: run a few episodes, print what happens, and compare two runs with the same seed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.config.loading import load_config
from skylite.config.train import TrainConfig
from skylite.data.chat_template import read_template
from skylite.data.prompts import read_prompts
from skylite.data.tokenizer import load_tokenizer
from skylite.engine.retrying_client import Engine
from skylite.engine.server_command import BASE_NAME
from skylite.engine.single_engine import run_on_engine, single_engine_spec
from skylite.environments.episode_spec import check_episode_data
from skylite.environments.running_environment import environment_of_model
from skylite.environments.sample_episodes import Environment, Source
from skylite.environments.scripted_engine import ScriptedEngine
from skylite.environments.trajectory_log import Sampler
from skylite.foreign_text import plain_lines
from skylite.hub.resolve import resolve_model
from skylite.orchestrator.allowed_programs import allow_episode
from skylite.orchestrator.turn_metrics import turn_metrics
from skylite.processes.temporary_folder import temporary_folder
from skylite.types import Prompt, Trajectory
from skylite.ui.logs import show


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFlags:
    """The flags of `skylite env check`."""

    episode: str
    data: Path
    model: str | None
    episodes: int
    replies: tuple[str, ...]
    """Scripted replies; empty: the model replies."""
    as_json: bool
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One episode, run twice with the same seed."""

    prompt_id: str
    trajectory: Trajectory
    conversation: str
    """The last call as text, with the chat template's special tokens."""
    is_repeated: bool
    """Whether the second run gave the same tokens and the same reward."""


def check(flags: CheckFlags) -> None:
    """Raises SkyliteError subclasses."""
    overrides: dict[str, Any] = {"env.episode": flags.episode, "data.path": str(flags.data)}
    if flags.model is not None:
        overrides["model.name"] = flags.model
    config = load_config(None, overrides, flags.settings)
    programs = allow_episode(config.env.episode)
    train, info = read_prompts(flags.data / "train.parquet")
    check_episode_data(config.env.episode, info.reward, str(flags.data))
    prompts = train[: flags.episodes]
    started = time.monotonic()
    checked = asyncio.run(_check(config, programs, prompts, flags.replies))
    seconds = (time.monotonic() - started) / (2 * len(prompts))
    facts = _facts(checked, seconds, "scripted" if flags.replies else config.model.name)
    if flags.as_json:
        show(json.dumps(facts, indent=1))
        return
    for found in checked:
        show(_text(found))
    show(
        f"{len(checked)} episodes, twice each, {seconds:.2f} s an episode with start. "
        f"{facts['repeated']} gave the same tokens and reward again. "
        f"{100 * facts['turns/reused_frac']:.0f} % of the later prompts' tokens were reused, "
        f"{facts['turns/branches_mean']:.1f} branches a trajectory."
    )


async def _check(
    config: TrainConfig, programs: dict[str, str], prompts: Sequence[Prompt], replies: Sequence[str]
) -> list[Checked]:
    model = resolve_model(config.model.name)
    template = read_template(config.data)
    tokenizer = await asyncio.to_thread(load_tokenizer, model.path, template)
    with contextlib.closing(tokenizer):
        stops = tokenizer.stop_token_ids
        scripted = await asyncio.to_thread(tokenizer.encode_texts, replies) if replies else []

    async def on(engine: Sampler) -> list[Checked]:
        with temporary_folder() as folder:
            async with environment_of_model(
                config, model.path, stops, template.text, programs, folder
            ) as environment:
                return await _run_twice(environment, engine, prompts)

    async def on_vllm(engine: Engine) -> list[Checked]:
        return await on(engine)

    if replies:
        return await on(ScriptedEngine(scripted, stops[0]))
    return await run_on_engine(config, lambda uds: single_engine_spec(config, None, model.path, uds), on_vllm)


async def _run_twice(environment: Environment, engine: Sampler, prompts: Sequence[Prompt]) -> list[Checked]:
    source = Source(
        model=BASE_NAME, version=0, engines=[engine], temperature=environment.config.rollout.temperature
    )
    first, second = [
        await environment.sample(source, prompts, step=1, first_index=0, group_size=1) for _ in range(2)
    ]
    again = {g.prompt.id: g.trajectories[0] for g in second}
    checked = []
    for group in first:
        (trajectory,) = group.trajectories
        last = trajectory.samples[-1]
        checked.append(
            Checked(
                prompt_id=group.prompt.id,
                trajectory=trajectory,
                conversation=await environment.recorder.renderer.text(
                    last.prompt_token_ids + last.completion_token_ids
                ),
                is_repeated=_outcome(trajectory) == _outcome(again.get(group.prompt.id)),
            )
        )
    return checked


def _outcome(trajectory: Trajectory | None) -> Any:
    if trajectory is None:
        return None
    samples = [(s.prompt_token_ids, s.completion_token_ids) for s in trajectory.samples]
    return trajectory.reward, dict(trajectory.components), trajectory.turn_rewards, trajectory.end, samples


def _facts(checked: Sequence[Checked], seconds: float, model: str) -> dict[str, Any]:
    rewards = [c.trajectory.reward for c in checked]
    return {
        "model": model,
        "episodes": [
            {
                "prompt": c.prompt_id,
                "reward": c.trajectory.reward,
                "components": dict(c.trajectory.components),
                "end": c.trajectory.end,
                "turns": len(c.trajectory.samples),
                "sampled_tokens": c.trajectory.num_tokens,
                "repeated": c.is_repeated,
            }
            for c in checked
        ],
        "repeated": sum(c.is_repeated for c in checked),
        "reward_mean": sum(rewards) / len(rewards),
        "seconds_an_episode": seconds,
        **turn_metrics([c.trajectory for c in checked]),
    }


def _text(found: Checked) -> str:
    trajectory = found.trajectory
    parts = "".join(f", {name} {value:g}" for name, value in trajectory.components.items())
    head = (
        f"--- {found.prompt_id}: reward {trajectory.reward:g}{parts}, {len(trajectory.samples)} turns, "
        f"{trajectory.num_tokens} sampled tokens, end: {trajectory.end}"
        f"{'' if found.is_repeated else ', NOT the same with the same seed'}"
    )
    return f"{plain_lines(head)}\n{plain_lines(found.conversation)}\n"
