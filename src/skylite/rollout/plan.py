"""From settings to a run directory. Everything is checked here, before a process starts."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import skylite
from skylite.adapters.import_adapter import (
    adopt_adapter,
    check_warm_start,
    copy_warm_start,
    expand_adapter_path,
)
from skylite.adapters.target_modules import check_target_names
from skylite.config.provenance import NOTHING_TYPED, Provenance
from skylite.config.resolved import MemoryPlan, ModelFiles, Placement, Resolved, RunIdentity, Trust
from skylite.config.train import RunConfig, TrainConfig
from skylite.data.chat_tokenizer import load_tokenizer, read_template, template_notes
from skylite.data.prompts import PromptFileInfo
from skylite.engine.connections import open_files
from skylite.engine.interface import Launcher
from skylite.engine.launchers import load_launcher
from skylite.engine.model_limits import check_context, check_trainable
from skylite.errors import ConfigError, convert_os_errors
from skylite.hub.resolve import ResolvedModel, resolve_model
from skylite.loggers.writers import require_libraries
from skylite.notes import Note, log_notes, notes_of
from skylite.processes.gpus import why_no_gpu
from skylite.processes.hardware import choose_device, choose_dtype, machine_facts, triton_note
from skylite.processes.own_network import check_network
from skylite.processes.streams import raise_file_limit
from skylite.resources.gpu_memory_plan import plan_memory
from skylite.resources.gpu_placement import place
from skylite.rollout.automatic_settings import device_defaults, epochs_to_steps
from skylite.rollout.data_filter import without_foreign_filter
from skylite.rollout.plan_messages import data_note, held_out_note, settings_notes
from skylite.rollout.prompt_check import clock_note
from skylite.rollout.sources import ScoredData, Source, source_for
from skylite.rollout.trusted_programs import allow_algorithm, allow_launcher
from skylite.run.files import sha256_file, write_json
from skylite.run.own_folders import mark_sync_folder, refuse_live
from skylite.run.run_dir import RunDir, published_versions
from skylite.sandbox.sandbox import require_sandbox
from skylite.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A checked run: all that the parent needs to start it."""

    run: RunDir
    config: TrainConfig
    resolved: Resolved
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """The first eval.limit problems of eval.split."""
    rewards: tuple[str, ...]
    """Specs of what scores: reward functions, or the episodes of an environment."""
    first_step: int
    """1, or the step after the checkpoint a resumed run continues from."""
    resumed: bool = False
    """Continues an existing run, from a checkpoint or, if there is none, from its start."""
    reuse_rollouts: bool = False
    """Train again on the stored rollouts of steps after the checkpoint."""

    @property
    def scored(self) -> ScoredData:
        """What scores the completions."""
        return ScoredData(config=self.config, rewards=self.rewards, programs=self.resolved.trust.programs)

    @property
    def run_config(self) -> RunConfig:
        """What config.json holds."""
        return RunConfig(skylite_version=skylite.__version__, config=self.config, resolved=self.resolved)


