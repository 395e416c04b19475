"""Engines restart if the adapter has other target modules: real processes of the fake engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skylite.config.train import TrainConfig
from skylite.engine.interface import Engine, EngineSpec
from skylite.engine.start_engines import engines_for_modules, start_engines
from skylite.engine.watchdog import RestartPolicy
from skylite.processes.child import Supervisor
from skylite.rollout.plan import RunPlan
from skylite.run.run_dir import AdapterVersion, RunDir
from tests.decisions import resolved
from tests.fakes.launcher import FakeLauncher
from tests.logs import logged_messages


class Recording(FakeLauncher):
    """Notes the modules that each server is started for."""

    def __init__(self) -> None:
        self.started: list[list[str] | None] = []

    def command(self, spec: EngineSpec) -> list[str]:
        self.started.append(spec.target_modules)
        return super().command(spec)


async def no_verification(engine: Engine, adapter: AdapterVersion) -> None:
    """Accept any adapter."""


@pytest.mark.parametrize("wanted", [["q_proj"], ["k_proj", "q_proj"]])
def test_engines_serve_exactly_the_adapters_modules(tmp_path: Path, wanted: list[str]) -> None:
    launcher, first = Recording(), ["q_proj"]
    plan = RunPlan(
        run=RunDir(tmp_path / "run"),
        config=TrainConfig(),
        resolved=resolved(Path("m"), Path("a")),
        train=[],
        held_out=[],
        rewards=("math",),
        first_step=1,
    )

    async def bring_up() -> bool:
        restarts = RestartPolicy(config=plan.config.engine, verify=no_verification, counts={})
        logs = plan.run.logs
        async with (
            Supervisor() as supervisor,
            start_engines(launcher, plan.run_config, logs, first, supervisor, restarts) as watchdogs,
            engines_for_modules(
                plan.run_config, logs, watchdogs, supervisor, started_for=first, wanted=wanted
            ) as engines,
        ):
            supervisor.check()
            return len(engines) == 1

    with logged_messages() as logged:
        assert asyncio.run(bring_up())
    assert launcher.started == ([first] if wanted == first else [first, wanted])
    restarts = [line for line in logged if not line.startswith("engine-0 is ready")]
    assert ["k_proj" in text for text in restarts] == [True] * (len(launcher.started) - 1)
