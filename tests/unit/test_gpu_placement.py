"""Placement of ranks and engines on machines with any number of GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.start_engines import engine_spec
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import ConfigError
from skylite.resources.gpu_placement import GpuChoice, place, place_again, place_ranks
from tests.decisions import changed
from tests.unit.gpu_cases import H200, RESOLVED, T4, Machine


def config(ranks: int = 1, engines: int = 1, **engine: Any) -> TrainConfig:
    tree = {"trainer": {"num_ranks": ranks}, "engine": {"num_engines": engines, **engine}}
    return TrainConfig.model_validate(tree)


def recorded(ranks: int = 1, **placement: Any) -> RunConfig:
    return RunConfig(
        skylite_version="1", config=config(ranks), resolved=changed(RESOLVED, placement=placement)
    )


@pytest.mark.parametrize(
    ("gpus", "ranks", "engines", "rank_gpus", "engine_gpus"),
    [
        (1, 1, 1, [0], [0]),
        (1, 1, 2, [0], [0, 0]),
        (2, 1, 1, [0], [1]),
        (2, 2, 2, [0, 1], [0, 1]),
        (4, 2, 2, [0, 1], [2, 3]),
        (4, 3, 2, [0, 1, 2], [3, 0]),
        (8, 8, 8, list(range(8)), list(range(8))),
    ],
)
def test_engines_take_the_free_gpus_first(
    machine: Machine, gpus: int, ranks: int, engines: int, rank_gpus: list[int], engine_gpus: list[int]
) -> None:
    machine.lists(*[H200] * gpus)
    machine.has_torch()
    placed = place(config(ranks, engines), "cuda")
    assert (placed.rank_gpus, placed.engine_gpus) == (rank_gpus, engine_gpus)
    assert "driver 580.95.05, torch 2.13.0 for CUDA 13.0" in placed.notes[0].text


@pytest.mark.parametrize(
    ("gpus", "settings", "idle"),
    [
        (2, config(), []),
        (4, config(), [2, 3]),
        (8, config(ranks=2, engines=2), [4, 5, 6, 7]),
        (8, config(ranks=2, tensor_parallel=2), [4, 5, 6, 7]),
        (3, config(gpus=[0]), [1, 2]),
    ],
)
def test_idle_gpus_are_named_with_settings_that_use_all(
    machine: Machine, gpus: int, settings: TrainConfig, idle: list[int]
) -> None:
    machine.lists(*[H200] * gpus)
    machine.has_torch()
    notes = [str(note) for note in place(settings, "cuda").notes if "idle" in note.text]
    assert bool(notes) == bool(idle)
    if not idle:
        return
    (note,) = notes
    assert note.startswith(f"warning: GPU {', '.join(map(str, idle))} of {gpus} stay idle")
    values = {name: int(value) for name, value in re.findall(r"(num_\w+)=(\d+)", note)}
    size = settings.engine.tensor_parallel
    better = config(values["num_ranks"], values["num_engines"], tensor_parallel=size)
    placed = place(better, "cuda")
    assert {*placed.rank_gpus, *placed.engine_gpus} == set(range(gpus))


def test_configured_engines_count_visible_gpus(machine: Machine) -> None:
    machine.lists(*[H200] * 4)
    machine.has_torch()
    machine.sees("3,1")
    placed = place(config(1, 2, gpus=[0, 1]), "cuda")
    assert (placed.rank_gpus, placed.engine_gpus) == ([3], [3, 1])
    assert placed.notes[1].text == "rank 0 on GPU 3; engine 0 to 1 on GPU 3, 1"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (config(ranks=3), "trainer.num_ranks=3 needs 3 GPUs.* 2 can be used: GPU 0: NVIDIA H200"),
        (config(gpus=[2]), r"engine.gpus=\[2\] names visible GPU 2, and there are 2"),
        (config(gpus=[0, 1]), r"engine.gpus=\[0, 1\] names 2 GPU\(s\) for engine.num_engines=1"),
        (config(engines=5), "3 engines share GPU 1 .*gpu_memory_utilization=0.45.* below 0.33"),
    ],
)
def test_what_does_not_fit_the_gpus_is_refused(machine: Machine, settings: TrainConfig, reason: str) -> None:
    machine.lists(H200, H200)
    machine.has_torch()
    with pytest.raises(ConfigError, match=reason):
        place(settings, "cuda")


def test_a_cpu_has_no_placement() -> None:
    assert place(config(ranks=2), "cpu") == GpuChoice(rank_gpus=[], engine_gpus=[], notes=[])
    with pytest.raises(ConfigError, match=r"engine.gpus=\[0\] .* this run has none"):
        place(config(gpus=[0]), "cpu")


def test_processes_that_leave_too_little_memory_are_named(machine: Machine) -> None:
    machine.lists(T4, used_mib=10240, processes=["4711, 9216, /usr/bin/python3", "4712, [N/A], jupyter"])
    machine.has_torch()
    with pytest.raises(ConfigError) as error:
        place(config(), "cuda")
    assert "GPU 0 (Tesla T4) has 5.0 of 15.0 GiB free, and the engine takes 6.8 GiB" in error.value.what
    assert "process 4711 (python3) uses 9.0 GiB, process 4712 (jupyter)." in error.value.what


@pytest.mark.parametrize(
    ("used", "processes", "warned"),
    [
        (4, [], ""),
        (3000, ["41, 2900, python3"], "process 41 (python3) uses 2.8 GiB"),
        (3000, [], "processes that cannot be seen here use 2.9 GiB"),
    ],
)
def test_others_on_the_gpu_give_a_warning(
    machine: Machine, used: int, processes: list[str], warned: str
) -> None:
    machine.lists(H200, used_mib=used, processes=processes)
    machine.has_torch()
    warnings = [str(n) for n in place(config(), "cuda").notes if n.is_warning]
    expected = [f"warning: GPU 0 (NVIDIA H200) is not free: {warned}"] if warned else []
    assert warnings == expected


def test_memory_that_nvidia_smi_does_not_know_is_not_compared(machine: Machine) -> None:
    machine.lists("NVIDIA GB10, 12.1, [N/A], 580.95.05, [N/A]")
    machine.has_torch()
    assert place(config(), "cuda").engine_gpus == [0]


def test_each_engine_sees_its_gpu_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model", "config.json").write_text("{}")
    env = [
        VllmLauncher().environment(engine_spec(recorded(), ["q_proj"], i, Path("sockets"))) for i in range(2)
    ]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in env] == ["1", "0"]
    assert {e["CUDA_DEVICE_ORDER"] for e in env} == {"PCI_BUS_ID"}


def test_a_run_is_placed_again_when_it_is_resumed(machine: Machine) -> None:
    run = recorded()
    machine.lists(H200)
    machine.has_torch()
    assert place_again(run, run.config).engine_gpus == [0]
    machine.sees("-1")
    with pytest.raises(ConfigError, match=r"started on a GPU.* CUDA_VISIBLE_DEVICES=-1 hides all"):
        place_again(run, run.config)


def test_a_bfloat16_run_does_not_resume_on_an_old_gpu(machine: Machine) -> None:
    machine.lists(T4)
    machine.has_torch()
    with pytest.raises(ConfigError, match=r"compute capability 7.5"):
        place_again(recorded(), config())


def test_a_replay_needs_the_gpus_of_its_ranks(machine: Machine) -> None:
    machine.lists(H200, H200)
    machine.has_torch()
    machine.sees("1")
    assert place_ranks(recorded()).resolved.placement.rank_gpus == [1]
    with pytest.raises(ConfigError, match=r"trainer.num_ranks=2 needs 2 GPUs"):
        place_ranks(recorded(ranks=2))
    on_cpu = recorded(ranks=2, device="cpu")
    assert place_ranks(on_cpu) is on_cpu
