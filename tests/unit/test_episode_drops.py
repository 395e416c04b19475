"""Groups that env.on_error=drop leaves out while groups without signal are replaced."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from skylite.config.train import TrainConfig
from skylite.engine.engine_pool import EnginePool
from skylite.environments.source import GroupRequest, OnGroup
from skylite.errors import RunFailed
from skylite.rollout.plan import RunPlan
from skylite.rollout.sampling import SampledStep, sample_step
from skylite.rollout.session import Progress, Session
from skylite.run.run_dir import AdapterVersion, RunDir
from skylite.types import Call, Group, Prompt, Trajectory
from skylite.ui.dashboard import Screen
from tests.decisions import resolved
from tests.unit.environment_cases import ScriptedEngine, environment, make_prompt, make_request

RAISES = """
    async def episode(task, chat):
        await chat(task.messages)
        raise ValueError("bad")
"""


def test_only_the_first_groups_of_a_step_stop_the_run_if_all_fail(tmp_path: Path) -> None:
    async def run() -> None:
        async with environment(tmp_path, RAISES, on_error="drop") as running:
            later = make_request(ScriptedEngine(), first_index=4)
            assert await running.sample([make_prompt()], later) == []
            with pytest.raises(RunFailed, match="Step 1 has no trajectories"):
                await running.sample([make_prompt()], make_request(ScriptedEngine()))

    asyncio.run(run())


class FakeSource:
    """Groups of equal rewards. The episodes of every prompt whose place is in `fails` fail."""

    def __init__(self, fails: set[int]) -> None:
        self.fails = fails

    async def sample(
        self, prompts: Sequence[Prompt], request: GroupRequest, on_group: OnGroup = lambda _: None
    ) -> list[Group]:
        sample = Call(prompt_token_ids=[1], completion_token_ids=[2], sampling_logprobs=[-1.0])
        trajectories = (Trajectory(calls=(sample,), reward=0.0),) * request.group_size
        return [
            Group(prompt=prompt, trajectories=trajectories)
            for place, prompt in enumerate(prompts, request.first_index)
            if place not in self.fails
        ]


def sampled(folder: Path, fails: set[int]) -> SampledStep:
    config = TrainConfig.model_validate(
        {
            "algorithm": {"zero_std_groups": "resample", "max_resample_rounds": 2},
            "rollout": {"prompts_per_step": 4, "group_size": 2},
        }
    )
    run, prompts = RunDir(folder), [make_prompt(i) for i in range(14)]
    plan = RunPlan(
        run=run,
        config=config,
        resolved=resolved(Path("m"), Path("a")),
        train=prompts,
        held_out=[],
        rewards=(),
        first_step=1,
    )
    session = Session(
        plan=plan,
        engines=EnginePool([], 0.1),
        source=FakeSource(fails),
        progress=Progress(run, 9, Screen(9, Console(file=io.StringIO())), dict),
    )
    return asyncio.run(sample_step(session, 3, AdapterVersion(2, folder)))


def test_groups_dropped_while_replacing_are_counted(tmp_path: Path) -> None:
    step = sampled(tmp_path, fails={1, 4, 8, 9})  # places 4 to 6, then 8 to 10, are replacements
    assert len(step.groups) == 3
    assert step.dropped == 4
    step = sampled(tmp_path, fails={4, 5, 6, 7})
    assert (len(step.groups), step.dropped) == (4, 4)
