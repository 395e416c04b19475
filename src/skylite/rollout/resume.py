"""Resume a run: choose the checkpoint, check changed settings, remove everything written after it.

SAFE_CHANGES and ROUNDING_CHANGES name the settings that may change.

Consumes: the folder of a run that stopped. Waits for: nothing. Produces: its plan from the checkpoint on, and
a folder without later files. Unblocks: a session, which trains stored rollouts again instead of sampling.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import skylite
from skylite.adapters.retention import remove_folder, remove_unfinished_files
from skylite.config.loading import change_config, read_run_config
from skylite.config.provenance import NOTHING_TYPED, Provenance
from skylite.config.resolved import MemoryPlan, ModelFiles, Placement, Resolved, Trust
from skylite.config.rollout import RewardParameters
from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.launchers import load_launcher
from skylite.errors import ConfigError, DataError
from skylite.hub.resolve import check_folder, resolve_model
from skylite.notes import log_notes
from skylite.processes.own_network import check_network
from skylite.resources.gpu_memory_plan import Setup, plan_memory
from skylite.resources.gpu_placement import GpuChoice, place_again
from skylite.rollout.plan import (
    RunPlan,
    check_device,
    epochs_to_steps,
    held_out_prompts,
    read_train,
    train_data_hash,
)
from skylite.rollout.prompt_check import without
from skylite.rollout.sources import source_for
from skylite.rollout.step_metrics import recovered_metrics, require_numbers
from skylite.rollout.teacher_check import with_own_teacher
from skylite.rollout.trusted_programs import (
    accept_same_rewards,
    allow_algorithm,
    allow_launcher,
    allow_servers,
)
from skylite.run.checkpoint_folder import checkpoint_steps, choose_checkpoint
from skylite.run.files import fsync_path
from skylite.run.metrics_file import read_metrics, remove_scores_after, write_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir, published_versions
from skylite.run.status import read_status

logger = logging.getLogger(__name__)
Files = TypeVar("Files", bound=ModelFiles)


def plan_resume(
    run: RunDir,
    provenance: Provenance = NOTHING_TYPED,
    *,
    at: int | None = None,
) -> RunPlan:
    """Plan an existing run from its newest undamaged checkpoint, or from the checkpoint of step `at`.

    Writes nothing. Raises ConfigError if a change would alter the run's result, if data or model differ,
    or if no work is left.
    """
    recorded = read_run_config(run.config_path)
    provenance = replace(provenance, file=run.config_path)
    config = change_config(recorded.config, provenance)
    if provenance.is_typed("algorithm.teacher"):
        config = with_own_teacher(config)
    source = source_for(config)
    everything, info, mixed = read_train(config)
    train = without(everything, recorded.resolved.identity.dropped_prompts)
    config = accept_same_rewards(recorded.config, config, info, provenance)
    config, _ = epochs_to_steps(config, len(train))
    check_changes(recorded.config, config)
    check_device(config, recorded.resolved.placement.device)
    check_network(config)
    gpus = place_again(recorded, config)
    log_notes(gpus.notes)
    scored = source.allow(
        config,
        info,
        data=Path(config.data.path),
        provenance=provenance,
        keep=RewardParameters.model_fields,  # the run has recorded them
    )
    programs = allow_algorithm(config, provenance)
    programs |= allow_launcher(config, provenance)
    allow_servers(config, provenance)
    recorded = _check_inputs(recorded, config)
    done = choose_checkpoint(run, at)
    _require_work(run, config, done)
    placement, memory = _fit_again(config, recorded.resolved, programs, gpus)
    logger.info(
        f"resuming {run.root} after step {done} of {config.num_steps}" + ("" if done else ", from its start")
    )
    if recorded.skylite_version != skylite.__version__:
        logger.warning(
            f"the run was started with skylite {recorded.skylite_version}, and this is {skylite.__version__}"
        )
    return RunPlan(
        run=run,
        config=config,
        resolved=_relocate(run, recorded, placement, memory, Trust(programs=scored.programs | programs)),
        train=train,
        held_out=without(held_out_prompts(config), recorded.resolved.identity.dropped_prompts),
        rewards=scored.rewards,
        first_step=done + 1,
        resumed=True,
        reuse_rollouts=at is None,
        mixed=mixed,
    )


def _fit_again(
    config: TrainConfig, resolved: Resolved, programs: Mapping[str, str], gpus: GpuChoice
) -> tuple[Placement, MemoryPlan]:
    """The recorded placement on the GPUs of today, and what fits there."""
    placement = resolved.placement.model_copy(
        update={"rank_gpus": gpus.rank_gpus, "engine_gpus": gpus.engine_gpus}
    )
    memory, notes = plan_memory(
        config,
        Setup(
            load_launcher(config, programs),
            resolved.model.path,
            placement.device,
            placement.dtype,
            placement.cpu_lora,
            gpus,
            resolved.teacher,
        ),
    )
    log_notes(notes)
    return placement, memory


def remove_after(run: RunDir, lora_sync_path: Path, step: int, *, reuse_rollouts: bool) -> int:
    """Remove everything after `step` and unfinished files. Returns the number of recorded steps removed.

    With `reuse_rollouts`, later rollouts are kept: a step depends only on its rollouts, so nothing is
    sampled twice. The trainer's file of `step` is removed too: the resumed trainer writes it again once
    its adapter is published, and the parent waits for it.
    """
    lines = read_metrics(run.metrics_path)
    before = [line for line in lines if line["step"] <= step]
    recovered = recover_metrics(run, before[-1]["step"] if before else 0, step)
    kept = reusable_rollouts(run, step) if reuse_rollouts else 0
    # A kill or a power cut may interrupt this anywhere. Checkpoints go first, newest first, so that the next
    # resume never finds a checkpoint whose files are gone. Metrics are written before their sources go.
    for later in sorted((s for s in checkpoint_steps(run) if s > step), reverse=True):
        remove_folder(run.checkpoint_path(later))
    if run.checkpoints.exists():
        fsync_path(run.checkpoints)
    for adapter in reversed([a for a in published_versions(lora_sync_path) if a.version > step]):
        remove_folder(adapter.path)
    write_metrics(run.metrics_path, [*before, *recovered])
    for paths, first in ((run.stored_trainer_steps(), step), (run.stored_rollouts(), step + 1 + kept)):
        for path in (p for k, p in paths.items() if k >= first):
            path.unlink()
    remove_scores_after(run, step)
    remove_unfinished_files(run, lora_sync_path)
    if kept:
        logger.info(f"training steps {step + 1} to {step + kept} again from their stored rollouts")
    return len(lines) - len(before)


def recover_metrics(run: RunDir, recorded: int, done: int) -> list[dict[str, Any]]:
    """Metrics of steps `recorded` + 1 to `done`, which are in the checkpoint but were not recorded."""
    steps = [k for k in range(recorded + 1, done + 1) if run.rollout_path(k).exists()]
    return [recovered_metrics(k, read_rollouts(run.rollout_path(k)), _stored_update(run, k)) for k in steps]


def _stored_update(run: RunDir, step: int) -> dict[str, Any]:
    """The trainer's report on a finished step; empty if the file is missing or a power cut emptied it."""
    if not run.trainer_step_path(step).exists():
        return {}
    try:
        update = run.read_json(run.trainer_step_path(step))
        require_numbers(update, run.trainer_step_path(step))
        return update
    except ConfigError as error:
        logger.warning(f"{error.what} The trainer's metrics of step {step} are unknown.")
        return {}