def plan_run(
    config: TrainConfig,
    run: RunDir,
    provenance: Provenance = NOTHING_TYPED,
    *,
    notes: Sequence[Note] = (),
) -> RunPlan:
    """Check data, reward, model and machine. Writes nothing. Raises SkyliteError subclasses.

    `provenance`: what the user typed, and the recipe. `notes`: choices made before, to print and record.
    """
    for folder in (run.root, sync_folder(config, run)):
        refuse_live(folder)
    check_folders(config, run)
    config, filter_note = without_foreign_filter(config, provenance)
    source = source_for(config)
    train, info = source.read(config, "train")
    held_out = held_out_prompts(config)
    template = replace(read_template(config.data), now=datetime.now().replace(microsecond=0))
    scored = plan_rewards(source, config, info, train, provenance)
    launcher = load_launcher(scored.config, scored.programs)
    config, device_notes = device_defaults(scored.config, choose_device())
    model = choose_model(config, launcher)
    config, adapter_notes = adopt_adapter(config, _chosen(config, provenance), model.path)
    with contextlib.closing(load_tokenizer(model.path, template)) as tokenizer:
        prompts = source.check_prompts(tokenizer, config, model.path, train, held_out)
        template_note = clock_note(tokenizer, template)
    config, length_note = epochs_to_steps(config, len(prompts.train))
    notes = notes_of(
        *notes,
        *(data_note(config, info, len(prompts.train)), filter_note, held_out_note(prompts.held_out)),
        *template_notes(config.data),
        template_note,
        *prompts.notes,
        *scored.notes,
        *adapter_notes,
        *(length_note, *device_notes),
    )
    placement, memory, notes = choose_placement(config, model, launcher, notes)
    resolved = Resolved(
        model=ModelFiles(
            path=model.path,
            revision=model.revision,
            fingerprint=model.fingerprint,
            chat_template=template.text,
            template_time=template.now,
        ),
        placement=placement,
        memory=memory,
        trust=Trust(programs=scored.programs),
        identity=RunIdentity(
            run_id=uuid.uuid4().hex,
            lora_sync_path=sync_folder(config, run),
            warm_start=run.warm_start if config.lora.from_adapter is not None else None,
            data_sha256=train_data_hash(config),
            dropped_prompts=prompts.dropped,
        ),
        notes=notes,
    )
    log_notes(resolved.notes)
    return RunPlan(
        run=run,
        config=config,
        resolved=resolved,
        train=prompts.train,
        held_out=prompts.held_out,
        rewards=scored.rewards,
        first_step=1,
    )


def plan_rewards(
    source: Source,
    config: TrainConfig,
    info: PromptFileInfo,
    train: Sequence[Prompt],
    provenance: Provenance,
) -> ScoredData:
    """What scores the data, after a call of each reward, with all programs that the user allows.

    Raises SkyliteError subclasses.
    """
    scored = source.allow(
        config,
        info,
        data=Path(config.data.path),
        provenance=provenance,
        keep=config.reward.model_fields_set,
    )
    notes = [*scored.notes, *source.check_rewards(scored, info, train)]
    programs = scored.programs | allow_algorithm(scored.config.algorithm, provenance)
    programs |= allow_launcher(scored.config, provenance)
    return replace(scored, programs=programs, notes=notes)


def _chosen(config: TrainConfig, provenance: Provenance) -> set[str]:
    """The settings of LoRA that the user chose, and not a recipe."""
    names = {f"lora.{name}" for name in config.lora.model_fields_set}
    return {name for name in names if provenance.file_of(name) is None}


def choose_model(config: TrainConfig, launcher: Launcher) -> ResolvedModel:
    """The model's folder, on a machine that can train it. Raises SkyliteError."""
    device = choose_device()
    choose_dtype(config.model.dtype, device)
    check_device(config, device)
    check_network(config)
    if config.engine.num_engines:
        launcher.check_machine(device)
    model = resolve_model(config.model.name)
    check_trainable(model.path)
    return model


def choose_placement(
    config: TrainConfig, model: ResolvedModel, launcher: Launcher, notes: Sequence[Note]
) -> tuple[Placement, MemoryPlan, list[Note]]:
    """Choose dtype, GPUs and memory; add a note on each choice. Raises SkyliteError."""
    device = choose_device()
    dtype, dtype_note = choose_dtype(config.model.dtype, device)
    gpus = place(config, device)
    target_notes = check_target_names(model.path, config.lora)
    check_context(config, model.path)
    cpu_lora = launcher.choose_cpu_lora(config, dtype, model.path)
    of_engines: list[Note | str | None] = []
    if config.engine.num_engines:
        of_engines = [
            launcher.check_model(model.path, device, config.lora.rank, config.lora),
            *launcher.notes(config, device, dtype, cpu_lora),
        ]
    memory, memory_notes = plan_memory(launcher, config, model.path, device, dtype, cpu_lora, gpus)
    notes = notes_of(
        *notes,
        why_no_gpu() if device == "cpu" else None,
        *gpus.notes,
        dtype_note,
        *settings_notes(config),
        model.note,
        *target_notes,
        triton_note(device),
        *of_engines,
        *memory_notes,
    )
    if config.lora.from_adapter is not None:
        notes += check_warm_start(config, model.path, model.fingerprint)
    placement = Placement(
        device=device,
        dtype=dtype,
        cpu_lora=cpu_lora,
        rank_gpus=gpus.rank_gpus,
        engine_gpus=gpus.engine_gpus,
    )
    return placement, memory, notes


