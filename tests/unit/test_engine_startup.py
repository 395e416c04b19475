"""Engines restart if the adapter has other target modules: real processes, a fake vLLM server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skylite.config.train import TrainConfig
from skylite.engine.interface import Engine
from skylite.engine.start_engines import engines_for_modules, start_engines
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.watchdog import RestartPolicy
from skylite.processes.child import Supervisor
from skylite.rollout.plan import RunPlan
from skylite.run.run_dir import AdapterVersion, RunDir
from tests.decisions import resolved
from tests.logs import logged_messages

SERVER = """
import os, socketserver, sys
from http.server import BaseHTTPRequestHandler
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
print("ARGV", *sys.argv[1:], flush=True)
socketserver.UnixStreamServer(sys.argv[sys.argv.index("--uds") + 1], Handler).serve_forever()
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    """A plan whose engines run the fake server."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    return RunPlan(
        run=RunDir(tmp_path / "run"),
        config=TrainConfig(),
        resolved=resolved(Path("m"), Path("a")),
        train=[],
        held_out=[],
        rewards=("math",),
        first_step=1,
    )


async def no_verification(engine: Engine, adapter: AdapterVersion) -> None:
    """Accept any adapter."""


@pytest.mark.parametrize(("wanted", "starts"), [(["q_proj"], 1), (["k_proj", "q_proj"], 2)])
def test_engines_serve_exactly_the_adapters_modules(plan: RunPlan, wanted: list[str], starts: int) -> None:
    async def bring_up() -> bool:
        restarts = RestartPolicy(config=plan.config.engine, verify=no_verification, counts={})
        async with (
            Supervisor() as supervisor,
            start_engines(
                VllmLauncher(), plan.run_config, plan.run.logs, ["q_proj"], supervisor, restarts
            ) as watchdogs,
        ):
            ready = engines_for_modules(
                plan.run_config,
                plan.run.logs,
                watchdogs,
                supervisor,
                started_for=["q_proj"],
                wanted=wanted,
            )
            async with ready as engines:
                supervisor.check()
                return len(engines) == 1

    with logged_messages() as logged:
        assert asyncio.run(bring_up())
    lines = [
        line for line in plan.run.log_path("engine-0").read_text().splitlines() if line.startswith("ARGV")
    ]
    assert " ".join(["--lora-target-modules", *wanted]) in lines[-1]
    restarts = [line for line in logged if not line.startswith("engine-0 is ready")]
    assert len(restarts) == starts - 1
    assert all("k_proj" in text for text in restarts)
