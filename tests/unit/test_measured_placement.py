"""`placement`: what a run on several GPUs chooses by memory, and after four steps by their seconds."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from skylite.cli.plan import plan_config
from skylite.config.provenance import from_command_line
from skylite.config.train import TrainConfig
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import ConfigError
from skylite.hub.resolve import ResolvedModel
from skylite.resources.gpu_placement import place
from skylite.rollout.measured_placement import Layout, MeasuredPlacement, StepSeconds
from skylite.rollout.plan import RunPlan, choose_placement
from skylite.rollout.session import append_event
from skylite.rollout.shutdown import StopRequest
from skylite.run.run_dir import RunDir
from tests.decisions import resolved
from tests.logs import logged_messages
from tests.unit.doc_scripts import script
from tests.unit.gpu_cases import Machine
from tests.unit.test_gpu_fit import H100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shapes of Qwen2.5-0.5B."""
    folder = tmp_path_factory.mktemp("shapes")
    script("generate_gpu_fit").write_shapes(folder, "0.5B")
    return folder / "0.5B"


def placed(
    machine: Machine, model: Path, folder: Path, count: int, *settings: str, used_mib: int = 0
) -> tuple[RunPlan, list[str]]:
    """A run on so many H100s, and its notes."""
    machine.lists(*[H100] * count, used_mib=used_mib)
    machine.has_torch()
    config, _ = plan_config(None, from_command_line(settings), 2048)
    config, placement, memory, notes = choose_placement(
        config, ResolvedModel(model, "f", "model: 0.5B"), VllmLauncher(), []
    )
    plan = RunPlan(
        run=RunDir(folder / "run"),
        config=config,
        resolved=resolved(model, folder, placement=placement.model_dump(), memory=memory.model_dump()),
        train=[],
        held_out=[],
        rewards=(),
        first_step=1,
    )
    return plan, [str(note) for note in notes]


@pytest.mark.parametrize(
    ("count", "settings", "ranks", "engines", "share"),
    [
        (1, (), [0], [0], 0.45),
        (2, (), [0], [1], 0.9),
        (4, (), [0, 1], [2, 3], 0.9),
        (4, ("placement=shared",), [0, 1, 2, 3], [0, 1, 2, 3], 0.45),
        (4, ("placement=explicit",), [0], [1], 0.45),
        (4, ("trainer.num_ranks=3",), [0, 1, 2], [3], 0.9),
        (4, ("engine.num_engines=3",), [0], [1, 2, 3], 0.9),
        (2, ("trainer.num_ranks=2",), [0, 1], [0, 1], 0.45),
        (2, ("engine.gpus=[0]",), [0], [0], 0.45),
        (8, ("algorithm.name=sft",), [*range(8)], [], 0.45),
    ],
)  # fmt: skip
def test_a_run_uses_all_gpus_as_the_setting_says(
    machine: Machine, model: Path, tmp_path: Path,
    count: int, settings: tuple[str, ...], ranks: list[int], engines: list[int], share: float,
) -> None:  # fmt: skip
    plan, notes = placed(machine, model, tmp_path, count, *settings)
    at = plan.resolved.placement
    assert (at.rank_gpus, at.engine_gpus) == (ranks, engines)
    assert plan.config.engine.gpu_memory_utilization == share
    said = [note for note in notes if note.startswith("placement=")]
    changed = len(ranks) > 1 or share != 0.45
    explicit = {"placement=explicit", "engine.gpus=[0]"} & {*settings}
    assert bool(said) == (changed and not explicit)
    assert ("trainer.num_ranks" in at.free_settings) == (not explicit and "num_ranks" not in str(settings))


def test_the_note_says_what_the_other_placement_would_leave(
    machine: Machine, model: Path, tmp_path: Path
) -> None:
    _, notes = placed(machine, model, tmp_path, 8)
    (note,) = [note for note in notes if note.startswith("placement=auto: split, trainer.num_ranks=4 ")]
    assert "placement=shared would leave 256 sequences at once to an engine and micro-batches of up" in note


