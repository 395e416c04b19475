"""Try the episodes of an environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from skylite.cli.help import Commands
from skylite.cli.options import AsJson
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.config.base_section import Flag
from skylite.config.loading import load_config
from skylite.config.provenance import Provenance, Typed
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import load_tokenizer, read_template
from skylite.data.prompts import read_prompts
from skylite.engine.interface import BASE_NAME
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.start_engines import run_on_engine, single_engine_spec
from skylite.environments.episode_pool import EpisodeEnd
from skylite.environments.episode_spec import check_episode_data
from skylite.environments.episodes_source import Episodes, episodes_running
from skylite.environments.scripted_engine import ScriptedEngine
from skylite.environments.source import GroupRequest, Sampler
from skylite.hub.resolve import resolve_model
from skylite.processes.child import Supervisor
from skylite.processes.private_folders import temporary_folder
from skylite.progress_reporting import long_work
from skylite.rollout.step_metrics import turn_metrics
from skylite.rollout.trusted_programs import allow_episode, allowed_launcher
from skylite.types import Prompt, Trajectory
from skylite.ui.logs import show
from skylite.untrusted_text import plain, plain_lines

SCRIPTED = "scripted"


env = Commands()
EPISODES = "Episodes and model"


class CheckFlags(Flags):
    """The flags of `skylite env check`."""

    provenance: Provenance
    episode: Annotated[
        str,
        typer.Argument(
            help="guess, calculator, reasoning-gym, FILE.py:function, 'command:PROGRAM ARGUMENTS' or "
            "verifiers:NAME."
        ),
    ]
    data: Annotated[Path, Flag("--data", EPISODES)]
    """Folder written by `skylite prepare`."""
    episodes: Annotated[int, Flag("--episodes", EPISODES)] = Field(4, ge=1)
    """Episodes to run, each twice."""
    reply: Annotated[list[str] | None, Flag("--reply", EPISODES)] = None
    """A reply of a scripted model, which needs no engine. Repeatable: the seed chooses one. With --model that
    model plays too, afterwards. Default: no scripted model."""
    as_json: AsJson = False


@env.callback()
def group() -> None:
    """Keep `check` a command of its own, although it is the only one."""


@env.command()
@takes_settings(["model.name"])
def check(flags: CheckFlags) -> None:
    """Run a few episodes and print their conversations and rewards.

    Also prints tokens, seconds, and the files and processes that an episode leaves open or running. Runs each
    twice with the same seed and prints where the results differ.
    """
    run_check(flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One episode, run twice with the same seed."""

    trajectory: Trajectory
    end: EpisodeEnd
    conversation: str
    """The last call as text, with the chat template's special tokens."""
    is_repeated: bool
    """Whether the second run gave the same tokens and the same reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The episodes with one model."""

    model: str
    start_seconds: float
    """Until the first episode started."""
    episodes: Sequence[Checked]


def run_check(flags: CheckFlags) -> None:
    """Play with a scripted model if there are replies, then with the real one if named or without replies.

    Raises SkyliteError subclasses.
    """
    typed = {
        **flags.provenance.typed,
        "env.episode": Typed(flags.episode, "the argument"),
        "data.path": Typed(str(flags.data), "--data"),
    }
    config = load_config(None, Provenance(typed=typed))
    programs = allow_episode(config.env.episode)
    train, info = read_prompts(flags.data / "train.parquet")
    check_episode_data(config.env.episode, info.reward, str(flags.data))
    prompts = train[: flags.episodes]
    models = [SCRIPTED] if flags.reply else []
    named = flags.provenance.typed.get("model.name")
    if not flags.reply or (named is not None and named.flag == "--model"):  # --set only chooses a tokenizer
        models.append(config.model.name)
    facts = []
    for model in models:
        replies = flags.reply or () if model == SCRIPTED else ()
        played = asyncio.run(_play(config, programs, prompts, model, replies))
        facts.append(_facts(played))
        if not flags.as_json:
            show(_text(played))
    if flags.as_json:
        show(json.dumps({"models": facts}, indent=1))