def check_device(config: TrainConfig, device: str) -> None:
    """Raise ConfigError for settings that need a GPU if there is none, or more open files than allowed.

    ConfigError also without a sandbox or a logger's library. Raises the soft limit on open files.
    """
    require_libraries(config.log.to)
    raise_file_limit(open_files(config))
    require_sandbox("the model's chat template")
    if config.trainer.attention == "flex" and device == "cpu":
        raise ConfigError(
            "trainer.attention=flex has no backward pass on a CPU, and this run has no GPU.",
            "Use trainer.attention=sdpa.",
        )
    if config.trainer.offload and device == "cpu":
        raise ConfigError(
            "trainer.offload=true moves tensors off a GPU, and this run has no GPU.",
            "Use trainer.offload=false.",
        )


def held_out_prompts(config: TrainConfig) -> list[Prompt]:
    """The first eval.limit problems of eval.split. Raises DataError."""
    return (
        source_for(config).read(config, config.eval.split)[0][: config.eval.limit]
        if config.eval.limit
        else []
    )


def train_data_hash(config: TrainConfig) -> str:
    """sha256 of the training split: a resumed run needs the same prompts in the same order."""
    return sha256_file(Path(config.data.path) / "train.parquet")


def sync_folder(config: TrainConfig, run: RunDir) -> Path:
    return Path(config.lora.lora_sync_path or run.default_adapters).resolve()


def check_folders(config: TrainConfig, run: RunDir) -> None:
    """Raise ConfigError if the folder holds a run or a warm start, or lora_sync_path other adapters."""
    if run.config_path.exists():
        raise ConfigError(
            f"{run.root} holds a run already.",
            f"Use --resume {run.root} to continue it, or choose another --run folder.",
        )
    if run.warm_start.exists():
        raise ConfigError(
            f"{run.warm_start} already exists, from an interrupted start.",
            "Remove it, or choose another --run folder.",
        )
    sync = sync_folder(config, run)
    if published := published_versions(sync):
        raise ConfigError(
            f"{sync} holds adapters of another run, such as {published[-1].name}; skylite never overwrites "
            "them.",
            "Move them away, or choose another lora.lora_sync_path.",
        )


def write_run(plan: RunPlan) -> None:
    """Create the run directory, its copy of a warm start, and its config.json. The caller holds the locks.

    Raises ConfigError before writing anything if another process has taken the folders since the plan.
    """
    check_folders(plan.config, plan.run)
    if plan.config.lora.from_adapter is not None:
        copy_warm_start(expand_adapter_path(plan.config.lora.from_adapter), plan.run)
    for folder in (
        plan.run.rollouts,
        plan.run.trainer_steps,
        plan.run.checkpoints,
        plan.run.logs,
        plan.resolved.identity.lora_sync_path,
    ):
        with convert_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    write_config(plan)


def write_config(plan: RunPlan) -> None:
    """Write config.json, which the child processes read, and mark a lora_sync_path that the user chose.

    Records the machine too (machine.json).
    """
    write_json(plan.run.machine_path, machine_facts())
    write_json(plan.run.config_path, plan.run_config.model_dump(mode="json"))
    mark_sync_folder(plan.run_config)