@pytest.mark.parametrize(
    ("count", "settings", "sentence"),
    [
        (1, ("placement=split",), "1 GPU(s) with these settings have no placement that is split"),
        (2, ("trainer.num_ranks=3",), "trainer.num_ranks=3 needs 3 GPUs"),
        (2, ("placement=split", "trainer.num_ranks=3"), "trainer.num_ranks=3 needs 3 GPUs"),
        (2, ("rollout.max_completion_tokens=30000", "engine.gpu_memory_utilization=0.02"), "does not fit"),
    ],
)  # fmt: skip
def test_what_no_placement_allows_is_one_sentence(
    machine: Machine, model: Path, tmp_path: Path, count: int, settings: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        placed(machine, model, tmp_path, count, *settings)


def test_a_cpu_refuses_a_placement_of_gpus() -> None:
    with pytest.raises(ConfigError, match="placement=shared divides GPUs"):
        place(TrainConfig(placement="shared"), "cpu")
    with pytest.raises(ValueError, match="placement=split lets skylite choose the GPUs of one machine"):
        TrainConfig.model_validate({"placement": "split", "engine": {"gpus": [0]}})


def test_seconds_of_another_layout_by_hand() -> None:
    seconds = StepSeconds(sampling=9.0, training=1.0, step=11.0)
    now, one, both = Layout(2, 2, "split"), Layout(1, 3, "split"), Layout(4, 4, "shared")
    assert seconds.with_layout(now, now, ahead=False) == seconds.with_layout(now, now, ahead=True) == 11.0
    assert seconds.with_layout(now, one, ahead=False) == 9 * 2 / 3 + 1 * 2 + 1
    assert seconds.with_layout(now, both, ahead=False) == 4.5 + 0.5 + 1
    assert seconds.with_layout(now, one, ahead=True) == max(6, 2) + 2
    assert seconds.with_layout(now, both, ahead=True) == 4.5 + 0.5 + 2, "one GPU does one thing at a time"
    assert seconds.with_layout(both, now, ahead=True) == max(18, 2) + 1
    in_turns = StepSeconds(sampling=9.0, training=1.0, step=12.0, turns=0.5)
    assert in_turns.with_layout(both, now, ahead=False) == 18 + 2 + 1.5, "without turns"


def after_steps(
    plan: RunPlan, times: dict[str, float], start_s: float = 100.0
) -> tuple[str, StopRequest, Any]:
    """What four steps with these seconds lead to."""
    plan.run.root.mkdir()
    append_event(plan.run.events_path, "run_started")
    append_event(plan.run.events_path, "engines_ready")
    lines = plan.run.events_path.read_text().splitlines()
    first = json.loads(lines[0])
    ready = json.loads(lines[1]) | {"monotonic": first["monotonic"] + start_s}
    plan.run.events_path.write_text(f"{lines[0]}\n{json.dumps(ready)}\n")
    stop = StopRequest(asyncio.Event())
    watch = MeasuredPlacement(stop)
    reasons = []
    with plan.run.metrics_path.open("w") as stream:
        for step in range(1, 6):
            slow = 50.0 if step == 1 else 1.0  # the first one compiles
            line = {"step": step, **{f"time/{name}_s": value * slow for name, value in times.items()}}
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            reasons.append(watch.step_ended(plan, line))
    assert [bool(reason) for reason in reasons if reason] in ([], [True])
    assert reasons[3] == "".join(reasons), "after the fourth step, or never"
    return reasons[3], stop, watch.settings


@pytest.mark.parametrize(
    ("settings", "times", "ranks", "engines"),
    [
        # Sampling takes most, and the two sides never work at once: all GPUs for both.
        ((), {"rollout": 9.0, "train": 1.0, "step": 10.5}, 4, 4),
        # Sampling overlaps training: three engines take 6 s where four shared GPUs take 5.
        (("rollout.max_staleness=1",), {"rollout": 9.0, "train": 1.0, "step": 9.1}, 4, 4),
        # Both sides are busy: they stay.
        (("rollout.max_staleness=1",), {"rollout": 9.0, "train": 8.8, "step": 9.1}, 0, 0),
        (("rollout.max_staleness=2",), {"rollout": 9.0, "train": 1.0, "step": 10.5}, 0, 0),
        (("num_steps=5",), {"rollout": 9.0, "train": 1.0, "step": 10.5}, 0, 0),
        (("placement=split",), {"rollout": 9.0, "train": 1.0, "step": 10.5}, 0, 0),
        (("trainer.num_ranks=2", "engine.num_engines=2"), {"rollout": 9.0, "train": 1.0, "step": 10.5}, 0, 0),
    ],
)  # fmt: skip
def test_measured_seconds_move_a_run_once_it_pays(
    machine: Machine, model: Path, tmp_path: Path,
    settings: tuple[str, ...], times: dict[str, float], ranks: int, engines: int,
) -> None:  # fmt: skip
    plan, _ = placed(machine, model, tmp_path, 4, *settings)
    assert (plan.config.trainer.num_ranks, plan.config.engine.num_engines) == (2, 2)
    reason, stop, chosen = after_steps(plan, times)
    assert stop.requested.is_set() == stop.continues == bool(ranks)
    if not ranks:
        assert (reason, chosen) == ("", {})
        return
    assert (chosen["trainer.num_ranks"], chosen["engine.num_engines"]) == (ranks, engines)
    assert {*chosen} == {*plan.resolved.placement.free_settings}
    assert reason.startswith("placement=auto: 2 GPU(s) to train and 2 to sample take")
    # A fresh choice of these settings on the same machine is that placement.
    typed = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
    moved, _ = placed(machine, model, tmp_path / "again", 4, *settings, *typed)
    assert moved.resolved.placement.rank_gpus == [*range(ranks)]


def test_a_run_continues_if_nvidia_smi_fails(machine: Machine, model: Path, tmp_path: Path) -> None:
    plan, _ = placed(machine, model, tmp_path, 4)
    machine.lists(text="Failed to initialize NVML", code=9)
    with logged_messages() as logged:
        reason, stop, chosen = after_steps(plan, {"rollout": 9.0, "train": 1.0, "step": 10.5})
    assert (reason, chosen, stop.requested.is_set()) == ("", {}, False)
    assert any("other placements are not compared. nvidia-smi" in line for line in logged)


def test_the_user_s_signal_ends_a_run_that_would_go_on() -> None:
    stop = StopRequest(asyncio.Event())
    MeasuredPlacement(stop).continue_with({"trainer.num_ranks": 2}, "it is faster")
    assert stop.requested.is_set()
    stop.on_signal(signal.SIGINT)
    assert stop.requested.is_set()
    assert stop.is_patient
    assert not stop.forced.is_set()
    assert not stop.take_back()
    other = StopRequest(asyncio.Event())
    MeasuredPlacement(other).continue_with({"trainer.num_ranks": 2}, "it is faster")
    assert other.take_back()
    assert not other.requested.is_set()
    assert not other.take_back()