async def _play(
    config: TrainConfig,
    programs: dict[str, str],
    prompts: Sequence[Prompt],
    name: str,
    replies: Sequence[str],
) -> Played:
    """Play with the model `name`, or with a scripted one if there are replies."""
    began = time.monotonic()
    model = resolve_model(config.model.name)
    template = read_template(config.data)
    tokenizer = await asyncio.to_thread(load_tokenizer, model.path, template)

    async def on(engine: Sampler) -> Played:
        with temporary_folder() as folder:
            async with (
                Supervisor() as supervisor,
                episodes_running(config, tokenizer, model.path, programs, folder, supervisor) as source,
            ):
                start_seconds = time.monotonic() - began
                episodes = await _run_twice(source, engine, prompts)
                return Played(model=name, start_seconds=start_seconds, episodes=episodes)

    async def on_engine(engine: RetryingEngine) -> Played:
        return await on(engine)

    with contextlib.closing(tokenizer):
        if replies:
            scripted = await asyncio.to_thread(tokenizer.encode_texts, replies)
            return await on(ScriptedEngine(scripted, tokenizer.stop_token_ids[0]))
        launcher = allowed_launcher(config)
        return await run_on_engine(
            launcher,
            config,
            lambda address: single_engine_spec(launcher, config, None, model.path, address),
            on_engine,
        )


async def _run_twice(source: Episodes, engine: Sampler, prompts: Sequence[Prompt]) -> list[Checked]:
    temperature = source.config.rollout.temperature
    request = GroupRequest(model=BASE_NAME, version=0, engines=[engine], temperature=temperature, step=1)
    ends: list[EpisodeEnd] = []
    with long_work("playing every episode twice", total=2 * len(prompts)) as work:

        def on_end(end: EpisodeEnd) -> None:
            ends.append(end)
            work.advance()

        source.pool.on_end = on_end
        first, second = [await source.sample(prompts, request) for _ in range(2)]
    end_of = {end.task_id: end for end in reversed(ends)}  # of the first run
    again = {g.prompt.id: g.trajectories[0] for g in second}
    checked = []
    for group in first:
        (trajectory,) = group.trajectories
        last = trajectory.calls[-1]
        ids = last.prompt_token_ids + last.completion_token_ids
        checked.append(
            Checked(
                trajectory=trajectory,
                end=end_of[group.prompt.id],
                conversation=await source.server.renderer.text(ids),
                is_repeated=_outcome(trajectory) == _outcome(again.get(group.prompt.id)),
            )
        )
    return checked


def _outcome(trajectory: Trajectory | None) -> Any:
    if trajectory is None:
        return None
    calls = [(s.prompt_token_ids, s.completion_token_ids) for s in trajectory.calls]
    scores = trajectory.reward, dict(trajectory.components), trajectory.turn_rewards, trajectory.feedback
    return scores, trajectory.end, calls


def _facts(played: Played) -> dict[str, Any]:
    episodes = played.episodes
    return {
        "model": played.model,
        "episodes": [
            {
                "prompt": c.end.task_id,
                "reward": c.trajectory.reward,
                "components": dict(c.trajectory.components),
                "feedback": c.trajectory.feedback,
                "end": c.trajectory.end,
                "turns": len(c.trajectory.calls),
                "sampled_tokens": c.trajectory.num_tokens,
                "seconds": c.end.seconds,
                "repeated": c.is_repeated,
            }
            for c in episodes
        ],
        "repeated": sum(c.is_repeated for c in episodes),
        "reward_mean": sum(c.trajectory.reward for c in episodes) / len(episodes),
        "start_seconds": played.start_seconds,
        **turn_metrics([c.trajectory for c in episodes]),
    }


def _text(played: Played) -> str:
    facts = _facts(played)
    episodes = "\n\n".join(_episode_text(c) for c in played.episodes)
    return (
        f"{episodes}\n\n"
        f"{plain(played.model)}: {len(played.episodes)} episodes, twice each, after a start of "
        f"{played.start_seconds:.1f} s. {facts['repeated']} gave the same tokens and reward again. "
        f"{100 * facts['turns/reused_frac']:.0f} % of the later prompts' tokens were reused, "
        f"{facts['turns/branches_mean']:.1f} branches a trajectory."
    )


def _episode_text(found: Checked) -> str:
    trajectory, end = found.trajectory, found.end
    parts = "".join(f", {name} {value:g}" for name, value in trajectory.components.items())
    head = (
        f"--- {end.task_id}: reward {trajectory.reward:g}{parts}, {len(trajectory.calls)} turns, "
        f"{trajectory.num_tokens} sampled tokens, {end.seconds:.2f} s, end: {trajectory.end}"
        f"{'' if found.is_repeated else ', NOT the same with the same seed'}"
    )
    feedback = f"\nfeedback: {trajectory.feedback}" if trajectory.feedback else ""
    return f"{plain(head)}\n{plain_lines(found.conversation + feedback)}"