def reusable_rollouts(run: RunDir, step: int) -> int:
    """Number of steps right after `step` with an undamaged rollout file. A rejected step is sampled again."""
    count = 0
    while (path := run.rollout_path(step + count + 1)).exists() and not (
        run.rejected_steps / path.stem
    ).exists():
        try:
            read_rollouts(path)
        except DataError as error:
            logger.warning(f"{error.what} It is sampled again.")
            break
        count += 1
    return count


def _same_files(model: Files, name: str, of_run: str) -> Files:
    """The model with a folder that exists: a hub model that left the cache is downloaded again.

    Raises ConfigError if it is another one. `of_run`: what the run did with it, in words.
    """
    if model.revision is not None and not model.path.is_dir():
        model = model.model_copy(update={"path": resolve_model(name, model.revision).path})
    if check_folder(model.path, "").fingerprint != model.fingerprint:
        raise ConfigError(
            f"The model in {model.path} is not the one that {of_run} "
            "(its fingerprint differs: weights, config, tokenizer, chat template or generation_config).",
            "Restore the original files, or start a new run.",
        )
    return model


def _check_inputs(recorded: RunConfig, config: TrainConfig) -> RunConfig:
    """Raise ConfigError unless data and models are the same as at the start of the run.

    Returns the run with model folders that exist.
    """
    resolved, data_sha256 = recorded.resolved, recorded.resolved.identity.data_sha256
    if data_sha256 is not None and train_data_hash(config) != data_sha256:
        raise ConfigError(
            f"{Path(config.data.path) / 'train.parquet'} is not the file that the run was trained on, or "
            "one of data.mix is not (the sha256 differs).",
            "Point --data to the folder it was moved to, or prepare it again in the same way.",
        )
    update: dict[str, Any] = {
        "model": _same_files(resolved.model, recorded.config.model.name, "the run was trained on")
    }
    if resolved.teacher is not None:
        name = recorded.config.algorithm.own_teacher or ""
        update["teacher"] = _same_files(resolved.teacher, name, "taught the run")
    return recorded.model_copy(update={"resolved": resolved.model_copy(update=update)})


