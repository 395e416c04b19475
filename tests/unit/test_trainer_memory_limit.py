"""A rank takes no more of its GPU than the memory plan gives it: the plan, config.json, the worker, torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from skylite.config.resolved import MemoryPlan
from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.model import process_group
from skylite.model.process_group import Dist
from skylite.resources.gpu_memory_plan import Setup, plan_memory
from skylite.resources.gpu_placement import place
from skylite.rollout.plan import plan_run, write_run
from skylite.rollout.resume import plan_resume
from skylite.run.run_dir import RunDir
from skylite.trainer import loop
from skylite.trainer.micro_batch_memory import limit_gpu_memory
from skylite.trainer.worker import run_trainer
from tests.decisions import changed
from tests.small_run import make_run, settings
from tests.unit.gpu_cases import H200, RESOLVED, Machine
from tests.unit.run_cases import write_data

TOTAL = 1 << 30
"""Memory of the GPU that torch finds."""
GPU = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The limits that torch is given, as (share, device)."""
    made: list[Any] = []
    properties = {GPU: SimpleNamespace(total_memory=TOTAL)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *call: made.append(call))
    return made


@pytest.mark.parametrize(
    ("limit", "device", "expected"),
    [
        (TOTAL // 4, GPU, [(0.25, GPU)]),
        (TOTAL, GPU, [(1.0, GPU)]),
        (TOTAL + 1, GPU, [(1.0, GPU)]),
        (None, GPU, []),
        (TOTAL // 4, torch.device("cpu"), []),
    ],
    ids=["a quarter", "all", "nvidia-smi finds more than torch", "no limit", "a CPU"],
)
def test_torch_is_limited_to_the_share_of_the_rank(
    calls: list[Any], limit: int | None, device: torch.device, expected: list[Any]
) -> None:
    limit_gpu_memory(MemoryPlan(trainer_bytes=limit), device)
    assert calls == expected


class ModelIsLoaded(Exception):
    """Ends the worker of a test where it would load the model."""


@pytest.fixture
def start_worker(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[RunDir], None]:
    """Run the worker's code as a rank on GPU 1, up to loading the model."""

    @contextmanager
    def group(device: str, rendezvous: Path) -> Iterator[Dist]:
        assert device == "cuda"
        yield Dist(1, 2, GPU, cast("Any", None))

    def load(*_: Any) -> None:
        calls.append("the model is loaded")
        raise ModelIsLoaded

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(process_group, "process_group", group)
    monkeypatch.setattr(loop, "load_policy", load)

    def start(run: RunDir) -> None:
        with pytest.raises(ModelIsLoaded):
            run_trainer(run, resume=False)

    return start


def test_the_worker_limits_torch_before_it_loads_the_model(
    calls: list[Any], start_worker: Callable[[RunDir], None], tmp_path: Path
) -> None:
    config = settings(trainer={"num_threads": torch.get_num_threads()})
    run = make_run(tmp_path / "run", tmp_path, config, {})
    found = changed(RESOLVED, memory={"trainer_bytes": TOTAL // 2})
    run_config = RunConfig(skylite_version="test", config=config, resolved=found)
    run.config_path.write_text(run_config.model_dump_json())
    start_worker(run)
    assert calls == [(0.5, GPU), "the model is loaded"]


def planned_bytes(config: TrainConfig, model: Path) -> int:
    """What the memory plan gives a rank on the machine as it is now."""
    budget, _ = plan_memory(
        config, Setup(VllmLauncher(), model, "cuda", "bfloat16", "dense", place(config, "cuda"))
    )
    assert budget.trainer_bytes is not None
    return budget.trainer_bytes


def test_a_run_and_its_resume_record_what_the_plan_gives_a_rank(
    machine: Machine, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the resume, another process uses 30,000 MiB of the GPU."""
    monkeypatch.setattr(VllmLauncher, "check_machine", lambda self, device: None)  # may be built for CPUs
    machine.has_torch()
    machine.lists(H200)
    write_data(tmp_path / "data", 4)
    config = settings(
        model={"name": str(tiny_llama)}, data={"path": str(tmp_path / "data")}, eval={"limit": 0}
    )
    run = RunDir(tmp_path / "run")
    first = plan_run(config, run)
    expected = planned_bytes(first.config, tiny_llama)
    assert first.resolved.memory.trainer_bytes == expected
    write_run(first)
    machine.lists(H200, used_mib=30_004)
    assert plan_resume(run).resolved.memory.trainer_bytes == expected - (30_000 << 20)
