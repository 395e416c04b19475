"""From flags to a run directory: everything that can be refused is refused here, before a process starts."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import skylite
from skylite.adapters.import_adapter import check_warm_start, copy_warm_start, expand_adapter_path
from skylite.config.train import LOWEST_USUAL_LR, Resolved, RunConfig, TrainConfig
from skylite.data.prompts import PromptFileInfo, read_prompts
from skylite.engine.server import choose_cpu_lora, engine_notes
from skylite.errors import ConfigError
from skylite.hub.resolve import resolve_model
from skylite.hub.shared_memory import shared_copy
from skylite.orchestrator.programs import allow_algorithm, allow_rewards
from skylite.processes.machine import choose_device, choose_dtype, cpu_cores
from skylite.rewards.components import load_components
from skylite.run.files import convert_os_errors, sha256_file, write_json
from skylite.run.ownership import mark_sync_folder
from skylite.run.run_dir import RunDir, published_versions
from skylite.types import Prompt

logger = logging.getLogger(__name__)
WARNING = "warning: "
"""How a note in config.json says that it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A checked run: what the orchestrator needs besides the children."""

    run: RunDir
    config: TrainConfig
    resolved: Resolved
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """The first eval.limit problems of eval.split."""
    rewards: tuple[str, ...]
    """Specs of the reward functions."""
    first_step: int
    """1, or the step after the checkpoint a resumed run continues from."""
    resumed: bool = False
    """Goes on with a run, from a checkpoint or, without one, from its start."""
    reuse_rollouts: bool = False
    """A resumed run trains again on rollouts that were sampled after its checkpoint."""

    @property
    def run_config(self) -> RunConfig:
        """What config.json holds."""
        return RunConfig(skylite_version=skylite.__version__, config=self.config, resolved=self.resolved)


def plan_run(config: TrainConfig, run: RunDir) -> RunPlan:
    """Check data, reward, model and machine. Nothing is written. Raises SkyliteError subclasses."""
    train, info = read_split(config, "train")
    held_out = held_out_prompts(config)
    notes = [data_note(config, info, len(train))]
    rewards = allow_rewards(config.reward.functions, info, Path(config.data.path))
    load_components(rewards, config.reward.weights, train[0])
    allow_algorithm(config.algorithm)
    device = choose_device()
    dtype, dtype_note = choose_dtype(config.model.dtype, device)
    check_device(config, device)
    notes += [dtype_note, *settings_notes(config)]
    if config.trainer.deterministic and config.trainer.num_threads is None:
        config = with_threads(config, cpu_cores() // config.trainer.num_ranks)
        notes.append(
            f"deterministic: {config.trainer.num_threads} CPU threads a rank, wherever the run goes on"
        )
    model = resolve_model(config.model.name)
    same_bits = config.trainer.deterministic
    cpu_lora = choose_cpu_lora(config.engine.cpu_lora, dtype, model.path, deterministic=same_bits)
    notes += [
        model.note,
        *engine_notes(device, dtype, config.engine.cpu_lora, cpu_lora, deterministic=same_bits),
    ]
    if config.lora.from_adapter is not None:
        notes += check_warm_start(config, model.path, model.fingerprint)
    notes = [text for text in notes if text]
    log_notes(notes)
    resolved = Resolved(
        model_path=str(model.path),
        shm_path=shm_path(config, model.fingerprint),
        model_fingerprint=model.fingerprint,
        data_sha256=train_data_hash(config),
        dtype=dtype,
        device=device,
        cpu_lora=cpu_lora,
        lora_sync_path=str(Path(config.lora.lora_sync_path or run.default_adapters).resolve()),
        run_id=uuid.uuid4().hex,
        warm_start=str(run.warm_start) if config.lora.from_adapter is not None else None,
        notes=notes,
    )
    return RunPlan(
        run=run,
        config=config,
        resolved=resolved,
        train=train,
        held_out=held_out,
        rewards=rewards,
        first_step=1,
    )


def settings_notes(config: TrainConfig) -> list[str]:
    """Notes on settings that are unusual or that vLLM rounds up."""
    notes = []
    if config.lora.vllm_rank != config.lora.rank:
        notes.append(
            f"vLLM is started for LoRA rank {config.lora.vllm_rank}, the smallest it allows that holds rank {config.lora.rank}"
        )
    if config.optim.lr < LOWEST_USUAL_LR:
        notes.append(
            f"warning: optim.lr={config.optim.lr:g} is under {LOWEST_USUAL_LR:g}; LoRA hardly learns at such rates"
        )
    return notes


def log_notes(notes: Sequence[str]) -> None:
    """Log the notes of config.json; one that begins with "warning: " is a warning."""
    for text in notes:
        if text.startswith(WARNING):
            logger.warning(text.removeprefix(WARNING))
        else:
            logger.info(text)


def check_device(config: TrainConfig, device: str) -> None:
    """Raise ConfigError for what only a GPU can do."""
    if config.trainer.attention == "flex" and device == "cpu":
        raise ConfigError(
            "trainer.attention=flex has no backward pass on a CPU, and this run has no GPU.",
            "Leave it at sdpa.",
        )
    if config.trainer.offload and device == "cpu":
        raise ConfigError(
            "trainer.offload=true moves things off a GPU, and this run has none.", "Leave it false on a CPU."
        )


def shm_path(config: TrainConfig, fingerprint: str) -> str | None:
    """Where model.use_shm holds the model; the last run that uses that folder deletes it, so it is never taken from a file."""
    return str(shared_copy(fingerprint)) if config.model.use_shm else None


def read_split(config: TrainConfig, split: str) -> tuple[list[Prompt], PromptFileInfo]:
    """Prompts of a split at the configured difficulty. Raises DataError."""
    return read_prompts(Path(config.data.path) / f"{split}.parquet", difficulty=tuple(config.data.difficulty))


def with_threads(config: TrainConfig, num_threads: int) -> TrainConfig:
    """With a fixed number of CPU threads a rank: sums are rounded by how they are shared out."""
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"num_threads": max(1, num_threads)})}
    )


def held_out_prompts(config: TrainConfig) -> list[Prompt]:
    """The first eval.limit problems of eval.split. Raises DataError."""
    return read_split(config, config.eval.split)[0][: config.eval.limit] if config.eval.limit else []


def train_data_hash(config: TrainConfig) -> str:
    """sha256 of the training split: a run that goes on must find the same prompts in the same order."""
    return sha256_file(Path(config.data.path) / "train.parquet")


def data_note(config: TrainConfig, info: PromptFileInfo, count: int) -> str:
    """What the run trains on, in words; recorded in the run."""
    difficulty = f", difficulty {config.data.difficulty}" if config.data.difficulty else ""
    return f"data: {info.dataset} ({info.source_kind}: {info.source}){difficulty}, {count} training problems, reward {info.reward}"


def write_run(plan: RunPlan) -> None:
    """Create the run directory, its copy of a warm start, and its config.json. Its folders must be locked.

    Raises ConfigError, and has written nothing, when the folder holds a run already, or its lora_sync_path another's adapters.
    """
    if plan.run.config_path.exists():
        raise ConfigError(
            f"{plan.run.root} holds a run already.",
            f"Use --resume {plan.run.root} to go on with it, or another --run folder.",
        )
    published = published_versions(Path(plan.resolved.lora_sync_path))
    if published:
        raise ConfigError(
            f"{plan.resolved.lora_sync_path} holds adapters of another run, such as {published[-1].name}; they are never written over.",
            "Move them away, or give another lora.lora_sync_path.",
        )
    if plan.config.lora.from_adapter is not None:
        copy_warm_start(expand_adapter_path(plan.config.lora.from_adapter), plan.run)
    for folder in (
        plan.run.rollouts,
        plan.run.trainer_steps,
        plan.run.checkpoints,
        plan.run.logs,
        Path(plan.resolved.lora_sync_path),
    ):
        with convert_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    write_config(plan)


def write_config(plan: RunPlan) -> None:
    """Write config.json, which is what the children are told, and the mark in a sync folder of the user's own."""
    write_json(plan.run.config_path, plan.run_config.model_dump(mode="json"))
    mark_sync_folder(plan.run_config)