def _require_work(run: RunDir, config: TrainConfig, done: int) -> None:
    """Raise ConfigError if every step and the final evaluation are done."""
    is_finished = done == config.num_steps and _status_is_done(run)
    if done > config.num_steps or is_finished:
        raise ConfigError(
            f"{run.root} is at step {done} of {config.num_steps} already.",
            f"Set more steps, e.g. --steps {done + 10}.",
        )


def _status_is_done(run: RunDir) -> bool:
    """Whether status.json has phase "done". False if a power cut emptied it."""
    if not run.status_path.exists():
        return False
    try:
        return read_status(run.status_path).phase == "done"
    except ConfigError as error:
        logger.warning(f"{error.what} The final evaluation is repeated.")
        return False


def _relocate(
    run: RunDir, recorded: RunConfig, placement: Placement, memory: MemoryPlan, trust: Trust
) -> Resolved:
    """Update paths and GPUs: the run may have been moved, with its adapters and its copy of a warm start."""
    old = recorded.resolved.identity
    identity = old.model_copy(
        update={
            "run_id": old.run_id or uuid.uuid4().hex,
            "lora_sync_path": run.adapters(recorded),
            "warm_start": run.warm_start if old.warm_start else None,
            "teacher": run.teacher if old.teacher else None,
        }
    )
    return recorded.resolved.model_copy(
        update={"placement": placement, "memory": memory, "trust": trust, "identity": identity}
    )


SAFE_CHANGES = (
    "shared_network",
    "checkpoint", "eval", "anomaly", "sync", "stop", "log", "num_steps", "num_epochs",
    "reward.num_workers", "reward.timeout_s", "reward.judge.url", "reward.judge.api_key_env",
    "reward.judge.max_concurrent", "reward.judge.requests_per_minute", "reward.judge.timeout_s",
    "reward.judge.patience_s", "reward.judge.retries", "reward.judge.on_unparsed",
    "algorithm.teacher_key_env",
    "trainer.step_timeout_s", "trainer.max_restarts",
    "engine.key_env", "engine.push_urls", "engine.push_key_env", "engine.ca_file", "engine.min_engines",
    "engine.start_timeout_s", "engine.stall_timeout_s", "engine.max_restarts",
    "data.path", "trainer.offload", "algorithm.max_feedback_tokens",
)  # fmt: skip
"""Sections and fields that do not change any result. data.path: the file is compared by its hash.
reward.judge: how a question gets its answer, not what it is.
trainer.offload only changes where the base and the AdamW moments are stored."""
ROUNDING_CHANGES = (
    "trainer.num_ranks",
    "trainer.hosts",
    "trainer.interface",
    "trainer.replicate_base",
    "trainer.num_threads",
    "trainer.tokens_per_micro_batch",
    "trainer.checkpointing",
    "trainer.attention",
    "trainer.deterministic",
    "engine.launcher",
    "engine.num_engines",
    "engine.urls",
    "engine.policies",
    "engine.max_num_seqs",
    "engine.kv_cache_gib",
    "engine.gpu_memory_utilization",
    "engine.sleep",
    "engine.gpus",
    "engine.tensor_parallel",
    "engine.max_loras",
)
"""Settings that change how a step is computed: its result stays the same up to rounding."""


def check_changes(old: TrainConfig, new: TrainConfig) -> None:
    """Raise ConfigError for changes that alter the result, naming both values; log changes of rounding."""
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    changed = [key for key in after if before.get(key) != after[key]]
    refused = [key for key in changed if not _is_under(key, (*SAFE_CHANGES, *ROUNDING_CHANGES))]
    if old.algorithm.teacher_url and new.algorithm.teacher_url and "algorithm.teacher" in refused:
        refused.remove("algorithm.teacher")  # the same model, by its name and tokenizer, at another address
    if old.optim.schedule != "constant" and "num_steps" in changed:
        refused.append("num_steps")
    if refused:
        changes = "; ".join(
            f"{key} is {_text(before.get(key))} and was given as {_text(after[key])}" for key in refused
        )
        why = f" (optim.schedule={old.optim.schedule} ends at num_steps)" if "num_steps" in refused else ""
        raise ConfigError(
            f"--resume continues a run unchanged, and this would change its result: {changes}{why}.",
            "Drop the change, or start a new run with --from-adapter.",
        )
    for key in changed:
        if _is_under(key, ROUNDING_CHANGES):
            logger.info(
                f"{key} changes from {_text(before.get(key))} to {_text(after[key])}: "
                "the result is the same up to rounding"
            )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _is_under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _text(value: Any) -> str:
    """The value as typed on the command line."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
