"""Going on with a run: from which checkpoint, with which settings, and what a dead attempt left beyond it is put away."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import skylite
from skylite.adapters.retention import remove_folder, remove_leftovers, remove_scores_after
from skylite.config.loading import change_config, read_run_config
from skylite.config.train import Resolved, RunConfig, TrainConfig
from skylite.errors import ConfigError, DataError
from skylite.hub.resolve import check_folder
from skylite.orchestrator.metrics import recovered_metrics
from skylite.orchestrator.plan import (
    RunPlan,
    check_device,
    held_out_prompts,
    read_split,
    shm_path,
    train_data_hash,
)
from skylite.rewards.named import names_reward, remember, require_named
from skylite.run.checkpoint_folder import checkpoint_steps, choose_checkpoint, step_of
from skylite.run.files import fsync_path
from skylite.run.metrics import read_metrics, write_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir, published_versions
from skylite.run.status import read_status

logger = logging.getLogger(__name__)


def plan_resume(
    run: RunDir,
    *,
    overrides: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    at: int | None = None,
) -> RunPlan:
    """The plan of an existing run that goes on from its newest whole checkpoint, or from that of step `at`. Nothing is written.

    Raises ConfigError for a change that would give another run, for other data or another model, and when there is nothing left to do.
    """
    recorded = read_run_config(run.config_path)
    config = change_config(recorded.config, overrides or {}, settings)
    train, info = read_split(config, "train")
    reward = recorded.config.reward.function or info.reward
    if names_reward(settings) and config.reward.function == reward:
        # No change: the user says that this program may run.
        remember(reward)
        config = config.model_copy(
            update={"reward": config.reward.model_copy(update={"function": recorded.config.reward.function})}
        )
    check_changes(recorded.config, config)
    check_device(config, recorded.resolved.device)
    require_named(reward, run.config_path if recorded.config.reward.function else Path(config.data.path))
    _check_inputs(recorded, config)
    done = choose_checkpoint(run, at)
    _require_work(run, config, done)
    logger.info(
        f"resuming {run.root} after step {done} of {config.num_steps}" + ("" if done else ", from its start")
    )
    if recorded.skylite_version != skylite.__version__:
        logger.warning(
            f"the run was made by skylite {recorded.skylite_version}, and this is {skylite.__version__}"
        )
    return RunPlan(
        run=run, config=config, resolved=_where_it_is_now(run, recorded, config), train=train, held_out=held_out_prompts(config),
        reward=reward, first_step=done + 1, resumed=True, reuse_rollouts=at is None,
    )  # fmt: skip


def forget_after(run: RunDir, lora_sync_path: Path, step: int, *, reuse_rollouts: bool) -> int:
    """Remove what lies after `step` and unfinished files. Returns how many recorded steps go.

    Rollouts that were sampled after it are kept where `reuse_rollouts`: a step is a function of its rollouts, so nothing is sampled
    twice. The update file of `step` goes too: the resumed trainer writes it again once its adapter stands, and the parent waits for that.
    """
    lines = read_metrics(run.metrics_path)
    before = [line for line in lines if line["step"] <= step]
    recovered = recover_records(run, before[-1]["step"] if before else 0, step)
    kept = reusable_rollouts(run, step) if reuse_rollouts else 0
    # A kill or a power cut may come anywhere in here. Checkpoints go first, the newest before all, so that the one which the next resume
    # goes on from never lacks what it was made of; finished steps are recorded before what they were recovered from goes.
    for later in sorted((s for s in checkpoint_steps(run) if s > step), reverse=True):
        remove_folder(run.checkpoint_path(later))
    if run.checkpoints.exists():
        fsync_path(run.checkpoints)
    for adapter in reversed([a for a in published_versions(lora_sync_path) if a.version > step]):
        remove_folder(adapter.path)
    write_metrics(run.metrics_path, [*before, *recovered])
    for folder, first in ((run.trainer_steps, step), (run.rollouts, step + 1 + kept)):
        for path in (p for p in folder.glob("step-*") if step_of(p) >= first):
            path.unlink()
    remove_scores_after(run, step)
    remove_leftovers(run, lora_sync_path)
    if kept:
        logger.info(
            f"steps {step + 1} to {step + kept} are trained again from their stored rollouts; nothing is sampled twice"
        )
    return len(lines) - len(before)


def recover_records(run: RunDir, recorded: int, done: int) -> list[dict[str, Any]]:
    """Metrics of the steps after `recorded` up to `done`: the checkpoint has them, and the parent died before it recorded them."""
    steps = [k for k in range(recorded + 1, done + 1) if run.rollout_path(k).exists()]
    return [recovered_metrics(k, read_rollouts(run.rollout_path(k)), _stored_update(run, k)) for k in steps]


def _stored_update(run: RunDir, step: int) -> dict[str, Any]:
    """The trainer's word on a finished step; empty when it was not written or is damaged."""
    if not run.trainer_step_path(step).exists():
        return {}
    try:
        return run.read_json(run.trainer_step_path(step))
    except ConfigError as error:
        logger.warning(f"{error.what} The trainer's metrics of step {step} are unknown.")
        return {}


