"""Train a step again from its checkpoint and stored rollouts, in a temporary folder."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skylite.adapters.manifest import read_manifest
from skylite.config.loading import read_run_config
from skylite.config.resolved import Trust
from skylite.config.train import RunConfig
from skylite.errors import ChildDied, ConfigError, ModelError, RunFailed
from skylite.processes.child import Supervisor
from skylite.processes.hosts import TrainerStart, require_one_host
from skylite.processes.own_network import check_network
from skylite.processes.private_folders import temporary_folder
from skylite.progress_reporting import long_work
from skylite.resources.gpu_placement import place_ranks
from skylite.rollout.shutdown import ask_trainer_to_end
from skylite.rollout.trainer_process import trainer_process
from skylite.run.checkpoint_folder import checkpoint_steps, verify_checkpoint
from skylite.run.files import write_json
from skylite.run.run_dir import AdapterVersion, RunDir, adapter_name
from skylite.untrusted_files import regular

TRAINER = "trainer"
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """How the adapter of a replayed step differs from the original."""

    step: int
    start: int
    """Step of the checkpoint that the replay started from; 0: the start of the run."""
    num_tensors: int
    differences: dict[str, float]
    """Tensor name -> max |original - replayed|, for tensors that differ. Empty if both are bit-equal."""


async def replay_step(run: RunDir, step: int, programs: Mapping[str, str]) -> ReplayResult:
    """Train `step` again and compare the adapters; the run is only read.

    `programs`: FILE.py:function -> sha256 of the file that the user allowed.
    Raises ConfigError if the adapter or the rollouts are not stored, or if this machine lacks the run's GPUs;
    ModelError if the adapter is damaged.
    """
    recorded = read_run_config(run.config_path)
    require_one_host(recorded.config, "a replay")
    recorded = place_ranks(recorded)
    allowed = recorded.resolved.model_copy(update={"trust": Trust(programs=dict(programs))})
    recorded = recorded.model_copy(update={"resolved": allowed})
    original = stored_adapter(run, recorded, step)
    start = newest_checkpoint_before(run, step)
    missing = [k for k in range(start + 1, step + 1) if not run.rollout_path(k).exists()]
    if missing:
        raise ConfigError(
            f"{run.root} has no rollouts of step {missing[0]}; a replay of step {step} needs them.",
            "Replay another step.",
        )
    with temporary_folder("replay-") as folder:
        replay = copy_for_replay(run, recorded, RunDir(folder), start, step)
        await _train(replay, recorded, start, step)
        return compare(
            step,
            start,
            original.weights_path,
            replay.default_adapters / adapter_name(step) / original.weights_path.name,
        )


def stored_adapter(run: RunDir, recorded: RunConfig, step: int) -> AdapterVersion:
    """Adapter that `step` published. Raises ConfigError if it is not stored, ModelError if it is damaged."""
    folder = run.adapters(recorded)
    adapter = AdapterVersion(step, folder / adapter_name(step))
    if step < 1 or not adapter.path.is_dir():
        raise ConfigError(
            f"{folder} holds no {adapter.name} to compare with: step {step} was not trained, "
            "or its adapter was deleted.",
            "`skylite adapters list` shows the stored ones; sync.keep_every keeps more.",
        )
    read_manifest(adapter.path)
    return adapter


def newest_checkpoint_before(run: RunDir, step: int) -> int:
    """Step of the newest undamaged checkpoint before `step`; 0 if there is none."""
    for found in reversed([s for s in checkpoint_steps(run) if s < step]):
        try:
            verify_checkpoint(run.checkpoint_path(found))
        except ModelError:
            continue  # ReplayResult.start tells which one was used
        return found
    return 0


def copy_for_replay(run: RunDir, recorded: RunConfig, replay: RunDir, start: int, step: int) -> RunDir:
    """Fill `replay`: a run directory as it was after step `start`, with the rollouts up to `step`."""
    for folder in (
        replay.rollouts,
        replay.trainer_steps,
        replay.checkpoints,
        replay.logs,
        replay.default_adapters,
        replay.rendezvous,
    ):
        folder.mkdir(parents=True)
    old = recorded.resolved.identity
    identity = old.model_copy(
        update={
            "lora_sync_path": replay.default_adapters,
            "warm_start": run.warm_start if old.warm_start else None,
            "teacher": run.teacher if old.teacher else None,
        }
    )
    resolved = recorded.resolved.model_copy(update={"identity": identity})
    engine = recorded.config.engine.model_copy(update={"sleep": "never"})  # none is here to take turns with
    settings = recorded.config.model_copy(update={"engine": engine})
    config = recorded.model_copy(update={"config": settings, "resolved": resolved})
    write_json(replay.config_path, config.model_dump(mode="json"))
    write_json(replay.canary_path, run.read_json(run.canary_path))
    if run.micro_batch_path.exists():
        # Other micro-batches than those of the step would change the rounding of sums.
        tokens = run.read_count(run.trainer_step_path(step), "tokens_per_micro_batch")
        write_json(replay.micro_batch_path, run.read_json(run.micro_batch_path) | {"tokens": tokens})
    if start:
        replay.checkpoint_path(start).symlink_to(run.checkpoint_path(start).resolve())
    for path in (p for k, p in run.stored_rollouts().items() if k <= step):
        (replay.rollouts / path.name).symlink_to(path.resolve())
    for path in (p for k, p in run.stored_trainer_steps().items() if k < start):
        (replay.trainer_steps / path.name).symlink_to(path.resolve())
    return replay


def compare(step: int, start: int, first: Path, second: Path) -> ReplayResult:
    """Compare the tensors of two adapter files by name. Raises ModelError if names or shapes differ."""
    import torch
    from safetensors.torch import load_file

    a, b = load_file(regular(first)), load_file(regular(second))
    if {n: t.shape for n, t in a.items()} != {n: t.shape for n, t in b.items()}:
        raise ModelError(
            f"{first} and its replay hold different tensors: the run's config.json was changed.",
            "Restore the original config.json.",
        )
    differing = [n for n in sorted(a) if not torch.equal(a[n], b[n])]
    differences = {n: float((a[n].double() - b[n].double()).abs().max()) for n in differing}
    return ReplayResult(step=step, start=start, num_tensors=len(a), differences=differences)


async def _train(run: RunDir, recorded: RunConfig, start: int, step: int) -> None:
    """Run the trainer until it publishes `step`. Raises RunFailed, also if a step exceeds the time limit."""
    trainer = recorded.config.trainer
    check_network(recorded.config)
    spec = trainer_process(run, recorded, TrainerStart(uuid.uuid4().hex, resume=True))
    spec = replace(spec, is_done=run.trainer_step_path(step).exists)
    async with Supervisor() as supervisor:
        supervisor.start(spec)
        try:
            # The start of the trainer counts as a step.
            with long_work(f"training again up to step {step}", total=step - start + 1) as work:
                for trained in range(start, step + 1):
                    published = _published(run, supervisor, trained)
                    await _in_time(published, trainer.step_timeout_s, f"finish step {trained}")
                    work.advance()
            ask_trainer_to_end(run)
            await _in_time(supervisor.wait_exit(TRAINER), trainer.step_timeout_s, f"end after step {step}")
        except ChildDied:
            if not run.trainer_error_path.exists():
                raise
            reason = run.read_json(run.trainer_error_path)
            raise RunFailed(f"The trainer stopped: {reason['what']}") from None


async def _published(run: RunDir, supervisor: Supervisor, step: int) -> None:
    while not run.trainer_step_path(step).exists():
        supervisor.check()
        await asyncio.sleep(POLL_S)


async def _in_time(work: Coroutine[Any, Any, None], timeout_s: float, goal: str) -> None:
    try:
        await asyncio.wait_for(work, timeout_s)
    except TimeoutError:
        raise RunFailed(
            f"The replay's trainer did not {goal} within {timeout_s:g} s "
            "(trainer.step_timeout_s) and was ended.",
            "If this machine is slower than the original, raise the setting in the run's config.json.",
        ) from None