def reusable_rollouts(run: RunDir, step: int) -> int:
    """How many steps right after `step` have a whole rollout file. Those of a step that went bad are sampled anew."""
    count = 0
    while (path := run.rollout_path(step + count + 1)).exists() and not any(
        run.rejected_steps.glob(f"{path.stem}*")
    ):
        try:
            read_rollouts(path)
        except DataError as error:
            logger.warning(f"{error.what} It is sampled again.")
            break
        count += 1
    return count


def _check_inputs(recorded: RunConfig, config: TrainConfig) -> None:
    """Data and model are still those the run began with. Raises ConfigError."""
    resolved = recorded.resolved
    if resolved.data_sha256 is not None and train_data_hash(config) != resolved.data_sha256:
        raise ConfigError(
            f"{Path(config.data.path) / 'train.parquet'} is not the file that the run has been trained on (its sha256 is another).",
            "Give --data the folder it has been moved to, or prepare it again as it was.",
        )
    if check_folder(Path(resolved.model_path), "").fingerprint != resolved.model_fingerprint:
        raise ConfigError(
            f"The model in {resolved.model_path} is not the one that the run has been trained on (its fingerprint is another).",
            "Put the old one back, or start a new run.",
        )


def _require_work(run: RunDir, config: TrainConfig, done: int) -> None:
    """Raise ConfigError when every step, and the evaluation after them, is done."""
    is_finished = done == config.num_steps and _is_told_done(run)
    if done > config.num_steps or is_finished:
        raise ConfigError(
            f"{run.root} is at step {done} of {config.num_steps} already.",
            f"Give more steps, e.g. --steps {done + 10}.",
        )


def _is_told_done(run: RunDir) -> bool:
    """Whether status.json says so; a missing or damaged one says no."""
    if not run.status_path.exists():
        return False
    try:
        return read_status(run.status_path).phase == "done"
    except ConfigError as error:
        logger.warning(f"{error.what} What comes after the last step is done again.")
        return False


def _where_it_is_now(run: RunDir, recorded: RunConfig, config: TrainConfig) -> Resolved:
    """A run may have been moved, and its adapters and its copy of a warm start with it."""
    old = recorded.resolved
    update = {
        "warm_start": str(run.warm_start) if old.warm_start else None,
        "lora_sync_path": str(run.adapters(recorded)),
        "shm_path": shm_path(config, old.model_fingerprint),
        "run_id": old.run_id or uuid.uuid4().hex,
    }
    return old.model_copy(update=update)


HARMLESS = (
    "checkpoint", "eval", "anomaly", "sync", "stop", "num_steps",
    "reward.num_workers", "reward.timeout_s", "trainer.step_timeout_s", "trainer.max_restarts",
    "engine.start_timeout_s", "engine.stall_timeout_s", "engine.max_restarts",
    "data.path", "model.use_shm", "trainer.offload",
)  # fmt: skip
"""Sections and fields that no number of a step depends on. data.path: the file itself is compared by its hash.
The last two: where the model and the moments lie."""
ROUNDING = (
    "trainer.num_ranks",
    "trainer.num_threads",
    "trainer.tokens_per_micro_batch",
    "trainer.checkpointing",
    "trainer.attention",
    "trainer.deterministic",
    "engine.num_engines",
    "engine.max_num_seqs",
    "engine.kv_cache_gib",
    "engine.gpu_memory_utilization",
)
"""How the same step is cut and computed: the result is the same up to rounding."""


def check_changes(old: TrainConfig, new: TrainConfig) -> None:
    """Raise ConfigError that names every change (both values) that would give another result; log those that change rounding."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    changed = [key for key in after if before.get(key) != after[key]]
    refused = [key for key in changed if not _is_under(key, (*HARMLESS, *ROUNDING))]
    if old.optim.schedule != "constant" and "num_steps" in changed:
        refused.append("num_steps")
    if refused:
        said = "; ".join(
            f"{key} is {_text(before.get(key))} and was given as {_text(after[key])}" for key in refused
        )
        why = f" (optim.schedule={old.optim.schedule} ends at num_steps)" if "num_steps" in refused else ""
        raise ConfigError(
            f"--resume goes on with a run as it was, and this would change its result: {said}{why}.",
            "Leave it away, or begin a new run with --from-adapter.",
        )
    for key in changed:
        if _is_under(key, ROUNDING):
            logger.info(
                f"{key} is {_text(after[key])} from here on, before {_text(before.get(key))}: the result is the same up to rounding"
            )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections to dotted fields."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _is_under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _text(value: Any) -> str:
    """As one would type it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
